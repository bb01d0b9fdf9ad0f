"""What a run of tests prints last: the name of every test that failed, and of those that an early end has cut off.

Below the last line of pytest's own, so that who keeps nothing but the end of a log has the names. A run may end early
because a test exceeded its time limit, which ends the process, or because somebody sent SIGTERM (`.ci/run` does after
the time of a section), which is taken as Ctrl-C is. Not here: where a test was that exceeded its limit (`conftest`).
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


class LastWords:
    """Listens to reports; one per run, in the process that hears of all tests."""

    def __init__(self) -> None:
        self._failed: dict[str, None] = {}
        self._running: dict[str, None] = {}

    def pytest_sessionstart(self) -> None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = None

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = None

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        print("".join(f"{line}\n" for line in self.lines()), end="", flush=True)

    def lines(self) -> Iterator[str]:
        for name in self._failed:
            yield f"failed: {name}"
        for name in self._running:
            if name not in self._failed:
                yield f"had not ended: {name}"
