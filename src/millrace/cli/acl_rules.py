"""Rules of access as a cluster has them: read, made and removed, and the words for them on the command line.

Asked with the project's own client: librdkafka knows neither resources of type USER and DELEGATION_TOKEN nor the newer
operations, and confluent-kafka takes a refusal to list rules for an empty list. All of this works against Apache Kafka,
too. Not here: the commands (`cli.acls`), what rules decide (`security.acls`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product
from typing import Any, Final

from millrace.cli import config_values
from millrace.cli.config_values import Resource
from millrace.cli.output import CommandError
from millrace.client.cluster import ClusterClient, raise_for
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import ResourceType
from millrace.security.acls import (
    OPERATIONS_OF,
    WILDCARD,
    Acl,
    AclFilter,
    AclTable,
    Operation,
    PatternKind,
    Permission,
    ResourceKind,
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
        raise CommandError(f"there is no operation '{text}'; {hint}", exit_code=2)
    return found


def principal_of(text: str) -> str:
    """`User:alice`, which has to be said: rules compare the whole of it."""
    kind, colon, name = text.partition(":")
    if not (kind and colon and name):
        raise CommandError(f"a principal is TYPE:NAME, such as User:{text.strip(':') or 'alice'}", exit_code=2)
    return text


# --- rules from what was typed ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """Whom rules are for, and what they say."""

    principals: Sequence[str]
    hosts: Sequence[str]
    permission: Permission
    prefixed: bool

    def rules(self, resources: Iterable[Named], operations: Iterable[Operation]) -> list[Acl]:
        """One rule for each combination; CommandError where one could never matter."""
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
            raise CommandError(text, exit_code=2)
        prefixed = self.prefixed and kind is not ResourceKind.CLUSTER
        if prefixed and name == WILDCARD:
            text = "--prefixed with '*' means names that begin with a star; without --prefixed '*' stands for all"
            raise CommandError(text, exit_code=2)
        pattern = PatternKind.PREFIXED if prefixed else PatternKind.LITERAL
        return Acl(kind, name, pattern, principal, host, operation, self.permission)


_PRODUCER: Final = {
    ResourceKind.TOPIC: (Operation.WRITE, Operation.DESCRIBE, Operation.CREATE),
    ResourceKind.TRANSACTIONAL_ID: (Operation.WRITE, Operation.DESCRIBE),
}
_CONSUMER: Final = {ResourceKind.TOPIC: (Operation.READ, Operation.DESCRIBE), ResourceKind.GROUP: (Operation.READ,)}


def role_rules(entry: Entry, resources: Sequence[Named], *, producer: bool, consumer: bool) -> list[Acl]:
    """What a producer or a consumer needs there, as kafka-acls has it; CommandError where something is not said."""
    kinds = {kind for kind, _ in resources}
    if ResourceKind.TOPIC not in kinds:
        raise CommandError("--producer and --consumer need a --topic", exit_code=2)
    if consumer and ResourceKind.GROUP not in kinds:
        raise CommandError("--consumer needs a --group: the group, or queue, that it reads in", exit_code=2)
    needed = [*([_PRODUCER] if producer else []), *([_CONSUMER] if consumer else [])]
    for kind in kinds:
        if not any(kind in role for role in needed):
            roles = " and ".join([*["--producer"] * producer, *["--consumer"] * consumer])
            raise CommandError(f"{roles} says nothing about a {word(kind)}", exit_code=2)
    rules = [
        acl for role in needed for resource in resources for acl in entry.rules([resource], role.get(resource[0], ()))
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
        found = config_values.read_all(cluster, Resource(ResourceType.BROKER, str(broker_id)))
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
