"""Which failures pass by themselves, and how long they are waited for.

What is asked again, and of whom, is the caller's business. Invariant: a failure that is not retriable is never waited
for, and one that is retriable ends in a single error that names what was wanted and the last cause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from millrace.client.settings import ClientSettings
from millrace.clock import Clock
from millrace.errors import ApiError, ErrorCode

RETRIABLE: Final = frozenset(
    {
        ErrorCode.BROKER_NOT_AVAILABLE,
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.KAFKA_STORAGE_ERROR,
        ErrorCode.LEADER_NOT_AVAILABLE,
        ErrorCode.LISTENER_NOT_FOUND,
        ErrorCode.NETWORK_EXCEPTION,
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.OFFSET_NOT_AVAILABLE,
        ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE,
        ErrorCode.REPLICA_NOT_AVAILABLE,
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.THROTTLING_QUOTA_EXCEEDED,
        ErrorCode.UNKNOWN_LEADER_EPOCH,
        ErrorCode.UNSTABLE_OFFSET_COMMIT,
    }
)

UNKNOWN: Final = frozenset(
    {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID, ErrorCode.INCONSISTENT_TOPIC_ID}
)
"""A topic that is not there may have been created a moment ago, so these are retried too, but not for long."""

UNKNOWN_GRACE_MS: Final = 3_000


def is_retriable(code: ErrorCode) -> bool:
    return code in RETRIABLE or code in UNKNOWN


class Attempts:
    """The attempts at one thing: `failed` waits before the next one, or raises because there is none.

    The time counts from the first failure: work that goes on and on without one is never too late. `succeeded` starts
    the count anew.
    """

    __slots__ = ("_clock", "_failing_since", "_failures", "_pause", "_settings", "_unknown_since", "_what")

    def __init__(self, what: str, settings: ClientSettings, clock: Clock, pause: Callable[[float], None]) -> None:
        self._what = what
        self._settings = settings
        self._clock = clock
        self._pause = pause
        self.succeeded()

    def succeeded(self) -> None:
        self._failures = 0
        self._failing_since: float | None = None
        self._unknown_since: float | None = None

    def failed(self, error: ApiError, *, about: str = "") -> None:
        """Wait for the next attempt; raises `error`, told of what it was about, when there is none."""
        self.count(error, about=about)
        self._pause(self.backoff_ms() / 1000)

    def count(self, error: ApiError, *, about: str = "") -> None:
        """Like `failed`, but without the wait, which is `backoff_ms` long: for who fails with several at once."""
        now = self._clock.monotonic()
        self._failing_since = now if self._failing_since is None else self._failing_since
        if error.code not in UNKNOWN:
            self._unknown_since = None
        elif self._unknown_since is None:
            self._unknown_since = now
        self._failures += 1
        what = f"{self._what} {about}".rstrip()
        if not is_retriable(error.code) or self._unknown_for_ms(now) >= UNKNOWN_GRACE_MS:
            raise ApiError(error.code, f"{what}: {error.message}" if error.message else what) from error
        if (now - self._failing_since) * 1000 >= self._settings.retry_timeout_ms:
            raise ApiError(
                error.code,
                f"{what}: gave up after {self._settings.retry_timeout_ms / 1000:g} s; the last cause: {error}",
            ) from error

    def backoff_ms(self) -> int:
        """Doubles with each failure; no randomness, for there is one client per task and few tasks."""
        doubled = self._settings.retry_backoff_ms << min(max(self._failures - 1, 0), 16)
        return min(doubled, max(self._settings.retry_backoff_max_ms, self._settings.retry_backoff_ms))

    def _unknown_for_ms(self, now: float) -> float:
        return 0.0 if self._unknown_since is None else (now - self._unknown_since) * 1000
