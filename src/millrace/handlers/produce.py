"""Produce: record batches into partitions.

The ordered part (check, append) runs at once, without a task; only the wait for the commit is a promise. A request with
a transactional id takes the same way (`transactional`), unless it is the first of its transaction for some partition.
"""

from __future__ import annotations

from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from millrace.errors import ApiError, ErrorCode, InvalidRecordsError, MillraceError, ProtocolError, code_of, text_of
from millrace.handlers.context import RequestContext, Rights, anything
from millrace.handlers.forwarding import is_from_broker
from millrace.handlers.leaders import leader_hint
from millrace.handlers.needs import WRITE_TOPIC, WRITE_TRANSACTIONAL_ID, judged
from millrace.handlers.promise import Promise
from millrace.handlers.registry import api
from millrace.handlers.transactional import (
    Admitted,
    ask,
    in_line,
    is_admitted_at_once,
    is_first_in_line,
    is_transactional,
)
from millrace.model import AUDIT_LOG_TOPIC, INTERNAL_TOPICS
from millrace.records.batch import CODEC_MASK, TRANSACTIONAL_BIT, attributes_of
from millrace.records.compression import Codec
from millrace.wire.hot import ProduceCall, ProducePartition, ProduceResult, TopicKey, read_produce, write_produce
from millrace.wire.keys import ApiKey
from millrace.wire.messages.produce import ProduceRequest

if TYPE_CHECKING:
    from millrace.clock import Clock, Timer
    from millrace.replication.partition import Partition
    from millrace.storage.log import Appended

ACKS_ALL: Final = -1
ACKS_LEADER: Final = 1
ACKS_NONE: Final = 0
ZSTD_FROM: Final = 7

ProduceAnswer = list[tuple[TopicKey, list[ProduceResult]]]
_Produced = ProduceAnswer | None
"""None where nobody waits for an answer (acks=0)."""
_ResultSlot = tuple[TopicKey, list[ProduceResult], int]


@api(
    ApiKey.PRODUCE,
    ProduceRequest,
    "3-13",
    needs=judged(WRITE_TOPIC, WRITE_TRANSACTIONAL_ID),
    overlaps=True,
    counts_errors=True,
    advertised_min=0,
    decoder=read_produce,
    encoder=write_produce,
)
def produce(
    context: RequestContext, call: ProduceCall
) -> _Produced | Promise[_Produced] | Coroutine[Any, Any, _Produced]:
    """Append each partition's batch and answer according to acks.

    acks=all answers once the batch is committed (on every in-sync replica; on their disks in `flush.mode=group`), and
    is refused with NOT_ENOUGH_REPLICAS below min.insync.replicas; acks=1 answers once it is written, acks=0 never. A
    batch that an idempotent producer sends again is answered with its old offset. Each partition succeeds or fails by
    itself; one that is led elsewhere is answered with where (KIP-951). Records of a compacted topic without a key are
    named one by one (KIP-467).

    Before the first batch of a transaction is appended to a partition its coordinator is asked (KIP-890): up to v11
    whether the partition was added to the transaction, unless `transaction.partition.verification.enable` is off; from
    v12 on to add it. Meanwhile what the same connection produces in transactions waits, so that the order is kept. A
    transactional batch without a transactional id, or one whose id may not be written, is refused with
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED, by what the batch says and not the request (CVE-2018-17196); several
    producers in one request with INVALID_PRODUCER_ID_MAPPING. A batch with the sequences of one whose transaction has
    ended is UNKNOWN_PRODUCER_ID, and no duplicate as in Kafka: librdkafka gives the sequences of a batch that it has
    dropped to the next one.

    Versions: below v3 are advertised because old librdkafka wants to see them (KAFKA-18659) but not decoded; v8 names
    bad records; v11 knows TRANSACTION_ABORTABLE, before it is INVALID_TXN_STATE; v12 adds partitions to transactions;
    v13 names topics by id.
    """
    may_write = context.rights(*WRITE_TOPIC)
    refused = [] if may_write is anything else _judge(context, call, may_write)
    if call.transactional_id is None:
        return _append_all(context, call, None, refused)
    if is_first_in_line(context):
        question = ask(context, call)
        if is_admitted_at_once(context, call, question):
            return _append_all(context, call, question.admitted, refused)
    return in_line(context, call, lambda admitted: _append_all(context, call, admitted, refused))


def _judge(context: RequestContext, call: ProduceCall, may_write: Rights) -> ProduceAnswer:
    """Take out of a request what may not be written; the answers to that."""
    if is_transactional(call) and (
        call.transactional_id is None or not context.may(*WRITE_TRANSACTIONAL_ID, call.transactional_id)
    ):
        code = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        refused, call.topics = call.topics, []
    else:
        code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
        name_of = context.broker.replicas.name_of
        refused = []
        for topic in call.topics:
            # Of an id that is not known that will be said.
            if (name := name_of(topic[0])) and not may_write(name) and not _is_own(context, name):
                refused.append(topic)
        if not refused:
            return []  # as nearly always
        keys = {key for key, _ in refused}
        call.topics = [topic for topic in call.topics if topic[0] not in keys]
    for _, partitions in refused:
        for _ in partitions:
            context.note_error(code)
    return [(key, [ProduceResult(item.partition, code) for item in partitions]) for key, partitions in refused]


def _is_own(context: RequestContext, topic: str) -> bool:
    """Whether a broker writes its audit log here (`replication.audit_topic`)."""
    return topic == AUDIT_LOG_TOPIC and is_from_broker(context)


def _append_all(
    context: RequestContext, call: ProduceCall, admitted: Admitted | None, refused: ProduceAnswer
) -> _Produced | Promise[_Produced]:
    """Append what may be written; `refused` is the answer for the rest."""
    acks = call.acks
    refusal: ApiError | None = None
    if acks not in (ACKS_ALL, ACKS_LEADER, ACKS_NONE):
        refusal = ApiError(ErrorCode.INVALID_REQUIRED_ACKS, f"acks is {acks}; it must be -1, 0 or 1")
    answer: ProduceAnswer = refused
    commit: _Commit | None = None
    for key, partitions in call.topics:
        results: list[ProduceResult] = []
        answer.append((key, results))
        for item in partitions:
            try:
                if refusal is not None:
                    raise refusal
                partition, appended = _append(context, key, item, acks, admitted)
            except MillraceError as error:
                results.append(_refused(context, key, item.partition, error))
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


class _Commit(Promise[_Produced]):
    """The wait of one request for all its batches. Callbacks instead of a task: this is made for every request."""

    __slots__ = ("_answer", "_context", "_timeout_ms", "_timer", "waiting")

    def __init__(self, context: RequestContext, answer: ProduceAnswer) -> None:
        super().__init__()
        self._context = context
        self._answer = answer
        self._timer: Timer | None = None
        self._timeout_ms = 0
        self.waiting: dict[int, _ResultSlot] = {}
        """Where the results lie whose batches are not committed yet; the keys are arbitrary."""

    def await_partition(
        self, partition: Partition, last_offset: int, key: TopicKey, results: list[ProduceResult]
    ) -> None:
        """Wait for `last_offset`, whose result will be the next one in `results`, those of topic `key`."""
        ticket = len(self.waiting)
        if partition.when_committed(last_offset, partial(self._note_outcome, ticket)):
            self.waiting[ticket] = (key, results, len(results))

    def within(self, timeout_ms: int, clock: Clock) -> None:
        """Answer once everything is committed or has failed, or when `timeout_ms` are over."""
        self._timeout_ms = timeout_ms
        self._timer = clock.call_later(max(timeout_ms, 0) / 1000, self._expire)

    def _note_outcome(self, ticket: int, error: Exception | None) -> None:
        slot = self.waiting.pop(ticket, None)
        if slot is not None and error is not None:
            _put_error(self._context, slot, error)
        if not self.waiting:
            self._finish()

    def _expire(self) -> None:
        for slot in self.waiting.values():
            _put_error(
                self._context,
                slot,
                ApiError(ErrorCode.REQUEST_TIMED_OUT, f"not committed within {self._timeout_ms} ms"),
            )
        self.waiting.clear()
        self._finish()

    def _finish(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.keep(self._answer)


def _put_error(context: RequestContext, slot: _ResultSlot, error: Exception) -> None:
    key, results, index = slot
    told = error if isinstance(error, MillraceError) else ApiError(ErrorCode.UNKNOWN_SERVER_ERROR)
    results[index] = _refused(context, key, results[index].partition, told)


def _refused(context: RequestContext, key: TopicKey, partition: int, error: MillraceError) -> ProduceResult:
    code = code_of(error)
    context.note_error(code)
    return ProduceResult(
        partition,
        code,
        error_message=text_of(error),
        leader=leader_hint(context, key, partition, code),
        record_errors=error.records if isinstance(error, InvalidRecordsError) else (),
    )


def _append(
    context: RequestContext, key: TopicKey, item: ProducePartition, acks: int, admitted: Admitted | None
) -> tuple[Partition, Appended]:
    partition = context.broker.replicas.find(key, item.partition)
    leadership = partition.leadership
    if leadership is not None and leadership.under_min_isr and acks == ACKS_ALL:
        partition.check_in_sync()
    if partition.topic in INTERNAL_TOPICS and not _is_own(context, partition.topic):
        raise ApiError(ErrorCode.INVALID_TOPIC_EXCEPTION, f"{partition.topic} is written by the broker alone")
    if item.records is None:
        raise ApiError(ErrorCode.INVALID_RECORD, "the record set is null")
    attributes = attributes_of(item.records)
    if attributes & (TRANSACTIONAL_BIT | CODEC_MASK):
        _check_attributes(attributes, context.version, admitted)
    if admitted is None:
        return partition, partition.append(item.records)
    return partition, partition.append(item.records, verification=admitted.verification(key, item.partition))


def _check_attributes(attributes: int, version: int, admitted: Admitted | None) -> None:
    """What a batch says of itself that this request may not say; a batch too short to say anything is refused later."""
    if attributes & TRANSACTIONAL_BIT and admitted is None:
        raise ApiError(
            ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "a transactional batch needs a transactional id"
        )
    if attributes & CODEC_MASK == Codec.ZSTD and version < ZSTD_FROM:
        raise ApiError(ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, f"zstd needs Produce v{ZSTD_FROM}")
