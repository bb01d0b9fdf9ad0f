"""The APIs of transactions, at every version, on a coordinator whose log and markers are in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.client.connection import Connection
from millrace.errors import ApiError, ErrorCode
from millrace.handlers.producers import init_producer_id
from millrace.handlers.transactions import (
    add_offsets_to_txn,
    add_partitions_to_txn,
    describe_transactions,
    end_txn,
    list_transactions,
)
from millrace.model import TopicPartition
from millrace.security.authorizer import NO_AUTHORIZER
from millrace.testing import Cluster
from millrace.transactions.settings import TransactionSettings
from millrace.transactions.state import Producer, TransactionState
from millrace.wire.messages.api_versions import ApiVersionsRequest
from millrace.wire.messages.groups import FindCoordinatorRequest
from millrace.wire.messages.producers import InitProducerIdRequest
from millrace.wire.messages.transactions import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    DescribeTransactionsRequest,
    EndTxnRequest,
    ListTransactionsRequest,
)
from support.handling import Handling
from support.transactions import A, B, Bench, run_ready

UNKNOWN = TopicPartition("t", 3)
Request = AddPartitionsToTxnRequest


class World:
    """A coordinator, and a cluster that has the topic `t` with three partitions and `__consumer_offsets` with five."""

    def __init__(self) -> None:
        self.bench = Bench()
        self.topics = {"t": 3, "__consumer_offsets": 5}
        self.handling = Handling(
            None,  # type: ignore[arg-type]
            SimpleNamespace(  # type: ignore[arg-type]
                transactions=self.bench.coordinator,
                clock=self.bench.clock,
                image=self,
                controller=self,
                groups=SimpleNamespace(partition_for=len),
                authorizer=NO_AUTHORIZER,
            ),
        )

    def topic(self, name: str) -> Any:
        return SimpleNamespace(partitions=range(self.topics[name])) if name in self.topics else None

    async def ensure_internal_topic(self, name: str) -> None:
        if name != "__consumer_offsets":
            raise ApiError(ErrorCode.NOT_CONTROLLER)
        self.topics[name] = 5

    async def init(self, version: int = 5, name: str | None = "x", **more: Any) -> tuple[int, int, int]:
        request = InitProducerIdRequest(**{"transactional_id": name, "transaction_timeout_ms": 60_000} | more)
        response = await self.handling.call(init_producer_id, request, version)
        return response.error_code, response.producer_id, response.producer_epoch

    async def add(self, version: int, producer: Producer, *partitions: TopicPartition, **more: Any) -> dict[Any, int]:
        topics = [Request.AddPartitionsToTxnTopic(name=each.topic, partitions=[each.partition]) for each in partitions]
        if version < 4:
            request = Request(
                v3_and_below_transactional_id="x",
                v3_and_below_producer_id=producer.producer_id,
                v3_and_below_producer_epoch=producer.epoch,
                v3_and_below_topics=topics,
            )
        else:
            one = Request.AddPartitionsToTxnTransaction(
                transactional_id="x",
                producer_id=producer.producer_id,
                producer_epoch=producer.epoch,
                topics=topics,
                **more,
            )
            request = Request(transactions=[one])
        response = await self.handling.call(add_partitions_to_txn, request, version)
        results = response.results_by_topic_v3_and_below
        if version >= 4:
            (only,) = response.results_by_transaction
            assert only.transactional_id == "x"
            results = only.topic_results
        return {
            TopicPartition(topic.name, each.partition_index): each.partition_error_code
            for topic in results
            for each in topic.results_by_partition
        }

    async def add_offsets(self, version: int, producer: Producer, group_id: str = "ggg") -> int:
        request = AddOffsetsToTxnRequest(
            transactional_id="x", producer_id=producer.producer_id, producer_epoch=producer.epoch, group_id=group_id
        )
        code: int = (await self.handling.call(add_offsets_to_txn, request, version)).error_code
        return code

    async def end(self, version: int, producer: Producer, *, commits: bool = True) -> tuple[int, int, int]:
        request = EndTxnRequest(
            transactional_id="x", producer_id=producer.producer_id, producer_epoch=producer.epoch, committed=commits
        )
        response = await self.handling.call(end_txn, request, version)
        await run_ready()
        return response.error_code, response.producer_id, response.producer_epoch

    async def list(self, version: int = 2, **filters: Any) -> tuple[list[str], list[str]]:
        response = await self.handling.call(list_transactions, ListTransactionsRequest(**filters), version)
        assert response.error_code == 0
        return sorted(each.transactional_id for each in response.transaction_states), response.unknown_state_filters

    @property
    def state(self) -> TransactionState:
        return self.bench.states()["x"].state


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.bench.lead()
    yield world
    await world.bench.coordinator.stop()


# InitProducerId


@pytest.mark.parametrize("version", range(6))
async def test_a_producer_begins_and_the_one_before_is_fenced(world: World, version: int) -> None:
    assert await world.init(version) == (0, 1000, 0)
    assert await world.init(version) == (0, 1000, 1)
    if version >= 3:
        fenced = ErrorCode.PRODUCER_FENCED if version >= 4 else ErrorCode.INVALID_PRODUCER_EPOCH
        assert await world.init(version, producer_id=1000, producer_epoch=0) == (fenced, -1, -1)
        assert await world.init(version, producer_id=1000, producer_epoch=1) == (0, 1000, 2)
        assert await world.init(version, producer_id=1000, producer_epoch=1) == (0, 1000, 2)


async def test_what_initproducerid_refuses(world: World) -> None:
    assert await world.init(name="") == (ErrorCode.INVALID_REQUEST, -1, -1)
    assert await world.init(producer_id=7) == (ErrorCode.INVALID_REQUEST, -1, -1)
    assert await world.init(producer_epoch=7) == (ErrorCode.INVALID_REQUEST, -1, -1)
    timeout_ms = TransactionSettings().max_timeout_ms + 1
    assert await world.init(transaction_timeout_ms=timeout_ms) == (ErrorCode.INVALID_TRANSACTION_TIMEOUT, -1, -1)


# AddPartitionsToTxn and AddOffsetsToTxn


@pytest.mark.parametrize("version", range(6))
async def test_partitions_are_added(world: World, version: int) -> None:
    me = await world.bench.begin("x")
    assert await world.add(version, me, A, B, A) == {A: 0, B: 0}
    found = world.bench.states()["x"]
    assert (found.partitions, found.version) == ({A, B}, 2 if version >= 4 else 0)


@pytest.mark.parametrize("version", range(6))
async def test_a_partition_that_does_not_exist_keeps_the_others_out(world: World, version: int) -> None:
    me = await world.bench.begin("x")
    nowhere = TopicPartition("nowhere", 0)
    negative = TopicPartition("t", -1)
    missing = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert await world.add(version, me, A, UNKNOWN, nowhere, negative) == {
        A: ErrorCode.OPERATION_NOT_ATTEMPTED,
        UNKNOWN: missing,
        nowhere: missing,
        negative: missing,
    }
    assert world.state is TransactionState.EMPTY


@pytest.mark.parametrize("version", range(6))
async def test_a_fenced_producer_adds_nothing(world: World, version: int) -> None:
    me = await world.bench.begin("x")
    await world.bench.begin("x")
    fenced = ErrorCode.PRODUCER_FENCED if version >= 2 else ErrorCode.INVALID_PRODUCER_EPOCH
    assert await world.add(version, me, A) == {A: fenced}
    if version < 5:
        assert await world.add_offsets(version, me) == fenced
    assert await world.end(version, me) == (fenced, -1, -1)
    assert world.state is TransactionState.EMPTY


@pytest.mark.parametrize("version", [4, 5])
async def test_brokers_ask_for_several_transactions_at_once(world: World, version: int) -> None:
    me = await world.bench.begin("x", A)
    other = await world.bench.begin("y")
    topic = Request.AddPartitionsToTxnTopic(name="t", partitions=[0, 1])
    request = Request(
        transactions=[
            Request.AddPartitionsToTxnTransaction(
                transactional_id=name,
                producer_id=producer.producer_id,
                producer_epoch=producer.epoch,
                verify_only=only,
                topics=[topic],
            )
            for name, producer, only in (("x", me, True), ("y", other, False), ("z", me, True))
        ]
    )
    response = await world.handling.call(add_partitions_to_txn, request, version)
    codes = {
        each.transactional_id: [one.partition_error_code for one in each.topic_results[0].results_by_partition]
        for each in response.results_by_transaction
    }
    unmapped = ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert codes == {"x": [0, ErrorCode.TRANSACTION_ABORTABLE], "y": [0, 0], "z": [unmapped, unmapped]}
    assert world.bench.states()["x"].partitions == {A}
    assert world.bench.states()["y"].partitions == {A, B}


@pytest.mark.parametrize("version", range(5))
async def test_the_offsets_of_a_group_are_added(world: World, version: int) -> None:
    me = await world.bench.begin("x")
    del world.topics["__consumer_offsets"]  # nobody has committed anything yet
    assert await world.add_offsets(version, me) == 0
    found = world.bench.states()["x"]
    assert found.partitions == {TopicPartition("__consumer_offsets", 3)}
    assert found.version == (2 if version >= 4 else 0)
    assert await world.add_offsets(version, me, "") == ErrorCode.INVALID_GROUP_ID


# EndTxn


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("version", range(6))
async def test_a_transaction_ends(world: World, version: int, commits: bool) -> None:
    me = await world.bench.begin("x", A)
    after = (0, *((me.producer_id, me.epoch + 1) if version >= 5 else (-1, -1)))
    assert await world.end(version, me, commits=commits) == after
    assert world.state is (TransactionState.COMPLETE_COMMIT if commits else TransactionState.COMPLETE_ABORT)
    assert await world.end(version, me, commits=commits) == after
    assert await world.end(version, me, commits=not commits) == (ErrorCode.INVALID_TXN_STATE, -1, -1)
    assert [(marker.commits, each) for marker, each in world.bench.markers.written] == [(commits, A)]


@pytest.mark.parametrize("version", range(6))
async def test_an_abort_without_a_transaction(world: World, version: int) -> None:
    me = await world.bench.begin("x")
    if version < 5:
        assert await world.end(version, me, commits=False) == (ErrorCode.INVALID_TXN_STATE, -1, -1)
    else:
        assert await world.end(version, me, commits=False) == (0, me.producer_id, me.epoch + 1)
        assert world.state is TransactionState.COMPLETE_ABORT
    assert world.bench.markers.written == []


# For administrators


async def test_transactions_are_described(world: World) -> None:
    me = await world.bench.begin("x", A, B)
    request = DescribeTransactionsRequest(transactional_ids=["x", "nobody", "", "x"])
    found, unknown, empty = (await world.handling.call(describe_transactions, request, 0)).transaction_states
    assert (found.error_code, found.transaction_state, found.producer_id, found.producer_epoch) == (0, "Ongoing", *me)
    assert (found.transaction_timeout_ms, found.transaction_start_time_ms) == (60_000, world.bench.clock.wall_ms())
    assert [(each.topic, each.partitions) for each in found.topics] == [("t", [0, 1])]
    assert unknown.error_code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND
    assert empty.error_code == ErrorCode.INVALID_REQUEST


async def test_transactions_are_listed_by_state_producer_age_and_name(world: World) -> None:
    old = await world.bench.begin("old-1", A)
    world.bench.clock.advance(5)
    await world.bench.begin("new-1", A)
    await world.bench.begin("idle")
    for version in range(3):
        assert await world.list(version) == (["idle", "new-1", "old-1"], [])
        assert await world.list(version, state_filters=["Ongoing"]) == (["new-1", "old-1"], [])
        assert await world.list(version, state_filters=["Ongoing", "Lost"]) == (["new-1", "old-1"], ["Lost"])
        assert await world.list(version, state_filters=["Lost"]) == ([], ["Lost"])
        assert await world.list(version, producer_id_filters=[old.producer_id]) == (["old-1"], [])
    for version in (1, 2):
        assert await world.list(version, duration_filter=4_999, state_filters=["Ongoing"]) == (["old-1"], [])
        assert await world.list(version, duration_filter=5_000, state_filters=["Ongoing"]) == ([], [])
    assert await world.list(transactional_id_pattern=".*-1") == (["new-1", "old-1"], [])
    assert await world.list(transactional_id_pattern="old") == ([], [])
    request = ListTransactionsRequest(transactional_id_pattern="(")
    refused = await world.handling.call(list_transactions, request, 2)
    assert refused.error_code == ErrorCode.INVALID_REGULAR_EXPRESSION


async def test_a_former_coordinator_describes_and_lists_nothing(world: World) -> None:
    await world.bench.begin("x", A)
    world.bench.coordinator.partition_lost(0)
    request = DescribeTransactionsRequest(transactional_ids=["x"])
    (state,) = (await world.handling.call(describe_transactions, request, 0)).transaction_states
    assert state.error_code == ErrorCode.NOT_COORDINATOR
    assert await world.list() == ([], [])


# In a broker


async def test_a_client_finds_its_coordinator_and_begins() -> None:
    with Cluster(settings={"transaction.state.log.num.partitions": "3"}) as cluster:
        cluster.create_topic("t")
        host, _, port = cluster.bootstrap_servers.rpartition(":")
        async with await Connection.open(host, int(port)) as connection:
            for version in range(1, 7):
                asked = {"key": "x"} if version < 4 else {"coordinator_keys": ["x", ""]}
                found = await connection.request(FindCoordinatorRequest(key_type=1, **asked), version)
                if version < 4:
                    assert (found.error_code, found.node_id) == (0, 1)
                else:
                    assert [(each.error_code, each.node_id) for each in found.coordinators] == [
                        (0, 1),
                        (ErrorCode.INVALID_REQUEST, -1),
                    ]
            begun = InitProducerIdRequest(transactional_id="x", transaction_timeout_ms=60_000)
            first = await connection.request(begun, 5)
            while first.error_code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS:
                first = await connection.request(begun, 5)
            assert (first.error_code, first.producer_epoch) == (0, 0)
            one = AddPartitionsToTxnRequest.AddPartitionsToTxnTransaction(
                transactional_id="x",
                producer_id=first.producer_id,
                producer_epoch=0,
                topics=[AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name="t", partitions=[0])],
            )
            added = await connection.request(AddPartitionsToTxnRequest(transactions=[one]), 5)
            assert added.results_by_transaction[0].topic_results[0].results_by_partition[0].partition_error_code == 0
            described = await connection.request(DescribeTransactionsRequest(transactional_ids=["x"]), 0)
            assert described.transaction_states[0].transaction_state == "Ongoing"
            features = await connection.request(
                ApiVersionsRequest(client_software_name="a", client_software_version="1"), 4
            )
            supported = {each.name: (each.min_version, each.max_version) for each in features.supported_features}
            finalized = {each.name: each.max_version_level for each in features.finalized_features}
            assert (supported["transaction.version"], finalized["transaction.version"]) == ((0, 2), 2)
