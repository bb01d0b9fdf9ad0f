"""Write the dashboards of deploy/monitoring/grafana and the table of alerts in docs/monitoring.md (`make docs`).

With --check nothing is written, and it fails when one of them is out of date. What is on the dashboards is in
`monitoring_panels.py`; here is how that becomes JSON: Grafana's classic model, which it takes from version 10 on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import yaml
from monitoring_panels import DASHBOARDS, Dashboard, Kind, Panel, Row, Variable

ROOT: Final = Path(__file__).parents[1]
GRAFANA: Final = ROOT / "deploy" / "monitoring" / "grafana"
ALERTS: Final = ROOT / "deploy" / "monitoring" / "alerts.yml"
PAGE: Final = ROOT / "docs" / "monitoring.md"
BEGIN, END = "<!-- alerts: begin, generated from deploy/monitoring/alerts.yml -->", "<!-- alerts: end -->"

SCHEMA_VERSION: Final = 42
"""The last one of the classic model."""
DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS: Final = 24
LABEL_VALUES, VARIABLE_QUERY = 1, "PrometheusVariableQueryEditor-VariableQuery"
"""How Grafana itself writes the query of a variable."""
SHORTHAND: Final = {
    "@broker": 'cluster=~"$cluster",job=~"$job",instance=~"$broker"',
    "@cluster": 'cluster=~"$cluster",job=~"$job"',
    "@rate": "$__rate_interval",
}
"""What stands in queries of `monitoring_panels` for what nearly all of them have."""


def spelled_out(query: str) -> str:
    """A query as Grafana gets it."""
    for short, text in SHORTHAND.items():
        query = query.replace(short, text)
    return query


# --- dashboards -------------------------------------------------------------------------------------------------------


def dashboard_json(dashboard: Dashboard) -> dict[str, Any]:
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["millrace", "kafka"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,  # one crosshair for all panels
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "timezone": "browser",
        "templating": {"list": [_datasource_variable(), *map(_variable, dashboard.variables)]},
        "annotations": {"list": [_alert_annotation()]},
        "links": [
            {
                "type": "dashboards",
                "title": "millrace",
                "tooltip": "The other dashboard",
                "icon": "external link",
                "tags": ["millrace"],
                "asDropdown": True,
                "targetBlank": False,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "panels": list(_laid_out(dashboard.rows)),
    }


def _datasource_variable() -> dict[str, Any]:
    return {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus", "refresh": 1}


def _variable(variable: Variable) -> dict[str, Any]:
    chosen = list(variable.chosen) or ["$__all"]
    return {
        "type": "query",
        "name": variable.name,
        "label": variable.label,
        "datasource": DATASOURCE,
        "definition": spelled_out(variable.query),
        "query": {"qryType": LABEL_VALUES, "query": spelled_out(variable.query), "refId": VARIABLE_QUERY},
        "refresh": 2,  # when the time range changes: brokers and groups come and go
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",  # also what has no such label
        "current": {"text": ["All"] if chosen == ["$__all"] else chosen, "value": chosen},
    }


def _alert_annotation() -> dict[str, Any]:
    return {
        "name": "Alerts",
        "enable": True,
        "iconColor": "red",
        "datasource": DATASOURCE,
        "expr": 'ALERTS{alertname=~"Millrace.+",alertstate="firing",severity="critical",cluster=~"$cluster"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{instance}}",
        "step": "60s",
    }


def _laid_out(rows: tuple[Row, ...]) -> Iterator[dict[str, Any]]:
    """Panels from left to right, then the next line; a row that is closed has its panels inside."""
    number = top = 0
    for row in rows:
        number += 1
        heading: dict[str, Any] = {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": row.closed,
            "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1},
            "panels": [],
        }
        top += 1
        left = line_height = 0
        panels = []
        for panel in row.panels:
            number += 1
            if left + panel.width > COLUMNS:
                left, top, line_height = 0, top + line_height, 0
            place = {"x": left, "y": top, "w": panel.width, "h": panel.height}
            panels.append({"id": number, "gridPos": place, **_panel(panel)})
            left += panel.width
            line_height = max(line_height, panel.height)
        top += line_height
        if row.closed:
            heading["panels"] = panels
            yield heading
        else:
            yield heading
            yield from panels


def _panel(panel: Panel) -> dict[str, Any]:
    at_once = panel.kind is not Kind.TIMESERIES  # only what is now
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": spelled_out(query),
            "legendFormat": legend or "__auto",
            "range": not at_once,
            "instant": at_once,
            "format": "table" if panel.kind is Kind.TABLE else "time_series",
        }
        for index, (query, legend) in enumerate(panel.queries)
    ]
    return {
        "type": panel.kind.value,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": _field_defaults(panel), "overrides": []},
        "options": _OPTIONS[panel.kind](),
        "transformations": _transformations(panel),
    }


def _field_defaults(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "thresholds": _thresholds(panel)}
    if panel.kind is Kind.STAT:
        defaults["mappings"] = [
            {"type": "value", "options": {str(value): {"text": text, "index": index}}}
            for index, (value, text) in enumerate(panel.words)
        ]
        defaults["color"] = {"mode": "thresholds"}
    if panel.kind is Kind.TABLE:
        defaults["custom"] = {"align": "auto", "inspect": False}
    if panel.kind is Kind.TIMESERIES:
        defaults["color"] = {"mode": "palette-classic"}
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 25 if panel.stacked else 5,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "off"},
        }
    return defaults


def _thresholds(panel: Panel) -> dict[str, Any]:
    """Green or without a colour, and from each value on another colour."""
    first = {"color": panel.base_color, "value": None}
    return {"mode": "absolute", "steps": [first, *({"color": c, "value": v} for v, c in panel.thresholds)]}


def _transformations(panel: Panel) -> list[dict[str, Any]]:
    if panel.kind is not Kind.TABLE:
        return []
    names = {f"Value #{chr(ord('A') + index)}": legend for index, (_, legend) in enumerate(panel.queries)}
    if len(panel.queries) == 1:
        names = {"Value": panel.queries[0][1]}
    hidden = dict.fromkeys(("Time", "__name__", "job", "cluster"), True)
    return [
        {"id": "merge", "options": {}},
        {"id": "organize", "options": {"excludeByName": hidden, "indexByName": {}, "renameByName": names}},
    ]


def _timeseries_options() -> dict[str, Any]:
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _stat_options() -> dict[str, Any]:
    return {
        "colorMode": "background_solid",
        "graphMode": "none",
        "justifyMode": "center",
        "orientation": "auto",
        "textMode": "auto",
        "wideLayout": True,
        "showPercentChange": False,
        "percentChangeColorMode": "standard",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }


def _table_options() -> dict[str, Any]:
    return {"showHeader": True, "cellHeight": "sm", "frameIndex": 0}


_OPTIONS: Final[dict[Kind, Callable[[], dict[str, Any]]]] = {
    Kind.TIMESERIES: _timeseries_options,
    Kind.STAT: _stat_options,
    Kind.TABLE: _table_options,
}


# --- the table of alerts ----------------------------------------------------------------------------------------------


def alerts_markdown(rules: dict[str, Any]) -> str:
    lines = ["| alert | severity | after | what it means, and what to do |", "|---|---|---|---|"]
    for group in rules["groups"]:
        for rule in group["rules"]:
            notes = rule["annotations"]
            target = notes["docs"].removeprefix("docs/").removeprefix("monitoring.md")
            page = target.partition("#")[0] or "below"
            lines.append(
                f"| `{rule['alert']}` | {rule['labels']['severity']} | {rule.get('for', 'at once')} "
                f"| {notes['description']} [{page}]({target}) |"
            )
    return "\n".join(lines) + "\n"


def page_with(table: str) -> str:
    """The page with the table between its marks."""
    text = PAGE.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE.name} has lost the marks between which the alerts stand: {BEGIN} and {END}")
    return f"{before}{begin}\n\n{table}\n{end}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail when a file would change")
    check = parser.parse_args().check
    files = {GRAFANA / f"{each.uid}.json": json.dumps(dashboard_json(each), indent=2) + "\n" for each in DASHBOARDS}
    files[PAGE] = page_with(alerts_markdown(yaml.safe_load(ALERTS.read_text())))
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    if not check:
        for path in stale:
            path.write_text(files[path])
    if stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        print(f"{'out of date, run make docs' if check else 'written'}: {names}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
