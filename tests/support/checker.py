"""Judges a history: is there an order of appends that explains everything the clients were told?

Pure: events in, a `Report` out. Each anomaly is named after the list that Jepsen keeps for Kafka-like systems:

    lost           acknowledged, at or below the highest offset anybody read, and read by nobody
    unseen         acknowledged (or read once), and not in the final read of everything
    duplicate      one value at two offsets
    inconsistent   one offset with two values, from acknowledgements and reads together
    phantom        a value that nobody sent; `damaged`: bytes that are no record of ours
    aborted-read   a value whose send is known to have failed
    nonmonotonic-send   a producer's later record at a lower offset; `reordered`: the same, found in the final read
    nonmonotonic-poll   a consumer went back; `poll-skip`: it left out a record, both within one assignment
    stale-append   acknowledged at an offset not above all that had been acknowledged before the send began

and of a group that reads and commits (`checker_groups`):

    missed         acknowledged, and given to no member of the group
    commit-back    a commit was accepted that is below one accepted before it was sent
    resumed-before a member began below what had been committed when it got the partition

and of a queue whose members take and accept (`checker_queues`):

    not-accepted   in the topic, and no member was ever done with it
    again          given to a member that asked after another one was told that it was done with it

and of transactions (`checker_transactions`), where `lost` is a committed one of which nothing can be read:

    torn           some records of a transaction can be read, and others not
    circular       transactions that read from each other, in a circle (G1c over write-read edges)
    hanging        a last stable offset that does not reach the high watermark
    aborted-offset a member began where only an aborted transaction had put the group
    unbalanced     the accounts of a bank do not add up to what was put in

Offsets may have gaps (control records), so "left out" means an offset at which some record is known to be. An
acknowledgement without an offset (librdkafka after DUPLICATE_SEQUENCE_NUMBER) counts as acknowledged, and its offset is
taken from the reads.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Final

from support.history import DAMAGED, Action, Event, Outcome, producer_of

EXAMPLES: Final = 5
"""How many cases of an anomaly are described; all are counted."""
_READS: Final = (Action.POLL, Action.FINAL)
_OF_GROUPS: Final = (Action.ASSIGN, Action.COMMIT, Action.TAKE, Action.ACCEPT)


class Anomaly(StrEnum):
    LOST = "lost"
    UNSEEN = "unseen"
    DUPLICATE = "duplicate"
    INCONSISTENT = "inconsistent"
    PHANTOM = "phantom"
    DAMAGED = "damaged"
    ABORTED_READ = "aborted-read"
    NONMONOTONIC_SEND = "nonmonotonic-send"
    REORDERED = "reordered"
    NONMONOTONIC_POLL = "nonmonotonic-poll"
    POLL_SKIP = "poll-skip"
    STALE_APPEND = "stale-append"
    MISSED = "missed"
    COMMIT_BACK = "commit-back"
    RESUMED_BEFORE = "resumed-before"
    NOT_ACCEPTED = "not-accepted"
    AGAIN = "again"
    TORN = "torn"
    CIRCULAR = "circular"
    HANGING = "hanging"
    ABORTED_OFFSET = "aborted-offset"
    UNBALANCED = "unbalanced"


@dataclass(slots=True)
class Report:
    """What a history shows."""

    acked: int = 0
    failed: int = 0
    unknown: int = 0
    """Sends that may or may not have been appended."""
    polled: int = 0
    final: int = 0
    longest_pause_s: float = 0.0
    """The longest time that a key went without an acknowledgement while somebody waited for one."""
    counts: dict[Anomaly, int] = field(default_factory=dict)
    examples: dict[Anomaly, list[str]] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        return not self.counts

    def note(self, anomaly: Anomaly, text: str) -> None:
        self.counts[anomaly] = self.counts.get(anomaly, 0) + 1
        shown = self.examples.setdefault(anomaly, [])
        if len(shown) < EXAMPLES:
            shown.append(text)

    def lines(self) -> list[str]:
        """The anomalies with a few examples each, for people."""
        return [
            f"{anomaly}: {count}; {'; '.join(self.examples[anomaly])}" for anomaly, count in sorted(self.counts.items())
        ]


@dataclass(slots=True)
class _Send:
    """One send and what became of it."""

    process: str
    op: int
    value: int
    invoked_ns: int
    acked_before: int
    """The highest offset of its key that was acknowledged when this send began."""
    outcome: Outcome = Outcome.INFO
    offset: int = -1
    ended_ns: int = -1


@dataclass(slots=True)
class _Key:
    """All that happened to one partition."""

    name: str
    sends: dict[int, _Send] = field(default_factory=dict)
    reads: list[Event] = field(default_factory=list)
    highest_acked: int = -1


def check(events: Iterable[Event]) -> Report:
    """Judge the events of all clients together. O(n log n)."""
    report = Report()
    for key in _by_key(events):
        _count(key, report)
        _check_offsets(key, report)
        _check_reads_against_sends(key, report)
        _check_complete(key, report)
        _check_send_order(key, report)
        _check_poll_order(key, report)
        _check_real_time(key, report)
        report.longest_pause_s = max(report.longest_pause_s, _longest_pause_s(key))
    return report


def _by_key(events: Iterable[Event]) -> list[_Key]:
    keys: dict[str, _Key] = {}
    # At equal times an invoke goes first: it is not known to have come after the acknowledgement.
    for event in sorted(events, key=lambda event: (event.time_ns, event.type is not Outcome.INVOKE)):
        if event.action in _OF_GROUPS:
            continue
        key = keys.setdefault(event.key, _Key(event.key))
        if event.action in _READS:
            key.reads.append(event)
        elif event.type is Outcome.INVOKE:
            key.sends[event.value] = _Send(event.process, event.op, event.value, event.time_ns, key.highest_acked)
        else:
            _end(key, event)
    return list(keys.values())


def _end(key: _Key, event: Event) -> None:
    send = key.sends[event.value]
    send.outcome, send.offset, send.ended_ns = event.type, event.offset, event.time_ns
    if event.type is Outcome.OK:
        key.highest_acked = max(key.highest_acked, event.offset)


def _count(key: _Key, report: Report) -> None:
    for send in key.sends.values():
        report.acked += send.outcome is Outcome.OK
        report.failed += send.outcome is Outcome.FAIL
        report.unknown += send.outcome is Outcome.INFO
    for read in key.reads:
        report.polled += read.action is Action.POLL
        report.final += read.action is Action.FINAL


def _check_offsets(key: _Key, report: Report) -> None:
    values: dict[int, set[int]] = defaultdict(set)
    offsets: dict[int, set[int]] = defaultdict(set)
    seen = [(send.offset, send.value) for send in key.sends.values() if send.outcome is Outcome.OK and send.offset >= 0]
    for offset, value in seen + [(read.offset, read.value) for read in key.reads if read.value != DAMAGED]:
        values[offset].add(value)
        offsets[value].add(offset)
    for offset, found in values.items():
        if len(found) > 1:
            report.note(Anomaly.INCONSISTENT, f"{key.name} offset {offset}: {shown(*found)}")
    for value, places in offsets.items():
        if len(places) > 1:
            report.note(Anomaly.DUPLICATE, f"{key.name} {shown(value)} at {sorted(places)}")


def _check_reads_against_sends(key: _Key, report: Report) -> None:
    for read in key.reads:
        if read.value == DAMAGED:
            report.note(Anomaly.DAMAGED, f"{key.name} offset {read.offset}, read by {read.process}")
            continue
        send = key.sends.get(read.value)
        if send is None:
            report.note(Anomaly.PHANTOM, f"{key.name} offset {read.offset}: {shown(read.value)}")
        elif send.outcome is Outcome.FAIL:
            report.note(Anomaly.ABORTED_READ, f"{key.name} offset {read.offset}: {shown(read.value)}")


def _check_complete(key: _Key, report: Report) -> None:
    read_by_anybody = {read.value for read in key.reads}
    read_in_the_end = {read.value for read in key.reads if read.action is Action.FINAL}
    highest_read = max((read.offset for read in key.reads), default=-1)
    for send in key.sends.values():
        acked = send.outcome is Outcome.OK
        if acked and send.value not in read_by_anybody and send.offset <= highest_read:
            report.note(Anomaly.LOST, f"{key.name} {shown(send.value)} acknowledged at {send.offset}")
        # What a consumer was given was committed, whatever its producer was told.
        if (acked or send.value in read_by_anybody) and send.value not in read_in_the_end:
            report.note(Anomaly.UNSEEN, f"{key.name} {shown(send.value)} at {send.offset}")


def _check_send_order(key: _Key, report: Report) -> None:
    by_process: dict[str, list[_Send]] = defaultdict(list)
    for send in key.sends.values():
        if send.outcome is Outcome.OK and send.offset >= 0:
            by_process[send.process].append(send)
    for process, sends in by_process.items():
        sends.sort(key=lambda send: send.op)
        for earlier, later in pairwise(sends):
            if later.offset <= earlier.offset:
                text = f"{key.name} {process} op {earlier.op} at {earlier.offset}, op {later.op} at {later.offset}"
                report.note(Anomaly.NONMONOTONIC_SEND, text)
    _check_log_order(key, report)


def _check_log_order(key: _Key, report: Report) -> None:
    """In the log, too, the records of one producer lie in the order they were sent."""
    last: dict[int, tuple[int, int]] = {}
    final = sorted((read.offset, read.value) for read in key.reads if read.action is Action.FINAL)
    for offset, value in final:
        send = key.sends.get(value)
        if send is None:
            continue
        producer = producer_of(value)
        op, place = last.get(producer, (-1, -1))
        if send.op < op:
            report.note(Anomaly.REORDERED, f"{key.name} op {op} at {place}, op {send.op} at {offset}")
        last[producer] = (send.op, offset)


def _check_poll_order(key: _Key, report: Report) -> None:
    acked = {send.offset for send in key.sends.values() if send.outcome is Outcome.OK and send.offset >= 0}
    known = sorted(acked | {read.offset for read in key.reads})
    sequences: dict[tuple[str, int], list[int]] = defaultdict(list)
    for read in key.reads:
        sequences[read.process, read.generation].append(read.offset)
    for (process, _), offsets in sequences.items():
        for earlier, later in pairwise(offsets):
            if later <= earlier:
                report.note(Anomaly.NONMONOTONIC_POLL, f"{key.name} {process}: {earlier}, then {later}")
            else:
                skipped = _strictly_between(known, earlier, later)
                if skipped:
                    report.note(Anomaly.POLL_SKIP, f"{key.name} {process}: {earlier}, then {later}, not {skipped[0]}")


def _strictly_between(known: Sequence[int], low: int, high: int) -> Sequence[int]:
    start = bisect_right(known, low)
    return [] if known[start] == high else known[start : bisect_right(known, high - 1)]


def _check_real_time(key: _Key, report: Report) -> None:
    read_at = {read.value: read.offset for read in key.reads}
    for send in key.sends.values():
        offset = send.offset if send.outcome is Outcome.OK and send.offset >= 0 else read_at.get(send.value, -1)
        if 0 <= offset <= send.acked_before:
            text = f"{key.name} {shown(send.value)} at {offset}, {send.acked_before} was acknowledged before"
            report.note(Anomaly.STALE_APPEND, text)


def _longest_pause_s(key: _Key) -> float:
    """From one acknowledgement, or the first send, to the next acknowledgement or the end of the last send."""
    acked = sorted(send.ended_ns for send in key.sends.values() if send.outcome is Outcome.OK)
    if not key.sends:
        return 0.0
    first = min(send.invoked_ns for send in key.sends.values())
    last = max(max(send.ended_ns, send.invoked_ns) for send in key.sends.values())
    return max(later - earlier for earlier, later in pairwise([first, *acked, last])) / 1e9


def shown(*values: int) -> str:
    return ", ".join(f"producer {producer_of(value)} record {value & 0xFFFFFFFF}" for value in sorted(values))
