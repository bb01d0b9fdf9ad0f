"""Whole batches out of a log's segments, as the bytes they are on disk.

A reader that goes on where it stopped is served without index or search: where each read ended is remembered. Not here:
from where up to where a reader may read (`log`, and the high watermark above it).
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final, NamedTuple

from millrace.errors import CorruptLogError
from millrace.records.batch import LOG_OVERHEAD_BYTES, read_header
from millrace.storage.recovery import LogPosition
from millrace.storage.segment import PLACE, PLACE_BYTES, Segment
from millrace.storage.segments import Segments

_MAX_HINTS: Final = 256


class ReadResult(NamedTuple):
    """Whole batches, and the offset to read next."""

    data: bytes | memoryview
    next_offset: int


class Reading:
    """Reads the segments of one log. Owner: the log, which calls `forget` when positions may have changed."""

    __slots__ = ("_hints", "_segments")

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._hints: dict[int, tuple[Segment, int]] = {}

    def forget(self) -> None:
        """Segments have gone or were replaced: what is remembered of them does not hold."""
        self._hints.clear()

    def read(self, offset: int, max_bytes: int, end: LogPosition, log_end: int, at_least_one: bool) -> ReadResult:
        """Batches of one segment from the one that holds `offset` on, up to `end`, in a log that ends at `log_end`."""
        hint = self._hints.get(offset)
        if hint is not None and hint[1] < hint[0].size_bytes:
            segment, position = hint
        else:
            segment, position = self._segments.locate(offset)
        if segment.swapped:
            stop, next_offset = self._stop_in_swapped(segment, end.offset, log_end)
        elif end.segment_base == segment.base_offset:
            stop = end.position_bytes
            next_offset = end.offset
        elif end.segment_base > segment.base_offset:
            stop = segment.size_bytes
            bases = self._segments.bases
            next_offset = bases[bisect_right(bases, segment.base_offset)]
        else:
            return ReadResult(b"", offset)
        size = stop - position
        if size <= 0:
            return ReadResult(b"", offset)
        if size <= max_bytes:
            data = segment.pread(size, position)
            self._hint(next_offset, segment, stop)
            return ReadResult(data, next_offset)
        return self._read_part(segment, position, stop, offset, max_bytes, at_least_one=at_least_one)

    def _stop_in_swapped(self, segment: Segment, limit: int, log_end: int) -> tuple[int, int]:
        """Where a read up to `limit` ends in a compacted segment, and the offset there.

        By offset, as the position that came with the limit may be one in a segment that is no more.
        """
        end_offset = self._segments.end_of(segment, log_end)
        return (segment.size_bytes, end_offset) if limit >= end_offset else (segment.locate(limit), limit)

    def _read_part(
        self, segment: Segment, position: int, stop: int, offset: int, max_bytes: int, *, at_least_one: bool
    ) -> ReadResult:
        """As many whole batches as `max_bytes` holds: the index says where near the end to look for the boundary."""
        data = b""
        if max_bytes >= PLACE_BYTES:
            data = segment.pread(max_bytes, position)
            place = segment.batch_boundary(position + max_bytes - PLACE_BYTES, position) - position
            fits = 0
            next_offset = offset
            while place + PLACE_BYTES <= max_bytes:
                base, length, delta = PLACE.unpack_from(data, place)
                after = place + length + LOG_OVERHEAD_BYTES
                if length <= 0 or after > max_bytes:
                    # The batch does not fit; the boundary itself does, unless it is the very first.
                    if fits == 0 and place:
                        fits, next_offset = place, base
                    break
                place = fits = after
                next_offset = base + delta + 1
            if fits:
                if next_offset <= offset:
                    raise CorruptLogError(f"{segment.log_file.path} has offsets that go back near byte {position}")
                self._hint(next_offset, segment, position + fits)
                return ReadResult(data if fits == max_bytes else memoryview(data)[:fits], next_offset)
        if not at_least_one:
            return ReadResult(b"", offset)
        _, length, _ = PLACE.unpack_from(data or segment.pread(PLACE_BYTES, position))
        size = length + LOG_OVERHEAD_BYTES
        if length <= 0 or size > stop - position:
            raise CorruptLogError(f"{segment.log_file.path} has no batch at byte {position}")
        batch = segment.pread(size, position)
        header = read_header(batch)
        if header.next_offset <= offset:
            raise CorruptLogError(f"{segment.log_file.path} has offsets that go back near byte {position}")
        self._hint(header.next_offset, segment, position + size)
        return ReadResult(batch, header.next_offset)

    def _hint(self, offset: int, segment: Segment, position: int) -> None:
        """Remember where a reader that goes on will find its next batch: it then needs neither index nor search."""
        hints = self._hints
        if len(hints) >= _MAX_HINTS:
            hints.clear()
        hints[offset] = (segment, position)

    def bytes_after(self, offset: int, end: LogPosition) -> int | None:
        """How much there is from `offset` up to the log's end; None where that is not known without a search."""
        if offset == end.offset:
            return 0
        hint = self._hints.get(offset)
        return end.position_bytes - hint[1] if hint is not None and hint[0] is self._segments.active else None

    def position_of(self, offset: int) -> LogPosition:
        """Where the batch that begins at `offset` lies."""
        hint = self._hints.get(offset)
        segment, position = self._segments.locate(offset) if hint is None else hint
        return LogPosition(offset, segment.base_offset, position)
