"""The metadata quorum as an administrator sees it."""

from __future__ import annotations

from uuid import UUID

from millrace.wire.keys import ApiKey
from millrace.wire.schema import Request, Response, Struct, array, int16, int32, int64, string, uint16, uuid


class DescribeQuorumRequest(Request, key=ApiKey.DESCRIBE_QUORUM, versions="0-2", flexible="0+"):
    """Asks for the state of the metadata quorum."""

    class PartitionData(Struct):
        partition_index: int = int32()

    class TopicData(Struct):
        topic_name: str = string()
        partitions: list[DescribeQuorumRequest.PartitionData] = array("PartitionData")

    topics: list[TopicData] = array(TopicData)


class DescribeQuorumResponse(Response, key=ApiKey.DESCRIBE_QUORUM, versions="0-2", flexible="0+"):
    """Leader, voters and observers with their log ends."""

    class ReplicaState(Struct):
        replica_id: int = int32()
        replica_directory_id: UUID = uuid("2+")
        log_end_offset: int = int64()
        last_fetch_timestamp: int = int64("1+", default=-1, ignorable=True)
        last_caught_up_timestamp: int = int64("1+", default=-1, ignorable=True)

    class PartitionData(Struct):
        partition_index: int = int32()
        error_code: int = int16()
        error_message: str | None = string("2+", nullable=True, ignorable=True)
        leader_id: int = int32()
        leader_epoch: int = int32()
        high_watermark: int = int64()
        current_voters: list[DescribeQuorumResponse.ReplicaState] = array("ReplicaState")
        observers: list[DescribeQuorumResponse.ReplicaState] = array("ReplicaState")

    class TopicData(Struct):
        topic_name: str = string()
        partitions: list[DescribeQuorumResponse.PartitionData] = array("PartitionData")

    class Listener(Struct):
        name: str = string("2+")
        host: str = string("2+")
        port: int = uint16("2+")

    class Node(Struct):
        node_id: int = int32("2+")
        listeners: list[DescribeQuorumResponse.Listener] = array("Listener", "2+")

    error_code: int = int16()
    error_message: str | None = string("2+", nullable=True, ignorable=True)
    topics: list[TopicData] = array(TopicData)
    nodes: list[Node] = array(Node, "2+")
