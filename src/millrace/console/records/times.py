"""Points in time as people type them, and as pages show them. Pure: `now` is an argument."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

_UNIT_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_AGO: Final = re.compile(r"\s*(\d{1,12}(?:\.\d{1,6})?)\s*(ms|s|m|h|d|w)[a-z]*\s+ago\s*\Z", re.IGNORECASE)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def parse_time_ms(text: str, *, now_ms: int) -> int:
    """Milliseconds since 1970 from `now`, `1h ago`, milliseconds, or ISO 8601 (UTC unless it names a zone).

    ValueError.
    """
    if text.strip().lower() == "now":
        return now_ms
    if re.fullmatch(r"\s*\d{1,18}\s*", text):
        return int(text)
    ago = _AGO.match(text)
    if ago:
        return now_ms - round(float(ago[1]) * _UNIT_MS[ago[2].lower()])
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(
            f"'{text}' is no time: write 2026-05-01T12:00, milliseconds since 1970, 'now' or '1h ago'"
        ) from None
    aware = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    return (aware - _EPOCH) // timedelta(milliseconds=1)


def iso_utc(timestamp_ms: int) -> str:
    """`1700000000123` as `2023-11-14T22:13:20.123Z`; nothing for no time, the number for one outside the calendar."""
    if timestamp_ms == -1:
        return ""
    try:
        moment = _EPOCH + timedelta(milliseconds=timestamp_ms)
    except OverflowError:
        return str(timestamp_ms)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
