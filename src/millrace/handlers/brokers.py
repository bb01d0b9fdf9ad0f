"""What brokers ask each other (BrokerHeartbeat, AlterPartition, AssignReplicasToDirs, GetReplicaLogInfo,
AllocateProducerIds), and UnregisterBroker.

All but the last are internal: not named in ApiVersions, for those with a broker's right, and what changes something is
served on the listener of the brokers only. What it means is decided behind the controller.
"""

from __future__ import annotations

from collections.abc import Callable

from millrace.cluster.dialer import broker_named
from millrace.cluster.elections import IsrOutcome, IsrProposal, Placement
from millrace.cluster.image import ClusterImage
from millrace.errors import ApiError, ErrorCode
from millrace.handlers.context import RequestContext
from millrace.handlers.forwarding import on_controller
from millrace.handlers.needs import OF_BROKERS, cluster
from millrace.handlers.registry import api
from millrace.metadata.deltas import Directories
from millrace.model import encode_uuid
from millrace.security.acls import Operation
from millrace.wire.keys import ApiKey
from millrace.wire.messages.brokers import (
    AllocateProducerIdsRequest,
    AllocateProducerIdsResponse,
    AssignReplicasToDirsRequest,
    AssignReplicasToDirsResponse,
    BrokerHeartbeatRequest,
    BrokerHeartbeatResponse,
    GetReplicaLogInfoRequest,
    GetReplicaLogInfoResponse,
)
from millrace.wire.messages.cluster import UnregisterBrokerRequest, UnregisterBrokerResponse
from millrace.wire.messages.partitions import AlterPartitionRequest, AlterPartitionResponse

_Answer = AlterPartitionResponse.PartitionData
_LogInfo = GetReplicaLogInfoResponse.PartitionLogInfo


@api(ApiKey.BROKER_HEARTBEAT, BrokerHeartbeatRequest, "0-2", needs=OF_BROKERS, internal=True, overlaps=True)
async def broker_heartbeat(context: RequestContext, request: BrokerHeartbeatRequest) -> BrokerHeartbeatResponse:
    """Between brokers. With `want_shut_down`: fence me, I am going. With `cordoned_log_dirs`: these of my directories
    are offline, and these are full. With neither: are you still who I think you are?

    The first two are for the controller, and are answered when the sender leads nothing any more, there
    (NOT_CONTROLLER elsewhere, STALE_BROKER_EPOCH for an incarnation that is over). The last names whom the sender
    believes to talk to; the answer is STALE_BROKER_EPOCH if that is somebody else, BROKER_NOT_AVAILABLE if it is about
    to stop. With `want_fence` it is a question about another broker, which refuses the sender: `is_fenced` says whether
    it refuses this one, too, BROKER_NOT_AVAILABLE that this one does not know.

    Versions: v2 has the directories.
    """
    try:
        context.check_broker_listener()
        if request.cordoned_log_dirs is not None:
            await _take_directories(context, request)
            return BrokerHeartbeatResponse(is_fenced=not context.broker.image.is_live(request.broker_id))
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


async def _take_directories(context: RequestContext, request: BrokerHeartbeatRequest) -> None:
    """What is offline was online before: the image has the list that it is missing from."""
    known = context.broker.image.brokers.get(request.broker_id)
    if known is None or known.broker_epoch != request.broker_epoch:
        raise ApiError(ErrorCode.STALE_BROKER_EPOCH, f"broker {request.broker_id} has another epoch")
    offline = {encode_uuid(each) for each in request.offline_log_dirs}
    directories = Directories(
        tuple(each for each in known.directories.online if each not in offline),
        tuple(encode_uuid(each) for each in request.cordoned_log_dirs or ()),
        known.directories.some_offline or bool(offline),
    )
    await context.broker.controller.take_directories(request.broker_id, request.broker_epoch, directories)


@api(ApiKey.ASSIGN_REPLICAS_TO_DIRS, AssignReplicasToDirsRequest, "0", needs=OF_BROKERS, internal=True, overlaps=True)
async def assign_replicas_to_dirs(
    context: RequestContext, request: AssignReplicasToDirsRequest
) -> AssignReplicasToDirsResponse:
    """Between brokers: a broker tells the controller in which directory replicas lie, or that they are lost.

    A directory of the reserved id 1 means that the replica no longer has what it promised, 3 that it cannot be used
    until its broker is started again; another replica leads it when this is answered, if one can.
    """
    placements = [
        Placement(topic.topic_id, each.partition_index, encode_uuid(directory.id_))
        for directory in request.directories
        for topic in directory.topics
        for each in topic.partitions
    ]
    try:
        context.check_broker_listener()
        codes = iter(
            await context.broker.controller.take_placements(request.broker_id, request.broker_epoch, placements)
        )
    except ApiError as error:
        return AssignReplicasToDirsResponse(error_code=error.code)
    return AssignReplicasToDirsResponse(
        directories=[
            AssignReplicasToDirsResponse.DirectoryData(
                id_=directory.id_,
                topics=[
                    AssignReplicasToDirsResponse.TopicData(
                        topic_id=topic.topic_id,
                        partitions=[
                            AssignReplicasToDirsResponse.PartitionData(
                                partition_index=each.partition_index, error_code=next(codes)
                            )
                            for each in topic.partitions
                        ],
                    )
                    for topic in directory.topics
                ],
            )
            for directory in request.directories
        ]
    )


def _refuse_log_info(
    _context: RequestContext, request: GetReplicaLogInfoRequest, error: ApiError
) -> GetReplicaLogInfoResponse:
    return GetReplicaLogInfoResponse(
        topic_partition_log_info_list=[
            GetReplicaLogInfoResponse.TopicPartitionLogInfo(
                topic_id=topic.topic_id,
                partition_log_info=[
                    _LogInfo(partition=index, error_code=error.code) for index in dict.fromkeys(topic.partitions)
                ],
            )
            for topic in request.topic_partitions or ()
        ]
    )


@api(
    ApiKey.GET_REPLICA_LOG_INFO,
    GetReplicaLogInfoRequest,
    "0",
    needs=OF_BROKERS,
    internal=True,
    refuse=_refuse_log_info,
)
def get_replica_log_info(context: RequestContext, request: GetReplicaLogInfoRequest) -> GetReplicaLogInfoResponse:
    """How far the logs of this broker's replicas reach, whether it leads them or not; KAFKA_STORAGE_ERROR for one that
    cannot be used. What an unclean election is decided by.
    """
    found = []
    for topic in request.topic_partitions or ():
        partitions = []
        for index in dict.fromkeys(topic.partitions):
            try:
                epoch, end, current = context.broker.replicas.log_end(topic.topic_id, index)
                partitions.append(
                    _LogInfo(
                        partition=index,
                        last_written_leader_epoch=epoch,
                        current_leader_epoch=current,
                        log_end_offset=end,
                    )
                )
            except ApiError as error:
                partitions.append(_LogInfo(partition=index, error_code=error.code))
        found.append(
            GetReplicaLogInfoResponse.TopicPartitionLogInfo(topic_id=topic.topic_id, partition_log_info=partitions)
        )
    return GetReplicaLogInfoResponse(
        broker_epoch=context.broker.controller.broker_epoch, topic_partition_log_info_list=found
    )


@api(ApiKey.ALTER_PARTITION, AlterPartitionRequest, "2-3", needs=OF_BROKERS, internal=True, overlaps=True)
async def alter_partition(context: RequestContext, request: AlterPartitionRequest) -> AlterPartitionResponse:
    """Between brokers: a leader asks the controller for other in-sync replicas; each partition has its own outcome.

    An outcome is in the metadata log when it is answered.

    Versions: v3 has the epochs of the members, so that an incarnation that is over cannot join.
    """
    proposals = [
        IsrProposal(topic.topic_id, each.partition_index, each.leader_epoch, each.partition_epoch, _members(each))
        for topic in request.topics
        for each in topic.partitions
    ]
    try:
        context.check_broker_listener()
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


@api(ApiKey.ALLOCATE_PRODUCER_IDS, AllocateProducerIdsRequest, "0", needs=OF_BROKERS, internal=True, overlaps=True)
async def allocate_producer_ids(
    context: RequestContext, request: AllocateProducerIdsRequest
) -> AllocateProducerIdsResponse:
    """Between brokers: a block of producer ids that no other broker ever gets, from the controller."""
    try:
        context.check_broker_listener()
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


@api(ApiKey.UNREGISTER_BROKER, UnregisterBrokerRequest, "0", needs=cluster(Operation.ALTER))
@on_controller(_refuse_unregistration, shown_when=_is_forgotten)
async def unregister_broker(context: RequestContext, request: UnregisterBrokerRequest) -> UnregisterBrokerResponse:
    """Forget a broker that was stopped for good; one that is alive or unknown is refused.

    Its replicas are not moved by this: reassign them first.
    """
    await context.broker.controller.unregister_broker(request.broker_id)
    return UnregisterBrokerResponse(error_message=None)
