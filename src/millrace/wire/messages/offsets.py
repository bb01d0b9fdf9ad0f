"""Looking up offsets in a log: by timestamp or special value, and by leader epoch."""

from __future__ import annotations

from millrace.wire.keys import ApiKey
from millrace.wire.schema import Request, Response, Struct, array, int8, int16, int32, int64, string


class ListOffsetsRequest(Request, key=ApiKey.LIST_OFFSETS, versions="1-11", flexible="6+"):
    """Asks for offsets by timestamp; negative timestamps are special (earliest, latest, max timestamp, ...)."""

    class ListOffsetsPartition(Struct):
        partition_index: int = int32()
        current_leader_epoch: int = int32("4+", default=-1, ignorable=True)
        timestamp: int = int64()

    class ListOffsetsTopic(Struct):
        name: str = string()
        partitions: list[ListOffsetsRequest.ListOffsetsPartition] = array("ListOffsetsPartition")

    replica_id: int = int32()
    isolation_level: int = int8("2+")
    topics: list[ListOffsetsTopic] = array(ListOffsetsTopic)
    timeout_ms: int = int32("10+", ignorable=True)


class ListOffsetsResponse(Response, key=ApiKey.LIST_OFFSETS, versions="1-11", flexible="6+"):
    """The offset found per partition."""

    class ListOffsetsPartitionResponse(Struct):
        partition_index: int = int32()
        error_code: int = int16()
        timestamp: int = int64(default=-1)
        offset: int = int64(default=-1)
        leader_epoch: int = int32("4+", default=-1)

    class ListOffsetsTopicResponse(Struct):
        name: str = string()
        partitions: list[ListOffsetsResponse.ListOffsetsPartitionResponse] = array("ListOffsetsPartitionResponse")

    throttle_time_ms: int = int32("2+", ignorable=True)
    topics: list[ListOffsetsTopicResponse] = array(ListOffsetsTopicResponse)


class OffsetForLeaderEpochRequest(Request, key=ApiKey.OFFSET_FOR_LEADER_EPOCH, versions="2-4", flexible="4+"):
    """Asks where leader epochs end, for truncation."""

    class OffsetForLeaderPartition(Struct):
        partition: int = int32()
        current_leader_epoch: int = int32(default=-1)
        leader_epoch: int = int32()

    class OffsetForLeaderTopic(Struct):
        topic: str = string()
        partitions: list[OffsetForLeaderEpochRequest.OffsetForLeaderPartition] = array("OffsetForLeaderPartition")

    replica_id: int = int32("3+", default=-2, ignorable=True)
    topics: list[OffsetForLeaderTopic] = array(OffsetForLeaderTopic)


class OffsetForLeaderEpochResponse(Response, key=ApiKey.OFFSET_FOR_LEADER_EPOCH, versions="2-4", flexible="4+"):
    """The end offset per partition and epoch."""

    class EpochEndOffset(Struct):
        error_code: int = int16()
        partition: int = int32()
        leader_epoch: int = int32(default=-1)
        end_offset: int = int64(default=-1)

    class OffsetForLeaderTopicResult(Struct):
        topic: str = string()
        partitions: list[OffsetForLeaderEpochResponse.EpochEndOffset] = array("EpochEndOffset")

    throttle_time_ms: int = int32()
    topics: list[OffsetForLeaderTopicResult] = array(OffsetForLeaderTopicResult)
