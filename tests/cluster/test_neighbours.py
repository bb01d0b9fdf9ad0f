"""What befalls one log, or one topic, is its own affair: its neighbours on the same brokers are written as before.

Each of these once stopped partitions that had nothing to do with it: a log that cannot be opened, a setting that
changes.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka import Message, Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic

from support.cluster_processes import ClusterProcesses, Layout, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

PAUSE_LIMIT_S = 2.0


@pytest.fixture
def cluster() -> Iterator[ClusterProcesses]:
    with ClusterProcesses(Layout(brokers=3)) as running:
        yield running


def create(cluster: ClusterProcesses, topic: str, replicas: list[list[int]], **settings: str) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    config = {name.replace("_", "."): value for name, value in settings.items()}
    admin.create_topics([NewTopic(topic, len(replicas), replica_assignment=replicas, config=config)])[topic].result(30)
    cluster.wait_whole(topic, 30)


def alter(cluster: ClusterProcesses, topic: str, name: str, value: str) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
    admin.incremental_alter_configs([resource])[resource].result(30)


class Writer:
    """Writes to every partition of a topic without a break, from a thread of its own, and notes what it hears."""

    def __init__(self, cluster: ClusterProcesses, topic: str, partitions: int) -> None:
        self.failed: list[str] = []
        self.acked = 0
        self.longest_pause_s = 0.0
        self._topic, self._partitions = topic, partitions
        self._producer = Producer({"bootstrap.servers": cluster.bootstrap, "acks": "all", "linger.ms": 5})
        self._last_s = dict.fromkeys(range(partitions), time.monotonic())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write, name=f"writer of {topic}")

    @contextmanager
    def at_work(self) -> Iterator[Writer]:
        self._thread.start()
        try:
            wait_for(lambda: self.acked > 100 or None, 30, "nothing is acknowledged")
            yield self
        finally:
            self._stop.set()
            self._thread.join(90)

    def _write(self) -> None:
        while not self._stop.wait(0.01):
            for partition in range(self._partitions):
                self._producer.produce(self._topic, b"x" * 500, partition=partition, on_delivery=self._note)
            self._producer.poll(0)
        self._producer.flush(60)

    def _note(self, error: object, message: Message[bytes, bytes]) -> None:
        if error is not None:
            self.failed.append(str(error))
            return
        now_s = time.monotonic()
        partition = message.partition() or 0
        self.acked += 1
        self.longest_pause_s = max(self.longest_pause_s, now_s - self._last_s[partition])
        self._last_s[partition] = now_s


def isr(cluster: ClusterProcesses, topic: str, partition: int) -> frozenset[int]:
    view = cluster.view(1, topic)
    assert view is not None
    return view.partitions[partition].isr


def test_the_flush_mode_of_an_idle_topic_changes_while_another_is_written(cluster: ClusterProcesses) -> None:
    create(cluster, "idle", [[1, 2, 3]] * 3, flush_mode="os")
    create(cluster, "busy", [[1, 2, 3], [2, 3, 1], [3, 1, 2]], min_insync_replicas="2")
    with Writer(cluster, "idle", 3).at_work() as filled:
        pass
    assert filled.acked and not filled.failed
    since = {each: each.log_size() for each in cluster.brokers.values()}
    with Writer(cluster, "busy", 3).at_work() as writer:
        for number, mode in enumerate(("group", "os", "group", "os", "group")):
            alter(cluster, "idle", "flush.mode", mode)
            create(cluster, f"another-{number}", [[1, 2, 3]])
            acked = writer.acked
            wait_for(lambda: writer.acked > acked + 300 or None, 30, "nothing is acknowledged")  # noqa: B023
    assert not writer.failed, f"{len(writer.failed)} failed, the first: {writer.failed[0]}"
    assert writer.longest_pause_s < PAUSE_LIMIT_S
    for broker, begin in since.items():
        assert b"leaves the ISR" not in broker.log(begin)


def test_one_log_that_a_follower_cannot_open_leaves_the_others_in_sync(cluster: ClusterProcesses) -> None:
    """All four are led by broker 1, so broker 2 follows them in one fetch session."""
    create(cluster, "orders", [[1, 2, 3]] * 4, min_insync_replicas="2")
    with Writer(cluster, "orders", 4).at_work() as filled:
        pass
    assert filled.acked and not filled.failed
    follower = cluster.brokers[2]
    with Writer(cluster, "orders", 4).at_work() as writer:
        follower.terminate()
        segment = follower.data / "orders-0" / f"{0:020}.log"
        segment.unlink()
        segment.mkdir()
        since = follower.log_size()
        cluster.start_brokers([2])
        for partition in (1, 2, 3):
            wait_for(lambda: 2 in isr(cluster, "orders", partition) or None, 30, f"orders-{partition} is stuck")  # noqa: B023
        follower.wait_logged("orders-0 is offline", since=since)
        assert 2 not in isr(cluster, "orders", 0)
    assert not writer.failed, f"{len(writer.failed)} failed, the first: {writer.failed[0]}"
    assert writer.longest_pause_s < PAUSE_LIMIT_S
    # What was in the way is taken away: the log is copied anew.
    follower.terminate()
    shutil.rmtree(segment.parent)
    cluster.start_brokers([2])
    cluster.wait_whole("orders", 30)
