"""Offsets that transactions have committed and that are not visible yet, because the transactions are open.

Pure: changes are applied by `group_offsets`, in the order of the log. By producer for the markers, which name nobody
else; by group for whoever reads or removes offsets.
"""

from __future__ import annotations

from collections.abc import Iterator, KeysView
from typing import Final, NamedTuple

from millrace.groups.offsets.committed import CommittedOffset, Slot

_NOTHING: Final[dict[Slot, set[int]]] = {}


class Place(NamedTuple):
    """A partition of a group."""

    group_id: str
    topic: str
    partition: int


class PendingOffsets:
    """The offsets of the open transactions of one shard. Owner: the shard."""

    __slots__ = ("_groups", "_producers")

    def __init__(self) -> None:
        self._producers: dict[int, dict[Place, CommittedOffset]] = {}
        self._groups: dict[str, dict[Slot, set[int]]] = {}
        """The producers that have a pending offset, by group, topic and partition."""

    def __repr__(self) -> str:
        return f"<pending offsets of {len(self._producers)} producers>"

    def of_group(self, group_id: str) -> KeysView[Slot]:
        """The partitions of which the group has a pending offset; a view, valid until the next change."""
        return self._groups.get(group_id, _NOTHING).keys()

    def of_topic(self, topic: str) -> Iterator[tuple[str, int, CommittedOffset]]:
        """Every group, partition and pending offset that mentions the topic."""
        for written in self._producers.values():
            for place, committed in written.items():
                if place.topic == topic:
                    yield place.group_id, place.partition, committed

    def put(self, producer_id: int, place: Place, committed: CommittedOffset) -> None:
        """An offset of the producer's transaction; it takes the place of an earlier one of the same transaction."""
        self._producers.setdefault(producer_id, {})[place] = committed
        slots = self._groups.setdefault(place.group_id, {})
        slots.setdefault((place.topic, place.partition), set()).add(producer_id)

    def withdraw(self, place: Place) -> None:
        """Forget what any transaction has committed for a partition."""
        slots = self._groups.get(place.group_id, _NOTHING)
        for producer_id in tuple(slots.get((place.topic, place.partition), ())):
            self._forget(producer_id, place)

    def end(self, producer_id: int, below_offset: int) -> list[tuple[Place, CommittedOffset]]:
        """Take out what the producer's transaction has committed by records below its marker."""
        ended = [
            (place, committed)
            for place, committed in self._producers.get(producer_id, {}).items()
            if committed.record_offset < below_offset
        ]
        for place, _ in ended:
            self._forget(producer_id, place)
        return ended

    def _forget(self, producer_id: int, place: Place) -> None:
        written = self._producers[producer_id]
        del written[place]
        if not written:
            del self._producers[producer_id]
        slot = (place.topic, place.partition)
        slots = self._groups[place.group_id]
        slots[slot].remove(producer_id)
        if not slots[slot]:
            del slots[slot]
            if not slots:
                del self._groups[place.group_id]
