"""What leaders of share-partitions and the group coordinator ask the share coordinator (KIP-932).

Between brokers: internal, for those with a broker's right, on the listener of the brokers only. Nothing is decided
here; what the requests mean is in `queues.state`, durability in `queues.shard`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar
from uuid import UUID

from millrace.errors import ApiError, ErrorCode
from millrace.handlers.context import RequestContext
from millrace.handlers.needs import OF_BROKERS
from millrace.handlers.registry import Refuse, api
from millrace.queues.batches import RecordState, StateBatch
from millrace.queues.records import ShareKey
from millrace.queues.state import Write
from millrace.wire.keys import ApiKey
from millrace.wire.messages.share_state import (
    DeleteShareGroupStateRequest,
    DeleteShareGroupStateResponse,
    InitializeShareGroupStateRequest,
    InitializeShareGroupStateResponse,
    ReadShareGroupStateRequest,
    ReadShareGroupStateResponse,
    ReadShareGroupStateSummaryRequest,
    ReadShareGroupStateSummaryResponse,
    WriteShareGroupStateRequest,
    WriteShareGroupStateResponse,
)

R = TypeVar("R")


def _refusing(response: Any, topic_result: Any) -> Refuse:
    """An error of the whole request is said for every partition: there is no place for it above them."""

    def refuse(_context: RequestContext, request: Any, error: ApiError) -> Any:
        return response(
            results=[
                topic_result(
                    topic_id=topic.topic_id,
                    partitions=[
                        response.PartitionResult(
                            partition=item.partition, error_code=error.code, error_message=error.message
                        )
                        for item in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )

    return refuse


@api(
    ApiKey.INITIALIZE_SHARE_GROUP_STATE,
    InitializeShareGroupStateRequest,
    "0",
    needs=OF_BROKERS,
    internal=True,
    overlaps=True,
    refuse=_refusing(InitializeShareGroupStateResponse, InitializeShareGroupStateResponse.InitializeStateResult),
)
async def initialize_share_group_state(
    context: RequestContext, request: InitializeShareGroupStateRequest
) -> InitializeShareGroupStateResponse:
    """Between brokers. Begin share-partitions at an offset, or (-1) where the group's reset strategy says."""

    async def initialize(key: ShareKey, item: Any, _result: Any) -> None:
        await context.broker.share_state.initialize(key, item.state_epoch, item.start_offset)

    topics = await _each(context, request, InitializeShareGroupStateResponse.PartitionResult, initialize)
    return InitializeShareGroupStateResponse(
        results=[
            InitializeShareGroupStateResponse.InitializeStateResult(topic_id=topic_id, partitions=partitions)
            for topic_id, partitions in topics
        ]
    )


@api(
    ApiKey.READ_SHARE_GROUP_STATE,
    ReadShareGroupStateRequest,
    "0",
    needs=OF_BROKERS,
    internal=True,
    overlaps=True,
    refuse=_refusing(ReadShareGroupStateResponse, ReadShareGroupStateResponse.ReadStateResult),
)
async def read_share_group_state(
    context: RequestContext, request: ReadShareGroupStateRequest
) -> ReadShareGroupStateResponse:
    """Between brokers. The state of share-partitions for their leader; earlier leaders cannot write it any more."""

    async def read(key: ShareKey, item: Any, result: Any) -> None:
        found = await context.broker.share_state.read(key, item.leader_epoch)
        result.state_epoch, result.start_offset = found.state_epoch, found.start_offset
        result.state_batches = [
            ReadShareGroupStateResponse.StateBatch(
                first_offset=batch.first_offset,
                last_offset=batch.last_offset,
                delivery_state=batch.state,
                delivery_count=batch.delivery_count,
            )
            for batch in found.batches
        ]

    topics = await _each(context, request, ReadShareGroupStateResponse.PartitionResult, read)
    return ReadShareGroupStateResponse(
        results=[
            ReadShareGroupStateResponse.ReadStateResult(topic_id=topic_id, partitions=partitions)
            for topic_id, partitions in topics
        ]
    )


@api(
    ApiKey.WRITE_SHARE_GROUP_STATE,
    WriteShareGroupStateRequest,
    "0-1",
    needs=OF_BROKERS,
    internal=True,
    overlaps=True,
    refuse=_refusing(WriteShareGroupStateResponse, WriteShareGroupStateResponse.WriteStateResult),
)
async def write_share_group_state(
    context: RequestContext, request: WriteShareGroupStateRequest
) -> WriteShareGroupStateResponse:
    """Between brokers. What became of records; answered when it is durable.

    Versions: v1 adds how many records of the window are done with (KIP-1226).
    """

    async def write(key: ShareKey, item: Any, _result: Any) -> None:
        news = Write(
            state_epoch=item.state_epoch,
            leader_epoch=item.leader_epoch,
            start_offset=item.start_offset,
            completed=item.delivery_complete_count,
            batches=_batches(item.state_batches),
        )
        await context.broker.share_state.write(key, news)

    topics = await _each(context, request, WriteShareGroupStateResponse.PartitionResult, write)
    return WriteShareGroupStateResponse(
        results=[
            WriteShareGroupStateResponse.WriteStateResult(topic_id=topic_id, partitions=partitions)
            for topic_id, partitions in topics
        ]
    )


@api(
    ApiKey.DELETE_SHARE_GROUP_STATE,
    DeleteShareGroupStateRequest,
    "0",
    needs=OF_BROKERS,
    internal=True,
    overlaps=True,
    refuse=_refusing(DeleteShareGroupStateResponse, DeleteShareGroupStateResponse.DeleteStateResult),
)
async def delete_share_group_state(
    context: RequestContext, request: DeleteShareGroupStateRequest
) -> DeleteShareGroupStateResponse:
    """Between brokers. Forget share-partitions; what is not there is forgotten already."""

    async def delete(key: ShareKey, _item: Any, _result: Any) -> None:
        await context.broker.share_state.delete(key)

    topics = await _each(context, request, DeleteShareGroupStateResponse.PartitionResult, delete)
    return DeleteShareGroupStateResponse(
        results=[
            DeleteShareGroupStateResponse.DeleteStateResult(topic_id=topic_id, partitions=partitions)
            for topic_id, partitions in topics
        ]
    )


@api(
    ApiKey.READ_SHARE_GROUP_STATE_SUMMARY,
    ReadShareGroupStateSummaryRequest,
    "0-1",
    needs=OF_BROKERS,
    internal=True,
    overlaps=True,
    refuse=_refusing(ReadShareGroupStateSummaryResponse, ReadShareGroupStateSummaryResponse.ReadStateSummaryResult),
)
async def read_share_group_state_summary(
    context: RequestContext, request: ReadShareGroupStateSummaryRequest
) -> ReadShareGroupStateSummaryResponse:
    """Between brokers. Where share-partitions begin; -1 for those that nobody has begun.

    Versions: v1 adds how many records of the window are done with (KIP-1226).
    """

    async def summarize(key: ShareKey, _item: Any, result: Any) -> None:
        found = await context.broker.share_state.summary(key)
        result.state_epoch, result.leader_epoch = found.state_epoch, found.leader_epoch
        result.start_offset, result.delivery_complete_count = found.start_offset, found.completed

    topics = await _each(context, request, ReadShareGroupStateSummaryResponse.PartitionResult, summarize)
    return ReadShareGroupStateSummaryResponse(
        results=[
            ReadShareGroupStateSummaryResponse.ReadStateSummaryResult(topic_id=topic_id, partitions=partitions)
            for topic_id, partitions in topics
        ]
    )


async def _each(
    context: RequestContext, request: Any, make: Callable[..., R], act: Callable[[ShareKey, Any, R], Awaitable[None]]
) -> list[tuple[UUID, list[R]]]:
    """One result per partition of the request. They are begun in order and wait for the log together."""

    async def one(topic_id: UUID, item: Any) -> R:
        result: Any = make(partition=item.partition)
        try:
            context.check_broker_listener()
            if not request.group_id:
                raise ApiError(ErrorCode.INVALID_REQUEST, "the group id is empty")
            await act(ShareKey(request.group_id, topic_id, item.partition), item, result)
        except ApiError as error:
            result.error_code, result.error_message = error.code, error.message or None
        answered: R = result
        return answered

    return [
        (topic.topic_id, list(await asyncio.gather(*(one(topic.topic_id, item) for item in topic.partitions))))
        for topic in request.topics
    ]


def _batches(sent: Sequence[WriteShareGroupStateRequest.StateBatch]) -> tuple[StateBatch, ...]:
    try:
        return tuple(
            StateBatch(each.first_offset, each.last_offset, RecordState(each.delivery_state), each.delivery_count)
            for each in sent
        )
    except ValueError as error:
        raise ApiError(ErrorCode.INVALID_REQUEST, str(error)) from error
