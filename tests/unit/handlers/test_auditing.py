from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from millrace.clock import ManualClock
from millrace.errors import ApiError, ErrorCode
from millrace.handlers import auditing
from millrace.handlers.context import RequestContext, Services
from millrace.security import ocsf
from millrace.security.acls import Operation, ResourceKind
from millrace.security.audit import Allowed, Audit, Notes
from millrace.security.authorizer import NO_AUTHORIZER
from millrace.security.ocsf import Judgement, Resource
from millrace.security.sessions import Session
from millrace.wire.frame import RequestHeader
from millrace.wire.keys import ApiKey
from millrace.wire.messages import request_class
from millrace.wire.messages.acls import CreateAclsRequest, DeleteAclsRequest
from millrace.wire.messages.cluster import MetadataResponse
from millrace.wire.messages.configs import IncrementalAlterConfigsRequest
from millrace.wire.messages.delegation_tokens import RenewDelegationTokenRequest
from millrace.wire.messages.quotas import AlterClientQuotasRequest
from millrace.wire.messages.scram import AlterUserScramCredentialsRequest
from millrace.wire.messages.share_groups import ShareFetchResponse
from millrace.wire.messages.topics import CreateTopicsRequest, CreateTopicsResponse, DeleteTopicsRequest
from millrace.wire.messages.transactions import AddPartitionsToTxnResponse

SECRET = "hunter2"
_Topic = CreateTopicsRequest.CreatableTopic
_Result = CreateTopicsResponse.CreatableTopicResult


class Log:
    """An audit log that is told of requests."""

    def __init__(self, allowed: Allowed = Allowed.CHANGES) -> None:
        clock = ManualClock()
        self.audit = Audit(
            broker_id=1, cluster_id=lambda: "c", allowed=allowed, explain=NO_AUTHORIZER.explain, clock=clock
        )
        self.outbox = self.audit.outbox("a test")

    def tell(self, key: ApiKey, outcome: Any, *judgements: Judgement, **notes: Any) -> list[dict[str, Any]]:
        asked = RequestContext(
            cast("Services", SimpleNamespace(audit=self.audit)),
            RequestHeader(key, 3, 9, "app"),
            3,
            "10.0.0.1",
            "SASL_SSL",
            session=Session("User:alice", "PLAIN"),
            notes=Notes(wants_allowed=True, judgements=list(judgements), **notes),
        )
        auditing.tell(asked, key, outcome)
        assert asked.notes is None, "told once"
        return [json.loads(line.data) for line in self.outbox.take(100, 10**6)]


def _created(*codes: ErrorCode) -> CreateTopicsResponse:
    return CreateTopicsResponse(topics=[_Result(name=f"t{index}", error_code=code) for index, code in enumerate(codes)])


def _asked(operation: Operation, kind: ResourceKind, name: str, *, allowed: bool = False) -> Judgement:
    return Judgement(operation, kind, name, allowed)


CREATE = CreateTopicsRequest(topics=[_Topic(name="t0"), _Topic(name="t1")])


def test_a_change_is_told_with_what_it_is_about_and_what_became_of_it() -> None:
    (event,) = Log().tell(
        ApiKey.CREATE_TOPICS, _created(ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS), changing=CREATE
    )
    assert [each["name"] for each in event["resources"]] == ["t0", "t1"]
    assert (event["status"], event["status_detail"]) == ("Partial", "TOPIC_ALREADY_EXISTS")
    assert event["actor"]["user"]["name"] == "alice"


@pytest.mark.parametrize(
    ("outcome", "context"),
    [
        (_created(ErrorCode.TOPIC_AUTHORIZATION_FAILED), {}),
        (ApiError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED), {}),
        (_created(ErrorCode.NONE), {"passed_on": True}),
        (_created(ErrorCode.NONE), {"changing": CreateTopicsRequest(topics=[_Topic(name="t")], validate_only=True)}),
        (_created(ErrorCode.NONE), {"changing": None}),
    ],
    ids=["denied", "denied-as-a-whole", "told-elsewhere", "only-asked-whether", "not-wanted"],
)
def test_what_was_not_carried_out_here_is_no_change(outcome: Any, context: dict[str, Any]) -> None:
    assert Log().tell(ApiKey.CREATE_TOPICS, outcome, **{"changing": CREATE, **context}) == []


def test_a_handler_that_failed_may_have_changed_something() -> None:
    (event,) = Log().tell(ApiKey.CREATE_TOPICS, RuntimeError("a bug"), changing=CREATE)
    assert event["status_detail"] == "UNKNOWN_SERVER_ERROR"


def test_a_client_that_left_does_not_hide_what_it_asked_for() -> None:
    (event,) = Log().tell(ApiKey.CREATE_TOPICS, asyncio.CancelledError(), changing=CREATE)
    assert (event["status"], event["status_detail"]) == ("Unknown", "the client left before the answer")


def _metadata(notes: Notes) -> tuple[Log, RequestContext]:
    log = Log()
    asked = RequestContext(
        cast("Services", SimpleNamespace(audit=log.audit)),
        RequestHeader(ApiKey.METADATA, 12, 9, "app"),
        12,
        "10.0.0.1",
        "SASL_SSL",
        session=Session("User:alice", "PLAIN"),
        notes=notes,
    )
    return log, asked


def _lines(log: Log) -> list[dict[str, Any]]:
    return [json.loads(line.data) for line in log.outbox.take(100, 10**6)]


def test_topics_that_are_made_in_passing_are_told_of() -> None:
    log, asked = _metadata(Notes(wants_allowed=False, tells_changes=True))
    auditing.creates(asked, Operation.CREATE, ResourceKind.TOPIC, ["a", "b"])
    auditing.created(asked, ["a"])
    auditing.creates(asked, Operation.CREATE, ResourceKind.CLUSTER, ["c"])
    auditing.created(asked, ["c"])
    auditing.tell(asked, ApiKey.METADATA, MetadataResponse())
    (event,) = _lines(log)
    assert [each["name"] for each in event["resources"]] == ["a", "c"]
    assert (event["activity_name"], event["status"], event["api"]["operation"]) == ("Create", "Success", "Metadata")
    assert event["actor"]["user"]["name"] == "alice"


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (asyncio.CancelledError(), ("Unknown", "the client left before the answer")),
        (ErrorCode.REQUEST_TIMED_OUT, ("Failure", "REQUEST_TIMED_OUT")),
    ],
    ids=["gone", "failed"],
)
def test_what_may_have_been_made_is_told_of(outcome: Any, expected: tuple[str, str]) -> None:
    log, asked = _metadata(Notes(wants_allowed=False, tells_changes=True))
    auditing.creates(asked, Operation.CREATE, ResourceKind.TOPIC, ["a"])
    if isinstance(outcome, ErrorCode):
        auditing.created(asked, ["a"], outcome)
        outcome = MetadataResponse()
    auditing.tell(asked, ApiKey.METADATA, outcome)
    (event,) = _lines(log)
    assert (event["status"], event["status_detail"]) == expected


def test_nothing_is_told_of_what_was_not_made_or_is_not_wanted() -> None:
    for tells_changes, made in ((True, []), (False, ["a"])):
        log, asked = _metadata(Notes(wants_allowed=False, tells_changes=tells_changes))
        auditing.creates(asked, Operation.CREATE, ResourceKind.TOPIC, ["a"])
        auditing.created(asked, made)
        auditing.tell(asked, ApiKey.METADATA, MetadataResponse())
        assert _lines(log) == []


def test_a_denial_is_told_where_the_answer_has_its_code() -> None:
    cluster = _asked(Operation.CREATE, ResourceKind.CLUSTER, "kafka-cluster")
    topic = _asked(Operation.CREATE, ResourceKind.TOPIC, "t0")
    refused = _created(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    events = Log().tell(ApiKey.CREATE_TOPICS, refused, cluster, topic, changing=CREATE)
    assert [event["resources"] for event in events] == [[{"type": "TOPIC", "name": "t0"}]]
    assert Log().tell(ApiKey.CREATE_TOPICS, _created(ErrorCode.NONE), cluster) == [], "another right was enough"


def test_a_denial_is_told_under_whatever_name_the_answer_has_its_code() -> None:
    topic = _asked(Operation.WRITE, ResourceKind.TOPIC, "t0")
    partition = AddPartitionsToTxnResponse.AddPartitionsToTxnPartitionResult(
        partition_index=0, partition_error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED
    )
    refused = AddPartitionsToTxnResponse.AddPartitionsToTxnTopicResult(name="t0", results_by_partition=[partition])
    answer: Any = AddPartitionsToTxnResponse(results_by_topic_v3_and_below=[refused])
    (event,) = Log().tell(ApiKey.ADD_PARTITIONS_TO_TXN, answer, topic)
    assert (event["action"], event["resources"]) == ("Denied", [{"type": "TOPIC", "name": "t0"}])

    read = _asked(Operation.READ, ResourceKind.TOPIC, "t0")
    acknowledged = ShareFetchResponse.PartitionData(acknowledge_error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    answer = ShareFetchResponse(responses=[ShareFetchResponse.ShareFetchableTopicResponse(partitions=[acknowledged])])
    (event,) = Log().tell(ApiKey.SHARE_FETCH, answer, read)
    assert event["action"] == "Denied"


def test_settings_that_are_left_out_of_an_answer_are_no_denial() -> None:
    made = _created(ErrorCode.NONE)
    made.topics[0].topic_config_error_code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
    hidden = _asked(Operation.DESCRIBE_CONFIGS, ResourceKind.TOPIC, "t0")
    assert Log().tell(ApiKey.CREATE_TOPICS, made, hidden) == []


def test_a_denial_is_told_where_the_answer_cannot_be_read() -> None:
    denied = _asked(Operation.WRITE, ResourceKind.TOPIC, "t0")
    (event,) = Log().tell(ApiKey.PRODUCE, [("t0", [])], denied)
    assert event["action"] == "Denied"


def test_what_a_handler_raised_is_its_answer() -> None:
    denied = _asked(Operation.READ, ResourceKind.GROUP, "g")
    (event,) = Log().tell(ApiKey.HEARTBEAT, ApiError(ErrorCode.GROUP_AUTHORIZATION_FAILED), denied)
    assert event["resources"] == [{"type": "GROUP", "name": "g"}]


@pytest.mark.parametrize("key", ocsf.CHANGES)
def test_every_change_can_be_told_of(key: ApiKey) -> None:
    auditing.resources(key, request_class(key)())


def _settings() -> IncrementalAlterConfigsRequest:
    configs = [
        IncrementalAlterConfigsRequest.AlterableConfig(name="ssl.key.password", value=SECRET),
        IncrementalAlterConfigsRequest.AlterableConfig(name=SECRET, value="in the wrong place"),
    ]
    resource = IncrementalAlterConfigsRequest.AlterConfigsResource(resource_type=4, resource_name="1", configs=configs)
    return IncrementalAlterConfigsRequest(resources=[resource])


def _user() -> AlterUserScramCredentialsRequest:
    upsertion = AlterUserScramCredentialsRequest.ScramCredentialUpsertion(
        name="bob", mechanism=1, salt=SECRET.encode(), salted_password=SECRET.encode()
    )
    return AlterUserScramCredentialsRequest(upsertions=[upsertion])


def _rule() -> CreateAclsRequest:
    creation = CreateAclsRequest.AclCreation(
        resource_type=2, resource_name="pay", resource_pattern_type=4, principal="User:bob", host="*", operation=3,
        permission_type=3,
    )  # fmt: skip
    return CreateAclsRequest(creations=[creation])


def _filter() -> DeleteAclsRequest:
    wanted = DeleteAclsRequest.DeleteAclsFilter(
        resource_type_filter=2, resource_name_filter=None, pattern_type_filter=1, principal_filter="User:bob",
        host_filter=None, operation=99, permission_type=1,
    )  # fmt: skip
    return DeleteAclsRequest(filters=[wanted])


def _quota() -> AlterClientQuotasRequest:
    entity = [AlterClientQuotasRequest.EntityData(entity_type="user", entity_name=None)]
    ops = [AlterClientQuotasRequest.OpData(key="producer_byte_rate", value=5.0)]
    return AlterClientQuotasRequest(entries=[AlterClientQuotasRequest.EntryData(entity=entity, ops=ops)])


TOPIC_ID = UUID(int=7)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (_settings, [Resource("BROKER", "1", ("ssl.key.password", "(unknown)"))]),
        (_user, [Resource("USER", "bob")]),
        (lambda: RenewDelegationTokenRequest(hmac=SECRET.encode()), [Resource("DELEGATION_TOKEN")]),
        (_rule, [Resource("ACL", "ALLOW User:bob from *: READ on TOPIC pay (prefixed)")]),
        (_filter, [Resource("ACL", "ANY User:bob from ANY: 99 on TOPIC ANY (any)")]),
        (_quota, [Resource("QUOTA", "user=<default>", ("producer_byte_rate",))]),
        (
            lambda: DeleteTopicsRequest(
                topics=[
                    DeleteTopicsRequest.DeleteTopicState(name="a"),
                    DeleteTopicsRequest.DeleteTopicState(topic_id=TOPIC_ID),
                ]
            ),
            [Resource("TOPIC", "a"), Resource("TOPIC", str(TOPIC_ID))],
        ),
    ],
    ids=["settings", "user", "token", "rule", "filter", "quota", "topics"],
)
def test_what_a_request_names_and_no_value(make: Callable[[], Any], expected: list[Resource]) -> None:
    request = make()
    found = auditing.resources(ApiKey(type(request).api_key), request)
    assert found == expected
    assert SECRET not in repr(found)
