"""Source, sink and pipelines over SASL_SSL, with the settings that `millrace up --secure` writes for them."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import SparkSession

from millrace.cli.profiles import CONFIG_VARIABLE
from support.spark_queries import TIMEOUT_S, error_of, numbers
from support.up import ENVIRONMENT, Up

Settings = dict[str, str]


@pytest.fixture(scope="module")
def security(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    up = Up(tmp_path_factory.mktemp("secured"), "--secure")
    try:
        up.ready()
        yield up.data / "security"
        up.stop()
    finally:
        up.close()


@pytest.fixture
def options(security: Path) -> Settings:
    return dict(json.loads((security / "spark.json").read_text()))


@pytest.fixture
def client(security: Path) -> Settings:
    return dict(json.loads((security / "librdkafka.json").read_text()))


def fill(client: Settings, topic: str, count: int) -> None:
    admin = AdminClient(client)
    admin.create_topics([NewTopic(topic, 2)])[topic].result(30)
    producer = Producer(client)
    for number in range(count):
        producer.produce(topic, str(number))
    assert producer.flush(30) == 0


def test_a_batch_is_read_and_written(spark: SparkSession, options: Settings, client: Settings) -> None:
    fill(client, "batch-in", 500)
    read = spark.read.format("millrace").options(**options).option("subscribe", "batch-in").load()
    assert numbers(read) == list(range(500))
    read.select("value").write.format("millrace").options(**options).option("topic", "batch-out").mode("append").save()
    written = spark.read.format("millrace").options(**options).option("subscribe", "batch-out").load()
    assert numbers(written) == list(range(500))


def test_a_stream_writes_exactly_once(spark: SparkSession, options: Settings, client: Settings, tmp_path: Path) -> None:
    fill(client, "stream-in", 500)
    source = spark.readStream.format("millrace").options(**options).option("subscribe", "stream-in")
    query = (
        source.option("startingOffsets", "earliest")
        .load()
        .select("value")
        .writeStream.format("millrace")
        .options(**options)
        .option("topic", "stream-out")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(TIMEOUT_S)
    isolation = {"kafka.isolation.level": "read_committed"}
    written = spark.read.format("millrace").options(**options, **isolation).option("subscribe", "stream-out").load()
    assert numbers(written) == list(range(500))


def test_a_pipeline_runs(security: Path, client: Settings, tmp_path: Path) -> None:
    """As a user runs it: the login is in a profile, not on the command line."""
    fill(client, "readings", 0)
    producer = Producer(client)
    for number in range(100):
        producer.produce("readings", json.dumps({"name": "load", "value": number}))
    assert producer.flush(30) == 0
    environment = {**ENVIRONMENT, CONFIG_VARIABLE: str(tmp_path / "profiles.toml")}

    def command(*words: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "millrace", *words],
            env=environment,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    command("profile", "set", "app", "--from", str(security / "librdkafka.json"))
    options = ("--option", "topic=readings", "--option", "table=sqlite:///metrics.db")
    command("pipeline", "run", "metrics", "--profile", "app", "--once", *options)
    with sqlite3.connect(tmp_path / "metrics.db") as database:
        assert database.execute("select sum(count) from metrics").fetchone()[0] == 100


def test_wrong_passwords_are_told(spark: SparkSession, options: Settings) -> None:
    jaas = "kafka.sasl.jaas.config"
    password = options[jaas].split('password="')[1].split('"')[0]
    wrong = {**options, jaas: options[jaas].replace(password, "wrong")}
    said = error_of(
        lambda: spark.read.format("millrace").options(**wrong).option("subscribe", "batch-in").load().collect()
    )
    assert "Authentication failed" in said
    assert password not in said


def test_without_a_login_nothing_is_told(client: Settings) -> None:
    """The application user may see every topic; somebody who has no login sees none at all."""
    stranger = AdminClient({"bootstrap.servers": client["bootstrap.servers"], "log_level": "0"})
    with pytest.raises(KafkaException):
        stranger.list_topics(timeout=3)
    assert AdminClient(client).list_topics(timeout=30).topics
