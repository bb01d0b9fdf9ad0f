"""Metrics in the text format of Prometheus (0.0.4), in pieces.

Written here and not by prometheus_client because a scrape may have tens of thousands of lines, and what writes them
shares the interpreter with the broker's loop: a line costs a third of a microsecond here (docs/decisions/0014). For the
same reason whoever writes in a thread makes a pause after each piece: otherwise the loop would wait for the interpreter
for up to its switch interval, 5 ms, whenever it comes back from the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from millrace.metrics.catalog import CATALOG, Family
from millrace.metrics.histogram import HistogramValue

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
LINES_PER_PIECE: Final = 1500
"""A piece is written in less than a millisecond."""

Value = int | float | HistogramValue
Labels = tuple[str, ...]


class Table(NamedTuple):
    """Lines of several families that have the same labels: a row for the labels, a column for each family.

    None is a line that is not there.
    """

    families: tuple[str, ...]
    rows: Sequence[tuple[Labels, Sequence[Value | None]]]


class Sheet:
    """What a scrape has collected so far."""

    def __init__(self) -> None:
        self.tables: list[Table] = []

    def __repr__(self) -> str:
        return f"Sheet({len(self.tables)} tables)"

    def add(self, family: str, value: Value, *labels: str) -> None:
        """One line, or the lines of one histogram."""
        self.tables.append(Table((family,), [(labels, (value,))]))

    def add_table(self, families: tuple[str, ...], rows: Sequence[tuple[Labels, Sequence[Value | None]]]) -> None:
        self.tables.append(Table(families, rows))


def render(tables: Iterable[Table], pause: Callable[[], object] = lambda: None) -> list[bytes]:
    """The text, piece by piece; `pause` is called after each. KeyError for a family that is not in the catalogue."""
    columns: dict[str, list[tuple[Table, list[str], int]]] = {}
    for table in tables:
        names = CATALOG[table.families[0]].labels
        texts = []
        for number, (labels, _) in enumerate(table.rows, start=1):
            texts.append(_labels(names, labels))
            if number % LINES_PER_PIECE == 0:
                pause()
        for column, name in enumerate(table.families):
            columns.setdefault(name, []).append((table, texts, column))
    unknown = columns.keys() - CATALOG.keys()
    if unknown:
        raise KeyError(f"not in the catalogue: {sorted(unknown)}")
    pieces: list[bytes] = []
    lines: list[str] = []
    for family in CATALOG.values():
        is_announced = False
        for table, texts, column in columns.get(family.name, ()):
            for start in range(0, len(texts), LINES_PER_PIECE):
                end = start + LINES_PER_PIECE
                found = _lines(family.name, texts[start:end], table.rows[start:end], column)
                if found and not is_announced:
                    is_announced = True
                    lines.append(_announcement(family))
                lines += found
                if len(lines) >= LINES_PER_PIECE:
                    pieces.append("".join(lines).encode())
                    lines.clear()
                    pause()
    if lines:
        pieces.append("".join(lines).encode())
    return pieces


def _announcement(family: Family) -> str:
    return f"# HELP {family.name} {_escaped_help(family.help)}\n# TYPE {family.name} {family.kind.value}\n"


def _lines(
    name: str, texts: Sequence[str], rows: Sequence[tuple[Labels, Sequence[Value | None]]], column: int
) -> list[str]:
    """The lines of one family in one table, or a piece of it."""
    values = [row[1][column] for row in rows]
    if set(map(type, values)) == {int}:  # nearly all of the many
        return [f"{name}{text} {value}\n" for text, value in zip(texts, values, strict=True)]
    lines: list[str] = []
    for text, value in zip(texts, values, strict=True):
        if isinstance(value, HistogramValue):
            lines += _histogram_lines(name, text, value)
        elif value is not None:
            lines.append(f"{name}{text} {number_text(value)}\n")
    return lines


def _histogram_lines(name: str, text: str, value: HistogramValue) -> Iterator[str]:
    before = f"{name}_bucket{{" if not text else f"{name}_bucket{text[:-1]},"
    below = 0
    for bound, count in zip((*value.bounds, math.inf), value.counts, strict=True):
        below += count
        yield f'{before}le="{number_text(bound)}"}} {below}\n'
    yield f"{name}_sum{text} {number_text(value.total)}\n{name}_count{text} {below}\n"


def number_text(value: float) -> str:
    """A number as the format has it."""
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")


def _labels(names: Sequence[str], values: Labels) -> str:
    if not names and not values:
        return ""
    pairs = [f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True)]
    return "{" + ",".join(pairs) + "}"


def _escaped(value: str) -> str:
    if "\\" in value or '"' in value or "\n" in value:
        return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return value


def _escaped_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
