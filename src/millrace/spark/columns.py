"""From the record batches of a fetch to Arrow columns, without a Python object per record.

The work of a fetch: walk the batches, leave out those that are not wanted (control, aborted, outside the range of
offsets), check CRCs, decompress, and let a compiled kernel write all records straight into one set of Arrow buffers.
`decode_in_python` does the same record by record; it is the reference in tests, the way out where numba is missing, and
it says what is wrong with a batch that the kernel refuses. What is not here: the kernels (`kernels`), fetching.

Invariants:
- Both ways give equal columns, or both raise `ApiError`.
- A column set holds at most about `chunk_bytes` of keys, values and headers, or one record batch where that is larger;
  always less than the 2^31 bytes that Arrow's binary type can address.
- The bytes must not change while `decode` runs. The columns do not refer to them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c

from millrace.errors import ApiError, ErrorCode
from millrace.model import TopicPartition
from millrace.records.aborted import AbortedTransactions
from millrace.records.batch import (
    CODEC_MASK,
    CONTROL_BIT,
    CRC_START,
    HEADER_BYTES,
    LOG_OVERHEAD_BYTES,
    MAGIC,
    MIN_BATCH_LENGTH,
    BatchHeader,
    TimestampType,
    crc_matches,
    read_header,
)
from millrace.records.compression import Buffer, Codec, decompress
from millrace.records.decode import Record, decode_records
from millrace.spark.compiled import load_kernels

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

DEFAULT_CHUNK_BYTES: Final = 64 * 1024 * 1024
DEFAULT_MAX_BATCH_BYTES: Final = 256 * 1024 * 1024
"""What one record batch may decompress to: far more than brokers are set to take, and bounded."""
_MAX_ARROW_BYTES: Final = 2**31 - 1
_TABLE_ROWS: Final = 1024
_PLACE_ROWS: Final = 4096
_MAGIC_BYTE: Final = 16
_MAX_OFFSET: Final = 2**62
_MAX_TIMESTAMP_MS: Final = 2**53

TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
HEADER: Final = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
HEADERS: Final = pa.list_(pa.field("element", HEADER))
"""Types and names as Spark maps its own to Arrow."""


@dataclass(frozen=True, slots=True)
class RecordColumns:
    """The records of one partition, a column per field; all columns have the same length."""

    key: pa.Array
    value: pa.Array
    offset: pa.Array
    timestamp: pa.Array
    timestamp_type: pa.Array
    headers: pa.Array | None

    @property
    def count(self) -> int:
        return len(self.offset)

    def by_name(self, place: PlaceColumns, *, include_headers: bool) -> dict[str, pa.Array]:
        """The columns that Spark's Kafka source has, in its order."""
        count = self.count
        topic, partition = place.cut(count)
        found = {
            "key": self.key,
            "value": self.value,
            "topic": topic,
            "partition": partition,
            "offset": self.offset,
            "timestamp": self.timestamp,
            "timestampType": self.timestamp_type,
        }
        if include_headers:
            found["headers"] = pa.nulls(count, HEADERS) if self.headers is None else self.headers
        return found


class PlaceColumns:
    """The two columns that say the same in every row of a partition: made once, and cut to length for each batch."""

    def __init__(self, partition: TopicPartition) -> None:
        self.partition = partition
        self._make(_PLACE_ROWS)

    def cut(self, rows: int) -> tuple[pa.Array, pa.Array]:
        """Topic and partition of so many rows; they share their memory with all others."""
        if rows > len(self._topics):
            self._make(1 << rows.bit_length())
        return self._topics.slice(0, rows), self._numbers.slice(0, rows)

    def _make(self, rows: int) -> None:
        self._topics = pa.repeat(pa.scalar(self.partition.topic, pa.string()), rows)
        self._numbers = pa.repeat(pa.scalar(self.partition.partition, pa.int32()), rows)


def decode(
    records: Buffer,
    *,
    start_offset: int,
    end_offset: int,
    include_headers: bool,
    aborted: Sequence[tuple[int, int]] = (),
    read_committed: bool = False,
    check_crcs: bool = True,
    max_batch_bytes: int = DEFAULT_MAX_BATCH_BYTES,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> tuple[list[RecordColumns], int]:
    """The records from `start_offset` up to (not including) `end_offset`, and the offset to fetch next.

    `records` is what one fetch of one partition answers: an incomplete batch at its end is left out. Control batches
    are never shown, and with `read_committed` neither are those of the `aborted` transactions (producer id, first
    offset) that the fetch names. The next offset never exceeds `end_offset`; it is `start_offset` when there is no
    complete batch. Batches outside the range are skipped unread.

    Damage raises `ApiError` that names the offset: CORRUPT_MESSAGE for headers and CRCs, INVALID_RECORD for what is
    inside, UNSUPPORTED_FOR_MESSAGE_FORMAT for the formats before record batches.
    """
    kernels = load_kernels()
    if kernels is not None:
        wanted = _Wanted(start_offset, end_offset, include_headers, check_crcs, max_batch_bytes, chunk_bytes)
        try:
            return _decode_compiled(kernels, records, wanted, AbortedTransactions(aborted) if read_committed else None)
        except (_Damaged, ApiError):
            # The twin takes the batches one by one and so raises for the first that is damaged, with its reason.
            pass
    decoded = decode_in_python(
        records,
        start_offset=start_offset,
        end_offset=end_offset,
        include_headers=include_headers,
        aborted=aborted,
        read_committed=read_committed,
        check_crcs=check_crcs,
        max_batch_bytes=max_batch_bytes,
        chunk_bytes=chunk_bytes,
    )
    if kernels is not None:
        logger.error(
            "the compiled decoder refuses records from offset %d on that are sound: please report", start_offset
        )
    return decoded


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the caller of `decode` asks for."""

    start_offset: int
    end_offset: int
    include_headers: bool
    check_crcs: bool
    max_batch_bytes: int
    chunk_bytes: int

    def next_offset(self, seen: int) -> int:
        return max(self.start_offset, min(seen, self.end_offset))

    @property
    def max_section_bytes(self) -> int:
        # A chunk is closed when it has reached its size, so that it holds one section more than that at most.
        return min(self.max_batch_bytes, _MAX_ARROW_BYTES - self.chunk_bytes)


# --- compiled ---------------------------------------------------------------------------------------------------------


class _Damaged(Exception):
    """The kernel refuses the bytes; the twin knows why."""


@dataclass(slots=True)
class _Section:
    """Records, uncompressed, of consecutive rows of a table of batches."""

    data: Bytes
    table: Int64s
    first: int
    last: int


def _decode_compiled(
    kernels: ModuleType, records: Buffer, wanted: _Wanted, aborted: AbortedTransactions | None
) -> tuple[list[RecordColumns], int]:
    if len(records) == 0:
        return [], wanted.start_offset
    data = np.frombuffer(records, np.uint8)
    view = memoryview(records)
    chunks: list[RecordColumns] = []
    sections: list[_Section] = []
    size_bytes = 0
    seen = wanted.start_offset
    pos = 0
    status = kernels.TABLE_FULL
    while status == kernels.TABLE_FULL:
        table = np.empty((_TABLE_ROWS, kernels.TABLE_COLUMNS), np.int64)
        count, pos, status = kernels.walk_batches(data, pos, table, wanted.end_offset)
        if count:
            seen = int(table[count - 1, kernels.LAST_OFFSET]) + 1
        table = table[:count]
        if aborted is None:
            chosen = _rows_in_range(kernels, table, view, wanted)
        else:
            chosen = table[_rows_to_read(table.tolist(), view, wanted, aborted)]
        for section, section_bytes in _sections(kernels, data, view, chosen, wanted):
            sections.append(section)
            size_bytes += section_bytes
            if size_bytes >= wanted.chunk_bytes:
                chunks += _decode_sections(kernels, sections, wanted)
                sections, size_bytes = [], 0
    if status == kernels.DAMAGED:
        raise _Damaged
    if sections:
        chunks += _decode_sections(kernels, sections, wanted)
    return chunks, wanted.next_offset(seen)


def _rows_in_range(kernels: ModuleType, table: Int64s, view: memoryview, wanted: _Wanted) -> Int64s:
    """The rows of the table whose records are asked for, with their CRCs checked; no batch is hidden."""
    plain, _, _ = kernels.measure_batches(table, 0, len(table), wanted.start_offset)
    if not plain:
        outside, attributes = table[:, kernels.LAST_OFFSET] < wanted.start_offset, table[:, kernels.ATTRIBUTES]
        table = table[~(outside | (attributes & CONTROL_BIT != 0))]
    if wanted.check_crcs:
        begins = (table[:, kernels.START] - (HEADER_BYTES - CRC_START)).tolist()
        ends, crcs = table[:, kernels.END].tolist(), table[:, kernels.CRC].tolist()
        for begin, end, crc in zip(begins, ends, crcs, strict=True):
            if crc32c(view[begin:end]) != crc:
                raise _Damaged
    return table


def _rows_to_read(rows: list[list[int]], view: memoryview, wanted: _Wanted, aborted: AbortedTransactions) -> list[int]:
    """The same where batches of aborted transactions are hidden, which their order decides: the rows' numbers."""
    chosen: list[int] = []
    start_offset, check_crcs = wanted.start_offset, wanted.check_crcs
    for index, (start, end, _, last_offset, attributes, producer_id, crc, _, _, _) in enumerate(rows):
        begin = start - HEADER_BYTES
        if check_crcs and crc32c(view[begin + CRC_START : end]) != crc:
            raise _Damaged
        if aborted.hides(view[begin:end], attributes, producer_id, last_offset):
            continue
        if last_offset >= start_offset and not attributes & CONTROL_BIT:
            chosen.append(index)
    return chosen


def _sections(
    kernels: ModuleType, data: Bytes, view: memoryview, table: Int64s, wanted: _Wanted
) -> Iterator[tuple[_Section, int]]:
    """The records of these rows: runs of uncompressed batches as they lie in `data`, others decompressed one by one."""
    if not len(table):
        return
    max_section_bytes, chunk_bytes = wanted.max_section_bytes, wanted.chunk_bytes
    plain, total_bytes, _ = kernels.measure_batches(table, 0, len(table), wanted.start_offset)
    if plain and total_bytes < min(chunk_bytes, max_section_bytes):  # the usual case, without a loop
        yield _Section(data, table, 0, len(table)), total_bytes
        return
    codecs = table[:, kernels.ATTRIBUTES] & CODEC_MASK
    starts, ends, no_codec = table[:, kernels.START].tolist(), table[:, kernels.END].tolist(), int(Codec.NONE)
    run, run_bytes = 0, 0
    for row, (start, end, codec) in enumerate(zip(starts, ends, codecs.tolist(), strict=True)):
        size = end - start
        if codec == no_codec:
            if size > max_section_bytes:
                raise _Damaged
            run_bytes += size
            if run_bytes >= chunk_bytes:
                yield _Section(data, table, run, row + 1), run_bytes
                run, run_bytes = row + 1, 0
            continue
        if run < row:
            yield _Section(data, table, run, row), run_bytes
        run, run_bytes = row + 1, 0
        if codec > max(Codec):
            raise _Damaged
        plain = decompress(Codec(codec), view[start:end], max_section_bytes)
        table[row, kernels.START] = 0
        table[row, kernels.END] = len(plain)
        yield _Section(_as_array(plain), table, row, row + 1), len(plain)
    if run < len(table):
        yield _Section(data, table, run, len(table)), run_bytes


def _as_array(data: Buffer) -> Bytes:
    return np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)


class _Column:
    """The buffers of a binary or string column while they are filled; sizes are capacities."""

    def __init__(self, rows: int, size_bytes: int) -> None:
        self._end_buffer = pa.allocate_buffer((rows + 1) * 4)
        self._byte_buffer = pa.allocate_buffer(size_bytes)
        self.ends: Int32s = np.frombuffer(self._end_buffer, np.int32)
        self.ends[0] = 0
        self.bytes: Bytes = _as_array(self._byte_buffer)
        self.validity = _all_valid(rows)

    def to_array(self, data_type: pa.DataType, rows: int, size_bytes: int, nulls: int) -> pa.Array:
        buffers = [
            pa.py_buffer(self.validity) if nulls else None,
            self._end_buffer.slice(0, (rows + 1) * 4),
            self._byte_buffer.slice(0, size_bytes),
        ]
        return pa.Array.from_buffers(data_type, rows, buffers, nulls)


def _all_valid(rows: int) -> Bytes:
    return _as_array(bytearray(b"\xff") * ((rows + 7) >> 3))


def _decode_sections(kernels: ModuleType, sections: list[_Section], wanted: _Wanted) -> list[RecordColumns]:
    """The wanted records of these sections as one set of columns, or none at all."""
    capacity = 0
    size_bytes = 0
    for section in sections:
        _, section_bytes, section_rows = kernels.measure_batches(section.table, section.first, section.last, 0)
        size_bytes += section_bytes
        capacity += section_rows
    keys, values = _Column(capacity, size_bytes), _Column(capacity, size_bytes)
    offsets, timestamps, types = (
        np.empty(capacity, np.int64),
        np.empty(capacity, np.int64),
        np.empty(capacity, np.int32),
    )
    rows_with_headers = capacity if wanted.include_headers else 0
    list_ends = np.zeros(rows_with_headers + 1, np.int32)
    list_validity = _all_valid(rows_with_headers)
    header_starts = np.empty(rows_with_headers, np.int64)
    state = np.zeros(kernels.STATE_SIZE, np.int64)
    first_rows = [0]
    for section in sections:
        if not kernels.decode_records(
            section.data, section.table, section.first, section.last, wanted.start_offset, wanted.end_offset,
            keys.ends, keys.bytes, keys.validity, values.ends, values.bytes, values.validity,
            offsets, timestamps, types,
            wanted.include_headers, list_ends, list_validity, header_starts, state,
        ):  # fmt: skip
            raise _Damaged
        first_rows.append(int(state[kernels.ROWS]))
    rows = first_rows[-1]
    if not rows:
        return []
    headers = None
    if wanted.include_headers:
        headers = _headers_of(kernels, sections, first_rows, list_ends, list_validity, header_starts, state)
    return [
        RecordColumns(
            key=keys.to_array(pa.binary(), rows, int(state[kernels.KEY_BYTES]), int(state[kernels.KEY_NULLS])),
            value=values.to_array(pa.binary(), rows, int(state[kernels.VALUE_BYTES]), int(state[kernels.VALUE_NULLS])),
            offset=_plain(pa.int64(), rows, offsets),
            timestamp=_plain(TIMESTAMP, rows, timestamps),
            timestamp_type=_plain(pa.int32(), rows, types),
            headers=headers,
        )
    ]


def _plain(data_type: pa.DataType, rows: int, data: Int64s | Int32s) -> pa.Array:
    return pa.Array.from_buffers(data_type, rows, [None, pa.py_buffer(data[:rows])], 0)


def _headers_of(
    kernels: ModuleType,
    sections: list[_Section],
    first_rows: list[int],
    list_ends: Int32s,
    list_validity: Bytes,
    header_starts: Int64s,
    state: Int64s,
) -> pa.Array:
    """The headers column, from the places that the first pass has noted; a record without headers has NULL."""
    rows = first_rows[-1]
    count = int(state[kernels.HEADERS])
    names = _Column(count, int(state[kernels.HEADER_KEY_BYTES]))
    contents = _Column(count, int(state[kernels.HEADER_VALUE_BYTES]))
    state[kernels.HEADER_KEY_BYTES] = state[kernels.HEADER_VALUE_BYTES] = 0
    if count:
        for section, first, last in zip(sections, first_rows, first_rows[1:], strict=False):
            kernels.copy_headers(
                section.data, first, last, list_ends, header_starts,
                names.ends, names.bytes, contents.ends, contents.bytes, contents.validity, state,
            )  # fmt: skip
    name = names.to_array(pa.string(), count, int(state[kernels.HEADER_KEY_BYTES]), 0)
    nulls = int(state[kernels.HEADER_NULLS])
    content = contents.to_array(pa.binary(), count, int(state[kernels.HEADER_VALUE_BYTES]), nulls)
    elements = pa.StructArray.from_arrays([name, content], fields=list(HEADER))
    bare = int(state[kernels.BARE_ROWS])
    buffers = [pa.py_buffer(list_validity) if bare else None, pa.py_buffer(list_ends[: rows + 1])]
    return pa.Array.from_buffers(HEADERS, rows, buffers, bare, children=[elements])


# --- in Python --------------------------------------------------------------------------------------------------------


def decode_in_python(
    records: Buffer,
    *,
    start_offset: int,
    end_offset: int,
    include_headers: bool,
    aborted: Sequence[tuple[int, int]] = (),
    read_committed: bool = False,
    check_crcs: bool = True,
    max_batch_bytes: int = DEFAULT_MAX_BATCH_BYTES,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> tuple[list[RecordColumns], int]:
    """As `decode`, with an object per record."""
    wanted = _Wanted(start_offset, end_offset, include_headers, check_crcs, max_batch_bytes, chunk_bytes)
    hidden = AbortedTransactions(aborted) if read_committed else None
    chunks: list[RecordColumns] = []
    rows: list[tuple[Record, TimestampType]] = []
    size_bytes = 0
    seen = start_offset
    for header, batch in _complete_batches(memoryview(records), end_offset):
        seen = header.next_offset
        try:
            found = _records_of(header, batch, wanted, hidden)
        except ApiError as error:
            raise ApiError(error.code, f"{_place(header.base_offset)}: {error}") from error
        rows += ((record, header.timestamp_type) for record in found if start_offset <= record.offset < end_offset)
        size_bytes += sum(len(record.key or b"") + len(record.value or b"") for record in found)
        if size_bytes >= chunk_bytes and rows:
            chunks.append(_columns_of(rows, include_headers=include_headers))
            rows, size_bytes = [], 0
    if rows:
        chunks.append(_columns_of(rows, include_headers=include_headers))
    return chunks, wanted.next_offset(seen)


def _place(offset: int) -> str:
    return f"the record batch at offset {offset}"


def _complete_batches(view: memoryview, end_offset: int) -> Iterator[tuple[BatchHeader, memoryview]]:
    pos = 0
    while len(view) - pos > _MAGIC_BYTE:
        magic = view[pos + _MAGIC_BYTE]
        if magic != MAGIC:
            offset = int.from_bytes(view[pos : pos + 8], "big", signed=True)
            old = magic in {0, 1}
            raise ApiError(
                ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT if old else ErrorCode.CORRUPT_MESSAGE,
                f"{_place(offset)} has the message format {magic}, and only 2 can be read"
                + (
                    ", which Kafka writes since 0.11: a copy of the topic, made by a newer client, has it"
                    if old
                    else ""
                ),
            )
        if len(view) - pos < HEADER_BYTES:
            return
        header = read_header(view, pos)
        if header.batch_length < MIN_BATCH_LENGTH:
            raise _corrupt(header, f"has an impossible length {header.batch_length}")
        stop = pos + LOG_OVERHEAD_BYTES + header.batch_length
        if stop > len(view):
            return
        if not 0 <= header.base_offset <= _MAX_OFFSET or header.last_offset_delta < 0:
            raise _corrupt(header, f"ends at the impossible offset {header.last_offset}")
        if header.base_offset >= end_offset:
            return
        yield header, view[pos:stop]
        pos = stop


def _corrupt(header: BatchHeader, reason: str) -> ApiError:
    return ApiError(ErrorCode.CORRUPT_MESSAGE, f"{_place(header.base_offset)} {reason}")


def _records_of(
    header: BatchHeader, batch: memoryview, wanted: _Wanted, hidden: AbortedTransactions | None
) -> list[Record]:
    """The records of a batch that may be shown; the range of offsets is applied to whole batches only."""
    outside = header.last_offset < wanted.start_offset
    if hidden is None and (outside or header.is_control):
        return []
    if wanted.check_crcs and not crc_matches(batch):
        raise ApiError(ErrorCode.CORRUPT_MESSAGE, "its CRC does not match its bytes")
    if hidden is not None and hidden.hides(batch, header.attributes, header.producer_id, header.last_offset):
        return []
    if outside or header.is_control:
        return []
    found = decode_records(batch, max_bytes=wanted.max_section_bytes)
    base_ms = header.max_timestamp_ms if header.timestamp_type is TimestampType.LOG_APPEND else header.base_timestamp_ms
    for timestamp_ms in (base_ms, *(record.timestamp_ms for record in found)) if found else ():
        if abs(timestamp_ms) > _MAX_TIMESTAMP_MS:
            raise ApiError(ErrorCode.INVALID_RECORD, f"the timestamp {timestamp_ms} is out of range")
    return found


def _columns_of(rows: list[tuple[Record, TimestampType]], *, include_headers: bool) -> RecordColumns:
    headers = None
    if include_headers:
        headers = pa.array(
            [
                [{"key": header.key, "value": header.value} for header in record.headers] if record.headers else None
                for record, _ in rows
            ],
            HEADERS,
        )
    return RecordColumns(
        key=pa.array([record.key for record, _ in rows], pa.binary()),
        value=pa.array([record.value for record, _ in rows], pa.binary()),
        offset=pa.array([record.offset for record, _ in rows], pa.int64()),
        timestamp=pa.array([record.timestamp_ms * 1000 for record, _ in rows], TIMESTAMP),
        timestamp_type=pa.array([int(kind) for _, kind in rows], pa.int32()),
        headers=headers,
    )
