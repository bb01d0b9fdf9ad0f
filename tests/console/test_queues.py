"""Queues in the console, with a real consumer, and dead letters that are sent again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import Producer

from millrace.admin import queues, topics
from millrace.client.cluster import ClusterClient
from millrace.client.queue import QueueConsumer, Verdict
from millrace.client.settings import ClientSettings
from millrace.testing import Cluster
from support.consoles import Visitor, words

LETTERS = "dlq.jobs"


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[ClusterClient]:
    settings = ClientSettings.from_properties({"bootstrap.servers": cluster.bootstrap_servers})
    with ClusterClient(settings) as client:
        yield client


def rejected(client: ClusterClient, group: str, count: int) -> None:
    """Have a member take so many records and want none of them."""
    with QueueConsumer(client, group, ["jobs"]) as consumer:
        done = 0
        while done < count:
            taken = consumer.poll(max_records=count - done, max_wait_ms=100, strict=True)
            assert not consumer.acknowledge(taken, Verdict.REJECT)
            done += len(taken)


@pytest.fixture(scope="module", autouse=True)
def contents(cluster: Cluster, client: ClusterClient) -> None:
    cluster.create_topic("jobs")
    topics.create_topics(client, [LETTERS], partitions=1, settings={"errors.deadletterqueue.group.enable": "true"})
    settings = {"share.auto.offset.reset": "earliest", queues.DEAD_LETTERS: LETTERS}
    queues.change_settings(client, "workers", settings)
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers})
    for number in range(5):
        producer.produce("jobs", f"job {number}".encode(), key=b"<script>alert(1)</script>", headers={"n": str(number)})
    producer.flush(30)
    rejected(client, "workers", 2)


def test_the_list(visitor: Visitor) -> None:
    text = words(visitor.get("/queues"))
    assert "workers empty 1 3" in text, text


def test_a_queue(visitor: Visitor) -> None:
    text = words(visitor.get("/queues/workers"))
    assert "jobs 0 2 5 3 0" in text, text
    assert f"in {LETTERS}" in text
    assert visitor.get("/queues/nobody").status_code in {400, 404}
    assert visitor.get("/groups/workers").headers["location"] == "/queues/workers"


def test_settings(visitor: Visitor) -> None:
    told = visitor.done("/queues/workers/settings", setting="share.delivery.count.limit", value="3", action="set")
    assert "share.delivery.count.limit is 3 now" in told
    visitor.done("/queues/workers/settings", setting="share.delivery.count.limit", action="unset")
    answer = visitor.post("/queues/workers/settings", setting="share.delivery.count.limit", value="no", action="set")
    assert answer.status_code == 400


def test_moving(visitor: Visitor) -> None:
    shown = words(visitor.post("/queues/workers/reset", to="latest", action="plan"))
    assert "jobs 0 2 5 Move the queue" in shown, shown
    assert "1 partition moved" in visitor.done("/queues/workers/reset", to="offset", offset="2", action="move")
    assert visitor.post("/queues/workers/reset", to="by", by="1", action="plan").status_code == 400


class TestDeadLetters:
    def test_they_are_shown_with_their_reason(self, visitor: Visitor) -> None:
        text = words(visitor.get("/queues/workers/letters"))
        assert "jobs-0, 0 1 rejected by its consumer no" in text, text
        assert "jobs-0, 1 1 rejected by its consumer no" in text

    def test_what_they_are_about_is_sent_again(self, visitor: Visitor, client: ClusterClient) -> None:
        visitor.get("/queues/workers/letters")
        answer = visitor.post("/queues/workers/letters", letter=["0:0", "0:1"])
        assert "2 records sent again" in words(visitor.get(answer.headers["location"]))
        with QueueConsumer(client, "workers", ["jobs"]) as consumer:
            taken = []
            while len(taken) < 5:
                taken += consumer.poll(max_records=10, max_wait_ms=100)
            consumer.acknowledge(taken, Verdict.ACCEPT)
        again = [(each.record.value, each.record.key, each.record.headers[0].value) for each in taken[-2:]]
        assert again == [(f"job {number}".encode(), b"<script>alert(1)</script>", b"%d" % number) for number in (0, 1)]

    @pytest.mark.parametrize(("letter", "told"), [([], "choose"), (["x"], "no letter"), (["0:999"], "no letter at")])
    def test_bad_choices_are_told(self, visitor: Visitor, letter: list[str], told: str) -> None:
        answer = visitor.post("/queues/workers/letters", letter=letter)
        if answer.status_code == 303:
            answer = visitor.get(answer.headers["location"])
        assert told in words(answer)

    def test_a_queue_without_them(self, visitor: Visitor, client: ClusterClient) -> None:
        queues.change_settings(client, "others", {"share.auto.offset.reset": "earliest"})
        with QueueConsumer(client, "others", ["jobs"]) as consumer:
            while not consumer.poll(max_records=1, max_wait_ms=100):
                pass
        assert "No dead letters are written" in words(visitor.get("/queues/others/letters"))
        assert visitor.post("/queues/others/letters", letter=["0:0"]).status_code == 400
        assert "was deleted" in visitor.done("/queues/others/delete", name="others")
