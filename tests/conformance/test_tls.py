"""TLS over real sockets: who gets in, who is closed and how soon, and certificates that change while clients come.

Clients connect by address, and say no host name in their hello unless a test is about it: what a listener does must
not depend on that.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from millrace.local.ports import free_ports
from millrace.security.certificates import make_authority
from millrace.server.tls import HANDSHAKE_TIMEOUT_S
from support.certificates import Pki
from support.raw import (
    MIB,
    PATIENT_S,
    PROMPT_S,
    PeerClosed,
    RawClient,
    WatchedBroker,
    api_versions_frame,
    batch,
    fetch_request,
)
from support.servers import HOST

RELOAD_S = 10.0
"""Looked at every second, on a machine that may be busy."""


class TlsBroker(WatchedBroker):
    """With two more listeners: `tls_port` as the settings say, and `other_port` that asks nobody for a certificate."""

    def __init__(self, pki: Pki, client_auth: str = "none", settings: dict[str, str] | None = None) -> None:
        self.port, self.tls_port, self.other_port = free_ports(HOST, 3)
        listeners = f"PLAINTEXT://{HOST}:{self.port},SSL://{HOST}:{self.tls_port},OTHER://{HOST}:{self.other_port}"
        port = self.port
        super().__init__(
            {
                "listeners": listeners,
                "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,SSL:SSL,OTHER:SSL",
                "listener.name.other.ssl.client.auth": "none",
                **pki.settings(client_auth),
                **(settings or {}),
            }
        )
        self.port = port
        self.pki = pki

    def tls(
        self, context: ssl.SSLContext | None = None, *, port: int | None = None, name: str | None = None
    ) -> RawClient:
        """A client that speaks TLS. Without `name` it says none, and checks the certificate's address all the same."""
        client = RawClient((HOST, port or self.tls_port))
        try:
            client.socket = (context or self.pki.context()).wrap_socket(client.socket, server_hostname=name or HOST)
        except BaseException:
            client.close()
            raise
        return client


def shown_name(client: RawClient) -> str:
    assert isinstance(client.socket, ssl.SSLSocket)
    certificate = client.socket.getpeercert()
    assert certificate is not None
    return str(dict(part[0] for part in certificate["subject"])["commonName"])  # type: ignore[misc]


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def broker(pki: Pki) -> Iterator[TlsBroker]:
    with TlsBroker(pki) as running:
        yield running


@pytest.fixture(scope="module")
def strict(pki: Pki) -> Iterator[TlsBroker]:
    """Has every client show a certificate."""
    with TlsBroker(pki, "required") as running:
        yield running


@pytest.fixture
def changing(tmp_path: Path) -> Iterator[TlsBroker]:
    """With files of its own."""
    with TlsBroker(Pki(tmp_path), "required") as running:
        yield running


# --- who does not speak it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        api_versions_frame(),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0",
        b"\x16",
        b"\x16\x03\x01\x00\x05hello",
        b"\x16\x03\x01\xff\xff" + bytes(70_000),
        b"\x15\x03\x01\x00\x02\x02\x28",
        bytes(MIB),
    ],
    ids=["kafka", "http", "byte", "half-record", "no-hello", "large-record", "alert", "zeros"],
)
def test_plain_bytes_on_a_tls_port(broker: TlsBroker, data: bytes) -> None:
    with broker.unharmed(), RawClient((HOST, broker.tls_port)) as client:
        client.try_send(data)
        if data == b"\x16":  # might become one; it has its time
            client.socket.settimeout(0.2)
            with pytest.raises(TimeoutError):
                client.socket.recv(1)
        else:
            assert [frame for frame in client.expect_close() if not data.startswith(b"\x16")] == []


def test_a_silent_client_is_closed_when_its_time_is_over(broker: TlsBroker) -> None:
    with broker.unharmed(), RawClient((HOST, broker.tls_port)) as silent, RawClient((HOST, broker.tls_port)) as slow:
        started = time.monotonic()
        slow.send(b"\x16\x03\x01\x02")
        silent.expect_close(HANDSHAKE_TIMEOUT_S + PROMPT_S)
        slow.expect_close(PROMPT_S)
        assert time.monotonic() - started > HANDSHAKE_TIMEOUT_S - PROMPT_S


def test_connections_without_a_handshake_count(pki: Pki) -> None:
    with TlsBroker(pki, settings={"max.connections.per.ip": "20"}) as crowded, contextlib.ExitStack() as opened:
        waiting = [opened.enter_context(RawClient((HOST, crowded.tls_port))) for _ in range(20)]
        with RawClient((HOST, crowded.tls_port)) as late:
            late.try_send(b"\x16")
            late.expect_close()
        for client in waiting:
            client.close()
        until(lambda: served(crowded))


# --- versions and suites ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("name", [None, "localhost"], ids=["by-address", "by-name"])
def test_versions_that_are_served(broker: TlsBroker, version: ssl.TLSVersion, name: str | None) -> None:
    context = broker.pki.context()
    context.minimum_version = context.maximum_version = version
    with broker.tls(context, name=name) as client:
        client.alive()
        topic = f"{version.name}-{name}"
        client.create_topic(topic)
        assert client.produce(topic, batch(bytes(300_000))).error_code == 0
        records = client.fetch(topic, 0).records
        assert records is not None
        assert len(records) > 300_000
        assert isinstance(client.socket, ssl.SSLSocket)
        assert client.socket.version() == version.name.replace("_", ".")


def test_old_versions_are_refused(broker: TlsBroker) -> None:
    context = broker.pki.context()
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        context.minimum_version = ssl.TLSVersion.TLSv1
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    started = time.monotonic()
    with broker.unharmed(), pytest.raises(ssl.SSLError, match="ALERT_PROTOCOL_VERSION"):
        broker.tls(context)
    assert time.monotonic() - started < PATIENT_S


# --- certificates of clients ------------------------------------------------------------------------------------------


def served(broker: TlsBroker, context: ssl.SSLContext | None = None) -> bool:
    """Whether a request is answered; in TLS 1.3 a client hears of its refusal only after its own handshake."""
    try:
        with broker.tls(context) as client:
            client.alive()
    except (ssl.SSLError, PeerClosed, ConnectionError):
        return False
    return True


def refusal(broker: TlsBroker, context: ssl.SSLContext) -> str:
    """What a client is told that is not let in."""
    started = time.monotonic()
    with pytest.raises(ssl.SSLError) as caught, broker.tls(context) as client:
        client.alive()
    assert time.monotonic() - started < PATIENT_S
    return str(caught.value.reason)


def test_a_certificate_is_required(strict: TlsBroker) -> None:
    with strict.unharmed():
        assert served(strict, strict.pki.context(strict.pki.client("alice")))
        assert "CERTIFICATE_REQUIRED" in refusal(strict, strict.pki.context())
        with strict.tls(port=strict.other_port) as client:  # this listener asks for none
            client.alive()


def test_wrong_certificates(strict: TlsBroker, tmp_path: Path) -> None:
    pki = strict.pki
    stranger = tmp_path / "stranger.pem"
    make_authority("another").issue("alice").write(stranger)
    server = tmp_path / "server.pem"
    pki.authority.issue("a broker", hosts=["localhost"]).write(server)  # not made for clients
    with strict.unharmed():
        assert "UNKNOWN_CA" in refusal(strict, pki.context(stranger))
        assert "CERTIFICATE_EXPIRED" in refusal(strict, pki.context(pki.client("old", expired=True)))
        assert "ALERT" in refusal(strict, pki.context(server))


def test_a_certificate_is_requested(pki: Pki, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger.pem"
    make_authority("another").issue("alice").write(stranger)
    with TlsBroker(pki, "requested") as broker, broker.unharmed():
        assert served(broker, pki.context())
        assert served(broker, pki.context(pki.client("alice")))
        assert "UNKNOWN_CA" in refusal(broker, pki.context(stranger))


def test_a_certificate_is_not_asked_for(broker: TlsBroker, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger.pem"
    make_authority("another").issue("alice").write(stranger)
    assert served(broker, broker.pki.context(stranger))


def test_who_is_nobody_by_the_rules_is_closed(pki: Pki) -> None:
    rules = {"ssl.principal.mapping.rules": "RULE:CN=(.*),O=acme/$1/"}
    with TlsBroker(pki, "required", rules) as broker, broker.unharmed():
        assert served(broker, pki.context(pki.client("alice", organization="acme")))
        assert not served(broker, pki.context(pki.client("mallory", organization="acme2")))
        assert "no rule of ssl.principal.mapping.rules fits CN=mallory,O=acme2" in broker.log_text()


# --- changes ----------------------------------------------------------------------------------------------------------


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + RELOAD_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def now_shown(broker: TlsBroker, context: ssl.SSLContext, version: ssl.TLSVersion) -> str:
    context.minimum_version = context.maximum_version = version
    with broker.tls(context) as client:
        client.alive()
        return shown_name(client)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_new_certificate_is_shown_to_new_connections(changing: TlsBroker, version: ssl.TLSVersion) -> None:
    pki = changing.pki
    context = pki.context(pki.client("alice"))
    with changing.unharmed(), changing.tls(context) as old:
        old.alive()
        pki.renew("second")
        until(lambda: now_shown(changing, context, version) == "second")
        pki.server.write_bytes(b"-----BEGIN half")
        until(lambda: "the certificate in use stays: CN=second" in changing.log_text())
        assert now_shown(changing, context, version) == "second"
        pki.renew("third")
        until(lambda: now_shown(changing, context, version) == "third")
        old.alive()
        assert shown_name(old) == "broker"


def test_authorities_of_clients_are_rotated(changing: TlsBroker, tmp_path: Path) -> None:
    pki = changing.pki
    old = pki.context(pki.client("alice"))
    authority = make_authority("the next")
    renewed = tmp_path / "renewed.pem"
    authority.issue("alice").write(renewed)
    new = pki.context(renewed)
    with changing.unharmed():
        assert served(changing, old) and not served(changing, new)
        pki.trusted.write_bytes(pki.authority.certificate + authority.certificate)
        until(lambda: served(changing, new))
        assert served(changing, old)
        pki.trusted.write_bytes(authority.certificate)
        until(lambda: not served(changing, old))
        assert served(changing, new)


def test_a_session_is_not_resumed_past_its_authority(changing: TlsBroker) -> None:
    """What a ticket vouches for ends with the context that made it."""
    pki = changing.pki
    context = pki.context(pki.client("alice"))
    context.maximum_version = ssl.TLSVersion.TLSv1_2  # whose tickets come with the handshake

    def connect(session: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bool]:
        with (
            socket.create_connection((HOST, changing.tls_port), timeout=PATIENT_S) as plain,
            context.wrap_socket(plain, server_hostname=HOST, session=session) as tls,
        ):
            return tls.session, bool(tls.session_reused)

    session, _ = connect(None)
    assert connect(session)[1]
    pki.trusted.write_bytes(make_authority("the next").certificate)
    until(lambda: not served(changing, context))
    with pytest.raises(ssl.SSLError):
        connect(session)


def test_a_setting_that_changes(changing: TlsBroker) -> None:
    pki = changing.pki
    other = pki.home / "other.pem"
    pki.authority.issue("other", hosts=[HOST]).write(other)
    admin = AdminClient({"bootstrap.servers": changing.bootstrap})
    entry = ConfigEntry(
        "listener.name.ssl.ssl.keystore.location", str(other), incremental_operation=AlterConfigOpType.SET
    )
    resource = ConfigResource(ConfigResource.Type.BROKER, "1", incremental_configs=[entry])
    for done in admin.incremental_alter_configs([resource]).values():
        done.result(PATIENT_S)
    context = pki.context(pki.client("alice"))
    until(lambda: now_shown(changing, context, ssl.TLSVersion.TLSv1_3) == "other")
    with changing.tls(port=changing.other_port) as client:
        assert shown_name(client) == "broker"


def test_a_setting_that_cannot_be_used_is_refused(changing: TlsBroker) -> None:
    pki = changing.pki
    admin = AdminClient({"bootstrap.servers": changing.bootstrap})
    rubbish = pki.home / "rubbish.pem"
    rubbish.write_text("no certificate")
    for name in ("ssl.keystore.location", "listener.name.ssl.ssl.keystore.location"):
        for path in (pki.home / "missing.pem", rubbish):
            entry = ConfigEntry(name, str(path), incremental_operation=AlterConfigOpType.SET)
            resource = ConfigResource(ConfigResource.Type.BROKER, "1", incremental_configs=[entry])
            for validate_only in (True, False):
                (done,) = admin.incremental_alter_configs([resource], validate_only=validate_only).values()
                with pytest.raises(KafkaException, match=path.name) as refused:
                    done.result(PATIENT_S)
                assert refused.value.args[0].code() == KafkaError.INVALID_REQUEST
    context = pki.context(pki.client("alice"))
    assert now_shown(changing, context, ssl.TLSVersion.TLSv1_3) == "broker"
    # What has nothing to do with TLS is taken.
    entry = ConfigEntry("log.cleaner.threads", "2", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.BROKER, "1", incremental_configs=[entry])
    (done,) = admin.incremental_alter_configs([resource]).values()
    done.result(PATIENT_S)


# --- many -------------------------------------------------------------------------------------------------------------


def test_a_flood_of_handshakes(broker: TlsBroker) -> None:
    """Others are served meanwhile (`unharmed` looks), and nothing is left."""
    hello = client_hello(broker.pki)
    with broker.unharmed():
        for _ in range(5):
            with contextlib.ExitStack() as opened:
                flood = [opened.enter_context(RawClient((HOST, broker.tls_port))) for _ in range(200)]
                for client in flood:
                    client.send(hello)


def client_hello(pki: Pki) -> bytes:
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        pki.context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


def test_connections_leave_no_memory_behind(strict: TlsBroker) -> None:
    context = strict.pki.context(strict.pki.client("alice"))

    def come_and_go(count: int) -> None:
        for _ in range(count):
            with strict.tls(context) as client:
                client.alive()

    come_and_go(300)
    process = psutil.Process(strict.pid)
    before = process.memory_info().rss
    threads = [threading.Thread(target=come_and_go, args=(300,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert process.memory_info().rss - before < 4 * MIB
    assert served(strict, context)


def test_a_client_that_does_not_read_holds_no_more_than_its_answer(broker: TlsBroker) -> None:
    with broker.connect() as client:
        client.create_topic("unread")
        for _ in range(15):
            client.produce("unread", batch(bytes(MIB - 1000)))
    answer_bytes = 15 * MIB
    with broker.unharmed(max_growth_bytes=answer_bytes + 8 * MIB), broker.tls() as deaf:
        deaf.request(fetch_request("unread", 0, max_bytes=answer_bytes, partition_max_bytes=answer_bytes), 12)
        assert int.from_bytes(deaf.socket.recv(4)) > answer_bytes // 2
