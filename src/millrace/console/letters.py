"""Dead letters of a queue as the console shows them, and sending what they are about once more.

A letter is a record of the dead-letter topic whose headers say which record was given up, by whom and why. What is sent
again is that record, from where it lies; if it is there no more, the copy in the letter, if there is one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from millrace.client.settings import ClientSettings
from millrace.console.records.found import Found
from millrace.console.records.plan import Limits, ScanRequest
from millrace.console.records.producing import InputError, Written, copied, produce, send_again
from millrace.console.records.reading import read_one
from millrace.console.records.scan import Scan, State
from millrace.errors import ApiError, ErrorCode

PREFIX: Final = "__dlq.errors."
SHOWN: Final = 100
SEARCHED: Final = 100_000
"""Records of a dead-letter topic that are looked through for the newest letters of one queue."""
_GONE: Final = {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.OFFSET_OUT_OF_RANGE}


@dataclass(frozen=True, slots=True)
class Letter:
    """One letter, and the record that it is about."""

    partition: int
    offset: int
    timestamp_ms: int
    source_topic: str
    source_partition: int
    source_offset: int
    group: str
    deliveries: str
    reason: str
    has_copy: bool

    @property
    def name(self) -> str:
        """As a form names it."""
        return f"{self.partition}:{self.offset}"


def newest_letters(settings: ClientSettings, topic: str, group: str) -> list[Letter]:
    """The newest letters of a queue in its dead-letter topic, of those that are not too far back."""
    found: list[Letter] = []
    request = ScanRequest(topic, limits=Limits(matches=SHOWN, records=SEARCHED, seconds=5.0))
    while len(found) < SHOWN:
        scan = Scan(settings, request)
        scan.run()
        if scan.progress.state is State.FAILED:
            raise ApiError(ErrorCode.UNKNOWN_SERVER_ERROR, scan.progress.error)
        found += [letter for each in scan.matches if (letter := letter_of(each)) is not None and letter.group == group]
        if scan.continuation is None or scan.progress.state is not State.PAGE:
            break
        request = replace(request, continuation=scan.continuation)
    return found[:SHOWN]


def letter_of(record: Found) -> Letter | None:
    """The letter that a record is; None if it is none."""
    told = {
        name.removeprefix(PREFIX): (value or b"").decode(errors="replace")
        for name, value in record.headers
        if name.startswith(PREFIX)
    }
    if not {"topic", "partition", "offset", "group"} <= told.keys():
        return None
    if not (told["partition"].isdigit() and told["offset"].isdigit()):
        return None
    return Letter(
        record.partition,
        record.offset,
        record.timestamp_ms,
        told["topic"],
        int(told["partition"]),
        int(told["offset"]),
        told["group"],
        told.get("delivery.count", ""),
        told.get("message", ""),
        record.key is not None or record.value is not None,
    )


def replay(settings: ClientSettings, topic: str, partition: int, offset: int) -> Written:
    """Send what a letter of `topic` is about to where it came from, once more. InputError if nothing of it is left."""
    record = read_one(settings, topic, partition, offset)
    letter = None if record is None else letter_of(record)
    if record is None or letter is None:
        raise InputError(f"there is no letter at {topic}-{partition}, offset {offset} any more")
    source = Written(letter.source_topic, letter.source_partition, letter.source_offset)
    try:
        return send_again(settings, source, partition=source.partition)
    except (InputError, ApiError) as error:
        if isinstance(error, ApiError) and error.code not in _GONE:
            raise
        if not letter.has_copy:
            raise InputError(
                f"{letter.source_topic}-{letter.source_partition} has no record at offset {letter.source_offset} any "
                "more, and the letter has no copy (see errors.deadletterqueue.copy.record.enable)"
            ) from None
    copy = copied(record)
    own = tuple(header for header in copy.headers if not header[0].startswith(PREFIX))
    return produce(settings, letter.source_topic, [replace(copy, headers=own, partition=letter.source_partition)])[0]
