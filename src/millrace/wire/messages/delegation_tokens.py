"""Delegation tokens: short-lived credentials handed out to authenticated users."""

from __future__ import annotations

from millrace.wire.keys import ApiKey
from millrace.wire.schema import Request, Response, Struct, array, binary, int16, int32, int64, string


class CreateDelegationTokenRequest(Request, key=ApiKey.CREATE_DELEGATION_TOKEN, versions="1-3", flexible="2+"):
    """Asks for a delegation token."""

    class CreatableRenewers(Struct):
        principal_type: str = string()
        principal_name: str = string()

    owner_principal_type: str | None = string("3+", nullable=True)
    owner_principal_name: str | None = string("3+", nullable=True)
    renewers: list[CreatableRenewers] = array(CreatableRenewers)
    max_lifetime_ms: int = int64()


class CreateDelegationTokenResponse(Response, key=ApiKey.CREATE_DELEGATION_TOKEN, versions="1-3", flexible="2+"):
    """The token and its secret."""

    error_code: int = int16()
    principal_type: str = string()
    principal_name: str = string()
    token_requester_principal_type: str = string("3+")
    token_requester_principal_name: str = string("3+")
    issue_timestamp_ms: int = int64()
    expiry_timestamp_ms: int = int64()
    max_timestamp_ms: int = int64()
    token_id: str = string()
    hmac: bytes = binary()
    throttle_time_ms: int = int32()


class RenewDelegationTokenRequest(Request, key=ApiKey.RENEW_DELEGATION_TOKEN, versions="1-2", flexible="2+"):
    """Prolongs a delegation token."""

    hmac: bytes = binary()
    renew_period_ms: int = int64()


class RenewDelegationTokenResponse(Response, key=ApiKey.RENEW_DELEGATION_TOKEN, versions="1-2", flexible="2+"):
    """The new expiry."""

    error_code: int = int16()
    expiry_timestamp_ms: int = int64()
    throttle_time_ms: int = int32()


class ExpireDelegationTokenRequest(Request, key=ApiKey.EXPIRE_DELEGATION_TOKEN, versions="1-2", flexible="2+"):
    """Shortens or ends a delegation token."""

    hmac: bytes = binary()
    expiry_time_period_ms: int = int64()


class ExpireDelegationTokenResponse(Response, key=ApiKey.EXPIRE_DELEGATION_TOKEN, versions="1-2", flexible="2+"):
    """The new expiry."""

    error_code: int = int16()
    expiry_timestamp_ms: int = int64()
    throttle_time_ms: int = int32()


class DescribeDelegationTokenRequest(Request, key=ApiKey.DESCRIBE_DELEGATION_TOKEN, versions="1-3", flexible="2+"):
    """Asks for the tokens of given owners."""

    class DescribeDelegationTokenOwner(Struct):
        principal_type: str = string()
        principal_name: str = string()

    owners: list[DescribeDelegationTokenOwner] | None = array(DescribeDelegationTokenOwner, nullable=True)


class DescribeDelegationTokenResponse(Response, key=ApiKey.DESCRIBE_DELEGATION_TOKEN, versions="1-3", flexible="2+"):
    """Tokens with their renewers."""

    class DescribedDelegationTokenRenewer(Struct):
        principal_type: str = string()
        principal_name: str = string()

    class DescribedDelegationToken(Struct):
        principal_type: str = string()
        principal_name: str = string()
        token_requester_principal_type: str = string("3+")
        token_requester_principal_name: str = string("3+")
        issue_timestamp: int = int64()
        expiry_timestamp: int = int64()
        max_timestamp: int = int64()
        token_id: str = string()
        hmac: bytes = binary()
        renewers: list[DescribeDelegationTokenResponse.DescribedDelegationTokenRenewer] = array(
            "DescribedDelegationTokenRenewer"
        )

    error_code: int = int16()
    tokens: list[DescribedDelegationToken] = array(DescribedDelegationToken)
    throttle_time_ms: int = int32()
