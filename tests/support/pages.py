"""What a page of the documentation tells its reader to do, and whether what was printed is what the page shows.

In a `console` block a line `$ COMMAND` is given to a shell (`> ` continues it), and the lines below it are what it
prints on stdout and stderr, where there are any: all of it. `...` stands for anything, within a line or instead of
lines. `^C` is Ctrl-C, pressed when what stands above it was printed. A command that ends with ` &` goes on until the
end of its page. An `sh` block is a script; a `python` block is a program, or a file for pytest where it has tests.

What a page cannot show is said in a comment in front of the block, which its readers do not see:

    <!-- not run: reason -->     it cannot be run here; printed as skipped
    <!-- runs on -->             its last command, or the program, goes on until the end of the page
    <!-- any order -->           the lines that each command prints may come in any order
    <!-- exits with 1 -->        its last command does
    <!-- file: NAME -->          the block is the text of this file
    <!-- prints -->              the block is what the program before it prints

Commands in other places, bare fences and indented lines, would never be run: they are complained of. Pure. Not here:
running them (`page_reader`), and which pages there are (`tests/pages`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_MARK = re.compile(r"<!--\s*(not run|runs on|any order|exits with|file|prints)\b:?\s*(.*?)\s*-->")
_FENCE = re.compile(r"(```+|~~~+)\s*(\w*)")
_STRAY = re.compile(r"(\$ |millrace )\S")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|.*\r(?!\n)")


@dataclass(frozen=True)
class Block:
    """A fenced block and the comments in front of it."""

    page: str
    line: int
    language: str
    lines: list[str]
    marks: dict[str, str]

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass
class Command:
    """A command and what the page shows of its output; `before_interrupt` of these lines stand above `^C`."""

    place: str
    text: str
    shown: list[str] = field(default_factory=list)
    before_interrupt: int | None = None


class Malformed(Exception):
    """A block that cannot be taken at its word."""


def read_page(path: Path, name: str) -> tuple[list[Block], list[str]]:
    """The fenced blocks of a page, in order, and complaints: where commands stand that nobody would run."""
    blocks: list[Block] = []
    complaints: list[str] = []
    marks: dict[str, str] = {}
    opened: tuple[str, Block] | None = None
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if opened is not None:
            fence, block = opened
            if line.strip() == fence:
                blocks.append(block)
                opened = None
            else:
                block.lines.append(line)
        elif found := _FENCE.match(line):
            opened = found[1], Block(name, number, found[2], [], marks)
            marks = {}
        elif found := _MARK.fullmatch(line.strip()):
            marks[found[1]] = found[2]
        elif line.strip():
            marks = {}
            if line.startswith("    ") and _STRAY.match(line.strip()):
                complaints.append(f"{name}:{number}: an indented command is not run; use a console block")
    for block in blocks:
        if block.language == "" and not block.marks and any(map(_STRAY.match, block.lines)):
            complaints.append(f"{block.place}: commands in a block without a language are not run; call it console")
    return blocks, complaints


def commands_of(block: Block) -> list[Command]:
    """The commands of a console block, each with what is shown below it."""
    commands: list[Command] = []
    for number, line in enumerate(block.lines, start=block.line + 1):
        if line.startswith("$ "):
            commands.append(Command(f"{block.page}:{number}", line[2:]))
        elif not commands:
            raise Malformed(f"{block.page}:{number}: a console block begins with `$ COMMAND`")
        elif line.startswith("> ") and not commands[-1].shown:
            commands[-1].text += "\n" + line[2:]
        elif line == "^C":
            commands[-1].before_interrupt = len(commands[-1].shown)
        else:
            commands[-1].shown.append(line)
    return commands


def printed_lines(output: str) -> list[str]:
    """What is left on a screen: without colours, and of a line that was written over the last version."""
    return [_ESCAPES.sub("", line).rstrip() for line in output.replace("\r\n", "\n").rstrip("\n").split("\n")]


def line_matches(shown: str, printed: str) -> bool:
    """Whether a line is the one shown; how wide the columns of a table are does not matter."""
    parts = [re.escape(" ".join(part.split())) for part in shown.split("...")]
    pattern = r"\s?.*?\s?".join(part for part in parts)
    return re.fullmatch(pattern, " ".join(printed.split())) is not None


def matches(shown: Sequence[str], printed: Sequence[str]) -> bool:
    """Whether these lines are the ones shown; a line `...` stands for any number of them."""
    if not shown:
        return not printed
    if shown[0].strip() == "...":
        return any(matches(shown[1:], printed[skipped:]) for skipped in range(len(printed) + 1))
    return bool(printed) and line_matches(shown[0], printed[0]) and matches(shown[1:], printed[1:])


def matches_in_any_order(shown: Sequence[str], printed: Sequence[str]) -> bool:
    """The same where the order of lines does not count."""
    left = list(printed)
    for line in (line for line in shown if line.strip() != "..."):
        found = next((one for one in left if line_matches(line, one)), None)
        if found is None:
            return False
        left.remove(found)
    return not left or any(line.strip() == "..." for line in shown)
