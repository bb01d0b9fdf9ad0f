"""Offsets of a group in a file: the CSV of kafka-consumer-groups (`topic,partition,offset`), so that files can be
swapped with it, or JSON. Pure: text in, offsets out.

Kafka's tool writes no head, quotes some names, and puts the group in front (`group,topic,partition,offset`) when it
exports several; all of that can be read. Not here: what becomes of the offsets (`cli.groups`).
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from millrace.cli.output import CommandError
from millrace.model import TopicPartition

_FIELDS: Final = ("topic", "partition", "offset")
_WITH_GROUP: Final = ("group", *_FIELDS)


def csv_text(offsets: Mapping[TopicPartition, int]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows((*place, offset) for place, offset in sorted(offsets.items()))
    return text.getvalue()


def as_json(group: str, offsets: Mapping[TopicPartition, int]) -> dict[str, Any]:
    rows = [dict(zip(_FIELDS, (*place, offset), strict=True)) for place, offset in sorted(offsets.items())]
    return {"group": group, "offsets": rows}


def read_offsets(text: str, group: str) -> dict[TopicPartition, int]:
    """What the file says of this group, or of any if it names none. CommandError for what cannot be understood."""
    offsets: dict[TopicPartition, int] = {}
    for where, row in _json_rows(text) if text.lstrip().startswith(("{", "[")) else _csv_rows(text):
        if row.get("group", group) != group:
            continue
        topic, partition, offset = (row.get(field) for field in _FIELDS)
        if not isinstance(topic, str) or not topic:
            raise CommandError(f"{where}: no topic")
        place = TopicPartition(topic, _whole(partition, where, "partition"))
        if place in offsets:
            raise CommandError(f"{where}: {place} a second time")
        offsets[place] = _whole(offset, where, "offset")
    if not offsets:
        raise CommandError(f"there is no offset of group '{group}' in the file")
    return offsets


def _csv_rows(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    lines = csv.reader(io.StringIO(text))
    try:
        for row in lines:
            where = f"line {lines.line_num}"
            if not any(cell.strip() for cell in row):
                continue
            if len(row) not in (len(_FIELDS), len(_WITH_GROUP)):
                raise CommandError(f"{where}: not topic,partition,offset")
            fields = _FIELDS if len(row) == len(_FIELDS) else _WITH_GROUP
            if tuple(cell.strip().lower() for cell in row) != fields:
                yield where, dict(zip(fields, (cell.strip() for cell in row), strict=True))
    except csv.Error as error:
        raise CommandError(f"line {lines.line_num}: {error}") from None


def _json_rows(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise CommandError(f"not JSON: {error}") from None
    rows = document.get("offsets") if isinstance(document, dict) else document
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise CommandError(
            'the JSON is not {"group": ..., "offsets": [{"topic": ..., "partition": ..., "offset": ...}]}'
        )
    for number, row in enumerate(rows, start=1):
        yield f"offset {number}", row


def _whole(value: object, where: str, field: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and value.isdecimal() and value.isascii():
        return int(value)
    raise CommandError(f"{where}: '{value}' is no {field}")
