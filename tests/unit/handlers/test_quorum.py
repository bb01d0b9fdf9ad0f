"""DescribeQuorum, at every version."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from millrace.cluster.image import ClusterImage
from millrace.errors import ErrorCode
from millrace.handlers.quorum import METADATA_TOPIC, describe_quorum
from millrace.wire.messages.quorum import DescribeQuorumRequest
from support.handling import Handling
from support.metadata import ENDPOINT, cluster_of


async def described(image: ClusterImage, version: int, topic: str = METADATA_TOPIC, index: int = 0) -> Any:
    services: Any = SimpleNamespace(image=image)
    partitions = [DescribeQuorumRequest.PartitionData(partition_index=index)]
    request = DescribeQuorumRequest(topics=[DescribeQuorumRequest.TopicData(topic_name=topic, partitions=partitions)])
    return await Handling(None, services).call(describe_quorum, request, version)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", range(3))
async def test_the_controller_leads_the_live_brokers(version: int) -> None:
    response = await described(cluster_of(2, 1, 3, fenced=(3,)), version)
    assert response.error_code == 0
    (partition,) = response.topics[0].partitions
    assert partition.error_code == 0
    assert (partition.leader_id, partition.leader_epoch, partition.high_watermark) == (2, 1, 1)
    assert [(voter.replica_id, voter.log_end_offset) for voter in partition.current_voters] == [(1, 1), (2, 1)]
    assert partition.observers == []
    nodes = {node.node_id: [(at.name, at.host, at.port) for at in node.listeners] for node in response.nodes}
    address = [(ENDPOINT.listener, ENDPOINT.host, ENDPOINT.port)]
    assert nodes == ({1: address, 2: address} if version == 2 else {})


async def test_without_a_controller_there_is_no_leader() -> None:
    response = await described(cluster_of(1, 2, fenced=(1,)), 2)
    assert response.topics[0].partitions[0].error_code == ErrorCode.LEADER_NOT_AVAILABLE


@pytest.mark.parametrize(("topic", "index"), [("orders", 0), (METADATA_TOPIC, 1)])
async def test_there_is_one_metadata_log(topic: str, index: int) -> None:
    response = await described(cluster_of(1), 2, topic, index)
    assert response.topics[0].partitions[0].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
