"""Client metrics (KIP-714): subscriptions by kafka-client-metrics and kafka-configs, and pushes of the Java clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.kafka_jars import CLIENT_METRICS, CONFIGS, VERIFIABLE_CONSUMER, KafkaJars
from support.kafka_tools import KafkaTools
from support.otlp import OtlpEndpoint, Request, metric_names, resources
from support.servers import MillraceServer


def shown(tools: KafkaTools, name: str) -> list[str]:
    """The settings that kafka-client-metrics shows of a subscription."""
    lines = tools.run(CLIENT_METRICS, "--describe", "--name", name).lines
    assert lines[0] == f"Client metrics configs for {name} are:"
    return sorted(line.strip() for line in lines[1:])


def test_subscriptions_come_and_go(tools: KafkaTools, topic: str) -> None:
    name = topic
    done = tools.run(
        CLIENT_METRICS,
        *("--alter", "--name", name, "--metrics", "org.apache.kafka.producer.,org.apache.kafka.consumer."),
        *("--interval", "5000", "--match", "client_id=web.*,client_software_name=apache-kafka-java"),
    )
    assert f"Altered client metrics config for {name}." in done.stdout
    assert shown(tools, name) == [
        "interval.ms=5000",
        "match=client_id=web.*,client_software_name=apache-kafka-java",
        "metrics=org.apache.kafka.producer.,org.apache.kafka.consumer.",
    ]
    assert name in tools.run(CLIENT_METRICS, "--list").lines
    tools.run(CLIENT_METRICS, "--delete", "--name", name)
    assert name not in tools.run(CLIENT_METRICS, "--list").lines


def test_kafka_configs_knows_them(tools: KafkaTools, topic: str) -> None:
    entity = ("--entity-type", "client-metrics", "--entity-name", topic)
    tools.run(CONFIGS, "--alter", *entity, "--add-config", "metrics=[a.,b.],interval.ms=100")
    described = tools.run(CONFIGS, "--describe", *entity).stdout
    assert "metrics=a.,b. sensitive=false synonyms={DYNAMIC_CLIENT_METRICS_CONFIG:metrics=a.,b.}" in described
    assert "interval.ms=100 " in described
    assert topic in tools.run(CONFIGS, "--describe", "--entity-type", "client-metrics").stdout
    tools.run(CONFIGS, "--alter", *entity, "--delete-config", "metrics,interval.ms")
    assert topic not in tools.run(CLIENT_METRICS, "--list").lines


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("interval.ms=99", "InvalidRequestException"),
        ("interval.ms=soon", "InvalidConfigurationException"),
        ("colour=blue", "InvalidRequestException"),
        ("match=[client_id=(]", "InvalidConfigurationException"),
        ("match=[shoe_size=44]", "InvalidConfigurationException"),
    ],
)
def test_bad_subscriptions_are_refused(tools: KafkaTools, change: str, error: str) -> None:
    entity = ("--entity-type", "client-metrics", "--entity-name", "bad")
    refused = tools.attempt(CONFIGS, "--alter", *entity, "--add-config", change)
    assert refused.status != 0
    assert error in refused.stdout + refused.stderr


# --- pushes -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def endpoint() -> Iterator[OtlpEndpoint]:
    with OtlpEndpoint() as running:
        yield running


@pytest.fixture(scope="module")
def telling(jars: KafkaJars, endpoint: OtlpEndpoint) -> Iterator[KafkaTools]:
    """Kafka's tools, and a broker with a receiver that asks them for all their metrics."""
    settings = {"telemetry.receiver": endpoint.url, "group.initial.rebalance.delay.ms": "0"}
    with MillraceServer(settings) as server:
        tools = KafkaTools(jars, server)
        tools.run(CLIENT_METRICS, "--alter", "--generate-name", "--metrics", "*", "--interval", "500")
        yield tools


def of(requests: list[Request], client_id: str) -> list[Request]:
    return [each for each in requests if ("client_id", client_id) in resources(each.body)[0]]


def names(requests: list[Request]) -> set[str]:
    return {name for each in requests for name in metric_names(each.body)}


def test_a_producer_pushes_at_least_when_it_ends(telling: KafkaTools, endpoint: OtlpEndpoint, topic: str) -> None:
    telling.create_topic(topic)
    telling.produce(topic, ["a", "b"], "--command-property", "client.id=java-producing")
    wanted = "org.apache.kafka.producer.connection.creation.total"
    got = of(endpoint.wait_for(lambda requests: wanted in names(of(requests, "java-producing"))), "java-producing")
    attributes = dict(resources(got[0].body)[0])
    assert attributes["client_software_name"] == "apache-kafka-java"
    assert attributes["client_software_version"].startswith("4.")


def test_a_consumer_pushes_while_it_runs(telling: KafkaTools, endpoint: OtlpEndpoint, topic: str, group: str) -> None:
    telling.create_topic(topic)
    telling.produce(topic, ["a", "b"])
    wanted = "org.apache.kafka.consumer.fetch.manager.records.consumed.total"

    def from_group(requests: list[Request]) -> list[Request]:
        return [each for each in requests if ("group_id", group) in resources(each.body)[0]]

    with telling.start(
        VERIFIABLE_CONSUMER, "--topic", topic, "--group-id", group, "--reset-policy", "earliest"
    ) as tool:
        tool.wait_for(lambda event: event["name"] == "records_consumed")
        endpoint.wait_for(lambda requests: len(from_group(requests)) >= 3)
        endpoint.wait_for(lambda requests: wanted in names(from_group(requests)))


def test_who_does_not_want_to_push_does_not(telling: KafkaTools, endpoint: OtlpEndpoint, topic: str) -> None:
    telling.create_topic(topic)
    silent = ("--command-property", "client.id=java-silent", "--command-property", "enable.metrics.push=false")
    telling.produce(topic, ["a"], *silent)
    telling.produce(topic, ["a"], "--command-property", "client.id=java-later")
    endpoint.wait_for(lambda requests: bool(of(requests, "java-later")))
    assert of(endpoint.requests, "java-silent") == []
