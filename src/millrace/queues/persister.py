"""The way to the share coordinator of a share-partition, on this broker or another.

Reads and writes say the same thing however often they are said, so they are repeated until an answer comes, somebody
else coordinates and answers, or the time is up. Owner: the event loop.
Not here: what is read and written (`share_partition`), the coordinator (`coordinator`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol, TypeVar

from millrace.clock import Clock
from millrace.cluster.channel import persist
from millrace.cluster.image import ClusterImage, TopicImage
from millrace.cluster.peers import Peers
from millrace.errors import ApiError, ErrorCode
from millrace.model import NO_EPOCH, SHARE_STATE_TOPIC
from millrace.queues.batches import RecordState, StateBatch
from millrace.queues.records import ShareKey, Snapshot
from millrace.queues.state import NO_COUNT, Summary, Write, partition_for
from millrace.wire.messages.share_state import (
    DeleteShareGroupStateRequest,
    InitializeShareGroupStateRequest,
    ReadShareGroupStateRequest,
    ReadShareGroupStateSummaryRequest,
    WriteShareGroupStateRequest,
)
from millrace.wire.schema import Request

T = TypeVar("T")

TIMEOUT_S: Final = 10.0
_READ_VERSION: Final = 0
_WRITE_VERSION: Final = 1
_SUMMARY_VERSION: Final = 1
_INITIALIZE_VERSION: Final = 0
_DELETE_VERSION: Final = 0

_RETRIABLE: Final = frozenset({
    ErrorCode.BROKER_NOT_AVAILABLE,
    ErrorCode.NOT_COORDINATOR,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.NETWORK_EXCEPTION,
    ErrorCode.REQUEST_TIMED_OUT,
})  # fmt: skip


class Coordinator(Protocol):
    """What a coordinator does, here or elsewhere."""

    async def read(self, key: ShareKey, leader_epoch: int) -> Snapshot: ...

    async def write(self, key: ShareKey, write: Write) -> None: ...

    async def initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None: ...

    async def delete(self, key: ShareKey) -> None: ...

    async def summary(self, key: ShareKey) -> Summary: ...


class Persister:
    """Reads and writes of share-partitions: those led here, and those of groups that are coordinated here."""

    def __init__(
        self,
        *,
        broker_id: int,
        local: Coordinator,
        peers: Peers,
        image: Callable[[], ClusterImage],
        ensure_topic: Callable[[str], Awaitable[TopicImage]],
        clock: Clock,
    ) -> None:
        self._broker_id = broker_id
        self._local = local
        self._peers = peers
        self._image = image
        self._ensure_topic = ensure_topic
        self._clock = clock

    def __repr__(self) -> str:
        return f"Persister(broker {self._broker_id})"

    async def read(self, key: ShareKey, leader_epoch: int) -> Snapshot:
        """The state of a share-partition for its leader; ApiError."""
        return await self._repeat(key, lambda coordinator: coordinator.read(key, leader_epoch))

    async def write(self, key: ShareKey, write: Write) -> None:
        """Keep a leader's news; returns when they are durable. ApiError leaves open whether they are."""
        await self._repeat(key, lambda coordinator: coordinator.write(key, write))

    async def initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        """Begin a share-partition, or begin it anew; returns when that is durable."""
        await self._repeat(key, lambda coordinator: coordinator.initialize(key, state_epoch, start_offset))

    async def delete(self, key: ShareKey) -> None:
        """Forget a share-partition; returns when that is durable."""
        await self._repeat(key, lambda coordinator: coordinator.delete(key))

    async def summary(self, key: ShareKey) -> Summary:
        """Where a share-partition begins, and how far its readers have got."""
        return await self._repeat(key, lambda coordinator: coordinator.summary(key))

    async def _repeat(self, key: ShareKey, ask: Callable[[Coordinator], Awaitable[T]]) -> T:
        async def attempt(_seconds_left: float) -> T:
            return await ask(await self._coordinator(key))

        return await persist(
            attempt, clock=self._clock, timeout_s=TIMEOUT_S, may_repeat=lambda error: error.code in _RETRIABLE
        )

    async def _coordinator(self, key: ShareKey) -> Coordinator:
        topic = self._image().topic(SHARE_STATE_TOPIC) or await self._ensure_topic(SHARE_STATE_TOPIC)
        leader = topic.partitions[partition_for(key, len(topic.partitions))].leader
        return self._local if leader == self._broker_id else _Remote(leader, self._peers)


class _Remote:
    """The coordinator on another broker."""

    def __init__(self, broker_id: int, peers: Peers) -> None:
        self._broker_id = broker_id
        self._peers = peers

    async def read(self, key: ShareKey, leader_epoch: int) -> Snapshot:
        asked = ReadShareGroupStateRequest.PartitionData(partition=key.partition, leader_epoch=leader_epoch)
        topic = ReadShareGroupStateRequest.ReadStateData(topic_id=key.topic_id, partitions=[asked])
        found = await self._ask(ReadShareGroupStateRequest(group_id=key.group_id, topics=[topic]), _READ_VERSION)
        return Snapshot(
            snapshot_epoch=NO_EPOCH,
            state_epoch=found.state_epoch,
            leader_epoch=leader_epoch,
            start_offset=found.start_offset,
            completed=NO_COUNT,
            created_ms=0,
            written_ms=0,
            batches=tuple(
                StateBatch(each.first_offset, each.last_offset, RecordState(each.delivery_state), each.delivery_count)
                for each in found.state_batches
            ),
        )

    async def write(self, key: ShareKey, write: Write) -> None:
        news = WriteShareGroupStateRequest.PartitionData(
            partition=key.partition,
            state_epoch=write.state_epoch,
            leader_epoch=write.leader_epoch,
            start_offset=write.start_offset,
            delivery_complete_count=write.completed,
            state_batches=[
                WriteShareGroupStateRequest.StateBatch(
                    first_offset=batch.first_offset,
                    last_offset=batch.last_offset,
                    delivery_state=batch.state,
                    delivery_count=batch.delivery_count,
                )
                for batch in write.batches
            ],
        )
        topic = WriteShareGroupStateRequest.WriteStateData(topic_id=key.topic_id, partitions=[news])
        await self._ask(WriteShareGroupStateRequest(group_id=key.group_id, topics=[topic]), _WRITE_VERSION)

    async def initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        asked = InitializeShareGroupStateRequest.PartitionData(
            partition=key.partition, state_epoch=state_epoch, start_offset=start_offset
        )
        topic = InitializeShareGroupStateRequest.InitializeStateData(topic_id=key.topic_id, partitions=[asked])
        await self._ask(InitializeShareGroupStateRequest(group_id=key.group_id, topics=[topic]), _INITIALIZE_VERSION)

    async def delete(self, key: ShareKey) -> None:
        asked = DeleteShareGroupStateRequest.PartitionData(partition=key.partition)
        topic = DeleteShareGroupStateRequest.DeleteStateData(topic_id=key.topic_id, partitions=[asked])
        await self._ask(DeleteShareGroupStateRequest(group_id=key.group_id, topics=[topic]), _DELETE_VERSION)

    async def summary(self, key: ShareKey) -> Summary:
        asked = ReadShareGroupStateSummaryRequest.PartitionData(partition=key.partition)
        topic = ReadShareGroupStateSummaryRequest.ReadStateSummaryData(topic_id=key.topic_id, partitions=[asked])
        found = await self._ask(
            ReadShareGroupStateSummaryRequest(group_id=key.group_id, topics=[topic]), _SUMMARY_VERSION
        )
        return Summary(found.state_epoch, found.leader_epoch, found.start_offset, found.delivery_complete_count)

    async def _ask(self, request: Request, version: int) -> Any:
        """The only result in the response; ApiError where it says so."""
        response = await self._peers.request(self._broker_id, request, version, round(TIMEOUT_S * 1000))
        (topic,) = response.results
        (found,) = topic.partitions
        if found.error_code:
            raise ApiError(ErrorCode(found.error_code), found.error_message or "")
        return found
