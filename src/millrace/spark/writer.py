"""The sink: rows of a query, as Arrow batches, to topics; batch and streaming queries alike.

Columns are those of Spark's Kafka sink (key, value, headers, topic, partition) and `timestamp`, which that one
ignores. Here rows find their partitions; the bytes of record batches are made by `batches`, sequences and retries are
the business of `client.producing`. A topic that is missing is created by the brokers if they create topics by
themselves, as with Spark's Kafka sink.

What is promised: a task returns its commit message only after every row is acknowledged by all in-sync replicas, and
retries inside a task store each row once and in order. A task that Spark runs again writes its rows again: at least
once. `BatchFence` is where that decision is made.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

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

from millrace.client.cluster import ClusterClient
from millrace.client.producing import BatchProducer, Written
from millrace.client.settings import ClientSettings
from millrace.clock import SystemClock
from millrace.errors import ConfigError
from millrace.model import TopicPartition
from millrace.spark.batches import BatchSettings, Rows, encode_rows, partition_for_keys
from millrace.spark.options import SinkOptions
from millrace.spark.source import HEADERS
from millrace.spark.worker import settle

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

QUERY_ID_PROPERTY: Final = "sql.streaming.queryId"
BATCH_ID_PROPERTY: Final = "streaming.sql.batchId"

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


# --- what a repeated batch means --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchFence:
    """Which piece of which streaming batch a task writes: the same for every attempt at it, and for nothing else.

    Today nothing is fenced: a repeated batch is written again. Everything a fence needs is here: a transactional id
    that all attempts share, so that a later one shuts out an earlier one, and the batch's number, so that a batch
    that was committed can be recognised.
    """

    query_id: str
    batch_id: int
    task: int

    @classmethod
    def of(cls, local_property: Callable[[str], str | None], task: int) -> BatchFence | None:
        """What Spark tells a task by its local properties; None for a batch query, whose pieces have no name."""
        query_id, batch_id = local_property(QUERY_ID_PROPERTY), local_property(BATCH_ID_PROPERTY)
        if not query_id or not batch_id:
            return None
        return cls(query_id, int(batch_id), task)

    @property
    def transactional_id(self) -> str:
        return f"millrace-{self.query_id}-{self.task}"

    @staticmethod
    def is_done(fence: BatchFence | None) -> bool:
        """Whether the rows of this piece are known to be stored already, so that writing them can be left out."""
        del fence  # at least once: nobody keeps a record of what was committed
        return False


@dataclass(frozen=True)
class RowsWritten(WriterCommitMessage):
    """What one task stored, where."""

    fence: BatchFence | None
    partitions: Mapping[TopicPartition, Written] = field(default_factory=dict)

    @property
    def records(self) -> int:
        return sum(written.records for written in self.partitions.values())


# --- on the driver ----------------------------------------------------------------------------------------------------


class BatchWriter(DataSourceArrowWriter):
    """`df.write.format("millrace").mode("append").save()`."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise ConfigError("a topic cannot be overwritten: use mode('append')")
        self._options = options
        self._columns = SinkColumns.of(schema, options.topic)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> RowsWritten:
        return write_rows(iterator, self._options, self._columns)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Rows that were acknowledged stay: a log has no way to take them back."""


class StreamWriter(DataSourceStreamArrowWriter):
    """`df.writeStream.format("millrace").start()`; in complete mode each result is appended as a whole."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        del overwrite  # complete mode, in which Spark's Kafka sink appends too
        self._options = options
        self._columns = SinkColumns.of(schema, options.topic)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> RowsWritten:
        return write_rows(iterator, self._options, self._columns)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 (Spark's name)
        """Nothing is left to do: a task's rows are stored when it returns."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Rows that were acknowledged stay: a log has no way to take them back."""


# --- on an executor ---------------------------------------------------------------------------------------------------


def write_rows(batches: Iterable[pa.RecordBatch], options: SinkOptions, columns: SinkColumns) -> RowsWritten:
    """Write one task's rows; when this returns they are stored."""
    context = TaskContext.get()
    task = context.partitionId() if context is not None else 0
    fence = BatchFence.of(context.getLocalProperty, task) if context is not None else None
    if BatchFence.is_done(fence):
        return RowsWritten(fence)
    chunks = gather(batches, _GATHER_BYTES)
    first = next(chunks, None)
    if first is None:  # an empty task does not bother the brokers
        return RowsWritten(fence)
    settle()
    with kept_producer(options) as producer:
        # Where keyless rows begin: at random, or small tasks would all write to the first partitions.
        writer = RowWriter(producer, options, columns, start=random.randrange(1 << 16))  # noqa: S311 (no secret)
        writer.add(first)
        for chunk in chunks:
            writer.add(chunk)
        return RowsWritten(fence, writer.finish())


_kept: dict[tuple[ClientSettings, int], BatchProducer] = {}
"""Producers at rest, by what they were made from: at most a few, for a process writes to few clusters."""


@contextmanager
def kept_producer(options: SinkOptions) -> Iterator[BatchProducer]:
    """A producer that outlives the task: Spark uses a worker process for many tasks, one after another.

    Brokers remember every producer id for a day, so a stream must not take a new one for each of its batches.
    """
    made_from = (options.client, options.acks)
    producer = _kept.pop(made_from, None) or _new_producer(options)
    try:
        yield producer
    except BaseException:  # after a failure its sequences are in doubt
        producer.client.close()
        raise
    _kept[made_from] = producer
    while len(_kept) > _MAX_KEPT:
        _kept.pop(next(iter(_kept))).client.close()


def _new_producer(options: SinkOptions) -> BatchProducer:
    client = ClusterClient(options.client)
    try:
        return BatchProducer(client, acks=options.acks)
    except BaseException:
        client.close()
        raise


def close_kept_producers() -> None:
    """End the connections of producers at rest, before the end of the process does."""
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
