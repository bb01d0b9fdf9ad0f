"""What `millrace demo` shows while it runs: a live table on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millrace.cli.demo_traffic import STREAMS, Ledger, Member
from millrace.cli.output import size_text

if TYPE_CHECKING:
    from rich.console import RenderableType

_WINDOW_S: Final = 2.0
PLAIN_EVERY_S: Final = 5.0
LIVE_EVERY_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Sample:
    """The totals of every topic at one moment."""

    at_s: float
    produced: dict[str, int]
    consumed: dict[str, int]


class View:
    """Turns ledger and members into text; rates are over the last two seconds."""

    def __init__(self, ledger: Ledger, members: list[Member], broker_pid: int, bootstrap: str) -> None:
        self._ledger = ledger
        self._members = members
        self._broker_pid = broker_pid
        self._bootstrap = bootstrap
        self._samples: deque[Sample] = deque()

    def sample(self, now_s: float) -> None:
        topics = [stream.topic for stream in STREAMS]
        self._samples.append(
            Sample(
                now_s,
                {topic: self._ledger.produced(topic) for topic in topics},
                {topic: self._ledger.consumed(topic) for topic in topics},
            )
        )
        while len(self._samples) > 2 and now_s - self._samples[0].at_s > _WINDOW_S:
            self._samples.popleft()

    def rates(self, topic: str) -> tuple[float, float]:
        first, last = self._samples[0], self._samples[-1]
        elapsed_s = max(last.at_s - first.at_s, 1e-9)
        return (
            (last.produced[topic] - first.produced[topic]) / elapsed_s,
            (last.consumed[topic] - first.consumed[topic]) / elapsed_s,
        )

    def line(self, elapsed_s: float) -> str:
        """One line for a log file."""
        rates = [self.rates(stream.topic) for stream in STREAMS]
        produced, consumed = self._ledger.produced(), self._ledger.consumed()
        return (
            f"{elapsed_s:5.1f} s  produced {produced:,} ({sum(rate for rate, _ in rates):,.0f}/s)  "
            f"consumed {consumed:,} ({sum(rate for _, rate in rates):,.0f}/s)  lag {produced - consumed:,}  "
            f"{self._group_text()}  {self._latency_text()}"
        )

    def renderable(self, elapsed_s: float, total_s: float | None) -> RenderableType:
        from rich import box
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("topic", style="bold")
        for name in ("partitions", "produced", "per second", "consumed", "per second", "lag"):
            table.add_column(name, justify="right")
        for stream in STREAMS:
            produced, consumed = self._ledger.produced(stream.topic), self._ledger.consumed(stream.topic)
            produce_rate, consume_rate = self.rates(stream.topic)
            lag = produced - consumed
            table.add_row(
                stream.topic,
                str(stream.partitions),
                f"{produced:,}",
                f"{produce_rate:,.0f}",
                f"{consumed:,}",
                f"{consume_rate:,.0f}",
                f"[green]{lag:,}[/]" if lag < max(produce_rate, 100) else f"[yellow]{lag:,}[/]",
            )
        until = f" of {total_s:.0f}" if total_s is not None else ""
        memory = size_text(self._broker_bytes())
        head = f"broker at [bold]{self._bootstrap}[/], {memory} resident, {elapsed_s:.0f}{until} s"
        foot = f"group 'demo': {self._group_text()}, {self._latency_text()}"
        parts: list[RenderableType] = [head, table, foot]
        if total_s is not None:
            parts.append(ProgressBar(total=total_s, completed=min(elapsed_s, total_s), width=60))
        return Group(*parts)

    def _group_text(self) -> str:
        running = [member for member in self._members if member.is_alive()]
        return f"{len(running)} members reading {'+'.join(str(member.assigned) for member in running)} partitions"

    def _latency_text(self) -> str:
        median, tail = self._ledger.latency_ms(0.5), self._ledger.latency_ms(0.99)
        return "no latency yet" if median is None else f"end to end p50 {median} ms, p99 {tail} ms"

    def _broker_bytes(self) -> int:
        try:
            for line in Path(f"/proc/{self._broker_pid}/status").read_text().splitlines():
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

    live = Live(refresh_per_second=8, transient=True)
    return live, live.update
