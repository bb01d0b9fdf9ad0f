"""What a broker reads and writes of the embedded protocol of classic consumers.

Member metadata and assignments belong to the clients. Of a classic group a broker reads only which topics its members
subscribe to. Where classic consumers are in a KIP-848 group it reads whole subscriptions and writes assignments, as a
leader among the clients would. Each of these begins with an int16 version; unknown newer versions begin like the newest
known one.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from millrace.errors import ProtocolError
from millrace.wire.codec import decode, encode
from millrace.wire.schema import Data, Struct, array, binary, int32, string

CONSUMER_PROTOCOL_TYPE: Final = "consumer"
_LENGTH_BYTES: Final = 2
_PREFIX: Final = struct.Struct(">h")
_NEWEST: Final = 3


class Subscription(Data, versions="0-3"):
    """What a consumer tells the leader when it joins."""

    class TopicPartition(Struct):
        topic: str = string("1+")
        partitions: list[int] = array(int32, "1+")

    topics: list[str] = array(string)
    user_data: bytes | None = binary(nullable=True, default=None)
    owned_partitions: list[TopicPartition] = array(TopicPartition, "1+", ignorable=True)
    generation_id: int = int32("2+", default=-1, ignorable=True)
    rack_id: str | None = string("3+", nullable="3+", default=None, ignorable=True)


class Assignment(Data, versions="0-3"):
    """What the leader gives a consumer."""

    class TopicPartition(Struct):
        topic: str = string()
        partitions: list[int] = array(int32)

    assigned_partitions: list[TopicPartition] = array(TopicPartition)
    user_data: bytes | None = binary(nullable=True, default=None)


D = TypeVar("D", bound=Data)


def read_subscription(metadata: bytes) -> Subscription:
    """The whole subscription; ProtocolError where the bytes are not one."""
    return _read(Subscription, metadata)


def read_assignment(assignment: bytes) -> Assignment:
    """The whole assignment; ProtocolError where the bytes are not one."""
    return _read(Assignment, assignment)


def write_assignment(partitions: Mapping[str, Sequence[int]], metadata: bytes) -> bytes:
    """An assignment in the version of the subscription `metadata`."""
    version = _version(metadata)
    assignment = Assignment(
        assigned_partitions=[
            Assignment.TopicPartition(topic=topic, partitions=sorted(indices))
            for topic, indices in sorted(partitions.items())
        ]
    )
    return _PREFIX.pack(version) + encode(assignment, version)


def _version(raw: bytes) -> int:
    if len(raw) < _PREFIX.size:
        raise ProtocolError("too short to have a version")
    version: int = _PREFIX.unpack_from(raw)[0]
    if version < 0:
        raise ProtocolError(f"version {version}")
    return min(version, _NEWEST)


def _read(kind: type[D], raw: bytes) -> D:
    value, _ = decode(kind, _version(raw), raw, _PREFIX.size)
    return value


def subscribed_topics(metadata: bytes) -> list[str] | None:
    """The topics of one subscription, or None where the bytes are not one: every version begins with them."""
    try:
        version, count = struct.unpack_from(">hi", metadata, 0)
        position = 6
        # A name takes two bytes at the least, so a count that cannot fit is refused before anything is read.
        if version < 0 or count < 0 or count * _LENGTH_BYTES > len(metadata) - position:
            return None
        topics = []
        for _ in range(count):
            (length,) = struct.unpack_from(">h", metadata, position)
            position += _LENGTH_BYTES
            if length < 0 or position + length > len(metadata):
                return None
            topics.append(metadata[position : position + length].decode())
            position += length
    except (struct.error, UnicodeDecodeError):
        return None
    return topics
