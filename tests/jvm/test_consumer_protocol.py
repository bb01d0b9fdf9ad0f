"""The consumer protocol of KIP-848 with Java's consumer: reading, rebalancing, a live group that changes protocol."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from support.kafka_jars import CONSUMER_GROUPS, DUMP_LOG, GROUPS, VERIFIABLE_CONSUMER, KafkaJars
from support.kafka_tools import KafkaTools, LiveTool
from support.servers import Server

NEW = ("--group-protocol", "consumer")
CLASSIC = ("--group-protocol", "classic", "--assignment-strategy",
           "org.apache.kafka.clients.consumer.CooperativeStickyAssignor")  # fmt: skip


def rows(text: str) -> list[dict[str, str]]:
    lines = [line.split() for line in text.splitlines() if line.strip()]
    start = next(number for number, words in enumerate(lines) if words[0] == "GROUP")
    return [dict(zip(lines[start], words, strict=False)) for words in lines[start + 1 :]]


def kind_of(tools: KafkaTools, group: str) -> str:
    listed = [line.split() for line in tools.run(GROUPS, "--list").lines]
    return next(words[1] for words in listed if words and words[0] == group)


def member(tools: KafkaTools, topic: str, group: str, *options: str) -> LiveTool:
    return tools.start(VERIFIABLE_CONSUMER, "--topic", topic, "--group-id", group, *options)


def assigned(count: int) -> Callable[[dict[str, Any]], bool]:
    return lambda event: event["name"] == "partitions_assigned" and len(event["partitions"]) >= count


def test_the_console_consumer_reads_and_commits(tools: KafkaTools, topic: str, group: str) -> None:
    tools.create_topic(topic, partitions=2)
    tools.produce(topic, [str(number) for number in range(10)])
    protocol = ("--command-property", "group.protocol=consumer")
    read = tools.consume(topic, 10, "--group", group, "--from-beginning", *protocol)
    assert sorted(read, key=int) == [str(number) for number in range(10)]
    assert kind_of(tools, group) == "Consumer"
    described = rows(tools.run(CONSUMER_GROUPS, "--describe", "--group", group).stdout)
    assert sum(int(row["CURRENT-OFFSET"]) for row in described) == 10
    assert "Empty" in tools.run(CONSUMER_GROUPS, "--describe", "--group", group, "--state").stdout
    tools.produce(topic, ["more"])
    assert tools.consume(topic, 1, "--group", group, *protocol) == ["more"]


def test_two_members_share_and_are_described(tools: KafkaTools, topic: str, group: str) -> None:
    tools.create_topic(topic, partitions=4)
    with member(tools, topic, group, *NEW) as first:
        first.wait_for(assigned(4))
        with member(tools, topic, group, *NEW, "--group-remote-assignor", "uniform") as second:
            second.wait_for(assigned(1))
            first.wait_for(lambda event: event["name"] == "partitions_revoked")
            members = rows(tools.run(CONSUMER_GROUPS, "--describe", "--group", group, "--members").stdout)
            assert sorted(row["#PARTITIONS"] for row in members) == ["2", "2"]
            state = tools.run(CONSUMER_GROUPS, "--describe", "--group", group, "--state").stdout
            assert "Stable" in state
            assert "uniform" in state
            assert kind_of(tools, group) == "Consumer"
            busy = tools.attempt(CONSUMER_GROUPS, "--delete", "--group", group)
            assert "GroupNotEmptyException" in busy.stdout + busy.stderr
    assert "was successful" in tools.run(CONSUMER_GROUPS, "--delete", "--group", group).stdout


def test_a_live_group_changes_its_protocol_and_back(tools: KafkaTools, topic: str, group: str) -> None:
    tools.create_topic(topic, partitions=4)
    with member(tools, topic, group, *CLASSIC) as old:
        old.wait_for(assigned(4))
        assert kind_of(tools, group) == "Classic"
        with member(tools, topic, group, *NEW) as new:
            new.wait_for(assigned(2))
            assert kind_of(tools, group) == "Consumer"
            # What the two do not share out between them would be read by nobody: records reach both.
            tools.produce(topic, [f"{number}:{number}" for number in range(40)], "--reader-property", "parse.key=true",
                          "--reader-property", "key.separator=:")  # fmt: skip
            old.wait_for(lambda event: event["name"] == "records_consumed")
            new.wait_for(lambda event: event["name"] == "records_consumed")
        old.wait_for(assigned(2))
        assert kind_of(tools, group) == "Classic"


def test_kafka_reads_what_is_kept_of_a_group(
    tools: KafkaTools, jars: KafkaJars, server: Server, topic: str, group: str
) -> None:
    tools.create_topic(topic, partitions=2)
    with member(tools, topic, group, *CLASSIC) as old:
        old.wait_for(assigned(2))
        with member(tools, topic, group, *NEW) as new:
            new.wait_for(assigned(1))
            kept = ",".join(str(each) for each in sorted(server.home.rglob("__consumer_offsets-*/*.log")))
            done = jars.run(DUMP_LOG, "--offsets-decoder", "--deep-iteration", "--files", kept)
    assert done.status == 0, done.stderr
    kinds: dict[int, list[Any]] = {}
    for line in done.stdout.splitlines():
        found = re.search(r" key: (\{.*\}) payload: (\{.*\}|<NULL>|null)$", line)
        if found is None:
            continue
        key = json.loads(found[1])
        if key["data"].get("groupId") == group:
            payload = None if found[2].startswith(("<", "n")) else json.loads(found[2])
            kinds.setdefault(int(key["type"]), []).append(payload)
    assert {3, 5, 6, 7, 8} <= kinds.keys(), "epoch, members, targets and what they own"
    infos = [payload["data"] for payload in kinds[5] if payload is not None]
    assert all(info["subscribedTopicNames"] == [topic] for info in infos)
    classic = [info["classicMemberMetadata"] for info in infos if "classicMemberMetadata" in info]
    assert classic[0]["supportedProtocols"][0]["name"] == "cooperative-sticky"
    held = [payload["data"] for payload in kinds[8] if payload is not None]
    assert any("assignmentEpochs" in own for each in held for own in each["assignedPartitions"])
