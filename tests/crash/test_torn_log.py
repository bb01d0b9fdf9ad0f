"""Files cut at every byte, with tails of zeros and garbage, and with flipped bits: what was acked is always there.

Every case makes a log of several segments whose recovery point lies before its last batches, damages one file as a
crash would, and opens it again. The oracle is the list of batches that were written.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.clock import ManualClock
from millrace.errors import ApiError, CorruptLogError
from millrace.records.batch import crc_matches, split
from millrace.storage.files import Files
from millrace.storage.log import Log
from millrace.storage.recovery import LogState
from millrace.storage.segment import IndexCache
from millrace.storage.settings import FlushMode, LogConfig
from support.batches import NOW_MS, batch
from support.disk import fast_directory

CONFIG = LogConfig(flush_mode=FlushMode.OS, segment_bytes=1500, index_interval_bytes=150)
BATCHES = 24


def numbered(index: int) -> bytes:
    """The batch with that number: its producer's sequences and its timestamps say which one it is."""
    return batch(
        2, size=20 + index, timestamp_ms=NOW_MS + 10 * index, producer_id=1, producer_epoch=0, sequence=2 * index
    )


class Written:
    """A log on disk, not closed, and what is known to be in it."""

    def __init__(self, directory: Path, *, close: bool = False) -> None:
        self.directory = directory
        directory.mkdir()
        log = open_log(directory)
        self.batches: list[bytes] = []
        self.offsets: list[int] = []
        for index in range(BATCHES):
            data = numbered(index)
            self.offsets.append(log.append(data, leader_epoch=index // 10, now_ms=NOW_MS).base_offset)
        self.end = log.end_offset
        self.offsets.append(self.end)
        offset = 0
        while offset < self.end:
            result = log.read(offset, 1 << 20)
            self.batches += [bytes(data) for _, data in split(result.data)]
            offset = result.next_offset
        self.active = max(directory.glob("*.log"))
        self.active_base = int(self.active.stem)
        if close:
            log.close()
        else:
            # As a kill would: what is in the page cache stays, indexes of the active segment were never written.
            log.release()
        self.files = {path.name: path.read_bytes() for path in directory.iterdir()}
        self.last_three = sum(len(data) for data in self.batches[-3:])

    def restore(self) -> None:
        """The directory as it was after the crash."""
        for path in self.directory.iterdir():
            if path.name not in self.files:
                path.unlink()
        for name, data in self.files.items():
            path = self.directory / name
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)

    def check(self, log: Log, batches: int) -> None:
        """The log holds exactly the first `batches` batches, and can go on."""
        found: list[bytes] = []
        offset = 0
        while offset < log.end_offset:
            result = log.read(offset, 1 << 20)
            found += [bytes(data) for _, data in split(result.data)]
            offset = result.next_offset
        assert found == self.batches[:batches]
        assert log.end_offset == self.offsets[batches]
        last = log.producers[0].last_sequence if batches else -1
        assert last == 2 * batches - 1
        if batches:
            again = log.append(numbered(batches - 1), leader_epoch=9, now_ms=NOW_MS)
            assert again.duplicate and again.base_offset == self.offsets[batches - 1]
        appended = log.append(batch(1), leader_epoch=9, now_ms=NOW_MS)
        assert appended.base_offset == self.offsets[batches]
        for index in range(0, batches, 3):
            by_time = log.offset_for_time(NOW_MS + 10 * index + 1)
            assert by_time is not None and by_time.offset == self.offsets[index] + 1


def open_log(directory: Path, state: LogState | None = None) -> Log:
    return Log.open(directory, CONFIG, clock=ManualClock(), files=Files(sync=False), state=state)


@pytest.fixture(scope="module")
def crashed() -> Iterator[Written]:
    with fast_directory() as root:
        yield Written(root / "topic-0")


@pytest.fixture(scope="module")
def closed() -> Iterator[Written]:
    with fast_directory() as root:
        yield Written(root / "topic-0", close=True)


def whole_batches(written: Written, size: int) -> int:
    """How many batches of the log are whole when its last segment has only `size` bytes."""
    before = [i for i, offset in enumerate(written.offsets[:-1]) if offset < written.active_base]
    count = len(before)
    for data in written.batches[count:]:
        if size < len(data):
            break
        size -= len(data)
        count += 1
    return count


TAILS = {
    "cut": lambda rest, rng: b"",
    "zeros": lambda rest, rng: bytes(len(rest)),
    "more zeros": lambda rest, rng: bytes(len(rest) + 4096),
    "garbage": lambda rest, rng: rng.randbytes(len(rest) + 1),
}


@pytest.mark.parametrize("tail", TAILS)
def test_segment_cut_at_every_byte_of_its_last_three_batches(crashed: Written, tail: str) -> None:
    data = crashed.files[crashed.active.name]
    rng = random.Random(tail)
    points = (0, crashed.active_base, crashed.offsets[BATCHES - 3])
    cuts = 0
    for size in range(len(data) - crashed.last_three, len(data)):
        crashed.restore()
        crashed.active.write_bytes(data[:size] + TAILS[tail](data[size:], rng))
        log = open_log(crashed.directory, LogState(recovery_point=points[size % 3]))
        expected = whole_batches(crashed, size)
        if tail != "cut" and log.end_offset == crashed.offsets[expected + 1]:
            expected += 1  # the tail happened to be the very bytes that were cut
        crashed.check(log, expected)
        log.release()
        cuts += 1
    assert cuts == crashed.last_three > 300


@pytest.mark.parametrize("suffix", [".index", ".timeindex", ".snapshot"])
@pytest.mark.parametrize("clean", [True, False])
def test_hints_cut_at_every_byte(closed: Written, suffix: str, clean: bool) -> None:
    for name, data in sorted(closed.files.items()):
        if not name.endswith(suffix):
            continue
        for size in range(len(data)):
            closed.restore()
            (closed.directory / name).write_bytes(data[:size])
            state = LogState(0, closed.end, clean=clean)
            log = open_log(closed.directory, state)
            closed.check(log, BATCHES)
            log.release()


@pytest.mark.parametrize("clean", [True, False])
def test_epoch_checkpoint_cut_at_every_byte(closed: Written, clean: bool) -> None:
    name = "leader-epoch-checkpoint"
    data = closed.files[name]
    for size in range(len(data)):
        closed.restore()
        (closed.directory / name).write_bytes(data[:size])
        log = open_log(closed.directory, LogState(0, closed.end, clean=clean))
        assert log.latest_epoch == 2
        assert log.end_offset_for_epoch(0) == (0, closed.offsets[10])
        log.release()


@pytest.mark.parametrize("suffix", [".index", ".timeindex", ".snapshot", "leader-epoch-checkpoint"])
def test_hints_that_are_missing_or_garbage(closed: Written, suffix: str) -> None:
    rng = random.Random(suffix)
    for garbage in (None, b"", bytes(24), rng.randbytes(24), rng.randbytes(1000)):
        closed.restore()
        for name in closed.files:
            if name.endswith(suffix):
                path = closed.directory / name
                path.unlink()
                if garbage is not None:
                    path.write_bytes(garbage)
        log = open_log(closed.directory, LogState(0, closed.end, clean=True))
        closed.check(log, BATCHES)
        assert log.end_offset_for_epoch(1) == (1, closed.offsets[20])
        log.release()


def test_flipped_bits_in_index_files_never_change_what_is_read(closed: Written) -> None:
    rng = random.Random(5)
    names = [name for name in closed.files if name.endswith(("index", ".snapshot"))]
    for _ in range(400):
        closed.restore()
        name = rng.choice(names)
        data = bytearray(closed.files[name])
        if not data:
            continue
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (closed.directory / name).write_bytes(data)
        log = open_log(closed.directory, LogState(0, closed.end, clean=rng.random() < 0.5))
        for index in rng.sample(range(BATCHES), 5):
            result = log.read(closed.offsets[index], 1)
            assert bytes(result.data) == closed.batches[index]
        closed.check(log, BATCHES)
        log.release()


def test_flipped_bits_in_unflushed_data_are_cut_off(crashed: Written) -> None:
    """What was not flushed may be lost, but a damaged batch is never served, and nothing before it is lost."""
    rng = random.Random(6)
    data = crashed.files[crashed.active.name]
    for _ in range(1000):
        crashed.restore()
        position = rng.randrange(len(data) - crashed.last_three, len(data))
        damaged = bytearray(data)
        damaged[position] ^= 1 << rng.randrange(8)
        crashed.active.write_bytes(damaged)
        log = open_log(crashed.directory, LogState(recovery_point=crashed.offsets[BATCHES - 3]))
        hit = whole_batches(crashed, position)
        start = position - sum(len(b) for b in crashed.batches[whole_batches(crashed, 0) : hit])
        if start in range(12, 16):
            # The leader epoch is outside of the CRC (a leader stamps it): the batch stays, with that epoch.
            assert log.end_offset == crashed.end
        elif start in range(8) and log.end_offset > crashed.offsets[hit]:
            # So is the base offset: a larger one looks like a gap that compaction left.
            assert all(crc_matches(b) for _, b in split(log.read(crashed.offsets[hit - 1], 1 << 20).data))
        else:
            crashed.check(log, hit)
        log.release()


def test_cut_off_batches_that_were_sound_are_kept_aside(crashed: Written) -> None:
    crashed.restore()
    data = bytearray(crashed.files[crashed.active.name])
    position = len(data) - crashed.last_three
    data[position + 70] ^= 1
    crashed.active.write_bytes(data)
    log = open_log(crashed.directory, LogState(recovery_point=crashed.offsets[BATCHES - 3]))
    assert log.end_offset == crashed.offsets[BATCHES - 3]
    kept = list(crashed.directory.glob("*.cut-*"))
    assert [path.name for path in kept] == [f"{crashed.active.name}.cut-{position}"]
    assert kept[0].read_bytes() == data[position:]
    log.release()


def test_flipped_bits_in_flushed_data_take_the_partition_offline(
    crashed: Written, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(7)
    data = crashed.files[crashed.active.name]
    for _ in range(500):
        crashed.restore()
        damaged = bytearray(data)
        position = rng.randrange(len(data))
        damaged[position] ^= 1 << rng.randrange(8)
        crashed.active.write_bytes(damaged)
        try:
            log = open_log(crashed.directory, LogState(recovery_point=crashed.end))
        except CorruptLogError as caught:
            error = str(caught)
        else:
            # Only the fields outside of the CRC (offset and leader epoch) may pass, with all records intact.
            assert log.end_offset >= crashed.end
            log.release()
            continue
        assert crashed.active.name in error or str(crashed.directory) in error
        assert crashed.active.read_bytes() == damaged, "nothing may be cut"
    assert "is offline" in caplog.text


@pytest.mark.parametrize("keep", [0, 1, 61, -1])
def test_a_flushed_segment_that_was_cut_takes_the_partition_offline(crashed: Written, keep: int) -> None:
    crashed.restore()
    left = crashed.files[crashed.active.name][:keep]
    crashed.active.write_bytes(left)
    for state in (LogState(recovery_point=crashed.end), LogState(recovery_point=crashed.end, clean=True)):
        log = Log(
            crashed.directory,
            CONFIG,
            clock=ManualClock(),
            files=Files(sync=False),
            state=state,
            cache=IndexCache(),
        )
        with pytest.raises(CorruptLogError):
            log.ensure_loaded()
        assert isinstance(log.failure, CorruptLogError)
        with pytest.raises(CorruptLogError):
            log.append(batch(1), leader_epoch=0, now_ms=NOW_MS)
        assert crashed.active.read_bytes() == left, "nothing may be cut"


def test_missing_segments(crashed: Written) -> None:
    crashed.restore()
    middle = sorted(crashed.directory.glob("*.log"))[1]
    middle.unlink()
    log = open_log(crashed.directory)
    assert log.end_offset == int(middle.stem), "what follows a hole is not the log"
    log.release()
    crashed.restore()
    middle.unlink()
    with pytest.raises(CorruptLogError):
        open_log(crashed.directory, LogState(recovery_point=int(middle.stem) + 1))
    crashed.restore()
    for path in crashed.directory.glob("*.log"):
        path.unlink()
    with pytest.raises(CorruptLogError):
        open_log(crashed.directory, LogState(recovery_point=crashed.end))


def test_leftovers_of_unfinished_work_are_removed(crashed: Written) -> None:
    crashed.restore()
    for name in ("00000000000000000000.log.deleted", "leader-epoch-checkpoint.tmp", f"{999:020d}.index"):
        (crashed.directory / name).write_bytes(b"x")
    (crashed.directory / "notes.txt").write_bytes(b"not ours")
    log = open_log(crashed.directory)
    crashed.check(log, BATCHES)
    log.release()
    names = {path.name for path in crashed.directory.iterdir()}
    assert "notes.txt" in names
    assert not any(name.endswith((".deleted", ".tmp")) or name.startswith(f"{999:020d}") for name in names)


def test_damage_found_while_reading_is_an_error_not_data(closed: Written, tmp_path: Path) -> None:
    """A sealed segment below the recovery point is not scanned; a walk over its damage must not invent batches."""
    directory = tmp_path / "copy"
    shutil.copytree(closed.directory, directory)
    closed.restore()
    rng = random.Random(8)
    sealed = min(closed.directory.glob("*.log")).name
    for _ in range(300):
        data = bytearray(closed.files[sealed])
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (directory / sealed).write_bytes(data)
        log = open_log(directory, LogState(0, closed.end, clean=True))
        offset = 0
        try:
            while offset < log.end_offset:
                result = log.read(offset, 300)
                assert result.next_offset > offset
                offset = result.next_offset
        except (CorruptLogError, ApiError):
            pass
        log.release()


def test_large_batches_are_scanned_too(tmp_path: Path) -> None:
    directory = tmp_path / "topic-0"
    directory.mkdir()
    config = replace(CONFIG, segment_bytes=1 << 26, max_message_bytes=1 << 25)
    log = Log.open(directory, config, clock=ManualClock(), files=Files(sync=False))
    for size in (10, 3_000_000, 500, 1_048_576 - 100, 7):
        log.append(batch(2, size=size), leader_epoch=0, now_ms=NOW_MS)
    log.release()
    again = Log.open(directory, config, clock=ManualClock(), files=Files(sync=False))
    assert again.end_offset == 10
    again.release()
