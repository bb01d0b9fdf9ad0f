"""One segment: `<base offset, 20 digits>.log` with its indexes; batches one after another, nothing between them.

What is not here: which segment a batch belongs to, rolling, retention (`log`), and what to believe after a crash
(`recovery`). Single-threaded, owned by its `Log`.

Invariants:
- `size_bytes` is where the next batch goes. Bytes behind it (from a failed write) do not exist: the next write covers
  them, a close or a recovery cuts them off.
- The file is created by the first write: an empty segment has none.
- The active segment's indexes are in memory; those of a sealed one are read when needed and kept by an `IndexCache`.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from millrace.errors import CorruptLogError
from millrace.model import NO_TIMESTAMP
from millrace.records.batch import HEADER, HEADER_BYTES, LOG_OVERHEAD_BYTES, MAGIC, MIN_BATCH_LENGTH, BatchHeader
from millrace.records.compression import Buffer
from millrace.storage.files import DiskFile, Files
from millrace.storage.index import TIME_ENTRY_BYTES, OffsetIndex, TimeIndex, TimestampOffset
from millrace.storage.txnindex import TransactionIndex

logger = logging.getLogger(__name__)

OFFSET_DIGITS: Final = 20
LOG_SUFFIX: Final = ".log"
INDEX_SUFFIX: Final = ".index"
TIME_INDEX_SUFFIX: Final = ".timeindex"
TXN_INDEX_SUFFIX: Final = ".txnindex"
SNAPSHOT_SUFFIX: Final = ".snapshot"
DELETED_SUFFIX: Final = ".deleted"
CLEANED_SUFFIX: Final = ".cleaned"
SWAP_SUFFIX: Final = ".swap"

MAX_RELATIVE_OFFSET: Final = 2**31 - 1
SCAN_CHUNK_BYTES: Final = 1024 * 1024
_SEARCH_CHUNK_BYTES: Final = 8 * 1024

PLACE: Final = struct.Struct(">qi11xi")
"""Of a batch header only what a walk needs: base offset, length, last offset delta."""
PLACE_BYTES: Final = PLACE.size


def file_name(offset: int, suffix: str) -> str:
    return f"{offset:020d}{suffix}"


def is_offset_file(name: str, suffix: str) -> bool:
    """Whether a file's name is an offset and that suffix."""
    return (
        len(name) == OFFSET_DIGITS + len(suffix)
        and name.endswith(suffix)
        and name.isascii()
        and name[:OFFSET_DIGITS].isdigit()
    )


class Located(NamedTuple):
    """A batch and where it starts in its segment."""

    position: int
    header: BatchHeader


class IndexCache:
    """Bounds how many sealed segments have their indexes in memory, over all logs that share it."""

    def __init__(self, max_segments: int = 32) -> None:
        self._max_segments = max_segments
        self._loaded: dict[Segment, None] = {}

    def touch(self, segment: Segment) -> None:
        """Note that a sealed segment's indexes were loaded; the oldest other one gives its memory back."""
        self._loaded.pop(segment, None)
        self._loaded[segment] = None
        while len(self._loaded) > self._max_segments:
            oldest = next(iter(self._loaded))
            del self._loaded[oldest]
            oldest.drop_indexes()

    def forget(self, segment: Segment) -> None:
        self._loaded.pop(segment, None)


class Segment:
    """A run of batches from `base_offset` on."""

    __slots__ = (
        "_files",
        "_offset_index",
        "_time_index",
        "base_offset",
        "bytes_since_index",
        "cache",
        "created_ms",
        "directory",
        "exists",
        "first_timestamp_ms",
        "index_interval_bytes",
        "log_file",
        "max_timestamp",
        "sealed",
        "size_bytes",
        "swapped",
        "txn_index",
    )

    def __init__(
        self,
        files: Files,
        directory: Path,
        base_offset: int,
        *,
        size_bytes: int = 0,
        exists: bool = False,
        sealed: bool = False,
        created_ms: int = 0,
        index_interval_bytes: int = 4096,
        cache: IndexCache,
    ) -> None:
        self._files = files
        self.directory = directory
        self.base_offset = base_offset
        self.size_bytes = size_bytes
        self.exists = exists
        self.sealed = sealed
        self.created_ms = created_ms
        self.index_interval_bytes = index_interval_bytes
        self.cache = cache
        self.log_file = DiskFile(directory / file_name(base_offset, LOG_SUFFIX))
        self.txn_index = TransactionIndex(files, directory / file_name(base_offset, TXN_INDEX_SUFFIX))
        self.bytes_since_index = 0
        self.swapped = False
        """Whether it has taken the place of others while the log was in use: positions in those are not in this one."""
        self.first_timestamp_ms: int | None = None
        """The max timestamp of the first batch, which the age of the segment is counted from; None: not looked at."""
        self.max_timestamp: TimestampOffset | None = None if exists else TimestampOffset(NO_TIMESTAMP, base_offset)
        """The largest timestamp and the last offset of its batch; None: not looked at."""
        self._offset_index: OffsetIndex | None = None if exists else OffsetIndex()
        self._time_index: TimeIndex | None = None if exists else TimeIndex()

    def __repr__(self) -> str:
        return f"Segment({self.base_offset}, {self.size_bytes} bytes{', sealed' if self.sealed else ''})"

    # --- writing ------------------------------------------------------------------------------------------------------

    def write(self, buffers: Sequence[Buffer], size_bytes: int) -> None:
        """Put bytes at the end of the file; `note` makes them part of the segment. A failure changes nothing."""
        try:
            self._files.pwritev(self.log_file, buffers, size_bytes, self.size_bytes)
        except Exception:
            self.cut_tail()
            raise
        self.exists = True

    def create(self) -> None:
        """Make the empty file: an empty segment that is alone says where the log's offsets go on."""
        self._files.pwritev(self.log_file, (b"",), 0, 0)
        self.exists = True

    def note(self, last_offset: int, max_timestamp_ms: int, size_bytes: int) -> None:
        """Count a batch that was written at the current end, and index it when it is time."""
        largest = self.max_timestamp
        if largest is None:
            largest = self.largest_timestamp()
        if max_timestamp_ms > largest.timestamp_ms:
            self.max_timestamp = largest = TimestampOffset(max_timestamp_ms, last_offset)
        if self.size_bytes == 0:
            self.first_timestamp_ms = max_timestamp_ms
        if self.bytes_since_index > self.index_interval_bytes:
            self.offset_index.append(last_offset - self.base_offset, self.size_bytes)
            self.time_index.maybe_append(largest.timestamp_ms, largest.offset - self.base_offset)
            self.bytes_since_index = 0
        self.size_bytes += size_bytes
        self.bytes_since_index += size_bytes

    def cut_tail(self) -> None:
        """Remove what a failed write may have left behind the end; best effort, nothing depends on it."""
        try:
            if self._files.size_of(self.log_file.path):
                self._files.truncate(self.log_file, self.size_bytes)
        except Exception:  # noqa: BLE001 - the disk has just failed; the write's own error is what counts
            logger.debug("could not cut the tail of %s", self.log_file.path)

    def cut_tail_if_needed(self) -> None:
        """Before a clean close: the file must end where the segment does."""
        if self.exists and self._files.size(self.log_file) > self.size_bytes:
            self._files.truncate(self.log_file, self.size_bytes)

    def seal(self) -> None:
        """No batch follows: complete the time index and write both indexes out."""
        self.sealed = True
        self.save_indexes(final=True)
        self.cache.touch(self)

    def save_indexes(self, *, final: bool = False) -> None:
        """Write the index entries that the files do not have yet; not synced, as recovery does not trust them."""
        if not self.exists:
            return
        if final:
            largest = self.largest_timestamp()
            self.time_index.maybe_append(largest.timestamp_ms, largest.offset - self.base_offset)
        if self._offset_index is not None:
            self._save(INDEX_SUFFIX, self._offset_index, 8)
        if self._time_index is not None:
            self._save(TIME_INDEX_SUFFIX, self._time_index, TIME_ENTRY_BYTES)

    def _save(self, suffix: str, index: OffsetIndex | TimeIndex, entry_bytes: int) -> None:
        if index.saved == len(index) and index.saved:
            return
        data = index.pack(index.saved)
        file = DiskFile(self.path(suffix))
        try:
            self._files.pwritev(file, (data,), len(data), index.saved * entry_bytes)
            self._files.truncate(file, len(index) * entry_bytes)
        finally:
            self._files.close(file)
        index.saved = len(index)

    # --- the indexes --------------------------------------------------------------------------------------------------

    @property
    def offset_index(self) -> OffsetIndex:
        index = self._offset_index
        return self._load_indexes()[0] if index is None else index

    @property
    def time_index(self) -> TimeIndex:
        index = self._time_index
        return self._load_indexes()[1] if index is None else index

    def set_indexes(self, offset_index: OffsetIndex, time_index: TimeIndex) -> None:
        """Use indexes that a scan has just built; the files are written anew at the next save."""
        self._offset_index = offset_index
        self._time_index = time_index

    def drop_indexes(self) -> None:
        """Give the memory of a sealed segment's indexes back."""
        if self.sealed:
            self._offset_index = None
            self._time_index = None

    def _load_indexes(self) -> tuple[OffsetIndex, TimeIndex]:
        offset_data = self._files.read_bytes(self.path(INDEX_SUFFIX))
        time_data = self._files.read_bytes(self.path(TIME_INDEX_SUFFIX))
        offsets = OffsetIndex.parse(offset_data, self.size_bytes) if offset_data is not None else None
        times = TimeIndex.parse(time_data) if time_data is not None else None
        if offsets is not None and len(offsets) and not self._is_batch(offsets.positions[-1], offsets.offsets[-1]):
            offsets = None
        self._offset_index, self._time_index = offsets, times
        if offsets is None or times is None or (self.sealed and not self._is_largest(times.last())):
            logger.warning("the index of %s is missing or damaged and is rebuilt", self.log_file.path)
            offsets, times = self._offset_index, self._time_index = self.build_indexes()
        if self.sealed:
            self.cache.touch(self)
        return offsets, times

    def _is_batch(self, position: int, relative_last_offset: int) -> bool:
        data = self._files.pread(self.log_file, PLACE_BYTES, position)
        if len(data) < PLACE_BYTES:
            return False
        base, _, delta = PLACE.unpack(data)
        return bool(base + delta == self.base_offset + relative_last_offset)

    def rebuild_indexes(self) -> None:
        """Replace indexes that turned out to point elsewhere."""
        logger.warning("the index of %s is damaged and is rebuilt", self.log_file.path)
        self._offset_index, self._time_index = self.build_indexes()

    def batch_boundary(self, position: int, floor: int) -> int:
        """A start of a batch at or before `position`, near it, and not below `floor`, which is one."""
        indexed, found = self.offset_index.floor(position)
        if found <= floor:
            return floor
        if found > position or not self._is_batch(found, indexed):
            self.rebuild_indexes()
            return self.batch_boundary(position, floor)
        return found

    def search_start(self, timestamp_ms: int, offset: int) -> int:
        """A position before which no batch at or above `offset` reaches `timestamp_ms`."""
        entry = self.time_index.lookup(timestamp_ms)
        if entry is None:
            return self.locate(offset)
        position = self.locate(max(entry.offset + self.base_offset, offset))
        if entry.offset + self.base_offset >= offset:
            # An index has no checksum: its word is taken only if the batch it speaks of agrees.
            batch = next(self.walk(position, HEADER_BYTES), None)
            if batch is None or not batch.header.max_timestamp_ms == entry.timestamp_ms < timestamp_ms:
                self.rebuild_indexes()
                return self.locate(offset)
        return position

    def build_indexes(self) -> tuple[OffsetIndex, TimeIndex]:
        """Both indexes from the batches themselves."""
        offsets, times = OffsetIndex(), TimeIndex()
        largest = TimestampOffset(NO_TIMESTAMP, self.base_offset)
        since = 0
        for position, header in self.walk():
            if header.largest_timestamp_ms > largest.timestamp_ms:
                largest = TimestampOffset(header.largest_timestamp_ms, header.last_offset)
            if since > self.index_interval_bytes:
                offsets.append(header.last_offset - self.base_offset, position)
                times.maybe_append(largest.timestamp_ms, largest.offset - self.base_offset)
                since = 0
            since += header.size_bytes
        times.maybe_append(largest.timestamp_ms, largest.offset - self.base_offset)
        self.max_timestamp = largest
        return offsets, times

    def largest_timestamp(self) -> TimestampOffset:
        """The largest timestamp in the segment and the last offset of its batch; (-1, base) where there is none."""
        if self.max_timestamp is None:
            last = self.time_index.last()
            self.max_timestamp = (
                TimestampOffset(NO_TIMESTAMP, self.base_offset)
                if last is None
                else TimestampOffset(last.timestamp_ms, last.offset + self.base_offset)
            )
        return self.max_timestamp

    def _is_largest(self, entry: TimestampOffset | None) -> bool:
        """Whether a sealed segment's last time entry is true, and not the last one of a file that was cut.

        The look at what follows it is bounded: with timestamps out of order that could be the whole segment.
        """
        if entry is None:
            batch = next((batch for batch in self.walk(0, _SEARCH_CHUNK_BYTES) if batch.header.count), None)
            return batch is None or batch.header.max_timestamp_ms < 0
        first = self.locate(entry.offset + self.base_offset)
        for position, header in self.walk(first, _SEARCH_CHUNK_BYTES):
            if position == first:
                if (header.max_timestamp_ms, header.last_offset) != (
                    entry.timestamp_ms,
                    entry.offset + self.base_offset,
                ):
                    return False
            elif header.largest_timestamp_ms > entry.timestamp_ms:
                return False
            if position - first > SCAN_CHUNK_BYTES:
                break
        return first < self.size_bytes

    def retention_timestamp_ms(self) -> int:
        """What retention counts the age from: the largest timestamp, or the file's own where records have none."""
        largest = self.largest_timestamp().timestamp_ms
        return largest if largest >= 0 else self._files.modified_ms(self.log_file.path)

    def rolling_timestamp_ms(self) -> int:
        """What the segment's age is counted from: its first batch's timestamp, -1 where it has none."""
        if self.first_timestamp_ms is None:
            first = next(self.walk(0, HEADER_BYTES), None)
            self.first_timestamp_ms = NO_TIMESTAMP if first is None else first.header.max_timestamp_ms
        return self.first_timestamp_ms

    # --- reading ------------------------------------------------------------------------------------------------------

    def path(self, suffix: str) -> Path:
        return self.directory / file_name(self.base_offset, suffix)

    def paths(self) -> list[Path]:
        """Every file that may belong to the segment."""
        return [self.path(suffix) for suffix in (LOG_SUFFIX, INDEX_SUFFIX, TIME_INDEX_SUFFIX, TXN_INDEX_SUFFIX)]

    def pread(self, size_bytes: int, position: int) -> bytes:
        """Exactly `size_bytes`; fewer means that the file was cut behind our back."""
        data = self._files.pread(self.log_file, size_bytes, position)
        if len(data) != size_bytes:
            raise CorruptLogError(
                f"{self.log_file.path} ends at byte {position + len(data)}, "
                f"but batches up to byte {self.size_bytes} were written to it"
            )
        return data

    def locate(self, offset: int) -> int:
        """The position of the first batch whose last offset is not below `offset`; `size_bytes` where there is none."""
        indexed, position = self.offset_index.lookup(offset - self.base_offset)
        end = self.size_bytes
        chunk = b""
        chunk_start = position
        if indexed >= 0 and not (indexed <= offset - self.base_offset and self._is_batch(position, indexed)):
            self.rebuild_indexes()
            return self.locate(offset)
        while position < end:
            pos = position - chunk_start
            if pos + PLACE_BYTES > len(chunk):
                chunk = self.pread(min(_SEARCH_CHUNK_BYTES, end - position), position)
                chunk_start, pos = position, 0
                if len(chunk) < PLACE_BYTES:
                    break
            base, length, delta = PLACE.unpack_from(chunk, pos)
            if length < MIN_BATCH_LENGTH:
                raise CorruptLogError(f"{self.log_file.path} has no batch at byte {position}")
            if base + delta >= offset:
                return position
            position += length + LOG_OVERHEAD_BYTES
        return end

    def walk(self, position: int = 0, chunk_bytes: int = SCAN_CHUNK_BYTES) -> Iterator[Located]:
        """The batch headers from `position` on, without a look at CRCs; damage raises `CorruptLogError`."""
        end = self.size_bytes
        expected = self.base_offset
        highest = self.base_offset + MAX_RELATIVE_OFFSET
        chunk = b""
        chunk_start = position
        while position < end:
            pos = position - chunk_start
            if pos + HEADER_BYTES > len(chunk):
                # After a batch that is larger than a chunk the rest of the old chunk is of no use: read from here.
                chunk = self.pread(min(chunk_bytes, end - position), position)
                chunk_start, pos = position, 0
                if len(chunk) < HEADER_BYTES:
                    raise CorruptLogError(f"{self.log_file.path} ends in a part of a batch at byte {position}")
            header = BatchHeader._make(HEADER.unpack_from(chunk, pos))
            if header.magic != MAGIC or header.batch_length < MIN_BATCH_LENGTH or position + header.size_bytes > end:
                raise CorruptLogError(f"{self.log_file.path} has no batch at byte {position}")
            if header.last_offset_delta < 0 or not expected <= header.base_offset <= header.last_offset <= highest:
                raise CorruptLogError(
                    f"{self.log_file.path} has offset {header.base_offset} at byte {position}, after {expected - 1}"
                )
            yield Located(position, header)
            expected = header.next_offset
            position += header.size_bytes

    def end_before(self, position: int) -> int:
        """Where the offsets end of the batches before `position`, which is a boundary between two."""
        start = self.offset_index.floor(position - 1)[1] if position else 0
        end_offset = self.base_offset
        for place, header in self.walk(start):
            if place >= position:
                break
            end_offset = header.next_offset
        return end_offset

    def truncate(self, position: int, end_offset: int) -> None:
        """Drop everything from `position` on, which is where `end_offset` would be."""
        offset_index, time_index = self.offset_index, self.time_index
        self._files.truncate(self.log_file, position)
        self.size_bytes = position
        offset_index.truncate(position)
        time_index.truncate(end_offset - self.base_offset)
        self.txn_index.truncate(end_offset)
        self.sealed = False
        self.cache.forget(self)
        self.bytes_since_index = position - (offset_index.positions[-1] if len(offset_index) else 0)
        if position == 0:
            self.first_timestamp_ms = None
        # The largest timestamp may have gone: take the index's last and look at what lies behind it.
        last = time_index.last()
        largest = TimestampOffset(NO_TIMESTAMP, self.base_offset)
        start = 0
        if last is not None:
            largest = TimestampOffset(last.timestamp_ms, last.offset + self.base_offset)
            start = offset_index.lookup(last.offset)[1]
        for _, header in self.walk(start):
            if header.largest_timestamp_ms > largest.timestamp_ms:
                largest = TimestampOffset(header.largest_timestamp_ms, header.last_offset)
        self.max_timestamp = largest

    def close(self) -> None:
        self._files.close(self.log_file)
        self.txn_index.close()
