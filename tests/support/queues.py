"""A member of a share group that speaks the protocol itself, to the leader of one partition."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from millrace.client.connection import Connection
from millrace.queues.records import ShareKey
from millrace.records.batch import split
from millrace.records.decode import decode_records
from millrace.wire.messages.cluster import MetadataRequest
from millrace.wire.messages.groups import FindCoordinatorRequest
from millrace.wire.messages.share_groups import ShareAcknowledgeRequest, ShareFetchRequest
from millrace.wire.messages.share_state import InitializeShareGroupStateRequest

FIND_VERSION = 6
METADATA_VERSION = 12


async def connect(address: str) -> Connection:
    host, _, port = address.rpartition(":")
    return await Connection.open(host, int(port))


async def topic_of(connection: Connection, name: str) -> Any:
    """Metadata of a topic: its id, and who leads its partitions."""
    asked = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name=name)])
    response = await connection.request(asked, METADATA_VERSION)
    (topic,) = response.topics
    assert topic.error_code == 0
    return response, topic


async def leader_of(address: str, name: str, partition: int = 0) -> tuple[Connection, uuid.UUID]:
    """A connection to the broker that leads a partition, and the topic's id."""
    async with await connect(address) as any_broker:
        response, topic = await topic_of(any_broker, name)
        leader = next(each.leader_id for each in topic.partitions if each.partition_index == partition)
        broker = next(each for each in response.brokers if each.node_id == leader)
    return await Connection.open(broker.host, broker.port), topic.topic_id


async def coordinator_of(address: str, key: ShareKey) -> Connection:
    """A connection to the share coordinator of a share-partition."""
    async with await connect(address) as any_broker:
        asked = FindCoordinatorRequest(coordinator_keys=[str(key)], key_type=2)
        (found,) = (await any_broker.request(asked, FIND_VERSION)).coordinators
        assert found.error_code == 0, found.error_message
    return await Connection.open(found.host, found.port)


async def begin(address: str, key: ShareKey, start_offset: int, state_epoch: int = 0) -> None:
    """What the group coordinator does when a group first reads a partition."""
    item = InitializeShareGroupStateRequest.PartitionData(
        partition=key.partition, state_epoch=state_epoch, start_offset=start_offset
    )
    topic = InitializeShareGroupStateRequest.InitializeStateData(topic_id=key.topic_id, partitions=[item])
    async with await coordinator_of(address, key) as coordinator:
        response = await coordinator.request(InitializeShareGroupStateRequest(group_id=key.group_id, topics=[topic]), 0)
    assert response.results[0].partitions[0].error_code == 0, response


class Member:
    """One member with one session on one broker."""

    def __init__(self, connection: Connection, key: ShareKey, name: str = "m", version: int = 2) -> None:
        self.connection = connection
        self.key = key
        self.name = name
        self.version = version
        self.epoch = 0

    async def fetch(
        self,
        *,
        acknowledge: Sequence[tuple[int, int, Sequence[int]]] = (),
        max_records: int = 500,
        wait_ms: int = 0,
        epoch: int | None = None,
        mode: int = 0,
        min_bytes: int = 1,
    ) -> Any:
        """The whole response; `taken` says what came with it."""
        batches = [
            ShareFetchRequest.AcknowledgementBatch(first_offset=first, last_offset=last, acknowledge_types=list(kinds))
            for first, last, kinds in acknowledge
        ]
        item = ShareFetchRequest.FetchPartition(partition_index=self.key.partition, acknowledgement_batches=batches)
        topics = [ShareFetchRequest.FetchTopic(topic_id=self.key.topic_id, partitions=[item])]
        used = self.epoch if epoch is None else epoch
        request = ShareFetchRequest(
            group_id=self.key.group_id,
            member_id=self.name,
            share_session_epoch=used,
            max_wait_ms=wait_ms,
            min_bytes=min_bytes,
            max_records=max_records,
            batch_size=max_records,
            topics=topics if batches or used == 0 else [],
        )
        if self.version >= 2:
            request.share_acquire_mode = mode
        response = await self.connection.request(request, self.version)
        if epoch is None and response.error_code == 0:
            self.epoch = used + 1
        return response

    async def acknowledge(
        self, *batches: tuple[int, int, Sequence[int]], epoch: int | None = None, renew: bool = False
    ) -> Any:
        item = ShareAcknowledgeRequest.AcknowledgePartition(
            partition_index=self.key.partition,
            acknowledgement_batches=[
                ShareAcknowledgeRequest.AcknowledgementBatch(
                    first_offset=first, last_offset=last, acknowledge_types=list(kinds)
                )
                for first, last, kinds in batches
            ],
        )
        request = ShareAcknowledgeRequest(
            group_id=self.key.group_id,
            member_id=self.name,
            share_session_epoch=self.epoch if epoch is None else epoch,
            topics=[ShareAcknowledgeRequest.AcknowledgeTopic(topic_id=self.key.topic_id, partitions=[item])],
        )
        if self.version >= 2:
            request.is_renew_ack = renew
        response = await self.connection.request(request, self.version)
        if epoch is None and response.error_code == 0:
            self.epoch += 1
        return response


def taken(response: Any) -> list[tuple[int, int, int]]:
    """The acquired ranges of a response with their delivery counts; the records of all of them came along."""
    assert response.error_code == 0, (response.error_code, response.error_message)
    found = []
    for topic in response.responses:
        for partition in topic.partitions:
            assert partition.error_code == 0, (partition.error_code, partition.error_message)
            offsets = {record.offset for batch in split(partition.records) for record in decode_records(batch.data)}
            for each in partition.acquired_records:
                assert offsets.issuperset(range(each.first_offset, each.last_offset + 1))
                found.append((each.first_offset, each.last_offset, each.delivery_count))
    return found


def refusal(response: Any) -> int:
    """The error that the acknowledgement of the only partition got."""
    (topic,) = response.responses
    (partition,) = topic.partitions
    if hasattr(partition, "acknowledge_error_code"):
        return int(partition.acknowledge_error_code)
    return int(partition.error_code)
