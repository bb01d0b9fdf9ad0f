"""InitProducerId and DescribeProducers: who writes with sequence numbers."""

from __future__ import annotations

import logging

from millrace.errors import ApiError, ErrorCode, MillraceError, code_of, text_of
from millrace.handlers.context import RequestContext
from millrace.handlers.registry import api
from millrace.model import NO_PRODUCER_EPOCH, NO_PRODUCER_ID
from millrace.wire.keys import ApiKey
from millrace.wire.messages.producers import (
    DescribeProducersRequest,
    DescribeProducersResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
)

logger = logging.getLogger(__name__)


@api(ApiKey.INIT_PRODUCER_ID, InitProducerIdRequest, "0-5")
async def init_producer_id(context: RequestContext, request: InitProducerIdRequest) -> InitProducerIdResponse:
    """Give an idempotent producer a new id with epoch 0.

    Ids come from the controller in blocks. While it cannot be reached and the block is used up, the answer is
    COORDINATOR_LOAD_IN_PROGRESS, which every client retries.

    Versions: v3 lets a producer name the id it had (KIP-360); an idempotent one gets a new id all the
    same, as in Kafka.

    Not done: transactional ids, refused with INVALID_REQUEST, an error that no client retries.
    """
    if request.transactional_id is not None:
        return _no_id(ErrorCode.INVALID_REQUEST)
    try:
        producer_id = await context.broker.producer_ids.next()
    except ApiError as error:
        logger.warning("no producer id for %r: %s", context.header.client_id, error)
        return _no_id(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
    return InitProducerIdResponse(producer_id=producer_id, producer_epoch=0)


def _no_id(code: ErrorCode) -> InitProducerIdResponse:
    return InitProducerIdResponse(error_code=code, producer_id=NO_PRODUCER_ID, producer_epoch=NO_PRODUCER_EPOCH)


@api(ApiKey.DESCRIBE_PRODUCERS, DescribeProducersRequest, "0")
def describe_producers(context: RequestContext, request: DescribeProducersRequest) -> DescribeProducersResponse:
    """The producers that a partition remembers, with their last sequence and when they wrote it."""
    topics = []
    for topic in request.topics:
        answers = []
        for index in dict.fromkeys(topic.partition_indexes):
            answer = DescribeProducersResponse.PartitionResponse(partition_index=index, error_message=None)
            try:
                partition = context.broker.replicas.find(topic.name, index)
                answer.active_producers = [
                    DescribeProducersResponse.ProducerState(
                        producer_id=producer.producer_id,
                        producer_epoch=producer.epoch,
                        last_sequence=producer.last_sequence,
                        last_timestamp=producer.heard_ms,
                        coordinator_epoch=producer.coordinator_epoch,
                        current_txn_start_offset=producer.transaction_first_offset,
                    )
                    for producer in partition.log.producers
                ]
            except MillraceError as error:
                answer.error_code, answer.error_message = code_of(error), text_of(error)
            answers.append(answer)
        topics.append(DescribeProducersResponse.TopicResponse(name=topic.name, partitions=answers))
    return DescribeProducersResponse(topics=topics)
