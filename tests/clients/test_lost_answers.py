"""A transactional producer of librdkafka whose broker takes a record and is not heard: nothing of what follows is lost.

When such a transaction is aborted, librdkafka (2.16) drops the record that it wanted to send again, and gives its
sequence number to the first record of the next transaction. A broker that takes that one for the retry loses it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from clients.lossy_proxy import LossyProxy
from clients.members import wait_for
from millrace.testing import Cluster

TIMEOUT_S = 20.0
ABORT_S = 2.0
RETRY_MS = 3000
"""Until a record whose answer was lost is sent again: it is aborted before."""
LOST = 3
TOPIC = "payments"


@pytest.fixture
def proxy() -> Iterator[LossyProxy]:
    made = LossyProxy(lambda number: number == LOST)
    yield made
    made.close()


@pytest.fixture
def cluster(proxy: LossyProxy) -> Iterator[Cluster]:
    with Cluster(brokers=1, settings={"advertised.listeners": f"PLAINTEXT://{proxy.address}"}) as running:
        proxy.forward_to(running.bootstrap_servers)
        running.create_topic(TOPIC)
        yield running


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
    cluster: Cluster, proxy: LossyProxy
) -> None:
    producer = Producer(
        {
            "bootstrap.servers": proxy.address,
            "transactional.id": "payer",
            "retry.backoff.ms": RETRY_MS,
            "retry.backoff.max.ms": RETRY_MS,
            "log_level": 0,
        }
    )
    producer.init_transactions(TIMEOUT_S)
    send_in_a_transaction(producer, b"first")

    producer.begin_transaction()
    producer.produce(TOPIC, b"heard", partition=0)
    assert producer.flush(TIMEOUT_S) == 0
    producer.produce(TOPIC, b"unheard", partition=0)
    wait_for(lambda: proxy.lost == 1, lambda: "no answer was lost")
    time.sleep(0.3)  # until the producer has noticed, and wants to send it again
    abort(producer)

    send_in_a_transaction(producer, b"second")
    assert committed(cluster.bootstrap_servers) == [b"first", b"second"]
