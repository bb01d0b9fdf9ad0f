"""Share groups (KIP-932): membership and description. A share group reads topics as queues.

Requests become values of `groups.share.protocol` and results become responses; nothing is decided here. Not here: the
records that members get (`handlers.share_fetch`), where a group's queues begin (`handlers.share_offsets`).
"""

from __future__ import annotations

from millrace.cluster.image import ClusterImage
from millrace.errors import ApiError, ErrorCode
from millrace.groups.share.group import ShareMember
from millrace.groups.share.protocol import ASSIGNOR, ShareHeartbeat
from millrace.handlers.consumer_groups import TOPICS_HIDDEN
from millrace.handlers.context import RequestContext
from millrace.handlers.needs import DESCRIBE_GROUP, DESCRIBE_TOPIC, READ_GROUP, judged
from millrace.handlers.registry import api
from millrace.handlers.share_fetch import MAX_MEMBER_ID
from millrace.security.acls import ResourceKind
from millrace.wire.keys import ApiKey
from millrace.wire.messages.share_groups import (
    ShareGroupDescribeRequest,
    ShareGroupDescribeResponse,
    ShareGroupHeartbeatRequest,
    ShareGroupHeartbeatResponse,
)


@api(
    ApiKey.SHARE_GROUP_HEARTBEAT,
    ShareGroupHeartbeatRequest,
    "1",
    needs=judged(READ_GROUP, DESCRIBE_TOPIC),
    overlaps=True,
)
async def share_group_heartbeat(
    context: RequestContext, request: ShareGroupHeartbeatRequest
) -> ShareGroupHeartbeatResponse:
    """Join a share group, stay in it, leave it; the answer says which partitions to read.

    An epoch of 0 joins, -1 leaves. The answer comes when what it says is in the log. Who joins is answered when the
    queues it asks for have been begun, so that it has its partitions with the first answer. A member that waits for an
    assignment is asked to come back after a second, sooner than its heartbeat interval says.
    """
    try:
        context.demand(*READ_GROUP, request.group_id)
        if len(request.member_id) > MAX_MEMBER_ID:
            raise ApiError(ErrorCode.INVALID_REQUEST, "the member id is longer than a UUID")
        for name in request.subscribed_topic_names or ():
            context.demand(*DESCRIBE_TOPIC, name)
        result = await context.broker.groups.share_heartbeat(
            request.group_id,
            ShareHeartbeat(
                member_id=request.member_id,
                epoch=request.member_epoch,
                rack_id=request.rack_id,
                topics=None if request.subscribed_topic_names is None else tuple(request.subscribed_topic_names),
                client_id=context.header.client_id or "",
                # Kafka shows addresses the way Java prints them, with a slash in front.
                client_host=f"/{context.client_host}",
            ),
        )
    except ApiError as error:
        return ShareGroupHeartbeatResponse(error_code=error.code, error_message=error.message or None)
    response = ShareGroupHeartbeatResponse(
        member_id=result.member_id, member_epoch=result.epoch, heartbeat_interval_ms=result.interval_ms
    )
    if result.assignment is not None:
        response.assignment = ShareGroupHeartbeatResponse.Assignment(
            topic_partitions=[
                ShareGroupHeartbeatResponse.TopicPartitions(topic_id=topic_id, partitions=list(partitions))
                for topic_id, partitions in result.assignment
            ]
        )
    return response


@api(
    ApiKey.SHARE_GROUP_DESCRIBE,
    ShareGroupDescribeRequest,
    "1",
    needs=judged(DESCRIBE_GROUP, DESCRIBE_TOPIC),
)
def share_group_describe(context: RequestContext, request: ShareGroupDescribeRequest) -> ShareGroupDescribeResponse:
    """The epochs, members and assignments of share groups; GROUP_ID_NOT_FOUND for any other group.

    A group that reads a topic which may not be described is TOPIC_AUTHORIZATION_FAILED, as in Kafka.
    """
    context.rights(*DESCRIBE_GROUP)
    return ShareGroupDescribeResponse(
        groups=[
            _describe(context, group_id, with_operations=request.include_authorized_operations)
            for group_id in dict.fromkeys(request.group_ids)
        ]
    )


def _describe(
    context: RequestContext, group_id: str, *, with_operations: bool
) -> ShareGroupDescribeResponse.DescribedGroup:
    try:
        context.demand(*DESCRIBE_GROUP, group_id)
        group = context.broker.groups.describe_share(group_id)
        if group is None:
            raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND, f"{group_id} is no share group")
        members = [_member(context.broker.image, member) for member in group.members.values()]
        may_describe = context.rights(*DESCRIBE_TOPIC)
        if not all(may_describe(each.topic_name) for member in members for each in member.assignment.topic_partitions):
            raise ApiError(ErrorCode.TOPIC_AUTHORIZATION_FAILED, TOPICS_HIDDEN)
    except ApiError as error:
        return ShareGroupDescribeResponse.DescribedGroup(
            group_id=group_id, error_code=error.code, error_message=error.message or None
        )
    described = ShareGroupDescribeResponse.DescribedGroup(
        group_id=group_id,
        group_state=group.state.value,
        group_epoch=group.epoch.epoch,
        assignment_epoch=group.target_epoch.epoch,
        assignor_name=ASSIGNOR,
        members=members,
    )
    if with_operations:
        described.authorized_operations = context.allowed_operations(ResourceKind.GROUP, group_id)
    return described


def _member(image: ClusterImage, member: ShareMember) -> ShareGroupDescribeResponse.Member:
    """A member with the names of its topics; those that are gone are left out."""
    info = member.info
    return ShareGroupDescribeResponse.Member(
        member_id=member.member_id,
        rack_id=info.rack_id,
        member_epoch=member.held.epoch,
        client_id=info.client_id,
        client_host=info.client_host,
        subscribed_topic_names=list(info.topics),
        assignment=ShareGroupDescribeResponse.Assignment(
            topic_partitions=[
                ShareGroupDescribeResponse.TopicPartitions(
                    topic_id=topic_id, topic_name=image.topics_by_id[topic_id].name, partitions=list(indices)
                )
                for topic_id, indices in member.held.assigned.items()
                if topic_id in image.topics_by_id
            ]
        ),
    )
