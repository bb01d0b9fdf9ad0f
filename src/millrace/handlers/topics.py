"""CreateTopics, DeleteTopics and CreatePartitions: the wire's side of the rules in `cluster.planning`."""

from __future__ import annotations

from collections.abc import Mapping

from millrace.cluster.planning import MorePartitions, NewTopic, TopicOutcome, TopicRef
from millrace.config import describe_topic
from millrace.errors import ApiError, ErrorCode
from millrace.handlers.context import RequestContext
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


@api(ApiKey.CREATE_TOPICS, CreateTopicsRequest, "2-7")
async def create_topics(context: RequestContext, request: CreateTopicsRequest) -> CreateTopicsResponse:
    """Create topics, each with its own outcome; `validate_only` says what would happen and changes nothing.

    The answer comes when a topic is durable and its partitions can be written, so `timeout_ms` is not needed. -1 for
    partitions or replicas means the broker's default; replicas may be named one by one instead. A topic named twice
    fails with INVALID_REQUEST; a name that differs from another only in '.' and '_' fails with
    INVALID_TOPIC_EXCEPTION. One request creates at most 10,000 partitions (POLICY_VIOLATION).

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
    try:
        outcomes = await context.broker.controller.create_topics(wanted, validate_only=request.validate_only)
    except ApiError as error:
        outcomes = [TopicOutcome(topic.name, error) for topic in wanted]
    return CreateTopicsResponse(
        topics=[_created(context, outcome, validated=request.validate_only) for outcome in outcomes]
    )


def _created(
    context: RequestContext, outcome: TopicOutcome, *, validated: bool
) -> CreateTopicsResponse.CreatableTopicResult:
    name = outcome.name or ""
    if outcome.error is not None:
        return CreateTopicsResponse.CreatableTopicResult(
            name=name, error_code=outcome.error.code, error_message=outcome.error.message, configs=[]
        )
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


@api(ApiKey.DELETE_TOPICS, DeleteTopicsRequest, "1-6")
async def delete_topics(context: RequestContext, request: DeleteTopicsRequest) -> DeleteTopicsResponse:
    """Delete topics with their data and settings, each with its own outcome.

    A topic referred to more than once, by name, by id or by both, fails with INVALID_REQUEST and stays. The answer
    comes when the deletion is durable and the partitions are gone from memory; files go in the background. Where
    `delete.topic.enable` is false every topic fails.

    Versions: v6 takes topic ids. A disabled deletion is INVALID_REQUEST before v3, then TOPIC_DELETION_DISABLED.

    Not done: authorization, the controller mutation quota (KIP-599).
    """
    if context.version >= 6:
        wanted = [TopicRef(topic.name, topic.topic_id) for topic in request.topics]
    else:
        wanted = [TopicRef(name) for name in request.topic_names]
    if not context.broker.config.get_bool("delete.topic.enable"):
        code = ErrorCode.TOPIC_DELETION_DISABLED if context.version >= 3 else ErrorCode.INVALID_REQUEST
        return _deleted(_failed(wanted, ApiError(code, "delete.topic.enable is false")))
    try:
        return _deleted(await context.broker.controller.delete_topics(wanted))
    except ApiError as error:
        return _deleted(_failed(wanted, error))


def _failed(wanted: list[TopicRef], error: ApiError) -> list[TopicOutcome]:
    return [TopicOutcome(ref.name, error, ref.topic_id) for ref in wanted]


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


@api(ApiKey.CREATE_PARTITIONS, CreatePartitionsRequest, "0-3")
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
    try:
        outcomes = await context.broker.controller.create_partitions(wanted, validate_only=request.validate_only)
    except ApiError as error:
        outcomes = [TopicOutcome(topic.name, error) for topic in wanted]
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
