"""DescribeConfigs, AlterConfigs, IncrementalAlterConfigs and ListConfigResources.

What a setting is and where its value comes from is in `config`; what may change is in `cluster.planning`. Broker
loggers are Python's loggers: their levels are not metadata, so they are read and set here and forgotten at a restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from millrace.cluster.image import ClusterImage
from millrace.cluster.planning import AlterOp, ConfigAlteration, altered
from millrace.config import (
    ConfigEntry,
    ConfigSource,
    Kind,
    Listener,
    Scope,
    describe_broker,
    describe_broker_defaults,
    describe_client_metrics,
    describe_group,
    describe_topic,
)
from millrace.errors import ApiError, ConfigError, ErrorCode
from millrace.handlers.context import RequestContext
from millrace.handlers.forwarding import done_for_allowed, on_controller
from millrace.handlers.needs import (
    ALTER_CLUSTER_CONFIGS,
    ALTER_GROUP_CONFIGS,
    ALTER_TOPIC_CONFIGS,
    DESCRIBE_CLUSTER_CONFIGS,
    DESCRIBE_GROUP_CONFIGS,
    DESCRIBE_TOPIC_CONFIGS,
    cluster,
    judged,
)
from millrace.handlers.registry import api
from millrace.metadata.deltas import ResourceType
from millrace.model import AUDIT_LOG_TOPIC, invalid_topic_name_reason
from millrace.security.acls import Operation, ResourceKind
from millrace.security.tls import check_tls
from millrace.wire.keys import ApiKey
from millrace.wire.messages.configs import (
    AlterConfigsRequest,
    AlterConfigsResponse,
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
    ListConfigResourcesRequest,
    ListConfigResourcesResponse,
)

_ROOT_LOGGER: Final = "root"
_LEVELS: Final = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}

_TLS: Final = "ssl."
"""In the name of every setting of TLS, also of one listener."""

T = TypeVar("T")

_Result = AlterConfigsResponse.AlterConfigsResourceResponse
_TO_ALTER: Final = judged(ALTER_CLUSTER_CONFIGS, ALTER_TOPIC_CONFIGS, ALTER_GROUP_CONFIGS)


@api(
    ApiKey.DESCRIBE_CONFIGS,
    DescribeConfigsRequest,
    "1-4",
    needs=judged(DESCRIBE_CLUSTER_CONFIGS, DESCRIBE_TOPIC_CONFIGS, DESCRIBE_GROUP_CONFIGS),
)
def describe_configs(context: RequestContext, request: DescribeConfigsRequest) -> DescribeConfigsResponse:
    """Every setting of topics, this broker, groups and client-metrics subscriptions, with value and source.

    Synonyms (all places where a value was found, best first) and documentation come when asked for; secrets never.
    The broker named '' stands for what was set dynamically for all brokers, and only that is listed. A broker's
    advertised.listeners is what clients are told, set or derived from listeners. Broker loggers answer the levels of
    Python's loggers.

    Versions: v3 adds types and documentation.

    A broker answers only for itself, as in Kafka (INVALID_REQUEST for another id).
    """
    context.rights(*DESCRIBE_CLUSTER_CONFIGS)
    results = []
    # A resource that is named over and over is answered once: a small request must not become a huge answer.
    distinct = {(resource.resource_type, resource.resource_name): resource for resource in request.resources}
    for resource in distinct.values():
        result = DescribeConfigsResponse.DescribeConfigsResult(
            resource_type=resource.resource_type, resource_name=resource.resource_name, error_message=None
        )
        try:
            _demand(context, Operation.DESCRIBE_CONFIGS, resource.resource_type, resource.resource_name)
            wanted = resource.configuration_keys
            result.configs = [
                _entry(entry, synonyms=request.include_synonyms, documentation=request.include_documentation)
                for entry in _describe(context, resource.resource_type, resource.resource_name)
                if not wanted or entry.name in wanted
            ]
        except ApiError as error:
            result.error_code, result.error_message = error.code, error.message
        results.append(result)
    return DescribeConfigsResponse(results=results)


def _demand(context: RequestContext, operation: Operation, resource_type: int, name: str) -> None:
    """Settings of topics and groups are theirs; all others are the cluster's."""
    if resource_type == ResourceType.TOPIC:
        context.demand(operation, ResourceKind.TOPIC, name)
    elif resource_type == ResourceType.GROUP:
        context.demand(operation, ResourceKind.GROUP, name)
    else:
        context.demand(operation, ResourceKind.CLUSTER)


def _judge_change(context: RequestContext, resource_type: int, name: str) -> ApiError | None:
    try:
        _demand(context, Operation.ALTER_CONFIGS, resource_type, name)
        if resource_type == ResourceType.TOPIC and name == AUDIT_LOG_TOPIC:
            context.demand(*ALTER_CLUSTER_CONFIGS)  # a short retention would erase it
    except ApiError as refusal:
        return refusal
    return None


async def _unusable(
    context: RequestContext, alterations: Sequence[ConfigAlteration]
) -> dict[tuple[int, str], ApiError]:
    """What this broker has against its own new settings, after a look at the files that they name.

    Only the broker itself can see those. Asked for another one, it takes them as they are, and that one goes on with
    what it has where they cannot be used.
    """
    own = (ResourceType.BROKER, str(context.broker.broker_id))
    wanted = [each for each in alterations if (each.resource_type, each.name) == own]
    if len(wanted) != 1 or not any(_TLS in name for name, _, _ in wanted[0].operations):
        return {}
    if _judge_change(context, *own) is not None:
        return {}
    try:
        after = altered(context.broker.image.config(*own), wanted[0], Scope.BROKER)
        await asyncio.to_thread(check_tls, context.broker.config.tried(after))
    except ApiError:
        return {}  # no alteration at all, as the controller will say
    except ConfigError as error:
        return {own: ApiError(ErrorCode.INVALID_REQUEST, str(error))}
    return {}


def _entry(
    entry: ConfigEntry, *, synonyms: bool, documentation: bool
) -> DescribeConfigsResponse.DescribeConfigsResourceResult:
    return DescribeConfigsResponse.DescribeConfigsResourceResult(
        name=entry.name,
        value=entry.value,
        read_only=entry.read_only,
        config_source=entry.source,
        is_sensitive=entry.sensitive,
        config_type=entry.kind,
        documentation=entry.documentation if documentation else None,
        synonyms=[
            DescribeConfigsResponse.DescribeConfigsSynonym(
                name=synonym.name, value=synonym.value, source=synonym.source
            )
            for synonym in (entry.synonyms if synonyms else ())
        ],
    )


def _describe(context: RequestContext, resource_type: int, name: str) -> list[ConfigEntry]:
    image, config = context.broker.image, context.broker.config
    if resource_type == ResourceType.TOPIC:
        reason = invalid_topic_name_reason(name)
        if reason is not None:
            raise ApiError(ErrorCode.INVALID_TOPIC_EXCEPTION, reason)
        if name not in image.topics:
            raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name}")
        return describe_topic(image.topic_overrides(name), config)
    if resource_type == ResourceType.BROKER:
        if not name:
            return describe_broker_defaults(config)
        _check_own_id(context, name)
        return describe_broker(config, _advertised(context))
    if resource_type == ResourceType.BROKER_LOGGER:
        _check_own_id(context, name)
        return _describe_loggers()
    if resource_type in (ResourceType.GROUP, ResourceType.CLIENT_METRICS):
        if not name:
            raise ApiError(ErrorCode.INVALID_REQUEST, "the resource has no name")
        kind = ResourceType(resource_type)
        describe = describe_group if kind is ResourceType.GROUP else describe_client_metrics
        return describe(image.config(kind, name), config)
    raise ApiError(ErrorCode.INVALID_REQUEST, f"there are no resources of type {resource_type}")


def _advertised(context: RequestContext) -> str | None:
    """Where this broker tells clients to connect to, as it is written in a file; None before it is registered."""
    own = context.broker.image.brokers.get(context.broker.broker_id)
    if own is None:
        return None
    return ",".join(
        str(Listener(each.listener, each.security_protocol, each.host, each.port)) for each in own.endpoints
    )


def _check_own_id(context: RequestContext, name: str) -> None:
    own = str(context.broker.broker_id)
    if name != own:
        raise ApiError(ErrorCode.INVALID_REQUEST, f"this is broker {own}, the request is for {name[:20]!r}")


def _refuse_alter(_context: RequestContext, request: AlterConfigsRequest, error: ApiError) -> AlterConfigsResponse:
    alterations = _replacements(request)
    return AlterConfigsResponse(responses=_responses(_Result, alterations, [error] * len(alterations)))


def _replacements(request: AlterConfigsRequest) -> list[ConfigAlteration]:
    return [
        ConfigAlteration(
            resource.resource_type,
            resource.resource_name,
            tuple((config.name, AlterOp.SET, config.value) for config in resource.configs),
            replace_all=True,
        )
        for resource in request.resources
    ]


def _are_replaced(
    request: AlterConfigsRequest, response: AlterConfigsResponse
) -> Callable[[ClusterImage], bool] | None:
    return None if request.validate_only else _shows(_replacements(request), response.responses)


@api(ApiKey.ALTER_CONFIGS, AlterConfigsRequest, "0-2", needs=_TO_ALTER, forwardable=True)
async def alter_configs(context: RequestContext, request: AlterConfigsRequest) -> AlterConfigsResponse:
    """Replace all settings of resources: what is not named goes back to its default. Superseded by the next one.

    A resource fails as a whole or not at all; `validate_only` changes nothing.

    Not done: alter.config.policy.class.name. Broker loggers are refused, as in Kafka.
    """
    context.rights(*ALTER_CLUSTER_CONFIGS)

    unusable = await _unusable(context, _replacements(request))

    async def replace_all(resources: list[AlterConfigsRequest.AlterConfigsResource]) -> list[_Result]:
        request.resources = resources
        return (await _replace_settings(context, request)).responses

    return AlterConfigsResponse(
        responses=await done_for_allowed(
            request.resources,
            lambda each: (
                _judge_change(context, each.resource_type, each.resource_name)
                or unusable.get((each.resource_type, each.resource_name))
            ),
            lambda each, refusal: _refused(_Result, each, refusal),
            replace_all,
        )
    )


@on_controller(_refuse_alter, shown_when=_are_replaced)
async def _replace_settings(context: RequestContext, request: AlterConfigsRequest) -> AlterConfigsResponse:
    alterations = _replacements(request)
    errors = await context.broker.controller.alter_configs(alterations, validate_only=request.validate_only)
    return AlterConfigsResponse(responses=_responses(_Result, alterations, errors))


_Change = IncrementalAlterConfigsRequest.AlterConfigsResource
_IncrementalResult = IncrementalAlterConfigsResponse.AlterConfigsResourceResponse


@api(
    ApiKey.INCREMENTAL_ALTER_CONFIGS,
    IncrementalAlterConfigsRequest,
    "0-1",
    needs=_TO_ALTER,
    forwardable=True,
)
async def incremental_alter_configs(
    context: RequestContext, request: IncrementalAlterConfigsRequest
) -> IncrementalAlterConfigsResponse:
    """Set, delete, append to or subtract from single settings; the others stay (KIP-339).

    Append and subtract work on lists, starting from the default if nothing is set. A resource fails as a whole or
    not at all; `validate_only` changes nothing. Settings of topics, groups, client-metrics subscriptions, one broker
    or all of them ('') are metadata, and any broker takes them; the levels of broker loggers hold until the broker
    stops, and only it can be asked to change them. Settings of TLS that the broker which is asked could not use are
    INVALID_REQUEST, as in Kafka; those of another broker it cannot see. Every broker setting of Kafka 4.3 is known by
    its name, with Kafka's type and whether it may change; those without effect are kept and shown, and say so.

    Not done: alter.config.policy.class.name, names that Kafka does not know (it takes them for brokers, whose plug-ins
    may read them; here they are refused), settings of one listener (listener.name.*).
    """
    context.rights(*ALTER_CLUSTER_CONFIGS)

    unusable = await _unusable(context, _alterations(request.resources))

    async def alter(resources: list[_Change]) -> list[_IncrementalResult]:
        request.resources = resources
        return await _alter(context, request)

    return IncrementalAlterConfigsResponse(
        responses=await done_for_allowed(
            request.resources,
            lambda each: (
                _judge_change(context, each.resource_type, each.resource_name)
                or unusable.get((each.resource_type, each.resource_name))
            ),
            lambda each, refusal: _refused(_IncrementalResult, each, refusal),
            alter,
        )
    )


async def _alter(context: RequestContext, request: IncrementalAlterConfigsRequest) -> list[_IncrementalResult]:
    answers: list[_IncrementalResult] = []
    # Levels are this broker's own business; the rest is the controller's.
    loggers = [each for each in request.resources if each.resource_type == ResourceType.BROKER_LOGGER]
    others = [each for each in request.resources if each.resource_type != ResourceType.BROKER_LOGGER]
    for alteration in _alterations(loggers):
        error = _alter_loggers(context, alteration, validate_only=request.validate_only)
        answers += _responses(_IncrementalResult, [alteration], [error])
    if others:
        rest = IncrementalAlterConfigsRequest(resources=others, validate_only=request.validate_only)
        answers += (await _alter_settings(context, rest)).responses
    places = {(each.resource_type, each.resource_name): place for place, each in enumerate(request.resources)}
    answers.sort(key=lambda answer: places[answer.resource_type, answer.resource_name])
    return answers


def _alterations(resources: Sequence[_Change]) -> list[ConfigAlteration]:
    return [
        ConfigAlteration(
            resource.resource_type,
            resource.resource_name,
            tuple((config.name, config.config_operation, config.value) for config in resource.configs),
        )
        for resource in resources
    ]


def _refuse_incremental(
    _context: RequestContext, request: IncrementalAlterConfigsRequest, error: ApiError
) -> IncrementalAlterConfigsResponse:
    alterations = _alterations(request.resources)
    return IncrementalAlterConfigsResponse(
        responses=_responses(_IncrementalResult, alterations, [error] * len(alterations))
    )


def _are_altered(
    request: IncrementalAlterConfigsRequest, response: IncrementalAlterConfigsResponse
) -> Callable[[ClusterImage], bool] | None:
    return None if request.validate_only else _shows(_alterations(request.resources), response.responses)


@on_controller(_refuse_incremental, shown_when=_are_altered)
async def _alter_settings(
    context: RequestContext, request: IncrementalAlterConfigsRequest
) -> IncrementalAlterConfigsResponse:
    alterations = _alterations(request.resources)
    errors = await context.broker.controller.alter_configs(alterations, validate_only=request.validate_only)
    return IncrementalAlterConfigsResponse(responses=_responses(_IncrementalResult, alterations, errors))


def _shows(alterations: Sequence[ConfigAlteration], answers: Sequence[Any]) -> Callable[[ClusterImage], bool]:
    """Whether an image has the settings that were set or deleted; what lists were changed by is not told."""
    failed = {(each.resource_type, each.resource_name) for each in answers if each.error_code != ErrorCode.NONE}
    expected: dict[tuple[ResourceType, str, str], str | None] = {}
    for alteration in alterations:
        if (alteration.resource_type, alteration.name) not in failed:
            kind = ResourceType(alteration.resource_type)
            for name, operation, value in alteration.operations:
                if operation in (AlterOp.SET, AlterOp.DELETE):
                    expected[kind, alteration.name, name] = value if operation == AlterOp.SET else None
    return lambda image: all(
        image.config(kind, resource).get(name) == value for (kind, resource, name), value in expected.items()
    )


def _refused(
    make: Callable[..., T], resource: AlterConfigsRequest.AlterConfigsResource | _Change, refusal: ApiError
) -> T:
    return make(
        error_code=refusal.code,
        error_message=refusal.message,
        resource_type=resource.resource_type,
        resource_name=resource.resource_name,
    )


def _responses(
    make: Callable[..., T], alterations: Sequence[ConfigAlteration], errors: Sequence[ApiError | None]
) -> list[T]:
    return [
        make(
            error_code=ErrorCode.NONE if error is None else error.code,
            error_message=None if error is None else error.message,
            resource_type=alteration.resource_type,
            resource_name=alteration.name,
        )
        for alteration, error in zip(alterations, errors, strict=True)
    ]


@api(
    ApiKey.LIST_CONFIG_RESOURCES,
    ListConfigResourcesRequest,
    "0-1",
    needs=cluster(Operation.DESCRIBE_CONFIGS),
)
def list_config_resources(context: RequestContext, request: ListConfigResourcesRequest) -> ListConfigResourcesResponse:
    """The names of all resources that have settings: topics, brokers, their loggers, groups and subscriptions.

    Of groups and client-metrics subscriptions, those that were given a setting.

    Versions: v0 knows only client-metrics subscriptions; v1 takes the types wanted, none meaning all (KIP-1142).
    """
    supported = [ResourceType.CLIENT_METRICS] if context.version == 0 else list(ResourceType)
    wanted = request.resource_types or [int(kind) for kind in supported]
    if any(kind not in supported for kind in wanted):
        return ListConfigResourcesResponse(error_code=ErrorCode.UNSUPPORTED_VERSION)
    image = context.broker.image
    names: dict[ResourceType, list[str]] = {
        ResourceType.GROUP: sorted(name for kind, name in image.configs if kind is ResourceType.GROUP),
        ResourceType.CLIENT_METRICS: sorted(
            name for kind, name in image.configs if kind is ResourceType.CLIENT_METRICS
        ),
        ResourceType.BROKER_LOGGER: [str(broker_id) for broker_id in sorted(image.brokers)],
        ResourceType.BROKER: [str(broker_id) for broker_id in sorted(image.brokers)],
        ResourceType.TOPIC: sorted(image.topics),
    }
    return ListConfigResourcesResponse(
        config_resources=[
            ListConfigResourcesResponse.ConfigResource(resource_name=name, resource_type=kind)
            for kind, found in names.items()
            if kind in wanted
            for name in found
        ]
    )


# --- loggers ----------------------------------------------------------------------------------------------------------


def _loggers() -> dict[str, logging.Logger]:
    ours = sorted(name for name in logging.root.manager.loggerDict if name.split(".")[0] == "millrace")
    return {_ROOT_LOGGER: logging.root} | {name: logging.getLogger(name) for name in ours}


def _describe_loggers() -> list[ConfigEntry]:
    names = {level: name for name, level in _LEVELS.items()}  # DEBUG, not TRACE: the later one wins
    return [
        ConfigEntry(
            name=name,
            value=names.get(logger.getEffectiveLevel(), "INFO"),
            source=ConfigSource.DYNAMIC_BROKER_LOGGER_CONFIG,
            kind=Kind.STRING,
            read_only=False,
            sensitive=False,
            synonyms=(),
            documentation="",
        )
        for name, logger in _loggers().items()
    ]


def _alter_loggers(context: RequestContext, alteration: ConfigAlteration, *, validate_only: bool) -> ApiError | None:
    try:
        _check_own_id(context, alteration.name)
        loggers = _loggers()
        levels: list[tuple[logging.Logger, int]] = []
        for name, operation, value in alteration.operations:
            if name not in loggers:
                raise ApiError(ErrorCode.INVALID_CONFIG, f"there is no logger {name[:100]!r}")
            if operation == AlterOp.DELETE and name != _ROOT_LOGGER:
                levels.append((loggers[name], logging.NOTSET))
            elif operation == AlterOp.SET and (value or "").upper() in _LEVELS:
                levels.append((loggers[name], _LEVELS[(value or "").upper()]))
            else:
                text = f"{name}: set it to one of {', '.join(_LEVELS)}, or delete the level of any logger but root"
                raise ApiError(
                    ErrorCode.INVALID_CONFIG if operation == AlterOp.SET else ErrorCode.INVALID_REQUEST, text
                )
    except ApiError as error:
        return error
    if not validate_only:
        for logger, level in levels:
            logger.setLevel(level)
    return None
