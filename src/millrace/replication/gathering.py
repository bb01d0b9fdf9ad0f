"""When a follower's fetch is answered: at once, or a moment later with more.

A fetch costs both sides the same whatever it brings. Producers with several batches in flight do not wait for each one,
so their throughput grows if a follower takes those batches together. The leader therefore lets a fetch wait until most
of what producers have in flight has gathered, but never longer than a few milliseconds. Where processors are short
(`contention`) it may be a few more: there every fetch that is saved is throughput, and each of those producers waits
longer for its turn anyway.

How much that is depends on the producers and can only be tried: once in `WINDOW_S` one fetch waits for as much as
comes. A follower whose answers are small, because little is produced or one batch at a time, is never made to wait.

Only the time of an answer is decided here. What a fetch promises (everything below its offset) counts when it arrives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from millrace.replication.contention import Contention

LONGEST_S: Final = 0.004
"""Of a wait, from when there is something to answer with."""
LONGEST_IF_SHORT_S: Final = 0.020
"""The same where processors are short: enough to fill what a busy producer keeps in flight."""
WINDOW_S: Final = 1.0
WORTHWHILE_BYTES: Final = 64 * 1024
"""Answers below this size are latency, not throughput: they are not held back."""
ENOUGH_BYTES: Final = 640 * 1024
"""Beyond this a larger answer is hardly cheaper for its size."""
MOST: Final = 0.9
"""The part of what is in flight that is waited for: the rest keeps the producers busy meanwhile."""


class Gathering:
    """How much the answers to one follower should bring. Owner: the event loop of the leader."""

    __slots__ = ("_contention", "_in_flight_bytes", "_largest_bytes", "_trying", "_window_end", "longest_s")

    def __init__(self, contention: Contention) -> None:
        self._contention = contention
        self.longest_s = LONGEST_S
        """How long a fetch may wait in this window."""
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
            self.longest_s = LONGEST_IF_SHORT_S if self._trying and self._contention.is_high(now) else LONGEST_S
            self._largest_bytes = self._in_flight_bytes = 0
        return ENOUGH_BYTES if self._trying else int(self._in_flight_bytes * MOST)

    def answered(self, size_bytes: int) -> None:
        """A fetch was answered with so much."""
        self._largest_bytes = max(self._largest_bytes, size_bytes)
        if self._trying and size_bytes:
            self._trying = False
            self._in_flight_bytes = size_bytes if size_bytes >= WORTHWHILE_BYTES else 0
