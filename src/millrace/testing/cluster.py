"""A broker inside the test's own process: real sockets, real log files, on a thread and an event loop of its own.

    with Cluster() as cluster:
        cluster.create_topic("orders", partitions=3)
        client = AnyKafkaClient(cluster.bootstrap_servers)

Made for speed, not for durability: metadata are kept in memory, nothing waits for a disk flush, and a group's first
rebalance does not wait for more members. Not here: a broker that can be killed; a crash needs a process of its own.

Invariants: the loop lives on the cluster's thread from `start` to `close`, and only that thread touches the broker;
after `close` there is no thread, socket or file left.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading
from collections.abc import Coroutine, Mapping
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
STOP_TIMEOUT_S: Final = 30.0
_REQUEST_TIMEOUT_MS: Final = 10_000
_CREATE_TOPICS_VERSION: Final = 7

T = TypeVar("T")
R = TypeVar("R", bound=Response)


class Cluster:
    """One broker in this process. `start` and `close`, or use it as a context manager."""

    def __init__(self, brokers: int = 1, *, settings: Mapping[str, str] | None = None) -> None:
        """`settings` are broker settings by their Kafka names; they win over the ones chosen here."""
        if brokers != 1:
            raise ConfigError(f"Cluster(brokers={brokers}): clusters of several brokers are not in this version")
        self._settings = dict(settings or {})
        self._port = 0
        self._home: tempfile.TemporaryDirectory[str] | None = None
        self._database = Database()
        self._broker: Broker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Event | None = None
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        state = self.bootstrap_servers if self._broker is not None else "not running"
        return f"<Cluster {state}>"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def bootstrap_servers(self) -> str:
        """What a client is told: `127.0.0.1:PORT`. It stays the same over `restart`."""
        if self._thread is None:
            raise RuntimeError("the cluster is not running: use it in a with statement, or call start()")
        return f"{HOST}:{self._port}"

    @property
    def data_dir(self) -> Path:
        """Where the broker keeps its logs."""
        if self._home is None:
            raise RuntimeError("the cluster is not running")
        return Path(self._home.name)

    def start(self) -> None:
        """Start the broker; when this returns, clients can connect. Raises what the broker raised, leaving nothing."""
        if self._thread is not None:
            raise RuntimeError("the cluster is running already")
        self._home = tempfile.TemporaryDirectory(prefix="millrace-", ignore_cleanup_errors=True)
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="millrace-cluster", daemon=True)
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self._finish()
            raise

    def close(self) -> None:
        """Stop the broker, end its thread and remove its data. Harmless when it is not running."""
        if self._loop is not None and self._closing is not None:
            self._loop.call_soon_threadsafe(self._closing.set)
        self._finish()

    def restart(self) -> None:
        """Stop the broker cleanly and start it again on the same port, with the same data."""
        self._on_loop(self._restart())

    def create_topic(
        self, name: str, partitions: int = 1, *, replication_factor: int = 1, config: Mapping[str, str] | None = None
    ) -> None:
        """Create a topic and return when clients can use it; `ApiError` when the broker refuses."""
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
        self._closing = asyncio.Event()
        await self._database.attach()  # held by the cluster, so that metadata in memory outlive a restart
        try:
            await self._start_broker()
            started.set_result(None)
            await self._closing.wait()
        finally:
            await self._stop_broker()
            await self._database.detach()

    async def _start_broker(self) -> None:
        config = BrokerConfig.load(
            None,
            {
                "node.id": "1",
                "listeners": f"PLAINTEXT://{HOST}:{self._port}",
                "log.dirs": str(self.data_dir),
                "flush.mode": "os",
                "group.initial.rebalance.delay.ms": "0",
                **self._settings,
            },
        )
        # Data that are thrown away need no flush, not even at a clean stop.
        broker = Broker(config, store=EmbeddedStore(self._database), files=Files(sync=False))
        await broker.start()
        self._broker = broker
        # Not `broker.bootstrap`: a test may advertise another address, for a proxy in between.
        self._port = broker.port

    async def _stop_broker(self) -> None:
        broker, self._broker = self._broker, None
        if broker is not None:
            await broker.stop()

    async def _restart(self) -> None:
        await self._stop_broker()
        await self._start_broker()

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
                raise RuntimeError(f"the broker did not stop within {STOP_TIMEOUT_S:.0f} s")
        self._loop = self._closing = None
        self._port = 0
        self._database = Database()
        home, self._home = self._home, None
        if home is not None:
            home.cleanup()

    def _ask(self, key: ApiKey, version: int, request: Request, response_type: type[R]) -> R:
        """One request on a connection of its own."""
        host, _, port = self.bootstrap_servers.rpartition(":")
        header = RequestHeader(api_key=key, api_version=version, correlation_id=1, client_id="millrace-testing")
        with socket.create_connection((host, int(port)), timeout=_REQUEST_TIMEOUT_MS / 1000 + 5) as connection:
            connection.sendall(encode_request(header, request))
            with connection.makefile("rb") as stream:
                frame = stream.read(int.from_bytes(stream.read(4)))
        _, response = decode_response(response_type, version, frame)
        return response
