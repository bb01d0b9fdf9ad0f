"""Holding a query of Spark in the middle of its rows, while a test does something to the brokers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame

from support.spark_queries import TIMEOUT_S


class Gate:
    """Stops a query once, in the middle of its rows, until the test lets it go on; works across processes.

    Whole rows go through it: a column of numbers alone would all fit into the pipes before it.
    """

    def __init__(self, home: Path, rows: int) -> None:
        self.reached, self.open = home / "reached", home / "open"
        self._rows = rows

    def through(self, frame: DataFrame) -> DataFrame:
        reached, opened, rows = str(self.reached), str(self.open), self._rows

        def pass_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            seen = 0
            for batch in batches:
                yield batch
                seen += batch.num_rows
                if seen >= rows and not Path(opened).exists():
                    Path(reached).touch()
                    while not Path(opened).exists():
                        time.sleep(0.01)

        return frame.mapInArrow(pass_on, frame.schema)

    def wait_reached(self) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not self.reached.exists():
            assert time.monotonic() < deadline, "the query did not get as far as the gate"
            time.sleep(0.01)


class Background(threading.Thread):
    """Runs an action of Spark; `result` waits for it."""

    def __init__(self, action: Any) -> None:
        super().__init__(daemon=True)
        self._action = action
        self._outcome: list[Any] = []
        self.start()

    def run(self) -> None:
        try:
            self._outcome.append(self._action())
        except Exception as error:  # noqa: BLE001 (raised where the result is wanted)
            self._outcome.append(error)

    def result(self) -> Any:
        self.join(TIMEOUT_S)
        (outcome,) = self._outcome
        if isinstance(outcome, Exception):
            raise outcome
        return outcome
