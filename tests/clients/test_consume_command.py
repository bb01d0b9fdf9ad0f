"""`millrace consume` of several topics, up to an end, and on a terminal; the rest is in test_command_line.py."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
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
def topic(run: CommandLine, fresh: Callable[[str], str]) -> str:
    """Three hours, two hours and an hour ago in partition 0, nothing in partition 1."""
    name = fresh("cli-consume")
    run.text("topics", "create", name, "--partitions", "2")
    for ago in ("3h ago", "2h ago", "1h ago"):
        run.raw("produce", name, "--timestamp", ago, "--partition", "0", stdin=ago.encode())
    return name


def test_several_topics(run: CommandLine, fresh: Callable[[str], str]) -> None:
    first, second = fresh("cli-several"), fresh("cli-several")
    run.text("topics", "create", first, second)
    for name in (first, second):
        run.raw("produce", name, stdin=f"{name} 1\n{name} 2\n".encode())
    out = run.text("consume", first, second, "--from-beginning")
    assert sorted(out.splitlines()) == sorted([f"{first} 1", f"{first} 2", f"{second} 1", f"{second} 2"])
    out = run.text("consume", first, second, "--from-offset", "-1", "--offsets")
    assert sorted(out.splitlines()) == sorted([f"{first}\t0\t1\t{first} 2", f"{second}\t0\t1\t{second} 2"])
    assert f"there is no topic '{first}-x'" in run.error("consume", second, f"{first}-x", "--from-beginning")
    group = fresh("cli-group")
    out = run.text("consume", first, second, "--group", group, "--from-beginning", "--max", "4")
    assert len(out.splitlines()) == 4


@pytest.mark.parametrize("spelled", ["word", "option"])
def test_a_pattern(run: CommandLine, fresh: Callable[[str], str], spelled: str) -> None:
    prefix = fresh("cli-pattern")
    run.text("topics", "create", f"{prefix}.eu", f"{prefix}.us", f"my-{prefix}")
    for name in (f"{prefix}.eu", f"{prefix}.us", f"my-{prefix}"):
        run.raw("produce", name, stdin=name.encode())
    words = [f"^{prefix}"] if spelled == "word" else ["--pattern", f"^{prefix}"]
    out = run.text("consume", *words, "--from-beginning")
    assert sorted(out.splitlines()) == [f"{prefix}.eu", f"{prefix}.us"]
    assert f"there are no topics like ^{prefix}$" in run.error("consume", f"^{prefix}$", "--from-beginning")


@pytest.mark.parametrize("protocol", ["none", "classic", "consumer"])
def test_topics_that_appear_later_match(run: CommandLine, fresh: Callable[[str], str], protocol: str) -> None:
    prefix, group = fresh("cli-later"), fresh("cli-group")
    run.text("topics", "create", f"{prefix}.one")
    run.raw("produce", f"{prefix}.one", stdin=b"first\n")
    words = [] if protocol == "none" else ["--group", group, "-X", f"group.protocol={protocol}"]
    with run.start("consume", f"^{prefix}", "--from-beginning", "--follow", *words) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"first\n"
        run.text("topics", "create", f"{prefix}.two")
        run.raw("produce", f"{prefix}.two", stdin=b"second\n")
        assert process.stdout.readline() == b"second\n"
        run.text("topics", "alter", f"{prefix}.one", "--partitions", "2")
        run.raw("produce", f"{prefix}.one", "--partition", "1", stdin=b"third\n")
        assert process.stdout.readline() == b"third\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=TIMEOUT_S) == (b"", b"")
    assert process.returncode == 0


def test_a_partition_that_is_added_later_to_a_topic_that_was_named(
    run: CommandLine, fresh: Callable[[str], str]
) -> None:
    topic = fresh("cli-later")
    run.text("topics", "create", topic)
    run.raw("produce", topic, stdin=b"first\n")
    with run.start("consume", topic, "--from-beginning", "--follow") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"first\n"
        run.text("topics", "alter", topic, "--partitions", "2")
        run.raw("produce", topic, "--partition", "1", stdin=b"second\n")
        assert process.stdout.readline() == b"second\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_S)


def test_a_topic_of_a_pattern_that_is_deleted_does_not_end_the_others(
    run: CommandLine, fresh: Callable[[str], str]
) -> None:
    prefix = fresh("cli-gone")
    run.text("topics", "create", f"{prefix}.one", f"{prefix}.two")
    run.raw("produce", f"{prefix}.one", stdin=b"first\n")
    with run.start("consume", f"^{prefix}", "--from-beginning", "--follow") as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"first\n"
        run.text("topics", "delete", f"{prefix}.one", "--yes")
        assert process.stderr.readline().decode() == f"{prefix}.one: deleted while it was read\n"
        run.raw("produce", f"{prefix}.two", stdin=b"second\n")
        assert process.stdout.readline() == b"second\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0


def test_a_topic_that_was_named_and_is_deleted_is_not_waited_for(run: CommandLine, topic: str) -> None:
    with run.start("consume", topic, "--from-beginning", "--follow") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"3h ago\n"
        run.text("topics", "delete", topic, "--yes")
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, err.decode()) == (1, f"millrace: error: {topic}: deleted while it was read\n")


def test_up_to_an_offset_or_a_time(run: CommandLine, topic: str) -> None:
    assert run.text("consume", topic, "--to-offset", "2") == "3h ago\n2h ago\n"
    assert run.text("consume", topic, "--to-offset", "-1") == "3h ago\n2h ago\n"
    assert run.text("consume", topic, "--to-offset", "99") == "3h ago\n2h ago\n1h ago\n"
    assert run.text("consume", topic, "--to-offset", "0") == ""
    assert run.text("consume", topic, "--from-offset", "1", "--to-offset", "2") == "2h ago\n"
    assert run.text("consume", topic, "--from-offset", "2", "--to-offset", "1") == ""
    assert run.text("consume", topic, "--to-time", "90m ago") == "3h ago\n2h ago\n"
    assert run.text("consume", topic, "--from-time", "150m ago", "--to-time", "90m ago") == "2h ago\n"
    assert run.text("consume", topic, "--to-time", "2100-01-01") == "3h ago\n2h ago\n1h ago\n"
    assert run.text("consume", topic, "--to-time", "4h ago") == ""
    assert run.text("consume", topic, "--to-offset", "2", "--max", "5") == "3h ago\n2h ago\n"


def test_an_end_that_is_not_written_yet_is_waited_for_with_follow(run: CommandLine, topic: str) -> None:
    with run.start("consume", topic, "--partition", "0", "--to-offset", "5", "--follow") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"3h ago\n"
        run.raw("produce", topic, "--partition", "0", stdin=b"4\n5\n6\n")
        assert process.stdout.read() == b"2h ago\n1h ago\n4\n5\n"
    assert process.returncode == 0


def test_a_start_that_is_not_written_yet_is_waited_for_with_follow(run: CommandLine, topic: str) -> None:
    with run.start("consume", topic, "--partition", "0", "--from-offset", "4", "--follow", "--max", "1") as process:
        assert process.stdout is not None
        run.raw("produce", topic, "--partition", "0", stdin=b"4th\n5th\n")
        assert process.stdout.read() == b"5th\n"
    assert process.returncode == 0


def test_a_time_that_has_not_come_yet_is_waited_for_with_follow(run: CommandLine, topic: str) -> None:
    """Partition 0 is done by a record of that time, partition 1 by the clock: it has none."""
    ends_at = time.time() + 3
    end_ms = round(ends_at * 1000)
    for text, timestamp_ms in ((b"in time", end_ms - 1), (b"too late", end_ms)):
        run.raw("produce", topic, "--partition", "0", "--timestamp", str(timestamp_ms), stdin=text)
    with run.start("consume", topic, "--from-offset", "3", "--to-time", str(end_ms), "--follow") as process:
        assert process.stdout is not None
        assert process.stdout.read() == b"in time\n"
        assert time.time() >= ends_at
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--json", "--format", "{value}"], "--json and --format exclude each other"),
        (["--json", "--delimiter", ";"], "--json and --delimiter exclude each other"),
        (["--json", "--keys"], "--json and --keys exclude each other"),
        (["--json", "--offsets"], "--json and --offsets exclude each other"),
        (["--format", "{value}", "--timestamps"], "--format and --timestamps exclude each other"),
        (["--from-beginning", "--from-time", "now"], "--from-beginning and --from-time exclude each other"),
        (["--to-offset", "3", "--to-time", "now"], "--to-offset and --to-time exclude each other"),
        (["--group", "g", "--to-offset", "3"], "a group chooses its own partitions and offsets"),
        (["--queue", "q", "--to-time", "now"], "a queue hands out what is next"),
        (["--queue", "q", "--pattern", "^x"], "--queue reads one topic"),
        (["--queue", "q", "--exec", "cat", "--delimiter", ";"], "--exec and --delimiter exclude each other"),
        (["--pattern", "("], "'(' is no pattern"),
    ],
)
def test_options_of_which_one_would_be_ignored(run: CommandLine, words: list[str], complaint: str) -> None:
    assert complaint in run.error("consume", "any", *words, exit_code=2)


def test_without_a_topic(run: CommandLine) -> None:
    assert "which topic?" in run.error("consume", exit_code=2)


def test_a_person_is_told_what_is_waited_for(run: CommandLine, topic: str) -> None:
    env = {"MILLRACE_BOOTSTRAP": run.bootstrap}
    with Terminal("consume", topic, env=env) as terminal:
        terminal.wait_for(f"waiting for new records of {topic}; Ctrl-C ends, --from-beginning prints what is there")
        run.raw("produce", topic, stdin=b"here it is\n")
        terminal.wait_for("here it is")
        terminal.interrupt()
        assert terminal.wait() == 0
    with Terminal("consume", topic, "--group", "g", "--timeout", "30", env=env, stdout_piped=True) as terminal:
        terminal.wait_for(f"waiting for new records of {topic} as a member of group g; Ctrl-C ends, so do 30 s without")
        terminal.interrupt()
        assert terminal.wait() == 0
    with Terminal("consume", "^no-such-topic", "--follow", env=env) as terminal:
        terminal.wait_for("waiting for new records of topics like ^no-such-topic; Ctrl-C ends")
        terminal.interrupt()
        assert terminal.wait() == 0
    with Terminal("consume", topic, "--from-beginning", env=env) as terminal:
        assert terminal.wait() == 0
        assert "waiting" not in terminal.seen
