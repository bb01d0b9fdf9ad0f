"""What `consume` reads: of which topics, from where, up to where.

A pattern matches at the beginning of a name, as librdkafka has it: `^orders` matches `orders-eu`, `^orders$` does not.
Internal topics (`__...`) match only a pattern that begins with `__` itself. In a group, librdkafka (POSIX extended) or
the broker (RE2) does the matching; elsewhere Python does.

An end is an offset that is not read any more. Without `--follow` it is at most where the partition ends now; with it,
an end that has not been written yet is waited for. The end for a time is the first record that is not before it, and
is *open* while there is no such record: it is fixed by the first one that comes, or by the clock.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from millrace.cli.output import CommandError
from millrace.model import TopicPartition

if TYPE_CHECKING:
    from confluent_kafka import Consumer
    from confluent_kafka import TopicPartition as LibraryPartition


@dataclass(frozen=True, slots=True)
class Start:
    """Where reading begins; at most one field is set, and none means at the end."""

    beginning: bool = False
    offset: int | None = None
    time_ms: int | None = None

    @property
    def given(self) -> bool:
        return self.beginning or self.offset is not None or self.time_ms is not None


@dataclass(frozen=True, slots=True)
class End:
    """Where reading ends; at most one field is set. A negative offset counts from the end as it is now."""

    offset: int | None = None
    time_ms: int | None = None

    @property
    def given(self) -> bool:
        return self.offset is not None or self.time_ms is not None


@dataclass(frozen=True, slots=True)
class Selection:
    """Which partitions are read: topics by name and by pattern, of each all partitions or only some."""

    names: tuple[str, ...]
    patterns: tuple[str, ...] = ()
    only: tuple[int, ...] = ()

    @classmethod
    def of(cls, topics: Iterable[str], patterns: Iterable[str], only: Iterable[int]) -> Selection:
        """From words of the command line; a topic that begins with ^ is a pattern, since no name can."""
        named = list(dict.fromkeys(topics))
        chosen = [*patterns, *(topic for topic in named if topic.startswith("^"))]
        for pattern in chosen:
            try:
                re.compile(pattern)
            except re.error as error:
                raise CommandError(f"'{pattern}' is no pattern: {error}", exit_code=2) from None
        names = tuple(topic for topic in named if not topic.startswith("^"))
        return cls(names, tuple(chosen), tuple(sorted(set(only))))

    def __str__(self) -> str:
        words = [*self.names, *(f"topics like {pattern}" for pattern in self.patterns)]
        return ", ".join(words)

    @property
    def several(self) -> bool:
        """Whether records of more than one topic may come."""
        return len(self.names) > 1 or bool(self.patterns)

    @property
    def internal_too(self) -> bool:
        return any(pattern.removeprefix("^").startswith("__") for pattern in self.patterns)

    def matches(self, name: str) -> bool:
        """Whether a topic is meant by one of the patterns."""
        if name.startswith("__") and not self.internal_too:
            return False
        return any(re.match(pattern, name) for pattern in self.patterns)

    def subscription(self) -> list[str]:
        """For a group. The same meaning for librdkafka, which searches, and for brokers, which match whole names."""
        return [*self.names, *(f"^({pattern}).*" for pattern in self.patterns)]

    def subscription_settings(self) -> dict[str, str]:
        """How topics that appear later are found, and internal ones kept out, by a group's member."""
        if not self.patterns:
            return {}
        internal_too = self.internal_too or any(name.startswith("__") for name in self.names)
        hidden = {} if internal_too else {"topic.blacklist": "^__.*"}
        return {"topic.metadata.refresh.interval.ms": "2000", **hidden}


def find_partitions(consumer: Consumer, selection: Selection) -> list[TopicPartition]:
    """The partitions that are there now. A topic that was named must be there, and have the partitions asked for."""
    from millrace.cli.connection import REQUEST_TIMEOUT_S, topic_partitions

    for name in selection.names:
        indexes = topic_partitions(consumer, name)
        missing = sorted(set(selection.only) - set(indexes))
        if missing:
            raise CommandError(f"topic '{name}' has no partition {missing[0]} (it has {len(indexes)})")
    return look_again(consumer, selection, REQUEST_TIMEOUT_S)


def look_again(consumer: Consumer, selection: Selection, timeout_s: float) -> list[TopicPartition]:
    """The partitions that are there now, whatever was there before."""
    listings = [consumer.list_topics(name, timeout=timeout_s) for name in selection.names]
    if selection.patterns:
        listings.append(consumer.list_topics(timeout=timeout_s))
    found = {name: topic.partitions for listing in listings for name, topic in listing.topics.items()}
    return [
        TopicPartition(name, index)
        for name in sorted(found)
        if name in selection.names or selection.matches(name)
        for index in sorted(found[name])
        if not selection.only or index in selection.only
    ]


def begin_offsets(consumer: Consumer, partitions: Iterable[TopicPartition], start: Start) -> dict[TopicPartition, int]:
    """Numbers where the library has numbers, so that 'already at the end' can be seen without reading."""
    chosen = list(partitions)
    by_time = {} if start.time_ms is None else offsets_at(consumer, chosen, start.time_ms)
    begin = {}
    for partition in chosen:
        low, high = bounds(consumer, partition)
        if start.time_ms is not None:
            begin[partition] = by_time.get(partition, high)
        elif start.beginning:
            begin[partition] = low
        elif start.offset is None:
            begin[partition] = high
        elif start.offset < 0:
            begin[partition] = max(low, high + start.offset)
        else:
            begin[partition] = max(low, start.offset)
    return begin


def end_offsets(
    consumer: Consumer, partitions: Iterable[TopicPartition], end: End, *, follow: bool
) -> dict[TopicPartition, int | None]:
    """Where each partition is done, None where that is open. An empty one is done at 0."""
    chosen = list(partitions)
    by_time = {} if end.time_ms is None else offsets_at(consumer, chosen, end.time_ms)
    ends: dict[TopicPartition, int | None] = {}
    for partition in chosen:
        low, high = bounds(consumer, partition)
        wanted: int | None = high
        if end.time_ms is not None:
            wanted = by_time.get(partition)
        elif end.offset is not None:
            wanted = end.offset if end.offset >= 0 else max(high + end.offset, 0)
        if not follow:
            wanted = high if wanted is None else min(wanted, high)
            wanted = wanted if high > low else 0
        ends[partition] = wanted
    return ends


def unfinished(
    ends: Mapping[TopicPartition, int | None], begin: Mapping[TopicPartition, int]
) -> dict[TopicPartition, int | None]:
    """The partitions that still have something to read; one that is not in `begin` has unless it is empty."""
    return {one: end for one, end in ends.items() if end is None or begin.get(one, 0) < end}


def bounds(consumer: Consumer, partition: TopicPartition) -> tuple[int, int]:
    """The first offset of a partition and the one after its last."""
    from millrace.cli.connection import REQUEST_TIMEOUT_S

    return consumer.get_watermark_offsets(for_library(partition), timeout=REQUEST_TIMEOUT_S)


def offsets_at(consumer: Consumer, partitions: Iterable[TopicPartition], time_ms: int) -> dict[TopicPartition, int]:
    """The first record that is not before this time, of the partitions that have one."""
    from millrace.cli.connection import REQUEST_TIMEOUT_S

    wanted = [for_library(partition, time_ms) for partition in partitions]
    found = consumer.offsets_for_times(wanted, timeout=REQUEST_TIMEOUT_S) if wanted else []
    return {TopicPartition(one.topic, one.partition): one.offset for one in found if one.offset >= 0}


def for_library(partition: TopicPartition, offset: int | None = None) -> LibraryPartition:
    """As the library has it."""
    from confluent_kafka import TopicPartition as LibraryPartition

    topic, index = partition
    return LibraryPartition(topic, index) if offset is None else LibraryPartition(topic, index, offset)
