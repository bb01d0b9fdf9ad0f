"""One sync of one log, from what must reach the disk to how far that makes the log durable.

Made by `Log.begin_flush` and given back to `Log.end_flush`, both on the loop; what happens in between may happen in any
thread and touches nothing of the log but two reads that are safe there.

Invariant: `end` is where the log ended before the sync began, so everything below it is on disk once the sync is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.errors import StorageError
from millrace.storage.files import DiskFile, Files
from millrace.storage.recovery import LogPosition

if TYPE_CHECKING:
    from millrace.storage.loaded import LoadedLog
    from millrace.storage.log import Log


@dataclass(slots=True)
class FlushTicket:
    """What must reach the disk for a log to count as flushed up to `end`; made and finished on the loop."""

    log: Log
    loaded: LoadedLog
    end: LogPosition
    generation: int
    rolled: bool
    pinned: list[tuple[DiskFile, int]]
    directories: list[Path]
    loose_files: list[Path]
    replacements: list[tuple[Path, bytes]]

    def run(self, files: Files) -> None:
        """Sync everything; any thread. A `StorageError` is final: what was dirty may be lost already."""
        for file, fd in self.pinned:
            files.sync_descriptor(file.path, fd)
        try:
            for path in self.loose_files:
                files.sync_path(path)
            for path, data in self.replacements:
                files.replace_bytes(path, data)
            for directory in self.directories:
                files.sync_directory(directory)
        except StorageError:
            # A log that was deleted meanwhile has no directory any more, and nothing to keep.
            if files.size_of(self.log.directory) is not None:
                raise

    def grown(self) -> LogPosition | None:
        """Where the log ends by now, if one more sync of the same file is all that this takes; any thread.

        The order of the two reads is what makes it safe: an append sets what else it owes before it moves the end.
        """
        end = self.loaded.end
        if (
            end.offset <= self.end.offset
            or end.segment_base != self.end.segment_base
            or len(self.pinned) != 1
            or self.loaded.owes_more_than_data
            or self.log.flush_patience_s
        ):
            return None
        return end

    def sync_again(self, files: Files, end: LogPosition) -> None:
        """Sync the one file up to `end`, which `grown` has returned; any thread."""
        file, fd = self.pinned[0]
        files.sync_descriptor(file.path, fd)
        self.end = end
