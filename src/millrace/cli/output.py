"""What a command prints: tables for people, JSON for scripts, one-line errors.

A table in a pipe has one line per row, however long, so that a script sees whole names. On a terminal it keeps to the
terminal's width, and a word is never broken: `lay_out` says how. Data goes to stdout; remarks, progress and errors go
to stderr.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, Final

from millrace.admin.words import Sum, count_text, size_text
from millrace.errors import MillraceError
from millrace.security.hiding import HIDDEN

__all__ = [
    "HIDDEN",
    "CommandError",
    "Sum",
    "count_text",
    "lay_out",
    "print_error",
    "print_json",
    "print_remark",
    "print_table",
    "printable",
    "size_text",
]

_GAP: Final = "  "
_BOLD: Final = "\x1b[1m"
_PLAIN: Final = "\x1b[0m"


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
    cells = [["-" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in _wrapped(printable(title), width) if title else ():
        print(line if width is None else f"{_BOLD}{line}{_PLAIN}")
    for line in lay_out(columns, cells, width):
        print(line)


def lay_out(columns: Sequence[str], rows: list[list[str]], width: int | None) -> list[str]:
    """The lines of a table. What does not fit into `width` gives way in this order, and never in the middle of a word:

    columns that are empty in every row are left out; cells of several words are wrapped; and where that is not enough,
    each row becomes a block of lines, one per column.
    """
    names = [name.upper() for name in columns]
    if width is None or _table_width(_natural_widths(names, rows)) <= width:
        return _table(names, rows, _natural_widths(names, rows))
    kept = [index for index in range(len(names)) if not rows or any(row[index] != "-" for row in rows)]
    names, rows = [names[index] for index in kept], [[row[index] for index in kept] for row in rows]
    widths = _shrunk_widths(names, rows, width)
    if widths is not None:
        return _table(names, rows, widths)
    return _blocks(names, rows, width)


def _natural_widths(names: list[str], rows: list[list[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(names, *rows, strict=True)]


def _table_width(widths: list[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _shrunk_widths(names: list[str], rows: list[list[str]], width: int) -> list[int] | None:
    """The widest columns made narrower, down to their longest word; None where that is not enough."""
    widths = _natural_widths(names, rows)
    narrowest = [
        max(len(word) for cell in column for word in cell.split() or [""]) for column in zip(names, *rows, strict=True)
    ]
    while _table_width(widths) > width:
        widest = max(range(len(widths)), key=lambda index: (widths[index] > narrowest[index], widths[index]))
        if widths[widest] <= narrowest[widest]:
            return None
        widths[widest] -= 1
    return widths


def _table(names: list[str], rows: list[list[str]], widths: list[int]) -> list[str]:
    right = [bool(rows) and all(_is_number(row[index]) for row in rows) for index in range(len(names))]
    lines = []
    for row in [names, *rows]:
        wrapped = [_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
        for parts in zip_longest(*wrapped, fillvalue=""):
            aligned = (
                part.rjust(width) if flush_right else part.ljust(width)
                for part, width, flush_right in zip(parts, widths, right, strict=True)
            )
            lines.append(_GAP.join(aligned).rstrip())
    return lines


def _blocks(names: list[str], rows: list[list[str]], width: int) -> list[str]:
    label = max(map(len, names))
    indent = " " * (label + len(_GAP))
    lines: list[str] = []
    for row in rows:
        if lines:
            lines.append("")
        for name, cell in zip(names, row, strict=True):
            parts = _wrapped(cell, max(width - len(indent), 1))
            lines += [name.ljust(label) + _GAP + parts[0], *(indent + part for part in parts[1:])]
    return lines


def _wrapped(cell: str, width: int | None) -> list[str]:
    """Lines of whole words; one that is longer than the width stays whole."""
    if width is None or len(cell) <= width:
        return [cell]
    return textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False) or [""]


def printable(text: str) -> str:
    """Names come from anybody: what would move the cursor or colour the screen is shown as its escape."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"-|-?[\d,]+(\.\d+)?( [kMGT]?B)?( \+ \?)?", cell) is not None
