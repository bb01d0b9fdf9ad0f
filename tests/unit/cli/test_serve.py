from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from millrace.cli.serve import OneLine

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


def test_an_entry_of_the_log_is_one_line_whatever_is_in_it() -> None:
    formatter = OneLine("%(levelname)s %(message)s")
    try:
        raise RuntimeError("no")
    except RuntimeError:
        record = logging.LogRecord("x", logging.INFO, "f", 1, "by %s", ("User:a\nERROR forged\x1b[2J",), sys.exc_info())
    first, *trace = formatter.format(record).splitlines()
    assert first == r"INFO by User:a\nERROR forged\x1b[2J"
    assert trace[-1] == "RuntimeError: no"
    plain = logging.LogRecord("x", logging.INFO, "f", 1, "grün %d", (1,), None)
    assert formatter.format(plain) == "INFO grün 1"
