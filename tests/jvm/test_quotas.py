"""Quotas that kafka-configs sets, as the Java clients feel them: slower, told so, and nothing lost."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from support.kafka_jars import CONFIGS, PRODUCER_PERFORMANCE
from support.kafka_tools import KafkaTools

RATE = 100_000
RECORDS, RECORD_BYTES = 1500, 1000
LEAST_S = RECORDS * RECORD_BYTES / RATE - 10
"""Ten of the eleven windows are there at once."""


@pytest.fixture
def limited(tools: KafkaTools) -> Iterator[None]:
    entity = ("--entity-type", "clients", "--entity-name", "slow")
    tools.run(CONFIGS, "--alter", *entity, "--add-config", f"producer_byte_rate={RATE},consumer_byte_rate={RATE}")
    yield
    tools.run(CONFIGS, "--alter", *entity, "--delete-config", "producer_byte_rate,consumer_byte_rate")


@pytest.mark.usefixtures("limited")
def test_a_consumer_with_fetch_sessions_gets_everything_later(tools: KafkaTools, topic: str) -> None:
    tools.create_topic(topic)
    lines = [f"{number} {'x' * RECORD_BYTES}" for number in range(RECORDS)]
    tools.produce(topic, lines)
    began = time.monotonic()
    slow = ("--command-property", "client.id=slow", "--command-property", "max.partition.fetch.bytes=100000")
    assert tools.consume(topic, RECORDS, "--from-beginning", *slow) == lines
    assert time.monotonic() - began > LEAST_S


@pytest.mark.usefixtures("limited")
def test_a_producer_is_slowed_down_and_told(tools: KafkaTools, topic: str) -> None:
    tools.create_topic(topic)
    began = time.monotonic()
    shown = tools.run(
        PRODUCER_PERFORMANCE,
        *("--topic", topic, "--num-records", str(RECORDS), "--record-size", str(RECORD_BYTES), "--throughput", "-1"),
        *("--command-property", "client.id=slow"),
        "--print-metrics",
    ).stdout
    assert time.monotonic() - began > LEAST_S
    (throttled,) = [line for line in shown.splitlines() if "produce-throttle-time-max" in line]
    assert float(throttled.rsplit(":", 1)[1]) > 0
