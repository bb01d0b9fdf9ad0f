"""The result of a comparison: kept as JSON, shown as a table, written into docs/performance.md.

PYTHONPATH=tests python -m benches.system.report benches/results/comparison.json --update docs/performance.md

The table of NAME.json has its place in the page between `<!-- NAME: begin -->` and `<!-- NAME: end -->`.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(slots=True)
class Row:
    """One measured quantity on both sides, every round of it."""

    work: str
    quantity: str
    unit: str
    better: str  # "higher" or "lower"
    kafka: list[float] = field(default_factory=list)
    millrace: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        """millrace divided by Kafka, of the medians."""
        if not self.kafka or not self.millrace or not statistics.median(self.kafka):
            return None
        return statistics.median(self.millrace) / statistics.median(self.kafka)

    def cells(self) -> tuple[str, ...]:
        ratio = "-" if self.ratio is None else f"{self.ratio:.2f}"
        return self.work, f"{self.quantity}, {self.unit}", _spread(self.kafka), _spread(self.millrace), ratio


@dataclass(slots=True)
class Comparison:
    """A whole run."""

    command: str
    machine: str
    rounds: int
    rows: list[Row] = field(default_factory=list)

    def add(self, side: str, work: str, quantity: str, unit: str, better: str, value: float) -> None:
        """Append one round's value; `side` is `kafka` or `millrace`."""
        for row in self.rows:
            if (row.work, row.quantity) == (work, quantity):
                break
        else:
            row = Row(work, quantity, unit, better)
            self.rows.append(row)
        (row.kafka if side == "kafka" else row.millrace).append(value)

    def drifting(self) -> list[str]:
        """What got better in every round and by more than a tenth in all: a side that was not warm yet."""
        found = []
        for row in self.rows:
            stretches = [("kafka", each) for each in self.stretches(row.kafka)]
            stretches += [("millrace", each) for each in self.stretches(row.millrace)]
            for side, values in stretches:
                steps = list(values if row.better == "higher" else reversed(values))
                if len(steps) > 2 and steps == sorted(set(steps)) and steps[-1] > 1.1 * steps[0]:
                    found.append(f"{side}, {row.work}, {row.quantity}: {', '.join(map(_number, values))} {row.unit}")
        return found

    def stretches(self, values: list[float]) -> list[list[float]]:
        """The rounds that a side took without being started anew in between."""
        return [values]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Comparison:
        stored = json.loads(path.read_text())
        return cls(**{**stored, "rows": [Row(**row) for row in stored["rows"]]})

    def table(self) -> Table:
        title = f"millrace and Apache Kafka, {self.rounds} rounds each, alternating; median (lowest-highest)"
        table = Table("work", "quantity", "Kafka 4.3.0", "millrace", "ratio", title=title)
        for row in self.rows:
            *cells, ratio = row.cells()
            good = row.ratio is not None and (row.ratio >= 1 if row.better == "higher" else row.ratio <= 1)
            table.add_row(*cells, f"[green]{ratio}[/]" if good else f"[yellow]{ratio}[/]")
        return table

    def markdown(self) -> str:
        head = (
            f"Machine: {self.machine}. Command: `{self.command}`. Median of {self.rounds} rounds (lowest-highest).\n\n"
        )
        lines = ["| work | quantity | Kafka 4.3.0 | millrace | millrace / Kafka |", "|---|---|---|---|---|"]
        drift = "".join(f"\nStill drifting, so not warm: {each}.\n" for each in self.drifting())
        return head + "\n".join([*lines, *(f"| {' | '.join(row.cells())} |" for row in self.rows)]) + "\n" + drift


def _spread(values: list[float]) -> str:
    if not values:
        return "-"
    median = _number(statistics.median(values))
    return median if len(values) == 1 else f"{median} ({_number(min(values))}-{_number(max(values))})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def describe_machine() -> str:
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    cores = Path("/proc/cpuinfo").read_text().count("processor\t:") if Path("/proc/cpuinfo").exists() else 0
    return f"{cpu}, {cores} cores, {platform.system()}, Python {platform.python_version()}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Show a stored comparison, or write it into a page.")
    parser.add_argument("result", type=Path)
    parser.add_argument("--update", type=Path, help="a Markdown page with a place for the table")
    options = parser.parse_args()
    comparison = Comparison.load(options.result)
    if options.update is None:
        Console(width=120).print(comparison.table())
        return
    name = options.result.stem
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    page = options.update.read_text()
    before, rest = page.split(begin)
    _, after = rest.split(end)
    options.update.write_text(f"{before}{begin}\n{comparison.markdown()}{end}{after}")


if __name__ == "__main__":
    main()
