"""Real clients over TLS: with and without a certificate of their own, while the broker's is renewed, and what each of
them says of a broker that it does not trust or that does not trust it."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import ssl
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError as AioError
from confluent_kafka import KafkaError, Producer

from clients.adapters.aio import Aiokafka
from clients.adapters.confluent import Confluent
from clients.adapters.interface import Client, Login, Sender
from clients.conftest import CLIENTS
from clients.logins import told_by_kafka_python
from clients.reading import read_count
from millrace.security.certificates import make_authority
from millrace.testing import Cluster
from support.certificates import Pki

BOUND_S = 30.0
LISTENERS = ("PLAINTEXT", "SSL", "MUTUAL", "EXPIRED", "ELSEWHERE")

each_client = pytest.mark.parametrize("kind", CLIENTS, ids=lambda kind: kind.name)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def cluster(pki: Pki) -> Iterator[Cluster]:
    """A listener for each thing that can be right or wrong with a broker."""
    shown = {"expired": pki.home / "expired.pem", "elsewhere": pki.home / "elsewhere.pem"}
    pki.renew(expired=True)
    pki.server.rename(shown["expired"])
    pki.renew(hosts=("elsewhere.example",))
    pki.server.rename(shown["elsewhere"])
    pki.renew()
    settings = {
        "listeners": ",".join(f"{name}://127.0.0.1:0" for name in LISTENERS),
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,SSL:SSL,MUTUAL:SSL,EXPIRED:SSL,ELSEWHERE:SSL",
        **pki.settings(),
        "listener.name.mutual.ssl.client.auth": "required",
        **{f"listener.name.{name}.ssl.keystore.location": str(path) for name, path in shown.items()},
    }
    with Cluster(settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """Whom nobody knows."""
    return Pki(tmp_path_factory.mktemp("stranger"), "a stranger")


@each_client
@pytest.mark.parametrize("listener", ["SSL", "MUTUAL"])
def test_a_client_writes_and_reads(
    cluster: Cluster, pki: Pki, kind: Callable[[Login], Client], listener: str, fresh: Callable[[str], str]
) -> None:
    topic = fresh("tls")
    cluster.create_topic(topic)
    own = str(pki.client(kind(Login()).name)) if listener == "MUTUAL" else ""
    client = kind(Login(ca_file=str(pki.trusted), certificate=own))
    bootstrap = cluster.bootstrap_servers_of(listener)
    values = [b"%d" % number * 5000 for number in range(100)]
    with client.running():
        sender = client.sender(bootstrap)
        for pending in [sender.send(topic, value, partition=0) for value in values]:
            pending.result(BOUND_S)
        sender.close()
        reader = client.reader(bootstrap, group=f"of-{topic}")
        reader.subscribe(topic)
        assert [record.value for record in read_count(reader, len(values))] == values
        reader.commit()
        reader.close()


@each_client
def test_no_record_is_lost_while_certificates_are_renewed(kind: Callable[[Login], Client], tmp_path: Path) -> None:
    """The broker's certificate, and the authority of its clients: one producer goes on, another comes."""
    pki = Pki(tmp_path)
    ca_file, old, new = (tmp_path / name for name in ("ca.pem", "old.pem", "new.pem"))
    ca_file.write_bytes(pki.authority.certificate)
    pki.authority.issue("alice").write(old)
    next_authority = make_authority("the next")
    next_authority.issue("alice").write(new)
    sent: list[bytes] = []

    def send(sender: Sender) -> None:
        for _ in range(10):
            sent.append(b"%d" % len(sent))
            sender.send("renewed", sent[-1], partition=0).result(BOUND_S)

    first, second = (kind(Login(ca_file=str(ca_file), certificate=str(own))) for own in (old, new))
    listeners = {"listeners": "PLAINTEXT://127.0.0.1:0,SSL://127.0.0.1:0"}
    with Cluster(settings={**listeners, **pki.settings("required")}) as cluster, first.running(), second.running():
        cluster.create_topic("renewed")
        bootstrap = cluster.bootstrap_servers_of("SSL")
        goes_on = first.sender(bootstrap)
        send(goes_on)
        pki.renew("renewed")
        pki.trusted.write_bytes(pki.authority.certificate + next_authority.certificate)
        until(lambda: shown(bootstrap, ca_file, new) == "renewed")
        comes = second.sender(bootstrap)
        send(goes_on)
        send(comes)
        pki.trusted.write_bytes(next_authority.certificate)
        until(lambda: shown(bootstrap, ca_file, old) is None)
        send(goes_on)
        send(comes)
        reader = second.reader(bootstrap)
        reader.assign([("renewed", 0)])
        assert [record.value for record in read_count(reader, len(sent))] == sent
        for opened in (goes_on, comes, reader):
            opened.close()


def shown(bootstrap: str, ca_file: Path, own: Path) -> str | None:
    """Whose certificate a client is shown that connects with its `own` now; None where it is not let in."""
    context = ssl.create_default_context(cafile=str(ca_file))
    context.load_cert_chain(own)
    context.maximum_version = ssl.TLSVersion.TLSv1_2  # where the handshake tells
    host, _, port = bootstrap.partition(":")
    try:
        with (
            socket.create_connection((host, int(port)), timeout=BOUND_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as tls,
        ):
            subject = (tls.getpeercert() or {})["subject"]
    except (ssl.SSLError, ConnectionError):
        return None
    return str(dict(part[0] for part in subject)["commonName"])  # type: ignore[misc]


def until(condition: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < ends_at, "it did not happen"
        time.sleep(0.05)


# --- who is turned away -----------------------------------------------------------------------------------------------


def words_of_librdkafka(bootstrap: str, login: Login, expected: str, log: pytest.LogCaptureFixture) -> str:
    del expected, log
    errors: list[KafkaError] = []
    producer = Producer({**Confluent(login)._address(bootstrap), "error_cb": errors.append, "log_level": 0})
    ends_at = time.monotonic() + BOUND_S
    while not errors and time.monotonic() < ends_at:
        producer.poll(0.1)
    assert errors[0].code() in {KafkaError._SSL, KafkaError._TRANSPORT}
    return str(errors[0])


def words_of_kafka_python(bootstrap: str, login: Login, expected: str, log: pytest.LogCaptureFixture) -> str:
    with log.at_level(logging.DEBUG, "kafka"):
        told_by_kafka_python(bootstrap, login, expected, log)
    with warnings.catch_warnings():  # it forgets the sockets of failed handshakes; they are let go of here, in silence
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    return log.text


def words_of_aiokafka(bootstrap: str, login: Login, expected: str, log: pytest.LogCaptureFixture) -> str:
    del expected

    async def start() -> None:
        producer = AIOKafkaProducer(**Aiokafka(login)._address(bootstrap))
        try:
            await producer.start()
        finally:
            await producer.stop()

    with log.at_level(logging.WARNING, "aiokafka"), pytest.raises(AioError) as caught:
        asyncio.run(start())
    return f"{caught.value} {log.text}"


WORDS = {"confluent-kafka": words_of_librdkafka, "kafka-python": words_of_kafka_python, "aiokafka": words_of_aiokafka}
NOT_VERIFIED = "certificate verify failed"
CASES = {
    "wrong authority": NOT_VERIFIED,
    "expired": NOT_VERIFIED,
    "elsewhere": NOT_VERIFIED,
    "no certificate": "certificate required",
    "expired client": "alert certificate expired",
    "unknown client": "alert unknown ca",
}


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("case", CASES)
def test_who_does_not_trust_the_other(
    cluster: Cluster, pki: Pki, stranger: Pki, name: str, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    trusted = str(pki.trusted)
    listener, login = {
        "wrong authority": ("SSL", Login(ca_file=str(stranger.trusted))),
        "expired": ("EXPIRED", Login(ca_file=trusted)),
        "elsewhere": ("ELSEWHERE", Login(ca_file=trusted)),
        "no certificate": ("MUTUAL", Login(ca_file=trusted)),
        "expired client": ("MUTUAL", Login(ca_file=trusted, certificate=str(pki.client("late", expired=True)))),
        "unknown client": ("MUTUAL", Login(ca_file=trusted, certificate=str(stranger.client("alice")))),
    }[case]
    # aiokafka does not tell why a connection ended after its own part of the handshake.
    expected = "closed" if name == "aiokafka" and listener == "MUTUAL" else CASES[case]
    started = time.monotonic()
    said = WORDS[name](cluster.bootstrap_servers_of(listener), login, expected, caplog)
    assert time.monotonic() - started < BOUND_S
    assert expected in said.lower()
