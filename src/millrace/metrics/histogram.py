"""A histogram that costs little to write: one whole number per bucket, and the sum.

Buckets are not cumulative here; they become so when they are told (`exposition`). Written by one owner, a thread of its
own perhaps; who reads may see the last value in a bucket and not in the sum yet, and sees it next time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, NamedTuple

SECONDS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0
)  # fmt: skip
"""The upper bounds of the buckets of every histogram of times: from what a request costs to where clients give up."""


class HistogramValue(NamedTuple):
    """A histogram at one moment; the last of `counts` is of what is above every bound."""

    bounds: Sequence[float]
    counts: tuple[int, ...]
    total: float


class Histogram:
    """How many values were how large."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def __repr__(self) -> str:
        return f"Histogram({sum(self._counts)} values, {self._total:g} in all)"

    def record(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def value(self) -> HistogramValue:
        return HistogramValue(self._bounds, tuple(self._counts), self._total)
