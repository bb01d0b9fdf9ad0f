"""Access control lists: what a rule is, which rules there are, and what they decide. Pure.

Kafka's rules. A super user may do everything. Otherwise a rule that matches and denies wins over all that allow; then
one that allows; then nobody may, unless rules are only asked for where there are some (`allow.everyone.if.no.acl.found`
and no rule names the resource). A rule matches a resource by its name, by `*`, or by a prefix; a principal by its name
or by `User:*`; a host by its address or by `*`; an operation by its name or by ALL. Only what allows implies more:
READ, WRITE, DELETE and ALTER imply DESCRIBE, ALTER_CONFIGS implies DESCRIBE_CONFIGS. Not Kafka's: an IPv6 address is
the same however it is written. Java writes those of clients out in full, and so do rules that were made for it.

A table never changes; its edited copies share what did not change. Not here: whom a request comes from, and what a
denial is answered with (`handlers.needs`).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Final, TypeVar


class ResourceKind(IntEnum):
    """What a rule is about; the numbers are the protocol's."""

    __hash__ = int.__hash__  # an enumeration's own is slow, and these are asked for all the time

    UNKNOWN = 0
    ANY = 1
    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5
    DELEGATION_TOKEN = 6
    USER = 7


class PatternKind(IntEnum):
    """How a rule names resources; ANY and MATCH are for filters only."""

    UNKNOWN = 0
    ANY = 1
    MATCH = 2
    LITERAL = 3
    PREFIXED = 4


class Operation(IntEnum):
    """What somebody wants to do."""

    __hash__ = int.__hash__  # an enumeration's own is slow, and these are asked for all the time

    UNKNOWN = 0
    ANY = 1
    ALL = 2
    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12
    CREATE_TOKENS = 13
    DESCRIBE_TOKENS = 14
    TWO_PHASE_COMMIT = 15


class Permission(IntEnum):
    """What a rule says."""

    UNKNOWN = 0
    ANY = 1
    DENY = 2
    ALLOW = 3


E = TypeVar("E", bound=IntEnum)


def known(kind: type[E], number: int) -> E:
    """What a number of the protocol stands for; UNKNOWN, which is 0 in every kind, where that is not known here."""
    try:
        return kind(number)
    except ValueError:
        return kind(0)


WILDCARD: Final = "*"
EVERYBODY: Final = "User:*"
LOCAL_HOST: Final = "local"
"""Where somebody is that has no address."""
CLUSTER_NAME: Final = "kafka-cluster"
"""The name of the only resource of kind CLUSTER."""

_IMPLIED_BY: Final[Mapping[Operation, frozenset[Operation]]] = {
    Operation.DESCRIBE: frozenset({Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER}),
    Operation.DESCRIBE_CONFIGS: frozenset({Operation.ALTER_CONFIGS}),
}
_NOTHING: Final[frozenset[Operation]] = frozenset()

_TOPIC = (
    Operation.READ, Operation.WRITE, Operation.CREATE, Operation.DESCRIBE, Operation.DELETE, Operation.ALTER,
    Operation.DESCRIBE_CONFIGS, Operation.ALTER_CONFIGS,
)  # fmt: skip
OPERATIONS_OF: Final[Mapping[ResourceKind, frozenset[Operation]]] = {
    ResourceKind.TOPIC: frozenset(_TOPIC),
    ResourceKind.GROUP: frozenset({
        Operation.READ, Operation.DESCRIBE, Operation.DELETE, Operation.DESCRIBE_CONFIGS, Operation.ALTER_CONFIGS,
    }),
    ResourceKind.CLUSTER: frozenset({
        Operation.CREATE, Operation.CLUSTER_ACTION, Operation.DESCRIBE_CONFIGS, Operation.ALTER_CONFIGS,
        Operation.IDEMPOTENT_WRITE, Operation.ALTER, Operation.DESCRIBE,
    }),
    ResourceKind.TRANSACTIONAL_ID: frozenset({Operation.DESCRIBE, Operation.WRITE, Operation.TWO_PHASE_COMMIT}),
    ResourceKind.DELEGATION_TOKEN: frozenset({Operation.DESCRIBE}),
    ResourceKind.USER: frozenset({Operation.CREATE_TOKENS, Operation.DESCRIBE_TOKENS}),
}  # fmt: skip
"""The operations that mean something for a resource: a rule may name these and ALL."""


@dataclass(frozen=True, slots=True)
class Acl:
    """One rule."""

    resource: ResourceKind
    name: str
    pattern: PatternKind
    principal: str
    host: str
    operation: Operation
    permission: Permission

    def __str__(self) -> str:
        named = self.name if self.pattern is PatternKind.LITERAL else f"{self.name}* (prefixed)"
        return (
            f"{self.permission.name} {self.principal} from {self.host}: {self.operation.name} on "
            f"{self.resource.name} {named}"
        )


@dataclass(frozen=True, slots=True)
class AclFilter:
    """Which rules are meant; None and ANY stand for all."""

    resource: ResourceKind = ResourceKind.ANY
    name: str | None = None
    pattern: PatternKind = PatternKind.ANY
    principal: str | None = None
    host: str | None = None
    operation: Operation = Operation.ANY
    permission: Permission = Permission.ANY

    def matches(self, acl: Acl) -> bool:
        return (
            self.resource in (ResourceKind.ANY, acl.resource)
            and self.principal in (None, acl.principal)
            and self.host in (None, acl.host)
            and self.operation in (Operation.ANY, acl.operation)
            and self.permission in (Permission.ANY, acl.permission)
            and self._matches_name(acl)
        )

    def _matches_name(self, acl: Acl) -> bool:
        if self.pattern not in (PatternKind.ANY, PatternKind.MATCH, acl.pattern):
            return False
        if self.name is None or self.name == acl.name:
            return True
        if self.pattern is not PatternKind.MATCH:
            return False
        if acl.pattern is PatternKind.PREFIXED:
            return self.name.startswith(acl.name)
        return acl.name == WILDCARD


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether somebody may, and the rule that says so; without one, `reason` says why."""

    allowed: bool
    rule: Acl | None = None
    reason: str = ""


_Rules = Mapping[str, tuple[Acl, ...]]


@dataclass(frozen=True, slots=True)
class _OfKind:
    """The rules about one kind of resource."""

    literal: _Rules
    prefixed: _Rules
    prefix_lengths: tuple[int, ...]

    def about(self, name: str) -> Iterator[Acl]:
        """Every rule whose pattern takes in the resource of this name."""
        yield from self.literal.get(name, ())
        if name != WILDCARD:
            yield from self.literal.get(WILDCARD, ())
        for length in self.prefix_lengths:
            if length > len(name):
                break
            yield from self.prefixed.get(name[:length], ())

    def named(self, name: str) -> Iterator[Acl]:
        """Every rule that has this very name, or prefix."""
        yield from self.literal.get(name, ())
        yield from self.prefixed.get(name, ())


_NO_RULES: Final = _OfKind({}, {}, ())


class AclTable:
    """All rules; immutable."""

    __slots__ = ("_all", "_kinds")

    def __init__(self, acls: Iterable[Acl] = ()) -> None:
        self._all: frozenset[Acl] = frozenset(acls)
        self._kinds: Mapping[ResourceKind, _OfKind] = _edited({}, self._all, frozenset())

    def edited(self, added: Iterable[Acl] = (), removed: Iterable[Acl] = ()) -> AclTable:
        """A copy with and without these; a rule that is there already, or is not there, changes nothing."""
        gone = self._all.intersection(removed)
        new = frozenset(added) - (self._all - gone)
        if not gone and not new:
            return self
        copy: AclTable = AclTable.__new__(AclTable)
        copy._all = (self._all - gone) | new
        copy._kinds = _edited(self._kinds, new, gone)
        return copy

    def __iter__(self) -> Iterator[Acl]:
        return iter(sorted(self._all, key=_order))

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, acl: object) -> bool:
        return acl in self._all

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AclTable) and self._all == other._all

    def __hash__(self) -> int:
        return hash(self._all)

    def __repr__(self) -> str:
        return f"AclTable({len(self._all)} rules)"

    def about(self, kind: ResourceKind, name: str) -> Iterator[Acl]:
        """Every rule whose pattern takes in this resource."""
        return self._kinds.get(kind, _NO_RULES).about(name)

    def of_kind(self, kind: ResourceKind) -> Iterator[Acl]:
        """Every rule about resources of this kind."""
        rules = self._kinds.get(kind, _NO_RULES)
        for by_name in (rules.literal, rules.prefixed):
            for acls in by_name.values():
                yield from acls

    def matching(self, wanted: AclFilter) -> list[Acl]:
        """Every rule that a filter means, in order; a filter with a name does not look at all of them."""
        kinds = self._kinds if wanted.resource is ResourceKind.ANY else (wanted.resource,)
        if wanted.name is None:
            candidates = (acl for kind in kinds for acl in self.of_kind(kind))
        elif wanted.pattern is PatternKind.MATCH:
            candidates = (acl for kind in kinds for acl in self.about(kind, wanted.name))
        else:
            candidates = (acl for kind in kinds for acl in self._kinds.get(kind, _NO_RULES).named(wanted.name))
        return sorted(filter(wanted.matches, candidates), key=_order)


def _order(acl: Acl) -> tuple[int, str, int, str, str, int, int]:
    return acl.resource, acl.name, acl.pattern, acl.principal, acl.host, acl.operation, acl.permission


def _edited(
    kinds: Mapping[ResourceKind, _OfKind], added: frozenset[Acl], removed: frozenset[Acl]
) -> Mapping[ResourceKind, _OfKind]:
    changed = dict(kinds)
    for kind in {acl.resource for acl in added | removed}:
        changed[kind] = _edited_kind(
            kinds.get(kind, _NO_RULES),
            (acl for acl in added if acl.resource is kind),
            (acl for acl in removed if acl.resource is kind),
        )
    return changed


def _edited_kind(rules: _OfKind, added: Iterable[Acl], removed: Iterable[Acl]) -> _OfKind:
    literal, prefixed = dict(rules.literal), dict(rules.prefixed)
    for acl in removed:
        by_name = prefixed if acl.pattern is PatternKind.PREFIXED else literal
        left = tuple(other for other in by_name[acl.name] if other != acl)
        if left:
            by_name[acl.name] = left
        else:
            del by_name[acl.name]
    for acl in added:
        by_name = prefixed if acl.pattern is PatternKind.PREFIXED else literal
        by_name[acl.name] = (*by_name.get(acl.name, ()), acl)
    return _OfKind(literal, prefixed, tuple(sorted({len(name) for name in prefixed})))


def _is_from(place: str, host: str) -> bool:
    """Whether a rule's host means the address that somebody comes from."""
    return place in (host, WILDCARD) or (":" in place and ":" in host and address_of(place) == address_of(host))


@lru_cache(maxsize=1024)
def address_of(text: str) -> str | None:
    """The shortest form of an address, by which two are the same; None for what is none."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


def decide(
    table: AclTable,
    principal: str,
    host: str,
    operation: Operation,
    kind: ResourceKind,
    name: str,
    *,
    super_users: frozenset[str] = frozenset(),
    allow_if_no_acl: bool = False,
) -> Decision:
    """Whether `principal`, coming from `host`, may do `operation` on the resource."""
    if principal in super_users:
        return Decision(True, reason="a super user")
    implied_by = _IMPLIED_BY.get(operation, _NOTHING)
    allowed: Acl | None = None
    is_named = False
    for acl in table.about(kind, name):
        is_named = True
        if acl.principal not in (principal, EVERYBODY) or not _is_from(acl.host, host):
            continue
        if acl.permission is Permission.DENY:
            if acl.operation in (operation, Operation.ALL):
                return Decision(False, acl)
        elif acl.operation in (operation, Operation.ALL) or acl.operation in implied_by:
            allowed = allowed or acl
    if allowed is not None:
        return Decision(True, allowed)
    if not is_named and allow_if_no_acl:
        return Decision(True, reason="no rule names the resource, and allow.everyone.if.no.acl.found is on")
    return Decision(False, reason="no rule allows it")


def decide_for_any(
    table: AclTable,
    principal: str,
    host: str,
    operation: Operation,
    kind: ResourceKind,
    *,
    super_users: frozenset[str] = frozenset(),
    allow_if_no_acl: bool = False,
) -> Decision:
    """Whether there is, or could be, a resource of this kind on which `principal` may do `operation`."""
    if principal in super_users:
        return Decision(True, reason="a super user")
    allowing: list[Acl] = []
    denied_names: set[str] = set()
    denied_prefixes: list[Acl] = []
    for acl in table.of_kind(kind):
        if acl.principal not in (principal, EVERYBODY) or not _is_from(acl.host, host):
            continue
        if acl.operation not in (operation, Operation.ALL):
            if acl.permission is Permission.ALLOW and acl.operation in _IMPLIED_BY.get(operation, _NOTHING):
                allowing.append(acl)
            continue
        if acl.permission is Permission.ALLOW:
            allowing.append(acl)
        elif acl.pattern is PatternKind.PREFIXED:
            denied_prefixes.append(acl)
        elif acl.name == WILDCARD:
            return Decision(False, acl)
        else:
            denied_names.add(acl.name)
    for acl in allowing:
        is_wildcard = acl.pattern is PatternKind.LITERAL and acl.name == WILDCARD
        if is_wildcard:
            return Decision(True, acl)
        if acl.pattern is PatternKind.LITERAL and acl.name in denied_names:
            continue
        if not any(acl.name.startswith(denied.name) for denied in denied_prefixes):
            return Decision(True, acl)
    if allow_if_no_acl:
        return Decision(True, reason="a resource that no rule names, and allow.everyone.if.no.acl.found is on")
    return Decision(False, reason="no rule allows it")


NO_ACLS: Final = AclTable()
