"""The simulated cluster with transactions: one more partition, which holds the coordinator's state, and its clients.

Everything that happens to brokers, disks and controllers is in `simulated_cluster`. Here producers begin, write, commit
and abort; two may have the same transactional id; coordinators move with the leader of the state partition, or believe
to lead it still; transactions run out of time. Produce, questions of leaders to the coordinator, EndTxn, markers and
answers are lost, late and doubled. EndTxn and markers of producers before transaction version 2 are only lost: there
one transaction cannot be told from the next, which is what version 2 was made for (KIP-890), and what one connection
with its order has to see to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from millrace.errors import ApiError, ErrorCode, MillraceError, code_of
from millrace.replication.partition import Partition
from millrace.storage.producers import Verification
from millrace.storage.settings import FlushMode
from millrace.transactions import state
from millrace.transactions.state import CLASSIC_VERSION, EPOCH_VERSION, NOBODY, Decision, Transaction
from support.batches import NOW_MS
from support.simulated_broker import SimBroker
from support.simulated_cluster import ASSIGNMENT, SimCluster
from support.simulated_promises import BrokenPromise, Committed
from support.simulated_transactions import (
    LAST_EPOCH,
    Attempt,
    Client,
    CommittedTransactions,
    Coordinator,
    Plan,
    TransactionalBatch,
    new_producer_ids,
    partitions_of,
)

STATE: Final = len(ASSIGNMENT)
"""The partition of the coordinator's state."""
IDS: Final = ("x", "y", "z")
MAX_CLIENTS: Final = 6
TIMEOUT_MS: Final = 60_000
PATIENCE: Final = 0.9
"""How often a client whose request has no answer goes on waiting."""

_COME_AGAIN: Final = frozenset({ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.NOT_ENOUGH_REPLICAS})
_IS_FENCED: Final = frozenset({
    ErrorCode.PRODUCER_FENCED,
    ErrorCode.INVALID_PRODUCER_EPOCH,
    ErrorCode.INVALID_PRODUCER_ID_MAPPING,
})  # fmt: skip
_IS_REFUSED: Final = frozenset({ErrorCode.INVALID_TXN_STATE, ErrorCode.TRANSACTION_ABORTABLE})

Answer = Callable[[Decision | ErrorCode], None]
Question = Callable[[Coordinator, Callable[[Decision], None]], None]
"""What a coordinator does for a request; it hands on what is answered, when that is durable."""


class TransactionalCluster(SimCluster):
    """A run with transactions."""

    assignment = (*ASSIGNMENT, (3, 1, 4))

    def __init__(self, seed: int, flush_mode: FlushMode) -> None:
        self.attempts: list[Attempt] = []
        self._coordinators: dict[int, Coordinator] = {}
        """What each broker keeps that leads the state partition, or believes to."""
        self._producer_ids = new_producer_ids()
        super().__init__(seed, flush_mode)
        self._late, self._kept = self.random.choice((0.01, 0.05, 0.15)), self.random.choice((0.05, 0.1, 0.3))
        self._haste = self.random.choice((0.02, 0.3))
        """How often a client aborts while something has no answer."""
        self.kept: list[tuple[Callable[[], None], tuple[object, ...]]] = []
        """What of transactions is still on its way, for long."""
        self.clients = [self._new_client(each) for each in IDS]

    def _promises(self) -> Sequence[Committed]:
        return [CommittedTransactions(index, self.attempts) for index in range(len(self.assignment))]

    def _steps(self) -> list[tuple[Callable[[], None], float]]:
        return [
            *super()._steps(),
            (self.transact, 250),
            (self.mark, 60),
            (self.replicate, 120),
            (self.consume, 10),
            (self.deliver, 12),
            (self.take_over, self.some(2)),
            (self.time_out, self.some(6)),
        ]

    def replicate(self) -> None:
        """A moment in which everybody copies: a transaction needs one durable write after another."""
        for _ in range(len(self.late) // 2):
            self.arrive()
        for _ in range(self.random.randint(1, 4)):
            for at in self.brokers.values():
                if at.is_up:
                    self._flush(at)
                    self._fetch(at)

    def _new_client(self, transactional_id: str) -> Client:
        return Client(transactional_id, self.random.choice((CLASSIC_VERSION, EPOCH_VERSION)))

    def _post_by(self, version: int, arrive: Callable[[], None], *what: object) -> None:
        """Send something of a transaction: it arrives now, much later, in some later transaction, twice, or never."""
        fate = 1.0 if self._is_healed else self.random.random()
        if fate < self._lost or (version < EPOCH_VERSION and fate < self._lost + self._kept):
            self.note("lost:", *what)
            return
        if fate < self._lost + self._kept:
            self.note("kept:", *what)
            self.kept.append((arrive, what))
        if fate < self._lost + self._kept / 2:
            return
        arrive()

    def deliver(self) -> None:
        """Something of a transaction that was kept back arrives."""
        if self.kept:
            self.late.append(self.kept.pop(self.random.randrange(len(self.kept))))

    # --- coordinators -------------------------------------------------------------------------------------------------

    def coordinator_at(self, at: SimBroker) -> Coordinator | None:
        """What a broker knows as coordinator; None where it is none, or does not know everything yet."""
        replica = at.replicas.get(STATE)
        if not at.is_up or replica is None or not replica.is_leader:
            return None
        found = self._coordinators.get(at.broker_id)
        try:
            if found is None or found.partition is not replica or found.is_deposed:
                found = self._coordinators[at.broker_id] = Coordinator(replica, self._producer_ids)
                self.counts["coordinator"] += 1
            return found if found.load() else None
        except MillraceError:
            return None

    def _ask_coordinator(
        self, told_by: SimBroker, version: int, question: Question, answer: Answer, *what: object
    ) -> None:
        """Send a request to whom a broker takes for the coordinator; errors that may pass have no answer."""
        at = self.leader_heard_of_by(told_by, STATE)
        if at is None:
            return

        def receive() -> None:
            coordinator = self.coordinator_at(at)
            if coordinator is None:
                return

            def reply(result: Decision | ErrorCode) -> None:
                self.note(at, "answers", *what, result)
                self._post_by(EPOCH_VERSION, lambda: answer(result), "answer to", *what)

            try:
                question(coordinator, lambda done: reply(done if done.error is ErrorCode.NONE else done.error))
            except MillraceError as error:
                self.counts[code_of(error).name] += 1
                reply(code_of(error))

        self._post_by(version, receive, *what)

    def mark(self) -> None:
        """The coordinators tell partitions of outcomes."""
        at = self.some_broker()
        if at is not None:
            self._mark(at)

    def _mark(self, at: SimBroker) -> None:
        coordinator = self.coordinator_at(at)
        if coordinator is None:
            return
        for transactional_id, prepared in coordinator.prepared():
            indexes = {each.partition for each in prepared.partitions}
            for index in sorted(indexes - coordinator.marked[transactional_id]):
                to = self.leader_heard_of_by(at, index)
                if to is not None:
                    arrive = partial(self._write_marker, to, coordinator, transactional_id, prepared, index)
                    self._post_by(
                        prepared.version, arrive, "marker", prepared.producer, prepared.state, index, "to", to
                    )
            self._finish(coordinator, transactional_id, prepared)

    def _finish(self, coordinator: Coordinator, transactional_id: str, prepared: Transaction) -> None:
        if coordinator.transactions.get(transactional_id) is prepared and not coordinator.is_deposed:
            try:
                coordinator.finish(transactional_id, prepared)
            except MillraceError as error:
                self.counts[code_of(error).name] += 1

    def _write_marker(
        self, at: SimBroker, coordinator: Coordinator, transactional_id: str, prepared: Transaction, index: int
    ) -> None:
        partition = at.replicas.get(index)
        if not at.is_up or partition is None or not partition.is_leader:
            return

        def over() -> None:
            coordinator.marked[transactional_id].add(index)
            self._finish(coordinator, transactional_id, prepared)

        def answer() -> None:
            if coordinator.transactions.get(transactional_id) is prepared:
                self.post(over, "answer to marker of", prepared.producer, index)

        try:
            partition.check_in_sync()
            appended = partition.end_transaction(
                prepared.producer_id,
                prepared.producer_epoch,
                coordinator.leader_epoch,
                commit=prepared.state.commits,
                transaction_version=prepared.version,
                now_ms=NOW_MS,
            )
        except MillraceError as error:
            self.counts[f"marker {code_of(error).name}"] += 1
            if code_of(error) is ErrorCode.INVALID_PRODUCER_EPOCH:
                answer()
            return
        self.counts["marker"] += 1
        self.note(at, "marks", prepared.producer, prepared.state, "at", index, appended.base_offset)

        def committed(error: Exception | None) -> None:
            if error is None:
                self.mark_moved(at, partition)
                answer()

        if not partition.when_committed(appended.last_offset, committed):
            committed(None)

    def time_out(self) -> None:
        """A transaction is out of time: its coordinator aborts it."""
        at = self.some_broker()
        coordinator = None if at is None else self.coordinator_at(at)
        for transactional_id in () if coordinator is None else tuple(coordinator.transactions):
            if coordinator is not None and self.random.random() < 0.5:
                self._time_out(coordinator, transactional_id)

    def _time_out(self, coordinator: Coordinator, transactional_id: str) -> None:
        def plan(current: Transaction | None, new_producer_id: int | None) -> Decision:
            assert current is not None
            return state.plan_fence(current, new_producer_id=new_producer_id, now_ms=NOW_MS, last_epoch=LAST_EPOCH)

        try:
            coordinator.change(transactional_id, plan, lambda _: self.counts.update(("timed out",)))
        except MillraceError:
            return

    # --- clients ------------------------------------------------------------------------------------------------------

    def transact(self) -> None:
        """A client does what is next for it."""
        told_by = self.some_broker()
        if told_by is not None:
            self._go_on(self.random.choice(self.clients), told_by)

    def take_over(self) -> None:
        """Another producer with the same transactional id begins, and the first one does not know."""
        if len(self.clients) < MAX_CLIENTS:
            self.clients.append(self._new_client(self.random.choice(IDS)))

    def _go_on(self, client: Client, told_by: SimBroker) -> None:
        if client.is_gone:
            self.clients.remove(client)
            if all(each.transactional_id != client.transactional_id for each in self.clients):
                self.clients.append(self._new_client(client.transactional_id))
        elif client.request is not None and not self._is_healed and self.random.random() < PATIENCE:
            return
        elif not client.is_ready:
            self._init(client, told_by)
        elif client.attempt is None:
            assert client.producer is not None
            client.attempt = Attempt(len(self.attempts), client.transactional_id, client.producer, client.version)
            client.attempt.size = self.random.randint(1, 4)
            self.attempts.append(client.attempt)
            self._write_more(client, client.attempt, told_by)
        else:
            self._go_on_with(client, client.attempt, told_by)

    def _go_on_with(self, client: Client, attempt: Attempt, told_by: SimBroker) -> None:
        """Write, send again, or end: a commit only when everything has its answer."""
        if attempt.wants is None:
            if not client.pending or self.random.random() >= self._haste:
                if client.pending:
                    self._produce_in(client, attempt, self.random.choice(client.pending).partition, told_by)
                if len(attempt.batches) < attempt.size and self.random.random() < (0.2 if client.pending else 0.95):
                    self._write_more(client, attempt, told_by)
                    return
                if client.pending:
                    return
            attempt.wants = not client.pending and bool(attempt.batches) and self.random.random() < 0.7
        self._end(client, attempt, told_by)

    def _request(
        self,
        client: Client,
        told_by: SimBroker,
        version: int,
        plan: Plan,
        done: Callable[[Decision], None],
        *what: object,
        durable: Callable[[Decision], None] = lambda _: None,
    ) -> None:
        """Ask the coordinator; whatever was asked before is not waited for any more."""
        request = client.request = object()

        def question(coordinator: Coordinator, then: Callable[[Decision], None]) -> None:
            def written(decision: Decision) -> None:
                durable(decision)
                then(decision)

            coordinator.change(client.transactional_id, plan, written)

        def answer(result: Decision | ErrorCode) -> None:
            if client.request is not request:
                return
            client.request = None
            if isinstance(result, Decision):
                done(result)
            elif result in _IS_FENCED:
                client.is_gone = True
                self.counts["fenced client"] += 1
            elif result not in _COME_AGAIN:
                client.is_ready = False  # it has to ask who it is, which ends what is under way

        self._ask_coordinator(told_by, version, question, answer, *what)

    def _init(self, client: Client, told_by: SimBroker) -> None:
        expected = client.producer

        def plan(current: Transaction | None, new_producer_id: int | None) -> Decision:
            return state.plan_init(
                current,
                timeout_ms=TIMEOUT_MS,
                expected=expected,
                new_producer_id=new_producer_id,
                now_ms=NOW_MS,
                last_epoch=LAST_EPOCH,
            )

        def durable(decision: Decision) -> None:
            if decision.producer != NOBODY:
                for attempt in self.attempts:
                    if attempt.transactional_id == client.transactional_id and attempt.producer != decision.producer:
                        attempt.is_over = True

        what = ("init", client.transactional_id, expected)
        self._request(
            client, told_by, EPOCH_VERSION, plan, lambda done: client.become(done.producer), *what, durable=durable
        )

    def _write_more(self, client: Client, attempt: Attempt, told_by: SimBroker) -> None:
        """Send a batch to one of the partitions; before version 2 the coordinator is told of it first."""
        index = self.random.randrange(STATE)
        if client.version < EPOCH_VERSION and index not in client.added:
            self._add(client, attempt, index, told_by)
            return
        client.make_batch(index, self.random.randint(1, 2))
        self._produce_in(client, attempt, index, told_by)

    def _add(self, client: Client, attempt: Attempt, index: int, told_by: SimBroker) -> None:
        def plan(current: Transaction | None, _new_producer_id: int | None) -> Decision:
            return state.plan_add(
                current, attempt.producer, partitions_of(index), version=CLASSIC_VERSION, now_ms=NOW_MS
            )

        def done(_decision: Decision) -> None:
            if client.attempt is attempt:
                client.added.add(index)

        self._request(client, told_by, EPOCH_VERSION, plan, done, "add", index, attempt)

    def _end(self, client: Client, attempt: Attempt, told_by: SimBroker) -> None:
        def plan(current: Transaction | None, new_producer_id: int | None) -> Decision:
            return state.plan_end(
                current,
                attempt.producer,
                commits=attempt.wants is True,
                version=client.version,
                new_producer_id=new_producer_id,
                now_ms=NOW_MS,
                last_epoch=LAST_EPOCH,
            )

        def done(decision: Decision) -> None:
            self.counts["committed" if attempt.wants else "aborted"] += 1
            attempt.is_acknowledged = True
            if attempt.wants and False in attempt.fates.values():
                raise BrokenPromise(f"(f) told to be committed: {attempt}")
            if client.version >= EPOCH_VERSION:
                client.become(decision.producer)
                return
            client.is_ready = not client.pending  # what of it was written is not known: the sequences begin anew
            client.forget_attempt()

        self._request(client, told_by, client.version, plan, done, "end", attempt.wants, attempt)

    # --- writing in a transaction -------------------------------------------------------------------------------------

    def _produce_in(self, client: Client, attempt: Attempt, index: int, told_by: SimBroker) -> None:
        at = self.leader_heard_of_by(told_by, index)
        batches = [each for each in client.pending if each.partition == index]
        if at is None or not batches:
            return

        def refused(error: MillraceError) -> None:
            code = code_of(error)
            self.counts[code.name] += 1
            self.post(lambda: self._refused(client, attempt, code), "refusal", code.name, attempt)

        def receive() -> None:
            partition = at.replicas.get(index)
            if not at.is_up or partition is None or not partition.is_leader:
                return
            try:
                guard = partition.begin_verification(
                    *attempt.producer, batches[0].sequence, bumps_epoch=attempt.version >= EPOCH_VERSION
                )
            except MillraceError as error:
                refused(error)
                return
            if guard is None:
                self._append_in(at, partition, client, attempt, batches, None, refused)
                return

            def admitted(code: ErrorCode) -> None:
                if code is not ErrorCode.NONE:
                    refused(ApiError(code, "the coordinator refuses"))
                elif at.is_up and at.replicas.get(index) is partition:
                    self._append_in(at, partition, client, attempt, batches, guard, refused)

            self._admit(at, attempt, index, admitted)

        self._post_by(
            EPOCH_VERSION, receive, "produce", [each.sequence for each in batches], "in", index, "of", attempt, "to", at
        )

    def _admit(self, at: SimBroker, attempt: Attempt, index: int, admitted: Callable[[ErrorCode], None]) -> None:
        """The leader of a partition asks the coordinator, as `transactions.gate`."""

        def plan(current: Transaction | None, _new_producer_id: int | None) -> Decision:
            asked = partitions_of(index)
            return state.plan_add(current, attempt.producer, asked, version=EPOCH_VERSION, now_ms=NOW_MS)

        def question(coordinator: Coordinator, then: Callable[[Decision], None]) -> None:
            if attempt.version >= EPOCH_VERSION:
                coordinator.change(attempt.transactional_id, plan, then)
            else:
                then(coordinator.verify(attempt.transactional_id, attempt.producer, index))

        def answer(result: Decision | ErrorCode) -> None:
            admitted(ErrorCode.NONE if isinstance(result, Decision) else result)

        self._ask_coordinator(at, EPOCH_VERSION, question, answer, "admit", index, attempt)

    def _append_in(
        self,
        at: SimBroker,
        partition: Partition,
        client: Client,
        attempt: Attempt,
        batches: list[TransactionalBatch],
        guard: Verification | None,
        refused: Callable[[MillraceError], None],
    ) -> None:
        for batch in batches:
            try:
                partition.check_in_sync()
                appended = partition.append(batch.data, verification=guard)
            except MillraceError as error:
                refused(error)
                return
            self.counts["transactional append"] += not appended.duplicate
            self.note(at, "appends", batch.sequence, "of", attempt, "at", partition.index, appended.base_offset)
            committed = partial(self._committed, at, partition, client, attempt, batch, appended.base_offset)
            if not partition.when_committed(appended.last_offset, committed):
                committed(None)

    def _committed(
        self,
        at: SimBroker,
        partition: Partition,
        client: Client,
        attempt: Attempt,
        batch: TransactionalBatch,
        offset: int,
        error: Exception | None,
    ) -> None:
        if error is not None:
            return
        self.mark_moved(at, partition)
        with self._noting():
            self.committed[partition.index].check_acknowledged(attempt.producer.producer_id, batch.sequence, offset)

        def acknowledged() -> None:
            if batch in client.pending:
                client.pending.remove(batch)

        self.post(acknowledged, "ack", batch.sequence, "of", attempt)

    def _refused(self, client: Client, attempt: Attempt, code: ErrorCode) -> None:
        if client.attempt is not attempt:
            return
        if code in _IS_FENCED:
            client.is_gone = True
            self.counts["fenced client"] += 1
        elif code in _IS_REFUSED and attempt.wants is None:
            attempt.wants = False

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(self, partition: Partition) -> None:
        committed = self.committed[partition.index]
        assert isinstance(committed, CommittedTransactions)
        first = self.random.choice((0, committed.stable))
        try:
            committed.check_stable(partition)
            committed.check_read(partition, min(first, partition.last_stable_offset))
        except MillraceError:
            return

    # --- the end ------------------------------------------------------------------------------------------------------

    def heal(self) -> None:
        self.late += self.kept
        super().heal()

    def _heal_a_little(self) -> None:
        super()._heal_a_little()
        for client in tuple(self.clients):
            self._come_to_an_end(client, self.brokers[1])
        for at in self.brokers.values():
            coordinator = self.coordinator_at(at)
            if coordinator is not None:
                self._mark(at)
                for transactional_id in tuple(coordinator.transactions):
                    if all(each.attempt is None for each in self.clients if each.transactional_id == transactional_id):
                        self._time_out(coordinator, transactional_id)

    def _come_to_an_end(self, client: Client, told_by: SimBroker) -> None:
        attempt = client.attempt
        if attempt is not None and client.is_ready and not client.is_gone and attempt.wants is None:
            for index in {each.partition for each in client.pending}:
                self._produce_in(client, attempt, index, told_by)
            if client.pending:
                return
            attempt.wants = bool(attempt.batches)
        if attempt is not None or client.is_gone:
            self._go_on(client, told_by)

    def _is_well(self) -> bool:
        if not super()._is_well():
            return False
        if self.offline():
            return True  # what waits for a partition that is gone waits for ever
        for committed in self.committed:
            for broker_id in self.state_of(committed.index).replicas:
                replica = self.brokers[broker_id].replicas[committed.index]
                if replica.last_stable_offset < replica.log.end_offset:
                    return False
        if any(client.attempt is not None or client.is_gone for client in self.clients):
            return False
        self._check_everything()
        return True

    def _check_everything(self) -> None:
        self.counts["whole"] += 1
        for attempt in self.attempts:
            attempt.check_whole()
        for committed in self.committed:
            assert isinstance(committed, CommittedTransactions)
            for broker_id in self.state_of(committed.index).replicas:
                committed.check_read(self.brokers[broker_id].replicas[committed.index], 0)
