"""The faults of the table: what is done to a cluster while records flow.

Each is a function of a `Stage`; healing and the judgement come afterwards (`rounds`). A row of the table has several
variants, and the rounds of a row go through them in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from confluent_kafka import Producer

from cluster.rounds import FULL, SHORT, Fault, Result, Scale, Stage, run_round
from support.cluster_processes import ClusterProcesses, Layout, wait_for
from support.servers import ServerFailed
from support.tcp_proxy import ZOOKEEPER, broker_node

# --- kill -9 ----------------------------------------------------------------------------------------------------------


def kill_leader(stage: Stage) -> None:
    for bounce in range(stage.scale.bounces):
        leader = stage.leader(bounce % 2)
        stage.mark(f"kill -9 of leader {leader}")
        stage.cluster.kill(leader)
        stage.goes_on()
        stage.cluster.start_brokers([leader])
        stage.goes_on()


def kill_controller(stage: Stage) -> None:
    for _ in range(max(1, stage.scale.bounces // 2)):
        controller = stage.controller()
        stage.mark(f"kill -9 of controller {controller}")
        stage.cluster.kill(controller)
        stage.goes_on()
        stage.cluster.start_brokers([controller])
        stage.goes_on()


def kill_controller_and_leader(stage: Stage) -> None:
    """Of three brokers one is left: with min.insync.replicas=2 writes wait for the restart, and go on after it."""
    for _ in range(max(1, stage.scale.bounces // 2)):
        controller = stage.controller()
        leader = next((led for index in range(4) if (led := stage.leader(index)) != controller), stage.follower())
        stage.mark(f"kill -9 of controller {controller} and leader {leader}")
        stage.cluster.kill(controller, leader)
        time.sleep(1)
        stage.cluster.start_brokers([controller, leader])
        stage.goes_on()
        stage.cluster.wait_whole(stage.topic, 30)


# --- ZooKeeper --------------------------------------------------------------------------------------------------------


def restart_only_zookeeper(stage: Stage) -> None:
    """Writes go on without ZooKeeper, and the cluster is itself again after it is back."""
    stage.mark("kill -9 of ZooKeeper")
    stage.cluster.kill_zookeeper(1)
    stage.goes_on(stage.scale.rate)
    stage.mark("restart of ZooKeeper")
    stage.cluster.restart_zookeeper()
    stage.goes_on()


def lose_one_then_most_of_zookeeper(stage: Stage) -> None:
    stage.mark("kill -9 of one ZooKeeper node")
    stage.cluster.kill_zookeeper(1)
    stage.goes_on(stage.scale.rate)
    stage.mark("kill -9 of a second one")
    stage.cluster.kill_zookeeper(2)
    time.sleep(stage.scale.outage_s)
    stage.goes_on()
    stage.mark("restart of both")
    stage.cluster.restart_zookeeper()
    stage.goes_on()


def pause_zookeeper(stage: Stage) -> None:
    """For longer than a session: every broker may believe that its own has ended."""
    stage.mark("SIGSTOP of ZooKeeper")
    stage.cluster.pause_zookeeper()
    time.sleep(stage.scale.session_s * 1.7)
    stage.cluster.resume_zookeeper()
    stage.mark("SIGCONT of ZooKeeper")
    stage.goes_on()


# --- SIGSTOP ----------------------------------------------------------------------------------------------------------


def pause(who: Callable[[Stage], int], sessions: float) -> Fault:
    """SIGSTOP for so many session timeouts."""

    def fault(stage: Stage) -> None:
        broker_id = who(stage)
        stage.mark(f"SIGSTOP of {broker_id}")
        stage.cluster.brokers[broker_id].pause()
        time.sleep(stage.scale.session_s * sessions)
        stage.cluster.brokers[broker_id].resume()
        stage.mark(f"SIGCONT of {broker_id}")
        stage.goes_on()

    return fault


# --- partitions -------------------------------------------------------------------------------------------------------


def everybody_but(stage: Stage, broker_id: int) -> list[str]:
    """The other brokers, and ZooKeeper."""
    return [*(broker_node(each) for each in stage.cluster.brokers if each != broker_id), ZOOKEEPER]


def cut_leader_from_the_rest(stage: Stage) -> None:
    """From the other brokers and from ZooKeeper; clients still reach it and are told nothing."""
    leader = stage.leader()
    stage.mark(f"leader {leader} from the rest")
    stage.cluster.wires().cut(broker_node(leader), everybody_but(stage, leader))
    _wait_for_another_leader(stage, leader)
    time.sleep(stage.scale.session_s / 2)


def cut_leader_from_zookeeper(stage: Stage) -> None:
    leader = stage.leader()
    stage.mark(f"leader {leader} from ZooKeeper")
    stage.cluster.wires().cut(broker_node(leader), [ZOOKEEPER])
    time.sleep(stage.scale.session_s * 1.5)
    stage.goes_on()


def cut_follower_from_leader(stage: Stage) -> None:
    """The follower leaves the ISR; or, where the follower is the controller, it takes the silent leader for dead."""
    leader, follower = stage.leader(), stage.follower()
    (third,) = {*stage.cluster.brokers} - {leader, follower}
    stage.mark(f"follower {follower} from leader {leader}")
    stage.cluster.wires().cut(broker_node(follower), [broker_node(leader)])

    def left_out() -> list[int] | None:
        view = stage.cluster.view(third, stage.topic)
        isr = None if view is None else view.partitions[0].isr
        return None if isr is None else [each for each in (leader, follower) if each not in isr] or None

    out = wait_for(left_out, stage.scale.session_s * 5, f"both {follower} and {leader} are still in the ISR")
    stage.mark(f"{out} left the ISR")
    stage.goes_on()


def leader_hears_but_is_not_heard(stage: Stage) -> None:
    leader = stage.leader()
    stage.mark(f"nothing from leader {leader} arrives")
    for broker_id in stage.cluster.brokers:
        if broker_id != leader:
            stage.cluster.wires().block(broker_node(leader), broker_node(broker_id))
    time.sleep(stage.scale.session_s * 1.5)


def leader_is_heard_but_does_not_hear(stage: Stage) -> None:
    leader = stage.leader()
    stage.mark(f"nothing to leader {leader} arrives")
    for broker_id in stage.cluster.brokers:
        if broker_id != leader:
            stage.cluster.wires().block(broker_node(broker_id), broker_node(leader))
    time.sleep(stage.scale.session_s * 1.5)


def deaf_leader_killed(stage: Stage) -> None:
    """What the leader appended last is with its followers, but it never learns that, tells no producer, and dies.

    Producers send those records again to the next leader, which must know them; and what only the old leader has must
    be gone when it is back.
    """
    leader = stage.leader()
    stage.mark(f"nothing to leader {leader} arrives, then kill -9")
    for broker_id in stage.cluster.brokers:
        if broker_id != leader:
            stage.cluster.wires().block(broker_node(broker_id), broker_node(leader))
    time.sleep(stage.scale.session_s / 4)
    _write_to_leader_alone(stage)
    stage.cluster.kill(leader)
    stage.cluster.wires().heal()
    stage.goes_on()


def _write_to_leader_alone(stage: Stage) -> None:
    """Records that no follower gets, and nobody may ever read: none of them asks for them any more.

    What the producers had under way may all be with the followers: a last fetch that waited was answered with it.
    """
    producer = Producer({**stage.cluster.client_settings, "acks": 1, "message.timeout.ms": 5000})
    failed: list[object] = []

    def note(error: object, _message: object) -> None:
        if error is not None:
            failed.append(error)

    for number in range(20):
        producer.produce(stage.topic, b"alone %d" % number, partition=0, on_delivery=note)
    producer.flush(10)
    if failed:
        raise ServerFailed(f"the leader that hears nothing takes nothing: {failed[0]}")


def two_leaders_killed_before_the_third_replica_heard_of_either(stage: Stage) -> None:
    """A follower that knows an old high watermark gets a new leader, cannot fetch from it, and must lead in its turn.

    Everything acknowledged is in its log, above the high watermark that it knows.
    """
    wires = stage.cluster.wires()
    for _ in range(max(1, stage.scale.bounces // 2)):
        first = stage.leader()
        # The next leader is the first of the others in the order of assignment.
        second, third = (each for each in stage.cluster.replicas(stage.topic, 0) if each != first)
        stage.mark(f"{third} hears nothing of {first}, nor of {second}; kill -9 of both in turn")
        wires.block(broker_node(first), broker_node(third))
        time.sleep(0.3)
        wires.cut(broker_node(second), [broker_node(third)])
        stage.cluster.kill(first)
        _wait_for_another_leader(stage, first, asked=[third])
        stage.cluster.kill(second)
        _wait_for_another_leader(stage, first, second, asked=[third])
        stage.cluster.restore()
        stage.goes_on()
        stage.cluster.wait_whole(stage.topic, 30)


def flapping(stage: Stage) -> None:
    for _ in range(stage.scale.bounces):
        leader = stage.leader()
        stage.mark(f"leader {leader} from the rest for a second")
        stage.cluster.wires().cut(broker_node(leader), everybody_but(stage, leader))
        time.sleep(1)
        stage.cluster.wires().heal()
        time.sleep(1)


def _wait_for_another_leader(stage: Stage, *old: int, asked: Sequence[int] | None = None) -> None:
    """Ask the others only (or those given): an old leader may still believe in itself."""
    deadline = time.monotonic() + stage.scale.session_s * 4
    others = [broker_id for broker_id in stage.cluster.brokers if broker_id not in old]
    while time.monotonic() < deadline:
        for broker_id in others if asked is None else asked:
            view = stage.cluster.view(broker_id, stage.topic)
            if view is not None and view.partitions[0].leader not in {*old, -1}:
                stage.mark(f"{view.partitions[0].leader} leads in epoch {view.partitions[0].leader_epoch}")
                return
        time.sleep(0.1)
    stage.mark("nobody else leads")


# --- all of them ------------------------------------------------------------------------------------------------------


def kill_all(stage: Stage) -> None:
    for _ in range(max(1, stage.scale.bounces // 5)):
        stage.mark("kill -9 of all")
        stage.cluster.kill(*stage.cluster.brokers)
        stage.cluster.start_brokers(stage.cluster.brokers)
        stage.goes_on()


def rolling_restart(stage: Stage) -> None:
    for broker_id, broker in stage.cluster.brokers.items():
        stage.mark(f"SIGTERM of {broker_id}")
        broker.terminate()
        stage.cluster.start_brokers([broker_id])
        stage.cluster.wait_whole(stage.topic, 30)


def restart_storm(stage: Stage) -> None:
    """Brokers die before the last one to die is in sync again; sometimes too many at once."""
    for _ in range(stage.scale.bounces * 2):
        victim = stage.rng.choice(list(stage.cluster.brokers))
        stage.mark(f"kill -9 of {victim}")
        stage.cluster.kill(victim)
        time.sleep(stage.rng.uniform(0, 0.5))
        stage.cluster.start_brokers([victim])
        time.sleep(stage.rng.uniform(0, 1.5))


def everything_at_random(stage: Stage) -> None:
    """One fault after another, for a random time each, and not always healed before the next."""
    rng, cluster = stage.rng, stage.cluster
    for _ in range(stage.scale.bounces * 3):
        one, other = rng.sample(list(cluster.brokers), 2)
        what = rng.choice(("kill", "stop", "pause", "cut", "block", "zookeeper", "pause zookeeper"))
        stage.mark(f"{what} {one} {other}")
        if what == "kill":
            cluster.kill(one)
        elif what == "stop" and cluster.brokers[one].running and not cluster.brokers[one].paused:
            cluster.brokers[one].terminate()
        elif what == "pause" and cluster.brokers[one].running:
            cluster.brokers[one].pause()
        elif what == "cut":
            cluster.wires().cut(broker_node(one), [broker_node(other)])
        elif what == "block":
            cluster.wires().block(broker_node(one), broker_node(other))
        elif what == "zookeeper":
            cluster.wires().cut(broker_node(one), [ZOOKEEPER])
        elif what == "pause zookeeper":
            cluster.pause_zookeeper()
        time.sleep(rng.uniform(0.1, stage.scale.session_s * 1.2))
        if rng.random() < 0.7:
            cluster.restore()
            time.sleep(rng.uniform(0, 1))


def cut_power_of_all(stage: Stage) -> None:
    """Only for brokers on a disk that forgets (`planted.py power-loss`)."""
    for _ in range(stage.scale.bounces):
        stage.mark("power cut of all")
        for broker in stage.cluster.brokers.values():
            broker.cut_power()
        stage.cluster.start_brokers(stage.cluster.brokers)
        stage.goes_on()


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to do the fault of a row."""

    name: str
    fault: Fault
    zookeeper_nodes: int = 1
    proxied: bool = False
    settings: tuple[tuple[str, str], ...] = ()
    """Of the brokers, besides those that every round has."""
    planted: str = "nothing"
    """Where the faults happen that the harness cannot do from outside (`planted`)."""
    log_dirs: int = 1
    client_links: bool = False
    """Whether requests of clients can be kept back."""
    secured: bool = False
    short: bool = True
    """Whether it is among the short rounds of `make test-cluster`, too."""

    def layout(self, scale: Scale) -> Layout:
        # A follower that is cut off shall leave the ISR within the round, not after the default of half a minute.
        lag = ("replica.lag.time.max.ms", str(scale.session_timeout_ms))
        return Layout(
            zookeeper_nodes=self.zookeeper_nodes,
            proxied=self.proxied,
            session_timeout_ms=scale.session_timeout_ms,
            settings=((lag,) if self.proxied else ()) + self.settings,
            planted=self.planted,
            log_dirs=self.log_dirs,
            client_links=self.client_links,
            secured=self.secured,
        )


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    title: str
    variants: tuple[Variant, ...]
    rounds: int
    acked: int
    """Records acknowledged per full round."""
    short: Scale = SHORT
    full: Scale = FULL
    play: Callable[[ClusterProcesses, Fault, Scale, int], Result] = run_round
    """What a round is, besides its fault."""


ROWS: Final = (
    Row("kill -9 of the leader, 10 bounces each", (Variant("leader killed", kill_leader),), 5, 50_000),
    Row(
        "kill -9 of the controller; of controller and leader at once",
        (
            Variant("controller killed", kill_controller),
            Variant("controller and leader killed", kill_controller_and_leader),
        ),
        5,
        30_000,
    ),
    Row(
        "ZooKeeper: one node killed and restarted; of three, one and then a majority for 30 s",
        (
            Variant("only ZooKeeper killed", restart_only_zookeeper),
            Variant("ZooKeeper paused", pause_zookeeper),
            Variant("most of three ZooKeepers killed", lose_one_then_most_of_zookeeper, zookeeper_nodes=3),
        ),
        4,
        30_000,
    ),
    Row(
        "SIGSTOP of leader, follower, controller, shorter and longer than the session timeout",
        (
            Variant("leader paused shortly", pause(Stage.leader, 0.5)),
            Variant("leader paused for long", pause(Stage.leader, 1.7)),
            Variant("follower paused shortly", pause(Stage.follower, 0.5)),
            Variant("follower paused for long", pause(Stage.follower, 1.7)),
            Variant("controller paused shortly", pause(Stage.controller, 0.5)),
            Variant("controller paused for long", pause(Stage.controller, 1.7)),
        ),
        6,
        30_000,
    ),
    Row(
        "partitions: leader from the rest, leader from ZooKeeper only, follower from leader, one-way, flapping",
        (
            Variant("leader cut from the rest", cut_leader_from_the_rest, proxied=True),
            Variant("leader cut from ZooKeeper", cut_leader_from_zookeeper, proxied=True),
            Variant("follower cut from leader", cut_follower_from_leader, proxied=True),
            Variant("leader not heard", leader_hears_but_is_not_heard, proxied=True),
            Variant("leader hears nothing", leader_is_heard_but_does_not_hear, proxied=True),
            Variant("deaf leader killed", deaf_leader_killed, proxied=True),
            Variant("two leaders killed", two_leaders_killed_before_the_third_replica_heard_of_either, proxied=True),
            Variant("leader flapping", flapping, proxied=True),
        ),
        8,
        30_000,
    ),
    Row(
        "all brokers killed at once, rolling restarts, restart storm, everything at random",
        (
            Variant("all killed", kill_all),
            Variant("rolling restart", rolling_restart),
            Variant("restart storm", restart_storm),
            Variant("everything at random", everything_at_random, proxied=True),
        ),
        6,
        30_000,
    ),
)
