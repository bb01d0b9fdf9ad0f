"""The traps that other Kafka-compatible brokers fell into, each walked into over a socket.

Not here: aborted records and read_committed, which come with transactions.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator

import psutil
import pytest

from millrace.errors import ErrorCode
from millrace.records.batch import CRC_START, read_header, split
from millrace.records.decode import decode_records
from millrace.records.encode import Record, encode_batch
from millrace.wire.frame import decode_response, response_header_version
from millrace.wire.keys import ApiKey
from millrace.wire.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from millrace.wire.messages.configs import (
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    IncrementalAlterConfigsRequest,
)
from millrace.wire.messages.fetch import FetchRequest, FetchResponse
from millrace.wire.messages.group_offsets import OffsetCommitRequest, OffsetFetchRequest
from millrace.wire.messages.groups import HeartbeatRequest, JoinGroupRequest, JoinGroupResponse, SyncGroupRequest
from millrace.wire.messages.offsets import ListOffsetsRequest, ListOffsetsResponse
from millrace.wire.messages.producers import InitProducerIdRequest
from millrace.wire.messages.topics import DeleteTopicsRequest
from support.raw import RawClient, WatchedBroker, batch, error_codes, fetch_request, framed

E = ErrorCode
LATEST, EARLIEST, MAX_TIMESTAMP, EARLIEST_LOCAL = -1, -2, -3, -4
SET, DELETE, APPEND, SUBTRACT = 0, 1, 2, 3
TOPIC_RESOURCE, BROKER_RESOURCE = 2, 4
DEFAULT_CONFIG, DYNAMIC_TOPIC_CONFIG, STATIC_BROKER_CONFIG = 5, 1, 4


@pytest.fixture(scope="module")
def broker() -> Iterator[WatchedBroker]:
    with WatchedBroker() as running:
        yield running


@pytest.fixture
def client(broker: WatchedBroker) -> Iterator[RawClient]:
    with broker.unharmed(), broker.connect() as connected:
        yield connected


@pytest.fixture
def topic(client: RawClient, request: pytest.FixtureRequest) -> str:
    name = f"trap-{uuid.uuid4().hex[:8]}"
    client.create_topic(name)
    return name


def now_ms() -> int:
    return int(time.time() * 1000)


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [3, 4, 5])
def test_a_fetch_inside_a_batch_returns_the_whole_batch(client: RawClient, topic: str, offset: int) -> None:
    for values in ((b"a", b"b", b"c"), (b"d", b"e", b"f"), (b"g",)):
        assert client.produce(topic, batch(*values)).error_code == 0
    fetched = client.fetch(topic, offset)
    first, second = (each.header for each in split(fetched.records or b""))
    assert (first.base_offset, first.last_offset, second.base_offset) == (3, 5, 6)
    assert fetched.high_watermark == 7


@pytest.mark.parametrize(("max_bytes", "partition_max_bytes"), [(1, 1), (1, 2**20), (2**20, 1), (2**20, 0)])
def test_a_fetch_smaller_than_the_first_batch_returns_it(
    client: RawClient, topic: str, max_bytes: int, partition_max_bytes: int
) -> None:
    """KIP-74: otherwise a consumer could never get past a large batch."""
    for _ in range(2):
        assert client.produce(topic, batch(bytes(50_000))).error_code == 0
    fetched = client.fetch(topic, 0, max_bytes=max_bytes, partition_max_bytes=partition_max_bytes)
    (only,) = split(fetched.records or b"")
    assert only.header.base_offset == 0


def test_only_the_first_partition_of_a_fetch_goes_over_its_limit(client: RawClient) -> None:
    name = f"trap-{uuid.uuid4().hex[:8]}"
    client.create_topic(name, partitions=3)
    for index in range(3):
        assert client.produce(name, batch(bytes(50_000)), partition=index).error_code == 0
    wanted = [
        FetchRequest.FetchPartition(partition=index, fetch_offset=0, partition_max_bytes=1000) for index in range(3)
    ]
    request = FetchRequest(max_bytes=1000, topics=[FetchRequest.FetchTopic(topic=name, partitions=wanted)])
    response: FetchResponse = client.call(request, 12)
    sizes = [len(part.records or b"") for part in response.responses[0].partitions]
    assert sizes[0] > 50_000
    assert sizes[1:] == [0, 0]


def list_offset(client: RawClient, topic: str, timestamp: int) -> ListOffsetsResponse.ListOffsetsPartitionResponse:
    wanted = [ListOffsetsRequest.ListOffsetsPartition(partition_index=0, timestamp=timestamp)]
    topics = [ListOffsetsRequest.ListOffsetsTopic(name=topic, partitions=wanted)]
    response: ListOffsetsResponse = client.call(ListOffsetsRequest(replica_id=-1, topics=topics), 8)
    return response.topics[0].partitions[0]


def test_offsets_by_timestamp_and_by_their_special_values(client: RawClient, topic: str) -> None:
    start = now_ms() - 100_000
    # In the second batch the largest timestamp is not the last one.
    for stamps in ((0, 10, 20), (30, 90, 60), (70, 80)):
        records = [Record(offset, start + stamp, b"k", b"v") for offset, stamp in enumerate(stamps)]
        assert client.produce(topic, encode_batch(records)).error_code == 0
    assert list_offset(client, topic, EARLIEST).offset == 0
    assert list_offset(client, topic, EARLIEST_LOCAL).offset == 0
    latest = list_offset(client, topic, LATEST)
    assert (latest.offset, latest.timestamp) == (8, -1)
    largest = list_offset(client, topic, MAX_TIMESTAMP)
    assert (largest.offset, largest.timestamp) == (4, start + 90)
    for asked, offset, found in (
        (-50_000, 0, 0),
        (0, 0, 0),
        (1, 1, 10),
        (10, 1, 10),
        (25, 3, 30),
        (31, 4, 90),
        (61, 4, 90),
        (75, 4, 90),
    ):
        answer = list_offset(client, topic, start + asked)
        assert (answer.error_code, answer.offset, answer.timestamp) == (0, offset, start + found), asked
    beyond = list_offset(client, topic, start + 91)
    assert (beyond.error_code, beyond.offset, beyond.timestamp) == (0, -1, -1)


def test_offsets_of_an_empty_partition(client: RawClient, topic: str) -> None:
    assert list_offset(client, topic, EARLIEST).offset == 0
    assert list_offset(client, topic, LATEST).offset == 0
    for timestamp in (MAX_TIMESTAMP, 0, now_ms()):
        answer = list_offset(client, topic, timestamp)
        assert (answer.error_code, answer.offset, answer.timestamp) == (0, -1, -1)


def test_an_idle_consumer_does_not_spin(broker: WatchedBroker, client: RawClient, topic: str) -> None:
    process = psutil.Process(broker.pid)
    clients = [broker.connect() for _ in range(10)]
    try:
        for each in clients:
            each.alive()
        before = process.cpu_times()
        started = time.monotonic()
        for each in clients:
            each.request(fetch_request(topic, 0, max_wait_ms=600), 12)
        for each in clients:
            response = each.response(ApiKey.FETCH, 12, within_s=3)
            assert not response.responses[0].partitions[0].records
        elapsed = time.monotonic() - started
        after = process.cpu_times()
    finally:
        for each in clients:
            each.close()
    assert elapsed >= 0.55, "the wait was cut short"
    # The bystander of the test works all the while, so this is a bound on spinning, not on idleness.
    assert after.user + after.system - before.user - before.system < 0.8 * elapsed


def test_a_waiting_fetch_wakes_at_the_first_byte(broker: WatchedBroker, client: RawClient, topic: str) -> None:
    with broker.connect() as waiting:
        waiting.request(fetch_request(topic, 0, max_wait_ms=30_000), 12)
        with pytest.raises(TimeoutError):
            waiting.read_frame(0.05)
        started = time.monotonic()
        assert client.produce(topic, batch(b"now")).error_code == 0
        response = waiting.response(ApiKey.FETCH, 12, within_s=2)
        assert time.monotonic() - started < 1
        assert b"now" in bytes(response.responses[0].partitions[0].records)


# --- topics -----------------------------------------------------------------------------------------------------------


def test_metadata_makes_an_unknown_topic_only_when_allowed(client: RawClient) -> None:
    name = f"trap-{uuid.uuid4().hex[:8]}"
    for _ in range(3):
        assert client.topic(name).error_code == E.UNKNOWN_TOPIC_OR_PARTITION
    assert client.topic(name, auto_create=True).error_code in {E.NONE, E.LEADER_NOT_AVAILABLE}
    deadline = time.monotonic() + 2
    while (found := client.topic(name)).error_code != 0:
        assert time.monotonic() < deadline
    assert len(found.partitions) == 1
    assert client.produce(name, batch()).error_code == 0


def test_topic_ids_are_stable_and_a_topic_made_anew_has_another(broker: WatchedBroker, client: RawClient) -> None:
    name = f"trap-{uuid.uuid4().hex[:8]}"
    first = client.create_topic(name)
    assert first.int != 0
    assert client.produce(name, batch(b"old")).error_code == 0
    assert {client.topic(name).topic_id for _ in range(3)} == {first}
    deleted = client.call(DeleteTopicsRequest(topic_names=[name], timeout_ms=5000), 5)
    assert error_codes(deleted) == {E.NONE}
    second = client.create_topic(name)
    assert second not in {first, uuid.UUID(int=0)}
    assert client.topic(name).topic_id == second
    # Who still knows the old one is told so, instead of being given another topic's records.
    wanted = [FetchRequest.FetchPartition(partition=0, partition_max_bytes=1000)]
    stale = FetchRequest(topics=[FetchRequest.FetchTopic(topic_id=first, partitions=wanted)])
    assert E.UNKNOWN_TOPIC_ID in error_codes(client.call(stale, 13))
    fresh = FetchRequest(topics=[FetchRequest.FetchTopic(topic_id=second, partitions=wanted)])
    response = client.call(fresh, 13)
    assert error_codes(response) == {E.NONE}
    assert not response.responses[0].partitions[0].records


def test_topic_ids_outlive_a_restart() -> None:
    with WatchedBroker() as broker:
        with broker.connect() as client:
            first = client.create_topic("kept")
            assert client.produce("kept", batch(b"kept")).error_code == 0
        for end in (broker.stop, broker.kill):
            end()
            broker.start()
            with broker.connect() as client:
                assert client.topic("kept").topic_id == first
                assert b"kept" in bytes(client.fetch("kept", 0).records or b"")


def test_the_size_limit_is_per_batch(client: RawClient) -> None:
    name = f"trap-{uuid.uuid4().hex[:8]}"
    client.create_topic(name, config={"max.message.bytes": "2000"})
    small = batch(bytes(500))
    assert client.produce(name, small).error_code == 0
    # Ten records that are small each make one batch that is not.
    assert client.produce(name, batch(*[bytes(500)] * 10)).error_code == E.MESSAGE_TOO_LARGE
    exact = 2000 - len(batch(bytes(1000))) + 1000
    assert client.produce(name, batch(bytes(exact))).error_code == 0
    assert client.produce(name, batch(bytes(exact + 1))).error_code == E.MESSAGE_TOO_LARGE


def test_a_record_without_key_on_a_compacted_topic(client: RawClient) -> None:
    name = f"trap-{uuid.uuid4().hex[:8]}"
    client.create_topic(name, config={"cleanup.policy": "compact"})
    assert client.produce(name, batch(b"v", key=None)).error_code == E.INVALID_RECORD
    assert client.produce(name, batch(None, key=b"k")).error_code == 0
    assert client.fetch(name, 0).high_watermark == 1


# --- settings ---------------------------------------------------------------------------------------------------------


def alter(client: RawClient, topic: str, *changes: tuple[str, int, str | None]) -> set[ErrorCode]:
    wanted = [
        IncrementalAlterConfigsRequest.AlterableConfig(name=name, config_operation=operation, value=value)
        for name, operation, value in changes
    ]
    resource = IncrementalAlterConfigsRequest.AlterConfigsResource(
        resource_type=TOPIC_RESOURCE, resource_name=topic, configs=wanted
    )
    return error_codes(client.call(IncrementalAlterConfigsRequest(resources=[resource]), 1))


def described(
    client: RawClient, resource_type: int, name: str, keys: list[str] | None = None
) -> dict[str, DescribeConfigsResponse.DescribeConfigsResourceResult]:
    resource = DescribeConfigsRequest.DescribeConfigsResource(
        resource_type=resource_type, resource_name=name, configuration_keys=keys
    )
    request = DescribeConfigsRequest(resources=[resource], include_synonyms=True, include_documentation=True)
    (result,) = client.call(request, 4).results
    assert result.error_code == 0
    return {entry.name: entry for entry in result.configs}


def test_append_and_subtract(client: RawClient, topic: str) -> None:
    def policy() -> set[str]:
        value = described(client, TOPIC_RESOURCE, topic)["cleanup.policy"].value or ""
        return set(filter(None, value.split(",")))

    assert policy() == {"delete"}
    assert alter(client, topic, ("cleanup.policy", APPEND, "compact")) == {E.NONE}
    assert policy() == {"delete", "compact"}
    assert alter(client, topic, ("cleanup.policy", APPEND, "compact")) == {E.NONE}
    assert policy() == {"delete", "compact"}
    assert alter(client, topic, ("cleanup.policy", SUBTRACT, "delete")) == {E.NONE}
    assert policy() == {"compact"}
    assert alter(client, topic, ("cleanup.policy", DELETE, None)) == {E.NONE}
    assert policy() == {"delete"}
    assert alter(client, topic, ("retention.ms", APPEND, "5")) <= {E.INVALID_CONFIG, E.INVALID_REQUEST}
    # One bad change undoes the others of its resource.
    assert alter(client, topic, ("retention.ms", SET, "5"), ("segment.ms", SET, "never")) == {E.INVALID_CONFIG}
    assert described(client, TOPIC_RESOURCE, topic)["retention.ms"].value == "604800000"


TOPIC_DEFAULTS = {
    "cleanup.policy": "delete",
    "compression.type": "producer",
    "delete.retention.ms": "86400000",
    "file.delete.delay.ms": "60000",
    "flush.messages": "9223372036854775807",
    "flush.ms": "9223372036854775807",
    "index.interval.bytes": "4096",
    "max.compaction.lag.ms": "9223372036854775807",
    "max.message.bytes": "1048588",
    "message.timestamp.after.max.ms": "3600000",
    "message.timestamp.before.max.ms": "9223372036854775807",
    "message.timestamp.type": "CreateTime",
    "min.cleanable.dirty.ratio": "0.5",
    "min.compaction.lag.ms": "0",
    "min.insync.replicas": "1",
    "preallocate": "false",
    "retention.bytes": "-1",
    "retention.ms": "604800000",
    "segment.bytes": "1073741824",
    "segment.index.bytes": "10485760",
    "segment.jitter.ms": "0",
    "segment.ms": "604800000",
    "unclean.leader.election.enable": "false",
    "remote.storage.enable": "false",
    "local.retention.ms": "-2",
    "local.retention.bytes": "-2",
    "leader.replication.throttled.replicas": "",
    "follower.replication.throttled.replicas": "",
}


def test_every_topic_setting_is_described_with_default_source_and_synonyms(client: RawClient, topic: str) -> None:
    entries = described(client, TOPIC_RESOURCE, topic)
    assert {name: entries[name].value for name in TOPIC_DEFAULTS if name in entries} == TOPIC_DEFAULTS
    assert all(entry.config_source == DEFAULT_CONFIG for entry in entries.values())
    assert not any(entry.read_only or entry.is_sensitive for entry in entries.values())
    assert all(entry.documentation for entry in entries.values())
    synonyms = {each.name: (each.value, each.source) for each in entries["max.message.bytes"].synonyms}
    assert synonyms["message.max.bytes"] == ("1048588", DEFAULT_CONFIG)
    assert alter(client, topic, ("max.message.bytes", SET, "5000")) == {E.NONE}
    changed = described(client, TOPIC_RESOURCE, topic, ["max.message.bytes"])
    assert set(changed) == {"max.message.bytes"}
    entry = changed["max.message.bytes"]
    assert (entry.value, entry.config_source) == ("5000", DYNAMIC_TOPIC_CONFIG)
    assert [(each.name, each.value) for each in entry.synonyms] == [
        ("max.message.bytes", "5000"),
        ("message.max.bytes", "1048588"),
    ]


def test_broker_settings_are_described(client: RawClient) -> None:
    entries = described(client, BROKER_RESOURCE, "1")
    assert entries["log.retention.hours"].value == "168"
    assert entries["listeners"].config_source == STATIC_BROKER_CONFIG
    assert entries["log.dirs"].read_only
    assert not entries["message.max.bytes"].read_only


# --- producers --------------------------------------------------------------------------------------------------------


def test_a_transaction_timeout_is_checked(client: RawClient) -> None:
    """Over transaction.max.timeout.ms."""
    request = InitProducerIdRequest(transactional_id="t", transaction_timeout_ms=900_001)
    assert client.call(request, 4).error_code == E.INVALID_TRANSACTION_TIMEOUT


def test_a_retry_gets_the_old_offset_back(client: RawClient, topic: str) -> None:
    """Any of the last five batches, in any order, as often as one likes; an error would make clients write twice."""
    producer_id = client.call(InitProducerIdRequest(transactional_id=None), 4).producer_id

    def numbered(sequence: int, count: int = 2) -> bytes:
        values = [b"%d" % (sequence + index) for index in range(count)]
        return batch(*values, producer_id=producer_id, producer_epoch=0, base_sequence=sequence)

    sent = {sequence: numbered(sequence) for sequence in range(0, 14, 2)}
    offsets = {}
    for sequence, records in sent.items():
        answer = client.produce(topic, records)
        assert answer.error_code == 0
        offsets[sequence] = answer.base_offset
    for sequence in (12, 4, 8, 6, 10, 4, 12):
        for acks in (-1, 1):
            again = client.produce(topic, sent[sequence], acks=acks)
            assert (again.error_code, again.base_offset) == (0, offsets[sequence])
    assert client.fetch(topic, 0).high_watermark == 14
    assert client.produce(topic, numbered(20)).error_code == E.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert client.produce(topic, numbered(14)).base_offset == 14
    stored = [
        value.value for each in split(client.fetch(topic, 0).records or b"") for value in decode_records(each.data)
    ]
    assert stored == [b"%d" % number for number in range(16)]


def test_a_retry_after_a_crash_gets_the_old_offset_back() -> None:
    with WatchedBroker() as broker:
        with broker.connect() as client:
            client.create_topic("idempotent")
            sent = [batch(b"v", producer_id=7, producer_epoch=0, base_sequence=number) for number in range(5)]
            offsets = [client.produce("idempotent", records).base_offset for records in sent]
        for end in (broker.kill, broker.stop):
            end()
            broker.start()
            with broker.connect() as client:
                for records, offset in zip(sent, offsets, strict=True):
                    again = client.produce("idempotent", records)
                    assert (again.error_code, again.base_offset) == (0, offset)
                assert client.fetch("idempotent", 0).high_watermark == len(sent)


def test_what_is_fetched_is_what_was_sent(client: RawClient, topic: str) -> None:
    """All that a broker may change are the base offset and the leader epoch, which the CRC does not cover."""
    records = batch(b"a", b"b")
    assert client.produce(topic, batch()).error_code == 0
    assert client.produce(topic, records).error_code == 0
    fetched = bytes(client.fetch(topic, 1).records or b"")
    assert fetched[CRC_START - 4 :] == records[CRC_START - 4 :]
    assert read_header(fetched).base_offset == 1


# --- ApiVersions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [5, 42, 32767])
def test_api_versions_of_tomorrow_are_answered_in_v0(client: RawClient, version: int) -> None:
    client.send(framed(ApiKey.API_VERSIONS, version, b"whatever tomorrow brings"))
    correlation_id, response = decode_response(ApiVersionsResponse, 0, client.read_frame())
    assert correlation_id == 7
    assert response.error_code == E.UNSUPPORTED_VERSION
    assert {item.api_key for item in response.api_keys} >= {ApiKey.API_VERSIONS, ApiKey.PRODUCE, ApiKey.FETCH}
    client.alive()


@pytest.mark.parametrize("version", range(5))
def test_the_header_of_an_api_versions_answer_is_always_v0(client: RawClient, version: int) -> None:
    assert response_header_version(ApiKey.API_VERSIONS, version) == 0
    request = ApiVersionsRequest(client_software_name="raw", client_software_version="1")
    response: ApiVersionsResponse = client.call(request, version)
    assert response.error_code == 0
    listed = {item.api_key: (item.min_version, item.max_version) for item in response.api_keys}
    assert listed[ApiKey.API_VERSIONS] == (0, 4)
    # Old librdkafka turns to another protocol where this minimum is not 0 (KAFKA-18659).
    assert listed[ApiKey.PRODUCE][0] == 0


# --- groups -----------------------------------------------------------------------------------------------------------


def test_metadata_of_a_commit_comes_back_unchanged(client: RawClient, topic: str) -> None:
    client.find_coordinator("notes")
    for note in ("", "plain", "\u00fcmlaut \U0001f600", "\0 nul", "x" * 4096, None):
        partition = OffsetCommitRequest.OffsetCommitRequestPartition(
            committed_offset=5, committed_leader_epoch=3, committed_metadata=note
        )
        topics = [OffsetCommitRequest.OffsetCommitRequestTopic(name=topic, partitions=[partition])]
        assert error_codes(client.call(OffsetCommitRequest(group_id="notes", topics=topics), 8)) == {E.NONE}
        wanted = OffsetFetchRequest.OffsetFetchRequestTopic(name=topic, partition_indexes=[0])
        response = client.call(OffsetFetchRequest(group_id="notes", topics=[wanted]), 7)
        (found,) = response.topics[0].partitions
        assert (found.committed_offset, found.committed_leader_epoch) == (5, 3)
        assert found.metadata == (note or "")


class Member:
    """A consumer that does nothing but follow its group's rebalances, on connections of its own."""

    def __init__(self, broker: WatchedBroker, group: str) -> None:
        self.group = group
        self.client = broker.connect()
        self.member_id = ""
        self.generation = -1
        self.seen: list[ErrorCode] = []

    def join(self) -> None:
        while True:
            protocol = JoinGroupRequest.JoinGroupRequestProtocol(name="range", metadata=b"")
            joined: JoinGroupResponse = self.client.call(
                JoinGroupRequest(
                    group_id=self.group,
                    session_timeout_ms=30_000,
                    rebalance_timeout_ms=30_000,
                    member_id=self.member_id,
                    protocol_type="consumer",
                    protocols=[protocol],
                ),
                5,
                within_s=30,
            )
            self.seen.append(ErrorCode(joined.error_code))
            if joined.member_id:
                self.member_id = joined.member_id
            if joined.error_code == E.NONE:
                break
        self.generation = joined.generation_id
        assignments = [
            SyncGroupRequest.SyncGroupRequestAssignment(member_id=member.member_id, assignment=b"a")
            for member in (joined.members if joined.leader == self.member_id else [])
        ]
        synced = self.client.call(
            SyncGroupRequest(
                group_id=self.group,
                generation_id=self.generation,
                member_id=self.member_id,
                assignments=assignments,
            ),
            3,
            within_s=30,
        )
        self.seen.append(ErrorCode(synced.error_code))
        if synced.error_code in {E.REBALANCE_IN_PROGRESS, E.ILLEGAL_GENERATION}:
            self.join()

    def beat(self) -> ErrorCode:
        response = self.client.call(
            HeartbeatRequest(group_id=self.group, generation_id=self.generation, member_id=self.member_id), 3
        )
        self.seen.append(ErrorCode(response.error_code))
        return ErrorCode(response.error_code)


def test_concurrent_rebalances_never_disown_a_living_member(broker: WatchedBroker, client: RawClient) -> None:
    client.find_coordinator("rebalancing")
    members = [Member(broker, "rebalancing") for _ in range(8)]
    stable = threading.Event()
    failures: list[BaseException] = []

    def live(member: Member, joins_after_s: float) -> None:
        try:
            time.sleep(joins_after_s)  # they come one after another, each into the rebalance of those before
            member.join()
            while not stable.is_set():
                if member.beat() in {E.REBALANCE_IN_PROGRESS, E.ILLEGAL_GENERATION}:
                    member.join()
                time.sleep(0.005)
        except BaseException as error:  # noqa: BLE001 - told below
            failures.append(error)

    threads = [
        threading.Thread(target=live, args=(member, 0.02 * number), daemon=True)
        for number, member in enumerate(members)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 10
    while not failures:
        generations = {member.generation for member in members}
        if len(generations) == 1 and -1 not in generations:
            break
        assert time.monotonic() < deadline, f"still rebalancing: {generations}"
        time.sleep(0.01)
    stable.set()
    for thread in threads:
        thread.join(10)
    for member in members:
        member.client.close()
    assert not failures, failures
    seen = {code for member in members for code in member.seen}
    assert E.UNKNOWN_MEMBER_ID not in seen
    assert seen <= {E.NONE, E.MEMBER_ID_REQUIRED, E.REBALANCE_IN_PROGRESS, E.ILLEGAL_GENERATION}
    assert len({member.member_id for member in members}) == len(members)


# --- fetch sessions ---------------------------------------------------------------------------------------------------


def session_fetch(
    topic: str, session_id: int, epoch: int, *partitions: tuple[int, int], forget: tuple[int, ...] = ()
) -> FetchRequest:
    wanted = [
        FetchRequest.FetchPartition(partition=index, fetch_offset=offset, partition_max_bytes=2**20)
        for index, offset in partitions
    ]
    return FetchRequest(
        max_bytes=2**24,
        session_id=session_id,
        session_epoch=epoch,
        topics=[FetchRequest.FetchTopic(topic=topic, partitions=wanted)] if wanted else [],
        forgotten_topics_data=[FetchRequest.ForgottenTopic(topic=topic, partitions=list(forget))] if forget else [],
    )


def mentioned(response: FetchResponse) -> dict[int, int]:
    """Which partitions an answer speaks of, and how many bytes each has."""
    return {part.partition_index: len(part.records or b"") for topic in response.responses for part in topic.partitions}


def test_an_incremental_fetch_speaks_only_of_what_changed(client: RawClient) -> None:
    """1,000 partitions at first, then only news: nothing at all when nothing happened."""
    name = f"trap-{uuid.uuid4().hex[:8]}"
    client.create_topic(name, partitions=1000)
    everything = [(index, 0) for index in range(1000)]
    opened: FetchResponse = client.call(session_fetch(name, 0, 0, *everything), 12)
    assert opened.error_code == 0
    assert opened.session_id > 0
    assert len(mentioned(opened)) == 1000
    quiet: FetchResponse = client.call(session_fetch(name, opened.session_id, 1), 12)
    assert (quiet.error_code, quiet.session_id) == (0, opened.session_id)
    assert mentioned(quiet) == {}
    assert client.produce(name, batch(b"news"), partition=321).error_code == 0
    news: FetchResponse = client.call(session_fetch(name, opened.session_id, 2), 12)
    assert list(mentioned(news)) == [321]
    # Told to go on from offset 1, it has nothing to say again.
    assert mentioned(client.call(session_fetch(name, opened.session_id, 3, (321, 1)), 12)) == {}
    # A forgotten partition is not spoken of any more; one that is added is.
    assert mentioned(client.call(session_fetch(name, opened.session_id, 4, forget=(5, 321)), 12)) == {}
    for index in (5, 6, 321):
        assert client.produce(name, batch(b"news"), partition=index).error_code == 0
    assert list(mentioned(client.call(session_fetch(name, opened.session_id, 5), 12))) == [6]
    assert set(mentioned(client.call(session_fetch(name, opened.session_id, 6, (6, 1), (5, 0)), 12))) == {5}


def test_a_session_out_of_step_is_an_error_and_a_new_one_works(client: RawClient, topic: str) -> None:
    opened: FetchResponse = client.call(session_fetch(topic, 0, 0, (0, 0)), 12)
    wrong = client.call(session_fetch(topic, opened.session_id, 7), 12)
    assert wrong.error_code == E.INVALID_FETCH_SESSION_EPOCH
    unknown = client.call(session_fetch(topic, opened.session_id + 1, 1), 12)
    assert unknown.error_code == E.FETCH_SESSION_ID_NOT_FOUND
    anew: FetchResponse = client.call(session_fetch(topic, opened.session_id, 0, (0, 0)), 12)
    assert anew.error_code == 0
    assert anew.session_id not in {0, opened.session_id}


def test_sessions_make_room_and_those_without_still_fetch() -> None:
    with WatchedBroker({"max.incremental.fetch.session.cache.slots": "2"}) as broker, broker.connect() as client:
        client.create_topic("slots", partitions=4)
        for index in range(4):
            assert client.produce("slots", batch(), partition=index).error_code == 0
        small = [client.call(session_fetch("slots", 0, 0, (0, 0)), 12).session_id for _ in range(2)]
        assert all(small)
        # One as small finds no room, and gets its records all the same.
        refused: FetchResponse = client.call(session_fetch("slots", 0, 0, (0, 0)), 12)
        assert (refused.error_code, refused.session_id) == (0, 0)
        assert mentioned(refused)[0] > 0
        # One that is larger takes the place of a smaller one.
        larger: FetchResponse = client.call(session_fetch("slots", 0, 0, (0, 0), (1, 0), (2, 0)), 12)
        assert larger.session_id > 0
        codes = [client.call(session_fetch("slots", session_id, 1), 12).error_code for session_id in small]
        assert sorted(codes) == [E.NONE, E.FETCH_SESSION_ID_NOT_FOUND]
