"""The codec's promises: bounds, nulls, version rules. That the bytes are Kafka's is shown in tests/conformance."""

from __future__ import annotations

import struct
import tracemalloc
from uuid import UUID

import pytest

from millrace.errors import ProtocolError
from millrace.wire import primitives
from millrace.wire.codec import decode, encode, encode_to
from millrace.wire.messages.cluster import MetadataRequest, MetadataResponse
from millrace.wire.messages.fetch import FetchRequest, FetchResponse
from millrace.wire.messages.group_offsets import OffsetFetchRequest
from millrace.wire.messages.groups import HeartbeatRequest, LeaveGroupRequest
from millrace.wire.messages.produce import ProduceRequest
from millrace.wire.primitives import Buffer
from millrace.wire.schema import (
    Data,
    Struct,
    array,
    boolean,
    float64,
    int8,
    int16,
    int32,
    nested,
    string,
    uint16,
    uint32,
    uuid,
)


class Sample(Data, versions="0-2", flexible="2+"):
    class Part(Struct):
        number: int = int32()
        name: str = string("1+")

    flag: bool = boolean()
    small: int = int8()
    port: int = uint16()
    count: int = uint32()
    ratio: float = float64()
    title: str | None = string(nullable="1+", default=None)
    part: Part | None = nested(Part, nullable=True)
    parts: list[Part] = array(Part)
    added: int = int16("1+")
    hint: int = int16("1+", ignorable=True)
    late: str = string("2+", tag=3)


def test_a_structure_without_api_key() -> None:
    sample = Sample(
        flag=True,
        small=-1,
        port=65535,
        count=1 << 31,
        ratio=0.5,
        title="t",
        part=Sample.Part(number=1, name="p"),
        parts=[Sample.Part(number=2, name="q")],
        added=7,
        late="late",
    )
    for version in (1, 2):
        wanted = sample
        if version == 1:
            wanted = Sample(**{name: getattr(sample, name) for name in Sample.field_names() if name != "late"})
        raw = encode(wanted, version)
        assert decode(Sample, version, raw) == (wanted, len(raw))


def test_layout_of_fixed_and_compact_versions() -> None:
    sample = Sample(title="ab", parts=[Sample.Part(number=5)], flag=True)
    head = struct.pack(">?bHId", True, 0, 0, 0, 0.0)
    assert encode(sample, 1) == head + b"\0\2ab" + b"\xff" + b"\0\0\0\1" + b"\0\0\0\5" + b"\0\0" + b"\0\0" + b"\0\0"
    assert (
        encode(sample, 2) == head + b"\3ab" + b"\xff" + b"\2" + b"\0\0\0\5" + b"\1" + b"\0" + b"\0\0" + b"\0\0" + b"\0"
    )


def test_fields_of_other_versions() -> None:
    with pytest.raises(ValueError, match="added"):
        encode(Sample(title="", added=1), 0)
    assert encode(Sample(title="", hint=1), 0) == encode(Sample(title=""), 0)
    message, _ = decode(Sample, 0, encode(Sample(title=""), 0))
    assert (message.added, message.hint, message.late) == (0, 0, "")


def test_null_where_it_is_not_allowed() -> None:
    with pytest.raises(ValueError, match="cannot be encoded"):
        encode(Sample(title=None), 0)
    raw = bytearray(encode(Sample(title=""), 0))
    raw[16:18] = b"\xff\xff"
    with pytest.raises(ProtocolError, match="title"):
        decode(Sample, 0, raw)
    assert decode(Sample, 1, encode(Sample(title=None), 1))[0].title is None


@pytest.mark.parametrize(
    "message",
    [
        HeartbeatRequest(generation_id=1 << 31),
        HeartbeatRequest(group_id=None),  # type: ignore[arg-type]
        HeartbeatRequest(group_id=7),  # type: ignore[arg-type]
        HeartbeatRequest(group_id="x" * 32_768),
        HeartbeatRequest(group_id="\ud800"),
    ],
)
def test_values_that_do_not_fit(message: HeartbeatRequest) -> None:
    for version in (2, 4):
        with pytest.raises(ValueError):
            encode(message, version)


def test_versions_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="no version"):
        encode(HeartbeatRequest(), 5)
    with pytest.raises(ProtocolError, match="no such version"):
        decode(HeartbeatRequest, 5, b"")
    with pytest.raises(ProtocolError, match="no such version"):
        decode(HeartbeatRequest, -1, b"")
    with pytest.raises(TypeError):
        encode(FetchRequest.FetchTopic(), 12)
    with pytest.raises(TypeError):
        decode(FetchRequest.FetchTopic, 12, b"")


def test_decode_says_where_it_stopped() -> None:
    raw = encode(HeartbeatRequest(group_id="g"), 4)
    assert decode(HeartbeatRequest, 4, b"12" + raw + b"345", 2)[1] == 2 + len(raw)


@pytest.mark.parametrize("version", [0, 3, 4])
def test_every_truncation_is_refused(version: int) -> None:
    raw = encode(HeartbeatRequest(group_id="group", member_id="member"), version)
    for size in range(len(raw)):
        with pytest.raises(ProtocolError):
            decode(HeartbeatRequest, version, raw[:size])


def test_records_are_a_view_and_bytes_a_copy() -> None:
    request = ProduceRequest(
        topic_data=[
            ProduceRequest.TopicProduceData(
                name="t", partition_data=[ProduceRequest.PartitionProduceData(index=0, records=b"batch")]
            )
        ]
    )
    raw = bytearray(encode(request, 9))
    records = decode(ProduceRequest, 9, raw)[0].topic_data[0].partition_data[0].records
    assert isinstance(records, memoryview)
    raw[raw.index(b"batch")] = ord("B")
    assert bytes(records) == b"Batch"


def test_records_are_handed_on_uncopied() -> None:
    records = memoryview(bytes(100_000))
    response = FetchResponse(
        responses=[FetchResponse.FetchableTopicResponse(partitions=[FetchResponse.PartitionData(records=records)])]
    )
    parts: list[Buffer] = []
    encode_to(parts.append, response, 12)
    assert any(part is records for part in parts)


def test_invalid_utf8() -> None:
    raw = encode(HeartbeatRequest(group_id="abc"), 0).replace(b"abc", b"a\xffc")
    with pytest.raises(ProtocolError, match="UTF-8"):
        decode(HeartbeatRequest, 0, raw)


@pytest.mark.parametrize(
    "prefix",
    [b"\xff\xff\xff\xff\x0f", b"\x81\x80\x02", b"\x7f", b"\xff\xff\xff\xff\xff\x01"],
    ids=lambda raw: raw.hex(),
)
def test_compact_string_lengths_are_not_trusted(prefix: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(HeartbeatRequest, 4, prefix + b"ab")


def test_a_compact_string_longer_than_32767_is_refused() -> None:
    data = b"x" * 40_000
    with pytest.raises(ProtocolError, match="too long"):
        decode(HeartbeatRequest, 4, primitives.uvarint(40_001) + data)


@pytest.mark.parametrize("count", [-2, 2, 1 << 20, (1 << 31) - 1])
def test_array_counts_are_not_trusted(count: int) -> None:
    decode(MetadataRequest, 1, encode(MetadataRequest(), 1))  # compiling takes memory, once
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="topics"):
            decode(MetadataRequest, 1, struct.pack(">i", count) + b"\0\0\0")
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_compact_array_counts_are_not_trusted() -> None:
    with pytest.raises(ProtocolError, match="topics"):
        decode(MetadataRequest, 9, b"\xff\xff\xff\xff\x0f" + b"\0" * 100)


def test_nested_counts_are_not_trusted() -> None:
    raw = encode(FetchRequest(topics=[FetchRequest.FetchTopic(topic="t")]), 4)
    at = raw.index(b"t") + 1
    with pytest.raises(ProtocolError, match="partitions"):
        decode(FetchRequest, 4, raw[:at] + b"\x7f\xff\xff\xff" + raw[at + 4 :])


def test_a_request_has_a_budget_of_elements() -> None:
    most = primitives.MAX_REQUEST_ELEMENTS
    empty_strings = struct.pack(">i", most + 1) + b"\0\0" * (most + 1)
    with pytest.raises(ProtocolError, match="too many elements"):
        decode(MetadataRequest, 1, empty_strings + b"\1")
    zeros = b"\0\1t" + struct.pack(">i", most) + bytes(4 * most)
    with pytest.raises(ProtocolError, match="too many elements"):
        decode(OffsetFetchRequest, 1, b"\0\1g" + struct.pack(">i", 1) + zeros)
    # The responses that our own client reads have none: a large cluster's metadata is large.
    assert decode(MetadataResponse, 0, encode(MetadataResponse(), 0))[0] == MetadataResponse()


def test_tagged_fields_must_fill_their_size() -> None:
    good = encode(FetchRequest(cluster_id="abc"), 12)
    assert decode(FetchRequest, 12, good)[0].cluster_id == "abc"
    at = good.index(b"\x04abc") - 1
    for wrong in (3, 5):
        bad = bytearray(good + b"x" * 2)
        bad[at] = wrong
        with pytest.raises(ProtocolError):
            decode(FetchRequest, 12, bad)


def test_known_tags_must_rise_too() -> None:
    good = encode(FetchRequest(), 12)
    with pytest.raises(ProtocolError, match="rise"):
        decode(FetchRequest, 12, good[:-1] + b"\x02" + b"\x00\x01\x00" + b"\x00\x01\x00")
    with pytest.raises(ProtocolError, match="tagged fields"):
        decode(FetchRequest, 12, good[:-1] + b"\xff\x01" + b"\x00" * 400)


def test_tags_are_written_only_when_set() -> None:
    base = len(encode(FetchRequest(), 15))
    assert len(encode(FetchRequest(replica_state=FetchRequest.ReplicaState(replica_id=-1)), 15)) == base
    # one tag, its size, two numbers and the structure's own tag section
    assert len(encode(FetchRequest(replica_state=FetchRequest.ReplicaState(replica_id=2)), 15)) == base + 2 + 13


def test_a_field_that_moved_between_versions() -> None:
    old = LeaveGroupRequest(group_id="g", member_id="m")
    assert decode(LeaveGroupRequest, 2, encode(old, 2))[0] == old
    with pytest.raises(ValueError, match="member_id"):
        encode(old, 3)


def test_uuid_arrays() -> None:
    class Ids(Data, versions="0-1", flexible="1+"):
        ids: list[UUID] = array(uuid)

    message = Ids(ids=[UUID(int=1), UUID(int=(1 << 128) - 1)])
    for version in (0, 1):
        raw = encode(message, version)
        assert decode(Ids, version, raw) == (message, len(raw))
        with pytest.raises(ProtocolError):
            decode(Ids, version, raw[:-5])
