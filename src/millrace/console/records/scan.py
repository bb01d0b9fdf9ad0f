"""A scan of a topic: reads on the server, keeps what a filter lets through, and tells how far it is.

`Scan.run` is the work of one thread, which has a client of its own; every other thread may call `cancel` and look at
`progress`, `matches` and `continuation`, which are replaced or appended to and never changed in place.

Forwards, partitions are read side by side, and their matches are taken in the order of their times; in a partition the
order is that of the log. Backwards (newest first) each partition is read in windows from its end, until it has a page
of matches of its own; the page is put together from the ends of all of them. Either way a scan that stops before its
end says where to go on, and nothing is shown twice or left out between two pages.

Memory is bounded by the page and the fetches of the partitions that are read side by side: what is found beyond a page
is not kept, but found again by the next one. Where a filter names bytes that a match must have, records without them
are passed over unread (`filters`).

Python threads share one interpreter: a scan rests for a moment every few milliseconds, so that the web server is not
felt to wait.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from millrace.client.settings import ClientSettings
from millrace.clock import Clock, SystemClock
from millrace.console.records.filters import Filter, Formats, parse
from millrace.console.records.found import Found, found
from millrace.console.records.plan import Continuation, ScanRequest, Span, resolve
from millrace.console.records.reading import Batch, ScanClient, ScanStopped, batches_of, fetch_bytes
from millrace.console.records.rows import Row, rows_of
from millrace.errors import ApiError, MillraceError
from millrace.model import TopicPartition

OPEN_PARTITIONS: Final = 64
"""Read side by side; more of them wait for one to end."""
MAX_NOTES: Final = 20
WORK_S: Final = 0.003
REST_S: Final = 0.000_2
_LOOK_EVERY: Final = 256
"""Records between two looks at the clock."""
_TELL_EVERY_S: Final = 0.1
_SMALLEST_WINDOW: Final = 16
_FIRST_WINDOW: Final = 1_000
"""With a filter, of which nobody knows how much it lets through."""
_MAX_WINDOW: Final = 100_000
_MERGE_AFTER_PAGES: Final = 4
"""So much more than a page is kept before it is made anew, which costs time for each partition."""

logger = logging.getLogger(__name__)


class State(StrEnum):
    """What a scan is at, or how it has ended."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    """Everything that was asked for has been read."""
    PAGE = "page"
    """The page is full; there is more."""
    LIMIT = "limit"
    """The budget is used up; there is more."""
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        return self not in {State.WAITING, State.RUNNING}


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a scan is, at one moment."""

    state: State = State.WAITING
    records: int = 0
    """That were looked at, or passed over because they could not match."""
    size_bytes: int = 0
    """As they lie in the log."""
    matched: int = 0
    hidden: int = 0
    """Records of aborted transactions, which readers of committed ones do not see."""
    offsets_done: int = 0
    offsets_total: int = 0
    elapsed_s: float = 0.0
    retries: int = 0
    """How often a broker had to be asked again."""
    error: str = ""
    """Why it failed, or which limit ended it."""
    notes: tuple[str, ...] = ()
    """What else somebody who reads the matches has to know.

    Partitions that could not be read, damage, removed records.
    """

    @property
    def share(self) -> float:
        """How much of what was asked for has been read, from 0 to 1."""
        if self.state is State.DONE or not self.offsets_total:
            return 1.0 if self.state.is_over else 0.0
        return min(self.offsets_done / self.offsets_total, 1.0)

    @property
    def rate(self) -> float:
        """Records per second."""
        return self.records / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Until the end of what was asked for, at the present rate; None while nobody can tell."""
        if self.state.is_over or not self.offsets_done or not self.elapsed_s:
            return None
        return self.elapsed_s * (self.offsets_total - self.offsets_done) / self.offsets_done


class _PageFull(Exception):
    pass


class _LimitReached(Exception):
    pass


class Scan:
    """One scan. `run` once, in a thread; see the module for what other threads may do."""

    def __init__(
        self,
        settings: ClientSettings,
        request: ScanRequest,
        *,
        take: Callable[[Found], None] | None = None,
        cut: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`take` gets the matches of a forward scan instead of `matches`; `cut` is how many bytes of a part are kept.

        FilterError when the filter cannot be read.
        """
        self.request = request
        self.progress = Progress()
        self.matches: list[Found] = []
        self.continuation: Continuation | None = None
        self._clock = clock or SystemClock()
        self._client = ScanClient(settings)
        formats = Formats(request.topic, request.key_format, request.value_format)
        self._filter: Filter = parse(request.filter_text, formats, now_ms=self._clock.wall_ms())
        self._take = self.matches.append if take is None else take
        self._keep: Callable[[Row], Found] = found if cut is None else lambda row: found(row, limit=cut)
        self._records = self._bytes = self._matched = self._hidden = self._done = self._total = 0
        self._notes: list[str] = []
        self._failed: dict[int, str] = {}
        self._began_s = self._rested_s = self._told_s = 0.0

    def __repr__(self) -> str:
        return f"Scan({self.request.topic!r}, {self.progress.state}, {self.progress.records} records)"

    def cancel(self) -> None:
        """From any thread: end the scan, whatever it waits for. What was found stays."""
        self._client.stop()

    def run(self) -> None:
        """Scan to the end, to a limit, or until it is cancelled: `progress` says which. Raises only what is a bug."""
        for _ in self.steps():
            pass

    def steps(self) -> Iterator[None]:
        """`run`, for who has something to do between two batches; to close the iterator cancels the scan."""
        self._began_s = self._rested_s = self._clock.monotonic()
        state, reason = State.FAILED, "the scan broke off: see the console's log"
        try:
            self._tell(State.RUNNING)
            state, reason = yield from self._steps()
        except (ScanStopped, GeneratorExit) as stopped:
            state, reason = State.CANCELLED, ""
            if isinstance(stopped, GeneratorExit):
                raise
        except MillraceError as error:
            state, reason = State.FAILED, str(error)
        except Exception:
            logger.exception("a scan of %s broke off", self.request.topic)
            raise
        finally:
            self._client.close()
            self._tell(state, reason)

    def _steps(self) -> Generator[None, None, tuple[State, str]]:
        spans = resolve(self._client, self.request)
        self._total = sum(span.high - span.low for span in spans.values())
        work = _Backwards(self, spans) if self.request.backwards else _Forwards(self, spans)
        state, reason = State.DONE, ""
        try:
            yield from work.read()
        except _PageFull:
            state = State.PAGE
        except _LimitReached as limit:
            state, reason = State.LIMIT, str(limit)
        except ScanStopped:
            state = State.CANCELLED
        rest = work.finish()
        if self._failed and len(self._failed) == len(spans) and not self._records:
            return State.FAILED, next(iter(self._failed.values()))
        if rest and state is not State.DONE:
            self.continuation = Continuation(self.request.backwards, rest)
        elif state is not State.CANCELLED:
            state = State.DONE
        return state, reason

    # For the two directions.

    @property
    def page(self) -> int | None:
        return self.request.limits.matches

    def batches(self, partition: int, span: Span, *, side_by_side: int) -> Generator[Batch, None, None]:
        """The batches of a span that are to be looked at."""
        where = TopicPartition(self.request.topic, partition)
        with closing(
            batches_of(
                self._client,
                where,
                span,
                read_committed=self.request.read_committed,
                max_bytes=fetch_bytes(side_by_side),
                tell=self.note,
            )
        ) as found_batches:
            yield from found_batches

    def matching(self, batch: Batch, row: Row, span: Span) -> Iterator[Found]:
        """What the filter lets through of a batch, in its order; only offsets of `span` count."""
        header = batch.header
        self._bytes += header.size_bytes
        self._pace()
        if batch.hidden:
            self._hidden += header.count
            return
        if header.is_control and not self.request.include_control:
            return
        try:
            yield from self._of_batch(batch, row, span)
        except ApiError as error:
            self.note(
                f"partition {row.partition}: the batch at offset {header.base_offset} is damaged: {error.message}"
            )

    def _of_batch(self, batch: Batch, row: Row, span: Span) -> Iterator[Found]:
        header, wanted = batch.header, self._filter
        data = batch.records()
        whole = span.low <= header.base_offset and header.last_offset < span.high
        needle = b""
        if whole:
            self._records += header.count
            certain = wanted.needle_in(data)
            if certain is None:
                return
            needle = certain
        control = batch.control() if header.is_control else ""
        matches, low, high = wanted.matches, span.low, span.high
        countdown = _LOOK_EVERY
        for _ in rows_of(row, header, data, needle):
            countdown -= 1
            if not countdown:
                countdown = _LOOK_EVERY
                self._pace()
            if not whole:
                if not low <= row.offset < high:
                    continue
                self._records += 1
            if matches(row):
                kept = self._keep(row)
                yield replace(kept, control=control) if control else kept

    def take(self, match: Found) -> None:
        self._matched += 1
        self._take(match)
        if self.page is not None and self._matched >= self.page:
            raise _PageFull

    def count_match(self) -> None:
        self._matched += 1

    def passed(self, offsets: int) -> None:
        """So many more offsets are done."""
        self._done += offsets

    def check_limits(self) -> None:
        """Between two batches: whether it is enough."""
        limits = self.request.limits
        if self._client.is_stopped:
            raise ScanStopped
        if limits.records is not None and self._records >= limits.records:
            raise _LimitReached(f"{self._records:,} records were looked at")
        if limits.size_bytes is not None and self._bytes >= limits.size_bytes:
            raise _LimitReached(f"{self._bytes:,} bytes were read")
        if limits.seconds is not None and self._clock.monotonic() - self._began_s >= limits.seconds:
            raise _LimitReached(f"{limits.seconds:g} seconds are over")

    def lose(self, partition: int, error: ApiError) -> None:
        """A partition that cannot be read any further: the others go on."""
        self._failed[partition] = str(error)
        self.note(f"partition {partition} could not be read any further: {error}")

    def note(self, text: str) -> None:
        if len(self._notes) < MAX_NOTES:
            self._notes.append(text)

    def _pace(self) -> None:
        """Let others have the interpreter now and then, and tell how far it is."""
        now = self._clock.monotonic()
        if now - self._rested_s >= WORK_S:
            self._client.rest(REST_S)
            self._rested_s = self._clock.monotonic()
        if now - self._told_s >= _TELL_EVERY_S:
            self._tell(State.RUNNING)

    def _tell(self, state: State, error: str = "") -> None:
        now = self._told_s = self._clock.monotonic()
        self.progress = Progress(
            state=state,
            records=self._records,
            size_bytes=self._bytes,
            matched=self._matched,
            hidden=self._hidden,
            offsets_done=self._done,
            offsets_total=self._total,
            elapsed_s=now - self._began_s,
            retries=self._client.failures,
            error=error,
            notes=tuple(self._notes),
        )


# --- forwards ---------------------------------------------------------------------------------------------------------


class _Lane:
    """One partition that is read: its next match, the others of the same batch, and what is left of it."""

    __slots__ = ("batches", "match", "matches", "next_offset", "partition", "row", "span")

    def __init__(self, partition: int, span: Span, row: Row) -> None:
        self.partition = partition
        self.span = span
        self.row = row
        self.batches: Generator[Batch, None, None] | None = None
        self.next_offset = span.low
        """After the batch that is looked at."""
        self.matches: Iterator[Found] = iter(())
        self.match: Found | None = None
        """Found, but not taken: its turn comes by its time."""


class _Forwards:
    def __init__(self, scan: Scan, spans: Mapping[int, Span]) -> None:
        self._scan = scan
        request = scan.request
        self._lanes = [
            _Lane(partition, span, Row(request.topic, partition, request.key_format, request.value_format))
            for partition, span in sorted(spans.items())
            if span.low < span.high
        ]
        self._side_by_side = min(len(self._lanes), OPEN_PARTITIONS)

    def read(self) -> Iterator[None]:
        waiting = deque(self._lanes)
        heads: list[tuple[int, int, _Lane]] = []
        while waiting or heads:
            while waiting and len(heads) < OPEN_PARTITIONS:
                self._advance(waiting.popleft(), heads)
            if not heads:
                continue
            _, _, lane = heapq.heappop(heads)
            if lane.match is not None:
                self._done_up_to(lane, lane.match.offset + 1)
                self._scan.take(lane.match)
            lane.match = next(lane.matches, None)
            if lane.match is not None:
                heapq.heappush(heads, (lane.match.timestamp_ms, lane.partition, lane))
            else:
                self._done_up_to(lane, lane.next_offset)
                yield
                self._scan.check_limits()
                self._advance(lane, heads)

    def finish(self) -> dict[int, Span]:
        for lane in self._lanes:
            if lane.batches is not None:
                lane.batches.close()
        return {lane.partition: lane.span for lane in self._lanes if lane.span.low < lane.span.high}

    def _advance(self, lane: _Lane, heads: list[tuple[int, int, _Lane]]) -> None:
        """Have the next batch of a partition take its place among those of the others."""
        if lane.batches is None:
            lane.batches = self._scan.batches(lane.partition, lane.span, side_by_side=self._side_by_side)
        try:
            batch = next(lane.batches, None)
        except ApiError as error:
            self._scan.lose(lane.partition, error)
            batch = None
        if batch is None:
            self._done_up_to(lane, lane.span.high)
            return
        lane.next_offset = batch.header.next_offset
        lane.matches = self._scan.matching(batch, lane.row, lane.span)
        heapq.heappush(heads, (batch.first_ms, lane.partition, lane))

    def _done_up_to(self, lane: _Lane, offset: int) -> None:
        low, high = lane.span
        offset = min(max(offset, low), high)
        self._scan.passed(offset - low)
        lane.span = Span(offset, high)


# --- backwards --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Window:
    """What has been read of the end of a partition.

    All its matches that may be on the page, in the order of the log.
    """

    rest: Span
    """What was not read, or has matches that are not among the newest."""
    matches: list[Found] = field(default_factory=list)
    oldest_ms: int | None = None
    """The time of the oldest batch that was read."""
    is_enough: bool = False
    """Some of its matches are too old for the page: those before them need not be looked for."""


class _Backwards:
    """Partitions grow by windows until the page is certain; then it is as if all of them had been merged by time.

    It is certain when no partition can have a newer match that was not read: each has some that are too old for the
    page, or its last window begins before the oldest of the page, or it was read to its beginning.
    """

    def __init__(self, scan: Scan, spans: Mapping[int, Span]) -> None:
        self._scan = scan
        self._page = scan.page if scan.page is not None else _MAX_WINDOW
        self._windows = {partition: _Window(span) for partition, span in sorted(spans.items())}
        fair = 2 * self._page // max(len(self._windows), 1)
        first = _FIRST_WINDOW if scan.request.filter_text.strip() else max(fair, _SMALLEST_WINDOW)
        self._size = min(first, _MAX_WINDOW)
        self._unmerged = 0
        """Matches that were found since the page was last made."""

    def read(self) -> Iterator[None]:
        """Window by window; a limit ends it only between two of them, since half a window says nothing of its end."""
        while behind := [partition for partition, window in self._windows.items() if self._is_behind(window)]:
            for partition in behind:
                self._extend(self._windows[partition], partition)
                if self._unmerged >= _MERGE_AFTER_PAGES * self._page:
                    self._merge()
                yield
                self._scan.check_limits()
            self._merge()
            self._size = min(self._size * 4, _MAX_WINDOW)
        if any(window.rest.low < window.rest.high for window in self._windows.values()):
            raise _PageFull

    def finish(self) -> dict[int, Span]:
        self._merge()
        return {
            partition: window.rest for partition, window in self._windows.items() if window.rest.low < window.rest.high
        }

    def _is_behind(self, window: _Window) -> bool:
        if window.is_enough or window.rest.low >= window.rest.high:
            return False
        page = self._scan.matches
        if len(page) < self._page or window.oldest_ms is None:
            return True
        return window.oldest_ms >= page[-1].timestamp_ms

    def _extend(self, window: _Window, partition: int) -> None:
        scan, rest = self._scan, window.rest
        span = Span(max(rest.low, rest.high - self._size), rest.high)
        request = scan.request
        row = Row(request.topic, partition, request.key_format, request.value_format)
        newest: deque[Found] = deque(maxlen=self._page)
        found_here = 0
        times: list[int] = []
        try:
            for batch in scan.batches(partition, span, side_by_side=1):
                times.append(batch.first_ms)
                for match in scan.matching(batch, row, span):
                    newest.append(match)
                    found_here += 1
                    scan.count_match()
        except ApiError as error:
            scan.lose(partition, error)
            window.rest = Span(rest.high, rest.high)
            return
        scan.passed(span.high - span.low)
        self._unmerged += len(newest)
        window.matches = [*newest, *window.matches]
        window.rest = Span(rest.low, span.low)
        window.oldest_ms = min(times, default=window.oldest_ms)
        if found_here > len(newest):  # those before them were not kept
            window.rest = Span(rest.low, newest[0].offset)
            window.is_enough = True

    def _merge(self) -> None:
        """Make the page of what the partitions have at their ends, the newest first; forget what is not on it."""
        ends = [
            (-window.matches[-1].timestamp_ms, partition, len(window.matches) - 1)
            for partition, window in self._windows.items()
            if window.matches
        ]
        heapq.heapify(ends)
        page: list[Found] = []
        while ends and len(page) < self._page:
            _, partition, index = heapq.heappop(ends)
            matches = self._windows[partition].matches
            page.append(matches[index])
            if index:
                heapq.heappush(ends, (-matches[index - 1].timestamp_ms, partition, index - 1))
        for _, partition, index in ends:
            window = self._windows[partition]
            window.rest = Span(window.rest.low, window.matches[index].offset + 1)
            window.matches = window.matches[index + 1 :]
            window.is_enough = True
        self._scan.matches = page
        self._unmerged = 0
