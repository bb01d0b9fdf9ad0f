"""Codecs: round trips, other libraries' streams, and streams that try to hurt."""

from __future__ import annotations

import gzip
import random
import struct
import tracemalloc
import zlib

import cramjam
import lz4.frame
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import ApiError, ErrorCode
from millrace.records.compression import Codec, codec_named, compress, decompress

COMPRESSED = [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD]
TEXT = b"".join(b'{"id": %d, "name": "somebody"}\n' % i for i in range(20_000))


def refused(codec: Codec, data: bytes, max_bytes: int = 1 << 20) -> None:
    with pytest.raises(ApiError) as error:
        decompress(codec, data, max_bytes)
    assert error.value.code is ErrorCode.INVALID_RECORD


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("data", [b"", b"x", bytes(100_000), TEXT], ids=["empty", "byte", "zeros", "text"])
def test_round_trip(codec: Codec, data: bytes) -> None:
    packed = compress(codec, data)
    assert bytes(decompress(codec, packed)) == data
    assert bytes(decompress(codec, memoryview(bytearray(packed)))) == data
    assert bytes(decompress(codec, packed, max_bytes=len(data))) == data
    if data:
        with pytest.raises(ApiError):
            decompress(codec, packed, max_bytes=len(data) - 1)


@pytest.mark.parametrize("level", [1, 6, 9])
@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.LZ4, Codec.ZSTD])
def test_levels(codec: Codec, level: int) -> None:
    assert bytes(decompress(codec, compress(codec, TEXT, level))) == TEXT


@settings(deadline=None, max_examples=60)
@given(data=st.binary(max_size=3000), codec=st.sampled_from(COMPRESSED))
def test_any_bytes_round_trip(data: bytes, codec: Codec) -> None:
    assert bytes(decompress(codec, compress(codec, data))) == data


def test_names() -> None:
    assert [codec_named(name) for name in ("none", "uncompressed", "gzip", "snappy", "lz4", "zstd")] == [
        Codec.NONE,
        *list(Codec),
    ]


class TestOtherWriters:
    def test_gzip_of_several_members(self) -> None:
        assert (
            decompress(Codec.GZIP, gzip.compress(b"one ") + gzip.compress(b"two ") + gzip.compress(b"")) == b"one two "
        )

    def test_raw_snappy(self) -> None:
        assert decompress(Codec.SNAPPY, bytes(cramjam.snappy.compress_raw(TEXT))) == TEXT

    def test_xerial_streams_one_after_another(self) -> None:
        assert decompress(Codec.SNAPPY, compress(Codec.SNAPPY, b"one ") + compress(Codec.SNAPPY, b"two")) == b"one two"

    @pytest.mark.parametrize("linked", [True, False])
    @pytest.mark.parametrize("checksum", [True, False])
    @pytest.mark.parametrize("size", [True, False])
    def test_lz4_frames(self, linked: bool, checksum: bool, size: bool) -> None:
        frame = lz4.frame.compress(
            TEXT, block_linked=linked, content_checksum=checksum, block_checksum=checksum, store_size=size
        )
        assert bytes(decompress(Codec.LZ4, frame)) == TEXT

    @pytest.mark.parametrize("level", [1, 3, 19])
    def test_zstd_streams_without_a_size(self, level: int) -> None:
        writer = zstandard.ZstdCompressor(level=level).compressobj()
        frame = writer.compress(TEXT[:50_000]) + writer.flush()
        assert bytes(decompress(Codec.ZSTD, frame)) == TEXT[:50_000]

    def test_ours_is_read_by_others(self) -> None:
        assert gzip.decompress(compress(Codec.GZIP, TEXT)) == TEXT
        assert lz4.frame.decompress(compress(Codec.LZ4, TEXT)) == TEXT
        assert zstandard.ZstdDecompressor().decompressobj().decompress(compress(Codec.ZSTD, TEXT)) == TEXT


def bomb(codec: Codec, size: int) -> bytes:
    """`size` zeros, made piece by piece."""
    piece = bytes(1 << 20)
    count = size // len(piece)
    if codec is Codec.GZIP:
        writer = zlib.compressobj(9, zlib.DEFLATED, 31)
        return b"".join(writer.compress(piece) for _ in range(count)) + writer.flush()
    if codec is Codec.ZSTD:
        stream = zstandard.ZstdCompressor(level=9).compressobj()
        return b"".join(stream.compress(piece) for _ in range(count)) + stream.flush()
    if codec is Codec.LZ4:
        frame = lz4.frame.LZ4FrameCompressor()
        return bytes(frame.begin() + b"".join(frame.compress(piece) for _ in range(count)) + frame.flush())
    block = bytes(cramjam.snappy.compress_raw(piece))
    return b"\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01" + (struct.pack(">i", len(block)) + block) * count


@pytest.mark.parametrize("codec", COMPRESSED)
def test_bombs_stop_at_the_limit(codec: Codec) -> None:
    data = bomb(codec, 64 << 20)
    tracemalloc.start()
    try:
        refused(codec, data, 4 << 20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.parametrize("codec", COMPRESSED)
def test_every_cut_of_a_stream_is_refused(codec: Codec) -> None:
    data = compress(codec, TEXT[:3000])
    for size in range(len(data)):
        if codec is Codec.SNAPPY and size == 16:
            continue  # a stream header without chunks is an empty stream
        refused(codec, data[:size])


@pytest.mark.parametrize("codec", COMPRESSED)
def test_damaged_streams_give_one_kind_of_error(codec: Codec) -> None:
    rng = random.Random(codec)
    data = compress(codec, TEXT[:5000])
    for _ in range(1500):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            assert len(decompress(codec, bytes(damaged), 1 << 20)) <= 1 << 20
        except ApiError as error:
            code = error.code
        else:
            continue
        assert code is ErrorCode.INVALID_RECORD


class TestSnappyLengths:
    @pytest.mark.parametrize("length", [-1, 0, -(2**31), 2**31 - 1, 100])
    def test_chunk_lengths(self, length: int) -> None:
        refused(Codec.SNAPPY, b"\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01" + struct.pack(">i", length) + b"abc")

    @pytest.mark.parametrize(
        "block",
        [b"", b"\x80", b"\xff\xff\xff\xff\xff\x01", b"\xff\xff\xff\xff\x0f", b"\x80\x80\x80\x40", b"\x05\x00", b"\x05"],
    )
    def test_declared_lengths(self, block: bytes) -> None:
        refused(Codec.SNAPPY, block, 1 << 30)


class TestZstdLies:
    @pytest.mark.parametrize("window", [0xA8, 0xF8, 0xFF])
    def test_huge_windows_are_refused(self, window: int) -> None:
        refused(Codec.ZSTD, bytes.fromhex("28b52ffd") + bytes([0x00, window]) + b"\x0b\x00\x00\x00")

    def test_a_huge_declared_size_is_not_allocated(self) -> None:
        frame = bytes.fromhex("28b52ffd") + bytes([0xE0]) + struct.pack("<Q", 1 << 60) + b"\x0b\x00\x00\x00"
        tracemalloc.start()
        try:
            refused(Codec.ZSTD, frame, 1 << 20)
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()


def test_uncompressed_is_bounded_too() -> None:
    refused(Codec.NONE, bytes(11), 10)


@pytest.mark.parametrize(
    "data", [b"", b"x", random.Random(1).randbytes(200_000), TEXT], ids=["empty", "byte", "random", "text"]
)
def test_lz4_frames_are_what_the_java_client_reads(data: bytes) -> None:
    """Independent blocks, no content size: its reader refuses anything else."""
    frame = compress(Codec.LZ4, data)
    assert frame[:7].hex() == "04224d18604082"
    info = lz4.frame.get_frame_info(frame)
    assert not info["block_linked"] and info["block_size"] == 65536 and not info["content_checksum"]
    assert lz4.frame.decompress(frame) == data
