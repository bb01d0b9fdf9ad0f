"""A planted history for every anomaly of a group, and a clean one that has none."""

from __future__ import annotations

from support.checker import Anomaly, Report
from support.checker_groups import check_group
from support.history import Action, Event, Outcome

KEY = "t-0"


class Story:
    """Events of one partition in the order they are told."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._ops = 0

    def add(self, process: str, outcome: Outcome, action: Action, op: int = 0, **values: int) -> None:
        self.events.append(Event(len(self.events), process, op, outcome, action, KEY, **values))

    def sent(self, *offsets: int) -> None:
        for offset in offsets:
            self.add("p1", Outcome.OK, Action.SEND, value=offset, offset=offset)

    def begins(self, member: str, generation: int = 1) -> None:
        self.add(member, Outcome.OK, Action.ASSIGN, generation=generation)

    def reads(self, member: str, *offsets: int, generation: int = 1) -> None:
        for offset in offsets:
            self.add(member, Outcome.OK, Action.POLL, value=offset, offset=offset, generation=generation)

    def asks_to_commit(self, member: str, offset: int) -> int:
        self._ops += 1
        self.add(member, Outcome.INVOKE, Action.COMMIT, self._ops, offset=offset)
        return self._ops

    def hears(self, member: str, op: int, offset: int, outcome: Outcome = Outcome.OK) -> None:
        self.add(member, outcome, Action.COMMIT, op, offset=offset)

    def commits(self, member: str, offset: int, outcome: Outcome = Outcome.OK) -> None:
        self.hears(member, self.asks_to_commit(member, offset), offset, outcome)

    def found(self) -> dict[Anomaly, int]:
        report = Report()
        check_group(self.events, report)
        return report.counts


def test_a_group_that_reads_at_least_once() -> None:
    story = Story()
    story.sent(0, 1, 2)
    story.begins("m1")
    story.reads("m1", 0, 1)
    story.commits("m1", 1)
    # What m1 read after its commit is read again.
    story.begins("m2")
    story.reads("m2", 1, 2)
    story.commits("m2", 3)
    assert story.found() == {}


def test_a_record_that_nobody_was_given() -> None:
    story = Story()
    story.sent(0, 1)
    story.begins("m1")
    story.reads("m1", 0)
    assert story.found() == {Anomaly.MISSED: 1}


def test_a_commit_that_went_back() -> None:
    story = Story()
    story.commits("m2", 5)
    story.commits("m1", 3)
    assert story.found() == {Anomaly.COMMIT_BACK: 1}


def test_a_commit_that_was_refused_or_under_way_at_the_same_time_is_none() -> None:
    story = Story()
    early = story.asks_to_commit("m1", 3)
    story.commits("m2", 5)
    story.hears("m1", early, 3)
    story.commits("m1", 3, Outcome.FAIL)
    story.commits("m1", 3, Outcome.INFO)
    assert story.found() == {}


def test_a_member_that_began_before_what_was_committed() -> None:
    story = Story()
    story.commits("m1", 5)
    story.begins("m2")
    story.reads("m2", 4, 5)
    assert story.found() == {Anomaly.RESUMED_BEFORE: 1}


def test_a_commit_after_a_member_began_does_not_count() -> None:
    story = Story()
    story.begins("m2")
    story.commits("m1", 5)
    story.reads("m2", 4, 5)
    assert story.found() == {}


def test_each_assignment_is_a_new_beginning() -> None:
    story = Story()
    story.begins("m1")
    story.reads("m1", 0, 1, 2)
    story.commits("m2", 3)
    story.begins("m1", generation=2)
    story.reads("m1", 1, generation=2)
    assert story.found() == {Anomaly.RESUMED_BEFORE: 1}
