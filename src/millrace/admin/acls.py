"""Rules of access as a cluster has them: read, made and removed, the words for them, and what they decide of somebody.

Asked with the project's own client: librdkafka knows neither resources of type USER and DELEGATION_TOKEN nor the newer
operations, and confluent-kafka takes a refusal to list rules for an empty list. Not here: how rules decide
(`security.acls`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import product
from typing import Any, Final

from millrace.admin import configs
from millrace.admin.configs import Resource
from millrace.admin.errors import AdminError
from millrace.client.cluster import ClusterClient, raise_for
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import ResourceType
from millrace.security.acls import (
    CLUSTER_NAME,
    OPERATIONS_OF,
    WILDCARD,
    Acl,
    AclFilter,
    AclTable,
    Decision,
    Operation,
    PatternKind,
    Permission,
    ResourceKind,
    decide,
    known,
)
from millrace.security.authorizer import parse_super_users
from millrace.wire.messages.acls import (
    CreateAclsRequest,
    CreateAclsResponse,
    DeleteAclsRequest,
    DeleteAclsResponse,
    DescribeAclsRequest,
    DescribeAclsResponse,
)

_PER_REQUEST: Final = 1000
_WHAT: Final = "rules of access"

Named = tuple[ResourceKind, str]
"""A resource, or the beginning of names of resources."""


def word(value: Operation | ResourceKind | PatternKind | Permission) -> str:
    """As it is typed and shown: `alter-configs`, `transactional-id`."""
    return value.name.lower().replace("_", "-")


OPERATIONS: Final = {word(each): each for each in Operation if each > Operation.ANY}


def operation_of(text: str) -> Operation:
    """`read`, `alter-configs`, and Kafka's `AlterConfigs` and `ALTER_CONFIGS`."""
    plain = {name.replace("-", ""): operation for name, operation in OPERATIONS.items()}
    found = plain.get(text.lower().replace("-", "").replace("_", ""))
    if found is None:
        near = get_close_matches(text.lower(), OPERATIONS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(OPERATIONS)}"
        raise AdminError(f"there is no operation '{text}'; {hint}", mistake=True)
    return found


def principal_of(text: str) -> str:
    """`User:alice`, which has to be said: rules compare the whole of it."""
    kind, colon, name = text.partition(":")
    if not (kind and colon and name):
        raise AdminError(f"a principal is TYPE:NAME, such as User:{text.strip(':') or 'alice'}", mistake=True)
    return text


# --- rules to be made -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """Whom rules are for, and what they say."""

    principals: Sequence[str]
    hosts: Sequence[str]
    permission: Permission
    prefixed: bool

    def rules(self, resources: Iterable[Named], operations: Iterable[Operation]) -> list[Acl]:
        """One rule for each combination; AdminError where one could never matter."""
        return [
            self._rule(resource, operation, principal, host)
            for resource, principal, host, operation in product(
                resources, self.principals, self.hosts, list(operations)
            )
        ]

    def _rule(self, resource: Named, operation: Operation, principal: str, host: str) -> Acl:
        kind, name = resource
        if operation is not Operation.ALL and operation not in OPERATIONS_OF[kind]:
            supported = ", ".join(word(each) for each in sorted(OPERATIONS_OF[kind]))
            text = f"{word(operation)} means nothing for a {word(kind)}: there are {supported} and all"
            raise AdminError(text, mistake=True)
        prefixed = self.prefixed and kind is not ResourceKind.CLUSTER
        if prefixed and name == WILDCARD:
            text = "the prefix '*' means names that begin with a star; as a name '*' stands for all"
            raise AdminError(text, mistake=True)
        pattern = PatternKind.PREFIXED if prefixed else PatternKind.LITERAL
        return Acl(kind, name, pattern, principal, host, operation, self.permission)


_PRODUCER: Final = {
    ResourceKind.TOPIC: (Operation.WRITE, Operation.DESCRIBE, Operation.CREATE),
    ResourceKind.TRANSACTIONAL_ID: (Operation.WRITE, Operation.DESCRIBE),
}
_CONSUMER: Final = {ResourceKind.TOPIC: (Operation.READ, Operation.DESCRIBE), ResourceKind.GROUP: (Operation.READ,)}


def needed_kinds(*, producer: bool, consumer: bool) -> set[ResourceKind]:
    """What a producer or a consumer has to do with."""
    return {kind for role in _roles(producer=producer, consumer=consumer) for kind in role}


def _roles(*, producer: bool, consumer: bool) -> list[Mapping[ResourceKind, tuple[Operation, ...]]]:
    return [*([_PRODUCER] if producer else []), *([_CONSUMER] if consumer else [])]


def role_rules(entry: Entry, resources: Sequence[Named], *, producer: bool, consumer: bool) -> list[Acl]:
    """What a producer or a consumer needs there, as kafka-acls has it; AdminError where something is not said."""
    kinds = {kind for kind, _ in resources}
    if ResourceKind.TOPIC not in kinds:
        raise AdminError("a producer or a consumer needs a topic", mistake=True)
    if consumer and ResourceKind.GROUP not in kinds:
        raise AdminError("a consumer needs a group: the group, or queue, that it reads in", mistake=True)
    for kind in kinds - needed_kinds(producer=producer, consumer=consumer):
        roles = " and ".join([*["a producer"] * producer, *["a consumer"] * consumer])
        raise AdminError(f"{roles} needs no {word(kind)}", mistake=True)
    rules = [
        acl
        for role in _roles(producer=producer, consumer=consumer)
        for resource in resources
        for acl in entry.rules([resource], role.get(resource[0], ()))
    ]
    return list(dict.fromkeys(rules))


# --- asking the cluster -----------------------------------------------------------------------------------------------


def read_rules(cluster: ClusterClient, filters: Iterable[AclFilter]) -> list[Acl]:
    """Every rule that one of the filters means, once, in the order of resources; Kafka tells them in none."""
    messages = [DescribeAclsRequest(**_fields(wanted)) for wanted in filters]
    return list(AclTable(acl for each in messages for acl in cluster.ask_any_broker(_WHAT, each, _described)))


def _fields(wanted: AclFilter) -> dict[str, Any]:
    return {
        "resource_type_filter": wanted.resource,
        "resource_name_filter": wanted.name,
        "pattern_type_filter": wanted.pattern,
        "principal_filter": wanted.principal,
        "host_filter": wanted.host,
        "operation": wanted.operation,
        "permission_type": wanted.permission,
    }


def _described(response: DescribeAclsResponse) -> list[Acl]:
    raise_for(response.error_code, response.error_message)
    return [
        Acl(
            known(ResourceKind, resource.resource_type),
            resource.resource_name,
            known(PatternKind, resource.pattern_type),
            each.principal,
            each.host,
            known(Operation, each.operation),
            known(Permission, each.permission_type),
        )
        for resource in response.resources
        for each in resource.acls
    ]


def create_rules(cluster: ClusterClient, acls: Sequence[Acl]) -> list[ApiError | None]:
    """Make rules; an error or None each."""

    def read(response: CreateAclsResponse) -> list[ApiError | None]:
        return [_error(each.error_code, each.error_message) for each in response.results]

    errors: list[ApiError | None] = []
    for part in _parts(acls):
        creations = [
            CreateAclsRequest.AclCreation(
                resource_type=acl.resource,
                resource_name=acl.name,
                resource_pattern_type=acl.pattern,
                principal=acl.principal,
                host=acl.host,
                operation=acl.operation,
                permission_type=acl.permission,
            )
            for acl in part
        ]
        errors += cluster.ask_any_broker(_WHAT, CreateAclsRequest(creations=creations), read)
    return errors


def remove_rules(cluster: ClusterClient, acls: Sequence[Acl]) -> list[ApiError | None]:
    """Remove these very rules; an error or None each."""

    def read(response: DeleteAclsResponse) -> list[ApiError | None]:
        return [_error(each.error_code, each.error_message) for each in response.filter_results]

    errors: list[ApiError | None] = []
    for part in _parts(acls):
        filters = [
            DeleteAclsRequest.DeleteAclsFilter(
                **_fields(
                    AclFilter(
                        acl.resource, acl.name, acl.pattern, acl.principal, acl.host, acl.operation, acl.permission
                    )
                )
            )
            for acl in part
        ]
        errors += cluster.ask_any_broker(_WHAT, DeleteAclsRequest(filters=filters), read)
    return errors


def _parts(acls: Sequence[Acl]) -> Iterable[Sequence[Acl]]:
    return (acls[start : start + _PER_REQUEST] for start in range(0, len(acls), _PER_REQUEST))


def _error(code: int, message: str | None) -> ApiError | None:
    try:
        raise_for(code, message)
    except ApiError as error:
        return error
    return None


_SUPER_USERS: Final = "super.users"
_ALLOW_IF_NO_ACL: Final = "allow.everyone.if.no.acl.found"


@dataclass(frozen=True, slots=True)
class Settings:
    """What else decides, besides the rules; `untold` are the settings that the broker has and keeps to itself."""

    broker_id: int
    super_users: frozenset[str] = frozenset()
    allow_if_no_acl: bool = False
    untold: tuple[str, ...] = ()


def read_settings(cluster: ClusterClient) -> Settings:
    """Of one broker: all should have the same. Apache Kafka takes both for secrets, as all that it does not know."""
    broker_id = cluster.broker_ids()[0]
    names = (_SUPER_USERS, _ALLOW_IF_NO_ACL)
    try:
        found = configs.read_all(cluster, Resource(ResourceType.BROKER, str(broker_id)))
    except ApiError as error:
        if error.code != ErrorCode.CLUSTER_AUTHORIZATION_FAILED:
            raise
        return Settings(broker_id, untold=names)
    values = {name: found[name].value or "" for name in names if name in found}
    return Settings(
        broker_id,
        parse_super_users(values.get(_SUPER_USERS, "")),
        values.get(_ALLOW_IF_NO_ACL, "").lower() == "true",
        tuple(name for name in values if found[name].sensitive),
    )


# --- deciding ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Question:
    """Whether somebody may do something; without a host, from one that no rule names."""

    principal: str
    operation: Operation
    kind: ResourceKind
    name: str
    host: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What the rules decide, and what is not known about it."""

    decision: Decision
    settings: Settings | None = None
    left_out_hosts: bool = False
    """Whether there are rules for single hosts, which do not count where none was given."""


def check_access(cluster: ClusterClient, question: Question) -> Answer:
    """Decided here, by the rules of the cluster and the settings of one of its brokers, as brokers decide."""
    try:
        rules = read_rules(cluster, [AclFilter(question.kind, question.name, PatternKind.MATCH)])
    except ApiError as error:
        if error.code != ErrorCode.SECURITY_DISABLED:
            raise
        return Answer(Decision(True, reason="the cluster has no authorizer, so everybody may everything"))
    settings = read_settings(cluster)
    decision = _decided(rules, settings, question)
    if not decision.allowed and question.kind is ResourceKind.TOPIC and question.operation is Operation.CREATE:
        # Who may create topics in the cluster may create any.
        of_cluster = read_rules(cluster, [AclFilter(ResourceKind.CLUSTER, CLUSTER_NAME, PatternKind.MATCH)])
        wider = _decided(of_cluster, settings, replace(question, kind=ResourceKind.CLUSTER, name=CLUSTER_NAME))
        decision = wider if wider.allowed and wider.rule is not None else decision
    left_out = question.host is None and any(acl.host != WILDCARD for acl in rules)
    return Answer(decision, settings, left_out)


def _decided(rules: Sequence[Acl], settings: Settings, question: Question) -> Decision:
    return decide(
        AclTable(rules),
        question.principal,
        question.host or "",
        question.operation,
        question.kind,
        question.name,
        super_users=settings.super_users,
        allow_if_no_acl=settings.allow_if_no_acl,
    )
