"""Quotas as connections keep them: who is counted, what a client is told, and how fast connections may come.

A client that used too much gets its answer at once, with `throttle_time_ms`, and then its connection is quiet for so
long: nothing is read from it, and what was read before waits; that it has gone is seen all the same. Of several quotas
the longest time counts. Produced bytes count when the request begins, and not when it is answered: a client that
pipelines is stopped before its next request.

`request_percentage` is the share of this broker's one event loop that requests of a client take (decoding, handling,
encoding; not while they wait): 100 is the whole loop. In Kafka 100 is one of its threads.

Connections: what an address opens too fast (`connection_creation_rate`) is held for a moment, unanswered, and then
closed, as in Kafka. Above `max.connection.creation.rate`, of the broker or of one listener, connections wait for their
turn: the kernel has accepted them, as it has where Kafka's acceptor sleeps, and they are read when their time has come.
The listener of the brokers, where it is one of its own, is not held to the broker's rate.

Not counted at all: other brokers, and logins.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from millrace.handlers.forwarding import is_from_broker
from millrace.security.metering import ClientQuotas, Meter, make_room
from millrace.security.quotas import CONNECTION_CREATION_RATE, Rate, canonical_address
from millrace.wire.hot import FetchReply, ThrottledProduce
from millrace.wire.keys import ApiKey
from millrace.wire.schema import Struct

if TYPE_CHECKING:
    from millrace.clock import Timer
    from millrace.config import BrokerConfig
    from millrace.handlers.context import RequestContext
    from millrace.handlers.registry import Api
    from millrace.server.counting import ListenerCounts
    from millrace.server.refusals import Refusals

MAX_WAITING: Final = 1024
"""Sockets that wait for their turn, or are held before they are closed; more are closed at once."""
EARLY_BYTES: Final = 4096
MAX_TURN_S: Final = 30.0
"""Who would have to wait longer for its turn is closed: it would give up, and come again."""
_UNLIMITED: Final = 2**31 - 1
_RATE: Final = "max.connection.creation.rate"
_UNCOUNTED: Final = frozenset({ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE})


def meter_of(quotas: ClientQuotas, api: Api, context: RequestContext) -> Meter | None:
    """How a request is counted; None where it is not."""
    if api.key in _UNCOUNTED or api.internal:
        return None
    meter = quotas.meter(context.session, context.header.client_id)
    return None if meter is None or is_from_broker(context) else meter


def told(response: Any, throttle_ms: int) -> Any:
    """An answer that says how long the client is not heard, where it has a place for that."""
    if isinstance(response, list):
        return ThrottledProduce(response, throttle_ms)
    if isinstance(response, FetchReply) or (isinstance(response, Struct) and hasattr(response, "throttle_time_ms")):
        response.throttle_time_ms = throttle_ms
    return response


def asked_for(response: Any) -> int:
    """How long the handler, or the controller that it asked, wants the client to be quiet."""
    return int(getattr(response, "throttle_time_ms", 0))


class Timed(Coroutine[Any, Any, Any]):
    """The work of a request, with its meter running while it does."""

    __slots__ = ("_meter", "_work")

    def __init__(self, work: Coroutine[Any, Any, Any], meter: Meter) -> None:
        self._work = work
        self._meter = meter

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._work.__await__()

    def send(self, value: Any) -> Any:
        self._meter.resume()
        try:
            return self._work.send(value)
        finally:
            self._meter.pause()

    def throw(self, *error: Any) -> Any:
        self._meter.resume()
        try:
            return self._work.throw(*error)
        finally:
            self._meter.pause()

    def close(self) -> None:
        self._work.close()


class Arrivals:
    """How fast connections may come: per address, per listener and in all. Owner: the event loop."""

    def __init__(self, config: BrokerConfig, quotas: ClientQuotas) -> None:
        self.clock = quotas.clock
        self.waiting = 0
        """Sockets that are no connections yet, or will never be."""
        self._quotas = quotas
        self._by_address: OrderedDict[str, Rate] = OrderedDict()
        self._lines: dict[str, list[_Line]] = {}
        everybody = _Line(quotas, lambda: config.get_int(_RATE))
        for each in config.listeners:
            line = _Line(quotas, partial(config.listener_value, each.name, _RATE))
            protected = len(config.listeners) > 1 and each.name == config.inter_broker_listener
            self._lines[each.name] = [line] if protected else [line, everybody]

    def __repr__(self) -> str:
        return f"Arrivals({self.waiting} waiting, {len(self._by_address)} addresses)"

    def are_limited(self, listener: str) -> bool:
        """Whether there is a limit at all."""
        return bool(self._quotas.table.addresses) or any(line.is_limited for line in self._lines[listener])

    def too_fast_s(self, address: str) -> float:
        """Count a connection of an address, or say how long the address has to be held off."""
        bound = self._quotas.table.connection_rate(address)
        if bound is None:
            return 0.0
        now = self.clock.monotonic()
        address = canonical_address(address)  # one that comes by IPv4 and IPv6 is one
        rate = self._by_address.get(address)
        if rate is None:
            make_room(self._by_address, now)
            rate = self._by_address[address] = Rate(self._quotas.windows)
        self._by_address.move_to_end(address)
        excess_s = rate.excess_s(bound, now, 1)
        if excess_s == 0:
            rate.add(1, now)
        return min(excess_s, self._quotas.windows.seconds)

    def note_waiting(self, seconds: float) -> None:
        """A connection has to wait for so long."""
        self._quotas.note_throttled(CONNECTION_CREATION_RATE, seconds)

    def turn_s(self, listener: str) -> float:
        """How long a connection has to wait for its turn."""
        return max(line.wait_s() for line in self._lines[listener])


class _Line:
    """Connections one behind the other: as an acceptor that sleeps after each that was too fast."""

    def __init__(self, quotas: ClientQuotas, bound: Callable[[], int]) -> None:
        self._quotas = quotas
        self._bound = bound
        self._rate = Rate(quotas.windows)
        self._free_at = 0.0
        """When the last one in line has had its turn."""

    @property
    def is_limited(self) -> bool:
        return self._bound() < _UNLIMITED

    def wait_s(self) -> float:
        bound = self._bound()
        if bound >= _UNLIMITED:
            return 0.0
        now = self._quotas.clock.monotonic()
        if self._free_at - now > MAX_TURN_S:
            return self._free_at - now
        turn_at = max(now, self._free_at)
        self._rate.add(1, turn_at)
        self._free_at = turn_at + min(self._rate.excess_s(bound, turn_at), self._quotas.windows.seconds)
        return self._free_at - now


class Arrival(asyncio.BufferedProtocol):
    """An accepted socket until its turn comes, or until it is closed because it came too fast. It is not read.

    So much happens before anything that costs: a TLS handshake, a login.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        listener: str,
        enter: Callable[[], asyncio.BufferedProtocol],
        on_over: Callable[[Arrival], None],
        refusals: Refusals,
        counts: ListenerCounts,
    ) -> None:
        """`enter` makes the protocol that takes over; `on_over` is told that it has, or that the peer is gone."""
        self._arrivals = arrivals
        self._listener = listener
        self._enter = enter
        self._on_over = on_over
        self._refusals = refusals
        self._counts = counts
        self._transport: asyncio.Transport | None = None
        self._timer: Timer | None = None
        self._early = bytearray()
        self._room = bytearray()

    def __repr__(self) -> str:
        return f"Arrival({self._listener}, {'waiting' if self._timer is not None else 'new'})"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        host = str(peer[0]) if isinstance(peer, tuple) and peer else "local"
        held_s = self._arrivals.too_fast_s(host)
        wait_s = held_s or self._arrivals.turn_s(self._listener)
        if wait_s > MAX_TURN_S or (wait_s and self._arrivals.waiting >= MAX_WAITING):
            text = "connection from %s refused: others wait, its turn would be in %.0f s"
            self._refusals.tell(host, text, host, wait_s, level=logging.WARNING)
            self._counts.refused_rate += 1
            self.abort()
        elif wait_s:
            self._arrivals.note_waiting(wait_s)
            if held_s:
                self._counts.refused_rate += 1
                self._refusals.tell(host, "connection from %s came too fast: closed after %.1f s", host, held_s)
            self._arrivals.waiting += 1
            clock = self._arrivals.clock
            self._timer = clock.call_later(wait_s, self.abort if held_s else self._let_in)
            # uvloop begins to read after this call, whatever is said before.
            clock.call_later(0, self._hold_reading)
        else:
            self._let_in()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._end()

    def get_buffer(self, sizehint: int) -> bytearray:
        del sizehint
        self._room = bytearray(EARLY_BYTES)
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        self._early += self._room[:nbytes]

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _hold_reading(self) -> None:
        if self._timer is not None and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def _let_in(self) -> None:
        transport = self._transport
        waited = self._timer is not None
        self._end()
        if transport is None or transport.is_closing():
            return
        connection = self._enter()
        transport.set_protocol(connection)
        if waited:
            transport.resume_reading()
        connection.connection_made(transport)
        early = memoryview(self._early)
        while early and not transport.is_closing():
            room = memoryview(connection.get_buffer(len(early)))
            taken = min(len(room), len(early))
            room[:taken] = early[:taken]
            connection.buffer_updated(taken)
            early = early[taken:]

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._arrivals.waiting -= 1
        self._transport = None
        self._on_over(self)
