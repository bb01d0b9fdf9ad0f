"""The `millrace` command against a running broker: every noun, in pipes, with its exit code and its JSON."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest

from millrace.cli.root import run as run_command
from millrace.local.ports import free_ports
from millrace.testing import Cluster
from support.servers import answers

SRC = Path(__file__).resolve().parents[2] / "src"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])}
TIMEOUT_S = 40


class CommandLine:
    """Runs the command in this process, where it is quick, or as a process, where that is what is tested."""

    def __init__(self, bootstrap: str, capture: pytest.CaptureFixture[bytes], stdin_path: Path) -> None:
        self.bootstrap = bootstrap
        self._capture = capture
        self._stdin_path = stdin_path

    def start(self, *argv: str | Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "millrace", *map(str, argv)]
        env = {**ENVIRONMENT, "MILLRACE_BOOTSTRAP": self.bootstrap}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe)

    def raw(self, *argv: str | Path, stdin: bytes = b"", exit_code: int = 0) -> tuple[bytes, str]:
        self._stdin_path.write_bytes(stdin)
        with self._stdin_path.open() as file, pytest.MonkeyPatch.context() as patch:
            patch.setenv("MILLRACE_BOOTSTRAP", self.bootstrap)
            patch.setattr(sys, "stdin", file)
            status = run_command([str(word) for word in argv])
        captured = self._capture.readouterr()
        assert status == exit_code, f"exit {status}: {captured}"
        return captured.out, captured.err.decode()

    def text(self, *argv: str | Path, stdin: bytes = b"") -> str:
        return self.raw(*argv, stdin=stdin)[0].decode()

    def json(self, *argv: str | Path, stdin: bytes = b"") -> Any:
        return json.loads(self.text(*argv, "--json", stdin=stdin))

    def json_lines(self, *argv: str | Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text(*argv, "--json").splitlines()]

    def error(self, *argv: str | Path, stdin: bytes = b"", exit_code: int = 1) -> str:
        _, err = self.raw(*argv, stdin=stdin, exit_code=exit_code)
        (line,) = [line for line in err.splitlines() if line.startswith("millrace: error: ")]
        return line


@pytest.fixture
def command(capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> CommandLine:
    """Without an address: the test gives one, or needs none."""
    return CommandLine("127.0.0.1:1", capsysbinary, tmp_path / "stdin")


@pytest.fixture
def run(command: CommandLine, cluster: Cluster) -> CommandLine:
    """With the address of the shared broker."""
    command.bootstrap = cluster.bootstrap_servers
    return command


def test_topics(run: CommandLine, fresh: Callable[[str], str]) -> None:
    topic = fresh("cli-topic")
    assert (
        run.text("topics", "create", topic, "--partitions", "2", "--config", "retention.ms=1000")
        == f"created {topic}\n"
    )
    assert "TOPIC_ALREADY_EXISTS" in run.error("topics", "create", topic)
    assert run.json("topics", "create", topic, "--if-not-exists") == [{"topic": topic, "result": "exists"}]
    (listed,) = run.json("topics", "list", topic)
    brokers = len(run.bootstrap.split(","))
    assert listed == {"topic": topic, "partitions": 2, "offline": 0, "replication_factor": brokers, "records": 0}
    assert topic in run.text("topics", "list")
    assert "__consumer_offsets" not in run.text("topics", "list")

    run.text(
        "topics", "alter", topic, "--partitions", "3", "--set", "max.message.bytes=2000", "--unset", "retention.ms"
    )
    (described,) = run.json("topics", "describe", topic)
    assert len(described["partitions"]) == 3
    assert described["configs"].get("max.message.bytes") == "2000"
    assert "retention.ms" not in described["configs"]
    (everything,) = run.json("topics", "describe", topic, "--all-configs")
    assert everything["configs"]["retention.ms"] == "604800000"
    assert " max.message.bytes=2000" in run.text("topics", "describe", topic).splitlines()[0]

    assert run.text("topics", "delete", topic, "--yes") == f"deleted {topic}\n"
    assert "there is no topic" in run.error("topics", "describe", topic)
    assert "UNKNOWN_TOPIC" in run.error("topics", "delete", topic, "--yes")
    assert run.json("topics", "delete", topic, "--yes", "--if-exists") == [{"topic": topic, "result": "missing"}]
    assert "TOPIC_EXCEPTION" in run.error("topics", "create", "not/a/name")


def test_lines_in_lines_out(run: CommandLine, fresh: Callable[[str], str]) -> None:
    topic = fresh("cli-lines")
    run.text("topics", "create", topic)
    lines = b"first\nsecond with \xff bytes\n\nlast without an end"
    _, summary = run.raw("produce", topic, stdin=lines)
    assert summary.startswith(f"4 records delivered to {topic}")
    out, _ = run.raw("consume", topic, "--from-beginning")
    assert out == lines + b"\n"
    assert run.text("consume", topic, "--from-offset", "-1") == "last without an end\n"
    assert run.text("consume", topic, "--from-offset", "3") == "last without an end\n"
    assert run.text("consume", topic, "--from-beginning", "--max", "1") == "first\n"
    assert run.raw("consume", topic, "--from-beginning", "--delimiter", "\\0")[0].count(b"\0") == 4


def test_files_keys_headers_and_timestamps(run: CommandLine, fresh: Callable[[str], str], tmp_path: Path) -> None:
    topic = fresh("cli-keys")
    run.text("topics", "create", topic, "--partitions", "2")
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"a=1\nb=NULL\n")
    second.write_bytes(b"c=3\n")
    options = ["--key-separator", "=", "--null", "NULL", "--header", "from=file", "--timestamp", "2023-11-14T22:13:20Z"]
    for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
        run.text("produce", topic, first, second, *options, "--partition", "1", "--compression", codec)
    text = run.text(
        "consume", topic, "--from-beginning", "--format", "{partition} {offset} {timestamp_ms} {key} {value} {headers}"
    )
    lines = text.splitlines()
    assert len(lines) == 15
    assert lines[:3] == [
        "1 0 1700000000000 a 1 from=file",
        "1 1 1700000000000 b  from=file",
        "1 2 1700000000000 c 3 from=file",
    ]
    shown = run.text(
        "consume", topic, "--from-beginning", "--keys", "--headers", "--timestamps", "--offsets", "--max", "1"
    )
    assert shown == "2023-11-14T22:13:20.000Z\t1\t0\tfrom=file\ta\t1\n"
    assert run.text("consume", topic, "--partition", "0", "--from-beginning") == ""
    assert "has no partition 7" in run.error("consume", topic, "--partition", "7", "--from-beginning")


def test_json_goes_around_unchanged(run: CommandLine, fresh: Callable[[str], str]) -> None:
    source, copy = fresh("cli-source"), fresh("cli-copy")
    run.text("topics", "create", source, copy, "--partitions", "2")
    records = [
        {"key": "k", "value": "v", "headers": {"h": "1"}, "timestamp": 1_700_000_000_000, "partition": 1},
        {"key": None, "value": {"base64": "/wA="}, "partition": 0},
        {"key": "k", "value": None, "partition": 1},
        {"value": {"nested": [1, 2]}, "partition": 0},
    ]
    summary = run.json("produce", source, stdin=b"".join(json.dumps(one).encode() + b"\n" for one in records))
    assert (summary["delivered"], summary["failed"]) == (4, 0)
    lines, _ = run.raw("consume", source, "--from-beginning", "--json")
    run.raw("produce", copy, "--json", stdin=lines)

    def content(topic: str) -> list[dict[str, Any]]:
        found = run.json_lines("consume", topic, "--from-beginning")
        return sorted(({**one, "topic": ""} for one in found), key=lambda one: (one["partition"], one["offset"]))

    assert content(copy) == content(source)
    assert content(source)[1]["value"] == '{"nested":[1,2]}'


def test_produce_reports_bad_lines_and_failures(run: CommandLine, fresh: Callable[[str], str]) -> None:
    topic = fresh("cli-bad")
    run.text("topics", "create", topic, "--config", "max.message.bytes=1000")
    assert "stdin:2: not JSON" in run.error("produce", topic, "--json", stdin=b'{"value": "ok"}\nnot json\n')
    assert run.text("consume", topic, "--from-beginning") == "ok\n"
    assert "not delivered" in run.raw("produce", topic, stdin=b"x" * 5000, exit_code=1)[1]
    assert (
        "not delivered" in run.raw("produce", topic, "--partition", "9", "--timeout", "2", stdin=b"x", exit_code=1)[1]
    )


def test_from_a_time(run: CommandLine, fresh: Callable[[str], str]) -> None:
    topic = fresh("cli-times")
    run.text("topics", "create", topic)
    for ago in ("3h ago", "2h ago", "1h ago"):
        run.text("produce", topic, "--timestamp", ago, stdin=ago.encode())
    assert run.text("consume", topic, "--from-time", "150m ago") == "2h ago\n1h ago\n"
    assert run.text("consume", topic, "--from-time", "now") == ""


def test_following_and_ctrl_c(run: CommandLine, fresh: Callable[[str], str]) -> None:
    topic = fresh("cli-follow")
    run.text("topics", "create", topic)
    run.text("produce", topic, stdin=b"before\n")
    with run.start("consume", topic, "--from-beginning", "--follow") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"before\n"
        run.text("produce", topic, stdin=b"after\n")
        assert process.stdout.readline() == b"after\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_ctrl_c_loses_no_line_that_was_read(run: CommandLine, fresh: Callable[[str], str]) -> None:
    topic = fresh("cli-interrupted")
    run.text("topics", "create", topic)
    with run.start("produce", topic, "-X", "linger.ms=30000") as process:
        assert process.stdin is not None
        process.stdin.write(b"one\ntwo\nthree\n")
        process.stdin.flush()
        wait_until_empty(process.stdin)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert b"3 records delivered" in err
    assert run.text("consume", topic, "--from-beginning") == "one\ntwo\nthree\n"


def wait_until_empty(pipe: IO[bytes]) -> None:
    """Until the other side has taken everything out of the pipe."""
    ends_at = time.monotonic() + TIMEOUT_S
    while int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder):
        assert time.monotonic() < ends_at
        time.sleep(0.01)


def test_a_reader_that_goes_away_is_no_error(run: CommandLine, fresh: Callable[[str], str]) -> None:
    topic = fresh("cli-head")
    run.text("topics", "create", topic)
    run.text("produce", topic, stdin=b"0123456789\n" * 20_000)
    with run.start("consume", topic, "--from-beginning") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"0123456789\n"
        process.stdout.close()
        process.wait(TIMEOUT_S)
        assert process.stderr.read() == b""


def test_timeouts(run: CommandLine, fresh: Callable[[str], str]) -> None:
    topic = fresh("cli-timeouts")
    run.text("topics", "create", topic)
    run.text("produce", topic, stdin=b"only\n")
    assert run.text("consume", topic, "--from-beginning", "--timeout", "2") == "only\n"
    out, err = run.raw("consume", topic, "--from-beginning", "--max", "2", "--timeout", "2", exit_code=1)
    assert out == b"only\n"
    assert "1 of 2 records" in err


def test_groups(run: CommandLine, fresh: Callable[[str], str]) -> None:
    topic, group = fresh("cli-grouped"), fresh("cli-group")
    run.text("topics", "create", topic, "--partitions", "2")
    for partition in ("0", "1"):
        run.text("produce", topic, "--partition", partition, stdin=b"1\n2\n3\n")
    read = run.text("consume", topic, "--group", group, "--from-beginning", "--max", "6").splitlines()
    assert sorted(read) == ["1", "1", "2", "2", "3", "3"]
    assert {"group": group, "state": "empty", "type": "classic"} in run.json("groups", "list")
    run.text("produce", topic, "--partition", "0", stdin=b"4\n")
    assert run.text("consume", topic, "--group", group, "--no-follow") == "4\n"
    assert run.text("consume", topic, "--group", group, "--no-follow") == ""

    (described,) = run.json("groups", "describe", group)
    assert (described["state"], described["lag"], described["members"]) == ("empty", 0, [])
    assert [one["committed"] for one in described["partitions"]] == [4, 3]
    assert f"{group}  state=empty" in run.text("groups", "describe", group, "--members")

    plan = run.json("groups", "reset", group, "--topic", f"{topic}:0", "--to-earliest")
    expected = [{"topic": topic, "partition": 0, "from": 4, "to": 0}]
    assert plan == {"group": group, "executed": False, "partitions": expected}
    assert run.json("groups", "describe", group)[0]["lag"] == 0
    assert run.json("groups", "reset", group, "--topic", f"{topic}:0", "--to-earliest", "--execute")["executed"]
    assert run.json("groups", "describe", group)[0]["lag"] == 4
    for option, value in (("--to-offset", "2"), ("--by", "-1"), ("--to-time", "1h ago"), ("--to-latest", None)):
        argv = [option] if value is None else [option, value]
        moved = run.json("groups", "reset", group, "--all-topics", *argv, "--execute")
        assert [one["to"] for one in moved["partitions"]] == {
            "--to-offset": [2, 2],
            "--by": [1, 1],
            "--to-time": [0, 0],
            "--to-latest": [4, 3],
        }[option]

    assert run.text("groups", "delete", group, "--yes") == f"deleted {group}\n"
    assert "there is no group" in run.error("groups", "describe", group)
    assert "GROUP_ID_NOT_FOUND" in run.error("groups", "delete", group, "--yes")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_group_with_members_cannot_be_reset(
    run: CommandLine, fresh: Callable[[str], str], number: signal.Signals
) -> None:
    topic, group = fresh("cli-busy"), fresh("cli-busy-group")
    run.text("topics", "create", topic)
    run.text("produce", topic, stdin=b"1\n")
    with run.start("consume", topic, "--group", group, "--from-beginning") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        (described,) = run.json("groups", "describe", group)
        assert (described["state"], len(described["members"])) == ("stable", 1)
        assert described["members"][0]["partitions"] == [f"{topic}-0"]
        message = run.error("groups", "reset", group, "--topic", topic, "--to-latest", "--execute")
        assert "has 1 running member: stop them first" in message
        process.send_signal(number)
        process.communicate(timeout=TIMEOUT_S)
    (described,) = run.json("groups", "describe", group)
    assert (described["state"], described["members"]) == ("empty", [])  # it has left, it was not timed out
    assert [one["committed"] for one in described["partitions"]] == [1]


def test_a_group_of_the_new_protocol(run: CommandLine, fresh: Callable[[str], str]) -> None:
    topic, group = fresh("cli-modern"), fresh("cli-modern-group")
    run.text("topics", "create", topic, "--partitions", "2")
    run.text("produce", topic, "--partition", "0", stdin=b"1\n2\n")
    consume = ("consume", topic, "--group", group, "--from-beginning", "-X", "group.protocol=consumer")
    with run.start(*consume) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        assert run.json("groups", "list", group) == [{"group": group, "state": "stable", "type": "consumer"}]
        assert group in run.text("groups", "list", "--type", "consumer", "--state", "Stable")
        assert group not in run.text("groups", "list", "--type", "classic", "--type", "share")
        assert group not in run.text("groups", "list", "--state", "empty")
        (described,) = run.json("groups", "describe", group)
        assert (described["type"], described["state"], described["assignor"]) == ("consumer", "stable", "uniform")
        (member,) = described["members"]
        assert described["epoch"] == described["target_epoch"] == member["epoch"] > 0
        assert member["partitions"] == [f"{topic}-0", f"{topic}-1"]
        assert (member["protocol"], member["waits_for"], member["gives_up"]) == ("consumer", [], [])
        assert [one["member"] for one in described["partitions"]] == [member["member"]] * 2
        table = run.text("groups", "describe", group, "--members")
        assert f"{group}  state=stable type=consumer epoch={described['epoch']} assignor=uniform members=1" in table
        assert f"{topic}-0 {topic}-1" in table
        message = run.error("groups", "reset", group, "--topic", topic, "--to-latest", "--execute")
        assert "has 1 running member" in message
        assert "NON_EMPTY_GROUP" in run.error("groups", "delete", group, "--yes")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=TIMEOUT_S)
    moved = run.json("groups", "reset", group, "--topic", f"{topic}:0", "--to-offset", "1", "--execute")
    assert [(one["from"], one["to"]) for one in moved["partitions"]] == [(2, 1)]
    (described,) = run.json("groups", "describe", group)
    assert (described["type"], described["state"], described["lag"]) == ("consumer", "empty", 1)
    assert run.text("groups", "delete", group, "--yes") == f"deleted {group}\n"
    assert "there is no group" in run.error("groups", "describe", group)


def test_a_queue(run: CommandLine, fresh: Callable[[str], str]) -> None:
    topic, group = fresh("cli-queue"), fresh("cli-workers")
    run.text("topics", "create", topic, "--partitions", "2")
    for partition in ("0", "1"):
        run.text("produce", topic, "--partition", partition, "--key", "k", stdin=b"1\n2\n3\n")
    read = run.text("consume", topic, "--queue", group, "--from-beginning", "--max", "6", "--keys").splitlines()
    assert sorted(read) == [f"k\t{number}" for number in (1, 1, 2, 2, 3, 3)]
    run.text("produce", topic, "--partition", "0", stdin=b"4\n")
    (record,) = run.json_lines("consume", topic, "--queue", group, "--max", "1")
    assert (record["partition"], record["offset"], record["value"]) == (0, 3, "4")
    out, err = run.raw("consume", topic, "--queue", group, "--max", "1", "--timeout", "1", exit_code=1)
    assert (out, "0 of 1 records" in err) == (b"", True)

    assert {"queue": group, "state": "empty"} in run.json("queues", "list")
    assert run.json("queues", "list", "no-such-*") == []
    (described,) = run.json("queues", "describe", group)
    assert (described["state"], described["lag"], described["members"]) == ("empty", 0, [])
    assert [(one["partition"], one["end"], one["lag"]) for one in described["partitions"]] == [(0, 4, 0), (1, 3, 0)]
    assert f"{group}  state=empty" in run.text("queues", "describe", group, "--members")

    plan = run.json("queues", "reset", group, "--topic", f"{topic}:0", "--to-earliest")
    assert (plan["queue"], plan["executed"]) == (group, False)
    assert [(one["partition"], one["to"]) for one in plan["partitions"]] == [(0, 0)]
    assert run.json("queues", "describe", group)[0]["lag"] == 0
    for option, value, expected in (
        ("--to-offset", "2", [2, 2]),
        ("--to-time", "1h ago", [0, 0]),
        ("--to-latest", None, [4, 3]),
        ("--to-earliest", None, [0, 0]),
    ):
        words = [option] if value is None else [option, value]
        moved = run.json("queues", "reset", group, "--all-topics", *words, "--execute")
        assert [one["to"] for one in moved["partitions"]] == expected
    assert run.json("queues", "describe", group)[0]["lag"] == 7
    assert len(run.text("consume", topic, "--queue", group, "--max", "7").splitlines()) == 7


def test_what_a_queue_refuses(run: CommandLine, fresh: Callable[[str], str]) -> None:
    topic = fresh("cli-queue")
    run.text("topics", "create", topic)
    assert "there is no queue 'nobody'" in run.error("queues", "describe", "nobody")
    assert "there is no topic" in run.error("consume", f"{topic}-x", "--queue", "workers")
    assert f"did you mean '{topic}'" in run.error("consume", topic.replace("queue", "quee"), "--queue", "workers")
    for words in (["--group", "g"], ["--from-offset", "3"], ["--partition", "0"], ["--no-follow"]):
        assert "--queue" in run.error("consume", topic, "--queue", "workers", *words, exit_code=2)
    assert "--exec needs --queue" in run.error("consume", topic, "--exec", "true", exit_code=2)
    assert "--to-earliest" in run.error("queues", "reset", "workers", "--all-topics", exit_code=2)
    assert "--topic" in run.error("queues", "reset", "workers", "--to-earliest", exit_code=2)


def test_a_command_decides_by_its_exit_code(run: CommandLine, fresh: Callable[[str], str], tmp_path: Path) -> None:
    topic, group, seen = fresh("cli-queue"), fresh("cli-workers"), tmp_path / "seen"
    run.text("topics", "create", topic)
    run.text("produce", topic, "--key", "k", "--header", "trace-id=7", stdin=b"good\nagain\nbad\nfine\n")
    script = tmp_path / "work.sh"
    script.write_text(
        f"""value=$(cat)
        echo "$value $RECORD_TOPIC $RECORD_OFFSET $RECORD_KEY $RECORD_HEADER_TRACE_ID $RECORD_DELIVERY_COUNT" >> {seen}
        case "$value $RECORD_DELIVERY_COUNT" in "again 1") exit 3;; bad*) exit 65;; esac
        """
    )
    options = ("--queue", group, "--from-beginning", "--exec", f"sh {script}")
    assert run.raw("consume", topic, *options, "--max", "5", exit_code=1)[0] == b""  # one was rejected
    handled = sorted(line.split() for line in seen.read_text().splitlines())
    offsets = {"good": "0", "again": "1", "bad": "2", "fine": "3"}
    assert handled == sorted(
        [value, topic, offsets[value], "k", "7", count]
        for value, count in (("good", "1"), ("again", "1"), ("again", "2"), ("bad", "1"), ("fine", "1"))
    )
    assert run.text("consume", topic, "--queue", group, "--timeout", "1") == ""


def test_a_long_command_keeps_its_record(command: CommandLine, tmp_path: Path) -> None:
    lock = {"group.share.record.lock.duration.ms": "1000", "group.share.min.record.lock.duration.ms": "1000"}
    with Cluster(settings=lock) as cluster:
        command.bootstrap = cluster.bootstrap_servers
        cluster.create_topic("jobs")
        command.text("produce", "jobs", stdin=b"long\n")
        options = ("--queue", "workers", "--from-beginning", "--max", "1")
        work = f"sleep 2.5; (cat; echo $RECORD_DELIVERY_COUNT) >> {tmp_path / 'seen'}"
        _, err = command.raw("consume", "jobs", *options, "--exec", work)
        assert err == "1 record accepted\n", "an acknowledgement that comes too late is remarked on"
        assert (tmp_path / "seen").read_text() == "long1\n"
        assert command.json("queues", "describe", "workers")[0]["lag"] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_releases_what_is_not_done(
    run: CommandLine, fresh: Callable[[str], str], tmp_path: Path, number: signal.Signals
) -> None:
    topic, group, started = fresh("cli-queue"), fresh("cli-workers"), tmp_path / "started"
    run.text("topics", "create", topic)
    run.text("produce", topic, stdin=b"long\n")
    os.mkfifo(started)
    command = f"echo $RECORD_DELIVERY_COUNT > {started}; sleep 60"
    with run.start("consume", topic, "--queue", group, "--from-beginning", "--exec", command) as process:
        assert started.read_text() == "1\n"
        (described,) = run.json("queues", "describe", group)
        assert (described["state"], len(described["members"])) == ("stable", 1)
        assert "running members" in run.error("queues", "reset", group, "--all-topics", "--to-latest", "--execute")
        process.send_signal(number)
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out, err) == (0, b"", b"0 records accepted\n")
    assert run.json("queues", "describe", group)[0]["state"] == "empty"
    again = run.json_lines("consume", topic, "--queue", group, "--max", "1")
    assert [record["value"] for record in again] == ["long"]


def test_dump_of_a_live_log(cluster: Cluster, run: CommandLine, fresh: Callable[[str], str]) -> None:
    topic = fresh("cli-dumped")
    run.text("topics", "create", topic)
    run.text("produce", topic, "--compression", "zstd", stdin=b"a" * 500 + b"\nb\nc\n")
    (segment,) = cluster.data_dir.rglob(f"{topic}-0/*.log")
    entries = run.json_lines("log", "dump", segment, "--records")
    assert [one["value"] for one in entries if one["is"] == "record"] == ["a" * 500, "b", "c"]
    assert {one["codec"] for one in entries if one["is"] == "batch"} == {"zstd"}


class TestUp:
    """`millrace up` as a process: its one line, its pid file, its signals."""

    def ready(self, process: subprocess.Popen[bytes]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        assert line.startswith("ready bootstrap="), (line, process.stderr and process.stderr.read())
        assert process.stdout.readline().startswith(b"metrics=http://127.0.0.1:")
        return line.strip().removeprefix("ready bootstrap=")

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_its_life(self, command: CommandLine, tmp_path: Path, number: signal.Signals) -> None:
        (port,) = free_ports("127.0.0.1", 1)
        with command.start("up", "--port", str(port), "--data", tmp_path / "data") as process:
            assert self.ready(process) == f"127.0.0.1:{port}"
            assert answers(port)
            pid_file = tmp_path / "data" / "broker-1" / "pid"
            assert int(pid_file.read_text()) == process.pid
            command.raw("produce", "kept", "--bootstrap", f"127.0.0.1:{port}", stdin=b"one\n")
            process.send_signal(number)
            out, err = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, out, err) == (0, b"", b"")
        assert not pid_file.exists()

        with command.start("up", "--port", "0", "--data", tmp_path / "data") as process:
            address = self.ready(process)
            assert command.text("consume", "kept", "--bootstrap", address, "--from-beginning") == "one\n"
            process.terminate()
            process.communicate(timeout=TIMEOUT_S)

    def test_a_port_that_is_taken(self, command: CommandLine, tmp_path: Path, cluster: Cluster) -> None:
        port = cluster.bootstrap_servers.rpartition(":")[2]
        assert f"port {port} is already in use" in command.error("up", "--port", port, "--data", tmp_path)

    def test_a_directory_that_is_in_use(self, command: CommandLine, tmp_path: Path) -> None:
        with command.start("up", "--port", "0", "--data", tmp_path) as process:
            self.ready(process)
            assert str(tmp_path) in command.error("up", "--port", "0", "--data", tmp_path)
            process.terminate()
            process.communicate(timeout=TIMEOUT_S)

    def test_a_broker_from_a_file(self, command: CommandLine, tmp_path: Path) -> None:
        properties = tmp_path / "server.properties"
        properties.write_text(
            f"node.id=7\nlisteners=PLAINTEXT://127.0.0.1:0\nlog.dirs={tmp_path / 'logs'}\nnum.partitions=3\n"
        )
        with command.start("broker", "--config", properties, "--set", "num.partitions=2") as process:
            address = self.ready(process)
            command.raw("produce", "automatic", "--bootstrap", address, stdin=b"one\n")
            (topic,) = command.json("topics", "list", "--bootstrap", address)
            assert topic["partitions"] == 2
            process.terminate()
            process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0
