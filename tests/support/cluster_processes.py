"""A cluster of real processes for fault tests: a real ZooKeeper, brokers, and between them a network that can be cut.

Every broker has two listeners: CLIENT, for the workload, direct or, with `client_links`, through a link on which
requests can be kept back; and REPLICATION, which it advertises directly or, in a `proxied` layout, by a name for which
every other broker has a link of its own (`support.tcp_proxy.Network`); there its way to ZooKeeper leads through a link,
too. A cluster without ZooKeeper nodes is one broker with its embedded store. ZooKeeper asks for a password, as that of
`millrace up` does, or not (`open_zookeeper`). In a `secured` layout nobody gets in without TLS and SCRAM, brokers show
each other certificates besides, and rules are held: the users of `millrace up --secure`, who are there before the first
start, with certificates of the brokers' own. `client_settings` and `admin_settings` are how clients come in.

Faults are methods; `restore` undoes all of them. Questions about leaders are asked with a Metadata request to one
broker at a time, because brokers that cannot reach each other disagree, and that is the interesting case.

Processes are started from the thread that calls, and die with it (`cluster/planted.py`): start clusters from a thread
that lives as long as they should.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self, TypeVar

from millrace.broker import store_for
from millrace.client.blocking import BlockingConnection
from millrace.client.sasl import SaslClient
from millrace.client.settings import ClientSettings
from millrace.client.tls import context_for
from millrace.clock import SystemClock
from millrace.config import BrokerConfig
from millrace.errors import MillraceError
from millrace.local.ports import free_ports
from millrace.local.secured import ADMIN, APPLICATION, BROKER, MECHANISM, Secured, jaas
from millrace.local.zookeeper import ZooKeeperServers
from millrace.metadata.zookeeper_access import OPEN
from millrace.security.certificates import Authority, make_authority, write_public
from millrace.wire.messages.cluster import MetadataRequest, MetadataResponse
from millrace.wire.schema import Request
from support.maven import ROOT
from support.servers import HOST, ServerFailed
from support.tcp_proxy import CLIENTS, ZOOKEEPER, Network, broker_host, broker_node

T = TypeVar("T")

START_S: Final = 60.0
STOP_S: Final = 30.0
_ASK_S: Final = 2.0
_PAUSE_S: Final = 0.02
_METADATA_VERSION: Final = 9
_READY: Final = re.compile(rb"^ready bootstrap=\S+", re.MULTILINE)
_LAUNCHER: Final = ROOT / "tests" / "cluster" / "planted.py"
LINKS: Final = "MILLRACE_TEST_LINKS"
PASSWORDS: Final = {user: f"nobody-logs-the-password-of-{user}" for user in (ADMIN, APPLICATION, BROKER)}
"""Of the users of a secured layout."""
RULES: Final = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    # Brokers log in by name, or are known by their certificates alone.
    "super.users": f"User:{ADMIN};User:{BROKER};User:CN={BROKER}",
}
"""What has brokers ask who may do what."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What a cluster consists of. Equal layouts may share a running cluster."""

    brokers: int = 3
    zookeeper_nodes: int = 1
    proxied: bool = False
    session_timeout_ms: int = 6000
    planted: str = "nothing"
    """The bug that every broker runs with (`cluster/planted.py`)."""
    log_dirs: int = 1
    """How many disks a broker has."""
    secured: bool = False
    """Everybody logs in, over TLS."""
    open_zookeeper: bool = False
    """ZooKeeper asks for no password, and brokers have none."""
    client_links: bool = False
    """In a proxied layout: clients, too, come over links, and requests of clients and brokers can be kept back."""
    settings: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class PartitionView:
    """A partition as one broker sees it."""

    leader: int
    leader_epoch: int
    isr: frozenset[int]
    replicas: tuple[int, ...]

    @property
    def whole(self) -> bool:
        return self.leader >= 0 and self.isr == set(self.replicas)


@dataclass(frozen=True, slots=True)
class View:
    """The cluster as one broker sees it."""

    controller: int
    brokers: frozenset[int]
    partitions: Mapping[int, PartitionView] = field(default_factory=dict)
    """Of the topic that was asked for."""


class BrokerProcess:
    """One broker: its ports, its directory, and its process if it runs."""

    def __init__(self, broker_id: int, home: Path, planted: str, log_dirs: int = 1) -> None:
        self.broker_id = broker_id
        self.client_port, self.replication_port = free_ports(HOST, 2)
        self.advertised_port = self.client_port
        """Where clients are sent."""
        self.directory = home / f"broker-{broker_id}"
        self.data = self.directory / "data"
        self.disks = (self.data, *(self.directory / f"data-{number}" for number in range(2, log_dirs + 1)))
        """Its log directories, of which `data` is the first."""
        self.identity_path = self.directory / "identity.pem"
        """Its certificate and key, where it has any."""
        self.trust_path = self.directory / "trusted.pem"
        self.log_path = self.directory / "log"
        self.paused = False
        self.links: dict[str, int] = {}
        """The ports behind the names of other brokers, as this one sees them."""
        self.config_path = self.directory / "server.properties"
        self._planted = planted
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def __repr__(self) -> str:
        state = "down" if self._process is None else "paused" if self.paused else "up"
        return f"<broker {self.broker_id} at {self.address}, {state}>"

    @property
    def address(self) -> str:
        return f"{HOST}:{self.advertised_port}"

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        return self._up().pid

    def log_directory(self, topic: str, index: int) -> Path | None:
        """Where the replica of a partition lies on disk; None where there is none."""
        found = [disk / f"{topic}-{index}" for disk in self.disks if (disk / f"{topic}-{index}").is_dir()]
        if len(found) > 1:
            raise ServerFailed(f"{self} has {topic}-{index} on {len(found)} disks")
        return found[0] if found else None

    def configure(self, settings: Mapping[str, str]) -> None:
        for disk in self.disks:
            disk.mkdir(parents=True, exist_ok=True)  # a test may have put a disk of its own there
        self.config_path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))

    def launch(self) -> None:
        """Start the process; `wait_ready` says when it answers."""
        command = [sys.executable, str(_LAUNCHER), self._planted, "--", "broker", "--config", str(self.config_path)]
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        environment[LINKS] = json.dumps(self.links)
        self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                env=environment,
                start_new_session=True,
            )
        self.paused = False

    def wait_ready(self, timeout_s: float = START_S) -> None:
        process = self._up()
        deadline = time.monotonic() + timeout_s
        while not _READY.search(self.log(self._log_start)):
            if process.poll() is not None:
                raise ServerFailed(f"{self} ended with {process.returncode} at start:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise ServerFailed(f"{self} was not ready within {timeout_s:.0f} s:\n{self.log_tail()}")
            time.sleep(_PAUSE_S)

    def kill(self) -> None:
        """kill -9; harmless for one that is down."""
        if self._process is not None:
            self._process.kill()
            self._ended()

    def cut_power(self) -> None:
        """End at once and forget what was not synced; needs a planted disk that can (`power-loss...`)."""
        self.tell("power cut")
        self._up().wait(STOP_S)
        self._ended()

    def tell(self, command: str) -> None:
        """A line for what is planted in the broker (`cluster/planted.py`)."""
        process = self._up()
        assert process.stdin is not None
        process.stdin.write(f"{command}\n".encode())
        process.stdin.flush()

    def wait_logged(self, pattern: str, timeout_s: float = START_S, *, since: int | None = None) -> re.Match[str]:
        """Wait for what matches in the log, since the last start or from a position on."""
        start = self._log_start if since is None else since

        def logged() -> re.Match[str] | None:
            return re.search(pattern, self.log(start).decode(errors="replace"), re.MULTILINE)

        return wait_for(logged, timeout_s, f"{self} did not log {pattern!r}")

    def log_size(self) -> int:
        """Where the next line of the log will be."""
        return self.log_path.stat().st_size

    def wait_ended(self, timeout_s: float = STOP_S) -> int:
        """Wait until it has ended without being told to; its exit code."""
        process = self._up()
        status = wait_for(process.poll, timeout_s, f"{self} did not end")
        self._ended()
        return status

    def terminate(self) -> None:
        """SIGTERM: a controlled shutdown. Returns when the process is gone."""
        process = self._up()
        process.terminate()
        try:
            status = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerFailed(f"{self} ignored SIGTERM for {STOP_S:.0f} s:\n{self.log_tail()}") from None
        self._ended()
        if status != 0:
            raise ServerFailed(f"{self} ended with {status} after SIGTERM:\n{self.log_tail()}")

    def pause(self) -> None:
        """SIGSTOP: connections stay open and silent, sessions run out."""
        self._up().send_signal(signal.SIGSTOP)
        self.paused = True

    def resume(self) -> None:
        if self._process is not None and self.paused:
            self._process.send_signal(signal.SIGCONT)
        self.paused = False

    def died(self) -> bool:
        """Whether the process ended without being told to."""
        return self._process is not None and self._process.poll() is not None

    def log(self, start: int = 0) -> bytes:
        with self.log_path.open("rb") as file:
            file.seek(start)
            return file.read()

    def log_tail(self, lines: int = 40) -> str:
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def _up(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerFailed(f"{self} is not running")
        return self._process

    def _ended(self) -> None:
        process, self._process = self._process, None
        self.paused = False
        if process is not None:
            process.wait()
            _close(process.stdin)


class ClusterProcesses:
    """The whole cluster. Use as a context manager; everything is gone afterwards."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.home = Path(tempfile.mkdtemp(prefix="millrace-cluster-"))
        self.network: Network | None = Network() if layout.proxied else None
        self.zookeeper: ZooKeeperServers | None = None
        self.brokers = {
            broker_id: BrokerProcess(broker_id, self.home, layout.planted, layout.log_dirs)
            for broker_id in range(1, layout.brokers + 1)
        }
        self._zookeeper_down: set[int] = set()
        self.security = Secured(self.home / "security", (HOST,), PASSWORDS, token_secret="")
        self.asks_for_login = layout.secured
        """Whether clients have to log in where `bootstrap` leads."""
        self.authority: Authority
        """Of the brokers' certificates, since `make_certificates`."""
        self.zookeeper_access = OPEN
        """How brokers log in to ZooKeeper."""
        self._login = SaslClient(MECHANISM.label, ADMIN, PASSWORDS[ADMIN])

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

    def __repr__(self) -> str:
        return f"<cluster in {self.home}: {', '.join(repr(broker) for broker in self.brokers.values())}>"

    @property
    def bootstrap(self) -> str:
        return ",".join(broker.address for broker in self.brokers.values())

    @property
    def client_settings(self) -> dict[str, str]:
        """Those of a workload, for librdkafka and for the project's own client."""
        return self._settings_as(APPLICATION)

    @property
    def admin_settings(self) -> dict[str, str]:
        return self._settings_as(ADMIN)

    def _settings_as(self, user: str) -> dict[str, str]:
        if not self.asks_for_login:
            return {"bootstrap.servers": self.bootstrap}
        return self.security.librdkafka_settings(user, self.bootstrap)

    # --- from start to end --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything and return when every broker answers."""
        if self.layout.zookeeper_nodes:
            self.zookeeper = ZooKeeperServers(
                self.home / "zookeeper",
                nodes=self.layout.zookeeper_nodes,
                asks_for_password=not self.layout.open_zookeeper,
            )
            self.zookeeper.start()
            self.zookeeper_access = self.zookeeper.access
        for broker in self.brokers.values():
            broker.links = self._links_of(broker.broker_id)
            if self.layout.client_links:
                node = broker_node(broker.broker_id)
                broker.advertised_port = self.wires().link(CLIENTS, node, broker.client_port, framed=True)
            broker.configure(self.settings(broker))
        if self.layout.secured:
            self.make_certificates()
            config, clock = BrokerConfig.load(self.brokers[1].config_path), SystemClock()
            asyncio.run(self.security.prepare(store_for(config, clock), clock))
        self.start_brokers(self.brokers)

    def make_certificates(self) -> None:
        """A new authority that everybody trusts, and a certificate for every broker."""
        authority = self.authority = make_authority("the authority")
        self.security.directory.mkdir(exist_ok=True)
        write_public(self.security.authorities, authority.certificate)
        for broker in self.brokers.values():
            write_public(broker.trust_path, authority.certificate)
            self.certify(broker, authority)

    def certify(self, broker: BrokerProcess, authority: Authority) -> bytes:
        """Give a broker a new certificate, for all names by which it is called; returns it."""
        names = (HOST, "localhost", broker_host(broker.broker_id))
        identity = authority.issue(BROKER, hosts=names, client=True, days=30)
        identity.write(broker.identity_path)
        return identity.certificate

    def start_brokers(self, broker_ids: Iterable[int]) -> None:
        """Start those that are down, all at once, and wait for each."""
        started = [self.brokers[broker_id] for broker_id in broker_ids if not self.brokers[broker_id].running]
        for broker in started:
            broker.launch()
        for broker in started:
            broker.wait_ready()

    def close(self) -> None:
        """Kill what runs and remove the data."""
        for broker in self.brokers.values():
            broker.kill()
        if self.network is not None:
            self.network.close()
        if self.zookeeper is not None:
            self.resume_zookeeper()  # one that is paused would not hear SIGTERM
            self.zookeeper.stop()
        shutil.rmtree(self.home, ignore_errors=True)

    def logs(self, lines: int = 60) -> str:
        """The end of each broker's log, for the reader of a failure."""
        return "\n".join(f"--- {broker}\n{broker.log_tail(lines)}" for broker in self.brokers.values())

    # --- faults -------------------------------------------------------------------------------------------------------

    def kill(self, *broker_ids: int) -> None:
        """kill -9 of several at the same moment."""
        for broker_id in broker_ids:
            self.brokers[broker_id].kill()

    def kill_zookeeper(self, *nodes: int) -> None:
        """kill -9 of ZooKeeper nodes, numbered from 1."""
        assert self.zookeeper is not None
        for node in nodes:
            self.zookeeper.kill(node)
            self._zookeeper_down.add(node)

    def restart_zookeeper(self) -> None:
        """Start every ZooKeeper node that is down."""
        assert self.zookeeper is not None or not self._zookeeper_down
        while self._zookeeper_down:
            node = self._zookeeper_down.pop()
            assert self.zookeeper is not None
            self.zookeeper.restart(node)

    def pause_zookeeper(self) -> None:
        """SIGSTOP of every ZooKeeper node that runs."""
        self._signal_zookeeper(signal.SIGSTOP)

    def resume_zookeeper(self) -> None:
        self._signal_zookeeper(signal.SIGCONT)

    def _signal_zookeeper(self, number: signal.Signals) -> None:
        if self.zookeeper is not None:
            for node in self.zookeeper.nodes:
                pid = self.zookeeper.pid(node)
                if pid is not None:
                    os.kill(pid, number)

    def wires(self) -> Network:
        """The network of a proxied cluster."""
        assert self.network is not None, "only a proxied layout can be partitioned"
        return self.network

    def restore(self) -> None:
        """Undo every fault: the network heals, ZooKeeper runs, every broker runs."""
        if self.network is not None:
            self.network.heal()
        self.resume_zookeeper()
        self.restart_zookeeper()
        for broker in self.brokers.values():
            broker.resume()
        self.start_brokers(self.brokers)

    # --- questions ----------------------------------------------------------------------------------------------------

    def ask(self, broker_id: int, request: Request, version: int, timeout_s: float = _ASK_S) -> Any:
        """One question of the administrator, on a connection of its own; OSError when there is no answer soon."""
        security = ClientSettings.from_properties(self.admin_settings).security
        connection = BlockingConnection(
            HOST,
            self.brokers[broker_id].client_port,
            client_id="fault-test",
            timeout_ms=round(timeout_s * 1000),
            ssl=context_for(security),
            sasl=self._login if security.uses_sasl else None,
            negotiate=False,
        )
        try:
            with connection:
                return connection.request(request, version)
        except MillraceError as error:
            raise ConnectionError(f"{self.brokers[broker_id]}: {error}") from error

    def view(self, broker_id: int, topic: str | None = None) -> View | None:
        """What one broker says, or None where it does not answer."""
        wanted = [] if topic is None else [MetadataRequest.MetadataRequestTopic(name=topic)]
        request = MetadataRequest(topics=wanted, allow_auto_topic_creation=False)
        try:
            response: MetadataResponse = self.ask(broker_id, request, _METADATA_VERSION)
        except OSError:
            return None
        partitions = {
            partition.partition_index: PartitionView(
                partition.leader_id,
                partition.leader_epoch,
                frozenset(partition.isr_nodes),
                tuple(partition.replica_nodes),
            )
            for one in response.topics
            for partition in one.partitions
        }
        return View(response.controller_id, frozenset(each.node_id for each in response.brokers), partitions)

    def views(self, topic: str | None = None) -> list[View]:
        """What the running brokers say that answer."""
        up = [broker.broker_id for broker in self.brokers.values() if broker.running and not broker.paused]
        return [view for broker_id in up if (view := self.view(broker_id, topic)) is not None]

    def leader(self, topic: str, index: int, timeout_s: float = 30) -> int:
        """The live leader of a partition with the highest epoch that anybody knows; waits for one."""

        def newest() -> int | None:
            seen = [view.partitions[index] for view in self.views(topic) if index in view.partitions]
            best = max(seen, key=lambda partition: partition.leader_epoch, default=None)
            return None if best is None or not self._alive(best.leader) else best.leader

        return wait_for(newest, timeout_s, f"{topic}-{index} has no live leader")

    def follower(self, topic: str, index: int) -> int:
        """A live replica that is not the leader."""
        leader = self.leader(topic, index)
        return max(broker_id for broker_id in self.brokers if broker_id != leader and self._alive(broker_id))

    def replicas(self, topic: str, index: int) -> tuple[int, ...]:
        """The assigned replicas in their order: the next leader is the first of them that lives and is in sync."""
        return self.views(topic)[0].partitions[index].replicas

    def controller(self, timeout_s: float = 30) -> int:
        """The live controller that most of the brokers name; waits for one."""

        def named() -> int | None:
            names = [view.controller for view in self.views()]
            best = max(set(names), key=names.count, default=-1)
            return best if best >= 0 and self._alive(best) else None

        return wait_for(named, timeout_s, "there is no live controller")

    def wait_whole(self, topic: str, timeout_s: float) -> float:
        """Wait until every broker sees every replica in sync under the same leaders; how long that took."""
        started = time.monotonic()

        def whole() -> bool | None:
            views = [self.view(broker_id, topic) for broker_id in self.brokers]
            first = views[0]
            if first is None or not first.partitions or any(view is None for view in views):
                return None
            agreed = all(view is not None and view.partitions == first.partitions for view in views)
            return True if agreed and all(partition.whole for partition in first.partitions.values()) else None

        wait_for(whole, timeout_s, f"not every replica of {topic} is in sync", pause_s=0.1)
        return time.monotonic() - started

    def _alive(self, broker_id: int) -> bool:
        broker = self.brokers.get(broker_id)
        return broker is not None and broker.running and not broker.paused

    # --- settings -----------------------------------------------------------------------------------------------------

    def settings(self, broker: BrokerProcess) -> dict[str, str]:
        """What a broker is told at the start."""
        replication_host = HOST if self.network is None else broker_host(broker.broker_id)
        several = self.layout.brokers > 1
        settings = {
            "broker.id": str(broker.broker_id),
            "listeners": f"CLIENT://{HOST}:{broker.client_port},REPLICATION://{HOST}:{broker.replication_port}",
            "advertised.listeners": f"CLIENT://{broker.address},REPLICATION://{replication_host}:{broker.replication_port}",
            "listener.security.protocol.map": "CLIENT:PLAINTEXT,REPLICATION:PLAINTEXT",
            "inter.broker.listener.name": "REPLICATION",
            "log.dirs": ",".join(str(disk) for disk in broker.disks),
            "default.replication.factor": str(min(3, self.layout.brokers)),
            "min.insync.replicas": "2" if several else "1",
            "auto.create.topics.enable": "false",
            "zookeeper.session.timeout.ms": str(self.layout.session_timeout_ms),
        }
        if self.zookeeper is not None:
            settings["zookeeper.connect"] = self._zookeeper_hosts(broker.broker_id)
            settings |= self.zookeeper_access.as_settings()
        if self.layout.secured:
            settings["listener.security.protocol.map"] = "CLIENT:SASL_SSL,REPLICATION:SASL_SSL"
            settings["listener.name.replication.ssl.client.auth"] = "required"
            settings |= self.login_settings(broker, "replication") | RULES
        return {**settings, **dict(self.layout.settings)}

    def login_settings(self, broker: BrokerProcess, listener: str) -> dict[str, str]:
        """What a broker needs to take others on listeners with SASL_SSL, and to call other brokers on this one."""
        return {
            "sasl.enabled.mechanisms": MECHANISM.label,
            "sasl.mechanism.inter.broker.protocol": MECHANISM.label,
            f"listener.name.{listener}.{MECHANISM.label.lower()}.sasl.jaas.config": jaas(BROKER, PASSWORDS[BROKER]),
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(broker.identity_path),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(broker.trust_path),
        }

    def _zookeeper_hosts(self, broker_id: int) -> str:
        assert self.zookeeper is not None
        if self.network is None:
            return self.zookeeper.hosts
        ports = [int(host.rpartition(":")[2]) for host in self.zookeeper.hosts.split(",")]
        node = broker_node(broker_id)
        return ",".join(f"{HOST}:{self.network.link(node, ZOOKEEPER, port)}" for port in ports)

    def _links_of(self, broker_id: int) -> dict[str, int]:
        if self.network is None:
            return {}
        return {
            broker_host(other): self.network.link(
                broker_node(broker_id), broker_node(other), broker.replication_port, framed=self.layout.client_links
            )
            for other, broker in self.brokers.items()
            if other != broker_id
        }


def _replace(path: Path, content: bytes) -> None:
    """As one who renews certificates does: never half."""
    draft = path.with_suffix(".new")
    draft.write_bytes(content)
    draft.rename(path)


def wait_for(probe: Callable[[], T | None], timeout_s: float, failure: str, *, pause_s: float = _PAUSE_S) -> T:
    """What `probe` gives once it is not None; ServerFailed when that takes too long."""
    deadline = time.monotonic() + timeout_s
    while (found := probe()) is None:
        if time.monotonic() > deadline:
            raise ServerFailed(f"{failure} after {timeout_s:.0f} s")
        time.sleep(pause_s)
    return found


def read_exactly(peer: socket.socket, count: int) -> bytes:
    """So many bytes; ConnectionError when there are not."""
    data = b""
    while len(data) < count:
        chunk = peer.recv(count - len(data))
        if not chunk:
            raise ConnectionError("the broker closed the connection")
        data += chunk
    return data


def _close(stream: IO[bytes] | None) -> None:
    if stream is not None:
        try:
            stream.close()
        except BrokenPipeError:
            pass
