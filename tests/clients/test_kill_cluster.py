"""kill -9 of leaders and coordinators of a cluster of processes while records flow; each client library in turn.

Leaders: nothing acknowledged is lost, nothing is there twice, the order holds. Coordinators: a group goes on, reads
everything, and what it committed never goes back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from clients.adapters.interface import Client
from clients.load import PARTITIONS, Load, check_everything_is_there_once
from clients.members import COORDINATOR_AWAY, Member, wait_for
from support.roles import Roles
from support.servers import MillraceCluster

# A client that is refused a connection while the broker is away may leave its socket to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

BETWEEN = 600
"""Records sent before each kill."""


@pytest.fixture(scope="module")
def brokers() -> Iterator[MillraceCluster]:
    with MillraceCluster(3) as running:
        yield running


@pytest.fixture
def roles(brokers: MillraceCluster) -> Iterator[Roles]:
    with Roles(brokers.bootstrap) as asked:
        yield asked


def test_leaders_killed_twice_under_load(
    client: Client, brokers: MillraceCluster, roles: Roles, fresh: Callable[[str], str]
) -> None:
    topic = fresh("killed")
    roles.create_topic(topic, PARTITIONS)
    with Load(client, brokers.bootstrap, topic, records=None) as load:
        for index in range(2):
            load.wait_for_sent(len(load.pending) + BETWEEN)
            leader = roles.leader(topic, index)
            brokers.kill(leader)
            try:
                assert roles.leader(topic, index, but=leader) != leader
            finally:
                brokers.restart(leader)
        load.wait_for_sent(len(load.pending) + BETWEEN)
        sent = load.finish()
    check_everything_is_there_once(client, brokers.bootstrap, topic, sent)
    roles.wait_in_sync(topic)


class Committed:
    """Looks at a group's offsets all the time, on a thread of its own, and notes every step back."""

    def __init__(self, bootstrap: str, group: str, topic: str) -> None:
        self.latest: dict[int, int | None] = {}
        self.looks = 0
        self.steps_back: list[str] = []
        self.error: BaseException | None = None
        self._place = (bootstrap, group, topic)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="committed offsets")
        self._thread.start()

    def _run(self) -> None:
        bootstrap, group, topic = self._place
        try:
            with Roles(bootstrap) as asked:
                while not self._ending.wait(0.02):
                    self._note(asked.committed(group, topic, PARTITIONS))
        except BaseException as error:
            self.error = error
            raise

    def _note(self, found: dict[int, int | None]) -> None:
        self.steps_back += [
            f"partition {index}: {self.latest[index]}, then {offset}"
            for index, offset in found.items()
            if self.latest.get(index) is not None and (offset is None or offset < (self.latest[index] or 0))
        ]
        self.latest = found
        self.looks += 1

    def end(self) -> None:
        self._ending.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


def test_a_group_goes_on_over_the_kill_of_its_coordinator(
    client: Client, brokers: MillraceCluster, roles: Roles, fresh: Callable[[str], str]
) -> None:
    topic, group = fresh("consumed"), fresh("group")
    roles.create_topic(topic, PARTITIONS)
    coordinator = roles.coordinator(group)
    committed = Committed(brokers.bootstrap, group, topic)
    members: list[Member] = []
    killed = False

    def read_by_all() -> set[int]:
        return {int(record.value or b"-1") for member in members for record in list(member.received)}

    def described() -> object:
        return len(read_by_all()), [(member.assigned, member.error) for member in members], committed.latest

    try:
        members += [Member(client, brokers.bootstrap, topic, group, COORDINATOR_AWAY) for _ in range(2)]
        wait_for(lambda: all(member.assigned for member in members), described)
        with Load(client, brokers.bootstrap, topic, records=None) as load:
            wait_for(lambda: any(committed.latest.values()), described)
            brokers.kill(coordinator)
            killed = True
            looks = committed.looks
            assert roles.coordinator(group, but=coordinator) != coordinator
            load.wait_for_sent(len(load.pending) + BETWEEN)
            sent = load.finish()
        wait_for(lambda: read_by_all() == set(range(len(sent))), described)
        wait_for(lambda: sum(filter(None, committed.latest.values())) == len(sent), described)
        assert committed.looks > looks
    finally:
        for member in members:
            member.leave()
        committed.end()
        if killed:
            brokers.restart(coordinator)
    assert [member.error for member in members] == [None, None]
    assert committed.error is None
    assert committed.steps_back == []
    assert committed.latest == {index: len(range(index, len(sent), PARTITIONS)) for index in range(PARTITIONS)}
