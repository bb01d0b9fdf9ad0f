"""Compares the replicas of a partition as they lie on disk: byte-equal batches and equal leader epochs.

Up to the high watermark only: what lies beyond is not committed and may differ. Batches are compared by their offsets,
not by their place in a file: segments may be cut at other offsets, and files may have a tail that was preallocated. A
replica that is not there at all differs from every other.

Replicas of a compacted topic are compacted each at its own time: of them the records are compared, but for those of
keys that may go.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Final

from millrace.records.batch import crc_matches
from millrace.records.decode import Record, iter_records

_HEAD: Final = struct.Struct(">qi")
_EPOCH: Final = struct.Struct(">i")
_DELTA_AT: Final = 23
_MIN_BYTES: Final = 61
EPOCHS_FILE: Final = "leader-epoch-checkpoint"


def batches(directory: Path) -> Iterator[tuple[int, int, bytes]]:
    """(base offset, next offset, bytes) of every batch in a partition's directory."""
    for path in sorted(directory.glob("*.log")):
        data = path.read_bytes()
        position = 0
        while position + _MIN_BYTES <= len(data):
            base, length = _HEAD.unpack_from(data, position)
            size = _HEAD.size + length
            if length <= 0 or position + size > len(data):
                break
            (delta,) = _EPOCH.unpack_from(data, position + _DELTA_AT)
            yield base, base + delta + 1, data[position : position + size]
            position += size


def epochs(directory: Path) -> list[tuple[int, int]]:
    """The (epoch, start offset) pairs of a partition's leader-epoch checkpoint."""
    lines = (directory / EPOCHS_FILE).read_text().split("\n")
    pairs = [line.split(" ") for line in lines[2:] if line]
    return [(int(epoch), int(start)) for epoch, start in pairs]


def vanished(name: str, directories: Mapping[int, Path | None], high_watermark: int) -> list[str]:
    """Which replicas have no log although something is committed; a log is made with its first record."""
    if not high_watermark:
        return []
    return [
        f"{name} of broker {broker_id} has vanished"
        for broker_id, path in directories.items()
        if path is None or not any(path.glob("*.log"))
    ]


def compare_compacted(directories: Mapping[int, Path], high_watermark: int, filler: bytes) -> list[str]:
    """As `compare`, of records instead of batches, and without those of the key `filler`."""
    records = {
        broker_id: {
            record.offset: (record.key, record.value)
            for _, _, data in batches(path)
            for record in _records(data)
            if record.offset < high_watermark and record.key != filler
        }
        for broker_id, path in directories.items()
    }
    first = min(directories)
    return [
        f"{directories[broker_id].name} of brokers {first} and {broker_id} differ at offset {min(offsets)}"
        for broker_id, found in records.items()
        if (
            offsets := [
                offset for offset in {*found, *records[first]} if found.get(offset) != records[first].get(offset)
            ]
        )
    ]


def _records(data: bytes) -> Iterator[Record]:
    if not crc_matches(data):
        return
    yield from iter_records(data)


def compare(directories: Mapping[int, Path], high_watermark: int) -> list[str]:
    """Where the replicas of one partition (by broker) differ below the high watermark; empty where they do not."""
    logs = {
        broker_id: [batch for batch in batches(path) if batch[0] < high_watermark]
        for broker_id, path in directories.items()
    }
    marks = {
        broker_id: [entry for entry in epochs(path) if entry[1] < high_watermark]
        for broker_id, path in directories.items()
    }
    first = min(directories)
    differences = []
    for broker_id, found in logs.items():
        name = directories[broker_id].name
        end = found[-1][1] if found else 0
        if end < high_watermark:
            differences.append(f"{name} of broker {broker_id} ends at {end}, before {high_watermark}")
        differences += [f"{name} of broker {broker_id}: {text}" for text in _gaps(found)]
        if found != logs[first]:
            differences.append(f"{name} of brokers {first} and {broker_id} differ at {_parting(logs[first], found)}")
        if marks[broker_id] != marks[first]:
            text = f"{name}: leader epochs of broker {first} {marks[first]}, of broker {broker_id} {marks[broker_id]}"
            differences.append(text)
    return differences


def _gaps(found: list[tuple[int, int, bytes]]) -> list[str]:
    """A log may begin anywhere, but nothing compacts here: each batch begins where the one before it ended."""
    return [f"offset {later[0]} follows {earlier[1]}" for earlier, later in pairwise(found) if later[0] != earlier[1]]


def _parting(one: list[tuple[int, int, bytes]], other: list[tuple[int, int, bytes]]) -> str:
    for mine, yours in zip(one, other, strict=False):
        if mine != yours:
            return f"offset {min(mine[0], yours[0])}"
    return f"their ends ({len(one)} and {len(other)} batches)"
