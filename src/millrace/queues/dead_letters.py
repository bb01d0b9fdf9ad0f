"""Dead letters: what is written to a dead-letter topic, and which topic may be one (KIP-1191). Pure.

A letter has six headers that say where its record came from, which group gave it up, and why; with
`errors.deadletterqueue.copy.record.enable` also the record's key, value and own headers. Letters of a partition lie in
the dead-letter partition whose number is its own modulo their count, in the order of their offsets.

What is not here: writing them (`dead_letter_office`), when a record becomes one (`acquisition`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from millrace.queues.acquisition import DeadLetter
from millrace.queues.records import ShareKey
from millrace.queues.settings import DeadLetterSettings
from millrace.records.decode import Header, Record
from millrace.records.encode import encode_batch

TAKES_DEAD_LETTERS: Final = "errors.deadletterqueue.group.enable"
"""The setting by which a topic takes dead letters at all."""
_PREFIX: Final = "__dlq.errors."
_MAX_RECORDS: Final = 500
"""Letters in one batch: encoding them must not hold the loop for long."""


def unusable_reason(
    topic: str, source: str, *, exists: bool, is_enabled: bool, settings: DeadLetterSettings
) -> str | None:
    """Why a topic cannot take dead letters of `source` now, or None where it can, or can be made."""
    if topic.startswith("__"):
        return "it is internal"
    if topic == source:
        return "a dead letter would be read and given up again without end"
    if not topic.startswith(settings.name_prefix):
        return f"its name does not begin with {settings.name_prefix}"
    if exists:
        return None if is_enabled else f"{TAKES_DEAD_LETTERS} is not true there"
    return None if settings.creates_topics else "there is no such topic, and it may not be made"


def letters(
    key: ShareKey, topic: str, letter: DeadLetter, originals: Iterable[Record], *, copies: bool, now_ms: int
) -> Iterator[Record]:
    """One letter for each record that the log still has of the range; its offset is where it lies in the source."""
    facts = {
        "topic": topic,
        "partition": str(key.partition),
        "group": key.group_id,
        "delivery.count": str(letter.delivery_count),
        "message": letter.reason.value,
    }
    shared = tuple(Header(_PREFIX + name, text.encode()) for name, text in facts.items())
    for original in originals:
        if not letter.first_offset <= original.offset <= letter.last_offset:
            continue
        headers = (*shared[:2], Header(_PREFIX + "offset", str(original.offset).encode()), *shared[2:])
        if copies:
            yield Record(original.offset, now_ms, original.key, original.value, (*original.headers, *headers))
        else:
            yield Record(original.offset, now_ms, None, None, headers)


def batches(written: Sequence[Record], max_bytes: int) -> Iterator[bytes]:
    """Letters as record batches of at most `max_bytes`. One that is too long for itself loses what it copied."""
    begin, size = 0, _MAX_RECORDS
    while begin < len(written):
        part = written[begin : begin + size]
        data = encode_batch([_at(position, each) for position, each in enumerate(part)])
        if len(data) > max_bytes and len(part) > 1:
            size = len(part) // 2
            continue
        if len(data) > max_bytes:
            data = encode_batch([_at(0, _without_copy(part[0]))])
        yield data
        begin += len(part)
        size = _MAX_RECORDS


def _at(offset: int, record: Record) -> Record:
    return Record(offset, record.timestamp_ms, record.key, record.value, record.headers)


def _without_copy(letter: Record) -> Record:
    headers = tuple(header for header in letter.headers if header.key.startswith(_PREFIX))
    return Record(letter.offset, letter.timestamp_ms, None, None, headers)
