"""A scrape: every part collects in short slices on the loop, and a thread makes text of it.

The loop is never held for more than about `SLICE_S` at a time, however many partitions there are: parts call
`Pace.step` in their loops. The thread that writes makes pauses, because the interpreter is one for both
(`metrics.exposition`). A part that fails is left out, counted and logged; the others are told. Scrapes that come while
one is under way for the same details get what that one finds.

Owner: the event loop; a scrape is a task.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeVar

from millrace.clock import Clock
from millrace.metrics.catalog import Detail
from millrace.metrics.exposition import Sheet, Table, render
from millrace.tasks import Tasks

logger = logging.getLogger(__name__)

SLICE_S: Final = 0.001
PAUSE_S: Final = 0.0002
"""Between two pieces of text: long enough for the loop to get the interpreter."""
TELL_EVERY_S: Final = 60.0
"""A part that goes on failing is in the log this often."""

T = TypeVar("T")


class Pace:
    """Sees to it that whoever collects on the loop lets others go on."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s = clock.monotonic()
        self.longest_s = 0.0
        """For how long the loop was held at the most."""

    async def step(self) -> None:
        """Let others have the loop, if it was held for long enough."""
        if self._clock.monotonic() - self._since_s >= SLICE_S:
            await self.rest()

    async def rest(self) -> None:
        """Let others have the loop."""
        self._end_slice()
        await asyncio.sleep(0)
        self._since_s = self._clock.monotonic()

    async def elsewhere(self, work: Awaitable[T]) -> T:
        """Wait for something that does not hold the loop."""
        self._end_slice()
        try:
            return await work
        finally:
            self._since_s = self._clock.monotonic()

    def _end_slice(self) -> None:
        self.longest_s = max(self.longest_s, self._clock.monotonic() - self._since_s)


class Scrape:
    """One answer in the making."""

    def __init__(self, details: frozenset[Detail], pace: Pace) -> None:
        self.details = details
        self.pace = pace
        self.sheet = Sheet()

    def __repr__(self) -> str:
        return f"Scrape({sorted(each.value for each in self.details)}, {self.sheet!r})"


Part = Callable[[Scrape], Awaitable[None]]


class Collector:
    """Collects what the parts tell."""

    def __init__(self, parts: Mapping[str, Part], clock: Clock) -> None:
        self._parts = parts
        self._clock = clock
        self.errors = dict.fromkeys(parts, 0)
        """How often each part has failed."""
        self._told_s: dict[str, float] = {}
        self._tasks = Tasks(clock)
        self._under_way: dict[frozenset[Detail], asyncio.Task[list[bytes]]] = {}
        self._pause = threading.Event()  # never set: a wait on it is a pause

    def __repr__(self) -> str:
        return f"Collector({list(self._parts)}, {len(self._under_way)} under way)"

    async def text(self, details: frozenset[Detail]) -> list[bytes]:
        """What there is to tell now, in pieces. Who stops waiting does not stop it for others."""
        task = self._under_way.get(details)
        if task is None:
            task = self._under_way[details] = self._tasks.start("scrape", self._scrape(details))
            task.add_done_callback(lambda _: self._under_way.pop(details, None))
        return await asyncio.shield(task)

    async def stop(self) -> None:
        await self._tasks.stop()

    async def _scrape(self, details: frozenset[Detail]) -> list[bytes]:
        tables = await self.collect(details)
        return await asyncio.get_running_loop().run_in_executor(None, self._render, tables)

    async def collect(self, details: frozenset[Detail]) -> list[Table]:
        """What every part has to tell that does not fail."""
        begun_s = self._clock.monotonic()
        pace = Pace(self._clock)
        tables: list[Table] = []
        for name, part in self._parts.items():
            scrape = Scrape(details, pace)
            try:
                await part(scrape)
            except Exception:  # of one part: the others are told
                self.errors[name] += 1
                if self._is_worth_telling(name):
                    logger.exception(
                        "the metrics of %s could not be collected, %d times so far", name, self.errors[name]
                    )
            else:
                tables += scrape.sheet.tables
            await pace.step()
        sheet = Sheet()
        for name, count in self.errors.items():
            sheet.add("millrace_scrape_errors_total", count, name)
        sheet.add("millrace_scrape_seconds", self._clock.monotonic() - begun_s)
        sheet.add("millrace_scrape_loop_held_seconds", pace.longest_s)
        return tables + sheet.tables

    def _is_worth_telling(self, name: str) -> bool:
        now_s = self._clock.monotonic()
        if now_s - self._told_s.get(name, float("-inf")) < TELL_EVERY_S:
            return False
        self._told_s[name] = now_s
        return True

    def _render(self, tables: list[Table]) -> list[bytes]:
        """In a thread."""
        return render(tables, lambda: self._pause.wait(PAUSE_S))
