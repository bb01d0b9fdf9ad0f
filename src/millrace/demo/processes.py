"""The demo's own processes: a broker, and the follower that carries log files into a topic.

Both are our command line, started as a user would start it, but in a session of their own: Ctrl-C is for the demo,
which ends them in its order.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from millrace.errors import MillraceError

START_TIMEOUT_S: Final = 20.0
STOP_TIMEOUT_S: Final = 15.0
_READY: Final = "ready bootstrap="


class DemoError(MillraceError):
    """A part of the demo did not start."""


@contextmanager
def broker(data: Path, log_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A broker on a free port, and its address."""
    with _running(log_path, "up", "--port", "0", "--data", str(data)) as process:
        yield process, _address_of(process, log_path)


@contextmanager
def follower(bootstrap: str, topic: str, pattern: str, log_path: Path) -> Iterator[subprocess.Popen[str]]:
    """`millrace produce --follow` on the files that `pattern` names, now or later."""
    arguments = ("produce", topic, "--follow", pattern, "--from-beginning", "--bootstrap", bootstrap)
    with _running(log_path, *arguments) as process:
        yield process


@contextmanager
def _running(log_path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    with log_path.open("w") as log:
        process = subprocess.Popen(  # noqa: S603  # our own command line
            [sys.executable, "-m", "millrace", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        )
    try:
        yield process
    finally:
        process.terminate()  # not Ctrl-C, which is ignored by whoever was started in the background of a script
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _address_of(process: subprocess.Popen[str], log_path: Path) -> str:
    assert process.stdout is not None
    watchdog = threading.Timer(START_TIMEOUT_S, process.kill)
    watchdog.start()
    try:
        line = process.stdout.readline().strip()
    finally:
        watchdog.cancel()
    if not line.startswith(_READY):
        process.wait(START_TIMEOUT_S)
        raise DemoError(f"the broker did not start: {last_line(log_path) or 'no output'}")
    return line.removeprefix(_READY)


def last_line(log_path: Path) -> str:
    lines = log_path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
