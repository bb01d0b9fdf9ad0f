"""The rules of the classic protocol, one example each; the models are in tests/models/test_classic_groups.py."""

from __future__ import annotations

import pytest

from millrace.errors import ErrorCode
from millrace.groups.classic import protocol as classic
from millrace.groups.classic.effects import LeaveRequest, Protocol, SyncRequest
from millrace.groups.classic.group import ClassicGroup, GroupState
from millrace.groups.settings import GroupSettings
from millrace.groups.timers import TimerKind
from support.groups import RANGE, STICKY, GroupBench, assignment_of, join_request, subscription

NONE = ErrorCode.NONE


@pytest.fixture
def bench() -> GroupBench:
    return GroupBench()


def test_a_first_member_gets_an_id_then_a_generation(bench: GroupBench) -> None:
    first = bench.joined(bench.join(join_request()))
    assert first.error is ErrorCode.MEMBER_ID_REQUIRED
    assert bench.group.pending_join == {first.member_id}
    ticket = bench.join(join_request(first.member_id))
    assert bench.group.state is GroupState.PREPARING_REBALANCE
    bench.advance(2_999)
    assert ticket in bench.parked
    bench.advance(1)
    result = bench.joined(ticket)
    assert (result.error, result.generation, result.leader) == (NONE, 1, first.member_id)
    assert (result.protocol_type, result.protocol_name) == ("consumer", "range")
    assert [member.metadata for member in result.members] == [RANGE.metadata]
    assert bench.group.state is GroupState.COMPLETING_REBALANCE
    assert bench.group.subscribed_topics == {"orders"}
    bench.assign()
    assert bench.group.state is GroupState.STABLE
    assert bench.log[-1].members[0].assignment == assignment_of(first.member_id, 1)


def test_before_v4_a_member_is_let_in_at_once(bench: GroupBench) -> None:
    ticket = bench.join(join_request(requires_member_id=False))
    bench.advance(3_000)
    assert bench.joined(ticket).member_id == "member-1"


def test_the_initial_delay_grows_while_members_come_up_to_the_rebalance_timeout(bench: GroupBench) -> None:
    bench.admit(rebalance_timeout_ms=7_000)
    bench.advance(2_000)
    bench.admit(rebalance_timeout_ms=7_000)
    bench.advance(2_000)
    assert bench.group.state is GroupState.PREPARING_REBALANCE
    bench.admit(rebalance_timeout_ms=7_000)
    bench.advance(2_000)
    assert bench.group.state is GroupState.PREPARING_REBALANCE
    bench.advance(1_000)
    assert bench.group.state is GroupState.COMPLETING_REBALANCE
    assert len(bench.group.members) == 3


def test_a_pending_id_expires_with_its_session(bench: GroupBench) -> None:
    member_id = bench.joined(bench.join(join_request())).member_id
    bench.advance(10_000)
    assert not bench.group.pending_join
    assert bench.joined(bench.join(join_request(member_id))).error is ErrorCode.UNKNOWN_MEMBER_ID


def test_pending_ids_hold_a_rebalance_back_until_they_come_or_expire(bench: GroupBench) -> None:
    (leader,) = bench.stabilise()
    bench.join(join_request())
    ticket = bench.join(join_request(leader))
    assert ticket in bench.parked
    bench.advance(10_000)
    assert bench.joined(ticket).generation == 2


def test_only_the_leader_sees_the_members(bench: GroupBench) -> None:
    (first, one), (_, two) = bench.admit(), bench.admit()
    bench.advance(6_000)
    assert bench.joined(one).leader == bench.joined(two).leader == first
    assert len(bench.joined(one).members) == 2
    assert bench.joined(two).members == ()


def test_followers_wait_for_the_leaders_assignment_and_the_log(bench: GroupBench) -> None:
    (leader, _), (follower, _) = bench.admit(), bench.admit()
    bench.advance(6_000)
    bench.confirm_at_once = False
    waiting = bench.sync(SyncRequest(follower, None, 1))
    leading = bench.sync(SyncRequest(leader, None, 1, assignments=((follower, b"f"), (leader, b"l"))))
    assert {waiting, leading} <= bench.parked
    bench.confirm()
    assert bench.synced(waiting).assignment == b"f"
    assert bench.synced(leading).assignment == b"l"
    assert bench.group.state is GroupState.STABLE


def test_a_repeated_assignment_does_not_overtake_the_first(bench: GroupBench) -> None:
    (leader, _) = bench.admit()
    bench.advance(3_000)
    bench.confirm_at_once = False
    first = bench.sync(SyncRequest(leader, None, 1, assignments=((leader, b"first"),)))
    again = bench.sync(SyncRequest(leader, None, 1, assignments=((leader, b"again"),)))
    assert bench.synced(first).error is ErrorCode.REBALANCE_IN_PROGRESS
    bench.confirm_all()
    assert bench.synced(again).assignment == b"first" == bench.log[-1].members[0].assignment


def test_a_failed_write_of_the_assignment_is_told_and_rebalances(bench: GroupBench) -> None:
    (leader, _) = bench.admit()
    bench.advance(3_000)
    bench.confirm_at_once = False
    ticket = bench.sync(SyncRequest(leader, None, 1, assignments=((leader, b"a"),)))
    bench.confirm(ErrorCode.COORDINATOR_NOT_AVAILABLE)
    assert bench.synced(ticket).error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert bench.group.state is GroupState.PREPARING_REBALANCE


def test_stable_members_get_their_assignment_again(bench: GroupBench) -> None:
    (member,) = bench.stabilise()
    result = bench.synced(bench.sync(SyncRequest(member, None, 1)))
    assert result.assignment == assignment_of(member, 1)


def test_sync_checks_the_protocol(bench: GroupBench) -> None:
    (member,) = bench.stabilise()
    for type_, name in (("connect", "range"), ("consumer", "sticky")):
        ticket = bench.sync(SyncRequest(member, None, 1, protocol_type=type_, protocol_name=name))
        assert bench.synced(ticket).error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL


def test_heartbeats(bench: GroupBench) -> None:
    assert bench.heartbeat("nobody", 0) is ErrorCode.UNKNOWN_MEMBER_ID
    (leader, follower) = bench.stabilise(2)
    assert bench.heartbeat(leader, 1) is NONE
    assert bench.heartbeat(leader, 0) is ErrorCode.ILLEGAL_GENERATION
    assert bench.heartbeat("nobody", 1) is ErrorCode.UNKNOWN_MEMBER_ID
    bench.join(join_request(leader))
    assert bench.heartbeat(follower, 1) is ErrorCode.REBALANCE_IN_PROGRESS


def test_a_silent_member_is_removed_and_the_others_rebalance(bench: GroupBench) -> None:
    (leader, follower) = bench.stabilise(2)
    for _ in range(2):
        bench.advance(5_000)
        bench.heartbeat(leader, 1)
    assert follower not in bench.group.members
    assert bench.group.state is GroupState.PREPARING_REBALANCE


def test_members_that_do_not_rejoin_in_time_are_removed(bench: GroupBench) -> None:
    (leader, follower) = bench.stabilise(2, rebalance_timeout_ms=20_000)
    ticket = bench.join(join_request(leader, rebalance_timeout_ms=20_000))
    for _ in range(4):
        bench.advance(5_000)
        bench.heartbeat(follower, 1)
    assert bench.joined(ticket).generation == 2
    assert list(bench.group.members) == [leader]
    assert bench.heartbeat(follower, 1) is ErrorCode.UNKNOWN_MEMBER_ID


def test_a_leader_that_does_not_rejoin_is_replaced(bench: GroupBench) -> None:
    (leader, follower) = bench.stabilise(2, rebalance_timeout_ms=5_000)
    ticket = bench.join(join_request(follower, protocols=(RANGE, STICKY), rebalance_timeout_ms=5_000))
    bench.advance(5_000)
    assert bench.joined(ticket).leader == follower
    assert leader not in bench.group.members


def test_static_members_that_do_not_rejoin_stay(bench: GroupBench) -> None:
    (static, _), (dynamic, _) = bench.admit(instance_id="red"), bench.admit()
    bench.advance(6_000)
    bench.assign()
    ticket = bench.join(join_request(dynamic, protocols=(RANGE, STICKY), rebalance_timeout_ms=5_000))
    for _ in range(12):
        bench.advance(5_000)
        bench.heartbeat(static, 1, "red")
    assert bench.joined(ticket).generation == 2
    assert static in bench.group.members


def test_when_no_static_member_rejoins_the_phase_starts_over(bench: GroupBench) -> None:
    changes = {"rebalance_timeout_ms": 2_000, "session_timeout_ms": 60_000}
    (red, _), (green, _) = bench.admit(instance_id="red", **changes), bench.admit(instance_id="green", **changes)
    bench.advance(3_000)
    bench.assign()
    bench.leave(LeaveRequest(green, "green"))
    bench.advance(10_000)
    assert (bench.group.state, bench.group.generation) == (GroupState.PREPARING_REBALANCE, 1)
    assert any(key.kind is TimerKind.JOIN for key in bench.timers)
    ticket = bench.join(join_request(red, instance_id="red", **changes))
    assert bench.joined(ticket).generation == 2


def test_members_that_never_sync_are_removed(bench: GroupBench) -> None:
    (leader, _), (follower, _) = (
        bench.admit(rebalance_timeout_ms=20_000), bench.admit(rebalance_timeout_ms=20_000),
    )  # fmt: skip
    bench.advance(6_000)
    waiting = bench.sync(SyncRequest(follower, None, 1))
    for _ in range(4):
        bench.advance(5_000)
        bench.heartbeat(leader, 1)
    assert leader not in bench.group.members
    assert bench.synced(waiting).error is ErrorCode.REBALANCE_IN_PROGRESS
    assert bench.group.leader_id == follower


def test_waiting_for_the_others_does_not_cost_the_session(bench: GroupBench) -> None:
    (leader, follower) = bench.stabilise(2)
    ticket = bench.join(join_request(leader))
    for _ in range(11):
        bench.advance(5_000)
        bench.heartbeat(follower, 1)
    assert ticket in bench.parked
    bench.join(join_request(follower))
    assert bench.joined(ticket).error is NONE


def test_a_new_member_waits_five_minutes_at_most(bench: GroupBench) -> None:
    (leader,) = bench.stabilise(rebalance_timeout_ms=3_600_000)
    _, ticket = bench.admit()
    for _ in range(60):
        bench.advance(5_000)
        bench.heartbeat(leader, 1)
    assert bench.joined(ticket).error is ErrorCode.UNKNOWN_MEMBER_ID


def test_a_lost_join_answer_is_given_again(bench: GroupBench) -> None:
    (leader, _), (follower, _) = bench.admit(), bench.admit()
    bench.advance(6_000)
    again = bench.joined(bench.join(join_request(leader)))
    assert (again.error, again.generation, len(again.members)) == (NONE, 1, 2)
    assert bench.joined(bench.join(join_request(follower))).members == ()
    assert bench.group.state is GroupState.COMPLETING_REBALANCE


def test_changed_metadata_while_completing_rebalances(bench: GroupBench) -> None:
    (leader, _), (follower, _) = bench.admit(), bench.admit()
    bench.advance(6_000)
    parked = bench.sync(SyncRequest(leader, None, 1))
    bench.confirm_all()
    bench.join(join_request(follower, protocols=(RANGE, STICKY)))
    assert bench.synced(parked).error in {NONE, ErrorCode.REBALANCE_IN_PROGRESS}
    assert bench.group.state is GroupState.PREPARING_REBALANCE


def test_an_unchanged_follower_changes_nothing_a_leader_does(bench: GroupBench) -> None:
    (leader, follower) = bench.stabilise(2)
    result = bench.joined(bench.join(join_request(follower)))
    assert (result.error, result.generation, result.leader) == (NONE, 1, leader)
    assert bench.group.state is GroupState.STABLE
    bench.join(join_request(leader))
    assert bench.group.state is GroupState.PREPARING_REBALANCE


def test_a_repeated_join_answers_the_first_one(bench: GroupBench) -> None:
    (leader, _) = bench.stabilise(2)
    first = bench.join(join_request(leader))
    second = bench.join(join_request(leader))
    assert bench.joined(first).error is ErrorCode.REBALANCE_IN_PROGRESS
    assert second in bench.parked


@pytest.mark.parametrize(
    "changes",
    [
        {"protocol_type": ""},
        {"protocols": ()},
    ],
)
def test_a_first_member_needs_a_protocol(bench: GroupBench, changes: dict[str, object]) -> None:
    assert bench.joined(bench.join(join_request(**changes))).error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL


@pytest.mark.parametrize("changes", [{"protocol_type": "connect"}, {"protocols": (STICKY,)}])
def test_members_need_a_common_protocol(bench: GroupBench, changes: dict[str, object]) -> None:
    bench.stabilise()
    assert bench.joined(bench.join(join_request(**changes))).error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL


def test_the_protocol_with_most_votes_wins(bench: GroupBench) -> None:
    for protocols in ((STICKY, RANGE), (RANGE, STICKY), (STICKY, RANGE)):
        bench.admit(protocols=protocols)
    bench.advance(12_000)
    assert bench.group.protocol_name == STICKY.name


def test_a_protocol_not_everybody_has_gets_no_votes(bench: GroupBench) -> None:
    bench.admit(protocols=(STICKY, RANGE))
    bench.admit(protocols=(STICKY, RANGE))
    bench.admit(protocols=(RANGE,))
    bench.advance(12_000)
    assert bench.group.protocol_name == RANGE.name


def test_a_protocol_named_twice_votes_once(bench: GroupBench) -> None:
    other = Protocol(RANGE.name, b"other")
    bench.admit(protocols=(RANGE, STICKY, other))
    (member,) = bench.group.members.values()
    assert member.protocols == (RANGE, STICKY)


def test_the_group_has_a_size() -> None:
    bench = GroupBench(GroupSettings(max_size=2))
    leader, _ = bench.stabilise(2)
    assert bench.joined(bench.join(join_request())).error is ErrorCode.GROUP_MAX_SIZE_REACHED
    ticket = bench.join(join_request(leader))
    assert ticket in bench.parked


def test_a_group_loaded_over_its_size_turns_the_last_away() -> None:
    source = GroupBench()
    members = source.stabilise(3)
    bench = GroupBench(GroupSettings(max_size=2), group=ClassicGroup.from_record("g", source.log[-1]))
    bench.perform(classic.loaded(bench.group, bench.settings, bench.now_ms))
    assert bench.group.state is GroupState.PREPARING_REBALANCE
    first, second, third = (bench.join(join_request(member)) for member in members)
    assert bench.joined(third).error is ErrorCode.GROUP_MAX_SIZE_REACHED
    assert bench.joined(first).generation == bench.joined(second).generation == 2


def test_ids_on_offer_have_a_bound() -> None:
    bench = GroupBench(GroupSettings(max_pending_members=2))
    errors = [bench.joined(bench.join(join_request())).error for _ in range(3)]
    assert errors == [ErrorCode.MEMBER_ID_REQUIRED] * 2 + [ErrorCode.GROUP_MAX_SIZE_REACHED]


# Static members


def _static_pair(bench: GroupBench) -> tuple[str, str]:
    (red, _), (green, _) = bench.admit(instance_id="red"), bench.admit(instance_id="green")
    bench.advance(6_000)
    bench.assign()
    return red, green


def test_a_restarted_static_follower_goes_on_without_a_rebalance(bench: GroupBench) -> None:
    red, green = _static_pair(bench)
    result = bench.joined(bench.join(join_request(instance_id="green")))
    assert (result.error, result.generation, result.leader, result.skip_assignment) == (NONE, 1, red, False)
    assert result.member_id != green
    assert bench.group.state is GroupState.STABLE
    assert bench.heartbeat(green, 1, "green") is ErrorCode.FENCED_INSTANCE_ID
    synced = bench.synced(bench.sync(SyncRequest(result.member_id, "green", 1)))
    assert synced.assignment == assignment_of(green, 1)
    assert {member.member_id for member in bench.log[-1].members} == {red, result.member_id}


def test_a_restarted_static_leader_skips_the_assignment_from_v9(bench: GroupBench) -> None:
    _static_pair(bench)
    result = bench.joined(bench.join(join_request(instance_id="red")))
    assert (result.leader, result.skip_assignment, len(result.members)) == (result.member_id, True, 2)


def test_a_restarted_static_leader_before_v9_is_not_told_that_it_leads(bench: GroupBench) -> None:
    red, _ = _static_pair(bench)
    result = bench.joined(bench.join(join_request(instance_id="red", may_skip_assignment=False)))
    assert (result.leader, result.skip_assignment, result.members) == (red, False, ())
    assert bench.group.leader_id == result.member_id


def test_a_replacement_that_is_not_written_is_taken_back(bench: GroupBench) -> None:
    red, green = _static_pair(bench)
    bench.confirm_at_once = False
    ticket = bench.join(join_request(instance_id="green", protocols=(RANGE, STICKY)))
    bench.confirm(ErrorCode.NOT_COORDINATOR)
    assert bench.joined(ticket).error is ErrorCode.NOT_COORDINATOR
    assert set(bench.group.members) == {red, green}
    assert bench.group.members[green].protocols == (RANGE,)
    assert bench.heartbeat(green, 1, "green") is NONE


def test_a_replacement_overtaken_by_a_rebalance_is_answered_by_it(bench: GroupBench) -> None:
    red, _ = _static_pair(bench)
    bench.confirm_at_once = False
    ticket = bench.join(join_request(instance_id="green"))
    leader = bench.join(join_request(red, instance_id="red"))
    assert bench.joined(ticket).generation == bench.joined(leader).generation == 2
    bench.confirm_all()
    assert bench.joined(ticket).generation == 2


def test_a_restart_with_another_protocol_rebalances(bench: GroupBench) -> None:
    bench.admit(instance_id="red", protocols=(RANGE, STICKY))
    bench.admit(instance_id="green", protocols=(RANGE, STICKY))
    bench.advance(6_000)
    bench.assign()
    ticket = bench.join(join_request(instance_id="green", protocols=(STICKY,)))
    assert ticket in bench.parked
    assert bench.group.state is GroupState.PREPARING_REBALANCE


def test_a_restart_while_completing_rebalances_and_fences_who_waits(bench: GroupBench) -> None:
    (_, _), (green, _) = bench.admit(instance_id="red"), bench.admit(instance_id="green")
    bench.advance(6_000)
    waiting = bench.sync(SyncRequest(green, "green", 1))
    bench.join(join_request(instance_id="green"))
    assert bench.synced(waiting).error is ErrorCode.FENCED_INSTANCE_ID
    assert bench.group.state is GroupState.PREPARING_REBALANCE


def test_a_restart_while_joining_fences_who_waits(bench: GroupBench) -> None:
    _, waiting = bench.admit(instance_id="red")
    bench.join(join_request(instance_id="red"))
    assert bench.joined(waiting).error is ErrorCode.FENCED_INSTANCE_ID
    bench.advance(3_000)
    assert bench.group.state is GroupState.COMPLETING_REBALANCE


def test_static_ids_are_checked_everywhere(bench: GroupBench) -> None:
    red, _ = _static_pair(bench)
    assert bench.heartbeat(red, 1, "blue") is ErrorCode.UNKNOWN_MEMBER_ID
    assert bench.heartbeat("other", 1, "red") is ErrorCode.FENCED_INSTANCE_ID
    assert bench.check_commit("other", 1, "red") is ErrorCode.FENCED_INSTANCE_ID
    assert bench.joined(bench.join(join_request("other", instance_id="red"))).error is ErrorCode.FENCED_INSTANCE_ID
    assert bench.synced(bench.sync(SyncRequest("other", "red", 1))).error is ErrorCode.FENCED_INSTANCE_ID
    (left,) = bench.leave(LeaveRequest("other", "red"))
    assert left.error is ErrorCode.FENCED_INSTANCE_ID


def test_a_restarted_static_member_has_its_place_in_a_full_group() -> None:
    bench = GroupBench(GroupSettings(max_size=2))
    _static_pair(bench)
    assert bench.joined(bench.join(join_request(instance_id="green"))).error is NONE
    assert bench.joined(bench.join(join_request(instance_id="blue"))).error is ErrorCode.GROUP_MAX_SIZE_REACHED


# Leaving


def test_the_last_member_to_leave_makes_the_group_empty_one_generation_on(bench: GroupBench) -> None:
    (member,) = bench.stabilise()
    (result,) = bench.leave(LeaveRequest(member))
    assert result.error is NONE
    assert (bench.group.state, bench.group.generation) == (GroupState.EMPTY, 2)
    assert bench.log[-1].generation == 2
    assert bench.log[-1].members == ()
    assert bench.log[-1].protocol_type == "consumer"
    assert not bench.timers


def test_several_leave_at_once_and_each_gets_an_answer(bench: GroupBench) -> None:
    red, _ = _static_pair(bench)
    pending = bench.joined(bench.join(join_request())).member_id
    results = bench.leave(
        LeaveRequest(red, "red"), LeaveRequest("", "green"), LeaveRequest(pending), LeaveRequest("ghost"),
        LeaveRequest("", "blue"), LeaveRequest(""),
    )  # fmt: skip
    assert [result.error for result in results] == [
        NONE, NONE, NONE, ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.UNKNOWN_MEMBER_ID,
    ]  # fmt: skip
    assert bench.group.state is GroupState.EMPTY


def test_a_removed_member_that_waits_is_told(bench: GroupBench) -> None:
    (_, _), (green, _) = bench.admit(instance_id="red"), bench.admit(instance_id="green")
    bench.advance(6_000)
    syncing = bench.sync(SyncRequest(green, "green", 1))
    bench.leave(LeaveRequest("", "green"))
    assert bench.synced(syncing).error is ErrorCode.UNKNOWN_MEMBER_ID
    blue, joining = bench.admit(instance_id="blue")
    bench.leave(LeaveRequest(blue, "blue"))
    assert bench.joined(joining).error is ErrorCode.UNKNOWN_MEMBER_ID


def test_leaving_ends_a_join_phase_that_waited_only_for_the_leaver(bench: GroupBench) -> None:
    (leader, follower) = bench.stabilise(2)
    ticket = bench.join(join_request(leader))
    bench.leave(LeaveRequest(follower))
    assert bench.joined(ticket).generation == 2


# Commits


def test_who_may_commit(bench: GroupBench) -> None:
    assert bench.check_commit("", -1) is NONE
    (member,) = bench.stabilise()
    assert bench.check_commit(member, 1) is NONE
    assert bench.check_commit(member, 0) is ErrorCode.ILLEGAL_GENERATION
    assert bench.check_commit(member, -1) is ErrorCode.ILLEGAL_GENERATION
    assert bench.check_commit("", -1) is ErrorCode.UNKNOWN_MEMBER_ID
    assert bench.check_commit("ghost", 1) is ErrorCode.UNKNOWN_MEMBER_ID
    bench.admit()
    assert bench.group.state is GroupState.PREPARING_REBALANCE
    assert bench.check_commit(member, 1) is NONE
    bench.join(join_request(member))
    assert bench.group.state is GroupState.COMPLETING_REBALANCE
    assert bench.check_commit(member, 2) is ErrorCode.REBALANCE_IN_PROGRESS


def test_a_commit_keeps_the_session_alive(bench: GroupBench) -> None:
    (member,) = bench.stabilise()
    for _ in range(5):
        bench.advance(9_000)
        assert bench.check_commit(member, 1) is NONE


# Loading and unloading


def test_a_loaded_group_goes_on_where_it_was(bench: GroupBench) -> None:
    members = bench.stabilise(2)
    loaded = GroupBench(group=ClassicGroup.from_record("g", bench.log[-1]))
    loaded.perform(classic.loaded(loaded.group, loaded.settings, loaded.now_ms))
    assert loaded.group.state is GroupState.STABLE
    assert loaded.group.leader_id == bench.group.leader_id
    assert loaded.group.subscribed_topics == {"orders"}
    assert [loaded.heartbeat(member, 1) for member in members] == [NONE, NONE]
    assert loaded.synced(loaded.sync(SyncRequest(members[1], None, 1))).assignment == assignment_of(members[1], 1)
    loaded.advance(10_000)
    assert loaded.group.state is GroupState.EMPTY


def test_an_unloaded_group_sends_everybody_away(bench: GroupBench) -> None:
    _, joining = bench.admit()
    bench.perform(classic.unload(bench.group, ErrorCode.NOT_COORDINATOR, bench.settings, bench.now_ms))
    assert bench.joined(joining).error is ErrorCode.NOT_COORDINATOR
    assert bench.joined(bench.join(join_request())).error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert bench.heartbeat("x", 1) is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert bench.check_commit("", -1) is ErrorCode.COORDINATOR_NOT_AVAILABLE


def test_unreadable_subscriptions_are_not_known(bench: GroupBench) -> None:
    bench.stabilise(protocols=(Protocol("range", b"\x00\x00\x7f\xff\xff\xff"),))
    assert bench.group.subscribed_topics is None
    assert bench.group.is_subscribed_to("anything")


@pytest.mark.parametrize("cut", range(len(subscription("orders", "users")) - 4))
def test_a_cut_subscription_is_refused(cut: int) -> None:
    from millrace.groups.subscription import subscribed_topics

    assert subscribed_topics(subscription("orders", "users")) == ["orders", "users"]
    assert subscribed_topics(subscription("orders", "users")[:cut]) is None
