"""Fetch: committed batches out of partitions, as the bytes they are on disk."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from millrace.errors import ApiError, ErrorCode, MillraceError, code_of
from millrace.handlers.context import RequestContext
from millrace.handlers.registry import api
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
    from millrace.replication.replicas import Replicas

_Outcome = list[tuple["Wanted", FetchResult]]


@api(ApiKey.FETCH, FetchRequest, "4-18", overlaps=True, decoder=read_fetch, encoder=write_fetch)
def fetch(context: RequestContext, call: FetchCall) -> FetchReply | Coroutine[Any, Any, FetchReply]:
    """Answer with what is committed, or wait for `min_bytes` for at most `max_wait_ms`.

    A reply starts with the whole batch that holds the asked offset. The first partition with data gives at least one
    batch whatever the size limits (KIP-74). A waiting fetch wakes at the first commit that concerns it. Incremental
    sessions (KIP-227) mention only what changed.

    Versions: v12 adds leader-epoch checks; v13 names topics by id; v15 moves the replica id into a tagged field.

    Not done: followers (a replica id is refused), aborted transactions, preferred read replicas.
    """
    try:
        if call.replica_id >= 0:
            raise ApiError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "only a broker of the cluster fetches as a replica")
        fetching = context.broker.fetch_sessions.begin(
            call, by_topic_id=context.version >= FETCH_TOPIC_ID_FROM, now=context.broker.clock.monotonic()
        )
    except ApiError as error:
        return FetchReply(error.code, 0, [])
    max_bytes = min(call.max_bytes, context.broker.fetch_max_bytes)
    outcome, size_bytes, settled = _read_all(context.broker.replicas, fetching.wanted, max_bytes)
    if settled or size_bytes >= call.min_bytes or call.max_wait_ms <= 0 or not fetching.wanted:
        return _reply(fetching, outcome)
    return _long_poll(context, call, fetching, max_bytes, outcome)


def _read_all(replicas: Replicas, wanted: list[Wanted], max_bytes: int) -> tuple[_Outcome, int, bool]:
    """Read every wanted partition; the flag says that waiting would not make the answer any better."""
    outcome: _Outcome = []
    size_bytes = 0
    settled = False
    for item in wanted:
        try:
            partition = replicas.find(item.key, item.index)
            partition.check_leader_epoch(item.current_leader_epoch)
            committed = partition.committed.offset
            records: bytes | memoryview = b""
            if item.fetch_offset != committed and size_bytes < max_bytes:
                read = partition.read(
                    item.fetch_offset, min(item.max_bytes, max_bytes - size_bytes), at_least_one=size_bytes == 0
                )
                records = read.data
                size_bytes += len(records)
            result = FetchResult(item.index, 0, committed, committed, partition.log.start_offset, records)
        except MillraceError as error:
            result = FetchResult(item.index, code_of(error))
            settled = True
        outcome.append((item, result))
    return outcome, size_bytes, settled


async def _long_poll(
    context: RequestContext, call: FetchCall, fetching: Fetching, max_bytes: int, outcome: _Outcome
) -> FetchReply:
    """Wait for the first commit that concerns this fetch. Cancelled, it leaves no watcher behind."""
    broker = context.broker
    loop = asyncio.get_running_loop()
    moved: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not moved.done():
            moved.set_result(None)

    marks = broker.replicas.watermarks((item.key, item.index) for item in fetching.wanted)
    over = False

    def expire() -> None:
        nonlocal over
        over = True
        wake()

    timer = broker.clock.call_later(call.max_wait_ms / 1000, expire)
    for mark in marks:
        mark.watch(wake)
    try:
        while not over:
            await moved
            moved = loop.create_future()
            outcome, size_bytes, settled = _read_all(broker.replicas, fetching.wanted, max_bytes)
            if settled or size_bytes >= call.min_bytes or broker.replicas.closing:
                break
    finally:
        timer.cancel()
        for mark in marks:
            mark.unwatch(wake)
    return _reply(fetching, outcome)


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
