"""How many connections there may be: in all, of a listener, from an address. And how their sockets are made."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from millrace.broker import Broker
from millrace.client.connection import Connection
from millrace.config import BrokerConfig
from millrace.errors import ApiError
from millrace.server.flow import ConnectionLimits, ListenerLimits
from millrace.server.listener import SocketSettings
from millrace.wire.messages.api_versions import ApiVersionsRequest

MANY = 1000


def test_an_address_may_have_a_limit_of_its_own() -> None:
    own = {"10.0.0.1": 2, "::1": 0}
    limits = ConnectionLimits(lambda: MANY, lambda: 1, lambda: own)
    assert limits.admit("10.0.0.1") is None
    assert limits.admit("::ffff:10.0.0.1") is None, "the same address by another way"
    assert limits.admit("10.0.0.1") == "max.connections.per.ip.overrides allows 10.0.0.1 2"
    assert limits.admit("::1") is not None
    assert limits.admit("10.0.0.2") is None
    assert limits.admit("10.0.0.2") == "max.connections.per.ip is 1"
    own["10.0.0.1"] = 3
    assert limits.admit("10.0.0.1") is None
    for host in ("10.0.0.1", "::ffff:10.0.0.1", "10.0.0.1", "10.0.0.2"):
        limits.release(host)
    assert (limits.count, limits.admit("10.0.0.2")) == (0, None)


def test_a_listener_may_have_a_limit_of_its_own() -> None:
    limits = ConnectionLimits(lambda: 3, lambda: MANY)
    narrow = ListenerLimits(limits, "NARROW", lambda: 1, for_brokers=False)
    wide = ListenerLimits(limits, "WIDE", lambda: MANY, for_brokers=False)
    assert narrow.admit("a") is None
    assert narrow.admit("a") == "max.connections of listener NARROW is 1"
    assert (wide.admit("a"), wide.admit("a")) == (None, None)
    assert wide.admit("a") == "max.connections is 3"
    narrow.release("a")
    assert (wide.admit("a"), narrow.admit("a")) == (None, "max.connections is 3")
    assert (narrow.count, wide.count, limits.count) == (0, 3, 3)


def test_clients_do_not_keep_brokers_out() -> None:
    limits = ConnectionLimits(lambda: 1, lambda: MANY, possible=3)
    clients = ListenerLimits(limits, "CLIENTS", lambda: MANY, for_brokers=False)
    brokers = ListenerLimits(limits, "BROKERS", lambda: MANY, for_brokers=True)
    assert clients.admit("a") is None
    assert brokers.admit("b") is None
    assert clients.admit("a") == "max.connections is 1"
    assert brokers.admit("b") is None
    assert brokers.admit("b") == "the process has descriptors for 3 connections", "that holds for everybody"


def test_buffers_are_the_systems_own_unless_they_are_given() -> None:
    with socket.create_server(("127.0.0.1", 0)) as untouched, socket.create_server(("127.0.0.1", 0)) as sized:
        before = [untouched.getsockopt(socket.SOL_SOCKET, each) for each in (socket.SO_SNDBUF, socket.SO_RCVBUF)]
        SocketSettings.from_config(BrokerConfig()).apply(untouched)
        after = [untouched.getsockopt(socket.SOL_SOCKET, each) for each in (socket.SO_SNDBUF, socket.SO_RCVBUF)]
        assert after == before
        given = {"socket.send.buffer.bytes": "50000", "socket.receive.buffer.bytes": "60000"}
        SocketSettings.from_config(BrokerConfig(given)).apply(sized)
        # Linux takes as much again for its own use.
        assert sized.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 100_000
        assert sized.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 120_000


async def test_a_broker_holds_its_listeners_to_their_limits(tmp_path: Path) -> None:
    """The values may change while it runs."""
    config = BrokerConfig(
        {
            "listeners": "CLIENTS://127.0.0.1:0,BROKERS://127.0.0.1:0",
            "listener.security.protocol.map": "CLIENTS:PLAINTEXT,BROKERS:PLAINTEXT",
            "inter.broker.listener.name": "BROKERS",
            "listener.name.clients.max.connections": "1",
            "socket.send.buffer.bytes": "50000",
            "socket.listen.backlog.size": "7",
            "log.dirs": str(tmp_path),
        }
    )
    broker = Broker(config)
    await broker.start()

    async def connect(listener: int) -> Connection:
        connection = await Connection.open("127.0.0.1", broker.listeners[listener].port, client_id="t", timeout_ms=5000)
        await connection.request(ApiVersionsRequest(), 3)
        return connection

    opened = []
    try:
        opened.append(await connect(0))
        (served,) = broker.listeners[0].connections
        accepted = served._transport.get_extra_info("socket")  # type: ignore[union-attr]
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 100_000
        with pytest.raises(ApiError):
            await connect(0)
        opened.append(await connect(1))
        config.apply_dynamic({"listener.name.clients.max.connections": "2"}, {})
        opened.append(await connect(0))
        config.apply_dynamic({"max.connections": "3"}, {"listener.name.clients.max.connections": "9"})
        with pytest.raises(ApiError):
            await connect(0)
        opened.append(await connect(1))
        config.apply_dynamic({"max.connections.per.ip.overrides": "127.0.0.1:4"}, {})
        with pytest.raises(ApiError):
            await connect(1)
        config.apply_dynamic({"max.connections.per.ip.overrides": "127.0.0.1:5"}, {})
        opened.append(await connect(1))
    finally:
        for each in opened:
            await each.close()
        await broker.stop()
