"""`millrace perf` against running brokers: what it counts, what it leaves behind, how it ends."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clients.test_command_line import CommandLine
from millrace.testing import Cluster
from support.terminal import Terminal

TIMEOUT_S = 40
PERCENTILES = ["p50", "p95", "p99", "p99.9", "max"]


@pytest.fixture
def run(capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path, cluster: Cluster) -> CommandLine:
    return CommandLine(cluster.bootstrap_servers, capsysbinary, tmp_path / "stdin")


def in_order(percentiles: dict[str, float]) -> bool:
    return list(percentiles) == PERCENTILES and list(percentiles.values()) == sorted(percentiles.values())


def nothing_is_left(run: CommandLine) -> bool:
    return run.json("topics", "list", "millrace-perf-*") == []


def check(summary: dict[str, Any], test: str, records: int, size: int) -> None:
    assert (summary["test"], summary["records"], summary["bytes"]) == (test, records, records * size)
    assert (summary["failed"], summary["lost"], summary["unsettled"]) == (0, 0, 0)
    assert summary["records_per_s"] == pytest.approx(records / summary["seconds"], rel=0.05)


def test_produce(run: CommandLine) -> None:
    summary = run.json("perf", "produce", "--records", "2000", "--size", "50", "--partitions", "3", "-z", "lz4")
    check(summary, "produce", 2000, 50)
    assert in_order(summary["latency_ms"])
    assert summary["latency_ms"]["p50"] > 0
    assert nothing_is_left(run)


def test_produce_at_a_rate(run: CommandLine) -> None:
    summary = run.json("perf", "produce", "--rate", "200", "--duration", "1.5", "--acks", "1")
    # On a machine that is held up at the end some are late for good, and it says so.
    check(summary, "produce", 300 - summary["unsent"], 100)
    assert summary["unsent"] <= 100
    assert summary["seconds"] >= (summary["records"] - 1) / 200, "faster than the rate"
    assert summary["rate"] == 200


def test_consume(run: CommandLine) -> None:
    summary = run.json("perf", "consume", "--records", "3000", "--size", "50", "--partitions", "2")
    check(summary, "consume", 3000, 50)
    assert in_order(summary["wait_ms"])
    assert summary["first_record_ms"] > 0
    assert nothing_is_left(run)


def test_consume_of_a_topic_that_is_there(run: CommandLine, fresh: Callable[[str], str]) -> None:
    topic = fresh("cli-perf")
    run.text("topics", "create", topic, "--partitions", "3")
    run.raw("produce", topic, stdin=b"12345\n" * 500)
    check(run.json("perf", "consume", "--topic", topic), "consume", 500, 5)
    check(run.json("perf", "consume", "--topic", topic, "--records", "100"), "consume", 100, 5)
    assert [one["topic"] for one in run.json("topics", "list", topic)] == [topic], "it is not its own to remove"


def test_end_to_end(run: CommandLine, fresh: Callable[[str], str]) -> None:
    words = ("perf", "end-to-end", "--records", "200", "--rate", "400", "--size", "64")
    summary = run.json(*words, "--partitions", "2")
    check(summary, "end-to-end", 200, 64)
    assert in_order(summary["latency_ms"])
    assert nothing_is_left(run)
    topic = fresh("cli-perf")
    run.text("topics", "create", topic)
    run.raw("produce", topic, stdin=b"a record of somebody else, which is long enough\n" * 10)
    check(run.json(*words, "--topic", topic), "end-to-end", 200, 64)


def test_text(run: CommandLine) -> None:
    out = run.text("perf", "produce", "--records", "100", "--quiet")
    first, second = out.splitlines()
    assert first.startswith("100 records sent to millrace-perf-")
    assert " records/s, " in first and first.endswith(" MB/s")
    assert second.startswith("from due to acknowledged: p50 ")
    assert all(f" {name} " in second for name in PERCENTILES)


def test_ctrl_c_gives_the_summary_of_what_was_done(run: CommandLine) -> None:
    """A person sees the screen, and ends it; the topic is gone afterwards."""
    words = ("perf", "end-to-end", "--rate", "100", "--duration", "600", "--json")
    with Terminal(*words, env={"MILLRACE_BOOTSTRAP": run.bootstrap}, stdout_piped=True) as terminal:
        terminal.wait_for("Ctrl-C ends with the summary")
        terminal.wait_for("p99.9")
        terminal.interrupt()
        assert terminal.wait() == 130
        assert terminal.process.stdout is not None
        summary = json.loads(terminal.process.stdout.read())
    assert (summary["failed"], summary["lost"]) == (0, 0)
    assert summary["records"] > 0
    assert nothing_is_left(run)


def test_without_a_terminal_there_is_a_line_now_and_then(run: CommandLine) -> None:
    with run.start("perf", "produce", "--rate", "100", "--duration", "600") as process:
        assert process.stderr is not None
        line = process.stderr.readline().decode()
        assert " records, " in line and " records/s, " in line and "p99.9 " in line
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert b" records sent to millrace-perf-" in out
    assert nothing_is_left(run)


def test_failures_are_counted_and_told(run: CommandLine, fresh: Callable[[str], str]) -> None:
    topic = fresh("cli-perf")
    run.text("topics", "create", topic, "--config", "max.message.bytes=1000")
    out, err = run.raw("perf", "produce", "--topic", topic, "--size", "5000", "--records", "3", "--json", exit_code=1)
    assert json.loads(out)["failed"] > 0
    assert "MSG_SIZE_TOO_LARGE" in err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["produce", "--topic", "t", "--partitions", "3"], "--topic and --partitions exclude each other"),
        (["consume", "--topic", "t", "--size", "3"], "--topic and --size exclude each other"),
        (["produce", "--acks", "2"], "--acks is all, 1 or 0"),
        (["end-to-end", "--compression", "rar"], "--compression is none"),
        (["end-to-end", "--size", "8"], "--size"),
    ],
)
def test_wrong_usage(run: CommandLine, words: list[str], complaint: str) -> None:
    assert complaint in run.error("perf", *words, exit_code=2)


def test_a_topic_that_is_not_there(run: CommandLine) -> None:
    assert "there is no topic 'nothing'" in run.error("perf", "produce", "--topic", "nothing")
