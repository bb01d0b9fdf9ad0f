"""What brokers ask each other (BrokerHeartbeat, AlterPartition, AllocateProducerIds), and UnregisterBroker.

The first three are internal: served on the listener of the brokers only, and not named in ApiVersions. What they mean
is decided behind the controller.
"""

from __future__ import annotations

from collections.abc import Callable

from millrace.cluster.channel import broker_named
from millrace.cluster.elections import IsrOutcome, IsrProposal
from millrace.cluster.image import ClusterImage
from millrace.errors import ApiError, ErrorCode
from millrace.handlers.context import RequestContext
from millrace.handlers.forwarding import on_controller
from millrace.handlers.registry import api
from millrace.wire.keys import ApiKey
from millrace.wire.messages.brokers import (
    AllocateProducerIdsRequest,
    AllocateProducerIdsResponse,
    BrokerHeartbeatRequest,
    BrokerHeartbeatResponse,
)
from millrace.wire.messages.cluster import UnregisterBrokerRequest, UnregisterBrokerResponse
from millrace.wire.messages.partitions import AlterPartitionRequest, AlterPartitionResponse

_Answer = AlterPartitionResponse.PartitionData


def _check_listener(context: RequestContext) -> None:
    """Clients have no business here: where brokers have a listener of their own, only it is open to this."""
    if context.listener != context.broker.config.inter_broker_listener:
        raise ApiError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "this is for brokers, on the listener of brokers")


@api(ApiKey.BROKER_HEARTBEAT, BrokerHeartbeatRequest, "0-1", internal=True, overlaps=True)
async def broker_heartbeat(context: RequestContext, request: BrokerHeartbeatRequest) -> BrokerHeartbeatResponse:
    """Between brokers. With `want_shut_down`: fence me, I am going. Without: are you still who I think you are?

    The first is for the controller, and is answered when the sender leads nothing any more (NOT_CONTROLLER elsewhere,
    STALE_BROKER_EPOCH for an incarnation that is over). The second names whom the sender believes to talk to; the
    answer is STALE_BROKER_EPOCH if that is somebody else, BROKER_NOT_AVAILABLE if it is about to stop. With
    `want_fence` it is a question about another broker, which refuses the sender: `is_fenced` says whether it refuses
    this one, too, BROKER_NOT_AVAILABLE that this one does not know.

    Not done: the rest of what Kafka's brokers report (they register in ZooKeeper here): directories.
    """
    try:
        _check_listener(context)
        answer = await context.broker.controller.heartbeat(
            request.broker_id,
            request.broker_epoch,
            caller=broker_named(context.header.client_id),
            want_fence=request.want_fence,
            want_shut_down=request.want_shut_down,
        )
    except ApiError as error:
        return BrokerHeartbeatResponse(error_code=error.code)
    return BrokerHeartbeatResponse(
        error_code=answer.error,
        is_caught_up=request.current_metadata_offset >= context.broker.image.index,
        is_fenced=answer.is_fenced,
        should_shut_down=answer.should_shut_down,
    )


@api(ApiKey.ALTER_PARTITION, AlterPartitionRequest, "2-3", internal=True, overlaps=True)
async def alter_partition(context: RequestContext, request: AlterPartitionRequest) -> AlterPartitionResponse:
    """Between brokers: a leader asks the controller for other in-sync replicas; each partition has its own outcome.

    An outcome is in the metadata log when it is answered. A leader that can no longer serve asks for a set without
    itself, and another member is elected (NEW_LEADER_ELECTED).

    Versions: v3 has the epochs of the members, so that an incarnation that is over cannot join.
    """
    proposals = [
        IsrProposal(topic.topic_id, each.partition_index, each.leader_epoch, each.partition_epoch, _members(each))
        for topic in request.topics
        for each in topic.partitions
    ]
    try:
        _check_listener(context)
        outcomes = iter(
            await context.broker.controller.alter_partition(request.broker_id, request.broker_epoch, proposals)
        )
    except ApiError as error:
        return AlterPartitionResponse(error_code=error.code)
    return AlterPartitionResponse(
        topics=[
            AlterPartitionResponse.TopicData(
                topic_id=topic.topic_id,
                partitions=[_altered(each.partition_index, next(outcomes)) for each in topic.partitions],
            )
            for topic in request.topics
        ]
    )


def _members(partition: AlterPartitionRequest.PartitionData) -> tuple[tuple[int, int], ...]:
    if partition.new_isr:
        return tuple((broker_id, -1) for broker_id in partition.new_isr)
    return tuple((member.broker_id, member.broker_epoch) for member in partition.new_isr_with_epochs)


def _altered(index: int, outcome: IsrOutcome) -> _Answer:
    state = outcome.state
    if state is None:
        return _Answer(partition_index=index, error_code=outcome.error)
    return _Answer(
        partition_index=index,
        error_code=outcome.error,
        leader_id=state.leader,
        leader_epoch=state.leader_epoch,
        isr=list(state.isr),
        partition_epoch=state.partition_epoch,
    )


@api(ApiKey.ALLOCATE_PRODUCER_IDS, AllocateProducerIdsRequest, "0", internal=True, overlaps=True)
async def allocate_producer_ids(
    context: RequestContext, request: AllocateProducerIdsRequest
) -> AllocateProducerIdsResponse:
    """Between brokers: a block of producer ids that no other broker ever gets, from the controller."""
    try:
        _check_listener(context)
        block = await context.broker.controller.allocate_producer_ids(request.broker_id, request.broker_epoch)
    except ApiError as error:
        return AllocateProducerIdsResponse(error_code=error.code)
    return AllocateProducerIdsResponse(producer_id_start=block.start, producer_id_len=len(block))


def _refuse_unregistration(
    _context: RequestContext, _request: UnregisterBrokerRequest, error: ApiError
) -> UnregisterBrokerResponse:
    return UnregisterBrokerResponse(error_code=error.code, error_message=error.message)


def _is_forgotten(
    request: UnregisterBrokerRequest, response: UnregisterBrokerResponse
) -> Callable[[ClusterImage], bool] | None:
    return (lambda image: request.broker_id not in image.brokers) if response.error_code == ErrorCode.NONE else None


@api(ApiKey.UNREGISTER_BROKER, UnregisterBrokerRequest, "0")
@on_controller(_refuse_unregistration, settled=_is_forgotten)
async def unregister_broker(context: RequestContext, request: UnregisterBrokerRequest) -> UnregisterBrokerResponse:
    """Forget a broker that was stopped for good; one that is alive or unknown is refused.

    Its replicas are not moved by this: reassign them first.

    Not done: authorization.
    """
    await context.broker.controller.unregister_broker(request.broker_id)
    return UnregisterBrokerResponse(error_message=None)
