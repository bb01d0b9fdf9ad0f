"""One led partition of `__consumer_offsets`: its groups of three kinds, and the offsets beside them.

A group is classic, of KIP-848 (`modern`) or a share group; an id belongs to one of them. Offsets are kept alike for the
first two (`offsets`), and share groups have none here. This module decides which of them a request or a record is for,
and what they hear of each other.

Owner: the shard's task (`run`). All methods are called on the loop. Not here: loading and writing
(`replication.sharded`), which shard a group belongs to and whether it may answer (`coordinator`), the kinds themselves
(`classic.groups`, `modern.groups`, `share.groups`, `offsets.group_offsets`), bytes (`records`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from uuid import UUID

from millrace.clock import Clock
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
from millrace.groups.classic.group import ClassicGroup
from millrace.groups.classic.groups import ClassicGroups
from millrace.groups.classic.records import GroupRecord
from millrace.groups.counting import GroupCounts
from millrace.groups.modern.group import ModernGroup
from millrace.groups.modern.groups import GroupDependencies, ModernGroups
from millrace.groups.offsets.committed import PartitionCheck, accept
from millrace.groups.offsets.group_offsets import GroupOffsets
from millrace.groups.offsets.records import OffsetRecord
from millrace.groups.records import read_record
from millrace.groups.settings import GroupSettings
from millrace.groups.share.groups import ShareGroupDependencies, ShareGroups
from millrace.groups.share.records import ShareRecord
from millrace.groups.timers import GroupTimers, TimerKey, Timers
from millrace.replication.sharded import StateShard
from millrace.replication.state_topic import StateRecord, StateTopic


class GroupShard(StateShard):
    """The groups of one partition, and their offsets."""

    def __init__(
        self,
        index: int,
        leader_epoch: int,
        *,
        topic: StateTopic,
        settings: GroupSettings,
        clock: Clock,
        dependencies: GroupDependencies,
        share: ShareGroupDependencies,
        counts: GroupCounts | None = None,
    ) -> None:
        timeout_ms = settings.offsets_commit_timeout_ms
        super().__init__(index, leader_epoch, topic=topic, clock=clock, write_timeout_ms=timeout_ms)
        self._timers: GroupTimers = Timers(clock, self._timer_fired)
        counts = counts or GroupCounts()
        self.offsets = GroupOffsets(self, counts)
        self.classic = ClassicGroups(self, settings=settings, timers=self._timers, counts=counts)
        self.modern = ModernGroups(
            self, self.classic, settings=settings, dependencies=dependencies, timers=self._timers, counts=counts
        )
        self.share = ShareGroups(
            self, settings=settings, dependencies=share, timers=self._timers, clock=clock, counts=counts
        )

    def __repr__(self) -> str:
        return (
            f"GroupShard({self.index} epoch {self.leader_epoch} {self.state.value}, {self.classic!r}, {self.modern!r}, "
            f"{self.share!r}, {self.offsets!r}, {self._writer!r})"
        )

    # Life

    def replay(self, key: bytes, value: bytes | None, record_offset: int) -> None:
        match read_record(key, value, record_offset):
            case None:
                pass
            case OffsetRecord() as record:
                self.offsets.replay(record)
            case GroupRecord(group_id, stored) as record:
                if stored is not None:
                    self.modern.groups.pop(group_id, None)
                self.classic.replay(record)
            case record if isinstance(record, ShareRecord):
                self.share.replay(record)
            case record:
                self.modern.replay(record)

    def replay_pending(self, record: StateRecord) -> None:
        commit = read_record(record.key, record.value, record.offset)
        if not isinstance(commit, OffsetRecord):
            raise ProtocolError("only commits are part of transactions")
        self.offsets.replay_pending(commit, record.producer_id)

    @property
    def is_empty(self) -> bool:
        return not (self.classic.groups or self.modern.groups or self.share.groups)

    def _begin(self) -> None:
        self.classic.loaded()
        self.modern.loaded()
        self.share.loaded()

    def _end(self) -> None:
        self._timers.cancel_all()
        self.share.close()
        self.classic.close()

    async def _ended(self) -> None:
        await self.share.ended()

    # Classic members, which are in a classic or in a KIP-848 group

    async def join(self, group_id: str, request: JoinRequest) -> JoinResult:
        """JoinGroup; waits for the rebalance. Cancellation drops the answer, not the membership."""
        group = self.modern.groups.get(group_id)
        if group is not None:
            if group.members:
                return await self.modern.classic_join(group_id, request)
            if request.member_id == NO_MEMBER_ID:
                # Nobody is in the group: it becomes the newcomer's.
                self.modern.end(group_id)
        return await self.classic.join(group_id, request)

    async def sync(self, group_id: str, request: SyncRequest) -> SyncResult:
        """SyncGroup; waits for the leader. Cancellation drops the answer, not the membership."""
        if group_id in self.modern:
            return await self.modern.classic_sync(group_id, request)
        return await self.classic.sync(group_id, request)

    def heartbeat(self, group_id: str, member_id: str, instance_id: str | None, generation: int) -> ErrorCode:
        """Heartbeat."""
        if group_id in self.modern:
            return self.modern.classic_heartbeat(group_id, member_id, instance_id, generation)
        return self.classic.heartbeat(group_id, member_id, instance_id, generation)

    def leave(self, group_id: str, requests: Sequence[LeaveRequest]) -> list[LeaveResult]:
        """LeaveGroup."""
        if group_id in self.modern:
            return self.modern.classic_leave(group_id, requests)
        return self.classic.leave(group_id, requests)

    # Groups and offsets

    def committer(self, group_id: str) -> ClassicGroup | ModernGroup | None:
        """The group of either kind that commits offsets, to be read and not kept."""
        return self.modern.groups.get(group_id) or self.classic.groups.get(group_id)

    def check_commit(
        self, group_id: str, member_id: str, instance_id: str | None, generation: int, *, has_member_epochs: bool
    ) -> PartitionCheck:
        """What decides on the partitions of a commit; ApiError where these ids may not commit at all."""
        if group_id in self.modern:
            return self.modern.check_commit(group_id, member_id, generation, has_member_epochs=has_member_epochs)
        return self.classic.check_commit(
            group_id, member_id, instance_id, generation, has_member_epochs=has_member_epochs
        )

    def check_transactional_commit(
        self, group_id: str, member_id: str, instance_id: str | None, generation: int
    ) -> PartitionCheck:
        """The same for a commit in a transaction, to whose client a member's epoch is a generation (KIP-447)."""
        if group_id not in self.modern:
            self.classic.check_transactional_commit(group_id, member_id, instance_id, generation)
            return accept
        try:
            check = self.modern.check_commit(group_id, member_id, generation, has_member_epochs=True)
        except ApiError as error:
            raise ApiError(_as_generation(error.code), error.message) from error
        return lambda topic_id, partition: _as_generation(check(topic_id, partition))

    def transaction_ended(self, producer_id: int, marker_offset: int, *, committed: bool) -> None:
        """The marker of a transaction was appended: it takes effect when it is durable, in the order of the log."""
        self._writer.note(
            marker_offset, lambda offset: self.offsets.end_transaction(producer_id, offset, committed=committed)
        )

    async def delete_group(self, group_id: str) -> None:
        """Delete an empty group and its offsets, durably; until then nobody can join it."""
        if group_id in self.share:
            await self.share.delete(group_id)
            return
        kind = self.modern if group_id in self.modern else self.classic
        kind.check_deletable(group_id)
        await self.offsets.end_group(kind, group_id)

    async def forget_topics(self, topics: dict[str, UUID]) -> None:
        """Delete what groups keep of topics that are gone."""
        await self.share.forget_topics(topics.values())
        await self.offsets.forget_topics(topics)

    async def expire(self) -> None:
        """Delete what has outlived its retention: offsets, and groups that have neither members nor offsets left."""
        await self.offsets.expire(self.classic)
        await self.offsets.expire(self.modern)

    # What the kinds ask of the shard

    def knows(self, group_id: str) -> bool:
        """Whether there is a classic or a KIP-848 group with this id."""
        return group_id in self.classic or group_id in self.modern

    def has_offsets(self, group_id: str) -> bool:
        """Whether it has committed any, be it in a transaction that is still open."""
        return self.offsets.has_any(group_id)

    def keep_offsets(self, group_id: str) -> None:
        """The group is gone: if it has offsets they are a simple group's from now on."""
        if self.has_offsets(group_id):
            self.offsets_came(group_id)

    def offsets_came(self, group_id: str) -> None:
        """The group has offsets now, or pending ones: if nobody knows it, it is a simple group."""
        if not self.knows(group_id):
            self.classic.begin_simple(group_id)

    def offsets_went(self, group_id: str) -> None:
        """The group has no offsets any more, nor pending ones: a simple group ends with them."""
        self.classic.drop_simple(group_id)

    async def when_durable(self, done: asyncio.Future[None] | None) -> None:
        """Wait for one append, or (None) for everything so far; ApiError where it does not become durable in time."""
        if done is None:
            await self.wait_applied()
        else:
            await self.in_time(done)

    def _timer_fired(self, key: tuple[str, TimerKey]) -> None:
        group_id = key[0]
        if group_id in self.classic:
            self.classic.timer_fired(*key)
        elif group_id in self.share:
            self.share.timer_fired(*key)
        else:
            self.modern.timer_fired(*key)


def _as_generation(code: ErrorCode) -> ErrorCode:
    return ErrorCode.ILLEGAL_GENERATION if code is ErrorCode.STALE_MEMBER_EPOCH else code
