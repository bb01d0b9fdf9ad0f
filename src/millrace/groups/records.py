"""The records of `__consumer_offsets`, in the format that Kafka writes and reads.

A key begins with an int16 that says what the record is (0 and 1: an offset commit, 2: a classic group); a value begins
with an int16 version. A null value is a tombstone. Kafka 4.3 writes commits at version 4 (version 1 where the commit
carries its own expiry, which later versions cannot) and groups at version 4; every version is read. The records of
KIP-848 consumer groups are in `modern_records`, those of share groups in `share_records`; those of streams are passed
over.

What is not here: what the records mean together (`shard`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final
from uuid import UUID

from millrace.errors import ProtocolError
from millrace.groups.classic.effects import StoredGroup, StoredMember
from millrace.groups.modern.records import ModernRecord, read_entry
from millrace.groups.offsets.committed import CommittedOffset
from millrace.groups.share.records import ShareRecord, read_share_entry
from millrace.model import NO_TIMESTAMP
from millrace.wire.codec import decode, encode
from millrace.wire.schema import Data, Struct, array, binary, int32, int64, string, uuid

_PREFIX: Final = struct.Struct(">h")
_KEY_VERSION: Final = 0
_OFFSET_VERSION: Final = 4
_OFFSET_VERSION_WITH_EXPIRY: Final = 1
_GROUP_VERSION: Final = 4


class RecordKind(IntEnum):
    """The prefix of a key."""

    LEGACY_OFFSET_COMMIT = 0
    OFFSET_COMMIT = 1
    GROUP_METADATA = 2


class OffsetCommitKey(Data, versions="0"):
    """Names a committed offset."""

    group: str = string()
    topic: str = string()
    partition: int = int32()


class OffsetCommitValue(Data, versions="0-4", flexible="4+"):
    """A committed offset."""

    offset: int = int64()
    leader_epoch: int = int32("3+", default=-1, ignorable=True)
    metadata: str = string()
    commit_timestamp: int = int64()
    expire_timestamp: int = int64("1", default=-1, ignorable=True)
    topic_id: UUID = uuid("4+", tag=0, ignorable=True)


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
class OffsetRecord:
    """A commit (or, without a value, its removal) read from the log."""

    group_id: str
    topic: str
    partition: int
    value: CommittedOffset | None


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A group (or, without a value, its removal) read from the log."""

    group_id: str
    value: StoredGroup | None


def offset_key(group_id: str, topic: str, partition: int) -> bytes:
    """The key of a committed offset."""
    key = OffsetCommitKey(group=group_id, topic=topic, partition=partition)
    return _PREFIX.pack(RecordKind.OFFSET_COMMIT) + encode(key, _KEY_VERSION)


def offset_value(committed: CommittedOffset) -> bytes:
    """The value of a committed offset."""
    has_expiry = committed.expire_timestamp_ms != NO_TIMESTAMP
    version = _OFFSET_VERSION_WITH_EXPIRY if has_expiry else _OFFSET_VERSION
    value = OffsetCommitValue(
        offset=committed.offset,
        leader_epoch=committed.leader_epoch,
        metadata=committed.metadata,
        commit_timestamp=committed.commit_timestamp_ms,
        expire_timestamp=committed.expire_timestamp_ms,
        topic_id=committed.topic_id,
    )
    return _PREFIX.pack(version) + encode(value, version)


def group_key(group_id: str) -> bytes:
    """The key of a group."""
    return _PREFIX.pack(RecordKind.GROUP_METADATA) + encode(GroupMetadataKey(group=group_id), _KEY_VERSION)


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
    return _PREFIX.pack(_GROUP_VERSION) + encode(value, _GROUP_VERSION)


def group_entry(record: GroupRecord) -> tuple[bytes, bytes | None]:
    """The key and the value of a group's record."""
    return group_key(record.group_id), None if record.value is None else group_value(record.value)


def read_record(
    key: bytes, value: bytes | None, record_offset: int
) -> OffsetRecord | GroupRecord | ModernRecord | ShareRecord | None:
    """What a record says, or None for a kind that is not ours; ProtocolError where it cannot be read."""
    if len(key) < _PREFIX.size:
        raise ProtocolError("the key of a group record is too short to say what it is")
    (kind,) = _PREFIX.unpack_from(key)
    if kind in {RecordKind.LEGACY_OFFSET_COMMIT, RecordKind.OFFSET_COMMIT}:
        name, _ = decode(OffsetCommitKey, _KEY_VERSION, key, _PREFIX.size)
        committed = None if value is None else _read_offset(value, record_offset)
        return OffsetRecord(name.group, name.topic, name.partition, committed)
    if kind == RecordKind.GROUP_METADATA:
        group, _ = decode(GroupMetadataKey, _KEY_VERSION, key, _PREFIX.size)
        return GroupRecord(group.group, None if value is None else _read_group(value))
    return read_entry(kind, key, value) or read_share_entry(kind, key, value)


def _version(value: bytes) -> int:
    if len(value) < _PREFIX.size:
        raise ProtocolError("the value of a group record is too short to have a version")
    version: int = _PREFIX.unpack_from(value)[0]
    return version


def _read_offset(raw: bytes, record_offset: int) -> CommittedOffset:
    value, _ = decode(OffsetCommitValue, _version(raw), raw, _PREFIX.size)
    return CommittedOffset(
        offset=value.offset,
        leader_epoch=value.leader_epoch,
        metadata=value.metadata,
        commit_timestamp_ms=value.commit_timestamp,
        expire_timestamp_ms=value.expire_timestamp,
        topic_id=value.topic_id,
        record_offset=record_offset,
    )


def _read_group(raw: bytes) -> StoredGroup:
    value, _ = decode(GroupMetadataValue, _version(raw), raw, _PREFIX.size)
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
