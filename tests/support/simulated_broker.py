"""One broker of the simulated cluster: real partitions on real logs, on disks in memory, and what it has heard.

What is real: `Partition` with its log, the copying of a follower (`follower._Session._take_one`), the task that asks
for ISRs (`IsrProposals`). What is modelled here is the wiring around them, as `replicas`, `view` and `broker` have it:
which delta has been heard, when a broker that starts takes its roles, and which log lies on which disk.
"""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from millrace.clock import ManualClock
from millrace.cluster import elections
from millrace.cluster.elections import IsrProposal
from millrace.cluster.image import ClusterImage, TopicImage
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import (
    BrokerFenced,
    BrokerRegistered,
    ChangeSet,
    PartitionChanged,
    PartitionState,
    TopicCreated,
)
from millrace.replication.follower import _Place, _Session
from millrace.replication.partition import Partition
from millrace.replication.proposals import IsrProposals
from millrace.storage.log import Log
from millrace.storage.recovery import LogState
from millrace.storage.settings import FlushMode, LogConfig
from millrace.storage.ticket import FlushTicket
from millrace.wire.messages.fetch import FetchResponse
from support.memory_disk import MemoryFiles

MAX_LAG_S: Final = 10.0
NOTHING: Final = ClusterImage()
"""Before the first delta."""
_COPIER: Final = _Session.__new__(_Session)
"""What copies an answer into a log is a method that needs no session."""


@dataclass
class Settings:
    """What every broker of a run is told."""

    clock: ManualClock
    random: random.Random
    log: LogConfig
    min_insync_replicas: int

    @property
    def cuts_power(self) -> bool:
        """Whether a death takes with it what was not flushed; else it is one of the process alone."""
        return self.log.flush_mode is FlushMode.GROUP


@dataclass
class Disk:
    """A log directory, and what its checkpoints say of the logs in it."""

    directory_id: str
    files: MemoryFiles = field(default_factory=MemoryFiles)
    states: dict[int, LogState] = field(default_factory=dict)
    high_watermarks: dict[int, int] = field(default_factory=dict)


@dataclass(eq=False)
class Fetch:
    """A follower's request; the identity of this object is its connection's."""

    partition: int
    follower: int
    broker_epoch: int
    leader_epoch: int
    offset: int
    last_epoch: int


@types.coroutine
def _pause(what: object) -> Generator[object, Any, Any]:
    """Give the simulation back its turn; it answers with `send` or `throw`."""
    return (yield what)


class _Flag:
    """As asyncio.Event, without a loop."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    async def wait(self) -> None:
        while not self._is_set:
            await _pause(self)


class Proposer:
    """The task of `IsrProposals`, driven by hand: it has at most one request under way."""

    def __init__(self) -> None:
        self.request: list[IsrProposal] | None = None
        self._proposals = IsrProposals(ask=self._ask, partitions=tuple, clock=self, check_interval_s=0)  # type: ignore[arg-type]
        self._proposals._wanted = _Flag()  # type: ignore[assignment]
        self._task = self._proposals._propose_for_ever()
        self._task.send(None)

    def consider(self, partition: Partition) -> None:
        self._proposals.consider(partition)

    def go_on(self) -> list[IsrProposal] | None:
        """As far as it comes without an answer; returns what it asks for, if it does."""
        if self.request is None:
            self._task.send(None)
        return self.request

    def answer(self, codes: list[ErrorCode]) -> None:
        self.request = None
        self._task.send(codes)

    def fail(self) -> None:
        """No answer comes: what was asked for may happen all the same."""
        self.request = None
        self._task.throw(ApiError(ErrorCode.REQUEST_TIMED_OUT, "no answer"))

    def close(self) -> None:
        self.request = None
        self._task.close()

    async def _ask(self, proposals: Sequence[IsrProposal]) -> list[ErrorCode]:
        self.request = list(proposals)
        codes: list[ErrorCode] = await _pause(self)
        return codes

    async def sleep(self, _seconds: float) -> None:
        await _pause(self)


class SimBroker:
    """A process that comes and goes, and the disks that stay."""

    def __init__(self, broker_id: int, settings: Settings, disks: list[Disk]) -> None:
        self.broker_id = broker_id
        self.settings = settings
        self.disks = disks
        self.is_up = False
        """The process lives."""
        self.has_roles = False
        """It has found itself in the image and serves."""
        self.epoch = -1
        """Of its newest registration."""
        self.image = NOTHING
        self.replicas: dict[int, Partition] = {}
        self.places: dict[int, Disk] = {}
        self.asked: dict[int, Fetch] = {}
        """The newest fetch of each followed partition: only its answer is still waited for."""
        self.flushing: dict[int, FlushTicket] = {}
        self.proposer = Proposer()
        self.on_mark: Callable[[SimBroker, Partition], None] = lambda _broker, _partition: None
        """Called when a high watermark has moved."""

    def __repr__(self) -> str:
        return f"broker {self.broker_id}"

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.is_up = True
        self.proposer = Proposer()

    def die(self) -> None:
        """In flush.mode=group the power goes, with what was not flushed; else the process alone."""
        chance = self.settings.random
        for index, disk in self.places.items():
            log = self.replicas[index].log
            # The checkpoints are written now and then: they are of this moment, or of none yet.
            point = log.flushed_offset if chance.random() < 0.7 else 0
            disk.states[index] = LogState(start_offset=log.start_offset, recovery_point=point)
            if chance.random() < 0.5:
                disk.high_watermarks[index] = self.replicas[index].known_high_watermark
        self.is_up = self.has_roles = False
        self.proposer.close()
        if self.settings.cuts_power:
            for disk in self.disks:
                disk.files.cut_power(self._survive)
        self.replicas, self.places, self.asked, self.flushing = {}, {}, {}, {}

    def _survive(self, synced: bytes, written: bytes) -> bytes:
        """A part of what was appended may have reached the disk without a sync."""
        chance = self.settings.random
        if chance.random() < 0.7 or not written.startswith(synced):
            return synced
        return written[: chance.randint(len(synced), len(written))]

    # --- the image ----------------------------------------------------------------------------------------------------

    def learn(self, image: ClusterImage, changes: ChangeSet) -> None:
        """Follow one delta, which makes `image`."""
        self.image = image
        if not self.has_roles:
            self._take_roles_if_known()
            return
        if any(isinstance(change, BrokerRegistered | BrokerFenced) for change in changes):
            for partition in self.replicas.values():
                partition.reconsider()
        for change in changes:
            if isinstance(change, PartitionChanged):
                topic = image.topics_by_id.get(change.topic_id)
                assert topic is not None
                self._take_role(topic, change.index, change.state)
            elif isinstance(change, TopicCreated):
                for index, state in enumerate(change.partitions):
                    self._take_role(image.topics[change.name], index, state)

    def _take_roles_if_known(self) -> None:
        """A broker that starts serves only when the image knows this incarnation of it, and that it lives."""
        known = self.image.brokers.get(self.broker_id)
        if known is not None and known.broker_epoch == self.epoch and not known.fenced:
            self.has_roles = True
            for topic, index, state in self.image.partitions():
                self._take_role(topic, index, state)

    def _take_role(self, topic: TopicImage, index: int, state: PartitionState) -> None:
        partition = self.replicas.get(index)
        if self.broker_id not in state.replicas:
            if partition is not None:
                self._drop(index, partition)
            return
        if partition is None:
            partition = self.replicas[index] = self._make(topic, index)
        if state.leader == self.broker_id:
            self.asked.pop(index, None)
            partition.lead(state)
        else:
            partition.follow(state)

    def _make(self, topic: TopicImage, index: int) -> Partition:
        disk = self.disk_of(index)
        self.places[index] = disk
        partition = Partition(
            topic.name,
            index,
            topic.topic_id,
            open_log=lambda: self._open(disk, index),
            clock=self.settings.clock,
            broker_id=self.broker_id,
            high_watermark=disk.high_watermarks.get(index, 0),
            max_lag_s=MAX_LAG_S,
        )
        partition.min_insync_replicas = self.settings.min_insync_replicas
        partition.wants_isr = self.proposer.consider
        partition.is_eligible = lambda broker_id, epoch: elections._is_eligible(self.image, broker_id, epoch)
        partition.high_watermark.watch(lambda: self.on_mark(self, partition))
        assert partition.log is not None  # opened now, not at its first use
        return partition

    def disk_of(self, index: int) -> Disk:
        """The disk with a partition's log, or the one that it would be made on."""
        found = next((disk for disk in self.disks if index in disk.states), None)
        return found or min(self.disks, key=lambda disk: len(disk.states))

    def _open(self, disk: Disk, index: int) -> Log:
        path = Path(f"/{disk.directory_id}/t-{index}")
        if index not in disk.states:
            disk.states[index] = LogState()
            disk.files.make_directory(path)
        return Log.open(path, self.settings.log, clock=self.settings.clock, files=disk.files, state=disk.states[index])

    def _drop(self, index: int, partition: Partition) -> None:
        disk, log = self.places.pop(index), partition.log
        partition.close(ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "moved to other brokers"))
        del self.replicas[index]
        self.asked.pop(index, None)
        self.flushing.pop(index, None)
        disk.states.pop(index)
        disk.high_watermarks.pop(index, None)
        log.release()
        disk.files.remove_directory(log.directory)

    # --- following ----------------------------------------------------------------------------------------------------

    def next_fetch(self, index: int) -> Fetch | None:
        """What a follower would ask its leader now; a new request ends the wait for the one before."""
        partition = self.replicas[index]
        if partition.is_leader or partition.state.leader < 0 or not partition.is_flushed:
            return None
        offset, last_epoch = partition.fetch_position()
        fetch = Fetch(index, self.broker_id, self.epoch, partition.leader_epoch, offset, last_epoch)
        self.asked[index] = fetch
        return fetch

    def take(self, fetch: Fetch, answer: FetchResponse.PartitionData) -> None:
        """The answer to a fetch has come; one that nobody waits for any more is dropped."""
        index = fetch.partition
        if self.asked.get(index) is not fetch:
            return
        del self.asked[index]
        partition = self.replicas[index]
        if partition.is_leader or partition.leader_epoch != fetch.leader_epoch:
            return
        _COPIER._take_one(_Place(partition, fetch.leader_epoch), answer)
