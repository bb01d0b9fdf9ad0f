"""The files of `deploy/` without containers: what builds the image, and all that the compose file runs.

What a container network does is done here by substitution: an address of the file, a name and a port, is a free port of
this machine. Everything else is as the file has it: the settings of the image, the variables, ZooKeeper's own file.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import pytest
from confluent_kafka import Consumer, Message, Producer

from millrace import __version__
from millrace.cli.root import NOUNS
from millrace.config import is_setting
from millrace.config.environment import without_settings
from millrace.local import zookeeper as bundled
from millrace.local.children import spawn
from millrace.local.ports import free_ports
from support import deployment
from support.deployment import DEPLOY, IMAGE_SETTINGS, METRICS, ROOT, Program

pytestmark = [pytest.mark.pages, pytest.mark.timeout(240)]

ADDRESS = re.compile(r"([a-zA-Z][a-zA-Z0-9-]*|\d+\.\d+\.\d+\.\d+):(\d{4,5})\b")
HERE = ("0.0.0.0", "127.0.0.1", "localhost")
WAIT_S = 60.0


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_S:.0f} s: {what}"
        time.sleep(0.05)


class Network:
    """Which free port stands for which port of which service."""

    def __init__(self) -> None:
        self._ports: dict[tuple[str, int], int] = {}

    def port(self, service: str, port: int) -> int:
        if (service, port) not in self._ports:
            (self._ports[service, port],) = free_ports("127.0.0.1", 1)
        return self._ports[service, port]

    def seen_from(self, service: str, text: str) -> str:
        """The text with every address in it as one of this machine."""

        def replace(found: re.Match[str]) -> str:
            owner = service if found[1] in HERE else found[1]
            return f"127.0.0.1:{self.port(owner, int(found[2]))}"

        return ADDRESS.sub(replace, text)


class Service:
    """One service of the compose file as a process."""

    def __init__(self, name: str, program: Program, network: Network, home: Path) -> None:
        self.name, self.network = name, network
        self.log = home / f"{name}.log"
        data = home / name
        data.mkdir()
        arguments = [network.seen_from(name, each) for each in program.arguments]
        if program.file is not None:
            file = data / "server.properties"
            lines = program.file.read_text().replace("/var/lib/millrace", str(data)).splitlines()
            kept = [line for line in lines if not line.startswith(METRICS) or is_setting(METRICS)]
            file.write_text(network.seen_from(name, "\n".join(kept)))
            arguments = [str(file) if each == IMAGE_SETTINGS else each for each in arguments]
        self._command = [sys.executable, "-m", "millrace", *arguments]
        given = {variable: network.seen_from(name, value) for variable, value in program.environment.items()}
        self._environment = {**without_settings(os.environ), **given}
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self.metrics_port = network.port(name, program.metrics_port) if program.file and is_setting(METRICS) else None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = spawn(self._command, log=log, env=self._environment)
        self._starts += 1

    def stop(self) -> int:
        """SIGTERM, as a container's runtime sends it; the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        status = self._process.wait(WAIT_S)
        self._process = None
        return status

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def is_ready(self) -> bool:
        """What the health check of the file asks; where there are no metrics yet, whether it has said so itself."""
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()
        if self.metrics_port is not None:
            return self.answers("/readyz") == 200
        return self.log.read_text().count("ready bootstrap=") == self._starts

    def answers(self, path: str) -> int | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}{path}", timeout=3) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None


@contextmanager
def zookeeper(network: Network, home: Path) -> Iterator[None]:
    """ZooKeeper of the same version, with the file that the container gets."""
    text = (DEPLOY / "zookeeper" / "zoo.cfg").read_text()
    port = network.port("zookeeper", 2181)
    for folder in ("data", "datalog"):
        (home / folder).mkdir(parents=True)
        text = re.sub(rf"(?m)=/{folder}$", f"={home / folder}", text)
    assert "clientPort=2181" in text
    (home / "zoo.cfg").write_text(text.replace("clientPort=2181", f"clientPort={port}\nclientPortAddress=127.0.0.1"))
    with (home / "log").open("ab") as log:
        process = spawn([*bundled._java_command(), str(home / "zoo.cfg")], log=log)
    try:
        wait_for(lambda: answers_srvr(port), "ZooKeeper answers")
        yield
    finally:
        process.terminate()
        process.wait(WAIT_S)


def answers_srvr(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as peer:
            peer.sendall(b"srvr")
            return peer.recv(64).startswith(b"Zookeeper version")
    except OSError:
        return False


def healthy(bootstrap: str) -> bool:
    command = [sys.executable, "-m", "millrace", "cluster", "health", "--bootstrap", bootstrap]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


class Traffic:
    """A producer on one side that goes on until it is told to stop, and what a consumer on the other side finds."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.topic = topic
        self.acknowledged: list[int] = []
        self.failed: list[str] = []
        self._producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 5})
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._stopping.wait(0.005):
            self._producer.produce(self.topic, str(number), on_delivery=self._delivered)
            self._producer.poll(0)
            number += 1
        assert self._producer.flush(WAIT_S) == 0

    def _delivered(self, error: object, message: Message) -> None:
        if error is not None:
            self.failed.append(str(error))
        else:
            self.acknowledged.append(int(message.value() or b"-1"))

    def read_back(self, bootstrap: str) -> list[int]:
        settings = {"bootstrap.servers": bootstrap, "group.id": "readers", "auto.offset.reset": "earliest"}
        consumer = Consumer(settings)
        consumer.subscribe([self.topic])
        read: list[int] = []
        try:
            deadline = time.monotonic() + WAIT_S
            while len(read) < len(self.acknowledged) and time.monotonic() < deadline:
                for message in consumer.consume(1000, timeout=1.0):
                    assert message.error() is None, message.error()
                    read.append(int(message.value() or b"-1"))
        finally:
            consumer.close()
        return read


def test_the_compose_file_runs_without_containers(tmp_path: Path) -> None:
    network = Network()
    with ExitStack() as stack:
        stack.enter_context(zookeeper(network, tmp_path / "zookeeper"))
        brokers = [Service(name, program, network, tmp_path) for name, program in deployment.brokers().items()]
        for broker in brokers:
            stack.callback(broker.kill)
            broker.start()
        for broker in brokers:
            wait_for(broker.is_ready, f"{broker.name} is ready")
        host = ",".join(f"127.0.0.1:{network.port(f'broker-{n}', 9091 + n)}" for n in (1, 2, 3))
        internal = ",".join(f"127.0.0.1:{network.port(f'broker-{n}', 29092)}" for n in (1, 2, 3))
        wait_for(lambda: healthy(host) and healthy(internal), "the cluster is healthy, seen through both listeners")
        if brokers[0].metrics_port is not None:
            paths = set(re.findall(r"/livez|/readyz", (deployment.BASE / "brokers.yaml").read_text()))
            assert {path: brokers[0].answers(path) for path in paths} == {"/livez": 200, "/readyz": 200}

        console_program = deployment.composed()["console"]
        if console_program.arguments[0] in NOUNS:
            console = Service("console", console_program, network, tmp_path)
            stack.callback(console.kill)
            console.start()
            port = network.port("console", 8080)
            wait_for(lambda: is_open(port), "the console listens")

        with Traffic(host, "orders") as traffic:
            wait_for(lambda: len(traffic.acknowledged) > 100, "records are acknowledged")
            for broker in brokers:  # a rolling restart, as docs/deployment.md says it
                assert broker.stop() == 0, broker.log.read_text()
                before = len(traffic.acknowledged)
                wait_for(lambda before=before: len(traffic.acknowledged) > before + 50, "producing goes on without it")
                broker.start()
                wait_for(broker.is_ready, f"{broker.name} is ready again")
                wait_for(lambda: healthy(internal), "every replica is in sync again")
        assert traffic.failed == []
        assert sorted(traffic.read_back(internal)) == sorted(traffic.acknowledged)
        back = Traffic(internal, "back")
        with back:
            wait_for(lambda: len(back.acknowledged) > 10, "records are acknowledged inside of the network")
        assert sorted(back.read_back(host)) == sorted(back.acknowledged)

        assert [broker.stop() for broker in brokers] == [0, 0, 0]
    for broker in brokers:
        log = broker.log.read_text()
        assert "Traceback" not in log and " ERROR " not in log, log
        assert (tmp_path / broker.name / "data" / ".kafka_cleanshutdown").exists()


def test_the_commands_that_build_the_image_install_millrace(tmp_path: Path) -> None:
    """With nothing but the files that the build may see."""
    source, target, wheels = tmp_path / "source", tmp_path / "opt" / "millrace", tmp_path / "wheels"
    commands = []
    for name, text in deployment.instructions():
        if name == "COPY" and "--from" not in text:
            *copied, _ = text.split()
            for each in (ROOT / path for path in copied):
                if each.is_dir():
                    shutil.copytree(each, source / each.name, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    source.mkdir(exist_ok=True)
                    shutil.copy(each, source)
        elif name == "RUN" and "/opt/millrace" in text:
            commands.append(text.replace("/opt/millrace", str(target)).replace("/wheels", str(wheels)))
    assert len(commands) == 2
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MILLRACE"))}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    for command in commands:
        done = subprocess.run(
            ["sh", "-e", "-c", command], cwd=source, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    told = subprocess.run([target / "bin" / "millrace", "--version"], env=environment, capture_output=True, check=False)
    assert told.stdout.decode() == f"millrace {__version__}\n"
    assert not (target / "bin" / "pip").exists()


def is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
