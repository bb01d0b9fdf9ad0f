"""The coordinator of a group moves with its partition: the next one knows the same offsets and the same members."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from clients.adapters.interface import Client
from clients.members import COORDINATOR_AWAY, Member, wait_for
from clients.opened import Opened
from clients.reading import read_count
from millrace.testing import Cluster
from support.roles import Roles

# A client that is refused a connection while the broker is away may leave its socket to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

PARTITIONS = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three brokers of this file's own: each test stops one."""
    with Cluster(brokers=3) as running:
        yield running


@pytest.fixture
def roles(cluster: Cluster) -> Iterator[Roles]:
    with Roles(cluster.bootstrap_servers) as asked:
        yield asked


def test_offsets_are_the_same_at_every_coordinator(
    opened: Opened, cluster: Cluster, roles: Roles, fresh: Callable[[str], str]
) -> None:
    topic, group = fresh("counted"), fresh("group")
    roles.create_topic(topic, PARTITIONS)
    sender = opened.sender()
    for number in range(40):
        sender.send(topic, b"%d" % number, partition=number % PARTITIONS)
    sender.flush()
    reader = opened.reader(group=group)
    reader.subscribe(topic)
    read_count(reader, 40)
    reader.commit()
    before = roles.committed(group, topic, PARTITIONS)
    assert before == dict.fromkeys(range(PARTITIONS), 10)
    first = roles.coordinator(group)
    cluster.stop_broker(first)
    try:
        second = roles.coordinator(group, but=first)
        assert roles.committed(group, topic, PARTITIONS) == before
        assert [reader.committed((topic, index)) for index in range(PARTITIONS)] == [10] * PARTITIONS
    finally:
        cluster.start_broker(first)
    roles.wait_in_sync("__consumer_offsets")  # a coordinator that was away has caught up, and may lead again
    cluster.stop_broker(second)
    try:
        assert roles.coordinator(group, but=second) != second
        assert roles.committed(group, topic, PARTITIONS) == before
    finally:
        cluster.start_broker(second)
    roles.wait_in_sync("__consumer_offsets")


def test_members_stay_when_their_coordinator_goes(
    client: Client, opened: Opened, cluster: Cluster, roles: Roles, fresh: Callable[[str], str]
) -> None:
    topic, group = fresh("shared"), fresh("group")
    roles.create_topic(topic, PARTITIONS)
    sender = opened.sender()
    values: list[bytes] = []
    members: list[Member] = []

    def produce(count: int) -> None:
        for _ in range(count):
            values.append(b"%d" % len(values))
            sender.send(topic, values[-1], partition=len(values) % PARTITIONS)
        sender.flush()

    def described() -> object:
        return len(values), [(len(member.received), member.assigned, member.error) for member in members]

    def everything_read() -> bool:
        return {record.value for member in members for record in list(member.received)} == set(values)

    stopped: int | None = None
    try:
        members += [Member(client, opened.bootstrap, topic, group, COORDINATOR_AWAY) for _ in range(2)]
        wait_for(lambda: [len(member.assigned) for member in members] == [2, 2], described)
        produce(80)
        wait_for(everything_read, described)
        before = roles.members(group), [set(member.assigned) for member in members]
        assert len(before[0]) == 2
        first = roles.coordinator(group)
        cluster.stop_broker(first)
        stopped = first
        roles.coordinator(group, but=first)
        read = [len(member.received) for member in members]
        produce(80)
        wait_for(everything_read, described)
        # Nobody was thrown out and nobody had to join again: the same members with the same partitions, at work.
        assert (roles.members(group), [set(member.assigned) for member in members]) == before
        assert all(len(member.received) > count for member, count in zip(members, read, strict=True))
        expected = dict.fromkeys(range(PARTITIONS), len(values) // PARTITIONS)
        wait_for(lambda: roles.committed(group, topic, PARTITIONS) == expected, described)
    finally:
        for member in members:
            member.leave()
        if stopped is not None:
            cluster.start_broker(stopped)
    roles.wait_in_sync("__consumer_offsets")
    assert [member.error for member in members] == [None, None]
    assert sum(len(member.received) for member in members) == len(values)  # clean stop, committed: nothing read twice
