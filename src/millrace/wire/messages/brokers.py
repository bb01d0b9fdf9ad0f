"""What brokers say to each other and to the controller about themselves."""

from __future__ import annotations

from uuid import UUID

from millrace.wire.keys import ApiKey
from millrace.wire.schema import (
    Data,
    Request,
    Response,
    Struct,
    array,
    binary,
    boolean,
    int16,
    int32,
    int64,
    string,
    uuid,
)


class BrokerHeartbeatRequest(Request, key=ApiKey.BROKER_HEARTBEAT, versions="0-2", flexible="0+"):
    """A sign of life, or the wish to be fenced or to go."""

    broker_id: int = int32()
    broker_epoch: int = int64(default=-1)
    current_metadata_offset: int = int64()
    want_fence: bool = boolean()
    want_shut_down: bool = boolean()
    offline_log_dirs: list[UUID] = array(uuid, "1+", tag=0)
    cordoned_log_dirs: list[UUID] | None = array(uuid, "2+", tag=1, nullable="2+", default=None)


class BrokerHeartbeatResponse(Response, key=ApiKey.BROKER_HEARTBEAT, versions="0-2", flexible="0+"):
    """How the other side sees the broker."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    is_caught_up: bool = boolean()
    is_fenced: bool = boolean(default=True)
    should_shut_down: bool = boolean()


class AllocateProducerIdsRequest(Request, key=ApiKey.ALLOCATE_PRODUCER_IDS, versions="0", flexible="0+"):
    """A broker asks the controller for a block of producer ids."""

    broker_id: int = int32()
    broker_epoch: int = int64(default=-1)


class AllocateProducerIdsResponse(Response, key=ApiKey.ALLOCATE_PRODUCER_IDS, versions="0", flexible="0+"):
    """The block, which nobody else gets."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    producer_id_start: int = int64()
    producer_id_len: int = int32()


class AssignReplicasToDirsRequest(Request, key=ApiKey.ASSIGN_REPLICAS_TO_DIRS, versions="0", flexible="0+"):
    """A broker says in which of its directories replicas lie."""

    class PartitionData(Struct):
        partition_index: int = int32()

    class TopicData(Struct):
        topic_id: UUID = uuid()
        partitions: list[AssignReplicasToDirsRequest.PartitionData] = array("PartitionData")

    class DirectoryData(Struct):
        id_: UUID = uuid()
        topics: list[AssignReplicasToDirsRequest.TopicData] = array("TopicData")

    broker_id: int = int32()
    broker_epoch: int = int64(default=-1)
    directories: list[DirectoryData] = array(DirectoryData)


class AssignReplicasToDirsResponse(Response, key=ApiKey.ASSIGN_REPLICAS_TO_DIRS, versions="0", flexible="0+"):
    """Whether the controller took it."""

    class PartitionData(Struct):
        partition_index: int = int32()
        error_code: int = int16()

    class TopicData(Struct):
        topic_id: UUID = uuid()
        partitions: list[AssignReplicasToDirsResponse.PartitionData] = array("PartitionData")

    class DirectoryData(Struct):
        id_: UUID = uuid()
        topics: list[AssignReplicasToDirsResponse.TopicData] = array("TopicData")

    throttle_time_ms: int = int32()
    error_code: int = int16()
    directories: list[DirectoryData] = array(DirectoryData)


class GetReplicaLogInfoRequest(Request, key=ApiKey.GET_REPLICA_LOG_INFO, versions="0", flexible="0+"):
    """Asks a broker how far the logs of its replicas reach, whether it leads them or not (KIP-966)."""

    class TopicPartitions(Struct):
        topic_id: UUID = uuid(ignorable=True)
        partitions: list[int] = array(int32)

    topic_partitions: list[TopicPartitions] | None = array(TopicPartitions, nullable=True)


class GetReplicaLogInfoResponse(Response, key=ApiKey.GET_REPLICA_LOG_INFO, versions="0", flexible="0+"):
    """What the replicas have."""

    class PartitionLogInfo(Struct):
        partition: int = int32()
        last_written_leader_epoch: int = int32()
        current_leader_epoch: int = int32()
        log_end_offset: int = int64()
        error_code: int = int16()

    class TopicPartitionLogInfo(Struct):
        topic_id: UUID = uuid()
        partition_log_info: list[GetReplicaLogInfoResponse.PartitionLogInfo] = array("PartitionLogInfo")

    throttle_time_ms: int = int32()
    broker_epoch: int = int64()
    truncated: bool = boolean()
    topic_partition_log_info_list: list[TopicPartitionLogInfo] = array(TopicPartitionLogInfo)


class EnvelopeRequest(Request, key=ApiKey.ENVELOPE, versions="0", flexible="0+"):
    """A request of somebody else, passed on by a broker (KIP-590)."""

    request_data: bytes = binary()
    request_principal: bytes | None = binary(nullable=True)
    client_host_address: bytes = binary()


class EnvelopeResponse(Response, key=ApiKey.ENVELOPE, versions="0", flexible="0+"):
    """Its response, or why it was not looked at."""

    response_data: bytes | None = binary(nullable=True, default=None)
    error_code: int = int16()


class DefaultPrincipalData(Data, versions="0", flexible="0+"):
    """Who asked, in an Envelope, after a version (int16) of its own.

    The tagged fields are not Kafka's, which leaves them alone: how somebody came in.
    """

    type_: str = string()
    name: str = string()
    token_authenticated: bool = boolean()
    token_id: str = string(tag=0)
    mechanism: str = string(tag=1)
