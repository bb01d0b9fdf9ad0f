"""The examples do what they say."""

from __future__ import annotations

import os
import re
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


def error_of(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout == ""
    return done.stderr


@pytest.fixture
def bootstrap() -> Iterator[str]:
    """A broker without the topics of other tests."""
    with Cluster() as cluster:
        yield cluster.bootstrap_servers


def test_produce_and_consume(bootstrap: str) -> None:
    for first in (0, 3):  # as often as one likes
        lines = output_of([sys.executable, str(EXAMPLES / "produce_and_consume.py"), bootstrap]).splitlines()
        names = enumerate(("Ada", "Grace", "Edsger"), first)
        assert lines == [f"postcards[0]@{offset}: hello, {name}" for offset, name in names]


def test_consumer_group(bootstrap: str) -> None:
    for _ in range(2):
        output = output_of([sys.executable, str(EXAMPLES / "consumer_group.py"), bootstrap])
        assert output.startswith("300 shipments handled: {'member-")


def test_a_consumer_group_that_is_a_queue_is_told_at_once(bootstrap: str) -> None:
    millrace = [sys.executable, "-m", "millrace"]
    output_of([*millrace, "topics", "create", "shipments", "--partitions", "6"], MILLRACE_BOOTSTRAP=bootstrap)
    queue = ["consume", "shipments", "--queue", "dispatchers", "--timeout", "0.1"]
    output_of([*millrace, *queue], MILLRACE_BOOTSTRAP=bootstrap)
    error = error_of([sys.executable, str(EXAMPLES / "consumer_group.py"), bootstrap])
    assert "it did not work: InconsistentGroupProtocolError()" in error.splitlines()
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("example", "module", "package"),
    [
        ("produce_and_consume.py", "confluent_kafka", "confluent-kafka"),
        ("consumer_group.py", "aiokafka", "aiokafka"),
    ],
)
def test_what_is_missing_is_named(example: str, module: str, package: str) -> None:
    """-S: without the packages that are installed."""
    error = error_of([sys.executable, "-S", str(EXAMPLES / example)])
    assert error == f"there is no module {module}; this example needs: pip install {package}\n"
    assert package in (EXAMPLES / "README.md").read_text()


def test_names_are_used_once() -> None:
    """No page or other example has the topics and groups of an example: whoever follows them all meets no surprise."""
    names = {
        "produce_and_consume.py": ("postcards", "postcard-readers"),
        "consumer_group.py": ("shipments", "dispatchers"),
        "shell.sh": ("pages", "page-readers"),
        "declarative": ("web-orders", "large-web-orders"),
    }
    texts = {path: path.read_text() for path in EXAMPLES.rglob("*") if path.suffix in {".py", ".sh", ".yml"}}
    texts |= {path: path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
    for example, mine in names.items():
        for name in mine:
            said = re.compile(
                rf"(produce|consume|create|subscribe|--group|--queue|TOPIC|GROUP|topic|group.id)\b[^\w\n]*{name}\b"
            )
            found = {path for path, text in texts.items() if said.search(text)}
            assert found, name
            assert all(example in path.parts for path in found), (name, found)


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
