"""One broker for the whole run, and Apache Kafka's own tools to drive it.

Every test runs against each target named in MILLRACE_JVM_TARGETS: `millrace` (the default) or `kafka`, where the
original shows that the test itself is right (`MILLRACE_JVM_TARGETS=kafka,millrace make test-jvm`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

from support.kafka_jars import KafkaJars, KafkaUnavailable, kafka_jars
from support.kafka_tools import KafkaTools
from support.servers import KafkaServer, MillraceServer, Server

TARGETS = os.environ.get("MILLRACE_JVM_TARGETS", "millrace").split(",")
SETTINGS = {
    "group.initial.rebalance.delay.ms": "0",  # Kafka's default of 3 s would be most of this suite's time
    "group.share.min.record.lock.duration.ms": "1000",  # its default of 15 s is too long to be waited for
    "log.initial.task.delay.ms": "500",
    "log.retention.check.interval.ms": "500",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.jvm)
        item.add_marker(pytest.mark.timeout(180))


@pytest.fixture(scope="session")
def jars() -> KafkaJars:
    try:
        return kafka_jars()
    except KafkaUnavailable as unavailable:
        pytest.skip(str(unavailable))


def start_server(target: str, jars: KafkaJars) -> Server:
    if target == "kafka":
        return KafkaServer(jars, SETTINGS, heap="512m")
    return MillraceServer(SETTINGS)


@pytest.fixture(scope="session", params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def server(target: str, jars: KafkaJars) -> Iterator[Server]:
    with start_server(target, jars) as running:
        yield running


@pytest.fixture(scope="session")
def tools(jars: KafkaJars, server: Server) -> KafkaTools:
    return KafkaTools(jars, server)


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic name of the test's own; nothing is created."""
    return re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")


@pytest.fixture
def group(topic: str) -> str:
    return f"{topic}-group"
