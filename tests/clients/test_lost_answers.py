"""A transactional producer of librdkafka whose broker takes a record and is not heard: nothing of what follows is lost.

When such a transaction is aborted, librdkafka (2.16) drops the record that it wanted to send again, and gives its
sequence number to the first record of the next transaction. A broker that takes that one for the retry loses it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from millrace.local.ports import free_ports
from millrace.testing import Cluster

TIMEOUT_S = 20.0
ABORT_S = 2.0
TOPIC = "payments"


class DeafProxy:
    """Passes bytes on to one address; can swallow what comes back, and hang up on everybody and refuse to be called."""

    def __init__(self) -> None:
        self.target: tuple[str, int] = ("", 0)
        self.swallows = False
        self.refuses = False
        self._open: set[socket.socket] = set()
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._door.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def hang_up(self) -> None:
        self.refuses = True
        for each in tuple(self._open):
            with suppress(OSError):  # it is gone already
                each.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def listen(self) -> None:
        self.swallows = self.refuses = False

    def close(self) -> None:
        self._door.close()
        self.hang_up()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._door.accept()
            except OSError:
                return
            try:
                if self.refuses:
                    raise ConnectionRefusedError
                far = socket.create_connection(self.target)
            except OSError:
                near.close()
                continue
            self._open |= {near, far}
            for source, sink, answers in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._pump, args=(source, sink, answers), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if not (answers and self.swallows):
                    sink.sendall(data)
        except OSError:
            pass  # somebody hung up
        for each in (source, sink):
            self._open.discard(each)
            each.close()


@pytest.fixture
def proxy() -> Iterator[DeafProxy]:
    made = DeafProxy()
    yield made
    made.close()


@pytest.fixture
def cluster(proxy: DeafProxy) -> Iterator[Cluster]:
    (port,) = free_ports("127.0.0.1", 1)
    proxy.target = ("127.0.0.1", port)
    settings = {
        "listeners": f"DIRECT://127.0.0.1:0,PROXIED://127.0.0.1:{port}",
        "advertised.listeners": f"PROXIED://127.0.0.1:{proxy.port}",
        "listener.security.protocol.map": "DIRECT:PLAINTEXT,PROXIED:PLAINTEXT",
    }
    with Cluster(brokers=1, settings=settings) as running:
        running.create_topic(TOPIC)
        yield running


def wait_until_end_is(bootstrap: str, end: int) -> None:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "ends", "isolation.level": "read_uncommitted"})
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while consumer.get_watermark_offsets(TopicPartition(TOPIC, 0), timeout=5)[1] < end:
            assert time.monotonic() < deadline, "the record did not arrive"
            time.sleep(0.05)
    finally:
        consumer.close()


def committed(bootstrap: str) -> list[bytes]:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "readers",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    consumer.assign([TopicPartition(TOPIC, 0, 0)])
    found: list[bytes] = []
    try:
        while (message := consumer.poll(TIMEOUT_S)) is not None and message.error() is None:
            found.append(message.value() or b"")
    finally:
        consumer.close()
    return found


def send_in_a_transaction(producer: Producer, value: bytes) -> None:
    """Until it is committed, as a program does."""
    while True:
        producer.begin_transaction()
        try:
            producer.produce(TOPIC, value, partition=0)
            producer.commit_transaction(TIMEOUT_S)
        except KafkaException as failure:
            if not failure.args[0].txn_requires_abort():
                raise
            abort(producer)
        else:
            return


def abort(producer: Producer) -> None:
    """Asked again where it takes long: a record that comes back from the connection only then is dropped then."""
    while True:
        try:
            return producer.abort_transaction(ABORT_S)
        except KafkaException as failure:
            if not failure.args[0].retriable():
                raise


def test_a_record_that_was_aborted_unheard_does_not_take_the_next_one_with_it(
    cluster: Cluster, proxy: DeafProxy
) -> None:
    producer = Producer({"bootstrap.servers": f"127.0.0.1:{proxy.port}", "transactional.id": "payer", "log_level": 0})
    producer.init_transactions(TIMEOUT_S)
    send_in_a_transaction(producer, b"first")

    producer.begin_transaction()
    producer.produce(TOPIC, b"heard", partition=0)
    assert producer.flush(TIMEOUT_S) == 0
    proxy.swallows = True
    producer.produce(TOPIC, b"unheard", partition=0)
    wait_until_end_is(cluster.bootstrap_servers, 4)  # the first record and its marker, and these two
    proxy.hang_up()
    time.sleep(0.3)  # until the producer has noticed, and wants to send it again
    threading.Timer(0.5, proxy.listen).start()  # by then it has been dropped
    abort(producer)

    send_in_a_transaction(producer, b"second")
    assert committed(cluster.bootstrap_servers) == [b"first", b"second"]
