"""Produce: transactions behind the coordinator's gate, the order of what waits there, and the naming of bad records."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import ApiError, ErrorCode
from millrace.handlers.produce import produce
from millrace.handlers.transactional import told
from millrace.records.batch import split
from millrace.records.compression import Codec
from millrace.storage.settings import FlushMode
from millrace.wire.hot import ProduceCall, ProducePartition, ProduceResult
from millrace.wire.keys import ApiKey
from support.batches import batch, from_producer
from support.compaction import keyed
from support.led_partitions import CONFIG, Connection, LedPartitions

ONE, TWO = "one", "two"
COMMITTED_AT_ONCE = replace(CONFIG, flush_mode=FlushMode.OS)


class Gate:
    """A coordinator that answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int, list[tuple[str, int]], bool]] = []
        self.answers: list[asyncio.Future[dict[tuple[str, int], ErrorCode]]] = []
        self.always: dict[tuple[str, int], ErrorCode] | ApiError | None = {}
        self.at_once = False

    def adds_at_once(
        self, transactional_id: str, producer_id: int, producer_epoch: int, partitions: list[tuple[str, int]]
    ) -> bool:
        if self.at_once:
            self.asked.append((transactional_id, producer_id, producer_epoch, partitions, True))
        return self.at_once

    async def admit(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: list[tuple[str, int]],
        *,
        add: bool,
    ) -> dict[tuple[str, int], ErrorCode]:
        self.asked.append((transactional_id, producer_id, producer_epoch, partitions, add))
        if isinstance(self.always, ApiError):
            raise self.always
        if self.always is not None:
            return self.always
        self.answers.append(asyncio.get_running_loop().create_future())
        return await self.answers[-1]


class Bench:
    def __init__(self, home: Path, **settings: str) -> None:
        self.led = LedPartitions(
            home,
            ONE,
            TWO,
            "__consumer_offsets",
            config=COMMITTED_AT_ONCE,
            settings={name.replace("_", "."): value for name, value in settings.items()},
        )
        self.gate = self.led.services.transaction_gate = Gate()
        self.peer = Connection()

    def begin(
        self, *batches: tuple[str, bytes], version: int = 12, transactional_id: str | None = "tx", acks: int = -1
    ) -> Any:
        topics = [(topic, [ProducePartition(0, memoryview(data))]) for topic, data in batches]
        call = ProduceCall(transactional_id, acks, 1000, list(topics))
        return produce(self.led.context(ApiKey.PRODUCE, version, self.peer), call)

    async def produce(self, *batches: tuple[str, bytes], **options: Any) -> list[ProduceResult]:
        answer = self.begin(*batches, **options)
        if inspect.isawaitable(answer):
            answer = await answer
        return [result for _, results in answer for result in results]

    async def codes(self, *batches: tuple[str, bytes], **options: Any) -> list[int]:
        return [result.error_code for result in await self.produce(*batches, **options)]

    def end(self, topic: str = ONE, *, commit: bool = True, epoch: int = 0, tv: int = 1) -> None:
        self.led.partitions[topic].end_transaction(
            1, epoch, 0, commit=commit, transaction_version=tv, now_ms=self.led.clock.wall_ms()
        )

    def sequences(self, topic: str = ONE) -> list[int]:
        data = self.led.partitions[topic].log.read(0, 1 << 20).data
        return [header.base_sequence for header, _ in split(data)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.led.close()


def inside(sequence: int = 0, *, epoch: int = 0, producer_id: int = 1) -> bytes:
    return batch(1, producer_id=producer_id, producer_epoch=epoch, sequence=sequence, transactional=True)


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# --- who is asked, and when -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "adds"), [(3, False), (11, False), (12, True), (13, True)])
async def test_the_coordinator_is_asked_once_for_all_partitions(bench: Bench, version: int, adds: bool) -> None:
    assert await bench.codes((ONE, inside()), (TWO, inside()), version=version) == [0, 0]
    assert bench.gate.asked == [("tx", 1, 0, [(ONE, 0), (TWO, 0)], adds)]
    answer = bench.begin((ONE, inside(1)), version=version)
    assert isinstance(answer, list), "where the transaction is open nobody waits for anything"
    assert answer[0][1][0].error_code == 0
    assert len(bench.gate.asked) == 1
    bench.end()
    assert await bench.codes((ONE, inside(2)), version=version) == [0], "another transaction"
    assert bench.gate.asked[1:] == [("tx", 1, 0, [(ONE, 0)], adds)]


async def test_a_coordinator_that_answers_at_once_lets_nobody_wait(bench: Bench) -> None:
    bench.gate.at_once = True
    answer = bench.begin((ONE, inside()), (TWO, inside()))
    assert isinstance(answer, list)
    assert [result.error_code for _, results in answer for result in results] == [0, 0]
    assert bench.gate.asked == [("tx", 1, 0, [(ONE, 0), (TWO, 0)], True)]
    assert bench.sequences(ONE) == bench.sequences(TWO) == [0]
    bench.end(ONE)
    assert await bench.codes((ONE, inside(1)), version=11) == [0]
    assert bench.gate.asked[1:] == [("tx", 1, 0, [(ONE, 0)], False)], "who adds partitions itself is verified"


async def test_batches_outside_of_transactions_are_nobodys_business(bench: Bench) -> None:
    assert isinstance(bench.begin((ONE, batch(1)), transactional_id=None), list)
    assert isinstance(bench.begin((ONE, from_producer(4, 0)), transactional_id=None), list)
    assert isinstance(bench.begin((ONE, batch(1))), list), "a transactional id alone says nothing"
    assert not bench.gate.asked


async def test_the_check_can_be_switched_off_but_not_the_adding(tmp_path: Path) -> None:
    bench = Bench(tmp_path, transaction_partition_verification_enable="false")
    assert isinstance(bench.begin((ONE, inside()), version=11), list)
    assert not bench.gate.asked
    assert await bench.codes((TWO, inside()), version=12) == [0]
    assert len(bench.gate.asked) == 1
    bench.led.close()


# --- what is refused --------------------------------------------------------------------------------------------------


async def test_a_transactional_batch_needs_a_transactional_id(bench: Bench) -> None:
    codes = await bench.codes((ONE, inside()), (TWO, batch(1)), transactional_id=None)
    assert codes == [ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, 0]


@pytest.mark.parametrize("other", [inside(producer_id=2), inside(epoch=1)])
async def test_a_request_has_one_producer(bench: Bench, other: bytes) -> None:
    codes = await bench.codes((ONE, inside()), (TWO, other))
    assert codes == [ErrorCode.INVALID_PRODUCER_ID_MAPPING] * 2
    assert not bench.gate.asked and bench.sequences() == []


async def test_internal_topics_are_not_asked_about(bench: Bench) -> None:
    codes = await bench.codes(("__consumer_offsets", inside()), ("nowhere", inside()))
    assert codes == [ErrorCode.INVALID_TOPIC_EXCEPTION, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    assert not bench.gate.asked


async def test_each_partition_has_its_own_answer(bench: Bench) -> None:
    bench.gate.always = {(TWO, 0): ErrorCode.INVALID_TXN_STATE}
    assert await bench.codes((ONE, inside()), (TWO, inside())) == [0, ErrorCode.INVALID_TXN_STATE]
    assert (bench.sequences(ONE), bench.sequences(TWO)) == ([0], [])


async def test_without_a_coordinator_a_client_tries_again(bench: Bench) -> None:
    bench.gate.always = ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
    assert await bench.codes((ONE, inside())) == [ErrorCode.NOT_ENOUGH_REPLICAS]
    bench.gate.always = ApiError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
    assert await bench.codes((ONE, inside())) == [ErrorCode.NOT_ENOUGH_REPLICAS]
    bench.gate.always = {}
    assert await bench.codes((ONE, inside())) == [0]


async def test_an_old_epoch_is_refused_before_anybody_is_asked(bench: Bench) -> None:
    assert await bench.codes((ONE, inside(epoch=4))) == [0]
    bench.end(epoch=5, tv=2)
    bench.gate.asked.clear()
    assert await bench.codes((ONE, inside(1, epoch=4))) == [ErrorCode.INVALID_PRODUCER_EPOCH]
    assert not bench.gate.asked


@pytest.mark.parametrize(
    ("code", "by_version"),
    [
        (ErrorCode.CONCURRENT_TRANSACTIONS, {10: "NOT_ENOUGH_REPLICAS", 11: "NOT_ENOUGH_REPLICAS", 12: None}),
        (ErrorCode.TRANSACTION_ABORTABLE, {10: "INVALID_TXN_STATE", 11: None, 12: None}),
        (ErrorCode.PRODUCER_FENCED, {10: "INVALID_PRODUCER_EPOCH", 12: "INVALID_PRODUCER_EPOCH"}),
        (ErrorCode.NOT_COORDINATOR, {10: "NOT_ENOUGH_REPLICAS", 12: "NOT_ENOUGH_REPLICAS"}),
        (ErrorCode.NETWORK_EXCEPTION, {10: "NOT_ENOUGH_REPLICAS", 12: "NOT_ENOUGH_REPLICAS"}),
        (ErrorCode.CLUSTER_AUTHORIZATION_FAILED, {10: "INVALID_TXN_STATE", 12: "INVALID_TXN_STATE"}),
        (ErrorCode.INVALID_TXN_STATE, {10: None, 12: None}),
        (ErrorCode.INVALID_PRODUCER_ID_MAPPING, {10: None, 12: None}),
    ],
)
def test_what_a_client_is_told(code: ErrorCode, by_version: dict[int, str | None]) -> None:
    for version, expected in by_version.items():
        assert told(code, version).code.name == (expected or code.name), version


# --- races and order --------------------------------------------------------------------------------------------------


async def both(*answers: Awaitable[Any]) -> list[list[int]]:
    return [[r.error_code for _, results in each for r in results] for each in await asyncio.gather(*answers)]


async def test_a_marker_that_comes_while_the_coordinator_is_asked(bench: Bench) -> None:
    bench.gate.always = None
    waiting = asyncio.gather(bench.begin((ONE, inside())))
    await turns()
    bench.end(commit=False)
    bench.gate.answers[0].set_result({})
    ((answer,),) = (await waiting,)
    assert answer[0][1][0].error_code == ErrorCode.INVALID_TXN_STATE
    assert bench.led.partitions[ONE].last_stable_offset == 1, "nothing hangs"


async def test_what_comes_behind_a_request_that_waits_is_appended_behind_it(bench: Bench) -> None:
    bench.gate.always = None
    waiting = asyncio.gather(*(bench.begin((ONE, inside(sequence))) for sequence in range(3)))
    await turns()
    assert len(bench.gate.asked) == 1, "the others wait for the first"
    bench.gate.answers[0].set_result({})
    answers = await waiting
    assert [each[0][1][0].base_offset for each in answers] == [0, 1, 2]
    assert bench.sequences() == [0, 1, 2]
    assert not bench.led.services.produce_lines and not bench.peer.on_lost
    assert len(bench.gate.asked) == 1
    assert isinstance(bench.begin((ONE, inside(3))), list)


async def test_a_request_that_was_refused_lets_the_next_ask_for_itself(bench: Bench) -> None:
    bench.gate.always = None
    waiting = asyncio.gather(*(bench.begin((ONE, inside(sequence)), version=11) for sequence in range(2)))
    await turns()
    bench.gate.answers[0].set_result({(ONE, 0): ErrorCode.CONCURRENT_TRANSACTIONS})
    await turns()
    bench.gate.answers[1].set_result({})
    codes = [each[0][1][0].error_code for each in await waiting]
    assert codes == [ErrorCode.NOT_ENOUGH_REPLICAS, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER]
    assert bench.sequences() == [], "the second must not overtake the first"


async def test_other_connections_do_not_wait(bench: Bench) -> None:
    bench.gate.always = None
    waiting = asyncio.gather(bench.begin((ONE, inside())))
    await turns()
    bench.peer = Connection()
    bench.gate.always = {}
    assert await bench.codes((TWO, inside(producer_id=2))) == [0]
    bench.gate.answers[0].set_result({})
    await waiting


async def test_a_connection_that_is_lost_leaves_no_line_behind(bench: Bench) -> None:
    bench.gate.always = None
    tasks = [asyncio.ensure_future(bench.begin((ONE, inside(sequence)))) for sequence in range(2)]
    await turns()
    tasks.append(asyncio.ensure_future(bench.begin((ONE, inside(2)))))
    for task in tasks:
        task.cancel()
    for leave in tuple(bench.peer.on_lost.values()):
        leave()
    await asyncio.wait(tasks)
    assert not bench.led.services.produce_lines
    assert bench.sequences() == []
    bench.peer = Connection()
    bench.gate.always = {}
    assert await bench.codes((ONE, inside())) == [0]


async def test_acks_0_waits_for_the_gate_too(bench: Bench) -> None:
    assert await bench.begin((ONE, inside()), acks=0) is None
    assert bench.sequences() == [0]


# --- bad records (KIP-467) --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
async def test_records_without_a_key_are_named(bench: Bench, codec: Codec) -> None:
    log = bench.led.partitions[ONE].log
    log.apply_config(replace(COMMITTED_AT_ONCE, compact=True))
    bad = {1, 4, 9}
    entries = [(None if i in bad else b"k%d" % i, b"v") for i in range(10)]
    (refused,) = await bench.produce((ONE, keyed(entries, codec=codec)), transactional_id=None)
    assert refused.error_code == ErrorCode.INVALID_RECORD
    assert {place for place, _ in refused.record_errors} == bad
    assert all(text and "key" in text for _, text in refused.record_errors)
    assert refused.error_message and "key" in refused.error_message
    assert log.end_offset == 0
    (taken,) = await bench.produce((ONE, keyed(entries[:1], codec=codec)), transactional_id=None)
    assert (taken.error_code, taken.record_errors) == (0, ())
