"""A compacted topic as a map."""

from __future__ import annotations

import asyncio

import pytest

from millrace.errors import ApiError, ErrorCode
from millrace.replication.state_topic import StateRecord, StateTopic, java_hash
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
