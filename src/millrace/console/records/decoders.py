"""From the bytes of a key or a value to what a person reads; the format is found by looking, or is the one chosen.

A view has the text, and, for formats that have one, the structure behind it (what filters walk through). Pure.
Invariants: no input raises; a format that was chosen and does not fit is shown as hex, with the reason; text, depth and
the number of items are bounded (`limits`), and what was left out is told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from millrace.console.records import avro, internal, msgpack, protobuf
from millrace.console.records.limits import MAX_HEX_BYTES, MAX_TEXT, Undecodable

FRAME_BYTES: Final = 5
"""A zero byte and the id of a schema: how serializers of a schema registry begin."""
SINGLE_OBJECT_MAGIC: Final = b"\xc3\x01"
_JSON_BEGIN: Final = re.compile(rb'\s*[{\["\-0-9tfn]')
_JSON_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s"\[\]{},:]+')
_OPENING: Final = frozenset("{[")
_CLOSING: Final = frozenset("}]")
_MAX_GUESSED_FIELD: Final = 10_000
"""Bytes that would be a message with larger field numbers than this are taken for something else."""

_LIKELY_INTEGER: Final = 1 << 48

_begin_of_json: Final = json.JSONDecoder().raw_decode

SchemaById = Callable[[int], str | None]
"""The Avro schema of an id, where a registry is known."""


class Format(StrEnum):
    """How bytes are shown. The value is what a request names."""

    AUTO = "auto"
    TEXT = "text"
    JSON = "json"
    INTEGER = "integer"
    AVRO = "avro"
    PROTOBUF = "protobuf"
    MSGPACK = "msgpack"
    INTERNAL = "internal"
    HEX = "hex"


class Side(StrEnum):
    """Which part of a record is looked at."""

    KEY = "key"
    VALUE = "value"


@dataclass(frozen=True, slots=True)
class Decoded:
    """Bytes as a person reads them."""

    kind: str
    """null, empty, or the format in words: a fact about the bytes, for a label beside the text."""
    text: str
    truncated: bool = False
    """The text is not all: it, or the bytes it was made of, were cut."""
    structure: Any = None
    """What JSON, Avro, Protobuf, MessagePack and internal records are made of; None also where there is none."""
    remark: str = ""
    """Why the chosen format was not used, or what else is worth saying."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is decoded: a part of a record, and what helps to understand it."""

    data: bytes | None
    topic: str = ""
    side: Side = Side.VALUE
    other: bytes | None = None
    """The record's other part: the key of a value, the value of a key."""
    size_bytes: int = -1
    """How long the part is, if `data` is only its beginning."""

    @property
    def is_cut(self) -> bool:
        return self.data is not None and self.size_bytes > len(self.data)


def decode(subject: Subject, chosen: Format = Format.AUTO, *, schema_by_id: SchemaById | None = None) -> Decoded:
    """What these bytes are, by looking at them or in the chosen format."""
    data = subject.data
    if data is None:
        return _no_data(subject, chosen)
    if not data and not subject.is_cut:
        return Decoded("empty", "")
    if chosen is Format.AUTO:
        return _guessed(subject, data, schema_by_id)
    try:
        return _in_format(subject, data, chosen, schema_by_id)
    except (Undecodable, RecursionError) as error:
        reason = "only its beginning is here" if subject.is_cut else str(error)
        return _hex(subject, data, remark=f"not {chosen}: {reason}")


def walked_format(topic: str, chosen: Format) -> Format:
    """The format whose structure a filter walks through; without a choice, only JSON and internal records have one."""
    if chosen is not Format.AUTO:
        return chosen
    return Format.INTERNAL if internal.is_internal(topic) else Format.JSON


def structure_of(subject: Subject, chosen: Format) -> Any:
    """What a filter walks through: the structure of the chosen format, or None where there is none."""
    data = subject.data
    chosen = walked_format(subject.topic, chosen)
    try:
        if chosen is Format.INTERNAL:
            return _internal_structure(subject)
        if chosen is Format.JSON or not data:
            return json_of(data)
        return _in_format(subject, data, chosen, None).structure
    except (Undecodable, RecursionError):
        return None


def json_of(data: bytes | None) -> Any:
    """What JSON in UTF-8 says, or None."""
    if not data:
        return None
    try:
        text = data.decode()
        try:
            value, end = _begin_of_json(text)
        except ValueError:
            end = -1
        # Nearly all JSON has no space around it: what the library does beside this takes as long again.
        return value if end == len(text) else json.loads(text)
    except (ValueError, RecursionError):
        return None


def _no_data(subject: Subject, chosen: Format) -> Decoded:
    if chosen in {Format.AUTO, Format.INTERNAL} and internal.is_internal(subject.topic) and subject.side is Side.VALUE:
        return Decoded("null", "", remark="a tombstone: what was said under this key is taken back")
    return Decoded("null", "")


# Finding the format.


def _guessed(subject: Subject, data: bytes, schema_by_id: SchemaById | None) -> Decoded:
    for attempt in _ATTEMPTS:
        try:
            found = attempt(subject, data, schema_by_id)
        except (Undecodable, RecursionError):
            continue
        if found is not None:
            return found
    return _hex(subject, data)


def _try_internal(subject: Subject, _data: bytes, _schemas: SchemaById | None) -> Decoded | None:
    return _internal(subject) if internal.is_internal(subject.topic) and not subject.is_cut else None


def _try_text(subject: Subject, data: bytes, _schemas: SchemaById | None) -> Decoded | None:
    text = _as_text(data, cut=subject.is_cut)
    if text is None or not is_readable(text):
        return None
    if not subject.is_cut and _JSON_BEGIN.match(data):
        try:
            found = _json(text)
        except Undecodable:
            pass
        else:
            return found if isinstance(found.structure, (dict, list)) else replace(found, kind="text")
    return _shown("text", text, cut=subject.is_cut)


def _try_avro(subject: Subject, data: bytes, schemas: SchemaById | None) -> Decoded | None:
    if not subject.is_cut and (data.startswith((avro.CONTAINER_MAGIC, SINGLE_OBJECT_MAGIC)) or _is_framed(data)):
        return _avro(subject, data, schemas)
    return None


def _try_integer(subject: Subject, data: bytes, _schemas: SchemaById | None) -> Decoded | None:
    return _integer(data) if not subject.is_cut and len(data) in {4, 8} else None


def _try_likely_integer(subject: Subject, data: bytes, _schemas: SchemaById | None) -> Decoded | None:
    """Counters, ids and times; eight bytes of something else are a far larger number nearly always."""
    found = _try_integer(subject, data, _schemas)
    return found if found is not None and abs(found.structure) < _LIKELY_INTEGER else None


def _try_msgpack(subject: Subject, data: bytes, _schemas: SchemaById | None) -> Decoded | None:
    # A number or a short string would be found in any bytes: only maps and arrays say what they are.
    if subject.is_cut or not (0x80 <= data[0] <= 0x9F or 0xDC <= data[0] <= 0xDF) or len(data) < 2:
        return None
    return _structured("MessagePack", msgpack.decode(data))


def _try_protobuf(subject: Subject, data: bytes, _schemas: SchemaById | None) -> Decoded | None:
    if subject.is_cut or len(data) < 2:
        return None
    message = protobuf.decode(data)
    if any(int(number) > _MAX_GUESSED_FIELD for number in message):
        return None
    return _structured("Protobuf", message, remark="read without a schema: names are field numbers")


_ATTEMPTS: Final = (
    _try_internal,
    _try_text,
    _try_likely_integer,
    _try_avro,
    _try_msgpack,
    _try_protobuf,
    _try_integer,
)


def _is_framed(data: bytes) -> bool:
    # An id of 0 is given to nobody, and an 8-byte number that is not huge begins with four zeros.
    return len(data) >= FRAME_BYTES and data[0] == 0 and data[1:FRAME_BYTES] != bytes(4)


# The formats.


def _in_format(subject: Subject, data: bytes, chosen: Format, schemas: SchemaById | None) -> Decoded:
    if chosen is Format.HEX:
        return _hex(subject, data)
    if chosen is Format.TEXT:
        return _shown("text", data.decode(errors="replace"), cut=subject.is_cut)
    if subject.is_cut:
        raise Undecodable("only its beginning is here")
    if chosen is Format.JSON:
        text = _as_text(data)
        if text is None:
            raise Undecodable("it is not UTF-8")
        return _json(text)
    if chosen is Format.INTEGER:
        return _integer(data)
    if chosen is Format.AVRO:
        return _avro(subject, data, schemas)
    if chosen is Format.PROTOBUF:
        return _structured("Protobuf", protobuf.decode(data), remark="read without a schema: names are field numbers")
    if chosen is Format.MSGPACK:
        return _structured("MessagePack", msgpack.decode(data))
    return _internal(subject)


def _json(text: str) -> Decoded:
    try:
        structure = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Undecodable(str(error) or "it is nested too deeply") from None
    if not isinstance(structure, (dict, list)):
        return _shown("JSON", text.strip(), structure=structure)
    return _shown("JSON", indented(text), structure=structure)


def _structured(kind: str, structure: Any, *, remark: str = "") -> Decoded:
    text = json.dumps(structure, indent=2, ensure_ascii=False)
    # Half a surrogate pair, which JSON can write, is no character that a page could be encoded with.
    text = text.encode(errors="backslashreplace").decode()
    return _shown(kind, text, structure=structure, remark=remark)


def _integer(data: bytes) -> Decoded:
    if len(data) not in {1, 2, 4, 8}:
        raise Undecodable(f"an integer has 1, 2, 4 or 8 bytes, and these are {len(data)}")
    number = int.from_bytes(data, "big", signed=True)
    return Decoded(f"{len(data) * 8}-bit integer", str(number), structure=number)


def _avro(subject: Subject, data: bytes, schemas: SchemaById | None) -> Decoded:
    if data.startswith(avro.CONTAINER_MAGIC):
        return _structured("Avro container", avro.decode_container(data))
    if data.startswith(SINGLE_OBJECT_MAGIC) and len(data) >= 10:
        fingerprint = data[2:10][::-1].hex()
        return _hex(
            subject, data, kind="Avro", remark=f"an Avro object; the fingerprint of its schema is {fingerprint}"
        )
    if not _is_framed(data):
        raise Undecodable("neither a container nor an object with the id of a schema")
    schema_id = int.from_bytes(data[1:FRAME_BYTES], "big")
    payload = data[FRAME_BYTES:]
    text = _as_text(payload)
    if text is not None and _JSON_BEGIN.match(payload):
        try:
            decoded = _json(text)
        except Undecodable:
            pass
        else:
            return Decoded(
                f"JSON, schema {schema_id}",
                decoded.text,
                decoded.truncated,
                decoded.structure,
                "framed with a schema's id",
            )
    schema = None if schemas is None else schemas(schema_id)
    if schema is not None:
        return _structured(f"Avro, schema {schema_id}", avro.decode(schema, payload))
    return _hex(
        subject,
        data,
        kind=f"schema {schema_id}",
        remark=f"framed with the id {schema_id} of a schema that is kept in a registry; there is none to ask",
    )


def _internal(subject: Subject) -> Decoded:
    if not internal.is_internal(subject.topic):
        raise Undecodable("not a record of an internal topic")
    return _structured(subject.topic, _internal_structure(subject))


def _internal_structure(subject: Subject) -> Any:
    key, value = (subject.data, subject.other) if subject.side is Side.KEY else (subject.other, subject.data)
    statement = internal.describe(subject.topic, key, value)
    return statement.key if subject.side is Side.KEY else statement.value


def _hex(subject: Subject, data: bytes, *, kind: str = "bytes", remark: str = "") -> Decoded:
    return Decoded(
        kind, hex_dump(data[:MAX_HEX_BYTES]), truncated=subject.is_cut or len(data) > MAX_HEX_BYTES, remark=remark
    )


# Text.


def is_readable(text: str) -> bool:
    """Whether every character is one that a person reads."""
    return text.isprintable() or all(letter.isprintable() or letter in "\t\r\n" for letter in text)


def hex_dump(data: bytes) -> str:
    """Sixteen bytes a line: where they are, each in hex, and the readable ones as ASCII."""
    lines = []
    for start in range(0, len(data), 16):
        part = data[start : start + 16]
        numbers = f"{part[:8].hex(' ')}  {part[8:].hex(' ')}"
        letters = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in part)
        lines.append(f"{start:08x}  {numbers:<48}  {letters}")
    return "\n".join(lines)


def indented(text: str) -> str:
    """JSON on many lines; only the space between its tokens changes, so that numbers stay as they were written."""
    parts: list[str] = []
    depth = size = 0
    before = ""
    for match in _JSON_TOKEN.finditer(text):
        word = match[0]
        is_end = word in _CLOSING
        depth -= is_end
        if (before in _OPENING) != is_end or before == ",":
            parts.append("\n" + "  " * depth)
            size += 2 * depth
        elif before == ":":
            parts.append(" ")
        parts.append(word)
        depth += word in _OPENING
        before = word
        size += len(word) + 1
        if size > MAX_TEXT:
            break
    return "".join(parts)


def _as_text(data: bytes, *, cut: bool = False) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        # Where the beginning was cut off, the last character may have lost some of its bytes.
        if cut and error.start >= len(data) - 3:
            return data[: error.start].decode()
        return None


def _shown(kind: str, text: str, *, cut: bool = False, structure: Any = None, remark: str = "") -> Decoded:
    return Decoded(kind, text[:MAX_TEXT], cut or len(text) > MAX_TEXT, structure, remark)
