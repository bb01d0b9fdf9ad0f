"""A Spark driver for the rounds of the exactly-once sink, run with `python -m cluster.spark_driver`.

It copies a topic to another on the executors of a cluster, as many records per micro-batch as it is told, and ends when
it has copied all that is there. Started again with the same checkpoint it goes on where it was killed. Every task takes
a while before it writes: there are more tasks than cores, so that transactions are open for most of the batch.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame

from cluster.workload import add_client_option
from millrace.spark.session import build_session
from support.spark_cluster import FAST_JAVA
from support.spark_queries import read_stream


def slowly(frame: DataFrame, task_s: float) -> DataFrame:
    """The same rows. The function goes to the executors by value: they do not have this module."""

    def pass_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import time

        time.sleep(task_s)
        yield from batches

    return frame.mapInArrow(pass_on, frame.schema)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--master", "--input", "--output"):
        parser.add_argument(name, required=True)
    add_client_option(parser)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--batch-rows", type=int, required=True)
    parser.add_argument("--task-s", type=float, required=True)
    parser.add_argument("--timeout-ms", type=int, required=True)
    told = parser.parse_args()
    settings = {
        "spark.driver.memory": "512m",
        "spark.executor.memory": "512m",
        "spark.local.dir": str(told.home / "local"),
        "spark.driver.extraJavaOptions": FAST_JAVA,
        "spark.executor.extraJavaOptions": FAST_JAVA,
        "spark.executorEnv.NUMBA_DISABLE_JIT": "1",
        "spark.executorEnv.OPENBLAS_NUM_THREADS": "1",
        # The round reads in the checkpoint when each batch began and ended.
        "spark.sql.streaming.minBatchesToRetain": "1000000",
        # Tasks are not looked for where an executor was that is dead.
        "spark.locality.wait": "0s",
    }
    spark = build_session("copy", master=told.master, options=settings, check_executors=False)
    client = {f"kafka.{name}": value for name, value in told.client.items()}
    frame = read_stream(
        spark,
        told.client["bootstrap.servers"],
        **client,
        subscribe=told.input,
        startingOffsets="earliest",
        maxOffsetsPerTrigger=str(told.batch_rows),
    )
    sink = slowly(frame.select("value"), told.task_s).writeStream.format("millrace")
    sink = sink.options(**client)
    sink = sink.option("topic", told.output).option("delivery", "exactly-once")
    sink = sink.option("kafka.transaction.timeout.ms", str(told.timeout_ms))
    query = sink.option("checkpointLocation", str(told.home / "checkpoint")).trigger(availableNow=True).start()
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
