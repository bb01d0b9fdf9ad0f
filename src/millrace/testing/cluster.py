"""Brokers inside the test's own process: real sockets, real log files, on a thread and an event loop of their own.

    with Cluster() as cluster:
        cluster.create_topic("orders", partitions=3)
        client = AnyKafkaClient(cluster.bootstrap_servers)

`Cluster(brokers=3)` is a cluster that replicates and elects leaders; `stop_broker(2)` and `start_broker(2)` let one go
and come back. Made for speed, not for durability: metadata are kept in memory, nothing waits for a disk flush, and a
group's first rebalance does not wait for more members. Not here: a broker that can be killed; a crash needs a process
of its own.

Invariants: the loop lives on the cluster's thread from `start` to `close`, and only that thread touches the brokers;
after `close` there is no thread, socket or file left. The brokers are guests in the process: they hold few descriptors.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import uvloop

from millrace.broker import Broker
from millrace.config import BrokerConfig
from millrace.errors import ApiError, ConfigError, ErrorCode
from millrace.metadata.embedded import Database, EmbeddedStore
from millrace.storage.files import Files
from millrace.wire.frame import RequestHeader, decode_response, encode_request
from millrace.wire.keys import ApiKey
from millrace.wire.messages.topics import CreateTopicsRequest, CreateTopicsResponse
from millrace.wire.schema import Request, Response

HOST: Final = "127.0.0.1"
START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 30.0
DEFAULT_REPLICAS: Final = 3
MAX_OPEN_FILES: Final = 192
"""Of all brokers together: select(), which others in this process may call (py4j's callback server does, and dies),
knows only the first 1,024 descriptors."""
_REQUEST_TIMEOUT_MS: Final = 10_000
_CREATE_TOPICS_VERSION: Final = 7

T = TypeVar("T")
R = TypeVar("R", bound=Response)


class Cluster:
    """Brokers in this process, numbered from 1. `start` and `close`, or use it as a context manager."""

    def __init__(
        self, brokers: int = 1, *, settings: Mapping[str, str] | None = None, racks: Sequence[str] | None = None
    ) -> None:
        """`settings` are broker settings by their Kafka names; they win over the ones chosen here.

        `racks` gives each broker its `broker.rack`, the first one to broker 1.
        """
        if brokers < 1:
            raise ConfigError(f"Cluster(brokers={brokers}): there must be at least one")
        if racks is not None and len(racks) != brokers:
            raise ConfigError(f"Cluster(brokers={brokers}, racks=...): name one rack per broker, not {len(racks)}")
        self._settings = dict(settings or {})
        self._racks = dict(enumerate(racks or (), start=1))
        self._ports = dict.fromkeys(range(1, brokers + 1), 0)
        self._home: tempfile.TemporaryDirectory[str] | None = None
        self._database = Database()
        self._brokers: dict[int, Broker] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Event | None = None
        self._serving: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        state = self.bootstrap_servers if self._brokers else "not running"
        return f"Cluster({state})"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def bootstrap_servers(self) -> str:
        """What a client is told: `127.0.0.1:PORT,...`. It stays the same over `restart`."""
        if self._thread is None:
            raise RuntimeError("the cluster is not running: use it in a with statement, or call start()")
        return ",".join(f"{HOST}:{port}" for port in self._ports.values())

    def bootstrap_servers_of(self, listener: str) -> str:
        """What a client of the named listener is told, where `settings` have several."""
        ports = [
            each.port for broker in self._brokers.values() for each in broker.listeners if each.name == listener.upper()
        ]
        return ",".join(f"{HOST}:{port}" for port in ports)

    def metrics_url_of(self, broker_id: int) -> str:
        """Where a broker tells of itself, if `settings` have a `metrics.listener`: 127.0.0.1:0 for one each."""
        url = self._brokers[broker_id].metrics_url
        if url is None:
            raise RuntimeError("the cluster has no metrics: give it the setting metrics.listener=127.0.0.1:0")
        return url

    @property
    def data_dir(self) -> Path:
        """Where the first broker keeps its logs."""
        return self.data_dir_of(1)

    def data_dir_of(self, broker_id: int) -> Path:
        """Where a broker keeps its logs."""
        if self._home is None:
            raise RuntimeError("the cluster is not running")
        home = Path(self._home.name)
        return home if len(self._ports) == 1 else home / f"broker-{broker_id}"

    def start(self) -> None:
        """Start the brokers; when this returns, clients can connect.

        Raises what a broker raised, or RuntimeError where they are not ready in a minute, and leaves nothing.
        """
        if self._thread is not None:
            raise RuntimeError("the cluster is running already")
        self._home = tempfile.TemporaryDirectory(prefix="millrace-", ignore_cleanup_errors=True)
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="millrace-cluster", daemon=True)
        self._thread.start()
        try:
            started.result(START_TIMEOUT_S)
        except BaseException as error:
            too_late = not started.done()
            if too_late and self._loop is not None and self._serving is not None:
                self._loop.call_soon_threadsafe(self._serving.cancel)
            self._finish()
            if too_late and isinstance(error, TimeoutError):
                raise RuntimeError(f"the brokers were not ready within {START_TIMEOUT_S:.0f} s") from None
            raise

    def close(self) -> None:
        """Stop the brokers, end their thread and remove their data. Harmless when they are not running."""
        if self._loop is not None and self._closing is not None:
            self._loop.call_soon_threadsafe(self._closing.set)
        self._finish()

    def restart(self) -> None:
        """Stop the brokers cleanly and start them again on the same ports, with the same data."""
        self._on_loop(self._restart())

    def stop_broker(self, broker_id: int) -> None:
        """Stop one broker cleanly: it hands its leadership over first."""
        self._on_loop(self._stop_broker(broker_id))

    def start_broker(self, broker_id: int) -> None:
        """Start a stopped broker again, on the same port, with the same data."""
        self._on_loop(self._start_broker(broker_id))

    def create_topic(
        self, name: str, partitions: int = 1, *, replication_factor: int = -1, config: Mapping[str, str] | None = None
    ) -> None:
        """Create a topic and return when clients can use it; `ApiError` when the broker refuses.

        Unless told otherwise it has three replicas, or as many as there are brokers.
        """
        request = CreateTopicsRequest(
            topics=[
                CreateTopicsRequest.CreatableTopic(
                    name=name,
                    num_partitions=partitions,
                    replication_factor=replication_factor,
                    configs=[
                        CreateTopicsRequest.CreatableTopicConfig(name=key, value=value)
                        for key, value in (config or {}).items()
                    ],
                )
            ],
            timeout_ms=_REQUEST_TIMEOUT_MS,
        )
        (topic,) = self._ask(ApiKey.CREATE_TOPICS, _CREATE_TOPICS_VERSION, request, CreateTopicsResponse).topics
        if topic.error_code:
            raise ApiError(ErrorCode(topic.error_code), topic.error_message or f"topic '{name}'")

    # On the cluster's thread.

    def _run(self, started: Future[None]) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                runner.run(self._serve(started))
            except BaseException as error:
                if started.done():
                    raise
                started.set_exception(error)

    async def _serve(self, started: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._serving = asyncio.current_task()
        self._closing = asyncio.Event()
        await self._database.attach()  # held by the cluster, so that metadata in memory outlive a restart
        try:
            for broker_id in self._ports:
                await self._start_broker(broker_id)
            started.set_result(None)
            await self._closing.wait()
        finally:
            await self._stop_brokers()
            await self._database.detach()

    async def _start_broker(self, broker_id: int) -> None:
        if broker_id in self._brokers:
            raise RuntimeError(f"broker {broker_id} is running")
        replicas = min(len(self._ports), DEFAULT_REPLICAS)
        replicated = {"default.replication.factor": str(replicas), "min.insync.replicas": str(max(replicas - 1, 1))}
        config = BrokerConfig.load(
            None,
            {
                "node.id": str(broker_id),
                "listeners": f"PLAINTEXT://{HOST}:{self._ports[broker_id]}",
                "log.dirs": str(self.data_dir_of(broker_id)),
                "flush.mode": "os",
                "group.initial.rebalance.delay.ms": "0",
                "metrics.listener": "",
                **(replicated if replicas > 1 else {}),
                **({"broker.rack": self._racks[broker_id]} if self._racks else {}),
                **self._settings,
            },
        )
        # Data that are thrown away need no flush, not even at a clean stop.
        files = Files(MAX_OPEN_FILES // len(self._ports), sync=False)
        broker = Broker(config, store=EmbeddedStore(self._database), files=files)
        await broker.start()
        self._brokers[broker_id] = broker
        # Not `broker.bootstrap`: a test may advertise another address, for a proxy in between.
        self._ports[broker_id] = broker.port

    async def _stop_broker(self, broker_id: int, *, linger: bool = True) -> None:
        broker = self._brokers.pop(broker_id, None)
        if broker is not None:
            await broker.stop(linger=linger)

    async def _stop_brokers(self) -> None:
        for broker_id in list(self._brokers):
            await self._stop_broker(broker_id, linger=False)

    async def _restart(self) -> None:
        await self._stop_brokers()
        for broker_id in self._ports:
            await self._start_broker(broker_id)

    # On the caller's thread.

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            work.close()
            raise RuntimeError("the cluster is not running")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _finish(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(STOP_TIMEOUT_S)
            if thread.is_alive():
                raise RuntimeError(f"the brokers did not stop within {STOP_TIMEOUT_S:.0f} s")
        self._loop = self._closing = self._serving = None
        self._ports = dict.fromkeys(self._ports, 0)
        self._database = Database()
        home, self._home = self._home, None
        if home is not None:
            home.cleanup()

    def _ask(self, key: ApiKey, version: int, request: Request, response_type: type[R]) -> R:
        """One request on a connection of its own."""
        port = next(self._ports[broker_id] for broker_id in self._brokers)
        header = RequestHeader(api_key=key, api_version=version, correlation_id=1, client_id="millrace-testing")
        with socket.create_connection((HOST, port), timeout=_REQUEST_TIMEOUT_MS / 1000 + 5) as connection:
            connection.sendall(encode_request(header, request))
            with connection.makefile("rb") as stream:
                frame = stream.read(int.from_bytes(stream.read(4)))
        _, response = decode_response(response_type, version, frame)
        return response
