"""The consumer protocol of KIP-848, event by event."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from millrace.cluster.image import ClusterImage
from millrace.errors import ApiError, ErrorCode
from millrace.groups.classic.effects import LeaveRequest, Protocol, SyncRequest
from millrace.groups.classic.group import GroupState
from millrace.groups.epochs import MemberState
from millrace.groups.modern.group import ModernState
from millrace.groups.modern.protocol import ModernHeartbeat, check_commit, check_fetch, check_request
from millrace.groups.modern.records import Held, HeldRecord, TopicsRecord
from millrace.groups.modern.step import MAX_PATTERNS
from millrace.groups.settings import GroupSettings, GroupTimes
from millrace.groups.subscription import Subscription, read_assignment
from millrace.groups.timers import TimerKind
from millrace.metadata.deltas import BrokerRegistered, PartitionState, TopicCreated
from millrace.wire.codec import encode
from support.groups import join_request
from support.modern_groups import ModernBench, Refused, add_partitions, add_topic, drop_topic, image_of, state_of

NONE = ErrorCode.NONE


@pytest.fixture
def bench() -> ModernBench:
    return ModernBench(image_of(orders=6))


def owned_of(bench: ModernBench, member_id: str) -> list[tuple[UUID, tuple[int, ...]]]:
    assigned = bench.group.members[member_id].held.assigned
    return [(topic_id, tuple(sorted(own))) for topic_id, own in assigned.items()]


def count(bench: ModernBench, member_id: str) -> int:
    return sum(len(own) for own in bench.group.members[member_id].held.assigned.values())


def beat(bench: ModernBench, member_id: str, **changes: Any) -> Any:
    """A heartbeat in the right epoch, of a member that has what it was given."""
    epoch = bench.group.members[member_id].held.epoch
    return bench.heartbeat(member_id, epoch, **{"owned": owned_of(bench, member_id), **changes})


def code_of(refused: pytest.ExceptionInfo[ApiError]) -> ErrorCode:
    return refused.value.code


def stable(bench: ModernBench, *member_ids: str, rounds: int = 4) -> None:
    for _ in range(rounds):
        for member_id in member_ids:
            beat(bench, member_id)
    assert bench.group.state is ModernState.STABLE


# Joining and sharing


def test_the_first_member_gets_everything(bench: ModernBench) -> None:
    answer = bench.join("m1", "orders")
    assert answer.epoch == 1
    assert answer.interval_ms == 5_000
    assert answer.assignment == ((bench.image.topics["orders"].topic_id, (0, 1, 2, 3, 4, 5)),)
    assert bench.group.state is ModernState.STABLE


def test_a_second_member_gets_what_the_first_has_given_up(bench: ModernBench) -> None:
    bench.join("m1", "orders")
    second = bench.join("m2", "orders")
    assert second.epoch == 2
    assert second.assignment == ()
    assert second.interval_ms == 1_000, "it is asked to come back soon"
    assert bench.group.state.value == "Reconciling"

    told = bench.heartbeat("m1", 1)
    assert told.epoch == 1, "its epoch stays until it has given up what it must"
    ((topic_id, kept),) = told.assignment or ()
    assert len(kept) == 3
    assert bench.heartbeat("m2", 2).assignment is None, "the others' are not free yet"

    assert bench.heartbeat("m1", 1, owned=[(topic_id, kept)]).epoch == 2
    ((_, got),) = bench.heartbeat("m2", 2).assignment or ()
    assert sorted(kept + got) == [0, 1, 2, 3, 4, 5]
    assert bench.group.state is ModernState.STABLE


def test_an_answer_without_news_has_no_assignment(bench: ModernBench) -> None:
    bench.join("m1", "orders")
    assert bench.heartbeat("m1", 1).assignment is None
    full = bench.heartbeat("m1", 1, rebalance_timeout_ms=1, topics=("orders",), owned=owned_of(bench, "m1"))
    assert full.assignment is not None


def test_targets_are_computed_once_per_interval(bench: ModernBench) -> None:
    bench.times = GroupTimes(assignment_interval_ms=1_000)
    bench.join("m1", "orders")
    late = bench.join("m2", "orders")
    assert (late.epoch, late.interval_ms) == (1, 1_000)
    assert bench.group.state is ModernState.ASSIGNING
    bench.advance(1_000)
    assert bench.heartbeat("m2", 1).epoch == 2


def test_a_member_without_topics_is_in_the_group(bench: ModernBench) -> None:
    answer = bench.join("m1")
    assert (answer.epoch, answer.assignment) == (1, ())


def test_the_assignor_that_most_want(bench: ModernBench) -> None:
    bench.join("m1", "orders", assignor="range")
    assert bench.group.preferred_assignor("uniform") == "range"
    bench.join("m2", "orders", assignor="uniform")
    bench.join("m3", "orders", assignor="uniform")
    assert bench.group.preferred_assignor("range") == "uniform"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"member_id": ""}, ErrorCode.INVALID_REQUEST),
        ({"instance_id": ""}, ErrorCode.INVALID_REQUEST),
        ({"rack_id": ""}, ErrorCode.INVALID_REQUEST),
        ({"rebalance_timeout_ms": -1}, ErrorCode.INVALID_REQUEST),
        ({"owned": None}, ErrorCode.INVALID_REQUEST),
        ({"topics": None}, ErrorCode.INVALID_REQUEST),
        ({"epoch": -2}, ErrorCode.INVALID_REQUEST),
        ({"epoch": -3}, ErrorCode.INVALID_REQUEST),
        ({"assignor": "clever"}, ErrorCode.UNSUPPORTED_ASSIGNOR),
    ],
)
def test_requests_that_are_not_well_formed(changes: dict[str, Any], expected: ErrorCode) -> None:
    request = ModernHeartbeat("m1", 0, rebalance_timeout_ms=1, topics=(), owned=())
    check_request(request, ("uniform", "range"))
    with pytest.raises(ApiError) as refused:
        check_request(replace(request, **changes), ("uniform", "range"))
    assert code_of(refused) is expected


def test_a_full_group_lets_nobody_else_in(bench: ModernBench) -> None:
    bench.settings = GroupSettings(consumer_max_size=1)
    bench.join("m1", "orders")
    bench.join("m1", "orders")
    with pytest.raises(ApiError) as refused:
        bench.join("m2", "orders")
    assert code_of(refused) is ErrorCode.GROUP_MAX_SIZE_REACHED


# Epochs and fencing


def test_who_is_not_a_member(bench: ModernBench) -> None:
    bench.join("m1", "orders")
    for epoch in (1, -1):
        with pytest.raises(ApiError) as refused:
            bench.heartbeat("ghost", epoch)
        assert code_of(refused) is ErrorCode.UNKNOWN_MEMBER_ID


def test_the_epoch_before_is_good_enough_where_an_answer_was_lost(bench: ModernBench) -> None:
    bench.join("m1", "orders")
    bench.join("m2", "orders")
    beat(bench, "m1")
    beat(bench, "m1")
    assert bench.group.members["m1"].held.epoch == 2
    assert bench.heartbeat("m1", 1, owned=owned_of(bench, "m1")).epoch == 2
    for changes in ({}, {"owned": [(bench.image.topics["orders"].topic_id, (0, 1, 2, 3, 4, 5))]}):
        with pytest.raises(ApiError) as refused:
            bench.heartbeat("m1", 1, **changes)
        assert code_of(refused) is ErrorCode.FENCED_MEMBER_EPOCH
    with pytest.raises(ApiError) as refused:
        bench.heartbeat("m1", 3)
    assert code_of(refused) is ErrorCode.FENCED_MEMBER_EPOCH


def test_a_silent_member_is_removed(bench: ModernBench) -> None:
    bench.join("m1", "orders")
    bench.join("m2", "orders")
    for _ in range(10):
        bench.advance(5_000)
        beat(bench, "m1")
    assert list(bench.group.members) == ["m1"]
    assert count(bench, "m1") == 6


def test_a_member_that_does_not_give_up_is_removed(bench: ModernBench) -> None:
    bench.join("m1", "orders", rebalance_timeout_ms=8_000)
    bench.join("m2", "orders")
    for _ in range(2):
        bench.heartbeat("m1", 1)
        bench.advance(4_000)
        beat(bench, "m2")
    assert list(bench.group.members) == ["m2"]
    assert count(bench, "m2") == 6


def test_leaving(bench: ModernBench) -> None:
    bench.join("m1", "orders")
    assert bench.heartbeat("m1", -1).epoch == -1
    assert bench.group.state is ModernState.EMPTY
    assert not bench.timers
    assert bench.join("m2", "orders").epoch == 3, "the epoch of an empty group goes on"


def test_a_member_of_a_newer_broker_begins_anew(bench: ModernBench) -> None:
    bench.join("m1", "orders")
    bench.decide(lambda step: step.write(HeldRecord("g", "m1", Held(1, 1, MemberState.UNKNOWN))))
    with pytest.raises(ApiError) as refused:
        bench.heartbeat("m1", 1)
    assert code_of(refused) is ErrorCode.FENCED_MEMBER_EPOCH
    assert bench.join("m1", "orders").assignment is not None
    assert count(bench, "m1") == 6


# Static members


def test_a_static_member_comes_back_to_what_it_had(bench: ModernBench) -> None:
    bench.join("m1", "orders", instance_id="i")
    bench.join("m2", "orders")
    stable(bench, "m1", "m2")
    had, epoch = owned_of(bench, "m1"), bench.group.epoch
    assert bench.heartbeat("m1", -2, instance_id="i").epoch == -2
    back = bench.join("m9", "orders", instance_id="i")
    assert (back.epoch, list(back.assignment or ())) == (2, had)
    assert bench.group.epoch == epoch, "nothing has changed for anybody"
    assert "m1" not in bench.group.members
    with pytest.raises(ApiError) as refused:
        bench.heartbeat("m1", 2, instance_id="i")
    assert code_of(refused) is ErrorCode.FENCED_INSTANCE_ID


def test_an_instance_id_that_is_in_use(bench: ModernBench) -> None:
    bench.join("m1", "orders", instance_id="i")
    with pytest.raises(ApiError) as refused:
        bench.join("m2", "orders", instance_id="i")
    assert code_of(refused) is ErrorCode.UNRELEASED_INSTANCE_ID
    with pytest.raises(ApiError) as refused:
        bench.heartbeat("m1", 1, instance_id="other")
    assert code_of(refused) is ErrorCode.UNKNOWN_MEMBER_ID


def test_a_static_member_that_does_not_come_back_is_removed(bench: ModernBench) -> None:
    bench.join("m1", "orders", instance_id="i")
    bench.heartbeat("m1", -2, instance_id="i")
    bench.advance(45_000)
    assert not bench.group.members


# Topics


@pytest.mark.parametrize("change", ["more", "gone", "new"])
def test_a_change_of_a_topic_is_a_new_epoch(bench: ModernBench, change: str) -> None:
    bench.join("m1", "orders", "later")
    assert count(bench, "m1") == 6
    bench.image = {
        "more": lambda image: add_partitions(image, "orders", 2),
        "gone": lambda image: drop_topic(image, "orders"),
        "new": lambda image: add_topic(image, "later", 3),
    }[change](bench.image)
    bench.advance(1_000)
    for _ in range(2):
        beat(bench, "m1")
    assert bench.group.epoch.epoch == 2
    assert count(bench, "m1") == {"more": 8, "gone": 0, "new": 9}[change]


def test_a_change_of_another_topic_is_not(bench: ModernBench) -> None:
    bench.join("m1", "orders")
    bench.image = add_topic(bench.image, "other", 3)
    bench.advance(1_000)
    beat(bench, "m1")
    assert bench.group.epoch.epoch == 1


def test_what_a_member_no_longer_subscribes_to_is_taken_at_once(bench: ModernBench) -> None:
    bench.image = add_topic(bench.image, "users", 2)
    bench.times = GroupTimes(assignment_interval_ms=10_000)
    bench.join("m1", "orders", "users")
    answer = beat(bench, "m1", topics=("users",))
    assert [topic_id for topic_id, _ in answer.assignment] == [bench.image.topics["users"].topic_id]
    assert bench.group.members["m1"].held.state is MemberState.UNREVOKED_PARTITIONS


def test_patterns_match_topics_that_are_and_that_come(bench: ModernBench) -> None:
    bench.image = add_topic(bench.image, "users", 2)
    bench.join("m1", topics=None, pattern="or.*")
    assert count(bench, "m1") == 6
    bench.image = add_topic(bench.image, "organs", 3)
    bench.advance(1_000)
    beat(bench, "m1")
    assert count(bench, "m1") == 9
    beat(bench, "m1", pattern="us.*")
    beat(bench, "m1")
    assert set(bench.group.patterns) == {"us.*"}
    assert count(bench, "m1") == 2
    bench.heartbeat("m1", -1)
    assert not bench.group.patterns


def test_a_pattern_follows_the_rules_of_access(bench: ModernBench) -> None:
    bench.image = add_topic(bench.image, "organs", 3)
    old, new, newer = object(), object(), object()
    bench.join("m1", topics=None, pattern="or.*", rules=old)
    assert count(bench, "m1") == 9
    bench.advance(10_000)
    lost = beat(bench, "m1", rules=new, may_know=lambda name: name != "organs")
    assert [topic_id for topic_id, _ in lost.assignment] == [bench.image.topics["orders"].topic_id]
    beat(bench, "m1", rules=new, owned=lost.assignment, may_know=lambda name: name != "organs")
    assert count(bench, "m1") == 6
    assert bench.group.patterns["or.*"].topics == ("orders",)

    bench.advance(9_999)
    beat(bench, "m1", rules=newer)
    assert count(bench, "m1") == 6, "rules may change all the time"
    bench.advance(1)
    beat(bench, "m1", rules=newer)
    beat(bench, "m1", rules=newer)
    assert count(bench, "m1") == 9, "a right that was given"


def test_a_pattern_is_judged_by_its_own_subscribers(bench: ModernBench) -> None:
    bench.image = add_topic(bench.image, "organs", 3)
    bench.join("m1", topics=None, pattern="or.*", rules="old")
    bench.join("m2", topics=None, pattern="o.*", rules="old")
    bench.advance(10_000)
    beat(bench, "m2", rules="new", may_know=lambda _: False)
    assert bench.group.patterns["o.*"].topics == ()
    assert bench.group.patterns["or.*"].topics == ("orders", "organs")
    beat(bench, "m1", rules="new")
    bench.image = add_topic(bench.image, "users", 1)
    bench.advance(1_000)
    beat(bench, "m1", rules="new")
    assert bench.group.patterns["or.*"].topics == ("orders", "organs")


def test_a_new_coordinator_judges_what_it_has_read(bench: ModernBench) -> None:
    bench.image = add_topic(bench.image, "organs", 3)
    bench.join("m1", topics=None, pattern="or.*", rules="old")
    bench.group = bench.replayed()
    beat(bench, "m1", rules="new", may_know=lambda name: name != "organs")
    assert bench.group.patterns["or.*"].topics == ("orders",)


def test_rules_whose_consequence_was_not_written_are_looked_at_again(bench: ModernBench) -> None:
    bench.join("m1", topics=None, pattern="or.*", rules="old")
    bench.advance(10_000)
    bench.refuses = True
    with pytest.raises(Refused):
        beat(bench, "m1", rules="new", may_know=lambda _: False)
    bench.refuses = False
    beat(bench, "m1", rules="new", may_know=lambda _: False)
    assert bench.group.patterns["or.*"].topics == ()


def test_patterns_are_checked_and_counted(bench: ModernBench) -> None:
    with pytest.raises(ApiError) as refused:
        bench.join("m1", pattern="(a")
    assert code_of(refused) is ErrorCode.INVALID_REGULAR_EXPRESSION
    assert bench.group.is_blank
    for number in range(MAX_PATTERNS):
        bench.join(f"m{number}", pattern=f"a{number}")
    bench.join("again", pattern="a0")
    with pytest.raises(ApiError) as refused:
        bench.join("one more", pattern="b")
    assert code_of(refused) is ErrorCode.INVALID_REGULAR_EXPRESSION


def test_what_older_brokers_wrote_about_topics_is_removed(bench: ModernBench) -> None:
    bench.group.apply(TopicsRecord("g", True))
    bench.join("m1", "orders")
    assert TopicsRecord("g", None) in bench.log
    assert not bench.group.has_topics_record


# Offsets


def test_commits_in_the_epoch_of_the_member(bench: ModernBench) -> None:
    topic_id = bench.image.topics["orders"].topic_id
    assert check_commit(bench.group, "", -1, has_member_epochs=True)(topic_id, 0) is NONE
    bench.join("m1", "orders")
    bench.join("m2", "orders")
    stable(bench, "m1", "m2")
    group = bench.group
    assert check_commit(group, "m1", 2, has_member_epochs=True)(topic_id, 0) is NONE
    ((_, mine),) = owned_of(bench, "m1")
    before = check_commit(group, "m1", 1, has_member_epochs=True)
    assert {index for index in range(6) if before(topic_id, index) is NONE} == set(mine), "it has had them since 1"
    gained = check_commit(group, "m2", 1, has_member_epochs=True)
    assert {gained(topic_id, index) for index in range(6)} == {ErrorCode.STALE_MEMBER_EPOCH}
    for member_id, epoch, expected in (
        ("m1", 3, ErrorCode.STALE_MEMBER_EPOCH),
        ("ghost", 2, ErrorCode.UNKNOWN_MEMBER_ID),
        ("", -1, ErrorCode.UNKNOWN_MEMBER_ID),
    ):
        with pytest.raises(ApiError) as refused:
            check_commit(group, member_id, epoch, has_member_epochs=True)
        assert code_of(refused) is expected
    with pytest.raises(ApiError) as refused:
        check_commit(group, "m1", 2, has_member_epochs=False)
    assert code_of(refused) is ErrorCode.UNSUPPORTED_VERSION


def test_reading_offsets_in_the_epoch_of_the_member(bench: ModernBench) -> None:
    bench.join("m1", "orders")
    check_fetch(bench.group, None, -1)
    check_fetch(bench.group, "m1", 1)
    for member_id, epoch, expected in (
        ("m1", 0, ErrorCode.STALE_MEMBER_EPOCH),
        ("ghost", 1, ErrorCode.UNKNOWN_MEMBER_ID),
    ):
        with pytest.raises(ApiError) as refused:
            check_fetch(bench.group, member_id, epoch)
        assert code_of(refused) is expected


def test_an_assignment_is_told_until_the_member_says_that_it_has_it(bench: ModernBench) -> None:
    joined = bench.join("m1", "orders")
    had = joined.assignment
    assert had is not None
    bench.heartbeat("m1", 1, owned=had)
    assert bench.heartbeat("m1", 1).assignment is None
    bench.join("m2", "orders")
    told = bench.heartbeat("m1", 1).assignment
    assert told is not None
    assert told != had
    # The answer may have been lost, and not every client asks again.
    assert bench.heartbeat("m1", 1).assignment == told
    assert bench.heartbeat("m1", 1, owned=had).assignment == told, "it has not given up anything yet"
    moved = bench.heartbeat("m1", 1, owned=told)
    assert moved.assignment is None
    assert bench.heartbeat("m1", moved.epoch).assignment is None


def test_members_get_what_has_a_replica_in_their_rack() -> None:
    image = ClusterImage()
    for broker_id, rack in ((1, "east"), (2, "west")):
        image = image.apply((BrokerRegistered(broker_id, broker_id, (), rack),))
    there = tuple(PartitionState(replicas=(each,), isr=(each,), leader=each, leader_epoch=0) for each in (1, 2, 1, 2))
    topic_id = UUID(int=7)
    bench = ModernBench(image.apply((TopicCreated("orders", topic_id, there),)))
    bench.join("m1", "orders", rack_id="west")
    bench.join("m2", "orders", rack_id="east")
    assert bench.group.target_of("m1") == {topic_id: (1, 3)}
    assert bench.group.target_of("m2") == {topic_id: (0, 2)}


# Classic members


def classic(bench: ModernBench, member_id: str, *owned: int, **changes: Any) -> Any:
    """A JoinGroup that says what it owns, of a member that is known or has been given an id."""
    subscription = Subscription(
        topics=["orders"],
        owned_partitions=[Subscription.TopicPartition(topic="orders", partitions=list(owned))] if owned else [],
    )
    protocol = Protocol("cooperative-sticky", b"\0\3" + encode(subscription, 3))
    return bench.classic_join(join_request(member_id, protocols=(protocol,), **changes))


def assignment_of(bench: ModernBench, member_id: str, generation: int) -> list[int]:
    answer = bench.classic_sync(SyncRequest(member_id, None, generation))
    assert answer.error is NONE
    return [index for each in read_assignment(answer.assignment).assigned_partitions for index in each.partitions]


def test_a_classic_member_joins_syncs_and_is_told_to_rejoin(bench: ModernBench) -> None:
    bench.join("m1", "orders")
    handed_out = bench.classic_join(join_request(new_member_id="c1"))
    assert (handed_out.error, handed_out.member_id) == (ErrorCode.MEMBER_ID_REQUIRED, "c1")
    joined = classic(bench, "c1")
    assert (joined.generation, joined.protocol_name, joined.leader) == (2, "cooperative-sticky", "")
    assert assignment_of(bench, "c1", 2) == []
    assert bench.classic_heartbeat("c1", 2) is NONE, "nothing is free yet"
    beat(bench, "m1")
    beat(bench, "m1")
    assert bench.classic_heartbeat("c1", 2) is ErrorCode.REBALANCE_IN_PROGRESS
    joined = classic(bench, "c1")
    assert len(assignment_of(bench, "c1", joined.generation)) == 3
    assert bench.classic_heartbeat("c1", joined.generation) is NONE


def test_a_classic_member_gives_up_by_joining_again(bench: ModernBench) -> None:
    bench.settings = GroupSettings(migration_policy="upgrade")
    bench.join("m1", "orders")
    bench.heartbeat("m1", -1)
    bench.join("m2")
    joined = classic(bench, "c1")
    assert assignment_of(bench, "c1", joined.generation) == [0, 1, 2, 3, 4, 5]
    bench.join("m3", "orders")
    generation = joined.generation
    assert bench.classic_heartbeat("c1", generation) is ErrorCode.REBALANCE_IN_PROGRESS
    joined = classic(bench, "c1", 0, 1, 2, 3, 4, 5)
    assert joined.generation == generation, "it must give up first"
    kept = assignment_of(bench, "c1", generation)
    assert len(kept) == 3
    joined = classic(bench, "c1", *kept)
    assert joined.generation == bench.group.target_epoch.epoch
    beat(bench, "m3")
    assert count(bench, "m3") == 3


def test_classic_members_that_do_not_join_or_sync_in_time_are_removed(bench: ModernBench) -> None:
    bench.join("m1", "orders")
    classic(bench, "c1", rebalance_timeout_ms=5_000, session_timeout_ms=60_000)
    bench.advance(5_000)
    assert "c1" not in bench.group.members, "no SyncGroup"
    joined = classic(bench, "c2", rebalance_timeout_ms=5_000, session_timeout_ms=60_000)
    assignment_of(bench, "c2", joined.generation)
    bench.join("m2", "orders")
    assert bench.classic_heartbeat("c2", joined.generation) is ErrorCode.REBALANCE_IN_PROGRESS
    bench.advance(4_000)
    assert bench.classic_heartbeat("c2", joined.generation) is ErrorCode.REBALANCE_IN_PROGRESS
    bench.advance(1_000)
    assert "c2" not in bench.group.members, "no JoinGroup"


def test_errors_of_classic_members(bench: ModernBench) -> None:
    bench.join("m1", "orders")
    joined = classic(bench, "c1")
    for call, expected in (
        (lambda: bench.classic_heartbeat("c1", joined.generation + 1), ErrorCode.ILLEGAL_GENERATION),
        (lambda: bench.classic_heartbeat("m1", 1), ErrorCode.UNKNOWN_MEMBER_ID),
        (lambda: bench.classic_heartbeat("c1", 2, "i"), ErrorCode.UNKNOWN_MEMBER_ID),
        (lambda: bench.classic_sync(SyncRequest("c1", None, 9)), ErrorCode.ILLEGAL_GENERATION),
        (
            lambda: bench.classic_sync(SyncRequest("c1", None, joined.generation, "consumer", "range")),
            ErrorCode.INCONSISTENT_GROUP_PROTOCOL,
        ),
        (lambda: bench.classic_join(join_request("c2")), ErrorCode.INCONSISTENT_GROUP_PROTOCOL),
        (
            lambda: bench.classic_join(join_request("c2", protocols=(Protocol("cooperative-sticky", b"\0"),))),
            ErrorCode.INCONSISTENT_GROUP_PROTOCOL,
        ),
    ):
        with pytest.raises(ApiError) as refused:
            call()
        assert code_of(refused) is expected
    bench.settings = GroupSettings(migration_policy="disabled")
    with pytest.raises(ApiError) as refused:
        classic(bench, "c3")
    assert code_of(refused) is ErrorCode.INCONSISTENT_GROUP_PROTOCOL


def test_classic_leaves(bench: ModernBench) -> None:
    bench.join("m1", "orders")
    bench.join("m2", "orders", instance_id="i")
    results = bench.classic_leave(
        LeaveRequest("m1"), LeaveRequest("ghost"), LeaveRequest("other", "i"), LeaveRequest("", "i")
    )
    assert [each.error for each in results] == [
        NONE,
        ErrorCode.UNKNOWN_MEMBER_ID,
        ErrorCode.FENCED_INSTANCE_ID,
        NONE,
    ]
    assert bench.group.state is ModernState.EMPTY


def test_the_last_one_of_the_new_protocol_leaves_a_classic_group(bench: ModernBench) -> None:
    bench.join("m1", "orders")
    classic(bench, "c1")
    bench.heartbeat("m1", -1)
    left = bench.became_classic
    assert left is not None
    assert left.state is GroupState.STABLE
    assert (list(left.members), left.protocol_name, left.generation) == (["c1"], "cooperative-sticky", 2)
    assert bench.group.is_blank
    assert not [key for key in bench.timers if key.kind is not TimerKind.SESSION]


def test_a_static_member_that_comes_back_as_a_classic_one(bench: ModernBench) -> None:
    bench.join("m1", "orders", instance_id="i")
    answer = classic(bench, "", instance_id="i", new_member_id="c1")
    assert answer.error is NONE
    assert bench.became_classic is not None
    assert list(bench.became_classic.members) == ["c1"]


# The log


def test_a_refused_write_has_not_happened(bench: ModernBench) -> None:
    bench.join("m1", "orders", pattern="o.*")
    before = repr(state_of(bench.group))
    bench.refuses = True
    for attempt in (
        lambda: bench.join("m2", "orders"),
        lambda: beat(bench, "m1", pattern="x"),
        lambda: bench.heartbeat("m1", -1),
        lambda: bench.classic_leave(LeaveRequest("m1")),
    ):
        with pytest.raises(Refused):
            attempt()
        assert repr(state_of(bench.group)) == before


def test_nothing_is_left_of_a_deleted_group(bench: ModernBench) -> None:
    bench.join("m1", "orders", pattern="o.*")
    for record in bench.group.tombstones():
        bench.group.apply(record)
    assert bench.group.is_blank
    assert not bench.group.owners
