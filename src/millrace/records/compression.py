"""The codecs of Kafka's record batches, each with a hard bound on what decompression may produce.

cramjam carries snappy, lz4 and zstd; gzip is the standard library's zlib. What is not here: the record format.

Invariants:
- `decompress` never returns more than `max_bytes`, and holds little more at any time; a length that the input
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

DEFAULT_MAX_BYTES: Final = 20 * 1024 * 1024
"""Enough for a full batch that shrank to a twentieth, little enough for one bomb at a time not to be felt."""
_FIRST_GUESS_BYTES: Final = 64 * 1024
_GZIP_WINDOW_BITS: Final = 31
_GZIP_PIECE_BYTES: Final = 256 * 1024

_XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"
_XERIAL_HEADER: Final = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK_BYTES: Final = 32 * 1024
_INT32: Final = struct.Struct(">i")

_LZ4_HEADER: Final = bytes.fromhex("04224d18604082")
"""Magic | version 1, independent blocks | blocks of 64 KiB | checksum of the two bytes before."""
_LZ4_BLOCK_BYTES: Final = 64 * 1024
_LZ4_SIZE: Final = struct.Struct("<I")
_LZ4_STORED: Final = 0x80000000
_LZ4_FAST: Final = 9
"""The level at which Kafka compresses fast; at any other, its default being this one, it compresses well."""
_LZ4_CHECKSUM_BYTES: Final = 4


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
    """`data` as one compressed stream that every Kafka client can read; `level` is a `compression.CODEC.level`."""
    if codec is Codec.NONE:
        return bytes(data)
    if codec is Codec.GZIP:
        stream = zlib.compressobj(-1 if level is None else level, zlib.DEFLATED, _GZIP_WINDOW_BITS)
        return stream.compress(data) + stream.flush()
    if codec is Codec.SNAPPY:
        return _compress_xerial(data)
    if codec is Codec.LZ4:
        return _compress_lz4(data) if level in (None, _LZ4_FAST) else _compress_lz4_well(data, level)
    return bytes(cramjam.zstd.compress(data, 3 if level is None else level))


def decompress(codec: Codec, data: Buffer, max_bytes: int = DEFAULT_MAX_BYTES) -> Buffer:
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


class ExpandsTooFar(ApiError):
    """Damaged or not, what is compressed would be more than was allowed."""


def _invalid(reason: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_RECORD, reason)


def _too_large(max_bytes: int) -> ApiError:
    return ExpandsTooFar(ErrorCode.INVALID_RECORD, f"the records decompress to more than {max_bytes} bytes")


def _decompress_gzip(data: Buffer, max_bytes: int) -> bytearray:
    """All members of a gzip stream; Java's reader accepts several, so do we."""
    # Piece by piece into one buffer: zlib's own result of that size would exist twice while it is put together.
    output = bytearray()
    rest: Buffer = data
    try:
        while True:
            member = zlib.decompressobj(_GZIP_WINDOW_BITS)
            while not member.eof:
                piece = member.decompress(rest, _GZIP_PIECE_BYTES)
                output += piece
                rest = member.unconsumed_tail
                if len(output) > max_bytes:
                    raise _too_large(max_bytes)
                if not piece and not rest and not member.eof:
                    raise _invalid("the gzip stream is truncated")
            rest = member.unused_data
            if not rest:
                return output
    except zlib.error as error:
        raise _invalid(f"the gzip stream is damaged: {error}") from error


def _decompress_bounded(into: Callable[..., int], data: Buffer, max_bytes: int) -> bytearray:
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
            del output  # before the larger one is there
        else:
            del output[written:]
            return output


def _snappy_length(block: Buffer) -> int:
    """The uncompressed length that a raw snappy block declares: a varint of at most five bytes."""
    value = shift = 0
    for byte in block[:5]:
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value
        shift += 7
    raise _invalid("the snappy block has no valid length")


def _decompress_block(block: Buffer, room: int, max_bytes: int) -> bytearray:
    declared = _snappy_length(block)
    if declared > room:
        raise _too_large(max_bytes)
    # One input byte of snappy yields at most about 64/3 bytes: a longer declaration is a lie, refused unallocated.
    if declared > 64 + len(block) * 64:
        raise _invalid("the snappy block declares a length that it cannot hold")
    output = bytearray(declared)
    if not declared:
        if len(block) != 1:
            raise _invalid("the snappy block goes on after its end")
        return output
    try:
        written = cramjam.snappy.decompress_raw_into(block, output)
    except cramjam.DecompressionError as error:
        raise _invalid(f"the snappy block is damaged: {error}") from error
    if written != declared:
        raise _invalid("the snappy block is shorter than it declares")
    return output


def _decompress_snappy(data: Buffer, max_bytes: int) -> bytearray:
    view = memoryview(data)
    if bytes(view[:8]) != _XERIAL_MAGIC:
        return _decompress_block(view, max_bytes, max_bytes)
    if len(view) < len(_XERIAL_HEADER):
        raise _invalid("the snappy stream has a truncated header")
    output = bytearray()
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
        output += _decompress_block(view[pos : pos + length], max_bytes - len(output), max_bytes)
        pos += length
    return output


def _compress_lz4(data: Buffer) -> bytes:
    """A frame of independent blocks without checksums: Kafka's Java reader refuses the linked ones of most encoders."""
    view = memoryview(data)
    parts = [_LZ4_HEADER]
    for start in range(0, len(view), _LZ4_BLOCK_BYTES):
        plain = view[start : start + _LZ4_BLOCK_BYTES]
        block = bytes(cramjam.lz4.compress_block(plain, store_size=False))
        if len(block) < len(plain):
            parts.append(_LZ4_SIZE.pack(len(block)))
            parts.append(block)
        else:
            parts.append(_LZ4_SIZE.pack(len(plain) | _LZ4_STORED))
            parts.append(bytes(plain))
    parts.append(_LZ4_SIZE.pack(0))
    return b"".join(parts)


def _compress_lz4_well(data: Buffer, level: int) -> bytes:
    """The same frame; the blocks are taken out of cramjam's, which has their checksums, too."""
    # Its functions for single blocks take a level and ignore it.
    compressor = cramjam.lz4.Compressor(level=level, content_checksum=False, block_linked=False)
    compressor.compress(data)
    frame = memoryview(bytes(compressor.finish()))
    parts: list[Buffer] = [_LZ4_HEADER]
    start = len(_LZ4_HEADER)
    while (word := _LZ4_SIZE.unpack_from(frame, start)[0]) != 0:
        end = start + _LZ4_SIZE.size + (word & ~_LZ4_STORED)
        parts.append(frame[start:end])
        start = end + _LZ4_CHECKSUM_BYTES
    parts.append(_LZ4_SIZE.pack(0))
    return b"".join(parts)


def _compress_xerial(data: Buffer) -> bytes:
    view = memoryview(data)
    parts = [_XERIAL_HEADER]
    for start in range(0, len(view), _XERIAL_BLOCK_BYTES):
        block = bytes(cramjam.snappy.compress_raw(view[start : start + _XERIAL_BLOCK_BYTES]))
        parts.append(_INT32.pack(len(block)))
        parts.append(block)
    return b"".join(parts)
