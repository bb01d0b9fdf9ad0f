"""Reading a range ahead of its reader."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from millrace.client.cluster import ClusterClient
from millrace.client.fetching import FetchAhead, FetchRange, next_offset, read_range
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


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("fetch ")}


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
            with FetchAhead(client, wanted) as ahead:
                assert values_of(iter(ahead), start, end) == list(range(start, end))
            assert not threads()


def test_closed_early_it_leaves_nothing(filled: ClientSettings) -> None:
    with FetchAhead(ClusterClient(filled), FetchRange(T0, 0, 1000, max_bytes=1)) as ahead:
        next(iter(ahead))
        assert threads() == {"fetch t-0"}
        assert "t-0, 0 to 1000" in repr(ahead)
    assert not threads()
    ahead.close()
    with pytest.raises(RuntimeError, match="once"):
        next(iter(ahead))
    unread = FetchAhead(ClusterClient(filled), FetchRange(T0, 0, 1000))
    unread.close()


def test_closed_while_the_broker_keeps_it_waiting(filled: ClientSettings) -> None:
    with FetchAhead(ClusterClient(filled), FetchRange(T0, 990, 1001, max_wait_ms=60_000)) as ahead:
        next(iter(ahead))  # the second fetch waits for offset 1000
    assert not threads()


def test_errors_are_raised_in_the_reader(filled: ClientSettings) -> None:
    with FetchAhead(ClusterClient(filled), FetchRange(T0, 5000, 6000)) as ahead, pytest.raises(ApiError) as caught:
        list(ahead)
    assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE
    assert not threads()


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
            with (
                ClusterClient(settings_for(proxy.bootstrap)) as client,
                FetchAhead(client, FetchRange(T0, 0, 1000, max_bytes=2_000)) as ahead,
            ):
                assert values_of(iter(ahead), 0, 1000) == list(range(1000))
        assert proxy.cut == 6


def scripted(records: bytes, **fields: Any) -> FakeBroker:
    broker = FakeBroker()
    data = FetchResponse.PartitionData(records=records, aborted_transactions=None, **fields)
    topic = FetchResponse.FetchableTopicResponse(topic="t", partitions=[data])
    broker.answers[ApiKey.METADATA] = lambda request: metadata([broker], {"t": [1]})
    broker.answers[ApiKey.FETCH] = lambda request: FetchResponse(responses=[topic])
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
