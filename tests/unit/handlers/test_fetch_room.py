"""Fetch where memory for answers is short, or the client's quota is: it gets less, or waits, or gets nothing.

A follower is not asked.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.clock import ManualClock
from millrace.handlers import registry
from millrace.handlers.context import RequestContext
from millrace.handlers.counting import RequestCounts
from millrace.handlers.fetch import fetch
from millrace.handlers.fetch_sessions import FetchSessions
from millrace.handlers.promise import Promise
from millrace.metadata.deltas import PartitionState
from millrace.replication.contention import Contention
from millrace.replication.counting import ReplicaCounts
from millrace.replication.gathering import Gathering
from millrace.replication.partition import Partition
from millrace.security.authorizer import NO_AUTHORIZER
from millrace.security.metering import ClientQuotas, Meter
from millrace.security.quotas import CLIENT_ID, quota_entity
from millrace.security.sessions import ANONYMOUS
from millrace.storage.files import Files
from millrace.storage.log import Log
from millrace.storage.settings import FlushMode, LogConfig
from millrace.wire.frame import RequestHeader
from millrace.wire.hot import FetchCall, FetchPartition, FetchReply, TopicKey
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
                counts=ReplicaCounts(),
                find=lambda _key, _index: partition,
                find_readable=lambda _key, _index: partition,
                led=lambda _key, _index: partition,
                watermarks=lambda _places: [partition.high_watermark],
                gathering_for=lambda _broker_id: gathering,
                closing=False,
            ),
            authorizer=NO_AUTHORIZER,
            image=SimpleNamespace(brokers={FOLLOWER: SimpleNamespace(broker_epoch=FOLLOWER_EPOCH)}),
            fetch_sessions=FetchSessions(0),
            counts=RequestCounts(),
            fetch_max_bytes=1 << 20,
            is_rack_aware=False,
        )

    def use(self, sessions: FetchSessions) -> None:
        self._services.fetch_sessions = sessions

    def fetch(
        self,
        peer: Peer,
        *,
        offset: int = 0,
        replica_id: int = -1,
        max_wait_ms: int = WAIT_MS,
        min_bytes: int = 1,
        session_id: int = 0,
        epoch: int = -1,
        meter: Meter | None = None,
    ) -> FetchReply | Promise[FetchReply | Exception]:
        asked = FetchPartition(0, 0, offset, -1, 0, 1 << 20)
        replica_epoch = FOLLOWER_EPOCH if replica_id == FOLLOWER else -1
        topics: list[tuple[TopicKey, list[FetchPartition]]] = [(self._topic, [asked])]
        call = FetchCall(
            replica_id, max_wait_ms, min_bytes, 1 << 20, 0, session_id, epoch, topics, [], "", replica_epoch
        )
        header = RequestHeader(ApiKey.FETCH, 16, 1, "f")
        needs = registry.load()[ApiKey.FETCH].needs
        context = RequestContext(cast(Any, self._services), header, 16, "h", "l", peer, needs=needs, meter=meter)
        return fetch(context, call)


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


async def run_ready() -> None:
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
    await run_ready()
    assert not answer.done()
    (wake,) = peer.line
    peer.room = 2 * len(BATCH)
    wake()
    await run_ready()
    assert batches_of(answer.result()) == 2
    assert not peer.line


async def test_when_its_time_is_up_it_is_answered_without_records(leader: Leader) -> None:
    peer = Peer(0)
    assert batches_of(leader.fetch(peer, max_wait_ms=0)) == 0
    answer = answer_to(leader.fetch(peer))
    leader.clock.advance(WAIT_MS / 1000)
    await run_ready()
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
    await run_ready()
    assert not answer.done()
    assert len(peer.line) == 1, "now it does"
    peer.room = 1 << 20
    leader.partition.append(BATCH)
    await run_ready()
    assert batches_of(answer.result()) == 2
    assert not peer.line, "also when it was something else that woke it"


async def test_a_follower_does_not_wait_for_memory_that_consumers_hold(leader: Leader) -> None:
    peer = Peer(0)
    assert batches_of(leader.fetch(peer, replica_id=FOLLOWER)) == STORED
    assert not peer.line


# --- quotas -----------------------------------------------------------------------------------------------------------


def limited(leader: Leader, rate: float) -> ClientQuotas:
    quotas = ClientQuotas(clock=leader.clock)
    quotas.take({quota_entity({CLIENT_ID: "f"}): {"consumer_byte_rate": rate}})
    return quotas


async def test_a_consumer_beyond_its_quota_gets_an_empty_answer_and_later_the_rest(leader: Leader) -> None:
    quotas = limited(leader, len(BATCH) / 2)  # ten windows: five batches
    first = leader.fetch(Peer(1 << 20), meter=(meter := quotas.meter(ANONYMOUS, "f")))
    assert batches_of(first) == 5 and meter is not None and meter.charge() == 0
    second = leader.fetch(Peer(1 << 20), offset=5, meter=(meter := quotas.meter(ANONYMOUS, "f")))
    assert isinstance(second, FetchReply) and second.topics == [] and second.error_code == 0
    assert meter is not None and meter.charge() == 10_000
    leader.clock.advance(quotas.windows.span_s)
    assert batches_of(leader.fetch(Peer(1 << 20), offset=5, meter=quotas.meter(ANONYMOUS, "f"))) == 5


async def test_a_batch_that_never_fits_the_quota_arrives_all_the_same(leader: Leader) -> None:
    quotas = limited(leader, 1.0)
    meter = quotas.meter(ANONYMOUS, "f")
    assert batches_of(leader.fetch(Peer(1 << 20), meter=meter)) == 1
    assert meter is not None and meter.charge() > 60_000


@pytest.mark.parametrize("incremental", [False, True])
async def test_a_throttled_answer_leaves_the_session_as_the_client_knows_it(
    leader: Leader, *, incremental: bool
) -> None:
    quotas, sessions = limited(leader, len(BATCH) / 2), FetchSessions(10)
    leader.use(sessions)
    session_id, epoch = 0, 0
    if incremental:
        begun = leader.fetch(Peer(1 << 20), epoch=0)
        assert isinstance(begun, FetchReply) and begun.session_id
        session_id, epoch = begun.session_id, 1
    used = quotas.meter(ANONYMOUS, "f")
    assert used is not None and used.may_send(5 * len(BATCH))
    refused = leader.fetch(
        Peer(1 << 20), session_id=session_id, epoch=epoch, offset=5, meter=quotas.meter(ANONYMOUS, "f")
    )
    assert isinstance(refused, FetchReply) and refused.topics == [] and refused.session_id == session_id
    assert len(sessions) == (1 if incremental else 0), "one that the client would not hear of is not begun"
    leader.clock.advance(quotas.windows.span_s)
    again = leader.fetch(
        Peer(1 << 20),
        session_id=session_id,
        epoch=epoch + 1 if incremental else 0,
        offset=5,
        meter=quotas.meter(ANONYMOUS, "f"),
    )
    assert batches_of(again) == 5, "what was not sent has not been mentioned"
