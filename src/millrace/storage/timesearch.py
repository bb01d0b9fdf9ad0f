"""Records by their time: the time index leads to the first batch that can hold one, its records give the answer.

What is not here: the indexes themselves (`index`, `segment`) and who asks (`log`). Nothing is changed by a search.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from millrace.errors import ApiError
from millrace.records.batch import BatchHeader, TimestampType
from millrace.records.decode import decode_records
from millrace.storage.segment import Segment

logger = logging.getLogger(__name__)

_SEARCH_CHUNK_BYTES: Final = 64 * 1024


class FoundOffset(NamedTuple):
    """A record found by its time."""

    offset: int
    timestamp_ms: int
    leader_epoch: int


@dataclass(frozen=True, slots=True)
class Searched:
    """What of a log is searched: the offsets from `start_offset` up to, and without, `end_offset`."""

    segments: Sequence[Segment]
    start_offset: int
    end_offset: int
    max_decompressed_bytes: int


def first_at_or_after(searched: Searched, timestamp_ms: int) -> FoundOffset | None:
    """The first record with that time or a later one."""
    start_offset, end_offset = searched.start_offset, searched.end_offset
    for segment in searched.segments:
        if not segment.size_bytes or segment.largest_timestamp().timestamp_ms < timestamp_ms:
            continue
        position = segment.search_start(timestamp_ms, max(start_offset, segment.base_offset))
        for place, header in segment.walk(position, _SEARCH_CHUNK_BYTES):
            if header.base_offset >= end_offset:
                return None
            if header.largest_timestamp_ms < timestamp_ms or header.last_offset < start_offset:
                continue
            for offset, found_ms in _timestamps(searched, segment, place, header):
                if found_ms >= timestamp_ms and offset >= start_offset:
                    return FoundOffset(offset, found_ms, header.leader_epoch) if offset < end_offset else None
    return None


def with_largest_timestamp(searched: Searched) -> FoundOffset | None:
    """The record with the largest time, the first of several."""
    largest_ms = max(
        (
            segment.largest_timestamp().timestamp_ms
            for segment in searched.segments
            if segment.size_bytes and segment.base_offset < searched.end_offset
        ),
        default=-1,
    )
    if largest_ms < 0:
        return None
    # Where the largest one lies above the end, what lies below it has to be looked at.
    return first_at_or_after(searched, largest_ms) or _largest_by_walking(searched)


def _largest_by_walking(searched: Searched) -> FoundOffset | None:
    best: FoundOffset | None = None
    for segment in searched.segments:
        if not segment.size_bytes:
            continue
        for place, header in segment.walk():
            if header.base_offset >= searched.end_offset:
                return best
            if header.last_offset < searched.start_offset or (
                best is not None and header.largest_timestamp_ms <= best.timestamp_ms
            ):
                continue
            for offset, timestamp_ms in _timestamps(searched, segment, place, header):
                if offset < searched.end_offset and (best is None or timestamp_ms > best.timestamp_ms):
                    best = FoundOffset(offset, timestamp_ms, header.leader_epoch)
    return best


def _timestamps(searched: Searched, segment: Segment, position: int, header: BatchHeader) -> list[tuple[int, int]]:
    """(offset, timestamp) of a batch's records; for records that cannot be read, of the batch as a whole."""
    is_whole = header.count == header.last_offset_delta + 1
    if is_whole and (header.timestamp_type is TimestampType.LOG_APPEND or header.count == 1):
        return [(header.base_offset, header.max_timestamp_ms)]
    batch = segment.pread(header.size_bytes, position)
    try:
        records = decode_records(batch, max_bytes=searched.max_decompressed_bytes)
    except ApiError as error:
        logger.warning("%s: the records at byte %d cannot be read: %s", segment.log_file.path, position, error)
        return [(header.base_offset, header.max_timestamp_ms)]
    return [(record.offset, record.timestamp_ms) for record in records]
