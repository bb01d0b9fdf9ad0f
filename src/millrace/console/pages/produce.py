"""Records that a person writes: one in a form, or several as JSON lines."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Final

from starlette.responses import Response

from millrace.clock import SystemClock
from millrace.console.pages.records import settings_of
from millrace.console.pages.topic import found_topic
from millrace.console.records.decoders import is_readable
from millrace.console.records.found import Found
from millrace.console.records.producing import (
    InputError,
    Outgoing,
    Typed,
    Written,
    bytes_of,
    parse_headers,
    parse_lines,
    produce,
)
from millrace.console.records.reading import read_one
from millrace.console.records.times import parse_time_ms
from millrace.console.roles import Role
from millrace.console.web import BadInput, Page, page
from millrace.console.wording import plural, segment
from millrace.errors import ApiError

EMPTY: Final = {
    "key": "",
    "key_typed": "text",
    "value": "",
    "value_typed": "text",
    "headers": "",
    "partition": "",
    "timestamp": "",
    "lines": "",
}


@page("/topics/{topic}/produce")
def produce_form(page: Page) -> Response:
    """The form; with `from=PARTITION:OFFSET` filled with a record that is there."""
    if not page.asked("from"):
        return _form(page, EMPTY)
    record = _asked_for(page)
    return _form(page, {**EMPTY, **_copied(record)}, remark=_lost(record))


@page("/topics/{topic}/produce", methods=["POST"])
def produce_records(page: Page) -> Response:
    name = page.path["topic"]
    given = {field: page.field(field, default) for field, default in EMPTY.items()}
    try:
        several = bool(page.field("several"))
        records = parse_lines(given["lines"]) if several else [_one(given)]
        written = produce(settings_of(page.access), name, records)
    except (InputError, ApiError) as error:
        return _form(page, given, error=str(error) if isinstance(error, InputError) else error.message or str(error))
    if len(written) > 1:
        places = ", ".join(sorted({f"{each.partition}" for each in written}, key=int)[:20])
        return page.go(
            f"/topics/{segment(name)}/records", good=f"Sent {plural(len(written), 'record')} to partitions {places}"
        )
    return page.go(_place(written[0]), good=f"Sent: partition {written[0].partition}, offset {written[0].offset}")


def _one(given: dict[str, str]) -> Outgoing:
    partition = given["partition"].strip()
    if partition and not (partition.isascii() and partition.isdigit() and len(partition) < 10):
        raise InputError(f"a partition is a number, not '{partition[:50]}'")
    return Outgoing(
        bytes_of(given["key"], _typed(given["key_typed"]), "key"),
        bytes_of(given["value"].replace("\r\n", "\n"), _typed(given["value_typed"]), "value"),
        parse_headers(given["headers"]),
        int(partition) if partition else None,
        _time(given["timestamp"]),
    )


def _typed(name: str) -> Typed:
    try:
        return Typed(name)
    except ValueError:
        raise InputError(f"'{name[:50]}' is no way to write bytes; there are {', '.join(Typed)}") from None


def _time(text: str) -> int | None:
    if not text.strip():
        return None
    try:
        return parse_time_ms(text, now_ms=SystemClock().wall_ms())
    except ValueError as error:
        raise InputError(str(error)) from None


def _form(page: Page, given: Mapping[str, str], *, error: str = "", remark: str = "") -> Response:
    name = page.path["topic"]
    return page.render(
        "produce.html",
        status=400 if error else 200,
        tab="produce",
        name=name,
        row=found_topic(page, name),
        given=given,
        typed=list(Typed),
        error=error,
        remark=remark,
        allowed=page.may(Role.OPERATOR),
    )


def _asked_for(page: Page) -> Found:
    partition, _, offset = page.asked("from").partition(":")
    if not (partition.isascii() and partition.isdigit() and offset.isascii() and offset.isdigit()):
        raise BadInput("a record to begin with is named as from=PARTITION:OFFSET")
    found = read_one(settings_of(page.access), page.path["topic"], int(partition), int(offset[:18]))
    if found is None:
        raise BadInput(f"there is no record at offset {offset} of partition {partition} any more")
    return found


def _copied(record: Found) -> dict[str, str]:
    """A record as it would be typed."""
    key_typed, key = _as_typed(record.key)
    value_typed, value = _as_typed(record.value)
    return {
        "key": key,
        "key_typed": key_typed,
        "value": value,
        "value_typed": value_typed,
        "headers": "\n".join(_header_line(name, content) for name, content in record.headers),
    }


def _lost(record: Found) -> str:
    """What a form cannot carry, for people to know before they send it."""
    try:
        typed = parse_headers(_copied(record)["headers"])
    except InputError:
        typed = ()
    if typed == record.headers:
        return ""
    return "Some headers of this record cannot be typed as they are: Send again, on its own page, copies it exactly."


def _as_typed(data: bytes | None) -> tuple[str, str]:
    if data is None:
        return Typed.NULL, ""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return Typed.BASE64, base64.b64encode(data).decode()
    # A browser sends every line end in its own way: only text without a carriage return comes back as it was.
    if not is_readable(text) or "\r" in text:
        return Typed.BASE64, base64.b64encode(data).decode()
    return Typed.TEXT, text


def _header_line(name: str, value: bytes | None) -> str:
    shown = name.encode(errors="surrogateescape").decode(errors="replace")
    return shown if value is None else f"{shown}: {value.decode(errors='replace')}"


def _place(written: Written) -> str:
    return f"/topics/{segment(written.topic)}/records/{written.partition}/{written.offset}"
