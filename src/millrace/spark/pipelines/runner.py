"""Keeps the queries of a pipeline running: watches them, starts them again after a failure, stops them cleanly.

Not here: the session, the options, and what is shown. A failure stops all queries of the pipeline, and after a pause
that doubles with each failure in a row all are started again from their checkpoints. A stop that was asked for waits
until the running batches are done, within a bound: stopping a query in the middle of a batch is safe, but the batch
would be done again. A query that has not come to its first batch is waited for as well: it is starting Python processes
for its sources, and they would find that Spark is gone.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from millrace.clock import Clock, SystemClock
from millrace.errors import MillraceError
from millrace.spark.pipelines.contract import LoadedPipeline
from millrace.spark.pipelines.progress import QueryFigures, figures_of
from millrace.spark.session import root_cause

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

logger = logging.getLogger(__name__)

POLL_S: Final = 0.25
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
HEALTHY_AFTER_S: Final = 300.0
FINISH_S: Final = 60.0


class PipelineFailed(MillraceError):
    """A query failed and is not started again; the text says why."""


def pause_s(failures: int) -> float:
    """How long to wait after so many failures in a row."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** max(0, failures - 1))


def _ignore(*_: object) -> None:
    """For callers who do not watch."""


class Runner:
    """One pipeline on one session. `run` returns when it is done or was told to stop."""

    def __init__(
        self,
        spark: SparkSession,
        pipeline: LoadedPipeline,
        options: Mapping[str, str],
        *,
        restarts: int = 0,
        on_progress: Callable[[QueryFigures], None] = _ignore,
        on_restart: Callable[[str, float, int], None] = _ignore,
        on_stopping: Callable[[], None] = _ignore,
        finish_s: float = FINISH_S,
        clock: Clock | None = None,
    ) -> None:
        self._spark = spark
        self._pipeline = pipeline
        self._options = options
        self._restarts = restarts
        self._on_progress = on_progress
        self._on_restart = on_restart
        self._on_stopping = on_stopping
        self._finish_s = finish_s
        self._clock = clock or SystemClock()
        self._seen: dict[str, str] = {}  # query -> time of its newest report

    def __repr__(self) -> str:
        return f"Runner({self._pipeline.pipeline.name}, {len(self._seen)} queries)"

    def run(self, stopping: threading.Event) -> None:
        """Run until every query has ended, or until `stopping` is set. PipelineFailed after too many failures."""
        queries: list[StreamingQuery] | None = self._start()  # what fails here would fail again
        failures = 0
        while queries is not None:
            began = self._clock.monotonic()
            reason = self._watch(queries, stopping)
            if reason is None:
                return
            if self._clock.monotonic() - began > HEALTHY_AFTER_S:
                failures = 0
            queries, failures = self._start_again(reason, failures + 1, stopping)

    def _start(self) -> list[StreamingQuery]:
        """The queries of the pipeline, started; when that fails in the middle, none of them goes on."""
        others = {query.id for query in self._spark.streams.active}
        try:
            return self._pipeline.start(self._spark, self._options)
        except BaseException:
            for query in self._spark.streams.active:
                if query.id not in others:
                    query.stop()
            raise

    def _start_again(
        self, reason: str, failures: int, stopping: threading.Event
    ) -> tuple[list[StreamingQuery] | None, int]:
        """Queries started after a pause, and how many failures came before; None when a stop ended the pause."""
        while failures <= self._restarts:
            pause = pause_s(failures)
            self._on_restart(reason, pause, failures)
            if stopping.wait(pause):
                return None, failures
            try:
                return self._start(), failures
            except Exception as error:  # noqa: BLE001  # whatever it is, it is shown and tried again
                reason = root_cause(error)
                failures += 1
        raise PipelineFailed(reason)

    def _watch(self, queries: list[StreamingQuery], stopping: threading.Event) -> str | None:
        """Follow the queries to their end; the reason if one failed."""
        try:
            while True:
                active = any(query.isActive for query in queries)  # before the rest: an end between must not be missed
                for query in queries:
                    self._report(query)
                failed = next((error for query in queries if (error := query.exception()) is not None), None)
                if failed is not None:
                    return root_cause(failed)
                if not active:
                    return None
                if stopping.wait(POLL_S):
                    if any(map(_is_busy, queries)):
                        self._on_stopping()
                    self._finish_batches(queries)
                    return None
        finally:
            for query in queries:
                query.stop()

    def _report(self, query: StreamingQuery) -> None:
        """Hand on the reports that are new since the last look."""
        # By time: an idle query reports the number of its next batch, and that batch reports it again.
        last = self._seen.get(str(query.id), "")
        newest = query.lastProgress
        if newest is None or json.loads(newest.json)["timestamp"] <= last:
            return
        for progress in query.recentProgress:
            report = json.loads(progress.json)
            if report["timestamp"] > last:
                last = report["timestamp"]
                self._on_progress(figures_of(query.name or str(query.id), report))
        self._seen[str(query.id)] = last

    def _finish_batches(self, queries: list[StreamingQuery]) -> None:
        """Wait until each query is between two batches, or has finished the one it was in."""
        deadline = self._clock.monotonic() + self._finish_s
        pause = threading.Event()
        for query in queries:
            before = self._batches_done(query)
            while _is_busy(query) and self._batches_done(query) == before and self._clock.monotonic() < deadline:
                pause.wait(0.05)
            query.stop()
            self._report(query)

    @staticmethod
    def _batches_done(query: StreamingQuery) -> int:
        progress = query.lastProgress
        return int(json.loads(progress.json)["batchId"]) if progress is not None else -1


def _is_busy(query: StreamingQuery) -> bool:
    """Whether a query is in a batch, or on its way to its first one."""
    if not query.isActive:
        return False
    status = query.status
    return bool(status["isTriggerActive"]) or str(status["message"]).startswith("Initializing")
