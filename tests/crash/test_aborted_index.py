"""The index of aborted transactions after a power cut: without it aborted records look like committed ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.clock import ManualClock
from millrace.records.control import EndMarker, MarkerType, encode_end_marker
from millrace.storage.log import Log
from millrace.storage.recovery import LogState
from millrace.storage.settings import FlushMode, LogConfig
from support.batches import NOW_MS, batch
from support.memory_disk import MemoryFiles

DIRECTORY = Path("/data/topic-0")


def opened(files: MemoryFiles, segment_bytes: int, state: LogState) -> Log:
    config = LogConfig(flush_mode=FlushMode.GROUP, segment_bytes=segment_bytes)
    return Log.open(DIRECTORY, config, clock=ManualClock(NOW_MS), files=files, state=state)


def written(files: MemoryFiles, segment_bytes: int) -> Log:
    files.make_directory(DIRECTORY)
    log = opened(files, segment_bytes, LogState())
    for sequence in range(3):
        data = batch(1, producer_id=1, producer_epoch=0, sequence=sequence, transactional=True)
        log.append(data, leader_epoch=0, now_ms=NOW_MS)
        marker = EndMarker(MarkerType.ABORT, 0)
        end = encode_end_marker(marker, producer_id=1, producer_epoch=0, timestamp_ms=NOW_MS)
        log.append(end, leader_epoch=0, now_ms=NOW_MS, from_client=False)
    return log


EXPECTED = [(1, 0, 1, 2), (1, 2, 3, 4), (1, 4, 5, 6)]


def index(log: Log) -> list[tuple[int, ...]]:
    return [tuple(each) for each in log.aborted_transactions(0, log.end_offset)]


@pytest.mark.parametrize("segment_bytes", [200, 10_000])
def test_after_a_clean_stop_it_is_whole(segment_bytes: int) -> None:
    files = MemoryFiles()
    log = written(files, segment_bytes)
    log.close()
    files.cut_power()
    log = opened(files, segment_bytes, LogState(0, 6, clean=True))
    assert (log.end_offset, index(log)) == (6, EXPECTED)


def test_what_a_scan_has_made_anew_lasts_once_the_recovery_point_has_passed_it() -> None:
    files = MemoryFiles()
    log = written(files, 200)
    log.flush()
    assert log.segment_count > 2
    log.release()
    log = opened(files, 200, LogState())
    assert index(log) == EXPECTED
    log.flush()
    files.cut_power()
    log.release()
    log = opened(files, 200, LogState(0, log.flushed_offset))
    assert index(log) == EXPECTED
