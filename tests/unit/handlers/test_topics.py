"""CreateTopics, DeleteTopics and CreatePartitions, at every version. The rules themselves: tests/unit/cluster."""

from __future__ import annotations

import uuid

import pytest

from millrace.cluster.planning import NewTopic
from millrace.config import ConfigSource
from millrace.errors import ErrorCode
from millrace.handlers.topics import create_partitions, create_topics, delete_topics
from millrace.model import ZERO_UUID
from millrace.wire.messages.topics import CreatePartitionsRequest, CreateTopicsRequest, DeleteTopicsRequest
from support.handling import handling

Creatable = CreateTopicsRequest.CreatableTopic
Config = CreateTopicsRequest.CreatableTopicConfig
Assignment = CreateTopicsRequest.CreatableReplicaAssignment


@pytest.mark.parametrize("version", range(2, 8))
async def test_create(version: int) -> None:
    kept, valueless = Config(name="retention.ms", value="5"), Config(name="retention.ms", value=None)
    async with handling() as on:
        request = CreateTopicsRequest(
            topics=[
                Creatable(name="a", num_partitions=2, replication_factor=1, configs=[kept]),
                Creatable(name="b", num_partitions=-1, replication_factor=-1),
                Creatable(
                    name="c", num_partitions=-1, replication_factor=-1,
                    assignments=[Assignment(partition_index=0, broker_ids=[1])],
                ),
                Creatable(name="d", num_partitions=1, replication_factor=9),
                Creatable(name="e", num_partitions=1, replication_factor=1),
                Creatable(name="e", num_partitions=1, replication_factor=1),
                Creatable(name="f", num_partitions=1, replication_factor=1, configs=[valueless]),
            ]
        )  # fmt: skip
        response = await on.call(create_topics, request, version)
        assert [(topic.name, topic.error_code) for topic in response.topics] == [
            ("a", 0), ("b", 0), ("c", 0), ("d", ErrorCode.INVALID_REPLICATION_FACTOR),
            ("e", ErrorCode.INVALID_REQUEST), ("e", ErrorCode.INVALID_REQUEST), ("f", ErrorCode.INVALID_CONFIG),
        ]  # fmt: skip
        assert response.topics[0].error_message is None and response.topics[3].error_message
        image = on.controller.image
        assert set(image.topics) == {"a", "b", "c"}
        made = response.topics[0]
        assert made.topic_id == (image.topics["a"].topic_id if version >= 7 else ZERO_UUID)
        if version >= 5:
            assert (made.num_partitions, made.replication_factor) == (2, 1)
            settings = {config.name: config for config in made.configs}
            assert settings["retention.ms"].value == "5"
            assert settings["retention.ms"].config_source == ConfigSource.DYNAMIC_TOPIC_CONFIG
            assert settings["segment.bytes"].config_source == ConfigSource.DEFAULT_CONFIG
            assert not settings["segment.bytes"].read_only
        again = await on.call(create_topics, CreateTopicsRequest(topics=request.topics[:1]), version)
        assert again.topics[0].error_code == ErrorCode.TOPIC_ALREADY_EXISTS
        assert "already exists" in (again.topics[0].error_message or ""), "clients look for these words"


async def test_validation_creates_nothing() -> None:
    async with handling() as on:
        topics = [Creatable(name="a", num_partitions=1, replication_factor=1), Creatable(name="")]
        response = await on.call(create_topics, CreateTopicsRequest(topics=topics, validate_only=True), 7)
        assert [topic.error_code for topic in response.topics] == [0, ErrorCode.INVALID_TOPIC_EXCEPTION]
        assert response.topics[0].topic_id == ZERO_UUID and response.topics[0].num_partitions == 1
        assert not on.controller.image.topics


@pytest.mark.parametrize("version", range(1, 6))
async def test_delete_by_name(version: int) -> None:
    async with handling() as on:
        await on.controller.create_topics([NewTopic("a"), NewTopic("b")])
        request = DeleteTopicsRequest(topic_names=["a", "zz", "b", "b"])
        response = await on.call(delete_topics, request, version)
        assert [(topic.name, topic.error_code) for topic in response.responses] == [
            ("a", 0), ("zz", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), ("b", ErrorCode.INVALID_REQUEST),
            ("b", ErrorCode.INVALID_REQUEST),
        ]  # fmt: skip
        assert set(on.controller.image.topics) == {"b"}


async def test_delete_by_id() -> None:
    async with handling() as on:
        (a, b) = await on.controller.create_topics([NewTopic("a"), NewTopic("b")])
        Target = DeleteTopicsRequest.DeleteTopicState  # noqa: N806
        unknown = uuid.UUID(int=77)
        targets = [
            Target(name=None, topic_id=a.topic_id),
            Target(name=None, topic_id=unknown),
            Target(name=None),
            Target(name="b", topic_id=b.topic_id),
        ]
        response = await on.call(delete_topics, DeleteTopicsRequest(topics=targets), 6)
        assert [(topic.name, topic.topic_id, topic.error_code) for topic in response.responses] == [
            ("a", a.topic_id, 0),
            (None, unknown, ErrorCode.UNKNOWN_TOPIC_ID),
            (None, ZERO_UUID, ErrorCode.INVALID_REQUEST),
            ("b", b.topic_id, ErrorCode.INVALID_REQUEST),
        ]
        assert set(on.controller.image.topics) == {"b"}
        response = await on.call(delete_topics, DeleteTopicsRequest(topics=[Target(name="b")]), 6)
        assert response.responses[0].topic_id == b.topic_id and not on.controller.image.topics


@pytest.mark.parametrize("version", range(1, 7))
async def test_deletion_can_be_switched_off(version: int) -> None:
    async with handling({"delete.topic.enable": "false"}) as on:
        await on.controller.create_topics([NewTopic("a")])
        request = DeleteTopicsRequest(topic_names=["a"])
        if version >= 6:
            request = DeleteTopicsRequest(topics=[DeleteTopicsRequest.DeleteTopicState(name="a")])
        response = await on.call(delete_topics, request, version)
        expected = ErrorCode.INVALID_REQUEST if version < 3 else ErrorCode.TOPIC_DELETION_DISABLED
        assert [topic.error_code for topic in response.responses] == [expected]
        assert "a" in on.controller.image.topics


@pytest.mark.parametrize("version", range(4))
async def test_more_partitions(version: int) -> None:
    async with handling() as on:
        await on.controller.create_topics([NewTopic("a"), NewTopic("b", 2)])
        Wanted = CreatePartitionsRequest.CreatePartitionsTopic  # noqa: N806
        named = [CreatePartitionsRequest.CreatePartitionsAssignment(broker_ids=[1])]
        topics = [
            Wanted(name="a", count=3, assignments=None),
            Wanted(name="b", count=3, assignments=named),
            Wanted(name="zz", count=3, assignments=None),
        ]
        checked = await on.call(create_partitions, CreatePartitionsRequest(topics=topics, validate_only=True), version)
        assert len(on.controller.image.topics["a"].partitions) == 1
        response = await on.call(create_partitions, CreatePartitionsRequest(topics=topics), version)
        for answer in (checked, response):
            assert [(topic.name, topic.error_code) for topic in answer.results] == [
                ("a", 0), ("b", 0), ("zz", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
            ]  # fmt: skip
        assert [len(on.controller.image.topics[name].partitions) for name in "ab"] == [3, 3]
        shrunk = await on.call(create_partitions, CreatePartitionsRequest(topics=topics[:1]), version)
        assert shrunk.results[0].error_code == ErrorCode.INVALID_PARTITIONS
