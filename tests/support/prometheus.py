"""A real Prometheus in a process of its own, on a free port, with its data in a temporary folder.

It runs on the files of deploy/monitoring, changed only where a test cannot wait: other targets, seconds instead of
minutes between two scrapes, and alerts that fire after seconds (`hurried`).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import yaml

from millrace.local.children import spawn
from millrace.local.ports import free_ports
from support.cluster_processes import wait_for
from support.dashboards import ALERTS, CONFIG
from support.servers import HOST, ServerFailed

PROGRAM: Final = shutil.which("prometheus")
SCRAPE_S: Final = {"millrace": 1, "millrace-details": 2}
"""How often each job asks."""
FOR_S: Final = 2
"""For how long something has to be so before there is an alert, where that is not at once."""
_ANSWER_S: Final = 10.0
_START_S: Final = 30.0


class PrometheusRefused(Exception):
    """It says that a question was wrong."""


class Prometheus:
    """One that runs."""

    def __init__(self, port: int) -> None:
        self.url = f"http://{HOST}:{port}"

    def __repr__(self) -> str:
        return f"<Prometheus at {self.url}>"

    def get(self, path: str, *parameters: tuple[str, str]) -> Any:
        """What the API answers."""
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(address, timeout=_ANSWER_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise PrometheusRefused(f"{path} {dict(parameters)}: {error.read().decode()}") from error

    def ask(self, query: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each line of a query, now."""
        data = self.get("query", ("query", query))
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(each["metric"], float(each["value"][1])) for each in data["result"]]

    def ask_range(self, query: str, *, seconds: int, step_s: int) -> list[tuple[dict[str, str], list[float]]]:
        """Labels and values of each line of a query, over the last seconds."""
        ((_, now),) = self.ask("time()")
        data = self.get(
            "query_range",
            ("query", query),
            ("start", str(now - seconds)),
            ("end", str(now)),
            ("step", str(step_s)),
        )
        return [(each["metric"], [float(value) for _, value in each["values"]]) for each in data["result"]]

    def label_values(self, label: str, selector: str) -> list[str]:
        found: list[str] = self.get(f"label/{label}/values", ("match[]", selector))
        return found

    def alerts(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Those that are pending or firing, by name and state."""
        return {(each["labels"]["alertname"], each["state"]): each for each in self.get("alerts")["alerts"]}

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def hurried(folder: Path, targets: Sequence[str]) -> Path:
    """The files of deploy/monitoring for these targets, with less patience; where the configuration is."""
    rules = yaml.safe_load(ALERTS.read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "for" in rule:
                rule["for"] = f"{FOR_S}s"
    (folder / ALERTS.name).write_text(yaml.safe_dump(rules))
    config = yaml.safe_load(CONFIG.read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    for job in config["scrape_configs"]:
        every = f"{SCRAPE_S[job['job_name']]}s"
        job |= {"scrape_interval": every, "scrape_timeout": every}
        (example,) = job["static_configs"]
        example["targets"] = list(targets)
    path = folder / CONFIG.name
    path.write_text(yaml.safe_dump(config))
    return path


@contextmanager
def running_prometheus(folder: Path, targets: Sequence[str]) -> Iterator[Prometheus]:
    assert PROGRAM is not None
    config = hurried(folder, targets)
    (port,) = free_ports(HOST, 1)
    command = [
        PROGRAM,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={HOST}:{port}",
        "--log.level=warn",
    ]
    with (folder / "log").open("wb") as log:
        process = spawn(command, log=log)
    try:
        found = Prometheus(port)

        def is_ready() -> bool | None:
            if process.poll() is not None:
                raise ServerFailed(f"Prometheus ended at start:\n{(folder / 'log').read_text()}")
            return found.is_ready() or None

        wait_for(is_ready, _START_S, "Prometheus is not ready", pause_s=0.1)
        yield found
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
