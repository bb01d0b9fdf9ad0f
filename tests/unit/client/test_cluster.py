"""The cluster client against a real broker, and against scripted ones that fail as real ones do in bad moments."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from millrace.client.cluster import EARLIEST, LATEST, ClusterClient
from millrace.client.settings import ClientSettings
from millrace.clock import ManualClock
from millrace.errors import ApiError, ErrorCode
from millrace.local.ports import free_ports
from millrace.model import TopicPartition
from millrace.records.batch import split
from millrace.records.decode import Record, decode_records
from millrace.records.encode import encode_batch
from millrace.testing import Cluster
from millrace.wire.keys import ApiKey
from millrace.wire.messages.cluster import MetadataResponse
from millrace.wire.messages.fetch import FetchResponse
from millrace.wire.messages.group_offsets import OffsetCommitResponse, OffsetFetchResponse
from millrace.wire.messages.groups import FindCoordinatorResponse
from millrace.wire.messages.offsets import ListOffsetsResponse
from millrace.wire.messages.produce import ProduceResponse
from millrace.wire.messages.producers import InitProducerIdResponse
from support.fake_broker import FakeBroker, metadata

T0, T1, T2 = (TopicPartition("t", index) for index in range(3))


def settings_for(bootstrap: str, **more: str) -> ClientSettings:
    named = {name.replace("_", "."): value for name, value in more.items()}
    return ClientSettings.from_properties(
        {"bootstrap.servers": bootstrap, "retry.backoff.ms": "1", "default.api.timeout.ms": "20000", **named}
    )


def batch(*values: bytes, timestamp_ms: int = 1000) -> bytes:
    records = [Record(index, timestamp_ms + index, None, value) for index, value in enumerate(values)]
    return encode_batch(records, base_offset=0)


def values_of(records: memoryview) -> list[bytes | None]:
    return [record.value for each in split(records) for record in decode_records(each.data)]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as running:
        running.create_topic("t", partitions=3)
        yield running


@pytest.fixture
def client(cluster: Cluster) -> Iterator[ClusterClient]:
    with ClusterClient(settings_for(cluster.bootstrap_servers)) as made:
        yield made


class HurryingClock(ManualClock):
    """Half a second passes at every look: what waits for seconds is over in milliseconds."""

    def monotonic(self) -> float:
        self.advance(0.5)
        return super().monotonic()


# --- a real broker ----------------------------------------------------------------------------------------------------


def test_topics(cluster: Cluster, client: ClusterClient) -> None:
    cluster.create_topic("u")
    found = client.topics()
    assert {name: sorted(topic.partitions) for name, topic in found.items()} == {"t": [0, 1, 2], "u": [0]}
    assert found["t"].topic_id.int != 0 and not found["t"].internal
    assert found["t"].partitions[0].leader == 1
    assert client.topics(["u", "missing"]).keys() == {"u"}
    assert client.topics([]) == {}
    assert client.topics().keys() == {"t", "u"}  # asking for it did not create it


def test_offsets(client: ClusterClient) -> None:
    client.produce({T0: batch(b"a", b"b", b"c"), T1: batch(b"d", timestamp_ms=5000)})
    assert client.list_offsets({T0: LATEST, T1: LATEST, T2: LATEST}) == {T0: 3, T1: 1, T2: 0}
    assert client.list_offsets({T0: EARLIEST}, read_committed=True) == {T0: 0}
    assert client.list_offsets({T0: 1001, T1: 5001, T2: 0}) == {T0: 1, T1: None, T2: None}
    assert client.list_offsets({}) == {}


def test_produce_and_fetch(client: ClusterClient) -> None:
    assert client.produce({T0: batch(b"a", b"b"), T2: batch(b"c")}) == {T0: 0, T2: 0}
    assert client.produce({T0: batch(b"d")}, acks=1) == {T0: 2}
    assert client.produce({T1: batch(b"e")}, acks=0) == {T1: -1}
    fetched = client.fetch(T0, 0, max_bytes=1 << 20, max_wait_ms=100)
    assert isinstance(fetched.records, memoryview) and fetched.records.readonly
    assert (fetched.high_watermark, fetched.last_stable_offset, fetched.log_start_offset) == (3, 3, 0)
    assert values_of(fetched.records) == [b"a", b"b", b"d"]
    assert fetched.aborted == ()
    assert not client.fetch(T0, 3, max_bytes=1 << 20, max_wait_ms=1).records
    with pytest.raises(ApiError, match="fetch of t-0 at offset 9") as caught:
        client.fetch(T0, 9, max_bytes=1, max_wait_ms=1)
    assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE


def test_a_batch_larger_than_what_was_asked_for_comes_whole(client: ClusterClient) -> None:
    large = batch(b"x" * 900_000)
    client.produce({T0: large})
    assert len(client.fetch(T0, 0, max_bytes=1, max_wait_ms=1).records) == len(large)


def test_offsets_of_a_group(client: ClusterClient) -> None:
    client.commit_offsets("g", {T0: 5, T2: 7})
    client.commit_offsets("g", {})
    assert client.committed_offsets("g", [T0, T1, T2]) == {T0: 5, T1: None, T2: 7}
    assert client.committed_offsets("nobody", [T0]) == {T0: None}
    assert client.committed_offsets("g", []) == {}


def test_producer_ids_differ(client: ClusterClient) -> None:
    (first, epoch), (second, _) = client.init_producer_id(), client.init_producer_id()
    assert first != second and epoch == 0


def test_a_restart_is_waited_out(cluster: Cluster, client: ClusterClient) -> None:
    client.produce({T0: batch(b"a")})
    client.commit_offsets("g", {T0: 1})
    cluster.restart()
    assert client.list_offsets({T0: LATEST}) == {T0: 1}
    cluster.restart()
    assert client.fetch(T0, 0, max_bytes=1000, max_wait_ms=1).high_watermark == 1
    cluster.restart()
    assert client.produce({T0: batch(b"b")}) == {T0: 1}
    cluster.restart()
    assert client.committed_offsets("g", [T0]) == {T0: 1}
    cluster.restart()
    assert client.topics().keys() >= {"t"}


def test_a_fetch_that_waits_survives_a_restart(cluster: Cluster, client: ClusterClient) -> None:
    client.topics()
    found: list[Any] = []

    def fetch() -> None:
        while not found:
            fetched = client.fetch(T0, 0, max_bytes=1000, max_wait_ms=20_000)
            if fetched.records:
                found.append(fetched)

    reader = threading.Thread(target=fetch)
    reader.start()
    cluster.restart()
    with ClusterClient(client.settings) as other:
        other.produce({T0: batch(b"late")})
    reader.join(30)
    assert values_of(found[0].records) == [b"late"]


def test_a_missing_topic_is_told_after_a_short_grace(cluster: Cluster) -> None:
    missing = TopicPartition("missing", 0)
    tries: list[Callable[[ClusterClient], object]] = [
        lambda client: client.fetch(missing, 0, max_bytes=1, max_wait_ms=1),
        lambda client: client.list_offsets({T0: LATEST, missing: LATEST}),
        lambda client: client.produce({missing: batch(b"a")}),
        lambda client: client.partition_count("missing"),
        lambda client: client.list_offsets({TopicPartition("t", 3): LATEST}),
    ]
    for attempt in tries:
        with ClusterClient(settings_for(cluster.bootstrap_servers), clock=HurryingClock()) as client:
            with pytest.raises(ApiError, match=r"missing|t-3.*has 3 partitions") as caught:
                attempt(client)
            assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_nobody_there() -> None:
    (port,) = free_ports("127.0.0.1", 1)
    with ClusterClient(settings_for(f"127.0.0.1:{port}", default_api_timeout_ms="30")) as client:
        for attempt, what in (
            (client.topics, "metadata"),
            (client.init_producer_id, "a producer id"),
            (lambda: client.fetch(T0, 0, max_bytes=1, max_wait_ms=1), "fetch of t-0"),
            (lambda: client.list_offsets({T0: LATEST}), "offsets of"),
            (lambda: client.commit_offsets("g", {T0: 1}), "offsets of group 'g'"),
        ):
            with pytest.raises(ApiError, match=rf"{what}.*gave up after 0\.03 s.*127\.0\.0\.1:{port}") as caught:
                attempt()
            assert caught.value.code is ErrorCode.NETWORK_EXCEPTION


def test_a_second_bootstrap_server_is_tried(cluster: Cluster) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    with ClusterClient(settings_for(f"127.0.0.1:{port},{cluster.bootstrap_servers}")) as client:
        assert "t" in client.topics()


def test_pickles_as_its_settings(client: ClusterClient) -> None:
    client.topics()
    assert "1 connections" in repr(client)
    with pickle.loads(pickle.dumps(client)) as other:
        assert other.settings == client.settings
        assert "0 connections" in repr(other)
        assert "t" in other.topics()


# --- scripted brokers -------------------------------------------------------------------------------------------------


class Scripted:
    """Two brokers; `leaders` says who leads the partitions of topic t."""

    def __init__(self, stack: ExitStack) -> None:
        self.one, self.two = stack.enter_context(FakeBroker()), stack.enter_context(FakeBroker())
        self.leaders = [1, 1, 1]
        self.epoch = 0
        for broker in (self.one, self.two):
            broker.answers[ApiKey.METADATA] = self.metadata

    def metadata(self, request: Any) -> MetadataResponse:
        return metadata([self.one, self.two], {"t": self.leaders}, epoch=self.epoch)

    def client(self, **more: str) -> ClusterClient:
        return ClusterClient(settings_for(self.one.bootstrap, **more))


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    with ExitStack() as stack:
        yield Scripted(stack)


def fetch_answer(partition: int = 0, **fields: Any) -> FetchResponse:
    data = FetchResponse.PartitionData(partition_index=partition, aborted_transactions=None, **fields)
    return FetchResponse(responses=[FetchResponse.FetchableTopicResponse(topic="t", partitions=[data])])


def test_a_leader_that_moved_is_followed(scripted: Scripted) -> None:
    def moved(request: Any) -> FetchResponse:
        scripted.leaders = [2, 1, 1]
        scripted.epoch = 7
        return fetch_answer(error_code=ErrorCode.NOT_LEADER_OR_FOLLOWER)

    scripted.one.answers[ApiKey.FETCH] = moved
    scripted.two.answers[ApiKey.FETCH] = lambda request: fetch_answer(high_watermark=5, records=b"rr")
    with scripted.client() as client:
        fetched = client.fetch(T0, 3, max_bytes=9, max_wait_ms=1)
    assert (bytes(fetched.records), fetched.high_watermark) == (b"rr", 5)
    (asked,) = scripted.two.asked(ApiKey.FETCH)
    assert asked.topics[0].partitions[0].current_leader_epoch == 7
    assert asked.topics[0].partitions[0].fetch_offset == 3
    assert asked.session_epoch == -1


@pytest.mark.parametrize(
    "code",
    [
        ErrorCode.LEADER_NOT_AVAILABLE, ErrorCode.REQUEST_TIMED_OUT, ErrorCode.UNKNOWN_LEADER_EPOCH,
        ErrorCode.FENCED_LEADER_EPOCH, ErrorCode.KAFKA_STORAGE_ERROR, ErrorCode.OFFSET_NOT_AVAILABLE,
        ErrorCode.REPLICA_NOT_AVAILABLE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ],
)  # fmt: skip
def test_errors_that_pass(scripted: Scripted, code: ErrorCode) -> None:
    answers = iter([fetch_answer(error_code=code), ConnectionError, fetch_answer(high_watermark=1)])
    scripted.one.answers[ApiKey.FETCH] = lambda request: next(answers)  # type: ignore[arg-type,return-value]
    with scripted.client() as client:
        assert client.fetch(T0, 0, max_bytes=9, max_wait_ms=1).high_watermark == 1


def test_a_partition_without_a_leader(scripted: Scripted) -> None:
    scripted.leaders = [1, -1, 1]
    gave_up = pytest.raises(ApiError, match=r"offsets of t-1: gave up .*t-1 has no leader")
    with scripted.client(default_api_timeout_ms="20") as client, gave_up as caught:
        client.list_offsets({T1: LATEST})
    assert caught.value.code is ErrorCode.LEADER_NOT_AVAILABLE


def test_a_topic_that_appears_within_the_grace(scripted: Scripted) -> None:
    missing = MetadataResponse.MetadataResponseTopic(name="t", error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    answers = iter([MetadataResponse(topics=[missing]), MetadataResponse(topics=[missing]), scripted.metadata(None)])
    scripted.one.answers[ApiKey.METADATA] = lambda request: next(answers)
    with scripted.client() as client:
        assert client.partition_count("t") == 3


def test_the_advised_replica_is_read_until_it_fails(scripted: Scripted) -> None:
    scripted.one.answers[ApiKey.FETCH] = lambda request: (
        fetch_answer(preferred_read_replica=2, high_watermark=9) if request.rack_id else fetch_answer()
    )
    healthy = [True]
    scripted.two.answers[ApiKey.FETCH] = lambda request: (
        fetch_answer(high_watermark=8, records=b"r")
        if healthy[0]
        else fetch_answer(error_code=ErrorCode.OFFSET_OUT_OF_RANGE)
    )
    with scripted.client(client_rack="near") as client:
        for _ in range(3):
            assert client.fetch(T0, 0, max_bytes=9, max_wait_ms=1).high_watermark == 8
        assert len(scripted.one.asked(ApiKey.FETCH)) == 1
        assert len(scripted.two.asked(ApiKey.FETCH)) == 3
        # What a replica does not have is for the leader to judge.
        healthy[0] = False
        scripted.one.answers[ApiKey.FETCH] = lambda request: fetch_answer(high_watermark=7)
        assert client.fetch(T0, 0, max_bytes=9, max_wait_ms=1).high_watermark == 7


def offsets_answer(code: int = 0, **offsets: int) -> ListOffsetsResponse:
    return ListOffsetsResponse(
        topics=[
            ListOffsetsResponse.ListOffsetsTopicResponse(
                name="t",
                partitions=[
                    ListOffsetsResponse.ListOffsetsPartitionResponse(
                        partition_index=int(name[1:]), error_code=code, offset=offset
                    )
                    for name, offset in offsets.items()
                ],
            )
        ]
    )


def test_leaders_are_asked_for_their_own_partitions_only(scripted: Scripted) -> None:
    scripted.leaders = [1, 2, 1]
    scripted.one.answers[ApiKey.LIST_OFFSETS] = lambda request: offsets_answer(p0=10, p2=12)
    moved: list[Any] = []

    def two(request: Any) -> ListOffsetsResponse:
        moved.append(request)
        return offsets_answer(0 if len(moved) > 1 else ErrorCode.NOT_LEADER_OR_FOLLOWER, p1=11)

    scripted.two.answers[ApiKey.LIST_OFFSETS] = two
    with scripted.client() as client:
        assert client.list_offsets({T0: LATEST, T1: LATEST, T2: LATEST}) == {T0: 10, T1: 11, T2: 12}
    assert len(scripted.one.asked(ApiKey.LIST_OFFSETS)) == 1  # what was answered is not asked again
    assert len(moved) == 2


def test_an_answer_that_leaves_something_out(scripted: Scripted) -> None:
    scripted.one.answers[ApiKey.LIST_OFFSETS] = lambda request: offsets_answer(p0=1)
    scripted.one.answers[ApiKey.FETCH] = lambda request: fetch_answer(partition=2)
    with scripted.client() as client:
        with pytest.raises(ApiError, match="says nothing of t-1"):
            client.list_offsets({T0: LATEST, T1: LATEST})
        with pytest.raises(ApiError, match="says nothing of t-0"):
            client.fetch(T0, 0, max_bytes=1, max_wait_ms=1)


def produce_answer(code: int = 0, message: str | None = None, base_offset: int = 0) -> ProduceResponse:
    return ProduceResponse(
        responses=[
            ProduceResponse.TopicProduceResponse(
                name="t",
                partition_responses=[
                    ProduceResponse.PartitionProduceResponse(
                        index=0, error_code=code, error_message=message, base_offset=base_offset
                    )
                ],
            )
        ]
    )


def test_produce_retries_with_the_same_bytes(scripted: Scripted) -> None:
    answers = iter([produce_answer(ErrorCode.NOT_ENOUGH_REPLICAS), ConnectionError, produce_answer(46, base_offset=4)])
    scripted.one.answers[ApiKey.PRODUCE] = lambda request: next(answers)  # type: ignore[arg-type,return-value]
    data = batch(b"a")
    with scripted.client() as client:
        assert client.produce({T0: data}) == {T0: 4}  # 46: it was there already
    sent = [request.topic_data[0].partition_data[0].records for request in scripted.one.asked(ApiKey.PRODUCE)]
    assert [bytes(each) for each in sent] == [data] * 3


def test_produce_says_why_it_was_refused(scripted: Scripted) -> None:
    scripted.one.answers[ApiKey.PRODUCE] = lambda request: produce_answer(87, "record 3 has no key")
    refused = pytest.raises(ApiError, match="INVALID_RECORD: produce to t-0: record 3 has no key")
    with scripted.client() as client, refused:
        client.produce({T0: batch(b"a")})


def test_a_coordinator_that_moves(scripted: Scripted) -> None:
    homes = iter([scripted.one, scripted.two, scripted.two])

    def find(request: Any) -> FindCoordinatorResponse:
        return FindCoordinatorResponse(host="127.0.0.1", port=next(homes).port, error_message=None)

    def commit(code: int) -> Callable[[Any], OffsetCommitResponse]:
        partition = OffsetCommitResponse.OffsetCommitResponsePartition(partition_index=0, error_code=code)
        topic = OffsetCommitResponse.OffsetCommitResponseTopic(name="t", partitions=[partition])
        return lambda request: OffsetCommitResponse(topics=[topic])

    for broker in (scripted.one, scripted.two):
        broker.answers[ApiKey.FIND_COORDINATOR] = find
    scripted.one.answers[ApiKey.OFFSET_COMMIT] = commit(ErrorCode.NOT_COORDINATOR)
    scripted.two.answers[ApiKey.OFFSET_COMMIT] = commit(0)
    scripted.two.answers[ApiKey.OFFSET_FETCH] = lambda request: OffsetFetchResponse(
        error_code=ErrorCode.GROUP_AUTHORIZATION_FAILED
    )
    with scripted.client() as client:
        client.commit_offsets("g", {T0: 1})
        (asked,) = scripted.two.asked(ApiKey.OFFSET_COMMIT)
        assert (asked.group_id, asked.generation_id_or_member_epoch, asked.member_id) == ("g", -1, "")
        with pytest.raises(ApiError, match="GROUP_AUTHORIZATION_FAILED: offsets of group 'g'"):
            client.committed_offsets("g", [T0])
        scripted.two.answers[ApiKey.OFFSET_COMMIT] = commit(ErrorCode.UNKNOWN_MEMBER_ID)
        with pytest.raises(ApiError, match="UNKNOWN_MEMBER_ID"):
            client.commit_offsets("g", {T0: 1})


def test_a_coordinator_that_is_not_there_yet(scripted: Scripted) -> None:
    answers = iter([ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.NONE])
    scripted.one.answers[ApiKey.FIND_COORDINATOR] = lambda request: FindCoordinatorResponse(
        host="127.0.0.1", port=scripted.one.port, error_code=next(answers), error_message=None
    )
    scripted.one.answers[ApiKey.OFFSET_FETCH] = lambda request: OffsetFetchResponse(
        topics=[
            OffsetFetchResponse.OffsetFetchResponseTopic(
                name="t",
                partitions=[
                    OffsetFetchResponse.OffsetFetchResponsePartition(
                        partition_index=0, committed_offset=3, metadata=None
                    )
                ],
            )
        ]
    )
    with scripted.client() as client:
        assert client.committed_offsets("g", [T0]) == {T0: 3}


def test_a_producer_id_is_asked_for_until_there_is_one(scripted: Scripted) -> None:
    answers = iter([InitProducerIdResponse(error_code=14), InitProducerIdResponse(producer_id=5, producer_epoch=2)])
    scripted.one.answers[ApiKey.INIT_PRODUCER_ID] = lambda request: next(answers)
    with scripted.client() as client:
        assert client.init_producer_id() == (5, 2)


def test_topics_that_are_refused(scripted: Scripted) -> None:
    denied = MetadataResponse.MetadataResponseTopic(name="secret", error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    response = scripted.metadata(None)
    response.topics.append(denied)
    for broker in (scripted.one, scripted.two):
        broker.answers[ApiKey.METADATA] = lambda request: response
    with scripted.client() as client:
        assert client.topics().keys() == {"t"}
        with pytest.raises(ApiError, match=r"TOPIC_AUTHORIZATION_FAILED.*topic 'secret'"):
            client.topics(["t", "secret"])
    (everything, *_) = scripted.one.asked(ApiKey.METADATA)
    assert everything.topics is None and not everything.allow_auto_topic_creation


def test_a_broker_that_hangs_is_asked_last(scripted: Scripted) -> None:
    with scripted.client(request_timeout_ms="50") as client:
        client.topics()
        scripted.one.answers[ApiKey.METADATA] = lambda request: None
        assert client.topics().keys() == {"t"}
    assert len(scripted.two.asked(ApiKey.METADATA)) == 1


def test_aborted_transactions_are_told(scripted: Scripted) -> None:
    response = fetch_answer(high_watermark=5, last_stable_offset=4, log_start_offset=1)
    response.responses[0].partitions[0].aborted_transactions = [
        FetchResponse.AbortedTransaction(producer_id=3, first_offset=2)
    ]
    scripted.one.answers[ApiKey.FETCH] = lambda request: response
    with scripted.client() as client:
        fetched = client.fetch(T0, 0, max_bytes=1, max_wait_ms=1, read_committed=True)
    assert (fetched.aborted, fetched.last_stable_offset, fetched.log_start_offset) == (((3, 2),), 4, 1)
    assert scripted.one.asked(ApiKey.FETCH)[0].isolation_level == 1
