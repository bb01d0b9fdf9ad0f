"""OAUTHBEARER over real sockets: a login by access token, and every token that must not let anybody in.

The broker is a process that is watched, as in `test_sasl`: each refusal leaves it unharmed, and no token is in its log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.config import BrokerConfig, validate_dynamic_broker
from millrace.errors import ConfigError, ErrorCode
from millrace.testing import Cluster
from millrace.wire.messages.cluster import MetadataRequest
from support import identity_provider as provider
from support.identity_provider import Endpoint
from support.raw import PeerClosed
from support.sasl import SaslBroker, SaslClient

LISTENERS = "PLAINTEXT://127.0.0.1:0,SASL_PLAINTEXT://127.0.0.1:0"
REFUSED = b'{"status":"invalid_token"}'


def offering(url: str, **changed: str) -> dict[str, str]:
    return {
        "sasl.enabled.mechanisms": "OAUTHBEARER",
        "sasl.oauthbearer.jwks.endpoint.url": url,
        "sasl.oauthbearer.allowed.urls": url,
        "sasl.oauthbearer.expected.issuer": provider.ISSUER,
        "sasl.oauthbearer.expected.audience": provider.AUDIENCE,
        "sasl.oauthbearer.clock.skew.seconds": "5",
        **{f"sasl.oauthbearer.{name.replace('_', '.')}": value for name, value in changed.items()},
    }


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("provider") / "keys.json"
    file.write_bytes(provider.key_set(provider.key()))
    return file


@pytest.fixture(scope="module")
def broker(keys: Path) -> Iterator[SaslBroker]:
    with SaslBroker(offering(keys.as_uri())) as running:
        yield running
        assert "eyJ" not in running.log_text(), "a token"


def begin(client: SaslClient, token: str, authorization_id: str = "") -> Any:
    assert client.handshake("OAUTHBEARER").error_code == ErrorCode.NONE
    return client.authenticate(provider.first_message(token, authorization_id))


def assert_in(client: SaslClient) -> None:
    assert client.call(MetadataRequest(topics=[]), 12).brokers


def assert_refused(broker: SaslBroker, token: str, reason: str) -> None:
    """The client hears so, says that it has heard, and is closed; why is in the log."""
    start = len(broker.log_text())
    with broker.unharmed(), broker.enter() as client:
        answer = begin(client, token)
        assert (answer.error_code, answer.auth_bytes) == (ErrorCode.NONE, REFUSED)
        answer = client.authenticate(b"\x01")
        assert answer.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
        assert answer.error_message == REFUSED.decode()
        assert client.expect_close() == []
    assert reason in broker.log_text()[start:]


def test_a_login_ends_with_its_token(broker: SaslBroker) -> None:
    with broker.enter() as client:
        answer = begin(client, provider.token(provider.claims(exp=int(time.time()) + 60)), "alice")
        assert (answer.error_code, answer.auth_bytes) == (ErrorCode.NONE, b"")
        assert 50_000 < answer.session_lifetime_ms <= 60_000
        assert_in(client)


def test_a_session_is_over_when_its_token_is(broker: SaslBroker) -> None:
    with broker.enter() as client:
        answer = begin(client, provider.token(provider.claims(exp=time.time() + 1.5)))
        assert 0 < answer.session_lifetime_ms <= 1500
        assert_in(client)
        time.sleep(answer.session_lifetime_ms / 1000 + 0.2)
        with pytest.raises(PeerClosed):
            client.call(MetadataRequest(topics=[]), 12)
    with broker.enter() as client:  # but whoever brings a new one in time, stays
        begin(client, provider.token(provider.claims(exp=time.time() + 1.5)))
        assert begin(client, provider.token()).session_lifetime_ms > 200_000
        time.sleep(1.7)
        assert_in(client)


def test_nobody_becomes_somebody_else(broker: SaslBroker) -> None:
    with broker.enter() as client:
        answer = begin(client, provider.token(), "admin")
        assert answer.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
        assert "authorization id" in answer.error_message
        assert client.expect_close() == []
    with broker.enter() as client:  # nor on a connection that is somebody's
        begin(client, provider.token())
        answer = begin(client, provider.token(provider.claims(sub="bob")))
        assert answer.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
        assert client.expect_close() == []


def expired() -> str:
    return provider.token(provider.claims(exp=int(time.time()) - 6))


TOKENS: dict[str, tuple[Callable[[], str], str]] = {
    "expired": (expired, "expired"),
    "not valid yet": (lambda: provider.token(provider.claims(nbf=int(time.time()) + 20)), "not valid yet"),
    "of another issuer": (lambda: provider.token(provider.claims(iss="https://evil.example")), "another issuer"),
    "for another audience": (lambda: provider.token(provider.claims(aud="payroll")), "another audience"),
    "without an end": (lambda: provider.token(provider.claims(exp=None)), "claim exp"),
    "without a subject": (lambda: provider.token(provider.claims(sub=None)), "claim sub"),
    "unknown key": (lambda: provider.token(by=provider.key("RSA", "stranger")), "key 'stranger'"),
    "stranger's": (lambda: provider.token(by=provider.key("RSA", "stranger"), header={"kid": "one"}), "signature"),
    "no JWT": (lambda: "x" * 40, "no JWT"),
    "too large": (lambda: provider.token(provider.claims(pad="x" * 40_000)), "larger than"),
}


@pytest.mark.parametrize("what", TOKENS)
def test_a_token_that_does_not_count(broker: SaslBroker, what: str) -> None:
    make, reason = TOKENS[what]
    assert_refused(broker, make(), reason)


def test_cve_2026_33557_an_unsigned_token_does_not_count(broker: SaslBroker) -> None:
    for header in ({"alg": "none"}, {"alg": "None", "kid": "one"}, {"alg": "none", "kid": "one", "typ": "JWT"}):
        assert_refused(broker, provider.unsigned(provider.claims(), header), "are not taken")


def test_an_hmac_by_the_public_key_does_not_count(broker: SaslBroker, keys: Path) -> None:
    token = provider.signed_with_public_key(provider.claims(), keys.read_bytes(), "one")
    assert_refused(broker, token, "are not taken: 'HS256'")


def test_messages_out_of_order(broker: SaslBroker) -> None:
    for message in (b"\x01", b"", b"n,,\x01\x01", b"\0alice\0secret"):
        with broker.unharmed(), broker.enter() as client:
            client.handshake("OAUTHBEARER")
            answer = client.authenticate(message)
            assert (answer.error_code, answer.auth_bytes) == (ErrorCode.SASL_AUTHENTICATION_FAILED, b"")
            assert client.expect_close() == []
    with broker.enter() as client:  # a good token after a bad one
        assert begin(client, expired()).auth_bytes == REFUSED
        answer = client.authenticate(provider.first_message(provider.token()))
        assert answer.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
        assert client.expect_close() == []


def test_keys_that_change(tmp_path: Path) -> None:
    old, new = provider.key(), provider.key("P-256", "new")
    with Endpoint(tmp_path).serving() as endpoint:
        settings = offering(endpoint.url, jwks_endpoint_truststore_location=str(endpoint.authorities))
        with SaslBroker(settings) as broker:
            signed = provider.token(by=new, algorithm="ES256")
            with broker.enter() as client:
                assert begin(client, provider.token()).error_code == ErrorCode.NONE
                assert_in(client)
            with broker.enter() as client:
                assert begin(client, signed).auth_bytes == REFUSED
            asked = endpoint.asked
            for _ in range(20):  # nobody makes the broker ask more often
                with broker.enter() as client:
                    assert begin(client, signed).auth_bytes == REFUSED
            assert endpoint.asked - asked <= 2
            endpoint.body = provider.key_set(old, new)
            deadline = time.monotonic() + 30
            while True:
                with broker.enter() as client:
                    if begin(client, signed).auth_bytes == b"":
                        break
                assert time.monotonic() < deadline
                time.sleep(0.5)
            endpoint.stop()
            for token in (signed, provider.token()):
                with broker.enter() as client:
                    begin(client, token)
                    assert_in(client)


# --- starting ---------------------------------------------------------------------------------------------------------


def fails_to_start(settings: dict[str, str]) -> str:
    cluster = Cluster(settings={"listeners": LISTENERS, **settings})
    with pytest.raises(ConfigError) as refused, cluster:
        pass
    return str(refused.value)


def test_cve_2026_110985_no_broker_starts_without_keys(tmp_path: Path) -> None:
    missing = tmp_path / "missing.json"
    without_url = offering(missing.as_uri())
    del without_url["sasl.oauthbearer.jwks.endpoint.url"]
    assert "no keys" in fails_to_start(without_url)
    assert "no keys" in fails_to_start(offering(missing.as_uri()))
    missing.write_text('{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}')
    assert "no keys" in fails_to_start(offering(missing.as_uri()))


def test_cve_2025_27817_urls_are_not_followed_anywhere(tmp_path: Path) -> None:
    with Endpoint(tmp_path).serving() as endpoint:
        settings = offering(endpoint.url, jwks_endpoint_truststore_location=str(endpoint.authorities))
        quick = {"sasl.oauthbearer.jwks.endpoint.retry.backoff.max.ms": "1"}
        assert "allowed.urls" in fails_to_start({**settings, "sasl.oauthbearer.allowed.urls": endpoint.url + "/"})
        assert "neither https" in fails_to_start(offering(endpoint.url.replace("https", "http")))
        assert endpoint.asked == 0
        endpoint.status, endpoint.headers = 302, {"Location": endpoint.url}
        assert "answered 302" in fails_to_start({**settings, **quick})
        assert endpoint.asked == 1
    for name in ("jwks.endpoint.url", "allowed.urls", "jwks.endpoint.truststore.location"):
        with pytest.raises(ConfigError, match="cannot change while brokers run"):
            validate_dynamic_broker({f"sasl.oauthbearer.{name}": "file:///etc/passwd"}, per_broker=True)


def test_settings_of_another_listener_do_not_count(keys: Path) -> None:
    settings = offering(keys.as_uri())
    url = settings.pop("sasl.oauthbearer.jwks.endpoint.url")
    own = "listener.name.{}.oauthbearer.sasl.oauthbearer.jwks.endpoint.url"
    assert "no keys" in fails_to_start({**settings, own.format("others"): url})
    BrokerConfig({**settings, own.format("sasl_plaintext"): url})
