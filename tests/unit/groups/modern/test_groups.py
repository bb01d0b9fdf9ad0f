"""KIP-848 groups in a coordinator: durability, loading, expiry, and what the log refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from millrace.clock import ManualClock
from millrace.errors import ApiError, ErrorCode
from millrace.groups.coordinator import GroupCoordinator
from millrace.groups.environment import HeartbeatResult
from millrace.groups.modern.group import ModernGroup
from millrace.groups.modern.groups import GroupDependencies
from millrace.groups.modern.protocol import ModernHeartbeat
from millrace.groups.modern.records import TargetRecord, to_entry
from millrace.groups.offsets.committed import OffsetToCommit
from millrace.groups.settings import GroupSettings
from millrace.groups.step_log import BATCH_BYTES, batches
from millrace.replication.state_topic import yield_to_loop
from support.modern_groups import image_of
from support.state_topic import FakeTopic

IMAGE = image_of(orders=4)
ORDERS = IMAGE.topics["orders"].topic_id
SETTINGS = GroupSettings(offsets_retention_ms=60_000, offsets_retention_check_interval_ms=7_000)


class Bench:
    """A coordinator on a log and a clock that the test holds."""

    def __init__(self, fake: FakeTopic | None = None) -> None:
        self.clock = ManualClock()
        self.fake = fake or FakeTopic()
        self.groups = GroupCoordinator(
            clock=self.clock,
            settings=SETTINGS,
            state_topic=self.fake.topic,
            dependencies=GroupDependencies(image=lambda: IMAGE),
        )

    async def start(self) -> None:
        self.groups.partition_became_leader(0)
        await self.groups.loaded()

    async def advance(self, seconds: float) -> None:
        for _ in range(10):
            await yield_to_loop()
        self.clock.advance(seconds)
        for _ in range(10):
            await yield_to_loop()

    @property
    def group(self) -> ModernGroup | None:
        return self.groups.describe_modern("g")

    async def join(self, member_id: str = "m1") -> HeartbeatResult:
        return await self.groups.modern_heartbeat(
            "g", ModernHeartbeat(member_id, 0, rebalance_timeout_ms=60_000, topics=("orders",), owned=())
        )

    async def beat(self, epoch: int, member_id: str = "m1") -> HeartbeatResult:
        return await self.groups.modern_heartbeat("g", ModernHeartbeat(member_id, epoch))


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    running = Bench()
    await running.start()
    yield running
    await running.groups.stop()


async def test_an_answer_waits_until_it_is_durable(bench: Bench) -> None:
    bench.fake[0].commit_at_once = False
    joining = asyncio.ensure_future(bench.join())
    await bench.advance(1)
    beating = asyncio.ensure_future(bench.beat(1))
    await bench.advance(1)
    assert not joining.done()
    assert not beating.done(), "it says what is not durable yet, too"
    bench.fake[0].commit()
    assert (await joining).epoch == (await beating).epoch == 1


async def test_the_next_coordinator_goes_on_and_members_have_a_session(bench: Bench) -> None:
    await bench.join("m1")
    await bench.join("m2")
    following = Bench(bench.fake)
    await following.start()
    assert (await following.beat(1)).epoch == 1
    group = following.group
    assert group is not None
    assert list(group.members) == ["m1", "m2"]
    await following.advance(44)
    await following.beat(1)
    await following.advance(2)
    assert list(group.members) == ["m1"]
    await following.groups.stop()


async def test_a_removal_that_the_log_refuses_is_tried_again(bench: Bench) -> None:
    await bench.join()
    bench.fake[0].refuse = ErrorCode.NOT_ENOUGH_REPLICAS
    await bench.advance(45)
    assert bench.group is not None
    assert bench.group.members
    with pytest.raises(ApiError) as refused:
        await bench.join("m2")
    assert refused.value.code is ErrorCode.COORDINATOR_NOT_AVAILABLE
    bench.fake[0].refuse = None
    await bench.advance(1)
    assert not bench.group.members


async def test_an_empty_group_goes_with_its_last_offset(bench: Bench) -> None:
    await bench.join()
    offset = OffsetToCommit("orders", 0, ORDERS, 7, 0, "")
    assert await bench.groups.commit("g", [offset], member_id="m1", generation=1) == [ErrorCode.NONE]
    for _ in range(10):
        await bench.advance(10)
        await bench.beat(1)
    assert await bench.groups.fetch_offsets("g"), "it is subscribed to the topic"
    await bench.beat(-1)
    for _ in range(10):
        await bench.advance(10)
    assert bench.group is None
    assert not await bench.groups.fetch_offsets("g")
    assert bench.groups.list_groups() == (ErrorCode.NONE, [])


async def test_a_deleted_group_takes_its_offsets_along(bench: Bench) -> None:
    await bench.join()
    await bench.groups.commit("g", [OffsetToCommit("orders", 0, ORDERS, 7, 0, "")], member_id="m1", generation=1)
    await bench.beat(-1)
    assert await bench.groups.delete_groups(["g"]) == {"g": ErrorCode.NONE}
    assert bench.groups.list_groups() == (ErrorCode.NONE, [])
    assert not await bench.groups.fetch_offsets("g")


def test_the_records_of_a_big_event_are_several_batches() -> None:
    records = [TargetRecord("g", f"m{number}", {ORDERS: tuple(range(1_000))}) for number in range(300)]
    written = list(batches(map(to_entry, records), BATCH_BYTES))
    assert len(written) == 3
    assert sum(map(len, written)) == 300
    assert all(sum(len(key) + len(value or b"") for key, value in batch) < 600_000 for batch in written)
