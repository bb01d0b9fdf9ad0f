"""The committed offsets of one shard, whatever kind of group they belong to: committed, read, removed, expired.

A commit is appended at once and visible when it is durable, in the order of the log. Whether somebody may commit is
asked of the group (`check_commit` of the shard) by whoever calls `commit`. Groups and offsets need each other twice:
offsets of a group that nobody knows make a simple group, which ends with its last offset; and a group that is deleted
or has expired takes its offsets along.

Invariants of transactions (KIP-98, KIP-447)
- An offset of a transaction is pending, and nobody reads it, until the commit marker of its producer in this partition
  of the log is durable. An abort marker drops it.
- Of several commits for a partition, in transactions or not, the one counts whose record lies last in the log: a
  pending offset that a marker makes visible does not replace one whose record lies behind it. Compaction keeps the last
  record, so that a log means the same before and after it, wherever the markers are.
- Memory is what a replay of the log gives, at every marker, and so is what is pending.
- A tombstone drops what is pending for its partition, too: offsets of a deleted group or topic do not come back.
- While an offset is pending neither that partition's offset nor the group expires.

Owner: the shard, on whose loop everything runs. Not here: the maps (`committed`, `pending`), the rules by which offsets
expire (`expiry`), bytes (`records`), who writes markers (`handlers.markers`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, KeysView, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Final, Protocol
from uuid import UUID

from millrace.errors import ErrorCode
from millrace.groups.counting import GroupCounts
from millrace.groups.offsets.committed import CommittedOffset, CommittedOffsets, OffsetToCommit, Slot, TopicOffsets
from millrace.groups.offsets.pending import GroupPartition, PendingOffsets
from millrace.groups.offsets.records import OffsetRecord, offset_key, offset_value
from millrace.model import NO_EPOCH, NO_TIMESTAMP, ZERO_UUID
from millrace.replication.state_topic import Entry, Transaction, yield_to_loop

_TOMBSTONES_PER_BATCH: Final = 1_000
_EXPIRED_PER_SLICE: Final = 200


class Host(Protocol):
    """The shard, as far as it is needed here."""

    @property
    def is_active(self) -> bool: ...

    def now_ms(self) -> int: ...

    def append(
        self,
        entries: Sequence[Entry],
        apply: Callable[[int], None],
        *,
        too_large: ErrorCode,
        transaction: Transaction | None = None,
    ) -> asyncio.Future[None]:
        """Append now, apply when durable; ApiError where the log refuses."""

    async def in_time(self, done: asyncio.Future[None]) -> None:
        """Wait for an append; ApiError where it does not become durable in time."""

    async def wait_applied(self) -> None:
        """Wait for every append so far."""

    def offsets_came(self, group_id: str) -> None:
        """The group has offsets now, or pending ones: if nobody knows it, it is a simple group."""

    def offsets_went(self, group_id: str) -> None:
        """The group has no offsets any more, nor pending ones: a simple group ends with them."""


class Committers(Protocol):
    """The groups of one kind, as far as the expiry of their offsets is concerned."""

    @property
    def groups(self) -> Mapping[str, object]: ...

    def expired_offsets(self, group_id: str, held: TopicOffsets) -> list[Slot] | None:
        """Which of the group's offsets have outlived their retention; None where the group is gone."""

    def is_idle(self, group_id: str) -> bool:
        """Whether nothing but its offsets keeps the group."""

    def end(self, group_id: str) -> asyncio.Future[None] | None:
        """Write that the group is gone; None where nothing of it is in the log. ApiError where the log refuses."""


class GroupOffsets:
    """The committed offsets of every group of one shard."""

    def __init__(self, host: Host, counts: GroupCounts | None = None) -> None:
        self._counts = counts or GroupCounts()
        self.committed = CommittedOffsets()
        """What is durable and visible."""
        self.pending = PendingOffsets()
        """What is durable, and visible when its transaction is committed."""
        self._host = host
        self._under_way: Counter[str] = Counter()
        """Commits of each group that are not durable yet: their offsets must not expire by what they replace."""

    def __repr__(self) -> str:
        return f"GroupOffsets({self.committed.count}, {self.pending!r}, {len(self._under_way)} groups commit)"

    def of_group(self, group_id: str) -> TopicOffsets:
        """Everything the group has committed, by topic and partition; a view, valid until the next change."""
        return self.committed.of_group(group_id)

    def pending_of_group(self, group_id: str) -> KeysView[Slot]:
        """The partitions of which an open transaction has committed an offset; a view, valid until the next change."""
        return self.pending.of_group(group_id)

    def has_any(self, group_id: str) -> bool:
        """Whether the group has offsets, or pending ones."""
        return bool(self.of_group(group_id) or self.pending_of_group(group_id))

    def replay(self, record: OffsetRecord) -> None:
        """Apply one record of the log."""
        if record.value is None:
            self._remove(record.group_id, record.topic, record.partition)
        else:
            self._put(record.group_id, record.topic, record.partition, record.value)

    def replay_pending(self, record: OffsetRecord, producer_id: int) -> None:
        """Apply one record of a transaction that is still open."""
        if record.value is not None:
            self._put_pending(
                producer_id, GroupPartition(record.group_id, record.topic, record.partition), record.value
            )

    # Requests

    async def commit(
        self,
        group_id: str,
        commits: Sequence[OffsetToCommit],
        expire_timestamp_ms: int = NO_TIMESTAMP,
        transaction: Transaction | None = None,
    ) -> None:
        """Make offsets durable, then visible, or pending where they are part of a transaction.

        ApiError: they may or may not become so. Cancellation stops neither.
        """
        now_ms = self._host.now_ms()
        # A record that carries an expiry of its own has no room for the epoch and the topic's id.
        has_expiry = expire_timestamp_ms != NO_TIMESTAMP
        values = [
            CommittedOffset(
                offset=commit.offset,
                leader_epoch=NO_EPOCH if has_expiry else commit.leader_epoch,
                metadata=commit.metadata,
                commit_timestamp_ms=now_ms,
                expire_timestamp_ms=expire_timestamp_ms,
                topic_id=ZERO_UUID if has_expiry else commit.topic_id,
            )
            for commit in commits
        ]

        def apply(base_offset: int) -> None:
            for offset, (commit, value) in enumerate(zip(commits, values, strict=True), base_offset):
                committed = replace(value, record_offset=offset)
                if transaction is None:
                    self._put(group_id, commit.topic, commit.partition, committed)
                else:
                    place = GroupPartition(group_id, commit.topic, commit.partition)
                    self._put_pending(transaction.producer_id, place, committed)
            self._counts.offset_commits += len(commits)
            self._commit_ended(group_id)

        entries = [
            (offset_key(group_id, commit.topic, commit.partition), offset_value(value))
            for commit, value in zip(commits, values, strict=True)
        ]
        done = self._append(entries, apply, transaction)
        self._under_way[group_id] += 1
        await self._host.in_time(done)

    def _commit_ended(self, group_id: str) -> None:
        self._under_way[group_id] -= 1
        if not self._under_way[group_id]:
            del self._under_way[group_id]

    def end_transaction(self, producer_id: int, marker_offset: int, *, committed: bool) -> None:
        """The marker at `marker_offset` is durable: what its transaction has committed becomes visible, or is dropped.

        A marker that was taken into account before does nothing.
        """
        for place, pending in self.pending.end(producer_id, marker_offset):
            group_id, topic, partition = place
            known = self.of_group(group_id).get(topic, {}).get(partition)
            if committed and (known is None or known.record_offset < pending.record_offset):
                self.committed.put(group_id, topic, partition, pending)
            self._tell_if_none(group_id)

    async def remove(self, group_id: str, gone: Sequence[Slot]) -> None:
        """Delete committed offsets, and what is pending for the same partitions, durably."""
        await self._all_in_time(self._tombstones(group_id, gone))

    async def end_group(self, kind: Committers, group_id: str) -> None:
        """Delete a group with everything it has committed, in open transactions too, durably."""
        held = self.of_group(group_id)
        gone = dict.fromkeys((topic, each) for topic, partitions in held.items() for each in partitions)
        gone.update(dict.fromkeys(self.pending_of_group(group_id)))
        await self._end(kind, group_id, list(gone))

    # Chores

    async def forget_topics(self, topics: Mapping[str, UUID]) -> None:
        """Delete every group's offsets of topics that are gone, as far as they were committed for those topics."""
        await self._host.wait_applied()
        for topic, topic_id in topics.items():
            partitions: dict[str, dict[Slot, None]] = {}
            for group_id, partition, committed in chain(self.committed.of_topic(topic), self.pending.of_topic(topic)):
                if committed.belongs_to(topic_id):
                    partitions.setdefault(group_id, {})[topic, partition] = None
            for group_id, gone in partitions.items():
                await self.remove(group_id, list(gone))

    async def expire(self, kind: Committers) -> None:
        """Delete offsets that have outlived their retention, and groups that have neither members nor offsets left."""
        for count, group_id in enumerate(list(kind.groups), 1):
            if not self._host.is_active:
                return
            if group_id not in self._under_way:
                await self._expire_group(kind, group_id)
            if count % _EXPIRED_PER_SLICE == 0:
                await yield_to_loop()

    async def _expire_group(self, kind: Committers, group_id: str) -> None:
        held = self.of_group(group_id)
        gone = kind.expired_offsets(group_id, held)
        if gone is None:
            return
        pending = self.pending_of_group(group_id)
        gone = [slot for slot in gone if slot not in pending]
        if kind.is_idle(group_id) and not pending and len(gone) == sum(map(len, held.values())):
            await self._end(kind, group_id, gone)
        elif gone:
            await self.remove(group_id, gone)

    # Inside

    async def _end(self, kind: Committers, group_id: str, gone: Sequence[Slot]) -> None:
        pending = self._tombstones(group_id, gone)
        ended = kind.end(group_id)
        await self._all_in_time(pending if ended is None else [*pending, ended])

    def _tombstones(self, group_id: str, gone: Sequence[Slot]) -> list[asyncio.Future[None]]:
        """Append the removal of offsets, all of it without a wait.

        Otherwise a commit could slip in between the decision and its tombstone, and be lost.
        """
        pending: list[asyncio.Future[None]] = []
        for start in range(0, len(gone), _TOMBSTONES_PER_BATCH):
            part = gone[start : start + _TOMBSTONES_PER_BATCH]

            def apply(_: int, part: Sequence[Slot] = part) -> None:
                for topic, partition in part:
                    self._remove(group_id, topic, partition)

            pending.append(
                self._append([(offset_key(group_id, topic, partition), None) for topic, partition in part], apply)
            )
        return pending

    def _append(
        self, entries: Sequence[Entry], apply: Callable[[int], None], transaction: Transaction | None = None
    ) -> asyncio.Future[None]:
        too_large = ErrorCode.INVALID_COMMIT_OFFSET_SIZE
        return self._host.append(entries, apply, too_large=too_large, transaction=transaction)

    async def _all_in_time(self, pending: Sequence[asyncio.Future[None]]) -> None:
        for done in pending:
            await self._host.in_time(done)

    def _put(self, group_id: str, topic: str, partition: int, committed: CommittedOffset) -> None:
        self._host.offsets_came(group_id)
        self.committed.put(group_id, topic, partition, committed)

    def _put_pending(self, producer_id: int, place: GroupPartition, committed: CommittedOffset) -> None:
        self._host.offsets_came(place.group_id)
        self.pending.put(producer_id, place, committed)

    def _remove(self, group_id: str, topic: str, partition: int) -> None:
        self.committed.remove(group_id, topic, partition)
        self.pending.withdraw(GroupPartition(group_id, topic, partition))
        self._tell_if_none(group_id)

    def _tell_if_none(self, group_id: str) -> None:
        if not self.has_any(group_id):
            self._host.offsets_went(group_id)
