"""A queue through failovers: share-partitions on a real log, with a coordinator and a dead-letter topic that fail.

Every seed is a history: members fetch, answer, vanish and come too late; writes of state fail, or happen without
anybody learning of it; leaders follow each other while the old one goes on; letters are written late, in part, and
twice. The model only knows what members were told. In the end everything works again, and every record has an end.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from millrace.clock import ManualClock
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import PartitionState
from millrace.queues.acquisition import AcknowledgeBatch, AcknowledgeType, AcquireMode, DeadLetter, Limits
from millrace.queues.partition import FetchTerms, SharePartition
from millrace.queues.records import ShareKey, Snapshot
from millrace.queues.settings import QueueSettings
from millrace.queues.state import Write
from millrace.replication.partition import Partition
from millrace.replication.state_topic import yield_to_loop
from millrace.storage.files import Files
from millrace.storage.log import Log
from millrace.storage.recovery import LogState
from millrace.storage.settings import FlushMode, LogConfig
from support.batches import NOW_MS, batch
from support.share_store import KEY, Store

MEMBERS = ("a", "b", "c")
LOCK_MS = 2_000
STEPS = 120
KINDS = (AcknowledgeType.ACCEPT, AcknowledgeType.ACCEPT, AcknowledgeType.RELEASE, AcknowledgeType.REJECT)
SEEDS = range(60)


@dataclass
class World:
    """What fails, and how often."""

    dice: random.Random
    clock: ManualClock
    store: Store = field(default_factory=Store)
    copied: list[int] = field(default_factory=list)
    late: list[asyncio.Task[None]] = field(default_factory=list)
    is_healed: bool = False

    def misfortune(self, *kinds: str) -> str:
        return "" if self.is_healed or self.dice.random() < 0.6 else self.dice.choice(kinds)

    async def read(self, key: ShareKey, leader_epoch: int) -> Snapshot:
        if self.misfortune("lost"):
            raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        return self.store.read(leader_epoch)

    async def write(self, key: ShareKey, write: Write) -> None:
        fate = self.misfortune("lost", "unheard", "slow", "late")
        if fate == "late":
            self.late.append(asyncio.ensure_future(self.arrive(write)))
        if fate in {"lost", "late"}:
            raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        if fate == "slow":
            await self.clock.sleep(self.dice.random() * 3)
        self.store.write(write)
        if fate == "unheard":
            raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE)

    async def arrive(self, write: Write) -> None:
        """A write of which nobody heard, after all; by then another one may lead."""
        await self.clock.sleep(self.dice.random() * 3)
        with contextlib.suppress(ApiError):
            self.store.write(write)

    async def deliver(self, key: ShareKey, source: Partition, letter: DeadLetter, settings: QueueSettings) -> int:
        fate = self.misfortune("lost", "unheard", "slow", "part", "part")
        if fate == "lost":
            raise ApiError(ErrorCode.NOT_ENOUGH_REPLICAS)
        if fate == "slow":
            await self.clock.sleep(self.dice.random() * 3)
        last = letter.first_offset if fate == "part" else letter.last_offset
        self.copied += range(letter.first_offset, last + 1)
        if fate == "unheard":
            raise ApiError(ErrorCode.REQUEST_TIMED_OUT)
        return last


class History:
    """One seed."""

    def __init__(self, seed: int, home: Path) -> None:
        self.dice = random.Random(seed)
        self.clock = ManualClock(wall_ms=NOW_MS)
        self.world = World(self.dice, self.clock)
        self.settings = QueueSettings(
            Limits(
                max_locks=self.dice.choice((8, 50, 1_000)),
                max_deliveries=3,
                lock_ms=LOCK_MS,
                dead_letters=self.dice.random() < 0.6,
                backoff_ms=self.dice.choice((0, 400)),
                backoff_max_ms=1_000,
            )
        )
        config = LogConfig(flush_mode=FlushMode.OS)
        log = Log.open(home, config, clock=self.clock, files=Files(), state=LogState(clean=True))
        self.partition = Partition("t", 0, KEY.topic_id, open_log=lambda: log, clock=self.clock, broker_id=1)
        self.leader: SharePartition | None = None
        self.old: list[SharePartition] = []
        self.held: dict[int, tuple[str, SharePartition, float]] = {}
        self.accepted: set[int] = set()
        self.rejected: set[int] = set()
        self.deliveries: dict[int, int] = {}
        self.answers: set[asyncio.Task[None]] = set()
        self.highest_start = 0

    async def run(self) -> None:
        await self.fail_over()
        for _ in range(STEPS):
            step = self.dice.choice(
                (self.produce, self.fetch, self.fetch, self.answer, self.answer, self.wait, self.rare)
            )
            await step()
            await run_ready()
            self.check()
        await self.finish()

    async def rare(self) -> None:
        await self.dice.choice((self.fail_over, self.leave, self.retention, self.old_leader_dies))()

    async def produce(self) -> None:
        self.partition.append(batch(self.dice.randint(1, 6)))

    async def fetch(self) -> None:
        shares = [each for each in (self.leader, *self.old[-1:]) if each is not None]
        if shares:
            self.take(self.dice.choice(shares), self.dice.choice(MEMBERS), self.dice.randint(1, 12))

    def take(self, share: SharePartition, member: str, count: int) -> None:
        mode = self.dice.choice(list(AcquireMode))
        try:
            found = share.fetch(member, FetchTerms(count, 1 << 20, mode=mode))
        except ApiError:
            assert share is not self.leader or share.error is not None
            return
        assert share is self.leader, "a leader of the past gave records out"
        for first, last, deliveries in found.acquired:
            for offset in range(first, last + 1):
                assert offset not in self.accepted, f"{offset} was accepted before"
                assert deliveries <= 3
                holder = self.held.get(offset)
                now = self.clock.monotonic()
                assert holder is None or holder[1] is not share or holder[2] <= now, f"{offset} is held by {holder}"
                self.held[offset] = (member, share, now + LOCK_MS / 1000)
                self.deliveries[offset] = self.deliveries.get(offset, 0) + 1

    async def answer(self) -> None:
        member = self.dice.choice(MEMBERS)
        mine = sorted(offset for offset, (name, _, _) in self.held.items() if name == member)
        chance = self.dice.choice((0.5, 1.0))
        chosen = [offset for offset in mine if self.dice.random() < chance]
        if not chosen:
            return
        share = self.held[chosen[0]][1]
        alike = self.dice.choice((None, *AcknowledgeType))
        kinds = {each: alike or self.dice.choice(KINDS) for each in chosen if self.held[each][1] is share}
        for offset in kinds:
            if alike is AcknowledgeType.RENEW:
                self.held[offset] = (member, share, self.clock.monotonic())  # until then at least
                continue
            del self.held[offset]  # whatever becomes of it, the member has had its say
        self.answers.add(asyncio.ensure_future(self.say(share, member, kinds)))

    async def say(self, share: SharePartition, member: str, kinds: dict[int, AcknowledgeType]) -> None:
        try:
            await share.acknowledge(member, [AcknowledgeBatch(each, each, [kind]) for each, kind in kinds.items()])
        except ApiError:
            return
        for offset, kind in kinds.items():
            if kind is AcknowledgeType.ACCEPT:
                self.accepted.add(offset)
            elif kind is AcknowledgeType.REJECT:
                self.rejected.add(offset)

    async def leave(self) -> None:
        member = self.dice.choice(MEMBERS)
        self.held = {offset: holder for offset, holder in self.held.items() if holder[0] != member}
        if self.leader is not None:
            self.answers.add(asyncio.ensure_future(released(self.leader, member)))

    async def wait(self) -> None:
        self.clock.advance(self.dice.choice((0.1, 0.5, 1.0, LOCK_MS / 1000)))

    async def retention(self) -> None:
        start, end = self.partition.log.start_offset, self.partition.committed.offset
        if start < end:
            self.partition.delete_records_before(self.dice.randint(start, min(start + 3, end)))

    async def fail_over(self) -> None:
        if self.leader is not None:
            self.old.append(self.leader)
            self.leader = None
        self.partition.lead(PartitionState((1,), (1,), 1, self.partition.leader_epoch + 1))
        share = SharePartition(
            KEY,
            self.partition,
            persister=self.world,
            office=self.world,
            settings=lambda: self.settings,
            clock=self.clock,
        )
        try:
            await share.load()
        except ApiError:
            return  # nobody leads the queue until the next one tries
        self.leader = share

    async def old_leader_dies(self) -> None:
        while self.old:
            self.old.pop().close(ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER))

    def check(self) -> None:
        start = self.world.store.snapshot.start_offset
        assert start >= self.highest_start, "the stored start went back"
        self.highest_start = start
        if self.settings.limits.dead_letters:
            # What members were told is rejected may leave the window only as a letter, or with the log.
            for offset in range(self.partition.log.start_offset, start):
                assert offset not in self.rejected or offset in self.world.copied, f"{offset} left without a letter"

    async def finish(self) -> None:
        self.world.is_healed = True
        await self.old_leader_dies()
        await self.fail_over()
        end = self.partition.committed.offset
        for _ in range(200):
            self.clock.advance(LOCK_MS / 1000)
            await run_ready()
            assert self.leader is not None
            if self.leader._window.start_offset >= end:
                break
            self.take(self.leader, "a", 50)
            await self.answer_all()
        else:
            pytest.fail(f"never came to the end: {self.leader!r}")
        self.check()
        await asyncio.gather(*self.answers, *self.world.late)
        assert self.world.store.replayed() == self.world.store.live
        await self.old_leader_dies()
        assert self.leader is not None
        self.leader.close(ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER))
        await run_ready()

    async def answer_all(self) -> None:
        mine = {offset: AcknowledgeType.ACCEPT for offset, (name, _, _) in sorted(self.held.items()) if name == "a"}
        self.held.clear()
        assert self.leader is not None
        if mine:
            saying = asyncio.ensure_future(self.say(self.leader, "a", mine))
            await run_ready()
            await saying


async def released(share: SharePartition, member: str) -> None:
    try:
        await share.release(member)
    except ApiError:
        return


async def run_ready() -> None:
    for _ in range(8):
        await yield_to_loop()


@pytest.mark.parametrize("seed", SEEDS)
async def test_every_record_has_one_end_whoever_leads(seed: int, tmp_path: Path) -> None:
    home = tmp_path / "t-0"
    home.mkdir()
    await History(seed, home).run()
