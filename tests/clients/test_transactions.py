"""Transactions with real clients: what is visible and when, who is fenced, and offsets that belong to a transaction.

MILLRACE_CLIENTS_TEST_BOOTSTRAP names a broker that is already running, such as Apache Kafka: the same tests then run
against that one, which shows that they ask for what the original does. It must look for transactions that have timed
out several times a second (`transaction.abort.timed.out.transaction.cleanup.interval.ms`); what stops a broker is
skipped there.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from confluent_kafka import Consumer, KafkaException
from confluent_kafka import TopicPartition as Position
from confluent_kafka.admin import AdminClient, NewTopic

from clients.adapters.confluent import Confluent
from clients.adapters.interface import Partition, Reader, Received, Transactions
from clients.adapters.kafka_python import KafkaPython
from clients.conftest import SWIFT
from clients.members import POLL_S, wait_for
from clients.opened import Opened
from clients.reading import read_until
from millrace.testing import Cluster
from support.roles import Roles

# A client that is refused a connection while the broker is away may leave its socket to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

EXTERNAL = os.environ.get("MILLRACE_CLIENTS_TEST_BOOTSTRAP", "")
SETTINGS = {
    **SWIFT,
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
    "transaction.state.log.num.partitions": "3",  # as many leaders as there are brokers, and none to spare
}
QUIET_S = 0.7
"""How long a reader is watched that must not see anything: several fetches."""
FENCED = ("fenced", "invalid_producer_epoch", "invalidproducerepoch")
"""What the clients call it when the transactional id belongs to a newer producer, or the coordinator took it away."""
ZOMBIE = ("generation", "member", "commitfailed", "fenced", "rebalance", "stale")
"""What the clients call it when a transaction brings offsets of a member that has been replaced."""


class ExternalBroker:
    """As much of `Cluster` as a broker can do that somebody else has started."""

    bootstrap_servers = EXTERNAL

    def create_topic(self, name: str, partitions: int = 1) -> None:
        admin = AdminClient({"bootstrap.servers": EXTERNAL, "log_level": 2})
        admin.create_topics([NewTopic(name, partitions, 1)])[name].result(20)

    def stop_broker(self, broker_id: int) -> None:
        pytest.skip(f"broker {broker_id} is not ours to stop")

    start_broker = stop_broker

    def restart(self) -> None:
        pytest.skip("the broker is not ours to restart")


Brokers = Cluster | ExternalBroker


@pytest.fixture(
    scope="module",
    params=["external"] if EXTERNAL else [1, 3],
    ids=["external"] if EXTERNAL else ["1-broker", "3-brokers"],
)
def cluster(request: pytest.FixtureRequest) -> Iterator[Brokers]:
    """Brokers of this file's own: one is stopped, and timeouts are looked for often."""
    if EXTERNAL:
        yield ExternalBroker()
        return
    with Cluster(brokers=request.param, settings=SETTINGS) as running:
        yield running


@pytest.fixture
def roles(cluster: Brokers) -> Iterator[Roles]:
    with Roles(cluster.bootstrap_servers) as asked:
        yield asked


@pytest.fixture
def fresh() -> Callable[[str], str]:
    """A name that no other test has used, nor another run against the same broker."""
    run = time.time_ns()
    numbers = iter(range(1000))
    return lambda what: f"{what}-{run}-{next(numbers)}"


def values_of(records: list[Received]) -> list[bytes]:
    return [record.value or b"" for record in records]


def read_values(reader: Reader, count: int) -> list[bytes]:
    return values_of(read_until(reader, lambda so_far: len(so_far) >= count))


def opened_at(opened: Opened, partitions: list[Partition], *, committed_only: bool) -> Reader:
    reader = opened.reader(committed_only=committed_only)
    reader.assign(partitions)
    return reader


def assert_refused(call: Callable[[], None], words: tuple[str, ...]) -> None:
    with pytest.raises(Exception) as refused:
        call()
    text = f"{refused.value!r} {refused.value.__cause__!r}".lower()
    assert any(word in text for word in words), text


def test_commit_shows_everywhere_at_once_and_abort_hides(
    opened: Opened, cluster: Brokers, fresh: Callable[[str], str]
) -> None:
    one, other = fresh("one"), fresh("other")
    cluster.create_topic(one, 2)
    cluster.create_topic(other, 1)
    places = [(one, 0), (one, 1), (other, 0)]
    producer = opened.transactions(fresh("id"))
    for word, end in ((b"kept", producer.commit), (b"gone", producer.abort), (b"last", producer.commit)):
        producer.begin()
        for number in range(3):
            for topic, partition in places:
                producer.send(topic, word + b"-%d" % number, partition)
        producer.flush()
        end()
    for place in places:
        kept = [b"kept-0", b"kept-1", b"kept-2", b"last-0", b"last-1", b"last-2"]
        gone = [b"gone-0", b"gone-1", b"gone-2"]
        assert read_values(opened_at(opened, [place], committed_only=True), 6) == kept
        assert read_values(opened_at(opened, [place], committed_only=False), 9) == [*kept[:3], *gone, *kept[3:]]


def test_empty_transactions(opened: Opened, cluster: Brokers, fresh: Callable[[str], str]) -> None:
    topic = fresh("topic")
    cluster.create_topic(topic)
    producer = opened.transactions(fresh("id"))
    for end in (producer.commit, producer.abort, producer.commit):
        producer.begin()
        end()
    producer.begin()
    producer.send(topic, b"something")
    producer.commit()
    producer.begin()
    producer.commit()
    assert read_values(opened_at(opened, [(topic, 0)], committed_only=True), 1) == [b"something"]


def test_a_reader_waits_at_an_open_transaction_and_goes_on_after_it(
    opened: Opened, cluster: Brokers, fresh: Callable[[str], str]
) -> None:
    topic = fresh("topic")
    cluster.create_topic(topic)
    place = (topic, 0)
    producer, plain = opened.transactions(fresh("id")), opened.sender()
    careful, careless = (opened_at(opened, [place], committed_only=only) for only in (True, False))
    for word, end in ((b"first", producer.commit), (b"second", producer.abort)):
        producer.begin()
        producer.send(topic, word)
        producer.flush()
        plain.send(topic, b"beside-" + word, partition=0).result(20)
        assert read_values(careless, 2) == [word, b"beside-" + word]
        assert careful.poll(QUIET_S) == [], "the transaction is open"
        end()
        committed = [word] if end == producer.commit else []
        assert read_values(careful, 1 + len(committed)) == [*committed, b"beside-" + word]


def test_a_second_producer_fences_the_first(opened: Opened, cluster: Brokers, fresh: Callable[[str], str]) -> None:
    topic, transactional_id = fresh("topic"), fresh("id")
    cluster.create_topic(topic)
    first = opened.transactions(transactional_id)
    first.begin()
    first.send(topic, b"of the first")
    first.flush()
    second = opened.transactions(transactional_id)
    second.begin()
    second.send(topic, b"of the second")
    second.flush()
    assert_refused(first.commit, FENCED)
    second.commit()
    assert read_values(opened_at(opened, [(topic, 0)], committed_only=True), 1) == [b"of the second"]


def test_a_client_that_died_in_a_transaction_begins_anew(
    opened: Opened, cluster: Brokers, fresh: Callable[[str], str]
) -> None:
    topic, transactional_id = fresh("topic"), fresh("id")
    cluster.create_topic(topic)
    reader = opened_at(opened, [(topic, 0)], committed_only=True)
    dead = opened.client.transactions(opened.bootstrap, transactional_id)
    dead.begin()
    dead.send(topic, b"before")
    dead.flush()
    dead.abandon()
    opened.sender().send(topic, b"beside", partition=0).result(20)
    assert reader.poll(QUIET_S) == [], "nobody has ended the transaction"
    again = opened.transactions(transactional_id)
    assert read_values(reader, 1) == [b"beside"], "whoever comes with the id ends what it left open"
    again.begin()
    again.send(topic, b"after")
    again.commit()
    assert read_values(reader, 1) == [b"after"]


def test_a_transaction_that_times_out_is_aborted_and_its_producer_fenced(
    opened: Opened, cluster: Brokers, fresh: Callable[[str], str]
) -> None:
    topic = fresh("topic")
    cluster.create_topic(topic)
    slow = opened.transactions(fresh("id"), timeout_ms=1000)
    slow.begin()
    slow.send(topic, b"too slow")
    slow.flush()
    opened.sender().send(topic, b"beside", partition=0).result(20)
    assert read_values(opened_at(opened, [(topic, 0)], committed_only=True), 1) == [b"beside"]
    assert_refused(slow.commit, FENCED)


def test_a_timeout_beyond_the_brokers_is_refused(opened: Opened, fresh: Callable[[str], str]) -> None:
    wanted_ms = 3_600_000  # the default of transaction.max.timeout.ms is 15 minutes
    assert_refused(
        lambda: opened.client.transactions(opened.bootstrap, fresh("id"), timeout_ms=wanted_ms).close(),
        ("invalid_transaction_timeout", "invalidtransactiontimeout", "transaction timeout is larger"),
    )


def put(producer: Transactions, target: str, records: list[Received], membership: object) -> None:
    """A step of a copy, but for the end of the transaction."""
    producer.begin()
    for record in records:
        producer.send(target, b"copy of " + (record.value or b""), record.partition)
    producer.send_offsets({(record.topic, record.partition): record.offset + 1 for record in records}, membership)


def fill(opened: Opened, topic: str, count: int, partitions: int) -> None:
    sender = opened.sender()
    for number in range(count):
        sender.send(topic, b"%d" % number, partition=number % partitions)
    sender.flush()


def test_offsets_count_with_their_transaction(
    opened: Opened, cluster: Brokers, roles: Roles, fresh: Callable[[str], str]
) -> None:
    source, target, group = fresh("source"), fresh("target"), fresh("group")
    cluster.create_topic(source, 2)
    cluster.create_topic(target, 2)
    fill(opened, source, 40, 2)
    reader = opened.reader(group=group, committed_only=True)
    reader.subscribe(source)
    producer = opened.transactions(fresh("id"))
    records = read_until(reader, lambda so_far: len(so_far) == 40)
    half, rest = ([record for record in records if (record.offset < 10) is early] for early in (True, False))
    nothing: dict[int, int | None] = {0: None, 1: None}

    put(producer, target, records, reader.membership())
    producer.abort()
    put(producer, target, half, reader.membership())
    assert roles.committed(group, source, 2) == nothing, "not before the end of the transaction"
    producer.commit()
    wait_committed(roles, group, source, {0: 10, 1: 10})
    put(producer, target, rest, reader.membership())
    producer.abort()
    reader.close()

    successor = opened.reader(group=group, committed_only=True)
    successor.subscribe(source)
    again = read_until(successor, lambda so_far: len(so_far) == 20)
    assert sorted(again) == sorted(rest), "what was aborted is read again, and nothing else"
    put(producer, target, again, successor.membership())
    producer.commit()
    wait_committed(roles, group, source, {0: 20, 1: 20})
    for partition in range(2):
        copied = read_values(opened_at(opened, [(target, partition)], committed_only=True), 20)
        assert copied == [b"copy of %d" % number for number in range(partition, 40, 2)]


def wait_committed(roles: Roles, group: str, topic: str, expected: dict[int, int | None]) -> None:
    """A commit is confirmed before its marker has reached the group's coordinator."""
    wait_for(lambda: roles.committed(group, topic, 2) == expected, lambda: roles.committed(group, topic, 2))


def test_a_member_that_was_replaced_commits_nothing(
    opened: Opened, cluster: Brokers, roles: Roles, fresh: Callable[[str], str]
) -> None:
    if not opened.client.fences_zombies:
        pytest.skip(f"{opened.client.name} does not tell the coordinator which member it is")
    source, target, group = fresh("source"), fresh("target"), fresh("group")
    cluster.create_topic(source, 2)
    cluster.create_topic(target, 2)
    fill(opened, source, 20, 2)
    first, second = (opened.reader(group=group, committed_only=True) for _ in range(2))
    first.subscribe(source)
    records = read_until(first, lambda so_far: len(so_far) == 20)
    outdated = first.membership()
    second.subscribe(source)
    shared_out(first, second)

    zombie = opened.transactions(fresh("id"))
    assert_refused(lambda: put(zombie, target, records, outdated), ZOMBIE)
    zombie.abort()
    ((_, mine),) = first.assignment()
    producer = opened.transactions(fresh("id"))
    put(producer, target, [record for record in records if record.partition == mine], first.membership())
    producer.commit()
    wait_committed(roles, group, source, {mine: 10, 1 - mine: None})
    copied = read_values(opened_at(opened, [(target, mine)], committed_only=True), 10)
    assert copied == [b"copy of %d" % number for number in range(mine, 20, 2)]


def shared_out(first: Reader, second: Reader) -> None:
    """Poll two members of a group until each has one of the two partitions.

    Each on a thread of its own, as applications do. kafka-python 3.0.12 joins again if its join was completed between
    two polls; if that is the leader of the group, everybody does. Polled in turns, two of them may go on like that.
    """
    members = (first, second)
    shares: list[set[Partition]] = [set(), set()]
    answered = threading.Event()

    def poll(number: int) -> None:
        while not answered.is_set():
            members[number].poll(POLL_S)
            shares[number] = members[number].assignment()

    with ThreadPoolExecutor(2, "group member") as threads:
        polling = [threads.submit(poll, number) for number in range(2)]
        try:
            wait_for(
                lambda: [len(share) for share in shares] == [1, 1] or any(each.done() for each in polling),
                lambda: shares,
            )
        finally:
            answered.set()
        for each in polling:
            each.result()


def test_the_brokers_restart_between_begin_and_commit(
    opened: Opened, cluster: Brokers, roles: Roles, fresh: Callable[[str], str]
) -> None:
    """A broker alone restarts; of three, the one that coordinates goes, and comes back after the commit."""
    alone = "," not in opened.bootstrap
    if not alone and isinstance(opened.client, KafkaPython):
        # Its Sender retries a request only where it has no node for it; a node that refuses is an exception there.
        pytest.skip("kafka-python 3.0.12 forgets its EndTxn when its coordinator's broker is gone, and waits for ever")
    topic, transactional_id = fresh("topic"), fresh("id")
    cluster.create_topic(topic)
    producer = opened.transactions(transactional_id)
    producer.begin()
    producer.send(topic, b"before")
    producer.flush()
    coordinator = roles.transaction_coordinator(transactional_id)
    if alone:
        cluster.restart()
    else:
        cluster.stop_broker(coordinator)
        roles.transaction_coordinator(transactional_id, but=coordinator)
    try:
        producer.send(topic, b"after")
        producer.commit()
        reader = opened_at(opened, [(topic, 0)], committed_only=True)
        assert read_values(reader, 2) == [b"before", b"after"]
    finally:
        if not alone:
            cluster.start_broker(coordinator)
    if not alone:
        roles.wait_in_sync("__transaction_state")  # the next test stops another one
    producer.begin()
    producer.send(topic, b"once more")
    producer.commit()
    assert read_values(reader, 1) == [b"once more"]


class ModernReader:
    """A member of a group of KIP-848."""

    def __init__(self, bootstrap: str, group: str, topic: str) -> None:
        self.consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": group,
                "group.protocol": "consumer",
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "log_level": 2,
            }
        )
        self.consumer.subscribe([topic])
        self.positions: dict[Partition, int] = {}

    def poll(self) -> None:
        for message in self.consumer.consume(100, 0.1):
            assert message.error() is None, message.error()
            self.positions[message.topic() or "", message.partition() or 0] = (message.offset() or 0) + 1


def test_offsets_of_the_consumer_protocol(cluster: Brokers, roles: Roles, fresh: Callable[[str], str]) -> None:
    """librdkafka alone speaks KIP-848: offsets count with the transaction, and an old member epoch is refused."""
    source, group = fresh("source"), fresh("group")
    cluster.create_topic(source, 2)
    opened = Opened(Confluent(), cluster.bootstrap_servers)
    fill(opened, source, 20, 2)
    producer = opened.transactions(fresh("id"))
    members = [ModernReader(opened.bootstrap, group, source)]
    first = members[0].consumer

    def shares() -> list[int]:
        for member in members:
            member.poll()
        return [len(member.consumer.assignment()) for member in members]

    try:
        wait_for(lambda: shares() == [2] and sum(members[0].positions.values()) == 20, lambda: members[0].positions)
        outdated = first.consumer_group_metadata()
        half = dict.fromkeys(members[0].positions, 5)
        for end in (producer.abort, producer.commit):
            producer.begin()
            producer.send_offsets(half, first.consumer_group_metadata())
            with pytest.raises(KafkaException, match="_TIMED_OUT"):  # it wants to know what cannot change any more
                first.committed([Position(source, 0)], timeout=QUIET_S)
            assert roles.committed(group, source, 2) == {0: None, 1: None}
            end()
        wait_committed(roles, group, source, {0: 5, 1: 5})

        members.append(ModernReader(opened.bootstrap, group, source))
        wait_for(lambda: shares() == [1, 1], lambda: [member.consumer.assignment() for member in members])
        producer.begin()
        assert_refused(lambda: producer.send_offsets(members[0].positions, outdated), ZOMBIE)
        producer.abort()
        assert [each.offset for each in first.committed([Position(source, 0), Position(source, 1)], timeout=20)] == [
            5,
            5,
        ]
    finally:
        for member in members:
            member.consumer.close()
        opened.close()
