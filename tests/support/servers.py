"""Brokers as separate processes: millrace and, beside it, Apache Kafka, behind one interface.

Used by tests that need a process (another program's view, kill -9) and by the benchmarks that compare the two. A
server owns a temporary data directory and free ports; `stop` ends exactly the process that was started.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from support.kafka_jars import SERVER_FLAGS, KafkaJars
from support.maven import ROOT

HOST = "127.0.0.1"


class ServerFailed(Exception):
    """A broker did not start, or did not stop; carries the end of its log."""


def free_ports(count: int = 1) -> list[int]:
    """Ports that were free a moment ago, all different."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def answers(port: int, timeout_s: float = 1.0) -> bool:
    """Whether a Kafka ApiVersions request gets an answer without error."""
    body = struct.pack(">hhih", 18, 0, 7, 5) + b"probe"
    try:
        with socket.create_connection((HOST, port), timeout=timeout_s) as peer:
            peer.sendall(struct.pack(">i", len(body)) + body)
            reply = b""
            while len(reply) < 10:
                chunk = peer.recv(4096)
                if not chunk:
                    return False
                reply += chunk
    except OSError:
        return False
    _, correlation_id, error = struct.unpack_from(">iih", reply)
    return bool(correlation_id == 7 and error == 0)


class Server:
    """One broker process. Subclasses say how it is started and where its partitions are."""

    name = "server"

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self.settings = dict(settings or {})
        self.port = 0
        self.start_s = 0.0
        self.home = Path(tempfile.mkdtemp(prefix=f"{self.name}-"))
        self.log_path = self.home / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"<{self.name} {self.bootstrap} pid={self._process.pid if self._process else None}>"

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def bootstrap(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """The process that serves requests."""
        if self._process is None:
            raise ServerFailed(f"{self.name} is not running")
        return self._process.pid

    def partition_dir(self, topic: str, index: int) -> Path:
        """Where the segments of a partition lie."""
        found = sorted(self.home.rglob(f"{topic}-{index}"))
        if len(found) != 1:
            raise FileNotFoundError(f"{topic}-{index} under {self.home}: {found}")
        return found[0]

    def start(self, timeout_s: float = 60) -> None:
        """Start the process and return when it answers; `start_s` is how long that took from exec."""
        self._prepare()
        with self.log_path.open("ab") as log:
            started = time.monotonic()
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.home,
                env=self._environment(),
                start_new_session=True,  # a ^C in the terminal is for the driver, which then stops the server
            )
        while not (self._announced() and answers(self.port)):
            if self._process.poll() is not None:
                raise ServerFailed(f"{self.name} ended with {self._process.returncode} at start:\n{self.log_tail()}")
            if time.monotonic() - started > timeout_s:
                raise ServerFailed(f"{self.name} did not answer within {timeout_s:.0f} s:\n{self.log_tail()}")
            time.sleep(0.002)
        self.start_s = time.monotonic() - started

    def stop(self, timeout_s: float = 30) -> int:
        """SIGTERM and wait: a clean stop. Returns the exit status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise ServerFailed(f"{self.name} ignored SIGTERM for {timeout_s:.0f} s:\n{self.log_tail()}") from None

    def kill(self) -> None:
        """kill -9: what a crash of the process looks like."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Stop if running and remove the data."""
        try:
            self.stop()
        finally:
            shutil.rmtree(self.home, ignore_errors=True)

    def log_tail(self, lines: int = 40) -> str:
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def _prepare(self) -> None:
        """Whatever must exist before the process starts."""

    def _command(self) -> Sequence[str]:
        raise NotImplementedError

    def _environment(self) -> dict[str, str]:
        return dict(os.environ)

    def _announced(self) -> bool:
        return True


class MillraceServer(Server):
    """`millrace up` on a free port."""

    name = "millrace"

    def _prepare(self) -> None:
        if not self.port:
            (self.port,) = free_ports()

    def _command(self) -> Sequence[str]:
        settings = [part for name, value in self.settings.items() for part in ("--set", f"{name}={value}")]
        data = str(self.home / "data")
        return [sys.executable, "-m", "millrace", "up", "--port", str(self.port), "--data", data, *settings]

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
        return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}

    def _announced(self) -> bool:
        ready = re.compile(rb"^ready bootstrap=\S+", re.MULTILINE)
        return ready.search(self.log_path.read_bytes()) is not None


class KafkaServer(Server):
    """Apache Kafka as one node: broker and KRaft controller in one JVM, with the settings of its sample file."""

    name = "kafka"

    def __init__(self, jars: KafkaJars, settings: Mapping[str, str] | None = None, heap: str = "1G") -> None:
        super().__init__(settings)
        self._jars = jars
        self._heap = heap
        self._properties = self.home / "server.properties"

    def _prepare(self) -> None:
        if self.port:
            return
        self.port, controller_port = free_ports(2)
        properties = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{HOST}:{controller_port}",
            "listeners": f"PLAINTEXT://{HOST}:{self.port},CONTROLLER://{HOST}:{controller_port}",
            "advertised.listeners": f"PLAINTEXT://{HOST}:{self.port}",
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            "log.dirs": str(self.home / "data"),
            "num.network.threads": "3",
            "num.io.threads": "8",
            "socket.send.buffer.bytes": "102400",
            "socket.receive.buffer.bytes": "102400",
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            **self.settings,
        }
        self._properties.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
        cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        while cluster_id.startswith("-"):  # the tool would take it for an option
            cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        done = self._jars.run("kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(self._properties))
        if done.status != 0:
            raise ServerFailed(f"format of Kafka's data directory failed:\n{done.stdout}{done.stderr}")

    def _command(self) -> Sequence[str]:
        flags = (f"-Xms{self._heap}", f"-Xmx{self._heap}", *SERVER_FLAGS)
        return self._jars.command("kafka.Kafka", str(self._properties), flags=flags)
