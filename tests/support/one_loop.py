"""Several brokers on the loop of the test itself: real sockets and files, and every object within reach.

Metadata are kept in memory. `watched` has the brokers watch each other as they do where they share a ZooKeeper.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from millrace.broker import Broker
from millrace.cluster.image import ClusterImage
from millrace.cluster.planning import NewTopic
from millrace.config import BrokerConfig
from millrace.handlers.context import Services
from millrace.metadata.embedded import Database, EmbeddedStore
from millrace.replication.partition import Partition
from millrace.storage.files import Files
from support.batches import batch


class Brokers:
    """Brokers 1 to `count`, as a context manager. Topics have a replica on each, and are flushed before they count."""

    def __init__(
        self, home: Path, count: int = 3, *, settings: Mapping[str, str] | None = None, watched: bool = False
    ) -> None:
        self.home = home
        self.count = count
        self.running: dict[int, Broker] = {}
        self._database = Database()
        self._settings = {
            "default.replication.factor": str(count),
            "min.insync.replicas": str(max(count - 1, 1)),
            "flush.mode": "group",
            "offsets.topic.num.partitions": "1",
            "share.coordinator.state.topic.num.partitions": "1",
            "group.initial.rebalance.delay.ms": "0",
            **({"zookeeper.connect": "nobody-is-asked:2181"} if watched else {}),
            **(settings or {}),
        }

    async def __aenter__(self) -> Self:
        await self._database.attach()
        try:
            for broker_id in range(1, self.count + 1):
                await self.start(broker_id)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for broker_id in list(self.running):
            await self.stop(broker_id)
        await self._database.detach()

    async def start(self, broker_id: int, files: Files | None = None) -> Broker:
        config = BrokerConfig(
            {
                "broker.id": str(broker_id),
                "listeners": "PLAINTEXT://127.0.0.1:0",
                "log.dirs": str(self.home / str(broker_id)),
                **self._settings,
            }
        )
        broker = Broker(config, store=EmbeddedStore(self._database), files=files)
        await broker.start()
        self.running[broker_id] = broker
        return broker

    async def stop(self, broker_id: int) -> None:
        await self.running.pop(broker_id).stop(linger=False)

    def services(self, broker_id: int) -> Services:
        found = self.running[broker_id].services
        assert found is not None
        return found

    @property
    def image(self) -> ClusterImage:
        return self.services(next(iter(self.running))).controller.image

    @property
    def controller(self) -> Services:
        return self.services(self.image.controller_id)

    async def create(self, name: str, *replicas: tuple[int, ...], **configs: str) -> None:
        """A topic whose partitions lie on these brokers; returns when every follower has shown itself."""
        topic = NewTopic(
            name,
            assignments=tuple(enumerate(replicas)),
            configs=tuple((k.replace("_", "."), v) for k, v in configs.items()),
        )
        (outcome,) = await self.controller.controller.create_topics([topic])
        assert outcome.error is None
        for index, brokers in enumerate(replicas):
            await self.leads(brokers[0], name, index)
            leader = self.replica(brokers[0], name, index)
            leader.log.ensure_loaded()
            await until(lambda leader=leader, count=len(brokers): len(in_step(leader)) == count - 1)  # type: ignore[misc]

    def replica(self, broker_id: int, topic: str, index: int = 0) -> Partition:
        found = self.services(broker_id).replicas.held(topic, index)
        assert found is not None
        return found

    async def leads(self, broker_id: int, topic: str, index: int = 0) -> Partition:
        replicas = self.services(broker_id).replicas
        await until(lambda: replicas.led(topic, index) is not None)
        return self.replica(broker_id, topic, index)

    async def write(self, leader: Partition, count: int = 3, timeout_s: float = 10.0) -> None:
        """Append and return when it is committed."""
        async with asyncio.timeout(timeout_s):
            await leader.wait_committed(leader.append(batch(count)).last_offset)


def in_step(partition: Partition) -> frozenset[int]:
    """The followers that a leader has heard of and that are in its ISR."""
    return frozenset() if partition.leadership is None else partition.leadership.in_step


async def until(holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.01)
