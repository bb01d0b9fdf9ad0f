"""What brokers ask each other, and UnregisterBroker, at every version."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.cluster.planning import Plan
from millrace.errors import ErrorCode
from millrace.handlers.brokers import allocate_producer_ids, alter_partition, broker_heartbeat, unregister_broker
from millrace.metadata.deltas import BrokerFenced, PartitionState, TopicCreated
from millrace.model import new_topic_id
from millrace.wire.messages.brokers import AllocateProducerIdsRequest, BrokerHeartbeatRequest
from millrace.wire.messages.cluster import UnregisterBrokerRequest
from millrace.wire.messages.partitions import AlterPartitionRequest
from support.handling import Handling, deciding, handling
from support.metadata import cluster_of

SEPARATE = {
    "listeners": "PLAINTEXT://:9092,INSIDE://:9093",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,INSIDE:PLAINTEXT",
    "inter.broker.listener.name": "INSIDE",
}


def two_brokers(settings: dict[str, str] | None = None) -> Handling:
    """Broker 1, the controller, and broker 2; a topic `a` with a replica on both. Their epochs are 101 and 102."""
    state = PartitionState((1, 2), (1, 2), 1)
    return deciding(cluster_of(1, 2).apply((TopicCreated("a", new_topic_id(), (state,)),)), settings)


# --- BrokerHeartbeat --------------------------------------------------------------------------------------------------


async def beat(on: Handling, broker_id: int, epoch: int, version: int = 1, **fields: Any) -> Any:
    request = BrokerHeartbeatRequest(broker_id=broker_id, broker_epoch=epoch, **fields)
    return await on.call(broker_heartbeat, request, version)


@pytest.mark.parametrize("version", [0, 1])
async def test_a_probe_is_answered_by_the_incarnation_that_is_meant(version: int) -> None:
    async with handling() as on:
        epoch, index = on.controller.broker_epoch, on.controller.image.index
        answer = await beat(on, 1, epoch, version, current_metadata_offset=index)
        assert (answer.error_code, answer.is_fenced, answer.is_caught_up) == (0, False, True)
        assert not (await beat(on, 1, epoch, current_metadata_offset=index - 1)).is_caught_up
        assert (await beat(on, 1, epoch - 1)).error_code == ErrorCode.STALE_BROKER_EPOCH
        assert (await beat(on, 2, epoch)).error_code == ErrorCode.STALE_BROKER_EPOCH
        await on.controller.leave()
        assert (await beat(on, 1, epoch)).error_code == ErrorCode.BROKER_NOT_AVAILABLE


async def test_a_broker_that_goes_is_fenced_before_it_is_answered() -> None:
    on = two_brokers()
    assert (await beat(on, 2, 101, want_shut_down=True)).error_code == ErrorCode.STALE_BROKER_EPOCH
    answer = await beat(on, 2, 102, want_shut_down=True)
    assert (answer.error_code, answer.is_fenced, answer.should_shut_down) == (0, True, True)
    assert not on.controller.image.is_live(2)
    assert on.controller.image.topics["a"].partitions[0].isr == (1,)


# --- AlterPartition ---------------------------------------------------------------------------------------------------


def proposal(topic_id: Any, version: int, *, isr: list[int], index: int = 0, epoch: int = 0) -> AlterPartitionRequest:
    partition = AlterPartitionRequest.PartitionData(partition_index=index, partition_epoch=epoch)
    if version == 2:
        partition.new_isr = isr
    else:
        partition.new_isr_with_epochs = [AlterPartitionRequest.BrokerState(broker_id=member) for member in isr]
    topics = [AlterPartitionRequest.TopicData(topic_id=topic_id, partitions=[partition])]
    return AlterPartitionRequest(broker_id=1, topics=topics)


@pytest.mark.parametrize("version", [2, 3])
async def test_a_leader_gets_another_isr(version: int) -> None:
    on = two_brokers()
    topic = on.controller.image.topics["a"]
    request = proposal(topic.topic_id, version, isr=[1])
    stale = await on.call(alter_partition, request, version)
    assert (stale.error_code, stale.topics) == (ErrorCode.STALE_BROKER_EPOCH, [])
    request.broker_epoch = on.controller.broker_epoch
    response = await on.call(alter_partition, request, version)
    assert response.error_code == 0
    assert response.topics[0].topic_id == topic.topic_id
    (told,) = response.topics[0].partitions
    assert (told.error_code, told.leader_id, told.isr, told.partition_epoch) == (0, 1, [1], 1)
    assert on.controller.image.topics["a"].partitions[0].isr == (1,)
    (again,) = (await on.call(alter_partition, request, version)).topics[0].partitions
    assert again.error_code == ErrorCode.INVALID_UPDATE_VERSION


async def test_a_leader_that_cannot_serve_hands_over() -> None:
    on = two_brokers()
    request = proposal(on.controller.image.topics["a"].topic_id, 3, isr=[2])
    request.broker_epoch = on.controller.broker_epoch
    (told,) = (await on.call(alter_partition, request, 3)).topics[0].partitions
    assert (told.error_code, told.leader_id, told.leader_epoch) == (ErrorCode.NEW_LEADER_ELECTED, 2, 1)


async def test_a_proposal_for_a_topic_that_is_gone() -> None:
    on = two_brokers()
    request = proposal(new_topic_id(), 3, isr=[1])
    request.broker_epoch = on.controller.broker_epoch
    (told,) = (await on.call(alter_partition, request, 3)).topics[0].partitions
    assert told.error_code == ErrorCode.UNKNOWN_TOPIC_ID


# --- AllocateProducerIds ----------------------------------------------------------------------------------------------


async def test_blocks_of_producer_ids_do_not_overlap() -> None:
    on = two_brokers()
    blocks = []
    for broker_id, epoch in ((1, on.controller.broker_epoch), (2, 102)):
        request = AllocateProducerIdsRequest(broker_id=broker_id, broker_epoch=epoch)
        response = await on.call(allocate_producer_ids, request, 0)
        assert response.error_code == 0 and response.producer_id_len > 0
        blocks.append(range(response.producer_id_start, response.producer_id_start + response.producer_id_len))
    assert not set(blocks[0]) & set(blocks[1])
    stale = await on.call(allocate_producer_ids, AllocateProducerIdsRequest(broker_id=2, broker_epoch=3), 0)
    assert stale.error_code == ErrorCode.STALE_BROKER_EPOCH


# --- listeners --------------------------------------------------------------------------------------------------------


async def test_clients_of_other_listeners_are_refused() -> None:
    on = two_brokers(SEPARATE)
    epoch = on.controller.broker_epoch
    beating = BrokerHeartbeatRequest(broker_id=1, broker_epoch=epoch)
    allocating = AllocateProducerIdsRequest(broker_id=1, broker_epoch=epoch)
    altering = AlterPartitionRequest(broker_id=1, broker_epoch=epoch)
    for handler, request in (
        (broker_heartbeat, beating),
        (allocate_producer_ids, allocating),
        (alter_partition, altering),
    ):
        refused = await on.call(handler, request, request.min_version)
        assert refused.error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
        assert (await on.call(handler, request, request.min_version, listener="INSIDE")).error_code == 0


# --- UnregisterBroker -------------------------------------------------------------------------------------------------


async def test_a_broker_is_forgotten_once_it_was_stopped() -> None:
    on = two_brokers()

    async def unregister(broker_id: int) -> Any:
        return await on.call(unregister_broker, UnregisterBrokerRequest(broker_id=broker_id), 0)

    alive = await unregister(2)
    assert alive.error_code == ErrorCode.INVALID_REQUEST and "alive" in alive.error_message
    assert (await unregister(9)).error_code == ErrorCode.BROKER_ID_NOT_REGISTERED
    await on.controller.change(lambda _: Plan(None, (BrokerFenced(2, 102, fenced=True),)))
    gone = await unregister(2)
    assert (gone.error_code, gone.error_message) == (0, None)
    assert set(on.controller.image.brokers) == {1}
