"""A compacted topic as a map."""

from __future__ import annotations

import asyncio

import pytest

from millrace.errors import ApiError, ErrorCode
from millrace.records.batch import read_header
from millrace.records.encode import Record, encode_batch
from millrace.replication.state_topic import Entry, StateRecord, StateTopic, Transaction, java_hash
from support.state_topic import FakeTopic


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", 0), ("a", 97), ("group", 98629247), ("console-consumer-52468", None), ("zażółć", None), ("😀", 1772899)],
)
def test_the_hash_is_javas(text: str, expected: int | None) -> None:
    units = text.encode("utf-16-be")
    value = 0
    for position in range(0, len(units), 2):
        value = value * 31 + int.from_bytes(units[position : position + 2], "big")
    assert java_hash(text) == value % 2**32
    if expected is not None:
        assert java_hash(text) == expected


def test_the_partition_of_a_negative_hash() -> None:
    # "polygenelubricants".hashCode() is Integer.MIN_VALUE, of which abs is negative in Java: Kafka masks instead.
    assert java_hash("polygenelubricants") == 0x80000000
    topic = StateTopic("t", lambda _: None, lambda: 50)
    assert topic.partition_for("polygenelubricants") == 0
    assert topic.partition_for("group") == 98629247 % 50


async def test_what_is_appended_is_loaded_as_a_map_in_log_order() -> None:
    fake = FakeTopic()
    first = fake.topic.append(0, [(b"a", b"1"), (b"b", b"1")], 5)
    assert (first.base_offset, first.last_offset) == (0, 1)
    fake.topic.append(0, [(b"c", b"1")], 6)
    last = fake.topic.append(0, [(b"a", b"2"), (b"b", None)], 7)
    await fake.topic.wait_committed(0, last.last_offset)
    assert await fake.topic.load(0) == [
        StateRecord(2, b"c", b"1"), StateRecord(3, b"a", b"2"), StateRecord(4, b"b", None),
    ]  # fmt: skip


async def test_loading_lets_others_run() -> None:
    fake = FakeTopic()
    for number in range(300):
        fake.topic.append(0, [(b"key %d" % number, b"x" * 2_000)], 0)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    assert len(await fake.topic.load(0)) == 300
    task.cancel()
    assert turns > 5


async def test_an_empty_partition_loads_nothing() -> None:
    assert await FakeTopic().topic.load(0) == []


async def test_a_partition_of_another_broker_refuses() -> None:
    fake = FakeTopic()
    fake.partitions[0] = None
    assert fake.topic.leader_epoch(0) is None
    with pytest.raises(ApiError) as refused:
        fake.topic.append(0, [(b"k", b"v")], 0)
    assert refused.value.code is ErrorCode.NOT_LEADER_OR_FOLLOWER
    with pytest.raises(ApiError):
        await fake.topic.load(0)


async def test_waiting_ends_when_the_record_is_committed() -> None:
    fake = FakeTopic(commit_at_once=False)
    appended = fake.topic.append(0, [(b"k", b"v")], 0)
    waiting = asyncio.ensure_future(fake.topic.wait_committed(0, appended.last_offset))
    await asyncio.sleep(0)
    assert not waiting.done()
    fake[0].commit()
    await waiting


# Transactions

PRODUCER = 7
OTHER = 8


def write(fake: FakeTopic, producer_id: int, *entries: Entry, epoch: int = 0) -> None:
    guard = fake.topic.begin_verification(0, producer_id, epoch, bumps_epoch=False)
    fake.topic.append(0, entries, 5, Transaction(producer_id, epoch, guard))


def end(fake: FakeTopic, producer_id: int, *, commit: bool, epoch: int = 0) -> None:
    fake[0].end_transaction(producer_id, epoch, commit=commit)


async def test_a_batch_of_a_transaction_is_as_kafka_writes_it() -> None:
    fake = FakeTopic()
    write(fake, PRODUCER, (b"a", b"1"), (b"b", b"2"), epoch=3)
    write(fake, PRODUCER, (b"c", b"3"), epoch=3)
    headers = [read_header(data) for _, data in fake[0].log.stored]
    assert [(each.producer_id, each.producer_epoch, each.base_sequence, each.count) for each in headers] == [
        (PRODUCER, 3, 0, 2), (PRODUCER, 3, 0, 1),
    ]  # fmt: skip
    assert all(each.is_transactional and not each.is_control for each in headers)


async def test_records_of_transactions_are_loaded_by_how_they_ended() -> None:
    fake = FakeTopic()
    fake.topic.append(0, [(b"a", b"before"), (b"b", b"before"), (b"c", b"before")], 5)
    write(fake, PRODUCER, (b"a", b"committed"))
    write(fake, OTHER, (b"b", b"aborted"), (b"d", b"aborted"))
    end(fake, OTHER, commit=False)
    end(fake, PRODUCER, commit=True)
    write(fake, OTHER, (b"c", b"open"), (b"c", b"still open"))
    assert await fake.topic.load(0) == [
        StateRecord(1, b"b", b"before"),
        StateRecord(2, b"c", b"before"),
        StateRecord(3, b"a", b"committed"),
        StateRecord(9, b"c", b"still open", OTHER),
    ]


async def test_a_marker_at_the_end_of_the_log_counts() -> None:
    fake = FakeTopic()
    write(fake, PRODUCER, (b"a", b"1"))
    assert await fake.topic.load(0) == [StateRecord(0, b"a", b"1", PRODUCER)]
    end(fake, PRODUCER, commit=True)
    assert await fake.topic.load(0) == [StateRecord(0, b"a", b"1")]


async def test_the_record_that_lies_last_counts_wherever_its_marker_is() -> None:
    fake = FakeTopic()
    write(fake, PRODUCER, (b"a", b"1"), (b"b", b"1"))
    write(fake, OTHER, (b"b", b"2"))
    fake.topic.append(0, [(b"a", b"plain")], 5)
    end(fake, OTHER, commit=True)
    end(fake, PRODUCER, commit=True)
    assert await fake.topic.load(0) == [StateRecord(3, b"a", b"plain"), StateRecord(2, b"b", b"2")]


async def test_a_tombstone_withdraws_what_is_open() -> None:
    fake = FakeTopic()
    write(fake, PRODUCER, (b"a", b"1"))
    write(fake, OTHER, (b"a", b"2"), (b"b", b"2"))
    fake.topic.append(0, [(b"a", None)], 5)
    assert await fake.topic.load(0) == [StateRecord(3, b"a", None), StateRecord(2, b"b", b"2", OTHER)]
    end(fake, PRODUCER, commit=True)
    assert (await fake.topic.load(0))[0] == StateRecord(3, b"a", None)


async def test_transactions_of_one_producer_follow_each_other() -> None:
    fake = FakeTopic()
    write(fake, PRODUCER, (b"a", b"1"))
    end(fake, PRODUCER, commit=True)
    write(fake, PRODUCER, (b"a", b"2"), epoch=1)
    end(fake, PRODUCER, commit=False, epoch=2)
    end(fake, PRODUCER, commit=True, epoch=2)  # a marker of nothing
    assert await fake.topic.load(0) == [StateRecord(0, b"a", b"1")]


@pytest.mark.parametrize("drops_tombstones", [False, True])
async def test_a_compacted_log_loads_the_same(drops_tombstones: bool) -> None:
    fake = FakeTopic()
    fake.topic.append(0, [(b"a", b"1"), (b"b", b"1"), (b"c", b"1")], 5)
    write(fake, PRODUCER, (b"a", b"2"), (b"d", b"2"))
    write(fake, OTHER, (b"b", b"aborted"))
    end(fake, OTHER, commit=False)
    end(fake, PRODUCER, commit=True)
    fake.topic.append(0, [(b"c", None)], 5)
    write(fake, OTHER, (b"a", b"open"))
    before = await fake.topic.load(0)
    fake[0].log.compact(fake[0].log.end_offset, drops_tombstones=drops_tombstones)
    assert fake[0].log.stored[0][0] == 1, "the first record is gone"
    after = await fake.topic.load(0)
    assert after == [each for each in before if each.value is not None or not drops_tombstones]


async def test_an_unreadable_control_batch_does_not_take_the_others() -> None:
    fake = FakeTopic()
    write(fake, PRODUCER, (b"a", b"1"))
    damaged = encode_batch(
        [Record(0, 0, b"", b"")], base_offset=0, producer_id=PRODUCER, producer_epoch=0, control=True
    )
    fake[0].append(damaged, from_client=False)
    end(fake, PRODUCER, commit=True)
    assert await fake.topic.load(0) == [StateRecord(0, b"a", b"1")]


async def test_a_replay_passes_over_transactions() -> None:
    fake = FakeTopic()
    fake.topic.append(0, [(b"a", b"1")], 5)
    write(fake, PRODUCER, (b"a", b"2"))
    end(fake, PRODUCER, commit=True)
    fake.topic.append(0, [(b"a", b"3")], 5)
    assert [record async for record in fake.topic.replay(0)] == [
        StateRecord(0, b"a", b"1"), StateRecord(3, b"a", b"3"),
    ]  # fmt: skip
