"""The smallest pieces of the protocol's byte layout, shared by the generated codecs and by hand-written readers.

Messages are not here, and neither is the reading of fixed-width numbers, which the generated code does with `struct`
in place. Every function that reads raises `ProtocolError` (or `IndexError`, which the codec's entry points translate)
on malformed input, and none of them allocates memory by a number that the peer declared.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from millrace.errors import ProtocolError

Buffer = bytes | bytearray | memoryview

# One message part carries at most this many tagged fields. Kafka defines no more than a handful anywhere, and a flood
# of two-byte unknown fields is a known attack (CVE-2026-111115).
MAX_TAGGED_FIELDS: Final = 64

# What all arrays of one request may hold together. An element of two bytes becomes an object of sixty, so the size of
# the frame alone would not bound memory.
MAX_REQUEST_ELEMENTS: Final = 1 << 16

MAX_STRING_BYTES: Final = 0x7FFF

_UUID_CACHE_ENTRIES: Final = 8192
_uuids: dict[bytes, UUID] = {}


def uuid_of(raw: bytes) -> UUID:
    """The UUID of 16 bytes; topic ids repeat in every request, so recent ones are kept, a bounded number of them."""
    found = _uuids.get(raw)
    if found is None:
        if len(_uuids) >= _UUID_CACHE_ENTRIES:
            _uuids.clear()
        found = _uuids[raw] = UUID(bytes=raw)
    return found


def read_uvarint(buffer: Buffer, pos: int) -> tuple[int, int]:
    """An unsigned varint of at most five bytes and 32 bits, and the position after it."""
    byte = buffer[pos]
    if byte < 0x80:
        return byte, pos + 1
    value = byte & 0x7F
    shift = 7
    for at in range(pos + 1, pos + 5):
        byte = buffer[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value > 0xFFFFFFFF:
                break
            return value, at + 1
        shift += 7
    raise ProtocolError("a varint is longer than 32 bits")


def read_uvarlong(buffer: Buffer, pos: int) -> tuple[int, int]:
    """An unsigned varint of at most ten bytes and 64 bits, and the position after it."""
    value = 0
    shift = 0
    for at in range(pos, pos + 10):
        byte = buffer[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value > 0xFFFFFFFFFFFFFFFF:
                break
            return value, at + 1
        shift += 7
    raise ProtocolError("a varint is longer than 64 bits")


def read_varint(buffer: Buffer, pos: int) -> tuple[int, int]:
    """A zigzag-coded 32-bit number and the position after it."""
    value, pos = read_uvarint(buffer, pos)
    return (value >> 1) ^ -(value & 1), pos


def read_varlong(buffer: Buffer, pos: int) -> tuple[int, int]:
    """A zigzag-coded 64-bit number and the position after it."""
    value, pos = read_uvarlong(buffer, pos)
    return (value >> 1) ^ -(value & 1), pos


def uvarint(value: int) -> bytes:
    """The unsigned varint of a number that is not negative."""
    if value < 0:
        raise ValueError(f"{value} is negative and cannot be an unsigned varint")
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def varint(value: int) -> bytes:
    """The zigzag varint of a number of up to 64 bits."""
    return uvarint((value << 1) ^ (value >> 63))


# The compact length prefix (length + 1) of everything short; `compact_length` serves the rest.
COMPACT_LENGTHS: Final = tuple(uvarint(length + 1) for length in range(256))


def compact_length(length: int) -> bytes:
    """The length prefix of compact bytes and arrays."""
    return COMPACT_LENGTHS[length] if length < 256 else uvarint(length + 1)


def compact_string_length(length: int) -> bytes:
    """The length prefix of a compact string, which may not be longer than the old two-byte prefix could say."""
    if length > MAX_STRING_BYTES:
        raise ValueError(f"a string of {length} bytes is longer than {MAX_STRING_BYTES}")
    return COMPACT_LENGTHS[length] if length < 256 else uvarint(length + 1)


def read_tag_count(buffer: Buffer, pos: int) -> tuple[int, int]:
    """How many tagged fields follow, refused above the limit."""
    count, pos = read_uvarint(buffer, pos)
    if count > MAX_TAGGED_FIELDS:
        raise ProtocolError(f"{count} tagged fields in one place, at most {MAX_TAGGED_FIELDS} are read")
    return count, pos


def read_tag(buffer: Buffer, pos: int, end: int, last: int) -> tuple[int, int, int]:
    """One tagged field's header: its tag, where its value starts and where it stops. Tags rise strictly."""
    tag, pos = read_uvarint(buffer, pos)
    if tag <= last:
        raise ProtocolError(f"tagged field {tag} follows {last}: tags must rise")
    size, pos = read_uvarint(buffer, pos)
    if size > end - pos:
        raise ProtocolError(f"tagged field {tag} declares {size} bytes, {end - pos} remain")
    return tag, pos, pos + size


def skip_tags(buffer: Buffer, pos: int, end: int) -> int:
    """Pass over a section of tagged fields without keeping any of it; the position after it."""
    count, pos = read_tag_count(buffer, pos)
    last = -1
    for _ in range(count):
        last, _, pos = read_tag(buffer, pos, end, last)
    return pos


def tagged_section(fields: list[tuple[int, bytes]]) -> bytes:
    """The bytes of a section of tagged fields, given in rising order of their tags."""
    parts = [uvarint(len(fields))]
    for tag, value in fields:
        parts += (uvarint(tag), uvarint(len(value)), value)
    return b"".join(parts)
