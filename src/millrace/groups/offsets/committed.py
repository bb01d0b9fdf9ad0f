"""Committed offsets: the map from group, topic and partition to an offset.

Pure: changes are applied by `group_offsets`, in the order of the log and only when they are durable, so that what is
here is what a replay of the log would give. Not here: when entries expire (`expiry`), the bytes (`records`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from millrace.errors import ErrorCode
from millrace.model import NO_EPOCH, NO_TIMESTAMP, ZERO_UUID

NO_OFFSET: Final = -1

Slot = tuple[str, int]
"""A topic and a partition."""
PartitionCheck = Callable[[UUID, int], ErrorCode]
"""Whether one partition of a commit is accepted."""


def accept(_topic_id: UUID, _partition: int) -> ErrorCode:
    """The check of a group that leaves its partitions to its members."""
    return ErrorCode.NONE


@dataclass(frozen=True, slots=True)
class OffsetToCommit:
    """One partition of an OffsetCommit."""

    topic: str
    partition: int
    topic_id: UUID
    offset: int
    leader_epoch: int
    metadata: str


@dataclass(frozen=True, slots=True)
class CommittedOffset:
    """One committed offset and what the client said with it."""

    offset: int
    leader_epoch: int = NO_EPOCH
    metadata: str = ""
    commit_timestamp_ms: int = NO_TIMESTAMP
    expire_timestamp_ms: int = NO_TIMESTAMP
    """Only where the client chose a retention of its own (OffsetCommit v2-4)."""
    topic_id: UUID = ZERO_UUID
    record_offset: int = NO_OFFSET
    """Where in the log the commit is."""

    def belongs_to(self, topic_id: UUID) -> bool:
        """Whether the commit was made for this incarnation of the topic, as far as both sides know."""
        return ZERO_UUID in {self.topic_id, topic_id} or self.topic_id == topic_id


TopicOffsets = Mapping[str, Mapping[int, CommittedOffset]]
_NOTHING: Final[TopicOffsets] = {}


class CommittedOffsets:
    """The offsets of every group of one shard. Owner: the shard."""

    __slots__ = ("_groups", "count")

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, dict[int, CommittedOffset]]] = {}
        self.count = 0

    def __repr__(self) -> str:
        return f"CommittedOffsets({self.count} of {len(self._groups)} groups)"

    def of_group(self, group_id: str) -> TopicOffsets:
        """Everything the group has committed, by topic and partition; a view, valid until the next change."""
        return self._groups.get(group_id, _NOTHING)

    def put(self, group_id: str, topic: str, partition: int, committed: CommittedOffset) -> None:
        partitions = self._groups.setdefault(group_id, {}).setdefault(topic, {})
        if partition not in partitions:
            self.count += 1
        partitions[partition] = committed

    def remove(self, group_id: str, topic: str, partition: int) -> None:
        """Forget one offset; an unknown one is fine."""
        topics = self._groups.get(group_id)
        partitions = topics.get(topic) if topics is not None else None
        if topics is None or partitions is None or partitions.pop(partition, None) is None:
            return
        self.count -= 1
        if not partitions:
            del topics[topic]
            if not topics:
                del self._groups[group_id]

    def of_topic(self, topic: str) -> Iterator[tuple[str, int, CommittedOffset]]:
        """Every group, partition and offset that mentions the topic."""
        for group_id, topics in self._groups.items():
            for partition, committed in topics.get(topic, {}).items():
                yield group_id, partition, committed
