"""InitProducerId and DescribeProducers: who writes with sequence numbers."""

from __future__ import annotations

import logging
from typing import Final

from millrace.errors import ApiError, ErrorCode, MillraceError, code_of, text_of
from millrace.handlers.context import RequestContext
from millrace.handlers.needs import IDEMPOTENT_WRITE, READ_TOPIC, WRITE_TOPIC, WRITE_TRANSACTIONAL_ID, judged
from millrace.handlers.registry import api
from millrace.model import NO_PRODUCER_EPOCH, NO_PRODUCER_ID
from millrace.transactions.state import NOBODY, Producer
from millrace.wire.keys import ApiKey
from millrace.wire.messages.producers import (
    DescribeProducersRequest,
    DescribeProducersResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
)

logger = logging.getLogger(__name__)

_FENCED_SINCE: Final = 4
"""From this version on a fenced producer is told PRODUCER_FENCED (KIP-588)."""


@api(
    ApiKey.INIT_PRODUCER_ID,
    InitProducerIdRequest,
    "0-5",
    needs=judged(WRITE_TRANSACTIONAL_ID, IDEMPOTENT_WRITE, WRITE_TOPIC),
    overlaps=True,
)
async def init_producer_id(context: RequestContext, request: InitProducerIdRequest) -> InitProducerIdResponse:
    """Give an idempotent producer a new id with epoch 0, and a transactional one the next epoch of its id.

    Ids come from the controller in blocks. While it cannot be reached and the block is used up, the answer is
    COORDINATOR_LOAD_IN_PROGRESS, which every client retries.

    With a transactional id every earlier producer is fenced. If it has left a transaction open that is aborted first,
    with the answer CONCURRENT_TRANSACTIONS until that is done. When the epochs of an id are used up a new id follows.

    Versions: v3 lets a producer name the id and epoch it had (KIP-360): a transactional one goes on from there after an
    error, and may repeat the request; an idempotent one gets a new id all the same, as in Kafka. Up to v3 a fenced
    producer gets INVALID_PRODUCER_EPOCH, from v4 PRODUCER_FENCED.

    Who may write to any topic at all may ask for an id without a transactional id.

    Not done: v6 with prepared transactions (KIP-939), which is unstable in Kafka, too.
    """
    if request.transactional_id is not None:
        if not context.may(*WRITE_TRANSACTIONAL_ID, request.transactional_id):
            return _no_id(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
        return await _begin(context, request, request.transactional_id)
    if not (context.may(*IDEMPOTENT_WRITE) or context.may_any(*WRITE_TOPIC)):
        return _no_id(ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    try:
        producer_id = await context.broker.producer_ids.next()
    except ApiError as error:
        logger.warning("no producer id for %r: %s", context.header.client_id, error)
        return _no_id(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
    return InitProducerIdResponse(producer_id=producer_id, producer_epoch=0)


async def _begin(
    context: RequestContext, request: InitProducerIdRequest, transactional_id: str
) -> InitProducerIdResponse:
    had = Producer(request.producer_id, request.producer_epoch)
    if (had.producer_id == NO_PRODUCER_ID) is not (had.epoch == NO_PRODUCER_EPOCH):
        return _no_id(ErrorCode.INVALID_REQUEST)  # one without the other says nothing
    try:
        producer = await context.broker.transactions.init_producer_id(
            transactional_id, request.transaction_timeout_ms, None if had == NOBODY else had
        )
    except ApiError as error:
        is_old = context.version < _FENCED_SINCE and error.code is ErrorCode.PRODUCER_FENCED
        return _no_id(ErrorCode.INVALID_PRODUCER_EPOCH if is_old else error.code)
    return InitProducerIdResponse(producer_id=producer.producer_id, producer_epoch=producer.epoch)


def _no_id(code: ErrorCode) -> InitProducerIdResponse:
    return InitProducerIdResponse(error_code=code, producer_id=NO_PRODUCER_ID, producer_epoch=NO_PRODUCER_EPOCH)


@api(ApiKey.DESCRIBE_PRODUCERS, DescribeProducersRequest, "0", needs=judged(READ_TOPIC))
def describe_producers(context: RequestContext, request: DescribeProducersRequest) -> DescribeProducersResponse:
    """The producers that a partition remembers, with their last sequence and when they wrote it."""
    topics = []
    may_read = context.rights(*READ_TOPIC)
    for topic in request.topics:
        answers = []
        for index in dict.fromkeys(topic.partition_indexes):
            answer = DescribeProducersResponse.PartitionResponse(partition_index=index, error_message=None)
            try:
                if not may_read(topic.name):
                    raise context.refusal(*READ_TOPIC, topic.name)
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
