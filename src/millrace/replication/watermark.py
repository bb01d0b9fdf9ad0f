"""An offset that only grows, and those who wait for it.

Two kinds of waiting: for a certain offset (`when` with a callback, `reach` with a future: a producer that wants
acks=all), and `watch` for any movement at all (a long poll over many partitions). Callbacks run in the call that moves
the mark.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable

Watcher = Callable[[], None]
Reached = Callable[[Exception | None], object]
"""Called once: with None when the offset is reached, with the reason when it never will be."""


class Watermark:
    """A monotonic offset with waiters. Owner: the partition it belongs to."""

    __slots__ = ("_order", "_waiters", "_watchers", "offset")

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self._waiters: list[tuple[int, int, Reached]] = []
        self._order = itertools.count()
        self._watchers: set[Watcher] = set()

    def __repr__(self) -> str:
        return f"Watermark({self.offset}, {len(self._waiters)} waiting, {len(self._watchers)} watching)"

    def advance(self, offset: int) -> None:
        """Move forward and wake whoever this concerns; an offset at or below the mark changes nothing."""
        if offset <= self.offset:
            return
        self.offset = offset
        waiters = self._waiters
        while waiters and waiters[0][0] <= offset:
            heapq.heappop(waiters)[2](None)
        if self._watchers:
            self.notify()

    def reach(self, offset: int) -> asyncio.Future[None] | None:
        """A future that is done once the mark is at `offset` or above, or None where it already is.

        It ends with an exception when `fail` is called. Cancelling it just leaves the line.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def reached(error: Exception | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        return future if self.when(offset, reached) else None

    def when(self, offset: int, reached: Reached) -> bool:
        """Have `reached` called once the mark is at `offset` or above; False, and no call, where it already is."""
        if self.offset >= offset:
            return False
        heapq.heappush(self._waiters, (offset, next(self._order), reached))
        return True

    def watch(self, watcher: Watcher) -> None:
        self._watchers.add(watcher)

    def unwatch(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)

    def notify(self) -> None:
        """Wake everybody who watches, without moving: what they read may have changed in another way."""
        for watcher in tuple(self._watchers):
            watcher()

    def fail(self, error: Exception) -> None:
        """End every wait with `error`: the offset will not be reached here any more."""
        waiters, self._waiters = self._waiters, []
        for _, _, reached in waiters:
            reached(error)
        self.notify()
