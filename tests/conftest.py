"""Settings for every test: how much hypothesis tries, the same result for the same change in CI, told time limits."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from _pytest.config import create_terminal_writer
from hypothesis import settings

# No deadline: a busy two-core machine is not a failing property. In CI the examples are the same on every run; a
# developer's runs explore new ones.
settings.register_profile("millrace", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("millrace")

# A shell starts what it puts into the background with Ctrl-C ignored, and children inherit that; commands under test
# are sent Ctrl-C and must hear it, however the tests were started.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """In a worker of pytest-xdist: a test that exceeds its time limit says where it was.

    pytest-timeout writes the stacks of all threads to the terminal and ends the process. A worker's terminal is
    /dev/null, and all that would be seen is "node down: Not properly terminated".
    """
    if hasattr(config, "workerinput"):
        writer = create_terminal_writer(config, sys.__stderr__)
        config.get_terminal_writer = lambda: writer  # type: ignore[method-assign]
