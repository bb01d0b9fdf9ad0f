"""Placement: even, spread over racks, and a function of its arguments."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.cluster.assignment import Candidate, place

clusters = st.dictionaries(st.integers(0, 50), st.none() | st.sampled_from("abc"), min_size=1, max_size=9).map(
    lambda racks: [Candidate(broker_id, rack) for broker_id, rack in racks.items()]
)


@settings(max_examples=300, deadline=None)
@given(st.data(), clusters, st.integers(1, 40), st.integers(0, 2**128))
def test_every_placement_is_valid_and_even(
    data: st.DataObject, candidates: list[Candidate], partitions: int, start: int
) -> None:
    factor = data.draw(st.integers(1, len(candidates)))
    placed = place(partitions, factor, candidates, start=start)
    assert placed == place(partitions, factor, list(reversed(candidates)), start=start)
    rack_of = {candidate.broker_id: candidate.rack for candidate in candidates}
    racks = len(set(rack_of.values()))
    assert len(placed) == partitions
    for replicas in placed:
        assert len(set(replicas)) == factor and set(replicas) <= set(rack_of)
        assert len({rack_of[broker_id] for broker_id in replicas}) == min(factor, racks)
    leaders = Counter(replicas[0] for replicas in placed)
    assert max(leaders.values()) - min(leaders.get(broker_id, 0) for broker_id in rack_of) <= 1


def test_followers_of_one_leader_spread_over_the_others() -> None:
    placed = place(12, 2, [Candidate(broker_id) for broker_id in range(4)])
    followers = {replicas[1] for replicas in placed if replicas[0] == 0}
    assert followers == {1, 2, 3}


@pytest.mark.parametrize("factor", [0, 2, -1])
def test_what_does_not_fit(factor: int) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        place(1, factor, [Candidate(1)])
