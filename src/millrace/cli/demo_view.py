"""What `millrace demo` shows while it runs: a live screen on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millrace.cli.output import size_text
from millrace.cli.pipeline_view import cells
from millrace.demo import pipelines, traffic
from millrace.spark.pipelines.progress import QueryFigures

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from millrace.demo.scenario import Scenario

_WINDOW_S: Final = 3.0
PLAIN_EVERY_S: Final = 5.0
LIVE_EVERY_S: Final = 0.25
_FIGURES_EVERY_S: Final = 1.0
_LATEST_CHARACTERS: Final = 150

WRITERS: Final = {
    traffic.CLICKS: "web front end",
    traffic.PURCHASES: "web front end",
    traffic.CHAT: "chat server",
    traffic.USERS: "users table",
    traffic.METRICS: "hosts",
    traffic.LOGS: "log files",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """The totals of every topic at one moment."""

    at_s: float
    produced: dict[str, int]
    results: dict[str, int]


class View:
    """Turns the scenario into text; rates are over the last seconds."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._samples: deque[Sample] = deque()
        self._figures: list[QueryFigures] = []
        self._figures_at_s = float("-inf")

    def sample(self, now_s: float) -> None:
        scenario = self._scenario
        produced = {topic: scenario.account.acked(topic) for topic in WRITERS}
        produced[traffic.LOGS] = scenario.lines_written().total()
        self._samples.append(Sample(now_s, produced, dict(scenario.reader.counts)))
        while len(self._samples) > 2 and now_s - self._samples[0].at_s > _WINDOW_S:
            self._samples.popleft()
        if now_s - self._figures_at_s > _FIGURES_EVERY_S:  # each look is a call into the JVM
            self._figures, self._figures_at_s = scenario.pipelines.figures(), now_s

    def line(self) -> str:
        """One line for a log file."""
        last = self._samples[-1]
        produced, rate = sum(last.produced.values()), sum(self._rate(topic) for topic in WRITERS)
        lag = sum(one.lag or 0 for one in self._figures)
        batches = ", ".join(f"{one.name} {one.batch_ms / 1000:.1f} s" for one in self._figures)
        return (
            f"produced {produced:,} ({rate:,.0f}/s)  results {sum(last.results.values()):,}  "
            f"lag {lag:,}  batches: {batches or 'none yet'}"
        )

    def renderable(self, now_s: float, produced_s: float, total_s: float | None) -> RenderableType:
        """The whole screen; `produced_s` of `total_s` have been produced."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar

        until = f" of {total_s:.0f}" if total_s is not None else ""
        brokers = self._scenario.brokers
        memory = size_text(sum(map(_resident_bytes, brokers.pids)))
        who = "broker" if brokers.count == 1 else f"{brokers.count} brokers"
        times = f"at {now_s:.0f} s, producing for {produced_s:.0f}{until} s"
        head = f"{who} at [bold]{brokers.bootstrap}[/], {memory} resident, {times}"
        parts: list[RenderableType] = [head, self._topics(), self._queries(), self._latest(), self._group_text()]
        outage = self._scenario.outage
        if outage is not None:
            parts.append(f"[bold]{outage}[/]")
        if total_s is not None:
            parts.append(ProgressBar(total=total_s, completed=min(produced_s, total_s), width=60))
        return Group(*parts)

    def _rate(self, topic: str) -> float:
        first, last = self._samples[0], self._samples[-1]
        return (last.produced[topic] - first.produced[topic]) / max(last.at_s - first.at_s, 1e-9)

    def _topics(self) -> RenderableType:
        table = _table("topic", "written by", "records", "per second")
        for topic, writer in WRITERS.items():
            table.add_row(topic, writer, f"{self._samples[-1].produced[topic]:,}", f"{self._rate(topic):,.0f}")
        return table

    def _queries(self) -> RenderableType:
        table = _table("query", "batch", "rows", "in/s", "out/s", "lag", "batch time", "late", "state rows", "state")
        for figures in self._figures:
            table.add_row(*cells(figures))
        return table

    def _latest(self) -> RenderableType:
        from rich.text import Text

        table = _table("result topic", "records", "latest")
        reader = self._scenario.reader
        for topic in (pipelines.SUMMARY, pipelines.ERRORS, *sorted(_enriched(reader.counts)), *pipelines.DEAD.values()):
            if reader.counts[topic]:
                text = Text(reader.latest[topic][:_LATEST_CHARACTERS], overflow="ellipsis", no_wrap=True)
                table.add_row(topic, f"{reader.counts[topic]:,}", text)
        return table

    def _group_text(self) -> str:
        archive = self._scenario.archive
        running = [member for member in self._scenario.members if member.is_alive()]
        shares = "+".join(str(member.assigned) for member in running)
        median = archive.latency_ms(0.5)
        latency = "" if median is None else f", end to end p50 {median} ms, p99 {archive.latency_ms(0.99)} ms"
        who = f"group 'chat-archive': {len(running)} members read {shares} partitions"
        return f"{who}, {archive.count:,} messages{latency}"


def _enriched(topics: dict[str, int]) -> list[str]:
    return [topic for topic in topics if topic.startswith(pipelines.ENRICHED)]


def _table(first: str, *others: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, style="bold")
    for name in others:
        table.add_column(name, justify="left" if name in {"written by", "latest"} else "right")
    return table


def _resident_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except OSError:  # no /proc on this system, or the broker is gone
        pass
    return 0


def open_screen(is_terminal: bool) -> tuple[AbstractContextManager[Any], Callable[[Any], None]]:
    """A context to draw in, and how to draw; both do nothing without a terminal."""
    if not is_terminal:
        return nullcontext(), lambda _: None
    from rich.live import Live

    live = Live(refresh_per_second=4, transient=True)
    return live, live.update
