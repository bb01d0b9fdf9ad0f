"""The segments of one log, oldest first: which one holds an offset, the one that is written to, and how one is let go.

Not here: offsets that are not in the files (start, end, flushed: `log`), reading (`reading`), and the order in which
files change their names when the log is rewritten (`rewriting`).

Invariant: there is at least one segment once `take` was called, and the last one is active.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path

from millrace.storage.files import Files
from millrace.storage.segment import (
    DELETED_SUFFIX,
    OFFSET_DIGITS,
    SNAPSHOT_SUFFIX,
    IndexCache,
    Segment,
    is_offset_file,
)


class Segments:
    """A log's segments. Owner: the log."""

    __slots__ = ("_cache", "active", "bases", "directory", "files", "index_interval_bytes", "listed")

    def __init__(self, files: Files, directory: Path, cache: IndexCache, index_interval_bytes: int) -> None:
        self.files = files
        self.directory = directory
        self.index_interval_bytes = index_interval_bytes
        self.listed: list[Segment] = []
        self.bases: list[int] = []
        self.active: Segment
        self._cache = cache

    def __len__(self) -> int:
        return len(self.listed)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.listed)

    def __repr__(self) -> str:
        return f"Segments({self.directory.name}, {self.bases})"

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.listed)

    def take(self, segments: list[Segment]) -> None:
        """Be these, and no others."""
        self.listed = segments
        self.bases = [segment.base_offset for segment in segments]
        self.active = segments[-1]

    # --- finding ------------------------------------------------------------------------------------------------------

    def slot_of(self, offset: int) -> int:
        """The place in the list of the segment that holds `offset`, or would."""
        return max(bisect_right(self.bases, offset) - 1, 0)

    def locate(self, offset: int) -> tuple[Segment, int]:
        """Where the batch that holds `offset` lies."""
        slot = bisect_right(self.bases, offset) - 1
        while True:
            segment = self.listed[slot]
            position = segment.locate(offset)
            slot += 1
            # An offset that compaction removed from the end of a segment is found at the start of the next.
            if position < segment.size_bytes or slot == len(self.listed):
                return segment, position

    def end_of(self, segment: Segment, log_end: int) -> int:
        """The offset where a segment ends, of a log that ends at `log_end`."""
        slot = bisect_right(self.bases, segment.base_offset)
        return self.bases[slot] if slot < len(self.bases) else log_end

    def with_ends(self, log_end: int) -> Iterator[tuple[Segment, int]]:
        """Every segment and the offset where it ends."""
        return zip(self.listed, [*self.bases[1:], log_end], strict=True)

    def snapshots(self) -> list[int]:
        """The offsets of the producer snapshots beside the segments, lowest first."""
        names = self.files.names(self.directory)
        return sorted(int(name[:OFFSET_DIGITS]) for name in names if is_offset_file(name, SNAPSHOT_SUFFIX))

    # --- coming and going ---------------------------------------------------------------------------------------------

    def make(
        self, base_offset: int, created_ms: int, *, size_bytes: int = 0, exists: bool = False, sealed: bool = False
    ) -> Segment:
        """A segment of this log, not in the list yet."""
        return Segment(
            self.files,
            self.directory,
            base_offset,
            size_bytes=size_bytes,
            exists=exists,
            sealed=sealed,
            created_ms=created_ms,
            index_interval_bytes=self.index_interval_bytes,
            cache=self._cache,
        )

    def add(self, segment: Segment) -> None:
        """Go on in `segment`."""
        self.listed.append(segment)
        self.bases.append(segment.base_offset)
        self.active = segment

    def replace(self, first: int, last: int, segments: list[Segment]) -> list[Segment]:
        """Let `segments` take the places from `first` up to `last`; returns those that were there."""
        gone = self.listed[first:last]
        self.listed[first:last] = segments
        self.bases[first:last] = [segment.base_offset for segment in segments]
        self.active = self.listed[-1]
        return gone

    def retire(self, segment: Segment) -> list[Path]:
        """Close a segment and mark its files, so that a start after a crash removes them; returns their new names."""
        self.let_go([segment])
        return self.mark_deleted(segment.paths())

    def mark_deleted(self, paths: Iterable[Path]) -> list[Path]:
        """Rename those of the files that are there; returns their new names."""
        marked: list[Path] = []
        for path in paths:
            target = path.with_name(path.name + DELETED_SUFFIX)
            if self.files.size_of(path) is not None:
                self.files.rename(path, target)
                marked.append(target)
        return marked

    def set_index_interval(self, size_bytes: int) -> None:
        self.index_interval_bytes = size_bytes
        for segment in self.listed:
            segment.index_interval_bytes = size_bytes

    def release(self) -> None:
        """Close all files and forget the segments."""
        self.let_go(self.listed)
        self.listed, self.bases = [], []

    def let_go(self, segments: list[Segment]) -> None:
        """Close the files of segments that are not used any more, and give back their memory."""
        for segment in segments:
            segment.close()
            self._cache.forget(segment)
