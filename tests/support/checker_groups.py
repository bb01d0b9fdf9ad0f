"""Judges what the members of one group were given and what they committed: at least once, and never back.

Pure, like `checker`, whose anomalies these are. Times of different processes are compared only where one event is known
to be over before the other began: a commit that was accepted before another one was sent, or before a member was told
that a partition is its own (it asks for the committed offset after that).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from support.checker import Anomaly, Report, shown
from support.history import Action, Event, Outcome

OF_GROUPS: Final = frozenset({Anomaly.MISSED, Anomaly.COMMIT_BACK, Anomaly.RESUMED_BEFORE})


@dataclass(slots=True)
class AcceptedCommits:
    """The commits of one partition that were accepted: when, and the highest offset by then. Times only grow."""

    times_ns: list[int] = field(default_factory=list)
    highest: list[int] = field(default_factory=list)

    def add(self, time_ns: int, offset: int) -> None:
        self.times_ns.append(time_ns)
        self.highest.append(max(offset, self.highest[-1] if self.highest else -1))

    def before(self, time_ns: int) -> int:
        """The highest offset accepted before a time; -1 where there is none."""
        count = bisect_left(self.times_ns, time_ns)
        return self.highest[count - 1] if count else -1


def check_group(events: Iterable[Event], report: Report) -> None:
    """Note what is wrong with how a group read; the events are in the order of their times."""
    ordered = list(events)
    _check_given(ordered, report)
    accepted = _accepted_commits(ordered)
    _check_commits(ordered, accepted, report)
    _check_beginnings(ordered, accepted, report)


def _check_given(events: list[Event], report: Report) -> None:
    given = {event.value for event in events if event.action is Action.POLL}
    for event in events:
        if event.action is Action.SEND and event.type is Outcome.OK and event.value not in given:
            report.note(Anomaly.MISSED, f"{event.key} {shown(event.value)} at {event.offset}")


def _accepted_commits(events: list[Event]) -> dict[str, AcceptedCommits]:
    accepted: dict[str, AcceptedCommits] = defaultdict(AcceptedCommits)
    for event in events:
        if event.action is Action.COMMIT and event.type is Outcome.OK:
            accepted[event.key].add(event.time_ns, event.offset)
    return accepted


def _check_commits(events: list[Event], accepted: dict[str, AcceptedCommits], report: Report) -> None:
    sent_ns: dict[tuple[str, int, str], int] = {}
    for event in events:
        if event.action is not Action.COMMIT:
            continue
        commit = (event.process, event.op, event.key)
        if event.type is Outcome.INVOKE:
            sent_ns[commit] = event.time_ns
        elif event.type is Outcome.OK:
            before = accepted[event.key].before(sent_ns[commit])
            if before > event.offset:
                text = f"{event.key} {event.process}: {event.offset}, {before} was committed before"
                report.note(Anomaly.COMMIT_BACK, text)


def _check_beginnings(events: list[Event], accepted: dict[str, AcceptedCommits], report: Report) -> None:
    begun: dict[tuple[str, int, str], int] = {}
    for event in events:
        assignment = (event.process, event.generation, event.key)
        if event.action is Action.ASSIGN:
            begun[assignment] = accepted[event.key].before(event.time_ns)
        elif event.action is Action.POLL:
            committed = begun.pop(assignment, -1)
            if event.offset < committed:
                text = f"{event.key} {event.process}: began at {event.offset}, {committed} was committed"
                report.note(Anomaly.RESUMED_BEFORE, text)
