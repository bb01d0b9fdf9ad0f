"""A Spark driver that dies in the middle: a program for the tests, run with `python -m support.stream_driver`.

It reads a topic in micro-batches and writes the values of each to `OUTPUT/<batch id>`, and ends itself by kill -9 right
after the write of one of them: after the data are out, before Spark has noted that they are.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from pyspark.sql import DataFrame

from millrace.spark.session import build_session
from support.spark_queries import numbers, read_stream

BATCH_SIZE = 40


def write(output: Path, frame: DataFrame, batch_id: int) -> None:
    """Put a micro-batch in place of whatever an earlier attempt has left."""
    (output / str(batch_id)).write_text(" ".join(map(str, numbers(frame))))


def main(bootstrap: str, topic: str, home: Path, die_after: int) -> None:
    options = {
        "spark.driver.memory": "512m",
        "spark.sql.shuffle.partitions": "2",
        "spark.local.dir": str(home / "local"),
    }
    spark = build_session("driver", master="local[1]", options=options)

    def take(frame: DataFrame, batch_id: int) -> None:
        write(home / "output", frame, batch_id)
        if batch_id == die_after:
            # The JVM is a child that ends when its standard input closes; its Python workers end with it.
            os.kill(os.getpid(), signal.SIGKILL)

    frame = read_stream(
        spark, bootstrap, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=str(BATCH_SIZE)
    )
    query = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(home / "checkpoint")).start()
    query.awaitTermination()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
