"""Every command and program of the pages, run in the order in which they are read; the rules are in `support.pages`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.read_pages import NOTHING_RUN

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.pages
@pytest.mark.timeout(1800)  # demos and pipelines start Spark a dozen times
@pytest.mark.parametrize(
    "pages",
    [
        "README.md docs/quickstart.md",  # in one folder: who has read the first goes on with the second
        "docs/operations.md",
        "docs/queues.md",
        "docs/groups.md",
        "docs/client-telemetry.md",
        "docs/compaction.md",
        "docs/pipelines.md",
        "docs/security.md",
        "docs/coming-from-kafka.md",
        "docs/deployment.md",
        "docs/monitoring.md",
    ],
)
def test_the_pages_do_what_they_say(pages: str) -> None:
    command = [sys.executable, "-m", "support.read_pages", *pages.split()]
    done = subprocess.run(command, cwd=ROOT / "tests", stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)  # what was skipped, and why, is part of the result: `make test-pages` shows it
    if done.returncode == NOTHING_RUN:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout[done.stdout.index("FAILED") :] if "FAILED" in done.stdout else done.stdout
