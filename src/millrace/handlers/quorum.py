"""DescribeQuorum: the metadata log in the words of a quorum.

There is no quorum among brokers here: ZooKeeper (or the embedded store) keeps the log, and every broker follows it. The
controller is told as the leader and the live brokers as its voters, so that tools show who writes and how far the log
has come.
"""

from __future__ import annotations

from typing import Final

from millrace.errors import ErrorCode
from millrace.handlers.context import RequestContext
from millrace.handlers.needs import cluster
from millrace.handlers.registry import api
from millrace.security.acls import Operation
from millrace.wire.keys import ApiKey
from millrace.wire.messages.quorum import DescribeQuorumRequest, DescribeQuorumResponse

METADATA_TOPIC: Final = "__cluster_metadata"

_Partition = DescribeQuorumResponse.PartitionData


@api(ApiKey.DESCRIBE_QUORUM, DescribeQuorumRequest, "0-2", needs=cluster(Operation.DESCRIBE))
def describe_quorum(context: RequestContext, request: DescribeQuorumRequest) -> DescribeQuorumResponse:
    """The metadata log: its writer (the controller) as leader, its epoch, how far it has come, and who follows it.

    Partition 0 of `__cluster_metadata` is the only one; another is UNKNOWN_TOPIC_OR_PARTITION. The voters are the live
    brokers, each with the number of the newest metadata delta that this broker has: what the others have applied is not
    known here. While there is no controller the partition has LEADER_NOT_AVAILABLE.

    Versions: v2 adds the addresses of the voters.

    Not done: times of fetches, which are answered as unknown.
    """
    answers = [
        DescribeQuorumResponse.TopicData(
            topic_name=topic.topic_name,
            partitions=[_partition(context, topic.topic_name, each.partition_index) for each in topic.partitions],
        )
        for topic in request.topics
    ]
    nodes = _nodes(context) if context.version >= 2 else []
    return DescribeQuorumResponse(error_message=None, topics=answers, nodes=nodes)


def _partition(context: RequestContext, topic: str, index: int) -> _Partition:
    if topic != METADATA_TOPIC or index != 0:
        return _Partition(
            partition_index=index,
            error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            error_message=f"the metadata log is partition 0 of {METADATA_TOPIC}",
        )
    image = context.broker.image
    if not image.is_live(image.controller_id):
        return _Partition(
            partition_index=index,
            error_code=ErrorCode.LEADER_NOT_AVAILABLE,
            error_message="there is no controller at the moment",
        )
    return _Partition(
        partition_index=index,
        error_message=None,
        leader_id=image.controller_id,
        leader_epoch=image.controller_epoch,
        high_watermark=image.index,
        current_voters=[
            DescribeQuorumResponse.ReplicaState(replica_id=broker.broker_id, log_end_offset=image.index)
            for broker in image.live_brokers
        ],
    )


def _nodes(context: RequestContext) -> list[DescribeQuorumResponse.Node]:
    return [
        DescribeQuorumResponse.Node(
            node_id=broker.broker_id,
            listeners=[
                DescribeQuorumResponse.Listener(name=endpoint.listener, host=endpoint.host, port=endpoint.port)
                for endpoint in broker.endpoints
            ],
        )
        for broker in context.broker.image.live_brokers
    ]
