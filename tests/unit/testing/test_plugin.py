"""The pytest plugin, in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[3] / "src"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])}

TESTS = """
def test_one(millrace, seen=[]):
    millrace.create_topic("orders")
    print("ADDRESS", millrace.bootstrap_servers)

def test_two(millrace):
    print("ADDRESS", millrace.bootstrap_servers)
"""


def pytest_in(directory: Path, ini: str, *argv: str) -> subprocess.CompletedProcess[str]:
    (directory / "test_them.py").write_text(TESTS)
    (directory / "pytest.ini").write_text(f"[pytest]\nfilterwarnings = error\n{ini}")
    command = [sys.executable, "-m", "pytest", "-p", "millrace.testing.plugin", "-p", "no:cacheprovider", "-s", *argv]
    env = {**ENVIRONMENT, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=False)


def addresses(output: str) -> list[str]:
    return [line.split("ADDRESS ")[1] for line in output.splitlines() if "ADDRESS " in line]


def test_each_test_has_a_broker_of_its_own(tmp_path: Path) -> None:
    done = pytest_in(tmp_path, "")
    assert done.returncode == 0, done.stdout
    assert len(addresses(done.stdout)) == 2


def test_a_suite_may_share_one(tmp_path: Path) -> None:
    done = pytest_in(tmp_path, "millrace_scope = session\nmillrace_settings =\n    num.partitions=4\n")
    assert done.returncode == 0, done.stdout
    first, second = addresses(done.stdout)
    assert first == second


@pytest.mark.parametrize(
    ("ini", "told"),
    [
        (
            "millrace_scope = forever",
            "millrace_scope is one of function, class, module, package, session, not 'forever'",
        ),
        ("millrace_settings =\n    num.partitions 4", "millrace_settings wants name=value, not 'num.partitions 4'"),
    ],
)
def test_a_wrong_setting_is_one_line(tmp_path: Path, ini: str, told: str) -> None:
    done = pytest_in(tmp_path, ini + "\n")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert (done.stdout + done.stderr).split("\n") == [f"ERROR: {told}", "", ""]


def test_pytest_starts_without_loading_a_broker(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import sys\n"
        "def pytest_sessionstart(session):\n"
        "    print('LOADED', sorted(n for n in sys.modules if n.startswith('millrace') or n in ('uvloop', 'typer')))\n"
    )
    done = pytest_in(tmp_path, "", "--collect-only")
    assert "LOADED ['millrace', 'millrace.testing', 'millrace.testing.plugin']" in done.stdout
