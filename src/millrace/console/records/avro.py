"""Avro with a schema at hand: the binary encoding by a writer's schema, and object container files, which bring theirs.

Pure, bounded in depth and items. Bytes and fixed are `{"hex": "..."}`; a union shows the branch that was written,
without its name; logical types show the number or bytes they are made of. Not here: schemas that are kept elsewhere.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from typing import Any, Final

import cramjam

from millrace.console.records.limits import MAX_DEPTH, Budget, Undecodable

CONTAINER_MAGIC: Final = b"Obj\x01"
_SYNC_BYTES: Final = 16
_MAX_BLOCK_BYTES: Final = 8 * 1024 * 1024
_FLOAT: Final = struct.Struct("<f")
_DOUBLE: Final = struct.Struct("<d")

Read = Callable[["_Reader", int], Any]


def decode(schema: str, data: bytes) -> Any:
    """The value that `data` is by `schema`, from its first to its last byte.

    Undecodable, also for what is no schema.
    """
    reader = _Reader(data)
    value = _Types().reader(_parsed(schema), MAX_DEPTH)(reader, MAX_DEPTH)
    if reader.pos != len(data):
        raise Undecodable(f"{len(data) - reader.pos} bytes follow the Avro value")
    return value


def decode_container(data: bytes) -> dict[str, Any]:
    """The schema of an object container file, and its values; Undecodable."""
    if not data.startswith(CONTAINER_MAGIC):
        raise Undecodable("not an Avro object container")
    reader = _Reader(data)
    reader.take(len(CONTAINER_MAGIC))
    described = {
        name: bytes.fromhex(value["hex"]) for name, value in reader.map_of(_Reader.byte_string, MAX_DEPTH).items()
    }
    sync = reader.take(_SYNC_BYTES)
    schema = described.get("avro.schema", b"").decode(errors="replace")
    codec = described.get("avro.codec", b"null").decode(errors="replace")
    read = _Types().reader(_parsed(schema), MAX_DEPTH)
    values: list[Any] = []
    while reader.pos < len(data):
        count, size = reader.long(), reader.long()
        if count < 0 or size < 0:
            raise Undecodable("a block of the container has a negative size")
        block = _Reader(_uncompressed(codec, reader.take(size)), reader.budget)
        for _ in range(count):
            block.budget.take()  # a value may have no bytes at all
            values.append(read(block, MAX_DEPTH))
        if reader.take(_SYNC_BYTES) != sync:
            raise Undecodable("a block of the container does not end where it says")
    return {"schema": json.loads(schema), "values": values}


def _parsed(schema: str) -> Any:
    try:
        return json.loads(schema)
    except (ValueError, RecursionError):
        raise Undecodable("the Avro schema is not JSON") from None


def _uncompressed(codec: str, data: bytes) -> bytes:
    if codec == "null":
        return data
    if codec == "deflate":
        inflate = zlib.decompressobj(-15)
        try:
            plain = inflate.decompress(data, _MAX_BLOCK_BYTES)
        except zlib.error:
            raise Undecodable("a block of the container is damaged") from None
        if inflate.unconsumed_tail:
            raise Undecodable("a block of the container is too large")
        return plain
    if codec == "zstandard":
        room = bytearray(_MAX_BLOCK_BYTES)
        try:
            return bytes(room[: cramjam.zstd.decompress_into(data, room)])
        except cramjam.DecompressionError:
            raise Undecodable("a block of the container is damaged or too large") from None
    raise Undecodable(f"the container's codec {codec!r} is not known here")


class _Reader:
    __slots__ = ("_data", "budget", "pos")

    def __init__(self, data: bytes, budget: Budget | None = None) -> None:
        self._data = data
        self.budget = budget or Budget()
        self.pos = 0

    def take(self, size: int) -> bytes:
        end = self.pos + size
        if size < 0 or end > len(self._data):
            raise Undecodable("the Avro value ends early")
        taken = self._data[self.pos : end]
        self.pos = end
        return taken

    def long(self, _depth: int = 0) -> int:
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return (value >> 1) ^ -(value & 1)
            shift += 7
            if shift > 63:
                raise Undecodable("an Avro number has more than 64 bits")

    def boolean(self, _depth: int) -> bool:
        byte = self.take(1)[0]
        if byte > 1:
            raise Undecodable("an Avro boolean is neither 0 nor 1")
        return byte == 1

    def single(self, _depth: int) -> float:
        number: float = _FLOAT.unpack(self.take(4))[0]
        return number

    def double(self, _depth: int) -> float:
        number: float = _DOUBLE.unpack(self.take(8))[0]
        return number

    def byte_string(self, _depth: int = 0) -> dict[str, str]:
        return {"hex": self.take(self.long()).hex()}

    def text(self, _depth: int = 0) -> str:
        try:
            return self.take(self.long()).decode()
        except UnicodeDecodeError:
            raise Undecodable("an Avro string is not UTF-8") from None

    def blocks(self) -> Any:
        """For each item of an array or map."""
        while count := self.long():
            if count < 0:
                self.long()  # the size in bytes, for who wants to skip the block
                count = -count
            for _ in range(count):
                self.budget.take()
                yield

    def map_of(self, read: Read, depth: int) -> dict[str, Any]:
        return {self.text(): read(self, depth - 1) for _ in self.blocks()}

    def list_of(self, read: Read, depth: int) -> list[Any]:
        return [read(self, depth - 1) for _ in self.blocks()]


def _nothing(_reader: _Reader, _depth: int) -> None:
    return None


_PRIMITIVES: Final[dict[str, Read]] = {
    "null": _nothing,
    "boolean": _Reader.boolean,
    "int": _Reader.long,
    "long": _Reader.long,
    "float": _Reader.single,
    "double": _Reader.double,
    "bytes": _Reader.byte_string,
    "string": _Reader.text,
}


class _Types:
    """Readers by schema; names that were defined may be used again, also inside themselves."""

    def __init__(self) -> None:
        self._named: dict[str, Read] = {}

    def reader(self, schema: Any, depth: int) -> Read:
        if depth < 0:
            raise Undecodable("an Avro schema that is nested too deeply")
        if isinstance(schema, str):
            return self._by_name(schema)
        if isinstance(schema, list):
            return _union([self.reader(each, depth - 1) for each in schema])
        if not isinstance(schema, dict):
            raise Undecodable("an Avro schema is a name, a list or an object")
        kind = schema.get("type")
        if kind in ("record", "error"):
            return self._record(schema, depth)
        if kind == "enum":
            return self._define(schema, _enum(schema.get("symbols")))
        if kind == "fixed":
            return self._define(schema, _fixed(schema.get("size")))
        if kind == "array":
            items = self.reader(schema.get("items"), depth - 1)
            return lambda reader, left: reader.list_of(items, left)
        if kind == "map":
            values = self.reader(schema.get("values"), depth - 1)
            return lambda reader, left: reader.map_of(values, left)
        return self.reader(kind, depth - 1)

    def _by_name(self, name: str) -> Read:
        known = _PRIMITIVES.get(name) or self._named.get(name) or self._named.get(name.rpartition(".")[2])
        if known is None:
            raise Undecodable(f"the Avro schema does not say what {name!r} is")
        return known

    def _define(self, schema: dict[str, Any], read: Read) -> Read:
        name = schema.get("name")
        if not isinstance(name, str):
            raise Undecodable("an Avro type that needs a name has none")
        self._named[name] = self._named[name.rpartition(".")[2]] = read
        return read

    def _record(self, schema: dict[str, Any], depth: int) -> Read:
        fields: list[tuple[str, Read]] = []

        def read(reader: _Reader, left: int) -> dict[str, Any]:
            if left < 0:
                raise Undecodable("Avro that is nested too deeply")
            reader.budget.take()
            return {name: field(reader, left - 1) for name, field in fields}

        self._define(schema, read)
        declared = schema.get("fields")
        if not isinstance(declared, list):
            raise Undecodable("an Avro record has no fields")
        for field in declared:
            if not isinstance(field, dict) or not isinstance(field.get("name"), str):
                raise Undecodable("a field of an Avro record has no name")
            fields.append((field["name"], self.reader(field.get("type"), depth - 1)))
        return read


def _union(branches: list[Read]) -> Read:
    def read(reader: _Reader, depth: int) -> Any:
        if depth < 0:
            raise Undecodable("Avro that is nested too deeply")
        index = reader.long()
        if not 0 <= index < len(branches):
            raise Undecodable("an Avro union has no such branch")
        return branches[index](reader, depth - 1)

    return read


def _enum(symbols: Any) -> Read:
    def read(reader: _Reader, _depth: int) -> Any:
        index = reader.long()
        if not isinstance(symbols, list) or not 0 <= index < len(symbols):
            raise Undecodable("an Avro enum has no such symbol")
        return symbols[index]

    return read


def _fixed(size: Any) -> Read:
    if not isinstance(size, int):
        raise Undecodable("an Avro fixed has no size")
    return lambda reader, _depth: {"hex": reader.take(size).hex()}
