"""One partition's log: append, read, find by time, roll, retain, truncate.

The files of a partition's directory and who owns each: `<base>.log` with its indexes (`segment`, `index`, `txnindex`),
`<offset>.snapshot` (`producers`), `leader-epoch-checkpoint` (`epochs`, `checkpoint`), `partition.metadata`
(`checkpoint`). What is believed of them after a crash: `recovery`.

A `Log` is what is known of a partition all the time: the offsets where it starts, ends and is flushed, its settings,
whether it has failed. What it takes to read and write it is a `LoadedLog`, there from the first use on (`loaded`). That
is made of rooms: the list of segments (`segments`), reads (`reading`), what waits for a sync (`unsynced`); the
order of names when something is cut or replaced is `rewriting`, and what a log asks of its directory `host`.

Not here: who may read up to where (the high watermark), waiting, replication, and threads: a `Log` is synchronous and
belongs to the event loop. Syncing is two steps, `begin_flush` on the loop and `FlushTicket.run` in any thread, so that
a flusher can group many logs (`ticket`, `flusher`).

Invariants:
- A failed append changes nothing: the next one goes to the same offset and the same position.
- Offsets increase strictly; `start_offset` <= `flushed.offset` <= `end_offset`, but for a truncation in between.
- After a clean stop a log opens nothing until it is used: start and end come from the directory's checkpoints. Once it
  is loaded, `end_offset` is the offset of the loaded end.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from millrace.clock import Clock
from millrace.errors import ApiError, CorruptLogError, ErrorCode, StorageError
from millrace.model import NO_TIMESTAMP
from millrace.records.batch import (
    HEADER_BYTES,
    STAMP,
    STAMP_BYTES,
    Batch,
    BatchHeader,
    TimestampType,
    crc_matches,
    read_header,
    split,
    validate_produced,
)
from millrace.records.compression import Buffer
from millrace.storage import admission, checkpoint, recovery, rewriting, swap
from millrace.storage.compaction import LogFacts, SegmentFacts
from millrace.storage.compaction_job import Cleaned
from millrace.storage.files import Files
from millrace.storage.host import Alone, LogHost
from millrace.storage.index import TIME_ENTRY_BYTES
from millrace.storage.loaded import ASK_ALWAYS, LoadedLog
from millrace.storage.producers import UNVERIFIED, ProducerEntry, Verification
from millrace.storage.reading import ReadResult
from millrace.storage.recovery import LogPosition, LogState
from millrace.storage.retention import SegmentAge, expired_segments
from millrace.storage.segment import LOG_SUFFIX, MAX_RELATIVE_OFFSET, IndexCache, Segment
from millrace.storage.segments import Segments
from millrace.storage.settings import FlushMode, LogConfig
from millrace.storage.ticket import FlushTicket
from millrace.storage.timesearch import FoundOffset, Searched, first_at_or_after, with_largest_timestamp
from millrace.storage.txnindex import AbortedTransaction
from millrace.storage.unsynced import Unsynced

logger = logging.getLogger(__name__)

LOAD_ATTEMPTS: Final = 3
"""A log that could not be read so often, one time after another, is offline: another replica should serve."""


class Appended(NamedTuple):
    """Where a batch went; for a duplicate, where the original did."""

    base_offset: int
    last_offset: int
    log_append_time_ms: int
    start_offset: int
    duplicate: bool


class FilesOfLog(NamedTuple):
    """How much of the disk a log takes."""

    segments: int
    size_bytes: int


class LogLayout(NamedTuple):
    """What a copy of the log needs to know."""

    generation: int
    """Another one whenever records were cut off or compacted: what was read of the files before may not hold."""
    segments: list[tuple[int, int]]
    """Base offset and size in bytes, oldest first."""
    epochs: list[tuple[int, int]]


class Log:
    """A partition's records on disk. See the module for owner and invariants."""

    def __init__(
        self,
        directory: Path,
        config: LogConfig,
        *,
        clock: Clock,
        files: Files,
        state: LogState,
        cache: IndexCache | None = None,
        host: LogHost | None = None,
        has_directory: bool = True,
    ) -> None:
        self.directory = directory
        self.has_directory = has_directory
        """A log without records needs no directory: the host makes it with the first ones."""
        self.config = config
        self.start_offset = state.start_offset
        self.end_offset = max(state.recovery_point, state.start_offset)
        self.cleaned_offset = 0
        """Below it every key occurs once, if the topic is compacted; kept in the directory's checkpoint."""
        self.failure: StorageError | None = None
        """Why the log is offline: every use of it raises this."""
        self.on_flushed: list[Callable[[], object]] = []
        """Called on the loop whenever `flushed` has advanced."""
        self.flush_patience_s = 0.0
        """How long the flush of an append may wait, because whoever sets this will ask for it sooner (`flush_soon`)."""
        self._host = host or Alone(files)
        self._clock = clock
        self._files = files
        self._state = state
        self._segments = Segments(files, directory, cache or IndexCache(), config.index_interval_bytes)
        """Kept while nothing is loaded: a log that has failed still has files to close."""
        self._loaded: LoadedLog | None = None
        """None until the log is used, and again when it was released or has failed: `self._loaded or self._load()`."""
        self._failed_loads = 0
        self._flushed = LogPosition(self.end_offset, 0, 0)
        """Only its offset counts before the log is loaded."""
        self._generation = 0
        self._swaps = 0
        self._set_config(config)

    @classmethod
    def open(
        cls,
        directory: Path,
        config: LogConfig,
        *,
        clock: Clock,
        files: Files,
        state: LogState | None = None,
        host: LogHost | None = None,
    ) -> Log:
        """The log of a directory: nothing is read after a clean stop, all that may be torn is checked otherwise.

        Raises `CorruptLogError` where flushed data is damaged, `StorageError` where the disk fails.
        """
        log = cls(directory, config, clock=clock, files=files, state=state or LogState(), host=host)
        if not log._state.clean:
            log.ensure_loaded()
        return log

    def __repr__(self) -> str:
        return f"Log({self.directory.name}, {self.start_offset}..{self.end_offset}, {self._loaded or 'not loaded'})"

    # --- what is known ------------------------------------------------------------------------------------------------

    @property
    def end(self) -> LogPosition:
        """Where the next batch goes."""
        return (self._loaded or self._load()).end

    @property
    def flushed(self) -> LogPosition:
        """Up to where the log is known to be on disk."""
        self.ensure_loaded()
        return self._flushed

    @property
    def flushed_offset(self) -> int:
        return self._flushed.offset

    @property
    def latest_epoch(self) -> int:
        """The leader epoch of the last batch, or of the last one assigned; -1 where there is none."""
        return (self._loaded or self._load()).latest_epoch

    @property
    def producers(self) -> list[ProducerEntry]:
        """The producers that the log remembers."""
        return list((self._loaded or self._load()).producers)

    def first_unstable_offset(self, high_watermark: int) -> int | None:
        """Where the oldest transaction begins that is open, or whose marker is not below `high_watermark`.

        None where there is none. What begins below the log's start begins there.
        """
        producers = (self._loaded or self._load()).producers
        if not (producers.open_transactions or producers.ended):
            return None
        first = producers.first_unstable(high_watermark)
        return None if first is None else max(first, self.start_offset)

    def forget_ended(self, high_watermark: int) -> None:
        """Transactions whose marker is below `high_watermark` are over for good."""
        (self._loaded or self._load()).producers.forget_ended(high_watermark)

    def recall_ended(self, high_watermark: int) -> None:
        """After a start: know the transactions again that ended at `high_watermark` or beyond."""
        (self._loaded or self._load()).recall_ended(high_watermark, self._clock.wall_ms())

    def begin_verification(
        self, producer_id: int, epoch: int, sequence: int, *, bumps_epoch: bool
    ) -> Verification | None:
        """See `Producers.begin_verification`."""
        return (self._loaded or self._load()).producers.begin_verification(
            producer_id, epoch, sequence, bumps_epoch=bumps_epoch, now_ms=self._clock.wall_ms()
        )

    @property
    def size_bytes(self) -> int:
        """The size of all segments; does not open a log that was not used yet."""
        if self._loaded is not None:
            return self._loaded.segments.size_bytes
        return sum(
            self._files.size_of(self.directory / name) or 0
            for name in self._files.names(self.directory)
            if name.endswith(LOG_SUFFIX)
        )

    @property
    def known_size(self) -> FilesOfLog | None:
        """The segments and their size, if that needs no look at the disk; `measure_files` looks, in any thread."""
        if self._loaded is not None:
            return FilesOfLog(len(self._loaded.segments), self._loaded.segments.size_bytes)
        return None if self.has_directory else FilesOfLog(0, 0)

    def measure_files(self) -> FilesOfLog:
        """The segments on disk and their size; StorageError."""
        names = [name for name in self._files.names(self.directory) if name.endswith(LOG_SUFFIX)]
        return FilesOfLog(len(names), sum(self._files.size_of(self.directory / name) or 0 for name in names))

    def open_transactions(self, idle_since_ms: int) -> int:
        """How many transactions are open whose producer has written nothing here since then.

        A log that is not in memory has not been written to: of that nothing is said.
        """
        if self._loaded is None or not self._loaded.producers.open_transactions:
            return 0
        producers = self._loaded.producers
        entries = (producers.entries.get(producer_id) for producer_id in producers.open_transactions.values())
        return sum(entry is not None and entry.heard_ms < idle_since_ms for entry in entries)

    @property
    def segment_count(self) -> int:
        return len((self._loaded or self._load()).segments)

    def layout(self) -> LogLayout:
        """The log as it lies on disk now."""
        loaded = self._loaded or self._load()
        segments = [(segment.base_offset, segment.size_bytes) for segment in loaded.segments if segment.exists]
        return LogLayout(self._generation + self._swaps, segments, loaded.epochs.entries())

    # --- append -------------------------------------------------------------------------------------------------------

    def append(
        self,
        records: bytes | memoryview,
        *,
        leader_epoch: int,
        now_ms: int,
        from_client: bool = True,
        verification: Verification | None = UNVERIFIED,
        transaction_version: int = 0,
    ) -> Appended:
        """Append one batch as the leader: checked, given the next offset, written without copying its records.

        A client's batch passes all checks; one of the broker's own (`from_client=False`) may be a control batch and is
        only checked for its shape and its producer's epoch. The first batch of a transaction needs the `verification`
        that was begun for it, a marker is judged by the rules of its `transaction_version`. Raises `ApiError` for what
        the sender did, `StorageError` for what the disk did.
        """
        loaded = self._loaded or self._load()
        log_append_time_ms = NO_TIMESTAMP
        if from_client:
            header = validate_produced(records, self._limits, now_ms)
            producer_id = header.producer_id
            if producer_id >= 0:
                original = loaded.producers.check(header, verification)
                if original is not None:
                    if self.config.timestamp_type is TimestampType.LOG_APPEND:
                        log_append_time_ms = original.timestamp_ms
                    return Appended(
                        original.first_offset, original.last_offset, log_append_time_ms, self.start_offset, True
                    )
            head_bytes = STAMP_BYTES
            if self._special:
                header, records, head_bytes = admission.prepare(header, records, self.config, now_ms)
        else:
            header = admission.check_internal(records, self.config, loaded.producers, verification, transaction_version)
            producer_id = header.producer_id
            head_bytes = STAMP_BYTES
        size = len(records)
        max_timestamp_ms = header.max_timestamp_ms
        base_offset = self.end_offset
        last_offset = base_offset + header.last_offset_delta
        segment = loaded.segments.active
        if (
            segment.size_bytes + size > self._roll_check_bytes
            or max_timestamp_ms > loaded.roll_after_ms
            or last_offset - segment.base_offset > MAX_RELATIVE_OFFSET
        ) and self._should_roll(loaded, size, max_timestamp_ms, last_offset, now_ms):
            segment = self.roll()
        view = records if type(records) is memoryview else memoryview(records)
        if head_bytes == STAMP_BYTES:
            head = STAMP.pack(base_offset, header.batch_length, leader_epoch)
        else:
            head = header._replace(base_offset=base_offset, leader_epoch=leader_epoch).pack()
            if header.timestamp_type is TimestampType.LOG_APPEND:
                log_append_time_ms = max_timestamp_ms
        position = segment.size_bytes
        if not self.has_directory:
            self._create_directory(loaded)
        segment.write((head, view[head_bytes:]), size)
        if not position:
            loaded.note_first_write(segment, max_timestamp_ms, now_ms, self._segment_ms)
        segment.note(last_offset, max_timestamp_ms, size)
        if leader_epoch != loaded.latest_epoch:
            loaded.assign_epoch(leader_epoch, base_offset)
        if producer_id >= 0:
            self._note_producer(loaded, header, base_offset, records, segment, now_ms)
        self.end_offset = end_offset = last_offset + 1
        loaded.end = LogPosition(end_offset, segment.base_offset, position + size)
        loaded.unsynced.segments[segment] = None
        if self._flush_on_append:
            self._host.request_flush(self, self.flush_patience_s)
        return Appended(base_offset, last_offset, log_append_time_ms, self.start_offset, False)

    def append_as_follower(self, records: bytes | memoryview) -> int:
        """Append batches as the leader has stamped them; returns the new end offset. All or nothing."""
        loaded = self._loaded or self._load()
        batches = list(split(records))
        if not batches:
            return self.end_offset
        expected = self.end_offset
        for batch in batches:
            header = batch.header
            if header.base_offset < expected or header.last_offset_delta < 0:
                raise ApiError(
                    ErrorCode.CORRUPT_MESSAGE,
                    f"the leader sent offset {header.base_offset} where {expected} should follow",
                )
            if not crc_matches(batch.data):
                raise ApiError(ErrorCode.CORRUPT_MESSAGE, f"the batch at {header.base_offset} has a wrong CRC")
            expected = header.next_offset
        now_ms = self._clock.wall_ms()
        size = len(records)
        max_timestamp_ms = max(batch.header.largest_timestamp_ms for batch in batches)
        # What a leader has is never too large: a batch may have grown there when it was compacted.
        fitting = min(size, self._segment_bytes)
        if self._should_roll(loaded, fitting, max_timestamp_ms, batches[-1].header.last_offset, now_ms):
            self.roll()
        segment = loaded.segments.active
        first = not segment.size_bytes
        if not self.has_directory:
            self._create_directory(loaded)
        segment.write((records,), size)
        if first:
            loaded.note_first_write(segment, batches[0].header.max_timestamp_ms, now_ms, self._segment_ms)
        for header, data in batches:
            segment.note(header.last_offset, header.largest_timestamp_ms, header.size_bytes)
            loaded.assign_epoch(header.leader_epoch, header.base_offset)
            if header.producer_id >= 0:
                self._note_producer(loaded, header, header.base_offset, data, segment, now_ms)
        self.end_offset = expected
        loaded.end = LogPosition(expected, segment.base_offset, segment.size_bytes)
        loaded.unsynced.segments[segment] = None
        if self._flush_on_append:
            self._host.request_flush(self, 0.0)
        return expected

    def _create_directory(self, loaded: LoadedLog) -> None:
        loaded.unsynced.note_created(*self._host.create_directory())
        self.has_directory = True

    def assign_epoch(self, epoch: int) -> None:
        """A new leader epoch begins at the log's end."""
        (self._loaded or self._load()).assign_epoch(epoch, self.end_offset)

    def _note_producer(
        self, loaded: LoadedLog, header: BatchHeader, base_offset: int, batch: Buffer, segment: Segment, now_ms: int
    ) -> None:
        if not header.is_control:
            loaded.producers.record(header, base_offset, now_ms)
            return
        try:
            loaded.note_marker(header, base_offset, batch, segment, now_ms)
        except StorageError as error:
            self.fail(error)
            raise

    # --- rolling ------------------------------------------------------------------------------------------------------

    def _should_roll(self, loaded: LoadedLog, size: int, max_timestamp_ms: int, last_offset: int, now_ms: int) -> bool:
        segment = loaded.segments.active
        if size > self._segment_bytes:
            raise ApiError(
                ErrorCode.RECORD_LIST_TOO_LARGE,
                f"the record batch has {size} bytes, a segment of this topic {self._segment_bytes}",
            )
        if not segment.size_bytes:
            # An empty segment rolls only if its base is too far away, which a reset follower can meet.
            return last_offset - segment.base_offset > MAX_RELATIVE_OFFSET
        if segment.size_bytes + size > self._segment_bytes or last_offset - segment.base_offset > MAX_RELATIVE_OFFSET:
            return True
        if len(segment.offset_index) >= self._max_index_entries:
            return True
        first_ms = segment.rolling_timestamp_ms()
        waited_ms = max_timestamp_ms - first_ms if first_ms >= 0 else now_ms - segment.created_ms
        if waited_ms > self._segment_ms:
            return True
        loaded.roll_after_ms = first_ms + self._segment_ms if first_ms >= 0 else ASK_ALWAYS
        return False

    def roll(self) -> Segment:
        """Seal the active segment and go on in a new one at the end offset; its file comes with its first batch."""
        loaded = self._loaded or self._load()
        if not loaded.segments.active.size_bytes:
            return loaded.segments.active
        segment = loaded.roll(self._clock.wall_ms())
        self._draw_segment_age()
        self._host.request_flush(self, 0.0)
        return segment

    # --- read ---------------------------------------------------------------------------------------------------------

    def read(
        self, offset: int, max_bytes: int, *, limit: LogPosition | None = None, at_least_one: bool = True
    ) -> ReadResult:
        """Whole batches from the one that holds `offset` on, of one segment, up to `limit` (the log's end if None).

        At most `max_bytes`, except that with `at_least_one` the first batch comes whatever its size. Raises
        OFFSET_OUT_OF_RANGE outside of start and end.
        """
        loaded = self._loaded or self._load()
        end = loaded.end if limit is None else limit
        if offset >= end.offset or offset < self.start_offset:
            if self.start_offset <= offset <= self.end_offset:
                return ReadResult(b"", offset)
            raise ApiError(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"offset {offset} is outside of {self.start_offset} to {self.end_offset}",
            )
        return loaded.reading.read(offset, max_bytes, end, self.end_offset, at_least_one)

    def bytes_after(self, offset: int) -> int | None:
        """How much there is from `offset` on; None where that is not known without a search."""
        loaded = self._loaded
        if loaded is None:
            return 0 if offset == self.end_offset else None
        return loaded.reading.bytes_after(offset, loaded.end)

    def read_batch(self, offset: int) -> Batch:
        """The one batch that holds `offset`."""
        data = self.read(offset, 0).data
        return Batch(read_header(data), memoryview(data))

    def batch_header(self, offset: int) -> BatchHeader:
        """The header of the batch that holds `offset`, or of the next one; the rest of it is not read."""
        segment, position = (self._loaded or self._load()).segments.locate(offset)
        return read_header(segment.pread(HEADER_BYTES, position))

    def position_of(self, offset: int) -> LogPosition:
        """Where the batch that begins at `offset` lies, or will lie; the offset must be a boundary between batches."""
        loaded = self._loaded or self._load()
        return loaded.end if offset >= loaded.end.offset else loaded.reading.position_of(offset)

    # --- find by time and epoch ---------------------------------------------------------------------------------------

    def offset_for_time(self, timestamp_ms: int, limit: LogPosition | None = None) -> FoundOffset | None:
        """The first record at or after `timestamp_ms` below `limit` (the log's end if None)."""
        return first_at_or_after(self._searched(limit), timestamp_ms)

    def max_timestamp(self, limit: LogPosition | None = None) -> FoundOffset | None:
        """The record with the largest timestamp (the first of several), below `limit`."""
        return with_largest_timestamp(self._searched(limit))

    def _searched(self, limit: LogPosition | None) -> Searched:
        loaded = self._loaded or self._load()
        return Searched(
            loaded.segments.listed,
            self.start_offset,
            self.end_offset if limit is None else limit.offset,
            self.config.max_decompressed_bytes,
        )

    def end_offset_for_epoch(self, epoch: int) -> tuple[int, int]:
        """The largest epoch at or below `epoch` and where it ends in this log; (-1, -1) where it is not known."""
        return (self._loaded or self._load()).epochs.end_offset_for(epoch, self.end_offset)

    def epoch_for(self, offset: int) -> int:
        """The leader epoch that wrote `offset`; -1 where it is not known."""
        return (self._loaded or self._load()).epochs.epoch_for(offset)

    def aborted_transactions(self, first_offset: int, end_offset: int) -> list[AbortedTransaction]:
        """The aborted transactions that touch the offsets from `first_offset` up to `end_offset`."""
        return (self._loaded or self._load()).aborted_transactions(first_offset, end_offset)

    # --- compaction ---------------------------------------------------------------------------------------------------

    def producers_at(self, segment_end: int) -> list[ProducerEntry]:
        """Who is remembered, as it was where a segment ends; as it is now where no snapshot tells."""
        loaded = self._loaded or self._load()
        now = loaded.producers
        then, offset = recovery.newest_snapshot(loaded.segments, segment_end, now.max_producers)
        return [each for each in then if each.producer_id in now.entries] if offset == segment_end else list(now)

    def compaction_facts(self, compactable_below: int) -> LogFacts:
        """What compaction decides from; nothing at or above `compactable_below` (the high watermark) is compacted.

        Nor is anything of a transaction that is not over for good.
        """
        loaded = self._loaded or self._load()
        stable = self.first_unstable_offset(compactable_below)
        limit = min(compactable_below, self._flushed.offset)
        return LogFacts(
            [
                SegmentFacts(
                    segment.base_offset,
                    end,
                    segment.size_bytes,
                    segment.rolling_timestamp_ms,
                    lambda segment=segment: segment.largest_timestamp().timestamp_ms,  # type: ignore[misc]
                )
                for segment, end in loaded.segments.with_ends(self.end_offset)
            ],
            self.start_offset,
            self.end_offset,
            self.cleaned_offset,
            limit if stable is None else min(limit, stable),
        )

    @property
    def truncations(self) -> int:
        """How often records were cut off: what was made from the log before does not fit it any more."""
        return self._generation

    def replace_segments(self, cleaned: Cleaned, truncations: int) -> list[Path] | None:
        """Let a compacted segment take the place of those it was made from, in the order that `swap` says.

        Returns the files that may be removed once the directory is synced; None, and nothing done, where the log is not
        what it was when the segment was made: records were cut off, segments deleted, the log closed.
        """
        loaded = self._loaded
        if loaded is None or truncations != self._generation:
            return None
        place = rewriting.find_replaced(loaded.segments, cleaned)
        if place is None:
            return None
        with self._rewriting(loaded):
            doomed = rewriting.replace(loaded.segments, *place, cleaned)
        self._swaps += 1
        return doomed

    @property
    def syncs(self) -> bool:
        """Whether what is written has to reach the disk; any thread."""
        return self._files.sync

    def sync_names(self) -> None:
        """Make the names of the log's files durable; any thread. A log that was deleted meanwhile has none."""
        try:
            self._files.sync_directory(self.directory)
        except StorageError:
            if self._files.size_of(self.directory) is not None:
                raise

    def drop_cleaned(self) -> None:
        """Remove what a compaction that was given up has written; any thread."""
        swap.discard(self._files, self.directory)

    def remove_files(self, paths: list[Path]) -> None:
        """Let go of what `replace_segments` has returned."""
        self._host.remove(paths)

    # --- retention and truncation -------------------------------------------------------------------------------------

    def delete_records_before(self, offset: int) -> int:
        """Make `offset` the first one; whole segments below it are removed. Returns the start offset.

        The directory's log-start checkpoint makes it last: see `LogDirs.checkpoint_start_offsets`.
        """
        loaded = self._loaded or self._load()
        if offset > self.end_offset or offset < 0:
            raise ApiError(ErrorCode.OFFSET_OUT_OF_RANGE, f"offset {offset} is outside of 0 to {self.end_offset}")
        if offset > self.start_offset:
            self.start_offset = offset
            loaded.epochs.truncate_start(offset)
            # The active segment stays, whatever it holds.
            self._delete_oldest(loaded, loaded.segments.slot_of(offset))
        return self.start_offset

    def enforce_retention(self, now_ms: int, deletable_below: int | None = None) -> int:
        """Remove segments that time, size or the start offset have made superfluous; returns how many.

        Nothing at or above `deletable_below` (the high watermark; the log's end if None) is removed. An active segment
        that is superfluous as a whole is rolled first.
        """
        if self._loaded is None and self.end_offset == self.start_offset:
            return 0
        loaded = self._loaded or self._load()
        loaded.producers.expire(now_ms, self.config.producer_expiration_ms)
        config = self.config
        ages = [
            SegmentAge(segment.base_offset, end, segment.size_bytes, segment.retention_timestamp_ms)
            for segment, end in loaded.segments.with_ends(self.end_offset)
        ]
        count = expired_segments(
            ages,
            now_ms=now_ms,
            retention_ms=config.retention_ms if config.delete else -1,
            retention_bytes=config.retention_bytes if config.delete else -1,
            start_offset=self.start_offset,
            deletable_below=self.end_offset if deletable_below is None else deletable_below,
        )
        if count == 0:
            return 0
        if count == len(loaded.segments):
            self.roll()
        self._delete_oldest(loaded, count)
        if loaded.segments.bases[0] > self.start_offset:
            self.start_offset = loaded.segments.bases[0]
            loaded.epochs.truncate_start(self.start_offset)
        return count

    def _delete_oldest(self, loaded: LoadedLog, count: int) -> None:
        if not count:
            return
        try:
            doomed = rewriting.drop_oldest(loaded.segments, count)
        finally:
            loaded.forget_gone()
        self._host.remove(doomed, self.config.file_delete_delay_ms)
        logger.info("%s: removed %d segments, the log starts at %d", self.directory, count, loaded.segments.bases[0])

    @contextmanager
    def _rewriting(self, loaded: LoadedLog) -> Iterator[None]:
        """While files change their names; if that fails half-way, which names they have is for a start to sort out."""
        try:
            yield
        except StorageError as error:
            self.fail(error)
            raise
        finally:
            loaded.forget_gone()

    def truncate_to(self, offset: int) -> None:
        """Drop every batch that reaches `offset` or beyond; producers and epochs are rolled back with them."""
        loaded = self._loaded or self._load()
        if offset >= self.end_offset:
            # An epoch in which nothing was written begins at the very end, and the leader may not know it.
            loaded.cut_epochs()
            return
        if offset <= self.start_offset:
            self.reset_to(offset)
            return
        slot = loaded.segments.slot_of(offset)
        active = loaded.segments.listed[slot]
        position = active.locate(offset)
        # A batch goes as a whole, and an offset that compaction has removed is no end: what is left says where it is.
        end_offset = active.end_before(position)
        self._lower_flushed(LogPosition(end_offset, active.base_offset, position))
        self._generation += 1
        with self._rewriting(loaded):
            doomed = rewriting.cut(loaded.segments, slot, position, end_offset)
        self.end_offset = end_offset
        # The batch that went as a whole may have begun below the start.
        self.start_offset = min(self.start_offset, end_offset)
        self.cleaned_offset = min(self.cleaned_offset, end_offset)
        loaded.cut_to(LogPosition(end_offset, active.base_offset, active.size_bytes), self._clock.wall_ms())
        self._host.remove(doomed)
        self._host.request_flush(self, 0.0)

    def _lower_flushed(self, position: LogPosition) -> None:
        """Before a truncation: after a crash in the middle of it, a shorter log must not look like a damaged one."""
        if self._flushed.offset > position.offset:
            self._flushed = position
            self._host.before_truncate()

    def reset_to(self, offset: int) -> None:
        """Drop everything and go on at `offset`: for a follower whose leader has nothing older."""
        loaded = self._loaded or self._load()
        self.start_offset = min(self.start_offset, offset)
        self._lower_flushed(LogPosition(self.start_offset, loaded.segments.bases[0], 0))
        self._generation += 1
        if not self.has_directory:
            self._create_directory(loaded)
        with self._rewriting(loaded):
            doomed = rewriting.begin_anew(loaded.segments, loaded.segments.make(offset, self._clock.wall_ms()))
        loaded.begin_anew()
        self._flushed = loaded.end
        self.start_offset = self.end_offset = offset
        self.cleaned_offset = 0
        self._host.remove(doomed)

    # --- flushing -----------------------------------------------------------------------------------------------------

    @property
    def dirty(self) -> bool:
        """Whether something waits to be synced."""
        return self._loaded is not None and bool(self._loaded.unsynced)

    def begin_flush(self, *, final: bool = False) -> FlushTicket | None:
        """What to sync, so that everything up to the current end is on disk; None where nothing is to do.

        A `final` one, before a clean close, also writes epochs that no record has followed yet.
        """
        loaded = self._loaded
        if loaded is None or not self.has_directory:
            return None
        unsynced = loaded.unsynced
        if not (unsynced or (final and loaded.epochs.dirty)):
            return None
        pinned = unsynced.pin(self._files)
        replacements = []
        if loaded.epochs.dirty:
            data = checkpoint.render_epochs(loaded.epochs.entries())
            replacements.append((self.directory / checkpoint.LEADER_EPOCHS, data))
            loaded.epochs.dirty = False
        ticket = FlushTicket(
            self,
            loaded,
            loaded.end,
            self._generation,
            unsynced.rolled,
            pinned,
            list(unsynced.directories),
            unsynced.files,
            replacements,
        )
        loaded.unsynced = Unsynced()
        return ticket

    def flush_soon(self) -> None:
        """Do not wait any longer with what has been appended."""
        if self._flush_on_append and self._loaded is not None and self._loaded.unsynced.segments:
            self._host.request_flush(self, 0.0)

    def note_synced(self, end: LogPosition, generation: int) -> None:
        """Everything below `end` is on disk: `flushed` advances and the listeners are told.

        After a truncation `end` may not exist any more; the flush that follows it will speak for the rest. Of a log
        that went offline meanwhile nothing counts any more, and whoever is told would ask it.
        """
        if self.failure is None and generation == self._generation and end.offset >= self._flushed.offset:
            self._flushed = end
            for callback in self.on_flushed:
                callback()

    def end_flush(self, ticket: FlushTicket, *, synced: bool = True) -> None:
        """Take the result of a ticket."""
        for file, _ in ticket.pinned:
            self._files.unpin(file)
        if synced:
            loaded = ticket.loaded
            if ticket.end == loaded.end and ticket.generation == self._generation:
                # The ticket has followed the log to its very end.
                loaded.unsynced.segments.pop(loaded.segments.active, None)
            self.note_synced(ticket.end, ticket.generation)

    def flush(self) -> None:
        """Sync now, in this thread."""
        self._flush()

    def _flush(self, *, final: bool = False) -> None:
        ticket = self.begin_flush(final=final)
        if ticket is not None:
            try:
                ticket.run(self._files)
            except StorageError as error:
                self.end_flush(ticket, synced=False)
                self.fail(error)
                raise
            self.end_flush(ticket)

    # --- life ---------------------------------------------------------------------------------------------------------

    def apply_config(self, config: LogConfig) -> None:
        """Use other settings from now on; what the old ones left unsynced is synced by the new ones."""
        self.config = config
        self._set_config(config)
        self._segments.set_index_interval(config.index_interval_bytes)
        if self._loaded is not None:
            self._loaded.producers.max_producers = config.max_producers
            self._loaded.roll_after_ms = ASK_ALWAYS
        self.flush_soon()

    def _set_config(self, config: LogConfig) -> None:
        self._limits = config.produce_limits
        self._segment_bytes = config.segment_bytes
        self._draw_segment_age()
        self._max_index_entries = max(config.segment_index_bytes // TIME_ENTRY_BYTES, 1)
        # An index grows by at most one entry per interval, so that below this size it cannot be full.
        self._roll_check_bytes = min(config.segment_bytes, self._max_index_entries * config.index_interval_bytes)
        self._flush_on_append = config.flush_mode is not FlushMode.OS
        self._special = (
            config.compact
            or config.validate_records
            or config.target_codec is not None
            or config.timestamp_type is TimestampType.LOG_APPEND
        )

    def _draw_segment_age(self) -> None:
        """How old the active segment may get: each its own age, so that logs that began together do not all roll."""
        longest_ms = self.config.max_segment_ms
        jitter_ms = min(self.config.segment_jitter_ms, longest_ms)
        self._segment_ms = longest_ms - (random.randrange(jitter_ms) if jitter_ms else 0)  # noqa: S311 - no secret

    def ensure_loaded(self) -> None:
        """Read the log's directory now rather than at its first use."""
        if self._loaded is None:
            self._load()

    def _load(self) -> LoadedLog:
        """Read the directory; raises why the log is offline, or why it could not be read this time."""
        if self.failure is not None:
            raise self.failure
        try:
            found = recovery.load(self._segments, self._state, self.config.load_options, self._clock.wall_ms())
        except StorageError as error:
            self._failed_loads += 1
            if isinstance(error, CorruptLogError) or self._failed_loads >= LOAD_ATTEMPTS:
                self.fail(error)
            raise
        self._failed_loads = 0
        self.start_offset = found.start_offset
        self.end_offset = found.end_offset
        self._flushed = found.flushed
        self._loaded = loaded = LoadedLog(self._segments, found)
        return loaded

    def fail(self, error: StorageError) -> None:
        """Take the log offline: every use of it raises `error` from now on."""
        if self.failure is None:
            logger.error("%s is offline: %s", self.directory, error)
            self.failure = error
            self._host.log_failed()
        self._loaded = None

    def prepare_close(self) -> None:
        """Write the hints that make the next start quick; they need no sync, as damage to them is found.

        Damage to the index of aborted transactions is not: it waits for the sync that follows.
        """
        loaded = self._loaded
        if loaded is not None:
            loaded.segments.active.save_indexes(final=True)
            loaded.segments.active.cut_tail_if_needed()
            loaded.keep_transactions()
            if self.has_directory:
                loaded.snapshot_producers()

    def close(self) -> None:
        """Write out what the next start wants, sync, and let go of the files. Harmless when done twice."""
        if self._loaded is not None:
            self.prepare_close()
            self._flush(final=True)
            self._state = LogState(self.start_offset, self.end_offset, clean=True)
        self.release()

    def release(self) -> None:
        """Close the files and forget what was loaded; a log that is used again loads itself again."""
        self._segments.release()
        self._loaded = None
