"""The consumer group protocol of KIP-848: what a heartbeat, a departure and a timer mean.

Pure: every function takes a step, which has the group and what is known, changes the group record by record and
returns the answer, or raises the ApiError that the client gets. It never awaits and reads no clock. The broker assigns
partitions; a member hears in its heartbeats what to give up and what it got. Everybody else goes on meanwhile.

The rules are those of Kafka 4.3. They differ in three points. A pattern is matched when it comes, not later. A member
that waits for partitions is asked to come back soon, not after a whole heartbeat interval. And a member is told its
assignment until it says that it has it: librdkafka does not ask again when an answer did not come in time.

Not here: classic members (`classic_members`), what all events share (`step`), what a member owns (`target`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final
from uuid import UUID

from millrace.errors import ApiError, ErrorCode
from millrace.groups.classic.effects import NO_MEMBER_ID
from millrace.groups.environment import JOINING, LEAVING, HeartbeatResult
from millrace.groups.epochs import MemberState
from millrace.groups.modern.group import LEFT_FOR_NOW, Member, ModernGroup
from millrace.groups.modern.records import NOTHING, HeldRecord, MemberInfo, Owned
from millrace.groups.modern.step import (
    Step,
    bump_epoch,
    fence,
    match_by_new_rules,
    reconcile_member,
    replace_static,
    update_member,
    update_targets,
)
from millrace.groups.modern.target import OwnedNow, flatten, is_within
from millrace.groups.offsets.committed import PartitionCheck, accept
from millrace.groups.timers import TimerKey, TimerKind

_WAITING_INTERVAL_MS: Final = 1_000
"""When a member whose partitions are on their way is asked to come back."""


def _anything(_name: str) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class ModernHeartbeat:
    """A ConsumerGroupHeartbeat; None: as before."""

    member_id: str
    epoch: int
    instance_id: str | None = None
    rack_id: str | None = None
    rebalance_timeout_ms: int = -1
    topics: tuple[str, ...] | None = None
    pattern: str | None = None
    assignor: str | None = None
    owned: OwnedNow | None = None
    client_id: str = ""
    client_host: str = ""
    needs_member_id: bool = True
    """v1+: members choose their ids themselves."""
    may_know: Callable[[str], bool] = _anything
    """Of which topics the member may know that they exist."""
    rules: object = None
    """The rules of access that say so; None: there are none that change."""

    @property
    def is_leaving(self) -> bool:
        return self.epoch in (LEAVING, LEFT_FOR_NOW)

    @property
    def is_full(self) -> bool:
        """Whether the member says everything, as it does when it is not sure of what was heard."""
        has_subscription = self.topics is not None or self.pattern is not None
        return self.rebalance_timeout_ms != -1 and has_subscription and self.owned is not None


def check_request(request: ModernHeartbeat, assignors: tuple[str, ...]) -> None:
    """ApiError where a heartbeat is not well-formed."""
    wrong = _malformed(request)
    if wrong is not None:
        raise ApiError(ErrorCode.INVALID_REQUEST, wrong)
    if request.assignor is not None and request.assignor not in assignors:
        raise ApiError(
            ErrorCode.UNSUPPORTED_ASSIGNOR,
            f"there is no assignor {request.assignor}, but {', '.join(assignors)}",
        )


def _malformed(request: ModernHeartbeat) -> str | None:
    if not request.member_id and (request.needs_member_id or request.epoch > 0 or request.epoch == LEAVING):
        return "a member needs an id"
    if request.instance_id == "":
        return "an instance id must not be empty"
    if request.rack_id == "":
        return "a rack id must not be empty"
    if request.epoch == JOINING:
        if request.rebalance_timeout_ms == -1:
            return "who joins has to say its rebalance timeout"
        if request.owned is None or request.owned:
            return "who joins has to say that it owns nothing"
        if request.topics is None and request.pattern is None:
            return "who joins has to subscribe, to names or to a pattern"
    elif request.epoch == LEFT_FOR_NOW and request.instance_id is None:
        return "only a static member leaves for a while"
    elif request.epoch < LEFT_FOR_NOW:
        return f"{request.epoch} is no member epoch"
    return None


def heartbeat(step: Step, request: ModernHeartbeat) -> HeartbeatResult:
    """A heartbeat that is no farewell; the member id is set, also of a member that had none."""
    step.may_know, step.rules = request.may_know, request.rules
    check_room(step, request.member_id, request.instance_id)
    old = _known_member(step, request)
    before = old.held.assigned if old is not None else NOTHING
    info = old.info if old is not None else MemberInfo()
    info = replace(
        info,
        instance_id=info.instance_id if request.instance_id is None else request.instance_id,
        rack_id=info.rack_id if request.rack_id is None else request.rack_id,
        rebalance_timeout_ms=(
            info.rebalance_timeout_ms if request.rebalance_timeout_ms == -1 else request.rebalance_timeout_ms
        ),
        topics=info.topics if request.topics is None else tuple(sorted(set(request.topics))),
        pattern=info.pattern if request.pattern is None else request.pattern or None,
        assignor=info.assignor if request.assignor is None else request.assignor,
        client_id=request.client_id,
        client_host=request.client_host,
        classic=None,
    )
    has_changed = update_member(step, request.member_id, info)
    has_changed = match_by_new_rules(step, info.pattern) or has_changed
    bump_epoch(step, has_changed=has_changed)
    update_targets(step)
    member = reconcile_member(step, request.member_id, request.owned, subscription_changed=has_changed)
    step.renew_session(member)
    if old is not None and old.is_classic:
        step.cancel_timer(TimerKind.JOIN, request.member_id)
        step.cancel_timer(TimerKind.SYNC, request.member_id)
    is_told = request.epoch == JOINING or request.is_full or _is_news(step.group, member, before, request.owned)
    return HeartbeatResult(
        member.member_id,
        member.held.epoch,
        _interval_ms(step, member),
        tuple(flatten(member.held.assigned)) if is_told else None,
    )


def _is_news(group: ModernGroup, member: Member, before: Owned, owned_now: OwnedNow | None) -> bool:
    """Whether the member may not know what it owns: that has changed, or it has not said since that it knows."""
    assigned = member.held.assigned
    if owned_now is not None and _flat(dict(owned_now)) == _flat(assigned):
        group.unheard.discard(member.member_id)
    elif before is not assigned and _flat(before) != _flat(assigned):
        group.unheard.add(member.member_id)
    return member.member_id in group.unheard


def _flat(owned: Mapping[UUID, Iterable[int]]) -> dict[UUID, frozenset[int]]:
    return {topic_id: frozenset(own) for topic_id, own in owned.items() if own}


def _interval_ms(step: Step, member: Member) -> int:
    interval_ms = step.env.times.heartbeat_interval_ms
    waits = member.held.state is MemberState.UNRELEASED_PARTITIONS
    if waits or step.group.target_epoch.epoch < step.group.epoch.epoch:
        return min(interval_ms, _WAITING_INTERVAL_MS)
    return interval_ms


def check_room(step: Step, member_id: str, instance_id: str | None) -> None:
    """ApiError GROUP_MAX_SIZE_REACHED where the group is full, except to those who have a place in it."""
    group, limit = step.group, step.env.settings.consumer_max_size
    has_place = instance_id in group.static_members or member_id in group.members
    if len(group.members) >= limit and not has_place:
        raise ApiError(
            ErrorCode.GROUP_MAX_SIZE_REACHED,
            f"the group is full, it has {limit} members",
        )


def _known_member(step: Step, request: ModernHeartbeat) -> Member | None:
    """Who sends the heartbeat; None where it is somebody new."""
    group = step.group
    if request.instance_id is None:
        member = group.members.get(request.member_id)
        if member is None and request.epoch != JOINING:
            raise unknown_member(group, request.member_id)
    else:
        member = group.static_member(request.instance_id)
        if request.epoch == JOINING:
            return _joining_static(step, request, member)
        check_static(member, request.member_id, request.instance_id)
    if member is not None:
        _check_epoch(member, request)
    return member


def _joining_static(step: Step, request: ModernHeartbeat, known: Member | None) -> Member | None:
    if known is None:
        return step.group.members.get(request.member_id)
    if known.member_id == request.member_id:
        # The same one, which was fenced and begins anew; Kafka leaves it out until its session is over.
        return known
    if not known.is_classic and known.held.epoch != LEFT_FOR_NOW:
        raise ApiError(
            ErrorCode.UNRELEASED_INSTANCE_ID,
            f"the instance id {request.instance_id} is in use by member {known.member_id}",
        )
    replace_static(step, known, request.member_id)
    return step.group.members[request.member_id]


def check_static(member: Member | None, member_id: str, instance_id: str) -> None:
    """ApiError where the instance id is nobody's, or another's."""
    if member is None:
        raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID, f"no member has the instance id {instance_id}")
    if member.member_id != member_id:
        raise ApiError(
            ErrorCode.FENCED_INSTANCE_ID,
            f"the instance id {instance_id} belongs to member {member.member_id} now",
        )


def unknown_member(group: ModernGroup, member_id: str) -> ApiError:
    return ApiError(ErrorCode.UNKNOWN_MEMBER_ID, f"group {group.group_id} has no member {member_id}")


def _check_epoch(member: Member, request: ModernHeartbeat) -> None:
    held = member.held
    if request.epoch in (JOINING, held.epoch):
        return
    # The answer with the new epoch may have been lost: then the member has nothing that it was not given.
    if request.epoch == held.previous_epoch < held.epoch and is_within(request.owned, held.assigned):
        return
    raise ApiError(
        ErrorCode.FENCED_MEMBER_EPOCH, f"the member says epoch {request.epoch} and is in {held.epoch}: it has to rejoin"
    )


def leave(step: Step, request: ModernHeartbeat) -> HeartbeatResult:
    """A farewell: for good, or of a static member that will be back."""
    group = step.group
    if request.instance_id is None:
        member = group.members.get(request.member_id)
        if member is None:
            raise unknown_member(group, request.member_id)
    else:
        member = group.static_member(request.instance_id)
        check_static(member, request.member_id, request.instance_id)
        assert member is not None
        if request.epoch == LEFT_FOR_NOW:
            # Its session goes on: until it ends, whoever comes with the instance id gets what is kept here.
            assigned = {topic_id: dict.fromkeys(own, 0) for topic_id, own in member.held.assigned.items()}
            held = replace(member.held, epoch=LEFT_FOR_NOW, assigned=assigned, revoking=NOTHING)
            step.write(HeldRecord(group.group_id, member.member_id, held))
            return HeartbeatResult(member.member_id, LEFT_FOR_NOW)
    fence(step, [member.member_id])
    return HeartbeatResult(request.member_id, request.epoch)


def timer_fired(step: Step, key: TimerKey) -> None:
    """A member has not shown itself, or not done what it was asked to, in time."""
    member = step.group.members.get(key.member_id)
    if member is None:
        return
    if key.kind is TimerKind.REBALANCE and member.held.state is not MemberState.UNREVOKED_PARTITIONS:
        return
    fence(step, [key.member_id])


def loaded(step: Step) -> None:
    """The group was read from the log: its members get a full session to show themselves in."""
    for member in step.group.members.values():
        step.renew_session(member)
        if member.held.state is MemberState.UNREVOKED_PARTITIONS and not member.is_classic:
            step.set_timer(TimerKind.REBALANCE, member.member_id, member.info.rebalance_timeout_ms)


# Offsets


def check_commit(group: ModernGroup, member_id: str, epoch: int, *, has_member_epochs: bool) -> PartitionCheck:
    """What decides on the partitions of a commit; ApiError where the commit as a whole is refused.

    A member that has not heard of its new epoch yet may commit what it had before and still has. An epoch of -1 comes
    from tools and from consumers that assign themselves: it may commit while nobody is in the group.
    """
    if epoch < 0 and not group.members:
        return accept
    member = group.members.get(member_id)
    if member is None:
        raise unknown_member(group, member_id)
    if not member.is_classic and not has_member_epochs:
        raise ApiError(
            ErrorCode.UNSUPPORTED_VERSION,
            "a member of the new protocol commits with version 9 or newer",
        )
    held = member.held
    if epoch == held.epoch:
        return accept
    stale = ErrorCode.ILLEGAL_GENERATION if member.is_classic else ErrorCode.STALE_MEMBER_EPOCH
    if epoch > held.epoch:
        raise ApiError(stale, f"the member is in epoch {held.epoch}, not yet in {epoch}")

    def check(topic_id: UUID, partition: int) -> ErrorCode:
        since = held.assigned.get(topic_id, {}).get(partition)
        if since is None:
            since = held.revoking.get(topic_id, {}).get(partition)
        return stale if since is None or epoch < since else ErrorCode.NONE

    return check


def check_fetch(group: ModernGroup, member_id: str | None, epoch: int) -> None:
    """ApiError where these ids may not read the group's offsets; who names none may."""
    if epoch < 0 and member_id in (None, NO_MEMBER_ID):
        return
    member = group.members.get(member_id or NO_MEMBER_ID)
    if member is None:
        raise unknown_member(group, member_id or NO_MEMBER_ID)
    if epoch != member.held.epoch:
        stale = ErrorCode.ILLEGAL_GENERATION if member.is_classic else ErrorCode.STALE_MEMBER_EPOCH
        raise ApiError(stale, f"the member is in epoch {member.held.epoch}, not in {epoch}")
