"""The checker itself: a history with each anomaly planted is flagged as that, and a clean one is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from support.checker import Anomaly, Report, check
from support.checker_groups import OF_GROUPS
from support.checker_queues import OF_QUEUES
from support.checker_transactions import OF_TRANSACTIONS
from support.history import (
    DAMAGED,
    Action,
    Event,
    HistoryWriter,
    Outcome,
    decode_record,
    encode_record,
    parse,
    read_histories,
    value_of,
)

KEY: Final = "orders-0"


class Story:
    """Writes down a history event by event, one tick of the clock each."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._now_ns = 0

    def invoke(self, op: int, *, producer: int = 1, key: str = KEY) -> None:
        self._add(f"p{producer}", op, Outcome.INVOKE, Action.SEND, key, value_of(producer, op))

    def end(
        self, op: int, offset: int = -1, *, outcome: Outcome = Outcome.OK, producer: int = 1, key: str = KEY
    ) -> None:
        self._add(f"p{producer}", op, outcome, Action.SEND, key, value_of(producer, op), offset)

    def sent(self, op: int, offset: int, *, producer: int = 1, key: str = KEY) -> None:
        self.invoke(op, producer=producer, key=key)
        self.end(op, offset, producer=producer, key=key)

    def poll(self, op: int, offset: int, *, consumer: str = "c1", producer: int = 1, generation: int = 0) -> None:
        self._add(consumer, 0, Outcome.OK, Action.POLL, KEY, value_of(producer, op), offset, generation)

    def damaged(self, offset: int) -> None:
        self._add("c1", 0, Outcome.OK, Action.POLL, KEY, DAMAGED, offset)

    def final(self, *records: tuple[int, int], producer: int = 1) -> None:
        for op, offset in records:
            self._add("final", 0, Outcome.OK, Action.FINAL, KEY, value_of(producer, op), offset)

    def assign(self, generation: int, *, consumer: str = "c1") -> None:
        self._add(consumer, 0, Outcome.OK, Action.ASSIGN, KEY, generation=generation)

    def wait_s(self, seconds: float) -> None:
        self._now_ns += int(seconds * 1e9)

    def _add(
        self,
        process: str,
        op: int,
        outcome: Outcome,
        action: Action,
        key: str,
        value: int = -1,
        offset: int = -1,
        generation: int = 0,
    ) -> None:
        self._now_ns += 1
        self.events.append(Event(self._now_ns, process, op, outcome, action, key, value, offset, generation))


def lost(story: Story) -> None:
    story.sent(0, 0)
    story.sent(1, 1)
    story.sent(2, 2)
    story.final((0, 0), (2, 2))


def unseen_tail(story: Story) -> None:
    story.sent(0, 0)
    story.sent(1, 1)
    story.final((0, 0))


def unseen_after_being_read(story: Story) -> None:
    """Its producer never heard of it, but a consumer was given it: it was committed."""
    story.sent(0, 0)
    story.invoke(1)
    story.end(1, outcome=Outcome.INFO)
    story.poll(0, 0)
    story.poll(1, 1)
    story.final((0, 0))


def duplicate(story: Story) -> None:
    story.sent(0, 0)
    story.final((0, 0), (0, 1))


def duplicate_of_an_acknowledged_offset(story: Story) -> None:
    """The offset that was acknowledged is not where the record is."""
    story.sent(0, 0)
    story.sent(1, 1)
    story.final((0, 0), (1, 2))


def inconsistent(story: Story) -> None:
    story.sent(0, 0)
    story.invoke(1)
    story.end(1, outcome=Outcome.INFO)
    story.poll(1, 0)
    story.final((0, 0))


def inconsistent_acks(story: Story) -> None:
    story.invoke(0)
    story.invoke(0, producer=2)
    story.end(0, 0)
    story.end(0, 0, producer=2)
    story.final((0, 0))


def phantom(story: Story) -> None:
    story.sent(0, 0)
    story.final((0, 0), (7, 1))


def phantom_of_another_key(story: Story) -> None:
    story.sent(0, 0, key="orders-1")
    story.final((0, 0))


def damaged(story: Story) -> None:
    story.sent(0, 0)
    story.damaged(0)
    story.final((0, 0))


def aborted_read(story: Story) -> None:
    story.invoke(0)
    story.end(0, outcome=Outcome.FAIL)
    story.final((0, 0))


def nonmonotonic_send(story: Story) -> None:
    story.invoke(0)
    story.invoke(1)
    story.end(1, 0)
    story.end(0, 1)
    story.final((1, 0), (0, 1))


def reordered(story: Story) -> None:
    """The producer does not know where they went; the log shows that they changed places."""
    for op in (0, 1):
        story.invoke(op)
        story.end(op)
    story.final((1, 0), (0, 1))


def nonmonotonic_poll(story: Story) -> None:
    story.sent(0, 0)
    story.sent(1, 1)
    story.poll(0, 0)
    story.poll(1, 1)
    story.poll(0, 0)
    story.final((0, 0), (1, 1))


def poll_skip(story: Story) -> None:
    for op in range(3):
        story.sent(op, op)
    story.poll(0, 0)
    story.poll(2, 2)
    story.final((0, 0), (1, 1), (2, 2))


def stale_append(story: Story) -> None:
    story.sent(0, 5)
    story.sent(0, 3, producer=2)
    story.final((0, 3), producer=2)
    story.final((0, 5))


def stale_append_of_unknown_outcome(story: Story) -> None:
    story.sent(0, 5)
    story.invoke(0, producer=2)
    story.end(0, outcome=Outcome.INFO, producer=2)
    story.final((0, 3), producer=2)
    story.final((0, 5))


PLANTED: Final[list[tuple[Callable[[Story], None], Anomaly]]] = [
    (lost, Anomaly.LOST),
    (unseen_tail, Anomaly.UNSEEN),
    (unseen_after_being_read, Anomaly.UNSEEN),
    (duplicate, Anomaly.DUPLICATE),
    (duplicate_of_an_acknowledged_offset, Anomaly.DUPLICATE),
    (inconsistent, Anomaly.INCONSISTENT),
    (inconsistent_acks, Anomaly.INCONSISTENT),
    (phantom, Anomaly.PHANTOM),
    (phantom_of_another_key, Anomaly.PHANTOM),
    (damaged, Anomaly.DAMAGED),
    (aborted_read, Anomaly.ABORTED_READ),
    (nonmonotonic_send, Anomaly.NONMONOTONIC_SEND),
    (reordered, Anomaly.REORDERED),
    (nonmonotonic_poll, Anomaly.NONMONOTONIC_POLL),
    (poll_skip, Anomaly.POLL_SKIP),
    (stale_append, Anomaly.STALE_APPEND),
    (stale_append_of_unknown_outcome, Anomaly.STALE_APPEND),
]


def checked(story: Story) -> Report:
    return check(story.events)


@pytest.mark.parametrize(("plant", "anomaly"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_a_planted_anomaly_is_flagged(plant: Callable[[Story], None], anomaly: Anomaly) -> None:
    story = Story()
    plant(story)
    report = checked(story)
    assert anomaly in report.counts, report.lines()
    assert any(line.startswith(f"{anomaly}: {report.counts[anomaly]};") for line in report.lines())


def test_every_anomaly_has_a_planted_history() -> None:
    assert {anomaly for _, anomaly in PLANTED} == set(Anomaly) - OF_GROUPS - OF_QUEUES - OF_TRANSACTIONS


@pytest.mark.parametrize(
    ("plant", "alone"),
    [
        (unseen_tail, Anomaly.UNSEEN),
        (phantom, Anomaly.PHANTOM),
        (reordered, Anomaly.REORDERED),
        (poll_skip, Anomaly.POLL_SKIP),
        (nonmonotonic_poll, Anomaly.NONMONOTONIC_POLL),
        (stale_append, Anomaly.STALE_APPEND),
        (aborted_read, Anomaly.ABORTED_READ),
        (damaged, Anomaly.DAMAGED),
    ],
)
def test_one_anomaly_is_not_taken_for_another(plant: Callable[[Story], None], alone: Anomaly) -> None:
    story = Story()
    plant(story)
    assert set(checked(story).counts) == {alone}


def test_what_is_allowed_is_not_flagged() -> None:
    story = Story()
    story.sent(0, 0)
    story.sent(1, 3)  # offsets have gaps
    story.invoke(2)
    story.end(2, outcome=Outcome.INFO)  # appended after all
    story.invoke(3)
    story.end(3, outcome=Outcome.INFO)  # never appended
    story.invoke(4)
    story.end(4, outcome=Outcome.FAIL)
    story.invoke(5)
    story.end(5, -1)  # acknowledged without an offset
    story.invoke(6)  # the producer was killed
    story.assign(0)
    story.poll(0, 0)
    story.poll(1, 3)
    story.assign(1)
    story.poll(0, 0, generation=1)  # a new assignment may begin anew
    story.poll(1, 3, generation=1)
    story.final((0, 0), (1, 3), (2, 4), (5, 5))
    report = checked(story)
    assert report.clean, report.lines()
    assert (report.acked, report.failed, report.unknown, report.polled, report.final) == (3, 1, 3, 4, 4)


def test_sends_that_overlap_may_end_in_any_order() -> None:
    story = Story()
    story.invoke(0)
    story.invoke(0, producer=2)
    story.end(0, 1)
    story.end(0, 0, producer=2)
    story.final((0, 0), producer=2)
    story.final((0, 1))
    assert checked(story).clean


def test_the_longest_pause_is_between_acknowledgements_of_one_key() -> None:
    story = Story()
    story.sent(0, 0)
    story.wait_s(2)
    story.sent(1, 1)
    story.sent(0, 0, key="orders-1")
    story.wait_s(1)
    story.sent(2, 2)
    assert checked(story).longest_pause_s == pytest.approx(2, abs=0.01)


def test_a_key_that_is_never_acknowledged_again_is_a_pause() -> None:
    story = Story()
    story.sent(0, 0)
    story.wait_s(1)
    story.invoke(1)
    story.wait_s(4)
    story.end(1, outcome=Outcome.INFO)
    assert checked(story).longest_pause_s == pytest.approx(5, abs=0.01)


def healthy(records: int, seed: int) -> list[Event]:
    """What clients of a correct log see: two producers with requests in flight, a consumer, a final read."""
    rng = random.Random(seed)
    story = Story()
    log: list[tuple[int, int]] = []
    in_flight: dict[int, list[tuple[int, int]]] = {1: [], 2: []}
    for op in range(records // 2):
        for producer in (1, 2):
            story.invoke(op, producer=producer)
            in_flight[producer].append((op, len(log)))
            log.append((producer, op))
            if rng.random() < 0.4:
                for pending, offset in in_flight[producer]:
                    story.end(pending, offset, producer=producer)
                in_flight[producer].clear()
    for producer, pending_sends in in_flight.items():
        for pending, offset in pending_sends:
            story.end(pending, offset, producer=producer)
    for offset, (producer, op) in enumerate(log):
        story.poll(op, offset, producer=producer)
    for offset, (producer, op) in enumerate(log):
        story.final((op, offset), producer=producer)
    return story.events


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_history_is_clean_until_one_record_is_taken_out(seed: int) -> None:
    events = healthy(200, seed)
    assert check(events).clean
    victim = random.Random(seed).choice([event for event in events if event.action is Action.FINAL])
    report = check([event for event in events if event is not victim])
    assert report.counts[Anomaly.UNSEEN] == 1


@pytest.mark.timeout(60)
def test_a_hundred_thousand_records_are_checked() -> None:
    report = check(healthy(100_000, 1))
    assert report.clean
    assert (report.acked, report.polled, report.final) == (100_000, 100_000, 100_000)


def test_a_history_comes_back_from_its_files(tmp_path: Path) -> None:
    with HistoryWriter(tmp_path / "a", "p1") as writer:
        writer.write(Outcome.INVOKE, Action.SEND, KEY, op=4, value=value_of(1, 4))
        writer.flush()
        with HistoryWriter(tmp_path / "b", "c1") as other:
            other.write(Outcome.OK, Action.POLL, KEY, op=1, value=value_of(1, 4), offset=9, generation=2)
        writer.write(Outcome.OK, Action.SEND, KEY, op=4, value=value_of(1, 4), offset=9)
    with (tmp_path / "a").open("a") as cut:
        cut.write("123 p1 5 inv")  # a killed process
    events = read_histories([tmp_path / "a", tmp_path / "b"])
    assert [event[1:] for event in events] == [
        ("p1", 4, Outcome.INVOKE, Action.SEND, KEY, value_of(1, 4), -1, 0),
        ("c1", 1, Outcome.OK, Action.POLL, KEY, value_of(1, 4), 9, 2),
        ("p1", 4, Outcome.OK, Action.SEND, KEY, value_of(1, 4), 9, 0),
    ]
    with pytest.raises(ValueError, match="unpack"):
        parse("123 p1")


def test_a_record_knows_whether_it_was_damaged() -> None:
    data = encode_record(value_of(3, 9), b"payload")
    assert decode_record(data) == value_of(3, 9)
    assert decode_record(data[:-1]) == decode_record(b"short") == decode_record(None) == DAMAGED
