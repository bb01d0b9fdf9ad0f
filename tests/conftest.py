"""Settings for every test: how much hypothesis tries, the same result for the same change in CI, told time limits."""

from __future__ import annotations

import asyncio
import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import pytest_timeout  # type: ignore[import-untyped]
from _pytest._io import TerminalWriter
from _pytest.config import create_terminal_writer
from hypothesis import settings

from support.distribution import SPARK_SESSION, ByPiece, piece_of
from support.last_words import LastWords

FRAMES_SHOWN = 12

# No deadline: a busy two-core machine is not a failing property. In CI the examples are the same on every run; a
# developer's runs explore new ones.
settings.register_profile("millrace", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("millrace")

# A shell starts what it puts into the background with Ctrl-C ignored, and children inherit that; commands under test
# are sent Ctrl-C and must hear it, however the tests were started.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Commands under test do not read the profiles of whoever runs the tests.
os.environ["MILLRACE_CONFIG"] = os.devnull

# Nor do pipelines under test note their runs among theirs; the processes that share the tests have one folder.
if "MILLRACE_TEST_RUNS" not in os.environ:
    os.environ["MILLRACE_TEST_RUNS"] = tempfile.mkdtemp(prefix="millrace-runs-")
    atexit.register(shutil.rmtree, os.environ["MILLRACE_TEST_RUNS"], ignore_errors=True)
os.environ["MILLRACE_PIPELINE_RUNS"] = os.environ["MILLRACE_TEST_RUNS"]


def pytest_configure(config: pytest.Config) -> None:
    """A test that exceeds its time limit says where it was, in a worker of pytest-xdist, too.

    pytest-timeout writes the stacks of all threads to the terminal and ends the process. A worker's terminal is
    /dev/null, and all that would be seen is "node down: Not properly terminated".
    """
    if hasattr(config, "workerinput"):
        pytest_timeout.dump_stacks = show_where_everybody_is
        writer = create_terminal_writer(config, sys.__stderr__)
        config.get_terminal_writer = lambda: writer  # type: ignore[method-assign]
        return
    last_words = LastWords()
    config.pluginmanager.register(last_words)

    def dump_stacks(terminal: TerminalWriter) -> None:
        """Whoever reads only the end, which comes at once, finds the names there."""
        show_where_everybody_is(terminal)
        for line in last_words.lines():
            terminal.line(line)

    pytest_timeout.dump_stacks = dump_stacks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: piece_of(item.nodeid) != SPARK_SESSION)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByPiece | None:
    return ByPiece(config, log) if config.getoption("dist") == "loadfile" else None


def show_where_everybody_is(terminal: TerminalWriter) -> None:
    """The threads, the test's own first, then the tasks of all loops; of each the innermost calls, innermost first.

    pytest-timeout's own list begins with the newest thread and, of that, with the frames that say least; and it knows
    no tasks, which is where brokers wait.
    """
    terminal.line(f"in {os.environ.get('PYTEST_CURRENT_TEST', 'no test')}")
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    for ident in sorted(frames, key=lambda ident: ident != threading.main_thread().ident):
        terminal.sep("~", title=f"thread {names.get(ident, '<unknown>')}")
        terminal.write("".join(_innermost_first(traceback.extract_stack(frames[ident]))))
    for task in gc.get_objects():
        if isinstance(task, asyncio.Task) and not task.done():
            terminal.sep("~", title=f"task {task.get_name()}")
            terminal.write("".join(_innermost_first(traceback.StackSummary.extract(_awaiting(task)))))


def _innermost_first(stack: traceback.StackSummary) -> list[str]:
    return traceback.format_list(list(reversed(stack))[:FRAMES_SHOWN])


def _awaiting(task: asyncio.Task[object]) -> Iterator[tuple[FrameType, int]]:
    """The coroutines of a task, from the outermost to the one that waits; `Task.get_stack` knows the first alone."""
    waiting: Any = task.get_coro()
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "ag_frame", None)
        if frame is not None:
            yield frame, frame.f_lineno
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "ag_await", None)
