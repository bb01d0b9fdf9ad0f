"""The codecs of Kafka's record batches, each with a hard bound on what decompression may produce.

cramjam carries snappy, lz4 and zstd; gzip is the standard library's zlib. What is not here: the record format.

Invariants:
- `decompress` never returns more than `max_bytes` and never holds more than about twice that; a length that the input
  declares (snappy's preamble, xerial's chunks, zstd's content size) is checked or ignored, never allocated on trust.
- A zstd frame whose window exceeds 128 MiB (libzstd's own limit) is refused.
- Any damage surfaces as `ApiError`: INVALID_RECORD, because the sender would only send the same bytes again.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from enum import IntEnum
from typing import Final, TypeAlias

import cramjam

from millrace.errors import ApiError, ErrorCode

Buffer: TypeAlias = bytes | bytearray | memoryview

DEFAULT_MAX_BYTES: Final = 64 * 1024 * 1024
_FIRST_GUESS_BYTES: Final = 64 * 1024
_GZIP_WINDOW_BITS: Final = 31

_XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"
_XERIAL_HEADER: Final = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK_BYTES: Final = 32 * 1024
_INT32: Final = struct.Struct(">i")


class Codec(IntEnum):
    """The number is the low three bits of a batch's attributes, the lower-case name a `compression.type`."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


def codec_named(name: str) -> Codec:
    """The codec behind a `compression.type` value; `uncompressed` is Kafka's word for none."""
    if name == "uncompressed":
        return Codec.NONE
    return Codec[name.upper()]


def compress(codec: Codec, data: Buffer, level: int | None = None) -> bytes:
    """`data` as one compressed stream that every Kafka client can read."""
    if codec is Codec.NONE:
        return bytes(data)
    if codec is Codec.GZIP:
        stream = zlib.compressobj(-1 if level is None else level, zlib.DEFLATED, _GZIP_WINDOW_BITS)
        return stream.compress(data) + stream.flush()
    if codec is Codec.SNAPPY:
        return _compress_xerial(data)
    if codec is Codec.LZ4:
        return bytes(cramjam.lz4.compress(data, 1 if level is None else level))
    return bytes(cramjam.zstd.compress(data, 3 if level is None else level))


def decompress(codec: Codec, data: Buffer, max_bytes: int = DEFAULT_MAX_BYTES) -> bytes | bytearray | memoryview:
    """The bytes behind `data`, or INVALID_RECORD when they are damaged or more than `max_bytes`."""
    if codec is Codec.NONE:
        if len(data) > max_bytes:
            raise _too_large(max_bytes)
        return data
    if codec is Codec.GZIP:
        return _decompress_gzip(data, max_bytes)
    if codec is Codec.SNAPPY:
        return _decompress_snappy(data, max_bytes)
    if codec is Codec.LZ4:
        return _decompress_bounded(cramjam.lz4.decompress_into, data, max_bytes)
    return _decompress_bounded(cramjam.zstd.decompress_into, data, max_bytes)


def _invalid(reason: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_RECORD, reason)


def _too_large(max_bytes: int) -> ApiError:
    return _invalid(f"the records decompress to more than {max_bytes} bytes")


def _decompress_gzip(data: Buffer, max_bytes: int) -> bytes:
    """All members of a gzip stream; Java's reader accepts several, so do we."""
    parts: list[bytes] = []
    room = max_bytes
    rest: Buffer = data
    try:
        while True:
            member = zlib.decompressobj(_GZIP_WINDOW_BITS)
            part = member.decompress(rest, room + 1)
            if len(part) > room:
                raise _too_large(max_bytes)
            if not member.eof:
                raise _invalid("the gzip stream is truncated")
            parts.append(part)
            room -= len(part)
            rest = member.unused_data
            if not rest:
                return part if len(parts) == 1 else b"".join(parts)
    except zlib.error as error:
        raise _invalid(f"the gzip stream is damaged: {error}") from error


def _decompress_bounded(into: Callable[..., int], data: Buffer, max_bytes: int) -> memoryview:
    """Decompress into a buffer of our own size, growing it only when the codec says that it was too small."""
    size = min(max(len(data) * 4, _FIRST_GUESS_BYTES), max_bytes)
    while True:
        output = bytearray(size)
        try:
            written = into(data, output)
        except cramjam.DecompressionError as error:
            # The codecs write through a cursor over our buffer; running out of it is the one error worth another try.
            if "write whole buffer" not in str(error):
                raise _invalid(f"the compressed records are damaged: {error}") from error
            if size >= max_bytes:
                raise _too_large(max_bytes) from error
            size = min(size * 4, max_bytes)
        else:
            return memoryview(output)[:written]


def _snappy_length(block: Buffer) -> int:
    """The uncompressed length that a raw snappy block declares: a varint of at most five bytes."""
    value = shift = 0
    for byte in block[:5]:
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value
        shift += 7
    raise _invalid("the snappy block has no valid length")


def _decompress_block(block: Buffer, room: int, max_bytes: int) -> bytes:
    declared = _snappy_length(block)
    if declared > room:
        raise _too_large(max_bytes)
    # One input byte of snappy yields at most about 64/3 bytes: a longer declaration is a lie, refused unallocated.
    if declared > 64 + len(block) * 64:
        raise _invalid("the snappy block declares a length that it cannot hold")
    if not declared:
        if len(block) != 1:
            raise _invalid("the snappy block goes on after its end")
        return b""
    output = bytearray(declared)
    try:
        written = cramjam.snappy.decompress_raw_into(block, output)
    except cramjam.DecompressionError as error:
        raise _invalid(f"the snappy block is damaged: {error}") from error
    if written != declared:
        raise _invalid("the snappy block is shorter than it declares")
    return bytes(output)


def _decompress_snappy(data: Buffer, max_bytes: int) -> bytes:
    view = memoryview(data)
    if bytes(view[:8]) != _XERIAL_MAGIC:
        return _decompress_block(view, max_bytes, max_bytes)
    if len(view) < len(_XERIAL_HEADER):
        raise _invalid("the snappy stream has a truncated header")
    parts: list[bytes] = []
    room = max_bytes
    pos = len(_XERIAL_HEADER)
    end = len(view)
    while pos < end:
        # Concatenated streams repeat the header (KAFKA-9203 is about the same reader in Java).
        if bytes(view[pos : pos + 8]) == _XERIAL_MAGIC:
            pos += len(_XERIAL_HEADER)
            continue
        if pos + 4 > end:
            raise _invalid("the snappy stream is truncated")
        (length,) = _INT32.unpack_from(view, pos)
        pos += 4
        if length <= 0 or length > end - pos:
            raise _invalid(f"the snappy stream has a chunk of {length} bytes where {end - pos} remain")
        part = _decompress_block(view[pos : pos + length], room, max_bytes)
        parts.append(part)
        room -= len(part)
        pos += length
    return b"".join(parts)


def _compress_xerial(data: Buffer) -> bytes:
    view = memoryview(data)
    parts = [_XERIAL_HEADER]
    for start in range(0, len(view), _XERIAL_BLOCK_BYTES):
        block = bytes(cramjam.snappy.compress_raw(view[start : start + _XERIAL_BLOCK_BYTES]))
        parts.append(_INT32.pack(len(block)))
        parts.append(block)
    return b"".join(parts)
