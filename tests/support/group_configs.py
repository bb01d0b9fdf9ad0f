"""Settings of a group, such as where a share group begins: librdkafka's admin client cannot set them yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from millrace.client.cluster import ClusterClient, raise_for
from millrace.client.settings import ClientSettings
from millrace.wire.messages.configs import IncrementalAlterConfigsRequest, IncrementalAlterConfigsResponse

_GROUP: Final = 32
_SET: Final = 0


def set_group_configs(
    bootstrap: str, group: str, configs: Mapping[str, str], login: Mapping[str, str] | None = None
) -> None:
    """Returns when the cluster has taken them. `login` are settings of the client."""
    request = IncrementalAlterConfigsRequest(
        resources=[
            IncrementalAlterConfigsRequest.AlterConfigsResource(
                resource_type=_GROUP,
                resource_name=group,
                configs=[
                    IncrementalAlterConfigsRequest.AlterableConfig(name=name, config_operation=_SET, value=value)
                    for name, value in configs.items()
                ],
            )
        ]
    )

    def read(response: IncrementalAlterConfigsResponse) -> None:
        for each in response.responses:
            raise_for(each.error_code, each.error_message)

    with ClusterClient(ClientSettings.from_properties({"bootstrap.servers": bootstrap, **(login or {})})) as client:
        client.ask_any_broker(f"settings of group '{group}'", request, read)
