"""The log against a list: any sequence of appends, reads, rolls, retention, truncation and restarts."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millrace.clock import ManualClock
from millrace.errors import ApiError, ErrorCode
from millrace.records.batch import crc_matches, split
from millrace.records.compression import Codec
from millrace.storage.files import Files
from millrace.storage.log import Log
from millrace.storage.recovery import LogPosition, LogState
from millrace.storage.settings import FlushMode, LogConfig
from support.batches import NOW_MS, batch

CONFIG = LogConfig(
    flush_mode=FlushMode.OS,
    segment_bytes=1000,
    index_interval_bytes=150,
    retention_ms=-1,
    timestamp_after_max_ms=10**12,
)
_MEMORY = "/dev/shm"
EXAMPLES = int(os.environ.get("MILLRACE_MODEL_EXAMPLES", "60"))


class Entry:
    """A batch as the model knows it."""

    def __init__(self, base: int, count: int, data: bytes, timestamp_ms: int, epoch: int, sequence: int) -> None:
        self.base = base
        self.end = base + count
        self.data = data
        self.first_ms = timestamp_ms
        self.epoch = epoch
        self.sequence = sequence


class LogMachine(RuleBasedStateMachine):
    """A `Log` of tiny segments and the list of batches that it should hold."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(dir=_MEMORY if Path(_MEMORY).is_dir() else None))
        self.directory = self.root / "topic-0"
        self.directory.mkdir()
        self.files = Files(max_open=3, sync=False)
        self.entries: list[Entry] = []
        self.start = 0
        self.end = 0
        self.flushed = 0
        self.positions: list[LogPosition] = []
        self.now_ms = NOW_MS
        self.epoch = 0

    @initialize()
    def open(self, state: LogState | None = None) -> None:
        self.log = Log.open(self.directory, CONFIG, clock=ManualClock(), files=self.files, state=state)

    def teardown(self) -> None:
        self.log.release()
        self.files.close_all()
        shutil.rmtree(self.root)

    @property
    def next_sequence(self) -> int:
        return self.entries[-1].sequence + (self.entries[-1].end - self.entries[-1].base) if self.entries else 0

    @rule(count=st.integers(1, 4), size=st.integers(0, 200), codec=st.sampled_from(Codec), step=st.integers(-20, 50))
    def append(self, count: int, size: int, codec: Codec, step: int) -> None:
        self.now_ms = max(self.now_ms + step, NOW_MS)
        sequence = self.next_sequence
        data = batch(
            count,
            size=size,
            codec=codec,
            timestamp_ms=self.now_ms,
            producer_id=5,
            producer_epoch=0,
            sequence=sequence,
        )
        appended = self.log.append(data, leader_epoch=self.epoch, now_ms=self.now_ms)
        assert not appended.duplicate
        assert (appended.base_offset, appended.start_offset) == (self.end, self.start)
        self.positions.append(self.log.end)
        self.entries.append(Entry(self.end, count, data, self.now_ms, self.epoch, sequence))
        self.end += count

    @precondition(lambda self: self.entries)
    @rule(back=st.integers(0, 4))
    def retry(self, back: int) -> None:
        if back < len(self.entries):
            entry = self.entries[-1 - back]
            again = self.log.append(entry.data, leader_epoch=self.epoch, now_ms=self.now_ms)
            assert again.duplicate and again.base_offset == entry.base

    @rule()
    def new_epoch(self) -> None:
        self.epoch += 1

    @rule()
    def roll(self) -> None:
        self.log.roll()

    @rule()
    def flush(self) -> None:
        self.log.flush()
        self.flushed = self.end
        assert self.log.flushed == self.log.end

    @rule(at=st.floats(0, 1))
    def delete_records(self, at: float) -> None:
        offset = round(self.start + (self.end - self.start) * at)
        self.start = max(self.start, offset)
        assert self.log.delete_records_before(offset) == self.start

    @rule(max_bytes=st.integers(0, 4000))
    def retain(self, max_bytes: int) -> None:
        self.log.apply_config(replace(CONFIG, retention_bytes=max_bytes))
        size = self.log.size_bytes
        self.log.enforce_retention(self.now_ms)
        self.log.apply_config(CONFIG)
        below = sum(len(entry.data) for entry in self.entries if entry.end <= self.start)
        assert self.log.size_bytes >= min(size - below, max_bytes)
        assert self.log.start_offset >= self.start
        assert self.log.start_offset in {entry.base for entry in self.entries} | {self.start, self.end}
        self.start = self.log.start_offset

    @precondition(lambda self: self.end > self.start)
    @rule(at=st.floats(0, 1))
    def truncate(self, at: float) -> None:
        offset = round(self.start + (self.end - self.start) * at)
        if offset <= self.start:
            return
        self.log.truncate_to(offset)
        self.entries = [entry for entry in self.entries if entry.end <= offset]
        self.end = self.entries[-1].end if self.entries else self.log.end_offset
        self.start = min(self.start, self.end)
        self.positions = [position for position in self.positions if position.offset <= self.end]
        self.flushed = min(self.flushed, self.end)

    @rule()
    def restart_cleanly(self) -> None:
        self.log.close()
        self.open(LogState(self.start, self.end, clean=True))
        self.flushed = self.end
        assert (self.log.start_offset, self.log.end_offset) == (self.start, self.end)

    @rule()
    def crash(self) -> None:
        self.log.release()
        self.open(LogState(self.start, min(self.flushed, self.end)))

    @rule(at=st.floats(0, 1), max_bytes=st.integers(0, 2000), at_least_one=st.booleans(), limit=st.floats(0, 1))
    def read(self, at: float, max_bytes: int, at_least_one: bool, limit: float) -> None:
        offset = round(self.start + (self.end - self.start) * at)
        usable = [p for p in self.positions if p.offset >= self.start]
        bound = usable[round((len(usable) - 1) * limit)] if usable and limit < 1 else None
        end = self.end if bound is None else bound.offset
        result = self.log.read(offset, max_bytes, limit=bound, at_least_one=at_least_one)
        found = list(split(result.data))
        expected = [entry for entry in self.entries if entry.end > offset and entry.end <= end][: len(found)]
        assert [(h.base_offset, h.next_offset) for h, _ in found] == [(entry.base, entry.end) for entry in expected]
        for (header, data), entry in zip(found, expected, strict=True):
            assert crc_matches(data) and bytes(data[16:]) == entry.data[16:] and header.leader_epoch == entry.epoch
        if found:
            assert result.next_offset == expected[-1].end
            assert len(result.data) <= max_bytes or (at_least_one and len(found) == 1)
        else:
            assert result.next_offset == offset
            assert offset >= end or not at_least_one

    @rule(step=st.integers(-30, 500))
    def find_time(self, step: int) -> None:
        target = NOW_MS + step
        expected = None
        for entry in self.entries:
            for index in range(entry.end - entry.base):
                if entry.base + index >= self.start and entry.first_ms + index >= target:
                    expected = (entry.base + index, entry.first_ms + index)
                    break
            if expected:
                break
        found = self.log.offset_for_time(target)
        assert (None if found is None else (found.offset, found.timestamp_ms)) == expected

    @rule(beyond=st.integers(1, 3))
    def out_of_range(self, beyond: int) -> None:
        for offset in (self.start - beyond, self.end + beyond):
            with pytest.raises(ApiError) as error:
                self.log.read(offset, 100)
            assert error.value.code is ErrorCode.OFFSET_OUT_OF_RANGE

    @invariant()
    def offsets_agree(self) -> None:
        if hasattr(self, "log"):
            assert (self.log.start_offset, self.log.end_offset) == (self.start, self.end)
            assert self.log.end.offset == self.end
            assert self.log.flushed_offset <= self.end
            assert self.log.latest_epoch <= self.epoch
            assert self.files.open_count <= 4


TestLogModel = LogMachine.TestCase
TestLogModel.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
