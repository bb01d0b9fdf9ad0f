"""Committed offsets: the map from group, topic and partition to an offset, and the rules by which entries expire.

Pure: changes are applied by the shard, in the order of the log and only when they are durable, so that what is here is
what a replay of the log would give. Not here: the bytes (`records`), and offsets of transactions, which are not served
yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from millrace.groups.classic.group import ClassicGroup, GroupState
from millrace.model import NO_EPOCH, NO_TIMESTAMP, ZERO_UUID

NO_OFFSET: Final = -1


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
        return f"<{self.count} committed offsets of {len(self._groups)} groups>"

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


def expired_by_commit(
    is_subscribed_to: Callable[[str], bool], offsets: TopicOffsets, now_ms: int, retention_ms: int
) -> list[tuple[str, int]]:
    """Which offsets of a KIP-848 group have outlived their retention: those of topics that nobody subscribes to."""
    return [
        (topic, partition)
        for topic, partitions in offsets.items()
        if not is_subscribed_to(topic)
        for partition, committed in partitions.items()
        if now_ms >= _expiry_ms(committed, committed.commit_timestamp_ms, retention_ms)
    ]


def _expiry_ms(committed: CommittedOffset, base_ms: int, retention_ms: int) -> int:
    if committed.expire_timestamp_ms != NO_TIMESTAMP:
        return committed.expire_timestamp_ms
    return base_ms + retention_ms


def expired(group: ClassicGroup, offsets: TopicOffsets, now_ms: int, retention_ms: int) -> list[tuple[str, int]]:
    """Which of a group's offsets have outlived their retention (KIP-211).

    A group with members keeps the offsets of the topics they subscribe to; what it no longer subscribes to expires by
    its commit. An empty group's offsets expire together, counted from when it became empty; those of a simple group
    (which never had members) by their commit. A commit with an expiry of its own obeys that.
    """
    is_simple = group.protocol_type is None
    is_empty = group.state is GroupState.EMPTY
    knows_topics = group.subscribed_topics is not None and group.uses_consumer_protocol
    if not (is_simple or is_empty or (group.state is GroupState.STABLE and knows_topics)):
        return []
    since_empty = is_empty and not is_simple and group.state_timestamp_ms != NO_TIMESTAMP
    gone = []
    for topic, partitions in offsets.items():
        if group.is_subscribed_to(topic):
            continue
        for partition, committed in partitions.items():
            base_ms = group.state_timestamp_ms if since_empty else committed.commit_timestamp_ms
            if now_ms >= _expiry_ms(committed, base_ms, retention_ms):
                gone.append((topic, partition))
    return gone
