"""Delegation tokens (KIP-48): passwords for a while, that somebody makes who has logged in; made, read, renewed, ended.

The HMAC of a token is its password. The project's own client, because librdkafka does not speak these APIs; any Kafka
does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from millrace.admin.errors import AdminError
from millrace.client.cluster import ClusterClient, raise_for
from millrace.errors import ApiError, ErrorCode
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
from millrace.wire.schema import Request

V = TypeVar("V")

AT_ONCE: Final = -1
BY_SERVER: Final = -1
"""As long as the brokers allow."""
_HINTS: Final[Mapping[ErrorCode, str]] = {
    ErrorCode.DELEGATION_TOKEN_AUTH_DISABLED: "the brokers have no tokens: delegation.token.secret.key is not set",
    ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED: "tokens are for those who have logged in, and not by a token: "
    "give a login with --client or in a profile",
    ErrorCode.DELEGATION_TOKEN_AUTHORIZATION_FAILED: "you may not make tokens for this user (the right is "
    "CREATE_TOKENS on the user)",
    ErrorCode.DELEGATION_TOKEN_OWNER_MISMATCH: "only its owner and its renewers may do this",
    ErrorCode.DELEGATION_TOKEN_EXPIRED: "the token has expired; make another: millrace tokens create",
    ErrorCode.DELEGATION_TOKEN_NOT_FOUND: "there is no such token any more; see: millrace tokens list",
}


@dataclass(frozen=True, slots=True)
class TokenView:
    """A token, as a broker describes it."""

    token_id: str
    owner: str
    requester: str
    renewers: tuple[str, ...]
    issued_ms: int
    expires_ms: int
    max_ms: int
    hmac: bytes = field(repr=False)


def create_token(
    cluster: ClusterClient, owner: str | None, renewers: Collection[str], max_lifetime_ms: int
) -> TokenView:
    """A new token of `owner`, or of whoever asks; principals are written as `User:name`."""
    kind_of_owner, name_of_owner = (None, None) if owner is None else _parts(owner)
    request = CreateDelegationTokenRequest(
        owner_principal_type=kind_of_owner,
        owner_principal_name=name_of_owner,
        renewers=[
            CreateDelegationTokenRequest.CreatableRenewers(principal_type=kind, principal_name=name)
            for kind, name in map(_parts, renewers)
        ],
        max_lifetime_ms=max_lifetime_ms,
    )

    def read(response: CreateDelegationTokenResponse) -> TokenView:
        raise_for(response.error_code)
        made_for = f"{response.principal_type}:{response.principal_name}"
        asked_by = f"{response.token_requester_principal_type}:{response.token_requester_principal_name}"
        return TokenView(
            token_id=response.token_id,
            owner=made_for,
            requester=made_for if asked_by == ":" else asked_by,
            renewers=tuple(renewers),
            issued_ms=response.issue_timestamp_ms,
            expires_ms=response.expiry_timestamp_ms,
            max_ms=response.max_timestamp_ms,
            hmac=bytes(response.hmac),
        )

    return _asked(cluster, "a new token", request, read)


def describe_tokens(cluster: ClusterClient, owners: Collection[str] | None = None) -> list[TokenView]:
    """The tokens that whoever asks may see, of these owners or of all, in the order in which they were made."""
    kind = DescribeDelegationTokenRequest.DescribeDelegationTokenOwner
    wanted = None
    if owners is not None:
        wanted = [kind(principal_type=each, principal_name=name) for each, name in map(_parts, owners)]

    def read(response: DescribeDelegationTokenResponse) -> list[TokenView]:
        raise_for(response.error_code)
        return sorted(map(_view, response.tokens), key=lambda each: (each.issued_ms, each.token_id))

    return _asked(cluster, "tokens", DescribeDelegationTokenRequest(owners=wanted), read)


def _view(each: DescribeDelegationTokenResponse.DescribedDelegationToken) -> TokenView:
    owner = f"{each.principal_type}:{each.principal_name}"
    requester = f"{each.token_requester_principal_type}:{each.token_requester_principal_name}"
    return TokenView(
        token_id=each.token_id,
        owner=owner,
        requester=owner if requester == ":" else requester,
        renewers=tuple(f"{renewer.principal_type}:{renewer.principal_name}" for renewer in each.renewers),
        issued_ms=each.issue_timestamp,
        expires_ms=each.expiry_timestamp,
        max_ms=each.max_timestamp,
        hmac=bytes(each.hmac),
    )


def renew_token(cluster: ClusterClient, token: TokenView, period_ms: int) -> int:
    """When it expires now."""
    request = RenewDelegationTokenRequest(hmac=token.hmac, renew_period_ms=period_ms)

    def read(response: RenewDelegationTokenResponse) -> int:
        raise_for(response.error_code)
        return response.expiry_timestamp_ms

    return _asked(cluster, f"token {token.token_id}", request, read)


def expire_token(cluster: ClusterClient, token: TokenView, period_ms: int) -> int:
    """When it expires now; less than zero ends it."""
    request = ExpireDelegationTokenRequest(hmac=token.hmac, expiry_time_period_ms=period_ms)

    def read(response: ExpireDelegationTokenResponse) -> int:
        raise_for(response.error_code)
        return response.expiry_timestamp_ms

    return _asked(cluster, f"token {token.token_id}", request, read)


def _asked(cluster: ClusterClient, what: str, request: Request, read: Callable[[Any], V]) -> V:
    try:
        return cluster.ask_any_broker(what, request, read)
    except ApiError as error:
        if error.code in _HINTS:
            raise AdminError(f"{_HINTS[error.code]} ({error.code.name})") from None
        raise


def require_token(cluster: ClusterClient, token_id: str) -> TokenView:
    """The token of this id; AdminError where there is none that whoever asks may see."""
    for each in describe_tokens(cluster):
        if each.token_id == token_id:
            return each
    raise AdminError(f"there is no token '{token_id}' that you may see", remedy="see: millrace tokens list")


def _parts(principal: str) -> tuple[str, str]:
    kind, _, name = principal.partition(":")
    return kind, name
