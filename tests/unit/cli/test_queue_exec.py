"""What the exit code of a command means, what the command is told, how long it rests, and the summary."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from millrace.cli.output import CommandError
from millrace.cli.queue_exec import Ending, Tally, check_command, ending_of, environment, exit_text, rest_s, run_command
from millrace.client.queue import QueueRecord
from millrace.model import TopicPartition
from millrace.records.decode import Header, Record


@pytest.mark.parametrize(
    ("exit_code", "ending", "text"),
    [
        (0, Ending.ACCEPTED, "exit code 0"),
        (65, Ending.REJECTED, "exit code 65"),
        (1, Ending.FAILED, "exit code 1"),
        (126, Ending.NOT_STARTED, "exit code 126: not executable"),
        (127, Ending.NOT_STARTED, "exit code 127: not found"),
        (-signal.SIGKILL, Ending.FAILED, "killed by signal 9"),
    ],
)
def test_exit_codes(exit_code: int, ending: Ending, text: str) -> None:
    assert ending_of(exit_code) is ending
    assert exit_text(exit_code) == text


def test_the_environment_of_a_command() -> None:
    headers = (Header("trace-id", b"1"), Header("TRACE_ID", b"2"), Header("none", None), Header("zero", b"a\0b"))
    record = QueueRecord(TopicPartition("t", 3), Record(17, 1000, b"\xff", b"value", headers), 2)
    assert environment(record) == {
        b"RECORD_TOPIC": b"t",
        b"RECORD_PARTITION": b"3",
        b"RECORD_OFFSET": b"17",
        b"RECORD_TIMESTAMP_MS": b"1000",
        b"RECORD_DELIVERY_COUNT": b"2",
        b"RECORD_KEY": b"\xff",
        b"RECORD_HEADER_TRACE_ID": b"1",
    }


@pytest.mark.parametrize(("length", "is_told"), [(131_060, True), (131_061, False), (1_000_000, False)])
def test_what_is_too_long_for_an_environment_is_left_out(length: int, is_told: bool) -> None:
    record = QueueRecord(TopicPartition("t", 0), Record(0, 0, b"k" * length, b"v", ()), 1)
    command = f"cat > /dev/null; [ ${{#RECORD_KEY}} = {length if is_told else 0} ] && [ $RECORD_OFFSET = 0 ]"
    assert run_command(command, b"v", record, tend=lambda: 60.0, is_asked_to_stop=lambda: False) == 0


def test_rests_grow_and_are_bounded() -> None:
    assert [rest_s(failures) for failures in (1, 2, 3, 4, 5, 6, 100, 10_000)] == [1, 2, 4, 8, 16, 30, 30, 30]


@pytest.mark.parametrize(
    "command",
    [
        "true",
        "cat",
        "/bin/sh -c 'exit 1'",
        "if true; then cat; fi",
        "NAME=value no-such-handler",  # only what is certain is refused before a record is taken
        '"$HANDLER" no-such-handler',
        "(./no-such-handler)",
    ],
)
def test_a_command_that_may_start(command: str) -> None:
    check_command(command)


def test_a_command_that_cannot_start(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("#!/bin/sh\n")
    for command, says, exit_code in (
        ("./no-such-handler", "'./no-such-handler' cannot be started: not found", 1),
        ("  no-such-handler --fast", "'no-such-handler' cannot be started: not found", 1),
        (f"{plain} x", "cannot be started: not executable", 1),
        (str(tmp_path), "cannot be started: not found", 1),
        ("if true; then", "yntax error", 2),
        (" ", "--exec needs a command", 2),
    ):
        with pytest.raises(CommandError, match=says) as caught:
            check_command(command)
        assert caught.value.exit_code == exit_code
        assert "\n" not in str(caught.value)


def test_the_summary() -> None:
    tally = Tally()
    assert (tally.all_accepted, tally.lines()) == (True, ["0 records accepted"])
    tally.give_back("t-0@1")
    tally.accept("t-0@1")
    assert (tally.all_accepted, tally.lines()) == (True, ["1 record accepted"])
    for offset in range(7):
        tally.reject(f"t-0@{offset}")
    tally.give_back("t-1@1")
    tally.give_back("t-1@2")
    tally.give_up("t-1@2")
    assert (tally.all_accepted, tally.lost) == (False, 8)
    assert tally.lines() == [
        "1 record accepted, 7 rejected, 1 given up, 1 back in the queue",
        "rejected: t-0@0, t-0@1, t-0@2, t-0@3, t-0@4 and 2 more",
        "given up: t-1@2",
        "back in the queue: t-1@1",
    ]


def test_what_went_back_is_not_remembered_for_ever() -> None:
    tally = Tally()
    for offset in range(10_005):
        tally.give_back(f"t-0@{offset}")
    assert len(tally.back) == 10_000
    assert "t-0@4" not in tally.back
