"""What a topic holds, as librdkafka reads it: the other side of tests that write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from confluent_kafka import Consumer, Message, TopicPartition

TIMEOUT_S = 30


@dataclass(frozen=True)
class Found:
    """A record of a topic."""

    partition: int
    offset: int
    key: Any
    value: Any
    timestamp_ms: int = 0
    headers: tuple[tuple[str, bytes | None], ...] = ()


def read_back(bootstrap: str, topic: str) -> list[Found]:
    """Every record of a topic, by partition and offset."""
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "unused", "enable.partition.eof": True, "log_level": 0}
    )
    try:
        partitions = consumer.list_topics(topic, timeout=TIMEOUT_S).topics[topic].partitions
        consumer.assign([TopicPartition(topic, index, 0) for index in partitions])
        found: list[Found] = []
        ended = 0
        while ended < len(partitions):
            message = consumer.poll(TIMEOUT_S)
            assert message is not None
            if message.error() is None:
                found.append(_found(message))
            else:
                ended += 1
        return sorted(found, key=lambda each: (each.partition, each.offset))
    finally:
        consumer.close()


def _found(message: Message) -> Found:
    partition, offset = message.partition(), message.offset()
    assert partition is not None and offset is not None
    headers: Any = message.headers() or []
    return Found(partition, offset, message.key(), message.value(), message.timestamp()[1], tuple(headers))
