"""Asking the controller for another ISR: what leaders want is collected and sent, several partitions at a time.

Owner: one task. A partition has at most one proposal under way; while it is, whoever may be in the ISR because of it
counts for the high watermark (`Leadership.propose`).

Invariant: a proposal ends only when the image has a newer state of the partition, never by an answer. An answer may be
lost, or belong to a second attempt while the first one is still on its way: to stop counting a replica that the
controller has let in would lose records when it is elected. The newer state is either what was proposed or makes the
proposal void, because it raises the partition epoch. So a proposal that is refused for a reason which leaves the epoch
as it is gets replaced by one for the ISR as it stands: that one is accepted, and raises it.

Not here: who should be in an ISR (`isr`, `Leadership.wanted_isr`), whether it may (`cluster.elections`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from millrace.cluster.elections import IsrProposal
from millrace.errors import ApiError, ErrorCode
from millrace.tasks import Tasks

if TYPE_CHECKING:
    from millrace.clock import Clock
    from millrace.replication.partition import Partition

logger = logging.getLogger(__name__)

Ask = Callable[[Sequence[IsrProposal]], Awaitable[list[ErrorCode]]]

RETRY_S: Final = 0.2
MAX_AT_A_TIME: Final = 1000
MAX_NAMED: Final = 5
"""So many partitions are named in one line of the log."""
_COMES_WITH_THE_IMAGE: Final = frozenset(
    {
        ErrorCode.NONE,
        ErrorCode.NEW_LEADER_ELECTED,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.INVALID_UPDATE_VERSION,
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    }
)
"""Answers after which a newer state of the partition is on its way here."""


class IsrProposals:
    """Keeps the ISRs of led partitions as they should be."""

    def __init__(
        self,
        *,
        ask: Ask,
        partitions: Callable[[], Iterable[Partition]],
        clock: Clock,
        check_interval_s: float,
    ) -> None:
        """`ask` brings proposals to the controller; every `check_interval_s` all `partitions` are looked at."""
        self._ask = ask
        self._partitions = partitions
        self._clock = clock
        self._check_interval_s = check_interval_s
        self._wanting: dict[Partition, None] = {}
        self._under_way: dict[Partition, IsrProposal] = {}
        self._wanted = asyncio.Event()
        self._tasks = Tasks(clock)

    def __repr__(self) -> str:
        return f"IsrProposals({len(self._wanting)} waiting)"

    def start(self) -> None:
        self._tasks.keep("isr-proposals", self._propose_for_ever)
        self._tasks.keep("isr-check", self._check_for_ever)

    async def stop(self) -> None:
        """End the tasks; a proposal under way may still happen."""
        await self._tasks.stop()

    def consider(self, partition: Partition) -> None:
        """Look at this partition's ISR soon."""
        self._wanting[partition] = None
        self._wanted.set()

    async def _check_for_ever(self) -> None:
        while True:
            await self._clock.sleep(self._check_interval_s)
            for partition in self._partitions():
                if partition.is_leader:
                    self.consider(partition)

    async def _propose_for_ever(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            wanting = [partition for partition in self._wanting if partition.is_leader]
            self._wanting = dict.fromkeys(wanting[MAX_AT_A_TIME:])
            self._under_way = {each: item for each, item in self._under_way.items() if _is_open(each, item)}
            again = await self._propose(wanting[:MAX_AT_A_TIME])
            if again:
                await self._clock.sleep(RETRY_S)
                self._wanting.update(dict.fromkeys(again))
            if self._wanting:
                self._wanted.set()

    async def _propose(self, wanting: Sequence[Partition]) -> list[Partition]:
        """Send one request for all of these; returns those to be looked at again."""
        asked: list[tuple[Partition, IsrProposal]] = []
        new: list[tuple[Partition, IsrProposal]] = []
        for partition in wanting:
            proposal = self._under_way.get(partition)
            if proposal is None:
                proposal = self._new_proposal(partition)
                if proposal is None:
                    continue
                self._under_way[partition] = proposal
                new.append((partition, proposal))
            asked.append((partition, proposal))
        for line in _changes(new):
            logger.info("%s", line)
        if not asked:
            return []
        try:
            codes = await self._ask([proposal for _, proposal in asked])
        except ApiError as error:
            logger.info("the controller cannot be asked for ISRs now: %s", error)
            return [partition for partition, _ in asked]
        again = []
        for (partition, proposal), code in zip(asked, codes, strict=True):
            if code in _COMES_WITH_THE_IMAGE or not _is_open(partition, proposal):
                continue
            again.append(partition)
            if code is not ErrorCode.NOT_CONTROLLER:
                logger.info("%r may not have the ISR %s: %s", partition, proposal.isr, code.name)
                self._under_way[partition] = replace(proposal, isr=tuple((each, -1) for each in partition.state.isr))
        return again

    @staticmethod
    def _new_proposal(partition: Partition) -> IsrProposal | None:
        wanted = partition.wanted_isr()
        if wanted is None:
            return None
        partition.propose(tuple(broker_id for broker_id, _ in wanted))
        state = partition.state
        return IsrProposal(partition.topic_id, partition.index, state.leader_epoch, state.partition_epoch, wanted)


def _changes(proposed: Iterable[tuple[Partition, IsrProposal]]) -> list[str]:
    """Who is about to leave or join ISRs: a line per broker, however many partitions it is about."""
    leaving: dict[int, list[str]] = {}
    joining: dict[int, list[str]] = {}
    for partition, proposal in proposed:
        place, members = f"{partition.topic}-{partition.index}", {broker_id for broker_id, _ in proposal.isr}
        for broker_id in members.difference(partition.state.isr):
            joining.setdefault(broker_id, []).append(place)
        for broker_id in set(partition.state.isr).difference(members):
            leaving.setdefault(broker_id, []).append(place)
    return [
        f"broker {broker_id} {verb} the ISR of {_some(places)}"
        for verb, changes in (("does not keep up: it leaves", leaving), ("has caught up: it joins", joining))
        for broker_id, places in changes.items()
    ]


def _some(places: Sequence[str]) -> str:
    more = f" and {len(places) - MAX_NAMED} more" if len(places) > MAX_NAMED else ""
    return ", ".join(places[:MAX_NAMED]) + more


def _is_open(partition: Partition, proposal: IsrProposal) -> bool:
    """Whether the partition is still in the state in which the proposal was made."""
    state = partition.state
    return (
        partition.is_leader
        and state.leader_epoch == proposal.leader_epoch
        and state.partition_epoch == proposal.partition_epoch
    )
