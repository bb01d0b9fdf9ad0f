"""A compacted topic as a map: how a coordinator keeps its state in the log.

`append` writes keys and values to one partition; `load` reads a partition back as the latest record of every key,
`replay` record by record. Not here: what keys and values mean, and who may write (the coordinators own their topics;
clients are refused at Produce).

Invariants: a record counts only when `wait_committed` has returned; order within a partition is the order of `append`;
`load` sees everything that was appended before it began, in the order of the log, and nothing that is not committed.

A new leader's log may end with records that are not committed, and that the next leader cuts off again: an answer that
was given from them would have been wrong. Kafka's coordinators load up to the end of the log, too, but keep snapshots
and answer from the one at the high watermark. Here there is one state, so loading waits until the high watermark has
reached the end that it found. Only the coordinator writes to the topic, so that this is the log as the epoch began with
it, as in `Partition.latest_offset`. Where too few replicas are in sync that waits for them, as every write would.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from millrace.errors import ApiError, ErrorCode
from millrace.records.batch import Batch, split
from millrace.records.decode import iter_records, records_section
from millrace.records.encode import Record, encode_batch
from millrace.records.filtering import Span, record_spans, value_of

_SLICE_BYTES: Final = 64 * 1024
"""How much is read and decoded before the loop may run something else: about ten milliseconds of work."""
_SLICE_RECORDS: Final = 5000
"""The same for values of records whose keys are known."""
_READ_PER_SLICE: Final = 1000
"""The same for records that are understood and applied."""


class StateRead(Protocol):
    """What a log gives back."""

    @property
    def data(self) -> bytes | memoryview: ...


class StateLog(Protocol):
    """The part of `storage.log.Log` that is needed here."""

    @property
    def start_offset(self) -> int: ...

    @property
    def end_offset(self) -> int: ...

    @property
    def end(self) -> Any: ...

    def read(self, offset: int, max_bytes: int, *, limit: Any, at_least_one: bool) -> StateRead: ...


class StateAppend(Protocol):
    """Where an append ended up."""

    @property
    def base_offset(self) -> int: ...

    @property
    def last_offset(self) -> int: ...


class StatePartition(Protocol):
    """The part of `replication.partition.Partition` that is needed here."""

    @property
    def leader_epoch(self) -> int: ...

    @property
    def log(self) -> StateLog: ...

    def check_in_sync(self) -> None: ...

    def append(self, records: bytes, *, from_client: bool) -> StateAppend: ...

    async def wait_committed(self, last_offset: int) -> None: ...


@dataclass(frozen=True, slots=True)
class StateRecord:
    """The latest record of a key; a value of None says that the key is gone."""

    offset: int
    key: bytes
    value: bytes | None


Entry = tuple[bytes, bytes | None]


class StateTopic:
    """One internal topic. `partition_of` returns a partition only while this broker leads it."""

    def __init__(
        self, name: str, partition_of: Callable[[int], StatePartition | None], partition_count: Callable[[], int]
    ) -> None:
        self.name = name
        self._partition_of = partition_of
        self._partition_count = partition_count

    def __repr__(self) -> str:
        return f"StateTopic({self.name}, {self._partition_count()} partitions)"

    @property
    def partition_count(self) -> int:
        return self._partition_count()

    def partition_for(self, key: str) -> int:
        """The partition that keeps the state of `key`: by Java's hash of the string, as Kafka chooses it."""
        return (java_hash(key) & 0x7FFFFFFF) % self._partition_count()

    def leader_epoch(self, index: int) -> int | None:
        """The epoch in which this broker leads the partition, or None where it does not."""
        partition = self._partition_of(index)
        return None if partition is None else partition.leader_epoch

    def append(self, index: int, entries: Sequence[Entry], now_ms: int) -> StateAppend:
        """Append one batch now; it is durable when `wait_committed(last_offset)` returns.

        Raises ApiError where it cannot be appended; then nothing was.
        """
        records = [Record(delta, now_ms, key, value) for delta, (key, value) in enumerate(entries)]
        partition = self._leading(index)
        partition.check_in_sync()
        return partition.append(encode_batch(records, base_offset=0), from_client=False)

    async def wait_committed(self, index: int, last_offset: int) -> None:
        """Return when the record is on every replica that counts. Cancellation changes nothing in the log."""
        await self._leading(index).wait_committed(last_offset)

    async def load(self, index: int) -> list[StateRecord]:
        """The latest record of every key, tombstones included, in the order of the log.

        Reads in slices and lets the loop run between them. Cancellation ends the reading and nothing else.
        """
        latest: dict[bytes, tuple[int, bytes | bytearray, Span]] = {}
        async for batch in self._batches(index):
            # Most records are superseded: only their keys are read.
            header, data = records_section(batch.data)
            base_offset = header.base_offset
            for span in record_spans(header, data):
                key = span.key
                if key is not None:
                    # Re-inserted, so that the dictionary stays in the order of the log.
                    latest.pop(key, None)
                    latest[key] = base_offset + span.offset_delta, data, span
        found: list[StateRecord] = []
        for key, (offset, data, span) in latest.items():
            found.append(StateRecord(offset, key, value_of(data, span)))
            if len(found) % _SLICE_RECORDS == 0:
                await breathe()
        return found

    async def latest(self, index: int) -> AsyncIterator[StateRecord]:
        """`load`, one by one: whoever reads it lets the loop run now and then."""
        for count, record in enumerate(await self.load(index), 1):
            yield record
            if count % _READ_PER_SLICE == 0:
                await breathe()

    async def replay(self, index: int) -> AsyncIterator[StateRecord]:
        """Every record that has a key, in the order of the log, up to its end as it is when this begins, all committed.

        For state whose records build on each other. Reads in slices and lets the loop run between them.
        """
        async for batch in self._batches(index):
            for record in iter_records(batch.data):
                if record.key is not None:
                    yield StateRecord(record.offset, record.key, record.value)

    async def _batches(self, index: int) -> AsyncIterator[Batch]:
        log = self._leading(index).log
        end, limit = log.end_offset, log.end
        if end > log.start_offset:
            await self.wait_committed(index, end - 1)
        offset = self._leading(index).log.start_offset
        while offset < end:
            log = self._leading(index).log  # asked for again: it may have been moved to another directory meanwhile
            data = log.read(offset, _SLICE_BYTES, limit=limit, at_least_one=True).data
            read_from = offset
            for batch in split(data):
                offset = batch.header.last_offset + 1
                if not batch.header.is_control:
                    yield batch
            if offset <= read_from:
                break
            await breathe()

    def _leading(self, index: int) -> StatePartition:
        partition = self._partition_of(index)
        if partition is None:
            raise ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER, f"{self.name}-{index} is not led by this broker")
        return partition


async def breathe() -> None:
    """Let everything else that is ready on the loop run once."""
    loop = asyncio.get_running_loop()
    turn = loop.create_future()
    loop.call_soon(_done, turn)
    await turn


def _done(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


def java_hash(text: str) -> int:
    """`String.hashCode` of Java: over UTF-16 code units, modulo 2^32."""
    value = 0
    units = text.encode("utf-16-be", "surrogatepass")
    for position in range(0, len(units), 2):
        value = (31 * value + (units[position] << 8 | units[position + 1])) & 0xFFFFFFFF
    return value
