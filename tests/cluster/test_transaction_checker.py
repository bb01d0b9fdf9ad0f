"""A planted history for every anomaly of transactions, and clean ones that have none."""

from __future__ import annotations

import itertools

from support.checker import Anomaly, Report
from support.checker_transactions import check_balances, check_copy, check_transactions
from support.history import ABORT, COMMIT, Action, Event, Outcome, value_in_transaction

KEY = "t-0"
OTHER = "t-1"
INPUT = "in-0"


class Story:
    """Events in the order they are told. Producer `p<n>` is number n; records are named by (producer, transaction)."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._positions: dict[tuple[str, int], itertools.count[int]] = {}

    def add(
        self, process: str, op: int, outcome: Outcome, action: Action, key: str, *, value: int = -1, offset: int = -1
    ) -> None:
        self.events.append(Event(len(self.events), process, op, outcome, action, key, value, offset))

    def sends(self, process: str, transaction: int, *keys: str, source: int = -1) -> list[int]:
        """The values that were sent."""
        positions = self._positions.setdefault((process, transaction), itertools.count())
        values = [value_in_transaction(int(process[1:]), transaction, next(positions)) for _ in keys]
        for key, value in zip(keys, values, strict=True):
            self.add(process, transaction, Outcome.INVOKE, Action.SEND, key, value=value, offset=source)
        return values

    def ends(self, process: str, transaction: int, how: str = COMMIT, outcome: Outcome | None = Outcome.OK) -> None:
        self.add(process, transaction, Outcome.INVOKE, Action.END, how)
        if outcome is not None:
            self.add(process, transaction, outcome, Action.END, how)

    def moves(self, process: str, transaction: int, offset: int) -> None:
        self.add(process, transaction, Outcome.INVOKE, Action.OFFSETS, INPUT, offset=offset)

    def reads(self, process: str, value: int, offset: int, *, op: int = 0, key: str = KEY) -> None:
        self.add(process, op, Outcome.OK, Action.POLL, key, value=value, offset=offset)

    def begins(self, process: str, offset: int) -> None:
        self.add(process, 0, Outcome.OK, Action.ASSIGN, INPUT)
        self.add(process, 0, Outcome.OK, Action.POLL, INPUT, offset=offset)

    def last_read(self, *values: int, key: str = KEY) -> None:
        for offset, value in enumerate(values):
            self.add("final", 0, Outcome.OK, Action.FINAL, key, value=value, offset=offset)

    def found(self) -> dict[Anomaly, int]:
        return check_transactions(self.events).counts

    def copied(self, count: int) -> dict[Anomaly, int]:
        report = Report()
        check_copy(self.events, {KEY: count}, report)
        return report.counts


def test_transactions_that_are_committed_aborted_or_left() -> None:
    story = Story()
    (first, second) = story.sends("p1", 1, KEY, OTHER)
    story.ends("p1", 1)
    story.sends("p1", 2, KEY)
    story.ends("p1", 2, ABORT)
    story.sends("p2", 1, KEY)  # and it was killed
    story.sends("p2", 2, KEY)
    story.ends("p2", 2, COMMIT, Outcome.FAIL)
    story.sends("p2", 3, KEY, OTHER)
    story.ends("p2", 3, COMMIT, None)  # nobody knows, and nobody saw it
    (third, fourth) = story.sends("p2", 4, KEY, OTHER)
    story.ends("p2", 4, COMMIT, Outcome.INFO)
    story.reads("c1", first, 0)
    story.last_read(first, third)
    story.last_read(second, fourth, key=OTHER)
    report = check_transactions(story.events)
    assert report.counts == {}
    assert (report.acked, report.failed, report.unknown, report.polled, report.final) == (2, 3, 4, 1, 4)


def test_a_record_of_an_aborted_transaction_is_read() -> None:
    for how, outcome in ((ABORT, Outcome.OK), (ABORT, Outcome.INFO), (COMMIT, Outcome.FAIL)):
        story = Story()
        (value,) = story.sends("p1", 1, KEY)
        story.ends("p1", 1, how, outcome)
        story.reads("c1", value, 0)
        assert story.found() == {Anomaly.ABORTED_READ: 1}


def test_a_record_is_read_that_nobody_asked_to_commit() -> None:
    story = Story()
    (value,) = story.sends("p1", 1, KEY)
    story.last_read(value)
    assert story.found() == {Anomaly.ABORTED_READ: 1}


def test_a_torn_transaction() -> None:
    for outcome in (Outcome.OK, Outcome.INFO, None):
        story = Story()
        (first, _) = story.sends("p1", 1, KEY, OTHER)
        story.ends("p1", 1, COMMIT, outcome)
        story.last_read(first)
        assert story.found() == {Anomaly.TORN: 1}


def test_a_committed_transaction_that_is_lost() -> None:
    story = Story()
    story.sends("p1", 1, KEY, OTHER)
    story.ends("p1", 1)
    assert story.found() == {Anomaly.LOST: 1}


def test_a_transaction_that_was_read_and_is_gone() -> None:
    story = Story()
    (value,) = story.sends("p1", 1, KEY)
    story.ends("p1", 1, COMMIT, Outcome.INFO)
    story.reads("c1", value, 0)
    assert story.found() == {Anomaly.UNSEEN: 1}


def test_a_record_that_lies_there_twice() -> None:
    story = Story()
    (value,) = story.sends("p1", 1, KEY)
    story.ends("p1", 1)
    story.last_read(value, value)
    assert story.found() == {Anomaly.DUPLICATE: 1}


def test_a_place_with_two_records() -> None:
    story = Story()
    (first, second) = story.sends("p1", 1, KEY, KEY)
    story.ends("p1", 1)
    story.reads("c1", second, 0)
    story.reads("c2", first, 0)
    story.last_read(first, second)
    assert Anomaly.INCONSISTENT in story.found()


def test_a_record_that_nobody_sent() -> None:
    story = Story()
    story.last_read(77)
    assert story.found() == {Anomaly.PHANTOM: 1}


def test_records_that_lie_in_another_order() -> None:
    story = Story()
    (first,) = story.sends("p1", 1, KEY)
    story.ends("p1", 1)
    (second,) = story.sends("p1", 2, KEY)
    story.ends("p1", 2)
    story.last_read(second, first)
    assert story.found() == {Anomaly.REORDERED: 1}


def test_a_reader_that_goes_back() -> None:
    story = Story()
    (first, second) = story.sends("p1", 1, KEY, KEY)
    story.ends("p1", 1)
    story.reads("c1", second, 1)
    story.reads("c1", first, 0)
    story.last_read(first, second)
    assert story.found() == {Anomaly.NONMONOTONIC_POLL: 1}


def test_two_transactions_that_read_from_each_other() -> None:
    story = Story()
    (first,) = story.sends("p1", 1, KEY)
    (second,) = story.sends("p2", 1, OTHER)
    story.reads("p1", second, 0, op=1, key=OTHER)
    story.reads("p2", first, 0, op=1)
    (third,) = story.sends("p3", 1, KEY)
    story.reads("p3", first, 0, op=1)  # after the circle, not in it
    for process in ("p1", "p2", "p3"):
        story.ends(process, 1)
    story.last_read(first, third)
    story.last_read(second, key=OTHER)
    report = check_transactions(story.events)
    assert report.counts == {Anomaly.CIRCULAR: 1}
    assert report.examples[Anomaly.CIRCULAR][0].startswith("2 transactions")


def test_a_transaction_that_reads_what_it_has_not_committed_yet() -> None:
    story = Story()
    (value,) = story.sends("p1", 1, KEY)
    story.reads("p1", value, 0, op=1)
    story.ends("p1", 1)
    story.last_read(value)
    assert story.found() == {Anomaly.CIRCULAR: 1}


def test_transactions_that_read_one_after_the_other() -> None:
    story = Story()
    values: list[int] = []
    for number in (1, 2, 3):
        for earlier, value in enumerate(values):
            story.reads(f"p{number}", value, earlier, op=1)
        values += story.sends(f"p{number}", 1, KEY)
        story.ends(f"p{number}", 1)
    story.last_read(*values)
    assert story.found() == {}


def test_a_last_stable_offset_that_hangs() -> None:
    story = Story()
    story.add("final", 0, Outcome.OK, Action.STABLE, KEY, value=7, offset=7)
    story.add("final", 0, Outcome.OK, Action.STABLE, OTHER, value=7, offset=5)
    assert story.found() == {Anomaly.HANGING: 1}


# --- offsets of a group -----------------------------------------------------------------------------------------------


def test_members_that_go_on_where_committed_transactions_ended() -> None:
    story = Story()
    story.begins("p1", 0)
    story.moves("p1", 1, 5)
    story.ends("p1", 1)
    story.begins("p2", 5)
    story.moves("p2", 1, 9)
    story.ends("p2", 1, COMMIT, None)
    story.begins("p3", 9)
    assert story.found() == {}


def test_a_reader_without_a_group_begins_where_it_likes() -> None:
    story = Story()
    (value,) = story.sends("p1", 1, KEY)
    story.ends("p1", 1)
    story.add("c1", 0, Outcome.OK, Action.ASSIGN, KEY)
    story.reads("c1", value, 3)
    story.last_read(value)
    assert story.found() == {Anomaly.DUPLICATE: 1}  # it lies at 0 for the last reader


def test_a_member_that_begins_before_a_committed_transaction() -> None:
    story = Story()
    story.moves("p1", 1, 3)
    story.ends("p1", 1)
    story.moves("p1", 2, 5)
    story.ends("p1", 2)
    story.begins("p2", 3)
    assert story.found() == {Anomaly.RESUMED_BEFORE: 1}


def test_a_member_that_begins_where_an_aborted_transaction_would_be() -> None:
    story = Story()
    story.moves("p1", 1, 5)
    story.ends("p1", 1, ABORT)
    story.begins("p2", 5)
    assert story.found() == {Anomaly.ABORTED_OFFSET: 1}


def test_a_transaction_that_takes_a_group_back() -> None:
    story = Story()
    story.moves("p1", 1, 5)
    story.ends("p1", 1)
    story.moves("p2", 1, 3)
    story.ends("p2", 1)
    assert story.found() == {Anomaly.COMMIT_BACK: 1}


# --- what single workloads promise ------------------------------------------------------------------------------------


def test_a_copy() -> None:
    story = Story()
    values = [story.sends("p1", 1, KEY, source=source)[0] for source in range(4)]
    story.last_read(*values[:3])
    assert story.copied(3) == {}
    assert story.copied(4) == {Anomaly.MISSED: 1}


def test_a_copy_with_a_record_twice_and_one_too_late() -> None:
    story = Story()
    (first,) = story.sends("p1", 1, KEY, source=0)
    (second,) = story.sends("p1", 1, KEY, source=1)
    (again,) = story.sends("p1", 2, KEY, source=0)
    story.last_read(first, second, again)
    assert story.copied(2) == {Anomaly.DUPLICATE: 1, Anomaly.REORDERED: 1}


def test_a_bank_that_does_not_add_up() -> None:
    story = Story()
    story.add("p1", 0, Outcome.OK, Action.BALANCE, "bank-1", value=100)
    story.add("p1", 1, Outcome.OK, Action.BALANCE, "bank-1", value=93)
    report = Report()
    check_balances(story.events, 100, report)
    assert report.counts == {Anomaly.UNBALANCED: 1}
