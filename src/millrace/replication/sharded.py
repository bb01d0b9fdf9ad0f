"""A coordinator whose state lies in the partitions of an internal topic: a shard for each partition that is led here.

A shard is made when this broker begins to lead its partition, loads it, and answers until another broker leads it. It
answers only in the leader epoch under which it was loaded, because an answer from the memory of a former coordinator
can be fatal to a client (KAFKA-21181). A shard that fails while this broker leads, because its log could not be read or
written, is replaced by a new one that loads again, after a pause; whoever asks meanwhile is told to wait.

Owner of the shards, of their tasks and of the coordinator's chores; everything runs on the loop. Not here: what a shard
keeps (`groups.shard`, `queues.shard`), how it writes (`state_writer`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from enum import Enum
from typing import Any, Final, Generic, Protocol, TypeVar

from millrace.clock import Clock
from millrace.errors import ApiError, ErrorCode
from millrace.replication.state_topic import StateTopic
from millrace.tasks import Tasks, Work, cancel

WRITE_ERRORS: Final = {
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_ENOUGH_REPLICAS: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.REQUEST_TIMED_OUT: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_LEADER_OR_FOLLOWER: ErrorCode.NOT_COORDINATOR,
    ErrorCode.KAFKA_STORAGE_ERROR: ErrorCode.NOT_COORDINATOR,
}
"""What a failed write to the log means to whoever asked the coordinator."""


class ShardState(Enum):
    """Whether a shard can be asked."""

    LOADING = "loading"
    ACTIVE = "active"
    CLOSED = "closed"


class StateShard(Protocol):
    """One led partition of the topic."""

    index: int
    leader_epoch: int
    state: ShardState
    loaded: asyncio.Event
    """Set when the shard is active or closed."""

    async def run(self) -> None:
        """Load the partition, then confirm writes until cancelled; raises what makes that impossible.

        However it ends, the shard is closed then, and nothing of it runs any more.
        """

    def close(self) -> None:
        """Answer everybody who waits with NOT_COORDINATOR, and stop. Harmless when repeated."""


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
