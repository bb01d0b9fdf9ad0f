"""Rules of access that come and go: pure functions from an image to a plan, as in `planning`.

Kafka's conditions. A rule needs a definite resource, pattern, operation and permission, a name, and a principal of the
form `Type:name`; whether the operation means something for the resource is not asked. One that is there already is
created without a change. Filters are matched against the rules as they were before the request, so one that two filters
match is in both results, and removed once.

Not Kafka's: `MAX_ACLS` and `MAX_TEXT`; and that a host from which nobody can come is refused, instead of being kept in
a rule that never matches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from millrace.cluster.image import ClusterImage
from millrace.cluster.planning import Plan
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import AclsChanged
from millrace.security.acls import (
    CLUSTER_NAME,
    LOCAL_HOST,
    WILDCARD,
    Acl,
    AclFilter,
    Operation,
    PatternKind,
    Permission,
    ResourceKind,
    address_of,
)

MAX_ACLS_PER_REQUEST: Final = 10_000
"""How many one request may add or remove; Kafka's number, too."""
MAX_ACLS: Final = 50_000
MAX_TEXT: Final = 4096
"""Characters in the name, principal and host of a rule together: every broker has all rules in memory."""

_INDEFINITE: Final = frozenset({ResourceKind.UNKNOWN, ResourceKind.ANY})
_NO_OPERATION: Final = frozenset({Operation.UNKNOWN, Operation.ANY})
_PATTERNS: Final = frozenset({PatternKind.LITERAL, PatternKind.PREFIXED})
_PERMISSIONS: Final = frozenset({Permission.ALLOW, Permission.DENY})


def plan_create_acls(image: ClusterImage, acls: Sequence[Acl]) -> Plan[list[ApiError | None]]:
    """Add rules; an error or None each, in order. ApiError where there are too many for one request."""
    results = [_problem(acl) for acl in acls]
    good = (acl for acl, problem in zip(acls, results, strict=True) if problem is None)
    added = [acl for acl in dict.fromkeys(good) if acl not in image.acls]
    if len(added) > MAX_ACLS_PER_REQUEST:
        raise ApiError(ErrorCode.POLICY_VIOLATION, f"one request may create {MAX_ACLS_PER_REQUEST} rules at most")
    if len(image.acls) + len(added) > MAX_ACLS:
        raise ApiError(ErrorCode.POLICY_VIOLATION, f"there may be {MAX_ACLS} rules at most, with these there are more")
    return Plan(results, (AclsChanged(added=tuple(added)),) if added else ())


def _problem(acl: Acl) -> ApiError | None:
    if "/" in acl.host:
        return ApiError(ErrorCode.UNSUPPORTED_VERSION, "a host is one address or *; networks are not supported")
    wrong = {
        f"the only name of a CLUSTER resource is {CLUSTER_NAME}": (
            acl.resource is ResourceKind.CLUSTER and acl.name != CLUSTER_NAME
        ),
        "the resource has no name": not acl.name,
        f"{acl.resource.name} is not a type of resource that a rule can be about": acl.resource in _INDEFINITE,
        f"a rule's pattern is LITERAL or PREFIXED, not {acl.pattern.name}": acl.pattern not in _PATTERNS,
        f"{acl.operation.name} is not an operation that a rule can be about": acl.operation in _NO_OPERATION,
        f"a rule's permission is ALLOW or DENY, not {acl.permission.name}": acl.permission not in _PERMISSIONS,
        f"the principal {acl.principal[:100]!r} is not of the form Type:name": ":" not in acl.principal,
        "the host is empty; * stands for all": not acl.host,
        f"the host {acl.host[:100]!r} is no address, and names of hosts are not looked up": not _is_place(acl.host),
        f"name, principal and host are longer than {MAX_TEXT} characters together": _length(acl) > MAX_TEXT,
    }
    return next((_invalid(text) for text, applies in wrong.items() if applies), None)


def _is_place(host: str) -> bool:
    """Whether somebody can come from there; `local` are those without an address."""
    return host in (WILDCARD, LOCAL_HOST) or address_of(host) is not None


def _length(acl: Acl) -> int:
    return len(acl.name) + len(acl.principal) + len(acl.host)


def plan_delete_acls(image: ClusterImage, filters: Sequence[AclFilter]) -> Plan[list[tuple[Acl, ...] | ApiError]]:
    """Remove the rules that match; per filter what it removes, or an error. ApiError where that is too many at once."""
    results: list[tuple[Acl, ...] | ApiError] = []
    removed: dict[Acl, None] = {}
    for wanted in filters:
        problem = filter_problem(wanted)
        if problem is not None:
            results.append(problem)
            continue
        found = tuple(image.acls.matching(wanted))
        removed.update(dict.fromkeys(found))
        if len(removed) > MAX_ACLS_PER_REQUEST:
            text = f"one request may remove {MAX_ACLS_PER_REQUEST} rules at most; give filters that match fewer"
            raise ApiError(ErrorCode.INVALID_REQUEST, text)
        results.append(found)
    return Plan(results, (AclsChanged(removed=tuple(removed)),) if removed else ())


def filter_problem(wanted: AclFilter) -> ApiError | None:
    """Why a filter means nothing: it has a value that is not known here."""
    if ResourceKind.UNKNOWN is wanted.resource or PatternKind.UNKNOWN is wanted.pattern:
        return _invalid("the filter's type of resource or pattern is not known")
    if Operation.UNKNOWN is wanted.operation or Permission.UNKNOWN is wanted.permission:
        return _invalid("the filter's operation or permission is not known")
    return None


def _invalid(text: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_REQUEST, text)
