"""What goes in comes out: codecs, keys, headers, nulls, timestamps, sizes; by every client, read back by every
client."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest

from clients.adapters.interface import Client, Received
from clients.opened import Opened
from clients.reading import read_all, read_count
from millrace.testing import Cluster

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
FIRST_MS = 1_700_000_000_000
PARTITIONS = 2

# Partition, key, value, headers, timestamp: as many shapes of a record as the format has.
RECORDS: list[tuple[int, bytes | None, bytes | None, tuple[tuple[str, bytes], ...], int]] = [
    (0, b"key", b"value", (), FIRST_MS),
    (1, None, b"no key", (), FIRST_MS + 1),
    (0, b"tombstone", None, (), FIRST_MS + 2),
    (1, b"", b"", (), FIRST_MS + 3),
    (0, bytes(range(256)), bytes(range(256)) * 4, (("binary", bytes(range(256))),), FIRST_MS + 4),
    (1, "ключ".encode(), "значение".encode(), (("имя", "заголовок".encode()), ("empty", b"")), FIRST_MS + 5),
    (0, b"repeated", b"headers", (("h", b"1"), ("h", b"2"), ("g", b"3")), FIRST_MS + 6),
    *(
        (number % PARTITIONS, b"k%d" % number, b"value %d " % number * 20, (("n", b"%d" % number),), FIRST_MS + number)
        for number in range(7, 200)
    ),
]


def expected(partition: int, offset_by_record: dict[int, int], topic: str) -> list[Received]:
    return [
        Received(topic, partition, offset_by_record[number], timestamp_ms, key, value, headers)
        for number, (where, key, value, headers, timestamp_ms) in enumerate(RECORDS)
        if where == partition
    ]


@pytest.mark.parametrize("codec", CODECS)
def test_every_client_reads_what_each_client_wrote(
    every_client: list[Client], codec: str, cluster: Cluster, fresh: Callable[[str], str]
) -> None:
    for writer in every_client:
        topic = fresh(f"{writer.name}.{codec}")
        cluster.create_topic(topic, PARTITIONS)
        sender = writer.sender(cluster.bootstrap_servers, codec=codec)
        pending = [
            sender.send(topic, value, key, headers=headers, timestamp_ms=timestamp_ms, partition=partition)
            for partition, key, value, headers, timestamp_ms in RECORDS
        ]
        sent = [one.result(30) for one in pending]
        sender.close()
        assert [one.partition for one in sent] == [record[0] for record in RECORDS]
        offsets = {number: one.offset for number, one in enumerate(sent)}
        for client in every_client:
            reader = client.reader(cluster.bootstrap_servers)
            received = read_all(reader, [(topic, index) for index in range(PARTITIONS)])
            reader.close()
            for index in range(PARTITIONS):
                assert [one for one in received if one.partition == index] == expected(index, offsets, topic)


def test_keys_choose_partitions_consistently(opened: Opened, cluster: Cluster, fresh: Callable[[str], str]) -> None:
    topic = fresh("keys")
    cluster.create_topic(topic, 5)
    sender = opened.sender()
    first = [sender.send(topic, b"1", b"key-%d" % number) for number in range(40)]
    second = [sender.send(topic, b"2", b"key-%d" % number) for number in range(40)]
    sender.flush()
    assert [one.result(10).partition for one in first] == [one.result(10).partition for one in second]


def test_a_record_of_nearly_a_megabyte(opened: Opened, cluster: Cluster, fresh: Callable[[str], str]) -> None:
    topic = fresh("large")
    cluster.create_topic(topic)
    value = zlib.compress(b"x") + bytes(950_000)
    opened.sender().send(topic, value, b"large").result(30)
    reader = opened.reader()
    (received,) = read_all(reader, [(topic, 0)])
    assert received.value == value


def test_a_record_that_is_too_large_is_refused_and_the_producer_lives_on(
    opened: Opened, cluster: Cluster, fresh: Callable[[str], str]
) -> None:
    topic = fresh("refused")
    cluster.create_topic(topic, config={"max.message.bytes": "20000"})
    sender = opened.sender(idempotent=False)
    with pytest.raises(Exception, match=r"(?i)too.?large"):
        sender.send(topic, bytes(50_000)).result(30)
    assert sender.send(topic, b"small").result(30).offset == 0


def test_a_topic_is_created_by_its_first_record(opened: Opened, fresh: Callable[[str], str]) -> None:
    topic = fresh("automatic")
    assert opened.sender().send(topic, b"first").result(30).offset == 0
    reader = opened.reader()
    reader.assign([(topic, 0)])
    (received,) = read_count(reader, 1)
    assert received.value == b"first"
