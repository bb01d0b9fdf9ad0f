"""TLS from settings, against a scripted broker with certificates of our own."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest

from millrace.client.cluster import ClusterClient
from millrace.client.settings import ClientSettings
from millrace.client.tls import context_for
from millrace.errors import ApiError, ConfigError, ErrorCode
from millrace.wire.keys import ApiKey
from support.fake_broker import FakeBroker, metadata

CERTIFICATES = Path(__file__).parent / "certificates"
CA = str(CERTIFICATES / "ca.pem")


def broker(certificate: str = "server.pem", *, wants_client: bool = False) -> FakeBroker:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATES / certificate)
    if wants_client:
        context.load_verify_locations(CA)
        context.verify_mode = ssl.CERT_REQUIRED
    fake = FakeBroker(context=context)
    fake.answers[ApiKey.METADATA] = lambda request: metadata([fake], {"t": [1]})
    return fake


def topics(port: int, properties: dict[str, str], host: str = "127.0.0.1") -> list[str]:
    settings = ClientSettings.from_properties(
        {
            "bootstrap.servers": f"{host}:{port}",
            "security.protocol": "SSL",
            "default.api.timeout.ms": "200",
            "retry.backoff.ms": "1",
            **properties,
        }
    )
    with ClusterClient(settings) as client:
        return list(client.topics())


@pytest.mark.parametrize(
    "properties",
    [
        {"ssl.ca.location": CA},
        {"ssl.truststore.location": CA, "ssl.truststore.type": "PEM"},
        {"ssl.truststore.certificates": Path(CA).read_text()},
        {"ssl.ca.pem": Path(CA).read_text().replace("\n", "\\n")},
        {"enable.ssl.certificate.verification": "false"},
    ],
)
def test_a_trusted_broker(properties: dict[str, str]) -> None:
    with broker() as fake:
        assert topics(fake.port, properties) == ["t"]


def test_an_unknown_authority_is_not_retried() -> None:
    refused = pytest.raises(ConfigError, match=r"certificate of 127\.0\.0\.1:\d+ is not trusted.*ssl\.ca\.location")
    with broker() as fake, refused:
        topics(fake.port, {})


def test_the_host_name_is_checked_unless_switched_off() -> None:
    with broker("misnamed.pem") as fake:
        with pytest.raises(ConfigError, match="not trusted"):
            topics(fake.port, {"ssl.ca.location": CA})
        assert topics(fake.port, {"ssl.ca.location": CA, "ssl.endpoint.identification.algorithm": ""}) == ["t"]


@pytest.mark.parametrize(
    "properties",
    [
        {"ssl.keystore.location": str(CERTIFICATES / "client.pem"), "ssl.keystore.type": "PEM"},
        {
            "ssl.certificate.location": str(CERTIFICATES / "client.crt"),
            "ssl.key.location": str(CERTIFICATES / "client-encrypted.key"),
            "ssl.key.password": "secret",
        },
        {
            "ssl.keystore.certificate.chain": (CERTIFICATES / "client.crt").read_text(),
            "ssl.keystore.key": (CERTIFICATES / "client.key").read_text(),
        },
    ],
)
def test_a_broker_that_wants_to_know_the_client(properties: dict[str, str]) -> None:
    with broker(wants_client=True) as fake:
        assert topics(fake.port, {"ssl.ca.location": CA, **properties}) == ["t"]


def test_a_client_without_the_certificate_that_is_wanted() -> None:
    refused = pytest.raises(ConfigError, match=r"ended TLS.*client certificate")
    with broker(wants_client=True) as fake, refused:
        topics(fake.port, {"ssl.ca.location": CA, "default.api.timeout.ms": "10000"})


class Talker(FakeBroker):
    """A port that speaks something else: it says `greeting` to whoever connects, and hangs up."""

    def __init__(self, greeting: bytes) -> None:
        super().__init__()
        self._greeting = greeting

    def _serve(self, peer: socket.socket) -> None:
        with peer:
            peer.recv(5)
            peer.sendall(self._greeting)


def test_a_port_without_tls() -> None:
    failed = pytest.raises(ConfigError, match=r"no TLS with .*security\.protocol")
    with Talker(b"HTTP/1.1 400 Bad Request\r\n\r\n") as other, failed:
        topics(other.port, {"ssl.ca.location": CA})
    with Talker(b"") as other:  # as a Kafka port without TLS does, and a broker that stops
        with pytest.raises(ApiError, match=r"gave up after 0\.2 s.*TLS") as caught:
            topics(other.port, {"ssl.ca.location": CA})
        assert caught.value.code is ErrorCode.NETWORK_EXCEPTION


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ssl.ca.location", "/nowhere/ca.pem"),
        ("ssl.ca.location", str(CERTIFICATES / "README.md")),
        ("ssl.ca.pem", "no certificate"),
        ("ssl.keystore.location", "/nowhere/client.pem"),
        ("ssl.keystore.certificate.chain", "no certificate"),
    ],
)
def test_files_that_cannot_be_used(name: str, value: str) -> None:
    properties = {"bootstrap.servers": "h:1", "security.protocol": "SSL", name: value}
    with pytest.raises(ConfigError) as caught:
        context_for(ClientSettings.from_properties(properties).security)
    assert str(caught.value).startswith(f"{name}: ")


def test_a_key_with_the_wrong_password() -> None:
    properties = {
        "bootstrap.servers": "h:1",
        "security.protocol": "SSL",
        "ssl.certificate.location": str(CERTIFICATES / "client.crt"),
        "ssl.key.location": str(CERTIFICATES / "client-encrypted.key"),
    }
    for more in ({}, {"ssl.key.password": "wrong"}):
        with pytest.raises(ConfigError, match=r"ssl\.key\.location"):
            context_for(ClientSettings.from_properties({**properties, **more}).security)


def test_no_tls_no_context() -> None:
    assert context_for(ClientSettings.from_properties({"bootstrap.servers": "h:1"}).security) is None
