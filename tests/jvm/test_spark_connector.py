"""Spark's own JVM Kafka connector against the broker: batch and streaming, read and write, exact contents.

It is a different user of the protocol than the tools: the admin client finds partitions and offsets, consumers without
a group are assigned and seek, and a stream ends where the log ended when it started. One Spark session for the file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from support.maven import JarsUnavailable
from support.servers import Server
from support.spark_sessions import connector_jars, local_session

BASE_MS = (int(time.time()) - 3600) * 1000  # retention goes by record time: an old record would not stay
WAIT_S = 90


@dataclass(frozen=True, slots=True)
class Record:
    """What both ends are compared by. `headers` is None where there are none, as in the connector's column."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    headers: tuple[tuple[str, bytes | None], ...] | None = None


class Topics:
    """The other end: librdkafka creates, fills and reads topics."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self._admin = AdminClient({"bootstrap.servers": bootstrap})

    def create(self, topic: str, partitions: int = 1) -> None:
        self._admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(timeout=30)

    def grow(self, topic: str, partitions: int) -> None:
        self._admin.create_partitions([NewPartitions(topic, partitions)])[topic].result(timeout=30)

    def delete_before(self, topic: str, offset: int) -> None:
        partition = TopicPartition(topic, 0, offset)
        self._admin.delete_records([partition])[partition].result(timeout=30)

    def produce(self, topic: str, records: Sequence[Record]) -> None:
        """In order of the list; the offsets are asked for, not assigned."""
        producer = Producer({"bootstrap.servers": self.bootstrap})
        for record in records:
            producer.produce(
                topic,
                record.value,
                record.key,
                partition=record.partition,
                timestamp=record.timestamp_ms,
                headers=[*record.headers] if record.headers else None,
            )
            producer.poll(0)
        assert producer.flush(30) == 0

    def read(self, topic: str, partitions: int = 1) -> list[Record]:
        """Every record, up to the ends of now."""
        consumer = Consumer({"bootstrap.servers": self.bootstrap, "group.id": "unused", "enable.auto.commit": False})
        places = [TopicPartition(topic, index, OFFSET_BEGINNING) for index in range(partitions)]
        try:
            spans = [consumer.get_watermark_offsets(place, timeout=30) for place in places]
            total = sum(high - low for low, high in spans)
            consumer.assign(places)
            messages = consumer.consume(total, timeout=30) if total else []
            assert len(messages) == total and not any(message.error() for message in messages)
            found = [received(message) for message in messages]
        finally:
            consumer.close()
        return sorted(found, key=lambda record: (record.partition, record.offset))


def received(message: Message) -> Record:
    partition, offset, headers = message.partition(), message.offset(), message.headers()
    assert partition is not None and offset is not None
    pairs = tuple(cast("list[tuple[str, bytes | None]]", headers)) if headers else None
    return Record(partition, offset, message.key(), message.value(), message.timestamp()[1], pairs)


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    try:
        jars = connector_jars()
    except JarsUnavailable as unavailable:
        pytest.skip(str(unavailable))
    with local_session(jars) as session:
        yield session


@pytest.fixture(scope="module")
def topics(server: Server) -> Topics:
    return Topics(server.bootstrap)


def numbered(count: int, *, partitions: int = 1, first: int = 0) -> list[Record]:
    """Records whose offsets are right when they are produced in this order, one second of record time apart."""
    return [
        Record(
            number % partitions,
            number // partitions,
            b"k%d" % number,
            b"v%d" % number,
            BASE_MS + number * 1000,
        )
        for number in range(first, first + count)
    ]


def batch(spark: SparkSession, bootstrap: str, **options: str) -> DataFrame:
    source = spark.read.format("kafka").option("kafka.bootstrap.servers", bootstrap)
    return source.options(**options).load()


def stream(spark: SparkSession, bootstrap: str, **options: str) -> DataFrame:
    source = spark.readStream.format("kafka").option("kafka.bootstrap.servers", bootstrap)
    return source.option("startingOffsets", "earliest").options(**options).load()


def rows(frame: DataFrame) -> list[Record]:
    has_headers = "headers" in frame.columns
    picked = frame.selectExpr("*", "unix_millis(timestamp) AS at_ms")
    found = [
        Record(
            row.partition,
            row.offset,
            None if row.key is None else bytes(row.key),
            None if row.value is None else bytes(row.value),
            row.at_ms,
            _headers(row.headers) if has_headers else None,
        )
        for row in picked.collect()
    ]
    return sorted(found, key=lambda record: (record.partition, record.offset))


def _headers(column: Any) -> tuple[tuple[str, bytes | None], ...] | None:
    if column is None:
        return None
    return tuple((each.key, None if each.value is None else bytes(each.value)) for each in column)


def finished(query: StreamingQuery) -> list[int]:
    """Rows of every micro-batch of an AvailableNow query, when it has ended by itself."""
    try:
        assert query.awaitTermination(WAIT_S), f"still running: {query.status}"
    finally:
        query.stop()
    return [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]


def copy_now(frame: DataFrame, bootstrap: str, target: str, checkpoint: Path) -> list[int]:
    """Run a stream into a topic until the log's present end."""
    pairs = frame.select("key", "value")  # its `partition` would be obeyed by the sink
    sink = pairs.writeStream.format("kafka").option("kafka.bootstrap.servers", bootstrap).option("topic", target)
    return finished(sink.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start())


# batch reads


def test_a_batch_read_sees_every_field(spark: SparkSession, topics: Topics, topic: str) -> None:
    headers = (("first", b"1"), ("empty", b""), ("null", None), ("first", b"again"))
    sent = [
        Record(0, 0, b"key", b"value", BASE_MS, headers),
        Record(0, 1, None, b"no key", BASE_MS + 1),
        Record(0, 2, b"tombstone", None, BASE_MS + 2),
        Record(1, 0, b"", b"", BASE_MS + 3),
        Record(2, 0, b"\x00\xff", bytes(range(256)) * 2000, BASE_MS + 4, (("big", b"x" * 5000),)),
    ]
    topics.create(topic, partitions=4)
    topics.produce(topic, sent)
    frame = batch(spark, topics.bootstrap, subscribe=topic, includeHeaders="true")
    assert rows(frame) == sent
    assert {(row.topic, row.timestampType) for row in frame.collect()} == {(topic, 0)}


def test_offsets_of_both_ends(spark: SparkSession, topics: Topics, topic: str) -> None:
    topics.create(topic, partitions=3)
    sent = numbered(300, partitions=3)
    topics.produce(topic, sent)
    ends = {
        "startingOffsets": json.dumps({topic: {"0": 10, "1": -2, "2": 99}}),
        "endingOffsets": json.dumps({topic: {"0": 20, "1": 5, "2": -1}}),
    }
    spans = {0: range(10, 20), 1: range(5), 2: range(99, 100)}
    expected = sorted((r for r in sent if r.offset in spans[r.partition]), key=lambda r: (r.partition, r.offset))
    assert rows(batch(spark, topics.bootstrap, subscribe=topic, **ends)) == expected
    assigned = batch(spark, topics.bootstrap, assign=json.dumps({topic: [2]}))
    assert [record.offset for record in rows(assigned)] == list(range(100))


def test_offsets_by_timestamp(spark: SparkSession, topics: Topics, topic: str) -> None:
    topics.create(topic, partitions=2)
    sent = numbered(200, partitions=2)
    topics.produce(topic, sent)
    from_ms, to_ms = BASE_MS + 50_500, BASE_MS + 150_000
    expected = sorted(
        (record for record in sent if from_ms <= record.timestamp_ms < to_ms), key=lambda r: (r.partition, r.offset)
    )
    for_all = {"startingTimestamp": str(from_ms), "endingTimestamp": str(to_ms)}
    assert rows(batch(spark, topics.bootstrap, subscribe=topic, **for_all)) == expected
    for_each = {
        "startingOffsetsByTimestamp": json.dumps({topic: {"0": from_ms, "1": from_ms}}),
        "endingOffsetsByTimestamp": json.dumps({topic: {"0": to_ms, "1": to_ms}}),
    }
    assert rows(batch(spark, topics.bootstrap, subscribe=topic, **for_each)) == expected
    after = {"startingTimestamp": str(BASE_MS + 10_000_000), "startingOffsetsByTimestampStrategy": "latest"}
    assert rows(batch(spark, topics.bootstrap, subscribe=topic, **after)) == []


def test_a_pattern_of_two_topics(spark: SparkSession, topics: Topics, topic: str) -> None:
    for name, partitions in ((f"{topic}-a", 2), (f"{topic}-b", 1), (f"other-{topic}-a", 1)):
        topics.create(name, partitions)
        topics.produce(name, numbered(100, partitions=partitions))
    pattern = f"^{topic}-[ab]$"  # the connector searches: without the anchors all three would match
    counted = batch(spark, topics.bootstrap, subscribePattern=pattern).groupBy("topic").count().collect()
    assert {row.topic: row["count"] for row in counted} == {f"{topic}-a": 100, f"{topic}-b": 100}


def test_a_partition_read_in_pieces(spark: SparkSession, topics: Topics, topic: str) -> None:
    sent = numbered(5000)
    topics.create(topic)
    topics.produce(topic, sent)
    frame = batch(spark, topics.bootstrap, subscribe=topic, minPartitions="7", **{"kafka.max.poll.records": "100"})
    assert frame.rdd.getNumPartitions() == 7
    assert rows(frame) == sent


# batch writes


def test_a_batch_write_keeps_every_column(spark: SparkSession, topics: Topics, topic: str) -> None:
    for name in (f"{topic}-0", f"{topic}-1"):
        topics.create(name, partitions=2)
    frame = spark.range(0, 2000, numPartitions=2).selectExpr(
        f"concat('{topic}-', id % 2) AS topic",
        "IF(id % 10 = 0, NULL, CAST(id AS STRING)) AS key",
        "IF(id % 7 = 0, NULL, concat('value ', id)) AS value",
        "CAST(floor(id / 2) % 2 AS INT) AS partition",
        "array(named_struct('key', 'id', 'value', CAST(CAST(id AS STRING) AS BINARY))) AS headers",
    )
    target = frame.write.format("kafka").option("kafka.bootstrap.servers", topics.bootstrap)
    target.option("includeHeaders", "true").save()
    for parity in (0, 1):
        found = topics.read(f"{topic}-{parity}", partitions=2)
        assert len(found) == 1000
        for record in found:
            assert record.headers is not None
            number = int(record.headers[0][1] or b"")
            assert number % 2 == parity and record.partition == number // 2 % 2
            assert record.key == (None if number % 10 == 0 else b"%d" % number)
            assert record.value == (None if number % 7 == 0 else b"value %d" % number)
        assert len({record.headers for record in found}) == 1000


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_a_codec_there_and_back(spark: SparkSession, topics: Topics, topic: str, codec: str) -> None:
    topics.create(topic)
    frame = spark.range(0, 3000, numPartitions=1).selectExpr("concat('value ', id, repeat(' again', 50)) AS value")
    target = frame.write.format("kafka").option("kafka.bootstrap.servers", topics.bootstrap).option("topic", topic)
    target.option("kafka.compression.type", codec).save()
    written = rows(batch(spark, topics.bootstrap, subscribe=topic))
    assert [record.value for record in written] == [b"value %d%s" % (n, b" again" * 50) for n in range(3000)]


# streams


def test_available_now_in_limited_batches(spark: SparkSession, topics: Topics, topic: str, tmp_path: Path) -> None:
    source, target = f"{topic}-in", f"{topic}-out"
    topics.create(source, partitions=2)
    topics.create(target)
    topics.produce(source, numbered(1000, partitions=2))
    frame = stream(spark, topics.bootstrap, subscribe=source, maxOffsetsPerTrigger="300")
    sizes = copy_now(frame, topics.bootstrap, target, tmp_path)
    assert sizes == [300, 300, 300, 100]
    copied = topics.read(target)
    assert sorted((r.key, r.value) for r in copied) == sorted((r.key, r.value) for r in numbered(1000))


def test_a_stream_goes_on_from_its_checkpoint(spark: SparkSession, topics: Topics, topic: str, tmp_path: Path) -> None:
    source, target = f"{topic}-in", f"{topic}-out"
    topics.create(source)
    topics.create(target)

    def run() -> list[int]:
        return copy_now(stream(spark, topics.bootstrap, subscribe=source), topics.bootstrap, target, tmp_path)

    topics.produce(source, numbered(400))
    assert run() == [400]
    assert run() == []
    topics.produce(source, numbered(250, first=400))
    topics.grow(source, 2)
    topics.produce(source, [Record(1, 0, b"k650", b"v650", BASE_MS)])  # of a partition the checkpoint does not know
    assert run() == [251]
    assert sorted(r.key or b"" for r in topics.read(target)) == sorted(b"k%d" % number for number in range(651))


def test_a_running_stream_follows_the_log(spark: SparkSession, topics: Topics, topic: str, tmp_path: Path) -> None:
    topics.create(f"{topic}-1")
    topics.produce(f"{topic}-1", numbered(10))
    read_committed = {"subscribePattern": f"{topic}-.*", "kafka.isolation.level": "read_committed"}
    frame = stream(spark, topics.bootstrap, **read_committed, **{"kafka.metadata.max.age.ms": "500"})
    seen = frame.selectExpr("CAST(value AS STRING) AS value", "topic")
    view = topic.replace("-", "_")
    query = seen.writeStream.format("memory").queryName(view).option("checkpointLocation", str(tmp_path)).start()
    try:
        query.processAllAvailable()
        assert spark.table(view).count() == 10
        topics.produce(f"{topic}-1", numbered(25, first=10))
        topics.create(f"{topic}-2")
        topics.produce(f"{topic}-2", numbered(5))
        query.processAllAvailable()
        counted = {row.topic: row["count"] for row in spark.table(view).groupBy("topic").count().collect()}
        assert counted == {f"{topic}-1": 35, f"{topic}-2": 5}
    finally:
        query.stop()


def test_records_deleted_before_they_were_read(spark: SparkSession, topics: Topics, topic: str, tmp_path: Path) -> None:
    source, target = f"{topic}-in", f"{topic}-out"
    topics.create(source)
    topics.create(target)
    topics.produce(source, numbered(100))
    copy_now(stream(spark, topics.bootstrap, subscribe=source), topics.bootstrap, target, tmp_path)
    topics.produce(source, numbered(100, first=100))
    topics.delete_before(source, 150)
    strict = stream(spark, topics.bootstrap, subscribe=source)
    with pytest.raises(StreamingQueryException, match=r"(?i)data.?loss|lost"):
        copy_now(strict, topics.bootstrap, target, tmp_path)
    lenient = stream(spark, topics.bootstrap, subscribe=source, failOnDataLoss="false")
    copy_now(lenient, topics.bootstrap, target, tmp_path)
    expected = [b"k%d" % number for number in (*range(100), *range(150, 200))]
    assert [record.key for record in topics.read(target)] == expected
