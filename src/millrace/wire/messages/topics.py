"""Creating and deleting topics, and adding partitions to them."""

from __future__ import annotations

from uuid import UUID

from millrace.wire.keys import ApiKey
from millrace.wire.schema import Request, Response, Struct, array, boolean, int8, int16, int32, string, uuid


class CreateTopicsRequest(Request, key=ApiKey.CREATE_TOPICS, versions="2-7", flexible="5+"):
    """Creates topics, or only checks whether it could."""

    class CreatableReplicaAssignment(Struct):
        partition_index: int = int32()
        broker_ids: list[int] = array(int32)

    class CreatableTopicConfig(Struct):
        name: str = string()
        value: str | None = string(nullable=True)

    class CreatableTopic(Struct):
        name: str = string()
        num_partitions: int = int32()
        replication_factor: int = int16()
        assignments: list[CreateTopicsRequest.CreatableReplicaAssignment] = array("CreatableReplicaAssignment")
        configs: list[CreateTopicsRequest.CreatableTopicConfig] = array("CreatableTopicConfig")

    topics: list[CreatableTopic] = array(CreatableTopic)
    timeout_ms: int = int32(default=60000)
    validate_only: bool = boolean()


class CreateTopicsResponse(Response, key=ApiKey.CREATE_TOPICS, versions="2-7", flexible="5+"):
    """The outcome and, from v5 on, the settings per topic."""

    class CreatableTopicConfigs(Struct):
        name: str = string("5+")
        value: str | None = string("5+", nullable=True)
        read_only: bool = boolean("5+")
        config_source: int = int8("5+", default=-1, ignorable=True)
        is_sensitive: bool = boolean("5+")

    class CreatableTopicResult(Struct):
        name: str = string()
        topic_id: UUID = uuid("7+", ignorable=True)
        error_code: int = int16()
        error_message: str | None = string(nullable=True)
        topic_config_error_code: int = int16("5+", tag=0, ignorable=True)
        num_partitions: int = int32("5+", default=-1, ignorable=True)
        replication_factor: int = int16("5+", default=-1, ignorable=True)
        configs: list[CreateTopicsResponse.CreatableTopicConfigs] | None = array(
            "CreatableTopicConfigs", "5+", nullable=True, ignorable=True
        )

    throttle_time_ms: int = int32()
    topics: list[CreatableTopicResult] = array(CreatableTopicResult)


class DeleteTopicsRequest(Request, key=ApiKey.DELETE_TOPICS, versions="1-6", flexible="4+"):
    """Deletes topics, by name or from v6 on by id."""

    class DeleteTopicState(Struct):
        name: str | None = string("6+", nullable=True, default=None)
        topic_id: UUID = uuid("6+")

    topics: list[DeleteTopicState] = array(DeleteTopicState, "6+")
    topic_names: list[str] = array(string, "0-5", ignorable=True)
    timeout_ms: int = int32()


class DeleteTopicsResponse(Response, key=ApiKey.DELETE_TOPICS, versions="1-6", flexible="4+"):
    """The outcome per topic."""

    class DeletableTopicResult(Struct):
        name: str | None = string(nullable="6+")
        topic_id: UUID = uuid("6+", ignorable=True)
        error_code: int = int16()
        error_message: str | None = string("5+", nullable=True, default=None, ignorable=True)

    throttle_time_ms: int = int32()
    responses: list[DeletableTopicResult] = array(DeletableTopicResult)


class CreatePartitionsRequest(Request, key=ApiKey.CREATE_PARTITIONS, versions="0-3", flexible="2+"):
    """Adds partitions to topics."""

    class CreatePartitionsAssignment(Struct):
        broker_ids: list[int] = array(int32)

    class CreatePartitionsTopic(Struct):
        name: str = string()
        count: int = int32()
        assignments: list[CreatePartitionsRequest.CreatePartitionsAssignment] | None = array(
            "CreatePartitionsAssignment", nullable=True
        )

    topics: list[CreatePartitionsTopic] = array(CreatePartitionsTopic)
    timeout_ms: int = int32()
    validate_only: bool = boolean()


class CreatePartitionsResponse(Response, key=ApiKey.CREATE_PARTITIONS, versions="0-3", flexible="2+"):
    """The outcome per topic."""

    class CreatePartitionsTopicResult(Struct):
        name: str = string()
        error_code: int = int16()
        error_message: str | None = string(nullable=True, default=None)

    throttle_time_ms: int = int32()
    results: list[CreatePartitionsTopicResult] = array(CreatePartitionsTopicResult)
