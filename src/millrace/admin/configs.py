"""Settings of topics, groups, brokers and loggers as a cluster has them: read, set and unset.

The broker decides what a setting is and which values it takes, so all of this works against Apache Kafka, too. It
deletes what it never heard of without a word; a person wants to hear of that, so names are looked at here first.
Not here: whether a topic exists (ask first: a missing one is waited for), what settings mean (`config`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, TypeVar

from millrace.admin.errors import AdminError
from millrace.client.cluster import ClusterClient, raise_for
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import ResourceType
from millrace.wire.messages.configs import (
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from millrace.wire.schema import Request

T = TypeVar("T")

_SET: Final = 0
_DELETE: Final = 1
_DEFAULT: Final = "DEFAULT_CONFIG"
_DEFAULT_SOURCE: Final = 5
_SOURCES: Final = {
    1: "DYNAMIC_TOPIC_CONFIG",
    2: "DYNAMIC_BROKER_CONFIG",
    3: "DYNAMIC_DEFAULT_BROKER_CONFIG",
    4: "STATIC_BROKER_CONFIG",
    _DEFAULT_SOURCE: _DEFAULT,
    6: "DYNAMIC_BROKER_LOGGER_CONFIG",
    7: "DYNAMIC_CLIENT_METRICS_CONFIG",
    8: "DYNAMIC_GROUP_CONFIG",
}
"""The words of Kafka's admin client and its tools."""
_PLAIN_SOURCES: Final = {
    "DYNAMIC_TOPIC_CONFIG": "the topic",
    "DYNAMIC_BROKER_CONFIG": "the broker",
    "DYNAMIC_DEFAULT_BROKER_CONFIG": "all brokers",
    "STATIC_BROKER_CONFIG": "the broker's file",
    _DEFAULT: "default",
    "DYNAMIC_BROKER_LOGGER_CONFIG": "the logger",
    "DYNAMIC_CLIENT_METRICS_CONFIG": "the subscription",
    "DYNAMIC_GROUP_CONFIG": "the group",
}
_REFUSED: Final = frozenset({ErrorCode.INVALID_CONFIG, ErrorCode.INVALID_REQUEST})


@dataclass(frozen=True, slots=True)
class Resource:
    """What settings belong to. A broker without a name stands for what is set for all of them."""

    type: ResourceType
    name: str

    def __str__(self) -> str:
        if self.type is ResourceType.BROKER:
            return f"broker {self.name}" if self.name else "all brokers"
        if self.type is ResourceType.BROKER_LOGGER:
            return f"the loggers of broker {self.name}"
        if self.type is ResourceType.CLIENT_METRICS:
            return f"the subscription '{self.name}' to client metrics"
        return f"{self.type.name.lower()} '{self.name}'"

    @property
    def own_source(self) -> str:
        """Where a value comes from that was set for this very resource."""
        if self.type is ResourceType.BROKER:
            return "DYNAMIC_BROKER_CONFIG" if self.name else "DYNAMIC_DEFAULT_BROKER_CONFIG"
        return f"DYNAMIC_{self.type.name}_CONFIG"

    @property
    def broker_id(self) -> int | None:
        """Who has to be asked; None where any broker answers."""
        return int(self.name) if self.type in (ResourceType.BROKER, ResourceType.BROKER_LOGGER) and self.name else None


def topic(name: str) -> Resource:
    return Resource(ResourceType.TOPIC, name)


def group(name: str) -> Resource:
    return Resource(ResourceType.GROUP, name)


ALL_BROKERS: Final = Resource(ResourceType.BROKER, "")


@dataclass(frozen=True, slots=True)
class ConfigValue:
    """A setting; `value` is None where there is none, and where it is a secret."""

    name: str
    value: str | None
    source: str
    sensitive: bool
    read_only: bool

    @property
    def is_default(self) -> bool:
        return self.source == _DEFAULT

    @property
    def plain_source(self) -> str:
        return _PLAIN_SOURCES.get(self.source, self.source)

    @property
    def shown(self) -> str | None:
        return "(secret)" if self.sensitive else self.value


def read_all(cluster: ClusterClient, resource: Resource) -> dict[str, ConfigValue]:
    """Every setting of a resource, by name; of all brokers together, those that were set."""
    message = DescribeConfigsRequest(
        resources=[
            DescribeConfigsRequest.DescribeConfigsResource(
                resource_type=resource.type, resource_name=resource.name, configuration_keys=None
            )
        ],
        include_synonyms=True,
    )

    def read(response: DescribeConfigsResponse) -> dict[str, ConfigValue]:
        (result,) = response.results
        raise_for(result.error_code, result.error_message)
        return {
            each.name: ConfigValue(
                name=each.name,
                value=each.value,
                source=_source(resource, each),
                sensitive=each.is_sensitive,
                read_only=each.read_only,
            )
            for each in sorted(result.configs, key=lambda each: each.name)
        }

    return _ask(cluster, resource, message, read)


def _source(resource: Resource, each: DescribeConfigsResponse.DescribeConfigsResourceResult) -> str:
    """Where the value comes from.

    Brokers say log.retention.hours was set where log.retention.ms was, which overrules it: not what is meant here.
    """
    number = each.config_source
    if resource.type is ResourceType.BROKER and each.synonyms:
        number = next((one.source for one in each.synonyms if one.name == each.name), _DEFAULT_SOURCE)
    return _SOURCES.get(number, "UNKNOWN")


def read_named(cluster: ClusterClient, resource: Resource, names: Collection[str]) -> list[ConfigValue]:
    """These settings; AdminError where the resource knows no such name, or all brokers were given none."""
    found = read_all(cluster, resource)
    missing = [name for name in names if name not in found]
    _check_names(cluster, resource, missing, found)
    if missing:  # a setting of brokers that was not set for all of them
        raise AdminError(f"{missing[0]} is not set for {resource}")
    return [found[name] for name in dict.fromkeys(names)]


def read_value(cluster: ClusterClient, resource: Resource, name: str) -> str | None:
    """One value; None also where the broker knows no such setting."""
    found = read_all(cluster, resource).get(name)
    return None if found is None else found.value


def change(
    cluster: ClusterClient, resource: Resource, to_set: Mapping[str, str], to_unset: Collection[str] = ()
) -> list[str]:
    """Set and unset, all of it or nothing; the names that were to be unset and were not set.

    AdminError says, in one line, what the broker would not take, or which name it does not know.
    """
    both = sorted(to_set.keys() & set(to_unset))
    if both:
        raise AdminError(f"{both[0]} cannot be set and unset at once", mistake=True)
    not_set: list[str] = []
    if to_unset:
        found = read_all(cluster, resource)
        _check_names(cluster, resource, to_unset, found)
        not_set = [name for name in to_unset if name not in found or found[name].source != resource.own_source]
    operations: list[tuple[str, int, str | None]] = [(name, _SET, value) for name, value in to_set.items()]
    operations += [(name, _DELETE, None) for name in dict.fromkeys(to_unset) if name not in not_set]
    if not operations:
        return not_set
    message = IncrementalAlterConfigsRequest(
        resources=[
            IncrementalAlterConfigsRequest.AlterConfigsResource(
                resource_type=resource.type,
                resource_name=resource.name,
                configs=[
                    IncrementalAlterConfigsRequest.AlterableConfig(name=name, config_operation=operation, value=value)
                    for name, operation, value in operations
                ],
            )
        ]
    )

    def read(response: IncrementalAlterConfigsResponse) -> None:
        for each in response.responses:
            raise_for(each.error_code, each.error_message)

    try:
        _ask(cluster, resource, message, read)
    except ApiError as error:
        if error.code not in _REFUSED:
            raise
        _check_names(cluster, resource, to_set, read_all(cluster, resource))
        raise AdminError(" ".join(error.message.split())) from None
    return not_set


def _ask(cluster: ClusterClient, resource: Resource, message: Request, read: Callable[[Any], T]) -> T:
    what = f"settings of {resource}"
    if resource.broker_id is None:
        return cluster.ask_any_broker(what, message, read)
    return cluster.ask_broker(resource.broker_id, what, message, read)


def _check_names(
    cluster: ClusterClient, resource: Resource, names: Collection[str], found: Mapping[str, ConfigValue]
) -> None:
    """AdminError where a name is none that the resource may have, with one that is near."""
    known: Collection[str] = found
    if resource == ALL_BROKERS and not set(names) <= found.keys():
        # Of all brokers together, only what was set is told; one of them tells what there is.
        known = read_all(cluster, Resource(ResourceType.BROKER, str(cluster.broker_ids()[0])))
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise AdminError(f"there is no setting '{name}' of {resource}{hint}")
