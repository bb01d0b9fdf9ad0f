"""The rebalance of a classic group: the join phase, the sync phase, and what happens when each ends.

Pure: a `Step` carries the group, the settings and the time; functions change the group and append effects. Not here:
what requests and timers mean (`protocol`). A rebalance goes

    prepare -> [join timer or everybody joined] -> complete_join -> [leader's SyncGroup] -> stored -> Stable

and a group without members ends in Empty, one generation further, with that written to the log.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from millrace.errors import ErrorCode
from millrace.groups.classic.effects import (
    NO_LEADER,
    NO_MEMBER_ID,
    AnswerJoin,
    AnswerSync,
    Effect,
    JoinResult,
    Store,
    SyncResult,
)
from millrace.groups.classic.group import (
    ClassicGroup,
    GroupState,
    InitialDelay,
    Member,
    PendingAssignment,
    PendingReplacement,
)
from millrace.groups.settings import GroupSettings
from millrace.groups.timers import CancelTimer, SetTimer, TimerKey, TimerKind

JOIN_TIMER: Final = TimerKey(TimerKind.JOIN)
SYNC_TIMER: Final = TimerKey(TimerKind.SYNC)

# A join phase that nobody joined starts over; with a rebalance timeout of zero it would do so without a pause.
_MIN_REJOIN_WAIT_MS: Final = 1_000


def session_timer(member_id: str) -> TimerKey:
    """The timer that a member's heartbeats push ahead."""
    return TimerKey(TimerKind.SESSION, member_id)


def session_renewal(member: Member) -> SetTimer:
    """A full session from now on."""
    return SetTimer(session_timer(member.member_id), member.session_timeout_ms)


@dataclass(slots=True)
class Step:
    """One event of one group: what is known, and the effects so far."""

    group: ClassicGroup
    settings: GroupSettings
    now_ms: int
    effects: list[Effect] = field(default_factory=list)

    def set_timer(self, key: TimerKey, delay_ms: int) -> None:
        self.effects.append(SetTimer(key, max(delay_ms, 0)))

    def cancel_timer(self, key: TimerKey) -> None:
        self.effects.append(CancelTimer(key))

    def renew_session(self, member: Member) -> None:
        self.effects.append(session_renewal(member))

    def answer_join(self, ticket: int | None, result: JoinResult) -> None:
        if ticket is not None:
            self.effects.append(AnswerJoin(ticket, result))

    def answer_sync(self, ticket: int | None, result: SyncResult) -> None:
        if ticket is not None:
            self.effects.append(AnswerSync(ticket, result))


def current_generation(group: ClassicGroup, member_id: str, *, with_members: bool) -> JoinResult:
    """The answer that lets a member into the current generation; only the leader needs to see the others."""
    return JoinResult(
        ErrorCode.NONE,
        member_id,
        generation=group.generation,
        protocol_type=group.protocol_type,
        protocol_name=group.protocol_name,
        leader=group.leader_id or NO_LEADER,
        members=group.joined_members() if with_members else (),
    )


def park_join(step: Step, member: Member, ticket: int) -> None:
    """Hold a member's JoinGroup until the phase ends; an older one of the same member is told to look again."""
    replaced = step.group.park_join(member, ticket)
    step.answer_join(replaced, JoinResult(ErrorCode.REBALANCE_IN_PROGRESS, member.member_id))


def drop_member(step: Step, member_id: str) -> None:
    """Remove a member. Whoever still waits under that id is told so and may join again as somebody new."""
    group = step.group
    member = group.members.get(member_id)
    if member is not None:
        step.answer_join(group.take_join(member), JoinResult(ErrorCode.UNKNOWN_MEMBER_ID, NO_MEMBER_ID))
        step.answer_sync(group.take_sync(member), SyncResult(ErrorCode.UNKNOWN_MEMBER_ID))
    group.remove_member(member_id)
    step.cancel_timer(session_timer(member_id))


def rebalance_or_complete(step: Step) -> None:
    """Begin a rebalance, or, where one is in its join phase, see whether it can end."""
    if step.group.can_rebalance:
        prepare(step)
    else:
        maybe_complete_join(step)


def prepare(step: Step) -> None:
    """Enter the join phase. The first one of an empty group waits a while, so that members come in together."""
    group = step.group
    if group.state is GroupState.COMPLETING_REBALANCE:
        _reset_assignments(step, ErrorCode.REBALANCE_IN_PROGRESS)
    group.pending_sync.clear()
    step.cancel_timer(SYNC_TIMER)

    was_empty = group.state is GroupState.EMPTY
    group.move_to(GroupState.PREPARING_REBALANCE, step.now_ms)
    if was_empty:
        delay_ms = step.settings.initial_rebalance_delay_ms
        group.initial_delay = InitialDelay(delay_ms, max(group.rebalance_timeout_ms - delay_ms, 0))
        step.set_timer(JOIN_TIMER, delay_ms)
    elif group.has_all_members_joined:
        complete_join(step)
    else:
        step.set_timer(JOIN_TIMER, group.rebalance_timeout_ms)


def maybe_complete_join(step: Step) -> None:
    """End the join phase early where everybody is here; the initial delay is always sat out."""
    group = step.group
    if (
        group.state is GroupState.PREPARING_REBALANCE
        and group.previous_state is not GroupState.EMPTY
        and group.has_all_members_joined
    ):
        complete_join(step)


def join_timer_fired(step: Step) -> None:
    """The join phase has lasted long enough, unless newcomers extend the initial delay."""
    group = step.group
    if group.state is not GroupState.PREPARING_REBALANCE:
        return
    initial = group.initial_delay
    if initial is not None and group.new_member_added and initial.remaining_ms:
        group.new_member_added = False
        delay_ms = min(step.settings.initial_rebalance_delay_ms, initial.remaining_ms)
        group.initial_delay = InitialDelay(delay_ms, max(initial.remaining_ms - initial.delay_ms, 0))
        step.set_timer(JOIN_TIMER, delay_ms)
    else:
        complete_join(step)


def complete_join(step: Step) -> None:
    """End the join phase: late dynamic members go, static ones stay, the rest become the next generation."""
    group = step.group
    step.cancel_timer(JOIN_TIMER)
    late = [each.member_id for each in group.members.values() if each.join_ticket is None and not each.is_static]
    for member_id in late:
        drop_member(step, member_id)

    if not group.elect_joined_leader() and group.members:
        # Only static members are left and none of them came: wait for them, or for their sessions to run out.
        step.set_timer(JOIN_TIMER, max(group.rebalance_timeout_ms, _MIN_REJOIN_WAIT_MS))
        return

    group.begin_generation(step.now_ms)
    if group.state is GroupState.EMPTY:
        step.effects.append(Store(group.to_record({}), None))
        return
    for member in group.members.values():
        is_leader = member.member_id == group.leader_id
        step.answer_join(
            group.take_join(member),
            current_generation(group, member.member_id, with_members=is_leader),
        )
        step.renew_session(member)
        member.is_new = False
        group.pending_sync.add(member.member_id)
    step.set_timer(SYNC_TIMER, group.rebalance_timeout_ms)


def sync_timer_fired(step: Step) -> None:
    """Members that did not ask for their assignment in time hold it without using it: rebalance without them."""
    group = step.group
    if group.state not in {GroupState.COMPLETING_REBALANCE, GroupState.STABLE} or not group.pending_sync:
        return
    for member_id in list(group.pending_sync):
        drop_member(step, member_id)
    prepare(step)


def store_assignment(step: Step, assignments: dict[str, bytes]) -> None:
    """Send the leader's assignment to the log; members learn it when it is durable."""
    group = step.group
    known = {member_id: assignments.get(member_id, b"") for member_id in group.members}
    token = group.new_token(PendingAssignment(group.generation, known))
    step.effects.append(Store(group.to_record(known), token))


def is_storing_assignment(group: ClassicGroup) -> bool:
    """Whether this generation's assignment is on its way: a second one must not overtake it in the log."""
    return any(
        isinstance(pending, PendingAssignment) and pending.generation == group.generation
        for pending in group.pending_stores.values()
    )


def assignment_stored(step: Step, pending: PendingAssignment, error: ErrorCode) -> None:
    """The leader's assignment is durable, or could not be written; stale news of an older generation is ignored."""
    group = step.group
    if group.state is not GroupState.COMPLETING_REBALANCE or pending.generation != group.generation:
        return
    if error is not ErrorCode.NONE:
        _reset_assignments(step, error)
        rebalance_or_complete(step)
        return
    for member in group.members.values():
        member.assignment = pending.assignments.get(member.member_id, b"")
    _propagate(step, ErrorCode.NONE)
    group.move_to(GroupState.STABLE, step.now_ms)


def replacement_stored(step: Step, pending: PendingReplacement, error: ErrorCode) -> None:
    """A static member's new id is durable, or could not be written and is taken back."""
    group = step.group
    member = group.members.get(pending.new_member_id)
    if member is None or member.join_ticket != pending.ticket or group.state is not GroupState.STABLE:
        # A rebalance began meanwhile: its end answers, and writes the group again.
        return
    ticket = group.take_join(member)
    if error is not ErrorCode.NONE:
        assert member.instance_id is not None
        step.answer_join(ticket, JoinResult(error, NO_MEMBER_ID))
        step.cancel_timer(session_timer(pending.new_member_id))
        group.update_protocols(member, pending.old_protocols)
        member.session_timeout_ms = pending.old_session_timeout_ms
        member.rebalance_timeout_ms = pending.old_rebalance_timeout_ms
        group.rename_static_member(member.instance_id, pending.new_member_id, pending.old_member_id)
        step.renew_session(member)
        return
    is_leader = group.leader_id == member.member_id
    result = current_generation(group, member.member_id, with_members=is_leader and pending.may_skip_assignment)
    if pending.may_skip_assignment:
        result = replace(result, skip_assignment=is_leader)
    else:
        # An older client that hears it is the leader would compute a new assignment, which nobody waits for: it is
        # told the id that the leader had before.
        result = replace(result, leader=pending.old_leader)
    step.answer_join(ticket, result)
    step.renew_session(member)


def _reset_assignments(step: Step, error: ErrorCode) -> None:
    for member in step.group.members.values():
        member.assignment = b""
    _propagate(step, error)


def _propagate(step: Step, error: ErrorCode) -> None:
    group = step.group
    for member in group.members.values():
        ticket = group.take_sync(member)
        if ticket is None:
            continue
        if error is ErrorCode.NONE:
            result = SyncResult(error, group.protocol_type, group.protocol_name, member.assignment)
        else:
            result = SyncResult(error)
        step.answer_sync(ticket, result)
        # The session may have run out while we kept the member waiting, which was excused: it starts anew.
        step.renew_session(member)
