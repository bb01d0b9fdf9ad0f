"""What the demo runs on: one broker that needs nothing else, or a cluster with a ZooKeeper of its own.

Both are contexts with the same face: where clients connect, which processes there are, whether one ended by itself.
Not here: how processes are run (`demo.processes`, `local`), and what is done to them on purpose (`demo.failover`).
"""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Protocol, Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from millrace.demo import processes
from millrace.demo.failover import PartitionSeen
from millrace.local.cluster import LocalCluster

_ASK_TIMEOUT_S: Final = 2.0
_MOST_COPIES: Final = 3


class Brokers(Protocol):
    """One broker or several; started by entering, ended by leaving."""

    count: int
    bootstrap: str

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    @property
    def pids(self) -> list[int]:
        """The brokers that run."""
        ...

    def failure(self) -> str | None:
        """What ended although nobody wanted it to."""
        ...


def replication_factor(brokers: int) -> int:
    return min(_MOST_COPIES, brokers)


class OneBroker:
    """`millrace up`, with its metadata in a file of its own."""

    def __init__(self, home: Path) -> None:
        self.count = 1
        self.bootstrap = ""
        self._home = home
        self._log_path = home / "broker.log"
        self._stack = ExitStack()
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._process, self.bootstrap = self._stack.enter_context(processes.broker(self._home / "data", self._log_path))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def pids(self) -> list[int]:
        return [] if self._process is None else [self._process.pid]

    def failure(self) -> str | None:
        if self._process is None or self._process.poll() is None:
            return None
        return f"the broker ended with status {self._process.returncode}: {self._log_path}"


class BrokerCluster:
    """Several brokers and a ZooKeeper, each a process. A broker that was killed here is not missed by `failure`."""

    def __init__(self, home: Path, count: int) -> None:
        self.count = count
        self.bootstrap = ""
        """Every broker's address, also while one of them is away."""
        self._cluster = LocalCluster(home / "data", brokers=count)
        self._killed: set[int] = set()
        self._admin: AdminClient | None = None

    def __enter__(self) -> Self:
        self._cluster.__enter__()
        self.bootstrap = self._cluster.bootstrap
        return self

    def __exit__(self, *_: object) -> None:
        self._admin = None
        self._cluster.stop()

    @property
    def pids(self) -> list[int]:
        return [broker.pid for broker in self._cluster.brokers.values() if broker.pid is not None]

    def failure(self) -> str | None:
        for broker_id, broker in self._cluster.brokers.items():
            status = broker.exit_status
            if status is not None and broker_id not in self._killed:
                return f"broker {broker_id} ended with status {status}: {broker.log_path}"
        servers = self._cluster.zookeeper
        ended = servers.exited() if servers is not None else {}
        return f"ZooKeeper ended with status {ended[1]}: {servers.log_path(1)}" if servers and 1 in ended else None

    def kill(self, broker_id: int) -> None:
        """kill -9; returns when it is gone."""
        self._killed.add(broker_id)  # before it dies: another thread may look in between
        self._cluster.brokers[broker_id].kill()

    def launch(self, broker_id: int) -> None:
        """Start it again; returns at once."""
        self._cluster.brokers[broker_id].launch()
        self._killed.discard(broker_id)

    def partitions(self) -> list[PartitionSeen]:
        """Every partition as a running broker tells it; nothing if none answers now."""
        if self._admin is None:
            self._admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 2})
        try:
            topics = self._admin.list_topics(timeout=_ASK_TIMEOUT_S).topics
        except KafkaException:
            return []
        return [
            PartitionSeen(name, number, one.leader, tuple(one.replicas), tuple(one.isrs))
            for name, topic in topics.items()
            for number, one in topic.partitions.items()
        ]
