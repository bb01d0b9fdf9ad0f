"""The examples do what they say."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.testing import Cluster

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}


def output_of(command: list[str], **variables: str) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env={**ENVIRONMENT, **variables}, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def bootstrap() -> Iterator[str]:
    """A broker without the topics of other tests."""
    with Cluster() as cluster:
        yield cluster.bootstrap_servers


def test_produce_and_consume(bootstrap: str) -> None:
    lines = output_of([sys.executable, str(EXAMPLES / "produce_and_consume.py"), bootstrap]).splitlines()
    assert lines == [f"greetings[0]@{number}: hello, {name}" for number, name in enumerate(("Ada", "Grace", "Edsger"))]


def test_consumer_group(bootstrap: str) -> None:
    output = output_of([sys.executable, str(EXAMPLES / "consumer_group.py"), bootstrap])
    assert output.startswith("300 orders handled: {'member-")


def test_shell(bootstrap: str, tmp_path: Path) -> None:
    command = tmp_path / "millrace"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m millrace "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    output = output_of(["/bin/sh", str(EXAMPLES / "shell.sh")], PATH=path, MILLRACE_BOOTSTRAP=bootstrap)
    assert "ada -> /checkout (source=shell)" in output
    assert "pages-copy" in output.splitlines()[-1]


def test_in_tests() -> None:
    plugin = ["-p", "millrace.testing.plugin", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", *plugin, "-c", os.devnull, str(EXAMPLES / "in_tests")]
    assert "1 passed" in output_of(command, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
