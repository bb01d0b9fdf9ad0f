"""Deleting records from the front of partitions."""

from __future__ import annotations

from millrace.wire.keys import ApiKey
from millrace.wire.schema import Request, Response, Struct, array, int16, int32, int64, string


class DeleteRecordsRequest(Request, key=ApiKey.DELETE_RECORDS, versions="0-2", flexible="2+"):
    """Deletes the records before given offsets."""

    class DeleteRecordsPartition(Struct):
        partition_index: int = int32()
        offset: int = int64()

    class DeleteRecordsTopic(Struct):
        name: str = string()
        partitions: list[DeleteRecordsRequest.DeleteRecordsPartition] = array("DeleteRecordsPartition")

    topics: list[DeleteRecordsTopic] = array(DeleteRecordsTopic)
    timeout_ms: int = int32()


class DeleteRecordsResponse(Response, key=ApiKey.DELETE_RECORDS, versions="0-2", flexible="2+"):
    """The new start of each partition."""

    class DeleteRecordsPartitionResult(Struct):
        partition_index: int = int32()
        low_watermark: int = int64()
        error_code: int = int16()

    class DeleteRecordsTopicResult(Struct):
        name: str = string()
        partitions: list[DeleteRecordsResponse.DeleteRecordsPartitionResult] = array("DeleteRecordsPartitionResult")

    throttle_time_ms: int = int32()
    topics: list[DeleteRecordsTopicResult] = array(DeleteRecordsTopicResult)
