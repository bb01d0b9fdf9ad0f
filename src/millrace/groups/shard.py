"""One led partition of `__consumer_offsets`: its groups, their offsets, and the order in which changes take effect.

Everything that must survive goes through `_write`: the records are appended at once, and their meaning is applied when
they are durable, strictly in the order of the log. So what is in memory is always what a replay would give, a reader
never sees what could still be lost, and a client that hung up does not stop its commit from taking effect.

A group is classic (`groups`), of KIP-848 (`modern`) or a share group (`share`); offsets are kept alike for the first
two, and share groups have none here.

Owner: the shard's task (`run`), which loads, then confirms writes, until it is closed. All methods are called on the
loop. Not here: which shard a group belongs to and whether it may answer (`coordinator`), decisions (`classic`,
`offsets`), KIP-848 groups (`modern_shard`), share groups (`share_shard`), bytes (`records`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final
from uuid import UUID

from millrace.clock import Clock
from millrace.errors import ApiError, ErrorCode, ProtocolError, StorageError
from millrace.groups import records
from millrace.groups.classic import protocol as classic
from millrace.groups.classic.effects import (
    NO_MEMBER_ID,
    AnswerJoin,
    AnswerSync,
    CancelTimer,
    Effect,
    JoinRequest,
    JoinResult,
    LeaveRequest,
    LeaveResult,
    SetTimer,
    Store,
    StoredGroup,
    SyncRequest,
    SyncResult,
    TimerKey,
    TimerKind,
)
from millrace.groups.classic.group import ClassicGroup, GroupState
from millrace.groups.modern.groups import ModernGroups, Surroundings
from millrace.groups.modern.protocol import PartitionCheck
from millrace.groups.offsets import committed as offsets
from millrace.groups.offsets.committed import CommittedOffset, CommittedOffsets
from millrace.groups.settings import GroupSettings
from millrace.groups.share.groups import ShareGroups, ShareSurroundings
from millrace.groups.share.records import ShareRecord
from millrace.groups.timers import Timers
from millrace.model import NO_EPOCH, NO_TIMESTAMP, ZERO_UUID
from millrace.replication.sharded import WRITE_ERRORS, ShardState
from millrace.replication.state_topic import Entry, StateTopic, breathe

log = logging.getLogger(__name__)

_TOMBSTONES_PER_BATCH: Final = 1_000
_LOADED_PER_SLICE: Final = 1_000
_EXPIRED_PER_SLICE: Final = 200

# What a failed write to the log means to a client of the coordinator.
_WRITE_ERRORS: Final = WRITE_ERRORS | {
    ErrorCode.MESSAGE_TOO_LARGE: ErrorCode.INVALID_COMMIT_OFFSET_SIZE,
    ErrorCode.RECORD_LIST_TOO_LARGE: ErrorCode.INVALID_COMMIT_OFFSET_SIZE,
}


@dataclass(frozen=True, slots=True)
class OffsetToCommit:
    """One partition of an OffsetCommit."""

    topic: str
    partition: int
    topic_id: UUID
    offset: int
    leader_epoch: int
    metadata: str


@dataclass(slots=True)
class _Write:
    """An append that is not durable yet: what it will mean, and whom to tell if it fails."""

    base_offset: int
    last_offset: int
    apply: Callable[[int], None]
    fail: Callable[[ErrorCode], None]


class Shard:
    """The groups of one partition."""

    def __init__(
        self,
        index: int,
        leader_epoch: int,
        *,
        topic: StateTopic,
        settings: GroupSettings,
        clock: Clock,
        surroundings: Surroundings,
        share: ShareSurroundings,
    ) -> None:
        self.index = index
        self.leader_epoch = leader_epoch
        self.state = ShardState.LOADING
        self.loaded = asyncio.Event()
        """Set when the shard is active or closed."""
        self.groups: dict[str, ClassicGroup] = {}
        self.offsets = CommittedOffsets()
        self._topic = topic
        self._settings = settings
        self._clock = clock
        self._timers: Timers[tuple[str, TimerKey]] = Timers(clock, self._timer_fired)
        self.modern = ModernGroups(self, settings=settings, surroundings=surroundings, timers=self._timers)
        self.share = ShareGroups(self, settings=settings, surroundings=share, timers=self._timers, clock=clock)
        self._parked_joins: dict[int, asyncio.Future[JoinResult]] = {}
        self._parked_syncs: dict[int, asyncio.Future[SyncResult]] = {}
        self._next_ticket = 0
        self._writes: deque[_Write] = deque()
        self._written = asyncio.Event()
        self._uncommitted: Counter[str] = Counter()
        """Commits of each group that are not durable yet: their offsets must not expire by what they replace."""

    def __repr__(self) -> str:
        return (
            f"<shard {self.index} epoch {self.leader_epoch} {self.state.value}, {len(self.groups)} classic groups, "
            f"{len(self.modern.groups)} consumer groups, {len(self.share.groups)} share groups, "
            f"{self.offsets.count} offsets, {len(self._writes)} writes under way>"
        )

    # Life

    async def run(self) -> None:
        """Load the partition, then confirm writes until cancelled. Whatever ends that closes the shard."""
        try:
            await self._load()
            self.state = ShardState.ACTIVE
            for group in list(self.groups.values()):
                self.perform(group, classic.loaded(group, self._settings, self.now_ms()))
            self.modern.loaded()
            self.share.loaded()
            self.loaded.set()
            has_groups = self.groups or self.modern.groups or self.share.groups
            log.log(logging.INFO if has_groups else logging.DEBUG, "loaded %r", self)
            await self._confirm_writes()
        finally:
            self.close()
            await self.share.ended()

    def close(self) -> None:
        """Answer everybody who waits with NOT_COORDINATOR, and stop. The task is the coordinator's to cancel."""
        if self.state is ShardState.CLOSED:
            return
        self.state = ShardState.CLOSED
        self.loaded.set()
        self._timers.cancel_all()
        self.share.close()
        for group in self.groups.values():
            self.perform(group, classic.unload(group, ErrorCode.NOT_COORDINATOR, self._settings, self._clock.wall_ms()))
        writes, self._writes = self._writes, deque()
        for write in writes:
            write.fail(ErrorCode.NOT_COORDINATOR)

    async def _load(self) -> None:
        for count, record in enumerate(await self._topic.load(self.index), 1):
            try:
                self.replay(record.key, record.value, record.offset)
            except ProtocolError as error:
                # One record that cannot be read must not take every group of the partition with it.
                log.warning("%s-%d: record %d is unreadable: %s", self._topic.name, self.index, record.offset, error)
            if count % _LOADED_PER_SLICE == 0:
                await breathe()

    def replay(self, key: bytes, value: bytes | None, record_offset: int) -> None:
        """Apply one record of the log."""
        match records.read_record(key, value, record_offset):
            case records.OffsetRecord(group_id, topic, partition, None):
                self._remove_offset(group_id, topic, partition)
            case records.OffsetRecord(group_id, topic, partition, committed) if committed is not None:
                self._put_offset(group_id, topic, partition, committed)
            case records.GroupRecord(group_id, None):
                self.groups.pop(group_id, None)
                self.keep_offsets(group_id)
            case records.GroupRecord(group_id, stored) if stored is not None:
                self.modern.groups.pop(group_id, None)
                self.groups[group_id] = ClassicGroup.from_record(group_id, stored)
            case records.OffsetRecord() | records.GroupRecord() | None:
                pass
            case record if isinstance(record, ShareRecord):
                self.share.replay(record)
            case record:
                self.modern.replay(record)

    def keep_offsets(self, group_id: str) -> None:
        """The group is gone: if it has offsets they are a simple group's from now on."""
        if self.offsets.of_group(group_id) and group_id not in self.modern:
            self.groups[group_id] = ClassicGroup(group_id)

    def knows(self, group_id: str) -> bool:
        """Whether there is a classic or a KIP-848 group with this id."""
        return group_id in self.groups or group_id in self.modern

    # Membership

    async def join(self, group_id: str, request: JoinRequest) -> JoinResult:
        """JoinGroup; waits for the rebalance. Cancellation drops the answer, not the membership."""
        now_ms = self._clock.wall_ms()
        modern_group = self.modern.groups.get(group_id)
        if modern_group is not None:
            if modern_group.members:
                return await self.modern.classic_join(group_id, request)
            if request.member_id == NO_MEMBER_ID:
                # Nobody is in the group: it becomes the newcomer's.
                self.modern.delete(group_id)
        group = self.groups.get(group_id)
        if group is None:
            if request.member_id != NO_MEMBER_ID:
                return JoinResult(ErrorCode.UNKNOWN_MEMBER_ID, request.member_id)
            group = self.groups[group_id] = ClassicGroup(group_id)
        was_simple = group.is_simple
        ticket = self._ticket()
        answer: asyncio.Future[JoinResult] = asyncio.get_running_loop().create_future()
        self._parked_joins[ticket] = answer
        self.perform(group, classic.join(group, request, ticket, self._settings, now_ms))
        if not group.is_idle and was_simple:
            self.perform(group, classic.create(group, now_ms))
        elif group.is_simple and not self.offsets.of_group(group_id):
            del self.groups[group_id]
        return await answer

    async def sync(self, group_id: str, request: SyncRequest) -> SyncResult:
        """SyncGroup; waits for the leader. Cancellation drops the answer, not the membership."""
        if group_id in self.modern:
            return await self.modern.classic_sync(group_id, request)
        group = self.groups.get(group_id)
        if group is None:
            return SyncResult(ErrorCode.UNKNOWN_MEMBER_ID)
        ticket = self._ticket()
        answer: asyncio.Future[SyncResult] = asyncio.get_running_loop().create_future()
        self._parked_syncs[ticket] = answer
        self.perform(group, classic.sync(group, request, ticket, self._settings, self._clock.wall_ms()))
        return await answer

    def heartbeat(self, group_id: str, member_id: str, instance_id: str | None, generation: int) -> ErrorCode:
        """Heartbeat."""
        if group_id in self.modern:
            return self.modern.classic_heartbeat(group_id, member_id, instance_id, generation)
        group = self.groups.get(group_id)
        if group is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        error, effects = classic.heartbeat(group, member_id, instance_id, generation)
        self.perform(group, effects)
        return error

    def leave(self, group_id: str, requests: Sequence[LeaveRequest]) -> list[LeaveResult]:
        """LeaveGroup."""
        if group_id in self.modern:
            return self.modern.classic_leave(group_id, requests)
        group = self.groups.get(group_id)
        if group is None:
            return [LeaveResult(each.member_id, each.instance_id, ErrorCode.UNKNOWN_MEMBER_ID) for each in requests]
        results, effects = classic.leave(group, requests, self._settings, self._clock.wall_ms())
        self.perform(group, effects)
        return results

    # Offsets

    def check_commit(
        self, group_id: str, member_id: str, instance_id: str | None, generation: int, *, has_member_epochs: bool
    ) -> PartitionCheck:
        """What decides on the partitions of a commit; ApiError where these ids may not commit at all."""
        if group_id in self.modern:
            return self.modern.check_commit(group_id, member_id, generation, has_member_epochs=has_member_epochs)
        group = self.groups.get(group_id)
        if group is not None:
            error, effects = classic.check_commit(group, member_id, instance_id, generation)
            self.perform(group, effects)
        elif generation < 0:
            error = ErrorCode.NONE
        else:
            error = ErrorCode.GROUP_ID_NOT_FOUND if has_member_epochs else ErrorCode.ILLEGAL_GENERATION
        if error is not ErrorCode.NONE:
            raise ApiError(error)
        return _accept

    async def commit(self, group_id: str, commits: Sequence[OffsetToCommit], expire_timestamp_ms: int) -> None:
        """Make offsets durable, then visible. ApiError: they may or may not become so. Cancellation stops neither."""
        now_ms = self._clock.wall_ms()
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
            for position, (commit, value) in enumerate(zip(commits, values, strict=True)):
                self._put_offset(
                    group_id, commit.topic, commit.partition, replace(value, record_offset=base_offset + position)
                )
            self._commit_ended(group_id)

        entries = [
            (records.offset_key(group_id, commit.topic, commit.partition), records.offset_value(value))
            for commit, value in zip(commits, values, strict=True)
        ]
        self._uncommitted[group_id] += 1
        await self._in_time(self._write_later(entries, apply, lambda: self._commit_ended(group_id)))

    def _commit_ended(self, group_id: str) -> None:
        self._uncommitted[group_id] -= 1
        if not self._uncommitted[group_id]:
            del self._uncommitted[group_id]

    async def settled(self) -> None:
        """Return when everything written so far is durable and visible (a fetch that requires stable offsets)."""
        if self._writes:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            last = self._writes[-1]
            self._queue(_Write(last.base_offset, last.last_offset, lambda _: _finish(done), lambda e: _fail(done, e)))
            done.add_done_callback(_look_at)
            await self._in_time(done)

    async def remove_offsets(self, group_id: str, partitions: Iterable[tuple[str, int]]) -> None:
        """Delete committed offsets, durably."""
        await self._remove(group_id, list(partitions), None)

    async def delete_group(self, group_id: str) -> None:
        """Delete an empty group and its offsets, durably; until then nobody can join it."""
        if group_id in self.modern:
            done = self.modern.delete(group_id)
            await self._remove(group_id, self._all_offsets(group_id), None)
            await self.when_durable(done)
            return
        if group_id in self.share:
            await self.share.delete(group_id)
            return
        group = self.groups.get(group_id)
        if group is None or group.state is GroupState.DEAD:
            raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND, f"group {group_id} not found")
        if group.state is not GroupState.EMPTY:
            raise ApiError(ErrorCode.NON_EMPTY_GROUP, f"group {group_id} has members")
        await self._remove(group_id, self._all_offsets(group_id), group)

    async def forget_topics(self, topics: dict[str, UUID]) -> None:
        """Delete every group's offsets of topics that are gone, as far as they were committed for those topics."""
        await self.share.forget_topics(topics.values())
        await self.settled()
        for topic, topic_id in topics.items():
            partitions: dict[str, list[tuple[str, int]]] = {}
            for group_id, partition, committed in self.offsets.of_topic(topic):
                if committed.belongs_to(topic_id):
                    partitions.setdefault(group_id, []).append((topic, partition))
            for group_id, gone in partitions.items():
                await self._remove(group_id, gone, None)

    async def expire(self) -> None:
        """Delete what has outlived its retention: offsets, and groups that have neither members nor offsets left."""
        for count, group_id in enumerate(list(self.groups), 1):
            group = self.groups.get(group_id)
            if group is None or group.state is GroupState.DEAD or group_id in self._uncommitted:
                continue
            if self.state is not ShardState.ACTIVE:
                return
            held = self.offsets.of_group(group_id)
            gone = offsets.expired(group, held, self._clock.wall_ms(), self._settings.offsets_retention_ms)
            is_over = group.is_idle and len(gone) == sum(map(len, held.values()))
            if gone or is_over:
                await self._remove(group_id, gone, group if is_over else None)
            if count % _EXPIRED_PER_SLICE == 0:
                await breathe()
        for group_id in list(self.modern.groups):
            if self.state is not ShardState.ACTIVE:
                return
            await self._expire_modern(group_id)

    async def _expire_modern(self, group_id: str) -> None:
        group = self.modern.groups.get(group_id)
        if group is None or group_id in self._uncommitted:
            return
        held = self.offsets.of_group(group_id)
        gone = offsets.expired_by_commit(
            group.is_subscribed_to, held, self._clock.wall_ms(), self._settings.offsets_retention_ms
        )
        if not group.members and len(gone) == sum(map(len, held.values())):
            self.modern.delete(group_id)
        if gone:
            await self._remove(group_id, gone, None)

    # Writing

    async def _remove(self, group_id: str, gone: list[tuple[str, int]], group: ClassicGroup | None) -> None:
        """Write tombstones for offsets and, at the end, for the group itself; all are appended before the first wait.

        Otherwise a commit could slip in between the decision and its tombstone, and be lost.
        """
        pending: list[asyncio.Future[None]] = []
        for start in range(0, len(gone), _TOMBSTONES_PER_BATCH):
            part = gone[start : start + _TOMBSTONES_PER_BATCH]

            def apply(_: int, part: list[tuple[str, int]] = part) -> None:
                for topic, partition in part:
                    self._remove_offset(group_id, topic, partition)

            keys = [records.offset_key(group_id, topic, partition) for topic, partition in part]
            pending.append(self._write_later([(key, None) for key in keys], apply))
        if group is not None:
            empty_since_ms = group.state_timestamp_ms
            self.forget_pending(group)
            group.move_to(GroupState.DEAD, self._clock.wall_ms())

            def revive() -> None:
                if self.state is ShardState.ACTIVE:
                    group.move_to(GroupState.EMPTY, empty_since_ms)

            tombstone = [(records.group_key(group_id), None)]
            pending.append(self._write_later(tombstone, lambda _: self._drop_group(group_id, group), revive))
        for done in pending:
            await self._in_time(done)

    def _drop_group(self, group_id: str, group: ClassicGroup) -> None:
        if self.groups.get(group_id) is group:
            del self.groups[group_id]
        # Committed between the decision and the tombstone: what is left is a simple group, as a replay finds it.
        self.keep_offsets(group_id)

    def forget_pending(self, group: ClassicGroup) -> None:
        """Drop the ids that were handed out and not used."""
        for member_id in group.pending_join:
            self._timers.cancel((group.group_id, TimerKey(TimerKind.SESSION, member_id)))
        group.pending_join.clear()

    def _all_offsets(self, group_id: str) -> list[tuple[str, int]]:
        return [(topic, each) for topic, partitions in self.offsets.of_group(group_id).items() for each in partitions]

    def _write_later(
        self,
        entries: Sequence[Entry],
        apply: Callable[[int], None],
        undo: Callable[[], None] | None = None,
    ) -> asyncio.Future[None]:
        """Append now; the future is done when the change has taken effect, or carries the ApiError that prevents it."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Who waits may be cancelled or may have failed at an earlier one: an error nobody asks for is no news.
        done.add_done_callback(_look_at)

        def apply_and_answer(base_offset: int) -> None:
            apply(base_offset)
            _finish(done)

        def undo_and_answer(error: ErrorCode) -> None:
            if undo is not None:
                undo()
            _fail(done, error)

        self._write(entries, apply_and_answer, undo_and_answer)
        return done

    def append(self, entries: Sequence[Entry]) -> asyncio.Future[None]:
        """Append what already counts in memory; done when durable, or at once where the log refuses it."""
        return self._write_later(entries, lambda _: None)

    async def when_durable(self, done: asyncio.Future[None] | None) -> None:
        """Wait for one append, or (None) for everything so far; ApiError where it does not become durable in time."""
        if done is None:
            await self.settled()
        else:
            await self._in_time(done)

    def now_ms(self) -> int:
        return self._clock.wall_ms()

    async def _in_time(self, done: asyncio.Future[None]) -> None:
        # Only the waiting has a timeout: a write that becomes durable later takes effect all the same.
        timer = self._clock.call_later(
            self._settings.offsets_commit_timeout_ms / 1000,
            lambda: _fail(done, ErrorCode.COORDINATOR_NOT_AVAILABLE),
        )
        try:
            await done
        finally:
            timer.cancel()

    def _write(self, entries: Sequence[Entry], apply: Callable[[int], None], fail: Callable[[ErrorCode], None]) -> None:
        """Append now; apply when durable. A failure, now or later, is reported once."""
        try:
            if self.state is not ShardState.ACTIVE:
                raise ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER)
            appended = self._topic.append(self.index, entries, self._clock.wall_ms())
        except ApiError as error:
            fail(_WRITE_ERRORS.get(error.code, error.code))
        except StorageError:
            fail(ErrorCode.NOT_COORDINATOR)
        else:
            self._queue(_Write(appended.base_offset, appended.last_offset, apply, fail))

    def _queue(self, write: _Write) -> None:
        self._writes.append(write)
        self._written.set()

    async def _confirm_writes(self) -> None:
        while self.state is ShardState.ACTIVE:
            if not self._writes:
                self._written.clear()
                await self._written.wait()
                continue
            await self._topic.wait_committed(self.index, self._writes[0].last_offset)
            if self._writes:
                write = self._writes.popleft()
                write.apply(write.base_offset)

    def _put_offset(self, group_id: str, topic: str, partition: int, committed: CommittedOffset) -> None:
        if group_id not in self.groups and group_id not in self.modern:
            # Commits without membership make a simple group, which has no record of its own.
            self.groups[group_id] = ClassicGroup(group_id)
        self.offsets.put(group_id, topic, partition, committed)

    def _remove_offset(self, group_id: str, topic: str, partition: int) -> None:
        self.offsets.remove(group_id, topic, partition)
        group = self.groups.get(group_id)
        if group is not None and group.is_simple and not self.offsets.of_group(group_id):
            del self.groups[group_id]

    # Effects

    def perform(self, group: ClassicGroup, effects: Sequence[Effect]) -> None:
        """Do what the classic machine decided."""
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
        # No timeout: a record given up on could still become durable, and memory would then differ from the log.
        def report(error: ErrorCode) -> None:
            too_large = error is ErrorCode.INVALID_COMMIT_OFFSET_SIZE
            self._stored(group, token, ErrorCode.UNKNOWN_SERVER_ERROR if too_large else error)

        self._write(
            [(records.group_key(group.group_id), records.group_value(stored_group))],
            lambda _: report(ErrorCode.NONE),
            report,
        )

    def _stored(self, group: ClassicGroup, token: int | None, error: ErrorCode) -> None:
        # NOT_COORDINATOR means that the partition has left: whoever leads it now decides what the group is.
        expected = error in {ErrorCode.NONE, ErrorCode.NOT_COORDINATOR}
        if not expected and self.state is ShardState.ACTIVE:
            log.warning("the record of %r was not written: %s", group, error.name)
        if token is not None:
            self.perform(group, classic.stored(group, token, error, self._settings, self._clock.wall_ms()))

    def _timer_fired(self, key: tuple[str, TimerKey]) -> None:
        group = self.groups.get(key[0])
        if group is not None:
            self.perform(group, classic.timer_fired(group, key[1], self._settings, self._clock.wall_ms()))
        elif key[0] in self.share:
            self.share.timer_fired(*key)
        else:
            self.modern.timer_fired(*key)

    def _ticket(self) -> int:
        self._next_ticket += 1
        return self._next_ticket


def _accept(_topic_id: UUID, _partition: int) -> ErrorCode:
    return ErrorCode.NONE


def _answer(parked: asyncio.Future[JoinResult] | asyncio.Future[SyncResult] | None, result: object) -> None:
    # The client may have hung up, which cancelled the future: its membership goes on without it.
    if parked is not None and not parked.done():
        parked.set_result(result)  # type: ignore[arg-type]


def _finish(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _fail(done: asyncio.Future[None], error: ErrorCode) -> None:
    if not done.done():
        done.set_exception(ApiError(error))


def _look_at(done: asyncio.Future[None]) -> None:
    if not done.cancelled():
        done.exception()
