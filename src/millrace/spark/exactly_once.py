"""A micro-batch as one atomic, repeatable step: every row once for who reads committed records, whatever was killed.

Each write task writes in a transaction of its own and leaves it open; the driver then decides, by one record in the log
of `decisions`, and only then ends the transactions. That record is the point of commit:

- before it, nothing of the batch is visible, and nothing will be: whoever repeats the batch writes all of it again;
- after it, the batch is never written again: whoever repeats it only asks again for the commit of the transactions that
  the record names, which is a success where it has happened already.

Invariants:
- A task begins its transaction only after it has read, later than its run's claim, that its batch is undecided.
- Nobody begins a transaction under an id that has an open one which may yet be decided. Beginning aborts what is open
  under the id, at whatever time the request arrives, so an id has one user: the first attempt of one task, in one
  series, which is of one run of the query. Every other attempt has an id of its own, and so has a first one whose
  request may have been lost. Such a batch is the last of its series: somebody may still be about to use its ids.
- Spark does not tell a task which attempt at its stage it belongs to, so two first attempts of one task are possible,
  of which the second aborts what the first has written. The driver therefore looks at every transaction before it
  decides: if one is not open any more, nothing is decided and the batch is repeated.
- The driver decides only for the series that is the last in the log, and a series is ended by a claim. Before
  transactions are aborted, their series is ended and the log is read again. So what is decided is never aborted by us.

The one who may is the coordinator, when a transaction is older than its timeout. Until the decision that only costs a
repetition. Between the decision and the end of the last transaction it takes rows away that were promised: that is
found when the batch is repeated, and said (`BatchTorn`). Transactions that are prepared for two-phase commit (KIP-939)
have no timeout; `_begin` is where they would be asked for.

The transactions of runs that died stay open until somebody shuts them out: each task those of its predecessor, in the
first batch of a series, and the driver those of first attempts that lost against later ones.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from millrace.client import transactions
from millrace.client.cluster import ClusterClient
from millrace.client.transactions import Transaction
from millrace.errors import ApiError, ConfigError, ErrorCode, MillraceError
from millrace.model import TopicPartition
from millrace.spark.decisions import Decision, Series, State

QUERY_ID_PROPERTY: Final = "sql.streaming.queryId"
BATCH_ID_PROPERTY: Final = "streaming.sql.batchId"
RUN_ID_PROPERTY: Final = "spark.jobGroup.id"
"""Spark runs the jobs of a streaming query in a group that has the id of the run."""

_PREFIX: Final = "millrace-spark"
_ABORTED: Final = "aborted-"
"""The run of a series that was claimed only to end the one before."""


class Superseded(MillraceError):
    """Another run of the query has taken over."""


class BatchTorn(MillraceError):
    """A batch was decided, and then some of its transactions were aborted."""


@dataclass(frozen=True, slots=True)
class BatchFence:
    """Which attempt at which piece of which streaming batch a task is."""

    query_id: str
    batch_id: int
    task: int
    run: str = ""
    sink_name: str = ""
    attempt: int = 0
    attempt_id: int = 0
    """Another one for every attempt of an application."""

    @classmethod
    def of(
        cls, local_property: Callable[[str], str | None], task: int, *, sink_name: str = "", other_run: str = ""
    ) -> BatchFence | None:
        """What Spark tells a task by its local properties; None for a batch query, whose pieces have no name.

        `other_run` stands for the id of the run where a function for foreachBatch has put its jobs in a group of its
        own.
        """
        query_id, batch_id = local_property(QUERY_ID_PROPERTY), local_property(BATCH_ID_PROPERTY)
        if not query_id or not batch_id:
            return None
        run = local_property(RUN_ID_PROPERTY) or ""
        return cls(query_id, int(batch_id), task, run if _is_uuid(run) else other_run, sink_name)

    @property
    def sink(self) -> str:
        """The name under which decisions are kept: the same over restarts of the query."""
        return f"{self.query_id}/{self.sink_name}" if self.sink_name else self.query_id

    @property
    def own_series(self) -> Series:
        """The series that begins with this batch, if one has to."""
        return Series(self.run, self.batch_id)

    def usual_id(self, series: Series) -> str:
        """The id that the task has in every batch of a series."""
        return f"{_PREFIX}-{self.sink}-{series}-{self.task}"

    def single_id(self, series: Series) -> str:
        """An id that nobody has, or will have."""
        return f"{self.usual_id(series)}-{self.batch_id}-{self.attempt_id}-{uuid.uuid4().hex[:8]}"


def _is_uuid(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Part:
    """The open transaction of one task, as its commit message brings it to the driver."""

    transaction: Transaction
    series: Series
    usual: bool
    """Whether it has the task's usual id."""


class Log(Protocol):
    """`decisions.DecisionLog`, as far as it is used here."""

    client: ClusterClient

    def state(self, sink: str) -> State: ...
    def claim(self, sink: str, series: Series) -> State: ...
    def decide(self, sink: str, decision: Decision) -> bool: ...


# --- on an executor ---------------------------------------------------------------------------------------------------


def begin_part(log: Log, fence: BatchFence, timeout_ms: int) -> Part | None:
    """The transaction in which a task writes; None when its batch is decided and nothing is to be written."""
    require_transactions(log.client)
    state = log.state(fence.sink)
    if not state.has_decided(fence.batch_id) and not state.is_going_on(fence.run):
        if state.has_passed(fence.run):
            raise _superseded(fence, state)
        state = log.claim(fence.sink, fence.own_series)
    if state.has_decided(fence.batch_id):
        return None
    series = state.series
    if series is None or not state.is_going_on(fence.run):
        raise _superseded(fence, state)
    if series.since == fence.batch_id:
        former = [each for each in state.former if not each.run.startswith(_ABORTED)]
        transactions.shut_out(log.client, [fence.usual_id(each) for each in former[-1:]])
    transactional_id = fence.usual_id(series) if fence.attempt == 0 else fence.single_id(series)
    begun = _begin(log.client, transactional_id, timeout_ms, lambda: fence.single_id(series))
    return Part(begun, series, usual=begun.transactional_id == fence.usual_id(series))


def begin_alone(client: ClusterClient, timeout_ms: int) -> Transaction:
    """A transaction for a task of a batch query: nothing repeats those, so that nobody needs to know its name."""
    require_transactions(client)
    return _begin(client, _lone_id(), timeout_ms, _lone_id)


def _lone_id() -> str:
    return f"{_PREFIX}-{uuid.uuid4()}"


def _begin(client: ClusterClient, transactional_id: str, timeout_ms: int, other_id: Callable[[], str]) -> Transaction:
    try:
        return transactions.begin(client, transactional_id, timeout_ms, other_id)
    except ApiError as error:
        if error.code is not ErrorCode.INVALID_TRANSACTION_TIMEOUT:
            raise
        raise ConfigError(
            f"the brokers allow no transactions of {timeout_ms} ms (transaction.max.timeout.ms): "
            "set option kafka.transaction.timeout.ms to what they allow"
        ) from error


def require_transactions(client: ClusterClient) -> None:
    if not transactions.are_served(client):
        servers = ",".join(f"{host}:{port}" for host, port in client.settings.bootstrap_servers)
        raise ConfigError(
            f"{servers} has no transactions, which option delivery=exactly-once needs: "
            "set option delivery to at-least-once"
        )


# --- on the driver ----------------------------------------------------------------------------------------------------


def commit(
    log: Log, fence: BatchFence, parts: Mapping[Part, Collection[TopicPartition]], losers: Collection[str] = ()
) -> None:
    """Have a batch counted that consists of `parts`, whose rows are stored; with none, one that was decided before.

    `fence` is that of any task of the batch. `losers` are ids of attempts that lost against one of the parts.
    """
    state = log.state(fence.sink)
    if not state.has_decided(fence.batch_id):
        decision = _decision(log.client, fence, parts, state)
        if not log.decide(fence.sink, decision):
            raise _superseded(fence, log.state(fence.sink))
    else:
        assert state.decided is not None
        decision = state.decided
        if decision.batch_id > fence.batch_id:
            return  # a checkpoint of before; later batches begin only after the end of this one
    refused = transactions.end(log.client, decision.transactions, commit=True)
    if refused:
        raise _torn(fence, decision, refused)
    transactions.shut_out(log.client, losers)


def _decision(
    client: ClusterClient, fence: BatchFence, parts: Mapping[Part, Collection[TopicPartition]], state: State
) -> Decision:
    if not parts or {part.series for part in parts} != {state.series}:
        raise _superseded(fence, state)
    assert state.series is not None
    ended = transactions.not_open(client, {part.transaction: touched for part, touched in parts.items()})
    for transaction, error in ended.items():
        raise MillraceError(
            f"batch {fence.batch_id} of query {fence.query_id} is not written: transaction "
            f"'{transaction.transactional_id}' ended before the batch did ({error}). Start the query again, which "
            "repeats the batch; if batches take longer than option kafka.transaction.timeout.ms, raise that"
        )
    closes = not all(part.usual for part in parts)
    return Decision(state.series, fence.batch_id, tuple(part.transaction for part in parts), closes)


def abort(log: Log, fence: BatchFence, parts: Collection[Part]) -> None:
    """Give a batch up, as far as it is not decided: Spark asks for it also when a commit has failed half-way."""
    state = log.state(fence.sink)
    if state.is_going_on(fence.run) and not state.has_decided(fence.batch_id):
        # A decision may be on its way to the log still. Behind this claim it will not count.
        state = log.claim(fence.sink, Series(f"{_ABORTED}{uuid.uuid4()}", fence.batch_id))
    if not state.has_decided(fence.batch_id):
        transactions.end(log.client, [each.transaction for each in parts], commit=False)


def _superseded(fence: BatchFence, state: State) -> Superseded:
    other = "unknown" if state.series is None else state.series.run
    return Superseded(
        f"batch {fence.batch_id} of query {fence.query_id} is not written by this run ({fence.run}): run {other} has "
        "taken over since. Is the query running twice, or was it restarted elsewhere?"
    )


def _torn(fence: BatchFence, decision: Decision, refused: Mapping[Transaction, ApiError]) -> BatchTorn:
    named = "; ".join(f"'{each.transactional_id}': {error}" for each, error in list(refused.items())[:3])
    return BatchTorn(
        f"batch {decision.batch_id} of query {fence.query_id} was committed, but {len(refused)} of its "
        f"{len(decision.transactions)} transactions cannot be committed any more ({named}). Most likely nobody came to "
        "commit them within option kafka.transaction.timeout.ms after the driver died, and the brokers aborted them: "
        "their rows are missing. To have them, start the query once with option delivery=at-least-once: it writes "
        "this batch again as a whole, so that its other rows are there twice. From the next batch on, exactly-once "
        "goes on as before"
    )
