"""State batches: ranges of offsets with what became of them, as the share coordinator keeps and sends them.

Pure. A range says state and delivery count; where two ranges overlap, the one that is further on counts: the higher
delivery count, and at the same count the higher state. So it does not matter in which order writes arrive.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple


class RecordState(IntEnum):
    """What became of a record; the number is what is stored. Acquired is never stored: a lock ends with its leader."""

    AVAILABLE = 0
    ACQUIRED = 1
    ACKNOWLEDGED = 2
    ARCHIVING = 3
    """On its way to the dead-letter topic (KIP-1191)."""
    ARCHIVED = 4

    @property
    def is_terminal(self) -> bool:
        return self is RecordState.ACKNOWLEDGED or self is RecordState.ARCHIVED


class StateBatch(NamedTuple):
    """A range of offsets, both ends included, that share a state and a delivery count."""

    first_offset: int
    last_offset: int
    state: RecordState
    delivery_count: int


def combine(so_far: Sequence[StateBatch], new: Iterable[StateBatch], start_offset: int) -> list[StateBatch]:
    """`so_far` (sorted, without overlaps) with `new` laid over it, and nothing below `start_offset` (-1: keep all)."""
    result = list(so_far)
    for batch in new:
        _lay_over(result, batch)
    if start_offset >= 0:
        result = [
            batch if batch.first_offset >= start_offset else batch._replace(first_offset=start_offset)
            for batch in result
            if batch.last_offset >= start_offset
        ]
    return join(result)


def join(batches: Iterable[StateBatch]) -> list[StateBatch]:
    """Sorted batches with neighbours of the same kind made one."""
    joined: list[StateBatch] = []
    for batch in batches:
        if joined:
            before = joined[-1]
            if before.last_offset + 1 == batch.first_offset and before[2:] == batch[2:]:
                joined[-1] = before._replace(last_offset=batch.last_offset)
                continue
        joined.append(batch)
    return joined


def _lay_over(result: list[StateBatch], batch: StateBatch) -> None:
    begin = bisect_left(result, batch.first_offset, key=_last_offset)
    end = begin
    pieces: list[StateBatch] = []
    position = batch.first_offset
    while end < len(result) and result[end].first_offset <= batch.last_offset:
        old = result[end]
        end += 1
        if old.first_offset < batch.first_offset:
            pieces.append(old._replace(last_offset=batch.first_offset - 1))
        elif old.first_offset > position:
            pieces.append(batch._replace(first_offset=position, last_offset=old.first_offset - 1))
        first, last = max(old.first_offset, batch.first_offset), min(old.last_offset, batch.last_offset)
        pieces.append(_further(old, batch)._replace(first_offset=first, last_offset=last))
        if old.last_offset > batch.last_offset:
            pieces.append(old._replace(first_offset=batch.last_offset + 1))
        position = last + 1
    if position <= batch.last_offset:
        pieces.append(batch._replace(first_offset=position))
    result[begin:end] = pieces


def _last_offset(batch: StateBatch) -> int:
    return batch.last_offset


def _further(old: StateBatch, new: StateBatch) -> StateBatch:
    return old if (old.delivery_count, old.state) > (new.delivery_count, new.state) else new
