"""What clients do that have logged in, and what they say when they are turned away."""

from __future__ import annotations

import asyncio
import logging
import selectors
import time
from collections.abc import Sequence
from contextlib import ExitStack

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


def write_while_logins_end(clients: Sequence[Client], bootstrap: str, topic: str, seconds: float) -> None:
    """All clients write for so long, each to a partition of its own, and find there what they have written."""
    with ExitStack() as running:
        for client in clients:
            running.enter_context(client.running())
        senders = [client.sender(bootstrap) for client in clients]
        values: list[bytes] = []
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at:
            values.append(b"%d" % len(values))
            for pending in [sender.send(topic, values[-1], partition=own) for own, sender in enumerate(senders)]:
                pending.result(30)
            time.sleep(0.01)
        for own, (client, sender) in enumerate(zip(clients, senders, strict=True)):
            sender.close()
            reader = client.reader(bootstrap)
            reader.assign([(topic, own)])
            assert [record.value for record in read_count(reader, len(values))] == values
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


async def _sockets_are_closed() -> None:
    """It does not wait for its connections to end, and with TLS they take a moment."""
    selector: selectors.BaseSelector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
    ends_at = time.monotonic() + 20
    while len(selector.get_map()) > 1:  # the loop's own is there always
        assert time.monotonic() < ends_at, "a connection stays open"
        await asyncio.sleep(0.005)


def refusal_of_aiokafka(bootstrap: str, login: Login, log: pytest.LogCaptureFixture) -> str:
    async def start() -> None:
        producer = AIOKafkaProducer(**Aiokafka(login)._address(bootstrap))
        try:
            await producer.start()
        finally:
            await producer.stop()
            await _sockets_are_closed()

    with log.at_level(logging.WARNING, "aiokafka"), pytest.raises(AioError) as caught:
        asyncio.run(start())
    return f"{caught.value} {log.text}"
