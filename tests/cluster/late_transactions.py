"""Transactions whose requests are late: each may come to the broker again, or for the first time, when it is over.

Made by hand, because no client library sends what a network can do to it. Two kinds, as brokers know them (KIP-890):

    version 2   every transaction has its own producer epoch: any of its requests may be late, into any later one
    version 0   before that a late EndTxn is not to be told from a punctual one. What a broker must refuse is a Produce
                that comes when its transaction is over: it would open one that nobody ends

A `Straggler` has the surface of `transaction_member.Transactions`, so that a mixer can work with it.
"""

from __future__ import annotations

import argparse
import itertools
import random
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from cluster.transaction_errors import Gone, MustAbort
from cluster.workload import complain, key_of
from millrace.errors import ErrorCode
from millrace.records.decode import Record
from millrace.records.encode import encode_batch
from millrace.wire.frame import RequestHeader, decode_response, encode_request
from millrace.wire.messages.cluster import MetadataRequest, MetadataResponse
from millrace.wire.messages.groups import FindCoordinatorRequest, FindCoordinatorResponse
from millrace.wire.messages.produce import ProduceRequest, ProduceResponse
from millrace.wire.messages.producers import InitProducerIdRequest, InitProducerIdResponse
from millrace.wire.messages.transactions import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    EndTxnRequest,
    EndTxnResponse,
)
from millrace.wire.schema import Request, Response
from support.cluster_processes import read_exactly
from support.history import ABORT, COMMIT, Action, HistoryWriter, Outcome, encode_record, value_in_transaction

EPOCHS: Final = 2
"""The transaction version in which each transaction has an epoch of its own."""
_ASK_S: Final = 3.0
_AGAIN_S: Final = 0.02
_GIVES_UP_S: Final = 20.0
_WITHHELD: Final = 0.05
_DOUBLED: Final = 0.2
_KEPT: Final = 20
_VERSIONS: Final = {2: {ProduceResponse: 12, EndTxnResponse: 5}, 0: {ProduceResponse: 11, EndTxnResponse: 4}}
_AGAIN: Final = {
    ErrorCode.CONCURRENT_TRANSACTIONS,
    ErrorCode.NOT_ENOUGH_REPLICAS,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_COORDINATOR,
    ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ErrorCode.REQUEST_TIMED_OUT,
    ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
}

R = TypeVar("R", bound=Response)
Address = tuple[str, int]


class Straggler:
    """A producer with a transactional id, and the requests of it that are still on their way. Owner: one thread."""

    def __init__(self, options: argparse.Namespace, history: HistoryWriter, stopping: threading.Event) -> None:
        self.committed = 0
        self._history = history
        self._stopping = stopping
        self._version: int = options.late
        self._number: int = options.number
        self._client_id = f"{options.job}-{options.slot}"
        self._transactional_id = f"{options.topic}-{options.slot}"
        self._timeout_ms: int = options.timeout_ms
        self._bootstrap = [_address(each) for each in options.client["bootstrap.servers"].split(",")]
        self._topics = [options.topic, options.input]
        self._rng = random.Random(options.number)
        self._leaders: dict[tuple[str, int], Address] = {}
        self._coordinator = self._bootstrap[0]
        self._producer = (-1, -1)
        self._sequences: dict[tuple[str, int], int] = defaultdict(int)
        self._added: set[tuple[str, int]] = set()
        self._current = 0
        self._sent = 0
        self._open = False
        self._late: list[tuple[Address, bytes]] = []
        """What will come to brokers again, or at last."""
        self._correlation = itertools.count(1)
        self.renew()

    # --- the surface of Transactions ----------------------------------------------------------------------------------

    def renew(self) -> None:
        """Become the producer of the transactional id."""
        self._open = False
        while not self._stopping.is_set():
            try:
                self._find()
                request = InitProducerIdRequest(
                    transactional_id=self._transactional_id, transaction_timeout_ms=self._timeout_ms
                )
                answer = self._ask(
                    self._coordinator, self._frame(request, InitProducerIdResponse, 5), InitProducerIdResponse, 5
                )
            except OSError as error:
                complain(f"init: {error}")
            else:
                if answer.error_code == 0:
                    self._producer = (answer.producer_id, answer.producer_epoch)
                    self._sequences.clear()
                    return
                complain(f"init: {ErrorCode(answer.error_code).name}")
            time.sleep(0.2)

    def begin(self) -> int:
        self._current += 1
        self._sent = 0
        self._added.clear()
        self._open = True
        if self._version == EPOCHS:
            self._deliver()
        return self._current

    def send(
        self,
        topic: str,
        partition: int,
        payload: bytes,
        *,
        key: bytes | None = None,
        source: int = -1,
        note: bool = True,
    ) -> None:
        value = value_in_transaction(self._number, self._current, self._sent)
        self._sent += 1
        place = (topic, partition)
        if note:
            self._history.write(
                Outcome.INVOKE, Action.SEND, key_of(*place), op=self._current, value=value, offset=source
            )
            self._history.flush()
        if self._version != EPOCHS and place not in self._added:
            self._add(place)
        producer_id, epoch = self._producer
        batch = encode_batch(
            [Record(0, int(time.time() * 1000), key, encode_record(value, payload))],
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=self._sequences[place],
            transactional=True,
        )
        data = ProduceRequest.TopicProduceData(
            name=topic, partition_data=[ProduceRequest.PartitionProduceData(index=partition, records=batch)]
        )
        request = ProduceRequest(
            transactional_id=self._transactional_id, acks=-1, timeout_ms=int(_ASK_S * 1000), topic_data=[data]
        )
        frame = self._frame(request, ProduceResponse, _VERSIONS[self._version][ProduceResponse])
        if self._rng.random() < _WITHHELD:
            self._late.append((self._leaders[place], frame))
            raise MustAbort
        self._until_done(lambda: self._produced(place, frame))
        self._sequences[place] += 1
        if self._version == EPOCHS:
            self._double(self._leaders[place], frame)
            if self._rng.random() < _DOUBLED:
                self._deliver()

    def move(self, topic: str, offsets: Mapping[int, int], group: object) -> None:
        raise NotImplementedError("stragglers have no group")

    def commit(self) -> None:
        if self._sent == 0:
            self._open = False
            return
        self._note_end(Outcome.INVOKE, COMMIT)
        try:
            self._end(commits=True)
        except Gone:
            self._note_end(Outcome.INFO, COMMIT)
            raise
        self._note_end(Outcome.OK, COMMIT)
        self.committed += self._sent

    def abort(self) -> None:
        self._note_end(Outcome.INVOKE, ABORT)
        if self._sent > 0:
            self._end(commits=False)
        self._open = False
        self._note_end(Outcome.OK, ABORT)
        if self._version != EPOCHS and self._late:
            # As clients do whose records may have arrived (KIP-360). Partitions do not know the new epoch yet.
            self.renew()
            self._deliver()

    def abandon(self) -> None:
        if self._open:
            self.abort()

    # --- requests -----------------------------------------------------------------------------------------------------

    def _add(self, place: tuple[str, int]) -> None:
        topics = [AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=place[0], partitions=[place[1]])]
        producer_id, epoch = self._producer
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=self._transactional_id,
            v3_and_below_producer_id=producer_id,
            v3_and_below_producer_epoch=epoch,
            v3_and_below_topics=topics,
        )
        frame = self._frame(request, AddPartitionsToTxnResponse, 3)

        def added() -> int:
            answer = self._ask(self._coordinator, frame, AddPartitionsToTxnResponse, 3)
            return answer.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code

        self._until_done(added)
        self._added.add(place)

    def _produced(self, place: tuple[str, int], frame: bytes) -> int:
        version = _VERSIONS[self._version][ProduceResponse]
        answer = self._ask(self._leaders[place], frame, ProduceResponse, version)
        return answer.responses[0].partition_responses[0].error_code

    def _end(self, *, commits: bool) -> None:
        version = _VERSIONS[self._version][EndTxnResponse]
        producer_id, epoch = self._producer
        request = EndTxnRequest(
            transactional_id=self._transactional_id, producer_id=producer_id, producer_epoch=epoch, committed=commits
        )
        frame = self._frame(request, EndTxnResponse, version)

        def ended() -> int:
            answer = self._ask(self._coordinator, frame, EndTxnResponse, version)
            if answer.error_code == 0 and self._version == EPOCHS:
                self._producer = (answer.producer_id, answer.producer_epoch)
            return answer.error_code

        try:
            self._until_done(ended)
        except MustAbort:
            raise Gone from None
        self._open = False
        if self._version == EPOCHS:
            self._sequences.clear()
            self._double(self._coordinator, frame)

    def _until_done(self, call: Callable[[], int]) -> None:
        """Repeat a request until it is answered; Gone where the producer is over, or too much time has passed."""
        deadline = time.monotonic() + _GIVES_UP_S
        while time.monotonic() < deadline and not self._stopping.is_set():
            try:
                code = ErrorCode(call())
            except OSError as error:
                complain(f"no answer: {error}")
                code = ErrorCode.NOT_LEADER_OR_FOLLOWER
            if code is ErrorCode.NONE or code is ErrorCode.DUPLICATE_SEQUENCE_NUMBER:
                return
            if code is ErrorCode.TRANSACTION_ABORTABLE:
                raise MustAbort
            if code not in _AGAIN:
                complain(code.name)
                raise Gone
            time.sleep(_AGAIN_S)
            if code is not ErrorCode.CONCURRENT_TRANSACTIONS:
                self._find_if_possible()
        raise Gone

    # --- late ones ----------------------------------------------------------------------------------------------------

    def _double(self, address: Address, frame: bytes) -> None:
        if self._rng.random() < _DOUBLED and len(self._late) < _KEPT:
            self._late.append((address, frame))

    def _deliver(self) -> None:
        """One of those that are on their way arrives; what the broker says to it is nobody's business."""
        if self._late:
            address, frame = self._late.pop(self._rng.randrange(len(self._late)))
            try:
                _exchange(address, frame)
            except OSError as error:
                complain(f"late: {error}")

    # --- the way there ------------------------------------------------------------------------------------------------

    def _find_if_possible(self) -> None:
        try:
            self._find()
        except OSError as error:
            complain(f"metadata: {error}")

    def _find(self) -> None:
        """Ask where the partitions and the coordinator are."""
        address = self._rng.choice(self._bootstrap)
        topics = [MetadataRequest.MetadataRequestTopic(name=name) for name in self._topics]
        request: Request = MetadataRequest(topics=topics, allow_auto_topic_creation=False)
        cluster = self._ask(address, self._frame(request, MetadataResponse, 9), MetadataResponse, 9)
        nodes = {node.node_id: (node.host, node.port) for node in cluster.brokers}
        for topic in cluster.topics:
            for partition in topic.partitions:
                if partition.leader_id in nodes:
                    self._leaders[topic.name or "", partition.partition_index] = nodes[partition.leader_id]
        request = FindCoordinatorRequest(key_type=1, coordinator_keys=[self._transactional_id])
        found = self._ask(address, self._frame(request, FindCoordinatorResponse, 4), FindCoordinatorResponse, 4)
        if found.coordinators[0].error_code == 0:
            self._coordinator = (found.coordinators[0].host, found.coordinators[0].port)

    def _frame(self, request: Request, answer: type[Response], version: int) -> bytes:
        header = RequestHeader(answer.api_key, version, next(self._correlation), self._client_id)
        return bytes(encode_request(header, request))

    def _ask(self, address: Address, frame: bytes, answer: type[R], version: int) -> R:
        return decode_response(answer, version, _exchange(address, frame))[1]

    def _note_end(self, outcome: Outcome, how: str) -> None:
        self._history.write(outcome, Action.END, how, op=self._current)
        self._history.flush()


def _exchange(address: Address, frame: bytes) -> bytes:
    """One request on a connection of its own; OSError when there is no answer soon."""
    with socket.create_connection(address, timeout=_ASK_S) as peer:
        peer.sendall(frame)
        return read_exactly(peer, int.from_bytes(read_exactly(peer, 4)))


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return host, int(port)
