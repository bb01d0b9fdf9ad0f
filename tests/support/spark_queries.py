"""Queries on `format("millrace")` as the tests write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as fn
from pyspark.sql.streaming.query import StreamingQuery

TIMEOUT_S = 60


def read(spark: SparkSession, bootstrap: str, schema: str | None = None, **options: Any) -> DataFrame:
    """A batch query; in option names `__` stands for a dot."""
    reader = spark.read.format("millrace").options(**_options(bootstrap, options))
    return (reader.schema(schema) if schema else reader).load()


def read_stream(spark: SparkSession, bootstrap: str, **options: Any) -> DataFrame:
    return spark.readStream.format("millrace").options(**_options(bootstrap, options)).load()


def records(frame: DataFrame) -> list[tuple[Any, ...]]:
    """Topic, partition, offset, key, value of every row, in the order of the log."""
    rows = frame.select("topic", "partition", "offset", "key", "value").collect()
    return sorted((row[0], row[1], row[2], _bytes(row[3]), _bytes(row[4])) for row in rows)


def numbers(frame: DataFrame) -> list[int]:
    """The values of records made by `numbered`, in order."""
    return sorted(row[0] for row in frame.select(fn.col("value").cast("string").cast("long")).collect())


class Collected:
    """Runs a streaming query and keeps the numbers of each micro-batch by its id: run again, it replaces itself."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.batches: dict[int, list[int]] = {}
        self.rows: list[Row] = []
        self.fail_at: int | None = None

    def start(self, frame: DataFrame, **trigger: Any) -> StreamingQuery:
        writer = frame.writeStream.foreachBatch(self._take).option("checkpointLocation", str(self.checkpoint))
        return (writer.trigger(**trigger) if trigger else writer).start()

    def run(self, frame: DataFrame) -> StreamingQuery:
        """Everything that is there now."""
        query = self.start(frame, availableNow=True)
        assert query.awaitTermination(TIMEOUT_S)
        return query

    def all(self) -> list[int]:
        return sorted(number for batch in self.batches.values() for number in batch)

    def sizes(self) -> list[int]:
        """How many records each micro-batch had, without the empty ones."""
        return [len(batch) for _, batch in sorted(self.batches.items()) if batch]

    def _take(self, frame: DataFrame, batch_id: int) -> None:
        self.batches[batch_id] = numbers(frame)
        if batch_id == self.fail_at:
            raise RuntimeError("the test ends this query")


def error_of(action: Callable[[], Any]) -> str:
    """What the failure of a query says."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 (whatever Spark makes of it)
        return str(error)
    raise AssertionError("the query did not fail")


def _bytes(value: bytearray | None) -> bytes | None:
    return None if value is None else bytes(value)


def _options(bootstrap: str, options: dict[str, Any]) -> dict[str, Any]:
    return {"kafka.bootstrap.servers": bootstrap, **{name.replace("__", "."): each for name, each in options.items()}}
