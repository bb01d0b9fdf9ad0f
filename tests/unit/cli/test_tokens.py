"""`millrace tokens` against a scripted broker."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from millrace.cli.root import run
from millrace.clock import SystemClock
from millrace.errors import ErrorCode
from millrace.wire.keys import ApiKey
from millrace.wire.messages.delegation_tokens import (
    CreateDelegationTokenRequest,
    CreateDelegationTokenResponse,
    DescribeDelegationTokenRequest,
    DescribeDelegationTokenResponse,
    ExpireDelegationTokenRequest,
    ExpireDelegationTokenResponse,
    RenewDelegationTokenRequest,
    RenewDelegationTokenResponse,
)
from support.fake_broker import HOST, FakeBroker, metadata

DAY_MS = 86_400_000
MAC = bytes(range(64))
PASSWORD = base64.b64encode(MAC).decode()


class Scene:
    """A broker that has the token `id-1` of alice, whose renewer is bob, and refuses what `error` says."""

    def __init__(self, broker: FakeBroker) -> None:
        self.broker = broker
        self.error = ErrorCode.NONE
        self.now_ms = SystemClock().wall_ms()
        broker.answers = {
            ApiKey.METADATA: lambda _: metadata([broker], {}),
            ApiKey.CREATE_DELEGATION_TOKEN: self._create,
            ApiKey.DESCRIBE_DELEGATION_TOKEN: self._describe,
            ApiKey.RENEW_DELEGATION_TOKEN: self._renew,
            ApiKey.EXPIRE_DELEGATION_TOKEN: self._expire,
        }

    def _create(self, request: CreateDelegationTokenRequest) -> CreateDelegationTokenResponse:
        return CreateDelegationTokenResponse(
            error_code=self.error,
            principal_type="User",
            principal_name=request.owner_principal_name or "alice",
            token_requester_principal_type="User",
            token_requester_principal_name="alice",
            issue_timestamp_ms=self.now_ms,
            expiry_timestamp_ms=self.now_ms + DAY_MS,
            max_timestamp_ms=self.now_ms + 7 * DAY_MS,
            token_id="id-1",
            hmac=MAC,
        )

    def _describe(self, request: DescribeDelegationTokenRequest) -> DescribeDelegationTokenResponse:
        cls = DescribeDelegationTokenResponse
        token = cls.DescribedDelegationToken(
            principal_type="User",
            principal_name="alice",
            token_requester_principal_type="User",
            token_requester_principal_name="admin",
            issue_timestamp=self.now_ms - 2 * DAY_MS,
            expiry_timestamp=self.now_ms - DAY_MS,
            max_timestamp=self.now_ms + DAY_MS + 5000,
            token_id="id-1",
            hmac=MAC,
            renewers=[cls.DescribedDelegationTokenRenewer(principal_type="User", principal_name="bob")],
        )
        seen = request.owners is None or any(each.principal_name == "alice" for each in request.owners)
        return cls(tokens=[token] if seen else [])

    def _renew(self, request: RenewDelegationTokenRequest) -> RenewDelegationTokenResponse:
        assert request.hmac == MAC
        return RenewDelegationTokenResponse(error_code=self.error, expiry_timestamp_ms=1_700_000_000_123)

    def _expire(self, request: ExpireDelegationTokenRequest) -> ExpireDelegationTokenResponse:
        assert request.hmac == MAC
        return ExpireDelegationTokenResponse(error_code=self.error, expiry_timestamp_ms=1_700_000_000_123)

    def last(self, key: ApiKey) -> Any:
        return self.broker.asked(key)[-1]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    with FakeBroker() as broker:
        monkeypatch.setenv("MILLRACE_BOOTSTRAP", f"{HOST}:{broker.port}")
        yield Scene(broker)


def test_a_new_token_is_shown_with_its_password(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tokens", "create", "--max-lifetime", "2d"]) == 0
    request = scene.last(ApiKey.CREATE_DELEGATION_TOKEN)
    assert (request.owner_principal_name, request.renewers, request.max_lifetime_ms) == (None, [], 2 * DAY_MS)
    captured = capsys.readouterr()
    assert f"hmac: {PASSWORD}\n" in captured.out
    module = "org.apache.kafka.common.security.scram.ScramLoginModule"
    jaas = f'{module} required username="id-1" password="{PASSWORD}" tokenauth="true";'
    assert captured.out.endswith(f"security.protocol=SASL_SSL\nsasl.mechanism=SCRAM-SHA-512\nsasl.jaas.config={jaas}\n")
    assert "librdkafka" in captured.err


def test_a_token_for_somebody_else(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--owner", "etl", "--renewer", "User:bob", "--renewer", "CN=x:y"]
    assert run(["tokens", "create", *words, "--json"]) == 0
    request = scene.last(ApiKey.CREATE_DELEGATION_TOKEN)
    assert (request.owner_principal_type, request.owner_principal_name) == ("User", "etl")
    assert [(each.principal_type, each.principal_name) for each in request.renewers] == [
        ("User", "bob"),
        ("User", "CN=x:y"),
    ]
    assert request.max_lifetime_ms == -1
    shown = json.loads(capsys.readouterr().out)
    assert (shown["owner"], shown["requester"], shown["hmac"]) == ("User:etl", "User:alice", PASSWORD)
    assert PASSWORD in shown["client_properties"]["sasl.jaas.config"]


def test_the_list_has_no_passwords(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tokens", "list", "--json"]) == 0
    assert scene.last(ApiKey.DESCRIBE_DELEGATION_TOKEN).owners is None
    out = capsys.readouterr().out
    (token,) = json.loads(out)
    assert (token["token_id"], token["owner"], token["renewers"]) == ("id-1", "User:alice", ["User:bob"])
    assert run(["tokens", "list", "--owner", "alice"]) == 0
    table = capsys.readouterr().out
    assert [word for word in ("id-1", "User:alice", "User:admin", "User:bob", "over", "1d") if word not in table] == []
    assert PASSWORD not in out + table
    assert run(["tokens", "list", "--owner", "eve"]) == 0
    assert "id-1" not in capsys.readouterr().out


def test_renewal(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tokens", "renew", "id-1", "--for", "12h"]) == 0
    assert scene.last(ApiKey.RENEW_DELEGATION_TOKEN).renew_period_ms == DAY_MS // 2
    assert capsys.readouterr().out == "token id-1 expires at 2023-11-14T22:13:20.123Z\n"
    assert run(["tokens", "renew", "id-1"]) == 0
    assert scene.last(ApiKey.RENEW_DELEGATION_TOKEN).renew_period_ms == -1


def test_the_end(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tokens", "expire", "id-1"]) == 1, "nobody was asked"
    assert "--yes" in capsys.readouterr().err
    assert not scene.broker.asked(ApiKey.EXPIRE_DELEGATION_TOKEN)
    assert run(["tokens", "expire", "id-1", "--yes", "--json"]) == 0
    assert scene.last(ApiKey.EXPIRE_DELEGATION_TOKEN).expiry_time_period_ms == -1
    assert json.loads(capsys.readouterr().out)["result"] == "ended"
    assert run(["tokens", "expire", "id-1", "--in", "1h"]) == 0
    assert scene.last(ApiKey.EXPIRE_DELEGATION_TOKEN).expiry_time_period_ms == 3_600_000


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (ErrorCode.DELEGATION_TOKEN_AUTH_DISABLED, "delegation.token.secret.key"),
        (ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED, "--client"),
        (ErrorCode.DELEGATION_TOKEN_AUTHORIZATION_FAILED, "CREATE_TOKENS"),
    ],
)
def test_refusals_say_what_to_do(scene: Scene, capsys: pytest.CaptureFixture[str], error: ErrorCode, hint: str) -> None:
    scene.error = error
    assert run(["tokens", "create"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert hint in line
    assert error.name in line


def test_a_token_that_is_not_there(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tokens", "renew", "id-2"]) == 1
    assert "there is no token 'id-2'" in capsys.readouterr().err
    assert not scene.broker.asked(ApiKey.RENEW_DELEGATION_TOKEN)
