"""Quotas on a connection with a fake transport: what is counted, what is told, and for how long it is quiet."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from millrace.clock import ManualClock
from millrace.cluster.dialer import client_id
from millrace.config import BrokerConfig
from millrace.errors import ApiError, ErrorCode
from millrace.handlers.context import RequestContext
from millrace.handlers.needs import cluster
from millrace.handlers.promise import Promise
from millrace.handlers.registry import Api
from millrace.security.acls import AclTable, Operation
from millrace.security.authorizer import Authorizer
from millrace.security.metering import ClientQuotas
from millrace.security.quotas import CLIENT_ID, IP, USER, quota_entity
from millrace.server import connection as connection_module
from millrace.server import throttling
from millrace.server.connection import Connection
from millrace.server.counting import ListenerCounts
from millrace.server.refusals import Refusals
from millrace.server.throttling import MAX_TURN_S, Arrival, Arrivals
from millrace.testing import Cluster
from millrace.wire.frame import decode_response, encode_response
from millrace.wire.hot import ProduceResult, write_produce
from millrace.wire.keys import ApiKey
from millrace.wire.messages.groups import HeartbeatResponse
from millrace.wire.messages.produce import ProduceResponse
from millrace.wire.messages.quotas import AlterClientQuotasRequest
from support.certificates import Pki
from support.raw import RawClient, batch, produce_request
from support.streams import receive
from support.transports import FakeTransport
from support.up import wait_for
from unit.server.test_connection import Rig, make_api, request, run_ready

PRODUCE, CONSUME, TIME = "producer_byte_rate", "consumer_byte_rate", "request_percentage"


class Metered(Rig):
    """A connection under quotas, with time under the test's control."""

    def __init__(self, *apis: Api, **values: float) -> None:
        self.clock = ManualClock()
        self.quotas = ClientQuotas(clock=self.clock)
        if values:
            self.quotas.take({quota_entity({USER: "ANONYMOUS"}): values})
        super().__init__(*apis, clock=self.clock, quotas=self.quotas)

    def ask(self, correlation_id: int, key: ApiKey, *, size: int = 0, client_id: bytes = b"app") -> None:
        version = 3 if key == ApiKey.PRODUCE else 2
        head = struct.pack(">hhih", key, version, correlation_id, len(client_id)) + client_id
        payload = head + bytes(max(size - len(head), 0))
        receive(self.connection, struct.pack(">i", len(payload)) + payload)

    def throttles(self, response: type[Any], version: int) -> list[int]:
        """What the answers so far have told the client."""
        told, data = [], bytes(self.transport.written)
        while data:
            (size,) = struct.unpack_from(">i", data)
            told.append(decode_response(response, version, data[4 : 4 + size])[1].throttle_time_ms)
            data = data[4 + size :]
        return told


def heartbeats(handler: Any, **settings: Any) -> Api:
    def encode(correlation_id: int, version: int, response: Any) -> tuple[bytes]:
        return (encode_response(correlation_id, version, response),)

    return replace(make_api(handler, **settings), encode=encode)


def produces(handler: Any) -> Api:
    return replace(make_api(handler, key=ApiKey.PRODUCE, overlaps=True), encode=write_produce)


def appended(_context: RequestContext, _request: bytes) -> Any:
    return [("t", [ProduceResult(0, 0, 7)])]


async def test_a_producer_beyond_its_quota_is_answered_at_once_and_then_not_heard() -> None:
    rig = Metered(produces(appended), producer_byte_rate=100.0)
    rig.ask(1, ApiKey.PRODUCE, size=900)
    assert rig.transport.reading and rig.throttles(ProduceResponse, 3) == [0]
    rig.ask(2, ApiKey.PRODUCE, size=300)
    assert rig.throttles(ProduceResponse, 3) == [0, 2000] and not rig.transport.reading
    assert rig.connection.waiting, "who may not speak is not idle"
    rig.ask(3, ApiKey.PRODUCE, size=50)  # it was received with the other
    rig.clock.advance(1.9)
    assert len(rig.throttles(ProduceResponse, 3)) == 2
    rig.clock.advance(0.2)
    assert rig.throttles(ProduceResponse, 3) == [0, 2000, 2500], "1250 in the ten seconds that are assumed"
    assert not rig.transport.reading
    rig.clock.advance(2.5)
    assert rig.transport.reading and not rig.connection.waiting


async def test_a_pipelining_producer_is_stopped_before_its_answer_is_ready() -> None:
    begun: list[Promise[Any]] = []

    def wait(_context: RequestContext, _request: bytes) -> Promise[Any]:
        begun.append(Promise())
        return begun[-1]

    rig = Metered(produces(wait), producer_byte_rate=100.0)
    for number in range(4):
        rig.ask(number, ApiKey.PRODUCE, size=600)
    assert len(begun) == 2 and not rig.transport.reading
    begun[0].keep(appended(None, b""))  # type: ignore[arg-type]
    begun[1].keep(appended(None, b""))  # type: ignore[arg-type]
    await run_ready()
    assert rig.throttles(ProduceResponse, 3) == [0, 2000], "answers leave while it is quiet"
    rig.clock.advance(2.0)
    assert len(begun) == 3


async def test_no_reply_is_no_way_around_the_quota() -> None:
    rig = Metered(produces(lambda _context, _request: None), producer_byte_rate=100.0, request_percentage=0.0001)
    rig.ask(1, ApiKey.PRODUCE, size=1200)
    assert not rig.transport.written and not rig.transport.reading
    rig.clock.advance(2.0)
    assert rig.transport.reading


async def test_time_is_counted_for_every_request_and_not_while_it_waits() -> None:
    gate = asyncio.Event()

    async def slow(context: RequestContext, _request: bytes) -> HeartbeatResponse:
        rig.clock.advance(0.3)
        await gate.wait()
        rig.clock.advance(0.3)
        return HeartbeatResponse()

    rig = Metered(heartbeats(slow), request_percentage=5.0)
    rig.ask(1, ApiKey.HEARTBEAT)
    await run_ready()
    rig.clock.advance(100.0)
    gate.set()
    await run_ready()
    assert rig.throttles(HeartbeatResponse, 2) == [1000], "0.6 s in ten are 6 percent: capped at one window"
    assert not rig.transport.reading
    rig.clock.advance(1.0)
    assert rig.transport.reading


async def test_a_request_that_fails_has_taken_time_as_well() -> None:
    def fails(_context: RequestContext, _request: bytes) -> Any:
        rig.clock.advance(1.0)
        raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID)

    rig = Metered(heartbeats(fails), request_percentage=5.0)
    rig.ask(1, ApiKey.HEARTBEAT)
    assert rig.throttles(HeartbeatResponse, 2) == [1000] and not rig.transport.reading


async def test_what_a_handler_asks_for_is_kept() -> None:
    rig = Metered(heartbeats(lambda *_: HeartbeatResponse(throttle_time_ms=700)), producer_byte_rate=1.0)
    rig.ask(1, ApiKey.HEARTBEAT)
    assert rig.throttles(HeartbeatResponse, 2) == [700] and not rig.transport.reading
    rig.clock.advance(0.7)
    assert rig.transport.reading


@pytest.mark.parametrize("has_right", [True, False])
async def test_other_brokers_are_not_counted_and_who_only_says_so_is(*, has_right: bool) -> None:
    rig = Metered(produces(appended), producer_byte_rate=1.0)
    super_users = frozenset({"User:ANONYMOUS"}) if has_right else frozenset()
    rig.connection._services.authorizer = Authorizer(enabled=True, acls=AclTable, super_users=super_users)
    rig.ask(1, ApiKey.PRODUCE, size=5000, client_id=client_id(1).encode())
    assert rig.transport.reading is has_right


async def test_who_is_refused_has_taken_time_as_well() -> None:
    rig = Metered(heartbeats(lambda *_: HeartbeatResponse(), needs=cluster(Operation.ALTER)), request_percentage=1.0)
    rig.connection._services.authorizer = Authorizer(enabled=True, acls=AclTable)
    decode = rig.connection._apis[ApiKey.HEARTBEAT].decode

    def slowly(version: int, buffer: memoryview, pos: int) -> Any:
        rig.clock.advance(1.0)
        return decode(version, buffer, pos)

    rig.connection._apis = rig.connection._all_apis = {
        ApiKey.HEARTBEAT: replace(rig.connection._apis[ApiKey.HEARTBEAT], decode=slowly)
    }
    rig.ask(1, ApiKey.HEARTBEAT)
    assert rig.throttles(HeartbeatResponse, 2) == [1000] and not rig.transport.reading
    rig.clock.advance(1.0)
    assert rig.transport.reading


async def test_a_refusal_in_the_items_of_an_answer_says_for_how_long() -> None:
    def refuse(_context: RequestContext, _request: bytes, error: ApiError) -> HeartbeatResponse:
        rig.clock.advance(1.0)
        return HeartbeatResponse(error_code=error.code)

    served = heartbeats(lambda *_: HeartbeatResponse(), needs=cluster(Operation.ALTER))
    rig = Metered(replace(served, refuse=refuse), request_percentage=1.0)
    rig.connection._services.authorizer = Authorizer(enabled=True, acls=AclTable)
    rig.ask(1, ApiKey.HEARTBEAT)
    assert rig.throttles(HeartbeatResponse, 2) == [1000] and not rig.transport.reading


async def test_who_has_no_quota_beside_one_who_has_is_not_counted() -> None:
    rig = Metered(produces(appended))
    rig.quotas.take({quota_entity({CLIENT_ID: "other"}): {PRODUCE: 1.0}})
    rig.ask(1, ApiKey.PRODUCE, size=5000)
    assert rig.transport.reading and "0 counts" in repr(rig.quotas)


async def test_a_quiet_connection_that_is_lost_leaves_no_timer() -> None:
    rig = Metered(produces(appended), producer_byte_rate=1.0)
    rig.ask(1, ApiKey.PRODUCE, size=5000)
    rig.connection.connection_lost(None)
    rig.transport.reading = False
    rig.clock.advance(10_000.0)
    assert not rig.transport.reading and rig.budget.used_bytes == 0


async def test_a_quiet_connection_drains_at_once() -> None:
    rig = Metered(produces(appended), producer_byte_rate=1.0)
    rig.ask(1, ApiKey.PRODUCE, size=5000)
    rig.connection.drain()
    assert rig.transport.closed


class Slowed:
    """A broker whose clients may all produce at a small rate, over a plain listener or TLS."""

    def __init__(self, running: Cluster, protocol: str, pki: Pki, rate: float) -> None:
        host, _, port = running.bootstrap_servers_of(protocol).rpartition(":")
        self._address = host, int(port)
        self._context = pki.context() if protocol == "SSL" else None
        self._running = running
        with self.client() as client:
            client.create_topic("t")
            entry = AlterClientQuotasRequest.EntryData(
                entity=[AlterClientQuotasRequest.EntityData(entity_type=CLIENT_ID, entity_name=None)],
                ops=[AlterClientQuotasRequest.OpData(key=PRODUCE, value=rate, remove=False)],
            )
            assert client.call(AlterClientQuotasRequest(entries=[entry]), 1).entries[0].error_code == 0

    def client(self) -> RawClient:
        client = RawClient(self._address)
        if self._context is not None:
            client.socket = self._context.wrap_socket(client.socket, server_hostname="localhost")
        return client

    @property
    def connections(self) -> int:
        (broker,) = self._running._brokers.values()
        return sum(len(listener.connections) for listener in broker.listeners)


@pytest.fixture(params=["PLAINTEXT", "SSL"])
def slowed(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[float], Slowed]]:
    monkeypatch.setattr(connection_module, "LOOK_S", 0.1)
    pki = Pki(tmp_path)
    listeners = {"listeners": "PLAINTEXT://127.0.0.1:0,SSL://127.0.0.1:0", "quota.window.num": "2"}
    with Cluster(settings={**listeners, **pki.settings()}) as running:
        yield lambda rate: Slowed(running, request.param, pki, rate)


def test_a_quiet_connection_whose_client_has_gone_is_closed(slowed: Callable[[float], Slowed]) -> None:
    """Its quota wants an hour of quiet: who comes back again and again would hold a connection each time."""
    broker = slowed(1.0)
    with broker.client() as staying:
        staying.produce("t", batch(b"v" * 5000))
        for _ in range(3):
            with broker.client() as leaving:
                leaving.produce("t", batch(b"v" * 5000))
        wait_for(lambda: broker.connections == 1)
        time.sleep(0.5)
        assert broker.connections == 1, "who is there stays"


def test_what_was_sent_before_its_client_left_is_served(slowed: Callable[[float], Slowed]) -> None:
    """Without an acknowledgement to wait for a producer may leave while it is still to be quiet."""
    broker = slowed(10_000.0)
    with broker.client() as leaving:
        for _ in range(3):
            leaving.request(produce_request("t", batch(b"v" * 8000), acks=0), 9)
            time.sleep(0.1)  # so that they arrive one by one: the last ones find a connection that is not read
    with broker.client() as client:
        wait_for(lambda: client.fetch("t", 0).high_watermark == 3)


# --- connections ------------------------------------------------------------------------------------------------------


def arriving(
    clock: ManualClock, settings: dict[str, str] | None = None, **addresses: float
) -> tuple[Arrivals, ClientQuotas]:
    quotas = ClientQuotas(clock=clock)
    quotas.take({quota_entity({IP: None}): {"connection_creation_rate": rate} for rate in addresses.values()})
    return Arrivals(BrokerConfig(settings or {}), quotas), quotas


def test_an_address_that_comes_too_fast_is_held_off() -> None:
    clock = ManualClock()
    arrivals, _ = arriving(clock, {"listeners": "PLAINTEXT://:0"}, default=2.0)
    assert arrivals.are_limited("PLAINTEXT")
    assert [arrivals.too_fast_s("10.0.0.1") for _ in range(20)] == [0.0] * 20, "ten windows at once"
    assert arrivals.too_fast_s("10.0.0.1") == pytest.approx(0.5)
    assert arrivals.too_fast_s("10.0.0.2") == 0
    clock.advance(0.5)
    assert arrivals.too_fast_s("10.0.0.1") == 0, "what was held off was not counted"
    assert "2 addresses" in repr(arrivals)
    clock.advance(100.0)
    assert arrivals.too_fast_s("10.0.0.3") == 0
    assert "1 addresses" in repr(arrivals)


def test_an_address_is_one_in_whatever_form_it_comes() -> None:
    arrivals, _ = arriving(ManualClock(), {"listeners": "PLAINTEXT://:0"}, default=2.0)
    forms = ("10.0.0.1", "::ffff:10.0.0.1", "::ffff:a00:1")
    assert [arrivals.too_fast_s(forms[number % 3]) for number in range(20)] == [0.0] * 20
    assert all(arrivals.too_fast_s(form) > 0 for form in forms)
    assert arrivals.too_fast_s("fe80::1%eth0") == 0


def test_connections_wait_for_their_turn_one_behind_the_other() -> None:
    clock = ManualClock()
    arrivals, _ = arriving(clock, {"max.connection.creation.rate": "2", "listeners": "PLAINTEXT://:0"})
    assert [arrivals.turn_s("PLAINTEXT") for _ in range(20)] == [0.0] * 20
    waits = [arrivals.turn_s("PLAINTEXT") for _ in range(4)]
    assert waits == pytest.approx([0.5, 1.0, 2.0, 3.0]), "one window at most between two"
    clock.advance(20.0)
    assert arrivals.turn_s("PLAINTEXT") == 0
    assert max(arrivals.turn_s("PLAINTEXT") for _ in range(200)) <= MAX_TURN_S + 2, "the line does not grow for ever"


def test_brokers_with_a_listener_of_their_own_are_held_to_its_rate_only() -> None:
    clock = ManualClock()
    arrivals, _ = arriving(
        clock,
        {
            "listeners": "CLIENTS://:0,BROKERS://:1",
            "listener.security.protocol.map": "CLIENTS:PLAINTEXT,BROKERS:PLAINTEXT",
            "inter.broker.listener.name": "BROKERS",
            "max.connection.creation.rate": "1",
            "listener.name.brokers.max.connection.creation.rate": "3",
            "listener.name.clients.max.connection.creation.rate": "100",
        },
    )
    assert [arrivals.turn_s("CLIENTS") > 0 for _ in range(11)] == [False] * 10 + [True]
    assert [arrivals.turn_s("BROKERS") > 0 for _ in range(31)] == [False] * 30 + [True]


class Arriving:
    """A socket at the door, and who is behind it."""

    def __init__(self, clock: ManualClock, arrivals: Arrivals) -> None:
        self.clock = clock
        self.over: list[Arrival] = []
        self.rig: Rig | None = None
        self.transport = FakeTransport()
        self.arrival = Arrival(
            arrivals, "PLAINTEXT", self._enter, self.over.append, Refusals(arrivals.clock), ListenerCounts()
        )
        self.transport.protocol = self.arrival
        self.arrival.connection_made(cast(asyncio.BaseTransport, self.transport))
        clock.advance(0.0)

    def _enter(self) -> Connection:
        self.rig = Rig(heartbeats(lambda *_: HeartbeatResponse()), clock=self.clock, transport=FakeTransport())
        return self.rig.connection


def used_up(arrivals: Arrivals) -> None:
    while not arrivals.turn_s("PLAINTEXT") and not arrivals.too_fast_s("10.0.0.1"):
        pass


async def test_a_socket_that_came_too_fast_is_not_read_and_closed_after_a_moment() -> None:
    clock = ManualClock()
    arrivals, _ = arriving(clock, {"listeners": "PLAINTEXT://:0"}, default=1.0)
    used_up(arrivals)
    arriving_one = Arriving(clock, arrivals)
    transport = arriving_one.transport
    assert not transport.reading and "1 waiting" in repr(arrivals)
    clock.advance(0.9)
    assert not transport.closed
    clock.advance(0.2)
    assert transport.aborted and arriving_one.rig is None
    arriving_one.arrival.connection_lost(None)
    assert "0 waiting" in repr(arrivals) and arriving_one.over == [arriving_one.arrival]


async def test_a_socket_whose_turn_comes_later_is_served_then_with_what_it_said_before() -> None:
    clock = ManualClock()
    arrivals, _ = arriving(clock, {"max.connection.creation.rate": "1", "listeners": "PLAINTEXT://:0"})
    assert arrivals.are_limited("PLAINTEXT")
    used_up(arrivals)
    late = Arriving(clock, arrivals)
    receive(late.arrival, request(1, version=2))
    assert not late.transport.reading and late.rig is None
    clock.advance(3.0)
    assert late.rig is not None and late.transport.reading and "0 waiting" in repr(arrivals)
    assert late.transport.protocol is late.rig.connection
    assert late.transport.written, "it is the same socket"


async def test_who_goes_before_its_turn_is_forgotten() -> None:
    clock = ManualClock()
    arrivals, _ = arriving(clock, {"max.connection.creation.rate": "1", "listeners": "PLAINTEXT://:0"})
    used_up(arrivals)
    gone = Arriving(clock, arrivals)
    gone.arrival.connection_lost(None)
    clock.advance(60.0)
    assert gone.rig is None and "0 waiting" in repr(arrivals)


async def test_only_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttling, "MAX_WAITING", 2)
    clock = ManualClock()
    arrivals, _ = arriving(clock, {"listeners": "PLAINTEXT://:0"}, default=1.0)
    used_up(arrivals)
    assert [Arriving(clock, arrivals).transport.closed for _ in range(3)] == [False, False, True]
