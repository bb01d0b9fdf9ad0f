"""How transactions are asked for (KIP-664): what coordinators know of them, and what partitions of their producers.

The project's own client, because librdkafka does not speak these APIs; any Kafka from 3.0 on does. A transaction is
known twice: its coordinator has its state and partitions by transactional id, and each partition has the producers
that wrote to it and where an open transaction begins. One that only a partition knows hangs: nobody will end it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from millrace.admin.groups import word
from millrace.client.cluster import ClusterClient, CoordinatorKind, raise_for
from millrace.client.requests import Outcome, by_topic
from millrace.client.versions import known_code
from millrace.errors import ApiError, ErrorCode
from millrace.model import TopicPartition
from millrace.wire.messages.producers import (
    DescribeProducersRequest,
    DescribeProducersResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
)
from millrace.wire.messages.transactions import (
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    ListTransactionsRequest,
    ListTransactionsResponse,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)

STATE_NAMES: Final = (
    "Empty",
    "Ongoing",
    "PrepareCommit",
    "PrepareAbort",
    "CompleteCommit",
    "CompleteAbort",
    "Dead",
    "PrepareEpochFence",
)
"""What a transaction can be in, by its number in a record of `__transaction_state`."""
STATES: Final = {word(name): name for name in STATE_NAMES}
"""As it is typed, and as the protocol has it."""

_PARTITIONS_AT_ONCE: Final = 500
_STABLE_INIT_VERSION: Final = 5


@dataclass(frozen=True, slots=True)
class ListedTransaction:
    """A transactional id, as its coordinator lists it."""

    transactional_id: str
    coordinator: int
    producer_id: int
    state: str


@dataclass(frozen=True, slots=True)
class TransactionView:
    """A transactional id, as its coordinator describes it; `start_ms` is None while no transaction runs."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    state: str
    timeout_ms: int
    start_ms: int | None
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class ProducerView:
    """A producer, as a partition has it; None is what it has not, or not yet."""

    partition: TopicPartition
    producer_id: int
    producer_epoch: int
    coordinator_epoch: int | None
    last_sequence: int | None
    last_timestamp_ms: int | None
    start_offset: int | None
    """Where its open transaction begins."""


def list_transactions(
    cluster: ClusterClient,
    *,
    states: Iterable[str] = (),
    producer_ids: Iterable[int] = (),
    running_ms: int | None = None,
) -> list[ListedTransaction]:
    """Those of every coordinator, by name: in one of these states, of one of these producers, running for so long."""
    request = ListTransactionsRequest(
        state_filters=[STATES[state] for state in states],
        producer_id_filters=list(producer_ids),
        duration_filter=-1 if running_ms is None else running_ms,
    )

    def read(response: ListTransactionsResponse) -> list[ListTransactionsResponse.TransactionState]:
        raise_for(response.error_code)
        return response.transaction_states

    found = [
        ListedTransaction(each.transactional_id, node, each.producer_id, word(each.transaction_state))
        for node in cluster.broker_ids()
        for each in cluster.ask_broker(node, f"transactions of broker {node}", request, read)
    ]
    return sorted(found, key=lambda each: each.transactional_id)


def describe_transaction(cluster: ClusterClient, transactional_id: str) -> TransactionView | None:
    """What its coordinator knows, or None where it knows no such id."""

    def read(response: DescribeTransactionsResponse) -> TransactionView:
        (each,) = response.transaction_states
        raise_for(each.error_code)
        return TransactionView(
            transactional_id=each.transactional_id,
            producer_id=each.producer_id,
            producer_epoch=each.producer_epoch,
            state=word(each.transaction_state),
            timeout_ms=each.transaction_timeout_ms,
            start_ms=each.transaction_start_time_ms if each.transaction_start_time_ms >= 0 else None,
            partitions=tuple(
                sorted(TopicPartition(topic.topic, index) for topic in each.topics for index in topic.partitions)
            ),
        )

    request = DescribeTransactionsRequest(transactional_ids=[transactional_id])
    try:
        return cluster.ask_coordinator(
            transactional_id,
            f"transactional id '{transactional_id}'",
            request,
            read,
            kind=CoordinatorKind.TRANSACTION,
        )
    except ApiError as error:
        if error.code is ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
            return None
        raise


def describe_producers(
    cluster: ClusterClient, partitions: Collection[TopicPartition], *, broker_id: int | None = None
) -> list[ProducerView]:
    """The producers that partitions have: their leaders, or this broker's replicas of them."""
    found: list[ProducerView] = []
    ordered = sorted(partitions)
    for first in range(0, len(ordered), _PARTITIONS_AT_ONCE):
        wanted = dict.fromkeys(ordered[first : first + _PARTITIONS_AT_ONCE])
        if broker_id is None:
            answers = cluster.ask_leaders("producers of", wanted, _producers_request, _read_producers)
        else:
            answers = cluster.ask_broker(
                broker_id, f"producers on broker {broker_id}", _producers_request(wanted), _all_producers
            )
        for producers in answers.values():
            found += producers
    return found


def _producers_request(partitions: Iterable[TopicPartition]) -> DescribeProducersRequest:
    return DescribeProducersRequest(
        topics=[
            DescribeProducersRequest.TopicRequest(name=name, partition_indexes=indexes)
            for name, indexes in by_topic(partitions).items()
        ]
    )


def _read_producers(response: DescribeProducersResponse) -> Iterator[Outcome[list[ProducerView]]]:
    for topic in response.topics:
        for each in topic.partitions:
            partition = TopicPartition(topic.name, each.partition_index)
            error = ApiError(known_code(each.error_code), each.error_message or "") if each.error_code else None
            yield Outcome(partition, [_producer(partition, one) for one in each.active_producers], error)


def _all_producers(response: DescribeProducersResponse) -> dict[TopicPartition, list[ProducerView]]:
    found = {}
    for partition, producers, error in _read_producers(response):
        if error is not None:
            raise ApiError(error.code, f"{partition}: {error.message}" if error.message else str(partition))
        found[partition] = producers
    return found


def _producer(partition: TopicPartition, state: DescribeProducersResponse.ProducerState) -> ProducerView:
    return ProducerView(
        partition=partition,
        producer_id=state.producer_id,
        producer_epoch=state.producer_epoch,
        coordinator_epoch=_known(state.coordinator_epoch),
        last_sequence=_known(state.last_sequence),
        last_timestamp_ms=_known(state.last_timestamp),
        start_offset=_known(state.current_txn_start_offset),
    )


def _known(number: int) -> int | None:
    return None if number < 0 else number


def find_owners(cluster: ClusterClient, producers: Collection[ProducerView]) -> dict[int, TransactionView]:
    """The transactions of these producers that a coordinator knows, by producer id."""
    if not producers:
        return {}
    wanted = {each.producer_id for each in producers}
    owners = {}
    for listed in list_transactions(cluster, producer_ids=sorted(wanted)):
        described = describe_transaction(cluster, listed.transactional_id)
        if described is not None and listed.producer_id in wanted:
            owners[listed.producer_id] = described
    return owners


def hanging(
    producers: Iterable[ProducerView], owners: Mapping[int, TransactionView], *, now_ms: int, older_than_ms: int
) -> list[ProducerView]:
    """Of the producers those whose open transaction nobody will end: no coordinator counts the partition to it.

    A young one is none of them: the partition may be written to before its coordinator is asked about it.
    """
    found = []
    for each in producers:
        if each.start_offset is None or now_ms - (each.last_timestamp_ms or 0) <= older_than_ms:
            continue
        owner = owners.get(each.producer_id)
        if owner is None or each.partition not in owner.partitions:
            found.append(each)
    return found


def write_abort_marker(
    cluster: ClusterClient,
    partition: TopicPartition,
    *,
    producer_id: int,
    producer_epoch: int,
    coordinator_epoch: int | None,
) -> None:
    """Have the leader end a producer's open transaction in one partition, past its coordinator.

    A producer that never ended a transaction has no coordinator epoch there; 0 is not above any.
    """

    def build(_: Mapping[TopicPartition, None]) -> WriteTxnMarkersRequest:
        cls = WriteTxnMarkersRequest
        marker = cls.WritableTxnMarker(
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            transaction_result=False,
            topics=[cls.WritableTxnMarkerTopic(name=partition.topic, partition_indexes=[partition.partition])],
            coordinator_epoch=coordinator_epoch or 0,
        )
        return cls(markers=[marker])

    cluster.ask_leaders("abort of a transaction in", {partition: None}, build, _read_markers)


def _read_markers(response: WriteTxnMarkersResponse) -> Iterator[Outcome[None]]:
    for marker in response.markers:
        for topic in marker.topics:
            for each in topic.partitions:
                error = ApiError(known_code(each.error_code)) if each.error_code else None
                yield Outcome(TopicPartition(topic.name, each.partition_index), None, error)


def fence(cluster: ClusterClient, transaction: TransactionView) -> tuple[int, int]:
    """End a transaction through its coordinator, as a new producer of its id would; its producer id and epoch then."""

    def read(response: InitProducerIdResponse) -> tuple[int, int]:
        raise_for(response.error_code)
        return response.producer_id, response.producer_epoch

    request = InitProducerIdRequest(
        transactional_id=transaction.transactional_id, transaction_timeout_ms=transaction.timeout_ms
    )
    return cluster.ask_coordinator(
        transaction.transactional_id,
        f"termination of '{transaction.transactional_id}'",
        request,
        read,
        kind=CoordinatorKind.TRANSACTION,
        at_most=_STABLE_INIT_VERSION,
    )
