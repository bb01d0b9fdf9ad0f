"""A cluster of four brokers in one thread, driven by a seed: what may happen to it, step by step.

The controller is one of the brokers. It plans with the real functions (`elections`, `reassignments`, `membership`)
against what it has heard, and appends to a store that is modelled here: deltas by number, registrations with their
epochs, and the fence, which refuses the delta of a reign that is over. Requests, answers and news may be lost, come
late or come twice. Time stands still unless a step moves it.

The mix of steps is drawn anew for each seed: some runs have no moves, some many crashes. Rare things happen together
more often in a few extreme runs than in many average ones.
"""

from __future__ import annotations

import logging
import random
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from millrace.clock import ManualClock
from millrace.cluster import controller, elections, membership, reassignments, recovery
from millrace.cluster.directories import DirectoryChoice
from millrace.cluster.elections import LogEnd, Placement
from millrace.cluster.image import ClusterImage
from millrace.cluster.planning import Plan
from millrace.cluster.reassignments import Reassignment
from millrace.cluster.survey import Survey
from millrace.errors import ApiError, ErrorCode, MillraceError, code_of
from millrace.metadata.deltas import (
    ChangeSet,
    ClusterCreated,
    ControllerChanged,
    Directories,
    PartitionChanged,
    PartitionState,
    TopicCreated,
)
from millrace.metadata.store import BrokerRegistration, Fenced, Member, Membership
from millrace.model import NO_BROKER
from millrace.records.decode import Record
from millrace.records.encode import encode_batch
from millrace.replication.partition import Partition
from millrace.storage.reading import ReadResult
from millrace.storage.settings import FlushMode
from millrace.wire.messages.fetch import FetchResponse
from support.batches import NOW_MS
from support.simulated_broker import NOTHING, Death, Disk, Fetch, Proposer, Reporter, Settings, SimBroker
from support.simulated_promises import BrokenPromise, Committed, check_change

TOPIC: Final = "t"
TOPIC_ID: Final = uuid.UUID(int=77)
BROKERS: Final = (1, 2, 3, 4)
ASSIGNMENT: Final = ((1, 2, 3), (2, 3, 4), (4, 1, 2))
MAX_IN_FLIGHT: Final = 5
"""As many batches of one producer may be without an answer; a log remembers as many (`producers.BATCHES_KEPT`)."""
STEPS: Final = 600
TRACE: Final = 40
HEALING_ROUNDS: Final = 60


@dataclass(eq=False)
class Reign:
    """One election of a controller."""

    broker_id: int
    epoch: int
    is_writing: bool = False
    """A delta is on its way to the store: until it is there, nothing else is planned."""


@dataclass(eq=False)
class Batch:
    """What a producer sends, again and again until it has an answer."""

    number: int
    sequence: int
    data: bytes


@dataclass(eq=False)
class Producer:
    """An idempotent producer of one partition."""

    producer_id: int
    partition: int
    pending: list[Batch] = field(default_factory=list)
    next_number: int = 0
    next_sequence: int = 0
    acknowledged: int = 0

    @property
    def may_send_more(self) -> bool:
        if not self.pending:
            return True
        # A leader that knows nothing of a producer takes any sequence: the first batch goes alone.
        return self.acknowledged > 0 and self.next_number - self.pending[0].number < MAX_IN_FLIGHT

    def make_batch(self, count: int) -> Batch:
        values = [b"%d/%d" % (self.producer_id, self.next_sequence + place) for place in range(count)]
        data = encode_batch(
            [Record(place, NOW_MS, None, value) for place, value in enumerate(values)],
            producer_id=self.producer_id,
            producer_epoch=0,
            base_sequence=self.next_sequence,
        )
        batch = Batch(self.next_number, self.next_sequence, data)
        self.next_number += 1
        self.next_sequence += count
        self.pending.append(batch)
        return batch


class Store:
    """The metadata log and who is registered, as `metadata.store` promises it."""

    def __init__(self) -> None:
        self.images = [NOTHING]
        self.deltas: list[ChangeSet] = []
        self.members: dict[int, Member] = {}
        self.controller_epoch = 0
        self.reign: Reign | None = None
        self._broker_epochs = 100

    @property
    def image(self) -> ClusterImage:
        return self.images[-1]

    @property
    def membership(self) -> Membership:
        members = tuple(self.members[broker_id] for broker_id in sorted(self.members))
        return Membership(members, None if self.reign is None else self.reign.broker_id, self.controller_epoch)

    def register(self, registration: BrokerRegistration) -> int:
        self._broker_epochs += 1
        self.members[registration.broker_id] = Member(registration, self._broker_epochs)
        return self._broker_epochs

    def expire(self, broker_id: int) -> None:
        """A session ends: the registration goes, and the office."""
        self.members.pop(broker_id, None)
        if self.reign is not None and self.reign.broker_id == broker_id:
            self.reign = None

    def elect(self, broker_id: int) -> Reign:
        self.controller_epoch += 1
        self.reign = Reign(broker_id, self.controller_epoch)
        return self.reign

    def append(self, changes: ChangeSet, reign: Reign) -> None:
        if self.reign is not reign:
            raise Fenced(f"controller epoch {reign.epoch} is over")
        self.deltas.append(changes)
        self.images.append(self.image.apply(changes))


class SimCluster:
    """One run: steps, in the order that the seed says, and after each the check of what must hold."""

    assignment: tuple[tuple[int, ...], ...] = ASSIGNMENT

    def __init__(self, seed: int, flush_mode: FlushMode) -> None:
        self.random = chance = random.Random(seed)
        self.clock = ManualClock(NOW_MS)
        self.store = Store()
        self.counts: Counter[str] = Counter()
        """How often what happened: a run without it proves nothing."""
        self.trace: deque[tuple[object, ...]] = deque(maxlen=TRACE)
        self.late: list[tuple[Callable[[], None], tuple[object, ...]]] = []
        """What is still on its way."""
        self.reigns: dict[int, Reign] = {}
        """Who believes to be controller."""
        self.committed = self._promises()
        self._broken: BrokenPromise | None = None
        self._is_healed = False
        self._lost, self._late = chance.choice((0.0, 0.03, 0.1)), chance.choice((0.05, 0.2, 0.4))
        self._judged = 0
        self._touched: set[int] = set()
        """The partitions of which something has changed that a check looks at."""
        self._disks = 0
        settings = Settings(self.clock, chance, flush_mode, min_isr=chance.choice((1, 2)))
        self._config = settings.broker
        self._rules = elections.topic_rules(NOTHING, self._config)
        self._deaths = self._kinds_of_death(flush_mode)
        self.brokers = {
            each: SimBroker(each, settings, [self._new_disk(each), self._new_disk(each)]) for each in BROKERS
        }
        self.producers = [Producer(1000 + index, index % len(ASSIGNMENT)) for index in range(2 * len(ASSIGNMENT))]
        self._begin()
        acts, weights = zip(*self._steps(), strict=True)
        self._acts = iter(chance.choices(acts, weights, k=STEPS))

    def _promises(self) -> Sequence[Committed]:
        return [Committed(index) for index in range(len(self.assignment))]

    def some(self, weight: float) -> float:
        """A fault of this run: more of it, less, or none at all."""
        return weight * self.random.choice((0.0, 0.0, 0.5, 1.0, 3.0))

    def _steps(self) -> list[tuple[Callable[[], None], float]]:
        chance, some = self.random, self.some
        return [
            (self.produce, 20),
            (self.fetch, 40),
            (self.flush, 20),
            (self.hear, 25),
            (self.propose, 25),
            (self.reconcile, 10),
            (self.arrive, chance.choice((3, 10, 30))),
            (self.consume, 3),
            (self.come_back, 6),
            (self.register, 6),
            (self.unfence, 10),
            (self.elect, 8),
            (self.recover, 10),
            (self.wait, some(3)),
            (self.crash, some(1.5)),
            (self.crash_all, some(0.1)),
            (self.expire, some(1)),
            (self.fence, some(4)),
            (self.depose, some(1)),
            (self.rebalance, some(6)),
            (self.reassign, some(2)),
            (self.hand_over, some(3)),
            (self.replace_machine, some(0.7)),
            (self.lose_disk, some(6)),
            (self.lose_log, some(2)),
            (self.fail_disk, some(0.3)),
            (self.report, 12),
        ]

    def _kinds_of_death(self, flush_mode: FlushMode) -> tuple[Death, ...]:
        """In flush.mode=group nothing that was promised goes with the power; else that is told from a process's end."""
        if flush_mode is FlushMode.GROUP:
            return (Death.POWER, Death.POWER, Death.POWER, Death.PROCESS, Death.STOP)
        quiet = (Death.PROCESS, Death.PROCESS, Death.PROCESS, Death.STOP)
        return self.random.choice((quiet, quiet, (*quiet, Death.POWER)))

    def _begin(self) -> None:
        """Everybody is there, and everything is empty."""
        for broker in self.brokers.values():
            broker.on_mark = self.mark_moved
            broker.start()
            broker.registered(self.store.register(broker.registration()))
        reign = self.reigns[1] = self.store.elect(1)
        members = membership.registered(self.store.membership)
        self.store.append((ClusterCreated("c"), ControllerChanged(1, 1), *members), reign)
        choose = DirectoryChoice(self.store.image)
        partitions = tuple(
            PartitionState(each, each, each[0], directories=choose.for_replicas(each)) for each in self.assignment
        )
        self.store.append((TopicCreated(TOPIC, TOPIC_ID, partitions),), reign)
        for broker in self.brokers.values():
            self.catch_up(broker)

    def _new_disk(self, broker_id: int) -> Disk:
        self._disks += 1
        return Disk(f"disk-{broker_id}-{self._disks}")

    # --- running ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Everything that this seed has in store."""
        for act in self._acts:
            act()
            self.check()

    def some_broker(self, *, up: bool = True) -> SimBroker | None:
        """One that lives, or one that does not."""
        found = [broker for broker in self.brokers.values() if broker.is_up is up]
        return self.random.choice(found) if found else None

    def note(self, *words: object) -> None:
        self.trace.append(words)

    def story(self) -> str:
        """The last steps, oldest first."""
        return "\n".join(" ".join(map(str, words)) for words in self.trace)

    def post(self, arrive: Callable[[], None], *what: object) -> None:
        """Send something: it arrives now, later, twice, or never."""
        fate = 1.0 if self._is_healed else self.random.random()
        if fate < self._lost:
            self.note("lost:", *what)
        elif fate < self._lost + self._late:
            self.note("late:", *what)
            self.late.append((arrive, what))
            if fate < self._lost + self._late / 4:
                self.late.append((arrive, what))
        else:
            arrive()

    def arrive(self) -> None:
        if self.late:
            arrive, what = self.late.pop(self.random.randrange(len(self.late)))
            self.note("arrives:", *what)
            arrive()

    def wait(self) -> None:
        self.clock.advance(self.random.choice((1.0, 5.5, 11.0)))
        self.note("time", self.clock.monotonic())

    # --- clients ------------------------------------------------------------------------------------------------------

    def leader_heard_of_by(self, broker: SimBroker, index: int) -> SimBroker | None:
        state = broker.image.partition(TOPIC_ID, index)
        return None if state is None or state.leader == NO_BROKER else self.brokers[state.leader]

    def produce(self) -> None:
        """A producer sends what has no answer yet, in order, to whom a broker takes for the leader."""
        producer, told_by = self.random.choice(self.producers), self.some_broker()
        if told_by is not None:
            if producer.may_send_more:
                producer.make_batch(self.random.randint(1, 2))
            self._produce(producer, told_by)

    def _produce(self, producer: Producer, told_by: SimBroker) -> None:
        at = self.leader_heard_of_by(told_by, producer.partition)
        if at is None:
            return
        batches = producer.pending[:]
        if self.random.random() < 0.1:  # the connection breaks
            del batches[self.random.randrange(len(batches)) + 1 :]

        def receive() -> None:
            for batch in batches:
                self._append(at, producer, batch)

        self.post(receive, "produce", producer.producer_id, [batch.sequence for batch in batches], "to", at)

    def _append(self, at: SimBroker, producer: Producer, batch: Batch) -> None:
        partition = at.replicas.get(producer.partition)
        if not at.is_up or partition is None or not partition.is_leader:
            return
        try:
            partition.check_in_sync()
            appended = partition.append(batch.data)
        except MillraceError as error:
            self.counts[code_of(error).name] += 1
            return
        self.note(at, "appends", producer.producer_id, batch.sequence, "at", producer.partition, appended.base_offset)
        self.counts["duplicate" if appended.duplicate else "append"] += 1

        def committed(error: Exception | None) -> None:
            if error is None:
                self.mark_moved(at, partition)  # its watchers are told only after those who wait
                with self._noting():
                    self.committed[producer.partition].check_acknowledged(
                        producer.producer_id, batch.sequence, appended.base_offset
                    )
                self.post(lambda: self._acknowledged(producer, batch), "ack", producer.producer_id, batch.sequence)

        if not partition.when_committed(appended.last_offset, committed):
            committed(None)

    def _acknowledged(self, producer: Producer, batch: Batch) -> None:
        if batch in producer.pending:
            producer.pending.remove(batch)
            producer.acknowledged += 1
            self.counts["ack"] += 1

    def consume(self) -> None:
        """A client asks the leader of the day how far its partitions are committed."""
        at = self.some_broker()
        for index, partition in () if at is None else at.replicas.items():
            state = self.store.image.partition(TOPIC_ID, index)
            if not partition.is_leader or state is None or partition.leader_epoch != state.leader_epoch:
                continue
            try:
                mark = partition.latest_offset()
            except MillraceError:
                continue
            self.committed[index].check_seen(mark)
            self.read(partition)

    def read(self, partition: Partition) -> None:
        """What a consumer of the leader of the day sees, beyond that: a matter of transactions."""

    # --- replication --------------------------------------------------------------------------------------------------

    def fetch(self) -> None:
        """A broker asks its leaders for more of everything that it follows."""
        to = self.some_broker()
        if to is not None:
            self._fetch(to)

    def _fetch(self, to: SimBroker) -> None:
        for index in sorted(to.followed):
            fetch = to.next_fetch(index)
            if fetch is not None:
                self.post(partial(self._serve, self.brokers[to.replicas[index].state.leader], to, fetch), fetch)

    def _serve(self, at: SimBroker, to: SimBroker, fetch: Fetch) -> None:
        partition = at.replicas.get(fetch.partition)
        if not at.is_up or partition is None or not partition.is_leader or is_of_an_earlier_start(at.image, fetch):
            return
        answer = FetchResponse.PartitionData(partition_index=fetch.partition)
        try:
            partition.check_leader_epoch(fetch.leader_epoch)
            read = partition.serve_follower(
                fetch.follower, fetch.broker_epoch, fetch.offset, fetch.last_epoch, 300, at_least_one=True
            )
        except MillraceError as error:
            self.counts[code_of(error).name] += 1
            if code_of(error) is not ErrorCode.OFFSET_OUT_OF_RANGE:
                return
            answer.error_code = ErrorCode.OFFSET_OUT_OF_RANGE
        else:
            if isinstance(read, ReadResult):
                answer.records = bytes(read.data)
            else:
                answer.diverging_epoch = FetchResponse.EpochEndOffset(epoch=read[0], end_offset=read[1])
                self.counts["divergence"] += 1
        answer.high_watermark = partition.high_watermark.offset
        answer.log_start_offset = partition.log.start_offset

        def take() -> None:
            to.take(fetch, answer)
            self._touched.add(fetch.partition)

        self.post(take, "answer to", fetch)

    def flush(self) -> None:
        """A sync begins and ends; now and then something happens in between."""
        at = self.some_broker()
        if at is not None:
            self._flush(at)

    def _flush(self, at: SimBroker) -> None:
        for index in list(at.replicas):
            log = at.replicas[index].open_log
            ticket = None if index in at.flushing or log is None or log.failure else log.begin_flush()
            if ticket is not None:
                at.flushing[index] = ticket
                if self._is_healed or self.random.random() < 0.9:
                    at.synced(index, ticket)
                else:
                    self.late.append((partial(at.synced, index, ticket), ("flush of", index, "on", at)))

    # --- asking the controller ----------------------------------------------------------------------------------------

    def propose(self) -> None:
        """The task that asks for ISRs goes on, or gives up waiting for its answer."""
        at = self.some_broker()
        if at is not None:
            self._propose(at)

    def _propose(self, at: SimBroker) -> None:
        if at.has_roles:
            if at.proposer.request is None:
                for partition in at.replicas.values():
                    if partition.is_leader and self.random.random() < 0.7:
                        at.proposer.proposals.consider(partition)
            self._ask(at, at.proposer)

    def report(self) -> None:
        """The task that tells of disks goes on, or gives up waiting for its answer."""
        at = self.some_broker()
        if at is not None and at.has_roles:
            self._ask(at, at.reporter)

    def _ask(self, at: SimBroker, task: Proposer | Reporter) -> None:
        if task.request is not None:
            if self.random.random() < 0.3:
                task.fail()
            return
        request = task.go_on()
        if request is None:
            return
        chief, epoch = self.brokers.get(at.image.controller_id), at.epoch

        def answer(results: Any) -> None:
            def receive() -> None:
                if task.request is request:
                    if results is None:
                        task.fail()
                    else:
                        task.answer(results)

            self.post(receive, "answer for", at, results)

        def plan(image: ClusterImage) -> Plan[Any]:
            controller._check_epoch(image, at.broker_id, epoch)
            return self._plan(image, at.broker_id, request)

        self.post(lambda: self.change(chief, f"request of {at}", plan, answer), at, "asks for", request)

    def _plan(self, image: ClusterImage, broker_id: int, request: object) -> Plan[Any]:
        """As the controller does for AlterPartition, BrokerHeartbeat and AssignReplicasToDirs."""
        if isinstance(request, Directories):
            plan = elections.plan_directories(image, broker_id, request, rules_of=self._rules)
            return Plan(ErrorCode.NONE, plan.changes)
        assert isinstance(request, list)
        if isinstance(request[0], Placement):
            return elections.plan_placements(image, broker_id, request, rules_of=self._rules)
        judged = elections.plan_isr(image, broker_id, request, complete=reassignments.completed, rules_of=self._rules)
        return Plan([outcome.error for outcome in judged.results], judged.changes)

    # --- the controller -----------------------------------------------------------------------------------------------

    def change(
        self,
        chief: SimBroker | None,
        why: str,
        plan: Callable[[ClusterImage], Plan[Any]],
        then: Callable[[Any], None] = lambda _: None,
    ) -> None:
        """Have a broker that believes to be controller plan and write; `then` gets the results, None for an error."""
        reign = None if chief is None else self.reigns.get(chief.broker_id)
        if chief is None or reign is None or reign.is_writing or not chief.is_up:
            then(None)
            return
        try:
            planned = plan(chief.image)
        except ApiError as error:
            self.counts[error.code.name] += 1
            then(None)
            return
        if not planned.changes:
            then(planned.results)
            return
        reign.is_writing = True

        def write() -> None:
            reign.is_writing = False
            then(planned.results if self._write(chief, reign, why, planned.changes) else None)

        if self._is_healed or self.random.random() < 0.9:
            write()
        else:
            self.note("late:", why, "by", chief, planned.changes)
            self.late.append((write, ("delta of", chief, "for", why)))

    def _write(self, chief: SimBroker, reign: Reign, why: str, changes: ChangeSet) -> bool:
        try:
            self.store.append(changes, reign)
        except Fenced:
            self.counts["fenced"] += 1
            self.note("fenced:", why, "by", chief)
            if self.reigns.get(chief.broker_id) is reign:
                del self.reigns[chief.broker_id]
            return False
        self.counts["delta"] += 1
        self.note("delta", len(self.store.deltas), why, "by", chief, changes)
        if chief.is_up:
            self.catch_up(chief)
        return True

    def _chief(self) -> SimBroker | None:
        """Somebody who believes to be controller."""
        return self.brokers[self.random.choice(list(self.reigns))] if self.reigns else None

    def elect(self) -> None:
        """The office is free, or its holder does not answer: a broker takes it."""
        if self.store.reign is None or not self.brokers[self.store.reign.broker_id].is_up:
            self.depose()

    def depose(self) -> None:
        """A broker takes the office, perhaps from a controller that lives and does not know it yet."""
        at = self.some_broker()
        member = None if at is None else self.store.members.get(at.broker_id)
        if at is None or member is None or member.broker_epoch != at.epoch:
            return
        reign = self.reigns[at.broker_id] = self.store.elect(at.broker_id)
        self.counts["reign"] += 1
        self.catch_up(at)
        dead = {
            each.registration.broker_id: each.broker_epoch
            for each in self.store.members.values()
            if not self.brokers[each.registration.broker_id].is_up and self.random.random() < 0.7
        }

        def plan(image: ClusterImage) -> Plan[None]:
            changes = membership.first_changes(
                image,
                self._config,
                self.store.membership,
                controller_epoch=reign.epoch,
                broker_id=at.broker_id,
                dead=dead,
            )
            return Plan(None, tuple(changes))

        self.change(at, f"reign {reign.epoch}", plan)

    def reconcile(self) -> None:
        """The controller brings the image in line with the registrations."""
        members = membership.registered(self.store.membership)
        self.change(
            self._chief(), "registrations", partial(elections.plan_registrations, members=members, rules_of=self._rules)
        )

    def fence(self) -> None:
        """The controller gives a broker up, dead or not."""
        self._fence(self.brokers[self.random.choice(BROKERS)])

    def _fence(self, at: SimBroker) -> None:
        known = self.store.image.brokers[at.broker_id]
        fence = {at.broker_id: known.broker_epoch}
        self.change(self._chief(), f"{at} given up", partial(elections.plan_brokers, fence=fence, rules_of=self._rules))

    def unfence(self) -> None:
        """The controller hears of a broker again."""
        at = self.some_broker()
        if at is not None:
            self._unfence(at)

    def _unfence(self, at: SimBroker) -> None:
        if at.broker_id in self.store.members:
            alive = {at.broker_id: at.epoch}
            self.change(
                self._chief(), f"{at} heard of", partial(elections.plan_brokers, unfence=alive, rules_of=self._rules)
            )

    def recover(self) -> None:
        """The controller asks what the replicas of partitions without a leader have, and elects by the answers."""
        self._recover(self.random.choice((0.0, recovery.PATIENCE_S)), answers=0.8)

    def _recover(self, waited_s: float, answers: float) -> None:
        orphans = [index for index in range(len(self.assignment)) if self.state_of(index).leader < 0]
        if not orphans:
            return
        survey = Survey()
        for at in self.brokers.values():
            if at.is_up and at.has_roles and self.random.random() < answers:
                survey.epochs[at.broker_id] = at.epoch
                for index in orphans:
                    survey.ends.setdefault((TOPIC_ID, index), {})[at.broker_id] = _log_end(at, index)
        since = dict.fromkeys(survey.ends, 0.0)

        def plan(image: ClusterImage) -> Plan[int]:
            return recovery.plan_recovery(image, survey.ends_in(image), since, waited_s, self._rules)

        self.post(lambda: self.change(self._chief(), "recovery", plan), "answers of", tuple(survey.epochs))

    def rebalance(self) -> None:
        self.change(self._chief(), "preferred leaders", elections.plan_rebalance)

    def hand_over(self) -> None:
        """A person has another member of an ISR lead, and the controller may give that one up before long."""
        index = self.random.randrange(len(self.assignment))
        state = self.state_of(index)
        others = [member for member in state.isr if member != state.leader]
        if not others or state.is_reassigning:
            return
        heir = self.random.choice(others)
        item = Reassignment(TOPIC, index, (heir, *(each for each in state.replicas if each != heir)))
        self.change(self._chief(), f"{item}", partial(reassignments.plan_reassignments, items=[item]))
        self.rebalance()
        if self.random.random() < 0.7:
            self.late.append((partial(self._fence, self.brokers[heir]), (self.brokers[heir], "is missed")))

    def reassign(self) -> None:
        """A person moves a partition to other brokers, or takes a move back."""
        index = self.random.randrange(len(self.assignment))
        target: tuple[int, ...] | None = None
        kind = self.random.random()
        if kind < 0.3:  # the same brokers, and another preferred leader
            target = tuple(self.random.sample(self.state_of(index).replicas, len(self.state_of(index).replicas)))
        elif kind < 0.8:
            target = tuple(self.random.sample(BROKERS, self.random.choice((2, 3, 3, 3))))
        item = Reassignment(TOPIC, index, target)
        self.change(
            self._chief(), f"{item}", partial(reassignments.plan_reassignments, items=[item], rules_of=self._rules)
        )

    # --- brokers ------------------------------------------------------------------------------------------------------

    def hear(self) -> None:
        at = self.some_broker()
        if at is not None:
            self.catch_up(at, self.random.randint(1, 3))

    def catch_up(self, broker: SimBroker, at_most: int = 1 << 30) -> None:
        """Have a broker hear of the next deltas."""
        store = self.store
        while broker.image.index < len(store.deltas) and at_most > 0:
            at_most -= 1
            index = broker.image.index
            broker.learn(store.images[index + 1], store.deltas[index])
            self._touched.update(range(len(self.committed)))
            reign = self.reigns.get(broker.broker_id)
            if reign is not None and broker.image.controller_epoch > reign.epoch:
                del self.reigns[broker.broker_id]

    def crash(self) -> None:
        at = self.some_broker()
        if at is not None:
            self._crash(at)

    def crash_all(self) -> None:
        for broker in self.brokers.values():
            if broker.is_up:
                self._crash(broker)

    def _crash(self, at: SimBroker) -> None:
        death = self.random.choice(self._deaths)
        self.note(at, death.value)
        self.counts["crash"] += 1
        at.die(death)
        self.reigns.pop(at.broker_id, None)
        if self.random.random() < 0.7:  # its session ends, sooner or later
            epoch = at.epoch
            self.late.append((lambda: self._end_session(at.broker_id, epoch), ("end of the session of", at)))

    def _end_session(self, broker_id: int, epoch: int) -> None:
        member = self.store.members.get(broker_id)
        if member is not None and member.broker_epoch == epoch:
            self.store.expire(broker_id)

    def expire(self) -> None:
        """The session of a live broker ends: it has to register again, and its office is gone."""
        at = self.some_broker()
        if at is not None and at.broker_id in self.store.members:
            self.note("the session of", at, "ends")
            self.store.expire(at.broker_id)

    def register(self) -> None:
        """A live broker whose session has ended begins a new one."""
        at = self.some_broker()
        if at is not None:
            self._register(at)

    def _register(self, at: SimBroker) -> None:
        if at.broker_id not in self.store.members:
            self.reigns.pop(at.broker_id, None)
            at.registered(self.store.register(at.registration()))
            self.note(at, "registers again, epoch", at.epoch)

    def come_back(self) -> None:
        at = self.some_broker(up=False)
        if at is not None:
            self._come_back(at)

    def _come_back(self, at: SimBroker) -> None:
        at.start()
        at.registered(self.store.register(at.registration()))
        self.note(at, "is back, epoch", at.epoch)
        self.catch_up(at)

    def replace_machine(self) -> None:
        """A broker dies and is back at once, with empty disks."""
        at = self.some_broker()
        if at is not None:
            self._crash(at)
            at.shelf[:] = [self._new_disk(at.broker_id) for _ in at.shelf]
            self.counts["lost disk"] += len(at.shelf)
            self._come_back(at)

    def lose_disk(self) -> None:
        """A disk of a dead broker is replaced by an empty one, or is not there for a while."""
        at = self.some_broker(up=False)
        if at is None:
            return
        place = self.random.randrange(len(at.shelf))
        disk = at.shelf[place]
        if self.random.random() < 0.5:
            at.shelf[place] = self._new_disk(at.broker_id)
            self.counts["lost disk"] += 1
            self.note(at, "has a new disk for", disk.directory_id)
        elif not disk.is_attached:
            disk.is_attached = True
            self.counts["returned disk"] += 1
            self.note(at, "has", disk.directory_id, "again")
        elif sum(each.is_attached for each in at.shelf) > 1:
            disk.is_attached = False
            self.note(at, "is without", disk.directory_id)

    def lose_log(self) -> None:
        """A log on a disk of a dead broker is damaged, or is gone."""
        at = self.some_broker(up=False)
        disk = None if at is None else self.random.choice(at.shelf)
        known = [] if disk is None else sorted(disk.states.keys() & disk.expected)
        if disk is None or not known:
            return
        index = self.random.choice(known)
        if self.random.random() < 0.5:
            disk.forget(index)
        elif not disk.damage(index):
            return
        self.counts["lost log"] += 1
        self.note(disk.directory_id, "loses the log of", index)

    def fail_disk(self) -> None:
        """A disk of a live broker fails, and stays away until the broker is started again."""
        at = self.some_broker()
        if at is None or len(at.disks.online) < 2:
            return
        disk = self.random.choice([each for each in at.disks.attached if each not in at.disks.failed])
        self.counts["failed disk"] += 1
        self.note(at, "cannot use", disk.directory_id, "any more")
        at.fail(disk)

    # --- the end ------------------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Everything still on its way arrives, then nothing fails any more: soon all must be well."""
        while self.late:
            self.arrive()
            self.check()
        self._is_healed = True
        for at in self.brokers.values():
            for disk in at.shelf:
                disk.is_attached = True
            if at.is_up and at.disks.described.some_offline:
                at.die(Death.STOP)
        for _ in range(HEALING_ROUNDS):
            self._heal_a_little()
            self.check()
            if self._is_well():
                return
        raise BrokenPromise(f"(h) not well after {HEALING_ROUNDS} rounds: {self.store.image.topics[TOPIC].partitions}")

    def _heal_a_little(self) -> None:
        while self.some_broker(up=False) is not None:
            self.come_back()
        for at in self.brokers.values():
            self._register(at)
        if self.store.reign is None or self.store.reign is not self.reigns.get(self.store.reign.broker_id):
            self.depose()
        self.reconcile()
        for at in self.brokers.values():
            self._unfence(at)
        for at in self.brokers.values():
            self.catch_up(at)
            self._flush(at)
        self._recover(recovery.PATIENCE_S, answers=1.0)
        for at in self.brokers.values():
            self._fetch(at)
            for task in (at.proposer, at.reporter):
                if task.request is not None:
                    task.fail()
            self._propose(at)
            self._ask(at, at.reporter)
        for producer in self.producers:
            if producer.pending:
                self._produce(producer, self.brokers[1])

    def offline(self) -> set[int]:
        """The partitions that nobody is left of."""
        return {each.index for each in self.committed if self._is_rightly_offline(self.state_of(each.index))}

    def _is_well(self) -> bool:
        offline = self.offline()
        if any(producer.pending for producer in self.producers if producer.partition not in offline):
            return False
        for committed in self.committed:
            state = self.state_of(committed.index)
            if committed.index in offline:
                continue
            if state.is_reassigning or set(state.isr) != set(state.replicas):
                return False
            for broker_id in state.replicas:
                partition = self.brokers[broker_id].replicas.get(committed.index)
                log = None if partition is None else partition.open_log
                if log is None or log.end_offset != committed.end:
                    return False
        self.counts["offline"] += len(offline)
        return True

    def _is_rightly_offline(self, state: PartitionState) -> bool:
        """Whether nobody is left who may have everything: only a person can decide what to do then."""
        image = self.store.image
        return state.leader == NO_BROKER and not any(image.is_present(state, each) for each in (*state.isr, *state.elr))

    def state_of(self, index: int) -> PartitionState:
        """As the newest delta has it."""
        return self.store.image.topics[TOPIC].partitions[index]

    # --- what must hold -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        if self._broken is not None:
            raise self._broken
        self._judge_deltas()
        if not self._touched:
            return
        image = self.store.image
        for index in self._touched:
            committed, state = self.committed[index], image.topics[TOPIC].partitions[index]
            for broker in self.brokers.values():
                partition = broker.replicas.get(index)
                if partition is None:
                    continue
                counts = broker.broker_id in (*state.isr, *state.elr) and image.is_present(state, broker.broker_id)
                upto = committed.end if counts else min(partition.high_watermark.offset, committed.end)
                committed.check_holds(broker, partition, upto)
        self._touched.clear()

    def _judge_deltas(self) -> None:
        store = self.store
        while self._judged < len(store.deltas):
            before, after = store.images[self._judged : self._judged + 2]
            for change in store.deltas[self._judged]:
                if isinstance(change, PartitionChanged):
                    old, new = (image.partition(TOPIC_ID, change.index) for image in (before, after))
                    assert old is not None and new is not None
                    check_change(old, new)
                    self._touched.add(change.index)
                    self.committed[change.index].check_leader(new, after)
                    self.counts["leader"] += new.leader_epoch - old.leader_epoch
                    self.counts["moved"] += old.is_reassigning and not new.is_reassigning
            self._judged += 1

    def mark_moved(self, broker: SimBroker, partition: Partition) -> None:
        """Whatever a leader takes for committed is so from now on; a follower knows of nothing else."""
        committed = self.committed[partition.index]
        if partition.high_watermark.offset > committed.end:
            with self._noting():
                if not partition.is_leader:
                    raise BrokenPromise(f"(b) {broker} follows {partition!r}, of which {committed.end} is committed")
                committed.extend(partition.log, partition.high_watermark.offset)
                self._touched.add(partition.index)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Around checks within a broker's own calls, where an exception would be logged and the broker go on."""
        try:
            yield
        except BrokenPromise as broken:
            self._broken = self._broken or broken
            raise


def _log_end(at: SimBroker, index: int) -> LogEnd | None:
    """What a broker answers to GetReplicaLogInfo; None where its log is of no use."""
    try:
        epoch, end, _ = at.all_replicas.log_end(TOPIC_ID, index)
        return LogEnd(epoch, end)
    except ApiError:
        return None


def simulate(seed: int, flush_mode: FlushMode, kind: type[SimCluster] = SimCluster) -> Counter[str]:
    """One run from its beginning until all is well again; returns what happened how often.

    Raises `BrokenPromise` where something does not hold, with the last steps before that.
    """
    run = kind(seed, flush_mode)
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # what brokers say of a thousand deaths is of no use here
    try:
        run.run()
        run.heal()
    except Exception as error:
        text = f"{error!r}\n{kind.__name__}, seed {seed}, flush.mode={flush_mode.value}, after\n{run.story()}"
        raise BrokenPromise(text) from error
    finally:
        logging.disable(disabled)
    return run.counts


def is_of_an_earlier_start(image: ClusterImage, fetch: Fetch) -> bool:
    """Whether a fetch comes from an incarnation that the image knows to be over, as `handlers.fetch` has it."""
    known = image.brokers.get(fetch.follower)
    return known is None or fetch.broker_epoch < known.broker_epoch
