"""The records of committed offsets in `__consumer_offsets`, in the format that Kafka writes and reads.

Kafka 4.3 writes commits at version 4, or at version 1 where the commit carries its own expiry, which later versions
cannot; every version is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from uuid import UUID

from millrace.groups.entries import make_key, make_value, read_key, read_value
from millrace.groups.offsets.committed import CommittedOffset
from millrace.model import NO_TIMESTAMP
from millrace.wire.schema import Data, int32, int64, string, uuid

LEGACY_OFFSET_COMMIT: Final = 0
OFFSET_COMMIT: Final = 1
"""Kinds of keys."""
_VERSION: Final = 4
_VERSION_WITH_EXPIRY: Final = 1


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


@dataclass(frozen=True, slots=True)
class OffsetRecord:
    """A commit (or, without a value, its removal) read from the log."""

    group_id: str
    topic: str
    partition: int
    value: CommittedOffset | None


def offset_key(group_id: str, topic: str, partition: int) -> bytes:
    """The key of a committed offset."""
    key = OffsetCommitKey(group=group_id, topic=topic, partition=partition)
    return make_key(OFFSET_COMMIT, key)


def offset_value(committed: CommittedOffset) -> bytes:
    """The value of a committed offset."""
    has_expiry = committed.expire_timestamp_ms != NO_TIMESTAMP
    version = _VERSION_WITH_EXPIRY if has_expiry else _VERSION
    value = OffsetCommitValue(
        offset=committed.offset,
        leader_epoch=committed.leader_epoch,
        metadata=committed.metadata,
        commit_timestamp=committed.commit_timestamp_ms,
        expire_timestamp=committed.expire_timestamp_ms,
        topic_id=committed.topic_id,
    )
    return make_value(value, version)


def read_offset(kind: int, key: bytes, value: bytes | None, record_offset: int) -> OffsetRecord | None:
    """What a record of this kind says, or None for a kind that is not ours; ProtocolError where it cannot be read."""
    if kind not in {LEGACY_OFFSET_COMMIT, OFFSET_COMMIT}:
        return None
    name = read_key(OffsetCommitKey, key)
    committed = read_value(OffsetCommitValue, value, lambda each: _read_offset(each, record_offset))
    return OffsetRecord(name.group, name.topic, name.partition, committed)


def _read_offset(value: OffsetCommitValue, record_offset: int) -> CommittedOffset:
    return CommittedOffset(
        offset=value.offset,
        leader_epoch=value.leader_epoch,
        metadata=value.metadata,
        commit_timestamp_ms=value.commit_timestamp,
        expire_timestamp_ms=value.expire_timestamp,
        topic_id=value.topic_id,
        record_offset=record_offset,
    )
