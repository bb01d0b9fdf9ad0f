"""A broker as a child process: `millrace broker` with a properties file, a pid file and a log.

Not here: a broker in this process (`cli.serve`, `testing`), several of them (`local.cluster`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from millrace.clock import SystemClock
from millrace.config.environment import without_settings
from millrace.errors import MillraceError
from millrace.local.children import StartTimeout, last_line, spawn
from millrace.security.certificates import remove_drafts, write_private

START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 20.0
_POLL_S: Final = 0.01
_READY: Final = b"ready bootstrap="
_METRICS: Final = b"metrics="


class BrokerFailed(MillraceError):
    """A broker did not start."""


class BrokerProcess:
    """One broker. It may be killed and started again; the log grows on."""

    def __init__(
        self,
        broker_id: int,
        config_path: Path,
        *,
        pid_path: Path | None = None,
        log_path: Path | None = None,
        log_level: str = "info",
    ) -> None:
        self.broker_id = broker_id
        self.config_path = config_path
        self.pid_path = pid_path or config_path.with_name("pid")
        self.log_path = log_path or config_path.with_name("log")
        self.bootstrap: str | None = None
        """Where it answers, once it has said so."""
        self.metrics_url: str | None = None
        """Where it tells of itself, once it has said so; None where it does not."""
        self._log_level = log_level
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._pause = threading.Event()  # never set: a wait on it is a pause
        self._clock = SystemClock()

    def __repr__(self) -> str:
        return f"BrokerProcess({self.broker_id}, pid {self.pid}, {self.bootstrap or 'not ready'})"

    @property
    def pid(self) -> int | None:
        """The process, if it runs."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    @property
    def exit_status(self) -> int | None:
        """How it ended, if it ended by itself or by somebody else's hand."""
        return None if self._process is None else self._process.poll()

    def start(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """Start it and return where it answers."""
        self.launch()
        return self.wait_until_ready(timeout_s)

    def launch(self) -> None:
        """Start it and return at once."""
        if self.pid is not None:
            return
        self.bootstrap = self.metrics_url = None
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = spawn(
                [
                    *(sys.executable, "-m", "millrace", "broker"),
                    *("--config", str(self.config_path), "--pid-file", str(self.pid_path)),
                    *("--log-level", self._log_level),
                ],
                log=log,
                # All of its settings are in its file: a variable meant for another broker must not win over them.
                env={
                    **without_settings(os.environ),
                    "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
                },
            )

    def wait_until_ready(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """Return where it answers as soon as it does; BrokerFailed with the reason if it ends, StartTimeout."""
        deadline = self._clock.monotonic() + timeout_s
        while not self.is_ready():
            if self._process is None or self._process.poll() is not None:
                raise BrokerFailed(f"broker {self.broker_id} did not start: {last_line(self.log_path) or 'no output'}")
            if self._clock.monotonic() > deadline:
                raise StartTimeout(
                    f"broker {self.broker_id} was not ready within {timeout_s:.0f} s; see {self.log_path}"
                )
            self._pause.wait(_POLL_S)
        assert self.bootstrap is not None
        return self.bootstrap

    def is_ready(self) -> bool:
        """Whether it has said that it answers."""
        if self.bootstrap is None and self._process is not None:
            with self.log_path.open("rb") as log:
                log.seek(self._log_start)
                for line in log:
                    if line.startswith(_READY) and line.endswith(b"\n"):
                        self.bootstrap = line[len(_READY) :].decode().strip()
                    elif self.bootstrap is not None and line.endswith(b"\n"):
                        # The line behind it, written together with it.
                        if line.startswith(_METRICS):
                            self.metrics_url = line[len(_METRICS) :].decode().strip()
                        break
        return self.bootstrap is not None

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self._send(signal.SIGKILL)
        self._reap(None)

    def terminate(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Ask it to stop and wait; it is killed if it does not. Returns its exit status."""
        self.ask_to_stop()
        return self.wait_stopped(timeout_s)

    def ask_to_stop(self) -> None:
        """SIGTERM: it hands over what it leads and stops."""
        self._send(signal.SIGTERM)

    def wait_stopped(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Wait for its end, and kill it if that does not come."""
        return self._reap(timeout_s)

    def restart(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """Stop it cleanly if it runs, start it again, and return where it answers."""
        self.terminate()
        return self.start(timeout_s)

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _reap(self, timeout_s: float | None) -> int:
        process, self._process = self._process, None
        self.bootstrap = self.metrics_url = None
        if process is None:
            return 0
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def write_properties(path: Path, values: Mapping[str, str]) -> None:
    """A .properties file that is read back as `values`; there may be passwords among them, so nobody else reads it.

    Whole or not at all: clients read theirs while it is written anew, and a cluster finds its ZooKeeper by it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_drafts(path.parent, [path.name])
    write_private(path, "".join(f"{name}={_escaped(value)}\n" for name, value in values.items()).encode())


def _escaped(value: str) -> str:
    text = value.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"\\{text}" if text.startswith((" ", "\t")) else text
