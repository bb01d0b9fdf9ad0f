"""The share coordinator of a broker: which shard answers for a share-partition, and whether it may.

Owner of the shards and of their tasks. Every failure is an ApiError. Not here: how shards come and go
(`replication.sharded`), decisions (`state`), durability (`shard`), requests and responses (`handlers.share_state`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping
from uuid import UUID

from millrace.clock import Clock
from millrace.errors import ApiError, ErrorCode, StorageError
from millrace.model import ZERO_UUID
from millrace.queues.records import ShareKey, Snapshot
from millrace.queues.settings import CoordinatorSettings
from millrace.queues.shard import QueueShard
from millrace.queues.state import Summary, Write, partition_for
from millrace.replication.sharded import ShardedCoordinator
from millrace.replication.state_topic import StateTopic
from millrace.tasks import Work

logger = logging.getLogger(__name__)


class ShareCoordinator(ShardedCoordinator[QueueShard]):
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
        super().__init__(state_topic, clock)
        self.settings = settings
        self._partitions_of = partitions_of
        self._prune = prune

    def __repr__(self) -> str:
        count = sum(len(shard.states) for shard in self._shards.values())
        return f"ShareCoordinator({len(self._shards)} partitions, {count} share-partitions)"

    def _make_shard(self, index: int, leader_epoch: int) -> QueueShard:
        return QueueShard(index, leader_epoch, topic=self._topic, settings=self.settings, clock=self._clock)

    def _housekeeping(self) -> Mapping[str, Work]:
        return {"share state snapshots": self._rewrite_for_ever, "share state pruning": self._prune_for_ever}

    def topic_deleted(self, topic_id: UUID) -> None:
        """Forget the state of a topic that is gone; the tombstones are written in the background."""
        for shard in self._active():
            self._chore("share state of a deleted topic", self._tend(shard, shard.forget_topics({topic_id})))

    def partition_for(self, key: ShareKey) -> int:
        """Where the state of a share-partition is kept."""
        return partition_for(key, self._topic.partition_count)

    # --- requests -----------------------------------------------------------------------------------------------------

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

    async def summary(self, key: ShareKey) -> Summary:
        """The state in short; it begins nowhere where there is none."""
        self._check_topic(key)
        found = self._shard(key).summary(key)
        if found is None:
            return Summary()
        return Summary(found.state_epoch, found.leader_epoch, found.snapshot.start_offset, found.snapshot.completed)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _check_topic(self, key: ShareKey) -> None:
        if key.topic_id == ZERO_UUID or key.partition < 0:
            raise ApiError(ErrorCode.INVALID_REQUEST, "a share-partition needs a topic id and a partition")
        if key.partition >= self._partitions_of(key.topic_id):
            raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "the topic has no such partition")

    def _shard(self, key: ShareKey) -> QueueShard:
        """The shard that answers for a share-partition, or the ApiError that says why none does here."""
        return self._answering(self.partition_for(key), str(key))

    async def _tend(self, shard: QueueShard, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except ApiError as error:
            logger.warning("housekeeping of %r: %s", shard, error)
        except Exception:
            logger.exception("housekeeping of %r", shard)

    async def _rewrite_for_ever(self) -> None:
        while True:
            await self._clock.sleep(self.settings.snapshot_interval_ms / 1000)
            for shard in self._active():
                # A topic may have gone while nobody coordinated here.
                gone = {key.topic_id for key in shard.states if not self._partitions_of(key.topic_id)}
                await self._tend(shard, shard.forget_topics(gone))
                await self._tend(shard, shard.rewrite_cold())

    async def _prune_for_ever(self) -> None:
        while True:
            await self._clock.sleep(self.settings.prune_interval_ms / 1000)
            for shard in self._active():
                if shard.superfluous_before > 0:
                    try:
                        self._prune(shard.index, shard.superfluous_before)
                    except (ApiError, StorageError) as error:
                        logger.warning("the start of %r stays: %s", shard, error)
                    except Exception:  # of one log: the others go on
                        logger.exception("the start of %r stays", shard)
