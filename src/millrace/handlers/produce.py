"""Produce: record batches into partitions.

The ordered part (check, append) runs at once, without a task; only the wait for the commit is a coroutine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final

from millrace.errors import ApiError, ErrorCode, MillraceError, ProtocolError, code_of, text_of
from millrace.handlers.context import RequestContext
from millrace.handlers.registry import api
from millrace.model import INTERNAL_TOPICS
from millrace.records.batch import CODEC_MASK, TRANSACTIONAL_BIT, attributes_of
from millrace.records.compression import Codec
from millrace.wire.hot import ProduceCall, ProducePartition, ProduceResult, TopicKey, read_produce, write_produce
from millrace.wire.keys import ApiKey
from millrace.wire.messages.produce import ProduceRequest

if TYPE_CHECKING:
    from millrace.replication.replicas import Replicas

ACKS_ALL: Final = -1
ACKS_LEADER: Final = 1
ACKS_NONE: Final = 0
ZSTD_FROM: Final = 7

ProduceAnswer = list[tuple[TopicKey, list[ProduceResult]]]
_Wait = tuple[list[ProduceResult], int, asyncio.Future[None]]


@api(
    ApiKey.PRODUCE,
    ProduceRequest,
    "3-13",
    overlaps=True,
    advertised_min=0,
    decoder=read_produce,
    encoder=write_produce,
)
def produce(context: RequestContext, call: ProduceCall) -> ProduceAnswer | Coroutine[Any, Any, ProduceAnswer] | None:
    """Append each partition's batch and answer according to acks.

    acks=all answers once the batch is committed (below the high watermark; on disk in `flush.mode=group`), acks=1 once
    it is written, acks=0 never. A batch that an idempotent producer sends again is answered with its old offset. Each
    partition succeeds or fails by itself.

    Versions: below v3 are advertised because old librdkafka wants to see them (KAFKA-18659) but not decoded; v13 names
    topics by id.

    Not done: transactions (a transactional id is refused).
    """
    acks = call.acks
    refusal = _refusal(call)
    replicas = context.broker.replicas
    answer: ProduceAnswer = []
    waits: list[_Wait] = []
    for key, partitions in call.topics:
        results: list[ProduceResult] = []
        answer.append((key, results))
        for item in partitions:
            try:
                if refusal is not None:
                    raise refusal
                wait = _append(replicas, key, item, call.acks, context.version, results)
            except MillraceError as error:
                results.append(ProduceResult(item.partition, code_of(error), error_message=text_of(error)))
                continue
            if wait is not None:
                waits.append((results, len(results) - 1, wait))
    if waits:
        return _settle(context, call.timeout_ms, answer, waits)
    if acks == ACKS_NONE:
        if any(result.error_code for _, results in answer for result in results):
            # There is no reply to carry the error, so the client learns of it as Kafka's do: by the connection.
            raise ProtocolError("a produce with acks=0 failed")
        return None
    return answer


def _refusal(call: ProduceCall) -> ApiError | None:
    """What is wrong with the request as a whole."""
    if call.acks not in (ACKS_ALL, ACKS_LEADER, ACKS_NONE):
        return ApiError(ErrorCode.INVALID_REQUIRED_ACKS, f"acks is {call.acks}; it must be -1, 0 or 1")
    if call.transactional_id is not None:
        return ApiError(ErrorCode.INVALID_TXN_STATE, "transactions are not served yet")
    return None


def _append(
    replicas: Replicas, key: TopicKey, item: ProducePartition, acks: int, version: int, results: list[ProduceResult]
) -> asyncio.Future[None] | None:
    partition = replicas.find(key, item.partition)
    if partition.topic in INTERNAL_TOPICS:
        raise ApiError(ErrorCode.INVALID_TOPIC_EXCEPTION, f"{partition.topic} is written by the broker alone")
    if item.records is None:
        raise ApiError(ErrorCode.INVALID_RECORD, "the record set is null")
    _check_attributes(item.records, version)
    appended = partition.append(item.records)
    results.append(
        ProduceResult(item.partition, 0, appended.base_offset, appended.log_append_time_ms, appended.start_offset)
    )
    return partition.committed_up_to(appended.last_offset) if acks == ACKS_ALL else None


def _check_attributes(records: memoryview, version: int) -> None:
    """What a batch says of itself that this request may not say; a batch too short to say anything is refused later."""
    attributes = attributes_of(records)
    if attributes & TRANSACTIONAL_BIT:
        raise ApiError(ErrorCode.INVALID_TXN_STATE, "transactions are not served yet")
    if attributes & CODEC_MASK == Codec.ZSTD and version < ZSTD_FROM:
        raise ApiError(ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, f"zstd needs Produce v{ZSTD_FROM}")


async def _settle(context: RequestContext, timeout_ms: int, answer: ProduceAnswer, waits: list[_Wait]) -> ProduceAnswer:
    """Wait for the commits. Cancelled (the client is gone), the records stay where they are."""

    def expire() -> None:
        for _, _, future in waits:
            if not future.done():
                future.set_exception(ApiError(ErrorCode.REQUEST_TIMED_OUT, f"not committed within {timeout_ms} ms"))

    timer = context.broker.clock.call_later(max(timeout_ms, 0) / 1000, expire)
    try:
        for results, place, future in waits:
            try:
                await future
            except ApiError as error:
                failed = results[place].partition
                results[place] = ProduceResult(failed, error.code, error_message=text_of(error))
    finally:
        timer.cancel()
        for _, _, future in waits:
            future.cancel()
    return answer
