"""What a form or an address says: times, places, partitions, and what continues where."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.admin.times import iso_utc
from millrace.console.records.plan import Continuation, Span, StartKind
from millrace.console.records.producing import InputError, Typed, bytes_of, parse_lines
from millrace.console.records.queries import Query, partitions, scan_request
from millrace.console.records.times import parse_time_ms

NOW_MS = 1_700_000_000_000


@pytest.mark.parametrize(
    ("text", "time_ms"),
    [
        ("now", NOW_MS),
        ("1h ago", NOW_MS - 3_600_000),
        (" 1.5 hours ago ", NOW_MS - 5_400_000),
        ("1700000000123", 1_700_000_000_123),
        ("2023-11-14T22:13:20.001Z", NOW_MS + 1),
        ("2023-11-14T23:13:20+01:00", NOW_MS),
        ("2023-11-14T22:13:20", NOW_MS),
        ("2023-11-14", 1_699_920_000_000),
    ],
)
def test_times(text: str, time_ms: int) -> None:
    assert parse_time_ms(text, now_ms=NOW_MS) == time_ms


@pytest.mark.parametrize("text", ["", "soon", "1x ago", "2023-13-01", "9" * 30, "ago"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="is no time"):
        parse_time_ms(text, now_ms=NOW_MS)


def test_times_as_they_are_written() -> None:
    assert iso_utc(NOW_MS + 1) == "2023-11-14T22:13:20.001Z"
    assert iso_utc(-1) == ""
    assert iso_utc(1 << 60) == str(1 << 60)


def test_partitions() -> None:
    assert partitions(" ") is None
    assert partitions("3, 0-2,2") == (0, 1, 2, 3)
    for text in ("x", "1-", "5-2", "0-999999", "1,,2", "-1"):
        with pytest.raises(ValueError, match="partitions"):
            partitions(text)


def test_what_is_up_to_where() -> None:
    request = scan_request("t", Query(start="offset", at="-5", until="100"), now_ms=NOW_MS)
    assert (request.start.kind, request.start.offset, request.until_offset) == (StartKind.OFFSET, -5, 100)
    request = scan_request("t", Query(start="time", at="1h ago", until="now"), now_ms=NOW_MS)
    assert (request.start.time_ms, request.until_offset, request.until_time_ms) == (NOW_MS - 3_600_000, None, NOW_MS)
    assert scan_request("t", Query(until=str(NOW_MS)), now_ms=0).until_time_ms == NOW_MS


@given(st.dictionaries(st.sampled_from(Query.__slots__), st.text(max_size=8)))
@settings(max_examples=60, deadline=None)
def test_any_address_is_a_query_or_told_why_not(given_values: dict[str, str]) -> None:
    query = Query.of(given_values)
    assert Query.of(query.values) == query
    try:
        scan_request("t", query, now_ms=NOW_MS)
    except ValueError as error:
        text = str(error)
        assert text


@given(st.booleans(), st.dictionaries(st.integers(0, 9999), st.tuples(st.integers(0, 2**62), st.integers(0, 2**62))))
@settings(max_examples=40, deadline=None)
def test_a_place_to_go_on_from_is_read_as_it_was_written(backwards: bool, spans: dict[int, tuple[int, int]]) -> None:
    place = Continuation(backwards, {partition: Span(*span) for partition, span in spans.items()})
    assert Continuation.parse(str(place)) == place


def test_bytes_as_they_are_typed() -> None:
    assert bytes_of("ä", Typed.TEXT) == "ä".encode()
    assert bytes_of("00 FF\n01", Typed.HEX) == b"\x00\xff\x01"
    assert bytes_of("AP8\n=", Typed.BASE64) == b"\x00\xff"
    assert bytes_of(' {"a": 1.10}', Typed.JSON) == b' {"a": 1.10}'
    assert bytes_of("whatever", Typed.NULL) is None
    with pytest.raises(InputError, match="half a character"):
        bytes_of("\ud800", Typed.TEXT)


def test_lines_as_a_download_has_them() -> None:
    first, second = parse_lines(
        '{"topic": "t", "partition": 1, "offset": 5, "timestamp": 7, "key": {"base64": "AP8="}, "value": [1, "ä"],'
        ' "headers": [["h", null]]}\n\n{"value": null, "headers": {"a": "b"}}'
    )
    assert (first.key, first.value, first.headers) == (b"\x00\xff", '[1,"ä"]'.encode(), (("h", None),))
    assert (first.partition, first.timestamp_ms) == (1, 7)
    assert (second.key, second.value, second.headers, second.partition) == (None, None, (("a", b"b"),), None)
