"""CreateTopics, DeleteTopics and CreatePartitions: the wire's side of the rules in `cluster.planning`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from millrace.cluster.image import ClusterImage
from millrace.cluster.planning import MorePartitions, NewTopic, TopicOutcome, TopicRef
from millrace.config import describe_topic
from millrace.errors import ApiError, ErrorCode
from millrace.handlers.context import RequestContext
from millrace.handlers.forwarding import on_controller
from millrace.handlers.registry import api
from millrace.model import ZERO_UUID
from millrace.wire.keys import ApiKey
from millrace.wire.messages.topics import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
)


def _refuse_creation(_context: RequestContext, request: CreateTopicsRequest, error: ApiError) -> CreateTopicsResponse:
    return CreateTopicsResponse(topics=[_not_created(topic.name, error) for topic in request.topics])


def _not_created(name: str, error: ApiError) -> CreateTopicsResponse.CreatableTopicResult:
    return CreateTopicsResponse.CreatableTopicResult(
        name=name, error_code=error.code, error_message=error.message, configs=[]
    )


def _are_created(request: CreateTopicsRequest, response: CreateTopicsResponse) -> Callable[[ClusterImage], bool] | None:
    if request.validate_only:
        return None
    names = [topic.name for topic in response.topics if topic.error_code == ErrorCode.NONE]
    return lambda image: all(name in image.topics for name in names)


@api(ApiKey.CREATE_TOPICS, CreateTopicsRequest, "2-7")
@on_controller(_refuse_creation, settled=_are_created)
async def create_topics(context: RequestContext, request: CreateTopicsRequest) -> CreateTopicsResponse:
    """Create topics, each with its own outcome; `validate_only` says what would happen and changes nothing.

    The answer comes when a topic is durable and its partitions can be written; `timeout_ms` limits how long a broker
    that is not the controller tries to reach it. -1 for partitions or replicas means the broker's default; replicas
    may be named one by one instead. A topic named twice fails with INVALID_REQUEST; a name that differs from another
    only in '.' and '_' fails with INVALID_TOPIC_EXCEPTION. One request creates at most 10,000 partitions
    (POLICY_VIOLATION).

    Versions: v5 answers partitions, replicas and all settings of the new topic; v7 its id.

    Not done: authorization, create.topic.policy.class.name, the controller mutation quota (KIP-599).
    """
    wanted = [
        NewTopic(
            topic.name,
            topic.num_partitions,
            topic.replication_factor,
            tuple((assignment.partition_index, tuple(assignment.broker_ids)) for assignment in topic.assignments),
            tuple((config.name, config.value) for config in topic.configs),
        )
        for topic in request.topics
    ]
    outcomes = await context.broker.controller.create_topics(wanted, validate_only=request.validate_only)
    return CreateTopicsResponse(
        topics=[_created(context, outcome, validated=request.validate_only) for outcome in outcomes]
    )


def _created(
    context: RequestContext, outcome: TopicOutcome, *, validated: bool
) -> CreateTopicsResponse.CreatableTopicResult:
    name = outcome.name or ""
    if outcome.error is not None:
        return _not_created(name, outcome.error)
    return CreateTopicsResponse.CreatableTopicResult(
        name=name,
        topic_id=ZERO_UUID if validated else outcome.topic_id,
        error_message=None,
        num_partitions=outcome.num_partitions,
        replication_factor=outcome.replication_factor,
        configs=_settings(context, outcome.configs) if context.version >= 5 else [],
    )


def _settings(
    context: RequestContext, overrides: Mapping[str, str]
) -> list[CreateTopicsResponse.CreatableTopicConfigs]:
    return [
        CreateTopicsResponse.CreatableTopicConfigs(
            name=entry.name,
            value=entry.value,
            read_only=entry.read_only,
            config_source=entry.source,
            is_sensitive=entry.sensitive,
        )
        for entry in describe_topic(overrides, context.broker.config)
    ]


def _refuse_deletion(context: RequestContext, request: DeleteTopicsRequest, error: ApiError) -> DeleteTopicsResponse:
    return _deleted([TopicOutcome(ref.name, error, ref.topic_id) for ref in _refs(context, request)])


def _refs(context: RequestContext, request: DeleteTopicsRequest) -> list[TopicRef]:
    if context.version >= 6:
        return [TopicRef(topic.name, topic.topic_id) for topic in request.topics]
    return [TopicRef(name) for name in request.topic_names]


def _are_deleted(
    _request: DeleteTopicsRequest, response: DeleteTopicsResponse
) -> Callable[[ClusterImage], bool] | None:
    gone = [topic for topic in response.responses if topic.error_code == ErrorCode.NONE]
    ids = [topic.topic_id for topic in gone if topic.topic_id != ZERO_UUID]
    if len(ids) < len(gone):
        # A version without ids: a topic that is made again at once is not told from the one that went.
        names = [topic.name or "" for topic in gone]
        return lambda image: not any(name in image.topics for name in names)
    return lambda image: not any(topic_id in image.topics_by_id for topic_id in ids)


@api(ApiKey.DELETE_TOPICS, DeleteTopicsRequest, "1-6")
@on_controller(_refuse_deletion, settled=_are_deleted)
async def delete_topics(context: RequestContext, request: DeleteTopicsRequest) -> DeleteTopicsResponse:
    """Delete topics with their data and settings, each with its own outcome.

    A topic referred to more than once, by name, by id or by both, fails with INVALID_REQUEST and stays. The answer
    comes when the deletion is durable and the partitions are gone from memory; files go in the background. Where
    `delete.topic.enable` is false every topic fails.

    Versions: v6 takes topic ids. A disabled deletion is INVALID_REQUEST before v3, then TOPIC_DELETION_DISABLED.

    Not done: authorization, the controller mutation quota (KIP-599).
    """
    if not context.broker.config.get_bool("delete.topic.enable"):
        code = ErrorCode.TOPIC_DELETION_DISABLED if context.version >= 3 else ErrorCode.INVALID_REQUEST
        raise ApiError(code, "delete.topic.enable is false")
    return _deleted(await context.broker.controller.delete_topics(_refs(context, request)))


def _deleted(outcomes: list[TopicOutcome]) -> DeleteTopicsResponse:
    return DeleteTopicsResponse(
        responses=[
            DeleteTopicsResponse.DeletableTopicResult(
                name=outcome.name,
                topic_id=outcome.topic_id,
                error_code=ErrorCode.NONE if outcome.error is None else outcome.error.code,
                error_message=None if outcome.error is None else outcome.error.message,
            )
            for outcome in outcomes
        ]
    )


def _refuse_partitions(
    _context: RequestContext, request: CreatePartitionsRequest, error: ApiError
) -> CreatePartitionsResponse:
    return _more_partitions([TopicOutcome(topic.name, error) for topic in request.topics])


def _are_added(
    request: CreatePartitionsRequest, response: CreatePartitionsResponse
) -> Callable[[ClusterImage], bool] | None:
    if request.validate_only:
        return None
    done = {topic.name for topic in response.results if topic.error_code == ErrorCode.NONE}
    counts = {topic.name: topic.count for topic in request.topics if topic.name in done}

    def condition(image: ClusterImage) -> bool:
        found = ((image.topic(name), count) for name, count in counts.items())
        return all(topic is None or len(topic.partitions) >= count for topic, count in found)

    return condition


@api(ApiKey.CREATE_PARTITIONS, CreatePartitionsRequest, "0-3")
@on_controller(_refuse_partitions, settled=_are_added)
async def create_partitions(context: RequestContext, request: CreatePartitionsRequest) -> CreatePartitionsResponse:
    """Give topics more partitions, each with its own outcome; `validate_only` changes nothing.

    `count` is the new total; one that is not larger fails with INVALID_PARTITIONS. Replicas may be named for the new
    partitions, one list each. Existing records stay where they are, so keys may move to other partitions.

    Not done: authorization, the controller mutation quota (KIP-599, v3).
    """
    wanted = [
        MorePartitions(
            topic.name,
            topic.count,
            None
            if topic.assignments is None
            else tuple(tuple(assignment.broker_ids) for assignment in topic.assignments),
        )
        for topic in request.topics
    ]
    return _more_partitions(
        await context.broker.controller.create_partitions(wanted, validate_only=request.validate_only)
    )


def _more_partitions(outcomes: list[TopicOutcome]) -> CreatePartitionsResponse:
    return CreatePartitionsResponse(
        results=[
            CreatePartitionsResponse.CreatePartitionsTopicResult(
                name=outcome.name or "",
                error_code=ErrorCode.NONE if outcome.error is None else outcome.error.code,
                error_message=None if outcome.error is None else outcome.error.message,
            )
            for outcome in outcomes
        ]
    )
