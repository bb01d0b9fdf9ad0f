"""The three pipelines of the demo on one Spark session: how they are set up, watched and brought to their end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from millrace.demo import traffic
from millrace.spark.pipelines.contract import LoadedPipeline, find
from millrace.spark.pipelines.progress import QueryFigures, figures_of
from millrace.spark.session import build_session, root_cause

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

TABLE: Final = "cpu_by_host"
SUMMARY: Final = "metrics-summary"
ERRORS: Final = "logs-errors"
ENRICHED: Final = "clicks-enriched"
DEAD: Final = {"metrics": "metrics-dead-letters", "logs": "logs-dead-letters", "streams": "clicks-dead-letters"}


def settings_of(results: Path) -> dict[str, dict[str, str]]:
    """The options of each pipeline. The time limits are short, so that a minute shows results of every kind."""
    return {
        "metrics": {
            "topic": traffic.METRICS,
            "by": "tags.host",
            "window": "10 seconds",
            "watermark": "20 seconds",
            "output": SUMMARY,
            "table": f"sqlite:///{results / 'metrics.db'}",
            "table_name": TABLE,
            "dead_letters": DEAD["metrics"],
        },
        "logs": {
            "topic": traffic.LOGS,
            "errors": ERRORS,
            "warehouse": str(results / "logs"),
            "dead_letters": DEAD["logs"],
            "trigger": "3 seconds",
        },
        "streams": {
            "topic": traffic.CLICKS,
            "table": traffic.USERS,
            "lookup": "user",
            "other": traffic.PURCHASES,
            "other_id": "click",
            "within": "10 seconds",
            "watermark": "10 seconds",
            "output": ENRICHED,
            "route": "device",
            "routes": ",".join(traffic.DEVICES),
            "dead_letters": DEAD["streams"],
        },
    }


class Pipelines:
    """Started together on one session; `finish` returns when everything that was written is processed."""

    def __init__(self, bootstrap: str, folder: Path, results: Path) -> None:
        """`folder` is for checkpoints. Nothing runs before `open_session`."""
        self._bootstrap = bootstrap
        self._folder = folder
        self._results = results
        self._loaded: list[tuple[LoadedPipeline, dict[str, str]]] = []
        self._queries: list[StreamingQuery] = []
        self._spark: SparkSession | None = None
        self._late: dict[str, dict[int, int]] = {}

    def open_session(self) -> None:
        """Start Spark, which takes some seconds, and load the pipelines, which may want it for what they define."""
        self._spark = build_session("millrace-demo", options={"spark.driver.memory": "1g"}, log_level="off")
        for name, given in settings_of(self._results).items():
            pipeline = find(name)
            options = pipeline.resolve({"kafka.bootstrap.servers": self._bootstrap, **given})
            options |= {"once": "false", "checkpoint": str(self._folder / name)}
            self._loaded.append((pipeline.load(), options))

    def topics(self) -> list[str]:
        """The topics that the pipelines read or write."""
        return [topic for loaded, options in self._loaded for topic in loaded.topics(options)]

    def start(self) -> None:
        assert self._spark is not None
        for loaded, options in self._loaded:
            self._queries += loaded.start(self._spark, options)

    def figures(self) -> list[QueryFigures]:
        """The newest figures of every query that has any."""
        found = []
        for query in self._queries:
            reports: list[Mapping[str, object]] = [json.loads(one.json) for one in query.recentProgress]
            newest = [figures_of(query.name or str(query.id), report) for report in reports]
            for one in newest:
                if one.late_rows:
                    self._late.setdefault(one.name, {})[one.batch_id] = one.late_rows
            found += newest[-1:]
        return found

    def late_rows(self, query: str) -> int:
        """How many rows a query has dropped because they came after its watermark."""
        return sum(self._late.get(query, {}).values())

    def failure(self) -> str | None:
        """Why a query has failed, if one has."""
        for query in self._queries:
            error = query.exception()
            if error is not None:
                return f"query {query.name}: {root_cause(error)}"
            if not query.isActive:
                return f"query {query.name} ended by itself"
        return None

    def catch_up(self) -> None:
        """Wait until every query has processed what is in its topics; what fails is told by `failure`."""
        from pyspark.errors import StreamingQueryException

        for query in self._queries:
            try:
                query.processAllAvailable()
            except StreamingQueryException:
                return
        self.figures()

    def stop(self) -> None:
        for query in self._queries:
            query.stop()
        if self._spark is not None:
            self._spark.stop()
