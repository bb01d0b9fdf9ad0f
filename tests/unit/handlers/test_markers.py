"""WriteTxnMarkers: what is written, when it is answered, and who is told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import ApiError, ErrorCode
from millrace.handlers.markers import write_txn_markers
from millrace.storage.producers import UNVERIFIED
from millrace.wire.codec import decode, encode
from millrace.wire.keys import ApiKey
from millrace.wire.messages.transactions import WriteTxnMarkersRequest, WriteTxnMarkersResponse
from support.batches import batch
from support.led_partitions import LedPartitions

OFFSETS = "__consumer_offsets"


class Groups:
    """Who keeps group offsets."""

    def __init__(self) -> None:
        self.ended: list[tuple[int, int, bool, int]] = []
        self.fails = False

    def transaction_ended(self, partition_index: int, producer_id: int, committed: bool, offset: int) -> None:
        if self.fails:
            raise RuntimeError("planted")
        self.ended.append((partition_index, producer_id, committed, offset))


class Bench:
    def __init__(self, home: Path) -> None:
        self.led = LedPartitions(home, "t", OFFSETS, settings={"request.timeout.ms": "2000"})
        self.groups = self.led.services.groups = Groups()

    def open(self, topic: str, producer_id: int, epoch: int = 0) -> None:
        data = batch(1, producer_id=producer_id, producer_epoch=epoch, sequence=0, transactional=True)
        self.led.partitions[topic].append(data, verification=UNVERIFIED)

    async def ask(self, *markers: dict[str, Any], version: int = 2) -> dict[tuple[int, str, int], ErrorCode]:
        request = WriteTxnMarkersRequest(markers=[marker_of(**each) for each in markers])
        sent, _ = decode(WriteTxnMarkersRequest, version, memoryview(encode(request, version)), 0)
        answer = await write_txn_markers(self.led.context(ApiKey.WRITE_TXN_MARKERS, version), sent)
        received, _ = decode(WriteTxnMarkersResponse, version, memoryview(encode(answer, version)), 0)
        return {
            (one.producer_id, topic.name, item.partition_index): ErrorCode(item.error_code)
            for one in received.markers
            for topic in one.topics
            for item in topic.partitions
        }

    async def flush(self) -> None:
        await asyncio.sleep(0)
        self.led.flush()


def marker_of(
    producer_id: int = 1,
    epoch: int = 0,
    coordinator: int = 0,
    commit: bool = True,
    tv: int = 0,
    topics: tuple[tuple[str, int], ...] = (("t", 0),),
) -> WriteTxnMarkersRequest.WritableTxnMarker:
    return WriteTxnMarkersRequest.WritableTxnMarker(
        producer_id=producer_id,
        producer_epoch=epoch,
        transaction_result=commit,
        coordinator_epoch=coordinator,
        transaction_version=tv,
        topics=[
            WriteTxnMarkersRequest.WritableTxnMarkerTopic(name=name, partition_indexes=[index])
            for name, index in topics
        ],
    )


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.led.close()


@pytest.mark.parametrize("version", [1, 2])
async def test_a_marker_is_answered_when_it_is_committed(bench: Bench, version: int) -> None:
    bench.open("t", 1)
    asked = asyncio.gather(bench.ask({"commit": False}, version=version))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not asked.done()
    await bench.flush()
    assert await asked == [{(1, "t", 0): ErrorCode.NONE}]
    partition = bench.led.partitions["t"]
    assert partition.last_stable_offset == 2
    assert [tuple(each) for each in partition.log.aborted_transactions(0, 2)] == [(1, 0, 1, 2)]


async def test_each_partition_says_for_itself_what_is_wrong(bench: Bench) -> None:
    bench.open("t", 1, epoch=5)
    bench.open("t", 2)
    (answer, _) = await asyncio.gather(
        bench.ask(
            {"epoch": 4, "topics": (("t", 0), ("nowhere", 0), ("t", 7))},
            {"producer_id": 2, "tv": 2},
            {"producer_id": 3},
        ),
        bench.flush(),
    )
    assert answer == {
        (1, "t", 0): ErrorCode.INVALID_PRODUCER_EPOCH,
        (1, "nowhere", 0): ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        (1, "t", 7): ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        (2, "t", 0): ErrorCode.INVALID_PRODUCER_EPOCH,
        (3, "t", 0): ErrorCode.NONE,
    }
    answer, _ = await asyncio.gather(bench.ask({"producer_id": 3, "coordinator": 5}), bench.flush())
    assert answer == {(3, "t", 0): ErrorCode.NONE}
    assert await bench.ask({"producer_id": 3, "coordinator": 4}) == {
        (3, "t", 0): ErrorCode.TRANSACTION_COORDINATOR_FENCED
    }


async def test_too_few_replicas_take_no_marker(bench: Bench) -> None:
    leadership = bench.led.partitions["t"].leadership
    assert leadership is not None
    leadership.under_min_isr = True
    assert await bench.ask({}) == {(1, "t", 0): ErrorCode.NOT_ENOUGH_REPLICAS}
    assert bench.led.partitions["t"].log.end_offset == 0


async def test_a_leadership_that_ends_is_told(bench: Bench) -> None:
    asked = asyncio.gather(bench.ask({}))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    bench.led.partitions["t"].close(ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER))
    assert await asked == [{(1, "t", 0): ErrorCode.NOT_LEADER_OR_FOLLOWER}]


async def test_groups_are_told_in_the_order_of_the_markers_and_only_of_committed_ones(bench: Bench) -> None:
    topics = ((OFFSETS, 0), ("t", 0))
    asked = asyncio.gather(
        bench.ask({"producer_id": 1, "topics": topics}, {"producer_id": 2, "commit": False, "topics": topics}),
        bench.ask({"producer_id": 3, "topics": topics}),
    )
    for _ in range(3):
        await asyncio.sleep(0)
    assert bench.groups.ended == []
    await bench.flush()
    await asked
    assert bench.groups.ended == [(0, 1, True, 0), (0, 2, False, 1), (0, 3, True, 2)]


async def test_groups_are_told_also_when_the_answer_did_not_wait(bench: Bench) -> None:
    asked = asyncio.gather(bench.ask({"topics": ((OFFSETS, 0),)}))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    bench.led.clock.advance(2.5)
    assert await asked == [{(1, OFFSETS, 0): ErrorCode.REQUEST_TIMED_OUT}]
    assert bench.groups.ended == []
    bench.led.flush()
    assert bench.groups.ended == [(0, 1, True, 0)]


async def test_groups_that_fail_are_an_error_of_their_partition(bench: Bench) -> None:
    bench.groups.fails = True
    asked = asyncio.gather(bench.ask({"topics": ((OFFSETS, 0), ("t", 0))}))
    await asyncio.sleep(0)
    await bench.flush()
    assert await asked == [{(1, OFFSETS, 0): ErrorCode.UNKNOWN_SERVER_ERROR, (1, "t", 0): ErrorCode.NONE}]
