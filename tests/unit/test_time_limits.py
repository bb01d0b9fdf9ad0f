"""What is seen of a test that exceeds its time limit in a process of pytest-xdist."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

SLOW = """
import time

def test_slow():
    where_it_was()

def where_it_was():
    time.sleep(60)
"""


def test_the_stack_is_shown(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path)
    (tmp_path / "test_slow.py").write_text(SLOW)
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    words = ["-n", "1", "--timeout", "1", "--timeout-method", "thread", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "test_slow.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "crashed while running 'test_slow.py::test_slow'" in done.stdout
    assert "in where_it_was" in done.stderr, done.stdout + done.stderr
