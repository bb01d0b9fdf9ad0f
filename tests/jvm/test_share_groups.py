"""Topics as queues (KIP-932) with Java's share consumer, and Kafka's own tools for them."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path

from support.group_configs import set_group_configs
from support.kafka_jars import (
    CONSOLE_SHARE_CONSUMER,
    GROUPS,
    SHARE_CONSUMER_PERFORMANCE,
    SHARE_GROUPS,
    VERIFIABLE_SHARE_CONSUMER,
    KafkaJars,
)
from support.kafka_tools import KafkaTools, LiveTool, table
from support.servers import Server

READER = Path(__file__).with_name("ShareReader.java")
EARLIEST = {"share.auto.offset.reset": "earliest"}
LONG_S = 120


def read(jars: KafkaJars, server: Server, topic: str, group: str, mode: str, count: int) -> list[tuple[str, int]]:
    """What Java's share consumer was given until it had finished `count` records: values and delivery counts."""
    # The source itself is the main class: Java compiles a single file in memory.
    done = jars.run(str(READER), server.bootstrap, topic, group, mode, str(count), timeout_s=LONG_S)
    assert done.status == 0, done
    pairs = [line.split("|") for line in done.lines]
    assert not [pair for pair in pairs if pair[0] == "refused"], done.stdout
    return [(value, int(deliveries)) for value, deliveries in pairs]


def console(tools: KafkaTools, topic: str, group: str, count: int, *options: str) -> list[str]:
    words = ("--topic", topic, "--group", group, "--max-messages", str(count), "--timeout-ms", "20000")
    return tools.run(CONSOLE_SHARE_CONSUMER, *words, *options).lines


def test_implicit_acknowledgement(tools: KafkaTools, jars: KafkaJars, server: Server, topic: str, group: str) -> None:
    tools.create_topic(topic, partitions=2)
    values = [f"value-{number}" for number in range(50)]
    tools.produce(topic, values)
    set_group_configs(server.bootstrap, group, EARLIEST)
    assert sorted(read(jars, server, topic, group, "implicit", 50)) == sorted((value, 1) for value in values)
    tools.produce(topic, ["later"])
    assert read(jars, server, topic, group, "implicit", 1) == [("later", 1)]


def test_explicit_acknowledgement(tools: KafkaTools, jars: KafkaJars, server: Server, topic: str, group: str) -> None:
    tools.create_topic(topic)
    tools.produce(topic, ["accept-1", "release-1", "reject-1", "accept-2", "release-2"])
    set_group_configs(server.bootstrap, group, EARLIEST)
    given = read(jars, server, topic, group, "explicit", 5)
    assert Counter(value for value, _ in given) == {
        "accept-1": 1, "accept-2": 1, "reject-1": 1, "release-1": 2, "release-2": 2,
    }  # fmt: skip
    assert sorted(given)[-4:] == [("release-1", 1), ("release-1", 2), ("release-2", 1), ("release-2", 2)]
    tools.produce(topic, ["later"])
    assert read(jars, server, topic, group, "explicit", 1) == [("later", 1)], "what is done with never comes again"


def test_renewed_locks(tools: KafkaTools, jars: KafkaJars, server: Server, topic: str, group: str) -> None:
    tools.create_topic(topic)
    tools.produce(topic, ["renew", "after"])
    set_group_configs(server.bootstrap, group, {**EARLIEST, "share.record.lock.duration.ms": "1000"})
    given = read(jars, server, topic, group, "explicit", 2)
    assert ("renew", 1) in given
    assert [value for value, _ in given].count("renew") == 1, "its lock ran out although it was renewed"
    tools.produce(topic, ["later"])
    assert [value for value, _ in read(jars, server, topic, group, "explicit", 1)] == ["later"]


def test_the_console_accepts_releases_and_rejects(tools: KafkaTools, server: Server, topic: str, group: str) -> None:
    explicit = ("--command-property", "share.acknowledgement.mode=explicit")
    tools.create_topic(topic)
    tools.produce(topic, ["1", "2", "3"])
    set_group_configs(server.bootstrap, group, EARLIEST)
    assert console(tools, topic, group, 3, "--release", *explicit) == ["1", "2", "3"]
    shown = console(tools, topic, group, 3, "--formatter-property", "print.delivery=true", *explicit)
    assert [line.split() for line in shown] == [["Delivery:2", str(number)] for number in (1, 2, 3)]
    tools.produce(topic, ["4"])
    assert console(tools, topic, group, 1, "--reject", *explicit) == ["4"]
    tools.produce(topic, ["5"])
    assert console(tools, topic, group, 1) == ["5"]


def test_verifiable_consumers_share_each_record_out_once(tools: KafkaTools, topic: str, group: str) -> None:
    tools.create_topic(topic, partitions=3)
    tools.produce(topic, [str(number) for number in range(3000)])
    options = ("--topic", topic, "--group-id", group, "--offset-reset-strategy", "earliest", "--verbose")
    with (
        tools.start(VERIFIABLE_SHARE_CONSUMER, *options, "--acknowledgement-mode", "sync") as first,
        tools.start(VERIFIABLE_SHARE_CONSUMER, *options, "--acknowledgement-mode", "async") as second,
    ):
        deadline = time.monotonic() + LONG_S
        while acknowledged(first) + acknowledged(second) < 3000:
            assert time.monotonic() < deadline, (acknowledged(first), acknowledged(second))
            time.sleep(0.05)
    values = [each["value"] for tool in (first, second) for each in tool.drain() if each["name"] == "record_data"]
    assert sorted(values, key=int) == [str(number) for number in range(3000)]


def acknowledged(tool: LiveTool) -> int:
    return sum(each["count"] for each in tool.drain() if each["name"] == "offsets_acknowledged" and each["success"])


def test_performance_tool_with_five_threads(tools: KafkaTools, server: Server, topic: str, group: str) -> None:
    tools.create_topic(topic, partitions=3)
    tools.produce(topic, [str(number) for number in range(5000)])
    set_group_configs(server.bootstrap, group, EARLIEST)
    options = ("--topic", topic, "--group", group, "--num-records", "5000", "--threads", "5", "--hide-header")
    done = tools.run(SHARE_CONSUMER_PERFORMANCE, *options, "--timeout", "30000", timeout_s=LONG_S)
    fields = [field.strip() for field in done.lines[-1].split(",")]
    assert int(fields[5]) == 5000, done


def test_share_group_command(tools: KafkaTools, server: Server, topic: str, group: str) -> None:
    tools.create_topic(topic, partitions=2)
    keyed = ("--reader-property", "parse.key=true", "--reader-property", "key.separator=:")
    tools.produce(topic, [f"{number}:{number}" for number in range(10)], *keyed)  # to both partitions
    set_group_configs(server.bootstrap, group, EARLIEST)
    options = ("--topic", topic, "--group-id", group)
    with tools.start(VERIFIABLE_SHARE_CONSUMER, *options) as member:
        while acknowledged(member) < 10:
            member.wait_for(lambda event: event["name"] == "offsets_acknowledged")
        assert group in tools.run(SHARE_GROUPS, "--list").lines
        states = [line.split() for line in tools.run(SHARE_GROUPS, "--list", "--state").lines]
        assert [group, "Stable"] in states
        kinds = [line.split() for line in tools.run(GROUPS, "--list", "--share").lines]
        assert group in {words[0] for words in kinds}
        (state,) = table(tools.run(SHARE_GROUPS, "--describe", "--group", group, "--state").stdout)
        assert (state["STATE"], state["#MEMBERS"]) == ("Stable", "1")
        (one,) = table(tools.run(SHARE_GROUPS, "--describe", "--group", group, "--members").stdout)
        assert f"{topic}:0,1" in one["ASSIGNMENT"] or {f"{topic}:0", f"{topic}:1"} <= set(one["ASSIGNMENT"].split(","))
        busy = tools.attempt(
            SHARE_GROUPS, "--reset-offsets", "--group", group, "--topic", topic, "--to-earliest", "--execute"
        )
        assert re.search("active|empty|members", busy.stdout + busy.stderr, re.IGNORECASE)
        busy = tools.attempt(SHARE_GROUPS, "--delete", "--group", group)
        assert "GroupNotEmpty" in busy.stdout + busy.stderr or "not EMPTY" in busy.stdout + busy.stderr

    (state,) = table(tools.run(SHARE_GROUPS, "--describe", "--group", group, "--state").stdout)
    assert (state["STATE"], state["#MEMBERS"]) == ("Empty", "0")
    offsets = table(tools.run(SHARE_GROUPS, "--describe", "--group", group, "--offsets").stdout)
    assert sum(int(row["LAG"]) for row in offsets) == 0

    words = ("--group", group, "--topic", f"{topic}:0", "--to-earliest")
    for how, lag in (("--dry-run", 0), ("--execute", tools.offsets(topic)[0])):
        planned = table(tools.run(SHARE_GROUPS, "--reset-offsets", *words, how).stdout)
        assert [(row["PARTITION"], row["NEW-OFFSET"]) for row in planned] == [("0", "0")]
        offsets = table(tools.run(SHARE_GROUPS, "--describe", "--group", group).stdout)
        assert sum(int(row["LAG"]) for row in offsets) == lag
    tools.run(SHARE_GROUPS, "--reset-offsets", "--group", group, "--all-topics", "--to-latest", "--execute")
    offsets = table(tools.run(SHARE_GROUPS, "--describe", "--group", group).stdout)
    assert {(row["PARTITION"], int(row["START-OFFSET"])) for row in offsets} == {
        (str(index), end) for index, end in tools.offsets(topic).items()
    }

    deleted = rows_of_topics(tools.run(SHARE_GROUPS, "--delete-offsets", "--group", group, "--topic", topic).stdout)
    assert deleted == [(topic, "Successful")]
    assert "deletion" in tools.run(SHARE_GROUPS, "--delete", "--group", group).stdout.lower()
    assert group not in tools.run(SHARE_GROUPS, "--list").lines


def rows_of_topics(text: str) -> list[tuple[str, str]]:
    lines = [line.split() for line in text.splitlines() if line.strip()]
    start = next(number for number, words in enumerate(lines) if words[0] == "TOPIC")
    return [(words[0], words[1]) for words in lines[start + 1 :]]
