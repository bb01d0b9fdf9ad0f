"""The help of every command, in narrow and wide terminals: whole words, whole texts, no names of Python's types."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from millrace.cli.help import MAX_WIDTH
from millrace.cli.root import app, run


def walk(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    if hasattr(command, "list_commands"):
        for name in command.list_commands(None):
            yield from walk(command.get_command(None, name), (*words, name))


COMMANDS = dict(walk(get_command(app)))
every_command = pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words) or "millrace")
every_width = pytest.mark.parametrize("width", [80, 120, 200])


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    def show(words: tuple[str, ...], width: int, option: str = "--help") -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        assert run([*words, option]) == 0
        return capsys.readouterr().out

    return show


def test_all_commands_are_walked() -> None:
    assert {(), ("up",), ("topics",), ("topics", "describe"), ("cluster", "reassign")} <= COMMANDS.keys()


@every_width
@every_command
def test_it_is_made_of_whole_words(words: tuple[str, ...], width: int, shown: Any) -> None:
    text = shown(words, width)
    assert text.startswith(f"Usage: {' '.join(('millrace', *words))} [OPTIONS]")
    for line in text.splitlines():
        assert len(line) <= min(width, MAX_WIDTH) or " " not in line.strip(), line
        assert "…" not in line
    assert not re.search(r"<[a-z]", text), "a type of Python"
    assert "[[" not in text, "brackets in brackets"
    assert "...]..." not in text, "dots upon dots"
    assert "......" not in text, "dots upon dots"
    assert not re.search(r"\w \.(\s|$)", text), "something was swallowed before a full stop"
    assert "{TOPIC" not in text


@every_width
@every_command
def test_nothing_of_a_text_is_lost(words: tuple[str, ...], width: int, shown: Any) -> None:
    text = " ".join(shown(words, width).split())
    command = COMMANDS[words]
    for told in (command.help, command.epilog, *(parameter.help for parameter in command.params)):
        assert " ".join((told or "").split()) in text
    for parameter in command.params:
        assert all(name in text for name in (*parameter.secondary_opts, parameter.opts[-1]) if name.startswith("-"))
        assert parameter.help, f"{parameter.name} has no help"


@every_command
def test_the_short_name(words: tuple[str, ...], shown: Any) -> None:
    assert shown(words, 80, "-h") == shown(words, 80)


def test_what_else_is_known_of_an_option(shown: Any) -> None:
    text = shown(("up",), 120)
    assert "Where the first listens, the others follow; 0: free ones. [0 to 65535; default: 9092]" in text
    assert "[env: MILLRACE_BOOTSTRAP; " in shown(("topics", "list"), 120)
    assert "[TOPIC...]" in shown(("topics", "describe"), 120)
    assert "Usage: millrace topics create [OPTIONS] TOPIC...\n" in shown(("topics", "create"), 120)
