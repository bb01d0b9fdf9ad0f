"""Delegation tokens: CreateDelegationToken, RenewDelegationToken, ExpireDelegationToken, DescribeDelegationToken.

The first three are for the controller. Here are who may ask at all and who may for others; the rules of a token's life
are in `cluster.tokens`. A session that came by a token, or of which nobody knows whose it is, may not ask: it could
make itself last for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from millrace.cluster.image import ClusterImage
from millrace.cluster.tokens import Lifetimes, not_found, plan_create_token, plan_expire_token, plan_renew_token
from millrace.errors import ApiError, ErrorCode
from millrace.handlers.context import RequestContext
from millrace.handlers.forwarding import on_controller, wait_for_own_image
from millrace.handlers.needs import CREATE_USER_TOKENS, DESCRIBE_TOKEN, DESCRIBE_USER_TOKENS, NOTHING, judged
from millrace.handlers.registry import api
from millrace.security.sessions import ANONYMOUS_PRINCIPAL
from millrace.security.tokens import DelegationToken
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

USER: Final = "User"
NO_TIME: Final = -1
_Described = DescribeDelegationTokenResponse.DescribedDelegationToken
_Renewer = DescribeDelegationTokenResponse.DescribedDelegationTokenRenewer


def _check_may_ask(context: RequestContext) -> None:
    session = context.session
    if session.token_id or (session.principal == ANONYMOUS_PRINCIPAL and not session.mechanism):
        raise ApiError(
            ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED,
            "tokens are for those who have logged in, and not by a token",
        )


def _check_enabled(context: RequestContext) -> None:
    if not context.broker.tokens.is_enabled:
        raise ApiError(
            ErrorCode.DELEGATION_TOKEN_AUTH_DISABLED, "there are no tokens: delegation.token.secret.key is not set"
        )


# --- creation ---------------------------------------------------------------------------------------------------------


def _owner(context: RequestContext, request: CreateDelegationTokenRequest) -> str:
    if not request.owner_principal_name:
        return context.session.principal
    return f"{request.owner_principal_type}:{request.owner_principal_name}"


def _refuse_create(
    context: RequestContext, request: CreateDelegationTokenRequest, error: ApiError
) -> CreateDelegationTokenResponse:
    response = _created(context, _owner(context, request))
    response.error_code = error.code
    return response


def _created(context: RequestContext, owner: str) -> CreateDelegationTokenResponse:
    response = CreateDelegationTokenResponse(
        issue_timestamp_ms=NO_TIME, expiry_timestamp_ms=NO_TIME, max_timestamp_ms=NO_TIME
    )
    response.principal_type, response.principal_name = _parts(owner)
    if context.version >= 3:
        requester = _parts(context.session.principal)
        response.token_requester_principal_type, response.token_requester_principal_name = requester
    return response


def _is_made(
    _request: CreateDelegationTokenRequest, response: CreateDelegationTokenResponse
) -> Callable[[ClusterImage], bool] | None:
    return None if response.error_code else lambda image: response.token_id in image.tokens


@api(
    ApiKey.CREATE_DELEGATION_TOKEN,
    CreateDelegationTokenRequest,
    "1-3",
    needs=judged(CREATE_USER_TOKENS),
    forwardable=True,
)
async def create_delegation_token(
    context: RequestContext, request: CreateDelegationTokenRequest
) -> CreateDelegationTokenResponse:
    """Make a delegation token for whoever asks, or with CREATE_TOKENS on that user for somebody else (KIP-48, KIP-373).

    Its id and HMAC are a name and a password for SCRAM with `tokenauth=true`. Nobody can ask who came by a token or
    without a login (DELEGATION_TOKEN_REQUEST_NOT_ALLOWED), nor if brokers have no secret
    (DELEGATION_TOKEN_AUTH_DISABLED). Renewers are of type User (INVALID_PRINCIPAL_TYPE).

    Versions: v3 names the owner, and who asked for the token.
    """
    owner = _owner(context, request)
    may_for_others = context.may(*CREATE_USER_TOKENS, owner)
    try:
        _check_may_ask(context)
        if owner != context.session.principal and not may_for_others:
            raise ApiError(ErrorCode.DELEGATION_TOKEN_AUTHORIZATION_FAILED, f"no tokens for {owner[:100]}")
        if _parts(owner)[0] != USER or any(each.principal_type != USER for each in request.renewers):
            raise ApiError(ErrorCode.INVALID_PRINCIPAL_TYPE, f"a principal has to be of type {USER}")
    except ApiError as error:
        return _refuse_create(context, request, error)
    return await _create(context, request)


@on_controller(_refuse_create, shown_when=_is_made)
async def _create(context: RequestContext, request: CreateDelegationTokenRequest) -> CreateDelegationTokenResponse:
    _check_enabled(context)
    broker = context.broker
    plan = plan_create_token(
        _owner(context, request),
        context.session.principal,
        [f"{each.principal_type}:{each.principal_name}" for each in request.renewers],
        request.max_lifetime_ms,
        now_ms=broker.clock.wall_ms(),
        lifetimes=Lifetimes.from_config(broker.config),
    )
    token = await broker.controller.change(lambda _image: plan)
    response = _created(context, token.owner)
    response.issue_timestamp_ms = token.issued_ms
    response.expiry_timestamp_ms = token.expires_ms
    response.max_timestamp_ms = token.max_ms
    response.token_id = token.token_id
    response.hmac = broker.tokens.hmac(token.token_id)
    return response


# --- renewal and end --------------------------------------------------------------------------------------------------


def _expires_then(
    _request: object, response: RenewDelegationTokenResponse | ExpireDelegationTokenResponse
) -> Callable[[ClusterImage], bool] | None:
    """Which token it is cannot be told without the secret: one that expires just then."""
    if response.error_code:
        return None
    return lambda image: any(token.expires_ms == response.expiry_timestamp_ms for token in image.tokens.values())


def _named_token(context: RequestContext, mac: bytes) -> DelegationToken:
    _check_may_ask(context)
    _check_enabled(context)
    token = context.broker.tokens.find(bytes(mac))
    if token is None:
        raise not_found()
    return token


def _refuse_renewal(
    _context: RequestContext, _request: RenewDelegationTokenRequest, error: ApiError
) -> RenewDelegationTokenResponse:
    return RenewDelegationTokenResponse(error_code=error.code, expiry_timestamp_ms=NO_TIME)


@api(ApiKey.RENEW_DELEGATION_TOKEN, RenewDelegationTokenRequest, "1-2", needs=NOTHING)
@on_controller(_refuse_renewal, shown_when=_expires_then)
async def renew_delegation_token(
    context: RequestContext, request: RenewDelegationTokenRequest
) -> RenewDelegationTokenResponse:
    """Have a token expire later, at most at the end that it was made with.

    For its owner and its renewers (DELEGATION_TOKEN_OWNER_MISMATCH) who have logged in otherwise, while it has not
    expired (DELEGATION_TOKEN_EXPIRED). The token is named by its HMAC (DELEGATION_TOKEN_NOT_FOUND).
    """
    token = _named_token(context, request.hmac)
    broker = context.broker
    expires_ms = await broker.controller.change(
        lambda image: plan_renew_token(
            image,
            token.token_id,
            context.session.principal,
            request.renew_period_ms,
            now_ms=broker.clock.wall_ms(),
            lifetimes=Lifetimes.from_config(broker.config),
        )
    )
    return RenewDelegationTokenResponse(expiry_timestamp_ms=expires_ms)


def _refuse_expiry(
    _context: RequestContext, _request: ExpireDelegationTokenRequest, error: ApiError
) -> ExpireDelegationTokenResponse:
    return ExpireDelegationTokenResponse(error_code=error.code, expiry_timestamp_ms=NO_TIME)


def _expires_if_later(
    request: ExpireDelegationTokenRequest, response: ExpireDelegationTokenResponse
) -> Callable[[ClusterImage], bool] | None:
    return None if request.expiry_time_period_ms < 0 else _expires_then(request, response)


@api(ApiKey.EXPIRE_DELEGATION_TOKEN, ExpireDelegationTokenRequest, "1-2", needs=NOTHING, forwardable=True)
async def expire_delegation_token(
    context: RequestContext, request: ExpireDelegationTokenRequest
) -> ExpireDelegationTokenResponse:
    """Have a token expire at another time, or with a negative period end it at once.

    For its owner and its renewers, as with a renewal. Connections that came by it last until it would have expired.
    """
    response = await _expire(context, request)
    if response.error_code == ErrorCode.NONE and request.expiry_time_period_ms < 0:
        token = context.broker.tokens.find(bytes(request.hmac))
        if token is not None:  # this broker has not heard yet that nobody may log in with it
            await wait_for_own_image(context, lambda image: token.token_id not in image.tokens)
    return response


@on_controller(_refuse_expiry, shown_when=_expires_if_later)
async def _expire(context: RequestContext, request: ExpireDelegationTokenRequest) -> ExpireDelegationTokenResponse:
    token = _named_token(context, request.hmac)
    broker = context.broker
    expires_ms = await broker.controller.change(
        lambda image: plan_expire_token(
            image,
            token.token_id,
            context.session.principal,
            request.expiry_time_period_ms,
            now_ms=broker.clock.wall_ms(),
        )
    )
    return ExpireDelegationTokenResponse(expiry_timestamp_ms=expires_ms)


# --- description ------------------------------------------------------------------------------------------------------


@api(
    ApiKey.DESCRIBE_DELEGATION_TOKEN,
    DescribeDelegationTokenRequest,
    "1-3",
    needs=judged(DESCRIBE_TOKEN, DESCRIBE_USER_TOKENS),
)
def describe_delegation_token(
    context: RequestContext, request: DescribeDelegationTokenRequest
) -> DescribeDelegationTokenResponse:
    """Tokens, with their HMACs: one's own, those that one may renew or has asked for, and those that one may describe.

    Others need DESCRIBE on the token, or DESCRIBE_TOKENS on its owner. With owners named, only tokens that one of them
    owns, may renew or has asked for.

    Versions: v3 has who asked for the token.
    """
    owners = None
    if request.owners is not None:
        owners = {f"{each.principal_type}:{each.principal_name}" for each in request.owners}
    principal = context.session.principal
    may_see, may_see_of = context.rights(*DESCRIBE_TOKEN), context.rights(*DESCRIBE_USER_TOKENS)
    try:
        _check_may_ask(context)
        _check_enabled(context)
    except ApiError as error:
        return DescribeDelegationTokenResponse(error_code=error.code)
    return DescribeDelegationTokenResponse(
        tokens=[
            _described(context, token)
            for token in context.broker.image.tokens.values()
            if (owners is None or any(map(token.concerns, owners)))
            and (token.concerns(principal) or may_see(token.token_id) or may_see_of(token.owner))
        ]
    )


def _described(context: RequestContext, token: DelegationToken) -> _Described:
    principal_type, principal_name = _parts(token.owner)
    described = _Described(
        principal_type=principal_type,
        principal_name=principal_name,
        issue_timestamp=token.issued_ms,
        expiry_timestamp=token.expires_ms,
        max_timestamp=token.max_ms,
        token_id=token.token_id,
        hmac=context.broker.tokens.hmac(token.token_id),
        renewers=[_Renewer(principal_type=kind, principal_name=name) for kind, name in map(_parts, token.renewers)],
    )
    if context.version >= 3:
        requester = _parts(token.requester)
        described.token_requester_principal_type, described.token_requester_principal_name = requester
    return described


def _parts(principal: str) -> tuple[str, str]:
    kind, _, name = principal.partition(":")
    return kind, name
