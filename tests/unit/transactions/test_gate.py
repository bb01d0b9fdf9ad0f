"""What leaders of partitions ask of coordinators, here and elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.clock import ManualClock
from millrace.errors import ApiError, ErrorCode
from millrace.transactions.gate import Gate
from millrace.transactions.settings import GateSettings
from millrace.transactions.state import Producer
from millrace.wire.codec import decode, encode
from millrace.wire.messages.transactions import AddPartitionsToTxnRequest, AddPartitionsToTxnResponse
from support.transactions import A, B, Bench, run_ready

HERE, THERE = 1, 2
OK = ErrorCode.NONE
Result = AddPartitionsToTxnResponse


class World:
    """A coordinator on this broker, and one on another that answers what the test says."""

    def __init__(self) -> None:
        self.bench = Bench()
        self.leader = HERE
        self.codes: list[ErrorCode | Exception] = []
        """What the coordinator elsewhere answers to each request, and then NONE."""
        self.requests: list[AddPartitionsToTxnRequest] = []
        self.open = asyncio.Event()
        self.open.set()
        self.clock: ManualClock = self.bench.clock
        self.gate = Gate(
            broker_id=HERE,
            local=self.bench.coordinator,
            peers=self,
            image=lambda: self,  # type: ignore[arg-type, return-value]
            settings=GateSettings(),
            clock=self.clock,
        )

    def topic(self, name: str) -> Any:
        assert name == "__transaction_state"
        return None if self.leader == 0 else SimpleNamespace(partitions=[SimpleNamespace(leader=self.leader)])

    async def request(self, broker_id: int, message: Any, version: int, timeout_ms: int) -> Any:
        assert (broker_id, version) == (THERE, 5)
        sent, _ = decode(AddPartitionsToTxnRequest, version, memoryview(encode(message, version)), 0)
        self.requests.append(sent)
        await self.open.wait()
        code = self.codes.pop(0) if self.codes else OK
        if isinstance(code, Exception):
            raise code
        return AddPartitionsToTxnResponse(
            results_by_transaction=[
                Result.AddPartitionsToTxnResult(
                    transactional_id=each.transactional_id,
                    topic_results=[
                        Result.AddPartitionsToTxnTopicResult(
                            name=topic.name,
                            results_by_partition=[
                                Result.AddPartitionsToTxnPartitionResult(partition_index=i, partition_error_code=code)
                                for i in topic.partitions
                            ],
                        )
                        for topic in each.topics
                    ],
                )
                for each in sent.transactions
            ]
        )

    def admit(
        self, transactional_id: str = "x", producer: Producer = Producer(7, 0), *partitions: Any, add: bool = True
    ) -> asyncio.Future[Any]:
        asked = [tuple(each) for each in partitions or (A,)]
        return asyncio.ensure_future(self.gate.admit(transactional_id, *producer, asked, add=add))


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.bench.lead()
    yield world
    world.open.set()
    await world.gate.stop()
    await world.bench.coordinator.stop()


async def refusal(work: asyncio.Future[Any]) -> ErrorCode:
    with pytest.raises(ApiError) as refused:
        await work
    return refused.value.code


async def test_a_coordinator_here_is_asked_without_a_socket(world: World) -> None:
    me = await world.bench.begin("x")
    assert await world.admit("x", me, A, add=False) == {A: ErrorCode.TRANSACTION_ABORTABLE}
    assert await world.admit("x", me, A, B) == {A: OK, B: OK}
    assert await world.admit("x", me, A, add=False) == {A: OK}
    assert world.bench.states()["x"].version == 2
    fenced = Producer(me.producer_id, me.epoch - 1)
    for add in (True, False):
        assert await world.admit("x", fenced, A, add=add) == {A: ErrorCode.INVALID_PRODUCER_EPOCH}
        assert await world.admit("y", me, A, add=add) == {A: ErrorCode.INVALID_PRODUCER_ID_MAPPING}
    assert world.requests == []


async def test_a_coordinator_here_that_needs_nobody_adds_at_once(world: World) -> None:
    me = await world.bench.begin("x")
    assert world.gate.adds_at_once("x", *me, [A, B])
    assert world.bench.states()["x"].partitions == {A, B}
    records = world.bench.fake[0].log.end_offset
    assert world.gate.adds_at_once("x", *me, [A])
    assert world.bench.fake[0].log.end_offset == records, "it is part of the transaction already"


async def test_a_write_that_waits_for_others_is_waited_for_and_not_repeated(world: World) -> None:
    me = await world.bench.begin("x")
    world.bench.fake[0].commit_at_once = False
    assert not world.gate.adds_at_once("x", *me, [A])
    records = world.bench.fake[0].log.end_offset
    assert not world.gate.adds_at_once("x", *me, [A])
    admitted = world.admit("x", me, A)
    await run_ready()
    assert not admitted.done()
    world.bench.fake[0].commit()
    assert await admitted == {A: OK}
    assert world.bench.fake[0].log.end_offset == records


async def test_what_cannot_be_added_at_once_says_no_more_than_that(world: World) -> None:
    me = await world.bench.begin("x", A)
    assert not world.gate.adds_at_once("x", me.producer_id, me.epoch - 1, [A]), "fenced"
    assert not world.gate.adds_at_once("y", *me, [A]), "an id that is not known"
    world.bench.markers.open.clear()
    me = await world.bench.coordinator.end("x", me, commits=True, version=2)
    assert not world.gate.adds_at_once("x", *me, [A]), "the transaction before is being completed"
    world.bench.markers.open.set()
    for world.leader in (THERE, 0):
        assert not world.gate.adds_at_once("x", *me, [A])
    assert world.requests == []


async def test_a_quick_producer_waits_for_the_end_of_its_last_transaction(world: World) -> None:
    me = await world.bench.begin("x", A)
    world.bench.markers.open.clear()
    me = await world.bench.coordinator.end("x", me, commits=True, version=2)
    await run_ready()
    admitted = world.admit("x", me, A)
    await run_ready()
    assert not admitted.done()
    world.bench.markers.open.set()
    assert await admitted == {A: OK}  # the clock has not moved
    world.bench.markers.open.clear()
    me = await world.bench.coordinator.end("x", me, commits=True, version=2)
    admitted = world.admit("x", me, A)
    await world.bench.advance(0.1)
    assert await admitted == {A: ErrorCode.CONCURRENT_TRANSACTIONS}


async def test_a_coordinator_elsewhere_gets_what_came_together(world: World) -> None:
    world.leader = THERE
    world.open.clear()
    first = world.admit("x")
    await run_ready()
    others = [world.admit("x", Producer(7, 0), B), world.admit("x", Producer(7, 0), A, B), world.admit("y", add=False)]
    another = world.admit("x", Producer(7, 1))
    await run_ready()
    assert len(world.requests) == 1
    world.open.set()
    assert await first == {A: OK}
    assert await asyncio.gather(*others) == [{B: OK}, {A: OK, B: OK}, {A: OK}]
    assert await another == {A: OK}
    # Of each transactional id one question at a time.
    asked = [[(each.transactional_id, each.producer_epoch) for each in one.transactions] for one in world.requests]
    assert asked == [[("x", 0)], [("x", 0), ("y", 0)], [("x", 1)]]
    assert [each.verify_only for each in world.requests[1].transactions] == [False, True]


async def test_a_coordinator_elsewhere_is_asked_again_for_a_moment(world: World) -> None:
    world.leader = THERE
    world.codes = [ErrorCode.CONCURRENT_TRANSACTIONS] * 2
    admitted = world.admit()
    await world.bench.advance(0.02)
    await world.bench.advance(0.02)
    assert await admitted == {A: OK}
    world.codes = [ErrorCode.CONCURRENT_TRANSACTIONS] * 9
    admitted = world.admit()
    for _ in range(6):
        await world.bench.advance(0.02)
    assert await admitted == {A: ErrorCode.CONCURRENT_TRANSACTIONS}
    world.codes = [ErrorCode.CONCURRENT_TRANSACTIONS]
    assert await world.admit(add=False) == {A: ErrorCode.CONCURRENT_TRANSACTIONS}


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        (ErrorCode.NOT_COORDINATOR, ErrorCode.NOT_COORDINATOR),
        (ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS),
        (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.COORDINATOR_NOT_AVAILABLE),
        (ErrorCode.OPERATION_NOT_ATTEMPTED, ErrorCode.COORDINATOR_NOT_AVAILABLE),
        (ApiError(ErrorCode.BROKER_NOT_AVAILABLE), ErrorCode.NETWORK_EXCEPTION),
        (ApiError(ErrorCode.REQUEST_TIMED_OUT), ErrorCode.NETWORK_EXCEPTION),
    ],
)
async def test_a_coordinator_that_could_not_say(world: World, code: ErrorCode | Exception, answer: ErrorCode) -> None:
    world.leader = THERE
    world.codes = [code]
    assert await refusal(world.admit()) is answer
    assert await world.admit() == {A: OK}


async def test_a_fenced_producer_has_an_invalid_epoch_to_a_write(world: World) -> None:
    world.leader = THERE
    world.codes = [ErrorCode.PRODUCER_FENCED, ErrorCode.TRANSACTION_ABORTABLE]
    assert await world.admit() == {A: ErrorCode.INVALID_PRODUCER_EPOCH}
    assert await world.admit(add=False) == {A: ErrorCode.TRANSACTION_ABORTABLE}


async def test_without_a_coordinator(world: World) -> None:
    for world.leader in (0, -1):
        assert await refusal(world.admit()) is ErrorCode.COORDINATOR_NOT_AVAILABLE
    world.leader = HERE
    world.bench.coordinator.partition_lost(0)
    assert await refusal(world.admit()) is ErrorCode.NOT_COORDINATOR


async def test_stopping_ends_what_waits(world: World) -> None:
    world.leader = THERE
    world.open.clear()
    waiting = [world.admit("x"), world.admit("y")]
    await run_ready()
    waiting.append(world.admit("z"))
    await run_ready()
    await world.gate.stop()
    for each in waiting:
        assert await refusal(each) is ErrorCode.NETWORK_EXCEPTION
