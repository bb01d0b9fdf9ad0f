"""Markers on their way to leaders that move, fail, refuse and vanish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.clock import ManualClock
from millrace.errors import ApiError, ErrorCode
from millrace.model import TopicPartition
from millrace.transactions.markers import MarkerSender, Outcome, TransactionMarker
from millrace.wire.codec import decode, encode
from millrace.wire.messages.transactions import WriteTxnMarkersRequest, WriteTxnMarkersResponse
from support.transactions import A, B, C, run_ready

HERE, THERE, ELSEWHERE = 1, 2, 3
MARKER = TransactionMarker(7, 3, 11, commits=True, transaction_version=2)


def marker_of(producer_id: int) -> TransactionMarker:
    return TransactionMarker(producer_id, 0, 11, commits=False, transaction_version=0)


class World:
    """Who leads what, and what each broker does with a request."""

    def __init__(self) -> None:
        self.leaders: dict[TopicPartition, int] = {A: HERE, B: THERE, C: THERE}
        self.codes: dict[TopicPartition, list[ErrorCode | Exception]] = {}
        """What partitions answer before they take the marker."""
        self.marked: list[tuple[int, TransactionMarker, TopicPartition]] = []
        self.requests: list[tuple[int, WriteTxnMarkersRequest]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.clock = ManualClock()
        self.sender = MarkerSender(
            broker_id=HERE,
            local=self,
            peers=self,
            image=lambda: self,  # type: ignore[arg-type, return-value]
            clock=self.clock,
        )

    def topic(self, name: str) -> Any:
        led = {each.partition: leader for each, leader in self.leaders.items() if each.topic == name}
        if not led:
            return None
        return SimpleNamespace(partitions=[SimpleNamespace(leader=led.get(i, -1)) for i in range(max(led) + 1)])

    def take(self, broker: int, marker: TransactionMarker, partition: TopicPartition) -> ErrorCode:
        answers = self.codes.get(partition)
        answer: ErrorCode | Exception = answers.pop(0) if answers else ErrorCode.NONE
        if isinstance(answer, Exception):
            raise answer
        if answer is ErrorCode.NONE and self.leaders[partition] != broker:
            answer = ErrorCode.NOT_LEADER_OR_FOLLOWER
        if answer is ErrorCode.NONE:
            self.marked.append((broker, marker, partition))
        return answer

    async def write(self, marker: TransactionMarker, partitions: Collection[TopicPartition]) -> Outcome:
        return {each: self.take(HERE, marker, each) for each in partitions}

    async def request(self, broker_id: int, message: Any, version: int, timeout_ms: int) -> Any:
        assert version == 2
        sent, _ = decode(WriteTxnMarkersRequest, version, memoryview(encode(message, version)), 0)
        self.requests.append((broker_id, sent))
        await self.open.wait()
        response = WriteTxnMarkersResponse()
        for each in sent.markers:
            marker = TransactionMarker(
                each.producer_id,
                each.producer_epoch,
                each.coordinator_epoch,
                each.transaction_result,
                each.transaction_version,
            )
            result = WriteTxnMarkersResponse.WritableTxnMarkerResult(producer_id=each.producer_id)
            for topic in each.topics:
                told = WriteTxnMarkersResponse.WritableTxnMarkerTopicResult(name=topic.name)
                for index in topic.partition_indexes:
                    code = self.take(broker_id, marker, TopicPartition(topic.name, index))
                    told.partitions.append(
                        WriteTxnMarkersResponse.WritableTxnMarkerPartitionResult(partition_index=index, error_code=code)
                    )
                result.topics.append(told)
            response.markers.append(result)
        return response

    async def patiently(self, work: asyncio.Future[None], seconds: float = 10) -> None:
        for _ in range(round(seconds * 20)):
            await run_ready()
            if work.done():
                break
            self.clock.advance(0.05)
        assert work.done()
        await work

    def send(self, marker: TransactionMarker = MARKER, *partitions: TopicPartition) -> asyncio.Future[None]:
        return asyncio.ensure_future(self.sender.send(marker, partitions or (A, B, C)))


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    world.open.set()
    await world.sender.stop()


async def test_every_partition_is_told_by_its_leader(world: World) -> None:
    await world.send()
    assert sorted(world.marked) == [(HERE, MARKER, A), (THERE, MARKER, B), (THERE, MARKER, C)]
    assert len(world.requests) == 1


async def test_nothing_to_tell(world: World) -> None:
    await world.sender.send(MARKER, ())
    assert world.requests == []


async def test_what_comes_together_goes_together(world: World) -> None:
    world.open.clear()
    sent = [world.send(marker_of(0), B)]
    await run_ready()
    sent += [world.send(marker_of(each), B, C) for each in range(1, 9)]
    await run_ready()
    assert len(world.requests) == 1  # one at a time
    world.open.set()
    await asyncio.gather(*sent)
    assert [len(request.markers) for _, request in world.requests] == [1, 8]
    assert len(world.marked) == 17


@pytest.mark.parametrize(
    "code",
    [
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.KAFKA_STORAGE_ERROR,
        ErrorCode.TRANSACTION_COORDINATOR_FENCED,
        ErrorCode.UNKNOWN_SERVER_ERROR,
        ApiError(ErrorCode.NETWORK_EXCEPTION),
        ApiError(ErrorCode.BROKER_NOT_AVAILABLE),
    ],
)
@pytest.mark.parametrize("partition", [A, B])
async def test_what_fails_is_tried_again(world: World, code: ErrorCode | Exception, partition: TopicPartition) -> None:
    world.codes[partition] = [code] * 4
    await world.patiently(world.send())
    assert {each for _, _, each in world.marked} == {A, B, C}


async def test_a_failure_nobody_thought_of_does_not_end_it(world: World) -> None:
    world.codes[A] = [RuntimeError("planted")]
    await world.patiently(world.send())
    assert {each for _, _, each in world.marked} == {A, B, C}


async def test_leaders_are_followed(world: World) -> None:
    world.leaders[A] = world.leaders[B] = -1
    work = world.send()
    await run_ready()
    assert [each for _, _, each in world.marked] == [C]  # which waits for nobody
    world.leaders[A], world.leaders[B] = ELSEWHERE, HERE
    await world.patiently(work)
    assert sorted(world.marked) == [(HERE, MARKER, B), (THERE, MARKER, C), (ELSEWHERE, MARKER, A)]


async def test_deleted_topics_are_told_nothing(world: World) -> None:
    gone = TopicPartition("gone", 0)
    await world.send(MARKER, gone, B)
    assert world.marked == [(THERE, MARKER, B)]
    world.leaders[gone] = -1
    work = world.send(MARKER, gone)
    await run_ready()
    assert not work.done()
    del world.leaders[gone]
    await world.patiently(work)


async def test_a_partition_that_has_moved_on_is_done(world: World) -> None:
    world.codes = {each: [ErrorCode.INVALID_PRODUCER_EPOCH] for each in (A, B)}
    await world.send()
    assert world.marked == [(THERE, MARKER, C)]


async def test_who_coordinates_no_more_sends_no_more(world: World) -> None:
    world.open.clear()
    first = world.send(marker_of(0), B)
    await run_ready()
    second = world.send(marker_of(1), B)
    await run_ready()
    second.cancel()
    await run_ready()
    world.open.set()
    await first
    await run_ready()
    assert [request.markers[0].producer_id for _, request in world.requests] == [0]


async def test_stopping_ends_what_waits(world: World) -> None:
    world.open.clear()
    work = [world.send(MARKER, B)]
    await run_ready()
    work.append(world.send(marker_of(1), B))
    await run_ready()
    await world.sender.stop()
    for each in work:
        with pytest.raises(asyncio.CancelledError):
            await each
