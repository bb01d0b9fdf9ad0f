"""Keyed timers on a clock that only the test moves."""

from __future__ import annotations

from millrace.clock import ManualClock
from millrace.groups.timers import Timers


def test_timers_fire_once_at_their_deadline() -> None:
    clock, fired = ManualClock(), list[str]()
    timers = Timers(clock, fired.append)
    timers.set("a", 1_000)
    clock.advance(0.999)
    assert fired == []
    clock.advance(0.001)
    clock.advance(10)
    assert fired == ["a"]
    assert "a" not in timers


def test_a_deadline_can_be_pushed_ahead_pulled_in_and_cancelled() -> None:
    clock, fired = ManualClock(), list[str]()
    timers = Timers(clock, fired.append)
    timers.set("later", 1_000)
    timers.set("sooner", 10_000)
    timers.set("never", 500)
    clock.advance(0.4)
    timers.set("later", 2_000)
    timers.set("sooner", 100)
    timers.cancel("never")
    timers.cancel("unknown")
    clock.advance(0.1)
    assert fired == ["sooner"]
    clock.advance(1.899)
    assert fired == ["sooner"]
    clock.advance(0.001)
    assert fired == ["sooner", "later"]


def test_a_heartbeat_arms_nothing_new() -> None:
    clock, fired = ManualClock(), list[str]()
    timers = Timers(clock, fired.append)
    timers.set("member", 10_000)
    for _ in range(1_000):
        timers.set("member", 10_000)
    assert len(clock._timers) == 1


def test_cancel_all_leaves_nothing_behind() -> None:
    clock, fired = ManualClock(), list[int]()
    timers = Timers(clock, fired.append)
    for key in range(3):
        timers.set(key, 10)
    assert len(timers) == 3
    timers.cancel_all()
    clock.advance(1)
    assert fired == []


def test_a_timer_can_be_set_again_while_it_fires() -> None:
    clock, fired = ManualClock(), list[str]()
    timers: Timers[str] = Timers(clock, lambda key: (fired.append(key), timers.set(key, 1_000))[0])
    timers.set("again", 1_000)
    clock.advance(3.5)
    assert fired == ["again"] * 3
