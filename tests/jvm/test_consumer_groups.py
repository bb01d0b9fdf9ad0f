"""kafka-consumer-groups: list, describe, reset and delete."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.cli.root import run as run_millrace
from support.kafka_jars import CONSUMER_GROUPS, GROUPS, VERIFIABLE_CONSUMER
from support.kafka_tools import KafkaTools, table
from support.servers import Server


def committed(tools: KafkaTools, group: str) -> dict[int, int]:
    rows = table(tools.run(CONSUMER_GROUPS, "--describe", "--group", group).stdout)
    return {int(row["PARTITION"]): int(row["CURRENT-OFFSET"]) for row in rows}


def test_describe_an_empty_group_with_lag(tools: KafkaTools, topic: str, group: str) -> None:
    tools.create_topic(topic)
    tools.produce(topic, [str(number) for number in range(10)])
    tools.consume(topic, 4, "--group", group, "--from-beginning")
    assert group in tools.run(CONSUMER_GROUPS, "--list").lines
    (row,) = table(tools.run(CONSUMER_GROUPS, "--describe", "--group", group).stdout)
    wanted = {"TOPIC": topic, "PARTITION": "0", "CURRENT-OFFSET": "4", "LOG-END-OFFSET": "10", "LAG": "6"}
    assert wanted.items() <= row.items()
    state = tools.run(CONSUMER_GROUPS, "--describe", "--group", group, "--state").stdout
    assert "Empty" in state
    assert "Classic" in tools.run(GROUPS, "--list").stdout


def test_describe_a_group_at_work(tools: KafkaTools, topic: str, group: str) -> None:
    tools.create_topic(topic, partitions=3)
    with tools.start(VERIFIABLE_CONSUMER, "--topic", topic, "--group-id", group) as member:
        member.wait_for(lambda event: event["name"] == "partitions_assigned" and len(event["partitions"]) == 3)
        (row,) = table(tools.run(CONSUMER_GROUPS, "--describe", "--group", group, "--members").stdout)
        assert row["#PARTITIONS"] == "3"
        assert row["HOST"] == "/127.0.0.1"
        state = tools.run(CONSUMER_GROUPS, "--describe", "--group", group, "--state").stdout
        assert "Stable" in state
        assert "range" in state
        busy = tools.attempt(CONSUMER_GROUPS, "--delete", "--group", group)
        assert "GroupNotEmptyException" in busy.stdout + busy.stderr


def test_reset_offsets(tools: KafkaTools, topic: str, group: str) -> None:
    tools.create_topic(topic)
    tools.produce(topic, [str(number) for number in range(10)])
    tools.consume(topic, 10, "--group", group, "--from-beginning")
    for how, wanted in (
        (("--to-earliest",), 0),
        (("--shift-by", "3"), 3),
        (("--to-offset", "8"), 8),
        (("--to-datetime", "2001-01-01T00:00:00.000"), 0),
        (("--to-latest",), 10),
    ):
        tools.run(CONSUMER_GROUPS, "--reset-offsets", "--group", group, "--topic", topic, *how, "--execute")
        assert committed(tools, group) == {0: wanted}, how


def test_delete_offsets_and_group(tools: KafkaTools, topic: str, group: str) -> None:
    tools.create_topic(topic)
    tools.produce(topic, ["one"])
    tools.consume(topic, 1, "--group", group, "--from-beginning")
    tools.run(CONSUMER_GROUPS, "--delete-offsets", "--group", group, "--topic", topic)
    emptied = tools.attempt(CONSUMER_GROUPS, "--describe", "--group", group)
    assert topic not in emptied.stdout
    # Kafka drops a group together with its last offset, so the group to delete is a fresh one.
    other = f"{group}-2"
    tools.consume(topic, 1, "--group", other, "--from-beginning")
    deleted = tools.run(CONSUMER_GROUPS, "--delete", "--group", other).stdout
    assert "was successful" in deleted
    assert other not in tools.run(CONSUMER_GROUPS, "--list").lines


def test_files_of_offsets_are_swapped_with_millrace(
    tools: KafkaTools, server: Server, topic: str, group: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tools.create_topic(topic)
    tools.produce(topic, [str(number) for number in range(10)])
    tools.consume(topic, 4, "--group", group, "--from-beginning")
    ours, theirs = tmp_path / "ours.csv", tmp_path / "theirs.csv"

    assert run_millrace(["groups", "export", group, "--bootstrap", server.bootstrap]) == 0
    ours.write_text(capsys.readouterr().out)
    reset = ("--reset-offsets", "--group", group)
    tools.run(CONSUMER_GROUPS, *reset, "--topic", topic, "--to-latest", "--execute")
    assert committed(tools, group) == {0: 10}
    tools.run(CONSUMER_GROUPS, *reset, "--from-file", str(ours), "--execute")
    assert committed(tools, group) == {0: 4}

    exported = tools.run(CONSUMER_GROUPS, *reset, "--topic", topic, "--to-offset", "7", "--export", "--dry-run")
    theirs.write_text(exported.stdout)
    assert run_millrace(["groups", "import", group, str(theirs), "--yes", "--bootstrap", server.bootstrap]) == 0
    assert committed(tools, group) == {0: 7}
