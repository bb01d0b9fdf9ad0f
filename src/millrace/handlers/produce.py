"""Produce: record batches into partitions.

The ordered part (check, append) runs at once, without a task; only the wait for the commit is a promise.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from millrace.errors import ApiError, ErrorCode, MillraceError, ProtocolError, code_of, text_of
from millrace.handlers.context import RequestContext
from millrace.handlers.leaders import leader_hint
from millrace.handlers.promise import Promise
from millrace.handlers.registry import api
from millrace.model import INTERNAL_TOPICS
from millrace.records.batch import CODEC_MASK, TRANSACTIONAL_BIT, attributes_of
from millrace.records.compression import Codec
from millrace.wire.hot import ProduceCall, ProducePartition, ProduceResult, TopicKey, read_produce, write_produce
from millrace.wire.keys import ApiKey
from millrace.wire.messages.produce import ProduceRequest

if TYPE_CHECKING:
    from millrace.clock import Clock, Timer
    from millrace.replication.partition import Partition
    from millrace.replication.replicas import Replicas
    from millrace.storage.log import Appended

ACKS_ALL: Final = -1
ACKS_LEADER: Final = 1
ACKS_NONE: Final = 0
ZSTD_FROM: Final = 7

ProduceAnswer = list[tuple[TopicKey, list[ProduceResult]]]
_Place = tuple[TopicKey, list[ProduceResult], int]


@api(
    ApiKey.PRODUCE,
    ProduceRequest,
    "3-13",
    overlaps=True,
    advertised_min=0,
    decoder=read_produce,
    encoder=write_produce,
)
def produce(context: RequestContext, call: ProduceCall) -> ProduceAnswer | Promise[ProduceAnswer] | None:
    """Append each partition's batch and answer according to acks.

    acks=all answers once the batch is committed (on every in-sync replica; on their disks in `flush.mode=group`), and
    is refused with NOT_ENOUGH_REPLICAS below min.insync.replicas; acks=1 answers once it is written, acks=0 never. A
    batch that an idempotent producer sends again is answered with its old offset. Each partition succeeds or fails by
    itself; one that is led elsewhere is answered with where (KIP-951).

    Versions: below v3 are advertised because old librdkafka wants to see them (KAFKA-18659) but not decoded; v13 names
    topics by id.

    Not done: transactions (a transactional id is refused).
    """
    acks = call.acks
    refusal = _refusal(call)
    replicas = context.broker.replicas
    answer: ProduceAnswer = []
    commit: _Commit | None = None
    for key, partitions in call.topics:
        results: list[ProduceResult] = []
        answer.append((key, results))
        for item in partitions:
            try:
                if refusal is not None:
                    raise refusal
                partition, appended = _append(replicas, key, item, acks, context.version)
            except MillraceError as error:
                hint = leader_hint(context, key, item.partition, code_of(error))
                results.append(ProduceResult(item.partition, code_of(error), error_message=text_of(error), leader=hint))
                continue
            if acks == ACKS_ALL and partition.high_watermark.offset <= appended.last_offset:
                commit = commit or _Commit(context, answer)
                commit.await_partition(partition, appended.last_offset, key, results)
            results.append(
                ProduceResult(
                    item.partition, 0, appended.base_offset, appended.log_append_time_ms, appended.start_offset
                )
            )
    if commit is not None and commit.waiting:
        commit.within(call.timeout_ms, context.broker.clock)
        return commit
    if acks == ACKS_NONE:
        if any(result.error_code for _, results in answer for result in results):
            # There is no reply to carry the error, so the client learns of it as Kafka's do: by the connection.
            raise ProtocolError("a produce with acks=0 failed")
        return None
    return answer


class _Commit(Promise[ProduceAnswer]):
    """The wait of one request for all its batches. Callbacks instead of a task: this is made for every request."""

    __slots__ = ("_answer", "_context", "_timeout_ms", "_timer", "waiting")

    def __init__(self, context: RequestContext, answer: ProduceAnswer) -> None:
        super().__init__()
        self._context = context
        self._answer = answer
        self._timer: Timer | None = None
        self._timeout_ms = 0
        self.waiting: dict[int, _Place] = {}
        """Where the results lie whose batches are not committed yet; the keys are arbitrary."""

    def await_partition(
        self, partition: Partition, last_offset: int, key: TopicKey, results: list[ProduceResult]
    ) -> None:
        """Wait for `last_offset`, whose result will be the next one in `results`, those of topic `key`."""
        ticket = len(self.waiting)
        if partition.when_committed(last_offset, partial(self._settle, ticket)):
            self.waiting[ticket] = (key, results, len(results))

    def within(self, timeout_ms: int, clock: Clock) -> None:
        """Answer once everything is committed or has failed, or when `timeout_ms` are over."""
        self._timeout_ms = timeout_ms
        self._timer = clock.call_later(max(timeout_ms, 0) / 1000, self._expire)

    def _settle(self, ticket: int, error: Exception | None) -> None:
        place = self.waiting.pop(ticket, None)
        if place is not None and error is not None:
            _put_error(self._context, place, error)
        if not self.waiting:
            self._finish()

    def _expire(self) -> None:
        for place in self.waiting.values():
            _put_error(
                self._context,
                place,
                ApiError(ErrorCode.REQUEST_TIMED_OUT, f"not committed within {self._timeout_ms} ms"),
            )
        self.waiting.clear()
        self._finish()

    def _finish(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.keep(self._answer)


def _put_error(context: RequestContext, place: _Place, error: Exception) -> None:
    key, results, index = place
    told = error if isinstance(error, MillraceError) else ApiError(ErrorCode.UNKNOWN_SERVER_ERROR)
    partition, code = results[index].partition, code_of(told)
    hint = leader_hint(context, key, partition, code)
    results[index] = ProduceResult(partition, code, error_message=text_of(told), leader=hint)


def _refusal(call: ProduceCall) -> ApiError | None:
    """What is wrong with the request as a whole."""
    if call.acks not in (ACKS_ALL, ACKS_LEADER, ACKS_NONE):
        return ApiError(ErrorCode.INVALID_REQUIRED_ACKS, f"acks is {call.acks}; it must be -1, 0 or 1")
    if call.transactional_id is not None:
        return ApiError(ErrorCode.INVALID_TXN_STATE, "transactions are not served yet")
    return None


def _append(
    replicas: Replicas, key: TopicKey, item: ProducePartition, acks: int, version: int
) -> tuple[Partition, Appended]:
    partition = replicas.find(key, item.partition)
    leadership = partition.leadership
    if leadership is not None and leadership.under_min_isr and acks == ACKS_ALL:
        partition.check_in_sync()
    if partition.topic in INTERNAL_TOPICS:
        raise ApiError(ErrorCode.INVALID_TOPIC_EXCEPTION, f"{partition.topic} is written by the broker alone")
    if item.records is None:
        raise ApiError(ErrorCode.INVALID_RECORD, "the record set is null")
    _check_attributes(item.records, version)
    return partition, partition.append(item.records)


def _check_attributes(records: memoryview, version: int) -> None:
    """What a batch says of itself that this request may not say; a batch too short to say anything is refused later."""
    attributes = attributes_of(records)
    if attributes & TRANSACTIONAL_BIT:
        raise ApiError(ErrorCode.INVALID_TXN_STATE, "transactions are not served yet")
    if attributes & CODEC_MASK == Codec.ZSTD and version < ZSTD_FROM:
        raise ApiError(ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, f"zstd needs Produce v{ZSTD_FROM}")
