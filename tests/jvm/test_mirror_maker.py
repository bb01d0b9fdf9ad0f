"""MirrorMaker 2 moves a topic over from Apache Kafka, as docs/coming-from-kafka.md tells it.

The topic comes with its partitions, its settings, every record as it was (key, value, headers, timestamp, offset) and
the offsets of the group that read it there, so that the group goes on where it was.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, OffsetSpec, ResourceType

from support.kafka_jars import TOOL_FLAGS, KafkaJars
from support.maven import ROOT, JarsUnavailable, jars_of
from support.servers import KafkaServer, Server

POM = Path(__file__).parent / "mirror" / "pom.xml"
MAIN = "org.apache.kafka.connect.mirror.MirrorMaker"
PAGE = ROOT / "docs" / "coming-from-kafka.md"
TOPIC = "orders"
GROUP = "billing"
PARTITIONS = 3
RECORDS = 3_000
DEADLINE_S = 80  # for each step; a JVM that starts a dozen clients takes its time on two busy cores
FASTER = {  # what is on the page asks for new topics and offsets every minute or less often
    "refresh.topics.interval.seconds": "1",
    "emit.checkpoints.interval.seconds": "1",
    "sync.group.offsets.interval.seconds": "1",
    "refresh.groups.interval.seconds": "1",
    "offset.storage.partitions": "1",  # 25 otherwise, which a slow machine makes for seconds
    "status.storage.partitions": "1",
}
NEW_TOPIC = {
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
}

Row = tuple[int, bytes | None, bytes | None, list[tuple[str, bytes]], int]


@pytest.fixture(scope="module")
def classpath() -> str:
    try:
        return os.pathsep.join(map(str, jars_of(POM, "mirror")))
    except JarsUnavailable as unavailable:
        pytest.skip(str(unavailable))


@pytest.fixture(scope="module")
def original(jars: KafkaJars) -> Iterator[Server]:
    with KafkaServer(jars, {"group.initial.rebalance.delay.ms": "0"}, heap="384m") as running:
        yield running


def properties_of_the_page() -> str:
    """The file that the page tells its reader to write."""
    found = re.search(r"<!-- file: mirror.properties -->\n+```properties\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


@contextmanager
def mirror_maker(classpath: str, home: Path, source: Server, target: Server) -> Iterator[Callable[[], str]]:
    """MirrorMaker with the page's settings, ended when the block is left; its log can be asked for."""
    java = shutil.which("java")
    assert java is not None
    text = properties_of_the_page().replace("kafka.example.com:9092", source.bootstrap)
    text = text.replace("localhost:9092", target.bootstrap)
    assert source.bootstrap in text and target.bootstrap in text
    settings = home / "mirror.properties"
    settings.write_text(text + "".join(f"{name} = {value}\n" for name, value in FASTER.items()))
    log = home / "mirror.log"
    quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
    with log.open("wb") as output:
        child = subprocess.Popen(
            [java, *TOOL_FLAGS, quiet, "-cp", classpath, MAIN, str(settings)], stdout=output, stderr=output, cwd=home
        )
    try:
        yield lambda: f"MirrorMaker, which has ended with {child.poll()}:\n{log.read_text()[-3000:]}"
    finally:
        child.kill()  # what counts is in the brokers; a clean stop takes longer than the test
        child.wait()


def wait_for(condition: Callable[[], object], story: Callable[[], str]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, story()
        time.sleep(0.2)


def fill(server: Server) -> None:
    admin = AdminClient({"bootstrap.servers": server.bootstrap})
    topic = NewTopic(TOPIC, PARTITIONS, 1, config={"retention.ms": "864000123", "max.message.bytes": "500000"})
    admin.create_topics([topic])[TOPIC].result(20)
    producer = Producer({"bootstrap.servers": server.bootstrap, "compression.type": "lz4"})
    began_ms = int(time.time() * 1000) - RECORDS
    for number in range(RECORDS):
        value = None if number % 7 == 0 else f"order {number}".encode()
        headers: list[tuple[str, str | bytes | None]] = [("number", str(number).encode()), ("empty", b"")]
        key = f"customer-{number % 50}".encode() if number % 5 else None
        producer.produce(TOPIC, value, key, partition=number % PARTITIONS, headers=headers, timestamp=began_ms + number)
    assert producer.flush(20) == 0


def rows(server: Server) -> dict[int, list[Row]]:
    """Every record there is now, by partition."""
    consumer = Consumer({"bootstrap.servers": server.bootstrap, "group.id": "reads-all", "enable.auto.commit": False})
    try:
        ends = {index: consumer.get_watermark_offsets(TopicPartition(TOPIC, index))[1] for index in range(PARTITIONS)}
        consumer.assign([TopicPartition(TOPIC, index, OFFSET_BEGINNING) for index in ends])
        found: dict[int, list[Row]] = {index: [] for index in ends}
        while sum(map(len, found.values())) < sum(ends.values()):
            messages = consumer.consume(500, 20)
            assert messages, f"{ends}, read {[len(each) for each in found.values()]}"
            for message in messages:
                assert message.error() is None
                found[message.partition() or 0].append(row(message))
        return found
    finally:
        consumer.close()


def row(message: Message) -> Row:
    headers: Any = message.headers() or []
    return message.offset() or 0, message.key(), message.value(), headers, message.timestamp()[1]


def read_as_group(server: Server) -> None:
    """All of it, by a member of the group: MirrorMaker passes over groups that never had one."""
    settings = {"group.id": GROUP, "auto.offset.reset": "earliest", "enable.auto.commit": False}
    consumer = Consumer({"bootstrap.servers": server.bootstrap, **settings})
    try:
        consumer.subscribe([TOPIC])
        left = RECORDS
        while left:
            messages = consumer.consume(left, 20)
            assert messages and all(message.error() is None for message in messages)
            left -= len(messages)
        consumer.commit(asynchronous=False)
    finally:
        consumer.close()


def committed(admin: AdminClient) -> dict[int, int]:
    (asked,) = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(GROUP)]).values()
    return {each.partition: each.offset for each in asked.result(20).topic_partitions or [] if each.offset >= 0}


def copied(admin: AdminClient) -> int:
    """How many records of the topic there are; none while there is no topic."""
    if TOPIC not in admin.list_topics(timeout=20).topics:
        return 0
    latest: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    places = {TopicPartition(TOPIC, index): latest for index in range(PARTITIONS)}
    try:
        return sum(asked.result(20).offset for asked in admin.list_offsets(places).values())
    except KafkaException as error:
        if error.args[0].code() not in NEW_TOPIC:
            raise
        return 0  # a topic that is new has no leaders yet


def test_a_topic_moves_over_with_its_records_settings_and_groups(
    classpath: str, original: Server, server: Server, tmp_path: Path
) -> None:
    fill(original)
    admin = AdminClient({"bootstrap.servers": server.bootstrap})
    ends = dict.fromkeys(range(PARTITIONS), RECORDS // PARTITIONS)
    read_as_group(original)
    with mirror_maker(classpath, tmp_path, original, server) as story:
        wait_for(lambda: copied(admin) == RECORDS, story)
        wait_for(lambda: committed(admin) == ends, lambda: f"{committed(admin)} {story()}")
        # What comes while it runs comes over, too.
        producer = Producer({"bootstrap.servers": original.bootstrap})
        producer.produce(TOPIC, b"the last one", b"key", partition=0)
        assert producer.flush(20) == 0
        wait_for(lambda: copied(admin) == RECORDS + 1, story)
    assert rows(server) == rows(original)
    resource = ConfigResource(ResourceType.TOPIC, TOPIC)
    (asked,) = admin.describe_configs([resource]).values()
    configs = {name: entry.value for name, entry in asked.result(20).items()}
    assert (configs["retention.ms"], configs["max.message.bytes"]) == ("864000123", "500000")
