"""The measurements of `millrace perf`: sending, reading, and the way of a record from one to the other.

A latency counts from when a record was *due*, not from when it could be sent. At a given rate the records are due at
even intervals, whatever the broker does: a broker that stands still for a second makes a thousand records late, not one
(otherwise the measurement would leave out what it was slow at: coordinated omission). Without a rate a record is due
when it is first tried, so that waiting for room in the client's queue counts too.

Everything runs in one thread: librdkafka works in its own, and two threads of Python would measure each other. Not
here: topics, options and what is printed (`perf`, `perf_view`).
"""

from __future__ import annotations

import math
import secrets
import string
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from millrace.cli.latencies import Latencies
from millrace.cli.output import CommandError
from millrace.clock import Clock
from millrace.model import TopicPartition

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message, Producer

STAMP: Final = struct.Struct(">QQ")
"""At the beginning of an end-to-end record: which run it belongs to, and when it was due, in nanoseconds."""
_WARM_UP: Final = 0
_FILLERS: Final = 61
_BATCH: Final = 1000
_LOOK_EVERY: Final = 64
_POLL_S: Final = 0.05
_WARM_UP_TIMEOUT_S: Final = 30.0
_LOST_AFTER_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is sent or read, and how fast; None is without a limit."""

    records: int | None
    duration_s: float | None
    rate: float | None
    size_bytes: int

    def due_s(self, number: int) -> float | None:
        """When the record with this number is due, in seconds from the beginning."""
        return None if self.rate is None else number / self.rate

    def is_over(self, number: int, elapsed_s: float) -> bool:
        """Whether this record is not sent any more."""
        if self.records is not None and number >= self.records:
            return True
        return self.duration_s is not None and max(elapsed_s, self.due_s(number) or 0) >= self.duration_s

    def unsent(self, sent: int) -> int:
        """Records that were due in time and not sent: with a latency of their own they would be the slowest."""
        if self.rate is None or self.duration_s is None:
            return 0
        due = math.ceil(self.duration_s * self.rate)
        return max((due if self.records is None else min(due, self.records)) - sent, 0)


@dataclass(slots=True)
class Tally:
    """What was done so far, which is what is shown. `latencies` are of deliveries, arrivals, or waits for a batch."""

    began_s: float = 0.0
    ended_s: float = 0.0
    sent: int = 0
    done: int = 0
    done_bytes: int = 0
    failed: int = 0
    lost: int = 0
    unsent: int = 0
    first_error: str | None = None
    first_record_s: float | None = None
    latencies: Latencies = field(default_factory=Latencies)

    @property
    def elapsed_s(self) -> float:
        return max(self.ended_s - self.began_s, 1e-9)

    def on_failure(self, error: KafkaError | None, _message: Message) -> None:
        """For a record of which only a failure counts."""
        if error is not None:
            self.fail(error)

    def fail(self, error: KafkaError) -> None:
        from millrace.cli.connection import explain

        self.failed += 1
        if self.first_error is None:
            self.first_error = explain(error)


@dataclass(frozen=True, slots=True)
class Bench:
    """What a measurement needs beside its clients: time, Ctrl-C, and somebody who is shown the tally now and then."""

    clock: Clock
    interrupted: Callable[[], bool]
    show: Callable[[Tally], None]


def fillers(size_bytes: int) -> list[bytes]:
    """Different contents of this size: random letters, which compress to about six tenths, as text does at best."""
    letters = string.ascii_uppercase
    return ["".join(secrets.choice(letters) for _ in range(size_bytes)).encode() for _ in range(_FILLERS)]


def produce(bench: Bench, producer: Producer, topic: str, plan: Plan, tally: Tally) -> None:
    """Send, and wait for the acknowledgements; a latency is from when a record was due until it is acknowledged.

    The first record of each partition is not counted: it waits for connections.
    """
    from millrace.cli.connection import REQUEST_TIMEOUT_S

    values = fillers(plan.size_bytes)
    for partition in producer.list_topics(topic, timeout=REQUEST_TIMEOUT_S).topics[topic].partitions:
        producer.produce(topic, values[0], partition=partition, on_delivery=tally.on_failure)
    while len(producer) and not bench.interrupted():
        producer.poll(_POLL_S)
    if tally.failed:
        return

    def on_delivery(due_s: float, error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            tally.fail(error)
            return
        tally.ended_s = bench.clock.monotonic()
        tally.done += 1
        tally.done_bytes += plan.size_bytes
        tally.latencies.add(tally.ended_s - due_s)

    def send(number: int, due_s: float) -> None:
        producer.produce(topic, values[number % _FILLERS], on_delivery=partial(on_delivery, due_s))

    send_all(bench, plan, tally, send, wait=producer.poll)
    while len(producer):
        producer.poll(_POLL_S)
        bench.show(tally)


def send_all(
    bench: Bench, plan: Plan, tally: Tally, send: Callable[[int, float], None], wait: Callable[[float], object]
) -> None:
    """Send every record when it is due, until the plan is done or somebody asks to stop; `wait` serves the clients."""
    clock = bench.clock
    tally.began_s = tally.ended_s = clock.monotonic()
    due_s: float | None = None
    while not bench.interrupted():
        now = clock.monotonic()
        if due_s is None:
            if plan.is_over(tally.sent, now - tally.began_s):
                tally.unsent = plan.unsent(tally.sent)
                return
            planned = plan.due_s(tally.sent)
            due_s = now if planned is None else tally.began_s + planned
        if due_s > now:
            wait(min(due_s - now, _POLL_S))
        else:
            try:
                send(tally.sent, due_s)
            except BufferError:  # the client's queue is full; the record is late from now on
                wait(_POLL_S)
            else:
                due_s = None
                tally.sent += 1
                if tally.sent % _LOOK_EVERY:
                    continue
                wait(0)
        bench.show(tally)


def consume(bench: Bench, consumer: Consumer, begin: dict[TopicPartition, int], plan: Plan, tally: Tally) -> None:
    """Read from `begin` on until the plan is done or the end; a latency is a wait for the next records.

    The rate counts from the first record on: what comes before is the connection, and is told apart.
    """
    from millrace.cli.connection import is_partition_end

    asked_s = bench.clock.monotonic()
    tally.began_s = tally.ended_s = asked_s
    _assign(consumer, begin)
    unread = set(begin)
    while unread and not bench.interrupted():
        before = bench.clock.monotonic()
        if plan.is_over(tally.done, before - tally.began_s):
            return
        most = _BATCH if plan.records is None else min(plan.records - tally.done, _BATCH)
        messages = _poll(consumer, _POLL_S, most)
        now = bench.clock.monotonic()
        arrived = 0
        for message in messages:
            problem = message.error()
            if problem is None:
                arrived += 1
                tally.done_bytes += len(message)
            elif is_partition_end(problem):
                unread.discard(TopicPartition(str(message.topic()), int(message.partition() or 0)))
            elif not problem.retriable():
                tally.fail(problem)
                return
        if arrived:
            if tally.first_record_s is None:
                tally.first_record_s, tally.began_s = now - asked_s, before
            else:
                tally.latencies.add(now - before)
            tally.done += arrived
            tally.ended_s = now
        bench.show(tally)


class RoundTrip:
    """Sends, and reads what it sent; a latency is from when a record was due until it was read.

    The first record of each partition is not counted: it waits for connections. Records of others are left alone.
    """

    def __init__(self, bench: Bench, producer: Producer, consumer: Consumer, plan: Plan, tally: Tally) -> None:
        self._bench = bench
        self._producer = producer
        self._consumer = consumer
        self._plan = plan
        self._tally = tally
        self._run_id = secrets.randbits(63)
        self._values = fillers(max(plan.size_bytes - STAMP.size, 0))
        self._topic = ""
        self._warm: set[int] = set()

    def __repr__(self) -> str:
        return f"RoundTrip({self._topic}, {self._tally})"

    def run(self, begin: dict[TopicPartition, int]) -> None:
        """Through the partitions of one topic, which are read from `begin` on."""
        (self._topic,) = {partition.topic for partition in begin}
        _assign(self._consumer, begin)
        self._warm_up({partition.partition for partition in begin})
        if self._tally.failed or self._bench.interrupted():
            return
        send_all(self._bench, self._plan, self._tally, self._send, wait=self._receive)
        self._wait_for_the_rest()

    def _warm_up(self, partitions: set[int]) -> None:
        for partition in partitions:
            value = STAMP.pack(self._run_id, _WARM_UP)
            self._producer.produce(self._topic, value, partition=partition, on_delivery=self._tally.on_failure)
        gives_up_s = self._bench.clock.monotonic() + _WARM_UP_TIMEOUT_S
        while self._warm < partitions and not self._tally.failed and not self._bench.interrupted():
            self._receive(_POLL_S)
            if self._bench.clock.monotonic() > gives_up_s:
                raise CommandError(f"the first records did not come back within {_WARM_UP_TIMEOUT_S:.0f} s")

    def _send(self, number: int, due_s: float) -> None:
        value = STAMP.pack(self._run_id, int(due_s * 1e9)) + self._values[number % _FILLERS]
        self._producer.produce(self._topic, value, on_delivery=self._tally.on_failure)

    def _receive(self, timeout_s: float) -> None:
        self._producer.poll(0)
        for message in _poll(self._consumer, timeout_s, _BATCH):
            problem = message.error()
            if problem is None:
                self._read(message)
            elif not problem.retriable():
                raise CommandError(f"reading {self._topic}: {problem.str()}")

    def _read(self, message: Message) -> None:
        value = message.value() or b""
        owner, due_ns = STAMP.unpack_from(value) if len(value) >= STAMP.size else (None, 0)
        if owner != self._run_id:
            return
        if due_ns == _WARM_UP:
            self._warm.add(int(message.partition() or 0))
            return
        tally = self._tally
        tally.ended_s = self._bench.clock.monotonic()
        tally.done += 1
        tally.done_bytes += len(value)
        tally.latencies.add(tally.ended_s - due_ns / 1e9)

    def _wait_for_the_rest(self) -> None:
        """What was sent and is not read long after the last one was is lost."""
        tally, clock = self._tally, self._bench.clock
        quiet_since, seen = clock.monotonic(), tally.done
        while tally.done + tally.failed < tally.sent and clock.monotonic() - quiet_since < _LOST_AFTER_S:
            self._receive(_POLL_S)
            self._bench.show(tally)
            if tally.done != seen:
                quiet_since, seen = clock.monotonic(), tally.done
        self._producer.flush(_LOST_AFTER_S)  # an acknowledgement may come after its record was read
        tally.lost = max(tally.sent - tally.done - tally.failed, 0)


def _assign(consumer: Consumer, begin: dict[TopicPartition, int]) -> None:
    from confluent_kafka import TopicPartition as LibraryPartition

    consumer.assign([LibraryPartition(one.topic, one.partition, offset) for one, offset in begin.items()])


def _poll(consumer: Consumer, timeout_s: float, most: int) -> list[Message]:
    """One record is waited for and the rest taken as they are."""
    first = consumer.poll(timeout_s)
    if first is None:
        return []
    return [first, *consumer.consume(most - 1, 0)] if most > 1 else [first]
