"""Who gets at the znodes: logins by digest and by certificate, with real servers and other people's clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError, SessionClosedRequireSaslError
from kazoo.security import OPEN_ACL_UNSAFE

from millrace.config import BrokerConfig
from millrace.errors import ConfigError, StorageError
from millrace.local.ports import free_ports
from millrace.local.zookeeper import USERNAME, ZooKeeperServers
from millrace.metadata.deltas import Endpoint
from millrace.metadata.store import BrokerRegistration, Snapshot
from millrace.metadata.zookeeper import ZooKeeperStore
from millrace.metadata.zookeeper_access import OPEN, ZooKeeperAccess, ZooKeeperTls
from millrace.metadata.zookeeper_session import _Handler

BROKERS = ZooKeeperAccess("brokers", "secret")
WRONG = ZooKeeperAccess("brokers", "guess")


@contextlib.asynccontextmanager
async def opened(hosts: str, access: ZooKeeperAccess) -> AsyncIterator[ZooKeeperStore]:
    store = ZooKeeperStore(hosts, access=access)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@contextlib.contextmanager
def stranger(hosts: str, *, login: str | None = None) -> Iterator[Any]:
    client = KazooClient(hosts.partition("/")[0], auth_data=None if login is None else [("digest", login)])
    client.start(20)
    try:
        yield client
    finally:
        client.stop()
        client.close()


def znodes(client: Any, path: str) -> list[str]:
    below = [znodes(client, f"{path.rstrip('/')}/{name}") for name in sorted(client.get_children(path))]
    return [path, *(each for found in below for each in found)]


def attempts(client: Any, path: str) -> list[Callable[[], object]]:
    return [
        lambda: client.get(path),
        lambda: client.get_children(path),
        lambda: client.exists(path),
        lambda: client.get_acls(path),
        lambda: client.set(path, b"mine"),
        lambda: client.create(f"{path.rstrip('/')}/mine"),
        lambda: client.set_acls(path, OPEN_ACL_UNSAFE),
    ]


async def fill(store: ZooKeeperStore) -> None:
    """Every kind of znode that there is."""
    await store.register(BrokerRegistration(1, (Endpoint("PLAINTEXT", "h", 1),)))
    epoch = await store.elect(1)
    assert epoch is not None
    await store.append(b"a user's credential", epoch)
    await store.write_snapshot(Snapshot(1, b"and a snapshot of it"), epoch)
    await store.append(b"another", epoch)


# --- digest -----------------------------------------------------------------------------------------------------------


async def test_znodes_are_for_the_login_alone(zookeeper_hosts: str) -> None:
    hosts, _, path = zookeeper_hosts.partition("/")
    async with opened(zookeeper_hosts, BROKERS) as store:
        await fill(store)
        with stranger(hosts, login="brokers:secret") as broker:
            found = znodes(broker, f"/{path}")
        assert len(found) == 12
        for login in (None, "brokers:guess", "somebody:secret"):
            with stranger(hosts, login=login) as client:
                for each in found:
                    for attempt in attempts(client, each):
                        with pytest.raises(NoAuthError):
                            attempt()
        async with opened(zookeeper_hosts, BROKERS) as another:
            assert await another.end() == 2


@pytest.mark.parametrize("access", [OPEN, WRONG])
async def test_without_the_login_a_start_ends_with_one_line(zookeeper_hosts: str, access: ZooKeeperAccess) -> None:
    async with opened(zookeeper_hosts, BROKERS):
        with pytest.raises(StorageError) as caught:
            await ZooKeeperStore(zookeeper_hosts, access=access).open()
    advice = "it asks for a login, " if access is OPEN else "check "
    assert f"to read /{zookeeper_hosts.partition('/')[2]}/metadata: {advice}zookeeper.digest.username" in str(
        caught.value
    )
    assert str(caught.value).startswith("not allowed by ZooKeeper at ")
    assert "guess" not in str(caught.value)


async def test_what_was_open_is_closed_at_the_start(zookeeper_hosts: str) -> None:
    hosts, _, path = zookeeper_hosts.partition("/")
    before = ZooKeeperStore(zookeeper_hosts)
    await before.open()
    await fill(before)
    explicit = ZooKeeperAccess("brokers", "secret", set_acl=True)
    with stranger(hosts) as client:
        found = znodes(client, f"/{path}")
        async with opened(zookeeper_hosts, explicit) as store:
            for each in found:
                with pytest.raises(NoAuthError):
                    client.get(each)
            assert await store.end() == 2
    await before.close()


async def test_znodes_stay_open_while_that_is_asked_for_and_brokers_are_not_shut_out(zookeeper_hosts: str) -> None:
    async with opened(zookeeper_hosts, OPEN) as old:
        await old.register(BrokerRegistration(1, (Endpoint("PLAINTEXT", "h", 1),)))
        with pytest.raises(ConfigError, match=r"brokers 1 leave the znodes open.*zookeeper\.set\.acl=false until"):
            await ZooKeeperStore(zookeeper_hosts, access=BROKERS).open()
        async with opened(zookeeper_hosts, ZooKeeperAccess("brokers", "secret", set_acl=False)) as new:
            await new.register(BrokerRegistration(2, (Endpoint("PLAINTEXT", "h", 2),)))
            async with asyncio.timeout(20), contextlib.aclosing(old.membership()) as memberships:
                async for membership in memberships:
                    if len(membership.members) == 2:
                        break
    async with opened(zookeeper_hosts, BROKERS):  # nobody is left who could be shut out
        with pytest.raises(StorageError):
            await ZooKeeperStore(zookeeper_hosts).open()


async def test_what_lies_above_the_clusters_path_stays_open(zookeeper_hosts: str) -> None:
    async with opened(f"{zookeeper_hosts}/a/mine", BROKERS), opened(f"{zookeeper_hosts}/a/yours", WRONG):
        with stranger(zookeeper_hosts) as client:
            path = f"/{zookeeper_hosts.partition('/')[2]}"
            assert sorted(client.get_children(f"{path}/a")) == ["mine", "yours"]
            with pytest.raises(NoAuthError):
                client.get_children(f"{path}/a/mine")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"zookeeper.digest.username": "a"}, "belong together"),
        ({"zookeeper.digest.password": "a"}, "belong together"),
        ({"zookeeper.digest.username": "a:b", "zookeeper.digest.password": "c"}, "no colon"),
        ({"zookeeper.set.acl": "true"}, "needs a login"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ZooKeeperAccess.from_config(BrokerConfig(settings))


def test_settings() -> None:
    assert ZooKeeperAccess.from_config(BrokerConfig({})) == OPEN
    access = ZooKeeperAccess.from_config(BrokerConfig(ZooKeeperAccess("a", "hidden", set_acl=True).as_settings()))
    assert access == ZooKeeperAccess("a", "hidden", set_acl=True)
    assert "hidden" not in repr(access)
    assert not OPEN.closes and BROKERS.closes
    tls = {
        "zookeeper.ssl.client.enable": "true",
        "zookeeper.ssl.keystore.location": "/id.pem",
        "zookeeper.ssl.keystore.password": "hidden",
        "zookeeper.ssl.truststore.location": "/ca.pem",
        "zookeeper.ssl.endpoint.identification.algorithm": "",
    }
    access = ZooKeeperAccess.from_config(BrokerConfig(tls))
    assert access.tls == ZooKeeperTls("/ca.pem", "/id.pem", "hidden", verify_host_name=False)
    assert access.closes
    assert "hidden" not in repr(access)


# --- a server of our own that asks for a password ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServers]:
    with ZooKeeperServers(tmp_path_factory.mktemp("asking"), asks_for_password=True) as servers:
        yield servers


def test_a_server_that_asks_lets_no_stranger_do_anything(asking: ZooKeeperServers) -> None:
    with stranger(asking.hosts) as client, pytest.raises(SessionClosedRequireSaslError):
        client.get_children_async("/").get(timeout=20)
    for login in (f"{USERNAME}:guess", "anybody:anything"):
        with stranger(asking.hosts, login=login) as client:
            for path in ("/", "/zookeeper", "/zookeeper/quota"):
                for attempt in attempts(client, path):
                    with pytest.raises(NoAuthError):
                        attempt()


async def test_a_store_on_a_server_that_asks(asking: ZooKeeperServers) -> None:
    async with opened(asking.hosts, asking.access) as store:
        await fill(store)
    for access in (OPEN, ZooKeeperAccess(USERNAME, "guess")):
        async with asyncio.timeout(20):
            with pytest.raises(StorageError, match="not allowed by ZooKeeper"):
                await ZooKeeperStore(asking.hosts, access=access).open()


async def test_the_session_is_taken_up_again_after_a_restart_of_the_server(asking: ZooKeeperServers) -> None:
    async with opened(f"{asking.hosts}/again", asking.access) as store:
        epoch = await store.elect(1)
        assert epoch is not None
        await asyncio.to_thread(asking.restart)
        assert await store.append(b"x", epoch) == 1


def test_the_password_is_for_its_owner_and_nowhere_else(asking: ZooKeeperServers) -> None:
    password = asking.directory / "password"
    assert password.stat().st_mode & 0o777 == 0o600
    assert asking.directory.stat().st_mode & 0o777 == 0o700
    secret = password.read_text().strip()
    assert len(secret) >= 40
    assert ZooKeeperServers(asking.directory, asks_for_password=True).access.password == secret
    assert secret not in repr(asking) + repr(asking.access)
    pid = asking.pid(1)
    assert secret.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert secret not in (asking.directory / "1" / "zoo.cfg").read_text()
    assert secret not in asking.log_path(1).read_text()


# --- TLS --------------------------------------------------------------------------------------------------------------


class SecuredZooKeeper(ZooKeeperServers):
    """One that also listens for TLS and asks for a certificate there."""

    def __init__(self, directory: Path, authority: trustme.CA) -> None:
        super().__init__(directory)
        (self.tls_port,) = free_ports(self.host, 1)
        self.trust, self.identity = directory / "ca.pem", directory / "server.pem"
        authority.cert_pem.write_to_path(self.trust)
        _pkcs8(authority.issue_cert("localhost"), self.identity)

    def _config(self, node: int) -> str:
        settings = {
            "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
            "secureClientPort": self.tls_port,
            "ssl.keyStore.location": self.identity,
            "ssl.keyStore.type": "PEM",
            "ssl.trustStore.location": self.trust,
            "ssl.trustStore.type": "PEM",
            "ssl.clientAuth": "need",
            "ssl.clientHostnameVerification": "false",
            "authProvider.x509": "org.apache.zookeeper.server.auth.X509AuthenticationProvider",
        }
        return super()._config(node) + "".join(f"{name}={value}\n" for name, value in settings.items())


def _pkcs8(leaf: trustme.LeafCert, path: Path) -> None:
    """Certificate and key, as ZooKeeper's reader wants it."""
    key = serialization.load_pem_private_key(leaf.private_key_pem.bytes(), None)
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(pem + b"".join(each.bytes() for each in leaf.cert_chain_pems))


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, authority: trustme.CA) -> Iterator[SecuredZooKeeper]:
    with SecuredZooKeeper(tmp_path_factory.mktemp("secured"), authority) as servers:
        yield servers


@pytest.fixture
def tls(secured: SecuredZooKeeper, authority: trustme.CA, tmp_path: Path) -> ZooKeeperTls:
    _pkcs8(authority.issue_cert("broker.example"), tmp_path / "broker.pem")
    return ZooKeeperTls(str(secured.trust), str(tmp_path / "broker.pem"))


async def test_a_store_over_tls_with_a_certificate(secured: SecuredZooKeeper, tls: ZooKeeperTls) -> None:
    hosts = f"localhost:{secured.tls_port}/mutual"
    access = ZooKeeperAccess(tls=tls)
    async with opened(hosts, access) as store:
        await fill(store)
    with stranger(secured.hosts) as client, pytest.raises(NoAuthError):  # the port without TLS
        client.get("/mutual/metadata")
    async with opened(hosts, access) as store:
        assert await store.end() == 2


def test_what_tls_has_decrypted_is_read_without_waiting_for_more(authority: trustme.CA) -> None:
    """Two answers in one record: the kernel knows nothing of the second."""
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(serving)
    asking = ssl.create_default_context()
    authority.configure_trust(asking)
    near, far = socket.socketpair()
    with ThreadPoolExecutor(1) as threads:
        served = threads.submit(serving.wrap_socket, far, server_side=True)
        with asking.wrap_socket(near, server_hostname="localhost") as client, served.result() as server:
            server.sendall(b"onetwo")
            assert client.recv(3) == b"one"
            handler = _Handler(1.0, None)
            assert handler.select([client], [], [], 20)[0] == [client]
            assert client.recv(3) == b"two"
            assert handler.select([client], [], [], 0)[0] == []


async def test_tls_that_fails_says_why(
    secured: SecuredZooKeeper, tls: ZooKeeperTls, authority: trustme.CA, tmp_path: Path
) -> None:
    hosts = f"localhost:{secured.tls_port}/x"
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    for bad, problem in (
        (ZooKeeperTls(str(tmp_path / "other.pem"), tls.identity), "certificate verify failed"),
        (ZooKeeperTls(tls.authorities), ""),  # shows no certificate
    ):
        store = ZooKeeperStore(hosts, connection_timeout_ms=1500, access=ZooKeeperAccess(tls=bad))
        with pytest.raises(StorageError, match=rf"no ZooKeeper answered at .* within 1500 ms.*{problem}"):
            await store.open()
    for missing, setting in (
        (ZooKeeperTls(str(tmp_path / "none.pem")), "truststore"),
        (ZooKeeperTls(tls.authorities, str(tmp_path / "none.pem")), "keystore"),
    ):
        with pytest.raises(ConfigError, match=rf"zookeeper\.ssl\.{setting}\.location: .*none\.pem"):
            await ZooKeeperStore(hosts, access=ZooKeeperAccess(tls=missing)).open()


@pytest.mark.parametrize("is_checked", [True, False])
async def test_the_name_in_the_certificate(secured: SecuredZooKeeper, tls: ZooKeeperTls, is_checked: bool) -> None:
    access = ZooKeeperAccess(tls=replace(tls, verify_host_name=is_checked))
    store = ZooKeeperStore(f"127.0.0.1:{secured.tls_port}/name", connection_timeout_ms=1500, access=access)
    if not is_checked:
        await store.open()
        await store.close()
        return
    with pytest.raises(StorageError, match="IP address mismatch"):
        await store.open()
