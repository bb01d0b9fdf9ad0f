"""Brokers as separate processes: millrace and, beside it, Apache Kafka, one or a cluster, behind one interface.

Used by tests that need a process (another program's view, kill -9) and by the benchmarks that compare the two. A
server owns a temporary data directory and free ports; `stop` ends exactly the processes that were started.
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

import psutil

from millrace.local.brokers import BrokerProcess
from millrace.local.children import spawn
from millrace.local.ports import free_ports
from support.kafka_jars import SERVER_FLAGS, KafkaJars
from support.maven import ROOT

HOST = "127.0.0.1"


class ServerFailed(Exception):
    """A broker did not start, or did not stop; carries the end of its log."""


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


def _wait_until_it_runs(process: subprocess.Popen[bytes], command: Sequence[str]) -> None:
    """Return when `command` runs: `spawn` comes to it through a program of its own, which is no part of its start."""
    if process.args == command:
        return
    assert isinstance(process.args, list)
    before = b"".join(os.fsencode(part) + b"\0" for part in process.args)
    current = Path(f"/proc/{process.pid}/cmdline")
    while current.read_bytes() == before:
        time.sleep(0.0005)


class Server:
    """One broker process. Subclasses say how it is started and where its partitions are. Dies with its parent."""

    name = "server"

    def __init__(self, settings: Mapping[str, str] | None = None, protocols: Sequence[str] = ()) -> None:
        """`protocols` are those of further listeners (`SSL`, or `NAME:SSL`); PLAINTEXT is there in any case."""
        self.settings = dict(settings or {})
        self.port = 0
        self.protocols = {each.partition(":")[0]: each.rpartition(":")[2] for each in protocols}
        self.ports = dict(zip(self.protocols, free_ports(HOST, len(protocols)), strict=True)) if protocols else {}
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

    @property
    def listeners(self) -> str:
        """Of clients, as the setting has them."""
        return ",".join(f"{name}://{HOST}:{port}" for name, port in {"PLAINTEXT": self.port, **self.ports}.items())

    @property
    def protocol_map(self) -> str:
        return ",".join(f"{name}:{protocol}" for name, protocol in {"PLAINTEXT": "PLAINTEXT", **self.protocols}.items())

    def bootstrap_of(self, listener: str) -> str:
        return f"{HOST}:{self.ports[listener]}"

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
            command = self._command()
            self._process = spawn(command, log=log, env=self._environment(), cwd=self.home)
        _wait_until_it_runs(self._process, command)
        started = time.monotonic()
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
            (self.port,) = free_ports(HOST, 1)

    def _command(self) -> Sequence[str]:
        named = {"listeners": self.listeners, "listener.security.protocol.map": self.protocol_map}
        values = {**(named if self.ports else {}), **self.settings}
        settings = [part for name, value in values.items() for part in ("--set", f"{name}={value}")]
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

    def __init__(
        self,
        jars: KafkaJars,
        settings: Mapping[str, str] | None = None,
        heap: str = "1G",
        protocols: Sequence[str] = (),
    ) -> None:
        super().__init__(settings, protocols)
        self._jars = jars
        self._heap = heap
        self._properties = self.home / "server.properties"

    def _prepare(self) -> None:
        if self.port:
            return
        self.port, controller_port = free_ports(HOST, 2)
        properties = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{HOST}:{controller_port}",
            "listeners": f"{self.listeners},CONTROLLER://{HOST}:{controller_port}",
            "advertised.listeners": self.listeners,
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": f"CONTROLLER:PLAINTEXT,{self.protocol_map}",
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


class Cluster:
    """Several brokers with ids from 1, and whatever else they need. Dies with the process that started it."""

    name = "cluster"

    def __init__(self, brokers: int = 3, settings: Mapping[str, str] | None = None) -> None:
        self.broker_ids = tuple(range(1, brokers + 1))
        self.settings = dict(settings or {})
        self.bootstrap = ""
        self.start_s = 0.0
        self.home = Path(tempfile.mkdtemp(prefix=f"{self.name}-brokers-"))

    def __repr__(self) -> str:
        return f"<{self.name} cluster of {len(self.broker_ids)}, {self.bootstrap or 'not ready'}>"

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
    def pids(self) -> list[int]:
        """Processes that, with their children, are the whole cluster."""
        raise NotImplementedError

    def start(self, timeout_s: float = 120) -> None:
        """Start everything and return when every broker serves; `start_s` is how long that took from exec."""
        raise NotImplementedError

    def kill(self, broker_id: int) -> None:
        """kill -9 of a broker; returns when the process is gone."""
        raise NotImplementedError

    def terminate(self, broker_id: int, timeout_s: float = 60) -> None:
        """SIGTERM to a broker: a clean stop. Returns when the process is gone."""
        raise NotImplementedError

    def restart(self, broker_id: int, timeout_s: float = 120) -> None:
        """Start a broker that is down on its data; returns when it answers."""
        raise NotImplementedError

    def stop(self) -> None:
        """End every process."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop what runs and remove the data."""
        try:
            self.stop()
        finally:
            shutil.rmtree(self.home, ignore_errors=True)


class MillraceCluster(Cluster):
    """`millrace up --brokers N` with its own ZooKeeper. A broker that was down runs as a child of this process."""

    name = "millrace"

    def __init__(self, brokers: int = 3, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(brokers, settings)
        self._data = self.home / "data"
        self._log_path = self.home / "up.log"
        self._up: subprocess.Popen[bytes] | None = None
        self._restarted: dict[int, BrokerProcess] = {}

    @property
    def pids(self) -> list[int]:
        own = [broker.pid for broker in self._restarted.values()]
        return [pid for pid in (self._up.pid if self._up else None, *own) if pid is not None]

    def start(self, timeout_s: float = 120) -> None:
        settings = [part for name, value in self.settings.items() for part in ("--set", f"{name}={value}")]
        command = [sys.executable, "-m", "millrace", "up", "--brokers", str(len(self.broker_ids)), "--port", "0"]
        path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        started = time.monotonic()
        with self._log_path.open("wb") as log:
            self._up = spawn([*command, "--data", str(self._data), *settings], log=log, env=environment)
        while (ready := re.search(rb"^ready bootstrap=(\S+)\n", self._log_path.read_bytes(), re.MULTILINE)) is None:
            if self._up.poll() is not None:
                raise ServerFailed(f"millrace up ended with {self._up.returncode} at start:\n{self._log_text()}")
            if time.monotonic() - started > timeout_s:
                raise ServerFailed(f"millrace up was not ready within {timeout_s:.0f} s:\n{self._log_text()}")
            time.sleep(0.005)
        self.start_s = time.monotonic() - started
        self.bootstrap = ready[1].decode()

    def kill(self, broker_id: int) -> None:
        if broker_id in self._restarted:
            self._restarted.pop(broker_id).kill()
        else:
            self._end_first(broker_id, signal.SIGKILL, timeout_s=10)

    def terminate(self, broker_id: int, timeout_s: float = 60) -> None:
        if broker_id in self._restarted:
            self._restarted.pop(broker_id).terminate(timeout_s)
        else:
            self._end_first(broker_id, signal.SIGTERM, timeout_s)

    def restart(self, broker_id: int, timeout_s: float = 120) -> None:
        broker = BrokerProcess(broker_id, self._data / f"broker-{broker_id}" / "server.properties")
        self._restarted[broker_id] = broker
        broker.start(timeout_s)

    def stop(self) -> None:
        restarted, self._restarted = list(self._restarted.values()), {}
        up, self._up = self._up, None
        for broker in restarted:
            broker.ask_to_stop()
        for broker in restarted:
            broker.wait_stopped()
        if up is None:
            return
        up.send_signal(signal.SIGTERM)
        try:
            up.wait(60)
        except subprocess.TimeoutExpired:
            up.kill()  # its children go with it
            up.wait()
            raise ServerFailed(f"millrace up ignored SIGTERM for 60 s:\n{self._log_text()}") from None

    def _end_first(self, broker_id: int, number: signal.Signals, timeout_s: float) -> None:
        """End a broker that `millrace up` started; gone means that `up` has seen it, too."""
        pid = int((self._data / f"broker-{broker_id}" / "pid").read_text())
        if self._up is None or pid not in {child.pid for child in psutil.Process(self._up.pid).children()}:
            raise ServerFailed(f"broker {broker_id} does not run")
        os.kill(pid, number)
        deadline = time.monotonic() + timeout_s
        while psutil.pid_exists(pid):
            if time.monotonic() > deadline:
                raise ServerFailed(f"broker {broker_id} ignored {number.name} for {timeout_s:.0f} s")
            time.sleep(0.005)

    def _log_text(self) -> str:
        return self._log_path.read_text(errors="replace")


class KafkaCluster(Cluster):
    """Apache Kafka as one KRaft controller and N brokers, with the settings of its sample file.

    One controller beside the brokers is what one ZooKeeper is beside ours: the death of a broker is then only that, and
    a broker's JVM does nothing but a broker's work.
    """

    name = "kafka"
    controller_id = 100

    def __init__(
        self, jars: KafkaJars, brokers: int = 3, settings: Mapping[str, str] | None = None, heap: str = "1G"
    ) -> None:
        super().__init__(brokers, settings)
        self._jars = jars
        self._heap = {self.controller_id: "512M", **dict.fromkeys(self.broker_ids, heap)}
        controller_port, *ports = free_ports(HOST, 1 + brokers)
        self._ports = {self.controller_id: controller_port, **dict(zip(self.broker_ids, ports, strict=True))}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def start(self, timeout_s: float = 120) -> None:
        self._format()
        started = time.monotonic()
        for node in self._ports:
            self._launch(node)
        for broker_id in self.broker_ids:
            self._wait_until_it_answers(broker_id, started + timeout_s)
        self.bootstrap = ",".join(f"{HOST}:{self._ports[broker_id]}" for broker_id in self.broker_ids)
        self._wait_until_all_are_listed(started + timeout_s)
        self.start_s = time.monotonic() - started

    def kill(self, broker_id: int) -> None:
        process = self._processes.pop(broker_id)
        process.kill()
        process.wait()

    def terminate(self, broker_id: int, timeout_s: float = 60) -> None:
        process = self._processes.pop(broker_id)
        process.terminate()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise ServerFailed(f"kafka {broker_id} ignored SIGTERM for {timeout_s:.0f} s") from None

    def restart(self, broker_id: int, timeout_s: float = 120) -> None:
        self._launch(broker_id)
        self._wait_until_it_answers(broker_id, time.monotonic() + timeout_s)

    def stop(self) -> None:
        """kill -9: brokers that are told to go all at once wait for each other, and the data is thrown away."""
        for node in list(self._processes):
            self.kill(node)

    def _format(self) -> None:
        cluster_id = urlsafe_b64encode(b"millrace" + uuid.uuid4().bytes[:8]).decode().rstrip("=")
        for node in self._ports:
            (self.home / str(node)).mkdir()
            properties = self._properties(node)
            self._config_path(node).write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
            arguments = ("format", "-t", cluster_id, "-c", str(self._config_path(node)))
            done = self._jars.run("kafka.tools.StorageTool", *arguments, timeout_s=120)
            if done.status != 0:
                raise ServerFailed(f"format of Kafka's data directory failed:\n{done.stdout}{done.stderr}")

    def _properties(self, node: int) -> dict[str, str]:
        role = "controller" if node == self.controller_id else "broker"
        listener = f"{'CONTROLLER' if role == 'controller' else 'PLAINTEXT'}://{HOST}:{self._ports[node]}"
        own = {} if role == "controller" else {"advertised.listeners": listener, **self.settings}
        return {
            "process.roles": role,
            "node.id": str(node),
            "controller.quorum.voters": f"{self.controller_id}@{HOST}:{self._ports[self.controller_id]}",
            "listeners": listener,
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            "log.dirs": str(self.home / str(node) / "data"),
            "num.network.threads": "3",
            "num.io.threads": "8",
            "socket.send.buffer.bytes": "102400",
            "socket.receive.buffer.bytes": "102400",
            **own,
        }

    def _config_path(self, node: int) -> Path:
        return self.home / str(node) / "server.properties"

    def _log_path(self, node: int) -> Path:
        return self.home / str(node) / "log"

    def _launch(self, node: int) -> None:
        heap = self._heap[node]
        flags = (f"-Xms{heap}", f"-Xmx{heap}", *SERVER_FLAGS)
        with self._log_path(node).open("ab") as log:
            command = self._jars.command("kafka.Kafka", str(self._config_path(node)), flags=flags)
            self._processes[node] = spawn(command, log=log)

    def _wait_until_it_answers(self, broker_id: int, deadline: float) -> None:
        process = self._processes[broker_id]
        while not answers(self._ports[broker_id]):
            if process.poll() is not None:
                raise ServerFailed(f"kafka {broker_id} ended with {process.returncode}:\n{self._log_tail(broker_id)}")
            if time.monotonic() > deadline:
                raise ServerFailed(f"kafka {broker_id} did not answer in time:\n{self._log_tail(broker_id)}")
            time.sleep(0.01)

    def _wait_until_all_are_listed(self, deadline: float) -> None:
        """A broker answers before the controller lets it lead; it serves from then on."""
        from confluent_kafka.admin import AdminClient

        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 3})
        while set(admin.list_topics(timeout=30).brokers) != set(self.broker_ids):
            if time.monotonic() > deadline:
                raise ServerFailed(f"not every broker of {self} joined in time")
            time.sleep(0.05)

    def _log_tail(self, node: int) -> str:
        return "\n".join(self._log_path(node).read_text(errors="replace").splitlines()[-40:])
