"""Reading a range ahead of its reader."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from millrace.client.cluster import ClusterClient
from millrace.client.fetching import FetchRange, next_offset, read_range
from millrace.client.settings import ClientSettings
from millrace.errors import ApiError, ErrorCode
from millrace.model import TopicPartition
from millrace.records.batch import split
from millrace.records.decode import Record, decode_records
from millrace.records.encode import encode_batch
from millrace.testing import Cluster
from millrace.wire.keys import ApiKey
from millrace.wire.messages.fetch import FetchResponse
from support.fake_broker import CuttingProxy, FakeBroker, metadata

T0 = TopicPartition("t", 0)
BATCHES, RECORDS = 40, 25


def settings_for(bootstrap: str, **more: str) -> ClientSettings:
    named = {name.replace("_", "."): value for name, value in more.items()}
    return ClientSettings.from_properties({"bootstrap.servers": bootstrap, "retry.backoff.ms": "1", **named})


def fill(client: ClusterClient, count: int = BATCHES) -> None:
    producer_id, epoch = client.init_producer_id()
    for number in range(count):
        first = number * RECORDS
        records = [Record(index, 0, None, b"%d" % (first + index)) for index in range(RECORDS)]
        data = encode_batch(records, producer_id=producer_id, producer_epoch=epoch, base_sequence=first)
        client.produce({T0: data})


def values_of(fetches: Iterator[Any], start: int, end: int) -> list[int]:
    return [
        int(record.value or b"")
        for fetched in fetches
        for each in split(fetched.records, partial_end=True)
        for record in decode_records(each.data)
        if start <= record.offset < end
    ]


@pytest.fixture
def filled() -> Iterator[ClientSettings]:
    with Cluster() as cluster:
        cluster.create_topic("t")
        settings = settings_for(cluster.bootstrap_servers)
        with ClusterClient(settings) as client:
            fill(client)
        yield settings


@pytest.mark.parametrize("max_bytes", [1, 3_000, 1 << 20])
@pytest.mark.parametrize(("start", "end"), [(0, 1000), (13, 14), (0, 1), (24, 26), (999, 1000), (500, 500), (7, 3)])
def test_a_range_is_covered(filled: ClientSettings, start: int, end: int, max_bytes: int) -> None:
    wanted = FetchRange(T0, start, end, max_bytes=max_bytes)
    with ClusterClient(filled) as client:
        for _ in range(2):  # a client that has read a range to its end is as good as new
            assert values_of(read_range(client, wanted), start, end) == list(range(start, end))


def connected(client: ClusterClient) -> bool:
    return "0 connections" not in repr(client)


def test_read_to_its_end_it_keeps_the_connection_and_closed_early_it_does_not(filled: ClientSettings) -> None:
    with ClusterClient(filled) as client:
        list(read_range(client, FetchRange(T0, 0, 1000)))
        assert connected(client)
        fetches = read_range(client, FetchRange(T0, 0, 1000, max_bytes=1))
        next(fetches)
        fetches.close()  # type: ignore[attr-defined]
        assert not connected(client)  # an answer was under way that nobody will take
        assert values_of(read_range(client, FetchRange(T0, 0, 1000)), 0, 1000) == list(range(1000))


def test_the_next_fetch_is_under_way_before_an_answer_is_handed_out() -> None:
    records = [encode_batch([Record(offset, 0, None, b"x")]) for offset in range(3)]
    handed_out = 0
    seen: list[tuple[int, int]] = []
    asked = threading.Semaphore(0)

    def answer(request: Any) -> FetchResponse:
        offset = request.topics[0].partitions[0].fetch_offset
        seen.append((offset, handed_out))
        asked.release()
        return answer_of(records[offset], high_watermark=3)

    with scripted(b"") as broker, client_of(broker) as client:
        broker.answers[ApiKey.FETCH] = answer
        fetches = read_range(client, FetchRange(T0, 0, 3))
        for number in range(3):
            next(fetches)
            for _ in range((2, 1, 0)[number]):  # the first, and each time the one after what is in our hands
                assert asked.acquire(timeout=10)
            handed_out += 1
        assert next(fetches, None) is None
    assert seen == [(0, 0), (1, 0), (2, 1)]


def test_closed_while_the_broker_keeps_it_waiting(filled: ClientSettings) -> None:
    with ClusterClient(filled) as client:
        fetches = read_range(client, FetchRange(T0, 990, 1001, max_wait_ms=60_000))
        next(fetches)  # the second fetch waits for offset 1000
        fetches.close()  # type: ignore[attr-defined]
        assert not connected(client)


def test_an_offset_that_is_not_there(filled: ClientSettings) -> None:
    with ClusterClient(filled) as client, pytest.raises(ApiError) as caught:
        list(read_range(client, FetchRange(T0, 5000, 6000)))
    assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE


def test_the_answer_under_way_is_an_error_that_passes(filled: ClientSettings) -> None:
    # Each second answer says that the leader has moved; `fetch` asks again, and reading goes on.
    data = [encode_batch([Record(offset, 0, None, b"%d" % offset)]) for offset in range(6)]
    answers = 0

    def answer(request: Any) -> FetchResponse:
        nonlocal answers
        answers += 1
        if answers % 2 == 0:
            return answer_of(None, error_code=ErrorCode.NOT_LEADER_OR_FOLLOWER)
        return answer_of(data[request.topics[0].partitions[0].fetch_offset], high_watermark=6)

    with scripted(b"") as broker, client_of(broker) as client:
        broker.answers[ApiKey.FETCH] = answer
        assert values_of(read_range(client, FetchRange(T0, 0, 6)), 0, 6) == list(range(6))
    assert answers == 11


def test_a_log_that_is_shorter_than_was_planned(filled: ClientSettings) -> None:
    impatient = settings_for(",".join(f"{host}:{port}" for host, port in filled.bootstrap_servers),
                             default_api_timeout_ms="50")  # fmt: skip
    with ClusterClient(impatient) as client:
        found: list[Any] = []
        with pytest.raises(ApiError, match="was to be read up to offset 1001, but ends at 1000") as caught:
            found.extend(read_range(client, FetchRange(T0, 990, 1001, max_wait_ms=10)))
    assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE


def test_connections_that_break_while_reading() -> None:
    # Each connection breaks after some bytes of response, in the middle of a frame; nothing is lost or read twice.
    with CuttingProxy() as proxy:
        with Cluster(settings={"advertised.listeners": f"PLAINTEXT://127.0.0.1:{proxy.port}"}) as cluster:
            proxy.target = int(cluster.bootstrap_servers.rpartition(":")[2])
            cluster.create_topic("t")
            settings = settings_for(cluster.bootstrap_servers)
            with ClusterClient(settings) as client:
                fill(client)
            proxy.cuts = iter([700, 1500, 2_500, 3, 4_000, 900])
            with ClusterClient(settings_for(proxy.bootstrap)) as client:
                fetches = read_range(client, FetchRange(T0, 0, 1000, max_bytes=2_000))
                assert values_of(fetches, 0, 1000) == list(range(1000))
        assert proxy.cut == 6


def answer_of(records: bytes | None, **fields: Any) -> FetchResponse:
    data = FetchResponse.PartitionData(records=records, aborted_transactions=None, **fields)
    return FetchResponse(responses=[FetchResponse.FetchableTopicResponse(topic="t", partitions=[data])])


def scripted(records: bytes, **fields: Any) -> FakeBroker:
    broker = FakeBroker()
    broker.answers[ApiKey.METADATA] = lambda request: metadata([broker], {"t": [1]})
    broker.answers[ApiKey.FETCH] = lambda request: answer_of(records, **fields)
    return broker


def client_of(broker: FakeBroker) -> ClusterClient:
    return ClusterClient(settings_for(broker.bootstrap))


def test_a_batch_that_is_always_cut_is_asked_for_in_full() -> None:
    data = encode_batch([Record(0, 0, None, b"x" * 100)])
    failed = pytest.raises(ApiError, match="no whole batch at 0")
    with scripted(data[:-1], high_watermark=1) as broker, client_of(broker) as client, failed:
        list(read_range(client, FetchRange(T0, 0, 1, max_bytes=1 << 28)))
    asked = [request.max_bytes for request in broker.asked(ApiKey.FETCH)]
    assert asked == [1 << 28, 1 << 29, 1 << 30, (1 << 31) - 1]


def test_bytes_that_are_no_batch_name_the_place() -> None:
    failed = pytest.raises(ApiError, match=r"t-0 at offset 0: .*magic 0")
    with scripted(b"\0" * 80, high_watermark=1) as broker, client_of(broker) as client, failed as caught:
        list(read_range(client, FetchRange(T0, 0, 1)))
    assert caught.value.code is ErrorCode.CORRUPT_MESSAGE


def test_next_offset_skips_an_incomplete_end() -> None:
    first = encode_batch([Record(5, 0, None, b"a"), Record(9, 0, None, b"b")])
    second = encode_batch([Record(10, 0, None, b"c")])
    assert next_offset(memoryview(first + second), 5) == 11
    assert next_offset(memoryview(first + second[:-1]), 5) == 10
    assert next_offset(memoryview(first[:30]), 5) == 5
    assert next_offset(memoryview(first), 20) == 20
