"""The batches of a partition for a scan: what is asked again, what is passed over, and what ends a partition.

One thread. A `ScanClient` is a cluster client that can be told from another thread to stop: what it waits for fails,
and `ScanStopped` takes the place of the next attempt. Not here: what is looked for (`scan`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Final, NamedTuple

from millrace.client.blocking import BlockingConnection, Pending
from millrace.client.cluster import EARLIEST, LATEST, ClusterClient
from millrace.client.fetching import FetchRange, read_range
from millrace.client.retrying import UNKNOWN
from millrace.client.settings import ClientSettings
from millrace.console.records.found import NO_LIMIT, Found, found
from millrace.console.records.plan import Span, partitions_of
from millrace.console.records.rows import Bytes, Row, rows_of
from millrace.errors import ApiError, ErrorCode
from millrace.model import TopicPartition
from millrace.records.aborted import AbortedTransactions
from millrace.records.batch import BatchHeader, TimestampType, crc_matches, split
from millrace.records.control import decode_end_marker
from millrace.records.decode import records_section
from millrace.wire.schema import Request

MAX_SECTION_BYTES: Final = 64 * 1024 * 1024
"""What the records of one batch may decompress to."""
FETCH_ROOM_BYTES: Final = 32 * 1024 * 1024
MIN_FETCH_BYTES: Final = 64 * 1024
MAX_FETCH_BYTES: Final = 2 * 1024 * 1024
FETCH_WAIT_MS: Final = 100
REQUEST_TIMEOUT_MS: Final = 10_000
CONNECT_TIMEOUT_MS: Final = 3_000
RETRY_TIMEOUT_MS: Final = 20_000
"""How long a broker that is gone is waited for: somebody is looking at the page."""

Tell = Callable[[str], None]


class ScanStopped(Exception):
    """The scan was told to stop."""


class ScanClient(ClusterClient):
    """A cluster client for work that somebody waits for, and may give up."""

    def __init__(self, settings: ClientSettings) -> None:
        super().__init__(
            replace(
                settings,
                request_timeout_ms=min(settings.request_timeout_ms, REQUEST_TIMEOUT_MS),
                connect_timeout_ms=min(settings.connect_timeout_ms, CONNECT_TIMEOUT_MS),
                retry_timeout_ms=min(settings.retry_timeout_ms, RETRY_TIMEOUT_MS),
            )
        )
        self._stopped = threading.Event()
        self.failures = 0
        """How often something had to be tried again."""

    def stop(self) -> None:
        """From any thread: end what is being done."""
        self._stopped.set()
        self.interrupt()

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    def pause(self, seconds: float) -> None:
        """Wait between two attempts; ScanStopped when told to stop."""
        self.failures += 1
        self.rest(seconds)

    def rest(self, seconds: float) -> None:
        """Wait, and let other threads go on; ScanStopped when told to stop."""
        if self._stopped.wait(seconds):
            raise ScanStopped

    def send(self, connection: BlockingConnection, message: Request, *, at_most: int | None = None) -> Pending:
        """As every client does, unless told to stop."""
        if self._stopped.is_set():
            raise ScanStopped
        return super().send(connection, message, at_most=at_most)


class Batch(NamedTuple):
    """A batch whose records may be looked at, or that is only passed over (`hidden`, without records)."""

    header: BatchHeader
    data: memoryview
    hidden: bool = False

    @property
    def first_ms(self) -> int:
        header = self.header
        return (
            header.max_timestamp_ms if header.timestamp_type is TimestampType.LOG_APPEND else header.base_timestamp_ms
        )

    def records(self) -> Bytes:
        """Uncompressed; ApiError for what is damaged."""
        if not crc_matches(self.data):
            raise ApiError(ErrorCode.CORRUPT_MESSAGE, "its CRC does not match its bytes")
        return records_section(self.data, MAX_SECTION_BYTES)[1]

    def control(self) -> str:
        """What a control batch says."""
        marker = decode_end_marker(self.data)
        return "control" if marker is None else marker.type.name.lower()


def fetch_bytes(partitions: int) -> int:
    """How much to ask for at a time when so many partitions are read side by side."""
    return min(max(FETCH_ROOM_BYTES // (2 * max(partitions, 1)), MIN_FETCH_BYTES), MAX_FETCH_BYTES)


def batches_of(
    client: ScanClient, partition: TopicPartition, span: Span, *, read_committed: bool, max_bytes: int, tell: Tell
) -> Generator[Batch, None, None]:
    """The batches of a span in their order, each valid until the next one is asked for.

    What was removed meanwhile at the beginning of the log is told and passed over. ApiError: there is no more to be
    had.
    """
    low, high = span
    while low < high:
        wanted = FetchRange(partition, low, high, read_committed, max_bytes, FETCH_WAIT_MS)
        try:
            for fetched in read_range(client, wanted):
                aborted = AbortedTransactions(fetched.aborted) if read_committed else None
                for header, data in split(fetched.records, partial_end=True):
                    hidden = aborted is not None and _is_hidden(aborted, header, data)
                    if header.last_offset < low:
                        continue
                    if header.base_offset >= high:
                        break
                    yield Batch(header, data, hidden)
                    low = header.next_offset
        except ApiError as error:
            if error.code in UNKNOWN:
                raise ApiError(
                    error.code, f"partition {partition.partition} is gone: was the topic deleted?"
                ) from error
            if error.code is not ErrorCode.OFFSET_OUT_OF_RANGE:
                raise
            low = _after_a_cut(client, partition, low, high, tell)


def _is_hidden(aborted: AbortedTransactions, header: BatchHeader, data: memoryview) -> bool:
    hides = aborted.hides(data, header.attributes, header.producer_id, header.last_offset)
    return hides and not header.is_control


def _after_a_cut(client: ScanClient, partition: TopicPartition, low: int, high: int, tell: Tell) -> int:
    """Where to go on when the log does not have `low` any more."""
    earliest = client.list_offsets({partition: EARLIEST})[partition] or 0
    latest = client.list_offsets({partition: LATEST})[partition] or 0
    where = f"partition {partition.partition}"
    if earliest > low:
        tell(f"{where}: records before offset {earliest} were removed while they were being read")
        return min(earliest, high)
    tell(f"{where} ends at offset {latest} now: what came after it is gone, or the topic was created anew")
    return high


def read_one(
    settings: ClientSettings, topic: str, partition: int, offset: int, *, limit: int = NO_LIMIT
) -> Found | None:
    """The record at an offset, whole unless there is a `limit`; None where there is none. ApiError."""
    with ScanClient(settings) as client:
        where = TopicPartition(topic, partition)
        partitions_of(client, topic, [partition])
        low = client.list_offsets({where: EARLIEST})[where] or 0
        high = client.list_offsets({where: LATEST})[where] or 0
        if not low <= offset < high:
            return None
        row = Row(topic, partition)
        span = Span(offset, offset + 1)
        for batch in batches_of(
            client, where, span, read_committed=False, max_bytes=MIN_FETCH_BYTES, tell=lambda _text: None
        ):
            for _ in rows_of(row, batch.header, batch.records()):
                if row.offset == offset:
                    whole = found(row, limit=limit)
                    return replace(whole, control=batch.control()) if batch.header.is_control else whole
    return None
