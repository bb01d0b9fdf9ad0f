"""The judge of the metadata log: each invariant, broken once, is named; a log that keeps them all is not."""

from __future__ import annotations

import dataclasses
import uuid
from typing import Final

import pytest

from millrace.metadata.deltas import (
    BrokerFenced,
    BrokerRegistered,
    Change,
    ClusterCreated,
    ControllerChanged,
    Directories,
    DirectoriesChanged,
    PartitionChanged,
    PartitionState,
    ProducerIdsAllocated,
    TopicCreated,
)
from support.checker_metadata import Delta, check_log

TOPIC: Final = uuid.UUID(int=7)
FIRST: Final = PartitionState((1, 2, 3), (1, 2, 3), 1)


def registered(broker_id: int, epoch: int = 1) -> BrokerRegistered:
    return BrokerRegistered(broker_id, epoch, ())


def changed(**fields: object) -> PartitionChanged:
    return PartitionChanged(TOPIC, 0, dataclasses.replace(FIRST, **fields))  # type: ignore[arg-type]


BEGINNING: Final[list[tuple[int, list[Change]]]] = [
    (1, [ClusterCreated("c"), ControllerChanged(1, 1), registered(1), registered(2), registered(3)]),
    (1, [TopicCreated("t", TOPIC, (FIRST,))]),
]
FAILOVER: Final[list[Change]] = [
    BrokerFenced(1, 1, fenced=True),
    changed(isr=(2, 3), leader=2, leader_epoch=1, partition_epoch=1),
]


def judged(*more: tuple[int, list[Change]]) -> list[str]:
    log = [*BEGINNING, *more]
    return check_log(Delta(number, epoch, tuple(changes)) for number, (epoch, changes) in enumerate(log, 1))


def test_a_log_that_keeps_the_rules() -> None:
    all_gone: list[Change] = [BrokerFenced(each, 1, fenced=True) for each in (1, 2, 3)]
    assert not judged(
        (1, FAILOVER),
        (1, [ControllerChanged(-1, 1)]),  # it resigned
        (2, [ControllerChanged(2, 2), registered(1, 9)]),
        (2, [changed(isr=(2, 3, 1), leader=2, leader_epoch=1, partition_epoch=2)]),
        (2, [ProducerIdsAllocated(1, 1000, 1000), ProducerIdsAllocated(2, 2000, 1000)]),
        (2, [*all_gone, changed(isr=(2, 3, 1), leader=-1, leader_epoch=2, partition_epoch=3)]),
        (2, [registered(2, 11)]),
        (2, [registered(3, 12)]),  # they wait for each other before one of them leads
        (2, [changed(isr=(3,), leader=3, leader_epoch=3, partition_epoch=4)]),
    )


def moved_to_3() -> PartitionChanged:
    """The end of a move from 1 to 3, while 2 is away."""
    return changed(replicas=(2, 3), isr=(3,), elr=(2,), leader=3, leader_epoch=1, partition_epoch=2)


MOVING: Final[list[Change]] = [
    BrokerFenced(2, 1, fenced=True),
    changed(isr=(1,), elr=(2,), adding=(3,), removing=(1,), partition_epoch=1),
]


def test_a_leader_that_hands_over_to_whom_it_has_just_let_in() -> None:
    assert not judged((1, MOVING), (1, [moved_to_3()]))


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ([(0, [])], "written under controller epoch 0, not 1"),
        ([(1, [ControllerChanged(2, 1)])], "begins controller epoch 1 after 1"),
        ([(1, [changed(leader=2, partition_epoch=1)])], "leaders 1 and 2 in epoch 0"),
        ([(1, [changed(isr=(), leader=-1, leader_epoch=1, partition_epoch=1)])], "has ISR ()"),
        ([(1, [changed(isr=(1, 4), partition_epoch=1)])], "has ISR (1, 4) of replicas"),
        ([(1, [changed(isr=(1, 2))])], "from partition epoch 0 to 0"),
        ([(1, FAILOVER), (1, [changed(isr=(2, 3), leader=2, partition_epoch=2)])], "back from leader epoch 1 to 0"),
        (
            [
                (1, [changed(isr=(1, 2), partition_epoch=1)]),
                (1, [changed(isr=(3,), leader=3, leader_epoch=1, partition_epoch=2)]),
            ],
            "led by 3, which was not in ISR (1, 2)",
        ),
        ([(1, MOVING), (1, [BrokerFenced(1, 1, fenced=True), moved_to_3()])], "led by 3, which was not in ISR (1,)"),
        (
            [(1, FAILOVER), (1, [changed(leader=2, leader_epoch=1, partition_epoch=2)])],
            "1 join its ISR, which",
        ),
        ([(1, [BrokerFenced(1, 1, fenced=True)])], "is led by 1; live [2, 3]"),
        ([(1, [registered(2, 5)])], "trusts the new incarnation of 2"),
        (
            [
                (1, [changed(leader=-1, leader_epoch=1, partition_epoch=1)]),
                (1, [changed(leader=3, leader_epoch=2, partition_epoch=2)]),
            ],
            "had no leader, and begins with ISR (1, 2, 3)",
        ),
        (
            [
                (1, [changed(directories=("a", "b", "c"), partition_epoch=1)]),
                (1, [DirectoriesChanged(1, 1, Directories(("d",)))]),
            ],
            "is led by 1, which does not have directory a",
        ),
        ([(1, [ProducerIdsAllocated(1, 1000, 1000), ProducerIdsAllocated(2, 1500, 1000)])], "producer ids from 500"),
    ],
)
def test_a_broken_rule_is_named(more: list[tuple[int, list[Change]]], complaint: str) -> None:
    assert any(complaint in problem for problem in judged(*more)), judged(*more)


def test_a_partition_may_change_twice_in_one_delta() -> None:
    """Its leader has a follower join the ISR, and is fenced; the follower leads."""
    assert not judged(
        (1, [changed(isr=(1, 2), partition_epoch=1)]),
        (
            1,
            [
                changed(isr=(1, 2, 3), partition_epoch=2),
                BrokerFenced(1, 1, fenced=True),
                changed(isr=(2, 3), leader=3, leader_epoch=1, partition_epoch=3),
            ],
        ),
    )


def test_an_eligible_replica_may_lead() -> None:
    assert not judged(
        (1, [changed(isr=(1,), elr=(2,), partition_epoch=1)]),
        (
            1,
            [
                BrokerFenced(1, 1, fenced=True),
                changed(isr=(2,), leader=2, leader_epoch=1, partition_epoch=2),
            ],
        ),
    )


def test_a_gap_is_named() -> None:
    deltas = [Delta(number, 1, tuple(changes)) for number, (_, changes) in zip((1, 3), BEGINNING, strict=True)]
    assert check_log(deltas) == ["delta 3 follows number 1"]
