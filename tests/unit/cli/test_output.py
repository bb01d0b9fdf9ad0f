"""Tables, JSON and words."""

from __future__ import annotations

import json
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.cli.options import name_values
from millrace.cli.output import CommandError, Sum, count_text, lay_out, print_json, print_table, size_text


def test_a_table_in_a_pipe_is_plain_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    long_name = "a-topic-with-a-very-long-name" * 8
    print_table(["topic", "records"], [(long_name, "1,234"), ("b", None)], title="here")
    title, head, first, second = capsys.readouterr().out.splitlines()
    assert title == "here"
    assert head.split() == ["TOPIC", "RECORDS"]
    assert first == f"{long_name}    1,234"
    assert second.split() == ["b", "-"]


def test_a_table_that_fits_is_the_same_on_a_terminal() -> None:
    rows = [["orders", "6", "-"]]
    assert lay_out(["topic", "partitions", "x"], rows, 80) == lay_out(["topic", "partitions", "x"], rows, None)


def test_columns_that_are_empty_go_first() -> None:
    assert lay_out(["member", "instance", "epoch"], [["a" * 10, "-", "1"], ["b", "-", "-"]], 20) == [
        "MEMBER      EPOCH",
        "aaaaaaaaaa      1",
        "b               -",
    ]


def test_then_cells_are_wrapped_between_words() -> None:
    assert lay_out(["member", "partitions"], [["m-1", "t-0 t-1 t-2 t-3"]], 18) == [
        "MEMBER  PARTITIONS",
        "m-1     t-0 t-1",
        "        t-2 t-3",
    ]


def test_then_each_row_is_a_block() -> None:
    assert lay_out(["member", "partitions", "empty"], [["m" * 12, "t-0 t-1 t-2", "-"], ["n", "-", "-"]], 20) == [
        "MEMBER      mmmmmmmmmmmm",
        "PARTITIONS  t-0 t-1",
        "            t-2",
        "",
        "MEMBER      n",
        "PARTITIONS  -",
    ]


_WORDS = st.text("abc-/", min_size=1, max_size=12)
_CELLS = st.lists(_WORDS, min_size=1, max_size=6).map(" ".join)


@given(
    columns=st.lists(_CELLS, min_size=1, max_size=6),
    rows=st.lists(st.lists(_CELLS, min_size=6, max_size=6), max_size=4),
    width=st.integers(1, 120),
)
def test_no_word_is_ever_broken(columns: list[str], rows: list[list[str]], width: int) -> None:
    rows = [row[: len(columns)] for row in rows]
    lines = lay_out(columns, rows, width)
    shown = {word for line in lines for word in line.split()}
    assert {word for row in rows for cell in row for word in cell.split()} - {"-"} <= shown
    longest = max(len(word) for cell in [*columns, *(cell for row in rows for cell in row)] for word in cell.split())
    label = max(map(len, columns)) + 2
    assert all(len(line) <= max(width, label + longest) for line in lines)


def test_names_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["group"], [("a\x1b[2Jb",)])
    assert capsys.readouterr().out.splitlines()[1] == "a\\x1b[2Jb"


def test_a_terminal_gives_the_width(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((20, 24)))
    print_table(["name", "what"], [("one", "two three four five")], title="a title of more than twenty letters")
    assert capsys.readouterr().out.splitlines() == [
        "\x1b[1ma title of more than\x1b[0m",
        "\x1b[1mtwenty letters\x1b[0m",
        "NAME  WHAT",
        "one   two three four",
        "      five",
    ]


def test_json_in_a_pipe_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_json([{"a": 1}, {"b": "é"}])
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == [{"a": 1}, {"b": "é"}]


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_234_567, "1.2 MB"), (5e15, "5000.0 TB")]
)
def test_sizes(size_bytes: float, text: str) -> None:
    assert size_text(size_bytes) == text


def test_a_sum_of_which_a_part_is_not_known() -> None:
    assert (Sum(1234, complete=True).text("{:,}".format), Sum(1234, complete=True).or_none) == ("1,234", 1234)
    assert (Sum(1234, complete=False).text("{:,}".format), Sum(1234, complete=False).or_none) == ("1,234 + ?", None)


def test_numbers_and_sizes_stand_flush_right() -> None:
    assert lay_out(["n", "size", "word"], [["1,000 + ?", "12 B", "a"], ["-", "1.5 MB", "b"]], None) == [
        "        N    SIZE  WORD",
        "1,000 + ?    12 B  a",
        "        -  1.5 MB  b",
    ]


def test_counts() -> None:
    assert count_text(1, "record") == "1 record"
    assert count_text(12_000, "record") == "12,000 records"


def test_name_values() -> None:
    assert name_values(["a=1", " b = x=y "], "--set") == {"a": "1", "b": "x=y"}
    assert name_values(None, "--set") == {}
    with pytest.raises(CommandError, match="--set wants name=value, not 'broken'"):
        name_values(["broken"], "--set")
