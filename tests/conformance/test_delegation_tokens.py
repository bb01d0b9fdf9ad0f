"""Delegation tokens over real sockets: asked of one broker of two, used at the other, and what a token does not allow.

The rules of a token's life are in tests/unit/cluster, who may what in the matrix of rights.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.cli.root import run
from millrace.client.cluster import ClusterClient
from millrace.client.settings import ClientSettings
from millrace.errors import ApiError, ErrorCode
from millrace.testing import Cluster
from millrace.wire.messages.cluster import MetadataRequest
from millrace.wire.messages.delegation_tokens import (
    CreateDelegationTokenRequest,
    DescribeDelegationTokenRequest,
    ExpireDelegationTokenRequest,
    RenewDelegationTokenRequest,
)
from support.raw import PeerClosed
from support.sasl import SaslClient, add_user

SECRET = "a secret of the brokers"
SETTINGS = {
    "listeners": "PLAINTEXT://127.0.0.1:0,CLIENTS://127.0.0.1:0",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CLIENTS:SASL_PLAINTEXT",
    "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
    "delegation.token.secret.key": SECRET,
}
NOT_ALLOWED = ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED
scram = pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])


class Brokers:
    """Two brokers; the first one is the controller."""

    def __init__(self, cluster: Cluster) -> None:
        self.plain = [_address(each) for each in cluster.bootstrap_servers_of("PLAINTEXT").split(",")]
        self.clients = cluster.bootstrap_servers_of("CLIENTS").split(",")

    def enter(self, number: int = 0) -> SaslClient:
        return SaslClient(_address(self.clients[number]))

    def user(self, number: int = 0, name: str = "alice") -> SaslClient:
        client = self.enter(number)
        assert client.log_in("SCRAM-SHA-256", name, f"{name}-secret").error_code == ErrorCode.NONE
        return client

    def by_token(self, made: Any, number: int = 0, mechanism: str = "SCRAM-SHA-512") -> SaslClient:
        client = self.enter(number)
        answer = client.log_in(mechanism, made.token_id, password(made.hmac), by_token=True)
        assert answer.error_code == ErrorCode.NONE, answer.error_message
        return client


def _address(text: str) -> tuple[str, int]:
    host, port = text.split(":")
    return host, int(port)


def password(mac: bytes) -> str:
    return base64.b64encode(mac).decode()


def create(client: SaslClient, max_lifetime_ms: int = -1, *renewers: str) -> Any:
    named = CreateDelegationTokenRequest.CreatableRenewers
    request = CreateDelegationTokenRequest(
        owner_principal_type=None,
        owner_principal_name=None,
        renewers=[named(principal_type="User", principal_name=name) for name in renewers],
        max_lifetime_ms=max_lifetime_ms,
    )
    return client.call(request, 3)


@pytest.fixture(scope="module")
def brokers() -> Iterator[Brokers]:
    with Cluster(brokers=2, settings=SETTINGS) as cluster:
        found = Brokers(cluster)
        with SaslClient(found.plain[0]) as admin:
            for name in ("alice", "bob"):
                add_user(admin, name, f"{name}-secret")
        yield found


def wait_for(brokers: Brokers, number: int, token_id: str, *, there: bool) -> None:
    """Until a broker has heard of a token, or of its end."""
    deadline = time.monotonic() + 10
    with brokers.user(number) as client:
        while True:
            tokens = client.call(DescribeDelegationTokenRequest(owners=None), 3).tokens
            if (token_id in {each.token_id for each in tokens}) is there:
                return
            assert time.monotonic() < deadline


@scram
@pytest.mark.parametrize("asked", [0, 1], ids=["controller", "other"])
def test_a_login_by_token_at_every_broker(brokers: Brokers, mechanism: str, asked: int) -> None:
    with brokers.user(asked) as alice:
        made = create(alice)
        assert made.error_code == ErrorCode.NONE
        # Whoever asked this broker finds the token there.
        described = alice.call(DescribeDelegationTokenRequest(owners=None), 3)
        assert made.token_id in {each.token_id for each in described.tokens}
    wait_for(brokers, 1 - asked, made.token_id, there=True)
    for number in (0, 1):
        with brokers.by_token(made, number, mechanism) as client:
            assert client.call(MetadataRequest(topics=[]), 12).brokers


@pytest.mark.parametrize("asked", [0, 1], ids=["controller", "other"])
def test_a_token_makes_no_other_and_does_not_prolong_itself(brokers: Brokers, asked: int) -> None:
    with brokers.user(asked) as alice:
        made = create(alice)
    with brokers.by_token(made, asked) as client:
        answers = [
            create(client),
            client.call(RenewDelegationTokenRequest(hmac=made.hmac, renew_period_ms=-1), 2),
            client.call(ExpireDelegationTokenRequest(hmac=made.hmac, expiry_time_period_ms=-1), 2),
            client.call(DescribeDelegationTokenRequest(owners=None), 3),
        ]
        assert [each.error_code for each in answers] == [NOT_ALLOWED] * 4
    with SaslClient(brokers.plain[asked]) as nobody:
        assert create(nobody).error_code == NOT_ALLOWED
        assert nobody.call(DescribeDelegationTokenRequest(owners=None), 3).error_code == NOT_ALLOWED


@scram
def test_who_is_not_let_in(brokers: Brokers, mechanism: str) -> None:
    with brokers.user() as alice:
        made = create(alice)

    def refused(name: str, secret: str, *, by_token: bool) -> None:
        with brokers.enter() as client:
            answer = client.log_in(mechanism, name, secret, by_token=by_token)
            assert answer.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
            assert answer.error_message.startswith("Authentication failed")
            assert client.expect_close() == []

    refused(made.token_id, password(made.hmac), by_token=False)  # a token is no user
    refused("alice", "alice-secret", by_token=True)  # and a user no token
    refused(made.token_id, password(made.hmac[::-1]), by_token=True)
    refused("AAAAAAAAAAAAAAAAAAAAAA", password(made.hmac), by_token=True)
    with brokers.user() as alice:
        ended = alice.call(ExpireDelegationTokenRequest(hmac=made.hmac, expiry_time_period_ms=-1), 2)
        assert ended.error_code == ErrorCode.NONE
    refused(made.token_id, password(made.hmac), by_token=True)


def test_a_session_is_over_when_its_token_is(brokers: Brokers) -> None:
    with brokers.user() as alice:
        made = create(alice, 1500)
    with brokers.enter() as client:
        answer = client.log_in("SCRAM-SHA-256", made.token_id, password(made.hmac), by_token=True)
        assert 0 < answer.session_lifetime_ms <= 1500
        assert client.call(MetadataRequest(topics=[]), 12).brokers
        time.sleep(answer.session_lifetime_ms / 1000 + 0.2)
        with pytest.raises(PeerClosed):
            client.call(MetadataRequest(topics=[]), 12)
    with brokers.enter() as client:
        answer = client.log_in("SCRAM-SHA-256", made.token_id, password(made.hmac), by_token=True)
        assert answer.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED


def test_renewers(brokers: Brokers) -> None:
    with brokers.user(1) as alice, brokers.user(1, "bob") as bob:
        made = create(alice, -1, "bob")
        renewed = bob.call(RenewDelegationTokenRequest(hmac=made.hmac, renew_period_ms=60_000), 2)
        assert renewed.error_code == ErrorCode.NONE
        assert renewed.expiry_timestamp_ms < made.expiry_timestamp_ms
        own = create(alice)
        foreign = bob.call(RenewDelegationTokenRequest(hmac=own.hmac, renew_period_ms=-1), 2)
        assert foreign.error_code == ErrorCode.DELEGATION_TOKEN_OWNER_MISMATCH


def test_the_command_line(brokers: Brokers, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    login = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.username": "alice",
        "sasl.password": "alice-secret",
    }
    words = ["--bootstrap", brokers.clients[1], *(f"--client={name}={value}" for name, value in login.items())]
    assert run(["tokens", "create", "--max-lifetime", "1h", "--json", *words]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["owner"] == "User:alice"
    # The settings that it prints are all that the project's own client needs.
    properties = {"bootstrap.servers": brokers.clients[1], **made["client_properties"]}
    with ClusterClient(ClientSettings.from_properties(properties)) as client:
        assert client.broker_ids() == [1, 2]
    assert run(["tokens", "list", *words]) == 0
    listed = capsys.readouterr().out
    assert made["token_id"] in listed
    assert made["hmac"] not in listed
    assert run(["tokens", "renew", made["token_id"], *words]) == 0
    assert run(["tokens", "expire", made["token_id"], "--yes", *words]) == 0
    with (
        ClusterClient(ClientSettings.from_properties(properties)) as client,
        pytest.raises(ApiError, match="SASL_AUTHENTICATION_FAILED"),
    ):
        client.broker_ids()
