"""Records as JSON lines: what consume prints, produce reads back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.cli.jsonrecords import bytes_from_json, bytes_to_json, record_from_json, record_to_json
from millrace.cli.output import CommandError

OPTIONAL_BYTES = st.none() | st.binary(max_size=20) | st.text(max_size=10).map(str.encode)


@given(
    key=OPTIONAL_BYTES,
    value=OPTIONAL_BYTES,
    headers=st.lists(st.tuples(st.text(max_size=5), OPTIONAL_BYTES), max_size=3),
    timestamp_ms=st.integers(0, 2**62),
    partition=st.integers(0, 2**31 - 1),
)
def test_round_trip(
    key: bytes | None,
    value: bytes | None,
    headers: list[tuple[str, bytes | None]],
    timestamp_ms: int,
    partition: int,
) -> None:
    line = record_to_json(
        topic="t", partition=partition, offset=5, timestamp_ms=timestamp_ms, key=key, value=value, headers=headers
    )
    assert "\n" not in line
    record = record_from_json(line.encode())
    assert (record.key, record.value, list(record.headers)) == (key, value, headers)
    assert (record.timestamp_ms, record.partition) == (timestamp_ms, partition)


def test_values_that_are_json_themselves_are_sent_as_text() -> None:
    assert record_from_json(b'{"value": {"a": [1, true]}}').value == b'{"a":[1,true]}'
    assert record_from_json(b'{"value": 7}').value == b"7"
    assert record_from_json('{"value": ["ü"]}'.encode()).value == '["ü"]'.encode()


def test_headers_may_be_an_object() -> None:
    record = record_from_json(b'{"value": null, "headers": {"a": "1", "b": null}}')
    assert record.value is None
    assert record.headers == (("a", b"1"), ("b", None))


def test_bytes_that_are_no_text_are_base64() -> None:
    assert bytes_to_json(b"\xff\x00") == {"base64": "/wA="}
    assert bytes_from_json({"base64": "/wA="}) == b"\xff\x00"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"plain", "not JSON"),
        (b'"\xff"', "not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"key": "k"}', "no 'value'"),
        (b'{"value": "v", "vaule": 1}', "unknown field 'vaule'"),
        (b'{"value": "v", "partition": "1"}', "'partition'"),
        (b'{"value": "v", "partition": true}', "'partition'"),
        (b'{"value": "v", "timestamp": -1}', "'timestamp'"),
        (b'{"value": "v", "headers": [["a"]]}', "'headers'"),
        (b'{"value": "v", "headers": 3}', "'headers'"),
        (b'{"value": {"base64": "?"}}', "base64"),
    ],
)
def test_a_wrong_line_says_why(line: bytes, reason: str) -> None:
    with pytest.raises(CommandError, match=reason):
        record_from_json(line)


def test_output_keeps_letters_readable() -> None:
    line = record_to_json(topic="t", partition=0, offset=0, timestamp_ms=None, key=None, value="ü".encode(), headers=[])
    assert '"ü"' in line
    assert json.loads(line)["timestamp"] is None
