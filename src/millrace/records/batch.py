"""The record batch (magic 2): its header, walking a buffer of batches, and the checks a leader makes on a produced one.

    offset  bytes  field                          offset  bytes  field
         0      8  base offset                        27      8  base timestamp
         8      4  length of what follows             35      8  max timestamp
        12      4  partition leader epoch             43      8  producer id
        16      1  magic = 2                          51      2  producer epoch
        17      4  CRC-32C of bytes 21 to the end     53      4  base sequence
        21      2  attributes                         57      4  record count
        23      4  last offset delta                  61         records, compressed as one stream

Attributes: bits 0-2 codec, 3 timestamp type, 4 transactional, 5 control, 6 delete horizon.

The base offset, length and leader epoch lie outside the CRC: a leader stamps them without touching the records, which
are opaque to the broker (see `validate_produced`). What is not here: the records themselves (`decode`, `encode`).

Invariant: bad bytes raise `ApiError` and nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from crc32c import crc32c

from millrace.errors import ApiError, ErrorCode
from millrace.model import NO_TIMESTAMP
from millrace.records.compression import Buffer, Codec

HEADER: Final = struct.Struct(">qiibIhiqqqhii")
HEADER_BYTES: Final = HEADER.size
LOG_OVERHEAD_BYTES: Final = 12
"""Base offset and length: what precedes the bytes that the length counts."""
STAMP: Final = struct.Struct(">qii")
"""The part that a leader always rewrites: base offset, length, leader epoch."""
STAMP_BYTES: Final = STAMP.size
CRC_START: Final = 21
MIN_BATCH_LENGTH: Final = HEADER_BYTES - LOG_OVERHEAD_BYTES
MAGIC: Final = 2

CODEC_MASK: Final = 0x07
TIMESTAMP_TYPE_BIT: Final = 0x08
TRANSACTIONAL_BIT: Final = 0x10
CONTROL_BIT: Final = 0x20
DELETE_HORIZON_BIT: Final = 0x40
_ATTRIBUTES_LOW_BYTE: Final = 22
_MAGIC_BYTE: Final = 16

MAX_SEQUENCE: Final = 2**31 - 1
NO_LIMIT_MS: Final = 2**63 - 1

_CRC_FIELD: Final = struct.Struct(">I")
_LENGTH_AND_MAGIC: Final = struct.Struct(">8xi4xb")
_HIGHEST_CODEC: Final = max(Codec)


class TimestampType(IntEnum):
    """Who set the timestamps of a batch; the number is the attribute bit."""

    CREATE = 0
    LOG_APPEND = 1


class BatchHeader(NamedTuple):
    """The fixed part of a batch, field by field as it lies in the bytes."""

    base_offset: int
    batch_length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    count: int  # type: ignore[assignment]  # the spec's word for it; tuple.count is of no use here

    @property
    def size_bytes(self) -> int:
        """The whole batch, header included."""
        return self.batch_length + LOG_OVERHEAD_BYTES

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.last_offset_delta + 1

    @property
    def largest_timestamp_ms(self) -> int:
        """Of its records: -1 for a batch that compaction has emptied, whatever time it still carries."""
        return self.max_timestamp_ms if self.count else NO_TIMESTAMP

    @property
    def delete_horizon_ms(self) -> int | None:
        """When tombstones of the batch may go (KIP-534); compaction puts it in the place of the base timestamp."""
        return self.base_timestamp_ms if self.attributes & DELETE_HORIZON_BIT else None

    @property
    def codec_id(self) -> int:
        """The codec's number as it stands, which a damaged batch may have outside `Codec`."""
        return self.attributes & CODEC_MASK

    @property
    def codec(self) -> Codec:
        codec_id = self.attributes & CODEC_MASK
        if codec_id > _HIGHEST_CODEC:
            raise ApiError(ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, f"compression codec {codec_id} does not exist")
        return Codec(codec_id)

    @property
    def timestamp_type(self) -> TimestampType:
        return TimestampType.LOG_APPEND if self.attributes & TIMESTAMP_TYPE_BIT else TimestampType.CREATE

    @property
    def is_transactional(self) -> bool:
        return self.attributes & TRANSACTIONAL_BIT != 0

    @property
    def is_control(self) -> bool:
        return self.attributes & CONTROL_BIT != 0

    @property
    def has_producer(self) -> bool:
        return self.producer_id >= 0

    @property
    def last_sequence(self) -> int:
        """The sequence of the last record; sequences wrap from 2^31-1 to 0."""
        if self.base_sequence < 0:
            return self.base_sequence
        return add_sequence(self.base_sequence, self.last_offset_delta)

    def pack(self) -> bytes:
        return HEADER.pack(*self)


class Batch(NamedTuple):
    """A batch inside a larger buffer: its header and a view of all its bytes."""

    header: BatchHeader
    data: memoryview


@dataclass(frozen=True, slots=True)
class ProduceLimits:
    """What a topic's settings allow of a produced batch."""

    max_message_bytes: int = 1_048_588
    timestamp_before_max_ms: int = NO_LIMIT_MS
    timestamp_after_max_ms: int = 3_600_000


def add_sequence(sequence: int, increment: int) -> int:
    """`sequence` moved forward, wrapping from 2^31-1 to 0."""
    return (sequence + increment) & MAX_SEQUENCE


def read_header(buffer: Buffer, pos: int = 0) -> BatchHeader:
    """The header at `pos`; only its presence is checked, not its sense."""
    if pos < 0 or pos + HEADER_BYTES > len(buffer):
        raise ApiError(ErrorCode.CORRUPT_MESSAGE, "the record batch is shorter than its header")
    return BatchHeader._make(HEADER.unpack_from(buffer, pos))


def split(buffer: Buffer, *, partial_end: bool = False) -> Iterator[Batch]:
    """The batches that lie one after another in `buffer`, as views; CRCs are not checked.

    With `partial_end` an incomplete last batch is left out silently, as the answer to a Fetch may end in one.
    """
    view = memoryview(buffer)
    pos = 0
    end = len(view)
    while pos < end:
        if end - pos < HEADER_BYTES:
            if partial_end:
                return
            raise ApiError(ErrorCode.CORRUPT_MESSAGE, "the record batch is shorter than its header")
        header = BatchHeader._make(HEADER.unpack_from(view, pos))
        if header.magic != MAGIC:
            raise _unsupported_magic(header.magic)
        if header.batch_length < MIN_BATCH_LENGTH:
            raise _impossible_length(header.batch_length)
        stop = pos + header.batch_length + LOG_OVERHEAD_BYTES
        if stop > end:
            if partial_end:
                return
            raise ApiError(ErrorCode.CORRUPT_MESSAGE, "the record batch is longer than the bytes that hold it")
        yield Batch(header, view[pos:stop])
        pos = stop


def last_complete(buffer: Buffer) -> BatchHeader | None:
    """The header of the last batch that lies whole in `buffer`, which may end in part of one; None without any.

    The same walk as `split`, for readers that only want to know how far they have come: it makes nothing of the others.
    """
    pos, last, end = 0, -1, len(buffer)
    length_and_magic = _LENGTH_AND_MAGIC.unpack_from
    while end - pos >= HEADER_BYTES:
        length, magic = length_and_magic(buffer, pos)
        if magic != MAGIC:
            raise _unsupported_magic(magic)
        if length < MIN_BATCH_LENGTH:
            raise _impossible_length(length)
        if pos + length + LOG_OVERHEAD_BYTES > end:
            break
        last, pos = pos, pos + length + LOG_OVERHEAD_BYTES
    return None if last < 0 else read_header(buffer, last)


def _unsupported_magic(magic: int) -> ApiError:
    return ApiError(ErrorCode.CORRUPT_MESSAGE, f"record batches of magic {magic} are not supported")


def _impossible_length(length: int) -> ApiError:
    return ApiError(ErrorCode.CORRUPT_MESSAGE, f"the record batch has an impossible length {length}")


def crc_matches(batch: Buffer) -> bool:
    """Whether a complete batch (exactly its bytes) carries the CRC of its content."""
    view = memoryview(batch)
    return bool(crc32c(view[CRC_START:]) == _CRC_FIELD.unpack_from(view, CRC_START - 4)[0])


def attributes_of(batch: Buffer) -> int:
    """The attributes of a batch, of which only the low byte has a meaning; 0 for what is no batch."""
    return batch[_ATTRIBUTES_LOW_BYTE] if len(batch) >= HEADER_BYTES and batch[_MAGIC_BYTE] == MAGIC else 0


def validate_produced(records: Buffer, limits: ProduceLimits, now_ms: int) -> BatchHeader:
    """The checks on what a client produces to one partition: exactly one sound batch; returns its header.

    The records inside are not looked at: header and CRC are what the broker vouches for. So a batch with a valid CRC
    whose records are nonsense is stored, and is the problem of the client that made it and of those that read it. Kafka
    walks every record instead, which would cost this broker more than everything else it does for a batch;
    `millrace.records.decode.check_records` does that walk, for compacted topics and where a setting asks for it.
    Timestamps are judged by the header's first and largest.
    """
    size = len(records)
    if size < HEADER_BYTES:
        raise ApiError(ErrorCode.INVALID_RECORD if size == 0 else ErrorCode.CORRUPT_MESSAGE, "no complete record batch")
    header = BatchHeader._make(HEADER.unpack_from(records, 0))
    (base_offset, length, _, magic, crc, attributes, last_offset_delta, base_timestamp_ms, max_timestamp_ms,
     producer_id, producer_epoch, base_sequence, count) = header  # fmt: skip
    if magic != MAGIC:
        # The old formats are well formed but no longer spoken; anything else is not a batch at all.
        code = ErrorCode.INVALID_RECORD if magic in {0, 1} else ErrorCode.CORRUPT_MESSAGE
        raise ApiError(code, f"record batches of magic {magic} are not supported, only {MAGIC}")
    if length < MIN_BATCH_LENGTH:
        raise _impossible_length(length)
    batch_bytes = length + LOG_OVERHEAD_BYTES
    if batch_bytes != size:
        if batch_bytes > size:
            raise ApiError(ErrorCode.CORRUPT_MESSAGE, f"the record batch wants {batch_bytes} bytes and has {size}")
        raise ApiError(ErrorCode.INVALID_RECORD, "exactly one record batch per partition is allowed in a request")
    if size > limits.max_message_bytes:
        raise ApiError(
            ErrorCode.MESSAGE_TOO_LARGE,
            f"the record batch has {size} bytes, the topic allows {limits.max_message_bytes}",
        )
    if crc32c(memoryview(records)[CRC_START:]) != crc:
        raise ApiError(ErrorCode.CORRUPT_MESSAGE, "the CRC of the record batch does not match its bytes")
    if count <= 0 or last_offset_delta != count - 1 or base_offset != 0:
        raise ApiError(
            ErrorCode.INVALID_RECORD,
            f"a produced batch starts at offset 0 and ends at its count less one, not {base_offset}, "
            f"{last_offset_delta} of {count}",
        )
    if attributes & (CODEC_MASK | TIMESTAMP_TYPE_BIT | CONTROL_BIT | TRANSACTIONAL_BIT):
        _check_attributes(attributes, producer_id)
    if producer_id >= 0 and (base_sequence < 0 or producer_epoch < 0):
        raise ApiError(
            ErrorCode.INVALID_RECORD,
            f"producer {producer_id} sent sequence {base_sequence} in epoch {producer_epoch}",
        )
    if max_timestamp_ms > now_ms + limits.timestamp_after_max_ms or (
        base_timestamp_ms < now_ms - limits.timestamp_before_max_ms and base_timestamp_ms != -1
    ):
        raise ApiError(
            ErrorCode.INVALID_TIMESTAMP,
            f"the timestamps {base_timestamp_ms} to {max_timestamp_ms} are outside what the topic allows at {now_ms}",
        )
    return header


def _check_attributes(attributes: int, producer_id: int) -> None:
    if attributes & CODEC_MASK > _HIGHEST_CODEC:
        raise ApiError(
            ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, f"compression codec {attributes & CODEC_MASK} does not exist"
        )
    if attributes & CONTROL_BIT:
        raise ApiError(ErrorCode.INVALID_RECORD, "clients are not allowed to write control records")
    if attributes & TIMESTAMP_TYPE_BIT:
        raise ApiError(ErrorCode.INVALID_TIMESTAMP, "only the broker may set the timestamp type to LogAppendTime")
    if attributes & TRANSACTIONAL_BIT and producer_id < 0:
        raise ApiError(ErrorCode.INVALID_RECORD, "a transactional batch needs a producer id")


def stamp_log_append_time(header: BatchHeader, records: Buffer, now_ms: int) -> BatchHeader:
    """The header of `records` with LogAppendTime set to `now_ms` and the CRC made anew; the records stay as they are.

    A reader takes the max timestamp for every record of such a batch, so nothing inside has to change.
    """
    stamped = header._replace(attributes=header.attributes | TIMESTAMP_TYPE_BIT, max_timestamp_ms=now_ms)
    return with_crc(stamped, memoryview(records)[HEADER_BYTES:])


def with_crc(header: BatchHeader, payload: Buffer) -> BatchHeader:
    """`header` with the CRC that belongs to it and to the (compressed) records behind it."""
    return header._replace(crc=crc32c(payload, crc32c(header.pack()[CRC_START:])))
