"""Moving logs from one data directory of a broker to another while they are used.

A log is copied (`move`), and in the last step, in one turn of the loop, the copy takes its place.
1. The rest is copied and everything in the copy synced, with a mark in it that says what it is.
2. The checkpoints of the new directory speak of the log, or DeleteRecords would be undone by a crash after step 3; the
   old one goes on to list it, so that the log is missed if the new disk is lost before the cluster knows of it.
3. The copy gets the log's name, and the directory is synced. From here on it counts; both names exist.
4. The original gets the name of one that is deleted, and its directory is synced.
5. The mark is removed. Only then does the log take records again.
Before step 3 a crash leaves the original, and the copy is removed at the next start. Between 3 and 4 both are there and
have the same records: the one with the mark is kept (`startup`). The other order would have a moment without any.

Owner: the event loop; one task moves one log after another, copying in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from millrace.clock import Clock
from millrace.errors import StorageError
from millrace.model import TopicPartition
from millrace.storage import checkpoint
from millrace.storage.directory import LogDirectory
from millrace.storage.log import Log
from millrace.storage.move import MARK, PIECE_BYTES, LogCopy
from millrace.storage.names import DELETE_SUFFIX, FUTURE_SUFFIX, aside
from millrace.storage.recovery import LogState
from millrace.tasks import Tasks

if TYPE_CHECKING:
    from millrace.storage.logdirs import LogDirs

logger = logging.getLogger(__name__)

_NO_LIMIT: Final = 2**63 - 1
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


class _Move:
    """A log on its way to another directory, or waiting for its turn."""

    def __init__(self, partition: TopicPartition, target: LogDirectory) -> None:
        self.partition = partition
        self.target = target
        self.copy: LogCopy | None = None


class Moves:
    """The logs that are to lie in another directory."""

    def __init__(self, dirs: LogDirs, clock: Clock) -> None:
        self.bytes_per_s: Callable[[], int] = lambda: _NO_LIMIT
        self.preferred: dict[TopicPartition, LogDirectory] = {}
        """Where logs should be made that do not exist yet."""
        self._dirs = dirs
        self._clock = clock
        self._waiting: dict[TopicPartition, _Move] = {}
        self._tasks = Tasks(clock)
        self._mover: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"Moves({len(self._waiting)} logs)"

    def place(self, partition: TopicPartition, path: Path) -> None:
        """Have a log lie in the directory at `path`; it moves in the background, one log after another.

        A log that lies there already stays, and a move elsewhere is called off. One that does not exist yet will be
        made there.
        """
        target = self._directory_at(path)
        move = self._waiting.get(partition)
        if move is not None and move.target is target:
            return
        self._waiting.pop(partition, None)
        source = self._dirs.directory_of(partition)
        if source is None:
            self.preferred[partition] = target
        elif source is not target:
            self._waiting[partition] = _Move(partition, target)
            if self._mover is None:
                self._mover = self._tasks.start("move logs", self._move_all())

    async def _move_all(self) -> None:
        try:
            while self._waiting:
                move = next(iter(self._waiting.values()))
                try:
                    await self._move(move)
                except StorageError as error:
                    logger.error("%s stays where it is: %s", move.partition, error)  # noqa: TRY400
                except Exception:  # the root of the task: the other moves go on
                    logger.exception("moving %s to %s failed", move.partition, move.target.path)
                if self._waiting.get(move.partition) is move:
                    del self._waiting[move.partition]
        finally:
            self._mover = None

    async def move(self, partition: TopicPartition, path: Path) -> None:
        """Move a log and return when it lies in the directory at `path`; `StorageError` where it stays."""
        target = self._directory_at(path)
        self.place(partition, path)
        while partition in self._waiting and self._mover is not None:
            await asyncio.wait([self._mover])
        if (self._dirs.directory_of(partition) or target) is not target:
            raise StorageError(f"{partition} could not be moved to {path}")

    def _directory_at(self, path: Path) -> LogDirectory:
        for directory in self._dirs.directories:
            if directory.path.absolute() == path.absolute():
                return directory
        raise StorageError(f"{path} is not a data directory of this broker")

    def _is_wanted(self, move: _Move, log: Log) -> bool:
        """Whether a move goes on: it was not called off, and the log is still the one that it began with."""
        if self._waiting.get(move.partition) is not move or self._dirs.get(move.partition) is not log:
            return False
        for failure in (log.failure, move.target.failure):
            if failure is not None:
                raise StorageError(str(failure))
        return True

    async def _move(self, move: _Move) -> None:
        log = self._dirs.get(move.partition)
        while log is not None and self._is_wanted(move, log):
            if not log.has_directory:
                self._move_unwritten(move, log)
                return
            copy = move.copy = LogCopy(log, aside(move.target.path, move.partition, FUTURE_SUFFIX), self._dirs.files)
            moved = False
            try:
                moved = await self._copy(move, copy, log) and self._switch(move, copy, log)
            finally:
                move.copy = None
                if not moved:
                    self._dirs.remove_later(copy.path)
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
        while (rate := self.bytes_per_s()) < _NO_LIMIT and size_bytes > 0 and self._is_wanted(move, log):
            pause_s = min(size_bytes / rate, _PACE_S) if rate else _PACE_S
            await self._clock.sleep(pause_s)
            size_bytes -= rate * pause_s

    def _move_unwritten(self, move: _Move, log: Log) -> None:
        """A log without a record has nothing to copy: it will be made in the other directory."""
        partition = move.partition
        topic_id = self._dirs.topic_id(partition)
        assert topic_id is not None, "whoever had it made said for which topic"
        move.target.forget_checkpointed(partition)
        self._dirs.detach(partition, f"has moved to {move.target.path}")
        self._dirs.create_in(move.target, partition, topic_id, log.config)
        if self._dirs.on_moved is not None:
            self._dirs.on_moved(partition)

    def _switch(self, move: _Move, copy: LogCopy, log: Log) -> bool:
        """Let the copy take the log's place; the module says in which order, and why."""
        partition, target, files = move.partition, move.target, self._dirs.files
        source = self._dirs.directory_of(partition)
        assert source is not None, "it is wanted, so it is there"
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
        doomed = aside(source.path, partition, DELETE_SUFFIX)
        topic_id = self._dirs.topic_id(partition)
        if topic_id is not None:
            self._dirs.expect(source, partition, topic_id)
        files.rename(copy.path, new)
        moved = self._dirs.make(target, partition, log.config, state)
        moved.cleaned_offset = log.cleaned_offset
        try:
            files.sync_directory(target.path)
            moved.ensure_loaded()
            if (moved.start_offset, moved.end_offset) != (log.start_offset, log.end_offset):
                raise StorageError(f"the copy of {partition} in {target.path} is not whole")
            files.rename(old, doomed)
        except StorageError:
            moved.release()
            self._dirs.give_up_missing(partition)
            with suppress(StorageError):
                files.remove(new / MARK)  # if its name cannot be taken back, it must not count at the next start
                files.rename(new, copy.path)
            raise
        self._dirs.detach(partition, f"has moved to {target.path}")
        self._dirs.attach(target, partition, moved)
        if topic_id is not None:
            self._dirs.note_topic_ids({partition: topic_id})
        try:
            files.sync_directory(source.path)
            files.remove(new / MARK)
            files.sync_directory(new)
        except StorageError as error:  # the mark stays, and says at the next start which one counts
            logger.warning("the old directory of %s could not be put away: %s", partition, error)
        self._dirs.remove_later(doomed)
        logger.info("%s has moved from %s to %s", partition, source.path, target.path)
        if self._dirs.on_moved is not None:
            self._dirs.on_moved(partition)
        return True

    def describe(self, target: LogDirectory) -> list[LogDescription]:
        """The logs that are on their way to a directory, or will be made there."""
        coming = [LogDescription(each, 0, 0) for each, there in self.preferred.items() if there is target]
        for move in self._waiting.values():
            original = self._dirs.get(move.partition)
            if move.target is target and original is not None and original.failure is None:
                size_bytes, end = (move.copy.size_bytes, move.copy.end_offset) if move.copy else (0, 0)
                coming.append(LogDescription(move.partition, size_bytes, end, is_future=True))
        return coming

    def forget(self, partition: TopicPartition) -> None:
        """The log is gone: it moves nowhere."""
        self.preferred.pop(partition, None)
        self._waiting.pop(partition, None)

    def abandon(self) -> None:
        """Give up what is under way, without waiting for its end."""
        self._waiting.clear()
        if self._mover is not None:
            self._mover.cancel()

    async def stop(self) -> None:
        """Give up what is under way."""
        mover = self._mover
        self.abandon()
        if mover is not None:
            await asyncio.wait([mover])
