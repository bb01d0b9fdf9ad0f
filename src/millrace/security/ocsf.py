"""Audit events in the form of the Open Cybersecurity Schema Framework (OCSF). Pure.

Three kinds: Authentication (class 3002) for logins, API Activity (class 6003) for what somebody asked for and was
allowed or denied, and a Base Event that says how many events were lost. Attributes that OCSF has no name for are under
`unmapped`. Not here: which events are worth one, and where they go (`audit`).

Invariant: nothing that proves who somebody is (a password, a token, a key, a nonce) is ever an argument of a function
here, so none can be in an event. The name that somebody gave who failed to log in is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import millrace
from millrace.errors import ErrorCode
from millrace.security.acls import Operation, ResourceKind
from millrace.wire.keys import ApiKey

Event = dict[str, Any]

SCHEMA_VERSION: Final = "1.2.0"
PRODUCT: Final = "millrace"
AUTHENTICATION: Final = 3002
API_ACTIVITY: Final = 6003
BASE_EVENT: Final = 0

INFORMATIONAL, LOW, MEDIUM = 1, 2, 3
UNKNOWN, SUCCESS, FAILURE, OTHER = 0, 1, 2, 99
CREATE, READ, UPDATE, DELETE = 1, 2, 3, 4
LOGON: Final = 1

MAX_TEXT: Final = 300
"""Of a name or reason that came from outside; what is longer is cut."""
MAX_RESOURCES: Final = 100
"""Named in one event; of more the event says how many."""

CHANGES: Final = {
    ApiKey.CREATE_TOPICS: CREATE,
    ApiKey.DELETE_TOPICS: DELETE,
    ApiKey.DELETE_RECORDS: DELETE,
    ApiKey.CREATE_PARTITIONS: UPDATE,
    ApiKey.ALTER_CONFIGS: UPDATE,
    ApiKey.INCREMENTAL_ALTER_CONFIGS: UPDATE,
    ApiKey.CREATE_ACLS: CREATE,
    ApiKey.DELETE_ACLS: DELETE,
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: UPDATE,
    ApiKey.ALTER_CLIENT_QUOTAS: UPDATE,
    ApiKey.CREATE_DELEGATION_TOKEN: CREATE,
    ApiKey.RENEW_DELEGATION_TOKEN: UPDATE,
    ApiKey.EXPIRE_DELEGATION_TOKEN: DELETE,
    ApiKey.DELETE_GROUPS: DELETE,
    ApiKey.OFFSET_DELETE: DELETE,
    ApiKey.ALTER_SHARE_GROUP_OFFSETS: UPDATE,
    ApiKey.DELETE_SHARE_GROUP_OFFSETS: DELETE,
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: UPDATE,
    ApiKey.ALTER_REPLICA_LOG_DIRS: UPDATE,
    ApiKey.ELECT_LEADERS: UPDATE,
    ApiKey.UNREGISTER_BROKER: DELETE,
    ApiKey.UPDATE_FEATURES: UPDATE,
}
"""The APIs by which clients change what is no record and no committed offset, and what each does."""

_ACTIVITIES: Final = {CREATE: "Create", READ: "Read", UPDATE: "Update", DELETE: "Delete"}
_OF_OPERATION: Final = {
    Operation.READ: READ,
    Operation.DESCRIBE: READ,
    Operation.DESCRIBE_CONFIGS: READ,
    Operation.DESCRIBE_TOKENS: READ,
    Operation.WRITE: UPDATE,
    Operation.ALTER: UPDATE,
    Operation.ALTER_CONFIGS: UPDATE,
    Operation.CREATE: CREATE,
    Operation.CREATE_TOKENS: CREATE,
    Operation.DELETE: DELETE,
}


@dataclass(frozen=True, slots=True)
class Source:
    """The broker that reports."""

    broker_id: int
    cluster_id: str


class Caller(NamedTuple):
    """Who is at the other end, and on which listener it came; for a failed login, who it said it was."""

    principal: str
    host: str
    listener: str
    port: int = 0
    mechanism: str = ""
    """The SASL mechanism; empty without SASL."""
    token_id: str = ""


class Call(NamedTuple):
    """One request."""

    caller: Caller
    key: ApiKey
    version: int
    correlation_id: int
    client_id: str | None = None


class Judgement(NamedTuple):
    """One question of rights and its answer."""

    operation: Operation
    kind: ResourceKind
    name: str
    """Empty: several resources of this kind."""
    allowed: bool


@dataclass(frozen=True, slots=True)
class Resource:
    """What a request is about."""

    kind: str
    name: str = ""
    settings: tuple[str, ...] = ()
    """The names of those that change; never what they change to."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """How often the same thing happened in a span of time that one event tells of."""

    count: int
    start_ms: int
    end_ms: int


def authentication(
    source: Source,
    caller: Caller,
    time_ms: int,
    *,
    refusal: str | None = None,
    again: bool = False,
    repeated: Repeated | None = None,
) -> Event:
    """A login that succeeded, or for the reason `refusal` did not; `again` on a connection that was logged in."""
    event = _event(source, AUTHENTICATION, LOGON, INFORMATIONAL if refusal is None else MEDIUM, time_ms, repeated)
    done = "logged in" if refusal is None else "could not log in"
    message = f"{printable(caller.principal)} {done}{' again' if again else ''} from {caller.host}"
    event |= _outcome(refusal is None, printable(refusal or ""))
    event |= {
        "activity_name": "Logon",
        "class_name": "Authentication",
        "category_name": "Identity & Access Management",
        "message": message if refusal is None else f"{message}: {printable(refusal)}",
        "user": _user(caller),
        "actor": {"user": _user(caller)},
        "is_remote": True,
        "is_new_logon": not again,
        "logon_type_id": 3,
        "logon_type": "Network",
        "service": {"name": PRODUCT, "uid": source.cluster_id},
        **_protocol(caller.mechanism),
        **_endpoints(source, caller),
    }
    return event


def api_activity(
    source: Source,
    call: Call,
    operations: Sequence[Operation],
    resources: Sequence[Resource],
    time_ms: int,
    *,
    allowed: bool,
    rules: Sequence[str] = (),
    errors: Sequence[ErrorCode] | None = (),
    repeated: Repeated | None = None,
) -> Event:
    """What was asked for and allowed or denied, and by which `rules`.

    `errors` are the codes of the answer, each once; None where there was none, and it is not known what was done.
    """
    activity = CHANGES.get(call.key) or (_OF_OPERATION.get(operations[0], OTHER) if operations else OTHER)
    event = _event(source, API_ACTIVITY, activity, INFORMATIONAL if allowed else MEDIUM, time_ms, repeated)
    api = _api_name(call.key)
    what = ", ".join(each.name for each in operations)
    actor: Event = {"user": _user(call.caller)}
    rules = [printable(rule) for rule in rules]
    if rules:
        decision = "allowed" if allowed else "denied"
        actor["authorizations"] = [{"decision": decision, "policy": {"name": rule, "type": "ACL"}} for rule in rules]
    failed = [code for code in errors or () if code]
    detail = ", ".join(code.name for code in failed) if allowed else "; ".join(rules)
    event |= _outcome(allowed and not failed, detail)
    if allowed and errors is None:
        event |= {"status_id": UNKNOWN, "status": "Unknown", "status_detail": "the client left before the answer"}
    elif allowed and failed and ErrorCode.NONE in (errors or ()):
        event |= {"status_id": OTHER, "status": "Partial"}
    event |= {
        "activity_name": _ACTIVITIES.get(activity, what or api),
        "class_name": "API Activity",
        "category_name": "Application Activity",
        "action_id": 1 if allowed else 2,
        "action": "Allowed" if allowed else "Denied",
        "disposition_id": 1 if allowed else 2,
        "disposition": "Allowed" if allowed else "Blocked",
        "message": _message(call, what, resources, allowed=allowed),
        "actor": actor,
        "api": {
            "operation": api,
            "version": str(call.version),
            "service": {"name": PRODUCT, "uid": source.cluster_id},
            "request": {"uid": str(call.correlation_id)},
        },
        "resources": [_resource(each) for each in resources[:MAX_RESOURCES]],
        "unmapped": {"operations": [each.name for each in operations], "client_id": printable(call.client_id or "")},
        **_endpoints(source, call.caller),
    }
    event["metadata"]["profiles"] = ["security_control"]
    if len(resources) > MAX_RESOURCES:
        event["unmapped"]["resource_count"] = len(resources)
    return event


def lost(source: Source, count: int, time_ms: int) -> Event:
    """So many events are missing before this one."""
    event = _event(source, BASE_EVENT, OTHER, MEDIUM, time_ms, None)
    event |= _outcome(False, "more events than could be written")
    event |= {
        "activity_name": "Lost",
        "class_name": "Base Event",
        "category_name": "Uncategorized",
        "message": f"{count} audit events of broker {source.broker_id} were lost",
        "unmapped": {"lost_events": count},
    }
    return event


def printable(text: str) -> str:
    """Text from outside, for one line: nothing that a terminal or a log would act upon, and not too long."""
    cut = text[:MAX_TEXT]
    return cut if cut.isprintable() else "".join(char if char.isprintable() else "?" for char in cut)


def _event(
    source: Source, class_uid: int, activity_id: int, severity_id: int, time_ms: int, repeated: Repeated | None
) -> Event:
    event: Event = {
        "time": time_ms if repeated is None else repeated.start_ms,
        "class_uid": class_uid,
        "category_uid": class_uid // 1000,
        "activity_id": activity_id,
        "type_uid": class_uid * 100 + activity_id,
        "severity_id": severity_id,
        "severity": {INFORMATIONAL: "Informational", LOW: "Low", MEDIUM: "Medium"}[severity_id],
        "metadata": {
            "version": SCHEMA_VERSION,
            "product": {"name": PRODUCT, "vendor_name": PRODUCT, "version": millrace.__version__},
            "log_name": "audit",
            "log_provider": f"broker-{source.broker_id}",
            "tenant_uid": source.cluster_id,
        },
    }
    if repeated is not None:
        event |= {
            "count": repeated.count,
            "start_time": repeated.start_ms,
            "end_time": repeated.end_ms,
            "duration": repeated.end_ms - repeated.start_ms,
        }
    return event


def _outcome(succeeded: bool, detail: str) -> Event:
    outcome: Event = (
        {"status_id": SUCCESS, "status": "Success"} if succeeded else {"status_id": FAILURE, "status": "Failure"}
    )
    if detail:
        outcome["status_detail"] = detail
    return outcome


def _user(caller: Caller) -> Event:
    kind, colon, name = caller.principal.partition(":")
    user: Event = {"name": printable(name if colon else kind), "type_id": 1, "type": "User"}
    if colon and kind != "User":
        user |= {"type_id": OTHER, "type": printable(kind)}
    if caller.token_id:
        user["credential_uid"] = printable(caller.token_id)
    return user


def _protocol(mechanism: str) -> Event:
    if mechanism == "OAUTHBEARER":
        return {"auth_protocol_id": 6, "auth_protocol": "OAUTH 2.0"}
    return {"auth_protocol_id": OTHER, "auth_protocol": f"SASL {printable(mechanism)}" if mechanism else "TLS"}


def _endpoints(source: Source, caller: Caller) -> Event:
    from_where: Event = {"ip": caller.host}
    if caller.port:
        from_where["port"] = caller.port
    return {
        "src_endpoint": from_where,
        "dst_endpoint": {"name": f"broker-{source.broker_id}", "svc_name": caller.listener},
    }


def _resource(resource: Resource) -> Event:
    event: Event = {"type": resource.kind}
    if resource.name:
        event["name"] = printable(resource.name)
    if resource.settings:
        event["data"] = {"settings": [printable(each) for each in resource.settings[:MAX_RESOURCES]]}
    return event


def _message(call: Call, what: str, resources: Sequence[Resource], *, allowed: bool) -> str:
    who, api = printable(call.caller.principal), _api_name(call.key)
    named = ", ".join(_named(each) for each in resources[:3]) + (", ..." if len(resources) > 3 else "")
    if not allowed:
        return f"{who} may not {what} {named} ({api})"
    return f"{who} asked for {api}" + (f" of {named}" if named else "")


def _named(resource: Resource) -> str:
    kind = resource.kind.lower().replace("_", " ")
    if resource.kind == ResourceKind.CLUSTER.name:
        return "the cluster"
    return f"{kind} {printable(resource.name)}" if resource.name else f"several of kind {kind}"


def _api_name(key: ApiKey) -> str:
    return "".join(word.capitalize() for word in key.name.split("_"))
