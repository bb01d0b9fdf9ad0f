"""The records of share groups (KIP-932) in `__consumer_offsets`: as values, and in the bytes that Kafka uses.

A record is a key with a value, or with None where the key is gone. Kinds 10 to 15 are ours. Epochs and targets are the
same values as those of KIP-848 groups. Not here: what records mean together (`group`), what became of the records
of a share-partition (`queues.records`).

Invariant: reading what was written gives the same value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Final
from uuid import UUID

from millrace.groups.entries import GroupKey, MemberKey, group_of, make_entry, member_of, read_value
from millrace.groups.epochs import (
    NO_TARGET,
    GroupEpoch,
    MemberState,
    Target,
    TargetEpoch,
    TargetEpochValue,
    TargetValue,
    read_target,
    read_target_epoch,
    target_epoch_value,
    target_value,
)
from millrace.wire.schema import Data, Struct, array, int8, int32, int64, string, uuid


class ShareKind(IntEnum):
    """The prefix of a key."""

    MEMBER = 10
    GROUP_EPOCH = 11
    TARGET_EPOCH = 12
    TARGET = 13
    HELD = 14
    PARTITION_STATES = 15


@dataclass(frozen=True, slots=True)
class ShareInfo:
    """What a member has said about itself."""

    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    topics: tuple[str, ...] = ()
    """Sorted, each once."""


@dataclass(frozen=True, slots=True)
class ShareHeld:
    """A member's epoch and the partitions it was told to read; others may read them as well."""

    epoch: int = 0
    previous_epoch: int = -1
    assigned: Target = field(default_factory=lambda: NO_TARGET)


@dataclass(frozen=True, slots=True)
class Begun:
    """Partitions of one topic."""

    name: str
    partitions: frozenset[int]


Topics = Mapping[UUID, Begun]
NO_TOPICS: Final[Topics] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PartitionStates:
    """Which share-partitions of a group the share coordinator knows. The maps are never changed in place."""

    initializing: Topics = field(default_factory=lambda: NO_TOPICS)
    """It is being told of these, or was told and the answer is not known."""
    initialized: Topics = field(default_factory=lambda: NO_TOPICS)
    """It knows these: members may read them."""
    deleting: Mapping[UUID, str] = field(default_factory=lambda: MappingProxyType({}))
    """It is being told to forget these topics, here with their names."""


@dataclass(frozen=True, slots=True)
class ShareEpochRecord:
    group_id: str
    value: GroupEpoch | None


@dataclass(frozen=True, slots=True)
class ShareMemberRecord:
    group_id: str
    member_id: str
    value: ShareInfo | None


@dataclass(frozen=True, slots=True)
class ShareTargetEpochRecord:
    group_id: str
    value: TargetEpoch | None


@dataclass(frozen=True, slots=True)
class ShareTargetRecord:
    group_id: str
    member_id: str
    value: Target | None


@dataclass(frozen=True, slots=True)
class ShareHeldRecord:
    group_id: str
    member_id: str
    value: ShareHeld | None


@dataclass(frozen=True, slots=True)
class PartitionStatesRecord:
    group_id: str
    value: PartitionStates | None


ShareRecord = (
    ShareEpochRecord
    | ShareMemberRecord
    | ShareTargetEpochRecord
    | ShareTargetRecord
    | ShareHeldRecord
    | PartitionStatesRecord
)


# The bytes


class _EpochValue(Data, versions="0", flexible="0+"):
    """Kind 11."""

    epoch: int = int32()
    metadata_hash: int = int64()


class _MemberValue(Data, versions="0", flexible="0+"):
    """Kind 10."""

    rack_id: str | None = string(nullable=True)
    client_id: str = string()
    client_host: str = string()
    subscribed_topic_names: list[str] = array(string)


class _HeldValue(Data, versions="0", flexible="0+"):
    """Kind 14."""

    class TopicPartitions(Struct):
        topic_id: UUID = uuid()
        partitions: list[int] = array(int32)

    member_epoch: int = int32()
    previous_member_epoch: int = int32()
    state: int = int8()
    assigned_partitions: list[TopicPartitions] = array(TopicPartitions)


class _PartitionStatesValue(Data, versions="0", flexible="0+"):
    """Kind 15."""

    class TopicPartitionsInfo(Struct):
        topic_id: UUID = uuid()
        topic_name: str = string()
        partitions: list[int] = array(int32)

    class TopicInfo(Struct):
        topic_id: UUID = uuid()
        topic_name: str = string()

    initializing_topics: list[TopicPartitionsInfo] = array(TopicPartitionsInfo)
    initialized_topics: list[TopicPartitionsInfo] = array(TopicPartitionsInfo)
    deleting_topics: list[TopicInfo] = array(TopicInfo)


def share_entry(record: ShareRecord) -> tuple[bytes, bytes | None]:
    """The key and the value of a record, for the log."""
    match record:
        case ShareMemberRecord(group_id, member_id, info):
            return make_entry(ShareKind.MEMBER, MemberKey(group_id=group_id, member_id=member_id), info, _member_value)
        case ShareEpochRecord(group_id, epoch):
            return make_entry(ShareKind.GROUP_EPOCH, GroupKey(group_id=group_id), epoch, _epoch_value)
        case ShareTargetEpochRecord(group_id, target_epoch):
            return make_entry(ShareKind.TARGET_EPOCH, GroupKey(group_id=group_id), target_epoch, target_epoch_value)
        case ShareTargetRecord(group_id, member_id, target):
            return make_entry(ShareKind.TARGET, MemberKey(group_id=group_id, member_id=member_id), target, target_value)
        case ShareHeldRecord(group_id, member_id, held):
            return make_entry(ShareKind.HELD, MemberKey(group_id=group_id, member_id=member_id), held, _held_value)
        case PartitionStatesRecord(group_id, states):
            return make_entry(ShareKind.PARTITION_STATES, GroupKey(group_id=group_id), states, _states_value)


def read_share_entry(kind: int, key: bytes, value: bytes | None) -> ShareRecord | None:
    """What a record of this kind says, or None for a kind that is not ours; ProtocolError where it cannot be read."""
    match kind:
        case ShareKind.MEMBER:
            return ShareMemberRecord(*member_of(key), read_value(_MemberValue, value, _read_member))
        case ShareKind.GROUP_EPOCH:
            return ShareEpochRecord(group_of(key), read_value(_EpochValue, value, _read_epoch))
        case ShareKind.TARGET_EPOCH:
            return ShareTargetEpochRecord(group_of(key), read_value(TargetEpochValue, value, read_target_epoch))
        case ShareKind.TARGET:
            return ShareTargetRecord(*member_of(key), read_value(TargetValue, value, read_target))
        case ShareKind.HELD:
            return ShareHeldRecord(*member_of(key), read_value(_HeldValue, value, _read_held))
        case ShareKind.PARTITION_STATES:
            return PartitionStatesRecord(group_of(key), read_value(_PartitionStatesValue, value, _read_states))
    return None


def _epoch_value(epoch: GroupEpoch) -> _EpochValue:
    return _EpochValue(epoch=epoch.epoch, metadata_hash=epoch.metadata_hash)


def _read_epoch(value: _EpochValue) -> GroupEpoch:
    return GroupEpoch(value.epoch, value.metadata_hash)


def _member_value(info: ShareInfo) -> _MemberValue:
    return _MemberValue(
        rack_id=info.rack_id,
        client_id=info.client_id,
        client_host=info.client_host,
        subscribed_topic_names=list(info.topics),
    )


def _read_member(value: _MemberValue) -> ShareInfo:
    return ShareInfo(
        rack_id=value.rack_id,
        client_id=value.client_id,
        client_host=value.client_host,
        topics=tuple(sorted(set(value.subscribed_topic_names))),
    )


def _held_value(held: ShareHeld) -> _HeldValue:
    return _HeldValue(
        member_epoch=held.epoch,
        previous_member_epoch=held.previous_epoch,
        # Nobody has to wait for anybody: a member has what it was given.
        state=MemberState.STABLE,
        assigned_partitions=[
            _HeldValue.TopicPartitions(topic_id=topic_id, partitions=list(partitions))
            for topic_id, partitions in held.assigned.items()
        ],
    )


def _read_held(value: _HeldValue) -> ShareHeld:
    assigned = {each.topic_id: tuple(sorted(set(each.partitions))) for each in value.assigned_partitions}
    return ShareHeld(value.member_epoch, value.previous_member_epoch, {k: v for k, v in assigned.items() if v})


def _states_value(states: PartitionStates) -> _PartitionStatesValue:
    return _PartitionStatesValue(
        initializing_topics=_topics_value(states.initializing),
        initialized_topics=_topics_value(states.initialized),
        deleting_topics=[
            _PartitionStatesValue.TopicInfo(topic_id=topic_id, topic_name=name)
            for topic_id, name in states.deleting.items()
        ],
    )


def _topics_value(topics: Topics) -> list[_PartitionStatesValue.TopicPartitionsInfo]:
    return [
        _PartitionStatesValue.TopicPartitionsInfo(
            topic_id=topic_id, topic_name=begun.name, partitions=sorted(begun.partitions)
        )
        for topic_id, begun in topics.items()
    ]


def _read_states(value: _PartitionStatesValue) -> PartitionStates:
    return PartitionStates(
        _read_topics(value.initializing_topics),
        _read_topics(value.initialized_topics),
        {each.topic_id: each.topic_name for each in value.deleting_topics},
    )


def _read_topics(topics: Iterable[_PartitionStatesValue.TopicPartitionsInfo]) -> Topics:
    return {each.topic_id: Begun(each.topic_name, frozenset(each.partitions)) for each in topics if each.partitions}
