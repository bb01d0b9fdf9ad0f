"""How a leader reads for a follower that fetches: what it may have, how much at once, and when.

A fetch gives every partition its due in one pass: the follower's offset is noted (`leadership` commits by it), one that
is behind gets nothing while its quota is used up (`throttle`), and where much is being produced the answer waits a
little for more (`gathering`). Whoever serves the fetch asks `holds_back` once, then reads, and as long as there is too
little watches and reads again.

Not here: sessions, the form of an answer and what an error is answered with (`handlers.fetch`). Owner: the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from millrace.errors import MillraceError
from millrace.storage.reading import ReadResult
from millrace.wire.hot import FetchResult, TopicKey

if TYPE_CHECKING:
    from millrace.clock import Clock, Timer
    from millrace.replication.replicas import Replicas
    from millrace.replication.throttle import ReplicationQuota


class Wanted(Protocol):
    """One partition of a follower's fetch."""

    key: TopicKey
    index: int
    current_leader_epoch: int
    fetch_offset: int
    last_fetched_epoch: int
    max_bytes: int
    log_start_offset: int
    sent_start_offset: int


W = TypeVar("W", bound=Wanted)


class FollowerReader(Generic[W]):
    """Reads for a follower. Its offsets are noted at the first read: what it asks for later in a wait is the same.

    What a quota holds back counts as not there; the wait ends when there may be room again. What is not enough yet
    (`replication.gathering`) is not read at first: the wait ends when it is, or has lasted long enough.
    """

    is_replica = True

    def __init__(
        self,
        *,
        broker_id: int,
        broker_epoch: int,
        replicas: Replicas,
        clock: Clock,
        failed: Callable[[W, MillraceError], FetchResult],
    ) -> None:
        self._broker_id = broker_id
        self._broker_epoch = broker_epoch
        self._replicas = replicas
        self._clock = clock
        self._failed = failed
        self._wake: Callable[[], None] | None = None
        self._timer: Timer | None = None
        self._held_back_s = 0.0
        self._taken: list[tuple[ReplicationQuota, int]] = []
        self._gathering = replicas.gathering_for(broker_id)
        self._wanted_bytes = 0
        self._gathered_bytes = 0
        self._only_note = False
        """The next read takes note of the follower's offsets, and reads nothing."""
        self._patience: Timer | None = None

    def holds_back(self, wanted: list[W]) -> bool:
        """Whether the follower shall wait because more is about to come; asked once, before the first read."""
        self._wanted_bytes = wanted_bytes = self._gathering.wanted_bytes(self._clock.monotonic())
        if not wanted_bytes:
            return False
        gathered_bytes = 0
        for item in wanted:
            partition = self._replicas.led(item.key, item.index)
            if partition is not None and partition.is_open:
                size_bytes = partition.log.bytes_after(item.fetch_offset)
                if size_bytes is None:
                    return False
                gathered_bytes += size_bytes
        self._gathered_bytes = gathered_bytes
        self._only_note = gathered_bytes < wanted_bytes
        return self._only_note

    def read_all(self, wanted: list[W], max_bytes: int) -> tuple[list[tuple[W, FetchResult]], int, bool]:
        """Read every wanted partition; the flag says that waiting would not make the answer any better."""
        outcome: list[tuple[W, FetchResult]] = []
        size_bytes = 0
        answer_now = False
        held_back_s = 0.0
        only_note, self._only_note = self._only_note, False
        flush_patience_s = self._gathering.longest_s if self._wanted_bytes else 0.0
        self._give_back()
        self._end_patience()
        for item in wanted:
            try:
                partition = self._replicas.find(item.key, item.index)
                partition.check_leader_epoch(item.current_leader_epoch)
                room = 0 if only_note else max(min(item.max_bytes, max_bytes - size_bytes), 0)
                quota = partition.leader_quota
                wait_s = 0.0
                if quota is not None:
                    leadership = partition.leadership
                    if leadership is not None and not leadership.counts(self._broker_id):
                        wait_s = quota.wait_s()
                        held_back_s = max(held_back_s, wait_s)
                read = partition.serve_follower(
                    self._broker_id,
                    self._broker_epoch,
                    item.fetch_offset,
                    item.last_fetched_epoch,
                    0 if wait_s else room,
                    at_least_one=size_bytes == 0 and not wait_s and not only_note,
                    flush_patience_s=flush_patience_s,
                    log_start=item.log_start_offset,
                )
                mark, start = partition.high_watermark.offset, partition.log.start_offset
                stable = partition.last_stable_offset
                if isinstance(read, ReadResult):
                    size_bytes += len(read.data)
                    if quota is not None:
                        self._take(quota, len(read.data))
                    result = FetchResult(item.index, 0, mark, stable, start, read.data)
                    if 0 <= item.log_start_offset < start != item.sent_start_offset:
                        answer_now = True  # DeleteRecords waits for the follower to hear of it
                else:
                    result = FetchResult(item.index, 0, mark, stable, start, diverging=read)
                    answer_now = True
            except MillraceError as error:
                result = self._failed(item, error)
                answer_now = True
            outcome.append((item, result))
        if not only_note:
            self._gathering.answered(size_bytes)
        self._held_back_s = held_back_s
        if self._wake is not None:
            self._wake_after(held_back_s)
        return outcome, size_bytes, answer_now

    def count_sent(self, size_bytes: int) -> None:
        """What was read last is sent."""
        self._replicas.counts.bytes_out += size_bytes

    def _take(self, quota: ReplicationQuota, size_bytes: int) -> None:
        quota.take(size_bytes)
        self._taken.append((quota, size_bytes))

    def _give_back(self) -> None:
        """A fetch that waits for more is read again: what it read before was not sent."""
        for quota, size_bytes in self._taken:
            quota.take(-size_bytes)
        self._taken.clear()

    def _wake_after(self, seconds: float) -> None:
        """End the wait then, or (0.0) only when something is appended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds and self._wake is not None:
            self._timer = self._clock.call_later(seconds, self._wake)

    def _end_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def watch(self, wanted: list[W], wake: Callable[[], None]) -> Callable[[], None]:
        """Have `wake` called when enough was appended, or a moment after anything was; returns what ends that."""
        led = (self._replicas.led(item.key, item.index) for item in wanted)
        leaderships = [each.leadership for each in led if each is not None and each.leadership is not None]
        clock = self._clock

        def grown(size_bytes: int) -> None:
            self._gathered_bytes += size_bytes
            if not size_bytes or self._gathered_bytes >= self._wanted_bytes:
                wake()
            elif self._patience is None:
                self._patience = clock.call_later(self._gathering.longest_s, wake)

        for leadership in leaderships:
            leadership.end_watchers.add(grown)
        if self._gathered_bytes:
            self._patience = clock.call_later(self._gathering.longest_s, wake)
        self._wake = wake
        self._wake_after(self._held_back_s)

        def unwatch() -> None:
            self._wake = None
            self._wake_after(0.0)
            self._end_patience()
            for leadership in leaderships:
                leadership.end_watchers.discard(grown)

        return unwatch
