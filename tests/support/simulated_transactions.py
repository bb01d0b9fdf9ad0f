"""The parties of transactions in the simulated cluster, and what is promised to whoever reads committed records.

A coordinator is what a broker knows of the state partition while it leads it in one leader epoch: the fold of that
partition, decisions by `transactions.state`, bytes by `transactions.records`. A client does what a producer does,
begins again after an error, and may be one of two that have the same transactional id. What is promised, letter (f):

- a marker commits only what its producer has asked to be committed, and aborts nothing of which it was told that it is;
- what became of a transaction is the same in all partitions, and a committed one is whole;
- of a producer that was replaced nothing becomes visible any more;
- whoever reads below the last stable offset, and leaves out what it is told was aborted, sees the records of committed
  transactions and no others; the offset does not go back.

What is visible is known from the committed bytes (`CommittedTransactions`), and held against what clients asked for and
were told (`Attempt`), and against what a leader makes of its own log (`read_committed`).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from millrace.errors import ApiError, ErrorCode
from millrace.model import TopicPartition
from millrace.records.batch import BatchHeader, split
from millrace.records.control import MarkerType, decode_end_marker
from millrace.records.decode import Record, iter_records
from millrace.records.encode import encode_batch
from millrace.replication.partition import Partition
from millrace.transactions import records, state
from millrace.transactions.state import EPOCH_VERSION, Decision, NeedsProducerId, Producer, Transaction
from support.batches import NOW_MS
from support.simulated_promises import BrokenPromise, Committed

LAST_EPOCH: Final = 8
"""So few epochs that producer ids change, too."""
MAX_PENDING: Final = 3
"""As many batches for one partition may be without an answer."""
_EVERYTHING: Final = 1 << 20

Plan = Callable[[Transaction | None, int | None], Decision]


# --- producers --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class TransactionalBatch:
    """What a client sends, again and again, until it has an answer or its transaction is over."""

    partition: int
    sequence: int
    data: bytes


@dataclass(eq=False)
class Attempt:
    """One transaction, as its client sees it, and what became of it in the partitions."""

    number: int
    transactional_id: str
    producer: Producer
    version: int
    size: int = 1
    """As many batches will it have."""
    batches: list[TransactionalBatch] = field(default_factory=list)
    wants: bool | None = None
    """How the client wants it to end, once it has said so; that does not change."""
    is_acknowledged: bool = False
    """The client was told that it has ended so."""
    is_over: bool = False
    """The coordinator has given the transactional id to another producer, or to the same with another epoch."""
    fates: dict[int, bool] = field(default_factory=dict)
    """By partition: whether its marker commits or aborts."""
    visible: set[tuple[int, int]] = field(default_factory=set)
    """Partition and first sequence of every batch that was committed."""

    def __repr__(self) -> str:
        return f"transaction {self.number} of {self.transactional_id!r} by {self.producer}, fates {self.fates}"

    def end(self, partition: int, sequences: list[int], *, commits: bool) -> None:
        """A marker is committed behind these of its batches."""
        if self.fates.setdefault(partition, commits) is not commits or len(set(self.fates.values())) > 1:
            raise BrokenPromise(f"(f) two outcomes: {self}, and {commits} in {partition}")
        if not commits:
            if self.wants and self.is_acknowledged:
                raise BrokenPromise(f"(f) aborted in {partition}, and its producer was told otherwise: {self}")
            return
        if not self.wants:
            raise BrokenPromise(f"(f) nobody has asked to commit, and {partition} has: {self}")
        if self.is_over:
            raise BrokenPromise(f"(f) its producer was replaced, and now it is committed in {partition}: {self}")
        self.visible.update((partition, sequence) for sequence in sequences)

    def check_whole(self) -> None:
        """Everything is well: it is there, all of it, or not at all."""
        if self.visible or (self.wants and self.is_acknowledged):
            lacking = {(each.partition, each.sequence) for each in self.batches} - self.visible
            if lacking:
                raise BrokenPromise(f"(f) {sorted(lacking)} are not there of {self}")


@dataclass(eq=False)
class Client:
    """A producer with a transactional id. It has one request to the coordinator at a time."""

    transactional_id: str
    version: int
    producer: Producer | None = None
    is_ready: bool = False
    """Whether it may begin a transaction; else it has to ask who it is."""
    is_gone: bool = False
    """It was told that another one has taken its place."""
    attempt: Attempt | None = None
    pending: list[TransactionalBatch] = field(default_factory=list)
    added: set[int] = field(default_factory=set)
    """Before version 2: the partitions of which it knows that they are part of the transaction."""
    sequences: dict[int, int] = field(default_factory=dict)
    request: object = None
    """The newest one: only its answer counts."""

    def become(self, producer: Producer) -> None:
        """Whoever it was before: everything begins anew."""
        if producer != self.producer:
            self.sequences.clear()
        self.producer, self.is_ready = producer, True
        self.forget_attempt()

    def forget_attempt(self) -> None:
        self.attempt = None
        self.pending.clear()
        self.added.clear()

    def make_batch(self, partition: int, count: int) -> TransactionalBatch | None:
        """The next batch of the transaction; None while too many are on their way."""
        attempt, sequence = self.attempt, self.sequences.get(partition, 0)
        assert attempt is not None
        waiting = sum(batch.partition == partition for batch in self.pending)
        # Before version 2 a leader that knows nothing of a producer takes any sequence: the first batch goes alone.
        if waiting >= MAX_PENDING or (waiting and self.version < EPOCH_VERSION):
            return None
        data = encode_batch(
            [Record(place, NOW_MS, None, b"%d" % attempt.number) for place in range(count)],
            producer_id=attempt.producer.producer_id,
            producer_epoch=attempt.producer.epoch,
            base_sequence=sequence,
            transactional=True,
        )
        batch = TransactionalBatch(partition, sequence, data)
        self.sequences[partition] = sequence + count
        self.pending.append(batch)
        attempt.batches.append(batch)
        return batch


# --- the coordinator --------------------------------------------------------------------------------------------------


class Coordinator:
    """As `transactions.shard`, without tasks. It writes nothing any more when the leadership has gone."""

    def __init__(self, partition: Partition, producer_ids: Iterator[int]) -> None:
        self.partition = partition
        self.leader_epoch = partition.leader_epoch
        self.transactions: dict[str, Transaction] = {}
        """What is durable."""
        self.changing: set[str] = set()
        """What is appended and not durable yet."""
        self.marked: defaultdict[str, set[int]] = defaultdict(set)
        """The partitions that are known to have the marker of a decided transaction."""
        self._producer_ids = producer_ids
        self._end = partition.log.end_offset
        self._is_loaded = False

    @property
    def is_deposed(self) -> bool:
        return not self.partition.is_leader or self.partition.leader_epoch != self.leader_epoch

    def load(self) -> bool:
        """Know everything that was in the log when the leadership began, once it is committed; whether that is so."""
        if not self._is_loaded and self.partition.high_watermark.offset >= self._end:
            log = self.partition.log
            offset = log.start_offset
            while offset < self._end:
                read = log.read(offset, _EVERYTHING)
                for header, data in split(read.data):
                    if header.base_offset < self._end:
                        self._replay(data)
                offset = read.next_offset
            self.begin()
            self._is_loaded = True
        return self._is_loaded

    def _replay(self, data: memoryview) -> None:
        for record in iter_records(data):
            read = records.read_record(bytes(record.key or b""), record.value)
            assert read is not None and read[1] is not None
            self.transactions[read[0]] = read[1]

    def begin(self) -> None:
        """Everything was replayed: what was decided and is not complete is gone on with."""

    def prepared(self) -> list[tuple[str, Transaction]]:
        return [each for each in self.transactions.items() if each[1].state.is_prepared]

    def change(self, transactional_id: str, plan: Plan, then: Callable[[Decision], None]) -> None:
        """Write down what a plan says; `then` is called when that is durable. ApiError where nothing is to happen."""
        if transactional_id in self.changing:
            raise ApiError(ErrorCode.CONCURRENT_TRANSACTIONS, "another request is being written down")
        current = self.transactions.get(transactional_id)
        try:
            decision = plan(current, None)
        except NeedsProducerId:
            decision = plan(current, next(self._producer_ids))
        after = decision.after
        if after is None:
            then(decision)
            return
        key, value = records.entry(transactional_id, after)
        self.partition.check_in_sync()
        appended = self.partition.append(encode_batch([Record(0, NOW_MS, key, value)]), from_client=False)
        self.changing.add(transactional_id)

        def committed(error: Exception | None) -> None:
            if error is None:
                self.changing.discard(transactional_id)
                self.transactions[transactional_id] = after
                self.marked.pop(transactional_id, None)
                then(decision)

        if not self.partition.when_committed(appended.last_offset, committed):
            committed(None)

    def verify(self, transactional_id: str, producer: Producer, index: int) -> Decision:
        """Whether a partition is part of the ongoing transaction, by what is durable."""
        (code,) = state.verified(self.transactions.get(transactional_id), producer, partitions_of(index)).values()
        return Decision(error=code)

    def finish(self, transactional_id: str, prepared: Transaction) -> None:
        """When every partition has its marker the transaction is complete."""
        left = {each.partition for each in prepared.partitions} - self.marked[transactional_id]
        if not left and transactional_id not in self.changing:
            self.change(transactional_id, lambda *_: Decision(state.complete(prepared, NOW_MS)), lambda _: None)


# --- what readers are promised ----------------------------------------------------------------------------------------


class CommittedTransactions(Committed):
    """A partition with transactions: what its committed markers have made of its records."""

    def __init__(self, index: int, attempts: list[Attempt]) -> None:
        super().__init__(index)
        self.fates: dict[int, bool] = {}
        """By offset of a transactional batch: whether it was committed or aborted."""
        self.stable = 0
        """The largest last stable offset that a client was told."""
        self._attempts = attempts
        self._open: defaultdict[int, list[tuple[BatchHeader, Attempt]]] = defaultdict(list)

    def _note(self, header: BatchHeader, data: memoryview) -> None:
        super()._note(header, data)
        if not header.is_transactional:
            return
        if not header.is_control:
            value = next(iter(iter_records(data))).value
            self._open[header.producer_id].append((header, self._attempts[int(value or b"")]))
            return
        marker = decode_end_marker(data)
        assert marker is not None
        commits = marker.type is MarkerType.COMMIT
        ended: dict[Attempt, list[int]] = {}
        for batch, attempt in self._open.pop(header.producer_id, ()):
            self.fates[batch.base_offset] = commits
            ended.setdefault(attempt, []).append(batch.base_sequence)
        for attempt, sequences in ended.items():
            attempt.end(self.index, sequences, commits=commits)

    @property
    def first_open(self) -> int | None:
        """Where the oldest transaction begins that has no committed marker."""
        return min((batches[0][0].base_offset for batches in self._open.values() if batches), default=None)

    def check_stable(self, partition: Partition) -> None:
        """The leader of the day tells a client up to where transactions are over."""
        stable = partition.last_stable_offset
        if stable < self.stable:
            raise BrokenPromise(f"(f) {self.stable} was stable in {self.index}, and now {stable}")
        self.stable = stable

    def check_read(self, partition: Partition, first: int) -> None:
        """What a reader of committed records makes of a replica's log, from an offset on."""
        for header, is_seen in read_committed(partition, first):
            if header.is_transactional and self.fates.get(header.base_offset) is not is_seen:
                fate = {None: "undecided", True: "committed", False: "aborted"}[self.fates.get(header.base_offset)]
                raise BrokenPromise(f"(f) {partition!r} {'shows' if is_seen else 'hides'} a batch, {fate}: {header}")


def read_committed(partition: Partition, first: int) -> list[tuple[BatchHeader, bool]]:
    """The batches below the last stable offset, and whether a consumer would hand them out (as clients do it)."""
    limit, log = partition.stable, partition.log
    found: list[tuple[BatchHeader, bool]] = []
    while first < limit.offset:
        read = log.read(first, _EVERYTHING, limit=limit)
        aborted = sorted(
            (each.first_offset, each.producer_id) for each in log.aborted_transactions(first, read.next_offset)
        )
        hidden: set[int] = set()
        for header, data in split(read.data):
            while aborted and aborted[0][0] <= header.last_offset:
                hidden.add(aborted.pop(0)[1])
            if not header.is_control:
                found.append((header, not (header.is_transactional and header.producer_id in hidden)))
            elif (marker := decode_end_marker(data)) is not None and marker.type is MarkerType.ABORT:
                hidden.discard(header.producer_id)
        first = read.next_offset
    return found


def partitions_of(*indexes: int) -> frozenset[TopicPartition]:
    """As a coordinator names them."""
    return frozenset(TopicPartition("t", index) for index in indexes)


def new_producer_ids() -> Iterator[int]:
    """Far from those of producers without transactions."""
    return itertools.count(5000)
