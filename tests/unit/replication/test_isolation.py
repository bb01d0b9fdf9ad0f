"""A log that raises concerns its partition alone: in a fetch session, in applying a delta, in retention."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from millrace.cluster.planning import ConfigAlteration, NewTopic
from millrace.errors import StorageError
from millrace.metadata.deltas import ResourceType
from millrace.replication.partition import Partition
from support.batches import batch
from support.disk import FaultyFiles
from support.one_loop import Brokers, until


@pytest.fixture
async def brokers(tmp_path: Path) -> AsyncIterator[Brokers]:
    async with Brokers(tmp_path) as made:
        yield made


def said(caplog: pytest.LogCaptureFixture, *words: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if all(word in record.getMessage() for word in words)]


# --- the fetch session ------------------------------------------------------------------------------------------------


async def test_a_log_that_raises_is_left_out_and_tried_again(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await brokers.create("good", (1, 2, 3))
    await brokers.create("bad", (1, 2, 3))
    good, bad = brokers.replica(1, "good"), brokers.replica(1, "bad")
    ill = brokers.replica(3, "bad")
    caplog.set_level(logging.INFO)
    tried = 0

    def raise_() -> tuple[int, int]:
        nonlocal tried
        tried += 1
        raise StorageError("the planted fault")

    monkeypatch.setattr(ill, "fetch_position", raise_)
    late = bad.append(batch(3)).last_offset
    await until(lambda: tried > 3)
    await brokers.write(good)
    assert bad.high_watermark.offset <= late
    await until(lambda: tried > 6)
    assert len(said(caplog, "bad-0", "the planted fault")) == 1
    monkeypatch.undo()
    async with asyncio.timeout(20):
        await bad.wait_committed(late)
    await until(lambda: bool(said(caplog, "bad-0", "is copied again")))
    await brokers.write(good)


async def test_a_log_that_cannot_be_opened_does_not_keep_the_others_from_catching_up(
    brokers: Brokers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await brokers.create("good", (1, 2, 3))
    await brokers.create("bad", (1, 2, 3))
    good, bad = brokers.replica(1, "good"), brokers.replica(1, "bad")
    for each in (good, bad):
        await brokers.write(each)
    await brokers.stop(3)
    await brokers.write(good)
    files = FaultyFiles(tmp_path / "3")
    files.fail("open", match="bad-0", times=-1)
    files.fail("read_file", match="bad-0", times=-1)
    await brokers.start(3, files)
    await until(lambda: 3 in good.state.isr)
    await brokers.write(good)
    assert 3 not in bad.state.isr
    assert said(caplog, "bad-0", "cannot be copied")


async def test_a_flush_that_does_not_come_holds_up_nobody_else(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await brokers.create("good", (1, 2, 3))
    await brokers.create("slow", (1, 2, 3))
    good, slow = brokers.replica(1, "good"), brokers.replica(1, "slow")
    held = brokers.replica(3, "slow")
    is_flushed = Partition.is_flushed
    monkeypatch.setattr(
        Partition,
        "is_flushed",
        property(lambda self: self is not held and is_flushed.fget(self)),  # type: ignore[attr-defined]
    )
    late = slow.append(batch(3)).last_offset
    await until(lambda: held.log.end_offset == late + 1)
    for _ in range(5):
        await brokers.write(good)
    assert slow.high_watermark.offset == 0  # nothing is promised that is not on disk
    monkeypatch.undo()
    async with asyncio.timeout(20):
        await slow.wait_committed(late)


async def test_a_topic_that_is_to_be_flushed_from_now_on(brokers: Brokers) -> None:
    await brokers.create("busy", (1, 2, 3))
    await brokers.create("idle", (1, 2, 3), flush_mode="os")
    busy, idle = brokers.replica(1, "busy"), brokers.replica(1, "idle")
    await brokers.write(idle)
    alteration = ConfigAlteration(ResourceType.TOPIC, "idle", (("flush.mode", 0, "group"),))
    (error,) = await brokers.controller.controller.alter_configs([alteration])
    assert error is None
    await brokers.create("another", (1, 2, 3))  # every session begins anew
    await brokers.write(busy, timeout_s=2)
    await brokers.write(idle)


# --- a delta ----------------------------------------------------------------------------------------------------------


async def test_a_replica_that_cannot_take_its_role_keeps_it_from_nobody_else(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await brokers.create("t", *[(3, 1, 2)] * 4)
    for index in range(4):
        await brokers.write(brokers.replica(3, "t", index))
    ill = brokers.replica(1, "t", 1)

    def assign(_epoch: int) -> None:
        raise StorageError("the planted fault")

    monkeypatch.setattr(ill.log, "assign_epoch", assign)
    await brokers.stop(3)  # one delta: all four are led by broker 1 from now on
    for index in (0, 2, 3):
        await brokers.write(await brokers.leads(1, "t", index))
    assert len(said(caplog, "t-1", "the planted fault")) == 1
    # Nobody leads with a log that does not know the epoch: each use tries again to begin it.
    leader = await brokers.leads(1, "t", 1)
    with pytest.raises(StorageError):
        leader.append(batch(1))
    monkeypatch.undo()
    await brokers.write(leader)
    assert leader.log.latest_epoch == leader.leader_epoch
    assert leader.leadership is not None
    assert leader.leadership._epoch_start == 3


async def test_a_listener_that_raises_keeps_a_role_from_nobody(
    brokers: Brokers, caplog: pytest.LogCaptureFixture
) -> None:
    def raise_(topic: str, _partitions: list[Partition]) -> None:
        if topic == "bad":
            raise ZeroDivisionError("the planted fault")

    brokers.services(1).replicas.on_led.insert(0, raise_)
    await brokers.create("bad", (1, 2, 3))
    await brokers.create("good", (1, 2, 3))
    for topic in ("bad", "good"):
        await brokers.write(brokers.replica(1, topic))
    assert said(caplog, "could not be applied to bad")


# --- retention --------------------------------------------------------------------------------------------------------


async def test_retention_goes_on_when_a_topic_is_deleted_in_the_middle_of_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"log.retention.check.interval.ms": "10"}
    async with Brokers(tmp_path, 1, settings=settings) as alone:
        for topic in ("a", "c"):
            await alone.create(topic, (1,), retention_bytes="1", segment_bytes="1048576")
        replicas = alone.services(1).replicas
        enforce = Partition.enforce_retention
        swept: list[str] = []

        def sweep(self: Partition) -> None:
            swept.append(self.topic)
            if self.topic == "a":
                if replicas.held("b", 0) is not None:
                    replicas._remove(alone.image.topic("b"))  # what the delta does that deletes it
                raise StorageError("the planted fault")
            enforce(self)

        monkeypatch.setattr(Partition, "enforce_retention", sweep)
        await alone.controller.controller.create_topics([NewTopic("b", 1)])
        await until(lambda: replicas.held("b", 0) is None)
        swept.clear()
        await until(lambda: swept.count("c") > 3)
        assert said(caplog, "retention of", "a-0", "the planted fault")
        assert not said(caplog, "b-0")
        last = alone.replica(1, "c")
        await alone.write(last)
        last.log.roll()
        await until(lambda: last.log.start_offset == 3)
