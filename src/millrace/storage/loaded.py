"""A log whose directory was read: what of it is in memory, from its first use until it is released.

`Log` holds one while it has one and makes it when it needs one; here nothing has to ask whether it is there. Not here:
what is known of a log all the time (its offsets, settings, failure) and what may be done with it (`log`).

Owner: the log. `end` and `owes_more_than_data` may be read in any thread.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Final

from millrace.errors import ApiError, StorageError
from millrace.records.batch import BatchHeader
from millrace.records.compression import Buffer
from millrace.records.control import decode_end_marker
from millrace.storage import recovery
from millrace.storage.reading import Reading
from millrace.storage.recovery import Found, LogPosition
from millrace.storage.segment import SNAPSHOT_SUFFIX, Segment, file_name
from millrace.storage.segments import Segments
from millrace.storage.txnindex import AbortedTransaction
from millrace.storage.unsynced import Unsynced

logger = logging.getLogger(__name__)

ASK_ALWAYS: Final = -2
"""Below every timestamp that a batch can have."""


class LoadedLog:
    """The segments of a log, where it ends in them, and what its batches say of epochs and producers."""

    __slots__ = (
        "end",
        "epochs",
        "latest_epoch",
        "producers",
        "reading",
        "roll_after_ms",
        "segments",
        "snapshot_offset",
        "unsynced",
    )

    def __init__(self, segments: Segments, found: Found) -> None:
        segments.take(found.segments)
        active = segments.active
        self.segments = segments
        self.reading = Reading(segments)
        self.end = LogPosition(found.end_offset, active.base_offset, active.size_bytes)
        """Where the next batch goes, as far as writes have returned."""
        self.epochs = found.epochs
        self.latest_epoch = found.epochs.latest
        self.producers = found.producers
        self.snapshot_offset = found.snapshot_offset
        """Of the newest snapshot of the producers on disk, -1 where there is none."""
        self.roll_after_ms = ASK_ALWAYS
        """A batch with a later timestamp asks whether to roll."""
        self.unsynced = Unsynced()
        if found.flushed.offset < found.end_offset:
            # A process that was killed leaves its writes to the kernel: they count once they are synced.
            for segment in segments.listed[segments.slot_of(found.flushed.offset) :]:
                self.unsynced.segments[segment] = None
            self.unsynced.directories[segments.directory] = None
            if found.scanned_from is not None:
                # They were made anew, and are believed once the recovery point has passed them.
                for segment in segments.listed[segments.slot_of(found.scanned_from) : -1]:
                    self.unsynced.note_transactions(segment)

    def __repr__(self) -> str:
        return f"LoadedLog({self.segments}, {self.end})"

    @property
    def owes_more_than_data(self) -> bool:
        """Whether files other than the active segment wait for a sync."""
        return self.unsynced.more_than_data or self.epochs.dirty

    # --- what a batch brings ------------------------------------------------------------------------------------------

    def assign_epoch(self, epoch: int, offset: int) -> None:
        """A new leader epoch begins at `offset`; an old one is passed over."""
        if epoch > self.latest_epoch:
            self.epochs.assign(epoch, offset)
            self.latest_epoch = epoch

    def note_first_write(self, segment: Segment, max_timestamp_ms: int, now_ms: int, segment_ms: int) -> None:
        """A segment's file has just come to be: its name must be made durable too, and its age begins."""
        self.unsynced.directories[segment.directory] = None
        if max_timestamp_ms >= 0:
            self.roll_after_ms = max_timestamp_ms + segment_ms
        else:
            segment.created_ms = now_ms

    def note_marker(self, header: BatchHeader, base_offset: int, batch: Buffer, segment: Segment, now_ms: int) -> None:
        """The end of a transaction.

        Where this raises `StorageError`, a reader would take aborted records for committed ones: the log must not be
        used until a start has built the index anew.
        """
        try:
            marker = decode_end_marker(batch)
        except ApiError as error:
            logger.warning("%s: unreadable control batch at offset %d: %s", segment.directory, base_offset, error)
            return
        if marker is None:
            return
        aborted = self.producers.record_marker(header, base_offset, marker, now_ms)
        if aborted is not None:
            segment.txn_index.append(aborted)

    def roll(self, now_ms: int) -> Segment:
        """Seal the active segment and go on in a new one at the end; its file comes with its first batch."""
        old = self.segments.active
        try:
            old.seal()
            self.unsynced.note_sealed(old)
            self.snapshot_producers()
        except StorageError as error:
            # Both are rebuilt when they are missed; if the disk is really gone, the coming write says so.
            logger.warning("%s: could not save the state of a sealed segment: %s", old.directory, error)
        segment = self.segments.make(self.end.offset, now_ms)
        self.segments.add(segment)
        self.roll_after_ms = ASK_ALWAYS
        self.end = LogPosition(self.end.offset, segment.base_offset, 0)
        self.unsynced.rolled = True
        return segment

    def keep_transactions(self) -> None:
        """Before a clean close: the index of the active segment is believed, not made anew."""
        self.unsynced.note_transactions(self.segments.active)

    def snapshot_producers(self) -> None:
        """Save the producers' state at the end of the log, for the next start."""
        if self.snapshot_offset != self.end.offset:
            path = self.segments.directory / file_name(self.end.offset, SNAPSHOT_SUFFIX)
            self.segments.files.write_bytes(path, self.producers.to_bytes())
            self.snapshot_offset = self.end.offset

    # --- what is read of it -------------------------------------------------------------------------------------------

    def aborted_transactions(self, first_offset: int, end_offset: int) -> list[AbortedTransaction]:
        """The aborted transactions that touch the offsets from `first_offset` up to `end_offset`."""
        found: list[AbortedTransaction] = []
        for segment in self.segments.listed[self.segments.slot_of(first_offset) :]:
            found += segment.txn_index.overlapping(first_offset, end_offset)
            if segment.txn_index.is_last_word(end_offset):
                break
        return found

    def recall_ended(self, high_watermark: int, now_ms: int) -> None:
        """Find the transactions again whose markers are at `high_watermark` or beyond, where a snapshot hides them."""
        producers = self.producers
        if high_watermark < producers.ended_from:
            segments = self.segments
            past, covered = recovery.newest_snapshot(segments, high_watermark, producers.max_producers)
            recovery.replay(past, segments.listed, covered, now_ms)
            producers.ended, producers.ended_from = past.ended, past.ended_from
        producers.forget_ended(high_watermark)

    # --- what a rewriting leaves --------------------------------------------------------------------------------------

    def forget_gone(self) -> None:
        """Segments have gone or were replaced."""
        self.reading.forget()
        self.unsynced.keep_only(self.segments.listed)

    def cut_to(self, end: LogPosition, now_ms: int) -> None:
        """The files end at `end` now: epochs and producers are rolled back to it."""
        self.end = end
        self.unsynced.segments[self.segments.active] = None
        self.roll_after_ms = ASK_ALWAYS
        self.cut_epochs()
        self._reload_producers(now_ms)

    def cut_epochs(self) -> None:
        """Forget the epochs that begin at the end or beyond."""
        self.epochs.truncate_end(self.end.offset)
        self.latest_epoch = self.epochs.latest

    def _reload_producers(self, now_ms: int) -> None:
        """The producers' state at the end of the log: from a snapshot below it."""
        before = self.producers
        self.producers, self.snapshot_offset = recovery.newest_snapshot(
            self.segments, self.end.offset, before.max_producers
        )
        recovery.replay(self.producers, self.segments.listed, self.snapshot_offset, now_ms)
        # What had ended and was not committed is so still, as far as its marker was not cut off.
        self.producers.ended = deque(each for each in before.ended if each.marker_offset < self.end.offset)
        self.producers.ended_from = before.ended_from

    def begin_anew(self) -> None:
        """There is nothing but one empty segment now: no epoch and no producer is known."""
        base_offset = self.segments.active.base_offset
        self.end = LogPosition(base_offset, base_offset, 0)
        self.roll_after_ms = ASK_ALWAYS
        self.epochs.clear()
        self.latest_epoch = -1
        self.producers.clear()
        self.snapshot_offset = -1
