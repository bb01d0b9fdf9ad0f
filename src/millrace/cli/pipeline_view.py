"""How a running pipeline looks: a live table on a terminal, plain lines elsewhere, JSON lines for scripts."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from millrace.cli.output import count_text, print_remark, size_text
from millrace.spark.pipelines.progress import QueryFigures, RecordsRead

if TYPE_CHECKING:
    from rich.live import Live


class View(ABC):
    """Told of everything that happens to a pipeline; also keeps the totals for the last line."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.batches = 0
        self.read = RecordsRead()
        self.late = 0

    def progress(self, figures: QueryFigures) -> None:
        if figures.input_rows:
            self.batches += 1
        self.read.add(figures)
        self.late += figures.late_rows
        self.show(figures)

    @abstractmethod
    def show(self, figures: QueryFigures) -> None:
        """Show the newest figures of one query."""

    def restarting(self, reason: str, pause_s: float, failures: int) -> None:
        print_remark(restart_line(reason, pause_s, failures))

    def stopping(self) -> None:
        """A stop was asked for, and a batch is not done."""
        print_remark("stopping once the running batch is done; Ctrl-C again does not wait for it")

    def done(self, *, stopped: bool) -> None:
        how = "stopped" if stopped else "done"
        late = f", {self.late:,} too late" if self.late else ""
        print_remark(
            f"pipeline {self.name} {how}: {count_text(self.read.total, 'record')} read in "
            f"{self.batches:,} {'batch' if self.batches == 1 else 'batches'}{late}"
        )


class PlainView(View):
    """A line per batch that had something to do."""

    def show(self, figures: QueryFigures) -> None:
        if figures.input_rows or figures.late_rows:
            print_remark(plain_line(figures))


class QuietView(View):
    """Nothing of progress: for a log that nobody cuts."""

    def show(self, figures: QueryFigures) -> None:
        """Who wants to know looks at the status of the run."""


class JsonView(View):
    """A JSON document per report on stdout."""

    def show(self, figures: QueryFigures) -> None:
        print(json.dumps(figures.as_dict()), flush=True)

    def restarting(self, reason: str, pause_s: float, failures: int) -> None:
        event = {"event": "restart", "reason": reason, "pause_s": pause_s, "failures": failures}
        print(json.dumps(event), flush=True)

    def done(self, *, stopped: bool) -> None:
        event = {"event": "stopped" if stopped else "done", "rows": self.read.total, "batches": self.batches}
        print(json.dumps(event), flush=True)


class LiveView(View):
    """A table with a row per query that is drawn again and again."""

    def __init__(self, name: str, live: Live) -> None:
        super().__init__(name)
        self._live = live
        self._latest: dict[str, QueryFigures] = {}

    def show(self, figures: QueryFigures) -> None:
        self._latest[figures.name] = figures
        self._live.update(self._table())

    def restarting(self, reason: str, pause_s: float, failures: int) -> None:
        self._live.console.print(restart_line(reason, pause_s, failures), markup=False, highlight=False)

    def _table(self) -> Any:
        from rich import box
        from rich.table import Table

        table = Table(title=f"pipeline {self.name}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("query")
        for name in ("batch", "rows", "in/s", "out/s", "lag", "batch time", "late", "state rows", "state"):
            table.add_column(name, justify="right")
        for one in self._latest.values():
            table.add_row(*cells(one))
        return table


def restart_line(reason: str, pause_s: float, failures: int) -> str:
    return f"query failed (failure {failures} in a row): {reason}; starting again in {pause_s:.0f} s"


def cells(figures: QueryFigures) -> tuple[str, ...]:
    return (
        figures.name,
        f"{figures.batch_id:,}",
        f"{figures.input_rows:,}",
        f"{figures.input_rate:,.0f}",
        f"{figures.processed_rate:,.0f}",
        "-" if figures.lag is None else f"{figures.lag:,}",
        f"{figures.batch_ms / 1000:.1f} s",
        f"{figures.late_rows:,}",
        f"{figures.state_rows:,}",
        size_text(figures.state_bytes),
    )


def plain_line(figures: QueryFigures) -> str:
    name, batch, rows, incoming, outgoing, lag, took, late, state_rows, state = cells(figures)
    return (
        f"{name} batch={batch} rows={rows} in/s={incoming} out/s={outgoing} lag={lag} took={took.replace(' ', '')} "
        f"late={late} state={state_rows} rows, {state}"
    )


@contextmanager
def open_view(name: str, *, as_json: bool, quiet: bool = False) -> Iterator[View]:
    """The view that fits where the output goes."""
    if as_json:
        yield JsonView(name)
    elif quiet:
        yield QuietView(name)
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.live import Live

        waiting = f"pipeline {name}: waiting for the first batch, which takes longer than the others"
        with Live(waiting, console=Console(stderr=True), refresh_per_second=4) as live:
            yield LiveView(name, live)
    else:
        yield PlainView(name)
