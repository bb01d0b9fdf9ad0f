"""The faults of consumer groups (KIP-848): what is done to members, leaders and the coordinator while a group reads.

Each is a function of a `GroupStage`; healing and the judgement come afterwards (`group_rounds`). Every variant runs in
the same layout, so that all of them share a cluster.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from cluster.faults import Row, Variant, everybody_but
from cluster.group_rounds import (
    FULL_GROUP,
    GROUP_SESSION_MS,
    OFFSETS_TOPIC,
    SETTINGS,
    SHORT_GROUP,
    GroupFault,
    GroupStage,
    of_group,
    run_group_round,
)
from support.cluster_processes import wait_for
from support.tcp_proxy import ZOOKEEPER, broker_node

Who = Callable[[GroupStage], int]

_HEALS_WITHIN_S: Final = 30.0


# --- members ----------------------------------------------------------------------------------------------------------


def kill_members(stage: GroupStage) -> None:
    """A quarter of them at once; the others take over when the sessions end. Then as many new ones come."""
    for _ in range(stage.scale.bounces):
        stage.members.wait_all_move()
        gone = stage.some_members(0.25)
        stage.mark(f"kill -9 of members {gone}")
        for number in gone:
            stage.members.kill_member(number)
        stage.members.wait_size(len(stage.members.running))
        stage.members.wait_all_move()
        for _ in gone:
            stage.members.start_member()
        stage.members.wait_at_rest()


def pause_members(stage: GroupStage) -> None:
    """For longer than their session: they are removed, wake up, and must not take anything back that moved on."""
    for _ in range(stage.scale.bounces):
        stage.members.wait_all_move()
        asleep = stage.some_members(0.5)
        stage.mark(f"SIGSTOP of members {asleep}")
        for number in asleep:
            stage.members.pause_member(number)
        stage.members.wait_size(len(stage.members.running) - len(asleep))
        stage.members.wait_all_move()
        stage.mark("SIGCONT")
        stage.members.resume_members()
        stage.members.wait_at_rest()


def pause_members_shortly(stage: GroupStage) -> None:
    """All of them, for less than a session: the group is as it was."""
    for _ in range(stage.scale.bounces):
        epoch = stage.members.wait_group(lambda view: view.epoch is not None, "there is no group").epoch
        stage.mark("SIGSTOP of all members")
        for number in stage.members.running:
            stage.members.pause_member(number)
        time.sleep(GROUP_SESSION_MS / 1000 * 0.3)
        stage.members.resume_members()
        stage.members.wait_all_move()
        stage.mark(f"the group was in epoch {epoch}")


# --- brokers ----------------------------------------------------------------------------------------------------------


def kill(who: Who) -> GroupFault:
    def fault(stage: GroupStage) -> None:
        for _ in range(stage.scale.bounces):
            broker_id = who(stage)
            stage.mark(f"kill -9 of broker {broker_id}")
            stage.cluster.kill(broker_id)
            stage.goes_on()
            stage.members.wait_all_move()
            stage.cluster.start_brokers([broker_id])
            stage.cluster.wait_whole(stage.topic, _HEALS_WITHIN_S)
            stage.cluster.wait_whole(OFFSETS_TOPIC, _HEALS_WITHIN_S)

    return fault


def pause(who: Who) -> GroupFault:
    """SIGSTOP for longer than the broker's session: others take its place, and it wakes up without knowing."""

    def fault(stage: GroupStage) -> None:
        broker_id = who(stage)
        stage.mark(f"SIGSTOP of broker {broker_id}")
        stage.cluster.brokers[broker_id].pause()
        _wait_for_another(stage, who, broker_id)
        stage.members.wait_all_move()
        stage.cluster.brokers[broker_id].resume()
        stage.mark(f"SIGCONT of broker {broker_id}")
        stage.goes_on()

    return fault


def cut(who: Who) -> GroupFault:
    """From the other brokers and from ZooKeeper; members still reach it, and it does not know that it is over."""

    def fault(stage: GroupStage) -> None:
        broker_id = who(stage)
        stage.mark(f"broker {broker_id} from the rest")
        stage.cluster.wires().cut(broker_node(broker_id), everybody_but(stage, broker_id))
        _wait_for_another(stage, who, broker_id)
        time.sleep(GROUP_SESSION_MS / 1000)

    return fault


def cut_from_zookeeper(who: Who) -> GroupFault:
    """From ZooKeeper alone: everybody else still reaches it, and nothing tells it that it is over."""

    def fault(stage: GroupStage) -> None:
        broker_id = who(stage)
        stage.mark(f"broker {broker_id} from ZooKeeper")
        stage.cluster.wires().cut(broker_node(broker_id), [ZOOKEEPER])
        _wait_for_another(stage, who, broker_id)
        time.sleep(stage.scale.session_s / 2)

    return fault


def _wait_for_another(stage: GroupStage, who: Who, old: int) -> None:
    limit_s = stage.scale.session_s * 4
    new = wait_for(lambda: each if (each := who(stage)) != old else None, limit_s, f"nobody took over from {old}")
    stage.mark(f"broker {new} took over from {old}")


def everything(stage: GroupStage) -> None:
    """Members and brokers, one after the other, not always healed before the next."""
    rng, cluster, members = stage.rng, stage.cluster, stage.members
    for _ in range(stage.scale.bounces * 5):
        what = rng.choice(("kill members", "pause members", "new member", "kill", "pause", "cut"))
        broker_id = rng.choice(list(cluster.brokers))
        stage.mark(f"{what} (broker {broker_id})")
        if what == "kill members" and len(members.running) > 2:
            for number in stage.some_members(0.2):
                members.kill_member(number)
        elif what == "pause members":
            for number in stage.some_members(0.3):
                members.pause_member(number)
        elif what == "new member":
            members.start_member()
        elif what == "kill":
            cluster.kill(broker_id)
        elif what == "pause" and cluster.brokers[broker_id].running:
            cluster.brokers[broker_id].pause()
        elif what == "cut":
            cluster.wires().cut(broker_node(broker_id), everybody_but(stage, broker_id))
        time.sleep(rng.uniform(0.1, stage.scale.session_s * 1.2))
        if rng.random() < 0.7:
            cluster.restore()
            members.resume_members()


# --- the table --------------------------------------------------------------------------------------------------------


def _variant(name: str, fault: GroupFault) -> Variant:
    return Variant(f"group {name}", of_group(fault), proxied=True, settings=SETTINGS)


def _leader(stage: GroupStage) -> int:
    return stage.leader()


GROUP_ROWS: Final = (
    Row(
        "20 members of a consumer group: they, leader, coordinator killed, paused, cut off; everything at random",
        (
            _variant("members killed", kill_members),
            _variant("members paused for long", pause_members),
            _variant("members paused shortly", pause_members_shortly),
            _variant("leader killed", kill(_leader)),
            _variant("leader paused", pause(_leader)),
            _variant("leader cut off", cut(_leader)),
            _variant("coordinator killed", kill(GroupStage.coordinator)),
            _variant("coordinator paused", pause(GroupStage.coordinator)),
            _variant("coordinator cut off", cut(GroupStage.coordinator)),
            _variant("everything at random", everything),
        ),
        10,
        100_000,
        SHORT_GROUP,
        FULL_GROUP,
        run_group_round,
    ),
)

SHORT_VARIANTS: Final = {
    "group members killed",
    "group members paused for long",
    "group leader cut off",
    "group coordinator killed",
    "group coordinator paused",
    "group coordinator cut off",
}
"""What CI runs, in a minute: the others show the same, or take longer to show anything."""
