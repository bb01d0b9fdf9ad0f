"""The reader of pages finds what is wrong with planted ones, and nothing wrong with good ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.page_reader import Reader
from support.pages import line_matches, matches, matches_in_any_order, printed_lines

ROOT = Path(__file__).resolve().parents[2]
FENCE = "```"


class Told(list[str]):
    """What a reader said of a page, and what it found wrong."""

    failures: list[str]


def read(tmp_path: Path, *pages: str, limit_s: float = 30.0) -> Told:
    told = Told()
    reader = Reader(tmp_path / "read", tell=told.append, limit_s=limit_s, stop_limit_s=limit_s)
    for number, text in enumerate(pages, start=1):
        page = tmp_path / f"page-{number}.md"
        page.write_text(text)
        reader.read(page, page.name)
    told.failures = reader.failures
    return told


def console(*lines: str, mark: str = "") -> str:
    return "\n".join(["Some words.", "", mark, f"{FENCE}console", *lines, FENCE, ""])


def program(*lines: str, mark: str = "", language: str = "python") -> str:
    return "\n".join([mark, FENCE + language, *lines, FENCE, ""])


# Good pages


def test_commands_keep_the_folder_and_what_was_exported(tmp_path: Path) -> None:
    page = console("$ mkdir a && cd a", "$ export NAME=ann", "$ echo $NAME in $(basename $PWD)", "ann in a")
    assert read(tmp_path, page + console("$ basename $PWD", "a")).failures == []


def test_pages_share_a_folder_but_not_what_runs(tmp_path: Path) -> None:
    first = console("$ echo one > file", "$ sleep 60 &")
    assert read(tmp_path, first, console("$ cat file", "one")).failures == []


def test_lines_that_continue_a_command(tmp_path: Path) -> None:
    page = console("$ cat <<'END'", "> two", "> lines", "> END", "two", "lines", "$ echo a \\", ">   b", "a b")
    assert read(tmp_path, page).failures == []


def test_a_command_that_ctrl_c_ends(tmp_path: Path) -> None:
    page = console(
        "$ echo 1; exec sleep 60", "1", "^C", "$ trap 'echo bye; exit 0' INT; echo 2; sleep 60", "2", "^C", "bye"
    )
    assert read(tmp_path, page).failures == []


def test_another_terminal(tmp_path: Path) -> None:
    waiting = "until [ -e stop ]; do sleep 0.05; done"
    page = console(f"$ echo ready; {waiting}; touch stopped", "ready", mark="<!-- runs on -->")
    after = console("$ touch stop; until [ -e stopped ]; do sleep 0.05; done; echo done", "done")
    assert read(tmp_path, page + after).failures == []


def test_programs_tests_files_and_what_they_print(tmp_path: Path) -> None:
    page = (
        program("name = 'ann'", mark="<!-- file: names.py -->")
        + program("from names import name", "print(name)", "print(1 / 3)")
        + program("ann", "0.33...", language="text", mark="<!-- prints -->")
        + program("def test_it():", "    assert True")
        + program("echo from a script > out", language="sh")
        + console("$ cat out", "from a script")
    )
    assert read(tmp_path, page).failures == []


def test_a_program_that_goes_on(tmp_path: Path) -> None:
    page = program("import time", "print('there', flush=True)", "time.sleep(60)", mark="<!-- runs on -->")
    assert read(tmp_path, page + program("there", language="", mark="<!-- prints -->")).failures == []


def test_what_cannot_be_run_is_told(tmp_path: Path) -> None:
    told = read(tmp_path, console("$ systemctl start millrace", mark="<!-- not run: systemd -->"))
    assert told == ["skipped  page-1.md:4: systemd"]


def test_a_command_may_be_said_to_fail(tmp_path: Path) -> None:
    page = console("$ true", "$ echo no; exit 3", "no", mark="<!-- exits with 3 -->")
    assert read(tmp_path, page).failures == []


def test_the_examples_are_there(tmp_path: Path) -> None:
    assert read(tmp_path, console("$ ls examples/produce_and_consume.py")).failures == []


# Wrong pages


@pytest.mark.parametrize(
    ("page", "told"),
    [
        (console("$ echo two", "one"), "did not print what the page shows"),
        (console("$ printf 'one\\ntwo\\n'", "one"), "did not print what the page shows"),
        (console("$ true", "one"), "did not print what the page shows"),
        (console("$ echo to stderr >&2", "one"), "did not print what the page shows"),
        (console("$ printf 'b\\na\\n'", "a", "b"), "did not print what the page shows"),
        (console("$ false", "$ true"), "ended with exit code 1"),
        (console("$ no-such-command"), "ended with exit code 127"),
        (console("$ true", mark="<!-- exits with 3 -->"), "ended with exit code 0"),
        (console("$ echo 'Traceback (most recent call last):'"), "printed a traceback"),
        (console("$ sleep 60"), "was still running after 1 s"),
        (console("$ sleep 60", "ready", mark="<!-- runs on -->"), "what the page shows was not printed"),
        (console("$ exit 4 &", "ready"), "what the page shows was not printed before it ended with exit code 4"),
        (console("$ echo 1; sleep 60", "2", "^C"), "what the page shows was not printed"),
        (console("$ (setsid sleep 61 &)"), "left running: sleep 61"),
        (console("$ trap '' INT; echo here; sleep 60", "here", mark="<!-- runs on -->"), "did not end at Ctrl-C"),
        (console("$ trap 'exit 7' INT; echo here; sleep 60 & wait", "here", "^C"), "ended with exit code 7"),
        (program("raise SystemExit(5)"), "ended with exit code 5"),
        (program("def test_it():", "    assert False"), "ended with exit code 1"),
        (program("print(1)") + program("2", language="", mark="<!-- prints -->"), "did not print what the page shows"),
        (console("$ true", mark="<!-- not run -->"), "`not run` wants a reason"),
        (console("true"), "a console block begins with `$ COMMAND`"),
        (program("millrace up", language=""), "commands in a block without a language are not run; call it console"),
        ("So:\n\n    millrace up\n", "an indented command is not run; use a console block"),
    ],
)  # fmt: skip
def test_a_planted_mistake_is_found(tmp_path: Path, page: str, told: str) -> None:
    if "left running" in told:
        # What is left behind is found by the process that adopts it, which must not be pytest's.
        done = read_alone(tmp_path, page)
        assert done.returncode == 1
        assert told in done.stdout
    else:
        (failure,) = read(tmp_path, page, limit_s=1.0 if "60" in page else 30.0).failures
        assert told in failure


def read_alone(tmp_path: Path, page: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "page.md").write_text(page)
    command = [sys.executable, "-m", "support.read_pages", str(tmp_path / "page.md")]
    return subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, check=False, timeout=60)


def test_after_a_mistake_the_page_is_read_on(tmp_path: Path) -> None:
    told = read(tmp_path, console("$ false") + console("$ echo two", "2") + console("$ echo 3", "3"))
    assert len(told.failures) == 2


# Lines


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("ready", "ready"),
        ("TOPIC  RECORDS", "TOPIC     RECORDS"),
        ("took ... ms", "took 2.3 ms"),
        ("... ms", "2.3 ms"),
        ("lag ...", "lag"),
        ("a.b*c", "a.b*c"),
    ],
)
def test_a_line_that_is_the_one_shown(shown: str, printed: str) -> None:
    assert line_matches(shown, printed)


@pytest.mark.parametrize(
    ("shown", "printed"), [("ready", "ready now"), ("a.b", "axb"), ("took ... ms", "took 2.3 s"), ("2 ms", "12 ms")]
)
def test_a_line_that_is_not(shown: str, printed: str) -> None:
    assert not line_matches(shown, printed)


def test_lines_left_out() -> None:
    assert matches(["a", "...", "c"], ["a", "b", "b", "c"])
    assert matches(["a", "..."], ["a"])
    assert not matches(["a", "...", "c"], ["a", "b"])
    assert not matches(["a"], ["a", "b"])


def test_lines_in_any_order() -> None:
    assert matches_in_any_order(["a", "b ..."], ["b 1", "a"])
    assert matches_in_any_order(["a", "..."], ["b", "a"])
    assert not matches_in_any_order(["a", "a"], ["a", "b"])
    assert not matches_in_any_order(["a"], ["a", "b"])


def test_what_is_left_on_a_screen() -> None:
    assert printed_lines("\x1b[1mbold\x1b[0m  \r\n10 %\r20 %\r100 %\n") == ["bold", "100 %"]
