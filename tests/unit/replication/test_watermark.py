"""The watermark wakes whom it concerns, once, in order."""

from __future__ import annotations

import pytest

from millrace.errors import ApiError, ErrorCode
from millrace.replication.watermark import Watermark


async def test_an_offset_already_reached_needs_no_waiting() -> None:
    mark = Watermark(5)
    assert mark.reach(5) is None
    assert mark.reach(4) is None


async def test_waiters_are_woken_up_to_the_mark_and_no_further() -> None:
    mark = Watermark(0)
    futures = {offset: mark.reach(offset) for offset in (3, 1, 2)}
    mark.advance(2)
    assert {offset for offset, future in futures.items() if future is not None and future.done()} == {1, 2}


async def test_the_mark_never_goes_back_by_itself() -> None:
    mark = Watermark(5)
    mark.advance(3)
    assert mark.offset == 5


async def test_watchers_hear_of_every_movement_until_they_leave() -> None:
    mark = Watermark(0)
    heard: list[int] = []

    def watcher() -> None:
        heard.append(mark.offset)

    mark.watch(watcher)
    mark.advance(1)
    mark.advance(1)
    mark.advance(2)
    mark.unwatch(watcher)
    mark.advance(3)
    assert heard == [1, 2]


async def test_a_watcher_may_leave_while_it_is_woken() -> None:
    mark = Watermark(0)
    heard: list[str] = []

    def leaves() -> None:
        heard.append("leaves")
        mark.unwatch(leaves)

    mark.watch(lambda: heard.append("stays"))
    mark.watch(leaves)
    mark.watch(lambda: heard.append("stays too"))
    mark.advance(1)
    assert sorted(heard) == ["leaves", "stays", "stays too"]
    mark.advance(2)
    assert sorted(heard[3:]) == ["stays", "stays too"]


async def test_failure_ends_every_wait_and_tells_the_watchers() -> None:
    mark = Watermark(0)
    future = mark.reach(1)
    heard: list[int] = []
    mark.watch(lambda: heard.append(1))
    mark.fail(ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER))
    assert future is not None
    with pytest.raises(ApiError):
        await future
    assert heard == [1]


async def test_a_cancelled_wait_does_not_disturb_the_others() -> None:
    mark = Watermark(0)
    first, second = mark.reach(1), mark.reach(1)
    assert first is not None
    assert second is not None
    first.cancel()
    mark.advance(1)
    assert second.done()
    assert first.cancelled()
