"""Three brokers in one process: followers come, go and catch up, and have the same bytes in the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions

from millrace.replication.partition import Partition
from millrace.testing import Cluster
from support.on_loop import on_loop

PARTITIONS = 3


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(brokers=3) as running:
        running.create_topic("t", PARTITIONS)
        yield running


def wait_until(holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.05)


def isrs(cluster: Cluster) -> list[set[int]]:
    topic = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0}).list_topics("t", timeout=10)
    return [set(each.isrs) for each in topic.topics["t"].partitions.values()]


def produce(cluster: Cluster, first: int, count: int) -> None:
    failures: list[str] = []

    def told(error: object, _message: object) -> None:
        if error is not None:
            failures.append(str(error))

    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "enable.idempotence": True, "log_level": 0})
    for number in range(first, first + count):
        producer.produce("t", b"%d" % number, partition=number % PARTITIONS, on_delivery=told)
    assert producer.flush(30) == 0
    assert not failures


def consume(cluster: Cluster, count: int) -> list[int]:
    consumer = Consumer(
        {"bootstrap.servers": cluster.bootstrap_servers, "group.id": "g", "enable.auto.commit": False, "log_level": 0}
    )
    consumer.assign([TopicPartition("t", index, 0) for index in range(PARTITIONS)])
    found: list[int] = []
    deadline = time.monotonic() + 30
    while len(found) < count and time.monotonic() < deadline:
        found += [int(message.value() or b"") for message in consumer.consume(1000, 0.5) if message.error() is None]
    consumer.close()
    return sorted(found)


def segments(home: Path, index: int) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((home / f"t-{index}").glob("*.log")))


def test_a_broker_that_was_away_catches_up(cluster: Cluster) -> None:
    produce(cluster, 0, 300)
    cluster.stop_broker(2)
    assert all(members == {1, 3} for members in isrs(cluster))
    produce(cluster, 300, 300)
    cluster.start_broker(2)
    wait_until(lambda: all(len(members) == 3 for members in isrs(cluster)))
    produce(cluster, 600, 300)
    assert consume(cluster, 900) == list(range(900))
    cluster.stop_broker(1)
    assert consume(cluster, 900) == list(range(900))
    cluster.stop_broker(3)
    homes = [cluster.data_dir_of(broker_id) for broker_id in (1, 2, 3)]
    for index in range(PARTITIONS):
        contents = {segments(home, index).rstrip(b"\0") for home in homes}
        assert len(contents) == 1


def test_every_broker_restarted_in_turn_under_load(cluster: Cluster) -> None:
    sent = 0
    for broker_id in (1, 2, 3, 1):
        produce(cluster, sent, 200)
        cluster.stop_broker(broker_id)
        produce(cluster, sent + 200, 200)
        sent += 400
        cluster.start_broker(broker_id)
        wait_until(lambda: all(len(members) == 3 for members in isrs(cluster)))
    assert consume(cluster, sent) == list(range(sent))


def test_too_few_replicas_are_told_to_the_producer() -> None:
    with Cluster(brokers=3, settings={"min.insync.replicas": "3"}) as cluster:
        cluster.create_topic("t")
        cluster.stop_broker(3)
        told: list[str] = []
        producer = Producer(
            {"bootstrap.servers": cluster.bootstrap_servers, "message.timeout.ms": 1500, "log_level": 0}
        )
        producer.produce("t", b"x", on_delivery=lambda error, _message: told.append(str(error)))
        assert producer.flush(20) == 0
        assert told != ["None"]
        cluster.start_broker(3)
        wait_until(lambda: isrs(cluster) == [{1, 2, 3}])
        producer.produce("t", b"y", on_delivery=lambda error, _message: told.append(str(error)))
        assert producer.flush(20) == 0
        assert told[-1] == "None"


@pytest.fixture
def own_topics_only() -> Iterator[Cluster]:
    # A producer that asks for a deleted topic would otherwise create it.
    with Cluster(brokers=3, settings={"auto.create.topics.enable": "false"}) as running:
        running.create_topic("t", PARTITIONS)
        yield running


def test_a_topic_deleted_and_created_again_while_it_is_written_to(own_topics_only: Cluster) -> None:
    cluster = own_topics_only
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "message.timeout.ms": 5000, "log_level": 0})
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    for round_number in range(3):
        for number in range(200):
            producer.produce("t", b"old %d" % number, partition=number % PARTITIONS)
            producer.poll(0)
        admin.delete_topics(["t"])["t"].result(timeout=10)
        cluster.create_topic("t", PARTITIONS)
        producer.flush(20)
        before = sum(high for _, high in ends(cluster))
        produce(cluster, 0, 300)
        assert sum(high for _, high in ends(cluster)) == before + 300, round_number
    wait_until(lambda: all(len(members) == 3 for members in isrs(cluster)))
    for broker_id in (1, 2, 3):
        cluster.stop_broker(broker_id)
    for index in range(PARTITIONS):
        assert len({segments(cluster.data_dir_of(each), index).rstrip(b"\0") for each in (1, 2, 3)}) == 1


def test_partitions_that_are_added_are_replicated_too(cluster: Cluster) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    produce(cluster, 0, 30)
    admin.create_partitions([NewPartitions("t", PARTITIONS + 2)])["t"].result(timeout=10)
    wait_until(lambda: [len(members) for members in isrs(cluster)] == [3] * (PARTITIONS + 2))
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    for index in range(PARTITIONS + 2):
        producer.produce("t", b"new", partition=index)
    assert producer.flush(20) == 0


def ends(cluster: Cluster) -> list[tuple[int, int]]:
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap_servers, "group.id": "ends", "log_level": 0})
    try:
        return [consumer.get_watermark_offsets(TopicPartition("t", each), timeout=20) for each in range(PARTITIONS)]
    finally:
        consumer.close()


def test_a_lost_leader_is_noticed_while_a_follower_waits_for_its_disk(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = {broker_id: broker.services for broker_id, broker in cluster._brokers.items() if broker.services}
    leader = next(broker_id for broker_id, each in services.items() if each.replicas.led("t", 0))
    monkeypatch.setattr(Partition, "is_flushed", property(lambda self: self.is_leader or not self.log.end_offset))
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "acks": 1, "log_level": 0})
    producer.produce("t", b"x", partition=0)
    assert producer.flush(20) == 0
    held = [each.replicas.held("t", 0) for each in services.values()]
    wait_until(lambda: on_loop(cluster, lambda: all(each is not None and each.log.end_offset == 1 for each in held)))

    lost: set[tuple[int, int]] = set()
    for broker_id, each in services.items():
        monkeypatch.setattr(each.replicas.followed, "lost", lambda whom, who=broker_id: lost.add((who, whom)))

    async def break_connections() -> None:
        for listener in cluster._brokers[leader]._listeners:
            for connection in tuple(listener.connections):
                connection.abort()

    cluster._on_loop(break_connections())
    # Nothing is asked for while everything waits for the disk: no fetch that fails could tell.
    followers = {broker_id for broker_id in services if broker_id != leader}
    wait_until(lambda: lost >= {(broker_id, leader) for broker_id in followers})
