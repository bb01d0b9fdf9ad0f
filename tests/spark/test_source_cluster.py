"""Spark on three brokers: leaders that move under a query, and reading from a follower in one's own rack.

Contents are exact in every test. The brokers run in this process, so that a test can count what each of them served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from pyspark.sql import SparkSession
from pyspark.sql import functions as fn

from millrace.handlers import fetch as fetch_handler
from millrace.testing import Cluster
from support.gates import Background, Gate
from support.read_back import read_back
from support.roles import Roles
from support.roles import wait_for as wait_until_known
from support.spark_queries import TIMEOUT_S, Collected, read, read_stream, records
from support.topics import Sent, Topics, numbered

RACKS = ("east", "west", "north")
PARTITIONS = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    selector = {"replica.selector.class": "org.apache.kafka.common.replica.RackAwareReplicaSelector"}
    with Cluster(brokers=3, settings=selector, racks=RACKS) as running:
        yield running


@pytest.fixture
def servers(cluster: Cluster) -> str:
    return cluster.bootstrap_servers


@pytest.fixture
def topics(servers: str) -> Topics:
    return Topics(servers)


@pytest.fixture
def roles(servers: str) -> Iterator[Roles]:
    with Roles(servers) as asked:
        yield asked


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How many bytes of records each broker handed to consumers; the brokers do what they always do."""
    bytes_by_broker: Counter[int] = Counter()
    read_all = fetch_handler._ConsumerReader.read_all

    def counted(self: Any, wanted: Any, max_bytes: int) -> Any:
        outcome, size_bytes, answer_now = read_all(self, wanted, max_bytes)
        bytes_by_broker[self._context.broker.broker_id] += size_bytes
        return outcome, size_bytes, answer_now

    monkeypatch.setattr(fetch_handler._ConsumerReader, "read_all", counted)
    return bytes_by_broker


def stop_leader(cluster: Cluster, roles: Roles, topic: str, index: int = 0) -> int:
    """Stop the broker that leads a partition; returns when another one does."""
    leader = roles.leader(topic, index)
    cluster.stop_broker(leader)
    roles.leader(topic, index, but=leader)
    return leader


def test_a_leader_that_goes_in_the_middle_of_a_batch_query(
    spark: SparkSession, cluster: Cluster, roles: Roles, topics: Topics, servers: str, tmp_path: Path
) -> None:
    count = 40_000  # of 1,000 bytes: more than queues, pipes and Arrow batches hold while the gate is shut
    topic = "batch-moves"
    roles.create_topic(topic, 2)
    topics.send(topic, [Sent(bytes(1000), partition=number % 2) for number in range(2 * count)], batch_size=65536)
    gate = Gate(tmp_path, rows=1000)
    frame = read(spark, servers, subscribe=topic, kafka__max__partition__fetch__bytes="100000")
    totals = gate.through(frame).groupBy("partition")
    query = Background(totals.agg(fn.count("*"), fn.sum("offset"), fn.countDistinct("offset")).collect)
    gate.wait_reached()
    stopped = stop_leader(cluster, roles, topic)
    try:
        gate.open.touch()
        rows = query.result()
    finally:
        gate.open.touch()
        cluster.start_broker(stopped)
    assert sorted(tuple(row) for row in rows) == [
        (number, count, count * (count - 1) // 2, count) for number in range(2)
    ]


def test_leaders_that_move_while_a_query_streams(
    spark: SparkSession, cluster: Cluster, roles: Roles, topics: Topics, servers: str, tmp_path: Path
) -> None:
    topic = "stream-moves"
    roles.create_topic(topic, PARTITIONS)
    topics.send(topic, numbered(90, PARTITIONS))
    collected = Collected(tmp_path / "checkpoint")
    query = collected.start(read_stream(spark, servers, subscribe=topic, startingOffsets="earliest"))
    try:
        query.processAllAvailable()
        assert collected.all() == list(range(90))
        sent = 90
        for index in range(PARTITIONS):
            stopped = stop_leader(cluster, roles, topic, index)
            try:
                topics.send(topic, numbered(90, PARTITIONS, sent))
                sent += 90
                query.processAllAvailable()
                assert collected.all() == list(range(sent))
            finally:
                cluster.start_broker(stopped)
            topics.send(topic, numbered(90, PARTITIONS, sent))
            sent += 90
            query.processAllAvailable()
            assert collected.all() == list(range(sent))
            roles.wait_in_sync(topic)
    finally:
        query.stop()


def test_the_sink_writes_each_row_once_while_leaders_move(
    spark: SparkSession, cluster: Cluster, roles: Roles, servers: str, tmp_path: Path
) -> None:
    rows, files, topic = 2_000, 6, "sink-moves"
    roles.create_topic(topic, PARTITIONS)
    (tmp_path / "in").mkdir()
    for number in range(files):
        lines = "\n".join(str(number * rows + row) for row in range(rows))
        (tmp_path / "in" / f"{number:03}.txt").write_text(lines)
    frame = spark.readStream.option("maxFilesPerTrigger", 1).text(str(tmp_path / "in"))
    options = {"kafka.bootstrap.servers": servers, "topic": topic, "checkpointLocation": str(tmp_path / "checkpoint")}
    writer = frame.withColumn("key", fn.col("value")).writeStream.format("millrace").options(**options)
    query = writer.trigger(availableNow=True).start()
    try:
        for index, reached in enumerate((1, rows * 2)):
            wait_until_known(lambda reached=reached: roles.size(topic) >= reached or None, f"{topic} stays short")  # type: ignore[misc]
            assert query.isActive
            stopped = stop_leader(cluster, roles, topic, index)
            cluster.start_broker(stopped)
        assert query.awaitTermination(TIMEOUT_S)
    finally:
        query.stop()
    # No task failed, so there is not even a repetition: retries inside a task are idempotent.
    assert sorted(int(each.value) for each in read_back(servers, topic)) == list(range(rows * files))


def test_batches_that_a_task_writes_while_the_leader_moves(
    spark: SparkSession, cluster: Cluster, roles: Roles, servers: str, tmp_path: Path
) -> None:
    """One task, stopped in the middle of its rows: what it sent before and after the move is there once."""
    count, topic = 40_000, "task-moves"  # of 1,000 bytes: the sink gathers a few megabytes before it sends
    roles.create_topic(topic, 1)
    gate = Gate(tmp_path, rows=30_000)
    source = spark.range(0, count, 1, 1).selectExpr("cast(id as string) as key", "repeat('v', 1000) as value")
    frame = gate.through(source)
    writer = frame.write.format("millrace").options(**{"kafka.bootstrap.servers": servers, "topic": topic})

    def move_leader() -> None:
        try:
            gate.wait_reached()
            wait_until_known(lambda: roles.size(topic) or None, "the task has not sent anything")
            stopped.append(stop_leader(cluster, roles, topic))
        finally:
            gate.open.touch()

    stopped: list[int] = []
    moving = Background(move_leader)
    try:
        writer.mode("append").save()
        moving.result()
    finally:
        for broker_id in stopped:
            cluster.start_broker(broker_id)
    assert [int(each.key) for each in read_back(servers, topic)] == list(range(count))


def test_a_query_reads_from_the_follower_in_its_rack(
    spark: SparkSession, roles: Roles, topics: Topics, servers: str, served: Counter[int]
) -> None:
    count, topic = 600, "racks-spark"
    roles.create_topic(topic, 1)
    topics.send(topic, [Sent(b"%d" % number + bytes(1000), b"%d" % number, 0) for number in range(count)])
    leader = roles.leader(topic)
    expected = [(topic, 0, number, b"%d" % number, b"%d" % number + bytes(1000)) for number in range(count)]
    for broker_id, rack in enumerate(RACKS, start=1):
        served.clear()
        frame = read(
            spark, servers, subscribe=topic, kafka__client__rack=rack, kafka__max__partition__fetch__bytes="50000"
        )
        assert records(frame) == expected
        assert only_server(served) == broker_id
    for options in ({}, {"kafka__client__rack": "elsewhere"}):
        served.clear()
        assert records(read(spark, servers, subscribe=topic, **options)) == expected
        assert only_server(served) == leader


def test_a_stream_reads_from_its_rack_until_that_broker_goes(
    spark: SparkSession,
    cluster: Cluster,
    roles: Roles,
    topics: Topics,
    servers: str,
    served: Counter[int],
    tmp_path: Path,
) -> None:
    topic = "racks-stream"
    roles.create_topic(topic, 1)
    near = next(broker_id for broker_id in (1, 2, 3) if broker_id != roles.leader(topic))
    topics.send(topic, numbered(100))
    collected = Collected(tmp_path / "checkpoint")
    rack = {"kafka__client__rack": RACKS[near - 1]}
    query = collected.start(read_stream(spark, servers, subscribe=topic, startingOffsets="earliest", **rack))
    try:
        query.processAllAvailable()
        assert collected.all() == list(range(100))
        assert only_server(served) == near
        served.clear()
        cluster.stop_broker(near)
        try:
            topics.send(topic, numbered(100, start=100))
            query.processAllAvailable()
            assert collected.all() == list(range(200))
            assert only_server(served) == roles.leader(topic)
        finally:
            cluster.start_broker(near)
        roles.wait_in_sync(topic)
        served.clear()
        topics.send(topic, numbered(100, start=200))
        query.processAllAvailable()
        assert collected.all() == list(range(300))
        assert near in served
    finally:
        query.stop()


def test_librdkafka_reads_from_the_follower_in_its_rack(
    roles: Roles, topics: Topics, servers: str, served: Counter[int]
) -> None:
    count, topic = 300, "racks-librdkafka"
    roles.create_topic(topic, 1)
    topics.send(topic, numbered(count))
    for broker_id, rack in enumerate(RACKS, start=1):
        served.clear()
        consumer = Consumer(
            {
                "bootstrap.servers": servers,
                "group.id": "unused",
                "client.rack": rack,
                "enable.partition.eof": True,
                "log_level": 0,
            }
        )
        try:
            consumer.assign([TopicPartition(topic, 0, 0)])
            values = []
            while (message := consumer.poll(TIMEOUT_S)) is not None and message.error() is None:
                values.append(int(message.value()))
        finally:
            consumer.close()
        assert values == list(range(count))
        assert only_server(served) == broker_id


def only_server(served: Counter[int]) -> int:
    """The one broker that handed out records."""
    (broker_id,) = (each for each, size_bytes in served.items() if size_bytes)
    return broker_id
