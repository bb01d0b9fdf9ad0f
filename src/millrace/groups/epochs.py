"""Epochs and targets, the same in KIP-848 and in share groups: as values, and in the bytes that Kafka uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Final
from uuid import UUID

from millrace.wire.schema import Data, Struct, array, int32, int64, uuid

Target = Mapping[UUID, tuple[int, ...]]
"""Partitions by topic, ascending: what a member is to own."""
NO_TARGET: Final[Target] = MappingProxyType({})


class MemberState(IntEnum):
    """How far a member has got on its way to its target."""

    STABLE = 0
    UNREVOKED_PARTITIONS = 1
    """It must give partitions up before it gets others."""
    UNRELEASED_PARTITIONS = 2
    """Partitions of its target are still with others."""
    UNKNOWN = 127
    """Written by a newer coordinator: the member must begin anew."""


@dataclass(frozen=True, slots=True)
class GroupEpoch:
    """Which members and topics there are, as a number that grows."""

    epoch: int
    metadata_hash: int = 0


@dataclass(frozen=True, slots=True)
class TargetEpoch:
    """The group epoch for which the targets were computed, and when."""

    epoch: int
    timestamp_ms: int = 0


NO_EPOCH_YET: Final = GroupEpoch(0)
NO_TARGET_YET: Final = TargetEpoch(-1)


# The bytes


class TargetEpochValue(Data, versions="0", flexible="0+"):
    """Kind 6."""

    assignment_epoch: int = int32()
    assignment_timestamp: int = int64(tag=0, ignorable=True)


class TargetValue(Data, versions="0", flexible="0+"):
    """Kind 7."""

    class TopicPartition(Struct):
        topic_id: UUID = uuid()
        partitions: list[int] = array(int32)

    topic_partitions: list[TopicPartition] = array(TopicPartition)


def target_epoch_value(target: TargetEpoch) -> TargetEpochValue:
    return TargetEpochValue(assignment_epoch=target.epoch, assignment_timestamp=target.timestamp_ms)


def read_target_epoch(value: TargetEpochValue) -> TargetEpoch:
    return TargetEpoch(value.assignment_epoch, value.assignment_timestamp)


def target_value(target: Target) -> TargetValue:
    return TargetValue(
        topic_partitions=[
            TargetValue.TopicPartition(topic_id=topic_id, partitions=list(partitions))
            for topic_id, partitions in target.items()
        ]
    )


def read_target(value: TargetValue) -> Target:
    return {each.topic_id: tuple(sorted(set(each.partitions))) for each in value.topic_partitions if each.partitions}
