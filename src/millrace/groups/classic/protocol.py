"""The classic group protocol: what each request and each timer means in each state.

Pure: every function takes the group, what happened, the settings and the time, changes the group and returns effects
for its owner to perform. It never awaits and reads no clock. Not here: the phases of a rebalance (`rebalance`), the
group's bookkeeping (`group`), offsets (`offsets`), and everything that waits (`groups`). Eager and
cooperative rebalancing differ only in the clients.

The rules are those of Kafka 4.3. They differ where Kafka lets a parked request wait for ever: a SyncGroup of a member
that is removed, and a JoinGroup or SyncGroup that its own member has repeated, are answered here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from millrace.errors import ErrorCode
from millrace.groups.classic.effects import (
    NO_LEADER,
    NO_MEMBER_ID,
    Effect,
    JoinRequest,
    JoinResult,
    LeaveRequest,
    LeaveResult,
    Protocol,
    Store,
    StoredGroup,
    SyncRequest,
    SyncResult,
)
from millrace.groups.classic.group import ClassicGroup, GroupState, Member, PendingAssignment, PendingReplacement
from millrace.groups.classic.rebalance import (
    SYNC_TIMER,
    Step,
    assignment_stored,
    complete_join,
    current_generation,
    drop_member,
    is_storing_assignment,
    join_timer_fired,
    maybe_complete_join,
    park_join,
    prepare,
    rebalance_or_complete,
    replacement_stored,
    session_renewal,
    session_timer,
    store_assignment,
    sync_timer_fired,
)
from millrace.groups.offsets.committed import Slot, TopicOffsets
from millrace.groups.offsets.expiry import expired
from millrace.groups.settings import GroupSettings
from millrace.groups.timers import TimerKey, TimerKind
from millrace.model import NO_TIMESTAMP

_WITH_MEMBERS = frozenset(
    {GroupState.PREPARING_REBALANCE, GroupState.COMPLETING_REBALANCE, GroupState.STABLE},
)


def join(group: ClassicGroup, request: JoinRequest, ticket: int, settings: GroupSettings, now_ms: int) -> list[Effect]:
    """JoinGroup. It is answered in these effects or parked under `ticket`; the session timeout is checked before."""
    step = Step(group, settings, now_ms)
    request = replace(request, protocols=_without_duplicates(request.protocols))
    error = _refusal(step, request)
    if error is ErrorCode.GROUP_MAX_SIZE_REACHED:
        if request.member_id in group.members or request.member_id in group.pending_join:
            drop_member(step, request.member_id)
            maybe_complete_join(step)
        step.answer_join(ticket, JoinResult(error, NO_MEMBER_ID))
    elif error is not ErrorCode.NONE:
        step.answer_join(ticket, JoinResult(error, request.member_id))
    elif request.member_id != NO_MEMBER_ID:
        _join_known(step, request, ticket)
    elif request.instance_id is not None:
        _join_new_static(step, request, ticket)
    elif request.requires_member_id:
        _hand_out_member_id(step, request, ticket)
    else:
        _admit(step, request, request.new_member_id, ticket)
    return step.effects


def create(group: ClassicGroup, now_ms: int) -> list[Effect]:
    """A first JoinGroup has been let in: an empty record makes the group known to a later coordinator."""
    group.state_timestamp_ms = now_ms
    return [Store(StoredGroup("", 0, None, None, now_ms), None)]


def sync(group: ClassicGroup, request: SyncRequest, ticket: int, settings: GroupSettings, now_ms: int) -> list[Effect]:
    """SyncGroup. Followers wait for the leader's; the leader's waits for the log."""
    step = Step(group, settings, now_ms)
    error = _sync_error(group, request)
    if error is not ErrorCode.NONE:
        step.answer_sync(ticket, SyncResult(error))
        return step.effects
    member = group.members[request.member_id]
    group.pending_sync.discard(member.member_id)
    if not group.pending_sync:
        step.cancel_timer(SYNC_TIMER)
    if group.state is GroupState.STABLE:
        result = SyncResult(ErrorCode.NONE, group.protocol_type, group.protocol_name, member.assignment)
        step.answer_sync(ticket, result)
        step.renew_session(member)
        return step.effects
    step.answer_sync(group.take_sync(member), SyncResult(ErrorCode.REBALANCE_IN_PROGRESS))
    member.sync_ticket = ticket
    if group.leader_id == member.member_id and not is_storing_assignment(group):
        store_assignment(step, dict(request.assignments))
    return step.effects


def heartbeat(
    group: ClassicGroup, member_id: str, instance_id: str | None, generation: int
) -> tuple[ErrorCode, list[Effect]]:
    """Heartbeat. During the join phase it still keeps the session alive, and tells the member to join again."""
    error = _member_error(group, member_id, instance_id, generation)
    if error is not ErrorCode.NONE:
        return error, []
    if group.state is GroupState.PREPARING_REBALANCE:
        error = ErrorCode.REBALANCE_IN_PROGRESS
    return error, [session_renewal(group.members[member_id])]


def leave(
    group: ClassicGroup, requests: Sequence[LeaveRequest], settings: GroupSettings, now_ms: int
) -> tuple[list[LeaveResult], list[Effect]]:
    """LeaveGroup, of any number of members; one rebalance follows for all of them."""
    step = Step(group, settings, now_ms)
    results = []
    for request in requests:
        error = ErrorCode.NONE
        member_id = request.member_id
        if member_id == NO_MEMBER_ID:
            member_id = group.static_members.get(request.instance_id or "", NO_MEMBER_ID)
            if member_id == NO_MEMBER_ID:
                error = ErrorCode.UNKNOWN_MEMBER_ID
        elif member_id not in group.pending_join:
            error = group.check_member(member_id, request.instance_id)
        if error is ErrorCode.NONE:
            drop_member(step, member_id)
        results.append(LeaveResult(request.member_id, request.instance_id, error))
    if any(result.error is ErrorCode.NONE for result in results) and group.state in _WITH_MEMBERS:
        if group.state in {GroupState.STABLE, GroupState.COMPLETING_REBALANCE}:
            prepare(step)
        else:
            maybe_complete_join(step)
    return results, step.effects


def check_commit(
    group: ClassicGroup, member_id: str, instance_id: str | None, generation: int
) -> tuple[ErrorCode, list[Effect]]:
    """Whether these ids may commit offsets; a member that does is alive.

    A generation of -1 comes from tools and from consumers that assign themselves: it may commit while nobody is in
    the group.
    """
    if group.state is GroupState.DEAD:
        return ErrorCode.COORDINATOR_NOT_AVAILABLE, []
    if generation < 0 and group.state is GroupState.EMPTY:
        return ErrorCode.NONE, []
    if generation < 0 and member_id == NO_MEMBER_ID and instance_id is None:
        return ErrorCode.UNKNOWN_MEMBER_ID, []
    error = _member_error(group, member_id, instance_id, generation)
    if error is not ErrorCode.NONE:
        return error, []
    if group.state is GroupState.COMPLETING_REBALANCE:
        return ErrorCode.REBALANCE_IN_PROGRESS, []
    return ErrorCode.NONE, [session_renewal(group.members[member_id])]


def expired_offsets(group: ClassicGroup, held: TopicOffsets, now_ms: int, retention_ms: int) -> list[Slot]:
    """Which of the group's offsets have outlived their retention.

    A group with members keeps the offsets of the topics they subscribe to; what it no longer subscribes to expires by
    its commit. An empty group's offsets expire together, counted from when it became empty; those of a simple group
    (which never had members) by their commit.
    """
    is_simple = group.protocol_type is None
    is_empty = group.state is GroupState.EMPTY
    knows_topics = group.subscribed_topics is not None and group.uses_consumer_protocol
    if not (is_simple or is_empty or (group.state is GroupState.STABLE and knows_topics)):
        return []
    since_empty = is_empty and not is_simple and group.state_timestamp_ms != NO_TIMESTAMP
    since_ms = group.state_timestamp_ms if since_empty else None
    return expired(group.is_subscribed_to, held, now_ms, retention_ms, since_ms=since_ms)


def timer_fired(group: ClassicGroup, key: TimerKey, settings: GroupSettings, now_ms: int) -> list[Effect]:
    """A timer of the group is due."""
    step = Step(group, settings, now_ms)
    if group.state is GroupState.DEAD:
        return step.effects
    match key.kind:
        case TimerKind.JOIN:
            join_timer_fired(step)
        case TimerKind.SYNC:
            sync_timer_fired(step)
        case TimerKind.SESSION:
            _session_expired(step, key.member_id)
    return step.effects


def stored(group: ClassicGroup, token: int, error: ErrorCode, settings: GroupSettings, now_ms: int) -> list[Effect]:
    """A record that `Store` asked for is durable (NONE), or its write failed."""
    step = Step(group, settings, now_ms)
    pending = group.pending_stores.pop(token, None)
    if group.state is GroupState.DEAD:
        return step.effects
    match pending:
        case PendingAssignment():
            assignment_stored(step, pending, error)
        case PendingReplacement():
            replacement_stored(step, pending, error)
    return step.effects


def loaded(group: ClassicGroup, settings: GroupSettings, now_ms: int) -> list[Effect]:
    """The group was read from the log: its members get a full session to show themselves in."""
    step = Step(group, settings, now_ms)
    for member in group.members.values():
        step.renew_session(member)
    if len(group.members) > settings.max_size:
        # group.max.size was lowered: members get the chance to commit before some of them are turned away.
        prepare(step)
    return step.effects


def took_over(group: ClassicGroup, settings: GroupSettings, now_ms: int) -> list[Effect]:
    """The group was a consumer group of KIP-848 until now: its members are told to join, one after the other."""
    step = Step(group, settings, now_ms)
    for member in group.members.values():
        step.renew_session(member)
    prepare(step)
    return step.effects


def unload(group: ClassicGroup, error: ErrorCode, settings: GroupSettings, now_ms: int) -> list[Effect]:
    """The group is no longer ours (or is being deleted): everybody who waits is sent away; timers are the owner's."""
    step = Step(group, settings, now_ms)
    for member in group.members.values():
        step.answer_join(group.take_join(member), JoinResult(error, member.member_id))
        step.answer_sync(group.take_sync(member), SyncResult(error))
    group.move_to(GroupState.DEAD, now_ms)
    return step.effects


def _refusal(step: Step, request: JoinRequest) -> ErrorCode:
    """Why a JoinGroup cannot be let in at all; NONE where it can."""
    group, settings = step.group, step.settings
    if group.state is GroupState.DEAD:
        return ErrorCode.COORDINATOR_NOT_AVAILABLE
    member = group.members.get(request.member_id)
    is_full = False
    if group.state is GroupState.PREPARING_REBALANCE:
        # Those who already wait stay. Counting the waiting ones, not all members, is what turns away the last to
        # rejoin where the group is over its size.
        is_waiting = member is not None and member.join_ticket is not None
        is_full = not is_waiting and group.awaiting_join >= settings.max_size
    elif group.state is not GroupState.EMPTY:
        # A restarted static member has no member id yet, but takes its own place.
        has_place = member is not None or request.instance_id in group.static_members
        is_full = not has_place and len(group.members) >= settings.max_size
    if is_full:
        return ErrorCode.GROUP_MAX_SIZE_REACHED
    if not group.supports(request.protocol_type, request.protocols):
        return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    return ErrorCode.NONE


def _hand_out_member_id(step: Step, request: JoinRequest, ticket: int) -> None:
    group = step.group
    if len(group.pending_join) >= step.settings.max_pending_members:
        step.answer_join(ticket, JoinResult(ErrorCode.GROUP_MAX_SIZE_REACHED, NO_MEMBER_ID))
        return
    group.pending_join.add(request.new_member_id)
    step.set_timer(session_timer(request.new_member_id), request.session_timeout_ms)
    step.answer_join(ticket, JoinResult(ErrorCode.MEMBER_ID_REQUIRED, request.new_member_id))


def _admit(step: Step, request: JoinRequest, member_id: str, ticket: int) -> None:
    """A new member; it waits for the next generation."""
    group = step.group
    if group.state is GroupState.PREPARING_REBALANCE and group.previous_state is GroupState.EMPTY:
        group.new_member_added = True
    member = Member(
        member_id=member_id,
        instance_id=request.instance_id,
        client_id=request.client_id,
        client_host=request.client_host,
        session_timeout_ms=request.session_timeout_ms,
        rebalance_timeout_ms=request.rebalance_timeout_ms,
        protocols=request.protocols,
        is_new=True,
        join_ticket=ticket,
    )
    group.add_member(member, request.protocol_type)
    step.set_timer(session_timer(member_id), step.settings.new_member_join_timeout_ms)
    rebalance_or_complete(step)


def _join_known(step: Step, request: JoinRequest, ticket: int) -> None:
    """A JoinGroup with a member id: of a pending member, or again of a member."""
    group = step.group
    member_id = request.member_id
    if member_id in group.pending_join and request.instance_id is None:
        _admit(step, request, member_id, ticket)
        return
    error = group.check_member(member_id, request.instance_id)
    if error is not ErrorCode.NONE:
        step.answer_join(ticket, JoinResult(error, member_id))
        return
    member = group.members[member_id]
    is_leader = group.leader_id == member_id
    is_unchanged = request.protocols == member.protocols
    if group.state is GroupState.COMPLETING_REBALANCE and is_unchanged:
        # The answer to the first JoinGroup was lost: it is given again. Who asks is alive.
        step.renew_session(member)
        step.answer_join(ticket, current_generation(group, member_id, with_members=is_leader))
    elif group.state is GroupState.STABLE and is_unchanged and not is_leader:
        # Nothing has changed for anybody. A leader that joins again wants a rebalance, for reasons of its own
        # (the partitions of a topic, say).
        step.renew_session(member)
        step.answer_join(ticket, current_generation(group, member_id, with_members=False))
    else:
        _update(step, member, request, ticket)
        rebalance_or_complete(step)


def _join_new_static(step: Step, request: JoinRequest, ticket: int) -> None:
    """A static member without a member id: new, or restarted."""
    group = step.group
    assert request.instance_id is not None
    old_member_id = group.static_members.get(request.instance_id)
    if old_member_id is None:
        _admit(step, request, request.new_member_id, ticket)
    else:
        _replace_static(step, request, old_member_id, ticket)


def _replace_static(step: Step, request: JoinRequest, old_member_id: str, ticket: int) -> None:
    """A restarted static member takes over from its former self, which is fenced from here on."""
    group = step.group
    assert request.instance_id is not None
    member = group.members[old_member_id]
    fenced = JoinResult(ErrorCode.FENCED_INSTANCE_ID, old_member_id)
    step.answer_join(group.take_join(member), fenced)
    step.answer_sync(group.take_sync(member), SyncResult(ErrorCode.FENCED_INSTANCE_ID))
    step.cancel_timer(session_timer(old_member_id))

    pending = PendingReplacement(
        generation=group.generation,
        ticket=ticket,
        old_member_id=old_member_id,
        new_member_id=request.new_member_id,
        old_leader=group.leader_id or NO_LEADER,
        old_protocols=member.protocols,
        old_session_timeout_ms=member.session_timeout_ms,
        old_rebalance_timeout_ms=member.rebalance_timeout_ms,
        may_skip_assignment=request.may_skip_assignment,
    )
    group.rename_static_member(request.instance_id, old_member_id, request.new_member_id)
    # Its instance id holds the place, so that repeated joins do not pile up: waiting excuses it from the start.
    member.is_new = False
    member.client_id = request.client_id
    member.client_host = request.client_host
    _update(step, member, request, ticket)
    step.renew_session(member)

    if group.state is GroupState.STABLE and group.select_protocol() == group.protocol_name:
        # Nothing changes for the others: the new id is written down and the member goes on with its assignment.
        assignments = {each.member_id: each.assignment for each in group.members.values()}
        step.effects.append(Store(group.to_record(assignments), group.new_token(pending)))
    elif group.state is GroupState.COMPLETING_REBALANCE:
        # The leader may be assigning partitions to the old id this moment.
        prepare(step)
    else:
        rebalance_or_complete(step)


def _update(step: Step, member: Member, request: JoinRequest, ticket: int) -> None:
    step.group.update_protocols(member, request.protocols)
    member.session_timeout_ms = request.session_timeout_ms
    member.rebalance_timeout_ms = request.rebalance_timeout_ms
    park_join(step, member, ticket)


def _session_expired(step: Step, member_id: str) -> None:
    group = step.group
    member = group.members.get(member_id)
    if member is None and member_id not in group.pending_join:
        return
    if member is not None and member.is_excused:
        return
    was_member = member is not None
    drop_member(step, member_id)
    if was_member and group.state in {GroupState.STABLE, GroupState.COMPLETING_REBALANCE}:
        prepare(step)
    elif group.state is GroupState.PREPARING_REBALANCE and group.has_all_members_joined:
        complete_join(step)


def _member_error(group: ClassicGroup, member_id: str, instance_id: str | None, generation: int) -> ErrorCode:
    if group.state is GroupState.DEAD:
        return ErrorCode.COORDINATOR_NOT_AVAILABLE
    error = group.check_member(member_id, instance_id)
    if error is ErrorCode.NONE and generation != group.generation:
        error = ErrorCode.ILLEGAL_GENERATION
    return error


def _sync_error(group: ClassicGroup, request: SyncRequest) -> ErrorCode:
    error = _member_error(group, request.member_id, request.instance_id, request.generation)
    if error is not ErrorCode.NONE:
        return error
    for asked, chosen in (
        (request.protocol_type, group.protocol_type),
        (request.protocol_name, group.protocol_name),
    ):
        if asked is not None and chosen is not None and asked != chosen:
            return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    if group.state is GroupState.PREPARING_REBALANCE:
        return ErrorCode.REBALANCE_IN_PROGRESS
    return ErrorCode.NONE


def _without_duplicates(protocols: tuple[Protocol, ...]) -> tuple[Protocol, ...]:
    """A protocol named twice would vote twice."""
    first: dict[str, Protocol] = {}
    for protocol in protocols:
        first.setdefault(protocol.name, protocol)
    return tuple(first.values())
