"""Messages filled with values worth testing, and a second, naive encoder to compare the compiled one with.

`Values` is seeded and so repeatable. It sets only the fields a version carries, prefers extremes (nulls, empties, the
ends of integer ranges, non-ASCII text) and keeps messages small. `reference_encode` interprets a declaration field by
field, shares no code with the compiler, and can slip unknown tagged fields into every structure.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeVar
from uuid import UUID

from millrace.wire.messages import DECLARATIONS, request_class, response_class
from millrace.wire.schema import Array, Blob, Field, Fixed, Message, Nested, Struct, Text

S = TypeVar("S", bound=Struct)

# What an oracle says about a field: the values it can take, or the hints of the structure inside.
Hints = Mapping[str, Any]

_RANGES: Final = {
    "b": (-(1 << 7), (1 << 7) - 1),
    "h": (-(1 << 15), (1 << 15) - 1),
    "i": (-(1 << 31), (1 << 31) - 1),
    "q": (-(1 << 63), (1 << 63) - 1),
    "H": (0, (1 << 16) - 1),
    "I": (0, (1 << 32) - 1),
}
_FLOATS: Final = (0.0, -1.5, 1e300, -1e-300, 3.25)
_TEXTS: Final = ("", "a", "topic-1", "gr\u00fc\u00dfe", "\u65e5\u672c\u8a9e", "\U0001f600", "nul\x00inside", "x" * 130)


def declared_messages() -> Iterator[type[Message]]:
    """Every request and response."""
    for key in DECLARATIONS:
        yield request_class(key)
        yield response_class(key)


def declared_versions() -> Iterator[tuple[type[Message], int]]:
    """Every request and response at each of its versions."""
    for cls in declared_messages():
        for version in range(cls.min_version, cls.max_version + 1):
            yield cls, version


class Values:
    """A seeded source of messages."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed)

    def message(self, cls: type[S], version: int, hints: Hints | None = None) -> S:
        """A message in which every field that `version` carries has some value it may have."""
        return self._struct(cls, version, hints or {})

    def _struct(self, cls: type[S], version: int, hints: Hints, depth: int = 0) -> S:
        values = {}
        for field in cls.declaration.fields:
            if field.versions.include(version):
                values[field.name] = self._value(field, version, hints.get(field.name), depth)
        return cls(**values)

    def _value(self, field: Field, version: int, hint: Any, depth: int) -> Any:
        chance = self._random.random()
        if field.nullable.include(version) and chance < 0.25:
            return None
        if field.tag is not None and chance > 0.75:
            return field.new_default()
        if isinstance(field.type, Array):
            element = field.type.element
            size = self._random.choice((0, 1, 1, 2, 3) if depth < 2 else (0, 1, 2))
            return [self._element(element, version, hint, depth) for _ in range(size)]
        return self._element(field.type, version, hint, depth)

    def _element(self, kind: object, version: int, hint: Any, depth: int) -> Any:
        if isinstance(kind, Nested):
            return self._struct(kind.resolved(), version, hint or {}, depth + 1)
        if hint is not None:
            return self._random.choice(hint)
        if isinstance(kind, Fixed):
            return self._fixed(kind)
        if isinstance(kind, Text):
            return self._random.choice(_TEXTS)
        size = self._random.choice((0, 1, 5, 127, 128, 300))
        return self._random.randbytes(size)

    def _fixed(self, kind: Fixed) -> Any:
        if kind.code == "?":
            return self._random.random() < 0.5
        if kind.code == "d":
            return self._random.choice(_FLOATS)
        if kind.code == "16s":
            return self._random.choice((UUID(int=0), UUID(int=(1 << 128) - 1), UUID(bytes=self._random.randbytes(16))))
        low, high = _RANGES[kind.code]
        return self._random.choice((low, high, 0, 1, self._random.randint(low, high)))


def reference_encode(message: Struct, version: int, unknown_tags: random.Random | None = None) -> bytes:
    """The bytes of `message`, made the slow and obvious way."""
    declaration = message.declaration
    flexible = declaration.flexible_from is not None and version >= declaration.flexible_from
    return _reference_struct(message, version, flexible, unknown_tags)


def _reference_struct(message: Struct, version: int, flexible: bool, unknown: random.Random | None) -> bytes:
    out = b""
    tagged = {}
    for field in message.declaration.fields:
        if not field.versions.include(version):
            continue
        value = getattr(message, field.name)
        if field.tag is None:
            out += _reference_field(field, value, version, flexible, unknown)
        elif not field.is_default(value):
            tagged[field.tag] = _reference_field(field, value, version, flexible, unknown)
    if not flexible:
        return out
    if unknown is not None:
        for _ in range(unknown.choice((0, 1, 3))):
            tagged[unknown.randint(100, 1_000_000)] = unknown.randbytes(unknown.choice((0, 1, 200)))
    out += _uvarint(len(tagged))
    for tag in sorted(tagged):
        out += _uvarint(tag) + _uvarint(len(tagged[tag])) + tagged[tag]
    return out


def _reference_field(field: Field, value: Any, version: int, flexible: bool, unknown: random.Random | None) -> bytes:
    kind = field.type
    if value is None and not field.nullable.include(version):
        raise ValueError(field.name)
    if isinstance(kind, Array):
        if value is None:
            return _length(None, flexible, ">i")
        elements = (_reference_element(kind.element, item, version, flexible, unknown) for item in value)
        return _length(len(value), flexible, ">i") + b"".join(elements)
    if isinstance(kind, Nested) and field.nullable.include(version):
        if value is None:
            return b"\xff"
        return b"\x01" + _reference_struct(value, version, flexible, unknown)
    return _reference_element(kind, value, version, flexible, unknown)


def _reference_element(kind: object, value: Any, version: int, flexible: bool, unknown: random.Random | None) -> bytes:
    if isinstance(kind, Nested):
        return _reference_struct(value, version, flexible, unknown)
    if isinstance(kind, Fixed):
        return struct.pack(">" + kind.code, value.bytes if kind.code == "16s" else value)
    assert isinstance(kind, Text | Blob)
    prefix = ">h" if isinstance(kind, Text) else ">i"
    if value is None:
        return _length(None, flexible, prefix)
    data = value.encode() if isinstance(kind, Text) else bytes(value)
    return _length(len(data), flexible, prefix) + data


def _length(size: int | None, flexible: bool, prefix: str) -> bytes:
    if flexible:
        return _uvarint(0 if size is None else size + 1)
    return struct.pack(prefix, -1 if size is None else size)


def _uvarint(value: int) -> bytes:
    groups = [value & 0x7F]
    while value := value >> 7:
        groups.append(value & 0x7F)
    return bytes([group | 0x80 for group in groups[:-1]] + groups[-1:])
