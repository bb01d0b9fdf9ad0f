"""Logs that move from one data directory to another while they are used, and what a power cut leaves of them."""

from __future__ import annotations

import asyncio
import errno
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millrace.clock import ManualClock
from millrace.errors import StorageError
from millrace.model import TopicPartition
from millrace.storage.files import Files
from millrace.storage.log import Log
from millrace.storage.logdirs import LogDirs
from millrace.storage.move import PIECE_BYTES
from millrace.storage.settings import FlushMode, LogConfig
from support.batches import NOW_MS, batch
from support.disk import Fault, FaultyFiles, fast_directory

CONFIG = LogConfig(flush_mode=FlushMode.OS, segment_bytes=PIECE_BYTES)
TP = TopicPartition("topic", 0)
TOPIC_ID = uuid.uuid4()
NO_LIMIT = 2**63 - 1


class Disks:
    """Two directories, `a` with a log of a few segments and `b`, on disks that remember what is durable."""

    def __init__(self, root: Path, files: FaultyFiles | None = None) -> None:
        self.root = root
        self.a, self.b = root / "a", root / "b"
        self.files = files or FaultyFiles(root)
        for path in (self.a, self.b):
            self.files.make_directory(path)
        self.files.sync_directory(root)
        self.dirs = self.open(self.files)

    def open(self, files: Files) -> LogDirs:
        dirs = LogDirs.open([self.a, self.b], node_id=1, clock=ManualClock(), config=CONFIG, files=files)
        # Files are removed by the time anybody looks: at the start that takes a wait for the thread, then no thread.
        if dirs._remover is not None:
            dirs._remover.shutdown(wait=True)
            dirs._remover = None
        dirs.in_background = lambda work: work()  # type: ignore[method-assign,assignment,return-value]
        return dirs

    def fill(self, count: int = 4, size_bytes: int = 600_000) -> Log:
        log = self.dirs.create_log(TP, TOPIC_ID, CONFIG)
        for epoch in range(count):
            add(log, epoch, size_bytes)
        log.flush()
        return log

    def names(self) -> set[str]:
        return {f"{path.parent.name}/{path.name}" for path in self.root.glob("*/topic-*")}

    def between_pieces(self, *steps: Callable[[], object]) -> None:
        """Have each of `steps` done once, one after each piece that is copied."""
        todo = list(steps)

        def limit() -> int:
            if todo:
                todo.pop(0)()
            return NO_LIMIT

        self.dirs.moves.bytes_per_s = limit


@pytest.fixture
def disks() -> Iterator[Disks]:
    with fast_directory() as root:
        found = Disks(root)
        yield found
        found.dirs.abandon()


def add(log: Log, epoch: int, size_bytes: int = 100) -> None:
    records = batch(size=size_bytes, producer_id=7, producer_epoch=0, sequence=log.end_offset)
    log.append(records, leader_epoch=epoch, now_ms=NOW_MS)


def state_of(log: Log | None) -> object:
    assert log is not None
    offset, data = log.start_offset, b""
    while offset < log.end_offset:
        read = log.read(offset, 2**30)
        data, offset = data + read.data, read.next_offset
    return log.start_offset, log.end_offset, data, [repr(each) for each in log.producers]


async def test_everything_moves(disks: Disks) -> None:
    log = disks.fill()
    log.delete_records_before(1)
    before, layout = state_of(log), log.layout()
    told: list[TopicPartition] = []
    disks.dirs.on_moved = told.append
    await disks.dirs.moves.move(TP, disks.b)
    assert told == [TP]
    assert disks.names() == {"b/topic-0"}
    moved = disks.dirs.get(TP)
    assert moved is not log and state_of(moved) == before
    assert moved is not None and moved.flushed.offset == moved.end_offset
    assert moved.layout() == layout
    assert disks.dirs.topic_id(TP) == TOPIC_ID
    with pytest.raises(StorageError, match="has moved"):
        log.end  # noqa: B018
    add(moved, 9)
    moved.flush()
    before = state_of(moved)
    disks.files.crash()
    disks.dirs = disks.open(Files(sync=False))
    assert state_of(disks.dirs.get(TP)) == before


async def test_there_and_back(disks: Disks) -> None:
    before = state_of(disks.fill())
    for target in (disks.b, disks.a, disks.a, disks.b):
        await disks.dirs.moves.move(TP, target)
        assert state_of(disks.dirs.get(TP)) == before
        assert disks.names() == {f"{target.name}/topic-0"}


async def test_a_clean_restart_finds_it_there(disks: Disks) -> None:
    before = state_of(disks.fill())
    await disks.dirs.moves.move(TP, disks.b)
    disks.dirs.close()
    disks.dirs = disks.open(Files(sync=False))
    assert disks.dirs.clean_start
    assert state_of(disks.dirs.get(TP)) == before


async def test_it_is_used_meanwhile(disks: Disks) -> None:
    log = disks.fill()
    described: list[object] = []

    def look() -> None:
        here, there = disks.dirs.describe()
        assert [(each.partition, each.is_future) for each in here.logs] == [(TP, False)]
        assert [(each.partition, each.is_future) for each in there.logs] == [(TP, True)]
        assert 0 < there.logs[0].size_bytes < here.logs[0].size_bytes
        described.append(there.logs[0].end_offset)

    def write() -> None:
        add(log, 5, 700_000)

    disks.between_pieces(look, write, write, lambda: log.delete_records_before(2), write)
    await disks.dirs.moves.move(TP, disks.b)
    assert described == [1]
    moved = disks.dirs.get(TP)
    assert moved is not None
    assert (moved.start_offset, moved.end_offset) == (2, 7)
    assert moved.layout().segments[0][0] == 2
    assert moved.layout().epochs == [(2, 2), (3, 3), (5, 4)]


async def test_what_is_cut_meanwhile_is_not_in_the_copy(disks: Disks) -> None:
    log = disks.fill()

    def cut() -> None:
        log.truncate_to(1)
        for _ in range(3):
            add(log, 8, 600_000)

    disks.between_pieces(lambda: None, lambda: None, cut)
    await disks.dirs.moves.move(TP, disks.b)
    moved = disks.dirs.get(TP)
    assert moved is not None and moved is not log
    assert moved.layout().epochs == [(0, 0), (8, 1)]
    assert [moved.read_batch(offset).header.leader_epoch for offset in range(4)] == [0, 8, 8, 8]
    assert disks.names() == {"b/topic-0"}


async def test_a_move_is_called_off(disks: Disks) -> None:
    log = disks.fill()
    disks.between_pieces(lambda: disks.dirs.moves.place(TP, disks.a))
    with pytest.raises(StorageError, match="could not be moved"):
        await disks.dirs.moves.move(TP, disks.b)
    await disks.dirs.moves.stop()
    assert disks.dirs.get(TP) is log
    assert disks.names() == {"a/topic-0"}
    assert [each.is_future for there in disks.dirs.describe() for each in there.logs] == [False]


async def test_a_log_is_deleted_while_it_moves(disks: Disks) -> None:
    disks.fill()
    disks.between_pieces(lambda: disks.dirs.delete_log(TP))
    await disks.dirs.moves.move(TP, disks.b)
    await disks.dirs.moves.stop()
    assert disks.dirs.get(TP) is None
    assert disks.names() == set()


async def test_a_stop_gives_a_move_up(disks: Disks) -> None:
    log = disks.fill()
    disks.dirs.moves.bytes_per_s = lambda: 0
    disks.dirs.moves.place(TP, disks.b)
    await disks.dirs.moves._in_thread(lambda: None)
    await disks.dirs.stop()
    assert disks.names() == {"a/topic-0"}
    disks.dirs = disks.open(Files(sync=False))
    assert state_of(disks.dirs.get(TP)) == state_of(log)


async def test_the_limit_holds(disks: Disks) -> None:
    disks.fill()
    clock = disks.dirs._clock
    assert isinstance(clock, ManualClock)
    disks.dirs.moves.bytes_per_s = lambda: 100_000
    move = asyncio.create_task(disks.dirs.moves.move(TP, disks.b))
    while not move.done():
        await asyncio.sleep(0)
        await disks.dirs.moves._in_thread(lambda: None)
        clock.advance(0.1)
    await move
    assert clock.monotonic() > 2_400_000 / 100_000


async def test_several_logs_move_one_after_another(disks: Disks) -> None:
    logs = [disks.dirs.create_log(TopicPartition("topic", index), TOPIC_ID, CONFIG) for index in range(6)]
    for log in logs:
        add(log, 0)
    held = {index: disks.dirs._by_partition[TopicPartition("topic", index)].path for index in range(6)}
    for index, path in held.items():
        disks.dirs.moves.place(TopicPartition("topic", index), disks.b if path == disks.a else disks.a)
    await disks.dirs.moves.move(TopicPartition("topic", 5), disks.b if held[5] == disks.a else disks.a)
    for index, path in held.items():
        assert disks.dirs._by_partition[TopicPartition("topic", index)].path != path


async def test_a_log_without_records_is_made_elsewhere(disks: Disks) -> None:
    told: list[TopicPartition] = []
    disks.dirs.on_moved = told.append
    log = disks.dirs.create_log(TP, TOPIC_ID, CONFIG)
    await disks.dirs.moves.move(TP, disks.b)
    assert told == [TP]
    assert disks.names() == set()
    moved = disks.dirs.get(TP)
    assert moved is not None and moved is not log
    add(moved, 0)
    assert disks.names() == {"b/topic-0"}
    assert disks.dirs.topic_id(TP) == TOPIC_ID


def test_a_log_that_was_never_opened_will_be_made_there(disks: Disks) -> None:
    disks.dirs.moves.place(TP, disks.b)
    assert [len(each.logs) for each in disks.dirs.describe()] == [0, 1]
    add(disks.dirs.create_log(TP, TOPIC_ID, CONFIG), 0)
    assert disks.names() == {"b/topic-0"}


def test_only_directories_of_the_broker(disks: Disks) -> None:
    with pytest.raises(StorageError, match="not a data directory"):
        disks.dirs.moves.place(TP, disks.root)


@pytest.mark.parametrize("call", ["open", "pwritev", "datasync", "sync_directory", "mkdir", "truncate"])
async def test_a_full_or_broken_disk_leaves_it_where_it_was(disks: Disks, call: str) -> None:
    log = disks.fill()
    before = state_of(log)
    disks.files.fail(call, errno.ENOSPC, match="-future", times=-1)
    with pytest.raises(StorageError, match="could not be moved"):
        await disks.dirs.moves.move(TP, disks.b)
    disks.files.heal()
    assert state_of(log) == before
    assert disks.names() == {"a/topic-0"}
    add(log, 9)
    await disks.dirs.moves.move(TP, disks.b)
    assert disks.names() == {"b/topic-0"}


async def test_an_original_that_cannot_be_put_away_stays(disks: Disks) -> None:
    log = disks.fill()
    disks.files.fail("rename", match="a/topic-0")
    with pytest.raises(StorageError, match="could not be moved"):
        await disks.dirs.moves.move(TP, disks.b)
    assert disks.dirs.get(TP) is log
    assert disks.names() == {"a/topic-0"}
    add(log, 9)


class MortalFiles(FaultyFiles):
    """Everything fails once `left` calls were made: the power went, and whatever is tried then has no effect."""

    left = 10**9

    def _due(self, call: str, path: Path) -> Fault | None:
        self.left -= 1
        return Fault(call) if self.left < 0 else super()._due(call, path)


async def test_a_power_cut_at_any_step_loses_nothing() -> None:
    """At every call that the move makes of the disk; found are all records, once."""
    places = []
    for step in range(10**6):
        with fast_directory() as root:
            files = MortalFiles(root)
            disks = Disks(root, files)
            log = disks.fill(4, 400_000)
            log.delete_records_before(1)  # in the middle of a segment
            disks.dirs.checkpoint()
            before = state_of(log)
            files.left = step
            try:
                await disks.dirs.moves.move(TP, disks.b)
            except StorageError:
                pass
            finished = files.left >= 0
            disks.dirs.moves._mover = None
            files.left = 10**9
            disks.dirs.files.close_all()
            for directory in disks.dirs.directories:
                directory.unlock()
            files.crash()
            again = disks.open(Files(sync=False))
            assert state_of(again.get(TP)) == before, f"step {step}"
            again.abandon()
            (name,) = disks.names()
            places.append(name)
            if finished:
                break
    assert len(places) > 20
    assert places == sorted(places), "once it is in the new directory it stays there"
    assert set(places) == {"a/topic-0", "b/topic-0"}


async def make_both(disks: Disks) -> None:
    """A power cut between the two renames, as it looks on disk."""
    disks.fill()
    disks.files.fail("rename", match="a/topic-0")
    unlink = disks.files.sys_unlink

    def keep_mark(path: Path) -> None:
        if path.name == "moved":
            raise OSError(errno.EIO, "gone")
        unlink(path)

    disks.files.sys_unlink = keep_mark  # type: ignore[method-assign]
    with pytest.raises(StorageError):
        await disks.dirs.moves.move(TP, disks.b)
    assert disks.names() == {"a/topic-0", "b/topic-0"}


async def test_the_marked_one_of_two_counts(disks: Disks) -> None:
    await make_both(disks)
    before = state_of(disks.dirs.get(TP))
    disks.dirs.abandon()
    disks.dirs = disks.open(Files(sync=False))
    assert state_of(disks.dirs.get(TP)) == before
    assert disks.names() == {"b/topic-0"}


@pytest.mark.parametrize("counts", ["a", "b"])
async def test_of_two_that_were_both_used_the_one_counts_that_the_cluster_names(disks: Disks, counts: str) -> None:
    await make_both(disks)
    log = disks.dirs.get(TP)
    assert log is not None
    copied = state_of(log)
    add(log, 9)
    used = state_of(log)
    disks.dirs.abandon()
    disks.dirs = disks.open(Files(sync=False))
    assert disks.names() == {"a/topic-0", "b/topic-0"}
    ids = {directory.path.name: directory.directory_id for directory in disks.dirs.directories}
    disks.dirs.choose_between_twins(lambda _: ids[counts])
    assert state_of(disks.dirs.get(TP)) == (used if counts == "a" else copied)
    other = {"a": "b", "b": "a"}[counts]
    assert f"{counts}/topic-0" in disks.names() and f"{other}/topic-0" not in disks.names()
    assert any(name.startswith(f"{other}/topic-0.") and name.endswith("-stray") for name in disks.names())


async def test_a_mark_that_was_left_does_not_move_on(disks: Disks) -> None:
    before = state_of(disks.fill())
    (disks.a / "topic-0" / "moved").touch()
    disks.files.fail("rename", match="a/topic-0")
    with pytest.raises(StorageError):
        await disks.dirs.moves.move(TP, disks.b)
    assert not (disks.a / "topic-0" / "moved").exists()
    await disks.dirs.moves.move(TP, disks.b)
    assert not (disks.b / "topic-0" / "moved").exists()
    assert state_of(disks.dirs.get(TP)) == before
