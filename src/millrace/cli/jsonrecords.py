"""Records as JSON lines, the same shape in `consume --json` and `produce --json`, so that one can be piped into the
other.

A record is `{"topic", "partition", "offset", "timestamp", "key", "value", "headers"}`. Bytes that are UTF-8 are a
string, a missing key or a tombstone is null, other bytes are `{"base64": "..."}`. Headers are a list of `[name,
value]`, because names may repeat; an object is accepted too. On input only `value` matters; a value that is itself an
object, list, number or boolean is sent as compact JSON text. `topic` and `offset` are ignored on input.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Any

from millrace.cli.output import CommandError


@dataclass(frozen=True, slots=True)
class OutgoingRecord:
    """What a line asks to be produced. None for partition and timestamp leaves the choice to the client."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int | None = None
    partition: int | None = None


def bytes_to_json(data: bytes | None) -> str | dict[str, str] | None:
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def bytes_from_json(value: Any) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and value.keys() == {"base64"} and isinstance(value["base64"], str):
        try:
            return base64.b64decode(value["base64"], validate=True)
        except binascii.Error:
            raise CommandError("'base64' does not hold base64") from None
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def record_to_json(
    *,
    topic: str,
    partition: int,
    offset: int,
    timestamp_ms: int | None,
    key: bytes | None,
    value: bytes | None,
    headers: list[tuple[str, bytes | None]],
) -> str:
    return json.dumps(
        {
            "topic": topic,
            "partition": partition,
            "offset": offset,
            "timestamp": timestamp_ms,
            "key": bytes_to_json(key),
            "value": bytes_to_json(value),
            "headers": [[name, bytes_to_json(content)] for name, content in headers],
        },
        ensure_ascii=False,
    )


def record_from_json(line: bytes) -> OutgoingRecord:
    """The record of one line; a `CommandError` says what is wrong with it."""
    try:
        fields = json.loads(line)
    except ValueError as error:  # UnicodeDecodeError is one
        raise CommandError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise CommandError("not a JSON object")
    unknown = fields.keys() - {"topic", "partition", "offset", "timestamp", "key", "value", "headers"}
    if unknown:
        raise CommandError(f"unknown field '{min(unknown)}'")
    if "value" not in fields:
        raise CommandError("no 'value' (null makes a tombstone)")
    return OutgoingRecord(
        key=bytes_from_json(fields.get("key")),
        value=bytes_from_json(fields["value"]),
        headers=_headers_from_json(fields.get("headers")),
        timestamp_ms=_optional_int(fields, "timestamp"),
        partition=_optional_int(fields, "partition"),
    )


def _optional_int(fields: dict[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CommandError(f"'{name}' wants a whole number, not {value!r}")
    return value


def _headers_from_json(value: Any) -> tuple[tuple[str, bytes | None], ...]:
    if value is None:
        return ()
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list) or not all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs
    ):
        raise CommandError("'headers' wants an object or a list of [name, value]")
    return tuple((name, bytes_from_json(content)) for name, content in pairs)
