"""Hints about brokers that are just going."""

from __future__ import annotations

import asyncio

from millrace.clock import ManualClock
from millrace.cluster.image import ClusterImage
from millrace.cluster.presence import DOUBTED_S, HELD_S, LISTED_AFTER_FENCED_S, Presence
from millrace.metadata.deltas import BrokerFenced, BrokerRegistered, ChangeSet
from support.metadata import ENDPOINT, cluster_of


class Rig:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.presence = Presence(self.clock)
        self.image = cluster_of(1, 2, 3)

    def apply(self, *changes: BrokerFenced | BrokerRegistered) -> None:
        old: ClusterImage = self.image
        delta: ChangeSet = changes
        self.image = old.apply(delta)
        self.presence.follow(old, self.image, delta)

    @property
    def listed(self) -> list[int]:
        return [broker.broker_id for broker in self.presence.listed(self.image)]


def test_a_fenced_broker_is_listed_for_a_while() -> None:
    rig = Rig()
    rig.apply(BrokerFenced(2, 102, fenced=True))
    assert rig.listed == [1, 2, 3]
    rig.clock.advance(LISTED_AFTER_FENCED_S + 0.1)
    assert rig.listed == [1, 3]
    rig.apply(BrokerRegistered(2, 200, (ENDPOINT,)))
    assert rig.listed == [1, 2, 3]


def test_a_leader_whose_connection_broke_is_doubted_for_a_moment_only() -> None:
    rig = Rig()
    assert not rig.presence.is_doubted(2)
    rig.presence.lost(2)
    assert rig.presence.is_doubted(2)
    rig.clock.advance(DOUBTED_S / 2)
    rig.presence.lost(2)  # as every further attempt says
    rig.clock.advance(DOUBTED_S / 2)
    assert not rig.presence.is_doubted(2)


def test_a_decision_or_an_answer_ends_the_doubt() -> None:
    rig = Rig()
    rig.presence.lost(2)
    rig.presence.reached(2)
    assert not rig.presence.is_doubted(2)
    rig.presence.lost(2)
    rig.apply(BrokerFenced(2, 102, fenced=True))
    rig.apply(BrokerRegistered(2, 200, (ENDPOINT,)))
    assert not rig.presence.is_doubted(2)
    rig.presence.lost(2)
    assert rig.presence.is_doubted(2)


async def test_nobody_waits_where_nobody_is_doubted() -> None:
    rig = Rig()
    await rig.presence.decided()
    rig.presence.lost(2)
    rig.clock.advance(DOUBTED_S)
    await rig.presence.decided()


async def test_a_decision_about_everybody_in_doubt_ends_the_wait() -> None:
    rig = Rig()
    rig.presence.lost(2)
    rig.presence.lost(3)
    waits = asyncio.create_task(rig.presence.decided())
    await asyncio.sleep(0)
    rig.apply(BrokerFenced(2, 102, fenced=True))
    await asyncio.sleep(0)
    assert rig.presence.doubts and not waits.done()
    rig.presence.reached(3)
    await waits


async def test_the_wait_for_a_decision_has_an_end() -> None:
    rig = Rig()
    rig.presence.lost(2)
    waits = asyncio.create_task(rig.presence.decided())
    await asyncio.sleep(0)
    rig.clock.advance(HELD_S)
    await waits
    assert rig.presence.doubts
