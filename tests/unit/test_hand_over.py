"""What a broker that stops does for its clients: it goes on answering for a moment, and says who leads now."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from millrace.broker import HAND_OVER_S, Broker
from millrace.client.connection import Connection
from millrace.clock import SystemClock
from millrace.cluster.planning import NewTopic
from millrace.config import BrokerConfig
from millrace.errors import ErrorCode
from millrace.metadata.embedded import Database, EmbeddedStore
from millrace.wire.messages.cluster import MetadataRequest
from millrace.wire.messages.produce import ProduceRequest
from support.batches import batch
from support.one_loop import Brokers


class HeldClock(SystemClock):
    """The moment that clients are given lasts until it is `over`."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.over = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        if seconds == HAND_OVER_S:
            self.began.set()
            await self.over.wait()
        else:
            await super().sleep(seconds)


@asynccontextmanager
async def two_brokers(home: Path) -> AsyncIterator[tuple[Broker, Broker, HeldClock]]:
    """Broker 1 leads the only partition of "t" and has the clock."""
    database, clock = Database(), HeldClock()
    brokers = [
        Broker(
            BrokerConfig(
                {
                    "broker.id": str(broker_id),
                    "listeners": "PLAINTEXT://127.0.0.1:0",
                    "log.dirs": str(home / str(broker_id)),
                    "min.insync.replicas": "1",
                }
            ),
            store=EmbeddedStore(database),
            clock=clock if broker_id == 1 else None,
        )
        for broker_id in (1, 2)
    ]
    await database.attach()
    try:
        for broker in brokers:
            await broker.start()
        services = brokers[0].services
        assert services is not None
        await services.controller.create_topics([NewTopic("t", assignments=((0, (1, 2)),))])
        yield brokers[0], brokers[1], clock
    finally:
        clock.over.set()
        for broker in brokers:
            await broker.stop(linger=False)
        await database.detach()


def produce() -> ProduceRequest:
    item = ProduceRequest.PartitionProduceData(index=0, records=batch(1))
    topic = ProduceRequest.TopicProduceData(name="t", partition_data=[item])
    return ProduceRequest(acks=-1, timeout_ms=10_000, topic_data=[topic])


async def test_clients_are_told_who_leads_before_the_door_closes(tmp_path: Path) -> None:
    async with two_brokers(tmp_path) as (leaving, other, clock):
        client = await Connection.open("127.0.0.1", leaving.port, client_id="test", timeout_ms=10_000)
        async with client:
            stopping = asyncio.create_task(leaving.stop())
            await clock.began.wait()
            response = await client.request(produce(), 12)
            (refused,) = response.responses[0].partition_responses
            assert refused.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
            assert (refused.current_leader.leader_id, refused.current_leader.leader_epoch) == (2, 1)
            assert [(each.node_id, each.port) for each in response.node_endpoints] == [(2, other.port)]
            late = await Connection.open("127.0.0.1", leaving.port, client_id="late", timeout_ms=10_000)
            async with late:
                wanted = [MetadataRequest.MetadataRequestTopic(name="t")]
                told = await late.request(MetadataRequest(topics=wanted), 12)
                assert told.topics[0].partitions[0].leader_id == 2
            clock.over.set()
            await stopping
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", leaving.port)


async def test_nobody_is_waited_for_when_the_whole_cluster_stops(tmp_path: Path) -> None:
    async with two_brokers(tmp_path) as (leaving, other, clock):
        await leaving.stop(linger=False)
        await other.stop()
        assert not clock.began.is_set()


@pytest.mark.parametrize(("enabled", "leader"), [("true", 2), ("false", 1)])
async def test_leadership_is_handed_over_only_where_that_is_wanted(tmp_path: Path, enabled: str, leader: int) -> None:
    async with Brokers(tmp_path, 2, settings={"controlled.shutdown.enable": enabled}) as brokers:
        await brokers.create("t", (1, 2))
        controller = brokers.services(1).controller
        await brokers.stop(1)
        topic = controller.image.topic("t")
        assert topic is not None
        assert topic.partitions[0].leader == leader, "as the broker that has stopped saw it last"
