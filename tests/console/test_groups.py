"""Groups in the console: what is shown, moves with a preview, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from millrace.admin.waiting import first_unread_ms
from millrace.client.cluster import ClusterClient
from millrace.client.settings import ClientSettings
from millrace.model import TopicPartition as Place
from millrace.testing import Cluster
from support.consoles import Visitor, words

LONG_AGO_MS = 1_700_000_000_000


@pytest.fixture(scope="module", autouse=True)
def contents(cluster: Cluster) -> None:
    cluster.create_topic("orders", partitions=2)
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "linger.ms": 50})
    for number in range(20):
        producer.produce("orders", b"x", partition=number % 2, timestamp=LONG_AGO_MS + number * 1000)
    producer.flush(30)
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap_servers, "group.id": "billing"})
    consumer.commit(offsets=[TopicPartition("orders", 0, 4), TopicPartition("orders", 1, 10)], asynchronous=False)
    consumer.close()


@contextmanager
def member(cluster: Cluster, group: str) -> Iterator[None]:
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap_servers, "group.id": group})
    consumer.subscribe(["orders"])
    while not consumer.assignment():
        consumer.poll(0.1)
    try:
        yield
    finally:
        consumer.close()


def test_the_list(visitor: Visitor) -> None:
    text = words(visitor.get("/groups"))
    assert "billing classic empty 1 6" in text, text
    assert "No group matches" in words(visitor.get("/groups?q=nothing"))
    assert "billing" not in words(visitor.get("/groups?type=share"))
    assert "billing classic empty 2 6" in words(visitor.get("/topics/orders/groups"))


def test_a_group(visitor: Visitor) -> None:
    text = words(visitor.get("/groups/billing"))
    assert "orders 0 4 10 6" in text, text
    assert "orders 1 10 10 0 0 s" in text, text
    assert visitor.get("/groups/nobody").status_code == 404


def test_how_long_records_have_waited(cluster: Cluster) -> None:
    settings = ClientSettings.from_properties({"bootstrap.servers": cluster.bootstrap_servers})
    with ClusterClient(settings) as client:
        client.topics(["orders"])
        places = {Place("orders", 0): 4, Place("orders", 1): 10}
        assert first_unread_ms(client, places, limit_s=10) == {Place("orders", 0): LONG_AGO_MS + 8000}
        assert first_unread_ms(client, places, limit_s=-1) == {}


class TestMoving:
    def test_it_is_shown_then_done(self, visitor: Visitor) -> None:
        visitor.get("/groups/billing")
        shown = visitor.post("/groups/billing/reset", to="earliest", action="plan")
        assert shown.status_code == 200, words(shown)
        assert "orders 0 4 0 -4 orders 1 10 0 -10" in words(shown)
        assert "orders 0 4 10 6" in words(visitor.get("/groups/billing")), "nothing was moved yet"
        text = visitor.done("/groups/billing/reset", to="offset", offset="4", topics="orders:0", action="move")
        assert "1 partition moved" in text
        assert "orders 0 4 10 6" in text
        text = visitor.done("/groups/billing/reset", to="by", by="-1", topics="orders:0", action="move")
        assert "orders 0 3 10 7" in text
        visitor.done("/groups/billing/reset", to="time", time=str(LONG_AGO_MS + 8000), topics="orders:0", action="move")
        assert "orders 0 4 10 6" in words(visitor.get("/groups/billing"))

    @pytest.mark.parametrize(
        ("fields", "told"),
        [
            ({"to": ""}, "say where to"),
            ({"to": "offset", "offset": "x"}, "offset is a number"),
            ({"to": "time", "time": "yesterday-ish"}, "is no time"),
            ({"to": "earliest", "topics": "missing"}, "missing"),
            ({"to": "earliest", "topics": "orders:9"}, "no partition"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_bad_input_is_told(self, visitor: Visitor, fields: dict[str, str], told: str) -> None:
        answer = visitor.post("/groups/billing/reset", action="plan", **fields)
        assert (answer.status_code, told in words(answer)) == (400, True), words(answer)

    def test_a_group_with_members_stays(self, cluster: Cluster, visitor: Visitor) -> None:
        with member(cluster, "running"):
            text = words(visitor.get("/groups/running"))
            assert "Members 1" in text
            shown = words(visitor.post("/groups/running/reset", to="earliest", topics="orders", action="plan"))
            assert "stop them first" in shown
            answer = visitor.post("/groups/running/reset", to="earliest", topics="orders", action="move")
            assert (answer.status_code, "stop them first" in words(answer)) == (400, True)
            assert visitor.post("/groups/running/delete", name="running").status_code == 502


def test_forgetting_and_deleting(cluster: Cluster, visitor: Visitor) -> None:
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap_servers, "group.id": "a/b <c>"})
    consumer.commit(offsets=[TopicPartition("orders", 0, 1), TopicPartition("orders", 1, 1)], asynchronous=False)
    consumer.close()
    address = "/groups/a%2Fb%20%3Cc%3E"
    answer = visitor.get(address)
    assert answer.status_code == 200
    assert "<c>" not in answer.text.replace("&lt;c&gt;", "")
    assert visitor.post(f"{address}/delete", name="other").status_code == 400
    assert "was deleted" in visitor.done(f"{address}/delete", name="a/b <c>")
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap_servers, "group.id": "forgetful"})
    consumer.commit(offsets=[TopicPartition("orders", 0, 1), TopicPartition("orders", 1, 1)], asynchronous=False)
    consumer.close()
    assert "forgotten 2 partitions" in visitor.done("/groups/forgetful/forget", topic="orders")
