"""A Spark driver for the tests of the exactly-once sink, run with `python -m support.once_driver`.

It has a query for each of STEPS, which copies the numbers in the files of `HOME/<step>/source` to a topic, a file per
micro-batch and TASKS tasks. With `kill` each of them stops at its step of its second batch: in a task that has written
(`task`), before the decision (`before`), after it (`after`), when one of the transactions is committed (`middle`), or
when all are (`ended`), but Spark has not noted it. When all are there, the driver dies with all its processes. `worker`
does not stop, but kills the process of one task, which Spark then runs again.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter
from pyspark.sql.types import StructType

from millrace.spark.session import build_session

TASKS = 3
STEPS = ("task", "before", "after", "middle", "ended", "worker")
KILLED_BATCH = 1
REACHED = "reached"


def stopping_source(home: Path, step: str, at_batch: int | None) -> type[DataSource]:
    """The sink, but for one moment. It goes to Spark's processes by value: they do not have this module."""
    reached = str(home / step / REACHED)

    def stop() -> None:
        """Once: one of the tasks is to stop, the others are to go on."""
        import os
        import signal
        import threading

        try:
            Path(reached).touch(exist_ok=False)
        except FileExistsError:
            return
        if step == "worker":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()

    class Stopping(DataSource):
        @classmethod
        def name(cls) -> str:
            return f"stopping-{step}"

        def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
            from millrace.client import transactions
            from millrace.spark.options import SinkOptions
            from millrace.spark.writer import StreamWriter

            class Writer(StreamWriter):
                def write(self, iterator: Iterator[Any]) -> Any:
                    told = super().write(iterator)
                    if step in ("task", "worker") and told.fence is not None and told.fence.batch_id == at_batch:
                        stop()
                    return told

                def commit(self, messages: list[Any], batchId: int) -> None:  # noqa: N803
                    here = batchId == at_batch
                    if here and step == "before":
                        stop()
                    if here and step in ("after", "middle"):
                        end = transactions.end

                        def half(client: Any, ended: Any, *, commit: bool) -> Any:
                            end(client, list(ended)[: 0 if step == "after" else 1], commit=commit)
                            stop()

                        transactions.end = half  # type: ignore[assignment]
                    super().commit(messages, batchId)
                    if here and step == "ended":
                        stop()

            return Writer(SinkOptions.parse(self.options).for_stream(), schema, overwrite)

    return Stopping


def main(bootstrap: str, topic: str, home: Path, *, kill: bool) -> None:
    options = {"spark.driver.memory": "512m", "spark.local.dir": str(home / "local")}
    # A core for the task that stops, the others for those that go on.
    spark = build_session("once", master="local[3,4]", options=options)
    queries = []
    for step in STEPS:
        source = stopping_source(home, step, KILLED_BATCH if kill else None)
        spark.dataSource.register(source)
        numbers = spark.readStream.option("maxFilesPerTrigger", 1).text(str(home / step / "source"))
        sink = numbers.repartition(TASKS).writeStream.format(source.name()).option("kafka.bootstrap.servers", bootstrap)
        sink = sink.option("topic", topic).option("delivery", "exactly-once")
        sink = sink.option("checkpointLocation", str(home / step / "checkpoint"))
        queries.append(sink.trigger(availableNow=True).start())
    if kill:
        while not all((home / step / REACHED).exists() for step in STEPS):
            time.sleep(0.05)
        for process in psutil.Process().children(recursive=True):
            process.kill()
        os.kill(os.getpid(), signal.SIGKILL)
    for query in queries:
        query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), kill=sys.argv[4] == "kill")
