"""The consumer protocol of KIP-848 with Java's consumer: reading, rebalancing, a live group that changes protocol.

And `kafka-consumer-groups` on such groups: what it lists and describes, and what it may change while they work.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from support.kafka_jars import CONSUMER_GROUPS, DUMP_LOG, GROUPS, VERIFIABLE_CONSUMER, KafkaJars
from support.kafka_tools import KafkaTools, LiveTool, table
from support.servers import Server

NEW = ("--group-protocol", "consumer")
CLASSIC = ("--group-protocol", "classic", "--assignment-strategy",
           "org.apache.kafka.clients.consumer.CooperativeStickyAssignor")  # fmt: skip


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
    described = table(tools.run(CONSUMER_GROUPS, "--describe", "--group", group).stdout)
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
            members = table(tools.run(CONSUMER_GROUPS, "--describe", "--group", group, "--members").stdout)
            assert sorted(row["#PARTITIONS"] for row in members) == ["2", "2"]
            state = tools.run(CONSUMER_GROUPS, "--describe", "--group", group, "--state").stdout
            assert "Stable" in state
            assert "uniform" in state
            assert kind_of(tools, group) == "Consumer"
            busy = tools.attempt(CONSUMER_GROUPS, "--delete", "--group", group)
            assert "GroupNotEmptyException" in busy.stdout + busy.stderr
    assert "was successful" in tools.run(CONSUMER_GROUPS, "--delete", "--group", group).stdout


def listed(tools: KafkaTools, *options: str) -> dict[str, dict[str, str]]:
    return {row["GROUP"]: row for row in table(tools.run(CONSUMER_GROUPS, "--list", *options).stdout)}


def test_groups_are_listed_by_type_and_state(tools: KafkaTools, topic: str, group: str) -> None:
    tools.create_topic(topic)
    tools.produce(topic, ["one"])
    old = f"{group}-classic"
    tools.consume(topic, 1, "--group", old, "--from-beginning")
    with member(tools, topic, group, *NEW) as at_work:
        at_work.wait_for(assigned(1))
        both = listed(tools, "--type", "--state")
        assert both[group] == {"GROUP": group, "TYPE": "Consumer", "STATE": "Stable"}
        assert both[old] == {"GROUP": old, "TYPE": "Classic", "STATE": "Empty"}
        new_ones, old_ones = (listed(tools, "--type", kind) for kind in ("consumer", "classic"))
        assert group in new_ones
        assert old not in new_ones
        assert group not in old_ones
        assert old in old_ones
        stable = listed(tools, "--state", "stable,assigning,reconciling")
        assert group in stable
        assert old not in stable
    assert listed(tools, "--state", "Empty", "--type", "consumer")[group]["STATE"] == "Empty"


def test_members_offsets_and_state_in_detail(tools: KafkaTools, topic: str, group: str) -> None:
    tools.create_topic(topic, partitions=3)
    tools.produce(topic, [str(number) for number in range(9)])
    describe = (CONSUMER_GROUPS, "--describe", "--group", group, "--verbose")
    with member(tools, topic, group, *NEW, "--group-instance-id", "static") as at_work:
        at_work.wait_for(assigned(3))
        at_work.wait_for(lambda event: event["name"] == "offsets_committed" and event["success"])
        (one,) = table(tools.run(*describe, "--members").stdout)
        assert (one["GROUP-INSTANCE-ID"], one["HOST"], one["#PARTITIONS"]) == ("static", "/127.0.0.1", "3")
        assert one["CURRENT-ASSIGNMENT"] == one["TARGET-ASSIGNMENT"] == f"{topic}:0,1,2"
        assert one["CURRENT-EPOCH"] == one["TARGET-EPOCH"]
        (state,) = table(tools.run(*describe, "--state").stdout)
        assert (state["STATE"], state["ASSIGNMENT-STRATEGY"], state["#MEMBERS"]) == ("Stable", "uniform", "1")
        assert state["GROUP-EPOCH"] == state["TARGET-ASSIGNMENT-EPOCH"] == one["CURRENT-EPOCH"]
        offsets = table(tools.run(*describe, "--offsets").stdout)
        assert {row["CONSUMER-ID"] for row in offsets} == {one["CONSUMER-ID"]}
        assert sum(int(row["LOG-END-OFFSET"]) for row in offsets) == 9
    missing = tools.attempt(CONSUMER_GROUPS, "--describe", "--group", f"{group}-ghost")
    assert "GroupIdNotFoundException" in missing.stdout + missing.stderr


def test_offsets_are_reset_and_deleted(tools: KafkaTools, topic: str, group: str) -> None:
    tools.create_topic(topic)
    tools.produce(topic, [str(number) for number in range(10)])
    of_topic = ("--group", group, "--topic", topic)
    with member(tools, topic, group, *NEW, "--reset-policy", "earliest") as at_work:
        at_work.wait_for(lambda event: event["name"] == "offsets_committed" and event["success"])
        busy = tools.attempt(CONSUMER_GROUPS, "--reset-offsets", *of_topic, "--to-earliest", "--execute")
        assert "is inactive, but the current state is" in busy.stdout + busy.stderr
        used = tools.attempt(CONSUMER_GROUPS, "--delete-offsets", *of_topic)
        assert "GroupSubscribedToTopicException" in used.stdout + used.stderr
    for how, wanted in ((("--to-earliest",), 0), (("--shift-by", "3"), 3), (("--to-latest",), 10)):
        tools.run(CONSUMER_GROUPS, "--reset-offsets", *of_topic, *how, "--execute")
        (row,) = table(tools.run(CONSUMER_GROUPS, "--describe", "--group", group).stdout)
        assert int(row["CURRENT-OFFSET"]) == wanted, how
    assert kind_of(tools, group) == "Consumer", "moving its offsets did not make another group of it"
    tools.run(CONSUMER_GROUPS, "--delete-offsets", *of_topic)
    assert topic not in tools.attempt(CONSUMER_GROUPS, "--describe", "--group", group).stdout
    other = f"{group}-2"
    tools.consume(topic, 1, "--group", other, "--from-beginning", "--command-property", "group.protocol=consumer")
    assert "was successful" in tools.run(CONSUMER_GROUPS, "--delete", "--group", other).stdout
    assert other not in tools.run(CONSUMER_GROUPS, "--list").lines


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
