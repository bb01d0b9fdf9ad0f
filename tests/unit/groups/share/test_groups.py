"""Share groups in a coordinator: durability, loading, and what the share coordinators are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from uuid import UUID

import pytest

from millrace.clock import ManualClock
from millrace.errors import ApiError, ErrorCode
from millrace.groups.classic.effects import LeaveRequest, SyncRequest
from millrace.groups.coordinator import GroupCoordinator, ListedGroup
from millrace.groups.environment import HeartbeatResult
from millrace.groups.modern.groups import GroupDependencies
from millrace.groups.modern.protocol import ModernHeartbeat
from millrace.groups.offsets.committed import OffsetToCommit
from millrace.groups.settings import GroupSettings
from millrace.groups.share.group import ShareGroup
from millrace.groups.share.groups import ShareGroupDependencies
from millrace.groups.share.protocol import ShareHeartbeat
from millrace.groups.share.records import Begun, PartitionStates
from millrace.replication.state_topic import yield_to_loop
from support.groups import join_request
from support.modern_groups import add_partitions, drop_topic, image_of
from support.share_groups import share_state_of
from support.state_topic import FakeTopic

ALL = ((0, 1, 2),)


class States:
    """The share coordinators: what they were told, and whether they answer."""

    def __init__(self) -> None:
        self.begun: dict[tuple[str, UUID, int], tuple[int, int]] = {}
        self.error: ApiError | None = None
        self.answers = asyncio.Event()
        self.answers.set()

    async def initialize(self, group_id: str, topic_id: UUID, partition: int, epoch: int, start_offset: int) -> None:
        await self._answer()
        self.begun[group_id, topic_id, partition] = epoch, start_offset

    async def delete(self, group_id: str, topic_id: UUID, partition: int) -> None:
        await self._answer()
        for _ in range(5):
            await yield_to_loop()  # a deletion takes longer than anything that comes after it
        self.begun.pop((group_id, topic_id, partition), None)

    async def _answer(self) -> None:
        await self.answers.wait()
        if self.error is not None:
            raise self.error


class Bench:
    """A coordinator on a log and a clock that the test holds."""

    def __init__(self, fake: FakeTopic | None = None, states: States | None = None) -> None:
        self.clock = ManualClock()
        self.fake = fake or FakeTopic()
        self.image = image_of(orders=3)
        self.states = states or States()
        self.gone: list[tuple[str, str]] = []
        self.groups = GroupCoordinator(
            clock=self.clock,
            settings=GroupSettings(),
            state_topic=self.fake.topic,
            dependencies=GroupDependencies(image=lambda: self.image),
            share=ShareGroupDependencies(
                image=lambda: self.image,
                coordinators=self.states,
                left=lambda group_id, member_id: self.gone.append((group_id, member_id)),
            ),
        )

    @property
    def orders(self) -> UUID:
        return self.image.topics["orders"].topic_id

    @property
    def group(self) -> ShareGroup:
        group = self.groups.describe_share("g")
        assert group is not None
        return group

    async def start(self) -> None:
        self.groups.partition_became_leader(0)
        await self.groups.loaded()

    async def advance(self, seconds: float) -> None:
        for _ in range(10):
            await yield_to_loop()
        self.clock.advance(seconds)
        for _ in range(10):
            await yield_to_loop()

    async def join(self, member_id: str = "m1") -> HeartbeatResult:
        return await self.groups.share_heartbeat("g", ShareHeartbeat(member_id, 0, topics=("orders",)))

    async def beat(self, epoch: int, member_id: str = "m1") -> HeartbeatResult:
        return await self.groups.share_heartbeat("g", ShareHeartbeat(member_id, epoch))


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    running = Bench()
    await running.start()
    yield running
    await running.groups.stop()


def partitions(result: HeartbeatResult) -> tuple[tuple[int, ...], ...] | None:
    return None if result.assignment is None else tuple(indices for _, indices in result.assignment)


# Members


async def test_who_joins_gets_its_partitions_with_the_first_answer(bench: Bench) -> None:
    joined = await bench.join()
    assert (joined.epoch, partitions(joined), joined.interval_ms) == (2, ALL, 5_000)
    assert bench.states.begun == {("g", bench.orders, index): (1, -1) for index in range(3)}


async def test_where_the_share_coordinator_is_slow_the_member_comes_back(bench: Bench) -> None:
    bench.states.answers.clear()
    joining = asyncio.ensure_future(bench.join())
    second = asyncio.ensure_future(bench.join("m2"))
    await bench.advance(0.9)
    assert not joining.done()
    await bench.advance(0.1)
    assert partitions(await joining) == partitions(await second) == ()
    assert (await joining).interval_ms == 1_000
    bench.states.answers.set()
    await bench.advance(0)
    first, second_answer = await bench.beat(1), await bench.beat(2, "m2")
    assert first.assignment and second_answer.assignment
    assert len(first.assignment[0][1]) + len(second_answer.assignment[0][1]) == 3


async def test_who_joins_while_partitions_are_begun_gets_them_with_the_first_answer(bench: Bench) -> None:
    """They are begun between the decision about the second member and its answer."""
    bench.states.answers.clear()
    first = asyncio.ensure_future(bench.join())
    await bench.advance(0)
    bench.fake[0].commit_at_once = False
    second = asyncio.ensure_future(bench.join("m2"))
    await bench.advance(0)
    bench.states.answers.set()
    await bench.advance(0)
    bench.fake[0].commit_at_once = True
    bench.fake[0].commit()
    given = [partitions(await first), partitions(await second)]
    assert sorted(index for each in given if each for indices in each for index in indices) == [0, 1, 2], given


async def test_partitions_that_an_answer_has_are_not_lost_with_news_of_others(bench: Bench) -> None:
    """A member's share changes, and while that is made durable share-partitions are begun that are not for it."""
    joined = await bench.join()
    await bench.advance(2)  # targets are computed once a second at most
    assert partitions(await bench.join("m2"))
    halved = await bench.beat(joined.epoch)
    assert partitions(halved) != ALL
    await bench.groups.share_heartbeat("g", ShareHeartbeat("m2", -1))
    await bench.advance(2)
    bench.states.answers.clear()
    bench.image = image_of(orders=3, others=1)
    third = asyncio.ensure_future(bench.groups.share_heartbeat("g", ShareHeartbeat("m3", 0, topics=("others",))))
    await bench.advance(0)
    bench.fake[0].commit_at_once = False
    beat = asyncio.ensure_future(bench.beat(halved.epoch))
    await bench.advance(0)
    bench.states.answers.set()
    await bench.advance(0)
    bench.fake[0].commit_at_once = True
    bench.fake[0].commit()
    assert partitions(await beat) == ALL
    await third


async def test_where_the_share_coordinator_fails_the_next_heartbeat_tries_again(bench: Bench) -> None:
    bench.states.error = ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE, "nobody is there")
    joined = await bench.join()
    assert (joined.assignment, joined.interval_ms) == ((), 1_000)
    assert bench.group.partitions == PartitionStates()
    bench.states.error = None
    answer = await bench.beat(1)
    assert partitions(answer) == ALL


async def test_an_answer_waits_until_it_is_durable(bench: Bench) -> None:
    bench.fake[0].commit_at_once = False
    joining = asyncio.ensure_future(bench.join())
    await bench.advance(0.5)
    assert not joining.done()
    assert not bench.states.begun, "nobody is told before it is in the log that they will be"
    bench.fake[0].commit_at_once = True
    bench.fake[0].commit()
    assert partitions(await joining) == ALL


async def test_a_member_that_leaves_or_dies_is_told_of(bench: Bench) -> None:
    await bench.join("m1")
    await bench.join("m2")
    await bench.beat(-1, "m1")
    assert bench.gone == [("g", "m1")]
    await bench.advance(45)
    assert bench.gone == [("g", "m1"), ("g", "m2")]
    assert not bench.group.members


async def test_a_removal_that_the_log_refuses_is_tried_again(bench: Bench) -> None:
    await bench.join()
    bench.fake[0].refuse = ErrorCode.NOT_ENOUGH_REPLICAS
    await bench.advance(45)
    assert bench.group.members
    with pytest.raises(ApiError) as refused:
        await bench.join("m2")
    assert refused.value.code is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert not bench.gone
    bench.fake[0].refuse = None
    await bench.advance(1)
    assert not bench.group.members


async def test_a_group_whose_first_record_is_refused_does_not_exist(bench: Bench) -> None:
    bench.fake[0].refuse = ErrorCode.NOT_ENOUGH_REPLICAS
    with pytest.raises(ApiError):
        await bench.join()
    assert bench.groups.describe_share("g") is None
    assert bench.groups.list_groups() == (ErrorCode.NONE, [])


# Loading


async def test_the_next_coordinator_goes_on_and_members_have_a_session(bench: Bench) -> None:
    await bench.join("m1")
    await bench.join("m2")
    following = Bench(bench.fake, bench.states)
    await following.start()
    assert share_state_of(following.group) == share_state_of(bench.group)
    epoch = following.group.members["m1"].held.epoch
    await following.advance(44)
    await following.beat(epoch)
    await following.advance(2)
    assert list(following.group.members) == ["m1"]
    await following.groups.stop()


async def test_what_a_coordinator_could_not_finish_the_next_one_does(bench: Bench) -> None:
    bench.states.answers.clear()
    joining = asyncio.ensure_future(bench.join())
    await bench.advance(1)
    await joining
    await bench.groups.stop()
    bench.states.answers.set()
    await bench.advance(0)
    assert not bench.states.begun, "who is no coordinator any more tells nobody anything"
    following = Bench(bench.fake, bench.states)
    await following.start()
    assert following.group.partitions == PartitionStates(
        initializing={following.orders: Begun("orders", frozenset(range(3)))}
    )
    assert partitions(await following.beat(1)) == ALL
    await following.groups.stop()


# Groups of other kinds


async def test_a_share_group_is_no_other_group(bench: Bench) -> None:
    await bench.join()
    with pytest.raises(ApiError) as refused:
        await bench.groups.modern_heartbeat(
            "g", ModernHeartbeat("c", 0, rebalance_timeout_ms=1_000, topics=("orders",), owned=())
        )
    assert refused.value.code is ErrorCode.GROUP_ID_NOT_FOUND
    assert (await bench.groups.join("g", join_request())).error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert (await bench.groups.sync("g", SyncRequest("c", None, 1))).error is ErrorCode.UNKNOWN_MEMBER_ID
    assert bench.groups.heartbeat("g", "c", None, 1) is ErrorCode.UNKNOWN_MEMBER_ID
    (left,) = bench.groups.leave("g", [LeaveRequest("c")])
    assert left.error is ErrorCode.UNKNOWN_MEMBER_ID
    for generation in (-1, 1):
        with pytest.raises(ApiError) as refused:
            await bench.groups.commit("g", [OffsetToCommit("orders", 0, bench.orders, 1, 0, "")], generation=generation)
        assert refused.value.code is ErrorCode.GROUP_ID_NOT_FOUND
    assert not await bench.groups.fetch_offsets("g")
    with pytest.raises(ApiError) as refused:
        await bench.groups.delete_offsets("g", [("orders", 0)])
    assert refused.value.code is ErrorCode.GROUP_ID_NOT_FOUND
    assert bench.groups.describe("g") is None
    assert bench.groups.describe_modern("g") is None
    assert bench.groups.list_groups(types=["Share"])[1] == [ListedGroup("g", "Stable", "share", "share")]
    assert bench.groups.list_groups(states=["empty"])[1] == []


async def test_another_group_is_no_share_group(bench: Bench) -> None:
    await bench.groups.commit("g", [OffsetToCommit("orders", 0, bench.orders, 1, 0, "")])
    await bench.groups.modern_heartbeat(
        "c", ModernHeartbeat("c", 0, rebalance_timeout_ms=1_000, topics=("orders",), owned=())
    )
    for group_id in ("g", "c"):
        for epoch in (0, 1, -1):
            with pytest.raises(ApiError) as refused:
                await bench.groups.share_heartbeat(group_id, ShareHeartbeat("m", epoch, topics=("orders",)))
            assert refused.value.code is ErrorCode.GROUP_ID_NOT_FOUND
        with pytest.raises(ApiError) as refused:
            await bench.groups.set_share_offsets(group_id, {(bench.orders, 0): 1})
        assert refused.value.code is ErrorCode.GROUP_ID_NOT_FOUND
        with pytest.raises(ApiError) as refused:
            await bench.groups.delete_share_offsets(group_id, ["orders"])
        assert refused.value.code is ErrorCode.GROUP_ID_NOT_FOUND


# The queues of a group


async def test_offsets_are_set_and_members_begin_there(bench: Bench) -> None:
    assert await bench.groups.set_share_offsets("g", {(bench.orders, 1): 7}) == {}
    assert bench.states.begun == {("g", bench.orders, 1): (0, 7)}
    assert bench.groups.share_partitions_of("g") == {bench.orders: Begun("orders", frozenset({1}))}
    assert partitions(await bench.join()) == ((1,),)
    await bench.advance(1)
    assert partitions(await bench.beat(1)) == ALL
    assert bench.states.begun["g", bench.orders, 1] == (0, 7), "it begins where it was set to"
    with pytest.raises(ApiError) as refused:
        await bench.groups.set_share_offsets("g", {(bench.orders, 1): 8})
    assert refused.value.code is ErrorCode.NON_EMPTY_GROUP
    await bench.beat(-1)
    bench.states.error = ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
    assert await bench.groups.set_share_offsets("g", {(bench.orders, 1): 8}) == {(bench.orders, 1): bench.states.error}
    bench.states.error = None
    await bench.groups.set_share_offsets("g", {(bench.orders, 1): 8})
    epoch, offset = bench.states.begun["g", bench.orders, 1]
    assert offset == 8
    assert epoch > 1, "whoever knows the queue from before is fenced"


async def test_offsets_are_deleted(bench: Bench) -> None:
    await bench.join()
    await bench.beat(-1)
    bench.states.error = ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
    deletion, errors = await bench.groups.delete_share_offsets("g", ["orders", "nothing"])
    assert deletion.unknown == ("nothing",)
    assert errors == {bench.orders: bench.states.error}
    assert bench.group.partitions == PartitionStates(deleting={bench.orders: "orders"})
    bench.states.error = None
    _, errors = await bench.groups.delete_share_offsets("g", ["orders"])
    assert not errors
    assert not bench.states.begun
    assert bench.groups.share_partitions_of("g") == {}
    assert bench.groups.share_partitions_of("nobody") == {}


async def test_a_deleted_group_takes_its_queues_along(bench: Bench) -> None:
    await bench.join()
    assert await bench.groups.delete_groups(["g"]) == {"g": ErrorCode.NON_EMPTY_GROUP}
    await bench.beat(-1)
    bench.states.error = ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
    assert await bench.groups.delete_groups(["g"]) == {"g": ErrorCode.COORDINATOR_NOT_AVAILABLE}
    assert bench.groups.list_groups()[1]
    bench.states.error = None
    assert await bench.groups.delete_groups(["g"]) == {"g": ErrorCode.NONE}
    assert not bench.states.begun
    assert bench.groups.list_groups() == (ErrorCode.NONE, [])
    following = Bench(bench.fake)
    await following.start()
    assert following.groups.describe_share("g") is None
    await following.groups.stop()
    assert await bench.groups.delete_groups(["g"]) == {"g": ErrorCode.GROUP_ID_NOT_FOUND}


async def test_a_member_that_comes_while_its_group_is_deleted_saves_it(bench: Bench) -> None:
    await bench.join()
    await bench.beat(-1)
    bench.states.answers.clear()
    deleting = asyncio.ensure_future(bench.groups.delete_groups(["g"]))
    await bench.advance(0)
    joining = asyncio.ensure_future(bench.join())
    await bench.advance(0)
    bench.states.answers.set()
    assert await deleting == {"g": ErrorCode.NON_EMPTY_GROUP}
    assert partitions(await joining) == ALL
    assert set(bench.states.begun) == {("g", bench.orders, index) for index in range(3)}


async def test_who_waits_for_another_coordinator_is_told(bench: Bench) -> None:
    await bench.join()
    await bench.beat(-1)
    bench.states.answers.clear()
    setting = asyncio.ensure_future(bench.groups.set_share_offsets("g", {(bench.orders, 0): 1}))
    deleting = asyncio.ensure_future(bench.groups.delete_groups(["g"]))
    await bench.advance(0)
    bench.groups.partition_lost(0)
    with pytest.raises(ApiError) as refused:
        await setting
    assert refused.value.code is ErrorCode.NOT_COORDINATOR
    assert await deleting == {"g": ErrorCode.NOT_COORDINATOR}
    await bench.groups.stop()
    assert bench.states.begun["g", bench.orders, 0] == (1, -1)


async def test_who_hangs_up_has_asked_all_the_same(bench: Bench) -> None:
    bench.states.answers.clear()
    setting = asyncio.ensure_future(bench.groups.set_share_offsets("g", {(bench.orders, 0): 1}))
    await bench.advance(0)
    setting.cancel()
    bench.states.answers.set()
    await bench.advance(0)
    assert bench.group.partitions.initialized == {bench.orders: Begun("orders", frozenset({0}))}


async def test_deleted_topics_are_forgotten_and_grown_ones_begun(bench: Bench) -> None:
    await bench.join()
    bench.image = add_partitions(bench.image, "orders", 1)
    await bench.advance(1)
    assert (await bench.beat(2)).interval_ms == 1_000
    await bench.advance(1)
    assert partitions(await bench.beat(3)) == ((0, 1, 2, 3),)
    gone = bench.orders
    bench.image = drop_topic(bench.image, "orders")
    bench.groups.topics_deleted({"orders": gone})
    await bench.advance(1)
    assert bench.group.partitions == PartitionStates()
    assert partitions(await bench.beat(bench.group.members["m1"].held.epoch)) == ()


async def test_share_groups_do_not_expire(bench: Bench) -> None:
    await bench.join()
    await bench.beat(-1)
    for _ in range(10):
        await bench.advance(7 * 24 * 3600)
    assert bench.group.partitions.initialized
