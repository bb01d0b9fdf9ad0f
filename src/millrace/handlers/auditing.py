"""What the audit log is told of a request that was answered: what it is about, who was denied what, what was changed.

Handlers also ask for rights that somebody need not have: to leave out of a list what may not be seen, or to try another
right before the last one. A denial is told only where the answer has the code for it. Produce and Fetch, whose answers
are no declared ones, ask for nothing that they do not need.

Of a request that changes something, all that it names is told, but never a value: not of a setting, not of a quota, and
nothing at all that proves who somebody is. What another broker carried out is told there. Topics that Metadata makes
are told of by the broker that was asked, which alone knows for whom.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final

from millrace.config import is_setting
from millrace.errors import ApiError, ErrorCode
from millrace.handlers.context import RequestContext
from millrace.handlers.needs import CODES
from millrace.metadata.deltas import ResourceType
from millrace.security import ocsf
from millrace.security.acls import CLUSTER_NAME, Operation, PatternKind, Permission, ResourceKind
from millrace.security.ocsf import Call, Caller, Judgement, Resource
from millrace.wire.keys import ApiKey
from millrace.wire.schema import Struct


def begin(context: RequestContext, key: ApiKey, request: Any) -> None:
    """Have noted what a request is about to ask for."""
    if context.broker.audit is not None:
        context.notes = context.broker.audit.notes(key, request)


def tell(context: RequestContext, key: ApiKey, outcome: Any) -> None:
    """Tell of a request that `begin` was called for; `outcome` is its response, or what its handler raised.

    A cancellation leaves open what was done: the client is gone, and what it asked for may have gone on without it.
    """
    notes, context.notes = context.notes, None  # once
    if notes is None or not (notes.judgements or notes.changing or notes.created):
        return
    audit = context.broker.audit
    assert audit is not None
    codes = _codes(outcome)
    call = Call(_caller(context), key, context.version, context.header.correlation_id, context.header.client_id)
    audit.decided(call, [each for each in notes.judgements if each.allowed or not codes or CODES[each.kind] in codes])
    if notes.created:
        outcomes = set(notes.created.values())
        errors = None if None in outcomes else sorted(code for code in outcomes if code is not None)
        audit.changed(call, notes.created_by, [Resource(TOPIC, name) for name in notes.created], errors)
    request = notes.changing
    if request is None or notes.passed_on or getattr(request, "validate_only", False):
        return
    if codes is None or not codes or not codes <= _REFUSALS:
        audit.changed(call, notes.judgements, resources(key, request), codes and sorted(codes))


def creates(context: RequestContext, operation: Operation, kind: ResourceKind, names: Collection[str]) -> None:
    """Have noted, before it happens, that a request which is there for something else makes topics by this right."""
    notes = context.notes
    if notes is not None and notes.tells_changes:
        by = names if kind is ResourceKind.TOPIC else (CLUSTER_NAME,)
        notes.created_by += [Judgement(operation, kind, name, True) for name in by]
        notes.created |= dict.fromkeys(names)


def created(context: RequestContext, made: Collection[str], code: ErrorCode = ErrorCode.NONE) -> None:
    """Take note of which of those were made, or with an error may have been; of the others nothing is told."""
    notes = context.notes
    if notes is not None:
        known = {name: code if was is None else was for name, was in notes.created.items()}
        notes.created = {name: known[name] for name, was in notes.created.items() if was is not None or name in made}


def _caller(context: RequestContext) -> Caller:
    session = context.session
    return Caller(session.principal, context.client_host, context.listener, 0, session.mechanism, session.token_id)


def _codes(outcome: Any) -> set[int] | None:
    """Every error code of an answer; None where there is no answer, or none that says them."""
    if isinstance(outcome, ApiError):
        return {outcome.code}
    if isinstance(outcome, Exception):
        return {ErrorCode.UNKNOWN_SERVER_ERROR}
    return set(error_codes(outcome)) if isinstance(outcome, Struct) else None


_CODES: Final = frozenset({"error_code", "partition_error_code", "acknowledge_error_code"})
"""How responses name them. A new topic's `topic_config_error_code` is none: the topic was made, and that is said."""


def error_codes(response: Struct) -> Iterator[int]:
    """Every error code in a response, at any depth."""
    for field in type(response).declaration.fields:
        value = getattr(response, field.name)
        if field.name in _CODES:
            yield value
        elif isinstance(value, list) and value and isinstance(value[0], Struct):
            for item in value:
                yield from error_codes(item)


_REFUSALS: Final[frozenset[int]] = frozenset(CODES.values())

# --- what a request is about ------------------------------------------------------------------------------------------

TOPIC, GROUP, USER, TOKEN = "TOPIC", "GROUP", "USER", "DELEGATION_TOKEN"


def resources(key: ApiKey, request: Any) -> list[Resource]:
    """What a request that changes something names, each once."""
    return list(dict.fromkeys(_ABOUT[key](request)))


def _named(kind: str, names: Iterable[str]) -> Iterable[Resource]:
    return (Resource(kind, name) for name in names)


def _deleted_topics(request: Any) -> Iterable[Resource]:
    by_state = (str(topic.topic_id) if topic.name is None else topic.name for topic in request.topics)
    return _named(TOPIC, [*request.topic_names, *by_state])


def _configs(request: Any) -> Iterable[Resource]:
    kinds = {kind.value: kind.name for kind in ResourceType}
    for each in request.resources:
        # What is no name of a setting may be a value that was put in its place.
        settings = tuple(config.name if is_setting(config.name) else "(unknown)" for config in each.configs)
        yield Resource(kinds.get(each.resource_type, str(each.resource_type)), each.resource_name, settings)


def _word(words: type[Operation | PatternKind | Permission | ResourceKind], number: int) -> str:
    return words(number).name if number in set(words) else str(number)


def _created_rules(request: Any) -> Iterable[Resource]:
    for each in request.creations:
        pattern = _word(PatternKind, each.resource_pattern_type)
        yield Resource(
            "ACL",
            f"{_word(Permission, each.permission_type)} {each.principal} from {each.host}: "
            f"{_word(Operation, each.operation)} on {_word(ResourceKind, each.resource_type)} {each.resource_name}"
            f"{'' if pattern == PatternKind.LITERAL.name else f' ({pattern.lower()})'}",
        )


def _deleted_rules(request: Any) -> Iterable[Resource]:
    for each in request.filters:
        principal, host, name = (
            "ANY" if text is None else text
            for text in (each.principal_filter, each.host_filter, each.resource_name_filter)
        )
        yield Resource(
            "ACL",
            f"{_word(Permission, each.permission_type)} {principal} from {host}: {_word(Operation, each.operation)} on "
            f"{_word(ResourceKind, each.resource_type_filter)} {name} "
            f"({_word(PatternKind, each.pattern_type_filter).lower()})",
        )


def _quotas(request: Any) -> Iterable[Resource]:
    for entry in request.entries:
        entity = ", ".join(
            f"{part.entity_type}={'<default>' if part.entity_name is None else part.entity_name}"
            for part in entry.entity
        )
        yield Resource("QUOTA", entity, tuple(op.key for op in entry.ops))


def _token_owner(request: Any) -> Iterable[Resource]:
    if request.owner_principal_name:
        yield Resource(USER, request.owner_principal_name)


def _a_token(_request: Any) -> Iterable[Resource]:
    """The request has nothing but the token's HMAC, which is its password."""
    return (Resource(TOKEN),)


def _topics(request: Any) -> Iterable[Resource]:
    return _named(TOPIC, (topic.name for topic in request.topics))


def _group(request: Any) -> Iterable[Resource]:
    return (Resource(GROUP, request.group_id),)


_ABOUT: Final[Mapping[ApiKey, Callable[[Any], Iterable[Resource]]]] = {
    ApiKey.CREATE_TOPICS: _topics,
    ApiKey.DELETE_TOPICS: _deleted_topics,
    ApiKey.DELETE_RECORDS: _topics,
    ApiKey.CREATE_PARTITIONS: _topics,
    ApiKey.ALTER_CONFIGS: _configs,
    ApiKey.INCREMENTAL_ALTER_CONFIGS: _configs,
    ApiKey.CREATE_ACLS: _created_rules,
    ApiKey.DELETE_ACLS: _deleted_rules,
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: lambda request: _named(
        USER, (each.name for each in (*request.deletions, *request.upsertions))
    ),
    ApiKey.ALTER_CLIENT_QUOTAS: _quotas,
    ApiKey.CREATE_DELEGATION_TOKEN: _token_owner,
    ApiKey.RENEW_DELEGATION_TOKEN: _a_token,
    ApiKey.EXPIRE_DELEGATION_TOKEN: _a_token,
    ApiKey.DELETE_GROUPS: lambda request: _named(GROUP, request.groups_names),
    ApiKey.OFFSET_DELETE: _group,
    ApiKey.ALTER_SHARE_GROUP_OFFSETS: _group,
    ApiKey.DELETE_SHARE_GROUP_OFFSETS: _group,
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: _topics,
    ApiKey.ALTER_REPLICA_LOG_DIRS: lambda request: _named(
        TOPIC, (topic.name for each in request.dirs for topic in each.topics)
    ),
    ApiKey.ELECT_LEADERS: lambda request: _named(TOPIC, (each.topic for each in request.topic_partitions or ())),
    ApiKey.UNREGISTER_BROKER: lambda request: (Resource("BROKER", str(request.broker_id)),),
    ApiKey.UPDATE_FEATURES: lambda request: _named("FEATURE", (each.feature for each in request.feature_updates)),
}
assert _ABOUT.keys() == ocsf.CHANGES.keys()
