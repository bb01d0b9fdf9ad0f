"""Reading a range of a partition ahead of its reader: the next fetch is on the wire while the last one is decoded.

Decoding is not here. No thread: the next request is sent before an answer is handed out, and the kernel keeps what the
broker sends until it is asked for. Owner: who iterates has the client for itself.

Invariants:
- At most one fetch is under way. One that fails is nobody's business: it is asked again in the way that waits and
  retries, so that errors come from `ClusterClient.fetch` alone.
- What was handed out may be overwritten as soon as the next one is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from millrace.client.blocking import ReceiveBuffer
from millrace.client.cluster import ClusterClient, Fetched, FetchUnderWay
from millrace.client.settings import DEFAULT_FETCH_BYTES
from millrace.clock import SystemClock
from millrace.errors import ApiError, ErrorCode
from millrace.model import TopicPartition
from millrace.records.batch import last_complete

DEFAULT_MAX_WAIT_MS: Final = 500
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


def read_range(client: ClusterClient, wanted: FetchRange) -> Iterator[Fetched]:
    """The fetches of a range, in order; those of a generator that is closed early end the connection they came from.

    It ends when the range is covered. Records outside the range may be among those fetched. OFFSET_OUT_OF_RANGE where
    the log does not have the range, and also when it stays shorter than the range for `retry_timeout_ms`.
    """
    offset = wanted.start_offset
    max_bytes = wanted.max_bytes
    last_progress = _CLOCK.monotonic()
    buffer = ReceiveBuffer()
    sent: FetchUnderWay | None = None
    try:
        while offset < wanted.end_offset:
            fetched = None if sent is None else _received(client, sent, buffer)
            sent = None
            if fetched is None:
                fetched = client.fetch(
                    wanted.partition,
                    offset,
                    max_bytes=max_bytes,
                    max_wait_ms=wanted.max_wait_ms,
                    read_committed=wanted.read_committed,
                    buffer=buffer,
                )
            try:
                following = next_offset(fetched.records, offset)
            except ApiError as error:
                raise ApiError(error.code, f"{wanted.partition} at offset {offset}: {error.message}") from error
            if following > offset:
                offset = following
                if offset < wanted.end_offset:
                    sent = _sent(client, wanted, offset, max_bytes)
                yield fetched
                last_progress = _CLOCK.monotonic()
            elif fetched.records:  # not even one batch fits: only brokers older than Kafka 0.10.1 cut the first one
                if max_bytes == _MAX_FETCH_BYTES:
                    raise ApiError(ErrorCode.RECORD_LIST_TOO_LARGE, f"{wanted.partition}: no whole batch at {offset}")
                max_bytes = min(max_bytes * 2, _MAX_FETCH_BYTES)
            elif (_CLOCK.monotonic() - last_progress) * 1000 > client.settings.retry_timeout_ms:
                raise _nothing_more(wanted, offset, fetched)
    finally:
        if sent is not None:
            sent.connection.close()


def _sent(client: ClusterClient, wanted: FetchRange, offset: int, max_bytes: int) -> FetchUnderWay | None:
    try:
        return client.send_fetch(
            wanted.partition,
            offset,
            max_bytes=max_bytes,
            max_wait_ms=wanted.max_wait_ms,
            read_committed=wanted.read_committed,
        )
    except ApiError:
        return None  # `fetch` meets it again, and knows what to do


def _received(client: ClusterClient, sent: FetchUnderWay, buffer: ReceiveBuffer) -> Fetched | None:
    try:
        return client.receive_fetch(sent, buffer)
    except ApiError:
        return None


def next_offset(records: memoryview, offset: int) -> int:
    """Where to go on after `records`, of which an incomplete last batch is left out; `offset` when there is none."""
    last = last_complete(records)
    return offset if last is None else max(offset, last.next_offset)


def _nothing_more(wanted: FetchRange, offset: int, fetched: Fetched) -> ApiError:
    limit = fetched.last_stable_offset if wanted.read_committed else fetched.high_watermark
    if limit < wanted.end_offset:
        return ApiError(
            ErrorCode.OFFSET_OUT_OF_RANGE,
            f"{wanted.partition} was to be read up to offset {wanted.end_offset}, but ends at {limit}",
        )
    return ApiError(ErrorCode.REQUEST_TIMED_OUT, f"{wanted.partition}: the broker has nothing at offset {offset}")
