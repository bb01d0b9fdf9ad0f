"""Replication against its promise: what was acknowledged is in the log of every leader that comes, at its offset.

Three replicas with real logs, the real rules of elections and ISRs, and a controller's log of deltas that each broker
learns of at its own pace. A seed drives it: appends on whoever believes to lead, fetches whose answers are lost or come
late, flushes, proposals that are lost or arrive late or twice, brokers that die (in flush.mode=group with everything
that was not flushed), that are fenced while they live, and that come back. Time stands still unless a step moves it.

`MILLRACE_SIM_SEEDS=5000` makes a long run of it. A failure names its seed; the same seed gives the same run.
"""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.clock import ManualClock
from millrace.cluster.elections import IsrProposal, plan_brokers, plan_isr
from millrace.cluster.image import ClusterImage
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import (
    BrokerRegistered,
    ChangeSet,
    ClusterCreated,
    ControllerChanged,
    PartitionState,
    TopicCreated,
)
from millrace.records.batch import split
from millrace.records.decode import Record, decode_records
from millrace.records.encode import encode_batch
from millrace.replication.partition import Partition
from millrace.storage.log import Log
from millrace.storage.reading import ReadResult
from millrace.storage.recovery import LogState
from millrace.storage.settings import FlushMode, LogConfig
from support.batches import NOW_MS
from support.disk import FaultyFiles, fast_directory

TOPIC_ID = uuid.UUID(int=77)
BROKERS = (1, 2, 3)


class Broker:
    """One replica, and what this broker has heard of the cluster."""

    def __init__(self, broker_id: int, home: Path, config: LogConfig, clock: ManualClock, min_isr: int) -> None:
        self.broker_id = broker_id
        self.files = FaultyFiles(home)
        self.home = home
        self.config = config
        self.clock = clock
        self.min_isr = min_isr
        self.alive = True
        self.epoch = 0
        self.image = ClusterImage()
        self.heard = 0
        self.log: Log
        self.partition: Partition
        self.open(LogState(clean=False))

    def open(self, state: LogState) -> None:
        directory = self.home / "t-0"
        self.files.make_directory(directory)
        self.files.sync_directory(self.home)
        self.log = Log.open(directory, self.config, clock=self.clock, files=self.files, state=state)
        self.partition = Partition(
            "t", 0, TOPIC_ID, open_log=lambda: self.log, clock=self.clock, broker_id=self.broker_id, max_lag_s=10.0
        )
        self.partition.min_insync_replicas = self.min_isr
        self.partition.wants_isr = lambda _: None
        self.partition.is_eligible = self.is_eligible

    def is_eligible(self, broker_id: int, broker_epoch: int) -> bool:
        known = self.image.brokers[broker_id]
        return not known.fenced and broker_epoch in (-1, known.broker_epoch)

    def crash(self, *, power_loss: bool) -> None:
        self.alive = False
        flushed = self.log.flushed_offset
        self.log.release()
        if power_loss:
            self.files.crash()
        else:
            self.files.close_all()
        self.state = LogState(recovery_point=flushed, clean=False)

    def learn(self, changes: ChangeSet) -> None:
        before = self.image.partition(TOPIC_ID, 0)
        self.image = self.image.apply(changes)
        self.heard += 1
        self.take_role(before)

    def take_role(self, before: PartitionState | None) -> None:
        state = self.image.partition(TOPIC_ID, 0)
        if state is None or state == before:
            return
        if state.leader == self.broker_id:
            self.partition.lead(state)
        else:
            self.partition.follow(state)

    def values(self) -> dict[int, bytes]:
        """What the log holds, by offset."""
        found: dict[int, bytes] = {}
        offset = self.log.start_offset
        while offset < self.log.end_offset:
            read = self.log.read(offset, 1 << 20)
            for batch in split(read.data):
                for record in decode_records(batch.data):
                    found[record.offset] = record.value or b""
            offset = read.next_offset
        return found


class Replication:
    """One run. `step` makes something happen; what must hold is checked after every decision of the controller."""

    def __init__(self, seed: int, flush_mode: FlushMode, home: Path) -> None:
        self.random = random.Random(seed)
        self.flush_mode = flush_mode
        self.clock = ManualClock(NOW_MS)
        self.deltas: list[ChangeSet] = []
        self.image = ClusterImage()
        self.acked: dict[int, bytes] = {}
        self.counter = 0
        self.broker_epochs = 100
        self.late: list[Callable[[], None]] = []
        """Answers and requests that are still on their way."""
        min_isr = self.random.choice((1, 2))
        config = LogConfig(flush_mode=flush_mode, segment_bytes=2000, index_interval_bytes=200)
        self.brokers = {each: Broker(each, home / str(each), config, self.clock, min_isr) for each in BROKERS}
        changes: list[Any] = [ClusterCreated("c"), ControllerChanged(1, 1)]
        for broker in self.brokers.values():
            broker.epoch = self.broker_epochs = self.broker_epochs + 1
            changes.append(BrokerRegistered(broker.broker_id, broker.epoch, ()))
        changes.append(TopicCreated("t", TOPIC_ID, (PartitionState(BROKERS, BROKERS, 1),)))
        self.write(tuple(changes))
        for broker in self.brokers.values():
            self.catch_up(broker)
        self.steps: list[tuple[Callable[[Broker], None], int]] = [
            (self.append, 20),
            (self.fetch, 40),
            (self.flush, 20),
            (self.propose, 12),
            (self.hear, 15),
            (self.arrive, 6),
            (self.wait, 1),
            (self.fence, 1),
            (self.unfence, 3),
            (self.crash, 2),
            (self.come_back, 4),
        ]

    def step(self) -> None:
        (act,) = self.random.choices([each for each, _ in self.steps], [weight for _, weight in self.steps])
        act(self.brokers[self.random.choice(BROKERS)])

    def close(self) -> None:
        for broker in self.brokers.values():
            broker.files.close_all()

    # The controller's side.

    @property
    def truth(self) -> PartitionState:
        state = self.image.partition(TOPIC_ID, 0)
        assert state is not None
        return state

    def write(self, changes: ChangeSet) -> None:
        if changes:
            self.image = self.image.apply(changes)
            self.deltas.append(changes)

    def catch_up(self, broker: Broker, to: int | None = None) -> None:
        while broker.heard < (len(self.deltas) if to is None else to):
            broker.learn(self.deltas[broker.heard])

    # What happens.

    def append(self, at: Broker) -> None:
        if not at.alive or not at.partition.is_leader or at.partition.under_min_isr:
            return
        values = []
        for _ in range(self.random.randint(1, 3)):
            self.counter += 1
            values.append(b"%d from %d" % (self.counter, at.broker_id))
        data = encode_batch([Record(index, NOW_MS, None, value) for index, value in enumerate(values)])
        appended = at.partition.append(data)
        offsets = dict(enumerate(values, appended.base_offset))

        def settled(error: Exception | None) -> None:
            if error is None:
                self.acknowledge(offsets)

        if not at.partition.when_committed(appended.last_offset, settled):
            self.acknowledge(offsets)

    def acknowledge(self, offsets: dict[int, bytes]) -> None:
        for offset, value in offsets.items():
            assert self.acked.get(offset, value) == value, f"offset {offset} was acknowledged twice"
            self.acked[offset] = value

    def fetch(self, to: Broker) -> None:
        leader = to.partition.state.leader
        if not to.alive or to.partition.is_leader or leader < 1 or not to.partition.is_flushed:
            return
        at = self.brokers[leader]
        if not at.alive or not at.partition.is_leader:
            return
        epoch, incarnation = to.partition.leader_epoch, to.log
        offset, last_epoch = to.partition.fetch_position()
        try:
            at.partition.check_leader_epoch(epoch)
            read = at.partition.serve_follower(to.broker_id, to.epoch, offset, last_epoch, 400, at_least_one=True)
        except ApiError as error:
            if error.code is ErrorCode.OFFSET_OUT_OF_RANGE:
                raise
            return
        mark = at.partition.high_watermark.offset

        def take() -> None:
            if to.log is not incarnation or not to.alive or to.partition.is_leader:
                return
            if to.partition.leader_epoch != epoch or to.partition.fetch_position() != (offset, last_epoch):
                return
            if isinstance(read, ReadResult):
                if read.data:
                    to.partition.append_from_leader(memoryview(read.data), epoch)
                to.partition.follow_leader_marks(mark, 0)
            else:
                to.partition.truncate_to_leader(*read)

        fate = self.random.random()
        if fate < 0.8:
            take()
        elif fate < 0.9:
            self.late.append(take)

    def flush(self, at: Broker) -> None:
        if at.alive:
            at.log.flush()

    def propose(self, at: Broker) -> None:
        if not at.alive or not at.partition.is_leader:
            return

        wanted = at.partition.wanted_isr()
        if wanted is None:
            return
        at.partition.propose(tuple(each for each, _ in wanted))
        state = at.partition.state
        proposal = IsrProposal(TOPIC_ID, 0, state.leader_epoch, state.partition_epoch, wanted)

        def decide() -> None:
            self.write(plan_isr(self.image, at.broker_id, [proposal]).changes)

        fate = self.random.random()
        if fate < 0.6:
            decide()
        elif fate < 0.9:
            self.late += [decide] * self.random.randint(1, 2)

    def arrive(self, _: Broker) -> None:
        if self.late:
            self.late.pop(self.random.randrange(len(self.late)))()

    def hear(self, at: Broker) -> None:
        if at.alive:
            self.catch_up(at, min(at.heard + self.random.randint(1, 3), len(self.deltas)))

    def wait(self, _: Broker) -> None:
        self.clock.advance(self.random.choice((1.0, 11.0)))

    def fence(self, at: Broker) -> None:
        """The controller gives a broker up, dead or not."""
        epoch = self.image.brokers[at.broker_id].broker_epoch
        self.write(plan_brokers(self.image, fence={at.broker_id: epoch}).changes)

    def unfence(self, at: Broker) -> None:
        if at.alive and self.image.brokers[at.broker_id].broker_epoch == at.epoch:
            self.write(plan_brokers(self.image, unfence={at.broker_id: at.epoch}).changes)

    def crash(self, at: Broker) -> None:
        if at.alive:
            at.crash(power_loss=self.flush_mode is FlushMode.GROUP)
            if self.random.random() < 0.7:  # it is noticed, sooner or later
                self.late.append(lambda epoch=at.epoch: self.notice(at.broker_id, epoch))  # type: ignore[misc]

    def notice(self, broker_id: int, epoch: int) -> None:
        self.write(plan_brokers(self.image, fence={broker_id: epoch}).changes)

    def come_back(self, at: Broker) -> None:
        if at.alive:
            return
        at.open(at.state)
        at.alive = True
        at.epoch = self.broker_epochs = self.broker_epochs + 1
        self.write(plan_brokers(self.image, register=[BrokerRegistered(at.broker_id, at.epoch, ())]).changes)
        # It reads the whole log before it takes any role, as a broker does that starts.
        while at.heard < len(self.deltas):
            at.image = at.image.apply(self.deltas[at.heard])
            at.heard += 1
        at.take_role(None)

    # What must hold.

    def check(self) -> None:
        """Everything acknowledged is on every live member of the ISR: whichever is elected next has it."""
        state = self.truth
        assert state.isr
        assert set(state.isr) <= set(state.replicas)
        assert state.leader in (-1, *state.isr)
        if not self.acked:
            return
        for broker_id in state.isr:
            broker = self.brokers[broker_id]
            if broker.alive:
                held = broker.values()
                missing = {offset: value for offset, value in self.acked.items() if held.get(offset) != value}
                assert not missing, f"broker {broker_id} is in the ISR of {state} without {missing}"


SEEDS = int(os.environ.get("MILLRACE_SIM_SEEDS", "0"))
STEPS = 400


@pytest.mark.parametrize("flush_mode", [FlushMode.OS, FlushMode.GROUP])
def test_what_was_acknowledged_stays(flush_mode: FlushMode) -> None:
    acked = moves = 0
    for seed in range(SEEDS or 40):
        with fast_directory() as home:
            run = Replication(seed, flush_mode, home)
            try:
                for _ in range(STEPS):
                    known = len(run.deltas)
                    run.step()
                    if len(run.deltas) > known:
                        run.check()
                run.check()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from error
            finally:
                run.close()
            acked += len(run.acked)
            moves += run.truth.leader_epoch
    # The runs must have been about something.
    assert acked > (SEEDS or 40) * 10
    assert moves > (SEEDS or 40)
