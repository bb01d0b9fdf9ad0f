"""What compaction does, decided from facts alone: which log is worth it, up to where, and which records survive.

A log has a clean part, below its first dirty offset, in which every key occurs once, and a dirty part behind it. A
round reads the keys of (some of) the dirty part into a map of their last offsets, writes every segment below its end
anew without the records that the map has a later one for, and moves the first dirty offset to that end.

What is never touched: the active segment, what is not committed (the high watermark), not stable (an open transaction),
not on disk yet, or younger than `min.compaction.lag.ms`; only whole segments are. Not here: the work
(`compaction_job`), its results taking the place of what they were made from (`swap`, `log`), and when a log is looked
at (`cleaner`).

Invariants: pure; the last record of a key survives, unless it is a tombstone whose horizon is past. While a batch of a
transaction is in the log, be it one without records, the marker that ends it is too, behind it: without a marker the
transaction would be open again for whoever reads the log from its start, or end as the producer's next one does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple

from millrace.records.batch import BatchHeader
from millrace.records.filtering import Span
from millrace.storage.index import TIME_ENTRY_BYTES
from millrace.storage.segment import MAX_RELATIVE_OFFSET
from millrace.storage.settings import LogConfig
from millrace.storage.txnindex import AbortedTransaction

_NOWHERE: Final = -1


class SegmentFacts(NamedTuple):
    """What is asked of a segment; timestamps are calls because a sealed segment may have to read them."""

    base_offset: int
    end_offset: int
    size_bytes: int
    first_timestamp_ms: Callable[[], int]
    largest_timestamp_ms: Callable[[], int]


@dataclass(frozen=True, slots=True)
class LogFacts:
    """A log as compaction sees it."""

    segments: Sequence[SegmentFacts]
    """Oldest first; the last one is active."""
    start_offset: int
    end_offset: int
    cleaned_offset: int
    """Where the last round ended."""
    compactable_below: int
    """The high watermark, or the oldest open transaction, or what is on disk: the least of them."""


class Source(NamedTuple):
    """A sealed segment as it was when a round was planned."""

    base_offset: int
    end_offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Dirt:
    """What a round would find: whether it is worth it, and how much so."""

    first_dirty_offset: int
    segments: tuple[Source, ...]
    """Everything below the round's end, the clean part included."""
    ratio: float
    is_due: bool


def first_dirty_offset(facts: LogFacts) -> int:
    """Where the dirty part begins. A log that was cut below what had been cleaned is dirty as a whole."""
    if facts.start_offset <= facts.cleaned_offset <= facts.end_offset:
        return facts.cleaned_offset
    return facts.start_offset


def find_dirt(facts: LogFacts, config: LogConfig, now_ms: int) -> Dirt:
    """What a round would work on now."""
    dirty_from = first_dirty_offset(facts)
    clean_bytes = dirty_bytes = 0
    oldest_ms: int | None = None
    sources: list[Source] = []
    for segment in facts.segments[:-1]:
        is_dirty = segment.end_offset > dirty_from
        if segment.end_offset > facts.compactable_below or (
            is_dirty
            and config.min_compaction_lag_ms > 0
            and segment.largest_timestamp_ms() > now_ms - config.min_compaction_lag_ms
        ):
            break
        sources.append(Source(segment.base_offset, segment.end_offset, segment.size_bytes))
        if not is_dirty:
            clean_bytes += segment.size_bytes
            continue
        dirty_bytes += segment.size_bytes
        first_ms = segment.first_timestamp_ms()
        if first_ms > 0 and (oldest_ms is None or first_ms < oldest_ms):
            oldest_ms = first_ms
    ratio = dirty_bytes / (clean_bytes + dirty_bytes) if dirty_bytes else 0.0
    overdue = dirty_bytes > 0 and oldest_ms is not None and oldest_ms < now_ms - config.max_compaction_lag_ms
    return Dirt(dirty_from, tuple(sources), ratio, overdue or ratio > config.min_cleanable_ratio)


def wants_roll(facts: LogFacts, config: LogConfig, now_ms: int) -> bool:
    """Whether the active segment must be sealed so that what is in it can be compacted.

    Kafka rolls only when something is appended: the last records of a topic would wait for ever. Where some of it is
    not committed or not on disk yet it is sealed all the same: under load that is always so, and it passes.
    """
    active = facts.segments[-1]
    if not active.size_bytes:
        return False
    first_ms = active.first_timestamp_ms()
    if 0 < first_ms < now_ms - config.max_compaction_lag_ms:
        return True
    if config.compact_at_bytes is None or active.size_bytes < config.compact_at_bytes:
        return False
    dirty_from = first_dirty_offset(facts)
    dirty_bytes = sum(segment.size_bytes for segment in facts.segments if segment.end_offset > dirty_from)
    total_bytes = sum(segment.size_bytes for segment in facts.segments)
    return dirty_bytes > config.min_cleanable_ratio * total_bytes


def group_sources(sources: Iterable[Source], config: LogConfig) -> list[tuple[Source, ...]]:
    """Which segments become one: neighbours, as long as data, indexes and offsets fit a segment."""
    max_entries = max(config.segment_index_bytes // TIME_ENTRY_BYTES, 1)
    groups: list[list[Source]] = []
    size_bytes = entries = 0
    for source in sources:
        # An index has at most one entry per interval, and the time index one more at its end.
        own_entries = source.size_bytes // max(config.index_interval_bytes, 1) + 1
        if (
            groups
            and size_bytes + source.size_bytes <= config.segment_bytes
            and entries + own_entries <= max_entries
            and source.end_offset - 1 - groups[-1][0].base_offset <= MAX_RELATIVE_OFFSET
        ):
            groups[-1].append(source)
            size_bytes += source.size_bytes
            entries += own_entries
        else:
            groups.append([source])
            size_bytes, entries = source.size_bytes, own_entries
    return [tuple(group) for group in groups]


# --- which records survive --------------------------------------------------------------------------------------------


class AbortedBatches:
    """Which batches belong to transactions that were aborted: nobody reads them, so they supersede nothing."""

    def __init__(self, aborted: Iterable[AbortedTransaction]) -> None:
        self._by_producer: dict[int, list[AbortedTransaction]] = {}
        for transaction in aborted:
            self._by_producer.setdefault(transaction.producer_id, []).append(transaction)

    def __contains__(self, header: BatchHeader) -> bool:
        if not self._by_producer or not header.is_transactional or header.is_control:
            return False
        return any(
            transaction.first_offset <= header.base_offset <= transaction.last_offset
            for transaction in self._by_producer.get(header.producer_id, ())
        )


class Transactions:
    """The transactions that have batches in the log, as a round that reads it from its start comes by.

    What is read counts, not what is written: the batches that this round takes away may come back, as the segments that
    they were in may not be replaced after all.
    """

    def __init__(self) -> None:
        self._begun: set[int] = set()
        """Producers of which a batch was met, and its marker not yet."""

    def note_batch(self, header: BatchHeader) -> None:
        """A batch that is not a marker, with records or without."""
        if header.is_transactional:
            self._begun.add(header.producer_id)

    def end(self, producer_id: int) -> bool:
        """The producer's marker: whether it ends a transaction of which something is left."""
        if producer_id in self._begun:
            self._begun.remove(producer_id)
            return True
        return False


class MarkerFate(Enum):
    """What becomes of a marker."""

    STAYS = auto()
    GETS_HORIZON = auto()
    """Nothing is left of its transaction, which no round has found before: its time begins now."""
    GOES = auto()


def fate_of_marker(header: BatchHeader, now_ms: int, *, ends_something: bool) -> MarkerFate:
    """A marker stays while a batch of its transaction does, and then until the horizon: a reader may be in between."""
    if ends_something:
        return MarkerFate.STAYS
    horizon_ms = header.delete_horizon_ms
    if horizon_ms is None:
        return MarkerFate.GETS_HORIZON
    return MarkerFate.GOES if horizon_ms <= now_ms else MarkerFate.STAYS


@dataclass(frozen=True, slots=True)
class Kept:
    """What stays of a batch."""

    spans: list[Span]
    sets_horizon: bool
    """Whether a tombstone is among them that no round has met before: its time begins now."""


def surviving(
    header: BatchHeader,
    spans: Sequence[Span],
    last_offsets: Mapping[bytes, int],
    map_key: Callable[[bytes], bytes],
    now_ms: int,
) -> Kept:
    """The records that stay: the last one of each key, tombstones for as long as their horizon says.

    A record without a key, from before the topic was compacted, has nothing to be found by and goes.
    """
    base_offset = header.base_offset
    horizon_ms = header.delete_horizon_ms
    drops_tombstones = horizon_ms is not None and horizon_ms <= now_ms
    kept: list[Span] = []
    tombstones = False
    last_of = last_offsets.get
    for span in spans:
        key = span.key
        if key is None or base_offset + span.offset_delta < last_of(map_key(key), _NOWHERE):
            continue
        if not span.has_value:
            if drops_tombstones:
                continue
            tombstones = True
        kept.append(span)
    return Kept(kept, tombstones and horizon_ms is None)
