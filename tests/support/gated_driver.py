"""A Spark driver whose tasks stop in the middle: a program for the tests, run with `python -m support.gated_driver`.

It reads a topic, as a batch query and then as a stream, on the executors of a cluster. A task that has passed some rows
on leaves a file `reached-<pid of its executor>` in the folder of the query and waits there for a file `open`; a task
that is not the first attempt leaves a file `again`. What each query counted is printed as a line of JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as fn

from millrace.spark.session import build_session
from support.spark_queries import read, read_stream

QUERIES = ("batch", "stream")
GATE_ROWS = 1_000


def gated(frame: DataFrame, home: Path) -> DataFrame:
    """The same rows. The function goes to the executors by value: they do not have this module."""
    folder, gate_rows = str(home), GATE_ROWS

    def pass_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import os
        import time
        from pathlib import Path

        from pyspark import TaskContext

        place = Path(folder)
        context = TaskContext.get()
        assert context is not None
        if context.attemptNumber() > 0:
            (place / "again").touch()
        # This process was started by PySpark's daemon, and that one by the executor.
        executor = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
        seen = 0
        for batch in batches:
            yield batch
            seen += batch.num_rows
            if seen >= gate_rows and not (place / "open").exists():
                (place / f"reached-{executor}").touch()
                while not (place / "open").exists():
                    time.sleep(0.01)

    return frame.mapInArrow(pass_on, frame.schema)


def totals(frame: DataFrame) -> list[list[int]]:
    """Partition, records, sum of offsets, different offsets."""
    rows = frame.groupBy("partition").agg(fn.count("*"), fn.sum("offset"), fn.countDistinct("offset")).collect()
    return sorted(list(row) for row in rows)


def main(master: str, bootstrap: str, topic: str, home: Path) -> None:
    options = {
        "spark.driver.memory": "512m",
        "spark.executor.memory": "512m",
        "spark.sql.shuffle.partitions": "2",
        "spark.local.dir": str(home / "local"),
        # Everything here is short: no time for compilers.
        "spark.executorEnv.NUMBA_DISABLE_JIT": "1",
        "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
    }
    spark = build_session("gated", master=master, options=options, check_executors=False)
    small = {"subscribe": topic, "kafka__max__partition__fetch__bytes": "100000"}
    batch, stream = (home / name for name in QUERIES)
    print(json.dumps(totals(gated(read(spark, bootstrap, **small), batch))), flush=True)

    streamed: list[list[list[int]]] = []
    frame = gated(read_stream(spark, bootstrap, startingOffsets="earliest", **small), stream)
    sink = frame.writeStream.foreachBatch(lambda rows, _: streamed.append(totals(rows)))
    query = sink.option("checkpointLocation", str(home / "checkpoint")).trigger(availableNow=True).start()
    query.awaitTermination()
    print(json.dumps([row for found in streamed for row in found]), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
