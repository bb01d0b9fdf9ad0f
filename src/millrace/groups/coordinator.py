"""The group coordinator of a broker: which shard answers for a group, and whether it may.

Owner of the shards and of their tasks. Handlers call it; every failure that concerns a whole request is an ApiError.
Not here: how shards come and go (`replication.sharded`), the kinds of groups and their offsets
(`shard`), requests and responses (`handlers.groups`, `handlers.consumer_groups`, `handlers.share_groups`,
`handlers.group_offsets`, `handlers.transaction_offsets`, `handlers.share_offsets`).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, KeysView, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from millrace.clock import Clock
from millrace.errors import ApiError, ErrorCode
from millrace.groups.classic.effects import (
    NO_MEMBER_ID,
    JoinRequest,
    JoinResult,
    LeaveRequest,
    LeaveResult,
    SyncRequest,
    SyncResult,
)
from millrace.groups.classic.group import ClassicGroup, GroupState
from millrace.groups.counting import GroupCounts
from millrace.groups.environment import HeartbeatResult
from millrace.groups.modern.group import ModernGroup
from millrace.groups.modern.groups import GroupDependencies
from millrace.groups.modern.protocol import ModernHeartbeat, check_fetch
from millrace.groups.offsets.committed import OffsetToCommit, PartitionCheck, Slot, TopicOffsets
from millrace.groups.settings import GroupSettings
from millrace.groups.shard import GroupShard
from millrace.groups.share.group import ShareGroup
from millrace.groups.share.groups import ShareGroupDependencies
from millrace.groups.share.partitions import Deletion
from millrace.groups.share.protocol import ShareHeartbeat
from millrace.groups.share.records import NO_TOPICS, Topics
from millrace.groups.subscription import CONSUMER_PROTOCOL_TYPE
from millrace.model import NO_TIMESTAMP
from millrace.replication.sharded import WRITE_ERRORS, ShardedCoordinator, ShardState
from millrace.replication.state_topic import StateTopic, Transaction
from millrace.tasks import Work

logger = logging.getLogger(__name__)

CLASSIC_TYPE = "classic"
CONSUMER_TYPE = "consumer"
SHARE_TYPE = "share"
_NO_DEPENDENCIES = GroupDependencies()
_NO_SHARE_SURROUNDINGS = ShareGroupDependencies()
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
    """A group of any kind in a list."""

    group_id: str
    state: str
    protocol_type: str
    group_type: str


class ProducerOfTransaction(Protocol):
    """Who commits offsets in a transaction."""

    @property
    def producer_id(self) -> int: ...

    @property
    def producer_epoch(self) -> int: ...

    @property
    def bumps_epoch(self) -> bool:
        """Whether every transaction of it has an epoch of its own (KIP-890)."""

    async def admit(self, topic: str, partition: int) -> None:
        """Have its coordinator agree that the partition is part of the transaction; ApiError where it does not."""


class GroupCoordinator(ShardedCoordinator[GroupShard]):
    """Every group whose partition of `__consumer_offsets` this broker leads."""

    def __init__(
        self,
        *,
        clock: Clock,
        settings: GroupSettings,
        state_topic: StateTopic,
        dependencies: GroupDependencies = _NO_DEPENDENCIES,
        share: ShareGroupDependencies = _NO_SHARE_SURROUNDINGS,
    ) -> None:
        super().__init__(state_topic, clock)
        self.settings = settings
        self.counts = GroupCounts()
        self._dependencies = dependencies
        self._share = share

    def __repr__(self) -> str:
        groups = sum(
            len(shard.classic.groups) + len(shard.modern.groups) + len(shard.share.groups)
            for shard in self._shards.values()
        )
        return f"GroupCoordinator({len(self._shards)} partitions, {groups} groups)"

    def _make_shard(self, index: int, leader_epoch: int) -> GroupShard:
        return GroupShard(
            index,
            leader_epoch,
            topic=self._topic,
            settings=self.settings,
            clock=self._clock,
            dependencies=self._dependencies,
            share=self._share,
            counts=self.counts,
        )

    def _housekeeping(self) -> Mapping[str, Work]:
        return {"offset expiry": self._expire_for_ever}

    @property
    def shards(self) -> Sequence[GroupShard]:
        """What is coordinated here and loaded: for who looks at it and changes nothing."""
        return self._active()

    def topics_deleted(self, topics: Mapping[str, uuid.UUID]) -> None:
        """Forget the offsets of topics that are gone; the tombstones are written in the background."""
        for shard in self._active():
            self._chore("offsets of deleted topics", self._forget_topics(shard, dict(topics)))

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
        if group_id in shard.share:
            return JoinResult(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, request.member_id)
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
        _check_not_shared(shard, group_id)
        if not request.member_id and not request.needs_member_id:
            request = replace(request, member_id=str(uuid.uuid4()))
        return await shard.modern.heartbeat(group_id, request)

    async def share_heartbeat(self, group_id: str, request: ShareHeartbeat) -> HeartbeatResult:
        """ShareGroupHeartbeat; returns when what it changed is durable."""
        if not group_id:
            raise ApiError(ErrorCode.INVALID_REQUEST, "a group needs an id")
        return await self._shard(group_id).share.heartbeat(group_id, request)

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
        _check_not_shared(shard, group_id)
        check = shard.check_commit(group_id, member_id, instance_id, generation, has_member_epochs=has_member_epochs)
        errors, accepted = self._judge(offsets, check)
        if accepted:
            expire_ms = (
                NO_TIMESTAMP if retention_ms < 0 else min(self._clock.wall_ms() + retention_ms, MAX_TIMESTAMP_MS)
            )
            await shard.offsets.commit(group_id, accepted, expire_ms)
        return errors

    async def commit_in_transaction(
        self,
        group_id: str,
        offsets: Sequence[OffsetToCommit],
        producer: ProducerOfTransaction,
        *,
        member_id: str = NO_MEMBER_ID,
        instance_id: str | None = None,
        generation: int = -1,
    ) -> list[ErrorCode]:
        """Commit offsets as part of a transaction; one error per offset, in their order. Returns when they are durable.

        They become visible when the transaction is committed (`transaction_ended`). Before the first of a transaction
        its coordinator is asked, by `producer`. Cancellation does not take a commit back. ApiError: the request as a
        whole is refused.
        """
        index = self._shard(group_id, needs_name=True).index
        transaction = await self._admitted(index, producer)
        # Somebody else may coordinate the group by now; a guard of another leadership would not be accepted.
        shard = self._shard(group_id)
        _check_not_shared(shard, group_id)
        check = shard.check_transactional_commit(group_id, member_id, instance_id, generation)
        errors, accepted = self._judge(offsets, check)
        if accepted:
            await shard.offsets.commit(group_id, accepted, transaction=transaction)
        return errors

    async def _admitted(self, index: int, producer: ProducerOfTransaction) -> Transaction:
        """The producer's transaction, once its coordinator has agreed to this partition of the topic."""
        try:
            verification = self._topic.begin_verification(
                index, producer.producer_id, producer.producer_epoch, bumps_epoch=producer.bumps_epoch
            )
        except ApiError as error:
            raise ApiError(WRITE_ERRORS.get(error.code, error.code), error.message) from error
        if verification is not None:
            await producer.admit(self._topic.name, index)
        return Transaction(producer.producer_id, producer.producer_epoch, verification)

    def transaction_ended(self, partition_index: int, producer_id: int, committed: bool, offset: int) -> None:
        """A marker was written to a partition of the topic, at `offset`: offsets become visible, or are dropped.

        To be told when the marker is appended, or at the latest when it is committed and before that is answered: the
        producer's next transaction must not begin here before. It takes effect in the order of the log.
        """
        shard = self._shards.get(partition_index)
        if shard is not None:  # else whoever loads the partition next finds the marker
            shard.transaction_ended(producer_id, offset, committed=committed)

    def unstable_offsets(self, group_id: str) -> KeysView[Slot]:
        """The partitions of which an open transaction has committed an offset; a view to be read before the next await.

        `fetch_offsets` with `require_stable` has waited for what may change it.
        """
        return self._shard(group_id).offsets.pending_of_group(group_id)

    async def fetch_offsets(
        self,
        group_id: str,
        *,
        require_stable: bool = False,
        member_id: str | None = None,
        member_epoch: int = -1,
    ) -> TopicOffsets:
        """What the group has committed, by topic and partition; a view to be read before the next await.

        With `require_stable` commits that are on their way are waited for; what open transactions have committed is
        named by `unstable_offsets`. A member of a KIP-848 group that names
        itself must be in its current epoch.
        """
        shard = self._shard(group_id)
        group = shard.modern.groups.get(group_id)
        if group is not None:
            check_fetch(group, member_id, member_epoch)
        if require_stable:
            try:
                await shard.wait_applied()
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
        group = shard.committer(group_id)
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
        held, pending = shard.offsets.of_group(group_id), shard.offsets.pending_of_group(group_id)
        gone = [
            (topic, partition)
            for (topic, partition), error in results.items()
            if error is ErrorCode.NONE and (partition in held.get(topic, {}) or (topic, partition) in pending)
        ]
        if gone:
            await shard.offsets.remove(group_id, gone)
        return results

    # The share-partitions of share groups

    def share_partitions_of(self, group_id: str) -> Topics:
        """The share-partitions that members of a share group may read; none where there is no such group."""
        group = self._shard(group_id, needs_name=True).share.groups.get(group_id)
        return NO_TOPICS if group is None else group.partitions.initialized

    async def set_share_offsets(
        self, group_id: str, offsets: Mapping[tuple[uuid.UUID, int], int]
    ) -> dict[tuple[uuid.UUID, int], ApiError]:
        """Begin share-partitions anew at these offsets, durably; what failed. ApiError: nothing was begun."""
        return await self._shard(group_id, needs_name=True).share.set_offsets(group_id, offsets)

    async def delete_share_offsets(
        self, group_id: str, topics: Sequence[str]
    ) -> tuple[Deletion, dict[uuid.UUID, ApiError]]:
        """Forget the share-partitions of topics, durably; what there was of them, and what failed."""
        return await self._shard(group_id, needs_name=True).share.delete_offsets(group_id, topics)

    # Administration

    def describe(self, group_id: str) -> DescribedGroup | None:
        """The classic group, or None where there is none."""
        group = self._shard(group_id).classic.groups.get(group_id)
        return None if group is None else _described(group)

    def describe_modern(self, group_id: str) -> ModernGroup | None:
        """The KIP-848 group, to be read and not kept, or None where there is none."""
        return self._shard(group_id, needs_name=True).modern.groups.get(group_id)

    def describe_share(self, group_id: str) -> ShareGroup | None:
        """The share group, to be read and not kept, or None where there is none."""
        return self._shard(group_id, needs_name=True).share.groups.get(group_id)

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
                    for group in shard.classic.groups.values()
                ]
                found += [
                    ListedGroup(group.group_id, group.state.value, CONSUMER_PROTOCOL_TYPE, CONSUMER_TYPE)
                    for group in shard.modern.groups.values()
                ]
                found += [
                    ListedGroup(group.group_id, group.state.value, SHARE_TYPE, SHARE_TYPE)
                    for group in shard.share.groups.values()
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

    def _judge(
        self, offsets: Sequence[OffsetToCommit], check: PartitionCheck
    ) -> tuple[list[ErrorCode], list[OffsetToCommit]]:
        """An error for each offset of a commit, and those that have none."""
        limit = self.settings.offset_metadata_max_bytes
        errors = [
            ErrorCode.OFFSET_METADATA_TOO_LARGE
            if len(offset.metadata) > limit
            else check(offset.topic_id, offset.partition)
            for offset in offsets
        ]
        return errors, [offset for offset, error in zip(offsets, errors, strict=True) if error is ErrorCode.NONE]

    def _shard(self, group_id: str, *, needs_name: bool = False) -> GroupShard:
        """The shard that answers for the group, or the ApiError that says why none does here."""
        if needs_name and not group_id and not self._closed:
            raise ApiError(ErrorCode.INVALID_GROUP_ID, "the group id is empty")
        return self._answering(self._topic.partition_for(group_id), f"group {group_id}")

    async def _expire_for_ever(self) -> None:
        while True:
            await self._clock.sleep(self.settings.offsets_retention_check_interval_ms / 1000)
            for shard in self._active():
                await self._expire(shard)

    async def _expire(self, shard: GroupShard) -> None:
        try:
            await shard.expire()
        except ApiError as error:
            logger.warning("expired offsets of %r stay for now: %s", shard, error)
        except Exception:
            logger.exception("expired offsets of %r stay", shard)

    async def _forget_topics(self, shard: GroupShard, topics: dict[str, uuid.UUID]) -> None:
        try:
            await shard.forget_topics(topics)
        except ApiError as error:
            logger.warning("offsets of deleted topics stay in %r: %s", shard, error)


def _check_not_shared(shard: GroupShard, group_id: str) -> None:
    """ApiError where a group that was to be a consumer group is a share group."""
    if group_id in shard.share:
        raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND, f"{group_id} is no consumer group")


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
