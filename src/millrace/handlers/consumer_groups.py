"""Consumer groups whose assignment the broker computes (KIP-848): heartbeat and description.

Requests become values of `groups.modern.protocol` and results become responses; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from uuid import UUID

from millrace.cluster.image import ClusterImage
from millrace.errors import ApiError, ErrorCode
from millrace.groups.modern.group import Member, ModernGroup
from millrace.groups.modern.protocol import ModernHeartbeat
from millrace.groups.modern.target import flatten
from millrace.handlers.context import RequestContext
from millrace.handlers.needs import DESCRIBE_GROUP, DESCRIBE_TOPIC, READ_GROUP, judged
from millrace.handlers.registry import api
from millrace.security.acls import ResourceKind
from millrace.wire.keys import ApiKey
from millrace.wire.messages.consumer_groups import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
)

TOPICS_HIDDEN: Final = "the group reads topics that may not be described"
_CLASSIC_MEMBER: Final = 0
_CONSUMER_MEMBER: Final = 1


@api(
    ApiKey.CONSUMER_GROUP_HEARTBEAT,
    ConsumerGroupHeartbeatRequest,
    "0-1",
    needs=judged(READ_GROUP, DESCRIBE_TOPIC),
    overlaps=True,
)
async def consumer_group_heartbeat(
    context: RequestContext, request: ConsumerGroupHeartbeatRequest
) -> ConsumerGroupHeartbeatResponse:
    """Join a consumer group, stay in it, leave it; the answer says what to give up and what the member got.

    An epoch of 0 joins, -1 leaves, -2 leaves for a while (static members). The answer comes when what it says is in
    the log. A member that waits for partitions of others is asked to come back after a second, sooner than its
    heartbeat interval says.

    Versions: v1 lets members choose their ids and subscribe to a regular expression, which RE2 matches against whole
    names; at most 1,024 characters, and 100 of them in a group (INVALID_REGULAR_EXPRESSION). A topic is matched only
    for who may describe it: for the member whose heartbeat finds it, as in Kafka. After a change of the rules it is
    matched anew in a heartbeat of a member that subscribes to it, at most every ten seconds.

    UNSUPPORTED_VERSION where `group.coordinator.rebalance.protocols` has no `consumer`.
    """
    try:
        context.demand(*READ_GROUP, request.group_id)
        _check_offered(context)
        for name in request.subscribed_topic_names or ():
            context.demand(*DESCRIBE_TOPIC, name)
        result = await context.broker.groups.modern_heartbeat(
            request.group_id,
            ModernHeartbeat(
                member_id=request.member_id,
                epoch=request.member_epoch,
                instance_id=request.instance_id,
                rack_id=request.rack_id,
                rebalance_timeout_ms=request.rebalance_timeout_ms,
                topics=None if request.subscribed_topic_names is None else tuple(request.subscribed_topic_names),
                pattern=request.subscribed_topic_regex,
                assignor=request.server_assignor,
                owned=(
                    None
                    if request.topic_partitions is None
                    else [(each.topic_id, each.partitions) for each in request.topic_partitions]
                ),
                client_id=context.header.client_id or "",
                # Kafka shows addresses the way Java prints them, with a slash in front.
                client_host=f"/{context.client_host}",
                needs_member_id=context.version >= 1,
                rules=context.broker.image.acls,
                may_know=context.rights(*DESCRIBE_TOPIC),
            ),
        )
    except ApiError as error:
        return ConsumerGroupHeartbeatResponse(error_code=error.code, error_message=error.message or None)
    response = ConsumerGroupHeartbeatResponse(
        member_id=result.member_id, member_epoch=result.epoch, heartbeat_interval_ms=result.interval_ms
    )
    if result.assignment is not None:
        response.assignment = ConsumerGroupHeartbeatResponse.Assignment(
            topic_partitions=[
                ConsumerGroupHeartbeatResponse.TopicPartitions(topic_id=topic_id, partitions=list(partitions))
                for topic_id, partitions in result.assignment
            ]
        )
    return response


@api(
    ApiKey.CONSUMER_GROUP_DESCRIBE,
    ConsumerGroupDescribeRequest,
    "0-1",
    needs=judged(DESCRIBE_GROUP, DESCRIBE_TOPIC),
)
def consumer_group_describe(
    context: RequestContext, request: ConsumerGroupDescribeRequest
) -> ConsumerGroupDescribeResponse:
    """The epochs, members and assignments of consumer groups; GROUP_ID_NOT_FOUND for any other group.

    A group that reads a topic which may not be described is TOPIC_AUTHORIZATION_FAILED, as in Kafka.

    Versions: v1 says which members speak the classic protocol.
    """
    context.rights(*DESCRIBE_GROUP)
    return ConsumerGroupDescribeResponse(
        groups=[
            _describe(context, group_id, with_operations=request.include_authorized_operations)
            for group_id in dict.fromkeys(request.group_ids)
        ]
    )


def _describe(
    context: RequestContext, group_id: str, *, with_operations: bool
) -> ConsumerGroupDescribeResponse.DescribedGroup:
    groups = context.broker.groups
    try:
        context.demand(*DESCRIBE_GROUP, group_id)
        _check_offered(context)
        group = groups.describe_modern(group_id)
        if group is None:
            raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND, f"{group_id} is no consumer group")
        members = [_member(context.broker.image, group, member) for member in group.members.values()]
        _check_topics(context, members)
    except ApiError as error:
        return ConsumerGroupDescribeResponse.DescribedGroup(
            group_id=group_id, error_code=error.code, error_message=error.message or None
        )
    described = ConsumerGroupDescribeResponse.DescribedGroup(
        group_id=group_id,
        group_state=group.state.value,
        group_epoch=group.epoch.epoch,
        assignment_epoch=group.target_epoch.epoch,
        assignor_name=group.preferred_assignor(groups.settings.consumer_assignors[0]),
        members=members,
    )
    if with_operations:
        described.authorized_operations = context.allowed_operations(ResourceKind.GROUP, group_id)
    return described


def _check_offered(context: RequestContext) -> None:
    if not context.broker.groups.settings.offers_consumer_groups:
        raise ApiError(
            ErrorCode.UNSUPPORTED_VERSION,
            "this broker serves no groups of the consumer protocol: see group.coordinator.rebalance.protocols",
        )


def _check_topics(context: RequestContext, members: Iterable[ConsumerGroupDescribeResponse.Member]) -> None:
    may_describe = context.rights(*DESCRIBE_TOPIC)
    for member in members:
        for assignment in (member.assignment, member.target_assignment):
            if not all(may_describe(topic.topic_name) for topic in assignment.topic_partitions):
                raise ApiError(ErrorCode.TOPIC_AUTHORIZATION_FAILED, TOPICS_HIDDEN)


def _member(image: ClusterImage, group: ModernGroup, member: Member) -> ConsumerGroupDescribeResponse.Member:
    info = member.info
    return ConsumerGroupDescribeResponse.Member(
        member_id=member.member_id,
        instance_id=info.instance_id,
        rack_id=info.rack_id,
        member_epoch=member.held.epoch,
        client_id=info.client_id,
        client_host=info.client_host,
        subscribed_topic_names=list(info.topics),
        subscribed_topic_regex=info.pattern,
        assignment=_assignment(image, flatten(member.held.assigned)),
        target_assignment=_assignment(image, group.target_of(member.member_id).items()),
        member_type=_CLASSIC_MEMBER if member.is_classic else _CONSUMER_MEMBER,
    )


def _assignment(
    image: ClusterImage, partitions: Iterable[tuple[UUID, tuple[int, ...]]]
) -> ConsumerGroupDescribeResponse.Assignment:
    """Partitions with the names of their topics; topics that are gone are left out."""
    named = []
    for topic_id, indices in partitions:
        topic = image.topics_by_id.get(topic_id)
        if topic is not None:
            named.append(
                ConsumerGroupDescribeResponse.TopicPartitions(
                    topic_id=topic_id, topic_name=topic.name, partitions=list(indices)
                )
            )
    return ConsumerGroupDescribeResponse.Assignment(topic_partitions=named)
