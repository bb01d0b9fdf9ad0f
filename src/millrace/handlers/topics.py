"""CreateTopics, DeleteTopics and CreatePartitions: the wire's side of the rules in `cluster.planning`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from millrace.cluster.image import ClusterImage
from millrace.cluster.planning import MorePartitions, NewTopic, TopicOutcome, TopicRef
from millrace.config import describe_topic
from millrace.errors import ApiError, ErrorCode
from millrace.handlers.context import RequestContext, anything
from millrace.handlers.forwarding import done_for_allowed, on_controller
from millrace.handlers.needs import (
    ALTER_TOPIC,
    CREATE_CLUSTER,
    CREATE_TOPIC,
    DELETE_CLUSTER,
    DELETE_TOPIC,
    DESCRIBE_TOPIC,
    DESCRIBE_TOPIC_CONFIGS,
    judged,
)
from millrace.handlers.quotas import within_mutation_quota
from millrace.handlers.registry import api
from millrace.model import AUDIT_LOG_TOPIC, ZERO_UUID
from millrace.wire.keys import ApiKey
from millrace.wire.messages.topics import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
)

_Created = CreateTopicsResponse.CreatableTopicResult
_Deleted = DeleteTopicsResponse.DeletableTopicResult
_Enlarged = CreatePartitionsResponse.CreatePartitionsTopicResult

# From these versions on a client knows that its quota may refuse a topic; older ones are made to wait (KIP-599).
_CREATE_REFUSED_FROM: Final = 6
_DELETE_REFUSED_FROM: Final = 5
_ADD_REFUSED_FROM: Final = 3


def _refuse_creation(_context: RequestContext, request: CreateTopicsRequest, error: ApiError) -> CreateTopicsResponse:
    return CreateTopicsResponse(topics=[_not_created(topic.name, error) for topic in request.topics])


def _not_created(name: str, error: ApiError) -> _Created:
    return _Created(name=name, error_code=error.code, error_message=error.message, configs=[])


def _are_created(request: CreateTopicsRequest, response: CreateTopicsResponse) -> Callable[[ClusterImage], bool] | None:
    if request.validate_only:
        return None
    names = [topic.name for topic in response.topics if topic.error_code == ErrorCode.NONE]
    return lambda image: all(name in image.topics for name in names)


@api(
    ApiKey.CREATE_TOPICS,
    CreateTopicsRequest,
    "2-7",
    needs=judged(CREATE_CLUSTER, CREATE_TOPIC, DESCRIBE_TOPIC_CONFIGS),
    forwardable=True,
)
async def create_topics(context: RequestContext, request: CreateTopicsRequest) -> CreateTopicsResponse:
    """Create topics, each with its own outcome; `validate_only` says what would happen and changes nothing.

    The answer comes when a topic is durable and its partitions can be written; `timeout_ms` limits how long a broker
    that is not the controller tries to reach it. -1 for partitions or replicas means the broker's default; replicas
    may be named one by one instead. A topic named twice fails with INVALID_REQUEST; a name that differs from another
    only in '.' and '_' fails with INVALID_TOPIC_EXCEPTION. One request creates at most 10,000 partitions
    (POLICY_VIOLATION).

    Versions: v5 answers partitions, replicas and all settings of the new topic, or, to who may not describe these,
    TOPIC_AUTHORIZATION_FAILED in their place; v6 refuses what is beyond the client's controller_mutation_rate with
    THROTTLING_QUOTA_EXCEEDED, where it is made to wait before; v7 answers the topic's id.

    The audit log's topic is for those who may create on the cluster. Not done: create.topic.policy.class.name.
    """
    may_create_all = context.may(*CREATE_CLUSTER)
    may_create = anything if may_create_all else context.rights(*CREATE_TOPIC)

    def judge(topic: CreateTopicsRequest.CreatableTopic) -> ApiError | None:
        if topic.name == AUDIT_LOG_TOPIC and not may_create_all:
            return context.refusal(*CREATE_CLUSTER)
        return None if may_create(topic.name) else context.refusal(*CREATE_TOPIC, topic.name)

    response = CreateTopicsResponse()

    async def create(topics: list[CreateTopicsRequest.CreatableTopic]) -> list[_Created]:
        request.topics = topics
        made = await _create(context, request)
        response.throttle_time_ms = made.throttle_time_ms
        return made.topics

    response.topics = await done_for_allowed(
        request.topics,
        judge,
        lambda topic, refusal: _not_created(topic.name, refusal),
        create,
    )
    return response


@on_controller(_refuse_creation, shown_when=_are_created)
async def _create(context: RequestContext, request: CreateTopicsRequest) -> CreateTopicsResponse:
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
    create = partial(context.broker.controller.create_topics, validate_only=request.validate_only)
    default = context.broker.config.get_int("num.partitions")
    outcomes, throttle_ms = await within_mutation_quota(
        context,
        wanted,
        partitions=lambda topic: 0 if request.validate_only else _partitions_of(topic, default),
        refused=lambda topic, error: TopicOutcome(topic.name, error),
        change=create,
        strict=context.version >= _CREATE_REFUSED_FROM,
    )
    return CreateTopicsResponse(
        throttle_time_ms=throttle_ms,
        topics=[_created(context, outcome, validated=request.validate_only) for outcome in outcomes],
    )


def _partitions_of(topic: NewTopic, default: int) -> int:
    return len(topic.assignments) or (default if topic.num_partitions < 0 else topic.num_partitions)


def _created(context: RequestContext, outcome: TopicOutcome, *, validated: bool) -> _Created:
    name = outcome.name or ""
    if outcome.error is not None:
        return _not_created(name, outcome.error)
    topic_id = ZERO_UUID if validated else outcome.topic_id
    if context.version >= 5 and not context.may(*DESCRIBE_TOPIC_CONFIGS, name):
        hidden = ErrorCode.TOPIC_AUTHORIZATION_FAILED
        return _Created(name=name, topic_id=topic_id, error_message=None, topic_config_error_code=hidden, configs=None)
    return _Created(
        name=name,
        topic_id=topic_id,
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


@api(
    ApiKey.DELETE_TOPICS,
    DeleteTopicsRequest,
    "1-6",
    needs=judged(DELETE_CLUSTER, DELETE_TOPIC, DESCRIBE_TOPIC),
    forwardable=True,
)
async def delete_topics(context: RequestContext, request: DeleteTopicsRequest) -> DeleteTopicsResponse:
    """Delete topics with their data and settings, each with its own outcome.

    A topic referred to more than once, by name, by id or by both, fails with INVALID_REQUEST and stays. The answer
    comes when the deletion is durable and the partitions are gone from memory; files go in the background. Where
    `delete.topic.enable` is false every topic fails.

    Versions: v6 takes topic ids. A disabled deletion is INVALID_REQUEST before v3, then TOPIC_DELETION_DISABLED.

    v5 refuses what is beyond the client's controller_mutation_rate with THROTTLING_QUOTA_EXCEEDED.

    The audit log's topic is for those who may delete on the cluster: a right on topics does not reach it.
    """
    may_delete_all = context.may(*DELETE_CLUSTER)
    topics = context.broker.image.topics_by_id

    def judge(ref: TopicRef) -> ApiError | None:
        name = ref.name
        known = topics.get(ref.topic_id)
        if AUDIT_LOG_TOPIC in (name, None if known is None else known.name) and not may_delete_all:
            return context.refusal(*DELETE_CLUSTER)
        if name is None:
            allowed = known is None or context.may(*DELETE_TOPIC, known.name)
        else:
            exists = name in context.broker.image.topics
            allowed = context.may(*DESCRIBE_TOPIC, name) and not (exists and not context.may(*DELETE_TOPIC, name))
        if allowed or may_delete_all:
            return None  # also what is not there, to be told so
        return ApiError(ErrorCode.TOPIC_AUTHORIZATION_FAILED, "the topic may not be deleted")

    def refuse(ref: TopicRef, refusal: ApiError) -> _Deleted:
        name = ref.name
        if name is None and context.may(*DESCRIBE_TOPIC, topics[ref.topic_id].name):
            name = topics[ref.topic_id].name
        return _deletion(TopicOutcome(name, refusal, ref.topic_id))

    async def delete(refs: list[TopicRef]) -> list[_Deleted]:
        if context.version >= 6:
            request.topics = [
                DeleteTopicsRequest.DeleteTopicState(name=ref.name, topic_id=ref.topic_id) for ref in refs
            ]
        else:
            request.topic_names = [ref.name or "" for ref in refs]
        done = await _delete(context, request)
        response.throttle_time_ms = done.throttle_time_ms
        return done.responses

    response = DeleteTopicsResponse()
    response.responses = await done_for_allowed(_refs(context, request), judge, refuse, delete)
    return response


@on_controller(_refuse_deletion, shown_when=_are_deleted)
async def _delete(context: RequestContext, request: DeleteTopicsRequest) -> DeleteTopicsResponse:
    if not context.broker.config.get_bool("delete.topic.enable"):
        code = ErrorCode.TOPIC_DELETION_DISABLED if context.version >= 3 else ErrorCode.INVALID_REQUEST
        raise ApiError(code, "delete.topic.enable is false")
    outcomes, throttle_ms = await within_mutation_quota(
        context,
        _refs(context, request),
        partitions=lambda ref: _existing_partitions(context, ref),
        refused=lambda ref, error: TopicOutcome(ref.name, error, ref.topic_id),
        change=context.broker.controller.delete_topics,
        strict=context.version >= _DELETE_REFUSED_FROM,
    )
    return _deleted(outcomes, throttle_ms)


def _existing_partitions(context: RequestContext, ref: TopicRef) -> int:
    image = context.broker.image
    topic = image.topics_by_id.get(ref.topic_id) if ref.name is None else image.topics.get(ref.name)
    return 0 if topic is None else len(topic.partitions)


def _deleted(outcomes: list[TopicOutcome], throttle_ms: int = 0) -> DeleteTopicsResponse:
    return DeleteTopicsResponse(throttle_time_ms=throttle_ms, responses=[_deletion(outcome) for outcome in outcomes])


def _deletion(outcome: TopicOutcome) -> _Deleted:
    return _Deleted(
        name=outcome.name,
        topic_id=outcome.topic_id,
        error_code=ErrorCode.NONE if outcome.error is None else outcome.error.code,
        error_message=None if outcome.error is None else outcome.error.message,
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


@api(ApiKey.CREATE_PARTITIONS, CreatePartitionsRequest, "0-3", needs=judged(ALTER_TOPIC), forwardable=True)
async def create_partitions(context: RequestContext, request: CreatePartitionsRequest) -> CreatePartitionsResponse:
    """Give topics more partitions, each with its own outcome; `validate_only` changes nothing.

    `count` is the new total; one that is not larger fails with INVALID_PARTITIONS. Replicas may be named for the new
    partitions, one list each. Existing records stay where they are, so keys may move to other partitions.

    Versions: v3 refuses what is beyond the client's controller_mutation_rate with THROTTLING_QUOTA_EXCEEDED.
    """
    may_alter = context.rights(*ALTER_TOPIC)

    response = CreatePartitionsResponse()

    async def enlarge(topics: list[CreatePartitionsRequest.CreatePartitionsTopic]) -> list[_Enlarged]:
        request.topics = topics
        done = await _add_partitions(context, request)
        response.throttle_time_ms = done.throttle_time_ms
        return done.results

    response.results = await done_for_allowed(
        request.topics,
        lambda topic: None if may_alter(topic.name) else context.refusal(*ALTER_TOPIC, topic.name),
        lambda topic, refusal: _enlarged(TopicOutcome(topic.name, refusal)),
        enlarge,
    )
    return response


@on_controller(_refuse_partitions, shown_when=_are_added)
async def _add_partitions(context: RequestContext, request: CreatePartitionsRequest) -> CreatePartitionsResponse:
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
    outcomes, throttle_ms = await within_mutation_quota(
        context,
        wanted,
        partitions=lambda topic: 0 if request.validate_only else _added_partitions(context, topic),
        refused=lambda topic, error: TopicOutcome(topic.name, error),
        change=partial(context.broker.controller.create_partitions, validate_only=request.validate_only),
        strict=context.version >= _ADD_REFUSED_FROM,
    )
    return _more_partitions(outcomes, throttle_ms)


def _added_partitions(context: RequestContext, wanted: MorePartitions) -> int:
    topic = context.broker.image.topic(wanted.name)
    return 0 if topic is None else wanted.count - len(topic.partitions)


def _more_partitions(outcomes: list[TopicOutcome], throttle_ms: int = 0) -> CreatePartitionsResponse:
    return CreatePartitionsResponse(throttle_time_ms=throttle_ms, results=[_enlarged(outcome) for outcome in outcomes])


def _enlarged(outcome: TopicOutcome) -> _Enlarged:
    return _Enlarged(
        name=outcome.name or "",
        error_code=ErrorCode.NONE if outcome.error is None else outcome.error.code,
        error_message=None if outcome.error is None else outcome.error.message,
    )
