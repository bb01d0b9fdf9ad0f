"""The files of deploy/monitoring: every query names metrics and labels that there are, every alert says what to do.

What a real Prometheus answers to the queries is in tests/monitoring.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from millrace.cli.root import run
from millrace.metrics.catalog import CATALOG, Family, Kind
from support.dashboards import (
    ALERTS,
    CONFIG,
    DASHBOARDS,
    MONITORING,
    as_grafana_asks,
    panels_of,
    queries_of,
    read_alerts,
    read_dashboard,
    variables_of,
)
from support.maven import ROOT
from support.promql import NotPromQL, Selector, named_in

TARGET = frozenset({"cluster", "job", "instance"})
"""Labels that Prometheus adds to everything."""
OF_PROMETHEUS = {
    "up": TARGET,
    "ALERTS": TARGET | {"alertname", "alertstate", "severity"},
}
OF_HISTOGRAMS = ("_bucket", "_sum", "_count")
FUNCTIONS = {
    "absent", "changes", "count", "deriv", "histogram_quantile", "increase", "max", "min", "predict_linear", "rate",
    "sum", "time", "topk", "vector",
}  # fmt: skip
FOR_COUNTERS = {"rate", "increase"}
UNITS = {"short", "s", "bytes", "Bps", "percentunit", "cps", "ops", "reqps"}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not here; in Debian it is in the package prometheus"
)


def family_of(name: str) -> Family | None:
    """The metric behind a name in a query; of a histogram only what Prometheus keeps of it."""
    for suffix in OF_HISTOGRAMS:
        family = CATALOG.get(name.removesuffix(suffix)) if name.endswith(suffix) else None
        if family is not None and family.kind is Kind.HISTOGRAM:
            return family
    family = CATALOG.get(name)
    return None if family is None or family.kind is Kind.HISTOGRAM else family


def labels_of(selector: Selector) -> frozenset[str]:
    """The labels that the lines of a metric have."""
    if selector.name in OF_PROMETHEUS:
        return OF_PROMETHEUS[selector.name]
    family = family_of(selector.name)
    assert family is not None, f"there is no metric {selector.name}"
    return TARGET | {*family.labels, *(("le",) if selector.name.endswith("_bucket") else ())}


def complaints(expression: str) -> list[str]:
    """What a query names that is not there."""
    named = named_in(expression)
    found = [f"there is no function {name}" for name in sorted(named.functions - FUNCTIONS)]
    known: set[str] = set()
    for selector in named.selectors:
        family = family_of(selector.name)
        if family is None and selector.name not in OF_PROMETHEUS:
            found.append(f"there is no metric {selector.name}")
            continue
        labels = labels_of(selector)
        known |= labels
        found += [f"{selector.name} has no label {label}" for label in sorted(selector.labels - labels)]
        if family is not None:
            grows = family.kind in {Kind.COUNTER, Kind.HISTOGRAM}
            if grows != (selector.function in FOR_COUNTERS):
                found.append(
                    f"{selector.name} is a {family.kind.value}, and {selector.function or 'nothing'} is taken of it"
                )
    found += [f"nothing in it has the label {label}" for label in sorted(named.grouping - known)]
    return found


def told_labels(expression: str) -> set[str]:
    """Labels that what a query returns may have."""
    named = named_in(expression)
    if named.grouping and not named.joins:
        return named.grouping
    return {label for each in named.selectors for label in labels_of(each)}


DASHBOARD_QUERIES = [query for path in DASHBOARDS for query in queries_of(read_dashboard(path))]
RULES = read_alerts()


# --- the check itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("sum(rate(millrace_bytes_inn_total[5m]))", "there is no metric millrace_bytes_inn_total"),
        ("milrace_leaders", "there is no metric milrace_leaders"),
        ("millrace_leaders{topik='a'}", "millrace_leaders has no label topik"),
        ("sum by (topic) (millrace_leaders)", "nothing in it has the label topic"),
        ("millrace_leaders * on (broker) group_left (rak) millrace_broker_info", "nothing in it has the label broker"),
        ("rate(millrace_leaders[5m])", "millrace_leaders is a gauge, and rate is taken of it"),
        ("sum(millrace_bytes_in_total)", "millrace_bytes_in_total is a counter, and sum is taken of it"),
        ("rate(millrace_loop_lag_seconds[5m])", "there is no metric millrace_loop_lag_seconds"),
        ("rate(millrace_bytes_in_total_count[5m])", "there is no metric millrace_bytes_in_total_count"),
        ("rate(millrace_requests_total{le='1'}[5m])", "millrace_requests_total has no label le"),
        ("summ(millrace_leaders)", "there is no function summ"),
    ],
)
def test_a_wrong_name_is_seen(expression: str, complaint: str) -> None:
    assert complaint in complaints(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "histogram_quantile(0.99, sum by (api, le) (rate(millrace_request_stage_seconds_bucket{stage!='remote'}[5m])))",
        "max by (cluster) (millrace_metadata_version) - on (cluster) group_right () millrace_metadata_version > 1e3",
        'sum(up{job="a b, c{}"} == bool 0) or vector(0)',
        "increase(millrace_isr_shrinks_total[10m] offset 10m) > 0 and millrace_leaders unless on (job) up",
    ],
)
def test_a_right_one_is_let_through(expression: str) -> None:
    assert complaints(expression) == []


@pytest.mark.parametrize("expression", ["a ? b", "sum by (a", "up{job='a'"])
def test_what_is_no_query_is_seen(expression: str) -> None:
    with pytest.raises(NotPromQL):
        named_in(expression)


# --- dashboards -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("query", DASHBOARD_QUERIES, ids=lambda query: query.place)
def test_every_query_of_a_dashboard_names_what_is_there(query: Any) -> None:
    assert complaints(query.expression) == []
    shown = set(re.findall(r"{{(\w+)}}", query.legend))
    assert shown <= told_labels(query.expression), f"the legend {query.legend} has labels that no line has"


def test_every_metric_is_on_a_dashboard() -> None:
    shown = {
        family.name
        for query in DASHBOARD_QUERIES
        for selector in named_in(query.expression).selectors
        if (family := family_of(selector.name)) is not None
    }
    assert CATALOG.keys() - shown == set()


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_are_complete_and_do_not_overlap(path: Path) -> None:
    dashboard = read_dashboard(path)
    assert dashboard["uid"] == path.stem
    panels = list(panels_of(dashboard))
    numbers = [each["id"] for each in (*panels, *(row for row in dashboard["panels"] if row["type"] == "row"))]
    assert len(set(numbers)) == len(numbers)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["title"] and panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["targets"] and panel["datasource"]["uid"] == "${datasource}"
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells = {(place["x"] + across, place["y"] + down) for across in range(place["w"]) for down in range(place["h"])}
        assert not cells & taken, f"{panel['title']} lies over another panel"
        taken |= cells


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_variable_is_there_and_used(path: Path) -> None:
    dashboard = read_dashboard(path)
    texts = [query.expression for query in queries_of(dashboard)]
    texts += [each["query"]["query"] for each in variables_of(dashboard).values()]
    used = {name for text in texts for name in re.findall(r"\$(\w+)", text)} - {"__rate_interval"}
    assert used == variables_of(dashboard).keys()
    for variable in variables_of(dashboard).values():
        selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
        for each in named_in(selector).selectors:
            assert each.name == "" or label in labels_of(each), variable["name"]


def test_the_generated_files_are_up_to_date() -> None:
    script = ROOT / "scripts" / "generate_monitoring.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# --- alerts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_names_what_is_there_and_says_what_to_do(rule: dict[str, Any]) -> None:
    assert complaints(rule["expr"]) == []
    assert rule["alert"].startswith("Millrace")
    assert rule["labels"]["severity"] in {"critical", "warning"}
    notes = rule["annotations"]
    assert notes.keys() == {"summary", "description", "docs"}
    assert set(re.findall(r"\$labels\.(\w+)", notes["summary"])) <= told_labels(rule["expr"])
    assert "{{" not in notes["description"], "it is shown in docs/monitoring.md as it is"
    page, _, anchor = notes["docs"].partition("#")
    assert anchor in {"", *anchors_of(ROOT / page)}


def anchors_of(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_names_of_alerts_are_unique() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)
    assert f"{len(names)} rules found" in (ROOT / "docs" / "monitoring.md").read_text()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_commands_in_alerts_exist(rule: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """A reader in trouble types them."""
    for command in re.findall(r"`(millrace [^`]*)`", rule["annotations"]["description"]):
        words = command.split()[1:]
        verb = [word for word in words[:2] if re.fullmatch("[a-z-]+", word)]
        assert run([*verb, "--help"]) == 0, command
        shown = capsys.readouterr().out
        for option in (word for word in words if word.startswith("--")):
            assert option in shown, f"{command}: there is no {option}"


# --- the example of a configuration -----------------------------------------------------------------------------------


def test_the_second_job_keeps_the_details_and_nothing_else() -> None:
    """What both jobs keep would be counted twice."""
    first, second = yaml.safe_load(CONFIG.read_text())["scrape_configs"]
    assert (first["job_name"], second["job_name"]) == ("millrace", "millrace-details")
    assert first["static_configs"] == second["static_configs"]
    (rule,) = second["metric_relabel_configs"]
    assert rule["action"] == "keep"
    kept = {name for name in CATALOG if re.fullmatch(rule["regex"], name)}
    assert kept == {family.name for family in CATALOG.values() if family.detail is not None}
    asked = set(second["params"]["detail"])
    assert asked == {family.detail.value for family in CATALOG.values() if family.detail is not None}


# --- by Prometheus's own tool -----------------------------------------------------------------------------------------


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=MONITORING, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_takes_the_configuration_and_the_rules() -> None:
    promtool("check", "config", CONFIG.name)
    promtool("check", "rules", ALERTS.name)


@needs_promtool
def test_alerts_come_when_they_should() -> None:
    promtool("test", "rules", "alerts_test.yml")


@needs_promtool
def test_promtool_takes_every_query_of_the_dashboards(tmp_path: Path) -> None:
    chosen = {name: [".*"] for path in DASHBOARDS for name in variables_of(read_dashboard(path))}
    rules = [
        {"record": f"query:{number}", "expr": as_grafana_asks(query.expression, chosen, "1m")}
        for number, query in enumerate(DASHBOARD_QUERIES)
    ]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": rules}]}))
    promtool("check", "rules", str(path))
