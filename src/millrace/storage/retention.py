"""Which old segments may go: a pure decision from sizes, timestamps and offsets.

What is not here: the deletion itself (`log`), and the offsets that DeleteRecords names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class SegmentAge(NamedTuple):
    """What retention asks of a segment; the timestamp is a call because a sealed segment reads it from disk."""

    base_offset: int
    end_offset: int
    size_bytes: int
    largest_timestamp_ms: Callable[[], int]


def expired_segments(
    segments: Sequence[SegmentAge],
    *,
    now_ms: int,
    retention_ms: int,
    retention_bytes: int,
    start_offset: int,
    deletable_below: int,
) -> int:
    """How many of the oldest segments to delete; the last one (the active) may count, its owner rolls it first.

    A segment goes when all of it is below `start_offset`, when its newest record is older than `retention_ms`, or when
    the log without it still has `retention_bytes`. Nothing at or above `deletable_below` (the high watermark) goes.
    A negative limit is no limit.
    """
    total_bytes = sum(segment.size_bytes for segment in segments)
    for index, segment in enumerate(segments):
        if segment.end_offset > deletable_below or segment.size_bytes == 0:
            return index
        too_old = retention_ms >= 0 and now_ms - segment.largest_timestamp_ms() > retention_ms
        too_much = retention_bytes >= 0 and total_bytes - segment.size_bytes >= retention_bytes
        if not (segment.end_offset <= start_offset or too_old or too_much):
            return index
        total_bytes -= segment.size_bytes
    return len(segments)
