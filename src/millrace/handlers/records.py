"""DeleteRecords: move the start of a log forward, on every replica."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from millrace.cluster.channel import within
from millrace.errors import ApiError, ErrorCode, MillraceError, code_of
from millrace.handlers.context import RequestContext
from millrace.handlers.flush_waits import unflushed, wait_for_flush
from millrace.handlers.needs import DELETE_TOPIC, judged
from millrace.handlers.registry import api
from millrace.model import INTERNAL_TOPICS, TopicPartition
from millrace.wire.keys import ApiKey
from millrace.wire.messages.records import DeleteRecordsRequest, DeleteRecordsResponse

if TYPE_CHECKING:
    from millrace.replication.partition import Partition

NO_LOW_WATERMARK: Final = -1
HIGH_WATERMARK: Final = -1
"""Asked for as an offset: everything that is committed."""

_Result = DeleteRecordsResponse.DeleteRecordsPartitionResult


@dataclass(slots=True)
class _Deletion:
    """A partition whose log begins later now, on this broker; the others follow."""

    place: TopicPartition
    partition: Partition
    offset: int
    answer: _Result

    def fail(self, error: MillraceError) -> None:
        self.answer.low_watermark, self.answer.error_code = NO_LOW_WATERMARK, code_of(error)


@api(ApiKey.DELETE_RECORDS, DeleteRecordsRequest, "0-2", needs=judged(DELETE_TOPIC))
async def delete_records(context: RequestContext, request: DeleteRecordsRequest) -> DeleteRecordsResponse:
    """Forget every record below an offset; -1 means all that is committed.

    The answer comes when every live replica has done so, else, after `timeout_ms`, REQUEST_TIMED_OUT. The leader keeps
    its new start in a checkpoint at once; segments that lie wholly below it are removed by retention. Internal topics
    are refused, and topics that are only compacted, as in Kafka (POLICY_VIOLATION). What acks=1 has acknowledged to the
    only replica may be deleted once it is on disk (`flush_waits`).
    """
    broker = context.broker
    may_delete = context.rights(*DELETE_TOPIC)
    deadline = broker.clock.monotonic() + max(request.timeout_ms, 0) / 1000
    ends = unflushed(
        broker.replicas.led(topic.name, item.partition_index)
        for topic in request.topics
        if may_delete(topic.name)
        for item in topic.partitions
    )
    if ends:
        await wait_for_flush(ends, broker.clock, deadline - broker.clock.monotonic())
    topics = []
    deletions: list[_Deletion] = []
    for topic in request.topics:
        answers = []
        for item in topic.partitions:
            answer = _Result(partition_index=item.partition_index, low_watermark=NO_LOW_WATERMARK)
            answers.append(answer)
            try:
                if not may_delete(topic.name):
                    raise context.refusal(*DELETE_TOPIC, topic.name)
                deletions.append(
                    _delete(context, TopicPartition(topic.name, item.partition_index), item.offset, answer)
                )
            except MillraceError as error:
                answer.error_code = code_of(error)
        topics.append(DeleteRecordsResponse.DeleteRecordsTopicResult(name=topic.name, partitions=answers))
    failures = broker.log_dirs.checkpoint_start_offsets([each.place for each in deletions])
    waits = []
    for deletion in deletions:
        if deletion.place in failures:
            deletion.fail(failures[deletion.place])
        else:
            waits.append(_await_followers(context, deletion, deadline))
    await asyncio.gather(*waits)
    return DeleteRecordsResponse(topics=topics)


def _delete(context: RequestContext, place: TopicPartition, offset: int, answer: _Result) -> _Deletion:
    partition = context.broker.replicas.find(place.topic, place.partition)
    if place.topic in INTERNAL_TOPICS:
        raise ApiError(ErrorCode.INVALID_TOPIC_EXCEPTION)
    if not partition.log.config.delete:
        raise ApiError(ErrorCode.POLICY_VIOLATION, "the topic is compacted, not deleted from")
    start = partition.delete_records_before(offset)
    return _Deletion(place, partition, start if offset == HIGH_WATERMARK else offset, answer)


async def _await_followers(context: RequestContext, deletion: _Deletion, deadline: float) -> None:
    clock = context.broker.clock
    try:
        deletion.answer.low_watermark = await within(
            clock, deletion.partition.wait_deleted(deletion.offset), deadline - clock.monotonic()
        )
    except MillraceError as error:
        deletion.fail(error)
