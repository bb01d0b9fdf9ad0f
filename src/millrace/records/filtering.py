"""Batches that lose some of their records: what is read of a batch when most will go, and what is left of it.

Offsets never change: a batch keeps its base and its last offset whatever it loses, and its sequence numbers with them,
so that a producer's state can still be read from it. Records are copied as bytes; they are written anew only where a
delete horizon is set (KIP-534), because that takes the place of the base timestamp that their own are counted from.
What is not here: which records go (`storage.compaction`).

Invariant: damage raises `ApiError` (INVALID_RECORD) and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from millrace.errors import ApiError, ErrorCode
from millrace.model import NO_TIMESTAMP
from millrace.records.batch import (
    CODEC_MASK,
    DELETE_HORIZON_BIT,
    MIN_BATCH_LENGTH,
    BatchHeader,
    TimestampType,
    with_crc,
)
from millrace.records.compression import compress
from millrace.records.decode import INT_SHIFT, LONG_SHIFT, read_varint
from millrace.records.encode import write_varint

_ATTRIBUTES: Final = b"\x00"


class Span(NamedTuple):
    """Where a record lies among the bytes of its batch, and what compaction asks of it."""

    start: int
    stop: int
    after_timestamp: int
    """Where the part begins that does not depend on the base timestamp."""
    timestamp_delta_ms: int
    offset_delta: int
    key: bytes | None
    has_value: bool


def record_spans(header: BatchHeader, data: bytes | bytearray) -> list[Span]:
    """The records of a batch, from its decompressed records; values and headers are not looked into."""
    spans: list[Span] = []
    make = Span._make
    end = len(data)
    pos = 0
    previous_delta = -1
    try:
        for _ in range(header.count):
            start = pos
            # The one-byte varints that most records have are unrolled: this loop is the cost of compaction.
            length = data[pos]
            if length < 0x80:
                length = (length >> 1) ^ -(length & 1)
                pos += 1
            else:
                length, pos = read_varint(data, pos, INT_SHIFT)
            stop = pos + length
            if length < 0 or stop > end:
                raise _invalid(f"a record of {length} bytes does not fit its batch")
            pos += 1
            byte = data[pos]
            if byte < 0x80:
                timestamp_delta = (byte >> 1) ^ -(byte & 1)
                pos += 1
            else:
                timestamp_delta, pos = read_varint(data, pos, LONG_SHIFT)
            after_timestamp = pos
            byte = data[pos]
            if byte < 0x80:
                offset_delta = (byte >> 1) ^ -(byte & 1)
                pos += 1
            else:
                offset_delta, pos = read_varint(data, pos, INT_SHIFT)
            byte = data[pos]
            if byte < 0x80:
                size = (byte >> 1) ^ -(byte & 1)
                pos += 1
            else:
                size, pos = read_varint(data, pos, INT_SHIFT)
            key: bytes | None = None
            if size >= 0:
                key = bytes(data[pos : pos + size])
                pos += size
            if pos >= stop or size < -1 or not previous_delta < offset_delta <= header.last_offset_delta:
                raise _invalid("the key or the offset of a record cannot be")
            previous_delta = offset_delta
            byte = data[pos]
            has_value = byte != 1 if byte < 0x80 else read_varint(data, pos, INT_SHIFT)[0] >= 0
            spans.append(make((start, stop, after_timestamp, timestamp_delta, offset_delta, key, has_value)))
            pos = stop
    except IndexError:
        raise _invalid("the records end in the middle of one") from None
    if pos != end:
        raise _invalid(f"{end - pos} bytes follow the last record of a batch")
    return spans


def value_of(data: bytes | bytearray, span: Span) -> bytes | None:
    """The value of a record, which `record_spans` has passed over."""
    _, pos = read_varint(data, span.after_timestamp, INT_SHIFT)
    key_bytes, pos = read_varint(data, pos, INT_SHIFT)
    size, pos = read_varint(data, pos + max(key_bytes, 0), INT_SHIFT)
    if size < -1 or pos + max(size, 0) > span.stop:
        raise _invalid("the value of a record does not fit it")
    return None if size < 0 else bytes(data[pos : pos + size])


def with_records(
    header: BatchHeader, data: bytes | bytearray, kept: Sequence[Span], *, delete_horizon_ms: int | None = None
) -> bytes:
    """The batch with only the `kept` ones of its records, in its own codec; with a horizon, from now on with that."""
    base_timestamp_ms, attributes = header.base_timestamp_ms, header.attributes
    if delete_horizon_ms is None:
        payload = b"".join([data[span.start : span.stop] for span in kept])
    else:
        payload = b"".join(_moved(data, span, base_timestamp_ms - delete_horizon_ms) for span in kept)
        attributes |= DELETE_HORIZON_BIT
    max_timestamp_ms = header.max_timestamp_ms
    if header.timestamp_type is TimestampType.CREATE:
        max_timestamp_ms = base_timestamp_ms + max(span.timestamp_delta_ms for span in kept)
    payload = compress(header.codec, payload)
    changed = header._replace(
        batch_length=MIN_BATCH_LENGTH + len(payload),
        attributes=attributes,
        base_timestamp_ms=base_timestamp_ms if delete_horizon_ms is None else delete_horizon_ms,
        max_timestamp_ms=max_timestamp_ms,
        count=len(kept),
    )
    return with_crc(changed, payload).pack() + payload


def _moved(data: bytes | bytearray, span: Span, by_ms: int) -> bytes:
    rest = data[span.after_timestamp : span.stop]
    delta = write_varint(span.timestamp_delta_ms + by_ms)
    return write_varint(1 + len(delta) + len(rest)) + _ATTRIBUTES + delta + rest


def without_records(header: BatchHeader) -> bytes:
    """The batch without any record: its offsets, and what it says of its producer."""
    changed = header._replace(
        batch_length=MIN_BATCH_LENGTH,
        attributes=header.attributes & ~(CODEC_MASK | DELETE_HORIZON_BIT),
        base_timestamp_ms=NO_TIMESTAMP,
        count=0,
    )
    return with_crc(changed, b"").pack()


def _invalid(reason: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_RECORD, reason)
