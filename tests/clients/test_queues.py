"""Topics read as queues (KIP-932) by librdkafka's share consumer: who gets which record, how often, and when again."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from confluent_kafka import AcknowledgeType, Message, Producer, ShareConsumer

from clients.members import wait_for
from millrace.admin.groups import describe_group
from millrace.client.cluster import ClusterClient
from millrace.client.settings import ClientSettings
from millrace.errors import ApiError
from millrace.testing import Cluster
from support.group_configs import set_group_configs
from support.roles import Roles

DEADLINE_S = 40.0
PARTITIONS = 3
EXPLICIT = {"share.acknowledgement.mode": "explicit"}
QUICK = {
    "group.share.record.lock.duration.ms": "2000",
    "group.share.min.record.lock.duration.ms": "1000",
    "group.share.delivery.count.limit": "3",
}

Share = Callable[..., ShareConsumer]
RecordPosition = tuple[int, int]


def position(message: Message) -> RecordPosition:
    return message.partition() or 0, message.offset() or 0


def produce(bootstrap: str, topic: str, values: list[bytes]) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "log_level": 3})
    for number, value in enumerate(values):
        producer.produce(topic, value, partition=number % PARTITIONS)
    assert producer.flush(20) == 0


def take(consumer: ShareConsumer, count: int) -> list[Message]:
    """Poll until so many records have come, acknowledging nothing in between: one poll has to do in explicit mode."""
    taken: list[Message] = []
    ends_at = time.monotonic() + DEADLINE_S
    while len(taken) < count:
        assert time.monotonic() < ends_at, f"{len(taken)} of {count} records"
        taken += good(consumer.poll(0.5))
    return taken


def good(messages: object) -> list[Message]:
    found = list(messages)  # type: ignore[call-overload]
    assert all(message.error() is None for message in found), [message.error() for message in found]
    return found


def nothing_for(consumer: ShareConsumer, seconds: float = 1.5) -> None:
    """A negative needs time: a record that should not come would, in that."""
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        assert good(consumer.poll(0.1)) == []


def acknowledge(consumer: ShareConsumer, messages: list[Message], kind: AcknowledgeType) -> None:
    for message in messages:
        consumer.acknowledge(message, kind)
    errors = [error for error in consumer.commit_sync(20).values() if error is not None]
    assert errors == []


def take_explicitly(consumer: ShareConsumer, count: int, kind: AcknowledgeType) -> list[Message]:
    """So many records, each acknowledged as it comes."""
    taken: list[Message] = []
    ends_at = time.monotonic() + DEADLINE_S
    while len(taken) < count:
        assert time.monotonic() < ends_at, f"{len(taken)} of {count} records"
        messages = good(consumer.poll(0.5))
        if messages:
            acknowledge(consumer, messages, kind)
        taken += messages
    return taken


@pytest.fixture
def share() -> Iterator[Share]:
    """Opens share consumers that are closed at the end."""
    opened: list[ShareConsumer] = []

    def open_one(bootstrap: str, group: str, topic: str, reset: str = "earliest", **settings: object) -> ShareConsumer:
        set_group_configs(bootstrap, group, {"share.auto.offset.reset": reset})
        consumer = ShareConsumer({"bootstrap.servers": bootstrap, "group.id": group, "log_level": 3, **settings})
        consumer.subscribe([topic])
        opened.append(consumer)
        return consumer

    yield open_one
    for each in opened:
        each.close()


@pytest.fixture
def filled(cluster: Cluster, fresh: Callable[[str], str]) -> tuple[str, str, list[bytes]]:
    """A topic with records, a group, and the records."""
    topic, group = fresh("queue"), fresh("queue-group")
    cluster.create_topic(topic, PARTITIONS)
    values = [b"%d" % number for number in range(300)]
    produce(cluster.bootstrap_servers, topic, values)
    return topic, group, values


def test_what_was_polled_is_accepted_by_the_next_poll(
    cluster: Cluster, filled: tuple[str, str, list[bytes]], share: Share
) -> None:
    topic, group, values = filled
    consumer = share(cluster.bootstrap_servers, group, topic)
    taken = take(consumer, len(values))
    assert sorted(message.value() or b"" for message in taken) == sorted(values)
    assert {message.delivery_count() for message in taken} == {1}
    nothing_for(consumer)
    consumer.commit_sync(20)
    consumer.close()
    nothing_for(share(cluster.bootstrap_servers, group, topic))


def test_accepted_records_never_come_again(
    cluster: Cluster, filled: tuple[str, str, list[bytes]], share: Share
) -> None:
    topic, group, values = filled
    consumer = share(cluster.bootstrap_servers, group, topic, **EXPLICIT)
    taken = take_explicitly(consumer, len(values), AcknowledgeType.ACCEPT)
    assert len({position(message) for message in taken}) == len(taken) == len(values)
    consumer.close()
    produce(cluster.bootstrap_servers, topic, [b"new"])
    (only,) = take(share(cluster.bootstrap_servers, group, topic), 1)
    assert only.value() == b"new"


def test_released_records_come_again_and_count(
    cluster: Cluster, filled: tuple[str, str, list[bytes]], share: Share
) -> None:
    topic, group, values = filled
    consumer = share(cluster.bootstrap_servers, group, topic, **EXPLICIT)
    first = good(consumer.poll(DEADLINE_S))
    assert first
    acknowledge(consumer, first, AcknowledgeType.RELEASE)
    taken = take_explicitly(consumer, len(values), AcknowledgeType.ACCEPT)
    assert sorted(message.value() or b"" for message in taken) == sorted(values)
    counts = {position(message): message.delivery_count() for message in taken}
    released = {position(message) for message in first}
    assert {counts[each] for each in released} == {2}
    assert {count for each, count in counts.items() if each not in released} <= {1}


def test_rejected_records_are_done_with(cluster: Cluster, filled: tuple[str, str, list[bytes]], share: Share) -> None:
    topic, group, values = filled
    consumer = share(cluster.bootstrap_servers, group, topic, **EXPLICIT)
    rejected = take_explicitly(consumer, len(values), AcknowledgeType.REJECT)
    assert len(rejected) == len(values)
    nothing_for(consumer)


def test_what_a_consumer_leaves_goes_to_the_next(
    cluster: Cluster, filled: tuple[str, str, list[bytes]], share: Share
) -> None:
    topic, group, values = filled
    leaves = share(cluster.bootstrap_servers, group, topic, **EXPLICIT)
    held = good(leaves.poll(DEADLINE_S))
    assert held
    leaves.close()
    stays = share(cluster.bootstrap_servers, group, topic, **EXPLICIT)
    taken = take_explicitly(stays, len(values), AcknowledgeType.ACCEPT)
    assert sorted(message.value() or b"" for message in taken) == sorted(values)


class Worker:
    """A share consumer on a thread, as an application has it: poll, note, accept or let go of, commit."""

    def __init__(self, consumer: ShareConsumer, holders: dict[RecordPosition, str], name: str) -> None:
        self.accepted: list[RecordPosition] = []
        self.clashes: list[object] = []
        self.error: BaseException | None = None
        self._consumer = consumer
        self._holders = holders
        self._name = name
        self._stopping = threading.Event()
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                messages = good(self._consumer.poll(0.2))
                for message in messages:
                    other = self._holders.setdefault(position(message), self._name)
                    if other != self._name:
                        self.clashes.append((position(message), other, self._name))
                kinds = [
                    AcknowledgeType.RELEASE if next(self._numbers) % 7 == 0 else AcknowledgeType.ACCEPT
                    for _ in messages
                ]
                for message in messages:  # it is let go of from here on, and somebody else may have it
                    del self._holders[position(message)]
                for message, kind in zip(messages, kinds, strict=True):
                    self._consumer.acknowledge(message, kind)
                if messages:
                    errors = [error for error in self._consumer.commit_sync(20).values() if error is not None]
                    assert errors == []
                    self.accepted += [
                        position(message)
                        for message, kind in zip(messages, kinds, strict=True)
                        if kind is AcknowledgeType.ACCEPT
                    ]
        except BaseException as error:
            self.error = error
            raise

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        assert self.error is None


def wait_until_all_read(bootstrap: str, group: str, members: int) -> None:
    """Return when everybody has a share of the partitions.

    librdkafka 2.16.0 must not be closed in the milliseconds in which it gets its first: the metadata that it asks for
    then come after the farewell, it takes the partition up after all, and `close` waits for that for ever.
    """
    with closing(ClusterClient(ClientSettings.from_properties({"bootstrap.servers": bootstrap}))) as client:

        def reading() -> int:
            try:
                view = describe_group(client, group)
            except ApiError:
                return 0  # its coordinator is being found
            return 0 if view is None else sum(bool(member.partitions) for member in view.members)

        wait_for(lambda: reading() == members, reading)


def test_several_consumers_never_hold_the_same_record(
    cluster: Cluster, fresh: Callable[[str], str], share: Share
) -> None:
    topic, group = fresh("queue"), fresh("queue-group")
    cluster.create_topic(topic, PARTITIONS)
    set_group_configs(cluster.bootstrap_servers, group, {"share.delivery.count.limit": "10"})
    holders: dict[RecordPosition, str] = {}
    workers = [
        Worker(share(cluster.bootstrap_servers, group, topic, **EXPLICIT), holders, f"worker {number}")
        for number in range(4)
    ]
    try:
        wait_until_all_read(cluster.bootstrap_servers, group, len(workers))
        produce(cluster.bootstrap_servers, topic, [b"%d" % number for number in range(3000)])
        wait_for(
            lambda: sum(len(worker.accepted) for worker in workers) >= 3000,
            lambda: [(len(worker.accepted), worker.error) for worker in workers],
        )
    finally:
        for worker in workers:
            worker.stop()
    assert [clash for worker in workers for clash in worker.clashes] == []
    accepted = Counter(each for worker in workers for each in worker.accepted)
    assert len(accepted) == 3000
    assert set(accepted.values()) == {1}


def test_locks_that_run_out(fresh: Callable[[str], str], share: Share) -> None:
    """A member that lives, and never says what became of its record, holds it for so long and so often."""
    topic, group = fresh("queue"), fresh("queue-group")
    with Cluster(settings=QUICK) as cluster:
        cluster.create_topic(topic)
        producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 3})
        producer.produce(topic, b"sticky")
        assert producer.flush(20) == 0
        silent = [share(cluster.bootstrap_servers, group, topic, **EXPLICIT) for _ in range(3)]
        waited = []
        for number, consumer in enumerate(silent, 1):
            began = time.monotonic()
            (message,) = take(consumer, 1)
            waited.append(time.monotonic() - began)
            assert message.delivery_count() == number
        assert min(waited[1:]) > 1.0, "the record came before its lock had run out"
        # Three deliveries are the limit: the group gives the record up.
        last = share(cluster.bootstrap_servers, group, topic, **EXPLICIT)
        nothing_for(last, 4)
        for consumer in (*silent, last):
            consumer.close()


def test_a_new_queue_begins_at_the_end_also_after_a_restart(fresh: Callable[[str], str], share: Share) -> None:
    """Nobody has opened the log yet when the queue asks where its end is."""
    topic, group = fresh("queue"), fresh("queue-group")
    with Cluster() as cluster:
        cluster.create_topic(topic, PARTITIONS)
        produce(cluster.bootstrap_servers, topic, [b"before"] * 30)
        cluster.restart()
        consumer = share(cluster.bootstrap_servers, group, topic, "latest")
        nothing_for(consumer, 3)
        taken: list[Message] = []
        ends_at = time.monotonic() + DEADLINE_S
        while not taken and time.monotonic() < ends_at:
            produce(cluster.bootstrap_servers, topic, [b"later"] * PARTITIONS)
            taken = good(consumer.poll(1))
        assert {message.value() for message in taken} == {b"later"}
        consumer.close()


def test_a_queue_goes_on_when_leader_and_coordinator_go(fresh: Callable[[str], str], share: Share) -> None:
    topic, group = fresh("queue"), fresh("queue-group")
    values = [b"%d" % number for number in range(300)]
    with Cluster(brokers=3) as cluster, Roles(cluster.bootstrap_servers) as roles:
        roles.create_topic(topic, PARTITIONS)
        produce(cluster.bootstrap_servers, topic, values)
        consumer = share(cluster.bootstrap_servers, group, topic, **EXPLICIT)
        before = take_explicitly(consumer, 1, AcknowledgeType.ACCEPT)
        first = roles.coordinator(group)
        cluster.stop_broker(first)
        roles.coordinator(group, but=first)
        after = take_explicitly(consumer, len(values) - len(before), AcknowledgeType.ACCEPT)
        cluster.start_broker(first)
        produce(cluster.bootstrap_servers, topic, [b"last"])
        last = take_explicitly(consumer, 1, AcknowledgeType.ACCEPT)
        assert sorted(message.value() or b"" for message in before + after) == sorted(values)
        assert [message.value() for message in last] == [b"last"]
        consumer.close()
