"""A real ZooKeeper for tests: one server per pytest worker, started when the first test asks, and a path for each test.

A module's conftest makes the fixtures known: `from support.zookeeper import zookeeper, zookeeper_hosts`.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from kazoo.client import KazooClient
from kazoo.protocol.serialization import Close, Connect

from millrace.local.zookeeper import ZooKeeperServers
from millrace.metadata.zookeeper import ZooKeeperStore
from millrace.metadata.zookeeper_access import OPEN, ZooKeeperAccess


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServers]:
    """One ZooKeeper server. A test that kills it starts it again before it ends."""
    directory: Path = tmp_path_factory.mktemp("zookeeper")
    with ZooKeeperServers(directory) as servers:
        yield servers


@pytest.fixture
def zookeeper_hosts(zookeeper: ZooKeeperServers) -> str:
    """An address with a path that no other test uses."""
    return f"{zookeeper.hosts}/test-{secrets.token_hex(6)}"


@contextmanager
def looking_at(hosts: str, access: ZooKeeperAccess = OPEN) -> Iterator[KazooClient]:
    """A client that sees the znodes as they are."""
    login = [("digest", f"{access.username}:{access.password}")] if access.username else None
    client = KazooClient(hosts, timeout=10, auth_data=login)
    client.start(30)
    try:
        yield client
    finally:
        client.stop()
        client.close()


def expire(store: ZooKeeperStore, hosts: str | None = None) -> None:
    """End the store's session behind its back, as ZooKeeper does after a long silence.

    Another connection takes the session over, at `hosts` if the store goes another way, and closes it. The store's own
    client may be quick enough to take it back first, so this goes on until ZooKeeper says that the session is no more.
    A connection that lost that race may be forgotten by ZooKeeper, neither answered nor closed.
    """
    client = store._session._client
    assert client is not None
    session_id, password = client.client_id
    host, _, port = (hosts or store.hosts).partition(":")
    take_over = Connect(0, 0, 6000, session_id, password, False).serialize()
    close = struct.pack(">ii", 1, Close.type)
    timeout_ms = -1
    while timeout_ms != 0:
        answer = b""
        with socket.create_connection((host, int(port)), timeout=10) as peer:
            peer.sendall(struct.pack(">i", len(take_over)) + take_over + struct.pack(">i", len(close)) + close)
            peer.settimeout(1)
            with suppress(TimeoutError):
                while chunk := peer.recv(4096):  # the server hangs up after the close
                    answer += chunk
        if len(answer) >= 12:
            (timeout_ms,) = struct.unpack_from(">i", answer, 8)
