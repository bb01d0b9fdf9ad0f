"""Random and mutated record batches: every entrance raises `ApiError` or succeeds, in bounded memory.

Runs for about five seconds; MILLRACE_FUZZ_SECONDS gives it longer, MILLRACE_FUZZ_SEED another start.
"""

from __future__ import annotations

import os
import random
import time
import tracemalloc
from collections.abc import Callable

import pytest

from millrace.errors import ApiError
from millrace.records.batch import (
    HEADER_BYTES,
    ProduceLimits,
    crc_matches,
    read_header,
    split,
    validate_produced,
    with_crc,
)
from millrace.records.compression import Codec, decompress
from millrace.records.control import EndMarker, MarkerType, decode_end_marker, encode_end_marker
from millrace.records.decode import Header, Record, check_records, decode_records
from millrace.records.encode import encode_batch, recompress
from support.batches import NOW_MS, batch

SECONDS = float(os.environ.get("MILLRACE_FUZZ_SECONDS", "5"))
SEED = int(os.environ.get("MILLRACE_FUZZ_SEED", "1"))
MAX_BYTES = 1 << 20

EXTREMES = (0, 1, 0x7F, 0x80, 0xFF)


def corpus() -> list[bytes]:
    """Sound batches of every kind."""
    headers = [Header("trace", b"1234"), Header("", None)]
    sound = [batch(count, codec=codec, headers=headers) for codec in Codec for count in (1, 3, 50)]
    sound.append(
        encode_end_marker(EndMarker(MarkerType.ABORT, 3), producer_id=1, producer_epoch=0, timestamp_ms=NOW_MS)
    )
    sound.append(encode_batch([Record(0, NOW_MS, None, None), Record(1, NOW_MS + 10**9, b"", bytes(3000))]))
    return sound


def mutate(rng: random.Random, data: bytes) -> bytes:
    """A few random changes; often the CRC is made right again, so that the change is looked at."""
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        if not damaged:
            break
        where = rng.randrange(len(damaged))
        action = rng.randrange(7)
        if action == 0:
            damaged[where] ^= 1 << rng.randrange(8)
        elif action == 1:
            damaged[where] = rng.choice(EXTREMES)
        elif action == 2:
            del damaged[where:]
        elif action == 3:
            damaged[where:where] = rng.randbytes(rng.randrange(1, 20))
        elif action == 4:
            del damaged[where : where + rng.randrange(1, 20)]
        elif action == 5:
            size = rng.choice((2, 4, 8))
            value = rng.choice((0, 1, -1, 2 ** (size * 8 - 1) - 1, -(2 ** (size * 8 - 1))))
            damaged[where : where + size] = value.to_bytes(size, "big", signed=True)
        else:
            damaged += rng.randbytes(rng.randrange(1, 50))
    if len(damaged) >= HEADER_BYTES and rng.random() < 0.8:
        payload = bytes(damaged[HEADER_BYTES:])
        header = read_header(damaged)
        if rng.random() < 0.8:
            header = header._replace(batch_length=HEADER_BYTES - 12 + len(payload), magic=2)
        return with_crc(header, payload).pack() + payload
    return bytes(damaged)


ENTRANCES: list[Callable[[bytes], object]] = [
    read_header,
    lambda data: [header.codec_id for header, _ in split(data)],
    lambda data: [crc_matches(part) for _, part in split(data, partial_end=True)],
    lambda data: validate_produced(memoryview(data), ProduceLimits(max_message_bytes=MAX_BYTES), NOW_MS),
    lambda data: decode_records(data, max_bytes=MAX_BYTES),
    lambda data: check_records(data, require_keys=True, max_bytes=MAX_BYTES),
    lambda data: check_records(data, max_bytes=MAX_BYTES),
    lambda data: recompress(data, Codec.SNAPPY, max_bytes=MAX_BYTES),
    decode_end_marker,
]


def outcome(entrance: Callable[[bytes], object], data: bytes) -> bool:
    """Whether `data` was accepted; any error but `ApiError` fails the test."""
    try:
        entrance(data)
    except ApiError:
        return False
    return True


@pytest.mark.fuzz
@pytest.mark.timeout(SECONDS + 60)
def test_batches() -> None:
    rng = random.Random(SEED)
    sound = corpus()
    deadline = time.monotonic() + SECONDS * 0.7
    cases = 0
    tracemalloc.start()
    try:
        while time.monotonic() < deadline:
            for _ in range(50):
                data = rng.choice(sound)
                if rng.random() < 0.02:
                    data = rng.randbytes(rng.randrange(200))
                data = mutate(rng, data)
                for entrance in ENTRANCES:
                    outcome(entrance, data)
                # What the check lets through, a reader can read.
                if outcome(ENTRANCES[6], data):
                    assert outcome(ENTRANCES[4], data), data.hex()
                cases += 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert cases > 50
    assert peak < 32 << 20


@pytest.mark.fuzz
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("codec", list(Codec)[1:])
def test_streams(codec: Codec) -> None:
    rng = random.Random(SEED + codec)
    streams = [batch(count, codec=codec)[HEADER_BYTES:] for count in (1, 20, 300)]
    deadline = time.monotonic() + SECONDS * 0.3 / 4
    while time.monotonic() < deadline:
        for _ in range(50):
            damaged = bytearray(rng.choice(streams))
            for _ in range(rng.randrange(1, 5)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            if rng.random() < 0.2:
                damaged = damaged[: rng.randrange(len(damaged))]
            try:
                assert len(decompress(codec, bytes(damaged), MAX_BYTES)) <= MAX_BYTES
            except ApiError:
                continue
