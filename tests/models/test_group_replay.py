"""Replay equals live: whatever a coordinator went through, its log read back gives what it had in memory.

A history is a random list of things that happen to one shard: commits, joins, restarts of static members, rebalances,
departures, expiries, deletions, refused writes, and a log that commits late. Groups are classic or of KIP-848, and
become one from the other. At every check the offsets in memory are those of the committed part of the log; at the end,
with everything committed, so is every group that is at rest. The one exception is a classic group that became empty
while the log refused writes: as in Kafka its old generation stays in the log, and would time out after a restart.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.clock import ManualClock
from millrace.errors import ApiError, ErrorCode
from millrace.groups.classic.effects import LeaveRequest, SyncRequest
from millrace.groups.classic.group import ClassicGroup, GroupState
from millrace.groups.classic.records import group_key
from millrace.groups.coordinator import GroupCoordinator
from millrace.groups.modern.groups import Surroundings
from millrace.groups.modern.protocol import ModernHeartbeat
from millrace.groups.modern.target import flatten
from millrace.groups.offsets.committed import OffsetToCommit
from millrace.groups.settings import GroupSettings, GroupTimes
from millrace.groups.shard import GroupShard
from millrace.groups.share.groups import ShareSurroundings
from millrace.groups.subscription import write_assignment
from millrace.records.batch import split
from millrace.records.decode import iter_records
from millrace.replication.state_topic import breathe
from support.groups import RANGE, STICKY, join_request
from support.modern_groups import image_of, state_of
from support.state_topic import FakeTopic

GROUPS = ("g1", "g2")
TOPICS = ("orders", "users")
TOPIC_IDS = {topic: uuid.UUID(int=number) for number, topic in enumerate(TOPICS, 10)}
IMAGE = image_of(orders=4, users=2)
SETTINGS = GroupSettings(
    initial_rebalance_delay_ms=100,
    offsets_retention_ms=60_000,
    offsets_retention_check_interval_ms=7_000,
)

SURROUNDINGS = Surroundings(image=lambda: IMAGE, times=lambda _: GroupTimes(assignment_interval_ms=0))


class World:
    """A coordinator on a fake log; every step lets the loop come to rest."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.fake = FakeTopic()
        self.groups = GroupCoordinator(
            clock=self.clock, settings=SETTINGS, state_topic=self.fake.topic, surroundings=SURROUNDINGS
        )
        self.newcomers = 0
        self.pending: list[asyncio.Future[Any]] = []

    async def start(self) -> None:
        self.groups.partition_became_leader(0)
        await self.groups.loaded()

    @property
    def shard(self) -> GroupShard:
        return self.groups._shards[0]

    async def rest(self) -> None:
        for _ in range(8):
            await breathe()

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
        ends = [base for base, _ in log.batches] + [log.end_offset]
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
            surroundings=SURROUNDINGS,
            share=ShareSurroundings(),
        )

    def replayed(self) -> GroupShard:
        shard = self.unread()
        end = self.fake[0].high_watermark.offset
        for _, data in self.fake[0].log.batches:
            for batch in split(data):
                for record in iter_records(batch.data):
                    if record.offset < end and record.key is not None:
                        shard.replay(record.key, record.value, record.offset)
        return shard

    def check_offsets(self) -> None:
        live, replayed = self.shard, self.replayed()
        for group in GROUPS:
            assert live.offsets.of_group(group) == replayed.offsets.of_group(group), group
        assert live.offsets.committed.count == replayed.offsets.committed.count

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
            latest.replay(record.key, record.value, record.offset)
        # The latest record of every key says the same as all records in order.
        assert {key: at_rest(group) for key, group in latest.classic.groups.items()} == {
            key: at_rest(group) for key, group in read_groups.items()
        }
        assert modern_of(latest) == modern_of(replayed)
        for group in GROUPS:
            assert latest.offsets.of_group(group) == replayed.offsets.of_group(group)

    async def end(self) -> None:
        await self.groups.stop()
        for future in self.pending:
            future.cancel()
        results = await asyncio.gather(*self.pending, return_exceptions=True)
        for result in results:
            assert not isinstance(result, Exception) or isinstance(result, ApiError), result


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
EVENTS = st.one_of(
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
