"""The faults of transactions: what is done to programs, leaders and coordinators while records are written in them.

Each is a function of a `TransactionStage`; healing and the judgement come afterwards (`transaction_rounds`). Every
variant runs in the same layout, so that all of them share a cluster; clients come over links (`support.tcp_proxy`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from cluster.faults import Row, Variant, everybody_but
from cluster.transaction_rounds import (
    FULL_BANK,
    FULL_COPY,
    FULL_LATE,
    FULL_MIX,
    SETTINGS,
    SHORT_BANK,
    SHORT_COPY,
    SHORT_LATE,
    SHORT_MIX,
    TRANSACTION_TIMEOUT_MS,
    TransactionFault,
    TransactionStage,
    of_transactions,
    run_bank_round,
    run_copy_round,
    run_late_round,
    run_mixed_round,
)
from millrace.wire.keys import ApiKey
from support.cluster_processes import wait_for
from support.tcp_proxy import CLIENTS, LateRequests, broker_node

Who = Callable[[TransactionStage], int]

_HEALS_WITHIN_S: Final = 30.0
_KEPT_WITHIN_S: Final = 30.0
_OVER_S: Final = TRANSACTION_TIMEOUT_MS / 1000 + 2
"""After this whatever was open is aborted by the coordinator, and its producer fenced."""
_A_LITTLE: Final = 100
_LATE: Final = 6
_OTHERS: Final = 100
"""How far the slots of programs are from those of their predecessors that they do not replace."""


# --- brokers ----------------------------------------------------------------------------------------------------------


def kill(who: Who) -> TransactionFault:
    def fault(stage: TransactionStage) -> None:
        for _ in range(stage.scale.bounces):
            broker_id = who(stage)
            stage.mark(f"kill -9 of broker {broker_id}")
            stage.cluster.kill(broker_id)
            stage.goes_on(_A_LITTLE)
            stage.cluster.start_brokers([broker_id])
            stage.cluster.wait_whole(stage.topic, _HEALS_WITHIN_S)

    return fault


def kill_leader_and_coordinator(stage: TransactionStage) -> None:
    """At once: markers wait for both."""
    for _ in range(stage.scale.bounces):
        coordinator = stage.transaction_coordinator()
        leader = next((led for index in range(4) if (led := stage.leader(index)) != coordinator), stage.follower())
        stage.mark(f"kill -9 of coordinator {coordinator} and leader {leader}")
        stage.cluster.kill(coordinator, leader)
        time.sleep(1)
        stage.cluster.start_brokers([coordinator, leader])
        stage.goes_on(_A_LITTLE)
        stage.cluster.wait_whole(stage.topic, _HEALS_WITHIN_S)


def kill_coordinator_before_its_markers_arrive(stage: TransactionStage) -> None:
    """It decides, and cannot tell the partitions of other brokers; whoever comes after it must.

    The programs are gone, too, and others come in their place: their next transactions would end what was left open.
    """
    members, wires = stage.members, stage.cluster.wires()
    for _ in range(stage.scale.bounces):
        coordinator = stage.transaction_coordinator()
        stage.mark(f"no marker of coordinator {coordinator} arrives, then kill -9 of it and of all members")
        wires.keep_back(ApiKey.WRITE_TXN_MARKERS, most=10_000)
        time.sleep(stage.scale.session_s / 3)
        gone = [members.kill_member(number) for number in members.running]
        stage.cluster.kill(coordinator)
        wires.heal()
        for slot in gone:
            members.start_member(slot + _OTHERS)
        stage.goes_on(_A_LITTLE)
        stage.cluster.start_brokers([coordinator])
        stage.cluster.wait_whole(stage.topic, _HEALS_WITHIN_S)


def kill_all(stage: TransactionStage) -> None:
    """Nobody has anything in memory: what is open, prepared or aborted is known from disk alone."""
    for _ in range(stage.scale.bounces):
        stage.mark("kill -9 of all")
        stage.cluster.kill(*stage.cluster.brokers)
        stage.cluster.start_brokers(stage.cluster.brokers)
        stage.goes_on(_A_LITTLE)


def pause(who: Who) -> TransactionFault:
    """SIGSTOP for longer than the broker's session: others take its place, and it wakes up without knowing."""

    def fault(stage: TransactionStage) -> None:
        broker_id = who(stage)
        stage.mark(f"SIGSTOP of broker {broker_id}")
        stage.cluster.brokers[broker_id].pause()
        _wait_for_another(stage, who, broker_id)
        stage.goes_on(_A_LITTLE)
        stage.cluster.brokers[broker_id].resume()
        stage.mark(f"SIGCONT of broker {broker_id}")
        stage.goes_on(_A_LITTLE)

    return fault


def cut(who: Who) -> TransactionFault:
    """From the other brokers and from ZooKeeper; clients still reach it, and it does not know that it is over."""

    def fault(stage: TransactionStage) -> None:
        broker_id = who(stage)
        stage.mark(f"broker {broker_id} from the rest")
        stage.cluster.wires().cut(broker_node(broker_id), everybody_but(stage, broker_id))
        _wait_for_another(stage, who, broker_id)
        time.sleep(stage.scale.session_s / 2)

    return fault


def _wait_for_another(stage: TransactionStage, who: Who, old: int) -> None:
    limit_s = stage.scale.session_s * 4
    new = wait_for(lambda: each if (each := who(stage)) != old else None, limit_s, f"nobody took over from {old}")
    stage.mark(f"broker {new} took over from {old}")


# --- clients ----------------------------------------------------------------------------------------------------------


def kill_clients(stage: TransactionStage) -> None:
    """One after the other, in the middle of something; its successor has the same transactional id."""
    for _ in range(stage.scale.bounces * 2):
        number = stage.rng.choice(stage.members.running)
        stage.mark(f"kill -9 of member {number}")
        slot = stage.members.kill_member(number)
        time.sleep(stage.rng.uniform(0, 1))
        stage.members.start_member(slot)
        stage.goes_on(_A_LITTLE)


def leave_transactions_open(stage: TransactionStage) -> None:
    """Killed, and nobody comes in its place before the coordinator has aborted what it left."""
    number = stage.rng.choice(stage.members.running)
    stage.mark(f"kill -9 of member {number}, and nobody in its place")
    slot = stage.members.kill_member(number)
    time.sleep(_OVER_S)
    stage.goes_on(_A_LITTLE)
    stage.members.start_member(slot)


def pause_clients(stage: TransactionStage) -> None:
    """For longer than its transaction may last: it wakes up in the middle of one that was aborted."""
    for _ in range(max(1, stage.scale.bounces // 2)):
        number = stage.rng.choice(stage.members.running)
        stage.mark(f"SIGSTOP of member {number}")
        stage.members.pause_member(number)
        time.sleep(_OVER_S)
        stage.members.resume_members()
        stage.mark("SIGCONT")
        stage.goes_on(_A_LITTLE)


def replace_paused_clients(stage: TransactionStage) -> None:
    """Another one with the same transactional id does its work meanwhile; the old one wakes up as a zombie."""
    for _ in range(stage.scale.bounces):
        number = stage.rng.choice(stage.members.running)
        stage.mark(f"SIGSTOP of member {number}, another one in its place")
        stage.members.pause_member(number)
        other = stage.members.start_member(stage.members.slot(number))
        stage.goes_on(_A_LITTLE)
        stage.members.resume_members()
        stage.mark("SIGCONT")
        stage.goes_on(_A_LITTLE)
        stage.members.kill_member(other)


def cut_clients(stage: TransactionStage) -> None:
    """All of them from everybody, for longer than a transaction may last."""
    brokers = [broker_node(each) for each in stage.cluster.brokers]
    stage.mark("clients from all brokers")
    stage.cluster.wires().cut(CLIENTS, brokers)
    time.sleep(_OVER_S)
    stage.cluster.wires().heal()
    stage.goes_on(_A_LITTLE)


def cut_one_client(stage: TransactionStage) -> None:
    """From everybody, for longer than its transaction may last, while the others go on and take over its work."""
    for _ in range(max(1, stage.scale.bounces // 2)):
        client = stage.members.client_id(stage.rng.choice(stage.members.running))
        stage.mark(f"{client} from all brokers")
        stage.cluster.wires().cut_client(client)
        time.sleep(_OVER_S)
        stage.goes_on(_A_LITTLE)
        stage.cluster.wires().heal()
        stage.goes_on(_A_LITTLE)


def cut_clients_from_leader(stage: TransactionStage) -> None:
    """The coordinator aborts what cannot be written."""
    leader = stage.leader()
    stage.mark(f"clients from broker {leader}")
    stage.cluster.wires().cut(CLIENTS, [broker_node(leader)])
    time.sleep(_OVER_S)
    stage.cluster.wires().heal()
    stage.goes_on(_A_LITTLE)


# --- late messages ----------------------------------------------------------------------------------------------------


def nothing_else(stage: TransactionStage) -> None:
    """For programs that are late by themselves."""
    stage.goes_on(_A_LITTLE)


def late(*api_keys: ApiKey) -> TransactionFault:
    """Requests of a program arrive again, transactions after it has sent them once more; some after everything."""

    def fault(stage: TransactionStage) -> None:
        wires = stage.cluster.wires()
        for _ in range(stage.scale.bounces):
            kept = wires.keep_back(*api_keys, most=_LATE)
            _wait_kept(kept)
            wires.let_pass(kept)
            for count in (1, 2):
                stage.goes_on(_A_LITTLE)
                stage.mark(f"{wires.deliver(kept, count)} late requests answered")
            stage.late.append(kept)

    return fault


def _wait_kept(kept: LateRequests) -> None:
    wait_for(lambda: True if len(kept.kept) == kept.most else None, _KEPT_WITHIN_S, f"not kept back: {kept}")


def produce_too_late(stage: TransactionStage) -> None:
    """None of one program's records arrive until it has given up; then, in later transactions, they do."""
    wires = stage.cluster.wires()
    kept = wires.keep_back(ApiKey.PRODUCE, most=1_000, client=stage.members.client_id(stage.members.running[0]))
    time.sleep(_OVER_S)
    wires.let_pass(kept)
    del kept.kept[8:]
    stage.mark(f"{len(kept.kept)} of the requests that were kept back will come")
    stage.goes_on(_A_LITTLE)
    stage.mark(f"{wires.deliver(kept, 4)} late requests answered")
    stage.goes_on(_A_LITTLE)
    stage.late.append(kept)


# --- everything -------------------------------------------------------------------------------------------------------


def everything(stage: TransactionStage) -> None:
    """Programs and brokers, one after the other, not always healed before the next."""
    rng, cluster, members = stage.rng, stage.cluster, stage.members
    for _ in range(stage.scale.bounces * 3):
        what = rng.choice(("kill member", "pause member", "kill", "pause", "cut", "coordinator", "late"))
        broker_id = rng.choice(list(cluster.brokers))
        number = rng.choice(members.running)
        stage.mark(f"{what} (broker {broker_id}, member {number})")
        if what == "kill member":
            members.start_member(members.kill_member(number))
        elif what == "pause member":
            members.pause_member(number)
        elif what == "kill":
            cluster.kill(broker_id)
        elif what == "coordinator":
            cluster.restore()
            cluster.kill(stage.transaction_coordinator())
        elif what == "pause" and cluster.brokers[broker_id].running:
            cluster.brokers[broker_id].pause()
        elif what == "cut":
            cluster.wires().cut(broker_node(broker_id), everybody_but(stage, broker_id))
        elif what == "late":
            stage.late.append(cluster.wires().keep_back(ApiKey.PRODUCE, most=4))
        time.sleep(rng.uniform(0.1, stage.scale.session_s * 1.2))
        if rng.random() < 0.7:
            cluster.restore()
            members.resume_members()


# --- the table --------------------------------------------------------------------------------------------------------


def _variant(name: str, fault: TransactionFault) -> Variant:
    return Variant(name, of_transactions(fault), proxied=True, settings=SETTINGS, client_links=True)


def _leader(stage: TransactionStage) -> int:
    return stage.leader()


_COORDINATOR: Final = TransactionStage.transaction_coordinator
_GROUP_COORDINATOR: Final = TransactionStage.group_coordinator
LATE_COPY: Final = late(ApiKey.PRODUCE, ApiKey.ADD_OFFSETS_TO_TXN, ApiKey.TXN_OFFSET_COMMIT)

TRANSACTION_ROWS: Final = (
    Row(
        "a copy in transactions: leader, both coordinators, copiers killed, paused, cut off; late requests; at random",
        (
            _variant("copy leader killed", kill(_leader)),
            _variant("copy leader paused", pause(_leader)),
            _variant("copy leader cut off", cut(_leader)),
            _variant("copy coordinator killed", kill(_COORDINATOR)),
            _variant("copy coordinator paused", pause(_COORDINATOR)),
            _variant("copy coordinator cut off", cut(_COORDINATOR)),
            _variant("copy group coordinator killed", kill(_GROUP_COORDINATOR)),
            _variant("copy group coordinator paused", pause(_GROUP_COORDINATOR)),
            _variant("copy group coordinator cut off", cut(_GROUP_COORDINATOR)),
            _variant("copy all killed", kill_all),
            _variant("copy clients killed", kill_clients),
            _variant("copy clients paused", pause_clients),
            _variant("copy clients replaced", replace_paused_clients),
            _variant("copy clients cut off", cut_clients),
            _variant("copy one client cut off", cut_one_client),
            _variant("copy late requests", LATE_COPY),
            _variant("copy everything at random", everything),
        ),
        17,
        150_000,
        SHORT_COPY,
        FULL_COPY,
        run_copy_round,
    ),
    Row(
        "sends and reads in transactions, every tenth aborted: the same faults",
        (
            _variant("mixed leader killed", kill(_leader)),
            _variant("mixed leader cut off", cut(_leader)),
            _variant("mixed coordinator killed", kill(_COORDINATOR)),
            _variant("mixed coordinator paused", pause(_COORDINATOR)),
            _variant("mixed coordinator cut off", cut(_COORDINATOR)),
            _variant("mixed coordinator killed before markers", kill_coordinator_before_its_markers_arrive),
            _variant("mixed leader and coordinator killed", kill_leader_and_coordinator),
            _variant("mixed all killed", kill_all),
            _variant("mixed clients left open", leave_transactions_open),
            _variant("mixed clients paused", pause_clients),
            _variant("mixed clients replaced", replace_paused_clients),
            _variant("mixed clients cut from the leader", cut_clients_from_leader),
            _variant("mixed one client cut off", cut_one_client),
            _variant("mixed late records", late(ApiKey.PRODUCE, ApiKey.ADD_PARTITIONS_TO_TXN)),
            _variant("mixed records too late", produce_too_late),
            _variant("mixed everything at random", everything),
        ),
        16,
        20_000,
        SHORT_MIX,
        FULL_MIX,
        run_mixed_round,
    ),
    Row(
        "transactions whose requests come late or twice, of both versions, while brokers are killed",
        (
            _variant("late and nothing else", nothing_else),
            _variant("late leader killed", kill(_leader)),
            _variant("late coordinator killed", kill(_COORDINATOR)),
        ),
        6,
        5_000,
        SHORT_LATE,
        FULL_LATE,
        run_late_round,
    ),
    Row(
        "banks that move money between accounts of a compacted topic: the same faults",
        (
            _variant("bank leader killed", kill(_leader)),
            _variant("bank coordinator killed", kill(_COORDINATOR)),
            _variant("bank all killed", kill_all),
            _variant("bank clients killed", kill_clients),
            _variant("bank clients paused", pause_clients),
            _variant("bank everything at random", everything),
        ),
        6,
        4_000,
        SHORT_BANK,
        FULL_BANK,
        run_bank_round,
    ),
)

SHORT_VARIANTS: Final = {
    "copy leader killed",
    "copy coordinator cut off",
    "copy group coordinator killed",
    "copy clients replaced",
    "mixed coordinator killed before markers",
    "mixed all killed",
    "mixed records too late",
    "late and nothing else",
    "bank coordinator killed",
}
"""What CI runs, in two minutes: the others show the same, or take longer to show anything."""
