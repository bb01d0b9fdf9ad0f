"""The consumer protocol of KIP-848 with librdkafka's consumer: shares, patterns, restarts, and a change of protocol.

Members run on threads of their own, as applications do: poll, take note, commit.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from clients.members import wait_for
from millrace.testing import Cluster
from support.roles import Roles

PARTITIONS = 10
NEW = {"group.protocol": "consumer"}
CLASSIC = {
    "group.protocol": "classic",
    "partition.assignment.strategy": "cooperative-sticky",
    "heartbeat.interval.ms": "500",  # the next one tells of a rebalance
}
_MOVED = {
    KafkaError.STALE_MEMBER_EPOCH,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.FENCED_MEMBER_EPOCH,
    KafkaError._NO_OFFSET,
    # The coordinator is away, and the next one is not known yet.
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError._WAIT_COORD,
    KafkaError._TRANSPORT,
    KafkaError._TIMED_OUT,
    KafkaError.REQUEST_TIMED_OUT,
}
"""What a commit may say that comes at the wrong moment: the records are read again."""


class Member:
    """A consumer on a thread."""

    def __init__(self, bootstrap: str, group: str, topics: list[str], **settings: str) -> None:
        self.received: list[tuple[float, bytes]] = []
        self.assigned: set[tuple[str, int]] = set()
        self.error: KafkaException | None = None
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "log_level": 3,
                **settings,
            }
        )
        self._consumer.subscribe(topics)
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="group member")
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._leaving.is_set():
                messages = self._consumer.consume(100, 0.1)
                for message in messages:
                    if message.error() is None:
                        self.received.append((time.monotonic(), message.value() or b""))
                if messages:
                    self._commit()
                self.assigned = {(each.topic, each.partition) for each in self._consumer.assignment()}
        except KafkaException as error:
            # Raised where the test looks: an exception that ends a thread would be another test's error.
            self.error = error
        finally:
            self.assigned = set()
            self._consumer.close()

    def _commit(self) -> None:
        try:
            self._consumer.commit(asynchronous=False)
        except KafkaException as refused:
            if refused.args[0].code() not in _MOVED:
                raise

    def leave(self) -> None:
        self._leaving.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
        self.check()

    def check(self) -> None:
        if self.error is not None:
            raise self.error


class Feed:
    """Writes numbered records, all the time, until it is stopped."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.values: list[bytes] = []
        self._topic = topic
        self._producer = Producer({"bootstrap.servers": bootstrap, "log_level": 3})
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feed")
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(0.005):
            self.values.append(b"%d" % len(self.values))
            self._producer.produce(self._topic, self.values[-1], partition=len(self.values) % PARTITIONS)
            self._producer.poll(0)
        self._producer.flush(20)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(30)


@pytest.fixture
def everyone() -> Iterator[list[Member]]:
    members: list[Member] = []
    yield members
    for member in members:
        member.leave()


def shared_out(members: list[Member], partitions: int = PARTITIONS) -> None:
    """Wait until every partition has one owner, and nobody has two more than another."""

    def all_assigned() -> bool:
        for member in members:
            member.check()
        assigned = [partition for member in members for partition in member.assigned]
        shares = [len(member.assigned) for member in members]
        return len(assigned) == len(set(assigned)) == partitions and max(shares) - min(shares) <= 1

    wait_for(all_assigned, lambda: [(sorted(member.assigned), member.error) for member in members])


def test_members_share_and_a_rebalance_loses_nothing(
    cluster: Cluster, fresh: Callable[[str], str], everyone: list[Member]
) -> None:
    topic, group = fresh("shared"), fresh("group")
    cluster.create_topic(topic, PARTITIONS)
    feed = Feed(cluster.bootstrap_servers, topic)
    try:
        for _ in range(2):
            everyone.append(Member(cluster.bootstrap_servers, group, [topic], **NEW))
        shared_out(everyone)
        everyone.append(Member(cluster.bootstrap_servers, group, [topic], **NEW))
        shared_out(everyone)
        retired = [everyone.pop(0)]
        retired[0].leave()
        shared_out(everyone)
    finally:
        feed.stop()
    everybody = [*retired, *everyone]
    wait_for(
        lambda: {value for each in everybody for _, value in each.received} == set(feed.values),
        lambda: len(feed.values),
    )


def test_a_pattern_follows_new_topics(cluster: Cluster, fresh: Callable[[str], str], everyone: list[Member]) -> None:
    stem, group = fresh("pattern"), fresh("group")
    cluster.create_topic(f"{stem}.one", 2)
    everyone.append(Member(cluster.bootstrap_servers, group, [f"^{stem}\\..*"], **NEW))
    shared_out(everyone, 2)
    cluster.create_topic(f"{stem}.two", 3)
    shared_out(everyone, 5)


def test_a_static_member_comes_back_to_its_share(
    cluster: Cluster, fresh: Callable[[str], str], everyone: list[Member]
) -> None:
    topic, group = fresh("static"), fresh("group")
    cluster.create_topic(topic, PARTITIONS)
    for name in ("one", "two"):
        everyone.append(Member(cluster.bootstrap_servers, group, [topic], **NEW, **{"group.instance.id": name}))
    shared_out(everyone)
    had, others = everyone[1].assigned, everyone[0].assigned
    everyone.pop().leave()
    everyone.append(Member(cluster.bootstrap_servers, group, [topic], **NEW, **{"group.instance.id": "two"}))
    shared_out(everyone)
    assert (everyone[1].assigned, everyone[0].assigned) == (had, others)


def test_members_stay_when_their_coordinator_goes(fresh: Callable[[str], str], everyone: list[Member]) -> None:
    topic, group = fresh("moved"), fresh("group")
    with Cluster(brokers=3) as cluster, Roles(cluster.bootstrap_servers) as roles:
        roles.create_topic(topic, PARTITIONS)
        for _ in range(3):
            everyone.append(Member(cluster.bootstrap_servers, group, [topic], **NEW))
        shared_out(everyone)
        shares = [member.assigned for member in everyone]
        first = roles.coordinator(group)
        feed = Feed(cluster.bootstrap_servers, topic)
        try:
            cluster.stop_broker(first)
            roles.coordinator(group, but=first)
            already = [len(member.received) for member in everyone]
            wait_for(
                lambda: all(len(member.received) > had for member, had in zip(everyone, already, strict=True)),
                lambda: [member.error for member in everyone],
            )
        finally:
            cluster.start_broker(first)
            feed.stop()
        wait_for(
            lambda: {value for each in everyone for _, value in each.received} == set(feed.values),
            lambda: len(feed.values),
        )
        assert [member.assigned for member in everyone] == shares, "nobody had to move"
        while everyone:
            everyone.pop().leave()


def test_five_members_switch_to_the_new_protocol_and_back(
    cluster: Cluster, fresh: Callable[[str], str], everyone: list[Member]
) -> None:
    topic, group = fresh("switched"), fresh("group")
    cluster.create_topic(topic, PARTITIONS)
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 3})
    retired: list[Member] = []

    def kind() -> str:
        listed = admin.list_consumer_groups().result(20).valid
        return next(str(each.type.name) for each in listed if each.group_id == group)

    for _ in range(5):
        everyone.append(Member(cluster.bootstrap_servers, group, [topic], **CLASSIC))
    shared_out(everyone)
    assert kind() == "CLASSIC"
    feed = Feed(cluster.bootstrap_servers, topic)
    try:
        for protocol, name in ((NEW, "CONSUMER"), (CLASSIC, "CLASSIC")):
            for _ in range(5):
                retired.append(everyone.pop(0))
                retired[-1].leave()
                everyone.append(Member(cluster.bootstrap_servers, group, [topic], **protocol))
                shared_out(everyone)
            assert kind() == name
    finally:
        feed.stop()

    def read() -> list[tuple[float, bytes]]:
        return [each for member in retired + everyone for each in member.received]

    wait_for(lambda: {value for _, value in read()} == set(feed.values), lambda: len(feed.values))
    # At least once: what was read and could not be committed before its partition moved is read again, and no more.
    assert len(read()) - len(feed.values) < 0.1 * len(feed.values)
    # No stop of the world: somebody always reads.
    times = sorted(moment for moment, _ in read())
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) < 5
