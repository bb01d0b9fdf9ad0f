"""What is timed, run inside a Spark process of its own; one process has one session, for one side.

`start` is called once per process, then the others by name. Every query checks what it has read or written: a wrong
count must not become a good time. The same DataFrame code runs on both sides, only the format's name differs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from millrace.spark.session import prepare_environment, use_installed_pyspark
from support.spark_sessions import local_session

# Every column has a part in the result, so that neither side can leave one out.
AGGREGATES = (
    "count(*) AS records",
    "sum(length(value)) AS value_bytes",
    "sum(length(key)) AS key_bytes",
    "sum(offset) AS offsets",
    "sum(length(topic)) AS topics",
    "sum(partition) AS partitions",
    "max(timestamp) AS newest",
    "sum(timestampType) AS types",
)


@dataclass(frozen=True, slots=True)
class Side:
    """One format on one broker."""

    format: str
    bootstrap: str
    jars: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """So many records with values of so many bytes in a topic; a stream takes them in so many micro-batches."""

    topic: str
    records: int
    value_bytes: int
    stream_batches: int


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a query took, and of a stream its micro-batches alone: the start of a query happens once."""

    seconds: float
    batches_s: float | None = None


Query = Callable[[Load], Timing]


class _Running:
    """The session of this process."""

    side: Side
    spark: SparkSession
    stack: ExitStack


def start(side: Side) -> None:
    """Start the session of this process, in the environment that `build_session` makes, whichever the side is."""
    _Running.side = side
    prepare_environment()
    use_installed_pyspark()
    _Running.stack = ExitStack()
    _Running.spark = _Running.stack.enter_context(local_session(side.jars))


def stop() -> None:
    """End the session and its JVM."""
    _Running.stack.close()


def perform(query: Query, load: Load) -> Timing:
    """Run one of the queries below; an error of Spark's holds on to its JVM and cannot leave the process as it is."""
    try:
        return query(load)
    except (PySparkException, Py4JError) as error:
        raise RuntimeError(f"{_Running.side.format}: {str(error)[:3000]}") from None


def read(load: Load) -> Timing:
    """A batch query over a whole topic."""
    frame = _Running.spark.read.format(_Running.side.format).options(**_source(load.topic)).load()
    started = time.monotonic()
    (row,) = frame.selectExpr(*AGGREGATES).collect()
    seconds = time.monotonic() - started
    _require(row.records, load.records, "records read")
    _require(row.value_bytes, load.records * load.value_bytes, "bytes read")
    return Timing(seconds)


def stream(load: Load) -> Timing:
    """A stream from the start of a topic to its end, every row thrown away."""
    limit = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": str(-(-load.records // load.stream_batches))}
    source = _Running.spark.readStream.format(_Running.side.format).options(**_source(load.topic), **limit)
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as checkpoint:
        sink = source.load().writeStream.format("noop").option("checkpointLocation", checkpoint)
        started = time.monotonic()
        query = sink.trigger(availableNow=True).start()
        query.awaitTermination()
        seconds = time.monotonic() - started
        progress = query.recentProgress
    _require(sum(each.numInputRows for each in progress), load.records, "rows streamed")
    return Timing(seconds, sum(each.durationMs["triggerExecution"] for each in progress) / 1000)


def write(load: Load) -> Timing:
    """A batch write of generated rows; the caller counts what is in the topic."""
    target = generated(_Running.spark, load).write.format(_Running.side.format).mode("append")
    started = time.monotonic()
    target.option("kafka.bootstrap.servers", _Running.side.bootstrap).option("topic", load.topic).save()
    return Timing(time.monotonic() - started)


def generated(spark: SparkSession, load: Load) -> DataFrame:
    """Rows with a short key and a value of the wanted length, made by Spark as fast as it can."""
    numbers = spark.range(0, load.records, numPartitions=2)
    return numbers.selectExpr(
        "CAST(CAST(id AS STRING) AS BINARY) AS key",
        f"CAST(lpad(CAST(id AS STRING), {load.value_bytes}, '0') AS BINARY) AS value",
    )


def _source(topic: str) -> dict[str, str]:
    return {"kafka.bootstrap.servers": _Running.side.bootstrap, "subscribe": topic}


def _require(found: int, wanted: int, what: str) -> None:
    if found != wanted:
        raise RuntimeError(f"{_Running.side.format}: {found:,} {what}, expected {wanted:,}")
