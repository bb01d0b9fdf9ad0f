"""A log directory that fails takes its partitions' leadership with it, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from millrace.broker import Broker
from millrace.cluster.planning import NewTopic
from millrace.config import BrokerConfig
from millrace.errors import ApiError
from millrace.metadata.embedded import Database, EmbeddedStore
from millrace.model import TopicPartition
from millrace.replication.partition import Partition
from support.batches import batch
from support.disk import Fault, FaultyFiles
from support.one_loop import in_step


class Trio:
    """Three brokers on one loop; the first has two log directories on a disk that can be told to fail."""

    def __init__(self, home: Path) -> None:
        self.database = Database()
        self.files = FaultyFiles(home / "1")
        self.brokers = [self._broker(home, broker_id) for broker_id in (1, 2, 3)]

    def _broker(self, home: Path, broker_id: int) -> Broker:
        root = home / str(broker_id)
        root.mkdir()
        config = BrokerConfig(
            {
                "broker.id": str(broker_id),
                "listeners": "PLAINTEXT://127.0.0.1:0",
                "log.dirs": f"{root / 'a'},{root / 'b'}",
                "default.replication.factor": "3",
                "min.insync.replicas": "2",
                "flush.mode": "group",
            }
        )
        files = self.files if broker_id == 1 else None
        return Broker(config, store=EmbeddedStore(self.database), files=files)

    def partition(self, broker_id: int, index: int) -> Partition:
        services = self.brokers[broker_id - 1].services
        assert services is not None
        found = services.replicas.held("t", index)
        assert found is not None
        return found

    def leader_of(self, index: int) -> int:
        return self.partition(2, index).state.leader


@pytest.fixture
async def trio(tmp_path: Path) -> AsyncIterator[Trio]:
    made = Trio(tmp_path)
    await made.database.attach()
    started = []
    try:
        for broker in made.brokers:
            await broker.start()
            started.append(broker)
        yield made
    finally:
        for broker in reversed(started):
            await broker.stop()
        await made.database.detach()


async def until(holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.01)


async def test_other_replicas_lead_what_a_failed_directory_held(trio: Trio) -> None:
    services = trio.brokers[0].services
    assert services is not None
    await services.controller.create_topics([NewTopic("t", assignments=((0, (1, 2, 3)), (1, (1, 3, 2))))])
    await until(lambda: all(len(in_step(trio.partition(1, index))) == 2 for index in (0, 1)))
    for index in (0, 1):
        await trio.partition(1, index).wait_committed(trio.partition(1, index).append(batch(5)).last_offset)
    places = {
        index: next(each for each in services.log_dirs.directories if TopicPartition("t", index) in each.logs)
        for index in (0, 1)
    }
    assert places[0] is not places[1]

    trio.files.faults.append(Fault("datasync", match=str(places[0].path), times=-1))
    waiting = trio.partition(1, 0)
    appended = waiting.append(batch(5))
    with pytest.raises(ApiError):
        await waiting.wait_committed(appended.last_offset)
    await until(lambda: trio.leader_of(0) in (2, 3))
    assert trio.leader_of(1) == 1
    assert places[0].failure is not None
    assert places[1].failure is None
    # What it still remembers of the log that failed is nothing to elect it by.
    with pytest.raises(ApiError, match="offline"):
        services.replicas.log_end(waiting.topic_id, 0)
    assert services.replicas.log_end(waiting.topic_id, 1)[1] == 5

    leader = trio.partition(trio.leader_of(0), 0)
    await until(lambda: leader.is_leader)
    await leader.wait_committed(leader.append(batch(3)).last_offset)
    other = trio.partition(1, 1)
    await other.wait_committed(other.append(batch(3)).last_offset)
