"""The transaction coordinator of a broker: which shard answers for a transactional id, and whether it may.

Owner of the shards and of their tasks. Every failure is an ApiError. Not here: how shards come and go
(`replication.sharded`), decisions (`state`), durability (`shard`), requests and responses (`handlers.transactions`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from millrace.clock import Clock
from millrace.errors import ApiError, ErrorCode
from millrace.model import TopicPartition
from millrace.replication.sharded import ShardedCoordinator, ShardState
from millrace.replication.state_topic import StateTopic
from millrace.tasks import Work
from millrace.transactions.settings import TransactionSettings
from millrace.transactions.shard import Markers, TransactionCounts, TransactionShard
from millrace.transactions.state import Producer, Transaction

logger = logging.getLogger(__name__)


class ListedTransaction(NamedTuple):
    """A transactional id in a list."""

    transactional_id: str
    transaction: Transaction


class TransactionCoordinator(ShardedCoordinator[TransactionShard]):
    """Every transactional id whose partition of `__transaction_state` this broker leads."""

    def __init__(
        self,
        *,
        clock: Clock,
        settings: TransactionSettings,
        state_topic: StateTopic,
        markers: Markers,
        new_producer_id: Callable[[], Awaitable[int]],
    ) -> None:
        super().__init__(state_topic, clock)
        self.settings = settings
        self.counts = TransactionCounts()
        self._markers = markers
        self._new_producer_id = new_producer_id

    def __repr__(self) -> str:
        count = sum(len(shard.transactions) for shard in self._shards.values())
        return f"TransactionCoordinator({len(self._shards)} partitions, {count} transactional ids)"

    def _make_shard(self, index: int, leader_epoch: int) -> TransactionShard:
        return TransactionShard(
            index,
            leader_epoch,
            topic=self._topic,
            markers=self._markers,
            new_producer_id=self._producer_id,
            settings=self.settings,
            clock=self._clock,
            counts=self.counts,
        )

    def _housekeeping(self) -> Mapping[str, Work]:
        return {"transactions out of time": self._abort_for_ever, "transactional ids": self._forget_for_ever}

    @property
    def shards(self) -> Sequence[TransactionShard]:
        """What is coordinated here and loaded: for who looks at it and changes nothing."""
        return self._active()

    def partition_for(self, transactional_id: str) -> int:
        """Where the state of a transactional id is kept."""
        return self._topic.partition_for(transactional_id)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def init_producer_id(
        self, transactional_id: str, timeout_ms: int, expected: Producer | None = None
    ) -> Producer:
        """Who the producer with this transactional id is from now on; every other one is fenced."""
        if not 0 < timeout_ms <= self.settings.max_timeout_ms:
            _check_id(transactional_id)
            raise ApiError(
                ErrorCode.INVALID_TRANSACTION_TIMEOUT,
                f"a transaction may take from 1 to {self.settings.max_timeout_ms} ms, not {timeout_ms}",
            )
        return await self._shard(transactional_id).init(transactional_id, timeout_ms, expected)

    async def add_partitions(
        self, transactional_id: str, producer: Producer, partitions: Collection[TopicPartition], *, version: int
    ) -> None:
        """Make partitions part of the transaction, durably; it begins with the first."""
        await self._shard(transactional_id).add(transactional_id, producer, partitions, version)

    def add_at_once(
        self, transactional_id: str, producer: Producer, partitions: Collection[TopicPartition], *, version: int
    ) -> bool:
        """The same without a wait; False where there is something to wait for: then `add_partitions` does."""
        return self._shard(transactional_id).add_at_once(transactional_id, producer, partitions, version)

    def verify(
        self, transactional_id: str, producer: Producer, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, ErrorCode]:
        """Whether partitions are part of the ongoing transaction."""
        return self._shard(transactional_id).verify(transactional_id, producer, partitions)

    async def end(self, transactional_id: str, producer: Producer, *, commits: bool, version: int) -> Producer:
        """Decide the outcome, durably; with version 2 the answer is who the producer is from now on."""
        return await self._shard(transactional_id).end(transactional_id, producer, commits=commits, version=version)

    def completion(self, transactional_id: str) -> asyncio.Future[None] | None:
        """Done when nothing that was decided about the id is under way any more; None where nothing is."""
        return self._shard(transactional_id).completion(transactional_id)

    def describe(self, transactional_id: str) -> Transaction:
        """What is known of an id."""
        found = self._shard(transactional_id).transactions.get(transactional_id)
        if found is None:
            raise ApiError(ErrorCode.TRANSACTIONAL_ID_NOT_FOUND, f"{transactional_id!r} is not known")
        return found

    def list(self) -> list[ListedTransaction]:
        """Everything that is coordinated here; COORDINATOR_LOAD_IN_PROGRESS while a part of it is not known yet."""
        if self._closed:
            raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE, "the broker is shutting down")
        if any(shard.state is ShardState.LOADING for shard in self._shards.values()):
            raise ApiError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, "some transactional ids are being loaded")
        return [
            ListedTransaction(transactional_id, transaction)
            for shard in self._active()
            for transactional_id, transaction in shard.transactions.items()
        ]

    # --- inside -------------------------------------------------------------------------------------------------------

    def _shard(self, transactional_id: str) -> TransactionShard:
        """The shard that answers for an id, or the ApiError that says why none does here."""
        _check_id(transactional_id)
        return self._answering(self.partition_for(transactional_id), repr(transactional_id))

    async def _producer_id(self) -> int:
        try:
            return await self._new_producer_id()
        except ApiError as error:
            # The controller cannot be reached: every client asks again after this.
            raise ApiError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, f"no producer id: {error}") from error

    async def _abort_for_ever(self) -> None:
        while True:
            await self._clock.sleep(self.settings.abort_interval_ms / 1000)
            for shard in self._active():
                await asyncio.gather(*(self._abort(shard, each) for each in shard.timed_out()))

    async def _abort(self, shard: TransactionShard, transactional_id: str) -> None:
        try:
            await shard.abort_timed_out(transactional_id)
        except ApiError as error:
            logger.info("the transaction of %r is out of time and stays for now: %s", transactional_id, error)
        except Exception:  # of one transaction: the others go on
            logger.exception("aborting the transaction of %r", transactional_id)

    async def _forget_for_ever(self) -> None:
        while True:
            await self._clock.sleep(self.settings.expiration_interval_ms / 1000)
            for shard in self._active():
                try:
                    await shard.forget_expired()
                except ApiError as error:
                    logger.warning("unused transactional ids of %r stay for now: %s", shard, error)


def _check_id(transactional_id: str) -> None:
    if not transactional_id:
        raise ApiError(ErrorCode.INVALID_REQUEST, "the transactional id is empty")
