"""Logging in over real sockets: what is served before, in which order, what a failure looks like, and logging in again.

The broker is a process that is watched (`unharmed`): another client is served throughout, memory does not grow, the log
holds neither a traceback nor a secret. JSON web tokens and delegation tokens are not here.
"""

from __future__ import annotations

import base64
import statistics
import struct
import time
from collections.abc import Callable, Iterator

import pytest

from millrace.config import BrokerConfig
from millrace.errors import ConfigError, ErrorCode
from millrace.security.scram import ScramMechanism
from millrace.testing import Cluster
from millrace.wire.keys import ApiKey
from millrace.wire.messages.api_versions import ApiVersionsRequest
from millrace.wire.messages.cluster import MetadataRequest
from millrace.wire.messages.sasl import SaslAuthenticateRequest, SaslAuthenticateResponse, SaslHandshakeRequest
from millrace.wire.messages.scram import AlterUserScramCredentialsRequest, DescribeUserScramCredentialsRequest
from support.raw import MIB, PROMPT_S, PeerClosed, RawClient, api_versions_frame, framed, produce_request
from support.sasl import MECHANISMS, SaslBroker, SaslClient, steps_of, upsertion

USERS = {"alice": "al1ce-secret", "bob": "b0b-secret", "o,=ö": "ö-secret"}
JAAS = 'PlainLoginModule required username="broker" password="own-secret" user_carol="car0l-secret";'
SECRETS = (*USERS.values(), "own-secret", "car0l-secret")
SESSION_MS = 1500
DELAY_S = 0.1

each_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS)


@pytest.fixture(scope="module")
def broker() -> Iterator[SaslBroker]:
    with SaslBroker({"listener.name.sasl_plaintext.plain.sasl.jaas.config": JAAS}, USERS) as running:
        yield running
        log = running.log_text()
        assert not any(secret in log for secret in SECRETS)


@pytest.fixture(scope="module")
def short() -> Iterator[SaslBroker]:
    """Whose sessions end soon, and who waits only a moment for a login."""
    settings = {
        "connections.max.reauth.ms": str(SESSION_MS),
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": JAAS,
    }
    with SaslBroker(settings, USERS) as running:
        yield running


def assert_in(client: RawClient) -> None:
    """Whoever is logged in is answered what needs a login."""
    assert client.call(MetadataRequest(topics=[]), 12).brokers


def assert_failed(client: SaslClient, answer: SaslAuthenticateResponse, text: str = "") -> None:
    assert answer.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
    assert text in (answer.error_message or "")
    assert client.expect_close() == []


# --- in ---------------------------------------------------------------------------------------------------------------


@each_mechanism
@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("version", [0, 1, 2])
def test_a_login(broker: SaslBroker, mechanism: str, user: str, version: int) -> None:
    with broker.enter() as client:
        assert client.call(ApiVersionsRequest(client_software_name="x", client_software_version="1"), 3).api_keys
        handshake = client.handshake(mechanism)
        assert (handshake.error_code, handshake.mechanisms) == (ErrorCode.NONE, list(MECHANISMS))
        answer = client.exchange(mechanism, user, USERS[user], version)
        assert (answer.error_code, answer.error_message, answer.session_lifetime_ms) == (ErrorCode.NONE, None, 0)
        assert_in(client)
        client.alive()


def test_a_user_of_the_jaas_line(broker: SaslBroker) -> None:
    with broker.enter() as client:
        assert client.log_in("PLAIN", "carol", "car0l-secret").error_code == ErrorCode.NONE
        assert_in(client)
    with broker.enter() as client:  # who is known to PLAIN only
        assert_failed(client, client.log_in("SCRAM-SHA-256", "carol", "car0l-secret"))


@each_mechanism
def test_a_login_in_frames_without_a_header(broker: SaslBroker, mechanism: str) -> None:
    """SaslHandshake v0, as old clients send it."""
    with broker.enter() as client:
        assert client.handshake(mechanism, version=0).error_code == ErrorCode.NONE
        steps = steps_of(mechanism, "alice", USERS["alice"])
        message = next(steps)
        with pytest.raises(StopIteration):
            while True:
                client.send(struct.pack(">i", len(message)) + message)
                message = steps.send(client.read_frame())
        assert_in(client)
    with broker.unharmed(), broker.enter() as client:
        client.handshake(mechanism, version=0)
        client.send(struct.pack(">i", 5) + b"wrong")
        assert client.expect_close() == []


def test_users_who_come_and_go(broker: SaslBroker) -> None:
    mechanism = ScramMechanism.SCRAM_SHA_256
    with broker.connect() as admin:
        for password in ("first", "second"):
            request = AlterUserScramCredentialsRequest(upsertions=[upsertion("dave", mechanism, password, 8192)])
            assert admin.call(request, 0).results[0].error_code == ErrorCode.NONE
            with broker.enter() as client:
                assert client.log_in("SCRAM-SHA-256", "dave", password).error_code == ErrorCode.NONE
            with broker.enter() as client:
                assert client.log_in("PLAIN", "dave", password).error_code == ErrorCode.NONE
            with broker.enter() as client:
                assert_failed(client, client.log_in("SCRAM-SHA-512", "dave", password))
        with broker.enter() as client:
            assert_failed(client, client.log_in("SCRAM-SHA-256", "dave", "first"))
        removal = AlterUserScramCredentialsRequest.ScramCredentialDeletion(name="dave", mechanism=mechanism)
        assert admin.call(AlterUserScramCredentialsRequest(deletions=[removal]), 0).results[0].error_code == 0
        for each in MECHANISMS:
            with broker.enter() as client:
                assert_failed(client, client.log_in(each, "dave", "second"))


# --- not in -----------------------------------------------------------------------------------------------------------


@each_mechanism
@pytest.mark.parametrize(
    ("user", "password"), [("alice", "wrong"), ("alice", USERS["bob"]), ("nobody", "wrong"), ("Alice", USERS["alice"])]
)
def test_a_wrong_password_and_an_unknown_user_are_answered_alike(
    broker: SaslBroker, mechanism: str, user: str, password: str
) -> None:
    with broker.unharmed(), broker.enter() as client:
        client.handshake(mechanism)
        started = time.monotonic()
        answer = client.exchange(mechanism, user, password)
        assert time.monotonic() - started >= DELAY_S
        told = "Authentication failed during authentication due to invalid credentials with SASL mechanism "
        alike = "Authentication failed: Invalid username or password" if mechanism == "PLAIN" else told + mechanism
        assert answer.error_message == alike
        assert_failed(client, answer)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\0",
        b"\0\0",
        b"\0alice\0",
        b"\0\0al1ce-secret",
        b"alice",
        b"\0alice\0al1ce-secret\0",
        b"\0\0\0\0",
        b"\xff\0a\0b",
    ],
)
def test_plain_messages_that_are_none(broker: SaslBroker, message: bytes) -> None:
    with broker.unharmed(), broker.enter() as client:
        client.handshake("PLAIN")
        assert_failed(client, client.authenticate(message))


def test_cve_2017_12610_nobody_logs_in_as_another_user(broker: SaslBroker) -> None:
    with broker.unharmed():
        with broker.enter() as client:
            client.handshake("PLAIN")
            assert_failed(client, client.authenticate(b"bob\0alice\0al1ce-secret"), "authorization id")
        with broker.enter() as client:
            client.handshake("SCRAM-SHA-256")
            assert_failed(client, client.authenticate(b"n,a=bob,n=alice,r=abcdef"), "authorization id")
        with broker.enter() as client:
            client.handshake("PLAIN")
            assert client.authenticate(b"alice\0alice\0al1ce-secret").error_code == ErrorCode.NONE


def test_cve_2024_56128_a_nonce_of_another_login_is_refused(broker: SaslBroker) -> None:
    steps = steps_of("SCRAM-SHA-256", "alice", USERS["alice"])
    first = next(steps)
    with broker.unharmed(), broker.enter() as one, broker.enter() as other:
        for client in (one, other):
            client.handshake("SCRAM-SHA-256")
        final = steps.send(one.authenticate(first).auth_bytes)
        other.authenticate(first)
        assert_failed(other, other.authenticate(final))
        nonce = final.split(b",r=")[1].split(b",")[0]
        assert_failed(one, one.authenticate(final.replace(nonce, nonce[:-1])))


def test_a_login_cannot_be_replayed(broker: SaslBroker) -> None:
    steps = steps_of("SCRAM-SHA-512", "alice", USERS["alice"])
    first = next(steps)
    with broker.enter() as client:
        client.handshake("SCRAM-SHA-512")
        final = steps.send(client.authenticate(first).auth_bytes)
        assert client.authenticate(final).error_code == ErrorCode.NONE
    with broker.unharmed(), broker.enter() as client:
        client.handshake("SCRAM-SHA-512")
        client.authenticate(first)
        assert_failed(client, client.authenticate(final))


def test_cve_2021_38153_an_unknown_user_takes_as_long(broker: SaslBroker) -> None:
    """The delay is in both; what the broker adds to it is compared, with a wide margin."""

    def spent_s(mechanism: str, user: str) -> float:
        with broker.enter() as client:
            client.handshake(mechanism)
            started = time.perf_counter()
            assert client.exchange(mechanism, user, "wrong").error_code
            return time.perf_counter() - started

    for mechanism in ("PLAIN", "SCRAM-SHA-256"):
        known, unknown = [], []
        for _ in range(10):
            known.append(spent_s(mechanism, "alice"))
            unknown.append(spent_s(mechanism, "nobody"))
        assert abs(statistics.median(known) - statistics.median(unknown)) < 0.02


def test_cve_2021_38153_an_unknown_user_has_a_salt_that_stays(broker: SaslBroker) -> None:
    def challenge(user: str) -> dict[str, str]:
        with broker.enter() as client:
            client.handshake("SCRAM-SHA-256")
            answer = client.authenticate(f"n,,n={user},r=abc".encode()).auth_bytes.decode()
            return dict(part.split("=", 1) for part in answer.split(","))

    nobody, again, alice = challenge("nobody"), challenge("nobody"), challenge("alice")
    assert (nobody["s"], nobody["i"]) == (again["s"], again["i"])
    assert nobody["r"] != again["r"]
    assert (len(base64.b64decode(alice["s"])), alice["i"]) == (len(base64.b64decode(nobody["s"])), nobody["i"])


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.request(MetadataRequest(topics=[]), 12),
        lambda client: client.request(produce_request("bystander", b"x"), 9),
        lambda client: client.request(SaslAuthenticateRequest(auth_bytes=b"\0alice\0al1ce-secret"), 2),
        lambda client: client.send(framed(ApiKey.FETCH, 99)),
        lambda client: client.send(framed(999, 0)),
        lambda client: client.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        lambda client: client.send(struct.pack(">i", 19) + b"\0alice\0al1ce-secret"),
    ],
    ids=["metadata", "produce", "authenticate", "fetch-99", "unknown", "http", "token"],
)
@pytest.mark.parametrize("after", ["connect", "api-versions"])
def test_nothing_is_served_before_a_login(broker: SaslBroker, ask: Callable[[SaslClient], object], after: str) -> None:
    with broker.unharmed(), broker.enter() as client:
        if after == "api-versions":
            client.alive()
        ask(client)
        assert client.expect_close() == []


def test_nothing_is_served_during_a_login(broker: SaslBroker) -> None:
    for request, version in ((MetadataRequest(topics=[]), 12), (ApiVersionsRequest(), 0)):
        with broker.unharmed(), broker.enter() as client:
            client.handshake("SCRAM-SHA-256")
            client.authenticate(next(steps_of("SCRAM-SHA-256", "alice", "x")))
            client.request(request, version)
            assert client.expect_close() == []


def test_a_request_right_behind_a_failed_login_is_not_served(broker: SaslBroker) -> None:
    with broker.unharmed(), broker.enter() as client:
        client.handshake("PLAIN")
        client.request(SaslAuthenticateRequest(auth_bytes=b"\0alice\0wrong"), 2)
        failing = client._correlation_id
        client.request(MetadataRequest(topics=[]), 12)
        client._correlation_id = failing
        assert_failed(client, client.response(ApiKey.SASL_AUTHENTICATE, 2))


def test_a_request_right_behind_a_login_is_served(broker: SaslBroker) -> None:
    with broker.enter() as client:
        client.handshake("PLAIN")
        client.request(SaslAuthenticateRequest(auth_bytes=b"\0alice\0al1ce-secret"), 2)
        first = client._correlation_id
        client.request(MetadataRequest(topics=[]), 12)
        client._correlation_id = first
        assert client.response(ApiKey.SASL_AUTHENTICATE, 2).error_code == ErrorCode.NONE
        client._correlation_id += 1
        assert client.response(ApiKey.METADATA, 12).brokers


def test_a_second_handshake(broker: SaslBroker) -> None:
    with broker.unharmed(), broker.enter() as client:
        client.handshake("PLAIN")
        assert client.handshake("SCRAM-SHA-256").error_code == ErrorCode.ILLEGAL_SASL_STATE
        assert client.expect_close() == []


def test_a_mechanism_that_is_not_offered(broker: SaslBroker) -> None:
    for mechanism in ("GSSAPI", "OAUTHBEARER", "plain", "", "x" * 30_000):
        with broker.unharmed(), broker.enter() as client:
            answer = client.handshake(mechanism)
            assert (answer.error_code, answer.mechanisms) == (ErrorCode.UNSUPPORTED_SASL_MECHANISM, list(MECHANISMS))
            assert client.expect_close() == []


def test_a_message_after_the_login(broker: SaslBroker) -> None:
    with broker.enter() as client:
        client.log_in("SCRAM-SHA-256", "alice", USERS["alice"])
        assert client.authenticate(b"x").error_code == ErrorCode.ILLEGAL_SASL_STATE
        assert client.handshake("SCRAM-SHA-256").error_code == ErrorCode.ILLEGAL_SASL_STATE  # sessions do not end here
        assert_in(client)


def test_where_nobody_logs_in(broker: SaslBroker) -> None:
    with broker.connect() as client:
        answer = client.call(SaslHandshakeRequest(mechanism="PLAIN"), 1)
        assert (answer.error_code, answer.mechanisms) == (ErrorCode.ILLEGAL_SASL_STATE, [])
        assert client.call(SaslAuthenticateRequest(auth_bytes=b"x"), 2).error_code == ErrorCode.ILLEGAL_SASL_STATE
        client.alive()


def test_an_unknown_version_of_api_versions_is_answered_before_a_login(broker: SaslBroker) -> None:
    with broker.enter() as client:
        client.send(framed(ApiKey.API_VERSIONS, 99))
        assert ErrorCode.UNSUPPORTED_VERSION.to_bytes(2) in client.read_frame()[:6]
        client.handshake("PLAIN")
        assert client.exchange("PLAIN", "alice", USERS["alice"]).error_code == ErrorCode.NONE


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_cve_2022_34917_frames_before_a_login_are_small(broker: SaslBroker) -> None:
    limit = 512 * 1024
    with broker.unharmed():
        for declared in (limit + 1, 100 * MIB, 2**31 - 1):
            with broker.enter() as client:
                client.send(struct.pack(">i", declared))
                assert client.expect_close() == []
        with broker.enter() as client:
            client.handshake("PLAIN")
            client.try_send(struct.pack(">i", limit + 1))
            assert client.expect_close() == []


def test_cve_2022_34917_many_half_logins_take_little_memory(broker: SaslBroker) -> None:
    with broker.unharmed():
        clients = [broker.enter() for _ in range(100)]
        try:
            for client in clients:
                client.send(struct.pack(">i", 500_000) + bytes(64))
            with broker.enter() as client:
                assert client.log_in("SCRAM-SHA-256", "alice", USERS["alice"]).error_code == ErrorCode.NONE
        finally:
            for client in clients:
                client.close()


def test_a_large_token_is_read_and_refused(broker: SaslBroker) -> None:
    for mechanism in MECHANISMS:
        with broker.unharmed(), broker.enter() as client:
            client.handshake(mechanism)
            assert_failed(client, client.authenticate(b"\0alice\0" + b"x" * 500_000))


def test_large_requests_are_served_after_a_login(broker: SaslBroker) -> None:
    with broker.enter() as client:
        client.log_in("PLAIN", "alice", USERS["alice"])
        client.send(framed(ApiKey.API_VERSIONS, 0, bytes(MIB)))
        assert client.read_frame()
        assert_in(client)


def test_cve_2026_111115_tagged_fields_before_a_login_are_bounded(broker: SaslBroker) -> None:
    flood = b"\x80\x80\x10" + bytes(2 * 0x40000 - 100)
    with broker.unharmed(), broker.enter() as client:
        client.try_send(framed(ApiKey.API_VERSIONS, 3, tags=flood))
        assert client.expect_close() == []


# --- many -------------------------------------------------------------------------------------------------------------


def test_cve_2026_10143_logins_do_not_keep_others_waiting(broker: SaslBroker) -> None:
    """Thirty derivations at once: `unharmed` sees what they would do to the loop."""
    with broker.unharmed():
        clients = [broker.enter() for _ in range(30)]
        try:
            for client in clients:
                client.handshake("PLAIN")
            for client in clients:
                client.request(SaslAuthenticateRequest(auth_bytes=b"\0alice\0al1ce-secret"), 2)
            for client in clients:
                assert client.response(ApiKey.SASL_AUTHENTICATE, 2).error_code == ErrorCode.NONE
        finally:
            for client in clients:
                client.close()


def test_who_does_not_log_in_is_closed() -> None:
    with SaslBroker({"connections.max.idle.ms": "500"}) as broker, broker.enter() as silent, broker.enter() as slow:
        slow.send(api_versions_frame()[:9])
        for client in (silent, slow):
            assert client.expect_close(within_s=3) == []
        with broker.enter() as busy, pytest.raises(PeerClosed):  # asking for versions for ever is no login
            while True:
                busy.alive()
                time.sleep(0.02)


# --- again ------------------------------------------------------------------------------------------------------------


@each_mechanism
def test_a_session_is_renewed_on_the_same_connection(short: SaslBroker, mechanism: str) -> None:
    with short.enter() as client:
        for _ in range(3):
            answer = client.log_in(mechanism, "alice", USERS["alice"])
            assert answer.error_code == ErrorCode.NONE
            assert 0 < answer.session_lifetime_ms <= SESSION_MS
            assert_in(client)
            time.sleep(1.05)  # as in Kafka, not more than once a second


@each_mechanism
def test_a_session_that_has_ended_is_renewed_all_the_same(short: SaslBroker, mechanism: str) -> None:
    with short.enter() as client:
        lifetime_ms = client.log_in(mechanism, "alice", USERS["alice"]).session_lifetime_ms
        time.sleep(lifetime_ms / 1000 + 0.1)
        assert client.log_in(mechanism, "alice", USERS["alice"]).error_code == ErrorCode.NONE
        assert_in(client)


@pytest.mark.parametrize("request_", [MetadataRequest(topics=[]), ApiVersionsRequest()], ids=["metadata", "versions"])
@pytest.mark.parametrize("version", [0, 2])
def test_nothing_is_served_after_a_session(
    short: SaslBroker, request_: MetadataRequest | ApiVersionsRequest, version: int
) -> None:
    with short.unharmed(), short.enter() as client:
        client.log_in("SCRAM-SHA-256", "alice", USERS["alice"], version)
        assert_in(client)
        time.sleep(SESSION_MS / 1000 + 0.1)
        client.request(request_, 0)
        assert client.expect_close() == []


def test_another_principal_does_not_take_over_a_connection(short: SaslBroker) -> None:
    with short.unharmed(), short.enter() as client:
        client.log_in("PLAIN", "alice", USERS["alice"])
        answer = client.log_in("PLAIN", "bob", USERS["bob"])
        text = "Cannot change principals during re-authentication from User.alice: User.bob"
        assert_failed(client, answer, text)


def test_another_mechanism_does_not_renew_a_session(short: SaslBroker) -> None:
    with short.unharmed(), short.enter() as client:
        client.log_in("PLAIN", "alice", USERS["alice"])
        assert_failed(client, client.log_in("SCRAM-SHA-256", "alice", USERS["alice"]), "re-authentication")


def test_a_wrong_password_ends_a_session(short: SaslBroker) -> None:
    with short.unharmed(), short.enter() as client:
        client.log_in("SCRAM-SHA-256", "alice", USERS["alice"])
        answer = client.log_in("SCRAM-SHA-256", "alice", "wrong")
        assert_failed(client, answer, "Authentication failed during re-authentication")


def test_nothing_is_served_while_a_session_is_renewed(short: SaslBroker) -> None:
    with short.unharmed(), short.enter() as client:
        client.log_in("PLAIN", "alice", USERS["alice"])
        client.handshake("PLAIN")
        client.request(MetadataRequest(topics=[]), 12)
        assert client.expect_close() == []


def test_nobody_renews_all_the_time(short: SaslBroker) -> None:
    with short.enter() as client:
        client.log_in("PLAIN", "alice", USERS["alice"])
        client.log_in("PLAIN", "alice", USERS["alice"])
        assert client.handshake("PLAIN").error_code == ErrorCode.ILLEGAL_SASL_STATE
        assert_in(client)


def test_a_session_lasts_by_listener_and_mechanism() -> None:
    settings = {
        "connections.max.reauth.ms": "60000",
        "listener.name.sasl_plaintext.connections.max.reauth.ms": "50000",
        "listener.name.sasl_plaintext.scram-sha-512.connections.max.reauth.ms": "40000",
    }
    with SaslBroker(settings, USERS) as broker:
        for mechanism, expected_ms in (("PLAIN", 50_000), ("SCRAM-SHA-256", 50_000), ("SCRAM-SHA-512", 40_000)):
            with broker.enter() as client:
                assert client.log_in(mechanism, "alice", USERS["alice"]).session_lifetime_ms == expected_ms


# --- at start ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "GSSAPI"),
        ({"sasl.enabled.mechanisms": "PLAIN,DIGEST-MD5"}, "DIGEST-MD5"),
        ({"sasl.enabled.mechanisms": ""}, "sasl.enabled.mechanisms"),
        (
            {"sasl.enabled.mechanisms": "PLAIN", "plain.sasl.jaas.config": "ScramLoginModule required a=secret;"},
            "Plain",
        ),
        ({"sasl.enabled.mechanisms": "PLAIN", "plain.sasl.jaas.config": "secret"}, "sasl.jaas.config"),
    ],
)
def test_a_listener_that_cannot_let_anybody_in_is_refused_at_start(settings: dict[str, str], text: str) -> None:
    listeners = "PLAINTEXT://127.0.0.1:0,SASL_PLAINTEXT://127.0.0.1:0"
    cluster = Cluster(settings={"listeners": listeners, **settings})
    with pytest.raises(ConfigError, match=text) as caught:
        cluster.start()
    assert "\n" not in str(caught.value) and "secret" not in str(caught.value)


def test_settings_of_mechanisms_are_known() -> None:
    config = BrokerConfig(
        {"plain.sasl.jaas.config": JAAS, "listener.name.x.oauthbearer.connections.max.reauth.ms": "7"}
    )
    assert config.listener_value("PLAINTEXT", "sasl.jaas.config", "PLAIN") == JAAS
    assert config.listener_value("X", "connections.max.reauth.ms", "OAUTHBEARER") == 7
    assert "car0l-secret" not in repr(config)


# --- users ------------------------------------------------------------------------------------------------------------


def test_users_are_described_without_secrets(broker: SaslBroker) -> None:
    with broker.connect() as client:
        answer = client.call(DescribeUserScramCredentialsRequest(users=None), 0)
        assert {result.user for result in answer.results} >= set(USERS)
        named = [DescribeUserScramCredentialsRequest.UserName(name=name) for name in ("alice", "nobody", "bob", "bob")]
        answer = client.call(DescribeUserScramCredentialsRequest(users=named), 0)
        assert [(result.user, ErrorCode(result.error_code)) for result in answer.results] == [
            ("alice", ErrorCode.NONE),
            ("nobody", ErrorCode.RESOURCE_NOT_FOUND),
            ("bob", ErrorCode.DUPLICATE_RESOURCE),
        ]
        assert [(info.mechanism, info.iterations) for info in answer.results[0].credential_infos] == [
            (1, 4096),
            (2, 4096),
        ]


def test_users_outlive_a_restart() -> None:
    with SaslBroker(users=USERS) as broker:
        broker.stop()
        broker.start()
        for mechanism in MECHANISMS:
            with broker.enter() as client:
                started = time.monotonic()
                assert client.log_in(mechanism, "alice", USERS["alice"]).error_code == ErrorCode.NONE
                assert time.monotonic() - started < PROMPT_S
