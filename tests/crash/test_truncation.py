"""A log is cut, goes on with other records, and the power fails: nothing that was cut ever follows what came instead.

Batches all have the same size, so that a retired segment begins exactly where the new records may end.
"""

from __future__ import annotations

import errno
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millrace.clock import ManualClock
from millrace.errors import StorageError
from millrace.model import TopicPartition
from millrace.records.batch import split
from millrace.storage.log import Log
from millrace.storage.logdirs import LogDirs
from millrace.storage.settings import FlushMode, LogConfig
from support.batches import NOW_MS, batch
from support.disk import FaultyFiles, fast_directory

SIZE = len(batch(1))
PER_SEGMENT = 5
CONFIG = LogConfig(flush_mode=FlushMode.GROUP, segment_bytes=PER_SEGMENT * SIZE, index_interval_bytes=200)
PLACE = TopicPartition("topic", 0)
OLD, NEW = 1, 2
"""Leader epochs, by which a record says when it was written."""
WRITTEN = 4 * PER_SEGMENT
CUT = PER_SEGMENT + 2


@pytest.fixture
def root() -> Iterator[Path]:
    with fast_directory() as path:
        yield path / "data"


def open_dirs(root: Path, files: FaultyFiles) -> LogDirs:
    return LogDirs.open([root], node_id=1, clock=ManualClock(), config=CONFIG, files=files)


def write(log: Log, count: int, epoch: int) -> None:
    for _ in range(count):
        log.append(batch(1), leader_epoch=epoch, now_ms=NOW_MS)


def epochs_of(log: Log) -> list[int]:
    """The leader epoch of every record, in the order of their offsets."""
    found: list[int] = []
    offset = log.start_offset
    while offset < log.end_offset:
        result = log.read(offset, 1 << 20)
        found += [header.leader_epoch for header, _ in split(result.data)]
        offset = result.next_offset
    return found


def written(root: Path, files: FaultyFiles) -> tuple[LogDirs, Log]:
    dirs = open_dirs(root, files)
    log = dirs.create_log(PLACE, uuid.uuid4())
    write(log, WRITTEN, OLD)
    log.flush()
    dirs.checkpoint()
    return dirs, log


def after_the_cut(root: Path, files: FaultyFiles, dirs: LogDirs, *, lazy: bool = False) -> tuple[LogDirs, Log]:
    """A power cut and a start; a `lazy` disk wrote all data by itself, but of the names only what it had to."""
    dirs.abandon()
    files.crash((lambda _path, _durable, current: current) if lazy else None)
    again = open_dirs(root, files)
    log = again.get(PLACE)
    assert log is not None
    assert log.failure is None
    return again, log


@pytest.mark.parametrize("flushed", [True, False])
@pytest.mark.parametrize("new", [PER_SEGMENT - 2, 1])
def test_what_was_cut_does_not_follow_what_came_instead(root: Path, new: int, flushed: bool) -> None:
    files = FaultyFiles(root)
    dirs, log = written(root, files)
    log.truncate_to(CUT)
    write(log, new, NEW)
    if flushed:
        log.flush()
    dirs, log = after_the_cut(root, files, dirs, lazy=not flushed)
    assert epochs_of(log) == [OLD] * CUT + [NEW] * new
    assert [entry[0] for entry in log.layout().epochs] == [OLD, NEW]
    dirs.abandon()


@pytest.mark.parametrize("offset", [3, CUT, WRITTEN + 100])
def test_a_log_that_began_anew_has_nothing_of_the_old_one(root: Path, offset: int) -> None:
    files = FaultyFiles(root)
    dirs, log = written(root, files)
    log.reset_to(offset)
    write(log, 2 * PER_SEGMENT, NEW)
    log.flush()
    dirs, log = after_the_cut(root, files, dirs)
    assert (log.start_offset, epochs_of(log)) == (offset, [NEW] * 2 * PER_SEGMENT)
    dirs.abandon()


def test_what_a_start_has_cut_does_not_come_back_either(root: Path) -> None:
    files = FaultyFiles(root)
    dirs = open_dirs(root, files)
    log = dirs.create_log(PLACE, uuid.uuid4())
    write(log, 2, OLD)
    log.flush()
    dirs.checkpoint()
    write(log, WRITTEN - 2, OLD)
    log.flush()  # the disk has it; the checkpoint does not know
    dirs.abandon()
    first = root / str(PLACE) / f"{0:020}.log"
    first.write_bytes(first.read_bytes()[: 3 * SIZE])
    dirs = open_dirs(root, files)
    found = dirs.get(PLACE)
    assert found is not None
    assert found.end_offset == 3
    write(found, PER_SEGMENT - 3, NEW)
    dirs, log = after_the_cut(root, files, dirs, lazy=True)
    assert epochs_of(log) == [OLD] * 3 + [NEW] * (PER_SEGMENT - 3)
    dirs.abandon()


@pytest.mark.parametrize("call", ["rename", "truncate", "sync_directory", "pwritev", "datasync", "unlink"])
@pytest.mark.parametrize(
    "cut", [lambda log: log.truncate_to(CUT), lambda log: log.reset_to(WRITTEN + 7)], ids=["truncate", "reset"]
)
def test_a_disk_that_fails_half_way_leaves_the_old_log_or_the_new_one(
    root: Path, call: str, cut: Callable[[Log], None]
) -> None:
    """The call fails at every point once, the log is used again as far as it can be, and the power fails."""
    root.mkdir()
    for after in range(24):
        home = root / str(after)
        files = FaultyFiles(home)
        dirs, log = written(home, files)
        files.fail(call, errno.EIO, after=after)
        try:
            cut(log)
            write(log, PER_SEGMENT - 2, NEW)
            log.flush()
        except StorageError:
            files.heal()
            if log.failure is None:
                write(log, 1, NEW)
        dirs, log = after_the_cut(home, files, dirs)
        old, new = epochs_of(log).count(OLD), epochs_of(log).count(NEW)
        assert epochs_of(log) == [OLD] * old + [NEW] * new
        assert not new or old in (0, CUT), "new records stand where the log was cut, and nowhere else"
        dirs.abandon()
