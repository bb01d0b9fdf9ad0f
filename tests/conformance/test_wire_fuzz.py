"""Broken bytes through every decoder: the outcome is a message or a ProtocolError, nothing else, and soon.

The budget is small here. MILLRACE_FUZZ_EXAMPLES (inputs per message) or MILLRACE_FUZZ_SECONDS (for all of them
together) raise it; MILLRACE_FUZZ_SEED repeats a run.
"""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Iterator

import pytest

from millrace.errors import ProtocolError
from millrace.wire.codec import decode, encode
from millrace.wire.frame import (
    FrameReader,
    RequestHeader,
    decode_response,
    encode_request,
    encode_response,
    read_request_header,
)
from millrace.wire.messages import DECLARATIONS, request_class, response_class
from millrace.wire.messages.consumer_protocol import ConsumerProtocolAssignment, ConsumerProtocolSubscription
from millrace.wire.schema import Data
from support.streams import feed
from support.values import Values, declared_messages

pytestmark = pytest.mark.fuzz

EXAMPLES = int(os.environ.get("MILLRACE_FUZZ_EXAMPLES", "400"))
SECONDS = float(os.environ.get("MILLRACE_FUZZ_SECONDS", "0"))
SEED = os.environ.get("MILLRACE_FUZZ_SEED", "millrace")

TARGETS: list[type[Data]] = [*declared_messages(), ConsumerProtocolSubscription, ConsumerProtocolAssignment]

NASTY = (
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
    b"\x80\x00\x00\x00",
    b"\xff\xff\xff\xff\x0f",
    b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    b"\x80\x80\x80\x80\x00",
    b"\xff\xfe",
    b"\x00\x01\x00\x00",
    b"\x41",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\x00",
    b"\xff",
)


def budget(share: int) -> Iterator[int]:
    """Numbers, as many as examples are wanted, or for this test's share of the seconds."""
    if not SECONDS:
        yield from range(EXAMPLES)
        return
    until = time.monotonic() + SECONDS / share
    number = 0
    while time.monotonic() < until:
        yield number
        number += 1


def mutated(raw: bytes, rng: random.Random) -> bytes:
    """`raw` with one to three things wrong; sometimes bytes that never were a message."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(7):
            case 0:
                del data[at:]
            case 1 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                nasty = rng.choice(NASTY)
                data[at : at + len(nasty)] = nasty
            case 3:
                data[at:at] = rng.choice(NASTY)
            case 4:
                del data[at : at + rng.choice((1, 2, 4, 16))]
            case 5:
                data[at:at] = data[at : at + rng.randrange(64)]
            case _:
                data[:] = rng.randbytes(rng.randrange(200))
    return bytes(data)


@pytest.mark.parametrize("cls", TARGETS, ids=lambda cls: cls.__name__)
def test_decoder_survives(cls: type[Data]) -> None:
    rng = random.Random(f"{SEED} {cls.__name__}")
    values = Values(f"{SEED} {cls.__name__}")
    for _ in budget(len(TARGETS)):
        version = rng.randint(cls.min_version, cls.max_version)
        data = mutated(encode(values.message(cls, version), version), rng)
        try:
            message, end = decode(cls, version, memoryview(data) if rng.random() < 0.5 else data)
        except ProtocolError:
            continue
        assert 0 <= end <= len(data)
        # What was accepted is a message: it can be sent again and means the same.
        again = encode(message, version)
        assert encode(decode(cls, version, again)[0], version) == again


def test_request_header_survives() -> None:
    rng = random.Random(SEED)
    keys = list(DECLARATIONS)
    for _ in budget(len(TARGETS)):
        key = rng.choice(keys)
        version = rng.randint(request_class(key).min_version, request_class(key).max_version)
        header = RequestHeader(key, version, rng.randint(-5, 5), rng.choice((None, "", "client")))
        frame = mutated(encode_request(header, request_class(key)())[4:], rng)
        try:
            found, pos = read_request_header(frame)
        except ProtocolError:
            continue
        assert 10 <= pos <= len(frame)
        assert isinstance(found, RequestHeader)


def test_response_reader_survives() -> None:
    rng = random.Random(SEED)
    keys = list(DECLARATIONS)
    for _ in budget(len(TARGETS)):
        cls = response_class(rng.choice(keys))
        version = rng.randint(cls.min_version, cls.max_version)
        frame = mutated(encode_response(7, version, cls())[4:], rng)
        try:
            decode_response(cls, version, frame)
        except ProtocolError:
            continue


def test_frame_reader_cuts_any_stream_the_same_way() -> None:
    rng = random.Random(SEED)
    for _ in budget(len(TARGETS)):
        frames = [rng.randbytes(rng.choice((0, 1, 3, 100, 5000))) for _ in range(rng.randrange(6))]
        stream = b"".join(struct.pack(">i", len(frame)) + frame for frame in frames)
        reader = FrameReader(5000)
        found: list[bytes] = []
        at = 0
        while at < len(stream):
            step = rng.choice((1, 2, 3, 7, 64, 4096, 20_000))
            found += [bytes(frame) for frame in feed(reader, stream[at : at + step])]
            at += step
        assert found == frames
        assert reader.pending_bytes == 0


def test_frame_reader_survives() -> None:
    rng = random.Random(SEED)
    for _ in budget(len(TARGETS)):
        reader = FrameReader(1000)
        stream = b"".join(struct.pack(">i", size) + rng.randbytes(size) for size in (0, 5, 100))
        try:
            for _ in range(4):
                for frame in feed(reader, mutated(stream, rng)):
                    assert len(frame) <= 1000
                assert reader.pending_bytes <= 1004
        except ProtocolError:
            continue
