"""Who leads partitions and who holds them: ElectLeaders, AlterPartitionReassignments, ListPartitionReassignments.

What an election or a move of replicas does is in `cluster.elections`; here is only the wire's side of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from millrace.cluster.elections import ElectionKind
from millrace.cluster.image import ClusterImage
from millrace.cluster.reassignments import Reassignment
from millrace.errors import ApiError, ErrorCode
from millrace.handlers.context import RequestContext
from millrace.handlers.forwarding import on_controller
from millrace.handlers.needs import cluster
from millrace.handlers.registry import api
from millrace.metadata.deltas import PartitionState
from millrace.model import TopicPartition
from millrace.security.acls import Operation
from millrace.wire.keys import ApiKey
from millrace.wire.messages.partitions import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    ElectLeadersRequest,
    ElectLeadersResponse,
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
)

_Elected = ElectLeadersResponse.PartitionResult
_Moved = AlterPartitionReassignmentsResponse.ReassignablePartitionResponse
_Ongoing = ListPartitionReassignmentsResponse.OngoingPartitionReassignment

_KINDS = {0: ElectionKind.PREFERRED, 1: ElectionKind.UNCLEAN}


def _refuse_election(context: RequestContext, request: ElectLeadersRequest, error: ApiError) -> ElectLeadersResponse:
    response = _elected((place, error) for place in _places(request) or ())
    if context.version >= 1:
        response.error_code = error.code
    return response


@api(ApiKey.ELECT_LEADERS, ElectLeadersRequest, "0-2", needs=cluster(Operation.ALTER))
@on_controller(_refuse_election)
async def elect_leaders(context: RequestContext, request: ElectLeadersRequest) -> ElectLeadersResponse:
    """Make the preferred replica the leader, or, if nobody leads and data may be lost, the one with the longest log.

    Each partition has its own outcome: ELECTION_NOT_NEEDED if the wish is already true. With no partitions named
    all are asked for, and those that need no election are left out of the answer.

    Versions: v0 knows only preferred elections; v1 adds the kind (KIP-460).
    """
    kind = _KINDS.get(request.election_type)
    if kind is None:
        raise ApiError(ErrorCode.INVALID_REQUEST, f"there is no election of type {request.election_type}")
    asked = _places(request)
    outcomes = await context.broker.controller.elect_leaders(kind, asked)
    if asked is None:
        outcomes = [
            (place, error) for place, error in outcomes if error is None or error.code != ErrorCode.ELECTION_NOT_NEEDED
        ]
    return _elected(outcomes)


def _places(request: ElectLeadersRequest) -> list[TopicPartition] | None:
    if request.topic_partitions is None:
        return None
    return list(
        dict.fromkeys(
            TopicPartition(topic.topic, index) for topic in request.topic_partitions for index in topic.partitions
        )
    )


def _elected(outcomes: Iterable[tuple[TopicPartition, ApiError | None]]) -> ElectLeadersResponse:
    topics: dict[str, list[_Elected]] = defaultdict(list)
    for (topic, index), error in outcomes:
        topics[topic].append(_Elected(partition_id=index, error_code=_code(error), error_message=_text(error)))
    return ElectLeadersResponse(
        replica_election_results=[
            ElectLeadersResponse.ReplicaElectionResult(topic=topic, partition_result=results)
            for topic, results in topics.items()
        ]
    )


def _refuse_reassignment(
    _context: RequestContext, request: AlterPartitionReassignmentsRequest, error: ApiError
) -> AlterPartitionReassignmentsResponse:
    response = _reassigned(request, [error] * sum(len(topic.partitions) for topic in request.topics))
    response.error_code, response.error_message = error.code, error.message
    return response


def _are_begun(
    request: AlterPartitionReassignmentsRequest, response: AlterPartitionReassignmentsResponse
) -> Callable[[ClusterImage], bool]:
    """Whoever asks this broker next how a move goes must not hear that there is none."""
    refused = {
        (topic.name, each.partition_index)
        for topic in response.responses
        for each in topic.partitions
        if each.error_code != ErrorCode.NONE
    }
    targets = {
        (topic.name, item.partition_index): item.replicas
        for topic in request.topics
        for item in topic.partitions
        if (topic.name, item.partition_index) not in refused
    }

    def holds(image: ClusterImage) -> bool:
        for (name, index), replicas in targets.items():
            topic = image.topic(name)
            if topic is not None and not _follows(topic.partitions[index], replicas):
                return False
        return True

    return holds


def _follows(state: PartitionState, target: list[int] | None) -> bool:
    if target is None:
        return not state.is_reassigning
    return state.is_reassigning or list(state.replicas) == target


@api(
    ApiKey.ALTER_PARTITION_REASSIGNMENTS,
    AlterPartitionReassignmentsRequest,
    "0-1",
    needs=cluster(Operation.ALTER),
)
@on_controller(_refuse_reassignment, shown_when=_are_begun)
async def alter_partition_reassignments(
    context: RequestContext, request: AlterPartitionReassignmentsRequest
) -> AlterPartitionReassignmentsResponse:
    """Begin to move partitions to other replicas, or cancel moves (no replicas), each with its own outcome.

    The answer comes when the move has begun; ListPartitionReassignments tells when it is over. A move to the replicas
    that a partition has is done at once; a new one takes the place of one under way (KIP-455).

    Versions: v1 can refuse moves that change the number of replicas.
    """
    items = [
        Reassignment(topic.name, item.partition_index, None if item.replicas is None else tuple(item.replicas))
        for topic in request.topics
        for item in topic.partitions
    ]
    errors = await context.broker.controller.alter_reassignments(
        items, allow_replication_factor_change=request.allow_replication_factor_change
    )
    return _reassigned(request, errors)


def _reassigned(
    request: AlterPartitionReassignmentsRequest, errors: Sequence[ApiError | None]
) -> AlterPartitionReassignmentsResponse:
    outcomes = iter(errors)
    return AlterPartitionReassignmentsResponse(
        error_message=None,
        allow_replication_factor_change=request.allow_replication_factor_change,
        responses=[
            AlterPartitionReassignmentsResponse.ReassignableTopicResponse(
                name=topic.name, partitions=[_moved(item.partition_index, next(outcomes)) for item in topic.partitions]
            )
            for topic in request.topics
        ],
    )


def _moved(index: int, error: ApiError | None) -> _Moved:
    return _Moved(partition_index=index, error_code=_code(error), error_message=_text(error))


@api(
    ApiKey.LIST_PARTITION_REASSIGNMENTS,
    ListPartitionReassignmentsRequest,
    "0",
    needs=cluster(Operation.DESCRIBE),
)
def list_partition_reassignments(
    context: RequestContext, request: ListPartitionReassignmentsRequest
) -> ListPartitionReassignmentsResponse:
    """The moves of replicas that are under way: of all topics, or of the partitions asked for.

    Any broker answers, from its own image. A partition that is not moving, or not there, is left out, as in Kafka.
    """
    image = context.broker.image
    if request.topics is None:
        chosen = {topic.name: range(len(topic.partitions)) for topic in image.topics.values()}
    else:
        chosen = {topic.name: topic.partition_indexes for topic in request.topics}  # type: ignore[misc]
    answers = []
    for name, indexes in chosen.items():
        topic = image.topic(name)
        if topic is None:
            continue
        ongoing = [
            _ongoing(index, topic.partitions[index])
            for index in dict.fromkeys(indexes)
            if 0 <= index < len(topic.partitions) and topic.partitions[index].is_reassigning
        ]
        if ongoing:
            answers.append(ListPartitionReassignmentsResponse.OngoingTopicReassignment(name=name, partitions=ongoing))
    return ListPartitionReassignmentsResponse(error_message=None, topics=answers)


def _ongoing(index: int, state: PartitionState) -> _Ongoing:
    return _Ongoing(
        partition_index=index,
        replicas=list(state.replicas),
        adding_replicas=list(state.adding),
        removing_replicas=list(state.removing),
    )


def _code(error: ApiError | None) -> ErrorCode:
    return ErrorCode.NONE if error is None else error.code


def _text(error: ApiError | None) -> str | None:
    return None if error is None else error.message
