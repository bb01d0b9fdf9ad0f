"""A whole cluster on this machine: ZooKeeper, unless there is one, and broker processes.

Files, below the directory it is given: `zookeeper/` (see `local.zookeeper`) and, for each broker, `broker-ID/` with
`server.properties` (written at every start), `data`, `pid` and `log`. Ids count from 1, ports from the given one. The
ZooKeeper that is started here asks for a password, which is in its directory and in the brokers' settings; a directory
of before that gets one, and its znodes are closed.
Not here: what to do when a broker ends (`cli.up`), what a folder holds and who uses it (`local.folder`).

Where broker 1 has been alone so far, its metadata moves to ZooKeeper before any broker starts (`cluster.migration`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from millrace.clock import SystemClock
from millrace.cluster.image import ClusterImage
from millrace.cluster.migration import is_single, migrate
from millrace.config import BrokerConfig
from millrace.errors import ConfigError
from millrace.local.brokers import START_TIMEOUT_S, STOP_TIMEOUT_S, BrokerProcess, write_properties
from millrace.local.ports import free_ports, is_free
from millrace.local.zookeeper import ZooKeeperServers
from millrace.metadata.zookeeper import ZooKeeperStore

if TYPE_CHECKING:
    from millrace.local.secured import Secured

_CONNECTION_TIMEOUT_MS: Final = 30_000
"""Brokers start beside ZooKeeper and wait for it, on a busy machine for a while."""


def cluster_defaults(brokers: int) -> dict[str, str]:
    """Settings that depend on the number of brokers; with three, one may die and acks=all goes on."""
    copies = str(min(3, brokers))
    values = {
        "default.replication.factor": copies,
        "offsets.topic.replication.factor": copies,
        "transaction.state.log.replication.factor": copies,
        "transaction.state.log.min.isr": str(min(2, brokers)),
        # One person's machine: the first consumer of a group should not wait for others to join.
        "group.initial.rebalance.delay.ms": "0",
    }
    if brokers >= 3:
        values["min.insync.replicas"] = "2"
    return values


class LocalCluster:
    """ZooKeeper and brokers as child processes. The addresses stay the same while brokers come and go."""

    def __init__(
        self,
        directory: Path,
        *,
        brokers: int,
        host: str = "127.0.0.1",
        port: int = 0,
        zookeeper: str | None = None,
        zookeeper_nodes: int = 1,
        settings: Mapping[str, str] | None = None,
        log_level: str = "info",
        secured: Secured | None = None,
    ) -> None:
        if port and port + brokers - 1 > 65535:
            raise ConfigError(f"{brokers} ports from {port} upward do not exist")
        self._clock = SystemClock()
        self.directory = directory.absolute()
        self.zookeeper = (
            None
            if zookeeper
            else ZooKeeperServers(self.directory / "zookeeper", zookeeper_nodes, asks_for_password=True)
        )
        self.zookeeper_hosts = zookeeper or (self.zookeeper.hosts if self.zookeeper else "")
        self.migrated: ClusterImage | None = None
        """What a broker that was alone brought along, if this start took it over."""
        self.stale_users: list[str] = []
        """Of a secured cluster: those whose password is not the one in its folder any more."""
        self._host = host
        ports = [port + number for number in range(brokers)] if port else free_ports(host, brokers)
        self._ports = dict(enumerate(ports, start=1))
        self._secured = secured
        security = {} if secured is None else secured.broker_settings()
        self._settings = {**cluster_defaults(brokers), **security, **(settings or {})}
        self.brokers = {
            broker_id: BrokerProcess(broker_id, self._home(broker_id) / "server.properties", log_level=log_level)
            for broker_id in self._ports
        }

    def __repr__(self) -> str:
        return f"LocalCluster({self.directory}, ZooKeeper {self.zookeeper_hosts}, {list(self.brokers.values())})"

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def bootstrap(self) -> str:
        """Where clients connect: every broker that is ready."""
        return ",".join(broker.bootstrap for broker in self.brokers.values() if broker.bootstrap)

    def start(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """Start everything at once and return the addresses when every broker answers."""
        for port in self._ports.values():
            if not is_free(self._host, port):
                raise ConfigError(f"port {port} is already in use on {self._host}: choose another")
        if self._secured is not None:
            for broker_id in self.brokers:
                self._secured.close_to_others(self._home(broker_id))
        if self.zookeeper is not None:
            self._start_zookeeper(self.zookeeper)
        if is_single(self._home(1) / "data"):
            self._take_over_single()
        if self._secured is not None:
            self._prepare(self._secured)
        for broker_id, broker in self.brokers.items():
            write_properties(broker.config_path, self._properties(broker_id))
            broker.launch()
        if self.zookeeper is not None:
            self.zookeeper.wait_until_ready()
            self.zookeeper.close_to_strangers()
        for broker in self.brokers.values():
            broker.wait_until_ready(timeout_s)
        return self.bootstrap

    def _start_zookeeper(self, servers: ZooKeeperServers) -> None:
        """At once, so that the brokers start beside it; with a new password, closed before any broker comes."""
        had_password = servers.has_password
        servers.launch()
        if not had_password:
            servers.wait_until_ready()
            servers.close_to_strangers()

    def _take_over_single(self) -> None:
        if self.zookeeper is not None:
            self.zookeeper.wait_until_ready()

        async def move() -> ClusterImage:
            return await migrate(self._home(1) / "data", 1, self._store(), self._clock)

        self.migrated = asyncio.run(move())

    def _prepare(self, secured: Secured) -> None:
        """Users that brokers log in as have to be there before the first of them starts."""
        if self.zookeeper is not None:
            self.zookeeper.wait_until_ready()

        async def prepare() -> list[str]:
            return await secured.prepare(self._store(), self._clock)

        self.stale_users = asyncio.run(prepare())

    def _store(self) -> ZooKeeperStore:
        return ZooKeeperStore.from_config(BrokerConfig(self._properties(1)), self._clock)

    def stop(self) -> None:
        """Stop the brokers cleanly, all at once, and then ZooKeeper, which they need for that."""
        deadline = self._clock.monotonic() + STOP_TIMEOUT_S
        for broker in self.brokers.values():
            broker.ask_to_stop()
        for broker in self.brokers.values():
            broker.wait_stopped(max(deadline - self._clock.monotonic(), 0.0))
        if self.zookeeper is not None:
            self.zookeeper.stop()

    def kill(self) -> None:
        """kill -9 of everything."""
        for broker in self.brokers.values():
            broker.kill()
        if self.zookeeper is not None:
            for node in self.zookeeper.nodes:
                self.zookeeper.kill(node)

    def _home(self, broker_id: int) -> Path:
        return self.directory / f"broker-{broker_id}"

    def _listener(self, address: str, port: int) -> str:
        return f"PLAINTEXT://{address}:{port}" if self._secured is None else self._secured.listener(address, port)

    def _properties(self, broker_id: int) -> dict[str, str]:
        address = f"[{self._host}]" if ":" in self._host else self._host
        return {
            "node.id": str(broker_id),
            "listeners": self._listener(address, self._ports[broker_id]),
            "log.dirs": str(self._home(broker_id) / "data"),
            "zookeeper.connect": self.zookeeper_hosts,
            "zookeeper.connection.timeout.ms": str(_CONNECTION_TIMEOUT_MS),
            **({} if self.zookeeper is None else self.zookeeper.access.as_settings()),
            **self._settings,
            **self._metrics(broker_id),
        }

    def _metrics(self, broker_id: int) -> dict[str, str]:
        """As with the ports for clients: each broker has the one after the broker before it."""
        host, colon, port = self._settings.get("metrics.listener", "").rpartition(":")
        number = int(port) if port.isdecimal() else 0
        return {"metrics.listener": f"{host}{colon}{number + broker_id - 1}"} if number else {}
