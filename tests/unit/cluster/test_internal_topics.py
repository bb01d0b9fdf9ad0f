"""Internal topics grow with the cluster, and never shrink by themselves."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from millrace.cluster import controller
from millrace.cluster.image import ClusterImage
from millrace.cluster.internal_topics import plan_growth
from millrace.cluster.planning import auto_created_topic, plan_create_topics
from millrace.config import BrokerConfig
from millrace.metadata.deltas import BrokerFenced, BrokerRegistered, PartitionChanged
from millrace.model import CONSUMER_OFFSETS_TOPIC, NO_BROKER, SHARE_STATE_TOPIC, TRANSACTION_STATE_TOPIC
from millrace.testing import Cluster
from millrace.wire.messages.groups import FindCoordinatorRequest
from support.metadata import cluster_of
from support.queues import connect

CONFIG = BrokerConfig({"offsets.topic.num.partitions": "6", "share.coordinator.state.topic.num.partitions": "6"})
NAMES = (CONSUMER_OFFSETS_TOPIC, SHARE_STATE_TOPIC)


def made_on(*brokers: int) -> ClusterImage:
    """A cluster whose internal topics were made when it had these brokers."""
    image = cluster_of(*brokers)
    for name in NAMES:
        plan = plan_create_topics(image, [auto_created_topic(name, image, CONFIG)], CONFIG)
        assert plan.results[0].error is None
        image = image.apply(plan.changes)
    return image


def joined(image: ClusterImage, *brokers: int, rack: str | None = None) -> ClusterImage:
    others = cluster_of(*brokers).brokers
    return image.apply(
        tuple(
            BrokerRegistered(each.broker_id, 900 + each.broker_id, each.endpoints, rack or each.rack)
            for each in others.values()
        )
    )


def grown(image: ClusterImage, config: BrokerConfig = CONFIG) -> ClusterImage:
    """The image when everything that is to be copied has been."""
    image = image.apply(plan_growth(image, config).changes)
    copied = []
    for topic, index, state in image.partitions():
        if state.is_reassigning:
            copied.append(
                PartitionChanged(topic.topic_id, index, replace(state, isr=state.replicas, adding=(), removing=()))
            )
    return image.apply(tuple(copied))


def test_a_broker_that_comes_later_gets_replicas() -> None:
    image = made_on(1)
    assert image.topics[SHARE_STATE_TOPIC].replication_factor == 1
    assert not plan_growth(image, CONFIG).changes
    image = grown(joined(image, 2))
    assert {len(state.replicas) for _, _, state in image.partitions()} == {2}
    image = grown(joined(image, 3, 4))
    for name in NAMES:
        states = image.topics[name].partitions
        assert {len(state.replicas) for state in states} == {3}
        assert {state.replicas[0] for state in states} == {1}, "who led goes on"
        counts = Counter(replica for state in states for replica in state.replicas)
        assert (counts[3], counts[4]) == (3, 3)
    assert not plan_growth(image, CONFIG).results, "that is enough"


def test_more_must_be_in_sync_when_there_are_more() -> None:
    image = made_on(1)
    assert image.topic_overrides(SHARE_STATE_TOPIC)["min.insync.replicas"] == "1"
    image = grown(joined(image, 2, 3))
    assert image.topic_overrides(SHARE_STATE_TOPIC)["min.insync.replicas"] == "1"
    image = grown(image)
    assert image.topic_overrides(SHARE_STATE_TOPIC)["min.insync.replicas"] == "2"
    assert not plan_growth(image, CONFIG).changes


def test_replicas_go_to_racks_that_have_none() -> None:
    config = BrokerConfig({"offsets.topic.replication.factor": "2", "offsets.topic.num.partitions": "6"})
    image = joined(made_on(1), 1, 2, rack="home")
    image = grown(joined(image, 3, rack="other"), config)
    assert {state.replicas for state in image.topics[CONSUMER_OFFSETS_TOPIC].partitions} == {(1, 3)}


def test_nothing_grows_onto_brokers_that_are_gone_or_for_partitions_without_a_leader() -> None:
    image = joined(made_on(1), 2)
    epoch = image.brokers[2].broker_epoch
    assert not plan_growth(image.apply((BrokerFenced(2, epoch, True),)), CONFIG).changes
    topic = image.topics[SHARE_STATE_TOPIC]
    dead = PartitionChanged(topic.topic_id, 0, replace(topic.partitions[0], leader=NO_BROKER))
    changed = {
        (change.topic_id, change.index)
        for change in plan_growth(image.apply((dead,)), CONFIG).changes
        if isinstance(change, PartitionChanged)
    }
    assert (topic.topic_id, 0) not in changed
    assert (topic.topic_id, 1) in changed


def test_the_setting_is_the_limit_and_moves_under_way_are_left_alone() -> None:
    config = BrokerConfig({"offsets.topic.replication.factor": "1"})
    image = joined(made_on(1), 2)
    plan = plan_growth(image, config)
    assert plan.results == 6
    image = image.apply(plan.changes)
    assert {len(state.replicas) for state in image.topics[CONSUMER_OFFSETS_TOPIC].partitions} == {1}
    assert not plan_growth(image, config).changes
    assert image.topic(TRANSACTION_STATE_TOPIC) is None


async def test_a_cluster_does_it_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "GROW_INTERVAL_S", 0.05)
    with Cluster(brokers=3, settings={"offsets.topic.num.partitions": "3"}) as running:
        for broker_id in (2, 3):
            await asyncio.to_thread(running.stop_broker, broker_id)
        async with await connect(running.bootstrap_servers.split(",")[0]) as connection:
            asked = FindCoordinatorRequest(coordinator_keys=["g"], key_type=0)
            assert (await connection.request(asked, 4)).coordinators[0].error_code == 0
        services = running._brokers[1].services
        assert services is not None
        assert services.image.topics[CONSUMER_OFFSETS_TOPIC].replication_factor == 1
        for broker_id in (2, 3):
            await asyncio.to_thread(running.start_broker, broker_id)

        def has_grown(image: ClusterImage) -> bool:
            states = image.topics[CONSUMER_OFFSETS_TOPIC].partitions
            return all(len(state.isr) == 3 and not state.is_reassigning for state in states)

        async with asyncio.timeout(30):
            while not has_grown(services.image):
                await asyncio.sleep(0.02)
