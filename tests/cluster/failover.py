"""How long producers wait: the longest gap between acknowledgements when a leader is killed, and in a rolling restart.

One librdkafka producer (acks=all, idempotent, 200 records per second, otherwise at its defaults) writes to one
partition of brokers at their default settings. The gap is between two acknowledgements, from the producer's history.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from cluster.rounds import Clients, Scale, create_topic
from support.cluster_processes import ClusterProcesses, Layout
from support.history import Action, Event, Outcome, read_histories

RUNS: Final = 5
KILL_BAR_S: Final = 1.5
RESTART_BAR_S: Final = 0.5
SCALE: Final = Scale(acked=0, bounces=1, rate=200, session_timeout_ms=6000, outage_s=0, producers=1)
_STEADY_RECORDS: Final = 400
"""Acknowledgements before and after each event: two seconds' worth."""


@contextmanager
def writing(cluster: ClusterProcesses, topic: str) -> Iterator[Clients]:
    with (
        tempfile.TemporaryDirectory(prefix="millrace-history-") as directory,
        Clients(
            cluster.client_settings, topic, SCALE, Path(directory), partitions=1, consumers=0, client_defaults=True
        ) as clients,
    ):
        clients.wait_acked(_STEADY_RECORDS)
        yield clients


def longest_gap_s(events: list[Event], since_ns: int, until_ns: int) -> float:
    """Between two acknowledgements of one partition, the second of them after `since_ns`."""
    acked = [event.time_ns for event in events if event.action is Action.SEND and event.type is Outcome.OK]
    gaps = [later - earlier for earlier, later in pairwise(acked) if later >= since_ns and earlier <= until_ns]
    return max(gaps, default=0) / 1e9


def kill_gap_s(cluster: ClusterProcesses, number: int) -> float:
    """The longest gap around kill -9 of the leader."""
    topic = f"killed-{number}"
    create_topic(cluster, topic, partitions=1)
    with writing(cluster, topic) as clients:
        since = time.monotonic_ns()
        leader = cluster.leader(topic, 0)
        cluster.kill(leader)
        clients.wait_more_acked(_STEADY_RECORDS)
        until = time.monotonic_ns()
        clients.stop()
        gap = longest_gap_s(read_histories(clients.histories()), since, until)
    cluster.restore()
    cluster.wait_whole(topic, 30)
    return gap


def restart_gaps_s(cluster: ClusterProcesses) -> list[float]:
    """The longest gap while each broker in turn is stopped, started and in sync again."""
    topic = "rolling"
    create_topic(cluster, topic, partitions=1)
    spans = []
    with writing(cluster, topic) as clients:
        for broker_id, broker in cluster.brokers.items():
            since = time.monotonic_ns()
            broker.terminate()
            cluster.start_brokers([broker_id])
            cluster.wait_whole(topic, 30)
            clients.wait_more_acked(_STEADY_RECORDS // 4)
            spans.append((since, time.monotonic_ns()))
        clients.stop()
        events = read_histories(clients.histories())
    return [longest_gap_s(events, since, until) for since, until in spans]


def measure(console: Console, *, secured: bool = False) -> int:
    """Print both measurements against their bars; 0 when they are met."""
    with ClusterProcesses(Layout(secured=secured)) as cluster:
        kills = [kill_gap_s(cluster, number) for number in range(RUNS)]
        restarts = restart_gaps_s(cluster)
    table = Table("what", "each", "judged", "bar", "")
    verdicts = []
    for what, gaps, judged, bar in (
        ("kill -9 of the leader: longest gap, median", kills, statistics.median(kills), KILL_BAR_S),
        ("rolling restart: longest gap of any", restarts, max(restarts), RESTART_BAR_S),
    ):
        each = ", ".join(f"{gap:.2f}" for gap in gaps)
        met = judged < bar
        verdicts.append(met)
        table.add_row(what, each, f"{judged:.2f} s", f"< {bar:g} s", "[green]met[/]" if met else "[red]missed[/]")
    console.print(table)
    return 0 if all(verdicts) else 1
