"""Decoders: what is found by looking, what was chosen, and that no bytes at all raise or grow."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.console.records import avro, msgpack, protobuf
from millrace.console.records.decoders import Format, Side, Subject, decode, hex_dump, indented, structure_of
from millrace.console.records.limits import MAX_DEPTH, MAX_TEXT, Undecodable
from millrace.groups.classic.records import group_key
from millrace.groups.offsets.committed import CommittedOffset
from millrace.groups.offsets.records import offset_key, offset_value
from millrace.transactions.records import entry
from millrace.transactions.state import Transaction, TransactionState


def shown(data: bytes | None, chosen: Format = Format.AUTO, **fields: Any) -> Any:
    return decode(Subject(data, **fields), chosen)


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        (None, "null", ""),
        (b"", "empty", ""),
        (b"hello\tyou\n", "text", "hello\tyou\n"),
        ("grüße 🎈".encode(), "text", "grüße 🎈"),
        (b"42", "text", "42"),
        (
            b'{"a": [1, 2.50, {}], "b": "\\u00e9"}',
            "JSON",
            '{\n  "a": [\n    1,\n    2.50,\n    {}\n  ],\n  "b": "\\u00e9"\n}',
        ),
        (b"{not json", "text", "{not json"),
        (struct.pack(">q", 42), "64-bit integer", "42"),
        (struct.pack(">i", -7), "32-bit integer", "-7"),
        (b"\x82\xa1a\x01\xa1b\xc3", "MessagePack", '{\n  "a": 1,\n  "b": true\n}'),
        (b"\x08\x96\x01\x12\x07testing", "Protobuf", '{\n  "1": 150,\n  "2": "testing"\n}'),
        (b'\x00\x00\x00\x00\x07{"a":1}', "JSON, schema 7", '{\n  "a": 1\n}'),
    ],
)
def test_the_format_is_found_by_looking(data: bytes | None, kind: str, text: str) -> None:
    decoded = shown(data)
    assert (decoded.kind, decoded.text, decoded.truncated) == (kind, text, False)


def test_bytes_of_no_format_are_a_hex_dump() -> None:
    decoded = shown(b"\xff\xfe<script>\x00\x01")
    assert decoded.kind == "bytes"
    assert decoded.text == "00000000  ff fe 3c 73 63 72 69 70  74 3e 00 01              ..<script>.."
    assert hex_dump(bytes(17)).splitlines()[1].startswith("00000010  00")


def test_a_framed_value_without_a_registry_names_the_schema() -> None:
    decoded = shown(b"\x00\x00\x00\x01\x05\x02\x84\xff\xfe\x99\xaa")
    assert decoded.kind == "schema 261"
    assert "261" in decoded.remark
    assert decoded.text.startswith("00000000  00 00 00 01 05")


def test_a_framed_value_is_read_by_the_schema_of_a_registry() -> None:
    schema = json.dumps({"type": "record", "name": "R", "fields": [{"name": "n", "type": "long"}]})
    decoded = decode(Subject(b"\x00\x00\x00\x00\x05\xac\x02"), schema_by_id={5: schema}.get)
    assert (decoded.kind, decoded.structure) == ("Avro, schema 5", {"n": 150})


def test_what_was_chosen_is_used_or_the_reason_is_told() -> None:
    assert shown(b"hello", Format.HEX).text.endswith("hello")
    assert shown(b"\xffa", Format.TEXT).text == "\ufffda"
    refused = shown(b"hello", Format.JSON)
    assert refused.kind == "bytes" and refused.remark.startswith("not json: ")
    assert shown(b"\x01\x02\x03", Format.INTEGER).remark.startswith("not integer: an integer has")
    assert shown(b"abc", Format.INTERNAL).remark == "not internal: not a record of an internal topic"
    assert shown(b"\x05", Format.MSGPACK).structure == 5


def test_a_beginning_is_shown_as_one() -> None:
    decoded = shown("é".encode()[:1] * 0 + "aé".encode()[:2], size_bytes=100)
    assert (decoded.kind, decoded.text, decoded.truncated) == ("text", "a", True)
    assert shown(b'{"a": 1', size_bytes=100).kind == "text"
    assert shown(b"\xff" * 10, size_bytes=100).truncated
    assert shown(b"\xff" * 10, Format.MSGPACK, size_bytes=100).remark == "not msgpack: only its beginning is here"


def test_text_is_bounded() -> None:
    decoded = shown(b"x" * (MAX_TEXT + 1))
    assert len(decoded.text) == MAX_TEXT and decoded.truncated
    deep = b"[" * 900 + b"]" * 900
    assert len(shown(deep * 1).text) <= MAX_TEXT
    assert len(shown(b"[" + b",".join([b"[[[[1]]]]"] * 50_000) + b"]").text) <= MAX_TEXT


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
@settings(max_examples=30, deadline=None)
def test_indenting_changes_nothing_but_space(value: Any) -> None:
    compact = json.dumps(value)
    assert json.loads(indented(compact)) == value
    if isinstance(value, (dict, list)) and value:
        assert indented(compact) == json.dumps(value, indent=2)


# Internal topics.


def test_a_committed_offset_is_read() -> None:
    key, value = offset_key("billing", "orders", 3), offset_value(CommittedOffset(42, commit_timestamp_ms=1))
    topic = "__consumer_offsets"
    assert shown(key, topic=topic, side=Side.KEY, other=value).structure == {
        "kind": "Offset",
        "group_id": "billing",
        "topic": "orders",
        "partition": 3,
    }
    structure = shown(value, topic=topic, other=key).structure
    assert structure["offset"] == 42
    assert "record_offset" not in structure
    assert structure_of(Subject(value, topic, Side.VALUE, key), Format.AUTO)["offset"] == 42
    removed = shown(None, topic=topic, other=key)
    assert removed.kind == "null" and "tombstone" in removed.remark


def test_other_internal_records_are_read() -> None:
    assert shown(group_key("g"), topic="__consumer_offsets", side=Side.KEY).structure["group_id"] == "g"
    key, value = entry(
        "tx-1", Transaction(producer_id=7, producer_epoch=1, timeout_ms=60_000, state=TransactionState.ONGOING)
    )
    assert shown(key, topic="__transaction_state", side=Side.KEY, other=value).structure == {"transactional_id": "tx-1"}
    assert shown(value, topic="__transaction_state", other=key).structure["state"] == "ONGOING"
    unknown = shown(b"\x7f\x00rest", topic="__consumer_offsets", side=Side.KEY, other=b"x")
    assert unknown.structure == {"kind": 0x7F00}


# Formats.


def test_avro_containers_bring_their_schema() -> None:
    schema = {
        "type": "record",
        "name": "a.Order",
        "fields": [
            {"name": "id", "type": "int"},
            {"name": "tags", "type": {"type": "array", "items": "string"}},
            {"name": "next", "type": ["null", "Order"]},
            {"name": "kind", "type": {"type": "enum", "name": "K", "symbols": ["A", "B"]}},
            {"name": "raw", "type": {"type": "fixed", "name": "F", "size": 2}},
            {"name": "more", "type": {"type": "map", "values": "double"}},
        ],
    }
    inner = b"\x04\x00\x00\x02\x00\x01\x00"
    value = (
        b"\x02\x04\x02x\x02y\x00\x02" + inner + b"\x00" + b"\xab\xcd" + b"\x02\x02k" + struct.pack("<d", 1.5) + b"\x00"
    )
    for codec, block in (("null", value), ("deflate", zlib.compress(value)[2:-4])):
        data = container(json.dumps(schema).encode(), codec.encode(), 1, block)
        decoded = shown(data)
        assert decoded.kind == "Avro container"
        assert decoded.structure["values"] == [
            {
                "id": 1,
                "tags": ["x", "y"],
                "next": {"id": 2, "tags": [], "next": None, "kind": "B", "raw": {"hex": "0001"}, "more": {}},
                "kind": "A",
                "raw": {"hex": "abcd"},
                "more": {"k": 1.5},
            }
        ]


def container(schema: bytes, codec: bytes, count: int, block: bytes) -> bytes:
    def long(number: int) -> bytes:
        number <<= 1
        parts = bytearray()
        while number > 0x7F:
            parts.append(number & 0x7F | 0x80)
            number >>= 7
        return bytes([*parts, number])

    def text(data: bytes) -> bytes:
        return long(len(data)) + data

    sync = b"s" * 16
    described = long(2) + text(b"avro.schema") + text(schema) + text(b"avro.codec") + text(codec) + long(0)
    return avro.CONTAINER_MAGIC + described + sync + long(count) + long(len(block)) + block + sync


def test_avro_items_without_bytes_are_bounded() -> None:
    with pytest.raises(Undecodable, match="too many items"):
        avro.decode('{"type": "array", "items": "null"}', b"\xfe\xff\xff\xff\x0f\x00")
    with pytest.raises(Undecodable, match="too many items"):
        avro.decode_container(container(b'"null"', b"null", 1 << 40, b""))


def test_msgpack_values() -> None:
    data = b"\x87" + b"\xa1i\xd3" + struct.pack(">q", -5) + b"\xa1f\xcb" + struct.pack(">d", 0.5)
    data += b"\xa1n\xc0\xa1b\xc4\x02\x00\xff\xa1l\x92\x01\xff\x05\xa1x\xa1t\xd6\xff" + struct.pack(">I", 1)
    assert msgpack.decode(data) == {
        "i": -5,
        "f": 0.5,
        "n": None,
        "b": {"hex": "00ff"},
        "l": [1, -1],
        "5": "x",
        "t": "1970-01-01T00:00:01+00:00",
    }
    for damaged in (
        b"\x92\x01",
        b"\xdd\xff\xff\xff\xff",
        b"\xc1",
        b"\x01\x01",
        b"\x91" * (MAX_DEPTH + 2) + b"\x01",
        b"\x81\x90\x01",
    ):
        with pytest.raises(Undecodable):
            msgpack.decode(damaged)


def test_protobuf_without_a_schema() -> None:
    assert protobuf.decode(
        b"\x0d" + struct.pack("<f", 1.5) + b"\x12\x02\xff\xfe\x12\x01a\x1a\x02\x08\x05\x23\x08\x01\x24"
    ) == {
        "1": {"fixed32": 0x3FC00000, "float": 1.5},
        "2": [{"hex": "fffe"}, "a"],
        "3": {"1": 5},
        "4": {"1": 1},
    }
    for damaged in (b"\x08", b"\x00\x01", b"\x24", b"\x12\x05a", b"\x08" + b"\xff" * 11, b"\x23\x08\x01", b"\x0e"):
        with pytest.raises(Undecodable):
            protobuf.decode(damaged)


TOPICS = ["orders", "__consumer_offsets", "__transaction_state", "__share_group_state", "__audit_log"]


@given(
    data=st.none() | st.binary(max_size=200),
    other=st.none() | st.binary(max_size=50),
    topic=st.sampled_from(TOPICS),
    side=st.sampled_from(Side),
    chosen=st.sampled_from(Format),
    more=st.integers(0, 3),
)
@settings(max_examples=200, deadline=None)
def test_no_bytes_raise(
    data: bytes | None, other: bytes | None, topic: str, side: Side, chosen: Format, more: int
) -> None:
    subject = Subject(data, topic, side, other, -1 if data is None else len(data) + more)
    decoded = decode(subject, chosen, schema_by_id=lambda _id: '["null", "string", {"type": "array", "items": "int"}]')
    assert len(decoded.text) <= MAX_TEXT
    decoded.text.encode()
    structure_of(subject, chosen)


@given(
    st.sampled_from([b"\x00\x01\x00\x07", b"\x00\x00\x00\x03", b"\x00\x03\x00\x02"]),
    st.binary(max_size=60),
    st.binary(max_size=80),
)
@settings(max_examples=200, deadline=None)
def test_no_internal_record_raises(start: bytes, key: bytes, value: bytes) -> None:
    for topic in TOPICS:
        for side in Side:
            data, other = (start + key, value) if side is Side.KEY else (value, start + key)
            decode(Subject(data, topic, side, other))


@given(st.binary(max_size=120))
@settings(max_examples=200, deadline=None)
def test_no_container_raises_anything_else(data: bytes) -> None:
    for start in (avro.CONTAINER_MAGIC, avro.CONTAINER_MAGIC + b'\x02\x16avro.schema\x0c"long"\x00' + b"s" * 16):
        try:
            avro.decode_container(start + data)
        except Undecodable:
            pass
