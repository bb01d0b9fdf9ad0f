"""When a record of `millrace perf` is due, and what counts when it could not be sent then."""

from __future__ import annotations

import pytest

from millrace.cli.perf_runs import Bench, Plan, Tally, send_all
from millrace.clock import ManualClock


def test_at_a_rate_records_are_due_at_even_intervals_whatever_the_broker_does() -> None:
    """A client whose queue is full for a second: every record that was due in it is late, by as much as it was."""
    clock, tally = ManualClock(), Tally()
    sent: list[tuple[float, float]] = []

    def send(number: int, due_s: float) -> None:
        if 0.5 <= clock.monotonic() < 1.5:
            raise BufferError
        assert number == len(sent)
        sent.append((due_s, clock.monotonic()))

    plan = Plan(records=200, duration_s=None, rate=100, size_bytes=1)
    send_all(Bench(clock, lambda: False, lambda _: None), plan, tally, send, wait=clock.advance)
    assert [due for due, _ in sent] == pytest.approx([number / 100 for number in range(200)])
    late = [at - due for due, at in sent if at - due > 0.001]
    assert len(late) == 100
    assert max(late) == pytest.approx(1.0, abs=0.01)
    assert sum(late) / len(late) == pytest.approx(0.5, abs=0.01)


def test_without_a_rate_a_record_is_due_when_it_is_first_tried() -> None:
    clock, tally = ManualClock(), Tally()
    sent: list[tuple[float, float]] = []

    def send(_number: int, due_s: float) -> None:
        if clock.monotonic() < 1.0:
            raise BufferError
        sent.append((due_s, clock.monotonic()))

    plan = Plan(records=2, duration_s=None, rate=None, size_bytes=1)
    send_all(Bench(clock, lambda: False, lambda _: None), plan, tally, send, wait=clock.advance)
    assert sent == [(0.0, pytest.approx(1.0)), (pytest.approx(1.0), pytest.approx(1.0))]


@pytest.mark.parametrize(
    ("plan", "number", "elapsed_s", "over"),
    [
        (Plan(10, None, None, 1), 9, 99.0, False),
        (Plan(10, None, None, 1), 10, 0.0, True),
        (Plan(None, 2.0, None, 1), 10, 1.9, False),
        (Plan(None, 2.0, None, 1), 10, 2.0, True),
        (Plan(None, 2.0, 5, 1), 10, 0.0, True),
        (Plan(None, 2.0, 5, 1), 9, 1.9, False),
    ],
)
def test_when_it_is_over(plan: Plan, number: int, elapsed_s: float, over: bool) -> None:
    assert plan.is_over(number, elapsed_s) is over


def test_records_that_were_due_and_not_sent_in_time_are_counted() -> None:
    """Left out, they would be the slowest of all: a client that is held up at the end does not look better for it."""
    clock, tally = ManualClock(), Tally()

    def send(number: int, _due_s: float) -> None:
        if number == 89:
            clock.advance(0.5)  # the time is up then

    plan = Plan(records=None, duration_s=1.0, rate=100, size_bytes=1)
    send_all(Bench(clock, lambda: False, lambda _: None), plan, tally, send, wait=clock.advance)
    assert (tally.sent, tally.unsent) == (90, 10)
