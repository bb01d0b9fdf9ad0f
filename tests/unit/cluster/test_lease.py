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
from millrace.replication.state_topic import yield_to_loop

SESSION_S = 10.0
LASTS_S = SESSION_S * SHARE_OF_SESSION


@dataclass
class FakeBroker:
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


async def run_ready() -> None:
    for _ in range(10):
        await yield_to_loop()


@pytest.fixture
async def broker() -> FakeBroker:
    return FakeBroker()


@pytest.fixture
async def lease(broker: FakeBroker) -> AsyncIterator[Lease]:
    made = Lease(
        cast(MetadataStore, broker),
        broker.view,
        cast(ClusterMember, broker),
        session_s=SESSION_S,
        clock=broker.clock,
    )
    assert not made.is_held
    running = asyncio.ensure_future(made.run())
    await run_ready()
    yield made
    running.cancel()
    await asyncio.wait([running])


async def advance(broker: FakeBroker, seconds: float) -> None:
    """In steps, so that whoever sleeps wakes up about when it wanted to."""
    for _ in range(round(seconds / 0.1)):
        broker.clock.advance(0.1)
        await run_ready()


async def test_a_lease_is_held_while_the_store_answers(broker: FakeBroker, lease: Lease) -> None:
    for _ in range(20):
        assert lease.is_held
        await advance(broker, 1)


async def test_it_ends_before_the_session_could(broker: FakeBroker, lease: Lease) -> None:
    broker.answers = False
    await advance(broker, LASTS_S - LASTS_S / RENEWALS_PER_LEASE - 0.2)
    assert lease.is_held
    await advance(broker, LASTS_S / RENEWALS_PER_LEASE + 0.4)
    assert not lease.is_held
    broker.answers = True
    await advance(broker, 0.2)
    assert lease.is_held


async def test_a_paused_process_has_lost_it_when_it_wakes_up(broker: FakeBroker, lease: Lease) -> None:
    broker.clock.advance(SESSION_S)
    assert not lease.is_held  # at once, and not when a task has had its turn


async def test_a_late_answer_counts_from_the_question(broker: FakeBroker, lease: Lease) -> None:
    await advance(broker, LASTS_S / RENEWALS_PER_LEASE - 0.1)
    broker.answers = False
    await advance(broker, LASTS_S - 0.2)
    broker.answers = True
    await advance(broker, 0.2)
    broker.answers = False
    await advance(broker, 0.4)
    assert not lease.is_held


async def test_the_image_must_have_what_the_log_has(broker: FakeBroker, lease: Lease) -> None:
    broker.log_end += 1
    await advance(broker, SESSION_S)
    assert not lease.is_held


@pytest.mark.parametrize("change", ["fenced", "registered anew", "session over"])
async def test_whom_it_is_not_granted_to(broker: FakeBroker, lease: Lease, change: str) -> None:
    if change == "fenced":
        broker.apply(BrokerFenced(1, 7, fenced=True))
    elif change == "registered anew":
        broker.registration = 8  # and the controller has yet to say so
    else:
        broker.registration = None
    await advance(broker, LASTS_S + 0.2)
    assert not lease.is_held


async def test_a_session_that_ends_while_the_store_is_asked(broker: FakeBroker, lease: Lease) -> None:
    broker.answers = False
    await advance(broker, SESSION_S)
    broker.registration = 8
    broker.apply(BrokerRegistered(1, 8, ()))
    broker.answers = True
    await advance(broker, 0.2)
    assert not lease.is_held  # what was asked in the old session is no answer for the new one
    await advance(broker, LASTS_S / RENEWALS_PER_LEASE)
    assert lease.is_held
