"""Finding the coordinator, membership of classic members, and what an administrator does with groups of any kind.

Requests become values of `groups.classic.effects` and results become responses; nothing is decided here. Committed
offsets are in `handlers.group_offsets`, the heartbeats of KIP-848 in `handlers.consumer_groups`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from millrace.cluster.image import TopicImage
from millrace.errors import ApiError, ErrorCode
from millrace.groups.classic.effects import JoinRequest, JoinResult, LeaveRequest, Protocol, SyncRequest
from millrace.groups.classic.group import GroupState
from millrace.groups.coordinator import DescribedGroup
from millrace.handlers.context import RequestContext, anything
from millrace.handlers.needs import (
    CLUSTER_ACTION,
    DELETE_GROUP,
    DESCRIBE_CLUSTER,
    DESCRIBE_GROUP,
    DESCRIBE_TRANSACTIONAL_ID,
    READ_GROUP,
    judged,
)
from millrace.handlers.registry import api
from millrace.model import CONSUMER_OFFSETS_TOPIC, SHARE_STATE_TOPIC, TRANSACTION_STATE_TOPIC
from millrace.queues.records import ShareKey
from millrace.queues.state import partition_for
from millrace.security.acls import ResourceKind
from millrace.wire.keys import ApiKey
from millrace.wire.messages.groups import (
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    LeaveGroupRequest,
    LeaveGroupResponse,
    ListGroupsRequest,
    ListGroupsResponse,
    SyncGroupRequest,
    SyncGroupResponse,
)

_GROUP_KEY: Final = 0
_TRANSACTION_KEY: Final = 1
_SHARE_KEY: Final = 2


@api(
    ApiKey.FIND_COORDINATOR,
    FindCoordinatorRequest,
    "0-6",
    needs=judged(DESCRIBE_GROUP, DESCRIBE_TRANSACTIONAL_ID, CLUSTER_ACTION),
)
async def find_coordinator(context: RequestContext, request: FindCoordinatorRequest) -> FindCoordinatorResponse:
    """Name the broker that coordinates a group, a transactional id or a share-partition.

    The topic that keeps its state is made the first time anybody asks.

    Versions: v1 adds the type of the key (v0 asks for groups), v4 asks for several keys at once (KIP-699), v6 for
    share-partitions, named `group:topic id:partition` (KIP-932), which is for brokers.
    """
    keys = request.coordinator_keys if context.version >= 4 else [request.key]
    found = []
    context.rights(*DESCRIBE_GROUP)
    topic: TopicImage | None = None
    for key in keys:
        coordinator = FindCoordinatorResponse.Coordinator(key=key, node_id=-1, port=-1, error_message=None)
        try:
            _demand_to_find(context, request.key_type, key)
            name = _state_topic(request.key_type, context.version)
            index = _partition_of(context, name, key)
            if topic is None:
                topic = await _ensured(context, name)
            coordinator.node_id, coordinator.host, coordinator.port = _leader(context, topic, index(topic))
        except ApiError as error:
            coordinator.error_code, coordinator.error_message = error.code, error.message
        found.append(coordinator)
    if context.version >= 4:
        return FindCoordinatorResponse(coordinators=found)
    (only,) = found
    return FindCoordinatorResponse(
        error_code=only.error_code,
        error_message=only.error_message,
        node_id=only.node_id,
        host=only.host,
        port=only.port,
    )


def _demand_to_find(context: RequestContext, key_type: int, key: str) -> None:
    if key_type == _TRANSACTION_KEY:
        context.demand(*DESCRIBE_TRANSACTIONAL_ID, key)
    elif key_type == _SHARE_KEY:
        context.demand(*CLUSTER_ACTION)
    else:
        context.demand(*DESCRIBE_GROUP, key)


def _state_topic(key_type: int, version: int) -> str:
    """The internal topic whose partitions say who coordinates keys of a type."""
    if key_type == _GROUP_KEY:
        return CONSUMER_OFFSETS_TOPIC
    if key_type == _SHARE_KEY and version >= 6:
        return SHARE_STATE_TOPIC
    if key_type == _TRANSACTION_KEY:
        return TRANSACTION_STATE_TOPIC
    raise ApiError(ErrorCode.INVALID_REQUEST, f"coordinators of type {key_type} do not exist in version {version}")


def _partition_of(context: RequestContext, name: str, key: str) -> Callable[[TopicImage], int]:
    """How to find the partition of a key; INVALID_REQUEST where the key is none."""
    if name == CONSUMER_OFFSETS_TOPIC:
        return lambda _: context.broker.groups.partition_for(key)
    if name == TRANSACTION_STATE_TOPIC:
        if not key:
            raise ApiError(ErrorCode.INVALID_REQUEST, "the transactional id is empty")
        return lambda _: context.broker.transactions.partition_for(key)
    try:
        share_key = ShareKey.parse(key)
    except ValueError:
        raise ApiError(ErrorCode.INVALID_REQUEST, "a share-partition is named group:topic id:partition") from None
    return lambda topic: partition_for(share_key, len(topic.partitions))


async def _ensured(context: RequestContext, name: str) -> TopicImage:
    try:
        return await context.broker.controller.ensure_internal_topic(name)
    except ApiError as error:
        raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE, f"{name}: {error.message}") from error


def _leader(context: RequestContext, topic: TopicImage, index: int) -> tuple[int, str, int]:
    broker = context.broker
    leader = topic.partitions[index].leader if index < len(topic.partitions) else -1
    if leader == broker.broker_id:
        return leader, *broker.advertised(context.listener)
    registered = broker.image.brokers.get(leader)
    endpoint = registered.endpoint(context.listener) if registered is not None and not registered.fenced else None
    if endpoint is None:
        raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE, f"{topic.name}-{index} has no leader")
    return leader, endpoint.host, endpoint.port


@api(ApiKey.JOIN_GROUP, JoinGroupRequest, "0-9", needs=judged(READ_GROUP))
async def join_group(context: RequestContext, request: JoinGroupRequest) -> JoinGroupResponse:
    """Join a group, or join again; the answer comes when the rebalance that this is part of has a generation.

    A client that hangs up while it waits stays in the group until its session ends, as in Kafka.

    Versions: v1 adds the rebalance timeout (v0 uses the session timeout), v4 sends a dynamic member without an id
    away with one (MEMBER_ID_REQUIRED, KIP-394), v5 adds group.instance.id (KIP-345), v7 returns the protocol type, v8
    adds a reason (it is not kept), v9 lets a returning static leader skip the assignment (KIP-814).
    """
    rebalance_timeout_ms = request.rebalance_timeout_ms if context.version >= 1 else request.session_timeout_ms
    try:
        context.demand(*READ_GROUP, request.group_id)
        result = await context.broker.groups.join(
            request.group_id,
            JoinRequest(
                member_id=request.member_id,
                instance_id=request.group_instance_id,
                protocol_type=request.protocol_type,
                protocols=tuple(Protocol(each.name, each.metadata) for each in request.protocols),
                session_timeout_ms=request.session_timeout_ms,
                rebalance_timeout_ms=rebalance_timeout_ms,
                client_id=context.header.client_id or "",
                # Kafka shows addresses the way Java prints them, with a slash in front.
                client_host=f"/{context.client_host}",
                requires_member_id=context.version >= 4,
                may_skip_assignment=context.version >= 9,
            ),
        )
    except ApiError as error:
        result = JoinResult(error.code, request.member_id)
    return JoinGroupResponse(
        error_code=result.error,
        generation_id=result.generation,
        protocol_type=result.protocol_type,
        # Before v7 the name could not be null; from then on it is not empty.
        protocol_name=result.protocol_name or (None if context.version >= 7 else ""),
        leader=result.leader,
        skip_assignment=result.skip_assignment,
        member_id=result.member_id,
        members=[
            JoinGroupResponse.JoinGroupResponseMember(
                member_id=member.member_id, group_instance_id=member.instance_id, metadata=member.metadata
            )
            for member in result.members
        ],
    )


@api(ApiKey.SYNC_GROUP, SyncGroupRequest, "0-5", needs=judged(READ_GROUP))
async def sync_group(context: RequestContext, request: SyncGroupRequest) -> SyncGroupResponse:
    """Get the assignment of this generation; the leader brings it, the others wait for the leader.

    The assignment is in the log before anybody gets it.

    Versions: v3 adds group.instance.id, v5 names the protocol on both sides (INCONSISTENT_GROUP_PROTOCOL if they
    disagree, or if the request leaves them out).
    """
    try:
        context.demand(*READ_GROUP, request.group_id)
        if context.version >= 5 and (request.protocol_type is None or request.protocol_name is None):
            raise ApiError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
        result = await context.broker.groups.sync(
            request.group_id,
            SyncRequest(
                member_id=request.member_id,
                instance_id=request.group_instance_id,
                generation=request.generation_id,
                protocol_type=request.protocol_type,
                protocol_name=request.protocol_name,
                assignments=tuple((each.member_id, each.assignment) for each in request.assignments),
            ),
        )
    except ApiError as error:
        return SyncGroupResponse(error_code=error.code)
    return SyncGroupResponse(
        error_code=result.error,
        protocol_type=result.protocol_type,
        protocol_name=result.protocol_name,
        assignment=result.assignment,
    )


@api(ApiKey.HEARTBEAT, HeartbeatRequest, "0-4", needs=judged(READ_GROUP))
def heartbeat(context: RequestContext, request: HeartbeatRequest) -> HeartbeatResponse:
    """Keep a member's session alive; REBALANCE_IN_PROGRESS asks it to join again.

    Versions: v3 adds group.instance.id, whose former owner is fenced.
    """
    if not context.may(*READ_GROUP, request.group_id):
        return HeartbeatResponse(error_code=ErrorCode.GROUP_AUTHORIZATION_FAILED)
    error = context.broker.groups.heartbeat(
        request.group_id, request.member_id, request.group_instance_id, request.generation_id
    )
    return HeartbeatResponse(error_code=error)


@api(ApiKey.LEAVE_GROUP, LeaveGroupRequest, "0-5", needs=judged(READ_GROUP))
def leave_group(context: RequestContext, request: LeaveGroupRequest) -> LeaveGroupResponse:
    """Take members out of a group at once, instead of when their sessions end.

    Versions: up to v2 one member by its id; v3 several, static ones also by group.instance.id alone; v5 adds a reason
    (it is not kept).
    """
    if context.version >= 3:
        leaving = [LeaveRequest(each.member_id, each.group_instance_id) for each in request.members]
    else:
        leaving = [LeaveRequest(request.member_id)]
    try:
        context.demand(*READ_GROUP, request.group_id)
        results = context.broker.groups.leave(request.group_id, leaving)
    except ApiError as error:
        return LeaveGroupResponse(error_code=error.code)
    if context.version < 3:
        return LeaveGroupResponse(error_code=results[0].error)
    return LeaveGroupResponse(
        members=[
            LeaveGroupResponse.MemberResponse(
                member_id=result.member_id, group_instance_id=result.instance_id, error_code=result.error
            )
            for result in results
        ]
    )


@api(ApiKey.LIST_GROUPS, ListGroupsRequest, "0-5", needs=judged(DESCRIBE_CLUSTER, DESCRIBE_GROUP))
def list_groups(context: RequestContext, request: ListGroupsRequest) -> ListGroupsResponse:
    """The groups that this broker coordinates: all for who may describe the cluster, else those that may be described.

    Versions: v4 filters by state and returns it (KIP-518), v5 the same with types (KIP-848); upper and lower case do
    not matter, and a name that no state or type has matches nothing.
    """
    may_describe = anything if context.may(*DESCRIBE_CLUSTER) else context.rights(*DESCRIBE_GROUP)
    error, groups = context.broker.groups.list_groups(request.states_filter, request.types_filter)
    return ListGroupsResponse(
        error_code=error,
        groups=[
            ListGroupsResponse.ListedGroup(
                group_id=group.group_id,
                protocol_type=group.protocol_type,
                group_state=group.state,
                group_type=group.group_type,
            )
            for group in groups
            if may_describe(group.group_id)
        ],
    )


@api(ApiKey.DESCRIBE_GROUPS, DescribeGroupsRequest, "0-6", needs=judged(DESCRIBE_GROUP))
def describe_groups(context: RequestContext, request: DescribeGroupsRequest) -> DescribeGroupsResponse:
    """The state, protocol and members of groups; metadata only while a group is stable.

    Versions: v3 can ask for authorized operations, v4 adds group.instance.id, v6 says GROUP_ID_NOT_FOUND where earlier
    ones describe an unknown group as Dead (KIP-1043). A KIP-848 group is unknown here; ConsumerGroupDescribe knows it.
    """
    context.rights(*DESCRIBE_GROUP)
    distinct = dict.fromkeys(request.groups)
    return DescribeGroupsResponse(groups=[_describe(context, request, group_id) for group_id in distinct])


def _describe(
    context: RequestContext, request: DescribeGroupsRequest, group_id: str
) -> DescribeGroupsResponse.DescribedGroup:
    try:
        context.demand(*DESCRIBE_GROUP, group_id)
        group = context.broker.groups.describe(group_id)
    except ApiError as error:
        return DescribeGroupsResponse.DescribedGroup(
            group_id=group_id,
            error_code=error.code,
            error_message=error.message if context.version >= 6 else None,
        )
    if group is not None:
        described = _described(group)
        if request.include_authorized_operations:
            described.authorized_operations = context.allowed_operations(ResourceKind.GROUP, group_id)
        return described
    missing = DescribeGroupsResponse.DescribedGroup(group_id=group_id, group_state=GroupState.DEAD.value)
    if context.version >= 6:
        missing.error_code = ErrorCode.GROUP_ID_NOT_FOUND
        missing.error_message = f"Group {group_id} not found."
    return missing


def _described(group: DescribedGroup) -> DescribeGroupsResponse.DescribedGroup:
    return DescribeGroupsResponse.DescribedGroup(
        group_id=group.group_id,
        group_state=group.state.value,
        protocol_type=group.protocol_type,
        protocol_data=group.protocol_name,
        members=[
            DescribeGroupsResponse.DescribedGroupMember(
                member_id=member.member_id,
                group_instance_id=member.instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                member_metadata=member.metadata,
                member_assignment=member.assignment,
            )
            for member in group.members
        ],
    )


@api(ApiKey.DELETE_GROUPS, DeleteGroupsRequest, "0-2", needs=judged(DELETE_GROUP))
async def delete_groups(context: RequestContext, request: DeleteGroupsRequest) -> DeleteGroupsResponse:
    """Delete groups that have no members, with their committed offsets, durably."""
    may_delete = context.rights(*DELETE_GROUP)
    refused = ErrorCode.GROUP_AUTHORIZATION_FAILED
    results = {name: refused for name in request.groups_names if not may_delete(name)}
    results |= await context.broker.groups.delete_groups([name for name in request.groups_names if name not in results])
    return DeleteGroupsResponse(
        results=[
            DeleteGroupsResponse.DeletableGroupResult(group_id=group_id, error_code=error)
            for group_id, error in results.items()
        ]
    )
