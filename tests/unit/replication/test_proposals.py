"""Asking for ISRs: what an answer may end, and what only the image may."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from millrace.clock import ManualClock
from millrace.cluster.elections import IsrProposal
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import PartitionState
from millrace.replication.proposals import RETRY_S, IsrProposals

TOPIC_ID = uuid.uuid4()
STATE = PartitionState((1, 2, 3), (1, 2), 1, leader_epoch=4, partition_epoch=7)


class FakePartition:
    """A led partition that wants broker 3 in its ISR."""

    topic_id = TOPIC_ID
    topic = "orders"
    index = 0
    is_leader = True

    def __init__(self) -> None:
        self.state = STATE
        self.proposed: tuple[int, ...] | None = None

    @property
    def leader_epoch(self) -> int:
        return self.state.leader_epoch

    def wanted_isr(self) -> tuple[tuple[int, int], ...] | None:
        return None if 3 in self.state.isr else ((1, -1), (2, -1), (3, 103))

    def propose(self, members: tuple[int, ...]) -> None:
        self.proposed = members


class Controller:
    """Answers as it is told, once it is told."""

    def __init__(self) -> None:
        self.asked: list[Sequence[IsrProposal]] = []
        self.answers: asyncio.Queue[ErrorCode | ApiError] = asyncio.Queue()
        self.came = asyncio.Event()

    async def ask(self, proposals: Sequence[IsrProposal]) -> list[ErrorCode]:
        self.asked.append(proposals)
        self.came.set()
        answer = await self.answers.get()
        if isinstance(answer, ApiError):
            raise answer
        return [answer] * len(proposals)

    async def next_question(self) -> IsrProposal:
        await asyncio.wait_for(self.came.wait(), 5)
        self.came.clear()
        (proposal,) = self.asked[-1]
        return proposal


class Rig:
    def __init__(self) -> None:
        self.partition = FakePartition()
        self.controller = Controller()
        self.clock = ManualClock()
        self.proposals = IsrProposals(
            ask=self.controller.ask,
            partitions=lambda: [self.partition],  # type: ignore[list-item]
            clock=self.clock,
            check_interval_s=15.0,
        )

    def consider(self) -> None:
        self.proposals.consider(self.partition)  # type: ignore[arg-type]

    async def run_ready(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    made.proposals.start()
    yield made
    await made.proposals.stop()


async def test_an_accepted_proposal_waits_for_the_image(rig: Rig) -> None:
    rig.consider()
    proposal = await rig.controller.next_question()
    assert proposal == IsrProposal(TOPIC_ID, 0, 4, 7, ((1, -1), (2, -1), (3, 103)))
    assert rig.partition.proposed == (1, 2, 3)
    rig.controller.answers.put_nowait(ErrorCode.NONE)
    await rig.run_ready()
    rig.clock.advance(RETRY_S * 5)
    await rig.run_ready()
    assert len(rig.controller.asked) == 1


async def test_who_joins_is_said_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "millrace.replication.proposals")
    rig.consider()
    await rig.controller.next_question()
    rig.controller.answers.put_nowait(ErrorCode.NOT_CONTROLLER)
    await rig.run_ready()
    rig.clock.advance(RETRY_S)
    await rig.controller.next_question()
    assert caplog.messages == ["broker 3 has caught up: it joins the ISR of orders-0"]


async def test_the_same_is_asked_again_after_an_answer_was_lost(rig: Rig) -> None:
    rig.consider()
    first = await rig.controller.next_question()
    rig.controller.answers.put_nowait(ApiError(ErrorCode.NETWORK_EXCEPTION))
    await rig.run_ready()
    rig.clock.advance(RETRY_S)
    assert await rig.controller.next_question() == first


async def test_a_refusal_that_leaves_the_epoch_is_followed_by_the_isr_as_it_is(rig: Rig) -> None:
    rig.consider()
    await rig.controller.next_question()
    rig.controller.answers.put_nowait(ErrorCode.INELIGIBLE_REPLICA)
    await rig.run_ready()
    rig.clock.advance(RETRY_S)
    plain = await rig.controller.next_question()
    assert plain.isr == ((1, -1), (2, -1))
    assert rig.partition.proposed == (1, 2, 3)  # they count until the image has a newer state
    rig.controller.answers.put_nowait(ErrorCode.NONE)
    await rig.run_ready()
    rig.partition.state = replace(STATE, partition_epoch=8)
    rig.consider()
    assert (await rig.controller.next_question()).partition_epoch == 8


async def test_a_partition_that_moved_on_is_looked_at_anew(rig: Rig) -> None:
    rig.consider()
    await rig.controller.next_question()
    rig.partition.state = replace(STATE, isr=(1, 2, 3), partition_epoch=8)
    rig.controller.answers.put_nowait(ErrorCode.INELIGIBLE_REPLICA)
    await rig.run_ready()
    rig.clock.advance(RETRY_S)
    await rig.run_ready()
    assert len(rig.controller.asked) == 1


async def test_everything_is_looked_at_now_and_then(rig: Rig) -> None:
    await rig.run_ready()
    rig.clock.advance(15.0)
    await rig.controller.next_question()
