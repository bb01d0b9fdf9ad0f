"""When a follower's fetch is answered: at once, or a moment later with more.

A fetch costs both sides the same whatever it brings. Producers with several batches in flight do not wait for each one,
so their throughput grows if a follower takes those batches together. The leader therefore lets a fetch wait until most
of what producers have in flight has gathered, but never longer than `LONGEST_S`.

How much that is depends on the producers and can only be tried: once in `WINDOW_S` one fetch waits for as much as
comes. A follower whose answers are small, because little is produced or one batch at a time, is never made to wait.

Only the time of an answer is decided here. What a fetch promises (everything below its offset) counts when it arrives.
"""

from __future__ import annotations

from typing import Final

LONGEST_S: Final = 0.004
"""Of a wait, from when there is something to answer with."""
WINDOW_S: Final = 1.0
WORTHWHILE_BYTES: Final = 64 * 1024
"""Answers below this size are latency, not throughput: they are not held back."""
ENOUGH_BYTES: Final = 512 * 1024
"""Beyond this a larger answer is hardly cheaper for its size."""
MOST: Final = 0.9
"""The part of what is in flight that is waited for: the rest keeps the producers busy meanwhile."""


class Gathering:
    """How much the answers to one follower should bring. Owner: the event loop of the leader."""

    __slots__ = ("_in_flight_bytes", "_largest_bytes", "_trying", "_window_end")

    def __init__(self) -> None:
        self._window_end = 0.0
        self._largest_bytes = 0
        """The largest answer in this window."""
        self._trying = False
        """The next answer shows how much is in flight."""
        self._in_flight_bytes = 0
        """What that was; 0 where nobody has to wait."""

    def __repr__(self) -> str:
        return f"Gathering({'trying' if self._trying else f'{self._in_flight_bytes} in flight'})"

    def wanted_bytes(self, now: float) -> int:
        """A fetch that finds less than this waits for more; 0 if it is answered with whatever there is."""
        if now >= self._window_end:
            self._trying = self._largest_bytes >= WORTHWHILE_BYTES
            self._window_end = now + WINDOW_S
            self._largest_bytes = self._in_flight_bytes = 0
        return ENOUGH_BYTES if self._trying else int(self._in_flight_bytes * MOST)

    def answered(self, size_bytes: int) -> None:
        """A fetch was answered with so much."""
        self._largest_bytes = max(self._largest_bytes, size_bytes)
        if self._trying and size_bytes:
            self._trying = False
            self._in_flight_bytes = size_bytes if size_bytes >= WORTHWHILE_BYTES else 0
