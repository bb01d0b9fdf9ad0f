"""Times as people type them."""

from __future__ import annotations

import pytest

from millrace.admin.errors import AdminError
from millrace.admin.times import duration_text, iso_utc, parse_duration_ms, parse_time_ms

NOW_MS = 1_700_000_000_000


@pytest.mark.parametrize(
    ("text", "expected_ms"),
    [
        ("now", NOW_MS),
        ("0", 0),
        ("1700000000123", 1_700_000_000_123),
        ("1h ago", NOW_MS - 3_600_000),
        ("1.5h ago", NOW_MS - 5_400_000),
        ("10 minutes ago", NOW_MS - 600_000),
        ("250ms ago", NOW_MS - 250),
        ("2 Days ago", NOW_MS - 172_800_000),
        ("1w ago", NOW_MS - 604_800_000),
        ("2023-11-14T22:13:20Z", NOW_MS),
        ("2023-11-14 22:13:20.250+00:00", NOW_MS + 250),
        ("2023-11-14T23:13:20+01:00", NOW_MS),
    ],
)
def test_parses(text: str, expected_ms: int) -> None:
    assert parse_time_ms(text, now_ms=NOW_MS) == expected_ms


@pytest.mark.parametrize("text", ["", "yesterday", "1h", "ago", "-5", "1x ago", "2023-13-01"])
def test_refuses(text: str) -> None:
    with pytest.raises(AdminError, match="is no time") as caught:
        parse_time_ms(text, now_ms=NOW_MS)
    assert caught.value.mistake


def test_prints_utc_with_milliseconds() -> None:
    assert iso_utc(NOW_MS + 7) == "2023-11-14T22:13:20.007Z"
    assert parse_time_ms(iso_utc(NOW_MS + 7), now_ms=0) == NOW_MS + 7


@pytest.mark.parametrize(
    ("text", "expected_ms"), [("250ms", 250), ("90s", 90_000), ("1.5h", 5_400_000), (" 2 days ", 172_800_000)]
)
def test_durations(text: str, expected_ms: int) -> None:
    assert parse_duration_ms(text) == expected_ms


@pytest.mark.parametrize("text", ["", "soon", "15", "-1m", "1h ago"])
def test_no_durations(text: str) -> None:
    with pytest.raises(AdminError, match="is no duration"):
        parse_duration_ms(text)


@pytest.mark.parametrize(
    ("duration_ms", "expected"),
    [
        (-5, "0s"),
        (4_500, "4.5s"),
        (60_000, "1m"),
        (61_000, "1m 1s"),
        (3_600_000, "1h"),
        (3_605_000, "1h"),
        (93_784_000, "1d 2h"),
    ],
)
def test_durations_in_words(duration_ms: int, expected: str) -> None:
    assert duration_text(duration_ms) == expected
