"""Reading until something is true, with a deadline instead of sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable

from clients.adapters.interface import Partition, Reader, Received

DEADLINE_S = 30.0


def read_until(
    reader: Reader, enough: Callable[[list[Received]], bool], deadline_s: float = DEADLINE_S
) -> list[Received]:
    """Poll until `enough` says so; fails with what was read when it never does."""
    received: list[Received] = []
    ends_at = time.monotonic() + deadline_s
    while not enough(received):
        if time.monotonic() > ends_at:
            raise AssertionError(f"only {len(received)} records within {deadline_s} s: {received[-3:]}")
        received += reader.poll(1.0)
    return received


def read_count(reader: Reader, count: int) -> list[Received]:
    """Exactly so many records: one more than expected is a failure too."""
    received = read_until(reader, lambda so_far: len(so_far) >= count)
    assert len(received) == count
    return received


def read_all(reader: Reader, partitions: list[Partition]) -> list[Received]:
    """Everything from the first to the last record as of now."""
    reader.assign(partitions)
    ends = {one: reader.bounds(one) for one in partitions}
    for one, (first, _) in ends.items():
        reader.seek(one, first) if first else None
    return read_count(reader, sum(end - first for first, end in ends.values()))
