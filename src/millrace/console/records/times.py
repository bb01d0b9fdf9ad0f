"""Points in time as people type them into a page: of UTC unless they name a zone, since theirs is not known here."""

from __future__ import annotations

from datetime import UTC

from millrace.admin import times
from millrace.admin.errors import AdminError


def parse_time_ms(text: str, *, now_ms: int) -> int:
    """Milliseconds since 1970 from `now`, `1h ago`, milliseconds, or ISO 8601; ValueError."""
    try:
        return times.parse_time_ms(text, now_ms=now_ms, zone=UTC)
    except AdminError as error:
        raise ValueError(error.reason) from None
