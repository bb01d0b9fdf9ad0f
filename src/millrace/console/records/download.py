"""The matches of a scan as a file: JSON lines, CSV, or the values alone, piece by piece as they are found.

Values are whole, and never more of them in memory than a batch has. Whoever iterates is the scan's thread; to close the
iterator cancels it.
"""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Callable, Generator
from dataclasses import replace
from enum import StrEnum
from typing import Any, Final

from millrace.admin.times import iso_utc
from millrace.client.settings import ClientSettings
from millrace.console.records.filters import Formats, parse
from millrace.console.records.found import NO_LIMIT, Found
from millrace.console.records.plan import Continuation, Limits, ScanRequest, Span
from millrace.console.records.scan import Scan, State

MAX_NEWEST: Final = 100_000
"""How many records can be downloaded from the end of a topic: where they begin is found first, and kept."""
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
_COLUMNS: Final = ("partition", "offset", "timestamp", "time", "key", "value", "headers")


class FileFormat(StrEnum):
    """What a download is. The value is what a request names."""

    JSON_LINES = "jsonl"
    CSV = "csv"
    VALUES = "values"

    @property
    def media_type(self) -> str:
        return {
            "jsonl": "application/x-ndjson",
            "csv": "text/csv; charset=utf-8",
            "values": "application/octet-stream",
        }[self.value]

    @property
    def suffix(self) -> str:
        return {"jsonl": ".jsonl", "csv": ".csv", "values": ".txt"}[self.value]


class DownloadFailed(Exception):
    """The scan behind a download ended before its end: what was sent so far is not all."""


def download(settings: ClientSettings, request: ScanRequest, file_format: FileFormat) -> Generator[bytes, None, None]:
    """The pieces of the file. FilterError at once; DownloadFailed when it breaks off, with the scan's reason."""
    formats = Formats(request.topic, request.key_format, request.value_format)
    parse(request.filter_text, formats)  # before anything is sent: an error cannot be told in the middle of a file
    return _pieces(settings, request, file_format)


def _pieces(settings: ClientSettings, request: ScanRequest, file_format: FileFormat) -> Generator[bytes, None, None]:
    encode = _ENCODERS[file_format]
    if file_format is FileFormat.CSV:
        yield (",".join(_COLUMNS) + "\r\n").encode()
    if request.backwards:
        request = _forwards(settings, request)
    parts: list[bytes] = []
    scan = Scan(settings, request, take=lambda match: parts.append(encode(request.topic, match)), cut=NO_LIMIT)
    for _ in scan.steps():
        if parts:
            yield b"".join(parts)
            parts.clear()
    if parts:
        yield b"".join(parts)
    _check(scan)


def _forwards(settings: ClientSettings, request: ScanRequest) -> ScanRequest:
    """The same matches as offsets to be read forwards: where the newest ones begin in each partition."""
    wanted = MAX_NEWEST if request.limits.matches is None else min(request.limits.matches, MAX_NEWEST)
    scan = Scan(settings, replace(request, limits=replace(request.limits, matches=wanted)), cut=0)
    scan.run()
    _check(scan)
    spans: dict[int, Span] = {}
    for match in scan.matches:
        low, high = spans.get(match.partition, Span(match.offset, match.offset))
        spans[match.partition] = Span(min(low, match.offset), max(high, match.offset + 1))
    limits = Limits(matches=None, records=None, size_bytes=None, seconds=None)
    return replace(request, continuation=Continuation(backwards=False, spans=spans), limits=limits)


def _check(scan: Scan) -> None:
    if scan.progress.state not in {State.DONE, State.PAGE}:
        raise DownloadFailed(scan.progress.error or f"the scan was {scan.progress.state}")


def _json_line(topic: str, match: Found) -> bytes:
    """As `millrace consume --json` prints it and `millrace produce --json` reads it."""
    record: dict[str, Any] = {
        "topic": topic,
        "partition": match.partition,
        "offset": match.offset,
        "timestamp": match.timestamp_ms,
        "key": as_json(match.key),
        "value": as_json(match.value),
        "headers": [[_shown(name), as_json(value)] for name, value in match.headers],
    }
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def as_json(data: bytes | None) -> str | dict[str, str] | None:
    """Text as text, other bytes as `{"base64": "..."}`."""
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _csv_line(_topic: str, match: Found) -> bytes:
    headers = json.dumps([[_shown(name), as_json(value)] for name, value in match.headers], ensure_ascii=False)
    line = io.StringIO()
    csv.writer(line).writerow(
        (
            match.partition,
            match.offset,
            match.timestamp_ms,
            iso_utc(match.timestamp_ms),
            _cell(match.key),
            _cell(match.value),
            headers if match.headers else "",
        )
    )
    return line.getvalue().encode(errors="backslashreplace")


def _cell(data: bytes | None) -> str:
    """Text, or base64; what a spreadsheet would take for a formula gets an apostrophe in front."""
    if data is None:
        return ""
    shown = as_json(data)
    text = shown if isinstance(shown, str) else base64.b64encode(data).decode()
    return f"'{text}" if text.startswith(_FORMULA) else text


def _shown(name: str) -> str:
    return name.encode(errors="surrogateescape").decode(errors="replace")


def _value_line(_topic: str, match: Found) -> bytes:
    return b"" if match.value is None else match.value + b"\n"


_ENCODERS: Final[dict[FileFormat, Callable[[str, Found], bytes]]] = {
    FileFormat.JSON_LINES: _json_line,
    FileFormat.CSV: _csv_line,
    FileFormat.VALUES: _value_line,
}


def incomplete(file_format: FileFormat, reason: str) -> bytes:
    """The last line of a file that breaks off."""
    text = f"this file is not complete: {reason}"
    if file_format is FileFormat.JSON_LINES:
        return json.dumps({"error": text}, ensure_ascii=False).encode() + b"\n"
    if file_format is FileFormat.CSV:
        line = io.StringIO()
        csv.writer(line).writerow(("error", text))
        return line.getvalue().encode()
    return text.encode() + b"\n"
