"""A run that fails ends with the names of the tests that did, also where a time limit or a signal ended it.

Of a test that exceeds its time limit it is seen where it was, in a process of pytest-xdist, too, and the run ends then.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

ROOT = Path(__file__).parents[2]
SLOW = """
import asyncio
import threading
import time

async def that_never_comes():
    await asyncio.Event().wait()

def broker():
    asyncio.run(that_never_comes())

def test_slow():
    threading.Thread(target=broker, daemon=True).start()
    where_it_was()

def where_it_was():
    time.sleep(60)
"""
NO_PATIENCE = """

import xdist.workermanage
xdist.workermanage.NodeManager.EXIT_TIMEOUT = 1  # instead of ten seconds for a process that will not end
"""
REPORTED = """

@pytest.hookimpl(trylast=True)
def pytest_runtest_logstart(location):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        open(location[2], "w").close()

@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        open(report.outcome, "w").close()
"""
QUICK = """
def test_one():
    pass

def test_two():
    pass
"""


def as_make_does(home: Path, target: str = "test", limit_s: int = 3, hooks: str = "") -> Popen[str]:
    """The tests of a folder, distributed as `make` distributes its own.

    Each has a few seconds: an empty test on a busy machine must not be the one that exceeds them.
    """
    (home / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text() + NO_PATIENCE + hooks)
    (home / "pytest.ini").write_text(
        f"[pytest]\nasyncio_default_fixture_loop_scope = function\npythonpath = {ROOT / 'tests'}\n"
    )
    makefile = (ROOT / "Makefile").read_text()
    (words,) = re.findall(rf"^{target}: .*\n\t\$\(PYTEST\) .* (-n \d.*) \$\(ARGS\)", makefile, re.MULTILINE)
    limit = ["--timeout", str(limit_s), "--timeout-method", "thread", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return Popen(
        [sys.executable, "-m", "pytest", *words.split(), *limit],
        cwd=home, env=environment, stdout=PIPE, stderr=PIPE, text=True,
    )  # fmt: skip


def run_as_make_does(home: Path, target: str = "test") -> subprocess.CompletedProcess[str]:
    with as_make_does(home, target) as running:
        stdout, stderr = running.communicate(timeout=60)
    return subprocess.CompletedProcess(running.args, running.returncode, stdout, stderr)


def test_the_stack_is_shown_and_the_run_ends(tmp_path: Path) -> None:
    (tmp_path / "test_slow.py").write_text(SLOW)
    for number in range(6):  # with these done, pytest-xdist's way of replacing a process waits for ever
        (tmp_path / f"test_quick_{number}.py").write_text(QUICK)
    done = run_as_make_does(tmp_path)
    assert "crashed while running 'test_slow.py::test_slow'" in done.stdout
    shown = [line for line in done.stderr.splitlines() if line.startswith(("in ", "  File", "~"))]
    assert shown[0].startswith("in test_slow.py::test_slow")
    assert "thread MainThread" in shown[1]
    assert shown[2].endswith("in where_it_was"), done.stdout + done.stderr
    assert any(line.endswith("in that_never_comes") for line in shown)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "failed: test_slow.py::test_slow"


def test_where_one_process_runs_all_its_last_lines_have_the_names(tmp_path: Path) -> None:
    (tmp_path / "test_bad.py").write_text("def test_bad():\n    assert False\n")
    (tmp_path / "test_slow.py").write_text(SLOW)
    done = run_as_make_does(tmp_path, "test-cluster")
    assert done.returncode == 1
    *_, failed, cut_off, _ = done.stdout.splitlines()  # the last one says that it was the time limit
    assert failed == "failed: test_bad.py::test_bad"
    assert cut_off == "had not ended: test_slow.py::test_slow"


@pytest.mark.parametrize("target", ["test", "test-cluster"])
def test_a_run_that_is_ended_from_outside_says_who_failed_and_who_was_running(tmp_path: Path, target: str) -> None:
    (tmp_path / "test_bad.py").write_text("def test_bad():\n    assert False\n")
    (tmp_path / "test_slow.py").write_text(SLOW)
    with as_make_does(tmp_path, target, limit_s=60, hooks=REPORTED) as running:
        while not all((tmp_path / name).exists() for name in ("failed", "test_slow")):
            assert running.poll() is None
            time.sleep(0.05)
        running.terminate()
        stdout, _ = running.communicate(timeout=60)
    assert running.returncode == pytest.ExitCode.INTERRUPTED
    assert stdout.splitlines()[-2:] == ["failed: test_bad.py::test_bad", "had not ended: test_slow.py::test_slow"]
