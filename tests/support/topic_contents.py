"""Everything that a topic holds, read with librdkafka: what tests of pipelines compare results with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import Consumer, KafkaError, TopicPartition

from support.topics import QUIET, TIMEOUT_S


@dataclass(frozen=True)
class Found:
    """A record of text."""

    key: str | None
    value: str | None
    headers: dict[str, str] = field(default_factory=dict)


def contents(bootstrap: str, topic: str) -> list[Found]:
    """The records of all partitions, up to where the topic ends now; order holds within a partition only."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "tests",
            "enable.auto.commit": False,
            "enable.partition.eof": True,  # not by counting: ends of transactions have offsets, too
            **QUIET,
        }
    )
    try:
        partitions = consumer.list_topics(topic, timeout=TIMEOUT_S).topics[topic].partitions
        places = [TopicPartition(topic, index, 0) for index in partitions]
        ends = {each.partition: consumer.get_watermark_offsets(each, timeout=TIMEOUT_S)[1] for each in places}
        consumer.assign(places)
        found: list[Found] = []
        while any(ends.values()):
            message = consumer.poll(TIMEOUT_S)
            assert message is not None, f"{len(found)} records of {topic} came, and nothing up to {ends}"
            error, partition, offset = message.error(), message.partition(), message.offset()
            assert partition is not None and offset is not None
            if error is not None:
                assert error.code() == KafkaError._PARTITION_EOF, error
                if offset >= ends[partition]:
                    ends[partition] = 0
                continue
            pairs: Any = message.headers() or ()
            headers = {name: _text(value) or "" for name, value in pairs}
            found.append(Found(_text(message.key()), _text(message.value()), headers))
        return found
    finally:
        consumer.close()


def _text(value: str | bytes | None) -> str | None:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
