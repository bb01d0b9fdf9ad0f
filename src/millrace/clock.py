"""The only door to time.

Intervals and timeouts use `monotonic` (a wall-clock jump must never expire a session); record timestamps and retention
use `wall_ms`. Nothing else in the package may call `time.*`, `asyncio.sleep` or `loop.call_later`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A scheduled call that has not happened yet."""

    def cancel(self) -> None:
        """Forget the call; harmless when it has already run."""


class Clock(Protocol):
    """What the system may ask of time."""

    def monotonic(self) -> float:
        """Seconds that only go forward; the zero is arbitrary."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970 as the machine believes; may jump."""

    async def sleep(self, seconds: float) -> None:
        """Wait; cancellation ends the wait and nothing else."""

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        """Run `callback` on the loop after `seconds`."""


class SystemClock:
    """The machine's clock and the running event loop's timers."""

    monotonic = staticmethod(time.monotonic)  # read several times per request: not through a function of ours

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_later(seconds, callback)


class _ManualTimer:
    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class ManualClock:
    """Time that stands still until a test moves it; timers fire inside `advance`, in order of their due time."""

    def __init__(self, wall_ms: int = 1_700_000_000_000) -> None:
        self._elapsed = 0.0
        self._wall_start_ms = wall_ms
        self._order = itertools.count()
        self._timers: list[tuple[float, int, _ManualTimer]] = []

    def monotonic(self) -> float:
        return self._elapsed

    def wall_ms(self) -> int:
        return self._wall_start_ms + round(self._elapsed * 1000)

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        timer = _ManualTimer(callback)
        heapq.heappush(self._timers, (self._elapsed + max(seconds, 0.0), next(self._order), timer))
        return timer

    async def sleep(self, seconds: float) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if not done.done():
                done.set_result(None)

        timer = self.call_later(seconds, wake)
        try:
            await done
        finally:
            timer.cancel()

    def advance(self, seconds: float) -> None:
        """Move time forward and run every timer that falls due on the way, each at its own instant."""
        target = self._elapsed + seconds
        while self._timers and self._timers[0][0] <= target:
            due, _, timer = heapq.heappop(self._timers)
            self._elapsed = max(self._elapsed, due)
            if timer.callback is not None:
                timer.callback()
        self._elapsed = target
