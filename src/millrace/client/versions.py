"""Which version of a request to send: the newest that both sides know.

Pure functions, shared by the asyncio and the blocking connection. Retries and sockets are not here.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import millrace
from millrace.errors import ApiError, ErrorCode, ProtocolError
from millrace.wire.codec import decode
from millrace.wire.frame import decode_response
from millrace.wire.keys import ApiKey
from millrace.wire.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from millrace.wire.messages.produce import ProduceRequest
from millrace.wire.primitives import Buffer
from millrace.wire.schema import Request


class VersionRange(NamedTuple):
    """The versions of one API that a broker serves."""

    low: int
    high: int


Offered = dict[int, VersionRange]
"""What a broker said it serves, by API key."""

_SOFTWARE_NAME: Final = "millrace"


def api_versions_request() -> ApiVersionsRequest:
    """The first request of a connection."""
    return ApiVersionsRequest(client_software_name=_SOFTWARE_NAME, client_software_version=millrace.__version__)


def read_api_versions(frame: Buffer, version: int) -> tuple[ApiVersionsResponse, Offered]:
    """The answer to `api_versions_request` and what it offers.

    A broker that does not know the version asked for answers in version 0 and says so in the error code, which stands
    first in every version.
    """
    if version > 0 and bytes(frame[4:6]) == ErrorCode.UNSUPPORTED_VERSION.to_bytes(2, "big"):
        response, _ = decode(ApiVersionsResponse, 0, frame, 4)
    else:
        _, response = decode_response(ApiVersionsResponse, version, frame)
    return response, {api.api_key: VersionRange(api.min_version, api.max_version) for api in response.api_keys}


def older_api_versions(response: ApiVersionsResponse, offered: Offered, version: int) -> int | None:
    """The version to ask in again when the broker did not know `version`; None when the answer was good."""
    if response.error_code == ErrorCode.NONE:
        return None
    if response.error_code != ErrorCode.UNSUPPORTED_VERSION:
        raise ApiError(known_code(response.error_code), "the broker refused to name its versions")
    older = min(offered.get(ApiKey.API_VERSIONS, VersionRange(0, 0)).high, version - 1)
    if older < 0:
        raise ProtocolError("the broker knows no version of ApiVersions")
    return older


def version_for(request: type[Request], offered: Offered, *, at_most: int | None = None) -> int:
    """The newest version of `request`, up to `at_most`, that the broker serves; ApiError UNSUPPORTED_VERSION where
    there is none.
    """
    theirs = offered.get(request.api_key)
    if theirs is None:
        raise ApiError(ErrorCode.UNSUPPORTED_VERSION, f"the broker does not serve {request.api_key.name}")
    ours = request.max_version if at_most is None else min(request.max_version, at_most)
    version = min(theirs.high, ours)
    if version < max(theirs.low, request.min_version):
        raise ApiError(
            ErrorCode.UNSUPPORTED_VERSION,
            f"{request.api_key.name}: the broker serves {theirs.low} to {theirs.high}, "
            f"this client speaks {request.min_version} to {ours}",
        )
    return version


def is_answered(message: Request) -> bool:
    """Whether a response will come: a Produce with acks=0 has none."""
    return not (isinstance(message, ProduceRequest) and message.acks == 0)


def known_code(code: int) -> ErrorCode:
    """The error behind a number; one that is newer than this table is UNKNOWN_SERVER_ERROR."""
    try:
        return ErrorCode(code)
    except ValueError:
        return ErrorCode.UNKNOWN_SERVER_ERROR
