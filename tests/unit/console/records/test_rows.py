"""The walk over the records of a batch: the same records as the ordinary decoder, with or without passing over some."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.console.records.found import found
from millrace.console.records.rows import Row, rows_of
from millrace.errors import ApiError
from millrace.records.batch import TimestampType
from millrace.records.decode import Header, Record, decode_records, records_section
from millrace.records.encode import encode_batch

FIELDS = st.none() | st.binary(max_size=20) | st.binary(min_size=60, max_size=300)
RECORDS = st.lists(
    st.builds(
        Record,
        st.just(0),
        st.integers(0, 1 << 40),
        FIELDS,
        FIELDS,
        st.lists(st.builds(Header, st.text(max_size=5), st.none() | st.binary(max_size=5)), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=20,
)


def walked(batch: bytes, needle: bytes = b"") -> list[Record]:
    header, data = records_section(batch)
    row = Row("t", 0)
    return [
        Record(row.offset, row.timestamp_ms, row.key, row.value, tuple(Header(*each) for each in row.headers))
        for _ in rows_of(row, header, data, needle)
    ]


@given(RECORDS, st.sampled_from(TimestampType), st.binary(min_size=1, max_size=2))
@settings(max_examples=50, deadline=None)
def test_the_walk_finds_what_the_decoder_finds(records: list[Record], kind: TimestampType, needle: bytes) -> None:
    placed = [
        Record(number * 3, each.timestamp_ms, each.key, each.value, each.headers) for number, each in enumerate(records)
    ]
    batch = encode_batch(placed, timestamp_type=kind)
    expected = decode_records(batch)
    assert walked(batch) == expected
    with_needle = walked(batch, needle)
    certain = [
        each
        for each in expected
        if any(needle in (part or b"") for part in (each.key, each.value, *(header.value for header in each.headers)))
    ]
    assert [each for each in with_needle if each in certain] == certain
    assert [each for each in expected if each in with_needle] == with_needle


@given(RECORDS, st.data())
@settings(max_examples=60, deadline=None)
def test_damage_is_one_kind_of_error(records: list[Record], data: st.DataObject) -> None:
    header, section = records_section(encode_batch(records))
    damaged = bytearray(section)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    row = Row("t", 0)
    try:
        for _ in rows_of(row, header, damaged):
            found(row)
    except ApiError:
        pass


def test_names_of_headers_need_not_be_text() -> None:
    header, section = records_section(encode_batch([Record(0, 0, b"k", b"v", (Header("ab", b"x"),))]))
    row = Row("t", 0)
    for _ in rows_of(row, header, bytes(section).replace(b"ab", b"\xff\xfe")):
        assert row.headers[0].name.encode(errors="surrogateescape") == b"\xff\xfe"


def test_long_parts_are_cut_and_the_sizes_told() -> None:
    header, section = records_section(
        encode_batch([Record(0, 0, None, b"v" * 100, tuple(Header(f"h{number}", b"x" * 8) for number in range(9)))])
    )
    row = Row("t", 0)
    for _ in rows_of(row, header, section):
        kept = found(row, limit=50)
    assert (kept.key, kept.key_bytes, kept.value, kept.value_bytes, kept.is_cut) == (None, -1, b"v" * 50, 100, True)
    assert kept.headers_cut and len(kept.headers) == 6
    whole = found(row, limit=1000)
    assert not whole.is_cut and len(whole.headers) == 9


def test_records_that_do_not_fit_are_refused() -> None:
    header, section = records_section(encode_batch([Record(0, 0, b"k", b"v")]))
    with pytest.raises(ApiError):
        list(rows_of(Row("t", 0), header, section[:-3]))
