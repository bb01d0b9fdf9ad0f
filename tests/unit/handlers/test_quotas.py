"""DescribeClientQuotas and AlterClientQuotas, and the quota on changes of metadata. The rules: tests/unit/cluster."""

from __future__ import annotations

import pytest

from millrace.clock import ManualClock
from millrace.errors import ErrorCode
from millrace.handlers.cluster import metadata
from millrace.handlers.quotas import alter_client_quotas, describe_client_quotas
from millrace.handlers.topics import create_partitions, create_topics, delete_topics
from millrace.security.metering import ClientQuotas
from millrace.security.quotas import CLIENT_ID, quota_entity
from millrace.wire.messages.cluster import MetadataRequest
from millrace.wire.messages.quotas import AlterClientQuotasRequest, DescribeClientQuotasRequest
from millrace.wire.messages.topics import CreatePartitionsRequest, CreateTopicsRequest, DeleteTopicsRequest
from support.handling import handling

Alter = AlterClientQuotasRequest
Describe = DescribeClientQuotasRequest
Creatable = CreateTopicsRequest.CreatableTopic


def alteration(key: str, value: float | None, **parts: str | None) -> AlterClientQuotasRequest.EntryData:
    return Alter.EntryData(
        entity=[Alter.EntityData(entity_type=kind.replace("_", "-"), entity_name=name) for kind, name in parts.items()],
        ops=[Alter.OpData(key=key, value=value or 0.0, remove=value is None)],
    )


@pytest.mark.parametrize("version", [0, 1])
async def test_quotas_are_set_described_and_removed(version: int) -> None:
    async with handling() as on:
        request = Alter(
            entries=[
                alteration("producer_byte_rate", 1000.0, user="alice", client_id=None),
                alteration("producer_byte_rate", -1.0, user="bob"),
            ]
        )
        response = await on.call(alter_client_quotas, request, version)
        assert [entry.error_code for entry in response.entries] == [0, ErrorCode.INVALID_REQUEST]
        assert response.entries[0].error_message is None and response.entries[1].error_message
        assert [(part.entity_type, part.entity_name) for part in response.entries[0].entity] == [
            ("user", "alice"), ("client-id", None),
        ]  # fmt: skip
        part = Describe.ComponentData(entity_type="user", match_type=0, match="alice")
        found = await on.call(describe_client_quotas, Describe(components=[part]), version)
        assert found.error_code == 0 and found.error_message is None
        (entry,) = found.entries
        assert {each.entity_type: each.entity_name for each in entry.entity} == {"user": "alice", "client-id": None}
        assert [(each.key, each.value) for each in entry.values] == [("producer_byte_rate", 1000.0)]
        strict = await on.call(describe_client_quotas, Describe(components=[part], strict=True), version)
        assert strict.entries == []
        gone = Alter(entries=[alteration("producer_byte_rate", None, user="alice", client_id=None)])
        assert (await on.call(alter_client_quotas, gone, version)).entries[0].error_code == 0
        assert not (await on.call(describe_client_quotas, Describe(), version)).entries


async def test_validation_changes_nothing() -> None:
    async with handling() as on:
        request = Alter(entries=[alteration("producer_byte_rate", 1.0, user="alice")], validate_only=True)
        assert (await on.call(alter_client_quotas, request, 1)).entries[0].error_code == 0
        assert not on.controller.image.quotas


async def test_a_filter_that_means_nothing_is_an_error() -> None:
    async with handling() as on:
        part = Describe.ComponentData(entity_type="planet", match_type=2, match=None)
        found = await on.call(describe_client_quotas, Describe(components=[part]), 1)
        assert found.error_code == ErrorCode.UNSUPPORTED_VERSION and found.entries is None


# --- the quota on changes of metadata ---------------------------------------------------------------------------------


def limited(rate: float) -> ClientQuotas:
    quotas = ClientQuotas(clock=ManualClock())
    quotas.take({quota_entity({CLIENT_ID: "test"}): {"controller_mutation_rate": rate}})
    return quotas


def creation(*names: str, partitions: int) -> CreateTopicsRequest:
    return CreateTopicsRequest(
        topics=[Creatable(name=name, num_partitions=partitions, replication_factor=1) for name in names]
    )


async def test_creation_beyond_the_quota_is_refused_topic_by_topic() -> None:
    async with handling(quotas=limited(1.0)) as on:
        response = await on.call(create_topics, creation("a", "b", partitions=12), 6)
        assert [topic.error_code for topic in response.topics] == [0, ErrorCode.THROTTLING_QUOTA_EXCEEDED]
        assert response.throttle_time_ms == 1000, "eleven are there at once; one is missing"
        assert set(on.controller.image.topics) == {"a"}
        response = await on.call(create_topics, creation("c", partitions=1), 6, client_id="another")
        assert response.topics[0].error_code == 0 and response.throttle_time_ms == 0


async def test_an_older_client_is_made_to_wait_instead() -> None:
    async with handling(quotas=limited(1.0)) as on:
        response = await on.call(create_topics, creation("a", "b", partitions=12), 5)
        assert [topic.error_code for topic in response.topics] == [0, 0]
        assert response.throttle_time_ms == 13_000


async def test_what_did_not_happen_is_not_counted() -> None:
    async with handling(quotas=limited(1.0)) as on:
        validated = creation("a", partitions=50)
        validated.validate_only = True
        assert (await on.call(create_topics, validated, 7)).topics[0].error_code == 0
        bad = creation("..", partitions=50)
        assert (await on.call(create_topics, bad, 7)).topics[0].error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
        assert (await on.call(create_topics, creation("a", partitions=11), 7)).topics[0].error_code == 0
        assert (await on.call(create_topics, creation("b", partitions=11), 7)).topics[0].error_code == 0
        assert (await on.call(create_topics, creation("c", partitions=1), 7)).topics[0].error_code != 0


async def test_deletion_and_more_partitions_count_as_well() -> None:
    async with handling(quotas=limited(1.0)) as on:
        await on.call(create_topics, creation("a", partitions=5), 7, client_id="another")
        more = CreatePartitionsRequest(
            topics=[CreatePartitionsRequest.CreatePartitionsTopic(name="a", count=25, assignments=None)]
        )
        assert (await on.call(create_partitions, more, 3)).results[0].error_code == 0
        more.topics[0].count = 26
        refused = await on.call(create_partitions, more, 3)
        assert refused.results[0].error_code == ErrorCode.THROTTLING_QUOTA_EXCEEDED
        assert refused.throttle_time_ms == 9000
        gone = await on.call(delete_topics, DeleteTopicsRequest(topic_names=["a"]), 5)
        assert gone.responses[0].error_code == ErrorCode.THROTTLING_QUOTA_EXCEEDED and "a" in on.controller.image.topics
        gone = await on.call(delete_topics, DeleteTopicsRequest(topic_names=["a"]), 4)
        assert gone.responses[0].error_code == 0 and gone.throttle_time_ms == 34_000


async def test_topics_are_not_made_by_the_way_once_the_quota_is_used_up() -> None:
    async with handling(quotas=limited(1.0)) as on:
        await on.call(create_topics, creation("a", partitions=12), 7)
        wanted = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name="new")])
        (topic,) = (await on.call(metadata, wanted, 9)).topics
        assert topic.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and "new" not in on.controller.image.topics
