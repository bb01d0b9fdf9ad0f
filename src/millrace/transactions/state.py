"""What the coordinator knows of one transactional id, and what each request makes of it. Pure.

A plan looks at the durable state and returns what is to be written and what is answered once that is durable, or raises
the ApiError that the producer is told. One transition at a time: while one is on its way to the log, whoever owns the
state (`shard`) answers CONCURRENT_TRANSACTIONS before it asks for a plan.

Invariants:

1. A transaction has one outcome. It is decided when PrepareCommit or PrepareAbort is durable; from there only
   CompleteCommit or CompleteAbort can follow, after every partition has its marker.
2. The pair (producer id, epoch) never goes back: an epoch only grows, and a new producer id comes with epoch 0 when
   the epochs of the old one are used up. Nobody is told an epoch that is not durable.
3. Whoever has an old epoch changes nothing. The one thing it may do is repeat its last successful request, and be
   told the same outcome again: InitProducerId (KIP-360) and, with transaction version 2, EndTxn (KIP-890). What that
   needs (previous producer id, last epoch) is in the record, so that it also works after a failover.
4. With transaction version 2 the epoch grows at every end, and at every abort by the coordinator, so that a message of
   an earlier transaction that comes late has an old epoch. The marker carries the new one.
5. The last epoch is never given to a producer: with it the coordinator can always fence.
6. Partitions are only added while a transaction is ongoing or begins with them, and are only taken away by the end.
7. An id is forgotten only between transactions.

Prepared transactions of KIP-939 are not here. They would be one more plan, beside `plan_init`, that answers with the
ongoing transaction instead of aborting it, and a timeout that the shard's deadlines leave out.

Not here: bytes (`records`), durability and markers (`shard`), which errors a version knows (`handlers.transactions`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Final, NamedTuple

from millrace.errors import ApiError, ErrorCode
from millrace.model import NO_PRODUCER_EPOCH, NO_PRODUCER_ID, NO_TIMESTAMP, TopicPartition

LAST_EPOCH: Final = 32767
"""The largest epoch there is; the one before it is the last that a producer gets."""
CLASSIC_VERSION: Final = 0
"""Of the transaction: the producer adds partitions itself, and keeps its epoch from one transaction to the next."""
EPOCH_VERSION: Final = 2
"""Of the transaction, as in the feature `transaction.version`: the epoch grows at every end (KIP-890)."""


class TransactionState(IntEnum):
    """Where a transactional id is; the number is what Kafka writes."""

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5
    DEAD = 6
    """In Kafka, an id that is being forgotten; never written."""
    PREPARE_EPOCH_FENCE = 7
    """In Kafka, a producer that is being fenced; never written."""

    @property
    def title(self) -> str:
        """As clients are told it, and filter by it."""
        return "".join(part.capitalize() for part in self.name.split("_"))

    @property
    def is_prepared(self) -> bool:
        """Whether the outcome is decided and not everybody has been told."""
        return self in {TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT}

    @property
    def commits(self) -> bool:
        return self in {TransactionState.PREPARE_COMMIT, TransactionState.COMPLETE_COMMIT}


class Producer(NamedTuple):
    """Who a producer is."""

    producer_id: int
    epoch: int


NOBODY: Final = Producer(NO_PRODUCER_ID, NO_PRODUCER_EPOCH)


@dataclass(frozen=True, slots=True)
class Transaction:
    """The state of one transactional id, as it is in the log."""

    producer_id: int
    producer_epoch: int
    timeout_ms: int
    state: TransactionState = TransactionState.EMPTY
    partitions: frozenset[TopicPartition] = frozenset()
    previous_producer_id: int = NO_PRODUCER_ID
    """The producer id before the last transition: another one where epochs were used up."""
    next_producer_id: int = NO_PRODUCER_ID
    """The producer id that the producer has after this transaction; none where it keeps its own."""
    last_producer_epoch: int = NO_PRODUCER_EPOCH
    """The epoch from which the current one was reached at the producer's own request."""
    start_ms: int = NO_TIMESTAMP
    updated_ms: int = NO_TIMESTAMP
    version: int = CLASSIC_VERSION
    """The transaction version of the client, or of the coordinator where it acted by itself."""

    @property
    def producer(self) -> Producer:
        return Producer(self.producer_id, self.producer_epoch)

    @property
    def next_producer(self) -> Producer:
        """Who the producer is once the transaction is complete."""
        return self.producer if self.next_producer_id == NO_PRODUCER_ID else Producer(self.next_producer_id, 0)


@dataclass(frozen=True, slots=True)
class Decision:
    """What a request leads to."""

    after: Transaction | None = None
    """What is to be written; None: nothing changes."""
    producer: Producer = NOBODY
    """What is answered, when it is written."""
    error: ErrorCode = field(default=ErrorCode.NONE)
    """The same; an error here says that the request had an effect, and is to be repeated."""


class NeedsProducerId(Exception):
    """The plan needs a producer id that nobody has had; not a failure: it is made again with one."""


# --- InitProducerId ---------------------------------------------------------------------------------------------------


def plan_init(
    current: Transaction | None,
    *,
    timeout_ms: int,
    expected: Producer | None,
    new_producer_id: int | None,
    now_ms: int,
    last_epoch: int = LAST_EPOCH,
) -> Decision:
    """A producer begins, or (with `expected`, who it believes to be) goes on after an error (KIP-360)."""
    if current is None:
        begun = Transaction(_needed(new_producer_id), 0, timeout_ms, updated_ms=now_ms)
        return Decision(begun, begun.producer)
    if current.state.is_prepared:
        raise ApiError(ErrorCode.CONCURRENT_TRANSACTIONS, "the last transaction is being completed")
    if current.state is TransactionState.ONGOING:
        if expected is not None and expected != current.producer:
            raise ApiError(ErrorCode.PRODUCER_FENCED, "another producer has begun a transaction")
        aborted = plan_fence(current, new_producer_id=new_producer_id, now_ms=now_ms, last_epoch=last_epoch)
        return replace(aborted, producer=NOBODY, error=ErrorCode.CONCURRENT_TRANSACTIONS)
    fresh = replace(
        current,
        state=TransactionState.EMPTY,
        partitions=frozenset(),
        timeout_ms=timeout_ms,
        start_ms=NO_TIMESTAMP,
        updated_ms=now_ms,
    )
    if expected is not None and expected != current.producer:
        # Whoever begins without knowing an epoch has the last one forgotten: then nobody repeats anything.
        if not _knows_last(current, expected):
            raise ApiError(ErrorCode.PRODUCER_FENCED, "another producer has the transactional id")
        is_same = current.state is TransactionState.EMPTY and current.timeout_ms == timeout_ms
        return Decision(None if is_same else fresh, current.producer)
    remembered = NO_PRODUCER_EPOCH if expected is None else current.producer_epoch
    if is_exhausted(current.producer_epoch, last_epoch):
        bumped = Producer(_needed(new_producer_id), 0)
    else:
        bumped = Producer(current.producer_id, current.producer_epoch + 1)
    after = replace(
        fresh,
        producer_id=bumped.producer_id,
        producer_epoch=bumped.epoch,
        previous_producer_id=current.producer_id,
        last_producer_epoch=remembered,
    )
    return Decision(after, bumped)


def is_exhausted(epoch: int, last_epoch: int = LAST_EPOCH) -> bool:
    """Whether a producer with this epoch needs another id to go on."""
    return epoch >= last_epoch - 1


# --- adding partitions ------------------------------------------------------------------------------------------------


def plan_add(
    current: Transaction | None,
    producer: Producer,
    partitions: Collection[TopicPartition],
    *,
    version: int,
    now_ms: int,
) -> Decision:
    """Partitions become part of the transaction, which begins with the first."""
    current = _known(current)
    # First: where the producer id changes with the end, the producer knows the new one already.
    if current.state.is_prepared:
        raise ApiError(ErrorCode.CONCURRENT_TRANSACTIONS, "the last transaction is being completed")
    _check_producer(current, producer)
    is_ongoing = current.state is TransactionState.ONGOING
    if is_ongoing and current.partitions.issuperset(partitions):
        return Decision()
    after = replace(
        current,
        state=TransactionState.ONGOING,
        partitions=current.partitions.union(partitions),
        previous_producer_id=current.producer_id,
        start_ms=current.start_ms if is_ongoing else now_ms,
        updated_ms=now_ms,
        version=version,
    )
    return Decision(after)


def verified(
    current: Transaction | None, producer: Producer, partitions: Collection[TopicPartition]
) -> dict[TopicPartition, ErrorCode]:
    """Whether the partitions are part of the ongoing transaction."""
    current = _known(current)
    _check_producer(current, producer)
    if current.state.is_prepared:
        raise ApiError(ErrorCode.CONCURRENT_TRANSACTIONS, "the last transaction is being completed")
    return {
        each: ErrorCode.NONE if each in current.partitions else ErrorCode.TRANSACTION_ABORTABLE for each in partitions
    }


# --- ends -------------------------------------------------------------------------------------------------------------


def plan_end(
    current: Transaction | None,
    producer: Producer,
    *,
    commits: bool,
    version: int,
    new_producer_id: int | None,
    now_ms: int,
    last_epoch: int = LAST_EPOCH,
) -> Decision:
    """Commit or abort. With version 2 the answer is who the producer is from now on."""
    current = _known(current)
    if version < EPOCH_VERSION:
        return _plan_classic_end(current, producer, commits=commits, now_ms=now_ms)
    if current.state.is_prepared:
        raise ApiError(ErrorCode.CONCURRENT_TRANSACTIONS, "the transaction is being completed")
    repeats = _repeats_end(current, producer)
    if producer.producer_id != current.producer_id and not repeats:
        raise ApiError(ErrorCode.INVALID_PRODUCER_ID_MAPPING, "the transactional id has another producer id")
    if producer.epoch != current.producer_epoch and not repeats:
        raise ApiError(ErrorCode.PRODUCER_FENCED, f"the epoch is {current.producer_epoch}")
    if repeats:
        if commits is not current.state.commits:
            raise _wrong_state(current, commits=commits)
        return Decision(None, current.producer)
    if current.state is not TransactionState.ONGOING and commits:
        raise _wrong_state(current, commits=commits)
    return _plan_bumping_end(
        current, commits=commits, new_producer_id=new_producer_id, now_ms=now_ms, last_epoch=last_epoch
    )


def plan_fence(
    current: Transaction, *, new_producer_id: int | None, now_ms: int, last_epoch: int = LAST_EPOCH
) -> Decision:
    """The coordinator aborts an ongoing transaction by itself, and its producer's epoch is over."""
    if current.state is not TransactionState.ONGOING:
        raise ApiError(ErrorCode.INVALID_TXN_STATE, "there is no ongoing transaction")
    return _plan_bumping_end(
        current, commits=False, new_producer_id=new_producer_id, now_ms=now_ms, last_epoch=last_epoch
    )


def complete(prepared: Transaction, now_ms: int) -> Transaction:
    """Every partition has its marker."""
    after = prepared.next_producer
    return replace(
        prepared,
        state=TransactionState.COMPLETE_COMMIT if prepared.state.commits else TransactionState.COMPLETE_ABORT,
        producer_id=after.producer_id,
        producer_epoch=after.epoch,
        partitions=frozenset(),
        previous_producer_id=prepared.producer_id,
        next_producer_id=NO_PRODUCER_ID,
        updated_ms=now_ms,
    )


def _plan_classic_end(current: Transaction, producer: Producer, *, commits: bool, now_ms: int) -> Decision:
    """Before version 2: the producer keeps its epoch."""
    _check_producer(current, producer)
    if current.state.is_prepared:
        raise ApiError(ErrorCode.CONCURRENT_TRANSACTIONS, "the transaction is being completed")
    if current.state is TransactionState.ONGOING:
        after = replace(
            current,
            state=TransactionState.PREPARE_COMMIT if commits else TransactionState.PREPARE_ABORT,
            previous_producer_id=current.producer_id,
            updated_ms=now_ms,
            version=CLASSIC_VERSION,
        )
        return Decision(after)
    if current.state is TransactionState.EMPTY or commits is not current.state.commits:
        raise _wrong_state(current, commits=commits)
    return Decision()


def _plan_bumping_end(
    current: Transaction, *, commits: bool, new_producer_id: int | None, now_ms: int, last_epoch: int
) -> Decision:
    rotates = is_exhausted(current.producer_epoch, last_epoch)
    after = replace(
        current,
        state=TransactionState.PREPARE_COMMIT if commits else TransactionState.PREPARE_ABORT,
        producer_epoch=min(current.producer_epoch + 1, LAST_EPOCH),
        previous_producer_id=current.producer_id,
        next_producer_id=_needed(new_producer_id) if rotates else NO_PRODUCER_ID,
        last_producer_epoch=current.producer_epoch,
        # An abort of nothing begins and ends at once.
        start_ms=current.start_ms if current.state is TransactionState.ONGOING else now_ms,
        updated_ms=now_ms,
        version=EPOCH_VERSION,
    )
    return Decision(after, after.next_producer)


def _repeats_end(current: Transaction, producer: Producer) -> bool:
    """Whether the producer did not hear that its transaction was ended, and asks again."""
    is_complete = current.state in {TransactionState.COMPLETE_COMMIT, TransactionState.COMPLETE_ABORT}
    # Not by the epoch alone: where another producer has ended its transaction without a bump, this one is fenced.
    return is_complete and current.version >= EPOCH_VERSION and _knows_last(current, producer)


def _knows_last(current: Transaction, producer: Producer) -> bool:
    """Whether it is the producer whose request led to the current epoch."""
    knows = producer.producer_id in {current.producer_id, current.previous_producer_id}
    return knows and producer.epoch != NO_PRODUCER_EPOCH and producer.epoch == current.last_producer_epoch


# --- expiration -------------------------------------------------------------------------------------------------------


def may_expire(current: Transaction, now_ms: int, expiration_ms: int) -> bool:
    """Whether the id was not used for so long that it is forgotten."""
    between = {TransactionState.EMPTY, TransactionState.COMPLETE_COMMIT, TransactionState.COMPLETE_ABORT}
    return current.state in between and current.updated_ms <= now_ms - expiration_ms


# --- inside -----------------------------------------------------------------------------------------------------------


def _needed(new_producer_id: int | None) -> int:
    if new_producer_id is None:
        raise NeedsProducerId
    return new_producer_id


def _known(current: Transaction | None) -> Transaction:
    if current is None:
        raise ApiError(ErrorCode.INVALID_PRODUCER_ID_MAPPING, "the transactional id is not known")
    return current


def _check_producer(current: Transaction, producer: Producer) -> None:
    if producer.producer_id != current.producer_id:
        raise ApiError(ErrorCode.INVALID_PRODUCER_ID_MAPPING, "the transactional id has another producer id")
    if producer.epoch != current.producer_epoch:
        raise ApiError(ErrorCode.PRODUCER_FENCED, f"the epoch is {current.producer_epoch}")


def _wrong_state(current: Transaction, *, commits: bool) -> ApiError:
    wish = "committed" if commits else "aborted"
    return ApiError(ErrorCode.INVALID_TXN_STATE, f"in state {current.state.title} nothing can be {wish}")
