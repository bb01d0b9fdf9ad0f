from __future__ import annotations

import random
import struct
import tracemalloc

import pytest

from millrace.errors import ProtocolError
from millrace.wire.frame import (
    FIRST_ROOM_BYTES,
    SHARED_BYTES,
    FrameReader,
    RequestHeader,
    decode_response,
    encode_request,
    encode_response,
    encode_response_parts,
    read_request_header,
    response_header_version,
)
from millrace.wire.keys import ApiKey
from millrace.wire.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from millrace.wire.messages.fetch import FetchResponse
from millrace.wire.messages.groups import HeartbeatRequest, HeartbeatResponse
from millrace.wire.primitives import tagged_section
from support.streams import feed


def framed(*bodies: bytes) -> bytes:
    return b"".join(struct.pack(">i", len(body)) + body for body in bodies)


def test_whole_frames_that_come_together_share_one_copy() -> None:
    frames = feed(FrameReader(100), framed(b"one", b"", b"three"))
    assert [bytes(frame) for frame in frames] == [b"one", b"", b"three"]
    assert all(frame.obj is frames[0].obj for frame in frames)


def test_the_rest_of_a_large_frame_is_read_to_its_place() -> None:
    reader = FrameReader(1 << 20)
    body = random.Random(1).randbytes(200_000)
    assert feed(reader, framed(body)[:60_000]) == []
    place = reader.room()
    assert len(place) == 4 + len(body) - 60_000
    place[:] = body[60_000 - 4 :]
    (frame,) = reader.took(len(place))
    assert frame.obj is place.obj
    assert frame == body


def test_only_the_beginning_of_the_next_large_frame_is_copied() -> None:
    reader = FrameReader(1 << 20)
    body = bytes(500_000)
    assert len(reader.room()) == SHARED_BYTES
    assert feed(reader, framed(body)) == [body]
    first = reader.room()
    assert len(first) == FIRST_ROOM_BYTES
    first[:4] = framed(body)[:4]
    assert reader.took(4) == []
    assert len(reader.room()) == len(body)  # believed now
    assert feed(reader, body) == [body]
    assert feed(reader, framed(b"small")[:7]) == []
    assert feed(reader, b"ll") == [b"small"]
    assert len(reader.room()) == SHARED_BYTES


def test_memory_grows_with_what_has_arrived() -> None:
    reader = FrameReader(1 << 30)
    feed(reader, struct.pack(">i", 1 << 20))
    sizes = []
    while not feed(reader, bytes(1000)):
        sizes.append((reader.pending_bytes, reader.pending_bytes + len(reader.room())))
    assert sizes[-1][1] == (1 << 20) + 4
    assert all(held <= max(FIRST_ROOM_BYTES, 5 * arrived) for arrived, held in sizes)
    assert len({held for _, held in sizes}) <= 6


def test_readers_of_one_thread_do_not_disturb_each_other() -> None:
    one, two = FrameReader(100), FrameReader(100)
    (first,) = feed(one, framed(b"one"))
    feed(one, framed(b"later")[:6])
    (second,) = feed(two, framed(b"two"))
    (third,) = feed(one, b"ter")
    assert [bytes(frame) for frame in (first, second, third)] == [b"one", b"two", b"later"]


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5, 6, 7, 11])
def test_frames_across_chunks(step: int) -> None:
    data = framed(b"a", b"bcdefghij", b"", b"klm")
    reader = FrameReader(100)
    found = []
    for at in range(0, len(data), step):
        found += [bytes(frame) for frame in feed(reader, data[at : at + step])]
    assert found == [b"a", b"bcdefghij", b"", b"klm"]
    assert reader.pending_bytes == 0


def test_a_frame_is_never_written_to_again() -> None:
    reader = FrameReader(100)
    feed(reader, framed(b"hello")[:6])
    (first,) = feed(reader, b"llo" + framed(b"again")[:5])
    assert first.readonly
    feed(reader, b"gain")
    assert bytes(first) == b"hello"


@pytest.mark.parametrize("size", [-1, 101, (1 << 31) - 1, -(1 << 31)])
def test_sizes_out_of_range(size: int) -> None:
    for pieces in ([struct.pack(">i", size)], [struct.pack(">i", size)[:2], struct.pack(">i", size)[2:]]):
        reader = FrameReader(100)
        assert [feed(reader, piece) for piece in pieces] == [[] for _ in pieces]
        assert "a frame of" in str(reader.failure)
        assert feed(reader, struct.pack(">i", 1) + b"x") == []
        assert reader.pending_bytes == 0


def test_frames_before_a_bad_size_are_good() -> None:
    reader = FrameReader(100)
    frames = feed(reader, struct.pack(">i", 2) + b"ok" + struct.pack(">i", -1))
    assert [bytes(frame) for frame in frames] == [b"ok"]
    assert reader.failure is not None


def test_a_declared_size_allocates_nothing() -> None:
    reader = FrameReader(1 << 30)
    tracemalloc.start()
    try:
        feed(reader, struct.pack(">i", 1 << 30) + b"x")
        feed(reader, b"y")
        assert tracemalloc.get_traced_memory()[1] < 10_000
    finally:
        tracemalloc.stop()
    assert reader.pending_bytes == 6
    assert "6 of" in repr(reader)


def test_other_protocols_are_refused() -> None:
    for hello in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00"):
        reader = FrameReader(100 << 20)
        assert feed(reader, hello) == []
        assert reader.failure is not None


def test_request_header_versions() -> None:
    old = encode_request(RequestHeader(ApiKey.HEARTBEAT, 3, 5, "c"), HeartbeatRequest())
    new = encode_request(RequestHeader(ApiKey.HEARTBEAT, 4, 5, "c"), HeartbeatRequest())
    assert read_request_header(old[4:]) == (RequestHeader(12, 3, 5, "c"), 11)
    assert read_request_header(new[4:]) == (RequestHeader(12, 4, 5, "c"), 12)


def test_unknown_versions_and_keys_still_have_a_header() -> None:
    header = struct.pack(">hhih", ApiKey.API_VERSIONS, 99, 1, 2) + b"me" + b"\0"
    assert read_request_header(header + b"??") == (RequestHeader(18, 99, 1, "me"), 13)
    header = struct.pack(">hhih", 999, 0, 1, -1)
    assert read_request_header(header) == (RequestHeader(999, 0, 1, None), 10)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\0" * 9,
        struct.pack(">hhih", 3, 1, 1, 5) + b"ab",
        struct.pack(">hhih", 3, 1, 1, -2),
        struct.pack(">hhih", 3, 1, 1, 32767),
        struct.pack(">hhih", 3, 1, 1, 1) + b"\xff",
        struct.pack(">hhih", 3, 12, 1, 0),
        struct.pack(">hhih", 3, 12, 1, 0) + b"\xff\xff\xff\xff\x0f",
        struct.pack(">hhih", 3, 12, 1, 0) + b"\x80\x80\x80\x80\x80\x80",
        struct.pack(">hhih", 3, 12, 1, 0) + b"\x02\x01\x00\x01\x00",
        struct.pack(">hhih", 3, 12, 1, 0) + b"\x01\x01\x7f",
    ],
    ids=lambda raw: raw.hex() or "empty",
)
def test_broken_request_headers(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_request_header(frame)


def test_header_tags_are_skipped() -> None:
    start = struct.pack(">hhih", ApiKey.API_VERSIONS, 3, 1, -1)
    tags = tagged_section([(0, b"x"), (9, b"yy")])
    assert read_request_header(start + tags + b"body")[1] == len(start + tags)


def test_response_headers() -> None:
    assert response_header_version(ApiKey.HEARTBEAT, 3) == 0
    assert response_header_version(ApiKey.HEARTBEAT, 4) == 1
    assert response_header_version(ApiKey.API_VERSIONS, 4) == 0
    assert response_header_version(ApiKey.SASL_HANDSHAKE, 1) == 0


@pytest.mark.parametrize("version", range(5))
def test_response_round_trip(version: int) -> None:
    raw = encode_response(77, version, HeartbeatResponse(error_code=25))
    (frame,) = feed(FrameReader(1000), raw)
    assert decode_response(HeartbeatResponse, version, frame) == (77, HeartbeatResponse(error_code=25))
    raw = encode_response(78, version, ApiVersionsResponse(error_code=35))
    assert decode_response(ApiVersionsResponse, version, raw[4:]) == (78, ApiVersionsResponse(error_code=35))


def test_left_over_bytes_in_a_response_are_refused() -> None:
    raw = encode_response(77, 0, HeartbeatResponse())
    with pytest.raises(ProtocolError, match="left over"):
        decode_response(HeartbeatResponse, 0, raw[4:] + b"x")
    with pytest.raises(ProtocolError):
        decode_response(HeartbeatResponse, 0, b"\0\0")


def test_response_parts_keep_record_sets() -> None:
    records = memoryview(bytes(1000))
    response = FetchResponse(
        responses=[FetchResponse.FetchableTopicResponse(partitions=[FetchResponse.PartitionData(records=records)])]
    )
    parts = encode_response_parts(5, 13, response)
    assert any(part is records for part in parts)
    assert b"".join(parts) == encode_response(5, 13, response)


def test_an_api_versions_request_from_scratch() -> None:
    request = ApiVersionsRequest(client_software_name="n", client_software_version="1")
    raw = encode_request(RequestHeader(ApiKey.API_VERSIONS, 3, 1, None), request)
    assert raw == struct.pack(">ihhih", 16, 18, 3, 1, -1) + b"\0" + b"\x02n" + b"\x021" + b"\0"
