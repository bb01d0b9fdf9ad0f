"""A live tail: what is written to a topic from now on, as far as a person can follow it.

`Tail.run` is the work of one thread with a client of its own, which asks every moment where the partitions end and
reads what is new; other threads call `after`, `pause`, `resume` and `stop`. What comes faster than a page can show is
passed over, the newest is kept, and how much that was is told. Memory is bounded by the ring.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from millrace.client.cluster import LATEST
from millrace.client.retrying import UNKNOWN
from millrace.client.settings import ClientSettings
from millrace.clock import Clock, SystemClock
from millrace.console.records.decoders import Format
from millrace.console.records.filters import Filter, Formats, parse
from millrace.console.records.found import Found, found
from millrace.console.records.plan import Span, partitions_of
from millrace.console.records.reading import MIN_FETCH_BYTES, ScanClient, ScanStopped, batches_of
from millrace.console.records.rows import Row, rows_of
from millrace.errors import ApiError, MillraceError
from millrace.model import TopicPartition

RING: Final = 500
POLL_S: Final = 0.25
_MOST_OFFSETS: Final = 50_000
"""What is read of a partition at a time; before that much from its end is passed over."""
_PAUSE_S: Final = 0.5

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TailRequest:
    """What to follow. `per_second` is how many records a page is given at most."""

    topic: str
    partitions: tuple[int, ...] | None = None
    filter_text: str = ""
    key_format: Format = Format.AUTO
    value_format: Format = Format.AUTO
    read_committed: bool = True
    per_second: int = 100


class Arrived(NamedTuple):
    """A record and its number in the tail; numbers go up by one."""

    number: int
    record: Found


@dataclass(frozen=True, slots=True)
class TailState:
    """How it goes, at one moment."""

    following: bool = False
    """Whether the brokers answer."""
    paused: bool = False
    over: bool = False
    seen: int = 0
    """Records that were looked at."""
    matched: int = 0
    dropped: int = 0
    """Records that came faster than they could be shown, matching or not looked at."""
    error: str = ""


class Tail:
    """One tail. `run` once, in a thread; see the module for what other threads may do."""

    def __init__(self, settings: ClientSettings, request: TailRequest, *, clock: Clock | None = None) -> None:
        """FilterError when the filter cannot be read."""
        self.request = request
        self.state = TailState()
        self._clock = clock or SystemClock()
        self._client = ScanClient(settings)
        formats = Formats(request.topic, request.key_format, request.value_format)
        self._filter: Filter = parse(request.filter_text, formats, now_ms=self._clock.wall_ms())
        self._ring: deque[Arrived] = deque(maxlen=RING)
        self._lock = threading.Lock()
        """Of the ring: a deque must not be appended to while another thread goes through it."""
        self._number = 0
        self._paused = threading.Event()
        self._positions: dict[TopicPartition, int] = {}
        self._second_s = 0.0
        self._in_second = 0

    def __repr__(self) -> str:
        return f"Tail({self.request.topic!r}, {self._number} records)"

    def after(self, number: int) -> list[Arrived]:
        """What came after the record with this number; 0 is before the first. What the ring has lost is lost."""
        with self._lock:
            return [each for each in self._ring if each.number > number]

    def pause(self) -> None:
        self._paused.set()

    def resume(self) -> None:
        """Go on where it paused, or as close to it as is worth reading."""
        self._paused.clear()

    def stop(self) -> None:
        """End it, whatever it waits for."""
        self._client.stop()

    def run(self) -> None:
        """Follow until stopped, or until the topic is gone: `state` says why. Raises only what is a bug."""
        try:
            while True:
                self._round()
                self._client.rest(POLL_S)
        except ScanStopped:
            self.state = replace(self.state, over=True, following=False)
        except MillraceError as error:
            self.state = replace(self.state, over=True, following=False, error=str(error))
        except Exception:
            logger.exception("the tail of %s broke off", self.request.topic)
            self.state = replace(self.state, over=True, following=False, error="it broke off: see the console's log")
            raise
        finally:
            self._client.close()

    def _round(self) -> None:
        if self._paused.is_set():
            self.state = replace(self.state, paused=True)
            return
        try:
            ends = self._ends()
            self.state = replace(self.state, following=True, paused=False, error="")
            for partition, end in ends.items():
                self._read(partition, end)
        except ApiError as error:
            if error.code in UNKNOWN:
                raise
            self.state = replace(self.state, following=False, error=str(error))
            self._client.rest(_PAUSE_S)

    def _ends(self) -> dict[TopicPartition, int]:
        """Where each partition ends now; a partition that is new is read from its beginning."""
        first = not self._positions
        chosen = partitions_of(self._client, self.request.topic, self.request.partitions)
        partitions = [TopicPartition(self.request.topic, each) for each in chosen]
        asked = self._client.list_offsets(dict.fromkeys(partitions, LATEST), read_committed=self.request.read_committed)
        ends = {each: offset or 0 for each, offset in asked.items()}
        for each, end in ends.items():
            self._positions.setdefault(each, end if first else 0)
        return ends

    def _read(self, partition: TopicPartition, end: int) -> None:
        low = self._positions[partition]
        if end < low:  # the topic was created anew, or the log was cut
            low = 0
        if end - low > _MOST_OFFSETS:
            self._count(dropped=end - _MOST_OFFSETS - low)
            low = end - _MOST_OFFSETS
        if low >= end:
            return
        span = Span(low, end)
        row = Row(self.request.topic, partition.partition, self.request.key_format, self.request.value_format)
        for batch in batches_of(
            self._client,
            partition,
            span,
            read_committed=self.request.read_committed,
            max_bytes=MIN_FETCH_BYTES,
            tell=lambda _text: None,
        ):
            if not batch.hidden and not batch.header.is_control:
                self._look_at(rows_of(row, batch.header, batch.records()), row, span)
            self._positions[partition] = batch.header.next_offset
            self._client.rest(0.000_2)
        self._positions[partition] = max(end, self._positions[partition])

    def _look_at(self, rows: Iterable[None], row: Row, span: Span) -> None:
        seen = matched = dropped = 0
        arrived: list[Found] = []
        for _ in rows:
            if span.low <= row.offset < span.high:
                seen += 1
                if self._filter.matches(row):
                    matched += 1
                    if self._may_show():
                        arrived.append(found(row))
                    else:
                        dropped += 1
        with self._lock:
            for record in arrived:
                self._number += 1
                self._ring.append(Arrived(self._number, record))
        self._count(seen, matched, dropped)

    def _may_show(self) -> bool:
        now = self._clock.monotonic()
        if now - self._second_s >= 1.0:
            self._second_s, self._in_second = now, 0
        self._in_second += 1
        return self._in_second <= self.request.per_second

    def _count(self, seen: int = 0, matched: int = 0, dropped: int = 0) -> None:
        state = self.state
        self.state = replace(
            state, seen=state.seen + seen, matched=state.matched + matched, dropped=state.dropped + dropped
        )
