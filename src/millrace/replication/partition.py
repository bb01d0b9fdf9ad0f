"""One replica of one partition on this broker: a leader that appends, commits and serves, or a follower that copies.

Invariants
- A record is acknowledged with acks=all, and shown to consumers, only below the high watermark.
- A leader's high watermark never passes what every member of the ISR has (`isr`), and in `flush.mode=group` never what
  this broker's own fdatasync has put on disk; it never goes back.
- Every append carries the leader epoch under which it was made; a follower appends only what the leader of its epoch
  sent. Losing the leadership fails every wait for a commit.

The log opens at first use: thousands of idle partitions cost an object each and no file. Not here: who is to lead (the
image, through `replicas`), fetching (`follower`), asking for another ISR (`proposals`), bytes on disk (`storage.log`).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from millrace.errors import ApiError, ErrorCode, StorageError
from millrace.metadata.deltas import PartitionState
from millrace.model import NO_BROKER, NO_EPOCH
from millrace.records.batch import read_header, split
from millrace.replication import isr
from millrace.replication.isr import Follower
from millrace.replication.watermark import Reached, Watcher, Watermark
from millrace.storage.settings import FlushMode, LogConfig

if TYPE_CHECKING:
    from millrace.clock import Clock
    from millrace.replication.throttle import ReplicationQuota
    from millrace.storage.log import Appended, Log
    from millrace.storage.reading import ReadResult
    from millrace.storage.recovery import LogPosition

SETTLING_S: Final = 2.0
"""How long after it became writable a leader takes a gap in a producer's sequence for its own doing."""
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
    ) -> None:
        """`high_watermark` is what an earlier run remembered; it is believed as far as the log reaches."""
        self.topic = topic
        self.index = index
        self.topic_id = topic_id
        self.broker_id = broker_id
        self.leader_epoch = NO_EPOCH
        self.is_leader = False
        self.state = _ALONE
        """As the image has it, which may be behind what this broker has proposed."""
        self.min_insync_replicas = 1
        self.under_min_isr = False
        """Whether acks=all is refused: too few replicas are in sync."""
        self.high_watermark = Watermark(0)
        self.flush_watchers: set[Watcher] = set()
        """Called when more of the log is on disk: a follower that may not promise it before (`is_flushed`)."""
        self.end_watchers: set[Callable[[int], None]] = set()
        """Followers whose fetch waits for more: called with the size of every append, or with 0 if that was in vain."""
        self.start_watchers: set[Watcher] = set()
        """Called when a follower's log begins elsewhere, or may not be waited for any more (`wait_deleted`)."""
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
        self._open_log = open_log
        self._clock = clock
        self._max_lag_s = max_lag_s
        self._log: Log | None = None
        self._remembered = high_watermark
        self._committed: LogPosition | None = None
        self._followers: dict[int, Follower] = {}
        self._proposed: tuple[int, ...] | None = None
        self._epoch_start = 0
        self._alone = True
        self._writable_since_s = float("-inf")
        self._closed: ApiError | None = None

    def __repr__(self) -> str:
        role = "leader" if self.is_leader else f"follower of {self.state.leader}"
        state = "unopened" if self._log is None else f"high watermark {self.high_watermark.offset}"
        return f"Partition({self.topic}-{self.index}, {role}, epoch {self.leader_epoch}, {state})"

    # ------------------------------------------------------------------------------------------------------------- log

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
            if self.is_leader:
                self._begin_epoch(log)
        return self._log

    def forget_log(self) -> None:
        """The log is of no use any more, and is opened again, or made anew, when it is needed."""
        if self._log is not None:
            self._log.on_flushed.remove(self._note_flushed)
        self._log = self._committed = None
        self._remembered = 0
        self.high_watermark.offset = 0

    def reopen_log(self) -> None:
        """The log lies in another directory now, whole and on disk; nothing else has changed."""
        if self._log is None:
            return
        self._log.on_flushed.remove(self._note_flushed)
        log = self._log = self._open_log()
        log.on_flushed.append(self._note_flushed)
        self._committed = None
        if self.is_leader:
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
    def known_high_watermark(self) -> int:
        """The high watermark without opening the log: what the last run remembered, if it is still closed."""
        return self._remembered if self._log is None else self.high_watermark.offset

    # ------------------------------------------------------------------------------------------------------------ role

    def lead(self, state: PartitionState) -> None:
        """Lead from now on, or go on with another ISR: `state` is new in the image and names this broker leader."""
        begins = not self.is_leader or state.leader_epoch != self.leader_epoch
        left = {*self.state.isr} - {*state.isr}
        self.state = state
        self._proposed = None
        if begins:
            self.is_leader = True
            self.leader_epoch = state.leader_epoch
            # A silent member of the ISR has the whole allowed time to show itself, counted from now.
            now = self._writable_since_s = self._clock.monotonic()
            self._followers = {}
            for broker_id in state.replicas:
                if broker_id != self.broker_id:
                    in_sync = broker_id in state.isr
                    self._followers[broker_id] = Follower(broker_id, caught_up_at=now if in_sync else isr.NEVER)
        else:
            known, self._followers = self._followers, {}
            for broker_id in state.replicas:
                if broker_id != self.broker_id:
                    follower = known.get(broker_id) or Follower(broker_id)
                    # Whoever was taken out has to show itself by a fetch: commits must not wait for its return before.
                    self._followers[broker_id] = follower.forgotten() if broker_id in left else follower
        self._alone = not self._followers
        self._judge_min_isr()
        if self._log is not None:
            self._log.flush_patience_s = 0.0
            if begins:
                self._begin_epoch(self._log)
            else:
                self._advance()

    def follow(self, state: PartitionState) -> None:
        """Follow the leader that `state` names, or wait for one; whoever waits for a commit here is sent there."""
        self.state = state
        self.leader_epoch = state.leader_epoch
        if self.is_leader:
            self.is_leader = False
            self._followers = {}
            self._proposed = None
            self.under_min_isr = False
            self.high_watermark.fail(self.not_leader())
            self._wake_end(0)
            self._wake_start()
            if self._log is not None:
                self._log.flush_patience_s = 0.0

    def _begin_epoch(self, log: Log) -> None:
        try:
            log.assign_epoch(self.leader_epoch)
            self._epoch_start = log.end_offset
        except Exception:
            # Nobody may lead with a log that does not know the epoch: it is closed, and the next use tries again.
            self._let_go(log)
            raise
        self._advance()

    def _let_go(self, log: Log) -> None:
        self._remembered = self.high_watermark.offset
        log.on_flushed.remove(self._note_flushed)
        self._log = self._committed = None

    def set_min_insync_replicas(self, count: int) -> None:
        self.min_insync_replicas = count
        if self.is_leader:
            self._judge_min_isr()
            if self._log is not None:
                self._advance()

    def _judge_min_isr(self) -> None:
        # A topic with fewer replicas than it asks for in sync could never be written. While somebody outside of the ISR
        # is eligible nothing may be committed, whatever this broker's settings say: it would not have it.
        was_under, self.under_min_isr = (
            self.under_min_isr,
            len(self.state.isr) < min(self.min_insync_replicas, len(self.state.replicas)) or bool(self.state.elr),
        )
        if was_under and not self.under_min_isr:
            self._writable_since_s = self._clock.monotonic()

    def reconsider(self) -> None:
        """Brokers came or went: a replica that was about to join, and was waited for, may be dead."""
        if self.is_leader and not self._alone:
            self._advance()
            self._wake_start()

    def not_leader(self) -> ApiError:
        return ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER, f"broker {self.broker_id} does not lead this partition")

    # --------------------------------------------------------------------------------------------------------- writing

    def append(self, records: bytes | memoryview, *, from_client: bool = True) -> Appended:
        """Append whole batches now; the caller asks `when_committed` if it wants more than that."""
        if not self.is_leader:
            raise self.not_leader()
        if self.is_full:
            raise ApiError(ErrorCode.KAFKA_STORAGE_ERROR, "the disk of this partition's leader is full")
        log = self.log
        try:
            appended = log.append(
                records, leader_epoch=self.leader_epoch, now_ms=self._clock.wall_ms(), from_client=from_client
            )
        except ApiError as error:
            raise self._retriable_gap(error) from None
        except StorageError as error:
            self.write_failed(error)
            raise
        if self._alone:
            if log.config.flush_mode is not FlushMode.GROUP:
                self._commit(log.end)
        else:
            if self.end_watchers:
                self._wake_end(len(records))
            if len(self.state.isr) == 1:
                self._advance()
        return appended

    def _retriable_gap(self, error: ApiError) -> ApiError:
        """What to say to a producer whose batch is out of order, or where it is another error, that.

        Of two batches in flight the first may have been refused, because this broker did not lead yet or too few
        replicas were in sync, and the second come when that is over. The producer sends both again, in order, if only
        the second is refused in the same way. Told that it is out of order, librdkafka begins a new producer epoch for
        all partitions and sends again, under it, what may be in the log already.
        """
        is_settled = self._alone or self._clock.monotonic() - self._writable_since_s >= SETTLING_S
        if is_settled or error.code is not ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER:
            return error
        return ApiError(ErrorCode.NOT_ENOUGH_REPLICAS, f"{error.message}, which may have been refused a moment ago")

    def check_in_sync(self) -> None:
        """Refuse acks=all where too few replicas would have the record."""
        if self.under_min_isr:
            raise ApiError(
                ErrorCode.NOT_ENOUGH_REPLICAS,
                f"{len(self.state.isr)} replicas are in sync, min.insync.replicas is {self.min_insync_replicas}",
            )

    def when_committed(self, last_offset: int, reached: Reached) -> bool:
        """Have `reached` called once `last_offset` is committed; False, and no call, where it already is."""
        return self.high_watermark.when(last_offset + 1, reached)

    async def wait_committed(self, last_offset: int) -> None:
        """Return once `last_offset` is committed. Cancellation leaves the records where they are."""
        future = self.high_watermark.reach(last_offset + 1)
        if future is not None:
            await future

    @property
    def unsettled_end(self) -> int | None:
        """Up to where records may be acknowledged and are not committed, for want of this broker's disk alone.

        acks=1 does not wait for the disk. Where there is no other replica a client expects to find what was
        acknowledged, so whoever asks for it waits up to here (docs/decisions/0003). None where there is nothing such.
        """
        log = self._log
        if log is None or not self._alone or not self.is_leader or log.failure is not None:
            return None
        end = log.end_offset
        return end if end > self.high_watermark.offset else None

    def _wake_end(self, size_bytes: int) -> None:
        for watcher in tuple(self.end_watchers):
            watcher(size_bytes)

    # ------------------------------------------------------------------------------------------------------ committing

    def _note_flushed(self) -> None:
        """More of the log counts: it is on disk, or need not be any more."""
        if self.is_leader:
            self._advance()
        for watcher in tuple(self.flush_watchers):
            watcher()

    def _commit(self, position: LogPosition) -> None:
        if position.offset > self.high_watermark.offset:
            self._committed = position
            self.high_watermark.advance(position.offset)

    def _advance(self) -> None:
        """Move the high watermark as far as everybody who counts allows."""
        log = self._log
        if log is None:
            return
        own = log.flushed if log.config.flush_mode is FlushMode.GROUP else log.end
        if self._alone:
            self._commit(own)
            return
        if self.under_min_isr:
            return
        members = self._maximal_isr()
        mark = isr.high_watermark(own.offset, members, self._joining(log.end_offset, members), self._followers)
        if mark > self.high_watermark.offset:
            if mark == own.offset:
                self._committed = own
            self.high_watermark.advance(mark)

    def _maximal_isr(self) -> tuple[int, ...]:
        """The ISR with those who may be in it by now, as far as this leader can tell."""
        if self._proposed is None:
            return self.state.isr
        return tuple(dict.fromkeys((*self.state.isr, *self._proposed)))

    def counts(self, broker_id: int) -> bool:
        """Whether commits wait for this replica, as far as the leader can tell."""
        return broker_id in self.state.isr or (self._proposed is not None and broker_id in self._proposed)

    def _joining(self, log_end: int, members: tuple[int, ...]) -> list[int]:
        if len(members) > len(self._followers):  # everybody is a member already
            return []
        now = self._clock.monotonic()
        return [
            broker_id
            for broker_id, follower in self._followers.items()
            if broker_id not in members
            and follower.log_end >= 0
            and follower.is_in_step(log_end, now, self._max_lag_s)
            and self.is_eligible(broker_id, follower.broker_epoch)
        ]

    # ------------------------------------------------------------------------------------------------- leading others

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
        log_start: int = isr.UNKNOWN_OFFSET,
    ) -> ReadResult | tuple[int, int]:
        """Batches for a follower from `offset` on, committed or not; or where its log diverges: (epoch, its end).

        The follower has everything from `log_start` up to `offset`, which may move the high watermark and the low one.
        OFFSET_OUT_OF_RANGE where the log does not reach.

        What is appended next cannot be committed before it was fetched: where fetches wait for more, it need not be
        flushed any sooner. `flush_patience_s` is how long it may wait for a fetch that does not come.
        """
        follower = self._followers.get(broker_id)
        if follower is None:
            raise ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER, f"broker {broker_id} has no replica of this partition")
        if broker_epoch < follower.broker_epoch:
            raise ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER, f"broker {broker_id} was started again since")
        log = self.log
        if last_epoch >= 0:
            epoch, end = log.end_offset_for_epoch(last_epoch)
            if epoch >= 0 and (epoch < last_epoch or end < offset):
                return epoch, end
        if offset < log.start_offset or offset > log.end_offset:
            raise ApiError(
                ErrorCode.OFFSET_OUT_OF_RANGE, f"offset {offset} is not in {log.start_offset}..{log.end_offset}"
            )
        follower.fetched(offset, broker_epoch, log.end_offset, self._clock.monotonic())
        if log_start != follower.log_start:
            follower.log_start = log_start
            self._wake_start()
        if broker_id not in self.state.isr and self.wants_isr is not None and self._proposed is None:
            self._consider_joining(follower)
        self._advance()
        log.flush_patience_s = flush_patience_s
        read = log.read(offset, max_bytes, at_least_one=at_least_one)
        if read.data:
            log.flush_soon()  # while the follower does the same
        return read

    def _consider_joining(self, follower: Follower) -> None:
        if isr.may_join(follower, self.high_watermark.offset, self._epoch_start) and self.wants_isr is not None:
            self.wants_isr(self)

    def wanted_isr(self) -> tuple[tuple[int, int], ...] | None:
        """The ISR that should be, with broker epochs (-1 where they are not known), or None where it is fine."""
        if not self.is_leader or self._alone or self._log is None or self._log.failure is not None:
            return None
        end, now = self._log.end_offset, self._clock.monotonic()
        behind = set(isr.lagging(self.state.isr, self._followers, end, now, self._max_lag_s))
        stay = [broker_id for broker_id in self.state.isr if broker_id not in behind]
        join = [
            follower.broker_id
            for follower in self._followers.values()
            if follower.broker_id not in self.state.isr
            and follower.log_end >= 0
            and isr.may_join(follower, self.high_watermark.offset, self._epoch_start)
            and self.is_eligible(follower.broker_id, follower.broker_epoch)
        ]
        if not behind and not join:
            return None
        epochs = {broker_id: follower.broker_epoch for broker_id, follower in self._followers.items()}
        return tuple((broker_id, epochs.get(broker_id, -1)) for broker_id in (*stay, *join))

    def propose(self, members: tuple[int, ...]) -> None:
        """A new ISR is being asked for: until the image has a newer state, whoever may be in it counts."""
        self._proposed = members

    @property
    def in_step(self) -> frozenset[int]:
        """The followers that a consumer may be sent to: in the ISR, and heard of in this epoch."""
        return frozenset(
            each for each in self.state.isr if each in self._followers and self._followers[each].log_end >= 0
        )

    def log_end_of(self, broker_id: int) -> int:
        """Up to where a follower has come; UNKNOWN_OFFSET if it was not heard of."""
        follower = self._followers.get(broker_id)
        return isr.UNKNOWN_OFFSET if follower is None else follower.log_end

    # ------------------------------------------------------------------------------------------------------- following

    def append_from_leader(self, records: memoryview, leader_epoch: int) -> None:
        """Append what the leader of `leader_epoch` sent; what this log has already is passed over."""
        if self.is_leader or leader_epoch != self.leader_epoch:
            raise ApiError(ErrorCode.FENCED_LEADER_EPOCH, f"leader epoch {leader_epoch} is over")
        log = self.log
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

    @property
    def is_flushed(self) -> bool:
        """Whether a follower may promise everything it has."""
        log = self.log
        return log.config.flush_mode is not FlushMode.GROUP or log.flushed.offset >= log.end_offset

    # --------------------------------------------------------------------------------------------------------- reading

    def check_leader_epoch(self, epoch: int) -> None:
        """Refuse a client whose idea of the leadership is not ours (KIP-320)."""
        if epoch < 0 or epoch == self.leader_epoch:
            return
        if epoch < self.leader_epoch:
            raise ApiError(ErrorCode.FENCED_LEADER_EPOCH, f"leader epoch {epoch} is over; it is {self.leader_epoch}")
        raise ApiError(ErrorCode.UNKNOWN_LEADER_EPOCH, f"leader epoch {epoch} has not begun; it is {self.leader_epoch}")

    def read(self, offset: int, max_bytes: int, *, at_least_one: bool) -> ReadResult:
        """Committed batches from the one that holds `offset` on; raises OFFSET_OUT_OF_RANGE outside the log."""
        log = self.log
        if offset < log.start_offset or offset > log.end_offset:
            raise ApiError(
                ErrorCode.OFFSET_OUT_OF_RANGE, f"offset {offset} is not in {log.start_offset}..{log.end_offset}"
            )
        return log.read(offset, max_bytes, limit=self.committed, at_least_one=at_least_one)

    def latest_offset(self) -> int:
        """The high watermark, once it is known to hold for this leadership.

        A new leader may know an older mark than its predecessor told: until everything it began with is committed, the
        answer could go back (KIP-207).
        """
        mark = self.high_watermark.offset if self.is_open else self.committed.offset
        if not self._alone and mark < self._epoch_start:
            raise ApiError(ErrorCode.OFFSET_NOT_AVAILABLE, "the new leader does not know yet what is committed")
        return mark

    def delete_records_before(self, offset: int) -> int:
        """Move the start of the log up to `offset` (-1: the high watermark); returns the new start."""
        committed = self.committed.offset
        target = committed if offset == -1 else offset
        if target < 0 or target > committed:
            raise ApiError(ErrorCode.OFFSET_OUT_OF_RANGE, f"offset {offset} is beyond the high watermark {committed}")
        self.log.delete_records_before(target)
        self._wake_end(0)  # followers need not wait for records before they hear of it
        return self.log.start_offset

    @property
    def low_watermark(self) -> int:
        """Where the last of the live replicas begins; UNKNOWN_OFFSET while one was not heard of."""
        followers = (each.log_start for each in self._followers.values() if self.is_eligible(each.broker_id, -1))
        return min(self.log.start_offset, min(followers, default=self.log.start_offset))

    async def wait_deleted(self, offset: int) -> int:
        """Return the low watermark once it is at `offset` or above: no live replica has anything older."""
        moved = asyncio.Event()
        self.start_watchers.add(moved.set)
        try:
            while (mark := self.low_watermark) < offset:
                await moved.wait()
                moved.clear()
                if not self.is_leader:
                    raise self._closed or self.not_leader()
        finally:
            self.start_watchers.discard(moved.set)
        return mark

    def _wake_start(self) -> None:
        for watcher in tuple(self.start_watchers):
            watcher()

    def enforce_retention(self) -> None:
        """Drop segments that are too old or too many; never one that is not committed."""
        if self._log is not None or self._alone:
            self.log.enforce_retention(self._clock.wall_ms(), self.committed.offset)

    def compactable_log(self) -> Log | None:
        """The log, where its topic is compacted and it is in use; nothing above `committed` may be compacted."""
        if (self._log is None and not self._alone) or self._closed is not None:
            return None
        return self.log if self.log.config.compact else None

    # ---------------------------------------------------------------------------------------------------------- ending

    def close(self, reason: ApiError) -> None:
        """End every wait with `reason`; the log is its directory's to close or delete."""
        self._closed = reason
        self.is_leader = False
        self.high_watermark.fail(reason)
        self._wake_end(0)
        self._wake_start()
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
