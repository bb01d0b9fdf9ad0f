"""kafka-console-producer and kafka-console-consumer: the Java clients with every codec, keys, headers and positions."""

from __future__ import annotations

import pytest

from support.kafka_tools import KafkaTools

FULL_READER = ("--reader-property", "parse.key=true", "--reader-property", "parse.headers=true")
FULL_FORMAT = (
    *("--formatter-property", "print.key=true"),
    *("--formatter-property", "print.headers=true"),
    *("--formatter-property", "print.partition=true"),
    *("--formatter-property", "print.offset=true"),
)


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_every_codec_there_and_back(tools: KafkaTools, topic: str, codec: str) -> None:
    lines = [f"{codec} {number} {'x' * 200}" for number in range(500)]
    tools.produce(topic, lines, "--compression-codec", codec)  # the topic comes into being by itself
    assert tools.consume(topic, 500, "--from-beginning") == lines


def test_keys_headers_and_offsets(tools: KafkaTools, topic: str) -> None:
    tools.create_topic(topic)
    tools.produce(topic, ["a:1,b:2\tk1\tv1", "a:3\tk2\tv2"], *FULL_READER)
    assert tools.consume(topic, 2, "--from-beginning", *FULL_FORMAT) == [
        "Partition:0\tOffset:0\ta:1,b:2\tk1\tv1",
        "Partition:0\tOffset:1\ta:3\tk2\tv2",
    ]


@pytest.mark.parametrize("acks", ["0", "1", "all"])
def test_acks(tools: KafkaTools, topic: str, acks: str) -> None:
    tools.create_topic(topic)
    tools.produce(
        topic, ["one", "two"], "--request-required-acks", acks, "--command-property", "enable.idempotence=false"
    )
    assert tools.consume(topic, 2, "--from-beginning") == ["one", "two"]


def test_from_an_offset_of_one_partition(tools: KafkaTools, topic: str) -> None:
    tools.create_topic(topic, partitions=2)
    tools.produce(topic, [f"same key\t{number}" for number in range(10)], "--reader-property", "parse.key=true")
    (partition,) = [index for index, end in tools.offsets(topic).items() if end == 10]
    assert tools.consume(topic, 3, "--partition", str(partition), "--offset", "7") == ["7", "8", "9"]


def test_a_group_goes_on_where_it_stopped(tools: KafkaTools, topic: str, group: str) -> None:
    tools.create_topic(topic)
    tools.produce(topic, [str(number) for number in range(20)])
    assert tools.consume(topic, 12, "--group", group, "--from-beginning") == [str(number) for number in range(12)]
    assert tools.consume(topic, 8, "--group", group) == [str(number) for number in range(12, 20)]


def test_read_committed_sees_what_was_never_in_a_transaction(tools: KafkaTools, topic: str) -> None:
    tools.create_topic(topic)
    tools.produce(topic, ["plain"])
    assert tools.consume(topic, 1, "--from-beginning", "--isolation-level", "read_committed") == ["plain"]
