"""Leaders and replicas of single partitions: elections, reassignments, in-sync sets."""

from __future__ import annotations

from uuid import UUID

from millrace.wire.keys import ApiKey
from millrace.wire.schema import Request, Response, Struct, array, boolean, int8, int16, int32, int64, string, uuid


class ElectLeadersRequest(Request, key=ApiKey.ELECT_LEADERS, versions="0-2", flexible="2+"):
    """Elects preferred or unclean leaders."""

    class TopicPartitions(Struct):
        topic: str = string()
        partitions: list[int] = array(int32)

    election_type: int = int8("1+")
    topic_partitions: list[TopicPartitions] | None = array(TopicPartitions, nullable=True)
    timeout_ms: int = int32(default=60000)


class ElectLeadersResponse(Response, key=ApiKey.ELECT_LEADERS, versions="0-2", flexible="2+"):
    """The outcome per partition."""

    class PartitionResult(Struct):
        partition_id: int = int32()
        error_code: int = int16()
        error_message: str | None = string(nullable=True)

    class ReplicaElectionResult(Struct):
        topic: str = string()
        partition_result: list[ElectLeadersResponse.PartitionResult] = array("PartitionResult")

    throttle_time_ms: int = int32()
    error_code: int = int16("1+")
    replica_election_results: list[ReplicaElectionResult] = array(ReplicaElectionResult)


class AlterPartitionReassignmentsRequest(
    Request, key=ApiKey.ALTER_PARTITION_REASSIGNMENTS, versions="0-1", flexible="0+"
):
    """Starts or cancels moves of replicas."""

    class ReassignablePartition(Struct):
        partition_index: int = int32()
        replicas: list[int] | None = array(int32, nullable=True, default=None)

    class ReassignableTopic(Struct):
        name: str = string()
        partitions: list[AlterPartitionReassignmentsRequest.ReassignablePartition] = array("ReassignablePartition")

    timeout_ms: int = int32(default=60000)
    allow_replication_factor_change: bool = boolean("1+", default=True)
    topics: list[ReassignableTopic] = array(ReassignableTopic)


class AlterPartitionReassignmentsResponse(
    Response, key=ApiKey.ALTER_PARTITION_REASSIGNMENTS, versions="0-1", flexible="0+"
):
    """The outcome per partition."""

    class ReassignablePartitionResponse(Struct):
        partition_index: int = int32()
        error_code: int = int16()
        error_message: str | None = string(nullable=True)

    class ReassignableTopicResponse(Struct):
        name: str = string()
        partitions: list[AlterPartitionReassignmentsResponse.ReassignablePartitionResponse] = array(
            "ReassignablePartitionResponse"
        )

    throttle_time_ms: int = int32()
    allow_replication_factor_change: bool = boolean("1+", default=True, ignorable=True)
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    responses: list[ReassignableTopicResponse] = array(ReassignableTopicResponse)


class ListPartitionReassignmentsRequest(Request, key=ApiKey.LIST_PARTITION_REASSIGNMENTS, versions="0", flexible="0+"):
    """Asks for the moves that are under way."""

    class ListPartitionReassignmentsTopics(Struct):
        name: str = string()
        partition_indexes: list[int] = array(int32)

    timeout_ms: int = int32(default=60000)
    topics: list[ListPartitionReassignmentsTopics] | None = array(
        ListPartitionReassignmentsTopics, nullable=True, default=None
    )


class ListPartitionReassignmentsResponse(
    Response, key=ApiKey.LIST_PARTITION_REASSIGNMENTS, versions="0", flexible="0+"
):
    """Replicas being added and removed per partition."""

    class OngoingPartitionReassignment(Struct):
        partition_index: int = int32()
        replicas: list[int] = array(int32)
        adding_replicas: list[int] = array(int32)
        removing_replicas: list[int] = array(int32)

    class OngoingTopicReassignment(Struct):
        name: str = string()
        partitions: list[ListPartitionReassignmentsResponse.OngoingPartitionReassignment] = array(
            "OngoingPartitionReassignment"
        )

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    topics: list[OngoingTopicReassignment] = array(OngoingTopicReassignment)


class AlterPartitionRequest(Request, key=ApiKey.ALTER_PARTITION, versions="2-3", flexible="0+"):
    """A leader proposes a new in-sync set to the controller."""

    class BrokerState(Struct):
        broker_id: int = int32("3+")
        broker_epoch: int = int64("3+", default=-1)

    class PartitionData(Struct):
        partition_index: int = int32()
        leader_epoch: int = int32()
        new_isr: list[int] = array(int32, "0-2")
        new_isr_with_epochs: list[AlterPartitionRequest.BrokerState] = array("BrokerState", "3+")
        leader_recovery_state: int = int8()
        partition_epoch: int = int32()

    class TopicData(Struct):
        topic_id: UUID = uuid()
        partitions: list[AlterPartitionRequest.PartitionData] = array("PartitionData")

    broker_id: int = int32()
    broker_epoch: int = int64(default=-1)
    topics: list[TopicData] = array(TopicData)


class AlterPartitionResponse(Response, key=ApiKey.ALTER_PARTITION, versions="2-3", flexible="0+"):
    """The state the controller decided on, per partition."""

    class PartitionData(Struct):
        partition_index: int = int32()
        error_code: int = int16()
        leader_id: int = int32()
        leader_epoch: int = int32()
        isr: list[int] = array(int32)
        leader_recovery_state: int = int8()
        partition_epoch: int = int32()

    class TopicData(Struct):
        topic_id: UUID = uuid()
        partitions: list[AlterPartitionResponse.PartitionData] = array("PartitionData")

    throttle_time_ms: int = int32()
    error_code: int = int16()
    topics: list[TopicData] = array(TopicData)
