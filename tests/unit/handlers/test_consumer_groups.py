"""ConsumerGroupHeartbeat and ConsumerGroupDescribe, and what the other APIs make of such a group."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from millrace.config import BrokerConfig
from millrace.errors import ErrorCode
from millrace.groups.settings import GroupSettings
from millrace.handlers.configs import incremental_alter_configs
from millrace.handlers.consumer_groups import consumer_group_describe, consumer_group_heartbeat
from millrace.handlers.group_offsets import offset_commit, offset_delete, offset_fetch
from millrace.handlers.groups import delete_groups, describe_groups, join_group, leave_group, list_groups
from millrace.metadata.deltas import ResourceType
from millrace.wire.messages.configs import IncrementalAlterConfigsRequest
from millrace.wire.messages.consumer_groups import ConsumerGroupDescribeRequest, ConsumerGroupHeartbeatRequest
from millrace.wire.messages.group_offsets import OffsetCommitRequest, OffsetDeleteRequest, OffsetFetchRequest
from millrace.wire.messages.groups import (
    DeleteGroupsRequest,
    DescribeGroupsRequest,
    JoinGroupRequest,
    LeaveGroupRequest,
    ListGroupsRequest,
)
from support.group_handling import GroupHandling, group_handling
from support.groups import RANGE

Fetched = OffsetFetchRequest.OffsetFetchRequestGroup


@pytest.fixture
async def on() -> AsyncIterator[GroupHandling]:
    async with group_handling() as handling:
        await handling.create_topic("orders", 4)
        yield handling


async def beat(on: GroupHandling, member_id: str, epoch: int, version: int = 1, **changes: Any) -> Any:
    request = ConsumerGroupHeartbeatRequest(group_id="g", member_id=member_id, member_epoch=epoch, **changes)
    return await on.call(consumer_group_heartbeat, request, version)


async def join(on: GroupHandling, member_id: str, version: int = 1, **changes: Any) -> Any:
    values: dict[str, Any] = {"subscribed_topic_names": ["orders"], **changes}
    return await beat(on, member_id, 0, version, rebalance_timeout_ms=60_000, topic_partitions=[], **values)


async def test_without_the_protocol_there_are_no_such_groups(on: GroupHandling) -> None:
    on.groups.settings = replace(on.groups.settings, protocols=("classic", "share"))
    refused = await join(on, "m1")
    assert refused.error_code == ErrorCode.UNSUPPORTED_VERSION
    assert "group.coordinator.rebalance.protocols" in refused.error_message
    described = await on.call(consumer_group_describe, ConsumerGroupDescribeRequest(group_ids=["g"]), 1)
    assert described.groups[0].error_code == ErrorCode.UNSUPPORTED_VERSION
    on.groups.settings = GroupSettings.from_config(BrokerConfig())
    assert (await join(on, "m1")).error_code == 0
    only_classic = BrokerConfig({"group.coordinator.rebalance.protocols": "classic"})
    assert not GroupSettings.from_config(only_classic).offers_consumer_groups


async def test_join_heartbeat_leave(on: GroupHandling) -> None:
    joined = await join(on, "m1")
    assert (joined.error_code, joined.member_id, joined.member_epoch) == (0, "m1", 1)
    assert joined.heartbeat_interval_ms == 5_000
    (topic,) = joined.assignment.topic_partitions
    assert topic.partitions == [0, 1, 2, 3]
    again = await beat(on, "m1", 1)
    assert (again.error_code, again.assignment) == (0, None)
    left = await beat(on, "m1", -1)
    assert (left.error_code, left.member_epoch) == (0, -1)


async def test_before_v1_the_broker_chooses_the_id(on: GroupHandling) -> None:
    joined = await join(on, "", 0)
    assert joined.error_code == 0
    assert len(joined.member_id) == 36
    assert (await join(on, "", 1)).error_code == ErrorCode.INVALID_REQUEST


async def test_errors_have_a_message(on: GroupHandling) -> None:
    for answer, expected in (
        (await beat(on, "m1", 1), ErrorCode.GROUP_ID_NOT_FOUND),
        (await join(on, "m1", subscribed_topic_regex="(a"), ErrorCode.INVALID_REGULAR_EXPRESSION),
        (await join(on, "m1", server_assignor="mine"), ErrorCode.UNSUPPORTED_ASSIGNOR),
    ):
        assert answer.error_code == expected
        assert answer.error_message
    empty = ConsumerGroupHeartbeatRequest(group_id="", member_id="m", member_epoch=1)
    assert (await on.call(consumer_group_heartbeat, empty, 1)).error_code == ErrorCode.INVALID_REQUEST


async def test_what_does_not_fit_the_log_has_not_happened(on: GroupHandling) -> None:
    await join(on, "m1")
    answer = await join(on, "m2", subscribed_topic_names=[f"{number:032000}" for number in range(40)])
    assert answer.error_code == ErrorCode.UNKNOWN_SERVER_ERROR
    request = ConsumerGroupDescribeRequest(group_ids=["g"])
    (group,) = (await on.call(consumer_group_describe, request, 1)).groups
    assert ([each.member_id for each in group.members], group.group_epoch) == (["m1"], 1)


async def test_describe(on: GroupHandling) -> None:
    await join(on, "m1", rack_id="r", subscribed_topic_regex="o.*", server_assignor="range", instance_id="i")
    request = ConsumerGroupDescribeRequest(group_ids=["g", "g", "none", ""], include_authorized_operations=True)
    found, missing, nameless = (await on.call(consumer_group_describe, request, 1)).groups
    assert (found.group_state, found.group_epoch, found.assignment_epoch) == ("Stable", 1, 1)
    assert found.assignor_name == "range"
    assert found.authorized_operations > 0
    (member,) = found.members
    assert (member.member_id, member.instance_id, member.rack_id, member.member_type) == ("m1", "i", "r", 1)
    assert (member.client_id, member.client_host, member.member_epoch) == ("app", "/10.0.0.7", 1)
    assert (member.subscribed_topic_names, member.subscribed_topic_regex) == (["orders"], "o.*")
    for assignment in (member.assignment, member.target_assignment):
        (topic,) = assignment.topic_partitions
        assert (topic.topic_name, topic.partitions) == ("orders", [0, 1, 2, 3])
    assert missing.error_code == ErrorCode.GROUP_ID_NOT_FOUND
    assert nameless.error_code == ErrorCode.INVALID_GROUP_ID


async def test_other_apis_know_the_group(on: GroupHandling) -> None:
    await join(on, "m1")
    for types, expected in ((["Consumer"], ["g"]), (["classic"], []), ([], ["g"])):
        listed = (await on.call(list_groups, ListGroupsRequest(types_filter=types), 5)).groups
        assert [each.group_id for each in listed] == expected
    (group,) = (await on.call(list_groups, ListGroupsRequest(states_filter=["stable"]), 5)).groups
    assert (group.group_state, group.group_type, group.protocol_type) == ("Stable", "consumer", "consumer")
    (described,) = (await on.call(describe_groups, DescribeGroupsRequest(groups=["g"]), 6)).groups
    assert (described.error_code, described.group_state) == (ErrorCode.GROUP_ID_NOT_FOUND, "Dead")
    (deleted,) = (await on.call(delete_groups, DeleteGroupsRequest(groups_names=["g"]), 2)).results
    assert deleted.error_code == ErrorCode.NON_EMPTY_GROUP
    leaving = LeaveGroupRequest(group_id="g", members=[LeaveGroupRequest.MemberIdentity(member_id="m1")])
    assert (await on.call(leave_group, leaving, 5)).members[0].error_code == 0
    (deleted,) = (await on.call(delete_groups, DeleteGroupsRequest(groups_names=["g"]), 2)).results
    assert deleted.error_code == 0
    assert not (await on.call(list_groups, ListGroupsRequest(), 5)).groups


def commit_request(epoch: int, member_id: str = "m1") -> OffsetCommitRequest:
    partition = OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=1, committed_offset=7)
    return OffsetCommitRequest(
        group_id="g",
        member_id=member_id,
        generation_id_or_member_epoch=epoch,
        topics=[OffsetCommitRequest.OffsetCommitRequestTopic(name="orders", partitions=[partition])],
    )


async def test_offsets_of_members(on: GroupHandling) -> None:
    await join(on, "m1")

    async def commit(epoch: int, version: int = 9) -> int:
        answer = await on.call(offset_commit, commit_request(epoch), version)
        return int(answer.topics[0].partitions[0].error_code)

    async def fetch(epoch: int) -> Any:
        topics = [OffsetFetchRequest.OffsetFetchRequestTopics(name="orders", partition_indexes=[1])]
        wanted = Fetched(group_id="g", member_id="m1", member_epoch=epoch, topics=topics)
        return (await on.call(offset_fetch, OffsetFetchRequest(groups=[wanted]), 9)).groups[0]

    assert await commit(1) == 0
    assert await commit(2) == ErrorCode.STALE_MEMBER_EPOCH
    assert await commit(1, version=8) == ErrorCode.UNSUPPORTED_VERSION
    assert (await fetch(1)).topics[0].partitions[0].committed_offset == 7
    assert (await fetch(0)).error_code == ErrorCode.STALE_MEMBER_EPOCH
    partition = OffsetDeleteRequest.OffsetDeleteRequestPartition(partition_index=1)
    topic = OffsetDeleteRequest.OffsetDeleteRequestTopic(name="orders", partitions=[partition])
    deletion = OffsetDeleteRequest(group_id="g", topics=[topic])
    refused = await on.call(offset_delete, deletion, 0)
    assert refused.topics[0].partitions[0].error_code == ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC
    await beat(on, "m1", -1)
    assert (await on.call(offset_delete, deletion, 0)).topics[0].partitions[0].error_code == 0


async def test_settings_of_a_group(on: GroupHandling) -> None:
    setting = IncrementalAlterConfigsRequest.AlterableConfig(
        name="consumer.heartbeat.interval.ms", config_operation=0, value="7000"
    )
    resource = IncrementalAlterConfigsRequest.AlterConfigsResource(
        resource_type=ResourceType.GROUP, resource_name="g", configs=[setting]
    )
    answer = await on.call(incremental_alter_configs, IncrementalAlterConfigsRequest(resources=[resource]), 1)
    assert answer.responses[0].error_code == 0
    assert (await join(on, "m1")).heartbeat_interval_ms == 7_000


async def test_an_empty_group_becomes_whoever_joins(on: GroupHandling) -> None:
    await join(on, "m1")
    await on.call(offset_commit, commit_request(1), 9)
    await beat(on, "m1", -1)
    protocol = JoinGroupRequest.JoinGroupRequestProtocol(name=RANGE.name, metadata=RANGE.metadata)
    request = JoinGroupRequest(
        group_id="g", session_timeout_ms=10_000, rebalance_timeout_ms=30_000, protocol_type="consumer",
        protocols=[protocol],
    )  # fmt: skip
    waiting = on.start(join_group, request, 3)
    await on.advance(4)
    assert (await waiting).error_code == 0
    (group,) = (await on.call(list_groups, ListGroupsRequest(), 5)).groups
    assert group.group_type == "classic"
    answer = await join(on, "m2")
    assert answer.error_code == 0
    (group,) = (await on.call(list_groups, ListGroupsRequest(), 5)).groups
    assert group.group_type == "consumer"
