"""ShareFetch and ShareAcknowledge: a member of a share group gets records, and says what became of them (KIP-932).

Nothing is decided here: who gets what is in `queues.acquisition`, sessions in `queues.sessions`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from millrace.errors import ApiError, ErrorCode, MillraceError, code_of, text_of
from millrace.handlers.context import RequestContext, anything
from millrace.handlers.leaders import leader_hint
from millrace.handlers.needs import READ_GROUP, READ_TOPIC, judged
from millrace.handlers.registry import api
from millrace.queues.acquisition import AcknowledgeBatch, AcknowledgeType, AcquireMode
from millrace.queues.partition import Fetched, FetchTerms, SharePartition
from millrace.queues.records import ShareKey
from millrace.queues.sessions import FINAL_EPOCH, INITIAL_EPOCH, TopicPartitionId
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
MAX_MEMBER_ID: Final = 36
"""The length of a UUID, which a member makes up for itself."""

_PASSING: Final = frozenset({
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.NOT_COORDINATOR,
    ErrorCode.NETWORK_EXCEPTION,
    ErrorCode.REQUEST_TIMED_OUT,
})  # fmt: skip
"""Why a share-partition could not be loaded, or its leadership not be confirmed, yet."""
_TOLD: Final = frozenset({
    ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.FENCED_LEADER_EPOCH,
    ErrorCode.UNKNOWN_LEADER_EPOCH,
    ErrorCode.KAFKA_STORAGE_ERROR,
    ErrorCode.OFFSET_NOT_AVAILABLE,
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ErrorCode.UNKNOWN_TOPIC_ID,
    ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    ErrorCode.CORRUPT_MESSAGE,
})  # fmt: skip
"""What Kafka's consumer knows to handle where it fetches; anything else ends it, but for UNKNOWN_SERVER_ERROR."""
_SESSION: Final = "share session"
_NOT_ALLOWED: Final = ApiError(ErrorCode.TOPIC_AUTHORIZATION_FAILED, "the topic may not be read")

Acknowledgements = dict[TopicPartitionId, list[AcknowledgeBatch]]
Outcomes = dict[TopicPartitionId, MillraceError | None]


@api(ApiKey.SHARE_FETCH, ShareFetchRequest, "1-2", needs=judged(READ_GROUP, READ_TOPIC), overlaps=True)
async def share_fetch(context: RequestContext, request: ShareFetchRequest) -> ShareFetchResponse:
    """Acquire records for a member of a share group, after taking its word for earlier ones.

    Waits up to `max_wait_ms` for `min_bytes`. Epoch 0 begins a session, -1 ends it and releases what the member holds,
    and so does the end of the connection on which it began. Acknowledgements are answered when they are durable; those
    of a partition are taken all or not at all.

    Versions: v2 adds renewals of locks (KIP-1222) and the strict limit of records (KIP-1206).
    """
    broker = context.broker
    try:
        context.demand(*READ_GROUP, request.group_id or "")
        group_id, member_id = _checked_ids(request)
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
            connection=context.peer,
        )
    except ApiError as error:
        if error.code is ErrorCode.SHARE_SESSION_LIMIT_REACHED:
            # Whoever is refused comes back at once: it waits here instead.
            await broker.clock.sleep(min(max(request.max_wait_ms, 0), _MAX_REFUSED_WAIT_MS) / 1000)
        return ShareFetchResponse(error_code=error.code, error_message=error.message or None)
    if request.share_session_epoch == INITIAL_EPOCH:
        _bind(context, group_id, member_id)
    refused = _refused(context, (*wanted, *acknowledged))
    answering = _acknowledging(context, group_id, member_id, acknowledged, refused)
    fetch = _Fetch(context, request, group_id, member_id)
    if not request.is_renew_ack:
        fetch.errors.update((each, _NOT_ALLOWED) for each in wanted if each in refused)
        await fetch.run([each for each in wanted if each not in refused])
    outcomes = await _acknowledged_all(acknowledged, answering, refused)
    if request.share_session_epoch == FINAL_EPOCH:
        _end_session(context, group_id, member_id)
    if context.meter is not None:  # they are acquired: whatever that is of the quota, they are sent
        context.meter.sent(context.reserved_bytes)
    return _fetch_response(context, request, group_id, fetch, outcomes)


@api(ApiKey.SHARE_ACKNOWLEDGE, ShareAcknowledgeRequest, "1-2", needs=judged(READ_GROUP, READ_TOPIC), overlaps=True)
async def share_acknowledge(context: RequestContext, request: ShareAcknowledgeRequest) -> ShareAcknowledgeResponse:
    """Take a member's word for records it holds; answered when that is durable. Epoch -1 ends the session.

    Versions: v2 adds renewals of locks (KIP-1222).
    """
    broker = context.broker
    try:
        context.demand(*READ_GROUP, request.group_id or "")
        group_id, member_id = _checked_ids(request)
        acknowledged = _acknowledged(request, _renews(context, request))
        broker.queues.sessions.acknowledge(group_id, member_id, request.share_session_epoch)
    except ApiError as error:
        return ShareAcknowledgeResponse(error_code=error.code, error_message=error.message or None)
    refused = _refused(context, acknowledged)
    answering = _acknowledging(context, group_id, member_id, acknowledged, refused)
    outcomes = await _acknowledged_all(acknowledged, answering, refused)
    if request.share_session_epoch == FINAL_EPOCH:
        _end_session(context, group_id, member_id)
    hints = _Hints(context)
    topics = []
    for topic_id, items in _by_topic(outcomes):
        answers = []
        for index in items:
            answer = ShareAcknowledgeResponse.PartitionData(partition_index=index)
            failed = outcomes[topic_id, index]
            if failed is not None:
                answer.error_code, answer.error_message = code_of(failed), text_of(failed)
                leader = hints.leader((topic_id, index), failed)
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


# --- sessions ---------------------------------------------------------------------------------------------------------


def _bind(context: RequestContext, group_id: str, member_id: str) -> None:
    """Have the session end with the connection on which it began."""
    peer = context.peer
    if peer is not None:
        queues = context.broker.queues
        peer.on_lost[_SESSION, group_id, member_id] = lambda: queues.connection_lost(group_id, member_id, peer)


def _end_session(context: RequestContext, group_id: str, member_id: str) -> None:
    if context.peer is not None:
        context.peer.on_lost.pop((_SESSION, group_id, member_id), None)
    context.broker.queues.end_session(group_id, member_id)


# --- requests ---------------------------------------------------------------------------------------------------------


def _checked_ids(request: ShareFetchRequest | ShareAcknowledgeRequest) -> tuple[str, str]:
    group_id, member_id = request.group_id, request.member_id
    if not group_id:
        raise ApiError(ErrorCode.INVALID_REQUEST, "the group id is missing")
    if not member_id or len(member_id) > MAX_MEMBER_ID:
        raise ApiError(ErrorCode.INVALID_REQUEST, "the member id is missing, or longer than a UUID")
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


def _refused(context: RequestContext, partitions: Iterable[TopicPartitionId]) -> set[TopicPartitionId]:
    """Those whose topics may not be read; what is not there is told later."""
    may_read = context.rights(*READ_TOPIC)
    if may_read is anything:
        return set()
    topics = context.broker.image.topics_by_id
    return {each for each in partitions if each[0] in topics and not may_read(topics[each[0]].name)}


def _acknowledging(
    context: RequestContext,
    group_id: str,
    member_id: str,
    acknowledged: Acknowledgements,
    refused: Container[TopicPartitionId],
) -> asyncio.Task[Outcomes] | None:
    """A task of its own: a client that hangs up has still said what it said."""
    allowed = {partition: batches for partition, batches in acknowledged.items() if partition not in refused}
    if not allowed:
        return None
    work = _acknowledge_all(context, group_id, member_id, allowed)
    return context.broker.queues.tasks.start(f"acknowledgements of {group_id}", work)


async def _acknowledged_all(
    acknowledged: Acknowledgements, answering: asyncio.Task[Outcomes] | None, refused: Container[TopicPartitionId]
) -> Outcomes:
    outcomes: Outcomes = {partition: _NOT_ALLOWED for partition in acknowledged if partition in refused}
    return outcomes if answering is None else outcomes | await asyncio.shield(answering)


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

    if len(acknowledged) == 1:
        ((partition, batches),) = acknowledged.items()
        return {partition: await one(partition, batches)}
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
    partitions: list[SharePartition] = field(default_factory=list)
    """Those of the session that are loaded."""
    fetched: dict[TopicPartitionId, Fetched] = field(default_factory=dict)
    errors: Outcomes = field(default_factory=dict)
    is_over: bool = False
    """Whether the time to wait is up."""
    lacks_room: bool = False
    """Whether there was no memory for any records; see `server.answers`."""

    async def run(self, wanted: list[TopicPartitionId]) -> None:
        """Acquire what there is, and wait where that is too little: for records, and for what has yet to be loaded."""
        if not wanted:
            return
        wait_s = self.request.max_wait_ms / 1000
        self.is_over = wait_s <= 0
        queues = self.context.broker.queues
        loading: list[asyncio.Task[None]] = []
        for partition in wanted:
            key = ShareKey(self.group_id, *partition)
            found = queues.loaded(key)
            if found is not None:
                self.partitions.append(found)
            else:
                loading.append(queues.tasks.start(f"fetch from {key}", self._load(partition, key)))
        if loading and self.is_over:
            await asyncio.gather(*loading)
        await self._read_enough()
        if not (self.fetched or self.errors or self.is_over):
            await self._wait(loading, wait_s)

    async def _load(self, partition: TopicPartitionId, key: ShareKey) -> None:
        """Not taken back by an answer that leaves without it: the next request finds it loaded."""
        try:
            self.partitions.append(await self.context.broker.queues.get(key))
        except MillraceError as error:
            self._refuse(partition, error)

    def _refuse(self, partition: TopicPartitionId, error: MillraceError) -> None:
        # Clients take nearly every error of a partition for the end. A passing one is not: they come back anyway.
        if code_of(error) not in _PASSING:
            self.errors[partition] = error

    async def _read_enough(self) -> None:
        """Acquire what there is, unless waiting may still give more to answer at once."""
        if not (self.is_over or self._has_enough()):
            return
        if self.context.broker.queues.holds_lease():
            self._read(self.partitions)
            return
        asked = tuple(self.partitions)  # others may have been loaded before this is answered
        answers = await asyncio.gather(*(self._may_give(partition) for partition in asked))
        self._read(partition for partition, may_give in zip(asked, answers, strict=True) if may_give)

    async def _may_give(self, partition: SharePartition) -> bool:
        """Whether there is something, and this broker still leads the partition by the word of the coordinator."""
        try:
            if not partition.readable_bytes():
                return False
            await partition.confirm()
        except MillraceError as error:
            self._refuse((partition.key.topic_id, partition.key.partition), error)
            return False
        return True

    def _has_enough(self) -> bool:
        """Whether there may be `min_bytes` by now: nothing is acquired that would not be answered at once."""
        if self.request.min_bytes <= 1 or self.errors:
            return True
        size_bytes = 0
        for partition in self.partitions:
            try:
                size_bytes += partition.readable_bytes()
            except MillraceError:
                return True  # to be told, by reading
            if size_bytes >= self.request.min_bytes:
                return True
        return False

    def _read(self, partitions: Iterable[SharePartition]) -> None:
        request = self.request
        records = request.max_records
        size_bytes = min(request.max_bytes, self.context.broker.fetch_max_bytes)
        if self.context.peer is not None:
            room = self.context.peer.answer_room(self.context)
            self.lacks_room = not room
            size_bytes = min(size_bytes, room)
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
                self.context.reserve(len(found.records))

    async def _wait(self, loading: Iterable[asyncio.Task[None]], seconds: float) -> None:
        """Wait for `min_bytes`, then for a record, and for memory. Cancelled, it leaves no watcher behind."""
        broker, peer = self.context.broker, self.context.peer
        loop = asyncio.get_running_loop()
        moved: asyncio.Future[None] = loop.create_future()
        watched: list[SharePartition] = []

        def wake(_: object = None) -> None:
            if not moved.done():
                moved.set_result(None)

        def expire() -> None:
            self.is_over = True
            wake()

        for task in loading:
            task.add_done_callback(wake)
        timer = broker.clock.call_later(seconds, expire)
        try:
            while not (self.is_over or self.fetched or self.errors or broker.replicas.closing):
                for partition in self.partitions[len(watched) :]:
                    watched.append(partition)
                    partition.watchers.add(wake)
                    partition.partition.high_watermark.watch(wake)
                if self.lacks_room and peer is not None:
                    peer.when_room(self.context, wake)
                await moved
                moved = loop.create_future()
                await self._read_enough()
        finally:
            timer.cancel()
            if peer is not None:
                peer.forget_room(wake)
            for task in loading:
                task.remove_done_callback(wake)
            for partition in watched:
                partition.watchers.discard(wake)
                partition.partition.high_watermark.unwatch(wake)


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
        code = code_of(error)
        answer.error_code = code if code in _TOLD else ErrorCode.UNKNOWN_SERVER_ERROR
        answer.error_message = text_of(error)
    refused = outcomes.get(partition)
    if refused is not None:
        answer.acknowledge_error_code, answer.acknowledge_error_message = code_of(refused), text_of(refused)
    for each in (error, refused):
        leader = None if each is None else hints.leader(partition, each)
        if leader is not None:
            answer.current_leader.leader_id = leader.leader_id
            answer.current_leader.leader_epoch = leader.leader_epoch
    return answer
