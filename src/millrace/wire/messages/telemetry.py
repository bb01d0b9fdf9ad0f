"""Metrics that clients push to the broker (KIP-714)."""

from __future__ import annotations

from uuid import UUID

from millrace.wire.keys import ApiKey
from millrace.wire.schema import Request, Response, array, binary, boolean, int8, int16, int32, string, uuid


class GetTelemetrySubscriptionsRequest(Request, key=ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, versions="0", flexible="0+"):
    """Asks which metrics a client should push."""

    client_instance_id: UUID = uuid()


class GetTelemetrySubscriptionsResponse(Response, key=ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, versions="0", flexible="0+"):
    """The subscription and its identity."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    client_instance_id: UUID = uuid()
    subscription_id: int = int32()
    accepted_compression_types: list[int] = array(int8)
    push_interval_ms: int = int32()
    telemetry_max_bytes: int = int32()
    delta_temporality: bool = boolean()
    requested_metrics: list[str] = array(string)


class PushTelemetryRequest(Request, key=ApiKey.PUSH_TELEMETRY, versions="0", flexible="0+"):
    """Pushes metrics."""

    client_instance_id: UUID = uuid()
    subscription_id: int = int32()
    terminating: bool = boolean()
    compression_type: int = int8()
    metrics: bytes = binary()


class PushTelemetryResponse(Response, key=ApiKey.PUSH_TELEMETRY, versions="0", flexible="0+"):
    """Whether they were taken."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
