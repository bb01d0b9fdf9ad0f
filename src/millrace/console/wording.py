"""How values are put for people: sizes, counts, times, and errors with what to do about them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote

from millrace.admin.errors import AdminError, Unreachable
from millrace.admin.words import size_text
from millrace.errors import ApiError, ErrorCode

_GONE: Final = {ErrorCode.NETWORK_EXCEPTION, ErrorCode.REQUEST_TIMED_OUT, ErrorCode.BROKER_NOT_AVAILABLE}
_MISSING: Final = {
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ErrorCode.UNKNOWN_TOPIC_ID,
    ErrorCode.GROUP_ID_NOT_FOUND,
    ErrorCode.RESOURCE_NOT_FOUND,
}
_FORBIDDEN: Final = {
    ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
    ErrorCode.GROUP_AUTHORIZATION_FAILED,
    ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    ErrorCode.DELEGATION_TOKEN_AUTHORIZATION_FAILED,
}


def size(number: float | None) -> str:
    """`1536` as `1.5 kB`; a dash for what is not known."""
    if number is None or number < 0:
        return "-"
    return size_text(number)


def count(number: float | None) -> str:
    """`1234567` as `1,234,567`."""
    if number is None:
        return "-"
    return f"{number:,.0f}" if number == int(number) or abs(number) >= 100 else f"{number:,.1f}"


def plural(number: int, noun: str, nouns: str = "") -> str:
    """`1 topic`, `2 topics`."""
    return f"{number:,} {noun if number == 1 else nouns or f'{noun}s'}"


def moment(ms: int | None) -> str:
    """A time in UTC, to the millisecond; the browser shows it in its own zone (`data-time`)."""
    if ms is None or ms < 0:
        return "-"
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"


def duration(seconds: float | None) -> str:
    """`90` as `1 min 30 s`: two units at the most."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.1f} s".replace(".0 ", " ")
    whole = int(seconds)
    for name, unit, smaller_name, smaller in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= unit:
            rest = whole % unit // smaller
            return f"{whole // unit} {name}" + (f" {rest} {smaller_name}" if rest else "")
    return f"{whole} s"


def segment(text: object) -> str:
    """A part of an address: a topic may be called anything that Kafka allows, a group anything at all."""
    return quote(str(text), safe="")


def explain(error: ApiError) -> tuple[int, str]:
    """The status and the words for what a cluster answered, or did not."""
    text = error.message or error.code.name
    if error.code in _GONE:
        return 503, f"The cluster does not answer: {text}"
    if error.code in _MISSING:
        return 404, text
    if error.code in _FORBIDDEN:
        return 403, f"The brokers do not allow this: {text} ({error.code.name})"
    return 502, f"The cluster refused: {text} ({error.code.name})" if error.message else f"The cluster refused: {text}"


def explain_admin(error: AdminError) -> tuple[int, str]:
    """The same for what was seen to be impossible before the cluster was asked, or to nobody's being there."""
    if isinstance(error, Unreachable):
        return 503, f"The cluster does not answer: {error.reason}"
    return 400, error.reason


FILTERS: Final[Mapping[str, Callable[..., Any]]] = {
    "size": size,
    "count": count,
    "plural": plural,
    "moment": moment,
    "duration": duration,
    "segment": segment,
}
