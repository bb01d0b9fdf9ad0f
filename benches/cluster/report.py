"""The result of a cluster measurement: the rows of benches.system.report with the bars they have to reach.

PYTHONPATH=tests python -m benches.cluster.report benches/results/cluster-*.json --update docs/performance.md

Each measurement (`throughput`, `failover`, `partitions`) has its own place in the page. A bar is a ratio to Kafka's
figure of the same run, or a limit on millrace's own, which Kafka's figure only explains.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benches.system.report import Comparison, Row

HEADS = ("work", "quantity", "Kafka 4.3.0", "millrace", "ratio", "bar")

START, START_TIME = "start of three brokers", "process start to all ready"
PRODUCE, THROUGHPUT = "produce 1,000 B, RF 3, acks=all", "throughput"
PAGE_CACHE, FLUSHED = "page cache", "flushed before ack"
KILL, ROLLING, GAP = "kill -9 of the leader", "rolling restart, each broker", "longest gap between acks"
MANY = "partitions with RF 3"
CREATE, MOVED, REJOINED = "create them, every ISR full", "kill -9 a broker: led by others", "restart it: every ISR full"


class Judged(Enum):
    """What of the rounds a bar is held against."""

    RATIO = "at least {:g} times Kafka"
    MEDIAN = "below {:g}"
    EVERY = "each below {:g}"


@dataclass(frozen=True, slots=True)
class Bar:
    """What a row has to reach."""

    judged: Judged
    limit: float

    def __str__(self) -> str:
        return self.judged.value.format(self.limit)

    def met(self, row: Row) -> bool | None:
        """None when a side that it needs was not measured."""
        if self.judged is Judged.RATIO:
            return None if row.ratio is None else row.ratio >= self.limit
        if not row.millrace:
            return None
        value = max(row.millrace) if self.judged is Judged.EVERY else statistics.median(row.millrace)
        return value < self.limit


def bar_of(row: Row) -> Bar | None:
    """None for a row that only explains others."""
    if row.work.startswith(PRODUCE) and row.quantity == THROUGHPUT:
        return Bar(Judged.RATIO, 2.0 if row.work.endswith(FLUSHED) else 1.2)
    if row.work.endswith(MANY):
        limits_s = {CREATE: 60.0, MOVED: 5.0, REJOINED: 30.0}
        return Bar(Judged.MEDIAN, limits_s[row.quantity]) if row.quantity in limits_s else None
    return {
        (START, START_TIME): Bar(Judged.MEDIAN, 5.0),
        (KILL, GAP): Bar(Judged.MEDIAN, 1.5),
        (ROLLING, GAP): Bar(Judged.EVERY, 0.5),
    }.get((row.work, row.quantity))


def cells(row: Row) -> tuple[str, ...]:
    bar = bar_of(row)
    return *row.cells(), "-" if bar is None else str(bar)


@dataclass(slots=True)
class ClusterComparison(Comparison):
    """A whole run of one measurement."""

    section: str = "throughput"
    notes: list[str] = field(default_factory=list)
    """What a reader of the figures has to know about this run."""
    turns: int = 1
    """Each side began cold so many times, and took its share of the rounds."""

    def missed(self) -> list[str]:
        """The bars that were not reached."""
        bars = [(row, bar_of(row)) for row in self.rows]
        return [f"{row.work}, {row.quantity}: {bar}" for row, bar in bars if bar is not None and bar.met(row) is False]

    def table(self) -> Table:
        title = f"clusters of three, {self.section}, {self.rounds} rounds each; median (lowest-highest)"
        table = Table(*HEADS, title=title)
        for row in self.rows:
            *shown, bar = cells(row)
            met = judged.met(row) if (judged := bar_of(row)) else None
            table.add_row(*shown, bar if met is None else f"[{'green' if met else 'red'}]{bar}[/]")
        return table

    def markdown(self) -> str:
        said = f"Machine: {self.machine}. Command: `{self.command}`. Median of {self.rounds} rounds (lowest-highest)."
        lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
        lines += [f"| {' | '.join(cells(row))} |" for row in self.rows]
        below = [f"Missed: {each}." for each in self.missed()]
        below += [f"Still drifting, so not warm: {each}." for each in self.drifting()]
        below += [f"Note: {each}." for each in self.notes]
        return f"{said}\n\n" + "\n".join(lines) + "\n" + "".join(f"\n{each}\n" for each in below)

    def drifting(self) -> list[str]:
        """Only a throughput warms up: gaps and start-up times come from events, not from code that gets warm."""
        # The base is named because a dataclass with slots is made anew, and super() would look for the old class.
        return Comparison.drifting(self) if self.section == "throughput" else []

    def stretches(self, values: list[float]) -> list[list[float]]:
        size = max(1, self.rounds // self.turns)
        return [values[begin : begin + size] for begin in range(0, len(values), size)]

    def update(self, path: Path) -> None:
        """Replace what stands between this measurement's markers of a Markdown page."""
        begin, end = f"<!-- cluster-{self.section}: begin -->", f"<!-- cluster-{self.section}: end -->"
        page = path.read_text()
        before, found, rest = page.partition(begin)
        _, found_end, after = rest.partition(end)
        if not found or not found_end:
            raise SystemExit(f"{path} has no {begin} ... {end}")
        path.write_text(f"{before}{begin}\n{self.markdown()}{end}{after}")


def finish(result: ClusterComparison, name: str, page: Path | None) -> int:
    """Show, store and, if there is a page, write down; the exit status is 1 when a bar was missed."""
    console = Console(width=150, highlight=False)
    console.print(result.table())
    for drift in result.drifting():
        print(f"still drifting: {drift}")
    for note in result.notes:
        print(f"note: {note}")
    for missed in result.missed():
        print(f"missed: {missed}")
    path = Path(__file__).parents[1] / "results" / f"{name}.json"
    result.save(path)
    print(f"written to {path}")
    if page is not None:
        result.update(page)
    return 1 if result.missed() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Show stored cluster measurements, or write them into a page.")
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--update", type=Path, help="a Markdown page with cluster markers")
    options = parser.parse_args()
    for path in options.results:
        result = ClusterComparison.load(path)
        assert isinstance(result, ClusterComparison)
        if options.update is None:
            Console(width=150).print(result.table())
        else:
            result.update(options.update)


if __name__ == "__main__":
    main()
