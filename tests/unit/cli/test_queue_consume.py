"""What the exit code of a command means, and what the command is told."""

from __future__ import annotations

import signal

import pytest

from millrace.cli.queue_consume import environment, verdict_of
from millrace.client.queue import QueueRecord, Verdict
from millrace.model import TopicPartition
from millrace.records.decode import Header, Record


@pytest.mark.parametrize(
    ("exit_code", "verdict"),
    [
        (0, Verdict.ACCEPT),
        (65, Verdict.REJECT),
        (1, Verdict.RELEASE),
        (127, Verdict.RELEASE),
        (-signal.SIGKILL, Verdict.RELEASE),
    ],
)
def test_exit_codes(exit_code: int, verdict: Verdict) -> None:
    assert verdict_of(exit_code) is verdict


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
