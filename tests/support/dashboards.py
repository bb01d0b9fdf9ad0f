"""The files of deploy/monitoring as tests read them: the queries of the dashboards, and the alerts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from support.maven import ROOT

MONITORING: Final = ROOT / "deploy" / "monitoring"
DASHBOARDS: Final = tuple(sorted((MONITORING / "grafana").glob("*.json")))
ALERTS: Final = MONITORING / "alerts.yml"
CONFIG: Final = MONITORING / "prometheus.yml"

_VARIABLE: Final = re.compile(r"\$(\w+)")


class Query(NamedTuple):
    """One query of a panel."""

    dashboard: str
    panel: str
    expression: str
    legend: str
    instant: bool

    @property
    def place(self) -> str:
        return f"{self.dashboard}, {self.panel}"


def read_dashboard(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def panels_of(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """All panels, also those in rows that are closed; not the rows."""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


def queries_of(dashboard: Mapping[str, Any]) -> Iterator[Query]:
    for panel in panels_of(dashboard):
        for target in panel["targets"]:
            yield Query(
                dashboard["title"], panel["title"], target["expr"], target["legendFormat"], target.get("instant", False)
            )


def variables_of(dashboard: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By name, without the data source."""
    return {each["name"]: each for each in dashboard["templating"]["list"] if each["type"] == "query"}


def as_grafana_asks(expression: str, chosen: Mapping[str, Sequence[str]], rate_interval: str) -> str:
    """A query with the variables in it replaced: several values become alternatives of a regular expression."""

    def value(found: re.Match[str]) -> str:
        name = found[1]
        if name == "__rate_interval":
            return rate_interval
        values = [re.escape(each) if each != ".*" else each for each in chosen[name]]
        text = values[0] if len(values) == 1 else f"({'|'.join(values)})"
        return text.replace("\\", "\\\\")

    return _VARIABLE.sub(value, expression)


def read_alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]
