"""Group commit: one sync covers what became dirty meanwhile; nothing counts before its sync."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.clock import ManualClock, SystemClock
from millrace.errors import StorageError
from millrace.model import TopicPartition
from millrace.storage.files import Files
from millrace.storage.flusher import Flusher
from millrace.storage.host import Alone
from millrace.storage.log import Log
from millrace.storage.logdirs import LogDirs
from millrace.storage.settings import FlushMode, LogConfig
from support.batches import NOW_MS, batch

CONFIG = LogConfig(flush_mode=FlushMode.GROUP)


class SlowFiles(Files):
    """A disk whose data syncs wait for permission."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs = 0
        self.began = threading.Event()
        self.go = threading.Event()

    def sys_datasync(self, path: Path, fd: int) -> None:
        if path.suffix != ".log":
            return
        self.began.set()
        self.go.wait(30)
        self.syncs += 1


class FlushedBy(Alone):
    """The host of a log that has nothing but a flusher."""

    def __init__(self, flusher: Flusher, files: Files) -> None:
        super().__init__(files)
        self._flusher = flusher

    def request_flush(self, log: Log, within_s: float, /) -> None:
        self._flusher.request(log, within_s)


def make(tmp_path: Path, files: Files, flusher: Flusher, name: str = "topic-0", config: LogConfig = CONFIG) -> Log:
    directory = tmp_path / name
    directory.mkdir()
    return Log.open(directory, config, clock=ManualClock(), files=files, host=FlushedBy(flusher, files))


def add(log: Log, count: int = 1) -> None:
    for _ in range(count):
        log.append(batch(1), leader_epoch=0, now_ms=NOW_MS)


async def flushed_to(log: Log, offset: int) -> None:
    while log.flushed_offset < offset:
        event = asyncio.Event()
        log.on_flushed.append(event.set)
        await event.wait()
        log.on_flushed.remove(event.set)


async def test_one_sync_covers_all_appends_made_while_the_disk_was_busy(tmp_path: Path) -> None:
    files = SlowFiles()
    flusher = Flusher("d", files=files, clock=SystemClock())
    flusher.start()
    log = make(tmp_path, files, flusher)
    add(log)
    await asyncio.to_thread(files.began.wait)
    add(log, 99)
    assert log.flushed_offset == 0
    files.go.set()
    await flushed_to(log, 100)
    assert files.syncs == 2
    assert log.flushed == log.end
    await flusher.stop()
    log.close()


async def test_the_thread_goes_on_by_itself_while_the_loop_is_busy(tmp_path: Path) -> None:
    files = SlowFiles()
    flusher = Flusher("d", files=files, clock=SystemClock())
    flusher.start()
    log = make(tmp_path, files, flusher)
    add(log)
    await asyncio.to_thread(files.began.wait)
    add(log, 5)
    files.go.set()
    while files.syncs < 2:  # the loop does not run here: only the thread can have begun the second one
        time.sleep(0.001)
    assert log.flushed_offset == 0
    await flushed_to(log, 6)
    await flusher.stop()
    assert not log.dirty
    assert files.syncs == 2
    log.close()


async def test_a_new_leader_epoch_is_never_passed_over(tmp_path: Path) -> None:
    files = SlowFiles()
    flusher = Flusher("d", files=files, clock=SystemClock())
    flusher.start()
    log = make(tmp_path, files, flusher)
    add(log)
    await asyncio.to_thread(files.began.wait)
    log.append(batch(1), leader_epoch=7, now_ms=NOW_MS)
    files.go.set()
    await flushed_to(log, 2)
    assert "7 1" in (log.directory / "leader-epoch-checkpoint").read_text()
    await flusher.stop()
    log.close()


async def test_stop_flushes_what_is_dirty(tmp_path: Path) -> None:
    files = Files()
    flusher = Flusher("d", files=files, clock=SystemClock())
    flusher.start()
    logs = [make(tmp_path, files, flusher, f"t-{i}") for i in range(5)]
    for log in logs:
        add(log, 3)
    await flusher.stop()
    await flusher.stop()
    assert [log.flushed_offset for log in logs] == [3] * 5


async def test_truncation_during_a_sync_does_not_count_as_flushed(tmp_path: Path) -> None:
    files = SlowFiles()
    flusher = Flusher("d", files=files, clock=SystemClock())
    flusher.start()
    log = make(tmp_path, files, flusher)
    add(log, 10)
    await asyncio.to_thread(files.began.wait)
    log.truncate_to(4)
    files.go.set()
    await flushed_to(log, 4)
    assert log.flushed_offset == 4 == log.end_offset
    await flusher.stop()
    log.close()


async def test_a_stop_that_is_cancelled_ends_the_sync_and_leaves_the_rest_dirty(tmp_path: Path) -> None:
    files = SlowFiles()
    flusher = Flusher("d", files=files, clock=SystemClock())
    flusher.start()
    log = make(tmp_path, files, flusher)
    add(log)
    await asyncio.to_thread(files.began.wait)
    add(log, 5)
    stopping = asyncio.create_task(flusher.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    threading.Timer(0.05, files.go.set).start()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await asyncio.sleep(0.02)
    assert flusher.failure is None
    assert files.syncs == 1
    assert log.flushed_offset == 1
    assert log.dirty
    log.close()
    assert files.open_count == 0  # nothing is pinned any more


async def test_interval_mode_waits(tmp_path: Path) -> None:
    files = Files()
    clock = ManualClock()
    flusher = Flusher("d", files=files, clock=clock)
    flusher.start()
    log = make(tmp_path, files, flusher, config=replace(CONFIG, flush_mode=FlushMode.INTERVAL, flush_interval_ms=500))
    add(log, 3)
    clock.advance(0.499)
    await asyncio.sleep(0)
    assert log.flushed_offset == 0
    clock.advance(0.001)
    await flushed_to(log, 3)
    add(log)
    await flusher.stop()
    assert log.flushed_offset == 4


@pytest.mark.parametrize(
    "then",
    [
        replace(CONFIG, flush_mode=FlushMode.GROUP),
        replace(CONFIG, flush_mode=FlushMode.INTERVAL, flush_interval_ms=500),
    ],
    ids=["group", "a shorter interval"],
)
@pytest.mark.parametrize(
    "before",
    [
        replace(CONFIG, flush_mode=FlushMode.OS),
        replace(CONFIG, flush_mode=FlushMode.INTERVAL, flush_interval_ms=3_600_000),
    ],
    ids=["os", "a long interval"],
)
async def test_what_was_written_before_another_flush_mode_is_synced_by_it(
    tmp_path: Path, before: LogConfig, then: LogConfig
) -> None:
    files = Files()
    clock = ManualClock()
    flusher = Flusher("d", files=files, clock=clock)
    flusher.start()
    log = make(tmp_path, files, flusher, config=before)
    add(log, 3)
    clock.advance(1)
    await asyncio.sleep(0.05)
    assert log.flushed_offset == 0
    log.apply_config(then)
    clock.advance(0.5)
    await flushed_to(log, 3)
    await flusher.stop()
    log.close()


async def test_a_log_whose_owner_will_ask_waits_for_that(tmp_path: Path) -> None:
    files = Files()
    clock = ManualClock()
    flusher = Flusher("d", files=files, clock=clock)
    flusher.start()
    log = make(tmp_path, files, flusher)
    log.flush_patience_s = 0.02
    add(log, 3)
    clock.advance(0.019)
    await asyncio.sleep(0.05)
    assert log.flushed_offset == 0
    log.flush_soon()
    await flushed_to(log, 3)
    add(log)
    clock.advance(0.019)
    await asyncio.sleep(0.05)
    assert log.flushed_offset == 3, "the wait begins with what was appended since"
    clock.advance(0.001)
    await flushed_to(log, 4)
    add(log)
    await flusher.stop()
    assert log.flushed_offset == 5


async def test_os_mode_syncs_only_rolled_segments(tmp_path: Path) -> None:
    files = Files()
    checkpoints: list[int] = []
    flusher = Flusher(
        "d", files=files, clock=SystemClock(), checkpoint=lambda: lambda: checkpoints.append(log.flushed_offset)
    )
    flusher.start()
    log = make(tmp_path, files, flusher, config=LogConfig(flush_mode=FlushMode.OS, segment_bytes=500))
    add(log, 2)
    assert not log.segment_count > 1
    while log.segment_count == 1:
        add(log)
    await flushed_to(log, 1)
    await flusher.stop()
    assert checkpoints and checkpoints[0] >= 1
    log.close()


async def test_a_segment_deleted_during_its_sync_is_harmless(tmp_path: Path) -> None:
    files = SlowFiles()
    flusher = Flusher("d", files=files, clock=SystemClock())
    flusher.start()
    log = make(tmp_path, files, flusher, config=replace(CONFIG, segment_bytes=300, retention_ms=1))
    add(log, 10)
    await asyncio.to_thread(files.began.wait)
    log.enforce_retention(NOW_MS + 10_000)
    flusher.forget(log)
    files.go.set()
    await flusher.stop()
    assert flusher.failure is None
    assert files.open_count <= 1
    log.close()


async def test_a_log_that_fails_during_its_sync_counts_for_nothing_and_the_flusher_ends(tmp_path: Path) -> None:
    """A write fails while an earlier one is being synced: who is told of a flush would ask a log that is offline."""
    files = SlowFiles()
    flusher = Flusher("d", files=files, clock=SystemClock())
    log = make(tmp_path, files, flusher)
    flusher.start()
    told: list[int] = []
    log.on_flushed.append(lambda: told.append(log.flushed_offset))
    add(log)
    await asyncio.to_thread(files.began.wait)
    log.fail(StorageError("the disk is gone"))
    files.go.set()
    await asyncio.wait_for(flusher.stop(), 10)
    assert not told


async def test_a_log_deleted_during_its_sync_is_harmless(tmp_path: Path) -> None:
    files = SlowFiles()
    dirs = LogDirs.open([tmp_path], node_id=1, clock=SystemClock(), config=CONFIG, files=files)
    dirs.start()
    partition = TopicPartition("topic", 0)
    log = dirs.create_log(partition, uuid.uuid4())
    add(log, 10)
    await asyncio.to_thread(files.began.wait)
    dirs.delete_log(partition)
    files.go.set()
    other = dirs.create_log(TopicPartition("topic", 1), uuid.uuid4())
    add(other)
    await flushed_to(other, 1)
    assert dirs.directories[0].failure is None
    await dirs.stop()


@pytest.mark.parametrize("workers", [50])
async def test_many_logs_share_a_flush(tmp_path: Path, workers: int) -> None:
    files = Files()
    flusher = Flusher("d", files=files, clock=SystemClock())
    flusher.start()
    logs = [make(tmp_path, files, flusher, f"t-{i}") for i in range(workers)]
    for log in logs:
        add(log)
    await asyncio.gather(*(flushed_to(log, 1) for log in logs))
    assert flusher.flushes <= 2
    await flusher.stop()
