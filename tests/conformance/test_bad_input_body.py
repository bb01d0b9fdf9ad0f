"""Bad input, request bodies: counts and lengths that lie, and values that no client should send.

Bytes that cannot be a request get their connection closed. A request that can be read but not be granted gets a Kafka
error in its place, and the connection goes on. Where Kafka's answer depends on its own order of checks, every answer
that a client could live with is allowed.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from millrace.errors import ErrorCode
from millrace.wire.keys import ApiKey
from millrace.wire.messages.cluster import DescribeTopicPartitionsRequest, MetadataRequest
from millrace.wire.messages.configs import (
    AlterConfigsRequest,
    DescribeConfigsRequest,
    IncrementalAlterConfigsRequest,
    ListConfigResourcesRequest,
)
from millrace.wire.messages.fetch import FetchRequest
from millrace.wire.messages.group_offsets import OffsetCommitRequest, OffsetDeleteRequest, OffsetFetchRequest
from millrace.wire.messages.groups import (
    DeleteGroupsRequest,
    DescribeGroupsRequest,
    FindCoordinatorRequest,
    HeartbeatRequest,
    JoinGroupRequest,
    LeaveGroupRequest,
    ListGroupsRequest,
    SyncGroupRequest,
)
from millrace.wire.messages.log_dirs import DescribeLogDirsRequest
from millrace.wire.messages.offsets import ListOffsetsRequest, OffsetForLeaderEpochRequest
from millrace.wire.messages.produce import ProduceRequest
from millrace.wire.messages.producers import DescribeProducersRequest, InitProducerIdRequest
from millrace.wire.messages.records import DeleteRecordsRequest
from millrace.wire.messages.topics import CreatePartitionsRequest, CreateTopicsRequest, DeleteTopicsRequest
from millrace.wire.primitives import uvarint
from millrace.wire.schema import Request
from support.raw import MIB, WatchedBroker, batch, error_codes, fetch_request, framed, produce_request

E = ErrorCode
TOPIC = "body"
INT_MAX = 2**31 - 1
LONG_MAX = 2**63 - 1
ZERO = uuid.UUID(int=0)
NOBODY = uuid.UUID(int=77)
TOPIC_RESOURCE, BROKER_RESOURCE = 2, 4


@pytest.fixture(scope="module")
def broker() -> Iterator[WatchedBroker]:
    with WatchedBroker() as running:
        with running.connect() as client:
            client.create_topic(TOPIC, partitions=3)
            assert client.produce(TOPIC, batch(b"a", b"b", b"c")).error_code == 0
        yield running


# --- bytes that are no request ----------------------------------------------------------------------------------------


def int16(value: int) -> bytes:
    return struct.pack(">h", value)


def int32(value: int) -> bytes:
    return struct.pack(">i", value)


def text(value: bytes) -> bytes:
    return int16(len(value)) + value


def compact(value: bytes) -> bytes:
    return uvarint(len(value) + 1) + value


METADATA_END = b"\0\0\0\0"
PRODUCE_3 = int16(-1) + int16(1) + int32(1000)
PRODUCE_9 = b"\0" + int16(1) + int32(1000)
FETCH_4 = struct.pack(">iiiib", -1, 0, 0, 0, 0)
FETCH_12 = struct.pack(">iiiibii", -1, 0, 0, 0, 0, 0, -1)
OVERLONG = b"\x80\x80\x80\x80\x80\x00"

UNREADABLE: dict[str, tuple[ApiKey, int, bytes]] = {
    # counts
    "array-minus-2": (ApiKey.DELETE_TOPICS, 1, int32(-2) + int32(1000)),
    "array-null-where-it-may-not-be": (ApiKey.DELETE_TOPICS, 1, int32(-1) + int32(1000)),
    "array-minimum": (ApiKey.DELETE_TOPICS, 1, int32(-(2**31)) + int32(1000)),
    "array-maximum": (ApiKey.DELETE_TOPICS, 1, int32(INT_MAX) + int32(1000)),
    "array-one-too-many": (ApiKey.DELETE_TOPICS, 1, int32(2) + text(b"only-one")),
    "compact-array-0-where-it-may-not-be": (ApiKey.CREATE_TOPICS, 5, b"\0" + int32(1000) + b"\0\0"),
    "compact-array-maximum": (ApiKey.METADATA, 9, uvarint(2**32 - 1) + METADATA_END),
    "compact-array-2-31": (ApiKey.METADATA, 9, uvarint(2**31) + METADATA_END),
    "compact-array-of-6-bytes": (ApiKey.METADATA, 9, OVERLONG + METADATA_END),
    "compact-array-of-11-bytes": (ApiKey.METADATA, 9, b"\x80" * 10 + b"\x01" + METADATA_END),
    "metadata-v1-array-maximum": (ApiKey.METADATA, 1, int32(INT_MAX)),
    "nested-array-maximum": (
        ApiKey.CREATE_TOPICS,
        2,
        int32(1) + text(b"t") + int32(1) + int16(1) + int32(INT_MAX),
    ),
    "nested-ints-maximum": (
        ApiKey.CREATE_TOPICS,
        2,
        int32(1) + text(b"t") + int32(-1) + int16(-1) + int32(1) + int32(0) + int32(INT_MAX) + bytes(100),
    ),
    "nested-arrays-all-maximum": (
        ApiKey.CREATE_TOPICS,
        5,
        b"".join([uvarint(2**31), compact(b"t"), int32(1), int16(1), uvarint(2**31), int32(0), uvarint(2**31)]),
    ),
    "groups-array-maximum": (ApiKey.DESCRIBE_GROUPS, 0, int32(INT_MAX) + text(b"g")),
    "offset-commit-array-maximum": (
        ApiKey.OFFSET_COMMIT,
        2,
        text(b"g") + int32(-1) + text(b"") + struct.pack(">q", -1) + int32(INT_MAX),
    ),
    # hand-written readers
    "produce-topics-minus-1": (ApiKey.PRODUCE, 3, PRODUCE_3 + int32(-1)),
    "produce-topics-minus-2": (ApiKey.PRODUCE, 3, PRODUCE_3 + int32(-2)),
    "produce-topics-maximum": (ApiKey.PRODUCE, 3, PRODUCE_3 + int32(INT_MAX)),
    "produce-partitions-maximum": (ApiKey.PRODUCE, 3, PRODUCE_3 + int32(1) + text(b"t") + int32(INT_MAX)),
    "produce-records-minus-2": (
        ApiKey.PRODUCE,
        3,
        PRODUCE_3 + int32(1) + text(b"t") + int32(1) + int32(0) + int32(-2),
    ),
    "produce-records-maximum": (
        ApiKey.PRODUCE,
        3,
        PRODUCE_3 + int32(1) + text(b"t") + int32(1) + int32(0) + int32(INT_MAX),
    ),
    "produce-compact-topics-0": (ApiKey.PRODUCE, 9, PRODUCE_9 + b"\0\0"),
    "produce-compact-topics-maximum": (ApiKey.PRODUCE, 9, PRODUCE_9 + uvarint(2**32 - 1) + b"\0"),
    "produce-compact-partitions-0": (ApiKey.PRODUCE, 9, PRODUCE_9 + b"\x02" + compact(b"t") + b"\0\0\0"),
    "produce-compact-records-maximum": (
        ApiKey.PRODUCE,
        9,
        PRODUCE_9 + b"\x02" + compact(b"t") + b"\x02" + int32(0) + uvarint(2**32 - 1) + b"\0\0\0",
    ),
    "produce-null-name": (ApiKey.PRODUCE, 9, PRODUCE_9 + b"\x02" + b"\0" + b"\x01\0\0"),
    "produce-name-over-the-rest": (ApiKey.PRODUCE, 9, PRODUCE_9 + b"\x02" + uvarint(10_000) + b"t"),
    "produce-id-cut": (ApiKey.PRODUCE, 13, PRODUCE_9 + b"\x02" + bytes(9)),
    "fetch-topics-minus-1": (ApiKey.FETCH, 4, FETCH_4 + int32(-1)),
    "fetch-topics-maximum": (ApiKey.FETCH, 4, FETCH_4 + int32(INT_MAX)),
    "fetch-partitions-maximum": (ApiKey.FETCH, 4, FETCH_4 + int32(1) + text(b"t") + int32(INT_MAX)),
    "fetch-compact-topics-0": (ApiKey.FETCH, 12, FETCH_12 + b"\0\x01\x01\0"),
    "fetch-compact-topics-maximum": (ApiKey.FETCH, 12, FETCH_12 + uvarint(2**32 - 1) + b"\x01\x01\0"),
    "fetch-forgotten-0": (ApiKey.FETCH, 12, FETCH_12 + b"\x01\0\x01\0"),
    "fetch-forgotten-ints-maximum": (
        ApiKey.FETCH,
        12,
        FETCH_12 + b"\x01\x02" + compact(b"t") + uvarint(2**31) + bytes(50),
    ),
    "fetch-null-rack": (ApiKey.FETCH, 12, FETCH_12 + b"\x01\x01\0\0"),
    "fetch-tags-flood": (ApiKey.FETCH, 12, FETCH_12 + b"\x01\x01\x01" + uvarint(2**31) + b"\x01\0" * 100_000),
    "fetch-replica-state-cut": (ApiKey.FETCH, 15, FETCH_12[4:] + b"\x01\x01\x01" + b"\x01\x01\x02\0\0"),
    # strings and bytes
    "string-minus-2": (ApiKey.FIND_COORDINATOR, 0, int16(-2)),
    "string-null-where-it-may-not-be": (ApiKey.FIND_COORDINATOR, 0, int16(-1)),
    "string-minimum": (ApiKey.FIND_COORDINATOR, 0, int16(-32768)),
    "string-over-the-rest": (ApiKey.FIND_COORDINATOR, 0, int16(100) + b"short"),
    "string-maximum": (ApiKey.FIND_COORDINATOR, 0, int16(32767) + b"short"),
    "string-not-utf-8": (ApiKey.FIND_COORDINATOR, 0, text(b"\xff\xfe\xfd")),
    "string-surrogate": (ApiKey.FIND_COORDINATOR, 0, text(b"\xed\xa0\x80")),
    "compact-string-0-where-it-may-not-be": (ApiKey.FIND_COORDINATOR, 3, b"\0\0\0"),
    "compact-string-over-the-rest": (ApiKey.FIND_COORDINATOR, 3, uvarint(200) + b"short\0\0"),
    "compact-string-maximum": (ApiKey.FIND_COORDINATOR, 3, uvarint(2**32 - 1) + b"short\0\0"),
    "compact-string-of-11-bytes": (ApiKey.FIND_COORDINATOR, 3, b"\xff" * 11 + b"short\0\0"),
    "bytes-minus-2": (
        ApiKey.SYNC_GROUP,
        0,
        text(b"g") + int32(1) + text(b"m") + int32(1) + text(b"m") + int32(-2),
    ),
    "bytes-maximum": (
        ApiKey.SYNC_GROUP,
        0,
        text(b"g") + int32(1) + text(b"m") + int32(1) + text(b"m") + int32(INT_MAX),
    ),
    "structure-null-flag-7": (ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, b"\x01" + int32(10) + b"\x07" + b"\0"),
    "uuid-cut": (ApiKey.DELETE_TOPICS, 6, b"\x02\0" + bytes(7)),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_bytes_that_are_no_request_are_refused(broker: WatchedBroker, case: str) -> None:
    key, version, body = UNREADABLE[case]
    broker.refuses(framed(key, version, body))


def test_a_null_array_may_be_any_negative_count(broker: WatchedBroker) -> None:
    """Kafka reads every negative count of a nullable array as null; a refusal is as good."""
    with broker.unharmed(), broker.connect() as client:
        client.send(framed(ApiKey.METADATA, 1, int32(-2)))
        client.socket.settimeout(1)
        client.socket.recv(65536)


# A megabyte or two of the smallest elements there are: what they become in memory must stay bounded.
ELEMENTS = 700_000
SMALL_ELEMENTS: dict[str, tuple[ApiKey, int, bytes]] = {
    "metadata-names": (ApiKey.METADATA, 9, uvarint(ELEMENTS + 1) + b"\x01\0" * ELEMENTS + b"\0\0\0\0"),
    "metadata-v1-names": (ApiKey.METADATA, 1, int32(ELEMENTS) + b"\0\0" * ELEMENTS),
    "delete-topics-names": (ApiKey.DELETE_TOPICS, 4, uvarint(ELEMENTS + 1) + b"\x01" * ELEMENTS + int32(1) + b"\0"),
    "describe-groups": (ApiKey.DESCRIBE_GROUPS, 5, uvarint(ELEMENTS + 1) + b"\x01" * ELEMENTS + b"\0\0"),
    "find-coordinators": (ApiKey.FIND_COORDINATOR, 4, b"\0" + uvarint(ELEMENTS + 1) + b"\x01" * ELEMENTS + b"\0"),
    "create-topics": (
        ApiKey.CREATE_TOPICS,
        5,
        uvarint(ELEMENTS // 3 + 1) + (b"\x01" + bytes(6) + b"\x01\x01\0") * (ELEMENTS // 3) + bytes(6),
    ),
    "describe-configs": (
        ApiKey.DESCRIBE_CONFIGS,
        4,
        uvarint(ELEMENTS // 2 + 1) + b"\x02\x01\0\0" * (ELEMENTS // 2) + b"\0\0\0",
    ),
    "list-offsets-topics": (
        ApiKey.LIST_OFFSETS,
        6,
        int32(-1) + b"\0" + uvarint(ELEMENTS + 1) + b"\x01\x01\0" * ELEMENTS + b"\0",
    ),
    "describe-producers-ints": (
        ApiKey.DESCRIBE_PRODUCERS,
        0,
        b"\x02" + compact(b"t") + uvarint(ELEMENTS + 1) + int32(9) * ELEMENTS + b"\0\0",
    ),
    "produce-topics": (ApiKey.PRODUCE, 9, PRODUCE_9 + uvarint(ELEMENTS + 1) + b"\x01\x01\0" * ELEMENTS + b"\0"),
    "produce-partitions": (
        ApiKey.PRODUCE,
        9,
        PRODUCE_9 + b"\x02\x02t" + uvarint(ELEMENTS // 2 + 1) + b"\0\0\0\x07\0\0" * (ELEMENTS // 2) + b"\0\0",
    ),
    "fetch-topics": (
        ApiKey.FETCH,
        12,
        FETCH_12 + uvarint(ELEMENTS + 1) + b"\x01\x01\0" * ELEMENTS + b"\x01\x01\0",
    ),
    "fetch-partitions": (
        ApiKey.FETCH,
        12,
        FETCH_12 + b"\x02\x02t" + uvarint(60_000 + 1) + bytes(33) * 60_000 + b"\0\x01\x01\0",
    ),
    "fetch-forgotten-topics": (
        ApiKey.FETCH,
        12,
        FETCH_12 + b"\x01" + uvarint(ELEMENTS + 1) + b"\x01\x01\0" * ELEMENTS + b"\x01\0",
    ),
    "fetch-forgotten-ints": (
        ApiKey.FETCH,
        12,
        FETCH_12 + b"\x01\x02\x02t" + uvarint(ELEMENTS + 1) + int32(70_000) * ELEMENTS + b"\0\x01\0",
    ),
}


@pytest.mark.parametrize("case", SMALL_ELEMENTS)
def test_cve_2026_111108_a_flood_of_small_elements_stays_small(broker: WatchedBroker, case: str) -> None:
    """The count is true, but an element of two bytes becomes an object of a hundred."""
    key, version, body = SMALL_ELEMENTS[case]
    with broker.unharmed(), broker.connect() as client:
        client.try_send(framed(key, version, body))
        client.socket.settimeout(5)
        client.socket.recv(1)  # an answer or the end of the connection


# --- requests that cannot be granted ----------------------------------------------------------------------------------


def produce_to(*partitions: int, topic: str = TOPIC, acks: int = -1, timeout_ms: int = 5000) -> ProduceRequest:
    data = [ProduceRequest.PartitionProduceData(index=index, records=batch()) for index in partitions]
    topics = [ProduceRequest.TopicProduceData(name=topic, partition_data=data)]
    return ProduceRequest(acks=acks, timeout_ms=timeout_ms, topic_data=topics)


def produce_by_id(topic_id: uuid.UUID) -> ProduceRequest:
    data = [ProduceRequest.PartitionProduceData(index=0, records=batch())]
    return ProduceRequest(acks=-1, topic_data=[ProduceRequest.TopicProduceData(topic_id=topic_id, partition_data=data)])


def fetch_by_id(topic_id: uuid.UUID) -> FetchRequest:
    wanted = [FetchRequest.FetchPartition(partition=0, partition_max_bytes=1000)]
    return FetchRequest(topics=[FetchRequest.FetchTopic(topic_id=topic_id, partitions=wanted)])


def list_offsets(*timestamps: int, topic: str = TOPIC, partition: int = 0, epoch: int = -1) -> ListOffsetsRequest:
    asked = [
        ListOffsetsRequest.ListOffsetsPartition(
            partition_index=partition, timestamp=timestamp, current_leader_epoch=epoch
        )
        for timestamp in timestamps
    ]
    return ListOffsetsRequest(replica_id=-1, topics=[ListOffsetsRequest.ListOffsetsTopic(name=topic, partitions=asked)])


def delete_records(offset: int, *, partition: int = 0, timeout_ms: int = 1000) -> DeleteRecordsRequest:
    wanted = [DeleteRecordsRequest.DeleteRecordsPartition(partition_index=partition, offset=offset)]
    topics = [DeleteRecordsRequest.DeleteRecordsTopic(name=TOPIC, partitions=wanted)]
    return DeleteRecordsRequest(topics=topics, timeout_ms=timeout_ms)


def create(*names: str, partitions: int = 1, factor: int = 1, timeout_ms: int = 5000, **fields: Any) -> Request:
    topics = [
        CreateTopicsRequest.CreatableTopic(name=name, num_partitions=partitions, replication_factor=factor, **fields)
        for name in names
    ]
    return CreateTopicsRequest(topics=topics, timeout_ms=timeout_ms)


def assignments(*replicas: list[int], first: int = 0) -> list[CreateTopicsRequest.CreatableReplicaAssignment]:
    return [
        CreateTopicsRequest.CreatableReplicaAssignment(partition_index=first + index, broker_ids=brokers)
        for index, brokers in enumerate(replicas)
    ]


def configs(*pairs: tuple[str, str | None]) -> list[CreateTopicsRequest.CreatableTopicConfig]:
    return [CreateTopicsRequest.CreatableTopicConfig(name=name, value=value) for name, value in pairs]


def more_partitions(count: int, *names: str) -> CreatePartitionsRequest:
    topics = [
        CreatePartitionsRequest.CreatePartitionsTopic(name=name, count=count, assignments=None)
        for name in names or (TOPIC,)
    ]
    return CreatePartitionsRequest(topics=topics, timeout_ms=5000)


def join(**changes: Any) -> JoinGroupRequest:
    protocol = JoinGroupRequest.JoinGroupRequestProtocol(name="range", metadata=b"")
    values: dict[str, Any] = {
        "group_id": "g",
        "session_timeout_ms": 10_000,
        "rebalance_timeout_ms": 10_000,
        "protocol_type": "consumer",
        "protocols": [protocol],
        **changes,
    }
    return JoinGroupRequest(**values)


def commit(offset: int = 1, **changes: Any) -> OffsetCommitRequest:
    fields = {key: changes.pop(key) for key in ("committed_metadata", "partition_index") if key in changes}
    topic = changes.pop("topic", TOPIC)
    partition = OffsetCommitRequest.OffsetCommitRequestPartition(committed_offset=offset, **fields)
    topics = [OffsetCommitRequest.OffsetCommitRequestTopic(name=topic, partitions=[partition])]
    return OffsetCommitRequest(**{"group_id": "committers", "topics": topics, **changes})


def describe_configs(resource_type: int, name: str, keys: list[str] | None = None) -> DescribeConfigsRequest:
    resource = DescribeConfigsRequest.DescribeConfigsResource(
        resource_type=resource_type, resource_name=name, configuration_keys=keys
    )
    return DescribeConfigsRequest(resources=[resource])


def alter(
    resource_type: int, resource: str, *changes: tuple[str, int, str | None], times: int = 1
) -> IncrementalAlterConfigsRequest:
    wanted = [
        IncrementalAlterConfigsRequest.AlterableConfig(name=name, config_operation=operation, value=value)
        for name, operation, value in changes
    ]
    resources = [
        IncrementalAlterConfigsRequest.AlterConfigsResource(
            resource_type=resource_type, resource_name=resource, configs=wanted
        )
        for _ in range(times)
    ]
    return IncrementalAlterConfigsRequest(resources=resources)


def session(session_id: int, epoch: int) -> FetchRequest:
    return fetch_request(TOPIC, 0, session_id=session_id, session_epoch=epoch)


def epoch_end(leader_epoch: int, *, current: int = -1, partition: int = 0) -> OffsetForLeaderEpochRequest:
    wanted = [
        OffsetForLeaderEpochRequest.OffsetForLeaderPartition(
            partition=partition, current_leader_epoch=current, leader_epoch=leader_epoch
        )
    ]
    return OffsetForLeaderEpochRequest(
        topics=[OffsetForLeaderEpochRequest.OffsetForLeaderTopic(topic=TOPIC, partitions=wanted)]
    )


def metadata(*topics: tuple[str | None, uuid.UUID]) -> MetadataRequest:
    return MetadataRequest(
        topics=[MetadataRequest.MetadataRequestTopic(name=name, topic_id=topic_id) for name, topic_id in topics],
        allow_auto_topic_creation=False,
    )


def offset_fetch(*groups: str) -> OffsetFetchRequest:
    return OffsetFetchRequest(
        groups=[OffsetFetchRequest.OffsetFetchRequestGroup(group_id=group, topics=None) for group in groups]
    )


UNKNOWN = {E.UNKNOWN_TOPIC_OR_PARTITION}
OUT_OF_RANGE = {E.OFFSET_OUT_OF_RANGE}
INVALID = {E.INVALID_REQUEST}

UNGRANTED: dict[str, tuple[Request, int, set[ErrorCode]]] = {
    # Produce
    "produce-acks-2": (produce_to(0, acks=2), 9, {E.INVALID_REQUIRED_ACKS}),
    "produce-acks-minus-2": (produce_to(0, acks=-2), 9, {E.INVALID_REQUIRED_ACKS}),
    "produce-acks-maximum": (produce_to(0, acks=32767), 3, {E.INVALID_REQUIRED_ACKS}),
    "produce-partition-minus-1": (produce_to(-1), 9, UNKNOWN),
    "produce-partition-maximum": (produce_to(INT_MAX), 9, UNKNOWN),
    "produce-unknown-topic": (produce_to(0, topic="nobody"), 9, UNKNOWN),
    "produce-null-records": (produce_request(TOPIC, None), 9, {E.INVALID_RECORD, E.CORRUPT_MESSAGE}),
    "produce-empty-records": (produce_request(TOPIC, b""), 9, {E.INVALID_RECORD, E.CORRUPT_MESSAGE}),
    "produce-negative-timeout": (produce_to(0, timeout_ms=-1), 9, {E.NONE, E.REQUEST_TIMED_OUT}),
    "produce-minimum-timeout": (produce_to(0, timeout_ms=-(2**31)), 9, {E.NONE, E.REQUEST_TIMED_OUT}),
    "produce-same-partition-twice": (produce_to(1, 1), 9, {E.NONE, E.INVALID_REQUEST}),
    "produce-uuid-zero": (produce_by_id(ZERO), 13, {E.UNKNOWN_TOPIC_ID}),
    "produce-uuid-unknown": (produce_by_id(NOBODY), 13, {E.UNKNOWN_TOPIC_ID}),
    "produce-nothing": (ProduceRequest(acks=1), 9, set()),
    # Fetch
    "fetch-offset-minus-1": (fetch_request(TOPIC, -1), 12, OUT_OF_RANGE),
    "fetch-offset-minus-3": (fetch_request(TOPIC, -3), 12, OUT_OF_RANGE),
    "fetch-offset-minimum": (fetch_request(TOPIC, -(2**63)), 12, OUT_OF_RANGE),
    "fetch-offset-maximum": (fetch_request(TOPIC, LONG_MAX), 12, OUT_OF_RANGE),
    "fetch-partition-minus-1": (fetch_request(TOPIC, 0, partition=-1), 12, UNKNOWN),
    "fetch-partition-maximum": (fetch_request(TOPIC, 0, partition=INT_MAX), 12, UNKNOWN),
    "fetch-max-bytes-minus-1": (fetch_request(TOPIC, 0, max_bytes=-1), 12, {E.NONE}),
    "fetch-max-bytes-0": (fetch_request(TOPIC, 0, max_bytes=0), 12, {E.NONE}),
    "fetch-partition-max-bytes-minimum": (fetch_request(TOPIC, 0, partition_max_bytes=-(2**31)), 12, {E.NONE}),
    "fetch-min-bytes-minimum": (fetch_request(TOPIC, 0, min_bytes=-(2**31)), 12, {E.NONE}),
    "fetch-min-over-max": (fetch_request(TOPIC, 0, min_bytes=INT_MAX, max_bytes=1, max_wait_ms=50), 12, {E.NONE}),
    "fetch-max-wait-minus-1": (fetch_request(TOPIC, 0, min_bytes=INT_MAX, max_wait_ms=-1), 12, {E.NONE}),
    "fetch-max-wait-minimum": (fetch_request(TOPIC, 0, min_bytes=INT_MAX, max_wait_ms=-(2**31)), 12, {E.NONE}),
    "fetch-unknown-topic-max-wait": (fetch_request("nobody", 0, max_wait_ms=INT_MAX), 12, UNKNOWN),
    "fetch-uuid-zero": (fetch_by_id(ZERO), 13, {E.UNKNOWN_TOPIC_ID, E.NONE}),
    "fetch-uuid-unknown": (fetch_by_id(NOBODY), 13, {E.UNKNOWN_TOPIC_ID, E.NONE}),
    "fetch-session-unknown": (session(12345, 1), 12, {E.FETCH_SESSION_ID_NOT_FOUND}),
    "fetch-session-negative": (session(-1, 5), 12, {E.FETCH_SESSION_ID_NOT_FOUND}),
    "fetch-session-epoch-minimum": (session(0, -(2**31)), 12, {E.FETCH_SESSION_ID_NOT_FOUND}),
    "fetch-session-epoch-maximum": (session(1, INT_MAX), 12, {E.FETCH_SESSION_ID_NOT_FOUND}),
    "fetch-close-of-unknown-session": (session(77, -1), 12, {E.NONE}),
    "fetch-as-replica": (fetch_request(TOPIC, 0, replica_id=1), 12, {E.CLUSTER_AUTHORIZATION_FAILED}),
    "fetch-nothing": (FetchRequest(max_wait_ms=INT_MAX), 12, {E.NONE}),
    # ListOffsets
    "list-offsets-latest": (list_offsets(-1), 7, {E.NONE}),
    "list-offsets-max-timestamp-too-early": (list_offsets(-3), 6, {E.UNSUPPORTED_VERSION}),
    "list-offsets-earliest-local-too-early": (list_offsets(-4), 7, {E.UNSUPPORTED_VERSION}),
    "list-offsets-minus-7": (list_offsets(-7), 11, {E.UNSUPPORTED_VERSION}),
    "list-offsets-minimum": (list_offsets(-(2**63)), 11, {E.UNSUPPORTED_VERSION}),
    "list-offsets-maximum": (list_offsets(LONG_MAX), 7, {E.NONE}),
    "list-offsets-twice": (list_offsets(-1, -2), 7, INVALID),
    "list-offsets-partition-minus-1": (list_offsets(-1, partition=-1), 7, UNKNOWN),
    "list-offsets-epoch-of-tomorrow": (list_offsets(-1, epoch=INT_MAX), 7, {E.UNKNOWN_LEADER_EPOCH}),
    # OffsetForLeaderEpoch
    "epoch-minus-3": (epoch_end(-3), 4, {E.NONE}),
    "epoch-maximum": (epoch_end(INT_MAX), 4, {E.NONE}),
    "epoch-current-maximum": (epoch_end(0, current=INT_MAX), 4, {E.UNKNOWN_LEADER_EPOCH}),
    "epoch-partition-minus-1": (epoch_end(0, partition=-1), 4, UNKNOWN),
    # DeleteRecords
    "delete-records-minus-2": (delete_records(-2), 2, OUT_OF_RANGE),
    "delete-records-minus-3": (delete_records(-3), 2, OUT_OF_RANGE),
    "delete-records-maximum": (delete_records(LONG_MAX), 2, OUT_OF_RANGE),
    "delete-records-partition-minus-1": (delete_records(0, partition=-1), 2, UNKNOWN),
    "delete-records-negative-timeout": (delete_records(0, timeout_ms=-1), 2, {E.NONE, E.REQUEST_TIMED_OUT}),
    # CreateTopics and CreatePartitions
    "create-0-partitions": (create("n1", partitions=0), 7, {E.INVALID_PARTITIONS}),
    "create-minus-2-partitions": (create("n2", partitions=-2), 7, {E.INVALID_PARTITIONS}),
    "create-minimum-partitions": (create("n3", partitions=-(2**31)), 7, {E.INVALID_PARTITIONS}),
    "create-maximum-partitions": (
        create("n4", partitions=INT_MAX),
        7,
        {E.INVALID_PARTITIONS, E.POLICY_VIOLATION, E.INVALID_REQUEST},
    ),
    "create-20-million-partitions": (
        create("n5", partitions=20_000_000),
        7,
        {E.INVALID_PARTITIONS, E.POLICY_VIOLATION, E.INVALID_REQUEST},
    ),
    "create-factor-0": (create("n6", factor=0), 7, {E.INVALID_REPLICATION_FACTOR}),
    "create-factor-2": (create("n7", factor=2), 7, {E.INVALID_REPLICATION_FACTOR}),
    "create-factor-maximum": (create("n8", factor=32767), 7, {E.INVALID_REPLICATION_FACTOR}),
    "create-factor-minimum": (create("n9", factor=-32768), 7, {E.INVALID_REPLICATION_FACTOR}),
    "create-twice-in-one": (create("n10", "n10"), 7, INVALID),
    "create-existing": (create(TOPIC), 7, {E.TOPIC_ALREADY_EXISTS}),
    "create-negative-timeout": (create("n11", timeout_ms=-1), 7, {E.NONE, E.REQUEST_TIMED_OUT}),
    "create-assignment-and-count": (create("n12", assignments=assignments([1])), 7, INVALID),
    "create-assignment-to-nobody": (
        create("n13", partitions=-1, factor=-1, assignments=assignments([99])),
        7,
        {E.INVALID_REPLICA_ASSIGNMENT},
    ),
    "create-assignment-empty": (
        create("n14", partitions=-1, factor=-1, assignments=assignments([])),
        7,
        {E.INVALID_REPLICA_ASSIGNMENT},
    ),
    "create-assignment-twice-the-same": (
        create("n15", partitions=-1, factor=-1, assignments=assignments([1, 1])),
        7,
        {E.INVALID_REPLICA_ASSIGNMENT},
    ),
    "create-assignment-with-gap": (
        create("n16", partitions=-1, factor=-1, assignments=assignments([1], first=1)),
        7,
        {E.INVALID_REPLICA_ASSIGNMENT},
    ),
    "create-assignment-partition-maximum": (
        create("n17", partitions=-1, factor=-1, assignments=assignments([1], first=INT_MAX)),
        7,
        {E.INVALID_REPLICA_ASSIGNMENT},
    ),
    "create-unknown-setting": (create("n18", configs=configs(("no.such", "1"))), 7, {E.INVALID_CONFIG}),
    "create-bad-setting": (create("n19", configs=configs(("retention.ms", "soon"))), 7, {E.INVALID_CONFIG}),
    "create-null-setting": (create("n20", configs=configs(("retention.ms", None))), 7, {E.INVALID_CONFIG}),
    "create-setting-of-4000-digits": (
        create("n21", configs=configs(("retention.ms", "9" * 4000))),
        7,
        {E.INVALID_CONFIG},
    ),
    "create-setting-of-30000-digits": (
        create("n22", configs=configs(("retention.ms", "9" * 30_000))),
        7,
        {E.INVALID_CONFIG},
    ),
    "create-lags-the-wrong-way-round": (
        create("n23", configs=configs(("min.compaction.lag.ms", "11"), ("max.compaction.lag.ms", "10"))),
        7,
        {E.INVALID_CONFIG},
    ),
    "partitions-0": (more_partitions(0), 3, {E.INVALID_PARTITIONS}),
    "partitions-minus-1": (more_partitions(-1), 3, {E.INVALID_PARTITIONS}),
    "partitions-fewer": (more_partitions(1), 3, {E.INVALID_PARTITIONS}),
    "partitions-the-same": (more_partitions(3), 3, {E.INVALID_PARTITIONS}),
    "partitions-maximum": (
        more_partitions(INT_MAX),
        3,
        {E.INVALID_PARTITIONS, E.POLICY_VIOLATION, E.INVALID_REQUEST},
    ),
    "partitions-of-nobody": (more_partitions(9, "nobody"), 3, UNKNOWN),
    "partitions-twice-in-one": (more_partitions(9, TOPIC, TOPIC), 3, INVALID),
    # DeleteTopics
    "delete-nobody": (DeleteTopicsRequest(topic_names=["nobody"], timeout_ms=1000), 5, UNKNOWN),
    "delete-twice-in-one": (
        DeleteTopicsRequest(topic_names=["nobody", "nobody"], timeout_ms=1000),
        5,
        INVALID | UNKNOWN,
    ),
    "delete-uuid-unknown": (
        DeleteTopicsRequest(topics=[DeleteTopicsRequest.DeleteTopicState(topic_id=NOBODY)], timeout_ms=1000),
        6,
        {E.UNKNOWN_TOPIC_ID},
    ),
    "delete-uuid-zero": (
        DeleteTopicsRequest(topics=[DeleteTopicsRequest.DeleteTopicState(topic_id=ZERO)], timeout_ms=1000),
        6,
        INVALID,
    ),
    "delete-by-name-and-id": (
        DeleteTopicsRequest(
            topics=[DeleteTopicsRequest.DeleteTopicState(name="nobody", topic_id=NOBODY)], timeout_ms=1000
        ),
        6,
        INVALID,
    ),
    # Metadata and descriptions
    "metadata-uuid-zero": (metadata((None, ZERO)), 12, {E.INVALID_TOPIC_EXCEPTION, E.UNKNOWN_TOPIC_ID} | INVALID),
    "metadata-uuid-unknown": (metadata((None, NOBODY)), 12, {E.UNKNOWN_TOPIC_ID}),
    "metadata-twice": (metadata((TOPIC, ZERO), (TOPIC, ZERO)), 12, {E.NONE}),
    "metadata-by-name-and-id": (
        metadata((TOPIC, NOBODY)),
        12,
        {E.NONE, E.UNKNOWN_TOPIC_ID, E.INVALID_REQUEST},
    ),
    "describe-partitions-limit-0": (
        DescribeTopicPartitionsRequest(response_partition_limit=0),
        0,
        {E.NONE, E.INVALID_REQUEST},
    ),
    "describe-partitions-limit-minus-1": (
        DescribeTopicPartitionsRequest(response_partition_limit=-1),
        0,
        {E.NONE, E.INVALID_REQUEST},
    ),
    "describe-partitions-limit-maximum": (
        DescribeTopicPartitionsRequest(response_partition_limit=INT_MAX),
        0,
        {E.NONE},
    ),
    "describe-partitions-cursor-garbage": (
        DescribeTopicPartitionsRequest(
            topics=[DescribeTopicPartitionsRequest.TopicRequest(name=TOPIC)],
            cursor=DescribeTopicPartitionsRequest.Cursor(topic_name="\U0001f600", partition_index=-5),
        ),
        0,
        {E.NONE, E.INVALID_REQUEST, E.UNKNOWN_TOPIC_OR_PARTITION},
    ),
    "describe-partitions-cursor-in-order": (
        DescribeTopicPartitionsRequest(
            topics=[DescribeTopicPartitionsRequest.TopicRequest(name=TOPIC)],
            cursor=DescribeTopicPartitionsRequest.Cursor(topic_name=TOPIC, partition_index=-5),
        ),
        0,
        {E.NONE, E.INVALID_REQUEST},
    ),
    "describe-producers-partition-minus-1": (
        DescribeProducersRequest(topics=[DescribeProducersRequest.TopicRequest(name=TOPIC, partition_indexes=[-1])]),
        0,
        UNKNOWN,
    ),
    "describe-log-dirs-garbage": (
        DescribeLogDirsRequest(topics=[DescribeLogDirsRequest.DescribableLogDirTopic(topic="../x", partitions=[-1])]),
        4,
        {E.NONE},
    ),
    # InitProducerId
    "init-producer-timeout-of-none": (
        InitProducerIdRequest(transactional_id="t", transaction_timeout_ms=0),
        4,
        {E.INVALID_TRANSACTION_TIMEOUT},
    ),
    "init-producer-timeout-too-long": (
        InitProducerIdRequest(transactional_id="t", transaction_timeout_ms=INT_MAX),
        4,
        {E.INVALID_TRANSACTION_TIMEOUT},
    ),
    "init-producer-empty-id": (InitProducerIdRequest(transactional_id="", transaction_timeout_ms=1), 4, INVALID),
    "init-producer-id-without-epoch": (
        InitProducerIdRequest(transactional_id=None, producer_id=5, producer_epoch=-1),
        4,
        {E.NONE, E.INVALID_REQUEST},
    ),
    # groups
    "coordinator-of-unknown-kind": (FindCoordinatorRequest(key="g", key_type=7), 2, INVALID),
    "coordinator-of-negative-kind": (FindCoordinatorRequest(key="g", key_type=-1), 2, INVALID),
    "join-no-group": (join(group_id=""), 5, {E.INVALID_GROUP_ID}),
    "join-session-0": (join(session_timeout_ms=0), 5, {E.INVALID_SESSION_TIMEOUT}),
    "join-session-minus-1": (join(session_timeout_ms=-1), 5, {E.INVALID_SESSION_TIMEOUT}),
    "join-session-maximum": (join(session_timeout_ms=INT_MAX), 5, {E.INVALID_SESSION_TIMEOUT}),
    "join-unknown-member": (join(member_id="nobody"), 5, {E.UNKNOWN_MEMBER_ID}),
    "join-no-protocols": (join(protocols=[]), 5, {E.INCONSISTENT_GROUP_PROTOCOL}),
    "join-no-protocol-type": (join(protocol_type=""), 5, {E.INCONSISTENT_GROUP_PROTOCOL}),
    "join-unknown-static-member": (join(member_id="nobody", group_instance_id="i"), 5, {E.UNKNOWN_MEMBER_ID}),
    "sync-unknown": (SyncGroupRequest(group_id="nobody", generation_id=1, member_id="m"), 3, {E.UNKNOWN_MEMBER_ID}),
    "sync-no-group": (
        SyncGroupRequest(group_id="", generation_id=1, member_id="m"),
        3,
        {E.INVALID_GROUP_ID, E.UNKNOWN_MEMBER_ID},
    ),
    "heartbeat-unknown": (
        HeartbeatRequest(group_id="nobody", generation_id=-5, member_id="m"),
        3,
        {E.UNKNOWN_MEMBER_ID},
    ),
    "heartbeat-no-group": (
        HeartbeatRequest(group_id="", generation_id=INT_MAX, member_id=""),
        3,
        {E.INVALID_GROUP_ID, E.UNKNOWN_MEMBER_ID},
    ),
    "leave-unknown": (LeaveGroupRequest(group_id="nobody", member_id="m"), 2, {E.UNKNOWN_MEMBER_ID}),
    "describe-group-unknown": (DescribeGroupsRequest(groups=["nobody", ""]), 4, {E.NONE, E.INVALID_GROUP_ID}),
    "delete-group-unknown": (
        DeleteGroupsRequest(groups_names=["nobody", ""]),
        2,
        {E.GROUP_ID_NOT_FOUND, E.INVALID_GROUP_ID},
    ),
    "list-groups-of-no-state": (
        ListGroupsRequest(states_filter=["\0", "Nonsense"], types_filter=["nonsense"]),
        5,
        {E.NONE, E.INVALID_REQUEST},
    ),
    "commit-partition-minus-1": (commit(partition_index=-1), 9, UNKNOWN),
    "commit-partition-maximum": (commit(partition_index=INT_MAX), 9, UNKNOWN),
    "commit-unknown-topic": (commit(topic="nobody"), 9, UNKNOWN),
    "commit-huge-metadata": (commit(committed_metadata="x" * 5000), 9, {E.OFFSET_METADATA_TOO_LARGE}),
    "commit-generation-of-nobody": (
        commit(group_id="c2", generation_id_or_member_epoch=5, member_id="m"),
        9,
        {E.GROUP_ID_NOT_FOUND},
    ),
    "commit-generation-of-nobody-v8": (
        commit(group_id="c2", generation_id_or_member_epoch=5, member_id="m"),
        8,
        {E.ILLEGAL_GENERATION},
    ),
    "commit-no-group": (commit(group_id="", member_id="m"), 9, {E.INVALID_GROUP_ID, E.NONE, E.UNKNOWN_MEMBER_ID}),
    "commit-offset-minus-3": (commit(-3, group_id="c3"), 9, {E.NONE, E.INVALID_REQUEST, E.OFFSET_OUT_OF_RANGE}),
    "commit-offset-maximum": (commit(LONG_MAX, group_id="c3"), 9, {E.NONE}),
    "commit-retention-maximum": (commit(group_id="c4", retention_time_ms=LONG_MAX), 2, {E.NONE, E.INVALID_REQUEST}),
    "commit-retention-minimum": (commit(group_id="c4", retention_time_ms=-(2**63)), 4, {E.NONE, E.INVALID_REQUEST}),
    "offset-fetch-unknown-groups": (offset_fetch("nobody", "", "nobody"), 8, {E.NONE, E.INVALID_GROUP_ID}),
    "offset-delete-unknown": (
        OffsetDeleteRequest(group_id="nobody", topics=[OffsetDeleteRequest.OffsetDeleteRequestTopic(name="..")]),
        0,
        {E.GROUP_ID_NOT_FOUND},
    ),
    # configs
    "describe-configs-of-no-kind": (describe_configs(99, "x"), 4, INVALID),
    "describe-configs-of-negative-kind": (describe_configs(-128, "x"), 4, INVALID),
    "describe-configs-of-nobody": (describe_configs(2, "nobody"), 4, UNKNOWN),
    "describe-configs-of-bad-topic": (describe_configs(2, "../x"), 4, {E.INVALID_TOPIC_EXCEPTION} | UNKNOWN),
    "describe-configs-of-no-broker": (describe_configs(4, "one"), 4, INVALID),
    "describe-configs-of-other-broker": (describe_configs(4, "99"), 4, INVALID),
    "describe-configs-of-huge-broker": (describe_configs(4, "9" * 5000), 4, INVALID),
    "describe-configs-of-unicode-broker": (describe_configs(4, "\u0661"), 4, INVALID),
    "describe-configs-unknown-keys": (describe_configs(2, TOPIC, ["", "no.such", "\0"]), 4, {E.NONE}),
    "alter-unknown-setting": (alter(2, TOPIC, ("no.such", 0, "1")), 1, {E.INVALID_CONFIG}),
    "alter-bad-value": (alter(2, TOPIC, ("retention.ms", 0, "-99")), 1, {E.INVALID_CONFIG}),
    "alter-value-of-30000-digits": (alter(2, TOPIC, ("retention.ms", 0, "9" * 30_000)), 1, {E.INVALID_CONFIG}),
    "alter-lags-the-wrong-way-round": (
        alter(2, TOPIC, ("min.compaction.lag.ms", 0, "11"), ("max.compaction.lag.ms", 0, "10")),
        1,
        {E.INVALID_CONFIG},
    ),
    "alter-null-value": (alter(2, TOPIC, ("retention.ms", 0, None)), 1, INVALID | {E.INVALID_CONFIG}),
    "alter-unknown-operation": (alter(2, TOPIC, ("retention.ms", 9, "1")), 1, INVALID | {E.INVALID_CONFIG}),
    "alter-append-to-a-number": (alter(2, TOPIC, ("retention.ms", 2, "1")), 1, INVALID | {E.INVALID_CONFIG}),
    "alter-twice-the-same-key": (
        alter(2, TOPIC, ("retention.ms", 0, "1"), ("retention.ms", 0, "2")),
        1,
        INVALID,
    ),
    "alter-twice-the-same-resource": (alter(2, TOPIC, ("retention.ms", 0, "1"), times=2), 1, INVALID),
    "alter-of-no-kind": (alter(99, TOPIC, ("retention.ms", 0, "1")), 1, INVALID),
    "alter-of-nobody": (alter(2, "nobody", ("retention.ms", 0, "1")), 1, UNKNOWN),
    "alter-of-no-broker": (alter(4, "one", ("log.retention.ms", 0, "1")), 1, INVALID),
    "alter-read-only": (alter(4, "1", ("log.dirs", 0, "/etc")), 1, INVALID | {E.INVALID_CONFIG}),
    "old-alter-of-no-kind": (
        AlterConfigsRequest(resources=[AlterConfigsRequest.AlterConfigsResource(resource_type=99)]),
        2,
        INVALID,
    ),
    "old-alter-unknown-setting": (
        AlterConfigsRequest(
            resources=[
                AlterConfigsRequest.AlterConfigsResource(
                    resource_type=2,
                    resource_name=TOPIC,
                    configs=[AlterConfigsRequest.AlterableConfig(name="no.such", value="1")],
                )
            ]
        ),
        2,
        {E.INVALID_CONFIG},
    ),
    "list-resources-of-no-kind": (
        ListConfigResourcesRequest(resource_types=[99, -128]),
        1,
        {E.UNSUPPORTED_VERSION, E.NONE, E.INVALID_REQUEST},
    ),
}


@pytest.mark.parametrize("case", UNGRANTED)
def test_a_request_that_cannot_be_granted_gets_an_error(broker: WatchedBroker, case: str) -> None:
    request, version, allowed = UNGRANTED[case]
    with broker.unharmed(), broker.connect() as client:
        client.alive()
        response = client.call(request, version, within_s=1)
        found = error_codes(response) - ({E.NONE} if allowed != {E.NONE} else set())
        assert found or E.NONE in allowed or not allowed, f"granted: {response!r}"
        assert found <= allowed, f"{sorted(found)} instead of {sorted(allowed)}: {response!r}"
        client.alive()


def test_an_epoch_of_a_session_out_of_turn(broker: WatchedBroker) -> None:
    with broker.unharmed(), broker.connect() as client:
        opened = client.call(session(0, 0), 12)
        assert opened.error_code == 0
        assert opened.session_id > 0
        for epoch in (2, INT_MAX, -5):
            assert client.call(session(opened.session_id, epoch), 12).error_code == E.INVALID_FETCH_SESSION_EPOCH
        assert client.call(session(opened.session_id, 1), 12).error_code == E.NONE
        assert client.call(session(opened.session_id, 1), 12).error_code == E.INVALID_FETCH_SESSION_EPOCH
        # Closed, it is gone.
        assert client.call(session(opened.session_id, -1), 12).error_code == E.NONE
        assert client.call(session(opened.session_id, 2), 12).error_code == E.FETCH_SESSION_ID_NOT_FOUND


def test_a_wait_for_ever_ends_with_the_first_byte(broker: WatchedBroker) -> None:
    with broker.unharmed(), broker.connect() as waiting, broker.connect() as client:
        offset = client.produce(TOPIC, batch(), partition=2).base_offset + 1
        waiting.request(fetch_request(TOPIC, offset, partition=2, max_wait_ms=INT_MAX), 12)
        with pytest.raises(TimeoutError):
            waiting.read_frame(0.1)
        client.produce(TOPIC, batch(b"woken"), partition=2)
        response = waiting.response(ApiKey.FETCH, 12, within_s=1)
        assert b"woken" in bytes(response.responses[0].partitions[0].records)


def test_more_partitions_than_there_are(broker: WatchedBroker) -> None:
    """Thousands of partitions in one request, none of which exists: an error each, within a second."""
    count = 5000
    partitions = [FetchRequest.FetchPartition(partition=index) for index in range(10, 10 + count)]
    request = FetchRequest(max_wait_ms=INT_MAX, topics=[FetchRequest.FetchTopic(topic=TOPIC, partitions=partitions)])
    with broker.unharmed(), broker.connect() as client:
        response = client.call(request, 12, within_s=1)
        assert len(response.responses[0].partitions) == count
        assert error_codes(response) == {E.NONE} | UNKNOWN
        response = client.call(list_offsets(*([-1] * count)), 7, within_s=1)
        assert error_codes(response) == INVALID
        wanted = DescribeProducersRequest.TopicRequest(name=TOPIC, partition_indexes=list(range(10, 10 + count)))
        assert error_codes(client.call(DescribeProducersRequest(topics=[wanted]), 0, within_s=1)) == UNKNOWN


TIMES = 5000
REPEATED: dict[str, tuple[Request, int]] = {
    "describe-configs-of-a-topic": (
        DescribeConfigsRequest(
            resources=describe_configs(TOPIC_RESOURCE, TOPIC).resources * TIMES,
            include_synonyms=True,
            include_documentation=True,
        ),
        4,
    ),
    "describe-configs-of-the-broker": (
        DescribeConfigsRequest(resources=describe_configs(BROKER_RESOURCE, "1").resources * TIMES),
        4,
    ),
    "describe-producers": (
        DescribeProducersRequest(
            topics=[DescribeProducersRequest.TopicRequest(name="written", partition_indexes=[0] * TIMES)]
        ),
        0,
    ),
    "describe-groups": (DescribeGroupsRequest(groups=["heavy"] * TIMES), 4),
    "offset-fetch": (offset_fetch(*["heavy"] * TIMES), 8),
    "describe-partitions": (
        DescribeTopicPartitionsRequest(topics=[DescribeTopicPartitionsRequest.TopicRequest(name=TOPIC)] * TIMES),
        0,
    ),
    "describe-log-dirs": (
        DescribeLogDirsRequest(
            topics=[DescribeLogDirsRequest.DescribableLogDirTopic(topic=TOPIC, partitions=[0, 1, 2])] * TIMES
        ),
        4,
    ),
    "metadata": (metadata(*[(TOPIC, ZERO)] * TIMES), 12),
    "fetch": (
        FetchRequest(
            max_bytes=INT_MAX,
            topics=[
                FetchRequest.FetchTopic(
                    topic="heavy",
                    partitions=[FetchRequest.FetchPartition(partition=0, partition_max_bytes=INT_MAX)] * TIMES,
                )
            ],
        ),
        12,
    ),
    "coordinators": (FindCoordinatorRequest(key_type=0, coordinator_keys=["heavy"] * TIMES), 4),
}


@pytest.fixture(scope="module")
def laden(broker: WatchedBroker) -> WatchedBroker:
    """With a partition of many producers, a group of heavy members and offsets, and a log of some megabytes."""
    with broker.connect() as client:
        client.create_topic("written")
        for number in range(200):
            client.produce("written", batch(producer_id=number, producer_epoch=0, base_sequence=0), acks=1)
        client.create_topic("heavy")
        for _ in range(4):
            client.produce("heavy", batch(bytes(500_000)), acks=1)
        partition = OffsetCommitRequest.OffsetCommitRequestPartition(committed_offset=1, committed_metadata="m" * 4000)
        topics = [OffsetCommitRequest.OffsetCommitRequestTopic(name="heavy", partitions=[partition])]
        assert error_codes(client.call(OffsetCommitRequest(group_id="heavy", topics=topics), 8)) == {E.NONE}
        protocol = JoinGroupRequest.JoinGroupRequestProtocol(name="range", metadata=bytes(20_000))
        member = client.call(join(group_id="heavy", protocols=[protocol]), 5).member_id
        joined = client.call(join(group_id="heavy", protocols=[protocol], member_id=member), 5)
        assignment = SyncGroupRequest.SyncGroupRequestAssignment(member_id=member, assignment=bytes(20_000))
        sync = SyncGroupRequest(
            group_id="heavy", generation_id=joined.generation_id, member_id=member, assignments=[assignment]
        )
        assert client.call(sync, 3).error_code == 0
    return broker


@pytest.mark.parametrize("case", REPEATED)
def test_the_same_thing_asked_for_over_and_over(laden: WatchedBroker, case: str) -> None:
    """A small request for one thing thousands of times must not be a large answer, nor a long one."""
    request, version = REPEATED[case]
    with laden.unharmed(), laden.connect() as client:
        client.request(request, version)
        size = len(client.read_frame(2))
    assert size < 32 * MIB, f"an answer of {size / MIB:.0f} MiB"


def test_a_page_of_partitions_is_bounded(broker: WatchedBroker) -> None:
    """2,000 partitions are the most one DescribeTopicPartitions answer holds, whatever was asked for."""
    with broker.connect() as client:
        client.create_topic("wide", partitions=2100)
    request = DescribeTopicPartitionsRequest(
        topics=[DescribeTopicPartitionsRequest.TopicRequest(name="wide")], response_partition_limit=INT_MAX
    )
    with broker.unharmed(), broker.connect() as client:
        response = client.call(request, 0, within_s=1)
        assert len(response.topics[0].partitions) == 2000
        assert response.next_cursor.partition_index == 2000


def test_large_requests_that_are_refused_do_not_add_up(broker: WatchedBroker) -> None:
    """A whole frame of 20 MiB of nonsense, over and over: its bytes did arrive, but they are held once."""
    frame = framed(ApiKey.PRODUCE, 3, b"\xff" * (20 * MIB))
    with broker.unharmed(max_growth_bytes=80 * MIB):
        for _ in range(8):
            with broker.connect() as client:
                client.try_send(frame)
                client.expect_close(2)
