"""Assignors: everybody gets a share, nothing is left over or given twice, and little moves."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.groups.assignors import ASSIGNORS, NO_RACKS, Assignment, Subscriber, range_, uniform

A, B, C = (uuid.UUID(int=number) for number in (1, 2, 3))


def member(name: str, *topics: uuid.UUID, instance_id: str | None = None, **target: tuple[int, ...]) -> Subscriber:
    named = {"a": A, "b": B, "c": C}
    return Subscriber(name, frozenset(topics), {named[each]: indices for each, indices in target.items()}, instance_id)


def sizes(assignment: Assignment) -> list[int]:
    return sorted(sum(map(len, target.values())) for target in assignment.values())


def moved(before: list[Subscriber], after: Assignment) -> int:
    return sum(
        index not in after[each.member_id].get(topic, ())
        for each in before
        for topic, indices in each.target.items()
        for index in indices
    )


def test_uniform_shares_evenly() -> None:
    assignment = uniform([member("x", A, B), member("y", A, B), member("z", A, B)], {A: 4, B: 3})
    assert sizes(assignment) == [2, 2, 3]


def test_uniform_moves_only_what_a_newcomer_gets() -> None:
    before = [member("x", A, a=(0, 1, 2)), member("y", A, a=(3, 4, 5)), member("z", A)]
    after = uniform(before, {A: 6})
    assert sizes(after) == [2, 2, 2]
    assert moved(before, after) == 2


def test_uniform_leaves_a_fair_assignment_alone() -> None:
    before = [member("x", A, a=(0, 4)), member("y", A, a=(1, 3)), member("z", A, a=(2,))]
    assert moved(before, uniform(before, {A: 5})) == 0


def test_uniform_gives_the_share_of_those_who_left_to_the_others() -> None:
    before = [member("x", A, a=(0, 1)), member("y", A, a=(2, 3))]
    after = uniform(before, {A: 6})
    assert sizes(after) == [3, 3]
    assert moved(before, after) == 0


def test_uniform_drops_partitions_and_topics_that_are_gone() -> None:
    assert uniform([member("x", A, B, a=(0, 7), c=(0,))], {A: 2}) == {"x": {A: (0, 1)}}


def in_rack(rack_id: str, name: str, a: tuple[int, ...] = ()) -> Subscriber:
    return replace(member(name, A, a=a), rack_id=rack_id)


EAST_AND_WEST = {A: [{"east"}, {"west"}] * 3}
"""Even partitions have their replica in the east, odd ones in the west."""


def test_uniform_gives_what_is_near() -> None:
    after = uniform([in_rack("west", "x"), in_rack("east", "y")], {A: 6}, EAST_AND_WEST)
    assert after == {"x": {A: (1, 3, 5)}, "y": {A: (0, 2, 4)}}


def test_uniform_keeps_what_is_near() -> None:
    before = [in_rack("west", "x", a=(0, 1, 2, 3, 4, 5)), in_rack("east", "y")]
    after = uniform(before, {A: 6}, EAST_AND_WEST)
    assert after == {"x": {A: (1, 3, 5)}, "y": {A: (0, 2, 4)}}


def test_uniform_shares_evenly_whatever_the_racks_are() -> None:
    before = [in_rack("west", "x"), in_rack("west", "y"), in_rack("nowhere", "z"), member("somewhere", A)]
    after = uniform(before, {A: 6}, EAST_AND_WEST)
    assert sizes(after) == [1, 1, 2, 2]


def test_uniform_moves_nothing_for_a_rack_alone() -> None:
    before = [in_rack("west", "x", a=(0, 2, 4)), in_rack("east", "y", a=(1, 3, 5))]
    assert moved(before, uniform(before, {A: 6}, EAST_AND_WEST)) == 0


def test_uniform_with_unlike_subscriptions() -> None:
    after = uniform([member("x", A), member("y", A, B), member("z", B)], {A: 4, B: 2})
    assert sizes(after) == [2, 2, 2]
    assert B not in after["x"]
    assert A not in after["z"]


def test_uniform_evens_out_what_unlike_members_have() -> None:
    before = [member("x", A, B, a=(0, 1, 2, 3), b=(0, 1)), member("y", A), member("z", B)]
    after = uniform(before, {A: 4, B: 2})
    loads = {name: sum(map(len, target.values())) for name, target in after.items()}
    assert abs(loads["x"] - loads["y"]) <= 1
    assert abs(loads["x"] - loads["z"]) <= 1


def test_range_gives_neighbours_and_the_same_ones_of_every_topic() -> None:
    assignment = range_([member("y", A, B), member("x", A, B)], {A: 5, B: 5})
    assert assignment == {"x": {A: (0, 1, 2), B: (0, 1, 2)}, "y": {A: (3, 4), B: (3, 4)}}


def test_range_goes_by_instance_id_first() -> None:
    assignment = range_([member("a", A), member("z", A, instance_id="i1")], {A: 2})
    assert assignment == {"z": {A: (0,)}, "a": {A: (1,)}}


def test_range_with_more_members_than_partitions() -> None:
    assert range_([member("x", A), member("y", A)], {A: 1}) == {"x": {A: (0,)}, "y": {}}


@pytest.mark.parametrize("name", list(ASSIGNORS))
def test_nobody_and_nothing(name: str) -> None:
    assert ASSIGNORS[name]([], {A: 3}, NO_RACKS) == {}
    assert ASSIGNORS[name]([member("x")], {A: 3}, NO_RACKS) == {"x": {}}


TOPICS = st.sets(st.sampled_from((A, B, C)))
TARGETS = st.dictionaries(st.sampled_from((A, B, C)), st.sets(st.integers(0, 8)).map(lambda s: tuple(sorted(s))))


@given(
    members=st.lists(st.tuples(TOPICS, TARGETS), min_size=1, max_size=8),
    counts=st.dictionaries(st.sampled_from((A, B, C)), st.integers(1, 9)),
    name=st.sampled_from(list(ASSIGNORS)),
    racks=st.lists(st.sampled_from((None, "east", "west")), min_size=8, max_size=8),
)
def test_every_partition_goes_to_one_subscriber(
    members: list[tuple[set[uuid.UUID], dict[uuid.UUID, tuple[int, ...]]]],
    counts: dict[uuid.UUID, int],
    name: str,
    racks: list[str | None],
) -> None:
    subscribers = [
        Subscriber(f"m{number}", topics, target, rack_id=rack_id)
        for number, ((topics, target), rack_id) in enumerate(zip(members, racks, strict=False))
    ]
    assignment = ASSIGNORS[name](subscribers, counts, {topic: [{"east"}, {"west", "east"}] for topic in counts})
    given_out = [
        (topic, index) for target in assignment.values() for topic, indices in target.items() for index in indices
    ]
    subscribed = {topic for each in subscribers for topic in each.topics if topic in counts}
    assert sorted(given_out) == sorted((topic, index) for topic in subscribed for index in range(counts[topic]))
    for each in subscribers:
        assert set(assignment[each.member_id]) <= each.topics
    if name == "uniform" and len({frozenset(each.topics) for each in subscribers}) == 1:
        assert max(sizes(assignment)) - min(sizes(assignment)) <= 1
