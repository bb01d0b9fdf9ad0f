"""Bugs to plant in the rules of replication and of transactions: the simulation must find each of them.

A mutation is a function that patches the rule it breaks through `pytest.MonkeyPatch`. Each is a mistake that a broker
of this kind could make; what it breaks is in docs/coordination.md and docs/transactions.md. Run as a program, this
prints the table of docs/testing.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import pytest

from millrace.cluster import controller, elections, reassignments, recovery
from millrace.cluster.elections import IsrProposal
from millrace.cluster.image import BrokerImage
from millrace.replication import isr, replicas
from millrace.replication.leadership import Leadership
from millrace.replication.partition import Partition
from millrace.replication.replicas import Replicas
from millrace.replication.watermark import Watermark
from millrace.storage import recovery as storage_recovery
from millrace.storage.producers import UNVERIFIED, Producers
from millrace.storage.settings import FlushMode
from millrace.transactions import state
from millrace.transactions.state import Decision, Transaction
from support import simulated_cluster
from support.simulated_broker import Disks
from support.simulated_cluster import SimCluster
from support.simulated_promises import BrokenPromise
from support.simulated_transactional_cluster import TransactionalCluster
from support.simulated_transactions import Coordinator

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutation:
    """A bug, and the first line of its text."""

    name: str
    plant: Plant
    kind: type[SimCluster] = SimCluster
    """The runs that are to find it."""

    @property
    def description(self) -> str:
        return (self.plant.__doc__ or "").partition("\n")[0].rstrip(".")


MUTATIONS: Final[dict[str, Mutation]] = {}


def mutation(plant: Plant) -> Plant:
    name = plant.__name__
    MUTATIONS[name] = Mutation(name, plant)
    return plant


def mutation_of_transactions(plant: Plant) -> Plant:
    name = plant.__name__
    MUTATIONS[name] = Mutation(name, plant, TransactionalCluster)
    return plant


@mutation
def ack_before_replication(patch: pytest.MonkeyPatch) -> None:
    """The high watermark is the leader's own end."""
    patch.setattr(isr, "high_watermark", lambda own_end, *_: own_end)


@mutation
def truncation_to_the_high_watermark(patch: pytest.MonkeyPatch) -> None:
    """A follower of a new leader cuts its log at the high watermark it knows, not where the epochs part."""
    follow = Partition.follow

    def follow_and_cut(self: Partition, state: Any) -> None:
        before, log = self.leader_epoch, self.open_log
        follow(self, state)
        if self.leader_epoch != before and log is not None and log.end_offset > self.high_watermark.offset:
            log.truncate_to(self.high_watermark.offset)

    patch.setattr(Partition, "follow", follow_and_cut)


@mutation
def fetch_epochs_ignored(patch: pytest.MonkeyPatch) -> None:
    """A leader looks neither at the leader epoch of a fetch nor at the epoch of the follower's last record."""
    leader_epoch_of_a_fetch_ignored(patch)
    last_fetched_epoch_ignored(patch)


@mutation
def leader_epoch_of_a_fetch_ignored(patch: pytest.MonkeyPatch) -> None:
    """A leader takes the promise of a fetch that was meant for another leadership."""
    patch.setattr(Partition, "check_leader_epoch", lambda self, epoch: None)


@mutation
def last_fetched_epoch_ignored(patch: pytest.MonkeyPatch) -> None:
    """A leader does not tell a follower that their logs have parted."""
    serve = Partition.serve_follower

    def serve_anybody(
        self: Partition, broker_id: int, broker_epoch: int, offset: int, _last_epoch: int, *rest: Any, **more: Any
    ) -> Any:
        return serve(self, broker_id, broker_epoch, offset, -1, *rest, **more)

    patch.setattr(Partition, "serve_follower", serve_anybody)


@mutation
def stale_broker_epoch_accepted(patch: pytest.MonkeyPatch) -> None:
    """Fetches and proposals of and for an earlier incarnation of a broker count."""
    serve = Leadership.serve_follower

    def serve_anybody(self: Leadership, broker_id: int, broker_epoch: int, *rest: Any, **more: Any) -> Any:
        follower = self._followers.get(broker_id)
        known = -1 if follower is None else follower.broker_epoch
        return serve(self, broker_id, max(broker_epoch, known), *rest, **more)

    patch.setattr(Leadership, "serve_follower", serve_anybody)
    patch.setattr(simulated_cluster, "is_of_an_earlier_start", lambda image, fetch: False)
    patch.setattr(controller, "_check_epoch", lambda image, broker_id, broker_epoch: None)
    judge = elections.may_be_in_sync
    for module in (elections, replicas):
        patch.setattr(
            module, "may_be_in_sync", lambda image, topic, state, broker_id, *_: judge(image, topic, state, broker_id)
        )


@mutation
def proposal_without_compare_and_set(patch: pytest.MonkeyPatch) -> None:
    """The controller does not look at the partition epoch of a proposal."""
    judge = elections._isr_error

    def judge_any(image: Any, topic: Any, state: Any, broker_id: int, proposal: IsrProposal) -> Any:
        if state is not None:
            proposal = replace(proposal, partition_epoch=state.partition_epoch)
        return judge(image, topic, state, broker_id, proposal)

    patch.setattr(elections, "_isr_error", judge_any)


@mutation
def proposed_additions_not_counted(patch: pytest.MonkeyPatch) -> None:
    """The high watermark does not wait for replicas that the leader has proposed to add."""

    def propose(self: Leadership, members: tuple[int, ...]) -> None:
        self._has_proposed = True

    patch.setattr(Leadership, "propose", propose)


@mutation
def new_incarnation_trusted(patch: pytest.MonkeyPatch) -> None:
    """A broker that comes back keeps its places in ISRs, and its leaderships with their epochs."""
    next_state = elections.next_state

    def trust_those_who_return(state: Any, there: Any, *, gone: Any = (), **more: Any) -> Any:
        return next_state(state, there, gone=[each for each in gone if each not in there], **more)

    patch.setattr(elections, "next_state", trust_those_who_return)


@mutation
def join_without_having_everything(patch: pytest.MonkeyPatch) -> None:
    """A replica may join the ISR wherever its log ends."""
    patch.setattr(isr, "may_join", lambda follower, mark, epoch_start: follower.log_end >= 0)


@mutation
def join_without_the_epochs_start(patch: pytest.MonkeyPatch) -> None:
    """A replica may join the ISR below the start of the leader's epoch, from the mark on that a new leader knows."""
    patch.setattr(isr, "may_join", lambda follower, mark, epoch_start: follower.log_end >= max(mark, 0))


@mutation
def no_deduplication(patch: pytest.MonkeyPatch) -> None:
    """Sequence numbers are not looked at."""
    patch.setattr(Producers, "check", lambda self, header: None)


@mutation
def promise_before_the_flush(patch: pytest.MonkeyPatch) -> None:
    """A follower sends a fetch offset before what is below it is on disk."""
    patch.setattr(Partition, "is_flushed", True)


@mutation
def unclean_leader_elected(patch: pytest.MonkeyPatch) -> None:
    """A replica outside of the ISR is elected although the topic does not allow it."""
    plan_recovery = recovery.plan_recovery

    def plan_at_any_price(image: Any, ends: Any, since: Any, now_s: float, rules_of: Any) -> Any:
        return plan_recovery(image, ends, since, now_s, lambda topic: replace(rules_of(topic), unclean=True))

    patch.setattr(recovery, "plan_recovery", plan_at_any_price)


@mutation
def leader_epoch_kept_by_a_new_incarnation(patch: pytest.MonkeyPatch) -> None:
    """A leader that comes back, alone in its ISR, goes on in the epoch in which it died."""
    changed = elections.changed

    def changed_without(*args: Any, new_leadership: bool = False, **more: Any) -> Any:
        return changed(*args, **more)

    patch.setattr(elections, "changed", changed_without)


@mutation
def waits_outlive_the_leadership(patch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a commit is not told when the leadership is lost, and is answered by the next leader's mark."""
    patch.setattr(Watermark, "fail", lambda self, error: self.notify())


@mutation
def move_ends_before_it_is_copied(patch: pytest.MonkeyPatch) -> None:
    """A reassignment drops the old replicas although the new ones are not in sync."""

    def completed(state: Any) -> Any:
        replicas = tuple(each for each in state.replicas if each not in state.removing)
        members = tuple(each for each in state.isr if each not in state.removing) or replicas
        directories = tuple(state.directory_of(each) for each in replicas)
        return replace(state, replicas=replicas, isr=members, directories=directories, adding=(), removing=())

    patch.setattr(reassignments, "completed", completed)


@mutation
def deposed_controller_not_fenced(patch: pytest.MonkeyPatch) -> None:
    """The store takes the delta of a controller whose reign is over."""

    def append(self: simulated_cluster.Store, changes: Any, _reign: Any) -> None:
        self.deltas.append(changes)
        self.images.append(self.image.apply(changes))

    patch.setattr(simulated_cluster.Store, "append", append)


@mutation
def directory_ids_ignored(patch: pytest.MonkeyPatch) -> None:
    """A replica counts as there wherever its broker lives, whatever disk the broker has come back with."""
    patch.setattr(BrokerImage, "has_directory", lambda self, directory: True)
    patch.setattr(elections, "_placed", lambda state, attendance, rules: state)
    patch.setattr(Replicas, "_is_here", lambda self, state: True)


@mutation
def missing_log_made_anew(patch: pytest.MonkeyPatch) -> None:
    """A log that is gone from a disk that is there is made anew, empty, without a word to the controller."""
    patch.setattr(Disks, "is_missing", lambda self, place, topic_id: False)


@mutation
def lost_memory_trusted(patch: pytest.MonkeyPatch) -> None:
    """In flush.mode=os a broker whose machine was started again keeps its places as if nothing were lost."""
    patch.setattr(elections, "_may_have_lost_memory", lambda known, registered: False)


@mutation
def commits_below_min_insync_replicas(patch: pytest.MonkeyPatch) -> None:
    """A leader commits although the ISR is too small, and others are eligible to lead."""

    def never_under(self: Leadership) -> None:
        self.under_min_isr = False

    patch.setattr(Leadership, "judge_min_isr", never_under)


@mutation
def eligible_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Whoever has left the ISR stays eligible when it is large enough again and records are committed."""
    eligible = elections._eligible

    def eligible_still(before: Any, replicas: Any, isr: Any, directories: Any, min_isr: int) -> Any:
        return eligible(before, replicas, isr, directories, 1 << 30)

    patch.setattr(elections, "_eligible", eligible_still)
    patch.setattr(Leadership, "judge_min_isr", _judge_by_the_isr_alone)


def _judge_by_the_isr_alone(self: Leadership) -> None:
    replica, state = self._replica, self._replica.state
    self.under_min_isr = len(state.isr) < min(replica.min_insync_replicas, len(state.replicas))


# --- transactions -----------------------------------------------------------------------------------------------------


@mutation_of_transactions
def markers_forgotten_on_failover(patch: pytest.MonkeyPatch) -> None:
    """A new coordinator takes what its predecessor decided for complete, whatever the partitions know."""

    def forget(self: Coordinator) -> None:
        for transactional_id, prepared in self.prepared():
            self.transactions[transactional_id] = state.complete(prepared, prepared.updated_ms)

    patch.setattr(Coordinator, "begin", forget)


@mutation_of_transactions
def transactions_load_before_they_are_committed(patch: pytest.MonkeyPatch) -> None:
    """A new coordinator does not wait for what it reads, and acts on, to be committed."""
    init = Coordinator.__init__

    def load_nothing(self: Coordinator, *args: Any) -> None:
        init(self, *args)
        self._end = min(self._end, self.partition.high_watermark.offset)

    patch.setattr(Coordinator, "__init__", load_nothing)


@mutation_of_transactions
def producer_epoch_kept(patch: pytest.MonkeyPatch) -> None:
    """A producer keeps its epoch when its transaction ends, or is aborted by the coordinator."""
    plan = state._plan_bumping_end

    def plan_without_a_bump(current: Transaction, **more: Any) -> Decision:
        after = plan(current, **more).after
        assert after is not None
        after = replace(after, producer_epoch=current.producer_epoch)
        return Decision(after, after.next_producer)

    patch.setattr(state, "_plan_bumping_end", plan_without_a_bump)


@mutation_of_transactions
def verification_skipped(patch: pytest.MonkeyPatch) -> None:
    """A leader does not ask the coordinator whether a transaction has its partition (before version 2)."""
    begin, append = Partition.begin_verification, Partition.append

    def begin_none(self: Partition, *args: Any, bumps_epoch: bool) -> Any:
        return begin(self, *args, bumps_epoch=True) if bumps_epoch else None

    def append_unverified(self: Partition, data: Any, *, verification: Any = None, **more: Any) -> Any:
        return append(self, data, verification=UNVERIFIED if verification is None else verification, **more)

    patch.setattr(Partition, "begin_verification", begin_none)
    patch.setattr(Partition, "append", append_unverified)


@mutation_of_transactions
def ended_transactions_are_stable(patch: pytest.MonkeyPatch) -> None:
    """The last stable offset does not wait for markers to be committed."""
    patch.setattr(Producers, "first_unstable", lambda self, _high_watermark: self.first_open_offset)


@mutation_of_transactions
def aborted_index_lost_in_recovery(patch: pytest.MonkeyPatch) -> None:
    """Recovery makes the index of aborted transactions anew, and leaves it empty."""
    replay = storage_recovery.replay

    def replay_without_index(state: Any, segments: Any, from_offset: int, now_ms: int, **_: Any) -> None:
        replay(state, segments, from_offset, now_ms, rebuild_from=None)

    patch.setattr(storage_recovery, "replay", replay_without_index)


@mutation_of_transactions
def late_markers_taken(patch: pytest.MonkeyPatch) -> None:
    """A partition does not look at the epochs of a marker's producer and coordinator."""
    patch.setattr(Producers, "check_marker", lambda self, *_: None)


@mutation_of_transactions
def epochs_of_producers_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    """The coordinator takes requests of whoever has had the transactional id."""
    patch.setattr(state, "_check_producer", lambda current, producer: None)
    plan_end = state.plan_end

    def plan_any_end(current: Any, producer: Any, **more: Any) -> Decision:
        return plan_end(current, producer if current is None else current.producer, **more)

    patch.setattr(state, "plan_end", plan_any_end)


@mutation_of_transactions
def complete_before_all_markers(patch: pytest.MonkeyPatch) -> None:
    """A transaction is complete when the first partition has its marker."""
    finish = Coordinator.finish

    def finish_early(self: Coordinator, transactional_id: str, prepared: Transaction) -> None:
        if self.marked[transactional_id]:
            self.marked[transactional_id] |= {each.partition for each in prepared.partitions}
        finish(self, transactional_id, prepared)

    patch.setattr(Coordinator, "finish", finish_early)


# --- the hunt ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """How a mutation was caught: the first invariant that it broke, and how many runs came before."""

    runs: int
    flush_mode: FlushMode
    invariant: str


def hunt(planted: Mutation, max_runs: int) -> Found | None:
    """Run the simulation with a bug in it, one seed after another in both modes, until something does not hold."""
    with pytest.MonkeyPatch.context() as patch:
        planted.plant(patch)
        for run in range(max_runs):
            flush_mode = (FlushMode.OS, FlushMode.GROUP)[run % 2]
            try:
                simulated_cluster.simulate(run // 2, flush_mode, planted.kind)
            except BrokenPromise as error:
                return Found(run + 1, flush_mode, _invariant(error))
    return None


def _invariant(error: BrokenPromise) -> str:
    cause = error.__cause__
    return str(cause)[:3] if isinstance(cause, BrokenPromise) else str(cause).partition(":")[0]


def main() -> None:
    print("| planted | broken | seen after so many runs |\n|---|---|---|")
    for each in MUTATIONS.values():
        found = hunt(each, int(os.environ.get("MILLRACE_SIM_SEEDS", "1000")))
        text = "never | " if found is None else f"{found.invariant} | {found.runs}"
        print(f"| {each.description} | {text} |", flush=True)


if __name__ == "__main__":
    main()
