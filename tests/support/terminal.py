"""A command on a pseudo-terminal, as a person has it in front of them."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

TIMEOUT_S = 40.0


class Terminal:
    """`millrace` with stdin and stderr, and stdout unless it is piped, on a terminal of its own."""

    def __init__(self, *argv: str, env: Mapping[str, str], stdout_piped: bool = False) -> None:
        self.seen = ""
        self._screen, inside = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "millrace", *argv],
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", **env},
            stdin=inside,
            stdout=subprocess.PIPE if stdout_piped else inside,
            stderr=inside,
            start_new_session=True,
        )
        os.close(inside)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(TIMEOUT_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        os.close(self._screen)

    def wait_for(self, text: str) -> None:
        """Until the terminal has shown this."""
        ends_at = time.monotonic() + TIMEOUT_S
        while text not in self.seen:
            assert time.monotonic() < ends_at, f"{text!r} was not shown: {self.seen!r}"
            assert self._read(1.0), f"it ended without {text!r}: {self.seen!r}"

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    @property
    def shows_what_is_typed(self) -> bool:
        """Whether it is as a shell wants it, line by line and with an echo."""
        wanted = termios.ECHO | termios.ICANON
        return bool(termios.tcgetattr(self._screen)[3] & wanted == wanted)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def wait(self) -> int:
        """The exit code; what is still printed is in `seen`."""
        ends_at = time.monotonic() + TIMEOUT_S
        while self._read(1.0):
            assert time.monotonic() < ends_at, f"it does not end: {self.seen!r}"
        return self.process.wait(TIMEOUT_S)

    def _read(self, seconds: float) -> bool:
        """Take what is there, or wait a little; False once nobody writes any more."""
        if select.select([self._screen], [], [], seconds)[0]:
            try:
                chunk = os.read(self._screen, 65536)
            except OSError:  # Linux says EIO when the last one inside has closed
                return False
            self.seen += chunk.decode(errors="replace")
            return bool(chunk)
        return True
