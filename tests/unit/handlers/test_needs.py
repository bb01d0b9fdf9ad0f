"""What an API declares that it needs: nothing else can be asked for, and nothing leaves that was not judged."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.errors import ApiError, ErrorCode
from millrace.handlers import needs, registry
from millrace.handlers.context import RequestContext, anything
from millrace.handlers.needs import NOTHING, Needs, cluster, judged
from millrace.handlers.registry import REFUSE, Api, api
from millrace.security.acls import OPERATIONS_OF, Acl, AclTable, Operation, PatternKind, Permission, ResourceKind
from millrace.security.authorizer import NO_AUTHORIZER, Authorizer
from millrace.wire.frame import RequestHeader, decode_response
from millrace.wire.keys import ApiKey
from millrace.wire.messages import DECLARATIONS, request_class, response_class
from millrace.wire.messages.groups import HeartbeatRequest, HeartbeatResponse
from millrace.wire.messages.quorum import DescribeQuorumRequest

APIS = registry.load()


def asking(declared: Needs, *acls: Acl, version: int = 4, key: ApiKey = ApiKey.HEARTBEAT) -> RequestContext:
    authorizer = Authorizer(enabled=True, acls=lambda: table)
    table = AclTable(acls)
    services: Any = SimpleNamespace(authorizer=authorizer)
    return RequestContext(services, RequestHeader(key, version, 7, "app"), version, "10.0.0.1", "L", needs=declared)


def allowed(operation: Operation, kind: ResourceKind, name: str = "*") -> Acl:
    return Acl(kind, name, PatternKind.LITERAL, "User:ANONYMOUS", "*", operation, Permission.ALLOW)


def test_an_api_that_declares_nothing_cannot_be_registered() -> None:
    with pytest.raises(TypeError, match="needs"):
        api(ApiKey.LEADER_AND_ISR, HeartbeatRequest, "0")  # type: ignore[call-arg]


@pytest.mark.parametrize("ask", ["may", "demand"])
def test_a_right_that_is_not_declared_cannot_be_asked_for(ask: str) -> None:
    context = asking(judged(needs.READ_GROUP), allowed(Operation.ALL, ResourceKind.GROUP))
    with pytest.raises(RuntimeError, match="DESCRIBE on GROUP"):
        getattr(context, ask)(*needs.DESCRIBE_GROUP, "g")
    for ask_for_all in (context.rights, context.may_any):
        with pytest.raises(RuntimeError, match="READ on TOPIC"):
            ask_for_all(*needs.READ_TOPIC)
    assert not context.is_judged
    getattr(context, ask)(*needs.READ_GROUP, "g")
    assert context.is_judged


def test_what_is_not_declared_cannot_be_asked_for_without_an_authorizer_either() -> None:
    context = asking(judged(needs.READ_GROUP))
    context.broker.authorizer = NO_AUTHORIZER
    with pytest.raises(RuntimeError):
        context.may(*needs.DESCRIBE_GROUP, "g")
    assert context.rights(*needs.READ_GROUP) is anything


def test_rights_tell_of_each_resource() -> None:
    context = asking(judged(needs.READ_TOPIC), allowed(Operation.READ, ResourceKind.TOPIC, "a"))
    assert list(filter(context.rights(*needs.READ_TOPIC), ["a", "b"])) == ["a"]
    assert context.may_any(*needs.READ_TOPIC)
    with pytest.raises(ApiError, match="User:ANONYMOUS may not READ topic 'b'") as refused:
        context.demand(*needs.READ_TOPIC, "b")
    assert refused.value.code is ErrorCode.TOPIC_AUTHORIZATION_FAILED


def test_an_answer_that_was_not_judged_does_not_leave() -> None:
    """Also where there was nothing to judge a handler has to ask for its rights: forgetting looks the same."""
    served = APIS[ApiKey.HEARTBEAT]
    context = asking(served.needs)
    with pytest.raises(RuntimeError, match="HEARTBEAT has answered without asking"):
        served.answered(context, HeartbeatResponse())
    context.rights(*needs.READ_GROUP)
    assert served.answered(context, HeartbeatResponse())


def test_who_may_not_ask_at_all_is_answered_before_the_handler() -> None:
    served = APIS[ApiKey.DESCRIBE_QUORUM]
    context = asking(served.needs, version=2, key=ApiKey.DESCRIBE_QUORUM)
    answer = served.refused(context, DescribeQuorumRequest())
    assert answer is not None
    correlation_id, response = decode_response(response_class(served.key), 2, b"".join(answer)[4:])
    assert (correlation_id, cast(Any, response).error_code) == (7, ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    context = asking(served.needs, allowed(Operation.DESCRIBE, ResourceKind.CLUSTER))
    assert served.refused(context, DescribeQuorumRequest()) is None


WHOLE = [api for api in APIS.values() if api.needs.whole is not None]


@pytest.mark.parametrize("served", WHOLE, ids=lambda each: each.key.name)
def test_every_refusal_has_a_place_in_every_version(served: Api) -> None:
    for version in range(served.min_version, served.max_version + 1):
        context = asking(served.needs, version=version, key=served.key)
        request = request_class(served.key)()
        answer = served.refused(context, request)
        assert answer is not None
        decode_response(response_class(served.key), version, b"".join(answer)[4:])


def test_what_runs_on_the_controller_can_be_passed_on() -> None:
    """A handler that judges first and has the rest done elsewhere has to say so itself."""
    by_request = {f"{declared.name}Request": key for key, declared in DECLARATIONS.items()}
    found = set()
    for name in registry.MODULES:
        module = importlib.import_module(f"millrace.handlers.{name}")
        for function in vars(module).values():
            if callable(function) and hasattr(function, REFUSE) and function.__module__ == module.__name__:
                key = by_request[function.__wrapped__.__annotations__["request"]]
                assert APIS[key].forwardable, f"{key.name}: @api(..., forwardable=True)"
                found.add(key)
    assert found == {key for key, each in APIS.items() if each.forwardable}
    assert ApiKey.CREATE_TOPICS in found


def test_declarations_make_sense() -> None:
    for served in APIS.values():
        for operation, kind in served.needs.judged:
            # DELETE on the cluster is asked for by Kafka, too, and allowed by ALL only.
            assert operation in OPERATIONS_OF[kind] or (operation, kind) == needs.DELETE_CLUSTER, served.key.name
        if served.internal:
            assert served.needs.whole is Operation.CLUSTER_ACTION, served.key.name


def test_needs_are_told_in_words() -> None:
    assert str(NOTHING) == "nothing"
    assert str(cluster(Operation.ALTER)) == "ALTER on CLUSTER"
    assert str(judged(needs.WRITE_TOPIC, needs.READ_GROUP)) == "READ on GROUP, WRITE on TOPIC"


def test_hashes_of_operations_and_kinds_are_those_of_numbers() -> None:
    """They are part of every question of the hot path."""
    assert hash(Operation.READ) == hash(3)
    assert hash(ResourceKind.TOPIC) == hash(2)
