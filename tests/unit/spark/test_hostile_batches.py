"""Mutated batches: the compiled decoder stays inside its buffers and agrees with its Python twin.

Runs for about five seconds; MILLRACE_FUZZ_SECONDS gives it longer, MILLRACE_FUZZ_SEED another start.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
COUNT = int(float(os.environ.get("MILLRACE_FUZZ_SECONDS", "5")) * 1000)
"""By number, so that a run can be repeated: about a thousand in a second."""


@pytest.mark.fuzz
def test_kernels_and_twin_agree_between_guard_pages() -> None:
    seed = os.environ.get("MILLRACE_FUZZ_SEED", "1")
    done = subprocess.run(
        [sys.executable, "-m", "support.hostile_batches", seed, str(COUNT)],
        cwd=TESTS, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-4000:]}"
    total, _, refused, _ = done.stdout.split()
    assert int(total) == COUNT
    assert COUNT // 4 < int(refused) < COUNT * 3 // 4
