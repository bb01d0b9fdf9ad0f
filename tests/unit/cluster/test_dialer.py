"""How a broker calls another: protocols, certificates and logins, against a scripted broker on a real socket."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import pytest
import trustme

from millrace.broker import Broker
from millrace.client.sasl import SaslClient
from millrace.clock import ManualClock, SystemClock
from millrace.cluster.dialer import REMIND_S, Dialer, TurnedAway, login_of
from millrace.cluster.liveness import is_refusal
from millrace.config import BrokerConfig
from millrace.errors import ApiError, ConfigError, ErrorCode
from millrace.metadata.deltas import Endpoint
from millrace.wire.keys import ApiKey
from millrace.wire.messages.groups import HeartbeatRequest, HeartbeatResponse
from millrace.wire.messages.sasl import SaslAuthenticateResponse, SaslHandshakeResponse
from support.fake_broker import FakeBroker

MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"


def jaas(password: str) -> str:
    return f'{MODULE} required username="broker" password="{password}";'


LOGIN = {
    "listener.name.inner.sasl.mechanism.inter.broker.protocol": "PLAIN",
    "listener.name.inner.plain.sasl.jaas.config": jaas("secret"),
}


def dialer(settings: dict[str, str]) -> Dialer:
    return Dialer(BrokerConfig(settings), ManualClock())


def taking(password: str, context: ssl.SSLContext | None = None) -> FakeBroker:
    def authenticate(request: object) -> SaslAuthenticateResponse:
        good = getattr(request, "auth_bytes", b"") == f"\0broker\0{password}".encode()
        if good:
            return SaslAuthenticateResponse(error_message=None)
        return SaslAuthenticateResponse(error_code=58, error_message="Authentication failed")

    return FakeBroker(
        {
            ApiKey.SASL_HANDSHAKE: lambda _: SaslHandshakeResponse(mechanisms=["PLAIN"]),
            ApiKey.SASL_AUTHENTICATE: authenticate,
            ApiKey.HEARTBEAT: lambda _: HeartbeatResponse(),
        },
        context=context,
    )


def endpoint(broker: FakeBroker, protocol: str, host: str = "127.0.0.1") -> Endpoint:
    return Endpoint("INNER", host, broker.port, protocol)


async def call(dialer: Dialer, endpoint: Endpoint) -> None:
    async with await dialer.open(endpoint, 2, timeout_ms=5000) as connection:
        await connection.request(HeartbeatRequest(), 4)


# --- logins -----------------------------------------------------------------------------------------------------------


async def test_the_protocol_is_that_of_the_endpoint() -> None:
    calling = dialer(LOGIN)
    with taking("secret") as broker:
        await call(calling, endpoint(broker, "SASL_PLAINTEXT"))
        await call(calling, endpoint(broker, "PLAINTEXT"))
    keys = [key for key, _ in broker.seen]
    assert keys == [ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE, ApiKey.HEARTBEAT, ApiKey.HEARTBEAT]


async def test_a_login_that_is_refused_is_told_once_and_is_no_refusal(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    calling = Dialer(BrokerConfig(LOGIN), clock)
    refused = "broker 1 could not log in to broker 2: user 'broker' by PLAIN: Authentication failed"

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]

    with taking("another") as broker, taking("secret") as willing:
        for _ in range(3):
            with pytest.raises(TurnedAway) as caught:
                await call(calling, endpoint(broker, "SASL_PLAINTEXT"))
            assert not is_refusal(caught.value)
            # A client whose request is forwarded must not take it for its own login.
            assert caught.value.code is ErrorCode.NETWORK_EXCEPTION
        assert said() == [refused]
        clock.advance(REMIND_S)
        with pytest.raises(TurnedAway):
            await call(calling, endpoint(broker, "SASL_PLAINTEXT"))
        assert said() == [refused] * 2
        with caplog.at_level(logging.INFO):
            await call(calling, endpoint(willing, "SASL_PLAINTEXT"))
        assert caplog.records[-1].getMessage() == "broker 1 has logged in to broker 2"
    assert "secret" not in caplog.text


async def test_nobody_there_is_a_refusal_with_any_protocol() -> None:
    with taking("secret") as broker:
        gone = broker.port
    for protocol in ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"):
        with pytest.raises(ApiError) as caught:
            await call(dialer(LOGIN), Endpoint("INNER", "127.0.0.1", gone, protocol))
        assert is_refusal(caught.value)
        assert not isinstance(caught.value, TurnedAway)


async def test_a_login_keeps_its_keys_and_follows_the_settings() -> None:
    config = BrokerConfig(LOGIN)
    calling = Dialer(config, SystemClock())

    def login() -> object:
        return calling._login(Endpoint("INNER", "h", 1, "SASL_PLAINTEXT"))

    assert login() is login()
    before = login()
    config.apply_dynamic({}, {"listener.name.inner.plain.sasl.jaas.config": jaas("new")})
    assert login() != before


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "sasl.mechanism.inter.broker.protocol=GSSAPI: brokers log in to each other by one of PLAIN"),
        ({"sasl.mechanism.inter.broker.protocol": "PLAIN"}, "listener.name.inner.plain.sasl.jaas.config is missing"),
        ({**LOGIN, "listener.name.inner.plain.sasl.jaas.config": f"{MODULE} required;"}, "username"),
    ],
)
def test_a_login_that_is_not_set_up(settings: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        login_of(BrokerConfig(settings), "INNER")


def test_the_settings_of_all_listeners_serve_where_one_has_none() -> None:
    config = BrokerConfig({"sasl.mechanism.inter.broker.protocol": "SCRAM-SHA-512", "sasl.jaas.config": jaas("shared")})
    assert login_of(config, "INNER") == SaslClient("SCRAM-SHA-512", "broker", "shared")


# --- TLS --------------------------------------------------------------------------------------------------------------


def identity(authority: trustme.CA, path: Path, *names: str) -> ssl.SSLContext:
    """A server's context for `names`; certificate and key are at `path`, as in a PEM keystore."""
    leaf = authority.issue_cert(*names)
    leaf.private_key_and_cert_chain_pem.write_to_path(path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    leaf.configure_cert(context)
    return context


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


async def test_certificates_on_both_sides(authority: trustme.CA, tmp_path: Path) -> None:
    trust, keystore = tmp_path / "ca.pem", tmp_path / "broker.pem"
    authority.cert_pem.write_to_path(trust)
    context = identity(authority, keystore, "127.0.0.1")
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    stores = {"ssl.truststore.location": str(trust), "ssl.keystore.location": str(keystore)}
    with taking("secret", context) as broker:
        await call(dialer(stores), endpoint(broker, "SSL"))
        await call(dialer({**stores, **LOGIN}), endpoint(broker, "SASL_SSL"))
        for protocol in ("SSL", "SASL_SSL"):
            with pytest.raises(TurnedAway, match=r"(?i)certificate.required"):
                await call(dialer({"ssl.truststore.location": str(trust), **LOGIN}), endpoint(broker, protocol))


@pytest.mark.parametrize("names_are_checked", [True, False])
async def test_a_certificate_for_another_name(authority: trustme.CA, tmp_path: Path, names_are_checked: bool) -> None:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    settings = {"listener.name.inner.ssl.truststore.location": str(tmp_path / "ca.pem")}
    if not names_are_checked:
        settings["listener.name.inner.ssl.endpoint.identification.algorithm"] = ""
    with taking("secret", identity(authority, tmp_path / "broker.pem", "elsewhere.example")) as broker:
        if not names_are_checked:
            await call(dialer(settings), endpoint(broker, "SSL"))
            return
        with pytest.raises(TurnedAway, match="IP address mismatch") as caught:
            await call(dialer(settings), endpoint(broker, "SSL"))
        assert not is_refusal(caught.value)


async def test_another_authority(authority: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
    calling = dialer({"ssl.truststore.location": str(tmp_path / "ca.pem")})
    context = identity(authority, tmp_path / "broker.pem", "127.0.0.1")
    with taking("secret", context) as broker, pytest.raises(TurnedAway):
        await call(calling, endpoint(broker, "SSL"))
    assert "broker 1 could not log in to broker 2" in caplog.text
    assert "certificate verify failed" in caplog.text


async def test_new_files_are_used_and_a_broken_one_is_not(
    authority: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trust = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(trust)
    newer = trustme.CA()
    calling = dialer({"ssl.truststore.location": str(trust)})
    with (
        taking("secret", identity(authority, tmp_path / "1.pem", "127.0.0.1")) as before,
        taking("secret", identity(newer, tmp_path / "2.pem", "127.0.0.1")) as after,
    ):
        await call(calling, endpoint(before, "SSL"))
        trust.write_text("-----BEGIN CERTIFICATE-----\nhalf")
        await call(calling, endpoint(before, "SSL"))
        assert "calls go on with the certificates in use" in caplog.text
        newer.cert_pem.write_to_path(trust)
        await call(calling, endpoint(after, "SSL"))


async def test_files_that_never_were(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with taking("secret") as broker:
        calling = dialer({"ssl.truststore.location": str(tmp_path / "none.pem")})
        with pytest.raises(ApiError, match=r"ssl.truststore.location .*none.pem") as caught:
            await call(calling, endpoint(broker, "SSL"))
    assert caught.value.code is ErrorCode.NETWORK_EXCEPTION
    assert not isinstance(caught.value, TurnedAway)  # nobody was asked
    assert "none.pem" in caplog.text


# --- at the start -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["SASL_PLAINTEXT", "SSL"])
def test_a_broker_that_could_not_call_others_like_it_does_not_start(protocol: str) -> None:
    settings = {"listeners": f"{protocol}://127.0.0.1:0", "ssl.truststore.location": "/nowhere/ca.pem"}
    problem = "ssl.truststore.location" if protocol == "SSL" else "sasl.mechanism.inter.broker.protocol"
    with pytest.raises(ConfigError, match=problem):
        dialer(settings).check()


async def test_a_broker_that_is_alone_needs_no_login_to_others(tmp_path: Path) -> None:
    settings = {
        "listeners": "SASL_PLAINTEXT://127.0.0.1:0",
        "sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "log.dirs": str(tmp_path),
    }
    broker = Broker(BrokerConfig(settings))
    await broker.start()
    await broker.stop(linger=False)
    with pytest.raises(ConfigError, match=r"sasl\.mechanism\.inter\.broker\.protocol"):
        await Broker(BrokerConfig({**settings, "log.dirs": str(tmp_path / "2"), "zookeeper.connect": "h:1"})).start()
