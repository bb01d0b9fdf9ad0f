"""`millrace cluster health`: whether a cluster is well, as an exit code, and what is wrong, a line each.

How that is judged is `admin.health`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Annotated, Final

import typer

from millrace.admin.errors import AdminError
from millrace.admin.health import Problem, Report, read_health
from millrace.cli.entry import open_cluster
from millrace.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Client, Json, name_values
from millrace.cli.output import CommandError, count_text, print_json
from millrace.errors import ApiError

LOOK_EVERY_S: Final = 2.0
_pause: Final = threading.Event()  # never set: a wait on it is a pause


def cluster_health(
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Look again and again, and tell when something changes; until Ctrl-C.")
    ] = False,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Say whether the cluster is well: exits with 0, or with 1 and a line for each problem."""
    settings = name_values(client, "--client")
    if not watch:
        report = _look(bootstrap, settings)
        _show(report, as_json=as_json)
        raise typer.Exit(1 if report.problems else 0)
    last: Report | None = None
    try:
        for last in _changes(bootstrap, settings):
            _show(last, as_json=as_json, at=datetime.now().astimezone())
    except KeyboardInterrupt:
        pass
    raise typer.Exit(1 if last is None or last.problems else 0)


def _changes(bootstrap: str, settings: Mapping[str, str]) -> Iterator[Report]:
    """The report now, and again whenever it is another one."""
    last: Report | None = None
    while True:
        try:
            report = _look(bootstrap, settings)
        except (CommandError, AdminError, ApiError) as error:  # it may come back
            report = Report("", 0, 0, 0, 0, (Problem("unreachable", str(error)),))
        if report != last:
            last = report
            yield report
        _pause.wait(LOOK_EVERY_S)


def _show(report: Report, *, as_json: bool, at: datetime | None = None) -> None:
    if as_json:
        print_json(report.as_json() if at is None else {"time_ms": int(at.timestamp() * 1000), **report.as_json()})
    else:
        for line in _lines(report):
            print(line if at is None else f"{at:%H:%M:%S} {line}", flush=True)


def _look(bootstrap: str, settings: Mapping[str, str]) -> Report:
    with open_cluster(bootstrap, settings) as cluster:
        return read_health(cluster)


def _lines(report: Report) -> list[str]:
    if report.problems:
        return [problem.text for problem in report.problems]
    counted = ", ".join(
        [
            count_text(report.brokers, "broker"),
            count_text(report.topics, "topic"),
            count_text(report.partitions, "partition"),
        ]
    )
    return [f"healthy: {counted}"]
