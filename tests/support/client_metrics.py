"""Client-metrics subscriptions (KIP-714), set by a raw client."""

from __future__ import annotations

from millrace.metadata.deltas import ResourceType
from millrace.wire.messages.configs import IncrementalAlterConfigsRequest
from support.raw import RawClient


def subscribe(client: RawClient, name: str, **values: str | None) -> None:
    request = IncrementalAlterConfigsRequest(
        resources=[
            IncrementalAlterConfigsRequest.AlterConfigsResource(
                resource_type=ResourceType.CLIENT_METRICS,
                resource_name=name,
                configs=[
                    IncrementalAlterConfigsRequest.AlterableConfig(
                        name=setting.replace("_", "."), config_operation=int(value is None), value=value
                    )
                    for setting, value in values.items()
                ],
            )
        ]
    )
    assert client.call(request, 1).responses[0].error_code == 0


def unsubscribe(client: RawClient, name: str) -> None:
    subscribe(client, name, metrics=None, interval_ms=None, match=None)
