"""The readers behind `format("millrace")`: offsets are decided in the driver, ranges of records are read by the tasks.

`LogView` asks the brokers what a plan needs, `BatchReader` and `StreamReader` are what Spark calls, `read_partition` is
the work of a task. Not here: options, the arithmetic of offsets (`offsets`), how bytes become columns.

How Spark drives a stream reader: one object lives in one process for as long as the query runs, and is asked in turn
for `latestOffset`, `partitions` and, later, `commit`. Tasks get a pickled copy that has settings and nothing else.

Invariants:
- A task reads exactly `start <= offset < end` of what the log holds, whatever compaction and markers leave out.
- Lost data is an error that names partition and offsets, or with failOnDataLoss=false a warning; never silence.
- The first micro-batch of a query that starts at the latest offsets is empty. It makes the checkpoint remember where
  the query began: without it a restart before the first commit would begin later, and lose what came in between.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Self

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from millrace.client.cluster import ClusterClient
from millrace.client.requests import Fetched, TopicInfo
from millrace.client.settings import ClientSettings
from millrace.clock import SystemClock
from millrace.errors import ApiError, ConfigError, ErrorCode, MillraceError
from millrace.model import TopicPartition
from millrace.spark import offsets as of
from millrace.spark.offsets import AtOffsets, AtTime, AtTimes, Edge, OffsetRange, Offsets, Position
from millrace.spark.options import SourceOptions, TimestampStrategy
from millrace.spark.worker import leave_if_abandoned, prepare_worker

if TYPE_CHECKING:
    import pyarrow as pa

    from millrace.spark.columns import RecordColumns

try:
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, ReadMinRows, SupportsTriggerAvailableNow
except ImportError:  # Spark 4.1: latestOffset() has no arguments, and Trigger.AvailableNow is Spark's own business

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """Stands for the class of Spark 4.2."""


TOPICS_MAX_AGE_S: Final = 1.0
"""An idle query polls a hundred times a second; topics and partitions are not listed that often."""
SHRUNK_ATTEMPTS: Final = 5
SHRUNK_PAUSE_S: Final = 0.2
LAG_TIMEOUT_MS: Final = 5_000

_UNKNOWN: Final = frozenset({ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID})
_CLOCK: Final = SystemClock()
logger = logging.getLogger(__name__)


class DataLost(MillraceError):
    """Records that the query was to read are gone, and failOnDataLoss says that this is an error."""


@dataclass(frozen=True)
class RangePartition(InputPartition):
    """What one task reads, as it is pickled to the executor: one range, or several small ones."""

    ranges: tuple[OffsetRange, ...]


class BatchReader(DataSourceReader):
    """A batch query: a plan when it starts, then a range per task."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options.for_batch()
        self._schema = schema

    def partitions(self) -> list[RangePartition]:
        options = self._options
        assert options.starting is not None and options.ending is not None
        with LogView(options) as view:
            partitions = view.partitions()
            earliest = view.earliest(partitions)  # first, so that retention cannot come between it and the start
            start = view.resolve(options.starting, partitions, "startingOffsets")
            end = view.resolve(options.ending, partitions, "endingOffsets")
            latest = view.latest(partitions)
        beyond = of.beyond(start, latest, "startingOffsets") + of.beyond(end, latest, "endingOffsets")
        report(beyond, fail=options.fail_on_data_loss)
        start, end = of.at_most(start, latest), of.at_most(end, latest)
        plan = of.plan(start, {each: max(end[each], start[each]) for each in end}, earliest)
        report(plan.losses, fail=options.fail_on_data_loss)
        return _tasks(plan.ranges, options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(self._options, self._schema, partition)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming query. Only the copy in the driver's process has state; it is asked by one thread."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options.for_stream()
        self._schema = schema
        self._view = LogView(self._options)
        self._lag = _LagReporter(self._options)
        self._initial: Offsets | None = None
        self._announce = False
        """Whether the next micro-batch must be the empty one that puts the initial offsets into the checkpoint."""
        self._reached: Offsets | None = None
        """Up to where micro-batches have been planned: where the next one starts, for Spark 4.1 does not say it."""
        self._stop_at_latest = False
        self._target: Offsets | None = None
        self._newest: Offsets | None = None
        self._last_trigger_s: float | None = None
        self._planned: tuple[Offsets, Offsets, list[RangePartition]] | None = None

    def __reduce__(self) -> tuple[type[StreamReader], tuple[SourceOptions, StructType]]:
        return StreamReader, (self._options, self._schema)

    def initialOffset(self) -> dict[str, dict[str, int]]:  # noqa: N802
        return of.to_json(self._first_offsets())

    def latestOffset(  # noqa: N802
        self, start: dict[str, Any] | None = None, limit: Any = None
    ) -> dict[str, dict[str, int]]:
        begin = self._begin(start)
        self._lag.reached(begin)
        self._newest = newest = self._newest_after(begin)
        if self._announce:
            self._announce = False
            if begin == self._initial:
                return of.to_json(begin)
        return of.to_json(self._within_limits(begin, newest, limit))

    def getDefaultReadLimit(self) -> ReadAllAvailable:  # noqa: N802
        if self._options.max_offsets_per_trigger is not None:
            return ReadMaxRows(self._options.max_offsets_per_trigger)  # type: ignore[return-value]
        if self._options.min_offsets_per_trigger is not None:
            return ReadMinRows(self._options.min_offsets_per_trigger)  # type: ignore[return-value]
        return ReadAllAvailable()

    def reportLatestOffset(self) -> dict[str, dict[str, int]] | None:  # noqa: N802
        return None if self._newest is None else of.to_json(self._newest)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._stop_at_latest = True

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[RangePartition]:
        begin, until = _of_checkpoint(start), _of_checkpoint(end)
        self._reached = until
        if begin == until:
            return []
        if self._planned is not None and self._planned[:2] == (begin, until):
            return self._planned[2]  # Spark may ask more than once for one micro-batch
        tasks = self._plan(begin, until)
        self._planned = (begin, until, tasks)
        return tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(self._options, self._schema, partition)

    def commit(self, end: dict[str, Any]) -> None:
        self._lag.reached(_of_checkpoint(end))

    def stop(self) -> None:
        self._view.close()
        self._lag.close()
        leave_if_abandoned()

    # Inside.

    def _first_offsets(self) -> Offsets:
        if self._initial is None:
            starting = self._options.starting
            assert starting is not None
            self._initial = self._view.resolve(starting, self._view.partitions(), "startingOffsets")
            self._announce = _moves(starting, self._options)
        return self._initial

    def _begin(self, start: dict[str, Any] | None) -> Offsets:
        if start is not None:
            return _of_checkpoint(start)
        # Spark 4.1. A query that goes on from a checkpoint was asked for the (empty) partitions of its last offset.
        if self._newest is None and self._options.max_offsets_per_trigger is not None:
            logger.warning(
                "with trigger availableNow, Spark before 4.2 stops after one micro-batch of maxOffsetsPerTrigger"
            )
        return self._first_offsets() if self._reached is None else self._reached

    def _newest_after(self, begin: Offsets) -> Offsets:
        """The latest offsets; those of the first call when the query is to stop at what was there then."""
        if self._target is not None:
            return self._target
        newest = self._newest_not_before(begin)
        gone = [
            f"partition {each} is gone; it had been read up to offset {begin[each]}" for each in begin.keys() - newest
        ]
        if gone and self._options.fail_on_data_loss:
            # Before Spark writes an offset without them to the checkpoint; otherwise the plan warns.
            report(sorted(gone), fail=True)
        if self._stop_at_latest:
            self._target = newest
        return newest

    def _newest_not_before(self, begin: Offsets) -> Offsets:
        """Asks again for a while when a partition seems to end before `begin`: a new leader may learn its end late."""
        newest: Offsets = {}
        for attempt in range(SHRUNK_ATTEMPTS):
            newest = self._view.newest(fresh=attempt > 0)
            if all(offset >= begin.get(each, 0) for each, offset in newest.items()):
                return newest
            self._view.pause(SHRUNK_PAUSE_S)
        if self._options.fail_on_data_loss:
            known = {each: begin[each] for each in newest if each in begin}
            report(of.plan(known, newest, dict.fromkeys(newest, 0)).losses, fail=True)
        return newest

    def _within_limits(self, begin: Offsets, newest: Offsets, limit: Any) -> Offsets:
        most, least = self._options.max_offsets_per_trigger, self._options.min_offsets_per_trigger
        if type(limit).__name__ == "ReadAllAvailable" or (most is None and least is None):
            return newest
        starts = {**self._view.earliest([each for each in newest if each not in begin]), **begin}
        now = _CLOCK.monotonic()
        if least is not None and not self._stop_at_latest:
            waited_ms = (now - self._last_trigger_s) * 1000 if self._last_trigger_s is not None else float("inf")
            if of.is_delayed(of.available(starts, newest), least, waited_ms, self._options.max_trigger_delay_ms):
                return begin
        self._last_trigger_s = now
        return newest if most is None else of.limited(starts, newest, most)

    def _plan(self, begin: Offsets, until: Offsets) -> list[RangePartition]:
        if begin == self._initial:
            # The first micro-batch is run again after a crash: its end is in the checkpoint, its start was asked anew.
            begin = {each: min(offset, until[each]) for each, offset in begin.items() if each in until}
        known = set(self._view.known_partitions(fresh=True))
        earliest = self._view.earliest([each for each in until if each in known])
        plan = of.plan(begin, until, earliest)
        report(plan.losses, fail=self._options.fail_on_data_loss)
        return _tasks(plan.ranges, self._options)


class LogView:
    """What the driver sees of the logs: which partitions there are, where they begin and end. Close it after use."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._client = ClusterClient(options.client)
        self._topics: dict[str, TopicInfo] = {}
        self._listed_at_s = float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def pause(self, seconds: float) -> None:
        self._client.pause(seconds)

    def partitions(self) -> list[TopicPartition]:
        """The partitions that the options name, in order; ApiError when a topic or partition does not exist."""
        found = self.known_partitions(fresh=True)
        subscription = self._options.subscription
        missing = [topic for topic in subscription.topics if topic not in self._topics]
        lost = sorted(set(subscription.assigned) - set(found))
        if missing or lost:
            what = f"topic {', '.join(map(repr, missing))}" if missing else f"partition {of.describe(lost)}"
            servers = ",".join(f"{host}:{port}" for host, port in self._options.client.bootstrap_servers)
            raise ApiError(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                f"{what} does not exist on {servers}: create it, or correct the option "
                f"{'subscribe' if missing else 'assign'}",
            )
        return found

    def known_partitions(self, *, fresh: bool = False) -> list[TopicPartition]:
        """The same without an error for what is missing; a listing is kept for a moment unless it must be `fresh`."""
        now = _CLOCK.monotonic()
        if fresh or now - self._listed_at_s > TOPICS_MAX_AGE_S:
            self._topics = self._list_topics()
            self._listed_at_s = now
        found = {TopicPartition(name, number) for name, topic in self._topics.items() for number in topic.partitions}
        assigned = self._options.subscription.assigned
        return sorted(found.intersection(assigned) if assigned else found)

    def earliest(self, partitions: Iterable[TopicPartition]) -> Offsets:
        return self._list_offsets(dict.fromkeys(partitions, of.EARLIEST))

    def latest(self, partitions: Iterable[TopicPartition]) -> Offsets:
        """The next offset to be written; with read_committed, the end of what is decided."""
        return self._list_offsets(dict.fromkeys(partitions, of.LATEST))

    def newest(self, *, fresh: bool = False) -> Offsets:
        """The latest offsets of the partitions that exist."""
        try:
            return self.latest(self.known_partitions(fresh=fresh))
        except ApiError as error:
            if error.code not in _UNKNOWN or fresh:
                raise
        return self.latest(self.known_partitions(fresh=True))  # one of those listed a moment ago was deleted

    def resolve(self, position: Position, partitions: Sequence[TopicPartition], option: str) -> Offsets:
        """The offset of `position` in each of `partitions`; `option` is the one to name in errors."""
        if isinstance(position, Edge):
            return self._list_offsets(dict.fromkeys(partitions, position.value))
        if isinstance(position, AtOffsets):
            _check_same(position.offsets, partitions, option)
            edges = {each: offset for each, offset in position.offsets.items() if offset < 0}
            return {**position.offsets, **self._list_offsets(edges)}
        times = position.timestamps_ms if isinstance(position, AtTimes) else _at(position, partitions)
        if isinstance(position, AtTimes):
            _check_same(times, partitions, f"{option}ByTimestamp")
        return self._at_times(times, option)

    def _at_times(self, times: Mapping[TopicPartition, int], option: str) -> Offsets:
        found = self._client.list_offsets(times, read_committed=self._options.read_committed)
        younger = [each for each, offset in found.items() if offset is None]
        if younger and option == "startingOffsets" and self._options.timestamp_strategy is TimestampStrategy.ERROR:
            raise ConfigError(
                f"no record at or after the starting time in {of.describe(younger)}: give an earlier time, "
                "or set option startingOffsetsByTimestampStrategy to latest"
            )
        return {**{each: offset for each, offset in found.items() if offset is not None}, **self.latest(younger)}

    def _list_topics(self) -> dict[str, TopicInfo]:
        subscription = self._options.subscription
        if not subscription.pattern:
            return self._client.topics(subscription.topics or {each.topic for each in subscription.assigned})
        pattern = re.compile(subscription.pattern)
        topics = self._client.topics()
        return {name: topic for name, topic in topics.items() if not topic.internal and pattern.search(name)}

    def _list_offsets(self, wanted: Mapping[TopicPartition, int]) -> Offsets:
        if not wanted:
            return {}
        found = self._client.list_offsets(wanted, read_committed=self._options.read_committed)
        return {partition: 0 if offset is None else offset for partition, offset in found.items()}


class _LagReporter:
    """Commits what a query has finished to a consumer group, for tools that show lag; failures are only logged."""

    def __init__(self, options: SourceOptions) -> None:
        self._group_id = options.group_id_for_lag
        timeout_ms = min(options.client.retry_timeout_ms, LAG_TIMEOUT_MS)  # a query must not wait long for this
        self._client = ClusterClient(replace(options.client, retry_timeout_ms=timeout_ms))
        self._committed: Offsets = {}

    def reached(self, offsets: Offsets) -> None:
        if not self._group_id or offsets == self._committed:
            return
        try:
            self._client.commit_offsets(self._group_id, offsets)
            self._committed = offsets
        except ApiError as error:
            logger.warning("progress was not committed to group %s: %s", self._group_id, error)

    def close(self) -> None:
        self._client.close()


def report(losses: Sequence[str], *, fail: bool) -> None:
    """Raise `DataLost`, or warn of each loss."""
    if losses and fail:
        raise DataLost(of.data_loss_advice(losses))
    for loss in losses:
        logger.warning("data may have been lost: %s (failOnDataLoss is false: going on with what exists)", loss)


# In a task.


def read_partition(options: SourceOptions, schema: StructType, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """The records of a task as Arrow batches of the query's schema."""
    if not isinstance(partition, RangePartition):
        return  # what Spark makes up for a query without partitions
    from millrace.spark.formats import BatchMaker

    make = BatchMaker(schema, options.value)
    prepare_worker()
    for wanted in partition.ranges:
        for columns in RangeReader(options, wanted).columns(include_headers="headers" in make.names):
            yield make(columns, wanted.partition)


class RangeReader:
    """Reads one range, once, from fetches to columns; a gap in the log is an error or stepped over, as told."""

    def __init__(self, options: SourceOptions, wanted: OffsetRange) -> None:
        self._options = options
        self._wanted = wanted
        self._position = wanted.start
        self._settings = options.client
        if options.poll_timeout_ms is not None:
            self._settings = replace(options.client, retry_timeout_ms=options.poll_timeout_ms)

    def columns(self, *, include_headers: bool) -> Iterator[RecordColumns]:
        from millrace.spark.columns import decode

        for fetched in self._fetches():
            try:
                found, self._position = decode(
                    fetched.records,
                    start_offset=self._position,
                    end_offset=self._wanted.end,
                    include_headers=include_headers,
                    aborted=fetched.aborted,
                    read_committed=self._options.read_committed,
                    check_crcs=self._options.check_crcs,
                )
            except ApiError as error:
                topic, number = self._wanted.partition
                raise ApiError(error.code, f"topic {topic}, partition {number}: {error.message}") from error
            yield from found

    def _fetches(self) -> Iterator[Fetched]:
        while self._position < self._wanted.end:
            try:
                yield from self._fetches_from(self._position)
                return
            except ApiError as error:
                if error.code not in _UNKNOWN and error.code is not ErrorCode.OFFSET_OUT_OF_RANGE:
                    raise
                # What was fetched before it failed has been decoded: the position is that of the failure.
                loss, self._position = self._after_loss(error)
            report([loss], fail=self._options.fail_on_data_loss)

    def _fetches_from(self, start: int) -> Iterator[Fetched]:
        from millrace.client.fetching import FetchRange, read_range

        wanted = FetchRange(
            self._wanted.partition,
            start,
            self._wanted.end,
            read_committed=self._options.read_committed,
            max_bytes=self._options.fetch_max_bytes,
        )
        with kept_client(self._settings) as client:
            yield from read_range(client, wanted)

    def _after_loss(self, error: ApiError) -> tuple[str, int]:
        """What to say of offsets that cannot be read, and where to go on."""
        partition, start, end = self._wanted.partition, self._position, self._wanted.end
        if error.code in _UNKNOWN:
            return f"partition {partition} is gone; offsets {start} to {end - 1} were to be read", end
        with LogView(replace(self._options, client=self._settings)) as view:
            first = view.earliest([partition])[partition]
        if first > start:
            following = min(first, end)
            return of.lost_to_retention(partition, start, following, first), following
        return f"offsets {start} to {end - 1} of partition {partition} cannot be read: {error.message}", end


_kept: dict[ClientSettings, ClusterClient] = {}


@contextmanager
def kept_client(settings: ClientSettings) -> Iterator[ClusterClient]:
    """A client whose connections outlive the task; Spark uses a worker process for many tasks, one after another."""
    client = _kept.pop(settings, None) or ClusterClient(settings)
    try:
        yield client
    except BaseException:
        client.close()
        raise
    else:
        _kept[settings] = client


def _tasks(ranges: Sequence[OffsetRange], options: SourceOptions) -> list[RangePartition]:
    cores = os.cpu_count() or 1  # of the driver: Spark does not tell a source how many the executors have
    least, most = options.min_partitions, options.max_records_per_partition
    pieces = of.split(ranges, min_partitions=least, max_records=most, cores=cores)
    if least is not None or most is not None:
        return [RangePartition((piece,)) for piece in pieces]
    return [RangePartition(group) for group in of.group(pieces, cores=cores)]


def _of_checkpoint(offsets: dict[str, Any]) -> Offsets:
    return of.from_json(offsets, "the offset in the checkpoint")


def _at(position: AtTime, partitions: Sequence[TopicPartition]) -> Offsets:
    return dict.fromkeys(partitions, position.timestamp_ms)


def _moves(starting: Position, options: SourceOptions) -> bool:
    """Whether `starting` means another offset when it is looked up later."""
    if isinstance(starting, AtOffsets):
        return of.LATEST in starting.offsets.values()
    if isinstance(starting, Edge):
        return starting is Edge.LATEST
    return options.timestamp_strategy is TimestampStrategy.LATEST


def _check_same(given: Mapping[TopicPartition, int], partitions: Sequence[TopicPartition], option: str) -> None:
    missing, unknown = set(partitions) - given.keys(), given.keys() - set(partitions)
    if missing:
        raise ConfigError(f"option {option!r} has no entry for {of.describe(missing)}: name every partition")
    if unknown:
        raise ConfigError(f"option {option!r} names {of.describe(unknown)}, which the query does not read")
