"""The way to the share coordinator of a share-partition, on this broker or another.

Reads and writes say the same thing however often they are said, so they are repeated until an answer comes, somebody
else coordinates and answers, or the time is up. Owner: the event loop; one connection is kept to each coordinator.
Not here: what is read and written (`share_partition`), the coordinator (`coordinator`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol, TypeVar

from millrace.client.connection import Connection
from millrace.clock import Clock
from millrace.cluster.channel import client_id, inter_broker_endpoint, persist
from millrace.cluster.image import ClusterImage, TopicImage
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import Endpoint
from millrace.model import NO_EPOCH, SHARE_STATE_TOPIC
from millrace.queues.batches import RecordState, StateBatch
from millrace.queues.records import ShareKey, Snapshot
from millrace.queues.state import NO_COUNT, Write, partition_for
from millrace.wire.messages.share_state import ReadShareGroupStateRequest, WriteShareGroupStateRequest
from millrace.wire.schema import Request

T = TypeVar("T")

TIMEOUT_S: Final = 10.0
CONNECT_TIMEOUT_MS: Final = 2000
_READ_VERSION: Final = 0
_WRITE_VERSION: Final = 1

_RETRIABLE: Final = frozenset({
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


class Persister:
    """Reads and writes of this broker's share-partitions."""

    def __init__(
        self,
        *,
        broker_id: int,
        listener: str,
        local: Coordinator,
        image: Callable[[], ClusterImage],
        ensure_topic: Callable[[str], Awaitable[TopicImage]],
        clock: Clock,
    ) -> None:
        self._broker_id = broker_id
        self._listener = listener
        self._local = local
        self._image = image
        self._ensure_topic = ensure_topic
        self._clock = clock
        self._remotes: dict[int, _Remote] = {}

    def __repr__(self) -> str:
        return f"<persister, {len(self._remotes)} connections>"

    async def read(self, key: ShareKey, leader_epoch: int) -> Snapshot:
        """The state of a share-partition for its leader; ApiError."""
        return await self._repeat(key, lambda coordinator: coordinator.read(key, leader_epoch))

    async def write(self, key: ShareKey, write: Write) -> None:
        """Keep a leader's news; returns when they are durable. ApiError leaves open whether they are."""
        await self._repeat(key, lambda coordinator: coordinator.write(key, write))

    async def stop(self) -> None:
        """End the connections; requests under way fail."""
        remotes, self._remotes = self._remotes, {}
        await asyncio.gather(*(remote.close() for remote in remotes.values()))

    async def _repeat(self, key: ShareKey, ask: Callable[[Coordinator], Awaitable[T]]) -> T:
        async def attempt(_seconds_left: float) -> T:
            return await ask(await self._coordinator(key))

        return await persist(
            attempt, clock=self._clock, timeout_s=TIMEOUT_S, may_repeat=lambda error: error.code in _RETRIABLE
        )

    async def _coordinator(self, key: ShareKey) -> Coordinator:
        topic = self._image().topic(SHARE_STATE_TOPIC) or await self._ensure_topic(SHARE_STATE_TOPIC)
        leader = topic.partitions[partition_for(key, len(topic.partitions))].leader
        if leader == self._broker_id:
            return self._local
        endpoint = inter_broker_endpoint(self._image(), leader, self._listener)
        if endpoint is None:
            raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE, f"{SHARE_STATE_TOPIC}: a partition has no leader")
        remote = self._remotes.get(leader)
        if remote is None or remote.endpoint != endpoint:
            if remote is not None:
                await remote.close()
            remote = self._remotes[leader] = _Remote(endpoint, self._broker_id, self._clock)
        return remote


class _Remote:
    """The coordinator on another broker."""

    def __init__(self, endpoint: Endpoint, broker_id: int, clock: Clock) -> None:
        self.endpoint = endpoint
        self._broker_id = broker_id
        self._clock = clock
        self._connection: Connection | None = None
        self._opening = asyncio.Lock()

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

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _ask(self, request: Request, version: int) -> Any:
        """The only result in the response; ApiError where it says so."""
        connection = await self._connected()
        response = await connection.request(request, version, timeout_ms=round(TIMEOUT_S * 1000))
        (topic,) = response.results
        (found,) = topic.partitions
        if found.error_code:
            raise ApiError(ErrorCode(found.error_code), found.error_message or "")
        return found

    async def _connected(self) -> Connection:
        async with self._opening:
            if self._connection is not None and self._connection.is_closed:
                await self.close()
            if self._connection is None:
                self._connection = await Connection.open(
                    self.endpoint.host,
                    self.endpoint.port,
                    client_id=client_id(self._broker_id),
                    timeout_ms=CONNECT_TIMEOUT_MS,
                    clock=self._clock,
                    negotiate=False,
                )
            return self._connection
