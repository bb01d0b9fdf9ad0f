"""Accepting sockets: one listener per configured endpoint, and the sweep that closes idle connections.

Owner of its connections and of the tasks that wait on their behalf. What is not here: what a connection does, and what
TLS does below it (`tls`).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from millrace.errors import ConfigError, MillraceError
from millrace.security.ocsf import Caller
from millrace.security.sessions import ANONYMOUS
from millrace.server.connection import Connection
from millrace.server.counting import ListenerCounts
from millrace.server.refusals import Refusals
from millrace.server.throttling import Arrival, Arrivals
from millrace.server.tls import HandshakeLine, TlsTransport
from millrace.tasks import Tasks, cancel

if TYPE_CHECKING:
    from millrace.clock import Clock
    from millrace.config import BrokerConfig
    from millrace.handlers.context import Services
    from millrace.handlers.registry import Api
    from millrace.security.tls import ServerTls
    from millrace.server.answers import AnswerRoom
    from millrace.server.flow import Admission, MemoryBudget
    from millrace.server.login import LoginRules

logger = logging.getLogger(__name__)

IDLE_SWEEPS: Final = 4
"""A connection is closed after between one and one and a quarter of connections.max.idle.ms."""


@dataclass(frozen=True, slots=True)
class SocketSettings:
    """How sockets are made; those that are accepted have the buffers of the one that listens."""

    backlog: int = 1024
    """Connections that may wait to be accepted."""
    send_buffer_bytes: int = -1
    """-1: the operating system's own, which grow as they are needed; ones that are given do not."""
    receive_buffer_bytes: int = -1

    @classmethod
    def from_config(cls, config: BrokerConfig) -> SocketSettings:
        return cls(
            backlog=config.get_int("socket.listen.backlog.size"),
            send_buffer_bytes=config.get_int("socket.send.buffer.bytes"),
            receive_buffer_bytes=config.get_int("socket.receive.buffer.bytes"),
        )

    def apply(self, listening: socket.socket) -> None:
        if self.send_buffer_bytes != -1:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.send_buffer_bytes)
        if self.receive_buffer_bytes != -1:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.receive_buffer_bytes)


class Listener:
    """One listening socket and the connections that came through it."""

    def __init__(
        self,
        *,
        name: str,
        host: str,
        port: int,
        apis: Mapping[int, Api],
        services: Services,
        budget: MemoryBudget,
        answers: AnswerRoom,
        limits: Admission,
        arrivals: Arrivals,
        max_frame_bytes: int,
        max_idle_ms: int,
        sockets: SocketSettings,
        clock: Clock,
        login_rules: LoginRules | None = None,
        tls: ServerTls | None = None,
    ) -> None:
        self.name = name
        self.host = host
        self.port = port
        self._apis = apis
        self._services = services
        self._budget = budget
        self._answers = answers
        self._limits = limits
        self._arrivals = arrivals
        self._max_frame_bytes = max_frame_bytes
        self._max_idle_ms = max_idle_ms
        self._socket_settings = sockets
        self._clock = clock
        self._login_rules = login_rules
        self.tls = tls
        """None: bytes go over the network as they are."""
        self._arriving: set[TlsTransport | Arrival] = set()
        """Sockets that are not connections yet."""
        self._handshake_line = HandshakeLine()
        self._refusals = Refusals(clock)
        self._sockets: list[socket.socket] = []
        self._servers: list[asyncio.Server] = []
        self._sweeper: asyncio.Task[None] | None = None
        self._tasks = Tasks(clock, told=(MillraceError,))
        """Requests that wait, and the sweep."""
        self.connections: set[Connection] = set()
        self.counts = ListenerCounts()

    def __repr__(self) -> str:
        return f"Listener({self.name}://{self.host}:{self.port}, {len(self.connections)} connections)"

    def bind(self) -> None:
        """Take the address; `port` is the real one afterwards. Raises ConfigError where it cannot be had.

        Clients may connect from now on; they are answered once `serve` is called.
        """
        try:
            addresses = socket.getaddrinfo(
                self.host or None, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        except OSError as error:
            raise ConfigError(f"cannot listen on {self.host}: {error.strerror or error}") from None
        failure: OSError | None = None
        for family, _, _, _, address in addresses:
            try:
                # A host with two addresses listens on the same port of both.
                sock = socket.create_server(
                    (address[0], self.port), family=family, backlog=self._socket_settings.backlog
                )
            except OSError as error:
                failure = error
                continue
            sock.setblocking(False)
            self._socket_settings.apply(sock)
            self._sockets.append(sock)
            self.port = int(sock.getsockname()[1])
        if self._sockets:
            return
        assert failure is not None
        if failure.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {self.port} is already in use on {self.host or 'this machine'}: choose another")
        raise ConfigError(f"cannot listen on {self.host or '*'}:{self.port}: {failure.strerror or failure}")

    async def serve(self) -> None:
        """Accept and answer."""
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            self._servers.append(
                await loop.create_server(self._accept, sock=sock, backlog=self._socket_settings.backlog)
            )
        self._sweeper = self._tasks.keep(f"idle-sweep-{self.name}", self._sweep)

    def _accept(self) -> asyncio.BaseProtocol:
        enter = self._connect if self.tls is None else self._shake_hands
        if not self._arrivals.are_limited(self.name):
            return enter()
        arrival = Arrival(self._arrivals, self.name, enter, self._arriving.discard, self._refusals, self.counts)
        self._arriving.add(arrival)
        return arrival

    def _connect(self) -> Connection:
        connection = Connection(
            apis=self._apis,
            services=self._services,
            listener=self.name,
            budget=self._budget,
            answers=self._answers,
            limits=self._limits if self.tls is None else None,
            refusals=self._refusals,
            counts=self.counts,
            # Where there is a login, that says who somebody is, and not the certificate.
            mapper=None if self.tls is None or self._login_rules is not None else self.tls.mapper,
            max_frame_bytes=self._max_frame_bytes,
            spawn=self._spawn,
            on_closed=self.connections.discard,
            login_rules=self._login_rules,
        )
        self.connections.add(connection)
        return connection

    def _shake_hands(self) -> TlsTransport:
        assert self.tls is not None
        tls = self.tls
        transport = TlsTransport(
            context=lambda: tls.context,
            connect=self._connect,
            limits=self._limits,
            line=self._handshake_line,
            clock=self._clock,
            refusals=self._refusals,
            counts=self.counts,
            on_handshake_over=self._arriving.discard,
            on_refused=self._handshake_refused,
        )
        self._arriving.add(transport)
        return transport

    def _handshake_refused(self, host: str, reason: str) -> None:
        """Perhaps a certificate that is not good enough; the client has not said who it is."""
        if self._services.audit is not None:
            self._services.audit.login_failed(Caller(ANONYMOUS.principal, host, self.name), f"TLS: {reason}")

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self._tasks.start("request", work)

    async def _sweep(self) -> None:
        """Close connections that sent no whole request for connections.max.idle.ms."""
        while True:
            await self._clock.sleep(max(self._max_idle_ms / 1000 / IDLE_SWEEPS, 0.05))
            for connection in tuple(self.connections):
                connection.idle_marks = connection.idle_marks + 1 if connection.idle_since_mark else 0
                connection.idle_since_mark = not connection.waiting
                if connection.idle_marks > IDLE_SWEEPS:
                    logger.info("closing %r: idle for %d ms", connection, self._max_idle_ms)
                    connection.abort()  # not `close`: what a peer does not read would never have left

    def stop_accepting(self) -> None:
        for server in self._servers:
            server.close()
        for sock in self._sockets:
            sock.close()
        self._servers.clear()
        self._sockets.clear()

    async def stop(self, grace_s: float) -> None:
        """Answer what has begun, for at most `grace_s`; then close everything."""
        self.stop_accepting()
        if self._sweeper is not None:
            cancel(self._sweeper)
        for arriving in tuple(self._arriving):
            arriving.abort()
        for connection in tuple(self.connections):
            connection.drain()
        await self._tasks.ended(grace_s)
        for connection in tuple(self.connections):
            connection.abort()
        await self._tasks.stop()
        self._refusals.stop()
