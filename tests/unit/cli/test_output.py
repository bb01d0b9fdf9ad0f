"""Tables, JSON and words."""

from __future__ import annotations

import json

import pytest

from millrace.cli.options import name_values
from millrace.cli.output import CommandError, count_text, print_json, print_table, size_text


def test_a_table_in_a_pipe_is_plain_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    long_name = "a-topic-with-a-very-long-name" * 8
    print_table(["topic", "records"], [(long_name, "1,234"), ("b", None)], title="here")
    title, head, first, second = capsys.readouterr().out.splitlines()
    assert title == "here"
    assert head.split() == ["TOPIC", "RECORDS"]
    assert first == f"{long_name}    1,234"
    assert second.split() == ["b", "-"]


def test_json_in_a_pipe_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_json([{"a": 1}, {"b": "é"}])
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == [{"a": 1}, {"b": "é"}]


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_234_567, "1.2 MB"), (5e15, "5000.0 TB")]
)
def test_sizes(size_bytes: float, text: str) -> None:
    assert size_text(size_bytes) == text


def test_counts() -> None:
    assert count_text(1, "record") == "1 record"
    assert count_text(12_000, "record") == "12,000 records"


def test_name_values() -> None:
    assert name_values(["a=1", " b = x=y "], "--set") == {"a": "1", "b": "x=y"}
    assert name_values(None, "--set") == {}
    with pytest.raises(CommandError, match="--set wants name=value, not 'broken'"):
        name_values(["broken"], "--set")
