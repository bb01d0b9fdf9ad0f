"""The owner of one share-partition on the broker that leads the partition: log, window and stored state together.

Everything here runs on the loop. Reading and acquiring are one synchronous step. Writes of state go one after another,
each with everything that came up while the one before was under way; an acknowledgement is answered when its write is.
Dead letters go one after another, too, and a record is archived when its letter is committed.
Not here: decisions (`acquisition`), which share-partitions there are (`partitions`), sessions (`sessions`),
writing dead letters (`dead_letter_office`).

Invariants
- The window lives as long as one leadership, and was loaded in it: an earlier leader that still writes is fenced by the
  coordinator, which tells it here, and the share-partition closes.
- A broker that was paused or cut off for so long that another may lead by now gives out nothing before `confirm`: what
  it would give may have been accepted there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from millrace.errors import ApiError, ErrorCode, MillraceError
from millrace.queues.acquisition import (
    AcknowledgeBatch,
    Acknowledgement,
    Acquired,
    AcquireMode,
    Changes,
    DeadLetter,
    LogBatch,
    Window,
    pieces,
)
from millrace.queues.batches import StateBatch, combine
from millrace.queues.counting import QueueCounts
from millrace.queues.dead_letter_office import Office
from millrace.queues.records import ShareKey, Snapshot
from millrace.queues.settings import QueueSettings
from millrace.queues.state import NO_START, Write
from millrace.records.batch import Batch, split
from millrace.storage.compaction import AbortedBatches
from millrace.tasks import Tasks

if TYPE_CHECKING:
    from millrace.clock import Clock, Timer
    from millrace.replication.partition import Partition
    from millrace.storage.recovery import LogPosition

logger = logging.getLogger(__name__)

_MIN_READ_BYTES: Final = 8 * 1024
_MAX_EMPTY_READS: Final = 16
"""Reads that gave nobody anything, one after another, before others get their turn: gaps, aborted transactions."""
_RETRY_S: Final = 0.2
_MAX_RETRY_S: Final = 30.0
"""A dead-letter topic that cannot be written is tried again this often: nothing is given up for it."""

# What a failed read or write of the state means to a member.
_STATE_ERRORS: Final = {
    ErrorCode.NOT_COORDINATOR: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.FENCED_LEADER_EPOCH: ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.FENCED_STATE_EPOCH: ErrorCode.NOT_LEADER_OR_FOLLOWER,
}
_FENCED: Final = frozenset({ErrorCode.FENCED_LEADER_EPOCH, ErrorCode.FENCED_STATE_EPOCH, ErrorCode.INVALID_REQUEST})
"""The share-partition is not what it was: led by another broker, reset, or deleted."""


class Persister(Protocol):
    """The share coordinator, wherever it is. ApiError says why something is not known to have happened."""

    async def read(self, key: ShareKey, leader_epoch: int) -> Snapshot: ...

    async def write(self, key: ShareKey, write: Write) -> None: ...


@dataclass(frozen=True, slots=True)
class Fetched:
    """Records for a member: whole batches, and which of their records are meant."""

    records: memoryview | bytes = b""
    acquired: Sequence[Acquired] = ()

    @property
    def count(self) -> int:
        return sum(each.last_offset - each.first_offset + 1 for each in self.acquired)


@dataclass(frozen=True, slots=True)
class FetchTerms:
    """How much a member wants, and in which shape."""

    max_records: int
    max_bytes: int
    batch_size: int = 0
    mode: AcquireMode = AcquireMode.BATCH_OPTIMIZED


class SharePartition:
    """One share-partition. `load` once, then everything else, until `close`."""

    def __init__(
        self,
        key: ShareKey,
        partition: Partition,
        *,
        persister: Persister,
        office: Office,
        settings: Callable[[], QueueSettings],
        clock: Clock,
        counts: QueueCounts | None = None,
    ) -> None:
        self.key = key
        self.partition = partition
        self.leader_epoch = partition.leader_epoch
        self.watchers: set[Callable[[], None]] = set()
        """Called when records may have become available in another way than by a commit."""
        self.error: ApiError | None = None
        """Why the share-partition is closed."""
        self._persister = persister
        self._office = office
        self._settings = settings
        self._clock = clock
        self._counts = counts or QueueCounts()
        self._window = Window(0, settings().limits)
        self._state_epoch = 0
        self._waiting: list[tuple[Acknowledgement, asyncio.Future[None]]] = []
        self._to_store: list[StateBatch] = []
        self._tasks = Tasks(clock)
        self._writing: asyncio.Task[None] | None = None
        self._letters: deque[DeadLetter] = deque()
        self._posting: asyncio.Task[None] | None = None
        self._timer: Timer | None = None
        self._timer_due_ms = 0
        self._bytes_per_record = 256.0

    def __repr__(self) -> str:
        return f"SharePartition({self.key} epoch {self.leader_epoch}, {self._window!r})"

    # --- life ---------------------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Take the state over from whoever led before; ApiError. From now on nobody else can write it."""
        try:
            found = await self._persister.read(self.key, self.leader_epoch)
        except ApiError as error:
            raise _told(error) from error
        self._check_open()
        settings = self._settings()
        start = self._first_offset(settings) if found.start_offset == NO_START else found.start_offset
        try:
            self._window, changes = Window.load(start, found.batches, settings.limits)
        except ValueError as error:
            raise ApiError(ErrorCode.UNKNOWN_SERVER_ERROR, f"the stored state of {self.key} is broken") from error
        self._state_epoch = found.state_epoch
        self._window.move_log_start(self.partition.log.start_offset)
        self._carry_out(changes)
        logger.debug("loaded %r", self)

    def _first_offset(self, settings: QueueSettings) -> int:
        """Where a share-partition begins that nobody has read."""
        if settings.offset_reset == "earliest":
            return self.partition.log.start_offset
        latest = self.partition.latest_offset()
        before_ms = settings.reset_before_ms
        if before_ms is None:
            return latest
        found = self.partition.log.offset_for_time(self._clock.wall_ms() - before_ms, self.partition.committed)
        return latest if found is None else found[0]

    def close(self, error: ApiError) -> None:
        """Answer everybody who waits, and nobody any more. What was stored is safe with the coordinator."""
        if self.error is not None:
            return
        self.error = error
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        for _, done in waiting:
            _fail(done, error)
        self._tasks.cancel()
        self._wake()

    async def written(self) -> None:
        """Return when there is nothing left to store, or it is closed."""
        while self.error is None and self._writing is not None:
            await asyncio.wait([self._writing])

    async def wait_idle(self) -> None:
        """Return when there is nothing left to store and no dead letter left to write, or it is closed."""
        while self.error is None and (task := self._posting or self._writing) is not None:
            await asyncio.wait([task])

    def _check_open(self) -> None:
        if self.error is not None:
            raise ApiError(self.error.code, self.error.message)
        if not self.partition.is_leader or self.partition.leader_epoch != self.leader_epoch:
            raise self.partition.not_leader()

    # --- requests -----------------------------------------------------------------------------------------------------

    async def confirm(self) -> None:
        """Return when it is certain that nobody has led the partition in a later epoch before this call; ApiError.

        Its epoch is written once more: a later leader has raised it at the coordinator before it gave anything out.
        """
        self._check_open()
        await self._written(Acknowledgement())

    def fetch(self, member_id: str, terms: FetchTerms) -> Fetched:
        """Acquire records for a member, as many as there are now; ApiError."""
        self._check_open()
        settings = self._settings()
        window = self._window
        window.limits = settings.limits
        if terms.max_records <= 0:
            return Fetched()
        now_ms = self._now_ms()
        end = self._end(settings)
        for _ in range(_MAX_EMPTY_READS):
            offset = self._readable_offset(end, now_ms)
            if offset is None:
                break
            data, batches, log_batches = self._read(offset, end, terms, settings)
            if not batches:
                break
            acquired = window.acquire(
                member_id,
                log_batches,
                fetch_offset=offset,
                max_records=terms.max_records,
                now_ms=now_ms,
                batch_size=terms.batch_size,
                mode=terms.mode,
            )
            if acquired:
                self._arm(now_ms + window.limits.lock_ms)
                records = _cut(data, batches, acquired)
                self.partition.bytes_out += len(records)
                self.partition.records_out += self._counts.acquired(acquired)
                return Fetched(records, acquired)
        else:
            # There is more to pass over: a fetch that waits goes on when the others have had their turn.
            asyncio.get_running_loop().call_soon(self._wake)
        return Fetched()

    def readable_bytes(self) -> int:
        """About how much a fetch would find, for one that waits for more than a record; ApiError."""
        self._check_open()
        settings = self._settings()
        self._window.limits = settings.limits
        end = self._end(settings)
        offset = self._readable_offset(end, self._now_ms())
        if offset is None:
            return 0
        begin = self.partition.log.position_of(offset)
        if begin.segment_base == end.segment_base:
            return end.position_bytes - begin.position_bytes
        return self.partition.log.config.segment_bytes  # a segment lies between: that is more than anybody waits for

    async def acknowledge(self, member_id: str, batches: Sequence[AcknowledgeBatch]) -> None:
        """Take a member's word for its records; returns when that is stored. Cancellation does not take it back."""
        self._check_open()
        self._window.limits = self._settings().limits
        acknowledgement = self._window.acknowledge(member_id, batches, self._now_ms())
        self._arm(self._now_ms() + self._window.limits.lock_ms)  # for what was renewed, if a setting made it shorter
        await self._stored(acknowledgement)
        self._counts.acknowledge(pieces(batches))

    @property
    def in_flight(self) -> int:
        """Records that members have, or that wait to be given out again."""
        return self._window.in_flight

    @property
    def start_offset(self) -> int:
        """Below it everything is done with."""
        return self._window.start_offset

    async def release(self, member_id: str) -> None:
        """A member is gone: let others have what it holds."""
        self._check_open()
        await self._stored(self._window.release(member_id))

    def _end(self, settings: QueueSettings) -> LogPosition:
        """Where members may read up to."""
        partition = self.partition
        return partition.stable if settings.reads_committed else partition.committed

    def _readable_offset(self, end: LogPosition, now_ms: int) -> int | None:
        """The next offset to read that the log has; None where there is nothing to give."""
        window, log_start = self._window, self.partition.log.start_offset
        if log_start > window.start_offset:
            window.move_log_start(log_start)
        offset = window.next_fetch_offset(now_ms)
        return None if offset is None or offset >= end.offset else offset

    def _read(
        self, offset: int, end: LogPosition, terms: FetchTerms, settings: QueueSettings
    ) -> tuple[bytes | memoryview, list[Batch], list[LogBatch]]:
        """Batches from the one that holds `offset` on, as bytes, and as the window sees them."""
        source = self.partition.log
        # A member asks for megabytes and for few records: what it will not get need not be read.
        likely = int(terms.max_records * self._bytes_per_record * 1.5)
        size = min(terms.max_bytes, max(likely, _MIN_READ_BYTES))
        read = source.read(offset, size, limit=end, at_least_one=True)
        if read.next_offset > offset:
            self._bytes_per_record += (len(read.data) / (read.next_offset - offset) - self._bytes_per_record) / 8
        batches = list(split(read.data))
        aborted = AbortedBatches(
            source.aborted_transactions(offset, read.next_offset) if settings.reads_committed else ()
        )
        seen = [
            LogBatch(header.base_offset, header.last_offset, not (header.is_control or header in aborted))
            for header, _ in batches
        ]
        return read.data, batches, seen

    # --- storing ------------------------------------------------------------------------------------------------------

    async def _stored(self, acknowledgement: Acknowledgement) -> None:
        if acknowledgement.store:
            await self._written(acknowledgement)

    async def _written(self, acknowledgement: Acknowledgement) -> None:
        """Return when a write that begins now is done, with this in it."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.add_done_callback(_look_at)
        self._waiting.append((acknowledgement, done))
        self._begin_writing()
        await asyncio.shield(done)

    def _begin_writing(self) -> None:
        if self._writing is None and self.error is None:
            self._writing = self._tasks.start(f"state of {self.key}", self._write())

    async def _write(self) -> None:
        try:
            while (self._waiting or self._to_store) and self.error is None:
                waiting, self._waiting = self._waiting, []
                extra, self._to_store = self._to_store, []
                if not await self._write_once(waiting, extra) and self.error is None:
                    # What ran out is true all the same: it is tried again, by and by.
                    self._to_store = combine(combine((), extra, -1), self._to_store, self._window.start_offset)
                    await self._clock.sleep(_RETRY_S)
        finally:
            self._writing = None

    async def _write_once(
        self, waiting: list[tuple[Acknowledgement, asyncio.Future[None]]], extra: list[StateBatch]
    ) -> bool:
        """Store what came up; whether that is known to have happened."""
        window = self._window
        stored = [*extra, *(batch for acknowledgement, _ in waiting for batch in acknowledgement.store)]
        write = Write(
            state_epoch=self._state_epoch,
            leader_epoch=self.leader_epoch,
            start_offset=window.start_offset,
            batches=combine((), stored, window.start_offset),
            completed=window.completed,
        )
        problem: ApiError | None = ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "the share-partition was closed")
        try:
            await self._persister.write(self.key, write)
            problem = None
        except ApiError as error:
            problem = _told(error)
            if error.code in _FENCED:
                problem = ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER, error.message)
                self.close(problem)
        except Exception:
            logger.exception("the state of %r is not stored", self)
            problem = ApiError(ErrorCode.UNKNOWN_SERVER_ERROR, "the state could not be stored")
        finally:
            for acknowledgement, done in waiting:
                self._carry_out(window.finish(acknowledgement, is_stored=problem is None, now_ms=self._now_ms()))
                if problem is None:
                    _finish(done)
                else:
                    _fail(done, problem)
            if problem is not None:
                self._arm_for_all()
        return problem is None

    def _carry_out(self, changes: Changes) -> None:
        """Have stored what changed, and tell whoever waits for records."""
        self._counts.changed(changes)
        if changes.dead_letters:
            self._letters.extend(changes.dead_letters)
            if self._posting is None and self.error is None:
                self._posting = self._tasks.start(f"letters of {self.key}", self._post())
        if changes.store:
            self._to_store.extend(changes.store)
            self._begin_writing()
        if changes.is_news:
            self._wake()
            if self._window.limits.backoff_ms:
                self._arm_for_all()

    async def _post(self) -> None:
        """Write dead letters, however often it takes: what cannot be written stays, and holds the window."""
        retry_s = _RETRY_S
        try:
            while self._letters and self.error is None:
                letter = self._letters[0]
                last_offset = await self._deliver(letter, retry_s)
                if last_offset is None:
                    await self._clock.sleep(retry_s)
                    retry_s = min(retry_s * 2, _MAX_RETRY_S)
                    continue
                retry_s = _RETRY_S
                if last_offset < letter.last_offset:
                    self._letters[0] = letter._replace(first_offset=last_offset + 1)
                else:
                    self._letters.popleft()
                self._carry_out(self._window.dead_lettered(letter._replace(last_offset=last_offset)))
        finally:
            self._posting = None

    async def _deliver(self, letter: DeadLetter, retry_s: float) -> int | None:
        try:
            return await self._office.deliver(self.key, self.partition, letter, self._settings())
        except MillraceError as error:
            logger.warning("%r tries its dead letters again in %.1f s: %s", self, retry_s, error)
        except Exception:
            logger.exception("%r tries its dead letters again in %.1f s", self, retry_s)
        self._counts.dead_letter_failures += 1
        return None

    # --- time ---------------------------------------------------------------------------------------------------------

    def _now_ms(self) -> int:
        return int(self._clock.monotonic() * 1000)

    def _arm(self, at_ms: int) -> None:
        """Have the timer go off then, or earlier."""
        if self.error is not None or (self._timer is not None and self._timer_due_ms <= at_ms):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due_ms = at_ms
        self._timer = self._clock.call_later(max(at_ms - self._now_ms(), 1) / 1000, self._due)

    def _arm_for_all(self) -> None:
        """Look through the window for what is due next: after the timer went off, and when a hold lasts on."""
        for at_ms in (self._window.next_deadline_ms(), self._window.next_rested_ms(self._now_ms())):
            if at_ms is not None:
                self._arm(at_ms)

    def _due(self) -> None:
        self._timer = None
        self._carry_out(self._window.expire(self._now_ms()))
        self._arm_for_all()
        self._wake()  # what has rested is available without any change of the window

    def _wake(self) -> None:
        for watcher in tuple(self.watchers):
            watcher()


def _cut(data: bytes | memoryview, batches: Sequence[Batch], acquired: Sequence[Acquired]) -> memoryview:
    """The bytes of the batches that have acquired records; they lie one after another."""
    first, last = acquired[0].first_offset, acquired[-1].last_offset
    begin = end = 0
    for each in batches:
        if each.header.last_offset < first:
            begin += len(each.data)
        if each.header.base_offset <= last:
            end += len(each.data)
    return memoryview(data)[begin:end]


def _told(error: ApiError) -> ApiError:
    return ApiError(_STATE_ERRORS.get(error.code, error.code), error.message)


def _finish(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _fail(done: asyncio.Future[None], error: ApiError) -> None:
    if not done.done():
        done.set_exception(error)


def _look_at(done: asyncio.Future[None]) -> None:
    if not done.cancelled():
        done.exception()
