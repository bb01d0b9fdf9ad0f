"""Client telemetry (KIP-714) with librdkafka: it pushes where there is a receiver, and not where there is none."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka import Consumer, Producer

from millrace.testing import Cluster
from support.client_metrics import subscribe
from support.otlp import OtlpEndpoint, Request, metric_names, resources
from support.raw import RawClient

WAIT_S = 20


@contextmanager
def producing(cluster: Cluster, **settings: str) -> Iterator[Producer]:
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "client.id": "producing", **settings})
    yield producer
    assert producer.flush(WAIT_S) == 0
    producer.close()


def of(requests: list[Request], client_id: str) -> list[Request]:
    return [each for each in requests if ("client_id", client_id) in resources(each.body)[0]]


def names(requests: list[Request]) -> set[str]:
    return {name for each in requests for name in metric_names(each.body)}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[OtlpEndpoint]:
    with OtlpEndpoint() as running:
        yield running


@pytest.fixture(scope="module")
def telling(endpoint: OtlpEndpoint) -> Iterator[Cluster]:
    """A cluster whose clients are asked for all their metrics."""
    with Cluster(brokers=2, settings={"telemetry.receiver": endpoint.url}) as cluster:
        host, _, port = cluster.bootstrap_servers.split(",")[0].rpartition(":")
        with RawClient((host, int(port))) as client:
            subscribe(client, "all", metrics="*", interval_ms="200")
        cluster.create_topic("t")
        yield cluster


def test_a_producer_pushes_its_metrics(telling: Cluster, endpoint: OtlpEndpoint) -> None:
    wanted = "org.apache.kafka.producer.connection.creation.total"
    with producing(telling) as producer:
        producer.produce("t", b"v")
        got = of(endpoint.wait_for(lambda requests: wanted in names(of(requests, "producing"))), "producing")
    attributes = dict(resources(got[0].body)[0])
    assert attributes["client_software_name"] == "confluent-kafka-python"
    assert attributes["principal"] == "User:ANONYMOUS"
    assert "org.apache.kafka.producer.produce.throttle.time.avg" in names(of(endpoint.requests, "producing"))


def test_a_consumer_pushes_its_metrics_with_its_group(telling: Cluster, endpoint: OtlpEndpoint) -> None:
    consumer = Consumer({
        "bootstrap.servers": telling.bootstrap_servers, "client.id": "consuming", "group.id": "readers",
        "auto.offset.reset": "earliest",
    })  # fmt: skip
    consumer.subscribe(["t"])
    wanted = "org.apache.kafka.consumer.connection.creation.total"
    try:
        deadline = time.monotonic() + WAIT_S
        while wanted not in names(of(endpoint.requests, "consuming")) and time.monotonic() < deadline:
            consumer.poll(0.1)
    finally:
        consumer.close()
    got = of(endpoint.wait_for(lambda requests: wanted in names(of(requests, "consuming"))), "consuming")
    assert ("group_id", "readers") in resources(got[0].body)[0]


def test_who_does_not_want_to_push_does_not(telling: Cluster, endpoint: OtlpEndpoint) -> None:
    with producing(telling, **{"client.id": "silent", "enable.metrics.push": "false"}) as producer:
        producer.produce("t", b"v")
        assert producer.flush(WAIT_S) == 0
        # Another one that has begun later has pushed twice.
        with producing(telling, **{"client.id": "later"}) as other:
            other.produce("t", b"v")
            endpoint.wait_for(lambda requests: len(of(requests, "later")) >= 2)
    assert of(endpoint.requests, "silent") == []


@pytest.mark.parametrize("has_receiver", [True, False])
def test_without_a_receiver_nobody_asks(
    has_receiver: bool, endpoint: OtlpEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """By what the client says of itself: it says nothing of the kind where there is none to push to."""
    caplog.set_level(logging.DEBUG, logger="librdkafka")
    settings = {"telemetry.receiver": endpoint.url} if has_receiver else {}
    with Cluster(settings=settings) as cluster:
        cluster.create_topic("t")
        producer = Producer(
            {"bootstrap.servers": cluster.bootstrap_servers, "debug": "telemetry"},
            logger=logging.getLogger("librdkafka"),
        )
        producer.produce("t", b"v")
        assert producer.flush(WAIT_S) == 0
        producer.close()
    assert "initialized" in caplog.text
    assert ("Sending GetTelemetryRequest" in caplog.text) is has_receiver
