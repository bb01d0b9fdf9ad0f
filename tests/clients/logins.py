"""What clients do that have logged in, and what they say when they are turned away."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError as AioError
from confluent_kafka import KafkaError, Producer
from kafka import KafkaAdminClient
from kafka.errors import KafkaTimeoutError

from clients.adapters.aio import Aiokafka
from clients.adapters.confluent import Confluent
from clients.adapters.interface import Client, Login
from clients.adapters.kafka_python import KafkaPython
from clients.reading import read_count


def writes_and_reads(client: Client, bootstrap: str, topic: str) -> None:
    values = [b"%d" % number for number in range(20)]
    with client.running():
        sender = client.sender(bootstrap)
        for pending in [sender.send(topic, value, partition=0) for value in values]:
            pending.result(30)
        sender.close()
        reader = client.reader(bootstrap, group=f"of-{topic}")
        reader.subscribe(topic)
        assert [record.value for record in read_count(reader, len(values))] == values
        reader.commit()
        reader.close()


def refusal_of_librdkafka(bootstrap: str, login: Login) -> str:
    errors: list[KafkaError] = []
    producer = Producer({**Confluent(login)._address(bootstrap), "error_cb": errors.append, "log_level": 0})
    ends_at = time.monotonic() + 20
    while not errors and time.monotonic() < ends_at:
        producer.poll(0.1)
    assert errors[0].code() == KafkaError._AUTHENTICATION
    return str(errors[0])


def refusal_of_kafka_python(bootstrap: str, login: Login, words: str, log: pytest.LogCaptureFixture) -> str:
    """It tries until its time is up, and tells why in its log."""
    with log.at_level(logging.WARNING, "kafka"):
        return told_by_kafka_python(bootstrap, login, words, log)


def told_by_kafka_python(bootstrap: str, login: Login, words: str, log: pytest.LogCaptureFixture) -> str:
    """What it logs while it tries to get in, and never does.

    It ends when the time is up that it was given, even if it was refused long before. So that is little, and more where
    the machine was too busy for one whole attempt: until it has said these `words`, in whatever case.
    """
    for seconds in (1, 4, 16):
        with pytest.raises(KafkaTimeoutError):
            KafkaAdminClient(**KafkaPython(login)._address(bootstrap), bootstrap_timeout_ms=seconds * 1000)
        if words.lower() in log.text.lower():
            break
    return log.text


def refusal_of_aiokafka(bootstrap: str, login: Login, log: pytest.LogCaptureFixture) -> str:
    async def start() -> None:
        producer = AIOKafkaProducer(**Aiokafka(login)._address(bootstrap))
        try:
            await producer.start()
        finally:
            await producer.stop()

    with log.at_level(logging.WARNING, "aiokafka"), pytest.raises(AioError) as caught:
        asyncio.run(start())
    return f"{caught.value} {log.text}"
