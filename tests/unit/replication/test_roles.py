"""A partition that leads, follows, and changes from one to the other, with real logs."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.clock import ManualClock
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import PartitionState
from millrace.replication.partition import Partition
from millrace.storage.files import Files
from millrace.storage.log import Log
from millrace.storage.reading import ReadResult
from millrace.storage.settings import FlushMode, LogConfig
from support.batches import NOW_MS, batch

CONFIG = LogConfig(flush_mode=FlushMode.OS, segment_bytes=4_000)
TOPIC_ID = uuid.uuid4()
STATE = PartitionState((1, 2, 3), (1, 2, 3), 1, leader_epoch=4, partition_epoch=7)


class Replica:
    """One replica of t-0 on broker `broker_id`."""

    def __init__(self, home: Path, broker_id: int, config: LogConfig = CONFIG) -> None:
        self.clock = ManualClock(NOW_MS)
        directory = home / str(broker_id)
        directory.mkdir()
        self.log = Log.open(directory, config, clock=self.clock, files=Files())
        self.partition = Partition(
            "t", 0, TOPIC_ID, open_log=lambda: self.log, clock=self.clock, broker_id=broker_id, max_lag_s=10.0
        )

    def fetch_from(self, leader: Replica, *, broker_epoch: int = 100, max_bytes: int = 1 << 20) -> None:
        """One fetch, as a follower makes it."""
        offset, epoch = self.partition.fetch_position()
        read = leader.partition.serve_follower(
            self.partition.broker_id,
            broker_epoch,
            offset,
            epoch,
            max_bytes,
            at_least_one=True,
            log_start=self.log.start_offset,
        )
        if isinstance(read, ReadResult):
            self.partition.append_from_leader(memoryview(read.data), self.partition.leader_epoch)
            self.partition.follow_leader_marks(leader.partition.high_watermark.offset, leader.log.start_offset)
        else:
            self.partition.truncate_to_leader(*read)

    def content(self) -> bytes:
        found, offset = b"", self.log.start_offset
        while offset < self.log.end_offset:
            read = self.log.read(offset, 1 << 20)
            found, offset = found + bytes(read.data), read.next_offset
        return found


@pytest.fixture
def trio(tmp_path: Path) -> tuple[Replica, Replica, Replica]:
    one, two, three = (Replica(tmp_path, broker_id) for broker_id in (1, 2, 3))
    one.partition.lead(STATE)
    two.partition.follow(STATE)
    three.partition.follow(STATE)
    return one, two, three


def test_a_record_is_committed_when_every_member_has_it(trio: tuple[Replica, Replica, Replica]) -> None:
    one, two, three = trio
    told: list[Exception | None] = []
    appended = one.partition.append(batch(5))
    assert one.partition.when_committed(appended.last_offset, told.append)
    for follower in (two, three, two):
        follower.fetch_from(one)
    assert one.partition.high_watermark.offset == 0  # 3 has it, but has not said so
    assert not told
    three.fetch_from(one)
    assert one.partition.high_watermark.offset == 5
    assert told == [None]
    two.fetch_from(one)
    assert two.partition.high_watermark.offset == 5
    assert two.content() == one.content()


def test_a_leader_that_lost_its_place_tells_who_waits(trio: tuple[Replica, Replica, Replica]) -> None:
    one, _, _ = trio
    told: list[Exception | None] = []
    appended = one.partition.append(batch(1))
    one.partition.when_committed(appended.last_offset, told.append)
    one.partition.follow(replace(STATE, leader=2, leader_epoch=5, partition_epoch=8))
    (error,) = told
    assert isinstance(error, ApiError)
    assert error.code is ErrorCode.NOT_LEADER_OR_FOLLOWER
    with pytest.raises(ApiError) as caught:
        one.partition.append(batch(1))
    assert caught.value.code is ErrorCode.NOT_LEADER_OR_FOLLOWER


def test_a_log_that_diverged_is_cut_where_the_epochs_part(trio: tuple[Replica, Replica, Replica]) -> None:
    one, two, three = trio
    one.partition.append(batch(5))
    two.fetch_from(one)
    three.fetch_from(one)
    one.partition.append(batch(7))  # nobody gets these
    after = replace(STATE, isr=(2, 3), leader=2, leader_epoch=5, partition_epoch=8)
    for replica in (two, three, one):
        (replica.partition.lead if replica is two else replica.partition.follow)(after)
    two.partition.append(batch(3))
    assert one.partition.fetch_position() == (12, 4)
    one.fetch_from(two)
    assert one.log.end_offset == 5
    one.fetch_from(two)
    assert one.content() == two.content()
    assert one.log.latest_epoch == 5


def test_a_log_that_begins_within_a_batch_can_be_followed(trio: tuple[Replica, Replica, Replica]) -> None:
    one, two, three = trio
    one.partition.append(batch(5))
    for follower in (two, three, two, three):
        follower.fetch_from(one)
    one.partition.delete_records_before(3)
    three.partition.restart_at(one.log.start_offset)  # as one does that is new, or was away for too long
    three.fetch_from(one)
    assert (three.log.start_offset, three.log.end_offset) == (3, 5)
    assert three.partition.high_watermark.offset == 5
    assert three.content() == one.content()
    one.partition.append(batch(2))
    three.fetch_from(one)
    assert three.log.end_offset == 7
    assert three.content() == one.content()


def test_an_epoch_without_records_does_not_keep_a_follower_out(trio: tuple[Replica, Replica, Replica]) -> None:
    one, two, three = trio
    one.partition.append(batch(5))
    two.fetch_from(one)
    three.fetch_from(one)
    two.partition.lead(replace(STATE, isr=(2, 3), leader=2, leader_epoch=5))  # and dies without a record
    after = replace(STATE, isr=(3,), leader=3, leader_epoch=6)
    three.partition.lead(after)
    two.partition.follow(after)
    assert two.partition.fetch_position() == (5, 5)
    two.fetch_from(three)
    assert two.partition.fetch_position() == (5, 4)
    three.partition.append(batch(1))
    two.fetch_from(three)
    assert two.content() == three.content()


def test_below_min_insync_replicas_nothing_is_taken_or_committed(trio: tuple[Replica, Replica, Replica]) -> None:
    one, two, _ = trio
    one.partition.set_min_insync_replicas(2)
    one.partition.check_in_sync()
    appended = one.partition.append(batch(1))
    one.partition.lead(replace(STATE, isr=(1,), partition_epoch=8))
    with pytest.raises(ApiError) as caught:
        one.partition.check_in_sync()
    assert caught.value.code is ErrorCode.NOT_ENOUGH_REPLICAS
    assert one.partition.high_watermark.offset == 0
    two.fetch_from(one)
    two.fetch_from(one)
    one.partition.lead(replace(STATE, isr=(1, 2), partition_epoch=9))
    assert one.partition.high_watermark.offset == appended.last_offset + 1


def test_more_members_are_asked_for_than_there_are_replicas(tmp_path: Path) -> None:
    alone = Replica(tmp_path, 1)
    alone.partition.set_min_insync_replicas(3)
    alone.partition.lead(PartitionState((1,), (1,), 1))
    alone.partition.check_in_sync()


def test_a_proposed_member_counts_at_once_and_a_removed_one_until_it_is_gone(
    trio: tuple[Replica, Replica, Replica],
) -> None:
    one, two, three = trio
    one.partition.lead(replace(STATE, isr=(1, 2), partition_epoch=8))
    one.partition.append(batch(5))
    for _ in range(2):
        two.fetch_from(one)
    assert one.partition.high_watermark.offset == 5
    for _ in range(2):
        three.fetch_from(one)
    assert one.partition.wanted_isr() == ((1, -1), (2, 100), (3, 100))
    one.partition.is_eligible = lambda broker, _epoch: broker != 3
    assert one.partition.wanted_isr() is None
    one.partition.propose((1, 2, 3))
    one.partition.append(batch(5))
    for _ in range(2):
        two.fetch_from(one)
    assert one.partition.high_watermark.offset == 5
    one.partition.lead(replace(STATE, isr=(1, 2), partition_epoch=9))  # something else happened: not proposed any more
    one.clock.advance(60)
    two.fetch_from(one)
    assert one.partition.high_watermark.offset == 10


def test_nobody_waits_for_a_replica_that_is_dead(trio: tuple[Replica, Replica, Replica]) -> None:
    one, two, three = trio
    for follower in (two, three):
        follower.fetch_from(one)
    one.partition.is_eligible = lambda broker, _epoch: broker != 3
    one.partition.lead(replace(STATE, isr=(1, 2), partition_epoch=8))
    one.partition.append(batch(5))
    for _ in range(2):
        two.fetch_from(one)
    assert one.partition.high_watermark.offset == 5


def test_a_replica_that_was_taken_out_is_waited_for_again_after_its_next_fetch(
    trio: tuple[Replica, Replica, Replica],
) -> None:
    """It may be alive and unable to fetch, behind a link that refuses it."""
    one, two, three = trio
    one.partition.append(batch(5))
    for _ in range(2):
        two.fetch_from(one)
        three.fetch_from(one)
    one.partition.lead(replace(STATE, isr=(1, 2), partition_epoch=8))
    assert one.partition.wanted_isr() is None
    one.partition.append(batch(5))
    for _ in range(2):
        two.fetch_from(one)
    assert one.partition.high_watermark.offset == 10
    three.fetch_from(one)
    three.fetch_from(one)
    assert one.partition.wanted_isr() == ((1, -1), (2, 100), (3, 100))


def test_a_replica_that_dies_while_it_joins_is_not_waited_for(trio: tuple[Replica, Replica, Replica]) -> None:
    one, two, three = trio
    one.partition.lead(replace(STATE, isr=(1, 2), partition_epoch=8))
    three.fetch_from(one)
    one.partition.append(batch(5))
    for _ in range(2):
        two.fetch_from(one)
    assert one.partition.high_watermark.offset == 0
    one.partition.is_eligible = lambda broker, _epoch: broker != 3
    one.partition.reconsider()
    assert one.partition.high_watermark.offset == 5


def test_a_member_that_stays_behind_is_to_leave(trio: tuple[Replica, Replica, Replica]) -> None:
    one, two, _ = trio
    one.partition.append(batch(5))
    one.clock.advance(9)
    two.fetch_from(one)
    two.fetch_from(one)
    assert one.partition.wanted_isr() is None
    one.clock.advance(2)
    assert one.partition.wanted_isr() == ((1, -1), (2, 100))


def test_only_the_newest_incarnation_of_a_replica_is_served(trio: tuple[Replica, Replica, Replica]) -> None:
    one, two, _ = trio
    two.fetch_from(one, broker_epoch=101)
    with pytest.raises(ApiError) as caught:
        two.fetch_from(one, broker_epoch=100)
    assert caught.value.code is ErrorCode.NOT_LEADER_OR_FOLLOWER
    with pytest.raises(ApiError):
        one.partition.serve_follower(9, 100, 0, -1, 100, at_least_one=True)


def test_a_new_leader_says_that_it_does_not_know_yet(trio: tuple[Replica, Replica, Replica]) -> None:
    one, two, three = trio
    one.partition.append(batch(5))
    two.fetch_from(one)
    after = replace(STATE, isr=(2, 3), leader=2, leader_epoch=5)
    two.partition.lead(after)
    three.partition.follow(after)
    with pytest.raises(ApiError) as caught:
        two.partition.latest_offset()
    assert caught.value.code is ErrorCode.OFFSET_NOT_AVAILABLE
    three.fetch_from(two)
    three.fetch_from(two)
    assert two.partition.latest_offset() == 5


def test_a_follower_promises_only_what_it_has_flushed(tmp_path: Path) -> None:
    config = replace(CONFIG, flush_mode=FlushMode.GROUP)
    one, two = Replica(tmp_path, 1, config), Replica(tmp_path, 2, config)
    state = PartitionState((1, 2), (1, 2), 1)
    one.partition.lead(state)
    two.partition.follow(state)
    one.partition.append(batch(5))
    two.fetch_from(one)
    promises = [two.partition.is_flushed]
    two.log.flush()
    promises.append(two.partition.is_flushed)
    assert promises == [False, True]
    two.fetch_from(one)
    assert one.partition.high_watermark.offset == 0  # the leader has not flushed itself
    one.log.flush()
    assert one.partition.high_watermark.offset == 5


def test_while_somebody_else_is_eligible_nothing_is_committed(trio: tuple[Replica, Replica, Replica]) -> None:
    one, two, three = trio
    one.partition.append(batch(1))
    for follower in (two, three, two, three):
        follower.fetch_from(one)
    assert one.partition.high_watermark.offset == 1
    # Whatever this broker's settings say of min.insync.replicas: the controller counts on broker 2.
    state = replace(one.partition.state, isr=(1,), elr=(2,), partition_epoch=one.partition.state.partition_epoch + 1)
    one.partition.lead(state)
    one.partition.append(batch(1))
    assert one.partition.high_watermark.offset == 1
    with pytest.raises(ApiError, match="replicas are in sync"):
        one.partition.check_in_sync()
    one.partition.lead(replace(state, elr=(), partition_epoch=state.partition_epoch + 1))
    one.partition.check_in_sync()
    for follower in (two, three, two, three):
        follower.fetch_from(one)
    assert one.partition.high_watermark.offset == 2


def test_large_answers_are_cut_to_fit_segments(trio: tuple[Replica, Replica, Replica]) -> None:
    one, two, _ = trio
    for _ in range(60):
        one.partition.append(batch(5, size=100))
    while two.log.end_offset < one.log.end_offset:
        two.fetch_from(one)
    assert two.content() == one.content()
    assert two.log.segment_count > 5


def test_what_the_leader_deleted_goes_here_too(trio: tuple[Replica, Replica, Replica]) -> None:
    one, two, three = trio
    for _ in range(3):
        one.partition.append(batch(5))
    for follower in (two, three, two, three):
        follower.fetch_from(one)
    assert one.partition.delete_records_before(10) == 10
    two.fetch_from(one)
    assert two.log.start_offset == 10


async def test_records_are_deleted_when_every_live_replica_has_forgotten_them(
    trio: tuple[Replica, Replica, Replica],
) -> None:
    one, two, three = trio
    one.partition.append(batch(5))
    for follower in (two, three) * 3:
        follower.fetch_from(one)
    assert one.partition.delete_records_before(4) == 4
    waiting = asyncio.create_task(one.partition.wait_deleted(4))
    for follower in (two, three, two):
        follower.fetch_from(one)
        await asyncio.sleep(0)
        assert not waiting.done(), "3 has heard of it, but has not said so"
    three.fetch_from(one)
    assert await waiting == 4
    assert [replica.log.start_offset for replica in trio] == [4, 4, 4]
    assert one.partition.leadership is not None
    assert not one.partition.leadership.start_watchers


async def test_nobody_waits_for_a_dead_replica_to_forget(trio: tuple[Replica, Replica, Replica]) -> None:
    one, two, three = trio
    one.partition.append(batch(5))
    for follower in (two, three) * 3:
        follower.fetch_from(one)
    one.partition.delete_records_before(4)
    waiting = asyncio.create_task(one.partition.wait_deleted(4))
    two.fetch_from(one)
    two.fetch_from(one)
    await asyncio.sleep(0)
    assert not waiting.done()
    one.partition.is_eligible = lambda broker_id, _: broker_id != 3
    one.partition.reconsider()
    assert await waiting == 4


async def test_who_loses_the_leadership_does_not_wait_for_a_deletion(trio: tuple[Replica, Replica, Replica]) -> None:
    one, two, three = trio
    one.partition.append(batch(5))
    for follower in (two, three) * 2:
        follower.fetch_from(one)
    one.partition.delete_records_before(4)
    waiting = asyncio.create_task(one.partition.wait_deleted(4))
    await asyncio.sleep(0)
    one.partition.follow(replace(STATE, leader=2, leader_epoch=5, partition_epoch=8))
    with pytest.raises(ApiError) as caught:
        await waiting
    assert caught.value.code is ErrorCode.NOT_LEADER_OR_FOLLOWER
    with pytest.raises(ApiError) as caught:
        await one.partition.wait_deleted(4)
    assert caught.value.code is ErrorCode.NOT_LEADER_OR_FOLLOWER


async def test_a_leader_that_is_elected_again_asks_everybody_anew(trio: tuple[Replica, Replica, Replica]) -> None:
    one, two, three = trio
    one.partition.append(batch(5))
    for follower in (two, three) * 2:
        follower.fetch_from(one)
    one.partition.append(batch(1))
    told: list[Exception | None] = []
    one.partition.when_committed(5, told.append)
    one.partition.delete_records_before(4)
    waiting = asyncio.create_task(one.partition.wait_deleted(4))
    two.fetch_from(one)
    two.fetch_from(one)
    again = replace(STATE, leader_epoch=5, partition_epoch=8)
    for replica in trio:
        (replica.partition.lead if replica is one else replica.partition.follow)(again)
    three.fetch_from(one)
    three.fetch_from(one)
    await asyncio.sleep(0)
    assert (told, waiting.done()) == ([], False), "2 has it all, but has not said so in this epoch"
    two.fetch_from(one)
    assert told == [None]
    assert await waiting == 4


def test_a_follower_knows_of_no_followers(trio: tuple[Replica, Replica, Replica]) -> None:
    one, two, _ = trio
    one.partition.set_min_insync_replicas(2)
    two.fetch_from(one)
    one.partition.lead(replace(STATE, isr=(1,), partition_epoch=8))
    assert one.partition.under_min_isr
    one.partition.follow(replace(STATE, leader=2, leader_epoch=5, partition_epoch=9))
    assert one.partition.leadership is None
    assert not one.partition.under_min_isr
    assert one.partition.wanted_isr() is None
    with pytest.raises(ApiError) as caught:
        two.fetch_from(one)
    assert caught.value.code is ErrorCode.NOT_LEADER_OR_FOLLOWER
