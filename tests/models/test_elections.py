"""Elections over random histories: brokers die, return and are fenced, leaders propose, people elect and move replicas.

Disks are replaced, come back, and lose what was not flushed.

Beside the image stands a model of the data: for each partition, which logs (a broker and a directory) have every
committed record. The worst is assumed at every step: whatever the ISR is, its leader commits something at once, unless
somebody outside of it is eligible, and everybody outside the ISR lacks it. A leader that is not among those who have
everything has lost acknowledged records.
"""

from __future__ import annotations

import uuid
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millrace.cluster.elections import (
    ElectionKind,
    IsrProposal,
    LogEnd,
    LogEnds,
    Placement,
    TopicRules,
    awaits_recovery,
    plan_brokers,
    plan_by_settings,
    plan_elections,
    plan_isr,
    plan_placements,
    plan_rebalance,
    plan_registrations,
)
from millrace.cluster.image import ClusterImage
from millrace.cluster.planning import Plan
from millrace.cluster.reassignments import Reassignment, completed, plan_reassignments
from millrace.cluster.recovery import PATIENCE_S, orphans, plan_recovery
from millrace.errors import ErrorCode
from millrace.metadata.deltas import BrokerRegistered, Directories, PartitionState, TopicCreated
from millrace.model import LOST_DIRECTORY, TopicPartition
from support.metadata import ENDPOINT, cluster_of

TOPIC = "t"
TOPIC_ID = uuid.UUID(int=7)
BROKERS = (1, 2, 3, 4, 5)
some_brokers = st.sets(st.sampled_from(BROKERS), min_size=1)
ACCEPTED = {ErrorCode.NONE, ErrorCode.NEW_LEADER_ELECTED}


class ElectionModel(RuleBasedStateMachine):
    """One topic; every rule plans one change and applies it."""

    def __init__(self) -> None:
        super().__init__()
        self.image = ClusterImage()
        self.next_epoch = 1000
        self.disks = {broker_id: f"disk-{broker_id}-0" for broker_id in BROKERS}
        self.boots = dict.fromkeys(BROKERS, 0)
        self.complete: list[set[tuple[int, str]]] = []
        """The logs that have everything, by broker and directory."""
        self.leaders: dict[tuple[int, int], tuple[int, int]] = {}
        self.unclean = False
        self.min_isr = 1
        self.flushed = True

    @initialize(
        assignments=st.lists(
            st.lists(st.sampled_from(BROKERS), min_size=1, max_size=4, unique=True), min_size=1, max_size=3
        ),
        min_isr=st.integers(1, 3),
        flushed=st.booleans(),
    )
    def create(self, assignments: list[list[int]], min_isr: int, flushed: bool) -> None:
        self.min_isr, self.flushed = min_isr, flushed
        homes = [tuple(self.disks[broker_id] for broker_id in a) for a in assignments]
        partitions = tuple(
            PartitionState(tuple(a), tuple(a), a[0], directories=home)
            for a, home in zip(assignments, homes, strict=True)
        )
        image = cluster_of(*BROKERS).apply(tuple(self.incarnations(set(BROKERS))))
        self.image = image.apply((TopicCreated(TOPIC, TOPIC_ID, partitions),))
        self.complete = [set(zip(a, home, strict=True)) for a, home in zip(assignments, homes, strict=True)]
        self.note_leaders()

    # --- what happens -------------------------------------------------------------------------------------------------

    def states(self, image: ClusterImage | None = None) -> tuple[PartitionState, ...]:
        return (image or self.image).topics[TOPIC].partitions

    def write(
        self,
        plan: Plan[Any],
        caught_up: dict[int, set[int]] | None = None,
        unclean: bool = False,
        lost: dict[int, set[int]] | None = None,
    ) -> None:
        """Apply a plan; `caught_up` are brokers whose logs have everything now, `lost` those that have not any more."""
        before, self.image = self.states(), self.image.apply(plan.changes)
        for index, (old, new) in enumerate(zip(before, self.states(), strict=True)):
            have = self.complete[index] | {log_of(old, each) for each in (caught_up or {}).get(index, ())}
            have -= {log_of(old, each) for each in (lost or {}).get(index, ())}
            for replica in set(new.replicas) & set(old.replicas):
                if new.directory_of(replica) != old.directory_of(replica):
                    have.discard(log_of(new, replica))  # it begins anew there
            for replica in set(new.replicas) - set(old.replicas):
                have.discard(log_of(new, replica))
            if new == old:
                assert new.partition_epoch == old.partition_epoch
            else:
                assert new.partition_epoch == old.partition_epoch + 1
                assert old.leader_epoch <= new.leader_epoch <= old.leader_epoch + 1
                assert new.leader == old.leader or new.leader_epoch == old.leader_epoch + 1
            if new.leader != -1:
                leader = log_of(new, new.leader)
                if leader not in have and unclean:
                    assert new.isr == (new.leader,) and not new.elr
                    have = {leader}
                assert leader in have, "the leader lacks committed records"
                assert new.directory_of(new.leader) == self.disks[new.leader], "the leader does not have its disk"
            counted = [log_of(new, each) for each in (*new.isr, *new.elr)]
            known = {log for log in counted if log[1] != LOST_DIRECTORY}
            assert known <= have, "a log that counts lacks records"
            if new.leader != -1 and not new.elr:
                have = {log_of(new, each) for each in new.isr}
            self.complete[index] = have
        self.note_leaders()

    def note_leaders(self) -> None:
        for index, state in enumerate(self.states()):
            if state.leader != -1:
                leader = (state.leader, self.image.brokers[state.leader].broker_epoch)
                assert self.leaders.setdefault((index, state.leader_epoch), leader) == leader

    def rules_of(self, _topic: str) -> TopicRules:
        return TopicRules(self.unclean, self.min_isr, self.flushed)

    def is_there(self, state: PartitionState, broker_id: int) -> bool:
        return self.image.is_present(state, broker_id)

    def epochs(self, brokers: set[int]) -> dict[int, int]:
        return {broker_id: self.image.brokers[broker_id].broker_epoch for broker_id in brokers}

    def incarnations(self, brokers: set[int]) -> list[BrokerRegistered]:
        registrations = []
        for broker_id in sorted(brokers):
            self.next_epoch += 1
            registrations.append(
                BrokerRegistered(
                    broker_id,
                    self.next_epoch,
                    (ENDPOINT,),
                    directories=Directories((self.disks[broker_id],)),
                    boot_id=f"boot {self.boots[broker_id]}",
                )
            )
        return registrations

    @rule(fence=some_brokers, unfence=some_brokers)
    def fence_and_unfence(self, fence: set[int], unfence: set[int]) -> None:
        plan = plan_brokers(
            self.image,
            fence=self.epochs(fence),
            unfence=self.epochs(unfence),
            rules_of=self.rules_of,
        )
        self.write(plan)
        assert not any(self.image.is_live(broker_id) for broker_id in fence - unfence)

    @rule(brokers=some_brokers)
    def unfence(self, brokers: set[int]) -> None:
        plan = plan_brokers(self.image, unfence=self.epochs(brokers), rules_of=self.rules_of)
        self.write(plan)
        assert all(self.image.is_live(broker_id) for broker_id in brokers)

    @rule(back=some_brokers, fence=some_brokers, disk=st.integers(0, 2), boot=st.integers(0, 1))
    def register_again(self, back: set[int], fence: set[int], disk: int, boot: int) -> None:
        """Brokers come back, with the disk they had or another one, and perhaps after a power cut."""
        before = self.states()
        lost: dict[int, set[int]] = {}
        for broker_id in sorted(back):
            if disk and broker_id == min(back):
                self.disks[broker_id] = f"disk-{broker_id}-{disk - 1}"
            self.boots[broker_id] += boot
        if boot and not self.flushed:
            # What one replica alone has left is everything there is.
            lost = {index: back & set(state.replicas) for index, state in enumerate(before) if len(state.replicas) > 1}
        plan = plan_brokers(
            self.image,
            fence=self.epochs(fence),
            register=self.incarnations(back),
            rules_of=self.rules_of,
        )
        self.write(plan, lost=lost)
        assert all(self.image.is_live(broker_id) for broker_id in back)
        for old, new in zip(before, self.states(), strict=True):
            survivors = {member for member in old.isr if self.is_there(old, member)} - back - fence
            if awaits_recovery(old):
                assert new.leader == -1 and new.isr == old.isr, "one of several led because it came back"
                continue
            if not survivors and not back & set(new.isr):
                assert new.isr == old.isr or new.leader in old.elr, "the last to die must all stay"
            if survivors:
                assert set(new.isr) == survivors, "somebody stayed who was not there, or somebody left who was"

    @rule(there=some_brokers, back=st.sets(st.sampled_from(BROKERS)), dead=st.sets(st.sampled_from(BROKERS)))
    def new_controller(self, there: set[int], back: set[int], dead: set[int]) -> None:
        members = self.incarnations(there & back)
        members += [
            BrokerRegistered(broker_id, self.image.brokers[broker_id].broker_epoch, (ENDPOINT,))
            for broker_id in sorted(there - back)
        ]
        plan = plan_registrations(self.image, members, dead=self.epochs(dead), rules_of=self.rules_of)
        self.write(plan)
        live = {broker.broker_id for broker in self.image.live_brokers}
        assert there & back <= live <= there

    @rule(broker_id=st.sampled_from(BROKERS), epoch=st.integers(0, 50))
    def orders_for_an_older_incarnation_are_void(self, broker_id: int, epoch: int) -> None:
        plan = plan_brokers(self.image, fence={broker_id: epoch}, unfence={broker_id: epoch})
        assert not plan.changes

    @rule(
        index=st.integers(0, 2),
        members=st.lists(st.sampled_from(BROKERS), max_size=4),
        proposer=st.sampled_from(BROKERS) | st.none(),
        leader_epoch=st.sampled_from([-1, 0, 0, 0, 0, 1]),
        partition_epoch=st.sampled_from([-1, 0, 0, 0, 0, 1]),
        stale=st.sets(st.sampled_from(BROKERS), max_size=1),
        own_replicas=st.booleans(),
    )
    def propose(
        self,
        index: int,
        members: list[int],
        proposer: int | None,
        leader_epoch: int,
        partition_epoch: int,
        stale: set[int],
        own_replicas: bool,
    ) -> None:
        index %= len(self.states())
        state = self.states()[index]
        if own_replicas:  # most proposals name replicas only
            members = [member for member in dict.fromkeys(members) if member in state.replicas]
        proposal = IsrProposal(
            TOPIC_ID,
            index,
            state.leader_epoch + leader_epoch,
            state.partition_epoch + partition_epoch,
            tuple((m, self.image.brokers[m].broker_epoch - (1 if m in stale else 0)) for m in members),
        )
        who = state.leader if proposer is None else proposer
        plan = plan_isr(self.image, who, [proposal], complete=completed, rules_of=self.rules_of)
        (outcome,) = plan.results
        acceptable = (
            who == state.leader
            and leader_epoch == partition_epoch == 0
            and bool(members)
            and len(set(members)) == len(members)
            and set(members) <= set(state.replicas)
            and all(self.is_there(state, member) and member not in stale for member in members)
        )
        assert (outcome.error in ACCEPTED) == acceptable
        if not acceptable:
            assert not plan.changes and outcome.state is None
        # The leader vouches for those it adds, but not for those it does not name.
        self.write(plan, {index: set(members)} if acceptable else None)
        if acceptable:
            after = self.states()[index]
            assert outcome.state == after
            assert set(after.isr) <= set(members)
            assert (outcome.error is ErrorCode.NONE) == (after.leader == state.leader)
            if not after.is_reassigning:
                assert set(state.adding) <= set(after.isr), "a move ended before its new replicas were in sync"

    @rule(kind=st.sampled_from(ElectionKind), everything=st.booleans())
    def elect(self, kind: ElectionKind, everything: bool) -> None:
        before = self.states()
        partitions = None if everything else [TopicPartition(TOPIC, index) for index in range(len(before) + 1)]
        ends = self.answers(set(BROKERS), {}, lost=True)
        plan = plan_elections(self.image, kind, partitions, ends, rules_of=self.rules_of)
        self.write(plan, unclean=kind is ElectionKind.UNCLEAN)
        for (_, index), error in plan.results:
            if error is None and kind is ElectionKind.PREFERRED:
                assert self.states()[index].leader == before[index].replicas[0] != before[index].leader
            elif error is None:
                assert self.states()[index].leader != -1 == before[index].leader

    def answers(self, brokers: set[int], lengths: dict[int, int], *, lost: bool = False) -> LogEnds:
        """What live replicas among `brokers` say of their logs; those that are lost have one if `lost`."""
        return {
            (TOPIC_ID, index): {
                each: LogEnd(0, lengths.get(each, 0))
                if self.is_there(state, each) or (lost and state.directory_of(each) == LOST_DIRECTORY)
                else None
                for each in state.replicas
                if each in brokers and self.image.is_live(each)
            }
            for index, state in enumerate(self.states())
        }

    @rule(
        answering=some_brokers,
        lengths=st.dictionaries(st.sampled_from(BROKERS), st.integers(0, 3)),
        waited_s=st.sampled_from([0.0, PATIENCE_S]),
    )
    def recover(self, answering: set[int], lengths: dict[int, int], waited_s: float) -> None:
        """Those who are there are asked; the longest of those who have everything leads."""
        before = self.states()
        found = {each.key[1]: each for each in orphans(self.image, self.rules_of)}
        ends = self.answers(answering, lengths)
        since = dict.fromkeys(ends, 0.0)
        plan = plan_recovery(self.image, ends, since, waited_s, self.rules_of)
        for index, state in enumerate(before):
            if awaits_recovery(state) and any(self.is_there(state, each) for each in state.isr):
                assert index in found, "a partition is waited for, and nobody does anything"
        self.write(plan, unclean=self.unclean)
        for index, (old, new) in enumerate(zip(before, self.states(), strict=True)):
            if new == old:
                able = {each for each in found[index].candidates if each in answering} if index in found else ()
                assert not able or waited_s < PATIENCE_S, "there was one to elect"
                continue
            candidates = found[index].candidates
            assert old.leader == -1 and new.leader in set(candidates) & answering
            assert lengths.get(new.leader, 0) == max(lengths.get(each, 0) for each in candidates if each in answering)
            if waited_s < PATIENCE_S:
                assert not found[index].missing and set(candidates) <= answering, "others were not waited for"

    @rule()
    def rebalance(self) -> None:
        self.write(plan_rebalance(self.image))
        for state in self.states():
            preferred = state.replicas[0]
            is_able = self.is_there(state, preferred) and preferred in state.isr
            assert state.leader == preferred or not is_able or awaits_recovery(state)
        assert not plan_rebalance(self.image).changes

    @rule(index=st.integers(0, 2), wanted=st.lists(st.sampled_from(BROKERS), min_size=1, max_size=4, unique=True))
    def reassign(self, index: int, wanted: list[int]) -> None:
        index %= len(self.states())
        before = self.states()[index]
        plan = plan_reassignments(self.image, [Reassignment(TOPIC, index, tuple(wanted))], rules_of=self.rules_of)
        assert plan.results == [None]
        self.write(plan)
        after = self.states()[index]
        assert after.replicas[: len(wanted)] == tuple(wanted)
        if set(wanted) == set(before.replicas) and not before.adding:
            assert not after.is_reassigning
        if not after.is_reassigning:
            assert set(wanted) - set(before.replicas) <= set(after.isr)

    @precondition(lambda self: any(state.is_reassigning for state in self.states()))
    @rule()
    def cancel(self) -> None:
        for index, state in enumerate(self.states()):
            plan = plan_reassignments(self.image, [Reassignment(TOPIC, index, None)], rules_of=self.rules_of)
            if not state.is_reassigning:
                assert plan.results[0] is not None and not plan.changes
                continue
            self.write(plan, unclean=self.unclean)
            if plan.results[0] is None:
                assert self.states()[index].replicas == tuple(r for r in state.replicas if r not in state.adding)

    @precondition(lambda self: any(state.is_reassigning for state in self.states()))
    @rule()
    def replicas_catch_up(self) -> None:
        """Every leader brings all live replicas into the ISR; a move whose target lives is then complete."""
        for index, state in enumerate(self.states()):
            live = tuple(r for r in state.replicas if self.is_there(state, r))
            if state.leader == -1:
                continue
            members = tuple((r, -1) for r in live)
            proposal = IsrProposal(TOPIC_ID, index, state.leader_epoch, state.partition_epoch, members)
            plan = plan_isr(self.image, state.leader, [proposal], complete=completed, rules_of=self.rules_of)
            self.write(plan, {index: set(live)})
            after = self.states()[index]
            if set(state.replicas) - set(state.removing) <= set(live):
                assert not after.is_reassigning
                assert after.replicas == tuple(r for r in state.replicas if r not in state.removing)
                assert set(after.isr) == set(after.replicas)

    @rule(broker_id=st.sampled_from(BROKERS), index=st.integers(0, 2))
    def find_damage(self, broker_id: int, index: int) -> None:
        """A live broker finds that one of its logs is damaged, or gone."""
        index %= len(self.states())
        state = self.states()[index]
        if broker_id not in state.replicas or not self.is_there(state, broker_id):
            return
        placement = Placement(TOPIC_ID, index, LOST_DIRECTORY)
        plan = plan_placements(self.image, broker_id, [placement], rules_of=self.rules_of)
        assert plan.results == [ErrorCode.NONE]
        self.write(plan, lost={index: {broker_id}})
        after = self.states()[index]
        assert after.leader != broker_id
        assert broker_id not in after.elr
        assert broker_id not in after.isr or after.leader == -1

    @rule(min_isr=st.integers(1, 3))
    def change_min_isr(self, min_isr: int) -> None:
        self.min_isr = min_isr
        self.write(plan_by_settings(self.image, self.rules_of))

    @rule(allowed=st.booleans())
    def allow_unclean(self, allowed: bool) -> None:
        self.unclean = allowed

    # --- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def states_make_sense(self) -> None:
        if TOPIC not in self.image.topics:
            return
        for state in self.states():
            live = [member for member in state.isr if self.is_there(state, member)]
            assert state.isr and len(set(state.isr)) == len(state.isr)
            assert set(state.isr) <= set(state.replicas)
            if not awaits_recovery(state):
                assert live == list(state.isr) or not live, "the dead stayed in the ISR beside the living"
                assert (state.leader in live) if live else (state.leader == -1)
            assert len(set(state.replicas)) == len(state.replicas)
            assert {*state.adding, *state.removing} <= set(state.replicas)
            assert not set(state.adding) & set(state.removing)
            assert len(state.directories) == len(state.replicas)
            assert set(state.elr) <= set(state.replicas) - set(state.isr)
            assert not any(state.directory_of(each) == LOST_DIRECTORY for each in state.elr)


def log_of(state: PartitionState, broker_id: int) -> tuple[int, str]:
    return broker_id, state.directory_of(broker_id)


TestElections = ElectionModel.TestCase
TestElections.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
