"""SaslHandshake and SaslAuthenticate: Kafka's two requests around a SASL exchange.

What they mean on a connection that has to log in is in `server.login`, which knows how far it is. On one that has not,
both are out of place.
"""

from __future__ import annotations

from collections.abc import Awaitable

from millrace.errors import ErrorCode
from millrace.handlers.context import Login, RequestContext
from millrace.handlers.needs import NOTHING
from millrace.handlers.registry import api
from millrace.wire.keys import ApiKey
from millrace.wire.messages.sasl import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)


@api(ApiKey.SASL_HANDSHAKE, SaslHandshakeRequest, "0-1", needs=NOTHING)
def sasl_handshake(
    context: RequestContext, request: SaslHandshakeRequest
) -> SaslHandshakeResponse | Awaitable[SaslHandshakeResponse]:
    """Choose the mechanism of a login; one that the listener does not offer is answered with those that it does.

    After v0 the client's messages follow without a header of their own, after v1 in SaslAuthenticate. On a connection
    that is logged in it begins another login (KIP-368), if its session has an end.
    """
    login = _login(context)
    if login is None:
        return SaslHandshakeResponse(error_code=ErrorCode.ILLEGAL_SASL_STATE)
    return login.handshake(request.mechanism, context.version)


@api(ApiKey.SASL_AUTHENTICATE, SaslAuthenticateRequest, "0-2", needs=NOTHING)
def sasl_authenticate(
    context: RequestContext, request: SaslAuthenticateRequest
) -> SaslAuthenticateResponse | Awaitable[SaslAuthenticateResponse]:
    """One message of a login. From v1 on the last answer says how long the session lasts; 0 is for ever.

    A login that fails is answered after `connection.failed.authentication.delay.ms`, and then the connection is closed.
    """
    login = _login(context)
    if login is None:
        return SaslAuthenticateResponse(
            error_code=ErrorCode.ILLEGAL_SASL_STATE, error_message="SaslAuthenticate is not expected here"
        )
    return login.authenticate(bytes(request.auth_bytes))


def _login(context: RequestContext) -> Login | None:
    return None if context.peer is None else context.peer.login
