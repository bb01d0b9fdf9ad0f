"""Judges what the members of a queue were given and what they accepted: everything, and nothing again after that.

Pure, like `checker`, whose anomalies these are. A record is its place in a topic. Members that are paused see late
what they were given early, so a delivery counts from the moment the member asked for it; of members whose client does
not tell that, deliveries are not judged. That two members are told that they accepted a record is no anomaly: what is
said late of a record before the start of the queue is answered, here and by Kafka, as if it had been in time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from support.checker import Anomaly, Report
from support.history import Action, Event, Outcome

OF_QUEUES: Final = frozenset({Anomaly.NOT_ACCEPTED, Anomaly.AGAIN})

RecordKey = tuple[str, int]


@dataclass(slots=True)
class QueueCounts:
    """How much there was to judge."""

    taken: int = 0
    accepted: int = 0
    undecided: int = 0
    """Records whose only accept has no answer: they are not delivered again, so it was heard."""


@dataclass(slots=True)
class _Accepts:
    """What members were told of their accepts of one record; the times of those that were confirmed, in order."""

    confirmed: list[tuple[int, str]] = field(default_factory=list)
    undecided: set[tuple[str, int]] = field(default_factory=set)


def check_queue(events: Iterable[Event], report: Report) -> QueueCounts:
    """Note what is wrong with a queue that was drained; the events are in the order of their times."""
    ordered = list(events)
    accepts = _accepts(ordered)
    counts = QueueCounts(accepted=sum(bool(each.confirmed) for each in accepts.values()))
    for record in sorted({(event.key, event.offset) for event in ordered if event.action is Action.FINAL}):
        found = accepts.get(record)
        if found is None or not (found.confirmed or found.undecided):
            report.note(Anomaly.NOT_ACCEPTED, f"{record[0]} offset {record[1]}")
        elif not found.confirmed:
            counts.undecided += 1
    counts.taken = _check_deliveries(ordered, accepts, report)
    return counts


def _accepts(events: list[Event]) -> dict[RecordKey, _Accepts]:
    found: dict[RecordKey, _Accepts] = {}
    for event in events:
        if event.action is not Action.ACCEPT:
            continue
        record = found.setdefault((event.key, event.offset), _Accepts())
        attempt = (event.process, event.op)
        if event.type is Outcome.INVOKE:
            record.undecided.add(attempt)
        elif event.type is Outcome.OK:
            record.undecided.discard(attempt)
            record.confirmed.append((event.time_ns, event.process))
        elif event.type is Outcome.FAIL:
            record.undecided.discard(attempt)
    return found


def _check_deliveries(events: list[Event], accepts: dict[RecordKey, _Accepts], report: Report) -> int:
    asked_ns: dict[tuple[str, int], int] = {}
    taken = 0
    for event in events:
        if event.action is not Action.TAKE:
            continue
        if event.type is Outcome.INVOKE:
            asked_ns[event.process, event.op] = event.time_ns
            continue
        taken += 1
        asked = asked_ns.get((event.process, event.op))
        found = accepts.get((event.key, event.offset))
        if asked is not None and found is not None and found.confirmed and found.confirmed[0][0] < asked:
            by = found.confirmed[0][1]
            report.note(Anomaly.AGAIN, f"{event.key} offset {event.offset} to {event.process}, accepted by {by}")
    return taken
