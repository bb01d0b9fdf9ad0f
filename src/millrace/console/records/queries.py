"""From what a form or an address says to what a scan, a tail or a record to be sent is. Pure.

Everything here raises ValueError (FilterError and InputError are such) with a text for people.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from millrace.console.records.decoders import Format
from millrace.console.records.plan import DEFAULT_PAGE, MAX_PAGE, Limits, ScanRequest, Start, StartKind
from millrace.console.records.tail import TailRequest
from millrace.console.records.times import parse_time_ms

LIVE: Final = "live"
STARTS: Final = {
    "newest": "the newest",
    "beginning": "the beginning",
    "offset": "an offset",
    "time": "a time",
    LIVE: "now on, live",
}
_MAX_PARTITIONS: Final = 100_000
_RANGE: Final = re.compile(r"(\d{1,6})(?:\s*-\s*(\d{1,6}))?\Z")
_OFFSET: Final = re.compile(r"-?\d{1,18}\Z")
FORGET: Final = ("scan", "after")
"""What an address says of one scan that is under way or was, and not of what is asked."""


@dataclass(frozen=True, slots=True)
class Query:
    """What was asked, as it was typed: a page shows it again in its form."""

    start: str = "newest"
    at: str = ""
    until: str = ""
    partition: str = ""
    filter: str = ""
    key: str = "auto"
    value: str = "auto"
    isolation: str = "committed"
    control: str = ""
    rows: str = str(DEFAULT_PAGE)

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Query:
        """From the values of an address; what is not there is as by default."""
        return replace(cls(), **{name: given[name] for name in cls.__slots__ if given.get(name, "") != ""})

    @property
    def values(self) -> dict[str, str]:
        """For an address: what differs from the default."""
        default = Query()
        return {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) != getattr(default, name)}

    @property
    def is_live(self) -> bool:
        return self.start == LIVE


def key_format(query: Query) -> Format:
    return _format(query.key)


def value_format(query: Query) -> Format:
    return _format(query.value)


def scan_request(topic: str, query: Query, *, now_ms: int) -> ScanRequest:
    """The scan that is asked for; the filter is read when it begins."""
    until_offset, until_time_ms = _until(query.until, now_ms)
    return ScanRequest(
        topic=topic,
        start=_start(query, now_ms),
        partitions=partitions(query.partition),
        until_offset=until_offset,
        until_time_ms=until_time_ms,
        filter_text=query.filter,
        key_format=key_format(query),
        value_format=value_format(query),
        read_committed=query.isolation != "uncommitted",
        include_control=bool(query.control),
        limits=Limits(matches=_rows(query.rows)),
    )


def tail_request(topic: str, query: Query) -> TailRequest:
    return TailRequest(
        topic=topic,
        partitions=partitions(query.partition),
        filter_text=query.filter,
        key_format=key_format(query),
        value_format=value_format(query),
        read_committed=query.isolation != "uncommitted",
    )


def partitions(text: str) -> tuple[int, ...] | None:
    """`0, 3-5` as numbers; None, all of them, for nothing."""
    if not text.strip():
        return None
    chosen: set[int] = set()
    for part in text.split(","):
        found = _RANGE.match(part.strip())
        if found is None:
            raise ValueError(f"partitions are numbers and ranges such as 0,3-5, not '{part.strip()[:50]}'")
        first, last = int(found[1]), int(found[2] or found[1])
        if last - first >= _MAX_PARTITIONS or last < first:
            raise ValueError(f"'{part.strip()}' is no range of partitions")
        chosen.update(range(first, last + 1))
    return tuple(sorted(chosen))


def _start(query: Query, now_ms: int) -> Start:
    at = query.at.strip()
    if query.start not in STARTS or query.start == LIVE:
        raise ValueError(f"a scan starts at one of {', '.join(each.value for each in StartKind)}")
    kind = StartKind(query.start)
    if kind is StartKind.OFFSET:
        if not _OFFSET.match(at):
            raise ValueError(f"which offset? a number, or -10 for the last ten of each partition, not '{at[:50]}'")
        return Start(kind, offset=int(at))
    if kind is StartKind.TIME:
        return Start(kind, time_ms=parse_time_ms(at, now_ms=now_ms))
    return Start(kind)


def _until(text: str, now_ms: int) -> tuple[int | None, int | None]:
    """An offset if it is a number, a time otherwise; thirteen digits are milliseconds."""
    text = text.strip()
    if not text:
        return None, None
    if text.isascii() and text.isdigit() and len(text) < 13:
        return int(text), None
    return None, parse_time_ms(text, now_ms=now_ms)


def _rows(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MAX_PAGE):
        raise ValueError(f"a page has 1 to {MAX_PAGE} records, not '{text[:50]}'")
    return int(text)


def _format(name: str) -> Format:
    try:
        return Format(name)
    except ValueError:
        raise ValueError(f"'{name[:50]}' is no format; there are {', '.join(Format)}") from None
