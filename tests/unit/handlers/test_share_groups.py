"""Share groups over sockets: joining, reading, being described; where queues begin, on one broker and on three."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import UUID

import pytest
from confluent_kafka import Producer

from millrace.client.connection import Connection
from millrace.errors import ErrorCode
from millrace.queues.records import ShareKey
from millrace.testing import Cluster
from millrace.wire.keys import ApiKey
from millrace.wire.messages.api_versions import ApiVersionsRequest
from millrace.wire.messages.groups import DeleteGroupsRequest, FindCoordinatorRequest, ListGroupsRequest
from millrace.wire.messages.share_groups import (
    AlterShareGroupOffsetsRequest,
    DeleteShareGroupOffsetsRequest,
    DescribeShareGroupOffsetsRequest,
    ShareGroupDescribeRequest,
    ShareGroupHeartbeatRequest,
)
from support.queues import Member, connect, leader_of, refusal, taken

ACCEPT = 1
SETTINGS = {
    "share.coordinator.state.topic.num.partitions": "5",
    "offsets.topic.num.partitions": "5",
    "num.partitions": "3",
}


class Admin:
    """Asks the coordinator of one group."""

    def __init__(self, connection: Connection, group: str) -> None:
        self.connection = connection
        self.group = group

    async def heartbeat(self, member: str, epoch: int, *topics: str) -> Any:
        asked = ShareGroupHeartbeatRequest(
            group_id=self.group,
            member_id=member,
            member_epoch=epoch,
            subscribed_topic_names=list(topics) if topics else None,
        )
        return await self.connection.request(asked, 1)

    async def describe(self) -> Any:
        asked = ShareGroupDescribeRequest(group_ids=[self.group], include_authorized_operations=True)
        (described,) = (await self.connection.request(asked, 1)).groups
        return described

    async def offsets(self, topics: dict[str, list[int]] | None = None, version: int = 1) -> Any:
        """Start offsets and lags by topic and partition."""
        kind = DescribeShareGroupOffsetsRequest
        named = [
            kind.DescribeShareGroupOffsetsRequestTopic(topic_name=k, partitions=v) for k, v in (topics or {}).items()
        ]
        asked = kind.DescribeShareGroupOffsetsRequestGroup(
            group_id=self.group, topics=None if topics is None else named
        )
        (group,) = (await self.connection.request(kind(groups=[asked]), version)).groups
        assert group.error_code == 0, group
        return {
            (topic.topic_name, each.partition_index): (each.start_offset, each.lag)
            for topic in group.topics
            for each in topic.partitions
        }

    async def set_offsets(self, topic: str, offsets: dict[int, int]) -> Any:
        kind = AlterShareGroupOffsetsRequest
        asked = kind.AlterShareGroupOffsetsRequestTopic(
            topic_name=topic,
            partitions=[
                kind.AlterShareGroupOffsetsRequestPartition(partition_index=index, start_offset=offset)
                for index, offset in offsets.items()
            ],
        )
        return await self.connection.request(kind(group_id=self.group, topics=[asked]), 0)

    async def delete_offsets(self, *topics: str) -> Any:
        kind = DeleteShareGroupOffsetsRequest
        named = [kind.DeleteShareGroupOffsetsRequestTopic(topic_name=topic) for topic in topics]
        return await self.connection.request(kind(group_id=self.group, topics=named), 0)

    async def delete(self) -> int:
        (result,) = (await self.connection.request(DeleteGroupsRequest(groups_names=[self.group]), 2)).results
        return int(result.error_code)


_COMING = {
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.NOT_COORDINATOR,
}


async def admin_of(address: str, group: str) -> Admin:
    """Somebody who asks the coordinator, as soon as there is one that answers."""
    asked = FindCoordinatorRequest(coordinator_keys=[group], key_type=0)
    async with asyncio.timeout(20), await connect(address) as any_broker:
        while True:
            (found,) = (await any_broker.request(asked, 4)).coordinators
            if not found.error_code:
                admin = Admin(await Connection.open(found.host, found.port), group)
                if (await admin.describe()).error_code not in _COMING:
                    return admin
                await admin.connection.close()
            await asyncio.sleep(0.02)


def produce(address: str, count: int, partition: int = 0) -> None:
    producer = Producer({"bootstrap.servers": address, "log_level": 0})
    for number in range(count):
        producer.produce("t", b"%d" % number, partition=partition)
    assert producer.flush(30) == 0


def assignment(answer: Any) -> dict[UUID, list[int]] | None:
    assert answer.error_code == 0, answer
    if answer.assignment is None:
        return None
    return {each.topic_id: each.partitions for each in answer.assignment.topic_partitions}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(settings=SETTINGS) as running:
        running.create_topic("t", partitions=3)
        yield running


@pytest.fixture
async def admin(cluster: Cluster) -> AsyncIterator[Admin]:
    found = await admin_of(cluster.bootstrap_servers, "g")
    async with found.connection:
        yield found


async def test_clients_are_told_of_it(cluster: Cluster) -> None:
    async with await connect(cluster.bootstrap_servers) as connection:
        for version in (0, 3, 4):
            asked = ApiVersionsRequest(client_software_name="test", client_software_version="1")
            answer = await connection.request(asked, version)
            offered = {each.api_key: (each.min_version, each.max_version) for each in answer.api_keys}
            assert offered[ApiKey.SHARE_GROUP_HEARTBEAT] == offered[ApiKey.SHARE_GROUP_DESCRIBE] == (1, 1)
            assert offered[ApiKey.SHARE_FETCH] == offered[ApiKey.SHARE_ACKNOWLEDGE] == (1, 2)
            assert offered[ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS] == (0, 1)
            assert offered[ApiKey.ALTER_SHARE_GROUP_OFFSETS] == offered[ApiKey.DELETE_SHARE_GROUP_OFFSETS] == (0, 0)
            assert ApiKey.WRITE_SHARE_GROUP_STATE not in offered
        assert {each.name: each.max_version_level for each in answer.finalized_features}["share.version"] == 1


async def test_a_member_joins_reads_and_leaves(cluster: Cluster, admin: Admin) -> None:
    connection, topic_id = await leader_of(cluster.bootstrap_servers, "t")
    await admin.set_offsets("t", {0: 0, 1: 0, 2: 0})
    joined = await admin.heartbeat("m", 0, "t")
    assert assignment(joined) == {topic_id: [0, 1, 2]}
    assert joined.heartbeat_interval_ms == 5_000
    await asyncio.to_thread(produce, cluster.bootstrap_servers, 10)
    assert (await admin.offsets())["t", 0] == (0, 10)
    async with connection:
        member = Member(connection, ShareKey("g", topic_id, 0))
        assert taken(await member.fetch()) == [(0, 9, 1)]
        assert refusal(await member.acknowledge((0, 3, [ACCEPT]))) == 0
        assert (await admin.offsets())["t", 0][1] == 6, "so many are left"
        described = await admin.describe()
        assert (described.group_state, described.assignor_name) == ("Stable", "simple")
        assert described.group_epoch == described.assignment_epoch == joined.member_epoch
        (shown,) = described.members
        assert (shown.member_id, shown.subscribed_topic_names, shown.client_host) == ("m", ["t"], "/127.0.0.1")
        (read,) = shown.assignment.topic_partitions
        assert (read.topic_name, read.partitions) == ("t", [0, 1, 2])
        left = await admin.heartbeat("m", -1)
        assert (left.error_code, left.member_epoch) == (0, -1)
        other = Member(connection, ShareKey("g", topic_id, 0), "other")
        assert taken(await other.fetch(wait_ms=20_000)) == [(4, 9, 2)], "what it held is free at once"
    assert (await admin.describe()).group_state == "Empty"
    listed = await admin.connection.request(ListGroupsRequest(types_filter=["share"]), 5)
    assert [(each.group_id, each.group_type, each.group_state) for each in listed.groups] == [("g", "share", "Empty")]


async def test_what_is_refused(admin: Admin) -> None:
    assert (await admin.describe()).error_code == ErrorCode.GROUP_ID_NOT_FOUND
    assert (await admin.heartbeat("m", 3)).error_code == ErrorCode.GROUP_ID_NOT_FOUND
    assert (await admin.heartbeat("m" * 37, 0, "t")).error_code == ErrorCode.INVALID_REQUEST
    assert (await admin.delete_offsets("t")).error_code == ErrorCode.GROUP_ID_NOT_FOUND
    assert await admin.offsets() == {}
    assert await admin.delete() == ErrorCode.GROUP_ID_NOT_FOUND
    await admin.heartbeat("m", 0, "t")
    assert (await admin.set_offsets("t", {0: 1})).error_code == ErrorCode.NON_EMPTY_GROUP
    assert (await admin.delete_offsets("t")).error_code == ErrorCode.NON_EMPTY_GROUP
    assert await admin.delete() == ErrorCode.NON_EMPTY_GROUP
    nameless = Admin(admin.connection, "")
    assert (await nameless.heartbeat("m", 0, "t")).error_code == ErrorCode.INVALID_REQUEST
    assert (await nameless.describe()).error_code == ErrorCode.INVALID_GROUP_ID
    assert (await nameless.set_offsets("t", {0: 1})).error_code == ErrorCode.INVALID_GROUP_ID
    assert (await nameless.delete_offsets("t")).error_code == ErrorCode.INVALID_GROUP_ID


async def test_the_same_question_is_answered_once(admin: Admin) -> None:
    await admin.set_offsets("t", {0: 1})
    kind = DescribeShareGroupOffsetsRequest
    everything = kind.DescribeShareGroupOffsetsRequestGroup(group_id=admin.group, topics=None)
    one = kind.DescribeShareGroupOffsetsRequestGroup(
        group_id=admin.group,
        topics=[kind.DescribeShareGroupOffsetsRequestTopic(topic_name="t", partitions=[0])],
    )
    answer: Any = await admin.connection.request(kind(groups=[everything, one] * 100), 1)
    assert [each.error_code for each in answer.groups] == [0, 0]


async def test_offsets_of_what_is_not_there(admin: Admin) -> None:
    (response,) = (await admin.set_offsets("nothing", {0: 1})).responses
    assert response.partitions[0].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    (response,) = (await admin.set_offsets("t", {0: 1, 3: 1})).responses
    assert [each.error_code for each in response.partitions] == [0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    assert await admin.offsets({"nothing": [0], "t": [0, 1, 7]}) == {
        ("nothing", 0): (-1, -1),
        ("t", 0): (1, -1),
        ("t", 1): (-1, -1),
        ("t", 7): (-1, -1),
    }
    deleted = await admin.delete_offsets("t", "nothing")
    assert {each.topic_name: each.error_code for each in deleted.responses} == {
        "t": 0,
        "nothing": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    }
    assert await admin.offsets() == {}


async def test_three_brokers_with_everything_elsewhere() -> None:
    """Groups, queues and partitions are led by different brokers; what a group was told survives one of them."""
    with Cluster(brokers=3, settings=SETTINGS) as running:
        running.create_topic("t", partitions=6)
        address = running.bootstrap_servers.split(",")[0]
        for partition in range(6):
            await asyncio.to_thread(produce, address, 5, partition)
        for number in range(3):
            admin = await admin_of(address, f"g{number}")
            async with admin.connection:
                (response,) = (await admin.set_offsets("t", dict.fromkeys(range(6), 2))).responses
                assert not any(each.error_code for each in response.partitions)
                assert await admin.offsets() == {("t", index): (2, 3) for index in range(6)}
                joined = await admin.heartbeat("m", 0, "t")
                assert list((assignment(joined) or {}).values()) == [list(range(6))]
                port = admin.connection.port
        coordinator = next(number for number, broker in running._brokers.items() if broker.port == port)
        await asyncio.to_thread(running.stop_broker, coordinator)
        address = f"127.0.0.1:{next(broker.port for broker in running._brokers.values())}"
        admin = await admin_of(address, "g2")
        async with admin.connection:
            assert (await admin.heartbeat("m", joined.member_epoch)).error_code == 0
            assert await admin.offsets() == {("t", index): (2, 3) for index in range(6)}
            await admin.heartbeat("m", -1)
            assert await admin.delete() == 0
            assert await admin.offsets({"t": [0]}) == {("t", 0): (-1, -1)}
