"""Fetch where memory for answers is short: a consumer gets less, or waits, or gets nothing; a follower is not asked."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.clock import ManualClock
from millrace.handlers.context import RequestContext
from millrace.handlers.fetch import fetch
from millrace.handlers.fetch_sessions import FetchSessions
from millrace.handlers.promise import Promise
from millrace.metadata.deltas import PartitionState
from millrace.replication.contention import Contention
from millrace.replication.gathering import Gathering
from millrace.replication.partition import Partition
from millrace.storage.files import Files
from millrace.storage.log import Log
from millrace.storage.settings import FlushMode, LogConfig
from millrace.wire.frame import RequestHeader
from millrace.wire.hot import FetchCall, FetchPartition, FetchReply
from millrace.wire.keys import ApiKey
from support.batches import NOW_MS, batch

FOLLOWER, FOLLOWER_EPOCH = 2, 7
BATCH = batch(1, size=1000)
STORED = 10
WAIT_MS = 500


class Peer:
    """A connection whose room the test decides on."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.line: list[Callable[[], None]] = []
        self.on_lost: dict[object, Callable[[], None]] = {}

    def answer_room(self, context: RequestContext) -> int:
        assert context.peer is self
        return self.room

    def when_room(self, context: RequestContext, wake: Callable[[], None]) -> None:
        assert context.peer is self
        if wake not in self.line:
            self.line.append(wake)

    def forget_room(self, wake: Callable[[], None]) -> None:
        if wake in self.line:
            self.line.remove(wake)

    def reserve(self, size_bytes: int) -> None:
        raise AssertionError(f"{size_bytes} bytes: what is answered in the same turn counts itself")


class Leader:
    """A partition with `STORED` committed batches, as the handler of Fetch sees it."""

    def __init__(self, directory: Path) -> None:
        self.clock = ManualClock(NOW_MS)
        log = Log.open(directory, LogConfig(flush_mode=FlushMode.OS), clock=self.clock, files=Files())
        topic_id = uuid.uuid4()
        partition = Partition("t", 0, topic_id, open_log=lambda: log, clock=self.clock, broker_id=1)
        partition.lead(PartitionState((1, FOLLOWER), (1,), 1, leader_epoch=0))
        for _ in range(STORED):
            partition.append(BATCH)
        assert partition.high_watermark.offset == STORED
        self.partition = partition
        self._topic = topic_id.bytes
        gathering = Gathering(Contention(lambda: None))
        self._services = SimpleNamespace(
            clock=self.clock,
            replicas=SimpleNamespace(
                find=lambda _key, _index: partition,
                find_readable=lambda _key, _index: partition,
                led=lambda _key, _index: partition,
                watermarks=lambda _places: [partition.high_watermark],
                gathering_for=lambda _broker_id: gathering,
                closing=False,
            ),
            image=SimpleNamespace(brokers={FOLLOWER: SimpleNamespace(broker_epoch=FOLLOWER_EPOCH)}),
            fetch_sessions=FetchSessions(0),
            fetch_max_bytes=1 << 20,
            is_rack_aware=False,
        )

    def fetch(
        self, peer: Peer, *, offset: int = 0, replica_id: int = -1, max_wait_ms: int = WAIT_MS, min_bytes: int = 1
    ) -> FetchReply | Promise[FetchReply | Exception]:
        asked = FetchPartition(0, 0, offset, -1, 0, 1 << 20)
        epoch = FOLLOWER_EPOCH if replica_id == FOLLOWER else -1
        call = FetchCall(replica_id, max_wait_ms, min_bytes, 1 << 20, 0, 0, -1, [(self._topic, [asked])], [], "", epoch)
        header = RequestHeader(ApiKey.FETCH, 16, 1, "f")
        return fetch(RequestContext(cast(Any, self._services), header, 16, "h", "l", peer), call)


def batches_of(reply: object) -> int:
    assert isinstance(reply, FetchReply)
    [(_, [result])] = reply.topics
    assert result.error_code == 0
    return len(result.records) // len(BATCH)


def answer_to(reply: FetchReply | Promise[FetchReply | Exception]) -> asyncio.Future[FetchReply | Exception]:
    assert isinstance(reply, Promise), "it was answered at once"
    answer: asyncio.Future[FetchReply | Exception] = asyncio.get_running_loop().create_future()
    reply.then(answer.set_result)
    return answer


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.fixture
async def leader(tmp_path: Path) -> Leader:
    return Leader(tmp_path)


async def test_a_consumer_gets_as_much_as_there_is_room_for(leader: Leader) -> None:
    assert batches_of(leader.fetch(Peer(1 << 20))) == STORED
    assert batches_of(leader.fetch(Peer(3 * len(BATCH)))) == 3
    assert batches_of(leader.fetch(Peer(1))) == 1, "a batch comes in any case"


async def test_it_does_not_wait_for_more_than_there_is_room_for(leader: Leader) -> None:
    assert batches_of(leader.fetch(Peer(3 * len(BATCH)), min_bytes=5 * len(BATCH))) == 3


async def test_without_room_it_waits_until_there_is_some(leader: Leader) -> None:
    peer = Peer(0)
    answer = answer_to(leader.fetch(peer))
    (wake,) = peer.line
    peer.line.clear()
    wake()
    await settle()
    assert not answer.done()
    (wake,) = peer.line
    peer.room = 2 * len(BATCH)
    wake()
    await settle()
    assert batches_of(answer.result()) == 2
    assert not peer.line


async def test_when_its_time_is_up_it_is_answered_without_records(leader: Leader) -> None:
    peer = Peer(0)
    assert batches_of(leader.fetch(peer, max_wait_ms=0)) == 0
    answer = answer_to(leader.fetch(peer))
    leader.clock.advance(WAIT_MS / 1000)
    await settle()
    assert batches_of(answer.result()) == 0
    assert not peer.line


async def test_one_that_is_lost_does_not_wait_any_more(leader: Leader) -> None:
    peer = Peer(0)
    reply = leader.fetch(peer)
    assert isinstance(reply, Promise)
    reply.cancel()
    assert not peer.line


async def test_one_that_waits_for_records_does_not_wait_for_room(leader: Leader) -> None:
    peer = Peer(0)
    answer = answer_to(leader.fetch(peer, offset=STORED))
    assert not peer.line
    leader.partition.append(BATCH)
    await settle()
    assert not answer.done()
    assert len(peer.line) == 1, "now it does"
    peer.room = 1 << 20
    leader.partition.append(BATCH)
    await settle()
    assert batches_of(answer.result()) == 2
    assert not peer.line, "also when it was something else that woke it"


async def test_a_follower_does_not_wait_for_memory_that_consumers_hold(leader: Leader) -> None:
    peer = Peer(0)
    assert batches_of(leader.fetch(peer, replica_id=FOLLOWER)) == STORED
    assert not peer.line
