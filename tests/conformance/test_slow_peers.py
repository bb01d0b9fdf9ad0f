"""Peers that ask for much and do not read it, or come in great numbers: what it costs, and what others notice of it."""

from __future__ import annotations

import contextlib
import select
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Self

import pytest
from confluent_kafka import Consumer, Message, Producer, TopicPartition

from millrace.wire.messages.configs import IncrementalAlterConfigsRequest
from millrace.wire.messages.share_groups import ShareFetchRequest, ShareGroupHeartbeatRequest
from support.raw import MIB, PATIENT_S, PROMPT_S, PeerClosed, RawClient, WatchedBroker, batch, fetch_request

SLOW = 40
ASKED_BYTES = 50_000_000
MOST_GROWTH_BYTES = 300_000_000
RECEIVE_BUFFER_BYTES = 64 * 1024
CLOSED = "bytes of answers, and others need the memory"


@pytest.fixture(scope="module")
def broker() -> Iterator[WatchedBroker]:
    with WatchedBroker() as running:
        with running.connect() as client:
            client.create_topic("stock")
            client.create_topic("large")
            for _ in range(ASKED_BYTES // MIB + 8):
                assert client.produce("large", batch(bytes(MIB - 1024)), acks=1).error_code == 0
        yield running


@contextlib.contextmanager
def slow_peers(broker: WatchedBroker, count: int, ask: Callable[[RawClient], object]) -> Iterator[list[int]]:
    """Peers that ask and read nothing; yields how large the answers are that have begun to arrive."""
    with contextlib.ExitStack() as opened:
        peers = [opened.enter_context(broker.connect(receive_buffer_bytes=RECEIVE_BUFFER_BYTES)) for _ in range(count)]
        for peer in peers:
            ask(peer)
        for number, peer in enumerate(peers):
            assert select.select([peer.socket], [], [], PATIENT_S)[0], f"peer {number} was not answered"
        yield [size_to_come(peer) for peer in peers]


def size_to_come(peer: RawClient) -> int:
    """The size of the frame that has begun to arrive; 0 if the connection was closed instead."""
    try:
        head = peer.socket.recv(4, socket.MSG_PEEK)
    except ConnectionResetError:
        head = b""
    return int.from_bytes(head)


def ask_for_much(topic: str) -> Callable[[RawClient], object]:
    request = fetch_request(topic, 0, max_bytes=ASKED_BYTES, partition_max_bytes=ASKED_BYTES, max_wait_ms=500)
    return lambda peer: peer.request(request, 12)


class Others:
    """Whoever is not to notice: a new connection that asks for metadata, and a stock client at work."""

    def __init__(self, broker: WatchedBroker) -> None:
        self._broker = broker
        settings = {"bootstrap.servers": broker.bootstrap, "log_level": 3}
        self._producer = Producer(settings)
        self._consumer = Consumer({**settings, "group.id": "stock", "auto.offset.reset": "latest"})
        self._consumer.assign([TopicPartition("stock", 0, self._produce(b"first"))])
        assert self._next() == b"first"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()
        del self._producer

    def check(self) -> None:
        """Assert that metadata, and a record there and back, take less than a second each."""
        with self._broker.connect() as client:
            began = time.monotonic()
            assert client.topic("stock").partitions
            assert time.monotonic() - began < PROMPT_S
        began = time.monotonic()
        value = uuid.uuid4().bytes
        self._produce(value)
        assert self._next() == value
        took_s = time.monotonic() - began
        assert took_s < PROMPT_S, f"a record took {took_s:.2f} s there and back"

    def _produce(self, value: bytes) -> int:
        offsets: list[int] = []

        def delivered(_: object, message: Message) -> None:
            offset = message.offset()
            assert offset is not None
            offsets.append(offset)

        self._producer.produce("stock", value, partition=0, on_delivery=delivered)
        assert self._producer.flush(PATIENT_S) == 0
        return offsets[0]

    def _next(self) -> bytes | None:
        message = self._consumer.poll(PATIENT_S)
        assert message is not None
        assert message.error() is None
        return message.value()


@pytest.fixture(scope="module")
def others(broker: WatchedBroker) -> Iterator[Others]:
    with Others(broker) as at_work:
        yield at_work


def test_consumers_that_do_not_read_cost_the_budget_at_most(broker: WatchedBroker, others: Others) -> None:
    with broker.unharmed(max_growth_bytes=MOST_GROWTH_BYTES), slow_peers(broker, SLOW, ask_for_much("large")) as sizes:
        assert max(sizes) > 8 * MIB
        assert min(sizes) > MIB - 1024, "everybody gets a batch at least"
        others.check()
        assert CLOSED not in broker.log_text(), "nobody had to be closed for that"


def test_one_that_asks_again_and_again_and_does_not_read_costs_its_own_answer(
    broker: WatchedBroker, others: Others
) -> None:
    def ask(peer: RawClient) -> None:
        for _ in range(SLOW):
            ask_for_much("large")(peer)

    with broker.unharmed(max_growth_bytes=32 * MIB), slow_peers(broker, 1, ask):
        others.check()


def test_long_polls_that_become_ready_together_and_are_not_read(broker: WatchedBroker, others: Others) -> None:
    """All of them on one connection, and all woken by the same record."""
    with broker.connect() as client:
        client.create_topic("awaited")
    request = fetch_request("awaited", 0, max_bytes=ASKED_BYTES, partition_max_bytes=ASKED_BYTES, max_wait_ms=60_000)
    with broker.unharmed(max_growth_bytes=64 * MIB), broker.connect(receive_buffer_bytes=RECEIVE_BUFFER_BYTES) as peer:
        for _ in range(100):
            peer.request(request, 12)
        with broker.connect() as client:
            client.alive()
            for _ in range(8):
                assert client.produce("awaited", batch(bytes(MIB - 1024)), acks=1).error_code == 0
        assert select.select([peer.socket], [], [], PATIENT_S)[0]
        others.check()


def test_members_of_share_groups_that_do_not_read_cost_the_budget_at_most(
    broker: WatchedBroker, others: Others
) -> None:
    with broker.connect() as client:
        topic_id = client.topic("large").topic_id
        earliest = IncrementalAlterConfigsRequest.AlterableConfig(
            name="share.auto.offset.reset", config_operation=0, value="earliest"
        )
        groups = [
            IncrementalAlterConfigsRequest.AlterConfigsResource(
                resource_type=32, resource_name=f"queue-{number}", configs=[earliest]
            )
            for number in range(SLOW)
        ]
        answer = client.call(IncrementalAlterConfigsRequest(resources=groups), 1)
        assert {each.error_code for each in answer.responses} == {0}
        client.find_coordinator("queue-0")
    names = iter(range(SLOW))

    def ask(peer: RawClient) -> None:
        group_id, member_id = f"queue-{next(names)}", str(uuid.uuid4())
        joining = ShareGroupHeartbeatRequest(
            group_id=group_id, member_id=member_id, member_epoch=0, subscribed_topic_names=["large"]
        )
        assert peer.call(joining, 1).assignment.topic_partitions
        wanted = ShareFetchRequest.FetchPartition(partition_index=0)
        peer.request(
            ShareFetchRequest(
                group_id=group_id,
                member_id=member_id,
                share_session_epoch=0,
                max_wait_ms=5000,
                min_bytes=1,
                max_bytes=ASKED_BYTES,
                max_records=1_000_000,
                batch_size=10_000,
                topics=[ShareFetchRequest.FetchTopic(topic_id=topic_id, partitions=[wanted])],
            ),
            1,
        )

    with broker.unharmed(max_growth_bytes=MOST_GROWTH_BYTES), slow_peers(broker, SLOW, ask) as sizes:
        assert max(sizes) > 8 * MIB
        assert min(sizes) > MIB - 1024
        others.check()


def test_when_they_hold_everything_they_are_closed_for_those_who_read() -> None:
    """Batches of 8 MB, of which seven fill the room of this broker."""
    settings = {"queued.max.request.bytes": str(64 * MIB), "socket.request.max.bytes": str(16 * MIB)}
    with WatchedBroker(settings) as broker:
        with broker.connect() as client:
            client.create_topic("stock")
            client.create_topic("huge", config={"max.message.bytes": str(10 * MIB)})
            for _ in range(4):
                assert client.produce("huge", batch(bytes(8 * MIB)), acks=1).error_code == 0
        before_bytes = broker.rss_bytes()
        with Others(broker) as others:
            with slow_peers(broker, 20, ask_for_much("huge")) as sizes:
                assert max(sizes) > 8 * MIB
                others.check()
                assert CLOSED in broker.log_text()
                assert broker.rss_bytes() - before_bytes < 96 * MIB
            others.check()


class FewDescriptors(WatchedBroker):
    """A broker that may have 256 files and sockets open."""

    def _command(self) -> Sequence[str]:
        return ["sh", "-c", 'ulimit -Sn 256 && ulimit -Hn 256 && exec "$@"', "sh", *super()._command()]


def test_with_few_descriptors_connections_are_refused_and_nothing_else() -> None:
    """Also with more partitions than it may have files open."""
    partitions = 120
    with FewDescriptors() as broker, broker.connect() as client:
        client.create_topic("stock")
        client.create_topic("many", partitions=partitions)
        with Others(broker) as others, broker.unharmed(), contextlib.ExitStack() as opened:
            living = []
            refused = 0
            for _ in range(300):
                peer = opened.enter_context(broker.connect())
                try:
                    peer.alive()
                    living.append(peer)
                except PeerClosed:
                    refused += 1
            assert len(living) > 100
            assert refused > 100
            assert "refused: the process has descriptors for 128 connections" in broker.log_text()
            for index in range(partitions):
                assert client.produce("many", batch(b"there"), partition=index, acks=1).error_code == 0
            deadline = time.monotonic() + PATIENT_S
            for index in range(partitions):
                while b"there" not in bytes(client.fetch("many", 0, partition=index, max_wait_ms=500).records or b""):
                    assert time.monotonic() < deadline
            for peer in living:
                peer.alive()
            opened.close()
            others.check()
        assert "ERROR" not in broker.log_text()
