"""A consumer group of three: everyone gets a share, a rebalance loses nothing, and commits mark the place."""

from __future__ import annotations

from collections.abc import Callable

from clients.members import Member, wait_for
from clients.opened import Opened
from millrace.testing import Cluster

PARTITIONS = 6


def shares(members: list[Member]) -> list[int]:
    return sorted(len(member.assigned) for member in members)


def shared_out(members: list[Member], expected: list[int]) -> None:
    """Wait until every partition has exactly one owner and the shares are as expected."""

    def all_assigned() -> bool:
        assigned = [partition for member in members for partition in member.assigned]
        return len(assigned) == len(set(assigned)) == PARTITIONS and shares(members) == expected

    wait_for(all_assigned, lambda: [(sorted(member.assigned), member.error) for member in members])


def test_three_members_and_a_rebalance_lose_nothing(
    opened: Opened, cluster: Cluster, fresh: Callable[[str], str]
) -> None:
    topic, group = fresh("shared"), fresh("group")
    cluster.create_topic(topic, PARTITIONS)
    sender = opened.sender()
    values: list[bytes] = []

    def produce(count: int) -> None:
        pending = []
        for _ in range(count):
            values.append(b"%d" % len(values))
            pending.append(sender.send(topic, values[-1], partition=len(values) % PARTITIONS))
        for one in pending:
            one.result(20)

    def everything_read(members: list[Member]) -> bool:
        return {record.value for member in members for record in member.received} == set(values)

    everyone: list[Member] = []
    try:
        everyone += [Member(opened.client, opened.bootstrap, topic, group) for _ in range(2)]
        shared_out(everyone, [3, 3])
        produce(120)
        wait_for(lambda: everything_read(everyone), lambda: len(values))
        assert all(member.received for member in everyone)

        everyone.append(Member(opened.client, opened.bootstrap, topic, group))
        produce(120)  # while the group rebalances
        shared_out(everyone, [2, 2, 2])
        produce(120)
        wait_for(lambda: everything_read(everyone), lambda: len(values))
        assert everyone[2].received

        everyone[0].leave()
        produce(120)
        shared_out(everyone[1:], [3, 3])
        wait_for(lambda: everything_read(everyone), lambda: len(values))
    finally:
        for member in everyone:
            member.leave()
    assert [member.error for member in everyone] == [None, None, None]
    admin = opened.admin()
    committed = admin.group_offsets(group)
    assert committed == {(topic, index): len(values) // PARTITIONS for index in range(PARTITIONS)}
    for member in everyone:
        for index in range(PARTITIONS):
            offsets = [record.offset for record in member.received if record.partition == index]
            assert offsets == sorted(offsets) or len(offsets) != len(set(offsets))


def test_two_groups_each_read_everything(opened: Opened, cluster: Cluster, fresh: Callable[[str], str]) -> None:
    topic = fresh("broadcast")
    cluster.create_topic(topic, 2)
    sender = opened.sender()
    values = {b"%d" % number for number in range(50)}
    for number, value in enumerate(sorted(values)):
        sender.send(topic, value, partition=number % 2)
    sender.flush()
    members = [Member(opened.client, opened.bootstrap, topic, fresh("reader")) for _ in range(2)]
    try:
        wait_for(
            lambda: all({record.value for record in member.received} == values for member in members),
            lambda: [len(member.received) for member in members],
        )
    finally:
        for member in members:
            member.leave()
