"""The classic groups of one led partition: the decisions of `protocol`, their records in the log, their timers, and the
requests that are parked in them.

A group's record is appended at once; what waits for it goes on when it is durable. A group without members that keeps
only offsets (a simple group) has no record: it is here as long as it has offsets.

Owner: the shard, on whose task and loop everything runs. Not here: loading (`shard`), offsets (`offsets`), classic
members of KIP-848 groups (`modern.classic_members`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from millrace.errors import ApiError, ErrorCode
from millrace.groups.classic import protocol
from millrace.groups.classic.effects import (
    NO_MEMBER_ID,
    AnswerJoin,
    AnswerSync,
    Effect,
    JoinRequest,
    JoinResult,
    LeaveRequest,
    LeaveResult,
    Store,
    StoredGroup,
    SyncRequest,
    SyncResult,
)
from millrace.groups.classic.group import ClassicGroup, GroupState
from millrace.groups.classic.rebalance import JOIN_TIMER, SYNC_TIMER
from millrace.groups.classic.records import GroupRecord, group_key, group_value
from millrace.groups.counting import GroupCounts
from millrace.groups.offsets.committed import PartitionCheck, Slot, TopicOffsets, accept
from millrace.groups.settings import GroupSettings
from millrace.groups.timers import CancelTimer, GroupTimers, SetTimer, TimerKey, TimerKind
from millrace.replication.state_topic import Entry

logger = logging.getLogger(__name__)


class Host(Protocol):
    """The shard, as far as it is needed here."""

    @property
    def is_active(self) -> bool: ...

    def now_ms(self) -> int: ...

    def append(self, entries: Sequence[Entry], apply: Callable[[int], None]) -> asyncio.Future[None]:
        """Append now, apply when durable; ApiError where the log refuses."""

    def has_offsets(self, group_id: str) -> bool: ...

    def keep_offsets(self, group_id: str) -> None:
        """The group is gone: if it has offsets they are a simple group's from now on."""


class ClassicGroups:
    """The classic groups of one shard."""

    def __init__(
        self, host: Host, *, settings: GroupSettings, timers: GroupTimers, counts: GroupCounts | None = None
    ) -> None:
        self.groups: dict[str, ClassicGroup] = {}
        self._counts = counts or GroupCounts()
        self._host = host
        self._settings = settings
        self._timers = timers
        self._parked_joins: dict[int, asyncio.Future[JoinResult]] = {}
        self._parked_syncs: dict[int, asyncio.Future[SyncResult]] = {}
        self._next_ticket = 0

    def __repr__(self) -> str:
        return f"ClassicGroups({len(self.groups)})"

    def __contains__(self, group_id: object) -> bool:
        return group_id in self.groups

    # Life

    def replay(self, record: GroupRecord) -> None:
        """Apply one record of the log."""
        if record.value is not None:
            self.groups[record.group_id] = ClassicGroup.from_record(record.group_id, record.value)
        else:
            self.groups.pop(record.group_id, None)
            self._host.keep_offsets(record.group_id)

    def loaded(self) -> None:
        """Everything was replayed: members have a session from now on."""
        for group in list(self.groups.values()):
            self._perform(group, protocol.loaded(group, self._settings, self._host.now_ms()))

    def close(self) -> None:
        """Somebody else coordinates: whoever waits asks there."""
        for group in self.groups.values():
            self._unload(group, ErrorCode.NOT_COORDINATOR)

    def timer_fired(self, group_id: str, key: TimerKey) -> None:
        group = self.groups.get(group_id)
        if group is not None:
            self._perform(group, protocol.timer_fired(group, key, self._settings, self._host.now_ms()))

    # Members

    async def join(self, group_id: str, request: JoinRequest) -> JoinResult:
        """JoinGroup; waits for the rebalance. Cancellation drops the answer, not the membership."""
        now_ms = self._host.now_ms()
        group = self.groups.get(group_id)
        if group is None:
            if request.member_id != NO_MEMBER_ID:
                return JoinResult(ErrorCode.UNKNOWN_MEMBER_ID, request.member_id)
            group = self.groups[group_id] = ClassicGroup(group_id)
        was_simple = group.is_simple
        ticket = self._ticket()
        answer: asyncio.Future[JoinResult] = asyncio.get_running_loop().create_future()
        self._parked_joins[ticket] = answer
        self._perform(group, protocol.join(group, request, ticket, self._settings, now_ms))
        if not group.is_idle and was_simple:
            self._perform(group, protocol.create(group, now_ms))
        elif not self._host.has_offsets(group_id):
            self.drop_simple(group_id)
        return await answer

    async def sync(self, group_id: str, request: SyncRequest) -> SyncResult:
        """SyncGroup; waits for the leader. Cancellation drops the answer, not the membership."""
        group = self.groups.get(group_id)
        if group is None:
            return SyncResult(ErrorCode.UNKNOWN_MEMBER_ID)
        ticket = self._ticket()
        answer: asyncio.Future[SyncResult] = asyncio.get_running_loop().create_future()
        self._parked_syncs[ticket] = answer
        self._perform(group, protocol.sync(group, request, ticket, self._settings, self._host.now_ms()))
        return await answer

    def heartbeat(self, group_id: str, member_id: str, instance_id: str | None, generation: int) -> ErrorCode:
        """Heartbeat."""
        group = self.groups.get(group_id)
        if group is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        error, effects = protocol.heartbeat(group, member_id, instance_id, generation)
        self._perform(group, effects)
        return error

    def leave(self, group_id: str, requests: Sequence[LeaveRequest]) -> list[LeaveResult]:
        """LeaveGroup."""
        group = self.groups.get(group_id)
        if group is None:
            return [LeaveResult(each.member_id, each.instance_id, ErrorCode.UNKNOWN_MEMBER_ID) for each in requests]
        results, effects = protocol.leave(group, requests, self._settings, self._host.now_ms())
        self._perform(group, effects)
        return results

    # Offsets and groups

    def check_commit(
        self, group_id: str, member_id: str, instance_id: str | None, generation: int, *, has_member_epochs: bool
    ) -> PartitionCheck:
        """What decides on the partitions of a commit; a group that is not known may be begun by one."""
        group = self.groups.get(group_id)
        if group is not None:
            error, effects = protocol.check_commit(group, member_id, instance_id, generation)
            self._perform(group, effects)
        elif generation < 0:
            error = ErrorCode.NONE
        else:
            error = ErrorCode.GROUP_ID_NOT_FOUND if has_member_epochs else ErrorCode.ILLEGAL_GENERATION
        if error is not ErrorCode.NONE:
            raise ApiError(error)
        return accept

    def check_transactional_commit(
        self, group_id: str, member_id: str, instance_id: str | None, generation: int
    ) -> None:
        """ApiError where these ids may not commit in a transaction; a group that is not known may be begun by one."""
        group = self.groups.get(group_id)
        if group is not None:
            error = protocol.check_transactional_commit(group, member_id, instance_id, generation)
        else:
            error = ErrorCode.NONE if generation < 0 else ErrorCode.ILLEGAL_GENERATION
        if error is not ErrorCode.NONE:
            raise ApiError(error)

    def begin_simple(self, group_id: str) -> None:
        """Commits without membership make a simple group, which has no record of its own."""
        self.groups[group_id] = ClassicGroup(group_id)

    def drop_simple(self, group_id: str) -> None:
        """A group without offsets ends, if they were all that it had."""
        group = self.groups.get(group_id)
        if group is not None and group.is_simple:
            del self.groups[group_id]

    def expired_offsets(self, group_id: str, held: TopicOffsets) -> list[Slot] | None:
        """Which of the group's offsets have outlived their retention; None where the group is gone."""
        group = self.groups.get(group_id)
        if group is None or group.state is GroupState.DEAD:
            return None
        return protocol.expired_offsets(group, held, self._host.now_ms(), self._settings.offsets_retention_ms)

    def is_idle(self, group_id: str) -> bool:
        """Whether nothing but its offsets keeps the group."""
        return self.groups[group_id].is_idle

    def check_deletable(self, group_id: str) -> None:
        """ApiError where there is no such group, or where it has members."""
        group = self.groups.get(group_id)
        if group is None or group.state is GroupState.DEAD:
            raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND, f"group {group_id} not found")
        if group.state is not GroupState.EMPTY:
            raise ApiError(ErrorCode.NON_EMPTY_GROUP, f"group {group_id} has members")

    def end(self, group_id: str) -> asyncio.Future[None]:
        """Remove an empty group; until that is durable nobody can join it."""
        group = self.groups[group_id]
        done = self._host.append([(group_key(group_id), None)], lambda _: self._drop(group))
        self._forget_pending(group)
        group.move_to(GroupState.DEAD, self._host.now_ms())
        return done

    def _drop(self, group: ClassicGroup) -> None:
        if self.groups.get(group.group_id) is group:
            del self.groups[group.group_id]
        # Committed between the decision and the tombstone: what is left is a simple group, as a replay finds it.
        self._host.keep_offsets(group.group_id)

    def hand_over(self, group: ClassicGroup) -> None:
        """The group has become a consumer group: whoever waits in it is told to join again."""
        self._forget_pending(group)
        for key in (JOIN_TIMER, SYNC_TIMER):
            self._timers.cancel((group.group_id, key))
        del self.groups[group.group_id]
        self._unload(group, ErrorCode.REBALANCE_IN_PROGRESS)

    def take_over(self, group: ClassicGroup) -> None:
        """The group was a consumer group until now."""
        self.groups[group.group_id] = group
        self._perform(group, protocol.took_over(group, self._settings, self._host.now_ms()))

    def _forget_pending(self, group: ClassicGroup) -> None:
        """Drop the ids that were handed out and not used."""
        for member_id in group.pending_join:
            self._timers.cancel((group.group_id, TimerKey(TimerKind.SESSION, member_id)))
        group.pending_join.clear()

    # Effects

    def _unload(self, group: ClassicGroup, error: ErrorCode) -> None:
        self._perform(group, protocol.unload(group, error, self._settings, self._host.now_ms()))

    def _perform(self, group: ClassicGroup, effects: Sequence[Effect]) -> None:
        if group.rebalances:
            self._counts.classic_rebalances += group.rebalances
            group.rebalances = 0
        for effect in effects:
            match effect:
                case AnswerJoin(ticket, join_result):
                    _answer(self._parked_joins.pop(ticket, None), join_result)
                case AnswerSync(ticket, sync_result):
                    _answer(self._parked_syncs.pop(ticket, None), sync_result)
                case SetTimer(key, delay_ms):
                    self._timers.set((group.group_id, key), delay_ms)
                case CancelTimer(key):
                    self._timers.cancel((group.group_id, key))
                case Store(stored_group, token):
                    self._store(group, stored_group, token)

    def _store(self, group: ClassicGroup, stored_group: StoredGroup, token: int | None) -> None:
        # No timeout: a record given up on could still become durable, and memory would then differ from the log. One
        # that the log took and lost ends the shard, and with it the group.
        try:
            self._host.append(
                [(group_key(group.group_id), group_value(stored_group))],
                lambda _: self._stored(group, token, ErrorCode.NONE),
            )
        except ApiError as error:
            # NOT_COORDINATOR means that the partition has left: whoever leads it now decides what the group is.
            if error.code is not ErrorCode.NOT_COORDINATOR and self._host.is_active:
                logger.warning("the record of %r was not written: %s", group, error.code.name)
            self._stored(group, token, error.code)

    def _stored(self, group: ClassicGroup, token: int | None, error: ErrorCode) -> None:
        if token is not None:
            self._perform(group, protocol.stored(group, token, error, self._settings, self._host.now_ms()))

    def _ticket(self) -> int:
        self._next_ticket += 1
        return self._next_ticket


def _answer(parked: asyncio.Future[JoinResult] | asyncio.Future[SyncResult] | None, result: object) -> None:
    # The client may have hung up, which cancelled the future: its membership goes on without it.
    if parked is not None and not parked.done():
        parked.set_result(result)  # type: ignore[arg-type]
