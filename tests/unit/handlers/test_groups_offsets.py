"""OffsetCommit, OffsetFetch and OffsetDelete, at every version."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest

from millrace.cluster.planning import NewTopic, TopicRef
from millrace.errors import ErrorCode
from millrace.handlers.group_offsets import offset_commit, offset_delete, offset_fetch
from millrace.wire.messages.group_offsets import (
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetDeleteRequest,
    OffsetFetchRequest,
)
from support.group_handling import GroupHandling, group_handling

CommitTopic = OffsetCommitRequest.OffsetCommitRequestTopic
CommitPartition = OffsetCommitRequest.OffsetCommitRequestPartition
FetchTopic = OffsetFetchRequest.OffsetFetchRequestTopic
FetchTopics = OffsetFetchRequest.OffsetFetchRequestTopics
FetchGroup = OffsetFetchRequest.OffsetFetchRequestGroup
DeleteTopic = OffsetDeleteRequest.OffsetDeleteRequestTopic
DeletePartition = OffsetDeleteRequest.OffsetDeleteRequestPartition

NOBODY = uuid.UUID(int=999)


@pytest.fixture
async def on() -> AsyncIterator[GroupHandling]:
    async with group_handling() as handling:
        outcomes = await handling.handling.controller.create_topics([NewTopic("orders", 2, 1), NewTopic("users", 1, 1)])
        assert all(outcome.error is None for outcome in outcomes)
        yield handling


def topic_id(on: GroupHandling, name: str) -> uuid.UUID:
    return on.handling.controller.image.topics[name].topic_id


def commit_request(
    on: GroupHandling, offsets: dict[tuple[str, int], int], *, metadata: str | None = "note", **changes: object
) -> OffsetCommitRequest:
    topics: dict[str, CommitTopic] = {}
    for (name, partition), offset in offsets.items():
        known = name in on.handling.controller.image.topics
        topic = topics.setdefault(name, CommitTopic(name=name, topic_id=topic_id(on, name) if known else NOBODY))
        topic.partitions.append(
            CommitPartition(
                partition_index=partition,
                committed_offset=offset,
                committed_leader_epoch=4,
                committed_metadata=metadata,
            )
        )
    return OffsetCommitRequest(group_id="g", topics=list(topics.values()), **changes)


def errors_of(response: OffsetCommitResponse) -> list[list[int]]:
    return [[partition.error_code for partition in topic.partitions] for topic in response.topics]


@pytest.mark.parametrize("version", range(2, 11))
async def test_commit(on: GroupHandling, version: int) -> None:
    offsets = {("orders", 0): 5, ("orders", 7): 6, ("nothing", 0): 7, ("users", 0): 8, ("orders", -1): 9}
    response = await on.call(offset_commit, commit_request(on, offsets), version)
    missing = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    unknown = ErrorCode.UNKNOWN_TOPIC_ID if version >= 10 else missing
    assert errors_of(response) == [[0, missing, missing], [unknown], [0]]
    if version >= 10:
        assert response.topics[0].topic_id == topic_id(on, "orders")
    else:
        assert [topic.name for topic in response.topics] == ["orders", "nothing", "users"]
    held = await on.groups.fetch_offsets("g")
    assert {(topic, index): each.offset for topic, found in held.items() for index, each in found.items()} == {
        ("orders", 0): 5, ("users", 0): 8,
    }  # fmt: skip
    committed = held["orders"][0]
    assert (committed.metadata, committed.leader_epoch) == ("note", 4 if version >= 6 else -1)
    assert committed.topic_id == topic_id(on, "orders")


async def test_a_commit_of_nothing_or_of_nothing_known_asks_nobody(on: GroupHandling) -> None:
    assert (await on.call(offset_commit, OffsetCommitRequest(group_id="g"), 9)).topics == []
    response = await on.call(offset_commit, commit_request(on, {("nothing", 0): 1}), 9)
    assert errors_of(response) == [[ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]]
    assert on.groups.describe("g") is None


@pytest.mark.parametrize("version", range(2, 11))
async def test_an_error_of_the_group_reaches_every_partition(on: GroupHandling, version: int) -> None:
    request = commit_request(
        on, {("orders", 0): 1, ("users", 0): 1}, generation_id_or_member_epoch=3, member_id="ghost"
    )
    missing = ErrorCode.GROUP_ID_NOT_FOUND if version >= 9 else ErrorCode.ILLEGAL_GENERATION
    assert errors_of(await on.call(offset_commit, request, version)) == [[missing], [missing]]


async def test_metadata_is_limited_and_may_be_null(on: GroupHandling) -> None:
    response = await on.call(offset_commit, commit_request(on, {("orders", 0): 1}, metadata="x" * 4_097), 9)
    assert errors_of(response) == [[ErrorCode.OFFSET_METADATA_TOO_LARGE]]
    response = await on.call(offset_commit, commit_request(on, {("orders", 0): 1}, metadata=None), 9)
    assert errors_of(response) == [[0]]
    assert (await on.groups.fetch_offsets("g"))["orders"][0].metadata == ""


@pytest.mark.parametrize("version", [2, 4])
async def test_a_retention_of_its_own(on: GroupHandling, version: int) -> None:
    request = commit_request(on, {("orders", 0): 1}, retention_time_ms=5_000)
    await on.call(offset_commit, request, version)
    committed = (await on.groups.fetch_offsets("g"))["orders"][0]
    assert committed.expire_timestamp_ms == on.clock.wall_ms() + 5_000


@pytest.mark.parametrize("version", range(1, 8))
async def test_fetch_one_group(on: GroupHandling, version: int) -> None:
    await on.call(offset_commit, commit_request(on, {("orders", 0): 5, ("users", 0): 8}), 9)
    request = OffsetFetchRequest(
        group_id="g",
        topics=[FetchTopic(name="orders", partition_indexes=[0, 1]), FetchTopic(name="nothing", partition_indexes=[0])],
        require_stable=version >= 7,
    )
    response = await on.call(offset_fetch, request, version)
    assert response.error_code == 0
    assert [
        (topic.name, [(each.partition_index, each.committed_offset, each.metadata) for each in topic.partitions])
        for topic in response.topics
    ] == [("orders", [(0, 5, "note"), (1, -1, "")]), ("nothing", [(0, -1, "")])]
    if version >= 5:
        assert response.topics[0].partitions[0].committed_leader_epoch == 4
        assert response.topics[0].partitions[1].committed_leader_epoch == -1
    if version >= 2:
        everything = await on.call(offset_fetch, OffsetFetchRequest(group_id="g", topics=None), version)
        assert {topic.name for topic in everything.topics} == {"orders", "users"}
        nobody = await on.call(offset_fetch, OffsetFetchRequest(group_id="none", topics=None), version)
        assert (nobody.error_code, nobody.topics) == (0, [])


@pytest.mark.parametrize("version", range(8, 11))
async def test_fetch_several_groups(on: GroupHandling, version: int) -> None:
    await on.call(offset_commit, commit_request(on, {("orders", 0): 5, ("users", 0): 8}), 9)
    request = OffsetFetchRequest(
        groups=[
            FetchGroup(
                group_id="g",
                topics=[
                    FetchTopics(name="orders", topic_id=topic_id(on, "orders"), partition_indexes=[0, 1]),
                    FetchTopics(name="nothing", topic_id=NOBODY, partition_indexes=[3]),
                ],
            ),
            FetchGroup(group_id="g", topics=None),
            FetchGroup(group_id="none", topics=None),
        ],
        require_stable=True,
    )
    some, everything, nobody = (await on.call(offset_fetch, request, version)).groups
    orders, nothing = some.topics
    assert [(each.committed_offset, each.error_code) for each in orders.partitions] == [(5, 0), (-1, 0)]
    assert [(each.committed_offset, each.error_code) for each in nothing.partitions] == [
        (-1, ErrorCode.UNKNOWN_TOPIC_ID if version >= 10 else 0),
    ]  # fmt: skip
    if version >= 10:
        assert {topic.topic_id for topic in everything.topics} == {topic_id(on, "orders"), topic_id(on, "users")}
    else:
        assert {topic.name for topic in everything.topics} == {"orders", "users"}
    assert (nobody.group_id, nobody.topics, nobody.error_code) == ("none", [], 0)


async def test_an_offset_of_an_earlier_topic_of_the_same_name_is_not_returned(on: GroupHandling) -> None:
    await on.call(offset_commit, commit_request(on, {("users", 0): 8}), 10)
    await on.handling.controller.delete_topics([TopicRef("users")])
    await on.handling.controller.create_topics([NewTopic("users", 1, 1)])
    topic = FetchTopics(topic_id=topic_id(on, "users"), partition_indexes=[0])
    request = OffsetFetchRequest(groups=[FetchGroup(group_id="g", topics=[topic])])
    (group,) = (await on.call(offset_fetch, request, 10)).groups
    assert group.topics[0].partitions[0].committed_offset == -1


@pytest.mark.parametrize("version", range(1, 11))
async def test_a_broker_that_does_not_coordinate_says_so(on: GroupHandling, version: int) -> None:
    for index in range(3):
        on.groups.partition_lost(index)
    code = ErrorCode.NOT_COORDINATOR
    if version >= 8:
        topics = [FetchTopics(name="orders", topic_id=topic_id(on, "orders"), partition_indexes=[0])]
        (group,) = (
            await on.call(offset_fetch, OffsetFetchRequest(groups=[FetchGroup(group_id="g", topics=topics)]), version)
        ).groups
        assert (group.error_code, group.topics) == (code, [])
    else:
        request = OffsetFetchRequest(group_id="g", topics=[FetchTopic(name="orders", partition_indexes=[0])])
        response = await on.call(offset_fetch, request, version)
        if version >= 2:
            assert (response.error_code, response.topics) == (code, [])
        else:
            assert response.topics[0].partitions[0].error_code == code
    if version >= 2:
        committed = await on.call(offset_commit, commit_request(on, {("orders", 0): 1}), version)
        assert errors_of(committed) == [[code]]


async def test_delete(on: GroupHandling) -> None:
    await on.call(offset_commit, commit_request(on, {("orders", 0): 5, ("users", 0): 8}), 9)
    request = OffsetDeleteRequest(
        group_id="g",
        topics=[
            DeleteTopic(name="orders", partitions=[DeletePartition(partition_index=index) for index in (0, 9)]),
            DeleteTopic(name="nothing", partitions=[DeletePartition(partition_index=0)]),
        ],
    )
    response = await on.call(offset_delete, request, 0)
    assert response.error_code == 0
    assert [[each.error_code for each in topic.partitions] for topic in response.topics] == [
        [0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION], [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION],
    ]  # fmt: skip
    assert set(await on.groups.fetch_offsets("g")) == {"users"}
    request.group_id = "none"
    assert (await on.call(offset_delete, request, 0)).error_code == ErrorCode.GROUP_ID_NOT_FOUND
    request.group_id = ""
    assert (await on.call(offset_delete, request, 0)).error_code == ErrorCode.INVALID_GROUP_ID
