"""The result of a Spark comparison: the rows of benches.system.report with the bars they have to reach.

PYTHONPATH=tests python -m benches.spark.report benches/results/spark.json --update docs/performance.md
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benches.system.report import Comparison, Row

BEGIN, END = "<!-- spark: begin -->", "<!-- spark: end -->"
THROUGHPUT = "throughput"
READ, STREAM, SINK = "batch read", "stream, AvailableNow", "batch write"
BARS = {READ: 1.5, STREAM: 1.2, SINK: 1.0}  # times the JVM connector's throughput
HEADS = ("work", "quantity", "JVM connector, Kafka 4.3.0", "millrace, pip only", "ratio", "bar")


def bar_of(row: Row) -> float | None:
    """What the ratio of a row must reach; None where a row only explains another."""
    if row.quantity != THROUGHPUT:
        return None
    return next((bar for work, bar in BARS.items() if row.work.startswith(work)), None)


def cells(row: Row) -> tuple[str, ...]:
    bar = bar_of(row)
    return *row.cells(), "-" if bar is None else f"{bar:.1f}"


@dataclass(slots=True)
class SparkComparison(Comparison):
    """A whole run; `kafka` of a row is the JVM connector on Apache Kafka, `millrace` our source on our broker."""

    def table(self) -> Table:
        title = f"Spark, local[2], {self.rounds} rounds each, alternating; median (lowest-highest)"
        table = Table(*HEADS, title=title)
        for row in self.rows:
            *shown, ratio, bar = cells(row)
            good = row.ratio is not None and row.ratio >= (bar_of(row) or 1)
            table.add_row(*shown, f"[{'green' if good else 'yellow'}]{ratio}[/]", bar)
        return table

    def markdown(self) -> str:
        said = f"Machine: {self.machine}. Command: `{self.command}`. Median of {self.rounds} rounds (lowest-highest)."
        lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
        lines += [f"| {' | '.join(cells(row))} |" for row in self.rows]
        drift = "".join(f"\nStill drifting, so not warm: {each}.\n" for each in self.drifting())
        return f"{said}\n\n" + "\n".join(lines) + f"\n{drift}"

    def update(self, path: Path) -> None:
        """Replace what stands between the markers of a Markdown page."""
        page = path.read_text()
        before, begin, rest = page.partition(BEGIN)
        _, end, after = rest.partition(END)
        if not begin or not end:
            raise SystemExit(f"{path} has no {BEGIN} ... {END}")
        path.write_text(f"{before}{BEGIN}\n{self.markdown()}{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Show a stored Spark comparison, or write it into a page.")
    parser.add_argument("result", type=Path)
    parser.add_argument("--update", type=Path, help="a Markdown page with spark markers")
    options = parser.parse_args()
    comparison = SparkComparison.load(options.result)
    assert isinstance(comparison, SparkComparison)
    if options.update is None:
        Console(width=140).print(comparison.table())
    else:
        comparison.update(options.update)


if __name__ == "__main__":
    main()
