from __future__ import annotations

import subprocess
import sys

import pytest

PAGE_FAULTS = """
import resource, sys
from millrace.cli.serve import keep_freed_memory

if not keep_freed_memory():
    sys.exit("no mallopt")
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    batches = [b"x" * 256 * 1024 for _ in range(8)]
    del batches
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 100 * 8 * 256 // 4


def test_memory_of_batches_is_used_again() -> None:
    """In a process of its own: the setting is the process's, for good."""
    done = subprocess.run([sys.executable, "-c", PAGE_FAULTS], capture_output=True, text=True, check=False)
    if "no mallopt" in done.stderr:
        pytest.skip("this C library has no mallopt")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < PAGES // 20
