"""Create-, Renew-, Expire- and DescribeDelegationToken, at every version. The rules of a token's life: unit/cluster."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.clock import ManualClock
from millrace.errors import ErrorCode
from millrace.handlers.delegation_tokens import (
    create_delegation_token,
    describe_delegation_token,
    expire_delegation_token,
    renew_delegation_token,
)
from millrace.security.acls import Acl, AclTable, Operation, PatternKind, Permission, ResourceKind
from millrace.security.authorizer import Authorizer
from millrace.security.derivation import KeyDerivation
from millrace.security.sessions import ANONYMOUS, Session
from millrace.security.tokens import TokenPasswords
from millrace.wire.messages.delegation_tokens import (
    CreateDelegationTokenRequest,
    DescribeDelegationTokenRequest,
    ExpireDelegationTokenRequest,
    RenewDelegationTokenRequest,
)
from support.handling import deciding
from support.metadata import cluster_of

NOW_MS = 1_700_000_000_000
DAY_MS = 86_400_000
Renewers = CreateDelegationTokenRequest.CreatableRenewers
Owner = DescribeDelegationTokenRequest.DescribeDelegationTokenOwner


def session(name: str, token_id: str = "") -> Session:
    return Session(f"User:{name}", "SCRAM-SHA-512", token_id)


ALICE, BOB, EVE = session("alice"), session("bob"), session("eve")


class Cluster:
    """A controller with a secret, and rules of access to tokens."""

    def __init__(self, *acls: Acl, secret: str | None = "s3cret") -> None:
        self.on = deciding(cluster_of(1))
        self.clock = ManualClock(NOW_MS)
        services: Any = self.on.services
        services.clock = self.clock
        services.tokens = TokenPasswords(secret, lambda: self.on.controller.image.tokens, KeyDerivation(), self.clock)
        services.authorizer = Authorizer(enabled=True, acls=lambda: AclTable(acls))

    async def create(self, by: Session, version: int = 3, **fields: Any) -> Any:
        request = CreateDelegationTokenRequest(max_lifetime_ms=-1, **fields)
        return await self.on.call(create_delegation_token, request, version, session=by)

    async def renew(self, by: Session, mac: bytes, period_ms: int = -1, version: int = 2) -> Any:
        request = RenewDelegationTokenRequest(hmac=mac, renew_period_ms=period_ms)
        return await self.on.call(renew_delegation_token, request, version, session=by)

    async def expire(self, by: Session, mac: bytes, period_ms: int = -1, version: int = 2) -> Any:
        request = ExpireDelegationTokenRequest(hmac=mac, expiry_time_period_ms=period_ms)
        return await self.on.call(expire_delegation_token, request, version, session=by)

    async def describe(self, by: Session, owners: list[str] | None = None, version: int = 3) -> Any:
        wanted = None if owners is None else [Owner(principal_type="User", principal_name=name) for name in owners]
        request = DescribeDelegationTokenRequest(owners=wanted)
        return await self.on.call(describe_delegation_token, request, version, session=by)


def allow(operation: Operation, kind: ResourceKind, name: str, principal: str = "User:eve") -> Acl:
    return Acl(kind, name, PatternKind.LITERAL, principal, "*", operation, Permission.ALLOW)


def named(*names: str) -> list[Renewers]:
    return [Renewers(principal_type="User", principal_name=name) for name in names]


@pytest.mark.parametrize("version", [1, 2, 3])
async def test_a_token_for_oneself(version: int) -> None:
    cluster = Cluster()
    made = await cluster.create(ALICE, version, renewers=named("bob"))
    assert made.error_code == ErrorCode.NONE
    assert (made.principal_type, made.principal_name) == ("User", "alice")
    times = (made.issue_timestamp_ms, made.expiry_timestamp_ms, made.max_timestamp_ms)
    assert times == (NOW_MS, NOW_MS + DAY_MS, NOW_MS + 7 * DAY_MS)
    token = cluster.on.controller.image.tokens[made.token_id]
    assert (token.owner, token.requester, token.renewers) == ("User:alice", "User:alice", ("User:bob",))
    assert made.hmac == cluster.on.services.tokens.hmac(made.token_id)
    if version >= 3:
        assert made.token_requester_principal_name == "alice"
    (described,) = (await cluster.describe(ALICE, version=version)).tokens
    assert (described.token_id, described.hmac) == (made.token_id, made.hmac)
    assert (described.principal_name, described.renewers[0].principal_name) == ("alice", "bob")
    times = (described.issue_timestamp, described.expiry_timestamp, described.max_timestamp)
    assert times == (NOW_MS, NOW_MS + DAY_MS, NOW_MS + 7 * DAY_MS)


@pytest.mark.parametrize("by", [ANONYMOUS, session("alice", "id-1")], ids=["nobody", "by token"])
async def test_who_may_not_ask_at_all(by: Session) -> None:
    cluster = Cluster(*(allow(Operation.ALL, kind, "*", by.principal) for kind in ResourceKind))
    mac = (await cluster.create(ALICE)).hmac
    before = cluster.on.controller.image
    refused = await cluster.create(by, owner_principal_type="User", owner_principal_name="bob")
    assert (refused.expiry_timestamp_ms, refused.token_id, refused.hmac) == (-1, "", b"")
    answers = [refused, await cluster.renew(by, mac), await cluster.expire(by, mac), await cluster.describe(by)]
    assert {each.error_code for each in answers} == {ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED}
    assert answers[1].expiry_timestamp_ms == answers[2].expiry_timestamp_ms == -1
    assert answers[3].tokens == []
    assert cluster.on.controller.image is before


async def test_without_a_secret_there_are_no_tokens() -> None:
    for secret in (None, ""):
        cluster = Cluster(secret=secret)
        answers = [
            await cluster.create(ALICE),
            await cluster.renew(ALICE, b"x"),
            await cluster.expire(ALICE, b"x"),
            await cluster.describe(ALICE),
        ]
        assert {each.error_code for each in answers} == {ErrorCode.DELEGATION_TOKEN_AUTH_DISABLED}
        assert not cluster.on.controller.image.tokens


async def test_a_token_for_somebody_else_needs_a_right() -> None:
    owner = {"owner_principal_type": "User", "owner_principal_name": "alice"}
    cluster = Cluster(allow(Operation.CREATE_TOKENS, ResourceKind.USER, "User:alice"))
    refused = await cluster.create(BOB, **owner)
    assert refused.error_code == ErrorCode.DELEGATION_TOKEN_AUTHORIZATION_FAILED
    assert (refused.principal_name, refused.token_requester_principal_name, refused.hmac) == ("alice", "bob", b"")
    made = await cluster.create(EVE, **owner)
    assert (made.error_code, made.principal_name, made.token_requester_principal_name) == (0, "alice", "eve")
    assert cluster.on.controller.image.tokens[made.token_id].owner == "User:alice"
    assert (await cluster.create(ALICE, **owner)).error_code == ErrorCode.NONE, "for oneself, by name"
    # Whoever made it for somebody else sees it, as in Kafka, and has nothing else of it.
    assert [each.token_id for each in (await cluster.describe(EVE)).tokens] == [made.token_id]
    assert [each.token_id for each in (await cluster.describe(EVE, ["eve"])).tokens] == [made.token_id]
    assert (await cluster.describe(BOB)).tokens == []
    assert (await cluster.renew(EVE, made.hmac)).error_code == ErrorCode.DELEGATION_TOKEN_OWNER_MISMATCH
    assert (await cluster.renew(ALICE, made.hmac)).error_code == ErrorCode.NONE


async def test_principals_are_users() -> None:
    cluster = Cluster(allow(Operation.ALL, ResourceKind.USER, "*", "User:alice"))
    group = Renewers(principal_type="Group", principal_name="admins")
    assert (await cluster.create(ALICE, renewers=[group])).error_code == ErrorCode.INVALID_PRINCIPAL_TYPE
    owner = {"owner_principal_type": "Group", "owner_principal_name": "admins"}
    assert (await cluster.create(ALICE, **owner)).error_code == ErrorCode.INVALID_PRINCIPAL_TYPE


@pytest.mark.parametrize("version", [1, 2])
async def test_renewal_and_end(version: int) -> None:
    cluster = Cluster()
    made = await cluster.create(ALICE, renewers=named("bob"))
    cluster.clock.advance(3600)
    now_ms = NOW_MS + 3_600_000
    renewed = await cluster.renew(BOB, made.hmac, version=version)
    assert (renewed.error_code, renewed.expiry_timestamp_ms) == (0, now_ms + DAY_MS)
    assert (
        await cluster.renew(EVE, made.hmac, version=version)
    ).error_code == ErrorCode.DELEGATION_TOKEN_OWNER_MISMATCH
    assert (await cluster.expire(EVE, made.hmac, version=version)).error_code == (
        ErrorCode.DELEGATION_TOKEN_OWNER_MISMATCH
    )
    unknown = await cluster.renew(ALICE, b"x" * 64, version=version)
    assert (unknown.error_code, unknown.expiry_timestamp_ms) == (ErrorCode.DELEGATION_TOKEN_NOT_FOUND, -1)
    shortened = await cluster.expire(ALICE, made.hmac, 5000, version=version)
    assert (shortened.error_code, shortened.expiry_timestamp_ms) == (0, now_ms + 5000)
    cluster.clock.advance(6)
    assert (await cluster.renew(ALICE, made.hmac, version=version)).error_code == ErrorCode.DELEGATION_TOKEN_EXPIRED
    assert (await cluster.expire(ALICE, made.hmac, version=version)).error_code == ErrorCode.NONE
    assert not cluster.on.controller.image.tokens
    assert (await cluster.expire(ALICE, made.hmac, version=version)).error_code == ErrorCode.DELEGATION_TOKEN_NOT_FOUND


async def test_who_sees_which_tokens() -> None:
    cluster = Cluster()
    mine = (await cluster.create(ALICE, renewers=named("bob"))).token_id
    other = (await cluster.create(BOB)).token_id

    async def seen(by: Session, owners: list[str] | None = None, *acls: Acl) -> set[str]:
        services: Any = cluster.on.services
        services.authorizer = Authorizer(enabled=True, acls=lambda: AclTable(acls))
        return {each.token_id for each in (await cluster.describe(by, owners)).tokens}

    assert await seen(ALICE) == {mine}
    assert await seen(BOB) == {mine, other}
    assert await seen(EVE) == set()
    assert await seen(BOB, ["alice"]) == {mine}
    assert await seen(BOB, ["bob"]) == {mine, other}, "owned by one of them, or renewed"
    assert await seen(BOB, []) == set()
    assert await seen(ALICE, ["bob"]) == {mine}
    one_token = allow(Operation.DESCRIBE, ResourceKind.DELEGATION_TOKEN, other)
    assert await seen(EVE, None, one_token) == {other}
    assert await seen(EVE, ["alice"], one_token) == set()
    assert await seen(EVE, None, allow(Operation.DESCRIBE_TOKENS, ResourceKind.USER, "User:alice")) == {mine}
