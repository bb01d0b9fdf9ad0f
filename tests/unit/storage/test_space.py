"""When a directory counts as full, and what follows for its logs."""

from __future__ import annotations

import errno
import uuid
from pathlib import Path

import pytest

from millrace.clock import ManualClock
from millrace.errors import DiskFullError, StorageError
from millrace.model import TopicPartition
from millrace.storage.logdirs import LogDirectory, LogDirs
from millrace.storage.space import HELD_S, Space, is_full
from support.batches import NOW_MS, batch
from support.disk import FaultyFiles

GIB = 1 << 30
TP = TopicPartition("topic", 0)


@pytest.mark.parametrize(
    ("space", "was_full", "full"),
    [
        (Space(100 * GIB, 3 * GIB), False, False),
        (Space(100 * GIB, GIB - 1), False, True),
        (Space(100 * GIB, 2 * GIB - 1), True, True),
        (Space(100 * GIB, 2 * GIB), True, False),
        (Space(2 * GIB, GIB // 5), False, False),  # a small disk keeps a twentieth
        (Space(2 * GIB, GIB // 11), False, True),
        (Space(100 * GIB, 50 * GIB, free_files=99), False, True),
        (Space(100 * GIB, 50 * GIB, free_files=150), True, True),
        (Space(100 * GIB, 50 * GIB, free_files=200), True, False),
        (Space(0, 0), False, False),  # a file system that does not count
    ],
)
def test_full_is_below_the_reserve_and_empty_above_twice_of_it(space: Space, was_full: bool, full: bool) -> None:
    assert is_full(space, GIB, was_full=was_full) == full


def test_a_write_that_finds_no_space_makes_the_directory_full_for_a_while(tmp_path: Path) -> None:
    clock, files = ManualClock(), FaultyFiles(tmp_path)
    dirs = LogDirs.open([tmp_path], node_id=1, clock=clock, files=files)
    heard: list[bool] = []
    dirs.on_space = lambda directory: heard.append(directory.is_full)
    log = dirs.create_log(TP, uuid.uuid4())
    log.append(batch(1), leader_epoch=0, now_ms=NOW_MS)
    files.fail("pwritev", errno.ENOSPC, match=".log", times=1)
    with pytest.raises(DiskFullError) as failure:
        log.append(batch(1), leader_epoch=0, now_ms=NOW_MS)
    dirs.note_failed_write(TP, failure.value)
    assert dirs.full == dirs.online and heard == [True]
    dirs.look_at_space(0)
    assert heard == [True], "what is free does not count at once"
    clock.advance(HELD_S)
    dirs.look_at_space(0)
    assert not dirs.full and heard == [True, False]
    assert log.append(batch(1), leader_epoch=0, now_ms=NOW_MS).base_offset == 1, "nothing of the failed write counts"
    dirs.abandon()


@pytest.mark.parametrize(("number", "fails"), [(errno.EIO, True), (errno.EMFILE, False)])
def test_a_write_that_fails_otherwise_takes_the_directory_offline(tmp_path: Path, number: int, fails: bool) -> None:
    files = FaultyFiles(tmp_path)
    dirs = LogDirs.open([tmp_path], node_id=1, clock=ManualClock(), files=files)
    failed: list[LogDirectory] = []
    dirs.on_failure = failed.append
    log = dirs.create_log(TP, uuid.uuid4())
    files.fail("pwritev", number, match=".log", times=1)
    with pytest.raises(StorageError) as failure:
        log.append(batch(1), leader_epoch=0, now_ms=NOW_MS)
    dirs.note_failed_write(TP, failure.value)
    assert bool(failed) == fails
    assert bool(dirs.online) != fails
    dirs.abandon()
