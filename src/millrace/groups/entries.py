"""How keys and values of `__consumer_offsets` begin, and what the records of several kinds of groups have in common.

A key begins with an int16 that says what the record is, a value with an int16 that is its version. A null value is a
tombstone. Not here: which kinds there are (`records` of each folder).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, TypeVar

from millrace.errors import ProtocolError
from millrace.wire.codec import decode, encode
from millrace.wire.schema import Data, string

_PREFIX: Final = struct.Struct(">h")
_VERSION: Final = 0

D = TypeVar("D", bound=Data)
V = TypeVar("V")


class GroupKey(Data, versions="0"):
    """Names a group."""

    group_id: str = string()


class MemberKey(Data, versions="0"):
    """Names a member."""

    group_id: str = string()
    member_id: str = string()


def kind_of(key: bytes) -> int:
    """What a record is; ProtocolError where its key does not say."""
    if len(key) < _PREFIX.size:
        raise ProtocolError("the key of a group record is too short to say what it is")
    kind: int = _PREFIX.unpack_from(key)[0]
    return kind


def make_key(kind: int, key: Data) -> bytes:
    return _PREFIX.pack(kind) + encode(key, _VERSION)


def make_value(value: Data, version: int = _VERSION) -> bytes:
    return _PREFIX.pack(version) + encode(value, version)


def make_entry(kind: int, key: Data, value: V | None, write: Callable[[V], Data]) -> tuple[bytes, bytes | None]:
    return make_key(kind, key), None if value is None else make_value(write(value))


def read_key(kind: type[D], key: bytes) -> D:
    name, _ = decode(kind, _VERSION, key, _PREFIX.size)
    return name


def read_value(kind: type[D], raw: bytes | None, read: Callable[[D], V]) -> V | None:
    if raw is None:
        return None
    if len(raw) < _PREFIX.size:
        raise ProtocolError("the value of a group record is too short to have a version")
    version: int = _PREFIX.unpack_from(raw)[0]
    value, _ = decode(kind, version, raw, _PREFIX.size)
    return read(value)


def group_of(key: bytes) -> str:
    return read_key(GroupKey, key).group_id


def member_of(key: bytes) -> tuple[str, str]:
    name = read_key(MemberKey, key)
    return name.group_id, name.member_id
