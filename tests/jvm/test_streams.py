"""Kafka Streams with exactly_once_v2: a word count on three brokers is exact after kill -9 of it and of a broker."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from support.kafka_jars import KafkaJars
from support.kafka_tools import LiveTool
from support.roles import Roles
from support.servers import Cluster, KafkaCluster, MillraceCluster, Server

PROGRAM = Path(__file__).with_name("WordCount.java")
PARTITIONS = 2
WORDS = [f"word-{number}" for number in range(40)]
LINES = 600
WORDS_IN_LINE = 5
DEADLINE_S = 100
SETTINGS = {
    "group.initial.rebalance.delay.ms": "0",
    "offsets.topic.num.partitions": "3",
    "transaction.state.log.num.partitions": "3",
    "min.insync.replicas": "2",
}


@pytest.fixture
def cluster(target: str, jars: KafkaJars) -> Iterator[Cluster]:
    chosen: Cluster = (
        KafkaCluster(jars, 3, SETTINGS, heap="512M") if target == "kafka" else MillraceCluster(3, SETTINGS)
    )
    with chosen as running:
        yield running


class Input:
    """Lines of random words, and how often each word is in them."""

    def __init__(self, bootstrap: str) -> None:
        self.counts: Counter[str] = Counter()
        self._random = random.Random(17)
        self._producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "log_level": 2})

    def write(self, lines: int) -> None:
        for number in range(lines):
            words = self._random.choices(WORDS, k=WORDS_IN_LINE)
            self.counts.update(words)
            self._producer.produce("lines", " ".join(words), partition=number % PARTITIONS)
        assert self._producer.flush(30) == 0


class Output:
    """Every committed record of the output: each word with its counts, in their order."""

    def __init__(self, bootstrap: str) -> None:
        settings = {"bootstrap.servers": bootstrap, "group.id": "unused", "isolation.level": "read_committed"}
        self._consumer = Consumer({**settings, "enable.auto.commit": False, "log_level": 2})
        self._consumer.assign([TopicPartition("counts", index, 0) for index in range(PARTITIONS)])
        self.counts: defaultdict[str, list[int]] = defaultdict(list)
        self.seen = 0

    def read(self, total: int) -> None:
        """Until so many records have come in all."""
        deadline = time.monotonic() + DEADLINE_S
        while self.seen < total:
            assert time.monotonic() < deadline, f"{self.seen} of {total} counts"
            for message in self._consumer.consume(500, 0.2):
                if message.error() is None:
                    self.counts[(message.key() or b"").decode()].append(int(message.value() or b""))
                    self.seen += 1

    def close(self) -> None:
        self._consumer.close()


def word_count(jars: KafkaJars, bootstrap: str, state: Path, *, replicas: int, protocol: str = "classic") -> LiveTool:
    arguments = (bootstrap, "word-count", "lines", "counts", str(state), str(replicas), protocol)
    return LiveTool(jars.command(str(PROGRAM), *arguments))


def test_counts_are_exact_after_kills_of_the_application_and_of_a_broker(
    cluster: Cluster, jars: KafkaJars, tmp_path: Path
) -> None:
    with Roles(cluster.bootstrap) as roles:
        for topic in ("lines", "counts"):
            roles.create_topic(topic, PARTITIONS)
        lines, counts = Input(cluster.bootstrap), Output(cluster.bootstrap)
        try:
            lines.write(LINES)
            with word_count(jars, cluster.bootstrap, tmp_path, replicas=3) as application:
                counts.read(200)
                lines.write(LINES)
                application.kill()
            with word_count(jars, cluster.bootstrap, tmp_path, replicas=3):
                counts.read(LINES * WORDS_IN_LINE + 200)
                lines.write(LINES)
                cluster.kill(roles.leader("counts", 0))
                counts.read(3 * LINES * WORDS_IN_LINE)
        finally:
            counts.close()
    assert dict(counts.counts) == {word: list(range(1, count + 1)) for word, count in lines.counts.items()}


def test_the_protocol_of_kip_1071_is_refused(target: str, server: Server, jars: KafkaJars, tmp_path: Path) -> None:
    """Streams groups are not served, and say so at once; Apache Kafka has them."""
    if target == "kafka":
        pytest.skip("Apache Kafka serves group.protocol=streams")
    with Roles(server.bootstrap) as roles:
        for topic in ("lines", "counts"):
            roles.create_topic(topic, PARTITIONS, replication_factor=1)
    with word_count(jars, server.bootstrap, tmp_path, replicas=1, protocol="streams") as application:
        refused = application.wait_for(lambda event: event["name"] == "error", DEADLINE_S)
        application.wait_for(lambda event: event["what"] == "ERROR", DEADLINE_S)
    assert "does not support the STREAMS group protocol" in refused["what"] or "Unsupported" in refused["what"], refused
