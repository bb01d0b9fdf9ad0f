"""Envelope: a client's request that a broker passes on to the controller, with who asked and from where (KIP-590).

Both sides are here: `sealed` and `opened` for the broker that passes it on, the handler for the one that is asked. The
handler judges as if the client had come by itself, so that a broker's own rights never stand in for its client's.
Only what a broker passes on is taken, and an Envelope in an Envelope is not. When one is sent is decided in
`forwarding`.
"""

from __future__ import annotations

import inspect
import ipaddress
import struct
from typing import Any, Final

from millrace.errors import ApiError, ErrorCode, ProtocolError
from millrace.handlers import auditing, registry
from millrace.handlers.context import RequestContext
from millrace.handlers.needs import OF_BROKERS
from millrace.handlers.registry import Api, api
from millrace.security.acls import LOCAL_HOST
from millrace.security.sessions import Session
from millrace.wire.codec import decode, encode
from millrace.wire.frame import RequestHeader, decode_response, encode_request, read_request_header
from millrace.wire.keys import ApiKey
from millrace.wire.messages import response_class
from millrace.wire.messages.brokers import DefaultPrincipalData, EnvelopeRequest, EnvelopeResponse
from millrace.wire.schema import Request

VERSION: Final = 0
_SIZE_BYTES: Final = 4
_PRINCIPAL_VERSION: Final = struct.Struct(">h")


def sealed(context: RequestContext, request: Request) -> EnvelopeRequest:
    """`request`, of the client that `context` is about."""
    header = RequestHeader(request.api_key, context.version, context.header.correlation_id, context.header.client_id)
    return EnvelopeRequest(
        request_data=encode_request(header, request)[_SIZE_BYTES:],
        request_principal=_principal(context.session),
        client_host_address=_address(context.client_host),
    )


def opened(request: Request, version: int, envelope: EnvelopeResponse) -> Any:
    """The response to a request that went in an Envelope; ApiError where it was not looked at."""
    if envelope.error_code != ErrorCode.NONE or envelope.response_data is None:
        raise ApiError(ErrorCode(envelope.error_code or ErrorCode.UNKNOWN_SERVER_ERROR), "said the controller")
    return decode_response(response_class(request.api_key), version, envelope.response_data)[1]


@api(ApiKey.ENVELOPE, EnvelopeRequest, "0", needs=OF_BROKERS, internal=True, overlaps=True)
async def envelope(context: RequestContext, request: EnvelopeRequest) -> EnvelopeResponse:
    """Between brokers: a client's request that is for the controller, judged as that client and answered inside.

    INVALID_REQUEST for what brokers do not pass on, UNSUPPORTED_VERSION for what cannot be read.
    """
    try:
        context.check_broker_listener()
        served, inner, message = _parse(context, request)
        auditing.begin(inner, served.key, message)
        answer = served.refused(inner, message)
        if answer is None:
            response = await _handled(served, inner, message)
            answer = served.answered(inner, response)
    except ApiError as error:
        return EnvelopeResponse(error_code=error.code)
    return EnvelopeResponse(response_data=b"".join(answer)[_SIZE_BYTES:])


async def _handled(served: Api, inner: RequestContext, message: Any) -> Any:
    try:
        response = served.handler(inner, message)
        if inspect.isawaitable(response):
            response = await response
    except BaseException as error:
        auditing.tell(inner, served.key, error)
        raise
    auditing.tell(inner, served.key, response)
    return response


def _parse(context: RequestContext, request: EnvelopeRequest) -> tuple[Api, RequestContext, Any]:
    frame = memoryview(request.request_data)
    try:
        header, pos = read_request_header(frame)
        version = header.api_version
        served = registry.find(header.api_key)
        if served is None or not served.forwardable:
            raise ApiError(ErrorCode.INVALID_REQUEST, f"API key {header.api_key} is not passed on")
        if not served.min_version <= version <= served.max_version:
            raise ApiError(ErrorCode.UNSUPPORTED_VERSION, f"{served.key.name} v{version} is not served")
        message = served.decode(version, frame, pos)
    except ProtocolError as error:
        raise ApiError(ErrorCode.UNSUPPORTED_VERSION, str(error)) from error
    inner = RequestContext(
        context.broker,
        header,
        version,
        _host(request.client_host_address),
        context.listener,
        session=_session(request.request_principal),
        needs=served.needs,
        is_forwarded=True,
    )
    return served, inner, message


def _principal(session: Session) -> bytes:
    kind, _, name = session.principal.partition(":")
    data = DefaultPrincipalData(
        type_=kind,
        name=name,
        token_authenticated=bool(session.token_id),
        token_id=session.token_id,
        mechanism=session.mechanism,
    )
    return _PRINCIPAL_VERSION.pack(VERSION) + encode(data, VERSION)


def _session(principal: bytes | None) -> Session:
    try:
        if principal is None or _PRINCIPAL_VERSION.unpack_from(principal) != (VERSION,):
            raise ProtocolError("no principal")
        data = decode(DefaultPrincipalData, VERSION, memoryview(principal), _PRINCIPAL_VERSION.size)[0]
    except (ProtocolError, struct.error) as error:
        raise ApiError(ErrorCode.PRINCIPAL_DESERIALIZATION_FAILURE, "an Envelope does not say who asked") from error
    # Who came in by a token stays somebody who did, also where a broker does not say by which.
    token_id = data.token_id or ("?" if data.token_authenticated else "")
    return Session(f"{data.type_}:{data.name}", data.mechanism, token_id)


def _address(host: str) -> bytes:
    """The bytes of an address; none for what is no address (a socket of this machine)."""
    try:
        return ipaddress.ip_address(host).packed
    except ValueError:
        return b""


def _host(address: bytes) -> str:
    try:
        return str(ipaddress.ip_address(address)) if address else LOCAL_HOST
    except ValueError as error:
        raise ApiError(ErrorCode.INVALID_REQUEST, "an Envelope with no address") from error
