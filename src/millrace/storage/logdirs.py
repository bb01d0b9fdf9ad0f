"""The data directories of a broker and the logs in them.

    <dir>/.lock                               held (flock) while a broker uses the directory
    <dir>/meta.properties                     whose directory it is: version, cluster.id, node.id, directory.id
    <dir>/recovery-point-offset-checkpoint    up to where each log was synced, a hint as long as it only grows; after a
                                              clean stop, its end
    <dir>/log-start-offset-checkpoint         where each log starts (DeleteRecords moves that inside a segment)
    <dir>/replication-offset-checkpoint       high watermarks, a hint for the next start
    <dir>/cleaner-offset-checkpoint           up to where compacted logs are clean, a hint for the next round
    <dir>/logs-checkpoint                     which logs there are: one that is missing at the next start is lost
    <dir>/.kafka_cleanshutdown                only between a clean stop and the next start
    <dir>/<topic>-<partition>/                a log
    <dir>/<topic>-<partition>.<uuid>-delete/  a log on its way out
    <dir>/<topic>-<partition>.<uuid>-future/  a copy of a log that moves here from another directory; see `move`
    <dir>/<topic>-<partition>.<uuid>-stray/   a log of no topic that the metadata knows; kept for a person to look at

A directory that fails (a failed sync, a directory that cannot be listed) goes offline with all its logs; the broker
lives on with the others. A single log that is damaged goes offline alone: `Log.failure` says why. A hint that cannot be
written grows old: that is said once, and it is tried again at the next turn.

A log moves while it is used: it is copied, and in the last step, in one turn of the loop, the copy takes its place.
1. The rest is copied and everything in the copy synced, with a mark in it that says what it is.
2. The checkpoints of the new directory speak of the log, or DeleteRecords would be undone by a crash after step 3.
3. The copy gets the log's name, and the directory is synced. From here on it counts; both names exist.
4. The original gets the name of one that is deleted, and its directory is synced.
5. The mark is removed. Only then does the log take records again.
Before step 3 a crash leaves the original, and the copy is removed at the next start. Between 3 and 4 both are there and
have the same records: the one with the mark is kept. The other order would have a moment without any.

After a clean stop nothing but these files is read at start. After a crash every log is checked from its recovery point.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import itertools
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from millrace.clock import Clock
from millrace.errors import ConfigError, CorruptLogError, DiskFullError, StorageError
from millrace.model import (
    FAILED_DIRECTORY,
    LOST_DIRECTORY,
    UNASSIGNED_DIRECTORY,
    TopicPartition,
    decode_uuid,
    encode_uuid,
    invalid_topic_name_reason,
    new_topic_id,
)
from millrace.storage import checkpoint
from millrace.storage.files import Files
from millrace.storage.flusher import Flusher
from millrace.storage.log import Log
from millrace.storage.move import MARK, PIECE_BYTES, LogCopy
from millrace.storage.recovery import LogState
from millrace.storage.segment import IndexCache
from millrace.storage.settings import LogConfig
from millrace.storage.space import HELD_S, is_full
from millrace.storage.ticket import FlushTicket
from millrace.tasks import Tasks

logger = logging.getLogger(__name__)

_LOCK: Final = ".lock"
_META: Final = "meta.properties"
_DELETE_SUFFIX: Final = "-delete"
_STRAY_SUFFIX: Final = "-stray"
_FUTURE_SUFFIX: Final = "-future"
_MAX_NAME_BYTES: Final = 255
_CLOSE_THREADS: Final = 8
_NO_LIMIT: Final = 2**63 - 1
_OWN_LIMITS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""What a write can fail of that says nothing about the disk."""
_PACE_S: Final = 0.5
"""How long a move waits at most before it looks at its limit again."""


@dataclass(frozen=True, slots=True)
class LogDescription:
    """A log for DescribeLogDirs."""

    partition: TopicPartition
    size_bytes: int
    end_offset: int
    is_future: bool = False
    """A copy under way of a log that lies in another directory."""


@dataclass(frozen=True, slots=True)
class DirectoryDescription:
    """A directory for DescribeLogDirs; `failure` is None where it is online."""

    path: Path
    failure: StorageError | None
    total_bytes: int
    usable_bytes: int
    logs: tuple[LogDescription, ...]


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
            fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
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
        return {tp: log.flushed_offset for tp, log in self.logs.items() if log.create_directory is None}

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


class _Move:
    """A log on its way to another directory, or waiting for its turn."""

    def __init__(self, partition: TopicPartition, target: LogDirectory) -> None:
        self.partition = partition
        self.target = target
        self.copy: LogCopy | None = None


class LogDirs:
    """All data directories; owned by the event loop. `start` and `stop` frame the work of the flushers."""

    def __init__(self, paths: Iterable[Path], *, config: LogConfig, clock: Clock, files: Files) -> None:
        self.config = config
        """What a log gets until `Log.apply_config` says otherwise."""
        self.directories: list[LogDirectory] = []
        self.high_watermarks: dict[TopicPartition, int] = {}
        """As the last run checkpointed them."""
        self.clean_start = True
        """Whether every directory was stopped cleanly."""
        self.on_failure: Callable[[LogDirectory], object] | None = None
        """Called when a directory goes offline."""
        self.on_space: Callable[[LogDirectory], object] | None = None
        """Called when a directory has become full, or has space again."""
        self.on_log_failure: Callable[[], object] | None = None
        """Called when a log goes offline, alone or with its directory."""
        self.on_moved: Callable[[TopicPartition], object] | None = None
        """Called when a log has moved to another directory: `get` has another one now."""
        self.move_bytes_per_s: Callable[[], int] = lambda: _NO_LIMIT
        self._moves: dict[TopicPartition, _Move] = {}
        self._tasks = Tasks(clock)
        self._mover: asyncio.Task[None] | None = None
        self._preferred: dict[TopicPartition, LogDirectory] = {}
        """Where logs should be made that do not exist yet."""
        self._clock = clock
        self._files = files
        self._cache = IndexCache()
        self._by_partition: dict[TopicPartition, LogDirectory] = {}
        self._topic_ids: dict[TopicPartition, uuid.UUID] = {}
        """The topics that logs were made for, as far as they have been looked up."""
        self._remover: ThreadPoolExecutor | None = None
        for path in paths:
            directory = LogDirectory(path, files, clock)
            directory.on_failure = self._directory_failed
            self.directories.append(directory)

    @classmethod
    def open(
        cls,
        paths: Iterable[Path],
        *,
        node_id: int,
        cluster_id: str | None = None,
        config: LogConfig | None = None,
        clock: Clock,
        files: Files | None = None,
    ) -> LogDirs:
        """Lock the directories, find the logs, and recover those that were not closed.

        A directory that cannot be used is offline, the others serve. Raises `ConfigError` where a directory belongs to
        another broker or cluster or is in use, `StorageError` where none is left.
        """
        dirs = cls(paths, config=config or LogConfig(), clock=clock, files=files or Files())
        try:
            for directory in dirs.directories:
                try:
                    directory.lock()
                    _check_meta(directory, dirs._files, node_id, cluster_id)
                    dirs._load(directory)
                except StorageError as error:
                    directory.fail(error)
            failures = [directory.failure for directory in dirs.directories]
            if all(failures):
                raise StorageError(f"no usable data directory: {failures[0]}")
        except BaseException:
            for directory in dirs.directories:
                directory.unlock()
            raise
        return dirs

    def __repr__(self) -> str:
        return f"LogDirs({self.directories})"

    def start(self) -> None:
        """Start the flushers on the running loop; logs that recovery left unsynced are synced now."""
        for directory in self.directories:
            if directory.failure is None:
                directory.flusher.start()
                for log in directory.logs.values():
                    if log.dirty:
                        directory.flusher.request(log)

    # --- logs ---------------------------------------------------------------------------------------------------------

    def get(self, partition: TopicPartition) -> Log | None:
        """The log, online or not; None where there is none."""
        directory = self._by_partition.get(partition)
        return None if directory is None else directory.logs[partition]

    def logs(self) -> Mapping[TopicPartition, Log]:
        """Every log."""
        return {partition: log for directory in self.directories for partition, log in directory.logs.items()}

    def topic_id(self, partition: TopicPartition) -> uuid.UUID | None:
        """The id of the topic that a log's directory was made for."""
        directory = self._by_partition.get(partition)
        if directory is None:
            return None
        log = directory.logs[partition]
        if log.create_directory is not None:
            return self._topic_ids[partition]
        path = directory.path / str(partition) / checkpoint.PARTITION_METADATA
        topic_id = checkpoint.read_partition_metadata(self._files, path)
        if topic_id is not None:
            self._topic_ids[partition] = topic_id
        return topic_id

    @property
    def online(self) -> tuple[str, ...]:
        """The ids of the directories that can be used."""
        return tuple(each.directory_id for each in self.directories if each.failure is None)

    @property
    def full(self) -> tuple[str, ...]:
        """The ids of those that have no space left."""
        return tuple(each.directory_id for each in self.directories if each.failure is None and each.is_full)

    def is_full(self, partition: TopicPartition) -> bool:
        """Whether the directory of a log has no space left."""
        directory = self._by_partition.get(partition)
        return directory is not None and directory.is_full

    def look_at_space(self, reserve_bytes: int) -> None:
        """See which directories are full: they keep `reserve_bytes` free."""
        now_s = self._clock.monotonic()
        for directory in self.directories:
            space = self._files.space(directory.path) if directory.failure is None else None
            if space is not None and now_s >= directory.full_until_s:
                self._set_full(directory, is_full(space, reserve_bytes, was_full=directory.is_full))

    def _set_full(self, directory: LogDirectory, is_full: bool) -> None:
        if directory.is_full == is_full:
            return
        directory.is_full = is_full
        if is_full:
            logger.error("%s is full: no more records are taken there until there is space", directory.path)
        else:
            logger.info("%s has space again", directory.path)
        if self.on_space is not None:
            self.on_space(directory)

    def note_failed_write(self, partition: TopicPartition, error: StorageError) -> None:
        """A record could not be written: the disk is full, or the directory goes offline."""
        directory = self._by_partition.get(partition)
        cause = error.__cause__
        is_the_process = isinstance(cause, OSError) and cause.errno in _OWN_LIMITS
        if directory is None or is_the_process or isinstance(error, CorruptLogError):
            return
        if isinstance(error, DiskFullError):
            directory.full_until_s = self._clock.monotonic() + HELD_S
            self._set_full(directory, True)
        elif directory.logs[partition].failure is None:  # one that is offline alone has said so
            directory.fail(error)

    @property
    def clean_epoch(self) -> int:
        """The incarnation of the broker that stopped cleanly in every directory that can be used; -1 if none did."""
        epochs = {each.clean_epoch for each in self.directories if each.failure is None}
        return epochs.pop() if len(epochs) == 1 else -1

    def whereabouts(self, partition: TopicPartition, topic_id: uuid.UUID) -> str | None:
        """The id of the directory in which a log lies; None where there is none yet, or none any more that was used.

        FAILED_DIRECTORY for a log that is offline alone, LOST_DIRECTORY for one that is damaged or missing.
        """
        directory = self._by_partition.get(partition)
        if directory is None:
            return LOST_DIRECTORY if self.is_missing(partition, topic_id) else None
        if directory.failure is not None:
            return directory.directory_id
        failure = directory.logs[partition].failure
        if failure is None:
            return directory.directory_id
        return LOST_DIRECTORY if isinstance(failure, CorruptLogError) else FAILED_DIRECTORY

    def is_missing(self, partition: TopicPartition, topic_id: uuid.UUID) -> bool:
        """Whether there was a log of this partition that was not found at the start."""
        return any(each.missing.get(partition) == topic_id for each in self.directories if each.failure is None)

    def give_up_missing(self, partition: TopicPartition) -> None:
        """A log is not expected any more where it was: the cluster knows where it lies, or there is a new one."""
        for directory in self.directories:
            directory.missing.pop(partition, None)

    def create_log(
        self,
        partition: TopicPartition,
        topic_id: uuid.UUID,
        config: LogConfig | None = None,
        directory_id: str = UNASSIGNED_DIRECTORY,
    ) -> Log:
        """A log, new or the one that is there, in the directory that is named or the one with the fewest logs.

        The disk is not touched: a log's directory and `partition.metadata` are made with its first record, and synced
        with it. A log that never had one is made again, by whoever knows the topics, after a restart.
        """
        existing = self.get(partition)
        if existing is not None:
            return existing
        reason = invalid_topic_name_reason(partition.topic)
        if reason is not None or partition.partition < 0:
            raise StorageError(f"{partition} cannot be the name of a directory: {reason or 'negative partition'}")
        online = [directory for directory in self.directories if directory.failure is None]
        if not online:
            raise StorageError("no usable data directory")
        named = [directory for directory in online if directory.directory_id == directory_id]
        directory = min(named or online, key=lambda candidate: len(candidate.logs))
        preferred = self._preferred.pop(partition, None)
        if preferred is not None and preferred is not directory and preferred.failure is None:
            self._expect(directory, partition, topic_id)
            directory = preferred
        return self._create_in(directory, partition, topic_id, config)

    def _expect(self, directory: LogDirectory, partition: TopicPartition, topic_id: uuid.UUID) -> None:
        """A log will lie elsewhere than the cluster knows: until it does, `directory` must not look as if it had none.

        `give_up_missing` ends this.
        """
        directory.missing[partition] = topic_id
        directory.render_logs(self._topic_ids)()

    def _create_in(
        self, directory: LogDirectory, partition: TopicPartition, topic_id: uuid.UUID, config: LogConfig | None
    ) -> Log:
        directory.forget_checkpointed(partition)
        # A clean log from 0 to 0, which needs no look at the disk.
        log = self._add(directory, partition, config or self.config, LogState(clean=True))
        self._topic_ids[partition] = topic_id

        def make() -> None:
            path = directory.path / str(partition)
            self._files.make_directory(path)
            metadata = path / checkpoint.PARTITION_METADATA
            self._files.write_bytes(metadata, checkpoint.render_partition_metadata(topic_id))
            log.note_created([metadata], [path, directory.path])

        log.create_directory = make
        return log

    def set_topic_id(self, partition: TopicPartition, topic_id: uuid.UUID) -> None:
        """Write a partition's metadata again, where it was lost."""
        directory = self._by_partition[partition]
        path = directory.path / str(partition) / checkpoint.PARTITION_METADATA
        self._files.replace_bytes(path, checkpoint.render_partition_metadata(topic_id))
        self._topic_ids[partition] = topic_id

    def delete_log(self, partition: TopicPartition) -> None:
        """Remove a log: its directory is renamed at once and emptied in the background. Unknown ones are ignored."""
        self._preferred.pop(partition, None)
        self.give_up_missing(partition)
        self._moves.pop(partition, None)
        directory = self._by_partition.pop(partition, None)
        if directory is None:
            return
        log = directory.logs.pop(partition)
        directory.flusher.forget(log)
        log.release()
        log.failure = StorageError(f"{partition} was deleted")
        self._topic_ids.pop(partition, None)
        if log.create_directory is not None:
            return
        doomed = _aside(directory.path, partition, _DELETE_SUFFIX)
        self._files.rename(directory.path / str(partition), doomed)
        self._in_background(lambda: self._files.remove_directory(doomed))

    def set_aside(self, partition: TopicPartition) -> Path | None:
        """Rename a log that belongs to nobody, and keep it: only a person can say that its records are not wanted."""
        self._moves.pop(partition, None)
        directory = self._by_partition.pop(partition, None)
        if directory is None:
            return None
        log = directory.logs.pop(partition)
        directory.flusher.forget(log)
        log.release()
        log.failure = StorageError(f"{partition} was set aside")
        self._topic_ids.pop(partition, None)
        if log.create_directory is not None:
            return None
        kept = _aside(directory.path, partition, _STRAY_SUFFIX)
        self._files.rename(directory.path / str(partition), kept)
        return kept

    def _add(self, directory: LogDirectory, partition: TopicPartition, config: LogConfig, state: LogState) -> Log:
        log = self._make(directory, partition, config, state)
        directory.logs[partition] = log
        self._by_partition[partition] = directory
        return log

    def _make(self, directory: LogDirectory, partition: TopicPartition, config: LogConfig, state: LogState) -> Log:
        path = directory.path / str(partition)
        log = Log(path, config, clock=self._clock, files=self._files, state=state, cache=self._cache)
        log.request_flush = directory.flusher.request
        log.discard = self._discard
        log.before_truncate = directory.write_offsets
        log.on_failure = self._log_failed
        return log

    def _discard(self, paths: list[Path]) -> None:
        def remove() -> None:
            for path in paths:
                self._files.remove(path)

        self._in_background(remove)

    def _in_background(self, work: Callable[[], object]) -> None:
        """Removing a large file takes its time: a thread of its own does it; what it misses the next start finds."""

        def run() -> None:
            try:
                work()
            except StorageError as error:
                logger.warning("could not remove old files: %s", error)
            except Exception:  # nobody looks at the result
                logger.exception("could not remove old files")

        if self._remover is None:
            self._remover = ThreadPoolExecutor(1, thread_name_prefix="remove-files")
        self._remover.submit(run)

    def cleaned_offsets_later(self, partition: TopicPartition) -> Callable[[], None]:
        """The call, for any thread, that writes down how far the logs of a partition's directory are compacted."""
        directory = self._by_partition.get(partition)
        return (lambda: None) if directory is None else directory.render_cleaned_offsets()

    # --- moves between directories ------------------------------------------------------------------------------------

    def place(self, partition: TopicPartition, path: Path) -> None:
        """Have a log lie in the directory at `path`; it moves in the background, one log after another.

        A log that lies there already stays, and a move elsewhere is called off. One that does not exist yet will be
        made there.
        """
        target = self._directory_at(path)
        move = self._moves.get(partition)
        if move is not None and move.target is target:
            return
        self._moves.pop(partition, None)
        source = self._by_partition.get(partition)
        if source is None:
            self._preferred[partition] = target
        elif source is not target:
            self._moves[partition] = _Move(partition, target)
            if self._mover is None:
                self._mover = self._tasks.start("move logs", self._move_all())

    async def _move_all(self) -> None:
        try:
            while self._moves:
                move = next(iter(self._moves.values()))
                try:
                    await self._move(move)
                except StorageError as error:
                    logger.error("%s stays where it is: %s", move.partition, error)  # noqa: TRY400
                except Exception:  # the root of the task: the other moves go on
                    logger.exception("moving %s to %s failed", move.partition, move.target.path)
                if self._moves.get(move.partition) is move:
                    del self._moves[move.partition]
        finally:
            self._mover = None

    async def move_log(self, partition: TopicPartition, path: Path) -> None:
        """Move a log and return when it lies in the directory at `path`; `StorageError` where it stays."""
        target = self._directory_at(path)
        self.place(partition, path)
        while partition in self._moves and self._mover is not None:
            await asyncio.wait([self._mover])
        if self._by_partition.get(partition, target) is not target:
            raise StorageError(f"{partition} could not be moved to {path}")

    def _directory_at(self, path: Path) -> LogDirectory:
        for directory in self.directories:
            if directory.path.absolute() == path.absolute():
                return directory
        raise StorageError(f"{path} is not a data directory of this broker")

    def _is_wanted(self, move: _Move, log: Log) -> bool:
        """Whether a move goes on: it was not called off, and the log is still the one that it began with."""
        if self._moves.get(move.partition) is not move or self.get(move.partition) is not log:
            return False
        for failure in (log.failure, move.target.failure):
            if failure is not None:
                raise StorageError(str(failure))
        return True

    async def _move(self, move: _Move) -> None:
        log = self.get(move.partition)
        while log is not None and self._is_wanted(move, log):
            if log.create_directory is not None:
                self._move_unwritten(move, log)
                return
            copy = move.copy = LogCopy(log, _aside(move.target.path, move.partition, _FUTURE_SUFFIX), self._files)
            moved = False
            try:
                moved = await self._copy(move, copy, log) and self._switch(move, copy, log)
            finally:
                move.copy = None
                if not moved:
                    self._in_background(lambda doomed=copy.path: self._files.remove_directory(doomed))  # type: ignore[misc]
            if moved:
                return

    async def _copy(self, move: _Move, copy: LogCopy, log: Log) -> bool:
        """Copy until little is missing; False where the copy is of no use any more."""
        while self._is_wanted(move, log) and not copy.is_stale:
            pieces = copy.missing()
            if sum(piece.size_bytes for piece in pieces) <= PIECE_BYTES and not any(piece.whole for piece in pieces):
                return True
            for piece in pieces:
                if not self._is_wanted(move, log) or copy.is_stale:
                    return False
                await self._in_thread(lambda piece=piece: copy.copy(piece))  # type: ignore[misc]
                await self._keep_pace(move, log, piece.size_bytes)
            await self._in_thread(copy.sync)
        return False

    async def _in_thread(self, work: Callable[[], None]) -> None:
        """In a thread; when this is cancelled, the thread has come to its end all the same."""
        job = asyncio.get_running_loop().run_in_executor(None, work)
        try:
            await asyncio.shield(job)
        except asyncio.CancelledError:
            with suppress(StorageError):
                await job
            raise

    async def _keep_pace(self, move: _Move, log: Log, size_bytes: float) -> None:
        """Wait for as long as so many bytes may take; the limit may change meanwhile, and the move be called off."""
        while (rate := self.move_bytes_per_s()) < _NO_LIMIT and size_bytes > 0 and self._is_wanted(move, log):
            pause_s = min(size_bytes / rate, _PACE_S) if rate else _PACE_S
            await self._clock.sleep(pause_s)
            size_bytes -= rate * pause_s

    def _move_unwritten(self, move: _Move, log: Log) -> None:
        """A log without a record has nothing to copy: it will be made in the other directory."""
        partition = move.partition
        source, topic_id = self._by_partition[partition], self._topic_ids[partition]
        move.target.forget_checkpointed(partition)
        del source.logs[partition]
        source.flusher.forget(log)
        log.release()
        log.failure = StorageError(f"{partition} has moved to {move.target.path}")
        self._create_in(move.target, partition, topic_id, log.config)
        if self.on_moved is not None:
            self.on_moved(partition)

    def _switch(self, move: _Move, copy: LogCopy, log: Log) -> bool:
        """Let the copy take the log's place; the module says in which order, and why."""
        partition, target, files = move.partition, move.target, self._files
        source = self._by_partition[partition]
        old, new = source.path / str(partition), target.path / str(partition)
        if not self._is_wanted(move, log):
            return False
        if files.size_of(old / MARK) is not None:  # of a move that was cut short: two marks would say nothing
            files.remove(old / MARK)
            files.sync_directory(old)
        if not copy.finish():
            return False
        state = LogState(log.start_offset, log.end_offset, clean=True)
        target.render(checkpoint.RECOVERY_POINTS, {**target.recovery_points(), partition: state.recovery_point})()
        target.render(checkpoint.LOG_STARTS, {**target.start_offsets(), partition: state.start_offset})()
        doomed = _aside(source.path, partition, _DELETE_SUFFIX)
        topic_id = self.topic_id(partition)
        if topic_id is not None:
            self._expect(source, partition, topic_id)
        files.rename(copy.path, new)
        moved = self._make(target, partition, log.config, state)
        moved.cleaned_offset = log.cleaned_offset
        try:
            files.sync_directory(target.path)
            moved.ensure_loaded()
            if (moved.start_offset, moved.end_offset) != (log.start_offset, log.end_offset):
                raise StorageError(f"the copy of {partition} in {target.path} is not whole")
            files.rename(old, doomed)
        except StorageError:
            moved.release()
            with suppress(StorageError):
                files.remove(new / MARK)  # if its name cannot be taken back, it must not count at the next start
                files.rename(new, copy.path)
            raise
        del source.logs[partition]
        source.flusher.forget(log)
        log.release()
        log.failure = StorageError(f"{partition} has moved to {target.path}")
        target.logs[partition] = moved
        self._by_partition[partition] = target
        try:
            files.sync_directory(source.path)
            files.remove(new / MARK)
            files.sync_directory(new)
        except StorageError as error:  # the mark stays, and says at the next start which one counts
            logger.warning("the old directory of %s could not be put away: %s", partition, error)
        self._in_background(lambda: files.remove_directory(doomed))
        logger.info("%s has moved from %s to %s", partition, source.path, target.path)
        if self.on_moved is not None:
            self.on_moved(partition)
        return True

    async def _stop_moving(self) -> None:
        self._moves.clear()
        if self._mover is not None:
            self._mover.cancel()
            await asyncio.wait([self._mover])

    # --- start --------------------------------------------------------------------------------------------------------

    def _load(self, directory: LogDirectory) -> None:
        files = self._files
        path = directory.path
        marker = files.read_bytes(path / checkpoint.CLEAN_SHUTDOWN)
        clean = marker is not None
        directory.clean_epoch = -1 if marker is None else checkpoint.read_clean_shutdown(marker)
        points = checkpoint.read_offsets(files, path / checkpoint.RECOVERY_POINTS)
        starts = checkpoint.read_offsets(files, path / checkpoint.LOG_STARTS)
        cleaned = checkpoint.read_offsets(files, path / checkpoint.CLEANED_OFFSETS) or {}
        self.high_watermarks.update(checkpoint.read_offsets(files, path / checkpoint.HIGH_WATERMARKS) or {})
        directory.checkpointed.update(points or {}, starts or {})
        names = files.names(path)
        if clean:
            # From here on a crash is a crash.
            files.remove(path / checkpoint.CLEAN_SHUTDOWN)
            files.sync_directory(path)
        elif points:
            logger.warning("%s was not stopped cleanly: checking its logs", path)
        self.clean_start = self.clean_start and (clean or not points)
        for name in names:
            partition = _parse_directory_name(name)
            if partition is None:
                if name.endswith((_DELETE_SUFFIX, _FUTURE_SUFFIX)):
                    doomed = path / name
                    self._in_background(lambda doomed=doomed: self._files.remove_directory(doomed))  # type: ignore[misc]
                continue
            # Without its entry a log's end is not known, so that it has to be looked at.
            known = clean and points is not None and partition in points and starts is not None
            state = LogState(
                start_offset=(starts or {}).get(partition, 0),
                recovery_point=(points or {}).get(partition, 0),
                clean=known,
            )
            if partition in self._by_partition and not self._replaces_other(directory, partition, state):
                continue
            log = self._add(directory, partition, self.config, state)
            log.cleaned_offset = cleaned.get(partition, 0)
            if not known:
                try:
                    log.ensure_loaded()
                except CorruptLogError:
                    # It says so itself (`Log.failure`), and it is offline alone.
                    continue
        logs = checkpoint.read_logs(files, path / checkpoint.LOGS)
        self._topic_ids.update({place: topic_id for place, topic_id in logs.items() if place in directory.logs})
        directory.missing = {place: topic_id for place, topic_id in logs.items() if place not in directory.logs}
        for place in directory.missing:
            logger.error("the log of %s is missing in %s", place, path)

    def _replaces_other(self, directory: LogDirectory, partition: TopicPartition, state: LogState) -> bool:
        """A log is in two directories: a move was cut short, and the one with its mark counts; the other is deleted.

        Unless the other has more: then it was used since, while the disk with the mark was away.
        """
        other = self._by_partition[partition]
        path, other_path = directory.path / str(partition), other.path / str(partition)
        here, there = (self._files.size_of(each / MARK) is not None for each in (path, other_path))
        log, other_log = self._make(directory, partition, self.config, state), other.logs[partition]
        with suppress(CorruptLogError):
            log.ensure_loaded()
        marked, plain = (log, other_log) if here else (other_log, log)
        behind = marked.failure is not None or marked.end_offset < plain.end_offset
        log.release()
        if here == there or behind:
            raise ConfigError(f"{partition} is in both {other.path} and {directory.path}: remove the one that is wrong")
        if here:
            self.delete_log(partition)
        else:
            doomed = _aside(directory.path, partition, _DELETE_SUFFIX)
            self._files.rename(path, doomed)
            self._in_background(lambda: self._files.remove_directory(doomed))
        return here

    # --- checkpoints and stop -----------------------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """Write recovery points and start offsets as they are now: every few seconds, from the loop."""
        for directory in self.directories:
            if directory.failure is None:
                directory.refresh_offsets()
                directory.refresh_logs(self._topic_ids)

    def checkpoint_high_watermarks(self, high_watermarks: Mapping[TopicPartition, int]) -> None:
        """Write what is committed of each replica: a hint for the next start, so that nothing depends on its age."""
        for directory in self.directories:
            if directory.failure is None:
                directory.refresh_high_watermarks(high_watermarks)
                directory.refresh_logs(self._topic_ids)

    def checkpoint_start_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, StorageError]:
        """Make the effect of DeleteRecords on these logs last; returns for which of them that failed, and why."""
        by_directory: dict[LogDirectory, list[TopicPartition]] = {}
        for partition in partitions:
            directory = self._by_partition.get(partition)
            if directory is not None:
                by_directory.setdefault(directory, []).append(partition)
        failed: dict[TopicPartition, StorageError] = {}
        for directory, here in by_directory.items():
            try:
                directory.render(checkpoint.LOG_STARTS, directory.start_offsets())()
            except StorageError as error:
                logger.error("deleted records may come back after a restart: %s", error)  # noqa: TRY400
                failed.update(dict.fromkeys(here, error))
        return failed

    async def stop(
        self, high_watermarks: Mapping[TopicPartition, int] | None = None, *, broker_epoch: int = -1
    ) -> None:
        """Stop the flushers and close cleanly; a move that is under way is given up."""
        await self._stop_moving()
        for directory in self.directories:
            await directory.flusher.stop()
        self.close(high_watermarks, broker_epoch=broker_epoch)

    def close(self, high_watermarks: Mapping[TopicPartition, int] | None = None, *, broker_epoch: int = -1) -> None:
        """Sync and close every log, write the checkpoints and the mark of a clean stop, unlock."""
        for directory in self.directories:
            if directory.failure is None:
                try:
                    self._close_logs(directory)
                    directory.write_offsets()
                    directory.render_logs(self._topic_ids)()
                except StorageError as error:
                    directory.fail(error)
        if high_watermarks is not None:
            self.checkpoint_high_watermarks(high_watermarks)
        for directory in self.directories:
            if directory.failure is None and not any(log.failure for log in directory.logs.values()):
                try:
                    self._files.write_bytes(
                        directory.path / checkpoint.CLEAN_SHUTDOWN, checkpoint.render_clean_shutdown(broker_epoch)
                    )
                    self._files.sync_path(directory.path / checkpoint.CLEAN_SHUTDOWN)
                    self._files.sync_directory(directory.path)
                except StorageError as error:
                    directory.fail(error)
        self.abandon()

    def abandon(self) -> None:
        """Let go of everything as it is, as a crash would; what was not synced is the kernel's."""
        self._moves.clear()
        if self._mover is not None:
            self._mover.cancel()
        for directory in self.directories:
            for log in directory.logs.values():
                log.release()
        if self._remover is not None:
            self._remover.shutdown(wait=True)
            self._remover = None
        self._files.close_all()
        for directory in self.directories:
            directory.unlock()

    def _close_logs(self, directory: LogDirectory) -> None:
        """Many logs wait for the disk at the same time: one after another would take a second per few hundred."""
        tickets: list[FlushTicket] = []
        try:
            for log in directory.logs.values():
                if log.failure is None:
                    log.prepare_close()
                    ticket = log.begin_flush(final=True)
                    if ticket is not None:
                        tickets.append(ticket)
            if len(tickets) > 1 and self._files.sync:
                with ThreadPoolExecutor(_CLOSE_THREADS, thread_name_prefix="close-logs") as pool:
                    list(pool.map(lambda ticket: ticket.run(self._files), tickets))
            else:
                for ticket in tickets:
                    ticket.run(self._files)
        except StorageError:
            for ticket in tickets:
                ticket.log.end_flush(ticket, synced=False)
            raise
        for ticket in tickets:
            ticket.log.end_flush(ticket)

    # --- description --------------------------------------------------------------------------------------------------

    def describe(self) -> list[DirectoryDescription]:
        """Sizes of directories and logs."""
        described = []
        for directory in self.directories:
            total = usable = -1
            logs: list[LogDescription] = []
            if directory.failure is None:
                space = self._files.space(directory.path)
                if space is not None:
                    total, usable = space.total_bytes, space.free_bytes
                for partition, log in directory.logs.items():
                    if log.failure is None:
                        logs.append(LogDescription(partition, log.size_bytes, log.end_offset))
                logs += [LogDescription(each, 0, 0) for each, there in self._preferred.items() if there is directory]
                for move in self._moves.values():
                    original = self.get(move.partition)
                    if move.target is directory and original is not None and original.failure is None:
                        size_bytes, end = (move.copy.size_bytes, move.copy.end_offset) if move.copy else (0, 0)
                        logs.append(LogDescription(move.partition, size_bytes, end, is_future=True))
            described.append(DirectoryDescription(directory.path, directory.failure, total, usable, tuple(logs)))
        return described

    def _log_failed(self) -> None:
        if self.on_log_failure is not None:
            self.on_log_failure()

    def _directory_failed(self, directory: LogDirectory) -> None:
        if self.on_failure is not None:
            self.on_failure(directory)


def _aside(parent: Path, partition: TopicPartition, suffix: str) -> Path:
    """A name of its own for a log that is not, or no longer, the partition's."""
    ending = f".{uuid.uuid4().hex}{suffix}"
    return parent / (str(partition)[: _MAX_NAME_BYTES - len(ending)] + ending)


def _parse_directory_name(name: str) -> TopicPartition | None:
    """The partition that a directory belongs to; None for every other name."""
    topic, dash, number = name.rpartition("-")
    if not dash or not number.isascii() or not number.isdigit() or invalid_topic_name_reason(topic) is not None:
        return None
    if number != str(int(number)):
        return None
    return TopicPartition(topic, int(number))


def _check_meta(directory: LogDirectory, files: Files, node_id: int, cluster_id: str | None) -> None:
    """Read or write `meta.properties`: a directory serves one broker of one cluster."""
    path = directory.path / _META
    data = files.read_bytes(path)
    fields: dict[str, str] = {}
    for line in (data or b"").decode(errors="replace").splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            fields[name.strip()] = value.strip()
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
