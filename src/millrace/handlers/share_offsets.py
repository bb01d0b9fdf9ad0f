"""Where the queues of share groups begin (KIP-932): described, set, deleted.

Nothing is decided here: which share-partitions a group has is in `groups.share.partitions`, where they begin in
`queues.state`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from typing import Final
from uuid import UUID

from millrace.cluster.image import TopicImage
from millrace.errors import ApiError, ErrorCode, MillraceError, code_of, text_of
from millrace.handlers.context import RequestContext
from millrace.handlers.needs import (
    DELETE_GROUP,
    DESCRIBE_GROUP,
    DESCRIBE_TOPIC,
    READ_GROUP,
    READ_TOPIC,
    judged,
)
from millrace.handlers.offsets import LATEST
from millrace.handlers.registry import api
from millrace.model import ZERO_UUID
from millrace.queues.records import ShareKey
from millrace.queues.state import NO_COUNT, NO_START, Summary
from millrace.wire.keys import ApiKey
from millrace.wire.messages.offsets import ListOffsetsRequest
from millrace.wire.messages.share_groups import (
    AlterShareGroupOffsetsRequest,
    AlterShareGroupOffsetsResponse,
    DeleteShareGroupOffsetsRequest,
    DeleteShareGroupOffsetsResponse,
    DescribeShareGroupOffsetsRequest,
    DescribeShareGroupOffsetsResponse,
)

_NO_LAG: Final = -1
_NOT_ALLOWED: Final = ApiError(ErrorCode.TOPIC_AUTHORIZATION_FAILED, "the topic may not be used for this")
_LIST_OFFSETS_VERSION: Final = 9
_LIST_OFFSETS_TIMEOUT_MS: Final = 5_000

_Partition = DescribeShareGroupOffsetsResponse.DescribeShareGroupOffsetsResponsePartition


@api(
    ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS,
    DescribeShareGroupOffsetsRequest,
    "0-1",
    needs=judged(DESCRIBE_GROUP, DESCRIBE_TOPIC),
)
async def describe_share_group_offsets(
    context: RequestContext, request: DescribeShareGroupOffsetsRequest
) -> DescribeShareGroupOffsetsResponse:
    """Where a share group's queues begin: every record before that is done with. -1 if nobody has read yet.

    What is stored of a queue's beginning is what it was before the last answer of a member; if no record is left, it
    is the end that is told.

    Versions: v1 adds how many records are left (KIP-1226), -1 if that is not known.
    """
    context.rights(*DESCRIBE_GROUP)
    # The same question over and over is answered once: a few bytes may stand for every partition of a group.
    distinct = {_question(group): group for group in request.groups}
    return DescribeShareGroupOffsetsResponse(
        groups=list(await asyncio.gather(*(_describe_group(context, group) for group in distinct.values())))
    )


def _question(group: DescribeShareGroupOffsetsRequest.DescribeShareGroupOffsetsRequestGroup) -> Hashable:
    """A key that two groups of a request share only when they ask for the same."""
    if group.topics is None:
        return group.group_id
    return group.group_id, tuple((topic.topic_name, tuple(topic.partitions)) for topic in group.topics)


async def _describe_group(
    context: RequestContext, asked: DescribeShareGroupOffsetsRequest.DescribeShareGroupOffsetsRequestGroup
) -> DescribeShareGroupOffsetsResponse.DescribeShareGroupOffsetsResponseGroup:
    image = context.broker.image
    may_describe = context.rights(*DESCRIBE_TOPIC)
    try:
        context.demand(*DESCRIBE_GROUP, asked.group_id)
        begun = context.broker.groups.share_partitions_of(asked.group_id)
    except ApiError as error:
        return DescribeShareGroupOffsetsResponse.DescribeShareGroupOffsetsResponseGroup(
            group_id=asked.group_id, error_code=error.code, error_message=error.message or None
        )
    wanted: list[tuple[str, TopicImage | None, Sequence[int]]]
    if asked.topics is None:
        wanted = [
            (image.topics_by_id[topic_id].name, image.topics_by_id[topic_id], sorted(each.partitions))
            for topic_id, each in begun.items()
            if topic_id in image.topics_by_id and may_describe(image.topics_by_id[topic_id].name)
        ]
    else:
        wanted = [
            (topic.topic_name, image.topics.get(topic.topic_name), list(dict.fromkeys(topic.partitions)))
            for topic in asked.topics
            if may_describe(topic.topic_name)
        ]
    topics = [
        DescribeShareGroupOffsetsResponse.DescribeShareGroupOffsetsResponseTopic(
            topic_name=name,
            topic_id=ZERO_UUID if topic is None else topic.topic_id,
            partitions=list(
                await asyncio.gather(*(_describe_partition(context, asked.group_id, topic, each) for each in indices))
            ),
        )
        for name, topic, indices in wanted
    ]
    topics += [
        DescribeShareGroupOffsetsResponse.DescribeShareGroupOffsetsResponseTopic(
            topic_name=topic.topic_name, partitions=[_refused(each) for each in dict.fromkeys(topic.partitions)]
        )
        for topic in asked.topics or ()
        if not may_describe(topic.topic_name)
    ]
    return DescribeShareGroupOffsetsResponse.DescribeShareGroupOffsetsResponseGroup(
        group_id=asked.group_id, topics=topics
    )


def _refused(index: int) -> _Partition:
    return _Partition(
        partition_index=index,
        start_offset=NO_START,
        lag=_NO_LAG,
        error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED,
        error_message=_NOT_ALLOWED.message,
    )


async def _describe_partition(
    context: RequestContext, group_id: str, topic: TopicImage | None, index: int
) -> _Partition:
    try:
        # What is not there has not begun, as with offsets that nobody committed.
        found = (
            Summary()
            if topic is None
            else await context.broker.persister.summary(ShareKey(group_id, topic.topic_id, index))
        )
    except ApiError:
        found = Summary()
    described = _Partition(
        partition_index=index, start_offset=found.start_offset, leader_epoch=found.leader_epoch, lag=_NO_LAG
    )
    if topic is not None and found.start_offset != NO_START and found.completed != NO_COUNT:
        try:
            end = await _latest(context, topic, index)
        except MillraceError as error:
            return _Partition(partition_index=index, error_code=code_of(error), error_message=text_of(error))
        described.lag = end - found.start_offset - found.completed
        if described.lag == 0:
            described.start_offset = end
    return described


async def _latest(context: RequestContext, topic: TopicImage, index: int) -> int:
    """The end of a partition, from its leader; MillraceError."""
    broker = context.broker
    leader = topic.partitions[index].leader
    if leader == broker.broker_id:
        return broker.replicas.find(topic.name, index).latest_offset()
    asked = ListOffsetsRequest.ListOffsetsPartition(partition_index=index, timestamp=LATEST)
    message = ListOffsetsRequest(
        replica_id=-1, topics=[ListOffsetsRequest.ListOffsetsTopic(name=topic.name, partitions=[asked])]
    )
    response = await broker.peers.request(leader, message, _LIST_OFFSETS_VERSION, _LIST_OFFSETS_TIMEOUT_MS)
    found = response.topics[0].partitions[0]
    if found.error_code:
        raise ApiError(ErrorCode(found.error_code), f"{topic.name}-{index}")
    return int(found.offset)


@api(
    ApiKey.ALTER_SHARE_GROUP_OFFSETS,
    AlterShareGroupOffsetsRequest,
    "0",
    needs=judged(READ_GROUP, READ_TOPIC),
)
async def alter_share_group_offsets(
    context: RequestContext, request: AlterShareGroupOffsetsRequest
) -> AlterShareGroupOffsetsResponse:
    """Have queues begin anew at given offsets, for a share group without members; one that does not exist is made.

    What became of records so far is forgotten. Answered when that is durable.
    """
    may_read = context.rights(*READ_TOPIC)
    allowed = {topic.topic_name for topic in request.topics if may_read(topic.topic_name)}
    topics = {name: topic for name, topic in context.broker.image.topics.items() if name in allowed}
    wanted: dict[tuple[UUID, int], int] = {}
    for asked in request.topics:
        topic = topics.get(asked.topic_name)
        for each in asked.partitions:
            if topic is not None and 0 <= each.partition_index < len(topic.partitions):
                wanted[topic.topic_id, each.partition_index] = each.start_offset
    try:
        context.demand(*READ_GROUP, request.group_id)
        errors = await context.broker.groups.set_share_offsets(request.group_id, wanted) if allowed else {}
    except ApiError as error:
        return AlterShareGroupOffsetsResponse(error_code=error.code, error_message=error.message or None)
    responses = []
    for asked in request.topics:
        topic = topics.get(asked.topic_name)
        topic_id = ZERO_UUID if topic is None else topic.topic_id
        partitions = []
        for each in asked.partitions:
            slot = topic_id, each.partition_index
            failed = errors.get(slot)
            if asked.topic_name not in allowed:
                failed = _NOT_ALLOWED
            elif slot not in wanted:
                failed = ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "there is no such partition")
            partitions.append(
                AlterShareGroupOffsetsResponse.AlterShareGroupOffsetsResponsePartition(
                    partition_index=each.partition_index,
                    error_code=ErrorCode.NONE if failed is None else failed.code,
                    error_message=None if failed is None else failed.message,
                )
            )
        responses.append(
            AlterShareGroupOffsetsResponse.AlterShareGroupOffsetsResponseTopic(
                topic_name=asked.topic_name, topic_id=topic_id, partitions=partitions
            )
        )
    return AlterShareGroupOffsetsResponse(responses=responses)


@api(
    ApiKey.DELETE_SHARE_GROUP_OFFSETS,
    DeleteShareGroupOffsetsRequest,
    "0",
    needs=judged(DELETE_GROUP, READ_TOPIC),
)
async def delete_share_group_offsets(
    context: RequestContext, request: DeleteShareGroupOffsetsRequest
) -> DeleteShareGroupOffsetsResponse:
    """Forget what became of the records of topics, for a share group without members; answered when that is durable.

    UNKNOWN_TOPIC_OR_PARTITION if the group has not read a topic, or there is none.
    """
    may_read = context.rights(*READ_TOPIC)
    names = [topic.topic_name for topic in request.topics if may_read(topic.topic_name)]
    refused = [
        _deleted(topic.topic_name, ZERO_UUID, _NOT_ALLOWED)
        for topic in request.topics
        if not may_read(topic.topic_name)
    ]
    try:
        context.demand(*DELETE_GROUP, request.group_id)
        if refused and not names:
            return DeleteShareGroupOffsetsResponse(responses=refused)
        deletion, errors = await context.broker.groups.delete_share_offsets(request.group_id, names)
    except ApiError as error:
        return DeleteShareGroupOffsetsResponse(error_code=error.code, error_message=error.message or None)
    by_id = context.broker.image.topics_by_id
    unknown = ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "the group has nothing of this topic")
    return DeleteShareGroupOffsetsResponse(
        responses=[
            *refused,
            *(_deleted(name, ZERO_UUID, unknown) for name in deletion.unknown),
            *(
                _deleted(by_id[topic_id].name if topic_id in by_id else "", topic_id, errors.get(topic_id))
                for topic_id in deletion.partitions
            ),
        ]
    )


def _deleted(
    name: str, topic_id: UUID, error: ApiError | None
) -> DeleteShareGroupOffsetsResponse.DeleteShareGroupOffsetsResponseTopic:
    return DeleteShareGroupOffsetsResponse.DeleteShareGroupOffsetsResponseTopic(
        topic_name=name,
        topic_id=topic_id,
        error_code=ErrorCode.NONE if error is None else error.code,
        error_message=None if error is None else error.message,
    )
