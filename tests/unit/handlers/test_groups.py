"""Membership and administration of groups, at every version. The rules themselves: tests/unit/groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.errors import ErrorCode
from millrace.handlers.groups import (
    delete_groups,
    describe_groups,
    find_coordinator,
    heartbeat,
    join_group,
    leave_group,
    list_groups,
    sync_group,
)
from millrace.metadata.deltas import BrokerRegistered, Endpoint, PartitionState, TopicCreated
from millrace.model import CONSUMER_OFFSETS_TOPIC, new_topic_id
from millrace.wire.messages.groups import (
    DeleteGroupsRequest,
    DescribeGroupsRequest,
    FindCoordinatorRequest,
    HeartbeatRequest,
    JoinGroupRequest,
    LeaveGroupRequest,
    ListGroupsRequest,
    SyncGroupRequest,
)
from support.group_handling import GroupHandling, group_handling
from support.groups import RANGE
from support.handling import deciding
from support.metadata import ENDPOINT, cluster_of

Protocol = JoinGroupRequest.JoinGroupRequestProtocol
Identity = LeaveGroupRequest.MemberIdentity


def join_request(member_id: str = "", group: str = "g", **changes: object) -> JoinGroupRequest:
    return JoinGroupRequest(
        group_id=group,
        session_timeout_ms=10_000,
        rebalance_timeout_ms=30_000,
        member_id=member_id,
        protocol_type="consumer",
        protocols=[Protocol(name=RANGE.name, metadata=RANGE.metadata)],
        **changes,
    )


async def joined(on: GroupHandling, version: int, group: str = "g", **changes: object) -> tuple[str, int]:
    """A member of the next generation, and that generation."""
    member_id = ""
    if version >= 4 and not changes.get("group_instance_id"):
        first = await on.call(join_group, join_request(group=group, **changes), version)
        assert first.error_code == ErrorCode.MEMBER_ID_REQUIRED
        assert first.member_id.startswith("app-")
        assert (first.generation_id, first.members) == (-1, [])
        member_id = first.member_id
    joining = on.start(join_group, join_request(member_id, group, **changes), version)
    await on.advance(3)
    result = await joining
    assert result.error_code == 0
    return result.member_id, result.generation_id


async def stable(on: GroupHandling, group: str = "g", **changes: object) -> tuple[str, int]:
    member_id, generation = await joined(on, 9, group, **changes)
    await on.call(sync_group, sync_request(member_id, generation, group, **changes), 5)
    return member_id, generation


def sync_request(member_id: str, generation: int, group: str = "g", **changes: object) -> SyncGroupRequest:
    return SyncGroupRequest(
        group_id=group,
        member_id=member_id,
        generation_id=generation,
        protocol_type="consumer",
        protocol_name="range",
        assignments=[SyncGroupRequest.SyncGroupRequestAssignment(member_id=member_id, assignment=b"mine")],
        **changes,
    )


@pytest.mark.parametrize("version", range(4))
async def test_find_one_coordinator(version: int) -> None:
    async with group_handling() as on:
        assert CONSUMER_OFFSETS_TOPIC not in on.handling.controller.image.topics
        found = await on.call(find_coordinator, FindCoordinatorRequest(key="g"), version)
        assert (found.error_code, found.node_id, found.host, found.port) == (0, 1, "told.example", 19092)
        assert len(on.handling.controller.image.topics[CONSUMER_OFFSETS_TOPIC].partitions) == 3
        if version >= 1:
            refused = await on.call(find_coordinator, FindCoordinatorRequest(key="t", key_type=1), version)
            assert refused.error_code == ErrorCode.INVALID_REQUEST
            assert (refused.node_id, refused.host, refused.port) == (-1, "", -1)
            assert "transactions" in refused.error_message


async def test_the_coordinator_is_the_live_leader_of_the_groups_partition() -> None:
    states = tuple(PartitionState((leader, 1), (leader, 1), leader) for leader in (1, 2, 3, -1))
    there, dead = Endpoint("PLAINTEXT", "b2", 9), BrokerRegistered(3, 103, (ENDPOINT,), fenced=True)
    changes = (BrokerRegistered(2, 102, (there,)), dead, TopicCreated(CONSUMER_OFFSETS_TOPIC, new_topic_id(), states))
    on = deciding(cluster_of(1).apply(changes))
    on.services.groups = cast("Any", SimpleNamespace(partition_for=int))
    found = await on.call(find_coordinator, FindCoordinatorRequest(coordinator_keys=["0", "1", "2", "3"]), 4)
    nobody = (ErrorCode.COORDINATOR_NOT_AVAILABLE, -1, "", -1)
    assert [(each.error_code, each.node_id, each.host, each.port) for each in found.coordinators] == [
        (0, 1, "told.example", 19092), (0, 2, "b2", 9), nobody, nobody,
    ]  # fmt: skip
    inside = await on.call(find_coordinator, FindCoordinatorRequest(coordinator_keys=["1"]), 4, listener="INSIDE")
    assert inside.coordinators[0].error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE


@pytest.mark.parametrize("version", range(4, 7))
async def test_find_several_coordinators(version: int) -> None:
    async with group_handling() as on:
        found = await on.call(find_coordinator, FindCoordinatorRequest(coordinator_keys=["a", "b", ""]), version)
        assert [(each.key, each.node_id, each.error_code) for each in found.coordinators] == [
            ("a", 1, 0), ("b", 1, 0), ("", 1, 0),
        ]  # fmt: skip
        share = FindCoordinatorRequest(coordinator_keys=["g:x:0"], key_type=2)
        (refused,) = (await on.call(find_coordinator, share, version)).coordinators
        expected = ErrorCode.INVALID_REQUEST
        assert (refused.error_code, refused.node_id) == (expected, -1)
        odd = FindCoordinatorRequest(coordinator_keys=["g"], key_type=9)
        (refused,) = (await on.call(find_coordinator, odd, version)).coordinators
        assert refused.error_code == ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("version", range(10))
async def test_join(version: int) -> None:
    async with group_handling() as on:
        member_id, generation = await joined(on, version)
        assert generation == 1
        described = on.groups.describe("g")
        assert described is not None
        (member,) = described.members
        assert (member.member_id, member.client_id, member.client_host) == (member_id, "app", "/10.0.0.7")
        again = await on.call(join_group, join_request(member_id), version)
        assert (again.error_code, again.leader, again.protocol_name) == (0, member_id, "range")
        assert again.protocol_type == ("consumer" if version >= 7 else None)
        assert [each.metadata for each in again.members] == [RANGE.metadata]
        unknown = await on.call(join_group, join_request("ghost"), version)
        assert unknown.error_code == ErrorCode.UNKNOWN_MEMBER_ID
        assert unknown.protocol_name == (None if version >= 7 else "")
        nameless = await on.call(join_group, join_request(group=""), version)
        assert nameless.error_code == ErrorCode.INVALID_GROUP_ID


async def test_version_0_rebalances_within_the_session_timeout() -> None:
    async with group_handling() as on:
        await joined(on, 0)
        (group,) = (group for shard in on.groups._shards.values() for group in shard.classic.groups.values())
        assert group.rebalance_timeout_ms == 10_000


@pytest.mark.parametrize("version", [5, 9])
async def test_a_static_member_comes_back(version: int) -> None:
    async with group_handling() as on:
        old, generation = await joined(on, version, group_instance_id="red")
        assert old.startswith("red-")
        await on.call(sync_group, sync_request(old, generation, group_instance_id="red"), 5)
        back = await on.call(join_group, join_request(group_instance_id="red"), version)
        assert (back.error_code, back.generation_id) == (0, 1)
        assert back.skip_assignment is (version >= 9)
        assert back.leader == (back.member_id if version >= 9 else old)
        assert back.members == [] or back.members[0].group_instance_id == "red"
        fenced = await on.call(
            heartbeat, HeartbeatRequest(group_id="g", member_id=old, generation_id=1, group_instance_id="red"), 4
        )
        assert fenced.error_code == ErrorCode.FENCED_INSTANCE_ID


@pytest.mark.parametrize("version", range(6))
async def test_sync(version: int) -> None:
    async with group_handling() as on:
        member_id, generation = await joined(on, 9)
        result = await on.call(sync_group, sync_request(member_id, generation), version)
        assert (result.error_code, result.assignment) == (0, b"mine")
        if version >= 5:
            assert (result.protocol_type, result.protocol_name) == ("consumer", "range")
            for changes in ({"protocol_type": None}, {"protocol_name": None}, {"protocol_name": "other"}):
                request = sync_request(member_id, generation)
                for name, value in changes.items():
                    setattr(request, name, value)
                refused = await on.call(sync_group, request, version)
                assert refused.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        stale = await on.call(sync_group, sync_request(member_id, generation - 1), version)
        assert stale.error_code == ErrorCode.ILLEGAL_GENERATION
        nameless = await on.call(sync_group, sync_request(member_id, generation, ""), version)
        assert nameless.error_code == ErrorCode.INVALID_GROUP_ID


@pytest.mark.parametrize("version", range(5))
async def test_heartbeat(version: int) -> None:
    async with group_handling() as on:
        member_id, generation = await stable(on)
        for ids, expected in (
            ((member_id, generation), ErrorCode.NONE),
            ((member_id, generation + 1), ErrorCode.ILLEGAL_GENERATION),
            (("ghost", generation), ErrorCode.UNKNOWN_MEMBER_ID),
        ):
            request = HeartbeatRequest(group_id="g", member_id=ids[0], generation_id=ids[1])
            assert (await on.call(heartbeat, request, version)).error_code == expected


@pytest.mark.parametrize("version", range(6))
async def test_leave(version: int) -> None:
    async with group_handling() as on:
        member_id, _ = await stable(on)
        if version < 3:
            for leaver, expected in (("ghost", ErrorCode.UNKNOWN_MEMBER_ID), (member_id, ErrorCode.NONE)):
                left = await on.call(leave_group, LeaveGroupRequest(group_id="g", member_id=leaver), version)
                assert left.error_code == expected
        else:
            reason = "done" if version >= 5 else None
            members = [Identity(member_id="ghost"), Identity(member_id=member_id, reason=reason)]
            left = await on.call(leave_group, LeaveGroupRequest(group_id="g", members=members), version)
            assert left.error_code == 0
            assert [(each.member_id, each.error_code) for each in left.members] == [
                ("ghost", ErrorCode.UNKNOWN_MEMBER_ID), (member_id, ErrorCode.NONE),
            ]  # fmt: skip
        described = on.groups.describe("g")
        assert described is not None
        assert described.members == ()
        nameless = await on.call(leave_group, LeaveGroupRequest(group_id=""), version)
        assert nameless.error_code == ErrorCode.INVALID_GROUP_ID


@pytest.mark.parametrize("version", range(6))
async def test_list(version: int) -> None:
    async with group_handling() as on:
        await stable(on, "busy")
        member_id, _ = await stable(on, "idle")
        on.groups.leave("idle", [])
        await on.call(leave_group, LeaveGroupRequest(group_id="idle", member_id=member_id), 0)
        listed = await on.call(list_groups, ListGroupsRequest(), version)
        assert listed.error_code == 0
        assert {(each.group_id, each.protocol_type) for each in listed.groups} == {
            ("busy", "consumer"), ("idle", "consumer"),
        }  # fmt: skip
        if version >= 4:
            (only,) = (await on.call(list_groups, ListGroupsRequest(states_filter=["empty"]), version)).groups
            assert (only.group_id, only.group_state) == ("idle", "Empty")
        if version >= 5:
            assert {each.group_type for each in listed.groups} == {"classic"}
            filtered = await on.call(list_groups, ListGroupsRequest(types_filter=["share"]), version)
            assert filtered.groups == []


@pytest.mark.parametrize("version", range(7))
async def test_describe(version: int) -> None:
    async with group_handling() as on:
        member_id, _ = await stable(on, group_instance_id="red")
        request = DescribeGroupsRequest(groups=["g", "none"], include_authorized_operations=version >= 3)
        group, missing = (await on.call(describe_groups, request, version)).groups
        assert (group.error_code, group.group_state, group.protocol_type, group.protocol_data) == (
            0, "Stable", "consumer", "range",
        )  # fmt: skip
        (member,) = group.members
        assert (member.member_id, member.member_metadata, member.member_assignment) == (
            member_id, RANGE.metadata, b"mine",
        )  # fmt: skip
        assert member.group_instance_id == ("red" if version >= 4 else None)
        assert group.authorized_operations == (0b1101_0100_1000 if version >= 3 else -(2**31))
        assert missing.group_state == "Dead"
        assert missing.error_code == (ErrorCode.GROUP_ID_NOT_FOUND if version >= 6 else 0)
        assert (missing.error_message is not None) is (version >= 6)


@pytest.mark.parametrize("version", range(3))
async def test_delete(version: int) -> None:
    async with group_handling() as on:
        await stable(on, "busy")
        member_id, _ = await stable(on, "idle")
        await on.call(leave_group, LeaveGroupRequest(group_id="idle", member_id=member_id), 0)
        request = DeleteGroupsRequest(groups_names=["idle", "busy", "none"])
        results = (await on.call(delete_groups, request, version)).results
        assert {each.group_id: each.error_code for each in results} == {
            "idle": 0, "busy": ErrorCode.NON_EMPTY_GROUP, "none": ErrorCode.GROUP_ID_NOT_FOUND,
        }  # fmt: skip
        assert on.groups.describe("idle") is None


async def test_a_broker_that_does_not_coordinate_says_so() -> None:
    async with group_handling() as on:
        for index in range(3):
            on.groups.partition_lost(index)
        code = ErrorCode.NOT_COORDINATOR
        assert (await on.call(join_group, join_request(), 9)).error_code == code
        assert (await on.call(sync_group, sync_request("m", 1), 5)).error_code == code
        assert (await on.call(heartbeat, HeartbeatRequest(group_id="g"), 4)).error_code == code
        assert (await on.call(leave_group, LeaveGroupRequest(group_id="g"), 5)).error_code == code
        (group,) = (await on.call(describe_groups, DescribeGroupsRequest(groups=["g"]), 6)).groups
        assert group.error_code == code
        (result,) = (await on.call(delete_groups, DeleteGroupsRequest(groups_names=["g"]), 2)).results
        assert result.error_code == code
