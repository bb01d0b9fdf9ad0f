"""Leaders for partitions that have none: who is waited for, who is asked, and who is elected by the answers."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable

import pytest

from millrace.clock import ManualClock
from millrace.cluster.elections import LogEnd, RulesOf, TopicRules, default_rules, plan_brokers
from millrace.cluster.image import ClusterImage
from millrace.cluster.planning import NewTopic
from millrace.cluster.recovery import PATIENCE_S, due, orphans, plan_recovery
from millrace.cluster.survey import Survey
from millrace.metadata.deltas import BrokerRegistered, BrokerUnregistered, Directories, PartitionState, TopicCreated
from millrace.model import LOST_DIRECTORY
from support.metadata import ENDPOINT, ControlPlane, cluster_of

TOPIC_ID = uuid.UUID(int=7)
KEY = (TOPIC_ID, 0)
SINCE = {KEY: 100.0}
AT_ONCE_S, LATER_S = 100.0, 100.0 + PATIENCE_S

Ends = dict[int, LogEnd | None]


def cluster(state: PartitionState, fenced: Iterable[int] = ()) -> ClusterImage:
    return cluster_of(1, 2, 3, 4, fenced=tuple(fenced)).apply((TopicCreated("t", TOPIC_ID, (state,)),))


def elected(image: ClusterImage, ends: Ends, now_s: float = AT_ONCE_S, rules_of: RulesOf = default_rules) -> int:
    plan = plan_recovery(image, {KEY: ends}, SINCE, now_s, rules_of)
    return image.apply(plan.changes).topics["t"].partitions[0].leader


CRASHED = PartitionState((1, 2, 3), (1, 2, 3), -1, 5, 9)
LONG, LONGER, NEWER = LogEnd(4, 10), LogEnd(4, 20), LogEnd(5, 5)


@pytest.mark.parametrize(
    ("ends", "leader"),
    [
        ({1: LONG, 2: LONGER, 3: LONG}, 2),
        ({1: LONGER, 2: LONG, 3: NEWER}, 3),
        ({1: LONG, 2: LONG, 3: LONG}, 1),
        ({1: None, 2: LONG, 3: LONG}, 2),
        ({1: None, 2: None, 3: None}, -1),
        ({}, -1),
    ],
)
def test_the_largest_epoch_and_offset_leads(ends: Ends, leader: int) -> None:
    assert elected(cluster(CRASHED), ends) == leader


def test_others_are_waited_for_and_not_for_ever() -> None:
    image = cluster(CRASHED, fenced=(3,))
    (orphan,) = orphans(image, default_rules)
    assert orphan.candidates == (1, 2) and orphan.missing == (3,)
    assert due([orphan], SINCE, AT_ONCE_S) == [] and due([orphan], SINCE, LATER_S) == [orphan]
    assert elected(image, {1: LONG, 2: LONGER}) == -1
    assert elected(image, {1: LONG, 2: LONGER}, LATER_S) == 2


def test_who_is_there_and_does_not_answer_is_waited_for_too() -> None:
    assert elected(cluster(CRASHED), {1: LONG, 2: LONG}) == -1
    assert elected(cluster(CRASHED), {1: LONG, 2: LONG}, LATER_S) == 1


def test_nobody_is_waited_for_who_will_not_come_back() -> None:
    lost = PartitionState((1, 2, 3), (1, 2, 3), -1, 5, 9, directories=("a", "b", LOST_DIRECTORY))
    assert elected(cluster(lost, fenced=(3,)), {1: LONG, 2: LONG}) == 1
    unregistered = cluster(CRASHED, fenced=(3,)).apply((BrokerUnregistered(3),))
    assert elected(unregistered, {1: LONG, 2: LONG}) == 1
    # Its broker lives, but with another disk.
    replaced = cluster(PartitionState((1, 2, 3), (1, 2, 3), -1, 5, 9, directories=("a", "b", "c"))).apply(
        (BrokerRegistered(3, 500, (ENDPOINT,), directories=Directories(("new",))),)
    )
    assert elected(replaced, {1: LONG, 2: LONG}) == 1


def test_a_damaged_log_is_not_elected_however_long_it_is_alone() -> None:
    image = cluster(CRASHED, fenced=(2, 3))
    assert elected(image, {1: None}, LATER_S + 1000) == -1


def test_what_a_recovered_partition_looks_like() -> None:
    image = cluster(CRASHED)
    plan = plan_recovery(image, {KEY: {1: LONG, 2: LONGER, 3: LONG}}, SINCE, AT_ONCE_S, lambda _: TopicRules(min_isr=2))
    (change,) = plan.changes
    assert image.apply((change,)).topics["t"].partitions[0] == PartitionState((1, 2, 3), (2,), 2, 6, 10, elr=(1, 3))


def test_a_partition_with_a_leader_is_left_alone() -> None:
    assert not orphans(cluster(PartitionState((1, 2), (1, 2), 1)), lambda _: TopicRules(unclean=True))


def test_who_does_not_have_everything_leads_only_where_the_topic_allows_it() -> None:
    image = cluster(PartitionState((1, 2, 3), (1,), -1, 5, 9), fenced=(1,))
    assert not orphans(image, default_rules)
    plan = plan_recovery(
        image, {KEY: {2: LONG, 3: LONGER}}, SINCE, AT_ONCE_S, lambda _: TopicRules(unclean=True, min_isr=2)
    )
    assert image.apply(plan.changes).topics["t"].partitions[0] == PartitionState((1, 2, 3), (3,), 3, 6, 10)


def test_where_one_has_everything_nobody_else_is_asked() -> None:
    image = cluster(PartitionState((1, 2, 3), (1, 2), -1, 5, 9), fenced=(1,))
    assert elected(image, {2: LONG, 3: LONGER}, LATER_S, lambda _: TopicRules(unclean=True)) == 2


def test_an_answer_counts_for_the_incarnation_that_gave_it() -> None:
    survey = Survey({KEY: {1: LONG, 2: LONG}}, {1: 101, 2: 99})
    assert survey.ends_in(cluster(CRASHED)) == {KEY: {1: LONG}}
    assert survey.ends_in(cluster(CRASHED, fenced=(1,))) == {KEY: {}}


# --- the task ---------------------------------------------------------------------------------------------------------


async def crash(plane: ControlPlane) -> dict[int, int]:
    """A topic on brokers 2 and 3, which die at once; their epochs."""
    leading = plane.leading
    await leading.create_topics([NewTopic("t", assignments=((0, (2, 3)),))])
    epochs = {each: leading.image.brokers[each].broker_epoch for each in (2, 3)}
    await leading.change(lambda image: plan_brokers(image, fence=epochs))
    assert leading.image.topics["t"].partitions[0].isr == (2, 3)
    return epochs


def leads(broker_id: int) -> Callable[[ClusterImage], bool]:
    return lambda image: image.topics["t"].partitions[0].leader == broker_id


async def test_when_all_are_back_the_longest_log_leads() -> None:
    async with ControlPlane(3, clock=ManualClock()) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        epochs = await crash(plane)
        plane.log_ends = {2: LONG, 3: LONGER}
        for each in (2, 3):
            await plane.leading.change(lambda image, each=each: plan_brokers(image, unfence={each: epochs[each]}))
        await plane.wait_for_images(leads(3))


async def test_one_alone_leads_when_the_other_does_not_come() -> None:
    clock = ManualClock()
    async with ControlPlane(3, clock=clock) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        epochs = await crash(plane)
        await plane.leading.change(lambda image: plan_brokers(image, unfence={2: epochs[2]}))
        for _turn in range(100):
            await asyncio.sleep(0)
        clock.advance(PATIENCE_S / 2)
        for _turn in range(100):
            await asyncio.sleep(0)
        assert leads(-1)(plane.leading.image)
        clock.advance(PATIENCE_S / 2)
        await plane.wait_for_images(leads(2))


async def test_a_damaged_log_waits_for_the_other_one() -> None:
    clock = ManualClock()
    async with ControlPlane(3, clock=clock) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        epochs = await crash(plane)
        plane.log_ends = {2: None}
        await plane.leading.change(lambda image: plan_brokers(image, unfence={2: epochs[2]}))
        for _second in range(10):
            clock.advance(1)
            for _turn in range(100):
                await asyncio.sleep(0)
        assert leads(-1)(plane.leading.image)
        assert 1 < plane.surveys <= 5, "the same question again and again"
        await plane.leading.change(lambda image: plan_brokers(image, unfence={3: epochs[3]}))
        await plane.wait_for_images(leads(3))


async def test_a_new_controller_goes_on() -> None:
    async with ControlPlane(3) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        epochs = await crash(plane)
        plane.log_ends = {2: None, 3: None}
        await plane.leading.change(lambda image: plan_brokers(image, unfence=epochs))
        await plane.stop(1)
        await plane.wait_for_images(lambda image: not image.is_live(1) and leads(-1)(image))
        plane.log_ends = {2: LONG, 3: LONGER}
        await plane.wait_for_images(leads(3))
