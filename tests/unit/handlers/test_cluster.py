"""Metadata, DescribeCluster and DescribeTopicPartitions, at every version."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any
from unittest.mock import AsyncMock

import pytest

from millrace.cluster.planning import NewTopic, Plan
from millrace.errors import ApiError, ErrorCode
from millrace.handlers.cluster import describe_cluster, describe_topic_partitions, metadata
from millrace.handlers.registry import load
from millrace.metadata.deltas import (
    BrokerFenced,
    BrokerRegistered,
    Change,
    Endpoint,
    PartitionChanged,
    PartitionState,
    TopicCreated,
)
from millrace.model import ZERO_UUID, new_topic_id
from millrace.wire.keys import ApiKey
from millrace.wire.messages.cluster import (
    DescribeClusterRequest,
    DescribeTopicPartitionsRequest,
    MetadataRequest,
    MetadataResponse,
)
from support.handling import Handling, deciding, handling
from support.metadata import ENDPOINT, cluster_of

Topic = MetadataRequest.MetadataRequestTopic


def named(*names: str | None) -> list[MetadataRequest.MetadataRequestTopic]:
    return [Topic(name=name) for name in names]


def codes(response: MetadataResponse) -> dict[str | None, int]:
    return {topic.name: topic.error_code for topic in response.topics}


def cluster(*changes: Change) -> Handling:
    """Broker 1 is the controller; the rest is in `changes`."""
    return deciding(cluster_of(1).apply(changes))


@pytest.mark.parametrize("version", range(14))
async def test_all_topics_and_the_cluster(version: int) -> None:
    async with handling({"broker.rack": "left"}) as on:
        await on.controller.create_topics([NewTopic("a", 2), NewTopic("__consumer_offsets")])
        everything = [] if version == 0 else None
        response = await on.call(metadata, MetadataRequest(topics=everything), version)
        (broker,) = response.brokers
        assert (broker.node_id, broker.host, broker.port) == (1, "told.example", 19092)
        topics = {topic.name: topic for topic in response.topics}
        assert set(topics) == {"a", "__consumer_offsets"}
        a = topics["a"]
        assert [(p.partition_index, p.error_code, p.leader_id) for p in a.partitions] == [(0, 0, 1), (1, 0, 1)]
        assert a.partitions[0].replica_nodes == a.partitions[0].isr_nodes == [1]
        if version >= 1:
            assert broker.rack == "left" and response.controller_id == 1
            assert topics["__consumer_offsets"].is_internal and not a.is_internal
        if version >= 2:
            assert response.cluster_id == on.controller.image.cluster_id
        if version >= 7:
            assert a.partitions[0].leader_epoch == 0
        assert a.topic_id == (on.controller.image.topics["a"].topic_id if version >= 10 else ZERO_UUID)


def test_librdkafkas_padded_null_list_is_understood() -> None:
    padded = bytes.fromhex("00000000010000")
    request = load()[ApiKey.METADATA].decode(13, memoryview(padded), 0)
    assert request.topics is None and not request.allow_auto_topic_creation


@pytest.mark.parametrize("version", range(1, 14))
async def test_no_topics(version: int) -> None:
    async with handling() as on:
        await on.controller.create_topics([NewTopic("a")])
        assert (await on.call(metadata, MetadataRequest(topics=[]), version)).topics == []


@pytest.mark.parametrize("version", range(14))
async def test_auto_creation(version: int) -> None:
    async with handling({"num.partitions": "3"}) as on:
        response = await on.call(metadata, MetadataRequest(topics=named("new", "bad name", "new")), version)
        assert codes(response) == {"new": 0, "bad name": ErrorCode.INVALID_TOPIC_EXCEPTION}
        assert len(response.topics[0].partitions) == 3 and len(response.topics) == 2


@pytest.mark.parametrize("version", range(4, 14))
async def test_auto_creation_can_be_declined(version: int) -> None:
    async with handling() as on:
        request = MetadataRequest(topics=named("new", "bad name"), allow_auto_topic_creation=False)
        response = await on.call(metadata, request, version)
        assert codes(response) == {
            "new": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            "bad name": ErrorCode.INVALID_TOPIC_EXCEPTION,
        }
        assert not on.controller.image.topics


async def test_auto_creation_can_be_switched_off() -> None:
    async with handling({"auto.create.topics.enable": "false"}) as on:
        response = await on.call(metadata, MetadataRequest(topics=named("new")), 9)
        assert codes(response) == {"new": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}


async def test_auto_creation_that_cannot_be_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with handling({"default.replication.factor": "3"}) as on:
        response = await on.call(metadata, MetadataRequest(topics=named("new", "__consumer_offsets")), 9)
        assert codes(response) == {"new": ErrorCode.INVALID_REPLICATION_FACTOR, "__consumer_offsets": 0}
    async with handling() as on:
        unreachable = ApiError(ErrorCode.NOT_CONTROLLER, "there is no controller at the moment")
        monkeypatch.setattr(on.controller, "ensure_topics", AsyncMock(side_effect=unreachable))
        response = await on.call(metadata, MetadataRequest(topics=named("new")), 9)
        assert codes(response) == {"new": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}


@pytest.mark.parametrize("version", [12, 13])
async def test_topics_by_id(version: int) -> None:
    async with handling() as on:
        (created,) = await on.controller.create_topics([NewTopic("a")])
        unknown = uuid.UUID(int=77)
        request = MetadataRequest(
            topics=[Topic(name=None, topic_id=created.topic_id), Topic(name=None, topic_id=unknown)]
        )
        response = await on.call(metadata, request, version)
        assert [(t.name, t.topic_id, t.error_code) for t in response.topics] == [
            ("a", created.topic_id, 0),
            (None, unknown, ErrorCode.UNKNOWN_TOPIC_ID),
        ]


@pytest.mark.parametrize("version", [10, 11])
async def test_ids_have_no_meaning_yet_in_v10_and_v11(version: int) -> None:
    async with handling() as on:
        request = MetadataRequest(topics=[Topic(name=None, topic_id=uuid.UUID(int=77)), Topic(name="a")])
        response = await on.call(metadata, request, version)
        assert [topic.error_code for topic in response.topics] == [ErrorCode.INVALID_REQUEST] * 2
        assert not on.controller.image.topics


async def test_allowed_operations() -> None:
    async with handling() as on:
        await on.controller.create_topics([NewTopic("a")])
        silent = await on.call(metadata, MetadataRequest(topics=named("a")), 8)
        assert silent.cluster_authorized_operations == silent.topics[0].topic_authorized_operations == -(2**31)
        request = MetadataRequest(
            topics=named("a"), include_cluster_authorized_operations=True, include_topic_authorized_operations=True
        )
        told = await on.call(metadata, request, 10)
        assert told.cluster_authorized_operations == 8096 and told.topics[0].topic_authorized_operations == 3576


@pytest.mark.parametrize(
    ("version", "code"),
    [(0, ErrorCode.LEADER_NOT_AVAILABLE), (5, ErrorCode.LEADER_NOT_AVAILABLE), (6, ErrorCode.LISTENER_NOT_FOUND)],
)
async def test_a_leader_without_this_listener(version: int, code: ErrorCode) -> None:
    on = cluster(
        BrokerRegistered(2, 7, (Endpoint("INSIDE", "b2", 1),)),
        TopicCreated("a", new_topic_id(), (PartitionState((2, 1), (2, 1), 2, 1, 1),)),
    )
    response = await on.call(metadata, MetadataRequest(topics=named("a")), version)
    (partition,) = response.topics[0].partitions
    assert (partition.error_code, partition.leader_id) == (code, -1)
    assert [broker.node_id for broker in response.brokers] == [1]
    inside = await on.call(metadata, MetadataRequest(topics=named("a")), version, listener="INSIDE")
    assert [(broker.node_id, broker.host) for broker in inside.brokers] == [(1, "told.example"), (2, "b2")]
    assert inside.topics[0].partitions[0].leader_id == 2


@pytest.mark.parametrize("version", [0, 1, 5, 13])
async def test_dead_replicas_and_leaders(version: int) -> None:
    states = (PartitionState((1, 2), (1,), 1, 1, 1), PartitionState((2,), (2,), -1, 1, 1))
    on = cluster(BrokerRegistered(2, 7, (ENDPOINT,), fenced=True), TopicCreated("a", new_topic_id(), states))
    response = await on.call(metadata, MetadataRequest(topics=named("a")), version)
    led, lost = response.topics[0].partitions
    assert (lost.error_code, lost.leader_id) == (ErrorCode.LEADER_NOT_AVAILABLE, -1)
    assert led.leader_id == 1
    if version == 0:
        assert led.error_code == ErrorCode.REPLICA_NOT_AVAILABLE and led.replica_nodes == [1]
    else:
        assert led.error_code == 0 and led.replica_nodes == [1, 2]
    if version >= 5:
        assert led.offline_replicas == lost.offline_replicas == [2]


@pytest.mark.parametrize("version", range(3))
async def test_describe_cluster(version: int) -> None:
    on = cluster(BrokerRegistered(2, 7, (ENDPOINT,), "right", fenced=True))
    response = await on.call(describe_cluster, DescribeClusterRequest(), version)
    assert (response.error_code, response.controller_id) == (0, 1)
    assert response.cluster_id == on.controller.image.cluster_id
    assert [broker.broker_id for broker in response.brokers] == [1]
    assert response.cluster_authorized_operations == -(2**31)
    request = DescribeClusterRequest(include_cluster_authorized_operations=True)
    assert (await on.call(describe_cluster, request, version)).cluster_authorized_operations == 8096
    if version >= 1:
        for kind, code in ((2, ErrorCode.MISMATCHED_ENDPOINT_TYPE), (9, ErrorCode.UNSUPPORTED_ENDPOINT_TYPE)):
            refused = await on.call(describe_cluster, DescribeClusterRequest(endpoint_type=kind), version)
            assert refused.error_code == code and not refused.brokers
    if version >= 2:
        everybody = await on.call(describe_cluster, DescribeClusterRequest(include_fenced_brokers=True), version)
        assert [(broker.broker_id, broker.is_fenced, broker.rack) for broker in everybody.brokers] == [
            (1, False, None), (2, True, "right"),
        ]  # fmt: skip


# --- DescribeTopicPartitions ------------------------------------------------------------------------------------------


async def pages(on: Handling, limit: int, *names: str) -> list[list[tuple[str, list[int]]]]:
    """All pages of a description, as (topic, partitions) each."""
    request = DescribeTopicPartitionsRequest(
        topics=[DescribeTopicPartitionsRequest.TopicRequest(name=name) for name in names],
        response_partition_limit=limit,
    )
    found = []
    while True:
        response: Any = await on.call(describe_topic_partitions, request, 0)
        found.append([(t.name, [p.partition_index for p in t.partitions]) for t in response.topics])
        assert all(topic.error_code == 0 for topic in response.topics)
        if response.next_cursor is None:
            return found
        request.cursor = DescribeTopicPartitionsRequest.Cursor(
            topic_name=response.next_cursor.topic_name, partition_index=response.next_cursor.partition_index
        )
        assert len(found) < 50


async def test_pages_of_partitions() -> None:
    async with handling() as on:
        await on.controller.create_topics([NewTopic("b", 3), NewTopic("a", 2), NewTopic("c", 1)])
        whole = [("a", [0, 1]), ("b", [0, 1, 2]), ("c", [0])]
        assert await pages(on, 2000) == [whole]
        assert await pages(on, 0) == await pages(on, 1) == [
            [(name, [index])] for name, indexes in whole for index in indexes
        ]  # fmt: skip
        assert await pages(on, 4) == [[("a", [0, 1]), ("b", [0, 1])], [("b", [2]), ("c", [0])]]
        assert await pages(on, 2, "c", "b", "b") == [[("b", [0, 1])], [("b", [2]), ("c", [0])]]


async def test_the_broker_limits_a_page() -> None:
    async with handling({"max.request.partition.size.limit": "2"}) as on:
        await on.controller.create_topics([NewTopic("a", 3)])
        assert await pages(on, 2000) == [[("a", [0, 1])], [("a", [2])]]


async def test_unknown_topics_and_bad_cursors() -> None:
    async with handling() as on:
        await on.controller.create_topics([NewTopic("m", 1)])
        Wanted = DescribeTopicPartitionsRequest.TopicRequest  # noqa: N806
        request = DescribeTopicPartitionsRequest(topics=[Wanted(name="zz"), Wanted(name="m"), Wanted(name="a b")])
        response = await on.call(describe_topic_partitions, request, 0)
        assert [(topic.name, topic.error_code) for topic in response.topics] == [
            ("a b", ErrorCode.INVALID_TOPIC_EXCEPTION), ("m", 0), ("zz", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ]  # fmt: skip
        assert response.topics[1].partitions[0].leader_id == 1
        assert response.topics[1].topic_authorized_operations == 3576
        request.cursor = DescribeTopicPartitionsRequest.Cursor(topic_name="n", partition_index=5)
        response = await on.call(describe_topic_partitions, request, 0)
        assert [topic.name for topic in response.topics] == ["zz"]
        request.cursor = DescribeTopicPartitionsRequest.Cursor(topic_name="m", partition_index=5)
        response = await on.call(describe_topic_partitions, request, 0)
        assert response.topics[0].partitions == [] and response.next_cursor is None
        request.cursor = DescribeTopicPartitionsRequest.Cursor(topic_name="m", partition_index=-1)
        response = await on.call(describe_topic_partitions, request, 0)
        assert {topic.error_code for topic in response.topics} == {ErrorCode.INVALID_REQUEST}


async def test_pages_tell_of_missing_leaders() -> None:
    states = (
        PartitionState((1, 2), (1, 2), 1, 3),
        PartitionState((2, 1), (2, 1), 2, 4),
        PartitionState((2,), (2,), -1, 5),
    )
    on = cluster(BrokerRegistered(2, 7, (ENDPOINT,), fenced=True), TopicCreated("a", new_topic_id(), states))
    wanted = [DescribeTopicPartitionsRequest.TopicRequest(name="a")]
    response = await on.call(describe_topic_partitions, DescribeTopicPartitionsRequest(topics=wanted), 0)
    gone = ErrorCode.LEADER_NOT_AVAILABLE
    assert [
        (each.error_code, each.leader_id, each.leader_epoch, each.offline_replicas)
        for each in response.topics[0].partitions
    ] == [(0, 1, 3, [2]), (gone, -1, 4, [2]), (gone, -1, 5, [2])]


@pytest.mark.parametrize("wanted", [None, named("a")])
async def test_an_answer_waits_for_the_decision_about_a_leader_that_seems_dead(wanted: Any) -> None:
    topic_id = new_topic_id()
    states = [PartitionState((2, 3), (2, 3), leader, 0, 0) for leader in (2, 3)]
    on = deciding(cluster_of(1, 2, 3).apply((TopicCreated("a", topic_id, tuple(states)),)))
    presence = on.services.presence
    presence.lost(2)
    answer = asyncio.create_task(on.call(metadata, MetadataRequest(topics=wanted), 12))
    while not presence._undecided:
        await asyncio.sleep(0)
    assert not answer.done()
    led_by_3 = PartitionChanged(topic_id, 0, PartitionState((2, 3), (3,), 3, 1, 1))
    decision = (BrokerFenced(2, 102, fenced=True), led_by_3)
    before = on.controller.image
    await on.controller.change(lambda _image: Plan(None, decision))
    presence.follow(before, on.controller.image, decision)
    (topic,) = (await answer).topics
    assert [(p.error_code, p.leader_id, p.leader_epoch) for p in topic.partitions] == [(0, 3, 1), (0, 3, 0)]


async def test_the_news_of_a_death_may_come_a_moment_after_the_question() -> None:
    state = PartitionState((2, 3), (2, 3), 2, 0, 0)
    on = deciding(cluster_of(1, 2, 3).apply((TopicCreated("a", new_topic_id(), (state,)),)))
    presence = on.services.presence
    answer = asyncio.create_task(on.call(metadata, MetadataRequest(topics=named("a")), 12))
    await asyncio.sleep(0)
    presence.lost(2)
    while not presence._undecided:
        await asyncio.sleep(0)
    assert not answer.done()
    presence.reached(2)
    (topic,) = (await answer).topics
    assert topic.partitions[0].leader_id == 2


async def test_an_answer_about_other_leaders_does_not_wait() -> None:
    state = PartitionState((3,), (3,), 3, 0, 0)
    on = deciding(cluster_of(1, 2, 3).apply((TopicCreated("a", new_topic_id(), (state,)),)))
    on.services.presence.lost(2)
    (topic,) = (await on.call(metadata, MetadataRequest(topics=named("a")), 12)).topics
    assert topic.partitions[0].leader_id == 3
    assert on.services.presence.doubts
