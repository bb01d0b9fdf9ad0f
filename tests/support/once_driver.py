"""A Spark driver for the tests of the exactly-once sink, run with `python -m support.once_driver`.

It copies the numbers in the files of `HOME/source` to a topic, a file per micro-batch and TASKS tasks, and dies with
all its processes at one moment of one batch: in a task that has written (`task`), before the decision (`before`), after
it (`after`), when one of the transactions is committed (`middle`), or when all are (`ended`), but Spark has not noted
it. `worker` kills only the process of one task, which Spark then runs again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter
from pyspark.sql.types import StructType

from millrace.spark.session import build_session

TASKS = 3
STEPS = ("task", "before", "after", "middle", "ended", "worker")


def dying_source(home: Path, kill: str) -> type[DataSource]:
    """The sink, but for one moment. It goes to Spark's processes by value: they do not have this module."""
    folder = str(home)
    at_batch, _, step = kill.partition(":")

    def die() -> None:
        import psutil

        me = psutil.Process()
        pids = [] if step == "worker" else (Path(folder) / "pids").read_text().split()
        for pid in pids:
            psutil.Process(int(pid)).kill()
        me.kill()

    def is_it(batch_id: int) -> bool:
        """Once, in this run: it is another one if the file is there."""
        if str(batch_id) != at_batch:
            return False
        try:
            (Path(folder) / f"died-{at_batch}-{step}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    class Dying(DataSource):
        @classmethod
        def name(cls) -> str:
            return "dying"

        def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
            from millrace.client import transactions
            from millrace.spark.options import SinkOptions
            from millrace.spark.writer import StreamWriter

            class Writer(StreamWriter):
                def write(self, iterator: Iterator[Any]) -> Any:
                    told = super().write(iterator)
                    if step in ("task", "worker") and told.fence is not None and is_it(told.fence.batch_id):
                        die()
                    return told

                def commit(self, messages: list[Any], batchId: int) -> None:  # noqa: N803
                    end = transactions.end
                    if step not in ("task", "worker") and is_it(batchId):
                        if step == "before":
                            die()
                        if step in ("after", "middle"):

                            def half(client: Any, ended: Any, *, commit: bool) -> Any:
                                end(client, list(ended)[: 0 if step == "after" else 1], commit=commit)
                                die()

                            transactions.end = half  # type: ignore[assignment]
                        super().commit(messages, batchId)
                        die()
                    super().commit(messages, batchId)

            return Writer(SinkOptions.parse(self.options).for_stream(), schema, overwrite)

    return Dying


def main(bootstrap: str, topic: str, home: Path, kill: str) -> None:
    import os

    options = {"spark.driver.memory": "512m", "spark.local.dir": str(home / "local")}
    spark = build_session("once", master="local[2,4]", options=options)
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    (home / "pids").write_text(f"{os.getpid()} {gateway.proc.pid}")
    spark.dataSource.register(dying_source(home, kill))
    numbers = spark.readStream.option("maxFilesPerTrigger", 1).text(str(home / "source"))
    sink = numbers.repartition(TASKS).writeStream.format("dying").option("kafka.bootstrap.servers", bootstrap)
    sink = sink.option("topic", topic).option("delivery", "exactly-once")
    query = sink.option("checkpointLocation", str(home / "checkpoint")).trigger(availableNow=True).start()
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4])
