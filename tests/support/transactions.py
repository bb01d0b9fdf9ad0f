"""A transaction coordinator on a log in memory, with partitions that only remember their markers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection

from millrace.clock import ManualClock
from millrace.model import TopicPartition
from millrace.replication.state_topic import yield_to_loop
from millrace.transactions.coordinator import TransactionCoordinator
from millrace.transactions.markers import TransactionMarker
from millrace.transactions.settings import TransactionSettings
from millrace.transactions.state import Producer, Transaction
from support.state_topic import FakeTopic

A, B, C = (TopicPartition("t", index) for index in range(3))


class FakeMarkers:
    """Partitions take their markers at once, or when the test lets them."""

    def __init__(self) -> None:
        self.sent: list[tuple[TransactionMarker, frozenset[TopicPartition]]] = []
        """What was handed over, in order; a failover hands it over again."""
        self.written: list[tuple[TransactionMarker, TopicPartition]] = []
        self.open = asyncio.Event()
        self.open.set()

    async def send(self, marker: TransactionMarker, partitions: Collection[TopicPartition]) -> None:
        self.sent.append((marker, frozenset(partitions)))
        for each in sorted(partitions):
            await self.open.wait()
            self.written.append((marker, each))


class Bench:
    """A coordinator whose partitions, clock and markers the test holds."""

    def __init__(
        self, settings: TransactionSettings | None = None, *, partitions: int = 1, commit_at_once: bool = True
    ) -> None:
        self.clock = ManualClock()
        self.fake = FakeTopic(partitions, commit_at_once=commit_at_once)
        self.markers = FakeMarkers()
        self.settings = settings or TransactionSettings()
        self.ids = itertools.count(1000)
        self.coordinator = self.make()

    def make(self) -> TransactionCoordinator:
        return TransactionCoordinator(
            clock=self.clock,
            settings=self.settings,
            state_topic=self.fake.topic,
            markers=self.markers,
            new_producer_id=self.new_producer_id,
        )

    async def new_producer_id(self) -> int:
        return next(self.ids)

    async def lead(self) -> None:
        for index in range(len(self.fake.partitions)):
            self.coordinator.partition_became_leader(index)
        await self.coordinator.loaded()

    async def fail_over(self) -> None:
        """The coordinator dies, and another one begins with what is in the log."""
        await self.coordinator.stop()
        for index in range(len(self.fake.partitions)):
            self.fake[index].leader_epoch += 1
        self.coordinator = self.make()
        await self.lead()

    async def advance(self, seconds: float) -> None:
        await run_ready()
        self.clock.advance(seconds)
        await run_ready()

    def states(self) -> dict[str, Transaction]:
        return {each.transactional_id: each.transaction for each in self.coordinator.list()}

    async def begin(self, transactional_id: str = "x", *partitions: TopicPartition, version: int = 2) -> Producer:
        """A producer with an ongoing transaction, where partitions are named."""
        producer = await self.coordinator.init_producer_id(transactional_id, 60_000)
        if partitions:
            await self.coordinator.add_partitions(transactional_id, producer, partitions, version=version)
        return producer


async def run_ready() -> None:
    for _ in range(30):
        await yield_to_loop()
