"""The transaction coordinator on a log in memory, through failovers and with a clock that only the test moves."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from millrace.errors import ApiError, ErrorCode
from millrace.replication.state_topic import java_hash
from millrace.transactions.settings import TransactionSettings
from millrace.transactions.state import Producer, TransactionState
from support.transactions import A, B, Bench, run_ready

S = TransactionState


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    await bench.lead()
    yield bench
    await bench.coordinator.stop()


async def refusal(work: Coroutine[Any, Any, object]) -> ErrorCode:
    with pytest.raises(ApiError) as refused:
        await work
    return refused.value.code


async def test_a_transaction_from_its_beginning_to_its_end(bench: Bench) -> None:
    me = await bench.begin("x", A, B)
    assert bench.states()["x"].state is S.ONGOING
    after = await bench.coordinator.end("x", me, commits=True, version=2)
    assert after == Producer(me.producer_id, me.epoch + 1)
    await run_ready()
    assert bench.states()["x"].state is S.COMPLETE_COMMIT
    ((marker, partitions),) = bench.markers.sent
    assert partitions == {A, B}
    assert (marker.producer_id, marker.producer_epoch) == after
    assert (marker.commits, marker.coordinator_epoch, marker.transaction_version) == (True, 0, 2)


async def test_the_end_is_answered_before_the_markers_and_the_next_transaction_waits_for_them(bench: Bench) -> None:
    me = await bench.begin("x", A)
    bench.markers.open.clear()
    me = await bench.coordinator.end("x", me, commits=False, version=2)
    await run_ready()
    assert bench.states()["x"].state is S.PREPARE_ABORT
    adding = lambda: bench.coordinator.add_partitions("x", me, [B], version=2)  # noqa: E731
    assert await refusal(adding()) is ErrorCode.CONCURRENT_TRANSACTIONS
    assert await refusal(bench.coordinator.init_producer_id("x", 60_000)) is ErrorCode.CONCURRENT_TRANSACTIONS
    completion = bench.coordinator.completion("x")
    assert completion is not None and not completion.done()
    bench.markers.open.set()
    await completion
    assert bench.states()["x"].state is S.COMPLETE_ABORT
    await adding()
    assert bench.states()["x"].partitions == {B}


async def test_nothing_is_answered_or_seen_before_it_is_durable() -> None:
    bench = Bench(commit_at_once=False)
    await bench.lead()
    begun = asyncio.ensure_future(bench.coordinator.init_producer_id("x", 60_000))
    await run_ready()
    assert not begun.done() and bench.states() == {}
    assert await refusal(bench.coordinator.init_producer_id("x", 60_000)) is ErrorCode.CONCURRENT_TRANSACTIONS
    bench.fake[0].commit()
    me = await begun
    adding = asyncio.ensure_future(bench.coordinator.add_partitions("x", me, [A], version=2))
    await run_ready()
    assert bench.coordinator.verify("x", me, [A]) == {A: ErrorCode.TRANSACTION_ABORTABLE}
    bench.fake[0].commit()
    await adding
    assert bench.coordinator.verify("x", me, [A]) == {A: ErrorCode.NONE}
    ending = asyncio.ensure_future(bench.coordinator.end("x", me, commits=True, version=2))
    await run_ready()
    assert not ending.done() and bench.markers.sent == []
    bench.fake[0].commit()
    await ending
    await run_ready()
    assert len(bench.markers.written) == 1
    assert bench.states()["x"].state is S.PREPARE_COMMIT  # the completion is in the log, and not durable
    bench.fake[0].commit()
    await run_ready()
    assert bench.states()["x"].state is S.COMPLETE_COMMIT
    await bench.coordinator.stop()


async def test_two_brokers_that_add_partitions_take_turns() -> None:
    bench = Bench()
    await bench.lead()
    me = await bench.begin("x")
    bench.fake[0].commit_at_once = False
    adding = [asyncio.ensure_future(bench.coordinator.add_partitions("x", me, [each], version=2)) for each in (A, B)]
    await run_ready()
    bench.fake[0].commit()
    await run_ready()
    assert [each.done() for each in adding] == [True, False]
    bench.fake[0].commit()
    await asyncio.gather(*adding)
    assert bench.states()["x"].partitions == {A, B}
    await bench.coordinator.stop()


async def test_a_write_that_takes_too_long_takes_effect_all_the_same() -> None:
    bench = Bench(commit_at_once=False)
    await bench.lead()
    begun = asyncio.ensure_future(bench.coordinator.init_producer_id("x", 60_000))
    await bench.advance(5)
    assert await refusal(_wait(begun)) is ErrorCode.COORDINATOR_NOT_AVAILABLE
    bench.fake[0].commit()
    await run_ready()
    assert bench.states()["x"].producer == Producer(1000, 0)
    await bench.coordinator.stop()


async def _wait(future: asyncio.Future[Any]) -> Any:
    return await future


async def test_refused_appends_change_nothing_and_a_completion_is_tried_again(bench: Bench) -> None:
    me = await bench.begin("x", A)
    bench.fake[0].refuse = ErrorCode.NOT_ENOUGH_REPLICAS
    assert await refusal(bench.coordinator.end("x", me, commits=True, version=2)) is (
        ErrorCode.COORDINATOR_NOT_AVAILABLE
    )
    assert bench.states()["x"].state is S.ONGOING
    bench.fake[0].refuse = None
    bench.markers.open.clear()
    await bench.coordinator.end("x", me, commits=True, version=2)
    await run_ready()
    bench.fake[0].refuse = ErrorCode.NOT_ENOUGH_REPLICAS
    bench.markers.open.set()
    await bench.advance(1)
    assert bench.states()["x"].state is S.PREPARE_COMMIT
    bench.fake[0].refuse = None
    await bench.advance(1)
    assert bench.states()["x"].state is S.COMPLETE_COMMIT


async def test_a_fault_on_the_way_to_the_partitions_is_told_and_the_markers_are_sent_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    me = await bench.begin("x", A)

    async def fail(*_: object) -> None:
        raise ZeroDivisionError("a fault of ours")

    with monkeypatch.context() as patch:
        patch.setattr(bench.markers, "send", fail)
        await bench.coordinator.end("x", me, commits=True, version=2)
        await run_ready()
    assert "a fault of ours" in caplog.text
    assert bench.states()["x"].state is S.PREPARE_COMMIT
    await bench.advance(1)
    assert bench.states()["x"].state is S.COMPLETE_COMMIT


async def test_a_lost_partition_answers_no_more(bench: Bench) -> None:
    me = await bench.begin("x", A)
    bench.fake[0].commit_at_once = False
    ending = asyncio.ensure_future(bench.coordinator.end("x", me, commits=True, version=2))
    await run_ready()
    bench.coordinator.partition_lost(0)
    assert await refusal(_wait(ending)) is ErrorCode.NOT_COORDINATOR
    for work in (
        bench.coordinator.end("x", me, commits=True, version=2),
        bench.coordinator.init_producer_id("x", 1),
        bench.coordinator.add_partitions("x", me, [A], version=2),
    ):
        assert await refusal(work) is ErrorCode.NOT_COORDINATOR
    with pytest.raises(ApiError):
        bench.coordinator.describe("x")


async def test_an_epoch_that_is_over_does_not_answer(bench: Bench) -> None:
    me = await bench.begin("x", A)
    bench.fake[0].leader_epoch += 1
    assert await refusal(bench.coordinator.end("x", me, commits=True, version=2)) is ErrorCode.NOT_COORDINATOR
    await bench.lead()
    await bench.coordinator.end("x", me, commits=True, version=2)


async def test_a_producer_id_that_comes_after_the_leadership_has_gone_and_come_back_is_not_written(
    bench: Bench,
) -> None:
    coming = asyncio.get_running_loop().create_future()
    bench.coordinator._new_producer_id = lambda: _wait(coming)
    begun = asyncio.ensure_future(bench.coordinator.init_producer_id("x", 60_000))
    await run_ready()
    bench.fake[0].leader_epoch += 1
    coming.set_result(7)
    assert await refusal(_wait(begun)) is ErrorCode.NOT_COORDINATOR
    assert bench.fake[0].log.end_offset == 0


async def test_without_a_controller_there_is_no_producer_id_for_now(bench: Bench) -> None:
    async def unreachable() -> int:
        raise ApiError(ErrorCode.NOT_CONTROLLER)

    bench.coordinator._new_producer_id = unreachable
    assert await refusal(bench.begin("x")) is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS


async def test_what_is_refused_at_once(bench: Bench) -> None:
    for timeout_ms in (0, -1, 900_001):
        assert await refusal(bench.coordinator.init_producer_id("x", timeout_ms)) is (
            ErrorCode.INVALID_TRANSACTION_TIMEOUT
        )
    assert await refusal(bench.coordinator.init_producer_id("", 0)) is ErrorCode.INVALID_REQUEST
    assert await refusal(bench.coordinator.end("", Producer(1, 1), commits=True, version=2)) is (
        ErrorCode.INVALID_REQUEST
    )
    assert await refusal(bench.coordinator.end("x", Producer(1, 1), commits=True, version=2)) is (
        ErrorCode.INVALID_PRODUCER_ID_MAPPING
    )
    with pytest.raises(ApiError) as unknown:
        bench.coordinator.describe("x")
    assert unknown.value.code is ErrorCode.TRANSACTIONAL_ID_NOT_FOUND


# --- failover ---------------------------------------------------------------------------------------------------------


async def test_a_new_coordinator_tells_the_partitions_what_the_old_one_decided(bench: Bench) -> None:
    me = await bench.begin("x", A, B)
    bench.markers.open.clear()
    after = await bench.coordinator.end("x", me, commits=True, version=2)
    await run_ready()
    await bench.fail_over()
    assert bench.states()["x"].state is S.PREPARE_COMMIT
    bench.markers.open.set()
    await run_ready()
    assert bench.states()["x"].state is S.COMPLETE_COMMIT
    assert {partition for _, partition in bench.markers.written} == {A, B}
    first, second = (marker for marker, _ in bench.markers.sent)
    assert (first.commits, second.commits) == (True, True)
    assert first.producer_epoch == second.producer_epoch == after.epoch
    assert (first.coordinator_epoch, second.coordinator_epoch) == (0, 1)


@pytest.mark.parametrize("version", [0, 2])
async def test_a_failover_after_every_step(version: int) -> None:
    """Whatever was answered is still so, and what a producer does next works as if nothing had happened."""
    for fails_at in range(6):
        bench = Bench()
        await bench.lead()
        step = itertools.count()

        async def stumble(bench: Bench = bench, step: Any = step, fails_at: int = fails_at) -> None:
            if next(step) == fails_at:
                live = bench.states()
                await bench.fail_over()
                assert bench.states() == live

        me = await bench.begin("x")
        await stumble()
        await bench.coordinator.add_partitions("x", me, [A], version=version)
        await stumble()
        await bench.coordinator.add_partitions("x", me, [B], version=version)
        await stumble()
        bench.markers.open.clear()
        after = await bench.coordinator.end("x", me, commits=True, version=version)
        await run_ready()
        await stumble()
        bench.markers.open.set()
        await run_ready()
        await stumble()
        repeated = await bench.coordinator.end("x", me, commits=True, version=version)
        assert repeated == after
        await bench.coordinator.add_partitions("x", after if version == 2 else me, [A], version=version)
        await stumble()
        assert {partition for _, partition in bench.markers.written} == {A, B}
        assert all(marker.commits for marker, _ in bench.markers.written)
        await bench.coordinator.stop()


async def test_who_repeats_initproducerid_after_a_failover_is_not_fenced(bench: Bench) -> None:
    me = await bench.begin("x", A)
    me = await bench.coordinator.end("x", me, commits=True, version=2)
    await run_ready()
    bumped = await bench.coordinator.init_producer_id("x", 60_000, me)
    await bench.fail_over()
    assert await bench.coordinator.init_producer_id("x", 60_000, me) == bumped


async def test_epochs_that_are_used_up_through_a_failover() -> None:
    bench = Bench(TransactionSettings(last_epoch=4))
    await bench.lead()
    me = await bench.begin("x")
    seen = [me]
    for _ in range(10):
        await bench.coordinator.add_partitions("x", me, [A], version=2)
        bench.markers.open.clear()
        after = await bench.coordinator.end("x", me, commits=True, version=2)
        await run_ready()
        await bench.fail_over()
        bench.markers.open.set()
        await run_ready()
        assert await bench.coordinator.end("x", me, commits=True, version=2) == after
        me = after
        seen.append(me)
    assert seen == sorted(set(seen))
    assert {each.producer_id for each in seen} > {1000, 1001}
    assert max(each.epoch for each in seen) == 3  # the last one is for fencing
    await bench.coordinator.stop()


async def test_a_record_that_cannot_be_read_takes_no_other_with_it(bench: Bench) -> None:
    await bench.begin("x", A)
    bench.fake.topic.append(0, [(b"\x00\x00\x00\x01y", b"\x00\x09")], 0)
    await bench.fail_over()
    assert set(bench.states()) == {"x"}


async def test_each_id_has_its_partition() -> None:
    bench = Bench(partitions=4)
    await bench.lead()
    for name in "abcdefgh":
        await bench.begin(name)
        assert bench.coordinator.partition_for(name) == java_hash(name) % 4
    assert {shard.index for shard in bench.coordinator._shards.values() if shard.transactions} == {0, 1, 2, 3}
    bench.coordinator.partition_lost(1)
    assert len(bench.states()) == 6
    await bench.coordinator.stop()


# --- out of time ------------------------------------------------------------------------------------------------------


async def test_a_transaction_out_of_time_is_aborted_and_its_producer_fenced(bench: Bench) -> None:
    me = await bench.begin("x", A)
    await bench.advance(55)
    assert bench.states()["x"].state is S.ONGOING
    await bench.advance(15)
    assert bench.states()["x"].state is S.COMPLETE_ABORT
    ((marker, partition),) = bench.markers.written
    assert (marker.commits, marker.producer_epoch, partition) == (False, me.epoch + 1, A)
    assert await refusal(bench.coordinator.add_partitions("x", me, [A], version=2)) is ErrorCode.PRODUCER_FENCED
    assert await refusal(bench.coordinator.end("x", me, commits=True, version=0)) is ErrorCode.PRODUCER_FENCED


async def test_each_transaction_has_its_own_time(bench: Bench) -> None:
    me = await bench.begin("x", A)
    await bench.advance(55)
    me = await bench.coordinator.end("x", me, commits=True, version=2)
    await run_ready()
    await bench.coordinator.add_partitions("x", me, [A], version=2)
    await bench.advance(55)
    assert bench.states()["x"].state is S.ONGOING
    await bench.advance(15)
    assert bench.states()["x"].state is S.COMPLETE_ABORT


async def test_time_goes_on_over_a_failover(bench: Bench) -> None:
    await bench.begin("x", A)
    await bench.advance(40)
    await bench.fail_over()
    await bench.advance(15)
    assert bench.states()["x"].state is S.ONGOING
    await bench.advance(15)
    assert bench.states()["x"].state is S.COMPLETE_ABORT


async def test_a_wall_clock_that_jumped_back_gives_no_more_than_the_timeout(bench: Bench) -> None:
    await bench.begin("x", A)
    bench.clock._wall_start_ms -= 86_400_000
    await bench.fail_over()
    await bench.advance(75)
    assert bench.states()["x"].state is S.COMPLETE_ABORT


async def test_a_wall_clock_that_jumps_ahead_aborts_nothing(bench: Bench) -> None:
    await bench.begin("x", A)
    bench.clock._wall_start_ms += 86_400_000
    await bench.advance(30)
    assert bench.states()["x"].state is S.ONGOING


async def test_unused_ids_are_forgotten_and_those_with_a_transaction_are_not() -> None:
    bench = Bench(TransactionSettings(id_expiration_ms=100_000, expiration_interval_ms=60_000))
    await bench.lead()
    for name in ("used", "unused", "open"):
        await bench.begin(name)
    await bench.advance(70)
    await bench.begin("used")
    me = bench.states()["open"].producer
    await bench.coordinator.add_partitions("open", me, [A], version=2)
    bench.markers.open.clear()
    await bench.coordinator.end("open", me, commits=True, version=2)
    await bench.advance(60)
    assert set(bench.states()) == {"used", "open"}
    await bench.fail_over()
    assert set(bench.states()) == {"used", "open"}
    bench.coordinator.partition_lost(0)
    await bench.coordinator.stop()


async def test_a_list_waits_until_everything_is_known(bench: Bench) -> None:
    bench.fake[0].commit_at_once = False
    bench.fake.topic.append(0, [(b"\x00\x00\x00\x01y", None)], 0)
    bench.fake[0].leader_epoch += 1
    bench.coordinator.partition_became_leader(0)
    with pytest.raises(ApiError) as loading:
        bench.coordinator.list()
    assert loading.value.code is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    bench.fake[0].commit()
    await bench.coordinator.loaded()
    assert bench.coordinator.list() == []
    bench.coordinator.begin_closing()
    with pytest.raises(ApiError) as closing:
        bench.coordinator.list()
    assert closing.value.code is ErrorCode.COORDINATOR_NOT_AVAILABLE
