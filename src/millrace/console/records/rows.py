"""The records of a batch one after another, with as little work per record as a scan of millions allows. Pure.

A `Row` is used for one record after another: who keeps something of it copies it. Where a scan looks for bytes that
every match must have, records without them are passed over by their length alone. Damage raises `ApiError`
(INVALID_RECORD), except in the names of headers, which a viewer shows as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from millrace.console.records.decoders import Format, Side, Subject, json_of, structure_of, walked_format
from millrace.errors import ApiError, ErrorCode
from millrace.records.batch import BatchHeader, TimestampType
from millrace.records.decode import INT_SHIFT, LONG_SHIFT, read_varint

Bytes = bytes | bytearray
_UNREAD: Final = object()


class HeaderField(NamedTuple):
    """A header of a record; the name as text in which bytes that are not UTF-8 are kept as surrogates."""

    name: str
    value: bytes | None


class Row:
    """One record, as filters look at it. Headers and structures are read when they are asked for."""

    __slots__ = (
        "_headers",
        "_key_structure",
        "_value_structure",
        "data",
        "headers_at",
        "key",
        "key_format",
        "offset",
        "partition",
        "stop",
        "timestamp_ms",
        "topic",
        "value",
        "value_format",
    )

    def __init__(
        self, topic: str, partition: int, key_format: Format = Format.AUTO, value_format: Format = Format.AUTO
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.key_format = walked_format(topic, key_format)
        self.value_format = walked_format(topic, value_format)
        self.offset = self.timestamp_ms = -1
        self.key: bytes | None = None
        self.value: bytes | None = None
        self.data: Bytes = b"\x00"
        """Where the headers are, from `headers_at` to `stop`."""
        self.headers_at, self.stop = 0, 1
        self._headers: tuple[HeaderField, ...] | None = None
        self._key_structure: Any = _UNREAD
        self._value_structure: Any = _UNREAD

    @property
    def size_bytes(self) -> int:
        """Of key and value."""
        return len(self.key or b"") + len(self.value or b"")

    @property
    def headers(self) -> tuple[HeaderField, ...]:
        if self._headers is None:
            self._headers = read_headers(self.data, self.headers_at, self.stop)
        return self._headers

    def key_structure(self) -> Any:
        """What a path of a filter walks through; None where there is nothing of the kind."""
        if self._key_structure is _UNREAD:
            if self.key_format is Format.JSON:
                self._key_structure = json_of(self.key)
            else:
                self._key_structure = structure_of(Subject(self.key, self.topic, Side.KEY, self.value), self.key_format)
        return self._key_structure

    def value_structure(self) -> Any:
        if self._value_structure is _UNREAD:
            if self.value_format is Format.JSON:
                self._value_structure = json_of(self.value)
            else:
                subject = Subject(self.value, self.topic, Side.VALUE, self.key)
                self._value_structure = structure_of(subject, self.value_format)
        return self._value_structure


def rows_of(  # noqa: C901, PLR0912, PLR0915 - one flat loop, because a call per field would double its cost
    row: Row, header: BatchHeader, data: Bytes, needle: bytes = b""
) -> Iterator[None]:
    """Put one record of a batch after another into `row`; with `needle`, only those that have these bytes somewhere.

    `data` are the records of the batch, uncompressed.
    """
    append_ms = header.max_timestamp_ms if header.timestamp_type is TimestampType.LOG_APPEND else None
    base_offset, base_ms = header.base_offset, header.base_timestamp_ms
    end = len(data)
    pos = 0
    hit = data.find(needle) if needle else -1
    if needle and hit < 0:
        return
    row.data = data
    try:
        while pos < end:
            byte = data[pos]
            if byte < 0x80:
                length = (byte >> 1) ^ -(byte & 1)
                pos += 1
            else:
                length, pos = read_varint(data, pos, INT_SHIFT)
            stop = pos + length
            if length <= 0 or stop > end:
                raise _invalid("a record does not fit its batch")
            if hit >= stop:
                pos = stop
                continue
            pos += 1
            byte = data[pos]
            if byte < 0x80:
                delta_ms = (byte >> 1) ^ -(byte & 1)
                pos += 1
            else:
                delta_ms, pos = read_varint(data, pos, LONG_SHIFT)
            byte = data[pos]
            if byte < 0x80:
                delta = byte >> 1
                pos += 1
            else:
                delta, pos = read_varint(data, pos, INT_SHIFT)
            byte = data[pos]
            if byte < 0x80:
                size = (byte >> 1) ^ -(byte & 1)
                pos += 1
            else:
                size, pos = read_varint(data, pos, INT_SHIFT)
            if size >= 0:
                row.key = bytes(data[pos : pos + size])
                pos += size
            else:
                row.key = None
            if pos >= stop or size < -1:
                raise _invalid("a key reaches over the record's end")
            byte = data[pos]
            if byte < 0x80:
                size = (byte >> 1) ^ -(byte & 1)
                pos += 1
            else:
                size, pos = read_varint(data, pos, INT_SHIFT)
            if size >= 0:
                row.value = bytes(data[pos : pos + size])
                pos += size
            else:
                row.value = None
            if pos >= stop or size < -1:
                raise _invalid("a value reaches over the record's end")
            row.offset = base_offset + delta
            row.timestamp_ms = base_ms + delta_ms if append_ms is None else append_ms
            row.headers_at, row.stop = pos, stop
            row._headers = None  # noqa: SLF001 - of a class of this module
            row._key_structure = row._value_structure = _UNREAD  # noqa: SLF001
            yield
            pos = stop
            if needle:
                hit = data.find(needle, stop)
                if hit < 0:
                    return
    except IndexError:
        raise _invalid("the records end in the middle of one") from None


def _field(data: Bytes, pos: int, stop: int) -> tuple[bytes | None, int]:
    byte = data[pos]
    if byte < 0x80:
        size = (byte >> 1) ^ -(byte & 1)
        pos += 1
    else:
        size, pos = read_varint(data, pos, INT_SHIFT)
    if size < 0:
        if size != -1:
            raise _invalid(f"a field of a record has the length {size}")
        return None, pos
    end = pos + size
    if end > stop:
        raise _invalid("a field of a record reaches over the record's end")
    return bytes(data[pos:end]), end


def read_headers(data: Bytes, pos: int, stop: int) -> tuple[HeaderField, ...]:
    """The headers of a record, which `rows_of` has passed over."""
    try:
        count, pos = read_varint(data, pos, INT_SHIFT)
        if count < 0 or count * 2 > stop - pos:
            raise _invalid(f"a record claims to have {count} headers")
        headers = []
        for _ in range(count):
            name, pos = _field(data, pos, stop)
            if name is None:
                raise _invalid("a record header has no key")
            value, pos = _field(data, pos, stop)
            headers.append(HeaderField(name.decode(errors="surrogateescape"), value))
    except IndexError:
        raise _invalid("the records end in the middle of one") from None
    return tuple(headers)


def _invalid(reason: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_RECORD, reason)
