"""Following files: complete lines only, over rotation and truncation, and positions that survive a restart."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from millrace.cli.follow import (
    LONGEST_LINE_BYTES,
    OLD_FILE_GRACE_S,
    PATTERN_EVERY_S,
    Follower,
    load_positions,
    save_positions,
)
from millrace.clock import ManualClock
from millrace.errors import ConfigError
from millrace.testing import Cluster


class Following:
    """A follower with a clock of its own and the files it reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "app.log"
        self.state = folder / "state.json"
        self.clock = ManualClock()
        self.follower: Follower | None = None

    def start(self, *names: str, from_beginning: bool = True) -> None:
        self.follower = Follower(
            names or [str(self.log)],
            from_beginning=from_beginning,
            positions=load_positions(self.state),
            clock=self.clock,
        )

    def write(self, text: str, path: Path | None = None) -> None:
        with (path or self.log).open("a", newline="") as file:
            file.write(text)

    def read(self) -> list[str]:
        assert self.follower is not None
        return [line.text.decode() for line in self.follower.lines()]

    def stop(self, *, save: bool = True) -> None:
        if self.follower is not None:
            if save:
                save_positions(self.state, self.follower.positions())
            self.follower.close()
            self.follower = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)


@pytest.fixture
def following(tmp_path: Path) -> Iterator[Following]:
    one = Following(tmp_path)
    yield one
    one.stop(save=False)


def test_a_line_is_handed_out_once_its_newline_is_there(following: Following) -> None:
    following.write("a\nb\r\npar")
    following.start()
    assert following.read() == ["a", "b"]
    assert following.read() == []
    following.write("tial\n\nnext")
    assert following.read() == ["partial", ""]


def test_from_the_end_only_new_lines_count_but_a_file_that_appears_later_is_all_new(following: Following) -> None:
    following.write("old\n")
    later = following.folder / "later.log"
    following.start(str(following.log), str(later), from_beginning=False)
    assert following.read() == []
    following.write("new\n")
    following.write("first\n", later)
    assert sorted(following.read()) == ["first", "new"]


def test_a_renamed_file_is_read_to_its_end_before_the_new_one(following: Following) -> None:
    following.write("one\n")
    following.start()
    assert following.read() == ["one"]
    moved = following.log.rename(following.folder / "app.log.1")
    following.write("two\n", moved)
    assert following.read() == ["two"]  # no new file yet
    following.write("four\n")
    following.write("three\nunfinished", moved)  # the writer has not noticed yet
    assert following.read() == ["three"]
    following.write("!", moved)
    following.wait(OLD_FILE_GRACE_S)
    assert following.read() == ["unfinished!", "four"]
    following.write("five\n")
    assert following.read() == ["five"]


def test_a_truncated_file_is_read_from_its_start(following: Following) -> None:
    following.write("one\ntwo\nthr")
    following.start()
    assert following.read() == ["one", "two"]
    shutil.copy(following.log, following.folder / "app.log.1")
    os.truncate(following.log, 0)
    following.write("a\n")
    assert following.read() == ["thr", "a"]


def test_a_file_truncated_and_grown_beyond_its_old_length_is_noticed_by_its_first_bytes(following: Following) -> None:
    following.write("one\n")
    following.start()
    assert following.read() == ["one"]
    os.truncate(following.log, 0)
    following.write("another\nlonger\n")
    assert following.read() == ["another", "longer"]


def test_a_line_without_end_is_cut(following: Following) -> None:
    following.start()
    following.write("x" * (LONGEST_LINE_BYTES + 1))
    pieces = following.read()
    following.write("y\n")
    pieces += following.read()
    assert "".join(pieces) == "x" * (LONGEST_LINE_BYTES + 1) + "y"


def test_a_pattern_also_finds_files_that_appear_later(following: Following) -> None:
    following.write("old\n")
    following.start(str(following.folder / "*.log"), from_beginning=False)
    assert following.read() == []
    following.write("x\n", following.folder / "new.log")
    following.write("y\n", following.folder / "new.txt")
    following.wait(PATTERN_EVERY_S)
    assert following.read() == ["x"]


def test_a_folder_is_refused_with_a_hint(following: Following) -> None:
    with pytest.raises(ConfigError, match=r"is a folder; follow the files in it with a pattern"):
        following.start(str(following.folder))


# Positions


def test_a_restart_goes_on_after_the_last_line(following: Following) -> None:
    following.write("one\ntwo\nthr")
    following.start()
    assert following.read() == ["one", "two"]
    following.stop()
    following.write("ee\nfour\n")
    following.start(from_beginning=False)
    assert following.read() == ["three", "four"]


def test_a_restart_reads_the_rest_of_a_file_that_was_moved_meanwhile(following: Following) -> None:
    following.write("one\ntwo\n")
    following.start()
    assert following.follower is not None
    assert next(following.follower.lines()).text == b"one"  # the second line is never asked for
    following.stop()
    following.log.rename(following.folder / "app.log.1")
    following.write("three\n")
    following.start()
    assert following.read() == ["two"]
    following.wait(OLD_FILE_GRACE_S)
    assert following.read() == ["three"]


def test_a_restart_reads_another_file_of_the_same_name_from_its_start(following: Following) -> None:
    following.write("one\n")
    following.start()
    assert following.read() == ["one"]
    following.stop()
    following.log.write_text("completely different\n")  # the same inode
    following.start(from_beginning=False)
    assert following.read() == ["completely different"]


def test_positions_of_files_that_are_not_followed_now_are_kept(following: Following) -> None:
    other = following.folder / "other.log"
    following.write("a\n")
    following.write("b\n", other)
    following.start(str(following.log), str(other))
    assert following.read() == ["a", "b"]
    following.restart()
    following.restart()
    following.stop()
    following.start(str(other))
    assert following.read() == []


def test_a_state_file_that_is_none_is_refused(following: Following) -> None:
    following.state.write_text("[1, 2]")
    with pytest.raises(ConfigError, match="is not a state file of produce --follow"):
        following.start()


# The command


def read_topic(bootstrap: str, topic: str, count: int) -> list[tuple[str, dict[str, str]]]:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "test", "log_level": 0})
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        found = []
        while len(found) < count:
            message = consumer.poll(20)
            assert message is not None, f"only {len(found)} of {count} records came"
            if message.error() is None:
                headers = {name: (value or b"").decode() for name, value in message.headers() or ()}
                found.append(((message.value() or b"").decode(), headers))
        extra = consumer.poll(0.2)
        assert extra is None, "more records than lines"
        return found
    finally:
        consumer.close()


def start_command(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "millrace", "produce", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_state(state: Path, log: Path, process: subprocess.Popen[str]) -> None:
    """Until everything in the file has been acknowledged and noted."""
    pause = threading.Event()
    while process.poll() is None:
        saved = json.loads(state.read_text()) if state.exists() else {}
        if str(log) in saved and saved[str(log)]["offset"] == log.stat().st_size:
            return
        pause.wait(0.02)
    pytest.fail(f"the command ended: {process.stderr.read() if process.stderr else ''}")


def test_the_command_follows_over_a_restart_and_stops_cleanly(tmp_path: Path) -> None:
    log, state = tmp_path / "app.log", tmp_path / "state"
    log.write_text("".join(f"line {number}\n" for number in range(20_000)))
    with Cluster() as cluster:
        cluster.create_topic("logs")
        words = [
            "logs",
            "--follow",
            str(log),
            "--from-beginning",
            "--state",
            str(state),
            "-b",
            cluster.bootstrap_servers,
        ]
        first = start_command(*words)
        try:
            wait_for_state(state, log, first)
        finally:
            first.kill()
            first.communicate()
        with log.open("a") as file:
            file.write("after the crash\n")
        second = start_command(*words)
        wait_for_state(state, log, second)
        second.send_signal(signal.SIGTERM)
        _, told = second.communicate(timeout=30)
        assert second.returncode == 0, told
        assert "1 record delivered to logs" in told
        found = read_topic(cluster.bootstrap_servers, "logs", 20_001)
    assert [value for value, _ in found] == [*(f"line {number}" for number in range(20_000)), "after the crash"]
    assert all(headers["file"] == str(log) and headers["host"] for _, headers in found)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["t", "--follow"], "--follow wants files"),
        (["t", "--follow", "-"], "--follow wants files"),
        (["t", "--follow", "x.log", "--json"], "without --json, --whole, --key-separator and --delimiter"),
        (["t", "x.log", "--state", "s"], "--from-beginning and --state go with --follow"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    from millrace.cli.root import run

    assert run(["produce", *words]) == 2
    assert complaint in capsys.readouterr().err
