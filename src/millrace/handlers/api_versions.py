"""ApiVersions: what this broker speaks, read from the registry."""

from __future__ import annotations

import functools
import re
from typing import Final

from millrace.config import BrokerConfig
from millrace.errors import ErrorCode
from millrace.handlers import registry
from millrace.handlers.context import RequestContext
from millrace.handlers.needs import NOTHING
from millrace.handlers.registry import Buffers, api
from millrace.wire.frame import encode_response
from millrace.wire.keys import ApiKey
from millrace.wire.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse

_FEATURES: Final = {"group.version": range(1, 2), "share.version": range(1, 2), "transaction.version": range(3)}
"""Supported levels, the last in use: KIP-848 is level 1 of groups, KIP-932 of shares, KIP-890 is 2 of transactions."""
_FEATURES_EPOCH: Final = 0
"""They never change."""
_SUPPORTED: Final = [
    ApiVersionsResponse.SupportedFeatureKey(name=name, min_version=levels[0], max_version=levels[-1])
    for name, levels in _FEATURES.items()
]
_FINALIZED: Final = [
    ApiVersionsResponse.FinalizedFeatureKey(name=name, min_version_level=levels[-1], max_version_level=levels[-1])
    for name, levels in _FEATURES.items()
]

_KEPT_LENGTH: Final = 256
"""Of the name and the version of a client's software, for as long as its connection lasts."""
_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?\Z")


@api(ApiKey.API_VERSIONS, ApiVersionsRequest, "0-4", needs=NOTHING)
def api_versions(context: RequestContext, request: ApiVersionsRequest) -> ApiVersionsResponse:
    """List every served API key with its versions; some are served only where a setting asks for it.

    The response header is always v0, and a version we do not know is answered in v0 with UNSUPPORTED_VERSION and the
    list (KIP-511), so that a newer client can choose again. From v3 on a client names its software, and a name that
    could not be printed in a log is refused with INVALID_REQUEST.

    Of Kafka's features (KIP-584) those are named that clients may look for: `group.version` and `share.version`, both
    at level 1, and `transaction.version`, at level 2 (KIP-890). They are what this version does, and cannot be switched
    off.
    """
    if context.version >= 3:
        software = (request.client_software_name, request.client_software_version)
        if not all(map(_SOFTWARE.match, software)):
            return ApiVersionsResponse(error_code=ErrorCode.INVALID_REQUEST)
        if context.peer is not None:
            context.peer.software = (software[0][:_KEPT_LENGTH], software[1][:_KEPT_LENGTH])
    return ApiVersionsResponse(
        api_keys=_listed(registry.settings_given(context.broker.config)),
        supported_features=_SUPPORTED,
        finalized_features_epoch=_FEATURES_EPOCH,
        finalized_features=_FINALIZED,
    )


def unsupported(correlation_id: int, config: BrokerConfig) -> Buffers:
    """The answer to an ApiVersions request whose version we do not know."""
    listed = _listed(registry.settings_given(config))
    response = ApiVersionsResponse(error_code=ErrorCode.UNSUPPORTED_VERSION, api_keys=listed)
    return (encode_response(correlation_id, 0, response),)


@functools.cache
def _listed(given: frozenset[str]) -> list[ApiVersionsResponse.ApiVersion]:
    return [
        ApiVersionsResponse.ApiVersion(
            api_key=served.key, min_version=served.advertised_min, max_version=served.max_version
        )
        for served in registry.served(given).values()
        if not served.internal
    ]
