"""Requests that only the controller can serve, asked of a broker that is not the controller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.clock import ManualClock
from millrace.cluster.image import ClusterImage
from millrace.cluster.planning import TopicOutcome
from millrace.config import BrokerConfig
from millrace.errors import ApiError, ErrorCode
from millrace.handlers import forwarding, registry
from millrace.handlers.brokers import unregister_broker
from millrace.handlers.configs import alter_configs, incremental_alter_configs
from millrace.handlers.context import RequestContext
from millrace.handlers.delegation_tokens import expire_delegation_token
from millrace.handlers.partitions import alter_partition_reassignments, elect_leaders
from millrace.handlers.topics import create_partitions, create_topics, delete_topics
from millrace.metadata.deltas import (
    BrokerUnregistered,
    ConfigChanged,
    PartitionChanged,
    PartitionsAdded,
    PartitionState,
    ResourceType,
    TokenChanged,
    TokenRemoved,
    TopicCreated,
    TopicDeleted,
)
from millrace.model import new_topic_id
from millrace.security.acls import Acl, AclTable, Operation, PatternKind, Permission, ResourceKind
from millrace.security.authorizer import NO_AUTHORIZER, Authorizer
from millrace.security.derivation import KeyDerivation
from millrace.security.metering import ClientQuotas
from millrace.security.tokens import DelegationToken, TokenPasswords
from millrace.wire.codec import decode
from millrace.wire.frame import RequestHeader, encode_response, read_request_header
from millrace.wire.keys import ApiKey
from millrace.wire.messages import request_class
from millrace.wire.messages.brokers import EnvelopeRequest, EnvelopeResponse
from millrace.wire.messages.cluster import UnregisterBrokerRequest, UnregisterBrokerResponse
from millrace.wire.messages.configs import (
    AlterConfigsRequest,
    AlterConfigsResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from millrace.wire.messages.delegation_tokens import ExpireDelegationTokenRequest, ExpireDelegationTokenResponse
from millrace.wire.messages.partitions import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    ElectLeadersRequest,
)
from millrace.wire.messages.topics import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
)
from support.handling import Handling
from support.metadata import cluster_of

Made = CreateTopicsResponse.CreatableTopicResult
"""The outcome of a topic's creation."""


class NoWaiting:
    """A clock on which every wait is over at once."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Follower:
    """What a broker that is not the controller has of one: an image, and a way to the real one."""

    image: ClusterImage = field(default_factory=lambda: cluster_of(1, 2, 3))
    broker_id: int = 2
    is_controller: bool = False
    answers: list[Any] = field(default_factory=list)
    """What the controller says, one after another: responses, or errors of the way there. The last one stays."""
    forwarded: list[tuple[Any, int, int]] = field(default_factory=list)
    envelopes: list[EnvelopeRequest] = field(default_factory=list)
    waited_for: list[Callable[[ClusterImage], bool]] = field(default_factory=list)

    async def forward(self, message: EnvelopeRequest, version: int, timeout_ms: int) -> EnvelopeResponse:
        assert version == 0
        header, pos = read_request_header(message.request_data)
        inner, _ = decode(request_class(header.api_key), header.api_version, memoryview(message.request_data), pos)
        self.forwarded.append((inner, header.api_version, timeout_ms))
        self.envelopes.append(message)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, ApiError):
            raise answer
        if isinstance(answer, EnvelopeResponse):
            return answer
        return EnvelopeResponse(response_data=encode_response(header.correlation_id, header.api_version, answer)[4:])

    async def wait_for_image(self, predicate: Callable[[ClusterImage], bool], timeout_s: float) -> None:
        self.waited_for.append(predicate)
        if not predicate(self.image):
            raise ApiError(ErrorCode.REQUEST_TIMED_OUT)


def following(*answers: Any, settings: dict[str, str] | None = None) -> tuple[Follower, Handling]:
    controller = Follower(answers=list(answers))
    services: Any = SimpleNamespace(
        config=BrokerConfig(settings or {}),
        clock=NoWaiting(),
        broker_id=2,
        controller=controller,
        image=controller.image,
        authorizer=NO_AUTHORIZER,
        quotas=ClientQuotas(),
    )
    return controller, Handling(controller, services)  # type: ignore[arg-type]


def created(*names: str, code: ErrorCode = ErrorCode.NONE) -> CreateTopicsResponse:
    return CreateTopicsResponse(topics=[Made(name=name, error_code=code, configs=[]) for name in names])


def creation(*names: str, timeout_ms: int = 5000) -> CreateTopicsRequest:
    topics = [CreateTopicsRequest.CreatableTopic(name=name, num_partitions=1, replication_factor=1) for name in names]
    return CreateTopicsRequest(topics=topics, timeout_ms=timeout_ms)


async def test_the_very_request_goes_to_the_controller_and_its_answer_comes_back() -> None:
    controller, on = following(created("a"))
    request = creation("a")
    response = await on.call(create_topics, request, 5)
    assert response == created("a")
    assert controller.forwarded == [(request, 5, 5000)]


async def test_a_controller_that_has_lost_its_place_is_asked_again_until_it_is_found() -> None:
    lost = created("a", code=ErrorCode.NOT_CONTROLLER)
    unknown = ApiError(ErrorCode.NOT_CONTROLLER, "nobody is controller")
    controller, on = following(lost, unknown, created("a"))
    assert await on.call(create_topics, creation("a"), 7) == created("a")
    assert [left_ms for _, _, left_ms in controller.forwarded] == [5000, 4950, 4900]


async def test_a_request_that_finds_no_controller_in_time_gets_a_retriable_error_in_every_item() -> None:
    _, on = following(ApiError(ErrorCode.NOT_CONTROLLER, "nobody is controller"))
    response = await on.call(create_topics, creation("a", "b"), 7)
    assert [(topic.name, topic.error_code) for topic in response.topics] == [
        ("a", ErrorCode.NOT_CONTROLLER),
        ("b", ErrorCode.NOT_CONTROLLER),
    ]


@pytest.mark.parametrize(
    ("handler", "request_", "version"),
    [
        (delete_topics, DeleteTopicsRequest(topic_names=["a", "b"], timeout_ms=10), 5),
        (
            delete_topics,
            DeleteTopicsRequest(
                topics=[DeleteTopicsRequest.DeleteTopicState(name=None, topic_id=new_topic_id())], timeout_ms=10
            ),
            6,
        ),
        (
            create_partitions,
            CreatePartitionsRequest(
                topics=[CreatePartitionsRequest.CreatePartitionsTopic(name="a", count=2, assignments=None)],
                timeout_ms=10,
            ),
            3,
        ),
        (
            alter_configs,
            AlterConfigsRequest(
                resources=[AlterConfigsRequest.AlterConfigsResource(resource_type=2, resource_name="a")]
            ),
            2,
        ),
        (
            incremental_alter_configs,
            IncrementalAlterConfigsRequest(
                resources=[IncrementalAlterConfigsRequest.AlterConfigsResource(resource_type=4, resource_name="1")]
            ),
            1,
        ),
        (elect_leaders, ElectLeadersRequest(topic_partitions=None, timeout_ms=10), 2),
        (
            alter_partition_reassignments,
            AlterPartitionReassignmentsRequest(
                topics=[
                    AlterPartitionReassignmentsRequest.ReassignableTopic(
                        name="a",
                        partitions=[AlterPartitionReassignmentsRequest.ReassignablePartition(partition_index=1)],
                    )
                ],
                timeout_ms=10,
            ),
            1,
        ),
        (unregister_broker, UnregisterBrokerRequest(broker_id=3), 0),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_every_change_is_refused_in_the_same_way(handler: Any, request_: Any, version: int) -> None:
    _, on = following(ApiError(ErrorCode.NOT_CONTROLLER, "nobody is controller"))
    codes = set(forwarding.error_codes(await on.call(handler, request_, version)))
    assert codes == {ErrorCode.NOT_CONTROLLER}


async def test_what_may_have_happened_is_not_asked_for_twice() -> None:
    controller, on = following(ApiError(ErrorCode.NETWORK_EXCEPTION, "it hung up"), created("a"))
    response = await on.call(create_topics, creation("a"), 7)
    assert response.topics[0].error_code == ErrorCode.REQUEST_TIMED_OUT
    assert len(controller.forwarded) == 1


async def test_a_request_with_no_time_is_tried_once_with_a_little() -> None:
    controller, on = following(created("a", code=ErrorCode.NOT_CONTROLLER))
    response = await on.call(create_topics, creation("a", timeout_ms=0), 7)
    assert response.topics[0].error_code == ErrorCode.NOT_CONTROLLER
    assert [left_ms for _, _, left_ms in controller.forwarded] == [forwarding.MIN_FORWARD_MS]


async def test_what_a_broker_passed_on_is_not_passed_on_again() -> None:
    controller, on = following(created("a"))
    response = await on.call(create_topics, creation("a"), 7, client_id="broker-3")
    assert response.topics[0].error_code == ErrorCode.NOT_CONTROLLER
    assert controller.forwarded == []
    # A name alone makes nobody a broker of this cluster.
    for client_id in ("broker-9", "broker-", "broker-x"):
        assert await on.call(create_topics, creation("a"), 7, client_id=client_id) == created("a")


async def test_brokers_have_a_listener_of_their_own() -> None:
    listeners = {
        "listeners": "PLAINTEXT://:9092,INSIDE://:9093",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,INSIDE:PLAINTEXT",
        "inter.broker.listener.name": "INSIDE",
    }
    _, on = following(created("a"), settings=listeners)
    assert await on.call(create_topics, creation("a"), 7, client_id="broker-3") == created("a")
    response = await on.call(create_topics, creation("a"), 7, client_id="broker-3", listener="INSIDE")
    assert response.topics[0].error_code == ErrorCode.NOT_CONTROLLER


async def test_the_broker_that_becomes_controller_meanwhile_does_it_itself() -> None:
    controller, on = following(ApiError(ErrorCode.NOT_CONTROLLER))

    async def forward(*_: Any) -> None:
        controller.is_controller = True
        raise ApiError(ErrorCode.NOT_CONTROLLER)

    async def create(*_: Any, **__: Any) -> list[TopicOutcome]:
        return [TopicOutcome("a", ApiError(ErrorCode.INVALID_CONFIG))]

    controller.forward = forward  # type: ignore[method-assign,assignment]
    controller.create_topics = create  # type: ignore[attr-defined]
    response = await on.call(create_topics, creation("a"), 7)
    assert response.topics[0].error_code == ErrorCode.INVALID_CONFIG


async def test_what_came_in_an_envelope_goes_no_further() -> None:
    controller, on = following(created("a"))
    inside = RequestContext(
        on.services,
        RequestHeader(ApiKey.CREATE_TOPICS, 7, 1, "app"),
        7,
        "10.0.0.7",
        "PLAINTEXT",
        needs=registry.load()[ApiKey.CREATE_TOPICS].needs,
        is_forwarded=True,
    )
    response = await create_topics(inside, creation("a"))
    assert response.topics[0].error_code == ErrorCode.NOT_CONTROLLER
    assert controller.forwarded == []


async def test_an_envelope_that_was_not_looked_at_is_an_error_in_every_item() -> None:
    _, on = following(EnvelopeResponse(error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED))
    response = await on.call(create_topics, creation("a", "b"), 7)
    assert {topic.error_code for topic in response.topics} == {ErrorCode.CLUSTER_AUTHORIZATION_FAILED}


def ruled(on: Handling, *acls: Acl) -> None:
    on.services.authorizer = Authorizer(enabled=True, acls=lambda: table)
    table = AclTable(acls)


def allowed(operation: Operation, kind: ResourceKind, name: str) -> Acl:
    return Acl(kind, name, PatternKind.LITERAL, "User:*", "*", operation, Permission.ALLOW)


async def test_nothing_is_passed_on_that_this_broker_refuses() -> None:
    controller, on = following(created("b"))
    ruled(on, allowed(Operation.CREATE, ResourceKind.TOPIC, "b"))
    response = await on.call(create_topics, creation("a", "b", "c"), 4)
    refused = ErrorCode.TOPIC_AUTHORIZATION_FAILED
    assert [(each.name, each.error_code) for each in response.topics] == [("a", refused), ("b", 0), ("c", refused)]
    assert [[topic.name for topic in request.topics] for request, _, _ in controller.forwarded] == [["b"]]
    await on.call(create_topics, creation("a"), 4)
    assert len(controller.forwarded) == 1


async def test_a_name_makes_a_broker_only_of_who_has_a_brokers_right() -> None:
    controller, on = following(created("a"))
    ruled(on, allowed(Operation.CREATE, ResourceKind.TOPIC, "a"))
    assert (await on.call(create_topics, creation("a"), 4, client_id="broker-3")).topics[0].error_code == 0
    assert len(controller.forwarded) == 1
    ruled(
        on,
        allowed(Operation.CREATE, ResourceKind.TOPIC, "a"),
        allowed(Operation.CLUSTER_ACTION, ResourceKind.CLUSTER, "*"),
    )
    response = await on.call(create_topics, creation("a"), 4, client_id="broker-3")
    assert response.topics[0].error_code == ErrorCode.NOT_CONTROLLER
    assert len(controller.forwarded) == 1


# --- waiting for the broker's own image -------------------------------------------------------------------------------

STATE = PartitionState((1,), (1,), 1)


def shown(controller: Follower, *changes: Any) -> tuple[bool, bool]:
    """Whether the one condition waited for held before and after `changes`."""
    (condition,) = controller.waited_for
    return condition(controller.image), condition(controller.image.apply(changes))


async def test_a_created_topic_is_waited_for() -> None:
    response = CreateTopicsResponse(topics=[*created("a").topics, *created("b", code=ErrorCode.INVALID_CONFIG).topics])
    controller, on = following(response)
    await on.call(create_topics, creation("a", "b"), 7)
    assert shown(controller, TopicCreated("a", new_topic_id(), (STATE,))) == (False, True)


async def test_nothing_is_waited_for_when_nothing_changes() -> None:
    controller, on = following(created("a"))
    request = creation("a")
    request.validate_only = True
    await on.call(create_topics, request, 7)
    assert controller.waited_for == []


@pytest.mark.parametrize("version", [5, 6])
async def test_a_deleted_topic_is_waited_for(version: int) -> None:
    topic_id = new_topic_id()
    result = DeleteTopicsResponse.DeletableTopicResult(name="a")
    request = DeleteTopicsRequest(topic_names=["a"])
    if version == 6:
        result.topic_id = topic_id
        request = DeleteTopicsRequest(topics=[DeleteTopicsRequest.DeleteTopicState(name="a")])
    controller, on = following(DeleteTopicsResponse(responses=[result]))
    controller.image = controller.image.apply((TopicCreated("a", topic_id, (STATE,)),))
    response = await on.call(delete_topics, request, version)
    assert response.responses == [result]
    assert shown(controller, TopicDeleted("a", topic_id)) == (False, True)


async def test_new_partitions_are_waited_for() -> None:
    topic_id = new_topic_id()
    result = CreatePartitionsResponse.CreatePartitionsTopicResult(name="a", error_message=None)
    controller, on = following(CreatePartitionsResponse(results=[result]))
    controller.image = controller.image.apply((TopicCreated("a", topic_id, (STATE,)),))
    request = CreatePartitionsRequest(topics=[CreatePartitionsRequest.CreatePartitionsTopic(name="a", count=2)])
    assert (await on.call(create_partitions, request, 3)).results == [result]
    assert shown(controller, PartitionsAdded(topic_id, (STATE,))) == (False, True)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_moves_are_waited_for(cancelled: bool) -> None:
    topic_id = new_topic_id()
    moving = PartitionState((2, 1), (1,), 1, adding=(2,), removing=(1,))
    before, after = (moving, STATE) if cancelled else (STATE, moving)
    part = AlterPartitionReassignmentsRequest.ReassignablePartition
    wanted = [
        part(partition_index=0, replicas=None if cancelled else [2]),
        part(partition_index=1, replicas=[9]),
    ]
    request = AlterPartitionReassignmentsRequest(
        topics=[AlterPartitionReassignmentsRequest.ReassignableTopic(name="a", partitions=wanted)]
    )
    answered = AlterPartitionReassignmentsResponse.ReassignablePartitionResponse
    results = [
        answered(partition_index=0, error_message=None),
        answered(partition_index=1, error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, error_message="no"),
    ]
    topics = [AlterPartitionReassignmentsResponse.ReassignableTopicResponse(name="a", partitions=results)]
    controller, on = following(AlterPartitionReassignmentsResponse(error_message=None, responses=topics))
    controller.image = controller.image.apply((TopicCreated("a", topic_id, (before,)),))
    assert (await on.call(alter_partition_reassignments, request, 1)).responses == topics
    assert shown(controller, PartitionChanged(topic_id, 0, after)) == (False, True)


async def test_settings_are_waited_for() -> None:
    request = AlterConfigsRequest(
        resources=[
            AlterConfigsRequest.AlterConfigsResource(
                resource_type=ResourceType.TOPIC,
                resource_name="a",
                configs=[AlterConfigsRequest.AlterableConfig(name="retention.ms", value="5")],
            )
        ]
    )
    result = AlterConfigsResponse.AlterConfigsResourceResponse(resource_type=ResourceType.TOPIC, resource_name="a")
    controller, on = following(AlterConfigsResponse(responses=[result]))
    await on.call(alter_configs, request, 2)
    assert shown(controller, ConfigChanged(ResourceType.TOPIC, "a", (("retention.ms", "5"),))) == (
        False,
        True,
    )


async def test_levels_of_loggers_stay_here_and_the_rest_is_passed_on() -> None:
    resources = [
        IncrementalAlterConfigsRequest.AlterConfigsResource(
            resource_type=kind,
            resource_name=name,
            configs=[IncrementalAlterConfigsRequest.AlterableConfig(name=key, config_operation=0, value=value)],
        )
        for kind, name, key, value in (
            (ResourceType.BROKER, "3", "log.retention.ms", "5"),
            (ResourceType.BROKER_LOGGER, "3", "root", "INFO"),
            (ResourceType.TOPIC, "a", "retention.ms", "5"),
        )
    ]
    result = IncrementalAlterConfigsResponse.AlterConfigsResourceResponse
    answered = [
        result(resource_type=ResourceType.BROKER, resource_name="3", error_message=None),
        result(
            resource_type=ResourceType.TOPIC, resource_name="a", error_code=ErrorCode.INVALID_CONFIG, error_message="no"
        ),
    ]
    controller, on = following(IncrementalAlterConfigsResponse(responses=list(answered)))
    response = await on.call(incremental_alter_configs, IncrementalAlterConfigsRequest(resources=resources), 1)
    ((sent, _, _),) = controller.forwarded
    assert sent.resources == [resources[0], resources[2]]
    assert [(each.resource_type, each.resource_name) for each in response.responses] == [
        (each.resource_type, each.resource_name) for each in resources
    ]
    # The level is refused here, because this is broker 2.
    assert response.responses[1].error_code == ErrorCode.INVALID_REQUEST
    assert response.responses[2] == answered[1]
    assert shown(controller, ConfigChanged(ResourceType.BROKER, "3", (("log.retention.ms", "5"),))) == (False, True)


@pytest.mark.parametrize("code", [ErrorCode.NONE, ErrorCode.INVALID_REQUEST])
async def test_a_forgotten_broker_is_waited_for_and_a_refusal_is_not(code: ErrorCode) -> None:
    controller, on = following(UnregisterBrokerResponse(error_code=code, error_message=None))
    await on.call(unregister_broker, UnregisterBrokerRequest(broker_id=3), 0)
    if code == ErrorCode.NONE:
        assert shown(controller, BrokerUnregistered(3)) == (False, True)
    else:
        assert controller.waited_for == []


@pytest.mark.parametrize("code", [ErrorCode.NONE, ErrorCode.DELEGATION_TOKEN_OWNER_MISMATCH])
async def test_the_end_of_a_token_is_waited_for(code: ErrorCode) -> None:
    """Whoever has ended one must not find that it still opens this broker."""
    controller, on = following(ExpireDelegationTokenResponse(error_code=code, expiry_timestamp_ms=1))
    token = DelegationToken("id", "User:alice", "User:alice", (), 0, 10, 10)
    controller.image = controller.image.apply((TokenChanged(token),))
    on.services.tokens = TokenPasswords("s3cret", lambda: controller.image.tokens, KeyDerivation(), ManualClock())
    request = ExpireDelegationTokenRequest(hmac=on.services.tokens.hmac("id"), expiry_time_period_ms=-1)
    answer = await on.call(expire_delegation_token, request, 2)
    assert answer.error_code == code
    if code == ErrorCode.NONE:
        assert shown(controller, TokenRemoved("id")) == (False, True)
    else:
        assert controller.waited_for == []


def test_the_time_a_request_may_take() -> None:
    broker = SimpleNamespace(config=BrokerConfig({"request.timeout.ms": "1234"}))
    context: Any = SimpleNamespace(broker=broker)
    assert forwarding.timeout_ms(context, creation("a", timeout_ms=77)) == 77
    assert forwarding.timeout_ms(context, creation("a", timeout_ms=-1)) == 0
    assert forwarding.timeout_ms(context, creation("a", timeout_ms=2**31 - 1)) == forwarding.MAX_TIMEOUT_MS
    assert forwarding.timeout_ms(context, AlterConfigsRequest()) == 1234, "it says nothing of that"
