"""Batch queries on topics: exact contents, every option, and what is refused."""

from __future__ import annotations

import hashlib
import json
import time

import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession
from pyspark.sql import functions as fn
from pyspark.sql.types import LongType, StructField, StructType

from support.spark_queries import error_of, numbers, read, records
from support.topics import Sent, Topics, numbered

NOW_MS = time.time_ns() // 1_000_000
"""Recent, so that no broker's retention takes the records away."""
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


def test_columns_are_those_of_the_kafka_source(spark: SparkSession, bootstrap: str, topics: Topics) -> None:
    topic = topics.create()
    topics.send(topic, [Sent(b"v", b"k", timestamp_ms=NOW_MS)])
    frame = read(spark, bootstrap, subscribe=topic)
    assert frame.dtypes == [
        ("key", "binary"),
        ("value", "binary"),
        ("topic", "string"),
        ("partition", "int"),
        ("offset", "bigint"),
        ("timestamp", "timestamp"),
        ("timestampType", "int"),
    ]
    (row,) = frame.withColumn("timestamp", fn.unix_millis("timestamp")).collect()
    assert tuple(row) == (bytearray(b"k"), bytearray(b"v"), topic, 0, 0, NOW_MS, 0)


def test_every_codec(spark: SparkSession, bootstrap: str, topics: Topics) -> None:
    topic = topics.create(partitions=2)
    wanted = []
    offsets = [0, 0]
    for codec in CODECS:
        sent = [
            Sent(f"{codec} {number} ".encode() * (number % 50), f"{number}".encode(), partition=number % 2)
            for number in range(500)
        ]
        topics.send(topic, sent, compression_codec=codec, linger_ms=20)
        for each in sent:
            wanted.append((topic, each.partition, offsets[each.partition], each.key, each.value))
            offsets[each.partition] += 1
    assert records(read(spark, bootstrap, subscribe=topic)) == sorted(wanted)


def test_nulls_empty_values_and_headers(spark: SparkSession, bootstrap: str, topics: Topics) -> None:
    topic = topics.create()
    sent = [
        Sent(None),
        Sent(None, b"k"),
        Sent(b"", b""),
        Sent(b"v", None, headers=(("h", b"1"),)),
        Sent(b"v", b"k", headers=(("h", b"1"), ("h", b""), ("é", None))),
        Sent(b"\x00\xff", b"\x00"),
    ]
    topics.send(topic, sent)
    frame = read(spark, bootstrap, subscribe=topic, includeHeaders="true")
    assert frame.dtypes[-1] == ("headers", "array<struct<key:string,value:binary>>")
    found = frame.orderBy("offset").select("key", "value", "headers").collect()
    assert [
        (
            None if key is None else bytes(key),
            None if value is None else bytes(value),
            None
            if headers is None
            else [(each.key, None if each.value is None else bytes(each.value)) for each in headers],
        )
        for key, value, headers in found
    ] == [(each.key, each.value, list(each.headers) or None) for each in sent]


def test_large_records(spark: SparkSession, bootstrap: str, topics: Topics) -> None:
    topic = topics.create()
    values = [bytes([number]) * (1_000_000 + number) for number in range(24)]
    topics.send(topic, [Sent(value) for value in values], message_max_bytes=2_000_000)
    found = read(spark, bootstrap, subscribe=topic).select("offset", fn.sha2("value", 256)).orderBy("offset").collect()
    assert [tuple(row) for row in found] == [
        (number, hashlib.sha256(value).hexdigest()) for number, value in enumerate(values)
    ]


def test_two_hundred_partitions(spark: SparkSession, bootstrap: str, topics: Topics) -> None:
    topic = topics.create(partitions=200)
    topics.send(topic, numbered(1000, partitions=200))
    found = read(spark, bootstrap, subscribe=topic).groupBy("partition").agg(fn.count("*"), fn.max("offset")).collect()
    assert sorted(tuple(row) for row in found) == [(partition, 5, 4) for partition in range(200)]


def test_an_empty_topic_has_no_rows(spark: SparkSession, bootstrap: str, topics: Topics) -> None:
    assert read(spark, bootstrap, subscribe=topics.create(partitions=3)).count() == 0


def test_offsets(spark: SparkSession, bootstrap: str, topics: Topics) -> None:
    topic = topics.create(partitions=2)
    topics.send(topic, numbered(20, partitions=2))
    starting = json.dumps({topic: {"0": 3, "1": -2}})
    ending = json.dumps({topic: {"0": 7, "1": -1}})
    frame = read(spark, bootstrap, subscribe=topic, startingOffsets=starting, endingOffsets=ending)
    assert numbers(frame) == sorted([6, 8, 10, 12, *range(1, 20, 2)])
    frame = read(spark, bootstrap, assign=json.dumps({topic: [1]}), startingOffsets="earliest", endingOffsets="latest")
    assert numbers(frame) == list(range(1, 20, 2))


def test_times(spark: SparkSession, bootstrap: str, topics: Topics) -> None:
    topic = topics.create(partitions=2)
    start_ms = NOW_MS - 3_600_000
    sent = [
        Sent(str(number).encode(), partition=number % 2, timestamp_ms=start_ms + number * 1000) for number in range(20)
    ]
    topics.send(topic, sent)
    frame = read(spark, bootstrap, subscribe=topic, startingTimestamp=start_ms + 4000, endingTimestamp=start_ms + 8500)
    assert numbers(frame) == [4, 5, 6, 7, 8]
    by_partition = json.dumps({topic: {"0": start_ms + 18_000, "1": start_ms + 1_000}})
    ends = json.dumps({topic: {"0": start_ms + 99_000, "1": start_ms + 5_000}})
    frame = read(
        spark, bootstrap, subscribe=topic, startingOffsetsByTimestamp=by_partition, endingOffsetsByTimestamp=ends
    )
    assert numbers(frame) == [1, 3, 18]
    late = start_ms + 18_500
    message = error_of(read(spark, bootstrap, subscribe=topic, startingTimestamp=late).count)
    assert f"no record at or after the starting time in {topic}-0" in message
    frame = read(spark, bootstrap, subscribe=topic, startingTimestamp=late, startingOffsetsByTimestampStrategy="latest")
    assert numbers(frame) == [19]


def test_several_topics_and_patterns(spark: SparkSession, bootstrap: str, topics: Topics) -> None:
    one, two = topics.create("pattern-one"), topics.create("pattern-two", partitions=2)
    topics.send(one, numbered(5))
    topics.send(two, numbered(5, partitions=2, start=5))
    assert numbers(read(spark, bootstrap, subscribe=f"{one}, {two}")) == list(range(10))
    assert numbers(read(spark, bootstrap, subscribePattern=f"pattern-(x|.*{two[-8:]})")) == list(range(5, 10))
    assert numbers(read(spark, bootstrap, subscribePattern=two[-8:])) == list(range(5, 10))  # anywhere in the name
    assert read(spark, bootstrap, subscribePattern=f"^{two[-8:]}").count() == 0


@pytest.mark.parametrize(
    ("options", "tasks"), [({}, 2), ({"minPartitions": "8"}, 8), ({"maxRecordsPerPartition": "30"}, 8)]
)
def test_ranges_are_split(
    spark: SparkSession, bootstrap: str, topics: Topics, options: dict[str, str], tasks: int
) -> None:
    topic = topics.create(partitions=3)
    topics.send(topic, numbered(200, partitions=2))
    frame = read(spark, bootstrap, subscribe=topic, **options)
    assert frame.rdd.getNumPartitions() == tasks
    assert numbers(frame) == list(range(200))


def test_many_fetches_of_one_range(spark: SparkSession, bootstrap: str, topics: Topics) -> None:
    topic = topics.create()
    topics.send(topic, numbered(30_000), batch_size=4096)
    frame = read(spark, bootstrap, subscribe=topic, kafka__max__partition__fetch__bytes="20000")
    assert frame.agg(fn.count("*"), fn.sum("offset"), fn.countDistinct("offset")).first() == (
        30_000,
        449_985_000,
        30_000,
    )


def test_a_schema_chooses_columns(spark: SparkSession, bootstrap: str, topics: Topics) -> None:
    topic = topics.create()
    topics.send(topic, [Sent(b"a"), Sent(b"b", headers=(("h", b"1"),))])
    frame = read(spark, bootstrap, schema="offset BIGINT, value BINARY", subscribe=topic)
    assert [tuple(row) for row in frame.collect()] == [(0, bytearray(b"a")), (1, bytearray(b"b"))]
    frame = read(spark, bootstrap, schema="headers ARRAY<STRUCT<key: STRING, value: BINARY>>", subscribe=topic)
    assert [row.headers and row.headers[0].key for row in frame.collect()] == [None, "h"]
    wrong = error_of(read(spark, bootstrap, schema="offset INT", subscribe=topic).count)
    assert "column 'offset' is of type bigint, not int" in wrong
    assert "has no column 'text'" in error_of(read(spark, bootstrap, schema="text STRING", subscribe=topic).count)


JSON_SCHEMA = StructType([StructField("id", LongType())]).json()


@pytest.mark.parametrize("schema", ["id BIGINT", JSON_SCHEMA])
def test_json_values_become_columns(spark: SparkSession, bootstrap: str, topics: Topics, schema: str) -> None:
    topic = topics.create()
    topics.send(topic, [Sent(b'{"id": 1}', b"k"), Sent(b'{"id": "x"}'), Sent(None), Sent(b'{"id": 2, "more": true}')])
    frame = read(spark, bootstrap, subscribe=topic, value__format="json", value__schema=schema)
    assert dict(frame.dtypes)["value"] == "struct<id:bigint>"
    assert frame.columns == ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "_corrupt"]
    found = frame.orderBy("offset").select("offset", "value.*", "_corrupt").collect()
    assert [tuple(row) for row in found] == [(0, 1, None), (1, None, '{"id": "x"}'), (2, None, None), (3, 2, None)]


def test_json_values_of_many_types(spark: SparkSession, bootstrap: str, topics: Topics) -> None:
    topic = topics.create()
    value = {"at": "2024-02-29T12:00:00Z", "price": 12.5, "tags": ["a"], "inner": {"x": 1}, "more": {"k": 1.5}}
    topics.send(topic, [Sent(json.dumps(value).encode())])
    schema = "at TIMESTAMP, price DECIMAL(5,2), tags ARRAY<STRING>, inner STRUCT<x: INT>, more MAP<STRING, DOUBLE>"
    frame = read(spark, bootstrap, subscribe=topic, value__format="json", value__schema=schema, includeHeaders="true")
    assert frame.select(fn.to_json("value")).first() == (
        '{"at":"2024-02-29T12:00:00.000Z","price":12.50,"tags":["a"],"inner":{"x":1},"more":{"k":1.5}}',
    )


def test_json_that_does_not_match_fails_fast_when_told_to(spark: SparkSession, bootstrap: str, topics: Topics) -> None:
    topic = topics.create()
    topics.send(topic, [Sent(b'{"id": 1}'), Sent(b'{"id": "x"}')])
    options = {"value__format": "json", "value__schema": "id BIGINT", "value__mode": "failfast"}
    frame = read(spark, bootstrap, subscribe=topic, **options)
    assert "_corrupt" not in frame.columns
    message = error_of(frame.collect)
    assert f"topic {topic}, partition 0, offset 1: the value does not match value.schema" in message
    assert "field 'id' is to be bigint, and is \"x\"" in message


def test_a_missing_topic_or_partition(spark: SparkSession, bootstrap: str, topics: Topics) -> None:
    message = error_of(read(spark, bootstrap, subscribe="not-there").count)
    assert "topic 'not-there' does not exist on" in message
    topic = topics.create()
    message = error_of(read(spark, bootstrap, assign=json.dumps({topic: [0, 5]})).count)
    assert f"partition {topic}-5 does not exist on" in message
    assert read(spark, bootstrap, subscribePattern="not-there-.*").count() == 0


def test_every_partition_needs_an_offset(spark: SparkSession, bootstrap: str, topics: Topics) -> None:
    topic = topics.create(partitions=2)
    starting = json.dumps({topic: {"0": 0}})
    message = error_of(read(spark, bootstrap, subscribe=topic, startingOffsets=starting).count)
    assert f"'startingOffsets' has no entry for {topic}-1" in message
    starting = json.dumps({topic: {"0": 0, "1": 0, "2": 0}})
    message = error_of(read(spark, bootstrap, subscribe=topic, startingOffsets=starting).count)
    assert f"'startingOffsets' names {topic}-2" in message


def test_options_are_checked_when_the_query_is_made(spark: SparkSession, bootstrap: str) -> None:
    assert "did you mean startingOffsets" in error_of(lambda: read(spark, bootstrap, subscribe="t", startingOffset="1"))
    message = error_of(lambda: read(spark, bootstrap, subscribe="t", kafka__auto__offset__reset="earliest"))
    assert "option 'kafka.auto.offset.reset' is not supported" in message


def test_a_broker_that_is_not_there(spark: SparkSession) -> None:
    frame = read(spark, "127.0.0.1:1", subscribe="t", kafka__default__api__timeout__ms="300")
    message = error_of(frame.count)
    assert "127.0.0.1:1" in message
    assert "gave up after 0.3 s" in message


def test_offsets_that_are_gone(spark: SparkSession, bootstrap: str, topics: Topics) -> None:
    topic = topics.create()
    topics.send(topic, numbered(100))
    topics.delete_records(topic, 0, 60)
    assert numbers(read(spark, bootstrap, subscribe=topic)) == list(range(60, 100))
    options = {"subscribe": topic, "startingOffsets": json.dumps({topic: {"0": 10}})}
    message = error_of(read(spark, bootstrap, **options).count)
    assert f"offsets 10 to 59 of partition {topic}-0 are gone: its log begins at offset 60" in message
    assert "Set option failOnDataLoss to false" in message
    assert numbers(read(spark, bootstrap, failOnDataLoss="false", **options)) == list(range(60, 100))


@pytest.mark.parametrize("option", ["startingOffsets", "endingOffsets"])
def test_offsets_that_are_not_written_yet(spark: SparkSession, bootstrap: str, topics: Topics, option: str) -> None:
    topic = topics.create()
    topics.send(topic, numbered(10))
    options = {"subscribe": topic, option: json.dumps({topic: {"0": 50}})}
    message = error_of(read(spark, bootstrap, **options).count)
    assert f"{option} has offset 50 for partition {topic}-0, which ends at 10" in message
    found = numbers(read(spark, bootstrap, failOnDataLoss="false", **options))
    assert found == ([] if option == "startingOffsets" else list(range(10)))


def test_only_committed_records(spark: SparkSession, bootstrap: str, topics: Topics) -> None:
    topic = topics.create()
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": topic, "log_level": 0})
    producer.init_transactions(30)
    for start, commit in ((0, True), (10, False), (20, True)):
        producer.begin_transaction()
        for number in range(start, start + 10):
            producer.produce(topic, str(number))
        producer.flush()
        producer.commit_transaction() if commit else producer.abort_transaction()
    frame = read(spark, bootstrap, subscribe=topic, kafka__isolation__level="read_committed")
    assert numbers(frame) == [*range(10), *range(20, 30)]
    assert numbers(read(spark, bootstrap, subscribe=topic)) == list(range(30))
