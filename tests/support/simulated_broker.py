"""One broker of the simulated cluster: real replicas and logs, on disks in memory, and what it has heard.

What is real: `Replicas` and `Partition` with their logs, the copying of a follower (`follower._Session._take_one`), the
tasks that ask for ISRs and report on disks (`IsrProposals`, `DiskReports`). What is modelled here is what lies around
them: which delta has been heard, when a broker that starts takes its roles, and the disks with their checkpoints.
"""

from __future__ import annotations

import itertools
import random
import types
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from uuid import UUID

from millrace.clock import ManualClock
from millrace.cluster.elections import IsrProposal, Placement
from millrace.cluster.image import ClusterImage, TopicImage
from millrace.config import BrokerConfig, TopicConfig, topic_config
from millrace.errors import ApiError, CorruptLogError, ErrorCode, StorageError
from millrace.metadata.deltas import ChangeSet, Directories
from millrace.metadata.store import BrokerRegistration
from millrace.model import FAILED_DIRECTORY, LOST_DIRECTORY, TopicPartition
from millrace.replication.follower import _FollowedPartition, _Session
from millrace.replication.partition import Partition
from millrace.replication.proposals import IsrProposals
from millrace.replication.replicas import Replicas
from millrace.replication.reports import DiskReports
from millrace.storage.files import Files
from millrace.storage.host import Alone
from millrace.storage.log import Log
from millrace.storage.recovery import LogState
from millrace.storage.segment import IndexCache
from millrace.storage.settings import FlushMode, LogConfig
from millrace.storage.ticket import FlushTicket
from millrace.wire.messages.fetch import FetchResponse
from support.memory_disk import MemoryFiles

NOTHING: Final = ClusterImage()
"""Before the first delta."""
_MADE: Final = itertools.count()
_COPIER: Final = _Session.__new__(_Session)
"""What copies an answer into a log is a method that needs no session."""


class Death(Enum):
    """How a broker ends."""

    STOP = "stops"
    """Everything is put on disk."""
    PROCESS = "is killed"
    """What was written stays, with the kernel."""
    POWER = "loses its power"
    """What was not synced is gone, and the machine is another one."""


class Settings:
    """What every broker of a run is told."""

    def __init__(self, clock: ManualClock, chance: random.Random, flush_mode: FlushMode, min_isr: int) -> None:
        self.clock = clock
        self.random = chance
        self.broker = BrokerConfig(
            {
                "flush.mode": flush_mode.value,
                "min.insync.replicas": str(min_isr),
                "replica.lag.time.max.ms": "10000",
            }
        )
        self.topic = topic_config({}, self.broker)
        self.log = LogConfig(flush_mode=flush_mode, segment_bytes=1000, index_interval_bytes=200)


# --- disks ------------------------------------------------------------------------------------------------------------


@dataclass
class Disk:
    """A log directory, and what the checkpoints in it say of its logs, by partition."""

    directory_id: str
    files: MemoryFiles = field(default_factory=MemoryFiles)
    states: dict[int, LogState] = field(default_factory=dict)
    high_watermarks: dict[int, int] = field(default_factory=dict)
    expected: set[int] = field(default_factory=set)
    """The logs that must be there."""
    made: dict[int, int] = field(default_factory=dict)
    """When each log was made."""
    is_attached: bool = True

    def path(self, index: int) -> Path:
        return Path(f"/{self.directory_id}/t-{index}")

    def damage(self, index: int) -> bool:
        """Turn a bit of what was synced, where a start looks: in the segment of the recovery point, and below it."""
        state = self.states[index]
        self.states[index] = LogState(state.start_offset, state.recovery_point)
        return self.files.damage(self.path(index), below=state.recovery_point)

    def forget(self, index: int) -> None:
        """A log and all that is known of it."""
        self.files.remove_directory(self.path(index))
        self.states.pop(index, None)
        self.high_watermarks.pop(index, None)


class _Shelf(Alone):
    """The host of a log here."""

    def __init__(self, files: Files, look: Callable[[], None]) -> None:
        super().__init__(files)
        self._look = look

    def log_failed(self) -> None:
        self._look()


class Disks:
    """The disks of a broker while it runs: what `Replicas` needs of `storage.logdirs.LogDirs`, without threads."""

    def __init__(self, disks: Sequence[Disk], settings: Settings, look: Callable[[], None]) -> None:
        self.attached = [disk for disk in disks if disk.is_attached]
        self.failed: list[Disk] = []
        self.some_offline = len(self.attached) < len(disks)
        self.on_moved: Callable[[TopicPartition], object] | None = None
        self.moves = SimpleNamespace(bytes_per_s=None)
        self.high_watermarks: dict[TopicPartition, int] = {}
        self.places: dict[int, Disk] = {}
        self.open: dict[int, Log] = {}
        self._settings = settings
        self._look = look
        self.missing: set[int] = set()
        for disk in self.attached:
            for index, mark in disk.high_watermarks.items():
                self.high_watermarks[TopicPartition("t", index)] = mark
            for index, state in sorted(disk.states.items()):
                self._open(disk, index, state)
            self.missing |= {index for index in disk.expected if index not in disk.states}

    def _open(self, disk: Disk, index: int, state: LogState) -> Log:
        log = Log(
            disk.path(index),
            self._settings.log,
            clock=self._settings.clock,
            files=disk.files,
            state=state,
            cache=IndexCache(),
            host=_Shelf(disk.files, self._look),
        )
        self.places[index], self.open[index] = disk, log
        if not state.clean:
            try:
                log.ensure_loaded()
            except CorruptLogError:
                pass  # it says so itself
        return log

    @property
    def online(self) -> tuple[str, ...]:
        return tuple(disk.directory_id for disk in self.attached if disk not in self.failed)

    @property
    def described(self) -> Directories:
        return Directories(self.online, (), self.some_offline or bool(self.failed))

    def logs(self) -> dict[TopicPartition, Log]:
        return {}

    def get(self, place: TopicPartition) -> Log | None:
        return self.open.get(place.partition)

    def topic_id(self, place: TopicPartition) -> UUID | None:
        return None

    def set_topic_id(self, place: TopicPartition, topic_id: UUID) -> None:
        """There is one topic only."""

    def whereabouts(self, place: TopicPartition, topic_id: UUID) -> str | None:
        disk = self.places.get(place.partition)
        if disk is None:
            return LOST_DIRECTORY if self.is_missing(place, topic_id) else None
        failure = self.open[place.partition].failure
        if disk in self.failed or failure is None:
            return disk.directory_id
        return LOST_DIRECTORY if isinstance(failure, CorruptLogError) else FAILED_DIRECTORY

    def is_full(self, place: TopicPartition) -> bool:
        return False

    def note_failed_write(self, place: TopicPartition, error: StorageError) -> None:
        """No write fails here but those to a disk that has failed already."""

    def is_missing(self, place: TopicPartition, topic_id: UUID) -> bool:
        return place.partition in self.missing

    def choose_between_twins(self, directory_of: Callable[[TopicPartition], str | None]) -> None:
        """A person has removed the one that does not count."""

    def give_up_missing(self, place: TopicPartition) -> None:
        self.missing.discard(place.partition)

    def create_log(self, place: TopicPartition, topic_id: UUID, config: LogConfig, directory_id: str) -> Log:
        online = [disk for disk in self.attached if disk not in self.failed]
        if not online:
            raise StorageError("no usable data directory")
        disk = next((disk for disk in online if disk.directory_id == directory_id), online[0])
        disk.states[place.partition] = LogState()
        disk.made[place.partition] = next(_MADE)
        disk.files.make_directory(disk.path(place.partition))
        return self._open(disk, place.partition, LogState())

    def set_aside(self, place: TopicPartition) -> None:
        self.delete_log(place)

    def delete_log(self, place: TopicPartition, after_ms: int = 0) -> None:
        del after_ms
        index = place.partition
        self.give_up_missing(place)
        log, disk = self.open.pop(index, None), self.places.pop(index, None)
        if log is not None and disk is not None:
            log.release()
            log.failure = StorageError(f"{place} was deleted")
            disk.forget(index)

    def fail(self, disk: Disk) -> StorageError:
        """A disk that is in use does not answer any more."""
        error = StorageError(f"disk {disk.directory_id} is gone")
        self.failed.append(disk)
        for index, log in self.open.items():
            if self.places[index] is disk:
                log.fail(error)
        self._look()
        return error

    def end(self, death: Death, marks: dict[int, int], survive: Callable[[bytes, bytes], bytes]) -> None:
        """The broker ends; its checkpoints are of this moment, or were never written."""
        chance = self._settings.random
        for index, log in self.open.items():
            disk = self.places[index]
            if log.failure is not None or disk in self.failed:
                continue
            flushed = log.flushed_offset
            if death is Death.STOP:
                log.close()
                disk.states[index] = LogState(log.start_offset, log.end_offset, clean=True)
                disk.expected.add(index)
            else:
                disk.states[index] = LogState(log.start_offset, flushed if chance.random() < 0.7 else 0)
                if flushed and chance.random() < 0.7:
                    disk.expected.add(index)
            if chance.random() < 0.5:
                disk.high_watermarks[index] = marks.get(index, 0)
        if death is Death.POWER:
            for disk in self.attached:
                disk.files.cut_power(survive)


# --- requests ---------------------------------------------------------------------------------------------------------


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


class _Driven:
    """A task of the broker, driven by hand: it goes on until it asks for something, and waits for the answer."""

    def __init__(self, task: Coroutine[Any, Any, None]) -> None:
        self.request: object = None
        self._task = task
        self._task.send(None)

    def go_on(self) -> object:
        """As far as it comes without an answer; returns what it asks for, if it does."""
        if self.request is None:
            self._task.send(None)
        return self.request

    def answer(self, codes: object) -> None:
        self.request = None
        self._task.send(codes)

    def fail(self) -> None:
        """No answer comes: what was asked for may happen all the same."""
        self.request = None
        self._task.throw(ApiError(ErrorCode.REQUEST_TIMED_OUT, "no answer"))

    def close(self) -> None:
        self.request = None
        self._task.close()

    async def _ask(self, request: object) -> Any:
        self.request = request
        return await _pause(self)

    async def sleep(self, _seconds: float) -> None:
        await _pause(self)


class Proposer(_Driven):
    """`IsrProposals`: a request is a list of proposals."""

    def __init__(self) -> None:
        self.proposals = IsrProposals(ask=self._propose, partitions=tuple, clock=self, check_interval_s=0)  # type: ignore[arg-type]
        self.proposals._wanted = _Flag()  # type: ignore[assignment]
        super().__init__(self.proposals._propose_for_ever())

    async def _propose(self, proposals: Sequence[IsrProposal]) -> list[ErrorCode]:
        codes: list[ErrorCode] = await self._ask(list(proposals))
        return codes


class Reporter(_Driven):
    """`DiskReports`: a request is the directories of the broker, or a list of placements."""

    def __init__(self, broker: SimBroker) -> None:
        def known() -> Directories | None:
            found = broker.image.brokers.get(broker.broker_id)
            return None if found is None else found.directories

        self.reports = DiskReports(
            known=known,
            actual=lambda: broker.disks.described,
            misplaced=lambda: broker.all_replicas.misplaced(),  # noqa: PLW0108 - there are none yet
            tell_directories=self._tell_directories,
            tell_placements=self._tell_placements,
            untold_timeout_s=float("inf"),
            give_up=lambda _reason: None,
            clock=self,  # type: ignore[arg-type]
        )
        self.reports._wake = _Flag()  # type: ignore[assignment]
        super().__init__(self.reports.run())

    def monotonic(self) -> float:
        """It never gives up here: a broker that stops is a step of the model's own."""
        return 0.0

    async def _tell_directories(self, directories: Directories, _known: Sequence[str]) -> None:
        await self._ask(directories)

    async def _tell_placements(self, placements: Sequence[Placement]) -> list[ErrorCode]:
        codes: list[ErrorCode] = await self._ask(list(placements))
        return codes


class _Replicas(Replicas):
    """With the settings of the run, which need no look at the configuration, and an eye on high watermarks."""

    def __init__(self, broker: SimBroker) -> None:
        settings = broker.settings
        super().__init__(
            broker_id=broker.broker_id,
            config=settings.broker,
            log_dirs=broker.disks,  # type: ignore[arg-type]
            clock=settings.clock,
        )
        self._broker = broker

    def _make(self, topic: TopicImage, index: int) -> Partition:
        partition = super()._make(topic, index)
        partition.high_watermark.watch(lambda: self._broker.on_mark(self._broker, partition))
        self._broker.replicas[index] = partition
        return partition

    def _drop(self, partition: Partition, reason: ApiError) -> None:
        super()._drop(partition, reason)
        self._broker.forget(partition)
        self._broker.replicas.pop(partition.index, None)
        self._broker.flushing.pop(partition.index, None)

    def _topic_config(self, topic: str) -> TopicConfig:
        return self._broker.settings.topic

    def _log_config(self, topic: str) -> LogConfig:
        return self._broker.settings.log


class SimBroker:
    """A process that comes and goes, and the disks that stay."""

    def __init__(self, broker_id: int, settings: Settings, shelf: list[Disk]) -> None:
        self.broker_id = broker_id
        self.settings = settings
        self.shelf = shelf
        """Its disks, attached or not."""
        self.is_up = False
        """The process lives."""
        self.has_roles = False
        """It has found itself in the image and serves."""
        self.epoch = -1
        """Of its newest registration."""
        self.image = NOTHING
        self.replicas: dict[int, Partition] = {}
        self.followed: set[int] = set()
        self.asked: dict[int, Fetch] = {}
        """The newest fetch of each followed partition: only its answer is still waited for."""
        self.flushing: dict[int, FlushTicket] = {}
        self.disks: Disks
        self.all_replicas: _Replicas
        self.proposer: Proposer
        self.reporter: Reporter
        self.on_mark: Callable[[SimBroker, Partition], None] = lambda _broker, _partition: None
        """Called when a high watermark has moved."""
        self._boot = 1
        self._clean_epoch = -1

    def __repr__(self) -> str:
        return f"broker {self.broker_id}"

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.is_up = True
        self._remove_old_copies()
        self.proposer = Proposer()
        self.reporter = Reporter(self)
        self.disks = Disks(self.shelf, self.settings, self.reporter.reports.look)
        self.all_replicas = _Replicas(self)
        self.all_replicas.followed = self
        self.all_replicas.wants_isr = self.proposer.proposals.consider
        self.all_replicas.on_misplaced = self.reporter.reports.look

    def _remove_old_copies(self) -> None:
        """A log that was made anew while its disk was away is there twice when the disk returns.

        `LogDirs` refuses to start then: a person removes the older one.
        """
        attached = [disk for disk in self.shelf if disk.is_attached]
        for index in {index for disk in attached for index in disk.states}:
            copies = sorted((disk for disk in attached if index in disk.states), key=lambda disk: disk.made[index])
            for disk in copies[:-1]:
                disk.forget(index)
                disk.expected.discard(index)

    def registration(self) -> BrokerRegistration:
        return BrokerRegistration(
            self.broker_id, (), None, self.disks.described, f"boot {self.broker_id} {self._boot}", self._clean_epoch
        )

    def registered(self, epoch: int) -> None:
        """Under a new epoch, in which nothing is lost if it is registered again."""
        self.epoch = self._clean_epoch = epoch

    def die(self, death: Death) -> None:
        if death is Death.STOP:  # the flushers end first
            for index in list(self.flushing):
                self.synced(index, self.flushing[index])
        marks = {index: partition.known_high_watermark for index, partition in self.replicas.items()}
        for partition in self.replicas.values():
            partition.close(ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "the broker is gone"))
        self.disks.end(death, marks, self._survive)
        self._clean_epoch = self.epoch if death is Death.STOP else -1
        self._boot += death is Death.POWER
        self.is_up = self.has_roles = False
        self.proposer.close()
        self.reporter.close()
        self.replicas, self.followed, self.asked, self.flushing = {}, set(), {}, {}

    def synced(self, index: int, ticket: FlushTicket) -> None:
        """A sync comes to its end, unless its log or the broker came to theirs before."""
        if self.flushing.get(index) is ticket:
            del self.flushing[index]
            if ticket.log.failure is None:
                ticket.run(self.disks.places[index].files)
                ticket.log.end_flush(ticket)

    def fail(self, disk: Disk) -> None:
        """One of its disks does not answer any more."""
        error = self.disks.fail(disk)
        logs = {TopicPartition("t", index): log for index, log in self.disks.open.items() if log.failure is error}
        self.all_replicas.directory_failed(types.SimpleNamespace(failure=error, logs=logs))  # type: ignore[arg-type]

    def _survive(self, synced: bytes, written: bytes) -> bytes:
        """A part of what was appended may have reached the disk without a sync."""
        chance = self.settings.random
        if chance.random() < 0.7 or not written.startswith(synced):
            return synced
        return written[: chance.randint(len(synced), len(written))]

    # --- the image ----------------------------------------------------------------------------------------------------

    def learn(self, image: ClusterImage, changes: ChangeSet) -> None:
        """Follow one delta, which makes `image`."""
        before, self.image = self.image, image
        if self.has_roles:
            self.all_replicas.apply(before, image, changes)
            return
        # A broker that starts serves only when the image knows this incarnation of it, and that it lives.
        known = image.brokers.get(self.broker_id)
        if known is not None and known.broker_epoch == self.epoch and not known.fenced:
            self.has_roles = True
            self.all_replicas.load(image)
            self.reporter.reports.look()

    # --- following (what `Replicas` tells its fetchers) ---------------------------------------------------------------

    def assign(self, partition: Partition) -> None:
        self.followed.add(partition.index)

    def forget(self, partition: Partition) -> None:
        self.followed.discard(partition.index)
        self.asked.pop(partition.index, None)

    def brokers_changed(self, image: ClusterImage) -> None:
        """Everybody can be reached."""

    def next_fetch(self, index: int) -> Fetch | None:
        """What a follower would ask its leader now; a new request ends the wait for the one before."""
        partition = self.replicas[index]
        try:
            if partition.is_leader or partition.state.leader < 0 or not partition.is_flushed:
                return None
            offset, last_epoch = partition.fetch_position()
        except StorageError:
            return None
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
        try:
            _COPIER._take_one(_FollowedPartition(partition, fetch.leader_epoch), answer)
        except StorageError:
            return
