"""The language of filters: what it means, what it says of mistakes, and that passing over bytes never loses a match."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.console.records.decoders import Format
from millrace.console.records.filters import FilterError, Formats, parse
from millrace.console.records.rows import Row, rows_of
from millrace.groups.offsets.committed import CommittedOffset
from millrace.groups.offsets.records import offset_key, offset_value
from millrace.records.decode import Header, Record, records_section
from millrace.records.encode import encode_batch

NOW_MS = 1_700_000_000_000
ORDER = json.dumps(
    {
        "user": {"id": 42, "name": "Ada"},
        "tags": ["new", 7],
        "paid": True,
        "note": None,
        "odd name": "x",
        "items": [{"sku": "s-1"}],
    }
).encode()


def row_of(
    value: bytes | None = ORDER,
    key: bytes | None = b"order-7",
    headers: tuple[Header, ...] = (Header("trace", b"abc"), Header("trace", None), Header("empty", b"")),
    topic: str = "orders",
    value_format: Format = Format.AUTO,
) -> Row:
    batch = encode_batch([Record(1000, NOW_MS, key, value, headers)])
    header, data = records_section(batch)
    row = Row(topic, 3, Format.AUTO, value_format)
    assert len(list(rows_of(row, header, data))) == 1
    return row


@pytest.mark.parametrize(
    "text",
    [
        "",
        '"Ada"',
        '"order"',
        '"trace"',
        '"abc"',
        'hex"61 62 63"',
        'key == "order-7"',
        "key = 'order-7'",
        'key != "order-8"',
        'key < "order-8"',
        'key contains "der"',
        "key contains 7",
        'key contains hex"6f72"',
        'key matches "^order-[0-9]$"',
        'value matches "(?i)ADA"',
        "value exists",
        "value.user.id == 42",
        "value.user.id == 42.0",
        "value.user.id > 41.5 and value.user.id <= 42",
        "value.user.id != 43",
        'value.user.id != "42"',
        'value.user.name == "Ada"',
        'value.user.name contains "d"',
        'value.user.name matches "^A"',
        'value["user"]["name"] == "Ada"',
        'value["odd name"] == "x"',
        'value.items[0].sku == "s-1"',
        'value.items[-1].sku == "s-1"',
        "value.items[0] exists",
        "not value.items[1] exists",
        'value.tags contains "new"',
        "value.tags contains 7",
        'value.user contains "id"',
        "value.paid == true",
        "value.note == null",
        "value.nothing == null",
        "value.user != null",
        "value.note exists and not value.nothing exists",
        'header.trace == "abc"',
        'header["trace"] contains "b"',
        'header.trace matches "^a"',
        "header.trace exists",
        "header.trace == null",
        "header.other == null",
        'header.other != "x"',
        "headers exists",
        'headers contains "emp"',
        'headers matches "^ab"',
        "offset == 1000 and partition == 3 and size > 7",
        f"timestamp >= {NOW_MS}",
        'timestamp >= "2023-11-14T22:13:20Z" and timestamp < "2023-11-14T22:13:20.001"',
        'timestamp > "1h ago" and timestamp <= "now"',
        'key == "x" or (value.user.id == 42 and not key == "y")',
        "key == null or value != null",
    ],
)
def test_these_match(text: str) -> None:
    assert parse(text, now_ms=NOW_MS).matches(row_of())
    assert text == "" or not parse(f"not ({text})", now_ms=NOW_MS).matches(row_of())


@pytest.mark.parametrize(
    "text",
    [
        '"nowhere"',
        'key == "order"',
        "key == null",
        'value.user.id == "42"',
        "value.user.id < true",
        "value.paid == 1",
        "value.user.id.more == 1",
        "value.tags.x == 1",
        'value.tags contains "7"',
        "value == 42",
        'header.empty == "abc"',
        "header.other exists",
        'header.Trace == "abc"',
        "offset > 1000",
    ],
)
def test_these_do_not(text: str) -> None:
    assert not parse(text, now_ms=NOW_MS).matches(row_of())


def test_tombstones_and_plain_numbers() -> None:
    tombstone = row_of(value=None, key=None, headers=())
    assert parse("value == null and key == null").matches(tombstone)
    for never in (
        'value contains "a"',
        'value matches ""',
        "value.a exists",
        "value exists",
        'value == ""',
        "headers exists",
    ):
        assert not parse(never).matches(tombstone)
    assert parse('value != "a"').matches(tombstone)
    assert parse("value == 42 and value < 43").matches(row_of(value=b" 42"))
    assert parse("value == null").matches(row_of(value=None))
    assert not parse("value == null").matches(row_of(value=b"null"))


def test_fields_of_other_formats() -> None:
    packed = row_of(value=b"\x81\xa2id\x05", value_format=Format.MSGPACK)
    assert parse("value.id == 5", Formats("orders", value=Format.MSGPACK)).matches(packed)
    commit = row_of(
        value=offset_value(CommittedOffset(42)), key=offset_key("billing", "orders", 3), topic="__consumer_offsets"
    )
    wanted = parse('key.group_id == "billing" and value.offset == 42', Formats("__consumer_offsets"))
    assert wanted.matches(commit)
    assert wanted.needles == ()  # names of fields are not in the bytes
    assert not parse("value.a == 1").matches(row_of(value=b"{" * 5000))
    assert not parse("value.a == 1").matches(row_of(value=b"\xff"))


@pytest.mark.parametrize(
    ("text", "position", "says"),
    [
        ("foo", 0, "'foo' is no field"),
        ('key == "a', 7, "no closing quote"),
        ("key ==", 6, "expected a text, a number"),
        ("key == abc", 7, 'a text stands in quotes: "abc"'),
        ("key", 3, "expected one of =="),
        ('key == "a" "b"', 11, "expected 'and', 'or' or the end"),
        ('(key == "a"', 11, "a closing bracket is missing"),
        ("value. == 1", 7, "after a dot comes a name"),
        ("value[x] == 1", 6, "in brackets stands"),
        ('value["x" == 1', 10, "a closing ] is missing"),
        ('value matches "("', 14, "RE2"),
        ("value matches 5", 14, "regular expression in quotes"),
        ('hex"0g"', 0, "pairs of hex digits"),
        ('value.a == hex"00"', 11, "bytes are looked for in the whole"),
        ("value.a < null", 10, "null is compared with == or !="),
        ("key > null", 6, "null is compared with == or !="),
        ("value contains null", 15, "contains wants"),
        ('offset == "x"', 10, "offset is compared with a number"),
        ("offset contains 1", 16, "offset is a number"),
        ('timestamp > "soon"', 12, "is no time"),
        ("header == 1", 7, "which header?"),
        ('headers == "x"', 11, "headers are asked with"),
        ('key == "a" and', 14, "the filter ends where"),
        ("key == 1 && value == 2", 9, "means nothing here"),
        ("(" * 100 + '"a"', 64, "nested too deeply"),
        ("x" * 5000, 4096, "longer than"),
    ],
)
def test_mistakes_are_told_with_their_place(text: str, position: int, says: str) -> None:
    with pytest.raises(FilterError) as raised:
        parse(text)
    assert raised.value.position == position
    assert says in str(raised.value)


@given(st.text(alphabet="keyvalu.hdrs[]()\"'\\ =!<>0123andorx", max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_text_is_a_filter_or_an_error(text: str) -> None:
    places = [0]
    try:
        parse(text).matches(row_of())
    except FilterError as error:
        places.append(error.position)
    assert all(0 <= place <= len(text) for place in places)


def test_needles_are_what_a_match_must_have() -> None:
    assert parse('"a"').needles == ((b"a",),)
    assert parse('key == "ab" and value contains "abc"').needles == ((b"ab",), (b"abc",))
    assert parse('key == "ab" or value contains "abc"').needles == ((b"ab", b"abc"),)
    assert parse('not key == "ab"').needles == ()
    assert parse('key != "ab"').needles == ()
    assert parse('key == "ab" or offset > 1').needles == ()
    assert parse("value.user.id == 42").needles == ((b"user", b"\\u"), (b"id", b"\\u"))
    assert parse('value.a == "x/y"').needles == ((b"a", b"\\u"), (b"x/y", b"\\"))
    assert parse("value.user == null").needles == ()
    assert parse("header.trace == null").needles == ()


def test_needles_are_narrowed_by_what_is_there() -> None:
    wanted = parse('(key == "ab" or key == "abc") and "x"')
    assert wanted.needle_in(b"-ab-x") == b"ab"
    assert wanted.needle_in(b"-abc-x") == b"x"  # either of them could be it
    assert wanted.needle_in(b"-ab-") is None
    assert parse("").needle_in(b"anything") == b""


PIECES = ['"ab"', 'key == "ab"', 'value contains "b"', 'value.a == "ab"', "value.a exists", "value.a == null",
          "value.b != 1", 'header.ab == "a"', "header.a exists", 'header.a == null', 'headers contains "a"',
          'value matches "a"', "value.a.b == 5"]  # fmt: skip


@given(
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=3),
    st.sampled_from([" and ", " or ", " and not "]),
    st.sampled_from(
        [None, b"ab", b"x", b'{"a":"ab"}', b'{"\\u0061":"\\u0061b"}', b'{"a":{"b":5}}', b"", '{"a":"ä"}'.encode()]
    ),
    st.sampled_from([None, b"ab", b"zzz"]),
    st.sampled_from([(), (Header("ab", b"a"),), (Header("a", None),)]),
)
@settings(max_examples=150, deadline=None)
def test_a_record_without_the_needles_never_matches(
    parts: list[str], joint: str, value: bytes | None, key: bytes | None, headers: tuple[Header, ...]
) -> None:
    wanted = parse(joint.join(parts))
    row = row_of(value, key, headers)
    _, data = records_section(encode_batch([Record(1000, NOW_MS, key, value, headers)]))
    if wanted.matches(row):
        needle = wanted.needle_in(data)
        assert needle is not None
        assert needle in data
