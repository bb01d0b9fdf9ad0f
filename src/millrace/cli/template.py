"""The `--format` of `consume`: a template compiled once, then bytes in and bytes out for each record.

Fields are `{topic} {partition} {offset} {timestamp} {timestamp_ms} {key} {value} {headers}`; `{{` and `}}` are
braces, and `\\n \\t \\r \\0 \\\\` are what they are in most languages. Keys and values are pasted as they are, never
decoded, so binary data survives. A missing key or value is pasted as nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from string import Formatter
from typing import Final, NamedTuple

from millrace.admin.times import iso_utc
from millrace.cli.output import CommandError

_ESCAPE: Final = re.compile(r"\\([ntr0\\])")
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\"}


class ReceivedRecord(NamedTuple):
    """One record as it came from a partition."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int | None
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


def _timestamp(record: ReceivedRecord) -> bytes:
    return b"" if record.timestamp_ms is None else iso_utc(record.timestamp_ms).encode()


def _headers(record: ReceivedRecord) -> bytes:
    return b",".join(name.encode() + b"=" + (value or b"") for name, value in record.headers)


_FIELDS: Final[dict[str, Callable[[ReceivedRecord], bytes]]] = {
    "topic": lambda record: record.topic.encode(),
    "partition": lambda record: b"%d" % record.partition,
    "offset": lambda record: b"%d" % record.offset,
    "timestamp": _timestamp,
    "timestamp_ms": lambda record: b"" if record.timestamp_ms is None else b"%d" % record.timestamp_ms,
    "key": lambda record: record.key or b"",
    "value": lambda record: record.value or b"",
    "headers": _headers,
}


def unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: _ESCAPES[match[1]], text)


def compile_template(template: str) -> Callable[[ReceivedRecord], bytes]:
    """A function from record to bytes; a `CommandError` names what the template gets wrong."""
    parts: list[bytes | Callable[[ReceivedRecord], bytes]] = []
    try:
        pieces = list(Formatter().parse(unescape(template)))
    except ValueError as error:
        raise CommandError(f"--format '{template}': {error}", exit_code=2) from None
    for literal, field, spec, conversion in pieces:
        if literal:
            parts.append(literal.encode())
        if field is None:
            continue
        if field not in _FIELDS or spec or conversion:
            raise CommandError(
                f"--format '{template}': no field '{{{field}}}'; the fields are {', '.join(_FIELDS)}", exit_code=2
            )
        parts.append(_FIELDS[field])

    def render(record: ReceivedRecord) -> bytes:
        return b"".join(part if isinstance(part, bytes) else part(record) for part in parts)

    return render
