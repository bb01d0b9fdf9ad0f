"""`millrace consume --queue` and `millrace queues` where things go wrong: commands, other groups, dead letters."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clients.test_command_line import ENVIRONMENT, TIMEOUT_S, CommandLine
from millrace.testing import Cluster

LONG_RESTS = (
    "import sys; from millrace.cli import queue_exec, root; "
    "queue_exec._FIRST_REST_S = queue_exec._LONGEST_REST_S = 600.0; sys.exit(root.run(sys.argv[1:]))"
)
"""The command, with rests that outlast the test."""


pytestmark = pytest.mark.parametrize("cluster", [3], ids=["3-brokers"], indirect=True)


@pytest.fixture
def run(cluster: Cluster, capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> CommandLine:
    return CommandLine(cluster.bootstrap_servers, capsysbinary, tmp_path / "stdin")


@pytest.fixture
def topic(run: CommandLine, fresh: Callable[[str], str]) -> str:
    """With three records."""
    name = fresh("cli-jobs")
    run.text("topics", "create", name)
    run.text("produce", name, stdin=b"1\n2\n3\n")
    return name


@pytest.fixture
def queue(fresh: Callable[[str], str]) -> str:
    return fresh("cli-workers")


def delivered(run: CommandLine, topic: str, queue: str, count: int) -> list[str]:
    """What the queue still gives, and with which delivery count."""
    command = 'echo "$(cat) $RECORD_DELIVERY_COUNT"'
    process = run.start("consume", topic, "--queue", queue, "--from-beginning", "--max", str(count), "--exec", command)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    return sorted(out.decode().splitlines())


@contextmanager
def started(run: CommandLine, *words: str, stderr: int = subprocess.PIPE) -> Iterator[subprocess.Popen[bytes]]:
    """A process, which does not outlive the test."""
    env = {**ENVIRONMENT, "MILLRACE_BOOTSTRAP": run.bootstrap}
    with subprocess.Popen([sys.executable, *words], env=env, stdout=subprocess.PIPE, stderr=stderr) as process:
        try:
            yield process
        finally:
            process.kill()


class TestCommandsThatCannotStart:
    @pytest.mark.parametrize("command", ["./no-such-handler", "no-such-handler --fast"])
    def test_not_found_at_the_start(self, run: CommandLine, topic: str, queue: str, command: str) -> None:
        error = run.error("consume", topic, "--queue", queue, "--from-beginning", "--exec", command)
        assert "cannot be started: not found" in error
        assert run.json("queues", "list", queue) == [], "nothing was taken, nobody has joined"

    def test_not_understood(self, run: CommandLine, topic: str, queue: str) -> None:
        error = run.error("consume", topic, "--queue", queue, "--exec", "if true; then", exit_code=2)
        assert "yntax error" in error

    @pytest.mark.parametrize(("mode", "says"), [(None, "exit code 127: not found"), (0o644, "exit code 126")])
    def test_not_found_by_the_shell(
        self, run: CommandLine, topic: str, queue: str, tmp_path: Path, mode: int | None, says: str
    ) -> None:
        """Where it shows only when it is run: the record goes back, the others are not touched."""
        handler = tmp_path / "handler"
        if mode is not None:
            handler.write_text("#!/bin/sh\n")
            handler.chmod(mode)
        words = ("consume", topic, "--queue", queue, "--from-beginning", "--exec", f"({handler})")
        out, err = run.raw(*words, exit_code=1)
        assert out == b""
        assert "0 records accepted, 1 back in the queue\n" in err
        assert f"back in the queue: {topic}-0@0\n" in err
        assert "rejected" not in err
        (line,) = [line for line in err.splitlines() if line.startswith("millrace: error: ")]
        assert f"the command cannot be started ({says}" in line
        assert delivered(run, topic, queue, 3) == ["1 2", "2 1", "3 1"]


class TestCommandsThatFail:
    def test_rests_between_tries_then_gives_up(self, run: CommandLine, topic: str, queue: str, tmp_path: Path) -> None:
        run.text("queues", "alter", queue, "--delivery-limit", "3")
        tries = tmp_path / "tries"
        command = f'[ "$(cat)" != 2 ] || {{ date +%s%N >> {tries}; exit 3; }}'
        words = ("consume", topic, "--queue", queue, "--from-beginning", "--exec", command, "--max", "5")
        _, err = run.raw(*words, exit_code=1)
        first, second, third = (int(line) / 1e9 for line in tries.read_text().splitlines())
        assert (second - first >= 1, third - second >= 2) == (True, True)
        name = f"{topic}-0@1"
        assert f"{name}: exit code 3, delivery 1 of 3; the next try in 1 s\n" in err
        assert f"{name}: exit code 3, delivery 2 of 3; the next try in 2 s\n" in err
        assert "2 records accepted, 1 given up\n" in err
        assert f"given up: {name}\n" in err
        assert f"queue '{queue}' has no dead-letter topic" in err
        assert run.json("queues", "describe", queue)[0]["lag"] == 0

    def test_what_failed_last_is_told(self, run: CommandLine, topic: str, queue: str) -> None:
        """With --max, a command that fails is not tried again here: the record waits for somebody else."""
        words = ("consume", topic, "--queue", queue, "--from-beginning", "--max", "1", "--exec", "exit 1")
        _, err = run.raw(*words, exit_code=1)
        assert err.splitlines() == [
            f"{topic}-0@0: exit code 1, delivery 1 of 5",
            "0 records accepted, 1 back in the queue",
            f"back in the queue: {topic}-0@0",
        ]
        assert delivered(run, topic, queue, 3) == ["1 2", "2 1", "3 1"]

    def test_nobody_gets_it_during_the_rest_and_ctrl_c_ends_that(
        self, run: CommandLine, topic: str, queue: str
    ) -> None:
        words = ("consume", topic, "--queue", queue, "--from-beginning", "--exec", "exit 1")
        with started(run, "-c", LONG_RESTS, *words) as process:
            assert process.stderr is not None
            assert b"the next try in 600 s" in process.stderr.readline()
            others = run.json_lines("consume", topic, "--queue", queue, "--max", "2")
            assert [record["value"] for record in others] == ["2", "3"]
            process.send_signal(signal.SIGINT)
            rest = process.stderr.read().decode()
            assert process.wait(TIMEOUT_S) == 1
        assert rest == f"0 records accepted, 1 back in the queue\nback in the queue: {topic}-0@0\n"
        assert delivered(run, topic, queue, 1) == ["1 2"]

    def test_rejected_records_are_named(self, run: CommandLine, topic: str, queue: str) -> None:
        run.text("produce", topic, stdin=b"4\n5\n6\n7\n")
        words = ("consume", topic, "--queue", queue, "--from-beginning", "--max", "7", "--exec", "exit 65")
        _, err = run.raw(*words, exit_code=1)
        assert "0 records accepted, 7 rejected\n" in err
        assert f"rejected: {', '.join(f'{topic}-0@{offset}' for offset in range(5))} and 2 more\n" in err

    def test_all_accepted(self, run: CommandLine, topic: str, queue: str) -> None:
        words = ("consume", topic, "--queue", queue, "--from-beginning", "--max", "3", "--exec", "cat")
        _, err = run.raw(*words)
        assert err == "3 records accepted\n"


def test_a_finished_queue_begins_where_it_ends(run: CommandLine, topic: str, queue: str) -> None:
    words = ("consume", topic, "--queue", queue, "--from-beginning", "--max", "3", "--exec", "true")
    run.text(*words)
    (partition,) = run.json("queues", "describe", queue)[0]["partitions"]
    assert (partition["start"], partition["end"], partition["lag"]) == (3, 3, 0)
    (partition,) = run.json("groups", "describe", queue)[0]["partitions"]
    assert (partition["start"], partition["end_offset"], partition["lag"]) == (3, 3, 0)


def test_a_new_queue_says_that_it_begins_at_the_end(run: CommandLine, topic: str, queue: str) -> None:
    says = "it is new, and begins at the end; --from-beginning begins at the first record"
    with started(run, "-m", "millrace", "consume", topic, "--queue", queue, "--max", "1") as process:
        assert process.stderr is not None
        remark = process.stderr.readline().decode()
        assert remark == f"waiting for new records of topic '{topic}' in queue '{queue}': {says}\n"
        run.text("produce", topic, stdin=b"4\n")
        out, err = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, out, err) == (0, b"4\n", b"")
    assert run.raw("consume", topic, "--queue", queue, "--timeout", "1") == (b"", ""), "it is not new any more"
    run.text("configs", "set", "share.auto.offset.reset=earliest", "--group", f"{queue}-2")
    assert run.raw("consume", topic, "--queue", f"{queue}-2", "--max", "3")[1] == ""


def test_on_a_terminal_a_queue_says_that_it_waits(run: CommandLine, topic: str, queue: str) -> None:
    run.text("consume", topic, "--queue", queue, "--from-beginning", "--max", "3")
    ours, theirs = pty.openpty()
    with started(run, "-m", "millrace", "consume", topic, "--queue", queue, stderr=theirs) as process:
        os.close(theirs)
        remark = os.read(ours, 1000).decode()
        assert remark.strip() == f"waiting for records of topic '{topic}' in queue '{queue}'; Ctrl-C ends"
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0
    os.close(ours)


def test_groups_of_another_kind(run: CommandLine, topic: str, queue: str, fresh: Callable[[str], str]) -> None:
    group = fresh("cli-group")
    run.text("consume", topic, "--group", group, "--from-beginning", "--no-follow")
    run.text("consume", topic, "--queue", queue, "--from-beginning", "--max", "3")
    error = run.error("consume", topic, "--group", queue)
    assert f"group '{queue}' is a queue: read it with --queue {queue}" in error
    error = run.error("consume", topic, "--queue", group)
    assert f"'{group}' is a consumer group, and no queue: read it with --group" in error
    assert "is a consumer group, and no queue" in run.error("queues", "describe", group)
    assert "is a consumer group, and no queue" in run.error("queues", "alter", group, "--delivery-limit", "3")
    assert "is a consumer group, and no queue" in run.error("queues", "delete", group, "--yes")
    assert run.json("groups", "describe", group)[0]["lag"] == 0, "it is still there"


def test_dead_letters(run: CommandLine, topic: str, queue: str) -> None:
    letters = f"dlq.{topic}"
    wanted = ("queues", "alter", queue, "--dead-letters")
    assert "its name does not begin with dlq." in run.error(*wanted, "letters")
    missing = run.error(*wanted, letters)
    create = f"topics create {letters} --config errors.deadletterqueue.group.enable=true"
    assert f"there is no such topic, and it may not be made; see: millrace {create}" in missing
    run.text("topics", "create", letters)
    refused = run.error(*wanted, letters)
    enable = f"configs set errors.deadletterqueue.group.enable=true --topic {letters}"
    assert refused.endswith(f"see: millrace {enable}")
    run.text(*enable.split())
    assert run.text(*wanted, letters, "--set", "errors.deadletterqueue.copy.record.enable=true") == f"altered {queue}\n"

    words = ("consume", topic, "--queue", queue, "--from-beginning", "--max", "3")
    _, err = run.raw(*words, "--exec", '[ "$(cat)" != 2 ] || exit 65', exit_code=1)
    assert f"what was rejected or given up has a letter in topic '{letters}'\n" in err
    (letter,) = run.json_lines("consume", letters, "--from-beginning", "--max", "1")
    assert letter["value"] == "2"
    assert ["__dlq.errors.message", "rejected by its consumer"] in letter["headers"]

    assert run.text(*wanted, "") == f"altered {queue}\n"
    out, err = run.raw("queues", "alter", queue, "--unset", "share.delivery.count.limit")
    assert (out, err) == (b"", f"share.delivery.count.limit is not set for queue '{queue}'\n")
    near = run.error("queues", "alter", queue, "--set", "share.delivery.count.limits=3")
    assert "did you mean 'share.delivery.count.limit'?" in near


def test_delete(run: CommandLine, topic: str, queue: str, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    words = ("consume", topic, "--queue", queue, "--from-beginning", "--exec", f"echo > {begun}; sleep 60")
    with started(run, "-m", "millrace", *words) as process:
        begun.read_text()
        assert f"queue '{queue}' has running members: stop them first" in run.error("queues", "delete", queue, "--yes")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=TIMEOUT_S)
    assert "say --yes" in run.error("queues", "delete", queue)
    out, err = run.raw("queues", "delete", queue, "nobody", "--yes", exit_code=1)
    assert out.decode() == f"deleted {queue}\n"
    assert "there is no queue 'nobody'" in err
    assert run.json("queues", "list", queue) == []
    assert delivered(run, topic, queue, 3) == ["1 1", "2 1", "3 1"], "it begins anew"
