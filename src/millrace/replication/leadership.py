"""What a replica knows and does only while it leads: its followers, who counts, and how far what they have commits.

A `Partition` has a `Leadership` from the moment the image names this broker leader until it names another; a follower
has none, and nothing of it outlives the end. Elected again, in a new leader epoch, a leader knows nothing of its
followers until they fetch, while whoever waits goes on waiting.

Invariants
- The high watermark is never above the log end of anybody who counts: the ISR, whoever is proposed for it until the
  image has a newer state, whoever is about to be, and, in `flush.mode=group`, this broker's own disk (`isr`).
- While too few are in sync, or somebody outside of the ISR is eligible to lead, nothing is committed.
- A follower is heard in its newest incarnation alone; its fetch offset is a promise, made for this leader epoch.
- The end wakes everybody who waits for a follower: there is none to wait for any more.

Not here: the log, the high watermark itself and those who wait for it (`partition`), asking the controller for another
ISR (`proposals`), quotas and how much an answer brings (`serving`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from millrace.errors import ApiError, ErrorCode
from millrace.replication import isr
from millrace.replication.isr import Follower
from millrace.replication.watermark import Watcher
from millrace.storage.settings import FlushMode

if TYPE_CHECKING:
    from millrace.clock import Clock
    from millrace.metadata.deltas import PartitionState
    from millrace.replication.partition import Partition
    from millrace.storage.log import Log
    from millrace.storage.reading import ReadResult

GAPS_EXCUSED_S: Final = 2.0
"""How long after it became writable a leader takes a gap in a producer's sequence for its own doing."""


class Leadership:
    """One replica's time as leader. Owner: its partition, which makes, tells and ends it in synchronous calls."""

    __slots__ = (
        "_clock",
        "_ended",
        "_epoch_start",
        "_followers",
        "_has_proposed",
        "_max_lag_s",
        "_maximal_isr",
        "_replica",
        "_writable_since_s",
        "end_watchers",
        "is_alone",
        "start_watchers",
        "under_min_isr",
    )

    def __init__(self, replica: Partition, clock: Clock, max_lag_s: float) -> None:
        """Of nothing yet: `begin_epoch` comes next. A follower may be behind for `max_lag_s` before it is to leave."""
        self.is_alone = True
        """Whether there is no other replica."""
        self.under_min_isr = False
        """Whether acks=all is refused and nothing is committed: too few replicas are in sync."""
        self.end_watchers: set[Callable[[int], None]] = set()
        """Followers whose fetch waits for more: called with the size of every append, or with 0 if that was in vain."""
        self.start_watchers: set[Watcher] = set()
        """Called when a follower's log begins elsewhere, or may not be waited for any more (`wait_deleted`)."""
        self._replica = replica
        self._clock = clock
        self._max_lag_s = max_lag_s
        self._followers: dict[int, Follower] = {}
        self._maximal_isr: tuple[int, ...] = ()
        """The ISR with those who may be in it by now, as far as this leader can tell."""
        self._has_proposed = False
        self._epoch_start = 0
        """Where the log ended when this leader epoch began."""
        self._writable_since_s = float("-inf")
        self._ended: ApiError | None = None

    def __repr__(self) -> str:
        return f"Leadership({self._replica.topic}-{self._replica.index}, {len(self._followers)} followers)"

    # --- the state in the image ---------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """Lead in the epoch that the partition's state names. The log may be opened later: `begin_log`."""
        # A silent member of the ISR has the whole allowed time to show itself, counted from now.
        now = self._writable_since_s = self._clock.monotonic()
        state = self._replica.state
        self._followers = {
            broker_id: Follower(broker_id, caught_up_at=now if broker_id in state.isr else isr.NEVER)
            for broker_id in state.replicas
            if broker_id != self._replica.broker_id
        }
        self._take_state(state)

    def begin_log(self, log: Log) -> None:
        """The log knows the epoch: what it begins with is what a follower must have to join the ISR."""
        self._epoch_start = log.end_offset
        self.advance(log)

    def go_on(self, before: PartitionState) -> None:
        """The state is another than `before`, in the same epoch: what was proposed has happened, or is void."""
        state, known = self._replica.state, self._followers
        left = {*before.isr} - {*state.isr}
        self._followers = {}
        for broker_id in state.replicas:
            if broker_id != self._replica.broker_id:
                follower = known.get(broker_id) or Follower(broker_id)
                # Whoever was taken out has to show itself by a fetch: commits must not wait for its return before.
                self._followers[broker_id] = follower.forgotten() if broker_id in left else follower
        self._take_state(state)

    def _take_state(self, state: PartitionState) -> None:
        self.is_alone = not self._followers
        self._maximal_isr = state.isr
        self._has_proposed = False
        self.judge_min_isr()

    def judge_min_isr(self) -> None:
        """See whether enough replicas are in sync."""
        # A topic with fewer replicas than it asks for in sync could never be written. While somebody outside of the ISR
        # is eligible nothing may be committed, whatever this broker's settings say: it would not have it.
        replica, state = self._replica, self._replica.state
        was_under, self.under_min_isr = (
            self.under_min_isr,
            len(state.isr) < min(replica.min_insync_replicas, len(state.replicas)) or bool(state.elr),
        )
        if was_under and not self.under_min_isr:
            self._writable_since_s = self._clock.monotonic()

    def reconsider(self, log: Log | None) -> None:
        """Brokers came or went: a replica that was about to join, and was waited for, may be dead."""
        if not self.is_alone:
            if log is not None:
                self.advance(log)
            self._wake_start()

    def end(self, reason: ApiError) -> None:
        """This broker leads no more; whoever waits for a follower here is told."""
        self._ended = reason
        self.wake_followers()
        self._wake_start()

    # --- committing ---------------------------------------------------------------------------------------------------

    def appended(self, log: Log, size_bytes: int) -> None:
        """There is more for followers to fetch. Where nobody else counts it is committed, if it need not be on disk."""
        if self.is_alone:
            if log.config.flush_mode is not FlushMode.GROUP:
                self._replica.commit(log.end)
            return
        if self.end_watchers:
            for watcher in tuple(self.end_watchers):
                watcher(size_bytes)
        if len(self._replica.state.isr) == 1:
            self.advance(log)

    def advance(self, log: Log) -> None:
        """Move the high watermark as far as everybody who counts allows."""
        replica = self._replica
        own = log.flushed if log.config.flush_mode is FlushMode.GROUP else log.end
        if self.is_alone:
            replica.commit(own)
            return
        if self.under_min_isr:
            return
        members, followers = self._maximal_isr, self._followers
        # Where everybody is a member already nobody can join.
        joining = () if len(members) > len(followers) else self._joining(log.end_offset, members)
        mark = isr.high_watermark(own.offset, members, joining, followers)
        if mark == own.offset:
            replica.commit(own)
        elif mark > replica.high_watermark.offset:
            replica.high_watermark.advance(mark)

    def _joining(self, log_end: int, members: tuple[int, ...]) -> list[int]:
        now = self._clock.monotonic()
        return [
            broker_id
            for broker_id, follower in self._followers.items()
            if broker_id not in members
            and follower.log_end >= 0
            and follower.is_in_step(log_end, now, self._max_lag_s)
            and self._replica.is_eligible(broker_id, follower.broker_epoch)
        ]

    def counts(self, broker_id: int) -> bool:
        """Whether commits wait for this replica, as far as the leader can tell."""
        return broker_id in self._maximal_isr

    def check_known(self, mark: int) -> None:
        """Refuse to call `mark` the end of what is committed before everything this leader began with is (KIP-207).

        A new leader may know an older mark than its predecessor told: the answer could go back.
        """
        if not self.is_alone and mark < self._epoch_start:
            raise ApiError(ErrorCode.OFFSET_NOT_AVAILABLE, "the new leader does not know yet what is committed")

    def retriable_gap(self, error: ApiError) -> ApiError:
        """What to say to a producer whose batch is out of order, or where it is another error, that.

        Of two batches in flight the first may have been refused, because this broker did not lead yet or too few
        replicas were in sync, and the second come when that is over. The producer sends both again, in order, if only
        the second is refused in the same way. Told that it is out of order, librdkafka begins a new producer epoch for
        all partitions and sends again, under it, what may be in the log already.
        """
        is_steady = self.is_alone or self._clock.monotonic() - self._writable_since_s >= GAPS_EXCUSED_S
        if is_steady or error.code is not ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER:
            return error
        return ApiError(ErrorCode.NOT_ENOUGH_REPLICAS, f"{error.message}, which may have been refused a moment ago")

    # --- followers ----------------------------------------------------------------------------------------------------

    def serve_follower(
        self,
        broker_id: int,
        broker_epoch: int,
        offset: int,
        last_epoch: int,
        max_bytes: int,
        *,
        at_least_one: bool,
        flush_patience_s: float,
        log_start: int,
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
        log = self._replica.log
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
        if broker_id not in self._replica.state.isr and not self._has_proposed:
            self._consider_joining(follower)
        self.advance(log)
        log.flush_patience_s = flush_patience_s
        read = log.read(offset, max_bytes, at_least_one=at_least_one)
        if read.data:
            log.flush_soon()  # while the follower does the same
        return read

    def _consider_joining(self, follower: Follower) -> None:
        replica = self._replica
        if replica.wants_isr is not None and self._may_join(follower):
            replica.wants_isr(replica)

    def _may_join(self, follower: Follower) -> bool:
        return isr.may_join(follower, self._replica.high_watermark.offset, self._epoch_start)

    def wanted_isr(self, log: Log) -> tuple[tuple[int, int], ...] | None:
        """The ISR that should be, with broker epochs (-1 where they are not known), or None where it is fine."""
        if self.is_alone or log.failure is not None:
            return None
        members, followers = self._replica.state.isr, self._followers
        behind = set(isr.lagging(members, followers, log.end_offset, self._clock.monotonic(), self._max_lag_s))
        stay = [broker_id for broker_id in members if broker_id not in behind]
        join = [
            broker_id
            for broker_id, follower in followers.items()
            if broker_id not in members
            and follower.log_end >= 0
            and self._may_join(follower)
            and self._replica.is_eligible(broker_id, follower.broker_epoch)
        ]
        if not behind and not join:
            return None
        epochs = {broker_id: follower.broker_epoch for broker_id, follower in followers.items()}
        return tuple((broker_id, epochs.get(broker_id, -1)) for broker_id in (*stay, *join))

    def propose(self, members: tuple[int, ...]) -> None:
        """A new ISR is being asked for: until the image has a newer state, whoever may be in it counts."""
        self._has_proposed = True
        self._maximal_isr = tuple(dict.fromkeys((*self._replica.state.isr, *members)))

    @property
    def in_step(self) -> frozenset[int]:
        """The followers that a consumer may be sent to: in the ISR, and heard of in this epoch."""
        return frozenset(
            broker_id for broker_id in self._replica.state.isr if self.log_end_of(broker_id) != isr.UNKNOWN_OFFSET
        )

    def log_end_of(self, broker_id: int) -> int:
        """Up to where a follower has come; UNKNOWN_OFFSET if it was not heard of."""
        follower = self._followers.get(broker_id)
        return isr.UNKNOWN_OFFSET if follower is None else follower.log_end

    def max_lag(self, log_end: int) -> int:
        """How many records the follower lacks that is furthest behind, of those that were heard of."""
        return max((log_end - each.log_end for each in self._followers.values() if each.log_end >= 0), default=0)

    def wake_followers(self) -> None:
        """Answer the fetches that wait for more, though there is none."""
        for watcher in tuple(self.end_watchers):
            watcher(0)

    # --- deletion -----------------------------------------------------------------------------------------------------

    @property
    def low_watermark(self) -> int:
        """Where the last of the live replicas begins; UNKNOWN_OFFSET while one was not heard of."""
        own, is_eligible = self._replica.log.start_offset, self._replica.is_eligible
        followers = (each.log_start for each in self._followers.values() if is_eligible(each.broker_id, -1))
        return min(own, min(followers, default=own))

    async def wait_deleted(self, offset: int) -> int:
        """Return the low watermark once it is at `offset` or above: no live replica has anything older."""
        moved = asyncio.Event()
        self.start_watchers.add(moved.set)
        try:
            while (mark := self.low_watermark) < offset:
                await moved.wait()
                moved.clear()
                if self._ended is not None:
                    raise self._ended
        finally:
            self.start_watchers.discard(moved.set)
        return mark

    def _wake_start(self) -> None:
        for watcher in tuple(self.start_watchers):
            watcher()
