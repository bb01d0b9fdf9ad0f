"""What a cluster client asks, and what the answers mean: pure functions between domain values and messages.

Sockets, retries and leaders are not here. Topics go by name, so each request is capped at its last version that
names them (Kafka 4 still serves those); a missing answer for something that was asked is an error, never a success.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from millrace.client.versions import known_code
from millrace.errors import ApiError, ErrorCode
from millrace.model import NO_BROKER, NO_EPOCH, TopicPartition
from millrace.wire.messages.cluster import MetadataRequest, MetadataResponse
from millrace.wire.messages.fetch import FetchRequest, FetchResponse
from millrace.wire.messages.group_offsets import (
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
)
from millrace.wire.messages.offsets import ListOffsetsRequest, ListOffsetsResponse
from millrace.wire.messages.produce import ProduceRequest, ProduceResponse
from millrace.wire.messages.topics import CreateTopicsRequest, CreateTopicsResponse
from millrace.wire.messages.transactions import AddPartitionsToTxnRequest, AddPartitionsToTxnResponse
from millrace.wire.schema import Request

T = TypeVar("T")

EARLIEST: Final = -2
LATEST: Final = -1
READ_UNCOMMITTED: Final = 0
READ_COMMITTED: Final = 1

LAST_VERSION_BY_NAME: Final[Mapping[type[Request], int]] = {
    FetchRequest: 12,
    OffsetCommitRequest: 9,
    OffsetFetchRequest: 7,
    ProduceRequest: 12,
}

_EMPTY: Final = memoryview(b"")


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """Where a partition lies; `leader` is -1 while there is none."""

    leader: int
    leader_epoch: int = NO_EPOCH
    replicas: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic as the cluster describes it."""

    name: str
    topic_id: uuid.UUID
    internal: bool
    partitions: Mapping[int, PartitionInfo]


@dataclass(frozen=True, slots=True)
class Fetched:
    """What one fetch of one partition brought; `records` is a view of the response, and may end in a torn batch."""

    records: memoryview
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    aborted: tuple[tuple[int, int], ...] = ()
    """(producer id, first offset) of the aborted transactions in `records`."""
    preferred_read_replica: int = NO_BROKER


class Outcome(NamedTuple, Generic[T]):
    """What became of one partition of a request."""

    partition: TopicPartition
    value: T
    error: ApiError | None


def by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    topics: dict[str, list[int]] = {}
    for partition in partitions:
        topics.setdefault(partition.topic, []).append(partition.partition)
    return topics


def metadata(names: Collection[str] | None, *, create: bool = False) -> MetadataRequest:
    topics = None if names is None else [MetadataRequest.MetadataRequestTopic(name=name) for name in names]
    return MetadataRequest(topics=topics, allow_auto_topic_creation=create)


def read_topics(response: MetadataResponse, *, all_topics: bool) -> dict[str, TopicInfo]:
    """The topics that exist. Whatever else is wrong with one that was named raises ApiError."""
    topics = {}
    for topic in response.topics:
        code = known_code(topic.error_code)
        if code is ErrorCode.NONE and topic.name is not None:
            topics[topic.name] = TopicInfo(topic.name, topic.topic_id, topic.is_internal, _read_partitions(topic))
        elif code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and not all_topics:
            raise ApiError(code, f"topic '{topic.name}'")
    return topics


def _read_partitions(topic: MetadataResponse.MetadataResponseTopic) -> dict[int, PartitionInfo]:
    # An error of a partition (no leader, a replica that is down) shows in its leader; the rest of it is good.
    return {
        each.partition_index: PartitionInfo(each.leader_id, each.leader_epoch, tuple(each.replica_nodes))
        for each in sorted(topic.partitions, key=lambda each: each.partition_index)
    }


def list_offsets(
    wanted: Mapping[TopicPartition, int], epochs: Mapping[TopicPartition, int], *, read_committed: bool, timeout_ms: int
) -> ListOffsetsRequest:
    return ListOffsetsRequest(
        replica_id=-1,
        isolation_level=READ_COMMITTED if read_committed else READ_UNCOMMITTED,
        timeout_ms=timeout_ms,
        topics=[
            ListOffsetsRequest.ListOffsetsTopic(
                name=name,
                partitions=[
                    ListOffsetsRequest.ListOffsetsPartition(
                        partition_index=index,
                        current_leader_epoch=epochs.get(TopicPartition(name, index), NO_EPOCH),
                        timestamp=wanted[TopicPartition(name, index)],
                    )
                    for index in indexes
                ],
            )
            for name, indexes in by_topic(wanted).items()
        ],
    )


def read_list_offsets(response: ListOffsetsResponse) -> Iterator[Outcome[int | None]]:
    """The offset per partition; None where no record is at or after the time that was asked for."""
    for topic in response.topics:
        for each in topic.partitions:
            offset = None if each.offset < 0 else each.offset
            yield Outcome(TopicPartition(topic.name, each.partition_index), offset, _error(each.error_code))


def fetch(
    partition: TopicPartition,
    offset: int,
    *,
    leader_epoch: int,
    max_bytes: int,
    max_wait_ms: int,
    read_committed: bool,
    rack: str,
) -> FetchRequest:
    """One partition, outside of a fetch session: the answer depends on nothing that was asked before."""
    return FetchRequest(
        max_wait_ms=max_wait_ms,
        min_bytes=1,
        max_bytes=max_bytes,
        isolation_level=READ_COMMITTED if read_committed else READ_UNCOMMITTED,
        topics=[
            FetchRequest.FetchTopic(
                topic=partition.topic,
                partitions=[
                    FetchRequest.FetchPartition(
                        partition=partition.partition,
                        current_leader_epoch=leader_epoch,
                        fetch_offset=offset,
                        partition_max_bytes=max_bytes,
                    )
                ],
            )
        ],
        rack_id=rack,
    )


def read_fetch(response: FetchResponse, partition: TopicPartition) -> Fetched:
    if response.error_code:
        raise ApiError(known_code(response.error_code))
    for topic in response.responses:
        for each in topic.partitions:
            if (topic.topic, each.partition_index) == partition:
                if each.error_code:
                    raise ApiError(known_code(each.error_code))
                return _read_fetched(each)
    raise _no_answer(partition)


def _read_fetched(data: FetchResponse.PartitionData) -> Fetched:
    return Fetched(
        records=_EMPTY if data.records is None else memoryview(data.records),
        high_watermark=data.high_watermark,
        last_stable_offset=data.last_stable_offset,
        log_start_offset=data.log_start_offset,
        aborted=tuple((each.producer_id, each.first_offset) for each in data.aborted_transactions or ()),
        preferred_read_replica=data.preferred_read_replica,
    )


def produce(
    batches: Mapping[TopicPartition, bytes], *, acks: int, timeout_ms: int, transactional_id: str | None = None
) -> ProduceRequest:
    """One batch per partition, which is all that the protocol allows."""
    return ProduceRequest(
        transactional_id=transactional_id,
        acks=acks,
        timeout_ms=timeout_ms,
        topic_data=[
            ProduceRequest.TopicProduceData(
                name=name,
                partition_data=[
                    ProduceRequest.PartitionProduceData(index=index, records=batches[TopicPartition(name, index)])
                    for index in indexes
                ],
            )
            for name, indexes in by_topic(batches).items()
        ],
    )


def read_produce(response: ProduceResponse) -> Iterator[Outcome[int]]:
    """The offset of each batch; a batch that was already there from an earlier attempt is a success."""
    for topic in response.responses:
        for each in topic.partition_responses:
            code = known_code(each.error_code)
            error = None
            if code not in (ErrorCode.NONE, ErrorCode.DUPLICATE_SEQUENCE_NUMBER):
                reasons = [item.batch_index_error_message for item in each.record_errors]
                error = ApiError(code, each.error_message or "; ".join(filter(None, reasons)))
            yield Outcome(TopicPartition(topic.name, each.index), each.base_offset, error)


def create_topic(name: str, config: Mapping[str, str], *, timeout_ms: int) -> CreateTopicsRequest:
    """One topic of one partition, with as many replicas as the brokers give by default."""
    return CreateTopicsRequest(
        topics=[
            CreateTopicsRequest.CreatableTopic(
                name=name,
                num_partitions=1,
                replication_factor=-1,
                configs=[
                    CreateTopicsRequest.CreatableTopicConfig(name=setting, value=value)
                    for setting, value in config.items()
                ],
            )
        ],
        timeout_ms=timeout_ms,
    )


def read_create_topic(response: CreateTopicsResponse) -> None:
    """ApiError where it was not created; one that somebody else created meanwhile is as good."""
    for topic in response.topics:
        code = known_code(topic.error_code)
        if code not in (ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS):
            raise ApiError(code, topic.error_message or "")


def add_partitions_to_txn(
    transactional_id: str, producer_id: int, producer_epoch: int, partitions: Iterable[TopicPartition]
) -> AddPartitionsToTxnRequest:
    """As clients ask it, which is up to version 3; the later ones are for brokers."""
    return AddPartitionsToTxnRequest(
        v3_and_below_transactional_id=transactional_id,
        v3_and_below_producer_id=producer_id,
        v3_and_below_producer_epoch=producer_epoch,
        v3_and_below_topics=[
            AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=name, partitions=indexes)
            for name, indexes in by_topic(partitions).items()
        ],
    )


def read_add_partitions_to_txn(response: AddPartitionsToTxnResponse) -> None:
    """ApiError unless every partition was added; of several, the one that says most."""
    codes = [
        known_code(each.partition_error_code)
        for topic in response.results_by_topic_v3_and_below
        for each in topic.results_by_partition
    ]
    # Next to one that was refused, the others are only OPERATION_NOT_ATTEMPTED.
    failed = [code for code in codes if code not in (ErrorCode.NONE, ErrorCode.OPERATION_NOT_ATTEMPTED)]
    if failed or not all(code is ErrorCode.NONE for code in codes):
        raise ApiError((failed or codes)[0])


def offset_commit(group_id: str, offsets: Mapping[TopicPartition, int]) -> OffsetCommitRequest:
    """As a consumer that assigned its partitions itself: no member, no generation."""
    return OffsetCommitRequest(
        group_id=group_id,
        topics=[
            OffsetCommitRequest.OffsetCommitRequestTopic(
                name=name,
                partitions=[
                    OffsetCommitRequest.OffsetCommitRequestPartition(
                        partition_index=index,
                        committed_offset=offsets[TopicPartition(name, index)],
                        committed_metadata="",
                    )
                    for index in indexes
                ],
            )
            for name, indexes in by_topic(offsets).items()
        ],
    )


def read_offset_commit(response: OffsetCommitResponse) -> Iterator[Outcome[None]]:
    for topic in response.topics:
        for each in topic.partitions:
            yield Outcome(TopicPartition(topic.name, each.partition_index), None, _error(each.error_code))


def offset_fetch(group_id: str, partitions: Iterable[TopicPartition]) -> OffsetFetchRequest:
    return OffsetFetchRequest(
        group_id=group_id,
        topics=[
            OffsetFetchRequest.OffsetFetchRequestTopic(name=name, partition_indexes=indexes)
            for name, indexes in by_topic(partitions).items()
        ],
    )


def read_offset_fetch(response: OffsetFetchResponse) -> Iterator[Outcome[int | None]]:
    """The committed offset per partition, None where nothing was committed."""
    if response.error_code:
        raise ApiError(known_code(response.error_code))
    for topic in response.topics:
        for each in topic.partitions:
            offset = None if each.committed_offset < 0 else each.committed_offset
            yield Outcome(TopicPartition(topic.name, each.partition_index), offset, _error(each.error_code))


def answered(asked: Iterable[TopicPartition], outcomes: Iterable[Outcome[T]]) -> dict[TopicPartition, Outcome[T]]:
    """The outcome of everything that was asked, in that order; ApiError where the broker left one out."""
    found = {outcome.partition: outcome for outcome in outcomes}
    ordered = {}
    for partition in asked:
        if partition not in found:
            raise _no_answer(partition)
        ordered[partition] = found[partition]
    return ordered


def _no_answer(partition: TopicPartition) -> ApiError:
    return ApiError(ErrorCode.UNKNOWN_SERVER_ERROR, f"the response says nothing of {partition}")


def _error(code: int) -> ApiError | None:
    return ApiError(known_code(code)) if code else None
