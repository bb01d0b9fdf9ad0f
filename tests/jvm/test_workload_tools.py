"""The tools that push load: producer and consumer performance, verifiable producer and consumer."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from support.kafka_jars import CONSUMER_PERFORMANCE, PRODUCER_PERFORMANCE, VERIFIABLE_CONSUMER, VERIFIABLE_PRODUCER
from support.kafka_tools import Event, KafkaTools


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_producer_and_consumer_performance(tools: KafkaTools, topic: str, group: str, codec: str) -> None:
    tools.create_topic(topic, partitions=3)
    load = ("--topic", topic, "--num-records", "50000", "--record-size", "1000", "--throughput", "-1")
    produced = tools.run(PRODUCER_PERFORMANCE, *load, "--command-property", "acks=all", f"compression.type={codec}")
    assert re.search(r"^50000 records sent, ", produced.lines[-1])
    assert sum(tools.offsets(topic).values()) == 50_000
    options = ("--topic", topic, "--num-records", "50000", "--group", group, "--hide-header")
    consumed = tools.run(CONSUMER_PERFORMANCE, *options)
    fields = [field.strip() for field in consumed.lines[-1].split(",")]
    assert int(fields[4]) >= 50_000, consumed


class Assigned:
    """True once a consumer's partitions, gained and lost, come to `count` (cooperative rebalances tell differences)."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._held: set[int] = set()

    def __call__(self, event: Event) -> bool:
        partitions = {each["partition"] for each in event.get("partitions", []) if isinstance(each, dict)}
        if event["name"] == "partitions_assigned":
            self._held |= partitions
        elif event["name"] == "partitions_revoked":
            self._held -= partitions
        return event["name"] == "partitions_assigned" and len(self._held) == self._count


def test_verifiable_producer_is_acknowledged_in_full(tools: KafkaTools, topic: str) -> None:
    tools.create_topic(topic, partitions=2)
    with tools.start(VERIFIABLE_PRODUCER, "--topic", topic, "--max-messages", "5000", "--acks", "-1") as producer:
        summary = producer.wait_for(lambda event: event["name"] == "tool_data")
    assert (summary["sent"], summary["acked"]) == (5000, 5000)
    sent = [(each["partition"], each["offset"]) for each in producer.events if each["name"] == "producer_send_success"]
    assert len(set(sent)) == 5000
    counts, ends = Counter(partition for partition, _ in sent), tools.offsets(topic)
    assert {index: counts[index] for index in ends} == ends


def test_verifiable_consumer_reads_each_record_once(tools: KafkaTools, topic: str, group: str) -> None:
    tools.create_topic(topic, partitions=3)
    tools.produce(topic, [str(number) for number in range(3000)])
    options = (
        "--topic",
        topic,
        "--group-id",
        group,
        "--reset-policy",
        "earliest",
        "--max-messages",
        "3000",
        "--verbose",
    )
    with tools.start(VERIFIABLE_CONSUMER, *options) as consumer:
        consumer.wait_for(lambda event: event["name"] == "shutdown_complete")
    values = [int(each["value"]) for each in consumer.events if each["name"] == "record_data"]
    assert sorted(values) == list(range(3000))
    commits = [each for each in consumer.events if each["name"] == "offsets_committed"]
    assert commits and all(each["success"] for each in commits)


@pytest.mark.parametrize("assignor", ["RangeAssignor", "CooperativeStickyAssignor"])
def test_a_second_member_takes_its_share_and_gives_it_back(
    tools: KafkaTools, topic: str, group: str, assignor: str
) -> None:
    tools.create_topic(topic, partitions=4)
    strategy = f"org.apache.kafka.clients.consumer.{assignor}"
    options = ("--topic", topic, "--group-id", group, "--session-timeout", "6000", "--assignment-strategy", strategy)
    with tools.start(VERIFIABLE_CONSUMER, *options) as first:
        first_holds = Assigned(4)
        first.wait_for(first_holds)
        with tools.start(VERIFIABLE_CONSUMER, *options) as second:
            second.wait_for(Assigned(2))
        first.wait_for(first_holds)  # the second left on SIGTERM: everything returns


def test_static_member_keeps_its_partitions_over_a_restart(
    tools: KafkaTools, topic: str, group: str, tmp_path: Path
) -> None:
    tools.create_topic(topic, partitions=2)
    options = ("--topic", topic, "--group-id", group, "--session-timeout", "30000")
    with tools.start(VERIFIABLE_CONSUMER, *options, "--group-instance-id", "a") as stays:
        stays.wait_for(Assigned(2))
        with tools.start(VERIFIABLE_CONSUMER, *options, "--group-instance-id", "b") as bounces:
            before = bounces.wait_for(Assigned(1))["partitions"]
            stays.wait_for(lambda event: event["name"] == "partitions_assigned")
            bounces.kill()
        with tools.start(VERIFIABLE_CONSUMER, *options, "--group-instance-id", "b") as bounces:
            after = bounces.wait_for(Assigned(1))["partitions"]
        assert after == before
        stays.stop()
    rebalances = [event for event in stays.events if event["name"] == "partitions_assigned"]
    assert len(rebalances) == 2  # alone, then with b; none for b's return
