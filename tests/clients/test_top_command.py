"""`millrace top` against a running broker: what it counts, with and without a screen, and a cluster that goes away."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from clients.test_command_line import TIMEOUT_S, CommandLine
from millrace.admin import topics
from millrace.client.cluster import ClusterClient
from millrace.client.settings import ClientSettings
from millrace.clock import SystemClock
from millrace.model import TopicPartition
from millrace.records.decode import Record
from millrace.records.encode import encode_batch
from millrace.testing import Cluster
from support.terminal import Terminal

VALUE = b"x" * 100


@pytest.fixture(scope="module")
def broker() -> Iterator[Cluster]:
    with Cluster() as running:
        with ClusterClient(ClientSettings.from_properties({"bootstrap.servers": running.bootstrap_servers})) as client:
            made = topics.create_topics(client, ["orders", "payments"], partitions=2)
            assert set(made.values()) == {None}
            client.commit_offsets("billing", {TopicPartition("orders", 1): 0})
        yield running


@pytest.fixture
def client(broker: Cluster) -> Iterator[ClusterClient]:
    with ClusterClient(ClientSettings.from_properties({"bootstrap.servers": broker.bootstrap_servers})) as opened:
        yield opened


@pytest.fixture
def run(capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path, broker: Cluster) -> CommandLine:
    return CommandLine(broker.bootstrap_servers, capsysbinary, tmp_path / "stdin")


def produce(client: ClusterClient, topic: str, index: int, count: int) -> None:
    now_ms = SystemClock().wall_ms()
    made = [Record(offset, now_ms, None, VALUE) for offset in range(count)]
    client.produce({TopicPartition(topic, index): encode_batch(made)})


def named(rows: list[dict[str, Any]], field: str, name: str) -> dict[str, Any]:
    (found,) = [row for row in rows if row[field] == name]
    return found


def test_every_record_is_counted_in_one_interval(run: CommandLine, client: ClusterClient) -> None:
    process = run.start("top", "--json", "--interval", "0.3")
    assert process.stdout is not None
    try:
        quiet = json.loads(process.stdout.readline())
        assert (quiet["records_per_s"], quiet["bytes_per_s"], quiet["busiest_partitions"]) == (0.0, 0.0, [])
        before = named(quiet["groups"], "group", "billing")["lag"]
        produce(client, "orders", 1, 500)
        records, size, hot = 0.0, 0.0, set()
        while records < 495 or size < 500 * len(VALUE):
            told = json.loads(process.stdout.readline())
            records += told["records_per_s"] * told["seconds"]
            size += told["bytes_per_s"] * told["seconds"]
            hot |= {(each["topic"], each["partition"]) for each in told["busiest_partitions"]}
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, err) == (0, b"")
    assert records == pytest.approx(500, abs=5)  # rates and seconds are rounded
    assert hot == {("orders", 1)}
    topic = named(told["topics"], "topic", "orders")
    assert (topic["partitions"], topic["groups"], topic["lag"]) == (2, 1, before + 500)
    assert named(told["groups"], "group", "billing")["lag"] == before + 500
    assert [each["broker"] for each in told["brokers"]] == [1]
    assert told["unwell_partitions"] == []


def test_tables_without_a_terminal(run: CommandLine) -> None:
    text = run.text("top", "--once", "--interval", "0.1")
    heads = [line.split()[0] for line in text.splitlines() if line.isupper()]
    assert heads == ["TOPIC", "GROUP", "BROKER"]
    assert [line.split()[0] for line in text.splitlines() if line.startswith(("orders ", "payments "))] == [
        "orders",
        "payments",
    ]
    assert "__consumer_offsets" not in text
    assert "__consumer_offsets" in run.text("top", "--once", "--interval", "0.1", "--internal")


def test_only_some_topics(run: CommandLine) -> None:
    told = run.json("top", "--once", "--interval", "0.1", "--topic", "pay*")
    assert [each["topic"] for each in told["topics"]] == ["payments"]
    assert told["groups"] == []
    told = run.json("top", "--once", "--interval", "0.1", "--topic", "pay*", "--topic", "orders", "--sort", "name")
    assert [each["topic"] for each in told["topics"]] == ["orders", "payments"]
    assert [each["group"] for each in told["groups"]] == ["billing"]


def test_wrong_words(run: CommandLine) -> None:
    assert "--sort is rate, bytes, size, lag or name, not 'age'" in run.error("top", "--sort", "age", exit_code=2)
    assert "--interval" in run.error("top", "--interval", "0", exit_code=2)
    run.bootstrap = "127.0.0.1:1"
    assert "no broker answers" in run.error("top", "--once")


@pytest.mark.parametrize("narrow", [False, True])
def test_the_screen(run: CommandLine, client: ClusterClient, *, narrow: bool) -> None:
    size = {"COLUMNS": "44", "LINES": "14"} if narrow else {"COLUMNS": "120", "LINES": "40"}
    env = {"MILLRACE_BOOTSTRAP": run.bootstrap, **size}
    with Terminal("top", "--interval", "0.2", env=env) as terminal:
        terminal.wait_for("RECORDS/S")
        assert not terminal.shows_what_is_typed
        produce(client, "payments", 0, 700)
        terminal.wait_for("payments")
        if not narrow:
            terminal.wait_for("payments-0")
        terminal.type("n")
        terminal.wait_for("sorted by name")
        terminal.type("l")
        terminal.wait_for("sorted by lag")
        if narrow:
            terminal.type("q")
        else:
            terminal.interrupt()
        assert terminal.wait() == 0
        assert terminal.shows_what_is_typed
    # The screen that was there before is back, and so is the cursor.
    assert terminal.seen.rstrip().endswith("\x1b[?1049l")
    assert "\x1b[?25h" in terminal.seen
    assert "Traceback" not in terminal.seen


def lines_until(stream: IO[bytes], text: str) -> None:
    for line in stream:
        if text in line.decode():
            return
    raise AssertionError(f"it ended without {text!r}")


def test_a_cluster_that_goes_away_and_comes_back(broker: Cluster, run: CommandLine) -> None:
    process = run.start("top", "--interval", "0.2")
    env = {"MILLRACE_BOOTSTRAP": run.bootstrap, "COLUMNS": "120", "LINES": "40"}
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        with Terminal("top", "--interval", "0.2", env=env) as terminal:
            lines_until(process.stdout, "records/s")
            terminal.wait_for("sorted by rate")
            broker.stop_broker(1)
            try:
                lines_until(process.stderr, "trying again")
                terminal.wait_for("no answer since")
            finally:
                broker.start_broker(1)
            lines_until(process.stderr, "the cluster answers again")
            lines_until(process.stdout, "records/s")
            terminal.seen = ""
            terminal.wait_for("sorted by rate")
            terminal.type("q")
            assert terminal.wait() == 0
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
