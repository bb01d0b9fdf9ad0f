"""The last stable offset of a partition on a real log: open transactions, ended ones, restarts, followers."""

from __future__ import annotations

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
from millrace.storage.producers import MAX_EPOCH, UNVERIFIED
from millrace.storage.recovery import LogState
from millrace.storage.settings import FlushMode, LogConfig
from support.batches import NOW_MS, batch, with_header

CONFIG = LogConfig(flush_mode=FlushMode.GROUP, segment_bytes=2_000, index_interval_bytes=200)


class Rig:
    """A partition whose records are committed when the test flushes its log; as often restarted as it likes."""

    def __init__(self, directory: Path, config: LogConfig = CONFIG) -> None:
        self.directory = directory
        self.config = config
        self.clock = ManualClock(NOW_MS)
        self.files = Files(sync=False)
        self.epoch = 0
        self.sequences: dict[int, int] = {}
        self.begin(LogState(), 0)

    def begin(self, state: LogState, high_watermark: int) -> None:
        self.log = Log.open(self.directory, self.config, clock=self.clock, files=self.files, state=state)
        self.partition = Partition(
            "t",
            0,
            uuid.UUID(int=1),
            open_log=lambda: self.log,
            clock=self.clock,
            broker_id=1,
            high_watermark=high_watermark,
        )

    def lead(self) -> Rig:
        self.epoch += 1
        self.partition.lead(PartitionState((1,), (1,), 1, leader_epoch=self.epoch))
        return self

    def follow(self) -> Rig:
        self.epoch += 1
        self.partition.follow(PartitionState((1, 2), (2,), 2, leader_epoch=self.epoch))
        return self

    def restart(self, *, clean: bool, recovery_point: int = 0) -> None:
        """Begin anew, as a follower that has heard of no commit since."""
        mark = self.partition.high_watermark.offset
        self.partition.close(ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER))
        if clean:
            self.log.close()
            self.begin(LogState(self.log.start_offset, self.log.end_offset, clean=True), mark)
        else:
            self.log.release()
            self.begin(LogState(self.log.start_offset, recovery_point), mark)
        self.follow()

    def write(self, producer_id: int, count: int = 1, epoch: int = 0) -> int:
        sequence = self.sequences.get(producer_id, 0)
        data = batch(count, producer_id=producer_id, producer_epoch=epoch, sequence=sequence, transactional=True)
        self.sequences[producer_id] = sequence + count
        return self.partition.append(data, verification=UNVERIFIED).base_offset

    def end(self, producer_id: int, *, commit: bool = True, epoch: int = 0, coordinator: int = 0, tv: int = 0) -> int:
        return self.partition.end_transaction(
            producer_id, epoch, coordinator, commit=commit, transaction_version=tv, now_ms=NOW_MS
        ).base_offset

    @property
    def marks(self) -> tuple[int, int]:
        return self.partition.last_stable_offset, self.partition.high_watermark.offset


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path).lead()


def test_it_is_the_high_watermark_without_transactions(rig: Rig) -> None:
    rig.partition.append(batch(3))
    assert rig.marks == (0, 0)
    rig.log.flush()
    assert rig.marks == (3, 3)
    assert rig.partition.stable == rig.partition.committed


def test_an_open_transaction_holds_it_and_only_a_committed_marker_lets_it_go(rig: Rig) -> None:
    rig.partition.append(batch(2))
    rig.write(1, 2)
    rig.partition.append(batch(1))
    rig.log.flush()
    assert rig.marks == (2, 5)
    assert rig.partition.stable.offset == 2
    rig.end(1)
    assert rig.marks == (2, 5), "the marker is not committed"
    rig.log.flush()
    assert rig.marks == (6, 6)


def test_the_oldest_of_several_counts_whichever_ends_first(rig: Rig) -> None:
    rig.write(1)
    rig.write(2)
    rig.write(3)
    rig.log.flush()
    rig.end(2)
    rig.log.flush()
    assert rig.marks == (0, 4)
    rig.end(1, commit=False)
    assert rig.marks == (0, 4)
    rig.log.flush()
    assert rig.marks == (2, 5)
    rig.end(3)
    rig.log.flush()
    assert rig.marks == (6, 6)


def test_what_begins_above_the_high_watermark_does_not_hold_it_yet(rig: Rig) -> None:
    rig.partition.append(batch(4))
    rig.log.flush()
    rig.write(1)
    assert rig.marks == (4, 4)
    assert rig.end(1) == 5
    assert rig.marks == (4, 4)
    rig.log.flush()
    assert rig.marks == (6, 6)


def test_nothing_at_or_beyond_it_is_read(rig: Rig) -> None:
    rig.partition.append(batch(2))
    rig.write(1, 2)
    rig.partition.append(batch(2))
    rig.log.flush()

    def readable(offset: int) -> int:
        limit = rig.partition.stable
        return rig.partition.read(offset, 1 << 20, at_least_one=True, limit=limit).next_offset

    assert readable(0) == 2
    assert readable(2) == 2
    assert readable(5) == 5
    rig.end(1)
    rig.log.flush()
    assert readable(2) == 7


def test_ended_transactions_are_forgotten_when_their_markers_are_committed(rig: Rig) -> None:
    for _ in range(50):
        rig.write(1)
        rig.end(1)
        rig.log.flush()
    rig.end(1)
    assert len(rig.log._loaded.producers.ended) <= 1  # type: ignore[union-attr]


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("segment_bytes", [250, 100_000])
@pytest.mark.parametrize("commit", [True, False])
def test_a_restart_knows_open_and_ended_ones(tmp_path: Path, clean: bool, segment_bytes: int, commit: bool) -> None:
    rig = Rig(tmp_path, replace(CONFIG, segment_bytes=segment_bytes)).lead()
    rig.partition.append(batch(1))
    rig.write(1)
    rig.write(2)
    rig.log.flush()
    rig.end(1, commit=commit)
    rig.write(2)
    assert rig.marks == (1, 3)
    rig.restart(clean=clean)
    assert rig.marks == (1, 3), "the marker of 1 is in the log and not committed"
    rig.partition.follow_leader_marks(4, 0)
    assert rig.marks == (2, 4), "of 2 it is open"
    rig.restart(clean=clean)
    assert rig.marks == (2, 4)
    expected = [] if commit else [(1, 1, 3, 2)]
    assert [tuple(each) for each in rig.log.aborted_transactions(0, 5)] == expected


def test_a_restart_with_everything_committed_reads_no_more_than_before(tmp_path: Path) -> None:
    rig = Rig(tmp_path).lead()
    for _ in range(3):
        rig.write(1)
        rig.end(1)
    rig.log.flush()
    rig.restart(clean=True)
    assert rig.partition.log._loaded is None
    assert rig.marks == (6, 6)
    assert not rig.log._loaded.producers.ended  # type: ignore[union-attr]


def test_a_follower_knows_it_from_its_own_log_and_a_truncation_takes_a_marker_back(tmp_path: Path) -> None:
    rig = Rig(tmp_path).follow()
    offset = 0

    def copy(data: bytes) -> None:
        nonlocal offset
        sent = with_header(data, base_offset=offset, leader_epoch=rig.epoch)
        rig.partition.append_from_leader(memoryview(sent), rig.epoch)
        offset = rig.log.end_offset

    copy(batch(2))
    copy(batch(2, producer_id=7, producer_epoch=0, sequence=0, transactional=True))
    rig.partition.follow_leader_marks(4, 0)
    assert rig.marks == (2, 4)
    elsewhere = tmp_path / "leader"
    elsewhere.mkdir()
    leader = Rig(elsewhere).lead()
    leader.end(7, commit=False)
    marker = bytes(leader.log.read(0, 1 << 20).data)
    copy(marker)
    copy(batch(1))
    assert rig.marks == (2, 4)
    rig.partition.truncate_to_leader(rig.epoch, 4)
    offset = rig.log.end_offset
    assert (offset, rig.marks) == (4, (2, 4))
    assert rig.log.aborted_transactions(0, 10) == []
    rig.partition.follow_leader_marks(100, 0)
    assert rig.marks == (2, 4), "the transaction is open again"
    copy(marker)
    rig.partition.follow_leader_marks(100, 0)
    assert rig.marks == (5, 5)
    assert [tuple(each) for each in rig.log.aborted_transactions(0, 10)] == [(7, 2, 4, 5)]
    rig.partition.restart_at(50)
    assert rig.marks == (50, 50)
    leader.log.release()


def test_a_truncation_keeps_what_has_ended_before_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, replace(CONFIG, segment_bytes=250)).lead()
    rig.write(1)
    rig.log.flush()
    rig.end(1)
    for _ in range(6):
        rig.partition.append(batch(2))  # several segments, each with a snapshot that has no transaction
    rig.partition.follow(PartitionState((1, 2), (2,), 2, leader_epoch=9))
    assert rig.marks == (0, 1)
    rig.partition.truncate_to_leader(rig.epoch, rig.log.end_offset - 2)
    assert rig.marks == (0, 1), "the marker at 1 is still not committed"
    rig.partition.follow_leader_marks(2, 0)
    assert rig.marks == (2, 2)


def test_a_start_above_an_open_transaction_is_where_it_is(rig: Rig) -> None:
    rig.write(1, 5)
    rig.partition.append(batch(5))
    rig.log.flush()
    rig.partition.delete_records_before(7)
    assert rig.marks == (7, 10)
    assert rig.partition.read(7, 1000, at_least_one=True, limit=rig.partition.stable).data == b""


def test_a_producer_in_a_transaction_is_never_forgotten(tmp_path: Path) -> None:
    rig = Rig(tmp_path, replace(CONFIG, max_producers=2, producer_expiration_ms=1)).lead()
    rig.write(1)
    for other in range(10, 20):
        rig.write(other)
        rig.end(other)
        rig.log.flush()
        rig.log.enforce_retention(NOW_MS + 10**9, 0)
    assert rig.marks == (0, 21)
    for clean in (True, False):
        rig.restart(clean=clean)
        assert rig.marks[0] == 0
        rig.lead()
        rig.log.flush()
    rig.end(1)
    rig.log.flush()
    assert rig.marks == (22, 22)


# --- markers ----------------------------------------------------------------------------------------------------------


def refused(rig: Rig, producer_id: int, **fields: int) -> ErrorCode:
    end = rig.log.end_offset
    with pytest.raises(ApiError) as error:
        rig.end(producer_id, **fields)  # type: ignore[arg-type]
    assert rig.log.end_offset == end, "nothing was written"
    return error.value.code


def test_a_marker_without_a_transaction_does_no_harm(rig: Rig) -> None:
    rig.end(5, commit=False)
    rig.end(5, commit=False)
    rig.log.flush()
    assert rig.marks == (2, 2)
    assert rig.log.aborted_transactions(0, 10) == []


def test_markers_of_old_epochs_and_old_coordinators_are_refused(rig: Rig) -> None:
    rig.write(1, epoch=3)
    assert refused(rig, 1, epoch=2) is ErrorCode.INVALID_PRODUCER_EPOCH
    rig.end(1, epoch=3, coordinator=7)
    assert refused(rig, 1, epoch=3, coordinator=6) is ErrorCode.TRANSACTION_COORDINATOR_FENCED
    rig.end(1, epoch=3, coordinator=7)
    rig.end(1, epoch=4, coordinator=8)
    with pytest.raises(ApiError) as error:
        rig.write(1, epoch=3)
    assert error.value.code is ErrorCode.INVALID_PRODUCER_EPOCH


def test_from_transaction_version_2_on_a_marker_has_an_epoch_of_its_own(rig: Rig) -> None:
    rig.write(1, epoch=3)
    assert refused(rig, 1, epoch=3, tv=2) is ErrorCode.INVALID_PRODUCER_EPOCH, "it ended the transaction before"
    rig.end(1, epoch=4, tv=2)
    rig.end(1, epoch=4, tv=2)
    assert refused(rig, 1, epoch=3, tv=2) is ErrorCode.INVALID_PRODUCER_EPOCH
    rig.sequences.clear()
    rig.write(1, epoch=4)
    assert refused(rig, 1, epoch=4, tv=2) is ErrorCode.INVALID_PRODUCER_EPOCH
    rig.end(1, epoch=4, tv=1)


def test_the_last_epoch_cannot_be_bumped(rig: Rig) -> None:
    rig.write(1, epoch=MAX_EPOCH)
    rig.end(1, epoch=MAX_EPOCH, tv=2)
    rig.log.flush()
    assert rig.marks == (2, 2)


# --- verification -----------------------------------------------------------------------------------------------------


def transactional(sequence: int = 0, epoch: int = 0) -> bytes:
    return batch(1, producer_id=1, producer_epoch=epoch, sequence=sequence, transactional=True)


def code_of_append(rig: Rig, data: bytes, **fields: object) -> ErrorCode | None:
    try:
        rig.partition.append(data, **fields)  # type: ignore[arg-type]
    except ApiError as error:
        return error.code
    return None


def test_the_first_batch_of_a_transaction_needs_a_verification(rig: Rig) -> None:
    assert code_of_append(rig, transactional()) is ErrorCode.INVALID_TXN_STATE
    guard = rig.partition.begin_verification(1, 0, 0, bumps_epoch=False)
    assert guard is not None
    assert rig.partition.begin_verification(1, 0, 0, bumps_epoch=False) is guard
    assert code_of_append(rig, transactional(), verification=guard) is None
    assert rig.partition.begin_verification(1, 0, 1, bumps_epoch=False) is None
    assert code_of_append(rig, transactional(1)) is None
    assert rig.partition.append(transactional(1)).duplicate
    rig.end(1)
    assert code_of_append(rig, transactional(1)) is ErrorCode.UNKNOWN_PRODUCER_ID
    assert code_of_append(rig, transactional(2)) is ErrorCode.INVALID_TXN_STATE
    assert code_of_append(rig, transactional(2), verification=guard) is ErrorCode.INVALID_TXN_STATE


def test_a_marker_that_comes_meanwhile_ends_the_question(rig: Rig) -> None:
    guard = rig.partition.begin_verification(1, 0, 0, bumps_epoch=False)
    rig.end(1, commit=False)
    again = rig.partition.begin_verification(1, 0, 0, bumps_epoch=False)
    assert again is not guard
    assert code_of_append(rig, transactional(), verification=guard) is ErrorCode.INVALID_TXN_STATE
    assert code_of_append(rig, transactional(), verification=again) is None


def test_a_later_batch_is_not_let_in_before_the_first(rig: Rig) -> None:
    guard = rig.partition.begin_verification(1, 0, 5, bumps_epoch=False)
    assert rig.partition.begin_verification(1, 0, 6, bumps_epoch=False) is guard
    assert code_of_append(rig, transactional(6), verification=guard) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert code_of_append(rig, transactional(5), verification=guard) is None
    assert code_of_append(rig, transactional(6)) is None


def test_with_an_epoch_of_its_own_a_transaction_begins_with_sequence_0(rig: Rig) -> None:
    guard = rig.partition.begin_verification(1, 4, 3, bumps_epoch=True)
    assert code_of_append(rig, transactional(3, 4), verification=guard) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert code_of_append(rig, transactional(0, 4), verification=guard) is None
    rig.end(1, epoch=5, tv=2)
    with pytest.raises(ApiError) as error:
        rig.partition.begin_verification(1, 4, 1, bumps_epoch=True)
    assert error.value.code is ErrorCode.INVALID_PRODUCER_EPOCH
    assert code_of_append(rig, transactional(1, 4)) is ErrorCode.INVALID_PRODUCER_EPOCH


def test_a_newer_epoch_in_an_open_transaction_is_asked_about(rig: Rig) -> None:
    rig.write(1, epoch=0)
    assert rig.partition.begin_verification(1, 1, 0, bumps_epoch=True) is not None
    assert code_of_append(rig, transactional(0, 1)) is ErrorCode.INVALID_TXN_STATE


def test_what_the_broker_writes_for_a_producer_is_fenced_too(rig: Rig) -> None:
    data = batch(1, producer_id=1, producer_epoch=2, sequence=-1, transactional=True)
    assert code_of_append(rig, data, from_client=False) is ErrorCode.INVALID_TXN_STATE
    guard = rig.partition.begin_verification(1, 2, -1, bumps_epoch=False)
    assert code_of_append(rig, data, from_client=False, verification=guard) is None
    assert code_of_append(rig, data, from_client=False) is None
    old = batch(1, producer_id=1, producer_epoch=1, sequence=-1, transactional=True)
    assert code_of_append(rig, old, from_client=False) is ErrorCode.INVALID_PRODUCER_EPOCH
    rig.end(1, epoch=3, tv=2)
    rig.log.flush()
    assert rig.marks == (3, 3)
