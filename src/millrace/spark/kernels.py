"""The loops over single records, compiled by numba: record batches to Arrow buffers and back, and key hashes.

What is not here: anything that allocates, raises, checks a CRC or (de)compresses (`columns`, `batches`). The functions
are compiled for one signature each when the module is imported and cached on disk, so that no call ever compiles.

Invariants:
- What comes from the network is never trusted: every read lies below the section's end, every write below a capacity
  that the caller has derived from the sizes of the sections. numba checks no bounds here.
- No function raises. The decoder answers "damaged" and leaves it to the Python twin to say where and why.
- `NOWHERE` is the position behind every end: a varint that does not fit moves there, and each later check fails.
"""
# ruff: noqa: C901, PLR0911, PLR0912, PLR0915 - one flat loop per kernel: the branches are the format's own

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import numba
import numba.core.cgutils
import numba.extending
import numpy as np

from millrace.records.batch import CODEC_MASK, CONTROL_BIT, HEADER_BYTES, LOG_OVERHEAD_BYTES, TIMESTAMP_TYPE_BIT

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

# numba's annotations change from version to version and do not describe what its compiler does with a function.
types = cast(Any, numba).types
_cgutils = cast(Any, numba.core.cgutils)
_njit = cast(Any, numba.njit)
_intrinsic = cast(Callable[[Callable[..., Any]], Callable[..., None]], numba.extending.intrinsic)
_inlined = cast(Callable[[F], F], numba.extending.register_jitable)

NOWHERE: Final = 1 << 62
MIN_RECORD_BYTES: Final = 7
"""Length, attributes, timestamp, offset, key, value, headers: a byte each."""
MAX_OFFSET: Final = 1 << 62
MAX_TIMESTAMP_MS: Final = 1 << 53
"""The largest power of two whose microseconds fit 64 bits."""
MAX_RECORD_BYTES: Final = (1 << 31) - 1
NOT_PLAIN_BITS: Final = CODEC_MASK | CONTROL_BIT

# The columns of the table of batches.
START, END, BASE_OFFSET, LAST_OFFSET, ATTRIBUTES, PRODUCER_ID, CRC, BASE_TIMESTAMP, MAX_TIMESTAMP, COUNT = range(10)
TABLE_COLUMNS: Final = 10

# How a walk over batches ended.
DONE, TABLE_FULL, DAMAGED = range(3)

# What the decoder carries from one section to the next.
ROWS, KEY_BYTES, VALUE_BYTES, KEY_NULLS, VALUE_NULLS, HEADERS, HEADER_KEY_BYTES, HEADER_VALUE_BYTES, HEADER_NULLS = (
    range(9)
)
BARE_ROWS: Final = 9
"""How many rows have no headers at all."""
STATE_SIZE: Final = 10


_READ: Final = types.Array(types.uint8, 1, "C", readonly=True)
_BYTES: Final = types.Array(types.uint8, 1, "C")
_INT32S: Final = types.Array(types.int32, 1, "C")
_INT64S: Final = types.Array(types.int64, 1, "C")
_READ_INT64S: Final = types.Array(types.int64, 1, "C", readonly=True)
_TABLE: Final = types.Array(types.int64, 2, "C")
_I64: Final = types.int64
_BOOL: Final = types.boolean


def _compiled(signature: Any) -> Callable[[F], F]:
    """Compile now, for this signature, without the GIL; from numba's cache when it has the function."""

    def decorate(function: F) -> F:
        options = {"nogil": True, "boundscheck": False, "error_model": "numpy"}
        try:
            return _njit(signature, cache=True, **options)(function)  # type: ignore[no-any-return]
        except (RuntimeError, OSError) as error:
            # Neither the folder of the package nor that of the user can hold a cache. NUMBA_CACHE_DIR names another.
            logger.info("compiled without a cache, which costs a few seconds in each process: %s", error)
            return _njit(signature, **options)(function)  # type: ignore[no-any-return]

    return decorate


@_intrinsic
def _copy(_context: Any, target: Any, _target_pos: Any, source: Any, _source_pos: Any, _size: Any) -> Any:
    """memcpy between two byte arrays: a slice assignment costs several times as much for the usual small field."""
    signature = types.void(target, types.int64, source, types.int64, types.int64)

    def generate(context: Any, builder: Any, call: Any, arguments: Any) -> Any:
        target_value, to, source_value, start, count = arguments
        target_array = context.make_array(call.args[0])(context, builder, target_value)
        source_array = context.make_array(call.args[2])(context, builder, source_value)
        _cgutils.raw_memcpy(
            builder,
            builder.gep(target_array.data, [to]),
            builder.gep(source_array.data, [start]),
            count,
            1,
        )
        return context.get_dummy_value()

    return signature, generate


# --- reading ----------------------------------------------------------------------------------------------------------


@_inlined
def _big_endian(data: Any, pos: Any, size: Any) -> Any:
    """A signed integer of `size` bytes."""
    value = np.int64(data[pos])
    if value >= 0x80:
        value -= 0x100
    for i in range(1, size):
        value = (value << 8) | np.int64(data[pos + i])
    return value


@_inlined
def _varint(data: Any, pos: Any, stop: Any) -> Any:
    """The zigzag varint of at most five bytes at `pos` and the position behind it, NOWHERE when it does not fit."""
    if pos >= stop:
        return np.int64(0), np.int64(NOWHERE)
    byte = np.int64(data[pos])
    pos += 1
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), pos
    value = byte & 0x7F
    for shift in (7, 14, 21, 28):
        if pos >= stop:
            break
        byte = np.int64(data[pos])
        pos += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), pos
    return np.int64(0), np.int64(NOWHERE)


@_inlined
def _varlong(data: Any, pos: Any, stop: Any) -> Any:
    """As `_varint` for ten bytes; what does not fit 62 bits becomes 2^62, which is no timestamp either way."""
    value = np.int64(0)
    shift = 0
    too_large = False
    while pos < stop:
        byte = np.int64(data[pos])
        pos += 1
        if shift < 56:
            value |= (byte & 0x7F) << shift
        elif byte & 0x7F:
            too_large = True
        if byte < 0x80:
            if too_large:
                return np.int64(NOWHERE), pos
            return (value >> 1) ^ -(value & 1), pos
        shift += 7
        if shift > 63:
            break
    return np.int64(0), np.int64(NOWHERE)


@_inlined
def _is_utf8(data: Any, pos: Any, stop: Any) -> Any:
    """Whether these bytes are UTF-8 as Python's strict decoder understands it."""
    while pos < stop:
        lead = np.int64(data[pos])
        pos += 1
        if lead < 0x80:
            continue
        low, high = 0x80, 0xBF
        if 0xC2 <= lead <= 0xDF:
            more = 1
        elif 0xE0 <= lead <= 0xEF:
            more = 2
            if lead == 0xE0:
                low = 0xA0
            elif lead == 0xED:
                high = 0x9F
        elif 0xF0 <= lead <= 0xF4:
            more = 3
            if lead == 0xF0:
                low = 0x90
            elif lead == 0xF4:
                high = 0x8F
        else:
            return False
        if pos + more > stop:
            return False
        if not low <= np.int64(data[pos]) <= high:
            return False
        for i in range(1, more):
            if np.int64(data[pos + i]) & 0xC0 != 0x80:
                return False
        pos += more
    return True


@_compiled(types.UniTuple(_I64, 3)(_READ, _I64, _TABLE, _I64))
def walk_batches(data: Any, pos: Any, table: Any, end_offset: Any) -> Any:
    """Enter the complete batches from `pos` on into `table`: how many, where the walk stopped, and why.

    It is done at the end of the data, at an incomplete batch, and at one that starts at `end_offset` or later.
    """
    size = len(data)
    count = 0
    while size - pos >= 17:
        if data[pos + 16] != 2:
            return count, pos, np.int64(DAMAGED)
        if size - pos < HEADER_BYTES:
            break
        length = _big_endian(data, pos + 8, 4)
        base_offset = _big_endian(data, pos, 8)
        last_offset_delta = _big_endian(data, pos + 23, 4)
        if length < HEADER_BYTES - LOG_OVERHEAD_BYTES:
            return count, pos, np.int64(DAMAGED)
        stop = pos + LOG_OVERHEAD_BYTES + length
        if stop > size:
            break
        if base_offset < 0 or base_offset > MAX_OFFSET or last_offset_delta < 0:
            return count, pos, np.int64(DAMAGED)
        if base_offset >= end_offset:
            break
        if count == len(table):
            return count, pos, np.int64(TABLE_FULL)
        table[count, START] = pos + HEADER_BYTES
        table[count, END] = stop
        table[count, BASE_OFFSET] = base_offset
        table[count, LAST_OFFSET] = base_offset + last_offset_delta
        table[count, ATTRIBUTES] = _big_endian(data, pos + 21, 2)
        table[count, PRODUCER_ID] = _big_endian(data, pos + 43, 8)
        table[count, CRC] = _big_endian(data, pos + 17, 4) & 0xFFFFFFFF
        table[count, BASE_TIMESTAMP] = _big_endian(data, pos + 27, 8)
        table[count, MAX_TIMESTAMP] = _big_endian(data, pos + 35, 8)
        table[count, COUNT] = _big_endian(data, pos + 57, 4)
        count += 1
        pos = stop
    return count, pos, np.int64(DONE)


@_compiled(types.UniTuple(_I64, 3)(_TABLE, _I64, _I64, _I64))
def measure_batches(table: Any, first: Any, last: Any, start_offset: Any) -> Any:
    """Of the rows `first` to `last`: whether all are plain, the bytes of their records, and how many those can be.

    Plain is a batch that is neither control nor compressed and does not end before `start_offset`. A batch's count is
    only believed as far as its bytes can hold it: the decoder refuses it otherwise.
    """
    plain = np.int64(1)
    size_bytes = np.int64(0)
    capacity = np.int64(0)
    for row in range(first, last):
        if table[row, ATTRIBUTES] & NOT_PLAIN_BITS or table[row, LAST_OFFSET] < start_offset:
            plain = np.int64(0)
        size = table[row, END] - table[row, START]
        size_bytes += size
        capacity += max(min(table[row, COUNT], size // MIN_RECORD_BYTES), 0)
    return plain, size_bytes, capacity


@_compiled(
    _BOOL(
        _READ, _TABLE, _I64, _I64, _I64, _I64,
        _INT32S, _BYTES, _BYTES, _INT32S, _BYTES, _BYTES, _INT64S, _INT64S, _INT32S,
        _BOOL, _INT32S, _BYTES, _INT64S, _INT64S,
    )
)  # fmt: skip
def decode_records(
    data: Any, table: Any, first: Any, last: Any, start_offset: Any, end_offset: Any,
    key_ends: Any, key_bytes: Any, key_validity: Any, value_ends: Any, value_bytes: Any, value_validity: Any,
    offsets: Any, timestamps: Any, timestamp_types: Any,
    with_headers: Any, list_ends: Any, list_validity: Any, header_starts: Any, state: Any,
) -> Any:  # fmt: skip
    """Append the records of the sections `first` to `last` (rows of `table`) to the buffers; False when damaged.

    A section is data[START:END]. The validity bitmaps come in with all bits set. Headers are checked, and with
    `with_headers` counted and their places kept for `copy_headers`.
    """
    row = state[ROWS]
    key_total = state[KEY_BYTES]
    value_total = state[VALUE_BYTES]
    for section in range(first, last):
        pos = table[section, START]
        end = table[section, END]
        base_offset = table[section, BASE_OFFSET]
        base_timestamp = table[section, BASE_TIMESTAMP]
        count = table[section, COUNT]
        timestamp_type = 1 if table[section, ATTRIBUTES] & TIMESTAMP_TYPE_BIT else 0
        if timestamp_type == 1:
            base_timestamp = table[section, MAX_TIMESTAMP]
        # The rows that the caller has made room for: no section holds more records than this.
        if count < 0 or count * MIN_RECORD_BYTES > end - pos:
            return False
        if count > 0 and not -MAX_TIMESTAMP_MS <= base_timestamp <= MAX_TIMESTAMP_MS:
            return False
        for _ in range(count):
            length, pos = _varint(data, pos, end)
            stop = pos + length
            if length < 0 or stop > end:
                return False
            timestamp_delta, pos = _varlong(data, pos + 1, stop)
            offset_delta, pos = _varint(data, pos, stop)
            timestamp = base_timestamp
            if timestamp_type == 0:
                timestamp += timestamp_delta
                if not -MAX_TIMESTAMP_MS <= timestamp <= MAX_TIMESTAMP_MS:
                    return False
            offset = base_offset + offset_delta
            wanted = start_offset <= offset < end_offset

            length, pos = _varint(data, pos, stop)
            if length >= 0:
                if pos + length > stop:
                    return False
                if wanted:
                    _copy(key_bytes, key_total, data, pos, length)
                    key_total += length
                pos += length
            elif length != -1:
                return False
            elif wanted:
                key_validity[row >> 3] &= np.uint8(~(1 << (row & 7)))
                state[KEY_NULLS] += 1

            length, pos = _varint(data, pos, stop)
            if length >= 0:
                if pos + length > stop:
                    return False
                if wanted:
                    _copy(value_bytes, value_total, data, pos, length)
                    value_total += length
                pos += length
            elif length != -1:
                return False
            elif wanted:
                value_validity[row >> 3] &= np.uint8(~(1 << (row & 7)))
                state[VALUE_NULLS] += 1

            header_count, pos = _varint(data, pos, stop)
            headers_pos = pos
            # A header takes two bytes at least.
            if header_count < 0 or header_count * 2 > stop - pos:
                return False
            for _header in range(header_count):
                length, pos = _varint(data, pos, stop)
                if length < 0 or pos + length > stop or not _is_utf8(data, pos, pos + length):
                    return False
                pos += length
                if wanted:
                    state[HEADER_KEY_BYTES] += length
                length, pos = _varint(data, pos, stop)
                if length < -1 or (length >= 0 and pos + length > stop):
                    return False
                if length > 0:
                    pos += length
                    if wanted:
                        state[HEADER_VALUE_BYTES] += length
            if pos != stop:
                return False
            if wanted:
                offsets[row] = offset
                timestamps[row] = timestamp * 1000
                timestamp_types[row] = timestamp_type
                key_ends[row + 1] = key_total
                value_ends[row + 1] = value_total
                if with_headers:
                    state[HEADERS] += header_count
                    list_ends[row + 1] = state[HEADERS]
                    header_starts[row] = headers_pos
                    if header_count == 0:
                        list_validity[row >> 3] &= np.uint8(~(1 << (row & 7)))
                        state[BARE_ROWS] += 1
                row += 1
        if pos != end:
            return False
    state[ROWS] = row
    state[KEY_BYTES] = key_total
    state[VALUE_BYTES] = value_total
    return True


@_compiled(types.void(_READ, _I64, _I64, _INT32S, _INT64S, _INT32S, _BYTES, _INT32S, _BYTES, _BYTES, _INT64S))
def copy_headers(
    data: Any, first_row: Any, last_row: Any, list_ends: Any, header_starts: Any,
    key_ends: Any, key_bytes: Any, value_ends: Any, value_bytes: Any, value_validity: Any, state: Any,
) -> None:  # fmt: skip
    """Append the headers of these rows, which `decode_records` has found sound in the same `data`, to the buffers."""
    size = len(data)
    key_total = state[HEADER_KEY_BYTES]
    value_total = state[HEADER_VALUE_BYTES]
    for row in range(first_row, last_row):
        pos = header_starts[row]
        for header in range(list_ends[row], list_ends[row + 1]):
            length, pos = _varint(data, pos, size)
            _copy(key_bytes, key_total, data, pos, length)
            pos += length
            key_total += length
            key_ends[header + 1] = key_total
            length, pos = _varint(data, pos, size)
            if length >= 0:
                _copy(value_bytes, value_total, data, pos, length)
                pos += length
                value_total += length
            else:
                value_validity[header >> 3] &= np.uint8(~(1 << (header & 7)))
                state[HEADER_NULLS] += 1
            value_ends[header + 1] = value_total
    state[HEADER_KEY_BYTES] = key_total
    state[HEADER_VALUE_BYTES] = value_total


# --- writing ----------------------------------------------------------------------------------------------------------


@_inlined
def _varint_size(value: Any) -> Any:
    """How many bytes `value` takes as a zigzag varint."""
    rest = (value << 1) ^ (value >> 63)
    size = 1
    # A negative rest has its highest bit set: ten bytes.
    while rest > 0x7F or rest < 0:
        rest = (rest >> 7) & 0x1FFFFFFFFFFFFFF
        size += 1
    return size


@_inlined
def _put_varint(output: Any, pos: Any, value: Any) -> Any:
    """Write `value` as a zigzag varint; the position behind it."""
    rest = (value << 1) ^ (value >> 63)
    while rest > 0x7F or rest < 0:
        output[pos] = np.uint8((rest & 0x7F) | 0x80)
        pos += 1
        rest = (rest >> 7) & 0x1FFFFFFFFFFFFFF
    output[pos] = np.uint8(rest)
    return pos + 1


@_inlined
def _length_of(ends: Any, validity: Any, row: Any) -> Any:
    """The length of a field; -1 for a null. No validity bytes at all say that nothing is null, no ends that all is."""
    if len(ends) == 0 or (len(validity) != 0 and validity[row] == 0):
        return np.int64(-1)
    return ends[row + 1] - ends[row]


@_inlined
def _field_size(length: Any) -> Any:
    return _varint_size(length) + max(length, 0)


@_inlined
def _put_field(output: Any, pos: Any, ends: Any, data: Any, row: Any, length: Any) -> Any:
    pos = _put_varint(output, pos, length)
    if length > 0:
        _copy(output, pos, data, ends[row], length)
        pos += length
    return pos


@_compiled(
    types.UniTuple(_I64, 4)(
        _READ_INT64S, _I64, _READ_INT64S,
        _READ_INT64S, _READ, _READ, _READ_INT64S, _READ, _READ,
        _READ_INT64S, _READ, _READ_INT64S, _READ, _READ_INT64S, _READ, _READ,
        _BYTES, _I64, _I64,
    )
)  # fmt: skip
def encode_records(
    rows: Any, first: Any, timestamps: Any,
    key_ends: Any, key_bytes: Any, key_validity: Any, value_ends: Any, value_bytes: Any, value_validity: Any,
    list_ends: Any, list_validity: Any,
    name_ends: Any, name_bytes: Any, content_ends: Any, content_bytes: Any, content_validity: Any,
    output: Any, start: Any, stop: Any,
) -> Any:  # fmt: skip
    """Write the records of rows[first:] to output[start:] while they fit before `stop`.

    The result is: the index behind the last one written, the position behind it, the largest timestamp, and the size of
    the record that did not fit (0 when all did). A record larger than the whole is not written: the caller comes back
    with more room.
    """
    pos = start
    if first >= len(rows):
        return first, pos, np.int64(-1), np.int64(0)
    base_timestamp = timestamps[rows[first]]
    max_timestamp = np.int64(-1)
    for index in range(first, len(rows)):
        row = rows[index]
        timestamp_delta = timestamps[row] - base_timestamp
        offset_delta = index - first
        key_length = _length_of(key_ends, key_validity, row)
        value_length = _length_of(value_ends, value_validity, row)
        first_header = np.int64(0)
        header_count = np.int64(0)
        if len(list_ends) != 0 and (len(list_validity) == 0 or list_validity[row] != 0):
            first_header = list_ends[row]
            header_count = list_ends[row + 1] - first_header
        size = 1 + _varint_size(timestamp_delta) + _varint_size(offset_delta)
        size += _field_size(key_length) + _field_size(value_length) + _varint_size(header_count)
        for header in range(first_header, first_header + header_count):
            size += _field_size(name_ends[header + 1] - name_ends[header])
            size += _field_size(_length_of(content_ends, content_validity, header))
        whole = size + _varint_size(size)
        if whole > stop - pos or size > MAX_RECORD_BYTES:
            return index, pos, max_timestamp, whole
        pos = _put_varint(output, pos, size)
        output[pos] = 0
        pos = _put_varint(output, pos + 1, timestamp_delta)
        pos = _put_varint(output, pos, offset_delta)
        pos = _put_field(output, pos, key_ends, key_bytes, row, key_length)
        pos = _put_field(output, pos, value_ends, value_bytes, row, value_length)
        pos = _put_varint(output, pos, header_count)
        for header in range(first_header, first_header + header_count):
            pos = _put_field(output, pos, name_ends, name_bytes, header, name_ends[header + 1] - name_ends[header])
            length = _length_of(content_ends, content_validity, header)
            pos = _put_field(output, pos, content_ends, content_bytes, header, length)
        max_timestamp = max(max_timestamp, timestamps[row])
    return np.int64(len(rows)), pos, max_timestamp, np.int64(0)


@_compiled(types.void(_READ_INT64S, _READ, _READ, _I64, _INT32S))
def partition_keys(ends: Any, data: Any, validity: Any, partition_count: Any, output: Any) -> None:
    """The partition of each key: its murmur2, made positive, modulo the count; -1 for a null."""
    mask = np.int64(0xFFFFFFFF)
    factor = np.int64(0x5BD1E995)
    for row in range(len(output)):
        length = _length_of(ends, validity, row)
        if length < 0:
            output[row] = -1
            continue
        pos = ends[row]
        # 64-bit arithmetic masked to 32 bits: the products of two 32-bit numbers only lose bits that are masked away.
        state = (np.int64(0x9747B28C) ^ length) & mask
        for _ in range(length >> 2):
            word = (
                np.int64(data[pos])
                | np.int64(data[pos + 1]) << 8
                | np.int64(data[pos + 2]) << 16
                | np.int64(data[pos + 3]) << 24
            )
            word = (word * factor) & mask
            word ^= word >> 24
            word = (word * factor) & mask
            state = ((state * factor) & mask) ^ word
            pos += 4
        rest = length & 3
        if rest == 3:
            state ^= np.int64(data[pos + 2]) << 16
        if rest >= 2:
            state ^= np.int64(data[pos + 1]) << 8
        if rest >= 1:
            state = ((state ^ np.int64(data[pos])) * factor) & mask
        state ^= state >> 13
        state = (state * factor) & mask
        state ^= state >> 15
        output[row] = (state & 0x7FFFFFFF) % partition_count
