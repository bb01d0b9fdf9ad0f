"""From Arrow columns to record batches, and from keys to partitions: what the sink sends.

A compiled kernel writes the records of one batch after another into one buffer; compression, header and CRC follow per
batch. The functions `..._in_python` do the same row by row: the reference in tests, and the way out where numba is
missing. What is not here: the kernels (`kernels`), which topic and partition a row goes to beyond the hash of its key,
sequence numbers across calls, sending.

Invariants:
- Rows keep their order, each is in exactly one batch, and no batch exceeds `max_batch_bytes` before compression unless
  a single record does.
- Both ways give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millrace.errors import ApiError, ErrorCode
from millrace.model import NO_EPOCH, NO_PRODUCER_EPOCH, NO_PRODUCER_ID, NO_SEQUENCE
from millrace.records.batch import (
    HEADER_BYTES,
    LOG_OVERHEAD_BYTES,
    MAGIC,
    TRANSACTIONAL_BIT,
    BatchHeader,
    add_sequence,
    with_crc,
)
from millrace.records.compression import Codec, compress
from millrace.records.decode import Header, Record
from millrace.records.encode import encode_batch
from millrace.records.hashing import partition_of
from millrace.spark.compiled import load_kernels

Bytes = npt.NDArray[np.uint8]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_MAX_RECORD_BYTES: Final = 2**31 - 1
_NO_BYTES: Final = np.empty(0, np.uint8)
_NO_ENDS: Final = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """One record batch at base offset 0, ready to be produced."""

    data: bytes
    count: int
    first_row: int
    """The place of its first record in the selection of rows that was encoded."""


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """What the batches of one call have in common; the sequence is that of the first record and goes on from there."""

    codec: Codec = Codec.NONE
    level: int | None = None
    max_batch_bytes: int = 1_000_000
    producer_id: int = NO_PRODUCER_ID
    producer_epoch: int = NO_PRODUCER_EPOCH
    base_sequence: int = NO_SEQUENCE
    transactional: bool = False


# --- partitions -------------------------------------------------------------------------------------------------------


def partition_for_keys(keys: pa.Array, partition_count: int) -> Int32s:
    """The partition that the Java client's default partitioner gives each key; -1 for a null, which goes anywhere."""
    if partition_count < 1:
        raise ValueError(f"a topic cannot have {partition_count} partitions")
    kernels = load_kernels()
    if kernels is None:
        return partition_for_keys_in_python(keys, partition_count)
    field = _Field.of(keys)
    partitions = np.empty(len(keys), np.int32)
    kernels.partition_keys(field.ends, field.bytes, field.validity, partition_count, partitions)
    return partitions


def partition_for_keys_in_python(keys: pa.Array, partition_count: int) -> Int32s:
    """As `partition_for_keys`, key by key."""
    return np.array([-1 if key is None else partition_of(key, partition_count) for key in _as_python(keys)], np.int32)


# --- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Field:
    """A binary column as the kernels take it: row i is bytes[ends[i]:ends[i + 1]].

    `validity` has a byte per row, or none when nothing is null; no `ends` say that everything is.
    """

    ends: Int64s
    bytes: Bytes
    validity: Bytes

    @classmethod
    def of(cls, column: pa.Array | None) -> _Field:
        if column is None:
            return _ABSENT
        array = _binary(column)
        if pa.types.is_null(array.type):
            return _ABSENT
        _, ends, data = array.buffers()
        wide = pa.types.is_large_binary(array.type) or pa.types.is_large_string(array.type)
        return cls(
            _ends_of(array, ends, wide=wide),
            _NO_BYTES if data is None or data.size == 0 else np.frombuffer(data, np.uint8),
            _validity_of(array),
        )


_ABSENT: Final = _Field(_NO_ENDS, _NO_BYTES, _NO_BYTES)


@dataclass(frozen=True, slots=True)
class Rows:
    """The columns of a record, made ready once for any number of calls of `encode_rows`.

    key and value: binary or string, headers: list of struct of a string and a binary, all of one length, with nulls;
    `timestamp_ms` has no nulls. Arrays may be slices of larger ones.
    """

    count: int
    timestamp_ms: Int64s
    key: pa.Array | None
    value: pa.Array
    headers: pa.Array | None
    _key: _Field
    _value: _Field
    _list_ends: Int64s
    _list_validity: Bytes
    _names: _Field
    _contents: _Field

    @classmethod
    def of(cls, key: pa.Array | None, value: pa.Array, headers: pa.Array | None, timestamp_ms: Int64s) -> Rows:
        count = len(value)
        for name, column in (("key", key), ("headers", headers), ("timestamp", timestamp_ms)):
            if column is not None and len(column) != count:
                raise ValueError(f"the {name} column has {len(column)} rows, the value column {count}")
        list_ends, list_validity, names, contents = _NO_ENDS, _NO_BYTES, _ABSENT, _ABSENT
        if headers is not None:
            headers = _one_array(headers)
            if not pa.types.is_null(headers.type):
                list_ends, list_validity, names, contents = _header_fields(headers)
        return cls(
            count, np.require(timestamp_ms, np.int64, ("C", "A")), key, value, headers,
            _Field.of(key), _Field.of(value), list_ends, list_validity, names, contents,
        )  # fmt: skip

    def write(
        self, kernels: ModuleType, rows: Int64s, first: int, output: Bytes, stop: int
    ) -> tuple[int, int, int, int]:
        """Write rows[first:] behind the place of a header, as `kernels.encode_records` says."""
        written: tuple[int, int, int, int] = kernels.encode_records(
            rows, first, self.timestamp_ms,
            self._key.ends, self._key.bytes, self._key.validity,
            self._value.ends, self._value.bytes, self._value.validity,
            self._list_ends, self._list_validity,
            self._names.ends, self._names.bytes,
            self._contents.ends, self._contents.bytes, self._contents.validity,
            output, HEADER_BYTES, stop,
        )  # fmt: skip
        return written


def _one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _binary(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The column in one of the types whose buffers the kernels read."""
    array = _one_array(column)
    kind = array.type
    if (
        pa.types.is_binary(kind) or pa.types.is_string(kind)
        or pa.types.is_large_binary(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)
    ):  # fmt: skip
        return array
    try:
        return array.cast(pa.large_binary())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise TypeError(f"a column of type {kind} is neither binary nor string: {error}") from error


def _ends_of(array: pa.Array, ends: pa.Buffer | None, *, wide: bool) -> Int64s:
    """The offsets of a sliced array, widened; an array of no rows may have no buffer for them."""
    if ends is None or ends.size == 0:
        return np.zeros(1, np.int64)
    kind = np.dtype(np.int64 if wide else np.int32)
    found = np.frombuffer(ends, kind, len(array) + 1, array.offset * kind.itemsize)
    # A buffer that came over a wire may lie at any address, and the kernels are compiled for aligned ones.
    return np.require(found, np.int64, "A")


def _validity_of(array: pa.Array) -> Bytes:
    bitmap = array.buffers()[0]
    if array.null_count == 0 or bitmap is None:
        return _NO_BYTES
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")
    return bits[array.offset : array.offset + len(array)]


def _header_fields(headers: pa.Array) -> tuple[Int64s, Bytes, _Field, _Field]:
    kind = headers.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        raise TypeError(f"headers are a list of structs of key and value, not {kind}")
    element = kind.value_type
    if not pa.types.is_struct(element) or element.num_fields != 2:
        raise TypeError(f"headers are a list of structs of key and value, not of {element}")
    ends = _ends_of(headers, headers.buffers()[1], wide=pa.types.is_large_list(kind))
    # Only the elements that the rows refer to: what a slice leaves out may be anything.
    structs = headers.values.slice(int(ends[0]), int(ends[-1] - ends[0]))
    ends = ends - ends[0]
    name, content = _header_places(element)
    names, contents = structs.field(name), structs.field(content)
    if structs.null_count or names.null_count:
        raise ApiError(ErrorCode.INVALID_RECORD, "a header is null or has no key: Kafka's headers need one")
    return ends, _validity_of(headers), _Field.of(names), _Field.of(contents)


def _header_places(element: pa.DataType) -> tuple[int, int]:
    """Where key and value stand: by name, or in this order when they are called otherwise."""
    return (1, 0) if element.get_field_index("key") == 1 or element.get_field_index("value") == 0 else (0, 1)


# --- encoding ---------------------------------------------------------------------------------------------------------


def encode(
    key: pa.Array | None,
    value: pa.Array,
    headers: pa.Array | None,
    timestamp_ms: Int64s,
    rows: Int64s,
    *,
    codec: Codec,
    max_batch_bytes: int,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
    base_sequence: int = NO_SEQUENCE,
    transactional: bool = False,
    level: int | None = None,
) -> Iterator[EncodedBatch]:
    """Record batches of the named rows, in their order; see `Rows` and `BatchSettings` for the arguments.

    For one selection of rows. Many selections from the same columns go through `Rows.of` once and `encode_rows`.
    """
    settings = BatchSettings(codec, level, max_batch_bytes, producer_id, producer_epoch, base_sequence, transactional)
    return encode_rows(Rows.of(key, value, headers, timestamp_ms), rows, settings)


def encode_rows(columns: Rows, rows: Int64s, settings: BatchSettings) -> Iterator[EncodedBatch]:
    """Record batches of the named rows of `columns`, in their order."""
    rows = _checked(rows, columns)
    kernels = load_kernels()
    if kernels is None:
        return _encode_rows_in_python(columns, rows, settings)
    return _encode_rows_compiled(kernels, columns, rows, settings)


def _checked(rows: Int64s, columns: Rows) -> Int64s:
    """The selection as the kernels take it: they look no number up that is not a row."""
    rows = np.require(rows, np.int64, ("C", "A"))
    if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= columns.count):
        raise IndexError(f"the rows {rows.min()} to {rows.max()} of {columns.count}")
    return rows


def _encode_rows_compiled(
    kernels: ModuleType, columns: Rows, rows: Int64s, settings: BatchSettings
) -> Iterator[EncodedBatch]:
    stop = max(settings.max_batch_bytes, HEADER_BYTES)
    output = np.empty(stop, np.uint8)
    sequence = settings.base_sequence
    first = 0
    while first < len(rows):
        after, end, max_timestamp_ms, needed = columns.write(kernels, rows, first, output, stop)
        if after == first:
            if needed > _MAX_RECORD_BYTES:
                raise _too_large(needed)
            # A record larger than the limit travels alone, and whether it is too large is for the broker to say.
            alone = np.empty(HEADER_BYTES + needed, np.uint8)
            after, end, max_timestamp_ms, _ = columns.write(kernels, rows[: first + 1], first, alone, len(alone))
            records = alone[HEADER_BYTES:end].data
        else:
            records = output[HEADER_BYTES:end].data
        count = after - first
        base_timestamp_ms = int(columns.timestamp_ms[rows[first]])
        data = _finish(records, count, base_timestamp_ms, max_timestamp_ms, sequence, settings)
        yield EncodedBatch(data, count, first)
        if sequence >= 0:
            sequence = add_sequence(sequence, count)
        first = after


def _too_large(size_bytes: int) -> ApiError:
    return ApiError(ErrorCode.MESSAGE_TOO_LARGE, f"a record of {size_bytes} bytes is more than the format can hold")


def _finish(
    records: memoryview,
    count: int,
    base_timestamp_ms: int,
    max_timestamp_ms: int,
    sequence: int,
    settings: BatchSettings,
) -> bytes:
    """The batch around these records."""
    payload = records if settings.codec is Codec.NONE else compress(settings.codec, records, settings.level)
    header = BatchHeader(
        base_offset=0,
        batch_length=HEADER_BYTES - LOG_OVERHEAD_BYTES + len(payload),
        leader_epoch=NO_EPOCH,
        magic=MAGIC,
        crc=0,
        attributes=int(settings.codec) | (TRANSACTIONAL_BIT if settings.transactional else 0),
        last_offset_delta=count - 1,
        base_timestamp_ms=base_timestamp_ms,
        max_timestamp_ms=max_timestamp_ms,
        producer_id=settings.producer_id,
        producer_epoch=settings.producer_epoch,
        base_sequence=sequence,
        count=count,
    )
    return b"".join((with_crc(header, payload).pack(), payload))


# --- in Python --------------------------------------------------------------------------------------------------------


def encode_in_python(
    key: pa.Array | None,
    value: pa.Array,
    headers: pa.Array | None,
    timestamp_ms: Int64s,
    rows: Int64s,
    *,
    codec: Codec,
    max_batch_bytes: int,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
    base_sequence: int = NO_SEQUENCE,
    transactional: bool = False,
    level: int | None = None,
) -> Iterator[EncodedBatch]:
    """As `encode`, with an object per record."""
    settings = BatchSettings(codec, level, max_batch_bytes, producer_id, producer_epoch, base_sequence, transactional)
    columns = Rows.of(key, value, headers, timestamp_ms)
    return _encode_rows_in_python(columns, _checked(rows, columns), settings)


def _encode_rows_in_python(columns: Rows, rows: Int64s, settings: BatchSettings) -> Iterator[EncodedBatch]:
    keys = _as_python(columns.key) if columns.key is not None else None
    values = _as_python(columns.value)
    headers = _headers_as_python(columns.headers) if columns.headers is not None else None
    sequence = settings.base_sequence
    records: list[Record] = []
    size_bytes = HEADER_BYTES
    first = 0
    for place, row in enumerate(rows.tolist()):
        record = Record(
            len(records),
            int(columns.timestamp_ms[row]),
            keys[row] if keys is not None else None,
            values[row],
            headers[row] if headers is not None else (),
        )
        added = _record_bytes(record, records)
        if records and size_bytes + added > settings.max_batch_bytes:
            yield _encoded(records, first, sequence, settings)
            sequence = add_sequence(sequence, len(records)) if sequence >= 0 else sequence
            record = Record(0, record.timestamp_ms, record.key, record.value, record.headers)
            records, size_bytes, first = [], HEADER_BYTES, place
            added = _record_bytes(record, records)
        records.append(record)
        size_bytes += added
    if records:
        yield _encoded(records, first, sequence, settings)


def _encoded(records: list[Record], first: int, sequence: int, settings: BatchSettings) -> EncodedBatch:
    data = encode_batch(
        records,
        base_offset=0,
        compression=settings.codec,
        level=settings.level,
        producer_id=settings.producer_id,
        producer_epoch=settings.producer_epoch,
        base_sequence=sequence,
        transactional=settings.transactional,
    )
    return EncodedBatch(data, len(records), first)


def _record_bytes(record: Record, before: list[Record]) -> int:
    """The size of `record` in a batch, behind these."""
    base_timestamp_ms = before[0].timestamp_ms if before else record.timestamp_ms
    size = 1 + _varint_bytes(record.timestamp_ms - base_timestamp_ms) + _varint_bytes(len(before))
    size += _field_bytes(record.key) + _field_bytes(record.value) + _varint_bytes(len(record.headers))
    size += sum(_field_bytes(header.key.encode()) + _field_bytes(header.value) for header in record.headers)
    if size > _MAX_RECORD_BYTES:
        raise _too_large(size)
    return size + _varint_bytes(size)


def _varint_bytes(value: int) -> int:
    zigzag = value << 1 if value >= 0 else (-value << 1) - 1
    return max(1, (zigzag.bit_length() + 6) // 7)


def _field_bytes(value: bytes | None) -> int:
    return 1 if value is None else _varint_bytes(len(value)) + len(value)


def _as_python(column: pa.Array) -> list[bytes | None]:
    return [item.encode() if isinstance(item, str) else item for item in _binary(column).to_pylist()]


def _headers_as_python(headers: pa.Array) -> list[tuple[Header, ...]]:
    if pa.types.is_null(headers.type):
        return [()] * len(headers)
    name, content = _header_places(headers.type.value_type)
    return [
        tuple(_header(*(list(element.values())[place] for place in (name, content))) for element in row) if row else ()
        for row in headers.to_pylist()
    ]


def _header(name: str | bytes, content: str | bytes | None) -> Header:
    return Header(
        name if isinstance(name, str) else name.decode(), content.encode() if isinstance(content, str) else content
    )
