"""The index files: Kafka's bytes, lookups, damage."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.storage.index import OffsetIndex, TimeIndex, TimestampOffset


def test_bytes_are_kafkas() -> None:
    offsets = OffsetIndex()
    offsets.append(9, 4200)
    offsets.append(20, 9000)
    assert offsets.pack() == struct.pack(">iiii", 9, 4200, 20, 9000)
    assert offsets.pack(1) == struct.pack(">ii", 20, 9000)
    times = TimeIndex()
    times.maybe_append(1_700_000_000_000, 9)
    times.maybe_append(1_700_000_000_000, 12)
    times.maybe_append(-1, 13)
    times.maybe_append(1_700_000_000_001, 20)
    assert times.pack() == struct.pack(">qiqi", 1_700_000_000_000, 9, 1_700_000_000_001, 20)


@given(st.sets(st.integers(0, 2**31 - 1), min_size=1, max_size=50), st.integers(0, 2**31 - 1))
def test_offset_lookup(values: set[int], target: int) -> None:
    index = OffsetIndex()
    for slot, value in enumerate(sorted(values)):
        index.append(value, slot * 100)
    below = [value for value in sorted(values) if value <= target]
    expected = (below[-1], (len(below) - 1) * 100) if below else (-1, 0)
    again = OffsetIndex.parse(index.pack(), 10**6)
    assert again is not None and again.saved == len(index)
    assert index.lookup(target) == again.lookup(target) == expected
    assert index.floor(150) == ((sorted(values)[1], 100) if len(values) > 1 else (min(values), 0))


@given(st.sets(st.integers(0, 2**62), min_size=1, max_size=50), st.integers(0, 2**62))
def test_time_lookup(values: set[int], target: int) -> None:
    index = TimeIndex()
    for slot, value in enumerate(sorted(values)):
        index.maybe_append(value, slot)
    below = [value for value in sorted(values) if value < target]
    expected = TimestampOffset(below[-1], len(below) - 1) if below else None
    again = TimeIndex.parse(index.pack())
    assert again is not None
    assert index.lookup(target) == again.lookup(target) == expected
    assert again.last() == index.last() == TimestampOffset(max(values), len(values) - 1)


def test_truncation() -> None:
    offsets, times = OffsetIndex(), TimeIndex()
    for i in range(10):
        offsets.append(i * 10, i * 100)
        times.maybe_append(i * 1000, i * 10)
    offsets.saved = times.saved = 10
    offsets.truncate(501)
    times.truncate(50)
    assert (len(offsets), len(times), offsets.saved, times.saved) == (6, 5, 6, 5)
    offsets.truncate(0)
    times.truncate(0)
    assert (len(offsets), len(times)) == (0, 0)
    assert times.last() is None and offsets.lookup(5) == (-1, 0)


@pytest.mark.parametrize("size", [1, 7, 9, 15])
def test_torn_files_are_refused(size: int) -> None:
    assert OffsetIndex.parse(bytes(size), 1000) is None
    assert TimeIndex.parse(bytes(size)) is None


def test_ends_that_cannot_be_are_refused() -> None:
    assert OffsetIndex.parse(struct.pack(">ii", 5, 1000), 1000) is None
    assert OffsetIndex.parse(struct.pack(">iI", -5, 10), 1000) is None
    assert TimeIndex.parse(struct.pack(">qi", 5, -1)) is None
    assert OffsetIndex.parse(b"", 0) is not None
