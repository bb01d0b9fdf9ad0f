"""Sums, sizes and counts as people read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_DECIMAL_UNITS: Final = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum over things of which some may not be known: `1,234 + ?`, null in JSON."""

    known: int
    complete: bool

    @property
    def or_none(self) -> int | None:
        return self.known if self.complete else None

    def text(self, write: Callable[[int], str]) -> str:
        return write(self.known) if self.complete else f"{write(self.known)} + ?"


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
