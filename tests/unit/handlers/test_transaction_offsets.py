"""TxnOffsetCommit at every version, and what OffsetFetch says of offsets of open transactions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from millrace.cluster.planning import NewTopic
from millrace.config import BrokerConfig
from millrace.errors import ApiError, ErrorCode
from millrace.groups.modern.protocol import ModernHeartbeat
from millrace.handlers.group_offsets import offset_commit, offset_delete, offset_fetch
from millrace.handlers.transaction_offsets import txn_offset_commit
from millrace.replication.state_topic import yield_to_loop
from millrace.wire.messages.group_offsets import OffsetCommitRequest, OffsetDeleteRequest, OffsetFetchRequest
from millrace.wire.messages.transactions import TxnOffsetCommitRequest, TxnOffsetCommitResponse
from support.group_handling import GroupHandling, group_handling
from support.groups import join_request

Topic = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
Partition = TxnOffsetCommitRequest.TxnOffsetCommitRequestPartition
VERSIONS = range(6)
PRODUCER = 1_000
UNSTABLE = ErrorCode.UNSTABLE_OFFSET_COMMIT


@dataclass
class Gate:
    """The coordinators of transactions."""

    answer: ErrorCode = ErrorCode.NONE
    failure: ErrorCode | None = None
    asked: list[tuple[Any, ...]] = field(default_factory=list)

    async def admit(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: list[tuple[str, int]],
        *,
        add: bool,
    ) -> dict[tuple[str, int], ErrorCode]:
        self.asked.append((transactional_id, producer_id, producer_epoch, partitions, add))
        if self.failure is not None:
            raise ApiError(self.failure)
        return dict.fromkeys(partitions, self.answer)


@pytest.fixture
async def on() -> AsyncIterator[GroupHandling]:
    async with group_handling() as handling:
        outcomes = await handling.handling.controller.create_topics([NewTopic("orders", 2, 1), NewTopic("users", 1, 1)])
        assert all(outcome.error is None for outcome in outcomes)
        yield handling


@pytest.fixture
def gate(on: GroupHandling) -> Gate:
    gate = Gate()
    on.handling.services.transaction_gate = gate
    return gate


def request_of(offsets: dict[tuple[str, int], int], **changes: Any) -> TxnOffsetCommitRequest:
    topics: dict[str, Topic] = {}
    for (name, partition), offset in offsets.items():
        topics.setdefault(name, Topic(name=name)).partitions.append(
            Partition(
                partition_index=partition,
                committed_offset=offset,
                committed_leader_epoch=4,
                committed_metadata=changes.get("metadata", "note"),
            )
        )
    changes.pop("metadata", None)
    named = {"transactional_id": "copy", "group_id": "g", "producer_id": PRODUCER, "producer_epoch": 2, **changes}
    return TxnOffsetCommitRequest(topics=list(topics.values()), **named)


def errors_of(response: TxnOffsetCommitResponse) -> list[list[int]]:
    return [[partition.error_code for partition in topic.partitions] for topic in response.topics]


async def error_of(on: GroupHandling, version: int, **changes: Any) -> int:
    ((code,),) = errors_of(await on.call(txn_offset_commit, request_of({("orders", 0): 5}, **changes), version))
    return code


async def end(on: GroupHandling, *, commit: bool, producer_epoch: int = 2) -> None:
    index = on.groups.partition_for("g")
    appended = on.log[index].end_transaction(PRODUCER, producer_epoch, commit=commit)
    on.groups.transaction_ended(index, PRODUCER, commit, appended.last_offset)
    for _ in range(5):
        await yield_to_loop()


@pytest.mark.parametrize("version", VERSIONS)
async def test_commit(on: GroupHandling, gate: Gate, version: int) -> None:
    offsets = {("orders", 0): 5, ("orders", 7): 6, ("nothing", 0): 7, ("users", 0): 8, ("orders", -1): 9}
    response = await on.call(txn_offset_commit, request_of(offsets), version)
    missing = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert errors_of(response) == [[0, missing, missing], [missing], [0]]
    assert [topic.name for topic in response.topics] == ["orders", "nothing", "users"]
    place = ("__consumer_offsets", on.groups.partition_for("g"))
    assert gate.asked == [("copy", PRODUCER, 2, [place], version >= 5)]
    assert not await on.groups.fetch_offsets("g")
    await end(on, commit=True)
    held = await on.groups.fetch_offsets("g")
    assert {(topic, index): each.offset for topic, found in held.items() for index, each in found.items()} == {
        ("orders", 0): 5, ("users", 0): 8,
    }  # fmt: skip
    committed = held["orders"][0]
    assert (committed.metadata, committed.leader_epoch) == ("note", 4 if version >= 2 else -1)
    assert committed.topic_id == on.handling.controller.image.topics["orders"].topic_id


async def test_a_commit_of_nothing_known_asks_nobody(on: GroupHandling, gate: Gate) -> None:
    response = await on.call(txn_offset_commit, request_of({("nothing", 0): 1}), 5)
    assert errors_of(response) == [[ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]]
    assert gate.asked == []
    assert on.groups.describe("g") is None


async def test_metadata_is_limited_and_may_be_null(on: GroupHandling, gate: Gate) -> None:
    assert await error_of(on, 5, metadata="x" * 4_097) == ErrorCode.OFFSET_METADATA_TOO_LARGE
    assert await error_of(on, 5, metadata=None) == 0
    await end(on, commit=True)
    assert (await on.groups.fetch_offsets("g"))["orders"][0].metadata == ""


# The coordinator of the transaction


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("answer", "told", "from_version", "before"),
    [
        (ErrorCode.TRANSACTION_ABORTABLE, ErrorCode.TRANSACTION_ABORTABLE, 4, ErrorCode.INVALID_TXN_STATE),
        (ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH, 0, None),
        (ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.INVALID_PRODUCER_EPOCH, 0, None),
        (ErrorCode.INVALID_PRODUCER_ID_MAPPING, ErrorCode.INVALID_PRODUCER_ID_MAPPING, 0, None),
        (
            ErrorCode.CONCURRENT_TRANSACTIONS,
            ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
            2,
            ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ),
    ],
)
async def test_what_the_coordinator_says_against_it(
    on: GroupHandling,
    gate: Gate,
    version: int,
    answer: ErrorCode,
    told: ErrorCode,
    from_version: int,
    before: ErrorCode | None,
) -> None:
    gate.answer = answer
    assert await error_of(on, version) == (told if version >= from_version else before)
    assert all(log is None or not log.log.end_offset for log in on.log.partitions)


@pytest.mark.parametrize("failure", [ErrorCode.NETWORK_EXCEPTION, ErrorCode.NOT_COORDINATOR])
async def test_a_coordinator_that_cannot_be_asked(on: GroupHandling, gate: Gate, failure: ErrorCode) -> None:
    gate.failure = failure
    assert await error_of(on, 5) == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    assert await error_of(on, 1) == ErrorCode.COORDINATOR_NOT_AVAILABLE


async def test_verification_can_be_switched_off_but_not_adding(on: GroupHandling, gate: Gate) -> None:
    services = on.handling.services
    services.config = BrokerConfig({"transaction.partition.verification.enable": "false"})
    gate.answer = ErrorCode.INVALID_TXN_STATE
    assert await error_of(on, 4) == 0
    await end(on, commit=True)
    assert await error_of(on, 5) == ErrorCode.INVALID_TXN_STATE


async def test_an_old_producer_is_fenced(on: GroupHandling, gate: Gate) -> None:
    assert await error_of(on, 5) == 0
    assert await error_of(on, 5, producer_epoch=1) == ErrorCode.INVALID_PRODUCER_EPOCH
    assert len(gate.asked) == 1


# The group


async def test_a_group_needs_a_name(on: GroupHandling, gate: Gate) -> None:
    assert await error_of(on, 5, group_id="") == ErrorCode.INVALID_GROUP_ID
    assert gate.asked == []


async def test_a_broker_that_does_not_coordinate_says_so(on: GroupHandling, gate: Gate) -> None:
    on.groups.partition_lost(on.groups.partition_for("g"))
    assert await error_of(on, 5) == ErrorCode.NOT_COORDINATOR


async def test_members_of_a_classic_group_are_fenced_by_their_generation(on: GroupHandling, gate: Gate) -> None:
    assert await error_of(on, 3, member_id="m", generation_id=1) == ErrorCode.ILLEGAL_GENERATION, "there is no group"
    request = join_request(instance_id="red", requires_member_id=False)
    joining = asyncio.ensure_future(on.groups.join("g", request))
    await on.advance(4)
    joined = await joining
    member, generation = joined.member_id, joined.generation
    for changes, expected in (
        ({"member_id": member, "generation_id": generation, "group_instance_id": "red"}, ErrorCode.NONE),
        ({"member_id": member, "generation_id": generation}, ErrorCode.NONE),
        ({"member_id": member, "generation_id": generation - 1}, ErrorCode.ILLEGAL_GENERATION),
        ({"member_id": member, "generation_id": generation + 1}, ErrorCode.ILLEGAL_GENERATION),
        ({"member_id": "ghost", "generation_id": generation}, ErrorCode.UNKNOWN_MEMBER_ID),
        (
            {"member_id": "ghost", "generation_id": generation, "group_instance_id": "red"},
            ErrorCode.FENCED_INSTANCE_ID,
        ),
        ({}, ErrorCode.NONE),
    ):
        assert await error_of(on, 3, **changes) == expected, changes
    assert await error_of(on, 2) == 0, "older clients cannot say who they are"


async def test_members_of_a_consumer_group_are_fenced_by_their_epoch(on: GroupHandling, gate: Gate) -> None:
    beat = ModernHeartbeat("m", 0, rebalance_timeout_ms=60_000, topics=("orders",), owned=())
    epoch = (await on.groups.modern_heartbeat("g", beat)).epoch
    for changes, expected in (
        ({"member_id": "m", "generation_id": epoch}, ErrorCode.NONE),
        ({"member_id": "m", "generation_id": epoch + 1}, ErrorCode.ILLEGAL_GENERATION),
        ({"member_id": "m", "generation_id": epoch - 1}, ErrorCode.ILLEGAL_GENERATION),
        ({"member_id": "ghost", "generation_id": epoch}, ErrorCode.UNKNOWN_MEMBER_ID),
        ({}, ErrorCode.UNKNOWN_MEMBER_ID),
    ):
        assert await error_of(on, 3, **changes) == expected, changes
    await on.groups.modern_heartbeat("g", replace(beat, epoch=-1))
    assert await error_of(on, 3) == 0, "nobody is in the group"


# Reading


async def read(
    on: GroupHandling, version: int, *, stable: bool, everything: bool = False
) -> dict[int, tuple[int, int]]:
    """Offset and error by partition of orders."""
    topic_id = on.handling.controller.image.topics["orders"].topic_id
    if version < 8:
        old = [OffsetFetchRequest.OffsetFetchRequestTopic(name="orders", partition_indexes=[0, 1])]
        request = OffsetFetchRequest(group_id="g", topics=None if everything else old, require_stable=stable)
        found = await on.call(offset_fetch, request, version)
    else:
        topics = [
            OffsetFetchRequest.OffsetFetchRequestTopics(name="orders", topic_id=topic_id, partition_indexes=[0, 1])
        ]
        group = OffsetFetchRequest.OffsetFetchRequestGroup(group_id="g", topics=None if everything else topics)
        answer = await on.call(offset_fetch, OffsetFetchRequest(groups=[group], require_stable=stable), version)
        (found,) = answer.groups
    assert found.error_code == 0
    return {
        each.partition_index: (each.committed_offset, each.error_code)
        for topic in found.topics
        for each in topic.partitions
    }


@pytest.mark.parametrize("version", range(7, 11))
async def test_who_asks_for_stable_offsets_is_told_what_is_not(on: GroupHandling, gate: Gate, version: int) -> None:
    plain = OffsetCommitRequest.OffsetCommitRequestPartition
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(
        name="orders", partitions=[plain(partition_index=index, committed_offset=1 + index) for index in range(2)]
    )
    await on.call(offset_commit, OffsetCommitRequest(group_id="g", topics=[topic]), 9)
    assert await error_of(on, 5) == 0
    for everything in (False, True):
        assert await read(on, version, stable=False, everything=everything) == {0: (1, 0), 1: (2, 0)}
        assert await read(on, version, stable=True, everything=everything) == {0: (-1, UNSTABLE), 1: (2, 0)}
    await end(on, commit=True)
    assert await read(on, version, stable=True) == {0: (5, 0), 1: (2, 0)}


async def test_a_partition_that_has_nothing_else_is_unstable_too(on: GroupHandling, gate: Gate) -> None:
    assert await error_of(on, 5) == 0
    assert await read(on, 9, stable=True) == {0: (-1, UNSTABLE), 1: (-1, 0)}
    assert await read(on, 9, stable=True, everything=True) == {}, "as in Kafka"
    await end(on, commit=False)
    assert await read(on, 9, stable=True) == {0: (-1, 0), 1: (-1, 0)}


async def test_deleting_an_offset_deletes_the_pending_one(on: GroupHandling, gate: Gate) -> None:
    assert await error_of(on, 5) == 0
    partition = OffsetDeleteRequest.OffsetDeleteRequestPartition(partition_index=0)
    topic = OffsetDeleteRequest.OffsetDeleteRequestTopic(name="orders", partitions=[partition])
    response = await on.call(offset_delete, OffsetDeleteRequest(group_id="g", topics=[topic]), 0)
    assert response.topics[0].partitions[0].error_code == 0
    await end(on, commit=True)
    assert await read(on, 9, stable=True) == {0: (-1, 0), 1: (-1, 0)}
