"""`millrace up` as a process in the foreground, and what it has printed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

SRC = Path(__file__).resolve().parents[2] / "src"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])}


class Up:
    """`millrace up` on free ports, with its data in a folder of its own."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.data = directory / "data"
        self.errors = directory / "stderr"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "millrace", "up", "--port", "0", "--data", str(self.data), *options],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=ENVIRONMENT,
            )

    def ready(self) -> list[int]:
        """The ports, once it is ready."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready bootstrap="), self.errors.read_text()
        return [int(address.rpartition(":")[2]) for address in line.removeprefix("ready bootstrap=").split(",")]

    def pid(self, broker_id: int) -> int | None:
        try:
            return int((self.data / f"broker-{broker_id}" / "pid").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def children(self) -> list[psutil.Process]:
        return list(psutil.Process(self.process.pid).children())

    def stop(self) -> None:
        """Stop it cleanly."""
        self.process.terminate()
        assert self.process.wait(60) == 0, self.errors.read_text()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def wait_for(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
