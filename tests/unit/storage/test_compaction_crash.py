"""A compaction that dies at any step, by a kill or by a power cut: the log has its records, old or compacted."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from millrace.clock import ManualClock
from millrace.errors import StorageError
from millrace.records.compression import Buffer
from millrace.records.control import EndMarker, MarkerType, encode_end_marker
from millrace.storage.files import Files
from millrace.storage.log import Log
from millrace.storage.recovery import LogState
from millrace.storage.settings import FlushMode, LogConfig
from support.batches import NOW_MS
from support.compaction import compact, keyed, pairs
from support.disk import FaultyFiles, fast_directory

CONFIG = LogConfig(flush_mode=FlushMode.OS, compact=True, index_interval_bytes=100, segment_bytes=10_000)
END = 26
AFTER = {b"k%d" % i: b"%d" % (20 + i) for i in range(4)}


class Killed(BaseException):
    """The process is gone: nothing after this line runs."""


class Killing(FaultyFiles):
    """Dies at the n-th change of the disk."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.steps = -1
        self.seen: list[str] = []

    def _step(self, call: str, path: Path) -> None:
        if self.steps < 0:
            return
        self.seen.append(f"{call} {path.name}")
        if len(self.seen) > self.steps:
            raise Killed

    def sys_rename(self, source: Path, target: Path) -> None:
        self._step("rename", source)
        super().sys_rename(source, target)

    def sys_unlink(self, path: Path) -> None:
        if path.exists():
            self._step("unlink", path)
        super().sys_unlink(path)

    def sys_pwritev(self, path: Path, fd: int, buffers: Sequence[Buffer], position: int) -> int:
        self._step("write", path)
        return super().sys_pwritev(path, fd, buffers, position)

    def sys_datasync(self, path: Path, fd: int) -> None:
        self._step("sync", path)
        super().sys_datasync(path, fd)

    def sys_sync_directory(self, path: Path) -> None:
        self._step("sync directory", path)
        super().sys_sync_directory(path)


@pytest.fixture
def root() -> Iterator[Path]:
    with fast_directory() as path:
        yield path


def filled(root: Path, files: Files, config: LogConfig = CONFIG) -> Log:
    """Segments of four records, an aborted transaction in the middle, and one in the active segment."""
    files.make_directory(root / "topic-0")
    files.sync_directory(root)
    log = Log.open(root / "topic-0", config, clock=ManualClock(), files=files)
    for i in range(24):
        log.append(keyed([(b"k%d" % (i % 4), b"%d" % i)]), leader_epoch=0, now_ms=NOW_MS)
        if i == 9:
            log.append(
                keyed([(b"k0", b"aborted")], producer_id=1, producer_epoch=0, base_sequence=0, transactional=True),
                leader_epoch=0,
                now_ms=NOW_MS,
            )
            marker = encode_end_marker(
                EndMarker(MarkerType.ABORT, 0), producer_id=1, producer_epoch=0, timestamp_ms=NOW_MS
            )
            log.append(marker, leader_epoch=0, now_ms=NOW_MS, from_client=False)
        if i % 4 == 3:
            log.roll()
    log.append(keyed([(b"active", b"1")]), leader_epoch=0, now_ms=NOW_MS)
    log.flush()
    return log


def reopened(root: Path, files: Files, point: int) -> Log:
    return Log.open(
        root / "topic-0",
        LogConfig(flush_mode=FlushMode.OS),  # at a start a log has the broker's settings
        clock=ManualClock(),
        files=files,
        state=LogState(0, point),
    )


def check(log: Log) -> None:
    """Every key has its last value, the offsets go on where they did, and nothing lies about."""
    found = pairs(log)
    last = {key: value for _, key, value in found if key in AFTER and value != b"aborted"}
    assert last == AFTER
    assert found[-1] == (END, b"active", b"1")
    assert log.end_offset == END + 1
    assert [entry[:3] for entry in log.aborted_transactions(0, END)] == [(1, 10, 11)]
    names = [path.name for path in log.directory.iterdir()]
    assert not [name for name in names if name.endswith((".cleaned", ".swap", ".deleted"))]
    for suffix in (".index", ".timeindex", ".txnindex"):
        bases = {name[:20] for name in names if name.endswith(".log")}
        assert {name[:20] for name in names if name.endswith(suffix)} <= bases
    log.append(keyed([(b"more", b"1")]), leader_epoch=0, now_ms=NOW_MS)
    assert pairs(log)[-1][0] == END + 1


def steps_of(root: Path, segment_bytes: int) -> int:
    files = Killing(root)
    log = filled(root, files, _config(segment_bytes))
    files.steps = 10**9
    compact(log, files)
    log.release()
    return len(files.seen)


def _config(segment_bytes: int) -> LogConfig:
    return LogConfig(flush_mode=FlushMode.OS, compact=True, index_interval_bytes=100, segment_bytes=segment_bytes)


@pytest.mark.parametrize("segment_bytes", [10_000, 700])
@pytest.mark.parametrize("power", [False, True])
def test_a_death_at_every_step_is_harmless(root: Path, segment_bytes: int, power: bool) -> None:
    total = steps_of(root, segment_bytes)
    shutil.rmtree(root / "topic-0")
    assert total > 15
    for step in range(total):
        files = Killing(root)
        log = filled(root, files, _config(segment_bytes))
        files.steps = step
        with pytest.raises(Killed):
            compact(log, files)
        files.steps = -1
        files.close_all()
        if power:
            files.crash()
        for point in (0, 13, END + 1):
            copied = root.with_name(f"{root.name}-{point}")
            shutil.copytree(root, copied)
            try:
                again = reopened(copied, Files(sync=False), point)
                check(again)
                again.flush()
                compacted = compact(again, Files(sync=False))
                assert compacted is not None
                check_compacted(again)
                again.close()
            finally:
                shutil.rmtree(copied)
        shutil.rmtree(root / "topic-0")


def check_compacted(log: Log) -> None:
    keys = [key for offset, key, _ in pairs(log) if key in AFTER and offset < END]
    assert sorted(keys) == sorted(AFTER)


@pytest.mark.parametrize("segment_bytes", [10_000, 700])
def test_a_death_while_recovering_is_harmless_too(root: Path, segment_bytes: int) -> None:
    """The start that ends what a crash has left is itself cut short, at every step, after every crash."""
    total = steps_of(root, segment_bytes)
    shutil.rmtree(root / "topic-0")
    ended = 0
    for step in range(total):
        files = Killing(root)
        log = filled(root, files, _config(segment_bytes))
        files.steps = step
        with pytest.raises(Killed):
            compact(log, files)
        files.close_all()
        for second in itertools.count():
            copied = root.with_name(f"{root.name}-second")
            shutil.copytree(root, copied)
            killing = Killing(copied)
            killing.steps = second
            try:
                try:
                    reopened(copied, killing, END + 1).release()
                    survived = True
                except Killed:
                    survived = False
                killing.close_all()
                again = reopened(copied, Files(sync=False), END + 1)
                check(again)
                again.close()
            finally:
                shutil.rmtree(copied)
            if survived:
                break
            ended += 1
        shutil.rmtree(root / "topic-0")
    assert ended > total


@pytest.mark.parametrize("call", ["pwritev", "rename", "datasync", "open", "pread", "sync_directory"])
def test_a_disk_that_fails_leaves_the_log_readable_after_a_restart(root: Path, call: str) -> None:
    for after in range(12):
        files = FaultyFiles(root)
        log = filled(root, files)
        files.fail(call, after=after)
        try:
            compact(log, files)
        except StorageError:
            failed = True
        else:
            failed = False
        files.heal()
        files.close_all()
        again = reopened(root, Files(sync=False), END + 1)
        check(again)
        again.release()
        shutil.rmtree(root / "topic-0")
        if not failed:
            break
    assert after > 0 or call == "sync_directory"
