"""The assignor of share groups: everything is read, everybody reads, and little moves."""

from __future__ import annotations

import uuid

from hypothesis import given
from hypothesis import strategies as st

from millrace.groups.assignors import Assignment, Subscriber
from millrace.groups.share.assignor import simple

IDS = [uuid.UUID(int=number) for number in range(4)]
A, B = IDS[:2]
PARTITIONS = st.dictionaries(st.sampled_from(IDS), st.integers(1, 7).map(range), min_size=1)
MEMBERS = st.lists(st.sets(st.sampled_from(IDS)), max_size=12)


def members(topics: list[set[uuid.UUID]], before: Assignment | None = None) -> list[Subscriber]:
    return [
        Subscriber(f"m{number:02}", frozenset(each), (before or {}).get(f"m{number:02}", {}))
        for number, each in enumerate(topics)
    ]


def slots(targets: Assignment) -> list[tuple[uuid.UUID, int]]:
    return [(topic, index) for target in targets.values() for topic, indices in target.items() for index in indices]


@given(MEMBERS, PARTITIONS, MEMBERS, PARTITIONS)
def test_everything_is_read_and_everybody_reads(
    before: list[set[uuid.UUID]], had: dict[uuid.UUID, range], now: list[set[uuid.UUID]], has: dict[uuid.UUID, range]
) -> None:
    old = simple(members(before), had)
    new = simple(members(now, old), has)
    assert new.keys() == {f"m{number:02}" for number in range(len(now))}
    wanted = set().union(*now)
    assert set(slots(new)) == {(topic, index) for topic in has if topic in wanted for index in has[topic]}
    for number, topics in enumerate(now):
        own = new[f"m{number:02}"]
        assert set(own) <= topics & has.keys()
        assert bool(own) == bool(topics & has.keys())
        assert all(list(indices) == sorted(set(indices)) for indices in own.values())


@given(st.integers(1, 12), PARTITIONS, st.integers(1, 12))
def test_members_that_subscribe_alike_read_equally_much(
    before: int, partitions: dict[uuid.UUID, range], now: int
) -> None:
    old = simple(members([set(IDS)] * before), partitions)
    new = simple(members([set(IDS)] * now, old), partitions)
    count = sum(map(len, partitions.values()))
    sizes = [sum(map(len, target.values())) for target in new.values()]
    readers_each = -(-now // count)
    assert max(sizes) <= -(-readers_each * count // now)
    assert sum(sizes) <= readers_each * count
    if count >= now:
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == count, "a partition has one reader where there are enough of them"


@given(st.integers(1, 12), PARTITIONS)
def test_nothing_moves_without_need(count: int, partitions: dict[uuid.UUID, range]) -> None:
    old = simple(members([set(IDS)] * count), partitions)
    assert simple(members([set(IDS)] * count, old), partitions) == old


def test_a_newcomer_takes_no_more_than_its_share() -> None:
    old = simple(members([{A}] * 2), {A: range(6)})
    new = simple(members([{A}] * 3, old), {A: range(6)})
    assert [len(new[member][A]) for member in sorted(new)] == [2, 2, 2]
    for member in ("m00", "m01"):
        assert set(new[member][A]) <= set(old[member][A])


def test_topics_are_spread_each_by_itself_where_subscriptions_differ() -> None:
    targets = simple(members([{A}, {B}, {A, B}]), {A: range(4), B: range(4)})
    assert [{topic: len(own) for topic, own in targets[f"m0{number}"].items()} for number in range(3)] == [
        {A: 2},
        {B: 2},
        {A: 2, B: 2},
    ]


def test_nobody_and_nothing() -> None:
    assert simple([], {A: range(3)}) == {}
    assert simple(members([{A}]), {}) == {"m00": {}}
