"""The demo's account: it must notice what it is there to notice."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import islice

import pytest
from confluent_kafka import KafkaError, Message

from millrace.clock import ManualClock
from millrace.demo import traffic
from millrace.demo.group import Archive
from millrace.demo.scenario import Check
from millrace.demo.traffic import BAD, GOOD, REPEATED, Account, Outgoing

NOW_MS = 1_700_000_000_000


def message(offset: int, partition: int = 0) -> Message:
    return Message(topic=traffic.CHAT, partition=partition, offset=offset, value=b"v", timestamp=(1, NOW_MS - 5))


@pytest.mark.parametrize(
    ("expected", "found", "late", "ok"),
    [(10, 10, 0, True), (10, 9, 0, False), (10, 11, 0, False), (10, 9, 1, True), (10, 8, 1, False), (10, 11, 3, False)],
)
def test_a_check_allows_only_what_was_reported_as_late(expected: int, found: int, late: int, ok: bool) -> None:
    assert Check("records", expected, found, late).ok is ok


def test_only_acknowledged_records_are_in_the_account() -> None:
    account = Account()
    for kind in (GOOD, GOOD, BAD):
        account.reporter(Outgoing(traffic.CLICKS, "k", b"12345", kind))(None, message(0))
    account.reporter(Outgoing(traffic.CHAT, "k", b"1"))(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), message(0))
    assert (account.acked(traffic.CLICKS), account.acked(traffic.CLICKS, GOOD), account.acked(traffic.CHAT)) == (
        3,
        2,
        0,
    )
    assert (account.total(), account.bytes, account.failed) == (3, 15, 1)


def test_the_archive_counts_an_offset_once_and_notices_a_gap() -> None:
    archive = Archive()
    for offset, partition in ((0, 0), (0, 1), (1, 0), (0, 0), (1, 0), (2, 0)):
        archive.enter(message(offset, partition), NOW_MS)
    assert (archive.count, archive.read_again, archive.gaps, archive.latency_ms(0.5)) == (4, 2, 0, 5)
    archive.enter(message(4), NOW_MS)
    assert (archive.count, archive.gaps) == (5, 1)


@pytest.mark.parametrize("source", traffic.SOURCES, ids=lambda one: one.name)
def test_what_a_source_calls_good_is_what_the_pipelines_can_use(source: traffic.Source) -> None:
    values = list(islice(source.values(random.Random(1), ManualClock()), 5000))
    assert {one.topic for one in values} <= traffic.PARTITIONS.keys()
    for one in values:
        if one.kind == BAD:
            with pytest.raises(ValueError):
                json.loads(one.value)
        else:
            assert "ts" in json.loads(one.value)


def test_clicks_are_unique_except_those_sent_twice_and_purchases_name_one_each() -> None:
    values = list(islice(traffic.web_front_end(random.Random(1), ManualClock()), 5000))
    clicks = [json.loads(one.value)["id"] for one in values if one.topic == traffic.CLICKS and one.kind == GOOD]
    again = [json.loads(one.value)["id"] for one in values if one.kind == REPEATED]
    bought = [json.loads(one.value)["click"] for one in values if one.topic == traffic.PURCHASES]
    assert max(Counter(clicks).values()) == 1
    assert again and set(again) <= set(clicks)
    assert bought and max(Counter(bought).values()) == 1 and set(bought) <= set(clicks)


def test_the_users_table_begins_with_every_user() -> None:
    rows = list(islice(traffic.user_changes(random.Random(1), ManualClock()), traffic.USER_COUNT))
    assert len({one.key for one in rows}) == traffic.USER_COUNT
