"""Replication quotas (KIP-73): how fast replicas that are behind may be filled, so that clients keep their share.

A broker has two, for what it sends as a leader and for what it fetches as a follower, and each concerns the replicas
that topics name. A quota is a bucket that fills at the rate: while something is in it, a fetch goes ahead and takes
what it takes, if need be more than there is; what is missing has to flow in before the next. So a fetch is never cut
in pieces, and the rate holds over time.

Not here: who asks. `serving` and `follower` do, and both let replicas pass that are in sync: what clients wait
for is never held back. Owner: the event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from millrace.clock import Clock

BURST_S: Final = 0.1
"""For how long a quota that nobody uses is saved up."""
LONGEST_WAIT_S: Final = 0.2
"""Look again after this long: the rate may have been raised, and the replica may be in sync by now."""


class ReplicationQuota:
    """Bytes per second for one direction."""

    def __init__(self, rate_bytes_per_s: int, clock: Clock) -> None:
        self._clock = clock
        self._rate_bytes_per_s = rate_bytes_per_s
        self._level_bytes = rate_bytes_per_s * BURST_S
        self._filled_at = clock.monotonic()

    def __repr__(self) -> str:
        return f"ReplicationQuota({self._rate_bytes_per_s} bytes/s, {self._level_bytes:.0f} bytes left)"

    @property
    def rate_bytes_per_s(self) -> int:
        return self._rate_bytes_per_s

    def set_rate(self, rate_bytes_per_s: int) -> None:
        """Fill at another rate from now on; what was taken too much under the old one is forgiven."""
        if rate_bytes_per_s != self._rate_bytes_per_s:
            self._rate_bytes_per_s = rate_bytes_per_s
            self._level_bytes = rate_bytes_per_s * BURST_S
            self._filled_at = self._clock.monotonic()

    def take(self, size_bytes: int) -> None:
        """That much was sent or fetched; a negative size gives back what was not after all."""
        self._fill()
        self._level_bytes -= size_bytes

    def wait_s(self) -> float:
        """How long a replica that is behind has to wait before it is worth asking again; 0.0 if it need not."""
        self._fill()
        if self._level_bytes > 0:
            return 0.0
        if not self._rate_bytes_per_s:
            return LONGEST_WAIT_S
        # A byte more than none, or rounding could wake the caller just too early, again and again.
        return min((1 - self._level_bytes) / self._rate_bytes_per_s, LONGEST_WAIT_S)

    def _fill(self) -> None:
        now = self._clock.monotonic()
        gained = (now - self._filled_at) * self._rate_bytes_per_s
        self._level_bytes = min(self._level_bytes + gained, self._rate_bytes_per_s * BURST_S)
        self._filled_at = now


def is_throttled(replicas: tuple[str, ...], index: int, broker_id: int) -> bool:
    """Whether a topic's list of throttled replicas (`*`, or `partition:broker` pairs) names this one."""
    return bool(replicas) and (replicas == ("*",) or f"{index}:{broker_id}" in replicas)
