"""Faults that pass, in brokers as processes: one hint that cannot be written, one read that fails, topics that go.

Each of them once stopped something for good: a directory, a coordinator, retention.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from support.cluster_processes import ClusterProcesses, Layout, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

LAYOUT = Layout(
    brokers=3,
    planted="obedient",
    settings=(
        ("log.retention.check.interval.ms", "20"),
        ("replica.high.watermark.checkpoint.interval.ms", "200"),
        ("offsets.topic.num.partitions", "1"),
    ),
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterProcesses]:
    with ClusterProcesses(LAYOUT) as running:
        yield running


def create(cluster: ClusterProcesses, topic: str, partitions: int = 3, **settings: str) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    config = {name.replace("_", "."): value for name, value in settings.items()}
    admin.create_topics([NewTopic(topic, partitions, 3, config=config)])[topic].result(30)
    cluster.wait_whole(topic, 30)


def produce(cluster: ClusterProcesses, topic: str, count: int = 300, size: int = 100) -> None:
    failed: list[object] = []

    def note(error: object, _message: object) -> None:
        if error is not None:
            failed.append(error)

    producer = Producer({"bootstrap.servers": cluster.bootstrap, "acks": "all"})
    for number in range(count):
        producer.produce(topic, b"x" * size, partition=number % 3, on_delivery=note)
    assert producer.flush(60) == 0 and not failed, failed[:3]


def test_a_hint_that_could_not_be_written_takes_nothing_offline(cluster: ClusterProcesses) -> None:
    create(cluster, "hints")
    broker = cluster.brokers[1]
    since = broker.log_size()
    broker.tell("once ENOSPC pwritev replication-offset-checkpoint")
    produce(cluster, "hints")
    broker.wait_logged("planted: pwritev has failed once", since=since)
    broker.wait_logged("replication-offset-checkpoint can be written again", since=since)
    produce(cluster, "hints")
    cluster.wait_whole("hints", 30)
    assert b"is offline" not in broker.log(since)


def test_a_coordinator_whose_log_could_not_be_read_once_loads_again(cluster: ClusterProcesses) -> None:
    create(cluster, "grouped")
    produce(cluster, "grouped")
    settings: dict[str, str | bool] = {
        "bootstrap.servers": cluster.bootstrap,
        "group.id": "readers",
        "enable.auto.commit": False,
    }
    places = [TopicPartition("grouped", 0, 42)]
    first = Consumer(settings)
    wait_for(lambda: _committed(first, places), 60, "nothing can be committed")
    first.close()
    cluster.wait_whole("__consumer_offsets", 60)
    before = cluster.leader("__consumer_offsets", 0)
    others = [each for number, each in cluster.brokers.items() if number != before]
    since = {each: each.log_size() for each in others}
    for each in others:
        each.tell("once EIO pread __consumer_offsets")
        each.wait_logged("planted: pread will fail once", since=since[each])
    cluster.kill(before)
    try:
        second = Consumer(settings)
        (found,) = second.committed([TopicPartition("grouped", 0)], timeout=30)
        assert found.offset == 42
        second.close()
        assert any(b"planted: pread has failed once" in each.log(since[each]) for each in others)
    finally:
        cluster.start_brokers([before])


def _committed(consumer: Consumer, places: list[TopicPartition]) -> bool | None:
    try:
        consumer.commit(offsets=places, asynchronous=False)
    except KafkaException:
        return None
    return True


def test_retention_goes_on_while_topics_are_deleted(cluster: ClusterProcesses) -> None:
    create(cluster, "kept", segment_bytes="1048576", retention_bytes="1048576")
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    for number in range(20):
        create(cluster, f"brief-{number}", partitions=12)
        admin.delete_topics([f"brief-{number}"])[f"brief-{number}"].result(30)
    produce(cluster, "kept", count=3000, size=5000)
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": "looks"})
    try:
        for index in range(3):
            place = TopicPartition("kept", index)
            wait_for(lambda: consumer.get_watermark_offsets(place, timeout=10)[0] or None, 30, "nothing is let go")  # noqa: B023
    finally:
        consumer.close()
