"""Topics and brokers in the console: what is shown is what is there, and forms do what they say."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer

from millrace.console.monitor import record_rates
from millrace.testing import Cluster
from support.consoles import Visitor, words


@pytest.fixture(scope="module", autouse=True)
def contents(cluster: Cluster) -> None:
    for name, partitions in (("orders", 3), ("payments", 1), *((f"many-{number:03}", 1) for number in range(120))):
        cluster.create_topic(name, partitions=partitions)
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers})
    for number in range(30):
        producer.produce("orders", str(number).encode(), partition=number % 3)
    producer.flush(30)


def test_the_overview(visitor: Visitor) -> None:
    text = words(visitor.get("/"))
    assert "Brokers 1" in text
    assert "Topics 122" in text
    assert "Every partition has a leader" in text


class TestTheList:
    def test_is_cut_into_pages(self, visitor: Visitor) -> None:
        text = words(visitor.get("/topics"))
        assert "1-50 of 122 topics" in text.replace("\N{EN DASH}", "-")
        assert "many-000" in text
        assert "orders" not in text
        assert "orders" in words(visitor.get("/topics?page=3"))
        assert "orders" in words(visitor.get("/topics?page=999")), "beyond the end is the end"

    def test_is_searched(self, visitor: Visitor) -> None:
        part = visitor.part("/topics?q=ORD").text
        assert "orders" in part
        assert "payments" not in part
        assert 'hx-select="#topics"' in part
        assert 'id="topics"' in part
        assert "No topic matches" in words(visitor.get("/topics?q=nothing+like+that"))

    def test_is_sorted(self, visitor: Visitor) -> None:
        text = visitor.get("/topics?sort=partitions&order=desc").text
        assert text.index("orders") < text.index("many-000")
        assert 'aria-sort="descending"' in text

    @pytest.mark.parametrize(
        "query", ["page=-1", "page=x", "rows=99999999999", "sort=nothing", "show=nothing", "q=%00"]
    )
    def test_takes_any_address(self, visitor: Visitor, query: str) -> None:
        assert visitor.get(f"/topics?{query}").status_code == 200

    def test_a_name_cannot_act(self, visitor: Visitor) -> None:
        text = visitor.get("/topics?q=<script>alert(1)</script>").text
        assert "<script>alert" not in text
        assert "&lt;script&gt;" in text


class TestATopic:
    def test_its_partitions(self, visitor: Visitor) -> None:
        text = words(visitor.get("/topics/orders"))
        assert "0 1 1 0 10 10" in text, text

    def test_its_other_pages(self, visitor: Visitor) -> None:
        settings = words(visitor.get("/topics/orders/settings?q=retention.ms"))
        assert "retention.ms" in settings
        assert "No group has read" in words(visitor.get("/topics/orders/groups"))
        assert "no authorizer" in words(visitor.get("/topics/orders/rights"))

    def test_one_that_is_not_there(self, visitor: Visitor) -> None:
        for path in ("", "/settings", "/groups", "/rights"):
            answer = visitor.get(f"/topics/missing{path}")
            assert (answer.status_code, "There is no topic missing" in words(answer)) == (404, True)

    def test_it_is_made_set_grown_and_deleted(self, visitor: Visitor) -> None:
        text = visitor.done("/topics", name="fresh", partitions="2", replicas="", settings="retention.ms=1000\n")
        assert "Topic fresh was created" in text
        assert "retention.ms 1000" in words(visitor.get("/topics/fresh/settings?show=set"))
        assert "is 2000 now" in visitor.done(
            "/topics/fresh/settings", setting="retention.ms", value="2000", action="set"
        )
        assert "by default again" in visitor.done("/topics/fresh/settings", setting="retention.ms", action="unset")
        assert "has 4 partitions now" in visitor.done("/topics/fresh/grow", partitions="4")
        wrong = visitor.post("/topics/fresh/delete", name="fres")
        assert (wrong.status_code, "type the name" in words(wrong)) == (400, True)
        assert "Topic fresh was deleted" in visitor.done("/topics/fresh/delete", name="fresh")

    @pytest.mark.parametrize(
        ("fields", "told"),
        [
            ({"name": ""}, "give the topic a name"),
            ({"name": "orders"}, "already exists"),
            ({"name": "bad name!"}, "INVALID_TOPIC_EXCEPTION"),
            ({"name": "x", "partitions": "many"}, "partitions is a number"),
            ({"name": "x", "settings": "retention.ms"}, "NAME=VALUE"),
            ({"name": "x", "settings": "no.such.setting=1"}, "no.such.setting"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_bad_input_is_told(self, visitor: Visitor, fields: dict[str, str], told: str) -> None:
        answer = visitor.post("/topics", **fields)
        assert answer.status_code in {400, 502}, words(answer)
        assert told in words(answer)


class TestBrokers:
    def test_the_list(self, visitor: Visitor) -> None:
        text = words(visitor.get("/brokers"))
        assert "1 controller" in text
        assert "Log directories" in text

    def test_one(self, visitor: Visitor) -> None:
        assert "num.partitions" in words(visitor.get("/brokers/1?q=num.partitions"))
        assert visitor.get("/brokers/7").status_code == 404
        told = visitor.done("/brokers/1/settings", setting="log.retention.ms", value="86400000", action="set")
        assert "log.retention.ms is 86400000 now" in told
        visitor.done("/brokers/1/settings", setting="log.retention.ms", action="unset")
        answer = visitor.post("/brokers/1/settings", setting="node.id", value="7", action="set")
        assert answer.status_code in {400, 502}

    def test_a_plan(self, visitor: Visitor) -> None:
        visitor.get("/brokers")
        answer = visitor.post("/brokers/moves", action="plan")
        assert (answer.status_code, "Nothing has to move" in words(answer)) == (200, True)
        answer = visitor.post("/brokers/moves", action="plan", drain="9")
        assert (answer.status_code, "there is no broker 9" in words(answer)) == (400, True)
        answer = visitor.post("/brokers/moves", action="plan", drain="one")
        assert (answer.status_code, "by their numbers" in words(answer)) == (400, True)


def test_rates() -> None:
    before = {"grown": (10, 10), "made anew": (100,), "unknown": (None,)}
    now = {"grown": (30, 10), "made anew": (3,), "unknown": (5,), "new": (7,)}
    assert record_rates(before, now, 2.0) == {"grown": 10.0, "made anew": 0.0, "unknown": 0.0, "new": 0.0}
    assert record_rates(before, now, 0.0) == {}
