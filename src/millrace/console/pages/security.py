"""Users, rules and quotas; and the question that rules are about: may somebody do something?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from starlette.responses import Response

from millrace.admin import acls, quotas
from millrace.admin.acls import OPERATIONS, Entry, Question, operation_of, principal_of
from millrace.admin.users import DEFAULT_ITERATIONS, ClusterUsers
from millrace.console.listing import listed
from millrace.console.roles import Role
from millrace.console.web import BadInput, Page, page
from millrace.errors import ApiError, ErrorCode
from millrace.security.acls import (
    CLUSTER_NAME,
    WILDCARD,
    Acl,
    AclFilter,
    Operation,
    PatternKind,
    Permission,
    ResourceKind,
)

RESOURCES: Final = {
    acls.word(each): each
    for each in (
        ResourceKind.TOPIC,
        ResourceKind.GROUP,
        ResourceKind.CLUSTER,
        ResourceKind.TRANSACTIONAL_ID,
        ResourceKind.DELEGATION_TOKEN,
        ResourceKind.USER,
    )
}
MECHANISMS: Final = ("SCRAM-SHA-512", "SCRAM-SHA-256")
_NOT_SHOWN: Final = {
    ErrorCode.SECURITY_DISABLED: "The brokers have no authorizer: there are no rules, and everybody may do everything.",
    ErrorCode.CLUSTER_AUTHORIZATION_FAILED: "You may not see this.",
    ErrorCode.UNSUPPORTED_VERSION: "These brokers do not have this.",
}

T = TypeVar("T")


@page("/security")
def rules(page: Page) -> Response:
    with page.access.client() as client:
        found, reason = _if_shown(lambda: acls.read_rules(client, [AclFilter()]), list[Acl]())
        question = _question(page)
        answer = None if question is None else acls.check_access(client, question)
    listing = listed(
        found,
        page.request.query_params,
        text=lambda acl: f"{acl.principal} {acl.name} {acls.word(acl.resource)} {acls.word(acl.operation)} {acl.host}",
        columns={
            "principal": lambda acl: acl.principal,
            "resource": lambda acl: (acl.resource, acl.name),
            "operation": lambda acl: acls.word(acl.operation),
            "permission": lambda acl: acl.permission,
        },
    )
    return page.render(
        "security_rules.html",
        tab="rules",
        listing=listing,
        reason=reason,
        question=question,
        answer=answer,
        resources=tuple(RESOURCES),
        operations=tuple(OPERATIONS),
        word=acls.word,
    )


@page("/security/rules", methods=["POST"], role=Role.ADMIN)
def add_rule(page: Page) -> Response:
    kind = _resource(page.field("resource"))
    entry = Entry(
        [principal_of(page.field("principal").strip())],
        [page.field("host").strip() or WILDCARD],
        Permission.DENY if page.field("permission") == "deny" else Permission.ALLOW,
        page.field("pattern") == "prefixed",
    )
    resource = (kind, _resource_name(kind, page.field("name").strip()))
    wanted = entry.rules([resource], [operation_of(page.field("operation"))])
    with page.access.client() as client:
        _raise_first(acls.create_rules(client, wanted))
    return page.go("/security", good=f"Added: {wanted[0]}")


@page("/security/rules/remove", methods=["POST"], role=Role.ADMIN)
def remove_rule(page: Page) -> Response:
    try:
        rule = Acl(
            ResourceKind(page.field_number("resource")),
            page.field("name"),
            PatternKind(page.field_number("pattern")),
            page.field("principal"),
            page.field("host"),
            Operation(page.field_number("operation")),
            Permission(page.field_number("permission")),
        )
    except ValueError as error:
        raise BadInput(str(error)) from None
    with page.access.client() as client:
        _raise_first(acls.remove_rules(client, [rule]))
    return page.go("/security", good=f"Removed: {rule}")


@page("/security/users")
def users(page: Page) -> Response:
    with page.access.client() as client:
        found, reason = _if_shown(lambda: ClusterUsers(client).everybody(), dict[str, dict[str, int]]())
    listing = listed(
        found.items(),
        page.request.query_params,
        text=lambda user: user[0],
        columns={"name": lambda user: user[0]},
    )
    return page.render("security_users.html", tab="users", listing=listing, reason=reason, mechanisms=MECHANISMS)


@page("/security/users", methods=["POST"], role=Role.ADMIN)
def set_password(page: Page) -> Response:
    name, password = page.field("name").strip(), page.field("password")
    if not name or not password:
        raise BadInput("give a name and a password")
    if page.field("mechanism") not in MECHANISMS:
        raise BadInput(f"a mechanism is one of {', '.join(MECHANISMS)}")
    with page.access.client() as client:
        ClusterUsers(client).set_password(name, {page.field("mechanism"): DEFAULT_ITERATIONS}, password)
    return page.go("/security/users", good=f"{name} can log in with this password now")


@page("/security/users/remove", methods=["POST"], role=Role.ADMIN)
def remove_user(page: Page) -> Response:
    name = page.field("name")
    with page.access.client() as client:
        known = ClusterUsers(client)
        known.remove(name, known.mechanisms(name))
    return page.go("/security/users", good=f"{name} cannot log in any more")


@page("/security/quotas")
def quota_list(page: Page) -> Response:
    with page.access.client() as client:
        nothing: list[tuple[quotas.Parts, dict[str, float]]] = []
        found, reason = _if_shown(lambda: quotas.describe_quotas(client, {}), nothing)
    listing = listed(
        found,
        page.request.query_params,
        text=lambda each: " ".join(f"{kind} {name or 'default'}" for kind, name in each[0].items()),
        columns={"entity": lambda each: repr(sorted(each[0].items()))},
    )
    return page.render(
        "security_quotas.html", tab="quotas", listing=listing, reason=reason, kinds=quotas.KINDS, keys=quotas.KEYS
    )


@page("/security/quotas", methods=["POST"], role=Role.ADMIN)
def set_quota(page: Page) -> Response:
    parts: quotas.Parts = {}
    for kind in quotas.KINDS:
        name = page.field(f"name-{kind}").strip()
        if page.field(f"default-{kind}"):
            parts[kind] = None
        elif name:
            parts[kind] = name
    if not parts:
        raise BadInput("say whom the quota is for: a user, a client id, both, or an address")
    key = page.field("key")
    if key not in quotas.KEYS:
        raise BadInput(f"a quota is one of {', '.join(quotas.KEYS)}")
    text = page.field("value").strip()
    try:
        value = float(text) if text else None
    except ValueError:
        raise BadInput(f"{key} is a number, not '{text[:50]}'") from None
    with page.access.client() as client:
        quotas.alter_quotas(client, parts, {key: value})
    return page.go("/security/quotas", good=f"{key} is {'unlimited again' if value is None else text + ' now'}")


def _question(page: Page) -> Question | None:
    """What somebody asks with the form above the rules."""
    if not page.asked("who"):
        return None
    kind = _resource(page.asked("resource"))
    name = _resource_name(kind, page.asked("name").strip())
    return Question(
        principal_of(page.asked("who").strip()),
        operation_of(page.asked("operation")),
        kind,
        name,
        page.asked("host").strip() or None,
    )


def _resource(text: str) -> ResourceKind:
    if text not in RESOURCES:
        raise BadInput(f"a resource is one of {', '.join(RESOURCES)}")
    return RESOURCES[text]


def _resource_name(kind: ResourceKind, name: str) -> str:
    if kind is ResourceKind.CLUSTER:
        return CLUSTER_NAME
    if not name:
        raise BadInput(f"give the name of a {acls.word(kind)}, * for all")
    return name


def _if_shown(read: Callable[[], T], nothing: T) -> tuple[T, str]:
    """What was read; or nothing, and why."""
    try:
        return read(), ""
    except ApiError as error:
        if error.code not in _NOT_SHOWN:
            raise
        return nothing, _NOT_SHOWN[error.code]


def _raise_first(errors: list[ApiError | None]) -> None:
    for error in errors:
        if error is not None:
            raise error
