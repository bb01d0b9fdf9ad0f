"""A small model of brokers with transactions, for tests of clients that use them: no network, no time of its own.

`ModelCluster` has the state that Kafka's coordinator and partitions have, as far as a client of transaction version 1
can see it; `ModelClient` stands for `ClusterClient`, and `ModelLog` for the topic of decisions, with the records and
rules of the real one. `hook` is called before every request with its name, and may raise, as a process that dies there
would.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.client.transactions import Transaction
from millrace.errors import ApiError, ErrorCode
from millrace.model import TopicPartition
from millrace.spark.decisions import Claim, Decision, Series, State, after, key_of, read_entry, value_of


class Killed(BaseException):
    """The end of a process: nothing it would do after this happens."""


@dataclass
class _Id:
    """What the coordinator knows of one transactional id."""

    producer_id: int
    epoch: int = -1
    state: str = "empty"
    rows: list[Any] = field(default_factory=list)


class ModelCluster:
    """Rows are written to one place; `committed` has those of committed transactions, in the order of the commits."""

    def __init__(self) -> None:
        self.ids: dict[str, _Id] = {}
        self.committed: list[Any] = []
        self.log: list[tuple[bytes, bytes | None]] = []

    # what clients ask

    def init(self, name: str) -> Transaction:
        known = self.ids.setdefault(name, _Id(len(self.ids)))
        if known.state == "open":
            self._end(known, commit=False)
        known.epoch += 1
        known.state = "empty"
        return Transaction(name, known.producer_id, known.epoch)

    def write(self, transaction: Transaction, row: Any) -> None:
        known = self._of(transaction)
        if known.state not in ("empty", "open"):
            raise ApiError(ErrorCode.INVALID_TXN_STATE)
        known.state = "open"
        known.rows.append(row)

    def check_open(self, transaction: Transaction) -> None:
        if self._of(transaction).state != "open":
            raise ApiError(ErrorCode.INVALID_TXN_STATE)

    def end(self, transaction: Transaction, *, commit: bool) -> None:
        known = self._of(transaction)
        wanted = "committed" if commit else "aborted"
        if known.state == "open":
            self._end(known, commit=commit)
        elif known.state != wanted:
            raise ApiError(ErrorCode.INVALID_TXN_STATE)

    def _of(self, transaction: Transaction) -> _Id:
        known = self.ids[transaction.transactional_id]
        if (known.producer_id, known.epoch) != transaction[1:]:
            raise ApiError(ErrorCode.PRODUCER_FENCED)
        return known

    def _end(self, known: _Id, *, commit: bool) -> None:
        if commit:
            self.committed += known.rows
        known.rows = []
        known.state = "committed" if commit else "aborted"

    # what happens by itself

    def time_out(self) -> None:
        """Abort everything that is open, as after transaction.timeout.ms; the coordinator raises the epoch."""
        for known in self.ids.values():
            if known.state == "open":
                self._end(known, commit=False)
                known.epoch += 1

    def compact(self) -> None:
        last = {key: index for index, (key, _) in enumerate(self.log)}
        self.log = [entry for index, entry in enumerate(self.log) if last[entry[0]] == index and entry[1] is not None]

    @property
    def open_rows(self) -> list[Any]:
        return [row for known in self.ids.values() if known.state == "open" for row in known.rows]


class ModelClient:
    """One process' way to the cluster."""

    def __init__(self, cluster: ModelCluster, hook: Callable[[str], None] | None = None) -> None:
        self.cluster = cluster
        self.hook = hook or (lambda _: None)

    def write(self, transaction: Transaction, row: Any) -> None:
        self.hook("write")
        self.cluster.write(transaction, row)


class ModelTransactions:
    """In the place of the module `millrace.client.transactions`."""

    @staticmethod
    def are_served(client: ModelClient) -> bool:
        del client
        return True

    @staticmethod
    def begin(client: ModelClient, name: str, timeout_ms: int, other_id: Callable[[], str]) -> Transaction:
        del timeout_ms
        try:
            client.hook("init")
        except ApiError:
            return client.cluster.init(other_id())
        return client.cluster.init(name)

    @staticmethod
    def shut_out(client: ModelClient, names: Collection[str]) -> None:
        for name in names:
            client.hook("shut out")
            client.cluster.init(name)

    @staticmethod
    def not_open(
        client: ModelClient, transactions: Mapping[Transaction, Collection[TopicPartition]]
    ) -> dict[Transaction, ApiError]:
        return _refused(client, "check", transactions, client.cluster.check_open)

    @staticmethod
    def end(client: ModelClient, transactions: Collection[Transaction], *, commit: bool) -> dict[Transaction, ApiError]:
        what = "commit" if commit else "abort"
        return _refused(client, what, transactions, lambda each: client.cluster.end(each, commit=commit))


def _refused(
    client: ModelClient, what: str, transactions: Collection[Transaction], ask: Callable[[Transaction], None]
) -> dict[Transaction, ApiError]:
    refused = {}
    for each in transactions:
        client.hook(what)
        try:
            ask(each)
        except ApiError as error:
            refused[each] = error
    return refused


class ModelLog:
    """In the place of `DecisionLog`: the same records and rules, over a list."""

    def __init__(self, client: ModelClient) -> None:
        self.client: Any = client
        self._cluster = client.cluster

    def state(self, sink: str) -> State:
        self.client.hook("read")
        return self._fold(sink)

    def claim(self, sink: str, series: Series) -> State:
        claim = self._fold(sink).claim(series)
        self.client.hook("claim")
        self._append(sink, claim)
        state = self.state(sink)
        if state.series == series:
            self.client.hook("claim")
            self._append(sink, state.claim(series))
        return state

    def decide(self, sink: str, decision: Decision) -> bool:
        self.client.hook("decide")
        self._append(sink, decision)
        return self._fold(sink).decided == decision

    def _fold(self, sink: str) -> State:
        state = State()
        for key, value in self._cluster.log:
            entry = read_entry(key, value)
            if entry is not None and entry[0] == sink:
                state = after(state, entry[1])
        return state

    def _append(self, sink: str, record: Claim | Decision) -> None:
        self._cluster.log.append((key_of(sink, record), value_of(record)))
