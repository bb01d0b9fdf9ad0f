"""A coordinator whose state lies in the partitions of an internal topic: a shard for each partition that is led here.

A shard is made when this broker begins to lead its partition, loads it, and answers until another broker leads it. It
answers only in the leader epoch under which it was loaded, because an answer from the memory of a former coordinator
can be fatal to a client (KAFKA-21181). A shard that fails while this broker leads, because its log could not be read or
written, is replaced by a new one that loads again, after a pause; whoever asks meanwhile is told to wait.

`StateShard` is what all shards have in common: how they load, write and end. `ShardedCoordinator` is the owner of the
shards, of their tasks and of the coordinator's chores; everything runs on the loop. Not here: what a shard keeps
(`groups.shard`, `queues.shard`), the order of writes (`state_writer`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from enum import Enum
from typing import Any, Final, Generic, TypeVar

from millrace.clock import Clock
from millrace.errors import ApiError, ErrorCode, ProtocolError, StorageError
from millrace.model import NO_PRODUCER_ID
from millrace.replication.state_topic import Entry, StateRecord, StateTopic, Transaction
from millrace.replication.state_writer import StateWriter, nothing
from millrace.tasks import Tasks, Work, cancel

logger = logging.getLogger(__name__)

WRITE_ERRORS: Final = {
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_ENOUGH_REPLICAS: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.REQUEST_TIMED_OUT: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_LEADER_OR_FOLLOWER: ErrorCode.NOT_COORDINATOR,
    ErrorCode.KAFKA_STORAGE_ERROR: ErrorCode.NOT_COORDINATOR,
}
"""What a failed write to the log means to whoever asked the coordinator."""
_TOO_LARGE: Final = frozenset({ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.RECORD_LIST_TOO_LARGE})


class ShardState(Enum):
    """Whether a shard can be asked."""

    LOADING = "loading"
    ACTIVE = "active"
    CLOSED = "closed"


class StateShard:
    """One led partition of the topic: its life, and how it writes. What it keeps is added by each coordinator.

    A change is appended at once and takes effect when it is durable, strictly in the order of the log. So what is in
    memory is always what a replay would give, a reader never sees what could still be lost, and a client that hung up
    does not stop its change.
    """

    def __init__(
        self, index: int, leader_epoch: int, *, topic: StateTopic, clock: Clock, write_timeout_ms: int
    ) -> None:
        self.index = index
        self.leader_epoch = leader_epoch
        self.state = ShardState.LOADING
        self.loaded = asyncio.Event()
        """Set when the shard is active or closed."""
        self._topic = topic
        self._clock = clock
        self._write_timeout_ms = write_timeout_ms
        self._writer = StateWriter(topic, index)

    # What a coordinator adds

    def replay(self, key: bytes, value: bytes | None, record_offset: int) -> None:
        """Apply one record of the log; ProtocolError where it cannot be read."""
        raise NotImplementedError

    def replay_pending(self, record: StateRecord) -> None:
        """Take note of a record of a transaction that is still open; ProtocolError where there should be none."""
        raise ProtocolError(f"it is part of a transaction of producer {record.producer_id}")

    def _records(self) -> AsyncIterator[StateRecord]:
        """What is replayed: the latest record of every key, unless records build on each other."""
        return self._topic.latest(self.index)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept here."""
        raise NotImplementedError

    def _begin(self) -> None:
        """Everything was replayed, and the shard is active."""

    def _end(self) -> None:
        """The shard was closed: whoever waits for more than a write is answered here."""

    async def _ended(self) -> None:
        """Return when nothing of the shard runs any more; it is closed."""

    # Life

    async def run(self) -> None:
        """Load the partition, then confirm writes until cancelled; raises what makes that impossible.

        However it ends, the shard is closed then, and nothing of it runs any more.
        """
        try:
            await self._load()
            self.state = ShardState.ACTIVE
            self._begin()
            self.loaded.set()
            logger.log(logging.DEBUG if self.is_empty else logging.INFO, "loaded %r", self)
            await self._writer.confirm()
        finally:
            self.close()
            await self._ended()

    def close(self) -> None:
        """Answer everybody who waits with NOT_COORDINATOR, and stop. Harmless when repeated.

        The task is the coordinator's to cancel.
        """
        if self.state is ShardState.CLOSED:
            return
        self.state = ShardState.CLOSED
        self.loaded.set()
        self._end()
        self._writer.close(ErrorCode.NOT_COORDINATOR)

    async def _load(self) -> None:
        async for record in self._records():
            try:
                if record.producer_id == NO_PRODUCER_ID:
                    self.replay(record.key, record.value, record.offset)
                else:
                    self.replay_pending(record)
            except ProtocolError as error:
                # One record that cannot be read must not take everything that is kept in the partition with it.
                logger.warning("%s-%d: record %d is unreadable: %s", self._topic.name, self.index, record.offset, error)

    # Writing

    @property
    def is_active(self) -> bool:
        return self.state is ShardState.ACTIVE

    def now_ms(self) -> int:
        return self._clock.wall_ms()

    def append(
        self,
        entries: Sequence[Entry],
        apply: Callable[[int], None] = nothing,
        *,
        too_large: ErrorCode = ErrorCode.UNKNOWN_SERVER_ERROR,
        transaction: Transaction | None = None,
    ) -> asyncio.Future[None]:
        """Append now; the future is done when `apply(base offset)` has put it into effect, or fails with the shard.

        ApiError, in the words of a coordinator: nothing was appended.
        """
        try:
            if self.state is not ShardState.ACTIVE:
                raise ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER)
            return self._writer.write(entries, apply, self._clock.wall_ms(), transaction)
        except ApiError as error:
            code = too_large if error.code in _TOO_LARGE else WRITE_ERRORS.get(error.code, error.code)
            raise ApiError(code, error.message) from error
        except StorageError as error:
            raise ApiError(ErrorCode.NOT_COORDINATOR, str(error)) from error

    async def in_time(self, done: asyncio.Future[None]) -> None:
        """Wait for what was appended; ApiError COORDINATOR_NOT_AVAILABLE where that takes too long.

        Only the waiting has a timeout: a write that becomes durable later takes effect all the same.
        """
        if done.done():
            done.result()
            return
        timer = self._clock.call_later(self._write_timeout_ms / 1000, lambda: _give_up(done))
        try:
            await done
        finally:
            timer.cancel()

    async def wait_applied(self) -> None:
        """Return when everything written so far is durable and in effect; ApiError where that takes too long."""
        done = self._writer.all_applied()
        if done is not None:
            await self.in_time(done)


def _give_up(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_exception(ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE, "not durable in time"))


S = TypeVar("S", bound=StateShard)


class ShardedCoordinator(Generic[S]):
    """The shards of one coordinator. Every failure that concerns a whole request is an ApiError."""

    def __init__(self, topic: StateTopic, clock: Clock) -> None:
        self._topic = topic
        self._clock = clock
        self._shards: dict[int, S] = {}
        self._tasks = Tasks(clock)
        self._leading: dict[int, asyncio.Task[None]] = {}
        """The task of each partition that is led here."""
        self._closed = False
        self._has_chores = False

    # What a coordinator adds

    def _make_shard(self, index: int, leader_epoch: int) -> S:
        """A shard that is not loaded yet."""
        raise NotImplementedError

    def _housekeeping(self) -> Mapping[str, Work]:
        """What is done all the time, by name, from the first partition on that is led here."""
        raise NotImplementedError

    # Life

    def begin_closing(self) -> None:
        """Answer everybody who waits with NOT_COORDINATOR, and nobody any more."""
        self._closed = True
        for index in list(self._shards):
            self.partition_lost(index)
        self._tasks.cancel()

    async def stop(self) -> None:
        """Return when nothing of the coordinator runs any more; what is in the log is safe there."""
        self.begin_closing()
        await self._tasks.stop()

    def partition_became_leader(self, index: int) -> None:
        """This broker leads a partition of the topic: load it. A new epoch begins anew."""
        epoch = self._topic.leader_epoch(index)
        current = self._shards.get(index)
        if self._closed or epoch is None or (current is not None and current.leader_epoch == epoch):
            return
        self.partition_lost(index)
        if not self._has_chores:
            self._has_chores = True
            for name, work in self._housekeeping().items():
                self._tasks.keep(name, work)
        self._shards[index] = self._make_shard(index, epoch)
        self._leading[index] = self._tasks.keep(
            f"coordinating {self._topic.name}-{index}", lambda: self._lead(index, epoch)
        )

    def partition_lost(self, index: int) -> None:
        """Another broker leads the partition, or nobody does: what it keeps is not ours any more."""
        shard = self._shards.pop(index, None)
        if shard is not None:
            shard.close()
            cancel(self._leading.pop(index))

    async def loaded(self) -> None:
        """Return when no partition is loading any more."""
        while loading := [shard for shard in self._shards.values() if shard.state is ShardState.LOADING]:
            await loading[0].loaded.wait()

    # Inside

    async def _lead(self, index: int, leader_epoch: int) -> None:
        shard = self._shards[index]
        try:
            await shard.run()
        finally:
            if self._shards.get(index) is shard:  # still led: the next attempt begins from nothing
                self._shards[index] = self._make_shard(index, leader_epoch)

    def _answering(self, index: int, what: str) -> S:
        """The shard that answers for a partition, or the ApiError that says why none does here."""
        if self._closed:
            raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE, "the broker is shutting down")
        shard = self._shards.get(index)
        if shard is None or shard.state is ShardState.CLOSED or self._topic.leader_epoch(index) != shard.leader_epoch:
            raise ApiError(ErrorCode.NOT_COORDINATOR, f"this broker does not coordinate {what}")
        if shard.state is ShardState.LOADING:
            raise ApiError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, f"{self._topic.name}-{index} is being loaded")
        return shard

    def _active(self) -> list[S]:
        """The shards that are loaded."""
        return [shard for shard in self._shards.values() if shard.state is ShardState.ACTIVE]

    def _chore(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.start(name, work)
