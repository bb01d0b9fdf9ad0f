"""The ledger of the demo: it must notice what it is there to notice."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from confluent_kafka import KafkaError, Message

from millrace.cli.demo_traffic import STREAMS, Ledger

TOPIC = STREAMS[0].topic
NOW_MS = 1_700_000_000_000


def message(offset: int, value: bytes = b"v", partition: int = 0) -> Message:
    return Message(topic=TOPIC, partition=partition, offset=offset, key=b"k", value=value, timestamp=(1, NOW_MS - 5))


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def produce(ledger: Ledger, *messages: Message) -> None:
    for one in messages:
        ledger.enter_report(None, one)


def receive(ledger: Ledger, *messages: Message) -> None:
    for one in messages:
        ledger.enter_received(one, NOW_MS)


def test_what_was_acknowledged_and_read_balances_whatever_the_order_of_reports(ledger: Ledger) -> None:
    produce(ledger, message(1, b"b"), message(0, b"a"))
    receive(ledger, message(0, b"a"), message(1, b"b"))
    assert ledger.balanced
    assert (ledger.produced(), ledger.consumed(TOPIC), ledger.replayed()) == (2, 2, 0)
    assert ledger.latency_ms(0.5) == 5


def test_a_record_read_again_is_not_counted_twice(ledger: Ledger) -> None:
    produce(ledger, message(0))
    receive(ledger, message(0), message(0))
    assert ledger.balanced
    assert ledger.replayed() == 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda ledger: produce(ledger, message(0)),
        lambda ledger: receive(ledger, message(0)),
        lambda ledger: (produce(ledger, message(0, b"a")), receive(ledger, message(0, b"b"))),
        lambda ledger: (produce(ledger, message(0), message(1)), receive(ledger, message(0), message(2))),
        lambda ledger: (produce(ledger, message(0)), receive(ledger, message(0, partition=1))),
        lambda ledger: ledger.enter_report(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), message(0)),
    ],
    ids=["never read", "never produced", "changed", "skipped", "elsewhere", "refused"],
)
def test_everything_that_can_go_wrong_is_seen(ledger: Ledger, wrong: Callable[[Ledger], object]) -> None:
    wrong(ledger)
    assert not ledger.balanced


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.topic)
def test_streams_invent_keyed_records(stream: object) -> None:
    records = list(itertools.islice(stream.records(random.Random(1)), 50))  # type: ignore[attr-defined]
    assert len({key for key, _ in records}) > 3
    assert all(isinstance(value, dict) for _, value in records)
