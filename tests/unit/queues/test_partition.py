"""The owner of a share-partition on a real log, with a coordinator and a clock that the test holds."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import pytest

from millrace.clock import ManualClock
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import PartitionState
from millrace.queues.acquisition import (
    AcknowledgeBatch,
    Acquired,
    AcquireMode,
    DeadLetter,
    DeadLetterReason,
    Limits,
)
from millrace.queues.batches import RecordState, StateBatch, combine
from millrace.queues.partition import Fetched, FetchTerms, SharePartition
from millrace.queues.partitions import SharePartitions
from millrace.queues.records import ShareKey, Snapshot
from millrace.queues.settings import QueueSettings
from millrace.queues.state import Write
from millrace.records.batch import split
from millrace.records.control import EndMarker, MarkerType, encode_end_marker
from millrace.replication.partition import Partition
from millrace.replication.state_topic import yield_to_loop
from millrace.storage.files import Files
from millrace.storage.log import Log
from millrace.storage.producers import UNVERIFIED
from millrace.storage.recovery import LogState
from millrace.storage.settings import FlushMode, LogConfig
from support.batches import NOW_MS, batch

TOPIC_ID = uuid.UUID(int=7)
KEY = ShareKey("g", TOPIC_ID, 0)
ACCEPT, RELEASE, REJECT = 1, 2, 3
LEADS = PartitionState((1,), (1,), 1, 4)
TERMS = FetchTerms(max_records=500, max_bytes=1 << 20)
WITH_LETTERS = Limits(dead_letters=True, max_deliveries=2, lock_ms=1_000)


class Coordinator:
    """Keeps what is written; fails or waits when told to."""

    def __init__(self, start_offset: int = 0, batches: tuple[StateBatch, ...] = ()) -> None:
        self.found = Snapshot(0, 3, 0, start_offset, 0, 0, 0, batches)
        self.writes: list[Write] = []
        self.fail: ErrorCode | None = None
        self.gate: asyncio.Event | None = None

    async def read(self, key: ShareKey, leader_epoch: int) -> Snapshot:
        if self.fail is not None:
            raise ApiError(self.fail)
        return self.found

    async def write(self, key: ShareKey, write: Write) -> None:
        self.writes.append(write)
        if self.gate is not None:
            await self.gate.wait()
        if self.fail is not None:
            raise ApiError(self.fail)


class Office:
    """Takes dead letters, part by part; fails or waits when told to."""

    def __init__(self) -> None:
        self.delivered: list[DeadLetter] = []
        self.asked = 0
        self.at_once = 1_000
        self.room = 1_000
        self.fail: ErrorCode | None = None
        self.gate: asyncio.Event | None = None

    async def deliver(self, key: ShareKey, source: Partition, letter: DeadLetter, settings: QueueSettings) -> int:
        self.asked += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.fail is not None:
            raise ApiError(self.fail)
        if len(self.delivered) >= self.room:
            raise ApiError(ErrorCode.NOT_ENOUGH_REPLICAS)
        part = letter._replace(last_offset=min(letter.last_offset, letter.first_offset + self.at_once - 1))
        self.delivered.append(part)
        return part.last_offset


class Bench:
    """A share-partition, its log, and everything around it."""

    def __init__(self, home: Path, settings: QueueSettings, coordinator: Coordinator) -> None:
        self.clock = ManualClock(wall_ms=NOW_MS)
        self.settings = settings
        self.coordinator = coordinator
        config = LogConfig(flush_mode=FlushMode.OS)
        log = Log.open(home, config, clock=self.clock, files=Files(), state=LogState(clean=True))
        self.partition = Partition("t", 0, TOPIC_ID, open_log=lambda: log, clock=self.clock, broker_id=1)
        self.partition.lead(LEADS)
        self.office = Office()
        self.share = self.another()

    def another(self) -> SharePartition:
        """The same share-partition, yet to be loaded."""
        return SharePartition(
            KEY,
            self.partition,
            persister=self.coordinator,
            office=self.office,
            settings=lambda: self.settings,
            clock=self.clock,
        )

    def produce(self, *counts: int, timestamp_ms: int = NOW_MS) -> None:
        for count in counts:
            self.partition.append(batch(count, timestamp_ms=timestamp_ms))

    def fetch(self, member: str = "a", count: int = 500, mode: AcquireMode = AcquireMode.BATCH_OPTIMIZED) -> Fetched:
        return self.share.fetch(member, FetchTerms(count, 1 << 20, mode=mode))

    def say(self, first: int, last: int, *kinds: int, member: str = "a") -> asyncio.Task[None]:
        return asyncio.ensure_future(self.share.acknowledge(member, [AcknowledgeBatch(first, last, kinds)]))

    async def advance(self, seconds: float) -> None:
        await run_ready()
        self.clock.advance(seconds)
        await run_ready()


async def run_ready() -> None:
    for _ in range(10):
        await yield_to_loop()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    directory = tmp_path / "t-0"
    directory.mkdir()
    return directory


async def loaded(
    home: Path, *, limits: Limits | None = None, reset: str = "latest", coordinator: Coordinator | None = None
) -> Bench:
    bench = Bench(home, QueueSettings(limits or Limits(), reset), coordinator or Coordinator())
    await bench.share.load()
    return bench


async def test_only_the_batches_with_acquired_records_are_sent(home: Path) -> None:
    bench = await loaded(home)
    bench.produce(5, 5, 5)
    got = bench.fetch(count=7, mode=AcquireMode.RECORD_LIMIT)
    assert got.acquired == [Acquired(0, 6, 1)]
    assert [each.header.base_offset for each in split(got.records)] == [0, 5]
    rest = bench.fetch("b")
    assert rest.acquired == [Acquired(7, 14, 1)]
    assert [each.header.base_offset for each in split(rest.records)] == [5, 10]
    assert (rest.count, bench.fetch("c").count) == (8, 0)


async def test_answers_that_come_while_a_write_is_under_way_go_together(home: Path) -> None:
    bench = await loaded(home)
    bench.produce(10)
    bench.fetch()
    bench.coordinator.gate = asyncio.Event()
    said = [bench.say(0, 0, ACCEPT)]
    await run_ready()
    said += [bench.say(offset, offset, ACCEPT) for offset in range(1, 6)]
    await run_ready()
    assert not any(task.done() for task in said)
    bench.coordinator.gate.set()
    await asyncio.gather(*said)
    assert [write.batches for write in bench.coordinator.writes] == [
        [StateBatch(0, 0, RecordState.ACKNOWLEDGED, 1)],
        [StateBatch(1, 5, RecordState.ACKNOWLEDGED, 1)],
    ]
    last = bench.coordinator.writes[-1]
    assert (last.state_epoch, last.leader_epoch, last.start_offset, last.completed) == (3, 4, 1, 5)


async def test_what_is_not_stored_does_not_count(home: Path) -> None:
    bench = await loaded(home)
    bench.produce(3)
    bench.fetch()
    bench.coordinator.fail = ErrorCode.NOT_COORDINATOR
    with pytest.raises(ApiError) as refused:
        await bench.say(0, 2, ACCEPT)
    assert refused.value.code is ErrorCode.COORDINATOR_NOT_AVAILABLE
    bench.coordinator.fail = None
    await bench.advance(1)
    await bench.say(0, 2, ACCEPT)
    assert bench.coordinator.writes[-1].batches == [StateBatch(0, 2, RecordState.ACKNOWLEDGED, 1)]


async def test_a_fenced_leader_closes(home: Path) -> None:
    bench = await loaded(home)
    bench.produce(3)
    bench.fetch()
    news: list[None] = []
    bench.share.watchers.add(lambda: news.append(None))
    bench.coordinator.fail = ErrorCode.FENCED_LEADER_EPOCH
    for _ in range(2):
        with pytest.raises(ApiError) as refused:
            await bench.say(0, 2, ACCEPT)
        assert refused.value.code is ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert news
    with pytest.raises(ApiError):
        bench.fetch()


async def test_a_lock_that_runs_out_is_news_and_is_stored_until_that_succeeds(home: Path) -> None:
    bench = await loaded(home, limits=Limits(lock_ms=1000, max_deliveries=2))
    bench.produce(3)
    bench.fetch()
    news: list[None] = []
    bench.share.watchers.add(lambda: news.append(None))
    bench.coordinator.fail = ErrorCode.COORDINATOR_NOT_AVAILABLE
    await bench.advance(1)
    assert news
    assert bench.fetch("b").acquired == [Acquired(0, 2, 2)]
    bench.coordinator.fail = None
    await bench.advance(0.5)
    assert bench.coordinator.writes[-1].batches == [StateBatch(0, 2, RecordState.AVAILABLE, 1)]
    await bench.advance(0.5)
    await bench.advance(1)
    assert bench.coordinator.writes[-1].start_offset == 3, "delivered twice, and given up"
    assert bench.fetch("b").count == 0


async def test_a_record_that_rests_is_news_when_it_has_rested(home: Path) -> None:
    bench = await loaded(home, limits=Limits(backoff_ms=300, backoff_max_ms=1000))
    bench.produce(1)
    bench.fetch()
    await bench.say(0, 0, RELEASE)
    assert bench.fetch("b").count == 0
    news: list[None] = []
    bench.share.watchers.add(lambda: news.append(None))
    await bench.advance(0.29)
    assert not news
    await bench.advance(0.02)
    assert news
    assert bench.fetch("b").acquired == [Acquired(0, 0, 2)]


async def test_a_member_that_hangs_up_has_still_accepted(home: Path) -> None:
    bench = await loaded(home)
    bench.produce(3)
    bench.fetch()
    bench.coordinator.gate = asyncio.Event()
    said = bench.say(0, 2, ACCEPT)
    await run_ready()
    said.cancel()
    await run_ready()
    bench.coordinator.gate.set()
    await bench.advance(100)
    assert bench.fetch("b").count == 0


async def test_a_leadership_that_is_over_answers_nothing(home: Path) -> None:
    bench = await loaded(home)
    bench.produce(3)
    bench.fetch()
    bench.partition.lead(PartitionState((1,), (1,), 1, 5))
    with pytest.raises(ApiError) as refused:
        bench.fetch()
    assert refused.value.code is ErrorCode.NOT_LEADER_OR_FOLLOWER
    with pytest.raises(ApiError):
        await bench.say(0, 2, ACCEPT)


async def test_closing_answers_who_waits(home: Path) -> None:
    bench = await loaded(home)
    bench.produce(3)
    bench.fetch()
    bench.coordinator.gate = asyncio.Event()
    said = [bench.say(0, 0, ACCEPT)]
    await run_ready()
    said.append(bench.say(1, 1, ACCEPT))
    await run_ready()
    bench.share.close(ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER))
    for each in await asyncio.gather(*said, return_exceptions=True):
        assert isinstance(each, ApiError)
        assert each.code is ErrorCode.NOT_LEADER_OR_FOLLOWER


@pytest.mark.parametrize(
    ("reset", "first"), [("latest", 8), ("earliest", 0), ("by_duration:PT1H", 5), ("by_duration:P2DT0.5S", 0)]
)
async def test_where_a_group_begins(home: Path, reset: str, first: int) -> None:
    bench = Bench(home, QueueSettings(Limits(), reset), Coordinator(start_offset=-1))
    bench.produce(5, timestamp_ms=NOW_MS - 2 * 3_600_000)
    bench.produce(3, timestamp_ms=NOW_MS - 60_000)
    await bench.share.load()
    bench.produce(1)
    assert bench.fetch().acquired[0].first_offset == first


async def test_the_state_of_an_earlier_leader_is_taken_over(home: Path) -> None:
    stored = (
        StateBatch(1, 2, RecordState.ACKNOWLEDGED, 1),
        StateBatch(3, 3, RecordState.AVAILABLE, 2),
        StateBatch(5, 6, RecordState.ARCHIVING, 1),
    )
    bench = Bench(home, QueueSettings(), Coordinator(0, stored))
    bench.produce(10)
    await bench.share.load()
    assert bench.fetch().acquired == [Acquired(0, 0, 1), Acquired(3, 3, 3), Acquired(4, 4, 1), Acquired(7, 9, 1)]
    await run_ready()
    assert bench.coordinator.writes[0].batches == [StateBatch(5, 6, RecordState.ARCHIVED, 1)]


async def test_a_log_that_begins_later_than_the_state(home: Path) -> None:
    bench = await loaded(home)
    bench.produce(5, 5)
    assert bench.fetch(count=5).acquired == [Acquired(0, 4, 1)]
    bench.partition.delete_records_before(7)
    assert bench.fetch("b").acquired == [Acquired(7, 9, 1)]
    await bench.say(0, 4, ACCEPT)  # gone: nobody minds
    assert not bench.coordinator.writes


async def test_a_leader_that_is_not_sure_asks_the_coordinator(home: Path) -> None:
    bench = await loaded(home)
    bench.produce(5)
    await bench.share.confirm()
    assert [(write.leader_epoch, write.batches) for write in bench.coordinator.writes] == [(LEADS.leader_epoch, [])]
    assert bench.fetch().count == 5


async def test_a_write_under_way_confirms_nothing(home: Path) -> None:
    """It may have been taken before another leader came, and its answer may come long after."""
    bench = await loaded(home)
    bench.produce(5)
    bench.fetch()
    bench.coordinator.gate = asyncio.Event()
    accepting = bench.say(0, 1, ACCEPT)
    await run_ready()
    confirming = asyncio.ensure_future(bench.share.confirm())
    await run_ready()
    assert len(bench.coordinator.writes) == 1
    bench.coordinator.gate.set()
    await accepting
    await confirming
    assert len(bench.coordinator.writes) == 2


async def test_a_leader_that_was_replaced_learns_it_where_it_asks(home: Path) -> None:
    bench = await loaded(home)
    bench.produce(5)
    bench.coordinator.fail = ErrorCode.FENCED_LEADER_EPOCH
    with pytest.raises(ApiError) as refused:
        await bench.share.confirm()
    assert refused.value.code is ErrorCode.NOT_LEADER_OR_FOLLOWER
    with pytest.raises(ApiError):
        bench.fetch()


async def test_a_coordinator_that_is_away_confirms_nothing(home: Path) -> None:
    bench = await loaded(home)
    bench.produce(5)
    bench.coordinator.fail = ErrorCode.NOT_COORDINATOR
    with pytest.raises(ApiError) as refused:
        await bench.share.confirm()
    assert refused.value.code is ErrorCode.COORDINATOR_NOT_AVAILABLE
    bench.coordinator.fail = None
    await bench.advance(1)
    await bench.share.confirm()
    assert bench.fetch().count == 5


def share_partitions(bench: Bench) -> SharePartitions:
    return SharePartitions(
        find=lambda _topic_id, _index: bench.partition,
        persister=bench.coordinator,
        office=bench.office,
        settings_of=lambda _group: bench.settings,
        holds_lease=lambda: True,
        max_sessions=10,
        clock=bench.clock,
    )


async def test_share_partitions_load_once_and_again_in_another_epoch(home: Path) -> None:
    bench = Bench(home, QueueSettings(), Coordinator())
    queues = share_partitions(bench)
    one, two = await asyncio.gather(queues.get(KEY), queues.get(KEY))
    assert one is two is await queues.get(KEY)
    bench.partition.lead(PartitionState((1,), (1,), 1, 5))
    three = await queues.get(KEY)
    assert three is not one
    assert one.error is not None
    queues.unled(TOPIC_ID, [0])
    assert three.error is not None
    bench.coordinator.fail = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    for _ in range(2):
        with pytest.raises(ApiError) as refused:
            await queues.get(KEY)
        assert refused.value.code is ErrorCode.COORDINATOR_NOT_AVAILABLE
    bench.coordinator.fail = None
    await queues.get(KEY)
    await queues.stop()
    with pytest.raises(ApiError):
        await queues.get(KEY)


async def test_the_last_member_takes_the_share_partition_with_it(home: Path) -> None:
    bench = Bench(home, QueueSettings(), Coordinator())
    queues = share_partitions(bench)
    for member in "ab":
        queues.sessions.fetch("g", member, 0, added=[(TOPIC_ID, 0)])
    share = await queues.get(KEY)
    bench.produce(4)
    assert share.fetch("a", FetchTerms(2, 1 << 20, mode=AcquireMode.RECORD_LIMIT)).count == 2
    queues.end_session("g", "a")
    await run_ready()
    assert bench.coordinator.writes[-1].batches == [StateBatch(0, 1, RecordState.AVAILABLE, 1)]
    assert await queues.get(KEY) is share
    assert share.fetch("b", TERMS).count == 4
    bench.coordinator.gate = asyncio.Event()
    queues.end_session("g", "b")
    await run_ready()
    queues.sessions.fetch("g", "c", 0, added=[(TOPIC_ID, 0)])
    loading = asyncio.ensure_future(queues.get(KEY))
    await run_ready()
    assert not loading.done(), "the state is read before everything is stored"
    bench.coordinator.gate.set()
    assert await loading is not share
    assert share.error is not None
    await queues.stop()


async def test_a_member_does_not_wait_for_ever_for_what_others_left(home: Path) -> None:
    bench = Bench(home, QueueSettings(), Coordinator())
    queues = share_partitions(bench)
    queues.sessions.fetch("g", "a", 0, added=[(TOPIC_ID, 0)])
    share = await queues.get(KEY)
    bench.produce(1)
    share.fetch("a", TERMS)
    bench.coordinator.gate = asyncio.Event()
    queues.end_session("g", "a")
    await run_ready()
    queues.sessions.fetch("g", "b", 0, added=[(TOPIC_ID, 0)])
    loading = asyncio.ensure_future(queues.get(KEY))
    await bench.advance(6)
    with pytest.raises(ApiError) as refused:
        await loading
    assert refused.value.code is ErrorCode.REQUEST_TIMED_OUT
    bench.coordinator.gate.set()
    assert await queues.get(KEY) is not share
    await queues.stop()


async def test_letters_are_written_when_the_members_are_gone(home: Path) -> None:
    bench = Bench(home, QueueSettings(WITH_LETTERS), Coordinator())
    queues = share_partitions(bench)
    queues.sessions.fetch("g", "a", 0, added=[(TOPIC_ID, 0)])
    share = await queues.get(KEY)
    bench.produce(2)
    share.fetch("a", TERMS)
    bench.office.gate = asyncio.Event()
    await share.acknowledge("a", [AcknowledgeBatch(0, 1, [REJECT])])
    queues.end_session("g", "a")
    await run_ready()
    assert share.error is None
    bench.office.gate.set()
    await run_ready()
    assert [each[:2] for each in bench.office.delivered] == [(0, 1)]
    assert share.error is not None
    assert bench.coordinator.writes[-1].start_offset == 2
    await queues.stop()


# --- dead letters -----------------------------------------------------------------------------------------------------


def stored(bench: Bench) -> list[StateBatch]:
    """What the coordinator would have by now."""
    found: list[StateBatch] = []
    for write in bench.coordinator.writes:
        found = combine(found, write.batches, write.start_offset)
    return found


async def test_a_record_is_archived_when_its_letter_is_written(home: Path) -> None:
    bench = await loaded(home, limits=WITH_LETTERS)
    bench.produce(5)
    bench.fetch()
    bench.office.gate = asyncio.Event()
    await bench.say(0, 4, ACCEPT, REJECT, REJECT, ACCEPT, ACCEPT)
    await run_ready()
    assert stored(bench)[1] == StateBatch(1, 2, RecordState.ARCHIVING, 1)
    assert bench.coordinator.writes[-1].start_offset == 0, "the start is moved by the next write"
    assert bench.fetch("b").count == 0
    bench.office.gate.set()
    await run_ready()
    assert bench.office.delivered == [DeadLetter(1, 2, 1, DeadLetterReason.REJECTED)]
    assert bench.coordinator.writes[-1].start_offset == 5


async def test_what_is_delivered_too_often_becomes_a_letter(home: Path) -> None:
    bench = await loaded(home, limits=WITH_LETTERS)
    bench.produce(2)
    bench.fetch()
    await bench.say(0, 0, RELEASE)
    assert bench.fetch("b").acquired == [Acquired(0, 0, 2)]
    await bench.say(0, 0, RELEASE, member="b")
    await run_ready()
    assert bench.office.delivered == [DeadLetter(0, 0, 2, DeadLetterReason.DELIVERY_COUNT_EXCEEDED)]
    await bench.advance(1.1)
    assert bench.fetch("b").acquired == [Acquired(1, 1, 2)]
    await bench.advance(1.1)
    assert bench.office.delivered[1:] == [DeadLetter(1, 1, 2, DeadLetterReason.LOCK_TIMEOUT)]


async def test_a_letter_that_cannot_be_written_is_tried_ever_less_often_and_never_given_up(home: Path) -> None:
    bench = await loaded(home, limits=WITH_LETTERS)
    bench.produce(1)
    bench.fetch()
    bench.office.fail = ErrorCode.NOT_ENOUGH_REPLICAS
    await bench.say(0, 0, REJECT)
    await run_ready()
    asked = []
    for _ in range(4):
        await bench.advance(0.2)
        asked.append(bench.office.asked)
    assert asked == [2, 2, 3, 3]
    bench.office.fail = None
    await bench.advance(60)
    assert bench.office.delivered == [DeadLetter(0, 0, 1, DeadLetterReason.REJECTED)]
    assert bench.coordinator.writes[-1].start_offset == 1


async def test_a_long_letter_is_done_part_by_part(home: Path) -> None:
    bench = await loaded(home, limits=WITH_LETTERS)
    bench.produce(5)
    bench.fetch()
    bench.office.at_once, bench.office.room = 2, 1
    await bench.say(0, 4, REJECT)
    await run_ready()
    assert bench.coordinator.writes[-1].start_offset == 2
    assert stored(bench)[-1] == StateBatch(2, 4, RecordState.ARCHIVING, 1)
    bench.office.room = 3
    await bench.advance(1)
    assert [each[:2] for each in bench.office.delivered] == [(0, 1), (2, 3), (4, 4)]
    assert bench.coordinator.writes[-1].start_offset == 5


async def test_another_leader_writes_the_letters_that_were_left(home: Path) -> None:
    bench = await loaded(home, limits=WITH_LETTERS)
    bench.produce(3)
    bench.fetch()
    bench.office.gate = asyncio.Event()
    await bench.say(0, 2, ACCEPT, REJECT, ACCEPT)
    await run_ready()
    bench.share.close(ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER))
    await run_ready()
    assert not bench.office.delivered
    bench.office.gate = None
    bench.coordinator.found = Snapshot(0, 3, 0, 0, 0, 0, 0, tuple(stored(bench)))
    next_one = bench.another()
    await next_one.load()
    await run_ready()
    assert bench.office.delivered == [DeadLetter(1, 1, 1, DeadLetterReason.REJECTED)]
    assert bench.coordinator.writes[-1].start_offset == 3


# --- transactions -----------------------------------------------------------------------------------------------------


def transact(bench: Bench, producer_id: int, count: int, sequence: int) -> None:
    data = batch(count, producer_id=producer_id, producer_epoch=0, sequence=sequence, transactional=True)
    bench.partition.append(data, verification=UNVERIFIED)


def finish(bench: Bench, producer_id: int, kind: MarkerType) -> None:
    marker = encode_end_marker(EndMarker(kind, 0), producer_id=producer_id, producer_epoch=0, timestamp_ms=NOW_MS)
    bench.partition.append(marker, from_client=False)


async def test_members_get_neither_open_nor_aborted_transactions_if_they_want_none(home: Path) -> None:
    bench = await loaded(home)
    bench.settings = QueueSettings(reads_committed=True)
    bench.produce(2)
    transact(bench, 7, 3, 0)
    bench.produce(2)
    assert bench.fetch().acquired == [Acquired(0, 1, 1)]
    assert bench.fetch().count == 0
    assert bench.share.readable_bytes() == 0
    finish(bench, 7, MarkerType.ABORT)
    assert bench.share.readable_bytes() > 0
    assert bench.fetch().acquired == [Acquired(5, 6, 1)]
    transact(bench, 7, 2, 3)
    finish(bench, 7, MarkerType.COMMIT)
    assert bench.fetch().acquired == [Acquired(8, 9, 1)]
    await bench.say(0, 1, ACCEPT)
    await bench.say(5, 6, ACCEPT)
    await bench.say(8, 9, ACCEPT)
    bench.produce(1)
    assert bench.fetch().acquired == [Acquired(11, 11, 1)]
    await bench.say(11, 11, ACCEPT)
    assert bench.coordinator.writes[-1].start_offset <= 11


async def test_a_transaction_has_ended_when_its_marker_is_committed(home: Path) -> None:
    bench = await loaded(home)
    bench.settings = QueueSettings(reads_committed=True)
    bench.partition.apply_config(LogConfig(flush_mode=FlushMode.GROUP))
    transact(bench, 7, 3, 0)
    bench.partition.log.flush()
    finish(bench, 7, MarkerType.COMMIT)
    assert bench.partition.high_watermark.offset == 3, "the marker is in the log, and not committed"
    assert bench.fetch().count == 0
    bench.partition.log.flush()
    assert bench.fetch().acquired == [Acquired(0, 2, 1)]


async def test_members_get_everything_if_they_do_not_care(home: Path) -> None:
    bench = await loaded(home)
    bench.produce(1)
    transact(bench, 7, 3, 0)
    assert bench.fetch().acquired == [Acquired(0, 3, 1)]
    finish(bench, 7, MarkerType.ABORT)
    bench.produce(1)
    assert bench.fetch().acquired == [Acquired(5, 5, 1)]


async def test_a_long_way_without_records_is_gone_in_several_turns(home: Path) -> None:
    bench = await loaded(home)
    bench.settings = QueueSettings(reads_committed=True)
    for sequence in range(40):
        transact(bench, 7, 40, sequence * 40)
    finish(bench, 7, MarkerType.ABORT)
    bench.produce(1)
    woken = 0

    def wake() -> None:
        nonlocal woken
        woken += 1

    bench.share.watchers.add(wake)
    terms = FetchTerms(1, 1)
    assert bench.share.fetch("a", terms).count == 0
    for turn in range(1, 3):
        await run_ready()
        assert woken == turn
        found = bench.share.fetch("a", terms)
    assert found.acquired == [Acquired(1_601, 1_601, 1)]
    await run_ready()
    assert woken == 2
