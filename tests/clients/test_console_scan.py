"""Scans, tails, downloads and producing of the console, against real brokers."""

from __future__ import annotations

import csv
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from confluent_kafka import Producer
from confluent_kafka import TopicPartition as Place
from confluent_kafka.admin import AdminClient

from millrace.client.settings import ClientSettings
from millrace.console.records import reading
from millrace.console.records.download import DownloadFailed, FileFormat, download
from millrace.console.records.filters import FilterError
from millrace.console.records.found import LIST_BYTES
from millrace.console.records.plan import Continuation, Limits, ScanRequest, Start, StartKind
from millrace.console.records.producing import InputError, Outgoing, Written, produce, send_again
from millrace.console.records.reading import read_one
from millrace.console.records.scan import Scan, State
from millrace.console.records.tail import Tail, TailRequest
from millrace.errors import ApiError, ErrorCode
from millrace.testing import Cluster
from millrace.wire.keys import ApiKey
from support.fake_broker import FakeBroker, metadata

FIRST_MS = 1_700_000_000_000
PARTITIONS = 3
COUNT = 300
BEGINNING = Start(StartKind.BEGINNING)
HOSTILE = b"<script>alert(1)</script>"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(settings={"log.cleaner.backoff.ms": "100"}) as running:
        yield running


@pytest.fixture(scope="module")
def settings(cluster: Cluster) -> ClientSettings:
    return settings_for(cluster.bootstrap_servers)


def settings_for(bootstrap: str) -> ClientSettings:
    return ClientSettings.from_properties({"bootstrap.servers": bootstrap, "retry.backoff.ms": "10"})


@pytest.fixture(scope="module")
def orders(cluster: Cluster, settings: ClientSettings) -> str:
    """A record per millisecond, in turn to three partitions, in batches of ten."""
    cluster.create_topic("orders", PARTITIONS)
    for first in range(0, COUNT, 30):
        produce(
            settings,
            "orders",
            [
                Outgoing(
                    b"k%d" % number,
                    b'{"n": %d, "even": %s}' % (number, b"false" if number % 2 else b"true"),
                    (("trace", b"t%d" % number),),
                    number % PARTITIONS,
                    FIRST_MS + number,
                )
                for number in range(first, first + 30)
            ],
        )
    return "orders"


def run(settings: ClientSettings, request: ScanRequest) -> Scan:
    scan = Scan(settings, request)
    scan.run()
    return scan


def numbers(scan: Scan) -> list[int]:
    return [int(json.loads(match.value or b"")["n"]) for match in scan.matches]


def eventually(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@contextmanager
def running(work: Callable[[], None], stop: Callable[[], None]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield thread
    finally:
        stop()
        thread.join(20)
        assert not thread.is_alive()


# Where it begins.


def test_from_the_beginning_in_the_order_of_time(settings: ClientSettings, orders: str) -> None:
    scan = run(settings, ScanRequest(orders, BEGINNING, limits=Limits(matches=None)))
    assert numbers(scan) == list(range(COUNT))
    progress = scan.progress
    assert (progress.state, progress.records, progress.matched) == (State.DONE, COUNT, COUNT)
    assert (progress.share, progress.seconds_left, progress.notes) == (1.0, None, ())
    assert scan.matches[0].headers == (("trace", b"t0"),)


def test_the_newest_come_first(settings: ClientSettings, orders: str) -> None:
    scan = run(settings, ScanRequest(orders, limits=Limits(matches=50)))
    assert numbers(scan) == list(range(COUNT - 1, COUNT - 51, -1))
    assert scan.progress.state is State.PAGE
    assert scan.progress.records < COUNT


def test_from_offsets(settings: ClientSettings, orders: str) -> None:
    everything = Limits(matches=None)
    scan = run(settings, ScanRequest(orders, Start(StartKind.OFFSET, offset=90), limits=everything))
    assert numbers(scan) == list(range(270, COUNT))
    scan = run(settings, ScanRequest(orders, Start(StartKind.OFFSET, offset=-2), limits=everything))
    assert numbers(scan) == list(range(COUNT - 6, COUNT))
    start = Start(StartKind.BEGINNING, offsets={0: 99, 1: 98, 2: 10_000})
    assert numbers(run(settings, ScanRequest(orders, start, limits=everything))) == [295, 297, 298]
    request = ScanRequest(orders, BEGINNING, partitions=(1,), until_offset=3, limits=everything)
    assert numbers(run(settings, request)) == [1, 4, 7]


def test_from_and_until_a_time(settings: ClientSettings, orders: str) -> None:
    start = Start(StartKind.TIME, time_ms=FIRST_MS + 100)
    request = ScanRequest(orders, start, until_time_ms=FIRST_MS + 110, limits=Limits(matches=None))
    assert numbers(run(settings, request)) == list(range(100, 110))
    late = ScanRequest(orders, Start(StartKind.TIME, time_ms=FIRST_MS + 10_000))
    assert run(settings, late).progress.state is State.DONE


# Filters.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("value.n == 123", [123]),
        ("value.even == false and value.n > 290", [291, 293, 295, 297, 299]),
        ('key == "k7"', [7]),
        ('"t299"', [299]),
        ('header.trace matches "^t1?2$"', [2, 12]),
        ("partition == 1 and offset < 2", [1, 4]),
        (f"timestamp > {FIRST_MS + 297}", [298, 299]),
        ('value contains "nowhere"', []),
    ],
)
def test_filters(settings: ClientSettings, orders: str, text: str, expected: list[int]) -> None:
    forwards = run(settings, ScanRequest(orders, BEGINNING, filter_text=text))
    backwards = run(settings, ScanRequest(orders, filter_text=text))
    assert numbers(forwards) == expected
    assert numbers(backwards) == expected[::-1]
    assert forwards.progress.records == backwards.progress.records == COUNT
    assert forwards.progress.state is backwards.progress.state is State.DONE


def test_a_bad_filter_is_told_before_anything_is_read(settings: ClientSettings, orders: str) -> None:
    with pytest.raises(FilterError, match="is no field"):
        Scan(settings, ScanRequest(orders, filter_text="nonsense"))


# Budgets, and going on.


@pytest.mark.parametrize("start", [Start(), BEGINNING])
@pytest.mark.parametrize("text", ["", "value.even == true"])
@pytest.mark.parametrize(
    "limits", [Limits(matches=7), Limits(matches=1000, records=40), Limits(matches=11, size_bytes=600)]
)
def test_pages_together_are_everything_once(
    settings: ClientSettings, orders: str, start: Start, text: str, limits: Limits
) -> None:
    request = ScanRequest(orders, start, filter_text=text, limits=limits)
    found: list[int] = []
    pages = 0
    while True:
        scan = run(settings, request)
        found += numbers(scan)
        pages += 1
        if scan.continuation is None:
            break
        assert scan.progress.state in {State.PAGE, State.LIMIT}
        assert (scan.progress.state is State.LIMIT) == bool(scan.progress.error)
        request = replace(request, continuation=Continuation.parse(str(scan.continuation)))
    assert scan.progress.state is State.DONE
    assert pages > 2
    expected = [number for number in range(COUNT) if not text or number % 2 == 0]
    assert sorted(found) == expected
    if limits.matches == 7:
        assert found == (expected if start is BEGINNING else expected[::-1])


def test_a_budget_of_time(settings: ClientSettings, orders: str) -> None:
    scan = run(settings, ScanRequest(orders, BEGINNING, filter_text='"nowhere"', limits=Limits(seconds=0.0)))
    assert (scan.progress.state, scan.progress.error) == (State.LIMIT, "0 seconds are over")
    assert scan.continuation is not None


def test_a_place_that_was_tampered_with() -> None:
    for text in ("", "x", "f~1", "f~1.2.3~", "f~-1.2.3", "f~1.2.3;drop", "f~1.2.99999999999999999999"):
        with pytest.raises(ValueError, match="begin the scan anew"):
            Continuation.parse(text)


# Cancelling, and brokers that fail.


def test_cancelling_keeps_what_was_found(settings: ClientSettings, orders: str) -> None:
    found: list[object] = []

    def take(match: object) -> None:
        found.append(match)
        if len(found) == 5:
            scan.cancel()

    scan = Scan(settings, ScanRequest(orders, BEGINNING, limits=Limits(matches=None)), take=take)
    scan.run()
    assert scan.progress.state is State.CANCELLED
    assert 5 <= len(found) < COUNT
    assert scan.continuation is not None


def test_cancelling_in_the_midst_of_a_fetch() -> None:
    asked = threading.Event()

    def silent(_request: object) -> None:
        asked.set()

    answers = {ApiKey.METADATA: lambda _request: metadata([broker], {"t": [1]}), ApiKey.LIST_OFFSETS: silent}
    with FakeBroker(answers) as broker:
        scan = Scan(settings_for(broker.bootstrap), ScanRequest("t", BEGINNING))
        with running(scan.run, scan.cancel) as thread:
            assert asked.wait(20)
            began = time.monotonic()
            scan.cancel()
            thread.join(20)
            assert time.monotonic() - began < 2
    assert scan.progress.state is State.CANCELLED


def test_a_topic_that_does_not_exist(settings: ClientSettings) -> None:
    scan = run(settings, ScanRequest("missing"))
    assert scan.progress.state is State.FAILED
    assert "there is no topic 'missing'" in scan.progress.error
    assert "Traceback" not in scan.progress.error


def test_no_broker_at_all() -> None:
    scan = Scan(settings_for("127.0.0.1:1"), ScanRequest("t"))
    with running(scan.run, scan.cancel):
        eventually(lambda: scan._client.failures > 1)
    assert scan.progress.state is State.CANCELLED


def test_a_leader_that_moves_is_followed() -> None:
    with Cluster(brokers=3) as cluster:
        settings = settings_for(cluster.bootstrap_servers)
        cluster.create_topic("moving", 3)
        for _ in range(20):
            produce(settings, "moving", [Outgoing(None, b"x" * 100, partition=number) for number in range(3)])
        scan = Scan(settings, ScanRequest("moving", BEGINNING, limits=Limits(matches=None)))
        steps = scan.steps()
        next(steps)
        cluster.stop_broker(2)
        for _ in steps:
            pass
        assert (scan.progress.state, scan.progress.matched, scan.progress.notes) == (State.DONE, 60, ())


def test_a_topic_that_is_deleted_meanwhile(
    cluster: Cluster, settings: ClientSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_FETCH_BYTES", 64 * 1024)
    cluster.create_topic("doomed", 1)
    for _ in range(60):
        produce(settings, "doomed", [Outgoing(None, bytes(4_000))])
    scan = Scan(settings, ScanRequest("doomed", BEGINNING, limits=Limits(matches=None)))
    steps = scan.steps()
    next(steps)
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    admin.delete_topics(["doomed"])["doomed"].result()
    for _ in steps:
        pass
    assert scan.progress.state is State.DONE
    assert "partition 0 is gone: was the topic deleted?" in scan.progress.notes[0]


def test_records_that_are_removed_meanwhile(
    cluster: Cluster, settings: ClientSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_FETCH_BYTES", 64 * 1024)
    cluster.create_topic("shrinking", 1)
    for _ in range(60):
        produce(settings, "shrinking", [Outgoing(None, bytes(8_000))])
    scan = Scan(settings, ScanRequest("shrinking", BEGINNING, limits=Limits(matches=None)))
    steps = scan.steps()
    next(steps)
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    for future in admin.delete_records([Place("shrinking", 0, 59)]).values():
        future.result()
    for _ in steps:
        pass
    assert scan.progress.state is State.DONE
    assert scan.matches[-1].offset == 59
    assert scan.progress.notes == ("partition 0: records before offset 59 were removed while they were being read",)


# What lies in a log.


def test_transactions_markers_and_tombstones(cluster: Cluster, settings: ClientSettings) -> None:
    cluster.create_topic("transactional", 1)
    for number, commits in enumerate([True, False, True]):
        producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "transactional.id": f"tx-{number}"})
        producer.init_transactions()
        producer.begin_transaction()
        for _ in range(3):
            producer.produce("transactional", value=b"%d" % number, key=b"k")
        producer.produce("transactional", value=None, key=b"gone")
        producer.flush()
        if commits:
            producer.commit_transaction()
        else:
            producer.abort_transaction()
    for start in (BEGINNING, Start()):
        committed = run(settings, ScanRequest("transactional", start))
        assert sorted(match.value or b"-" for match in committed.matches) == [b"-", b"-", *[b"0"] * 3, *[b"2"] * 3]
        assert committed.progress.hidden == 4
    uncommitted = run(settings, ScanRequest("transactional", BEGINNING, read_committed=False, include_control=True))
    assert [match.value for match in uncommitted.matches[5:9]] == [b"1", b"1", b"1", None]
    assert [match.control for match in uncommitted.matches if match.control] == ["commit", "abort", "commit"]
    tombstones = run(settings, ScanRequest("transactional", BEGINNING, filter_text="value == null"))
    assert [match.key for match in tombstones.matches] == [b"gone", b"gone"]
    marker = read_one(settings, "transactional", 0, 4)
    assert marker is not None and marker.control == "commit"
    with pytest.raises(InputError, match="control record"):
        send_again(settings, Written("transactional", 0, 4))


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_compressed_batches(cluster: Cluster, settings: ClientSettings, codec: str) -> None:
    topic = f"compressed-{codec}"
    cluster.create_topic(topic, 1)
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "compression.type": codec, "linger.ms": 50})
    for number in range(500):
        producer.produce(topic, value=b'{"n": %d, "text": "%s"}' % (number, b"again " * 5))
    producer.flush()
    scan = run(settings, ScanRequest(topic, BEGINNING, filter_text="value.n >= 498"))
    assert numbers(scan) == [498, 499]
    assert scan.progress.records == 500


def test_holes_that_compaction_leaves(cluster: Cluster, settings: ClientSettings) -> None:
    config = {
        "cleanup.policy": "compact",
        "segment.ms": "1",
        "min.cleanable.dirty.ratio": "0.01",
        "max.compaction.lag.ms": "1",
    }
    cluster.create_topic("compacted", 1, config=config)
    for number in range(20):
        produce(settings, "compacted", [Outgoing(b"k%d" % (number % 2), b"%d" % number)] * 3)

    def offsets() -> list[int]:
        return [match.offset for match in run(settings, ScanRequest("compacted", BEGINNING)).matches]

    def is_compacted() -> bool:
        produce(settings, "compacted", [Outgoing(b"roll", b"x")])
        return len(offsets()) < 60

    eventually(is_compacted, 60)
    forwards = offsets()
    backwards = [match.offset for match in run(settings, ScanRequest("compacted")).matches]
    assert backwards[::-1][: len(forwards)] == forwards
    assert forwards != list(range(len(forwards)))


def test_hostile_contents_are_only_bytes(cluster: Cluster, settings: ClientSettings) -> None:
    cluster.create_topic("hostile", 1)
    produce(settings, "hostile", [Outgoing(HOSTILE, HOSTILE, ((HOSTILE.decode(), HOSTILE),))])
    (match,) = run(settings, ScanRequest("hostile", filter_text='headers contains "<script>"')).matches
    assert (match.key, match.value, match.headers) == (HOSTILE, HOSTILE, ((HOSTILE.decode(), HOSTILE),))


def test_long_values_are_cut_in_lists_and_read_whole_by_offset(cluster: Cluster, settings: ClientSettings) -> None:
    cluster.create_topic("long", 1)
    value = bytes(range(256)) * 1_000
    produce(settings, "long", [Outgoing(b"k", value)])
    (match,) = run(settings, ScanRequest("long")).matches
    assert (match.value, match.value_bytes, match.is_cut) == (value[:LIST_BYTES], len(value), True)
    whole = read_one(settings, "long", 0, 0)
    assert whole is not None and whole.value == value and not whole.is_cut
    assert read_one(settings, "long", 0, 1) is None
    with pytest.raises(ApiError):
        read_one(settings, "long", 9, 0)


# Downloads.


def lines(settings: ClientSettings, request: ScanRequest, file_format: FileFormat) -> bytes:
    return b"".join(download(settings, request, file_format))


def test_downloads(cluster: Cluster, settings: ClientSettings) -> None:
    cluster.create_topic("spread", 1)
    long = b"x" * (LIST_BYTES * 2)
    produce(
        settings,
        "spread",
        [
            Outgoing(b"=1+1", b"@SUM(A1)", (("h", b"-1"),), timestamp_ms=FIRST_MS),
            Outgoing(b"k", b'a "quoted", line\n', timestamp_ms=FIRST_MS),
            Outgoing(None, b"\xff\x00", timestamp_ms=FIRST_MS),
            Outgoing(b"k", None, timestamp_ms=FIRST_MS),
            Outgoing(b"k", long, timestamp_ms=FIRST_MS),
        ],
    )
    request = ScanRequest("spread", BEGINNING, limits=Limits(matches=None))
    rows = list(csv.DictReader(io.StringIO(lines(settings, request, FileFormat.CSV).decode())))
    assert [row["key"] for row in rows] == ["'=1+1", "k", "", "k", "k"]
    assert [row["value"] for row in rows] == ["'@SUM(A1)", 'a "quoted", line\n', "/wA=", "", long.decode()]
    assert rows[0]["headers"] == '[["h", "-1"]]'
    assert rows[0]["time"] == "2023-11-14T22:13:20.000Z"
    records = [json.loads(line) for line in lines(settings, request, FileFormat.JSON_LINES).splitlines()]
    assert [record["value"] for record in records[1:4]] == ['a "quoted", line\n', {"base64": "/wA="}, None]
    assert records[0]["headers"] == [["h", "-1"]]
    newest = ScanRequest("spread", limits=Limits(matches=2))
    assert lines(settings, newest, FileFormat.VALUES) == long + b"\n"
    nothing = ScanRequest("spread", filter_text='"nowhere"')
    assert lines(settings, nothing, FileFormat.JSON_LINES) == b""


def test_a_download_that_breaks_off_says_so(settings: ClientSettings, orders: str) -> None:
    with pytest.raises(DownloadFailed, match="there is no topic"):
        lines(settings, ScanRequest("missing", BEGINNING), FileFormat.VALUES)
    with pytest.raises(FilterError):
        download(settings, ScanRequest(orders, filter_text="nonsense"), FileFormat.CSV)
    pieces = download(settings, ScanRequest(orders, BEGINNING, limits=Limits(matches=None)), FileFormat.VALUES)
    assert next(pieces)
    pieces.close()  # as when the browser goes away


# Live.


def test_a_tail_shows_what_comes(cluster: Cluster, settings: ClientSettings) -> None:
    cluster.create_topic("live", 2)
    produce(settings, "live", [Outgoing(None, b"before", partition=0)])
    tail = Tail(settings, TailRequest("live", filter_text='not value == "no"'))
    with running(tail.run, tail.stop):
        eventually(lambda: tail.state.following)
        produce(settings, "live", [Outgoing(None, b"one", partition=0), Outgoing(None, b"no", partition=1)])
        eventually(lambda: tail.state.seen == 2)
        (first,) = tail.after(0)
        assert (first.number, first.record.value) == (1, b"one")
        tail.pause()
        eventually(lambda: tail.state.paused)
        produce(settings, "live", [Outgoing(None, b"two", partition=1)])
        assert tail.after(1) == []
        tail.resume()
        eventually(lambda: [each.record.value for each in tail.after(1)] == [b"two"])
    assert tail.state.over and not tail.state.error


def test_a_tail_counts_what_it_leaves_out(cluster: Cluster, settings: ClientSettings) -> None:
    cluster.create_topic("flood", 1)
    tail = Tail(settings, TailRequest("flood", per_second=10))
    with running(tail.run, tail.stop):
        eventually(lambda: tail.state.following)
        produce(settings, "flood", [Outgoing(None, b"x")] * 900)
        eventually(lambda: tail.state.seen == 900)
    assert len(tail.after(0)) + tail.state.dropped == 900
    assert 10 <= len(tail.after(0)) < 200


def test_a_tail_of_nothing_ends_with_a_reason(settings: ClientSettings) -> None:
    tail = Tail(settings, TailRequest("missing"))
    with running(tail.run, tail.stop):
        eventually(lambda: tail.state.over)
    assert "missing" in tail.state.error


# Producing.


def test_records_go_where_javas_client_would_put_them(cluster: Cluster, settings: ClientSettings, orders: str) -> None:
    cluster.create_topic("produced", 4)
    java = Producer({"bootstrap.servers": cluster.bootstrap_servers, "partitioner": "murmur2_random"})
    keys = [b"key-%d" % number for number in range(20)]
    places: list[tuple[bytes | None, int | None]] = []
    for key in keys:
        java.produce(
            "produced", key=key, on_delivery=lambda _error, message: places.append((message.key(), message.partition()))
        )
    java.flush()
    ours = produce(settings, "produced", [Outgoing(key, None) for key in keys])
    assert {key: place.partition for key, place in zip(keys, ours, strict=True)} == dict(places)
    everywhere = {produce(settings, "produced", [Outgoing(None, b"x")])[0].partition for _ in range(40)}
    assert everywhere == {0, 1, 2, 3}


def test_a_record_is_sent_again_byte_by_byte(cluster: Cluster, settings: ClientSettings) -> None:
    cluster.create_topic("source", 1)
    cluster.create_topic("target", 3)
    headers = (("h", b"\x00\xff"), ("h", None), ("ü", b""))
    (written,) = produce(settings, "source", [Outgoing(b"\xff\x00", bytes(range(256)), headers, timestamp_ms=FIRST_MS)])
    original = read_one(settings, *written)
    assert original is not None and original.headers == headers
    again = send_again(settings, written, keep_time=True)
    other = send_again(settings, written, topic="target", partition=2)
    assert (again.topic, again.offset, other.topic, other.partition) == ("source", 1, "target", 2)
    copy, moved = read_one(settings, *again), read_one(settings, *other)
    assert copy is not None and replace(copy, offset=0) == original
    assert moved is not None
    assert (moved.key, moved.value, moved.headers) == (original.key, original.value, original.headers)
    assert moved.timestamp_ms > FIRST_MS
    with pytest.raises(InputError, match="any more"):
        send_again(settings, Written("source", 0, 99))


def test_what_cannot_be_produced_is_explained(cluster: Cluster, settings: ClientSettings) -> None:
    cluster.create_topic("small", 1, config={"max.message.bytes": "1000"})
    with pytest.raises(ApiError, match="larger than the topic takes"):
        produce(settings, "small", [Outgoing(None, bytes(5_000))])
    with pytest.raises(ApiError, match="has 1 partitions, and no 7"):
        produce(settings, "small", [Outgoing(None, b"x", partition=7)])
    with pytest.raises(InputError, match="no record"):
        produce(settings, "small", [])
    with pytest.raises(ApiError) as raised:
        produce(settings, "missing", [Outgoing(None, b"x")])
    assert raised.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    in_halves = produce(settings, "small", [Outgoing(None, bytes(300))] * 6)
    assert [place.partition for place in in_halves] == [0] * 6
