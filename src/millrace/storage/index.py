"""The two sparse indexes of a segment, in memory as sorted arrays and on disk in Kafka's format.

    <base>.index      8 bytes per entry: int32 offset - base | int32 position of the batch whose last offset that is
    <base>.timeindex  12 bytes per entry: int64 timestamp | int32 offset - base: no record at or before that offset
                      has a later timestamp

An entry is added about every `index.interval.bytes`. Entries are strictly increasing (timestamps too).

After a crash: both files are written lazily, when a segment is sealed (and synced before the recovery point passes the
segment) and at a clean close; recovery builds those of the segments it scans anew. `parse` refuses what cannot be an
index by its size and its end; whether the entries between are in order is not looked at, because a segment checks every
entry that it uses against the batch it names.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_right
from typing import Final, NamedTuple

OFFSET_ENTRY_BYTES: Final = 8
TIME_ENTRY: Final = struct.Struct(">qi")
TIME_ENTRY_BYTES: Final = TIME_ENTRY.size
_SWAP: Final = sys.byteorder == "little"


class TimestampOffset(NamedTuple):
    """A timestamp and the last offset of the batch that has it."""

    timestamp_ms: int
    offset: int


class OffsetIndex:
    """Where batches lie in a segment; offsets are relative to the segment's base."""

    __slots__ = ("offsets", "positions", "saved")

    def __init__(self) -> None:
        self.offsets: array[int] = array("I")
        self.positions: array[int] = array("I")
        self.saved = 0
        """How many entries the file already holds."""

    def __len__(self) -> int:
        return len(self.offsets)

    def append(self, relative_offset: int, position: int) -> None:
        self.offsets.append(relative_offset)
        self.positions.append(position)

    def lookup(self, relative_offset: int) -> tuple[int, int]:
        """The entry at or before the offset, where a search may start: (its offset, its position); (-1, 0) for none."""
        slot = bisect_right(self.offsets, relative_offset) - 1
        return (self.offsets[slot], self.positions[slot]) if slot >= 0 else (-1, 0)

    def floor(self, position: int) -> tuple[int, int]:
        """The last entry whose batch starts at or before `position`; (-1, 0) for none."""
        slot = bisect_right(self.positions, position) - 1
        return (self.offsets[slot], self.positions[slot]) if slot >= 0 else (-1, 0)

    def truncate(self, position: int) -> None:
        """Forget the batches that start at or after `position`."""
        slot = bisect_right(self.positions, position - 1) if position else 0
        del self.offsets[slot:]
        del self.positions[slot:]
        self.saved = min(self.saved, slot)

    def pack(self, start: int = 0) -> bytes:
        """The entries from `start` on, as they lie in the file."""
        count = len(self.offsets) - start
        entries = array("I", bytes(4 * 2 * count))
        entries[0::2] = self.offsets[start:]
        entries[1::2] = self.positions[start:]
        if _SWAP:
            entries.byteswap()
        return entries.tobytes()

    @classmethod
    def parse(cls, data: bytes, segment_bytes: int) -> OffsetIndex | None:
        """An index from its file, or None where the bytes cannot be the index of a segment of that size."""
        if len(data) % OFFSET_ENTRY_BYTES:
            return None
        entries = array("I")
        entries.frombytes(data)
        if _SWAP:
            entries.byteswap()
        index = cls()
        index.offsets = entries[0::2]
        index.positions = entries[1::2]
        index.saved = len(index.offsets)
        if index.offsets and (index.positions[-1] >= segment_bytes or index.offsets[-1] > 0x7FFFFFFF):
            return None
        return index


class TimeIndex:
    """Which offsets a timestamp can be at; offsets are relative to the segment's base."""

    __slots__ = ("offsets", "saved", "timestamps")

    def __init__(self) -> None:
        self.timestamps: array[int] = array("q")
        self.offsets: array[int] = array("I")
        self.saved = 0

    def __len__(self) -> int:
        return len(self.offsets)

    def maybe_append(self, timestamp_ms: int, relative_offset: int) -> None:
        """Add an entry, unless the timestamp says nothing new."""
        if timestamp_ms >= 0 and (not self.timestamps or timestamp_ms > self.timestamps[-1]):
            self.timestamps.append(timestamp_ms)
            self.offsets.append(relative_offset)

    def lookup(self, timestamp_ms: int) -> TimestampOffset | None:
        """The last entry before `timestamp_ms`, which may be found only behind it; None: from the start on."""
        slot = bisect_right(self.timestamps, timestamp_ms - 1) - 1
        return TimestampOffset(self.timestamps[slot], self.offsets[slot]) if slot >= 0 else None

    def last(self) -> TimestampOffset | None:
        if not self.timestamps:
            return None
        return TimestampOffset(self.timestamps[-1], self.offsets[-1])

    def truncate(self, relative_offset: int) -> None:
        """Forget the entries at or after an offset."""
        slot = bisect_right(self.offsets, relative_offset - 1) if relative_offset else 0
        del self.timestamps[slot:]
        del self.offsets[slot:]
        self.saved = min(self.saved, slot)

    def pack(self, start: int = 0) -> bytes:
        pack = TIME_ENTRY.pack
        return b"".join(map(pack, self.timestamps[start:], self.offsets[start:]))

    @classmethod
    def parse(cls, data: bytes) -> TimeIndex | None:
        if len(data) % TIME_ENTRY_BYTES:
            return None
        words = array("I")
        words.frombytes(data)
        halves = array("I", bytes(8 * (len(words) // 3)))
        if _SWAP:
            words.byteswap()
            halves[0::2], halves[1::2] = words[1::3], words[0::3]
        else:
            halves[0::2], halves[1::2] = words[0::3], words[1::3]
        index = cls()
        index.timestamps.frombytes(halves.tobytes())
        index.offsets = words[2::3]
        index.saved = len(index.offsets)
        if index.offsets and index.offsets[-1] > 0x7FFFFFFF:
            return None
        return index
