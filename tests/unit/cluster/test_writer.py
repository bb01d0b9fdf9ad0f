"""The writer by itself: reigns begin and end, and a late failure of one does not end the next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from millrace.clock import SystemClock
from millrace.cluster.image import ClusterImage
from millrace.cluster.planning import Plan, plan_producer_ids
from millrace.cluster.view import MetadataView
from millrace.cluster.writer import MetadataWriter
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import Change, ControllerChanged
from support.metadata import Database, ExpiringStore


@asynccontextmanager
async def writing() -> AsyncIterator[tuple[MetadataWriter, ExpiringStore]]:
    """A writer whose tasks run, and that has no reign yet."""
    store = ExpiringStore(Database())
    await store.open()
    view = MetadataView(store, SystemClock())
    writer = MetadataWriter(store, view, deltas_per_snapshot=1000)
    tasks = [asyncio.create_task(view.follow()), asyncio.create_task(writer.run())]
    try:
        yield writer, store
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await store.close()


async def reign(writer: MetadataWriter, store: ExpiringStore) -> int:
    epoch = await store.elect(1, replacing=store.database.controller_epoch)
    assert epoch is not None

    def first(_image: ClusterImage) -> list[Change]:
        return [ControllerChanged(1, epoch)]

    await writer.begin(epoch, first)
    return epoch


def ids(image: ClusterImage) -> Plan[range]:
    return plan_producer_ids(image, 1)


async def test_changes_are_taken_in_a_reign_only() -> None:
    async with writing() as (writer, store):
        with pytest.raises(ApiError) as caught:
            await writer.change(ids)
        assert caught.value.code is ErrorCode.NOT_CONTROLLER
        await reign(writer, store)
        assert await writer.change(ids) == range(1000)
        writer.end("a test")
        assert not writer.is_open and "closed" in repr(writer)
        with pytest.raises(ApiError):
            await writer.change(ids)


async def test_the_fence_ends_the_reign() -> None:
    lost = asyncio.Event()
    async with writing() as (writer, store):
        await reign(writer, store)
        writer.on_lost = lost.set
        await store.elect(2, replacing=store.database.controller_epoch)
        with pytest.raises(ApiError) as caught:
            await writer.change(ids)
        assert caught.value.code is ErrorCode.NOT_CONTROLLER
        assert writer.epoch is None and not writer.is_open and lost.is_set()


async def test_a_write_of_an_earlier_reign_that_fails_late_does_not_end_the_next() -> None:
    async with writing() as (writer, store):
        await reign(writer, store)
        store.suspend()
        late = asyncio.create_task(writer.change(ids))
        await asyncio.sleep(0.01)
        store.lapse()
        writer.end("the session has expired")
        store.reconnect()
        epoch = await reign(writer, store)
        with pytest.raises(ApiError) as caught:
            await late
        assert caught.value.code is ErrorCode.NOT_CONTROLLER
        assert writer.epoch == epoch and writer.is_open
        assert await writer.change(ids) == range(1000)


async def test_a_reign_that_could_not_begin_is_none() -> None:
    async with writing() as (writer, store):
        await store.elect(1)
        await store.elect(2, replacing=1)
        with pytest.raises(ApiError):
            await writer.begin(1, lambda _image: [ControllerChanged(1, 1)])
        assert writer.epoch is None and not writer.is_open


async def test_a_reign_ends_when_the_log_says_so() -> None:
    async with writing() as (writer, store):
        epoch = await reign(writer, store)
        await writer.change(lambda _image: Plan(None, (ControllerChanged(-1, epoch),)))
        assert writer.epoch is None
