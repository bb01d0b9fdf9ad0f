"""kafka-topics: create, list, describe, alter, delete."""

from __future__ import annotations

import re

from support.kafka_jars import TOPICS
from support.kafka_tools import KafkaTools


def test_create_describe_and_list(tools: KafkaTools, topic: str) -> None:
    tools.create_topic(topic, partitions=3, retention_ms="3600000", max_message_bytes="200000")
    described = tools.run(TOPICS, "--describe", "--topic", topic).stdout
    head, *partitions = described.strip().splitlines()
    assert re.search(rf"Topic: {topic}\s+TopicId: \S{{22}}\s+PartitionCount: 3\s+ReplicationFactor: 1", head)
    assert "retention.ms=3600000" in head
    assert "max.message.bytes=200000" in head
    assert [
        re.search(r"Partition: (\d+)\s+Leader: (\d+)\s+Replicas: \2\s+Isr: \2", line) is not None for line in partitions
    ] == [True] * 3
    assert topic in tools.run(TOPICS, "--list").lines


def test_create_twice_fails_unless_asked_not_to(tools: KafkaTools, topic: str) -> None:
    tools.create_topic(topic)
    again = tools.attempt(TOPICS, "--create", "--topic", topic)
    assert again.status != 0
    assert "TopicExistsException" in again.stdout + again.stderr
    tools.run(TOPICS, "--create", "--topic", topic, "--if-not-exists")


def test_create_refuses_bad_requests(tools: KafkaTools, topic: str) -> None:
    for arguments, reason in (
        (("--topic", f"{topic}-a", "--replication-factor", "2"), "InvalidReplicationFactorException"),
        (("--topic", f"{topic}-b", "--partitions", "1", "--config", "retention.ms=soon"), "retention.ms"),
        (("--topic", "no/such/name"), "InvalidTopicException"),
    ):
        refused = tools.attempt(TOPICS, "--create", *arguments)
        assert refused.status != 0
        assert reason in refused.stdout + refused.stderr


def test_add_partitions(tools: KafkaTools, topic: str) -> None:
    tools.create_topic(topic, partitions=2)
    tools.run(TOPICS, "--alter", "--topic", topic, "--partitions", "5")
    assert "PartitionCount: 5" in tools.run(TOPICS, "--describe", "--topic", topic).stdout
    fewer = tools.attempt(TOPICS, "--alter", "--topic", topic, "--partitions", "1")
    assert fewer.status != 0
    assert "InvalidPartitionsException" in fewer.stdout + fewer.stderr


def test_delete(tools: KafkaTools, topic: str) -> None:
    tools.create_topic(topic)
    tools.run(TOPICS, "--delete", "--topic", topic)
    gone = tools.attempt(TOPICS, "--describe", "--topic", topic)
    assert gone.status != 0
    assert "does not exist" in gone.stdout + gone.stderr
    assert topic not in tools.run(TOPICS, "--list").lines
    tools.create_topic(topic)  # the name is free again at once
    assert tools.offsets(topic) == {0: 0}
