"""Offsets that transactions have committed and that are not visible yet, because the transactions are open.

Pure: changes are applied by `group_offsets`, in the order of the log. By producer for the markers, which name nobody
else; by group for whoever reads or removes offsets.
"""

from __future__ import annotations

from collections.abc import Iterator, KeysView
from typing import Final, NamedTuple

from millrace.groups.offsets.committed import CommittedOffset, Slot

_NOTHING: Final[dict[Slot, set[int]]] = {}


class GroupPartition(NamedTuple):
    """A partition, as one group commits offsets of it."""

    group_id: str
    topic: str
    partition: int


class PendingOffsets:
    """The offsets of the open transactions of one shard. Owner: the shard."""

    __slots__ = ("_groups", "_producers")

    def __init__(self) -> None:
        self._producers: dict[int, dict[GroupPartition, CommittedOffset]] = {}
        self._groups: dict[str, dict[Slot, set[int]]] = {}
        """The producers that have a pending offset, by group, topic and partition."""

    def __repr__(self) -> str:
        return f"PendingOffsets({len(self._producers)} producers)"

    def of_group(self, group_id: str) -> KeysView[Slot]:
        """The partitions of which the group has a pending offset; a view, valid until the next change."""
        return self._groups.get(group_id, _NOTHING).keys()

    def of_topic(self, topic: str) -> Iterator[tuple[str, int, CommittedOffset]]:
        """Every group, partition and pending offset that mentions the topic."""
        for written in self._producers.values():
            for key, committed in written.items():
                if key.topic == topic:
                    yield key.group_id, key.partition, committed

    def put(self, producer_id: int, key: GroupPartition, committed: CommittedOffset) -> None:
        """An offset of the producer's transaction; it takes the place of an earlier one of the same transaction."""
        self._producers.setdefault(producer_id, {})[key] = committed
        slots = self._groups.setdefault(key.group_id, {})
        slots.setdefault((key.topic, key.partition), set()).add(producer_id)

    def withdraw(self, key: GroupPartition) -> None:
        """Forget what any transaction has committed for a partition."""
        slots = self._groups.get(key.group_id, _NOTHING)
        for producer_id in tuple(slots.get((key.topic, key.partition), ())):
            self._forget(producer_id, key)

    def end(self, producer_id: int, below_offset: int) -> list[tuple[GroupPartition, CommittedOffset]]:
        """Take out what the producer's transaction has committed by records below its marker."""
        ended = [
            (key, committed)
            for key, committed in self._producers.get(producer_id, {}).items()
            if committed.record_offset < below_offset
        ]
        for key, _ in ended:
            self._forget(producer_id, key)
        return ended

    def _forget(self, producer_id: int, key: GroupPartition) -> None:
        written = self._producers[producer_id]
        del written[key]
        if not written:
            del self._producers[producer_id]
        slot = (key.topic, key.partition)
        slots = self._groups[key.group_id]
        slots[slot].remove(producer_id)
        if not slots[slot]:
            del slots[slot]
            if not slots:
                del self._groups[key.group_id]
