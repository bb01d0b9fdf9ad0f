"""Calls handlers with a controller behind them, through the codec both ways, as a client would see it."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from millrace.cluster.controller import Controller
from millrace.handlers.context import RequestContext, Services
from millrace.wire.codec import decode, encode
from support.metadata import running_controller


@dataclass
class Handling:
    """A controller, and services around it as far as the handlers of metadata need them."""

    controller: Controller
    services: Services

    async def call(
        self, handler: Callable[..., Any], request: Any, version: int, *, listener: str = "PLAINTEXT"
    ) -> Any:
        """The response to `request`, both of them encoded and decoded at `version`."""
        sent, _ = decode(type(request), version, memoryview(encode(request, version)), 0)
        context = RequestContext(
            broker=self.services, header=cast("Any", None), version=version, client_host="127.0.0.1", listener=listener
        )
        answer = handler(context, sent)
        if inspect.isawaitable(answer):
            answer = await answer
        received, _ = decode(type(answer), version, memoryview(encode(answer, version)), 0)
        return received


@asynccontextmanager
async def handling(settings: Mapping[str, str] | None = None, **services: Any) -> AsyncIterator[Handling]:
    """A running controller with its services; `services` adds or replaces some."""
    async with running_controller(settings=settings) as controller:
        parts: dict[str, Any] = {
            "config": controller._config,
            "broker_id": controller.broker_id,
            "controller": controller,
            "advertised": lambda _listener: ("told.example", 19092),
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
