"""From a batch to its records, and the structural check of records without making objects of them.

A record: varint length of the rest | int8 attributes | varlong timestamp delta | varint offset delta | varint key
length and key (-1 = null) | varint value length and value | varint header count, each: varint key length and key,
varint value length and value. Varints are zigzag. What is not here: deciding when a broker looks inside
(`storage.log`).

Invariant: damage raises `ApiError` (INVALID_RECORD) and nothing else, in memory bounded by `max_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from millrace.errors import ApiError, ErrorCode, InvalidRecordsError
from millrace.records.batch import HEADER_BYTES, LOG_OVERHEAD_BYTES, BatchHeader, TimestampType, read_header
from millrace.records.compression import DEFAULT_MAX_BYTES, Buffer, decompress

MAX_NAMED_RECORDS: Final = 10_000
"""An answer has room for so many bad records; the sender of more learns of the others when it sends again."""


@dataclass(frozen=True, slots=True)
class Header:
    """A record's header: the key is text and never null, the value is bytes or null."""

    key: str
    value: bytes | None


@dataclass(frozen=True, slots=True)
class Record:
    """One record, with its absolute offset and timestamp."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...] = ()


def _invalid(reason: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_RECORD, reason)


def records_section(batch: Buffer, max_bytes: int = DEFAULT_MAX_BYTES) -> tuple[BatchHeader, bytes | bytearray]:
    """The header of a batch and its records, decompressed; the CRC is not checked."""
    header = read_header(batch)
    stop = header.batch_length + LOG_OVERHEAD_BYTES
    if header.batch_length + LOG_OVERHEAD_BYTES < HEADER_BYTES or stop > len(batch):
        raise ApiError(ErrorCode.CORRUPT_MESSAGE, f"the record batch has an impossible length {header.batch_length}")
    records = decompress(header.codec, memoryview(batch)[HEADER_BYTES:stop], max_bytes)
    # Bytes are read several times as fast as a view of them, so that the copy of an uncompressed batch pays.
    return header, bytes(records) if isinstance(records, memoryview) else records


def read_varint(data: bytes | bytearray, pos: int, max_shift: int) -> tuple[int, int]:
    """The zigzag varint at `pos` and the position behind it; IndexError at the end of the data."""
    byte = data[pos]
    pos += 1
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), pos
    value = byte & 0x7F
    shift = 7
    while True:
        byte = data[pos]
        pos += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift > max_shift:
            raise _invalid("a varint in a record is too long")
    return (value >> 1) ^ -(value & 1), pos


INT_SHIFT: Final = 28
LONG_SHIFT: Final = 63


def decode_records(batch: Buffer, *, max_bytes: int = DEFAULT_MAX_BYTES) -> list[Record]:
    """Every record of one batch, control records included; the CRC is not checked."""
    return list(iter_records(batch, max_bytes=max_bytes))


def iter_records(batch: Buffer, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Iterator[Record]:
    """As `decode_records`, one at a time; damage is found only when the iteration reaches it."""
    header, data = records_section(batch, max_bytes)
    append_time = header.max_timestamp_ms if header.timestamp_type is TimestampType.LOG_APPEND else None
    base_offset, base_timestamp = header.base_offset, header.base_timestamp_ms
    pos = 0
    if header.count < 0:
        raise _invalid(f"a batch cannot have {header.count} records")
    try:
        for _ in range(header.count):
            length, pos = read_varint(data, pos, INT_SHIFT)
            stop = pos + length
            if length < 0 or stop > len(data):
                raise _invalid(f"a record of {length} bytes does not fit its batch")
            pos += 1
            timestamp_delta, pos = read_varint(data, pos, LONG_SHIFT)
            offset_delta, pos = read_varint(data, pos, INT_SHIFT)
            key, pos = _field(data, pos, stop)
            value, pos = _field(data, pos, stop)
            header_count, pos = read_varint(data, pos, INT_SHIFT)
            headers: tuple[Header, ...] = ()
            if header_count:
                headers, pos = _headers(data, pos, stop, header_count)
            if pos != stop:
                raise _invalid("the length of a record disagrees with its content")
            yield Record(
                base_offset + offset_delta,
                base_timestamp + timestamp_delta if append_time is None else append_time,
                key,
                value,
                headers,
            )
    except IndexError:
        raise _invalid("the records end in the middle of one") from None
    if pos != len(data):
        raise _invalid(f"{len(data) - pos} bytes follow the last record of a batch")


def _field(data: bytes | bytearray, pos: int, stop: int) -> tuple[bytes | None, int]:
    length, pos = read_varint(data, pos, INT_SHIFT)
    if length < 0:
        if length != -1:
            raise _invalid(f"a field of a record has the length {length}")
        return None, pos
    end = pos + length
    if end > stop:
        raise _invalid("a field of a record reaches over the record's end")
    return bytes(data[pos:end]), end


def _headers(data: bytes | bytearray, pos: int, stop: int, count: int) -> tuple[tuple[Header, ...], int]:
    # A header takes two bytes at least, so a count beyond half of what is left cannot be true.
    if count < 0 or count * 2 > stop - pos:
        raise _invalid(f"a record claims to have {count} headers")
    headers: list[Header] = []
    for _ in range(count):
        key, pos = _field(data, pos, stop)
        if key is None:
            raise _invalid("a record header has no key")
        value, pos = _field(data, pos, stop)
        try:
            headers.append(Header(key.decode(), value))
        except UnicodeDecodeError:
            raise _invalid("the key of a record header is not UTF-8") from None
    return tuple(headers), pos


def check_records(  # noqa: C901, PLR0912, PLR0915 - one flat loop, because a call per field would double its cost
    batch: Buffer, *, require_keys: bool = False, max_bytes: int = DEFAULT_MAX_BYTES
) -> BatchHeader:
    """Walk every record of a batch and refuse (INVALID_RECORD) whatever a reader would stumble over.

    Checked: lengths, the count, offset deltas 0, 1, 2..., the extent of key, value and headers, that nothing trails,
    and with `require_keys` (compacted topics) that no key is null. Bytes of keys and values are not copied. Where only
    keys or deltas are wrong the records are named (`InvalidRecordsError`), at most `MAX_NAMED_RECORDS` of them.
    """
    bad: list[tuple[int, str]] | None = None
    header, data = records_section(batch, max_bytes)
    end = len(data)
    pos = 0
    if header.count < 0:
        raise _invalid(f"a batch cannot have {header.count} records")
    try:
        for index in range(header.count):
            # The one-byte and two-byte varints that nearly all records have are unrolled: this loop is the cost.
            length = data[pos]
            pos += 1
            if length >= 0x80:
                if data[pos] < 0x80:
                    length += (data[pos] << 7) - 0x80
                    pos += 1
                else:
                    length, pos = read_varint(data, pos - 1, INT_SHIFT)
                    length = length << 1 if length >= 0 else 1
            stop = pos + (length >> 1)
            if length & 1 or stop > end:
                raise _invalid("the length of a record is negative or more than its batch has left")
            pos += 1
            if data[pos] < 0x80:
                pos += 1
            elif data[pos + 1] < 0x80:
                pos += 2
            else:
                _, pos = read_varint(data, pos, LONG_SHIFT)
            zigzag = index << 1
            if zigzag < 0x80:
                delta_is_right = data[pos] == zigzag
                pos += 1
            elif zigzag < 0x4000:
                delta_is_right = data[pos] == zigzag & 0x7F | 0x80 and data[pos + 1] == zigzag >> 7
                pos += 2
            else:
                delta, pos = read_varint(data, pos, INT_SHIFT)
                delta_is_right = delta == index
            if not delta_is_right:
                bad = _name(bad, index, "the record has another offset delta than its place in the batch")
            size = data[pos]
            pos += 1
            if size >= 0x80:
                size, pos = read_varint(data, pos - 1, INT_SHIFT)
                pos += size
                if size < 0:
                    raise _invalid(f"a key has the length {size}")
            elif size & 1:
                if size != 1:
                    raise _invalid("a key has a negative length")
                if require_keys:
                    bad = _name(bad, index, "a record of a compacted topic needs a key")
            else:
                pos += size >> 1
            # A length that reaches over the record's end is found here: no bytes are read beyond `stop` but this one.
            if pos >= stop:
                raise _invalid("a key reaches over the record's end")
            size = data[pos]
            pos += 1
            if size >= 0x80:
                if data[pos] < 0x80:
                    size += (data[pos] << 7) - 0x80
                    pos += 1
                else:
                    size, pos = read_varint(data, pos - 1, INT_SHIFT)
                    size = size << 1 if size >= 0 else 3
            if not size & 1:
                pos += size >> 1
            elif size != 1:
                raise _invalid("a value has a negative length")
            if pos >= stop:
                raise _invalid("a value reaches over the record's end")
            if data[pos] == 0:
                pos += 1
            else:
                count, pos = read_varint(data, pos, INT_SHIFT)
                _, pos = _headers(data, pos, stop, count)
            if pos != stop:
                raise _invalid("the length of a record disagrees with its content")
    except IndexError:
        raise _invalid("the records end in the middle of one") from None
    if pos != end:
        raise _invalid(f"{end - pos} bytes follow the last record of a batch")
    if bad is not None:
        raise InvalidRecordsError(f"{bad[0][1]}: record {bad[0][0]} of the batch", bad)
    return header


def _name(bad: list[tuple[int, str]] | None, index: int, reason: str) -> list[tuple[int, str]]:
    if bad is None:
        return [(index, reason)]
    if len(bad) < MAX_NAMED_RECORDS and bad[-1][0] != index:
        bad.append((index, reason))
    return bad
