"""Streaming queries on topics: what each micro-batch reads, checkpoints, limits, and topics that change meanwhile.

The first half drives the reader as Spark does, without Spark, on a broker; the second half runs queries.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyspark.sql import SparkSession

from millrace.client.cluster import ClusterClient
from millrace.client.settings import ClientSettings
from millrace.model import TopicPartition
from millrace.spark import reader as reading
from millrace.spark.options import SourceOptions
from millrace.spark.reader import DataLost, StreamReader
from millrace.spark.source import MillraceSource, schema_of
from support.spark_queries import TIMEOUT_S, Collected, error_of, read_stream
from support.topics import Topics, numbered

BEFORE_4_2 = tuple(map(int, pyspark.__version__.split(".")[:2])) < (4, 2)


Open = Callable[..., StreamReader]


@pytest.fixture
def stream_reader(bootstrap: str) -> Iterator[Open]:
    """Makes readers that are stopped after the test, as Spark does."""
    with ExitStack() as stack:

        def make(**options: str) -> StreamReader:
            parsed = SourceOptions.parse({"kafka.bootstrap.servers": bootstrap, **options})
            schema = schema_of(parsed)
            assert not isinstance(schema, str)
            reader = StreamReader(parsed, schema)
            stack.callback(reader.stop)
            return reader

        yield make


class Limit:
    """Stands for Spark's read limits, which 4.1 does not have; the reader goes by their names."""

    def __init__(self, name: str = "ReadMaxRows") -> None:
        self.__class__ = type(name, (), {})


def ranges(reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[tuple[int, int, int]]:
    return sorted(
        (each.partition.partition, each.start, each.end)
        for task in reader.partitions(start, end)
        for each in task.ranges
    )


def test_positions_of_a_new_query(stream_reader: Open, topics: Topics) -> None:
    topic = topics.create(partitions=2)
    topics.send(topic, numbered(10, partitions=2))
    assert stream_reader(subscribe=topic).initialOffset() == {topic: {"0": 5, "1": 5}}
    earliest = stream_reader(subscribe=topic, startingOffsets="earliest")
    start = earliest.initialOffset()
    assert start == {topic: {"0": 0, "1": 0}}
    end = earliest.latestOffset(start, Limit("ReadAllAvailable"))
    assert end == earliest.reportLatestOffset() == {topic: {"0": 5, "1": 5}}
    assert ranges(earliest, start, end) == [(0, 0, 5), (1, 0, 5)]
    assert earliest.partitions(end, end) == []


def test_a_query_from_the_latest_offsets_records_them_first(stream_reader: Open, topics: Topics) -> None:
    topic = topics.create()
    topics.send(topic, numbered(5))
    reader = stream_reader(subscribe=topic)
    start = reader.initialOffset()
    topics.send(topic, numbered(5))
    assert reader.latestOffset(start, Limit("ReadAllAvailable")) == start == {topic: {"0": 5}}
    assert reader.latestOffset(start, Limit("ReadAllAvailable")) == {topic: {"0": 10}}


def test_the_first_batch_run_again_does_not_begin_later(stream_reader: Open, topics: Topics) -> None:
    topic = topics.create()
    topics.send(topic, numbered(8))
    reader = stream_reader(subscribe=topic)
    assert ranges(reader, reader.initialOffset(), {topic: {"0": 5}}) == []


def test_limits_without_arguments_as_in_spark_4_1(stream_reader: Open, topics: Topics) -> None:
    topic = topics.create(partitions=2)
    topics.send(topic, numbered(100, partitions=2))
    options = {"subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "30"}
    reader = stream_reader(**options)
    first = reader.latestOffset()
    assert first == {topic: {"0": 15, "1": 15}}
    assert ranges(reader, reader.initialOffset(), first) == [(0, 0, 15), (1, 0, 15)]
    assert reader.latestOffset() == {topic: {"0": 30, "1": 30}}
    restarted = stream_reader(**options)
    restarted.partitions(first, first)  # how Spark 4.1 tells a source where its checkpoint ends
    assert restarted.latestOffset() == {topic: {"0": 30, "1": 30}}


def test_a_micro_batch_waits_for_enough(stream_reader: Open, topics: Topics, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = topics.create()
    now = 1000.0

    class Clock:
        def monotonic(self) -> float:
            return now

    monkeypatch.setattr(reading, "_CLOCK", Clock())
    reader = stream_reader(
        subscribe=topic,
        startingOffsets="earliest",
        minOffsetsPerTrigger="10",
        maxOffsetsPerTrigger="15",
        maxTriggerDelay="30s",
    )
    limit = Limit("ReadMinRows")
    topics.send(topic, numbered(3))
    first = reader.latestOffset(reader.initialOffset(), limit)
    assert first == {topic: {"0": 3}}  # the first one does not wait
    topics.send(topic, numbered(3))
    assert reader.latestOffset(first, limit) == first
    now += 29
    assert reader.latestOffset(first, limit) == first
    now += 1.5
    second = reader.latestOffset(first, limit)
    assert second == {topic: {"0": 6}}
    topics.send(topic, numbered(40))
    assert reader.latestOffset(second, limit) == {topic: {"0": 21}}


def test_available_now_stops_at_what_was_there(stream_reader: Open, topics: Topics) -> None:
    topic = topics.create()
    topics.send(topic, numbered(10))
    reader = stream_reader(subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger="6")
    reader.prepareForTriggerAvailableNow()
    start = reader.initialOffset()
    first = reader.latestOffset(start, Limit())
    topics.send(topic, numbered(10))
    topics.add_partitions(topic, 2)
    assert [first, second := reader.latestOffset(first, Limit())] == [{topic: {"0": 6}}, {topic: {"0": 10}}]
    assert reader.latestOffset(second, Limit()) == second


def test_new_partitions_are_read_from_their_beginning(
    stream_reader: Open, topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "TOPICS_MAX_AGE_S", -1.0)
    topic = topics.create()
    topics.send(topic, numbered(4))
    reader = stream_reader(subscribe=topic, maxOffsetsPerTrigger="100")
    start = reader.initialOffset()
    reader.latestOffset(start, Limit())
    topics.add_partitions(topic, 2)
    topics.send(topic, numbered(6, partitions=2))
    end = reader.latestOffset(start, Limit())
    assert end == {topic: {"0": 7, "1": 3}}
    assert ranges(reader, start, end) == [(0, 4, 7), (1, 0, 3)]


@pytest.mark.parametrize("fail", [True, False])
def test_a_deleted_topic(stream_reader: Open, topics: Topics, monkeypatch: pytest.MonkeyPatch, fail: bool) -> None:
    monkeypatch.setattr(reading, "TOPICS_MAX_AGE_S", -1.0)
    kept, gone = topics.create("kept"), topics.create("gone")
    topics.send(kept, numbered(4))
    topics.send(gone, numbered(4))
    reader = stream_reader(subscribe=f"{kept},{gone}", failOnDataLoss=str(fail))
    start = reader.initialOffset()
    topics.delete(gone)
    topics.send(kept, numbered(3))
    if fail:
        with pytest.raises(DataLost, match=f"partition {gone}-0 is gone; it had been read up to offset 4"):
            reader.latestOffset(start, Limit())
        return
    reader.latestOffset(start, Limit())
    end = reader.latestOffset(start, Limit())
    assert end == {kept: {"0": 7}}
    assert ranges(reader, start, end) == [(0, 4, 7)]


@pytest.mark.parametrize("fail", [True, False])
def test_a_topic_that_was_made_again(
    stream_reader: Open, topics: Topics, monkeypatch: pytest.MonkeyPatch, fail: bool
) -> None:
    monkeypatch.setattr(reading, "SHRUNK_PAUSE_S", 0.0)
    topic = topics.create()
    topics.send(topic, numbered(10))
    reader = stream_reader(subscribe=topic, failOnDataLoss=str(fail), startingOffsets="earliest")
    start = {topic: {"0": 10}}
    topics.delete(topic)
    topics.create(topic, exact=True)
    topics.send(topic, numbered(3))
    if fail:
        with pytest.raises(DataLost, match="ends at offset 3 although it had been read up to 10"):
            reader.latestOffset(start, Limit())
        return
    end = reader.latestOffset(start, Limit())
    assert ranges(reader, start, end) == [(0, 0, 3)]


def test_progress_is_committed_to_a_group(bootstrap: str, stream_reader: Open, topics: Topics) -> None:
    topic = topics.create()
    topics.send(topic, numbered(10))
    reader = stream_reader(subscribe=topic, startingOffsets="earliest", groupIdForLag=f"lag-{topic}")
    partition = TopicPartition(topic, 0)
    with ClusterClient(ClientSettings.from_properties({"bootstrap.servers": bootstrap})) as client:
        client.commit_offsets(f"first-{topic}", {partition: 0})  # the first of all makes a topic and takes long
        reader.latestOffset({topic: {"0": 4}}, Limit())
        assert client.committed_offsets(f"lag-{topic}", [partition]) == {partition: 4}
        reader.commit({topic: {"0": 9}})
        assert client.committed_offsets(f"lag-{topic}", [partition]) == {partition: 9}


def test_what_goes_to_the_executors_is_small(stream_reader: Open, topics: Topics) -> None:
    topic = topics.create()
    topics.send(topic, numbered(10))
    reader = stream_reader(subscribe=topic)
    reader.latestOffset(reader.initialOffset(), Limit())
    assert len(pickle.dumps(reader)) < 4000
    (task,) = reader.partitions({topic: {"0": 0}}, {topic: {"0": 10}})
    assert len(pickle.dumps(task)) < 500
    assert len(pickle.dumps(MillraceSource({"subscribe": topic}))) < 1000


# With Spark.


def test_records_arrive_while_a_query_runs(spark: SparkSession, bootstrap: str, topics: Topics, tmp_path: Path) -> None:
    topic = topics.create(partitions=2)
    topics.send(topic, numbered(10, partitions=2))
    collected = Collected(tmp_path / "checkpoint")
    query = collected.start(read_stream(spark, bootstrap, subscribe=topic))
    try:
        query.processAllAvailable()
        assert collected.all() == []  # a query starts at the latest offsets
        topics.send(topic, numbered(7, partitions=2, start=10))
        query.processAllAvailable()
        assert collected.all() == list(range(10, 17))
        topics.add_partitions(topic, 3)
        topics.send(topic, numbered(6, partitions=3, start=17))
        while len(collected.all()) < 13:  # a new partition is seen within a second or so
            assert query.isActive
            query.processAllAvailable()
        assert collected.all() == list(range(10, 23))
    finally:
        query.stop()


def test_new_topics_of_a_pattern(spark: SparkSession, bootstrap: str, topics: Topics, tmp_path: Path) -> None:
    prefix = topics.create("found")
    topics.send(prefix, numbered(5))
    frame = read_stream(spark, bootstrap, subscribePattern=f"{prefix}.*", startingOffsets="earliest")
    collected = Collected(tmp_path / "checkpoint")
    collected.run(frame)
    assert collected.all() == list(range(5))
    topics.send(topics.create(f"{prefix}-late", partitions=2), numbered(6, partitions=2, start=5))
    collected.run(frame)
    assert collected.all() == list(range(11))


def test_available_now_with_a_limit(spark: SparkSession, bootstrap: str, topics: Topics, tmp_path: Path) -> None:
    topic = topics.create(partitions=3)
    topics.send(topic, numbered(100, partitions=3))
    collected = Collected(tmp_path / "checkpoint")
    frame = read_stream(spark, bootstrap, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger="40")
    if BEFORE_4_2:  # there each run is one micro-batch: see docs/spark.md
        collected.run(frame)
        assert collected.sizes() == [40]
        collected.run(frame)
    collected.run(frame)
    assert collected.sizes() == [40, 40, 20]
    assert collected.all() == list(range(100))
    offsets = (tmp_path / "checkpoint" / "offsets" / "2").read_text().splitlines()[-1]
    assert json.loads(offsets) == {topic: {"0": 34, "1": 33, "2": 33}}


def test_a_restarted_query_goes_on_from_its_checkpoint(
    spark: SparkSession, bootstrap: str, topics: Topics, tmp_path: Path
) -> None:
    topic = topics.create(partitions=2)
    topics.send(topic, numbered(20, partitions=2))
    frame = read_stream(spark, bootstrap, subscribe=topic, startingOffsets="earliest")
    first, second = Collected(tmp_path / "checkpoint"), Collected(tmp_path / "checkpoint")
    first.run(frame)
    topics.send(topic, numbered(11, partitions=2, start=20))
    second.run(frame)
    assert first.all() == list(range(20))
    assert second.all() == list(range(20, 31))


def test_a_query_that_failed_before_its_first_commit_loses_nothing(
    spark: SparkSession, bootstrap: str, topics: Topics, tmp_path: Path
) -> None:
    topic = topics.create()
    topics.send(topic, numbered(5))
    frame = read_stream(spark, bootstrap, subscribe=topic)  # from the latest offsets
    collected = Collected(tmp_path / "checkpoint")
    collected.fail_at = 0
    query = collected.start(frame)
    assert "the test ends this query" in error_of(lambda: query.awaitTermination(TIMEOUT_S))
    topics.send(topic, numbered(10, start=5))
    collected.fail_at = 1
    query = collected.start(frame)
    assert "the test ends this query" in error_of(lambda: query.awaitTermination(TIMEOUT_S))
    topics.send(topic, numbered(10, start=15))
    collected.fail_at = None
    query = collected.start(frame)
    query.processAllAvailable()
    query.stop()
    assert collected.all() == list(range(5, 25))


def test_a_finished_run_is_seen_in_the_group(
    spark: SparkSession, bootstrap: str, topics: Topics, tmp_path: Path
) -> None:
    topic = topics.create()
    topics.send(topic, numbered(10))
    group = f"lag-{topic}"
    frame = read_stream(spark, bootstrap, subscribe=topic, startingOffsets="earliest", groupIdForLag=group)
    Collected(tmp_path / "checkpoint").run(frame)
    partition = TopicPartition(topic, 0)
    with ClusterClient(ClientSettings.from_properties({"bootstrap.servers": bootstrap})) as client:
        # Spark 4.1 asks nothing after the last micro-batch of such a run, so that its end is committed by the next one.
        wanted = 0 if BEFORE_4_2 else 10
        assert client.committed_offsets(group, [partition]) == {partition: wanted}


@pytest.mark.parametrize("options", [{"endingOffsets": "latest"}, {"subscribe": "not-there"}])
def test_what_a_streaming_query_refuses(
    spark: SparkSession, bootstrap: str, tmp_path: Path, options: dict[str, str]
) -> None:
    frame = read_stream(spark, bootstrap, **{"subscribe": "t", **options})
    message = error_of(lambda: Collected(tmp_path / "checkpoint").run(frame))
    wanted = "a streaming query has no end" if "endingOffsets" in options else "topic 'not-there' does not exist on"
    assert wanted in message
