"""The aborted transactions of a segment: `<base>.txnindex`, in Kafka's format.

    34 bytes per entry: int16 version = 0 | int64 producer id | int64 first offset | int64 last offset (the marker's) |
    int64 last stable offset when the marker was written

The file exists only where a transaction was aborted. An entry lies in the segment of its marker. Written in place and
synced when the segment is sealed; before that, recovery makes it again from the control batches.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple

from millrace.storage.files import DiskFile, Files

_ENTRY: Final = struct.Struct(">hqqqq")
ENTRY_BYTES: Final = _ENTRY.size
_VERSION: Final = 0
_MARKER_OF: Final = attrgetter("last_offset")


class AbortedTransaction(NamedTuple):
    """One aborted transaction, from its first record to its marker."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


class TransactionIndex:
    """The aborted transactions whose markers lie in one segment, in the order of their markers."""

    __slots__ = ("_entries", "_file", "_files")

    def __init__(self, files: Files, path: Path) -> None:
        self._files = files
        self._file = DiskFile(path)
        self._entries: list[AbortedTransaction] | None = None

    @property
    def path(self) -> Path:
        return self._file.path

    def entries(self) -> list[AbortedTransaction]:
        """All entries; a torn last one, or one of an unknown version, ends the list."""
        if self._entries is None:
            data = self._files.read_bytes(self._file.path) or b""
            self._entries = []
            for pos in range(0, len(data) - ENTRY_BYTES + 1, ENTRY_BYTES):
                version, *fields = _ENTRY.unpack_from(data, pos)
                if version != _VERSION:
                    break
                self._entries.append(AbortedTransaction(*fields))
        return self._entries

    def append(self, entry: AbortedTransaction) -> None:
        entries = self.entries()
        self._files.pwritev(self._file, (_ENTRY.pack(_VERSION, *entry),), ENTRY_BYTES, len(entries) * ENTRY_BYTES)
        entries.append(entry)

    def overlapping(self, first_offset: int, end_offset: int) -> list[AbortedTransaction]:
        """The aborted transactions that touch offsets from `first_offset` up to, not including, `end_offset`."""
        entries = self.entries()
        found: list[AbortedTransaction] = []
        for slot in range(bisect_left(entries, first_offset, key=_MARKER_OF), len(entries)):
            entry = entries[slot]
            if entry.first_offset < end_offset:
                found.append(entry)
            if entry.last_stable_offset >= end_offset:
                break
        return found

    def is_last_word(self, end_offset: int) -> bool:
        """Whether no later transaction can begin below `end_offset`: one that ended here left none open there."""
        entries = self.entries()
        return bool(entries) and entries[-1].last_stable_offset >= end_offset

    def truncate(self, offset: int) -> None:
        """Forget the transactions whose marker is at or after `offset`."""
        kept = [entry for entry in self.entries() if entry.last_offset < offset]
        if len(kept) != len(self.entries()):
            self._files.truncate(self._file, len(kept) * ENTRY_BYTES)
            self._entries = kept

    def reset(self) -> None:
        """Start anew: recovery adds the entries again."""
        self.close()
        self._files.remove(self._file.path)
        self._entries = []

    def close(self) -> None:
        self._files.close(self._file)
