"""For how long a group has been behind: the age of the first record that it has not read, partition by partition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from millrace.client.cluster import ClusterClient
from millrace.clock import Clock, SystemClock
from millrace.errors import ApiError
from millrace.model import TopicPartition
from millrace.records.batch import split
from millrace.records.decode import iter_records

FETCH_BYTES: Final = 16 * 1024
MAX_SECTION_BYTES: Final = 4 * 1024 * 1024
"""A batch that unpacks to more is judged by its head."""


def first_unread_ms(
    cluster: ClusterClient, offsets: Mapping[TopicPartition, int], *, limit_s: float, clock: Clock | None = None
) -> dict[TopicPartition, int]:
    """The time of the record at each offset, or of the next one that is left.

    One fetch for each partition, for as long as `limit_s`; what could not be asked until then is missing, and so is a
    partition whose leader does not answer, or that has nothing there.
    """
    clock = clock or SystemClock()
    deadline = clock.monotonic() + limit_s
    times: dict[TopicPartition, int] = {}
    for place, offset in offsets.items():
        if clock.monotonic() > deadline:
            break
        try:
            sent = cluster.send_fetch(place, offset, max_bytes=FETCH_BYTES, max_wait_ms=0)
            found = _time_at(bytes(cluster.receive_fetch(sent).records), offset)
        except ApiError:
            continue
        if found is not None:
            times[place] = found
    return times


def _time_at(records: bytes, offset: int) -> int | None:
    for batch in split(records, partial_end=True):
        if batch.header.last_offset < offset:
            continue
        try:
            for record in iter_records(batch.data, max_bytes=MAX_SECTION_BYTES):
                if record.offset >= offset:
                    return record.timestamp_ms
        except ApiError:
            return batch.header.max_timestamp_ms
    return None
