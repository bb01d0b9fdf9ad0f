"""Fetch and ListOffsets for who reads committed records, and for who does not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.handlers.fetch import fetch
from millrace.handlers.offsets import EARLIEST, LATEST, MAX_TIMESTAMP, list_offsets
from millrace.handlers.promise import Promise
from millrace.records.batch import split
from millrace.storage.producers import UNVERIFIED
from millrace.wire.hot import FetchCall, FetchPartition, FetchReply, FetchResult
from millrace.wire.keys import ApiKey
from millrace.wire.messages.offsets import ListOffsetsRequest, ListOffsetsResponse
from support.batches import NOW_MS, batch
from support.led_partitions import LedPartitions

READ_UNCOMMITTED, READ_COMMITTED = 0, 1


class Topic:
    """One partition and how it is asked."""

    def __init__(self, home: Path) -> None:
        self.led = LedPartitions(home, "t")
        self.partition = self.led.partitions["t"]
        self._sequences: dict[int, int] = {}

    def write(self, producer_id: int | None = None, count: int = 1, timestamp_ms: int = NOW_MS) -> None:
        if producer_id is None:
            self.partition.append(batch(count, timestamp_ms=timestamp_ms))
            return
        sequence = self._sequences.get(producer_id, 0)
        self._sequences[producer_id] = sequence + count
        data = batch(
            count,
            timestamp_ms=timestamp_ms,
            producer_id=producer_id,
            producer_epoch=0,
            sequence=sequence,
            transactional=True,
        )
        self.partition.append(data, verification=UNVERIFIED)

    def end(self, producer_id: int, *, commit: bool) -> None:
        self.partition.end_transaction(producer_id, 0, 0, commit=commit, transaction_version=0, now_ms=NOW_MS)

    def ask(self, offset: int, isolation: int, *, wait_ms: int = 0, version: int = 12, max_bytes: int = 1 << 20):  # type: ignore[no-untyped-def]
        wanted = FetchPartition(0, -1, offset, -1, -1, max_bytes)
        call = FetchCall(-1, wait_ms, 1, 1 << 20, isolation, 0, -1, [("t", [wanted])], [], "")
        return fetch(self.led.context(ApiKey.FETCH, version), call)

    def fetch(self, offset: int, isolation: int, **options: int) -> FetchResult:
        reply = self.ask(offset, isolation, **options)
        assert isinstance(reply, FetchReply)
        return reply.topics[0][1][0]

    def offset(self, timestamp_ms: int, isolation: int) -> int:
        request = ListOffsetsRequest(
            isolation_level=isolation,
            topics=[
                ListOffsetsRequest.ListOffsetsTopic(
                    name="t",
                    partitions=[
                        ListOffsetsRequest.ListOffsetsPartition(
                            partition_index=0, timestamp=timestamp_ms, current_leader_epoch=-1
                        )
                    ],
                )
            ],
        )
        answer = list_offsets(self.led.context(ApiKey.LIST_OFFSETS, 7), request)
        assert isinstance(answer, ListOffsetsResponse)
        assert answer.topics[0].partitions[0].error_code == 0
        return answer.topics[0].partitions[0].offset


@pytest.fixture
def topic(tmp_path: Path) -> Iterator[Topic]:
    made = Topic(tmp_path)
    yield made
    made.led.close()


def bases(result: FetchResult) -> list[int]:
    return [header.base_offset for header, _ in split(result.records)]


def test_a_fetch_ends_at_the_last_stable_offset(topic: Topic) -> None:
    topic.write(count=2)
    topic.write(7, count=2)
    topic.write(count=2)
    topic.led.flush()
    committed = topic.fetch(0, READ_COMMITTED)
    assert (committed.high_watermark, committed.last_stable_offset) == (6, 2)
    assert bases(committed) == [0]
    assert topic.fetch(2, READ_COMMITTED).records == b""
    assert topic.fetch(5, READ_COMMITTED).records == b""
    everything = topic.fetch(0, READ_UNCOMMITTED)
    assert (everything.high_watermark, everything.last_stable_offset) == (6, 2)
    assert bases(everything) == [0, 2, 4]


def test_a_transaction_is_shown_when_its_marker_is_committed(topic: Topic) -> None:
    topic.write(7)
    topic.led.flush()
    topic.end(7, commit=True)
    assert bases(topic.fetch(0, READ_COMMITTED)) == []
    topic.led.flush()
    assert bases(topic.fetch(0, READ_COMMITTED)) == [0, 1]


def test_aborted_transactions_are_named_in_the_order_of_their_first_offsets(topic: Topic) -> None:
    topic.write(1)
    topic.write(2)
    topic.write(3)
    topic.end(2, commit=False)
    topic.end(1, commit=False)
    topic.end(3, commit=True)
    topic.write()
    topic.led.flush()
    assert topic.fetch(0, READ_COMMITTED).aborted == [(1, 0), (2, 1)]
    assert topic.fetch(4, READ_COMMITTED).aborted == [(1, 0)], "that of 2 has ended before"
    assert topic.fetch(5, READ_COMMITTED).aborted == []
    assert topic.fetch(0, READ_COMMITTED, max_bytes=1).aborted == [(1, 0)], "only what the answer brings"


def test_who_reads_everything_is_not_told_of_aborts(topic: Topic) -> None:
    """Null is not the same as none: so Kafka has it."""
    topic.write(1)
    topic.end(1, commit=False)
    topic.led.flush()
    assert topic.fetch(0, READ_UNCOMMITTED).aborted is None
    assert topic.fetch(2, READ_COMMITTED).aborted == []


async def test_a_long_poll_ends_when_the_last_stable_offset_moves(topic: Topic) -> None:
    topic.write(7)
    topic.led.flush()
    promise = topic.ask(0, READ_COMMITTED, wait_ms=1000)
    assert isinstance(promise, Promise)
    answers: list[FetchReply] = []
    promise.then(answers.append)
    topic.write()
    topic.led.flush()
    await asyncio.sleep(0)
    assert not answers, "more was committed, but not what comes first"
    topic.end(7, commit=True)
    await asyncio.sleep(0)
    assert not answers
    topic.led.flush()
    await asyncio.sleep(0)
    assert bases(answers[0].topics[0][1][0]) == [0, 1, 2]


def test_offsets_of_times_lie_below_the_last_stable_offset(topic: Topic) -> None:
    topic.write(timestamp_ms=NOW_MS)
    topic.write(7, timestamp_ms=NOW_MS + 10)
    topic.write(timestamp_ms=NOW_MS + 20)
    topic.led.flush()
    asked = (EARLIEST, LATEST, MAX_TIMESTAMP, NOW_MS, NOW_MS + 5, NOW_MS + 15)
    assert [topic.offset(each, READ_UNCOMMITTED) for each in asked] == [0, 3, 2, 0, 1, 2]
    assert [topic.offset(each, READ_COMMITTED) for each in asked] == [0, 1, 0, 0, -1, -1]
    topic.end(7, commit=False)
    topic.led.flush()
    assert [topic.offset(each, READ_COMMITTED) for each in asked] == [0, 4, 2, 0, 1, 2]
