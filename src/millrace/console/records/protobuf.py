"""A Protobuf message without its schema: field numbers and what their bytes can mean. Pure, bounded in depth and items.

Without a schema a number is just a number (signed or not, zigzag or not, cannot be known) and a run of bytes may be
text, a message or bytes: text is shown as text, then what reads as a message from its first to its last byte as one,
the rest as hex.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from millrace.console.records.limits import MAX_DEPTH, Budget, Undecodable

_MAX_FIELD: Final = (1 << 29) - 1
_VARINT, _FIXED64, _BYTES, _GROUP, _END_GROUP, _FIXED32 = range(6)
_FLOAT: Final = struct.Struct("<f")
_DOUBLE: Final = struct.Struct("<d")

Message = dict[str, Any]
"""By field number; a number that repeats has a list."""


def decode(data: bytes) -> Message:
    """The message that `data` is; Undecodable, also for no bytes at all, which every message type can read."""
    if not data:
        raise Undecodable("an empty message has nothing to show")
    return _Reader(data).message(MAX_DEPTH)


class _Reader:
    __slots__ = ("_budget", "_data", "_pos")

    def __init__(self, data: bytes, budget: Budget | None = None) -> None:
        self._data = data
        self._budget = budget or Budget()
        self._pos = 0

    def message(self, depth: int, group: int | None = None) -> Message:
        if depth < 0:
            raise Undecodable("Protobuf that is nested too deeply")
        fields: Message = {}
        while group is not None or self._pos < len(self._data):
            tag = self._varint()
            number, kind = tag >> 3, tag & 7
            if not 1 <= number <= _MAX_FIELD:
                raise Undecodable(f"{number} is no field number")
            if kind == _END_GROUP:
                if number != group:
                    raise Undecodable(f"group {number} ends where it did not begin")
                return fields
            self._budget.take()
            value = self._value(number, kind, depth)
            name = str(number)
            if name not in fields:
                fields[name] = value
            elif isinstance(fields[name], list):
                fields[name].append(value)
            else:
                fields[name] = [fields[name], value]
        return fields

    def _value(self, number: int, kind: int, depth: int) -> Any:
        if kind == _VARINT:
            return self._varint()
        if kind == _FIXED64:
            return self._fixed(8, _DOUBLE)
        if kind == _FIXED32:
            return self._fixed(4, _FLOAT)
        if kind == _GROUP:
            return self.message(depth - 1, number)
        if kind != _BYTES:
            raise Undecodable(f"{kind} is no wire type")
        data = self._take(self._varint())
        text = _text(data)
        if text is not None:
            return text
        try:
            return _Reader(data, self._budget).message(depth - 1)
        except Undecodable:
            return {"hex": data.hex()}

    def _varint(self) -> int:
        value = shift = 0
        while True:
            if self._pos >= len(self._data):
                raise Undecodable("the message ends early")
            byte = self._data[self._pos]
            self._pos += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value >> 64:
                    raise Undecodable("a number has more than 64 bits")
                return value
            shift += 7
            if shift > 63:
                raise Undecodable("a number has more than 64 bits")

    def _take(self, size: int) -> bytes:
        end = self._pos + size
        if end > len(self._data):
            raise Undecodable("the message ends early")
        taken = self._data[self._pos : end]
        self._pos = end
        return taken

    def _fixed(self, size: int, floating: struct.Struct) -> dict[str, Any]:
        data = self._take(size)
        return {f"fixed{size * 8}": int.from_bytes(data, "little"), "float": floating.unpack(data)[0]}


def _text(data: bytes) -> str | None:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return text if all(letter.isprintable() or letter in "\t\r\n" for letter in text) else None
