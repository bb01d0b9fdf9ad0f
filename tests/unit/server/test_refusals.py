"""Lines of the log about peers that are turned away: each while they are few, and a number when they are many."""

from __future__ import annotations

import logging

import pytest

from millrace.clock import ManualClock
from millrace.server import refusals
from millrace.server.refusals import LINES, LINES_PER_HOST, SPAN_S, Refusals


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def test_each_is_told_while_they_are_few(clock: ManualClock, told: pytest.LogCaptureFixture) -> None:
    lines = Refusals(clock)
    for number in range(LINES_PER_HOST):
        lines.tell("10.0.0.1", "%s: %d", "no", number)
    lines.tell("10.0.0.2", "too many", level=logging.WARNING)
    clock.advance(2 * SPAN_S)
    assert told.messages == [*(f"no: {number}" for number in range(LINES_PER_HOST)), "too many"]
    assert told.records[-1].levelno == logging.WARNING


def test_one_that_goes_on_is_counted_and_hides_nobody(clock: ManualClock, told: pytest.LogCaptureFixture) -> None:
    lines = Refusals(clock)
    for _ in range(1000):
        lines.tell("10.0.0.1", "again")
    lines.tell("10.0.0.2", "somebody else")
    clock.advance(SPAN_S)
    rest = 1000 - LINES_PER_HOST
    assert told.messages == [
        *["again"] * LINES_PER_HOST,
        "somebody else",
        f"{rest} more peers were turned away than these lines tell, within 10 s: {rest} of them from 10.0.0.1",
    ]


def test_the_next_span_begins_anew(clock: ManualClock, told: pytest.LogCaptureFixture) -> None:
    lines = Refusals(clock)
    for _ in range(3):
        for _ in range(100):
            lines.tell("10.0.0.1", "again")
        clock.advance(SPAN_S)
    assert len(told.messages) == 3 * (LINES_PER_HOST + 1)


def test_many_addresses_are_bounded_too(
    clock: ManualClock, told: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "MAX_HOSTS", 10)
    lines = Refusals(clock)
    for number in range(LINES + 1000):
        lines.tell(f"host{number}", "once")
    assert len(lines._untold) == 10 + 1
    clock.advance(SPAN_S)
    assert len(told.messages) == LINES + 1
    assert told.messages[-1].startswith("1000 more")
    assert told.messages[-1].endswith("990 of them from others")


def test_what_was_counted_is_told_at_the_end(clock: ManualClock, told: pytest.LogCaptureFixture) -> None:
    lines = Refusals(clock)
    lines.stop()
    assert told.messages == []
    for _ in range(LINES_PER_HOST + 1):
        lines.tell("10.0.0.1", "again")
    lines.stop()
    assert told.messages[-1].startswith("1 more")
    clock.advance(SPAN_S)
    assert len(told.messages) == LINES_PER_HOST + 1
