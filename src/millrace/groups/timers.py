"""The timers of groups: which there are, what a decision says about them, and the keyed deadlines behind them.

A heartbeat moves a deadline that is nearly never reached. So a later deadline is only noted; the loop's timer fires at
the old time, sees the new one and sleeps on. Thousands of members cost one loop timer each, and a heartbeat none.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from millrace.clock import Clock, Timer

K = TypeVar("K", bound=Hashable)


class TimerKind(Enum):
    """The clocks of a group; a KIP-848 group has all of them per member."""

    SESSION = "session"
    """A member (or an id that was handed out) must show itself."""
    JOIN = "join"
    """The join phase must end."""
    SYNC = "sync"
    """Every member must fetch its assignment."""
    REBALANCE = "rebalance"
    """A member must give up what it was told to."""


@dataclass(frozen=True, slots=True)
class TimerKey:
    """A timer of one group; arming a key again replaces its deadline."""

    kind: TimerKind
    member_id: str = ""


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Call `timer_fired(key)` after `delay_ms`, instead of whenever it was due before."""

    key: TimerKey
    delay_ms: int


@dataclass(frozen=True, slots=True)
class StartTimer:
    """As `SetTimer`, unless the timer is running already."""

    key: TimerKey
    delay_ms: int


@dataclass(frozen=True, slots=True)
class CancelTimer:
    """Forget the timer."""

    key: TimerKey


TimerEffect = SetTimer | StartTimer | CancelTimer

_TOLERANCE_SECONDS = 1e-4


class _Armed:
    __slots__ = ("deadline", "due", "timer")

    def __init__(self, deadline: float, due: float, timer: Timer) -> None:
        self.deadline = deadline
        self.due = due
        self.timer = timer


class Timers(Generic[K]):
    """Calls `fire(key)` once per armed key, on the loop, at its deadline."""

    def __init__(self, clock: Clock, fire: Callable[[K], None]) -> None:
        self._clock = clock
        self._fire = fire
        self._armed: dict[K, _Armed] = {}

    def __len__(self) -> int:
        return len(self._armed)

    def __contains__(self, key: object) -> bool:
        return key in self._armed

    def set(self, key: K, delay_ms: int) -> None:
        """Be due after `delay_ms`, whatever was due before."""
        deadline = self._clock.monotonic() + delay_ms / 1000
        armed = self._armed.get(key)
        if armed is None:
            self._arm(key, deadline)
        elif armed.due <= deadline:
            armed.deadline = deadline
        else:
            armed.timer.cancel()
            self._arm(key, deadline)

    def cancel(self, key: K) -> None:
        """Be due no more; harmless for an unknown key."""
        armed = self._armed.pop(key, None)
        if armed is not None:
            armed.timer.cancel()

    def cancel_all(self) -> None:
        for armed in self._armed.values():
            armed.timer.cancel()
        self._armed.clear()

    def _arm(self, key: K, deadline: float) -> None:
        delay = max(deadline - self._clock.monotonic(), 0.0)
        self._armed[key] = _Armed(deadline, deadline, self._clock.call_later(delay, lambda: self._due(key)))

    def _due(self, key: K) -> None:
        armed = self._armed.pop(key, None)
        if armed is None:
            return
        if armed.deadline - self._clock.monotonic() > _TOLERANCE_SECONDS:
            self._arm(key, armed.deadline)
        else:
            self._fire(key)


GroupTimers = Timers[tuple[str, TimerKey]]
"""By group id and key."""
