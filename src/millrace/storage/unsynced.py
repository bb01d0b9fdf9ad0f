"""What of one log was written and not synced: its part in the next `FlushTicket`.

Owner: the log. `more_than_data` may be read in any thread.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from millrace.errors import StorageError
from millrace.storage.files import DiskFile, Files
from millrace.storage.segment import INDEX_SUFFIX, TIME_INDEX_SUFFIX, TXN_INDEX_SUFFIX, Segment

if TYPE_CHECKING:
    from collections.abc import Iterable


class Unsynced:
    """Segments with new batches, directories with new names, and files that count once they are on disk."""

    __slots__ = ("directories", "files", "rolled", "segments")

    def __init__(self) -> None:
        self.segments: dict[Segment, None] = {}
        self.directories: dict[Path, None] = {}
        self.files: list[Path] = []
        self.rolled = False
        """Whether a segment was sealed: once it is synced, the recovery point is worth writing down."""

    def __bool__(self) -> bool:
        return bool(self.segments or self.directories or self.files or self.rolled)

    def __repr__(self) -> str:
        return f"Unsynced({list(self.segments)}, {len(self.directories)} directories, {len(self.files)} files)"

    @property
    def more_than_data(self) -> bool:
        """Whether something else than the data of segments waits."""
        return bool(self.directories or self.files or self.rolled)

    def keep_only(self, segments: list[Segment]) -> None:
        """Segments that are not in the list any more have nothing to sync."""
        self.segments = {segment: None for segment in self.segments if segment in segments}

    def note_created(self, paths: Iterable[Path], directories: Iterable[Path]) -> None:
        """Files and directories that were made and must be synced with the first records."""
        self.files += paths
        self.directories.update(dict.fromkeys(directories))

    def note_sealed(self, segment: Segment) -> None:
        """Below the recovery point a segment is not scanned after a crash: its indexes have to last."""
        self.files += [segment.path(INDEX_SUFFIX), segment.path(TIME_INDEX_SUFFIX)]
        self.note_transactions(segment)

    def note_transactions(self, segment: Segment) -> None:
        """Without its index a segment's aborted records look like committed ones."""
        if segment.txn_index.entries():
            self.files.append(segment.path(TXN_INDEX_SUFFIX))
            self.directories[segment.directory] = None

    def pin(self, files: Files) -> list[tuple[DiskFile, int]]:
        """Hold the descriptors of the segments open, for a sync in another thread."""
        pinned: list[tuple[DiskFile, int]] = []
        try:
            for file in [segment.log_file for segment in self.segments if segment.exists]:
                pinned.append((file, files.pin(file)))  # noqa: PERF401 - those before a failure must be known
        except StorageError:
            for held, _ in pinned:
                files.unpin(held)
            raise
        return pinned
