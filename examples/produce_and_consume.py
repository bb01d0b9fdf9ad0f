"""A first record in and out, with confluent-kafka: python examples/produce_and_consume.py [HOST:PORT]

Needs confluent-kafka, which is installed along with millrace.
"""

# ruff: noqa: T201

from __future__ import annotations

import sys

try:
    from confluent_kafka import Consumer, Producer
except ModuleNotFoundError as missing:
    sys.exit(f"there is no module {missing.name}; this example needs: pip install confluent-kafka")

bootstrap = sys.argv[1] if len(sys.argv) > 1 else "localhost:9092"
topic = "postcards"

producer = Producer({"bootstrap.servers": bootstrap})
for name in ("Ada", "Grace", "Edsger"):
    producer.produce(topic, key=name, value=f"hello, {name}")
producer.flush()

consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "postcard-readers", "auto.offset.reset": "earliest"})
consumer.subscribe([topic])
for _ in range(3):
    message = consumer.poll(10)
    if message is None or message.error():
        sys.exit(f"nothing came: {message and message.error()}")
    print(f"{message.topic()}[{message.partition()}]@{message.offset()}: {message.value().decode()}")
consumer.close()
