"""Compacted topics as clients see them: on three brokers that each compact on their own, across restarts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from millrace.testing import Cluster
from support.roles import wait_for

TOPIC = "state"
KEYS = 50
SETTINGS = {"log.cleaner.backoff.ms": "50", "min.insync.replicas": "3", "offsets.topic.num.partitions": "1"}
CONFIG = {"cleanup.policy": "compact", "internal.segment.bytes": "8192", "min.cleanable.dirty.ratio": "0.1"}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(brokers=3, settings=SETTINGS) as cluster:
        cluster.create_topic(TOPIC, partitions=1, replication_factor=3, config=CONFIG)
        yield cluster


def produce(cluster: Cluster, rounds: int, last: dict[bytes, bytes | None]) -> None:
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "linger.ms": 5, "compression.type": "lz4"})
    for number in range(rounds):
        for key in range(KEYS):
            value = None if number == rounds - 1 and key % 7 == 0 else b"%d-%d" % (number, key)
            producer.produce(TOPIC, key=b"key%d" % key, value=value)
            last[b"key%d" % key] = value
        assert producer.flush(30) == 0


def consume(cluster: Cluster) -> tuple[dict[bytes, bytes | None], int]:
    """The last value of each key, and how many records that took."""
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap_servers, "group.id": "g", "enable.auto.commit": False})
    try:
        end = consumer.get_watermark_offsets(TopicPartition(TOPIC, 0), timeout=20)[1]
        consumer.assign([TopicPartition(TOPIC, 0, 0)])
        found: dict[bytes, bytes | None] = {}
        count, offset = 0, -1
        while consumer.position([TopicPartition(TOPIC, 0)])[0].offset < end:
            message = consumer.poll(10)
            assert message is not None and message.error() is None
            assert message.offset() > offset
            offset = message.offset()
            key = message.key()
            assert isinstance(key, bytes)
            found[key] = message.value()
            count += 1
        return found, count
    finally:
        consumer.close()


def clean_up_to(directory: Path) -> int | None:
    """How far a replica is clean, once that is all but its active segment."""
    bases = sorted(int(path.stem) for path in (directory / f"{TOPIC}-0").glob("*.log"))
    written = directory / "cleaner-offset-checkpoint"
    found = re.search(rf"^{TOPIC} 0 (\d+)$", written.read_text(), re.MULTILINE) if written.exists() else None
    return int(found[1]) if found and len(bases) > 1 and int(found[1]) >= bases[-1] else None


def test_every_replica_compacts_and_every_leader_has_the_last_values(cluster: Cluster) -> None:
    last: dict[bytes, bytes | None] = {}
    produce(cluster, 40, last)
    for broker_id in (1, 2, 3):
        directory = cluster.data_dir_of(broker_id)
        wait_for(lambda directory=directory: clean_up_to(directory), f"broker {broker_id} has not compacted")
    found, count = consume(cluster)
    assert found == last
    assert count < 40 * KEYS / 2
    for broker_id in (1, 2):
        cluster.stop_broker(broker_id)
        cluster.start_broker(broker_id)
        produce(cluster, 2, last)
        assert consume(cluster)[0] == last
