"""What a scan is asked for, and which offsets of which partitions that is. Only `resolve` asks the brokers."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from millrace.client.cluster import EARLIEST, LATEST, ClusterClient
from millrace.console.records.decoders import Format
from millrace.errors import ApiError, ErrorCode
from millrace.model import TopicPartition

DEFAULT_PAGE: Final = 100
MAX_PAGE: Final = 1_000
_TOKEN: Final = re.compile(r"[fb](?:~\d{1,10}\.\d{1,19}\.\d{1,19})*\Z", re.ASCII)


class StartKind(StrEnum):
    """Where a scan begins. The value is what a request names."""

    NEWEST = "newest"
    BEGINNING = "beginning"
    OFFSET = "offset"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Start:
    """Where a scan begins. `offset` counts from the end where it is negative; `offsets` says it for some partitions."""

    kind: StartKind = StartKind.NEWEST
    offset: int = 0
    time_ms: int = 0
    offsets: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a scan may do before it stops and offers to go on; None is without a limit."""

    matches: int | None = DEFAULT_PAGE
    records: int | None = 20_000_000
    size_bytes: int | None = None
    seconds: float | None = 600.0


class Span(NamedTuple):
    """The offsets that are still to be read of a partition: from `low` up to, not including, `high`."""

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Continuation:
    """Where to go on: what has not been read yet, forwards or from its end backwards."""

    backwards: bool
    spans: Mapping[int, Span]

    def __str__(self) -> str:
        """As a page carries it."""
        spans = "".join(f"~{partition}.{low}.{high}" for partition, (low, high) in sorted(self.spans.items()))
        return ("b" if self.backwards else "f") + spans

    @classmethod
    def parse(cls, text: str) -> Continuation:
        """What `str` made; ValueError."""
        if not _TOKEN.match(text):
            raise ValueError("this is no place to go on from: begin the scan anew")
        numbers = [[int(number) for number in part.split(".")] for part in text.split("~")[1:]]
        return cls(text[0] == "b", {partition: Span(low, high) for partition, low, high in numbers})


@dataclass(frozen=True, slots=True)
class ScanRequest:
    """What to scan. Without `partitions` all of them; `until_*` are not read any more."""

    topic: str
    start: Start = Start()
    partitions: tuple[int, ...] | None = None
    until_offset: int | None = None
    until_time_ms: int | None = None
    filter_text: str = ""
    key_format: Format = Format.AUTO
    value_format: Format = Format.AUTO
    read_committed: bool = True
    include_control: bool = False
    limits: Limits = Limits()
    continuation: Continuation | None = None

    @property
    def backwards(self) -> bool:
        """From the newest record on, as pages show what has just happened."""
        if self.continuation is not None:
            return self.continuation.backwards
        return self.start.kind is StartKind.NEWEST


def partitions_of(client: ClusterClient, topic: str, wanted: Collection[int] | None = None) -> list[int]:
    """The partitions that are wanted, or all there are; ApiError, at once, for what does not exist."""
    found = client.topics([topic]).get(topic)
    if found is None:
        raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic '{topic}'")
    if wanted is None:
        return sorted(found.partitions)
    for each in wanted:
        if each not in found.partitions:
            raise ApiError(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                f"topic '{topic}' has {len(found.partitions)} partitions, and no {each}",
            )
    return sorted(set(wanted))


def resolve(client: ClusterClient, request: ScanRequest) -> dict[int, Span]:
    """The offsets to be read of each partition, as the logs are now; ApiError for what does not exist."""
    chosen = partitions_of(client, request.topic, request.partitions)
    if request.continuation is not None:
        there = set(partitions_of(client, request.topic))
        return {each: span for each, span in request.continuation.spans.items() if each in there}
    return _spans(client, request, [TopicPartition(request.topic, each) for each in chosen])


def _spans(client: ClusterClient, request: ScanRequest, partitions: list[TopicPartition]) -> dict[int, Span]:
    committed = request.read_committed
    lows = client.list_offsets(dict.fromkeys(partitions, EARLIEST))
    highs = client.list_offsets(dict.fromkeys(partitions, LATEST), read_committed=committed)
    begins: Mapping[TopicPartition, int | None] = {}
    if request.start.kind is StartKind.TIME:
        begins = client.list_offsets(dict.fromkeys(partitions, request.start.time_ms), read_committed=committed)
    ends: Mapping[TopicPartition, int | None] = {}
    if request.until_time_ms is not None:
        ends = client.list_offsets(dict.fromkeys(partitions, request.until_time_ms), read_committed=committed)
    spans = {}
    for each in partitions:
        low, high = lows[each] or 0, highs[each] or 0
        begin = _begin(request.start, each.partition, low, high, begins.get(each))
        until = ends.get(each)
        end = high if until is None else min(high, until)
        if request.until_offset is not None:
            end = min(end, request.until_offset)
        spans[each.partition] = Span(begin, max(begin, end))
    return spans


def _begin(start: Start, partition: int, low: int, high: int, at_time: int | None) -> int:
    if partition in start.offsets:
        wanted = start.offsets[partition]
    elif start.kind is StartKind.OFFSET:
        wanted = start.offset
    elif start.kind is StartKind.TIME:
        return high if at_time is None else max(low, at_time)
    else:
        return low
    if wanted < 0:
        wanted += high
    return min(max(low, wanted), high)
