"""The KIP-848 groups of one led partition: the decisions of `protocol`, their records in the log, their timers.

An event is decided and its records are appended without a wait in between, so that events of a group have one order,
which is that of the log. The answer leaves when the records, and everything before them, are durable. A record that the
log refuses is taken back; one that it took and then lost ends the shard, and with it what is in memory.

Owner: the shard, on whose task and loop everything runs. Not here: commits, classic groups, loading (`shard`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from millrace.cluster.image import ClusterImage
from millrace.errors import ApiError, ErrorCode
from millrace.groups.classic.effects import (
    JoinRequest,
    JoinResult,
    LeaveRequest,
    LeaveResult,
    SyncRequest,
    SyncResult,
)
from millrace.groups.classic.group import GroupState
from millrace.groups.classic.groups import ClassicGroups
from millrace.groups.classic.records import GroupRecord
from millrace.groups.counting import GroupCounts
from millrace.groups.environment import JOINING, Environment, HeartbeatResult
from millrace.groups.modern import classic_members, migration, protocol
from millrace.groups.modern.group import ModernGroup
from millrace.groups.modern.protocol import ModernHeartbeat
from millrace.groups.modern.records import ModernRecord
from millrace.groups.modern.step import Step
from millrace.groups.offsets.committed import PartitionCheck, Slot, TopicOffsets
from millrace.groups.offsets.expiry import expired
from millrace.groups.settings import GroupSettings, GroupTimes
from millrace.groups.step_log import RETRY_MS, LogHost, append_step, set_timers
from millrace.groups.timers import GroupTimers, TimerKey

logger = logging.getLogger(__name__)

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class GroupDependencies:
    """What the coordinator gives its shards to ask: the cluster's image, and the times that a group's settings name."""

    image: Callable[[], ClusterImage] = ClusterImage
    times: Callable[[str], GroupTimes] = lambda _group_id: GroupTimes()


class Host(LogHost, Protocol):
    """The shard, as far as it is needed here."""

    async def when_durable(self, done: asyncio.Future[None] | None) -> None:
        """Wait for one append, or for everything so far; ApiError where it does not become durable in time."""

    def keep_offsets(self, group_id: str) -> None:
        """The group is gone: if it has offsets they are a simple group's from now on."""

    def now_ms(self) -> int: ...


class ModernGroups:
    """The KIP-848 groups of one shard."""

    def __init__(
        self,
        host: Host,
        classic: ClassicGroups,
        *,
        settings: GroupSettings,
        dependencies: GroupDependencies,
        timers: GroupTimers,
        counts: GroupCounts | None = None,
    ) -> None:
        self._counts = counts or GroupCounts()
        self.groups: dict[str, ModernGroup] = {}
        self._host = host
        self._classic = classic
        self._settings = settings
        self._dependencies = dependencies
        self._timers = timers

    def __repr__(self) -> str:
        return f"ModernGroups({len(self.groups)})"

    def __contains__(self, group_id: object) -> bool:
        return group_id in self.groups

    # Life

    def replay(self, record: ModernRecord) -> None:
        """Apply one record of the log."""
        group_id = record.group_id
        group = self.groups.get(group_id)
        if group is None:
            if record.value is None:
                return
            group = self.groups[group_id] = ModernGroup(group_id)
            # Commits that came before made a simple group of it.
            self._classic.groups.pop(group_id, None)
        group.apply(record)
        self._drop_if_blank(group)

    def loaded(self) -> None:
        """Everything was replayed: members have a session from now on."""
        for group in self.groups.values():
            step = self._step(group)
            protocol.loaded(step)
            set_timers(self._timers, group.group_id, step.timers)

    def timer_fired(self, group_id: str, key: TimerKey) -> None:
        group = self.groups.get(group_id)
        if group is None:
            return
        try:
            self._decide(group, lambda step: protocol.timer_fired(step, key))
        except ApiError as error:
            logger.warning("member %s of %r is not removed yet: %s", key.member_id, group, error)
            self._timers.set((group_id, key), RETRY_MS)

    # Members

    async def heartbeat(self, group_id: str, request: ModernHeartbeat) -> HeartbeatResult:
        """ConsumerGroupHeartbeat; returns when what it changed is durable. Cancellation takes nothing back."""
        protocol.check_request(request, self._settings.consumer_assignors)
        group = self.groups.get(group_id)
        if group is not None:
            decide = protocol.leave if request.is_leaving else protocol.heartbeat
            result, done = self._decide(group, lambda step: decide(step, request))
        elif request.epoch == JOINING:
            result, done = self._begin(group_id, request)
        else:
            raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND, f"{group_id} is no consumer group")
        await self._host.when_durable(done)
        return result

    def _begin(self, group_id: str, request: ModernHeartbeat) -> tuple[HeartbeatResult, asyncio.Future[None] | None]:
        """The first member of the new protocol: of a new group, or of one that was classic until now."""
        old = self._classic.groups.get(group_id)
        if old is not None and old.state is GroupState.DEAD:
            raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE, f"group {group_id} is being deleted")
        step = self._step(ModernGroup(group_id))
        if old is not None:
            if old.members:
                migration.check_upgrade(old, self._settings)
            step.write(GroupRecord(group_id, None))
            for record in migration.upgrade(old, step.env.image) if old.members else ():
                step.write(record)
            for member in step.group.members.values():
                step.renew_session(member)
        result = protocol.heartbeat(step, request)
        # Nobody knows of the group yet: an error leaves nothing behind.
        done = append_step(self._host, step, self._timers, is_whole=True)
        self._counts.consumer_rebalances += 1
        if old is not None:
            self._classic.hand_over(old)
        self.groups[group_id] = step.group
        set_timers(self._timers, group_id, step.timers)
        if old is not None and old.members:
            logger.info("a classic group of %d members has become %r", len(old.members), step.group)
        return result, done

    # Classic members

    async def classic_join(self, group_id: str, request: JoinRequest) -> JoinResult:
        """JoinGroup to a group with members; the answer waits for the log only."""
        try:
            result, done = self._decide(self.groups[group_id], lambda step: classic_members.join(step, request))
        except ApiError as error:
            return JoinResult(error.code, request.member_id)
        await self._host.when_durable(done)
        return result

    async def classic_sync(self, group_id: str, request: SyncRequest) -> SyncResult:
        """SyncGroup."""
        try:
            result, done = self._decide(self.groups[group_id], lambda step: classic_members.sync(step, request))
        except ApiError as error:
            return SyncResult(error.code)
        await self._host.when_durable(done)
        return result

    def classic_heartbeat(self, group_id: str, member_id: str, instance_id: str | None, generation: int) -> ErrorCode:
        """Heartbeat."""
        try:
            result, _ = self._decide(
                self.groups[group_id],
                lambda step: classic_members.heartbeat(step, member_id, instance_id, generation),
            )
        except ApiError as error:
            return error.code
        return result

    def classic_leave(self, group_id: str, requests: Sequence[LeaveRequest]) -> list[LeaveResult]:
        """LeaveGroup."""
        result, _ = self._decide(self.groups[group_id], lambda step: classic_members.leave(step, requests))
        return result

    # Offsets and groups

    def check_commit(self, group_id: str, member_id: str, epoch: int, *, has_member_epochs: bool) -> PartitionCheck:
        """What decides on the partitions of a commit."""
        return protocol.check_commit(self.groups[group_id], member_id, epoch, has_member_epochs=has_member_epochs)

    def expired_offsets(self, group_id: str, held: TopicOffsets) -> list[Slot] | None:
        """Which of the group's offsets have outlived their retention; None where the group is gone."""
        group = self.groups.get(group_id)
        if group is None:
            return None
        return expired(group.is_subscribed_to, held, self._host.now_ms(), self._settings.offsets_retention_ms)

    def is_idle(self, group_id: str) -> bool:
        """Whether nothing but its offsets keeps the group."""
        return not self.groups[group_id].members

    def check_deletable(self, group_id: str) -> None:
        """ApiError NON_EMPTY_GROUP."""
        if self.groups[group_id].members:
            raise ApiError(ErrorCode.NON_EMPTY_GROUP, f"group {group_id} has members")

    def end(self, group_id: str) -> asyncio.Future[None] | None:
        """Remove an empty group; ApiError where that cannot be written."""
        group = self.groups[group_id]

        def remove(step: Step) -> None:
            for record in group.tombstones():
                step.write(record)

        _, done = self._decide(group, remove)
        self._drop_if_blank(group)
        return done

    # Inside

    def _step(self, group: ModernGroup) -> Step:
        dependencies = self._dependencies
        return Step(
            group,
            Environment(dependencies.image(), self._settings, dependencies.times(group.group_id), self._host.now_ms()),
        )

    def _decide(self, group: ModernGroup, decide: Callable[[Step], R]) -> tuple[R, asyncio.Future[None] | None]:
        """Let an event happen to a group that is known: all of it, or nothing where it is an ApiError."""
        step = self._step(group)
        epoch_before = group.epoch.epoch
        try:
            result = decide(step)
        except BaseException:
            step.undo()
            raise
        done = append_step(self._host, step, self._timers, is_whole=step.became_classic is not None)
        if group.epoch.epoch > epoch_before:
            self._counts.consumer_rebalances += 1
        set_timers(self._timers, group.group_id, step.timers)
        if step.became_classic is not None:
            became = step.became_classic
            del self.groups[group.group_id]
            self._classic.take_over(became)
            logger.info("a consumer group has become %r", became)
        return result, done

    def _drop_if_blank(self, group: ModernGroup) -> None:
        if group.is_blank and self.groups.get(group.group_id) is group:
            del self.groups[group.group_id]
            self._host.keep_offsets(group.group_id)
