"""A driver for the test of exactly-once sinks: copies files to four sinks and kills itself, JVM and all, when told.

Arguments: the folder with `source/`, and the number of the batch in which to die, or `never`. It dies when the first
two sinks have committed that batch and the third has written its files, but not committed them.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from deltalake import DeltaTable
from pyspark.sql import DataFrame

from millrace.spark import sinks
from millrace.spark.session import build_session


def main(home: Path, kill_at: str) -> None:
    current = ""
    commit = DeltaTable.create_write_transaction

    def commit_or_die(table: DeltaTable, *args: object, **kwargs: object) -> None:
        if current == kill_at and table.table_uri.rstrip("/").endswith("late"):
            os.killpg(0, signal.SIGKILL)
        commit(table, *args, **kwargs)  # type: ignore[arg-type]

    DeltaTable.create_write_transaction = commit_or_die  # type: ignore[method-assign, assignment]
    write = sinks.fan_out(
        sinks.delta(str(home / "early"), partition_by=["bucket"]),
        sinks.sql(f"sqlite:///{home / 'results.db'}", "copied"),
        sinks.delta(str(home / "late")),
    )

    def write_batch(batch: DataFrame, batch_id: int) -> None:
        nonlocal current
        current = str(batch_id)
        write(batch, batch_id)

    spark = build_session("killed", master="local[2]", options={"spark.driver.memory": "600m"})
    stream = spark.readStream.schema("n long, bucket int").option("maxFilesPerTrigger", 1).json(str(home / "source"))
    targets = {
        "sinks": stream.writeStream.foreachBatch(write_batch),
        "parquet": stream.writeStream.format("parquet").option("path", str(home / "parquet")),
    }
    queries = [
        writer.option("checkpointLocation", str(home / "checkpoints" / name)).trigger(availableNow=True).start()
        for name, writer in targets.items()
    ]
    for query in queries:
        query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
