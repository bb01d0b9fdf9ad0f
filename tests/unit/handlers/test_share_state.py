"""The share coordinator's requests, over a socket as another broker would send them."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from millrace.client.connection import Connection
from millrace.errors import ErrorCode
from millrace.queues.records import ShareKey
from millrace.testing import Cluster
from millrace.wire.messages.groups import FindCoordinatorRequest
from millrace.wire.messages.share_state import (
    DeleteShareGroupStateRequest,
    InitializeShareGroupStateRequest,
    ReadShareGroupStateRequest,
    ReadShareGroupStateSummaryRequest,
    WriteShareGroupStateRequest,
)
from support.queues import begin, coordinator_of, leader_of


class Asking:
    """One share-partition, and whoever coordinates it."""

    def __init__(self, address: str, key: ShareKey, coordinator: Connection) -> None:
        self.address = address
        self.key = key
        self.coordinator = coordinator

    async def ask(self, request: type[Any], topic: type[Any], version: int, **item: Any) -> Any:
        group = item.pop("group", self.key.group_id)
        topic_id = item.pop("topic_id", self.key.topic_id)
        asked = request.PartitionData(partition=item.pop("partition", self.key.partition), **item)
        response = await self.coordinator.request(
            request(group_id=group, topics=[topic(topic_id=topic_id, partitions=[asked])]), version
        )
        return response.results[0].partitions[0]

    async def read(self, leader_epoch: int, **item: Any) -> Any:
        request = ReadShareGroupStateRequest
        return await self.ask(request, request.ReadStateData, 0, leader_epoch=leader_epoch, **item)

    async def write(self, *, first: int, last: int, state: int = 2, leader_epoch: int = 1, version: int = 1) -> Any:
        request = WriteShareGroupStateRequest
        batch = request.StateBatch(first_offset=first, last_offset=last, delivery_state=state, delivery_count=1)
        return await self.ask(
            request,
            request.WriteStateData,
            version,
            state_epoch=0,
            leader_epoch=leader_epoch,
            start_offset=5,
            state_batches=[batch],
            **({"delivery_complete_count": last - first + 1} if version >= 1 else {}),
        )

    async def summary(self, version: int = 1) -> Any:
        request = ReadShareGroupStateSummaryRequest
        return await self.ask(request, request.ReadStateSummaryData, version, leader_epoch=-1)

    async def delete(self) -> Any:
        request = DeleteShareGroupStateRequest
        return await self.ask(request, request.DeleteStateData, 0)


@pytest.fixture
async def asking() -> AsyncIterator[Asking]:
    with Cluster(settings={"share.coordinator.state.topic.num.partitions": "2"}) as cluster:
        cluster.create_topic("t")
        address = cluster.bootstrap_servers
        connection, topic_id = await leader_of(address, "t")
        await connection.close()
        key = ShareKey("g:with:colons", topic_id, 0)
        async with await coordinator_of(address, key) as coordinator:
            yield Asking(address, key, coordinator)


@pytest.mark.parametrize("version", [0, 1])
async def test_the_state_from_its_beginning_to_its_end(asking: Asking, version: int) -> None:
    before = await asking.summary()
    assert (before.error_code, before.start_offset) == (0, -1)
    assert (await asking.read(1)).error_code == ErrorCode.INVALID_REQUEST
    await begin(asking.address, asking.key, 5)
    assert (await asking.read(1)).start_offset == 5
    assert (await asking.write(first=7, last=8, version=version)).error_code == 0
    found = await asking.read(1)
    assert [(each.first_offset, each.last_offset, each.delivery_state) for each in found.state_batches] == [(7, 8, 2)]
    summary = await asking.summary(version)
    assert (summary.start_offset, summary.leader_epoch, summary.state_epoch) == (5, 1, 0)
    assert summary.delivery_complete_count == (2 if version >= 1 else -1)
    assert (await asking.delete()).error_code == 0
    assert (await asking.summary()).start_offset == -1


async def test_what_is_refused(asking: Asking) -> None:
    await begin(asking.address, asking.key, 5)
    assert (await asking.read(3)).error_code == 0
    assert (await asking.write(first=7, last=8, leader_epoch=2)).error_code == ErrorCode.FENCED_LEADER_EPOCH
    assert (await asking.write(first=8, last=7, leader_epoch=3)).error_code == ErrorCode.INVALID_REQUEST
    assert (await asking.write(first=7, last=8, state=9, leader_epoch=3)).error_code == ErrorCode.INVALID_REQUEST
    assert (await asking.read(3, group="")).error_code == ErrorCode.INVALID_REQUEST
    assert (await asking.read(3, partition=7)).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    unknown = await asking.read(3, topic_id=uuid.UUID(int=99))
    assert unknown.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    request = InitializeShareGroupStateRequest
    older = await asking.ask(request, request.InitializeStateData, 0, state_epoch=-1, start_offset=0)
    assert older.error_code == 0
    named = FindCoordinatorRequest(coordinator_keys=["g", "g:x:0", str(asking.key)], key_type=2)
    found = (await asking.coordinator.request(named, 6)).coordinators
    assert [each.error_code for each in found] == [ErrorCode.INVALID_REQUEST, ErrorCode.INVALID_REQUEST, 0]
