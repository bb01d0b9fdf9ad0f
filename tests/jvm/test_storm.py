"""Apache Storm: a topology on a local cluster copies a topic through Storm's Kafka spout and Kafka bolt."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from support.maven import JarsUnavailable, jars_of
from support.servers import Server

STORM = Path(__file__).parent / "storm"
RECORDS = 10_000
PARTITIONS = 4
DEADLINE_S = 80
FLAGS = (
    "-XX:TieredStopAtLevel=1",  # it lives for half a minute
    "-XX:+UseSerialGC",
    "-Xmx512m",
    "--add-opens=java.base/java.lang=ALL-UNNAMED",  # Storm's serializer looks into both
    "--add-opens=java.base/java.util=ALL-UNNAMED",
)


@pytest.fixture(scope="module")
def classpath(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Storm's jars and the compiled topology."""
    java_compiler = shutil.which("javac")
    if java_compiler is None:
        pytest.skip("no javac on PATH")
    try:
        jars = jars_of(STORM / "pom.xml", "storm")
    except JarsUnavailable as unavailable:
        pytest.skip(str(unavailable))
    classes = tmp_path_factory.mktemp("classes")
    path = os.pathsep.join(map(str, [classes, STORM, *jars]))
    source = str(STORM / "Topology.java")
    subprocess.run([java_compiler, "-Werror", "-cp", path, "-d", str(classes), source], check=True, timeout=60)
    return path


@contextmanager
def running_topology(classpath: str, home: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """The topology as a child, ended when the block is left; its log is in `home`."""
    log = home / "storm.log"
    command = ["java", *FLAGS, f"-Djava.io.tmpdir={home}", "-cp", classpath, "Topology", *arguments]
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, cwd=home)
    try:
        yield child
        assert child.poll() is None, f"Storm ended by itself:\n{log.read_text()[-3000:]}"
    except BaseException:
        print(log.read_text()[-6000:])  # pytest shows it beside the failure
        raise
    finally:
        child.kill()  # what counts is in the broker; a clean stop of a local cluster takes longer than the test
        child.communicate()


def fill(bootstrap: str, topic: str) -> dict[bytes, bytes]:
    """A topic of RECORDS records over PARTITIONS partitions."""
    records = {f"key-{number}".encode(): f"value {number} {'x' * 100}".encode() for number in range(RECORDS)}
    producer = Producer({"bootstrap.servers": bootstrap})
    for number, (key, value) in enumerate(records.items()):
        producer.produce(topic, value, key, partition=number % PARTITIONS)
        producer.poll(0)
    assert producer.flush(30) == 0
    return records


def committed(admin: AdminClient, group: str, topic: str) -> dict[int, int]:
    wanted = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, index) for index in range(PARTITIONS)])
    answer = admin.list_consumer_group_offsets([wanted])[group].result(timeout=30)
    return {each.partition: each.offset for each in answer.topic_partitions}


def read(bootstrap: str, topic: str, deadline: float) -> dict[bytes | None, bytes | None]:
    """RECORDS different records, or what came until the deadline; each must be there once."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "unused", "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, index, OFFSET_BEGINNING) for index in range(PARTITIONS)])
    seen: dict[bytes | None, bytes | None] = {}
    try:
        while len(seen) < RECORDS and time.monotonic() < deadline:
            for message in consumer.consume(1000, timeout=1):
                assert message.error() is None
                assert message.key() not in seen
                seen[message.key()] = message.value()
    finally:
        consumer.close()
    return seen


def test_a_topology_copies_a_topic_and_commits(
    server: Server, classpath: str, topic: str, group: str, tmp_path: Path
) -> None:
    source, copy = f"{topic}-in", f"{topic}-out"
    admin = AdminClient({"bootstrap.servers": server.bootstrap})
    for created in admin.create_topics([NewTopic(source, PARTITIONS, 1), NewTopic(copy, PARTITIONS, 1)]).values():
        created.result(timeout=30)
    records = fill(server.bootstrap, source)
    deadline = time.monotonic() + DEADLINE_S
    with running_topology(classpath, tmp_path, server.bootstrap, source, copy, group):
        copied = read(server.bootstrap, copy, deadline)
        everything = dict.fromkeys(range(PARTITIONS), RECORDS // PARTITIONS)
        offsets = committed(admin, group, source)
        while offsets != everything and time.monotonic() < deadline:
            time.sleep(0.1)
            offsets = committed(admin, group, source)
    assert offsets == everything
    assert copied == records
