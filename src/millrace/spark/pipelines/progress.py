"""Spark's reports about a query as the few figures that somebody watches. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class QueryFigures:
    """How a query is doing after a batch."""

    name: str
    batch_id: int
    input_rows: int
    input_rate: float
    processed_rate: float
    batch_ms: int
    lag: int | None
    """Records that were in the topics and not in the batch; None when the source does not say."""
    late_rows: int
    """Rows dropped in this batch because they came after the watermark."""
    state_rows: int
    state_bytes: int
    timestamp: str = ""
    rows_by_source: Mapping[str, int] = field(default_factory=dict)
    """What was read from where: two queries of a pipeline may read the same records."""

    def as_dict(self) -> dict[str, object]:
        return {
            "query": self.name,
            "batch": self.batch_id,
            "timestamp": self.timestamp,
            "input_rows": self.input_rows,
            "input_rate": round(self.input_rate, 1),
            "processed_rate": round(self.processed_rate, 1),
            "batch_ms": self.batch_ms,
            "lag": self.lag,
            "late_rows": self.late_rows,
            "state_rows": self.state_rows,
            "state_bytes": self.state_bytes,
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        """What `as_dict` gave; KeyError, TypeError or ValueError for anything else. Rows by source are not in it."""
        lag = found["lag"]
        return cls(
            name=str(found["query"]),
            batch_id=int(found["batch"]),
            input_rows=int(found["input_rows"]),
            input_rate=float(found["input_rate"]),
            processed_rate=float(found["processed_rate"]),
            batch_ms=int(found["batch_ms"]),
            lag=None if lag is None else int(lag),
            late_rows=int(found["late_rows"]),
            state_rows=int(found["state_rows"]),
            state_bytes=int(found["state_bytes"]),
            timestamp=str(found["timestamp"]),
        )


def figures_of(name: str, report: Mapping[str, Any]) -> QueryFigures:
    """The figures of one report of Spark's, in its JSON form."""
    sources = report.get("sources") or []
    operators = report.get("stateOperators") or []
    lags = [lag for source in sources if (lag := lag_of(source)) is not None]
    return QueryFigures(
        name=name,
        batch_id=int(report.get("batchId", -1)),
        input_rows=int(report.get("numInputRows") or 0),
        input_rate=_number(report.get("inputRowsPerSecond")),
        processed_rate=_number(report.get("processedRowsPerSecond")),
        batch_ms=int((report.get("durationMs") or {}).get("triggerExecution", 0)),
        lag=sum(lags) if lags else None,
        late_rows=_total(operators, "numRowsDroppedByWatermark"),
        state_rows=_total(operators, "numRowsTotal"),
        state_bytes=_total(operators, "memoryUsedBytes"),
        timestamp=str(report.get("timestamp", "")),
        rows_by_source=_rows_by_source(sources),
    )


class RecordsRead:
    """How many records a pipeline has read: what several of its queries read from one place counts once."""

    def __init__(self) -> None:
        self._rows: dict[str, Counter[str]] = {}

    def add(self, report: QueryFigures) -> None:
        for source, rows in report.rows_by_source.items():
            self._rows.setdefault(source, Counter())[report.name] += rows

    @property
    def total(self) -> int:
        return sum(max(by_query.values()) for by_query in self._rows.values())


def _rows_by_source(sources: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for source in sources:
        topics = sorted({topic for topic, _ in _offsets(source.get("endOffset")) or ()})
        name = ",".join(topics) or str(source.get("description", ""))
        found[name] = max(found.get(name, 0), int(source.get("numInputRows") or 0))
    return found


def lag_of(source: Mapping[str, Any]) -> int | None:
    """How many records a source was behind, from the offsets {topic: {partition: offset}} of its report."""
    latest, end = _offsets(source.get("latestOffset")), _offsets(source.get("endOffset"))
    if latest is None or end is None:
        return None
    return sum(max(0, offset - end.get(place, 0)) for place, offset in latest.items())


def _offsets(value: object) -> dict[tuple[str, str], int] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if not isinstance(value, dict):
        return None
    found: dict[tuple[str, str], int] = {}
    for topic, partitions in value.items():
        if not isinstance(partitions, dict):
            return None
        for partition, offset in partitions.items():
            if not isinstance(offset, int):
                return None
            found[topic, partition] = offset
    return found


def _total(operators: Iterable[Mapping[str, Any]], name: str) -> int:
    return sum(int(operator.get(name) or 0) for operator in operators)


def _number(value: object) -> float:
    # Spark reports Infinity or NaN for a batch that took no measurable time.
    number = float(value) if isinstance(value, int | float) else 0.0
    return number if 0 <= number < float("inf") else 0.0
