"""Bad input, compression: bombs, streams that end early, sizes that lie.

Four places where a broker might decompress: the check of keys on a compacted topic, compressing again under a topic's
`compression.type`, the search for a timestamp, and metrics that clients push. Each must be bounded. A plain topic
stores the bytes as they came.
"""

from __future__ import annotations

import gzip
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from functools import cache

import cramjam
import pytest

from millrace.errors import ErrorCode
from millrace.records.batch import HEADER_BYTES, read_header, with_crc
from millrace.records.compression import Codec, compress
from millrace.wire.messages.offsets import ListOffsetsRequest
from millrace.wire.messages.telemetry import GetTelemetrySubscriptionsRequest, PushTelemetryRequest
from millrace.wire.primitives import varint
from support.raw import MIB, RawClient, WatchedBroker, batch, error_codes, produce_request

E = ErrorCode
PLAIN, COMPACTED, RECOMPRESSED = "plain", "compacted", "recompressed"
TOPICS = {PLAIN: {}, COMPACTED: {"cleanup.policy": "compact"}, RECOMPRESSED: {"compression.type": "lz4"}}
RECOMPRESSED_CODEC = Codec.LZ4
REFUSALS = {E.INVALID_RECORD, E.CORRUPT_MESSAGE, E.MESSAGE_TOO_LARGE, E.UNSUPPORTED_COMPRESSION_TYPE}
BOMB_BYTES = 200 * MIB


@pytest.fixture(scope="module")
def broker() -> Iterator[WatchedBroker]:
    with WatchedBroker({"telemetry.receiver": "file:/dev/null"}) as running:
        with running.connect() as client:
            for name, config in TOPICS.items():
                client.create_topic(name, config=config)
        yield running


def holding(codec: Codec, stream: bytes, count: int = 1) -> bytes:
    """A batch with a sound header and CRC around any stream."""
    header = read_header(batch(*[b"v"] * count))._replace(
        attributes=int(codec), batch_length=HEADER_BYTES - 12 + len(stream)
    )
    return with_crc(header, stream).pack() + stream


def records(*values: bytes) -> bytes:
    """The records of a batch before compression."""
    parts = []
    for offset, value in enumerate(values):
        body = b"\0\0" + varint(offset) + varint(1) + b"k" + varint(len(value)) + value + b"\0"
        parts.append(varint(len(body)) + body)
    return b"".join(parts)


def record_prefix(value_bytes: int) -> bytes:
    """The start of a record whose value is `value_bytes` long; the value and one zero byte follow."""
    head = b"\0\0" + varint(0) + varint(1) + b"k" + varint(value_bytes)
    return varint(len(head) + value_bytes + 1) + head


# --- bombs ------------------------------------------------------------------------------------------------------------


@cache
def gzip_bomb() -> bytes:
    """About 1:1000: a sound stream of one enormous record."""
    stream = zlib.compressobj(9, zlib.DEFLATED, 31)
    parts = [stream.compress(record_prefix(BOMB_BYTES))]
    parts.extend(stream.compress(bytes(MIB)) for _ in range(BOMB_BYTES // MIB))
    return b"".join([*parts, stream.compress(b"\0"), stream.flush()])


ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
ZSTD_BLOCK_BYTES = 128 * 1024


def zstd_block(kind: int, size: int, content: bytes, *, last: bool = False) -> bytes:
    """A raw (kind 0) or run-length (kind 1) block."""
    return struct.pack("<I", size << 3 | kind << 1 | int(last))[:3] + content


@cache
def zstd_bomb() -> bytes:
    """1:32,768, the most zstd can do: every block says "the same byte, 128 KiB of it"."""
    window = (17 - 10) << 3  # 128 KiB
    blocks = [zstd_block(0, len(prefix := record_prefix(BOMB_BYTES)), prefix)]
    blocks += [zstd_block(1, ZSTD_BLOCK_BYTES, b"\0")] * (BOMB_BYTES // ZSTD_BLOCK_BYTES)
    blocks.append(zstd_block(0, 1, b"\0", last=True))
    return ZSTD_MAGIC + bytes([0, window]) + b"".join(blocks)


@cache
def endless_zstd() -> bytes:
    """Half a megabyte that stands for 16 GiB."""
    blocks = zstd_block(1, ZSTD_BLOCK_BYTES, b"\0") * (MIB // 2 // 4)
    return ZSTD_MAGIC + bytes([0, (17 - 10) << 3]) + blocks + zstd_block(0, 1, b"\0", last=True)


@cache
def lz4_bomb() -> bytes:
    """1:255, the most lz4 can do."""
    return bytes(cramjam.lz4.compress(record_prefix(BOMB_BYTES) + bytes(BOMB_BYTES + 1)))


@cache
def snappy_bomb() -> bytes:
    """1:21, the most snappy can do, in xerial chunks of a megabyte."""
    data = record_prefix(20 * MIB) + bytes(20 * MIB + 1)
    chunks = [bytes(cramjam.snappy.compress_raw(data[start : start + MIB])) for start in range(0, len(data), MIB)]
    return XERIAL + b"".join(struct.pack(">i", len(chunk)) + chunk for chunk in chunks)


XERIAL = b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1)
LZ4_MAGIC = b"\x04\x22\x4d\x18"

BOMBS: dict[str, tuple[Codec, Callable[[], bytes]]] = {
    "gzip-1-to-1000": (Codec.GZIP, gzip_bomb),
    "zstd-1-to-32768": (Codec.ZSTD, zstd_bomb),
    "zstd-16-gib": (Codec.ZSTD, endless_zstd),
    "lz4-1-to-255": (Codec.LZ4, lz4_bomb),
    "snappy-1-to-21": (Codec.SNAPPY, snappy_bomb),
}

GOOD = records(b"one", b"two")


def gz(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


DAMAGED: dict[str, tuple[Codec, bytes]] = {
    "gzip-empty": (Codec.GZIP, b""),
    "gzip-garbage": (Codec.GZIP, b"\x1f\x8b" + b"\xff" * 50),
    "gzip-not-gzip": (Codec.GZIP, GOOD),
    "gzip-cut": (Codec.GZIP, gz(GOOD)[:-9]),
    "gzip-cut-in-the-trailer": (Codec.GZIP, gz(GOOD)[:-2]),
    "gzip-cut-in-the-header": (Codec.GZIP, gz(GOOD)[:5]),
    "gzip-wrong-crc": (Codec.GZIP, gz(GOOD)[:-8] + b"\0" * 8),
    "gzip-trailing-garbage": (Codec.GZIP, gz(GOOD) + b"garbage"),
    "gzip-second-member-cut": (Codec.GZIP, gz(GOOD) + gz(b"x" * 100)[:-4]),
    "zstd-empty": (Codec.ZSTD, b""),
    "zstd-garbage": (Codec.ZSTD, ZSTD_MAGIC + b"\xff" * 50),
    "zstd-not-zstd": (Codec.ZSTD, GOOD),
    "zstd-cut": (Codec.ZSTD, compress(Codec.ZSTD, GOOD)[:-4]),
    "zstd-window-of-2-gib": (
        Codec.ZSTD,
        ZSTD_MAGIC + bytes([0, (31 - 10) << 3]) + zstd_block(1, 1000, b"\0", last=True),
    ),
    "zstd-window-of-3-tib": (Codec.ZSTD, ZSTD_MAGIC + bytes([0, 0xFF]) + zstd_block(1, 1000, b"\0", last=True)),
    "zstd-content-size-2-62": (
        Codec.ZSTD,
        ZSTD_MAGIC + bytes([0xE0]) + struct.pack("<Q", 2**62) + zstd_block(0, len(GOOD), GOOD, last=True),
    ),
    "zstd-content-size-of-1-gib": (
        Codec.ZSTD,
        ZSTD_MAGIC + bytes([0xA0]) + struct.pack("<I", 2**30) + zstd_block(0, len(GOOD), GOOD, last=True),
    ),
    "zstd-content-size-too-small": (
        Codec.ZSTD,
        ZSTD_MAGIC + bytes([0xA0]) + struct.pack("<I", 3) + zstd_block(0, len(GOOD), GOOD, last=True),
    ),
    "zstd-dictionary": (Codec.ZSTD, ZSTD_MAGIC + bytes([0x03, 0]) + struct.pack("<I", 77) + bytes(20)),
    "zstd-skippable-frames-only": (Codec.ZSTD, (b"\x50\x2a\x4d\x18" + struct.pack("<I", 0)) * 1000),
    "zstd-reserved-block": (Codec.ZSTD, ZSTD_MAGIC + bytes([0, 0x38]) + zstd_block(3, 10, bytes(10), last=True)),
    "lz4-empty": (Codec.LZ4, b""),
    "lz4-garbage": (Codec.LZ4, LZ4_MAGIC + b"\xff" * 50),
    "lz4-not-lz4": (Codec.LZ4, GOOD),
    "lz4-cut": (Codec.LZ4, compress(Codec.LZ4, GOOD * 50)[:-20]),
    "lz4-cut-in-the-header": (Codec.LZ4, LZ4_MAGIC + b"\x60"),
    "lz4-wrong-header-checksum": (Codec.LZ4, LZ4_MAGIC + b"\x60\x40\x00" + struct.pack("<I", 0)),
    "lz4-block-of-2-gib": (Codec.LZ4, LZ4_MAGIC + b"\x60\x40\x82" + struct.pack("<I", 0x7FFFFFFF) + bytes(20)),
    "snappy-empty": (Codec.SNAPPY, b""),
    "snappy-garbage": (Codec.SNAPPY, b"\xff" * 50),
    "snappy-header-only": (Codec.SNAPPY, XERIAL),
    "snappy-header-cut": (Codec.SNAPPY, XERIAL[:12]),
    "snappy-chunk-minus-1": (Codec.SNAPPY, XERIAL + struct.pack(">i", -1) + bytes(20)),
    "snappy-chunk-0": (Codec.SNAPPY, XERIAL + struct.pack(">i", 0) * 100),
    "snappy-chunk-maximum": (Codec.SNAPPY, XERIAL + struct.pack(">i", 2**31 - 1) + bytes(20)),
    "snappy-chunk-over-the-rest": (Codec.SNAPPY, XERIAL + struct.pack(">i", 100) + bytes(20)),
    "snappy-chunk-size-cut": (Codec.SNAPPY, XERIAL + b"\0\0"),
    "snappy-declares-4-gib": (Codec.SNAPPY, b"\xff\xff\xff\xff\x0f" + bytes(100)),
    "snappy-chunk-declares-4-gib": (
        Codec.SNAPPY,
        XERIAL + struct.pack(">i", 105) + b"\xff\xff\xff\xff\x0f" + bytes(100),
    ),
    "snappy-declares-too-little": (Codec.SNAPPY, b"\x01" + bytes(cramjam.snappy.compress_raw(GOOD))[1:]),
    "snappy-cut": (Codec.SNAPPY, bytes(cramjam.snappy.compress_raw(GOOD))[:-3]),
    "snappy-copy-before-the-start": (Codec.SNAPPY, b"\x20" + b"\x01\xff" * 8),
}


def look_for_timestamps(client: RawClient, topic: str) -> None:
    for timestamp in (-3, 1, int(time.time() * 1000) - 60_000, int(time.time() * 1000)):
        wanted = [ListOffsetsRequest.ListOffsetsPartition(partition_index=0, timestamp=timestamp)]
        topics = [ListOffsetsRequest.ListOffsetsTopic(name=topic, partitions=wanted)]
        response = client.call(ListOffsetsRequest(replica_id=-1, topics=topics), 7, within_s=2)
        assert error_codes(response) <= {E.NONE} | REFUSALS


@pytest.mark.parametrize("case", BOMBS)
@pytest.mark.parametrize("topic", [COMPACTED, RECOMPRESSED])
def test_cve_2026_111073_a_bomb_is_refused_where_it_would_go_off(broker: WatchedBroker, case: str, topic: str) -> None:
    codec, make = BOMBS[case]
    bomb = holding(codec, make())
    with broker.unharmed(), broker.connect() as client:
        answer = client.produce(topic, bomb)
        # Snappy expands so little that a bomb of it may be within the bound; then it is just a large record. What is
        # in the topic's codec already is not compressed again.
        stored = codec is Codec.SNAPPY or (topic == RECOMPRESSED and codec is RECOMPRESSED_CODEC)
        assert answer.error_code in REFUSALS | ({E.NONE} if stored else set())
        assert client.produce(topic, batch(b"good")).error_code == 0


@pytest.mark.parametrize("case", BOMBS)
def test_cve_2026_111073_a_bomb_that_is_stored_never_goes_off(broker: WatchedBroker, case: str) -> None:
    codec, make = BOMBS[case]
    bomb = holding(codec, make())
    topic = f"bomb-{case}"
    with broker.unharmed(), broker.connect() as client:
        client.create_topic(topic)
        assert client.produce(topic, bomb).error_code in REFUSALS | {E.NONE}
        look_for_timestamps(client, topic)
        assert client.produce(topic, batch(b"good")).error_code == 0
        look_for_timestamps(client, topic)


@pytest.mark.parametrize("case", BOMBS)
def test_cve_2026_111073_a_bomb_among_the_metrics_of_a_client(broker: WatchedBroker, case: str) -> None:
    """The client is told that it is too much, and may go on; INVALID_RECORD would end its telemetry for good."""
    codec, make = BOMBS[case]
    with broker.unharmed(), broker.connect() as client:
        assert push_metrics(client, codec, make()) == E.TELEMETRY_TOO_LARGE


@pytest.mark.parametrize(
    "metrics",
    [b"\x0a\x00" * (4 * MIB - 1), b"\x50\x00" * (4 * MIB - 1), b"\x0a\x80\x80\x80\x04" + b"\x0a\x00" * (4 * MIB)],
    ids=["resources", "unknown fields", "within a resource"],
)
def test_metrics_that_would_grow_or_take_long(broker: WatchedBroker, metrics: bytes) -> None:
    """Each resource gets the client's attributes, and two bytes are one."""
    with broker.unharmed(), broker.connect() as client:
        assert push_metrics(client, Codec.ZSTD, compress(Codec.ZSTD, metrics)) == E.TELEMETRY_TOO_LARGE


def push_metrics(client: RawClient, codec: Codec, metrics: bytes) -> int:
    told = client.call(GetTelemetrySubscriptionsRequest(), 0)
    request = PushTelemetryRequest(
        client_instance_id=told.client_instance_id,
        subscription_id=told.subscription_id,
        compression_type=codec,
        metrics=metrics,
    )
    return int(client.call(request, 0).error_code)


def test_many_bombs_at_once(broker: WatchedBroker) -> None:
    """What bounds one must bound sixteen: they must not all be decompressed at the same time."""
    bombs = [holding(codec, make()) for codec, make in BOMBS.values() if codec is not Codec.SNAPPY] * 4
    with broker.unharmed():
        clients = [broker.connect() for _ in bombs]
        try:
            for client, bomb in zip(clients, bombs, strict=True):
                client.request(produce_request(COMPACTED, bomb), 9)
            for client in clients:
                assert error_codes(client.response(0, 9)) <= REFUSALS
        finally:
            for client in clients:
                client.close()


EMPTY = {"zstd-skippable-frames-only", "snappy-header-only"}
"""Whole streams of nothing: only a look at the records tells that they are missing."""


@pytest.mark.parametrize("case", [case for case in DAMAGED if case.startswith("snappy-chunk")])
@pytest.mark.parametrize("topic", [COMPACTED, RECOMPRESSED])
def test_cve_2023_34455_a_length_of_a_snappy_chunk_is_not_believed(
    broker: WatchedBroker, case: str, topic: str
) -> None:
    codec, stream = DAMAGED[case]
    with broker.unharmed(), broker.connect() as client:
        assert client.produce(topic, holding(codec, stream)).error_code == E.INVALID_RECORD


@pytest.mark.parametrize("case", DAMAGED)
@pytest.mark.parametrize("topic", [COMPACTED, RECOMPRESSED])
def test_a_damaged_stream_is_refused_where_it_is_read(broker: WatchedBroker, case: str, topic: str) -> None:
    codec, stream = DAMAGED[case]
    stored = topic == RECOMPRESSED and (codec is RECOMPRESSED_CODEC or case in EMPTY)
    with broker.unharmed(), broker.connect() as client:
        answer = client.produce(topic, holding(codec, stream, count=2))
        assert answer.error_code in REFUSALS | ({E.NONE} if stored else set()), answer
        assert client.produce(topic, batch(b"good", compression=codec)).error_code == 0


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_stream_that_is_stored_does_no_harm(broker: WatchedBroker, case: str) -> None:
    codec, stream = DAMAGED[case]
    topic = f"damaged-{case}"
    with broker.unharmed(), broker.connect() as client:
        client.create_topic(topic)
        assert client.produce(topic, holding(codec, stream, count=2)).error_code in REFUSALS | {E.NONE}
        look_for_timestamps(client, topic)
        assert client.produce(topic, batch(b"good", compression=codec)).error_code == 0
        look_for_timestamps(client, topic)


SOUND: dict[str, tuple[Codec, bytes]] = {
    "gzip": (Codec.GZIP, gz(GOOD)),
    "gzip-of-two-members": (Codec.GZIP, gz(GOOD[:7]) + gz(GOOD[7:])),
    "gzip-of-many-members": (Codec.GZIP, b"".join(gz(GOOD[place : place + 1]) for place in range(len(GOOD)))),
    "snappy-raw": (Codec.SNAPPY, bytes(cramjam.snappy.compress_raw(GOOD))),
    "snappy-xerial": (Codec.SNAPPY, compress(Codec.SNAPPY, GOOD)),
    "lz4": (Codec.LZ4, compress(Codec.LZ4, GOOD)),
    "zstd": (Codec.ZSTD, compress(Codec.ZSTD, GOOD)),
    "zstd-raw-block": (Codec.ZSTD, ZSTD_MAGIC + bytes([0, 0x38]) + zstd_block(0, len(GOOD), GOOD, last=True)),
}


@pytest.mark.parametrize("case", SOUND)
@pytest.mark.parametrize("topic", TOPICS)
def test_a_sound_stream_in_any_of_its_forms_is_taken(broker: WatchedBroker, case: str, topic: str) -> None:
    """The table above would prove nothing if these failed too."""
    codec, stream = SOUND[case]
    with broker.unharmed(), broker.connect() as client:
        assert client.produce(topic, holding(codec, stream, count=2)).error_code == 0
