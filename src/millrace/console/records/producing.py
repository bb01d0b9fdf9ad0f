"""Records that a person writes in the console, and records that are sent again.

What was typed becomes bytes in `bytes_of`, purely; `produce` sends as an idempotent producer with acks=all and returns
where each record went. A record without a partition goes where Kafka's Java client would put it: by the hash of its
key, or, without a key, to any partition.
"""

from __future__ import annotations

import base64
import binascii
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NamedTuple

from millrace.client.producing import BatchProducer
from millrace.client.settings import ClientSettings
from millrace.clock import SystemClock
from millrace.console.records.found import Found
from millrace.console.records.plan import partitions_of
from millrace.console.records.reading import ScanClient, read_one
from millrace.errors import ApiError, ErrorCode
from millrace.model import TopicPartition
from millrace.records.decode import Header, Record
from millrace.records.encode import encode_batch
from millrace.records.hashing import partition_of

MAX_RECORDS: Final = 1_000
"""In one request: more than that is work for a program."""


class Typed(StrEnum):
    """How a key, value or header was written. The value is what a form names."""

    TEXT = "text"
    JSON = "json"
    HEX = "hex"
    BASE64 = "base64"
    NULL = "null"


class InputError(ValueError):
    """What was typed cannot be sent; the text says what and why."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A record to be sent. Without a partition or a time the producer chooses."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    partition: int | None = None
    timestamp_ms: int | None = None


class Written(NamedTuple):
    """Where a record is now; the offset is -1 where it is not known."""

    topic: str
    partition: int
    offset: int


def bytes_of(text: str, typed: Typed, what: str = "value") -> bytes | None:
    """The bytes that were typed; InputError names `what`."""
    if typed is Typed.NULL:
        return None
    if typed is Typed.TEXT:
        return _encoded(text, what)
    if typed is Typed.JSON:
        try:
            json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"the {what} is not JSON: {error}") from None
        return _encoded(text, what)
    if typed is Typed.HEX:
        try:
            return bytes.fromhex(text)
        except ValueError:
            raise InputError(f"the {what} is not hex: write pairs of the digits 0-9 and a-f") from None
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise InputError(f"the {what} is not base64") from None


def _encoded(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InputError(f"the {what} has half a character in it, which UTF-8 cannot write") from None


def parse_headers(text: str) -> tuple[tuple[str, bytes | None], ...]:
    """Headers as they are typed, one on a line: `name: value`, or `name` alone for a null; InputError."""
    headers: list[tuple[str, bytes | None]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        name, colon, value = line.partition(":")
        if not name.strip():
            raise InputError(f"header line {number} has no name: write name: value")
        headers.append((name.strip(), _encoded(value.removeprefix(" "), "header") if colon else None))
    return tuple(headers)


def produce(settings: ClientSettings, topic: str, records: Sequence[Outgoing]) -> list[Written]:
    """Send records, and return where each is once all of them are stored. ApiError; InputError."""
    if not records:
        raise InputError("there is no record to send")
    if len(records) > MAX_RECORDS:
        raise InputError(f"at most {MAX_RECORDS} records are sent at a time, and these are {len(records)}")
    with ScanClient(settings) as client:
        count = len(partitions_of(client, topic))
        lanes: dict[int, list[int]] = {}
        for index, record in enumerate(records):
            lanes.setdefault(_partition(record, count, topic), []).append(index)
        producer = BatchProducer(client)
        now_ms = SystemClock().wall_ms()
        for partition, indexes in lanes.items():
            where = TopicPartition(topic, partition)
            batch = encode_batch(
                [_record(records[index], number, now_ms) for number, index in enumerate(indexes)],
                producer_id=producer.producer_id,
                producer_epoch=producer.producer_epoch,
                base_sequence=producer.next_sequence(where),
            )
            producer.add(where, batch, len(indexes))
        try:
            producer.flush()
        except ApiError as error:
            stored = sum(lane.records for lane in producer.take_written().values())
            if not stored:
                raise
            raise ApiError(error.code, f"{error.message}; {stored} of {len(records)} records were stored") from error
        written = producer.take_written()
    places: list[Written | None] = [None] * len(records)
    for partition, indexes in lanes.items():
        lane = written[TopicPartition(topic, partition)]
        # A batch that was too large went in halves, between which others may have written.
        known = lane.next_offset - lane.first_offset == len(indexes)
        for number, index in enumerate(indexes):
            places[index] = Written(topic, partition, lane.first_offset + number if known else -1)
    return [place for place in places if place is not None]


def send_again(
    settings: ClientSettings,
    source: Written,
    *,
    topic: str | None = None,
    partition: int | None = None,
    keep_time: bool = False,
) -> Written:
    """Write a record once more, byte by byte the same, to its own topic or another one. ApiError; InputError.

    Without `partition` it goes where its key belongs in the topic that gets it.
    """
    record = read_one(settings, source.topic, source.partition, source.offset)
    if record is None:
        raise InputError(f"there is no record at {source.topic}-{source.partition}, offset {source.offset} any more")
    if record.control:
        raise InputError("a control record belongs to its transaction, and cannot be sent again")
    outgoing = copied(record)
    if keep_time:
        outgoing = replace(outgoing, timestamp_ms=record.timestamp_ms)
    target = source.topic if topic is None else topic
    return produce(settings, target, [replace(outgoing, partition=partition)])[0]


def copied(record: Found) -> Outgoing:
    """A whole record as one to be sent; InputError where Kafka's clients could not write it."""
    for name, _ in record.headers:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise InputError(
                "the name of a header is not UTF-8, which only the client that wrote it can send"
            ) from None
    return Outgoing(record.key, record.value, tuple(record.headers))


def _partition(record: Outgoing, count: int, topic: str) -> int:
    if record.partition is not None:
        if not 0 <= record.partition < count:
            raise ApiError(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                f"topic '{topic}' has {count} partitions, and no {record.partition}",
            )
        return record.partition
    if record.key is not None:
        return partition_of(record.key, count)
    return random.randrange(count)  # noqa: S311 - to spread records, not to hide anything


def _record(outgoing: Outgoing, number: int, now_ms: int) -> Record:
    return Record(
        number,
        now_ms if outgoing.timestamp_ms is None else outgoing.timestamp_ms,
        outgoing.key,
        outgoing.value,
        tuple(Header(name, value) for name, value in outgoing.headers),
    )


# Many at once.


def parse_lines(text: str) -> list[Outgoing]:
    """Records as JSON lines, as a download has them: `{"key": ..., "value": ..., "headers": [[name, value]]}`;
    InputError.

    Bytes that are no text are `{"base64": "..."}`, a value that is an object, a list, a number or a boolean is sent as
    JSON; `partition` and `timestamp` are taken, `topic` and `offset` are not looked at.
    """
    records = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                records.append(_parse_line(line))
            except InputError as error:
                raise InputError(f"line {number}: {error}") from None
    return records


def _parse_line(line: str) -> Outgoing:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InputError('not a JSON object: write {"key": "k", "value": "v"}')
    unknown = fields.keys() - {"topic", "partition", "offset", "timestamp", "key", "value", "headers"}
    if unknown:
        raise InputError(f"'{min(unknown)}' is no field of a record")
    if "value" not in fields:
        raise InputError("there is no value (null makes a tombstone)")
    headers = fields.get("headers") or []
    pairs = list(headers.items()) if isinstance(headers, dict) else headers
    if not isinstance(pairs, list) or not all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs
    ):
        raise InputError("headers are an object or a list of [name, value]")
    return Outgoing(
        _from_json(fields.get("key"), "key"),
        _from_json(fields["value"], "value"),
        tuple((name, _from_json(value, "header")) for name, value in pairs),
        _number(fields, "partition"),
        _number(fields, "timestamp"),
    )


def _from_json(value: object, what: str) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, str):
        return _encoded(value, what)
    if isinstance(value, dict) and value.keys() == {"base64"} and isinstance(value["base64"], str):
        return bytes_of(value["base64"], Typed.BASE64, what)
    return _encoded(json.dumps(value, ensure_ascii=False, separators=(",", ":")), what)


def _number(fields: dict[str, object], name: str) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise InputError(f"{name} is a whole number, not {value!r}")
    return value
