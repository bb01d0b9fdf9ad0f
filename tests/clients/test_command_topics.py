"""`millrace topics`, and tables of other commands: what is not known, sizes on disk, settings, narrow terminals."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer

from clients.test_command_line import ENVIRONMENT, TIMEOUT_S, CommandLine
from millrace.testing import Cluster

SETTING_COUNT = 20
"""A topic has more settings than this."""


@pytest.fixture
def run(cluster: Cluster, capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> CommandLine:
    return CommandLine(cluster.bootstrap_servers, capsysbinary, tmp_path / "stdin")


@pytest.fixture
def topic(run: CommandLine, fresh: Callable[[str], str]) -> str:
    """With two partitions and a thousand records."""
    name = fresh("cli-sized")
    run.text("topics", "create", name, "--partitions", "2", "--config", "retention.ms=1000000")
    run.text("produce", name, stdin=b"0123456789\n" * 1000)
    return name


@pytest.fixture(scope="module")
def half_a_cluster() -> Iterator[Cluster]:
    """Of two brokers one is gone, and with it one of the partitions of `split`, which have one replica each."""
    with Cluster(brokers=2) as cluster:
        cluster.create_topic("split", 2, replication_factor=1)
        cluster.create_topic("both", 1, replication_factor=2)
        command = [sys.executable, "-m", "millrace", "produce", "split", "-q", "-b", cluster.bootstrap_servers]
        for partition in ("0", "1"):
            subprocess.run([*command, "-p", partition], env=ENVIRONMENT, input=b"1\n2\n3\n", check=True)
        subprocess.run(
            [sys.executable, "-m", "millrace", "consume", "split", "-g", "readers", "--from-beginning", "--max", "6"],
            env={**ENVIRONMENT, "MILLRACE_BOOTSTRAP": cluster.bootstrap_servers},
            check=True,
        )
        cluster.stop_broker(2)
        yield cluster


class TestWhatIsOffline:
    @pytest.fixture
    def run(self, half_a_cluster: Cluster, capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> CommandLine:
        return CommandLine(half_a_cluster.bootstrap_servers, capsysbinary, tmp_path / "stdin")

    def test_is_not_counted_as_nothing(self, run: CommandLine) -> None:
        (listed,) = run.json("topics", "list", "split")
        assert (listed["partitions"], listed["offline"], listed["records"]) == (2, 1, None)
        out, err = run.raw("topics", "list", "split")
        assert out.decode().splitlines()[1].split() == ["split", "2", "1", "3", "+", "?"]
        assert err == "without a leader and not counted: 1 of split; see: millrace cluster describe\n"
        (whole,) = run.json("topics", "list", "both")
        assert (whole["offline"], whole["records"]) == (0, 0)

    def test_has_no_size(self, run: CommandLine) -> None:
        (listed,) = run.json("topics", "list", "split", "--sizes")
        assert listed["bytes"] is None
        assert run.text("topics", "list", "split", "--sizes").splitlines()[1].endswith("B + ?")
        (described,) = run.json("topics", "describe", "split", "--sizes")
        sizes = {log["broker"]: log["bytes"] for part in described["partitions"] for log in part["logs"]}
        assert sizes[1] > 0
        assert sizes[2] is None
        directories = {one["broker"]: one for one in run.json("cluster", "describe")["log_dirs"]}
        assert (directories[2]["bytes"], directories[2]["problem"]) == (None, "not running")
        assert "not running" in run.text("cluster", "describe")

    def test_has_no_lag(self, run: CommandLine) -> None:
        (described,) = run.json("groups", "describe", "readers")
        assert described["lag"] is None
        assert sorted(str(one["end_offset"]) for one in described["partitions"]) == ["3", "None"]
        assert "lag=0 + ?" in run.text("groups", "describe", "readers").splitlines()[0]


def test_sizes_on_disk(run: CommandLine, topic: str, cluster: Cluster) -> None:
    brokers = len(run.bootstrap.split(","))
    on_disk = [
        sum(file.stat().st_size for file in cluster.data_dir_of(broker).rglob(f"{topic}-*/*.log"))
        for broker in range(1, brokers + 1)
    ]
    (listed,) = run.json("topics", "list", topic, "--sizes")
    assert listed["bytes"] == sum(on_disk)
    (described,) = run.json("topics", "describe", topic, "--sizes")
    logs = [(part["partition"], log) for part in described["partitions"] for log in part["logs"]]
    assert [(index, log["broker"]) for index, log in logs] == [
        (index, broker) for index in range(2) for broker in range(1, brokers + 1)
    ]
    assert all(Path(log["directory"]) == cluster.data_dir_of(log["broker"]) for _, log in logs)
    assert sum(log["bytes"] for _, log in logs) == sum(on_disk)
    assert str(cluster.data_dir_of(1)) in run.text("topics", "describe", topic, "--sizes")
    for directory in run.json("cluster", "describe")["log_dirs"]:
        assert directory["bytes"] >= on_disk[directory["broker"] - 1]
        assert directory["free_bytes"] > 0
    assert str(cluster.data_dir_of(1)) in run.text("cluster", "describe")


def test_all_settings_are_a_table_with_their_source(run: CommandLine, topic: str) -> None:
    lines = run.text("topics", "describe", topic, "--all-configs").splitlines()
    assert max(map(len, lines)) < 100
    rows = {line.split()[0]: line.split()[1:] for line in lines[lines.index(f"{topic}  settings") + 2 :]}
    assert len(rows) > SETTING_COUNT
    assert rows["retention.ms"] == ["1000000", "the", "topic"]
    assert rows["segment.bytes"][1:] == ["default"]
    assert rows["flush.mode"] == ["os", "the", "broker's", "file"]
    (described,) = run.json("topics", "describe", topic, "--all-configs")
    assert described["config_sources"]["retention.ms"] == "DYNAMIC_TOPIC_CONFIG"
    assert described["configs"].keys() == described["config_sources"].keys() == rows.keys()


def test_settings_that_do_not_exist_or_are_not_set(run: CommandLine, topic: str) -> None:
    assert "there is no topic setting 'nonsense'; see:" in run.error("topics", "alter", topic, "--unset", "nonsense")
    assert "did you mean 'retention.ms'?" in run.error("topics", "alter", topic, "--unset", "retenton.ms")
    assert "did you mean 'retention.ms'?" in run.error("topics", "alter", topic, "--set", "retenton.ms=1")
    out, err = run.raw("topics", "alter", topic, "--unset", "segment.bytes")
    assert out.decode() == f"unchanged {topic}\n"
    assert err == f"segment.bytes is not set on {topic}: it is 1073741824 already\n"
    same = ("--set", "retention.ms=1", "--unset", "retention.ms")
    assert "the same setting: retention.ms" in run.error("topics", "alter", topic, *same, exit_code=2)
    assert run.json("topics", "alter", topic, "--unset", "retention.ms", "--unset", "segment.bytes") == {
        "topic": topic,
        "result": "altered",
    }
    assert run.json("topics", "describe", topic)[0]["config_sources"].get("retention.ms") is None


@pytest.mark.parametrize("word", ["--config", "--set", "-c"])
def test_settings_have_the_same_words_everywhere(run: CommandLine, fresh: Callable[[str], str], word: str) -> None:
    topic = fresh("cli-words")
    run.text("topics", "create", topic, word, "retention.ms=1000")
    assert run.json("topics", "describe", topic)[0]["configs"]["retention.ms"] == "1000"
    run.text("topics", "alter", topic, word, "retention.ms=2000")
    assert run.json("topics", "describe", topic)[0]["configs"]["retention.ms"] == "2000"


def on_a_terminal(columns: int, bootstrap: str, *argv: str) -> list[str]:
    """The lines that a terminal of this width shows."""
    screen, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {name: value for name, value in ENVIRONMENT.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-m", "millrace", *argv, "-b", bootstrap], env=env, stdin=inside, stdout=inside
    )
    os.close(inside)
    shown = bytearray()
    while True:
        try:
            chunk = os.read(screen, 65536)
        except OSError:  # Linux says EIO when the last one inside has closed
            break
        if not chunk:
            break
        shown += chunk
    os.close(screen)
    assert process.wait(TIMEOUT_S) == 0, shown
    return re.sub(r"\x1b\[\d*m", "", shown.decode()).splitlines()


def test_tables_on_a_narrow_terminal(run: CommandLine, topic: str, fresh: Callable[[str], str]) -> None:
    """Every word that a pipe gets is there in whole, and no line is longer than the terminal is wide."""
    group = fresh("cli-wide-group-of-a-team")
    settings = {"bootstrap.servers": run.bootstrap, "group.id": group, "group.protocol": "consumer"}
    consumer = Consumer({**settings, "enable.auto.commit": False, "client.id": "a-client-with-a-name"})
    consumer.subscribe([topic])
    try:
        while len(consumer.assignment()) < 2 or run.json("groups", "describe", group)[0]["state"] != "stable":
            consumer.poll(0.1)
        for argv in (
            ("cluster", "describe"),
            ("topics", "describe", topic, "--all-configs", "--sizes"),
            ("groups", "describe", group, "--members"),
            ("groups", "list", group),
        ):
            whole = {word for word in run.text(*argv).split() if re.search("[a-zA-Z]", word)}  # numbers may change
            for columns in (80, 120):
                lines = on_a_terminal(columns, run.bootstrap, *argv)
                shown = {word for line in lines for word in line.split()}
                left_out = {"RACK", "INSTANCE", "WAITS", "GIVES", "FOR", "UP"}  # columns without a value
                assert whole - shown <= left_out, (argv, columns, lines)
                assert all(len(line) <= columns or " " not in line.strip() for line in lines), (argv, columns, lines)
    finally:
        consumer.close()
