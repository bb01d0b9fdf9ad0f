"""Tasks have an owner that notices their end."""

from __future__ import annotations

import ast
import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

import millrace
from millrace import tasks
from millrace.clock import ManualClock
from millrace.errors import ApiError, ErrorCode, StorageError
from millrace.replication.state_topic import yield_to_loop
from millrace.tasks import FIRST_PAUSE_S, LONGEST_PAUSE_S, Tasks


class Kept:
    """Work that counts its beginnings, and ends when and as it is told."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.tasks = Tasks(self.clock)
        self.begun = 0
        self.waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def work(self) -> None:
        self.begun += 1
        self.waiting = asyncio.get_running_loop().create_future()
        await self.waiting

    async def after(self, seconds: float) -> int:
        await run_ready()
        self.clock.advance(seconds)
        await run_ready()
        return self.begun


async def run_ready() -> None:
    for _ in range(10):
        await yield_to_loop()


ENDS: dict[str, Callable[[asyncio.Future[None]], object]] = {
    "raised": lambda waiting: waiting.set_exception(ZeroDivisionError("planted")),
    "raised on purpose": lambda waiting: waiting.set_exception(StorageError("planted")),
    "returned": lambda waiting: waiting.set_result(None),
    "cancelled from elsewhere": lambda waiting: waiting.cancel(),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
async def test_work_that_should_not_end_begins_again(
    end: Callable[[asyncio.Future[None]], object], caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept()
    kept.tasks.keep("the work", kept.work)
    await run_ready()
    end(kept.waiting)
    assert await kept.after(FIRST_PAUSE_S * 0.9) == 1
    assert await kept.after(FIRST_PAUSE_S * 0.11) == 2
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "the work has failed" in record.message
    await kept.tasks.stop()


async def test_a_bug_is_logged_with_its_traceback_and_a_failure_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    for error, has_trace in ((ZeroDivisionError(), True), (StorageError("no disk"), False)):
        caplog.clear()
        kept = Kept()
        kept.tasks.keep("the work", kept.work)
        await run_ready()
        kept.waiting.set_exception(error)
        await run_ready()
        (record,) = caplog.records
        assert bool(record.exc_info) is has_trace
        await kept.tasks.stop()


async def test_the_pause_doubles_while_it_fails_and_is_short_again_after_a_good_while() -> None:
    kept = Kept()
    kept.tasks.keep("the work", kept.work)
    await run_ready()
    pause_s, begun = FIRST_PAUSE_S, 1
    for _ in range(10):
        kept.waiting.set_exception(StorageError("again"))
        assert await kept.after(pause_s * 0.99) == begun
        begun += 1
        assert await kept.after(pause_s * 0.011) == begun
        pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
    assert pause_s == LONGEST_PAUSE_S
    await kept.after(LONGEST_PAUSE_S)
    kept.waiting.set_exception(StorageError("again"))
    assert await kept.after(FIRST_PAUSE_S * 1.01) == begun + 1
    await kept.tasks.stop()


async def test_what_nothing_can_do_without_ends_the_rest() -> None:
    kept, told = Kept(), list[str]()
    task = kept.tasks.keep("the work", kept.work, fatal=told.append)
    await run_ready()
    kept.waiting.set_exception(StorageError("the log is gone"))
    await kept.after(100)
    assert told == ["the work: the log is gone"]
    assert task.done()
    assert kept.begun == 1


async def test_stopping_ends_everything_and_waits_for_it() -> None:
    kept = Kept()
    put_away = False

    async def slow_to_end() -> None:
        nonlocal put_away
        try:
            await asyncio.Event().wait()
        finally:
            await run_ready()
            put_away = True

    kept.tasks.keep("kept", kept.work)
    kept.tasks.start("job", slow_to_end())
    await run_ready()
    kept.tasks.cancel()
    await kept.tasks.stop()  # asked a second time, and does not interrupt what is on its way out
    assert put_away
    assert repr(kept.tasks) == "Tasks([])"
    assert await kept.after(100) == 1


async def test_a_cancellation_that_was_lost_is_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks, "INSIST_S", 0.01)
    kept = Kept()

    async def deaf() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    kept.tasks.start("deaf", deaf())
    await run_ready()
    await kept.tasks.stop()
    assert "deaf does not end" in caplog.text


async def test_an_error_on_the_way_out_is_logged_and_is_the_end(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()

    async def clumsy() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise StorageError("it fell down")

    kept.tasks.keep("clumsy", clumsy)
    await run_ready()
    await kept.tasks.stop()
    assert [record.message for record in caplog.records] == ["clumsy has failed: it fell down"]


async def test_the_error_of_a_job_is_logged_unless_somebody_is_told(caplog: pytest.LogCaptureFixture) -> None:
    jobs = Tasks(ManualClock(), told=(ApiError,))

    async def fail(error: Exception) -> None:
        raise error

    for error in (ApiError(ErrorCode.NOT_COORDINATOR), StorageError("no disk"), ZeroDivisionError("a bug")):
        task = jobs.start(f"job {type(error).__name__}", fail(error))
        await asyncio.wait([task])
    await run_ready()
    assert [record.message for record in caplog.records] == [
        "job StorageError has failed: no disk",
        "job ZeroDivisionError has failed: ZeroDivisionError('a bug')",
    ]
    assert caplog.records[1].exc_info


# --- one place --------------------------------------------------------------------------------------------------------


def task_starts(tree: ast.Module) -> list[int]:
    """The lines that start a task which nobody may notice; those of a TaskGroup are noticed by its block."""
    groups = {
        item.optional_vars.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncWith)
        for item in node.items
        if isinstance(item.optional_vars, ast.Name) and "TaskGroup" in ast.unparse(item.context_expr)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in {"create_task", "ensure_future"}:
            if not (isinstance(node.value, ast.Name) and node.value.id in groups):
                found.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "asyncio":
            found += [node.lineno for name in node.names if name.name in {"create_task", "ensure_future"}]
    return found


def test_one_place_starts_tasks() -> None:
    home = Path(millrace.__file__).parent
    starts = {
        str(path.relative_to(home)): lines
        for path in sorted(home.rglob("*.py"))
        if (lines := task_starts(ast.parse(path.read_text())))
    }
    assert list(starts) == ["tasks.py"], "use millrace.tasks"


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("asyncio.create_task(f())", 1),
        ("asyncio.get_running_loop().create_task(f())", 1),
        ("asyncio.ensure_future(f())", 1),
        ("from asyncio import create_task", 1),
        ("async def f():\n async with asyncio.TaskGroup() as group:\n  group.create_task(g())", 0),
    ],
)
def test_a_start_of_a_task_is_recognised(source: str, count: int) -> None:
    assert len(task_starts(ast.parse(source))) == count
