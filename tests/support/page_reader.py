"""A reader who does what a page says (`support.pages`), and looks whether it is so.

Every command has to end by itself, with exit code 0 and without a traceback, after it has printed what the page shows;
at the end of a page nothing may run any more. What goes wrong is told, and the next block is run all the same.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from support.pages import (
    Block,
    Command,
    Malformed,
    commands_of,
    matches,
    matches_in_any_order,
    printed_lines,
    read_page,
)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT_S = 300.0
"""For a command; the longest, a demo, takes a minute and a half on an idle machine."""
STOP_LIMIT_S = 60.0
_LOOK_EVERY_S = 0.05
_GONE_WITHIN_S = 5.0
"""Spark's JVM ends a moment after the program whose standard input it reads."""


@dataclass
class Running:
    """A process that was started for a page, and the file that it prints into."""

    what: str
    process: subprocess.Popen[bytes]
    output: Path
    is_program: bool

    def printed(self) -> list[str]:
        text = self.output.read_text(errors="replace")
        return printed_lines(text) if text else []

    def interrupt(self) -> None:
        """Ctrl-C, which everybody in the foreground gets."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Reader:
    """Runs the blocks of pages in one folder; `failures` has what went wrong."""

    def __init__(
        self,
        folder: Path,
        *,
        tell: Callable[[str], None] = print,
        limit_s: float = LIMIT_S,
        stop_limit_s: float = STOP_LIMIT_S,
    ) -> None:
        self.failures: list[str] = []
        self._folder = folder / "folder"
        self._notes = folder / "notes"
        self._tell = tell
        self._limit_s = limit_s
        self._stop_limit_s = stop_limit_s
        self._started = 0
        self._running: list[Running] = []
        self._before: Running | None = None
        for place in (self._folder, self._notes, folder / "home", folder / "tmp"):
            place.mkdir(parents=True)
        shutil.copytree(EXAMPLES, self._folder / "examples")  # who reads the pages has a checkout
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("MILLRACE", "PYTEST", "XDG"))}
        self._environment = {
            **kept,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "TERM": "dumb",
            "PYTHONUNBUFFERED": "1",
        }
        # The shell's own memory: commands run in a shell each, which begins where the last one ended.
        self._memory = self._notes / "shell"
        self._memory.touch()

    def read(self, path: Path, name: str) -> None:
        """One page, from its beginning to its end."""
        known = set(psutil.Process().children(recursive=True))
        blocks, complaints = read_page(path, name)
        for complaint in complaints:
            self._failed(complaint, [])
        try:
            for block in blocks:
                try:
                    self._block(block)
                except Malformed as error:
                    self._failed(str(error), [])
        finally:
            self._end(name, known)

    def _block(self, block: Block) -> None:
        reason = block.marks.get("not run")
        if reason is not None:
            self._tell(f"skipped  {block.place}: {reason or 'NO REASON GIVEN'}")
            if not reason:
                self._failed(f"{block.place}: `not run` wants a reason", [])
        elif "file" in block.marks:
            (self._folder / block.marks["file"]).write_text("\n".join(block.lines) + "\n")
            self._tell(f"file     {block.place}: {block.marks['file']}")
        elif "prints" in block.marks:
            self._compare_program(block)
        elif block.language == "console":
            commands = commands_of(block)
            for command in commands:
                self._command(command, block.marks if command is commands[-1] else _for_all(block.marks))
        elif block.language in {"sh", "bash"}:
            self._command(Command(block.place, "\n".join(block.lines)), block.marks)
        elif block.language == "python":
            self._program(block)

    def _command(self, command: Command, marks: dict[str, str]) -> None:
        text = command.text
        behind = "runs on" in marks
        # A `#` begins a comment for people, an `&` at the end puts what stands before it into the background.
        if found := re.fullmatch(r"(.*[^&\s])\s*&\s*(#.*)?", text, re.DOTALL):
            text, behind = found[1], True
        self._tell(f"$        {command.place}: {text}")
        running = self._start(command.place + ": " + text, ["bash", "-c", self._script(text)])
        in_order = matches_in_any_order if "any order" in marks else matches
        expected = int(marks.get("exits with", 0))
        if behind or command.before_interrupt is not None:
            so_far = [*command.shown[: command.before_interrupt], "..."]
            if not self._await(running, lambda: in_order(so_far, running.printed())):
                ended = running.process.poll()
                running.kill()
                how = "was not printed" if ended is None else f"was not printed before it ended with exit code {ended}"
                self._failed(f"{running.what}\n  what the page shows {how}", running.printed(), command.shown)
                return
            if behind:
                self._running.append(running)
                return
            running.interrupt()
        if not self._await(running, lambda: running.process.poll() is not None):
            running.kill()
            self._failed(f"{running.what}\n  was still running after {self._limit_s:.0f} s", running.printed())
            return
        allowed = {expected} if command.before_interrupt is None else {0, 130, -signal.SIGINT}
        self._look_at_the_end(running, allowed)
        if command.shown and not in_order(command.shown, running.printed()):
            self._failed(f"{running.what}\n  did not print what the page shows", running.printed(), command.shown)

    def _script(self, text: str) -> str:
        remember = f"{{ export -p; printf 'cd %q\\n' \"$PWD\"; }} > {self._memory}"
        return f". {self._memory}\n{text}\nstatus=$?\n{remember}\nexit $status\n"

    def _program(self, block: Block) -> None:
        tests = any(re.match(r"(async )?def test_", line) for line in block.lines)
        page = re.sub(r"\W", "_", block.page)
        file = self._folder / f"{'test' if tests else 'program'}_{page}_{block.line}.py"
        file.write_text("\n".join(block.lines) + "\n")
        how = ["-m", "pytest", "-q", "-p", "no:cacheprovider"] if tests else []
        self._tell(f"python   {block.place}{' with pytest' if tests else ''}")
        running = self._start(f"{block.place}: the program", [sys.executable, *how, str(file)], is_program=True)
        self._before = running
        if "runs on" in block.marks:
            self._running.append(running)
        elif not self._await(running, lambda: running.process.poll() is not None):
            running.kill()
            self._failed(f"{running.what}\n  was still running after {self._limit_s:.0f} s", running.printed())
        else:
            self._look_at_the_end(running, {int(block.marks.get("exits with", 0))})

    def _compare_program(self, block: Block) -> None:
        running = self._before
        if running is None:
            self._failed(f"{block.place}: there is no program before it that prints", [])
            return
        shown = [*block.lines, "..."] if running in self._running else block.lines
        in_order = matches_in_any_order if "any order" in block.marks else matches
        if not self._await(running, lambda: in_order(shown, running.printed())):
            self._failed(f"{running.what}\n  did not print what the page shows", running.printed(), block.lines)

    def _start(self, what: str, command: list[str], *, is_program: bool = False) -> Running:
        self._started += 1
        output = self._notes / f"output-{self._started}"
        with output.open("wb") as file:
            process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Running(what, process, output, is_program)

    def _await(self, running: Running, condition: Callable[[], bool]) -> bool:
        """Whether it came true before the process had ended, or the time had."""
        limit = time.monotonic() + self._limit_s
        while not condition():
            if running.process.poll() is not None:
                return condition()
            if time.monotonic() > limit:
                return False
            time.sleep(_LOOK_EVERY_S)
        return True

    def _look_at_the_end(self, running: Running, allowed: set[int]) -> None:
        status = running.process.returncode
        if status not in allowed:
            self._failed(f"{running.what}\n  ended with exit code {status}", running.printed())
        elif any(line.startswith("Traceback (most recent call last)") for line in running.printed()):
            self._failed(f"{running.what}\n  printed a traceback", running.printed())

    def _end(self, page: str, known: set[psutil.Process]) -> None:
        """Close the terminals; whatever is still there has been left behind."""
        for running in reversed(self._running):
            running.interrupt()
            try:
                running.process.wait(self._stop_limit_s)
            except subprocess.TimeoutExpired:
                self._failed(f"{running.what}\n  did not end at Ctrl-C", running.printed())
                running.kill()
            else:
                # How a program takes Ctrl-C is Python's affair, and Spark's.
                if not running.is_program:
                    self._look_at_the_end(running, {0, 130, -signal.SIGINT})
        self._running.clear()
        self._before = None
        left = set(psutil.Process().children(recursive=True)) - known
        psutil.wait_procs(left, _GONE_WITHIN_S)
        alive = [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                self._failed(f"{page}\n  left running: {' '.join(process.cmdline())}", [])
                process.kill()
        psutil.wait_procs(left)

    def _failed(self, what: str, printed: list[str], shown: list[str] | None = None) -> None:
        parts = [f"FAILED   {what}"]
        if shown:
            parts += ["  shown:", *(f"    {line}" for line in shown)]
        if printed:
            parts += ["  printed:", *(f"    {line}" for line in printed[-60:])]
        self.failures.append("\n".join(parts))
        self._tell(self.failures[-1])


def _for_all(marks: dict[str, str]) -> dict[str, str]:
    """The marks of a block that count for each of its commands, not for its last one alone."""
    return {name: value for name, value in marks.items() if name == "any order"}
