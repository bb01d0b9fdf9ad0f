"""The record of a classic group in `__consumer_offsets`, in the format that Kafka writes and reads.

Kafka 4.3 writes groups at version 4; every version is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from millrace.groups.classic.effects import StoredGroup, StoredMember
from millrace.groups.entries import make_key, make_value, read_key, read_value
from millrace.wire.schema import Data, Struct, array, binary, int32, int64, string

GROUP_METADATA: Final = 2
"""The kind of its key."""
_GROUP_VERSION: Final = 4


class GroupMetadataKey(Data, versions="0"):
    """Names a classic group."""

    group: str = string()


class GroupMetadataValue(Data, versions="0-4", flexible="4+"):
    """A classic group at the end of a rebalance."""

    class MemberMetadata(Struct):
        member_id: str = string()
        group_instance_id: str | None = string("3+", nullable=True, default=None, ignorable=True)
        client_id: str = string()
        client_host: str = string()
        rebalance_timeout: int = int32("1+", default=-1, ignorable=True)
        session_timeout: int = int32()
        subscription: bytes = binary()
        assignment: bytes = binary()

    protocol_type: str = string()
    generation: int = int32()
    protocol: str | None = string(nullable=True)
    leader: str | None = string(nullable=True)
    current_state_timestamp: int = int64("2+", default=-1, ignorable=True)
    members: list[MemberMetadata] = array(MemberMetadata)


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A group (or, without a value, its removal) read from the log."""

    group_id: str
    value: StoredGroup | None


def group_key(group_id: str) -> bytes:
    """The key of a group."""
    return make_key(GROUP_METADATA, GroupMetadataKey(group=group_id))


def group_value(group: StoredGroup) -> bytes:
    """The value of a group."""
    value = GroupMetadataValue(
        protocol_type=group.protocol_type,
        generation=group.generation,
        protocol=group.protocol_name,
        leader=group.leader,
        current_state_timestamp=group.state_timestamp_ms,
        members=[
            GroupMetadataValue.MemberMetadata(
                member_id=member.member_id,
                group_instance_id=member.instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                rebalance_timeout=member.rebalance_timeout_ms,
                session_timeout=member.session_timeout_ms,
                subscription=member.subscription,
                assignment=member.assignment,
            )
            for member in group.members
        ],
    )
    return make_value(value, _GROUP_VERSION)


def group_entry(record: GroupRecord) -> tuple[bytes, bytes | None]:
    """The key and the value of a group's record."""
    return group_key(record.group_id), None if record.value is None else group_value(record.value)


def read_group(kind: int, key: bytes, value: bytes | None) -> GroupRecord | None:
    """What a record of this kind says, or None for a kind that is not ours; ProtocolError where it cannot be read."""
    if kind != GROUP_METADATA:
        return None
    return GroupRecord(read_key(GroupMetadataKey, key).group, read_value(GroupMetadataValue, value, _read_group))


def _read_group(value: GroupMetadataValue) -> StoredGroup:
    return StoredGroup(
        protocol_type=value.protocol_type,
        generation=value.generation,
        protocol_name=value.protocol,
        leader=value.leader,
        state_timestamp_ms=value.current_state_timestamp,
        members=tuple(
            StoredMember(
                member_id=member.member_id,
                instance_id=member.group_instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                rebalance_timeout_ms=member.rebalance_timeout,
                session_timeout_ms=member.session_timeout,
                subscription=member.subscription,
                assignment=member.assignment,
            )
            for member in value.members
        ),
    )
