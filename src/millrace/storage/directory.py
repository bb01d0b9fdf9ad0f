"""One data directory: whose it is, whether it can be used, and the checkpoints of the logs in it.

Not here: the logs of a broker in all of its directories (`logdirs`), what is believed of files at a start (`startup`).
Owner: the event loop; checkpoints are also written by the flusher's thread, one at a time.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from millrace.clock import Clock
from millrace.errors import ConfigError, StorageError
from millrace.model import UNASSIGNED_DIRECTORY, TopicPartition, decode_uuid, encode_uuid, new_topic_id
from millrace.storage import checkpoint
from millrace.storage.files import Files
from millrace.storage.flusher import Flusher
from millrace.storage.log import Log

logger = logging.getLogger(__name__)

LOCK: Final = ".lock"
META: Final = "meta.properties"


class LogDirectory:
    """One data directory."""

    def __init__(self, path: Path, files: Files, clock: Clock) -> None:
        self.path = path
        self.logs: dict[TopicPartition, Log] = {}
        self.failure: StorageError | None = None
        self.directory_id = UNASSIGNED_DIRECTORY
        self.is_full = False
        """Whether it takes no more records until there is space again (`space`)."""
        self.full_until_s = float("-inf")
        self.clean_epoch = -1
        """The incarnation of the broker that stopped cleanly here; -1 where none did."""
        self.missing: dict[TopicPartition, uuid.UUID] = {}
        """Logs that there were, and that were not found at the start."""
        self.flusher = Flusher(
            path.name, files=files, clock=clock, on_failure=self._flush_failed, checkpoint=self._recovery_points_later
        )
        self.on_failure: Callable[[LogDirectory], object] | None = None
        self.checkpointed: set[TopicPartition] = set()
        """The partitions that a checkpoint on disk may speak of."""
        self._files = files
        self._lock_fd = -1
        # The flusher's thread writes recovery points too: one at a time, and never an older state over a newer one.
        self._writing = threading.Lock()
        self._renderings = itertools.count(1)
        self._written: dict[str, tuple[int, bytes]] = {}
        self._aging: set[str] = set()
        """Hints that could not be written at the last turn."""

    def __repr__(self) -> str:
        return f"LogDirectory({self.path}, {len(self.logs)} logs{', offline' if self.failure else ''})"

    def lock(self) -> None:
        """Take the directory for this broker; another process (or another broker in this one) is refused."""
        self._files.make_directory(self.path)
        try:
            fd = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StorageError(f"cannot lock {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise ConfigError(f"the data directory {self.path} is in use by another broker") from error
        self._lock_fd = fd

    def unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def fail(self, error: StorageError) -> None:
        """Go offline with every log."""
        if self.failure is not None:
            return
        self.failure = error
        logger.error("data directory %s is offline: %s", self.path, error)
        for log in self.logs.values():
            log.fail(error)
        if self.on_failure is not None:
            self.on_failure(self)

    def _flush_failed(self, error: StorageError) -> None:
        self.fail(error)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def recovery_points(self) -> dict[TopicPartition, int]:
        """Up to where each log is on disk; a log that is offline keeps what was said of it."""
        return {tp: log.flushed_offset for tp, log in self.logs.items() if log.has_directory}

    def start_offsets(self) -> dict[TopicPartition, int]:
        return {partition: log.start_offset for partition, log in self.logs.items() if log.start_offset > 0}

    def cleaned_offsets(self) -> dict[TopicPartition, int]:
        return {partition: log.cleaned_offset for partition, log in self.logs.items() if log.cleaned_offset > 0}

    def render_cleaned_offsets(self) -> Callable[[], None]:
        """As `render_hint`: how far compaction has come. A directory without compacted logs has no such file."""
        offsets = self.cleaned_offsets()
        if not offsets and checkpoint.CLEANED_OFFSETS not in self._written:
            return lambda: None
        return self.render_hint(checkpoint.CLEANED_OFFSETS, offsets)

    def render(self, name: str, offsets: Mapping[TopicPartition, int]) -> Callable[[], None]:
        """The call that writes `offsets`, as they are now, to a checkpoint; it may be made in another thread."""
        self.checkpointed.update(offsets)
        return self._render(name, checkpoint.render_offsets(offsets))

    def _render(self, name: str, data: bytes) -> Callable[[], None]:
        number = next(self._renderings)
        return lambda: self._write(name, number, data)

    def render_hint(self, name: str, offsets: Mapping[TopicPartition, int]) -> Callable[[], None]:
        """As `render`, where nothing depends on what the file says: it may be older than it should be."""
        return self._as_hint(name, self.render(name, offsets))

    def _as_hint(self, name: str, write: Callable[[], None]) -> Callable[[], None]:
        def try_to_write() -> None:
            try:
                write()
            except StorageError as error:
                if name not in self._aging:
                    self._aging.add(name)
                    logger.error("%s grows old until it can be written again: %s", self.path / name, error)  # noqa: TRY400
            else:
                if name in self._aging:
                    self._aging.remove(name)
                    logger.info("%s can be written again", self.path / name)

        return try_to_write

    def _write(self, name: str, number: int, data: bytes) -> None:
        with self._writing:
            last_number, last_data = self._written.get(name, (0, None))
            if self.failure is None and number > last_number:
                if data != last_data:
                    self._files.replace_bytes(self.path / name, data)
                self._written[name] = (number, data)

    def render_logs(self, topic_ids: Mapping[TopicPartition, uuid.UUID]) -> Callable[[], None]:
        """As `render`: which logs there are. One counts from its first sync on: before, a power cut may take it."""
        made = {tp: topic_ids[tp] for tp, log in self.logs.items() if log.flushed_offset > 0 and tp in topic_ids}
        return self._render(checkpoint.LOGS, checkpoint.render_logs({**self.missing, **made}))

    def refresh_logs(self, topic_ids: Mapping[TopicPartition, uuid.UUID]) -> None:
        """The same as a hint: a log that goes missing before it is listed is not missed."""
        self._as_hint(checkpoint.LOGS, self.render_logs(topic_ids))()

    def write_offsets(self) -> None:
        """Checkpoint recovery points and start offsets, before something that they must not contradict after a crash.

        Raises `StorageError` where that is not possible: then it must not be done.
        """
        self.render(checkpoint.RECOVERY_POINTS, self.recovery_points())()
        self.render(checkpoint.LOG_STARTS, self.start_offsets())()
        self.render_cleaned_offsets()()

    def refresh_offsets(self) -> None:
        """The same as hints: a crash will scan a little less."""
        self.render_hint(checkpoint.RECOVERY_POINTS, self.recovery_points())()
        self.render_hint(checkpoint.LOG_STARTS, self.start_offsets())()
        self.render_cleaned_offsets()()

    def refresh_high_watermarks(self, high_watermarks: Mapping[TopicPartition, int]) -> None:
        """Keep what is committed of the logs here, for the next start."""
        here = {partition: offset for partition, offset in high_watermarks.items() if partition in self.logs}
        self.render_hint(checkpoint.HIGH_WATERMARKS, here)()

    def _recovery_points_later(self) -> Callable[[], object]:
        return self.render_hint(checkpoint.RECOVERY_POINTS, self.recovery_points())

    def forget_checkpointed(self, partition: TopicPartition) -> None:
        """Before a log is made: what the checkpoints say of an earlier one of that name must not be taken for it."""
        if partition in self.checkpointed:
            self.write_offsets()
            self.checkpointed = set(self.logs)


def parse_meta(data: bytes) -> dict[str, str]:
    """The fields of `meta.properties`; without `version` 1 among them it is damaged."""
    fields: dict[str, str] = {}
    for line in data.decode(errors="replace").splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            fields[name.strip()] = value.strip()
    return fields


def check_meta(directory: LogDirectory, files: Files, node_id: int, cluster_id: str | None) -> None:
    """Read or write `meta.properties`: a directory serves one broker of one cluster."""
    path = directory.path / META
    data = files.read_bytes(path)
    fields = parse_meta(data or b"")
    if data is not None and fields.get("version") != "1":
        logger.warning("%s is damaged and is written again", path)
        fields = {}
    if fields.get("node.id", str(node_id)) != str(node_id):
        raise ConfigError(f"{directory.path} belongs to broker {fields['node.id']}, this is broker {node_id}")
    if cluster_id is not None and fields.get("cluster.id", cluster_id) != cluster_id:
        raise ConfigError(f"{directory.path} belongs to cluster {fields['cluster.id']}, this is cluster {cluster_id}")
    known = decode_uuid(fields.get("directory.id", ""))
    if known is None:
        logger.info("%s is new: replicas that lay here before are not expected in it", directory.path)
    directory.directory_id = encode_uuid(known or new_topic_id())
    wanted = {**fields, "version": "1", "node.id": str(node_id), "directory.id": directory.directory_id}
    if cluster_id is not None:
        wanted["cluster.id"] = cluster_id
    if wanted != fields:
        files.replace_bytes(path, "".join(f"{name}={value}\n" for name, value in sorted(wanted.items())).encode())
