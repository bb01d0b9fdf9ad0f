"""The --format of consume."""

from __future__ import annotations

import pytest

from millrace.cli.output import CommandError
from millrace.cli.template import ReceivedRecord, compile_template

RECORD = ReceivedRecord("orders", 3, 42, 1_700_000_000_000, b"k\xff", b"v\x00", [("a", b"1"), ("b", None)])
BARE = ReceivedRecord("orders", 0, 0, None, None, None, [])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{value}", b"v\x00"),
        ("{key}\\t{value}", b"k\xff\tv\x00"),
        ("{topic}-{partition}@{offset}", b"orders-3@42"),
        ("{timestamp} {timestamp_ms}", b"2023-11-14T22:13:20.000Z 1700000000000"),
        ("{headers}", b"a=1,b="),
        ("{{{offset}}}", b"{42}"),
        ("\\\\n", b"\\n"),
        ("", b""),
        ("é", "é".encode()),
    ],
)
def test_renders_bytes_as_they_are(template: str, expected: bytes) -> None:
    assert compile_template(template)(RECORD) == expected


def test_what_is_missing_is_pasted_as_nothing() -> None:
    render = compile_template("[{key}|{value}|{timestamp}|{timestamp_ms}|{headers}]")
    assert render(BARE) == b"[||||]"


@pytest.mark.parametrize("template", ["{nothing}", "{}", "{value", "}", "{value!r}", "{offset:05}", "{value.x}"])
def test_a_wrong_template_is_named(template: str) -> None:
    with pytest.raises(CommandError, match="--format"):
        compile_template(template)
