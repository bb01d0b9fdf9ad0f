"""What is seen of a test that exceeds its time limit in a process of pytest-xdist, and that the run ends then."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

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
QUICK = """
def test_one():
    pass

def test_two():
    pass
"""


def run_as_make_does(home: Path) -> subprocess.CompletedProcess[str]:
    """The tests of a folder, distributed as `make test` distributes its own.

    Each has a few seconds: an empty test on a busy machine must not be the one that exceeds them.
    """
    shutil.copy(ROOT / "tests" / "conftest.py", home)
    (home / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    makefile = (ROOT / "Makefile").read_text()
    (words,) = re.findall(r"\$\(PYTEST\) .* (-n 2 .*) \$\(ARGS\)", makefile)
    limit = ["--timeout", "3", "--timeout-method", "thread", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *words.split(), *limit],
        cwd=home, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


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
