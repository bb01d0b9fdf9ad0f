"""The one place that starts tasks, so that none ends unnoticed.

- `Tasks.keep`: work that goes on for as long as its owner lives. If it ends by itself, because it raised, because it
  returned, or because it was cancelled from somewhere else, that is logged, and it is begun again after a pause that
  doubles while it goes on failing. Where nothing may go on without it, `fatal` is told instead.
- `Tasks.start`: work that comes to its end in the background. What it raises is logged, unless it is an error of which
  whoever waits for it is told (`told`).
- `awaited`: one of several things that the caller itself waits for; what it raises is raised there.

An owner has a `Tasks` of its own and stops it before it goes. Not here: threads and child processes, whose results come
to a task or a callback of the loop; and `asyncio.TaskGroup` and `gather`, which do not return before their tasks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from millrace.clock import Clock
from millrace.errors import MillraceError

logger = logging.getLogger(__name__)

T = TypeVar("T")

Work = Callable[[], Coroutine[Any, Any, None]]
Fatal = Callable[[str], object]

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 10.0
INSIST_S: Final = 30.0
"""A cancellation can be lost in a race with a timeout: after so long it is repeated."""


class Tasks:
    """The tasks of one owner. Owner: the event loop."""

    def __init__(self, clock: Clock, *, told: tuple[type[Exception], ...] = ()) -> None:
        """`told`: the errors of a job that are answered to whoever waits for it, and need not be logged."""
        self._clock = clock
        self._told = told
        self._tasks: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return f"Tasks({sorted(task.get_name() for task in self._tasks)})"

    def keep(self, name: str, work: Work, *, fatal: Fatal | None = None) -> asyncio.Task[None]:
        """Have `work()` run until the task is cancelled: begun again whenever it ends, or `fatal(reason)` called."""
        return self.start(name, self._keep(name, work, fatal))

    def start(self, name: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` to its end."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        """Ask every task to end. One that is at it already is left alone: it may have something to put away."""
        for task in tuple(self._tasks):
            cancel(task)

    async def ended(self, timeout_s: float | None = None) -> None:
        """Return when every task has ended, or when the time is up."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=timeout_s)

    async def stop(self) -> None:
        """Cancel every task and return when all have ended. More may be started afterwards."""
        self.cancel()
        await self.ended(INSIST_S)
        while self._tasks:
            for task in tuple(self._tasks):
                logger.warning("%s does not end", task.get_name())
                task.cancel()
            await self.ended(INSIST_S)

    async def _keep(self, name: str, work: Work, fatal: Fatal | None) -> None:
        pause_s = 0.0
        while True:
            since_s = self._clock.monotonic()
            error: BaseException | None = None
            try:
                if pause_s:
                    await self._clock.sleep(pause_s)
                await work()
            except (Exception, asyncio.CancelledError) as raised:
                if _is_being_cancelled():
                    raise
                error = raised
            trace = None if isinstance(error, MillraceError) else error
            if fatal is not None:
                logger.critical("%s has ended for good: %s", name, _reason(error), exc_info=trace)
                fatal(f"{name}: {_reason(error)}")
                return
            lasted_s = self._clock.monotonic() - since_s - pause_s
            pause_s = FIRST_PAUSE_S if lasted_s >= LONGEST_PAUSE_S else _longer(pause_s)
            logger.error("%s has failed, and begins again in %.1f s: %s", name, pause_s, _reason(error), exc_info=trace)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, self._told):
            trace = None if isinstance(error, MillraceError) else error
            logger.error("%s has failed: %s", task.get_name(), _reason(error), exc_info=trace)


def awaited(work: Awaitable[T]) -> asyncio.Future[T]:
    """A task for one of several things that the caller waits for, and cancels if it stops waiting."""
    return asyncio.ensure_future(work)


def cancel(task: asyncio.Task[Any]) -> None:
    """Ask a task to end, once: a second time would interrupt what it does on its way out."""
    if not task.cancelling():
        task.cancel()


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _longer(pause_s: float) -> float:
    return min(max(pause_s * 2, FIRST_PAUSE_S), LONGEST_PAUSE_S)


def _reason(error: BaseException | None) -> str:
    if error is None:
        return "it returned"
    return str(error) if isinstance(error, MillraceError) else repr(error)
