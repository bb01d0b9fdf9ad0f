"""A model of the transaction coordinator: producers that share ids, messages that come late, and coordinators that die.

Every history runs against the coordinator on a log in memory. Producers do what clients do (begin, add partitions, end,
begin again after an error), repeat requests whose answers they lost, and send ones that they should not: with epochs
that are over, or kept back and released in a later transaction. Writes become durable when the model says so, so that
a failover falls between any two steps. The model knows only what producers were told and what partitions were marked.

What must hold:

- a replay of the log gives the live state, at any time;
- a transaction has one outcome: no partition has two different markers of the same producer id and epoch, and what a
  producer was told is what its partitions were told;
- producer id and epoch of a transactional id never go back, and nobody is given one that another one had;
- whoever was fenced changes nothing;
- in the end every decided transaction is complete, and all its partitions are marked.

`PLANTED` are bugs, each of which the model finds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from millrace.errors import ApiError, ErrorCode
from millrace.model import TopicPartition
from millrace.records.decode import iter_records
from millrace.replication.state_topic import yield_to_loop
from millrace.transactions import records, state
from millrace.transactions.markers import TransactionMarker
from millrace.transactions.settings import TransactionSettings
from millrace.transactions.shard import TransactionShard
from millrace.transactions.state import NOBODY, Decision, Producer, Transaction, TransactionState
from support.transactions import A, B, Bench, C, FakeMarkers

IDS = ("x", "y")
PARTITIONS = (A, B, C)
CLIENTS = st.integers(0, 2)
TIMEOUT_MS = 30_000
LAST_EPOCH = 5
MODEL = settings(
    max_examples=50, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)
HEALED = frozenset({TransactionState.EMPTY, TransactionState.COMPLETE_COMMIT, TransactionState.COMPLETE_ABORT})


@lru_cache(maxsize=10_000)
def read_batch(batch: bytes) -> list[tuple[str, Transaction | None]]:
    found = [records.read_record(bytes(each.key or b""), each.value) for each in iter_records(batch)]
    return [each for each in found if each is not None]


async def run_ready() -> None:
    for _ in range(12):
        await yield_to_loop()


@dataclass(eq=False)
class Client:
    """One producer: who it believes to be, and what it waits for."""

    transactional_id: str
    version: int
    producer: Producer = NOBODY
    partitions: set[TopicPartition] = field(default_factory=set)
    """Those it knows to be part of its transaction."""
    pending: asyncio.Future[Any] | None = None
    answered: Callable[[Any], None] | None = None
    is_fenced: bool = False
    wants: bool | None = None
    """How it wants its transaction to end, once it has said so; that does not change."""


class Transactions(RuleBasedStateMachine):
    @initialize(commit_at_once=st.booleans(), versions=st.lists(st.sampled_from([0, 2]), min_size=3, max_size=3))
    def start(self, commit_at_once: bool, versions: list[int]) -> None:
        self.loop = asyncio.new_event_loop()
        self.commit_at_once = commit_at_once
        self.clients = [Client(IDS[index % len(IDS)], version) for index, version in enumerate(versions)]
        self.late: list[tuple[Callable[[], Coroutine[Any, Any, Any]], asyncio.Future[Any] | None]] = []
        self.given: dict[Producer, Client] = {}
        """Who was told to be which producer."""
        self.highest: dict[str, Producer] = {}
        self.told: dict[tuple[int, int], bool] = {}
        """Outcomes of which a producer was told, by the id and epoch of the marker."""
        self.decided: dict[tuple[Producer, int], frozenset[TopicPartition]] = {}
        """Partitions of every transaction that has an outcome, by the same and by when it began."""
        self.run(self._start())

    async def _start(self) -> None:
        self.bench = Bench(TransactionSettings(last_epoch=LAST_EPOCH), commit_at_once=self.commit_at_once)
        await self.bench.lead()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        try:
            self.run(self._heal())
        finally:
            self.run(self.bench.coordinator.stop())
            for _, pending in self.late:
                if pending is not None:
                    pending.cancel()
            self.run(run_ready())
            self.loop.close()

    # --- producers ----------------------------------------------------------------------------------------------------

    def ask(
        self,
        client: Client,
        work: Callable[[], Coroutine[Any, Any, Any]],
        answered: Callable[[Any], None],
        *,
        is_lost: bool = False,
    ) -> None:
        """Send a request; the client goes on when it is answered, unless the answer is lost."""

        async def send() -> None:
            self.bench.clock.advance(0.001)  # so that no two transactions begin at the same time
            future = asyncio.ensure_future(work())
            await run_ready()
            if is_lost:
                self.late.append((work, future))
                return
            client.pending, client.answered = future, answered

        self.run(send())
        self.collect()

    def collect(self) -> None:
        """Hear the answers that have come."""
        for client in self.clients:
            pending, answered = client.pending, client.answered
            if pending is not None and pending.done():
                client.pending = client.answered = None
                error = pending.exception()
                if error is None:
                    assert answered is not None
                    answered(pending.result())
                else:
                    assert isinstance(error, ApiError), error
                    self.refused(client, error.code)

    def refused(self, client: Client, code: ErrorCode) -> None:
        if code in {ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_ID_MAPPING}:
            client.is_fenced = True
        elif code is ErrorCode.INVALID_TXN_STATE:
            # Its transaction was aborted by somebody else, as far as it can tell.
            client.partitions.clear()
            client.wants = None
            client.is_fenced = True
        else:
            assert code in {
                ErrorCode.CONCURRENT_TRANSACTIONS,
                ErrorCode.NOT_COORDINATOR,
                ErrorCode.COORDINATOR_NOT_AVAILABLE,
                ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
            }, code

    def idle(self, index: int) -> Client | None:
        client = self.clients[index]
        return client if client.pending is None else None

    @rule(
        index=CLIENTS,
        steps=st.integers(1, 5),
        partition=st.sampled_from(PARTITIONS),
        commits=st.booleans(),
        is_lost=st.sampled_from([False, False, False, True]),
    )
    def work(self, index: int, steps: int, partition: TopicPartition, commits: bool, is_lost: bool) -> None:
        """What a client does one after the other; the answer to the last request may be lost."""
        for step in range(steps):
            client, loses = self.clients[index], is_lost and step == steps - 1
            if client.producer == NOBODY or client.is_fenced:
                self.begin(index, goes_on=False, is_lost=loses)
            elif client.wants is None and partition not in client.partitions:
                self.add(index, partition, is_lost=loses)
            else:
                self.end(index, commits, is_lost=loses)

    @rule(index=CLIENTS, goes_on=st.booleans())
    def take_over(self, index: int, goes_on: bool) -> None:
        """InitProducerId out of turn."""
        self.begin(index, goes_on=goes_on, is_lost=False)

    def begin(self, index: int, goes_on: bool, is_lost: bool) -> None:
        """InitProducerId, as a new producer or (KIP-360) as the one it was."""
        client = self.idle(index)
        if client is None:
            return
        expected = client.producer if goes_on and client.producer != NOBODY and not client.is_fenced else None

        def work() -> Coroutine[Any, Any, Producer]:
            return self.bench.coordinator.init_producer_id(client.transactional_id, TIMEOUT_MS, expected)

        def answered(producer: Producer) -> None:
            owner = self.given.setdefault(producer, client)
            assert owner is client, f"{producer} was given to two producers"
            client.producer, client.is_fenced, client.wants = producer, False, None
            client.partitions.clear()

        self.ask(client, work, answered, is_lost=is_lost)

    def add(self, index: int, partition: TopicPartition, is_lost: bool) -> None:
        client = self.idle(index)
        if client is None or client.producer == NOBODY or client.wants is not None:
            return
        producer = client.producer

        def work() -> Coroutine[Any, Any, None]:
            return self.bench.coordinator.add_partitions(
                client.transactional_id, producer, [partition], version=client.version
            )

        self.ask(client, work, lambda _: client.partitions.add(partition), is_lost=is_lost)

    def end(self, index: int, commits: bool, is_lost: bool) -> None:
        """EndTxn; said again with the same outcome until it is answered."""
        client = self.idle(index)
        if client is None or client.producer == NOBODY or not (client.partitions or client.wants is not None):
            return
        if client.wants is None:
            client.wants = commits
        outcome, producer = client.wants, client.producer

        def work() -> Coroutine[Any, Any, Producer]:
            return self.bench.coordinator.end(
                client.transactional_id, producer, commits=outcome, version=client.version
            )

        def answered(after: Producer) -> None:
            if client.version == 2:
                owner = self.given.setdefault(after, client)
                assert owner is client, f"{after} was given to two producers"
                assert after > producer, f"{producer} ended a transaction and was not given a later epoch"
                self.tell(producer.producer_id, producer.epoch + 1, outcome)
                client.producer = after
            client.partitions.clear()
            client.wants = None

        self.ask(client, work, answered, is_lost=is_lost)

    def tell(self, producer_id: int, epoch: int, commits: bool) -> None:
        assert self.told.setdefault((producer_id, epoch), commits) is commits, "told two outcomes"

    # --- what fails ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def arrive_late(self, data: st.DataObject) -> None:
        """A request comes a second time, when everything may be different. A fenced producer's changes nothing."""
        work, _ = self.late[data.draw(st.integers(0, len(self.late) - 1))]

        async def send() -> None:
            self.late.append((work, asyncio.ensure_future(work())))
            await run_ready()

        self.run(send())
        self.collect()

    @rule(
        index=CLIENTS,
        kind=st.sampled_from(["add", "commit", "abort", "init"]),
        version=st.sampled_from([0, 2]),
        older=st.integers(2, 4),
    )
    def attack(self, index: int, kind: str, version: int, older: int) -> None:
        """A producer that was fenced long ago (its epoch is not the one before the current) changes nothing."""
        client = self.clients[index]
        name = client.transactional_id
        current = self.live().get(name)
        if current is None or name in self.changing():
            return
        zombie = Producer(current.producer_id, current.producer_epoch - older)
        if zombie.epoch < 0:
            return
        coordinator = self.bench.coordinator

        async def send() -> None:
            try:
                if kind == "add":
                    await coordinator.add_partitions(name, zombie, [A], version=version)
                elif kind == "init":
                    await coordinator.init_producer_id(name, TIMEOUT_MS, zombie)
                else:
                    await coordinator.end(name, zombie, commits=kind == "commit", version=version)
            except ApiError:
                return
            raise AssertionError(f"{zombie} was not refused")

        end_offset = self.bench.fake[0].log.end_offset
        self.run(send())
        assert self.bench.fake[0].log.end_offset == end_offset
        assert self.live().get(name) == current

    @rule(count=st.integers(1, 3))
    def commit(self, count: int) -> None:
        """Some of what was appended becomes durable."""
        partition = self.bench.fake[0]
        offset = min(partition.high_watermark.offset + count, partition.log.end_offset)

        async def advance() -> None:
            partition.commit(offset)
            await run_ready()

        self.run(advance())
        self.collect()

    @rule(is_open=st.booleans())
    def markers(self, is_open: bool) -> None:
        """Partitions can be reached, or cannot."""

        async def change() -> None:
            (self.bench.markers.open.set if is_open else self.bench.markers.open.clear)()
            await run_ready()

        self.run(change())
        self.collect()

    @rule(seconds=st.sampled_from([1, 4, 11, 45]))
    def wait(self, seconds: int) -> None:
        self.run(self.bench.advance(seconds))
        self.collect()

    @rule(loses=st.booleans())
    def fail_over(self, loses: bool) -> None:
        """The coordinator dies. What was not durable is lost, or turns out to be."""
        partition = self.bench.fake[0]

        async def change() -> None:
            await self.bench.coordinator.stop()
            durable = partition.high_watermark.offset
            if loses:
                partition.log.stored = [each for each in partition.log.stored if each[0] < durable]
                partition.log.end_offset = durable
            else:
                partition.commit()
            partition.leader_epoch += 1
            self.bench.coordinator = self.bench.make()
            await self.bench.lead()
            await run_ready()

        self.run(change())
        self.collect()

    # --- what must hold -----------------------------------------------------------------------------------------------

    def live(self) -> dict[str, Transaction]:
        return self.bench.states()

    def changing(self) -> Collection[str]:
        return [each for shard in self.bench.coordinator._shards.values() for each in shard._changing]

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "bench"):
            return
        live = self.live()
        assert live == self.replayed(), "a replay gives another state"
        for name, found in live.items():
            last = self.highest.get(name, NOBODY)
            assert last <= found.producer, f"{name} went back from {last} to {found.producer}"
            self.highest[name] = found.producer
            assert found.producer_epoch <= LAST_EPOCH
            if found.state in {TransactionState.ONGOING, TransactionState.PREPARE_COMMIT}:
                assert found.partitions
        outcomes: dict[tuple[int, int], bool] = {}
        for marker, _ in self.bench.markers.written:
            of_marker = (marker.producer_id, marker.producer_epoch)
            if marker.transaction_version == 2:
                assert outcomes.setdefault(of_marker, marker.commits) is marker.commits, f"{of_marker}: two outcomes"
                assert self.told.get(of_marker, marker.commits) is marker.commits, f"{of_marker}: told another outcome"

    def replayed(self) -> dict[str, Transaction]:
        """What a coordinator would find in the part of the log that is durable."""
        partition = self.bench.fake[0]
        found: dict[str, Transaction] = {}
        for base, batch in partition.log.stored:
            if base < partition.high_watermark.offset:
                for name, transaction in read_batch(batch):
                    self.check_step(found.get(name), transaction)
                    if transaction is None:
                        found.pop(name, None)
                    else:
                        found[name] = transaction
        return found

    def check_step(self, before: Transaction | None, after: Transaction | None) -> None:
        """One record of an id follows another."""
        if before is not None and before.state.is_prepared:
            assert after is not None
            assert after.state.title == before.state.title.replace("Prepare", "Complete"), "the outcome has changed"
            assert after.producer == before.next_producer, "the producer is not who it was told to be"
        if after is not None and after.state.is_prepared:
            key = (after.producer, after.start_ms)
            assert self.decided.setdefault(key, after.partitions) == after.partitions

    async def _heal(self) -> None:
        """Everything works again: what was decided is completed, and everybody can go on."""
        self.bench.markers.open.set()
        self.bench.fake[0].commit_at_once = True
        self.bench.fake[0].commit()
        for _ in range(6):
            await self.bench.advance(10)
            self.bench.fake[0].commit()
        await run_ready()
        self.collect()
        self.check()
        for name, found in self.live().items():
            assert found.state in HEALED, f"{name} is still {found.state.title}"
        marked = Counter(
            (marker.producer_id, marker.producer_epoch, partition) for marker, partition in self.bench.markers.written
        )
        owed = Counter((*producer, each) for (producer, _), partitions in self.decided.items() for each in partitions)
        assert owed <= marked, f"never marked: {owed - marked}"
        for name in self.live():
            me = await self.bench.coordinator.init_producer_id(name, TIMEOUT_MS)
            await self.bench.coordinator.add_partitions(name, me, [A], version=2)
            await self.bench.coordinator.end(name, me, commits=True, version=2)


TestTransactions = Transactions.TestCase
TestTransactions.settings = MODEL


# --- planted bugs -----------------------------------------------------------------------------------------------------


def epoch_not_bumped(patch: pytest.MonkeyPatch) -> None:
    plan = state._plan_bumping_end

    def planted(current: Transaction, **more: Any) -> Decision:
        decision = plan(current, **more)
        assert decision.after is not None
        after = replace(decision.after, producer_epoch=current.producer_epoch)
        return replace(decision, after=after, producer=after.next_producer)

    patch.setattr(state, "_plan_bumping_end", planted)


def markers_forgotten_on_failover(patch: pytest.MonkeyPatch) -> None:
    begin = TransactionShard._begin

    def planted(self: TransactionShard) -> None:
        for name, found in self.transactions.items():
            if found.state.is_prepared:
                self.transactions[name] = state.complete(found, found.updated_ms)
        begin(self)

    patch.setattr(TransactionShard, "_begin", planted)


def completed_without_markers(patch: pytest.MonkeyPatch) -> None:
    async def planted(self: FakeMarkers, marker: TransactionMarker, partitions: Collection[TopicPartition]) -> None:
        self.written += [(marker, each) for each in sorted(partitions)[1:]]

    patch.setattr(FakeMarkers, "send", planted)


def answered_before_it_is_durable(patch: pytest.MonkeyPatch) -> None:
    async def planted(_self: TransactionShard, _done: asyncio.Future[None]) -> None:
        pass

    patch.setattr(TransactionShard, "in_time", planted)


def last_epoch_not_written(patch: pytest.MonkeyPatch) -> None:
    write = records._value
    patch.setattr(records, "_value", lambda transaction: write(replace(transaction, last_producer_epoch=-1)))


def fenced_producers_may_act(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state, "_check_producer", lambda _current, _producer: None)


def repeated_end_begins_anew(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state, "_repeats_end", lambda *_: False)
    plan = state.plan_end

    def planted(current: Transaction | None, producer: Producer, **more: Any) -> Decision:
        known = producer if current is None else current.producer
        return plan(current, known, **more)

    patch.setattr(state, "plan_end", planted)


def outcome_can_change(patch: pytest.MonkeyPatch) -> None:
    def planted(prepared: Transaction, now_ms: int) -> Transaction:
        done = complete(prepared, now_ms)
        return replace(done, state=TransactionState.COMPLETE_ABORT)

    complete = state.complete
    patch.setattr(state, "complete", planted)


def new_id_forgotten_at_the_end(patch: pytest.MonkeyPatch) -> None:
    complete = state.complete
    patch.setattr(state, "complete", lambda prepared, now_ms: complete(replace(prepared, next_producer_id=-1), now_ms))


def timeouts_forgotten_on_failover(patch: pytest.MonkeyPatch) -> None:
    begin = TransactionShard._begin

    def planted(self: TransactionShard) -> None:
        self._deadlines.clear()
        begin(self)

    patch.setattr(TransactionShard, "_begin", planted)


PLANTED = (
    epoch_not_bumped,
    markers_forgotten_on_failover,
    completed_without_markers,
    answered_before_it_is_durable,
    last_epoch_not_written,
    fenced_producers_may_act,
    repeated_end_begins_anew,
    outcome_can_change,
    new_id_forgotten_at_the_end,
    timeouts_forgotten_on_failover,
)


@pytest.mark.planted
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    # It is enough to find it; a short history of it is not needed. What is tried depends on the source, of which
    # Hypothesis takes constants, so a change that has nothing to do with a bug may make it come late.
    search = settings(MODEL, max_examples=1000, phases=[Phase.generate], derandomize=True, database=None)
    with pytest.raises((AssertionError, ApiError)):
        run_state_machine_as_test(Transactions, settings=search)
