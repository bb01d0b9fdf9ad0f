"""Transactions in a partition against a list of what was written: writes, ends, commits, restarts, cuts, compaction.

What must hold at every moment: the last stable offset is the one that its definition says, so that it never hangs; who
reads committed records, from anywhere and in pieces of any size, and leaves out what the answers say was aborted, sees
exactly the records of committed transactions, and those outside of any, below it; the index of aborted transactions is
the same however often it is made anew. However often the log is compacted, and whatever time passes between: the last
record of every key is there, a coordinator that loads its state from the log loads the same, and every producer is
known with its epoch and its sequence after any start.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from millrace.clock import ManualClock
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import PartitionState
from millrace.records.batch import split
from millrace.records.control import MarkerType, decode_end_marker
from millrace.records.decode import decode_records
from millrace.replication.partition import Partition
from millrace.replication.state_topic import StateRecord, StateTopic
from millrace.storage import loaded, recovery
from millrace.storage.compaction import Transactions
from millrace.storage.files import Files
from millrace.storage.log import Log
from millrace.storage.producers import UNVERIFIED, Producers
from millrace.storage.recovery import LogState
from millrace.storage.settings import FlushMode, LogConfig
from support.batches import NOW_MS
from support.compaction import compact, keyed

CONFIG = LogConfig(
    flush_mode=FlushMode.OS,
    compact=True,
    delete=True,
    index_interval_bytes=150,
    retention_ms=-1,
    delete_retention_ms=1000,
)
EXAMPLES = int(os.environ.get("MILLRACE_MODEL_EXAMPLES", "60"))
_MEMORY = "/dev/shm"
_KEYS = (b"a", b"b", b"c")
_PRODUCERS = st.sampled_from([1, 2, 3])
_BUMPS = frozenset({3})
"""Producers of transaction version 2: a new epoch with every end."""


@dataclass(frozen=True)
class Written:
    """A batch as the model has it."""

    base: int
    entries: tuple[tuple[bytes, bytes], ...]
    producer: int = -1
    epoch: int = -1
    next_sequence: int = 0
    transactional: bool = False
    marker: MarkerType | None = None

    @property
    def end(self) -> int:
        return self.base + (len(self.entries) or 1)


class TransactionMachine(RuleBasedStateMachine):
    """A partition with two replicas, of which this one leads, and everything that is in its log."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(dir=_MEMORY if Path(_MEMORY).is_dir() else None))
        self.directory = self.root / "topic-0"
        self.directory.mkdir()
        self.files = Files(max_open=4, sync=False)
        self.clock = ManualClock(NOW_MS)
        self.written: list[Written] = []
        self.start = 0
        self.mark = 0
        self.epoch = 0
        self.values = 0
        self.recovery_points = [0]
        self.is_compacted = False
        self.now_ms = NOW_MS
        self.knows_producers = True
        """Not after a cut of what had superseded batches that compaction has taken without a snapshot to tell it."""
        self.is_compacted_blindly = False
        self.lacks_snapshots = False
        """Then a transaction of which every record was deleted need not be known any more: it hides nothing."""

    @initialize(segment_bytes=st.sampled_from([300, 900, 100_000]))
    def begin(self, segment_bytes: int) -> None:
        self.config = replace(CONFIG, segment_bytes=segment_bytes)
        self._open(LogState())
        self._lead()

    def _open(self, state: LogState) -> None:
        # At a start a log has the settings of the broker; its topic's come later.
        self.log = Log.open(
            self.directory, replace(self.config, compact=False), clock=self.clock, files=self.files, state=state
        )
        self.log.apply_config(self.config)
        self.partition = Partition(
            "topic",
            0,
            uuid.UUID(int=1),
            open_log=lambda: self.log,
            clock=self.clock,
            broker_id=1,
            high_watermark=self.mark,
        )
        self._follow()
        assert self.partition.last_stable_offset <= self.partition.high_watermark.offset

    def _lead(self) -> None:
        self.epoch += 1
        self.partition.lead(PartitionState((1, 2), (1, 2), 1, leader_epoch=self.epoch))

    def _follow(self) -> None:
        self.epoch += 1
        self.partition.follow(PartitionState((1, 2), (2,), 2, leader_epoch=self.epoch))

    def teardown(self) -> None:
        self.files.close_all()
        shutil.rmtree(self.root)

    # --- the model ----------------------------------------------------------------------------------------------------

    @property
    def end(self) -> int:
        return self.written[-1].end if self.written else self.start

    def _state_of(self, producer: int) -> tuple[int, int]:
        """The producer's epoch and its next sequence."""
        last = next((each for each in reversed(self.written) if each.producer == producer), None)
        return (0, 0) if last is None else (last.epoch, last.next_sequence)

    def _is_open(self, producer: int) -> bool:
        last = next((each for each in reversed(self.written) if each.producer == producer), None)
        return last is not None and last.transactional and last.marker is None

    def _stable(self) -> int:
        stable = self.mark
        first: dict[int, int] = {}
        for each in self.written:
            if each.marker is not None:
                begun = first.pop(each.producer, None)
                if begun is not None and each.base >= self.mark:
                    stable = min(stable, begun)
            elif each.transactional:
                first.setdefault(each.producer, each.base)
        return max(min([stable, *first.values()]), self.start)

    def _committed(self, below: int) -> dict[int, tuple[bytes, bytes]]:
        """Offset -> record of what a reader of committed records may see."""
        seen: dict[int, tuple[bytes, bytes]] = {}
        waiting: dict[int, dict[int, tuple[bytes, bytes]]] = {}
        for each in self.written:
            records = {each.base + i: entry for i, entry in enumerate(each.entries)}
            if each.marker is not None:
                ended = waiting.pop(each.producer, {})
                if each.marker is MarkerType.COMMIT:
                    seen.update(ended)
            elif each.transactional:
                waiting.setdefault(each.producer, {}).update(records)
            else:
                seen.update(records)
        return {offset: entry for offset, entry in seen.items() if self.start <= offset < below}

    # --- what happens -------------------------------------------------------------------------------------------------

    def _entries(self, keys: list[bytes]) -> tuple[tuple[bytes, bytes], ...]:
        self.values += 1
        return tuple((key, b"%d.%d" % (self.values, i)) for i, key in enumerate(keys))

    @rule(keys=st.lists(st.sampled_from(_KEYS), min_size=1, max_size=3))
    def write_outside(self, keys: list[bytes]) -> None:
        entries = self._entries(keys)
        base = self.partition.append(keyed(entries)).base_offset
        self.written.append(Written(base, entries))

    @rule(producer=_PRODUCERS, keys=st.lists(st.sampled_from(_KEYS), min_size=1, max_size=3))
    def write_inside(self, producer: int, keys: list[bytes]) -> None:
        epoch, sequence = self._state_of(producer)
        entries = self._entries(keys)
        batch = keyed(entries, producer_id=producer, producer_epoch=epoch, base_sequence=sequence, transactional=True)
        appended = self.partition.append(batch, verification=UNVERIFIED)
        assert not appended.duplicate
        self.written.append(
            Written(appended.base_offset, entries, producer, epoch, sequence + len(keys), transactional=True)
        )

    @rule(producer=_PRODUCERS, kind=st.sampled_from(MarkerType))
    def end_transaction(self, producer: int, kind: MarkerType) -> None:
        epoch, sequence = self._state_of(producer)
        if producer in _BUMPS:
            epoch, sequence = epoch + 1, 0
        appended = self.partition.end_transaction(
            producer,
            epoch,
            0,
            commit=kind is MarkerType.COMMIT,
            transaction_version=2 if producer in _BUMPS else 1,
            now_ms=NOW_MS,
        )
        self.written.append(Written(appended.base_offset, (), producer, epoch, sequence, True, kind))

    @rule(share=st.floats(0, 1))
    def commit(self, share: float) -> None:
        """The follower has more: up to a boundary between two batches."""
        self._commit(share)

    def _commit(self, share: float) -> None:
        ends = [each.end for each in self.written if each.end > self.mark]
        if ends:
            self.mark = ends[int(share * (len(ends) - 1))]
            self.partition.serve_follower(2, 1, self.mark, -1, 0, at_least_one=False)

    @rule()
    def flush(self) -> None:
        self.log.flush()
        self.recovery_points.append(self.log.flushed_offset)

    @rule()
    def roll(self) -> None:
        self.log.roll()

    @rule(share=st.floats(0, 1))
    def cut(self, share: float) -> None:
        """Another leader has other records behind the high watermark."""
        target = self.mark + round(share * (self.end - self.mark))
        if target <= self.start:
            return  # a log that is cut down to its start begins anew, and knows nobody
        self.knows_producers &= not self.is_compacted_blindly
        self._follow()
        self.partition.truncate_to_leader(self.log.latest_epoch, target)
        self.written = [each for each in self.written if each.end <= target]
        self.recovery_points = [point for point in self.recovery_points if point <= self.log.end_offset]
        assert self.log.end_offset == max(self.end, self.start)
        self._lead()

    @precondition(lambda self: not self.lacks_snapshots)
    @rule(share=st.floats(0, 1))
    def delete(self, share: float) -> None:
        self.start += round(share * (self.mark - self.start))
        self.partition.delete_records_before(self.start)

    @rule(waits_ms=st.lists(st.sampled_from([0, 999, 1000]), min_size=1, max_size=4), all_committed=st.booleans())
    def compact(self, waits_ms: list[int], all_committed: bool) -> None:
        """Rounds on all that there is, as if nobody knew how far it is clean."""
        if all_committed:
            self._commit(1.0)
        self.log.roll()
        self.log.flush()
        for wait_ms in waits_ms:
            self.now_ms += wait_ms
            self.log.cleaned_offset = 0
            below = self.partition.high_watermark.offset
            finished = compact(self.log, self.files, now_ms=self.now_ms, below=below)
            if finished is not None:
                assert finished.cleaned_offset <= self._stable()
                self.is_compacted = True
                self.is_compacted_blindly |= self.lacks_snapshots

    @rule()
    def stop_and_start(self) -> None:
        self._close()
        self.log.close()
        self._open(LogState(self.log.start_offset, self.log.end_offset, clean=True))
        self._lead()

    @rule(share=st.floats(0, 1), loses=st.sets(st.sampled_from([".snapshot", ".index", ".timeindex", ".txnindex"])))
    def kill_and_start(self, share: float, loses: set[str]) -> None:
        """The process is gone; its writes are not, but for what a start makes anew."""
        before = self._index()
        self._close()
        self.log.release()
        points = [point for point in self.recovery_points if point >= self.start] or [self.start]
        point = 0 if loses and not self.start else points[int(share * (len(points) - 1))]
        if not self.start:
            for path in self.directory.iterdir():
                if path.suffix in loses:
                    path.unlink()
                    self.lacks_snapshots |= path.suffix == ".snapshot"
        self._open(LogState(self.start, point))
        if not self.is_compacted:
            assert self._index() == before
        self._lead()

    def _close(self) -> None:
        self.partition.close(ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER))

    def _index(self) -> list[Any]:
        return self.log.aborted_transactions(self.log.start_offset, self.log.end_offset)

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def the_last_stable_offset_is_the_one_that_is_defined(self) -> None:
        if hasattr(self, "log"):
            assert self.partition.last_stable_offset == self._stable()

    @invariant()
    def a_reader_sees_what_is_committed(self) -> None:
        if hasattr(self, "log"):
            stable = self._stable()
            for max_bytes in (100, 1 << 20):
                for offset in {self.start, (self.start + stable) // 2}:
                    self._check(offset, stable, self._read_committed(offset, max_bytes))

    @invariant()
    def a_coordinator_loads_what_is_committed(self) -> None:
        if hasattr(self, "log"):
            committed = self._committed(self.end)
            latest = {key: at for at, (key, _) in sorted(committed.items())}
            loaded = [each for each in self._load() if each.offset >= self.start]
            assert {each.key: each.offset for each in loaded if each.producer_id < 0} == latest
            for producer in (1, 2, 3):
                assert any(each.producer_id == producer for each in loaded) <= self._is_open(producer)

    def _load(self) -> list[StateRecord]:
        class Led:
            leader_epoch = 0
            log = self.log

            async def wait_committed(self, _: int) -> None:
                pass

        topic = StateTopic("state", lambda _: Led(), lambda: 1)  # type: ignore[arg-type,return-value]
        return asyncio.run(topic.load(0))

    @invariant()
    def every_producer_is_known(self) -> None:
        if hasattr(self, "log") and self.knows_producers and not self.start:
            known = {each.producer_id: (each.epoch, each.last_sequence + 1) for each in self.log.producers}
            assert known == {each.producer: self._state_of(each.producer) for each in self.written if each.producer > 0}

    def _check(self, offset: int, stable: int, seen: dict[int, tuple[bytes, bytes]]) -> None:
        expected = {at: entry for at, entry in self._committed(stable).items() if at >= offset}
        if not self.is_compacted:
            assert seen == expected
            return
        assert seen.items() <= expected.items()
        last = {key: at for at, (key, _) in sorted(expected.items())}
        assert set(last.values()) <= seen.keys()

    def _read_committed(self, offset: int, max_bytes: int) -> dict[int, tuple[bytes, bytes]]:
        """As clients do it: by the answers to their fetches alone."""
        seen: dict[int, tuple[bytes, bytes]] = {}
        while True:
            stable = self.partition.stable
            read = self.partition.read(offset, max_bytes, at_least_one=True, limit=stable)
            if not read.data:
                return seen
            assert read.next_offset <= stable.offset
            aborted = sorted(
                self.log.aborted_transactions(offset, read.next_offset), key=lambda each: each.first_offset
            )
            skipped: set[int] = set()
            for header, data in split(read.data):
                while aborted and aborted[0].first_offset <= header.last_offset:
                    skipped.add(aborted.pop(0).producer_id)
                if header.is_control:
                    marker = decode_end_marker(data)
                    if marker is not None and marker.type is MarkerType.ABORT:
                        skipped.discard(header.producer_id)
                elif not (header.is_transactional and header.producer_id in skipped):
                    for record in decode_records(data):
                        if record.offset >= offset:
                            seen[record.offset] = (record.key or b"", record.value or b"")
            offset = read.next_offset


QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
TestTransactionLog = TransactionMachine.TestCase
TestTransactionLog.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=40, deadline=None, suppress_health_check=QUIET
)


# --- planted bugs: each is found --------------------------------------------------------------------------------------


def no_index_in_recovery(patch: pytest.MonkeyPatch) -> None:
    honest = recovery.replay

    def replay(*args: Any, rebuild_from: int | None = None) -> None:
        honest(*args)

    patch.setattr(recovery, "replay", replay)


def no_marker(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loaded.LoadedLog, "note_marker", lambda *_: None)


def no_wait_for_the_marker(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Producers, "first_unstable", lambda self, _: self.first_open_offset)


def no_memory_of_the_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loaded.LoadedLog, "recall_ended", lambda *_: None)


def no_way_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loaded.LoadedLog, "_reload_producers", lambda *_: None)


def no_compaction_below_the_open(patch: pytest.MonkeyPatch) -> None:
    honest = Log.compaction_facts

    def facts(self: Log, compactable_below: int) -> Any:
        return replace(honest(self, compactable_below), compactable_below=compactable_below)

    patch.setattr(Log, "compaction_facts", facts)


def no_early_end_of_the_search(patch: pytest.MonkeyPatch) -> None:
    """Not the last stable offset but the marker itself ends the search for aborted transactions."""
    from millrace.storage.txnindex import TransactionIndex

    def overlapping(self: TransactionIndex, first_offset: int, end_offset: int) -> Any:
        found = []
        for entry in self.entries():
            if entry.last_offset >= end_offset:
                break
            if entry.last_offset >= first_offset:
                found.append(entry)
        return found

    patch.setattr(TransactionIndex, "overlapping", overlapping)


def no_wait_for_the_records(patch: pytest.MonkeyPatch) -> None:
    """A marker goes although records of its transaction are there."""
    patch.setattr(Transactions, "end", lambda *_: False)


@pytest.mark.planted
@pytest.mark.parametrize(
    "plant",
    [
        no_index_in_recovery,
        no_marker,
        no_wait_for_the_marker,
        no_memory_of_the_ended,
        no_way_back,
        no_compaction_below_the_open,
        no_early_end_of_the_search,
        no_wait_for_the_records,
    ],
)
def test_a_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    rules = settings(
        max_examples=2000,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate],
        suppress_health_check=QUIET,
    )
    with pytest.raises((AssertionError, ApiError)):
        run_state_machine_as_test(TransactionMachine, settings=rules)
