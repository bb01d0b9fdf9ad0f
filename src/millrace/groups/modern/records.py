"""The records of KIP-848 consumer groups in `__consumer_offsets`: as values, and in the bytes that Kafka uses.

A record is a key with a value, or with None where the key is gone. Kinds 3 to 8 and 16 are ours; kind 4 (what a group
knew of its topics, up to Kafka 4.0) is only noticed, so that it can be removed. Not here: what records mean together
(`group`), commits and classic groups (`offsets.records`, `classic.records`).

Invariant: reading what was written gives the same value; a coordinator that loads the log has what the one had that
wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

from millrace.groups.classic.effects import Protocol
from millrace.groups.entries import GroupKey, MemberKey, group_of, make_entry, member_of, read_key, read_value
from millrace.groups.epochs import (
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
from millrace.wire.schema import Data, Struct, array, binary, int8, int32, int64, nested, string, uuid

Owned = Mapping[UUID, Mapping[int, int]]
"""Partitions by topic, each with the epoch in which the member got it: what a member owns. Never changed in place."""

NOTHING: Final[Owned] = MappingProxyType({})


class ModernKind(IntEnum):
    """The prefix of a key."""

    GROUP_EPOCH = 3
    TOPICS = 4
    MEMBER = 5
    TARGET_EPOCH = 6
    TARGET = 7
    HELD = 8
    PATTERN = 16


@dataclass(frozen=True, slots=True)
class ClassicInfo:
    """What is kept of a member that speaks the classic protocol."""

    session_timeout_ms: int
    protocols: tuple[Protocol, ...]


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """What a member has said about itself."""

    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    topics: tuple[str, ...] = ()
    """Sorted, each once."""
    pattern: str | None = None
    rebalance_timeout_ms: int = -1
    assignor: str | None = None
    classic: ClassicInfo | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """A member's epoch and what it owns; `revoking` it has been told to give up and has not yet said it did."""

    epoch: int = 0
    previous_epoch: int = -1
    state: MemberState = MemberState.STABLE
    assigned: Owned = field(default_factory=lambda: NOTHING)
    revoking: Owned = field(default_factory=lambda: NOTHING)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The topics that a pattern matched, at an index of the cluster image."""

    topics: tuple[str, ...]
    version: int
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class EpochRecord:
    group_id: str
    value: GroupEpoch | None


@dataclass(frozen=True, slots=True)
class TopicsRecord:
    """Of Kafka up to 4.0; `value` says only that it is there."""

    group_id: str
    value: bool | None


@dataclass(frozen=True, slots=True)
class MemberRecord:
    group_id: str
    member_id: str
    value: MemberInfo | None


@dataclass(frozen=True, slots=True)
class TargetEpochRecord:
    group_id: str
    value: TargetEpoch | None


@dataclass(frozen=True, slots=True)
class TargetRecord:
    group_id: str
    member_id: str
    value: Target | None


@dataclass(frozen=True, slots=True)
class HeldRecord:
    group_id: str
    member_id: str
    value: Held | None


@dataclass(frozen=True, slots=True)
class PatternRecord:
    group_id: str
    pattern: str
    value: Resolved | None


ModernRecord = EpochRecord | TopicsRecord | MemberRecord | TargetEpochRecord | TargetRecord | HeldRecord | PatternRecord


# The bytes


class _PatternKey(Data, versions="0"):
    """Kind 16: names a pattern."""

    group_id: str = string()
    regular_expression: str = string()


class _EpochValue(Data, versions="0", flexible="0+"):
    """Kind 3."""

    epoch: int = int32()
    metadata_hash: int = int64(tag=0)


class _MemberValue(Data, versions="0", flexible="0+"):
    """Kind 5."""

    class ClassicProtocol(Struct):
        name: str = string()
        metadata: bytes = binary()

    class ClassicMemberMetadata(Struct):
        session_timeout_ms: int = int32()
        supported_protocols: list[_MemberValue.ClassicProtocol] = array("ClassicProtocol")

    instance_id: str | None = string(nullable=True)
    rack_id: str | None = string(nullable=True)
    client_id: str = string()
    client_host: str = string()
    subscribed_topic_names: list[str] = array(string)
    subscribed_topic_regex: str | None = string(nullable=True)
    rebalance_timeout_ms: int = int32(default=-1)
    server_assignor: str | None = string(nullable=True)
    classic_member_metadata: ClassicMemberMetadata | None = nested(ClassicMemberMetadata, nullable=True, tag=0)


class _HeldValue(Data, versions="0", flexible="0+"):
    """Kind 8."""

    class TopicPartitions(Struct):
        topic_id: UUID = uuid()
        partitions: list[int] = array(int32)
        assignment_epochs: list[int] | None = array(int32, nullable=True, default=None, tag=0)

    member_epoch: int = int32()
    previous_member_epoch: int = int32()
    state: int = int8()
    assigned_partitions: list[TopicPartitions] = array(TopicPartitions)
    partitions_pending_revocation: list[TopicPartitions] = array(TopicPartitions)


class _PatternValue(Data, versions="0", flexible="0+"):
    """Kind 16."""

    topics: list[str] = array(string)
    version: int = int64()
    timestamp: int = int64()


def to_entry(record: ModernRecord) -> tuple[bytes, bytes | None]:
    """The key and the value of a record, for the log."""
    match record:
        case EpochRecord(group_id, epoch):
            return make_entry(ModernKind.GROUP_EPOCH, GroupKey(group_id=group_id), epoch, _epoch_value)
        case TopicsRecord(group_id):
            return make_entry(ModernKind.TOPICS, GroupKey(group_id=group_id), None, _epoch_value)
        case MemberRecord(group_id, member_id, info):
            return make_entry(ModernKind.MEMBER, MemberKey(group_id=group_id, member_id=member_id), info, _member_value)
        case TargetEpochRecord(group_id, target_epoch):
            return make_entry(ModernKind.TARGET_EPOCH, GroupKey(group_id=group_id), target_epoch, target_epoch_value)
        case TargetRecord(group_id, member_id, target):
            return make_entry(
                ModernKind.TARGET, MemberKey(group_id=group_id, member_id=member_id), target, target_value
            )
        case HeldRecord(group_id, member_id, held):
            return make_entry(ModernKind.HELD, MemberKey(group_id=group_id, member_id=member_id), held, _held_value)
        case PatternRecord(group_id, pattern, resolved):
            key = _PatternKey(group_id=group_id, regular_expression=pattern)
            return make_entry(ModernKind.PATTERN, key, resolved, _pattern_value)


def read_entry(kind: int, key: bytes, value: bytes | None) -> ModernRecord | None:
    """What a record of this kind says, or None for a kind that is not ours; ProtocolError where it cannot be read."""
    match kind:
        case ModernKind.GROUP_EPOCH:
            return EpochRecord(group_of(key), read_value(_EpochValue, value, _read_epoch))
        case ModernKind.TOPICS:
            return TopicsRecord(group_of(key), None if value is None else True)
        case ModernKind.MEMBER:
            return MemberRecord(*member_of(key), read_value(_MemberValue, value, _read_member))
        case ModernKind.TARGET_EPOCH:
            return TargetEpochRecord(group_of(key), read_value(TargetEpochValue, value, read_target_epoch))
        case ModernKind.TARGET:
            return TargetRecord(*member_of(key), read_value(TargetValue, value, read_target))
        case ModernKind.HELD:
            return HeldRecord(*member_of(key), read_value(_HeldValue, value, _read_held))
        case ModernKind.PATTERN:
            name = read_key(_PatternKey, key)
            return PatternRecord(
                name.group_id, name.regular_expression, read_value(_PatternValue, value, _read_pattern)
            )
    return None


def _epoch_value(epoch: GroupEpoch) -> _EpochValue:
    return _EpochValue(epoch=epoch.epoch, metadata_hash=epoch.metadata_hash)


def _read_epoch(value: _EpochValue) -> GroupEpoch:
    return GroupEpoch(value.epoch, value.metadata_hash)


def _pattern_value(resolved: Resolved) -> _PatternValue:
    return _PatternValue(topics=list(resolved.topics), version=resolved.version, timestamp=resolved.timestamp_ms)


def _read_pattern(value: _PatternValue) -> Resolved:
    return Resolved(tuple(sorted(set(value.topics))), value.version, value.timestamp)


def _member_value(info: MemberInfo) -> _MemberValue:
    classic = None
    if info.classic is not None:
        classic = _MemberValue.ClassicMemberMetadata(
            session_timeout_ms=info.classic.session_timeout_ms,
            supported_protocols=[
                _MemberValue.ClassicProtocol(name=each.name, metadata=each.metadata) for each in info.classic.protocols
            ],
        )
    return _MemberValue(
        instance_id=info.instance_id,
        rack_id=info.rack_id,
        client_id=info.client_id,
        client_host=info.client_host,
        subscribed_topic_names=list(info.topics),
        subscribed_topic_regex=info.pattern,
        rebalance_timeout_ms=info.rebalance_timeout_ms,
        server_assignor=info.assignor,
        classic_member_metadata=classic,
    )


def _read_member(value: _MemberValue) -> MemberInfo:
    classic = None
    if value.classic_member_metadata is not None:
        classic = ClassicInfo(
            value.classic_member_metadata.session_timeout_ms,
            tuple(
                Protocol(each.name, bytes(each.metadata)) for each in value.classic_member_metadata.supported_protocols
            ),
        )
    return MemberInfo(
        instance_id=value.instance_id,
        rack_id=value.rack_id,
        client_id=value.client_id,
        client_host=value.client_host,
        topics=tuple(sorted(set(value.subscribed_topic_names))),
        # Kafka writes an empty pattern for none.
        pattern=value.subscribed_topic_regex or None,
        rebalance_timeout_ms=value.rebalance_timeout_ms,
        assignor=value.server_assignor,
        classic=classic,
    )


def _held_value(held: Held) -> _HeldValue:
    return _HeldValue(
        member_epoch=held.epoch,
        previous_member_epoch=held.previous_epoch,
        state=held.state,
        assigned_partitions=_owned_value(held.assigned),
        partitions_pending_revocation=_owned_value(held.revoking),
    )


def _owned_value(owned: Owned) -> list[_HeldValue.TopicPartitions]:
    return [
        _HeldValue.TopicPartitions(
            topic_id=topic_id, partitions=list(partitions), assignment_epochs=list(partitions.values())
        )
        for topic_id, partitions in owned.items()
    ]


def _read_held(value: _HeldValue) -> Held:
    try:
        state = MemberState(value.state)
    except ValueError:
        state = MemberState.UNKNOWN
    return Held(
        value.member_epoch,
        value.previous_member_epoch,
        state,
        _read_owned(value.assigned_partitions),
        _read_owned(value.partitions_pending_revocation),
    )


def _read_owned(topics: list[Any]) -> Owned:
    owned: dict[UUID, dict[int, int]] = {}
    for each in topics:
        # Before Kafka 4.2 there were no epochs: whatever the member commits is taken.
        epochs = each.assignment_epochs
        if epochs is None or len(epochs) != len(each.partitions):
            epochs = [0] * len(each.partitions)
        if each.partitions:
            owned[each.topic_id] = dict(zip(each.partitions, epochs, strict=True))
    return owned
