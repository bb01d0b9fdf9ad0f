"""ListOffsets and OffsetForLeaderEpoch: where things lie in a log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Coroutine
from typing import Any, Final

from millrace.errors import ApiError, ErrorCode, MillraceError, code_of
from millrace.handlers.context import RequestContext, anything
from millrace.handlers.fetch import READ_COMMITTED
from millrace.handlers.flush_waits import Ends, unflushed, wait_for_flush
from millrace.handlers.needs import CLUSTER_ACTION, DESCRIBE_TOPIC, judged
from millrace.handlers.registry import api
from millrace.model import NO_EPOCH, NO_TIMESTAMP
from millrace.replication.partition import Partition
from millrace.wire.keys import ApiKey
from millrace.wire.messages.offsets import (
    ListOffsetsRequest,
    ListOffsetsResponse,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
)

LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3
EARLIEST_LOCAL: Final = -4
LATEST_TIERED: Final = -5
EARLIEST_PENDING_UPLOAD: Final = -6

_FIRST_VERSION: Final = {MAX_TIMESTAMP: 7, EARLIEST_LOCAL: 8, LATEST_TIERED: 9, EARLIEST_PENDING_UPLOAD: 11}

UNKNOWN_OFFSET: Final = -1
OFFSET_NOT_AVAILABLE_FROM: Final = 5

_Found = tuple[int, int, int]
"""Offset, timestamp in milliseconds, leader epoch."""


@api(ApiKey.LIST_OFFSETS, ListOffsetsRequest, "1-11", needs=judged(DESCRIBE_TOPIC))
def list_offsets(
    context: RequestContext, request: ListOffsetsRequest
) -> ListOffsetsResponse | Coroutine[Any, Any, ListOffsetsResponse]:
    """The offset of a timestamp, or of a named place: latest, earliest, the record with the highest timestamp.

    A timestamp finds the first record at or after it; past the last one the answer is offset -1. Latest is the high
    watermark, or for isolation level 1 (read_committed) the last stable offset, and no record at or beyond it is found;
    a new leader that does not know it yet answers OFFSET_NOT_AVAILABLE, which clients ask again for (KIP-207). What
    acks=1 has acknowledged to the only replica is waited for until it is on disk (`flush_waits`).

    Versions: v2 has the isolation level; v4 returns leader epochs; v7 max timestamp (KIP-734); v8 earliest local; v9
    latest tiered; v11 earliest pending upload. Without tiered storage the earliest local offset is the earliest, and
    nothing is tiered.
    """
    may_describe = context.rights(*DESCRIBE_TOPIC)
    ends = unflushed(
        context.broker.replicas.led(topic.name, item.partition_index)
        for topic in request.topics
        if may_describe(topic.name)
        for item in topic.partitions
        if item.timestamp >= 0 or item.timestamp in (LATEST, MAX_TIMESTAMP)
    )
    return _list_flushed(context, request, ends) if ends else _list(context, request, ends)


async def _list_flushed(context: RequestContext, request: ListOffsetsRequest, ends: Ends) -> ListOffsetsResponse:
    await wait_for_flush(ends, context.broker.clock)
    return _list(context, request, ends)


def _list(context: RequestContext, request: ListOffsetsRequest, ends: Ends) -> ListOffsetsResponse:
    may_describe = context.rights(*DESCRIBE_TOPIC)
    times = Counter((topic.name, item.partition_index) for topic in request.topics for item in topic.partitions)
    topics = []
    for topic in request.topics:
        answers = []
        for item in topic.partitions:
            try:
                if not may_describe(topic.name):
                    raise context.refusal(*DESCRIBE_TOPIC, topic.name)
                if times[topic.name, item.partition_index] > 1:
                    raise ApiError(ErrorCode.INVALID_REQUEST, "the partition is named twice")
                partition = context.broker.replicas.find(topic.name, item.partition_index)
                partition.check_leader_epoch(item.current_leader_epoch)
                offset, timestamp_ms, epoch = _locate(
                    partition,
                    item.timestamp,
                    context.version,
                    ends.get(partition, 0),
                    reads_committed=request.isolation_level == READ_COMMITTED,
                )
            except MillraceError as error:
                answers.append(
                    ListOffsetsResponse.ListOffsetsPartitionResponse(
                        partition_index=item.partition_index, error_code=code_of(error)
                    )
                )
                continue
            answers.append(
                ListOffsetsResponse.ListOffsetsPartitionResponse(
                    partition_index=item.partition_index, offset=offset, timestamp=timestamp_ms, leader_epoch=epoch
                )
            )
        topics.append(ListOffsetsResponse.ListOffsetsTopicResponse(name=topic.name, partitions=answers))
    return ListOffsetsResponse(topics=topics)


def _locate(partition: Partition, timestamp_ms: int, version: int, end: int, *, reads_committed: bool) -> _Found:
    """What a timestamp stands for, once everything below `end` is committed."""
    try:
        return _find(partition, timestamp_ms, version, end, reads_committed=reads_committed)
    except ApiError as error:
        if error.code is ErrorCode.OFFSET_NOT_AVAILABLE and version < OFFSET_NOT_AVAILABLE_FROM:
            raise ApiError(ErrorCode.LEADER_NOT_AVAILABLE, error.message) from None
        raise


def _find(partition: Partition, timestamp_ms: int, version: int, end: int, *, reads_committed: bool) -> _Found:
    if version < _FIRST_VERSION.get(timestamp_ms, 0) or timestamp_ms < EARLIEST_PENDING_UPLOAD:
        raise ApiError(ErrorCode.UNSUPPORTED_VERSION, f"timestamp {timestamp_ms} has no meaning in v{version}")
    log = partition.log
    if timestamp_ms in (EARLIEST, EARLIEST_LOCAL):
        return log.start_offset, NO_TIMESTAMP, log.epoch_for(log.start_offset)
    if timestamp_ms in (LATEST_TIERED, EARLIEST_PENDING_UPLOAD):
        return UNKNOWN_OFFSET, NO_TIMESTAMP, NO_EPOCH
    if partition.high_watermark.offset < end:
        raise ApiError(ErrorCode.OFFSET_NOT_AVAILABLE, f"what was written up to offset {end} is not on disk yet")
    if timestamp_ms == LATEST:
        latest = partition.latest_offset()
        if reads_committed:
            latest = partition.last_stable_offset
        return latest, NO_TIMESTAMP, partition.leader_epoch
    limit = partition.stable if reads_committed else partition.committed
    found = log.max_timestamp(limit) if timestamp_ms == MAX_TIMESTAMP else log.offset_for_time(timestamp_ms, limit)
    return found or (UNKNOWN_OFFSET, NO_TIMESTAMP, NO_EPOCH)


@api(
    ApiKey.OFFSET_FOR_LEADER_EPOCH,
    OffsetForLeaderEpochRequest,
    "2-4",
    needs=judged(CLUSTER_ACTION, DESCRIBE_TOPIC),
)
def offset_for_leader_epoch(
    context: RequestContext, request: OffsetForLeaderEpochRequest
) -> OffsetForLeaderEpochResponse:
    """The end offset of a leader epoch: where a consumer that knew that epoch can tell whether its log diverged.

    An epoch that this log never had is answered with the largest one below it.
    """
    results = []
    may_describe = anything if context.may(*CLUSTER_ACTION) else context.rights(*DESCRIBE_TOPIC)
    for topic in request.topics:
        answers = []
        for item in topic.partitions:
            answer = OffsetForLeaderEpochResponse.EpochEndOffset(partition=item.partition)
            try:
                if not may_describe(topic.topic):
                    raise context.refusal(*DESCRIBE_TOPIC, topic.topic)
                partition = context.broker.replicas.find(topic.topic, item.partition)
                partition.check_leader_epoch(item.current_leader_epoch)
                if item.leader_epoch == partition.leader_epoch:
                    answer.leader_epoch, answer.end_offset = item.leader_epoch, partition.log.end_offset
                else:
                    answer.leader_epoch, answer.end_offset = partition.log.end_offset_for_epoch(item.leader_epoch)
            except MillraceError as error:
                answer.error_code = code_of(error)
            answers.append(answer)
        results.append(OffsetForLeaderEpochResponse.OffsetForLeaderTopicResult(topic=topic.topic, partitions=answers))
    return OffsetForLeaderEpochResponse(topics=results)
