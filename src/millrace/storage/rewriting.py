"""What is in the files is taken away or replaced: the order of names that leaves a whole log whenever the power fails.

A file that goes is renamed first and removed later, when its name is durable or does not matter; every function returns
what may be removed. Not here: whether it may be done, and what the log knows of its offsets (`log`); the names that a
compacted segment goes through (`swap`).

Where a `StorageError` leaves a function, the names of the files are for a start to sort out, and the log must not be
used; but for `drop_oldest`, after which files may be left over that do no harm.
"""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path

from millrace.storage import swap
from millrace.storage.compaction_job import Cleaned
from millrace.storage.segment import CLEANED_SUFFIX, LOG_SUFFIX, SNAPSHOT_SUFFIX, Segment, file_name
from millrace.storage.segments import Segments


def cut(segments: Segments, slot: int, position: int, end_offset: int) -> list[Path]:
    """Drop everything behind `position` in the segment at `slot`, which is where `end_offset` is.

    The names are durable before anything can be written: that may end exactly where a retired segment begins, and if a
    power cut brought that one back, its records would follow the new ones as if they belonged there.
    """
    doomed = _retire_all(segments, segments.listed[slot + 1 :], end_offset)
    if doomed:
        segments.files.sync_directory(segments.directory)
    segments.listed[slot].truncate(position, end_offset)
    segments.replace(slot + 1, len(segments), [])
    return doomed


def begin_anew(segments: Segments, first: Segment) -> list[Path]:
    """Drop everything and go on in `first`, an empty segment; both at once, or the offsets would be forgotten."""
    doomed = _retire_all(segments, segments.listed, -1)
    first.create()
    segments.files.sync_directory(segments.directory)
    segments.take([first])
    return doomed


def _retire_all(segments: Segments, gone: list[Segment], end_offset: int) -> list[Path]:
    """Retire the last segments, newest first, and the snapshots beyond `end_offset`."""
    doomed: list[Path] = []
    for segment in reversed(gone):
        doomed += segments.retire(segment)
    doomed += segments.mark_deleted(
        segments.directory / file_name(offset, SNAPSHOT_SUFFIX)
        for offset in segments.snapshots()
        if offset > end_offset
    )
    return doomed


def drop_oldest(segments: Segments, count: int) -> list[Path]:
    """Drop the first `count` segments, never the active one, and the snapshots below what is left."""
    if not segments.active.exists:
        # Without any file a crash would forget the offsets: the empty one must be there before the others go.
        segments.active.create()
        segments.files.sync_directory(segments.directory)
    doomed: list[Path] = []
    for segment in segments.replace(0, count, []):
        doomed += segments.retire(segment)
    # No start would take the snapshots any more; it does no harm if they come back.
    return doomed + _snapshots_below(segments, segments.bases[0])


def find_replaced(segments: Segments, cleaned: Cleaned) -> tuple[int, int] | None:
    """The places of the segments that a compacted one was made from; None where they are not as they were."""
    sources = cleaned.sources
    first = bisect_left(segments.bases, sources[0].base_offset)
    last = first + len(sources)
    found = [(segment.base_offset, segment.size_bytes) for segment in segments.listed[first:last]]
    if found != [(source.base_offset, source.size_bytes) for source in sources]:
        return None
    if segments.bases[last : last + 1] != [sources[-1].end_offset]:
        return None
    written = segments.directory / file_name(sources[0].base_offset, LOG_SUFFIX + CLEANED_SUFFIX)
    return (first, last) if segments.files.size_of(written) == cleaned.size_bytes else None


def replace(segments: Segments, first: int, last: int, cleaned: Cleaned) -> list[Path]:
    """Let a compacted segment take the places from `first` up to `last`, in the order that `swap` says.

    First the snapshots of the producers below its end go, also those of before its base: a transaction may be open in
    them whose marker the compacted segment does not have any more, and which a start from there would never see end.
    """
    base_offset, end_offset = cleaned.sources[0].base_offset, cleaned.sources[-1].end_offset
    created_ms = segments.listed[first].created_ms
    doomed = segments.mark_deleted(_snapshots_below(segments, end_offset))
    swap.commit(segments.files, segments.directory, base_offset)
    for segment in segments.listed[first:last]:
        doomed += segments.retire(segment)
    swap.rename_into_place(segments.files, segments.directory, base_offset)
    compacted = segments.make(base_offset, created_ms, size_bytes=cleaned.size_bytes, exists=True, sealed=True)
    compacted.swapped = True
    segments.replace(first, last, [compacted])
    return doomed


def _snapshots_below(segments: Segments, end_offset: int) -> list[Path]:
    return [
        segments.directory / file_name(offset, SNAPSHOT_SUFFIX)
        for offset in segments.snapshots()
        if offset < end_offset
    ]
