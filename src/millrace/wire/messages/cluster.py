"""Brokers, topics and partition leaders as clients see them."""

from __future__ import annotations

from uuid import UUID

from millrace.wire.keys import ApiKey
from millrace.wire.schema import Request, Response, Struct, array, boolean, int8, int16, int32, nested, string, uuid


class MetadataRequest(Request, key=ApiKey.METADATA, versions="0-13", flexible="9+"):
    """Asks for brokers and topics, and may create topics. All topics: an empty list in v0, null from v1 on."""

    class MetadataRequestTopic(Struct):
        topic_id: UUID = uuid("10+", ignorable=True)
        name: str | None = string(nullable="10+")

    topics: list[MetadataRequestTopic] | None = array(MetadataRequestTopic, nullable="1+")
    allow_auto_topic_creation: bool = boolean("4+", default=True)
    include_cluster_authorized_operations: bool = boolean("8-10")
    include_topic_authorized_operations: bool = boolean("8+")


class MetadataResponse(Response, key=ApiKey.METADATA, versions="0-13", flexible="9+"):
    """Brokers, the controller and the requested topics."""

    class MetadataResponseBroker(Struct):
        node_id: int = int32()
        host: str = string()
        port: int = int32()
        rack: str | None = string("1+", nullable=True, default=None, ignorable=True)

    class MetadataResponsePartition(Struct):
        error_code: int = int16()
        partition_index: int = int32()
        leader_id: int = int32()
        leader_epoch: int = int32("7+", default=-1, ignorable=True)
        replica_nodes: list[int] = array(int32)
        isr_nodes: list[int] = array(int32)
        offline_replicas: list[int] = array(int32, "5+", ignorable=True)

    class MetadataResponseTopic(Struct):
        error_code: int = int16()
        name: str | None = string(nullable="12+")
        topic_id: UUID = uuid("10+", ignorable=True)
        is_internal: bool = boolean("1+", ignorable=True)
        partitions: list[MetadataResponse.MetadataResponsePartition] = array("MetadataResponsePartition")
        topic_authorized_operations: int = int32("8+", default=-2147483648)

    throttle_time_ms: int = int32("3+", ignorable=True)
    brokers: list[MetadataResponseBroker] = array(MetadataResponseBroker)
    cluster_id: str | None = string("2+", nullable=True, default=None, ignorable=True)
    controller_id: int = int32("1+", default=-1, ignorable=True)
    topics: list[MetadataResponseTopic] = array(MetadataResponseTopic)
    cluster_authorized_operations: int = int32("8-10", default=-2147483648)
    error_code: int = int16("13+", ignorable=True)


class DescribeClusterRequest(Request, key=ApiKey.DESCRIBE_CLUSTER, versions="0-2", flexible="0+"):
    """Asks for the cluster's id and endpoints."""

    include_cluster_authorized_operations: bool = boolean()
    endpoint_type: int = int8("1+", default=1)
    include_fenced_brokers: bool = boolean("2+")


class DescribeClusterResponse(Response, key=ApiKey.DESCRIBE_CLUSTER, versions="0-2", flexible="0+"):
    """Cluster id, controller and endpoints."""

    class DescribeClusterBroker(Struct):
        broker_id: int = int32()
        host: str = string()
        port: int = int32()
        rack: str | None = string(nullable=True, default=None)
        is_fenced: bool = boolean("2+")

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    endpoint_type: int = int8("1+", default=1)
    cluster_id: str = string()
    controller_id: int = int32(default=-1)
    brokers: list[DescribeClusterBroker] = array(DescribeClusterBroker)
    cluster_authorized_operations: int = int32(default=-2147483648)


class UnregisterBrokerRequest(Request, key=ApiKey.UNREGISTER_BROKER, versions="0", flexible="0+"):
    """Removes the registration of a broker."""

    broker_id: int = int32()


class UnregisterBrokerResponse(Response, key=ApiKey.UNREGISTER_BROKER, versions="0", flexible="0+"):
    """The outcome."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)


class DescribeTopicPartitionsRequest(Request, key=ApiKey.DESCRIBE_TOPIC_PARTITIONS, versions="0", flexible="0+"):
    """Asks for the partitions of topics, page by page."""

    class TopicRequest(Struct):
        name: str = string()

    class Cursor(Struct):
        topic_name: str = string()
        partition_index: int = int32()

    topics: list[TopicRequest] = array(TopicRequest)
    response_partition_limit: int = int32(default=2000)
    cursor: Cursor | None = nested(Cursor, nullable=True)


class DescribeTopicPartitionsResponse(Response, key=ApiKey.DESCRIBE_TOPIC_PARTITIONS, versions="0", flexible="0+"):
    """A page of partitions and the cursor of the next."""

    class DescribeTopicPartitionsResponsePartition(Struct):
        error_code: int = int16()
        partition_index: int = int32()
        leader_id: int = int32()
        leader_epoch: int = int32(default=-1)
        replica_nodes: list[int] = array(int32)
        isr_nodes: list[int] = array(int32)
        eligible_leader_replicas: list[int] | None = array(int32, nullable=True, default=None)
        last_known_elr: list[int] | None = array(int32, nullable=True, default=None)
        offline_replicas: list[int] = array(int32)

    class DescribeTopicPartitionsResponseTopic(Struct):
        error_code: int = int16()
        name: str | None = string(nullable=True)
        topic_id: UUID = uuid()
        is_internal: bool = boolean()
        partitions: list[DescribeTopicPartitionsResponse.DescribeTopicPartitionsResponsePartition] = array(
            "DescribeTopicPartitionsResponsePartition"
        )
        topic_authorized_operations: int = int32(default=-2147483648)

    class Cursor(Struct):
        topic_name: str = string()
        partition_index: int = int32()

    throttle_time_ms: int = int32()
    topics: list[DescribeTopicPartitionsResponseTopic] = array(DescribeTopicPartitionsResponseTopic)
    next_cursor: Cursor | None = nested(Cursor, nullable=True)
