"""A real Prometheus watches three real brokers under load, by the files of deploy/monitoring.

Everything that a dashboard asks has an answer, every rule can be evaluated, and a broker that is killed is seen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.local.ports import free_ports
from millrace.metrics.catalog import CATALOG
from monitoring.load import DEAD_JOBS, GROUPS, JOBS, MODERN, ORDERS, SLEEPY, WORKERS, Load
from support.cluster_processes import BrokerProcess, ClusterProcesses, Layout, wait_for
from support.dashboards import (
    DASHBOARDS,
    Query,
    as_grafana_asks,
    queries_of,
    read_alerts,
    read_dashboard,
    variables_of,
)
from support.prometheus import PROGRAM, Prometheus, running_prometheus
from support.servers import HOST, ServerFailed

pytestmark = [
    pytest.mark.monitoring,
    pytest.mark.skipif(PROGRAM is None, reason="prometheus is not here; Debian and Ubuntu have a package of this name"),
]

BROKERS = 3
SETTINGS = (
    ("offsets.topic.num.partitions", "3"),
    ("transaction.state.log.num.partitions", "3"),
    ("share.coordinator.state.topic.num.partitions", "3"),
    ("group.initial.rebalance.delay.ms", "0"),
    ("group.share.min.record.lock.duration.ms", "1000"),
    ("group.share.record.lock.duration.ms", "2000"),
)
ANSWERS_S = 45.0
RATE_INTERVAL = "10s"
"""What Grafana would take for the slower of the two jobs."""
NOT_OF_THE_CLUSTER = {
    # The load has these made: they are what it is for.
    "MillraceDeadLetters", "MillraceServerErrors", "MillraceAuthenticationFailures",
    # These tell of the machine on which the test runs.
    "MillraceDiskNearlyFull", "MillraceDiskFillsUp", "MillraceLoopLag", "MillraceSlowFlushes", "MillraceProduceSlow",
    "MillraceFetchSlow",
}  # fmt: skip


class WatchedCluster(ClusterProcesses):
    """With an address for metrics, and an audit log, which has metrics of its own."""

    def __init__(self) -> None:
        super().__init__(Layout(brokers=BROKERS, secured=True, session_timeout_ms=3000, settings=SETTINGS))
        self.metrics_ports = dict(zip(self.brokers, free_ports(HOST, BROKERS), strict=True))

    def settings(self, broker: BrokerProcess) -> dict[str, str]:
        return {
            **super().settings(broker),
            "metrics.listener": f"{HOST}:{self.metrics_ports[broker.broker_id]}",
            "audit.log.path": str(broker.directory / "audit.log"),
        }

    @property
    def targets(self) -> list[str]:
        return [f"{HOST}:{port}" for port in self.metrics_ports.values()]


@pytest.fixture(scope="module")
def cluster() -> Iterator[WatchedCluster]:
    with WatchedCluster() as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(cluster: WatchedCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Of a cluster under load."""
    with running_prometheus(tmp_path_factory.mktemp("prometheus"), cluster.targets) as running, Load(cluster):
        yield running


@pytest.fixture(autouse=True)
def told(cluster: WatchedCluster, request: pytest.FixtureRequest) -> Iterator[None]:
    """What the brokers said belongs to a failure."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(cluster.logs())


def test_every_metric_is_scraped_and_is_what_the_catalogue_says(prometheus: Prometheus) -> None:
    def missing() -> set[str]:
        return CATALOG.keys() - kinds_of_metrics(prometheus).keys()

    eventually(lambda: not missing(), lambda: f"nothing tells {sorted(missing())}")
    assert kinds_of_metrics(prometheus) == {family.name: family.kind.value for family in CATALOG.values()}

    def silent() -> list[str]:
        targets = prometheus.get("targets", ("state", "active"))["activeTargets"]
        return [f"{each['scrapeUrl']}: {each['lastError']}" for each in targets if each["health"] != "up"]

    eventually(lambda: not silent(), lambda: f"targets that cannot be scraped: {silent()}")


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
@pytest.mark.parametrize("choice", ["all", "by name"])
def test_every_query_of_a_dashboard_has_an_answer(prometheus: Prometheus, path: Path, choice: str) -> None:
    dashboard = read_dashboard(path)
    left = list(queries_of(dashboard))
    assert left

    def unanswered() -> list[Query]:
        chosen = choices(prometheus, dashboard, choice)
        left[:] = [query for query in left if not is_answered(prometheus, query, chosen)]
        return left

    eventually(lambda: not unanswered(), lambda: "no answer to " + ", ".join(each.place for each in left))


def test_the_numbers_are_those_of_the_load(prometheus: Prometheus) -> None:
    eventually_holds(prometheus, 'max(millrace_brokers{state="live"}) == 3')
    eventually_holds(prometheus, "sum(millrace_active_controller) == 1")
    eventually_holds(prometheus, "sum(millrace_under_replicated_partitions) == 0")
    eventually_holds(prometheus, "sum(rate(millrace_records_in_total[10s])) > 10")
    eventually_holds(prometheus, "sum(rate(millrace_records_out_total[10s])) > 10")
    eventually_holds(prometheus, f'sum(millrace_topic_leaders{{topic="{ORDERS}"}}) == 3')
    eventually_holds(prometheus, f'sum(millrace_partition_leader{{topic="{JOBS}"}}) == 2')
    eventually_holds(prometheus, f'max(millrace_group_lag_records{{group="{SLEEPY}"}}) > 50')
    eventually_holds(prometheus, f'max(millrace_group_lag_seconds{{group="{SLEEPY}"}}) > 1')
    eventually_holds(prometheus, f'count(millrace_group_info{{group="{MODERN}",type="consumer",state="Stable"}}) == 1')
    eventually_holds(prometheus, f'count(millrace_group_info{{group="{WORKERS}",type="share"}}) == 1')
    eventually_holds(prometheus, "sum(millrace_queue_dead_letters_total) > 0")
    eventually_holds(prometheus, f'max(millrace_partition_log_end_offset{{topic="{DEAD_JOBS}"}}) > 0')
    eventually_holds(prometheus, "sum(millrace_queue_records_redelivered_total) > 0")
    for outcome in ("committed", "aborted"):
        eventually_holds(prometheus, f'sum(millrace_transactions_completed_total{{outcome="{outcome}"}}) > 0')
    for outcome in ("success", "failure"):
        eventually_holds(
            prometheus, f'sum(millrace_authentications_total{{listener="CLIENT",outcome="{outcome}"}}) > 0'
        )
    eventually_holds(prometheus, 'sum(millrace_request_errors_total{error="UNKNOWN_TOPIC_OR_PARTITION"}) > 0')
    assert set(prometheus.label_values("group", "millrace_group_info")) >= GROUPS


def test_rules_are_evaluated_and_a_cluster_that_is_well_makes_no_alert(prometheus: Prometheus) -> None:
    names = {rule["alert"] for rule in read_alerts()}

    def states() -> dict[str, str]:
        groups = prometheus.get("rules")["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}

    eventually(lambda: states() == dict.fromkeys(names, "ok"), lambda: f"rules that fail: {states()}")

    def of_the_cluster() -> set[str]:
        return {name for name, _ in prometheus.alerts()} - NOT_OF_THE_CLUSTER

    eventually(lambda: not of_the_cluster(), lambda: f"alerts: {sorted(of_the_cluster())}")


def test_a_broker_that_is_killed_is_seen_and_one_that_is_back(prometheus: Prometheus, cluster: WatchedCluster) -> None:
    victim = max(cluster.brokers)
    cluster.kill(victim)
    stats = {query.panel: query for query in queries_of(read_dashboard(DASHBOARDS[-1])) if query.instant}
    chosen = choices(prometheus, read_dashboard(DASHBOARDS[-1]), "all")

    def shows(panel: str, comparison: str) -> None:
        asked = as_grafana_asks(stats[panel].expression, chosen, RATE_INTERVAL)
        eventually_holds(prometheus, f"({asked}) {comparison}")

    shows("Live brokers", "== 2")
    shows("Not answering", "== 2")  # by two jobs
    shows("Under-replicated", "> 0")
    shows("Fenced brokers", "== 1")
    expected_alerts = {
        "MillraceBrokerDown": "critical",
        "MillraceBrokerFenced": "warning",
        "MillraceUnderReplicated": "warning",
    }

    def firing() -> dict[str, Any]:
        return {name: alert for (name, state), alert in prometheus.alerts().items() if state == "firing"}

    eventually(lambda: firing().keys() >= expected_alerts.keys(), lambda: f"there is only {sorted(firing())}")
    for name, severity in expected_alerts.items():
        alert = firing()[name]
        assert alert["labels"]["severity"] == severity
        assert alert["labels"]["cluster"] == "main"
        assert re.search(rf"{HOST}:\d+|^1 brokers", alert["annotations"]["summary"]), alert["annotations"]
    assert "MillraceOfflinePartitions" not in firing()

    cluster.start_brokers([victim])
    shows("Live brokers", "== 3")
    shows("Not answering", "== 0")
    shows("Under-replicated", "== 0")
    eventually(lambda: not firing().keys() & expected_alerts.keys(), lambda: f"there still is {sorted(firing())}")


# --- how Prometheus is asked ------------------------------------------------------------------------------------------


def eventually(holds: Any, failure: Any) -> None:
    try:
        wait_for(lambda: True if holds() else None, ANSWERS_S, "", pause_s=0.25)
    except ServerFailed:
        pytest.fail(failure())


def eventually_holds(prometheus: Prometheus, comparison: str) -> None:
    """A comparison in PromQL returns something when it is true."""
    eventually(lambda: prometheus.ask(comparison), lambda: f"{comparison} is not so")


def kinds_of_metrics(prometheus: Prometheus) -> dict[str, str]:
    """What targets say that their metrics are."""
    return {
        each["metric"]: each["type"]
        for each in prometheus.get("targets/metadata")
        if each["metric"].startswith("millrace_")
    }


def choices(prometheus: Prometheus, dashboard: dict[str, Any], choice: str) -> dict[str, list[str]]:
    """The values of a dashboard's variables: everything, or each value by its name."""
    chosen: dict[str, list[str]] = {}
    for name, variable in variables_of(dashboard).items():
        found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
        assert found is not None
        values = prometheus.label_values(found[2], as_grafana_asks(found[1], chosen, RATE_INTERVAL))
        if choice == "all" or not values:  # nothing is there yet
            values = [variable["allValue"]]
        chosen[name] = values if variable["current"]["value"] == ["$__all"] else variable["current"]["value"]
    return chosen


def is_answered(prometheus: Prometheus, query: Query, chosen: dict[str, list[str]]) -> bool:
    """Whether there is a line with a number in it; what is divided by nothing is none."""
    asked = as_grafana_asks(query.expression, chosen, RATE_INTERVAL)
    if query.instant:
        return any(math.isfinite(value) for _, value in prometheus.ask(asked))
    found = prometheus.ask_range(asked, seconds=30, step_s=2)
    labels = set(re.findall(r"{{(\w+)}}", query.legend))
    return any(math.isfinite(value) for _, values in found for value in values) and any(
        labels <= line.keys() for line, _ in found
    )
