"""Authentication inside the protocol."""

from __future__ import annotations

from millrace.wire.keys import ApiKey
from millrace.wire.schema import Request, Response, array, binary, int16, int64, string


class SaslHandshakeRequest(Request, key=ApiKey.SASL_HANDSHAKE, versions="0-1"):
    """Chooses a SASL mechanism."""

    mechanism: str = string()


class SaslHandshakeResponse(Response, key=ApiKey.SASL_HANDSHAKE, versions="0-1"):
    """The mechanisms on offer."""

    error_code: int = int16()
    mechanisms: list[str] = array(string)


class SaslAuthenticateRequest(Request, key=ApiKey.SASL_AUTHENTICATE, versions="0-2", flexible="2+"):
    """One step of a SASL exchange."""

    auth_bytes: bytes = binary()


class SaslAuthenticateResponse(Response, key=ApiKey.SASL_AUTHENTICATE, versions="0-2", flexible="2+"):
    """The other side's step."""

    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    auth_bytes: bytes = binary()
    session_lifetime_ms: int = int64("1+", ignorable=True)
