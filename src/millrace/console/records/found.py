"""A record as it is kept for a page: cut where it is long, with what was cut told. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from millrace.console.records.rows import HeaderField, Row

LIST_BYTES: Final = 8 * 1024
"""What is kept of a key, of a value, and of all headers together, of a record in a list.

The rest is read by its offset.
"""
MAX_HEADERS: Final = 64
NO_LIMIT: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Found:
    """One record. `key_bytes` and `value_bytes` are the sizes before anything was cut, -1 for a null."""

    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[HeaderField, ...] = ()
    key_bytes: int = -1
    value_bytes: int = -1
    headers_cut: bool = False
    control: str = ""
    """For a control record what it says, such as `commit` or `abort`."""

    @property
    def is_cut(self) -> bool:
        return (
            self.headers_cut
            or (self.key is not None and len(self.key) < self.key_bytes)
            or (self.value is not None and len(self.value) < self.value_bytes)
        )


def found(row: Row, *, limit: int = LIST_BYTES) -> Found:
    """What is kept of the record in `row`; at most `limit` bytes of each part."""
    headers, cut = _cut_headers(row.headers, limit) if row.headers else ((), False)
    key, value = row.key, row.value
    return Found(
        row.partition,
        row.offset,
        row.timestamp_ms,
        key if key is None else key[:limit],
        value if value is None else value[:limit],
        headers,
        -1 if key is None else len(key),
        -1 if value is None else len(value),
        cut,
    )


def _cut_headers(headers: tuple[HeaderField, ...], limit: int) -> tuple[tuple[HeaderField, ...], bool]:
    if limit == NO_LIMIT:
        return headers, False
    kept: list[HeaderField] = []
    room = limit
    for name, value in headers[:MAX_HEADERS]:
        size = len(name) + len(value or b"")
        if size > room:
            kept.append(HeaderField(name[:room], None if value is None else value[: max(room - len(name), 0)]))
            return tuple(kept), True
        kept.append(HeaderField(name, value))
        room -= size
    return tuple(kept), len(headers) > MAX_HEADERS
