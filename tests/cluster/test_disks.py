"""Disks that come back empty, or not at all, under a cluster of processes: what was acknowledged is not given up.

A replica that may have less than it promised is not elected and truncates nobody (docs/coordination.md, 15 to 17).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from support.cluster_processes import ClusterProcesses, Layout, wait_for
from support.zookeeper import looking_at

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

TOPIC = "orders"
COUNT = 500
FIRST_RECORDS = 61
"""Where the records of the first batch begin in a log: after its header."""


@pytest.fixture
def cluster() -> Iterator[ClusterProcesses]:
    with ClusterProcesses(Layout(brokers=3)) as running:
        yield running


def create(cluster: ClusterProcesses, replicas: list[list[int]], **settings: str) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    config = {name.replace("_", "."): value for name, value in settings.items()}
    made = admin.create_topics([NewTopic(TOPIC, len(replicas), replica_assignment=replicas, config=config)])
    made[TOPIC].result(30)
    cluster.wait_whole(TOPIC, 30)


def produce(cluster: ClusterProcesses, count: int = COUNT, *, first: int = 0, partition: int = 0) -> None:
    """Every record acknowledged by all in-sync replicas, or an error."""
    failed: list[object] = []

    def note(error: object, _message: object) -> None:
        if error is not None:
            failed.append(error)

    producer = Producer({"bootstrap.servers": cluster.bootstrap, "acks": "all", "linger.ms": 5})
    for number in range(first, first + count):
        producer.produce(TOPIC, b"%d" % number, partition=partition, on_delivery=note)
    assert producer.flush(60) == 0 and not failed, failed[:3]


def consumed(cluster: ClusterProcesses, timeout_s: float = 30, *, partition: int = 0) -> list[bytes]:
    """All that can be read from the beginning."""
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": "reader", "enable.partition.eof": True})
    consumer.assign([TopicPartition(TOPIC, partition, 0)])
    found: list[bytes] = []
    try:
        while True:
            message = consumer.poll(timeout_s)
            assert message is not None, f"nothing to read within {timeout_s} s"
            if message.error() is not None:
                return found
            found.append(message.value() or b"")
    finally:
        consumer.close()


def everything(count: int = COUNT) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def empty_disk(cluster: ClusterProcesses, broker_id: int) -> Path:
    """Put a new disk in place of a stopped broker's; the old one is kept."""
    data = cluster.brokers[broker_id].data
    kept = data.with_name("old-disk")
    shutil.move(data, kept)
    data.mkdir()
    return kept


def state(cluster: ClusterProcesses, broker_id: int, partition: int = 0) -> tuple[int, frozenset[int]]:
    view = cluster.view(broker_id, TOPIC)
    assert view is not None
    found = view.partitions[partition]
    return found.leader, found.isr


def millrace(cluster: ClusterProcesses, *arguments: str) -> str:
    command = [sys.executable, "-m", "millrace", *arguments, "--bootstrap", cluster.bootstrap]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_last_one_comes_back_first_with_an_empty_disk(cluster: ClusterProcesses) -> None:
    """min.insync.replicas=1: only the last one had everything for certain. Nobody leads until somebody says so."""
    create(cluster, [[1, 2, 3]], min_insync_replicas="1")
    produce(cluster)
    for broker_id in (3, 2, 1):
        cluster.brokers[broker_id].terminate()
    kept = empty_disk(cluster, 1)
    cluster.start_brokers([1])
    cluster.start_brokers([2, 3])
    assert state(cluster, 2) == (-1, frozenset({1}))
    # Its disk is back: nothing was lost.
    cluster.brokers[1].terminate()
    shutil.rmtree(cluster.brokers[1].data)
    shutil.move(kept, cluster.brokers[1].data)
    cluster.start_brokers([1])
    cluster.wait_whole(TOPIC, 30)
    assert consumed(cluster) == everything()


def test_the_last_one_comes_back_first_with_an_empty_disk_and_another_has_everything(cluster: ClusterProcesses) -> None:
    """min.insync.replicas=2: nothing was committed since broker 2 left, so it leads, and the empty one is filled."""
    create(cluster, [[1, 2, 3]], min_insync_replicas="2")
    produce(cluster)
    for broker_id in (3, 2, 1):
        cluster.brokers[broker_id].terminate()
    empty_disk(cluster, 1)
    cluster.start_brokers([1])
    assert state(cluster, 1)[0] == -1
    cluster.start_brokers([2, 3])
    wait_for(lambda: state(cluster, 2)[0] == 2 or None, 30, "broker 2 does not lead")
    cluster.wait_whole(TOPIC, 30)
    assert consumed(cluster) == everything()
    cluster.kill(2, 3)
    wait_for(lambda: state(cluster, 1)[0] == 1 or None, 30, "broker 1 was not filled")


@pytest.mark.parametrize("order", [(1, 2, 3), (2, 3, 1)], ids=["first", "last"])
def test_an_empty_disk_after_a_crash_of_all(cluster: ClusterProcesses, order: tuple[int, int, int]) -> None:
    """All members of the ISR crash; one comes back empty, first or last. The others have everything."""
    create(cluster, [[1, 2, 3]], min_insync_replicas="1")
    produce(cluster)
    cluster.kill(1, 2, 3)
    empty_disk(cluster, 1)
    for broker_id in order:
        cluster.start_brokers([broker_id])
    cluster.wait_whole(TOPIC, 30)
    assert consumed(cluster) == everything()


def test_a_log_that_was_removed_is_not_made_anew(cluster: ClusterProcesses) -> None:
    """The directory is the one it was, but a log in it is gone."""
    create(cluster, [[1, 2, 3]], min_insync_replicas="2")
    produce(cluster)
    for broker_id in (3, 2, 1):
        cluster.brokers[broker_id].terminate()
    shutil.rmtree(cluster.brokers[1].data / f"{TOPIC}-0")
    cluster.start_brokers([1])
    cluster.start_brokers([2, 3])
    cluster.wait_whole(TOPIC, 30)
    assert consumed(cluster) == everything()


def kill_unnoticed(cluster: ClusterProcesses) -> None:
    """Kill all brokers before any of them notices, and wait until their sessions have ended.

    Whoever starts then finds the ISRs as they were, and knows that all were gone.
    """
    for broker in cluster.brokers.values():
        broker.pause()
    cluster.kill(*cluster.brokers)
    assert cluster.zookeeper is not None
    with looking_at(cluster.zookeeper.hosts, cluster.zookeeper.access) as client:
        wait_for(lambda: not client.get_children("/brokers/ids") or None, 30, "sessions have not ended")


def damage(log: Path) -> None:
    """Flip bytes in the records of the first batch."""
    with log.open("r+b") as file:
        file.seek(FIRST_RECORDS)
        flipped = bytes(byte ^ 0xFF for byte in file.read(8))
        file.seek(FIRST_RECORDS)
        file.write(flipped)


def test_the_first_one_back_after_a_crash_of_all_has_a_damaged_log() -> None:
    """It has the office, but what is damaged does not lead: the others have everything, and it is filled again."""
    points_often = (("log.flush.offset.checkpoint.interval.ms", "200"),)
    with ClusterProcesses(Layout(brokers=3, session_timeout_ms=4000, settings=points_often)) as cluster:
        create(cluster, [[1, 2, 3]], min_insync_replicas="1")
        produce(cluster)
        data = cluster.brokers[1].data
        points = data / "recovery-point-offset-checkpoint"
        flushed = f"{TOPIC} 0 {COUNT}\n"
        wait_for(
            lambda: (points.exists() and flushed in points.read_text()) or None, 30, "nothing is known to be flushed"
        )
        cluster.wait_whole(TOPIC, 30)
        kill_unnoticed(cluster)
        damage(data / f"{TOPIC}-0" / f"{0:020}.log")
        cluster.start_brokers([1])
        wait_for(lambda: b"is lost here" in cluster.brokers[1].log() or None, 30, "the damage was not found")
        assert state(cluster, 1) == (-1, frozenset({1, 2, 3}))
        cluster.start_brokers([2, 3])
        cluster.wait_whole(TOPIC, 30)
        assert consumed(cluster) == everything()
        # What it has now is what the others have.
        cluster.kill(2, 3)
        wait_for(lambda: state(cluster, 1)[0] == 1 or None, 30, "broker 1 does not lead")
        assert consumed(cluster) == everything()


def test_the_last_one_lost_its_disk_and_the_longest_log_is_elected(cluster: ClusterProcesses) -> None:
    """Nobody has everything for certain: the cluster says why nobody leads, and a person decides."""
    create(cluster, [[1, 3, 2]], min_insync_replicas="1")
    produce(cluster, 200)
    cluster.brokers[3].terminate()
    produce(cluster, 200, first=200)
    cluster.brokers[2].terminate()
    cluster.brokers[1].terminate()
    empty_disk(cluster, 1)
    cluster.start_brokers([1, 2, 3])
    wait_for(lambda: all(len(view.brokers) == 3 for view in cluster.views()) or None, 30, "not all see all brokers")
    why = "broker 1, the last in sync, has lost its log; broker 3 may lack acknowledged records"
    assert f"{TOPIC}-0: no leader; {why}" in millrace(cluster, "cluster", "describe")
    shown = millrace(cluster, "cluster", "elect", "--unclean", "--yes", "--topic", TOPIC)
    assert f"{TOPIC}-0: broker 2 would lead from offset 400" in shown
    assert state(cluster, 2)[0] == 2
    cluster.wait_whole(TOPIC, 30)
    assert consumed(cluster) == everything(400)
