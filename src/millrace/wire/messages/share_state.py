"""The persister of share-partition state, spoken between brokers (KIP-932)."""

from __future__ import annotations

from uuid import UUID

from millrace.wire.keys import ApiKey
from millrace.wire.schema import Request, Response, Struct, array, int8, int16, int32, int64, string, uuid


class InitializeShareGroupStateRequest(Request, key=ApiKey.INITIALIZE_SHARE_GROUP_STATE, versions="0", flexible="0+"):
    """Creates the state of share partitions."""

    class PartitionData(Struct):
        partition: int = int32()
        state_epoch: int = int32()
        start_offset: int = int64()

    class InitializeStateData(Struct):
        topic_id: UUID = uuid()
        partitions: list[InitializeShareGroupStateRequest.PartitionData] = array("PartitionData")

    group_id: str = string()
    topics: list[InitializeStateData] = array(InitializeStateData)


class InitializeShareGroupStateResponse(Response, key=ApiKey.INITIALIZE_SHARE_GROUP_STATE, versions="0", flexible="0+"):
    """The outcome per partition."""

    class PartitionResult(Struct):
        partition: int = int32()
        error_code: int = int16()
        error_message: str | None = string(nullable=True, default=None)

    class InitializeStateResult(Struct):
        topic_id: UUID = uuid()
        partitions: list[InitializeShareGroupStateResponse.PartitionResult] = array("PartitionResult")

    results: list[InitializeStateResult] = array(InitializeStateResult)


class ReadShareGroupStateRequest(Request, key=ApiKey.READ_SHARE_GROUP_STATE, versions="0", flexible="0+"):
    """Reads the state of share partitions."""

    class PartitionData(Struct):
        partition: int = int32()
        leader_epoch: int = int32()

    class ReadStateData(Struct):
        topic_id: UUID = uuid()
        partitions: list[ReadShareGroupStateRequest.PartitionData] = array("PartitionData")

    group_id: str = string()
    topics: list[ReadStateData] = array(ReadStateData)


class ReadShareGroupStateResponse(Response, key=ApiKey.READ_SHARE_GROUP_STATE, versions="0", flexible="0+"):
    """Start offset and record states per partition."""

    class StateBatch(Struct):
        first_offset: int = int64()
        last_offset: int = int64()
        delivery_state: int = int8()
        delivery_count: int = int16()

    class PartitionResult(Struct):
        partition: int = int32()
        error_code: int = int16()
        error_message: str | None = string(nullable=True, default=None)
        state_epoch: int = int32()
        start_offset: int = int64()
        state_batches: list[ReadShareGroupStateResponse.StateBatch] = array("StateBatch")

    class ReadStateResult(Struct):
        topic_id: UUID = uuid()
        partitions: list[ReadShareGroupStateResponse.PartitionResult] = array("PartitionResult")

    results: list[ReadStateResult] = array(ReadStateResult)


class WriteShareGroupStateRequest(Request, key=ApiKey.WRITE_SHARE_GROUP_STATE, versions="0-1", flexible="0+"):
    """Writes the state of share partitions."""

    class StateBatch(Struct):
        first_offset: int = int64()
        last_offset: int = int64()
        delivery_state: int = int8()
        delivery_count: int = int16()

    class PartitionData(Struct):
        partition: int = int32()
        state_epoch: int = int32()
        leader_epoch: int = int32()
        start_offset: int = int64()
        delivery_complete_count: int = int32("1+", default=-1, ignorable=True)
        state_batches: list[WriteShareGroupStateRequest.StateBatch] = array("StateBatch")

    class WriteStateData(Struct):
        topic_id: UUID = uuid()
        partitions: list[WriteShareGroupStateRequest.PartitionData] = array("PartitionData")

    group_id: str = string()
    topics: list[WriteStateData] = array(WriteStateData)


class WriteShareGroupStateResponse(Response, key=ApiKey.WRITE_SHARE_GROUP_STATE, versions="0-1", flexible="0+"):
    """The outcome per partition."""

    class PartitionResult(Struct):
        partition: int = int32()
        error_code: int = int16()
        error_message: str | None = string(nullable=True, default=None)

    class WriteStateResult(Struct):
        topic_id: UUID = uuid()
        partitions: list[WriteShareGroupStateResponse.PartitionResult] = array("PartitionResult")

    results: list[WriteStateResult] = array(WriteStateResult)


class DeleteShareGroupStateRequest(Request, key=ApiKey.DELETE_SHARE_GROUP_STATE, versions="0", flexible="0+"):
    """Deletes the state of share partitions."""

    class PartitionData(Struct):
        partition: int = int32()

    class DeleteStateData(Struct):
        topic_id: UUID = uuid()
        partitions: list[DeleteShareGroupStateRequest.PartitionData] = array("PartitionData")

    group_id: str = string()
    topics: list[DeleteStateData] = array(DeleteStateData)


class DeleteShareGroupStateResponse(Response, key=ApiKey.DELETE_SHARE_GROUP_STATE, versions="0", flexible="0+"):
    """The outcome per partition."""

    class PartitionResult(Struct):
        partition: int = int32()
        error_code: int = int16()
        error_message: str | None = string(nullable=True, default=None)

    class DeleteStateResult(Struct):
        topic_id: UUID = uuid()
        partitions: list[DeleteShareGroupStateResponse.PartitionResult] = array("PartitionResult")

    results: list[DeleteStateResult] = array(DeleteStateResult)


class ReadShareGroupStateSummaryRequest(
    Request, key=ApiKey.READ_SHARE_GROUP_STATE_SUMMARY, versions="0-1", flexible="0+"
):
    """Reads the start offsets of share partitions."""

    class PartitionData(Struct):
        partition: int = int32()
        leader_epoch: int = int32()

    class ReadStateSummaryData(Struct):
        topic_id: UUID = uuid()
        partitions: list[ReadShareGroupStateSummaryRequest.PartitionData] = array("PartitionData")

    group_id: str = string()
    topics: list[ReadStateSummaryData] = array(ReadStateSummaryData)


class ReadShareGroupStateSummaryResponse(
    Response, key=ApiKey.READ_SHARE_GROUP_STATE_SUMMARY, versions="0-1", flexible="0+"
):
    """Start offset and epochs per partition."""

    class PartitionResult(Struct):
        partition: int = int32()
        error_code: int = int16()
        error_message: str | None = string(nullable=True, default=None)
        state_epoch: int = int32()
        leader_epoch: int = int32()
        start_offset: int = int64()
        delivery_complete_count: int = int32("1+", default=-1, ignorable=True)

    class ReadStateSummaryResult(Struct):
        topic_id: UUID = uuid()
        partitions: list[ReadShareGroupStateSummaryResponse.PartitionResult] = array("PartitionResult")

    results: list[ReadStateSummaryResult] = array(ReadStateSummaryResult)
