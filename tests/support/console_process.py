"""`millrace console` and `millrace up --console` as processes, as somebody who types them meets them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from support.up import ENVIRONMENT

READY_PREFIX = "ready bootstrap="
CONSOLE_PREFIX = "console="
STOP_S = 60


class Served:
    """A command that prints `console=URL` and goes on until it is told to end. Use as a context manager."""

    def __init__(self, directory: Path, *words: str, environment: Mapping[str, str] | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._errors = directory / "stderr"
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "millrace", *words],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**ENVIRONMENT, **(environment or {})},
            )
        self.bootstrap = ""
        self.url = ""

    def __enter__(self) -> Self:
        try:
            self._read_until_served()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            finally:
                self.kill()

    def _read_until_served(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(READY_PREFIX):
                self.bootstrap = line.removeprefix(READY_PREFIX).strip()
            if line.startswith(CONSOLE_PREFIX):
                self.url = line.removeprefix(CONSOLE_PREFIX).strip()
                return
        raise AssertionError(f"no console: {self.errors()}")

    def errors(self) -> str:
        return self._errors.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL, to this process alone."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def console(directory: Path, bootstrap: str, *options: str, environment: Mapping[str, str] | None = None) -> Served:
    """A console of its own in front of brokers that run."""
    words = ("console", "--bootstrap", bootstrap, "--listen", "127.0.0.1:0", *options)
    return Served(directory, *words, environment=environment)


def cluster_with_console(directory: Path, *options: str, environment: Mapping[str, str] | None = None) -> Served:
    """Brokers on free ports with a console beside them."""
    where = ("--port", "0", "--data", str(directory / "data"), "--console", "--console-listen", "127.0.0.1:0")
    return Served(directory, "up", *where, *options, environment=environment)
