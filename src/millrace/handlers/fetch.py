"""Fetch: batches out of partitions, as the bytes they are on disk; committed ones to consumers, all to followers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from millrace.errors import ApiError, ErrorCode, MillraceError, code_of
from millrace.handlers.context import RequestContext
from millrace.handlers.leaders import leader_hint
from millrace.handlers.promise import Promise
from millrace.handlers.registry import api
from millrace.storage.log import ReadResult
from millrace.wire.hot import (
    FETCH_TOPIC_ID_FROM,
    FetchCall,
    FetchReply,
    FetchResult,
    TopicKey,
    read_fetch,
    write_fetch,
)
from millrace.wire.keys import ApiKey
from millrace.wire.messages.fetch import FetchRequest

if TYPE_CHECKING:
    from millrace.clock import Timer
    from millrace.handlers.fetch_sessions import Fetching, Wanted
    from millrace.replication.partition import Partition
    from millrace.replication.throttle import ReplicationQuota

FOLLOWERS_SERVE_FROM: Final = 11
"""Older consumers do not know that a follower may answer them, and take its high watermark for the leader's."""

_Outcome = list[tuple["Wanted", FetchResult]]


@api(ApiKey.FETCH, FetchRequest, "4-18", overlaps=True, decoder=read_fetch, encoder=write_fetch)
def fetch(context: RequestContext, call: FetchCall) -> FetchReply | Promise[FetchReply | Exception]:
    """Answer with what is committed, or wait for `min_bytes` for at most `max_wait_ms`.

    A reply starts with the whole batch that holds the asked offset. The first partition with data gives at least one
    batch whatever the size limits (KIP-74). A waiting fetch wakes at the first commit that concerns it. Incremental
    sessions (KIP-227) mention only what changed.

    A follower (a broker of this cluster, in the incarnation that the image knows) also gets what is not committed, and
    commits by asking for more. It is told where its log diverges (KIP-595), and waits for appends rather than commits;
    where much is being produced it waits a little longer for several at once (`replication.gathering`).
    A consumer in the rack of an in-sync follower is sent there, if the broker has a rack-aware `replica.selector.class`
    (KIP-392); from v11 on a follower serves consumers up to the high watermark it knows. A client that came to a broker
    which does not lead any more is told who does (KIP-951). A follower that is behind gets nothing of a throttled
    partition while the quota is used up (KIP-73).

    Versions: v12 adds leader-epoch checks; v13 names topics by id; v15 moves the replica id into a tagged field; v16
    tells where leaders are.

    Not done: aborted transactions, fetches of followers before v15 (no broker of this cluster sends them).
    """
    try:
        reader = _reader(context, call)
        fetching = context.broker.fetch_sessions.begin(
            call, by_topic_id=context.version >= FETCH_TOPIC_ID_FROM, now=context.broker.clock.monotonic()
        )
    except ApiError as error:
        return FetchReply(error.code, 0, [])
    max_bytes = call.max_bytes if reader.is_replica else min(call.max_bytes, context.broker.fetch_max_bytes)
    may_wait = call.max_wait_ms > 0 and bool(fetching.wanted)
    holds_back = may_wait and reader.holds_back(fetching.wanted)
    outcome, size_bytes, settled = reader.read_all(fetching.wanted, max_bytes)
    if settled or not may_wait or (size_bytes >= call.min_bytes and not holds_back):
        return _reply(fetching, outcome)
    return _LongPoll(context, call, fetching, max_bytes, reader)


def _reader(context: RequestContext, call: FetchCall) -> _ConsumerReader | _ReplicaReader:
    if call.replica_id < 0:
        return _ConsumerReader(context, call)
    broker = context.broker.image.brokers.get(call.replica_id)
    if broker is None or call.replica_epoch < 0:
        raise ApiError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "only a broker of the cluster fetches as a replica")
    if call.replica_epoch < broker.broker_epoch:
        raise ApiError(ErrorCode.STALE_BROKER_EPOCH, f"broker {call.replica_id} was started again since")
    return _ReplicaReader(context, call)


class _ConsumerReader:
    """Reads what is committed."""

    is_replica = False

    def __init__(self, context: RequestContext, call: FetchCall) -> None:
        self._context = context
        self._replicas = context.broker.replicas
        self._find = self._replicas.find_readable if context.version >= FOLLOWERS_SERVE_FROM else self._replicas.find
        self._rack = call.rack_id if context.broker.is_rack_aware else ""

    def holds_back(self, wanted: list[Wanted]) -> bool:  # noqa: ARG002 - as the other reader has it
        """A consumer gets at once what there is."""
        return False

    def read_all(self, wanted: list[Wanted], max_bytes: int) -> tuple[_Outcome, int, bool]:
        """Read every wanted partition; the flag says that waiting would not make the answer any better."""
        outcome: _Outcome = []
        size_bytes = 0
        settled = False
        find, rack = self._find, self._rack
        for item in wanted:
            try:
                partition = find(item.key, item.index)
                partition.check_leader_epoch(item.current_leader_epoch)
                committed = partition.high_watermark.offset if partition.is_open else partition.committed.offset
                if rack and (nearer := self._nearer(partition, item.fetch_offset)) is not None:
                    result = FetchResult(item.index, 0, committed, committed, partition.log.start_offset, b"", nearer)
                    outcome.append((item, result))
                    settled = True
                    continue
                records: bytes | memoryview = b""
                if item.fetch_offset != committed and size_bytes < max_bytes:
                    read = partition.read(
                        item.fetch_offset, min(item.max_bytes, max_bytes - size_bytes), at_least_one=size_bytes == 0
                    )
                    records = read.data
                    size_bytes += len(records)
                result = FetchResult(item.index, 0, committed, committed, partition.log.start_offset, records)
            except MillraceError as error:
                result = _failed(self._context, item, error)
                settled = True
            outcome.append((item, result))
        return outcome, size_bytes, settled

    def _nearer(self, partition: Partition, offset: int) -> int | None:
        """An in-sync follower in the client's rack that has `offset`, unless this broker is in that rack itself."""
        broker = self._context.broker
        if not partition.is_leader or broker.config.rack == self._rack:
            return None
        return next(
            (
                each
                for each in sorted(partition.in_step)
                if broker.image.is_live(each)
                and broker.image.brokers[each].rack == self._rack
                and partition.log_end_of(each) >= offset
            ),
            None,
        )

    def watch(self, wanted: list[Wanted], wake: Callable[[], None]) -> Callable[[], None]:
        """Have `wake` called when something may have been committed; returns what ends that."""
        marks = self._replicas.watermarks((item.key, item.index) for item in wanted)
        for mark in marks:
            mark.watch(wake)

        def unwatch() -> None:
            for mark in marks:
                mark.unwatch(wake)

        return unwatch


class _ReplicaReader:
    """Reads for a follower. Its offsets are noted at the first read: what it asks for later in a wait is the same.

    What a quota holds back counts as not there; the wait ends when there may be room again. What is not enough yet
    (`replication.gathering`) is not read at first: the wait ends when it is, or has lasted long enough.
    """

    is_replica = True

    def __init__(self, context: RequestContext, call: FetchCall) -> None:
        self._context = context
        self._replicas = context.broker.replicas
        self._broker_id = call.replica_id
        self._broker_epoch = call.replica_epoch
        self._wake: Callable[[], None] | None = None
        self._timer: Timer | None = None
        self._held_back_s = 0.0
        self._taken: list[tuple[ReplicationQuota, int]] = []
        self._gathering = self._replicas.gathering_for(call.replica_id)
        self._wanted_bytes = 0
        self._gathered_bytes = 0
        self._only_note = False
        """The next read takes note of the follower's offsets, and reads nothing."""
        self._patience: Timer | None = None

    def holds_back(self, wanted: list[Wanted]) -> bool:
        """Whether the follower shall wait because more is about to come; asked once, before the first read."""
        clock = self._context.broker.clock
        self._wanted_bytes = wanted_bytes = self._gathering.wanted_bytes(clock.monotonic())
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

    def read_all(self, wanted: list[Wanted], max_bytes: int) -> tuple[_Outcome, int, bool]:
        """Read every wanted partition; the flag says that waiting would not make the answer any better."""
        outcome: _Outcome = []
        size_bytes = 0
        settled = False
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
                if quota is not None and not partition.counts(self._broker_id):
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
                if isinstance(read, ReadResult):
                    size_bytes += len(read.data)
                    if quota is not None:
                        self._take(quota, len(read.data))
                    result = FetchResult(item.index, 0, mark, mark, start, read.data)
                    if 0 <= item.sent_start_offset < start:  # DeleteRecords waits for the follower to hear of it
                        settled = True
                else:
                    result = FetchResult(item.index, 0, mark, mark, start, diverging=read)
                    settled = True
            except MillraceError as error:
                result = _failed(self._context, item, error)
                settled = True
            outcome.append((item, result))
        if not only_note:
            self._gathering.answered(size_bytes)
        self._held_back_s = held_back_s
        if self._wake is not None:
            self._wake_after(held_back_s)
        return outcome, size_bytes, settled

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
            self._timer = self._context.broker.clock.call_later(seconds, self._wake)

    def _end_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def watch(self, wanted: list[Wanted], wake: Callable[[], None]) -> Callable[[], None]:
        """Have `wake` called when enough was appended, or a moment after anything was; returns what ends that."""
        partitions = [
            partition for item in wanted if (partition := self._replicas.led(item.key, item.index)) is not None
        ]
        clock = self._context.broker.clock

        def grown(size_bytes: int) -> None:
            self._gathered_bytes += size_bytes
            if not size_bytes or self._gathered_bytes >= self._wanted_bytes:
                wake()
            elif self._patience is None:
                self._patience = clock.call_later(self._gathering.longest_s, wake)

        for partition in partitions:
            partition.end_watchers.add(grown)
        if self._gathered_bytes:
            self._patience = clock.call_later(self._gathering.longest_s, wake)
        self._wake = wake
        self._wake_after(self._held_back_s)

        def unwatch() -> None:
            self._wake = None
            self._wake_after(0.0)
            self._end_patience()
            for partition in partitions:
                partition.end_watchers.discard(grown)

        return unwatch


def _failed(context: RequestContext, item: Wanted, error: MillraceError) -> FetchResult:
    code = code_of(error)
    if code == ErrorCode.OFFSET_OUT_OF_RANGE:
        partition = context.broker.replicas.led(item.key, item.index)
        if partition is not None:  # a follower that is too far behind learns where it can begin
            return FetchResult(item.index, code, log_start_offset=partition.log.start_offset)
    return FetchResult(item.index, code, leader=leader_hint(context, item.key, item.index, code))


class _LongPoll(Promise[FetchReply | Exception]):
    """A fetch that waits for the first change that concerns it. Cancelled or kept, it leaves no watcher behind.

    Everything that happens in one turn of the loop is looked at together, in the next.
    """

    __slots__ = ("_call", "_fetching", "_is_over", "_look", "_max_bytes", "_reader", "_replicas", "_timer", "_unwatch")

    def __init__(
        self,
        context: RequestContext,
        call: FetchCall,
        fetching: Fetching,
        max_bytes: int,
        reader: _ConsumerReader | _ReplicaReader,
    ) -> None:
        super().__init__()
        self._replicas = context.broker.replicas
        self._call = call
        self._fetching = fetching
        self._max_bytes = max_bytes
        self._reader = reader
        self._is_over = False
        """No more waiting: the next look is the last."""
        self._look: asyncio.Handle | None = None
        self._timer = context.broker.clock.call_later(call.max_wait_ms / 1000, self._expire)
        self._unwatch = reader.watch(fetching.wanted, self._wake)

    def cancel(self) -> None:
        super().cancel()
        self._stop()

    def _wake(self) -> None:
        if self._look is None:
            self._look = asyncio.get_running_loop().call_soon(self._look_again)

    def _expire(self) -> None:
        self._is_over = True
        self._wake()

    def _look_again(self) -> None:
        self._look = None
        answer: FetchReply | Exception
        try:
            outcome, size_bytes, settled = self._reader.read_all(self._fetching.wanted, self._max_bytes)
            if not (settled or self._is_over or size_bytes >= self._call.min_bytes or self._replicas.closing):
                return
            answer = _reply(self._fetching, outcome)
        except Exception as error:  # noqa: BLE001 - the connection answers and logs it
            answer = error
        self._stop()
        self.keep(answer)

    def _stop(self) -> None:
        self._timer.cancel()
        self._unwatch()
        if self._look is not None:
            self._look.cancel()


def _reply(fetching: Fetching, outcome: _Outcome) -> FetchReply:
    topics: list[tuple[TopicKey, list[FetchResult]]] = []
    with_data: list[Wanted] = []
    last_key: TopicKey | None = None
    for item, result in outcome:
        if fetching.session is not None:
            if fetching.incremental and not item.must_mention(result):
                continue
            item.mentioned(result)
            if result.records:
                with_data.append(item)
        if item.key != last_key:
            topics.append((item.key, []))
            last_key = item.key
        topics[-1][1].append(result)
    if with_data and fetching.session is not None:
        fetching.session.served_data(with_data)
    return FetchReply(0, fetching.session_id, topics)
