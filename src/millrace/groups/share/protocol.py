"""The share group protocol of KIP-932: what a heartbeat, a departure and a timer mean.

Pure: every function takes a step, which has the group and what is known, changes the group record by record and
returns the answer, or raises the ApiError that the client gets. It never awaits and reads no clock. The broker assigns
partitions, the same one to several members where there are few; a member hears in its heartbeats what to read.

The rules are those of Kafka 4.3. Not here: what all events share (`step`), which share-partitions there are
(`partitions`), the records that members get (`queues`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from millrace.errors import ApiError, ErrorCode
from millrace.groups.environment import JOINING, LEAVING, HeartbeatResult
from millrace.groups.share.group import ShareGroup, ShareMember
from millrace.groups.share.partitions import begin_missing
from millrace.groups.share.records import ShareInfo
from millrace.groups.share.step import (
    ShareStep,
    bump_epoch,
    fence,
    give_target,
    lacks_readers,
    update_member,
    update_targets,
)
from millrace.groups.timers import TimerKey

ASSIGNOR: Final = "simple"
_WAITING_INTERVAL_MS: Final = 1_000
"""When a member whose partitions are on their way is asked to come back."""


@dataclass(frozen=True, slots=True)
class ShareHeartbeat:
    """A ShareGroupHeartbeat; None: as before."""

    member_id: str
    epoch: int
    rack_id: str | None = None
    topics: tuple[str, ...] | None = None
    client_id: str = ""
    client_host: str = ""


def check_request(request: ShareHeartbeat) -> None:
    """ApiError where a heartbeat is not well-formed."""
    wrong = _malformed(request)
    if wrong is not None:
        raise ApiError(ErrorCode.INVALID_REQUEST, wrong)


def _malformed(request: ShareHeartbeat) -> str | None:
    if not request.member_id:
        return "a member needs an id"
    if request.rack_id == "":
        return "a rack id must not be empty"
    if request.epoch == JOINING and not request.topics:
        return "who joins has to subscribe"
    if request.epoch < LEAVING:
        return f"{request.epoch} is no member epoch"
    return None


def heartbeat(step: ShareStep, request: ShareHeartbeat) -> HeartbeatResult:
    """A heartbeat that is no farewell."""
    group = step.group
    _check_room(step, request.member_id)
    old = _known_member(group, request)
    before = old.held.assigned if old is not None else None
    info = old.info if old is not None else ShareInfo()
    info = replace(
        info,
        rack_id=info.rack_id if request.rack_id is None else request.rack_id,
        topics=info.topics if request.topics is None else tuple(sorted(set(request.topics))),
        client_id=request.client_id,
        client_host=request.client_host,
    )
    has_changed = update_member(step, request.member_id, info)
    if group.target_epoch.epoch >= group.epoch.epoch:
        has_changed = lacks_readers(step) or has_changed
    has_changed = bump_epoch(step, has_changed=has_changed)
    update_targets(step)
    member = give_target(step, request.member_id, has_changed=has_changed)
    step.set_session(member.member_id)
    begin_missing(step)
    # Whoever says another epoch has not heard the answer that had the new one, nor what else it had.
    has_not_heard = request.epoch != member.held.epoch
    is_told = has_not_heard or request.topics is not None or before != member.held.assigned
    return HeartbeatResult(
        member.member_id,
        member.held.epoch,
        _interval_ms(step),
        tuple(member.held.assigned.items()) if is_told else None,
    )


def _interval_ms(step: ShareStep) -> int:
    group, interval_ms = step.group, step.env.times.heartbeat_interval_ms
    if group.partitions.initializing or group.target_epoch.epoch < group.epoch.epoch:
        return min(interval_ms, _WAITING_INTERVAL_MS)
    return interval_ms


def _check_room(step: ShareStep, member_id: str) -> None:
    limit = step.env.settings.share_max_size
    if len(step.group.members) >= limit and member_id not in step.group.members:
        raise ApiError(ErrorCode.GROUP_MAX_SIZE_REACHED, f"the group is full, it has {limit} members")


def _known_member(group: ShareGroup, request: ShareHeartbeat) -> ShareMember | None:
    """Who sends the heartbeat; None where it is somebody new."""
    member = group.members.get(request.member_id)
    if member is None:
        if request.epoch != JOINING:
            raise _unknown_member(group, request.member_id)
        return None
    held = member.held
    # The answer with the new epoch may have been lost.
    is_late = request.epoch == held.previous_epoch < held.epoch
    if request.epoch not in (JOINING, held.epoch) and not is_late:
        raise ApiError(
            ErrorCode.FENCED_MEMBER_EPOCH,
            f"the member says epoch {request.epoch} and is in {held.epoch}: it has to rejoin",
        )
    return member


def _unknown_member(group: ShareGroup, member_id: str) -> ApiError:
    return ApiError(ErrorCode.UNKNOWN_MEMBER_ID, f"group {group.group_id} has no member {member_id}")


def leave(step: ShareStep, request: ShareHeartbeat) -> HeartbeatResult:
    """A farewell."""
    if request.member_id not in step.group.members:
        raise _unknown_member(step.group, request.member_id)
    fence(step, request.member_id)
    return HeartbeatResult(request.member_id, request.epoch)


def timer_fired(step: ShareStep, key: TimerKey) -> None:
    """A member has not shown itself in time."""
    if key.member_id in step.group.members:
        fence(step, key.member_id)


def loaded(step: ShareStep) -> None:
    """The group was read from the log: its members get a full session to show themselves in."""
    for member_id in step.group.members:
        step.set_session(member_id)
