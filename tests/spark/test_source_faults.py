"""The source when something breaks under it: brokers, workers, drivers, logs. Counts are exact in every test."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn

from support.gates import Background, Gate
from support.servers import ROOT, MillraceServer
from support.spark_queries import TIMEOUT_S, Collected, error_of, numbers, read, read_stream
from support.stream_driver import BATCH_SIZE, write
from support.topics import Sent, Topics, numbered


@pytest.fixture
def server(our_broker: None) -> Iterator[MillraceServer]:
    with MillraceServer({"flush.mode": "os"}) as server:
        yield server


COUNT = 50_000
"""Records of 1,000 bytes: far more than what queues and pipes hold, and Spark's Arrow batches of 10,000 rows, while the
gate is shut."""

EVERY_RECORD_ONCE = [(partition, COUNT, COUNT * (COUNT - 1) // 2, COUNT) for partition in range(2)]
"""Per partition: records, the sum of their offsets, how many offsets there are."""


def test_a_broker_killed_in_the_middle_of_a_batch_query(
    spark: SparkSession, server: MillraceServer, tmp_path: Path
) -> None:
    topics = Topics(server.bootstrap)
    topic = topics.create(partitions=2)
    topics.send(topic, [Sent(bytes(1000), partition=number % 2) for number in range(2 * COUNT)], batch_size=65536)
    gate = Gate(tmp_path, rows=1000)
    frame = read(spark, server.bootstrap, subscribe=topic, kafka__max__partition__fetch__bytes="100000")
    totals = gate.through(frame).groupBy("partition")
    query = Background(totals.agg(fn.count("*"), fn.sum("offset"), fn.countDistinct("offset")).collect)
    gate.wait_reached()
    server.kill()
    gate.open.touch()
    server.start()
    rows = query.result()
    assert sorted(tuple(row) for row in rows) == EVERY_RECORD_ONCE


def test_a_broker_killed_while_a_query_streams(spark: SparkSession, server: MillraceServer, tmp_path: Path) -> None:
    topics = Topics(server.bootstrap)
    topic = topics.create(partitions=2)
    topics.send(topic, numbered(100, partitions=2))
    collected = Collected(tmp_path / "checkpoint")
    query = collected.start(read_stream(spark, server.bootstrap, subscribe=topic, startingOffsets="earliest"))
    try:
        query.processAllAvailable()
        assert collected.all() == list(range(100))
        for start in (100, 200):
            server.kill()
            server.start()
            topics.send(topic, numbered(100, partitions=2, start=start))
            query.processAllAvailable()
            assert collected.all() == list(range(start + 100))
    finally:
        query.stop()


def test_a_python_worker_killed_in_the_middle(
    spark: SparkSession, bootstrap: str, topics: Topics, tmp_path: Path
) -> None:
    topic = topics.create(partitions=2)
    topics.send(topic, [Sent(bytes(1000), partition=number % 2) for number in range(2 * COUNT)], batch_size=65536)
    done = str(tmp_path / "killed")
    broker_port = f":{int(bootstrap.rpartition(':')[2]):04X}"

    def reads_from_the_broker(pid: int) -> bool:
        """The process holds a socket whose other end is the broker. Spark's idle workers do not, and stay alive: Spark
        takes a worker that was killed while idle for a living one until it is reaped, and then the retry fails too."""
        connections = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        wanted = {f"socket:[{fields[9]}]" for fields in connections if fields[2].endswith(broker_port)}
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if str(link.readlink()) in wanted:
                    return True
        return False

    def parent_of(pid: int) -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    def children_of(pid: int) -> list[int]:
        return [child for task in Path(f"/proc/{pid}/task").iterdir() for child in ids_in(task / "children")]

    def ids_in(file: Path) -> list[int]:
        try:
            return [int(word) for word in file.read_text().split()]
        except FileNotFoundError:  # the thread ended meanwhile
            return []

    def kill_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch
            try:
                Path(done).touch(exist_ok=False)
            except FileExistsError:
                continue
            spark_pid = parent_of(os.getppid())
            daemons = [daemon for daemon in children_of(spark_pid) if daemon != os.getppid()]
            for worker in (worker for daemon in daemons for worker in children_of(daemon)):
                if reads_from_the_broker(worker):
                    os.kill(worker, signal.SIGKILL)
                    Path(f"{done}-{worker}").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    frame = read(spark, bootstrap, subscribe=topic, kafka__max__partition__fetch__bytes="100000")
    totals = frame.mapInArrow(kill_once, frame.schema).groupBy("partition")
    rows = totals.agg(fn.count("*"), fn.sum("offset"), fn.countDistinct("offset")).collect()
    assert list(tmp_path.glob("killed-*")), "no worker of the source was killed"
    assert sorted(tuple(row) for row in rows) == EVERY_RECORD_ONCE


def test_a_driver_killed_between_write_and_commit(
    spark: SparkSession, bootstrap: str, topics: Topics, tmp_path: Path
) -> None:
    topic = topics.create()
    topics.send(topic, numbered(100))
    output = tmp_path / "output"
    output.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}
    driver = subprocess.run(
        [sys.executable, "-m", "support.stream_driver", bootstrap, topic, str(tmp_path), "1"],
        env=environment,
        cwd=tmp_path,
        timeout=3 * TIMEOUT_S,  # it starts a JVM of its own
        check=False,
        capture_output=True,
    )
    assert driver.returncode == -signal.SIGKILL, driver.stderr.decode()[-2000:]
    assert not (tmp_path / "checkpoint" / "commits" / "1").exists()
    first = {path.name: path.read_text() for path in output.iterdir()}
    assert sorted(first) == ["0", "1"]
    topics.send(topic, numbered(20, start=100))

    attempts: list[int] = []

    def take(frame: DataFrame, batch_id: int) -> None:
        attempts.append(batch_id)
        write(output, frame, batch_id)

    options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": str(BATCH_SIZE)}
    frame = read_stream(spark, bootstrap, subscribe=topic, **options)
    query = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    query.processAllAvailable()
    query.stop()
    assert attempts == [1, 2]  # what was written is written again, the same; then the rest
    second = {path.name: path.read_text() for path in output.iterdir()}
    assert {name: second[name] for name in first} == first
    assert sorted(int(text) for batch in second.values() for text in batch.split()) == list(range(120))


def test_offsets_lost_to_retention_while_a_query_was_down(
    spark: SparkSession, bootstrap: str, topics: Topics, tmp_path: Path
) -> None:
    topic = topics.create()
    topics.send(topic, numbered(50))
    options = {"subscribe": topic, "startingOffsets": "earliest"}
    Collected(tmp_path / "checkpoint").run(read_stream(spark, bootstrap, **options))
    topics.send(topic, numbered(50, start=50))
    topics.delete_records(topic, 0, 70)
    collected = Collected(tmp_path / "checkpoint")
    message = error_of(lambda: collected.run(read_stream(spark, bootstrap, **options)))
    assert f"offsets 50 to 69 of partition {topic}-0 are gone: its log begins at offset 70" in message
    assert "Set option failOnDataLoss to false" in message
    assert collected.all() == []
    collected.run(read_stream(spark, bootstrap, failOnDataLoss="false", **options))
    assert collected.all() == list(range(70, 100))


def test_offsets_lost_while_a_task_reads(spark: SparkSession, bootstrap: str, topics: Topics, tmp_path: Path) -> None:
    topic = topics.create()
    topics.send(topic, [Sent(bytes(1000), partition=0) for _ in range(COUNT)], batch_size=65536)
    for fail in ("true", "false"):
        home = tmp_path / fail
        home.mkdir()
        gate = Gate(home, rows=1000)
        options = {"subscribe": topic, "failOnDataLoss": fail, "kafka__max__partition__fetch__bytes": "100000"}
        frame = gate.through(read(spark, bootstrap, **options)).select("offset")
        query = Background(lambda frame=frame: sorted(row.offset for row in frame.collect()))
        gate.wait_reached()
        topics.delete_records(topic, 0, COUNT - 10_000)
        gate.open.touch()
        if fail == "true":
            message = error_of(query.result)
            assert f"of partition {topic}-0 are gone: its log begins at offset {COUNT - 10_000}" in message
            topic = topics.create()
            topics.send(topic, [Sent(bytes(1000), partition=0) for _ in range(COUNT)], batch_size=65536)
        else:
            found = query.result()
            before = len(found) - 10_000
            assert 1000 <= before < COUNT - 10_000
            assert found == [*range(before), *range(COUNT - 10_000, COUNT)]


def test_a_topic_deleted_while_a_query_streams(
    spark: SparkSession, bootstrap: str, topics: Topics, tmp_path: Path
) -> None:
    kept = topics.create("stream-kept")
    for fail in ("true", "false"):
        gone = topics.create("stream-gone")
        topics.send(gone, numbered(10))
        collected = Collected(tmp_path / fail)
        frame = read_stream(spark, bootstrap, subscribe=f"{kept},{gone}", failOnDataLoss=fail)
        query = collected.start(frame)
        query.processAllAvailable()
        topics.delete(gone)
        if fail == "true":
            message = error_of(lambda query=query: query.awaitTermination(TIMEOUT_S))  # type: ignore[misc]
            assert f"partition {gone}-0 is gone; it had been read up to offset 10" in message
        else:
            topics.send(kept, numbered(10))
            query.processAllAvailable()
            query.stop()
            assert collected.all() == list(range(10))


def test_a_damaged_batch_is_named(spark: SparkSession, server: MillraceServer) -> None:
    topics = Topics(server.bootstrap)
    topic = topics.create()
    for start in range(0, 300, 100):
        topics.send(topic, numbered(100, start=start))
    server.stop()
    (segment,) = server.partition_dir(topic, 0).glob("*.log")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0x01  # inside the second of three batches
    segment.write_bytes(data)
    server.start()
    message = error_of(lambda: numbers(read(spark, server.bootstrap, subscribe=topic)))
    assert f"topic {topic}, partition 0: the record batch at offset 100" in message
    assert "CRC" in message
    ending = json.dumps({topic: {"0": 100}})
    assert numbers(read(spark, server.bootstrap, subscribe=topic, endingOffsets=ending)) == list(range(100))
