"""Elections and moves, case by case; random histories are in tests/models/test_elections.py."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace

import pytest

from millrace.cluster.elections import (
    ElectionKind,
    IsrProposal,
    LogEnd,
    TopicRules,
    plan_brokers,
    plan_by_settings,
    plan_elections,
    plan_isr,
    topic_rules,
)
from millrace.cluster.image import ClusterImage
from millrace.cluster.planning import Plan
from millrace.cluster.reassignments import Reassignment, completed, plan_reassignments
from millrace.config import BrokerConfig
from millrace.errors import ErrorCode
from millrace.metadata.deltas import (
    BrokerRegistered,
    ConfigChanged,
    PartitionChanged,
    PartitionState,
    ResourceType,
    TopicCreated,
)
from millrace.model import TopicPartition
from support.metadata import ENDPOINT, cluster_of

TOPIC_ID = uuid.UUID(int=7)
P0 = TopicPartition("t", 0)


def cluster(*states: PartitionState, fenced: tuple[int, ...] = (), brokers: int = 4) -> ClusterImage:
    image = cluster_of(*range(1, brokers + 1), fenced=fenced)
    return image.apply((TopicCreated("t", TOPIC_ID, states),))


def after(image: ClusterImage, plan: Plan[object]) -> PartitionState:
    return image.apply(plan.changes).topics["t"].partitions[0]


def epoch(broker_id: int) -> int:
    return 100 + broker_id


HEALTHY = PartitionState((1, 2, 3), (1, 2, 3), 1, 5, 9)


def test_a_dead_leader_leaves_and_the_next_in_the_assignment_leads() -> None:
    image = cluster(HEALTHY)
    assert after(image, plan_brokers(image, fence={1: 101})) == PartitionState((1, 2, 3), (2, 3), 2, 6, 10)


def test_a_dead_follower_leaves_and_the_leader_keeps_its_epoch() -> None:
    image = cluster(HEALTHY)
    assert after(image, plan_brokers(image, fence={3: 103})) == PartitionState((1, 2, 3), (1, 2), 1, 5, 10)


def test_all_who_die_together_stay() -> None:
    image = cluster(HEALTHY)
    plan = plan_brokers(image, fence={1: 101, 2: 102, 3: 103})
    assert after(image, plan) == PartitionState((1, 2, 3), (1, 2, 3), -1, 6, 10)


def test_the_last_one_standing_stays_and_leads_again() -> None:
    image = cluster(PartitionState((1, 2), (2,), 2, 5, 9))
    image = image.apply(plan_brokers(image, fence={2: 102}).changes)
    assert image.topics["t"].partitions[0] == PartitionState((1, 2), (2,), -1, 6, 10)
    plan = plan_brokers(image, register=[BrokerRegistered(2, 500, (ENDPOINT,))])
    assert after(image, plan) == PartitionState((1, 2), (2,), 2, 7, 11)


def test_a_new_incarnation_gives_up_its_place() -> None:
    image = cluster(HEALTHY)
    plan = plan_brokers(image, register=[BrokerRegistered(1, 500, (ENDPOINT,))])
    assert after(image, plan) == PartitionState((1, 2, 3), (2, 3), 2, 6, 10)
    assert image.apply(plan.changes).is_live(1)


def test_a_lone_leader_that_restarts_leads_under_a_new_epoch() -> None:
    image = cluster(PartitionState((1,), (1,), 1, 5, 9))
    plan = plan_brokers(image, register=[BrokerRegistered(1, 500, (ENDPOINT,))])
    assert after(image, plan) == PartitionState((1,), (1,), 1, 6, 10)


def test_a_registration_that_the_image_has_is_no_change() -> None:
    image = cluster(HEALTHY)
    for old in (epoch(1), epoch(1) - 1):
        assert not plan_brokers(image, register=[BrokerRegistered(1, old, (ENDPOINT,))]).changes


def test_of_several_who_died_at_once_none_leads_by_coming_back() -> None:
    image = cluster(PartitionState((1, 2), (1, 2), -1, 5, 9), fenced=(1, 2))
    for plan in (
        plan_brokers(image, register=[BrokerRegistered(1, 500, (ENDPOINT,))]),
        plan_brokers(image, unfence={1: 101}),
        plan_brokers(image, register=[BrokerRegistered(1, 500, (ENDPOINT,)), BrokerRegistered(2, 501, (ENDPOINT,))]),
    ):
        back = image.apply(plan.changes)
        assert back.topics["t"].partitions[0] == PartitionState((1, 2), (1, 2), -1, 5, 9)
        # Nor by what happens to somebody else.
        assert after(back, plan_brokers(back, fence={4: 104})).leader == -1
        assert after(back, plan_reassignments(back, [move(2, 1, 3)])).leader == -1


def test_several_who_restart_at_once_are_asked_first() -> None:
    image = cluster(HEALTHY)
    back = [BrokerRegistered(broker_id, 500 + broker_id, (ENDPOINT,)) for broker_id in (1, 2, 3)]
    assert after(image, plan_brokers(image, register=back)) == PartitionState((1, 2, 3), (1, 2, 3), -1, 6, 10)


def test_an_eligible_one_that_lives_leads_at_once() -> None:
    image = cluster(PartitionState((1, 2, 3), (1, 2), 1, 5, 9, elr=(3,)))
    plan = plan_brokers(image, fence={1: 101, 2: 102}, rules_of=lambda _: TopicRules(min_isr=3))
    assert after(image, plan) == PartitionState((1, 2, 3), (3,), 3, 6, 10, elr=(1, 2))


def test_who_allows_unclean_elections() -> None:
    image = cluster(HEALTHY)
    assert not topic_rules(image, BrokerConfig())("t").unclean
    assert topic_rules(image, BrokerConfig({"unclean.leader.election.enable": "true"}))("t").unclean
    setting = ConfigChanged(ResourceType.TOPIC, "t", (("unclean.leader.election.enable", "true"),))
    assert topic_rules(image.apply((setting,)), BrokerConfig())("t").unclean


def test_fewer_that_have_to_be_in_sync_end_the_eligibility_of_others() -> None:
    image = cluster(PartitionState((1, 2), (1,), 1, 5, 9, elr=(2,)))
    assert not plan_by_settings(image, lambda _: TopicRules(min_isr=2)).changes
    plan = plan_by_settings(image, lambda _: TopicRules(min_isr=1))
    assert plan.results == 1 and after(image, plan) == PartitionState((1, 2), (1,), 1, 5, 10)


# --- proposals --------------------------------------------------------------------------------------------------------


def proposal(
    *members: int | tuple[int, int], leader_epoch: int = 5, partition_epoch: int = 9, index: int = 0, topic: int = 7
) -> IsrProposal:
    isr = tuple(member if isinstance(member, tuple) else (member, -1) for member in members)
    return IsrProposal(uuid.UUID(int=topic), index, leader_epoch, partition_epoch, isr)


@pytest.mark.parametrize(
    ("asked", "proposer", "code"),
    [
        (proposal(1, topic=8), 1, ErrorCode.UNKNOWN_TOPIC_ID),
        (proposal(1, index=1), 1, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (proposal(1, index=-1), 1, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (proposal(1, leader_epoch=6), 1, ErrorCode.NOT_CONTROLLER),
        (proposal(1, partition_epoch=10), 1, ErrorCode.NOT_CONTROLLER),
        (proposal(1, leader_epoch=4), 1, ErrorCode.FENCED_LEADER_EPOCH),
        (proposal(2), 2, ErrorCode.INVALID_REQUEST),
        (proposal(1, partition_epoch=8), 1, ErrorCode.INVALID_UPDATE_VERSION),
        (proposal(), 1, ErrorCode.INVALID_REQUEST),
        (proposal(1, 1), 1, ErrorCode.INVALID_REQUEST),
        (proposal(1, 5), 1, ErrorCode.INVALID_REQUEST),
        (proposal(1, 4), 1, ErrorCode.INELIGIBLE_REPLICA),
        (proposal(1, (3, 77)), 1, ErrorCode.INELIGIBLE_REPLICA),
        (proposal((1, 101), (3, 103)), 1, ErrorCode.NONE),
        (proposal(1), 1, ErrorCode.NONE),
        (proposal(2, 3), 1, ErrorCode.NEW_LEADER_ELECTED),
    ],
)
def test_proposals(asked: IsrProposal, proposer: int, code: ErrorCode) -> None:
    image = cluster(PartitionState((1, 2, 3, 4), (1, 2), 1, 5, 9), fenced=(4,), brokers=5)
    plan = plan_isr(image, proposer, [asked])
    assert plan.results[0].error is code
    assert bool(plan.changes) == (code in {ErrorCode.NONE, ErrorCode.NEW_LEADER_ELECTED})


def test_a_proposal_for_what_is_there_makes_earlier_ones_void() -> None:
    image = cluster(HEALTHY)
    plan = plan_isr(image, 1, [proposal(3, 2, 1)])
    assert plan.results[0].error is ErrorCode.NONE
    assert plan.results[0].state == replace(HEALTHY, partition_epoch=HEALTHY.partition_epoch + 1)
    assert len(plan.changes) == 1


def test_two_proposals_for_a_partition_are_judged_in_turn() -> None:
    image = cluster(HEALTHY)
    plan = plan_isr(image, 1, [proposal(1, 2), proposal(1)])
    assert [outcome.error for outcome in plan.results] == [ErrorCode.NONE, ErrorCode.INVALID_UPDATE_VERSION]
    assert after(image, plan).isr == (1, 2)


def test_a_leader_that_names_others_only_hands_over() -> None:
    image = cluster(HEALTHY)
    plan = plan_isr(image, 1, [proposal(3, 2)])
    assert after(image, plan) == PartitionState((1, 2, 3), (3, 2), 2, 6, 10)


# --- elections on request ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "kind", "code", "leader"),
    [
        (PartitionState((1, 2), (1, 2), 2, 5, 9), ElectionKind.PREFERRED, None, 1),
        (PartitionState((1, 2), (1, 2), 1, 5, 9), ElectionKind.PREFERRED, ErrorCode.ELECTION_NOT_NEEDED, 1),
        (PartitionState((1, 2), (2,), 2, 5, 9), ElectionKind.PREFERRED, ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, 2),
        (PartitionState((4, 2), (2,), 2, 5, 9), ElectionKind.PREFERRED, ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, 2),
        (PartitionState((1, 2), (2,), 2, 5, 9), ElectionKind.UNCLEAN, ErrorCode.ELECTION_NOT_NEEDED, 2),
        (PartitionState((4, 2), (4,), -1, 5, 9), ElectionKind.UNCLEAN, None, 2),
        (PartitionState((4,), (4,), -1, 5, 9), ElectionKind.UNCLEAN, ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, -1),
    ],
)
def test_elections(state: PartitionState, kind: ElectionKind, code: ErrorCode | None, leader: int) -> None:
    image = cluster(state, fenced=(4,))
    plan = plan_elections(image, kind, [P0], {(TOPIC_ID, 0): {2: LogEnd(5, 10), 4: LogEnd(5, 20)}})
    ((partition, error),) = plan.results
    assert partition == P0 and (error and error.code) == code
    assert after(image, plan).leader == leader
    assert after(image, plan).leader_epoch == (5 if code else 6)


@pytest.mark.parametrize(
    ("ends", "leader"),
    [
        ({2: LogEnd(4, 20), 3: LogEnd(5, 10)}, 3),
        ({2: LogEnd(5, 20), 3: LogEnd(5, 10)}, 2),
        ({2: None, 3: LogEnd(0, 0)}, 3),
        ({2: None, 3: None}, -1),
        ({}, -1),
    ],
)
def test_an_unclean_leader_is_the_one_with_the_longest_log(ends: dict[int, LogEnd | None], leader: int) -> None:
    image = cluster(PartitionState((4, 2, 3), (4,), -1, 5, 9), fenced=(4,))
    plan = plan_elections(image, ElectionKind.UNCLEAN, None, {(TOPIC_ID, 0): ends})
    state = after(image, plan)
    assert state.leader == leader
    ((_, error),) = plan.results
    if leader == -1:
        assert error is not None and error.code is ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE
        assert "start a broker" in error.message
    else:
        assert error is None and state.isr == (leader,) and not state.elr


def test_one_that_has_everything_is_elected_before_a_longer_log() -> None:
    image = cluster(PartitionState((1, 2, 3), (1, 2), -1, 5, 9), fenced=(1,))
    ends = {(TOPIC_ID, 0): {2: LogEnd(4, 10), 3: LogEnd(4, 20)}}
    assert after(image, plan_elections(image, ElectionKind.UNCLEAN, None, ends)).leader == 2


def test_an_election_of_everything_names_only_what_needed_one() -> None:
    image = cluster(PartitionState((1, 2), (1, 2), 2), HEALTHY)
    assert plan_elections(image, ElectionKind.PREFERRED, None).results == [(P0, None)]
    unknown = plan_elections(image, ElectionKind.PREFERRED, [TopicPartition("t", 5), TopicPartition("x", 0)])
    assert [error and error.code for _, error in unknown.results] == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION] * 2


# --- moves ------------------------------------------------------------------------------------------------------------


def move(*replicas: int, index: int = 0, topic: str = "t") -> Reassignment:
    return Reassignment(topic, index, replicas)


CANCEL = Reassignment("t", 0, None)


def test_a_move_adds_first_and_removes_when_the_new_ones_are_in_sync() -> None:
    image = cluster(HEALTHY)
    image = image.apply(plan_reassignments(image, [move(4, 2, 3)]).changes)
    moving = PartitionState((4, 2, 3, 1), (1, 2, 3), 1, 5, 10, adding=(4,), removing=(1,))
    assert image.topics["t"].partitions[0] == moving
    plan = plan_isr(image, 1, [proposal(1, 2, 3, 4, partition_epoch=10)], complete=completed)
    assert plan.results[0].error is ErrorCode.NEW_LEADER_ELECTED
    assert after(image, plan) == PartitionState((4, 2, 3), (2, 3, 4), 4, 6, 11)


def test_a_move_that_only_changes_the_order_is_done_at_once() -> None:
    image = cluster(HEALTHY)
    assert after(image, plan_reassignments(image, [move(3, 1, 2)])) == PartitionState((3, 1, 2), (1, 2, 3), 1, 5, 10)
    assert not plan_reassignments(image, [move(1, 2, 3)]).changes


def test_fewer_replicas_wait_until_those_who_stay_are_in_sync() -> None:
    image = cluster(PartitionState((1, 2, 3), (1, 2), 1, 5, 9))
    waiting = plan_reassignments(image, [move(2, 3)])
    assert after(image, waiting) == PartitionState((2, 3, 1), (1, 2), 1, 5, 10, removing=(1,))
    done = plan_reassignments(image, [move(2)])
    assert after(image, done) == PartitionState((2,), (2,), 2, 6, 10)


def test_a_move_is_taken_back() -> None:
    image = cluster(HEALTHY)
    image = image.apply(plan_reassignments(image, [move(4, 2, 3)]).changes)
    image = image.apply(plan_isr(image, 1, [proposal(1, 2, partition_epoch=10)]).changes)
    plan = plan_reassignments(image, [CANCEL])
    assert plan.results == [None]
    assert after(image, plan) == PartitionState((2, 3, 1), (1, 2), 1, 6, 12)


def test_a_move_that_left_only_new_replicas_in_sync_cannot_be_taken_back() -> None:
    state = PartitionState((3, 4, 1), (3,), 3, 5, 9, adding=(3, 4), removing=(1,))
    image = cluster(state)
    plan = plan_reassignments(image, [CANCEL])
    assert plan.results[0] is not None and plan.results[0].code is ErrorCode.INVALID_REPLICA_ASSIGNMENT
    plan = plan_reassignments(image, [CANCEL], rules_of=lambda _: TopicRules(unclean=True))
    assert after(image, plan) == PartitionState((1,), (1,), 1, 6, 10)


def test_a_second_move_replaces_the_first() -> None:
    image = cluster(PartitionState((1, 2), (1, 2), 1, 5, 9), brokers=5)
    image = image.apply(plan_reassignments(image, [move(3, 4)]).changes)
    plan = plan_reassignments(image, [move(3, 5)])
    assert after(image, plan) == PartitionState((3, 5, 1, 2, 4), (1, 2), 1, 5, 11, adding=(3, 5), removing=(1, 2, 4))


@pytest.mark.parametrize(
    ("item", "code"),
    [
        (move(1, index=4), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (move(1, index=-1), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (move(1, topic="x"), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (move(), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (move(1, 1), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (move(1, 9), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (move(1, 2), ErrorCode.INVALID_REPLICATION_FACTOR),
        (CANCEL, ErrorCode.NO_REASSIGNMENT_IN_PROGRESS),
    ],
)
def test_moves_that_are_refused(item: Reassignment, code: ErrorCode) -> None:
    plan = plan_reassignments(cluster(HEALTHY), [item], allow_replication_factor_change=False)
    assert plan.results[0] is not None and plan.results[0].code is code and not plan.changes


def test_a_partition_named_twice_is_not_moved() -> None:
    plan = plan_reassignments(cluster(HEALTHY), [move(1, 2, 4), move(1, 3, 4)])
    assert [error and error.code for error in plan.results] == [ErrorCode.INVALID_REQUEST] * 2 and not plan.changes


# --- size -------------------------------------------------------------------------------------------------------------


def test_the_failover_of_six_thousand_partitions_is_one_quick_plan() -> None:
    states = [PartitionState((a, a % 3 + 1), (a, a % 3 + 1), a) for a in (1, 2, 3)] * 2000
    image = cluster_of(1, 2, 3).apply((TopicCreated("t", TOPIC_ID, tuple(states)),))
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        plan = plan_brokers(image, fence={1: 101})
        failed_over = image.apply(plan.changes)
        times.append(time.perf_counter() - begin)
    assert sum(isinstance(change, PartitionChanged) for change in plan.changes) == 4000
    assert not list(failed_over.led_by(1)) and not list(failed_over.in_sync_on(1))
    assert len(list(failed_over.held_by(1))) == 4000
    assert min(times) < 0.5
