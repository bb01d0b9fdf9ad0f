"""A producer of finished record batches: sequences, requests in flight, order, retries.

Encoding and the choice of a partition are not here. One thread: `add` sends what has come together and takes answers
when too much is under way; nothing happens between calls.

Invariants, per partition:
- batches are stored in the order of `add`, each once (idempotent: producer id and sequences are in the bytes, which are
  sent again unchanged);
- after a failure nothing new is sent before everything under way is answered and the failed ones are sent again;
- at most five batches are under way, which is as far back as a broker recognises a repeated one.

A batch that is larger than the topic takes is sent again as two halves, which carry the same sequences between them,
and so on until each is taken; only a record that is too large by itself is an error.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from millrace.client import requests, versions
from millrace.client.blocking import BlockingConnection, Pending
from millrace.client.cluster import ClusterClient
from millrace.client.retrying import Attempts, is_retriable
from millrace.client.transactions import PRODUCE_VERSION, Transaction, add_partitions
from millrace.errors import ApiError, ErrorCode
from millrace.model import NO_PRODUCER_EPOCH, NO_PRODUCER_ID, NO_SEQUENCE, TopicPartition
from millrace.records.batch import add_sequence
from millrace.records.encode import halved

ACKS_ALL: Final = -1
MAX_IN_FLIGHT: Final = 5
DEFAULT_REQUEST_BYTES: Final = 1024 * 1024
_TOO_LARGE: Final = frozenset({ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.RECORD_LIST_TOO_LARGE})
_WAITING_REQUESTS: Final = 4
"""How many requests' worth of batches may wait for their turn before `add` waits for answers."""


@dataclass(slots=True)
class Written:
    """What one partition has taken; offsets are -1 while they are not known, which with acks=0 is for ever."""

    records: int = 0
    size_bytes: int = 0
    first_offset: int = -1
    next_offset: int = -1


class _Batch(NamedTuple):
    data: bytes
    records: int


@dataclass(slots=True)
class _Lane:
    """One partition's batches: waiting, under way, and failed ones that will be sent again."""

    partition: TopicPartition
    attempts: Attempts
    sequence: int
    waiting: deque[_Batch] = field(default_factory=deque)
    under_way: int = 0
    node: int = -1
    failed: list[_Batch] = field(default_factory=list)
    error: ApiError | None = None
    written: Written = field(default_factory=Written)
    refused_bytes: int | None = None
    """The smallest batch that was too large for the topic."""
    acknowledged: bool = False
    """Whether the partition has taken a batch of this producer. Until then Kafka takes any sequence: were a second
    batch under way when the first is refused for a moment (a topic just created), it would be taken as the first."""
    in_transaction: bool = False
    """Whether the coordinator knows that the producer's transaction writes here."""

    @property
    def may_send(self) -> bool:
        if not self.waiting or self.failed:
            return False
        return self.acknowledged or not self.under_way or self.sequence == NO_SEQUENCE


class _Flight(NamedTuple):
    """A request under way."""

    connection: BlockingConnection
    pending: Pending
    batches: list[tuple[_Lane, _Batch]]


class BatchProducer:
    """`add` batches, `flush`, `take_written`, and so on. After an error it is done for: make another."""

    def __init__(
        self,
        client: ClusterClient,
        *,
        acks: int = ACKS_ALL,
        idempotent: bool = True,
        transaction: Transaction | None = None,
        request_bytes: int = DEFAULT_REQUEST_BYTES,
        timeout_ms: int | None = None,
    ) -> None:
        """`idempotent` needs acks=all, and is off without; the producer id is asked for here.

        With `transaction`, which has a producer id, batches are to be marked as transactional, and whoever began the
        transaction ends it.
        """
        self.client = client
        self._acks = acks
        self._request_bytes = request_bytes
        self._timeout_ms = client.settings.request_timeout_ms if timeout_ms is None else timeout_ms
        # The broker answers when its time is over; only a broker that does not is given up.
        self._answer_timeout_ms = self._timeout_ms + client.settings.request_timeout_ms
        self.producer_id, self.producer_epoch = NO_PRODUCER_ID, NO_PRODUCER_EPOCH
        self.transaction = transaction
        if transaction is not None:
            self.producer_id, self.producer_epoch = transaction.producer_id, transaction.producer_epoch
        elif idempotent and acks == ACKS_ALL:
            self.producer_id, self.producer_epoch = client.init_producer_id()
        self._lanes: dict[TopicPartition, _Lane] = {}
        self._flights: dict[int, deque[_Flight]] = {}
        self._waiting_bytes = 0

    def __repr__(self) -> str:
        flying = sum(map(len, self._flights.values()))
        return f"BatchProducer({self.producer_id}, {self._waiting_bytes} bytes waiting, {flying} requests under way)"

    def take_written(self) -> dict[TopicPartition, Written]:
        """What was acknowledged since this was last asked."""
        taken = {partition: lane.written for partition, lane in self._lanes.items() if lane.written.records}
        for partition in taken:
            self._lanes[partition].written = Written()
        return taken

    def next_sequence(self, partition: TopicPartition) -> int:
        """The base sequence that the next batch of `partition` must carry; -1 where there are none."""
        return self._lane(partition).sequence

    def largest_batch(self, partition: TopicPartition, wanted_bytes: int) -> int:
        """How large batches for `partition` should be: as large as is wanted, or as the topic is known to take."""
        refused = self._lane(partition).refused_bytes
        return wanted_bytes if refused is None else min(wanted_bytes, max(refused // 2, 1))

    def add(self, partition: TopicPartition, data: bytes, records: int) -> None:
        """Take a batch of `records` records that carries this producer's id and the partition's next sequence.

        May send, and may wait for answers when much is under way. ApiError: a batch failed for good.
        """
        lane = self._lane(partition)
        lane.waiting.append(_Batch(data, records))
        if lane.sequence != NO_SEQUENCE:
            lane.sequence = add_sequence(lane.sequence, records)
        self._waiting_bytes += len(data)
        if self._waiting_bytes >= self._request_bytes:
            self._send_waiting()
            while self._waiting_bytes >= self._request_bytes * _WAITING_REQUESTS:
                self._take_answer()
                self._send_waiting()

    def flush(self) -> None:
        """Return when everything that was added is acknowledged."""
        self._send_waiting()
        while self._waiting_bytes or any(self._flights.values()):
            self._take_answer()
            self._send_waiting()

    def _lane(self, partition: TopicPartition) -> _Lane:
        lane = self._lanes.get(partition)
        if lane is None:
            attempts = self.client.attempts(f"produce to {partition}")
            sequence = NO_SEQUENCE if self.producer_id == NO_PRODUCER_ID else 0
            lane = self._lanes[partition] = _Lane(partition, attempts, sequence)
        return lane

    # Sending.

    def _send_waiting(self) -> None:
        """Fill every leader's requests up to the limit in flight."""
        ready = [lane for lane in self._lanes.values() if lane.may_send]
        if ready:
            self.client.learn((lane.partition for lane in ready), ready[0].attempts)
            self._join_transaction(ready)
        by_node: dict[int, list[_Lane]] = {}
        for lane in ready:
            node = self._node_for(lane)
            if node is not None:
                by_node.setdefault(node, []).append(lane)
        for node, lanes in by_node.items():
            self._send_to(node, lanes)
        self._recover()

    def _join_transaction(self, lanes: list[_Lane]) -> None:
        """Tell the coordinator of partitions before anything is sent to them: it has to end the transaction there."""
        if self.transaction is None:
            return
        joining = [lane for lane in lanes if not lane.in_transaction]
        if joining:
            add_partitions(self.client, self.transaction, [lane.partition for lane in joining])
            for lane in joining:
                lane.in_transaction = True

    def _send_to(self, node: int, lanes: list[_Lane]) -> None:
        flights = self._flights.setdefault(node, deque())
        while lanes and len(flights) < MAX_IN_FLIGHT:
            self._land_lost(node)
            lanes = [lane for lane in lanes if lane.may_send]
            if not lanes:
                return
            self._send_one(node, lanes)
            # The lanes that were served go last, so that the limit of a request starves nobody.
            lanes = sorted((lane for lane in lanes if lane.may_send), key=lambda lane: lane.under_way)

    def _node_for(self, lane: _Lane) -> int | None:
        """Where the lane's next batch goes; None when it must wait for answers from the leader of before."""
        try:
            node = self.client.leader(lane.partition)
        except ApiError as error:
            self._fail(lane, lane.waiting.popleft(), error, was_sent=False)
            return None
        if lane.under_way and lane.node != node:
            return None
        return node

    def _send_one(self, node: int, lanes: list[_Lane]) -> None:
        chosen: list[tuple[_Lane, _Batch]] = []
        size_bytes = 0
        for lane in lanes:
            if chosen and size_bytes + len(lane.waiting[0].data) > self._request_bytes:
                continue
            batch = lane.waiting.popleft()
            self._waiting_bytes -= len(batch.data)
            size_bytes += len(batch.data)
            lane.node = node
            chosen.append((lane, batch))
        message = requests.produce(
            {lane.partition: batch.data for lane, batch in chosen},
            acks=self._acks,
            timeout_ms=self._timeout_ms,
            transactional_id=None if self.transaction is None else self.transaction.transactional_id,
        )
        for lane, _ in chosen:
            lane.under_way += 1
        try:
            connection = self.client.connection(node)
            pending = self.client.send(
                connection, message, at_most=None if self.transaction is None else PRODUCE_VERSION
            )
        except ApiError as error:
            self._land_lost(node)
            self._land(chosen, error)
            return
        if versions.is_answered(message):
            self._flights[node].append(_Flight(connection, pending, chosen))
            return
        for lane, batch in chosen:
            self._succeed(lane, batch, -1)

    # Answers.

    def _take_answer(self) -> None:
        """Wait for the oldest request of the leader with the most under way; nothing when none is."""
        node = max(self._flights, key=lambda each: len(self._flights[each]), default=None)
        if node is None or not self._flights[node]:
            return
        flight = self._flights[node].popleft()
        try:
            response = flight.connection.receive(flight.pending, timeout_ms=self._answer_timeout_ms)
            outcomes = requests.answered(
                [lane.partition for lane, _ in flight.batches], requests.read_produce(response)
            )
        except ApiError as error:
            self._land(flight.batches, error)
        else:
            for lane, batch in flight.batches:
                outcome = outcomes[lane.partition]
                if outcome.error is None:
                    self._succeed(lane, batch, outcome.value)
                else:
                    self._fail(lane, batch, outcome.error, was_sent=True)
        self._recover()

    def _land_lost(self, node: int) -> None:
        """Fail what was under way on a connection that is gone, before anything goes out on the next one."""
        flights = self._flights[node]
        if flights and not flights[0].connection.awaits(flights[0].pending):
            error = ApiError(ErrorCode.NETWORK_EXCEPTION, f"the connection to broker {node} was lost")
            while flights:
                self._land(flights.popleft().batches, error)

    def _land(self, batches: list[tuple[_Lane, _Batch]], error: ApiError) -> None:
        for lane, batch in batches:
            self._fail(lane, batch, error, was_sent=True)

    def _succeed(self, lane: _Lane, batch: _Batch, base_offset: int) -> None:
        lane.under_way -= 1
        lane.acknowledged = True
        written = lane.written
        written.records += batch.records
        written.size_bytes += len(batch.data)
        if base_offset >= 0:
            written.first_offset = base_offset if written.first_offset < 0 else written.first_offset
            written.next_offset = base_offset + batch.records
        if not lane.failed:
            lane.attempts.succeeded()

    def _fail(self, lane: _Lane, batch: _Batch, error: ApiError, *, was_sent: bool) -> None:
        if was_sent:
            lane.under_way -= 1
            self._waiting_bytes += len(batch.data)
        # What follows a batch that failed is out of sequence: only the first failure of a lane says what is wrong.
        if lane.error is None:
            lane.error = error
        lane.failed.append(batch)

    def _recover(self) -> None:
        """Put what failed back in front, once nothing of its partition is under way, and pause before it is sent."""
        pause_ms = 0
        topics: dict[str, Attempts] = {}
        for lane in self._lanes.values():
            if lane.error is None:
                continue
            too_large = lane.error.code in _TOO_LARGE and lane.failed[0].records > 1
            if not too_large and not is_retriable(lane.error.code):
                raise self._explained(lane, lane.error)
            if lane.under_way:
                continue
            if too_large:
                self._halve(lane)
            else:
                lane.attempts.count(lane.error)
                pause_ms = max(pause_ms, lane.attempts.backoff_ms())
                topics[lane.partition.topic] = lane.attempts
            lane.waiting.extendleft(reversed(lane.failed))
            lane.failed.clear()
            lane.error = None
        if topics:
            self.client.pause(pause_ms / 1000)
            self.client.refresh(topics.keys(), next(iter(topics.values())))

    def _halve(self, lane: _Lane) -> None:
        """Put two halves in the place of the batch that the topic refused."""
        refused = lane.failed.pop(0)
        halves = [_Batch(data, records) for data, records in halved(refused.data)]
        lane.failed[:0] = halves
        lane.refused_bytes = min(len(refused.data), lane.refused_bytes or len(refused.data))
        self._waiting_bytes += sum(len(half.data) for half in halves) - len(refused.data)

    def _explained(self, lane: _Lane, error: ApiError) -> ApiError:
        text = f"produce to {lane.partition}: {error.message or 'refused'}"
        if error.code in _TOO_LARGE:
            text += "; a record is larger than the topic takes: raise its max.message.bytes, or write smaller ones"
        return ApiError(error.code, text)
