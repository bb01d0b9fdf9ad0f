"""Writing record batches. The hot path reads and writes these with `wire.hot`; tests hold the two together."""

from __future__ import annotations

from uuid import UUID

from millrace.wire.keys import ApiKey
from millrace.wire.schema import Request, Response, Struct, array, int16, int32, int64, nested, records, string, uuid


class ProduceRequest(Request, key=ApiKey.PRODUCE, versions="3-13", flexible="9+"):
    """Appends record batches to partitions; from v13 topics go by id."""

    class PartitionProduceData(Struct):
        index: int = int32()
        records: bytes | memoryview | None = records()

    class TopicProduceData(Struct):
        name: str = string("0-12", ignorable=True)
        topic_id: UUID = uuid("13+", ignorable=True)
        partition_data: list[ProduceRequest.PartitionProduceData] = array("PartitionProduceData")

    transactional_id: str | None = string(nullable=True, default=None)
    acks: int = int16()
    timeout_ms: int = int32()
    topic_data: list[TopicProduceData] = array(TopicProduceData)


class ProduceResponse(Response, key=ApiKey.PRODUCE, versions="3-13", flexible="9+"):
    """Where each batch landed, or why it did not."""

    class BatchIndexAndErrorMessage(Struct):
        batch_index: int = int32("8+")
        batch_index_error_message: str | None = string("8+", nullable=True, default=None)

    class LeaderIdAndEpoch(Struct):
        leader_id: int = int32("10+", default=-1)
        leader_epoch: int = int32("10+", default=-1)

    class PartitionProduceResponse(Struct):
        index: int = int32()
        error_code: int = int16()
        base_offset: int = int64()
        log_append_time_ms: int = int64(default=-1)
        log_start_offset: int = int64("5+", default=-1, ignorable=True)
        record_errors: list[ProduceResponse.BatchIndexAndErrorMessage] = array(
            "BatchIndexAndErrorMessage", "8+", ignorable=True
        )
        error_message: str | None = string("8+", nullable=True, default=None, ignorable=True)
        current_leader: ProduceResponse.LeaderIdAndEpoch = nested("LeaderIdAndEpoch", "10+", tag=0)

    class TopicProduceResponse(Struct):
        name: str = string("0-12", ignorable=True)
        topic_id: UUID = uuid("13+", ignorable=True)
        partition_responses: list[ProduceResponse.PartitionProduceResponse] = array("PartitionProduceResponse")

    class NodeEndpoint(Struct):
        node_id: int = int32("10+")
        host: str = string("10+")
        port: int = int32("10+")
        rack: str | None = string("10+", nullable=True, default=None)

    responses: list[TopicProduceResponse] = array(TopicProduceResponse)
    throttle_time_ms: int = int32()
    node_endpoints: list[NodeEndpoint] = array(NodeEndpoint, "10+", tag=0)
