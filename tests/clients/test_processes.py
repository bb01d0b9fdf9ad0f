"""The command as a process that is interrupted at any moment, or whose streams are closed: at most one line is said."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import millrace
from millrace.testing import Cluster

PACKAGE = Path(millrace.__file__).parent
TIMEOUT_S = 60
ENDED_BY_CTRL_C = {130, -signal.SIGINT}
"""A shell calls both 130."""
FIRST_LINES = {str(PACKAGE / name) for name in ("__init__.py", "__main__.py", "cli/__init__.py")}


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    """Of processes that find a broker."""
    path = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    with Cluster() as cluster:
        cluster.create_topic("orders")
        yield {**os.environ, "PYTHONPATH": path, "MILLRACE_BOOTSTRAP": cluster.bootstrap_servers}


COMMAND = (sys.executable, "-m", "millrace")
WAITING = [
    ("topics", "list"),
    ("topics", "describe", "orders", "--json"),
    ("groups", "list"),
    ("cluster", "describe"),
    ("consume", "orders", "--from-beginning", "--follow"),
    ("consume", "orders", "--queue", "workers"),
    ("produce", "orders"),
]
PRINTING = [
    ("--help",),
    ("topics", "list"),
    ("topics", "describe", "orders", "--json"),
    ("groups", "list"),
    ("cluster", "describe"),
]


def our_frames(stderr: str) -> list[str]:
    """Lines of tracebacks that show code of this program.

    The interpreter takes some 20 ms before it reads the first line of a program, and Ctrl-C is a traceback until then:
    that of `site`, of `runpy`, or of the import of the module in which the program begins.
    """
    return [
        f"{path}:{name}"
        for path, name in re.findall(r'File "([^"]+)", line \d+, in (\S+)', stderr)
        if path.startswith(str(PACKAGE)) and not (path in FIRST_LINES and name == "<module>")
    ]


def interrupt(argv: tuple[str, ...], delay_s: float, environment: dict[str, str]) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*COMMAND, *argv], env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        threading.Event().wait(delay_s)
        process.send_signal(signal.SIGINT)
        # Its stdin stays open: nothing but the signal ends it.
        process.wait(TIMEOUT_S)
        assert process.stderr is not None
        err = process.stderr.read()
    told = f"{argv} after {delay_s:.2f} s: {process.returncode} {err}"
    assert not our_frames(err), told
    if "Traceback" in err or "Fatal Python error" in err:
        return  # the interpreter had not begun with the program
    assert len(err.splitlines()) <= 1, told
    finished = process.returncode == 0  # in time, or by leaving its group, as a consumer that follows does
    assert finished or process.returncode in ENDED_BY_CTRL_C, told


def test_ctrl_c_at_any_moment_of_the_start(environment: dict[str, str]) -> None:
    commands = itertools.cycle(WAITING)
    for hundredths in range(0, 51, 2):
        interrupt(next(commands), hundredths / 100, environment)


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["at-the-end", "at-once"])
@pytest.mark.parametrize("argv", PRINTING, ids=" ".join)
class TestStdoutThatTakesNothing:
    """Nothing was shown, so it is no success; whether it is noticed at the end or with the first letter."""

    @pytest.fixture
    def environment(self, environment: dict[str, str], unbuffered: str) -> dict[str, str]:
        return {**environment, "PYTHONUNBUFFERED": unbuffered}

    def ended(
        self, argv: tuple[str, ...], environment: dict[str, str], stdout: int | None = None, redirection: str = ""
    ) -> str:
        """What it said when it failed."""
        done = subprocess.run(
            ["/bin/sh", "-c", f'"$@" {redirection}', "sh", *COMMAND, *argv],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 1, done.stderr
        return done.stderr

    def test_a_reader_that_has_gone(self, argv: tuple[str, ...], environment: dict[str, str]) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        try:
            assert self.ended(argv, environment, writer) == ""
        finally:
            os.close(writer)

    def test_a_full_disk(self, argv: tuple[str, ...], environment: dict[str, str]) -> None:
        line = r"millrace: error: (standard output: )?No space left on device\n"
        assert re.fullmatch(line, self.ended(argv, environment, redirection=">/dev/full"))

    def test_closed(self, argv: tuple[str, ...], environment: dict[str, str]) -> None:
        line = r"millrace: error: (standard output: )?Bad file descriptor\n"
        assert re.fullmatch(line, self.ended(argv, environment, redirection=">&-"))


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- 2>&-"])
def test_other_streams_that_are_closed(environment: dict[str, str], closed: str) -> None:
    for argv, out in ((("topics", "list", "orders"), "orders"), (("produce", "orders"), "")):
        done = subprocess.run(
            ["/bin/sh", "-c", f'"$@" {closed}', "sh", *COMMAND, *argv],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done
        assert out in done.stdout
        assert "delivered" not in done.stdout
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("way", ["closed", "nobody-reads"])
def test_a_broker_that_cannot_say_that_it_is_ready(environment: dict[str, str], tmp_path: Path, way: str) -> None:
    """It stops again: whoever waits for the line would wait for ever."""
    reader, writer = os.pipe()
    os.close(reader)
    redirection = ">&-" if way == "closed" else ""
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", f'"$@" {redirection}', "sh", *COMMAND, "up", "--port", "0", "--data", str(tmp_path)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    finally:
        os.close(writer)
    assert done.returncode == 1
    assert done.stderr == ("millrace: error: Bad file descriptor\n" if way == "closed" else "")
    assert not list(tmp_path.rglob("pid"))
