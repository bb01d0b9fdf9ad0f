"""`millrace groups`: all of them, offsets in files and back, offsets forgotten."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Consumer

from clients.test_command_line import CommandLine
from millrace.testing import Cluster


@pytest.fixture
def run(cluster: Cluster, capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> CommandLine:
    return CommandLine(cluster.bootstrap_servers, capsysbinary, tmp_path / "stdin")


@pytest.fixture
def topic(run: CommandLine, fresh: Callable[[str], str]) -> str:
    """Two partitions of three records."""
    name = fresh("cli-offsets")
    run.text("topics", "create", name, "--partitions", "2")
    for partition in ("0", "1"):
        run.text("produce", name, "--partition", partition, stdin=b"1\n2\n3\n")
    return name


@pytest.fixture
def group(run: CommandLine, topic: str, fresh: Callable[[str], str]) -> str:
    """Has read all of the topic, and has gone."""
    name = fresh("cli-readers")
    run.text("consume", topic, "--group", name, "--from-beginning", "--max", "6")
    return name


def committed(run: CommandLine, group: str) -> dict[tuple[str, int], int]:
    (described,) = run.json("groups", "describe", group)
    return {(one["topic"], one["partition"]): one["committed"] for one in described["partitions"]}


def test_every_group_of_every_type(run: CommandLine, topic: str, group: str, fresh: Callable[[str], str]) -> None:
    queue, modern = fresh("cli-a-queue"), fresh("cli-modern")
    run.text("consume", topic, "--queue", queue, "--from-beginning", "--max", "1")
    run.text("consume", topic, "--group", modern, "--from-beginning", "--max", "1", "-X", "group.protocol=consumer")
    described = {one["group"]: one for one in run.json("groups", "describe", "--all")}
    assert {name: described[name]["type"] for name in (group, queue, modern)} == {
        group: "classic",
        queue: "share",
        modern: "consumer",
    }
    assert described.keys() == {one["group"] for one in run.json("groups", "list")}
    text = run.text("groups", "describe", "--all")
    assert all(f"{name}  state=" in text for name in (group, queue, modern))
    assert "name them, or say --all" in run.error("groups", "describe", exit_code=2)
    assert "name them, or say --all" in run.error("groups", "describe", group, "--all", exit_code=2)


def test_the_line_above_the_table(run: CommandLine, group: str) -> None:
    assert run.text("groups", "describe", group).splitlines()[0] == f"{group}  state=empty type=classic members=0 lag=0"


def test_offsets_go_through_a_file(run: CommandLine, topic: str, group: str, tmp_path: Path) -> None:
    text = run.text("groups", "export", group)
    assert text == f"{topic},0,3\n{topic},1,3\n"
    file = tmp_path / "offsets.csv"
    file.write_text(f"{topic},0,1\n")
    plan = run.json("groups", "import", group, file, "--dry-run")
    assert plan == {
        "group": group,
        "executed": False,
        "partitions": [{"topic": topic, "partition": 0, "from": 3, "to": 1}],
    }
    assert committed(run, group) == {(topic, 0): 3, (topic, 1): 3}
    assert "say --yes" in run.error("groups", "import", group, file)
    assert committed(run, group) == {(topic, 0): 3, (topic, 1): 3}
    assert run.raw("groups", "import", group, file, "--yes")[1] == "done\n"
    assert committed(run, group) == {(topic, 0): 1, (topic, 1): 3}
    assert run.json("groups", "import", group, "-", "--yes", stdin=text.encode())["executed"]
    assert committed(run, group) == {(topic, 0): 3, (topic, 1): 3}


def test_a_group_is_copied_by_json(run: CommandLine, topic: str, group: str, fresh: Callable[[str], str]) -> None:
    copy = fresh("cli-copy")
    exported = run.json("groups", "export", group)
    assert exported == {
        "group": group,
        "offsets": [{"topic": topic, "partition": index, "offset": 3} for index in (0, 1)],
    }
    run.text("groups", "import", copy, "-", "--yes", stdin=json.dumps(exported["offsets"]).encode())
    assert committed(run, copy) == committed(run, group)


def test_an_import_that_does_not_fit(run: CommandLine, topic: str, group: str, fresh: Callable[[str], str]) -> None:
    def error(text: str) -> str:
        return run.error("groups", "import", group, "-", "--yes", stdin=text.encode())

    assert "has no partition '7'" in error(f"{topic},7,0")
    assert "there is no topic 'nowhere-near'" in error("nowhere-near,0,0")
    assert "line 1: not topic,partition,offset" in error("nonsense")
    _, err = run.raw("groups", "import", group, "-", "--yes", stdin=f"{topic},0,99".encode())
    assert f"{topic}-0: 99 is outside of the log, 3 is nearest" in err
    assert committed(run, group)[topic, 0] == 3
    queue = fresh("cli-a-queue")
    run.text("consume", topic, "--queue", queue, "--from-beginning", "--max", "1")
    assert "is a queue" in run.error("groups", "import", queue, "-", "--yes", stdin=f"{topic},0,0".encode())
    assert "is a queue" in run.error("groups", "export", queue)
    assert "there is no group" in run.error("groups", "export", fresh("cli-nobody"))


def test_offsets_are_forgotten(run: CommandLine, topic: str, group: str) -> None:
    assert "say --yes" in run.error("groups", "delete-offsets", group, "--topic", topic)
    deleted = run.json("groups", "delete-offsets", group, "--topic", topic, "--partition", "1", "--yes")
    assert deleted == {
        "group": group,
        "partitions": [{"topic": topic, "partition": 1, "offset": 3, "result": "deleted"}],
    }
    assert committed(run, group) == {(topic, 0): 3}
    again = run.error("groups", "delete-offsets", group, "--topic", f"{topic}:1", "--yes")
    assert f"has committed nothing for {topic}:1" in again
    assert "deleted" in run.text("groups", "delete-offsets", group, "--topic", topic, "--yes")
    assert "has no partition" in run.error("groups", "delete-offsets", group, "-t", topic, "-p", "7", "--yes")
    assert "say --topic" in run.error("groups", "delete-offsets", group, "--yes", exit_code=2)
    both = ("-t", topic, "-t", "another", "-p", "1")
    assert "one --topic" in run.error("groups", "delete-offsets", group, *both, "--yes", exit_code=2)


def test_what_members_read_is_not_forgotten(run: CommandLine, topic: str, group: str) -> None:
    consumer = Consumer({"bootstrap.servers": run.bootstrap, "group.id": group})
    consumer.subscribe([topic])
    try:
        while len(consumer.assignment()) < 2:
            consumer.poll(0.1)
        _, err = run.raw("groups", "delete-offsets", group, "--topic", topic, "--yes", exit_code=1)
        assert err.count("a running member reads the topic (GROUP_SUBSCRIBED_TO_TOPIC)") == 2
        assert committed(run, group) == {(topic, 0): 3, (topic, 1): 3}
        message = run.error("groups", "import", group, "-", "--yes", stdin=f"{topic},0,0".encode())
        assert "running member" in message
    finally:
        consumer.close()
