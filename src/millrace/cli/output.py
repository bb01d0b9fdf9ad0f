"""What a command prints: tables for people, JSON for scripts, one-line errors.

A table goes through rich on a terminal and as plain aligned columns elsewhere, so that a pipe sees whole names and no
frame, and does not pay for importing rich. Data goes to stdout; remarks, progress and errors go to stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

from millrace.errors import MillraceError

_DECIMAL_UNITS: Final = ("B", "kB", "MB", "GB", "TB")


class CommandError(MillraceError):
    """A command cannot do what was asked; the text is the whole message."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def print_error(message: str) -> None:
    print(f"millrace: error: {message}", file=sys.stderr)


def print_remark(message: str) -> None:
    """Something a person may want to know, kept out of the data on stdout."""
    print(message, file=sys.stderr)


def print_json(value: Any) -> None:
    """One JSON document: indented on a terminal, a single line for a script."""
    print(json.dumps(value, indent=2 if sys.stdout.isatty() else None, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> None:
    """A table; columns whose cells are all numbers stand flush right, None is shown as '-'."""
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    numeric = [bool(cells) and all(_is_number(row[index]) for row in cells) for index in range(len(columns))]
    if sys.stdout.isatty():
        _print_rich_table(columns, cells, numeric, title)
    else:
        _print_plain_table(columns, cells, numeric, title)


def _print_plain_table(columns: Sequence[str], cells: list[list[str]], numeric: list[bool], title: str | None) -> None:
    if title:
        print(title)
    lines = [[name.upper() for name in columns], *cells]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    for line in lines:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        )
        print("  ".join(padded).rstrip())


def _print_rich_table(columns: Sequence[str], cells: list[list[str]], numeric: list[bool], title: str | None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, right in zip(columns, numeric, strict=True):
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.replace(",", "").lstrip("-").isdigit()


def size_text(size_bytes: float) -> str:
    """`1234567` as `1.2 MB`."""
    for unit in _DECIMAL_UNITS:
        if size_bytes < 1000 or unit == _DECIMAL_UNITS[-1]:
            break
        size_bytes /= 1000
    return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"


def count_text(count: int, noun: str) -> str:
    """`1 record`, `12,000 records`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
