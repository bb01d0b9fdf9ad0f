"""A led partition on a real log: what is committed, and what may be read."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.clock import ManualClock
from millrace.errors import ApiError, ErrorCode, StorageError
from millrace.metadata.deltas import PartitionState
from millrace.replication.leadership import GAPS_EXCUSED_S
from millrace.replication.partition import Partition
from millrace.storage.files import Files
from millrace.storage.log import Log
from millrace.storage.settings import FlushMode, LogConfig
from support.batches import NOW_MS, batch, from_producer, with_header

CONFIG = LogConfig(flush_mode=FlushMode.OS, segment_bytes=40_000)


class Rig:
    """A partition, its log, and a clock that a test moves."""

    def __init__(self, directory: Path, config: LogConfig = CONFIG) -> None:
        self.clock = ManualClock(NOW_MS)
        self.log = Log.open(directory, config, clock=self.clock, files=Files())
        self.partition = Partition("t", 0, uuid.uuid4(), open_log=lambda: self.log, clock=self.clock, broker_id=1)
        self.partition.lead(PartitionState((1,), (1,), 1, leader_epoch=3))

    def fill(self, batches: int, records: int = 20) -> None:
        for _ in range(batches):
            self.partition.append(batch(records))


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_without_flushing_the_end_of_the_log_is_committed(rig: Rig) -> None:
    rig.fill(2)
    assert rig.partition.high_watermark.offset == 40 == rig.partition.committed.offset


def test_in_group_mode_only_what_is_on_disk_is_committed_and_readable(tmp_path: Path) -> None:
    rig = Rig(tmp_path, replace(CONFIG, flush_mode=FlushMode.GROUP))
    rig.fill(1)
    told: list[Exception | None] = []
    assert rig.partition.when_committed(19, told.append)
    assert rig.partition.high_watermark.offset == 0
    assert rig.partition.read(0, 10_000, at_least_one=True).data == b""
    rig.log.flush()
    assert told == [None]
    assert rig.partition.high_watermark.offset == 20
    assert rig.partition.read(0, 10_000, at_least_one=True).next_offset == 20


def test_what_is_remembered_of_the_high_watermark_is_on_disk(tmp_path: Path) -> None:
    rig = Rig(tmp_path, replace(CONFIG, flush_mode=FlushMode.GROUP))
    rig.fill(1)
    rig.log.flush()
    rig.partition.follow(PartitionState((1, 2), (2,), 2, leader_epoch=4))
    sent = with_header(batch(20), base_offset=20, leader_epoch=4)
    rig.partition.append_from_leader(memoryview(sent), 4)
    rig.partition.follow_leader_marks(40, 0)
    assert rig.partition.high_watermark.offset == 40
    assert rig.partition.known_high_watermark == 20, "a power cut may bring back what was there before"
    rig.log.flush()
    assert rig.partition.known_high_watermark == 40


def test_without_group_mode_any_more_nothing_waits_for_the_disk(tmp_path: Path) -> None:
    group = replace(CONFIG, flush_mode=FlushMode.GROUP)
    rig = Rig(tmp_path, group)
    rig.fill(1)
    told: list[Exception | None] = []
    rig.partition.when_committed(19, told.append)
    rig.partition.apply_config(CONFIG)
    assert told == [None]
    assert rig.partition.high_watermark.offset == 20
    rig.partition.apply_config(group)
    rig.fill(1)
    assert rig.partition.high_watermark.offset == 20, "from here on it waits again"


def test_a_follower_that_waits_for_its_flush_hears_that_it_need_not(tmp_path: Path) -> None:
    rig = Rig(tmp_path, replace(CONFIG, flush_mode=FlushMode.GROUP))
    rig.fill(1)
    rig.partition.follow(PartitionState((1, 2), (1, 2), 2, leader_epoch=4))
    woken: list[bool] = []
    rig.partition.flush_watchers.add(lambda: woken.append(rig.partition.is_flushed))
    rig.partition.apply_config(replace(CONFIG, retention_ms=1, flush_mode=FlushMode.GROUP))
    assert woken == []
    rig.partition.apply_config(CONFIG)
    assert woken == [True]


def test_settings_reach_a_log_that_is_offline(tmp_path: Path) -> None:
    rig = Rig(tmp_path, replace(CONFIG, flush_mode=FlushMode.GROUP))
    rig.fill(1)
    rig.log.fail(StorageError("the disk is gone"))
    rig.partition.apply_config(CONFIG)
    assert rig.log.config is CONFIG


@pytest.mark.parametrize(("epoch", "code"), [(2, ErrorCode.FENCED_LEADER_EPOCH), (4, ErrorCode.UNKNOWN_LEADER_EPOCH)])
def test_another_leader_epoch_is_refused(rig: Rig, epoch: int, code: ErrorCode) -> None:
    rig.partition.check_leader_epoch(3)
    rig.partition.check_leader_epoch(-1)
    with pytest.raises(ApiError) as caught:
        rig.partition.check_leader_epoch(epoch)
    assert caught.value.code is code


@pytest.mark.parametrize("offset", [-1, 41, 2**62])
def test_outside_of_the_log_nothing_is_read(rig: Rig, offset: int) -> None:
    rig.fill(2)
    with pytest.raises(ApiError) as caught:
        rig.partition.read(offset, 1000, at_least_one=True)
    assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE


def test_deleted_records_are_out_of_range(rig: Rig) -> None:
    rig.fill(3)
    assert rig.partition.delete_records_before(20) == 20
    assert rig.partition.delete_records_before(-1) == 60
    with pytest.raises(ApiError):
        rig.partition.delete_records_before(61)
    with pytest.raises(ApiError):
        rig.partition.read(59, 1000, at_least_one=True)


class TestALogThatWasNotOpenedYet:
    """After a start a log is opened by the first who needs it: whoever that is sees what is in it."""

    @pytest.fixture
    def unopened(self, rig: Rig, tmp_path: Path) -> Partition:
        rig.fill(3)
        rig.log.flush()
        rig.log.close()
        partition = Partition(
            "t",
            0,
            rig.partition.topic_id,
            open_log=lambda: Log.open(tmp_path, CONFIG, clock=rig.clock, files=Files()),
            clock=rig.clock,
            broker_id=1,
        )
        partition.lead(PartitionState((1,), (1,), 1, leader_epoch=4))
        assert not partition.is_open
        return partition

    def test_has_a_latest_offset(self, unopened: Partition) -> None:
        assert unopened.latest_offset() == 60

    def test_has_something_committed(self, unopened: Partition) -> None:
        assert unopened.committed.offset == 60

    def test_is_deleted_up_to_its_end(self, unopened: Partition) -> None:
        assert unopened.delete_records_before(-1) == 60

    def test_says_nothing_before_its_transactions_were_read(
        self, unopened: Partition, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def recall_ended(*_: object) -> None:
            raise StorageError("the planted fault")

        with monkeypatch.context() as patch:
            patch.setattr(Log, "recall_ended", recall_ended)
            for _ in range(2):
                with pytest.raises(StorageError):
                    unopened.latest_offset()
        assert unopened.latest_offset() == 60


class TestAGapInAProducersSequence:
    """Of two batches in flight the first was refused, and the second comes when the reason is over."""

    BOTH = PartitionState((1, 2), (1, 2), 1, leader_epoch=4)
    ONE = PartitionState((1, 2), (1,), 1, leader_epoch=4, partition_epoch=1)

    def refused(self, rig: Rig, sequence: int) -> ErrorCode:
        with pytest.raises(ApiError) as caught:
            rig.partition.append(from_producer(7, sequence))
        return caught.value.code

    @pytest.fixture
    def rig(self, rig: Rig) -> Rig:
        rig.partition.append(from_producer(7, 0))
        rig.partition.set_min_insync_replicas(2)
        return rig

    def test_is_retriable_right_after_the_leadership_began(self, rig: Rig) -> None:
        rig.partition.lead(self.BOTH)
        assert self.refused(rig, 2) is ErrorCode.NOT_ENOUGH_REPLICAS
        assert self.refused(rig, 3) is ErrorCode.NOT_ENOUGH_REPLICAS
        for sequence in (1, 2, 3):
            rig.partition.append(from_producer(7, sequence))
        rig.clock.advance(GAPS_EXCUSED_S)
        assert self.refused(rig, 5) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER

    def test_is_retriable_right_after_enough_replicas_are_in_sync_again(self, rig: Rig) -> None:
        rig.partition.lead(self.ONE)
        rig.clock.advance(60)
        assert self.refused(rig, 2) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        rig.partition.lead(replace(self.BOTH, partition_epoch=2))
        assert self.refused(rig, 2) is ErrorCode.NOT_ENOUGH_REPLICAS
        rig.clock.advance(GAPS_EXCUSED_S)
        assert self.refused(rig, 2) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER

    def test_is_an_error_where_there_is_but_one_replica(self, rig: Rig) -> None:
        rig.partition.lead(PartitionState((1,), (1,), 1, leader_epoch=4))
        assert self.refused(rig, 2) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
