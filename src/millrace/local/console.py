"""The console as a child process: `millrace console` beside the brokers that `millrace up` runs.

It is a client of theirs and nothing more: if it ends, that is said, and they go on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from millrace.local.children import last_line, spawn

STOP_TIMEOUT_S: Final = 5.0
_READY: Final = b"console="


class ConsoleProcess:
    """One console; a thread of its own reads what it says and notices its end."""

    def __init__(self, bootstrap: str, listen: str, client: Mapping[str, str], log_path: Path) -> None:
        self._command = [
            *(sys.executable, "-m", "millrace", "console", "--bootstrap", bootstrap, "--listen", listen),
            *(word for name, value in client.items() for word in ("--client", f"{name}={value}")),
        ]
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._stopping = False

    def __repr__(self) -> str:
        return f"ConsoleProcess(pid {None if self._process is None else self._process.pid})"

    def start(self, ready: Callable[[str], object], ended: Callable[[str], object]) -> None:
        """Start it and return at once; `ready` is called with its address, `ended` with why it is no more."""
        with self._log_path.open("ab") as log:
            process = self._process = spawn(
                self._command,
                log=log,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
            )

        def follow() -> None:
            assert process.stdout is not None
            with process.stdout as lines:
                for line in lines:
                    if line.startswith(_READY):
                        ready(line[len(_READY) :].decode().strip())
            status = process.wait()
            if not self._stopping:
                ended(last_line(self._log_path) or f"it ended with status {status}")

        self._reader = threading.Thread(target=follow, name="millrace-console", daemon=True)
        self._reader.start()

    def stop(self) -> None:
        """End it, and wait for that; it is killed if it takes long."""
        self._stopping = True
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._reader is not None:
            self._reader.join(STOP_TIMEOUT_S)
