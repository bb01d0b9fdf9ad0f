"""From records to a batch: for the broker's own topics, its command line and its tests.

What is not here: accumulation, linger, partitioning: those are a producer's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from millrace.errors import ApiError, ErrorCode
from millrace.model import NO_EPOCH, NO_PRODUCER_EPOCH, NO_PRODUCER_ID, NO_SEQUENCE, NO_TIMESTAMP
from millrace.records.batch import (
    CONTROL_BIT,
    HEADER_BYTES,
    LOG_OVERHEAD_BYTES,
    MAGIC,
    TIMESTAMP_TYPE_BIT,
    TRANSACTIONAL_BIT,
    BatchHeader,
    TimestampType,
    add_sequence,
    read_header,
    with_crc,
)
from millrace.records.compression import Buffer, Codec, compress
from millrace.records.decode import Header, Record, decode_records, records_section

_MINUS_ONE: Final = b"\x01"
_ZERO: Final = b"\x00"

__all__ = ["Header", "Record", "encode_batch", "halved", "recompress"]


def write_varint(value: int) -> bytes:
    """`value` as a zigzag varint (also for 64 bits)."""
    value = value << 1 if value >= 0 else (-value << 1) - 1
    if value < 0x80:
        return bytes((value,))
    parts = bytearray()
    while value > 0x7F:
        parts.append((value & 0x7F) | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _field(value: bytes | None) -> bytes:
    if value is None:
        return _MINUS_ONE
    return write_varint(len(value)) + value


def _encode_headers(headers: Sequence[Header]) -> bytes:
    if not headers:
        return _ZERO
    parts = [write_varint(len(headers))]
    for header in headers:
        parts.append(_field(header.key.encode()))
        parts.append(_field(header.value))
    return b"".join(parts)


def encode_batch(
    records: Sequence[Record],
    *,
    base_offset: int | None = None,
    compression: Codec = Codec.NONE,
    level: int | None = None,
    leader_epoch: int = NO_EPOCH,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
    base_sequence: int = NO_SEQUENCE,
    transactional: bool = False,
    control: bool = False,
    timestamp_type: TimestampType = TimestampType.CREATE,
) -> bytes:
    """One batch of `records`, in the order given; the first one's offset is the base unless `base_offset` is named."""
    if not records:
        raise ValueError("a record batch holds at least one record")
    base = records[0].offset if base_offset is None else base_offset
    base_timestamp = records[0].timestamp_ms
    max_timestamp = NO_TIMESTAMP
    parts: list[bytes] = []
    for record in records:
        max_timestamp = max(max_timestamp, record.timestamp_ms)
        body = b"".join(
            (
                _ZERO,
                write_varint(record.timestamp_ms - base_timestamp),
                write_varint(record.offset - base),
                _field(record.key),
                _field(record.value),
                _encode_headers(record.headers),
            )
        )
        parts.append(write_varint(len(body)))
        parts.append(body)
    payload = compress(compression, b"".join(parts), level)
    attributes = int(compression)
    if timestamp_type is TimestampType.LOG_APPEND:
        attributes |= TIMESTAMP_TYPE_BIT
    if transactional:
        attributes |= TRANSACTIONAL_BIT
    if control:
        attributes |= CONTROL_BIT
    header = BatchHeader(
        base_offset=base,
        batch_length=HEADER_BYTES - LOG_OVERHEAD_BYTES + len(payload),
        leader_epoch=leader_epoch,
        magic=MAGIC,
        crc=0,
        attributes=attributes,
        last_offset_delta=records[-1].offset - base,
        base_timestamp_ms=base_timestamp,
        max_timestamp_ms=max_timestamp,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        count=len(records),
    )
    return with_crc(header, payload).pack() + payload


def recompress(batch: Buffer, codec: Codec, *, max_bytes: int, level: int | None = None) -> bytes:
    """The same batch with its records under another codec: what a topic's `compression.type` asks of the broker.

    The records are neither decoded nor changed; damage in the old stream raises INVALID_RECORD.
    """
    header, records = records_section(batch, max_bytes)
    if header.is_control:
        raise ApiError(ErrorCode.INVALID_RECORD, "control batches are never compressed")
    payload = compress(codec, records, level)
    changed = header._replace(
        batch_length=HEADER_BYTES - LOG_OVERHEAD_BYTES + len(payload),
        attributes=header.attributes & ~0x07 | int(codec),
    )
    return with_crc(changed, payload).pack() + payload


def halved(batch: Buffer) -> list[tuple[bytes, int]]:
    """The records of a batch as two batches, each with its number of records: for a producer whose batch is too large.

    Everything else is kept: codec, producer and, between the two, the sequences.
    """
    header = read_header(batch)
    records = decode_records(batch)
    middle = len(records) // 2
    halves = []
    for first, part in ((0, records[:middle]), (middle, records[middle:])):
        sequence = header.base_sequence
        if sequence != NO_SEQUENCE:
            sequence = add_sequence(sequence, first)
        data = encode_batch(
            [replace(record, offset=number) for number, record in enumerate(part)],
            compression=header.codec,
            producer_id=header.producer_id,
            producer_epoch=header.producer_epoch,
            base_sequence=sequence,
            transactional=header.is_transactional,
        )
        halves.append((data, len(part)))
    return halves
