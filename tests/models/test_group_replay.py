"""Replay equals live: whatever a coordinator went through, its log read back gives what it had in memory.

A history is a random list of things that happen to one shard: commits, joins, restarts of static members, rebalances,
departures, expiries, deletions, refused writes, a log that commits late, transactions that commit offsets and end, of
which the coordinator hears sooner or later, compaction, and failovers that keep or lose what was not committed. Groups
are classic or of KIP-848, and become one from the other. At every check the offsets in memory are those of the
committed part of the log, visible and pending ones, and those that `by_the_rules` finds without any of the
coordinator's code; at the end, with everything committed, so is every group that is at rest. The one exception is a
classic group that became empty while the log refused writes: as in Kafka its old generation stays in the log, and would
time out after a restart.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.clock import ManualClock
from millrace.errors import ApiError, ErrorCode
from millrace.groups.classic.effects import LeaveRequest, SyncRequest
from millrace.groups.classic.group import ClassicGroup, GroupState
from millrace.groups.classic.records import group_key
from millrace.groups.coordinator import GroupCoordinator
from millrace.groups.modern.groups import GroupDependencies
from millrace.groups.modern.protocol import ModernHeartbeat
from millrace.groups.modern.target import flatten
from millrace.groups.offsets.committed import OffsetToCommit
from millrace.groups.offsets.group_offsets import GroupOffsets
from millrace.groups.offsets.pending import GroupPartition, PendingOffsets
from millrace.groups.offsets.records import OffsetRecord
from millrace.groups.records import read_record
from millrace.groups.settings import GroupSettings, GroupTimes
from millrace.groups.shard import GroupShard
from millrace.groups.share.groups import ShareGroupDependencies
from millrace.groups.subscription import write_assignment
from millrace.replication.state_topic import StateRecord, yield_to_loop
from support.groups import RANGE, STICKY, join_request
from support.modern_groups import image_of, state_of
from support.state_topic import FakeTopic, LogBatch

PRODUCERS = (1_000, 1_001)
GROUPS = ("g1", "g2")
TOPICS = ("orders", "users")
TOPIC_IDS = {topic: uuid.UUID(int=number) for number, topic in enumerate(TOPICS, 10)}
IMAGE = image_of(orders=4, users=2)
SETTINGS = GroupSettings(
    initial_rebalance_delay_ms=100,
    offsets_retention_ms=60_000,
    offsets_retention_check_interval_ms=7_000,
)

DEPENDENCIES = GroupDependencies(image=lambda: IMAGE, times=lambda _: GroupTimes(assignment_interval_ms=0))


@dataclass
class Committer:
    """A producer whose coordinator agrees to everything, unless its last transaction is not over yet."""

    world: World
    producer_id: int
    producer_epoch: int = 0
    bumps_epoch: bool = False

    async def admit(self, topic: str, partition: int) -> None:
        await yield_to_loop()
        if self.producer_id in self.world.ending:
            raise ApiError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)


class World:
    """A coordinator on a fake log; every step lets the loop come to rest."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.fake = FakeTopic()
        self.groups = GroupCoordinator(
            clock=self.clock, settings=SETTINGS, state_topic=self.fake.topic, dependencies=DEPENDENCIES
        )
        self.newcomers = 0
        self.pending: list[asyncio.Future[Any]] = []
        self.ending: set[int] = set()
        """Producers whose coordinator waits for a marker."""

    async def start(self) -> None:
        self.groups.partition_became_leader(0)
        await self.groups.loaded()

    @property
    def shard(self) -> GroupShard:
        return self.groups._shards[0]

    async def rest(self) -> None:
        for _ in range(8):
            await yield_to_loop()

    def spawn(self, work: Awaitable[object]) -> None:
        self.pending.append(asyncio.ensure_future(work))

    # What can happen

    async def commit(self, group: str, topic: str, partition: int, retention_ms: int, as_member: bool) -> None:
        live = self.shard.classic.groups.get(group)
        member = next(iter(live.members.values()), None) if live and as_member else None
        self.spawn(
            self.groups.commit(
                group,
                [OffsetToCommit(topic, partition, TOPIC_IDS[topic], self.fake[0].log.end_offset, 3, "note")],
                member_id=member.member_id if member else "",
                instance_id=member.instance_id if member else None,
                generation=live.generation if live and member else -1,
                retention_ms=retention_ms,
            )
        )

    async def commit_in_transaction(self, producer: int, group: str, topic: str, partition: int) -> None:
        offset = OffsetToCommit(topic, partition, TOPIC_IDS[topic], self.fake[0].log.end_offset, 3, "in a transaction")
        self.spawn(self.groups.commit_in_transaction(group, [offset], Committer(self, producer)))

    async def end_transaction(self, producer: int, commits: bool, tells_at_once: bool) -> None:
        """The marker is written; the coordinator of groups is told then, or when it is committed."""
        partition = self.fake[0]
        try:
            offset = partition.end_transaction(producer, 0, commit=commits).last_offset
        except ApiError:
            return

        def tell() -> None:
            self.groups.transaction_ended(0, producer, commits, offset)

        def committed(error: Exception | None) -> None:
            self.ending.discard(producer)
            if error is None and not tells_at_once:
                tell()

        self.ending.add(producer)
        if tells_at_once:
            tell()
        if not partition.high_watermark.when(offset + 1, committed):
            committed(None)

    async def compact(self, drops_tombstones: bool) -> None:
        self.fake[0].log.compact(self.fake[0].high_watermark.offset, drops_tombstones=drops_tombstones)

    async def fail_over(self, tail: str) -> None:
        """Another epoch begins: with all of the log, without what was not committed, or with that only in a moment."""
        partition = self.fake[0]
        self.groups.partition_lost(0)
        if tail == "kept":
            partition.commit()
        elif tail == "lost":
            partition.truncate()
        partition.leader_epoch += 1
        self.groups.partition_became_leader(0)
        await self.rest()
        await self.free_the_log()
        await self.groups.loaded()

    async def join(self, group: str, instance_id: str | None, version: int, both: bool) -> None:
        self.spawn(
            self.groups.join(
                group,
                join_request(
                    instance_id=instance_id,
                    protocols=(STICKY, RANGE) if both else (RANGE,),
                    session_timeout_ms=20_000,
                    rebalance_timeout_ms=5_000,
                    requires_member_id=version >= 4,
                    may_skip_assignment=version >= 9,
                ),
            )
        )

    async def rejoin(self, group: str) -> None:
        """Everybody who is asked to joins again, the pending ones included."""
        live = self.shard.classic.groups.get(group)
        if live is None:
            return
        known = [(each.member_id, each.instance_id) for each in live.members.values() if each.join_ticket is None]
        for member_id, instance_id in known + [(each, None) for each in sorted(live.pending_join)]:
            request = join_request(
                member_id, instance_id=instance_id, session_timeout_ms=20_000, rebalance_timeout_ms=5_000
            )
            self.spawn(self.groups.join(group, request))

    async def sync(self, group: str) -> None:
        live = self.shard.classic.groups.get(group)
        if live is None:
            return
        assignments = tuple(
            # The generation is the partition of a topic that does not exist: it shows what is stale.
            (each, write_assignment({"orders": [number], "generation": [live.generation]}, RANGE.metadata))
            for number, each in enumerate(live.members)
        )
        for member in list(live.members.values()):
            leads = member.member_id == live.leader_id
            request = SyncRequest(
                member.member_id, member.instance_id, live.generation, assignments=assignments if leads else ()
            )
            self.spawn(self.groups.sync(group, request))

    async def heartbeat(self, group: str) -> None:
        live = self.shard.classic.groups.get(group)
        for member in list(live.members.values()) if live else ():
            self.groups.heartbeat(group, member.member_id, member.instance_id, live.generation if live else 0)

    async def leave(self, group: str, everybody: bool) -> None:
        live = self.shard.classic.groups.get(group)
        members = [LeaveRequest(each.member_id, each.instance_id) for each in live.members.values()] if live else []
        if members:
            self.groups.leave(group, members if everybody else members[:1])

    async def modern_join(self, group: str, instance_id: str | None, pattern: str | None) -> None:
        """Somebody new, by the new protocol: a classic group becomes a consumer group."""
        self.newcomers += 1
        self.spawn(
            self.groups.modern_heartbeat(
                group,
                ModernHeartbeat(
                    f"new-{self.newcomers}",
                    0,
                    instance_id=instance_id,
                    rebalance_timeout_ms=5_000,
                    topics=("orders",),
                    pattern=pattern,
                    owned=(),
                ),
            )
        )

    async def modern_beat(self, group: str, has_given_up: bool) -> None:
        """Every member shows itself, by its own protocol."""
        live = self.shard.modern.groups.get(group)
        for member in list(live.members.values()) if live else ():
            if member.is_classic:
                request = join_request(
                    member.member_id,
                    instance_id=member.info.instance_id,
                    protocols=(member.info.classic.protocols if member.info.classic else ()),
                    session_timeout_ms=20_000,
                    rebalance_timeout_ms=5_000,
                )
                self.spawn(self.groups.join(group, request))
            else:
                self.spawn(
                    self.groups.modern_heartbeat(
                        group,
                        ModernHeartbeat(
                            member.member_id,
                            max(member.held.epoch, 0),
                            instance_id=member.info.instance_id,
                            rebalance_timeout_ms=5_000,
                            topics=member.info.topics,
                            owned=list(flatten(member.held.assigned)) if has_given_up and member.held.epoch > 0 else (),
                        ),
                    )
                )
            await self.rest()

    async def modern_leave(self, group: str, epoch: int) -> None:
        live = self.shard.modern.groups.get(group)
        for member in list(live.members.values())[:1] if live else ():
            if member.is_classic:
                with suppress(ApiError):  # where the log refuses it
                    self.groups.leave(group, [LeaveRequest(member.member_id, member.info.instance_id)])
            else:
                instance_id = member.info.instance_id
                epoch = epoch if instance_id else -1
                self.spawn(
                    self.groups.modern_heartbeat(
                        group, ModernHeartbeat(member.member_id, epoch, instance_id=instance_id)
                    )
                )

    async def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    async def delete_group(self, group: str) -> None:
        self.spawn(self.groups.delete_groups([group]))

    async def delete_offset(self, group: str, topic: str, partition: int) -> None:
        self.spawn(self.groups.delete_offsets(group, [(topic, partition)]))

    async def delete_topic(self, topic: str) -> None:
        self.groups.topics_deleted({topic: TOPIC_IDS[topic]})

    async def hold_the_log(self) -> None:
        self.fake[0].commit_at_once = False

    async def free_the_log(self) -> None:
        self.fake[0].commit_at_once = True
        self.fake[0].commit()

    async def commit_some(self) -> None:
        """One batch more."""
        log = self.fake[0].log
        ends = [base for base, _ in log.stored] + [log.end_offset]
        self.fake[0].commit(min((end for end in ends if end > self.fake[0].high_watermark.offset), default=0))

    async def refuse(self) -> None:
        """Whatever happens next cannot be written."""
        self.fake[0].refuse = ErrorCode.NOT_ENOUGH_REPLICAS

    async def rebalance(self, group: str) -> None:
        """All of it, undisturbed."""
        await self.rejoin(group)
        await self.rest()
        self.clock.advance(1)
        await self.rest()
        await self.sync(group)

    # What must hold

    def unread(self) -> GroupShard:
        return GroupShard(
            0,
            0,
            topic=self.fake.topic,
            settings=SETTINGS,
            clock=ManualClock(),
            dependencies=DEPENDENCIES,
            share=ShareGroupDependencies(),
        )

    def replayed(self) -> GroupShard:
        shard = self.unread()
        for batch in self.committed_batches():
            if batch.commits is not None:
                shard.offsets.end_transaction(batch.producer_id, batch.base_offset, committed=batch.commits)
                continue
            for record in batch.records:
                assert record.key is not None
                if batch.producer_id < 0:
                    shard.replay(record.key, record.value, record.offset)
                else:
                    shard.replay_pending(StateRecord(record.offset, record.key, record.value, batch.producer_id))
        return shard

    def committed_batches(self) -> list[LogBatch]:
        return self.fake[0].log.batches(self.fake[0].high_watermark.offset)

    def check_offsets(self) -> None:
        live, replayed = self.shard, self.replayed()
        for group in GROUPS:
            assert live.offsets.of_group(group) == replayed.offsets.of_group(group), group
        assert live.offsets.committed.count == replayed.offsets.committed.count
        assert live.offsets.pending._producers == replayed.offsets.pending._producers
        visible, pending = by_the_rules(self.committed_batches())
        assert visible == {
            GroupPartition(group, topic, partition): committed.record_offset
            for group in GROUPS
            for topic, partitions in live.offsets.of_group(group).items()
            for partition, committed in partitions.items()
        }
        assert pending == pending_of(live)
        for group in GROUPS:
            slots = {(place.topic, place.partition) for _, place in pending if place.group_id == group}
            assert live.offsets.pending_of_group(group) == slots

    async def check_all(self) -> None:
        self.fake[0].refuse = None
        await self.free_the_log()
        await self.rest()
        self.check_offsets()
        assert not self.shard._writer._writes
        replayed = self.replayed()
        live_groups, read_groups = self.shard.classic.groups, replayed.classic.groups
        unwritten = {group for group in GROUPS if group_key(group) in self.fake[0].refused_keys}
        assert live_groups.keys() - unwritten == read_groups.keys() - unwritten
        for group_id in live_groups.keys() - unwritten:
            live = live_groups[group_id]
            if live.state in {GroupState.EMPTY, GroupState.STABLE}:
                assert at_rest(live) == at_rest(read_groups[group_id])
            else:
                assert read_groups[group_id].generation <= live.generation
        assert modern_of(self.shard) == modern_of(replayed)
        loaded = await self.fake.topic.load(0)
        latest = self.unread()
        for record in loaded:
            if record.producer_id < 0:
                latest.replay(record.key, record.value, record.offset)
            else:
                latest.replay_pending(record)
        # The latest record of every key says the same as all records in order.
        assert {key: at_rest(group) for key, group in latest.classic.groups.items()} == {
            key: at_rest(group) for key, group in read_groups.items()
        }
        assert modern_of(latest) == modern_of(replayed)
        for group in GROUPS:
            assert latest.offsets.of_group(group) == replayed.offsets.of_group(group)
        assert latest.offsets.pending._producers == replayed.offsets.pending._producers

    async def end(self) -> None:
        await self.groups.stop()
        for future in self.pending:
            future.cancel()
        results = await asyncio.gather(*self.pending, return_exceptions=True)
        for result in results:
            assert not isinstance(result, Exception) or isinstance(result, ApiError), result


def by_the_rules(batches: list[LogBatch]) -> tuple[dict[GroupPartition, int], dict[tuple[int, GroupPartition], int]]:
    """Which records' offsets are visible, and which pending, by what the log says of them.

    Visible is the last record of a key that is in no transaction or in a committed one, unless it is a tombstone.
    Pending is the last one of each open transaction, unless a tombstone lies behind it.
    """
    last: dict[GroupPartition, tuple[int, bool]] = {}
    tombstones: dict[GroupPartition, int] = {}
    pending: dict[tuple[int, GroupPartition], int] = {}
    for batch in batches:
        if batch.fate == "aborted" or batch.commits is not None:
            continue
        for record in batch.records:
            commit = read_record(record.key or b"", record.value, record.offset)
            if not isinstance(commit, OffsetRecord):
                continue
            place = GroupPartition(commit.group_id, commit.topic, commit.partition)
            if batch.fate == "open":
                pending[batch.producer_id, place] = record.offset
                continue
            last[place] = record.offset, commit.value is not None
            if commit.value is None:
                tombstones[place] = record.offset
    return (
        {place: offset for place, (offset, has_value) in last.items() if has_value},
        {key: offset for key, offset in pending.items() if tombstones.get(key[1], -1) < offset},
    )


def pending_of(shard: GroupShard) -> dict[tuple[int, GroupPartition], int]:
    return {
        (producer_id, place): committed.record_offset
        for producer_id, written in shard.offsets.pending._producers.items()
        for place, committed in written.items()
    }


def modern_of(shard: GroupShard) -> dict[str, object]:
    return {group_id: state_of(group) for group_id, group in shard.modern.groups.items()}


def at_rest(group: ClassicGroup) -> tuple[object, ...]:
    """What a group is when nothing is going on in it."""
    return (
        group.state,
        group.generation,
        group.protocol_type,
        group.protocol_name,
        group.leader_id,
        # A stable group's record is written before the group is stable; only an empty one needs to know since when.
        group.state_timestamp_ms if group.state is GroupState.EMPTY else None,
        group.subscribed_topics if group.members else None,
        {
            member.member_id: (
                member.instance_id,
                member.client_id,
                member.client_host,
                member.session_timeout_ms,
                member.rebalance_timeout_ms,
                member.metadata(group.protocol_name),
                member.assignment,
            )
            for member in group.members.values()
        },
    )


_GROUP = st.sampled_from(GROUPS)
_TOPIC = st.sampled_from(TOPICS)
_PARTITION = st.integers(0, 2)

Event = tuple[Callable[..., Awaitable[None]], tuple[Any, ...]]


def _event(function: Callable[..., Awaitable[None]], *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Event]:
    return st.tuples(st.just(function), st.tuples(*arguments))


_JOIN = _event(World.join, _GROUP, st.sampled_from([None, "red", "green"]), st.sampled_from([3, 5, 9]), st.booleans())
_COMMIT = _event(
    World.commit, _GROUP, _TOPIC, _PARTITION, st.sampled_from([-1, -1, -1, 5_000]), st.booleans()
)  # fmt: skip
_COMMIT_IN_TRANSACTION = _event(
    World.commit_in_transaction, st.sampled_from(PRODUCERS), _GROUP, _TOPIC, st.integers(0, 1)
)  # fmt: skip
_END = _event(World.end_transaction, st.sampled_from(PRODUCERS), st.booleans(), st.booleans())
_FAIL_OVER = _event(World.fail_over, st.sampled_from(["kept", "lost", "late"]))
_COMPACT = _event(World.compact, st.booleans())
EVENTS = st.one_of(
    _COMMIT_IN_TRANSACTION,
    _COMMIT_IN_TRANSACTION,
    _END,
    _FAIL_OVER,
    _COMPACT,
    _COMMIT,
    _COMMIT,
    _JOIN,
    _JOIN,
    _event(World.rebalance, _GROUP),
    _event(World.rebalance, _GROUP),
    _event(World.rebalance, _GROUP),
    _event(World.rejoin, _GROUP),
    _event(World.sync, _GROUP),
    _event(World.heartbeat, _GROUP),
    _event(World.leave, _GROUP, st.booleans()),
    _event(World.wait, st.sampled_from([0.1, 1.0, 8.0, 30.0, 70.0])),
    _event(World.delete_group, _GROUP),
    _event(World.delete_offset, _GROUP, _TOPIC, _PARTITION),
    _event(World.delete_topic, _TOPIC),
    _event(World.hold_the_log),
    _event(World.free_the_log),
    _event(World.commit_some),
    _event(World.refuse),
    _event(World.modern_join, _GROUP, st.sampled_from([None, "red"]), st.sampled_from([None, "u.*"])),
    _event(World.modern_beat, _GROUP, st.booleans()),
    _event(World.modern_beat, _GROUP, st.booleans()),
    _event(World.modern_leave, _GROUP, st.sampled_from([-1, -2])),
)


# Half of the histories begin with a stable group of a dynamic and a static member that has committed something.
PRELUDE: list[Event] = [
    (World.join, ("g1", None, 9, True)),
    (World.join, ("g1", "red", 9, False)),
    (World.rebalance, ("g1",)),
    (World.commit, ("g1", "orders", 0, -1, True)),
    (World.commit, ("g1", "users", 1, -1, True)),
]
# And some with a group on its way from one protocol to the other.
MIXED: list[Event] = [*PRELUDE, (World.modern_join, ("g1", None, None)), (World.modern_beat, ("g1", True))]


async def run(history: list[Event]) -> None:
    world = World()
    await world.start()
    try:
        for happens, arguments in history:
            await happens(world, *arguments)
            await world.rest()
            world.check_offsets()
            if happens is not World.refuse:
                world.fake[0].refuse = None
        await world.check_all()
    finally:
        await world.end()


@settings(max_examples=600, deadline=None)
@given(st.sampled_from([[], PRELUDE, MIXED]), st.lists(EVENTS, min_size=5, max_size=50))
def test_replay_equals_live(prelude: list[Event], history: list[Event]) -> None:
    asyncio.run(run(prelude + history))


OFFSET_EVENTS = st.one_of(
    _COMMIT_IN_TRANSACTION,
    _COMMIT_IN_TRANSACTION,
    _COMMIT_IN_TRANSACTION,
    _END,
    _END,
    _FAIL_OVER,
    _COMPACT,
    _COMMIT,
    _event(World.delete_group, _GROUP),
    _event(World.delete_offset, _GROUP, _TOPIC, st.integers(0, 1)),
    _event(World.delete_topic, _TOPIC),
    _event(World.wait, st.sampled_from([8.0, 70.0])),
    _event(World.hold_the_log),
    _event(World.free_the_log),
    _event(World.commit_some),
    _event(World.refuse),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(OFFSET_EVENTS, min_size=5, max_size=50))
def test_replay_equals_live_with_many_transactions(history: list[Event]) -> None:
    asyncio.run(run(history))


# A transaction of each kind, with what happens between its commits and its marker.
TRANSACTIONS: list[Event] = [
    (World.commit, ("g1", "orders", 0, -1, False)),
    (World.commit_in_transaction, (1_000, "g1", "orders", 0)),
    (World.commit_in_transaction, (1_000, "g1", "orders", 1)),
    (World.commit_in_transaction, (1_001, "g2", "users", 0)),
    (World.commit, ("g1", "orders", 1, -1, False)),
    (World.hold_the_log, ()),
    (World.commit_in_transaction, (1_000, "g1", "users", 0)),
    (World.end_transaction, (1_000, True, False)),
    (World.end_transaction, (1_001, False, True)),
    (World.commit_some, ()),
    (World.free_the_log, ()),
    (World.compact, (True,)),
    (World.fail_over, ("kept",)),
]


# A tombstone drops what is pending.
DELETIONS: list[Event] = [
    (World.commit_in_transaction, (1_000, "g1", "orders", 0)),
    (World.delete_offset, ("g1", "orders", 0)),
    (World.end_transaction, (1_000, True, True)),
]


def test_a_history_of_transactions() -> None:
    asyncio.run(run([*TRANSACTIONS, *DELETIONS]))


def _visible_at_once(self: GroupOffsets, _producer_id: int, place: GroupPartition, committed: Any) -> None:
    self._put(*place, committed)


def _never_dropped(self: PendingOffsets, producer_id: int, below_offset: int) -> list[Any]:
    return list(self._producers.get(producer_id, {}).items()) if below_offset else []


def _by_marker(self: GroupOffsets, producer_id: int, marker_offset: int, *, committed: bool) -> None:
    for place, pending in self.pending.end(producer_id, marker_offset):
        if committed:
            self.committed.put(*place, pending)


@pytest.mark.planted
@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [
        (GroupOffsets, "_put_pending", _visible_at_once),
        (PendingOffsets, "end", _never_dropped),
        (GroupOffsets, "end_transaction", _by_marker),
        (PendingOffsets, "withdraw", lambda *_: None),
        (GroupShard, "transaction_ended", lambda *_, **__: None),
    ],
)
def test_planted_bugs_are_caught(owner: type, name: str, bug: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises(AssertionError):
        asyncio.run(run([*TRANSACTIONS, *DELETIONS]))
