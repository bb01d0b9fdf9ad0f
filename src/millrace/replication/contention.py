"""Whether processors are short: does the loop's thread wait for one as long as it runs on one?

The kernel counts both for every thread. Load averages and the share of idle time tell less: they are those of the
machine, and slow. What follows from the answer is not here. Owner: the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

SAMPLE_S: Final = 1.0
SHORT_FROM: Final = 0.7
"""Waiting for each second of running. Three brokers on two cores: 0.3 to 0.5 when a producer takes a sixth to a half of
what they can do, 1 to 2 when one takes all."""
BUSY_FROM: Final = 0.2
"""The part of the time that the thread wants to run. Below it waiting says little."""
_SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")


class Use(NamedTuple):
    """Nanoseconds of this thread since it began."""

    ran: int
    waited: int


def use_of_this_thread() -> Use | None:
    """None where the kernel does not tell."""
    try:
        ran, waited, _ = _SCHEDSTAT.read_bytes().split()
        return Use(int(ran), int(waited))
    except (OSError, ValueError):
        return None


class Contention:
    """The answer for the last second or so."""

    def __init__(self, read: Callable[[], Use | None] = use_of_this_thread) -> None:
        self._read = read
        self._sampled_at: float | None = None
        self._use: Use | None = None
        self._is_high = False

    def __repr__(self) -> str:
        return f"Contention({'high' if self._is_high else 'low'})"

    def is_high(self, now: float) -> bool:
        """Asked as often as you like: at most once in `SAMPLE_S` the kernel is."""
        then = self._sampled_at
        if then is not None and now - then < SAMPLE_S:
            return self._is_high
        before, self._use = self._use, self._read()
        self._sampled_at = now
        if before is None or self._use is None or then is None:
            self._is_high = False
        else:
            ran, waited = self._use.ran - before.ran, self._use.waited - before.waited
            self._is_high = waited >= SHORT_FROM * ran and ran + waited >= BUSY_FROM * (now - then) * 1e9
        return self._is_high
