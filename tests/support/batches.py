"""Record batches for tests: small, readable, and every field can be overridden."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.records.batch import HEADER_BYTES, BatchHeader, TimestampType, read_header, with_crc
from millrace.records.compression import Codec
from millrace.records.decode import Header, Record
from millrace.records.encode import encode_batch

NOW_MS = 1_700_000_000_000


def records(count: int, *, first: int = 0, size: int = 10, timestamp_ms: int = NOW_MS) -> list[Record]:
    """`count` records with keys and values that name their place, one millisecond apart."""
    return [
        Record(first + i, timestamp_ms + i, b"k%d" % (first + i), (b"v%d " % (first + i)).ljust(size, b"."))
        for i in range(count)
    ]


def batch(
    count: int = 1,
    *,
    size: int = 10,
    timestamp_ms: int = NOW_MS,
    codec: Codec = Codec.NONE,
    producer_id: int = -1,
    producer_epoch: int = -1,
    sequence: int = -1,
    transactional: bool = False,
    base_offset: int = 0,
    leader_epoch: int = -1,
    timestamp_type: TimestampType = TimestampType.CREATE,
    headers: Sequence[Header] = (),
) -> bytes:
    """A batch as a producer sends it (base offset 0 unless named)."""
    rows = [
        Record(base_offset + r.offset, r.timestamp_ms, r.key, r.value, tuple(headers))
        for r in records(count, size=size, timestamp_ms=timestamp_ms)
    ]
    return encode_batch(
        rows,
        compression=codec,
        leader_epoch=leader_epoch,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=sequence,
        transactional=transactional,
        timestamp_type=timestamp_type,
    )


def from_producer(producer_id: int, sequence: int, count: int = 1, *, epoch: int = 0, size: int = 10) -> bytes:
    """A batch of an idempotent producer."""
    return batch(count, size=size, producer_id=producer_id, producer_epoch=epoch, sequence=sequence)


def with_header(data: bytes, *, fix_crc: bool = True, **fields: int) -> bytes:
    """`data` with header fields replaced; the CRC is made right again unless it is one of them."""
    header: BatchHeader = read_header(data)._replace(**fields)
    payload = data[HEADER_BYTES:]
    if fix_crc and "crc" not in fields:
        header = with_crc(header, payload)
    return header.pack() + payload


def with_payload(data: bytes, payload: bytes, **fields: int) -> bytes:
    """The header of `data` in front of other (compressed) records, with length and CRC made right."""
    header = read_header(data)._replace(batch_length=HEADER_BYTES - 12 + len(payload), **fields)
    return with_crc(header, payload).pack() + payload
