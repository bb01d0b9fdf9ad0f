"""Who compacts and when: the dirtiest first, in a process of its own, and nothing that has changed meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from millrace.clock import ManualClock
from millrace.config import BrokerConfig
from millrace.errors import StorageError
from millrace.model import TopicPartition
from millrace.storage import checkpoint
from millrace.storage.cleaner import Cleaner, CleanerSettings, Compactable
from millrace.storage.compaction_job import Cleaned, CompactionJob, Finished
from millrace.storage.compaction_worker import ProcessWorker, ThreadWorker, Worker
from millrace.storage.files import Files
from millrace.storage.log import Log
from millrace.storage.logdirs import LogDirs
from millrace.storage.settings import FlushMode, LogConfig
from support.batches import NOW_MS
from support.compaction import job_of, keyed, pairs
from support.disk import fast_directory

CONFIG = LogConfig(flush_mode=FlushMode.OS, compact=True, delete=False, timestamp_after_max_ms=10**15)


class Desk:
    """Data directories and a cleaner for what is in them."""

    def __init__(self, root: Path) -> None:
        self.clock = ManualClock()
        self.files = Files(sync=False)
        self.paths = [root / "one", root / "two"]
        self.dirs = self.open()
        self.settings = CleanerSettings()
        self.jobs: list[str] = []
        self.during: Callable[[], object] | None = None
        """Called in the middle of a round, on the loop."""

    def open(self) -> LogDirs:
        return LogDirs.open(self.paths, node_id=1, clock=self.clock, config=CONFIG, files=self.files)

    def fill(self, topic: str, values: int, *, config: LogConfig = CONFIG) -> Log:
        log = self.dirs.create_log(TopicPartition(topic, 0), uuid.uuid4(), config)
        for value in range(values):
            log.append(keyed([(b"k%d" % (value % 2), b"%d" % value)]), leader_epoch=0, now_ms=NOW_MS)
        log.roll()
        log.flush()
        return log

    def cleaner(self, make_worker: Callable[[], Worker] | None = None) -> Cleaner:
        def compactable() -> Iterator[Compactable]:
            for partition, log in self.dirs.logs().items():
                yield Compactable(partition, log, lambda log=log: log.end_offset)  # type: ignore[misc]

        return Cleaner(
            settings=lambda: self.settings,
            compactable=compactable,
            written_down=self.dirs.cleaned_offsets_later,
            clock=self.clock,
            make_worker=make_worker or self.watched_worker,
        )

    def watched_worker(self) -> Worker:
        desk, loop = self, asyncio.get_running_loop()

        class Watched(ThreadWorker):
            def run(self, job: CompactionJob, report: Callable[[Cleaned], object]) -> Finished:
                desk.jobs.append(job.directory.name)

                async def disturb() -> None:
                    during, desk.during = desk.during, None
                    if during is not None:
                        during()

                def disturbed(cleaned: Cleaned) -> None:
                    asyncio.run_coroutine_threadsafe(disturb(), loop).result()
                    report(cleaned)

                return super().run(job, disturbed)

        return Watched()


@pytest.fixture
def desk() -> Iterator[Desk]:
    with fast_directory() as root:
        desk = Desk(root)
        yield desk
        desk.dirs.abandon()


async def test_the_dirtiest_log_comes_first(desk: Desk) -> None:
    half = desk.fill("half", 8)
    await desk.cleaner().clean()
    for value in range(3):
        half.append(keyed([(b"k0", b"x" * 100 * value)]), leader_epoch=0, now_ms=NOW_MS)
    half.roll()
    half.flush()
    desk.fill("all", 8)
    desk.fill("kept", 8, config=replace(CONFIG, compact=False))
    desk.jobs.clear()
    await desk.cleaner().clean()
    assert desk.jobs == ["all-0", "half-0"]
    assert [key for _, key, _ in pairs(half)] == [b"k1", b"k0"]


async def test_a_log_that_raises_does_not_keep_the_others_from_being_compacted(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad = desk.fill("bad", 8)
    desk.fill("good", 8)
    monkeypatch.setattr(bad, "compaction_facts", lambda _below: 1 // 0)
    cleaner = desk.cleaner()
    await cleaner.clean()
    assert desk.jobs == ["good-0"]
    assert "bad-0 is not compacted" in caplog.text
    monkeypatch.undo()
    desk.clock.advance(601)
    await cleaner.clean()
    assert desk.jobs == ["good-0", "bad-0"]


async def test_what_is_clean_is_left_alone_and_known_after_a_restart(desk: Desk) -> None:
    log = desk.fill("topic", 8)
    await desk.cleaner().clean()
    assert log.cleaned_offset == 8
    written = checkpoint.read_offsets(desk.files, log.directory.parent / "cleaner-offset-checkpoint")
    assert written == {TopicPartition("topic", 0): 8}
    desk.dirs.close()
    desk.dirs = desk.open()
    again = desk.dirs.get(TopicPartition("topic", 0))
    assert again is not None and again.cleaned_offset == 8
    desk.jobs.clear()
    await desk.cleaner().clean()
    assert desk.jobs == []
    assert [offset for offset, _, _ in pairs(again)] == [6, 7]


async def test_a_directory_without_compacted_logs_has_no_checkpoint_of_them(desk: Desk) -> None:
    log = desk.fill("topic", 8, config=replace(CONFIG, compact=False))
    desk.dirs.checkpoint()
    assert not (log.directory.parent / "cleaner-offset-checkpoint").exists()


async def test_a_switched_off_cleaner_does_nothing(desk: Desk) -> None:
    desk.fill("topic", 8)
    for settings in (CleanerSettings(enabled=False), CleanerSettings(threads=0)):
        desk.settings = settings
        await desk.cleaner().clean()
    assert desk.jobs == []


async def test_a_small_map_takes_several_rounds(desk: Desk) -> None:
    log = desk.fill("topic", 8)
    desk.settings = CleanerSettings(dedupe_buffer_bytes=1)
    await desk.cleaner().clean()
    assert len(desk.jobs) > 1
    assert log.cleaned_offset == 8
    assert [offset for offset, _, _ in pairs(log)] == [6, 7]


async def test_records_that_wait_for_too_long_are_compacted_without_another_append(desk: Desk) -> None:
    config = replace(CONFIG, max_compaction_lag_ms=60_000)
    log = desk.dirs.create_log(TopicPartition("topic", 0), uuid.uuid4(), config)
    for value in range(4):
        log.append(keyed([(b"k", b"%d" % value)]), leader_epoch=0, now_ms=NOW_MS)
    log.flush()
    await desk.cleaner().clean()
    assert log.segment_count == 1
    desk.clock.advance(61)
    await desk.cleaner().clean()
    assert [offset for offset, _, _ in pairs(log)] == [3]


def cut(desk: Desk) -> None:
    log = desk.dirs.get(TopicPartition("topic", 0))
    assert log is not None
    log.truncate_to(3)


def delete(desk: Desk) -> None:
    desk.dirs.delete_log(TopicPartition("topic", 0))


def set_aside(desk: Desk) -> None:
    desk.dirs.set_aside(TopicPartition("topic", 0))


def delete_records(desk: Desk) -> None:
    log = desk.dirs.get(TopicPartition("topic", 0))
    assert log is not None
    log.delete_records_before(8)


def make_again(desk: Desk) -> None:
    delete(desk)
    desk.fill("topic", 8)


@pytest.mark.parametrize("change", [cut, delete, set_aside, delete_records, make_again])
async def test_a_log_that_changes_meanwhile_is_not_replaced(desk: Desk, change: Callable[[Desk], None]) -> None:
    log = desk.fill("topic", 8)
    before = pairs(log)
    desk.during = lambda: change(desk)
    await desk.cleaner().clean()
    assert desk.jobs == ["topic-0"] or change is delete_records
    found = desk.dirs.get(TopicPartition("topic", 0))
    if change is cut:
        assert found is not None and pairs(found) == before[:3]
    if change is make_again:
        assert found is not None and pairs(found) == before
        assert found.cleaned_offset == 0
    for path in desk.paths:
        assert not list(path.glob("topic-0/*.cleaned")) and not list(path.glob("topic-0/*.swap"))


async def test_a_log_that_moves_meanwhile_is_compacted_there(desk: Desk) -> None:
    log = desk.fill("topic", 8)
    partition = TopicPartition("topic", 0)
    source = log.directory.parent
    target = next(path for path in desk.paths if path != source)
    await desk.cleaner().clean()
    await desk.dirs.moves.move(partition, target)
    moved = desk.dirs.get(partition)
    assert moved is not None and moved is not log
    assert (moved.cleaned_offset, [offset for offset, _, _ in pairs(moved)]) == (8, [6, 7])
    await asyncio.to_thread(desk.dirs.cleaned_offsets_later(partition))
    assert checkpoint.read_offsets(desk.files, target / "cleaner-offset-checkpoint") == {partition: 8}


async def test_a_log_that_cannot_be_compacted_waits(desk: Desk) -> None:
    log = desk.fill("topic", 8)
    path = log.directory / "00000000000000000000.log"
    rotten = bytearray(path.read_bytes())
    rotten[-1] ^= 1
    path.write_bytes(rotten)
    other = desk.fill("other", 8)
    cleaner = desk.cleaner()
    await cleaner.clean()
    await cleaner.clean()
    assert sorted(desk.jobs) == ["other-0", "topic-0"]
    assert other.cleaned_offset == 8
    assert log.failure is None


async def test_a_worker_that_takes_its_time_to_end_holds_up_nobody(desk: Desk) -> None:
    """It ends only when the loop has run something else: were it waited for on the loop, that would never be."""
    desk.fill("topic", 8)
    loop = asyncio.get_running_loop()
    ended = threading.Event()

    class Slow(ThreadWorker):
        def run(self, job: CompactionJob, report: Callable[[Cleaned], object]) -> Finished:
            raise StorageError("the disk is slow")

        def close(self) -> None:
            loop.call_soon_threadsafe(ended.set)
            assert ended.wait(20)

    await desk.cleaner(Slow).clean()
    assert ended.is_set()


async def test_several_workers_at_a_time(desk: Desk) -> None:
    logs = [desk.fill(f"topic{i}", 8) for i in range(5)]
    desk.settings = CleanerSettings(threads=3)
    await desk.cleaner().clean()
    assert all(log.cleaned_offset == 8 for log in logs)
    assert len(desk.jobs) == 5


# --- the process ------------------------------------------------------------------------------------------------------


async def test_a_process_does_it(desk: Desk) -> None:
    logs = [desk.fill("one", 8), desk.fill("two", 8)]
    workers: list[ProcessWorker] = []

    def make() -> ProcessWorker:
        workers.append(ProcessWorker())
        return workers[-1]

    await desk.cleaner(make).clean()
    assert [[offset for offset, _, _ in pairs(log)] for log in logs] == [[6, 7], [6, 7]]
    assert len(workers) == 1
    assert workers[0].pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(workers[0].pid, 0)


async def test_damage_is_reported_by_a_process(desk: Desk) -> None:
    log = desk.fill("topic", 8)
    (log.directory / "00000000000000000000.log").write_bytes(b"x" * log.size_bytes)
    cleaner = desk.cleaner(ProcessWorker)
    await cleaner.clean()
    assert cleaner._not_before


async def test_cancelling_ends_the_process(desk: Desk) -> None:
    log = desk.fill("topic", 8)
    desk.settings = CleanerSettings(max_bytes_per_s=1.0)
    workers: list[ProcessWorker] = []
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Watched(ProcessWorker):
        def _start(self) -> subprocess.Popen[bytes]:
            child = super()._start()
            loop.call_soon_threadsafe(started.set)
            return child

    def make() -> ProcessWorker:
        workers.append(Watched())
        return workers[-1]

    task = asyncio.create_task(desk.cleaner(make).clean())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert workers[0].pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(workers[0].pid, 0)
    assert len(pairs(log)) == 8


def test_a_stopped_worker_takes_no_more_work(desk: Desk) -> None:
    worker = ProcessWorker()
    worker.stop()
    with pytest.raises(StorageError, match="stopped"):
        worker.run(None, lambda _: None)  # type: ignore[arg-type]


def test_signals_for_the_broker_leave_the_worker_alone(desk: Desk) -> None:
    """A supervisor tells everybody to stop, a terminal the whole group: the round goes on until the broker ends it."""
    log = desk.fill("topic", 8)
    worker = ProcessWorker()
    try:
        for _ in range(2):
            job = job_of(log)
            assert job is not None
            worker.run(job, lambda _: None)
            assert worker.pid is not None
            assert os.getpgid(worker.pid) == worker.pid
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(worker.pid, number)
    finally:
        worker.close()


def test_settings_come_from_the_brokers() -> None:
    config = BrokerConfig(
        {
            "log.cleaner.enable": "false",
            "log.cleaner.threads": "3",
            "log.cleaner.dedupe.buffer.size": "600000",
            "log.cleaner.io.buffer.load.factor": "0.5",
            "log.cleaner.io.buffer.size": "7",
            "log.cleaner.io.max.bytes.per.second": "1000.5",
            "log.cleaner.backoff.ms": "9",
        }
    )
    settings = CleanerSettings.from_config(config)
    assert settings == CleanerSettings(False, 3, 600_000, 0.5, 7, 1000.5, 9)
    assert settings.max_keys == 500


def test_a_killed_broker_takes_its_worker_along() -> None:
    script = (
        "import time; from millrace.storage.compaction_worker import ProcessWorker\n"
        "child = ProcessWorker()._start(); print(child.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as broker:
        assert broker.stdout is not None
        worker = psutil.Process(int(broker.stdout.readline()))
        broker.kill()
    worker.wait(20)
