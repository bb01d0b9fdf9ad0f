"""One partition's log: append, read, find by time, roll, retain, truncate.

The files of a partition's directory and who owns each: `<base>.log` with its indexes (`segment`, `index`, `txnindex`),
`<offset>.snapshot` (`producers`), `leader-epoch-checkpoint` (`epochs`, `checkpoint`), `partition.metadata`
(`checkpoint`). What is believed of them after a crash: `recovery`.

What a log is made of has rooms of its own: the list of segments (`segments`), reads (`reading`), the order of names
when something is cut or replaced (`rewriting`), what waits for a sync (`unsynced`). Here is what they have in common:
the offsets where the log starts, ends and is flushed, its epochs and producers, and its settings.

Not here: who may read up to where (the high watermark), waiting, replication, and threads: a `Log` is synchronous and
belongs to the event loop. Syncing is two steps, `begin_flush` on the loop and `FlushTicket.run` in any thread, so that
a flusher can group many logs (`ticket`, `flusher`).

Invariants:
- A failed append changes nothing: the next one goes to the same offset and the same position.
- Offsets increase strictly; `start_offset` <= `flushed.offset` <= `end_offset`, but for a truncation in between.
- After a clean stop a log opens nothing until it is used: start and end come from the directory's checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from millrace.clock import Clock
from millrace.errors import ApiError, ErrorCode, StorageError
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
    stamp_log_append_time,
    validate_produced,
)
from millrace.records.compression import Buffer
from millrace.records.control import decode_end_marker
from millrace.records.decode import check_records
from millrace.records.encode import recompress
from millrace.storage import checkpoint, recovery, rewriting, swap
from millrace.storage.compaction import LogFacts, SegmentFacts
from millrace.storage.compaction_job import Cleaned
from millrace.storage.epochs import LeaderEpochs
from millrace.storage.files import Files
from millrace.storage.index import TIME_ENTRY_BYTES
from millrace.storage.producers import ProducerEntry, Producers
from millrace.storage.reading import Reading, ReadResult
from millrace.storage.recovery import LogPosition, LogState
from millrace.storage.retention import SegmentAge, expired_segments
from millrace.storage.segment import (
    LOG_SUFFIX,
    MAX_RELATIVE_OFFSET,
    SNAPSHOT_SUFFIX,
    IndexCache,
    Segment,
    file_name,
)
from millrace.storage.segments import Segments
from millrace.storage.settings import FlushMode, LogConfig
from millrace.storage.ticket import FlushTicket
from millrace.storage.timesearch import FoundOffset, Searched, first_at_or_after, with_largest_timestamp
from millrace.storage.txnindex import AbortedTransaction
from millrace.storage.unsynced import Unsynced

logger = logging.getLogger(__name__)

_ASK_ALWAYS: Final = -2


class Appended(NamedTuple):
    """Where a batch went; for a duplicate, where the original did."""

    base_offset: int
    last_offset: int
    log_append_time_ms: int
    start_offset: int
    duplicate: bool


class LogLayout(NamedTuple):
    """What a copy of the log needs to know."""

    generation: int
    """Another one whenever records were cut off or compacted: what was read of the files before may not hold."""
    segments: list[tuple[int, int]]
    """Base offset and size in bytes, oldest first."""
    epochs: list[tuple[int, int]]


RequestFlush = Callable[["Log", float], object]
"""Have a log synced within so many seconds."""


class Log:
    """A partition's records on disk. See the module for owner and invariants."""

    def __init__(
        self, directory: Path, config: LogConfig, *, clock: Clock, files: Files, state: LogState, cache: IndexCache
    ) -> None:
        self.directory = directory
        self.config = config
        self.start_offset = state.start_offset
        self.end_offset = max(state.recovery_point, state.start_offset)
        self.cleaned_offset = 0
        """Below it every key occurs once, if the topic is compacted; kept in the directory's checkpoint."""
        self.failure: StorageError | None = None
        """Why the log is offline: every use of it raises this."""
        self.on_failure: Callable[[], object] | None = None
        """Called when the log goes offline."""
        self.on_flushed: list[Callable[[], object]] = []
        """Called on the loop whenever `flushed` has advanced."""
        self.request_flush: RequestFlush | None = None
        """Called when there is something to sync: at every append by `flush_mode`, and at every roll."""
        self.flush_patience_s = 0.0
        """How long the flush of an append may wait, because whoever sets this will ask for it sooner (`flush_soon`)."""
        self.discard: Callable[[list[Path]], object] | None = None
        """Takes files that are no longer part of the log and removes them, perhaps later."""
        self.create_directory: Callable[[], None] | None = None
        """Makes the log's directory; set as long as there is none, because a log without records needs none."""
        self.before_truncate: Callable[[], object] | None = None
        """Called before records that may be below a checkpointed recovery point are cut: it must be lowered first."""
        self._clock = clock
        self._files = files
        self._state = state
        self._cache = cache
        self._loaded = False
        self._segments = Segments(files, directory, cache, config.index_interval_bytes)
        self._reading = Reading(self._segments)
        self._end = LogPosition(self.end_offset, 0, 0)
        self._flushed = self._end
        self._epochs = LeaderEpochs()
        self._latest_epoch = -1
        self._producers = Producers()
        self._snapshot_offset = -1
        self._unsynced = Unsynced()
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
        cache: IndexCache | None = None,
    ) -> Log:
        """The log of a directory: nothing is read after a clean stop, all that may be torn is checked otherwise.

        Raises `CorruptLogError` where flushed data is damaged, `StorageError` where the disk fails.
        """
        log = cls(directory, config, clock=clock, files=files, state=state or LogState(), cache=cache or IndexCache())
        if not log._state.clean:
            log._load()
        return log

    def __repr__(self) -> str:
        return f"Log({self.directory.name}, {self.start_offset}..{self.end_offset}, {len(self._segments)} segments)"

    # --- what is known ------------------------------------------------------------------------------------------------

    @property
    def end(self) -> LogPosition:
        """Where the next batch goes."""
        if not self._loaded:
            self._load()
        return self._end

    @property
    def flushed(self) -> LogPosition:
        """Up to where the log is known to be on disk."""
        if not self._loaded:
            self._load()
        return self._flushed

    @property
    def flushed_offset(self) -> int:
        return self._flushed.offset

    @property
    def latest_epoch(self) -> int:
        """The leader epoch of the last batch, or of the last one assigned; -1 where there is none."""
        if not self._loaded:
            self._load()
        return self._latest_epoch

    @property
    def producers(self) -> list[ProducerEntry]:
        """The producers that the log remembers."""
        if not self._loaded:
            self._load()
        return list(self._producers)

    @property
    def first_unstable_offset(self) -> int | None:
        """Where the oldest open transaction begins, if there is one."""
        if not self._loaded:
            self._load()
        return self._producers.first_unstable_offset

    @property
    def size_bytes(self) -> int:
        """The size of all segments; does not open a log that was not used yet."""
        if self._loaded:
            return self._segments.size_bytes
        return sum(
            self._files.size_of(self.directory / name) or 0
            for name in self._files.names(self.directory)
            if name.endswith(LOG_SUFFIX)
        )

    @property
    def segment_count(self) -> int:
        if not self._loaded:
            self._load()
        return len(self._segments)

    def layout(self) -> LogLayout:
        """The log as it lies on disk now."""
        if not self._loaded:
            self._load()
        segments = [(segment.base_offset, segment.size_bytes) for segment in self._segments if segment.exists]
        return LogLayout(self._generation + self._swaps, segments, self._epochs.entries())

    # --- append -------------------------------------------------------------------------------------------------------

    def append(
        self, records: bytes | memoryview, *, leader_epoch: int, now_ms: int, from_client: bool = True
    ) -> Appended:
        """Append one batch as the leader: checked, given the next offset, written without copying its records.

        A client's batch passes all checks; one of the broker's own (`from_client=False`) may be a control batch and is
        only checked for its shape. Raises `ApiError` for what the sender did, `StorageError` for what the disk did.
        """
        if not self._loaded:
            self._load()
        log_append_time_ms = NO_TIMESTAMP
        if from_client:
            header = validate_produced(records, self._limits, now_ms)
            producer_id = header.producer_id
            if producer_id >= 0:
                original = self._producers.check(header)
                if original is not None:
                    if self.config.timestamp_type is TimestampType.LOG_APPEND:
                        log_append_time_ms = original.timestamp_ms
                    return Appended(
                        original.first_offset, original.last_offset, log_append_time_ms, self.start_offset, True
                    )
            head_bytes = STAMP_BYTES
            if self._special:
                header, records, head_bytes = self._prepare(header, records, now_ms)
        else:
            header = self._check_internal(records)
            producer_id = header.producer_id
            head_bytes = STAMP_BYTES
        size = len(records)
        max_timestamp_ms = header.max_timestamp_ms
        base_offset = self.end_offset
        last_offset = base_offset + header.last_offset_delta
        segment = self._segments.active
        if (
            segment.size_bytes + size > self._roll_check_bytes
            or max_timestamp_ms > self._roll_after_ms
            or last_offset - segment.base_offset > MAX_RELATIVE_OFFSET
        ) and self._should_roll(size, max_timestamp_ms, last_offset, now_ms):
            segment = self.roll()
        view = records if type(records) is memoryview else memoryview(records)
        if head_bytes == STAMP_BYTES:
            head = STAMP.pack(base_offset, header.batch_length, leader_epoch)
        else:
            head = header._replace(base_offset=base_offset, leader_epoch=leader_epoch).pack()
            if header.timestamp_type is TimestampType.LOG_APPEND:
                log_append_time_ms = max_timestamp_ms
        position = segment.size_bytes
        if self.create_directory is not None:
            self._create_directory()
        segment.write((head, view[head_bytes:]), size)
        if not position:
            self._note_first_write(segment, max_timestamp_ms, now_ms)
        segment.note(last_offset, max_timestamp_ms, size)
        if leader_epoch != self._latest_epoch:
            self._assign_epoch(leader_epoch, base_offset)
        if producer_id >= 0:
            self._note_producer(header, base_offset, records, segment, now_ms)
        self.end_offset = end_offset = last_offset + 1
        self._end = LogPosition(end_offset, segment.base_offset, position + size)
        self._unsynced.segments[segment] = None
        if self._flush_on_append and self.request_flush is not None:
            self.request_flush(self, self.flush_patience_s)
        return Appended(base_offset, last_offset, log_append_time_ms, self.start_offset, False)

    def append_as_follower(self, records: bytes | memoryview) -> int:
        """Append batches as the leader has stamped them; returns the new end offset. All or nothing."""
        if not self._loaded:
            self._load()
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
        if self._should_roll(fitting, max_timestamp_ms, batches[-1].header.last_offset, now_ms):
            self.roll()
        segment = self._segments.active
        first = not segment.size_bytes
        if self.create_directory is not None:
            self._create_directory()
        segment.write((records,), size)
        if first:
            self._note_first_write(segment, batches[0].header.max_timestamp_ms, now_ms)
        for header, data in batches:
            segment.note(header.last_offset, header.largest_timestamp_ms, header.size_bytes)
            self._assign_epoch(header.leader_epoch, header.base_offset)
            if header.producer_id >= 0:
                self._note_producer(header, header.base_offset, data, segment, now_ms)
        self.end_offset = expected
        self._end = LogPosition(expected, segment.base_offset, segment.size_bytes)
        self._unsynced.segments[segment] = None
        if self._flush_on_append and self.request_flush is not None:
            self.request_flush(self, 0.0)
        return expected

    def _create_directory(self) -> None:
        create, self.create_directory = self.create_directory, None
        if create is not None:
            try:
                create()
            except StorageError:
                self.create_directory = create
                raise

    def assign_epoch(self, epoch: int) -> None:
        """A new leader epoch begins at the log's end."""
        if not self._loaded:
            self._load()
        self._assign_epoch(epoch, self.end_offset)

    def _assign_epoch(self, epoch: int, offset: int) -> None:
        if epoch > self._latest_epoch:
            self._epochs.assign(epoch, offset)
            self._latest_epoch = epoch

    def _note_first_write(self, segment: Segment, max_timestamp_ms: int, now_ms: int) -> None:
        """A segment's file has just come to be: its name must be made durable too, and its age begins."""
        self._unsynced.directories[self.directory] = None
        if max_timestamp_ms >= 0:
            self._roll_after_ms = max_timestamp_ms + self._segment_ms
        else:
            segment.created_ms = now_ms

    def _note_producer(
        self, header: BatchHeader, base_offset: int, batch: Buffer, segment: Segment, now_ms: int
    ) -> None:
        if not header.is_control:
            self._producers.record(header, base_offset, now_ms)
            return
        try:
            marker = decode_end_marker(batch)
        except ApiError as error:
            logger.warning("%s: unreadable control batch at offset %d: %s", self.directory, base_offset, error)
            return
        if marker is None:
            return
        aborted = self._producers.record_marker(header, base_offset, marker, now_ms)
        if aborted is not None:
            try:
                segment.txn_index.append(aborted)
            except StorageError as failure:
                # Without this entry a reader would take aborted records for committed ones; a restart builds it anew.
                self.fail(failure)
                raise

    def _prepare(
        self, header: BatchHeader, records: bytes | memoryview, now_ms: int
    ) -> tuple[BatchHeader, bytes | memoryview, int]:
        """What some topics ask beyond the header: keys, a codec of their own, the broker's timestamps."""
        config = self.config
        if config.compact or config.validate_records:
            check_records(records, require_keys=config.compact, max_bytes=config.max_decompressed_bytes)
        codec = self._target_codec
        if codec is not None and codec is not header.codec:
            records = recompress(records, codec, max_bytes=config.max_decompressed_bytes)
            header = read_header(records)
            if len(records) > config.max_message_bytes:
                raise ApiError(
                    ErrorCode.MESSAGE_TOO_LARGE,
                    f"the batch has {len(records)} bytes as {codec.name.lower()}, "
                    f"the topic allows {config.max_message_bytes}",
                )
        if config.timestamp_type is TimestampType.LOG_APPEND:
            return stamp_log_append_time(header, records, now_ms), records, HEADER_BYTES
        return header, records, STAMP_BYTES

    def _check_internal(self, records: bytes | memoryview) -> BatchHeader:
        header = read_header(records)
        if header.size_bytes != len(records) or header.count < 1 or header.last_offset_delta < 0:
            raise ApiError(ErrorCode.INVALID_RECORD, "exactly one whole record batch is appended at a time")
        if len(records) > self.config.max_message_bytes:
            raise ApiError(
                ErrorCode.MESSAGE_TOO_LARGE,
                f"the record batch has {len(records)} bytes, the topic allows {self.config.max_message_bytes}",
            )
        if header.is_control:
            marker = decode_end_marker(records)
            if marker is not None:
                self._producers.check_marker(header, marker)
        return header

    # --- rolling ------------------------------------------------------------------------------------------------------

    def _should_roll(self, size: int, max_timestamp_ms: int, last_offset: int, now_ms: int) -> bool:
        segment = self._segments.active
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
        self._roll_after_ms = first_ms + self._segment_ms if first_ms >= 0 else _ASK_ALWAYS
        return False

    def roll(self) -> Segment:
        """Seal the active segment and go on in a new one at the end offset; its file comes with its first batch."""
        if not self._loaded:
            self._load()
        old = self._segments.active
        if not old.size_bytes:
            return old
        try:
            old.seal()
            self._unsynced.note_sealed(old)
            self._snapshot_producers()
        except StorageError as error:
            # Both are rebuilt when they are missed; if the disk is really gone, the coming write says so.
            logger.warning("%s: could not save the state of a sealed segment: %s", self.directory, error)
        segment = self._segments.make(self.end_offset, self._clock.wall_ms())
        self._segments.add(segment)
        self._roll_after_ms = _ASK_ALWAYS
        self._end = LogPosition(self.end_offset, segment.base_offset, 0)
        self._unsynced.rolled = True
        if self.request_flush is not None:
            self.request_flush(self, 0.0)
        return segment

    def _snapshot_producers(self) -> None:
        if self._snapshot_offset == self.end_offset or self.create_directory is not None:
            return
        path = self.directory / file_name(self.end_offset, SNAPSHOT_SUFFIX)
        self._files.write_bytes(path, self._producers.to_bytes())
        self._snapshot_offset = self.end_offset

    # --- read ---------------------------------------------------------------------------------------------------------

    def read(
        self, offset: int, max_bytes: int, *, limit: LogPosition | None = None, at_least_one: bool = True
    ) -> ReadResult:
        """Whole batches from the one that holds `offset` on, of one segment, up to `limit` (the log's end if None).

        At most `max_bytes`, except that with `at_least_one` the first batch comes whatever its size. Raises
        OFFSET_OUT_OF_RANGE outside of start and end.
        """
        if not self._loaded:
            self._load()
        end = self._end if limit is None else limit
        if offset >= end.offset or offset < self.start_offset:
            if self.start_offset <= offset <= self.end_offset:
                return ReadResult(b"", offset)
            raise ApiError(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"offset {offset} is outside of {self.start_offset} to {self.end_offset}",
            )
        return self._reading.read(offset, max_bytes, end, self.end_offset, at_least_one)

    def bytes_after(self, offset: int) -> int | None:
        """How much there is from `offset` on; None where that is not known without a search."""
        return self._reading.bytes_after(offset, self._end)

    def read_batch(self, offset: int) -> Batch:
        """The one batch that holds `offset`."""
        data = self.read(offset, 0).data
        return Batch(read_header(data), memoryview(data))

    def position_of(self, offset: int) -> LogPosition:
        """Where the batch that begins at `offset` lies, or will lie; the offset must be a boundary between batches."""
        if not self._loaded:
            self._load()
        return self._end if offset >= self._end.offset else self._reading.position_of(offset)

    # --- find by time and epoch ---------------------------------------------------------------------------------------

    def offset_for_time(self, timestamp_ms: int, limit: LogPosition | None = None) -> FoundOffset | None:
        """The first record at or after `timestamp_ms` below `limit` (the log's end if None)."""
        return first_at_or_after(self._searched(limit), timestamp_ms)

    def max_timestamp(self, limit: LogPosition | None = None) -> FoundOffset | None:
        """The record with the largest timestamp (the first of several), below `limit`."""
        return with_largest_timestamp(self._searched(limit))

    def _searched(self, limit: LogPosition | None) -> Searched:
        if not self._loaded:
            self._load()
        return Searched(
            self._segments.listed,
            self.start_offset,
            self.end_offset if limit is None else limit.offset,
            self.config.max_decompressed_bytes,
        )

    def end_offset_for_epoch(self, epoch: int) -> tuple[int, int]:
        """The largest epoch at or below `epoch` and where it ends in this log; (-1, -1) where it is not known."""
        if not self._loaded:
            self._load()
        return self._epochs.end_offset_for(epoch, self.end_offset)

    def epoch_for(self, offset: int) -> int:
        """The leader epoch that wrote `offset`; -1 where it is not known."""
        if not self._loaded:
            self._load()
        return self._epochs.epoch_for(offset)

    def aborted_transactions(self, first_offset: int, end_offset: int) -> list[AbortedTransaction]:
        """The aborted transactions that touch the offsets from `first_offset` up to `end_offset`."""
        if not self._loaded:
            self._load()
        found: list[AbortedTransaction] = []
        for segment in self._segments.listed[self._segments.slot_of(first_offset) :]:
            found += segment.txn_index.overlapping(first_offset, end_offset)
        return found

    # --- compaction ---------------------------------------------------------------------------------------------------

    def compaction_facts(self, compactable_below: int) -> LogFacts:
        """What compaction decides from; nothing at or above `compactable_below` (the high watermark) is compacted."""
        if not self._loaded:
            self._load()
        stable = self._producers.first_unstable_offset
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
                for segment, end in self._segments.with_ends(self.end_offset)
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
        if not self._loaded or truncations != self._generation:
            return None
        place = rewriting.find_replaced(self._segments, cleaned)
        if place is None:
            return None
        with self._rewriting():
            doomed = rewriting.replace(self._segments, *place, cleaned)
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
        self._remove(paths)

    # --- retention and truncation -------------------------------------------------------------------------------------

    def delete_records_before(self, offset: int) -> int:
        """Make `offset` the first one; whole segments below it are removed. Returns the start offset.

        The directory's log-start checkpoint makes it last: see `LogDirs.checkpoint_start_offsets`.
        """
        if not self._loaded:
            self._load()
        if offset > self.end_offset or offset < 0:
            raise ApiError(ErrorCode.OFFSET_OUT_OF_RANGE, f"offset {offset} is outside of 0 to {self.end_offset}")
        if offset > self.start_offset:
            self.start_offset = offset
            self._epochs.truncate_start(offset)
            # The active segment stays, whatever it holds.
            self._delete_oldest(self._segments.slot_of(offset))
        return self.start_offset

    def enforce_retention(self, now_ms: int, deletable_below: int | None = None) -> int:
        """Remove segments that time, size or the start offset have made superfluous; returns how many.

        Nothing at or above `deletable_below` (the high watermark; the log's end if None) is removed. An active segment
        that is superfluous as a whole is rolled first.
        """
        if not self._loaded:
            if self.end_offset == self.start_offset:
                return 0
            self._load()
        self._producers.expire(now_ms, self.config.producer_expiration_ms)
        config = self.config
        ages = [
            SegmentAge(segment.base_offset, end, segment.size_bytes, segment.retention_timestamp_ms)
            for segment, end in self._segments.with_ends(self.end_offset)
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
        if count == len(self._segments):
            self.roll()
        self._delete_oldest(count)
        if self._segments.bases[0] > self.start_offset:
            self.start_offset = self._segments.bases[0]
            self._epochs.truncate_start(self.start_offset)
        return count

    def _delete_oldest(self, count: int) -> None:
        if not count:
            return
        try:
            doomed = rewriting.drop_oldest(self._segments, count)
        finally:
            self._forget_gone()
        self._remove(doomed)
        logger.info("%s: removed %d segments, the log starts at %d", self.directory, count, self._segments.bases[0])

    @contextmanager
    def _rewriting(self) -> Iterator[None]:
        """While files change their names; if that fails half-way, which names they have is for a start to sort out."""
        try:
            yield
        except StorageError as error:
            self.fail(error)
            raise
        finally:
            self._forget_gone()

    def _forget_gone(self) -> None:
        self._reading.forget()
        self._unsynced.keep_only(self._segments.listed)

    def _remove(self, paths: list[Path]) -> None:
        if self.discard is not None:
            self.discard(paths)
            return
        for path in paths:
            self._files.remove(path)

    def truncate_to(self, offset: int) -> None:
        """Drop every batch that reaches `offset` or beyond; producers and epochs are rolled back with them."""
        if not self._loaded:
            self._load()
        if offset >= self.end_offset:
            # An epoch in which nothing was written begins at the very end, and the leader may not know it.
            self._epochs.truncate_end(self.end_offset)
            self._latest_epoch = self._epochs.latest
            return
        if offset <= self.start_offset:
            self.reset_to(offset)
            return
        slot = self._segments.slot_of(offset)
        active = self._segments.listed[slot]
        position = active.locate(offset)
        # A batch goes as a whole, and an offset that compaction has removed is no end: what is left says where it is.
        end_offset = active.end_before(position)
        self._lower_flushed(LogPosition(end_offset, active.base_offset, position))
        self._generation += 1
        with self._rewriting():
            doomed = rewriting.cut(self._segments, slot, position, end_offset)
        self._unsynced.segments[active] = None
        self.end_offset = end_offset
        # The batch that went as a whole may have begun below the start.
        self.start_offset = min(self.start_offset, end_offset)
        self.cleaned_offset = min(self.cleaned_offset, end_offset)
        self._end = LogPosition(end_offset, active.base_offset, active.size_bytes)
        self._roll_after_ms = _ASK_ALWAYS
        self._epochs.truncate_end(end_offset)
        self._latest_epoch = self._epochs.latest
        self._reload_producers()
        self._remove(doomed)
        if self.request_flush is not None:
            self.request_flush(self, 0.0)

    def _lower_flushed(self, position: LogPosition) -> None:
        """Before a truncation: after a crash in the middle of it, a shorter log must not look like a damaged one."""
        if self._flushed.offset > position.offset:
            self._flushed = position
            if self.before_truncate is not None:
                self.before_truncate()

    def reset_to(self, offset: int) -> None:
        """Drop everything and go on at `offset`: for a follower whose leader has nothing older."""
        if not self._loaded:
            self._load()
        self.start_offset = min(self.start_offset, offset)
        self._lower_flushed(LogPosition(self.start_offset, self._segments.bases[0], 0))
        self._generation += 1
        self._create_directory()
        with self._rewriting():
            doomed = rewriting.begin_anew(self._segments, self._segments.make(offset, self._clock.wall_ms()))
        self._snapshot_offset = -1
        self.start_offset = self.end_offset = offset
        self.cleaned_offset = 0
        self._end = self._flushed = LogPosition(offset, offset, 0)
        self._roll_after_ms = _ASK_ALWAYS
        self._epochs.clear()
        self._latest_epoch = -1
        self._producers.clear()
        self._remove(doomed)

    def _reload_producers(self) -> None:
        """The producers' state at the end of the log, after a truncation: from a snapshot below it."""
        offsets = self._segments.snapshots()
        state: Producers | None = None
        covered = -1
        while state is None and offsets:
            covered = offsets.pop()
            data = self._files.read_bytes(self.directory / file_name(covered, SNAPSHOT_SUFFIX))
            state = Producers.from_bytes(data or b"", self.config.max_producers)
        covered = self._snapshot_offset = covered if state is not None else -1
        self._producers = state or Producers(self.config.max_producers)
        recovery.replay(self._producers, self._segments.listed, covered, self._clock.wall_ms())

    # --- flushing -----------------------------------------------------------------------------------------------------

    @property
    def dirty(self) -> bool:
        """Whether something waits to be synced."""
        return bool(self._unsynced)

    def begin_flush(self, *, final: bool = False) -> FlushTicket | None:
        """What to sync, so that everything up to the current end is on disk; None where nothing is to do.

        A `final` one, before a clean close, also writes epochs that no record has followed yet.
        """
        if not self._loaded or not (self.dirty or (final and self._epochs.dirty)) or self.create_directory is not None:
            return None
        unsynced = self._unsynced
        pinned = unsynced.pin(self._files)
        replacements = []
        if self._epochs.dirty:
            data = checkpoint.render_epochs(self._epochs.entries())
            replacements.append((self.directory / checkpoint.LEADER_EPOCHS, data))
            self._epochs.dirty = False
        ticket = FlushTicket(
            self,
            self._end,
            self._generation,
            unsynced.rolled,
            pinned,
            list(unsynced.directories),
            unsynced.files,
            replacements,
        )
        self._unsynced = Unsynced()
        return ticket

    def flush_soon(self) -> None:
        """Do not wait any longer with what has been appended."""
        if self._flush_on_append and self._unsynced.segments and self.request_flush is not None:
            self.request_flush(self, 0.0)

    @property
    def written_end(self) -> LogPosition:
        """Where the next batch goes, as far as writes have returned; may be read in any thread."""
        return self._end

    @property
    def owes_more_than_data(self) -> bool:
        """Whether files other than the active segment wait for a sync; may be read in any thread."""
        return self._unsynced.more_than_data or self._epochs.dirty

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
            if ticket.end == self._end and ticket.generation == self._generation:
                # The ticket has followed the log to its very end.
                self._unsynced.segments.pop(self._segments.active, None)
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

    def note_created(self, paths: list[Path], directories: list[Path]) -> None:
        """Files and directories that were made for this log and must be synced with its first records."""
        self._unsynced.note_created(paths, directories)

    # --- life ---------------------------------------------------------------------------------------------------------

    def apply_config(self, config: LogConfig) -> None:
        """Use other settings from now on; what the old ones left unsynced is synced by the new ones."""
        self.config = config
        self._set_config(config)
        self._segments.set_index_interval(config.index_interval_bytes)
        self._producers.max_producers = config.max_producers
        self.flush_soon()

    def _set_config(self, config: LogConfig) -> None:
        self._limits = config.produce_limits
        self._target_codec = config.target_codec
        self._segment_bytes = config.segment_bytes
        self._segment_ms = config.max_segment_ms
        self._max_index_entries = max(config.segment_index_bytes // TIME_ENTRY_BYTES, 1)
        # An index grows by at most one entry per interval, so that below this size it cannot be full.
        self._roll_check_bytes = min(config.segment_bytes, self._max_index_entries * config.index_interval_bytes)
        self._flush_on_append = config.flush_mode is not FlushMode.OS
        self._special = (
            config.compact
            or config.validate_records
            or self._target_codec is not None
            or config.timestamp_type is TimestampType.LOG_APPEND
        )
        self._roll_after_ms = _ASK_ALWAYS
        """A batch with a later timestamp asks `_should_roll`."""

    def ensure_loaded(self) -> None:
        """Read the log's directory now rather than at its first use."""
        if not self._loaded:
            self._load()

    def _load(self) -> None:
        if self.failure is not None:
            raise self.failure
        now_ms = self._clock.wall_ms()
        try:
            loaded = recovery.load(
                self._files, self.directory, self._state, self.config.load_options, self._cache, now_ms
            )
        except StorageError as error:
            self.fail(error)
            raise
        self._segments.take(loaded.segments)
        active = self._segments.active
        self.start_offset = loaded.start_offset
        self.end_offset = loaded.end_offset
        self._end = LogPosition(loaded.end_offset, active.base_offset, active.size_bytes)
        self._flushed = loaded.flushed
        self._epochs = loaded.epochs
        self._latest_epoch = loaded.epochs.latest
        self._producers = loaded.producers
        self._snapshot_offset = loaded.snapshot_offset
        self._loaded = True
        if self._flushed.offset < self.end_offset:
            # A process that was killed leaves its writes to the kernel: they count once they are synced.
            for segment in self._segments.listed[self._segments.slot_of(self._flushed.offset) :]:
                self._unsynced.segments[segment] = None
            self._unsynced.directories[self.directory] = None

    def fail(self, error: StorageError) -> None:
        """Take the log offline: every use of it raises `error` from now on."""
        if self.failure is None:
            logger.error("%s is offline: %s", self.directory, error)
            self.failure = error
            if self.on_failure is not None:
                self.on_failure()
        self._loaded = False

    def prepare_close(self) -> None:
        """Write the hints that make the next start quick; they need no sync, as damage to them is found."""
        if not self._loaded:
            return
        self._segments.active.save_indexes(final=True)
        self._segments.active.cut_tail_if_needed()
        self._snapshot_producers()

    def close(self) -> None:
        """Write out what the next start wants, sync, and let go of the files. Harmless when done twice."""
        if self._loaded:
            self.prepare_close()
            self._flush(final=True)
            self._state = LogState(self.start_offset, self.end_offset, clean=True)
        self.release()

    def release(self) -> None:
        """Close the files and forget what was loaded; a log that is used again loads itself again."""
        self._segments.release()
        self._reading.forget()
        self._unsynced = Unsynced()
        self._loaded = False
