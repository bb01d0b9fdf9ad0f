"""OffsetCommit, OffsetFetch and OffsetDelete: where consumers have got to.

Topics and partitions are checked against the cluster image here; who may commit, and when a commit counts, is the
coordinator's business.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from millrace.errors import ApiError, ErrorCode
from millrace.groups.offsets.committed import NO_OFFSET, CommittedOffset, OffsetToCommit, Slot, TopicOffsets
from millrace.handlers.context import RequestContext
from millrace.handlers.needs import (
    DELETE_GROUP,
    DESCRIBE_GROUP,
    DESCRIBE_TOPIC,
    READ_GROUP,
    READ_TOPIC,
    judged,
)
from millrace.handlers.registry import api
from millrace.model import ZERO_UUID
from millrace.wire.keys import ApiKey
from millrace.wire.messages.group_offsets import (
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
)
from millrace.wire.messages.transactions import TxnOffsetCommitRequest

_NOTHING: Final = CommittedOffset(NO_OFFSET)


@api(ApiKey.OFFSET_COMMIT, OffsetCommitRequest, "2-10", needs=judged(READ_GROUP, READ_TOPIC), overlaps=True)
async def offset_commit(context: RequestContext, request: OffsetCommitRequest) -> OffsetCommitResponse:
    """Commit offsets of a group; the answer comes when they are on disk.

    Members must name their generation; without one (tools, consumers that assign themselves) a commit is accepted
    while the group has no members. Errors are per partition: an unknown topic or partition, and metadata beyond
    offset.metadata.max.bytes, do not harm the others.

    Versions: v2-4 may carry a retention of their own, v6 adds the leader epoch, v7 group.instance.id; from v9 a group
    that is gone is GROUP_ID_NOT_FOUND (before: ILLEGAL_GENERATION) and members of KIP-848 groups name their epoch
    (STALE_MEMBER_EPOCH, per partition as in KIP-1251); v10 names topics by id (UNKNOWN_TOPIC_ID).
    """
    response = OffsetCommitResponse()
    accepted: list[OffsetToCommit] = []
    answers: list[OffsetCommitResponse.OffsetCommitResponsePartition] = []
    may_commit = context.may(*READ_GROUP, request.group_id)
    may_read = context.rights(*READ_TOPIC)
    for topic in request.topics:
        answered = OffsetCommitResponse.OffsetCommitResponseTopic(name=topic.name, topic_id=topic.topic_id)
        response.topics.append(answered)
        name, topic_id, partition_count, missing = _resolve(context, topic.name, topic.topic_id)
        if not may_commit:
            partition_count, missing = 0, ErrorCode.GROUP_AUTHORIZATION_FAILED
        elif missing is not ErrorCode.UNKNOWN_TOPIC_ID and not may_read(name):
            partition_count, missing = 0, ErrorCode.TOPIC_AUTHORIZATION_FAILED
        for partition in topic.partitions:
            index = partition.partition_index
            answer = OffsetCommitResponse.OffsetCommitResponsePartition(partition_index=index)
            answered.partitions.append(answer)
            if not 0 <= index < partition_count:
                answer.error_code = missing
                continue
            answers.append(answer)
            accepted.append(offset_to_commit(name, topic_id, partition))
    if not accepted:
        return response
    try:
        errors: Sequence[ErrorCode] = await context.broker.groups.commit(
            request.group_id,
            accepted,
            member_id=request.member_id,
            instance_id=request.group_instance_id,
            generation=request.generation_id_or_member_epoch,
            retention_ms=request.retention_time_ms,
            has_member_epochs=context.version >= 9,
        )
    except ApiError as error:
        errors = [error.code] * len(answers)
    for answer, code in zip(answers, errors, strict=True):
        answer.error_code = code
    return response


def offset_to_commit(
    topic: str,
    topic_id: UUID,
    partition: OffsetCommitRequest.OffsetCommitRequestPartition
    | TxnOffsetCommitRequest.TxnOffsetCommitRequestPartition,
) -> OffsetToCommit:
    """What a request wants to be committed for a partition that exists."""
    return OffsetToCommit(
        topic=topic,
        partition=partition.partition_index,
        topic_id=topic_id,
        offset=partition.committed_offset,
        leader_epoch=partition.committed_leader_epoch,
        metadata=partition.committed_metadata or "",
    )


def _resolve(context: RequestContext, name: str, topic_id: UUID) -> tuple[str, UUID, int, ErrorCode]:
    """A topic's name, id and number of partitions, and what a partition outside of them is told."""
    image = context.broker.image
    by_id = context.version >= 10
    topic = image.topics_by_id.get(topic_id) if by_id else image.topics.get(name)
    if topic is None:
        missing = ErrorCode.UNKNOWN_TOPIC_ID if by_id else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return name, topic_id, 0, missing
    return topic.name, topic.topic_id, len(topic.partitions), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A topic of an OffsetFetch, whatever the version."""

    name: str
    topic_id: UUID
    partitions: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Found:
    """A topic of the answer."""

    name: str
    topic_id: UUID
    partitions: list[tuple[int, CommittedOffset, ErrorCode]]


@api(ApiKey.OFFSET_FETCH, OffsetFetchRequest, "1-10", needs=judged(DESCRIBE_GROUP, DESCRIBE_TOPIC), overlaps=True)
async def offset_fetch(context: RequestContext, request: OffsetFetchRequest) -> OffsetFetchResponse:
    """Read committed offsets; a partition without one, or a group that does not exist, has offset -1.

    Versions: v2 reads everything if the topics are null and puts errors of the group at the top; v5 adds the leader
    epoch; v7 require_stable, which waits for commits that are on their way, and is UNSTABLE_OFFSET_COMMIT for a
    partition of which an open transaction has committed an offset (KIP-447); v8 reads several groups (KIP-709); v10
    names topics by id (UNKNOWN_TOPIC_ID), and an offset of a deleted topic of the same name is not returned. From v9
    a member of a KIP-848 group may name its epoch, which must be its current one (STALE_MEMBER_EPOCH).
    """
    context.rights(*DESCRIBE_GROUP)
    if context.version >= 8:
        # The same question over and over is answered once: a small request must not become a huge answer.
        distinct = {_question(group): group for group in request.groups}
        return OffsetFetchResponse(
            groups=[await _fetch_group(context, group, stable=request.require_stable) for group in distinct.values()]
        )
    wanted = None
    if request.topics is not None:
        wanted = [_Wanted(topic.name, ZERO_UUID, topic.partition_indexes) for topic in request.topics]
    error, topics = await _fetch(context, request.group_id, wanted, stable=request.require_stable)
    if error is not ErrorCode.NONE and context.version < 2:
        # No room for an error of the group: every partition says it.
        topics = [
            _Found(each.name, each.topic_id, [(index, _NOTHING, error) for index in each.partitions])
            for each in wanted or ()
        ]
    return OffsetFetchResponse(
        error_code=error,
        topics=[
            OffsetFetchResponse.OffsetFetchResponseTopic(
                name=topic.name,
                partitions=[
                    OffsetFetchResponse.OffsetFetchResponsePartition(
                        partition_index=index,
                        committed_offset=committed.offset,
                        committed_leader_epoch=committed.leader_epoch,
                        metadata=committed.metadata,
                        error_code=code,
                    )
                    for index, committed, code in topic.partitions
                ],
            )
            for topic in topics
        ],
    )


def _question(group: OffsetFetchRequest.OffsetFetchRequestGroup) -> Hashable:
    """A key that two groups of a request share only when they ask for the same."""
    if group.topics is None:
        return (group.group_id, group.member_id, group.member_epoch)
    topics = tuple((topic.name, topic.topic_id, tuple(topic.partition_indexes)) for topic in group.topics)
    return (group.group_id, group.member_id, group.member_epoch, topics)


async def _fetch_group(
    context: RequestContext, group: OffsetFetchRequest.OffsetFetchRequestGroup, *, stable: bool
) -> OffsetFetchResponse.OffsetFetchResponseGroup:
    wanted = None
    if group.topics is not None:
        wanted = [_Wanted(topic.name, topic.topic_id, topic.partition_indexes) for topic in group.topics]
    error, topics = await _fetch(
        context, group.group_id, wanted, stable=stable, member_id=group.member_id, member_epoch=group.member_epoch
    )
    return OffsetFetchResponse.OffsetFetchResponseGroup(
        group_id=group.group_id,
        error_code=error,
        topics=[
            OffsetFetchResponse.OffsetFetchResponseTopics(
                name=topic.name,
                topic_id=topic.topic_id,
                partitions=[
                    OffsetFetchResponse.OffsetFetchResponsePartitions(
                        partition_index=index,
                        committed_offset=committed.offset,
                        committed_leader_epoch=committed.leader_epoch,
                        metadata=committed.metadata,
                        error_code=code,
                    )
                    for index, committed, code in topic.partitions
                ],
            )
            for topic in topics
        ],
    )


async def _fetch(
    context: RequestContext,
    group_id: str,
    wanted: Sequence[_Wanted] | None,
    *,
    stable: bool,
    member_id: str | None = None,
    member_epoch: int = -1,
) -> tuple[ErrorCode, list[_Found]]:
    """The offsets of one group, and the error of the whole group, in which case there are none."""
    try:
        context.demand(*DESCRIBE_GROUP, group_id)
        groups = context.broker.groups
        held = await groups.fetch_offsets(
            group_id, require_stable=stable, member_id=member_id, member_epoch=member_epoch
        )
        unstable: Collection[Slot] = groups.unstable_offsets(group_id) if stable else ()
    except ApiError as error:
        return error.code, []
    if wanted is None:
        return ErrorCode.NONE, _everything(context, held, unstable)
    return ErrorCode.NONE, [_pick(context, held, unstable, topic) for topic in wanted]


def _everything(context: RequestContext, held: TopicOffsets, unstable: Collection[Slot]) -> list[_Found]:
    found = []
    may_describe = context.rights(*DESCRIBE_TOPIC)
    for name, partitions in held.items():
        if not may_describe(name):
            continue
        topic = context.broker.image.topics.get(name)
        if topic is None and context.version >= 10:
            # A topic without an id cannot be named in this version.
            continue
        topic_id = ZERO_UUID if topic is None else topic.topic_id
        answers = [
            (index, _NOTHING, ErrorCode.UNSTABLE_OFFSET_COMMIT)
            if (name, index) in unstable
            else (index, committed, ErrorCode.NONE)
            for index, committed in partitions.items()
        ]
        found.append(_Found(name, topic_id, answers))
    return found


def _pick(context: RequestContext, held: TopicOffsets, unstable: Collection[Slot], wanted: _Wanted) -> _Found:
    name, topic_id = wanted.name, wanted.topic_id
    if context.version >= 10:
        topic = context.broker.image.topics_by_id.get(topic_id)
        if topic is None:
            unknown = [(index, _NOTHING, ErrorCode.UNKNOWN_TOPIC_ID) for index in wanted.partitions]
            return _Found(name, topic_id, unknown)
        name = topic.name
    if not context.may(*DESCRIBE_TOPIC, name):
        refused = [(index, _NOTHING, ErrorCode.TOPIC_AUTHORIZATION_FAILED) for index in wanted.partitions]
        return _Found(wanted.name, topic_id, refused)
    partitions = held.get(name, {})
    picked = []
    for index in wanted.partitions:
        if (name, index) in unstable:
            picked.append((index, _NOTHING, ErrorCode.UNSTABLE_OFFSET_COMMIT))
            continue
        committed = partitions.get(index, _NOTHING)
        picked.append((index, committed if committed.belongs_to(topic_id) else _NOTHING, ErrorCode.NONE))
    return _Found(name, topic_id, picked)


@api(ApiKey.OFFSET_DELETE, OffsetDeleteRequest, "0", needs=judged(DELETE_GROUP, READ_TOPIC))
async def offset_delete(context: RequestContext, request: OffsetDeleteRequest) -> OffsetDeleteResponse:
    """Delete committed offsets, durably, of topics that no member of the group subscribes to (KIP-496)."""
    if not context.may(*DELETE_GROUP, request.group_id):
        return OffsetDeleteResponse(error_code=ErrorCode.GROUP_AUTHORIZATION_FAILED)
    may_read = context.rights(*READ_TOPIC)
    response = OffsetDeleteResponse()
    answers: dict[tuple[str, int], OffsetDeleteResponse.OffsetDeleteResponsePartition] = {}
    for topic in request.topics:
        answered = OffsetDeleteResponse.OffsetDeleteResponseTopic(name=topic.name)
        response.topics.append(answered)
        known = context.broker.image.topics.get(topic.name)
        for partition in topic.partitions:
            index = partition.partition_index
            answer = OffsetDeleteResponse.OffsetDeleteResponsePartition(partition_index=index)
            answered.partitions.append(answer)
            if not may_read(topic.name):
                answer.error_code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
            elif known is None or not 0 <= index < len(known.partitions):
                answer.error_code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            else:
                answers[topic.name, index] = answer
    try:
        results = await context.broker.groups.delete_offsets(request.group_id, list(answers))
    except ApiError as error:
        return OffsetDeleteResponse(error_code=error.code)
    for place, code in results.items():
        answers[place].error_code = code
    return response
