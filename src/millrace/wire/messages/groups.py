"""Classic consumer groups: coordinators, membership, rebalances, listing and deletion."""

from __future__ import annotations

from millrace.wire.keys import ApiKey
from millrace.wire.schema import Request, Response, Struct, array, binary, boolean, int8, int16, int32, string


class FindCoordinatorRequest(Request, key=ApiKey.FIND_COORDINATOR, versions="0-6", flexible="3+"):
    """Asks who coordinates a group, a transactional id or a share partition; from v4 several keys at once."""

    key: str = string("0-3")
    key_type: int = int8("1+")
    coordinator_keys: list[str] = array(string, "4+")


class FindCoordinatorResponse(Response, key=ApiKey.FIND_COORDINATOR, versions="0-6", flexible="3+"):
    """Coordinators, by key from v4 on."""

    class Coordinator(Struct):
        key: str = string("4+")
        node_id: int = int32("4+")
        host: str = string("4+")
        port: int = int32("4+")
        error_code: int = int16("4+")
        error_message: str | None = string("4+", nullable=True, ignorable=True)

    throttle_time_ms: int = int32("1+", ignorable=True)
    error_code: int = int16("0-3")
    error_message: str | None = string("1-3", nullable=True, ignorable=True)
    node_id: int = int32("0-3")
    host: str = string("0-3")
    port: int = int32("0-3")
    coordinators: list[Coordinator] = array(Coordinator, "4+")


class JoinGroupRequest(Request, key=ApiKey.JOIN_GROUP, versions="0-9", flexible="6+"):
    """Joins a classic group and offers assignment protocols."""

    class JoinGroupRequestProtocol(Struct):
        name: str = string()
        metadata: bytes = binary()

    group_id: str = string()
    session_timeout_ms: int = int32()
    rebalance_timeout_ms: int = int32("1+", default=-1, ignorable=True)
    member_id: str = string()
    group_instance_id: str | None = string("5+", nullable=True, default=None)
    protocol_type: str = string()
    protocols: list[JoinGroupRequestProtocol] = array(JoinGroupRequestProtocol)
    reason: str | None = string("8+", nullable=True, default=None, ignorable=True)


class JoinGroupResponse(Response, key=ApiKey.JOIN_GROUP, versions="0-9", flexible="6+"):
    """The generation; the leader also gets every member's metadata."""

    class JoinGroupResponseMember(Struct):
        member_id: str = string()
        group_instance_id: str | None = string("5+", nullable=True, default=None, ignorable=True)
        metadata: bytes = binary()

    throttle_time_ms: int = int32("2+", ignorable=True)
    error_code: int = int16()
    generation_id: int = int32(default=-1)
    protocol_type: str | None = string("7+", nullable=True, default=None, ignorable=True)
    protocol_name: str | None = string(nullable="7+")
    leader: str = string()
    skip_assignment: bool = boolean("9+")
    member_id: str = string()
    members: list[JoinGroupResponseMember] = array(JoinGroupResponseMember)


class HeartbeatRequest(Request, key=ApiKey.HEARTBEAT, versions="0-4", flexible="4+"):
    """Tells the coordinator that a member is alive."""

    group_id: str = string()
    generation_id: int = int32()
    member_id: str = string()
    group_instance_id: str | None = string("3+", nullable=True, default=None)


class HeartbeatResponse(Response, key=ApiKey.HEARTBEAT, versions="0-4", flexible="4+"):
    """Whether the member may go on or must rejoin."""

    throttle_time_ms: int = int32("1+", ignorable=True)
    error_code: int = int16()


class LeaveGroupRequest(Request, key=ApiKey.LEAVE_GROUP, versions="0-5", flexible="4+"):
    """Leaves a group; from v3 several members at once."""

    class MemberIdentity(Struct):
        member_id: str = string("3+")
        group_instance_id: str | None = string("3+", nullable=True, default=None)
        reason: str | None = string("5+", nullable=True, default=None, ignorable=True)

    group_id: str = string()
    member_id: str = string("0-2")
    members: list[MemberIdentity] = array(MemberIdentity, "3+")


class LeaveGroupResponse(Response, key=ApiKey.LEAVE_GROUP, versions="0-5", flexible="4+"):
    """The outcome per member."""

    class MemberResponse(Struct):
        member_id: str = string("3+")
        group_instance_id: str | None = string("3+", nullable=True)
        error_code: int = int16("3+")

    throttle_time_ms: int = int32("1+", ignorable=True)
    error_code: int = int16()
    members: list[MemberResponse] = array(MemberResponse, "3+")


class SyncGroupRequest(Request, key=ApiKey.SYNC_GROUP, versions="0-5", flexible="4+"):
    """Fetches a member's assignment; the leader brings everybody's."""

    class SyncGroupRequestAssignment(Struct):
        member_id: str = string()
        assignment: bytes = binary()

    group_id: str = string()
    generation_id: int = int32()
    member_id: str = string()
    group_instance_id: str | None = string("3+", nullable=True, default=None)
    protocol_type: str | None = string("5+", nullable=True, default=None, ignorable=True)
    protocol_name: str | None = string("5+", nullable=True, default=None, ignorable=True)
    assignments: list[SyncGroupRequestAssignment] = array(SyncGroupRequestAssignment)


class SyncGroupResponse(Response, key=ApiKey.SYNC_GROUP, versions="0-5", flexible="4+"):
    """The member's assignment."""

    throttle_time_ms: int = int32("1+", ignorable=True)
    error_code: int = int16()
    protocol_type: str | None = string("5+", nullable=True, default=None, ignorable=True)
    protocol_name: str | None = string("5+", nullable=True, default=None, ignorable=True)
    assignment: bytes = binary()


class DescribeGroupsRequest(Request, key=ApiKey.DESCRIBE_GROUPS, versions="0-6", flexible="5+"):
    """Asks for the state and members of classic groups."""

    groups: list[str] = array(string)
    include_authorized_operations: bool = boolean("3+")


class DescribeGroupsResponse(Response, key=ApiKey.DESCRIBE_GROUPS, versions="0-6", flexible="5+"):
    """State and members per group."""

    class DescribedGroupMember(Struct):
        member_id: str = string()
        group_instance_id: str | None = string("4+", nullable=True, default=None, ignorable=True)
        client_id: str = string()
        client_host: str = string()
        member_metadata: bytes = binary()
        member_assignment: bytes = binary()

    class DescribedGroup(Struct):
        error_code: int = int16()
        error_message: str | None = string("6+", nullable=True, default=None)
        group_id: str = string()
        group_state: str = string()
        protocol_type: str = string()
        protocol_data: str = string()
        members: list[DescribeGroupsResponse.DescribedGroupMember] = array("DescribedGroupMember")
        authorized_operations: int = int32("3+", default=-2147483648)

    throttle_time_ms: int = int32("1+", ignorable=True)
    groups: list[DescribedGroup] = array(DescribedGroup)


class ListGroupsRequest(Request, key=ApiKey.LIST_GROUPS, versions="0-5", flexible="3+"):
    """Asks for all groups, filtered by state and type."""

    states_filter: list[str] = array(string, "4+")
    types_filter: list[str] = array(string, "5+")


class ListGroupsResponse(Response, key=ApiKey.LIST_GROUPS, versions="0-5", flexible="3+"):
    """Groups of this broker."""

    class ListedGroup(Struct):
        group_id: str = string()
        protocol_type: str = string()
        group_state: str = string("4+", ignorable=True)
        group_type: str = string("5+", ignorable=True)

    throttle_time_ms: int = int32("1+", ignorable=True)
    error_code: int = int16()
    groups: list[ListedGroup] = array(ListedGroup)


class DeleteGroupsRequest(Request, key=ApiKey.DELETE_GROUPS, versions="0-2", flexible="2+"):
    """Deletes groups."""

    groups_names: list[str] = array(string)


class DeleteGroupsResponse(Response, key=ApiKey.DELETE_GROUPS, versions="0-2", flexible="2+"):
    """The outcome per group."""

    class DeletableGroupResult(Struct):
        group_id: str = string()
        error_code: int = int16()

    throttle_time_ms: int = int32()
    results: list[DeletableGroupResult] = array(DeletableGroupResult)
