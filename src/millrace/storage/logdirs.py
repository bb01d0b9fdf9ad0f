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
    <dir>/<topic>-<partition>.<uuid>-future/  a copy of a log that moves here from another directory; see `moves`
    <dir>/<topic>-<partition>.<uuid>-stray/   a log of no topic that the metadata knows; kept for a person to look at

A directory that fails (a failed sync, a directory that cannot be listed) goes offline with all its logs; the broker
lives on with the others. A single log that is damaged goes offline alone: `Log.failure` says why. A hint that cannot be
written grows old: that is said once, and it is tried again at the next turn.

After a clean stop nothing but these files is read at start. After a crash every log is checked from its recovery point.
"""

from __future__ import annotations

import errno
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from millrace.clock import Clock
from millrace.errors import CorruptLogError, DiskFullError, StorageError
from millrace.model import (
    FAILED_DIRECTORY,
    LOST_DIRECTORY,
    UNASSIGNED_DIRECTORY,
    TopicPartition,
    invalid_topic_name_reason,
)
from millrace.storage import checkpoint
from millrace.storage.directory import LogDirectory, check_meta
from millrace.storage.files import Files
from millrace.storage.host import Created
from millrace.storage.log import Log
from millrace.storage.moves import LogDescription, Moves
from millrace.storage.names import DELETE_SUFFIX, STRAY_SUFFIX, aside
from millrace.storage.recovery import LogState
from millrace.storage.removals import Removals
from millrace.storage.segment import IndexCache
from millrace.storage.settings import LogConfig
from millrace.storage.space import HELD_S, is_full
from millrace.storage.startup import load_directory
from millrace.storage.ticket import FlushTicket

logger = logging.getLogger(__name__)

_CLOSE_THREADS: Final = 8
_OWN_LIMITS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""What a write can fail of that says nothing about the disk."""


@dataclass(frozen=True, slots=True)
class DirectoryDescription:
    """A directory for DescribeLogDirs; `failure` is None where it is online."""

    path: Path
    failure: StorageError | None
    total_bytes: int
    usable_bytes: int
    logs: tuple[LogDescription, ...]


class Detached(NamedTuple):
    """A log that was let go, the directory it lay in, and whether it has files there."""

    directory: LogDirectory
    log: Log
    has_files: bool


class _Host:
    """What one log asks of the directory it lies in (`LogHost`)."""

    __slots__ = ("_directory", "_dirs", "_partition", "before_truncate", "log_failed", "request_flush")

    def __init__(self, dirs: LogDirs, directory: LogDirectory, partition: TopicPartition) -> None:
        self.request_flush = directory.flusher.request
        self.before_truncate = directory.write_offsets
        self.log_failed = dirs.log_failed
        self._dirs = dirs
        self._directory = directory
        self._partition = partition

    def remove(self, paths: list[Path], after_ms: int = 0, /) -> None:
        self._dirs.remove_files_later(self._directory, paths, after_ms)

    def create_directory(self) -> Created:
        return self._dirs.create_directory(self._directory, self._partition)


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
        self.moves = Moves(self, clock)
        self._clock = clock
        self.files = files
        self._cache = IndexCache()
        self._by_partition: dict[TopicPartition, LogDirectory] = {}
        self._topic_ids: dict[TopicPartition, uuid.UUID] = {}
        """The topics that logs were made for, as far as they have been looked up."""
        self._twins: dict[TopicPartition, tuple[LogDirectory, Log]] = {}
        self._remover: ThreadPoolExecutor | None = None
        self._removals = Removals(clock, lambda work: self.in_background(work))  # noqa: PLW0108 - as it is then
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
                    check_meta(directory, dirs.files, node_id, cluster_id)
                    load_directory(dirs, directory)
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

    def directory_of(self, partition: TopicPartition) -> LogDirectory | None:
        """The directory in which a log lies; None where there is no such log."""
        return self._by_partition.get(partition)

    def note_topic_ids(self, topic_ids: Mapping[TopicPartition, uuid.UUID]) -> None:
        """Remember the topics that logs were made for."""
        self._topic_ids.update(topic_ids)

    def logs(self) -> Mapping[TopicPartition, Log]:
        """Every log."""
        return {partition: log for directory in self.directories for partition, log in directory.logs.items()}

    def topic_id(self, partition: TopicPartition) -> uuid.UUID | None:
        """The id of the topic that a log's directory was made for."""
        directory = self._by_partition.get(partition)
        if directory is None:
            return None
        log = directory.logs[partition]
        if not log.has_directory:
            return self._topic_ids[partition]
        path = directory.path / str(partition) / checkpoint.PARTITION_METADATA
        topic_id = checkpoint.read_partition_metadata(self.files, path)
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
            space = self.files.space(directory.path) if directory.failure is None else None
            if space is not None and now_s >= directory.full_until_s:
                self._set_full(directory, is_full(space, reserve_bytes, was_full=directory.is_full))

    def _set_full(self, directory: LogDirectory, is_full: bool) -> None:
        if directory.is_full == is_full:
            return
        directory.is_full = is_full
        if is_full:
            self._removals.hurry(directory.path)
            logger.error("%s is full: no more records are taken there until there is space", directory.path)
        else:
            logger.info("%s has space again", directory.path)
        if self.on_space is not None:
            self.on_space(directory)

    def note_failed_write(self, partition: TopicPartition, error: StorageError) -> None:
        """A record could not be written: if it was the disk that refused it, that is full, or goes offline."""
        directory, cause = self._by_partition.get(partition), error.__cause__
        if directory is None or not isinstance(cause, OSError) or cause.errno in _OWN_LIMITS:
            return
        if isinstance(error, DiskFullError):
            directory.full_until_s = self._clock.monotonic() + HELD_S
            self._set_full(directory, True)
        else:
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
        preferred = self.moves.preferred.pop(partition, None)
        if preferred is not None and preferred is not directory and preferred.failure is None:
            self.expect(directory, partition, topic_id)
            directory = preferred
        return self.create_in(directory, partition, topic_id, config)

    def expect(self, directory: LogDirectory, partition: TopicPartition, topic_id: uuid.UUID) -> None:
        """A log will lie elsewhere than the cluster knows: until it does, `directory` must not look as if it had none.

        `give_up_missing` ends this.
        """
        directory.missing[partition] = topic_id
        directory.render_logs(self._topic_ids)()

    def create_in(
        self, directory: LogDirectory, partition: TopicPartition, topic_id: uuid.UUID, config: LogConfig | None
    ) -> Log:
        directory.forget_checkpointed(partition)
        # A clean log from 0 to 0, which needs no look at the disk.
        log = self.make(directory, partition, config or self.config, LogState(clean=True), has_directory=False)
        self.attach(directory, partition, log)
        self._topic_ids[partition] = topic_id
        return log

    def set_topic_id(self, partition: TopicPartition, topic_id: uuid.UUID) -> None:
        """Write a partition's metadata again, where it was lost."""
        directory = self._by_partition[partition]
        path = directory.path / str(partition) / checkpoint.PARTITION_METADATA
        self.files.replace_bytes(path, checkpoint.render_partition_metadata(topic_id))
        self._topic_ids[partition] = topic_id

    def delete_log(self, partition: TopicPartition, after_ms: int = 0) -> None:
        """Remove a log: its directory is renamed at once and emptied in the background. Unknown ones are ignored.

        The files stay for `after_ms`, or until the directory is full or the broker stops.
        """
        self.moves.forget(partition)
        self.give_up_missing(partition)
        detached = self.detach(partition, "was deleted")
        if detached is not None and detached.has_files:
            self.doom(detached.directory, partition, after_ms)

    def set_aside(self, partition: TopicPartition) -> Path | None:
        """Rename a log that belongs to nobody, and keep it: only a person can say that its records are not wanted."""
        self.moves.forget(partition)
        detached = self.detach(partition, "was set aside")
        if detached is None or not detached.has_files:
            return None
        kept = aside(detached.directory.path, partition, STRAY_SUFFIX)
        self.files.rename(detached.directory.path / str(partition), kept)
        return kept

    def detach(self, partition: TopicPartition, what_became: str) -> Detached | None:
        """Let go of a log: nobody can use it any more, and its files are the caller's. None where there is none."""
        directory = self._by_partition.pop(partition, None)
        if directory is None:
            return None
        log = directory.logs.pop(partition)
        directory.flusher.forget(log)
        log.release()
        log.failure = StorageError(f"{partition} {what_became}")
        self._topic_ids.pop(partition, None)
        return Detached(directory, log, log.has_directory)

    def attach(self, directory: LogDirectory, partition: TopicPartition, log: Log) -> None:
        """Have a log lie in a directory."""
        directory.logs[partition] = log
        self._by_partition[partition] = directory

    def note_twin(self, directory: LogDirectory, partition: TopicPartition, log: Log) -> None:
        """A second log of a partition was found; `choose_between_twins` says which one counts."""
        self._twins[partition] = (directory, log)

    def choose_between_twins(self, directory_of: Callable[[TopicPartition], str | None]) -> None:
        """Of logs that were found in two directories use the one in `directory_of`, and put the other aside."""
        twins, self._twins = self._twins, {}
        for partition, (directory, log) in twins.items():
            if directory_of(partition) == directory.directory_id:
                kept = self.set_aside(partition)
                self.attach(directory, partition, log)
            else:
                log.release()
                kept = aside(directory.path, partition, STRAY_SUFFIX)
                self.files.rename(directory.path / str(partition), kept)
            logger.warning("%s was in two directories; the one that does not count is kept as %s", partition, kept)

    def doom(self, directory: LogDirectory, partition: TopicPartition, after_ms: int = 0) -> None:
        """Give the files of a log that is not used any more the name of one that is deleted, and delete them."""
        doomed = aside(directory.path, partition, DELETE_SUFFIX)
        self.files.rename(directory.path / str(partition), doomed)
        self._remove_after(directory, lambda: self.files.remove_directory(doomed), after_ms)

    def remove_later(self, path: Path) -> None:
        """Remove a directory in the background."""
        self.in_background(lambda: self.files.remove_directory(path))

    def _remove_after(self, directory: LogDirectory, work: Callable[[], object], after_ms: int) -> None:
        self._removals.later(directory.path, work, 0 if directory.is_full else after_ms)

    def make(
        self,
        directory: LogDirectory,
        partition: TopicPartition,
        config: LogConfig,
        state: LogState,
        *,
        has_directory: bool = True,
    ) -> Log:
        """The log of a directory, in use by nobody yet (`attach`)."""
        return Log(
            directory.path / str(partition),
            config,
            clock=self._clock,
            files=self.files,
            state=state,
            cache=self._cache,
            host=_Host(self, directory, partition),
            has_directory=has_directory,
        )

    def create_directory(self, directory: LogDirectory, partition: TopicPartition) -> Created:
        """The files of a log that has had none; its topic is the one that `create_log` was told."""
        path = directory.path / str(partition)
        self.files.make_directory(path)
        metadata = path / checkpoint.PARTITION_METADATA
        self.files.write_bytes(metadata, checkpoint.render_partition_metadata(self._topic_ids[partition]))
        return Created([metadata], [path, directory.path])

    def remove_files_later(self, directory: LogDirectory, paths: list[Path], after_ms: int) -> None:
        """Remove files in the background, after so long at most."""

        def remove() -> None:
            for path in paths:
                self.files.remove(path)

        self._remove_after(directory, remove, after_ms)

    def in_background(self, work: Callable[[], object]) -> None:
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
        await self.moves.stop()
        for directory in self.directories:
            await directory.flusher.stop()
        self.close(high_watermarks, broker_epoch=broker_epoch)

    def close(self, high_watermarks: Mapping[TopicPartition, int] | None = None, *, broker_epoch: int = -1) -> None:
        """Sync and close every log, write the checkpoints and the mark of a clean stop, unlock."""
        self._removals.hurry()
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
                    self.files.write_bytes(
                        directory.path / checkpoint.CLEAN_SHUTDOWN, checkpoint.render_clean_shutdown(broker_epoch)
                    )
                    self.files.sync_path(directory.path / checkpoint.CLEAN_SHUTDOWN)
                    self.files.sync_directory(directory.path)
                except StorageError as error:
                    directory.fail(error)
        self.abandon()

    def abandon(self) -> None:
        """Let go of everything as it is, as a crash would; what was not synced is the kernel's."""
        self.moves.abandon()
        self._removals.forget()
        for directory in self.directories:
            for log in directory.logs.values():
                log.release()
        for _, log in self._twins.values():
            log.release()
        if self._remover is not None:
            self._remover.shutdown(wait=True)
            self._remover = None
        self.files.close_all()
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
            if len(tickets) > 1 and self.files.sync:
                with ThreadPoolExecutor(_CLOSE_THREADS, thread_name_prefix="close-logs") as pool:
                    list(pool.map(lambda ticket: ticket.run(self.files), tickets))
            else:
                for ticket in tickets:
                    ticket.run(self.files)
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
                space = self.files.space(directory.path)
                if space is not None:
                    total, usable = space.total_bytes, space.free_bytes
                for partition, log in directory.logs.items():
                    if log.failure is None:
                        logs.append(LogDescription(partition, log.size_bytes, log.end_offset))
                logs += self.moves.describe(directory)
            described.append(DirectoryDescription(directory.path, directory.failure, total, usable, tuple(logs)))
        return described

    def log_failed(self) -> None:
        """A log has gone offline."""
        if self.on_log_failure is not None:
            self.on_log_failure()

    def _directory_failed(self, directory: LogDirectory) -> None:
        if self.on_failure is not None:
            self.on_failure(directory)
