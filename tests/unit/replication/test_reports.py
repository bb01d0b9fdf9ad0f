"""A broker whose directory failed, and that cannot say so, does not stay for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from millrace.clock import ManualClock
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import Directories
from millrace.replication.reports import RETRY_S, DiskReports

BOTH = Directories(("one", "two"), (), False)
ONE = Directories(("one",), (), True)


class Bench:
    """Reports of a broker whose controller does not answer until it `hears`."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.known, self.actual = BOTH, BOTH
        self.hears = False
        self.given_up: list[str] = []
        self.reports = DiskReports(
            known=lambda: self.known,
            actual=lambda: self.actual,
            misplaced=list,
            tell_directories=self._tell,
            tell_placements=self._tell_placements,
            untold_timeout_s=3.0,
            give_up=self.given_up.append,
            clock=self.clock,
        )

    async def _tell(self, directories: Directories, _known: Sequence[str]) -> None:
        if not self.hears:
            raise ApiError(ErrorCode.REQUEST_TIMED_OUT, "nobody is there")
        self.known = directories

    async def _tell_placements(self, _placements: Sequence[object]) -> list[ErrorCode]:
        return []

    async def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / RETRY_S)):
            await self._settle()
            self.clock.advance(RETRY_S)
        await self._settle()

    async def _settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


async def test_a_failed_directory_that_cannot_be_reported_ends_the_broker() -> None:
    bench = Bench()
    task = asyncio.create_task(bench.reports.run())
    bench.actual = ONE
    bench.reports.look()
    await bench.pass_time(2.5)
    assert not bench.given_up
    await bench.pass_time(1.0)
    assert bench.given_up[0].startswith("the controller could not be told for 3000 ms")
    task.cancel()


async def test_once_it_is_known_there_is_time_again() -> None:
    bench = Bench()
    task = asyncio.create_task(bench.reports.run())
    bench.actual = ONE
    bench.reports.look()
    await bench.pass_time(2.5)
    bench.hears = True
    await bench.pass_time(1.0)
    bench.hears, bench.actual = False, Directories((), (), True)
    bench.reports.look()
    await bench.pass_time(2.5)
    assert not bench.given_up
    task.cancel()


async def test_what_is_no_failure_may_stay_untold() -> None:
    """That a directory is full, or that there is another one, misleads nobody about who leads."""
    bench = Bench()
    task = asyncio.create_task(bench.reports.run())
    bench.actual = Directories(("one", "two", "three"), ("two",), False)
    bench.reports.look()
    await bench.pass_time(10.0)
    assert not bench.given_up
    task.cancel()
