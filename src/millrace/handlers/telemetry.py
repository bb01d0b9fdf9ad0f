"""GetTelemetrySubscriptions and PushTelemetry (KIP-714): served where a receiver is configured.

What is decided is in `telemetry`; subscriptions are settings of client-metrics resources (`configs`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

from millrace.handlers.context import RequestContext
from millrace.handlers.needs import NOTHING
from millrace.handlers.registry import api
from millrace.telemetry.instances import ACCEPTED, Client, Push
from millrace.telemetry.manager import ClientTelemetry, OnLost
from millrace.wire.keys import ApiKey
from millrace.wire.messages.telemetry import (
    GetTelemetrySubscriptionsRequest,
    GetTelemetrySubscriptionsResponse,
    PushTelemetryRequest,
    PushTelemetryResponse,
)

_RECEIVER: Final = "telemetry.receiver"
_UNKNOWN: Final = ("unknown", "unknown")


@api(
    ApiKey.GET_TELEMETRY_SUBSCRIPTIONS,
    GetTelemetrySubscriptionsRequest,
    "0",
    needs=NOTHING,
    setting=_RECEIVER,
)
def get_telemetry_subscriptions(
    context: RequestContext, request: GetTelemetrySubscriptionsRequest
) -> GetTelemetrySubscriptionsResponse:
    """Which metrics a client should push, how often, and how compressed (KIP-714).

    Served, and named in ApiVersions, only where `telemetry.receiver` is set. Subscriptions are settings of
    client-metrics resources; a client has all that match it, and the shortest of their intervals. Who asks again before
    the interval is over gets THROTTLING_QUOTA_EXCEEDED, unless the subscriptions have changed, or its last push was
    refused because of its subscription id or its compression.
    """
    instance_id, instance = _telemetry(context).ask(request.client_instance_id, _client(context), _on_lost(context))
    return GetTelemetrySubscriptionsResponse(
        client_instance_id=instance_id,
        subscription_id=instance.subscription_id,
        accepted_compression_types=[int(codec) for codec in ACCEPTED],
        push_interval_ms=instance.interval_ms,
        telemetry_max_bytes=_telemetry(context).max_bytes,
        delta_temporality=True,
        requested_metrics=list(instance.metrics),
    )


@api(ApiKey.PUSH_TELEMETRY, PushTelemetryRequest, "0", needs=NOTHING, setting=_RECEIVER)
def push_telemetry(
    context: RequestContext, request: PushTelemetryRequest
) -> PushTelemetryResponse | Coroutine[Any, Any, PushTelemetryResponse]:
    """Take metrics of a client, and pass them on to the receiver with the client's identity (KIP-714).

    Served, and named in ApiVersions, only where `telemetry.receiver` is set. Answered before the receiver has them;
    what it does not take is dropped and counted. Metrics that expand to more than `telemetry.max.decompressed.bytes`
    are TELEMETRY_TOO_LARGE, as in Kafka 4.4 (there the bound is `telemetry.max.bytes`); what cannot be expanded, or is
    no OTLP, is INVALID_RECORD.
    """
    push = Push(request.subscription_id, request.compression_type, request.metrics, request.terminating)
    work = _telemetry(context).push(request.client_instance_id, _client(context), push, _on_lost(context))
    return PushTelemetryResponse() if work is None else _pushed(work)


async def _pushed(work: asyncio.Future[bytes]) -> PushTelemetryResponse:
    await asyncio.shield(work)
    return PushTelemetryResponse()


def _telemetry(context: RequestContext) -> ClientTelemetry:
    telemetry = context.broker.telemetry
    assert telemetry is not None, f"served without {_RECEIVER}"
    return telemetry


def _client(context: RequestContext) -> Client:
    peer = context.peer
    name, version = _UNKNOWN if peer is None else peer.software or _UNKNOWN
    return Client(
        client_id=context.header.client_id,
        software_name=name,
        software_version=version,
        address=context.client_host,
        port=0 if peer is None else peer.port,
        principal=context.session.principal,
    )


def _on_lost(context: RequestContext) -> OnLost | None:
    return None if context.peer is None else context.peer.on_lost
