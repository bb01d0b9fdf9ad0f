"""A leader of a queue that was replaced and does not know it gives out nothing that was accepted elsewhere.

It is cut off from ZooKeeper alone, or paused; a member goes on asking it, while another member works with the new
leader. And where ZooKeeper is gone for everybody, so that nobody can be replaced, queues go on.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from cluster.queue_rounds import SETTINGS
from millrace.client.cluster import ClusterClient
from millrace.client.queue import QueueConsumer, QueueRecord, Verdict
from millrace.client.settings import ClientSettings
from support.cluster_processes import ClusterProcesses, Layout, wait_for
from support.group_configs import set_group_configs
from support.tcp_proxy import ZOOKEEPER, broker_node

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

SESSION_S = 3.0
LAYOUT = Layout(brokers=3, proxied=True, session_timeout_ms=int(SESSION_S * 1000), settings=SETTINGS)
RECORDS = 20
REQUEST_S = 2.0
ASKED_S = 2.5 * REQUEST_S
"""A member may have lost its place, and wait for a coordinator that does not answer, before it asks at all."""


@pytest.fixture(scope="module")
def running() -> Iterator[ClusterProcesses]:
    with ClusterProcesses(LAYOUT) as cluster:
        yield cluster


@pytest.fixture
def cluster(running: ClusterProcesses) -> Iterator[ClusterProcesses]:
    yield running
    running.restore()


@contextmanager
def member(bootstrap: str, topic: str) -> Iterator[QueueConsumer]:
    properties = {
        "bootstrap.servers": bootstrap,
        "request.timeout.ms": str(int(REQUEST_S * 1000)),
        "retry.backoff.ms": "20",
    }
    client = ClusterClient(ClientSettings.from_properties(properties))
    consumer = QueueConsumer(client, f"group-of-{topic}", [topic])
    try:
        yield consumer
    finally:
        consumer.close()
        client.close()


def create(cluster: ClusterProcesses, leader: int) -> str:
    topic = f"jobs-{uuid.uuid4().hex[:8]}"
    others = [each for each in cluster.brokers if each != leader]
    # Before the topic: a broker that knows of that then knows of this, too, also one that has just come back.
    set_group_configs(cluster.bootstrap, f"group-of-{topic}", {"share.auto.offset.reset": "earliest"})
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    admin.create_topics([NewTopic(topic, 1, replica_assignment=[[leader, *others]])])[topic].result(30)
    cluster.wait_whole(topic, 30)
    return topic


def produce(bootstrap: str, topic: str, count: int) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all"})
    for number in range(count):
        producer.produce(topic, b"job %d" % number)
    assert producer.flush(60) == 0


def take(consumer: QueueConsumer, count: int) -> list[QueueRecord]:
    """Take and accept so many records."""
    done: list[QueueRecord] = []

    def enough() -> bool | None:
        found = consumer.poll(max_records=count, max_wait_ms=200)
        refused = {each.record.offset for each, _ in consumer.acknowledge(found, Verdict.ACCEPT)}
        done.extend(each for each in found if each.record.offset not in refused)
        return True if len(done) >= count else None

    wait_for(enough, 60, f"{count} records are not given out")
    return done


def cut_from_zookeeper(cluster: ClusterProcesses, broker_id: int) -> Callable[[], None]:
    cluster.wires().cut(broker_node(broker_id), [ZOOKEEPER])
    return lambda: None  # it stays so, and still thinks that it leads


def pause(cluster: ClusterProcesses, broker_id: int) -> Callable[[], None]:
    cluster.brokers[broker_id].pause()

    def wake_up() -> None:
        # Whether the news or a request is read first is luck: here the news do not come.
        cluster.wires().cut(broker_node(broker_id), [ZOOKEEPER])
        cluster.brokers[broker_id].resume()

    return wake_up


@pytest.mark.parametrize("fault", [cut_from_zookeeper, pause])
def test_a_replaced_leader_gives_nothing_out(
    cluster: ClusterProcesses, fault: Callable[[ClusterProcesses, int], Callable[[], None]]
) -> None:
    controller = cluster.controller()
    leader = next(each for each in cluster.brokers if each != controller)
    topic = create(cluster, leader)
    others = ",".join(each.address for number, each in cluster.brokers.items() if number != leader)
    produce(cluster.bootstrap, topic, RECORDS)
    with member(others, topic) as left_behind:
        take(left_behind, RECORDS)
        produce(cluster.bootstrap, topic, RECORDS)
        undo = fault(cluster, leader)
        wait_for(
            lambda: None if _leader_seen_by(cluster, controller, topic) == leader else True,
            SESSION_S * 5,
            f"broker {leader} still leads",
        )
        with member(others, topic) as other:
            accepted = {each.record.offset for each in take(other, RECORDS)}
        assert accepted == set(range(RECORDS, 2 * RECORDS))
        # It asks the broker that it knows as the leader, from here on: before that broker hears of anything.
        given: list[QueueRecord] = []
        asked_enough = threading.Event()

        def ask() -> None:
            while not asked_enough.is_set():
                given.extend(left_behind.poll(max_records=50, max_wait_ms=200))

        asking = threading.Thread(target=ask)
        asking.start()
        asking.join(0.5)
        undo()
        asking.join(ASKED_S)
        asked_enough.set()
        asking.join(60)
        again = {each.record.offset for each in given}
        assert not again, f"{sorted(again)} were accepted and given out again by broker {leader}"
        # It learns in the end who leads.
        cluster.restore()
        produce(others, topic, 1)
        assert [each.record.offset for each in take(left_behind, 1)] == [2 * RECORDS]


def test_queues_go_on_while_zookeeper_is_gone(cluster: ClusterProcesses) -> None:
    topic = create(cluster, 1)
    produce(cluster.bootstrap, topic, RECORDS)
    with member(cluster.bootstrap, topic) as reader:
        take(reader, RECORDS)
        cluster.kill_zookeeper(1)
        for turn in range(1, int(SESSION_S) + 3):
            produce(cluster.bootstrap, topic, RECORDS)
            found = take(reader, RECORDS)
            assert {each.record.offset for each in found} == set(range(turn * RECORDS, (turn + 1) * RECORDS))
            threading.Event().wait(1)


def _leader_seen_by(cluster: ClusterProcesses, broker_id: int, topic: str) -> int | None:
    view = cluster.view(broker_id, topic)
    return None if view is None else view.partitions[0].leader
