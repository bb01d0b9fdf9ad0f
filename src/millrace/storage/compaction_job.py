"""One round of compaction: keys into a map, then segments written anew beside the old ones.

    <base>.log.cleaned, .index.cleaned, .timeindex.cleaned, .txnindex.cleaned    whole and on disk when reported

A job is values only, so that it can be sent to another process, and reads and writes nothing but the files it names;
the log goes on meanwhile. Whoever gets the result decides whether it still fits (`Log.replace_segments`). Not here:
which segments and up to where (`compaction`), the process (`compaction_worker`).

Invariants:
- The last batch of every written segment ends where the last one it was made from did, if need be without records: the
  segments of a log follow each other without a gap, which is what recovery checks.
- A marker stays as long as the rule of `compaction` says. One that a start may need is not emptied but kept whole. The
  entry of an aborted transaction in the index goes with its marker, in the same step, and not before.
- A batch that loses nothing is copied as it is. A batch whose records cannot be read is kept: nothing is lost by it.
- Memory: the map of keys, bounded by `max_keys` (and a batch, as a map ends between two), two buffers, a batch.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from millrace.clock import Clock
from millrace.errors import ApiError, CorruptLogError, StorageError
from millrace.records.batch import (
    HEADER_BYTES,
    LOG_OVERHEAD_BYTES,
    MAGIC,
    MIN_BATCH_LENGTH,
    BatchHeader,
    crc_matches,
    read_header,
)
from millrace.records.control import MarkerType, decode_end_marker
from millrace.records.decode import records_section
from millrace.records.filtering import record_spans, with_records, without_records
from millrace.storage.compaction import AbortedBatches, MarkerFate, Source, Transactions, fate_of_marker, surviving
from millrace.storage.files import DiskFile, Files
from millrace.storage.segment import (
    CLEANED_SUFFIX,
    INDEX_SUFFIX,
    LOG_SUFFIX,
    TIME_INDEX_SUFFIX,
    TXN_INDEX_SUFFIX,
    IndexCache,
    Segment,
    file_name,
)
from millrace.storage.txnindex import AbortedTransaction, TransactionIndex

logger = logging.getLogger(__name__)

KEY_BYTES: Final = 200
"""What a key takes in the map: a digest, an offset, and a place in a dictionary that may just have grown."""
_DIGEST_BYTES: Final = 16
_SHORTEST_PAUSE_S: Final = 0.002
_LONGEST_PAUSE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class CompactionJob:
    """Everything that a round needs to know."""

    directory: Path
    groups: tuple[tuple[Source, ...], ...]
    """Each becomes one segment; they follow each other from the log's first segment on."""
    first_dirty_offset: int
    aborted: tuple[AbortedTransaction, ...]
    producer_ends: Mapping[int, int]
    """The last offset of each producer that is remembered: the batch that ends there keeps its place."""
    marker_epochs: Mapping[int, int]
    """The epoch of each producer that is remembered for a marker alone: the last such marker stays, and fences."""
    now_ms: int
    delete_retention_ms: int
    max_keys: int
    io_buffer_bytes: int
    max_bytes_per_s: float
    index_interval_bytes: int
    max_decompressed_bytes: int
    sync: bool = True


@dataclass(frozen=True, slots=True)
class Cleaned:
    """A segment that is ready to take the place of those that it was made from."""

    sources: tuple[Source, ...]
    size_bytes: int
    records_read: int
    records_kept: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a round."""

    cleaned_offset: int
    """Below it every key occurs once."""
    keys: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of a round that could not be done, as it is told to another process."""

    reason: str
    is_corrupt: bool


def map_key(key: bytes) -> bytes:
    """What stands for a key in the map; short ones stand for themselves, and no digest is as short as they are."""
    if len(key) < _DIGEST_BYTES:
        return key
    return hashlib.blake2b(key, digest_size=_DIGEST_BYTES).digest()


def run(
    job: CompactionJob,
    files: Files,
    clock: Clock,
    report: Callable[[Cleaned], object],
    stop: threading.Event | None = None,
) -> Finished:
    """Do a round; each segment is reported when it is on disk. Blocks, so it is for a thread or a process of its own.

    Raises `StorageError` where a file cannot be read or written, or is not what it was any more, and after `stop`.
    """
    return _Round(job, files, clock, stop or threading.Event()).run(report)


class _CleanedSegment(Segment):
    """A segment in the making, under names of its own."""

    __slots__ = ()

    def __init__(self, job: CompactionJob, files: Files, base_offset: int) -> None:
        super().__init__(
            files, job.directory, base_offset, index_interval_bytes=job.index_interval_bytes, cache=IndexCache()
        )
        self.log_file = DiskFile(self.path(LOG_SUFFIX))
        self.txn_index = TransactionIndex(files, self.path(TXN_INDEX_SUFFIX))

    def path(self, suffix: str) -> Path:
        return self.directory / file_name(self.base_offset, suffix + CLEANED_SUFFIX)


class _Round:
    def __init__(self, job: CompactionJob, files: Files, clock: Clock, stop: threading.Event) -> None:
        self._job = job
        self._files = files
        self._clock = clock
        self._stop = stop
        self._last_offsets: dict[bytes, int] = {}
        self._aborted = AbortedBatches(job.aborted)
        self._transactions = Transactions()
        self._last_markers: dict[int, int] = {}
        """Where the last marker of each producer in `marker_epochs` was met, as far as the dirty part has one."""
        self._markers_gone: set[int] = set()
        """Offsets of the markers of aborted transactions that were left out."""
        self._started_s = clock.monotonic()
        self._bytes_done = 0

    def run(self, report: Callable[[Cleaned], object]) -> Finished:
        job = self._job
        cleaned_offset = self._read_keys()
        for group in job.groups:
            sources = tuple(source for source in group if source.base_offset < cleaned_offset)
            if not sources:
                break
            cleaned = self._clean(sources, cleaned_offset)
            if cleaned is not None:
                report(cleaned)
        return Finished(cleaned_offset, len(self._last_offsets))

    # --- the map ------------------------------------------------------------------------------------------------------

    def _read_keys(self) -> int:
        """Fill the map from the dirty part; returns the end of what it covers."""
        job = self._job
        last_offsets = self._last_offsets
        for source in (source for group in job.groups for source in group):
            if source.end_offset <= job.first_dirty_offset:
                continue
            for header, batch in self._batches(source):
                if header.last_offset < job.first_dirty_offset:
                    continue
                if len(last_offsets) >= job.max_keys:
                    return header.base_offset
                if header.is_control and header.count and self._has_last_epoch(header):
                    self._last_markers[header.producer_id] = header.base_offset
                if header.is_control or not header.count or header in self._aborted:
                    continue
                try:
                    _, data = records_section(batch, job.max_decompressed_bytes)
                    base_offset = header.base_offset
                    for span in record_spans(header, data):
                        key = span.key
                        if key is not None:
                            last_offsets[map_key(key)] = base_offset + span.offset_delta
                except ApiError as error:
                    logger.warning("%s: the batch at offset %d is kept as it is: %s",
                                   job.directory, header.base_offset, error)  # fmt: skip
        return job.groups[-1][-1].end_offset

    # --- the segments -------------------------------------------------------------------------------------------------

    def _clean(self, sources: tuple[Source, ...], cleaned_offset: int) -> Cleaned | None:
        """Write what stays of some segments into one; None where nothing would change."""
        base_offset = sources[0].base_offset
        target = _CleanedSegment(self._job, self._files, base_offset)
        for path in target.paths():
            self._files.remove(path)
        try:
            cleaned = self._write(target, sources, cleaned_offset)
            if cleaned is not None:
                self._finish(target, sources)
        except BaseException:
            target.close()
            for path in target.paths():
                self._files.remove(path)
            raise
        target.close()
        if cleaned is None:
            self._files.remove(target.log_file.path)
        return cleaned

    def _write(self, target: _CleanedSegment, sources: tuple[Source, ...], cleaned_offset: int) -> Cleaned | None:
        buffered: list[bytes] = []
        headers: list[BatchHeader] = []
        changed = len(sources) > 1
        waiting_bytes = records_read = records_kept = 0
        end_offset = sources[-1].end_offset
        for source in sources:
            for header, batch in self._batches(source):
                data = self._filtered(header, batch, cleaned_offset, keep=header.next_offset == end_offset)
                records_read += header.count
                changed = changed or data is not batch
                if data is None:
                    continue
                kept = header if data is batch else read_header(data)
                records_kept += kept.count
                buffered.append(data)
                headers.append(kept)
                waiting_bytes += len(data)
                if waiting_bytes >= self._job.io_buffer_bytes:
                    self._append(target, buffered, headers, waiting_bytes)
                    buffered, headers, waiting_bytes = [], [], 0
        if not changed:
            return None
        self._append(target, buffered, headers, waiting_bytes)
        return Cleaned(sources, target.size_bytes, records_read, records_kept)

    def _filtered(self, header: BatchHeader, batch: bytes, cleaned_offset: int, *, keep: bool) -> bytes | None:
        """What stays of a batch: its bytes, other bytes, or None where it goes; one to `keep` never goes."""
        job = self._job
        if header.base_offset >= cleaned_offset:
            return batch
        if header.is_control and header.count:
            return self._filtered_marker(header, batch, keep=keep)
        if not header.is_control:
            self._transactions.note_batch(header)
        # Without it the producer's next batch would look like one out of order after a loss of the snapshots.
        keep = keep or (header.producer_id >= 0 and job.producer_ends.get(header.producer_id) == header.last_offset)
        if not header.count or header in self._aborted:
            return (batch if not header.count else without_records(header)) if keep else None
        try:
            _, data = records_section(batch, job.max_decompressed_bytes)
            spans = record_spans(header, data)
        except ApiError:
            return batch
        kept = surviving(header, spans, self._last_offsets, map_key, job.now_ms)
        if not kept.spans:
            return without_records(header) if keep else None
        if kept.sets_horizon:
            return with_records(header, data, kept.spans, delete_horizon_ms=job.now_ms + job.delete_retention_ms)
        return batch if len(kept.spans) == len(spans) else with_records(header, data, kept.spans)

    def _filtered_marker(self, header: BatchHeader, batch: bytes, *, keep: bool) -> bytes | None:
        """A marker as it was, with a horizon, or None where it goes; what is no marker, or unreadable, stays."""
        job = self._job
        try:
            marker = decode_end_marker(batch)
            if marker is None:
                return batch
            _, data = records_section(batch, job.max_decompressed_bytes)
            spans = record_spans(header, data)
        except ApiError:
            return batch
        ends_something = self._transactions.end(header.producer_id)
        match fate_of_marker(header, job.now_ms, ends_something=ends_something):
            case MarkerFate.STAYS:
                return batch
            case MarkerFate.GETS_HORIZON:
                return with_records(header, data, spans, delete_horizon_ms=job.now_ms + job.delete_retention_ms)
            case MarkerFate.GOES:
                if keep or self._fences(header):
                    return batch
                if marker.type is MarkerType.ABORT:
                    self._markers_gone.add(header.base_offset)
                return None

    def _fences(self, header: BatchHeader) -> bool:
        """Whether the marker is all that says which epoch its producer has come to."""
        return self._has_last_epoch(header) and header.base_offset >= self._last_markers.get(header.producer_id, -1)

    def _has_last_epoch(self, header: BatchHeader) -> bool:
        return self._job.marker_epochs.get(header.producer_id) == header.producer_epoch

    def _append(
        self, target: _CleanedSegment, buffered: list[bytes], headers: list[BatchHeader], size_bytes: int
    ) -> None:
        if not buffered:
            return
        target.write((b"".join(buffered),), size_bytes)
        for header in headers:
            target.note(header.last_offset, header.largest_timestamp_ms, header.size_bytes)
        # Little by little: a file system may make a producer's sync wait for everything that is not on disk yet.
        self._files.datasync(target.log_file)
        self._pace(size_bytes)

    def _finish(self, target: _CleanedSegment, sources: tuple[Source, ...]) -> None:
        """Put the segment and its indexes on disk, and their names."""
        files = self._files
        target.save_indexes(final=True)
        for transaction in self._job.aborted:
            marker_offset = transaction.last_offset
            is_here = sources[0].base_offset <= marker_offset < sources[-1].end_offset
            if is_here and marker_offset not in self._markers_gone:
                target.txn_index.append(transaction)
        for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX, TXN_INDEX_SUFFIX):
            files.sync_path(target.path(suffix))
        files.sync_directory(self._job.directory)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _batches(self, source: Source) -> Iterator[tuple[BatchHeader, bytes]]:
        """The batches of a segment, checked: a rotten one must not decide what becomes of the others."""
        path = self._job.directory / file_name(source.base_offset, LOG_SUFFIX)
        file = DiskFile(path)
        usual_bytes = max(self._job.io_buffer_bytes, HEADER_BYTES)
        want_bytes = usual_bytes
        expected = source.base_offset
        position = 0
        try:
            while position < source.size_bytes:
                chunk = self._read(file, min(want_bytes, source.size_bytes - position), position)
                want_bytes, pos = 0, 0
                while pos + HEADER_BYTES <= len(chunk):
                    header = read_header(chunk, pos)
                    size = _checked_size(path, source, header, position + pos, expected)
                    if pos + size > len(chunk):
                        want_bytes = size
                        break
                    batch = chunk[pos : pos + size]
                    if not crc_matches(batch):
                        raise CorruptLogError(f"the CRC of the batch at byte {position + pos} of {path} is wrong")
                    yield header, batch
                    expected = header.next_offset
                    pos += size
                if not pos and not want_bytes:
                    raise CorruptLogError(f"{path} ends in a part of a batch at byte {position}")
                want_bytes = max(want_bytes, usual_bytes)
                position += pos
            if expected != source.end_offset:
                raise CorruptLogError(f"{path} ends at offset {expected}, and not at {source.end_offset}")
        finally:
            self._files.close(file)

    def _read(self, file: DiskFile, size_bytes: int, position: int) -> bytes:
        data = self._files.pread(file, size_bytes, position)
        if len(data) != size_bytes:
            raise StorageError(f"{file.path} was cut while it was compacted")
        self._pace(size_bytes)
        return data

    def _pace(self, size_bytes: int) -> None:
        """Wait for as long as reading and writing so much may take; a stop ends the wait, and the round."""
        self._bytes_done += size_bytes
        while not self._stop.is_set():
            ahead_s = self._bytes_done / self._job.max_bytes_per_s - (self._clock.monotonic() - self._started_s)
            if ahead_s < _SHORTEST_PAUSE_S:
                return
            self._stop.wait(min(ahead_s, _LONGEST_PAUSE_S))
        raise StorageError("the compaction was stopped")


def _checked_size(path: Path, source: Source, header: BatchHeader, position: int, expected: int) -> int:
    """The size of a batch whose header can be true."""
    size = header.batch_length + LOG_OVERHEAD_BYTES
    if header.magic != MAGIC or header.batch_length < MIN_BATCH_LENGTH or position + size > source.size_bytes:
        raise CorruptLogError(f"{path} has no batch at byte {position}")
    if not expected <= header.base_offset <= header.last_offset < source.end_offset:
        raise CorruptLogError(f"{path} has offset {header.base_offset} at byte {position}, after {expected - 1}")
    return size
