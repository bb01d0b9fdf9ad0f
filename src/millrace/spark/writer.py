"""The sink: rows of a query, as Arrow batches, to topics; batch and streaming queries alike.

Columns are those of Spark's Kafka sink (key, value, headers, topic, partition) and `timestamp`, which that one
ignores. Here rows find their partitions; the bytes of record batches are made by `batches`, sequences and retries are
the business of `client.producing`. A topic that is missing is created by the brokers if they create topics by
themselves, as with Spark's Kafka sink.

What is promised: a task returns its commit message only after every row is acknowledged by all in-sync replicas, and
retries inside a task store each row once and in order. What a repeated task or batch means is option `delivery`: with
at-least-once it writes its rows again, with exactly-once see `exactly_once`, which has the protocol; here it is only
applied. A batch query outside of a stream has no number by which a repetition could be known: with exactly-once its
tasks write in transactions that the driver commits when all are done.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    StringType,
    StructType,
    TimestampType,
)

from millrace.client import transactions
from millrace.client.cluster import ClusterClient
from millrace.client.producing import BatchProducer, Written
from millrace.client.transactions import Transaction
from millrace.clock import SystemClock
from millrace.errors import ApiError, ConfigError
from millrace.model import TopicPartition
from millrace.spark import exactly_once
from millrace.spark.batches import BatchSettings, Rows, encode_rows, partition_for_keys
from millrace.spark.decisions import DecisionLog
from millrace.spark.exactly_once import BatchFence, Part
from millrace.spark.options import Delivery, SinkOptions
from millrace.spark.source import HEADERS
from millrace.spark.worker import prepare_worker

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_GATHER_BYTES: Final = 8 * 1024 * 1024
"""Rows are partitioned in chunks of at least this size where there are as many, so that batches are not tiny."""
_MAX_KEPT: Final = 4
_CLOCK: Final = SystemClock()


# --- planning ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SinkColumns:
    """Where in a row the parts of a record are; None for a column that the query does not have."""

    value: int
    key: int | None = None
    headers: int | None = None
    topic: int | None = None
    partition: int | None = None
    timestamp: int | None = None

    @classmethod
    def of(cls, schema: StructType, topic: str | None) -> SinkColumns:
        """The columns by name; any others are left alone. ConfigError for one that is missing or of the wrong type.

        A topic option wins over a topic column, as in Spark's Kafka sink.
        """
        value = _find(schema, "value", StringType(), BinaryType())
        if value is None:
            raise ConfigError("the sink needs a column 'value', a string or binary: rename or cast one of the query's")
        topic_column = None if topic is not None else _find(schema, "topic", StringType())
        if topic is None and topic_column is None:
            raise ConfigError(
                "the sink does not know where to write: set option 'topic' or add a string column 'topic'"
            )
        return cls(
            value=value,
            key=_find(schema, "key", StringType(), BinaryType()),
            headers=_find(schema, "headers", HEADERS),
            topic=topic_column,
            partition=_find(schema, "partition", IntegerType()),
            timestamp=_find(schema, "timestamp", TimestampType()),
        )


def _find(schema: StructType, name: str, *kinds: DataType) -> int | None:
    for index, column in enumerate(schema.fields):
        if column.name == name:
            # Whether something inside may be null does not matter: what must not be is checked row by row.
            if column.dataType.simpleString() in {kind.simpleString() for kind in kinds}:
                return index
            wanted = " or ".join(kind.simpleString() for kind in kinds)
            raise ConfigError(f"column '{name}' must be {wanted}, not {column.dataType.simpleString()}: cast it")
    return None


# --- what tasks tell the driver ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowsWritten(WriterCommitMessage):
    """What one task stored, where, and in which open transaction if in one."""

    fence: BatchFence | None
    partitions: Mapping[TopicPartition, Written] = field(default_factory=dict)
    part: Part | None = None
    lone: Transaction | None = None
    """The transaction of a task of a batch query."""
    was_decided: bool = False
    """Whether the rows were left out, because the batch was decided before."""

    @property
    def records(self) -> int:
        return sum(written.records for written in self.partitions.values())


# --- on the driver ----------------------------------------------------------------------------------------------------


class BatchWriter(DataSourceArrowWriter):
    """`df.write.format("millrace").mode("append").save()`, also in a function for foreachBatch."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise ConfigError("a topic cannot be overwritten: use mode('append')")
        self._options = options
        self._columns = SinkColumns.of(schema, options.topic)
        self._name = str(uuid.uuid4())

    def write(self, iterator: Iterator[pa.RecordBatch]) -> RowsWritten:
        return write_rows(iterator, self._options, self._columns, self._begin)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Have what the tasks wrote counted; with at-least-once it counts already."""
        commit(self._options, messages)
        lone = _lone(messages)
        if lone:
            with kept_log(self._options) as log:
                refused = transactions.end(log.client, lone, commit=True)
            for transaction, error in refused.items():
                raise ApiError(error.code, f"{error.message} (transaction '{transaction.transactional_id}')")

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """With at-least-once, rows that were acknowledged stay: a log has no way to take them back."""
        abort(self._options, messages)
        lone = _lone(messages)
        if lone:
            with kept_log(self._options) as log:
                transactions.end(log.client, lone, commit=False)

    def _begin(self, log: DecisionLog) -> RowsWritten:
        fence = _fence(self._options, other_run=self._name)
        timeout_ms = self._options.transaction_timeout_ms
        if fence is None:
            return RowsWritten(None, lone=exactly_once.begin_alone(log.client, timeout_ms))
        if not fence.sink_name:
            raise ConfigError(
                "a write in foreachBatch needs a name for delivery=exactly-once, which tells it from the other "
                "writes of the batch: set option sinkName, the same in every batch"
            )
        begun = _begun(log, fence, timeout_ms)
        if begun.was_decided:
            decided = log.state(fence.sink).decided
            if decided is not None and decided.batch_id == fence.batch_id and decided.series.run == fence.run:
                # A batch is repeated by another run, so this is not a repetition.
                raise ConfigError(
                    f"batch {fence.batch_id} was written under the sinkName '{fence.sink_name}' already: "
                    "give every write of a batch a name of its own"
                )
        return begun


class StreamWriter(DataSourceStreamArrowWriter):
    """`df.writeStream.format("millrace").start()`; in complete mode each result is appended as a whole."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        del overwrite  # complete mode, in which Spark's Kafka sink appends too
        self._options = options
        self._columns = SinkColumns.of(schema, options.topic)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> RowsWritten:
        return write_rows(iterator, self._options, self._columns, self._begin)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803, ARG002 (Spark's)
        """Have what the tasks wrote counted; with at-least-once it counts already."""
        commit(self._options, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803, ARG002
        """With at-least-once, rows that were acknowledged stay: a log has no way to take them back."""
        abort(self._options, messages)

    def _begin(self, log: DecisionLog) -> RowsWritten:
        fence = _fence(self._options)
        if fence is None or not fence.run:
            raise ConfigError("Spark does not say which query this is: set option delivery to at-least-once")
        return _begun(log, fence, self._options.transaction_timeout_ms)


def commit(options: SinkOptions, messages: Iterable[WriterCommitMessage | None]) -> None:
    """Decide for a micro-batch, or finish what was decided; nothing to do where no task took part."""
    told = _taking_part(messages)
    if not told:
        return
    parts = {each.part: tuple(each.partitions) for each in told if each.part is not None}
    fences = [each.fence for each in told if each.fence is not None]
    losers = [
        each.fence.usual_id(each.part.series) for each in told if each.fence and each.part and not each.part.usual
    ]
    with kept_log(options) as log:
        exactly_once.commit(log, fences[0], parts, losers)


def abort(options: SinkOptions, messages: Iterable[WriterCommitMessage | None]) -> None:
    """Give up what is not decided."""
    told = [each for each in _taking_part(messages) if each.part is not None]
    if told:
        with kept_log(options) as log:
            fence = told[0].fence
            assert fence is not None
            exactly_once.abort(log, fence, [each.part for each in told if each.part is not None])


def _taking_part(messages: Iterable[WriterCommitMessage | None]) -> list[RowsWritten]:
    return [each for each in messages if isinstance(each, RowsWritten) and (each.part is not None or each.was_decided)]


def _lone(messages: Iterable[WriterCommitMessage | None]) -> list[Transaction]:
    return [each.lone for each in messages if isinstance(each, RowsWritten) and each.lone is not None]


# --- on an executor ---------------------------------------------------------------------------------------------------


def write_rows(
    batches: Iterable[pa.RecordBatch],
    options: SinkOptions,
    columns: SinkColumns,
    begin: Callable[[DecisionLog], RowsWritten],
) -> RowsWritten:
    """Write one task's rows; when this returns they are stored. `begin` is asked where there are transactions."""
    chunks = gather(batches, _GATHER_BYTES)
    first = next(chunks, None)
    if first is None:  # an empty task does not bother the brokers
        return RowsWritten(_fence(options))
    prepare_worker()
    if options.delivery is not Delivery.EXACTLY_ONCE:
        with kept_producer(options) as producer:
            return RowsWritten(_fence(options), _write(producer, options, columns, first, chunks))
    with kept_log(options) as log:
        begun = begin(log)
        transaction = begun.lone if begun.part is None else begun.part.transaction
        if transaction is None:
            return begun
        try:
            producer = BatchProducer(log.client, transaction=transaction)
            return replace(begun, partitions=_write(producer, options, columns, first, chunks))
        except BaseException:
            transactions.abandon(log.client, transaction)
            raise


def _write(
    producer: BatchProducer,
    options: SinkOptions,
    columns: SinkColumns,
    first: pa.RecordBatch,
    others: Iterable[pa.RecordBatch],
) -> dict[TopicPartition, Written]:
    # Where keyless rows begin: at random, or small tasks would all write to the first partitions.
    writer = RowWriter(producer, options, columns, start=random.randrange(1 << 16))  # noqa: S311 (no secret)
    writer.add(first)
    for chunk in others:
        writer.add(chunk)
    return writer.finish()


def _fence(options: SinkOptions, *, other_run: str = "") -> BatchFence | None:
    context = TaskContext.get()
    if context is None:
        return None
    fence = BatchFence.of(
        context.getLocalProperty, context.partitionId(), sink_name=options.sink_name, other_run=other_run
    )
    return fence and replace(fence, attempt=context.attemptNumber(), attempt_id=context.taskAttemptId())


def _begun(log: DecisionLog, fence: BatchFence, timeout_ms: int) -> RowsWritten:
    part = exactly_once.begin_part(log, fence, timeout_ms)
    return RowsWritten(fence, part=part, was_decided=part is None)


class _WithClient(Protocol):
    """What is kept between tasks."""

    client: ClusterClient


K = TypeVar("K", bound=_WithClient)

_kept: dict[Hashable, Any] = {}
"""Producers and logs at rest, by what they were made from: at most a few, for a process writes to few clusters."""


@contextmanager
def _kept_or_new(made_from: Hashable, options: SinkOptions, make: Callable[[ClusterClient], K]) -> Iterator[K]:
    """Something that outlives the task: Spark uses a worker process for many tasks, one after another."""
    lent: K | None = _kept.pop(made_from, None)
    if lent is None:
        client = ClusterClient(options.client)
        try:
            lent = make(client)
        except BaseException:
            client.close()
            raise
    try:
        yield lent
    except BaseException:  # after a failure the sequences of a producer are in doubt, and answers may be under way
        lent.client.close()
        raise
    _kept[made_from] = lent
    while len(_kept) > _MAX_KEPT:
        _kept.pop(next(iter(_kept))).client.close()


@contextmanager
def kept_producer(options: SinkOptions) -> Iterator[BatchProducer]:
    """An idempotent producer. Brokers remember every producer id for a day, so a stream must not take a new one for
    each of its batches.
    """
    with _kept_or_new(
        (options.client, options.acks), options, lambda client: BatchProducer(client, acks=options.acks)
    ) as producer:
        yield producer


@contextmanager
def kept_log(options: SinkOptions) -> Iterator[DecisionLog]:
    """The log of decisions, with a client for everything else. What it has read once, it need not read again."""
    topic = options.decisions_topic
    with _kept_or_new((options.client, topic), options, lambda client: DecisionLog(client, topic)) as log:
        yield log


def close_kept_producers() -> None:
    """End the connections of what is at rest, before the end of the process does."""
    while _kept:
        _kept.popitem()[1].client.close()


def gather(batches: Iterable[pa.RecordBatch], size_bytes: int) -> Iterator[pa.RecordBatch]:
    """The same rows in the same order, in batches of at least `size_bytes`, the last one apart; empty ones left out."""
    waiting: list[pa.RecordBatch] = []
    waiting_bytes = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        waiting.append(batch)
        waiting_bytes += batch.nbytes
        if waiting_bytes >= size_bytes:
            yield _joined(waiting)
            waiting, waiting_bytes = [], 0
    if waiting:
        yield _joined(waiting)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


class RowWriter:
    """Sends rows to the partitions they belong to. Owner: one task's thread."""

    def __init__(self, producer: BatchProducer, options: SinkOptions, columns: SinkColumns, *, start: int = 0) -> None:
        """`start` is the partition, modulo their number, where rows without a key begin."""
        self._producer = producer
        self._options = options
        self._columns = columns
        self._start = start
        self._partition_counts: dict[str, int] = {}
        self._turns: dict[str, int] = {}

    def add(self, rows: pa.RecordBatch) -> None:
        """Encode and send the rows of one chunk, the rows of a partition in their order."""
        key = _column(rows, self._columns.key)
        headers = _column(rows, self._columns.headers)
        records = Rows.of(key, rows.column(self._columns.value), headers, self._timestamps_ms(rows))
        for topic, selected in self._by_topic(rows):
            partitions = self._partitions(topic, rows, selected, rows.nbytes * len(selected) // rows.num_rows)
            for partition, indexes in _groups(partitions):
                self._send(TopicPartition(topic, partition), records, selected[indexes])

    def finish(self) -> dict[TopicPartition, Written]:
        """Wait until everything is stored."""
        self._producer.flush()
        return self._producer.take_written()

    def _send(self, partition: TopicPartition, records: Rows, rows: Int64s) -> None:
        settings = BatchSettings(
            codec=self._options.codec,
            max_batch_bytes=self._producer.largest_batch(partition, self._options.max_batch_bytes),
            producer_id=self._producer.producer_id,
            producer_epoch=self._producer.producer_epoch,
            base_sequence=self._producer.next_sequence(partition),
            transactional=self._producer.transaction is not None,
        )
        for batch in encode_rows(records, rows, settings):
            self._producer.add(partition, batch.data, batch.count)

    def _timestamps_ms(self, rows: pa.RecordBatch) -> Int64s:
        now_ms = _CLOCK.wall_ms()
        column = _column(rows, self._columns.timestamp)
        if column is None:
            return np.full(rows.num_rows, now_ms, np.int64)
        # Not a cast to milliseconds, which cuts towards zero: before 1970 that would be a millisecond too late.
        micros = pc.cast(column, pa.timestamp("us", column.type.tz)).cast(pa.int64())
        return np.asarray(pc.fill_null(micros, now_ms * 1000).to_numpy(zero_copy_only=False)) // 1000

    def _by_topic(self, rows: pa.RecordBatch) -> Iterator[tuple[str, Int64s]]:
        """Each topic with the numbers of its rows."""
        if self._options.topic is not None:
            yield self._options.topic, np.arange(rows.num_rows, dtype=np.int64)
            return
        assert self._columns.topic is not None
        column = rows.column(self._columns.topic)
        if column.null_count:
            raise ConfigError("a row has a null topic: give every row one, or set option 'topic' for all of them")
        encoded = column.dictionary_encode()
        for code, numbers in _groups(np.asarray(encoded.indices.to_numpy(), np.int32)):
            yield encoded.dictionary[code].as_py(), numbers

    def _partitions(self, topic: str, rows: pa.RecordBatch, selected: Int64s, size_bytes: int) -> Int32s:
        """The partition of each selected row: what its column says, or its key, or whose turn it is."""
        count = self._partition_count(topic)
        partitions = np.full(len(selected), -1, np.int32)
        key = _column(rows, self._columns.key)
        if key is not None and key.null_count < len(key):
            taken = key if len(selected) == len(key) else key.take(pa.array(selected))
            partitions = partition_for_keys(taken, count)
        chosen = _column(rows, self._columns.partition)
        if chosen is not None:
            numbers = np.asarray(pc.fill_null(chosen, -1).to_numpy(zero_copy_only=False), np.int32)[selected]
            given = np.asarray(chosen.is_valid().to_numpy(zero_copy_only=False))[selected]
            _check_partitions(topic, numbers[given], count)
            partitions = np.where(given, numbers, partitions).astype(np.int32)
        keyless = np.flatnonzero(partitions < 0)
        if len(keyless):
            partitions[keyless] = self._spread(topic, len(keyless), size_bytes * len(keyless) // len(selected), count)
        return partitions

    def _partition_count(self, topic: str) -> int:
        if topic not in self._partition_counts:
            self._partition_counts[topic] = self._producer.client.partition_count(topic, create=True)
        return self._partition_counts[topic]

    def _spread(self, topic: str, rows: int, size_bytes: int, partition_count: int) -> Int32s:
        """Partitions for rows without a key: a whole batch to each in turn, for full batches cost the least."""
        turn = self._turns.setdefault(topic, self._start)
        batches = min(max(-(-size_bytes // self._options.max_batch_bytes), 1), rows)
        self._turns[topic] = turn + batches
        return ((turn + np.arange(rows, dtype=np.int64) * batches // rows) % partition_count).astype(np.int32)


def _column(rows: pa.RecordBatch, index: int | None) -> Any:
    return None if index is None else rows.column(index)


def _check_partitions(topic: str, numbers: Int32s, count: int) -> None:
    if len(numbers) and (int(numbers.min()) < 0 or int(numbers.max()) >= count):
        wrong = numbers[(numbers < 0) | (numbers >= count)][0]
        raise ConfigError(f"column 'partition' has {wrong}, but topic '{topic}' has the partitions 0 to {count - 1}")


def _groups(numbers: Int32s) -> Iterator[tuple[int, Int64s]]:
    """Each distinct number with the places where it stands, in their order."""
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    for first, last in zip(starts, [*starts[1:], len(ordered)], strict=True):
        yield int(ordered[first]), order[first:last]
