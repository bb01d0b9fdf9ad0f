"""delivery=exactly-once under Spark: who reads committed records sees every row once, whatever died in between.

librdkafka, which reads back, reads committed records by default.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from millrace.client.cluster import ClusterClient
from millrace.client.settings import ClientSettings
from millrace.spark import sinks
from millrace.spark.decisions import DecisionLog
from millrace.spark.options import DEFAULT_DECISIONS_TOPIC
from support.once_driver import KILLED_BATCH, REACHED, STEPS
from support.read_back import read_back
from support.servers import ROOT
from support.spark_queries import error_of
from support.topics import Topics

TIMEOUT_S = 180
DRIVER_TIMEOUT_S = 240
ONCE = {"delivery": "exactly-once"}


def write_files(folder: Path, files: int, rows: int, first: int = 0) -> None:
    folder.mkdir(parents=True)
    for number in range(files):
        lines = "\n".join(str(first + number * rows + row) for row in range(rows))
        (folder / f"{number:03}.txt").write_text(lines)


def stream_files(spark: SparkSession, folder: Path) -> DataFrame:
    return spark.readStream.option("maxFilesPerTrigger", 1).text(str(folder))


def run(frame: DataFrame, bootstrap: str, topic: str, home: Path, **options: str) -> str:
    """Everything that is there now; the id of the query."""
    named = {"kafka.bootstrap.servers": bootstrap, "topic": topic, "checkpointLocation": str(home / "checkpoint")}
    writer = frame.writeStream.format("millrace").options(**{**named, **ONCE, **options})
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(TIMEOUT_S)
    return str(query.id)


def numbers(bootstrap: str, topic: str) -> list[int]:
    return sorted(int(each.value) for each in read_back(bootstrap, topic))


def test_a_stream_and_what_it_has_decided(spark: SparkSession, bootstrap: str, topics: Topics, tmp_path: Path) -> None:
    topic = topics.create(partitions=2)
    write_files(tmp_path / "in", files=3, rows=100)
    frame = stream_files(spark, tmp_path / "in").repartition(2)
    run(frame, bootstrap, topic, tmp_path)
    assert numbers(bootstrap, topic) == list(range(300))
    (tmp_path / "in" / "more.txt").write_text("300\n301")
    query_id = run(frame, bootstrap, topic, tmp_path)
    assert numbers(bootstrap, topic) == list(range(302))
    with ClusterClient(ClientSettings.from_properties({"bootstrap.servers": bootstrap})) as client:
        decided = DecisionLog(client, DEFAULT_DECISIONS_TOPIC).state(query_id)
    assert decided.decided is not None and decided.decided.batch_id == 3
    # Two runs, and in each of them the same ids and producer ids from batch to batch.
    assert [each.since for each in decided.former] == [0]
    assert decided.series is not None and decided.series.since == 3
    first = [each for each in decided.decided.transactions if each.transactional_id.endswith("-0")]
    assert [each.producer_epoch for each in first] == [0]


@pytest.mark.cluster
@pytest.mark.timeout(2 * DRIVER_TIMEOUT_S)
def test_a_driver_killed_at_every_step(bootstrap: str, topics: Topics, tmp_path: Path) -> None:
    rows, files = 300, 3
    topic = topics.create(partitions=3)
    for number, step in enumerate(STEPS):
        write_files(tmp_path / step / "source", files, rows, first=number * files * rows)
    killed = run_driver(bootstrap, topic, tmp_path, "kill")
    assert [step for step in STEPS if not (tmp_path / step / REACHED).exists()] == [], killed.stderr[-3000:]
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert not (tmp_path / "before" / "checkpoint" / "commits" / str(KILLED_BATCH)).exists()
    done = run_driver(bootstrap, topic, tmp_path, "go on")
    assert done.returncode == 0, done.stderr[-3000:]
    assert numbers(bootstrap, topic) == list(range(rows * files * len(STEPS)))


def run_driver(bootstrap: str, topic: str, home: Path, what: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    return subprocess.run(
        [sys.executable, "-m", "support.once_driver", bootstrap, topic, str(home), what],
        env={**os.environ, "PYTHONPATH": paths, "PYSPARK_PYTHON": sys.executable},
        cwd=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DRIVER_TIMEOUT_S,
        check=False,
    )


def test_a_function_for_foreach_batch(spark: SparkSession, bootstrap: str, topics: Topics, tmp_path: Path) -> None:
    """Two sinks of one batch; one that fails after both have written repeats the batch, and neither writes again."""
    topic, other = topics.create(partitions=2), topics.create()
    write_files(tmp_path / "in", files=3, rows=50)
    frame = stream_files(spark, tmp_path / "in")
    options = {"kafka.bootstrap.servers": bootstrap, **ONCE}
    both = sinks.fan_out(sinks.topic(options, topic), sinks.topic(options, other, columns=("value", "value AS key")))
    fails = True

    def write(batch: DataFrame, batch_id: int) -> None:
        both(batch, batch_id)
        if fails and batch_id == 1:
            raise RuntimeError("after both")

    def start() -> None:
        writer = frame.writeStream.foreachBatch(write).option("checkpointLocation", str(tmp_path / "checkpoint"))
        assert writer.trigger(availableNow=True).start().awaitTermination(TIMEOUT_S)

    assert "after both" in error_of(start)
    fails = False
    start()
    assert numbers(bootstrap, topic) == numbers(bootstrap, other) == list(range(150))


def test_two_writes_of_a_batch_need_two_names(
    spark: SparkSession, bootstrap: str, topics: Topics, tmp_path: Path
) -> None:
    write_files(tmp_path / "in", files=1, rows=5)
    frame = stream_files(spark, tmp_path / "in")
    send = sinks.topic({"kafka.bootstrap.servers": bootstrap, **ONCE}, topics.create())

    def twice(batch: DataFrame, batch_id: int) -> None:
        send(batch, batch_id)
        send(batch, batch_id)

    def start() -> None:
        writer = frame.writeStream.foreachBatch(twice).option("checkpointLocation", str(tmp_path / "checkpoint"))
        assert writer.trigger(availableNow=True).start().awaitTermination(TIMEOUT_S)

    assert "give every write of a batch a name of its own" in error_of(start)


def test_a_batch_query_is_all_or_nothing(spark: SparkSession, bootstrap: str, topics: Topics) -> None:
    topic = topics.create(partitions=2)
    frame = spark.range(0, 1000, 1, 3).selectExpr("cast(id as string) as value", "0 as partition")
    options = {"kafka.bootstrap.servers": bootstrap, "topic": topic, **ONCE}
    frame.write.format("millrace").options(**options).mode("append").save()
    assert numbers(bootstrap, topic) == list(range(1000))
    torn = frame.selectExpr("value", "if(value = '999', 7, 0) as partition")
    save = torn.write.format("millrace").options(**options).mode("append").save
    assert "has the partitions 0 to 1" in error_of(save)
    assert numbers(bootstrap, topic) == list(range(1000))
