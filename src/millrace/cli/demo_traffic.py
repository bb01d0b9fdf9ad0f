"""The traffic of `millrace demo`: producers that invent plausible records, a consumer group that reads them, and a
ledger.

The ledger is the point: producers enter what the broker acknowledged, members what they received, per partition, as a
count and a checksum that does not depend on order. A record that a member receives again after a rebalance is entered
as replayed, not twice; an offset that is skipped is entered as a gap. At the end both sides must agree.
"""

from __future__ import annotations

import json
import random
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from millrace.clock import SystemClock

GROUP: Final = "demo"
_TICK_S: Final = 0.02
_LATENCIES_KEPT: Final = 2000


@dataclass(frozen=True, slots=True)
class Stream:
    """One topic of the demo and who writes it."""

    topic: str
    partitions: int
    compression: str
    records: Callable[[random.Random], Iterator[tuple[str, dict[str, Any]]]]


def _clicks(rng: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    pages = ("/", "/search", "/cart", "/checkout", "/help")
    while True:
        user = f"user-{rng.randrange(2000)}"
        yield user, {"user": user, "page": rng.choice(pages), "took_ms": rng.randrange(3, 400)}


def _metrics(rng: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    load = {f"host-{number:02}": 0.5 for number in range(24)}
    while True:
        host = rng.choice(tuple(load))
        load[host] = min(1.0, max(0.0, load[host] + rng.uniform(-0.05, 0.05)))
        yield host, {"host": host, "cpu": round(load[host], 3), "disk_free_gb": rng.randrange(5, 500)}


def _logs(rng: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    lines = ("request served", "cache miss, reading from the store", "retrying after a timeout", "connection closed")
    while True:
        service = rng.choice(("checkout", "search", "accounts", "mail"))
        level = rng.choices(("info", "warn", "error"), (90, 8, 2))[0]
        yield (
            service,
            {"service": service, "level": level, "text": rng.choice(lines), "trace": f"{rng.getrandbits(64):x}"},
        )


STREAMS: Final = (
    Stream("demo.clicks", 6, "lz4", _clicks),
    Stream("demo.metrics", 4, "zstd", _metrics),
    Stream("demo.logs", 3, "gzip", _logs),
)


@dataclass(slots=True)
class Side:
    """Count and checksum of the records of one partition, as seen by one side."""

    count: int = 0
    checksum: int = 0

    def enter(self, key: bytes | None, value: bytes | None) -> None:
        self.count += 1
        self.checksum = (self.checksum + zlib.crc32(value or b"", zlib.crc32(key or b""))) & 0xFFFF_FFFF_FFFF_FFFF


@dataclass(slots=True)
class PartitionAccount:
    """Both sides of one partition."""

    produced: Side = field(default_factory=Side)
    consumed: Side = field(default_factory=Side)
    next_offset: int = 0
    replayed: int = 0
    gaps: int = 0

    @property
    def balanced(self) -> bool:
        return self.gaps == 0 and self.produced == self.consumed


class Ledger:
    """What was acknowledged and what was received. Threads enter under one lock; totals are read under it too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.accounts = {
            (stream.topic, index): PartitionAccount() for stream in STREAMS for index in range(stream.partitions)
        }
        self.failed = 0
        self.sent = 0
        self.sent_bytes = 0
        self.latencies_ms: deque[int] = deque(maxlen=_LATENCIES_KEPT)

    def __repr__(self) -> str:
        return f"Ledger(sent={self.sent}, produced={self.produced()}, consumed={self.consumed()})"

    def enter_sent(self, size_bytes: int) -> None:
        with self._lock:
            self.sent += 1
            self.sent_bytes += size_bytes

    def enter_report(self, error: KafkaError | None, message: Message) -> None:
        """A delivery report: the broker has it, or it failed for good."""
        with self._lock:
            if error is not None:
                self.failed += 1
                return
            self._account(message).produced.enter(message.key(), message.value())

    def enter_received(self, message: Message, now_ms: int) -> None:
        offset = message.offset()
        assert offset is not None
        with self._lock:
            account = self._account(message)
            if offset < account.next_offset:
                account.replayed += 1
                return
            if offset > account.next_offset:
                account.gaps += 1
            account.next_offset = offset + 1
            account.consumed.enter(message.key(), message.value())
            self.latencies_ms.append(max(now_ms - message.timestamp()[1], 0))

    def produced(self, topic: str | None = None) -> int:
        return self._total(topic, lambda account: account.produced.count)

    def consumed(self, topic: str | None = None) -> int:
        return self._total(topic, lambda account: account.consumed.count)

    def replayed(self) -> int:
        return self._total(None, lambda account: account.replayed)

    def unbalanced(self) -> list[tuple[str, int]]:
        with self._lock:
            return [partition for partition, account in self.accounts.items() if not account.balanced]

    @property
    def balanced(self) -> bool:
        return not self.unbalanced() and self.failed == 0

    def latency_ms(self, quantile: float) -> int | None:
        with self._lock:
            ordered = sorted(self.latencies_ms)
        return ordered[min(int(len(ordered) * quantile), len(ordered) - 1)] if ordered else None

    def _account(self, message: Message) -> PartitionAccount:
        topic, partition = message.topic(), message.partition()
        assert topic is not None and partition is not None
        return self.accounts[topic, partition]

    def _total(self, topic: str | None, count: Callable[[PartitionAccount], int]) -> int:
        with self._lock:
            return sum(count(account) for (name, _), account in self.accounts.items() if topic in {None, name})


class StreamProducer(threading.Thread):
    """Writes one stream at a steady rate until told to stop, then waits for every acknowledgement."""

    def __init__(self, stream: Stream, rate_per_s: float, ledger: Ledger, settings: dict[str, Any], seed: int) -> None:
        super().__init__(name=f"produce {stream.topic}", daemon=True)
        self.stream = stream
        self.error: str | None = None
        self._rate_per_s = rate_per_s
        self._ledger = ledger
        self._stopping = threading.Event()
        self._rng = random.Random(seed)  # noqa: S311  # invented data, not a secret
        self._producer = Producer(
            {
                **settings,
                "compression.type": stream.compression,
                "linger.ms": 5,
                "enable.idempotence": True,
                "message.timeout.ms": 20_000,
                "on_delivery": ledger.enter_report,
            }
        )

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        clock = SystemClock()
        records = self.stream.records(self._rng)
        began = clock.monotonic()
        sent = 0
        while not self._stopping.wait(_TICK_S):
            due = int((clock.monotonic() - began) * self._rate_per_s)
            while sent < due and not self._stopping.is_set():
                key, value = next(records)
                payload = json.dumps({"number": sent, **value}, separators=(",", ":")).encode()
                try:
                    self._producer.produce(self.stream.topic, payload, key, headers={"source": b"demo"})
                except BufferError:
                    self._producer.poll(0.1)
                    continue
                sent += 1
                self._ledger.enter_sent(len(payload) + len(key))
            self._producer.poll(0)
        if self._producer.flush(20):
            self.error = f"{self.stream.topic}: {len(self._producer)} records were never acknowledged"


class Member(threading.Thread):
    """One member of the consumer group: reads, enters what it read, and commits what it entered."""

    def __init__(self, number: int, ledger: Ledger, settings: dict[str, Any]) -> None:
        super().__init__(name=f"member {number}", daemon=True)
        self.number = number
        self.assigned = 0
        self.error: str | None = None
        self._ledger = ledger
        self._leaving = threading.Event()
        self._consumer = Consumer(
            {
                **settings,
                "client.id": f"demo-member-{number}",
                "group.id": GROUP,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": True,
                "auto.commit.interval.ms": 500,
                "enable.auto.offset.store": False,
                "partition.assignment.strategy": "cooperative-sticky",
                "session.timeout.ms": 10_000,
                "heartbeat.interval.ms": 500,  # a heartbeat is how a member learns of a rebalance
                "topic.metadata.refresh.interval.ms": 2000,
            }
        )

    def leave(self) -> None:
        self._leaving.set()

    def run(self) -> None:
        clock = SystemClock()
        try:
            self._consumer.subscribe([stream.topic for stream in STREAMS])
            while not self._leaving.is_set():
                for message in self._consumer.consume(500, 0.1):
                    problem = message.error()
                    if problem is not None:
                        if not problem.retriable():
                            self.error = problem.str()
                        continue
                    self._ledger.enter_received(message, clock.wall_ms())
                    self._consumer.store_offsets(message=message)
                self.assigned = len(self._consumer.assignment())
        except Exception as error:  # noqa: BLE001  # a thread's root: the view and the summary show it
            self.error = str(error)
        finally:
            self.assigned = 0
            self._consumer.close()  # commits what was stored


def committed_lag(ledger: Ledger, settings: dict[str, Any]) -> int:
    """How far the group's committed offsets are behind the acknowledged records, asked from the broker."""
    consumer = Consumer({**settings, "group.id": GROUP})
    try:
        wanted = [TopicPartition(topic, index) for topic, index in ledger.accounts]
        committed = {(one.topic, one.partition): max(one.offset, 0) for one in consumer.committed(wanted, timeout=10)}
    finally:
        consumer.close()
    return sum(account.produced.count - committed[partition] for partition, account in ledger.accounts.items())
