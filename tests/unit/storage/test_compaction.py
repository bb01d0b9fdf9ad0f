"""Compaction: what is worth it, what survives, and a log whose segments are replaced under its readers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.clock import ManualClock
from millrace.errors import ApiError, CorruptLogError, StorageError
from millrace.records.batch import DELETE_HORIZON_BIT, TimestampType, read_header, split, with_crc
from millrace.records.compression import Codec
from millrace.records.control import EndMarker, MarkerType, encode_end_marker
from millrace.records.decode import Header, Record, decode_records, records_section
from millrace.records.encode import encode_batch
from millrace.records.filtering import record_spans, value_of, with_records, without_records
from millrace.replication.state_topic import StateTopic
from millrace.storage import compaction_job
from millrace.storage.cleaner import CleanerSettings
from millrace.storage.compaction import LogFacts, SegmentFacts, Source, find_dirt, group_sources, wants_roll
from millrace.storage.compaction_job import Cleaned
from millrace.storage.files import Files
from millrace.storage.log import Log
from millrace.storage.recovery import LogPosition, LogState
from millrace.storage.settings import FlushMode, LogConfig
from support.batches import NOW_MS
from support.compaction import SETTINGS, batches_of, compact, job_of, keyed, pairs, records_of
from support.disk import fast_directory

CONFIG = LogConfig(
    flush_mode=FlushMode.OS, compact=True, delete=False, index_interval_bytes=150, timestamp_after_max_ms=10**15
)
DAY_MS = 24 * 3600 * 1000
A, B, C = b"a", b"b", b"c"


@pytest.fixture
def root() -> Iterator[Path]:
    with fast_directory() as path:
        yield path


@pytest.fixture
def files() -> Files:
    return Files(sync=False)


@pytest.fixture
def log(root: Path, files: Files) -> Iterator[Log]:
    log = open_log(root, files)
    yield log
    if log.failure is None:
        log.close()


def open_log(root: Path, files: Files, state: LogState | None = None, config: LogConfig = CONFIG) -> Log:
    directory = root / "topic-0"
    directory.mkdir(exist_ok=True)
    return Log.open(directory, config, clock=ManualClock(), files=files, state=state)


def put(log: Log, *entries: tuple[bytes | None, bytes | None], **fields: object) -> int:
    """Append a batch and seal the segment; returns the batch's first offset."""
    appended = log.append(
        keyed(entries, **fields),
        leader_epoch=0,
        now_ms=NOW_MS,
        from_client=False,  # type: ignore[arg-type]
    )
    log.roll()
    log.flush()
    return appended.base_offset


# --- what is worth it -------------------------------------------------------------------------------------------------


def facts(*sizes: int, cleaned: int = 0, below: int | None = None, first_ms: int = NOW_MS, start: int = 0) -> LogFacts:
    """Segments of ten offsets each; the last one is active."""
    segments = [
        SegmentFacts(i * 10, i * 10 + 10, size, lambda i=i: first_ms + i, lambda i=i: first_ms + i + 1)  # type: ignore[misc]
        for i, size in enumerate(sizes)
    ]
    end = len(sizes) * 10
    return LogFacts(segments, start, end, cleaned, end if below is None else below)


def test_the_active_segment_and_what_is_not_committed_are_left_alone() -> None:
    assert [s.base_offset for s in find_dirt(facts(100, 100, 100), CONFIG, NOW_MS).segments] == [0, 10]
    assert [s.base_offset for s in find_dirt(facts(100, 100, 100, below=19), CONFIG, NOW_MS).segments] == [0]
    assert find_dirt(facts(100), CONFIG, NOW_MS).segments == ()


def test_a_log_is_due_by_the_share_of_its_dirty_bytes() -> None:
    half = find_dirt(facts(100, 100, 5, cleaned=10), CONFIG, NOW_MS)
    assert half.ratio == 0.5 and not half.is_due
    assert find_dirt(facts(100, 101, 5, cleaned=10), CONFIG, NOW_MS).is_due
    assert not find_dirt(facts(100, 100, 5, cleaned=20), CONFIG, NOW_MS).is_due
    assert find_dirt(facts(100, 100, 5, cleaned=10), replace(CONFIG, min_cleanable_ratio=0.4), NOW_MS).is_due


def test_a_log_is_due_when_a_record_has_waited_for_too_long() -> None:
    config = replace(CONFIG, max_compaction_lag_ms=1000)
    log = facts(1000, 10, 5, cleaned=10)
    assert not find_dirt(log, config, NOW_MS + 1001).is_due
    assert find_dirt(log, config, NOW_MS + 1002).is_due
    assert not find_dirt(facts(1000, 10, 5, cleaned=20), config, NOW_MS + DAY_MS).is_due


def test_young_segments_wait() -> None:
    config = replace(CONFIG, min_compaction_lag_ms=1000)
    assert len(find_dirt(facts(100, 100, 5), config, NOW_MS + 1001).segments) == 1
    assert len(find_dirt(facts(100, 100, 5), config, NOW_MS + 1002).segments) == 2
    # What is clean already is rewritten with the rest, whatever its age.
    assert len(find_dirt(facts(100, 100, 5, cleaned=10), config, NOW_MS).segments) == 1


def test_a_cleaned_offset_outside_the_log_means_that_all_is_dirty() -> None:
    assert find_dirt(facts(100, 100, 5, cleaned=31), CONFIG, NOW_MS).first_dirty_offset == 0
    assert find_dirt(facts(100, 100, 5, cleaned=3, start=7), CONFIG, NOW_MS).first_dirty_offset == 7


def test_the_active_segment_is_sealed_when_its_records_must_be_compacted() -> None:
    by_age = replace(CONFIG, max_compaction_lag_ms=1000)
    assert not wants_roll(facts(100), by_age, NOW_MS + 1000)
    assert wants_roll(facts(100), by_age, NOW_MS + 1001)
    assert wants_roll(facts(100, below=9), by_age, NOW_MS + 1001)
    assert not wants_roll(facts(0), by_age, NOW_MS + 1001)
    by_size = replace(CONFIG, compact_at_bytes=100)
    assert not wants_roll(facts(10, 99), by_size, NOW_MS)
    assert wants_roll(facts(10, 100), by_size, NOW_MS)
    assert not wants_roll(facts(101, 100, cleaned=10), by_size, NOW_MS)
    assert not wants_roll(facts(10, 100), CONFIG, NOW_MS)


def test_neighbours_are_merged_as_far_as_a_segment_holds() -> None:
    sources = [Source(i * 10, i * 10 + 10, 400) for i in range(5)]
    sizes = lambda **changes: [len(group) for group in group_sources(sources, replace(CONFIG, **changes))]  # noqa: E731
    assert sizes(segment_bytes=10**6) == [5]
    assert sizes(segment_bytes=1200) == [3, 2]
    assert sizes(segment_bytes=100) == [1] * 5
    assert sizes(segment_index_bytes=12 * 6) == [2, 2, 1]
    far = [Source(0, 10, 1), Source(10, 2**31 + 5, 1), Source(2**31 + 5, 2**31 + 6, 1)]
    assert [len(group) for group in group_sources(far, CONFIG)] == [1, 2]


def test_a_compacted_segment_is_rolled_after_its_longest_lag() -> None:
    assert replace(CONFIG, segment_ms=5000, max_compaction_lag_ms=1000).max_segment_ms == 1000
    assert replace(CONFIG, segment_ms=500, max_compaction_lag_ms=1000).max_segment_ms == 500
    assert replace(CONFIG, compact=False, segment_ms=5000, max_compaction_lag_ms=1000).max_segment_ms == 5000


# --- batches that lose records ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("timestamp_type", list(TimestampType))
def test_a_batch_that_loses_records_keeps_all_the_rest(codec: Codec, timestamp_type: TimestampType) -> None:
    rows = [
        Record(100 + i, NOW_MS + i * 7000, b"key%d" % i * 30, b"v" * i * 90 if i % 8 else None, (Header("h", b"x"),))
        for i in range(90)
    ]
    batch = encode_batch(
        rows, compression=codec, producer_id=7, producer_epoch=2, base_sequence=9, timestamp_type=timestamp_type
    )
    header, data = records_section(batch)
    spans = record_spans(header, data)
    assert [(span.key, span.offset_delta) for span in spans] == [(row.key, row.offset - 100) for row in rows]
    assert [value_of(data, span) for span in spans] == [row.value for row in rows]
    for horizon_ms in (None, NOW_MS + DAY_MS):
        less = with_records(header, data, spans[3:70:7], delete_horizon_ms=horizon_ms)
        changed = read_header(less)
        expected = decode_records(batch)[3:70:7]
        if timestamp_type is TimestampType.CREATE:
            assert changed.max_timestamp_ms == expected[-1].timestamp_ms
        assert decode_records(less) == expected
        assert (changed.base_offset, changed.last_offset, changed.codec) == (100, 189, codec)
        assert (changed.producer_id, changed.base_sequence, changed.last_sequence) == (7, 9, 98)
        assert changed.delete_horizon_ms == horizon_ms
        again = record_spans(*records_section(less))
        assert [span.key for span in again] == [record.key for record in expected]
    empty = read_header(without_records(header))
    assert (empty.count, empty.base_offset, empty.last_offset, empty.last_sequence) == (0, 100, 189, 98)
    assert decode_records(without_records(header)) == []
    assert empty.largest_timestamp_ms == -1


def test_a_value_that_does_not_fit_its_record_is_damage() -> None:
    header, data = records_section(encode_batch([Record(0, NOW_MS, b"k", b"value")], base_offset=0))
    (span,) = record_spans(header, data)
    damaged = bytearray(data)
    damaged[damaged.index(b"value") - 1] = 126
    with pytest.raises(ApiError):
        value_of(damaged, span)


# --- a log ------------------------------------------------------------------------------------------------------------


def test_the_last_value_of_each_key_stays_where_it_was(log: Log, files: Files) -> None:
    put(log, (A, b"1"), (B, b"1"))
    put(log, (A, b"2"))
    put(log, (C, b"1"), (A, b"3"))
    log.append(keyed([(B, b"active")]), leader_epoch=0, now_ms=NOW_MS)
    finished = compact(log, files)
    assert finished is not None and (finished.cleaned_offset, finished.keys) == (5, 3)
    assert pairs(log) == [(1, B, b"1"), (3, C, b"1"), (4, A, b"3"), (5, B, b"active")]
    assert log.segment_count == 2
    assert log.end_offset == 6
    log.append(keyed([(A, b"4")]), leader_epoch=0, now_ms=NOW_MS)
    log.roll()
    log.flush()
    compact(log, files)
    assert pairs(log) == [(3, C, b"1"), (5, B, b"active"), (6, A, b"4")]
    assert compact(log, files) is None


def test_every_offset_can_be_asked_for(log: Log, files: Files) -> None:
    for i in range(40):
        put(log, (b"k%d" % (i % 3), b"%d" % i))
    compact(log, files)
    present = [offset for offset, _, _ in pairs(log)]
    assert present == [37, 38, 39]
    for offset in range(41):
        for max_bytes in (0, 100, 10_000):
            data = log.read(offset, max_bytes).data
            if offset == 40:
                assert data == b""
                continue
            first = min(other for other in present if other >= offset)
            assert read_header(data).last_offset == first, (offset, max_bytes)


def test_tombstones_stay_until_their_horizon(log: Log, files: Files) -> None:
    put(log, (A, b"1"), (B, b"1"))
    put(log, (A, None), (C, b"1"))
    compact(log, files)
    assert pairs(log) == [(1, B, b"1"), (2, A, None), (3, C, b"1")]
    horizons = [batch.header.delete_horizon_ms for batch in batches_of(log)]
    assert horizons == [None, NOW_MS + DAY_MS]
    assert [record.timestamp_ms for record in records_of(log)] == [NOW_MS + 1, NOW_MS, NOW_MS + 1]
    put(log, (B, b"2"))
    compact(log, files, now_ms=NOW_MS + DAY_MS - 1)
    assert pairs(log) == [(2, A, None), (3, C, b"1"), (4, B, b"2")]
    put(log, (B, b"3"))
    compact(log, files, now_ms=NOW_MS + DAY_MS)
    assert pairs(log) == [(3, C, b"1"), (5, B, b"3")]
    assert [batch.header.attributes & DELETE_HORIZON_BIT != 0 for batch in batches_of(log)] == [True, False]


def test_a_batch_that_loses_nothing_is_copied_as_it_is(log: Log, files: Files) -> None:
    put(log, (A, b"1"), (B, b"1"), codec=Codec.GZIP)
    put(log, (C, b"1"))
    before = [bytes(batch.data) for batch in batches_of(log)]
    compact(log, files)
    assert [bytes(batch.data) for batch in batches_of(log)] == before
    assert log.segment_count == 2


def test_a_segment_that_loses_nothing_is_not_written_anew(log: Log, files: Files) -> None:
    log.apply_config(replace(CONFIG, segment_bytes=90))
    put(log, (A, b"1"))
    put(log, (B, b"1"))
    job = job_of(log)
    assert job is not None
    reported: list[Cleaned] = []
    compaction_job.run(job, files, ManualClock(), reported.append)
    assert reported == []
    assert not list(log.directory.glob("*.cleaned"))


def test_records_without_keys_go_and_unreadable_batches_stay(log: Log, files: Files) -> None:
    put(log, (None, b"old"), (A, b"1"))
    broken = encode_batch([Record(0, NOW_MS, A, b"x")])
    payload = b"\xff" * 12
    header = read_header(broken)._replace(batch_length=49 + len(payload))
    log.append(with_crc(header, payload).pack() + payload, leader_epoch=0, now_ms=NOW_MS, from_client=False)
    put(log, (B, b"1"))
    compact(log, files)
    assert [(batch.header.base_offset, batch.header.count) for batch in batches_of(log)] == [(0, 1), (2, 1), (3, 1)]


def test_a_map_that_is_full_ends_the_round_early(log: Log, files: Files) -> None:
    for i in range(6):
        put(log, (b"x%d" % i, b"1"), (A, b"%d" % i))
    small = replace(SETTINGS, dedupe_buffer_bytes=3 * compaction_job.KEY_BYTES, load_factor=1.0)
    assert small.max_keys == 3
    ends = []
    while (finished := compact(log, files, settings=small)) is not None:
        ends.append(finished.cleaned_offset)
    assert ends == sorted(set(ends)) and ends[-1] == 12 and len(ends) > 1
    assert [(key, value) for _, key, value in pairs(log)] == [(b"x%d" % i, b"1") for i in range(6)] + [(A, b"5")]


def test_the_last_batch_of_a_producer_keeps_its_place(log: Log, files: Files) -> None:
    def send(sequence: int, key: bytes) -> None:
        log.append(
            keyed([(key, b"1")], producer_id=5, producer_epoch=0, base_sequence=sequence), leader_epoch=0, now_ms=NOW_MS
        )

    send(0, A)
    send(1, A)
    log.append(keyed([(A, b"2"), (B, b"2")]), leader_epoch=0, now_ms=NOW_MS)
    log.roll()
    log.flush()
    compact(log, files)
    assert [(batch.header.base_offset, batch.header.count) for batch in batches_of(log)] == [(1, 0), (2, 2)]
    log.close()
    for path in log.directory.glob("*.snapshot"):
        path.unlink()
    again = open_log(log.directory.parent, files, LogState(0, log.end_offset, clean=True))
    assert [entry.last_sequence for entry in again.producers] == [1]
    again.append(keyed([(C, b"1")], producer_id=5, producer_epoch=0, base_sequence=2), leader_epoch=0, now_ms=NOW_MS)
    again.close()


def transactional(log: Log, producer_id: int, key: bytes, value: bytes, sequence: int) -> None:
    log.append(
        keyed([(key, value)], producer_id=producer_id, producer_epoch=0, base_sequence=sequence, transactional=True),
        leader_epoch=0,
        now_ms=NOW_MS,
    )


def end_transaction(log: Log, producer_id: int, how: MarkerType) -> None:
    marker = encode_end_marker(EndMarker(how, 0), producer_id=producer_id, producer_epoch=0, timestamp_ms=NOW_MS)
    log.append(marker, leader_epoch=0, now_ms=NOW_MS, from_client=False)


def test_an_aborted_record_supersedes_nothing_and_markers_stay(log: Log, files: Files) -> None:
    put(log, (A, b"1"), (B, b"1"))
    transactional(log, 1, A, b"aborted", 0)
    transactional(log, 2, B, b"2", 0)
    end_transaction(log, 1, MarkerType.ABORT)
    end_transaction(log, 2, MarkerType.COMMIT)
    put(log, (C, b"1"))
    aborted = log.aborted_transactions(0, 10)
    compact(log, files)
    assert [(offset, key) for offset, key, _ in pairs(log) if key in {A, B, C}] == [(0, A), (3, B), (6, C)]
    # The aborted one was its producer's last batch: its place stays, its record does not.
    assert [batch.header.count for batch in batches_of(log)] == [1, 0, 1, 1, 1, 1]
    assert [batch.header.is_control for batch in batches_of(log)] == [False, False, False, True, True, False]
    assert log.aborted_transactions(0, 10) == aborted
    assert len(aborted) == 1


def controls(log: Log) -> list[int]:
    return [batch.header.base_offset for batch in batches_of(log) if batch.header.is_control]


def next_round(log: Log, files: Files, now_ms: int) -> None:
    log.cleaned_offset = 0
    compact(log, files, now_ms=now_ms)


def test_a_marker_goes_after_its_records_and_its_horizon(log: Log, files: Files) -> None:
    transactional(log, 1, A, b"1", 0)
    end_transaction(log, 1, MarkerType.COMMIT)
    transactional(log, 1, B, b"aborted", 1)
    end_transaction(log, 1, MarkerType.ABORT)
    transactional(log, 1, A, b"2", 2)
    end_transaction(log, 1, MarkerType.COMMIT)
    put(log, (C, b"1"))
    next_round(log, files, NOW_MS)  # the records of the first two go
    assert controls(log) == [1, 3, 5]
    assert [batch.header.delete_horizon_ms for batch in batches_of(log)] == [None] * 5
    next_round(log, files, NOW_MS + 1)  # which this one finds
    horizons = [batch.header.delete_horizon_ms for batch in batches_of(log) if batch.header.is_control]
    assert horizons == [NOW_MS + 1 + DAY_MS] * 2 + [None]
    next_round(log, files, NOW_MS + DAY_MS)
    assert controls(log) == [1, 3, 5]
    assert len(log.aborted_transactions(0, 10)) == 1
    next_round(log, files, NOW_MS + 1 + DAY_MS)
    assert controls(log) == [5]
    assert log.aborted_transactions(0, 10) == []
    next_round(log, files, NOW_MS + 9 * DAY_MS)
    assert controls(log) == [5]
    assert [(offset, key) for offset, key, _ in pairs(log) if key in {A, B, C}] == [(4, A), (6, C)]


def test_the_marker_that_alone_says_an_epoch_stays(log: Log, files: Files) -> None:
    for _ in range(2):
        end_transaction(log, 1, MarkerType.COMMIT)
    put(log, (C, b"1"))
    next_round(log, files, NOW_MS)
    next_round(log, files, NOW_MS + DAY_MS)
    assert controls(log) == [1]


def test_a_marker_stays_with_a_batch_that_keeps_its_place_without_records(log: Log, files: Files) -> None:
    transactional(log, 1, A, b"1", 0)
    end_transaction(log, 1, MarkerType.COMMIT)
    put(log, (A, b"2"))
    for days in range(4):
        next_round(log, files, NOW_MS + days * DAY_MS)
    assert [(batch.header.base_offset, batch.header.count) for batch in batches_of(log)] == [(0, 0), (1, 1), (2, 1)]


def test_no_snapshot_has_a_transaction_open_whose_marker_is_gone(log: Log, files: Files, root: Path) -> None:
    transactional(log, 1, A, b"1", 0)
    log.roll()  # with a snapshot, in which it is open
    end_transaction(log, 1, MarkerType.COMMIT)
    put(log, (A, b"2"))
    log.enforce_retention(NOW_MS + log.config.producer_expiration_ms)  # nobody needs its place now
    for days in range(3):
        next_round(log, files, NOW_MS + days * DAY_MS)
    assert [(batch.header.base_offset, batch.header.count) for batch in batches_of(log)] == [(2, 1)]
    log.append(keyed([(C, b"1")]), leader_epoch=0, now_ms=NOW_MS)  # a start looks closely at this segment only
    log.release()
    for path in log.directory.glob("*.snapshot"):  # they are written without a sync: the last ones may be lost
        if int(path.stem) > 1:
            path.unlink()
    again = open_log(root, files, LogState(0, 3))
    assert again.first_unstable_offset(again.end_offset) is None
    again.close()


def test_the_last_batch_of_a_producer_stays_although_it_wrote_more_that_may_be_cut_off(
    log: Log, files: Files, root: Path
) -> None:
    put(log, (A, b"1"), producer_id=1, producer_epoch=0, base_sequence=0)
    put(log, (A, b"2"))
    log.append(keyed([(B, b"1")], producer_id=1, producer_epoch=0, base_sequence=1), leader_epoch=0, now_ms=NOW_MS)
    compact(log, files, below=2)
    assert [(batch.header.base_offset, batch.header.count) for batch in batches_of(log)] == [(0, 0), (1, 1), (2, 1)]
    log.truncate_to(2)
    log.release()
    for path in log.directory.glob("*.snapshot"):
        path.unlink()
    again = open_log(root, files, LogState(0, 0))
    assert [(each.producer_id, each.last_sequence) for each in again.producers] == [(1, 0)]
    again.close()


def test_an_open_transaction_is_not_touched(log: Log, files: Files) -> None:
    put(log, (A, b"1"))
    put(log, (A, b"2"))
    transactional(log, 1, A, b"3", 0)
    log.roll()
    put(log, (A, b"4"))
    compact(log, files)
    assert [offset for offset, _, _ in pairs(log)] == [1, 2, 3]
    assert log.cleaned_offset == 2
    end_transaction(log, 1, MarkerType.COMMIT)
    log.roll()
    log.flush()
    compact(log, files)
    assert [offset for offset, key, _ in pairs(log) if key == A] == [3]


def test_what_is_above_the_high_watermark_stays_and_supersedes_nothing(log: Log, files: Files) -> None:
    put(log, (A, b"1"))
    put(log, (A, b"2"))
    put(log, (A, b"3"))
    compact(log, files, below=2)
    assert [offset for offset, _, _ in pairs(log)] == [1, 2]


def test_a_rotten_batch_ends_the_round_and_changes_nothing(log: Log, files: Files) -> None:
    put(log, (A, b"1"))
    put(log, (A, b"2"))
    path = log.directory / "00000000000000000000.log"
    rotten = bytearray(path.read_bytes())
    rotten[-1] ^= 1
    path.write_bytes(rotten)
    with pytest.raises(CorruptLogError, match="CRC"):
        compact(log, files)
    assert log.segment_count == 3
    assert not list(log.directory.glob("*.cleaned"))


def test_a_limit_from_before_the_swap_still_holds(log: Log, files: Files) -> None:
    """A reader may have remembered the position of the end: it lies in a segment that is no more."""
    limits: list[LogPosition] = []
    for i in range(9):
        log.append(keyed([(b"k%d" % (i % 2), b"%d" % i)]), leader_epoch=0, now_ms=NOW_MS)
        limits.append(log.end)
        if i % 3 == 2:
            log.roll()
    log.append(keyed([(A, b"1")]), leader_epoch=0, now_ms=NOW_MS)
    log.flush()
    compact(log, files)
    assert [offset for offset, _, _ in pairs(log)] == [7, 8, 9]
    for limit in limits:
        for offset in range(limit.offset):
            result = log.read(offset, 1 << 20, limit=limit)
            assert result.next_offset == (limit.offset if result.data else offset)
            found = [record.offset for batch in split(result.data) for record in decode_records(batch.data)]
            assert found == [other for other in (7, 8) if offset <= other < limit.offset]


def test_truncation_into_a_gap_ends_at_a_batch(log: Log, files: Files) -> None:
    put(log, (A, b"1"))
    for i in range(5):
        put(log, (B, b"%d" % i))
    compact(log, files)
    assert [offset for offset, _, _ in pairs(log)] == [0, 5]
    log.truncate_to(3)
    assert log.end_offset == 1
    assert log.cleaned_offset == 1
    log.append(keyed([(C, b"1")]), leader_epoch=1, now_ms=NOW_MS)
    assert pairs(log) == [(0, A, b"1"), (1, C, b"1")]
    log.close()
    again = open_log(log.directory.parent, files, LogState(0, log.end_offset, clean=True))
    assert pairs(again) == [(0, A, b"1"), (1, C, b"1")]
    again.close()


def cut(log: Log) -> None:
    log.truncate_to(1)


def delete(log: Log) -> None:
    log.delete_records_before(2)


def let_go(log: Log) -> None:
    log.release()


def cut_and_fill(log: Log) -> None:
    """The same offsets and sizes, other records."""
    log.truncate_to(1)
    put(log, (B, b"9"))
    put(log, (B, b"9"))


@pytest.mark.parametrize("change", [cut, delete, let_go, cut_and_fill])
def test_a_log_that_has_changed_keeps_what_it_has(log: Log, files: Files, change: Callable[[Log], None]) -> None:
    for _ in range(3):
        put(log, (A, b"1"))
    job = job_of(log)
    assert job is not None
    truncations = log.truncations
    ready: list[Cleaned] = []
    compaction_job.run(job, files, ManualClock(), ready.append)
    change(log)
    before = pairs(log) if change is not let_go else []
    assert log.replace_segments(ready[0], truncations) is None
    log.drop_cleaned()
    assert not list(log.directory.glob("*.cleaned"))
    if change is not let_go:
        assert pairs(log) == before


def test_time_is_found_in_a_compacted_log(log: Log, files: Files) -> None:
    for i in range(10):
        put(log, (b"k%d" % (i % 3), b"%d" % i), (b"x%d" % i, b"1"), timestamp_ms=NOW_MS + i * 1000)
    compact(log, files)
    present = {record.timestamp_ms: record.offset for record in records_of(log)}
    for timestamp_ms in range(NOW_MS - 1, NOW_MS + 9002, 500):
        later = [each for each in sorted(present) if each >= timestamp_ms]
        found = log.offset_for_time(timestamp_ms)
        assert (found is None) == (not later)
        if found is not None:
            assert (found.timestamp_ms, found.offset) == (later[0], present[later[0]])
    largest = log.max_timestamp()
    assert largest is not None and largest.timestamp_ms == max(present)


def test_a_follower_takes_over_a_compacted_log(log: Log, root: Path, files: Files) -> None:
    for i in range(30):
        put(log, (b"k%d" % (i % 4), b"%d" % i))
    compact(log, files)
    (root / "other").mkdir()
    follower = open_log(root / "other", files)
    while follower.end_offset < log.end_offset:
        follower.append_as_follower(log.read(follower.end_offset, 200).data)
        follower.roll()
    follower.flush()
    assert pairs(follower) == pairs(log)
    follower.close()
    again = open_log(root / "other", files, LogState(0, 0))
    assert (pairs(again), again.end_offset) == (pairs(log), log.end_offset)
    again.close()


def test_a_killed_broker_reads_a_compacted_log_from_the_recovery_point_on(log: Log, root: Path, files: Files) -> None:
    for i in range(12):
        put(log, (b"k%d" % (i % 4), b"%d" % i))
    log.apply_config(replace(CONFIG, segment_bytes=250))
    compact(log, files)
    before = pairs(log)
    assert log.segment_count > 2
    log.release()
    for point in range(13):
        # At a start a log has the settings of the broker, not those of its topic.
        again = open_log(root, files, LogState(0, point), replace(CONFIG, compact=False))
        assert (pairs(again), again.end_offset) == (before, 12)
        again.release()


def test_snapshots_inside_a_merged_segment_go(log: Log, files: Files) -> None:
    for i in range(5):
        put(log, (A, b"%d" % i))
    compact(log, files)
    assert [path.name for path in log.directory.glob("*.snapshot")] == [f"{5:020d}.snapshot"]


def test_speed_is_limited_and_a_stop_ends_the_wait(log: Log, files: Files) -> None:
    for _ in range(3):
        put(log, (A, b"x" * 1000))
    job = job_of(log, settings=replace(SETTINGS, max_bytes_per_s=10.0))
    assert job is not None
    stop = threading.Event()
    stop.set()
    with pytest.raises(StorageError, match="stopped"):
        compaction_job.run(job, files, ManualClock(), lambda _: None, stop)
    assert not list(log.directory.glob("*.cleaned"))


def test_the_memory_of_a_map_is_shared_by_its_workers() -> None:
    one = CleanerSettings(dedupe_buffer_bytes=10**8, load_factor=0.5)
    assert one.max_keys == 250_000
    assert replace(one, threads=5).max_keys == 50_000


async def test_a_coordinator_loads_the_same_state_from_a_compacted_log(log: Log, files: Files) -> None:
    for i in range(60):
        put(log, (b"k%d" % (i % 5), None if i % 10 == 4 else b"%d" % i), (b"x%d" % i, b"1"), (b"x%d" % i, None))
    log.append(keyed([(A, b"1")]), leader_epoch=0, now_ms=NOW_MS)

    class Led:
        leader_epoch = 0

        def __init__(self) -> None:
            self.log = log

        async def wait_committed(self, last_offset: int) -> None:
            assert last_offset == log.end_offset - 1

    topic = StateTopic("state", lambda _: Led(), lambda: 1)  # type: ignore[arg-type,return-value]
    before = await topic.load(0)
    assert len(before) == 66
    compact(log, files)
    assert await topic.load(0) == before
    put(log, (B, b"1"))
    compact(log, files, now_ms=NOW_MS + 2 * DAY_MS)
    assert [each for each in await topic.load(0) if each.key != B] == [
        each for each in before if each.value is not None
    ]
