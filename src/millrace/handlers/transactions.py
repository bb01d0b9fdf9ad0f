"""Transactions as producers, brokers and administrators ask for them (KIP-98, 360, 664, 890).

Requests become calls of the coordinator and its results responses; what they mean is decided in `transactions.state`.
InitProducerId is in `handlers.producers`, markers are in `handlers.markers`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from millrace.errors import ApiError, ErrorCode
from millrace.groups.patterns import check, matching
from millrace.handlers.context import RequestContext, Services
from millrace.handlers.needs import (
    CLUSTER_ACTION,
    DESCRIBE_TOPIC,
    DESCRIBE_TRANSACTIONAL_ID,
    READ_GROUP,
    WRITE_TOPIC,
    WRITE_TRANSACTIONAL_ID,
    judged,
)
from millrace.handlers.registry import api
from millrace.model import CONSUMER_OFFSETS_TOPIC, INTERNAL_TOPICS, TopicPartition
from millrace.transactions.coordinator import ListedTransaction
from millrace.transactions.state import CLASSIC_VERSION, EPOCH_VERSION, Producer, TransactionState
from millrace.wire.keys import ApiKey
from millrace.wire.messages.transactions import (
    AddOffsetsToTxnRequest,
    AddOffsetsToTxnResponse,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    EndTxnRequest,
    EndTxnResponse,
    ListTransactionsRequest,
    ListTransactionsResponse,
)

_UNKNOWN: Final = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
_BATCHED_SINCE: Final = 4
_FENCED_SINCE: Final = 2
"""From this version on of the requests here a fenced producer is told PRODUCER_FENCED (KIP-588)."""

Topics = Sequence[AddPartitionsToTxnRequest.AddPartitionsToTxnTopic]
TopicResult = AddPartitionsToTxnResponse.AddPartitionsToTxnTopicResult


@api(
    ApiKey.ADD_PARTITIONS_TO_TXN,
    AddPartitionsToTxnRequest,
    "0-5",
    needs=judged(WRITE_TRANSACTIONAL_ID, WRITE_TOPIC, CLUSTER_ACTION),
    overlaps=True,
)
async def add_partitions_to_txn(
    context: RequestContext, request: AddPartitionsToTxnRequest
) -> AddPartitionsToTxnResponse:
    """Make partitions part of a transaction, durably; it begins with the first.

    If one of them does not exist, or may not be written, nothing is added, and the others get OPERATION_NOT_ATTEMPTED.
    While the transaction
    before is being completed the answer is CONCURRENT_TRANSACTIONS.

    Versions: up to v1 a fenced producer gets INVALID_PRODUCER_EPOCH, from v2 PRODUCER_FENCED. v4 is for brokers, which
    add partitions for producers of transaction version 2, or only ask whether they are part of it (`verify_only`;
    TRANSACTION_ABORTABLE from v5 if they are not), for several transactions at once.
    """
    if context.version < _BATCHED_SINCE:
        producer = Producer(request.v3_and_below_producer_id, request.v3_and_below_producer_epoch)
        results = await _add(
            context, request.v3_and_below_transactional_id, producer, request.v3_and_below_topics, verify_only=False
        )
        return AddPartitionsToTxnResponse(results_by_topic_v3_and_below=results)
    if not context.may(*CLUSTER_ACTION):
        return AddPartitionsToTxnResponse(error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    answers = await asyncio.gather(
        *(
            _add(
                context,
                each.transactional_id,
                Producer(each.producer_id, each.producer_epoch),
                each.topics,
                verify_only=each.verify_only,
            )
            for each in request.transactions
        )
    )
    return AddPartitionsToTxnResponse(
        results_by_transaction=[
            AddPartitionsToTxnResponse.AddPartitionsToTxnResult(
                transactional_id=each.transactional_id, topic_results=results
            )
            for each, results in zip(request.transactions, answers, strict=True)
        ]
    )


async def _add(
    context: RequestContext, transactional_id: str, producer: Producer, topics: Topics, *, verify_only: bool
) -> list[TopicResult]:
    asked = dict.fromkeys(TopicPartition(topic.name, index) for topic in topics for index in topic.partitions)
    refused: set[str] = set()
    codes: Mapping[TopicPartition, ErrorCode]
    if context.version < _BATCHED_SINCE:
        if not context.may(*WRITE_TRANSACTIONAL_ID, transactional_id):
            return _by_topic(dict.fromkeys(asked, ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED))
        may_write = context.rights(*WRITE_TOPIC)
        refused = {topic.name for topic in topics if topic.name in INTERNAL_TOPICS or not may_write(topic.name)}
    wrong = dict.fromkeys((each for each in asked if not _exists(context.broker, each)), _UNKNOWN)
    wrong |= dict.fromkeys((each for each in asked if each.topic in refused), ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    if wrong:
        return _by_topic({each: wrong.get(each, ErrorCode.OPERATION_NOT_ATTEMPTED) for each in asked})
    transactions = context.broker.transactions
    try:
        if verify_only:
            codes = transactions.verify(transactional_id, producer, list(asked))
        else:
            version = EPOCH_VERSION if context.version >= _BATCHED_SINCE else CLASSIC_VERSION
            await transactions.add_partitions(transactional_id, producer, list(asked), version=version)
            codes = dict.fromkeys(asked, ErrorCode.NONE)
    except ApiError as error:
        codes = dict.fromkeys(asked, _known_to(context, error.code))
    return _by_topic(codes)


def _exists(broker: Services, partition: TopicPartition) -> bool:
    topic = broker.image.topic(partition.topic)
    return topic is not None and 0 <= partition.partition < len(topic.partitions)


def _by_topic(codes: Mapping[TopicPartition, ErrorCode]) -> list[TopicResult]:
    found: dict[str, TopicResult] = {}
    for (name, index), code in codes.items():
        result = found.setdefault(name, TopicResult(name=name))
        result.results_by_partition.append(
            AddPartitionsToTxnResponse.AddPartitionsToTxnPartitionResult(
                partition_index=index, partition_error_code=code
            )
        )
    return list(found.values())


@api(
    ApiKey.ADD_OFFSETS_TO_TXN,
    AddOffsetsToTxnRequest,
    "0-4",
    needs=judged(WRITE_TRANSACTIONAL_ID, READ_GROUP),
    overlaps=True,
)
async def add_offsets_to_txn(context: RequestContext, request: AddOffsetsToTxnRequest) -> AddOffsetsToTxnResponse:
    """Make the offsets of a group part of a transaction: the partition of `__consumer_offsets` that keeps them.

    Versions: up to v1 a fenced producer gets INVALID_PRODUCER_EPOCH, from v2 PRODUCER_FENCED; v4 is of clients that
    know TRANSACTION_ABORTABLE.
    """
    broker = context.broker
    version = EPOCH_VERSION if context.version >= 4 else CLASSIC_VERSION
    try:
        context.demand(*WRITE_TRANSACTIONAL_ID, request.transactional_id)
        context.demand(*READ_GROUP, request.group_id)
        if not request.group_id:
            raise ApiError(ErrorCode.INVALID_GROUP_ID)
        if broker.image.topic(CONSUMER_OFFSETS_TOPIC) is None:
            await _made(broker, CONSUMER_OFFSETS_TOPIC)
        offsets = TopicPartition(CONSUMER_OFFSETS_TOPIC, broker.groups.partition_for(request.group_id))
        producer = Producer(request.producer_id, request.producer_epoch)
        await broker.transactions.add_partitions(request.transactional_id, producer, [offsets], version=version)
    except ApiError as error:
        return AddOffsetsToTxnResponse(error_code=_known_to(context, error.code))
    return AddOffsetsToTxnResponse()


async def _made(broker: Services, topic: str) -> None:
    """A group that has never committed anything has no partition yet, and a marker would find none."""
    try:
        await broker.controller.ensure_internal_topic(topic)
    except ApiError as error:
        raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE, f"{topic}: {error.message}") from error


@api(ApiKey.END_TXN, EndTxnRequest, "0-5", needs=judged(WRITE_TRANSACTIONAL_ID), overlaps=True)
async def end_txn(context: RequestContext, request: EndTxnRequest) -> EndTxnResponse:
    """Commit or abort a transaction; answered when the outcome is durable, before the partitions have their markers.

    Until they have, the next transaction of the same producer gets CONCURRENT_TRANSACTIONS.

    Versions: up to v1 a fenced producer gets INVALID_PRODUCER_EPOCH, from v2 PRODUCER_FENCED; v4 is of clients that
    know TRANSACTION_ABORTABLE. v5 is transaction version 2 (KIP-890): the answer has the producer's next epoch, and
    its next id if the epochs of the old one are used up; a producer that did not hear it may repeat the request;
    and an abort without a transaction succeeds.
    """
    version = EPOCH_VERSION if context.version >= 5 else CLASSIC_VERSION
    producer = Producer(request.producer_id, request.producer_epoch)
    try:
        context.demand(*WRITE_TRANSACTIONAL_ID, request.transactional_id)
        after = await context.broker.transactions.end(
            request.transactional_id, producer, commits=request.committed, version=version
        )
    except ApiError as error:
        return EndTxnResponse(error_code=_known_to(context, error.code))
    return EndTxnResponse(producer_id=after.producer_id, producer_epoch=after.epoch)


def _known_to(context: RequestContext, code: ErrorCode) -> ErrorCode:
    """The error in a code that clients of this version know."""
    if code is ErrorCode.PRODUCER_FENCED and context.version < _FENCED_SINCE:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    return code


@api(
    ApiKey.DESCRIBE_TRANSACTIONS,
    DescribeTransactionsRequest,
    "0",
    needs=judged(DESCRIBE_TRANSACTIONAL_ID, DESCRIBE_TOPIC),
)
def describe_transactions(
    context: RequestContext, request: DescribeTransactionsRequest
) -> DescribeTransactionsResponse:
    """State, producer, partitions and age of transactional ids that are coordinated here (KIP-664).

    TRANSACTIONAL_ID_NOT_FOUND if nobody has used an id, or not for `transactional.id.expiration.ms`. Topics that may
    not be described are left out.
    """
    described = []
    may_describe = context.rights(*DESCRIBE_TOPIC)
    for transactional_id in dict.fromkeys(request.transactional_ids):
        answer = DescribeTransactionsResponse.TransactionState(
            transactional_id=transactional_id, transaction_start_time_ms=-1
        )
        try:
            context.demand(*DESCRIBE_TRANSACTIONAL_ID, transactional_id)
            found = context.broker.transactions.describe(transactional_id)
        except ApiError as error:
            answer.error_code = error.code
        else:
            answer.transaction_state = found.state.title
            answer.transaction_timeout_ms = found.timeout_ms
            answer.transaction_start_time_ms = found.start_ms
            answer.producer_id, answer.producer_epoch = found.producer
            by_topic: dict[str, list[int]] = {}
            for topic, index in sorted(found.partitions):
                by_topic.setdefault(topic, []).append(index)
            answer.topics = [
                DescribeTransactionsResponse.TopicData(topic=topic, partitions=indexes)
                for topic, indexes in by_topic.items()
                if may_describe(topic)
            ]
        described.append(answer)
    return DescribeTransactionsResponse(transaction_states=described)


@api(ApiKey.LIST_TRANSACTIONS, ListTransactionsRequest, "0-2", needs=judged(DESCRIBE_TRANSACTIONAL_ID))
def list_transactions(context: RequestContext, request: ListTransactionsRequest) -> ListTransactionsResponse:
    """The transactional ids that this broker coordinates and that may be described, by state and producer id (KIP-664).

    A state that does not exist matches nothing, and is named in the answer.

    Versions: v1 filters by how long a transaction has been open (KIP-994), v2 by a pattern that the whole id must
    match (KIP-1152): RE2, so that no pattern takes long; INVALID_REGULAR_EXPRESSION if it is none.
    """
    may_describe = context.rights(*DESCRIBE_TRANSACTIONAL_ID)
    states = {state.title: state for state in TransactionState}
    unknown = [name for name in dict.fromkeys(request.state_filters) if name not in states]
    pattern = request.transactional_id_pattern
    try:
        if pattern:
            check(pattern)
        listed = context.broker.transactions.list()
    except ApiError as error:
        return ListTransactionsResponse(error_code=error.code)
    wanted = {states[name] for name in request.state_filters if name in states}
    producers = set(request.producer_id_filters)
    now_ms = context.broker.clock.wall_ms()
    oldest_first_ms = now_ms - request.duration_filter

    def is_wanted(each: ListedTransaction) -> bool:
        found = each.transaction
        return (
            (not request.state_filters or found.state in wanted)
            and (not producers or found.producer_id in producers)
            and (request.duration_filter < 0 or found.start_ms < oldest_first_ms)
            and may_describe(each.transactional_id)
        )

    chosen = [each for each in listed if is_wanted(each)]
    if pattern:
        matched = matching(pattern, (each.transactional_id for each in chosen))
        chosen = [each for each in chosen if each.transactional_id in matched]
    return ListTransactionsResponse(
        unknown_state_filters=unknown,
        transaction_states=[
            ListTransactionsResponse.TransactionState(
                transactional_id=each.transactional_id,
                producer_id=each.transaction.producer_id,
                transaction_state=each.transaction.state.title,
            )
            for each in chosen
        ],
    )
