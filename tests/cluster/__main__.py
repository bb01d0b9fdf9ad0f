"""`make faults`: every fault in full size, as a table; exits with 1 when anything is red.

PYTHONPATH=tests python -m cluster [--only TEXT] [--rounds N] [--short] [--seed N] [--keep DIR] [--secured]
PYTHONPATH=tests python -m cluster failover [--secured]  how long producers wait: kill -9 of a leader, a rolling restart
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from cluster import failover
from cluster.disk_faults import DISK_ROWS
from cluster.faults import ROWS, Row
from cluster.group_faults import GROUP_ROWS
from cluster.link_faults import LINK_ROWS
from cluster.machine_faults import MACHINE_ROWS
from cluster.queue_faults import QUEUE_ROWS
from cluster.rounds import Clusters, Result, Scale
from cluster.security_faults import SECURITY_ROWS
from cluster.setting_faults import SETTING_ROWS
from cluster.spark_rounds import SPARK_ROWS
from cluster.topic_faults import TOPIC_ROWS
from cluster.transaction_faults import TRANSACTION_ROWS
from support.cluster_processes import ClusterProcesses

_KEPT_LOG_LINES = 200
TABLE: Final = (
    *ROWS,
    *LINK_ROWS,
    *DISK_ROWS,
    *MACHINE_ROWS,
    *SETTING_ROWS,
    *SECURITY_ROWS,
    *TOPIC_ROWS,
    *GROUP_ROWS,
    *QUEUE_ROWS,
    *TRANSACTION_ROWS,
    *SPARK_ROWS,
)


@dataclass(frozen=True, slots=True)
class Session:
    """What one run of this program was told."""

    console: Console
    only: str
    seed: int
    keep: Path | None
    secured: bool = False
    """Every row, but those that look into requests on their way."""


def run_row(row: Row, scale: Scale, rounds: int, session: Session) -> list[Result]:
    """The rounds of a row, its variants in turn, each on a cluster of its own layout."""
    variants = [variant for variant in row.variants if session.only in variant.name]
    if not variants and session.only in row.title:
        variants = list(row.variants)
    if session.secured:
        variants = [replace(variant, secured=True) for variant in variants if not variant.client_links]
    results: list[Result] = []
    # By variant, so that a cluster serves several rounds before the next layout needs another.
    order = sorted(range(rounds), key=lambda number: number % max(1, len(variants))) if variants else []
    with Clusters() as clusters:
        for number in order:
            variant = variants[number % len(variants)]
            cluster = clusters.get(variant.layout(scale))
            result = row.play(cluster, variant.fault, scale, session.seed + number)
            results.append(result)
            _tell(session.console, variant.name, result)
            if not result.green:
                _show_evidence(session, cluster)
                clusters.discard()
    return results


def _tell(console: Console, name: str, result: Result) -> None:
    verdict = "[green]ok[/]" if result.green else "[red]RED[/]"
    report = result.report
    console.print(
        f"{time.strftime('%H:%M:%S')} {verdict} {name}: {report.acked:,} acked in {result.seconds:.0f} s, "
        f"longest pause {report.longest_pause_s:.1f} s, in sync {result.whole_s:.1f} s after healing"
    )
    if result.green:
        console.print("\n".join(result.notes), markup=False, highlight=False, end="\n" if result.notes else "")
    else:
        console.print(result.describe(), markup=False, highlight=False)


def _show_evidence(session: Session, cluster: ClusterProcesses) -> None:
    session.console.print(cluster.logs(_KEPT_LOG_LINES), markup=False, highlight=False)
    if session.keep is not None:
        kept = session.keep / cluster.home.name
        shutil.copytree(cluster.home, kept)
        session.console.print(f"data, logs and histories are in {kept}", markup=False, highlight=False)


def report(rows: list[tuple[Row, list[Result]]]) -> Table:
    """The table of the proof."""
    headings = ("fault", "rounds", "acked per round", "lost", "duplicates", "other", "longest pause", "to full ISR", "")
    table = Table(*headings)
    for row, results in rows:
        if not results:
            continue
        table.add_row(
            row.title,
            str(len(results)),
            f"{min(result.report.acked for result in results):,}",
            str(sum(result.lost for result in results)),
            str(sum(result.duplicates for result in results)),
            str(sum(result.others for result in results)),
            f"{max(result.report.longest_pause_s for result in results):.1f} s",
            f"{max(result.whole_s for result in results):.1f} s",
            "[green]green[/]" if all(result.green for result in results) else "[red]red[/]",
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="make faults", description="Fault tests in full size, as a table.")
    parser.add_argument("what", nargs="?", choices=("table", "failover"), default="table")
    parser.add_argument("--only", default="", help="rows or variants whose name contains this")
    parser.add_argument("--rounds", type=int, help="rounds per row instead of the table's")
    parser.add_argument("--short", action="store_true", help="the small size that CI runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="where data, logs and histories of red rounds are put")
    parser.add_argument("--secured", action="store_true", help="with TLS, logins and rules everywhere")
    options = parser.parse_args()
    console = Console(width=160)
    if options.what == "failover":
        return failover.measure(console, secured=options.secured)
    session = Session(console, options.only, options.seed, options.keep, options.secured)
    rows = []
    for row in TABLE:
        scale = row.short if options.short else replace(row.full, acked=row.acked)
        results = run_row(row, scale, options.rounds or row.rounds, session)
        rows.append((row, results))
    console.print(report(rows))
    every = [result for _, results in rows for result in results]
    return 0 if every and all(result.green for result in every) else 1


if __name__ == "__main__":
    sys.exit(main())
