"""One program with transactions in a fault test: `python -m cluster.transaction_member member --job JOB ...`.

    copier  copies a topic to another, record by record, with the group's offsets in the transaction
    mixer   sends to some partitions and reads from others in each transaction, and aborts every tenth on purpose
    bank    moves money between its accounts, and adds them all up now and then

It keeps its transactional id for life. When its producer is fenced or broken, it makes a new one and goes on from what
was committed, as any such program must. When a call does not return, it begins anew as a whole, as whoever watches over
such a program would have it: librdkafka's send_offsets_to_transaction knows no timeout while the group's coordinator is
away (confluentinc/librdkafka#5456). Everything that it asks for is in its history before it asks
(`support.history`); it ends when its standard input does, at the latest with its parent, and prints how many records it
has committed.
"""

from __future__ import annotations

import argparse
import os
import random
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Protocol

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from cluster.late_transactions import EPOCHS, Straggler
from cluster.planted import die_with_parent
from cluster.transaction_errors import Gone, MustAbort
from cluster.workload import CLIENT, CONSUMER, Settings, add_client_option, complain, key_of, report, watch_input
from support.history import (
    ABORT,
    COMMIT,
    Action,
    HistoryWriter,
    Outcome,
    decode_record,
    encode_record,
    value_in_transaction,
)

MOST_PER_TRANSACTION: Final = 750
ACCOUNTS: Final = 10
DEPOSIT: Final = 100
TOTAL: Final = ACCOUNTS * DEPOSIT
"""What the accounts of a bank add up to."""

_CALL_S: Final = 10.0
_HANGS_AFTER_S: Final = 2 * _CALL_S
ANEW: Final = 1000
"""A program that begins anew has this much more for its number."""
_COMMITS_WITHIN_S: Final = 60.0
_FLUSH_S: Final = 2.0
_GATHER_S: Final = 0.3
_READ_S: Final = 30.0
_PAUSE_S: Final = 0.2
_ABORTS: Final = 0.1
_GROUP_METADATA: Final = struct.Struct("=7si")
"""How librdkafka writes what it knows of its membership: `CGMDv2:`, the generation, and names."""

TRANSACTIONAL: Final[Settings] = {
    **CLIENT,
    "linger.ms": 5,
    "retry.backoff.ms": 50,
    # Below the transaction's timeout, or librdkafka refuses it.
    "socket.timeout.ms": 3000,
    "request.timeout.ms": 3000,
}
COPIER: Final[Settings] = {
    **CONSUMER,
    "isolation.level": "read_committed",
    "socket.timeout.ms": 3000,
}
CLASSIC: Final[Settings] = {
    "group.protocol": "classic",
    "partition.assignment.strategy": "range",
    "session.timeout.ms": 3000,
    "heartbeat.interval.ms": 400,
}


class Writer(Protocol):
    """Transactions, one after the other."""

    committed: int

    def renew(self) -> None: ...

    def begin(self) -> int: ...

    def send(
        self,
        topic: str,
        partition: int,
        payload: bytes,
        *,
        key: bytes | None = None,
        source: int = -1,
        note: bool = True,
    ) -> None: ...

    def move(self, topic: str, offsets: Mapping[int, int], group: object) -> None: ...

    def commit(self) -> None: ...

    def abort(self) -> None: ...

    def abandon(self) -> None: ...


class Transactions:
    """A transactional producer and its history. Owner: one thread."""

    def __init__(self, options: argparse.Namespace, history: HistoryWriter, stopping: threading.Event) -> None:
        self.committed = 0
        self._history = history
        self._stopping = stopping
        self._number: int = options.number
        self._current = 0
        self._sent = 0
        self._open = False
        self._called_at: float | None = None
        threading.Thread(target=self._watch, daemon=True).start()
        self._settings: Settings = {
            **TRANSACTIONAL,
            **options.client,
            "client.id": f"{options.job}-{options.slot}",
            "transactional.id": f"{options.topic}-{options.slot}",
            "transaction.timeout.ms": options.timeout_ms,
            "message.timeout.ms": options.timeout_ms,
        }
        self._producer = self._new_producer()

    def renew(self) -> None:
        """A new producer in the place of one that is gone."""
        time.sleep(_PAUSE_S)
        self._producer = self._new_producer()

    def begin(self) -> int:
        """The number of the transaction that begins."""
        self._current += 1
        self._sent = 0
        try:
            self._producer.begin_transaction()
        except KafkaException as failure:
            complain(f"begin: {failure}")
            raise Gone from None
        self._open = True
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
        """`source` is the offset of the record that this is a copy of."""
        value = value_in_transaction(self._number, self._current, self._sent)
        self._sent += 1
        if note:
            place = key_of(topic, partition)
            self._history.write(Outcome.INVOKE, Action.SEND, place, op=self._current, value=value, offset=source)
        while True:
            try:
                self._producer.produce(topic, encode_record(value, payload), key, partition=partition)
            except BufferError:
                self._producer.poll(0.01)
            except KafkaException as failure:
                complain(f"send: {failure}")
                raise MustAbort from None
            else:
                return

    def move(self, topic: str, offsets: Mapping[int, int], group: object) -> None:
        """Make the group go on at these offsets, if the transaction is committed."""
        for index, offset in offsets.items():
            place = key_of(topic, index)
            self._history.write(Outcome.INVOKE, Action.OFFSETS, place, op=self._current, offset=offset)
        self._history.flush()
        wanted = [TopicPartition(topic, index, offset) for index, offset in offsets.items()]
        self._repeat(lambda: self._producer.send_offsets_to_transaction(wanted, group, _CALL_S))

    def commit(self) -> None:
        """Returns when it was committed; MustAbort, Gone: it was not, or nobody knows."""
        self._note_end(Outcome.INVOKE, COMMIT)
        asked: list[None] = []

        def once() -> None:
            asked.append(None)
            self._producer.commit_transaction(_CALL_S)

        try:
            self._repeat(once)
        except MustAbort:
            # When an earlier call was not answered in time, the coordinator may have done what it asked for.
            self._roll_back()
            self._note_end(Outcome.FAIL if len(asked) == 1 else Outcome.INFO, COMMIT)
            raise
        except Gone:
            self._note_end(Outcome.INFO, COMMIT)
            raise
        self._open = False
        self._note_end(Outcome.OK, COMMIT)
        self.committed += self._sent

    def abort(self) -> None:
        """Of a transaction that nobody asked to commit; what was sent is in the log, as far as brokers answer."""
        self._note_end(Outcome.INVOKE, ABORT)
        self._producer.flush(_FLUSH_S)
        self._roll_back()
        self._note_end(Outcome.OK, ABORT)

    def abandon(self) -> None:
        """Abort what is still open after MustAbort."""
        if self._open:
            self.abort()

    def _roll_back(self) -> None:
        try:
            self._repeat(lambda: self._producer.abort_transaction(_CALL_S))
        except MustAbort:
            raise Gone from None
        self._open = False

    def _note_end(self, outcome: Outcome, how: str) -> None:
        self._history.write(outcome, Action.END, how, op=self._current)
        self._history.flush()

    def _repeat(self, call: Callable[[], None]) -> None:
        """Make a call until it is answered; MustAbort or Gone when there is no point in that."""
        deadline = time.monotonic() + _COMMITS_WITHIN_S
        while True:
            self._history.flush()
            self._called_at = time.monotonic()
            try:
                return call()
            except KafkaException as failure:
                error = failure.args[0]
                if error.retriable() and time.monotonic() < deadline:
                    continue
                complain(f"{error}")
                if error.txn_requires_abort():
                    raise MustAbort from None
                raise Gone from None
            finally:
                self._called_at = None

    def _watch(self) -> None:
        while True:
            time.sleep(1)
            called_at = self._called_at
            if called_at is not None and time.monotonic() - called_at > _HANGS_AFTER_S:
                print(f"a call hangs after {_HANGS_AFTER_S:.0f} s: beginning anew", file=sys.stderr, flush=True)
                anew = ["--number", str(self._number + ANEW), "--committed", str(self.committed)]
                os.execv(sys.executable, [sys.executable, "-m", "cluster.transaction_member", *sys.argv[1:], *anew])

    def _new_producer(self) -> Producer:
        while True:
            producer = Producer(self._settings)
            try:
                while True:
                    try:
                        producer.init_transactions(_CALL_S)
                    except KafkaException as failure:
                        if self._stopping.is_set() or not failure.args[0].retriable():
                            raise
                    else:
                        return producer
            except KafkaException as failure:
                complain(f"init: {failure}")
                if self._stopping.is_set():
                    raise
                time.sleep(_PAUSE_S)


class Job(Protocol):
    """What a member does with transactions."""

    def step(self) -> None:
        """One transaction, more or less; MustAbort and Gone are for whoever calls."""

    def start_over(self) -> None:
        """The last transaction was not committed, as far as is known."""

    def close(self) -> None: ...


class Copier:
    """Copies each partition of the input to that of the same number."""

    def __init__(self, options: argparse.Namespace, history: HistoryWriter, transactions: Writer) -> None:
        self._history = history
        self._transactions = transactions
        self._rng = random.Random(options.number)
        self._input: str = options.input
        self._output: str = options.topic
        self._generations: dict[int, int] = {}
        self._fresh: set[int] = set()
        """Partitions of which nothing was read since it was last decided where to begin."""
        self._gathered: list[tuple[int, int, bytes]] = []
        self._settings: Settings = {
            **COPIER,
            **(CLASSIC if options.protocol == "classic" else {"group.protocol": "consumer"}),
            **options.client,
            "client.id": f"copier-{options.slot}",
            "group.id": options.group,
        }
        self._consumer = self._subscribed()

    def step(self) -> None:
        self._gather(self._rng.randint(1, MOST_PER_TRANSACTION))
        if not self._gathered:
            return
        self._transactions.begin()
        ends: dict[int, int] = {}
        for index, offset, data in self._gathered:
            self._transactions.send(self._output, index, data, source=offset)
            ends[index] = offset + 1
        self._transactions.move(self._input, ends, self._membership())
        if self._rng.random() < _ABORTS:
            # On purpose: what is visible of these offsets now would be missing in the copy.
            self._transactions.abort()
            self.start_over()
            return
        self._transactions.commit()
        self._gathered.clear()

    def start_over(self) -> None:
        """Go back to what the group has committed."""
        self._gathered.clear()
        try:
            assigned = self._consumer.assignment()
            self._begin_anew([each.partition for each in assigned])
            for each in self._consumer.committed(assigned, _CALL_S):
                if each.error is not None:
                    raise KafkaException(each.error)
                self._consumer.seek(TopicPartition(self._input, each.partition, max(0, each.offset)))
        except KafkaException as failure:
            complain(f"start over: {failure}")
            self._consumer.close()
            self._consumer = self._subscribed()

    def close(self) -> None:
        self._consumer.close()

    def _subscribed(self) -> Consumer:
        consumer = Consumer(self._settings)
        consumer.subscribe([self._input], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked)
        return consumer

    def _gather(self, count: int) -> None:
        ends_at = time.monotonic() + _GATHER_S
        while len(self._gathered) < count and (left := ends_at - time.monotonic()) > 0:
            message = self._consumer.poll(left)
            if message is not None:
                self._take(message)

    def _take(self, message: Message) -> None:
        error = message.error()
        if error is not None:
            if error.fatal():
                raise KafkaException(error)
            complain(f"poll: {error}")
            return
        index, offset = message.partition() or 0, message.offset() or 0
        if index in self._fresh:
            self._fresh.discard(index)
            place, generation = key_of(self._input, index), self._generations[index]
            self._history.write(Outcome.OK, Action.POLL, place, op=0, offset=offset, generation=generation)
        self._gathered.append((index, offset, message.value() or b""))

    def _membership(self) -> object:
        """For the group to refuse whoever is no member any more.

        A consumer that knows that it was removed says so here, too, and a group takes offsets of a stranger.
        """
        metadata = self._consumer.consumer_group_metadata()
        assert isinstance(metadata, bytes)
        _, generation = _GROUP_METADATA.unpack_from(metadata)
        if generation <= 0:
            raise MustAbort
        return metadata

    def _assigned(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._begin_anew([each.partition for each in partitions])

    def _begin_anew(self, partitions: list[int]) -> None:
        for index in partitions:
            generation = self._generations[index] = self._generations.get(index, 0) + 1
            place = key_of(self._input, index)
            self._history.write(Outcome.OK, Action.ASSIGN, place, op=0, generation=generation)
        self._fresh.update(partitions)
        self._history.flush()

    def _revoked(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        gone = {each.partition for each in partitions}
        self._gathered = [each for each in self._gathered if each[0] not in gone]


class Mixer:
    """Sends and reads, in any order, to and from all partitions of two topics."""

    def __init__(self, options: argparse.Namespace, history: HistoryWriter, transactions: Writer) -> None:
        self._history = history
        self._transactions = transactions
        self._rng = random.Random(options.number)
        self._places = [
            (topic, index) for topic in (options.topic, options.input) for index in range(options.partitions)
        ]
        self._payload = bytes(100)
        self._consumer = Consumer({**CONSUMER, "isolation.level": "read_committed", **options.client})
        self._consumer.assign([TopicPartition(topic, index, 0) for topic, index in self._places])

    def step(self) -> None:
        rng = self._rng
        number = self._transactions.begin()
        for _ in range(rng.randint(1, 4)):
            if rng.random() < 0.3:
                self._read(number)
            else:
                for topic, index in rng.sample(self._places, rng.randint(1, 3)):
                    self._transactions.send(topic, index, self._payload)
            time.sleep(rng.uniform(0, 0.01))
        if rng.random() < _ABORTS:
            self._transactions.abort()
        else:
            self._transactions.commit()

    def start_over(self) -> None:
        """There is nothing to go back to."""

    def close(self) -> None:
        self._consumer.close()

    def _read(self, number: int) -> None:
        for message in self._consumer.consume(50, 0.02):
            if message.error() is not None:
                complain(f"poll: {message.error()}")
                continue
            place, value = key_of(message.topic() or "", message.partition() or 0), decode_record(message.value())
            self._history.write(Outcome.OK, Action.POLL, place, op=number, value=value, offset=message.offset() or 0)


class Bank:
    """Accounts whose balances are the last records of their keys; each transfer writes two of them."""

    def __init__(self, options: argparse.Namespace, history: HistoryWriter, transactions: Writer) -> None:
        self._history = history
        self._transactions = transactions
        self._rng = random.Random(options.number)
        self._topic: str = options.topic
        self._partitions: int = options.partitions
        self._client: Mapping[str, str] = options.client
        self._name = f"bank-{options.slot}"
        self._balances: dict[int, int] = {}
        self._transfers = 0

    def step(self) -> None:
        if not self._balances:
            new = dict.fromkeys(range(ACCOUNTS), DEPOSIT)
        else:
            giver, taker = self._rng.sample(range(ACCOUNTS), 2)
            amount = self._rng.randint(1, DEPOSIT)
            new = {giver: self._balances[giver] - amount, taker: self._balances[taker] + amount}
        self._transactions.begin()
        for account, balance in new.items():
            key = f"{self._name}/{account}".encode()
            payload = b"%d" % balance
            self._transactions.send(self._topic, account % self._partitions, payload, key=key, note=False)
        if self._rng.random() < _ABORTS:
            self._transactions.abort()
            return
        self._transactions.commit()
        self._balances.update(new)
        self._transfers += 1
        if self._transfers % 20 == 0:
            self.start_over()

    def start_over(self) -> None:
        """Read all accounts, at a time when nobody else can write them: this program's last transaction is over."""
        books = read_books(self._client, self._topic, self._partitions)
        self._balances = books.get(self._name, {})
        if self._balances:
            total = sum(self._balances.values())
            self._history.write(Outcome.OK, Action.BALANCE, self._name, op=self._transfers, value=total)
            self._history.flush()

    def close(self) -> None:
        """Nothing is open."""


def read_books(client: Mapping[str, str], topic: str, partitions: int) -> dict[str, dict[int, int]]:
    """The accounts of every bank, from everything that was written before now; waits until it is decided."""
    books: dict[str, dict[int, int]] = {}
    places = [TopicPartition(topic, index, 0) for index in range(partitions)]
    for message in read_to_the_end(client, places, _READ_S):
        bank, _, account = (message.key() or b"").decode().partition("/")
        books.setdefault(bank, {})[int(account)] = int((message.value() or b"")[_HEAD_BYTES:])
    return books


_HEAD_BYTES: Final = len(encode_record(0, b""))


def read_to_the_end(
    client: Mapping[str, str],
    places: list[TopicPartition],
    timeout_s: float,
    ends: Mapping[tuple[str, int], int] | None = None,
    *,
    isolation: str = "read_committed",
) -> list[Message]:
    """What is committed below the present high watermarks, or these ends; KafkaException when that takes too long."""
    if ends is None:
        ends = {(each.topic, each.partition): end for each, end in zip(places, ends_of(client, places), strict=True)}
    messages = []
    settings = {**CONSUMER, "isolation.level": isolation, "enable.partition.eof": True}
    consumer = Consumer({**settings, **client})
    try:
        consumer.assign(places)
        deadline = time.monotonic() + timeout_s
        left = {place for place, end in ends.items() if end > 0}
        while left:
            if time.monotonic() > deadline:
                raise KafkaException(
                    KafkaError(KafkaError._TIMED_OUT, f"{len(left)} partitions were not read to their end")
                )
            for message in consumer.consume(500, 0.1):
                place, offset = (message.topic() or "", message.partition() or 0), message.offset() or 0
                error = message.error()
                if error is None:
                    messages.append(message)
                    offset += 1
                elif error.code() != KafkaError._PARTITION_EOF:
                    continue
                if offset >= ends[place]:
                    left.discard(place)
    finally:
        consumer.close()
    return messages


def ends_of(client: Mapping[str, str], places: list[TopicPartition], isolation: str = "read_uncommitted") -> list[int]:
    """The high watermarks of these partitions; with read_committed their last stable offsets."""
    consumer = Consumer({**CONSUMER, "isolation.level": isolation, **client})
    try:
        return [consumer.get_watermark_offsets(each, timeout=_CALL_S)[1] for each in places]
    finally:
        consumer.close()


def run(job: Job, transactions: Writer, stopping: threading.Event) -> None:
    """Transaction after transaction, whatever becomes of each."""
    reported = 0.0
    _start_over(job, stopping)
    while not stopping.is_set():
        try:
            try:
                job.step()
            except MustAbort:
                transactions.abandon()
                _start_over(job, stopping)
        except Gone:
            transactions.renew()
            _start_over(job, stopping)
        except KafkaException as failure:
            complain(f"read: {failure}")
            _start_over(job, stopping)
        reported = report(transactions.committed, reported)


def _start_over(job: Job, stopping: threading.Event) -> None:
    while not stopping.is_set():
        try:
            job.start_over()
        except KafkaException as failure:
            complain(f"start over: {failure}")
            time.sleep(_PAUSE_S)
        else:
            return


JOBS: Final[dict[str, Callable[[argparse.Namespace, HistoryWriter, Writer], Job]]] = {
    "copier": Copier,
    "mixer": Mixer,
    "bank": Bank,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="cluster.transaction_member")
    parser.add_argument("role")
    parser.add_argument("--job", choices=JOBS, required=True)
    add_client_option(parser)
    parser.add_argument("--topic", required=True, help="where it writes")
    parser.add_argument("--partitions", type=int, required=True)
    parser.add_argument("--number", type=int, required=True, help="of this process")
    parser.add_argument("--committed", type=int, default=0, help="by the program that this one replaces")
    parser.add_argument("--slot", type=int, required=True, help="of its transactional id, which outlives it")
    parser.add_argument("--history", type=Path, required=True)
    parser.add_argument("--timeout-ms", type=int, required=True, help="transaction.timeout.ms")
    parser.add_argument("--input", help="the topic to copy, or a second one to write")
    parser.add_argument("--group", help="of the copiers")
    parser.add_argument("--protocol", choices=("classic", "consumer"), default="classic")
    parser.add_argument(
        "--late", type=int, choices=(0, EPOCHS), help="its requests are late, in this transaction version"
    )
    options = parser.parse_args()
    die_with_parent()
    stopping = threading.Event()
    threading.Thread(target=watch_input, args=(stopping,), daemon=True).start()
    with HistoryWriter(options.history, f"p{options.number}") as history:
        try:
            kind = Transactions if options.late is None else Straggler
            transactions: Writer = kind(options, history, stopping)
            transactions.committed = options.committed
            job = JOBS[options.job](options, history, transactions)
            run(job, transactions, stopping)
            job.close()
            report(transactions.committed, 0.0)
        except KafkaException as error:
            if stopping.is_set():
                return 0
            print(f"member {options.number}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
