"""A disk that fills up while records are produced: others lead, nothing fails, and it comes back by itself.

The disk is a real one of its own size (tmpfs), which takes the right to mount.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from support.cluster_processes import ClusterProcesses, Layout, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

TOPIC = "orders"
PARTITIONS = 6
RECORDS = 30_000
VALUE = os.urandom(10_000)


@contextmanager
def disk_of(size_mb: int, path: Path) -> Iterator[None]:
    """A file system of `size_mb` at `path`."""
    path.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "millrace-test", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def resize(path: Path, size_mb: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size_mb}m", str(path)], check=True)


class Acks:
    """What a producer hears, and when."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.count = 0
        self.acked: set[int] = set()
        self.longest_pause_s = 0.0
        self._last_s = time.monotonic()

    def note(self, error: object, message: Message[bytes, bytes]) -> None:
        now_s = time.monotonic()
        if error is None:
            self.count += 1
            self.acked.add(int(message.key() or b"-1"))
            self.longest_pause_s = max(self.longest_pause_s, now_s - self._last_s)
            self._last_s = now_s
        else:
            self.failed.append(str(error))


def produce(cluster: ClusterProcesses, records: int = RECORDS) -> Acks:
    acks = Acks()
    settings: dict[str, str | int | bool] = {
        "bootstrap.servers": cluster.bootstrap,
        "acks": "all",
        "enable.idempotence": True,
        "linger.ms": 5,
        "delivery.timeout.ms": 60_000,
    }
    producer = Producer(settings)
    for number in range(records):
        while True:
            try:
                producer.produce(TOPIC, VALUE, b"%d" % number, number % PARTITIONS, on_delivery=acks.note)
                break
            except BufferError:
                producer.poll(0.1)
        producer.poll(0)
    producer.flush(90)
    return acks


def keys_of(cluster: ClusterProcesses) -> list[int]:
    """The keys of all records, in order of each partition."""
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": "g", "enable.partition.eof": True})
    consumer.assign([TopicPartition(TOPIC, index, 0) for index in range(PARTITIONS)])
    found: list[int] = []
    ended: set[int | None] = set()
    try:
        while len(ended) < PARTITIONS:
            message = consumer.poll(30)
            assert message is not None, "nothing to read"
            if message.error() is None:
                found.append(int(message.key() or b"-1"))
            else:
                ended.add(message.partition())
    finally:
        consumer.close()
    return found


def create(cluster: ClusterProcesses) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    admin.create_topics([NewTopic(TOPIC, PARTITIONS, 3, config={"min.insync.replicas": "2"})])[TOPIC].result(30)
    cluster.wait_whole(TOPIC, 30)


def test_one_full_disk_of_three() -> None:
    cluster = ClusterProcesses(Layout(brokers=3))
    disk = cluster.brokers[2].data
    with disk_of(96, disk), cluster:
        create(cluster)
        acks = produce(cluster)
        assert acks.count == RECORDS and not acks.failed, f"{len(acks.failed)} failed, the first: {acks.failed[:1]}"
        assert acks.longest_pause_s < 10
        assert b"is full" in cluster.brokers[2].log(), "the disk was meant to fill up"
        view = cluster.view(1, TOPIC)
        assert view is not None
        assert all(2 not in each.isr and each.leader != 2 for each in view.partitions.values())
        resize(disk, 2000)
        waited_s = cluster.wait_whole(TOPIC, 30)
        print(f"longest pause {acks.longest_pause_s:.1f} s, in sync again after {waited_s:.1f} s")
        assert sorted(keys_of(cluster)) == list(range(RECORDS))
        assert not cluster.brokers[2].died()


def test_all_disks_full() -> None:
    """Nobody can take records: producers are told, readers go on, and it works again when there is space."""
    cluster = ClusterProcesses(Layout(brokers=3))
    disks = [broker.data for broker in cluster.brokers.values()]
    with disk_of(48, disks[0]), disk_of(48, disks[1]), disk_of(48, disks[2]), cluster:
        create(cluster)
        settings: dict[str, str | int] = {
            "bootstrap.servers": cluster.bootstrap,
            "delivery.timeout.ms": 5000,
            "queue.buffering.max.messages": 500,
        }
        acks = Acks()
        producer = Producer(settings)
        sent = 0
        while not acks.failed:
            try:
                producer.produce(TOPIC, VALUE, b"%d" % sent, sent % PARTITIONS, on_delivery=acks.note)
                sent += 1
            except BufferError:
                producer.poll(0.1)
            producer.poll(0)
            assert sent < RECORDS, "the disks were meant to fill up"
        producer.flush(30)
        assert acks.count + len(acks.failed) == sent
        # The last ones may not show yet: with fewer than min.insync.replicas in sync a new leader commits nothing.
        assert keys_of(cluster), "reading goes on"
        for disk in disks:
            resize(disk, 500)
        cluster.wait_whole(TOPIC, 30)
        assert acks.acked <= set(keys_of(cluster)), "what was acknowledged is there"

        def works() -> bool | None:
            try:
                again = Acks()
                fresh = Producer(settings)
                for index in range(PARTITIONS):
                    fresh.produce(TOPIC, b"after", b"-1", index, on_delivery=again.note)
                fresh.flush(10)
            except KafkaException:
                return None
            return again.count == PARTITIONS or None

        wait_for(works, 30, "there is space, but nothing is taken")
