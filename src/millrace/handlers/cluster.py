"""Metadata, DescribeCluster and DescribeTopicPartitions: who is there and who leads what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final
from uuid import UUID

from millrace.cluster.image import BrokerImage, ClusterImage, TopicImage
from millrace.cluster.planning import TopicOutcome
from millrace.errors import ApiError, ErrorCode
from millrace.handlers import auditing
from millrace.handlers.context import RequestContext, anything
from millrace.handlers.needs import CREATE_CLUSTER, CREATE_TOPIC, DESCRIBE_CLUSTER, DESCRIBE_TOPIC, judged
from millrace.handlers.quotas import within_mutation_quota
from millrace.handlers.registry import api
from millrace.metadata.deltas import PartitionState
from millrace.model import INTERNAL_TOPICS, NO_BROKER, ZERO_UUID, invalid_topic_name_reason
from millrace.security.acls import ResourceKind
from millrace.wire.keys import ApiKey
from millrace.wire.messages.cluster import (
    DescribeClusterRequest,
    DescribeClusterResponse,
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    MetadataRequest,
    MetadataResponse,
)

_BROKER_ENDPOINTS: Final = 1
_CONTROLLER_ENDPOINTS: Final = 2

_Topic = MetadataResponse.MetadataResponseTopic
_Partition = MetadataResponse.MetadataResponsePartition


@api(
    ApiKey.METADATA,
    MetadataRequest,
    "0-13",
    needs=judged(DESCRIBE_TOPIC, CREATE_CLUSTER, CREATE_TOPIC, DESCRIBE_CLUSTER),
)
async def metadata(context: RequestContext, request: MetadataRequest) -> MetadataResponse:
    """The brokers, the controller, and topics with their leaders, replicas and in-sync replicas.

    Unknown topics are created if `auto.create.topics.enable`, the request and the client's controller_mutation_rate
    allow it, by the broker that was asked; the answer then already has the new topic, where Kafka first answers
    LEADER_NOT_AVAILABLE.

    Versions: all topics are an empty list in v0 and null later. Before v4 the request always allows creation. v8-10
    may ask for the operations allowed on the cluster. Topic ids are answered from v10 and accepted from v12. A leader
    without the listener of this connection is LEADER_NOT_AVAILABLE before v6 and LISTENER_NOT_FOUND from then on.

    While a leader seems to have died and nobody has decided yet, the answer waits for the decision (`presence`); where
    there are several brokers, one about given topics takes some milliseconds, in which that may turn out.

    Topics that may not be described are left out of all topics, and TOPIC_AUTHORIZATION_FAILED if they are named,
    whether they exist or not.

    Not done: REBOOTSTRAP_REQUIRED (v13).
    """
    context.rights(*DESCRIBE_TOPIC)
    presence = context.broker.presence
    if request.topics:
        await presence.news(context.broker.image)
    topics = await _topics(context, request)
    if presence.doubts and any(_lacks_leader(topic) for topic in topics):
        await presence.decided()
        topics = await _topics(context, request)
    if request.include_topic_authorized_operations:
        for topic in topics:
            if topic.name is not None and topic.error_code != ErrorCode.TOPIC_AUTHORIZATION_FAILED:
                topic.topic_authorized_operations = context.allowed_operations(ResourceKind.TOPIC, topic.name)
    image = context.broker.image
    response = MetadataResponse(
        brokers=[
            MetadataResponse.MetadataResponseBroker(node_id=broker.broker_id, host=host, port=port, rack=broker.rack)
            for broker, host, port in _reachable(context, context.broker.presence.listed(image))
        ],
        cluster_id=image.cluster_id,
        controller_id=_controller(image),
        topics=topics,
    )
    if request.include_cluster_authorized_operations:
        response.cluster_authorized_operations = _cluster_operations(context)
    return response


def _cluster_operations(context: RequestContext) -> int:
    """As in Kafka, none are told to who may not describe the cluster."""
    return context.allowed_operations(ResourceKind.CLUSTER) if context.may(*DESCRIBE_CLUSTER) else 0


async def _topics(context: RequestContext, request: MetadataRequest) -> list[_Topic]:
    wanted = request.topics
    may_describe = context.rights(*DESCRIBE_TOPIC)
    if wanted is None or (context.version == 0 and not wanted):
        return [_topic(context, topic) for name, topic in context.broker.image.topics.items() if may_describe(name)]
    if problems := _misuse_of_ids(context.version, wanted):
        return problems
    if any(topic.topic_id != ZERO_UUID for topic in wanted):
        return _topics_by_id(context, wanted)
    names = dict.fromkeys(topic.name or "" for topic in wanted)
    allowed = [name for name in names if may_describe(name)]
    topics = await _topics_by_name(context, allowed, may_create=request.allow_auto_topic_creation)
    return [*topics, *(_refused(name) for name in names if not may_describe(name))]


def _refused(name: str | None, topic_id: UUID = ZERO_UUID) -> _Topic:
    return _Topic(error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED, name=name, topic_id=topic_id)


def _lacks_leader(topic: _Topic) -> bool:
    return any(partition.error_code == ErrorCode.LEADER_NOT_AVAILABLE for partition in topic.partitions)


def _misuse_of_ids(version: int, wanted: Sequence[MetadataRequest.MetadataRequestTopic]) -> list[_Topic]:
    """v10 and v11 have the fields for ids but no meaning for them, and then Kafka refuses the request."""
    if version >= 12 or all(topic.name is not None and topic.topic_id == ZERO_UUID for topic in wanted):
        return []
    return [
        _Topic(error_code=ErrorCode.INVALID_REQUEST, name=topic.name or "", topic_id=topic.topic_id) for topic in wanted
    ]


def _topics_by_id(context: RequestContext, wanted: Sequence[MetadataRequest.MetadataRequestTopic]) -> list[_Topic]:
    answers = []
    may_describe = context.rights(*DESCRIBE_TOPIC)
    for topic_id in dict.fromkeys(topic.topic_id for topic in wanted if topic.topic_id != ZERO_UUID):
        topic = context.broker.image.topics_by_id.get(topic_id)
        if topic is None:
            answers.append(_Topic(error_code=ErrorCode.UNKNOWN_TOPIC_ID, name=None, topic_id=topic_id))
        elif not may_describe(topic.name):
            answers.append(_refused(None, topic_id))
        else:
            answers.append(_topic(context, topic))
    return answers


async def _topics_by_name(context: RequestContext, names: Sequence[str], *, may_create: bool) -> list[_Topic]:
    broker = context.broker
    missing = [name for name in names if name not in broker.image.topics]
    errors: dict[str, ErrorCode] = {}
    if missing and may_create and broker.config.get_bool("auto.create.topics.enable"):
        right = CREATE_CLUSTER if context.may(*CREATE_CLUSTER) else CREATE_TOPIC
        may_create_topic = anything if right is CREATE_CLUSTER else context.rights(*CREATE_TOPIC)
        errors = {name: ErrorCode.TOPIC_AUTHORIZATION_FAILED for name in missing if not may_create_topic(name)}

        async def create(wanted: list[str]) -> list[TopicOutcome]:
            auditing.creates(context, *right, wanted)
            return await broker.controller.ensure_topics(wanted)

        try:
            outcomes, _ = await within_mutation_quota(
                context,
                [name for name in missing if name not in errors],
                partitions=lambda _name: broker.config.get_int("num.partitions"),
                refused=lambda name, _error: TopicOutcome(name, ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)),
                change=create,
                strict=True,
            )
            auditing.created(context, [outcome.name or "" for outcome in outcomes if outcome.error is None])
            errors |= {outcome.name or "": outcome.error.code for outcome in outcomes if outcome.error is not None}
        except ApiError as error:
            # As far as is known nothing was created; the client hears that the topics are unknown and asks again.
            auditing.created(context, missing, error.code)
    image = broker.image
    answers = []
    for name in names:
        topic = image.topic(name)
        if topic is not None:
            answers.append(_topic(context, topic))
            continue
        wrong_name = invalid_topic_name_reason(name) is not None
        unknown = ErrorCode.INVALID_TOPIC_EXCEPTION if wrong_name else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        answers.append(_Topic(error_code=errors.get(name, unknown), name=name, is_internal=name in INTERNAL_TOPICS))
    return answers


def _topic(context: RequestContext, topic: TopicImage) -> _Topic:
    return _Topic(
        name=topic.name,
        topic_id=topic.topic_id,
        is_internal=topic.internal,
        partitions=[_partition(context, index, state) for index, state in enumerate(topic.partitions)],
    )


def _partition(context: RequestContext, index: int, state: PartitionState) -> _Partition:
    image = context.broker.image
    replicas, isr = list(state.replicas), list(state.isr)
    offline = [broker_id for broker_id in replicas if not image.is_present(state, broker_id)]
    error, leader = _leader(context, state)
    if context.version == 0 and offline:
        # The first version had no list of offline replicas, so it leaves them out and says so.
        replicas = [broker_id for broker_id in replicas if broker_id not in offline]
        isr = [broker_id for broker_id in isr if broker_id not in offline]
        error = error or ErrorCode.REPLICA_NOT_AVAILABLE
    return _Partition(
        error_code=error,
        partition_index=index,
        leader_id=leader,
        leader_epoch=state.leader_epoch,
        replica_nodes=replicas,
        isr_nodes=isr,
        offline_replicas=offline,
    )


def _leader(context: RequestContext, state: PartitionState) -> tuple[ErrorCode, int]:
    """The leader as a client of this listener can use it, and what is wrong where it cannot."""
    image = context.broker.image
    broker = image.brokers.get(state.leader)
    if broker is None or broker.fenced or context.broker.presence.is_doubted(broker.broker_id):
        return ErrorCode.LEADER_NOT_AVAILABLE, NO_BROKER
    if broker.broker_id != context.broker.broker_id and broker.endpoint(context.listener) is None:
        listeners_known = context.version >= 6
        return (ErrorCode.LISTENER_NOT_FOUND if listeners_known else ErrorCode.LEADER_NOT_AVAILABLE), NO_BROKER
    return ErrorCode.NONE, state.leader


def _reachable(context: RequestContext, brokers: Iterable[BrokerImage]) -> list[tuple[BrokerImage, str, int]]:
    """Those brokers that have the listener of this connection, with their addresses on it."""
    found = []
    for broker in brokers:
        if broker.broker_id == context.broker.broker_id:
            found.append((broker, *context.broker.advertised(context.listener)))
        elif (endpoint := broker.endpoint(context.listener)) is not None:
            found.append((broker, endpoint.host, endpoint.port))
    return found


def _controller(image: ClusterImage) -> int:
    return image.controller_id if image.is_live(image.controller_id) else NO_BROKER


@api(ApiKey.DESCRIBE_CLUSTER, DescribeClusterRequest, "0-2", needs=judged(DESCRIBE_CLUSTER))
def describe_cluster(context: RequestContext, request: DescribeClusterRequest) -> DescribeClusterResponse:
    """The cluster's id, its controller and its brokers.

    Versions: v1 can ask for controllers instead of brokers (KIP-919), which have no endpoints of their own here:
    MISMATCHED_ENDPOINT_TYPE. v2 can ask for fenced brokers too.

    Everybody may ask; what they may do is told to who may describe the cluster.
    """
    context.rights(*DESCRIBE_CLUSTER)
    if request.endpoint_type != _BROKER_ENDPOINTS:
        known = request.endpoint_type == _CONTROLLER_ENDPOINTS
        code = ErrorCode.MISMATCHED_ENDPOINT_TYPE if known else ErrorCode.UNSUPPORTED_ENDPOINT_TYPE
        return DescribeClusterResponse(error_code=code, error_message="only brokers have endpoints here")
    image = context.broker.image
    everybody = [image.brokers[broker_id] for broker_id in sorted(image.brokers)]
    brokers = everybody if request.include_fenced_brokers else image.live_brokers
    response = DescribeClusterResponse(
        endpoint_type=request.endpoint_type,
        cluster_id=image.cluster_id,
        controller_id=_controller(image),
        brokers=[
            DescribeClusterResponse.DescribeClusterBroker(
                broker_id=broker.broker_id, host=host, port=port, rack=broker.rack, is_fenced=broker.fenced
            )
            for broker, host, port in _reachable(context, brokers)
        ],
    )
    if request.include_cluster_authorized_operations:
        response.cluster_authorized_operations = _cluster_operations(context)
    return response


@api(
    ApiKey.DESCRIBE_TOPIC_PARTITIONS,
    DescribeTopicPartitionsRequest,
    "0",
    needs=judged(DESCRIBE_TOPIC),
)
def describe_topic_partitions(
    context: RequestContext, request: DescribeTopicPartitionsRequest
) -> DescribeTopicPartitionsResponse:
    """The partitions of topics, or of all topics, page by page in the order of their names (KIP-966).

    A page holds at most `response_partition_limit` partitions, and never more than `max.request.partition.size.limit`;
    `next_cursor` says where the next page begins. Topics before the cursor are left out, and of all topics those that
    may not be described.
    """
    may_describe = context.rights(*DESCRIBE_TOPIC)
    answer = _Page(context, _page_limit(context, request.response_partition_limit))
    cursor = request.cursor
    if cursor is not None and cursor.partition_index < 0:
        names = [topic.name for topic in request.topics]
        return DescribeTopicPartitionsResponse(topics=[_unknown(name, ErrorCode.INVALID_REQUEST) for name in names])
    image = context.broker.image
    asked = {topic.name for topic in request.topics}
    names = sorted(filter(may_describe, asked or image.topics))
    for name in names:
        first = 0
        if cursor is not None:
            if name < cursor.topic_name:
                continue
            first = cursor.partition_index if name == cursor.topic_name else 0
        if not answer.add(name, image.topic(name), first):
            break
    hidden = sorted(name for name in asked if not may_describe(name) and (cursor is None or name >= cursor.topic_name))
    refused = [_unknown(name, ErrorCode.TOPIC_AUTHORIZATION_FAILED) for name in hidden]
    return DescribeTopicPartitionsResponse(topics=[*answer.topics, *refused], next_cursor=answer.next_cursor)


def _page_limit(context: RequestContext, asked: int) -> int:
    return max(1, min(asked, context.broker.config.get_int("max.request.partition.size.limit")))


def _unknown(name: str, code: ErrorCode) -> DescribeTopicPartitionsResponse.DescribeTopicPartitionsResponseTopic:
    return DescribeTopicPartitionsResponse.DescribeTopicPartitionsResponseTopic(
        error_code=code,
        name=name,
        is_internal=name in INTERNAL_TOPICS and code != ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    )


class _Page:
    """A page being filled."""

    def __init__(self, context: RequestContext, limit: int) -> None:
        self.topics: list[DescribeTopicPartitionsResponse.DescribeTopicPartitionsResponseTopic] = []
        self.next_cursor: DescribeTopicPartitionsResponse.Cursor | None = None
        self._context = context
        self._left = limit

    def add(self, name: str, topic: TopicImage | None, first: int) -> bool:
        """Add what fits of a topic from partition `first`; False when the page is full and the rest must wait."""
        if topic is None:
            bad_name = invalid_topic_name_reason(name) is not None
            code = ErrorCode.INVALID_TOPIC_EXCEPTION if bad_name else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            unknown = _unknown(name, code)
            unknown.topic_authorized_operations = self._context.allowed_operations(ResourceKind.TOPIC, name)
            self.topics.append(unknown)
            return True
        end = min(len(topic.partitions), first + self._left)
        if end > first or not topic.partitions[first:]:
            self.topics.append(
                DescribeTopicPartitionsResponse.DescribeTopicPartitionsResponseTopic(
                    name=name,
                    topic_id=topic.topic_id,
                    is_internal=topic.internal,
                    topic_authorized_operations=self._context.allowed_operations(ResourceKind.TOPIC, name),
                    partitions=[self._partition(index, topic.partitions[index]) for index in range(first, end)],
                )
            )
            self._left -= max(end - first, 0)
        if end < len(topic.partitions):
            self.next_cursor = DescribeTopicPartitionsResponse.Cursor(topic_name=name, partition_index=end)
            return False
        return True

    def _partition(
        self, index: int, state: PartitionState
    ) -> DescribeTopicPartitionsResponse.DescribeTopicPartitionsResponsePartition:
        image = self._context.broker.image
        leader = state.leader if image.is_live(state.leader) else NO_BROKER
        return DescribeTopicPartitionsResponse.DescribeTopicPartitionsResponsePartition(
            error_code=ErrorCode.LEADER_NOT_AVAILABLE if leader == NO_BROKER else ErrorCode.NONE,
            partition_index=index,
            leader_id=leader,
            leader_epoch=state.leader_epoch,
            replica_nodes=list(state.replicas),
            isr_nodes=list(state.isr),
            eligible_leader_replicas=list(state.elr),
            last_known_elr=[],
            offline_replicas=[each for each in state.replicas if not image.is_present(state, each)],
        )
