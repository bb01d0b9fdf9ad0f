"""Offsets committed by consumer groups."""

from __future__ import annotations

from uuid import UUID

from millrace.wire.keys import ApiKey
from millrace.wire.schema import Request, Response, Struct, array, boolean, int16, int32, int64, string, uuid


class OffsetCommitRequest(Request, key=ApiKey.OFFSET_COMMIT, versions="2-10", flexible="8+"):
    """Commits offsets for a group; from v10 topics go by id."""

    class OffsetCommitRequestPartition(Struct):
        partition_index: int = int32()
        committed_offset: int = int64()
        committed_leader_epoch: int = int32("6+", default=-1, ignorable=True)
        committed_metadata: str | None = string(nullable=True)

    class OffsetCommitRequestTopic(Struct):
        name: str = string("0-9", ignorable=True)
        topic_id: UUID = uuid("10+", ignorable=True)
        partitions: list[OffsetCommitRequest.OffsetCommitRequestPartition] = array("OffsetCommitRequestPartition")

    group_id: str = string()
    generation_id_or_member_epoch: int = int32(default=-1)
    member_id: str = string()
    group_instance_id: str | None = string("7+", nullable=True, default=None)
    retention_time_ms: int = int64("2-4", default=-1, ignorable=True)
    topics: list[OffsetCommitRequestTopic] = array(OffsetCommitRequestTopic)


class OffsetCommitResponse(Response, key=ApiKey.OFFSET_COMMIT, versions="2-10", flexible="8+"):
    """The outcome per partition."""

    class OffsetCommitResponsePartition(Struct):
        partition_index: int = int32()
        error_code: int = int16()

    class OffsetCommitResponseTopic(Struct):
        name: str = string("0-9", ignorable=True)
        topic_id: UUID = uuid("10+", ignorable=True)
        partitions: list[OffsetCommitResponse.OffsetCommitResponsePartition] = array("OffsetCommitResponsePartition")

    throttle_time_ms: int = int32("3+", ignorable=True)
    topics: list[OffsetCommitResponseTopic] = array(OffsetCommitResponseTopic)


class OffsetFetchRequest(Request, key=ApiKey.OFFSET_FETCH, versions="1-10", flexible="6+"):
    """Asks for the offsets of one group, from v8 on of several; from v10 topics go by id."""

    class OffsetFetchRequestTopic(Struct):
        name: str = string("0-7")
        partition_indexes: list[int] = array(int32, "0-7")

    class OffsetFetchRequestTopics(Struct):
        name: str = string("8-9", ignorable=True)
        topic_id: UUID = uuid("10+", ignorable=True)
        partition_indexes: list[int] = array(int32, "8+")

    class OffsetFetchRequestGroup(Struct):
        group_id: str = string("8+")
        member_id: str | None = string("9+", nullable=True, default=None, ignorable=True)
        member_epoch: int = int32("9+", default=-1, ignorable=True)
        topics: list[OffsetFetchRequest.OffsetFetchRequestTopics] | None = array(
            "OffsetFetchRequestTopics", "8+", nullable=True
        )

    group_id: str = string("0-7")
    topics: list[OffsetFetchRequestTopic] | None = array(OffsetFetchRequestTopic, "0-7", nullable="2-7")
    groups: list[OffsetFetchRequestGroup] = array(OffsetFetchRequestGroup, "8+")
    require_stable: bool = boolean("7+")


class OffsetFetchResponse(Response, key=ApiKey.OFFSET_FETCH, versions="1-10", flexible="6+"):
    """Committed offsets per partition."""

    class OffsetFetchResponsePartition(Struct):
        partition_index: int = int32("0-7")
        committed_offset: int = int64("0-7")
        committed_leader_epoch: int = int32("5-7", default=-1, ignorable=True)
        metadata: str | None = string("0-7", nullable=True)
        error_code: int = int16("0-7")

    class OffsetFetchResponseTopic(Struct):
        name: str = string("0-7")
        partitions: list[OffsetFetchResponse.OffsetFetchResponsePartition] = array(
            "OffsetFetchResponsePartition", "0-7"
        )

    class OffsetFetchResponsePartitions(Struct):
        partition_index: int = int32("8+")
        committed_offset: int = int64("8+")
        committed_leader_epoch: int = int32("8+", default=-1, ignorable=True)
        metadata: str | None = string("8+", nullable=True)
        error_code: int = int16("8+")

    class OffsetFetchResponseTopics(Struct):
        name: str = string("8-9", ignorable=True)
        topic_id: UUID = uuid("10+", ignorable=True)
        partitions: list[OffsetFetchResponse.OffsetFetchResponsePartitions] = array(
            "OffsetFetchResponsePartitions", "8+"
        )

    class OffsetFetchResponseGroup(Struct):
        group_id: str = string("8+")
        topics: list[OffsetFetchResponse.OffsetFetchResponseTopics] = array("OffsetFetchResponseTopics", "8+")
        error_code: int = int16("8+")

    throttle_time_ms: int = int32("3+", ignorable=True)
    topics: list[OffsetFetchResponseTopic] = array(OffsetFetchResponseTopic, "0-7")
    error_code: int = int16("2-7", ignorable=True)
    groups: list[OffsetFetchResponseGroup] = array(OffsetFetchResponseGroup, "8+")


class OffsetDeleteRequest(Request, key=ApiKey.OFFSET_DELETE, versions="0"):
    """Deletes committed offsets of a group."""

    class OffsetDeleteRequestPartition(Struct):
        partition_index: int = int32()

    class OffsetDeleteRequestTopic(Struct):
        name: str = string()
        partitions: list[OffsetDeleteRequest.OffsetDeleteRequestPartition] = array("OffsetDeleteRequestPartition")

    group_id: str = string()
    topics: list[OffsetDeleteRequestTopic] = array(OffsetDeleteRequestTopic)


class OffsetDeleteResponse(Response, key=ApiKey.OFFSET_DELETE, versions="0"):
    """The outcome per partition."""

    class OffsetDeleteResponsePartition(Struct):
        partition_index: int = int32()
        error_code: int = int16()

    class OffsetDeleteResponseTopic(Struct):
        name: str = string()
        partitions: list[OffsetDeleteResponse.OffsetDeleteResponsePartition] = array("OffsetDeleteResponsePartition")

    error_code: int = int16()
    throttle_time_ms: int = int32()
    topics: list[OffsetDeleteResponseTopic] = array(OffsetDeleteResponseTopic)
