"""A consumer group that archives the chat: plain Kafka consumers beside the pipelines, and what they have read.

A member joins half-way and the first one leaves, so that a rebalance happens while records flow. What a member reads
again after a rebalance is counted as read again, not twice; an offset that nobody read is a gap.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Final

from confluent_kafka import Consumer, Message

from millrace.clock import SystemClock
from millrace.demo.traffic import CHAT

GROUP: Final = "chat-archive"
_LATENCIES_KEPT: Final = 2000


class Archive:
    """What the group has read, each offset once. Members enter under one lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_offsets: dict[int, int] = {}
        self._latencies_ms: deque[int] = deque(maxlen=_LATENCIES_KEPT)
        self.count = 0
        self.read_again = 0
        self.gaps = 0

    def enter(self, message: Message, now_ms: int) -> None:
        partition, offset = message.partition(), message.offset()
        assert partition is not None and offset is not None
        with self._lock:
            expected = self._next_offsets.get(partition, 0)
            if offset < expected:
                self.read_again += 1
                return
            self.gaps += offset > expected
            self._next_offsets[partition] = offset + 1
            self.count += 1
            self._latencies_ms.append(max(now_ms - message.timestamp()[1], 0))

    def latency_ms(self, quantile: float) -> int | None:
        with self._lock:
            ordered = sorted(self._latencies_ms)
        return ordered[min(int(len(ordered) * quantile), len(ordered) - 1)] if ordered else None


class Member(threading.Thread):
    """One member of the group: reads, enters what it read, commits what it entered."""

    def __init__(self, number: int, archive: Archive, settings: dict[str, Any]) -> None:
        super().__init__(name=f"member {number}", daemon=True)
        self.assigned = 0
        self.error: str | None = None
        self._archive = archive
        self._leaving = threading.Event()
        self._consumer = Consumer(
            {
                **settings,
                "client.id": f"chat-archive-{number}",
                "group.id": GROUP,
                "auto.offset.reset": "earliest",
                "auto.commit.interval.ms": 500,
                "enable.auto.offset.store": False,
                "partition.assignment.strategy": "cooperative-sticky",
                "heartbeat.interval.ms": 500,  # a heartbeat is how a member learns of a rebalance
                "session.timeout.ms": 10_000,
            }
        )

    def leave(self) -> None:
        self._leaving.set()

    def run(self) -> None:
        clock = SystemClock()
        try:
            self._consumer.subscribe([CHAT])
            while not self._leaving.is_set():
                for message in self._consumer.consume(500, 0.1):
                    problem = message.error()
                    if problem is None:
                        self._archive.enter(message, clock.wall_ms())
                        self._consumer.store_offsets(message=message)
                    elif not problem.retriable():
                        self.error = problem.str()
                self.assigned = len(self._consumer.assignment())
        except Exception as error:  # noqa: BLE001  # a thread's root: the summary tells it
            self.error = str(error)
        finally:
            self.assigned = 0
            self._consumer.close()  # commits what was stored
