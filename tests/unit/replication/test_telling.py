"""What a leader tells in a fetch session counts as told only if its follower took it over.

Followers' fetches wait for longer than these tests do: whoever is not told at once is not told at all.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import StorageError
from millrace.replication import follower as following
from millrace.replication.partition import Partition
from support.one_loop import Brokers, until

PATIENT = {"replica.fetch.wait.max.ms": "60000"}


@pytest.fixture
async def brokers(tmp_path: Path) -> AsyncIterator[Brokers]:
    async with Brokers(tmp_path, settings=PATIENT) as made:
        await made.create("t", (1, 2, 3))
        await made.write(made.replica(1, "t"))
        yield made


def say_diverging(monkeypatch: pytest.MonkeyPatch, leader: Partition, times: int) -> None:
    """Answer broker 3 so often, from its next fetch on, that the logs part at the very end: there is nothing to cut."""
    serve = leader.serve_follower
    left = times

    def served(broker_id: int, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        answer = serve(broker_id, *args, **kwargs)
        if broker_id != 3 or not left:
            return answer
        left -= 1
        return leader.log.latest_epoch, leader.log.end_offset

    monkeypatch.setattr(leader, "serve_follower", served)


async def test_a_follower_that_has_to_cut_twice_is_told_twice(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its epochs and the leader's alternate one cut is not enough, and nothing else is new the second time."""
    leader, follower = brokers.replica(1, "t"), brokers.replica(3, "t")
    cuts = 0
    cut = follower.truncate_to_leader

    def counted(epoch: int, end_offset: int) -> None:
        nonlocal cuts
        cuts += 1
        cut(epoch, end_offset)

    monkeypatch.setattr(follower, "truncate_to_leader", counted)
    say_diverging(monkeypatch, leader, 3)
    await brokers.create("another", (1, 2, 3))  # every session begins anew
    await until(lambda: cuts == 3)
    await brokers.write(leader)


async def test_marks_that_came_with_a_cut_are_told_again(brokers: Brokers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower does not know yet that what is left after a cut is the leader's: it takes over no mark."""
    leader, follower = brokers.replica(1, "t"), brokers.replica(3, "t")
    mark = leader.high_watermark.offset
    say_diverging(monkeypatch, leader, 1)
    leader.delete_records_before(2)
    await until(lambda: follower.log.start_offset == 2)
    assert follower.high_watermark.offset == mark


async def test_marks_that_could_not_be_taken_over_are_told_again(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the pause after a failure is over before the next fetch."""
    monkeypatch.setattr(following, "FIRST_PAUSE_S", 0.0)
    leader, follower = brokers.replica(1, "t"), brokers.replica(3, "t")
    follow = follower.follow_leader_marks
    tried = 0

    def fail_once(high_watermark: int, start_offset: int) -> None:
        nonlocal tried
        tried += 1
        if tried == 1:
            raise StorageError("the planted fault")
        follow(high_watermark, start_offset)

    monkeypatch.setattr(follower, "follow_leader_marks", fail_once)
    leader.delete_records_before(2)
    await until(lambda: follower.log.start_offset == 2)
    assert tried > 1
