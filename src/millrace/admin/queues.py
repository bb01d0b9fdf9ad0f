"""Queues: the groups that read topics as queues (share groups), how far they are, moving, setting and deleting them.

A queue has no committed offset: its start offset says that everything before was done with, and what lies between
there and the end may be waiting, taken or done. Not here: reading from a queue (`client.queue`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from millrace.admin import configs
from millrace.admin.errors import AdminError
from millrace.admin.groups import (
    SHARE,
    GroupView,
    ListedGroup,
    Target,
    delete_group,
    end_offsets,
    list_groups,
    other_kind,
    shifts,
)
from millrace.admin.groups import share_group as read_share_group
from millrace.admin.topics import existing, offset_bounds
from millrace.client.cluster import ClusterClient, raise_for
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import ResourceType
from millrace.model import TopicPartition
from millrace.queues.dead_letters import TAKES_DEAD_LETTERS, unusable_reason
from millrace.queues.settings import DeadLetterSettings
from millrace.wire.messages.share_groups import (
    AlterShareGroupOffsetsRequest,
    AlterShareGroupOffsetsResponse,
    DescribeShareGroupOffsetsRequest,
    DescribeShareGroupOffsetsResponse,
    ShareGroupDescribeRequest,
)

DEAD_LETTERS: Final = "errors.deadletterqueue.topic.name"
DELIVERY_LIMIT: Final = "share.delivery.count.limit"
_LETTER_PREFIX: Final = "errors.deadletterqueue.topic.name.prefix"
_MAKES_LETTER_TOPICS: Final = "errors.deadletterqueue.auto.create.topics.enable"


@dataclass(frozen=True, slots=True)
class Position:
    """Where a queue is in a partition; None is what is not known, or has not begun."""

    start: int | None
    lag: int | None


@dataclass(frozen=True, slots=True)
class QueuePartition:
    """A partition as a queue reads it; None is what is not known, or has not begun."""

    place: TopicPartition
    start: int | None
    end: int | None
    lag: int | None
    members: int
    """How many read it: of a queue, many may."""


def list_queues(cluster: ClusterClient) -> list[ListedGroup]:
    """Every queue of the cluster, by name."""
    return [each for each in list_groups(cluster) if each.type == SHARE]


def describe_queue(cluster: ClusterClient, name: str) -> GroupView:
    """The queue; AdminError where there is none of this name, and says what there is instead."""
    request = ShareGroupDescribeRequest(group_ids=[name])
    try:
        return cluster.ask_coordinator(name, f"queue '{name}'", request, read_share_group)
    except ApiError as error:
        if error.code is not ErrorCode.GROUP_ID_NOT_FOUND:
            raise
        kind = other_kind(cluster, name)
        if kind is not None:
            raise AdminError(
                f"'{name}' is {kind}, and no queue", remedy=f"see: millrace groups describe {name}"
            ) from None
        raise AdminError(f"there is no queue '{name}'", remedy="see: millrace queues list") from None


def positions_of(cluster: ClusterClient, name: str) -> dict[TopicPartition, Position]:
    """Of every partition that the queue has taken up."""
    request = DescribeShareGroupOffsetsRequest(
        groups=[DescribeShareGroupOffsetsRequest.DescribeShareGroupOffsetsRequestGroup(group_id=name, topics=None)]
    )

    def read(response: DescribeShareGroupOffsetsResponse) -> dict[TopicPartition, Position]:
        (group,) = response.groups
        raise_for(group.error_code, group.error_message)
        found = {}
        for topic in group.topics:
            for each in topic.partitions:
                raise_for(each.error_code, each.error_message)
                start, lag = (None if value < 0 else value for value in (each.start_offset, each.lag))
                found[TopicPartition(topic.topic_name, each.partition_index)] = Position(start, lag)
        return found

    return cluster.ask_coordinator(name, f"offsets of queue '{name}'", request, read)


def read_partitions(cluster: ClusterClient, queue: GroupView) -> list[QueuePartition]:
    """Every partition that a queue has taken up or that somebody reads now, in their order."""
    positions = positions_of(cluster, queue.name)
    readers = Counter(each for member in queue.members for each in member.partitions)
    wanted = sorted(positions.keys() | readers.keys())
    ends = end_offsets(cluster, wanted)
    return [QueuePartition(each, *_told(positions, each, ends.get(each)), readers[each]) for each in wanted]


def _told(
    positions: Mapping[TopicPartition, Position], place: TopicPartition, end: int | None
) -> tuple[int | None, int | None, int | None]:
    position = positions.get(place, Position(None, None))
    return position.start, end, position.lag


# --- changing ---------------------------------------------------------------------------------------------------------


def plan_reset(cluster: ClusterClient, chosen: Iterable[TopicPartition], target: Target) -> dict[TopicPartition, int]:
    """The new start per partition, of those that still exist, always inside the log."""
    there = existing(cluster, chosen)
    bounds = offset_bounds(cluster, there)
    by_time = cluster.list_offsets(dict.fromkeys(there, target.time_ms)) if target.time_ms is not None else {}
    return {each.place: each.new for each in shifts(bounds, {}, target, by_time)}


def execute(cluster: ClusterClient, queue: GroupView, offsets: Mapping[TopicPartition, int]) -> None:
    """Move a queue: what lies after its new start is delivered, done before or not. AdminError while it has members."""
    if queue.state != "empty":
        raise AdminError(f"queue '{queue.name}' has running members: stop them first")
    _alter(cluster, queue.name, offsets)


def _alter(cluster: ClusterClient, name: str, offsets: Mapping[TopicPartition, int]) -> None:
    topics: dict[str, list[AlterShareGroupOffsetsRequest.AlterShareGroupOffsetsRequestPartition]] = {}
    for each, offset in sorted(offsets.items()):
        topics.setdefault(each.topic, []).append(
            AlterShareGroupOffsetsRequest.AlterShareGroupOffsetsRequestPartition(
                partition_index=each.partition, start_offset=offset
            )
        )
    request = AlterShareGroupOffsetsRequest(
        group_id=name,
        topics=[
            AlterShareGroupOffsetsRequest.AlterShareGroupOffsetsRequestTopic(topic_name=topic, partitions=partitions)
            for topic, partitions in topics.items()
        ],
    )

    def read(response: AlterShareGroupOffsetsResponse) -> None:
        raise_for(response.error_code, response.error_message)
        for topic in response.responses:
            for each in topic.partitions:
                raise_for(each.error_code, each.error_message)

    cluster.ask_coordinator(name, f"reset of queue '{name}'", request, read)


def change_settings(
    cluster: ClusterClient, name: str, to_set: Mapping[str, str], to_unset: Collection[str] = ()
) -> list[str]:
    """Set and unset; a queue may have settings before it is first read. The names that were not set.

    AdminError where the group is no queue, or its dead letters could not be written.
    """
    kind = other_kind(cluster, name)
    if kind is not None:
        raise AdminError(f"'{name}' is {kind}, and no queue", remedy=f"see: millrace configs set --group {name}")
    if to_set.get(DEAD_LETTERS):
        check_takes_dead_letters(cluster, to_set[DEAD_LETTERS])
    return configs.change(cluster, configs.group(name), to_set, to_unset)


def delete_queue(cluster: ClusterClient, name: str) -> None:
    """Delete a queue that nobody reads, with what became of its records; the records and the settings stay."""
    describe_queue(cluster, name)  # a consumer group of this name would be deleted as well
    try:
        delete_group(cluster, name)
    except ApiError as error:
        if error.code is ErrorCode.NON_EMPTY_GROUP:
            raise AdminError(f"queue '{name}' has running members: stop them first") from None
        raise


def dead_letter_topic(cluster: ClusterClient, name: str) -> str | None:
    """Where the queue sends what it gives up; None where that goes nowhere."""
    return configs.read_value(cluster, configs.group(name), DEAD_LETTERS) or None


def check_takes_dead_letters(cluster: ClusterClient, topic: str) -> None:
    """AdminError where letters could not be written: the queue would wait for that, and only brokers' logs tell."""
    exists = topic in cluster.topics([topic])
    takes = exists and configs.read_value(cluster, configs.topic(topic), TAKES_DEAD_LETTERS) == "true"
    rules = configs.read_all(cluster, configs.Resource(ResourceType.BROKER, str(cluster.broker_ids()[0])))
    if _LETTER_PREFIX not in rules:
        return  # a broker that knows no dead letters says so of the group's setting
    settings = DeadLetterSettings(
        name_prefix=rules[_LETTER_PREFIX].value or "", creates_topics=rules[_MAKES_LETTER_TOPICS].value == "true"
    )
    reason = unusable_reason(topic, source="", exists=exists, is_enabled=takes, settings=settings)
    if reason is None:
        return
    remedy = None
    if topic.startswith(settings.name_prefix):
        made = f"configs set {TAKES_DEAD_LETTERS}=true --topic {topic}"
        remedy = "see: millrace " + (made if exists else f"topics create {topic} --config {TAKES_DEAD_LETTERS}=true")
    raise AdminError(f"'{topic}' cannot take dead letters: {reason}", remedy=remedy)
