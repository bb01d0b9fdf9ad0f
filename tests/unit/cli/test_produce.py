"""Lines into records; what happens to them later is tested with a broker in tests/clients/test_command_line.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millrace.cli.jsonrecords import OutgoingRecord
from millrace.cli.lines import LineReader
from millrace.cli.output import CommandError

PLAIN = LineReader(
    is_json=False, key=None, key_separator=None, null=None, headers=(), timestamp_ms=None, partition=None
)


def test_a_line_is_a_value_byte_for_byte() -> None:
    assert PLAIN.record(b"\xff\r") == OutgoingRecord(key=None, value=b"\xff\r")


def test_key_and_value_are_split_once() -> None:
    reader = replace(PLAIN, key_separator=b":")
    assert reader.record(b"k:v:w") == OutgoingRecord(key=b"k", value=b"v:w")
    assert reader.record(b":") == OutgoingRecord(key=b"", value=b"")
    with pytest.raises(CommandError, match="no key separator"):
        reader.record(b"none here")


def test_the_null_text_is_a_tombstone() -> None:
    reader = replace(PLAIN, key_separator=b":", null=b"NULL")
    assert reader.record(b"k:NULL").value is None
    assert reader.record(b"k:NULLS").value == b"NULLS"


def test_options_apply_to_every_record() -> None:
    reader = replace(PLAIN, key=b"k", headers=(("h", b"1"),), timestamp_ms=5, partition=2)
    assert reader.record(b"v") == OutgoingRecord(b"k", b"v", (("h", b"1"),), 5, 2)


def test_json_lines_win_for_keys_and_options_for_the_rest() -> None:
    reader = replace(PLAIN, is_json=True, key=b"default", headers=(("all", b"1"),), partition=1)
    record = reader.record(b'{"key": "own", "value": "v", "headers": {"mine": "2"}, "partition": 9, "timestamp": 7}')
    assert record == OutgoingRecord(b"own", b"v", (("mine", b"2"), ("all", b"1")), 7, 1)
    assert reader.record(b'{"value": "v"}').key == b"default"
