"""Calls the handlers of groups and offsets with a coordinator behind them, through the codec both ways."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from millrace.clock import ManualClock
from millrace.cluster.image import ClusterImage
from millrace.cluster.planning import NewTopic
from millrace.groups.coordinator import GroupCoordinator
from millrace.groups.modern.groups import GroupDependencies
from millrace.groups.settings import GroupSettings, GroupTimes
from millrace.handlers import registry
from millrace.handlers.context import RequestContext, Services
from millrace.metadata.deltas import ResourceType
from millrace.replication.state_topic import yield_to_loop
from millrace.wire.codec import decode, encode
from millrace.wire.frame import RequestHeader
from support.handling import Handling, handling
from support.state_topic import FakeTopic

PARTITIONS = 3


@dataclass
class GroupHandling:
    """A controller and a group coordinator on a clock and a log that the test holds."""

    handling: Handling
    groups: GroupCoordinator
    clock: ManualClock
    log: FakeTopic

    async def call(self, handler: Callable[..., Any], request: Any, version: int, *, client_id: str = "app") -> Any:
        """The response to `request`, both of them encoded and decoded at `version`."""
        sent, _ = decode(type(request), version, memoryview(encode(request, version)), 0)
        context = RequestContext(
            broker=self.handling.services,
            header=RequestHeader(int(request.api_key), version, 1, client_id),
            version=version,
            client_host="10.0.0.7",
            listener="PLAINTEXT",
            needs=registry.load()[request.api_key].needs,
        )
        answer = handler(context, sent)
        if inspect.isawaitable(answer):
            answer = await answer
        received, _ = decode(type(answer), version, memoryview(encode(answer, version)), 0)
        return received

    def start(self, handler: Callable[..., Any], request: Any, version: int, **changes: Any) -> asyncio.Future[Any]:
        """A request that waits."""
        return asyncio.ensure_future(self.call(handler, request, version, **changes))

    async def create_topic(self, name: str, partitions: int) -> None:
        """A topic of the cluster image."""
        (outcome,) = await self.handling.controller.create_topics([NewTopic(name, partitions, 1)])
        assert outcome.error is None, outcome

    async def advance(self, seconds: float) -> None:
        """Let everything come to rest, move time, and again."""
        for _ in range(20):
            await yield_to_loop()
        self.clock.advance(seconds)
        for _ in range(20):
            await yield_to_loop()


@asynccontextmanager
async def group_handling() -> AsyncIterator[GroupHandling]:
    clock, log = ManualClock(), FakeTopic(PARTITIONS)
    services: list[Services] = []
    groups = GroupCoordinator(
        clock=clock,
        settings=GroupSettings(),
        state_topic=log.topic,
        dependencies=GroupDependencies(
            image=lambda: services[0].image if services else ClusterImage(),
            times=lambda group_id: GroupTimes.of_consumers(
                services[0].image.config(ResourceType.GROUP, group_id), services[0].config
            ),
        ),
    )
    settings = {"offsets.topic.num.partitions": str(PARTITIONS), "offsets.topic.replication.factor": "1"}
    async with handling(settings, groups=groups, clock=clock) as on:
        services.append(on.services)
        for index in range(PARTITIONS):
            groups.partition_became_leader(index)
        await groups.loaded()
        yield GroupHandling(on, groups, clock, log)
        await groups.stop()
