"""The sink under Spark, read back with librdkafka: batch and streaming queries, errors, and a broker that dies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn
from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from millrace.client.cluster import LATEST, ClusterClient
from millrace.client.settings import ClientSettings
from millrace.clock import SystemClock
from millrace.model import TopicPartition
from millrace.spark import sinks
from millrace.spark.options import Delivery, SinkOptions
from millrace.spark.writer import StreamWriter
from support.read_back import read_back
from support.servers import MillraceServer
from support.spark_queries import error_of
from support.topics import Topics

TIMEOUT_S = 90


def write(frame: DataFrame, bootstrap: str, mode: str = "append", **options: str) -> None:
    named = {name.replace("_", "."): value for name, value in options.items()}
    frame.write.format("millrace").options(**{"kafka.bootstrap.servers": bootstrap, **named}).mode(mode).save()


def stream_files(spark: SparkSession, folder: Path, files: int, rows: int) -> DataFrame:
    """A stream with one batch per file, of the numbers from 0 on."""
    folder.mkdir()
    for number in range(files):
        lines = "\n".join(str(number * rows + row) for row in range(rows))
        (folder / f"{number:03}.txt").write_text(lines)
    return spark.readStream.option("maxFilesPerTrigger", 1).text(str(folder))


def start(frame: DataFrame, bootstrap: str, topic: str, home: Path, mode: str = "append", **more: str) -> Any:
    options = {"kafka.bootstrap.servers": bootstrap, "topic": topic, "checkpointLocation": str(home / "checkpoint")}
    options |= more
    return frame.writeStream.format("millrace").options(**options).outputMode(mode).trigger(availableNow=True).start()


def run(frame: DataFrame, bootstrap: str, topic: str, home: Path, mode: str = "append") -> None:
    query = start(frame, bootstrap, topic, home, mode)
    assert query.awaitTermination(TIMEOUT_S)


def numbers(bootstrap: str, topic: str) -> list[int]:
    return sorted(int(each.value) for each in read_back(bootstrap, topic))


def test_every_column(spark: SparkSession, bootstrap: str, topics: Topics) -> None:
    topic = topics.create(partitions=3)
    frame = spark.createDataFrame(
        [
            (topic, 2, "k", bytearray(b"v\0"), [("a", bytearray(b"1")), ("a", None)], 1_700_000_000_123_456, 1.5),
            (topic, None, "foobar", None, None, None, None),
        ],
        "topic string, partition int, key string, value binary, headers array<struct<key:string,value:binary>>, "
        "at long, other double",
    ).withColumn("timestamp", fn.timestamp_micros("at"))
    before_ms = SystemClock().wall_ms()
    write(frame, bootstrap, kafka_compression_type="zstd")
    by_key = {each.key: each for each in read_back(bootstrap, topic)}
    first, second = by_key[b"k"], by_key[b"foobar"]
    assert (first.partition, first.value, first.timestamp_ms) == (2, b"v\0", 1_700_000_000_123)
    assert first.headers == (("a", b"1"), ("a", None))
    assert (second.partition, second.value, second.headers) == ((-790332482 & 0x7FFFFFFF) % 3, None, ())
    assert before_ms <= second.timestamp_ms <= SystemClock().wall_ms()


def test_many_rows_of_several_tasks(spark: SparkSession, bootstrap: str, topics: Topics) -> None:
    topic = topics.create(partitions=4)
    frame = spark.range(0, 50_000, 1, 3).selectExpr("cast(id as string) as key", "cast(id as string) as value")
    write(frame, bootstrap, topic=topic)
    found = read_back(bootstrap, topic)
    assert sorted(int(each.value) for each in found) == list(range(50_000))
    assert all(each.key == each.value for each in found)


def test_errors_reach_the_user(spark: SparkSession, bootstrap: str, topics: Topics) -> None:
    frame = spark.range(1).selectExpr("cast(id as string) as value")
    assert "set option 'topic' or add a string column 'topic'" in error_of(lambda: write(frame, bootstrap))
    assert "unknown option 'topik'" in error_of(lambda: write(frame, bootstrap, topik="t"))
    said = error_of(lambda: write(frame, bootstrap, mode="overwrite", topic="t"))
    assert "a topic cannot be overwritten: use mode('append')" in said
    # What Spark refuses before it asks the sink; docs/spark.md says what to write instead.
    unsaid = error_of(lambda: frame.write.format("millrace").option("topic", "t").save())
    assert 'cannot be written in the "ErrorIfExists" mode. Please use either the "Append"' in unsaid


def test_in_update_mode_a_topic_is_written_by_foreach_batch(
    spark: SparkSession, bootstrap: str, topics: Topics, tmp_path: Path
) -> None:
    """Spark refuses the mode for every Python sink; the function that docs/spark.md names takes it."""
    counts = stream_files(spark, tmp_path / "in", files=2, rows=3).groupBy(fn.length("value").alias("n")).count()
    frame = counts.selectExpr("cast(n as string) as key", "cast(count as string) as value")
    refused = error_of(lambda: run(frame, bootstrap, topics.create(), tmp_path / "refused", "update"))
    assert "millrace does not support Update mode" in refused
    topic = topics.create()
    writer = frame.writeStream.foreachBatch(sinks.topic(bootstrap, topic)).outputMode("update")
    query = writer.option("checkpointLocation", str(tmp_path / "update")).trigger(availableNow=True).start()
    assert query.awaitTermination(TIMEOUT_S)
    assert [(each.key, each.value) for each in read_back(bootstrap, topic)] == [(b"1", b"3"), (b"1", b"6")]


def test_a_stream_goes_on_where_it_was(spark: SparkSession, bootstrap: str, topics: Topics, tmp_path: Path) -> None:
    topic = topics.create(partitions=2)
    frame = stream_files(spark, tmp_path / "in", files=3, rows=100)
    run(frame, bootstrap, topic, tmp_path)
    assert numbers(bootstrap, topic) == list(range(300))
    (tmp_path / "in" / "more.txt").write_text("300\n301")
    run(frame, bootstrap, topic, tmp_path)
    assert numbers(bootstrap, topic) == list(range(302))


def test_what_tasks_report_names_query_and_batch(
    spark: SparkSession, bootstrap: str, topics: Topics, tmp_path: Path
) -> None:
    # Inside the function, so that the classes travel to Spark's processes by value.
    class Reporting(StreamWriter):
        def commit(self, messages: list[Any], batchId: int) -> None:  # noqa: N803 (Spark's name)
            with (tmp_path / "told").open("a") as told:
                for message in messages:
                    fence = message.fence
                    told.write(f"{batchId} {fence.query_id} {fence.batch_id} {fence.run} {message.records}\n")

    class Reported(DataSource):
        @classmethod
        def name(cls) -> str:
            return "reported"

        def streamWriter(self, schema: StructType, overwrite: bool) -> Reporting:  # noqa: N802
            return Reporting(SinkOptions.parse(self.options), schema, overwrite)

    spark.dataSource.register(Reported)
    frame = stream_files(spark, tmp_path / "in", files=2, rows=5)
    options = {"kafka.bootstrap.servers": bootstrap, "topic": topics.create()}
    writer = frame.writeStream.format("reported").options(**options, checkpointLocation=str(tmp_path / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(TIMEOUT_S)
    assert (tmp_path / "told").read_text().splitlines() == [
        f"{batch} {query.id} {batch} {query.runId} 5" for batch in range(2)
    ]


def test_in_complete_mode_every_result_is_appended(
    spark: SparkSession, bootstrap: str, topics: Topics, tmp_path: Path
) -> None:
    topic = topics.create()
    counts = stream_files(spark, tmp_path / "in", files=2, rows=3).groupBy(fn.length("value").alias("n")).count()
    frame = counts.selectExpr("cast(n as string) as key", "cast(count as string) as value")
    run(frame, bootstrap, topic, tmp_path, "complete")
    assert [(each.key, each.value) for each in read_back(bootstrap, topic)] == [(b"1", b"3"), (b"1", b"6")]


@pytest.mark.usefixtures("our_broker")
@pytest.mark.parametrize("delivery", list(Delivery))
def test_a_broker_killed_twice_in_the_middle(spark: SparkSession, tmp_path: Path, delivery: Delivery) -> None:
    rows, files = 4_000, 8
    with MillraceServer() as server:
        topic = Topics(server.bootstrap).create(partitions=3)
        frame = stream_files(spark, tmp_path / "in", files, rows).withColumn("key", fn.col("value"))
        query = start(frame, server.bootstrap, topic, tmp_path, delivery=delivery)
        for reached in (rows, rows * 4):
            wait_until(lambda reached=reached: size_of(server.bootstrap, topic, 3) >= reached)  # type: ignore[misc]
            server.kill()
            server.start()
        assert query.awaitTermination(TIMEOUT_S)
        # No task failed, so there is not even a repetition: retries inside a task are idempotent.
        assert numbers(server.bootstrap, topic) == list(range(rows * files))


def size_of(bootstrap: str, topic: str, partitions: int) -> int:
    with ClusterClient(ClientSettings.from_properties({"bootstrap.servers": bootstrap})) as client:
        ends = client.list_offsets({TopicPartition(topic, index): LATEST for index in range(partitions)})
        return sum(end or 0 for end in ends.values())


def wait_until(condition: Callable[[], bool]) -> None:
    clock = SystemClock()
    deadline = clock.monotonic() + TIMEOUT_S
    while not condition():
        assert clock.monotonic() < deadline
        threading.Event().wait(0.02)
