"""The checker of queues finds what is planted, and nothing in a history in which everything went well."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from support.checker import Anomaly, Report
from support.checker_queues import OF_QUEUES, QueueCounts, check_queue
from support.history import Action, Event, Outcome

KEY = "topic-0"


class Story:
    """Events with times that only grow."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._times = itertools.count(1)

    def add(self, process: str, op: int, outcome: Outcome, action: Action, offset: int = -1) -> None:
        self.events.append(Event(next(self._times), process, op, outcome, action, KEY, offset=offset))

    def ask(self, member: str, op: int) -> None:
        self.add(member, op, Outcome.INVOKE, Action.TAKE)

    def give(self, member: str, op: int, *offsets: int) -> None:
        for offset in offsets:
            self.add(member, op, Outcome.OK, Action.TAKE, offset)

    def accept(self, member: str, op: int, offset: int, outcome: Outcome | None = Outcome.OK) -> None:
        self.add(member, op, Outcome.INVOKE, Action.ACCEPT, offset)
        if outcome is not None:
            self.add(member, op, outcome, Action.ACCEPT, offset)

    def judge(self, *, records: int = 2) -> tuple[Report, QueueCounts]:
        for offset in range(records):
            self.add("final", 0, Outcome.OK, Action.FINAL, offset)
        report = Report()
        return report, check_queue(self.events, report)


def test_all_is_well() -> None:
    story = Story()
    story.ask("m1", 0)
    story.give("m1", 0, 0, 1)
    story.accept("m1", 0, 0)
    story.accept("m1", 0, 1, Outcome.FAIL)  # its lock had run out
    story.ask("m2", 0)
    story.give("m2", 0, 1)
    story.accept("m2", 0, 1, None)  # killed, or never answered: it was heard, for nobody else was given the record
    report, counts = story.judge()
    assert report.clean, report.lines()
    assert (counts.taken, counts.accepted, counts.undecided) == (3, 1, 1)


def test_what_a_paused_member_sees_late_was_given_early() -> None:
    story = Story()
    story.ask("m1", 0)
    story.ask("m2", 0)
    story.give("m2", 0, 0)
    story.accept("m2", 0, 0)
    story.give("m1", 0, 0)
    story.accept("m1", 0, 0)  # before the start of the queue: answered as if it had been in time
    assert story.judge(records=1)[0].clean


def never_accepted(story: Story) -> None:
    story.ask("m1", 0)
    story.give("m1", 0, 0, 1)
    story.accept("m1", 0, 0)


def refused_and_not_given_again(story: Story) -> None:
    never_accepted(story)
    story.accept("m1", 0, 1, Outcome.FAIL)


def given_after_it_was_accepted(story: Story) -> None:
    never_accepted(story)
    story.accept("m1", 0, 1)
    story.ask("m2", 0)
    story.give("m2", 0, 1)


PLANTED: list[tuple[Callable[[Story], None], Anomaly]] = [
    (never_accepted, Anomaly.NOT_ACCEPTED),
    (refused_and_not_given_again, Anomaly.NOT_ACCEPTED),
    (given_after_it_was_accepted, Anomaly.AGAIN),
]


@pytest.mark.parametrize(("plant", "anomaly"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_a_planted_anomaly_is_flagged(plant: Callable[[Story], None], anomaly: Anomaly) -> None:
    story = Story()
    plant(story)
    assert dict(story.judge()[0].counts) == {anomaly: 1}


def test_every_anomaly_of_queues_is_planted() -> None:
    assert {anomaly for _, anomaly in PLANTED} == OF_QUEUES
