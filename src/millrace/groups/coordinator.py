"""The group coordinator of a broker: which shard answers for a group, and whether it may.

Owner of the shards and of their tasks. Handlers call it; every failure that concerns a whole request is an ApiError.
A shard answers only while this broker still leads its partition in the epoch under which it was loaded, because an
answer from the memory of a former coordinator can be fatal to a client (KAFKA-21181). Not here: the protocol
(`classic`, `modern`), durability (`shard`), requests and responses (`handlers.groups`, `handlers.consumer_groups`,
`handlers.group_offsets`).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace

from millrace.clock import Clock
from millrace.errors import ApiError, ErrorCode
from millrace.groups.effects import (
    NO_MEMBER_ID,
    JoinRequest,
    JoinResult,
    LeaveRequest,
    LeaveResult,
    SyncRequest,
    SyncResult,
)
from millrace.groups.group import ClassicGroup, GroupState
from millrace.groups.modern import HeartbeatResult, ModernHeartbeat, check_fetch
from millrace.groups.modern_group import ModernGroup
from millrace.groups.modern_shard import Surroundings
from millrace.groups.offsets import TopicOffsets
from millrace.groups.settings import GroupSettings
from millrace.groups.shard import OffsetToCommit, Shard, ShardState
from millrace.groups.subscription import CONSUMER_PROTOCOL_TYPE
from millrace.model import NO_TIMESTAMP
from millrace.replication.state_topic import StateTopic

log = logging.getLogger(__name__)

CLASSIC_TYPE = "classic"
CONSUMER_TYPE = "consumer"
_NO_SURROUNDINGS = Surroundings()
MAX_TIMESTAMP_MS = 2**63 - 1
MAX_MEMBER_ID_STEM = 255
"""How much of a client's own text goes into the member id it is given: an id must fit every answer it appears in."""


@dataclass(frozen=True, slots=True)
class DescribedMember:
    """A member as an administrator sees it."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    metadata: bytes
    assignment: bytes


@dataclass(frozen=True, slots=True)
class DescribedGroup:
    """A group as an administrator sees it."""

    group_id: str
    state: GroupState
    protocol_type: str
    protocol_name: str
    members: tuple[DescribedMember, ...]


@dataclass(frozen=True, slots=True)
class ListedGroup:
    """A group of either kind in a list."""

    group_id: str
    state: str
    protocol_type: str
    group_type: str


class GroupCoordinator:
    """Every group whose partition of `__consumer_offsets` this broker leads."""

    def __init__(
        self,
        *,
        clock: Clock,
        settings: GroupSettings,
        state_topic: StateTopic,
        surroundings: Surroundings = _NO_SURROUNDINGS,
    ) -> None:
        self.settings = settings
        self._surroundings = surroundings
        self._clock = clock
        self._topic = state_topic
        self._shards: dict[int, Shard] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._chores: set[asyncio.Task[None]] = set()
        self._closed = False
        self._is_expiring = False

    def __repr__(self) -> str:
        groups = sum(len(shard.groups) + len(shard.modern.groups) for shard in self._shards.values())
        return f"<group coordinator of {len(self._shards)} partitions, {groups} groups>"

    # Life

    def begin_closing(self) -> None:
        """Answer everybody who waits with NOT_COORDINATOR, and nobody any more."""
        self._closed = True
        for index in list(self._shards):
            self.partition_lost(index)
        for chore in self._chores:
            chore.cancel()

    async def stop(self) -> None:
        """Return when nothing of the coordinator runs any more; what is in the log is safe there."""
        self.begin_closing()
        await asyncio.gather(*self._chores, return_exceptions=True)

    def partition_became_leader(self, index: int) -> None:
        """This broker leads a partition of the offsets topic: load it. A new epoch begins anew."""
        epoch = self._topic.leader_epoch(index)
        current = self._shards.get(index)
        if self._closed or epoch is None or (current is not None and current.leader_epoch == epoch):
            return
        self.partition_lost(index)
        if not self._is_expiring:
            self._is_expiring = True
            self._chore(self._expire_for_ever())
        shard = Shard(
            index,
            epoch,
            topic=self._topic,
            settings=self.settings,
            clock=self._clock,
            surroundings=self._surroundings,
        )
        self._shards[index] = shard
        self._tasks[index] = asyncio.get_running_loop().create_task(shard.run(), name=f"group shard {index}")

    def partition_lost(self, index: int) -> None:
        """Another broker leads the partition, or nobody does: its groups are not ours any more."""
        shard = self._shards.pop(index, None)
        if shard is not None:
            shard.close()
            task = self._tasks.pop(index)
            task.cancel()
            self._chores.add(task)
            task.add_done_callback(self._chores.discard)

    async def loaded(self) -> None:
        """Return when no partition is loading any more."""
        for shard in list(self._shards.values()):
            await shard.loaded.wait()

    def topics_deleted(self, topics: Mapping[str, uuid.UUID]) -> None:
        """Forget the offsets of topics that are gone; the tombstones are written in the background."""
        for shard in self._shards.values():
            if shard.state is ShardState.ACTIVE:
                self._chore(self._forget_topics(shard, dict(topics)))

    def partition_for(self, group_id: str) -> int:
        """Where a group's state is kept."""
        return self._topic.partition_for(group_id)

    # Membership

    async def join(self, group_id: str, request: JoinRequest) -> JoinResult:
        """JoinGroup; returns when the rebalance has a result. Cancellation leaves the member in the group."""
        shard = self._shard(group_id, needs_name=True)
        timeout_ms = request.session_timeout_ms
        if not self.settings.min_session_timeout_ms <= timeout_ms <= self.settings.max_session_timeout_ms:
            return JoinResult(ErrorCode.INVALID_SESSION_TIMEOUT, request.member_id)
        if request.member_id == NO_MEMBER_ID:
            stem = request.client_id if request.instance_id is None else request.instance_id
            request = replace(request, new_member_id=f"{stem[:MAX_MEMBER_ID_STEM]}-{uuid.uuid4()}")
        return await shard.join(group_id, request)

    async def sync(self, group_id: str, request: SyncRequest) -> SyncResult:
        """SyncGroup; returns with the leader's assignment. Cancellation leaves the member in the group."""
        return await self._shard(group_id, needs_name=True).sync(group_id, request)

    def heartbeat(self, group_id: str, member_id: str, instance_id: str | None, generation: int) -> ErrorCode:
        """Heartbeat. While the group is loading everything is assumed to be well, as Kafka does."""
        try:
            shard = self._shard(group_id, needs_name=True)
        except ApiError as error:
            return ErrorCode.NONE if error.code is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS else error.code
        return shard.heartbeat(group_id, member_id, instance_id, generation)

    def leave(self, group_id: str, requests: Sequence[LeaveRequest]) -> list[LeaveResult]:
        """LeaveGroup, one result per member."""
        return self._shard(group_id, needs_name=True).leave(group_id, requests)

    async def modern_heartbeat(self, group_id: str, request: ModernHeartbeat) -> HeartbeatResult:
        """ConsumerGroupHeartbeat; returns when what it changed is durable."""
        if not group_id:
            raise ApiError(ErrorCode.INVALID_REQUEST, "a group needs an id")
        shard = self._shard(group_id)
        if not request.member_id and not request.needs_member_id:
            request = replace(request, member_id=str(uuid.uuid4()))
        return await shard.modern.heartbeat(group_id, request)

    # Offsets

    async def commit(
        self,
        group_id: str,
        offsets: Sequence[OffsetToCommit],
        *,
        member_id: str = NO_MEMBER_ID,
        instance_id: str | None = None,
        generation: int = -1,
        retention_ms: int = -1,
        has_member_epochs: bool = True,
    ) -> list[ErrorCode]:
        """Commit offsets; one error per offset, in their order. Returns when they are durable and visible.

        `has_member_epochs` says that the client could send an epoch of KIP-848 as generation (OffsetCommit v9).
        Cancellation does not take a commit back. ApiError: the request as a whole is refused.
        """
        shard = self._shard(group_id)
        check = shard.check_commit(group_id, member_id, instance_id, generation, has_member_epochs=has_member_epochs)
        limit = self.settings.offset_metadata_max_bytes
        errors = [
            ErrorCode.OFFSET_METADATA_TOO_LARGE
            if len(offset.metadata) > limit
            else check(offset.topic_id, offset.partition)
            for offset in offsets
        ]
        accepted = [offset for offset, error in zip(offsets, errors, strict=True) if error is ErrorCode.NONE]
        if accepted:
            expire_ms = (
                NO_TIMESTAMP if retention_ms < 0 else min(self._clock.wall_ms() + retention_ms, MAX_TIMESTAMP_MS)
            )
            await shard.commit(group_id, accepted, expire_ms)
        return errors

    async def fetch_offsets(
        self,
        group_id: str,
        *,
        require_stable: bool = False,
        member_id: str | None = None,
        member_epoch: int = -1,
    ) -> TopicOffsets:
        """What the group has committed, by topic and partition; a view to be read before the next await.

        With `require_stable` commits that are on their way are waited for. A member of a KIP-848 group that names
        itself must be in its current epoch.
        """
        shard = self._shard(group_id)
        group = shard.modern.groups.get(group_id)
        if group is not None:
            check_fetch(group, member_id, member_epoch)
        if require_stable:
            try:
                await shard.settled()
            except ApiError as error:
                # Consumers before 3.9 retry this code, but not the one that a commit would get.
                raise ApiError(ErrorCode.NOT_COORDINATOR, error.message) from error
            shard = self._shard(group_id)
        return shard.offsets.of_group(group_id)

    async def delete_offsets(
        self, group_id: str, partitions: Sequence[tuple[str, int]]
    ) -> dict[tuple[str, int], ErrorCode]:
        """Delete committed offsets of topics that no member subscribes to; one error per partition."""
        shard = self._shard(group_id, needs_name=True)
        group: ClassicGroup | ModernGroup | None = shard.modern.groups.get(group_id) or shard.groups.get(group_id)
        if group is None or group.state is GroupState.DEAD:
            raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND, f"group {group_id} not found")
        if isinstance(group, ClassicGroup) and group.state is not GroupState.EMPTY and not group.uses_consumer_protocol:
            raise ApiError(ErrorCode.NON_EMPTY_GROUP, f"group {group_id} has members")
        results = {
            (topic, partition): (
                ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC if group.is_subscribed_to(topic) else ErrorCode.NONE
            )
            for topic, partition in partitions
        }
        held = shard.offsets.of_group(group_id)
        gone = [
            (topic, partition)
            for (topic, partition), error in results.items()
            if error is ErrorCode.NONE and partition in held.get(topic, {})
        ]
        if gone:
            await shard.remove_offsets(group_id, gone)
        return results

    # Administration

    def describe(self, group_id: str) -> DescribedGroup | None:
        """The classic group, or None where there is none."""
        group = self._shard(group_id).groups.get(group_id)
        return None if group is None else _described(group)

    def describe_modern(self, group_id: str) -> ModernGroup | None:
        """The KIP-848 group, to be read and not kept, or None where there is none."""
        return self._shard(group_id, needs_name=True).modern.groups.get(group_id)

    def list_groups(
        self, states: Collection[str] = (), types: Collection[str] = ()
    ) -> tuple[ErrorCode, list[ListedGroup]]:
        """The groups of this broker in any of `states` and of any of `types` (none named: all).

        While a partition is still loading the list is incomplete, and the error says so.
        """
        if self._closed:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE, []
        wanted_states = {state.strip().lower() for state in states}
        wanted_types = {kind.strip().lower() for kind in types}
        error = ErrorCode.NONE
        found: list[ListedGroup] = []
        for shard in self._shards.values():
            if shard.state is ShardState.LOADING:
                error = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
            if shard.state is ShardState.ACTIVE:
                found += [
                    ListedGroup(group.group_id, group.state.value, group.protocol_type or "", CLASSIC_TYPE)
                    for group in shard.groups.values()
                ]
                found += [
                    ListedGroup(group.group_id, group.state.value, CONSUMER_PROTOCOL_TYPE, CONSUMER_TYPE)
                    for group in shard.modern.groups.values()
                ]
        return error, [
            group
            for group in found
            if (not wanted_types or group.group_type in wanted_types)
            and (not wanted_states or group.state.lower() in wanted_states)
        ]

    async def delete_groups(self, group_ids: Sequence[str]) -> dict[str, ErrorCode]:
        """Delete empty groups and their offsets, durably; one error per group."""
        results = {}
        for group_id in dict.fromkeys(group_ids):
            try:
                await self._shard(group_id).delete_group(group_id)
                results[group_id] = ErrorCode.NONE
            except ApiError as error:
                results[group_id] = error.code
        return results

    # Inside

    def _shard(self, group_id: str, *, needs_name: bool = False) -> Shard:
        """The shard that answers for the group, or the ApiError that says why none does here."""
        if self._closed:
            raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE, "the broker is shutting down")
        if needs_name and not group_id:
            raise ApiError(ErrorCode.INVALID_GROUP_ID, "the group id is empty")
        index = self._topic.partition_for(group_id)
        shard = self._shards.get(index)
        if shard is None or shard.state is ShardState.CLOSED or self._topic.leader_epoch(index) != shard.leader_epoch:
            raise ApiError(ErrorCode.NOT_COORDINATOR, f"this broker does not coordinate group {group_id}")
        if shard.state is ShardState.LOADING:
            raise ApiError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, "the groups of this partition are being loaded")
        return shard

    def _chore(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    async def _expire_for_ever(self) -> None:
        while True:
            await self._clock.sleep(self.settings.offsets_retention_check_interval_ms / 1000)
            for shard in list(self._shards.values()):
                if shard.state is ShardState.ACTIVE:
                    await self._expire(shard)

    async def _expire(self, shard: Shard) -> None:
        try:
            await shard.expire()
        except ApiError as error:
            log.warning("expired offsets of %r stay for now: %s", shard, error)
        except Exception:
            log.exception("expired offsets of %r stay", shard)

    async def _forget_topics(self, shard: Shard, topics: dict[str, uuid.UUID]) -> None:
        try:
            await shard.forget_topics(topics)
        except ApiError as error:
            log.warning("offsets of deleted topics stay in %r: %s", shard, error)


def _described(group: ClassicGroup) -> DescribedGroup:
    is_stable = group.state is GroupState.STABLE
    return DescribedGroup(
        group_id=group.group_id,
        state=group.state,
        protocol_type=group.protocol_type or "",
        protocol_name=(group.protocol_name or "") if is_stable else "",
        members=tuple(
            DescribedMember(
                member_id=member.member_id,
                instance_id=member.instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                metadata=member.metadata(group.protocol_name) if is_stable else b"",
                assignment=member.assignment,
            )
            for member in group.members.values()
        ),
    )
