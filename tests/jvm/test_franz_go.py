"""Transactions with franz-go, the Go client: a small program of `tests/jvm/franz`, built on first use.

Go and a way to its module proxy are needed for that, and nothing else of this suite needs them: without them these
tests are skipped, with the reason.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from confluent_kafka import Producer

from support.kafka_tools import KafkaTools
from support.servers import Server

SOURCE = Path(__file__).parent / "franz"
BUILD_S = 170
RUN_S = 90


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    go = shutil.which("go")
    if go is None:
        pytest.skip("no go on PATH")
    built = tmp_path_factory.mktemp("franz") / "transactions"
    command = [go, "build", "-mod=readonly", "-o", str(built), "."]
    try:
        done = subprocess.run(command, cwd=SOURCE, capture_output=True, text=True, timeout=BUILD_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"go could not fetch and build franz-go within {BUILD_S} s")
    if done.returncode != 0 and "proxy" in done.stderr:
        pytest.skip(f"go could not fetch franz-go: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return built


def run(program: Path, server: Server, scene: str, count: int, *topics: str) -> list[str]:
    command = [str(program), server.bootstrap, scene, str(count), *topics]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_committed_and_aborted(tools: KafkaTools, server: Server, program: Path, topic: str) -> None:
    tools.create_topic(topic)
    expected = [f"{word}-{number}" for word in ("kept", "last") for number in range(3)]
    assert run(program, server, "ended", 6, topic) == expected


def test_the_older_producer_is_fenced(tools: KafkaTools, server: Server, program: Path, topic: str) -> None:
    tools.create_topic(topic)
    expected = [f"{word}-{number}" for word in ("before", "second") for number in range(3)]
    assert run(program, server, "fenced", 6, topic) == expected


def test_a_group_copies_exactly_once(tools: KafkaTools, server: Server, program: Path, topic: str) -> None:
    tools.create_topic(topic, partitions=2)
    tools.create_topic(f"{topic}-copy", partitions=2)
    producer = Producer({"bootstrap.servers": server.bootstrap, "log_level": 2})
    for number in range(2000):
        producer.produce(topic, str(number), partition=number % 2)
    assert producer.flush(30) == 0
    expected = [str(number) for partition in range(2) for number in range(partition, 2000, 2)]
    assert run(program, server, "copied", 2000, topic, f"{topic}-copy") == expected
