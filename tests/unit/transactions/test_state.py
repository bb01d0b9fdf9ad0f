"""What each request makes of a transactional id."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from millrace.errors import ApiError, ErrorCode
from millrace.transactions.state import (
    NOBODY,
    Decision,
    NeedsProducerId,
    Producer,
    Transaction,
    TransactionState,
    complete,
    may_expire,
    plan_add,
    plan_end,
    plan_fence,
    plan_init,
    verified,
)
from support.transactions import A, B

NOW = 1_000_000
S = TransactionState
EPOCH = 5
BASE = Transaction(7, EPOCH, 60_000, updated_ms=NOW - 10)
ONGOING = replace(BASE, state=S.ONGOING, partitions=frozenset({A}), start_ms=NOW - 5)
ME = Producer(7, EPOCH)
OLD = Producer(7, EPOCH - 1)
STATES = (S.EMPTY, S.ONGOING, S.PREPARE_COMMIT, S.PREPARE_ABORT, S.COMPLETE_COMMIT, S.COMPLETE_ABORT)


def init(current: Transaction | None, expected: Producer | None = None, **more: Any) -> Decision:
    return plan_init(
        current, **{"timeout_ms": 60_000, "expected": expected, "new_producer_id": None, "now_ms": NOW} | more
    )


def end(current: Transaction | None, producer: Producer, *, commits: bool = True, version: int = 2, **more: Any) -> Any:
    return plan_end(
        current, producer, **{"commits": commits, "version": version, "new_producer_id": None, "now_ms": NOW} | more
    )


def refusal(plan: Callable[[], object]) -> ErrorCode:
    with pytest.raises(ApiError) as refused:
        plan()
    return refused.value.code


def after(decision: Decision) -> Transaction:
    assert decision.after is not None
    return decision.after


# InitProducerId


def test_the_first_producer_gets_a_new_id_and_epoch_0() -> None:
    with pytest.raises(NeedsProducerId):
        init(None)
    decision = init(None, new_producer_id=9)
    assert decision.producer == Producer(9, 0) == after(decision).producer
    assert after(decision).state is S.EMPTY


@pytest.mark.parametrize("state", [S.EMPTY, S.COMPLETE_COMMIT, S.COMPLETE_ABORT])
def test_the_next_producer_gets_the_next_epoch_and_the_one_before_is_fenced(state: TransactionState) -> None:
    decision = init(replace(BASE, state=state, last_producer_epoch=4))
    assert decision.producer == Producer(7, EPOCH + 1)
    assert (after(decision).state, after(decision).last_producer_epoch) == (S.EMPTY, -1)
    assert refusal(lambda: init(after(decision), ME)) is ErrorCode.PRODUCER_FENCED


def test_a_producer_goes_on_after_an_error_and_may_say_so_twice() -> None:
    decision = init(replace(BASE, state=S.COMPLETE_COMMIT), ME)
    assert decision.producer == Producer(7, EPOCH + 1)
    again = init(after(decision), ME)
    assert (again.after, again.producer) == (None, decision.producer)
    assert refusal(lambda: init(after(decision), OLD)) is ErrorCode.PRODUCER_FENCED
    assert refusal(lambda: init(after(decision), Producer(8, EPOCH))) is ErrorCode.PRODUCER_FENCED


def test_a_repeated_request_with_another_timeout_is_written_down_with_the_same_epoch() -> None:
    decision = init(after(init(BASE, ME)), ME, timeout_ms=5)
    assert (after(decision).timeout_ms, decision.producer) == (5, Producer(7, EPOCH + 1))


def test_used_up_epochs_lead_to_a_new_id_also_for_who_repeats_the_request() -> None:
    used_up = replace(BASE, producer_epoch=32766)
    with pytest.raises(NeedsProducerId):
        init(used_up)
    decision = init(used_up, Producer(7, 32766), new_producer_id=8)
    assert decision.producer == Producer(8, 0)
    assert init(after(decision), Producer(7, 32766)).producer == Producer(8, 0)
    assert refusal(lambda: init(after(decision), Producer(7, 32765))) is ErrorCode.PRODUCER_FENCED
    # A producer that knew nothing of the old id leaves nobody who could go on.
    assert refusal(lambda: init(after(init(used_up, new_producer_id=8)), Producer(7, 32766))) is (
        ErrorCode.PRODUCER_FENCED
    )


def test_an_open_transaction_is_aborted_first() -> None:
    decision = init(ONGOING)
    assert (decision.error, decision.producer) == (ErrorCode.CONCURRENT_TRANSACTIONS, NOBODY)
    prepared = after(decision)
    assert (prepared.state, prepared.producer_epoch, prepared.version) == (S.PREPARE_ABORT, EPOCH + 1, 2)
    assert prepared.partitions == {A}
    assert refusal(lambda: init(prepared)) is ErrorCode.CONCURRENT_TRANSACTIONS
    # Then everybody gets an epoch that was never used: who began it, and who comes after it.
    aborted = complete(prepared, NOW)
    assert init(aborted, ME).producer == Producer(7, EPOCH + 1)
    assert init(aborted).producer == Producer(7, EPOCH + 2)


def test_a_fenced_producer_aborts_nothing() -> None:
    assert refusal(lambda: init(ONGOING, OLD)) is ErrorCode.PRODUCER_FENCED
    assert refusal(lambda: init(replace(ONGOING, last_producer_epoch=OLD.epoch), OLD)) is ErrorCode.PRODUCER_FENCED
    assert init(ONGOING, ME).error is ErrorCode.CONCURRENT_TRANSACTIONS


# Adding partitions


@pytest.mark.parametrize("state", [S.EMPTY, S.COMPLETE_COMMIT, S.COMPLETE_ABORT])
def test_a_transaction_begins_with_its_first_partition(state: TransactionState) -> None:
    begun = after(plan_add(replace(BASE, state=state), ME, [A], version=0, now_ms=NOW))
    assert (begun.state, begun.partitions, begun.start_ms) == (S.ONGOING, {A}, NOW)


def test_more_partitions_do_not_begin_it_anew() -> None:
    more = after(plan_add(ONGOING, ME, [A, B], version=2, now_ms=NOW))
    assert (more.partitions, more.start_ms, more.version) == ({A, B}, ONGOING.start_ms, 2)
    assert plan_add(more, ME, [B], version=2, now_ms=NOW).after is None


@pytest.mark.parametrize("plan", [lambda *it: plan_add(*it, version=2, now_ms=NOW), verified])
def test_who_may_not_add_or_ask(plan: Callable[..., object]) -> None:
    assert refusal(lambda: plan(None, ME, [A])) is ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert refusal(lambda: plan(ONGOING, Producer(8, EPOCH), [A])) is ErrorCode.INVALID_PRODUCER_ID_MAPPING
    for epoch in (EPOCH - 1, EPOCH + 1):
        assert refusal(lambda epoch=epoch: plan(ONGOING, Producer(7, epoch), [A])) is ErrorCode.PRODUCER_FENCED
    for state in (S.PREPARE_COMMIT, S.PREPARE_ABORT):
        assert refusal(lambda state=state: plan(replace(ONGOING, state=state), ME, [A])) is (
            ErrorCode.CONCURRENT_TRANSACTIONS
        )


def test_a_producer_whose_new_id_is_not_in_effect_yet_has_to_wait() -> None:
    prepared = after(end(replace(ONGOING, producer_epoch=32766), Producer(7, 32766), new_producer_id=8))
    adding = lambda: plan_add(prepared, Producer(8, 0), [A], version=2, now_ms=NOW)  # noqa: E731
    assert refusal(adding) is ErrorCode.CONCURRENT_TRANSACTIONS


def test_only_what_is_part_of_the_transaction_is_verified() -> None:
    assert verified(ONGOING, ME, [A, B]) == {A: ErrorCode.NONE, B: ErrorCode.TRANSACTION_ABORTABLE}
    assert verified(BASE, ME, [A]) == {A: ErrorCode.TRANSACTION_ABORTABLE}


# The end, before transaction version 2


@pytest.mark.parametrize("commits", [True, False])
def test_a_classic_end_keeps_the_epoch(commits: bool) -> None:
    decision = end(ONGOING, ME, commits=commits, version=0)
    prepared = after(decision)
    assert prepared.state is (S.PREPARE_COMMIT if commits else S.PREPARE_ABORT)
    assert (prepared.producer, prepared.version, decision.producer) == (ME, 0, NOBODY)
    done = complete(prepared, NOW)
    assert done.state is (S.COMPLETE_COMMIT if commits else S.COMPLETE_ABORT)
    assert (done.producer, done.partitions) == (ME, frozenset())
    assert end(done, ME, commits=commits, version=0).after is None
    assert refusal(lambda: end(done, ME, commits=not commits, version=0)) is ErrorCode.INVALID_TXN_STATE


def test_who_may_not_end_in_the_classic_way() -> None:
    for commits in (True, False):
        assert refusal(lambda c=commits: end(BASE, ME, commits=c, version=0)) is ErrorCode.INVALID_TXN_STATE
    for state in STATES:
        current = replace(ONGOING, state=state)
        assert refusal(lambda it=current: end(it, OLD, version=0)) is ErrorCode.PRODUCER_FENCED
        assert refusal(lambda it=current: end(it, Producer(8, EPOCH), version=0)) is (
            ErrorCode.INVALID_PRODUCER_ID_MAPPING
        )
    for state in (S.PREPARE_COMMIT, S.PREPARE_ABORT):
        assert refusal(lambda state=state: end(replace(ONGOING, state=state), ME, version=0)) is (
            ErrorCode.CONCURRENT_TRANSACTIONS
        )
    assert refusal(lambda: end(None, ME, version=0)) is ErrorCode.INVALID_PRODUCER_ID_MAPPING


# The end with transaction version 2


@pytest.mark.parametrize("commits", [True, False])
def test_every_end_raises_the_epoch(commits: bool) -> None:
    decision = end(ONGOING, ME, commits=commits)
    prepared = after(decision)
    assert decision.producer == prepared.producer == Producer(7, EPOCH + 1)
    done = complete(prepared, NOW)
    assert done.producer == decision.producer
    # Who did not hear it asks again, and hears the same.
    again = end(done, ME, commits=commits)
    assert (again.after, again.producer) == (None, decision.producer)
    assert refusal(lambda: end(done, ME, commits=not commits)) is ErrorCode.INVALID_TXN_STATE
    assert refusal(lambda: end(done, OLD, commits=commits)) is ErrorCode.PRODUCER_FENCED


def end_of(state: TransactionState, which: str, *, commits: bool) -> ErrorCode | str:
    """What happens to an end with the epoch that led to the current one, or with the current one."""
    last = EPOCH - 1 if state in {S.COMPLETE_COMMIT, S.COMPLETE_ABORT} else -1
    current = replace(BASE, state=state, version=2, last_producer_epoch=last)
    try:
        decision = end(current, OLD if which == "retry" else ME, commits=commits)
    except ApiError as error:
        return error.code
    return "bumped" if decision.after else "same"


@pytest.mark.parametrize(
    ("state", "which", "abort", "commit"),
    [
        (S.EMPTY, "retry", ErrorCode.PRODUCER_FENCED, ErrorCode.PRODUCER_FENCED),
        (S.EMPTY, "current", "bumped", ErrorCode.INVALID_TXN_STATE),
        (S.COMPLETE_ABORT, "retry", "same", ErrorCode.INVALID_TXN_STATE),
        (S.COMPLETE_ABORT, "current", "bumped", ErrorCode.INVALID_TXN_STATE),
        (S.COMPLETE_COMMIT, "retry", ErrorCode.INVALID_TXN_STATE, "same"),
        (S.COMPLETE_COMMIT, "current", "bumped", ErrorCode.INVALID_TXN_STATE),
        (S.PREPARE_COMMIT, "retry", ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.CONCURRENT_TRANSACTIONS),
        (S.PREPARE_ABORT, "retry", ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.CONCURRENT_TRANSACTIONS),
    ],
)
def test_ends_without_an_open_transaction(state: TransactionState, which: str, abort: object, commit: object) -> None:
    assert end_of(state, which, commits=False) == abort
    assert end_of(state, which, commits=True) == commit


def test_a_fenced_producer_does_not_learn_the_epoch_of_one_that_keeps_its_own() -> None:
    committed = replace(BASE, state=S.COMPLETE_COMMIT, version=0)
    assert refusal(lambda: end(committed, OLD)) is ErrorCode.PRODUCER_FENCED


def test_used_up_epochs_lead_to_a_new_id_at_the_end() -> None:
    last = replace(ONGOING, producer_epoch=32766)
    me = Producer(7, 32766)
    with pytest.raises(NeedsProducerId):
        end(last, me)
    decision = end(last, me, new_producer_id=8)
    prepared = after(decision)
    assert decision.producer == Producer(8, 0)
    assert prepared.producer == Producer(7, 32767)  # as the markers have it
    done = complete(prepared, NOW)
    assert (done.producer, done.next_producer_id) == (Producer(8, 0), -1)
    assert end(done, me).producer == Producer(8, 0)
    assert refusal(lambda: end(done, Producer(7, 32765))) is ErrorCode.INVALID_PRODUCER_ID_MAPPING


def test_the_limit_of_epochs_can_be_lower() -> None:
    with pytest.raises(NeedsProducerId):
        end(ONGOING, ME, last_epoch=EPOCH + 1)
    assert end(ONGOING, ME, last_epoch=EPOCH + 1, new_producer_id=8).producer == Producer(8, 0)


# The coordinator by itself


def test_a_transaction_out_of_time_is_aborted_and_its_producer_fenced() -> None:
    prepared = after(plan_fence(ONGOING, new_producer_id=None, now_ms=NOW))
    assert (prepared.state, prepared.producer_epoch) == (S.PREPARE_ABORT, EPOCH + 1)
    done = complete(prepared, NOW)
    assert refusal(lambda: plan_add(done, ME, [A], version=2, now_ms=NOW)) is ErrorCode.PRODUCER_FENCED
    assert refusal(lambda: end(done, ME, version=0)) is ErrorCode.PRODUCER_FENCED
    assert refusal(lambda: end(done, ME)) is ErrorCode.INVALID_TXN_STATE  # nothing was committed
    assert end(done, ME, commits=False).producer == Producer(7, EPOCH + 1)
    assert refusal(lambda: plan_fence(done, new_producer_id=None, now_ms=NOW)) is ErrorCode.INVALID_TXN_STATE


@pytest.mark.parametrize("state", STATES)
def test_ids_expire_between_transactions_only(state: TransactionState) -> None:
    current = replace(ONGOING, state=state, updated_ms=NOW - 100)
    between = state in {S.EMPTY, S.COMPLETE_COMMIT, S.COMPLETE_ABORT}
    assert may_expire(current, NOW, 100) is between
    assert not may_expire(current, NOW, 101)


def test_the_names_of_states_are_kafkas() -> None:
    assert [each.title for each in TransactionState] == [
        "Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort", "Dead",
        "PrepareEpochFence",
    ]  # fmt: skip
