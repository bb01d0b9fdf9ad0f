"""The share coordinator on a log in memory and a clock that only the test moves."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator

import pytest

from millrace.clock import ManualClock
from millrace.errors import ApiError, ErrorCode
from millrace.queues.batches import RecordState, StateBatch
from millrace.queues.coordinator import ShareCoordinator
from millrace.queues.records import ShareKey
from millrace.queues.settings import CoordinatorSettings
from millrace.queues.state import SharePartitionState, Write
from millrace.replication.state_topic import yield_to_loop
from support.state_topic import FakeTopic

TOPIC_ID = uuid.UUID(int=77)
KEY = ShareKey("g", TOPIC_ID, 0)
SETTINGS = CoordinatorSettings(updates_per_snapshot=3, snapshot_interval_ms=60_000, prune_interval_ms=61_000)


def news(first: int, last: int, *, start: int = -1, leader_epoch: int = 0) -> Write:
    return Write(0, leader_epoch, start, (StateBatch(first, last, RecordState.ACKNOWLEDGED, 1),), 1)


class Bench:
    """A coordinator whose partitions and clock the test holds."""

    def __init__(self, *, partitions: int = 1, commit_at_once: bool = True) -> None:
        self.clock = ManualClock()
        self.fake = FakeTopic(partitions, commit_at_once=commit_at_once)
        self.pruned: list[tuple[int, int]] = []
        self.topics = {TOPIC_ID: 4}
        self.coordinator = self.make()

    def make(self) -> ShareCoordinator:
        return ShareCoordinator(
            clock=self.clock,
            settings=SETTINGS,
            state_topic=self.fake.topic,
            partitions_of=lambda topic_id: self.topics.get(topic_id, 0),
            prune=self.prune,
        )

    def prune(self, index: int, offset: int) -> None:
        self.pruned.append((index, offset))
        log = self.fake[index].log
        log.start_offset = max(log.start_offset, offset)

    async def lead(self) -> None:
        for index in range(len(self.fake.partitions)):
            self.coordinator.partition_became_leader(index)
        await self.coordinator.loaded()

    async def restart(self) -> None:
        await self.coordinator.stop()
        self.coordinator = self.make()
        await self.lead()

    async def advance(self, seconds: float) -> None:
        await run_ready()
        self.clock.advance(seconds)
        await run_ready()

    def states(self) -> dict[ShareKey, SharePartitionState]:
        found: dict[ShareKey, SharePartitionState] = {}
        for shard in self.coordinator._shards.values():
            found.update(shard.states)
        return found


async def run_ready() -> None:
    for _ in range(20):
        await yield_to_loop()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    await bench.lead()
    yield bench
    await bench.coordinator.stop()


async def test_what_was_written_is_read_and_survives(bench: Bench) -> None:
    await bench.coordinator.initialize(KEY, 0, 10)
    await bench.coordinator.write(KEY, news(12, 13))
    await bench.coordinator.write(KEY, news(14, 15, start=11))
    for _ in range(2):
        found = await bench.coordinator.read(KEY, 0)
        assert (found.start_offset, found.batches) == (11, (StateBatch(12, 15, RecordState.ACKNOWLEDGED, 1),))
        await bench.restart()


async def test_a_write_is_answered_and_seen_when_it_is_durable() -> None:
    bench = Bench(commit_at_once=False)
    await bench.lead()
    begun = asyncio.ensure_future(bench.coordinator.initialize(KEY, 0, 0))
    written = asyncio.ensure_future(bench.coordinator.write(KEY, news(1, 2)))  # plans on what is not durable yet
    await run_ready()
    reading = asyncio.ensure_future(bench.coordinator.read(KEY, 0))
    await run_ready()
    assert not begun.done() and not written.done() and not reading.done()
    assert (await bench.coordinator.summary(KEY)).start_offset == -1
    bench.fake[0].commit(1)
    await run_ready()
    assert begun.done() and not written.done()
    assert (await bench.coordinator.summary(KEY)).start_offset == 0
    bench.fake[0].commit()
    await run_ready()
    assert written.done()
    assert len((await reading).batches) == 1
    await bench.coordinator.stop()


async def test_a_snapshot_has_what_is_not_durable_yet() -> None:
    bench = Bench(commit_at_once=False)
    await bench.lead()
    waiting = [asyncio.ensure_future(bench.coordinator.initialize(KEY, 0, 0))]
    waiting += [asyncio.ensure_future(bench.coordinator.write(KEY, news(2 * n, 2 * n))) for n in range(1, 6)]
    await run_ready()
    bench.fake[0].commit()
    await asyncio.gather(*waiting)
    live = bench.states()
    assert [each.first_offset for each in live[KEY].snapshot.batches] == [2, 4, 6, 8, 10]
    assert live[KEY].snapshot.snapshot_epoch == 1
    bench.fake[0].commit_at_once = True
    await bench.restart()
    assert bench.states() == live
    await bench.coordinator.stop()


async def test_a_write_that_takes_too_long_takes_effect_all_the_same() -> None:
    bench = Bench(commit_at_once=False)
    await bench.lead()
    begun = asyncio.ensure_future(bench.coordinator.initialize(KEY, 0, 0))
    await bench.advance(5)
    with pytest.raises(ApiError) as late:
        await begun
    assert late.value.code is ErrorCode.COORDINATOR_NOT_AVAILABLE
    bench.fake[0].commit()
    await run_ready()
    assert (await bench.coordinator.summary(KEY)).start_offset == 0
    await bench.coordinator.stop()


async def test_a_lost_partition_answers_no_more(bench: Bench) -> None:
    await bench.coordinator.initialize(KEY, 0, 0)
    bench.fake[0].commit_at_once = False
    written = asyncio.ensure_future(bench.coordinator.write(KEY, news(1, 2)))
    await run_ready()
    bench.coordinator.partition_lost(0)
    with pytest.raises(ApiError) as refused:
        await written
    assert refused.value.code is ErrorCode.NOT_COORDINATOR
    with pytest.raises(ApiError) as refused:
        await bench.coordinator.read(KEY, 0)
    assert refused.value.code is ErrorCode.NOT_COORDINATOR
    bench.coordinator.begin_closing()
    with pytest.raises(ApiError) as refused:
        await bench.coordinator.summary(KEY)
    assert refused.value.code is ErrorCode.COORDINATOR_NOT_AVAILABLE


async def test_an_epoch_that_is_over_does_not_answer(bench: Bench) -> None:
    await bench.coordinator.initialize(KEY, 0, 0)
    bench.fake[0].leader_epoch += 1
    with pytest.raises(ApiError) as refused:
        await bench.coordinator.summary(KEY)
    assert refused.value.code is ErrorCode.NOT_COORDINATOR
    await bench.lead()
    assert (await bench.coordinator.summary(KEY)).start_offset == 0


async def test_refused_appends_change_nothing(bench: Bench) -> None:
    await bench.coordinator.initialize(KEY, 0, 0)
    bench.fake[0].refuse = ErrorCode.NOT_ENOUGH_REPLICAS
    with pytest.raises(ApiError) as refused:
        await bench.coordinator.write(KEY, news(1, 2))
    assert refused.value.code is ErrorCode.COORDINATOR_NOT_AVAILABLE
    bench.fake[0].refuse = None
    assert (await bench.coordinator.read(KEY, 0)).batches == ()


async def test_unknown_partitions_are_refused(bench: Bench) -> None:
    for key, code in (
        (ShareKey("g", uuid.UUID(int=78), 0), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (ShareKey("g", TOPIC_ID, 4), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (ShareKey("g", TOPIC_ID, -1), ErrorCode.INVALID_REQUEST),
        (ShareKey("g", uuid.UUID(int=0), 0), ErrorCode.INVALID_REQUEST),
    ):
        with pytest.raises(ApiError) as refused:
            await bench.coordinator.initialize(key, 0, 0)
        assert refused.value.code is code


async def test_a_deleted_share_partition_or_topic_stays_deleted(bench: Bench) -> None:
    other = ShareKey("g", TOPIC_ID, 1)
    for key in (KEY, other):
        await bench.coordinator.initialize(key, 0, 0)
        await bench.coordinator.write(key, news(1, 2))
    await bench.coordinator.delete(KEY)
    await bench.coordinator.delete(KEY)
    assert bench.fake[0].log.end_offset == 5
    await bench.restart()
    assert list(bench.states()) == [other]
    bench.coordinator.topic_deleted(TOPIC_ID)
    await run_ready()
    await bench.restart()
    assert not bench.states()


async def test_a_topic_that_went_while_nobody_coordinated_is_forgotten_later(bench: Bench) -> None:
    await bench.coordinator.initialize(KEY, 0, 0)
    bench.topics.clear()
    await bench.restart()
    assert list(bench.states()) == [KEY]
    await bench.advance(60)
    assert not bench.states()


async def test_the_log_is_cut_off_where_snapshots_made_it_superfluous(bench: Bench) -> None:
    cold = ShareKey("g", TOPIC_ID, 1)
    await bench.coordinator.initialize(cold, 0, 0)
    await bench.coordinator.write(cold, news(5, 6))
    await bench.coordinator.initialize(KEY, 0, 0)
    await bench.advance(60)  # both are cold now, and one of them has an update of its own: both are written anew
    live = bench.states()
    assert live[cold].updates == 0
    await bench.advance(1)
    assert bench.pruned == [(0, 3)]
    await bench.restart()
    assert bench.states() == live
    length = bench.fake[0].log.end_offset
    await bench.advance(60)  # nothing changed since: nothing is written
    assert bench.fake[0].log.end_offset == length


@pytest.mark.parametrize("seed", range(30))
async def test_a_replay_finds_what_is_durable(seed: int) -> None:
    chance = random.Random(seed)
    bench = Bench(partitions=2, commit_at_once=False)
    await bench.lead()
    keys = [ShareKey(group, TOPIC_ID, partition) for group in "ab" for partition in range(3)]
    under_way: list[asyncio.Future[object]] = []
    for _ in range(120):
        key = chance.choice(keys)
        match chance.randrange(8):
            case 0:
                work = bench.coordinator.initialize(key, chance.randrange(3), chance.randrange(-1, 20))
            case 1:
                work = bench.coordinator.delete(key)
            case 2:
                work = bench.coordinator.read(key, chance.randrange(4))
            case 3:
                partition = bench.fake[chance.randrange(2)]
                partition.commit(chance.randint(partition.high_watermark.offset, partition.log.end_offset))
                await run_ready()
                continue
            case _:
                first = chance.randrange(60)
                work = bench.coordinator.write(
                    key, news(first, first + chance.randrange(6), start=chance.randrange(-1, 30), leader_epoch=3)
                )
        under_way.append(asyncio.ensure_future(work))
        await yield_to_loop()
    for partition in bench.fake.partitions:
        assert partition is not None
        partition.commit()
    await asyncio.gather(*under_way, return_exceptions=True)
    live = bench.states()
    await bench.restart()
    assert bench.states() == live
    await bench.coordinator.stop()
