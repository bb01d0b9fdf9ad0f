"""Classic members of a KIP-848 group: JoinGroup, SyncGroup, Heartbeat and LeaveGroup in terms of epochs and targets.

So a group can change its protocol while it works. To a classic member the epoch is a generation. Heartbeat tells it to
join again when there is something new for it; JoinGroup reconciles it, with what its subscription says it owns;
SyncGroup gives it what it owns. Nobody waits for anybody: no request is parked. A member that does not join or sync in
time is removed.

Pure, as `protocol` is. Not here: how a group becomes one of the other kind (`migration`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from millrace.errors import ApiError, ErrorCode, ProtocolError
from millrace.groups.classic.effects import (
    NO_MEMBER_ID,
    JoinRequest,
    JoinResult,
    LeaveRequest,
    LeaveResult,
    SyncRequest,
    SyncResult,
)
from millrace.groups.epochs import MemberState
from millrace.groups.modern import migration
from millrace.groups.modern.group import Member, ModernGroup
from millrace.groups.modern.protocol import check_room, check_static, unknown_member
from millrace.groups.modern.records import ClassicInfo, MemberInfo
from millrace.groups.modern.step import (
    Step,
    become_classic,
    bump_epoch,
    fence,
    reconcile_member,
    replace_static,
    update_member,
    update_targets,
)
from millrace.groups.modern.target import OwnedNow
from millrace.groups.subscription import CONSUMER_PROTOCOL_TYPE, read_subscription
from millrace.groups.timers import StartTimer, TimerKey, TimerKind

_REFUSED: Final = ErrorCode.INCONSISTENT_GROUP_PROTOCOL


def join(step: Step, request: JoinRequest) -> JoinResult:
    """JoinGroup of a classic member to a group that has members; answered at once."""
    group, settings = step.group, step.env.settings
    if not settings.may_mix:
        raise ApiError(_REFUSED, f"group {group.group_id} cannot have classic members: migration is disabled")
    is_unknown = request.member_id == NO_MEMBER_ID
    member_id = request.new_member_id if is_unknown else request.member_id
    check_room(step, member_id, request.instance_id)
    names = {protocol.name for protocol in request.protocols}
    if request.protocol_type != CONSUMER_PROTOCOL_TYPE or not group.supports_protocols(names):
        raise ApiError(_REFUSED, f"the protocols of member {member_id} do not fit the group")
    if is_unknown and request.instance_id is None and request.requires_member_id:
        return JoinResult(ErrorCode.MEMBER_ID_REQUIRED, member_id)
    info, owned_now = _said(step, request)
    old = _known_member(step, request, member_id, is_unknown=is_unknown)
    rack_id = info.rack_id or (old.info.rack_id if old is not None else None)
    has_changed = update_member(step, member_id, replace(info, rack_id=rack_id))
    bump_epoch(step, has_changed=has_changed)
    update_targets(step)
    member = reconcile_member(step, member_id, owned_now, subscription_changed=has_changed)
    if old is not None and not old.is_classic and migration.can_downgrade(group, (), settings):
        # A static member that came back as a classic one was the last of the new protocol.
        become_classic(step, ())
    else:
        step.cancel_timer(TimerKind.REBALANCE, member_id)
        step.cancel_timer(TimerKind.JOIN, member_id)
        step.set_timer(TimerKind.SYNC, member_id, request.rebalance_timeout_ms)
        step.renew_session(member)
    return JoinResult(
        ErrorCode.NONE,
        member_id,
        generation=member.held.epoch,
        protocol_type=CONSUMER_PROTOCOL_TYPE,
        protocol_name=request.protocols[0].name,
    )


def _said(step: Step, request: JoinRequest) -> tuple[MemberInfo, OwnedNow]:
    try:
        subscription = read_subscription(request.protocols[0].metadata)
    except ProtocolError as error:
        raise ApiError(_REFUSED, f"the subscription cannot be read: {error}") from error
    info = MemberInfo(
        instance_id=request.instance_id,
        rack_id=subscription.rack_id or None,
        client_id=request.client_id,
        client_host=request.client_host,
        topics=tuple(sorted(set(subscription.topics))),
        rebalance_timeout_ms=request.rebalance_timeout_ms,
        classic=ClassicInfo(request.session_timeout_ms, request.protocols),
    )
    owned = []
    for each in subscription.owned_partitions:
        topic = step.env.image.topics.get(each.topic)
        if topic is not None:
            owned.append((topic.topic_id, tuple(each.partitions)))
    return info, owned


def _known_member(step: Step, request: JoinRequest, member_id: str, *, is_unknown: bool) -> Member | None:
    """Who joins, before this; None where it is somebody new."""
    group = step.group
    if request.instance_id is None:
        return group.members.get(member_id)
    known = group.static_member(request.instance_id)
    if not is_unknown:
        check_static(known, member_id, request.instance_id)
        return known
    if known is not None:
        replace_static(step, known, member_id)
    return known


def sync(step: Step, request: SyncRequest) -> SyncResult:
    """SyncGroup: what the member owns now."""
    group = step.group
    member, classic = _classic_member(group, request.member_id, request.instance_id)
    _check_generation(member, request.generation)
    name = classic.protocols[0].name
    if request.protocol_type not in (None, CONSUMER_PROTOCOL_TYPE) or request.protocol_name not in (None, name):
        raise ApiError(_REFUSED, f"member {member.member_id} joined with another protocol")
    if group.target_epoch.epoch > member.held.epoch and member.held.state is not MemberState.UNREVOKED_PARTITIONS:
        _ask_to_join(step, member)
        return SyncResult(ErrorCode.REBALANCE_IN_PROGRESS)
    step.cancel_timer(TimerKind.SYNC, member.member_id)
    step.renew_session(member)
    assigned = {topic_id: sorted(own) for topic_id, own in member.held.assigned.items()}
    assignment = migration.assignment_bytes(assigned, classic.protocols[0].metadata, step.env.image)
    return SyncResult(ErrorCode.NONE, request.protocol_type, request.protocol_name, assignment)


def heartbeat(step: Step, member_id: str, instance_id: str | None, generation: int) -> ErrorCode:
    """Heartbeat: REBALANCE_IN_PROGRESS where joining again would bring the member further."""
    group = step.group
    member, _ = _classic_member(group, member_id, instance_id)
    _check_generation(member, generation)
    step.renew_session(member)
    bump_epoch(step, has_changed=False)
    update_targets(step)
    state = member.held.state
    if (
        member.held.epoch < group.target_epoch.epoch
        or state is MemberState.UNREVOKED_PARTITIONS
        or (state is MemberState.UNRELEASED_PARTITIONS and not group.waits_for_others(member))
    ):
        _ask_to_join(step, member)
        return ErrorCode.REBALANCE_IN_PROGRESS
    return ErrorCode.NONE


def leave(step: Step, requests: Sequence[LeaveRequest]) -> list[LeaveResult]:
    """LeaveGroup, of any number of members, by whatever protocol they are in the group."""
    group = step.group
    results, leaving = [], dict[str, None]()
    for request in requests:
        error = ErrorCode.NONE
        if request.instance_id is None:
            member = group.members.get(request.member_id)
        else:
            member = group.static_member(request.instance_id)
            if member is not None and request.member_id not in (NO_MEMBER_ID, member.member_id):
                error = ErrorCode.FENCED_INSTANCE_ID
        if member is None:
            error = ErrorCode.UNKNOWN_MEMBER_ID
        elif error is ErrorCode.NONE:
            leaving[member.member_id] = None
        results.append(LeaveResult(request.member_id, request.instance_id, error))
    fence(step, leaving)
    return results


def _ask_to_join(step: Step, member: Member) -> None:
    step.timers.append(StartTimer(TimerKey(TimerKind.JOIN, member.member_id), member.info.rebalance_timeout_ms))


def _classic_member(group: ModernGroup, member_id: str, instance_id: str | None) -> tuple[Member, ClassicInfo]:
    if instance_id is None:
        member = group.members.get(member_id)
    else:
        member = group.static_member(instance_id)
        check_static(member, member_id, instance_id)
    if member is None or member.info.classic is None:
        raise unknown_member(group, member_id)
    return member, member.info.classic


def _check_generation(member: Member, generation: int) -> None:
    if generation != member.held.epoch:
        raise ApiError(
            ErrorCode.ILLEGAL_GENERATION,
            f"member {member.member_id} is in generation {member.held.epoch}, not in {generation}",
        )
