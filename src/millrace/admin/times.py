"""Points in time as people type them, and as commands print them. Pure: `now` is an argument."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Final

from millrace.admin.errors import AdminError

_UNIT_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_DURATION: Final = r"\s*(\d{1,12}(?:\.\d{1,6})?)\s*(ms|s|m|h|d|w)[a-z]*"
_AGO: Final = re.compile(_DURATION + r"\s+ago\s*\Z", re.IGNORECASE)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LASTING: Final = re.compile(_DURATION + r"\s*\Z", re.IGNORECASE)


def parse_time_ms(text: str, *, now_ms: int, zone: tzinfo | None = None) -> int:
    """Milliseconds since 1970 from `now`, `1h ago`, milliseconds, or ISO 8601.

    A time that names no zone is one of `zone`, or of this machine's.
    """
    if text.strip().lower() == "now":
        return now_ms
    if re.fullmatch(r"\s*\d{1,18}\s*", text):
        return int(text)
    ago = _AGO.match(text)
    if ago:
        return now_ms - _duration_ms(ago)
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise AdminError(
            f"'{text}' is no time: use 2026-05-01T12:00, milliseconds since 1970, 'now' or '1h ago'", mistake=True
        ) from None
    aware = moment.replace(tzinfo=zone) if moment.tzinfo is None and zone is not None else moment.astimezone()
    return (aware - _EPOCH) // timedelta(milliseconds=1)


def parse_duration_ms(text: str) -> int:
    """Milliseconds from `90s`, `15m` or `2 hours`."""
    lasting = _LASTING.match(text)
    if lasting is None:
        raise AdminError(f"'{text}' is no duration: use 500ms, 90s, 15m, 2h or 1d", mistake=True)
    return _duration_ms(lasting)


def _duration_ms(found: re.Match[str]) -> int:
    return round(float(found[1]) * _UNIT_MS[found[2].lower()])


def duration_text(duration_ms: int) -> str:
    """`93784000` as `1d 2h`, `4500` as `4.5s`, `60000` as `1m`: not more than two units."""
    if duration_ms < 60_000:
        return f"{max(duration_ms, 0) / 1000:.3g}s"
    parts: list[str] = []
    for unit in ("d", "h", "m", "s"):
        count, duration_ms = divmod(duration_ms, _UNIT_MS[unit])
        parts.append(f"{count}{unit}" if count else "")
    largest = next(index for index, part in enumerate(parts) if part)
    return " ".join(filter(None, parts[largest : largest + 2]))


def iso_utc(timestamp_ms: int) -> str:
    """`1700000000123` as `2023-11-14T22:13:20.123Z`; nothing for no time, the number for one outside the calendar."""
    if timestamp_ms == -1:
        return ""
    try:
        moment = _EPOCH + timedelta(milliseconds=timestamp_ms)
    except OverflowError:
        return str(timestamp_ms)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
