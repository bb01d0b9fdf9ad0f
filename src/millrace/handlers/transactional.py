"""Produce with a transactional id: what has to be asked before its batches are appended (KIP-890), and in which order.

The first batch of a transaction in a partition opens it there, and only a marker of its coordinator will end it. So the
coordinator is asked first, of all partitions of a request together; `Verification` (`storage.producers`) sees to it
that a marker that comes meanwhile is not overtaken. Where the transaction is open already nobody is asked.

Invariant: what one connection produces with a transactional id is appended in the order in which it came. While a
request waits for the coordinator those behind it wait, too, and are looked at when it is done: nearly always its
transaction is open then.

Not here: appending (`produce`), asking (`TransactionGate`), what becomes of a transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from millrace.errors import ApiError, ErrorCode, MillraceError
from millrace.handlers.context import RequestContext
from millrace.handlers.promise import Promise
from millrace.model import INTERNAL_TOPICS
from millrace.records.batch import TRANSACTIONAL_BIT, attributes_of, read_header
from millrace.storage.producers import UNVERIFIED, Verification
from millrace.wire.hot import ProduceCall, TopicKey

if TYPE_CHECKING:
    from millrace.handlers.context import Peer
    from millrace.records.batch import BatchHeader

ABORTABLE_FROM: Final = 11
"""From this version on a client knows TRANSACTION_ABORTABLE."""
ADDS_FROM: Final = 12
"""From this version on Produce adds partitions to transactions, and every transaction has its own producer epoch."""
VERIFICATION_SETTING: Final = "transaction.partition.verification.enable"

UNANSWERED: Final = frozenset(
    {
        ErrorCode.NETWORK_EXCEPTION,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
    }
)
"""The coordinator could not be asked, or has not said anything that lasts."""

PartitionKey = tuple[TopicKey, int]
A = TypeVar("A")


@dataclass(slots=True)
class Admitted:
    """What was found out about the partitions of a request."""

    skips: bool = False
    """Whether nobody had to be asked."""
    guards: dict[PartitionKey, Verification] = field(default_factory=dict)
    refusals: dict[PartitionKey, MillraceError] = field(default_factory=dict)
    refusal: ApiError | None = None
    """Of the whole request."""

    def verification(self, key: TopicKey, partition: int) -> Verification | None:
        """What the append of a batch has to show; raises what was said against it."""
        if self.refusal is not None:
            raise self.refusal
        refusal = self.refusals.get((key, partition))
        if refusal is not None:
            raise refusal
        return UNVERIFIED if self.skips else self.guards.get((key, partition))


@dataclass(slots=True)
class Question:
    """What is to be asked of the coordinator."""

    producer_id: int
    producer_epoch: int
    adds: bool
    admitted: Admitted
    keys: dict[tuple[str, int], PartitionKey] = field(default_factory=dict)
    """The partitions to ask about, by topic name and index, as the request names them."""

    @property
    def guards(self) -> dict[PartitionKey, Verification]:
        return self.admitted.guards


def is_first_in_line(context: RequestContext) -> bool:
    """Whether nothing that this connection produced before still waits for a coordinator."""
    return context.peer not in context.broker.produce_lines


def ask(context: RequestContext, call: ProduceCall) -> Question:
    """See which partitions of a request the coordinator has to be asked about; it is about none where guards are."""
    batches = _transactional_batches(call)
    producers = {(header.producer_id, header.producer_epoch) for header in batches.values()}
    admitted = Admitted()
    adds = context.version >= ADDS_FROM
    if len(producers) != 1:
        if producers:
            admitted.refusal = ApiError(
                ErrorCode.INVALID_PRODUCER_ID_MAPPING, "the transactional batches of a request have several producers"
            )
        return Question(-1, -1, adds, admitted)
    ((producer_id, epoch),) = producers
    question = Question(producer_id, epoch, adds, admitted)
    if not adds and not context.broker.config.get_bool(VERIFICATION_SETTING):
        admitted.skips = True
        return question
    for key, header in batches.items():
        try:
            partition = context.broker.replicas.find(*key)
            if partition.topic in INTERNAL_TOPICS:
                continue  # refused when it is to be appended
            guard = partition.begin_verification(producer_id, epoch, header.base_sequence, bumps_epoch=adds)
        except MillraceError as error:
            admitted.refusals[key] = error
            continue
        if guard is not None:
            admitted.guards[key] = guard
            question.keys[partition.topic, partition.index] = key
    return question


def _transactional_batches(call: ProduceCall) -> dict[PartitionKey, BatchHeader]:
    return {
        (key, item.partition): read_header(item.records)
        for key, partitions in call.topics
        for item in partitions
        if item.records is not None and attributes_of(item.records) & TRANSACTIONAL_BIT
    }


def is_transactional(call: ProduceCall) -> bool:
    """Whether any batch says that it belongs to a transaction."""
    for _, partitions in call.topics:
        for item in partitions:
            if item.records is not None and attributes_of(item.records) & TRANSACTIONAL_BIT:
                return True
    return False


def is_admitted_at_once(context: RequestContext, call: ProduceCall, question: Question) -> bool:
    """Whether there is nothing to wait for: nobody is to be asked, or who is asked has answered already."""
    return not question.guards or (
        question.adds
        and context.broker.transaction_gate.adds_at_once(
            call.transactional_id or "", question.producer_id, question.producer_epoch, list(question.keys)
        )
    )


def in_line(
    context: RequestContext, call: ProduceCall, append: Callable[[Admitted], A | Promise[A]]
) -> Coroutine[Any, Any, A]:
    """Take the last place in the connection's line now; what is returned waits, asks, appends and answers."""
    lines, peer = context.broker.produce_lines, context.peer
    before = lines.get(peer)
    done = lines[peer] = asyncio.get_running_loop().create_future()
    if peer is not None:
        # Work that is cancelled before it has begun does not clean up after itself.
        peer.on_lost[done] = partial(_forget_line, lines, peer)
    return _in_line(context, call, append, before, done)


def _forget_line(lines: dict[Peer | None, asyncio.Future[None]], peer: Peer) -> None:
    lines.pop(peer, None)


async def _in_line(
    context: RequestContext,
    call: ProduceCall,
    append: Callable[[Admitted], A | Promise[A]],
    before: asyncio.Future[None] | None,
    done: asyncio.Future[None],
) -> A:
    lines, peer = context.broker.produce_lines, context.peer
    try:
        if before is not None:
            await asyncio.wait([before])
        question = ask(context, call)
        if question.guards:
            await _admit(context, call.transactional_id or "", question)
        outcome = append(question.admitted)
    finally:
        done.set_result(None)
        if lines.get(peer) is done:
            del lines[peer]
        if peer is not None:
            peer.on_lost.pop(done, None)
    return await _kept(outcome) if isinstance(outcome, Promise) else outcome


async def _kept(promise: Promise[A]) -> A:
    answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
    promise.then(answer.set_result)
    try:
        return await answer
    except asyncio.CancelledError:
        promise.cancel()
        raise


async def _admit(context: RequestContext, transactional_id: str, question: Question) -> None:
    """Ask the coordinator, and take note of what it has against any of the partitions."""
    keys = question.keys
    try:
        codes = await context.broker.transaction_gate.admit(
            transactional_id, question.producer_id, question.producer_epoch, list(keys), add=question.adds
        )
    except ApiError as error:
        codes = dict.fromkeys(keys, error.code)
    for name, code in codes.items():
        if code is not ErrorCode.NONE and name in keys:
            question.admitted.refusals[keys[name]] = told(code, context.version)


def told(code: ErrorCode, version: int) -> ApiError:
    """What the client of a Produce request is told of the coordinator's error.

    What may pass is NOT_ENOUGH_REPLICAS, which every client sends again without looking for another leader.
    """
    if code in UNANSWERED or (code is ErrorCode.CONCURRENT_TRANSACTIONS and version < ADDS_FROM):
        return ApiError(
            ErrorCode.NOT_ENOUGH_REPLICAS, f"the coordinator could not be asked about the transaction: {code.name}"
        )
    if code is ErrorCode.PRODUCER_FENCED:
        return ApiError(ErrorCode.INVALID_PRODUCER_EPOCH, "the producer was replaced by another")
    if code in {ErrorCode.INVALID_TXN_STATE, ErrorCode.CLUSTER_AUTHORIZATION_FAILED} or (
        code is ErrorCode.TRANSACTION_ABORTABLE and version < ABORTABLE_FROM
    ):
        return ApiError(ErrorCode.INVALID_TXN_STATE, "the partition was not added to the transaction")
    return ApiError(code, "the coordinator refuses the transaction")
