"""What consumers put into the opaque bytes of JoinGroup and SyncGroup.

A version number (int16) stands before each of them; newer versions only add fields, so a reader takes the newest
version it knows and leaves the rest of the bytes alone.
"""

from __future__ import annotations

from millrace.wire.schema import Data, Struct, array, binary, int32, string


class ConsumerProtocolSubscription(Data, versions="0-3"):
    """What a member subscribes to and owns; the metadata of JoinGroup for protocol type `consumer`."""

    class TopicPartition(Struct):
        topic: str = string("1+")
        partitions: list[int] = array(int32, "1+")

    topics: list[str] = array(string)
    user_data: bytes | None = binary(nullable=True, default=None)
    owned_partitions: list[TopicPartition] = array(TopicPartition, "1+", ignorable=True)
    generation_id: int = int32("2+", default=-1, ignorable=True)
    rack_id: str | None = string("3+", nullable=True, default=None, ignorable=True)


class ConsumerProtocolAssignment(Data, versions="0-3"):
    """The partitions of one member; the assignment of SyncGroup for protocol type `consumer`."""

    class TopicPartition(Struct):
        topic: str = string()
        partitions: list[int] = array(int32)

    assigned_partitions: list[TopicPartition] = array(TopicPartition)
    user_data: bytes | None = binary(nullable=True, default=None)
