"""Which share-partitions a group has, and what becomes of them: begun, begun anew at an offset, forgotten.

The share coordinator keeps what became of the records of a share-partition. It has to be told before a member may read
one, and when nobody needs it any more; the group keeps in the log what it has been told. Telling takes time and may
fail, so each change has two steps: the first says what is about to happen, the second what has. A coordinator that
finds only the first one in the log tells again, which does no harm.

Pure, as `protocol`. Not here: the telling (`groups`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final
from uuid import UUID

from millrace.cluster.image import TopicImage
from millrace.errors import ApiError, ErrorCode
from millrace.groups.environment import existing
from millrace.groups.share.group import ShareGroup
from millrace.groups.share.records import Begun, PartitionStates, PartitionStatesRecord, Topics
from millrace.groups.share.step import Partitions, ShareStep

RETRY_MS: Final = 30_000
"""After how long the share coordinator is told again of what it may not have heard."""


def begin_missing(step: ShareStep) -> None:
    """Have share-partitions begun that members subscribe to and that are not."""
    group, now_ms = step.group, step.env.now_ms
    states = group.partitions
    missing: dict[UUID, Begun] = {}
    for topic_id, topic in existing(group.topic_counts.keys(), step.env.image.topics).items():
        known = _partitions(states.initialized, topic_id)
        if len(known) >= len(topic.partitions):
            continue
        if now_ms - group.asked_ms.get(topic_id, -RETRY_MS) < RETRY_MS:
            known |= _partitions(states.initializing, topic_id)
        if left := frozenset(range(len(topic.partitions))) - known:
            missing[topic_id] = Begun(topic.name, left)
    if missing:
        _begin(step, missing)
        step.to_initialize = {topic_id: begun.partitions for topic_id, begun in missing.items()}


def _begin(step: ShareStep, topics: Topics) -> None:
    group = step.group
    states = group.partitions
    _write(
        step,
        replace(
            states,
            initializing=_union(states.initializing, topics),
            deleting={topic_id: name for topic_id, name in states.deleting.items() if topic_id not in topics},
        ),
    )
    group.asked_ms.update(dict.fromkeys(topics, step.env.now_ms))


def initialized(step: ShareStep, partitions: Partitions) -> None:
    """The share coordinator knows these, unless they were forgotten meanwhile: members may read them."""
    states = step.group.partitions
    begun = {
        topic_id: Begun(each.name, each.partitions & partitions[topic_id])
        for topic_id, each in states.initializing.items()
        if topic_id in partitions and each.partitions & partitions[topic_id]
    }
    _write(
        step,
        replace(
            states,
            initializing=_without(states.initializing, partitions),
            initialized=_union(states.initialized, begun),
        ),
    )


def not_initialized(step: ShareStep, partitions: Partitions) -> None:
    """The share coordinator could not be told of these: the next heartbeat tries again."""
    states = step.group.partitions
    _write(step, replace(states, initializing=_without(states.initializing, partitions)))


def forget_topics(step: ShareStep, topic_ids: Collection[UUID]) -> None:
    """Topics are gone; the share coordinator sees that by itself."""
    states = step.group.partitions
    gone = set(topic_ids)
    _write(
        step,
        PartitionStates(
            {topic_id: each for topic_id, each in states.initializing.items() if topic_id not in gone},
            {topic_id: each for topic_id, each in states.initialized.items() if topic_id not in gone},
            {topic_id: name for topic_id, name in states.deleting.items() if topic_id not in gone},
        ),
    )


# What an administrator asks for


def check_empty(group: ShareGroup) -> None:
    """ApiError NON_EMPTY_GROUP."""
    if group.members:
        raise ApiError(ErrorCode.NON_EMPTY_GROUP, f"group {group.group_id} has members")


def begin_anew(step: ShareStep, partitions: Partitions) -> None:
    """Offsets are being set: these are about to begin anew."""
    check_empty(step.group)
    topics = step.env.image.topics_by_id
    _begin(step, {topic_id: Begun(topics[topic_id].name, each) for topic_id, each in partitions.items()})


@dataclass(frozen=True, slots=True)
class Deletion:
    """What the share coordinator has to forget, and which names have nothing to be forgotten."""

    partitions: Partitions
    unknown: tuple[str, ...] = ()


def begin_deletion(step: ShareStep, names: Iterable[str]) -> Deletion:
    """Offsets of topics are being deleted."""
    group, image = step.group, step.env.image
    check_empty(group)
    states = group.partitions
    partitions: dict[UUID, frozenset[int]] = {}
    unknown = []
    deleting = dict(states.deleting)
    for name in dict.fromkeys(names):
        topic = image.topics.get(name)
        if topic is not None and topic.topic_id in states.initialized:
            partitions[topic.topic_id] = states.initialized[topic.topic_id].partitions
            deleting[topic.topic_id] = name
        elif topic is not None and topic.topic_id in states.deleting:
            partitions[topic.topic_id] = _all(topic)
        else:
            unknown.append(name)
    kept = {topic_id: each for topic_id, each in states.initialized.items() if topic_id not in partitions}
    _write(step, replace(states, initialized=kept, deleting=deleting))
    return Deletion(partitions, tuple(unknown))


def deleted(step: ShareStep, topic_ids: Collection[UUID]) -> None:
    """The share coordinator has forgotten these topics."""
    states = step.group.partitions
    kept = {topic_id: name for topic_id, name in states.deleting.items() if topic_id not in topic_ids}
    _write(step, replace(states, deleting=kept))


def begin_end(step: ShareStep) -> Partitions:
    """The group is being deleted: everything the share coordinator may know of it."""
    group = step.group
    check_empty(group)
    states = group.partitions
    topics = step.env.image.topics_by_id
    partitions: dict[UUID, frozenset[int]] = {}
    for topic_id in {*states.initializing, *states.initialized, *states.deleting}:
        topic = topics.get(topic_id)
        if topic is not None:
            known = _partitions(states.initializing, topic_id) | _partitions(states.initialized, topic_id)
            partitions[topic_id] = _all(topic) if topic_id in states.deleting else known
    _write(step, PartitionStates(deleting={topic_id: topics[topic_id].name for topic_id in partitions}))
    return partitions


# Inside


def _write(step: ShareStep, states: PartitionStates) -> None:
    if states != step.group.partitions:
        step.write(PartitionStatesRecord(step.group.group_id, states))


def _all(topic: TopicImage) -> frozenset[int]:
    return frozenset(range(len(topic.partitions)))


def _partitions(topics: Topics, topic_id: UUID) -> frozenset[int]:
    begun = topics.get(topic_id)
    return frozenset() if begun is None else begun.partitions


def _union(one: Topics, other: Topics) -> Topics:
    both = dict(one)
    for topic_id, begun in other.items():
        both[topic_id] = Begun(begun.name, _partitions(one, topic_id) | begun.partitions)
    return both


def _without(topics: Topics, gone: Mapping[UUID, frozenset[int]]) -> Topics:
    left = {
        topic_id: Begun(begun.name, begun.partitions - gone.get(topic_id, frozenset()))
        for topic_id, begun in topics.items()
    }
    return {topic_id: begun for topic_id, begun in left.items() if begun.partitions}
