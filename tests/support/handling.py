"""Calls handlers with a controller behind them, through the codec both ways, as a client would see it.

`handling` has a running controller on a store in memory, `deciding` one that lives in its image only.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from millrace.clock import SystemClock
from millrace.cluster.controller import Controller
from millrace.cluster.elections import LogEnd, PartitionKey
from millrace.cluster.image import ClusterImage
from millrace.cluster.planning import Plan
from millrace.cluster.presence import Presence
from millrace.cluster.survey import Questions, Survey
from millrace.config import BrokerConfig
from millrace.handlers import registry
from millrace.handlers.context import RequestContext, Services
from millrace.metadata.embedded import EmbeddedStore
from millrace.metadata.store import MetadataStore
from millrace.security.authorizer import NO_AUTHORIZER
from millrace.security.metering import ClientQuotas
from millrace.security.sessions import ANONYMOUS, Session
from millrace.wire.codec import decode, encode
from millrace.wire.frame import RequestHeader
from support.metadata import running_controller

T = TypeVar("T")


@dataclass
class Handling:
    """A controller, and services around it as far as the handlers of metadata need them."""

    controller: Controller
    services: Services

    async def call(
        self,
        handler: Callable[..., Any],
        request: Any,
        version: int,
        *,
        listener: str = "PLAINTEXT",
        client_id: str = "test",
        session: Session = ANONYMOUS,
    ) -> Any:
        """The response to `request`, both of them encoded and decoded at `version`."""
        sent, _ = decode(type(request), version, memoryview(encode(request, version)), 0)
        context = RequestContext(
            broker=self.services,
            header=RequestHeader(request.api_key, version, 1, client_id),
            version=version,
            client_host="127.0.0.1",
            listener=listener,
            needs=registry.load()[request.api_key].needs,
            session=session,
        )
        answer = handler(context, sent)
        if inspect.isawaitable(answer):
            answer = await answer
        received, _ = decode(type(answer), version, memoryview(encode(answer, version)), 0)
        return received


@asynccontextmanager
async def handling(
    settings: Mapping[str, str] | None = None,
    *,
    store: MetadataStore | None = None,
    deltas_per_snapshot: int = 1000,
    **services: Any,
) -> AsyncIterator[Handling]:
    """A running controller with its services; `services` adds or replaces some."""
    async with running_controller(store, settings, deltas_per_snapshot=deltas_per_snapshot) as controller:
        parts: dict[str, Any] = {
            "config": controller._config,
            "clock": SystemClock(),
            "broker_id": controller.broker_id,
            "controller": controller,
            "advertised": lambda _listener: ("told.example", 19092),
            "presence": Presence(SystemClock()),
            "authorizer": NO_AUTHORIZER,
            "audit": None,
            "quotas": ClientQuotas(),
            **services,
        }

        class FakeServices(SimpleNamespace):
            @property
            def image(self) -> Any:
                return controller.image

            @property
            def cluster_id(self) -> str:
                return controller.image.cluster_id

        yield Handling(controller, cast("Services", FakeServices(**parts)))


class Deciding(Controller):
    """A controller without a store or peers: what it decides is in its image at once. Broker 1 of a given image."""

    is_controller = True
    broker_epoch = 101

    def __init__(self, image: ClusterImage, config: BrokerConfig) -> None:
        super().__init__(EmbeddedStore(), config)
        self._view.image = image
        self.log_ends: dict[int, LogEnd | None] = {}
        """What brokers say of their logs."""
        self.turns: Iterator[int] = itertools.cycle(sorted(image.brokers))
        """Who answers next, where all brokers are at one address."""
        self._ask_log_ends = self._survey

    async def _survey(self, questions: Questions) -> Survey:
        ends: dict[PartitionKey, dict[int, LogEnd | None]] = {
            key: {each: self.log_ends.get(each, LogEnd(0, 0)) for each in brokers} for key, brokers in questions.items()
        }
        return Survey(ends, {each.broker_id: each.broker_epoch for each in self.image.brokers.values()})

    async def change(self, plan: Callable[[ClusterImage], Plan[T]]) -> T:
        made = plan(self.image)
        if made.changes:
            self._view.image = self.image.apply(made.changes)
        return made.results


def deciding(image: ClusterImage, settings: Mapping[str, str] | None = None) -> Handling:
    """Handlers on the controller of a cluster of several brokers, as it is in `image`."""
    config = BrokerConfig(dict(settings or {}))
    controller = Deciding(image, config)

    class FakeServices(SimpleNamespace):
        @property
        def image(self) -> ClusterImage:
            return controller.image

    services = FakeServices(
        config=config,
        clock=SystemClock(),
        broker_id=1,
        controller=controller,
        advertised=lambda _listener: ("told.example", 19092),
        presence=Presence(SystemClock()),
        authorizer=NO_AUTHORIZER,
        audit=None,
        quotas=ClientQuotas(),
    )
    return Handling(controller, cast("Services", services))
