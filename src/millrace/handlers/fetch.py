"""Fetch: batches out of partitions, as the bytes they are on disk; committed ones to consumers, all to followers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from millrace.errors import ApiError, ErrorCode, MillraceError, code_of
from millrace.handlers.context import RequestContext, Rights, anything
from millrace.handlers.fetch_sessions import NO_SESSION
from millrace.handlers.leaders import leader_hint
from millrace.handlers.needs import CLUSTER_ACTION, READ_TOPIC, judged
from millrace.handlers.promise import Promise
from millrace.handlers.registry import api
from millrace.replication.serving import FollowerReader
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
    from millrace.handlers.fetch_sessions import Fetching, Wanted
    from millrace.replication.partition import Partition

FOLLOWERS_SERVE_FROM: Final = 11
"""Older consumers do not know that a follower may answer them, and take its high watermark for the leader's."""

READ_COMMITTED: Final = 1

_Outcome = list[tuple["Wanted", FetchResult]]


@api(
    ApiKey.FETCH,
    FetchRequest,
    "4-18",
    needs=judged(READ_TOPIC, CLUSTER_ACTION),
    overlaps=True,
    counts_errors=True,
    decoder=read_fetch,
    encoder=write_fetch,
)
def fetch(context: RequestContext, call: FetchCall) -> FetchReply | Promise[FetchReply | Exception]:
    """Answer with what is committed, or wait for `min_bytes` for at most `max_wait_ms`.

    A reply starts with the whole batch that holds the asked offset. The first partition with data gives at least one
    batch whatever the size limits (KIP-74). A waiting fetch wakes at the first commit that concerns it. Incremental
    sessions (KIP-227) mention only what changed. If peers that do not read hold much of the broker's memory a
    consumer gets less, or has to wait: see `server.answers`.

    A follower (a broker of this cluster, in the incarnation that the image knows) also gets what is not committed, and
    commits by asking for more. It is told where its log diverges (KIP-595), and waits for appends rather than commits;
    where much is being produced it waits a little longer for several at once (`replication.gathering`).
    A consumer in the rack of an in-sync follower is sent there, if the broker has a rack-aware `replica.selector.class`
    (KIP-392); from v11 on a follower serves consumers up to the high watermark it knows. A client that came to a broker
    which does not lead any more is told who does (KIP-951). A follower that is behind gets nothing of a throttled
    partition while the quota is used up (KIP-73).

    A consumer with isolation level 1 (read_committed) gets what is below the last stable offset, and which transactions
    among it were aborted, in the order of their first offsets: it leaves their records out by itself. Everybody is told
    the last stable offset.

    Versions: v12 adds leader-epoch checks; v13 names topics by id; v15 moves the replica id into a tagged field; v16
    tells where leaders are.

    Who may read is judged when a fetch comes, for every partition of its session, and not again while it waits, as in
    Kafka. A follower needs a broker's right; without it every partition is TOPIC_AUTHORIZATION_FAILED.

    Not done: fetches of followers before v15 (no broker of this cluster sends them).
    """
    if call.replica_id < 0:
        may_read = context.rights(*READ_TOPIC)
    else:
        may_read = anything if context.may(*CLUSTER_ACTION) else _nothing
    try:
        reader = (
            _ConsumerReader(context, call) if call.replica_id < 0 or may_read is _nothing else _follower(context, call)
        )
        fetching = context.broker.fetch_sessions.begin(
            call, by_topic_id=context.version >= FETCH_TOPIC_ID_FROM, now=context.broker.clock.monotonic()
        )
    except ApiError as error:
        context.note_error(error.code)
        return FetchReply(error.code, 0, [])
    max_bytes = call.max_bytes if reader.is_replica else min(call.max_bytes, context.broker.fetch_max_bytes)
    min_bytes = call.min_bytes
    if context.meter is not None:
        max_bytes = int(min(max_bytes, context.meter.room_bytes))
        min_bytes = min(min_bytes, max_bytes)
    if may_read is not anything:
        readable, refused = _judged(context, fetching.wanted, may_read)
        if refused:
            outcome, size_bytes, _ = reader.read_all(readable, max_bytes)
            return _reply(context, fetching, reader, outcome + refused, size_bytes)
    may_wait = call.max_wait_ms > 0 and bool(fetching.wanted)
    holds_back = may_wait and reader.holds_back(fetching.wanted)
    outcome, size_bytes, answer_now = reader.read_all(fetching.wanted, max_bytes)
    if answer_now or not may_wait or (size_bytes >= min_bytes and not holds_back):
        return _reply(context, fetching, reader, outcome, size_bytes)
    return _LongPoll(context, call.max_wait_ms, fetching, min_bytes, max_bytes, reader)


def _nothing(name: str) -> bool:  # noqa: ARG001 - one of `Rights`
    return False


def _judged(context: RequestContext, wanted: list[Wanted], may_read: Rights) -> tuple[list[Wanted], _Outcome]:
    """What may be read, and the answer for the rest; of an id that is not known the reader says so."""
    name_of = context.broker.replicas.name_of
    readable: list[Wanted] = []
    refused: _Outcome = []
    for item in wanted:
        name = name_of(item.key)
        if name and not may_read(name):
            context.note_error(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
            refused.append((item, FetchResult(item.index, ErrorCode.TOPIC_AUTHORIZATION_FAILED)))
        else:
            readable.append(item)
    return readable, refused


def _follower(context: RequestContext, call: FetchCall) -> FollowerReader[Wanted]:
    broker = context.broker.image.brokers.get(call.replica_id)
    if broker is None or call.replica_epoch < 0:
        raise ApiError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "only a broker of the cluster fetches as a replica")
    if call.replica_epoch < broker.broker_epoch:
        raise ApiError(ErrorCode.STALE_BROKER_EPOCH, f"broker {call.replica_id} was started again since")
    return FollowerReader(
        broker_id=call.replica_id,
        broker_epoch=call.replica_epoch,
        replicas=context.broker.replicas,
        clock=context.broker.clock,
        failed=lambda item, error: _failed(context, item, error),
    )


class _ConsumerReader:
    """Reads what is committed, as much as there is memory for. Where there is none the fetch waits for that, too."""

    is_replica = False
    _wake: Callable[[], None] | None = None
    _lacks_room = False
    """There was once no memory for what could be read."""

    def __init__(self, context: RequestContext, call: FetchCall) -> None:
        self._context = context
        self._peer = context.peer
        self._replicas = context.broker.replicas
        self._find = self._replicas.find_readable if context.version >= FOLLOWERS_SERVE_FROM else self._replicas.find
        self._rack = call.rack_id if call.rack_id and context.broker.is_rack_aware else ""
        self._reads_committed = call.isolation_level == READ_COMMITTED
        self._read: list[tuple[Partition, int, int]] = []
        """What the last look has read: of each partition so many bytes, and so many records by their offsets."""

    def holds_back(self, wanted: list[Wanted]) -> bool:  # noqa: ARG002 - as the other reader has it
        """A consumer gets at once what there is."""
        return False

    def read_all(self, wanted: list[Wanted], max_bytes: int) -> tuple[_Outcome, int, bool]:
        """Read every wanted partition; the flag says that waiting would not make the answer any better."""
        outcome: _Outcome = []
        size_bytes = 0
        answer_now = False
        asked_bytes = room = max_bytes
        self._read.clear()
        find, rack, reads_committed = self._find, self._rack, self._reads_committed
        for item in wanted:
            try:
                partition = find(item.key, item.index)
                partition.check_leader_epoch(item.current_leader_epoch)
                stable = partition.last_stable_offset
                committed = partition.high_watermark.offset
                if rack and (nearer := self._nearer(partition, item.fetch_offset)) is not None:
                    result = FetchResult(item.index, 0, committed, stable, partition.log.start_offset, b"", nearer)
                    outcome.append((item, result))
                    answer_now = True
                    continue
                records: bytes | memoryview = b""
                aborted: list[tuple[int, int]] | None = [] if reads_committed else None
                if item.fetch_offset != (stable if reads_committed else committed) and size_bytes < max_bytes:
                    if not size_bytes and self._peer is not None:
                        room = self._peer.answer_room(self._context)
                        max_bytes = min(asked_bytes, room)
                    if room:
                        read = partition.read(
                            item.fetch_offset,
                            min(item.max_bytes, max_bytes - size_bytes),
                            at_least_one=size_bytes == 0,
                            limit=partition.stable if reads_committed else None,
                        )
                        records = read.data
                        size_bytes += len(records)
                        if records:
                            self._read.append((partition, len(records), read.next_offset - item.fetch_offset))
                        if reads_committed and records:
                            aborted = _aborted(partition, item.fetch_offset, read.next_offset)
                result = FetchResult(
                    item.index, 0, committed, stable, partition.log.start_offset, records, aborted=aborted
                )
            except MillraceError as error:
                result = _failed(self._context, item, error)
                answer_now = True
            outcome.append((item, result))
        if room < asked_bytes:
            if not room:
                self._lacks_room = True
                self._wait_for_room()
            elif size_bytes * 2 > room:
                answer_now = True  # the next batch may not fit, however long it waits
        return outcome, size_bytes, answer_now

    def count_sent(self, size_bytes: int) -> None:  # noqa: ARG002 - as the other reader has it
        """What was read last is sent."""
        for partition, read_bytes, records in self._read:
            partition.bytes_out += read_bytes
            partition.records_out += records

    def _wait_for_room(self) -> None:
        if self._peer is not None and self._wake is not None:
            self._peer.when_room(self._context, self._wake)

    def _nearer(self, partition: Partition, offset: int) -> int | None:
        """An in-sync follower in the client's rack that has `offset`, unless this broker is in that rack itself."""
        broker = self._context.broker
        leadership = partition.leadership
        if leadership is None or broker.config.rack == self._rack:
            return None
        return next(
            (
                each
                for each in sorted(leadership.in_step)
                if broker.image.is_live(each)
                and broker.image.brokers[each].rack == self._rack
                and leadership.log_end_of(each) >= offset
            ),
            None,
        )

    def watch(self, wanted: list[Wanted], wake: Callable[[], None]) -> Callable[[], None]:
        """Have `wake` called when something may have been committed, or there may be room; returns what ends that."""
        marks = self._replicas.watermarks((item.key, item.index) for item in wanted)
        for mark in marks:
            mark.watch(wake)
        self._wake = wake
        if self._lacks_room:
            self._wait_for_room()

        def unwatch() -> None:
            self._wake = None
            if self._lacks_room and self._peer is not None:
                self._peer.forget_room(wake)
            for mark in marks:
                mark.unwatch(wake)

        return unwatch


def _aborted(partition: Partition, first_offset: int, end_offset: int) -> list[tuple[int, int]]:
    """Who aborted a transaction that has records from `first_offset` up to `end_offset`, and where it began."""
    found = partition.log.aborted_transactions(first_offset, end_offset)
    return sorted(((each.producer_id, each.first_offset) for each in found), key=itemgetter(1)) if found else []


def _failed(context: RequestContext, item: Wanted, error: MillraceError) -> FetchResult:
    code = code_of(error)
    context.note_error(code)
    if code == ErrorCode.OFFSET_OUT_OF_RANGE:
        partition = context.broker.replicas.led(item.key, item.index)
        if partition is not None:  # a follower that is too far behind learns where it can begin
            return FetchResult(item.index, code, log_start_offset=partition.log.start_offset)
    return FetchResult(item.index, code, leader=leader_hint(context, item.key, item.index, code))


def _throttled(context: RequestContext, fetching: Fetching) -> FetchReply:
    """As if there were nothing: the session stays as the client knows it, and one that would begin does not."""
    if fetching.incremental:
        return FetchReply(0, fetching.session_id, [])
    context.broker.fetch_sessions.forget(fetching.session_id)
    return FetchReply(0, NO_SESSION, [])


class _LongPoll(Promise[FetchReply | Exception]):
    """A fetch that waits for the first change that concerns it. Cancelled or kept, it leaves no watcher behind.

    Everything that happens in one turn of the loop is looked at together, in the next.
    """

    __slots__ = (
        "_context", "_fetching", "_is_over", "_look", "_max_bytes", "_min_bytes", "_reader", "_timer", "_unwatch"
    )  # fmt: skip

    def __init__(
        self,
        context: RequestContext,
        max_wait_ms: int,
        fetching: Fetching,
        min_bytes: int,
        max_bytes: int,
        reader: _ConsumerReader | FollowerReader[Wanted],
    ) -> None:
        super().__init__()
        self._context = context
        self._fetching = fetching
        self._min_bytes = min_bytes
        self._max_bytes = max_bytes
        self._reader = reader
        self._is_over = False
        """No more waiting: the next look is the last."""
        self._look: asyncio.Handle | None = None
        self._timer = context.broker.clock.call_later(max_wait_ms / 1000, self._expire)
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
        meter = self._context.meter
        if meter is not None:
            meter.resume()
        answer: FetchReply | Exception
        try:
            outcome, size_bytes, answer_now = self._reader.read_all(self._fetching.wanted, self._max_bytes)
            closing = self._context.broker.replicas.closing
            if not (answer_now or self._is_over or size_bytes >= self._min_bytes or closing):
                if meter is not None:
                    meter.pause()
                return
            answer = _reply(self._context, self._fetching, self._reader, outcome, size_bytes)
        except Exception as error:  # noqa: BLE001 - the connection answers and logs it
            answer = error
        self._stop()
        self.keep(answer)

    def _stop(self) -> None:
        self._timer.cancel()
        self._unwatch()
        if self._look is not None:
            self._look.cancel()


def _reply(
    context: RequestContext,
    fetching: Fetching,
    reader: _ConsumerReader | FollowerReader[Wanted],
    outcome: _Outcome,
    size_bytes: int,
) -> FetchReply:
    if context.meter is not None and not context.meter.may_send(size_bytes):
        return _throttled(context, fetching)
    if size_bytes:
        reader.count_sent(size_bytes)
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
