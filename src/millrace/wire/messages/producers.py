"""Producer ids and the state of idempotent producers."""

from __future__ import annotations

from millrace.wire.keys import ApiKey
from millrace.wire.schema import Request, Response, Struct, array, boolean, int16, int32, int64, string


class InitProducerIdRequest(Request, key=ApiKey.INIT_PRODUCER_ID, versions="0-6", flexible="2+"):
    """Asks for a producer id and epoch, for a transactional id or without one; the newest version is unstable."""

    transactional_id: str | None = string(nullable=True)
    transaction_timeout_ms: int = int32()
    producer_id: int = int64("3+", default=-1)
    producer_epoch: int = int16("3+", default=-1)
    enable2_pc: bool = boolean("6+")
    keep_prepared_txn: bool = boolean("6+")


class InitProducerIdResponse(Response, key=ApiKey.INIT_PRODUCER_ID, versions="0-6", flexible="2+"):
    """The producer id and epoch."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    producer_id: int = int64(default=-1)
    producer_epoch: int = int16()
    ongoing_txn_producer_id: int = int64("6+", default=-1)
    ongoing_txn_producer_epoch: int = int16("6+", default=-1)


class DescribeProducersRequest(Request, key=ApiKey.DESCRIBE_PRODUCERS, versions="0", flexible="0+"):
    """Asks for the active producers of partitions."""

    class TopicRequest(Struct):
        name: str = string()
        partition_indexes: list[int] = array(int32)

    topics: list[TopicRequest] = array(TopicRequest)


class DescribeProducersResponse(Response, key=ApiKey.DESCRIBE_PRODUCERS, versions="0", flexible="0+"):
    """Producer state per partition."""

    class ProducerState(Struct):
        producer_id: int = int64()
        producer_epoch: int = int32()
        last_sequence: int = int32(default=-1)
        last_timestamp: int = int64(default=-1)
        coordinator_epoch: int = int32()
        current_txn_start_offset: int = int64(default=-1)

    class PartitionResponse(Struct):
        partition_index: int = int32()
        error_code: int = int16()
        error_message: str | None = string(nullable=True, default=None)
        active_producers: list[DescribeProducersResponse.ProducerState] = array("ProducerState")

    class TopicResponse(Struct):
        name: str = string()
        partitions: list[DescribeProducersResponse.PartitionResponse] = array("PartitionResponse")

    throttle_time_ms: int = int32()
    topics: list[TopicResponse] = array(TopicResponse)
