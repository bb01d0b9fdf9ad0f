"""Offsets that are committed in transactions: when they are visible, and what becomes of them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from millrace.clock import ManualClock
from millrace.errors import ApiError, ErrorCode
from millrace.groups.coordinator import GroupCoordinator
from millrace.groups.offsets.committed import OffsetToCommit
from millrace.groups.settings import GroupSettings
from millrace.replication.state_topic import yield_to_loop
from support.state_topic import FakeTopic

TOPIC_ID = uuid.UUID(int=77)
SETTINGS = GroupSettings(offsets_retention_ms=3_600_000, offsets_retention_check_interval_ms=60_000)


@dataclass
class Producer:
    """A producer, and what its coordinator was asked and says."""

    producer_id: int = 1_000
    producer_epoch: int = 0
    bumps_epoch: bool = False
    refusal: ErrorCode | None = None
    asked: list[tuple[str, int]] = field(default_factory=list)
    answers: asyncio.Event | None = None

    async def admit(self, topic: str, partition: int) -> None:
        self.asked.append((topic, partition))
        if self.answers is not None:
            await self.answers.wait()
        if self.refusal is not None:
            raise ApiError(self.refusal)


class Bench:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.fake = FakeTopic()
        self.groups = self.make()

    def make(self) -> GroupCoordinator:
        return GroupCoordinator(clock=self.clock, settings=SETTINGS, state_topic=self.fake.topic)

    async def lead(self) -> None:
        self.groups.partition_became_leader(0)
        await self.groups.loaded()

    async def fail_over(self) -> None:
        await self.groups.stop()
        self.groups = self.make()
        await self.lead()

    async def commit(self, offset: int, topic: str = "t") -> None:
        assert await self.groups.commit("g", [to_commit(offset, topic)]) == [ErrorCode.NONE]

    async def in_transaction(self, offset: int, producer: Producer | None = None, topic: str = "t") -> None:
        done = await self.groups.commit_in_transaction("g", [to_commit(offset, topic)], producer or Producer())
        assert done == [ErrorCode.NONE]

    async def end(self, *, commit: bool, producer_id: int = 1_000, epoch: int = 0) -> None:
        appended = self.fake[0].end_transaction(producer_id, epoch, commit=commit)
        self.groups.transaction_ended(0, producer_id, commit, appended.last_offset)
        await run_ready()

    async def committed(self, topic: str = "t") -> int | None:
        held = await self.groups.fetch_offsets("g")
        return held[topic][0].offset if topic in held else None

    def unstable(self) -> set[tuple[str, int]]:
        return set(self.groups.unstable_offsets("g"))

    async def advance(self, seconds: float) -> None:
        await run_ready()
        self.clock.advance(seconds)
        await run_ready()


def to_commit(offset: int, topic: str = "t") -> OffsetToCommit:
    return OffsetToCommit(topic, 0, TOPIC_ID, offset, 2, "note")


async def run_ready() -> None:
    for _ in range(20):
        await yield_to_loop()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    await bench.lead()
    yield bench
    await bench.groups.stop()


# Visibility


async def test_an_offset_is_visible_with_the_commit_marker(bench: Bench) -> None:
    await bench.commit(1)
    await bench.in_transaction(5)
    assert (await bench.committed(), bench.unstable()) == (1, {("t", 0)})
    await bench.end(commit=True)
    assert (await bench.committed(), bench.unstable()) == (5, set())


async def test_an_abort_drops_it(bench: Bench) -> None:
    await bench.commit(1)
    await bench.in_transaction(5)
    await bench.end(commit=False)
    assert (await bench.committed(), bench.unstable()) == (1, set())


async def test_a_marker_counts_when_it_is_durable(bench: Bench) -> None:
    await bench.in_transaction(5)
    bench.fake[0].commit_at_once = False
    await bench.end(commit=True)
    assert (await bench.committed(), bench.unstable()) == (None, {("t", 0)})
    bench.fake[0].commit()
    await run_ready()
    assert (await bench.committed(), bench.unstable()) == (5, set())


async def test_a_commit_that_is_not_in_effect_yet_is_ended_by_its_marker(bench: Bench) -> None:
    bench.fake[0].commit_at_once = False
    committing = asyncio.ensure_future(bench.in_transaction(5))
    await run_ready()
    marker = bench.fake[0].end_transaction(1_000, 0, commit=True)
    bench.fake[0].commit()
    bench.groups.transaction_ended(0, 1_000, True, marker.last_offset)
    assert await bench.committed() is None, "neither has had its turn"
    await committing
    await run_ready()
    assert (await bench.committed(), bench.unstable()) == (5, set())


async def test_a_marker_that_is_told_late_takes_its_turn(bench: Bench) -> None:
    bench.fake[0].commit_at_once = False
    committing = asyncio.ensure_future(bench.in_transaction(5))
    await run_ready()
    marker = bench.fake[0].end_transaction(1_000, 0, commit=False)
    later = asyncio.ensure_future(bench.in_transaction(6))
    await run_ready()
    bench.groups.transaction_ended(0, 1_000, False, marker.last_offset)
    bench.fake[0].commit()
    await asyncio.gather(committing, later)
    assert (await bench.committed(), bench.unstable()) == (None, {("t", 0)}), "the next transaction is open"
    bench.fake[0].commit_at_once = True
    await bench.end(commit=True)
    assert await bench.committed() == 6


@pytest.mark.parametrize("fails_over", [False, True])
async def test_the_record_that_lies_last_counts(bench: Bench, fails_over: bool) -> None:
    await bench.in_transaction(5)
    await bench.commit(7)
    if fails_over:
        await bench.fail_over()
    assert (await bench.committed(), bench.unstable()) == (7, {("t", 0)})
    await bench.end(commit=True)
    assert (await bench.committed(), bench.unstable()) == (7, set())
    await bench.fail_over()
    assert (await bench.committed(), bench.unstable()) == (7, set())


async def test_stable_offsets_wait_for_a_marker_on_its_way(bench: Bench) -> None:
    await bench.in_transaction(5)
    bench.fake[0].commit_at_once = False
    await bench.end(commit=True)
    reading = asyncio.ensure_future(bench.groups.fetch_offsets("g", require_stable=True))
    await run_ready()
    assert not reading.done()
    bench.fake[0].commit()
    assert (await reading)["t"][0].offset == 5
    assert not bench.unstable()


# Failover


@pytest.mark.parametrize("commit", [True, False, None])
async def test_a_new_coordinator_knows_what_is_open_and_how_it_ended(bench: Bench, commit: bool | None) -> None:
    await bench.commit(1)
    await bench.in_transaction(5)
    if commit is not None:
        bench.fake[0].end_transaction(1_000, 0, commit=commit)  # and nobody is told
    await bench.fail_over()
    if commit is None:
        assert (await bench.committed(), bench.unstable()) == (1, {("t", 0)})
        await bench.end(commit=True)
    assert (await bench.committed(), bench.unstable()) == (1 if commit is False else 5, set())


async def test_a_marker_is_told_while_its_partition_is_loaded(bench: Bench) -> None:
    await bench.in_transaction(5)
    await bench.groups.stop()
    bench.groups = bench.make()
    bench.fake[0].commit_at_once = False
    first = bench.fake[0].end_transaction(1_000, 0, commit=True)
    bench.groups.transaction_ended(0, 1_000, True, first.last_offset)  # nobody coordinates
    bench.groups.partition_became_leader(0)
    await run_ready()
    bench.groups.transaction_ended(0, 1_000, True, first.last_offset)  # and now it is loading
    again = bench.fake[0].end_transaction(1_000, 0, commit=True)
    bench.groups.transaction_ended(0, 1_000, True, again.last_offset)
    bench.fake[0].commit()
    await bench.groups.loaded()
    await run_ready()
    assert (await bench.committed(), bench.unstable()) == (5, set())


async def test_compaction_changes_nothing(bench: Bench) -> None:
    await bench.commit(1)
    await bench.in_transaction(5)
    await bench.end(commit=False)
    await bench.in_transaction(6, topic="u")
    await bench.end(commit=True)
    await bench.in_transaction(7)
    bench.fake[0].log.compact(bench.fake[0].log.end_offset, drops_tombstones=True)
    await bench.fail_over()
    assert (await bench.committed(), await bench.committed("u"), bench.unstable()) == (1, 6, {("t", 0)})


# The transaction's coordinator, and fencing


async def test_the_coordinator_is_asked_once_per_transaction(bench: Bench) -> None:
    producer = Producer()
    await bench.in_transaction(5, producer)
    await bench.in_transaction(6, producer)
    assert producer.asked == [("__consumer_offsets", 0)]
    await bench.end(commit=True)
    await bench.in_transaction(7, producer)
    assert len(producer.asked) == 2


async def test_what_the_coordinator_refuses_is_not_written(bench: Bench) -> None:
    with pytest.raises(ApiError) as refused:
        await bench.in_transaction(5, Producer(refusal=ErrorCode.TRANSACTION_ABORTABLE))
    assert refused.value.code is ErrorCode.TRANSACTION_ABORTABLE
    assert bench.fake[0].log.end_offset == 0


async def test_a_marker_that_comes_while_the_coordinator_is_asked_is_not_overtaken(bench: Bench) -> None:
    producer = Producer(answers=asyncio.Event())
    committing = asyncio.ensure_future(bench.in_transaction(5, producer))
    await run_ready()
    await bench.end(commit=False)
    assert producer.answers is not None
    producer.answers.set()
    with pytest.raises(ApiError) as refused:
        await committing
    assert refused.value.code is ErrorCode.INVALID_TXN_STATE
    assert not bench.unstable()


async def test_an_old_producer_is_fenced(bench: Bench) -> None:
    await bench.in_transaction(5, Producer(producer_epoch=3))
    with pytest.raises(ApiError) as fenced:
        await bench.in_transaction(6, Producer(producer_epoch=2))
    assert fenced.value.code is ErrorCode.INVALID_PRODUCER_EPOCH


async def test_a_commit_is_durable_before_it_is_answered(bench: Bench) -> None:
    bench.fake[0].commit_at_once = False
    committing = asyncio.ensure_future(bench.in_transaction(5))
    await run_ready()
    assert not committing.done()
    assert not bench.unstable()
    bench.fake[0].commit()
    await committing
    assert bench.unstable()


async def test_a_partition_that_is_lost_while_the_coordinator_is_asked(bench: Bench) -> None:
    producer = Producer(answers=asyncio.Event())
    committing = asyncio.ensure_future(bench.in_transaction(5, producer))
    await run_ready()
    bench.groups.partition_lost(0)
    assert producer.answers is not None
    producer.answers.set()
    with pytest.raises(ApiError) as lost:
        await committing
    assert lost.value.code is ErrorCode.NOT_COORDINATOR


# Expiry and deletion


async def test_pending_offsets_keep_the_partition_and_the_group(bench: Bench) -> None:
    await bench.commit(1)
    await bench.commit(2, "u")
    await bench.in_transaction(5)
    await bench.advance(2 * 3_600)
    assert (await bench.committed(), await bench.committed("u")) == (1, None)
    await bench.end(commit=False)
    await bench.advance(61)
    assert bench.groups.describe("g") is None


async def test_a_group_of_pending_offsets_only_is_there_until_they_are_dropped(bench: Bench) -> None:
    await bench.in_transaction(5)
    await bench.advance(2 * 3_600)
    assert bench.groups.describe("g") is not None
    await bench.fail_over()
    assert bench.groups.describe("g") is not None
    await bench.end(commit=False)
    assert bench.groups.describe("g") is None


@pytest.mark.parametrize("how", ["group", "offset", "topic"])
async def test_what_is_deleted_does_not_come_back_with_the_marker(bench: Bench, how: str) -> None:
    await bench.in_transaction(5)
    if how == "group":
        assert await bench.groups.delete_groups(["g"]) == {"g": ErrorCode.NONE}
    elif how == "offset":
        assert await bench.groups.delete_offsets("g", [("t", 0)]) == {("t", 0): ErrorCode.NONE}
    else:
        bench.groups.topics_deleted({"t": TOPIC_ID})
        await run_ready()
    assert bench.groups.describe("g") is None
    await bench.end(commit=True)
    assert (await bench.committed(), bench.unstable()) == (None, set())
    await bench.fail_over()
    assert (await bench.committed(), bench.unstable()) == (None, set())


async def test_another_topic_of_the_same_name_keeps_its_pending_offsets(bench: Bench) -> None:
    await bench.in_transaction(5)
    bench.groups.topics_deleted({"t": uuid.UUID(int=78)})
    await run_ready()
    await bench.end(commit=True)
    assert await bench.committed() == 5
