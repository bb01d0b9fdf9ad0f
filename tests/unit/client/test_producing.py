"""Batches in order and once, whatever breaks in between."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.client.cluster import LATEST, ClusterClient
from millrace.client.fetching import FetchRange, read_range
from millrace.client.producing import MAX_IN_FLIGHT, BatchProducer
from millrace.client.settings import ClientSettings
from millrace.clock import SystemClock
from millrace.errors import ApiError, ErrorCode
from millrace.model import TopicPartition
from millrace.records.batch import read_header, split
from millrace.records.compression import Codec
from millrace.records.decode import Record, decode_records
from millrace.records.encode import encode_batch
from millrace.testing import Cluster
from millrace.wire.keys import ApiKey
from millrace.wire.messages.produce import ProduceResponse
from millrace.wire.messages.producers import InitProducerIdResponse
from support.fake_broker import CuttingProxy, FakeBroker, metadata

T0, T1, T2 = (TopicPartition("t", index) for index in range(3))


def settings_for(bootstrap: str, **more: str) -> ClientSettings:
    named = {name.replace("_", "."): value for name, value in more.items()}
    return ClientSettings.from_properties({"bootstrap.servers": bootstrap, "retry.backoff.ms": "1", **named})


def add(producer: BatchProducer, partition: TopicPartition, *values: bytes, codec: Codec = Codec.NONE) -> bytes:
    # Of now: a broker forgets a producer whose records are a day old.
    now_ms = SystemClock().wall_ms()
    data = encode_batch(
        [Record(index, now_ms, None, value) for index, value in enumerate(values)],
        base_offset=0,
        compression=codec,
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        base_sequence=producer.next_sequence(partition),
    )
    producer.add(partition, data, len(values))
    return data


def stored(client: ClusterClient, partition: TopicPartition) -> list[bytes | None]:
    end = client.list_offsets({partition: LATEST})[partition] or 0
    return [
        record.value
        for fetched in read_range(client, FetchRange(partition, 0, end))
        for each in split(fetched.records, partial_end=True)
        for record in decode_records(each.data)
    ]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as running:
        running.create_topic("t", partitions=3)
        yield running


def test_order_and_counts(cluster: Cluster) -> None:
    with ClusterClient(settings_for(cluster.bootstrap_servers)) as client:
        producer = BatchProducer(client, request_bytes=500)
        for number in range(200):
            add(producer, (T0, T1, T2)[number % 3], b"%d" % number, b"%d+" % number)
        producer.flush()
        told = producer.take_written()
        assert producer.take_written() == {}
        for index, partition in enumerate((T0, T1, T2)):
            expected = [text for n in range(index, 200, 3) for text in (b"%d" % n, b"%d+" % n)]
            assert stored(client, partition) == expected
            written = told[partition]
            assert (written.records, written.first_offset) == (len(expected), 0)
            assert written.next_offset == len(expected) and written.size_bytes > 0
            assert producer.next_sequence(partition) == len(expected)
        assert "0 requests under way" in repr(producer)


@pytest.mark.parametrize("acks", [1, 0])
def test_without_idempotence(cluster: Cluster, acks: int) -> None:
    with ClusterClient(settings_for(cluster.bootstrap_servers)) as client:
        producer = BatchProducer(client, acks=acks)
        assert producer.producer_id == -1
        for number in range(20):
            data = add(producer, T0, b"%d" % number)
            assert read_header(data).base_sequence == -1
        producer.flush()
        (written,) = producer.take_written().values()
        assert (written.records, written.next_offset) == (20, 20 if acks else -1)
        # acks=0 is told nothing; a request on the same connection comes after.
        assert stored(client, T0) == [b"%d" % number for number in range(20)]


def test_connections_that_break_while_writing() -> None:
    # Responses get lost after the broker has stored the batches; the same bytes are sent again and stored once.
    random.seed(4)
    with CuttingProxy([random.randrange(600, 1500) for _ in range(25)]) as proxy:
        with Cluster(settings={"advertised.listeners": f"PLAINTEXT://127.0.0.1:{proxy.port}"}) as cluster:
            proxy.target = int(cluster.bootstrap_servers.rpartition(":")[2])
            cluster.create_topic("t", partitions=3)
            with ClusterClient(settings_for(proxy.bootstrap, retry_backoff_max_ms="5")) as client:
                producer = BatchProducer(client, request_bytes=200)
                for number in range(600):
                    add(producer, (T0, T1, T2)[number % 3], b"%d" % number)
                producer.flush()
            with ClusterClient(settings_for(cluster.bootstrap_servers)) as client:
                for index, partition in enumerate((T0, T1, T2)):
                    assert stored(client, partition) == [b"%d" % n for n in range(index, 600, 3)]
        assert proxy.cut >= 5


def test_restarts_while_writing(cluster: Cluster) -> None:
    with ClusterClient(settings_for(cluster.bootstrap_servers)) as client:
        producer = BatchProducer(client, request_bytes=100)
        for number in range(300):
            add(producer, (T0, T1)[number % 2], b"%d" % number)
            if number % 100 == 50:
                cluster.restart()
        producer.flush()
        assert stored(client, T0) == [b"%d" % n for n in range(0, 300, 2)]
        assert stored(client, T1) == [b"%d" % n for n in range(1, 300, 2)]


# --- scripted brokers -------------------------------------------------------------------------------------------------


class Store:
    """Two brokers that check sequences as a real one does; `fault` may spoil an answer before anything is stored."""

    def __init__(self, stack: ExitStack) -> None:
        self.brokers = [stack.enter_context(FakeBroker()), stack.enter_context(FakeBroker())]
        self.leaders = [1, 1, 1]
        self.stored: dict[int, list[bytes]] = {}
        self.refusals: list[int] = []
        self.faults: Iterator[Any] = iter(())
        for number, broker in enumerate(self.brokers, 1):
            broker.answers[ApiKey.METADATA] = lambda request: metadata(self.brokers, {"t": self.leaders})
            broker.answers[ApiKey.INIT_PRODUCER_ID] = lambda request: InitProducerIdResponse(producer_id=9)
            broker.answers[ApiKey.PRODUCE] = lambda request, number=number: self.produce(number, request)

    def client(self, **more: str) -> ClusterClient:
        return ClusterClient(settings_for(self.brokers[0].bootstrap, **more))

    def produce(self, node: int, request: Any) -> Any:
        fault = next(self.faults, None)
        if fault is ConnectionError:
            return fault
        answers = [self.append(node, each, fault) for each in request.topic_data[0].partition_data]
        topic = ProduceResponse.TopicProduceResponse(name="t", partition_responses=answers)
        return ProduceResponse(responses=[topic])

    def append(self, node: int, data: Any, fault: Any) -> ProduceResponse.PartitionProduceResponse:
        code = ErrorCode.NONE
        kept = self.stored.setdefault(data.index, [])
        if isinstance(fault, dict):
            fault = fault.get(data.index)
        if fault is not None:
            code = fault
        elif self.leaders[data.index] != node:
            code = ErrorCode.NOT_LEADER_OR_FOLLOWER
        elif bytes(data.records) in kept:
            code = ErrorCode.DUPLICATE_SEQUENCE_NUMBER
        elif read_header(data.records).base_sequence != len(kept):
            code = ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        else:
            kept.append(bytes(data.records))
        self.refusals.append(code)
        return ProduceResponse.PartitionProduceResponse(index=data.index, error_code=code, base_offset=len(kept) - 1)


@pytest.fixture
def store() -> Iterator[Store]:
    with ExitStack() as stack:
        yield Store(stack)


@pytest.mark.parametrize(
    "faults",
    [
        [ErrorCode.NOT_ENOUGH_REPLICAS],
        [ErrorCode.REQUEST_TIMED_OUT, None, None, ErrorCode.KAFKA_STORAGE_ERROR],
        [ConnectionError, None, ConnectionError, ConnectionError],
        [None, None, None, ErrorCode.LEADER_NOT_AVAILABLE, ConnectionError],
        [{1: ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND}],
        [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_LEADER_EPOCH],
    ],
)
def test_what_follows_a_failed_batch_is_sent_again_in_order(store: Store, faults: list[Any]) -> None:
    store.faults = iter(faults)
    with store.client() as client:
        producer = BatchProducer(client, request_bytes=1)
        sent: dict[int, list[bytes]] = {0: [], 1: []}
        for number in range(2 * MAX_IN_FLIGHT * 3):
            sent[number % 2].append(add(producer, (T0, T1)[number % 2], b"%d" % number))
        producer.flush()
    assert store.stored == sent
    written = producer.take_written()
    assert written[T0].records == len(sent[0])
    assert written[T1].next_offset == len(sent[1])


PASSING = st.sampled_from([None, ConnectionError, ErrorCode.NOT_ENOUGH_REPLICAS, ErrorCode.LEADER_NOT_AVAILABLE])
FAULTS = st.lists(
    PASSING | st.dictionaries(st.integers(0, 2), PASSING.filter(lambda each: each is not ConnectionError))
)


@settings(max_examples=60)
@given(FAULTS, st.lists(st.integers(0, 2), max_size=60), st.sampled_from([1, 200, 500]))
def test_any_faults_in_any_order(faults: list[Any], partitions: list[int], request_bytes: int) -> None:
    with ExitStack() as stack:
        store = Store(stack)
        store.faults = iter(faults)
        client = stack.enter_context(store.client(retry_backoff_max_ms="2"))
        producer = BatchProducer(client, request_bytes=request_bytes)
        sent: dict[int, list[bytes]] = {}
        for number, index in enumerate(partitions):
            sent.setdefault(index, []).append(add(producer, TopicPartition("t", index), b"%d" % number))
        producer.flush()
        assert {index: kept for index, kept in store.stored.items() if kept} == sent
        written = {partition.partition: each.records for partition, each in producer.take_written().items()}
        assert written == {index: len(batches) for index, batches in sent.items()}


def test_a_leader_that_moves_gets_the_rest(store: Store) -> None:
    with store.client() as client:
        producer = BatchProducer(client, request_bytes=1)
        sent = [add(producer, T0, b"%d" % number) for number in range(8)]
        store.leaders = [2, 2, 2]
        sent += [add(producer, T0, b"%d" % number) for number in range(8, 16)]
        producer.flush()
    assert store.stored[0] == sent
    assert store.brokers[1].asked(ApiKey.PRODUCE)


def test_no_more_requests_are_under_way_than_a_broker_remembers(store: Store) -> None:
    with store.client() as client:
        producer = BatchProducer(client, request_bytes=1)
        most = 0
        for number in range(30):
            add(producer, T0, b"%d" % number)
            most = max(most, sum(map(len, producer._flights.values())))
        producer.flush()
    assert 2 <= most <= MAX_IN_FLIGHT


def test_one_batch_per_partition_and_request(store: Store) -> None:
    with store.client() as client:
        producer = BatchProducer(client, request_bytes=2_000)
        for number in range(60):
            add(producer, (T0, T1, T2)[number % 3], b"%d" % number)
        producer.flush()
    requests = store.brokers[0].asked(ApiKey.PRODUCE)
    assert len(requests) > 1
    for request in requests:
        indexes = [each.index for each in request.topic_data[0].partition_data]
        assert len(indexes) == len(set(indexes))
        assert sum(len(each.records) for each in request.topic_data[0].partition_data) <= 2_000


def test_a_sequence_gap_of_the_first_in_line_is_final(store: Store) -> None:
    store.stored[0] = [b"from nowhere"]
    with store.client() as client:
        producer = BatchProducer(client)
        add(producer, T0, b"a")
        with pytest.raises(ApiError, match="produce to t-0") as caught:
            producer.flush()
    assert caught.value.code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_a_record_that_is_too_large_says_what_to_do(cluster: Cluster) -> None:
    with ClusterClient(settings_for(cluster.bootstrap_servers)) as client:
        producer = BatchProducer(client)
        add(producer, T0, b"x" * 2_000_000)
        with pytest.raises(ApiError, match=r"produce to t-0: .*max\.message\.bytes") as caught:
            producer.flush()
    assert caught.value.code is ErrorCode.MESSAGE_TOO_LARGE


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.GZIP])
def test_a_batch_that_is_too_large_goes_in_halves(cluster: Cluster, codec: Codec) -> None:
    """As the Java client does it: many batches are under way when the first is refused, and order and count hold."""
    cluster.create_topic("small", config={"max.message.bytes": "3000"})
    small = TopicPartition("small", 0)
    values = [random.Random(number).randbytes(100) for number in range(1000)]
    with ClusterClient(settings_for(cluster.bootstrap_servers)) as client:
        producer = BatchProducer(client, request_bytes=1)
        for first in range(0, 1000, 100):
            add(producer, small, *values[first : first + 100], codec=codec)
        add(producer, T0, b"not concerned")
        producer.flush()
        assert stored(client, small) == values
        assert producer.take_written()[small].records == 1000
        assert 1000 < producer.largest_batch(small, 512 * 1024) < 3000
        assert producer.largest_batch(T0, 512 * 1024) == 512 * 1024
        # The sequences go on, and a record that is too large by itself is an error, alone or among others.
        add(producer, small, b"after")
        producer.flush()
        add(producer, small, b"a", b"x" * 4000, b"b")
        with pytest.raises(ApiError, match=r"a record is larger than the topic takes: raise its max\.message\.bytes"):
            producer.flush()


def test_giving_up_names_the_partition(store: Store) -> None:
    store.faults = iter([ErrorCode.NOT_ENOUGH_REPLICAS] * 10_000)
    with store.client(default_api_timeout_ms="30") as client:
        producer = BatchProducer(client)
        add(producer, T1, b"a")
        with pytest.raises(ApiError, match=r"produce to t-1: gave up after 0\.03 s.*NOT_ENOUGH_REPLICAS"):
            producer.flush()


def test_a_partition_without_a_leader_holds_up_only_its_own(store: Store) -> None:
    store.leaders = [1, -1, 1]
    with store.client(default_api_timeout_ms="50") as client:
        producer = BatchProducer(client, request_bytes=1)
        sent = add(producer, T0, b"a")
        with pytest.raises(ApiError, match=r"produce to t-1: gave up.*no leader"):
            add(producer, T1, b"b")
            producer.flush()
    assert store.stored[0] == [sent]


def test_a_missing_partition(cluster: Cluster) -> None:
    with ClusterClient(settings_for(cluster.bootstrap_servers, default_api_timeout_ms="50")) as client:
        producer = BatchProducer(client)
        add(producer, TopicPartition("t", 9), b"a")
        with pytest.raises(ApiError, match=r"produce to t-9.*has 3 partitions") as caught:
            producer.flush()
    assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
