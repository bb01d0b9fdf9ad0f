"""A real broker in a test, on a free port, gone afterwards: pytest examples/in_tests"""

from __future__ import annotations

from confluent_kafka import Consumer, Producer

from millrace.testing import Cluster


def test_an_order_arrives(millrace: Cluster) -> None:
    millrace.create_topic("orders", partitions=3)

    producer = Producer({"bootstrap.servers": millrace.bootstrap_servers})
    producer.produce("orders", key="customer-1", value="3 apples")
    producer.flush()

    consumer = Consumer(
        {"bootstrap.servers": millrace.bootstrap_servers, "group.id": "test", "auto.offset.reset": "earliest"}
    )
    consumer.subscribe(["orders"])
    message = consumer.poll(10)
    consumer.close()
    assert message is not None
    assert message.value() == b"3 apples"
