from __future__ import annotations

import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import ProtocolError
from millrace.wire import primitives


@settings(deadline=None, max_examples=200)
@given(st.integers(0, (1 << 32) - 1))
def test_uvarint_round_trip(value: int) -> None:
    raw = primitives.uvarint(value)
    assert primitives.read_uvarint(b"x" + raw + b"y", 1) == (value, 1 + len(raw))


@settings(deadline=None, max_examples=200)
@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_varlong_round_trip(value: int) -> None:
    raw = primitives.varint(value)
    assert len(raw) <= 10
    assert primitives.read_varlong(raw, 0) == (value, len(raw))


@settings(deadline=None, max_examples=100)
@given(st.integers(-(1 << 31), (1 << 31) - 1))
def test_varint_round_trip(value: int) -> None:
    raw = primitives.varint(value)
    assert len(raw) <= 5
    assert primitives.read_varint(raw, 0) == (value, len(raw))


@pytest.mark.parametrize(
    ("value", "raw"),
    [(0, b"\0"), (127, b"\x7f"), (128, b"\x80\x01"), (300, b"\xac\x02"), (0xFFFFFFFF, b"\xff" * 4 + b"\x0f")],
)
def test_uvarint_bytes(value: int, raw: bytes) -> None:
    assert primitives.uvarint(value) == raw
    assert primitives.read_uvarint(raw, 0) == (value, len(raw))


def test_overlong_zero_is_accepted_within_five_bytes() -> None:
    assert primitives.read_uvarint(b"\x80\x80\x80\x80\x00", 0) == (0, 5)


@pytest.mark.parametrize("raw", [b"\x80" * 5 + b"\x00", b"\xff" * 4 + b"\x1f", b"\xff" * 20])
def test_uvarint_beyond_32_bits_is_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        primitives.read_uvarint(raw, 0)


@pytest.mark.parametrize("raw", [b"\x80" * 10 + b"\x00", b"\xff" * 9 + b"\x7f"])
def test_uvarlong_beyond_64_bits_is_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        primitives.read_uvarlong(raw, 0)


def test_negative_uvarint_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        primitives.uvarint(-1)


def test_compact_lengths() -> None:
    assert primitives.compact_length(0) == b"\x01"
    assert primitives.compact_length(126) == b"\x7f"
    assert primitives.compact_length(127) == b"\x80\x01"
    assert primitives.compact_length(1_000_000) == primitives.uvarint(1_000_001)
    assert primitives.compact_string_length(300) == primitives.uvarint(301)
    with pytest.raises(ValueError, match="longer"):
        primitives.compact_string_length(32_768)


def test_uuids_are_kept_but_not_without_bound() -> None:
    raw = uuid.uuid4().bytes
    assert primitives.uuid_of(raw) is primitives.uuid_of(raw)
    for number in range(primitives._UUID_CACHE_ENTRIES + 10):
        assert primitives.uuid_of(number.to_bytes(16, "big")).int == number
    assert len(primitives._uuids) <= primitives._UUID_CACHE_ENTRIES


def test_tags_are_skipped() -> None:
    section = primitives.tagged_section([(0, b"abc"), (5, b""), (200, b"x" * 200)])
    assert primitives.skip_tags(section + b"rest", 0, len(section) + 4) == len(section)


@pytest.mark.parametrize("tags", [[(1, b""), (1, b"")], [(2, b""), (1, b"")]], ids=["duplicate", "unsorted"])
def test_tags_must_rise(tags: list[tuple[int, bytes]]) -> None:
    section = primitives.tagged_section(tags)
    with pytest.raises(ProtocolError, match="rise"):
        primitives.skip_tags(section, 0, len(section))


def test_a_tag_flood_is_refused_at_once() -> None:
    with pytest.raises(ProtocolError, match="tagged fields"):
        primitives.skip_tags(primitives.uvarint(20_000_000), 0, 4)
    limit = primitives.MAX_TAGGED_FIELDS
    section = primitives.tagged_section([(tag, b"") for tag in range(limit)])
    assert primitives.skip_tags(section, 0, len(section)) == len(section)
    section = primitives.tagged_section([(tag, b"") for tag in range(limit + 1)])
    with pytest.raises(ProtocolError, match="tagged fields"):
        primitives.skip_tags(section, 0, len(section))


def test_a_tag_that_declares_too_much_is_refused() -> None:
    with pytest.raises(ProtocolError, match="declares"):
        primitives.skip_tags(b"\x01\x00\x05abcd", 0, 7)
