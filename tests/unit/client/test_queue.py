"""A member of a queue against a scripted broker: what it asks, when it asks again, and what it no longer believes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from millrace.client.cluster import ClusterClient
from millrace.client.queue import QueueConsumer, QueueRecord, ShareSession, Verdict, ranges, read_acquired
from millrace.client.settings import ClientSettings
from millrace.clock import ManualClock
from millrace.errors import ApiError, ErrorCode
from millrace.model import TopicPartition
from millrace.records.decode import Record
from millrace.records.encode import encode_batch
from millrace.wire.keys import ApiKey
from millrace.wire.messages.cluster import MetadataResponse
from millrace.wire.messages.groups import FindCoordinatorResponse
from millrace.wire.messages.share_groups import (
    ShareAcknowledgeRequest,
    ShareAcknowledgeResponse,
    ShareFetchRequest,
    ShareFetchResponse,
    ShareGroupHeartbeatRequest,
    ShareGroupHeartbeatResponse,
)
from support.batches import with_header
from support.fake_broker import HOST, FakeBroker, metadata

TOPIC = uuid.UUID(int=7)
CONTROL = 0x20


def batch(first: int, count: int) -> bytes:
    records = [Record(first + index, 1000, None, b"%d" % (first + index)) for index in range(count)]
    return encode_batch(records, base_offset=first)


def acquired(*ranges_: tuple[int, int, int]) -> list[ShareFetchResponse.AcquiredRecords]:
    return [
        ShareFetchResponse.AcquiredRecords(first_offset=first, last_offset=last, delivery_count=count)
        for first, last, count in ranges_
    ]


class TestPureParts:
    """What needs no broker."""

    @pytest.mark.parametrize(
        ("offsets", "expected"),
        [([], []), ([3], [(3, 3)]), ([5, 1, 2, 3, 7, 6], [(1, 3), (5, 7)])],
    )
    def test_ranges(self, offsets: list[int], expected: list[tuple[int, int]]) -> None:
        assert list(ranges(offsets)) == expected

    def test_only_what_was_acquired_of_a_batch(self) -> None:
        data = ShareFetchResponse.PartitionData(
            records=batch(10, 6), acquired_records=acquired((11, 12, 1), (14, 14, 3))
        )
        found, gaps = read_acquired(data)
        assert [(record.offset, record.value, count) for record, count in found] == [
            (11, b"11", 1),
            (12, b"12", 1),
            (14, b"14", 3),
        ]
        assert gaps == set()

    def test_offsets_without_a_record_are_gaps(self) -> None:
        control = with_header(batch(3, 1), attributes=CONTROL)
        data = ShareFetchResponse.PartitionData(
            records=batch(0, 2) + control + batch(6, 1), acquired_records=acquired((0, 6, 1))
        )
        found, gaps = read_acquired(data)
        assert [record.offset for record, _ in found] == [0, 1, 6]
        assert gaps == {2, 3, 4, 5}

    def test_a_session_counts_and_wraps(self) -> None:
        session = ShareSession(partitions=frozenset({(TOPIC, 0), (TOPIC, 1)}))
        wanted = frozenset({(TOPIC, 1), (TOPIC, 2)})
        assert session.changes(wanted) == ({(TOPIC, 2)}, {(TOPIC, 0)})
        session.answered()
        assert session.epoch == 1
        session.epoch = (1 << 31) - 1
        session.answered()
        assert session.epoch == 1, "zero would begin a new session"


class Script:
    """One broker that leads everything and coordinates the group; tests change what it says."""

    def __init__(self) -> None:
        self.fetch_errors: list[ErrorCode] = []
        self.heartbeat_errors: list[ErrorCode] = []
        self.refused = ErrorCode.NONE
        self.waiting: list[tuple[bytes, list[ShareFetchResponse.AcquiredRecords]]] = []
        self.broker = FakeBroker()
        self.broker.answers = {
            ApiKey.METADATA: lambda _: self._metadata(),
            ApiKey.FIND_COORDINATOR: lambda _: FindCoordinatorResponse(node_id=1, host=HOST, port=self.broker.port),
            ApiKey.SHARE_GROUP_HEARTBEAT: self._heartbeat,
            ApiKey.SHARE_FETCH: self._fetch,
            ApiKey.SHARE_ACKNOWLEDGE: self._acknowledge,
        }

    def _metadata(self) -> MetadataResponse:
        response = metadata([self.broker], {"t": [1, 1]})
        response.topics[0].topic_id = TOPIC
        return response

    def _heartbeat(self, request: ShareGroupHeartbeatRequest) -> ShareGroupHeartbeatResponse:
        if self.heartbeat_errors:
            return ShareGroupHeartbeatResponse(error_code=self.heartbeat_errors.pop(0))
        assigned = ShareGroupHeartbeatResponse.TopicPartitions(topic_id=TOPIC, partitions=[0, 1])
        joins = request.member_epoch == 0
        return ShareGroupHeartbeatResponse(
            member_id=request.member_id,
            member_epoch=request.member_epoch + 1 if joins else request.member_epoch,
            heartbeat_interval_ms=5000,
            assignment=ShareGroupHeartbeatResponse.Assignment(topic_partitions=[assigned]) if joins else None,
        )

    def _fetch(self, _: ShareFetchRequest) -> ShareFetchResponse:
        if self.fetch_errors:
            return ShareFetchResponse(error_code=self.fetch_errors.pop(0))
        partitions = []
        if self.waiting:
            records, taken = self.waiting.pop(0)
            partitions = [ShareFetchResponse.PartitionData(partition_index=0, records=records, acquired_records=taken)]
        return ShareFetchResponse(
            acquisition_lock_timeout_ms=10_000,
            responses=[ShareFetchResponse.ShareFetchableTopicResponse(topic_id=TOPIC, partitions=partitions)],
        )

    def _acknowledge(self, request: ShareAcknowledgeRequest) -> ShareAcknowledgeResponse:
        return ShareAcknowledgeResponse(
            responses=[
                ShareAcknowledgeResponse.ShareAcknowledgeTopicResponse(
                    topic_id=topic.topic_id,
                    partitions=[
                        ShareAcknowledgeResponse.PartitionData(
                            partition_index=each.partition_index, error_code=self.refused
                        )
                        for each in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )

    def told(self) -> list[tuple[int, bool, list[tuple[int, int, list[int]]]]]:
        """Epoch, whether it renews, and the ranges of every ShareAcknowledge."""
        return [
            (
                request.share_session_epoch,
                request.is_renew_ack,
                [
                    (each.first_offset, each.last_offset, each.acknowledge_types)
                    for topic in request.topics
                    for partition in topic.partitions
                    for each in partition.acknowledgement_batches
                ],
            )
            for request in self.broker.asked(ApiKey.SHARE_ACKNOWLEDGE)
        ]

    def epochs(self) -> list[int]:
        return [request.share_session_epoch for request in self.broker.asked(ApiKey.SHARE_FETCH)]


@pytest.fixture
def script() -> Iterator[Script]:
    made = Script()
    with made.broker:
        yield made


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def consumer(script: Script, clock: ManualClock) -> Iterator[QueueConsumer]:
    properties = {"bootstrap.servers": script.broker.bootstrap, "retry.backoff.ms": "1"}
    with ClusterClient(ClientSettings.from_properties(properties)) as client:
        yield QueueConsumer(client, "g", ["t"], clock=clock)


def poll(consumer: QueueConsumer) -> list[QueueRecord]:
    return consumer.poll(max_records=10, max_wait_ms=0)


def test_a_member_joins_reads_accepts_and_leaves(script: Script, consumer: QueueConsumer) -> None:
    script.waiting = [(batch(0, 3), acquired((0, 2, 1)))]
    taken = poll(consumer)
    assert [(each.partition, each.record.value, each.delivery_count) for each in taken] == [
        (TopicPartition("t", 0), b"%d" % number, 1) for number in range(3)
    ]
    assert consumer.acknowledge([taken[0], taken[2]], Verdict.ACCEPT) == []
    assert consumer.acknowledge([taken[1]], Verdict.REJECT) == []
    assert poll(consumer) == []
    consumer.close()

    heartbeats = script.broker.asked(ApiKey.SHARE_GROUP_HEARTBEAT)
    assert [(each.member_epoch, each.subscribed_topic_names) for each in heartbeats] == [(0, ["t"]), (-1, None)]
    assert len({each.member_id for each in heartbeats}) == 1
    first, second = script.broker.asked(ApiKey.SHARE_FETCH)
    assert [each.partition_index for topic in first.topics for each in topic.partitions] == [0, 1]
    assert second.topics == [], "the session knows the partitions"
    assert script.epochs() == [0, 3]
    assert script.told() == [
        (1, False, [(0, 0, [1]), (2, 2, [1])]),
        (2, False, [(1, 1, [3])]),
        (-1, False, []),
    ]


def test_gaps_are_told_at_once(script: Script, consumer: QueueConsumer) -> None:
    script.waiting = [(batch(0, 1) + batch(3, 1), acquired((0, 3, 1)))]
    assert [each.record.offset for each in poll(consumer)] == [0, 3]
    assert script.told() == [(1, False, [(1, 2, [0])])]


def test_a_lost_session_begins_anew_and_takes_what_was_held_along(script: Script, consumer: QueueConsumer) -> None:
    script.waiting = [(batch(0, 1), acquired((0, 0, 1)))]
    (taken,) = poll(consumer)
    script.fetch_errors = [ErrorCode.SHARE_SESSION_NOT_FOUND]
    assert poll(consumer) == []
    assert poll(consumer) == []
    assert script.epochs() == [0, 1, 0]
    again = script.broker.asked(ApiKey.SHARE_FETCH)[-1]
    assert [each.partition_index for topic in again.topics for each in topic.partitions] == [0, 1]
    ((record, error),) = consumer.acknowledge([taken], Verdict.ACCEPT)
    assert (record, error.code) == (taken, ErrorCode.INVALID_RECORD_STATE)
    assert script.told() == [], "it is known without asking"


def test_a_member_that_was_removed_joins_again(script: Script, consumer: QueueConsumer, clock: ManualClock) -> None:
    script.waiting = [(batch(0, 1), acquired((0, 0, 1)))]
    (taken,) = poll(consumer)
    script.heartbeat_errors = [ErrorCode.UNKNOWN_MEMBER_ID]
    clock.advance(5)
    consumer.tend()  # learns it
    consumer.tend()  # joins
    assert [each.member_epoch for each in script.broker.asked(ApiKey.SHARE_GROUP_HEARTBEAT)] == [0, 1, 0]
    assert consumer.acknowledge([taken], Verdict.ACCEPT)[0][1].code is ErrorCode.INVALID_RECORD_STATE
    poll(consumer)
    assert script.epochs() == [0, 0]


def test_locks_are_renewed_at_half_their_time(script: Script, consumer: QueueConsumer, clock: ManualClock) -> None:
    script.waiting = [(batch(0, 2), acquired((0, 1, 1)))]
    first, second = poll(consumer)
    assert consumer.tend_within_s == 5
    clock.advance(4.9)
    consumer.tend()
    assert script.told() == []
    clock.advance(0.1)
    consumer.tend()
    assert script.told() == [(1, True, [(0, 1, [4])])]
    assert consumer.acknowledge([first], Verdict.ACCEPT) == []
    clock.advance(5)
    consumer.tend()
    assert script.told()[1:] == [(2, False, [(0, 0, [1])]), (3, True, [(1, 1, [4])])]
    assert consumer.acknowledge([second], Verdict.RELEASE) == []
    clock.advance(5)
    consumer.tend()
    assert len(script.told()) == 4, "nothing is held"


def test_an_old_broker_is_not_asked_to_renew(script: Script, consumer: QueueConsumer, clock: ManualClock) -> None:
    script.broker.max_versions = {ApiKey.SHARE_ACKNOWLEDGE: 1, ApiKey.SHARE_FETCH: 1}
    script.waiting = [(batch(0, 1), acquired((0, 0, 1)))]
    (taken,) = poll(consumer)
    clock.advance(20)
    consumer.tend()
    assert script.told() == []
    script.refused = ErrorCode.INVALID_RECORD_STATE
    assert [error.code for _, error in consumer.acknowledge([taken], Verdict.ACCEPT)] == [
        ErrorCode.INVALID_RECORD_STATE
    ]


def test_what_will_not_pass_is_raised(script: Script, consumer: QueueConsumer) -> None:
    script.heartbeat_errors = [ErrorCode.GROUP_AUTHORIZATION_FAILED]
    with pytest.raises(ApiError, match="queue 'g'") as raised:
        poll(consumer)
    assert raised.value.code is ErrorCode.GROUP_AUTHORIZATION_FAILED
