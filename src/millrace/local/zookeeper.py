"""ZooKeeper on this machine, from the jars inside the pyspark wheel: one server, or an ensemble of three.

Files, below the directory it is given: `N/zoo.cfg`, `N/log4j2.properties`, `N/log` and `N/data` for server N (from 1),
and `password`, where it asks for one. Not here: what is kept in it (`metadata.zookeeper`).

With a password nobody but its holders reads or writes anything. ZooKeeper itself has no list of users: it turns away
whoever has not logged in at all (`enforce.auth`), takes any pair of name and password for a login, and leaves the rest
to the znodes. So these are closed: the root and ZooKeeper's own by `close_to_strangers` here, the cluster's by the
brokers. The password is made at the first start, is the directory's for good, and is never on a command line.

A server is ready after about 0.8 s: only ZooKeeper's own jars are on the class path (the whole directory costs another
half second), and the compiler stops at the quick tier, which is enough for a few hundred writes a second. `tickTime` is
500 ms, so that sessions of one second are possible. A start on the same directory goes on with the data there.
"""

from __future__ import annotations

import asyncio
import importlib.util
import secrets
import signal
import socket
import subprocess
import threading
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from millrace.clock import SystemClock
from millrace.errors import ConfigError, MillraceError
from millrace.installing import install_hint
from millrace.local.children import StartTimeout, last_line, spawn
from millrace.local.java import find_java
from millrace.local.ports import free_ports
from millrace.metadata.zookeeper_access import OPEN, ZooKeeperAccess
from millrace.security.certificates import remove_drafts, write_private

START_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 10.0
USERNAME: Final = "millrace"
_POLL_S: Final = 0.01
_MAIN: Final = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
_JARS: Final = (
    "zookeeper-",
    "slf4j-api-",
    "log4j-api-",
    "log4j-core-",
    "log4j-slf4j2-",
    "netty-",
    "metrics-core-",
    "snappy-java-",
)
_FLAGS: Final = (
    "-Xms32m",
    "-Xmx192m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Xshare:auto",
    "-Dlog4j2.disable.jmx=true",
    "-Dzookeeper.jmx.log4j.disable=true",
    "-Djava.awt.headless=true",
)
_LOGGING: Final = """\
status = error
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d{ISO8601} %-5p %c{1}: %m%n
rootLogger.level = warn
rootLogger.appenderRef.out.ref = out
"""


class ZooKeeperFailed(MillraceError):
    """A ZooKeeper server did not start."""


class ZooKeeperServers:
    """One ZooKeeper server or three, as child processes. Ports are chosen once and kept across restarts."""

    def __init__(
        self, directory: Path, nodes: int = 1, host: str = "127.0.0.1", *, asks_for_password: bool = False
    ) -> None:
        if nodes not in (1, 3):
            raise ConfigError(f"ZooKeeper runs with 1 or 3 servers here, not {nodes}")
        self.directory = directory.absolute()
        self.host = host
        self.asks_for_password = asks_for_password
        self._password_path = self.directory / "password"
        self.ports = free_ports(host, nodes)
        self._peer_ports = free_ports(host, 2 * nodes) if nodes > 1 else []
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._command: list[str] = []
        self._pause = threading.Event()  # never set: a wait on it is a pause
        self._clock = SystemClock()

    def __repr__(self) -> str:
        return f"ZooKeeperServers({self.hosts}, pids {[process.pid for process in self._processes.values()]})"

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def hosts(self) -> str:
        """What a client connects to: `host:port,...`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return ",".join(f"{host}:{port}" for port in self.ports)

    @property
    def has_password(self) -> bool:
        """Whether there is one already, of an earlier start."""
        return self._password_path.exists()

    @cached_property
    def access(self) -> ZooKeeperAccess:
        """How to get in; makes the password if there is none yet."""
        if not self.asks_for_password:
            return OPEN
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory.chmod(0o700)  # of one that was there: what the brokers keep secret is in the data
        return ZooKeeperAccess(USERNAME, _password(self._password_path), set_acl=True)

    @property
    def nodes(self) -> list[int]:
        """The numbers of the servers, from 1."""
        return list(range(1, len(self.ports) + 1))

    def pid(self, node: int) -> int | None:
        """The process of a server, if it was started and has not ended."""
        process = self._processes.get(node)
        return None if process is None or process.poll() is not None else process.pid

    def log_path(self, node: int) -> Path:
        return self.directory / str(node) / "log"

    def start(self) -> None:
        """Start all servers and return when they answer."""
        self.launch()
        self.wait_until_ready()
        self.close_to_strangers()

    def launch(self, node: int | None = None) -> None:
        """Start all servers, or one, and return at once."""
        for each in self.nodes if node is None else [node]:
            self._launch(each)

    def wait_until_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return when every running server answers; ZooKeeperFailed with the reason if one ends, StartTimeout."""
        deadline = self._clock.monotonic() + timeout_s
        waiting = [node for node in self.nodes if node in self._processes]
        while waiting:
            waiting = [node for node in waiting if not self._answers(node)]
            for node in waiting:
                self._check_alive(node)
            if waiting and self._clock.monotonic() > deadline:
                raise StartTimeout(
                    f"ZooKeeper did not answer within {timeout_s:.0f} s; see {self.log_path(waiting[0])}"
                )
            if waiting:
                self._pause.wait(_POLL_S)

    def close_to_strangers(self) -> None:
        """Close the root, when servers answer; harmless when repeated. Without a password there is nothing to do."""
        if self.access.has_login:
            from millrace.metadata.zookeeper import close_server  # noqa: PLC0415 - kazoo takes a while to load

            timeout_ms = round(START_TIMEOUT_S * 1000)
            asyncio.run(close_server(self.hosts, self.access, connection_timeout_ms=timeout_ms, clock=self._clock))

    def kill(self, node: int = 1) -> None:
        """kill -9 of one server; returns when it is gone."""
        process = self._processes.pop(node, None)
        if process is not None:
            process.kill()
            process.wait()

    def restart(self, node: int = 1) -> None:
        """Start a server that was killed, on the same port with the same data; returns when it answers."""
        self.kill(node)
        self._launch(node)
        self.wait_until_ready()

    def stop(self) -> None:
        """End all servers; harmless when none runs."""
        processes, self._processes = list(self._processes.values()), {}
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def exited(self) -> dict[int, int]:
        """Servers that have ended by themselves, with their exit status."""
        ended = {node: process.poll() for node, process in self._processes.items()}
        return {node: status for node, status in ended.items() if status is not None}

    def _launch(self, node: int) -> None:
        if not self._command:
            self._command = _java_command()
        home = self.directory / str(node)
        (home / "data").mkdir(parents=True, exist_ok=True)
        (home / "zoo.cfg").write_text(self._config(node))
        (home / "log4j2.properties").write_text(_LOGGING)
        if self._peer_ports:
            (home / "data" / "myid").write_text(f"{node}\n")
        logging_flag = f"-Dlog4j2.configurationFile={(home / 'log4j2.properties').as_uri()}"
        with (home / "log").open("ab") as log:
            program, *arguments = self._command
            self._processes[node] = spawn([program, logging_flag, *arguments, str(home / "zoo.cfg")], log=log)

    def _config(self, node: int) -> str:
        settings = {
            "tickTime": 500,
            "initLimit": 40,
            "syncLimit": 20,
            "minSessionTimeout": 1000,
            "maxSessionTimeout": 60000,
            "dataDir": self.directory / str(node) / "data",
            "clientPort": self.ports[node - 1],
            "clientPortAddress": self.host,
            "maxClientCnxns": 0,
            "admin.enableServer": "false",
            "4lw.commands.whitelist": "srvr",
            "preAllocSize": 4096,  # KiB of transaction log at a time; 64 MiB would be much for a test's directory
            "autopurge.snapRetainCount": 3,
            "autopurge.purgeInterval": 1,
        }
        if self.access.has_login:
            settings |= {"enforce.auth.enabled": "true", "enforce.auth.schemes": "digest"}
        lines = [f"{name}={value}" for name, value in settings.items()]
        if self._peer_ports:
            peers = zip(self._peer_ports[::2], self._peer_ports[1::2], strict=True)
            host = f"[{self.host}]" if ":" in self.host else self.host
            lines.extend(
                f"server.{number}={host}:{quorum}:{vote}" for number, (quorum, vote) in enumerate(peers, start=1)
            )
        return "\n".join(lines) + "\n"

    def _answers(self, node: int) -> bool:
        try:
            with socket.create_connection((self.host, self.ports[node - 1]), timeout=1) as peer:
                peer.sendall(b"srvr")
                return peer.recv(64).startswith(b"Zookeeper version")
        except OSError:
            return False

    def _check_alive(self, node: int) -> None:
        status = self._processes[node].poll()
        if status is not None:
            raise ZooKeeperFailed(
                f"ZooKeeper ended with status {status} at its start: {last_line(self.log_path(node)) or 'no output'}"
            )


def _password(path: Path) -> str:
    """What is in the file; made up where there is none. The znodes are closed under it: another one opens nothing."""
    if not path.exists():
        remove_drafts(path.parent, [path.name])
        write_private(path, f"{secrets.token_urlsafe(32)}\n".encode())
    try:
        password = path.read_text().strip()
    except UnicodeDecodeError:
        password = ""
    if not password:
        raise ConfigError(f"{path} is damaged: put back the password that ZooKeeper's data was closed with")
    return password


def _java_command() -> list[str]:
    """The program and all arguments but the configuration file."""
    return [str(_find_java_program()), *_FLAGS, "-cp", ":".join(map(str, _find_jars())), _MAIN]


def _find_java_program() -> Path:
    try:
        return find_java().program
    except ConfigError as error:
        raise ConfigError(f"{_advice()} ({error})") from None


def _find_jars() -> list[Path]:
    # The specification of a package names its directory without importing it, which would take a second.
    found = importlib.util.find_spec("pyspark")
    places = [] if found is None else list(found.submodule_search_locations or ())
    jars = [
        jar for place in places for jar in sorted((Path(place) / "jars").glob("*.jar")) if jar.name.startswith(_JARS)
    ]
    if not any(jar.name.startswith("zookeeper-") for jar in jars):
        raise ConfigError(f"{_advice()} (pyspark, which carries it, is not installed)")
    return jars


def _advice() -> str:
    return f"a cluster needs ZooKeeper: {install_hint('spark')} or give --zookeeper HOST:PORT"
