"""Delegation tokens: what becomes of them when somebody asks, as plans (see `planning`), and which are over.

Kafka's rules. A token ends when it expires; until then its owner and its renewers may renew it, up to the end it was
made with, or end it earlier. ApiError where a request is refused; then nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from millrace.cluster.image import ClusterImage
from millrace.cluster.planning import Plan
from millrace.config import BrokerConfig
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import TokenChanged, TokenRemoved
from millrace.model import encode_uuid, new_topic_id
from millrace.security.tokens import DelegationToken

MAX_RENEWERS: Final = 1000
MAX_NAMES_LENGTH: Final = 64 * 1024
"""Of all principals that a token names: they travel with every snapshot of the metadata."""
MAX_REMOVED_AT_ONCE: Final = 1000
_LONG_MAX: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """How long tokens last."""

    max_ms: int
    expiry_ms: int

    @classmethod
    def from_config(cls, config: BrokerConfig) -> Lifetimes:
        return cls(
            config.get_int("delegation.token.max.lifetime.ms"), config.get_int("delegation.token.expiry.time.ms")
        )


def new_token_id() -> str:
    return encode_uuid(new_topic_id())


def plan_create_token(
    owner: str,
    requester: str,
    renewers: Sequence[str],
    max_lifetime_ms: int,
    *,
    now_ms: int,
    lifetimes: Lifetimes,
    make_id: Callable[[], str] = new_token_id,
) -> Plan[DelegationToken]:
    """Make a token. Zero or less for its lifetime means the longest that is allowed."""
    renewers = tuple(dict.fromkeys(renewers))
    if len(renewers) > MAX_RENEWERS or sum(map(len, (owner, requester, *renewers))) > MAX_NAMES_LENGTH:
        raise ApiError(ErrorCode.INVALID_REQUEST, "a token cannot name so many renewers")
    lifetime_ms = min(lifetimes.max_ms, max_lifetime_ms) if max_lifetime_ms > 0 else lifetimes.max_ms
    max_ms = _after(now_ms, lifetime_ms)
    token = DelegationToken(
        token_id=make_id(),
        owner=owner,
        requester=requester,
        renewers=renewers,
        issued_ms=now_ms,
        expires_ms=min(max_ms, _after(now_ms, lifetimes.expiry_ms)),
        max_ms=max_ms,
    )
    return Plan(token, (TokenChanged(token),))


def plan_renew_token(
    image: ClusterImage, token_id: str, principal: str, period_ms: int, *, now_ms: int, lifetimes: Lifetimes
) -> Plan[int]:
    """Have a token expire later, and say when. Zero or less means the usual time."""
    token = _existing(image, token_id)
    if token.is_expired(now_ms):
        raise _expired()
    _check_is_of(token, principal)
    period_ms = min(lifetimes.expiry_ms, period_ms) if period_ms > 0 else lifetimes.expiry_ms
    return _plan_expiry(token, _after(now_ms, period_ms))


def plan_expire_token(image: ClusterImage, token_id: str, principal: str, period_ms: int, *, now_ms: int) -> Plan[int]:
    """Have a token expire in `period_ms`, or with less than zero end it now; says when."""
    token = _existing(image, token_id)
    _check_is_of(token, principal)
    if period_ms < 0:
        return Plan(now_ms, (TokenRemoved(token_id),))
    if token.is_expired(now_ms):
        raise _expired()
    return _plan_expiry(token, _after(now_ms, period_ms))


def plan_remove_expired(image: ClusterImage, now_ms: int) -> Plan[int]:
    """Remove tokens that are over, not too many at once; says how many."""
    gone = [TokenRemoved(token.token_id) for token in image.tokens.values() if token.is_expired(now_ms)]
    gone = gone[:MAX_REMOVED_AT_ONCE]
    return Plan(len(gone), tuple(gone))


def _existing(image: ClusterImage, token_id: str) -> DelegationToken:
    token = image.tokens.get(token_id)
    if token is None:
        raise not_found()
    return token


def _check_is_of(token: DelegationToken, principal: str) -> None:
    if not token.is_of(principal):
        raise ApiError(ErrorCode.DELEGATION_TOKEN_OWNER_MISMATCH, f"{principal} neither owns the token nor renews it")


def _plan_expiry(token: DelegationToken, expires_ms: int) -> Plan[int]:
    expires_ms = min(token.max_ms, expires_ms)
    if expires_ms == token.expires_ms:
        return Plan(expires_ms)
    return Plan(expires_ms, (TokenChanged(replace(token, expires_ms=expires_ms)),))


def not_found() -> ApiError:
    return ApiError(ErrorCode.DELEGATION_TOKEN_NOT_FOUND, "there is no such token")


def _expired() -> ApiError:
    return ApiError(ErrorCode.DELEGATION_TOKEN_EXPIRED, "the token has expired")


def _after(now_ms: int, duration_ms: int) -> int:
    return min(now_ms + duration_ms, _LONG_MAX)
