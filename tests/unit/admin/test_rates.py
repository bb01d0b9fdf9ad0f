"""Rates from two looks: what is known of them, and what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millrace.admin import rates
from millrace.admin.overview import (
    BrokerRow,
    Commits,
    Committed,
    GroupRow,
    Groups,
    Offsets,
    PartitionRow,
    Sizes,
    TopicRow,
    Topology,
)
from millrace.admin.rates import Figures, Flow, Sample
from millrace.admin.words import Sum
from millrace.model import TopicPartition

TWO = PartitionRow(1, (1, 2), (1, 2))
OTHER = PartitionRow(2, (2, 1), (2, 1))
LACKING = PartitionRow(1, (1, 2), (1,))
NOBODY = PartitionRow(-1, (2,), (2,))


def sample(
    at_s: float,
    ends: Offsets,
    *,
    sizes: Offsets | None = None,
    rows: dict[str, tuple[PartitionRow, ...]] | None = None,
    commits: Commits | None = None,
) -> Sample:
    """Brokers 1 and 2; partitions are led by broker 1 unless told otherwise."""
    topics = {name: TopicRow(name, False, (rows or {}).get(name, (TWO,) * len(found))) for name, found in ends.items()}
    brokers = (BrokerRow(1, "one", 9092, "a"), BrokerRow(2, "two", 9092, None))
    leaders = sizes or {name: (None,) * len(found) for name, found in ends.items()}
    groups = Groups(tuple(GroupRow(name, "consumer", "stable", 1) for name in commits or {}), ())
    return Sample(
        Topology("c", 2, brokers, topics),
        ends,
        at_s,
        Sizes(leaders, {}, {1: 500}, (2,)),
        at_s,
        groups,
        commits or {},
        at_s,
    )


def flow(figures: Figures, topic: str, index: int) -> Flow:
    return next(each.flow for each in figures.partitions if each.place == TopicPartition(topic, index))


def test_a_first_look_knows_no_rates() -> None:
    found = rates.figures(
        None, sample(0, {"t": (5, 6)}, sizes={"t": (100, 200)}, commits={"g": (Committed("t", 0, 1),)})
    )
    assert found.seconds is None
    assert found.flow == Flow(None, None)
    assert [each.flow for each in found.topics] == [Flow(None, None)]
    assert [(each.lag, each.reads, each.change) for each in found.groups] == [(Sum(4, complete=True), None, None)]
    assert [each.size for each in found.topics] == [Sum(300, complete=True)]


def test_rates_of_partitions_topics_and_brokers() -> None:
    rows = {"t": (TWO, OTHER)}
    before = sample(10, {"t": (0, 100), "u": (7,)}, sizes={"t": (0, 1000), "u": (70,)}, rows=rows)
    found = rates.figures(
        before, sample(12, {"t": (20, 110), "u": (7,)}, sizes={"t": (2000, 3000), "u": (70,)}, rows=rows)
    )
    assert found.seconds == 2
    assert flow(found, "t", 0) == Flow(10, 1000)
    assert flow(found, "t", 1) == Flow(5, 1000)
    assert [(each.name, each.flow) for each in found.topics] == [("t", Flow(15, 2000)), ("u", Flow(0, 0))]
    assert found.flow == Flow(15, 2000)
    assert [(each.broker_id, each.flow, each.size_bytes) for each in found.brokers] == [
        (1, Flow(10, 1000), 500),
        (2, Flow(5, 1000), None),
    ]
    assert [(each.leaders, each.replicas, each.is_controller) for each in found.brokers] == [
        (2, 3, False),
        (1, 3, True),
    ]
    assert found.silent == (2,)


@pytest.mark.parametrize(
    ("ends", "sizes", "row", "expected"),
    [
        ((5,), (100,), TWO, Flow(0, 0)),
        ((None,), (200,), TWO, Flow(None, 100)),
        ((2,), (200,), TWO, Flow(None, 100)),
        ((7,), (50,), TWO, Flow(2, None)),
        ((7,), (None,), TWO, Flow(2, None)),
        ((7,), (200,), OTHER, Flow(2, None)),
    ],
    ids=["nothing came", "no answer", "made anew", "old records went", "no size", "another leader"],
)
def test_what_cannot_be_told(
    ends: tuple[int | None, ...], sizes: tuple[int | None, ...], row: PartitionRow, expected: Flow
) -> None:
    before = sample(0, {"t": (5,)}, sizes={"t": (100,)})
    found = rates.figures(before, sample(1, {"t": ends}, sizes={"t": sizes}, rows={"t": (row,)}))
    assert flow(found, "t", 0) == expected


def test_topics_and_partitions_that_are_new_or_gone() -> None:
    before = sample(0, {"gone": (5,), "grown": (5,)})
    found = rates.figures(before, sample(1, {"grown": (6, 3), "new": (4,)}))
    assert [(each.place, each.flow.records) for each in found.partitions] == [
        (TopicPartition("grown", 0), 1),
        (TopicPartition("grown", 1), None),
        (TopicPartition("new", 0), None),
    ]


def test_groups_read_and_lag() -> None:
    old = {
        "reader": (Committed("t", 0, 10), Committed("t", 1, 5)),
        "reset": (Committed("t", 0, 50),),
        "stuck": (Committed("t", 0, 0),),
    }
    new = {
        "reader": (Committed("t", 0, 40), Committed("t", 1, 5)),
        "reset": (Committed("t", 0, 0),),
        "stuck": (Committed("t", 0, 0),),
        "new": (Committed("t", 0, 60),),
        "elsewhere": (Committed("other", 0, 1),),
    }
    before, now = sample(0, {"t": (50, 5)}, commits=old), sample(2, {"t": (60, 5)}, commits=new)
    found = {each.name: (each.lag.known, each.reads, each.change) for each in rates.figures(before, now).groups}
    assert found == {
        "reader": (20, 15, -10),
        "reset": (60, 0, 30),
        "stuck": (60, 0, 5),
        "new": (0, None, None),
        "elsewhere": (0, None, None),
    }
    assert rates.figures(before, now).topics[0].lag == 60
    narrowed = rates.figures(before, now, only_readers=True)
    assert [each.name for each in narrowed.groups] == ["reader", "reset", "stuck", "new"]


def test_what_is_unwell() -> None:
    rows = {"a": (TWO, LACKING), "b": (NOBODY,)}
    found = rates.figures(None, sample(0, {"a": (0, 0), "b": (None,)}, rows=rows))
    assert [(each.place, each.row.leader) for each in found.unwell] == [
        (TopicPartition("b", 0), -1),
        (TopicPartition("a", 1), 1),
    ]
    assert [(each.under_replicated, each.offline) for each in found.topics] == [(1, 0), (0, 1)]
    assert [each.out_of_sync for each in found.brokers] == [0, 1]


def test_moments_of_offsets_and_sizes_are_their_own() -> None:
    before = sample(0, {"t": (0,)}, sizes={"t": (0,)})
    now = replace(sample(1, {"t": (10,)}, sizes={"t": (100,)}), sizes_at_s=4.0)
    assert flow(rates.figures(before, now), "t", 0) == Flow(10, 25)
