"""What the shards of all coordinators have in common: loading, writing, ending."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from millrace.clock import ManualClock
from millrace.errors import ApiError, ErrorCode, ProtocolError, StorageError
from millrace.replication.sharded import ShardState, StateShard
from millrace.replication.state_topic import Transaction
from support.one_loop import until
from support.state_topic import FakeTopic


class MapShard(StateShard):
    """Keeps keys and values; a key `bad` cannot be read."""

    def __init__(self, fake: FakeTopic, clock: ManualClock) -> None:
        super().__init__(0, 0, topic=fake.topic, clock=clock, write_timeout_ms=5_000)
        self.kept: dict[bytes, bytes | None] = {}
        self.events: list[str] = []

    @property
    def is_empty(self) -> bool:
        return not self.kept

    def replay(self, key: bytes, value: bytes | None, record_offset: int) -> None:
        if key == b"bad":
            raise ProtocolError("unreadable")
        self.kept[key] = value

    def _begin(self) -> None:
        self.events.append("begun")

    def _end(self) -> None:
        self.events.append("closed")

    async def _ended(self) -> None:
        self.events.append("ended")

    def put(self, key: bytes, value: bytes) -> asyncio.Future[None]:
        return self.append([(key, value)], lambda _: self.replay(key, value, 0))

    def apply_durable(self) -> None:
        self._writer.apply_durable()


class Bench:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.fake = FakeTopic(commit_at_once=False)
        self.shard = MapShard(self.fake, self.clock)
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> MapShard:
        self.task = asyncio.create_task(self.shard.run())
        await self.shard.loaded.wait()
        return self.shard

    def log(self, *entries: tuple[bytes, bytes | None]) -> None:
        self.fake.topic.append(0, entries, 0)
        self.fake[0].commit()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    if bench.task is not None:
        bench.task.cancel()
        await asyncio.gather(bench.task, return_exceptions=True)


async def test_an_unreadable_record_does_not_take_the_others(bench: Bench) -> None:
    bench.log((b"a", b"1"), (b"bad", b"2"), (b"c", b"3"), (b"a", b"4"))
    shard = await bench.start()
    assert shard.kept == {b"a": b"4", b"c": b"3"}
    assert shard.state is ShardState.ACTIVE
    assert shard.events == ["begun"]


async def test_a_write_takes_effect_when_it_is_durable_and_in_order(bench: Bench) -> None:
    shard = await bench.start()
    first, second = shard.put(b"a", b"1"), shard.put(b"a", b"2")
    applied = asyncio.ensure_future(shard.wait_applied())
    await asyncio.sleep(0)
    assert shard.kept == {}
    bench.fake[0].commit(1)
    await until(first.done)
    assert shard.kept == {b"a": b"1"}
    assert not applied.done()
    bench.fake[0].commit()
    await applied
    assert second.done()
    assert shard.kept == {b"a": b"2"}


async def test_what_is_durable_already_takes_effect_when_asked_for_and_in_order(bench: Bench) -> None:
    shard = await bench.start()
    first = shard.put(b"a", b"1")
    await asyncio.sleep(0)  # its durability is waited for now
    second, third = shard.put(b"a", b"2"), shard.put(b"a", b"3")
    shard.apply_durable()
    assert shard.kept == {}
    bench.fake[0].commit(2)
    shard.apply_durable()
    assert shard.kept == {b"a": b"2"}
    assert (first.done(), second.done(), third.done()) == (True, True, False)
    assert await shard.in_time(second) is None
    bench.fake[0].commit()
    await until(third.done)
    assert shard.kept == {b"a": b"3"}


async def test_a_durable_write_that_cannot_take_effect_ends_the_shard(bench: Bench) -> None:
    """Who asked for it is told; memory would not be what the log says any more, so it is the shard's end, too."""
    shard = await bench.start()
    shard.put(b"bad", b"1")
    bench.fake[0].commit()
    with pytest.raises(ProtocolError):
        shard.apply_durable()
    assert bench.task is not None
    with pytest.raises(ProtocolError):
        await bench.task
    assert shard.state is ShardState.CLOSED


async def test_only_waiting_has_a_timeout(bench: Bench) -> None:
    shard = await bench.start()
    waiting = asyncio.ensure_future(shard.in_time(shard.put(b"a", b"1")))
    await asyncio.sleep(0)
    bench.clock.advance(5)
    with pytest.raises(ApiError) as late:
        await waiting
    assert late.value.code is ErrorCode.COORDINATOR_NOT_AVAILABLE
    bench.fake[0].commit()
    await until(lambda: shard.kept == {b"a": b"1"})


@pytest.mark.parametrize(
    ("refusal", "told"),
    [
        (ErrorCode.NOT_ENOUGH_REPLICAS, ErrorCode.COORDINATOR_NOT_AVAILABLE),
        (ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.NOT_COORDINATOR),
        (ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.UNKNOWN_SERVER_ERROR),
        (ErrorCode.INVALID_RECORD, ErrorCode.INVALID_RECORD),
    ],
)
async def test_a_refusal_is_told_in_the_words_of_a_coordinator(
    bench: Bench, refusal: ErrorCode, told: ErrorCode
) -> None:
    shard = await bench.start()
    bench.fake[0].refuse = refusal
    with pytest.raises(ApiError) as refused:
        shard.put(b"a", b"1")
    assert refused.value.code is told
    await shard.wait_applied()
    assert shard.kept == {}


async def test_what_is_too_large_can_have_a_word_of_its_own(bench: Bench) -> None:
    shard = await bench.start()
    bench.fake[0].refuse = ErrorCode.RECORD_LIST_TOO_LARGE
    with pytest.raises(ApiError) as refused:
        shard.append([(b"a", b"1")], too_large=ErrorCode.INVALID_COMMIT_OFFSET_SIZE)
    assert refused.value.code is ErrorCode.INVALID_COMMIT_OFFSET_SIZE


async def test_a_failing_disk_is_a_coordinator_that_is_no_more(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = await bench.start()

    def broken(*_: object, **__: object) -> None:
        raise StorageError("no space")

    monkeypatch.setattr(bench.fake[0], "append", broken)
    with pytest.raises(ApiError, match="no space") as refused:
        shard.put(b"a", b"1")
    assert refused.value.code is ErrorCode.NOT_COORDINATOR


async def test_closing_tells_everybody_and_takes_nothing_more(bench: Bench) -> None:
    shard = await bench.start()
    waiting = shard.put(b"a", b"1")
    shard.close()
    shard.close()
    with pytest.raises(ApiError) as told:
        await waiting
    assert told.value.code is ErrorCode.NOT_COORDINATOR
    with pytest.raises(ApiError) as refused:
        shard.put(b"a", b"2")
    assert refused.value.code is ErrorCode.NOT_COORDINATOR
    assert bench.task is not None
    await bench.task
    assert shard.events == ["begun", "closed", "ended"]
    assert shard.kept == {}


async def test_nothing_is_written_before_everything_is_loaded(bench: Bench) -> None:
    with pytest.raises(ApiError) as refused:
        bench.shard.put(b"a", b"1")
    assert refused.value.code is ErrorCode.NOT_COORDINATOR
    assert bench.fake[0].log.end_offset == 0


async def test_what_others_append_takes_its_turn(bench: Bench) -> None:
    shard = await bench.start()
    seen: list[int] = []
    for _ in range(3):
        shard.append([(b"a", b"1")], seen.append)
        bench.fake.topic.append(0, [(b"from others", b"1")], 0)
    shard._writer.note(3, seen.append)
    shard._writer.note(1, seen.append)
    shard._writer.note(5, seen.append)
    bench.fake[0].commit(2)
    await until(lambda: len(seen) == 2)
    assert seen == [0, 1]
    bench.fake[0].commit()
    await shard.wait_applied()
    assert seen == [0, 1, 2, 3, 4, 5]
    shard.close()
    shard._writer.note(6, seen.append)
    assert not shard._writer._writes


async def test_what_comes_before_the_first_write_does_not_wait_for_it(bench: Bench) -> None:
    shard = await bench.start()
    seen: list[int] = []
    bench.fake.topic.append(0, [(b"from others", b"1")], 0)
    shard.append([(b"a", b"1")], seen.append)
    await asyncio.sleep(0)  # the write is waited for
    bench.fake[0].commit(1)
    shard._writer.note(0, seen.append)
    await until(lambda: seen == [0])
    bench.fake[0].commit()
    await until(lambda: seen == [0, 1])


async def test_a_shard_that_knows_no_transactions_passes_over_them(bench: Bench) -> None:
    guard = bench.fake.topic.begin_verification(0, 7, 0, bumps_epoch=False)
    bench.fake.topic.append(0, [(b"a", b"1")], 0, Transaction(7, 0, guard))
    bench.log((b"b", b"2"))
    assert (await bench.start()).kept == {b"b": b"2"}
