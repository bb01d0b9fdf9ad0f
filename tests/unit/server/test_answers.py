"""Room for answers: how much the next one gets, who waits, and who is closed for those who do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from millrace.clock import ManualClock
from millrace.server.answers import EXHAUSTED_PATIENCE_S, LOOK_S, PATIENCE_S, SHARE, SMALL_BYTES, AnswerRoom
from millrace.server.flow import MemoryBudget

MIB = 1024 * 1024
BUDGET_BYTES = 256 * MIB
LARGE_BYTES = BUDGET_BYTES // 2
LIMIT_BYTES = BUDGET_BYTES * 3 // 4


class Peer:
    """A connection whose client takes as much as the test says."""

    def __init__(self, room: AnswerRoom, name: str = "peer") -> None:
        self._room = room
        self._name = name
        self.held_bytes = 0
        self.taken_bytes = 0
        self.is_free = True
        self.aborted = False
        room.holders.add(self)

    def __repr__(self) -> str:
        return self._name

    def ask(self, wanted_bytes: int, batch_bytes: int = 0) -> int:
        """Have an answer made as a fetch does; what it weighs."""
        room = self._room.room()
        size_bytes = max(min(room, wanted_bytes), batch_bytes) if room else 0
        self.held_bytes += size_bytes
        self._room.take(size_bytes)
        return size_bytes

    def read(self, size_bytes: int | None = None) -> None:
        size_bytes = self.held_bytes if size_bytes is None else size_bytes
        self.taken_bytes += size_bytes
        self.held_bytes -= size_bytes
        self._room.give_back(size_bytes)

    def abort(self) -> None:
        self.aborted = True
        self._room.left(self)
        held_bytes, self.held_bytes = self.held_bytes, 0
        self._room.give_back(held_bytes)


class Bench:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.budget = MemoryBudget(BUDGET_BYTES)
        self.room = AnswerRoom(self.budget, self.clock)

    def peers(self, count: int) -> list[Peer]:
        return [Peer(self.room, f"peer {number}") for number in range(count)]

    def exhaust(self) -> list[Peer]:
        """Peers that hold everything there is."""
        peers = self.peers(3)
        for peer in peers:
            assert peer.ask(0, batch_bytes=LIMIT_BYTES // 3)
        assert self.room.room() == 0
        return peers

    def wait(self, peer: Peer) -> list[float]:
        """Line up; the times at which it was woken."""
        woken: list[float] = []
        self.room.line_up(lambda: woken.append(self.clock.monotonic()), lambda: peer.is_free)
        return woken


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_one_that_reads_gets_an_eighth_of_the_half_again_and_again(bench: Bench) -> None:
    (peer,) = bench.peers(1)
    for _ in range(100):
        assert peer.ask(50 * MIB) == LARGE_BYTES // SHARE
        peer.read()
    assert bench.room.used_bytes == bench.budget.used_bytes == 0


def test_forty_that_do_not_read_leave_something_for_the_next(bench: Bench) -> None:
    given = [peer.ask(50 * MIB) for peer in bench.peers(40)]
    assert given == sorted(given, reverse=True)
    assert sum(given) < LARGE_BYTES
    (healthy,) = bench.peers(1)
    assert healthy.ask(50 * MIB) >= SMALL_BYTES


@pytest.mark.parametrize("batch_bytes", [16 * 1024, MIB, 50 * MIB])
def test_whatever_their_number_they_hold_three_quarters_and_a_batch(bench: Bench, batch_bytes: int) -> None:
    for peer in bench.peers(5000):
        peer.ask(50 * MIB, batch_bytes)
    assert bench.room.room() == 0
    assert LIMIT_BYTES <= bench.room.used_bytes < LIMIT_BYTES + max(batch_bytes, SMALL_BYTES)
    assert not bench.budget.exhausted, "requests have room"


def test_those_who_wait_are_woken_in_order_as_room_is_given_back(bench: Bench) -> None:
    first, *_ = bench.exhaust()
    order: list[int] = []
    wakes: list[Callable[[], None]] = [lambda number=number: order.append(number) for number in range(4)]  # type: ignore[misc]
    for wake in wakes:
        bench.room.line_up(wake, lambda: True)
    bench.room.leave_line(wakes[1])
    first.read(1)
    assert order == [0], "there is room for one small answer"
    first.read()
    assert order == [0, 2, 3]


def test_one_that_does_not_use_its_turn_does_not_keep_the_others_waiting(bench: Bench) -> None:
    first, *_ = bench.exhaust()
    woken = [bench.wait(peer) for peer in bench.peers(3)]
    first.read(SMALL_BYTES)
    assert [bool(each) for each in woken] == [True, False, False]
    bench.clock.advance(3 * LOOK_S)
    assert all(woken)


def test_one_with_unread_answers_is_passed_over_until_it_has_read_them(bench: Bench) -> None:
    first, *_ = bench.exhaust()
    slow, other = bench.peers(2)
    slow.is_free = False
    slow_woken, other_woken = bench.wait(slow), bench.wait(other)
    first.read()
    assert other_woken
    assert not slow_woken
    slow.is_free = True
    slow.read()
    assert slow_woken


def test_when_nothing_is_left_who_does_not_read_is_closed_within_a_second(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    holders = bench.exhaust()
    woken = bench.wait(*bench.peers(1))
    while not woken:
        bench.clock.advance(LOOK_S)
        assert bench.clock.monotonic() < 1
    assert woken[0] >= EXHAUSTED_PATIENCE_S
    assert [holder.aborted for holder in holders].count(True) == 1, "no more than are needed"
    assert "it has not read 67108864 bytes of answers, and others need the memory" in caplog.text


def test_whoever_reads_is_not_closed(bench: Bench) -> None:
    reading, *stalled = bench.exhaust()
    bench.wait(*bench.peers(1))
    for _ in range(100):
        if bench.room.used_bytes >= LIMIT_BYTES:
            bench.clock.advance(LOOK_S)
            reading.read(reading.held_bytes // 2)
            reading.ask(0, batch_bytes=LIMIT_BYTES // 3 - reading.held_bytes)
    assert not reading.aborted
    assert any(peer.aborted for peer in stalled)


def test_those_who_take_nothing_go_before_those_who_take_little(bench: Bench) -> None:
    trickling, *stalled = bench.exhaust()
    woken = bench.wait(*bench.peers(1))
    while not woken:
        bench.clock.advance(LOOK_S)
        trickling.taken_bytes += 1
    assert not trickling.aborted
    assert [peer.aborted for peer in stalled].count(True) == 1


def test_a_byte_at_a_time_is_no_reading(bench: Bench) -> None:
    (trickling,) = bench.peers(1)
    trickling.ask(0, batch_bytes=LIMIT_BYTES)
    woken = bench.wait(*bench.peers(1))
    assert bench.room.room() == 0
    while not woken:
        bench.clock.advance(LOOK_S)
        trickling.taken_bytes += 1
        assert bench.clock.monotonic() < 1
    assert trickling.aborted


def test_while_there_is_enough_nobody_is_closed(bench: Bench) -> None:
    slow, busy = bench.peers(2)
    slow.ask(50 * MIB)
    for _ in range(100):
        busy.ask(50 * MIB)
        bench.clock.advance(PATIENCE_S)
        busy.read()
    assert not slow.aborted


def test_while_room_is_short_a_slow_reader_has_half_a_minute(bench: Bench) -> None:
    slow = bench.peers(30)
    for peer in slow:
        peer.ask(50 * MIB)
    (healthy,) = bench.peers(1)
    elapsed_s = 0.0
    while not any(peer.aborted for peer in slow):
        assert healthy.ask(50 * MIB), "it gets less, and does not wait"
        healthy.read()
        bench.clock.advance(LOOK_S)
        elapsed_s += LOOK_S
    assert PATIENCE_S <= elapsed_s <= PATIENCE_S + 4 * LOOK_S
    assert not all(peer.aborted for peer in slow)
    assert healthy.ask(50 * MIB) >= LARGE_BYTES // SHARE // SHARE


def test_a_shortage_that_nobody_notices_any_more_is_forgotten(bench: Bench) -> None:
    holders = bench.exhaust()
    bench.clock.advance(100 * PATIENCE_S)
    assert not any(holder.aborted for holder in holders), "nobody waits"
    for holder in holders:
        holder.read()
    assert bench.room.used_bytes == bench.budget.used_bytes == 0
