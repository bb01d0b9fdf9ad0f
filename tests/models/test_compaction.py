"""Compaction against a dictionary: any mix of appends, rounds, truncations, deletions, kills and restarts.

What must hold at every moment: the last value of every key is there; a record that is there is the one that was written
at its offset; nothing above what was compactable has changed; below the cleaned offset every key occurs once; and a
follower that copies the log has the same records.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millrace.clock import ManualClock
from millrace.records.batch import split
from millrace.records.compression import Codec
from millrace.records.decode import decode_records
from millrace.storage.compaction_job import KEY_BYTES
from millrace.storage.files import Files
from millrace.storage.log import Log
from millrace.storage.recovery import LogState
from millrace.storage.settings import FlushMode, LogConfig
from support.batches import NOW_MS
from support.compaction import SETTINGS, batches_of, compact, keyed, pairs

CONFIG = LogConfig(
    flush_mode=FlushMode.OS,
    compact=True,
    delete=False,
    index_interval_bytes=150,
    delete_retention_ms=1000,
    timestamp_after_max_ms=10**12,
)
EXAMPLES = int(os.environ.get("MILLRACE_MODEL_EXAMPLES", "60"))
_MEMORY = "/dev/shm"

keys = st.sampled_from([b"a", b"b", b"c", b"d", b"a key that is longer than a digest", b""])
values = st.one_of(st.none(), st.binary(max_size=40))


class Tombstone(NamedTuple):
    offset: int
    horizon_ms: int | None


class CompactionMachine(RuleBasedStateMachine):
    """A compacted `Log` and everything that was ever written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(dir=_MEMORY if Path(_MEMORY).is_dir() else None))
        self.directory = self.root / "topic-0"
        self.directory.mkdir()
        self.files = Files(max_open=3, sync=False)
        self.written: dict[int, tuple[bytes, bytes | None]] = {}
        self.now_ms = NOW_MS
        self.untouched_from = 0
        self.may_lack: set[int] = set()
        """Offsets of tombstones that a round after their time has met."""
        self.sequence = 0

    @initialize(segment_bytes=st.sampled_from([200, 600, 5000]))
    def begin(self, segment_bytes: int) -> None:
        self.config = replace(CONFIG, segment_bytes=segment_bytes)
        self.log = self._open(LogState())

    def _open(self, state: LogState) -> Log:
        # At a start a log has the settings of the broker; its topic's come later.
        broker = replace(self.config, compact=False)
        log = Log.open(self.directory, broker, clock=ManualClock(), files=self.files, state=state)
        log.apply_config(self.config)
        return log

    def teardown(self) -> None:
        self.files.close_all()
        shutil.rmtree(self.root)

    # --- what happens -------------------------------------------------------------------------------------------------

    @rule(
        entries=st.lists(st.tuples(keys, values), min_size=1, max_size=4),
        codec=st.sampled_from(list(Codec)),
        idempotent=st.booleans(),
    )
    def append(self, entries: list[tuple[bytes, bytes | None]], codec: Codec, idempotent: bool) -> None:
        fields = {}
        if idempotent:
            fields = {"producer_id": 7, "producer_epoch": 0, "base_sequence": self.sequence}
        batch = keyed(entries, codec=codec, timestamp_ms=self.now_ms, **fields)
        if len(batch) > self.config.segment_bytes:
            return
        base = self.log.append(batch, leader_epoch=0, now_ms=self.now_ms).base_offset
        self.sequence += len(entries) if idempotent else 0
        self.written.update({base + i: entry for i, entry in enumerate(entries)})
        self.now_ms += len(entries)

    @rule()
    def roll(self) -> None:
        self.log.roll()

    @rule(max_keys=st.sampled_from([1, 2, 1000]), below=st.floats(0, 1), wait_ms=st.sampled_from([0, 2000]))
    def compact(self, max_keys: int, below: float, wait_ms: int) -> None:
        self.log.flush()
        self.now_ms += wait_ms
        limit = int(self.log.end_offset * (below if below < 0.5 else 1.0))
        horizons = {record.offset for record in self._expired()}
        options = replace(SETTINGS, dedupe_buffer_bytes=max_keys * KEY_BYTES, load_factor=1.0)
        finished = compact(self.log, self.files, now_ms=self.now_ms, below=limit, settings=options)
        if finished is not None:
            assert finished.cleaned_offset <= limit
            self.untouched_from = max(self.untouched_from, finished.cleaned_offset)
            self.may_lack |= horizons

    def _expired(self) -> list[Tombstone]:
        """Tombstones that may go in this round: those that an earlier one has given a horizon, which is past."""
        return [each for each in self._tombstones() if each.horizon_ms is not None and each.horizon_ms <= self.now_ms]

    def _tombstones(self) -> list[Tombstone]:
        return [
            Tombstone(record.offset, batch.header.delete_horizon_ms)
            for batch in batches_of(self.log)
            for record in decode_records(batch.data)
            if record.value is None
        ]

    @rule(share=st.floats(0, 1))
    def truncate(self, share: float) -> None:
        start, end = self.log.start_offset, self.log.end_offset
        self.log.truncate_to(start + int((end - start) * share))
        end = self.log.end_offset
        self.written = {offset: entry for offset, entry in self.written.items() if offset < end}
        self.untouched_from = min(self.untouched_from, end)
        self.may_lack = {offset for offset in self.may_lack if offset < end}
        # What the cut records had superseded is gone with a round before: nobody can bring that back.
        self._forget_superseded()
        entry = next(iter(self.log.producers), None)
        self.sequence = 0 if entry is None else entry.last_sequence + 1

    def _forget_superseded(self) -> None:
        there = {offset for offset, _, _ in pairs(self.log)}
        self.written = {
            offset: entry
            for offset, entry in self.written.items()
            if offset in there or offset >= self.untouched_from or offset in self.may_lack
        }

    @rule(share=st.floats(0, 1))
    def delete_before(self, share: float) -> None:
        start, end = self.log.start_offset, self.log.end_offset
        self.log.delete_records_before(start + int((end - start) * share))

    @rule()
    def stop_and_start(self) -> None:
        self.log.close()
        self._restart(LogState(self.log.start_offset, self.log.end_offset, clean=True))

    @rule(share=st.floats(0, 1))
    def kill_and_start(self, share: float) -> None:
        self.log.flush()
        point = self.log.start_offset + int((self.log.end_offset - self.log.start_offset) * share)
        self.log.release()
        self._restart(LogState(self.log.start_offset, point))

    def _restart(self, state: LogState) -> None:
        cleaned, end = self.log.cleaned_offset, self.log.end_offset
        self.log = self._open(state)
        self.log.cleaned_offset = cleaned
        assert self.log.end_offset == end

    # --- what holds ---------------------------------------------------------------------------------------------------

    @invariant()
    def everything_is_there_that_must_be(self) -> None:
        if not hasattr(self, "log"):
            return
        start = self.log.start_offset
        found = {offset: (key, value) for offset, key, value in pairs(self.log)}
        for offset, entry in found.items():
            assert self.written[offset] == entry
        last: dict[bytes, int] = {}
        for offset in sorted(self.written):
            last[self.written[offset][0]] = offset
        for offset in last.values():
            assert offset in found or offset < start or offset in self.may_lack, (offset, self.written[offset])
        missing = [offset for offset in self.written if offset >= max(start, self.untouched_from)]
        assert all(offset in found for offset in missing)
        clean = [key for offset, (key, _) in found.items() if offset < self.log.cleaned_offset]
        assert len(clean) == len(set(clean))

    @invariant()
    def every_offset_leads_to_the_next_record(self) -> None:
        if not hasattr(self, "log"):
            return
        present = [offset for offset, _, _ in pairs(self.log)]
        for offset in range(self.log.start_offset, self.log.end_offset, max(self.log.end_offset // 5, 1)):
            position, read = offset, []
            while position < self.log.end_offset and not read:
                result = self.log.read(position, 0)
                read = [
                    record.offset
                    for batch in split(result.data)
                    for record in decode_records(batch.data)
                    if record.offset >= offset
                ]
                position = result.next_offset
            assert read[:1] == [other for other in present if other >= offset][:1]

    @precondition(lambda self: hasattr(self, "log"))
    @rule()
    def copy_to_a_follower(self) -> None:
        first = next(batches_of(self.log), None)
        if first is not None and first.header.base_offset < self.log.start_offset:
            return  # a log that begins inside a batch cannot be copied from its start
        path = self.root / "follower-0"
        path.mkdir()
        follower = Log.open(path, self.config, clock=ManualClock(), files=self.files)
        follower.reset_to(self.log.start_offset)
        while follower.end_offset < self.log.end_offset:
            follower.append_as_follower(self.log.read(follower.end_offset, 400).data)
        assert pairs(follower) == pairs(self.log)
        assert [(e.producer_id, e.last_sequence) for e in follower.producers] in (
            [(e.producer_id, e.last_sequence) for e in self.log.producers],
            [],
        )
        follower.release()
        shutil.rmtree(path)


TestCompaction = CompactionMachine.TestCase
TestCompaction.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
