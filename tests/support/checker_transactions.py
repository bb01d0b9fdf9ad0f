"""Judges what transactions did and what read_committed readers saw: all of one or nothing, once, and in order.

Pure, like `checker`, whose anomalies these are. A transaction is (process, op). It was *committed* when a commit was
answered; it was *aborted* when nobody ever asked to commit it, or the client learned that it was not; else its outcome
is unknown, and it may be either, but still whole. Readers are all read_committed; where one notes a place without a
value, it read something that is not the work of these transactions.

What a copy job must have done is `check_copy`: its output is its input. Everything else holds for any workload.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from support.checker import Anomaly, Report
from support.checker_groups import AcceptedCommits
from support.history import ABORT, COMMIT, DAMAGED, UNKNOWN, Action, Event, Outcome

OF_TRANSACTIONS: Final = frozenset(
    {Anomaly.TORN, Anomaly.CIRCULAR, Anomaly.HANGING, Anomaly.ABORTED_OFFSET, Anomaly.UNBALANCED}
)
TransactionId = tuple[str, int]
_READS: Final = (Action.POLL, Action.FINAL)


@dataclass(slots=True)
class Transaction:
    """One transaction as its client knows it."""

    id: TransactionId
    sent: list[Event] = field(default_factory=list)
    offsets: list[Event] = field(default_factory=list)
    asked_to_commit: bool = False
    outcome: Outcome = Outcome.INFO
    ended_ns: int = -1

    @property
    def committed(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def aborted(self) -> bool:
        return self.outcome is Outcome.FAIL or not self.asked_to_commit

    def __str__(self) -> str:
        process, number = self.id
        fate = "committed" if self.committed else "aborted" if self.aborted else "of unknown outcome"
        return f"{process} transaction {number} ({fate})"


def transactions_of(events: Iterable[Event]) -> dict[TransactionId, Transaction]:
    """Every transaction that sent something or was ended."""
    found: dict[TransactionId, Transaction] = {}
    for event in events:
        if event.action not in (Action.SEND, Action.OFFSETS, Action.END):
            continue
        one = found.setdefault((event.process, event.op), Transaction((event.process, event.op)))
        if event.action is Action.END:
            _end(one, event)
        elif event.type is Outcome.INVOKE:
            (one.sent if event.action is Action.SEND else one.offsets).append(event)
    return found


def _end(one: Transaction, event: Event) -> None:
    if event.key == COMMIT:
        one.asked_to_commit = True
        if event.type is not Outcome.INVOKE:
            one.outcome, one.ended_ns = event.type, event.time_ns
    elif event.key == ABORT and event.type is not Outcome.INVOKE:
        one.ended_ns = event.time_ns


def check_transactions(events: Iterable[Event]) -> Report:
    """Judge the events of all clients of one round, which are in the order of their times."""
    ordered = list(events)
    report = Report()
    transactions = transactions_of(ordered)
    reads = [event for event in ordered if event.action in _READS and event.value != UNKNOWN]
    writers = {sent.value: one for one in transactions.values() for sent in one.sent}
    _count(transactions, reads, report)
    _check_reads(reads, writers, report)
    _check_places(reads, report)
    _check_whole(transactions, reads, report)
    _check_order(reads, report)
    _check_circles(transactions, reads, writers, report)
    _check_offsets(ordered, transactions, report)
    for event in ordered:
        if event.action is Action.STABLE and event.offset < event.value:
            report.note(Anomaly.HANGING, f"{event.key} is stable up to {event.offset} of {event.value}")
    return report


def _count(transactions: Mapping[TransactionId, Transaction], reads: list[Event], report: Report) -> None:
    for one in transactions.values():
        report.acked += len(one.sent) if one.committed else 0
        report.failed += len(one.sent) if one.aborted else 0
        report.unknown += 0 if one.committed or one.aborted else len(one.sent)
    for read in reads:
        report.polled += read.action is Action.POLL
        report.final += read.action is Action.FINAL
    committed_ns = sorted(one.ended_ns for one in transactions.values() if one.committed)
    report.longest_pause_s = max((later - earlier for earlier, later in pairwise(committed_ns)), default=0) / 1e9


def _check_reads(reads: list[Event], writers: Mapping[int, Transaction], report: Report) -> None:
    for read in reads:
        place = f"{read.key} offset {read.offset}, read by {read.process}"
        writer = writers.get(read.value)
        if read.value == DAMAGED:
            report.note(Anomaly.DAMAGED, place)
        elif writer is None:
            report.note(Anomaly.PHANTOM, f"{place}: {read.value}")
        elif writer.aborted:
            report.note(Anomaly.ABORTED_READ, f"{place}: of {writer}")


def _check_places(reads: list[Event], report: Report) -> None:
    """One value has one place, and one place one value."""
    values: dict[tuple[str, int], set[int]] = defaultdict(set)
    places: dict[int, set[tuple[str, int]]] = defaultdict(set)
    for read in reads:
        if read.value != DAMAGED:
            values[read.key, read.offset].add(read.value)
            places[read.value].add((read.key, read.offset))
    for (key, offset), found in values.items():
        if len(found) > 1:
            report.note(Anomaly.INCONSISTENT, f"{key} offset {offset}: {sorted(found)}")
    for value, several in places.items():
        if len(several) > 1:
            report.note(Anomaly.DUPLICATE, f"{value} at {sorted(several)}")


def _check_whole(transactions: Mapping[TransactionId, Transaction], reads: list[Event], report: Report) -> None:
    """In the end all of a transaction can be read or nothing: all, where it was committed or somebody read of it."""
    last = {read.value for read in reads if read.action is Action.FINAL}
    ever = {read.value for read in reads}
    for one in transactions.values():
        if one.aborted or not one.sent:
            continue
        there = sum(sent.value in last for sent in one.sent)
        if 0 < there < len(one.sent):
            gone = next(sent for sent in one.sent if sent.value not in last)
            report.note(Anomaly.TORN, f"{one}: {there} of {len(one.sent)} records, not {gone.value} in {gone.key}")
        elif there == 0 and one.committed:
            report.note(Anomaly.LOST, f"{one}: {len(one.sent)} records")
        elif there == 0 and any(sent.value in ever for sent in one.sent):
            report.note(Anomaly.UNSEEN, f"{one}: {len(one.sent)} records, of which some had been read")


def _check_order(reads: list[Event], report: Report) -> None:
    """Offsets grow within an assignment, and the records of one producer lie in a partition in the order of sending."""
    positions: dict[tuple[str, str, int], int] = {}
    for read in reads:
        reader = (read.process, read.key, read.generation)
        if read.offset <= positions.get(reader, -1):
            report.note(
                Anomaly.NONMONOTONIC_POLL, f"{read.key} {read.process}: {positions[reader]}, then {read.offset}"
            )
        positions[reader] = read.offset
    last: dict[tuple[str, int], Event] = {}
    for read in sorted((read for read in reads if read.action is Action.FINAL), key=lambda read: read.offset):
        if read.value == DAMAGED:
            continue
        producer = (read.key, read.value >> 32)
        before = last.get(producer)
        if before is not None and read.value < before.value:
            text = f"{read.key}: {before.value} at {before.offset}, {read.value} at {read.offset}"
            report.note(Anomaly.REORDERED, text)
        last[producer] = read


def _check_circles(
    transactions: Mapping[TransactionId, Transaction],
    reads: list[Event],
    writers: Mapping[int, Transaction],
    report: Report,
) -> None:
    """Who reads of a transaction comes after it: no transaction may come after itself."""
    readers: dict[TransactionId, set[TransactionId]] = defaultdict(set)
    for read in reads:
        reader = (read.process, read.op)
        if read.value in writers and reader in transactions:
            readers[writers[read.value].id].add(reader)
    before = dict.fromkeys(transactions, 0)
    for several in readers.values():
        for reader in several:
            before[reader] += 1
    first = [one for one, count in before.items() if count == 0]
    while first:
        one = first.pop()
        for reader in readers.get(one, ()):
            before[reader] -= 1
            if before[reader] == 0:
                first.append(reader)
    # What is left is in a circle, or comes after one.
    left = {one for one, count in before.items() if count}
    while last := {one for one in left if not readers.get(one, set()) & left}:
        left -= last
    if left:
        told = ", ".join(str(transactions[one]) for one in sorted(left)[:6])
        report.note(Anomaly.CIRCULAR, f"{len(left)} transactions read from each other: {told}")


# --- what transactions commit for a group -----------------------------------------------------------------------------


def _check_offsets(events: list[Event], transactions: Mapping[TransactionId, Transaction], report: Report) -> None:
    """A group goes on where the last committed transaction put it: never before, never where an aborted one did."""
    accepted: dict[str, AcceptedCommits] = defaultdict(AcceptedCommits)
    possible = {event.key: {0} for event in events if event.action is Action.OFFSETS}
    ended = sorted((one for one in transactions.values() if not one.aborted), key=lambda one: one.ended_ns)
    for one in ended:
        for moved in one.offsets:
            possible[moved.key].add(moved.offset)
            if one.committed:
                accepted[moved.key].add(one.ended_ns, moved.offset)
    for one in ended:
        for moved in one.offsets:
            before = accepted[moved.key].before(moved.time_ns)
            if one.committed and moved.offset < before:
                report.note(Anomaly.COMMIT_BACK, f"{moved.key} {one}: {moved.offset}, {before} was committed before")
    begun: dict[tuple[str, int, str], int] = {}
    for event in events:
        assignment = (event.process, event.generation, event.key)
        if event.key not in possible:
            continue
        if event.action is Action.ASSIGN:
            begun[assignment] = accepted[event.key].before(event.time_ns)
        elif event.action is Action.POLL and assignment in begun:
            committed = begun.pop(assignment)
            text = f"{event.key} {event.process}: began at {event.offset}"
            if event.offset < committed:
                report.note(Anomaly.RESUMED_BEFORE, f"{text}, {committed} was committed")
            elif event.offset not in possible[event.key]:
                report.note(Anomaly.ABORTED_OFFSET, f"{text}, where no committed transaction ended")


# --- what single workloads promise ------------------------------------------------------------------------------------


def check_copy(events: Iterable[Event], output: Mapping[str, int], report: Report) -> None:
    """Each of these partitions is the copy of one with so many records: all of them, once, in their order."""
    ordered = list(events)
    sources = {
        event.value: event.offset for event in ordered if event.action is Action.SEND and event.type is Outcome.INVOKE
    }
    copied: dict[str, list[int]] = defaultdict(list)
    for read in sorted((event for event in ordered if event.action is Action.FINAL), key=lambda event: event.offset):
        if read.value in sources:
            copied[read.key].append(sources[read.value])
    for key, count in output.items():
        times: dict[int, int] = defaultdict(int)
        for source in copied[key]:
            times[source] += 1
        for source in range(count):
            if times[source] == 0:
                report.note(Anomaly.MISSED, f"{key}: record {source} was not copied")
            elif times[source] > 1:
                report.note(Anomaly.DUPLICATE, f"{key}: record {source} was copied {times[source]} times")
        for earlier, later in pairwise(copied[key]):
            if later < earlier:
                report.note(Anomaly.REORDERED, f"{key}: record {later} after {earlier}")


def check_balances(events: Iterable[Event], total: int, report: Report) -> None:
    """Every time that a bank looked, its accounts had what was put in."""
    for event in events:
        if event.action is Action.BALANCE and event.value != total:
            report.note(Anomaly.UNBALANCED, f"{event.key} {event.process}: {event.value}, not {total}")
