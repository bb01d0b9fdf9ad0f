"""Rounds of compaction without a process, and what is in a log afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from millrace.clock import ManualClock
from millrace.records.batch import Batch, crc_matches, split
from millrace.records.compression import Codec
from millrace.records.decode import Record, decode_records
from millrace.records.encode import encode_batch
from millrace.storage import compaction_job
from millrace.storage.cleaner import CleanerSettings, make_job
from millrace.storage.compaction import Dirt, find_dirt
from millrace.storage.compaction_job import Cleaned, CompactionJob, Finished
from millrace.storage.files import Files
from millrace.storage.log import Log
from support.batches import NOW_MS

SETTINGS = CleanerSettings(io_buffer_bytes=300)
"""With a buffer that is smaller than many batches."""


def keyed(
    entries: Sequence[tuple[bytes | None, bytes | None]],
    *,
    codec: Codec = Codec.NONE,
    timestamp_ms: int = NOW_MS,
    **fields: int | bool,
) -> bytes:
    """A batch of these keys and values, a millisecond apart."""
    records = [Record(i, timestamp_ms + i, key, value) for i, (key, value) in enumerate(entries)]
    return encode_batch(records, base_offset=0, compression=codec, **fields)  # type: ignore[arg-type]


def dirt_of(log: Log, now_ms: int = NOW_MS, below: int | None = None) -> Dirt:
    return find_dirt(log.compaction_facts(log.end_offset if below is None else below), log.config, now_ms)


def job_of(
    log: Log, *, now_ms: int = NOW_MS, below: int | None = None, settings: CleanerSettings = SETTINGS
) -> CompactionJob | None:
    """A round on whatever is dirty, worth it or not; None where nothing is."""
    dirt = dirt_of(log, now_ms, below)
    if not dirt.segments or dirt.segments[-1].end_offset <= dirt.first_dirty_offset:
        return None
    return make_job(log, dirt, settings, now_ms)


def compact(
    log: Log,
    files: Files,
    *,
    now_ms: int = NOW_MS,
    below: int | None = None,
    settings: CleanerSettings = SETTINGS,
) -> Finished | None:
    """A whole round, here and now."""
    job = job_of(log, now_ms=now_ms, below=below, settings=settings)
    if job is None:
        return None
    truncations = log.truncations

    def swap(cleaned: Cleaned) -> None:
        doomed = log.replace_segments(cleaned, truncations)
        assert doomed is not None
        log.sync_names()
        log.remove_files(doomed)

    finished = compaction_job.run(job, files, ManualClock(), swap)
    log.cleaned_offset = finished.cleaned_offset
    return finished


def batches_of(log: Log, max_bytes: int = 1 << 20) -> Iterator[Batch]:
    """Every batch from the start to the end, as a reader gets them."""
    offset = log.start_offset
    while offset < log.end_offset:
        result = log.read(offset, max_bytes)
        assert result.data, offset
        assert result.next_offset > offset
        for batch in split(result.data):
            assert crc_matches(batch.data)
            yield batch
        offset = result.next_offset


def records_of(log: Log) -> list[Record]:
    """Every record that can be read, in the order of the log; those of a batch below the start are left out."""
    found = [record for batch in batches_of(log) for record in decode_records(batch.data)]
    assert all(a.offset < b.offset for a, b in pairwise(found))
    return [record for record in found if record.offset >= log.start_offset]


def pairs(log: Log) -> list[tuple[int, bytes | None, bytes | None]]:
    return [(record.offset, record.key, record.value) for record in records_of(log)]
