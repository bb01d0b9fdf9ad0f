"""Plans that even out replicas and leaders: what must hold for every cluster, and a few that people know."""

from __future__ import annotations

import uuid
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.cluster.balance import plan_balance
from millrace.cluster.image import ClusterImage
from millrace.cluster.reassignments import Reassignment
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import PartitionChanged, PartitionState, TopicCreated
from support.metadata import cluster_of


def with_topics(image: ClusterImage, topics: list[list[tuple[int, ...]]]) -> ClusterImage:
    return image.apply(
        tuple(
            TopicCreated(f"t{number}", uuid.UUID(int=number + 2), tuple(PartitionState(r, r, r[0]) for r in partitions))
            for number, partitions in enumerate(topics)
        )
    )


def moved(image: ClusterImage, plan: list[Reassignment]) -> ClusterImage:
    """The image when every move is done."""
    changes = []
    for item in plan:
        assert item.replicas is not None
        state = PartitionState(item.replicas, item.replicas, item.replicas[0])
        changes.append(PartitionChanged(image.topics[item.topic].topic_id, item.index, state))
    return image.apply(tuple(changes))


def replicas(image: ClusterImage) -> dict[tuple[str, int], tuple[int, ...]]:
    return {(topic.name, index): state.replicas for topic, index, state in image.partitions()}


def copies(before: ClusterImage, after: ClusterImage) -> int:
    """How many replicas have to be copied."""
    old = replicas(before)
    return sum(len(set(new) - set(old[key])) for key, new in replicas(after).items())


def spread(image: ClusterImage, brokers: set[int]) -> int:
    counts = Counter(replica for held in replicas(image).values() for replica in held)
    return max(counts[broker] for broker in brokers) - min(counts[broker] for broker in brokers)


def leader_spread(image: ClusterImage, brokers: set[int]) -> int:
    counts = Counter(held[0] for held in replicas(image).values())
    return max(counts[broker] for broker in brokers) - min(counts[broker] for broker in brokers)


def racks_of(image: ClusterImage, held: tuple[int, ...]) -> int:
    return len({image.brokers[replica].rack for replica in held})


def test_a_new_broker_gets_its_share_and_no_more_is_copied() -> None:
    assignments = [(1, 2, 3), (2, 3, 1), (3, 1, 2)] * 4
    image = with_topics(cluster_of(1, 2, 3, 4), [assignments])
    after = moved(image, plan_balance(image, brokers_in={1, 2, 3, 4}, drain=set()))
    assert spread(after, {1, 2, 3, 4}) == 0 and leader_spread(after, {1, 2, 3, 4}) == 0
    assert copies(image, after) == 9


def test_a_drained_broker_is_empty_afterwards() -> None:
    assignments = [(1, 2), (2, 3), (3, 4), (4, 1)] * 3
    image = with_topics(cluster_of(1, 2, 3, 4), [assignments])
    after = moved(image, plan_balance(image, brokers_in={1, 2, 3}, drain={4}))
    assert not list(after.held_by(4))
    assert spread(after, {1, 2, 3}) <= 1 and leader_spread(after, {1, 2, 3}) <= 1
    assert copies(image, after) == 6


def test_more_replicas_are_spread_over_brokers_and_racks() -> None:
    image = with_topics(cluster_of(1, 2, 3), [[(1,)] * 6])
    after = moved(image, plan_balance(image, brokers_in={1, 2, 3}, drain=set(), factor=3))
    assert all(set(held) == {1, 2, 3} for held in replicas(after).values())
    assert leader_spread(after, {1, 2, 3}) == 0 and copies(image, after) == 12
    assert plan_balance(after, brokers_in={1, 2, 3}, drain=set(), factor=3) == []


def test_fewer_replicas_are_those_that_can_stay() -> None:
    image = with_topics(cluster_of(1, 2, 3), [[(3, 1, 2), (1, 2, 3), (2, 1, 3)]])
    after = moved(image, plan_balance(image, brokers_in={1, 2}, drain=set(), factor=2))
    assert all(set(held) == {1, 2} for held in replicas(after).values()) and copies(image, after) == 0


def test_more_replicas_than_brokers_cannot_be() -> None:
    image = with_topics(cluster_of(1, 2, 3), [[(1,)]])
    with pytest.raises(ApiError, match="3 replicas of t0-0 need 3 brokers that run") as caught:
        plan_balance(image, brokers_in={1, 2}, drain=set(), factor=3)
    assert caught.value.code is ErrorCode.INVALID_REPLICATION_FACTOR


def test_a_broker_that_is_needed_cannot_be_drained() -> None:
    image = with_topics(cluster_of(1, 2, 3), [[(1, 2, 3)]])
    with pytest.raises(ApiError) as caught:
        plan_balance(image, brokers_in={1, 2}, drain={3})
    assert caught.value.code is ErrorCode.INVALID_REPLICATION_FACTOR


def test_leaders_alone_are_evened_out_by_order() -> None:
    image = with_topics(cluster_of(1, 2, 3), [[(1, 2, 3)] * 6])
    after = moved(image, plan_balance(image, brokers_in={1, 2, 3}, drain=set()))
    assert leader_spread(after, {1, 2, 3}) == 0 and copies(image, after) == 0


def test_leadership_is_handed_on_where_it_cannot_go_directly() -> None:
    image = with_topics(cluster_of(1, 2, 3), [[(1, 2), (1, 2), (2, 3), (2, 3)]])
    after = moved(image, plan_balance(image, brokers_in={1, 2, 3}, drain=set()))
    assert leader_spread(after, {1, 2, 3}) <= 1


def test_a_new_rack_is_used() -> None:
    racks = {1: "a", 2: "a", 3: "b", 4: "b"}
    image = with_topics(cluster_of(1, 2, 3, 4, racks=racks), [[(1, 2), (2, 1)] * 4])
    after = moved(image, plan_balance(image, brokers_in={1, 2, 3, 4}, drain=set()))
    assert all(racks_of(after, held) == 2 for held in replicas(after).values())
    assert spread(after, {1, 2, 3, 4}) == 0 and copies(image, after) == 8


def test_a_move_under_way_counts_as_done() -> None:
    image = with_topics(cluster_of(1, 2), [[(1,), (1,)]])
    moving = PartitionState((2, 1), (1,), 1, adding=(2,), removing=(1,))
    image = image.apply((PartitionChanged(image.topics["t0"].topic_id, 0, moving),))
    assert plan_balance(image, brokers_in={1, 2}, drain=set()) == []


def test_leaders_are_even_in_one_go() -> None:
    image = with_topics(cluster_of(1, 2, 3, 4, racks={1: "a"}), [[(1, 2, 3)] * 12])
    after = moved(image, plan_balance(image, brokers_in={1, 2, 3, 4}, drain=set()))
    assert Counter(held[0] for held in replicas(after).values()) == dict.fromkeys((1, 2, 3, 4), 3)
    assert plan_balance(after, brokers_in={1, 2, 3, 4}, drain=set()) == []


@st.composite
def clusters(draw: st.DrawFn) -> tuple[ClusterImage, set[int], set[int]]:
    brokers = draw(st.integers(2, 6))
    ids = list(range(1, brokers + 1))
    racks = draw(st.dictionaries(st.sampled_from(ids), st.sampled_from(["a", "b", "c"])))
    topics = []
    for _ in range(draw(st.integers(1, 3))):
        factor = draw(st.integers(1, min(3, brokers)))
        assignment = st.permutations(ids).map(lambda order, factor=factor: tuple(order[:factor]))
        topics.append(draw(st.lists(assignment, min_size=1, max_size=12)))
    drain = draw(st.sets(st.sampled_from(ids), max_size=max(0, brokers - 3)))
    return with_topics(cluster_of(*ids, racks=racks), topics), set(ids) - drain, drain


@settings(max_examples=150)
@given(clusters())
def test_every_plan_is_sound(case: tuple[ClusterImage, set[int], set[int]]) -> None:
    image, targets, drain = case
    plan = plan_balance(image, brokers_in=targets, drain=drain)
    after = moved(image, plan)
    old, new = replicas(image), replicas(after)
    for key, held in new.items():
        assert len(held) == len(old[key]) == len(set(held))
        assert not drain & set(held)
        if not drain & set(old[key]):
            assert racks_of(after, held) >= racks_of(image, old[key])
    assert len({(item.topic, item.index) for item in plan}) == len(plan)
    assert all(item.replicas != old[item.topic, item.index] for item in plan)
    if len({image.brokers[broker].rack for broker in targets}) == 1:
        assert spread(after, targets) <= 1
    assert plan_balance(after, brokers_in=targets, drain=drain) == []
