"""Offsets of many partitions as values: their JSON forms, what a trigger may read, and how ranges become tasks.

Pure: nothing here asks a broker; whoever does (reader.py) passes in what it learned. The JSON form is that of Spark's
own Kafka source, `{"topic": {"0": 42}}`, so that checkpoints and options read the same.

Invariants:
- `to_json` orders topics and partitions, because Spark compares two offsets by their text.
- An offset is the next one to read: a range is `start <= offset < end`.
- Splitting never changes which offsets are read, only by how many tasks.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any, Final, TypeAlias

from millrace.errors import ConfigError
from millrace.model import TopicPartition

Offsets: TypeAlias = dict[TopicPartition, int]

EARLIEST: Final = -2
LATEST: Final = -1

SPLIT_FROM: Final = 1_000_000
"""Ranges with more offsets than this are split over idle cores when no option says otherwise."""
SPLIT_TO: Final = 500_000
"""No piece of such a range is smaller than this: below it, starting a task costs more than it saves."""
GROUP_TO: Final = 10_000
"""Small ranges share a task up to about this many offsets: a task of Python costs as much as reading ten thousand."""
TASKS_PER_CORE: Final = 2
"""Ranges are not grouped into fewer tasks than this."""


class Edge(Enum):
    """One end of every partition."""

    EARLIEST = EARLIEST
    LATEST = LATEST


@dataclass(frozen=True, slots=True)
class AtOffsets:
    """An offset for each partition; EARLIEST and LATEST stand for the two ends."""

    offsets: Offsets


@dataclass(frozen=True, slots=True)
class AtTime:
    """The first record of every partition that is at or after one time."""

    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class AtTimes:
    """The same with a time for each partition."""

    timestamps_ms: Offsets


Position: TypeAlias = Edge | AtOffsets | AtTime | AtTimes
"""Where a query starts or ends, as a user said it; reader.py turns it into offsets."""


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Offsets `start <= offset < end` of one partition: what one task reads."""

    partition: TopicPartition
    start: int
    end: int

    @property
    def size(self) -> int:
        """How many offsets; compaction and transaction markers can leave fewer records."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Plan:
    """The ranges of a micro-batch or batch query, and a sentence for every loss that was found while planning."""

    ranges: tuple[OffsetRange, ...]
    losses: tuple[str, ...]


# JSON


def to_json(offsets: Mapping[TopicPartition, int]) -> dict[str, dict[str, int]]:
    """What Spark writes to the checkpoint, in an order that depends on nothing but the offsets."""
    found: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        found.setdefault(topic, {})[str(partition)] = offset
    return found


def from_json(value: Any, what: str) -> Offsets:
    """The inverse of `to_json`; ConfigError names `what` (an option, the checkpoint) when the form is another."""
    if not isinstance(value, dict) or not all(isinstance(partitions, dict) for partitions in value.values()):
        raise _malformed(what, 'like {"topic": {"0": 42}}')
    offsets: Offsets = {}
    for topic, partitions in value.items():
        for partition, offset in partitions.items():
            if not partition.isascii() or not partition.isdigit() or type(offset) is not int:
                raise _malformed(what, f'topic {topic!r} has {json.dumps({partition: offset})}, wanted {{"0": 42}}')
            offsets[TopicPartition(topic, int(partition))] = offset
    return offsets


def parse_offsets(text: str, option: str) -> Offsets:
    """Offsets (or times) of an option's JSON text; ConfigError names the option."""
    offsets = from_json(_load(text, option), f"option {option!r}")
    if not offsets:
        raise _malformed(f"option {option!r}", "it names no partition")
    return offsets


def parse_partitions(text: str, option: str) -> tuple[TopicPartition, ...]:
    """The partitions of `{"topic": [0, 1]}`, in order and each once."""
    value = _load(text, option)
    wanted = 'like {"topic": [0, 1]}'
    if not isinstance(value, dict):
        raise _malformed(f"option {option!r}", wanted)
    found: set[TopicPartition] = set()
    for topic, numbers in value.items():
        if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
            raise _malformed(f"option {option!r}", wanted)
        found.update(TopicPartition(topic, number) for number in numbers)
    if not found:
        raise _malformed(f"option {option!r}", "it names no partition")
    return tuple(sorted(found))


def describe(partitions: Iterable[TopicPartition], most: int = 5) -> str:
    """Some names of partitions for a message: `a-0, a-1 and 198 more`."""
    names = [str(partition) for partition in sorted(partitions)]
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


# Limits


def limited(start: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int], most: int) -> Offsets:
    """`end`, brought nearer to `start` so that `most` offsets lie between, shared out in proportion to the lag.

    As in Spark's Kafka source a partition with anything to read gets at least one offset, so that a small partition is
    not starved by large ones; with more partitions than `most` that exceeds the limit. What rounding leaves over goes
    to the partitions that lost most by it, so that no tiny micro-batch is left for the end.
    """
    lag = {partition: offset - start[partition] for partition, offset in end.items() if offset > start[partition]}
    total = sum(lag.values())
    if total <= most:
        return dict(end)
    counts = {partition: max(1, most * behind // total) for partition, behind in lag.items()}
    left = max(0, most - sum(counts.values()))
    for partition in sorted(lag, key=lambda each: (-(most * lag[each] % total), each))[:left]:
        counts[partition] = min(counts[partition] + 1, lag[partition])
    return {**end, **{partition: start[partition] + count for partition, count in counts.items()}}


def available(start: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int]) -> int:
    """How many offsets there are to read."""
    return sum(max(0, offset - start.get(partition, 0)) for partition, offset in end.items())


def is_delayed(count: int, at_least: int, since_last_ms: float, longest_ms: int) -> bool:
    """Whether `minOffsetsPerTrigger` still holds a micro-batch back."""
    return count < at_least and since_last_ms < longest_ms


# Planning


def plan(
    start: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int], earliest: Mapping[TopicPartition, int]
) -> Plan:
    """What to read to get from `start` to `end` when the logs begin at `earliest` (without deleted partitions).

    A partition that `start` does not know is read from its beginning. Whatever cannot be read any more is a loss: the
    ranges are what is left, and whether a loss is an error is for the caller to say.
    """
    ranges: list[OffsetRange] = []
    losses: list[str] = []
    for partition in sorted(start.keys() | end.keys()):
        begin = start.get(partition, earliest.get(partition, 0))
        until = end.get(partition, begin)
        log_start = earliest.get(partition)
        if log_start is None:
            if partition not in end or until > begin:
                losses.append(f"partition {partition} is gone; it had been read up to offset {begin}")
        elif until < begin:
            losses.append(
                f"partition {partition} ends at offset {until} although it had been read up to {begin}: "
                "the topic was deleted and created again, or the log was cut"
            )
            ranges.append(OffsetRange(partition, min(log_start, until), until))
        elif begin < min(log_start, until):
            losses.append(lost_to_retention(partition, begin, min(log_start, until), log_start))
            ranges.append(OffsetRange(partition, min(log_start, until), until))
        else:
            ranges.append(OffsetRange(partition, begin, until))
    return Plan(tuple(each for each in ranges if each.size > 0), tuple(losses))


def beyond(offsets: Mapping[TopicPartition, int], latest: Mapping[TopicPartition, int], option: str) -> tuple[str, ...]:
    """A sentence for every offset that an option asks for and that is not written yet."""
    return tuple(
        f"{option} has offset {offset} for partition {partition}, which ends at {latest[partition]}"
        for partition, offset in sorted(offsets.items())
        if offset > latest[partition]
    )


def at_most(offsets: Mapping[TopicPartition, int], latest: Mapping[TopicPartition, int]) -> Offsets:
    return {partition: min(offset, latest[partition]) for partition, offset in offsets.items()}


def lost_to_retention(partition: TopicPartition, start: int, end: int, log_start: int) -> str:
    """The sentence for offsets that were removed before they were read."""
    return (
        f"offsets {start} to {end - 1} of partition {partition} are gone: its log begins at offset {log_start} "
        "(retention or deleted records)"
    )


def data_loss_advice(losses: Sequence[str]) -> str:
    """One line for the error of a query that must not lose data."""
    shown = "; ".join(losses[:3]) + (f"; and {len(losses) - 3} more" if len(losses) > 3 else "")
    return (
        f"data may have been lost: {shown}. Set option failOnDataLoss to false to go on with what exists, "
        "or start with a new checkpoint and other startingOffsets"
    )


def split(
    ranges: Sequence[OffsetRange], *, min_partitions: int | None, max_records: int | None, cores: int
) -> list[OffsetRange]:
    """The same offsets in the pieces that tasks will read.

    First no piece has more than `max_records` offsets; then, when there are fewer pieces than `min_partitions`, large
    ones are divided in proportion to their size. With neither option, ranges of more than SPLIT_FROM offsets are
    divided until there are as many pieces as cores, none smaller than SPLIT_TO.
    """
    pieces = [each for each in ranges if each.size > 0]
    if max_records is not None:
        pieces = [part for each in pieces for part in _divided(each, -(-each.size // max_records))]
    if min_partitions is not None:
        return _divided_in_proportion(pieces, min_partitions)
    if max_records is None and 0 < len(pieces) < cores:
        return _divided_over_cores(pieces, cores)
    return pieces


def group(ranges: Sequence[OffsetRange], *, cores: int) -> list[tuple[OffsetRange, ...]]:
    """Ranges that are read by one task each, one after another.

    Many small ranges (a topic of two hundred partitions, a micro-batch of a second) would spend their time on starting
    tasks. They are shared out over enough tasks for all cores, and more when that would be over GROUP_TO each.
    """
    tasks = max(TASKS_PER_CORE * cores, -(-sum(each.size for each in ranges) // GROUP_TO))
    if len(ranges) <= tasks:
        return [(each,) for each in ranges]
    groups: list[list[OffsetRange]] = [[] for _ in range(tasks)]
    loads = [(0, index) for index in range(tasks)]
    for each in sorted(ranges, key=lambda each: -each.size):
        load, index = loads[0]
        groups[index].append(each)
        heapq.heapreplace(loads, (load + each.size, index))
    return [tuple(members) for members in groups if members]


def _divided_in_proportion(ranges: Sequence[OffsetRange], wanted: int) -> list[OffsetRange]:
    if len(ranges) >= wanted:
        return list(ranges)
    total = sum(each.size for each in ranges)
    whole = [each for each in ranges if _share(each.size, total, wanted) <= 1]
    # Ranges that stay whole leave the sum, or the pieces of the others would come out too few.
    total -= sum(each.size for each in whole)
    wanted = max(1, wanted - len(whole))
    kept = set(whole)
    return [
        part
        for each in ranges
        for part in ([each] if each in kept else _divided(each, _share(each.size, total, wanted)))
    ]


def _divided_over_cores(ranges: Sequence[OffsetRange], cores: int) -> list[OffsetRange]:
    large = [each for each in ranges if each.size > SPLIT_FROM]
    total = sum(each.size for each in large)
    idle = cores - (len(ranges) - len(large))
    found = []
    for each in ranges:
        if each.size > SPLIT_FROM:
            found += _divided(each, min(_share(each.size, total, idle), each.size // SPLIT_TO))
        else:
            found.append(each)
    return found


def _share(size: int, total: int, wanted: int) -> int:
    return max(1, round(size / total * wanted))


def _divided(whole: OffsetRange, count: int) -> list[OffsetRange]:
    count = max(1, min(count, whole.size))
    cuts = [whole.start + whole.size * index // count for index in range(count + 1)]
    return [OffsetRange(whole.partition, start, end) for start, end in pairwise(cuts)]


def _load(text: str, option: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise _malformed(f"option {option!r}", str(error)) from None


def _malformed(what: str, wanted: str) -> ConfigError:
    return ConfigError(f"{what} is not JSON of the expected form: {wanted}")
