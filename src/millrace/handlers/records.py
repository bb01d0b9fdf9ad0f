"""DeleteRecords: move the start of a log forward."""

from __future__ import annotations

from millrace.errors import ApiError, ErrorCode, MillraceError, code_of
from millrace.handlers.context import RequestContext
from millrace.handlers.registry import api
from millrace.model import INTERNAL_TOPICS, TopicPartition
from millrace.wire.keys import ApiKey
from millrace.wire.messages.records import DeleteRecordsRequest, DeleteRecordsResponse

NO_LOW_WATERMARK = -1


@api(ApiKey.DELETE_RECORDS, DeleteRecordsRequest, "0-2")
def delete_records(context: RequestContext, request: DeleteRecordsRequest) -> DeleteRecordsResponse:
    """Forget every record below an offset; -1 means all that is committed.

    The new start is kept in a checkpoint at once. Segments that lie wholly below it are removed by retention.
    Internal topics are refused, and topics that are only compacted, as in Kafka (POLICY_VIOLATION).
    """
    topics = []
    moved: dict[TopicPartition, DeleteRecordsResponse.DeleteRecordsPartitionResult] = {}
    for topic in request.topics:
        answers = []
        for item in topic.partitions:
            answer = DeleteRecordsResponse.DeleteRecordsPartitionResult(
                partition_index=item.partition_index, low_watermark=NO_LOW_WATERMARK
            )
            try:
                partition = context.broker.replicas.find(topic.name, item.partition_index)
                if topic.name in INTERNAL_TOPICS:
                    raise ApiError(ErrorCode.INVALID_TOPIC_EXCEPTION)
                if not partition.log.config.delete:
                    raise ApiError(ErrorCode.POLICY_VIOLATION, "the topic is compacted, not deleted from")
                answer.low_watermark = partition.delete_records_before(item.offset)
                moved[TopicPartition(topic.name, item.partition_index)] = answer
            except MillraceError as error:
                answer.error_code = code_of(error)
            answers.append(answer)
        topics.append(DeleteRecordsResponse.DeleteRecordsTopicResult(name=topic.name, partitions=answers))
    for place, failure in context.broker.log_dirs.checkpoint_start_offsets(moved).items():
        moved[place].low_watermark, moved[place].error_code = NO_LOW_WATERMARK, code_of(failure)
    return DeleteRecordsResponse(topics=topics)
