"""The share coordinator of a broker: which shard answers for a share-partition, and whether it may.

Owner of the shards and of their tasks. Every failure is an ApiError. A shard answers only while this broker still
leads its partition in the epoch under which it was loaded. Not here: decisions (`state`), durability (`shard`),
requests and responses (`handlers.share_state`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from uuid import UUID

from millrace.clock import Clock
from millrace.errors import ApiError, ErrorCode, StorageError
from millrace.model import ZERO_UUID
from millrace.queues.records import ShareKey, Snapshot
from millrace.queues.settings import CoordinatorSettings
from millrace.queues.shard import ShardState, ShareShard
from millrace.queues.state import ShareState, Write, partition_for
from millrace.replication.state_topic import StateTopic

log = logging.getLogger(__name__)


class ShareCoordinator:
    """Every share-partition whose partition of `__share_group_state` this broker leads."""

    def __init__(
        self,
        *,
        clock: Clock,
        settings: CoordinatorSettings,
        state_topic: StateTopic,
        partitions_of: Callable[[UUID], int],
        prune: Callable[[int, int], object],
    ) -> None:
        """`partitions_of` a topic: 0 where there is none. `prune(index, offset)` cuts the start off a partition."""
        self.settings = settings
        self._clock = clock
        self._topic = state_topic
        self._partitions_of = partitions_of
        self._prune = prune
        self._shards: dict[int, ShareShard] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._chores: set[asyncio.Task[None]] = set()
        self._closed = False
        self._keeps_house = False

    def __repr__(self) -> str:
        count = sum(len(shard.states) for shard in self._shards.values())
        return f"<share coordinator of {len(self._shards)} partitions, {count} share-partitions>"

    # ------------------------------------------------------------------------------------------------------------ life

    def begin_closing(self) -> None:
        """Answer everybody who waits with NOT_COORDINATOR, and nobody any more."""
        self._closed = True
        for index in list(self._shards):
            self.partition_lost(index)
        for chore in self._chores:
            chore.cancel()

    async def stop(self) -> None:
        """Return when nothing of the coordinator runs any more; what is in the log is safe there."""
        self.begin_closing()
        await asyncio.gather(*self._chores, return_exceptions=True)

    def partition_became_leader(self, index: int) -> None:
        """This broker leads a partition of the state topic: load it. A new epoch begins anew."""
        epoch = self._topic.leader_epoch(index)
        current = self._shards.get(index)
        if self._closed or epoch is None or (current is not None and current.leader_epoch == epoch):
            return
        self.partition_lost(index)
        if not self._keeps_house:
            self._keeps_house = True
            self._chore(self._rewrite_for_ever())
            self._chore(self._prune_for_ever())
        shard = ShareShard(index, epoch, topic=self._topic, settings=self.settings, clock=self._clock)
        self._shards[index] = shard
        self._tasks[index] = asyncio.get_running_loop().create_task(shard.run(), name=f"share shard {index}")

    def partition_lost(self, index: int) -> None:
        """Another broker leads the partition, or nobody does: its share-partitions are not ours any more."""
        shard = self._shards.pop(index, None)
        if shard is not None:
            shard.close()
            task = self._tasks.pop(index)
            task.cancel()
            self._chores.add(task)
            task.add_done_callback(self._chores.discard)

    async def loaded(self) -> None:
        """Return when no partition is loading any more."""
        for shard in list(self._shards.values()):
            await shard.loaded.wait()

    def topic_deleted(self, topic_id: UUID) -> None:
        """Forget the state of a topic that is gone; the tombstones are written in the background."""
        for shard in self._shards.values():
            if shard.state is ShardState.ACTIVE:
                self._chore(self._tend(shard, shard.forget_topics({topic_id})))

    def partition_for(self, key: ShareKey) -> int:
        """Where the state of a share-partition is kept."""
        return partition_for(key, self._topic.partition_count)

    # -------------------------------------------------------------------------------------------------------- requests

    async def initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        """Begin a share-partition, durably."""
        self._check_topic(key)
        await self._shard(key).initialize(key, state_epoch, start_offset)

    async def read(self, key: ShareKey, leader_epoch: int) -> Snapshot:
        """The state for a leader, which from now on is the only one that may write it."""
        self._check_topic(key)
        return await self._shard(key).read(key, leader_epoch)

    async def write(self, key: ShareKey, write: Write) -> None:
        """Keep a leader's news, durably. Cancellation does not take it back."""
        self._check_topic(key)
        await self._shard(key).write(key, write)

    async def delete(self, key: ShareKey) -> None:
        """Forget a share-partition, durably."""
        self._check_topic(key)
        await self._shard(key).delete(key)

    def summary(self, key: ShareKey) -> ShareState | None:
        """The state in short; None where there is none."""
        self._check_topic(key)
        return self._shard(key).summary(key)

    # ---------------------------------------------------------------------------------------------------------- inside

    def _check_topic(self, key: ShareKey) -> None:
        if key.topic_id == ZERO_UUID or key.partition < 0:
            raise ApiError(ErrorCode.INVALID_REQUEST, "a share-partition needs a topic id and a partition")
        if key.partition >= self._partitions_of(key.topic_id):
            raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "the topic has no such partition")

    def _shard(self, key: ShareKey) -> ShareShard:
        """The shard that answers for a share-partition, or the ApiError that says why none does here."""
        if self._closed:
            raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE, "the broker is shutting down")
        index = self.partition_for(key)
        shard = self._shards.get(index)
        if shard is None or shard.state is ShardState.CLOSED or self._topic.leader_epoch(index) != shard.leader_epoch:
            raise ApiError(ErrorCode.NOT_COORDINATOR, f"this broker does not coordinate {key}")
        if shard.state is ShardState.LOADING:
            raise ApiError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, "the state of this partition is being loaded")
        return shard

    def _chore(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    async def _tend(self, shard: ShareShard, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except ApiError as error:
            log.warning("housekeeping of %r: %s", shard, error)
        except Exception:
            log.exception("housekeeping of %r", shard)

    async def _rewrite_for_ever(self) -> None:
        while True:
            await self._clock.sleep(self.settings.snapshot_interval_ms / 1000)
            for shard in list(self._shards.values()):
                if shard.state is ShardState.ACTIVE:
                    # A topic may have gone while nobody coordinated here.
                    gone = {key.topic_id for key in shard.states if not self._partitions_of(key.topic_id)}
                    await self._tend(shard, shard.forget_topics(gone))
                    await self._tend(shard, shard.rewrite_cold())

    async def _prune_for_ever(self) -> None:
        while True:
            await self._clock.sleep(self.settings.prune_interval_ms / 1000)
            for shard in list(self._shards.values()):
                if shard.state is ShardState.ACTIVE and shard.superfluous_before > 0:
                    try:
                        self._prune(shard.index, shard.superfluous_before)
                    except (ApiError, StorageError) as error:
                        log.warning("the start of %r stays: %s", shard, error)
