"""One round of a fault test of transactions: as in `rounds`, with programs that write in transactions.

There are three kinds of them (`transaction_member`), and a kind of round for each. A round is green when every
transaction can be read whole or not at all, as its program was told; and
    copy    the output is the input: each record, once, in order, and the group is at the end of the input
    mixed   no transactions read from each other in a circle
    bank    every time that a bank looked, its accounts added up
and after healing no last stable offset stays behind.
"""

from __future__ import annotations

import random
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Final

from confluent_kafka import TopicPartition

from cluster.group_rounds import OFFSETS_TOPIC
from cluster.group_rounds import SETTINGS as GROUP_SETTINGS
from cluster.rounds import (
    PARTITIONS,
    TROUBLE,
    Clients,
    Fault,
    Result,
    Scale,
    Stage,
    check_metadata,
    create_topic,
    differences,
    disturb,
)
from cluster.transaction_member import TOTAL, ends_of, read_books, read_to_the_end
from cluster.workload import key_of
from millrace.client.cluster import ClusterClient
from millrace.client.settings import ClientSettings
from millrace.errors import ApiError
from millrace.model import TopicPartition as ModelPartition
from support.checker import Report
from support.checker_transactions import check_balances, check_copy, check_transactions
from support.cluster_processes import ClusterProcesses, wait_for
from support.history import Action, Event, HistoryWriter, Outcome, decode_record, read_histories
from support.servers import ServerFailed
from support.tcp_proxy import LateRequests

TRANSACTION_TIMEOUT_MS: Final = 6_000
TRANSACTIONS_TOPIC: Final = "__transaction_state"
SETTINGS: Final = (
    *GROUP_SETTINGS,
    ("group.min.session.timeout.ms", "1000"),
    ("group.initial.rebalance.delay.ms", "0"),
    # All transactional ids in one partition: its leader is their coordinator.
    ("transaction.state.log.num.partitions", "1"),
    ("transaction.abort.timed.out.transaction.cleanup.interval.ms", "500"),
)
_READ_WITHIN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class TransactionScale(Scale):
    """How large a round with transactions is. `acked` are records in committed transactions."""

    members: int = 3
    copied_within_s: float = 120.0
    """After healing everything that was written is copied within this."""
    stable_within_s: float = 30.0
    """After healing, and the timeout of whatever was left open, everything is decided within this."""


SHORT_COPY: Final = TransactionScale(
    acked=4_000, bounces=1, rate=800, session_timeout_ms=3000, outage_s=5, producers=1, members=2
)
FULL_COPY: Final = TransactionScale(
    acked=150_000, bounces=5, rate=2_500, session_timeout_ms=6000, outage_s=30, producers=1, members=2
)
SHORT_MIX: Final = TransactionScale(acked=1_000, bounces=1, rate=0, session_timeout_ms=3000, outage_s=5, producers=0)
SHORT_LATE: Final = replace(SHORT_MIX, acked=300)
FULL_MIX: Final = TransactionScale(
    acked=20_000, bounces=5, rate=0, session_timeout_ms=6000, outage_s=30, producers=0, members=5
)
FULL_LATE: Final = replace(FULL_MIX, acked=5_000)
SHORT_BANK: Final = TransactionScale(acked=400, bounces=1, rate=0, session_timeout_ms=3000, outage_s=5, producers=0)
FULL_BANK: Final = TransactionScale(
    acked=4_000, bounces=5, rate=0, session_timeout_ms=6000, outage_s=30, producers=0, members=5
)


class TransactionClients(Clients):
    """The programs of a round, a reader of what they write and, for copiers, a producer of what they read."""

    def __init__(
        self,
        client: Mapping[str, str],
        topic: str,
        scale: TransactionScale,
        directory: Path,
        *,
        job: str,
        more: tuple[str, ...],
    ) -> None:
        self.output = topic
        self.second = f"{topic}-2"
        """What copiers read, and what mixers write, too."""
        self.group = f"group-of-{topic}"
        self._job = job
        self._copied_within_s = scale.copied_within_s
        self._more = more
        self._paused: set[int] = set()
        self._slots: dict[int, int] = {}
        # The base class starts producers, whose topic is the one that is copied.
        super().__init__(client, self.second, scale, directory, consumers=0)
        self._topic = topic
        if job != "bank":
            self._start("consumer", 1)
        for slot in range(1, scale.members + 1):
            self.start_member(slot)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.resume_members()
        super().__exit__(kind, error, trace)

    @property
    def acked(self) -> int:
        """Records in committed transactions."""
        return sum(count for name, count in self._counts.items() if name.startswith("member"))

    @property
    def running(self) -> list[int]:
        return sorted(self._slots)

    def start_member(self, slot: int) -> int:
        """A program with the transactional id of this slot; its number."""
        number = sum(name.startswith("member") for name in self._counts) + 1
        more = ["--job", self._job, "--slot", str(slot), "--timeout-ms", str(TRANSACTION_TIMEOUT_MS)]
        more += ["--input", self.second, "--group", self.group, *self._more]
        self._start("member", number, *more, module="cluster.transaction_member")
        self._slots[number] = slot
        return number

    def slot(self, number: int) -> int:
        return self._slots[number]

    def client_id(self, number: int) -> str:
        return f"{self._job}-{self.slot(number)}"

    def kill_member(self, number: int) -> int:
        """kill -9: it may leave a transaction open. The slot that it had."""
        self._paused.discard(number)
        self._processes[f"member-{number}"].kill()
        self._forget(f"member-{number}")
        return self._slots.pop(number)

    def pause_member(self, number: int) -> None:
        self._processes[f"member-{number}"].send_signal(signal.SIGSTOP)
        self._paused.add(number)

    def resume_members(self) -> None:
        while self._paused:
            self._processes[f"member-{self._paused.pop()}"].send_signal(signal.SIGCONT)

    def stop(self) -> list[str]:
        problems = self._stop("producer")
        if self._job == "copier":
            try:
                self._wait_copied()
            except ServerFailed as error:
                problems.append(str(error))
        problems += self._stop("member")
        problems += self._stop("consumer")
        self._reap()
        return problems

    def histories(self) -> list[Path]:
        """Not those of the producers, who know nothing of transactions."""
        return [path for path in super().histories() if not path.name.startswith("producer")]

    def _wait_copied(self) -> None:
        """Wait until the group is at the end of the input."""
        ends = dict(enumerate(ends_of(self._client, [TopicPartition(self.second, each) for each in range(PARTITIONS)])))
        properties = {
            **self._client,
            "request.timeout.ms": "2000",
            "default.api.timeout.ms": "2000",
        }
        cluster = ClusterClient(ClientSettings.from_properties(properties))
        seen: dict[int, int | None] = {}

        def everything() -> bool | None:
            try:
                at = cluster.committed_offsets(self.group, [ModelPartition(self.second, index) for index in ends])
            except ApiError:
                return None
            seen.update({place.partition: offset for place, offset in at.items()})
            return True if all(seen[index] == end for index, end in ends.items() if end) else None

        try:
            wait_for(everything, self._copied_within_s, "the input was not copied", pause_s=0.2)
        except ServerFailed as error:
            raise ServerFailed(f"{error}: the group is at {seen} of {ends}") from None
        finally:
            cluster.close()


@dataclass(slots=True)
class TransactionStage(Stage):
    """What a fault of transactions acts on."""

    members: TransactionClients = field(kw_only=True)
    late: list[LateRequests] = field(default_factory=list)
    """What is still kept back when everything else is over."""

    def transaction_coordinator(self) -> int:
        return self.cluster.leader(TRANSACTIONS_TOPIC, 0)

    def group_coordinator(self) -> int:
        return self.cluster.leader(OFFSETS_TOPIC, 0)


TransactionFault = Callable[[TransactionStage], None]


def of_transactions(fault: TransactionFault) -> Fault:
    """A fault of transactions, as one of a stage: these rounds have no other."""

    def checked(stage: Stage) -> None:
        assert isinstance(stage, TransactionStage)
        fault(stage)

    return checked


def run_copy_round(cluster: ClusterProcesses, fault: Fault, scale: Scale, seed: int = 0) -> Result:
    """Copiers; their group is a classic one in every other round, and one of KIP-848 in the others."""
    return _run(cluster, fault, scale, seed, "copier", "--protocol", "consumer" if seed % 2 else "classic")


def run_mixed_round(cluster: ClusterProcesses, fault: Fault, scale: Scale, seed: int = 0) -> Result:
    return _run(cluster, fault, scale, seed, "mixer")


def run_late_round(cluster: ClusterProcesses, fault: Fault, scale: Scale, seed: int = 0) -> Result:
    """Mixers whose requests are late (`late_transactions`): of version 2, and before that in every other round."""
    return _run(cluster, fault, scale, seed, "mixer", "--late", "0" if seed % 2 else "2")


def run_bank_round(cluster: ClusterProcesses, fault: Fault, scale: Scale, seed: int = 0) -> Result:
    return _run(cluster, fault, scale, seed, "bank")


def _run(cluster: ClusterProcesses, fault: Fault, scale: Scale, seed: int, job: str, *more: str) -> Result:
    """One round on a running cluster, with topics of its own; everything that is wrong is in the result."""
    assert isinstance(scale, TransactionScale)
    result = Result()
    started = time.monotonic()
    topic = f"round-{uuid.uuid4().hex[:8]}"
    directory = cluster.home / "history" / topic
    directory.mkdir(parents=True)
    try:
        compacted = {
            "cleanup.policy": "compact",
            "internal.segment.bytes": "20000",
            "min.cleanable.dirty.ratio": "0.01",
        }
        create_topic(cluster, topic, settings=compacted if job == "bank" else None)
        create_topic(cluster, f"{topic}-2")
        with TransactionClients(cluster.client_settings, topic, scale, directory, job=job, more=more) as clients:
            stage = TransactionStage(cluster, clients, topic, scale, random.Random(seed), result.marks, members=clients)
            result.failures += disturb(stage, fault, result, first=scale.acked // 10)
            clients.resume_members()
            result.failures += clients.stop()
            _deliver_the_rest(stage)
            _judge(stage, result, job)
    except TROUBLE as error:
        result.failures.append(f"{type(error).__name__}: {error}")
    result.failures += [f"{broker} died by itself" for broker in cluster.brokers.values() if broker.died()]
    result.seconds = time.monotonic() - started
    return result


def _deliver_the_rest(stage: TransactionStage) -> None:
    """When nobody writes any more: whatever this begins, nobody will end."""
    for late in stage.late:
        count = len(late.kept)
        stage.mark(f"{count} late requests delivered at last, {stage.cluster.wires().deliver(late)} answered")


def _judge(stage: TransactionStage, result: Result, job: str) -> None:
    """Wait until everything is decided, read it, and look at it."""
    clients, client = stage.members, stage.cluster.client_settings
    topics = [stage.topic, clients.second] if job == "mixer" else [stage.topic]
    places = [TopicPartition(topic, index, 0) for topic in topics for index in range(PARTITIONS)]
    stable = _wait_stable(stage, places)
    with HistoryWriter(clients.directory / "final.history", "final") as history:
        if job == "bank":
            for bank, accounts in read_books(client, stage.topic, PARTITIONS).items():
                history.write(Outcome.OK, Action.BALANCE, bank, op=0, value=sum(accounts.values()))
        else:
            for message in read_to_the_end(client, places, _READ_WITHIN_S, stable):
                place, value = key_of(message.topic() or "", message.partition() or 0), decode_record(message.value())
                history.write(Outcome.OK, Action.FINAL, place, op=0, value=value, offset=message.offset() or 0)
    events = read_histories(clients.histories())
    result.report = check_transactions(events)
    if job == "bank":
        check_balances(events, TOTAL, result.report)
        result.report.acked = clients.acked
        looked = sum(event.action is Action.BALANCE for event in events)
        result.marks.append(f"{looked} times a bank looked at all of its accounts")
    elif job == "copier":
        _check_copy(stage, events, result.report)
    hung = sum(b"a call hangs" in path.read_bytes() for path in clients.directory.glob("member-*.err"))
    if hung:
        result.marks.append(f"{hung} programs hung in a call of librdkafka and began anew")
    check_metadata(stage, result)
    if job != "bank":  # replicas are compacted each at its own time
        for (topic, index), end in stable.items():
            result.failures += differences(stage, index, end, topic=topic)


def _check_copy(stage: TransactionStage, events: list[Event], report: Report) -> None:
    inputs = ends_of(
        stage.cluster.client_settings, [TopicPartition(stage.members.second, each) for each in range(PARTITIONS)]
    )
    check_copy(events, {key_of(stage.topic, index): end for index, end in enumerate(inputs)}, report)


def _wait_stable(stage: TransactionStage, places: list[TopicPartition]) -> dict[tuple[str, int], int]:
    """Wait until all is decided up to the high watermarks, and note how far it is; the last stable offsets."""
    client, scale = stage.cluster.client_settings, stage.scale
    assert isinstance(scale, TransactionScale)
    deadline = time.monotonic() + TRANSACTION_TIMEOUT_MS / 1000 + scale.stable_within_s
    ends = ends_of(client, places)
    while (stable := ends_of(client, places, "read_committed")) != ends and time.monotonic() < deadline:
        time.sleep(0.5)
        ends = ends_of(client, places)
    with HistoryWriter(stage.members.directory / "stable.history", "final") as history:
        for place, high, last in zip(places, ends, stable, strict=True):
            at = key_of(place.topic, place.partition)
            history.write(Outcome.OK, Action.STABLE, at, op=0, value=high, offset=last)
    return {(place.topic, place.partition): last for place, last in zip(places, stable, strict=True)}
