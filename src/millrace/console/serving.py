"""The console as a process: it listens, says where, and ends cleanly with a signal."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
from collections.abc import Callable
from typing import Final

import uvicorn

from millrace.console.app import create_app
from millrace.console.settings import ConsoleSettings, Login
from millrace.errors import ConfigError

GRACE_S: Final = 3
"""How long open streams of events are waited for at the end."""

logger = logging.getLogger(__name__)


def listen(settings: ConsoleSettings) -> socket.socket:
    """The socket on which it will answer; ConfigError where that cannot be."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((settings.host.strip("[]"), settings.port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        hint = "; choose another with --listen HOST:PORT, port 0 for a free one" if settings.port else ""
        raise ConfigError(
            f"the console cannot listen on {settings.host}:{settings.port}: {error.strerror or error}{hint}"
        ) from None
    return listening


def address_of(settings: ConsoleSettings, port: int) -> str:
    """What a person opens."""
    if settings.public_url:
        return settings.public_url
    host = settings.host.strip("[]")
    name = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"{'https' if settings.uses_tls else 'http'}://{name}:{port}"


def serve(settings: ConsoleSettings, *, ready: Callable[[str], object]) -> None:
    """Serve until SIGINT or SIGTERM; `ready` is called with the address once connections are taken."""
    with listen(settings) as listening:
        port = listening.getsockname()[1]
        settings = dataclasses.replace(settings, port=port)
        config = uvicorn.Config(
            create_app(settings),
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=True,
            timeout_graceful_shutdown=GRACE_S,
            ssl_certfile=settings.certificate,
            ssl_keyfile=settings.key,
            lifespan="on",
            proxy_headers=False,
            ws="none",
        )
        server = _Announced(config, lambda: ready(address_of(settings, port)))
        try:
            server.run(sockets=[listening])
        except KeyboardInterrupt:
            # uvicorn has shut down, and raises the signal again for whoever comes after it.
            logger.info("the console has stopped")


class _Announced(uvicorn.Server):
    """Says when it is there."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], object]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            await asyncio.to_thread(self._ready)


def login_text(settings: ConsoleSettings) -> str:
    """What a person needs to know to get in; empty if nothing is asked."""
    if settings.login is Login.TOKEN:
        return f"token={settings.token}"
    if settings.login is Login.BROKERS:
        return "log in as a user of the brokers"
    return ""
