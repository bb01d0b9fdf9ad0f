"""Followers that wait for more: the rule alone, then a leader's answers to one, on a clock that a test moves."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.clock import ManualClock
from millrace.errors import ErrorCode
from millrace.handlers import registry
from millrace.handlers.context import RequestContext
from millrace.handlers.counting import RequestCounts
from millrace.handlers.fetch import fetch
from millrace.handlers.fetch_sessions import FetchSessions
from millrace.handlers.promise import Promise
from millrace.metadata.deltas import PartitionState
from millrace.replication.contention import Contention, Use
from millrace.replication.counting import ReplicaCounts
from millrace.replication.gathering import (
    ENOUGH_BYTES,
    LONGEST_IF_SHORT_S,
    LONGEST_S,
    MOST,
    WINDOW_S,
    WORTHWHILE_BYTES,
    Gathering,
)
from millrace.replication.leadership import Leadership
from millrace.replication.partition import Partition
from millrace.security.authorizer import NO_AUTHORIZER
from millrace.storage.files import Files
from millrace.storage.host import Alone
from millrace.storage.log import Log
from millrace.storage.settings import FlushMode, LogConfig
from millrace.wire.frame import RequestHeader
from millrace.wire.hot import FetchCall, FetchPartition, FetchReply
from millrace.wire.keys import ApiKey
from support.batches import NOW_MS, batch

FOLLOWER, FOLLOWER_EPOCH = 2, 7
BATCH = batch(100, size=1000)
IN_FLIGHT = 3
NO_CONTENTION = Contention(lambda: None)


class TestHowMuchIsWantedOf:
    def test_a_follower_with_small_answers(self) -> None:
        gathering = Gathering(NO_CONTENTION)
        for second in range(10):
            assert gathering.wanted_bytes(float(second)) == 0
            gathering.answered(WORTHWHILE_BYTES - 1)

    def test_one_with_large_answers(self) -> None:
        gathering = Gathering(NO_CONTENTION)
        assert gathering.wanted_bytes(0.0) == 0
        gathering.answered(WORTHWHILE_BYTES)
        assert gathering.wanted_bytes(0.5) == 0
        assert gathering.wanted_bytes(1.0) == ENOUGH_BYTES, "one fetch tries"
        gathering.answered(0)
        assert gathering.wanted_bytes(1.1) == ENOUGH_BYTES, "nothing came, which shows nothing"
        gathering.answered(200_000)
        assert gathering.wanted_bytes(1.2) == 200_000 * MOST
        gathering.answered(180_000)
        assert gathering.wanted_bytes(1.9) == 200_000 * MOST, "what was waited for is no measure"

    def test_one_whose_answers_become_small(self) -> None:
        gathering = Gathering(NO_CONTENTION)
        gathering.wanted_bytes(0.0)
        gathering.answered(300_000)
        gathering.wanted_bytes(WINDOW_S)
        gathering.answered(1000)
        assert gathering.wanted_bytes(WINDOW_S) == 0, "one trial was in vain"
        assert gathering.wanted_bytes(2 * WINDOW_S) == 0, "and is not repeated"

    def test_one_on_a_machine_that_is_short_of_processors(self) -> None:
        use = Use(0, 0)
        gathering = Gathering(Contention(lambda: use))
        for second in range(4):
            gathering.wanted_bytes(float(second))
            gathering.answered(300_000)
            assert gathering.longest_s == LONGEST_S
        use = Use(10**9, 10**9)
        gathering.wanted_bytes(4.0)
        assert gathering.longest_s == LONGEST_IF_SHORT_S
        gathering.answered(300_000)
        gathering.wanted_bytes(5.0)
        assert gathering.longest_s == LONGEST_S, "they are there again"


class Flushes(Alone):
    """The host of a log: remembers within how many seconds it wanted to be flushed, each time."""

    def __init__(self, files: Files) -> None:
        super().__init__(files)
        self.asked: list[float] = []

    def request_flush(self, log: Log, within_s: float, /) -> None:
        self.asked.append(within_s)


class Leader:
    """A leader with one follower that keeps a fetch session, as the handler of Fetch sees it."""

    def __init__(self, directory: Path) -> None:
        self.clock = ManualClock(NOW_MS)
        self.flushes = Flushes(Files())
        config = LogConfig(flush_mode=FlushMode.OS)
        log = Log.open(directory, config, clock=self.clock, files=Files(), host=self.flushes)
        topic_id = uuid.uuid4()
        self.partition = Partition("t", 0, topic_id, open_log=lambda: log, clock=self.clock, broker_id=1)
        self.partition.lead(PartitionState((1, FOLLOWER), (1, FOLLOWER), 1, leader_epoch=0))
        self.gathering = Gathering(NO_CONTENTION)
        replicas = SimpleNamespace(
            find=lambda _key, _index: self.partition,
            led=lambda _key, _index: self.partition,
            gathering_for=lambda _broker_id: self.gathering,
            leader_of=lambda _key, _index: None,
            closing=False,
            counts=ReplicaCounts(),
        )
        self._services = SimpleNamespace(
            clock=self.clock,
            replicas=replicas,
            authorizer=NO_AUTHORIZER,
            image=SimpleNamespace(brokers={FOLLOWER: SimpleNamespace(broker_epoch=FOLLOWER_EPOCH)}),
            fetch_sessions=FetchSessions(0),
            counts=RequestCounts(),
        )
        self._topic = topic_id.bytes

    @property
    def leadership(self) -> Leadership:
        assert self.partition.leadership is not None
        return self.partition.leadership

    def append(self, count: int) -> None:
        for _ in range(count):
            self.partition.append(BATCH)

    def fetch(self, batches: int) -> FetchReply | Promise[FetchReply | Exception]:
        """As a follower that has so many batches."""
        asked = FetchPartition(0, 0, batches * 100, -1, 0, 1 << 20)
        call = FetchCall(FOLLOWER, 500, 1, 10 << 20, 0, 0, -1, [(self._topic, [asked])], [], "", FOLLOWER_EPOCH)
        context = RequestContext(
            cast(Any, self._services),
            RequestHeader(ApiKey.FETCH, 16, 1, "f"),
            16,
            "h",
            "l",
            needs=registry.load()[ApiKey.FETCH].needs,
        )
        return fetch(context, call)

    @staticmethod
    def batches_of(reply: Any) -> int:
        assert isinstance(reply, FetchReply)
        [(_, [result])] = reply.topics
        assert result.error_code == 0
        return len(result.records) // len(BATCH)

    def start_waiting(self, batches: int) -> asyncio.Future[FetchReply | Exception]:
        reply = self.fetch(batches)
        assert not isinstance(reply, FetchReply), "it was answered at once"
        answer: asyncio.Future[FetchReply | Exception] = asyncio.get_running_loop().create_future()
        reply.then(answer.set_result)
        answer.add_done_callback(lambda _: reply.cancel())
        return answer

    async def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for _ in range(3):
            await asyncio.sleep(0)


@pytest.fixture
async def leader(tmp_path: Path) -> Leader:
    """That knows that producers have `IN_FLIGHT` batches in flight; the follower has as many."""
    made = Leader(tmp_path)
    made.append(IN_FLIGHT - 1)
    assert made.batches_of(made.fetch(0)) == IN_FLIGHT - 1, "nobody waits at first"
    await made.pass_time(WINDOW_S)
    made.append(IN_FLIGHT)
    trial = made.start_waiting(IN_FLIGHT - 1)
    await made.pass_time(LONGEST_S)
    assert made.batches_of(await trial) == IN_FLIGHT
    return made


DONE = 2 * IN_FLIGHT - 1


async def test_a_fetch_is_answered_when_most_of_what_is_in_flight_is_there(leader: Leader) -> None:
    leader.append(1)
    waiting = leader.start_waiting(DONE)
    leader.append(1)
    await leader.pass_time(0)
    assert not waiting.done()
    leader.append(1)
    await leader.pass_time(0)
    assert leader.batches_of(waiting.result()) == IN_FLIGHT


async def test_and_at_once_if_it_finds_that_much(leader: Leader) -> None:
    leader.append(IN_FLIGHT)
    assert leader.batches_of(leader.fetch(DONE)) == IN_FLIGHT


async def test_a_fetch_with_less_waits_only_a_moment(leader: Leader) -> None:
    leader.append(1)
    waiting = leader.start_waiting(DONE)
    await leader.pass_time(LONGEST_S * 0.9)
    assert not waiting.done()
    await leader.pass_time(LONGEST_S * 0.2)
    assert leader.batches_of(waiting.result()) == 1


async def test_the_moment_begins_with_the_first_append(leader: Leader) -> None:
    waiting = leader.start_waiting(DONE)
    await leader.pass_time(LONGEST_S * 10)
    assert not waiting.done()
    leader.append(1)
    await leader.pass_time(LONGEST_S)
    assert leader.batches_of(waiting.result()) == 1


async def test_what_the_fetch_promises_counts_when_it_arrives(leader: Leader) -> None:
    leader.append(1)
    waiting = leader.start_waiting(DONE)
    assert leader.partition.high_watermark.offset == DONE * 100
    waiting.cancel()


async def test_a_follower_elsewhere_in_the_log_does_not_wait(leader: Leader) -> None:
    """Where nobody has read up to: how much is left is not known without a search."""
    leader.append(1)
    assert leader.batches_of(leader.fetch(1)) > 0


async def test_what_comes_before_the_connection_waits_is_not_missed(leader: Leader) -> None:
    leader.append(1)
    waiting = leader.start_waiting(DONE)
    leader.append(IN_FLIGHT)
    await asyncio.sleep(0)
    assert leader.batches_of(waiting.result()) == IN_FLIGHT + 1


async def test_a_cancelled_wait_leaves_no_watcher(leader: Leader) -> None:
    leader.append(1)
    waiting = leader.start_waiting(DONE)
    assert leader.leadership.end_watchers
    waiting.cancel()
    await leader.pass_time(0)
    assert not leader.leadership.end_watchers
    leader.append(IN_FLIGHT)
    await leader.pass_time(1)


async def test_a_failure_while_it_waits_is_the_answer(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    leader.append(1)
    waiting = leader.start_waiting(DONE)

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(leader.partition, "serve_follower", fail)
    await leader.pass_time(LONGEST_S)
    assert isinstance(waiting.result(), RuntimeError)
    assert not leader.leadership.end_watchers


async def test_the_wait_ends_with_the_leadership(leader: Leader) -> None:
    leader.append(1)
    waiting = leader.start_waiting(DONE)
    leader.partition.follow(PartitionState((1, FOLLOWER), (1, FOLLOWER), FOLLOWER, leader_epoch=1))
    await leader.pass_time(0)
    reply = waiting.result()
    assert isinstance(reply, FetchReply)
    [(_, [result])] = reply.topics
    assert result.error_code == ErrorCode.FENCED_LEADER_EPOCH


async def test_the_leader_flushes_when_it_answers(leader: Leader) -> None:
    log = leader.partition.log
    log.apply_config(LogConfig(flush_mode=FlushMode.GROUP))
    asked = leader.flushes.asked
    asked.clear()
    waiting = leader.start_waiting(DONE)
    leader.append(IN_FLIGHT)
    assert asked == [LONGEST_S] * IN_FLIGHT, "nothing can be committed before it was fetched"
    await leader.pass_time(0)
    assert leader.batches_of(waiting.result()) == IN_FLIGHT
    assert asked[IN_FLIGHT:] == [0.0]


async def test_what_a_new_leader_appends_is_flushed_at_once(leader: Leader) -> None:
    log = leader.partition.log
    leader.start_waiting(DONE)
    assert log.flush_patience_s == LONGEST_S
    leader.partition.lead(PartitionState((1, FOLLOWER), (1,), 1, leader_epoch=0))
    assert log.flush_patience_s == 0, "the follower may be gone"
    leader.start_waiting(DONE)
    assert log.flush_patience_s == LONGEST_S
    leader.partition.follow(PartitionState((1, FOLLOWER), (1, FOLLOWER), FOLLOWER, leader_epoch=1))
    assert log.flush_patience_s == 0
