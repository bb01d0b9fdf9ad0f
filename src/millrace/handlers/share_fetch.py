"""ShareFetch and ShareAcknowledge: a member of a share group gets records, and says what became of them (KIP-932).

Nothing is decided here: who gets what is in `queues.acquisition`, sessions in `queues.sessions`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from millrace.errors import ApiError, ErrorCode, MillraceError, code_of, text_of
from millrace.handlers.context import RequestContext
from millrace.handlers.leaders import leader_hint
from millrace.handlers.registry import api
from millrace.queues.acquisition import AcknowledgeBatch, AcknowledgeType, AcquireMode
from millrace.queues.records import ShareKey
from millrace.queues.sessions import FINAL_EPOCH, INITIAL_EPOCH, TopicPartitionId
from millrace.queues.share_partition import Fetched, FetchTerms, SharePartition
from millrace.wire.hot import LeaderHint
from millrace.wire.keys import ApiKey
from millrace.wire.messages.share_groups import (
    ShareAcknowledgeRequest,
    ShareAcknowledgeResponse,
    ShareFetchRequest,
    ShareFetchResponse,
)

_RENEWS_FROM: Final = 2
_MAX_REFUSED_WAIT_MS: Final = 5_000
_MAX_MEMBER_ID: Final = 36
"""The length of a UUID, which a member makes up for itself."""

Acknowledgements = dict[TopicPartitionId, list[AcknowledgeBatch]]
Outcomes = dict[TopicPartitionId, MillraceError | None]


@api(ApiKey.SHARE_FETCH, ShareFetchRequest, "1-2", overlaps=True, internal=True)
async def share_fetch(context: RequestContext, request: ShareFetchRequest) -> ShareFetchResponse:
    """Acquire records for a member of a share group, after taking its word for earlier ones.

    Waits up to `max_wait_ms` for the first record. Epoch 0 begins a session, -1 ends it and releases what the member
    holds. Acknowledgements are answered when they are durable; those of a partition are taken all or not at all.

    Versions: v2 adds renewals of locks (KIP-1222) and the strict limit of records (KIP-1206).

    Not done: `min_bytes` above 1 (the first record is answered), aborted transactions.
    """
    broker = context.broker
    try:
        group_id, member_id = _checked_ids(context, request)
        acknowledged = _acknowledged(request, _renews(context, request))
        if request.is_renew_ack and any(
            (request.max_bytes, request.min_bytes, request.max_records, request.max_wait_ms)
        ):
            raise ApiError(ErrorCode.INVALID_REQUEST, "a request that renews fetches nothing")
        wanted = broker.queues.sessions.fetch(
            group_id,
            member_id,
            request.share_session_epoch,
            added=[(topic.topic_id, each.partition_index) for topic in request.topics for each in topic.partitions],
            forgotten=[
                (topic.topic_id, index) for topic in request.forgotten_topics_data for index in topic.partitions
            ],
            acknowledges=bool(acknowledged),
        )
    except ApiError as error:
        if error.code is ErrorCode.SHARE_SESSION_LIMIT_REACHED:
            # Whoever is refused comes back at once: it waits here instead.
            await broker.clock.sleep(min(max(request.max_wait_ms, 0), _MAX_REFUSED_WAIT_MS) / 1000)
        return ShareFetchResponse(error_code=error.code, error_message=error.message or None)
    answering = asyncio.ensure_future(_acknowledge_all(context, group_id, member_id, acknowledged))
    try:
        fetch = _Fetch(context, request, group_id, member_id)
        if not request.is_renew_ack:
            await fetch.run(wanted)
        outcomes = await asyncio.shield(answering)
    finally:
        # A client that hung up has still said what it said; the task ends by itself.
        answering.add_done_callback(_look_at)
    if request.share_session_epoch == FINAL_EPOCH:
        broker.queues.end_session(group_id, member_id)
    return _fetch_response(context, request, group_id, fetch, outcomes)


@api(ApiKey.SHARE_ACKNOWLEDGE, ShareAcknowledgeRequest, "1-2", overlaps=True, internal=True)
async def share_acknowledge(context: RequestContext, request: ShareAcknowledgeRequest) -> ShareAcknowledgeResponse:
    """Take a member's word for records it holds; answered when that is durable. Epoch -1 ends the session.

    Versions: v2 adds renewals of locks (KIP-1222).
    """
    broker = context.broker
    try:
        group_id, member_id = _checked_ids(context, request)
        acknowledged = _acknowledged(request, _renews(context, request))
        broker.queues.sessions.acknowledge(group_id, member_id, request.share_session_epoch)
    except ApiError as error:
        return ShareAcknowledgeResponse(error_code=error.code, error_message=error.message or None)
    answering = asyncio.ensure_future(_acknowledge_all(context, group_id, member_id, acknowledged))
    answering.add_done_callback(_look_at)
    outcomes = await asyncio.shield(answering)
    if request.share_session_epoch == FINAL_EPOCH:
        broker.queues.end_session(group_id, member_id)
    hints = _Hints(context)
    topics = []
    for topic_id, items in _by_topic(outcomes):
        answers = []
        for index in items:
            answer = ShareAcknowledgeResponse.PartitionData(partition_index=index)
            refused = outcomes[topic_id, index]
            if refused is not None:
                answer.error_code, answer.error_message = code_of(refused), text_of(refused)
                leader = hints.leader((topic_id, index), refused)
                if leader is not None:
                    answer.current_leader.leader_id = leader.leader_id
                    answer.current_leader.leader_epoch = leader.leader_epoch
            answers.append(answer)
        topics.append(ShareAcknowledgeResponse.ShareAcknowledgeTopicResponse(topic_id=topic_id, partitions=answers))
    return ShareAcknowledgeResponse(
        acquisition_lock_timeout_ms=broker.queues.settings_of(group_id).limits.lock_ms,
        responses=topics,
        node_endpoints=[
            ShareAcknowledgeResponse.NodeEndpoint(
                node_id=each.leader_id, host=each.host, port=each.port, rack=each.rack
            )
            for each in hints.named.values()
        ],
    )


# --- requests ---------------------------------------------------------------------------------------------------------


def _checked_ids(context: RequestContext, request: ShareFetchRequest | ShareAcknowledgeRequest) -> tuple[str, str]:
    group_id, member_id = request.group_id, request.member_id
    if not group_id:
        raise ApiError(ErrorCode.INVALID_REQUEST, "the group id is missing")
    if not member_id or len(member_id) > _MAX_MEMBER_ID:
        raise ApiError(ErrorCode.INVALID_REQUEST, "the member id is missing, or longer than a UUID")
    if not context.broker.queues.is_member(group_id, member_id):
        raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID, "the group has no such member")
    return group_id, member_id


def _renews(context: RequestContext, request: ShareFetchRequest | ShareAcknowledgeRequest) -> bool:
    return context.version >= _RENEWS_FROM and request.is_renew_ack


def _acknowledged(request: ShareFetchRequest | ShareAcknowledgeRequest, renews: bool) -> Acknowledgements:
    """What the request says of records; a renewal is one only where the request as a whole says so."""
    found: Acknowledgements = {}
    for topic in request.topics:
        for item in topic.partitions:
            batches = [
                AcknowledgeBatch(each.first_offset, each.last_offset, each.acknowledge_types)
                for each in item.acknowledgement_batches
            ]
            if not batches:
                continue
            if not renews and any(AcknowledgeType.RENEW in batch.types for batch in batches):
                raise ApiError(ErrorCode.INVALID_REQUEST, "the request does not say that it renews")
            found[topic.topic_id, item.partition_index] = batches
    return found


async def _acknowledge_all(
    context: RequestContext, group_id: str, member_id: str, acknowledged: Acknowledgements
) -> Outcomes:
    async def one(partition: TopicPartitionId, batches: Sequence[AcknowledgeBatch]) -> MillraceError | None:
        try:
            found = await context.broker.queues.get(ShareKey(group_id, *partition))
            await found.acknowledge(member_id, batches)
        except MillraceError as error:
            return error
        return None

    errors = await asyncio.gather(*(one(partition, batches) for partition, batches in acknowledged.items()))
    return dict(zip(acknowledged, errors, strict=True))


# --- fetching ---------------------------------------------------------------------------------------------------------


@dataclass
class _Fetch:
    """One ShareFetch under way."""

    context: RequestContext
    request: ShareFetchRequest
    group_id: str
    member_id: str
    fetched: dict[TopicPartitionId, Fetched] = field(default_factory=dict)
    errors: Outcomes = field(default_factory=dict)

    async def run(self, wanted: list[TopicPartitionId]) -> None:
        """Load what is not loaded, acquire what there is, and wait for the first record where there is none."""
        if not wanted:
            return
        found = await asyncio.gather(*(self._get(partition) for partition in wanted))
        partitions = [each for each in found if each is not None]
        self._read(partitions)
        wait_s = self.request.max_wait_ms / 1000
        if self.fetched or self.errors or wait_s <= 0 or not partitions:
            return
        await self._wait(partitions, wait_s)

    async def _get(self, partition: TopicPartitionId) -> SharePartition | None:
        try:
            return await self.context.broker.queues.get(ShareKey(self.group_id, *partition))
        except MillraceError as error:
            self.errors[partition] = error
            return None

    def _read(self, partitions: Iterable[SharePartition]) -> None:
        request = self.request
        records = request.max_records
        size_bytes = min(request.max_bytes, self.context.broker.fetch_max_bytes)
        strict = request.share_acquire_mode == AcquireMode.RECORD_LIMIT
        mode = AcquireMode.RECORD_LIMIT if strict else AcquireMode.BATCH_OPTIMIZED
        for partition in partitions:
            if records <= 0 or size_bytes <= 0:
                return
            name = partition.key.topic_id, partition.key.partition
            try:
                found = partition.fetch(self.member_id, FetchTerms(records, size_bytes, request.batch_size, mode))
            except MillraceError as error:
                self.errors[name] = error
                continue
            if found.acquired:
                self.fetched[name] = found
                records -= found.count
                size_bytes -= len(found.records)

    async def _wait(self, partitions: Sequence[SharePartition], seconds: float) -> None:
        """Wait for the first record. Cancelled, it leaves no watcher behind."""
        broker = self.context.broker
        loop = asyncio.get_running_loop()
        moved: asyncio.Future[None] = loop.create_future()
        over = False

        def wake() -> None:
            if not moved.done():
                moved.set_result(None)

        def expire() -> None:
            nonlocal over
            over = True
            wake()

        unwatch = _watch(partitions, wake)
        timer = broker.clock.call_later(seconds, expire)
        try:
            while not (over or self.fetched or self.errors or broker.replicas.closing):
                await moved
                moved = loop.create_future()
                self._read(partitions)
        finally:
            timer.cancel()
            unwatch()


def _watch(partitions: Iterable[SharePartition], wake: Callable[[], None]) -> Callable[[], None]:
    watched = list(partitions)
    for each in watched:
        each.watchers.add(wake)
        each.partition.high_watermark.watch(wake)

    def unwatch() -> None:
        for each in watched:
            each.watchers.discard(wake)
            each.partition.high_watermark.unwatch(wake)

    return unwatch


# --- responses --------------------------------------------------------------------------------------------------------


class _Hints:
    """Who leads what this broker does not."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self.named: dict[int, LeaderHint] = {}

    def leader(self, partition: TopicPartitionId, error: MillraceError) -> LeaderHint | None:
        topic_id, index = partition
        hint = leader_hint(self._context, topic_id.bytes, index, code_of(error))
        if hint is not None:
            self.named[hint.leader_id] = hint
        return hint


def _by_topic(partitions: Iterable[TopicPartitionId]) -> Iterable[tuple[Any, list[int]]]:
    topics: dict[Any, list[int]] = {}
    for topic_id, index in partitions:
        topics.setdefault(topic_id, []).append(index)
    return topics.items()


def _fetch_response(
    context: RequestContext, request: ShareFetchRequest, group_id: str, fetch: _Fetch, outcomes: Outcomes
) -> ShareFetchResponse:
    hints = _Hints(context)
    named: dict[TopicPartitionId, None] = dict.fromkeys((*fetch.fetched, *fetch.errors, *outcomes))
    if request.share_session_epoch == INITIAL_EPOCH:
        named.update(
            dict.fromkeys(
                (topic.topic_id, each.partition_index) for topic in request.topics for each in topic.partitions
            )
        )
    topics = []
    for topic_id, indexes in _by_topic(named):
        answers = [_partition_data(fetch, outcomes, hints, (topic_id, index)) for index in indexes]
        topics.append(ShareFetchResponse.ShareFetchableTopicResponse(topic_id=topic_id, partitions=answers))
    return ShareFetchResponse(
        acquisition_lock_timeout_ms=context.broker.queues.settings_of(group_id).limits.lock_ms,
        responses=topics,
        node_endpoints=[
            ShareFetchResponse.NodeEndpoint(node_id=each.leader_id, host=each.host, port=each.port, rack=each.rack)
            for each in hints.named.values()
        ],
    )


def _partition_data(
    fetch: _Fetch, outcomes: Outcomes, hints: _Hints, partition: TopicPartitionId
) -> ShareFetchResponse.PartitionData:
    answer = ShareFetchResponse.PartitionData(partition_index=partition[1])
    found = fetch.fetched.get(partition)
    if found is not None:
        answer.records = found.records
        answer.acquired_records = [
            ShareFetchResponse.AcquiredRecords(
                first_offset=each.first_offset, last_offset=each.last_offset, delivery_count=each.delivery_count
            )
            for each in found.acquired
        ]
    error = fetch.errors.get(partition)
    if error is not None:
        answer.error_code, answer.error_message = code_of(error), text_of(error)
    refused = outcomes.get(partition)
    if refused is not None:
        answer.acknowledge_error_code, answer.acknowledge_error_message = code_of(refused), text_of(refused)
    for each in (error, refused):
        leader = None if each is None else hints.leader(partition, each)
        if leader is not None:
            answer.current_leader.leader_id = leader.leader_id
            answer.current_leader.leader_epoch = leader.leader_epoch
    return answer


def _look_at(task: asyncio.Future[Outcomes]) -> None:
    if not task.cancelled():
        task.exception()
