"""Acquisition by example; `tests/models/test_acquisition.py` tries everything else."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from millrace.errors import ApiError, ErrorCode
from millrace.queues.acquisition import (
    AcknowledgeBatch,
    AcknowledgeType,
    Acquired,
    AcquireMode,
    DeadLetter,
    DeadLetterReason,
    Limits,
    LogBatch,
    Window,
)
from millrace.queues.batches import RecordState, StateBatch

ACCEPT, RELEASE, REJECT, RENEW = (
    AcknowledgeType.ACCEPT,
    AcknowledgeType.RELEASE,
    AcknowledgeType.REJECT,
    AcknowledgeType.RENEW,
)
TENS = [LogBatch(first, first + 9) for first in range(0, 100, 10)]


def take(
    window: Window,
    member: str = "a",
    count: int = 10,
    now: int = 0,
    batches: Sequence[LogBatch] = TENS,
    **terms: object,
) -> list[Acquired]:
    offset = window.next_fetch_offset(now)
    if offset is None:
        return []
    read = [each for each in batches if each.last_offset >= offset]
    return window.acquire(member, read, fetch_offset=offset, max_records=count, now_ms=now, **terms)  # type: ignore[arg-type]


def say(window: Window, first: int, last: int, *kinds: int, member: str = "a", now: int = 0) -> list[DeadLetter]:
    said = window.acknowledge(member, [AcknowledgeBatch(first, last, kinds)], now)
    return window.finish(said, is_stored=True, now_ms=now).dead_letters


def states(window: Window) -> list[tuple[int, int, str, int]]:
    return [(run.first, run.last, run.state.name, run.delivery_count) for run in window.runs()]


def test_whole_batches_or_exactly_as_many_as_asked_for() -> None:
    window = Window(0, Limits())
    assert take(window, count=15) == [(0, 19, 1)]
    assert take(window, count=15, mode=AcquireMode.RECORD_LIMIT) == [(20, 34, 1)]
    assert take(window, count=3, mode=AcquireMode.RECORD_LIMIT) == [(35, 37, 1)]
    assert take(window, count=1) == [(38, 39, 1)]


def test_long_ranges_are_told_in_parts() -> None:
    window = Window(0, Limits())
    assert take(window, count=55, batch_size=15) == [(0, 19, 1), (20, 39, 1), (40, 59, 1)]


def test_the_window_has_a_limit_and_redeliveries_go_on_at_it() -> None:
    window = Window(0, Limits(max_locks=20))
    assert take(window, count=50, mode=AcquireMode.RECORD_LIMIT) == [(0, 19, 1)]
    assert window.next_fetch_offset(0) is None
    say(window, 5, 6, RELEASE)
    assert take(window, "b", count=50) == [(5, 6, 2)]
    say(window, 0, 4, ACCEPT)
    assert window.start_offset == 5
    assert window.next_fetch_offset(0) == 20


def test_a_mixed_answer_and_the_start() -> None:
    window = Window(0, Limits())
    take(window)
    say(window, 0, 4, ACCEPT, REJECT, RELEASE, AcknowledgeType.GAP, ACCEPT)
    assert (window.start_offset, window.completed) == (2, 2)
    assert states(window) == [
        (2, 2, "AVAILABLE", 1),
        (3, 3, "ARCHIVED", 0),
        (4, 4, "ACKNOWLEDGED", 0),
        (5, 9, "ACQUIRED", 1),
    ]


def test_an_answer_counts_when_it_is_stored_and_not_before() -> None:
    window = Window(0, Limits())
    take(window)
    said = window.acknowledge("a", [AcknowledgeBatch(0, 9, [ACCEPT])], 0)
    assert said.store == [StateBatch(0, 9, RecordState.ACKNOWLEDGED, 1)]
    assert window.start_offset == 0
    with pytest.raises(ApiError) as twice:
        window.acknowledge("a", [AcknowledgeBatch(3, 3, [ACCEPT])], 0)
    assert twice.value.code is ErrorCode.INVALID_RECORD_STATE
    window.finish(said, is_stored=False, now_ms=0)
    said = window.acknowledge("a", [AcknowledgeBatch(0, 9, [ACCEPT])], 0)
    window.finish(said, is_stored=True, now_ms=0)
    assert window.start_offset == window.end_offset == 10


def test_a_lock_that_ran_out_while_its_answer_was_not_stored() -> None:
    window = Window(0, Limits(lock_ms=100))
    take(window)
    said = window.acknowledge("a", [AcknowledgeBatch(0, 9, [ACCEPT])], 0)
    assert not window.expire(500).store
    changes = window.finish(said, is_stored=False, now_ms=500)
    assert changes.store == [StateBatch(0, 9, RecordState.AVAILABLE, 1)]
    assert take(window, "b", now=500) == [(0, 9, 2)]


def test_an_answer_is_taken_as_a_whole() -> None:
    window = Window(0, Limits())
    take(window, count=10)
    take(window, "b", count=10)
    for batches, code in (
        ([AcknowledgeBatch(0, 9, [ACCEPT]), AcknowledgeBatch(10, 12, [ACCEPT])], ErrorCode.INVALID_RECORD_STATE),
        ([AcknowledgeBatch(5, 9, [ACCEPT]), AcknowledgeBatch(0, 4, [ACCEPT])], ErrorCode.INVALID_REQUEST),
        ([AcknowledgeBatch(0, 9, [ACCEPT, ACCEPT])], ErrorCode.INVALID_REQUEST),
        ([AcknowledgeBatch(0, 9, [])], ErrorCode.INVALID_REQUEST),
        ([AcknowledgeBatch(0, 1, [ACCEPT, 5])], ErrorCode.INVALID_REQUEST),
        ([AcknowledgeBatch(4, 3, [ACCEPT])], ErrorCode.INVALID_REQUEST),
        ([AcknowledgeBatch(0, 50, [ACCEPT])], ErrorCode.INVALID_REQUEST),
    ):
        with pytest.raises(ApiError) as refused:
            window.acknowledge("a", batches, 0)
        assert refused.value.code is code
    assert [run.pending for run in window.runs()] == [None, None]


def test_a_renewal_begins_the_lock_anew() -> None:
    window = Window(0, Limits(lock_ms=100))
    take(window)
    assert not window.acknowledge("a", [AcknowledgeBatch(0, 3, [RENEW])], 60).store
    assert window.expire(100).store == [StateBatch(4, 9, RecordState.AVAILABLE, 1)]
    assert window.next_deadline_ms() == 160
    window.limits = Limits(renews=False)
    with pytest.raises(ApiError) as refused:
        window.acknowledge("a", [AcknowledgeBatch(0, 3, [RENEW])], 60)
    assert refused.value.code is ErrorCode.INVALID_RECORD_STATE


def test_a_record_that_keeps_failing_comes_alone_and_is_given_up() -> None:
    window = Window(0, Limits(max_deliveries=4, lock_ms=10))
    now, sizes = 0, []
    for _ in range(40):
        got = take(window, count=10, now=now, batches=TENS[:1])
        if not got:
            break
        sizes.append((sum(each.last_offset - each.first_offset + 1 for each in got), got[0].delivery_count))
        now += 20
        window.expire(now)
    assert sizes == [(10, 1), (10, 2), (5, 3), *[(1, 4)] * 5, (5, 3), *[(1, 4)] * 5]
    assert window.start_offset == 10


def test_records_rest_longer_after_each_failure() -> None:
    window = Window(0, Limits(backoff_ms=100, backoff_max_ms=350, max_deliveries=9))
    now, rests = 0, []
    for _ in range(4):
        assert take(window, now=now, count=1, batches=[LogBatch(0, 0)])
        say(window, 0, 0, RELEASE, now=now)
        assert take(window, now=now, count=1, batches=[LogBatch(0, 0)]) == []
        rested = window.next_rested_ms(now)
        assert rested is not None
        rests.append(rested - now)
        now = rested
    assert rests == [100, 200, 350, 350]


def test_dead_letters_are_named_with_their_reason_and_hold_the_start_until_copied() -> None:
    window = Window(0, Limits(dead_letters=True, max_deliveries=2, lock_ms=10))
    take(window, count=10)
    rejected = DeadLetter(0, 1, 1, DeadLetterReason.REJECTED)
    assert say(window, 0, 1, REJECT) == [rejected]
    assert window.start_offset == 0
    assert window.dead_lettered(rejected).store == [StateBatch(0, 1, RecordState.ARCHIVED, 1)]
    assert window.start_offset == 2
    say(window, 2, 9, RELEASE)
    take(window, count=10)
    assert [letter.reason for letter in say(window, 2, 2, RELEASE)] == [DeadLetterReason.DELIVERY_COUNT_EXCEEDED]
    assert {letter.reason for letter in window.expire(10).dead_letters} == {DeadLetterReason.LOCK_TIMEOUT}


def test_letters_that_were_on_their_way_are_sent_again_after_a_restart() -> None:
    stored = [StateBatch(5, 6, RecordState.ARCHIVING, 1), StateBatch(7, 7, RecordState.ARCHIVING, 5)]
    window, changes = Window.load(5, stored, Limits(dead_letters=True))
    assert [(each.first_offset, each.reason) for each in changes.dead_letters] == [
        (5, DeadLetterReason.REJECTED),
        (7, DeadLetterReason.DELIVERY_COUNT_EXCEEDED),
    ]
    assert window.start_offset == 5


def test_what_the_log_skips_and_what_nobody_may_see_is_passed_over() -> None:
    window = Window(0, Limits())
    log = [LogBatch(2, 4), LogBatch(5, 5, is_deliverable=False), LogBatch(8, 9), LogBatch(10, 10, is_deliverable=False)]
    assert take(window, count=100, batches=log) == [(2, 4, 1), (8, 9, 1)]
    assert window.start_offset == 2
    say(window, 2, 4, ACCEPT)
    assert window.start_offset == 8
    say(window, 8, 9, ACCEPT)
    assert window.start_offset == window.end_offset == 11


def test_retention_takes_records_from_whoever_holds_them() -> None:
    window = Window(0, Limits())
    take(window, count=20)
    said = window.acknowledge("a", [AcknowledgeBatch(0, 19, [ACCEPT])], 0)
    assert window.move_log_start(5)
    assert not window.move_log_start(5)
    window.finish(said, is_stored=True, now_ms=0)
    assert window.start_offset == 20
    assert window.move_log_start(50)
    assert (window.start_offset, window.end_offset, window.next_fetch_offset(0)) == (50, 50, 50)
    assert not window.acknowledge("a", [AcknowledgeBatch(10, 12, [ACCEPT])], 0).store


def test_a_member_that_leaves_gives_back_what_it_holds() -> None:
    window = Window(0, Limits())
    take(window, count=10)
    take(window, "b", count=10)
    window.finish(window.release("a"), is_stored=True, now_ms=0)
    assert take(window, "c") == [(0, 9, 2)]
    assert states(window) == [(0, 9, "ACQUIRED", 2), (10, 19, "ACQUIRED", 1)]


@pytest.mark.parametrize(
    "batches",
    [
        [StateBatch(3, 4, RecordState.AVAILABLE, 1)],
        [StateBatch(7, 6, RecordState.AVAILABLE, 1)],
        [StateBatch(6, 9, RecordState.AVAILABLE, 1), StateBatch(9, 10, RecordState.AVAILABLE, 1)],
    ],
)
def test_nonsense_is_not_loaded(batches: list[StateBatch]) -> None:
    with pytest.raises(ValueError):
        Window.load(5, batches, Limits())


def test_ten_thousand_records_answered_one_by_one_stay_cheap() -> None:
    window = Window(0, Limits(max_locks=10_000))
    log = [LogBatch(0, 9_999)]
    take(window, count=10_000, batches=log)
    begun = time.process_time()
    for offset in range(1, 10_000, 2):  # the worst order: every second one, so that nothing can be let go of
        window.finish(
            window.acknowledge("a", [AcknowledgeBatch(offset, offset, [ACCEPT])], 0), is_stored=True, now_ms=0
        )
    for offset in range(9_998, -1, -2):
        window.finish(
            window.acknowledge("a", [AcknowledgeBatch(offset, offset, [ACCEPT])], 0), is_stored=True, now_ms=0
        )
    assert window.start_offset == 10_000
    assert time.process_time() - begun < 5, "each answer looks at the whole window"
