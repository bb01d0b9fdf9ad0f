"""The demo's failover, step by step on a cluster that is made up; and what counts as a broker that failed."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from millrace.clock import ManualClock
from millrace.demo.brokers import BrokerCluster, replication_factor
from millrace.demo.failover import (
    IN_SYNC_TIMEOUT_S,
    LED_TIMEOUT_S,
    RESTART_AFTER_S,
    Failover,
    FailoverThread,
    Outage,
    PartitionSeen,
)
from millrace.demo.traffic import CHAT, CLICKS

ALL = (1, 2, 3)


class FakeCluster:
    """Three partitions, two of them led by broker 2; what is seen of them is set by the test."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.killed = threading.Event()
        self.leaders = {(CLICKS, 0): 2, (CLICKS, 1): 1, (CHAT, 0): 2}
        self.in_sync: tuple[int, ...] = ALL
        self.answers = True

    def kill(self, broker_id: int) -> None:
        self.calls.append(f"kill {broker_id}")
        self.killed.set()

    def launch(self, broker_id: int) -> None:
        self.calls.append(f"launch {broker_id}")

    def partitions(self) -> list[PartitionSeen]:
        seen = [
            PartitionSeen(topic, number, leader, ALL, self.in_sync) for (topic, number), leader in self.leaders.items()
        ]
        return seen if self.answers else []


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def failover(cluster: FakeCluster, clock: ManualClock) -> Failover:
    return Failover(cluster, 10.0, clock)


def take_over(cluster: FakeCluster) -> None:
    cluster.leaders = dict.fromkeys(cluster.leaders, 3)
    cluster.in_sync = (1, 3)


def look(failover: Failover, clock: ManualClock, after_s: float) -> Outage:
    clock.advance(after_s)
    failover.look()
    assert failover.outage is not None
    return failover.outage


def test_from_the_kill_to_all_replicas_in_sync(failover: Failover, cluster: FakeCluster, clock: ManualClock) -> None:
    assert look(failover, clock, 0.5) == Outage(2, 10.5, 2)
    assert cluster.calls == ["kill 2"]

    take_over(cluster)
    cluster.leaders[CHAT, 0] = -1
    assert look(failover, clock, 0.1).led_after_s is None
    cluster.leaders[CHAT, 0] = 1
    assert look(failover, clock, 0.1).led_after_s == pytest.approx(0.2)

    assert look(failover, clock, RESTART_AFTER_S - 0.3).restarted_after_s is None
    assert cluster.calls == ["kill 2"]
    assert look(failover, clock, 0.2).restarted_after_s == pytest.approx(RESTART_AFTER_S + 0.1)
    assert cluster.calls == ["kill 2", "launch 2"]

    assert look(failover, clock, 1.0).in_sync_after_s is None and not failover.is_over
    cluster.in_sync = (3, 1, 2)
    assert look(failover, clock, 1.0).in_sync_after_s == pytest.approx(RESTART_AFTER_S + 2.1)
    assert failover.is_over and failover.problem is None
    assert cluster.calls == ["kill 2", "launch 2"]


def test_a_cluster_that_does_not_answer_is_not_taken_for_one_that_took_over(
    failover: Failover, cluster: FakeCluster, clock: ManualClock
) -> None:
    look(failover, clock, 0.0)
    cluster.answers = False
    assert look(failover, clock, 1.0).led_after_s is None
    cluster.answers = True
    take_over(cluster)
    look(failover, clock, RESTART_AFTER_S)
    assert look(failover, clock, 0.0).restarted_after_s is not None
    cluster.answers = False
    assert look(failover, clock, 1.0).in_sync_after_s is None


def test_without_other_leaders_it_gives_up_and_brings_the_broker_back(
    failover: Failover, cluster: FakeCluster, clock: ManualClock
) -> None:
    look(failover, clock, 0.0)
    look(failover, clock, LED_TIMEOUT_S)
    assert not failover.is_over
    look(failover, clock, 0.1)
    assert failover.is_over
    assert failover.problem == "partitions of broker 2 had no leader 30 s after its end"
    assert cluster.calls == ["kill 2", "launch 2"]


def test_a_broker_that_does_not_catch_up_is_a_problem(
    failover: Failover, cluster: FakeCluster, clock: ManualClock
) -> None:
    look(failover, clock, 0.0)
    take_over(cluster)
    look(failover, clock, RESTART_AFTER_S)
    look(failover, clock, 0.0)
    look(failover, clock, IN_SYNC_TIMEOUT_S + 0.1)
    assert failover.is_over
    assert failover.problem == "broker 2 was not in sync 60 s after its start"


def test_nobody_is_killed_while_the_partition_has_no_leader(
    failover: Failover, cluster: FakeCluster, clock: ManualClock
) -> None:
    cluster.leaders[CLICKS, 0] = -1
    failover.look()
    assert failover.outage is None and not failover.is_over
    clock.advance(LED_TIMEOUT_S + 0.1)
    failover.look()
    assert failover.is_over and cluster.calls == []
    assert failover.problem is not None and "nobody was killed" in failover.problem


@pytest.mark.parametrize(
    ("outage", "text"),
    [
        (Outage(2, 10.4, 7), "broker 2 was killed at 0:10, its 7 partitions have no leader yet"),
        (Outage(2, 75.0, 7, 0.23), "broker 2 was killed at 1:15, its 7 partitions were led by others after 0.2 s"),
        (
            Outage(2, 9.9, 7, 0.23, 3.02),
            "broker 2 was killed at 0:09, its 7 partitions were led by others after 0.2 s; started again after 3.0 s",
        ),
        (
            Outage(2, 9.9, 7, 0.23, 3.02, 4.9),
            (
                "broker 2 was killed at 0:09, its 7 partitions were led by others after 0.2 s; "
                "started again after 3.0 s, in sync after 4.9 s"
            ),
        ),
    ],
)
def test_what_is_told_of_an_outage(outage: Outage, text: str) -> None:
    assert str(outage) == text


def test_a_thread_that_is_told_to_leave_starts_nothing_after_that(cluster: FakeCluster) -> None:
    thread = FailoverThread(cluster, 10.0)
    thread.start()
    assert cluster.killed.wait(10)
    thread.leave()
    assert not thread.is_alive() and not thread.failover.is_over
    assert cluster.calls == ["kill 2"]


def test_what_breaks_the_thread_is_a_problem(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError("no such process")

    monkeypatch.setattr(cluster, "kill", fail)
    thread = FailoverThread(cluster, 10.0)
    thread.start()
    thread.join(10)
    assert thread.failover.is_over and thread.failover.problem == "failover: no such process"


class FakeProcess:
    """A broker's process: what `BrokerCluster` asks of it."""

    def __init__(self) -> None:
        self.pid: int | None = 4711
        self.exit_status: int | None = None
        self.log_path = Path("log")

    def kill(self) -> None:
        self.pid, self.exit_status = None, -9

    def launch(self) -> None:
        self.pid, self.exit_status = 4712, None


def test_only_a_broker_that_ended_by_itself_is_a_failure(tmp_path: Path) -> None:
    brokers = BrokerCluster(tmp_path, 3)
    processes = {broker_id: FakeProcess() for broker_id in ALL}
    ended: dict[int, int] = {}
    zookeeper = SimpleNamespace(exited=lambda: ended, log_path=lambda node: Path(f"zookeeper-{node}"))
    brokers._cluster = SimpleNamespace(brokers=processes, zookeeper=zookeeper)  # type: ignore[assignment]

    brokers.kill(2)
    assert brokers.failure() is None and brokers.pids == [4711, 4711]
    brokers.launch(2)
    assert brokers.failure() is None and brokers.pids == [4711, 4712, 4711]
    processes[2].kill()
    assert brokers.failure() == "broker 2 ended with status -9: log"
    processes[2].launch()
    ended[1] = 3
    assert brokers.failure() == "ZooKeeper ended with status 3: zookeeper-1"


@pytest.mark.parametrize(("brokers", "copies"), [(1, 1), (2, 2), (3, 3), (5, 3)])
def test_topics_have_three_copies_where_there_are_brokers_for_them(brokers: int, copies: int) -> None:
    assert replication_factor(brokers) == copies
