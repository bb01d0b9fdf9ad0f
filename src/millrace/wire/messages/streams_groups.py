"""Groups of Kafka Streams applications whose tasks the broker assigns (KIP-1071)."""

from __future__ import annotations

from millrace.wire.keys import ApiKey
from millrace.wire.schema import (
    Request,
    Response,
    Struct,
    array,
    boolean,
    int8,
    int16,
    int32,
    int64,
    nested,
    string,
    uint16,
)


class StreamsGroupHeartbeatRequest(Request, key=ApiKey.STREAMS_GROUP_HEARTBEAT, versions="0", flexible="0+"):
    """A streams member's heartbeat, with its topology and tasks."""

    class KeyValue(Struct):
        key: str = string()
        value: str = string()

    class TopicInfo(Struct):
        name: str = string()
        partitions: int = int32()
        replication_factor: int = int16()
        topic_configs: list[StreamsGroupHeartbeatRequest.KeyValue] = array("KeyValue")

    class CopartitionGroup(Struct):
        source_topics: list[int] = array(int16)
        source_topic_regex: list[int] = array(int16)
        repartition_source_topics: list[int] = array(int16)

    class Subtopology(Struct):
        subtopology_id: str = string()
        source_topics: list[str] = array(string)
        source_topic_regex: list[str] = array(string)
        state_changelog_topics: list[StreamsGroupHeartbeatRequest.TopicInfo] = array("TopicInfo")
        repartition_sink_topics: list[str] = array(string)
        repartition_source_topics: list[StreamsGroupHeartbeatRequest.TopicInfo] = array("TopicInfo")
        copartition_groups: list[StreamsGroupHeartbeatRequest.CopartitionGroup] = array("CopartitionGroup")

    class Topology(Struct):
        epoch: int = int32()
        subtopologies: list[StreamsGroupHeartbeatRequest.Subtopology] = array("Subtopology")

    class TaskIds(Struct):
        subtopology_id: str = string()
        partitions: list[int] = array(int32)

    class Endpoint(Struct):
        host: str = string()
        port: int = uint16()

    class TaskOffset(Struct):
        subtopology_id: str = string()
        partition: int = int32()
        offset: int = int64()

    group_id: str = string()
    member_id: str = string()
    member_epoch: int = int32()
    endpoint_information_epoch: int = int32()
    instance_id: str | None = string(nullable=True, default=None)
    rack_id: str | None = string(nullable=True, default=None)
    rebalance_timeout_ms: int = int32(default=-1)
    topology: Topology | None = nested(Topology, nullable=True)
    active_tasks: list[TaskIds] | None = array(TaskIds, nullable=True, default=None)
    standby_tasks: list[TaskIds] | None = array(TaskIds, nullable=True, default=None)
    warmup_tasks: list[TaskIds] | None = array(TaskIds, nullable=True, default=None)
    process_id: str | None = string(nullable=True, default=None)
    user_endpoint: Endpoint | None = nested(Endpoint, nullable=True)
    client_tags: list[KeyValue] | None = array(KeyValue, nullable=True, default=None)
    task_offsets: list[TaskOffset] | None = array(TaskOffset, nullable=True, default=None)
    task_end_offsets: list[TaskOffset] | None = array(TaskOffset, nullable=True, default=None)
    shutdown_application: bool = boolean()


class StreamsGroupHeartbeatResponse(Response, key=ApiKey.STREAMS_GROUP_HEARTBEAT, versions="0", flexible="0+"):
    """The member's epoch and, when they changed, its tasks."""

    class Status(Struct):
        status_code: int = int8()
        status_detail: str = string()

    class TaskIds(Struct):
        subtopology_id: str = string()
        partitions: list[int] = array(int32)

    class Endpoint(Struct):
        host: str = string()
        port: int = uint16()

    class TopicPartition(Struct):
        topic: str = string()
        partitions: list[int] = array(int32)

    class EndpointToPartitions(Struct):
        user_endpoint: StreamsGroupHeartbeatResponse.Endpoint = nested("Endpoint")
        active_partitions: list[StreamsGroupHeartbeatResponse.TopicPartition] = array("TopicPartition")
        standby_partitions: list[StreamsGroupHeartbeatResponse.TopicPartition] = array("TopicPartition")

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    member_id: str = string()
    member_epoch: int = int32()
    heartbeat_interval_ms: int = int32()
    acceptable_recovery_lag: int = int32()
    task_offset_interval_ms: int = int32()
    status: list[Status] | None = array(Status, nullable=True)
    active_tasks: list[TaskIds] | None = array(TaskIds, nullable=True, default=None)
    standby_tasks: list[TaskIds] | None = array(TaskIds, nullable=True, default=None)
    warmup_tasks: list[TaskIds] | None = array(TaskIds, nullable=True, default=None)
    endpoint_information_epoch: int = int32()
    partitions_by_user_endpoint: list[EndpointToPartitions] | None = array(
        EndpointToPartitions, nullable=True, default=None
    )


class StreamsGroupDescribeRequest(Request, key=ApiKey.STREAMS_GROUP_DESCRIBE, versions="0", flexible="0+"):
    """Asks for the state and members of streams groups."""

    group_ids: list[str] = array(string)
    include_authorized_operations: bool = boolean()


class StreamsGroupDescribeResponse(Response, key=ApiKey.STREAMS_GROUP_DESCRIBE, versions="0", flexible="0+"):
    """Topology, members and tasks per group."""

    class KeyValue(Struct):
        key: str = string()
        value: str = string()

    class TopicInfo(Struct):
        name: str = string()
        partitions: int = int32()
        replication_factor: int = int16()
        topic_configs: list[StreamsGroupDescribeResponse.KeyValue] = array("KeyValue")

    class Subtopology(Struct):
        subtopology_id: str = string()
        source_topics: list[str] = array(string)
        repartition_sink_topics: list[str] = array(string)
        state_changelog_topics: list[StreamsGroupDescribeResponse.TopicInfo] = array("TopicInfo")
        repartition_source_topics: list[StreamsGroupDescribeResponse.TopicInfo] = array("TopicInfo")

    class Topology(Struct):
        epoch: int = int32()
        subtopologies: list[StreamsGroupDescribeResponse.Subtopology] | None = array(
            "Subtopology", nullable=True, default=None
        )

    class Endpoint(Struct):
        host: str = string()
        port: int = uint16()

    class TaskOffset(Struct):
        subtopology_id: str = string()
        partition: int = int32()
        offset: int = int64()

    class TaskIds(Struct):
        subtopology_id: str = string()
        partitions: list[int] = array(int32)

    class Assignment(Struct):
        active_tasks: list[StreamsGroupDescribeResponse.TaskIds] = array("TaskIds")
        standby_tasks: list[StreamsGroupDescribeResponse.TaskIds] = array("TaskIds")
        warmup_tasks: list[StreamsGroupDescribeResponse.TaskIds] = array("TaskIds")

    class Member(Struct):
        member_id: str = string()
        member_epoch: int = int32()
        instance_id: str | None = string(nullable=True, default=None)
        rack_id: str | None = string(nullable=True, default=None)
        client_id: str = string()
        client_host: str = string()
        topology_epoch: int = int32()
        process_id: str = string()
        user_endpoint: StreamsGroupDescribeResponse.Endpoint | None = nested("Endpoint", nullable=True)
        client_tags: list[StreamsGroupDescribeResponse.KeyValue] = array("KeyValue")
        task_offsets: list[StreamsGroupDescribeResponse.TaskOffset] = array("TaskOffset")
        task_end_offsets: list[StreamsGroupDescribeResponse.TaskOffset] = array("TaskOffset")
        assignment: StreamsGroupDescribeResponse.Assignment = nested("Assignment")
        target_assignment: StreamsGroupDescribeResponse.Assignment = nested("Assignment")
        is_classic: bool = boolean()

    class DescribedGroup(Struct):
        error_code: int = int16()
        error_message: str | None = string(nullable=True, default=None)
        group_id: str = string()
        group_state: str = string()
        group_epoch: int = int32()
        assignment_epoch: int = int32()
        topology: StreamsGroupDescribeResponse.Topology | None = nested("Topology", nullable=True)
        members: list[StreamsGroupDescribeResponse.Member] = array("Member")
        authorized_operations: int = int32(default=-2147483648)

    throttle_time_ms: int = int32()
    groups: list[DescribedGroup] = array(DescribedGroup)
