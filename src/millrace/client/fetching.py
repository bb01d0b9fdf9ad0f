"""Reading a range of a partition ahead of its reader: the next fetch is on the wire while the last one is decoded.

Decoding is not here. Owner: a thread that has the client for itself fills a bounded queue; the reader's thread takes
from it. Invariants: at most `depth` fetches are held; what fails in the thread is raised in the reader; after `close`
the thread is gone, and with it the client's connections unless the range was read to its end.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Self

from millrace.client.cluster import ClusterClient, Fetched
from millrace.client.settings import DEFAULT_FETCH_BYTES
from millrace.clock import SystemClock
from millrace.errors import ApiError, ErrorCode
from millrace.model import TopicPartition
from millrace.records.batch import split

DEFAULT_MAX_WAIT_MS: Final = 500
DEFAULT_DEPTH: Final = 4
_MAX_FETCH_BYTES: Final = (1 << 31) - 1
_CLOCK: Final = SystemClock()


@dataclass(frozen=True, slots=True)
class FetchRange:
    """What to read: the records with `start_offset <= offset < end_offset`."""

    partition: TopicPartition
    start_offset: int
    end_offset: int
    read_committed: bool = False
    max_bytes: int = DEFAULT_FETCH_BYTES
    max_wait_ms: int = DEFAULT_MAX_WAIT_MS


@dataclass(frozen=True, slots=True)
class _Failure:
    error: BaseException


class FetchAhead:
    """Iterate over it for the fetches of a range, in order; `close` it, or use it in a `with` statement.

    It ends when the range is covered. Records outside the range may be among those fetched. OFFSET_OUT_OF_RANGE where
    the log does not have the range, and also when it stays shorter than the range for `retry_timeout_ms`.
    """

    def __init__(self, client: ClusterClient, wanted: FetchRange, *, depth: int = DEFAULT_DEPTH) -> None:
        """`client` is lent: nobody else may use it before `close`. One that was closed early is of no further use."""
        self._wanted = wanted
        self._client = client
        self._fetched: queue.Queue[Fetched | _Failure | None] = queue.Queue(depth)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._at_end = False

    def __repr__(self) -> str:
        wanted = self._wanted
        return f"FetchAhead({wanted.partition}, {wanted.start_offset} to {wanted.end_offset})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Fetched]:
        if self._thread is not None or self._closing.is_set():
            raise RuntimeError("a FetchAhead is read once")
        if self._wanted.start_offset >= self._wanted.end_offset:
            return
        # A daemon, so that a reader that was never closed cannot keep a finished process alive.
        self._thread = threading.Thread(target=self._run, name=f"fetch {self._wanted.partition}", daemon=True)
        self._thread.start()
        while (item := self._fetched.get()) is not None:
            if isinstance(item, _Failure):
                raise item.error
            yield item
        self._at_end = True

    def close(self) -> None:
        """Stop reading ahead and wait for the thread; harmless when repeated."""
        self._closing.set()
        if self._thread is None:
            return
        if not self._at_end:
            self._client.interrupt()
        while self._thread.is_alive():
            try:  # room for a thread that waits to hand over what it has
                self._fetched.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)
        if not self._at_end:
            self._client.close()

    # On the thread.

    def _run(self) -> None:
        try:
            for fetched in read_range(self._client, self._wanted):
                self._put(fetched)
                if self._closing.is_set():
                    return
            self._put(None)
        except BaseException as error:  # noqa: BLE001 (raised again where it is waited for)
            self._put(_Failure(error))

    def _put(self, item: Fetched | _Failure | None) -> None:
        if not self._closing.is_set():
            self._fetched.put(item)


def read_range(client: ClusterClient, wanted: FetchRange) -> Iterator[Fetched]:
    """The fetches of a range, each when it is asked for: what `FetchAhead` does, without the thread."""
    offset = wanted.start_offset
    max_bytes = wanted.max_bytes
    last_progress = _CLOCK.monotonic()
    while offset < wanted.end_offset:
        fetched = client.fetch(
            wanted.partition,
            offset,
            max_bytes=max_bytes,
            max_wait_ms=wanted.max_wait_ms,
            read_committed=wanted.read_committed,
        )
        try:
            following = next_offset(fetched.records, offset)
        except ApiError as error:
            raise ApiError(error.code, f"{wanted.partition} at offset {offset}: {error.message}") from error
        if following > offset:
            yield fetched
            offset = following
            last_progress = _CLOCK.monotonic()
        elif fetched.records:  # not even one batch fits: only brokers older than Kafka 0.10.1 cut the first one
            if max_bytes == _MAX_FETCH_BYTES:
                raise ApiError(ErrorCode.RECORD_LIST_TOO_LARGE, f"{wanted.partition}: no whole batch at {offset}")
            max_bytes = min(max_bytes * 2, _MAX_FETCH_BYTES)
        elif (_CLOCK.monotonic() - last_progress) * 1000 > client.settings.retry_timeout_ms:
            raise _nothing_more(wanted, offset, fetched)


def next_offset(records: memoryview, offset: int) -> int:
    """Where to go on after `records`, of which an incomplete last batch is left out; `offset` when there is none."""
    for batch in split(records, partial_end=True):
        offset = max(offset, batch.header.next_offset)
    return offset


def _nothing_more(wanted: FetchRange, offset: int, fetched: Fetched) -> ApiError:
    limit = fetched.last_stable_offset if wanted.read_committed else fetched.high_watermark
    if limit < wanted.end_offset:
        return ApiError(
            ErrorCode.OFFSET_OUT_OF_RANGE,
            f"{wanted.partition} was to be read up to offset {wanted.end_offset}, but ends at {limit}",
        )
    return ApiError(ErrorCode.REQUEST_TIMED_OUT, f"{wanted.partition}: the broker has nothing at offset {offset}")
