"""Percentiles of many durations in little memory: counts of microseconds, exact up to 256, then within 1 %.

Pure. A bucket above that holds what has the same first eight bits, so that a second and an hour take a few kilobytes
together. A percentile is the upper end of its bucket: never better than what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Final

_EXACT: Final = 256
_PER_DOUBLING: Final = 128
PERCENTILES: Final[Mapping[str, float]] = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}


class Latencies:
    """How often each duration was seen."""

    def __init__(self, counts: Iterable[int] = (), max_us: int = 0) -> None:
        self._counts = list(counts)
        self.count = sum(self._counts)
        self.max_us = max_us

    def __repr__(self) -> str:
        return f"Latencies(count={self.count}, max={self.max_us} us)"

    def add(self, seconds: float) -> None:
        us = max(int(seconds * 1e6), 0)
        if us < _EXACT:
            index = us
        else:
            shift = us.bit_length() - 8
            index = _EXACT + (shift - 1) * _PER_DOUBLING + (us >> shift) - _PER_DOUBLING
        counts = self._counts
        if index >= len(counts):
            counts.extend([0] * (index + 1 - len(counts)))
        counts[index] += 1
        self.count += 1
        self.max_us = max(self.max_us, us)

    def copy(self) -> Latencies:
        return Latencies(self._counts, self.max_us)

    def since(self, earlier: Latencies) -> Latencies:
        """What was added since `earlier` was copied from this; its largest is as exact as a bucket."""
        counts = [now - then for now, then in zip_longest(self._counts, earlier._counts, fillvalue=0)]
        last = max((index for index, count in enumerate(counts) if count), default=0)
        return Latencies(counts, min(_upper(last), self.max_us))

    def percentile_us(self, share: float) -> int:
        """So many microseconds at most for this share of all; 0 where there are none."""
        wanted = math.ceil(share * self.count)
        seen = 0
        for index, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return min(_upper(index), self.max_us)
        return 0

    def summary_ms(self) -> dict[str, float]:
        """The percentiles that are shown, and the largest."""
        found = {name: self.percentile_us(share) for name, share in PERCENTILES.items()}
        return {name: us / 1000 for name, us in {**found, "max": self.max_us}.items()}


def _upper(index: int) -> int:
    """The largest duration that falls into a bucket."""
    if index < _EXACT:
        return index
    doublings, rest = divmod(index - _EXACT, _PER_DOUBLING)
    return ((rest + _PER_DOUBLING + 1) << (doublings + 1)) - 1
