"""Transactions: their partitions, offsets, end and markers, and how to look at them."""

from __future__ import annotations

from millrace.wire.keys import ApiKey
from millrace.wire.schema import Request, Response, Struct, array, boolean, int8, int16, int32, int64, string


class AddPartitionsToTxnRequest(Request, key=ApiKey.ADD_PARTITIONS_TO_TXN, versions="0-5", flexible="3+"):
    """Adds partitions to a transaction; from v4 brokers may add or verify for several transactions."""

    class AddPartitionsToTxnTopic(Struct):
        name: str = string()
        partitions: list[int] = array(int32)

    class AddPartitionsToTxnTransaction(Struct):
        transactional_id: str = string("4+")
        producer_id: int = int64("4+")
        producer_epoch: int = int16("4+")
        verify_only: bool = boolean("4+")
        topics: list[AddPartitionsToTxnRequest.AddPartitionsToTxnTopic] = array("AddPartitionsToTxnTopic", "4+")

    transactions: list[AddPartitionsToTxnTransaction] = array(AddPartitionsToTxnTransaction, "4+")
    v3_and_below_transactional_id: str = string("0-3")
    v3_and_below_producer_id: int = int64("0-3")
    v3_and_below_producer_epoch: int = int16("0-3")
    v3_and_below_topics: list[AddPartitionsToTxnTopic] = array(AddPartitionsToTxnTopic, "0-3")


class AddPartitionsToTxnResponse(Response, key=ApiKey.ADD_PARTITIONS_TO_TXN, versions="0-5", flexible="3+"):
    """The outcome per partition."""

    class AddPartitionsToTxnPartitionResult(Struct):
        partition_index: int = int32()
        partition_error_code: int = int16()

    class AddPartitionsToTxnTopicResult(Struct):
        name: str = string()
        results_by_partition: list[AddPartitionsToTxnResponse.AddPartitionsToTxnPartitionResult] = array(
            "AddPartitionsToTxnPartitionResult"
        )

    class AddPartitionsToTxnResult(Struct):
        transactional_id: str = string("4+")
        topic_results: list[AddPartitionsToTxnResponse.AddPartitionsToTxnTopicResult] = array(
            "AddPartitionsToTxnTopicResult", "4+"
        )

    throttle_time_ms: int = int32()
    error_code: int = int16("4+", ignorable=True)
    results_by_transaction: list[AddPartitionsToTxnResult] = array(AddPartitionsToTxnResult, "4+")
    results_by_topic_v3_and_below: list[AddPartitionsToTxnTopicResult] = array(AddPartitionsToTxnTopicResult, "0-3")


class AddOffsetsToTxnRequest(Request, key=ApiKey.ADD_OFFSETS_TO_TXN, versions="0-4", flexible="3+"):
    """Adds a group's offsets to a transaction."""

    transactional_id: str = string()
    producer_id: int = int64()
    producer_epoch: int = int16()
    group_id: str = string()


class AddOffsetsToTxnResponse(Response, key=ApiKey.ADD_OFFSETS_TO_TXN, versions="0-4", flexible="3+"):
    """Whether it was added."""

    throttle_time_ms: int = int32()
    error_code: int = int16()


class EndTxnRequest(Request, key=ApiKey.END_TXN, versions="0-5", flexible="3+"):
    """Commits or aborts a transaction."""

    transactional_id: str = string()
    producer_id: int = int64()
    producer_epoch: int = int16()
    committed: bool = boolean()


class EndTxnResponse(Response, key=ApiKey.END_TXN, versions="0-5", flexible="3+"):
    """The outcome; from v5 on the producer's next epoch."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    producer_id: int = int64("5+", default=-1, ignorable=True)
    producer_epoch: int = int16("5+", default=-1, ignorable=True)


class WriteTxnMarkersRequest(Request, key=ApiKey.WRITE_TXN_MARKERS, versions="1-2", flexible="1+"):
    """Writes commit or abort markers into partitions; sent by the transaction coordinator."""

    class WritableTxnMarkerTopic(Struct):
        name: str = string()
        partition_indexes: list[int] = array(int32)

    class WritableTxnMarker(Struct):
        producer_id: int = int64()
        producer_epoch: int = int16()
        transaction_result: bool = boolean()
        topics: list[WriteTxnMarkersRequest.WritableTxnMarkerTopic] = array("WritableTxnMarkerTopic")
        coordinator_epoch: int = int32()
        transaction_version: int = int8("2+", ignorable=True)

    markers: list[WritableTxnMarker] = array(WritableTxnMarker)


class WriteTxnMarkersResponse(Response, key=ApiKey.WRITE_TXN_MARKERS, versions="1-2", flexible="1+"):
    """The outcome per producer and partition."""

    class WritableTxnMarkerPartitionResult(Struct):
        partition_index: int = int32()
        error_code: int = int16()

    class WritableTxnMarkerTopicResult(Struct):
        name: str = string()
        partitions: list[WriteTxnMarkersResponse.WritableTxnMarkerPartitionResult] = array(
            "WritableTxnMarkerPartitionResult"
        )

    class WritableTxnMarkerResult(Struct):
        producer_id: int = int64()
        topics: list[WriteTxnMarkersResponse.WritableTxnMarkerTopicResult] = array("WritableTxnMarkerTopicResult")

    markers: list[WritableTxnMarkerResult] = array(WritableTxnMarkerResult)


class TxnOffsetCommitRequest(Request, key=ApiKey.TXN_OFFSET_COMMIT, versions="0-5", flexible="3+"):
    """Commits offsets as part of a transaction."""

    class TxnOffsetCommitRequestPartition(Struct):
        partition_index: int = int32()
        committed_offset: int = int64()
        committed_leader_epoch: int = int32("2+", default=-1, ignorable=True)
        committed_metadata: str | None = string(nullable=True)

    class TxnOffsetCommitRequestTopic(Struct):
        name: str = string()
        partitions: list[TxnOffsetCommitRequest.TxnOffsetCommitRequestPartition] = array(
            "TxnOffsetCommitRequestPartition"
        )

    transactional_id: str = string()
    group_id: str = string()
    producer_id: int = int64()
    producer_epoch: int = int16()
    generation_id: int = int32("3+", default=-1)
    member_id: str = string("3+")
    group_instance_id: str | None = string("3+", nullable=True, default=None)
    topics: list[TxnOffsetCommitRequestTopic] = array(TxnOffsetCommitRequestTopic)


class TxnOffsetCommitResponse(Response, key=ApiKey.TXN_OFFSET_COMMIT, versions="0-5", flexible="3+"):
    """The outcome per partition."""

    class TxnOffsetCommitResponsePartition(Struct):
        partition_index: int = int32()
        error_code: int = int16()

    class TxnOffsetCommitResponseTopic(Struct):
        name: str = string()
        partitions: list[TxnOffsetCommitResponse.TxnOffsetCommitResponsePartition] = array(
            "TxnOffsetCommitResponsePartition"
        )

    throttle_time_ms: int = int32()
    topics: list[TxnOffsetCommitResponseTopic] = array(TxnOffsetCommitResponseTopic)


class DescribeTransactionsRequest(Request, key=ApiKey.DESCRIBE_TRANSACTIONS, versions="0", flexible="0+"):
    """Asks for the state of transactions."""

    transactional_ids: list[str] = array(string)


class DescribeTransactionsResponse(Response, key=ApiKey.DESCRIBE_TRANSACTIONS, versions="0", flexible="0+"):
    """State and partitions per transactional id."""

    class TopicData(Struct):
        topic: str = string()
        partitions: list[int] = array(int32)

    class TransactionState(Struct):
        error_code: int = int16()
        transactional_id: str = string()
        transaction_state: str = string()
        transaction_timeout_ms: int = int32()
        transaction_start_time_ms: int = int64()
        producer_id: int = int64()
        producer_epoch: int = int16()
        topics: list[DescribeTransactionsResponse.TopicData] = array("TopicData")

    throttle_time_ms: int = int32()
    transaction_states: list[TransactionState] = array(TransactionState)


class ListTransactionsRequest(Request, key=ApiKey.LIST_TRANSACTIONS, versions="0-2", flexible="0+"):
    """Asks for all transactions, filtered by state, producer id, age and name."""

    state_filters: list[str] = array(string)
    producer_id_filters: list[int] = array(int64)
    duration_filter: int = int64("1+", default=-1)
    transactional_id_pattern: str | None = string("2+", nullable=True, default=None)


class ListTransactionsResponse(Response, key=ApiKey.LIST_TRANSACTIONS, versions="0-2", flexible="0+"):
    """Transactions of this coordinator."""

    class TransactionState(Struct):
        transactional_id: str = string()
        producer_id: int = int64()
        transaction_state: str = string()

    throttle_time_ms: int = int32()
    error_code: int = int16()
    unknown_state_filters: list[str] = array(string)
    transaction_states: list[TransactionState] = array(TransactionState)
