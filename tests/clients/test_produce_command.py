"""`millrace produce` where something is refused, waited for, or left out; the rest is in test_command_line.py."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clients.test_command_line import CommandLine
from millrace.testing import Cluster
from support.terminal import Terminal

TIMEOUT_S = 40


@pytest.fixture
def run(capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path, cluster: Cluster) -> CommandLine:
    return CommandLine(cluster.bootstrap_servers, capsysbinary, tmp_path / "stdin")


@pytest.fixture
def run_where_topics_are_compacted(capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> Iterator[CommandLine]:
    with Cluster(settings={"log.cleanup.policy": "compact"}) as cluster:
        yield CommandLine(cluster.bootstrap_servers, capsysbinary, tmp_path / "stdin")


@pytest.fixture
def topic(run: CommandLine, fresh: Callable[[str], str]) -> str:
    name = fresh("cli-produce")
    run.text("topics", "create", name)
    return name


def test_a_record_without_a_key_on_a_compacted_topic(run: CommandLine, fresh: Callable[[str], str]) -> None:
    topic = fresh("cli-compacted")
    run.text("topics", "create", topic, "--config", "cleanup.policy=compact,delete")
    lines = b'{"key":"a","value":"1"}\n{"value":"2"}\n{"key":"c","value":"3"}\n'
    message = run.error("produce", topic, "--json", stdin=lines)
    assert f"stdin:2: the record has no key, and topic '{topic}' is compacted (cleanup.policy=compact)" in message
    assert run.text("consume", topic, "--from-beginning") == "1\n", "what came before it is delivered"


def test_a_topic_that_turns_out_to_be_compacted(run_where_topics_are_compacted: CommandLine) -> None:
    """One that the first record creates: its rules cannot be known before."""
    run = run_where_topics_are_compacted
    _, err = run.raw("produce", "automatic", stdin=b"1\n2\n", exit_code=1)
    assert "not delivered: stdin:1: the record has no key, and topic 'automatic' is compacted" in err
    lines = b'{"key":"a","value":"1"}\n{"value":"2"}\n'
    _, err = run.raw("produce", "another", "--json", "-X", "linger.ms=500", stdin=lines, exit_code=1)
    first, second = [line for line in err.splitlines() if "not delivered" in line]
    assert "stdin:2: the record has no key" in first
    assert "stdin:1: it was in one batch with a record that has no key" in second


def test_a_line_above_the_size_limit(run: CommandLine, fresh: Callable[[str], str]) -> None:
    topic = fresh("cli-small")
    run.text("topics", "create", topic, "--config", "max.message.bytes=1000")
    _, err = run.raw("produce", topic, stdin=b"short\n" + b"x" * 5000 + b"\n", exit_code=1)
    limit = f"topic '{topic}' takes batches of at most 1,000 bytes (millrace topics alter {topic} --set max.message"
    assert f"not delivered: stdin:2: a record of 5,000 bytes; {limit}" in err
    assert run.text("consume", topic, "--from-beginning") == "short\n"


def test_a_line_above_the_limit_of_the_client(run: CommandLine, topic: str) -> None:
    small = ("-X", "message.max.bytes=2000", "-X", "batch.size=2000")
    message = run.error("produce", topic, *small, stdin=b"a\n" + b"x" * 5000)
    assert "stdin:2: a record of 5,000 bytes; the client sends at most 2,000 (-X message.max.bytes=N)" in message


def test_small_records_on_a_topic_with_a_small_limit(run: CommandLine, fresh: Callable[[str], str]) -> None:
    """The batch may not be larger than the topic takes, although every record is small."""
    topic = fresh("cli-small")
    run.text("topics", "create", topic, "--config", "max.message.bytes=1000")
    lines = b"".join(b"%0100d\n" % number for number in range(100))
    run.raw("produce", topic, stdin=lines)
    assert run.raw("consume", topic, "--from-beginning")[0] == lines


def test_a_record_that_only_this_topic_takes(run: CommandLine, fresh: Callable[[str], str]) -> None:
    topic = fresh("cli-large")
    run.text("topics", "create", topic, "--config", "max.message.bytes=4000000")
    run.raw("produce", topic, stdin=b"x" * 3_000_000)
    assert len(run.raw("consume", topic, "--from-beginning", "--max", "1")[0]) == 3_000_001


def test_the_carriage_return_of_a_line_end_is_not_part_of_the_record(run: CommandLine, topic: str) -> None:
    run.raw("produce", topic, "--key-separator", ":", stdin=b"k:one\r\nk:t\rwo\nk:three\r")
    assert run.raw("consume", topic, "--from-beginning", "--delimiter", ";")[0] == b"one;t\rwo;three;"


@pytest.mark.parametrize("delimiter", ["\\n", "\\0", "--"])
def test_with_a_delimiter_every_other_byte_counts(run: CommandLine, topic: str, delimiter: str) -> None:
    end = {"\\n": b"\n", "\\0": b"\0"}.get(delimiter, b"--")
    content = [b"one\r", b"", b"a\tb" if end == b"\n" else b"a\nb", b"last"]
    run.raw("produce", topic, "--delimiter", delimiter, stdin=end.join(content))
    out, _ = run.raw("consume", topic, "--from-beginning", "--delimiter", delimiter)
    assert out.split(end) == [*content, b""]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--key", "k", "--key-separator", ":"], "--key and --key-separator exclude each other"),
        (["--json", "--key-separator", ":"], "--json and --key-separator exclude each other"),
        (["--json", "--null", "NULL"], "--json and --null exclude each other"),
        (["--whole", "--delimiter", "x"], "--whole and --delimiter exclude each other"),
        (["--delimiter", ""], "--delimiter wants at least one character"),
        (["--key-separator", ""], "--key-separator wants at least one character"),
    ],
)
def test_options_of_which_one_would_be_ignored(run: CommandLine, words: list[str], complaint: str) -> None:
    assert complaint in run.error("produce", "any", *words, exit_code=2)


def test_a_person_who_types_is_told_how_to_end(run: CommandLine, topic: str) -> None:
    with Terminal("produce", topic, env={"MILLRACE_BOOTSTRAP": run.bootstrap}) as terminal:
        terminal.wait_for(f"type what goes to {topic}: a line is a record; Ctrl-D ends")
        terminal.type("hello\n\x04")
        assert terminal.wait() == 0
        assert f"1 record delivered to {topic}" in terminal.seen
    assert run.text("consume", topic, "--from-beginning") == "hello\n"
    with Terminal("produce", topic, "--quiet", env={"MILLRACE_BOOTSTRAP": run.bootstrap}) as terminal:
        terminal.type("again\n\x04")
        assert terminal.wait() == 0
        assert "Ctrl-D" not in terminal.seen


def test_a_followed_file_that_is_not_there_is_named(run: CommandLine, topic: str, tmp_path: Path) -> None:
    missing, pattern, there = tmp_path / "missing.log", tmp_path / "app-*.log", tmp_path / "there.log"
    there.touch()
    words = ["produce", topic, "--follow", str(missing), str(pattern), str(there)]
    with run.start(*words) as process:
        assert process.stderr is not None
        assert process.stderr.readline().decode() == f"waiting for {missing}, which is not there yet\n"
        assert process.stderr.readline().decode() == f"waiting for {pattern}, which is not there yet\n"
        missing.write_text("now\n")
        assert run.text("consume", topic, "--from-beginning", "--max", "1") == "now\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert err.decode().startswith("1 record delivered"), "a script is told no more than that"
    with Terminal(*words, env={"MILLRACE_BOOTSTRAP": run.bootstrap}) as terminal:
        terminal.wait_for(f"waiting for {pattern}, which is not there yet")
        terminal.wait_for(f"sending what is written to 2 files to {topic}; Ctrl-C ends")
        terminal.interrupt()
        assert terminal.wait() == 0


def test_nothing_is_said_to_a_pipe(run: CommandLine, topic: str) -> None:
    with run.start("produce", topic) as process:
        out, err = process.communicate(b"one\n", timeout=TIMEOUT_S)
    assert out == b""
    assert [line.partition(" (")[0] for line in err.decode().splitlines()] == [f"1 record delivered to {topic}"]
