"""The protocol of the sink against a model of the brokers: processes die before and after every request they make."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import ApiError, ErrorCode, MillraceError
from millrace.model import TopicPartition
from millrace.spark import exactly_once
from millrace.spark.exactly_once import BatchFence, BatchTorn, Part, Superseded
from support.transaction_model import Killed, ModelClient, ModelCluster, ModelLog, ModelTransactions

QUERY = "q"
TASKS = 3
TOUCHED = (TopicPartition("t", 0),)
_attempt_ids = itertools.count()


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactly_once, "transactions", ModelTransactions)


def dies_at(moment: int) -> Callable[[str], None]:
    """Kills the process before its request of this number."""
    left = itertools.count()

    def hook(_: str) -> None:
        if next(left) == moment:
            raise Killed

    return hook


class Run:
    """A run of the query: a driver with its tasks, as Spark would have them."""

    def __init__(self, cluster: ModelCluster, name: str, hook: Callable[[str], None] | None = None) -> None:
        self.cluster = cluster
        self.name = name
        self.client = ModelClient(cluster, hook)
        self.log = ModelLog(self.client)

    def fence(self, batch_id: int, task: int, attempt: int = 0) -> BatchFence:
        return BatchFence(QUERY, batch_id, task, self.name, attempt=attempt, attempt_id=next(_attempt_ids))

    def task(self, batch_id: int, task: int, attempt: int = 0) -> Part | None:
        part = exactly_once.begin_part(self.log, self.fence(batch_id, task, attempt), 1)
        if part is not None:
            self.client.write(part.transaction, (batch_id, task))
        return part

    def commit(self, batch_id: int, parts: list[Part | None]) -> None:
        taking_part = {each: TOUCHED for each in parts if each is not None}
        exactly_once.commit(self.log, self.fence(batch_id, 0), taking_part)

    def batch(self, batch_id: int) -> None:
        parts = [self.task(batch_id, task) for task in range(TASKS)]
        try:
            self.commit(batch_id, parts)
        except MillraceError:  # as Spark does it
            exactly_once.abort(self.log, self.fence(batch_id, 0), [each for each in parts if each is not None])
            raise


def rows(*batches: int) -> list[Any]:
    return [(batch, task) for batch in batches for task in range(TASKS)]


def moments_of_a_batch() -> Iterator[int]:
    """Every request of a second batch, and the moment after the last."""
    cluster = ModelCluster()
    Run(cluster, "r1").batch(0)
    seen: list[str] = []
    Run(cluster, "r2", seen.append).batch(1)
    assert {"read", "claim", "shut out", "init", "write", "check", "decide", "commit"} == set(seen)
    return iter(range(len(seen) + 1))


def test_batches_one_after_another_use_the_same_ids() -> None:
    cluster = ModelCluster()
    run = Run(cluster, "r1")
    for batch in range(4):
        run.batch(batch)
    assert sorted(cluster.committed) == rows(0, 1, 2, 3)
    assert len(cluster.ids) == TASKS and {each.epoch for each in cluster.ids.values()} == {3}


@pytest.mark.parametrize("compacted", [False, True])
def test_a_driver_killed_before_every_request_of_a_batch_and_repeated(compacted: bool) -> None:
    for moment in moments_of_a_batch():
        cluster = ModelCluster()
        Run(cluster, "r1").batch(0)
        with suppress(Killed):
            Run(cluster, "r2", dies_at(moment)).batch(1)
        if compacted:
            cluster.compact()
        # Again, at the same moment: what a repetition does must be repeatable as well.
        with suppress(Killed):
            Run(cluster, "r3", dies_at(moment)).batch(1)
        last = Run(cluster, "r4")
        last.batch(1)
        last.batch(2)
        assert sorted(cluster.committed) == rows(0, 1, 2), moment
        assert not cluster.open_rows, moment


def test_nothing_is_visible_of_a_batch_that_is_not_decided_and_all_of_it_once_it_is() -> None:
    for moment in moments_of_a_batch():
        cluster = ModelCluster()
        Run(cluster, "r1").batch(0)
        with suppress(Killed):
            Run(cluster, "r2", dies_at(moment)).batch(1)
        decided = ModelLog(ModelClient(cluster)).state(QUERY).has_decided(1)
        visible = [row for row in cluster.committed if row[0] == 1]
        assert decided or not visible


def test_a_repeated_task_whose_first_attempt_died_or_lost() -> None:
    cluster = ModelCluster()
    run = Run(cluster, "r1")
    run.batch(0)
    first = run.task(1, 0)  # its process dies with the message
    parts = [run.task(1, 0, attempt=1), run.task(1, 1), run.task(1, 2)]
    assert first is not None
    fence = run.fence(1, 0)
    exactly_once.commit(
        run.log, fence, {each: TOUCHED for each in parts if each is not None}, [fence.usual_id(first.series)]
    )
    assert sorted(cluster.committed) == rows(0, 1)
    assert not cluster.open_rows  # nobody has to wait for the timeout of the first attempt
    run.batch(2)
    run.batch(3)
    assert sorted(cluster.committed) == rows(0, 1, 2, 3)


def test_an_attempt_that_wakes_up_late_harms_nobody() -> None:
    """It was about to begin its transaction when its executor was lost, and does so in the next batch."""
    for later in range(3):
        cluster = ModelCluster()
        run = Run(cluster, "r1")
        run.batch(0)
        late = exactly_once.begin_part(run.log, run.fence(1, 0), 1)
        assert late is not None
        parts = [run.task(1, 0, attempt=1), run.task(1, 1), run.task(1, 2)]
        if later == 0:
            cluster.init(late.transaction.transactional_id)
        run.commit(1, parts)
        if later == 1:
            cluster.init(late.transaction.transactional_id)
        parts = [run.task(2, task) for task in range(TASKS)]
        if later == 2:
            cluster.init(late.transaction.transactional_id)
        run.commit(2, parts)
        assert sorted(cluster.committed) == rows(0, 1, 2)


def test_a_request_that_was_lost_may_arrive_at_any_time() -> None:
    cluster = ModelCluster()
    run = Run(cluster, "r1")
    run.batch(0)

    def lose_one(what: str) -> None:
        if what == "init":
            run.client.hook = lambda _: None
            raise ApiError(ErrorCode.NETWORK_EXCEPTION)

    run.client.hook = lose_one
    parts = [run.task(1, task) for task in range(TASKS)]
    assert [each is not None and each.usual for each in parts] == [False, True, True]
    assert parts[1] is not None
    lost = run.fence(1, 0).usual_id(parts[1].series)
    cluster.init(lost)
    run.commit(1, parts)
    parts = [run.task(2, task) for task in range(TASKS)]
    cluster.init(lost)
    run.commit(2, parts)
    assert sorted(cluster.committed) == rows(0, 1, 2)


def test_two_first_attempts_are_found_before_anything_is_decided() -> None:
    cluster = ModelCluster()
    run = Run(cluster, "r1")
    parts = [run.task(0, task) for task in range(TASKS)]
    run.task(0, 0)  # of another attempt at the stage: Spark does not say so
    with pytest.raises(MillraceError, match=r"ended before the batch did.*Start the query again"):
        run.commit(0, parts)
    Run(cluster, "r2").batch(0)
    assert sorted(cluster.committed) == rows(0)


def test_a_driver_that_was_replaced_decides_nothing() -> None:
    cluster = ModelCluster()
    zombie = Run(cluster, "r1")
    zombie.batch(0)
    parts = [zombie.task(1, task) for task in range(TASKS)]
    successor = Run(cluster, "r2")
    taken = [successor.task(1, task) for task in range(TASKS)]
    with pytest.raises(Superseded, match="r2 has taken over"):
        zombie.commit(1, parts)
    with pytest.raises(Superseded):
        zombie.task(1, 0)
    successor.commit(1, taken)
    with pytest.raises(Superseded):
        zombie.task(2, 0)
    successor.batch(2)
    assert sorted(cluster.committed) == rows(0, 1, 2)


def test_a_decision_that_arrives_after_its_driver_was_replaced_is_void() -> None:
    cluster = ModelCluster()
    zombie = Run(cluster, "r1")
    parts = [zombie.task(0, task) for task in range(TASKS)]
    successor = Run(cluster, "r2")

    def replaced(what: str) -> None:
        if what == "decide":
            successor.batch(0)

    zombie.client.hook = replaced
    with pytest.raises(Superseded):
        zombie.commit(0, parts)
    cluster.compact()
    successor.batch(1)
    assert sorted(cluster.committed) == rows(0, 1)


def test_a_commit_that_failed_after_its_decision_is_not_aborted() -> None:
    cluster = ModelCluster()
    run = Run(cluster, "r1")

    def unanswered(what: str) -> None:
        if what == "commit":
            raise ApiError(ErrorCode.REQUEST_TIMED_OUT)

    run.client.hook = unanswered
    with pytest.raises(ApiError):
        run.batch(0)
    Run(cluster, "r2").batch(0)
    assert sorted(cluster.committed) == rows(0)


def test_a_decision_under_way_when_its_batch_is_aborted_is_void() -> None:
    cluster = ModelCluster()
    run = Run(cluster, "r1")
    before = len(cluster.log)

    def no_answer(what: str) -> None:
        if what == "decide":
            raise ApiError(ErrorCode.REQUEST_TIMED_OUT)

    run.client.hook = no_answer
    with pytest.raises(ApiError):
        run.batch(0)
    # What was on its way arrives now: the same decision, as another driver that got through would have written it.
    witness = ModelCluster()
    Run(witness, "r1").batch(0)
    cluster.log += [entry for entry in witness.log if b"decision" in entry[0]]
    assert len(cluster.log) > before and not ModelLog(ModelClient(cluster)).state(QUERY).has_decided(0)
    assert not cluster.open_rows
    Run(cluster, "r2").batch(0)
    assert sorted(cluster.committed) == rows(0)


def test_a_batch_that_waits_too_long_before_its_decision_is_repeated() -> None:
    cluster = ModelCluster()
    run = Run(cluster, "r1")
    parts = [run.task(0, task) for task in range(TASKS)]
    cluster.time_out()
    with pytest.raises(MillraceError, match=r"raise that"):
        run.commit(0, parts)
    Run(cluster, "r2").batch(0)
    assert sorted(cluster.committed) == rows(0)


def test_a_decided_batch_whose_transactions_timed_out_is_never_passed_over() -> None:
    cluster = ModelCluster()

    def dies(what: str) -> None:
        if what == "commit":
            raise Killed

    with pytest.raises(Killed):
        Run(cluster, "r1", dies).batch(0)
    cluster.time_out()
    for name in ("r2", "r3"):
        with pytest.raises(BatchTorn, match=r"batch 0 of query q.*3 of its 3.*delivery=at-least-once"):
            Run(cluster, name).batch(0)


def test_tasks_without_rows_take_no_part() -> None:
    cluster = ModelCluster()
    run = Run(cluster, "r1")
    run.commit(0, [run.task(0, 1)])
    run.batch(1)
    assert sorted(cluster.committed) == [(0, 1), *rows(1)]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["dies", "zombie", "worker"]), st.integers(0, 30), st.integers(0, TASKS - 1), st.booleans()
        ),
        max_size=6,
    )
)
def test_any_history_of_failures(failures: list[tuple[str, int, int, bool]]) -> None:
    """Batches 0 to 4 with a failure now and then; a run that was replaced tries to go on now and then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exactly_once, "transactions", ModelTransactions)
        cluster = ModelCluster()
        runs = [Run(cluster, "r0")]
        batch = 0
        coming = iter(failures)
        held: list[tuple[Run, int, list[Part | None]]] = []
        while batch < 5:
            kind, moment, task, compacts = next(coming, ("none", 0, 0, False))
            run = runs[-1]
            run.client.hook = dies_at(moment) if kind == "dies" else (lambda _: None)
            if compacts:
                cluster.compact()
            try:
                if kind == "worker":
                    run.task(batch, task)
                    parts = [run.task(batch, each, attempt=int(each == task)) for each in range(TASKS)]
                    run.commit(batch, parts)
                elif kind == "zombie":
                    # It has written, and wants to commit when somebody else has begun.
                    parts = [run.task(batch, each) for each in range(TASKS)]
                    if parts[0] is not None:
                        held.append((run, batch, parts))
                    raise Killed
                else:
                    run.batch(batch)
            except Killed:
                runs.append(Run(cluster, f"r{len(runs)}"))
                continue
            for zombie, at, parts in held:
                with suppress(Superseded):  # of a batch that is decided by now, it commits what counts
                    zombie.commit(at, parts)
                with pytest.raises(Superseded):
                    zombie.task(batch + 1, 0)
            held.clear()
            batch += 1
        assert sorted(cluster.committed) == rows(0, 1, 2, 3, 4)
