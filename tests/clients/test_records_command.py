"""`millrace records delete` against running brokers: what goes, what is asked, what stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from clients.test_command_line import CommandLine
from millrace.testing import Cluster
from support.terminal import Terminal


@pytest.fixture
def run(capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path, cluster: Cluster) -> CommandLine:
    return CommandLine(cluster.bootstrap_servers, capsysbinary, tmp_path / "stdin")


@pytest.fixture
def topic(run: CommandLine, fresh: Callable[[str], str]) -> str:
    """Three hours, two hours and an hour ago in partition 0, one record in partition 1."""
    name = fresh("cli-records")
    run.text("topics", "create", name, "--partitions", "2")
    for ago in ("3h ago", "2h ago", "1h ago"):
        run.raw("produce", name, "--timestamp", ago, "--partition", "0", stdin=ago.encode())
    run.raw("produce", name, "--timestamp", "3h ago", "--partition", "1", stdin=b"other")
    return name


def left(run: CommandLine, topic: str) -> list[str]:
    return sorted(run.text("consume", topic, "--from-beginning").splitlines())


def test_before_an_offset(run: CommandLine, topic: str) -> None:
    out = run.text("records", "delete", topic, "--before-offset", "2", "--partition", "0", "--yes")
    assert out.splitlines() == [
        topic,
        "PARTITION  START  END  NEW START  RECORDS",
        "        0      0    3          2        2",
        f"deleted 2 records of {topic}",
    ]
    assert left(run, topic) == ["1h ago", "other"]
    out, err = run.raw("records", "delete", topic, "--before-offset", "1", "--partition", "0", "--yes")
    assert (out, err) == (b"", f"{topic} has no such records\n")


def test_before_a_time(run: CommandLine, topic: str) -> None:
    outcome = run.json("records", "delete", topic, "--before-time", "90m ago", "--yes")
    assert outcome == {
        "topic": topic,
        "partitions": [
            {"partition": 0, "from": 0, "to": 2, "records": 2},
            {"partition": 1, "from": 0, "to": 1, "records": 1},
        ],
    }
    assert left(run, topic) == ["1h ago"]


def test_all(run: CommandLine, topic: str) -> None:
    assert f"deleted 4 records of {topic}" in run.text("records", "delete", topic, "--all", "--yes")
    assert left(run, topic) == []
    run.raw("produce", topic, "--partition", "0", stdin=b"next\n")
    assert run.text("consume", topic, "--from-beginning", "--offsets") == "0\t3\tnext\n"


def test_an_offset_after_the_end_deletes_what_is_there(run: CommandLine, topic: str) -> None:
    outcome = run.json("records", "delete", topic, "--before-offset", "99", "--yes")
    assert [one["to"] for one in outcome["partitions"]] == [3, 1]


def test_it_asks(run: CommandLine, topic: str) -> None:
    assert "say --yes" in run.error("records", "delete", topic, "--all")
    env = {"MILLRACE_BOOTSTRAP": run.bootstrap}
    with Terminal("records", "delete", topic, "--all", env=env) as terminal:
        terminal.wait_for(f"Delete 4 records of {topic} for good? [y/N]:")
        terminal.type("n\n")
        assert terminal.wait() == 1
    assert len(left(run, topic)) == 4
    with Terminal("records", "delete", topic, "--before-offset", "1", env=env) as terminal:
        terminal.wait_for(f"Delete 2 records of {topic} for good? [y/N]:")
        terminal.type("y\n")
        assert terminal.wait() == 0
    assert left(run, topic) == ["1h ago", "2h ago"]


def test_what_it_refuses(run: CommandLine, topic: str, fresh: Callable[[str], str]) -> None:
    assert "what should go?" in run.error("records", "delete", topic, exit_code=2)
    words = ("--all", "--before-offset", "3")
    assert "exclude each other" in run.error("records", "delete", topic, *words, exit_code=2)
    assert "has no partition 7" in run.error("records", "delete", topic, "--all", "--partition", "7")
    assert "there is no topic" in run.error("records", "delete", f"{topic}-x", "--all")
    compacted = fresh("cli-compacted")
    run.text("topics", "create", compacted, "--config", "cleanup.policy=compact")
    run.raw("produce", compacted, "--key", "k", stdin=b"v")
    out, err = run.raw("records", "delete", compacted, "--all", "--yes", "--json", exit_code=1)
    assert f"millrace: error: {compacted}-0: " in err
    assert "POLICY_VIOLATION" in json.loads(out)["partitions"][0]["error"]
    assert left(run, compacted) == ["v"]
