"""How much users, client ids and addresses may use: read and changed.

The cluster decides what an entity may have (`cluster.quotas`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from millrace.client.cluster import ClusterClient, raise_for
from millrace.cluster.quotas import MatchType
from millrace.security.quotas import CLIENT_ID, CLIENT_KEYS, CONNECTION_CREATION_RATE, IP, USER
from millrace.wire.messages.quotas import AlterClientQuotasRequest, DescribeClientQuotasRequest

KINDS: Final = (USER, CLIENT_ID, IP)
KEYS: Final = (*CLIENT_KEYS, CONNECTION_CREATION_RATE)

Parts = dict[str, str | None]
"""An entity: the names of its user, client id or address; None stands for the default, every one without its own."""


def describe_quotas(
    cluster: ClusterClient, parts: Parts, *, strict: bool = False
) -> list[tuple[Parts, dict[str, float]]]:
    """The entities that have these parts (with `strict`, and no others), and the quotas of each, in their order."""
    request = DescribeClientQuotasRequest(
        components=[
            DescribeClientQuotasRequest.ComponentData(
                entity_type=kind, match_type=MatchType.DEFAULT if name is None else MatchType.EXACT, match=name
            )
            for kind, name in parts.items()
        ],
        strict=strict,
    )

    def read(response: Any) -> list[tuple[Parts, dict[str, float]]]:
        raise_for(response.error_code, response.error_message)
        return [
            (
                {part.entity_type: part.entity_name for part in entry.entity},
                {each.key: each.value for each in entry.values},
            )
            for entry in response.entries or ()
        ]

    return sorted(cluster.ask_any_broker("the quotas", request, read), key=lambda found: repr(sorted(found[0].items())))


def alter_quotas(cluster: ClusterClient, parts: Parts, values: Mapping[str, float | None]) -> None:
    """Set the quotas of one entity, or remove them (None)."""
    request = AlterClientQuotasRequest(
        entries=[
            AlterClientQuotasRequest.EntryData(
                entity=[
                    AlterClientQuotasRequest.EntityData(entity_type=kind, entity_name=name)
                    for kind, name in parts.items()
                ],
                ops=[
                    AlterClientQuotasRequest.OpData(key=key, value=value or 0.0, remove=value is None)
                    for key, value in values.items()
                ],
            )
        ]
    )

    def read(response: Any) -> None:
        for entry in response.entries:
            raise_for(entry.error_code, entry.error_message)

    cluster.ask_any_broker("the change of quotas", request, read)
