"""One led partition of `__transaction_state`: its transactional ids, and the order in which changes take effect.

Plans are made on what is durable. Of each id one change at a time is on its way to the log; whoever comes meanwhile is
told to come again (CONCURRENT_TRANSACTIONS), as in Kafka, but for brokers that add partitions, which take turns. When
an outcome is durable the producer is answered, and a task sees to it that the partitions learn of it and that the
transaction is complete then; a shard that finds decided outcomes when it loads goes on with them.

Owner: the shard's task (`run`). Not here: loading and writing (`replication.sharded`), which shard answers for an id
(`coordinator`), decisions (`state`), bytes (`records`), the way of markers (`markers`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final, Protocol

from millrace.clock import Clock
from millrace.errors import ApiError, ErrorCode
from millrace.model import TopicPartition
from millrace.replication.sharded import StateShard
from millrace.replication.state_topic import StateTopic
from millrace.tasks import Tasks
from millrace.transactions import records, state
from millrace.transactions.markers import TransactionMarker
from millrace.transactions.settings import TransactionSettings
from millrace.transactions.state import Decision, NeedsProducerId, Producer, Transaction, TransactionState

logger = logging.getLogger(__name__)

_PER_BATCH: Final = 500
"""Records that are written together when many ids are forgotten at once, or read before others get their turn."""
_AGAIN_S: Final = 0.1
"""Until a completion that the log refused is tried again."""

Plan = Callable[[Transaction | None, int | None], Decision]
"""What a request makes of the state, given a new producer id or none."""


class TransactionCounts:
    """What is counted of a broker's transactions, by their outcome; it outlives the shards. Owner: the event loop."""

    __slots__ = ("aborted", "committed")

    def __init__(self) -> None:
        self.committed = 0
        self.aborted = 0

    def __repr__(self) -> str:
        return f"TransactionCounts({self.committed} committed, {self.aborted} aborted)"


class Markers(Protocol):
    """The part of `MarkerSender` that is needed here."""

    async def send(self, marker: TransactionMarker, partitions: Collection[TopicPartition]) -> None:
        """Return when every partition has the marker."""


class TransactionShard(StateShard):
    """The transactional ids of one partition of the state topic."""

    def __init__(
        self,
        index: int,
        leader_epoch: int,
        *,
        topic: StateTopic,
        markers: Markers,
        new_producer_id: Callable[[], Awaitable[int]],
        settings: TransactionSettings,
        clock: Clock,
        counts: TransactionCounts | None = None,
    ) -> None:
        super().__init__(index, leader_epoch, topic=topic, clock=clock, write_timeout_ms=settings.write_timeout_ms)
        self.transactions: dict[str, Transaction] = {}
        """What is durable."""
        self._changing: dict[str, Transaction | None] = {}
        """What is appended and not durable yet."""
        self._deadlines: dict[str, float] = {}
        """When ongoing transactions are out of time, on the monotonic clock."""
        self._completions: dict[str, asyncio.Future[None]] = {}
        """Whoever waits until nothing is under way."""
        self._markers = markers
        self._new_producer_id = new_producer_id
        self._settings = settings
        self._counts = counts or TransactionCounts()
        self._tasks = Tasks(clock)

    def __repr__(self) -> str:
        return (
            f"TransactionShard({self.index} epoch {self.leader_epoch} {self.state.value}, {len(self.transactions)} "
            f"ids, {self._writer!r})"
        )

    # --- life ---------------------------------------------------------------------------------------------------------

    def replay(self, key: bytes, value: bytes | None, record_offset: int) -> None:  # noqa: ARG002 - as shards have it
        read = records.read_record(key, value)
        if read is not None:
            self._set(*read)

    @property
    def is_empty(self) -> bool:
        return not self.transactions

    def _begin(self) -> None:
        # How long they have been open can only be told by the wall clock, which may have jumped: not longer than they
        # may be.
        now_s, now_ms = self._clock.monotonic(), self._clock.wall_ms()
        for transactional_id in self._deadlines:
            found = self.transactions[transactional_id]
            left_ms = min(max(found.start_ms + found.timeout_ms - now_ms, 0), found.timeout_ms)
            self._deadlines[transactional_id] = now_s + left_ms / 1000
        for transactional_id, found in self.transactions.items():
            if found.state.is_prepared:
                self._finish_later(transactional_id, found)

    def _end(self) -> None:
        self._tasks.cancel()
        for waiting in self._completions.values():
            if not waiting.done():
                waiting.set_result(None)
        self._completions.clear()

    async def _ended(self) -> None:
        await self._tasks.stop()

    # --- requests -----------------------------------------------------------------------------------------------------

    async def init(self, transactional_id: str, timeout_ms: int, expected: Producer | None) -> Producer:
        """InitProducerId: who the producer is from now on."""

        def plan(current: Transaction | None, new_producer_id: int | None) -> Decision:
            return state.plan_init(
                current,
                timeout_ms=timeout_ms,
                expected=expected,
                new_producer_id=new_producer_id,
                now_ms=self._clock.wall_ms(),
                last_epoch=self._settings.last_epoch,
            )

        return (await self._change(transactional_id, plan)).producer

    async def add(
        self, transactional_id: str, producer: Producer, partitions: Collection[TopicPartition], version: int
    ) -> None:
        """AddPartitionsToTxn."""

        def plan(current: Transaction | None, _new_producer_id: int | None) -> Decision:
            return state.plan_add(current, producer, partitions, version=version, now_ms=self._clock.wall_ms())

        # Several brokers add partitions to a transaction at the same time: they take turns.
        while (changing := self._changing.get(transactional_id)) and changing.state is TransactionState.ONGOING:
            waiting = self.completion(transactional_id)
            if waiting is None:
                break
            await asyncio.shield(waiting)
        await self._change(transactional_id, plan)

    def add_at_once(
        self, transactional_id: str, producer: Producer, partitions: Collection[TopicPartition], version: int
    ) -> bool:
        """As `add`, where there is nothing to wait for; False: ask `add`, which waits for what has begun here."""
        if transactional_id in self._changing:
            return False
        current = self.transactions.get(transactional_id)
        decision = state.plan_add(current, producer, partitions, version=version, now_ms=self._clock.wall_ms())
        return decision.after is None or self._append([(transactional_id, decision.after)]).done()

    def verify(
        self, transactional_id: str, producer: Producer, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, ErrorCode]:
        """AddPartitionsToTxn that only asks."""
        return state.verified(self.transactions.get(transactional_id), producer, partitions)

    async def end(self, transactional_id: str, producer: Producer, *, commits: bool, version: int) -> Producer:
        """EndTxn: answered when the outcome is durable; partitions learn of it afterwards."""

        def plan(current: Transaction | None, new_producer_id: int | None) -> Decision:
            return state.plan_end(
                current,
                producer,
                commits=commits,
                version=version,
                new_producer_id=new_producer_id,
                now_ms=self._clock.wall_ms(),
                last_epoch=self._settings.last_epoch,
            )

        return (await self._change(transactional_id, plan)).producer

    def completion(self, transactional_id: str) -> asyncio.Future[None] | None:
        """Done when nothing that was decided about the id is under way any more; None where nothing is.

        Not to be cancelled: others wait for it, too.
        """
        found = self.transactions.get(transactional_id)
        if transactional_id not in self._changing and (found is None or not found.state.is_prepared):
            return None
        waiting = self._completions.get(transactional_id)
        if waiting is None:
            waiting = self._completions[transactional_id] = asyncio.get_running_loop().create_future()
        return waiting

    # --- chores -------------------------------------------------------------------------------------------------------

    def timed_out(self) -> list[str]:
        """The ids whose transaction is out of time."""
        now_s = self._clock.monotonic()
        return [each for each, due_s in self._deadlines.items() if due_s <= now_s and each not in self._changing]

    async def abort_timed_out(self, transactional_id: str) -> None:
        """Abort a transaction that is out of time, and fence its producer."""

        def plan(current: Transaction | None, new_producer_id: int | None) -> Decision:
            due_s = self._deadlines.get(transactional_id)
            if current is None or due_s is None or due_s > self._clock.monotonic():
                return Decision()  # it has ended, and perhaps another one has begun
            return state.plan_fence(
                current,
                new_producer_id=new_producer_id,
                now_ms=self._clock.wall_ms(),
                last_epoch=self._settings.last_epoch,
            )

        decision = await self._change(transactional_id, plan)
        if decision.after is not None:
            logger.info("the transaction of %r was out of time and is aborted", transactional_id)

    async def forget_expired(self) -> None:
        """Forget the ids that nobody has used for long."""
        expired = [each for each in self.transactions if self._is_expired(each)]
        for start in range(0, len(expired), _PER_BATCH):
            # Those of the first batches are durable before the last is written: somebody may have come back.
            batch = [each for each in expired[start : start + _PER_BATCH] if self._is_expired(each)]
            if batch:
                await self.in_time(self._append([(each, None) for each in batch]))

    def _is_expired(self, transactional_id: str) -> bool:
        found = self.transactions.get(transactional_id)
        if found is None or transactional_id in self._changing:
            return False
        return state.may_expire(found, self._clock.wall_ms(), self._settings.id_expiration_ms)

    # --- completion ---------------------------------------------------------------------------------------------------

    def _finish_later(self, transactional_id: str, prepared: Transaction) -> None:
        self._tasks.start(f"completing {transactional_id!r}", self._finish(transactional_id, prepared))

    async def _finish(self, transactional_id: str, prepared: Transaction) -> None:
        """Tell every partition, then write down that they know."""
        marker = TransactionMarker(
            producer_id=prepared.producer_id,
            producer_epoch=prepared.producer_epoch,
            coordinator_epoch=self.leader_epoch,
            commits=prepared.state.commits,
            transaction_version=prepared.version,
        )
        await self._until_done(transactional_id, lambda: self._markers.send(marker, prepared.partitions))

        async def write() -> None:
            await self._append([(transactional_id, state.complete(prepared, self._clock.wall_ms()))])

        if await self._until_done(transactional_id, write):
            if prepared.state.commits:
                self._counts.committed += 1
            else:
                self._counts.aborted += 1

    async def _until_done(self, transactional_id: str, attempt: Callable[[], Awaitable[None]]) -> bool:
        """Try for as long as the shard is there: whoever gave up would leave readers and producer waiting for ever.

        Whether it was done before the shard was gone.
        """
        while self.is_active:
            try:
                await attempt()
            except ApiError as error:
                logger.debug("%r is not complete yet: %s", transactional_id, error)
            except Exception:  # a fault of ours: the next attempt may do better, and the log says so
                logger.exception("%r is not complete yet", transactional_id)
            else:
                return True
            await self._clock.sleep(_AGAIN_S)
        return False

    # --- writing ------------------------------------------------------------------------------------------------------

    async def _change(self, transactional_id: str, plan: Plan) -> Decision:
        """Write what a plan says; returns when it is durable. Cancellation does not take it back."""
        new_producer_id: int | None = None
        while True:
            if transactional_id in self._changing:
                raise ApiError(ErrorCode.CONCURRENT_TRANSACTIONS, "another request is being written down")
            try:
                decision = plan(self.transactions.get(transactional_id), new_producer_id)
                break
            except NeedsProducerId:
                new_producer_id = await self._new_producer_id()
        if decision.after is not None:
            await self.in_time(self._append([(transactional_id, decision.after)]))
        if decision.error is not ErrorCode.NONE:
            raise ApiError(decision.error)
        return decision

    def _append(self, changes: Sequence[tuple[str, Transaction | None]]) -> asyncio.Future[None]:
        """Append now: plan and append happen without a wait between them."""

        def apply(_base_offset: int) -> None:
            for transactional_id, transaction in changes:
                self._apply(transactional_id, transaction)

        # A producer id may have come after the leadership had gone, and come back.
        if self._topic.leader_epoch(self.index) != self.leader_epoch:
            raise ApiError(ErrorCode.NOT_COORDINATOR, f"{self._topic.name}-{self.index} is led in another epoch")
        done = self.append([records.entry(each, transaction) for each, transaction in changes], apply)
        self._changing.update(changes)
        self._writer.apply_durable()
        return done

    def _apply(self, transactional_id: str, transaction: Transaction | None) -> None:
        self._changing.pop(transactional_id, None)
        self._set(transactional_id, transaction)
        if transaction is not None and transaction.state.is_prepared:
            self._finish_later(transactional_id, transaction)
            return
        waiting = self._completions.pop(transactional_id, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def _set(self, transactional_id: str, transaction: Transaction | None) -> None:
        if transaction is None:
            self.transactions.pop(transactional_id, None)
        else:
            self.transactions[transactional_id] = transaction
        if transaction is None or transaction.state is not TransactionState.ONGOING:
            self._deadlines.pop(transactional_id, None)
        elif transactional_id not in self._deadlines:
            self._deadlines[transactional_id] = self._clock.monotonic() + transaction.timeout_ms / 1000
