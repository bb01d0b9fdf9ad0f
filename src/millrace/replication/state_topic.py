"""A compacted topic as a map: how a coordinator keeps its state in the log.

`append` writes keys and values to one partition; `load` reads a partition back as the latest record of every key,
`replay` record by record. Not here: what keys and values mean, who may write (the coordinators own their topics;
clients are refused at Produce), and the markers that end transactions (`handlers.markers` writes them).

Invariants: a record counts only when `wait_committed` has returned; order within a partition is the order of `append`;
`load` sees everything that was appended before it began, in the order of the log, and nothing that is not committed.
A record of a transaction counts from the transaction's commit marker on, and never after an abort. Then, too, the
record of a key that lies last in the log is the one that counts, wherever the markers are: compaction keeps that one. A
record without a value that is in no transaction withdraws what open transactions have written for its key.

A new leader's log may end with records that are not committed, and that the next leader cuts off again: an answer that
was given from them would have been wrong. Kafka's coordinators load up to the end of the log, too, but keep snapshots
and answer from the one at the high watermark. Here there is one state, so loading waits until the high watermark has
reached the end that it found. Only the coordinator writes to the topic, so that this is the log as the epoch began with
it, as in `Partition.latest_offset`. Where too few replicas are in sync that waits for them, as every write would.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from millrace.errors import ApiError, ErrorCode
from millrace.model import NO_PRODUCER_ID
from millrace.records.batch import Batch, split
from millrace.records.control import MarkerType, decode_end_marker
from millrace.records.decode import iter_records, records_section
from millrace.records.encode import Record, encode_batch
from millrace.records.filtering import Span, record_spans, value_of
from millrace.replication.watermark import Reached

logger = logging.getLogger(__name__)

_SLICE_BYTES: Final = 64 * 1024
"""How much is read and decoded before the loop may run something else: about ten milliseconds of work."""
_SLICE_RECORDS: Final = 5000
"""The same for values of records whose keys are known."""
_READ_PER_SLICE: Final = 1000
"""The same for records that are understood and applied."""
_FIRST_SEQUENCE: Final = 0
"""Of every batch in a transaction, as Kafka's coordinator writes them: nobody looks for gaps between them."""


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

    def append(self, records: bytes, *, from_client: bool, verification: Any = None) -> StateAppend: ...

    def begin_verification(self, producer_id: int, epoch: int, sequence: int, *, bumps_epoch: bool) -> Any: ...

    def when_committed(self, last_offset: int, reached: Reached) -> bool: ...

    def is_committed(self, last_offset: int) -> bool: ...

    async def wait_committed(self, last_offset: int) -> None: ...


@dataclass(frozen=True, slots=True)
class StateRecord:
    """The latest record of a key; a value of None says that the key is gone."""

    offset: int
    key: bytes
    value: bytes | None
    producer_id: int = NO_PRODUCER_ID
    """Whose open transaction it is part of: it does not count yet."""


@dataclass(frozen=True, slots=True)
class Transaction:
    """The transaction that an append is part of."""

    producer_id: int
    producer_epoch: int
    verification: Any = None
    """What `StateTopic.begin_verification` gave, once the transaction's coordinator has agreed."""


_Found = tuple[int, bytes | bytearray, Span]
"""A record's offset, and where it is."""


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

    def append(
        self, index: int, entries: Sequence[Entry], now_ms: int, transaction: Transaction | None = None
    ) -> StateAppend:
        """Append one batch now; it is durable when `wait_committed(last_offset)` returns.

        Raises ApiError where it cannot be appended; then nothing was. In a transaction that is INVALID_PRODUCER_EPOCH
        where a newer producer is known, and INVALID_TXN_STATE where its coordinator has not agreed to this partition.
        """
        records = [Record(delta, now_ms, key, value) for delta, (key, value) in enumerate(entries)]
        partition = self._leading(index)
        partition.check_in_sync()
        if transaction is None:
            return partition.append(encode_batch(records, base_offset=0), from_client=False)
        batch = encode_batch(
            records,
            base_offset=0,
            producer_id=transaction.producer_id,
            producer_epoch=transaction.producer_epoch,
            base_sequence=_FIRST_SEQUENCE,
            transactional=True,
        )
        return partition.append(batch, from_client=False, verification=transaction.verification)

    def begin_verification(self, index: int, producer_id: int, producer_epoch: int, *, bumps_epoch: bool) -> Any:
        """What to hold while the coordinator of a transaction is asked about this partition; None: it has been.

        ApiError where the partition is led elsewhere, or the producer is an old one.
        """
        return self._leading(index).begin_verification(
            producer_id, producer_epoch, _FIRST_SEQUENCE, bumps_epoch=bumps_epoch
        )

    async def wait_committed(self, index: int, last_offset: int) -> None:
        """Return when the record is on every replica that counts. Cancellation changes nothing in the log."""
        await self._leading(index).wait_committed(last_offset)

    def when_committed(self, index: int, last_offset: int, reached: Reached) -> bool:
        """Have `reached` called when the record is on every replica that counts; False, and no call, where it is."""
        return self._leading(index).when_committed(last_offset, reached)

    def is_committed(self, index: int, last_offset: int) -> bool:
        """Whether the record is on every replica that counts."""
        return self._leading(index).is_committed(last_offset)

    async def load(self, index: int) -> list[StateRecord]:
        """The latest record of every key, tombstones included, in the order in which they came to count.

        Behind them is what open transactions have written: of each the latest record of every key. Reads in slices and
        lets the loop run between them. Cancellation ends the reading and nothing else.
        """
        latest = _Latest()
        async for batch in self._batches(index):
            header = batch.header
            if header.is_control:
                committed = self._is_commit(index, batch)
                if committed is not None:
                    latest.end(header.producer_id, committed=committed)
                continue
            # Most records are superseded: only their keys are read.
            _, data = records_section(batch.data)
            base_offset = header.base_offset
            keep = partial(latest.write, header.producer_id) if header.is_transactional else latest.put
            for span in record_spans(header, data):
                key = span.key
                if key is not None:
                    keep(key, (base_offset + span.offset_delta, data, span))
        records: list[StateRecord] = []
        for producer_id, key, (offset, data, span) in latest:
            records.append(StateRecord(offset, key, value_of(data, span), producer_id))
            if len(records) % _SLICE_RECORDS == 0:
                await yield_to_loop()
        return records

    def _is_commit(self, index: int, batch: Batch) -> bool | None:
        """Whether a control batch commits its producer's transaction; None where it ends none."""
        try:
            marker = decode_end_marker(batch.data)
        except ApiError as error:
            offset = batch.header.base_offset
            logger.warning("%s-%d: the control batch at %d is unreadable: %s", self.name, index, offset, error)
            return None
        return None if marker is None else marker.type is MarkerType.COMMIT

    async def latest(self, index: int) -> AsyncIterator[StateRecord]:
        """`load`, one by one: whoever reads it lets the loop run now and then."""
        for count, record in enumerate(await self.load(index), 1):
            yield record
            if count % _READ_PER_SLICE == 0:
                await yield_to_loop()

    async def replay(self, index: int) -> AsyncIterator[StateRecord]:
        """Every record that has a key, in the order of the log, up to its end as it is when this begins, all committed.

        For state whose records build on each other, and which no transaction writes to: records of one are passed over.
        Reads in slices and lets the loop run between them.
        """
        async for batch in self._batches(index):
            if batch.header.is_control or batch.header.is_transactional:
                continue
            for record in iter_records(batch.data):
                if record.key is not None:
                    yield StateRecord(record.offset, record.key, record.value)

    async def _batches(self, index: int) -> AsyncIterator[Batch]:
        """Every batch up to the end of the log as it is when this begins, markers included; all of it is committed."""
        state_log = self._leading(index).log
        end, limit = state_log.end_offset, state_log.end
        if end > state_log.start_offset:
            await self.wait_committed(index, end - 1)
        offset = self._leading(index).log.start_offset
        while offset < end:
            state_log = self._leading(index).log  # asked for again: it may lie in another directory by now
            data = state_log.read(offset, _SLICE_BYTES, limit=limit, at_least_one=True).data
            read_from = offset
            for batch in split(data):
                offset = batch.header.last_offset + 1
                yield batch
            if offset <= read_from:
                break
            await yield_to_loop()

    def _leading(self, index: int) -> StatePartition:
        partition = self._partition_of(index)
        if partition is None:
            raise ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER, f"{self.name}-{index} is not led by this broker")
        return partition


class _Latest:
    """What a log comes to, as far as it was read: the latest record of every key, and the open transactions."""

    def __init__(self) -> None:
        self._records: dict[bytes, _Found] = {}
        self._open: dict[int, dict[bytes, _Found]] = {}

    def __iter__(self) -> Iterator[tuple[int, bytes, _Found]]:
        for key, found in self._records.items():
            yield NO_PRODUCER_ID, key, found
        for producer_id, written in self._open.items():
            for key, found in written.items():
                yield producer_id, key, found

    def put(self, key: bytes, found: _Found) -> None:
        """A record that counts at once."""
        # Re-inserted, so that the dictionary stays in this order.
        self._records.pop(key, None)
        self._records[key] = found
        if self._open and not found[2].has_value:
            for written in self._open.values():
                written.pop(key, None)

    def write(self, producer_id: int, key: bytes, found: _Found) -> None:
        """A record of a transaction."""
        self._open.setdefault(producer_id, {})[key] = found

    def end(self, producer_id: int, *, committed: bool) -> None:
        """The marker of a transaction."""
        written = self._open.pop(producer_id, None)
        if written is None or not committed:
            return
        for key, found in written.items():
            known = self._records.get(key)
            if known is None or known[0] < found[0]:
                self.put(key, found)


async def yield_to_loop() -> None:
    """Let everything else that is ready on the event loop run once, so that long work does not keep it waiting."""
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
