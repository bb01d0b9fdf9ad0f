"""Share groups: queues on top of partitions (KIP-932)."""

from __future__ import annotations

from uuid import UUID

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
    records,
    string,
    uuid,
)


class ShareGroupHeartbeatRequest(Request, key=ApiKey.SHARE_GROUP_HEARTBEAT, versions="1", flexible="0+"):
    """A share-group member's heartbeat."""

    group_id: str = string()
    member_id: str = string()
    member_epoch: int = int32()
    rack_id: str | None = string(nullable=True, default=None)
    subscribed_topic_names: list[str] | None = array(string, nullable=True, default=None)


class ShareGroupHeartbeatResponse(Response, key=ApiKey.SHARE_GROUP_HEARTBEAT, versions="1", flexible="0+"):
    """The member's epoch and, when it changed, its assignment."""

    class TopicPartitions(Struct):
        topic_id: UUID = uuid()
        partitions: list[int] = array(int32)

    class Assignment(Struct):
        topic_partitions: list[ShareGroupHeartbeatResponse.TopicPartitions] = array("TopicPartitions")

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    member_id: str | None = string(nullable=True, default=None)
    member_epoch: int = int32()
    heartbeat_interval_ms: int = int32()
    assignment: Assignment | None = nested(Assignment, nullable=True)


class ShareGroupDescribeRequest(Request, key=ApiKey.SHARE_GROUP_DESCRIBE, versions="1", flexible="0+"):
    """Asks for the state and members of share groups."""

    group_ids: list[str] = array(string)
    include_authorized_operations: bool = boolean()


class ShareGroupDescribeResponse(Response, key=ApiKey.SHARE_GROUP_DESCRIBE, versions="1", flexible="0+"):
    """Epochs, members and assignments per group."""

    class TopicPartitions(Struct):
        topic_id: UUID = uuid()
        topic_name: str = string()
        partitions: list[int] = array(int32)

    class Assignment(Struct):
        topic_partitions: list[ShareGroupDescribeResponse.TopicPartitions] = array("TopicPartitions")

    class Member(Struct):
        member_id: str = string()
        rack_id: str | None = string(nullable=True, default=None)
        member_epoch: int = int32()
        client_id: str = string()
        client_host: str = string()
        subscribed_topic_names: list[str] = array(string)
        assignment: ShareGroupDescribeResponse.Assignment = nested("Assignment")

    class DescribedGroup(Struct):
        error_code: int = int16()
        error_message: str | None = string(nullable=True, default=None)
        group_id: str = string()
        group_state: str = string()
        group_epoch: int = int32()
        assignment_epoch: int = int32()
        assignor_name: str = string()
        members: list[ShareGroupDescribeResponse.Member] = array("Member")
        authorized_operations: int = int32(default=-2147483648)

    throttle_time_ms: int = int32()
    groups: list[DescribedGroup] = array(DescribedGroup)


class ShareFetchRequest(Request, key=ApiKey.SHARE_FETCH, versions="1-2", flexible="0+"):
    """Acquires records of share partitions and acknowledges earlier ones."""

    class AcknowledgementBatch(Struct):
        first_offset: int = int64()
        last_offset: int = int64()
        acknowledge_types: list[int] = array(int8)

    class FetchPartition(Struct):
        partition_index: int = int32()
        acknowledgement_batches: list[ShareFetchRequest.AcknowledgementBatch] = array("AcknowledgementBatch")

    class FetchTopic(Struct):
        topic_id: UUID = uuid()
        partitions: list[ShareFetchRequest.FetchPartition] = array("FetchPartition")

    class ForgottenTopic(Struct):
        topic_id: UUID = uuid()
        partitions: list[int] = array(int32)

    group_id: str | None = string(nullable=True, default=None)
    member_id: str | None = string(nullable=True)
    share_session_epoch: int = int32()
    max_wait_ms: int = int32()
    min_bytes: int = int32()
    max_bytes: int = int32(default=0x7FFFFFFF)
    max_records: int = int32()
    batch_size: int = int32()
    share_acquire_mode: int = int8("2+", ignorable=True)
    is_renew_ack: bool = boolean("2+")
    topics: list[FetchTopic] = array(FetchTopic)
    forgotten_topics_data: list[ForgottenTopic] = array(ForgottenTopic)


class ShareFetchResponse(Response, key=ApiKey.SHARE_FETCH, versions="1-2", flexible="0+"):
    """Records with the ranges that were acquired."""

    class LeaderIdAndEpoch(Struct):
        leader_id: int = int32()
        leader_epoch: int = int32()

    class AcquiredRecords(Struct):
        first_offset: int = int64()
        last_offset: int = int64()
        delivery_count: int = int16()

    class PartitionData(Struct):
        partition_index: int = int32()
        error_code: int = int16()
        error_message: str | None = string(nullable=True, default=None)
        acknowledge_error_code: int = int16()
        acknowledge_error_message: str | None = string(nullable=True, default=None)
        current_leader: ShareFetchResponse.LeaderIdAndEpoch = nested("LeaderIdAndEpoch")
        records: bytes | memoryview = records(nullable=False)
        acquired_records: list[ShareFetchResponse.AcquiredRecords] = array("AcquiredRecords")

    class ShareFetchableTopicResponse(Struct):
        topic_id: UUID = uuid()
        partitions: list[ShareFetchResponse.PartitionData] = array("PartitionData")

    class NodeEndpoint(Struct):
        node_id: int = int32()
        host: str = string()
        port: int = int32()
        rack: str | None = string(nullable=True, default=None)

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    acquisition_lock_timeout_ms: int = int32()
    responses: list[ShareFetchableTopicResponse] = array(ShareFetchableTopicResponse)
    node_endpoints: list[NodeEndpoint] = array(NodeEndpoint)


class ShareAcknowledgeRequest(Request, key=ApiKey.SHARE_ACKNOWLEDGE, versions="1-2", flexible="0+"):
    """Acknowledges acquired records without fetching."""

    class AcknowledgementBatch(Struct):
        first_offset: int = int64()
        last_offset: int = int64()
        acknowledge_types: list[int] = array(int8)

    class AcknowledgePartition(Struct):
        partition_index: int = int32()
        acknowledgement_batches: list[ShareAcknowledgeRequest.AcknowledgementBatch] = array("AcknowledgementBatch")

    class AcknowledgeTopic(Struct):
        topic_id: UUID = uuid()
        partitions: list[ShareAcknowledgeRequest.AcknowledgePartition] = array("AcknowledgePartition")

    group_id: str | None = string(nullable=True, default=None)
    member_id: str | None = string(nullable=True)
    share_session_epoch: int = int32()
    is_renew_ack: bool = boolean("2+")
    topics: list[AcknowledgeTopic] = array(AcknowledgeTopic)


class ShareAcknowledgeResponse(Response, key=ApiKey.SHARE_ACKNOWLEDGE, versions="1-2", flexible="0+"):
    """The outcome per partition."""

    class LeaderIdAndEpoch(Struct):
        leader_id: int = int32()
        leader_epoch: int = int32()

    class PartitionData(Struct):
        partition_index: int = int32()
        error_code: int = int16()
        error_message: str | None = string(nullable=True, default=None)
        current_leader: ShareAcknowledgeResponse.LeaderIdAndEpoch = nested("LeaderIdAndEpoch")

    class ShareAcknowledgeTopicResponse(Struct):
        topic_id: UUID = uuid()
        partitions: list[ShareAcknowledgeResponse.PartitionData] = array("PartitionData")

    class NodeEndpoint(Struct):
        node_id: int = int32()
        host: str = string()
        port: int = int32()
        rack: str | None = string(nullable=True, default=None)

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    acquisition_lock_timeout_ms: int = int32("2+", ignorable=True)
    responses: list[ShareAcknowledgeTopicResponse] = array(ShareAcknowledgeTopicResponse)
    node_endpoints: list[NodeEndpoint] = array(NodeEndpoint)


class DescribeShareGroupOffsetsRequest(Request, key=ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS, versions="0-1", flexible="0+"):
    """Asks for the start offsets of share groups."""

    class DescribeShareGroupOffsetsRequestTopic(Struct):
        topic_name: str = string()
        partitions: list[int] = array(int32)

    class DescribeShareGroupOffsetsRequestGroup(Struct):
        group_id: str = string()
        topics: list[DescribeShareGroupOffsetsRequest.DescribeShareGroupOffsetsRequestTopic] | None = array(
            "DescribeShareGroupOffsetsRequestTopic", nullable=True
        )

    groups: list[DescribeShareGroupOffsetsRequestGroup] = array(DescribeShareGroupOffsetsRequestGroup)


class DescribeShareGroupOffsetsResponse(
    Response, key=ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS, versions="0-1", flexible="0+"
):
    """Start offsets per group and partition."""

    class DescribeShareGroupOffsetsResponsePartition(Struct):
        partition_index: int = int32()
        start_offset: int = int64()
        leader_epoch: int = int32()
        lag: int = int64("1+", default=-1, ignorable=True)
        error_code: int = int16()
        error_message: str | None = string(nullable=True, default=None)

    class DescribeShareGroupOffsetsResponseTopic(Struct):
        topic_name: str = string()
        topic_id: UUID = uuid()
        partitions: list[DescribeShareGroupOffsetsResponse.DescribeShareGroupOffsetsResponsePartition] = array(
            "DescribeShareGroupOffsetsResponsePartition"
        )

    class DescribeShareGroupOffsetsResponseGroup(Struct):
        group_id: str = string()
        topics: list[DescribeShareGroupOffsetsResponse.DescribeShareGroupOffsetsResponseTopic] = array(
            "DescribeShareGroupOffsetsResponseTopic"
        )
        error_code: int = int16()
        error_message: str | None = string(nullable=True, default=None)

    throttle_time_ms: int = int32()
    groups: list[DescribeShareGroupOffsetsResponseGroup] = array(DescribeShareGroupOffsetsResponseGroup)


class AlterShareGroupOffsetsRequest(Request, key=ApiKey.ALTER_SHARE_GROUP_OFFSETS, versions="0", flexible="0+"):
    """Sets the start offsets of a share group."""

    class AlterShareGroupOffsetsRequestPartition(Struct):
        partition_index: int = int32()
        start_offset: int = int64()

    class AlterShareGroupOffsetsRequestTopic(Struct):
        topic_name: str = string()
        partitions: list[AlterShareGroupOffsetsRequest.AlterShareGroupOffsetsRequestPartition] = array(
            "AlterShareGroupOffsetsRequestPartition"
        )

    group_id: str = string()
    topics: list[AlterShareGroupOffsetsRequestTopic] = array(AlterShareGroupOffsetsRequestTopic)


class AlterShareGroupOffsetsResponse(Response, key=ApiKey.ALTER_SHARE_GROUP_OFFSETS, versions="0", flexible="0+"):
    """The outcome per partition."""

    class AlterShareGroupOffsetsResponsePartition(Struct):
        partition_index: int = int32()
        error_code: int = int16()
        error_message: str | None = string(nullable=True, default=None)

    class AlterShareGroupOffsetsResponseTopic(Struct):
        topic_name: str = string()
        topic_id: UUID = uuid()
        partitions: list[AlterShareGroupOffsetsResponse.AlterShareGroupOffsetsResponsePartition] = array(
            "AlterShareGroupOffsetsResponsePartition"
        )

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    responses: list[AlterShareGroupOffsetsResponseTopic] = array(AlterShareGroupOffsetsResponseTopic)


class DeleteShareGroupOffsetsRequest(Request, key=ApiKey.DELETE_SHARE_GROUP_OFFSETS, versions="0", flexible="0+"):
    """Deletes the offsets of a share group for topics."""

    class DeleteShareGroupOffsetsRequestTopic(Struct):
        topic_name: str = string()

    group_id: str = string()
    topics: list[DeleteShareGroupOffsetsRequestTopic] = array(DeleteShareGroupOffsetsRequestTopic)


class DeleteShareGroupOffsetsResponse(Response, key=ApiKey.DELETE_SHARE_GROUP_OFFSETS, versions="0", flexible="0+"):
    """The outcome per topic."""

    class DeleteShareGroupOffsetsResponseTopic(Struct):
        topic_name: str = string()
        topic_id: UUID = uuid()
        error_code: int = int16()
        error_message: str | None = string(nullable=True, default=None)

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    responses: list[DeleteShareGroupOffsetsResponseTopic] = array(DeleteShareGroupOffsetsResponseTopic)
