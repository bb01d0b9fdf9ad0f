"""One replica of one partition on this broker: its log, its role, what of it is committed, reading and following.

What there is only while it leads is its `leadership`: a follower has None there.

Invariants
- A record is acknowledged with acks=all, and shown to consumers, only below the high watermark.
- A leader's high watermark is moved by its leadership alone, and never back; a follower's is what its leader said.
- The last stable offset is the least of the high watermark, the first offset of every open transaction, and the first
  offset of every ended one whose marker is not below the high watermark: below it nothing can change what became of a
  record. Leader and followers know it from their own logs. It moves with the high watermark alone, so that whoever
  waits for it waits for that.
- Every append carries the leader epoch under which it was made; a follower appends only what the leader of its epoch
  sent. Losing the leadership fails every wait for a commit.

The log opens at first use: thousands of idle partitions cost an object each and no file. Not here: who is to lead (the
image, through `replicas`), fetching (`follower`), followers and who counts (`leadership`), asking for another ISR
(`proposals`), bytes on disk (`storage.log`).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from millrace.errors import ApiError, ErrorCode, StorageError
from millrace.metadata.deltas import PartitionState
from millrace.model import NO_BROKER, NO_EPOCH
from millrace.records.batch import read_header, split
from millrace.records.control import EndMarker, MarkerType, encode_end_marker
from millrace.replication.counting import ReplicaCounts
from millrace.replication.isr import UNKNOWN_OFFSET
from millrace.replication.leadership import Leadership
from millrace.replication.watermark import Reached, Watcher, Watermark
from millrace.storage.settings import FlushMode, LogConfig

if TYPE_CHECKING:
    from millrace.clock import Clock
    from millrace.replication.throttle import ReplicationQuota
    from millrace.storage.log import Appended, Log
    from millrace.storage.producers import Verification
    from millrace.storage.reading import ReadResult
    from millrace.storage.recovery import LogPosition

_ALONE: Final = PartitionState((NO_BROKER,), (NO_BROKER,), NO_BROKER)


class Partition:
    """A replica. Owner: the event loop; nothing here awaits while it holds a half-made change."""

    def __init__(
        self,
        topic: str,
        index: int,
        topic_id: uuid.UUID,
        *,
        open_log: Callable[[], Log],
        clock: Clock,
        broker_id: int = NO_BROKER,
        high_watermark: int = 0,
        max_lag_s: float = 30.0,
        counts: ReplicaCounts | None = None,
    ) -> None:
        """`high_watermark` is what an earlier run remembered; it is believed as far as the log reaches."""
        self.topic = topic
        self.index = index
        self.topic_id = topic_id
        self.broker_id = broker_id
        self.leader_epoch = NO_EPOCH
        self.leadership: Leadership | None = None
        """There while this broker leads the partition."""
        self.state = _ALONE
        """As the image has it, which may be behind what this broker has proposed."""
        self.min_insync_replicas = 1
        self.high_watermark = Watermark(0)
        self.flush_watchers: set[Watcher] = set()
        """Called when more of the log is on disk: a follower that may not promise it before (`is_flushed`)."""
        self.wants_isr: Callable[[Partition], object] | None = None
        """Called when the leader wants another ISR than the image has; `wanted_isr` says which."""
        self.leader_quota: ReplicationQuota | None = None
        """What followers that are behind read is limited by it; None, nearly always, where there is no limit."""
        self.follower_quota: ReplicationQuota | None = None
        """The same for what this replica fetches while it is behind."""
        self.is_full = False
        """Whether it takes no more records, because its disk is full."""
        self.write_failed: Callable[[StorageError], object] = _nobody
        """Called when a record could not be written."""
        self.is_eligible: Callable[[int, int], bool] = _anybody
        """Whether a broker, in this incarnation (-1: any), may be in the ISR: the image knows it and it is alive."""
        self.bytes_in = 0
        """Of what clients have produced here; as all counts, since this broker has the replica."""
        self.records_in = 0
        self.bytes_out = 0
        """Of what was sent to consumers."""
        self.records_out = 0
        self._counts = counts or ReplicaCounts()
        self._open_log = open_log
        self._clock = clock
        self._max_lag_s = max_lag_s
        self._log: Log | None = None
        self._remembered = high_watermark
        self._committed: LogPosition | None = None
        self._stable: LogPosition | None = None
        self._closed: ApiError | None = None

    def __repr__(self) -> str:
        role = "leader" if self.leadership is not None else f"follower of {self.state.leader}"
        state = "unopened" if self._log is None else f"high watermark {self.high_watermark.offset}"
        return f"Partition({self.topic}-{self.index}, {role}, epoch {self.leader_epoch}, {state})"

    # --- log ----------------------------------------------------------------------------------------------------------

    @property
    def log(self) -> Log:
        """The log on disk, opened now if it was not yet."""
        if self._log is None:
            if self._closed is not None:
                raise ApiError(self._closed.code, self._closed.message)
            log = self._open_log()
            log.on_flushed.append(self._note_flushed)
            self._log = log
            self.high_watermark.advance(min(max(self._remembered, log.start_offset), log.end_offset))
            self._take_up(log)
        return self._log

    def forget_log(self) -> None:
        """The log is of no use any more, and is opened again, or made anew, when it is needed."""
        if self._log is not None:
            self._log.on_flushed.remove(self._note_flushed)
        self._log = self._committed = self._stable = None
        self._remembered = 0
        self.high_watermark.offset = 0

    def reopen_log(self) -> None:
        """The log lies in another directory now, whole and on disk; nothing else has changed."""
        if self._log is None:
            return
        self._log.on_flushed.remove(self._note_flushed)
        log = self._log = self._open_log()
        log.on_flushed.append(self._note_flushed)
        self._committed = self._stable = None
        self._recall_ended(log)
        if self.leadership is not None:
            log.assign_epoch(self.leader_epoch)  # a log without records has not written down its epochs
        self._note_flushed()

    def apply_config(self, config: LogConfig) -> None:
        """Give the log other settings. With another `flush.mode`, what may be committed or promised is another."""
        log = self.log
        mode_before = log.config.flush_mode
        log.apply_config(config)
        if config.flush_mode is not mode_before and log.failure is None:
            self._note_flushed()

    @property
    def is_open(self) -> bool:
        return self._log is not None

    @property
    def open_log(self) -> Log | None:
        """The log, if it was opened."""
        return self._log

    @property
    def committed(self) -> LogPosition:
        """Where consumers may read up to."""
        log, offset = self.log, self.high_watermark.offset
        position = self._committed
        if position is None or position.offset != offset:
            self._committed = position = log.position_of(offset)
        return position

    @property
    def last_stable_offset(self) -> int:
        """Below it every transaction is over for good: where consumers of committed records may read up to."""
        log = self._log or self.log
        mark = self.high_watermark.offset
        first = log.first_unstable_offset(mark)
        return mark if first is None or first > mark else first

    @property
    def stable(self) -> LogPosition:
        """The place of the last stable offset."""
        offset = self.last_stable_offset
        if offset == self.high_watermark.offset:
            return self.committed
        position = self._stable
        if position is None or position.offset != offset:
            self._stable = position = self.log.position_of(offset)
        return position

    def _take_up(self, log: Log) -> None:
        """The log was opened: all that has to be known of it, or nothing."""
        try:
            self._recall_ended(log)
        except Exception:
            # As a log without its epoch: a leader would say of it what it does not know.
            self._let_go(log)
            raise
        if self.leadership is not None:
            self._begin_epoch(self.leadership, log)

    def _recall_ended(self, log: Log) -> None:
        """A snapshot of the producers has no transactions that ended: those that are not committed count, too."""
        if self.high_watermark.offset < log.end_offset:
            log.recall_ended(self.high_watermark.offset)

    @property
    def known_high_watermark(self) -> int:
        """What the next run may believe of the high watermark, without opening the log for it.

        A power cut may bring back records that were cut off here and replaced by committed ones: those are committed,
        but what is remembered must not reach beyond what is on disk.
        """
        log, mark = self._log, self.high_watermark.offset
        if log is None:
            return self._remembered
        return min(mark, log.flushed_offset) if log.config.flush_mode is FlushMode.GROUP else mark

    # --- role ---------------------------------------------------------------------------------------------------------

    @property
    def is_leader(self) -> bool:
        return self.leadership is not None

    def lead(self, state: PartitionState) -> None:
        """Lead from now on, or go on with another ISR: `state` is new in the image and names this broker leader."""
        leadership, before = self.leadership, self.state
        self.state = state
        if before.isr is not state.isr and before is not _ALONE:
            self._counts.isr_changed(before.isr, state.isr)
        if self._log is not None:
            self._log.flush_patience_s = 0.0
        if leadership is not None and state.leader_epoch == self.leader_epoch:
            leadership.go_on(before)
            if self._log is not None:
                leadership.advance(self._log)
            return
        self.leader_epoch = state.leader_epoch
        if leadership is None:
            leadership = self.leadership = Leadership(self, self._clock, self._max_lag_s)
        leadership.begin_epoch()
        if self._log is not None:
            self._begin_epoch(leadership, self._log)

    def follow(self, state: PartitionState) -> None:
        """Follow the leader that `state` names, or wait for one; whoever waits for a commit here is sent there."""
        self.state = state
        self.leader_epoch = state.leader_epoch
        if self.leadership is not None:
            self._end_leadership(self.leadership, self.not_leader())
            if self._log is not None:
                self._log.flush_patience_s = 0.0

    def _begin_epoch(self, leadership: Leadership, log: Log) -> None:
        try:
            log.assign_epoch(self.leader_epoch)
        except Exception:
            # Nobody may lead with a log that does not know the epoch: it is closed, and the next use tries again.
            self._let_go(log)
            raise
        leadership.begin_log(log)

    def _end_leadership(self, leadership: Leadership, reason: ApiError) -> None:
        self.leadership = None
        self.high_watermark.fail(reason)
        leadership.end(reason)

    def _let_go(self, log: Log) -> None:
        self._remembered = self.high_watermark.offset
        log.on_flushed.remove(self._note_flushed)
        self._log = self._committed = self._stable = None

    def set_min_insync_replicas(self, count: int) -> None:
        self.min_insync_replicas = count
        if self.leadership is not None:
            self.leadership.judge_min_isr()
            if self._log is not None:
                self.leadership.advance(self._log)

    def reconsider(self) -> None:
        """Brokers came or went."""
        if self.leadership is not None:
            self.leadership.reconsider(self._log)

    def not_leader(self) -> ApiError:
        return ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER, f"broker {self.broker_id} does not lead this partition")

    # --- writing ------------------------------------------------------------------------------------------------------

    def append(
        self,
        records: bytes | memoryview,
        *,
        from_client: bool = True,
        verification: Verification | None = None,
        transaction_version: int = 0,
    ) -> Appended:
        """Append whole batches now; the caller asks `when_committed` if it wants more than that.

        The first batch of a transaction needs the answer of the coordinator: see `begin_verification`.
        """
        leadership = self.leadership
        if leadership is None:
            raise self.not_leader()
        if self.is_full:
            raise ApiError(ErrorCode.KAFKA_STORAGE_ERROR, "the disk of this partition's leader is full")
        log = self._log or self.log
        try:
            appended = log.append(
                records,
                leader_epoch=self.leader_epoch,
                now_ms=self._clock.wall_ms(),
                from_client=from_client,
                verification=verification,
                transaction_version=transaction_version,
            )
        except ApiError as error:
            raise leadership.retriable_gap(error) from None
        except StorageError as error:
            self.write_failed(error)
            raise
        base_offset, last_offset, _, _, is_duplicate = appended
        if from_client and not is_duplicate:
            self.bytes_in += len(records)
            self.records_in += last_offset - base_offset + 1
        leadership.appended(log, len(records))
        return appended

    def begin_verification(
        self, producer_id: int, epoch: int, sequence: int, *, bumps_epoch: bool
    ) -> Verification | None:
        """Before a batch of a transaction: what to hold while its coordinator is asked about it (KIP-890).

        None where there is nobody to ask, because the transaction is open here; INVALID_PRODUCER_EPOCH where the
        producer is an old one. With the answer it is handed to `append`, which refuses the batch if a marker has come
        meanwhile. `bumps_epoch` says that the producer has a new epoch in every transaction (Produce v12).
        """
        if self.leadership is None:
            raise self.not_leader()
        return (self._log or self.log).begin_verification(producer_id, epoch, sequence, bumps_epoch=bumps_epoch)

    def end_transaction(
        self,
        producer_id: int,
        producer_epoch: int,
        coordinator_epoch: int,
        *,
        commit: bool,
        transaction_version: int,
        now_ms: int,
    ) -> Appended:
        """Write the marker that ends the producer's transaction here; without one it does no harm.

        INVALID_PRODUCER_EPOCH for a marker of an older epoch than is known (from transaction version 2 on also for one
        of the same epoch, unless it is the same marker again), TRANSACTION_COORDINATOR_FENCED for one of a coordinator
        that was replaced. The producer has the marker's epoch from then on.
        """
        marker = EndMarker(MarkerType.COMMIT if commit else MarkerType.ABORT, coordinator_epoch)
        batch = encode_end_marker(marker, producer_id=producer_id, producer_epoch=producer_epoch, timestamp_ms=now_ms)
        appended = self.append(batch, from_client=False, transaction_version=transaction_version)
        self.log.forget_ended(self.high_watermark.offset)
        return appended

    @property
    def under_min_isr(self) -> bool:
        """Whether acks=all is refused: it leads, and too few replicas are in sync."""
        return self.leadership is not None and self.leadership.under_min_isr

    def check_in_sync(self) -> None:
        """Refuse acks=all where too few replicas would have the record."""
        leadership = self.leadership
        if leadership is not None and leadership.under_min_isr:
            raise ApiError(
                ErrorCode.NOT_ENOUGH_REPLICAS,
                f"{len(self.state.isr)} replicas are in sync, min.insync.replicas is {self.min_insync_replicas}",
            )

    def when_committed(self, last_offset: int, reached: Reached) -> bool:
        """Have `reached` called once `last_offset` is committed; False, and no call, where it already is."""
        return self.high_watermark.when(last_offset + 1, reached)

    def is_committed(self, last_offset: int) -> bool:
        return self.high_watermark.offset > last_offset

    async def wait_committed(self, last_offset: int) -> None:
        """Return once `last_offset` is committed. Cancellation leaves the records where they are."""
        future = self.high_watermark.reach(last_offset + 1)
        if future is not None:
            await future

    @property
    def unflushed_end(self) -> int | None:
        """Up to where records may be acknowledged and are not committed, for want of this broker's disk alone.

        acks=1 does not wait for the disk. Where there is no other replica a client expects to find what was
        acknowledged, so whoever asks for it waits up to here (docs/decisions/0003). None where there is nothing such.
        """
        log, leadership = self._log, self.leadership
        if log is None or leadership is None or not leadership.is_alone or log.failure is not None:
            return None
        end = log.end_offset
        return end if end > self.high_watermark.offset else None

    # --- committing ---------------------------------------------------------------------------------------------------

    def _note_flushed(self) -> None:
        """More of the log counts: it is on disk, or need not be any more."""
        leadership, log = self.leadership, self._log
        if leadership is not None and log is not None:
            leadership.advance(log)
        for watcher in tuple(self.flush_watchers):
            watcher()

    def commit(self, position: LogPosition) -> None:
        """Everything below `position` is committed: for the leadership to say, which knows who has it."""
        if position.offset > self.high_watermark.offset:
            self._committed = position
            self.high_watermark.advance(position.offset)

    # --- leading others -----------------------------------------------------------------------------------------------

    def serve_follower(
        self,
        broker_id: int,
        broker_epoch: int,
        offset: int,
        last_epoch: int,
        max_bytes: int,
        *,
        at_least_one: bool,
        flush_patience_s: float = 0.0,
        log_start: int = UNKNOWN_OFFSET,
    ) -> ReadResult | tuple[int, int]:
        """Answer a follower's fetch: see `Leadership.serve_follower`."""
        leadership = self.leadership
        if leadership is None:
            raise self.not_leader()
        return leadership.serve_follower(
            broker_id,
            broker_epoch,
            offset,
            last_epoch,
            max_bytes,
            at_least_one=at_least_one,
            flush_patience_s=flush_patience_s,
            log_start=log_start,
        )

    def wanted_isr(self) -> tuple[tuple[int, int], ...] | None:
        """The ISR that should be, with broker epochs (-1 where they are not known), or None where it is fine."""
        if self.leadership is None or self._log is None:
            return None
        return self.leadership.wanted_isr(self._log)

    def propose(self, members: tuple[int, ...]) -> None:
        """A new ISR is being asked for: until the image has a newer state, whoever may be in it counts."""
        if self.leadership is not None:
            self.leadership.propose(members)

    # --- following ----------------------------------------------------------------------------------------------------

    def append_from_leader(self, records: memoryview, leader_epoch: int) -> None:
        """Append what the leader of `leader_epoch` sent; what this log has already is passed over."""
        if self.leadership is not None or leader_epoch != self.leader_epoch:
            raise ApiError(ErrorCode.FENCED_LEADER_EPOCH, f"leader epoch {leader_epoch} is over")
        log = self.log
        self._counts.bytes_in += len(records)
        for piece in _pieces(records, log.end_offset, log.config.segment_bytes):
            start_offset = log.start_offset
            if log.end_offset == start_offset and (first := read_header(piece).base_offset) < start_offset:
                # The leader's log begins within this batch: so does this one, which has nothing yet.
                log.reset_to(first)
            try:
                log.append_as_follower(piece)
            except StorageError as error:
                self.write_failed(error)
                raise
            if log.start_offset < start_offset:
                log.delete_records_before(start_offset)

    def follow_leader_marks(self, high_watermark: int, start_offset: int) -> None:
        """Take over what the leader says is committed, and where its log begins."""
        log = self.log
        self.high_watermark.advance(min(high_watermark, log.end_offset))
        log.forget_ended(self.high_watermark.offset)
        if start_offset > log.start_offset:
            log.delete_records_before(min(start_offset, self.high_watermark.offset))

    def fetch_position(self) -> tuple[int, int]:
        """Where a follower goes on, and the epoch of its last record."""
        log = self.log
        return log.end_offset, log.latest_epoch

    def truncate_to_leader(self, epoch: int, end_offset: int) -> None:
        """Cut what diverges from the leader, whose log ends epoch `epoch` at `end_offset` (KIP-101, KIP-279).

        Where this log does not know that epoch it is cut to the end of the one before, and the leader asked again.
        """
        log = self.log
        own_epoch, own_end = log.end_offset_for_epoch(epoch)
        target = min(end_offset, log.end_offset) if own_epoch < 0 else min(own_end, log.end_offset)
        if own_epoch == epoch:
            target = min(target, end_offset)
        log.truncate_to(target)
        self._lower_high_watermark(log.end_offset)

    def restart_at(self, offset: int) -> None:
        """Drop everything and go on at `offset`: the leader has nothing older."""
        self.log.reset_to(offset)
        self._lower_high_watermark(offset)
        self.high_watermark.advance(offset)

    def _lower_high_watermark(self, log_end: int) -> None:
        """Only an unclean election takes committed records back; what is written next is not committed by that."""
        self.high_watermark.offset = min(self.high_watermark.offset, log_end)
        self._committed = self._stable = None  # other records may come to lie there

    @property
    def is_flushed(self) -> bool:
        """Whether a follower may promise everything it has."""
        log = self.log
        return log.config.flush_mode is not FlushMode.GROUP or log.flushed.offset >= log.end_offset

    # --- reading ------------------------------------------------------------------------------------------------------

    def check_leader_epoch(self, epoch: int) -> None:
        """Refuse a client whose idea of the leadership is not ours (KIP-320)."""
        if epoch < 0 or epoch == self.leader_epoch:
            return
        if epoch < self.leader_epoch:
            raise ApiError(ErrorCode.FENCED_LEADER_EPOCH, f"leader epoch {epoch} is over; it is {self.leader_epoch}")
        raise ApiError(ErrorCode.UNKNOWN_LEADER_EPOCH, f"leader epoch {epoch} has not begun; it is {self.leader_epoch}")

    def read(self, offset: int, max_bytes: int, *, at_least_one: bool, limit: LogPosition | None = None) -> ReadResult:
        """Batches from the one that holds `offset` on, up to `limit`, or else all that are committed.

        Raises OFFSET_OUT_OF_RANGE outside the log.
        """
        log = self.log
        if offset < log.start_offset or offset > log.end_offset:
            raise ApiError(
                ErrorCode.OFFSET_OUT_OF_RANGE, f"offset {offset} is not in {log.start_offset}..{log.end_offset}"
            )
        return log.read(offset, max_bytes, limit=limit or self.committed, at_least_one=at_least_one)

    def latest_offset(self) -> int:
        """The high watermark, once it is known to hold for this leadership."""
        mark = self.high_watermark.offset if self.is_open else self.committed.offset
        if self.leadership is not None:
            self.leadership.check_known(mark)
        return mark

    def delete_records_before(self, offset: int) -> int:
        """Move the start of the log up to `offset` (-1: the high watermark); returns the new start."""
        committed = self.committed.offset
        target = committed if offset == -1 else offset
        if target < 0 or target > committed:
            raise ApiError(ErrorCode.OFFSET_OUT_OF_RANGE, f"offset {offset} is beyond the high watermark {committed}")
        self.log.delete_records_before(target)
        if self.leadership is not None:
            self.leadership.wake_followers()  # they need not wait for records before they hear of it
        return self.log.start_offset

    async def wait_deleted(self, offset: int) -> int:
        """Return the low watermark once it is at `offset` or above: no live replica has anything older."""
        if self.leadership is None:
            raise self._closed or self.not_leader()
        return await self.leadership.wait_deleted(offset)

    def enforce_retention(self) -> None:
        """Drop segments that are too old or too many; never one that is not committed."""
        if not self._is_unused:
            self.log.enforce_retention(self._clock.wall_ms(), self.committed.offset)

    def compactable_log(self) -> Log | None:
        """The log, where its topic is compacted and it is in use; nothing above `committed` may be compacted."""
        if self._is_unused or self._closed is not None:
            return None
        return self.log if self.log.config.compact else None

    @property
    def _is_unused(self) -> bool:
        """Whether the log waits for the first fetch of a follower, or append, to be opened."""
        return self._log is None and self.leadership is not None and not self.leadership.is_alone

    # --- ending -------------------------------------------------------------------------------------------------------

    def close(self, reason: ApiError) -> None:
        """End every wait with `reason`; the log is its directory's to close or delete."""
        self._closed = reason
        if self.leadership is not None:
            self._end_leadership(self.leadership, reason)
        else:
            self.high_watermark.fail(reason)
        if self._log is not None:
            self._log.on_flushed.remove(self._note_flushed)


def _anybody(_broker_id: int, _broker_epoch: int) -> bool:
    return True


def _nobody(_error: StorageError) -> None:
    """Tells nobody."""


def _pieces(records: memoryview, end_offset: int, segment_bytes: int) -> Iterator[memoryview]:
    """What of `records` lies at or above `end_offset`, in pieces that fit a segment; nearly always all in one."""
    start = stop = 0
    for header, data in split(records, partial_end=True):
        if header.next_offset <= end_offset and start == stop:
            start += len(data)
            stop = start
            continue
        if stop > start and stop - start + len(data) > segment_bytes:
            yield records[start:stop]
            start = stop
        stop += len(data)
    if stop > start:
        yield records[start:stop]
