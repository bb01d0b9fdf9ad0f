"""The records of `__share_group_state`, in the format that Kafka writes and reads.

A key begins with an int16 that says what the record is (0: a snapshot, 1: an update since the last snapshot); a value
begins with an int16 version. A snapshot without a value says that the share-partition is gone. The topic is not
compacted: updates build on each other, and what snapshots made superfluous is cut off at the start of the log.

What is not here: what the records mean together (`state`).
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple
from uuid import UUID

from millrace.errors import ProtocolError
from millrace.queues.batches import RecordState, StateBatch
from millrace.wire.codec import decode, encode
from millrace.wire.schema import Data, Struct, array, int8, int16, int32, int64, string, uuid

_PREFIX: Final = struct.Struct(">h")
_KEY_VERSION: Final = 0
_VALUE_VERSION: Final = 0


class RecordKind(IntEnum):
    """The prefix of a key."""

    SNAPSHOT = 0
    UPDATE = 1


class ShareKey(NamedTuple):
    """A partition as one share group reads it."""

    group_id: str
    topic_id: UUID
    partition: int

    def __str__(self) -> str:
        """As a client names it to find its coordinator; the topic id in Kafka's base64."""
        topic_id = base64.urlsafe_b64encode(self.topic_id.bytes).decode().rstrip("=")
        return f"{self.group_id}:{topic_id}:{self.partition}"

    @classmethod
    def parse(cls, text: str) -> ShareKey:
        """The key that `str` made; ValueError. A group id may have colons of its own."""
        group_id, topic_id, partition = text.rsplit(":", 2)
        if not group_id.strip():
            raise ValueError("the group id is empty")
        return cls(group_id, UUID(bytes=base64.urlsafe_b64decode(topic_id + "==")), int(partition))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything about a share-partition."""

    snapshot_epoch: int
    state_epoch: int
    leader_epoch: int
    start_offset: int
    completed: int
    created_ms: int
    written_ms: int
    batches: tuple[StateBatch, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """What changed since the snapshot with the same epoch; -1 for what did not."""

    snapshot_epoch: int
    leader_epoch: int
    start_offset: int
    completed: int
    batches: tuple[StateBatch, ...]


class ShareSnapshotKey(Data, versions="0"):
    """Names a snapshot."""

    group_id: str = string()
    topic_id: UUID = uuid()
    partition: int = int32()


class ShareSnapshotValue(Data, versions="0", flexible="0+"):
    """A snapshot."""

    class StateBatch(Struct):
        first_offset: int = int64()
        last_offset: int = int64()
        delivery_state: int = int8()
        delivery_count: int = int16()

    snapshot_epoch: int = int32()
    state_epoch: int = int32()
    leader_epoch: int = int32()
    start_offset: int = int64()
    delivery_complete_count: int = int32("0+", tag=0, default=-1)
    create_timestamp: int = int64()
    write_timestamp: int = int64()
    state_batches: list[StateBatch] = array(StateBatch)


class ShareUpdateKey(Data, versions="0"):
    """Names an update."""

    group_id: str = string()
    topic_id: UUID = uuid()
    partition: int = int32()


class ShareUpdateValue(Data, versions="0", flexible="0+"):
    """An update."""

    class StateBatch(Struct):
        first_offset: int = int64()
        last_offset: int = int64()
        delivery_state: int = int8()
        delivery_count: int = int16()

    snapshot_epoch: int = int32()
    leader_epoch: int = int32()
    start_offset: int = int64()
    delivery_complete_count: int = int32("0+", tag=0, default=-1)
    state_batches: list[StateBatch] = array(StateBatch)


def entry(key: ShareKey, value: Snapshot | Update | None) -> tuple[bytes, bytes | None]:
    """Key and value of a record; None: the share-partition is gone."""
    if isinstance(value, Update):
        name = ShareUpdateKey(group_id=key.group_id, topic_id=key.topic_id, partition=key.partition)
        return _PREFIX.pack(RecordKind.UPDATE) + encode(name, _KEY_VERSION), _update_value(value)
    snapshot = ShareSnapshotKey(group_id=key.group_id, topic_id=key.topic_id, partition=key.partition)
    raw_key = _PREFIX.pack(RecordKind.SNAPSHOT) + encode(snapshot, _KEY_VERSION)
    return raw_key, None if value is None else _snapshot_value(value)


def read_record(key: bytes, value: bytes | None) -> tuple[ShareKey, Snapshot | Update | None] | None:
    """What a record says, or None for a kind that is not known; ProtocolError where it cannot be read."""
    if len(key) < _PREFIX.size:
        raise ProtocolError("the key of a share-state record is too short to say what it is")
    (kind,) = _PREFIX.unpack_from(key)
    if kind == RecordKind.SNAPSHOT:
        name, _ = decode(ShareSnapshotKey, _KEY_VERSION, key, _PREFIX.size)
        share_key = ShareKey(name.group_id, name.topic_id, name.partition)
        return share_key, None if value is None else _read_snapshot(value)
    if kind == RecordKind.UPDATE and value is not None:
        update, _ = decode(ShareUpdateKey, _KEY_VERSION, key, _PREFIX.size)
        return ShareKey(update.group_id, update.topic_id, update.partition), _read_update(value)
    return None


def _snapshot_value(snapshot: Snapshot) -> bytes:
    value = ShareSnapshotValue(
        snapshot_epoch=snapshot.snapshot_epoch,
        state_epoch=snapshot.state_epoch,
        leader_epoch=snapshot.leader_epoch,
        start_offset=snapshot.start_offset,
        delivery_complete_count=snapshot.completed,
        create_timestamp=snapshot.created_ms,
        write_timestamp=snapshot.written_ms,
        state_batches=[
            ShareSnapshotValue.StateBatch(
                first_offset=batch.first_offset,
                last_offset=batch.last_offset,
                delivery_state=batch.state,
                delivery_count=batch.delivery_count,
            )
            for batch in snapshot.batches
        ],
    )
    return _PREFIX.pack(_VALUE_VERSION) + encode(value, _VALUE_VERSION)


def _update_value(update: Update) -> bytes:
    value = ShareUpdateValue(
        snapshot_epoch=update.snapshot_epoch,
        leader_epoch=update.leader_epoch,
        start_offset=update.start_offset,
        delivery_complete_count=update.completed,
        state_batches=[
            ShareUpdateValue.StateBatch(
                first_offset=batch.first_offset,
                last_offset=batch.last_offset,
                delivery_state=batch.state,
                delivery_count=batch.delivery_count,
            )
            for batch in update.batches
        ],
    )
    return _PREFIX.pack(_VALUE_VERSION) + encode(value, _VALUE_VERSION)


def _version(value: bytes) -> int:
    if len(value) < _PREFIX.size:
        raise ProtocolError("the value of a share-state record is too short to have a version")
    version: int = _PREFIX.unpack_from(value)[0]
    return version


def _read_snapshot(raw: bytes) -> Snapshot:
    value, _ = decode(ShareSnapshotValue, _version(raw), raw, _PREFIX.size)
    return Snapshot(
        snapshot_epoch=value.snapshot_epoch,
        state_epoch=value.state_epoch,
        leader_epoch=value.leader_epoch,
        start_offset=value.start_offset,
        completed=value.delivery_complete_count,
        created_ms=value.create_timestamp,
        written_ms=value.write_timestamp,
        batches=_batches(value.state_batches),
    )


def _read_update(raw: bytes) -> Update:
    value, _ = decode(ShareUpdateValue, _version(raw), raw, _PREFIX.size)
    return Update(
        snapshot_epoch=value.snapshot_epoch,
        leader_epoch=value.leader_epoch,
        start_offset=value.start_offset,
        completed=value.delivery_complete_count,
        batches=_batches(value.state_batches),
    )


def _batches(
    stored: Iterable[ShareSnapshotValue.StateBatch] | Iterable[ShareUpdateValue.StateBatch],
) -> tuple[StateBatch, ...]:
    try:
        return tuple(
            StateBatch(each.first_offset, each.last_offset, RecordState(each.delivery_state), each.delivery_count)
            for each in stored
        )
    except ValueError as error:
        raise ProtocolError(f"a share-state record has a state nobody knows: {error}") from error
