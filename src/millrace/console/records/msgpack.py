"""MessagePack, as values that JSON can show. Pure, and bounded in depth and items.

Bytes are `{"hex": "..."}`, extensions `{"extension": type, "hex": "..."}` and timestamps (extension -1) text; keys of
maps that are not text become text.
"""

from __future__ import annotations

import struct
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from millrace.console.records.limits import MAX_DEPTH, Budget, Undecodable

_TIMESTAMP: Final = -1
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_NUMBERS: Final = {
    0xCA: struct.Struct(">f"),
    0xCB: struct.Struct(">d"),
    0xCC: struct.Struct(">B"),
    0xCD: struct.Struct(">H"),
    0xCE: struct.Struct(">I"),
    0xCF: struct.Struct(">Q"),
    0xD0: struct.Struct(">b"),
    0xD1: struct.Struct(">h"),
    0xD2: struct.Struct(">i"),
    0xD3: struct.Struct(">q"),
}
_BINARY: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_TEXT: Final = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_ARRAY: Final = {0xDC: 2, 0xDD: 4}
_MAP: Final = {0xDE: 2, 0xDF: 4}
_EXTENSION: Final = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_FIXED_EXTENSION: Final = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


def decode(data: bytes) -> Any:
    """The one value that `data` is, from its first to its last byte; Undecodable."""
    reader = _Reader(data)
    value = reader.value(MAX_DEPTH)
    if reader.pos != len(data):
        raise Undecodable(f"{len(data) - reader.pos} bytes follow the MessagePack value")
    return value


class _Reader:
    __slots__ = ("_budget", "_data", "pos")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._budget = Budget()
        self.pos = 0

    def value(self, depth: int) -> Any:
        if depth < 0:
            raise Undecodable("MessagePack that is nested too deeply")
        self._budget.take()
        head = self._take(1)[0]
        if head <= 0x7F:
            return head
        if head <= 0x8F:
            return self._map(head & 0x0F, depth)
        if head <= 0x9F:
            return [self.value(depth - 1) for _ in range(head & 0x0F)]
        if head <= 0xBF:
            return self._text(head & 0x1F)
        if head >= 0xE0:
            return head - 0x100
        if head in _NUMBERS:
            return _NUMBERS[head].unpack(self._take(_NUMBERS[head].size))[0]
        return self._other(head, depth)

    def _other(self, head: int, depth: int) -> Any:
        if head in _TEXT:
            return self._text(self._length(_TEXT[head]))
        if head in _ARRAY:
            return [self.value(depth - 1) for _ in range(self._length(_ARRAY[head]))]
        if head in _MAP:
            return self._map(self._length(_MAP[head]), depth)
        if head in _BINARY:
            return {"hex": self._take(self._length(_BINARY[head])).hex()}
        if head in _EXTENSION:
            return self._extension(self._length(_EXTENSION[head]))
        if head in _FIXED_EXTENSION:
            return self._extension(_FIXED_EXTENSION[head])
        if head == 0xC1:
            raise Undecodable("0xC1 begins nothing in MessagePack")
        return {0xC0: None, 0xC2: False, 0xC3: True}[head]

    def _take(self, size: int) -> bytes:
        end = self.pos + size
        if end > len(self._data):
            raise Undecodable("the MessagePack value ends early")
        taken = self._data[self.pos : end]
        self.pos = end
        return taken

    def _length(self, size: int) -> int:
        length = int.from_bytes(self._take(size), "big")
        # Every item takes a byte at least: a length that cannot be is refused before anything is made of it.
        if length > len(self._data) - self.pos:
            raise Undecodable("the MessagePack value ends early")
        return length

    def _text(self, size: int) -> str:
        try:
            return self._take(size).decode()
        except UnicodeDecodeError:
            raise Undecodable("a MessagePack string is not UTF-8") from None

    def _map(self, size: int, depth: int) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for _ in range(size):
            name = _name(self.value(depth - 1))
            entries[name] = self.value(depth - 1)
        return entries

    def _extension(self, size: int) -> Any:
        kind = int.from_bytes(self._take(1), "big", signed=True)
        data = self._take(size)
        if kind == _TIMESTAMP and size in {4, 8, 12}:
            return _time(data)
        return {"extension": kind, "hex": data.hex()}


def _name(key: Any) -> str:
    """A key of a map as text."""
    if isinstance(key, dict) and key.keys() == {"hex"}:
        return str(key["hex"])
    # What is nested would be quoted anew at every level, and grow with each.
    if isinstance(key, (dict, list)):
        raise Undecodable("a key of a MessagePack map is itself a map or an array")
    return key if isinstance(key, str) else repr(key)


def _time(data: bytes) -> Any:
    if len(data) == 12:
        nanoseconds, seconds = struct.unpack(">Iq", data)
    else:
        number = int.from_bytes(data, "big")
        nanoseconds, seconds = (number >> 34, number & 0x3FFFFFFFF) if len(data) == 8 else (0, number)
    try:
        return (_EPOCH + timedelta(seconds=seconds, microseconds=nanoseconds // 1000)).isoformat()
    except OverflowError:
        return {"extension": _TIMESTAMP, "hex": data.hex()}
