"""Data directories: lazy starts, checkpoints, deletion, locks, directories and logs that are damaged."""

from __future__ import annotations

import asyncio
import errno
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.clock import ManualClock, SystemClock
from millrace.errors import ConfigError, CorruptLogError, DiskFullError, StorageError
from millrace.model import TopicPartition
from millrace.storage.files import Files
from millrace.storage.log import Log
from millrace.storage.logdirs import LogDirs
from millrace.storage.settings import FlushMode, LogConfig
from support.batches import NOW_MS, batch
from support.disk import FaultyFiles, fast_directory

CONFIG = LogConfig(flush_mode=FlushMode.OS)
TP = TopicPartition("topic", 0)


@pytest.fixture
def root() -> Iterator[Path]:
    with fast_directory() as path:
        yield path


def open_dirs(*paths: Path, files: Files | None = None, config: LogConfig = CONFIG, **more: object) -> LogDirs:
    return LogDirs.open(
        paths,
        node_id=more.pop("node_id", 1),  # type: ignore[arg-type]
        clock=ManualClock(),
        config=config,
        files=files or Files(sync=False),
        **more,  # type: ignore[arg-type]
    )


def add(log: Log, count: int = 1) -> None:
    for _ in range(count):
        log.append(batch(1), leader_epoch=0, now_ms=NOW_MS)


class TestStartAndStop:
    def test_a_clean_restart_reads_no_partition(self, root: Path) -> None:
        dirs = open_dirs(root)
        for index in range(5):
            add(dirs.create_log(TopicPartition("topic", index), uuid.uuid4()), index)
        dirs.get(TP).enforce_retention(NOW_MS)  # type: ignore[union-attr]
        dirs.close({TP: 0})
        assert (root / ".kafka_cleanshutdown").read_text() == '{"version":0,"brokerEpoch":-1}'
        assert (root / "recovery-point-offset-checkpoint").read_text().startswith("0\n4\ntopic 1 1\ntopic 2 2\n")
        files = FaultyFiles(root)
        files.fail("pread", match="topic", times=-1)
        files.fail("read_file", match="topic-", times=-1)
        files.fail("open", match="topic-", times=-1)
        dirs = open_dirs(root, files=files)
        assert dirs.clean_start
        assert {tp.partition: log.end_offset for tp, log in dirs.logs().items()} == {i: i for i in range(1, 5)}
        assert not (root / ".kafka_cleanshutdown").exists()
        assert dirs.high_watermarks == {TP: 0}
        files.heal()
        add(dirs.logs()[TopicPartition("topic", 3)])
        dirs.close()

    def test_a_killed_broker_recovers(self, root: Path) -> None:
        dirs = open_dirs(root)
        log = dirs.create_log(TP, uuid.uuid4())
        add(log, 3)
        dirs.checkpoint()
        add(log, 4)
        log.delete_records_before(2)
        assert dirs.checkpoint_start_offsets([TP]) == {}
        dirs.abandon()
        dirs = open_dirs(root)
        assert not dirs.clean_start
        log = dirs.logs()[TP]
        assert (log.start_offset, log.end_offset, log.flushed_offset) == (2, 7, 0)
        assert log.dirty
        dirs.close()
        assert open_dirs(root).clean_start

    def test_two_thousand_partitions_start_quickly(self, root: Path) -> None:
        dirs = open_dirs(root)
        for index in range(2000):
            add(dirs.create_log(TopicPartition("many", index), uuid.uuid4()))
        dirs.close()
        started = time.process_time()
        files = Files(sync=False)
        dirs = open_dirs(root, files=files)
        assert time.process_time() - started < 1
        assert len(dirs.logs()) == 2000 and files.open_count == 0
        dirs.abandon()

    def test_creation_is_cheap(self, root: Path) -> None:
        files = FaultyFiles(root)
        dirs = open_dirs(root, files=files)
        files.calls.clear()
        started = time.process_time()
        for index in range(50):
            dirs.create_log(TopicPartition("__consumer_offsets", index), uuid.uuid4())
        assert time.process_time() - started < 0.1
        assert files.calls == {}
        dirs.close()

    def test_a_log_without_records_leaves_no_trace(self, root: Path) -> None:
        dirs = open_dirs(root)
        log = dirs.create_log(TP, uuid.uuid4())
        log.assign_epoch(3)
        assert log.read(0, 100).data == b"" and log.end.offset == 0
        assert log.enforce_retention(NOW_MS) == 0 and log.delete_records_before(0) == 0
        log.flush()
        dirs.checkpoint()
        dirs.close()
        assert not (root / "topic-0").exists()
        dirs = open_dirs(root)
        assert dirs.clean_start and not dirs.logs()
        dirs.delete_log(dirs.create_log(TP, uuid.uuid4()) and TP)
        again = dirs.create_log(TP, uuid.uuid4())
        again.reset_to(70)
        dirs.close()
        dirs = open_dirs(root)
        assert dirs.logs()[TP].end.offset == 70
        dirs.close()

    def test_a_directory_that_cannot_be_made_is_tried_again(self, root: Path) -> None:
        files = FaultyFiles(root)
        dirs = open_dirs(root, files=files)
        log = dirs.create_log(TP, uuid.uuid4())
        files.fail("mkdir", errno.ENOSPC)
        with pytest.raises(StorageError):
            add(log)
        add(log)
        assert log.end_offset == 1
        dirs.close()

    def test_damaged_checkpoints_are_rebuilt(self, root: Path, caplog: pytest.LogCaptureFixture) -> None:
        names = ("recovery-point-offset-checkpoint", "log-start-offset-checkpoint", "replication-offset-checkpoint")
        dirs = open_dirs(root)
        log = dirs.create_log(TP, uuid.uuid4())
        add(log, 20)
        log.delete_records_before(3)
        dirs.close({TP: 20})
        for name in names:
            data = (root / name).read_bytes()
            for size in range(len(data)):
                (root / name).write_bytes(data[:size])
                dirs = open_dirs(root)
                log = dirs.logs()[TP]
                assert log.end_offset == 20
                assert log.start_offset == (0 if name == names[1] else 3)
                if name == names[1]:
                    log.delete_records_before(3)
                dirs.close({TP: 20})
                assert (root / name).read_bytes() == data
        assert "is damaged" in caplog.text

    def test_logs_of_a_killed_broker_are_synced_at_start(self, root: Path) -> None:
        async def run() -> None:
            dirs = LogDirs.open(
                [root], node_id=1, clock=SystemClock(), config=replace(CONFIG, flush_mode=FlushMode.GROUP)
            )
            log = dirs.logs()[TP]
            flushed = asyncio.Event()
            log.on_flushed.append(flushed.set)
            dirs.start()
            await flushed.wait()
            assert log.flushed == log.end
            await dirs.stop()

        dirs = open_dirs(root)
        add(dirs.create_log(TP, uuid.uuid4()), 3)
        dirs.abandon()
        asyncio.run(run())


class TestIdentity:
    def test_a_directory_is_locked(self, root: Path) -> None:
        dirs = open_dirs(root)
        with pytest.raises(ConfigError, match="in use"):
            open_dirs(root)
        dirs.close()
        open_dirs(root).close()

    def test_a_directory_belongs_to_one_broker_of_one_cluster(self, root: Path) -> None:
        dirs = open_dirs(root, cluster_id="abc")
        directory_id = dirs.directories[0].directory_id
        dirs.close()
        with pytest.raises(ConfigError, match="broker 1"):
            open_dirs(root, node_id=2)
        with pytest.raises(ConfigError, match="cluster abc"):
            open_dirs(root, cluster_id="xyz")
        dirs = open_dirs(root, cluster_id="abc")
        assert dirs.directories[0].directory_id == directory_id
        dirs.close()
        (root / "meta.properties").write_bytes(b"\x00garbage")
        open_dirs(root, cluster_id="abc").close()

    def test_topic_ids_survive(self, root: Path) -> None:
        topic_id = uuid.UUID("11111111-2222-3333-4444-555555555555")
        dirs = open_dirs(root)
        log = dirs.create_log(TP, topic_id)
        assert dirs.topic_id(TP) == topic_id
        add(log)
        dirs.close()
        assert (root / "topic-0" / "partition.metadata").read_text() == "version: 0\ntopic_id: ERERESIiMzNERFVVVVVVVQ"
        dirs = open_dirs(root)
        assert dirs.topic_id(TP) == topic_id
        for damage in (b"", b"version: 0\n", b"version: 0\ntopic_id: EREREQ", b"\xff\xff\xff"):
            (root / "topic-0" / "partition.metadata").write_bytes(damage)
            assert dirs.topic_id(TP) is None
        dirs.set_topic_id(TP, topic_id)
        assert dirs.topic_id(TP) == topic_id
        assert dirs.topic_id(TopicPartition("other", 0)) is None
        dirs.close()

    @pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../../etc/passwd", "a\x00b", "é", "x" * 250])
    def test_names_cannot_leave_the_directory(self, root: Path, name: str) -> None:
        dirs = open_dirs(root / "data")
        with pytest.raises(StorageError):
            dirs.create_log(TopicPartition(name, 0), uuid.uuid4())
        dirs.close()
        assert [path.name for path in root.iterdir()] == ["data"]

    def test_foreign_names_are_left_alone(self, root: Path) -> None:
        for name in ("lost+found", "notes", "topic-x", "topic-01", "-1", "metadata.db"):
            (root / name).mkdir()
        dirs = open_dirs(root)
        assert not dirs.logs()
        dirs.close()
        assert (root / "topic-01").exists()


class TestDeletion:
    def test_a_deleted_log_is_gone(self, root: Path) -> None:
        dirs = open_dirs(root)
        log = dirs.create_log(TP, uuid.uuid4())
        add(log, 3)
        dirs.delete_log(TP)
        dirs.delete_log(TP)
        assert dirs.get(TP) is None
        with pytest.raises(StorageError):
            add(log)
        again = dirs.create_log(TP, uuid.uuid4())
        assert again.end_offset == 0
        add(again)
        dirs.close()
        assert [path.name for path in root.iterdir() if path.is_dir()] == ["topic-0"]

    def test_a_deleted_log_stays_for_a_while(self, root: Path) -> None:
        clock = ManualClock()
        dirs = LogDirs.open([root], node_id=1, clock=clock, config=CONFIG, files=Files(sync=False))
        dirs.in_background = lambda work: work()  # type: ignore[method-assign,assignment,return-value]
        add(dirs.create_log(TP, uuid.uuid4()), 3)
        dirs.delete_log(TP, 60_000)
        assert dirs.get(TP) is None
        clock.advance(59.9)
        (kept,) = root.glob("topic-0.*-delete")
        assert (kept / f"{0:020d}.log").stat().st_size > 0
        clock.advance(0.1)
        assert not list(root.glob("*-delete"))
        dirs.close()

    def test_segments_that_retention_removed_stay_for_a_while(self, root: Path) -> None:
        clock = ManualClock()
        config = replace(CONFIG, segment_bytes=1000, file_delete_delay_ms=60_000)
        dirs = LogDirs.open([root], node_id=1, clock=clock, config=config, files=Files(sync=False))
        dirs.in_background = lambda work: work()  # type: ignore[method-assign,assignment,return-value]
        log = dirs.create_log(TP, uuid.uuid4())
        add(log, 50)
        log.delete_records_before(30)
        assert log.start_offset == 30
        kept = list((root / "topic-0").glob("*.log.deleted"))
        assert kept
        clock.advance(59.9)
        assert sorted((root / "topic-0").glob("*.log.deleted")) == sorted(kept)
        clock.advance(0.1)
        assert not list((root / "topic-0").glob("*.deleted"))
        log.apply_config(replace(config, file_delete_delay_ms=0))
        log.delete_records_before(45)
        assert not list((root / "topic-0").glob("*.deleted"))
        dirs.close()

    def test_what_was_cut_off_does_not_stay(self, root: Path) -> None:
        """Its names may be needed again, and nobody ever asked for its removal."""
        dirs = open_dirs(root, config=replace(CONFIG, segment_bytes=1000, file_delete_delay_ms=60_000))
        dirs.in_background = lambda work: work()  # type: ignore[method-assign,assignment,return-value]
        log = dirs.create_log(TP, uuid.uuid4())
        add(log, 50)
        log.truncate_to(10)
        assert not list((root / "topic-0").glob("*.deleted"))
        dirs.close()

    @pytest.mark.parametrize("end", ["full disk", "stop", "crash"])
    def test_deleted_files_do_not_wait_for_ever(self, root: Path, end: str) -> None:
        dirs = open_dirs(root, config=replace(CONFIG, segment_bytes=1000, file_delete_delay_ms=60_000))
        log = dirs.create_log(TP, uuid.uuid4())
        other = TopicPartition("other", 0)
        add(log, 50)
        add(dirs.create_log(other, uuid.uuid4()))
        log.delete_records_before(30)
        dirs.delete_log(other, 60_000)
        left = [*root.glob("*-delete"), *root.glob("topic-0/*.deleted")]
        assert len(left) > 1
        if end == "full disk":
            dirs.in_background = lambda work: work()  # type: ignore[method-assign,assignment,return-value]
            error = DiskFullError("no space left")
            error.__cause__ = OSError(errno.ENOSPC, "no space left")
            dirs.note_failed_write(TP, error)
            assert not any(path.exists() for path in left)
            log.delete_records_before(45)
            assert not list(root.glob("topic-0/*.deleted")), "as long as it is full"
        if end == "crash":
            dirs.abandon()
            assert all(path.exists() for path in left)
            dirs = open_dirs(root)
            dirs.logs()[TP].ensure_loaded()
        dirs.close()
        assert not any(path.exists() for path in left)

    def test_a_deletion_cut_short_is_finished(self, root: Path) -> None:
        dirs = open_dirs(root)
        add(dirs.create_log(TP, uuid.uuid4()))
        dirs.close()
        (root / "topic-0").rename(root / f"topic-0.{uuid.uuid4().hex}-delete")
        dirs = open_dirs(root)
        assert not dirs.logs()
        dirs.close()
        assert not list(root.glob("*-delete"))

    def test_checkpoints_of_an_old_log_are_not_taken_for_a_new_one(self, root: Path) -> None:
        files = FaultyFiles(root)
        dirs = open_dirs(root, files=files)
        log = dirs.create_log(TP, uuid.uuid4())
        add(log, 50)
        log.delete_records_before(20)
        log.flush()
        dirs.checkpoint()
        assert "topic 0 50" in (root / "recovery-point-offset-checkpoint").read_text()
        dirs.delete_log(TP)
        add(dirs.create_log(TP, uuid.uuid4()), 3)
        dirs.abandon()
        dirs = open_dirs(root)
        log = dirs.logs()[TP]
        assert log.failure is None
        assert (log.start_offset, log.end_offset) == (0, 3)
        dirs.close()

    @pytest.mark.parametrize("lower", [0, 10, 35])
    def test_a_truncated_log_is_not_taken_for_a_damaged_one(self, root: Path, lower: int) -> None:
        dirs = open_dirs(root, config=replace(CONFIG, segment_bytes=1000))
        log = dirs.create_log(TP, uuid.uuid4())
        add(log, 50)
        log.delete_records_before(5)
        log.flush()
        dirs.checkpoint()
        log.truncate_to(lower)
        dirs.abandon()
        dirs = open_dirs(root)
        log = dirs.logs()[TP]
        assert log.failure is None
        assert log.end_offset == lower
        dirs.close()

    def test_the_longest_topic_name_can_be_deleted(self, root: Path) -> None:
        dirs = open_dirs(root)
        partition = TopicPartition("t" * 249, 123)
        add(dirs.create_log(partition, uuid.uuid4()))
        assert (root / str(partition)).is_dir()
        dirs.delete_log(partition)
        dirs.close()
        assert not [path for path in root.iterdir() if path.is_dir()]


class TestFailures:
    def test_a_corrupt_log_is_offline_alone(self, root: Path, caplog: pytest.LogCaptureFixture) -> None:
        dirs = open_dirs(root)
        for index in range(2):
            add(dirs.create_log(TopicPartition("topic", index), uuid.uuid4()), 3)
        dirs.close()
        path = root / "topic-0" / f"{0:020d}.log"
        path.write_bytes(path.read_bytes()[:-1])
        (root / ".kafka_cleanshutdown").unlink()
        dirs = open_dirs(root)
        log = dirs.get(TP)
        assert log is not None and isinstance(log.failure, CorruptLogError)
        assert log.end_offset == 3, "what the checkpoint knows is kept"
        with pytest.raises(CorruptLogError):
            log.read(0, 1)
        healthy = dirs.logs()[TopicPartition("topic", 1)]
        assert healthy.failure is None and healthy.end_offset == 3
        assert "nothing is cut" in caplog.text or "were flushed" in caplog.text
        assert [d.partition.partition for d in dirs.describe()[0].logs] == [1]
        dirs.close()
        assert not (root / ".kafka_cleanshutdown").exists(), "the next start must look again"

    def test_a_broken_directory_leaves_the_others(self, root: Path) -> None:
        (root / "broken").write_bytes(b"a file where a directory should be")
        dirs = open_dirs(root / "broken", root / "good")
        assert dirs.directories[0].failure is not None
        add(dirs.create_log(TP, uuid.uuid4()))
        descriptions = dirs.describe()
        assert descriptions[0].failure is not None and descriptions[1].failure is None
        assert descriptions[1].total_bytes > 0
        dirs.close()
        with pytest.raises(StorageError):
            open_dirs(root / "broken")

    def test_logs_are_spread_over_directories(self, root: Path) -> None:
        dirs = open_dirs(root / "a", root / "b")
        for index in range(10):
            add(dirs.create_log(TopicPartition("topic", index), uuid.uuid4()))
        assert [len(directory.logs) for directory in dirs.directories] == [5, 5]
        dirs.close()
        (root / "b" / "topic-0").mkdir()
        dirs = open_dirs(root / "a", root / "b")
        dirs.choose_between_twins(lambda _: None)
        log = dirs.get(TopicPartition("topic", 0))
        assert log is not None and log.end_offset == 1, "the first one counts where nobody knows better"
        dirs.abandon()

    async def test_a_failed_sync_takes_the_directory_offline(self, root: Path) -> None:
        files = FaultyFiles(root)
        dirs = LogDirs.open(
            [root], node_id=1, clock=SystemClock(), files=files, config=replace(CONFIG, flush_mode=FlushMode.GROUP)
        )
        dirs.start()
        log = dirs.create_log(TP, uuid.uuid4())
        other = dirs.create_log(TopicPartition("other", 0), uuid.uuid4())
        failed = asyncio.Event()
        dirs.on_failure = lambda _: failed.set()
        files.fail("datasync", errno.EIO, match=".log")
        add(log)
        await failed.wait()
        assert log.flushed_offset == 0
        for any_log in (log, other):
            with pytest.raises(StorageError):
                add(any_log)
        with pytest.raises(StorageError):
            dirs.create_log(TopicPartition("new", 0), uuid.uuid4())
        await dirs.stop()
        assert not (root / ".kafka_cleanshutdown").exists()

    @pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
    @pytest.mark.parametrize("call", ["pwritev", "datasync", "rename", "sync_directory"])
    def test_a_hint_that_cannot_be_written_is_tried_again(
        self, root: Path, call: str, number: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        files = FaultyFiles(root)
        dirs = open_dirs(root, files=files)
        log = dirs.create_log(TP, uuid.uuid4())
        add(log, 3)
        log.flush()
        log.cleaned_offset = 1
        files.fail(call, number, match="" if call == "sync_directory" else "checkpoint", times=-1)
        for _ in range(3):
            dirs.checkpoint()
            dirs.checkpoint_high_watermarks({TP: 2})
            dirs.cleaned_offsets_later(TP)()
            dirs.directories[0]._recovery_points_later()()
        said = [record for record in caplog.records if record.levelname == "ERROR"]
        assert len({record.getMessage() for record in said}) == len(said) == 5, (
            "each once, whatever the number of turns"
        )
        assert dirs.directories[0].failure is None
        add(log)
        assert log.read(0, 1000).data
        files.heal()
        dirs.checkpoint()
        dirs.checkpoint_high_watermarks({TP: 2})
        for name, offset in (("recovery-point", 3), ("replication", 2), ("cleaner", 1)):
            assert f"topic 0 {offset}" in (root / f"{name}-offset-checkpoint").read_text()
        files.fail(call, number, match="" if call == "sync_directory" else "checkpoint", times=-1)
        dirs.checkpoint_high_watermarks({TP: 3})
        assert sum(record.levelname == "ERROR" for record in caplog.records) == 6, "said again when it begins again"
        dirs.abandon()

    def test_what_a_truncation_needs_on_disk_is_no_hint(self, root: Path) -> None:
        files = FaultyFiles(root)
        dirs = open_dirs(root, files=files)
        log = dirs.create_log(TP, uuid.uuid4())
        add(log, 9)
        log.flush()
        dirs.checkpoint()
        files.fail("pwritev", errno.ENOSPC, match="recovery-point")
        with pytest.raises(StorageError):
            log.truncate_to(4)
        assert log.end_offset == 9
        assert dirs.directories[0].failure is None
        log.truncate_to(4)
        assert log.end_offset == 4
        dirs.close()

    def test_deleted_records_that_may_come_back_are_told_of(self, root: Path) -> None:
        files = FaultyFiles(root)
        dirs = open_dirs(root / "a", root / "b", files=files)
        places = [TopicPartition("topic", index) for index in range(2)]
        logs = [dirs.create_log(place, uuid.uuid4()) for place in places]
        for log in logs:
            add(log, 9)
            log.delete_records_before(4)
        files.fail("pwritev", errno.ENOSPC, match=str(logs[0].directory.parent))
        failed = dirs.checkpoint_start_offsets(places)
        assert list(failed) == [places[0]]
        assert all(directory.failure is None for directory in dirs.directories)
        assert dirs.checkpoint_start_offsets(places) == {}
        dirs.close()

    def test_a_full_disk_at_close_leaves_no_clean_mark(self, root: Path) -> None:
        files = FaultyFiles(root)
        dirs = open_dirs(root, files=files)
        add(dirs.create_log(TP, uuid.uuid4()), 3)
        files.fail("pwritev", errno.ENOSPC, match="checkpoint", times=-1)
        dirs.close()
        assert not (root / ".kafka_cleanshutdown").exists()
        dirs = open_dirs(root)
        assert dirs.logs()[TP].end_offset == 3
        dirs.close()
