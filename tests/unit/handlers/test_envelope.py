"""Envelopes: what is put in, what is taken out, and what is not taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from millrace.errors import ErrorCode
from millrace.handlers import registry
from millrace.handlers.context import RequestContext
from millrace.handlers.envelope import envelope, sealed
from millrace.metadata.deltas import AclsChanged
from millrace.security.acls import Acl, Operation, PatternKind, Permission, ResourceKind
from millrace.security.authorizer import Authorizer
from millrace.security.sessions import Session
from millrace.wire.frame import RequestHeader, decode_response, encode_request
from millrace.wire.keys import ApiKey
from millrace.wire.messages.brokers import EnvelopeRequest, EnvelopeResponse
from millrace.wire.messages.cluster import MetadataRequest
from millrace.wire.messages.topics import CreateTopicsRequest, CreateTopicsResponse
from support.handling import Handling, deciding
from support.metadata import cluster_of

ALICE = Session("User:alice", "SCRAM-SHA-256")
HOST = "10.0.0.7"
CREATION = CreateTopicsRequest(
    topics=[CreateTopicsRequest.CreatableTopic(name="t", num_partitions=1, replication_factor=1)]
)


def from_client(session: Session = ALICE, host: str = HOST, version: int = 7) -> RequestContext:
    header = RequestHeader(ApiKey.CREATE_TOPICS, version, 42, "app")
    return RequestContext(None, header, version, host, "OUTSIDE", session=session)  # type: ignore[arg-type]


def controller(*acls: Acl) -> Handling:
    on = deciding(cluster_of(1).apply((AclsChanged(added=acls),)))
    on.services.authorizer = Authorizer(enabled=True, acls=lambda: on.controller.image.acls)
    return on


def may_create(principal: str = "User:alice", host: str = "*") -> Acl:
    return Acl(ResourceKind.TOPIC, "t", PatternKind.LITERAL, principal, host, Operation.CREATE, Permission.ALLOW)


async def asked(on: Handling, message: EnvelopeRequest) -> EnvelopeResponse:
    answer = await on.call(envelope, message, 0)
    assert isinstance(answer, EnvelopeResponse)
    return answer


async def created(on: Handling, message: EnvelopeRequest, version: int = 7) -> int:
    answer = await asked(on, message)
    assert answer.error_code == ErrorCode.NONE
    assert answer.response_data is not None
    correlation_id, response = decode_response(CreateTopicsResponse, version, answer.response_data)
    assert correlation_id == 42
    return response.topics[0].error_code


@pytest.mark.parametrize("host", [HOST, "2001:db8::7", "fe80::1"])
async def test_the_controller_judges_by_principal_and_host(host: str) -> None:
    message = sealed(from_client(host=host), CREATION)
    assert await created(controller(may_create(host=host)), message) == ErrorCode.NONE
    for elsewhere in (may_create("User:bob"), may_create(host="10.0.0.8")):
        on = controller(elsewhere)
        assert await created(on, message) == ErrorCode.TOPIC_AUTHORIZATION_FAILED
        assert "t" not in on.controller.image.topics


async def test_a_socket_of_this_machine_has_no_address() -> None:
    message = sealed(from_client(host="local"), CREATION)
    assert message.client_host_address == b""
    assert await created(controller(may_create(host="local")), message) == ErrorCode.NONE


async def test_the_version_of_the_client_is_kept() -> None:
    for version in (2, 5):
        message = sealed(from_client(version=version), CREATION)
        assert await created(controller(may_create()), message, version) == ErrorCode.NONE


async def test_how_somebody_came_in_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RequestContext] = []

    async def look(context: RequestContext, _request: Any) -> CreateTopicsResponse:
        seen.append(context)
        context.is_judged = True
        return CreateTopicsResponse()

    served = registry.load()[ApiKey.CREATE_TOPICS]
    monkeypatch.setattr(registry, "find", lambda _: _with_handler(served, look))
    session = Session("User:CN=x:y,O=z", "SCRAM-SHA-512", token_id="abc")
    await asked(controller(), sealed(from_client(session), CREATION))
    (context,) = seen
    assert context.session == session
    assert context.is_forwarded
    assert context.peer is None
    assert (context.client_host, context.header.client_id, context.needs) == (HOST, "app", served.needs)

    kafkas = EnvelopeRequest(
        request_data=sealed(from_client(), CREATION).request_data,
        request_principal=b"\0\0\x05User\x04bob\1\0",
        client_host_address=bytes((10, 0, 0, 7)),
    )
    await asked(controller(), kafkas)
    assert seen[1].session.principal == "User:bob"
    assert seen[1].session.token_id, "a token stays one, though Kafka does not say which"


def _with_handler(served: registry.Api, handler: Any) -> registry.Api:

    return replace(served, handler=handler)


def frame(request: Any, version: int) -> bytes:
    return encode_request(RequestHeader(request.api_key, version, 1, "x"), request)[4:]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"request_data": frame(MetadataRequest(topics=None), 12)}, ErrorCode.INVALID_REQUEST),
        ({"request_data": frame(EnvelopeRequest(), 0)}, ErrorCode.INVALID_REQUEST),
        ({"request_data": b"\x7f\xff\0\0\0\0\0\1\xff\xff"}, ErrorCode.INVALID_REQUEST),
        ({"request_data": b"\0\x13\0\x63\0\0\0\1\xff\xff\0"}, ErrorCode.UNSUPPORTED_VERSION),
        ({"request_data": frame(CREATION, 7)[:-3]}, ErrorCode.UNSUPPORTED_VERSION),
        ({"request_data": b""}, ErrorCode.UNSUPPORTED_VERSION),
        ({"request_principal": None}, ErrorCode.PRINCIPAL_DESERIALIZATION_FAILURE),
        ({"request_principal": b""}, ErrorCode.PRINCIPAL_DESERIALIZATION_FAILURE),
        ({"request_principal": b"\0\1\x05User\x04bob\1\0"}, ErrorCode.PRINCIPAL_DESERIALIZATION_FAILURE),
        ({"request_principal": b"\0\0\x05User\x7fbob"}, ErrorCode.PRINCIPAL_DESERIALIZATION_FAILURE),
        ({"client_host_address": b"\1\2\3"}, ErrorCode.INVALID_REQUEST),
    ],
    ids=str,
)
async def test_what_is_no_request_of_a_client_is_not_looked_at(changes: dict[str, Any], code: ErrorCode) -> None:
    message = sealed(from_client(), CREATION)
    for name, value in changes.items():
        setattr(message, name, value)
    on = controller(may_create())
    answer = await asked(on, message)
    assert (answer.error_code, answer.response_data) == (code, None)
    assert "t" not in on.controller.image.topics
