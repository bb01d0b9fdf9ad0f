"""What the decisions of KIP-848 and share groups depend on besides the group, and what both answer to a heartbeat."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final
from uuid import UUID

from millrace.cluster.image import ClusterImage, TopicImage
from millrace.groups.settings import GroupSettings, GroupTimes

JOINING: Final = 0
"""The epoch of a heartbeat of a member that is not in the group yet."""
LEAVING: Final = -1


@dataclass(frozen=True, slots=True)
class Environment:
    """What a decision depends on besides the group."""

    image: ClusterImage
    settings: GroupSettings
    times: GroupTimes
    now_ms: int


@dataclass(frozen=True, slots=True)
class HeartbeatResult:
    """The answer; an assignment of None means that the member's has not changed."""

    member_id: str
    epoch: int
    interval_ms: int = 0
    assignment: tuple[tuple[UUID, tuple[int, ...]], ...] | None = None


def topics_hash(names: AbstractSet[str], image: ClusterImage) -> int:
    """A number that changes when one of these topics comes, goes, is made anew or gets partitions.

    Kafka's differs, and also changes when replicas move between racks. Nothing moves for that alone here.
    """
    digest = blake2b(digest_size=8)
    known = 0
    for name in sorted(names):
        topic = image.topics.get(name)
        if topic is not None:
            known += 1
            digest.update(topic.topic_id.bytes)
            digest.update(len(topic.partitions).to_bytes(4, "big"))
    return int.from_bytes(digest.digest(), "big", signed=True) if known else 0


def existing(names: AbstractSet[str], topics: Mapping[str, TopicImage]) -> dict[UUID, TopicImage]:
    """The topics of these names that there are, by id."""
    found: dict[UUID, TopicImage] = {}
    for name in names:
        topic = topics.get(name)
        if topic is not None:
            found[topic.topic_id] = topic
    return found
