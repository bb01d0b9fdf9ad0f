"""The lease: how long a broker may take its image for the truth, with a clock and a store that the test holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import cast

import pytest

from millrace.clock import ManualClock
from millrace.cluster.lease import RENEWALS_PER_LEASE, SHARE_OF_SESSION, Lease
from millrace.cluster.membership import ClusterMember
from millrace.cluster.view import MetadataView
from millrace.metadata.deltas import BrokerFenced, BrokerRegistered, ChangeSet
from millrace.metadata.store import MetadataStore
from millrace.replication.state_topic import breathe

SESSION_S = 10.0
LASTS_S = SESSION_S * SHARE_OF_SESSION


@dataclass
class Surroundings:
    """The store, the member and the log of one broker, as the lease sees them."""

    clock: ManualClock = field(default_factory=ManualClock)
    broker_id: int = 1
    registration: int | None = 7
    answers: bool = True
    log_end: int = 1

    def __post_init__(self) -> None:
        self.view = MetadataView(cast(MetadataStore, self), self.clock)
        self.apply(BrokerRegistered(1, 7, ()))

    def apply(self, *changes: BrokerRegistered | BrokerFenced) -> None:
        self.log_end = index = self.view.image.index + 1
        self.view._apply(self.view.image.apply(ChangeSet(list(changes)), index), ChangeSet(list(changes)))

    async def end(self) -> int:
        while not self.answers:
            await self.clock.sleep(0.1)
        return self.log_end


async def settle() -> None:
    for _ in range(10):
        await breathe()


@pytest.fixture
async def around() -> Surroundings:
    return Surroundings()


@pytest.fixture
async def lease(around: Surroundings) -> AsyncIterator[Lease]:
    made = Lease(
        cast(MetadataStore, around),
        around.view,
        cast(ClusterMember, around),
        session_s=SESSION_S,
        clock=around.clock,
    )
    assert not made.is_held
    running = asyncio.ensure_future(made.run())
    await settle()
    yield made
    running.cancel()
    await asyncio.wait([running])


async def advance(around: Surroundings, seconds: float) -> None:
    """In steps, so that whoever sleeps wakes up about when it wanted to."""
    for _ in range(round(seconds / 0.1)):
        around.clock.advance(0.1)
        await settle()


async def test_a_lease_is_held_while_the_store_answers(around: Surroundings, lease: Lease) -> None:
    for _ in range(20):
        assert lease.is_held
        await advance(around, 1)


async def test_it_ends_before_the_session_could(around: Surroundings, lease: Lease) -> None:
    around.answers = False
    await advance(around, LASTS_S - LASTS_S / RENEWALS_PER_LEASE - 0.2)
    assert lease.is_held
    await advance(around, LASTS_S / RENEWALS_PER_LEASE + 0.4)
    assert not lease.is_held
    around.answers = True
    await advance(around, 0.2)
    assert lease.is_held


async def test_a_paused_process_has_lost_it_when_it_wakes_up(around: Surroundings, lease: Lease) -> None:
    around.clock.advance(SESSION_S)
    assert not lease.is_held  # at once, and not when a task has had its turn


async def test_a_late_answer_counts_from_the_question(around: Surroundings, lease: Lease) -> None:
    await advance(around, LASTS_S / RENEWALS_PER_LEASE - 0.1)
    around.answers = False
    await advance(around, LASTS_S - 0.2)
    around.answers = True
    await advance(around, 0.2)
    around.answers = False
    await advance(around, 0.4)
    assert not lease.is_held


async def test_the_image_must_have_what_the_log_has(around: Surroundings, lease: Lease) -> None:
    around.log_end += 1
    await advance(around, SESSION_S)
    assert not lease.is_held


@pytest.mark.parametrize("change", ["fenced", "registered anew", "session over"])
async def test_whom_it_is_not_granted_to(around: Surroundings, lease: Lease, change: str) -> None:
    if change == "fenced":
        around.apply(BrokerFenced(1, 7, fenced=True))
    elif change == "registered anew":
        around.registration = 8  # and the controller has yet to say so
    else:
        around.registration = None
    await advance(around, LASTS_S + 0.2)
    assert not lease.is_held


async def test_a_session_that_ends_while_the_store_is_asked(around: Surroundings, lease: Lease) -> None:
    around.answers = False
    await advance(around, SESSION_S)
    around.registration = 8
    around.apply(BrokerRegistered(1, 8, ()))
    around.answers = True
    await advance(around, 0.2)
    assert not lease.is_held  # what was asked in the old session is no answer for the new one
    await advance(around, LASTS_S / RENEWALS_PER_LEASE)
    assert lease.is_held
