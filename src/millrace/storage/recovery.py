"""From a directory to the state of a log: quickly after a clean stop, by scanning what may be torn after a crash.

What is believed after a crash, in this order:
1. Batches below the recovery point were synced. They are checked all the same (from the segment that holds the point
   on), and damage there is `CorruptLogError`: the partition goes offline, nothing is cut.
2. From the recovery point on, batches count up to the first that is not whole: header and length sound, CRC right,
   offsets increasing. What follows was never acknowledged as durable and is cut off. If sound batches follow the bad
   one all the same (a disk that wrote out of order, or bit rot), the cut-off bytes are kept in
   `<base>.log.cut-<position>`.
3. Indexes, snapshots and the epoch checkpoint are hints: rebuilt where they are missing, torn or wrong.
4. Segments follow each other without a gap, compacted ones too. What compaction left half done is ended first (`swap`).

After a clean stop the recovery point is the log's end, so only the tail of the last segment is looked at.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from crc32c import crc32c

from millrace.errors import ApiError, CorruptLogError, StorageError
from millrace.records.batch import CRC_START, HEADER, HEADER_BYTES, MAGIC, MIN_BATCH_LENGTH, BatchHeader
from millrace.records.control import decode_end_marker
from millrace.storage import checkpoint, swap
from millrace.storage.epochs import LeaderEpochs
from millrace.storage.files import Files
from millrace.storage.index import OffsetIndex, TimeIndex, TimestampOffset
from millrace.storage.producers import Producers
from millrace.storage.segment import (
    DELETED_SUFFIX,
    INDEX_SUFFIX,
    LOG_SUFFIX,
    MAX_RELATIVE_OFFSET,
    OFFSET_DIGITS,
    SCAN_CHUNK_BYTES,
    SNAPSHOT_SUFFIX,
    TIME_INDEX_SUFFIX,
    TXN_INDEX_SUFFIX,
    Segment,
    file_name,
    is_offset_file,
)
from millrace.storage.segments import Segments

logger = logging.getLogger(__name__)

_LEFTOVERS: Final = (DELETED_SUFFIX, ".tmp")


class LogPosition(NamedTuple):
    """A place between two batches: the offset that comes next, and where its bytes are or will be."""

    offset: int
    segment_base: int
    position_bytes: int


@dataclass(frozen=True, slots=True)
class LogState:
    """What the checkpoints of the log's directory say of it."""

    start_offset: int = 0
    recovery_point: int = 0
    clean: bool = False
    """Whether the last stop was clean; then the recovery point is the end."""


@dataclass(slots=True)
class Found:
    """A log's state as found on disk."""

    segments: list[Segment]
    start_offset: int
    end_offset: int
    flushed: LogPosition
    epochs: LeaderEpochs
    producers: Producers
    snapshot_offset: int
    """The newest snapshot on disk, -1 where there is none."""
    scanned_from: int | None
    """From which segment on the indexes were made anew; None after a clean stop."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The settings that loading depends on."""

    producer_expiration_ms: int
    max_producers: int


def load(home: Segments, state: LogState, options: LoadOptions, now_ms: int) -> Found:
    """Read a log's directory; may cut a torn tail off, raises `CorruptLogError` where flushed data is damaged."""
    segments, snapshots = _list(home, state, now_ms)
    try:
        return _load(home, segments, snapshots, state, options, now_ms)
    except StorageError:
        home.let_go(segments)
        raise


def _load(
    home: Segments, segments: list[Segment], snapshots: list[int], state: LogState, options: LoadOptions, now_ms: int
) -> Found:
    files, directory = home.files, home.directory
    tail: _Tail | None = None
    if state.clean:
        tail = _clean_tail(segments, state.recovery_point)
        if tail is None:
            logger.warning(
                "%s stopped cleanly at offset %d but does not end there; checking it", directory, state.recovery_point
            )
    if tail is None:
        tail = _scan_tail(files, directory, segments, state)
    if state.start_offset > tail.end_offset:
        # DeleteRecords moved the start and its checkpoint survived, some records below it did not. Nothing that anybody
        # may read is missing, and the offsets go on from the start, so that none is given out twice.
        tail = _start_over(home, segments, state.start_offset, now_ms)
    obsolete = [offset for offset in snapshots if offset > tail.end_offset]
    for offset in obsolete:
        files.remove(directory / file_name(offset, SNAPSHOT_SUFFIX))
        snapshots.remove(offset)
    if tail.dropped or obsolete:
        # Records that are appended now may end where one of them begins: it must not come back.
        files.sync_directory(directory)
    start_offset = max(state.start_offset, segments[0].base_offset)
    epochs = _load_epochs(files, directory, segments, tail)
    producers, snapshot_offset = _load_producers(files, directory, segments, snapshots, tail, options, now_ms)
    producers.expire(now_ms, options.producer_expiration_ms)
    return Found(
        segments, start_offset, tail.end_offset, tail.flushed, epochs, producers, snapshot_offset, tail.scanned_from
    )


def _list(home: Segments, state: LogState, now_ms: int) -> tuple[list[Segment], list[int]]:
    """The segments and snapshots that are there, oldest first; leftovers of unfinished work are removed."""
    files, directory = home.files, home.directory
    swap.recover(files, directory)
    names = files.names(directory)
    bases = sorted(int(name[:OFFSET_DIGITS]) for name in names if is_offset_file(name, LOG_SUFFIX))
    snapshots = sorted(int(name[:OFFSET_DIGITS]) for name in names if is_offset_file(name, SNAPSHOT_SUFFIX))
    known = set(bases)
    for name in names:
        orphan = any(
            is_offset_file(name, suffix) and int(name[:OFFSET_DIGITS]) not in known
            for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX, TXN_INDEX_SUFFIX)
        )
        if orphan or name.endswith(_LEFTOVERS):
            files.remove(directory / name)
    segments = [
        home.make(
            base,
            now_ms,
            size_bytes=files.size_of(directory / file_name(base, LOG_SUFFIX)) or 0,
            exists=True,
            sealed=base != bases[-1],
        )
        for base in bases
    ]
    if not segments:
        if state.recovery_point > state.start_offset:
            raise CorruptLogError(
                f"{directory} has no segment, but records up to offset {state.recovery_point} were flushed to it"
            )
        segments.append(home.make(state.start_offset, now_ms))
    return segments, snapshots


# --- the end of the log -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Tail:
    end_offset: int
    flushed: LogPosition
    scanned_from: int | None
    """The base offset of the first segment that was scanned; None after a clean stop."""
    epochs: list[tuple[int, int]]
    """The leader epochs met by the scan, with the offset where each was met first."""
    dropped: bool = False
    """Whether segments were removed."""


def _clean_tail(segments: list[Segment], expected_end: int) -> _Tail | None:
    """The end as the last segment shows it, or None where that is not the end that was promised."""
    active = segments[-1]
    end_offset = active.base_offset
    if active.exists:
        try:
            index = active.offset_index
            position = index.positions[-1] if len(index) else 0
            largest = active.largest_timestamp()
            for _, header in active.walk(position):
                end_offset = header.next_offset
                if header.largest_timestamp_ms > largest.timestamp_ms:
                    largest = TimestampOffset(header.largest_timestamp_ms, header.last_offset)
        except CorruptLogError:
            return None
        active.max_timestamp = largest
        active.bytes_since_index = active.size_bytes - position
    if end_offset != expected_end:
        return None
    return _Tail(end_offset, LogPosition(end_offset, active.base_offset, active.size_bytes), None, [])


def _scan_tail(files: Files, directory: Path, segments: list[Segment], state: LogState) -> _Tail:
    """Check everything from the segment of the recovery point on, and cut off what is not whole."""
    point = state.recovery_point
    first = len(segments) - 1
    while first > 0 and segments[first].base_offset > point:
        first -= 1
    tail = _Tail(segments[first].base_offset, LogPosition(0, 0, -1), segments[first].base_offset, [])
    for index in range(first, len(segments)):
        segment = segments[index]
        if segment.base_offset != tail.end_offset:
            gap = "it does not follow the one before"
            tail.dropped = _cut(files, directory, segments, index, 0, tail.end_offset, point, gap)
            break
        file_size = segment.size_bytes
        reason = _scan_segment(segment, tail, point)
        if reason is not None:
            position = segment.size_bytes
            salvage = _sound_batch_follows(segment, position, file_size, tail.end_offset)
            if tail.end_offset >= point and salvage:
                _keep_cut_bytes(files, segment, position, file_size)
            tail.dropped = _cut(files, directory, segments, index, position, tail.end_offset, point, reason)
            break
    if tail.end_offset < point:
        raise CorruptLogError(
            f"{directory} ends at offset {tail.end_offset}, but records up to {point} were flushed to it"
        )
    active = segments[-1]
    if tail.flushed.position_bytes < 0:
        tail.flushed = LogPosition(tail.end_offset, active.base_offset, active.size_bytes)
    return tail


def _cut(
    files: Files,
    directory: Path,
    segments: list[Segment],
    index: int,
    position: int,
    end_offset: int,
    point: int,
    reason: str,
) -> bool:
    """Drop all from `position` in segment `index` on, unless that was flushed once; says whether segments went."""
    segment = segments[index]
    if end_offset < point:
        raise CorruptLogError(
            f"{segment.log_file.path} is damaged at byte {position} (offset {end_offset}): {reason}; "
            f"records up to offset {point} were flushed, so nothing is cut: restore the file or delete the partition"
        )
    file_size = files.size(segment.log_file)
    logger.warning(
        "recovered %s: cut %d bytes at byte %d of %s and %d later segments, the log ends at offset %d (%s)",
        directory,
        file_size - position,
        position,
        segment.log_file.path.name,
        len(segments) - index - 1,
        end_offset,
        reason,
    )
    keep = index + 1 if position or index == 0 else index
    for dropped in reversed(segments[keep:]):
        dropped.close()
        for path in dropped.paths():
            files.remove(path)
    shorter = len(segments) > keep
    del segments[keep:]
    if keep > index:
        files.truncate(segment.log_file, position)
        # The next record may go to the next segment: then nobody would sync this one again, and what was cut off could
        # come back behind its end.
        files.datasync(segment.log_file)
    segments[-1].sealed = False
    return shorter


def _scan_segment(segment: Segment, tail: _Tail, point: int) -> str | None:
    """Check one segment and build its indexes on the way; returns why it stopped before the end of the file, if it did.

    Afterwards `segment.size_bytes` is the extent of the sound batches.
    """
    file_size, segment.size_bytes = segment.size_bytes, 0
    segment.set_indexes(OffsetIndex(), TimeIndex())
    segment.max_timestamp = TimestampOffset(-1, segment.base_offset)
    segment.bytes_since_index = 0
    segment.txn_index.reset()
    expected = max(tail.end_offset, segment.base_offset)
    reason: str | None = None

    def stop(text: str) -> None:
        nonlocal reason
        reason = text

    for header in _sound_batches(segment, 0, file_size, expected, stop):
        if tail.flushed.position_bytes < 0 and header.base_offset >= point:
            tail.flushed = LogPosition(header.base_offset, segment.base_offset, segment.size_bytes)
        if not tail.epochs or header.leader_epoch > tail.epochs[-1][0]:
            tail.epochs.append((header.leader_epoch, header.base_offset))
        segment.note(header.last_offset, header.largest_timestamp_ms, header.size_bytes)
        tail.end_offset = header.next_offset
    tail.end_offset = max(tail.end_offset, segment.base_offset)
    if reason is None or segment.size_bytes:
        largest = segment.largest_timestamp()
        segment.time_index.maybe_append(largest.timestamp_ms, largest.offset - segment.base_offset)
    return reason


def _sound_batches(
    segment: Segment, position: int, file_size: int, expected: int, stop: Callable[[str], None]
) -> Iterator[BatchHeader]:
    """The headers of whole, undamaged batches from `position` on; `stop` is told why the rest is not."""
    chunk = memoryview(b"")
    start = position
    while position < file_size:
        pos = position - start
        if pos + HEADER_BYTES > len(chunk):
            chunk, start, pos = _read(segment, position, min(SCAN_CHUNK_BYTES, file_size - position)), position, 0
            if len(chunk) < HEADER_BYTES:
                return stop(f"only {file_size - position} bytes of a batch")
        header = BatchHeader._make(HEADER.unpack_from(chunk, pos))
        size = header.size_bytes
        if header.magic != MAGIC or header.batch_length < MIN_BATCH_LENGTH:
            return stop(f"no batch header (magic {header.magic}, length {header.batch_length})")
        if size > file_size - position:
            return stop(f"a batch of {size} bytes, of which {file_size - position} are there")
        if header.base_offset < expected or header.last_offset_delta < 0:
            return stop(f"offsets {header.base_offset} to {header.last_offset} where {expected} should follow")
        if header.last_offset - segment.base_offset > MAX_RELATIVE_OFFSET:
            return stop(f"offset {header.last_offset} is too far from the segment's base")
        if pos + size > len(chunk):
            want = max(size, min(SCAN_CHUNK_BYTES, file_size - position))
            chunk, start, pos = _read(segment, position, want), position, 0
        if crc32c(chunk[pos + CRC_START : pos + size]) != header.crc:
            return stop("the CRC of a batch does not match")
        yield header
        expected = header.next_offset
        position += size
    return None


def _read(segment: Segment, position: int, size_bytes: int) -> memoryview:
    return memoryview(segment.pread(size_bytes, position))


def _sound_batch_follows(segment: Segment, position: int, file_size: int, end_offset: int) -> bool:
    """Whether behind the bad batch at `position` there is a sound one, found through the bad one's own length."""
    if file_size - position < 2 * HEADER_BYTES:
        return False
    bad = BatchHeader._make(HEADER.unpack(_read(segment, position, HEADER_BYTES)))
    follow = position + bad.size_bytes
    if bad.batch_length < MIN_BATCH_LENGTH or follow >= file_size:
        return False
    return next(_sound_batches(segment, follow, file_size, end_offset, lambda _: None), None) is not None


def _keep_cut_bytes(files: Files, segment: Segment, position: int, file_size: int) -> None:
    path = segment.log_file.path
    kept = path.with_name(f"{path.name}.cut-{position}")
    files.write_bytes(kept, bytes(_read(segment, position, file_size - position)))
    logger.error("%s: sound batches follow a damaged one; the %d bytes that are cut off are kept in %s",
                 path, file_size - position, kept.name)  # fmt: skip


def _start_over(home: Segments, segments: list[Segment], offset: int, now_ms: int) -> _Tail:
    for segment in segments:
        segment.close()
        for path in segment.paths():
            home.files.remove(path)
    fresh = home.make(offset, now_ms)
    fresh.create()
    segments[:] = [fresh]
    return _Tail(offset, LogPosition(offset, offset, 0), None, [], dropped=True)


# --- what is rebuilt --------------------------------------------------------------------------------------------------


def _load_epochs(files: Files, directory: Path, segments: list[Segment], tail: _Tail) -> LeaderEpochs:
    stored = checkpoint.read_epochs(files, directory / checkpoint.LEADER_EPOCHS)
    if stored is None:
        epochs = LeaderEpochs()
        scanned_from = tail.scanned_from
        for segment in segments:
            if scanned_from is not None and segment.base_offset >= scanned_from:
                break
            for _, header in segment.walk():
                epochs.assign(header.leader_epoch, header.base_offset)
    else:
        epochs = LeaderEpochs(stored)
        epochs.truncate_end(tail.end_offset if tail.scanned_from is None else tail.scanned_from)
    for epoch, offset in tail.epochs:
        epochs.assign(epoch, offset)
    if stored is not None and epochs.entries() == stored:
        epochs.dirty = False
    return epochs


def _load_producers(
    files: Files,
    directory: Path,
    segments: list[Segment],
    snapshots: list[int],
    tail: _Tail,
    options: LoadOptions,
    now_ms: int,
) -> tuple[Producers, int]:
    """The newest usable snapshot, brought up to date from the batch headers behind it.

    A scan has emptied the transaction indexes of the segments it went through, so then the replay starts with them.
    """
    newest = tail.end_offset if tail.scanned_from is None else tail.scanned_from
    state: Producers | None = None
    covered = -1
    kept = -1
    for offset in reversed(snapshots):
        path = directory / file_name(offset, SNAPSHOT_SUFFIX)
        if kept < 0:
            kept = offset
        if state is not None or offset > newest:
            continue
        state = Producers.from_bytes(files.read_bytes(path) or b"", options.max_producers)
        if state is None:
            logger.warning("producer snapshot %s is damaged; the state is rebuilt from the log", path)
            files.remove(path)
            if kept == offset:
                kept = -1
        else:
            covered = offset
    if state is None:
        state = Producers(options.max_producers)
    replay(state, segments, covered, now_ms, rebuild_from=tail.scanned_from)
    return state, kept


def newest_snapshot(home: Segments, end_offset: int, max_producers: int) -> tuple[Producers, int]:
    """The producers of the newest usable snapshot at or below `end_offset`, and its offset; nobody and -1 without."""
    for offset in reversed(home.snapshots()):
        if offset <= end_offset:
            data = home.files.read_bytes(home.directory / file_name(offset, SNAPSHOT_SUFFIX))
            state = Producers.from_bytes(data or b"", max_producers)
            if state is not None:
                return state, offset
    return Producers(max_producers), -1


def replay(
    state: Producers, segments: list[Segment], from_offset: int, now_ms: int, *, rebuild_from: int | None = None
) -> None:
    """Apply the batches from `from_offset` on to the producers' state.

    Aborted transactions are added to the indexes of segments at or above `rebuild_from`.
    """
    state.ended_from = max(from_offset, 0)
    for index, segment in enumerate(segments):
        if index + 1 < len(segments) and segments[index + 1].base_offset <= from_offset:
            continue
        position = segment.locate(from_offset) if from_offset > segment.base_offset else 0
        for place, header in segment.walk(position):
            if header.producer_id < 0 or header.base_offset < from_offset:
                continue
            if not header.is_control:
                state.record(header, header.base_offset, now_ms)
                continue
            try:
                marker = decode_end_marker(segment.pread(header.size_bytes, place))
            except ApiError as error:
                logger.warning("%s: unreadable control batch at byte %d: %s", segment.log_file.path, place, error)
                continue
            if marker is None:
                continue
            aborted = state.record_marker(header, header.base_offset, marker, now_ms)
            if aborted is not None and rebuild_from is not None and segment.base_offset >= rebuild_from:
                segment.txn_index.append(aborted)
