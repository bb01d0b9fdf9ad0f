"""The hash by which Kafka's Java client gives a key its partition."""

from __future__ import annotations

from typing import Final

_SEED: Final = 0x9747B28C
_FACTOR: Final = 0x5BD1E995
_MASK: Final = 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """The 32-bit murmur2 of Kafka's Java client, as an unsigned number."""
    state = _SEED ^ len(data)
    whole = len(data) & ~3
    for pos in range(0, whole, 4):
        word = int.from_bytes(data[pos : pos + 4], "little") * _FACTOR & _MASK
        word = (word ^ word >> 24) * _FACTOR & _MASK
        state = (state * _FACTOR & _MASK) ^ word
    if whole != len(data):
        state = (state ^ int.from_bytes(data[whole:], "little")) * _FACTOR & _MASK
    state = (state ^ state >> 13) * _FACTOR & _MASK
    return state ^ state >> 15


def partition_of(key: bytes, partition_count: int) -> int:
    """Where the Java client puts a record with this key."""
    return (murmur2(key) & 0x7FFFFFFF) % partition_count
