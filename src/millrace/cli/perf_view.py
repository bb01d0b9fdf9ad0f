"""What `millrace perf` shows: a live screen on a terminal, a line every few seconds elsewhere, and the summary."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from millrace.cli.latencies import Latencies
from millrace.cli.output import count_text, print_remark, size_text
from millrace.cli.perf_runs import Plan, Tally
from millrace.clock import Clock

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

LIVE_EVERY_S: Final = 0.25
PLAIN_EVERY_S: Final = 5.0


class View:
    """Shows a tally now and then; rates and percentiles are of the time since it was last shown."""

    def __init__(self, title: str, plan: Plan, clock: Clock, *, quiet: bool) -> None:
        self._title = title
        self._plan = plan
        self._clock = clock
        self._quiet = quiet
        self._stack = ExitStack()
        self._live: Live | None = None
        self._every_s = LIVE_EVERY_S if sys.stderr.isatty() else PLAIN_EVERY_S
        self._shown_s = clock.monotonic()
        self._done = self._bytes = 0
        self._latencies = Latencies()

    def __enter__(self) -> Self:
        if not self._quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = self._stack.enter_context(
                Live(console=Console(stderr=True), auto_refresh=False, transient=True)
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def show(self, tally: Tally) -> None:
        """Called all the time; most of the time it is not due."""
        now = self._clock.monotonic()
        elapsed = now - self._shown_s
        if self._quiet or elapsed < self._every_s:
            return
        rate = (tally.done - self._done) / elapsed
        bytes_rate = (tally.done_bytes - self._bytes) / elapsed
        recent = tally.latencies.since(self._latencies)
        self._shown_s, self._done, self._bytes = now, tally.done, tally.done_bytes
        self._latencies = tally.latencies.copy()
        if self._live is not None:
            self._live.update(self._table(tally, rate, bytes_rate, recent), refresh=True)
        else:
            print_remark(
                f"{count_text(tally.done, 'record')}, {rate:,.0f} records/s, {size_text(bytes_rate)}/s, "
                f"{latency_text(recent)}"
            )

    def _table(self, tally: Tally, rate: float, bytes_rate: float, recent: Latencies) -> Table:
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        table.add_row(self._title, self._progress(tally))
        table.add_row("now", f"{rate:,.0f} records/s   {size_text(bytes_rate)}/s   {latency_text(recent)}")
        overall = f"{tally.done / tally.elapsed_s:,.0f} records/s   {size_text(tally.done_bytes / tally.elapsed_s)}/s"
        table.add_row("overall", f"{overall}   {latency_text(tally.latencies)}")
        if tally.failed:
            table.add_row("failed", f"{tally.failed:,}: {tally.first_error}")
        return table

    def _progress(self, tally: Tally) -> str:
        done = f"{tally.done:,}"
        if self._plan.records is not None:
            done += f" of {self._plan.records:,}"
        return f"{done} records, {tally.elapsed_s:.0f} s; Ctrl-C ends with the summary"


def latency_text(latencies: Latencies) -> str:
    return "  ".join(f"{name} {_ms(value)}" for name, value in latencies.summary_ms().items())


def _ms(value: float) -> str:
    return f"{value:.2f} ms" if value < 10 else f"{value:,.0f} ms"


def summary(test: str, topic: str, plan: Plan, tally: Tally, unacknowledged: int) -> dict[str, Any]:
    """What `--json` prints; the same figures as the text."""
    found: dict[str, Any] = {
        "test": test,
        "topic": topic,
        "records": tally.done,
        "failed": tally.failed,
        "lost": tally.lost,
        "unsent": tally.unsent,
        "unsettled": unacknowledged,
        "bytes": tally.done_bytes,
        "seconds": round(tally.elapsed_s, 6),
        "records_per_s": round(tally.done / tally.elapsed_s, 1),
        "mb_per_s": round(tally.done_bytes / tally.elapsed_s / 1e6, 3),
        "rate": plan.rate,
    }
    if tally.first_record_s is not None:
        found["first_record_ms"] = round(tally.first_record_s * 1000, 3)
    return {**found, _LATENCY[test][0]: tally.latencies.summary_ms()}


def summary_text(test: str, topic: str, tally: Tally, unacknowledged: int) -> str:
    rate = f"{tally.done / tally.elapsed_s:,.0f} records/s, {tally.done_bytes / tally.elapsed_s / 1e6:,.2f} MB/s"
    done = f"{count_text(tally.done, 'record')} {_VERB[test]} {topic} in {tally.elapsed_s:.2f} s: {rate}"
    trouble = {
        "failed": tally.failed,
        "lost": tally.lost,
        "due and not sent": tally.unsent,
        "never acknowledged": unacknowledged,
    }
    done += "".join(f", {count:,} {what}" for what, count in trouble.items() if count)
    lines = [done, f"{_LATENCY[test][1]}: {latency_text(tally.latencies)}"]
    if tally.first_record_s is not None:
        lines.append(f"first record after {_ms(tally.first_record_s * 1000)}, which the rate leaves out")
    return "\n".join(lines)


_VERB: Final = {"produce": "sent to", "consume": "read from", "end-to-end": "through"}
_LATENCY: Final = {
    "produce": ("latency_ms", "from due to acknowledged"),
    "consume": ("wait_ms", "waited for the next records"),
    "end-to-end": ("latency_ms", "from due to read"),
}
