"""Which replicas count, case by case; whole histories are in tests/models/test_replication.py."""

from __future__ import annotations

import pytest

from millrace.replication.isr import NEVER, Follower, high_watermark, lagging, may_join

LAG_S = 10.0


def followers(**ends: int) -> dict[int, Follower]:
    return {int(name[1:]): Follower(int(name[1:]), end) for name, end in ends.items()}


@pytest.mark.parametrize(
    ("own", "members", "joining", "expected"),
    [
        (100, (1, 2, 3), (), 80),
        (70, (1, 2, 3), (), 70),
        (100, (1, 2), (), 90),
        (100, (1,), (), 100),
        (100, (1, 2), (3,), 80),  # somebody about to join holds the mark
        (100, (1, 2, 4), (), -1),  # nobody heard of 4 yet
    ],
)
def test_the_slowest_who_counts_decides(
    own: int, members: tuple[int, ...], joining: tuple[int, ...], expected: int
) -> None:
    known = {**followers(b2=90, b3=80), 4: Follower(4)}
    assert high_watermark(own, members, joining, known) == expected


@pytest.mark.parametrize(
    ("end", "mark", "epoch_start", "may"),
    [
        (50, 50, 40, True),
        (49, 50, 40, False),
        (50, 40, 51, False),
        (51, 40, 51, True),
        (-1, 0, 0, False),
        (0, 0, 0, True),
    ],
)
def test_who_may_join(end: int, mark: int, epoch_start: int, may: bool) -> None:
    assert may_join(Follower(2, end), mark, epoch_start) is may


def test_a_follower_at_the_end_is_in_step_however_long_ago_it_fetched() -> None:
    follower = Follower(2)
    follower.fetched(100, 7, leader_end=100, now=1.0)
    assert follower.caught_up_at == 1.0
    assert follower.is_in_step(100, 1000.0, LAG_S)
    assert not follower.is_in_step(101, 12.0, LAG_S)
    assert follower.is_in_step(101, 11.0, LAG_S)


def test_a_follower_that_keeps_pace_with_a_busy_leader_is_in_step() -> None:
    follower = Follower(2)
    for second in range(1, 60):
        # It never reaches the end, but always what was the end a second ago.
        follower.fetched(100 * (second - 1), 7, leader_end=100 * second, now=float(second))
    assert follower.is_in_step(10_000, 60.0, LAG_S)


def test_a_follower_that_falls_behind_is_noticed() -> None:
    follower = Follower(2)
    follower.fetched(100, 7, leader_end=100, now=1.0)
    for second in range(2, 30):
        follower.fetched(100 + second, 7, leader_end=1000 * second, now=float(second))
    assert lagging((1, 2), {2: follower}, 30_000, 30.0, LAG_S) == [2]


def test_a_silent_member_has_its_time() -> None:
    silent = Follower(3, caught_up_at=5.0)
    assert lagging((1, 3), {3: silent}, 10, 15.0, LAG_S) == []
    assert lagging((1, 3), {3: silent}, 10, 15.1, LAG_S) == [3]
    assert Follower(4).caught_up_at == NEVER
