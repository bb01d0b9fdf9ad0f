"""Generated images and change-sets, and controllers on a store in memory: one alone, or several that talk."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

from hypothesis import strategies as st

from millrace.cluster.controller import Controller, IsrProposal
from millrace.cluster.dialer import broker_named
from millrace.cluster.elections import LogEnd, PartitionKey
from millrace.cluster.image import ClusterImage
from millrace.cluster.planning import NewTopic
from millrace.cluster.survey import Questions, Survey
from millrace.config import BrokerConfig
from millrace.errors import ApiError
from millrace.metadata.deltas import (
    BrokerRegistered,
    Change,
    ClusterCreated,
    ControllerChanged,
    Endpoint,
    PartitionState,
)
from millrace.metadata.embedded import Database, EmbeddedStore
from millrace.metadata.store import BrokerRegistration, Fenced, Membership, MetadataStore, SessionState
from millrace.security.acls import Acl, Operation, PatternKind, Permission, ResourceKind
from millrace.security.scram import ScramCredential
from millrace.security.tokens import DelegationToken
from millrace.wire.codec import decode
from millrace.wire.frame import encode_response, read_request_header
from millrace.wire.keys import ApiKey
from millrace.wire.messages import request_class
from millrace.wire.messages.brokers import (
    AllocateProducerIdsRequest,
    AllocateProducerIdsResponse,
    BrokerHeartbeatRequest,
    BrokerHeartbeatResponse,
)
from millrace.wire.messages.partitions import AlterPartitionRequest, AlterPartitionResponse
from millrace.wire.messages.topics import CreateTopicsRequest, CreateTopicsResponse
from millrace.wire.schema import Request, Response

ENDPOINT = Endpoint("PLAINTEXT", "broker.example", 9092)

small_ints = st.integers(min_value=-1, max_value=2**31 - 1)
texts = st.text(max_size=12)
partition_states = st.builds(
    PartitionState,
    st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True).map(tuple),
    st.lists(st.integers(0, 9), max_size=3, unique=True).map(tuple),
    st.integers(-1, 9),
    st.integers(0, 100),
    st.integers(0, 100),
    st.lists(st.integers(0, 9), max_size=2, unique=True).map(tuple),
    st.lists(st.integers(0, 9), max_size=2, unique=True).map(tuple),
)
endpoints = st.builds(Endpoint, texts, texts, st.integers(0, 65535), st.sampled_from(["PLAINTEXT", "SSL"]))
secrets = st.binary(max_size=8)
credentials = st.builds(ScramCredential, secrets, secrets, secrets, st.integers(4096, 16384))
acls = st.builds(
    Acl,
    st.sampled_from([ResourceKind.TOPIC, ResourceKind.GROUP]),
    st.sampled_from(["a", "ab", "*"]),
    st.sampled_from([PatternKind.LITERAL, PatternKind.PREFIXED]),
    st.sampled_from(["User:a", "User:*"]),
    st.just("*"),
    st.sampled_from([Operation.READ, Operation.ALL]),
    st.sampled_from([Permission.ALLOW, Permission.DENY]),
)
tokens = st.builds(
    DelegationToken,
    st.sampled_from(["t1", "t2", "t3"]),
    texts,
    texts,
    st.lists(texts, max_size=2).map(tuple),
    *[st.integers(0, 2**62)] * 3,
)
uuids = st.integers(min_value=2, max_value=2**128 - 1).map(lambda number: uuid.UUID(int=number))


def cluster_of(*broker_ids: int, fenced: tuple[int, ...] = (), racks: Mapping[int, str] | None = None) -> ClusterImage:
    """An image with these brokers and no topics; the first is controller."""
    changes: list[Change] = [ClusterCreated("test-cluster"), ControllerChanged(broker_ids[0], 1)]
    changes.extend(
        BrokerRegistered(broker_id, 100 + broker_id, (ENDPOINT,), (racks or {}).get(broker_id), broker_id in fenced)
        for broker_id in broker_ids
    )
    return ClusterImage().apply(tuple(changes))


@asynccontextmanager
async def running_controller(
    store: MetadataStore | None = None,
    settings: Mapping[str, str] | None = None,
    *,
    deltas_per_snapshot: int = 1000,
) -> AsyncIterator[Controller]:
    """A controller that has started and stops at the end."""
    controller = Controller(
        store or EmbeddedStore(), BrokerConfig(dict(settings or {})), deltas_per_snapshot=deltas_per_snapshot
    )
    await controller.load()
    await controller.start([ENDPOINT])
    try:
        yield controller
    finally:
        await controller.stop()


class ExpiringStore(EmbeddedStore):
    """A session that can be cut off and that can end, as one with ZooKeeper can."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._states: asyncio.Queue[SessionState] = asyncio.Queue()
        self._connected = asyncio.Event()
        self._connected.set()
        self._lapsed: set[int] = set()
        self._epochs: set[int] = set()
        self.following = asyncio.Event()
        """Cleared, no delta arrives."""
        self.following.set()
        self.generation = 0
        """Raised, those who listen to the registrations hear nothing new, unless they listen afresh."""
        self.abandoned = False
        """Closed, it leaves its registration behind, as a killed process does until its session times out."""

    async def close(self) -> None:
        if not self.abandoned:
            await super().close()
        elif self._opened:
            self._opened = False
            self.database.announce()
            await self.database.detach()

    async def follow(self, after: int) -> AsyncGenerator[tuple[int, bytes], None]:
        async for delta in super().follow(after):
            await self.following.wait()
            yield delta

    async def membership(self) -> AsyncGenerator[Membership, None]:
        generation = self.generation
        async for membership in super().membership():
            if generation != self.generation:
                await asyncio.Event().wait()
            yield membership

    async def sessions(self) -> AsyncGenerator[SessionState, None]:
        yield SessionState.CONNECTED
        while True:
            yield await self._states.get()

    def suspend(self) -> None:
        self._connected.clear()
        self._states.put_nowait(SessionState.SUSPENDED)

    def reconnect(self) -> None:
        self._connected.set()
        self._states.put_nowait(SessionState.CONNECTED)

    def lapse(self) -> None:
        """The ensemble ends the session; the broker learns of it by `expire`."""
        self._lapsed |= self._epochs
        self.database.release(self)

    def expire(self) -> None:
        self.lapse()
        self._states.put_nowait(SessionState.EXPIRED)
        self.reconnect()

    async def elect(self, broker_id: int, *, replacing: int | None = None) -> int | None:
        await self._connected.wait()
        epoch = await super().elect(broker_id, replacing=replacing)
        if epoch is not None:
            self._epochs.add(epoch)
        return epoch

    async def register(self, registration: BrokerRegistration) -> int:
        await self._connected.wait()
        return await super().register(registration)

    async def append(self, delta: bytes, controller_epoch: int) -> int:
        await self._connected.wait()
        if controller_epoch in self._lapsed:
            raise Fenced("the session has expired")
        return await super().append(delta, controller_epoch)


class ControlServer:
    """Answers what brokers ask each other by calling a controller; listens on a free port of this machine."""

    def __init__(self) -> None:
        self.controller: Controller | None = None
        self.asked: list[Request] = []
        self.answering = asyncio.Event()
        """Cleared, it reads requests and says nothing."""
        self.answering.set()
        self._server: asyncio.Server | None = None
        self._port = 0
        self._writers: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint("PLAINTEXT", "127.0.0.1", self._port)

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Refuse connections from now on, and break those there are."""
        server, self._server = self._server, None
        if server is not None:
            # asyncio leaks a connection that it accepted in the turn in which the server is closed.
            for sock in server.sockets:
                asyncio.get_running_loop().remove_reader(sock.fileno())
            for _ in range(10):
                await asyncio.sleep(0)
            server.close()
            for writer, task in tuple(self._writers.items()):
                writer.transport.abort()
                task.cancel()
                await asyncio.wait([task])
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._writers[writer] = task
        try:
            while True:
                frame = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
                header, pos = read_request_header(frame)
                request, _ = decode(request_class(ApiKey(header.api_key)), header.api_version, frame, pos)
                self.asked.append(request)
                await self.answering.wait()
                answer = await self._answer(request, broker_named(header.client_id))
                writer.write(encode_response(header.correlation_id, header.api_version, answer))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            del self._writers[writer]
            writer.close()

    async def _answer(self, request: Request, caller: int | None) -> Response:
        controller = self.controller
        assert controller is not None
        try:
            match request:
                case AlterPartitionRequest():
                    return await self._alter_partition(controller, request)
                case AllocateProducerIdsRequest():
                    block = await controller.allocate_producer_ids(request.broker_id, request.broker_epoch)
                    return AllocateProducerIdsResponse(producer_id_start=block.start, producer_id_len=len(block))
                case BrokerHeartbeatRequest():
                    beat = await controller.heartbeat(
                        request.broker_id,
                        request.broker_epoch,
                        caller=caller,
                        want_fence=request.want_fence,
                        want_shut_down=request.want_shut_down,
                    )
                    return BrokerHeartbeatResponse(error_code=beat.error, is_fenced=beat.is_fenced)
                case CreateTopicsRequest():
                    return await self._create_topics(controller, request)
        except ApiError as error:
            match request:
                case AlterPartitionRequest():
                    return AlterPartitionResponse(error_code=error.code)
                case AllocateProducerIdsRequest():
                    return AllocateProducerIdsResponse(error_code=error.code)
                case BrokerHeartbeatRequest():
                    return BrokerHeartbeatResponse(error_code=error.code)
                case CreateTopicsRequest():
                    results = [
                        CreateTopicsResponse.CreatableTopicResult(name=topic.name, error_code=error.code)
                        for topic in request.topics
                    ]
                    return CreateTopicsResponse(topics=results)
        raise AssertionError(request)

    async def _alter_partition(self, controller: Controller, request: AlterPartitionRequest) -> AlterPartitionResponse:
        proposals = [
            IsrProposal(
                topic.topic_id,
                partition.partition_index,
                partition.leader_epoch,
                partition.partition_epoch,
                tuple((member.broker_id, member.broker_epoch) for member in partition.new_isr_with_epochs),
            )
            for topic in request.topics
            for partition in topic.partitions
        ]
        outcomes = await controller.alter_partition(request.broker_id, request.broker_epoch, proposals)
        topics = [
            AlterPartitionResponse.TopicData(
                topic_id=proposal.topic_id,
                partitions=[
                    AlterPartitionResponse.PartitionData(
                        partition_index=proposal.index,
                        error_code=outcome.error,
                        partition_epoch=outcome.state.partition_epoch if outcome.state else 0,
                    )
                ],
            )
            for proposal, outcome in zip(proposals, outcomes, strict=True)
        ]
        return AlterPartitionResponse(topics=topics)

    async def _create_topics(self, controller: Controller, request: CreateTopicsRequest) -> CreateTopicsResponse:
        wanted = [
            NewTopic(
                topic.name,
                topic.num_partitions,
                topic.replication_factor,
                configs=tuple((config.name, config.value) for config in topic.configs),
            )
            for topic in request.topics
        ]
        outcomes = await controller.create_topics(wanted)
        results = [
            CreateTopicsResponse.CreatableTopicResult(
                name=outcome.name or "", error_code=outcome.error.code if outcome.error else 0
            )
            for outcome in outcomes
        ]
        return CreateTopicsResponse(topics=results)


class ControlPlane:
    """Several controllers on one store in memory, each with a server; ends with its `async with` block."""

    def __init__(self, brokers: int = 3, settings: Mapping[str, str] | None = None, **options: Any) -> None:
        self.database = Database()
        self.controllers: dict[int, Controller] = {}
        self.stores: dict[int, ExpiringStore] = {}
        self.servers: dict[int, ControlServer] = {}
        self.log_ends: dict[int, LogEnd | None] = {}
        """What brokers say when they are asked for their logs, which they do not have."""
        self.surveys = 0
        """How often they were asked."""
        self._keeper = EmbeddedStore(self.database)  # keeps the memory alive while every broker is away
        self._brokers = brokers
        self._settings = dict(settings or {})
        self._options = options

    async def __aenter__(self) -> Self:
        await self._keeper.open()
        for broker_id in range(1, self._brokers + 1):
            await self.start(broker_id)
        return self

    async def __aexit__(self, *_: object) -> None:
        for broker_id in tuple(self.controllers):
            await self.stop(broker_id)
        for server in self.servers.values():
            await server.close()
        await self._keeper.close()
        for _turn in range(10):  # sockets that were hung up on are closed in the next turns of the loop
            await asyncio.sleep(0)

    async def start(self, broker_id: int) -> Controller:
        store = self.stores[broker_id] = ExpiringStore(self.database)
        config = BrokerConfig({**self._settings, "broker.id": str(broker_id)})
        controller = Controller(store, config, **self._options)
        server = self.servers.setdefault(broker_id, ControlServer())
        server.controller = controller
        await server.listen()
        await controller.load()
        self.controllers[broker_id] = controller
        async with asyncio.timeout(20):
            await controller.start([server.endpoint])
        controller.recover_with(lambda questions: self._survey(controller, questions))
        return controller

    async def _survey(self, controller: Controller, questions: Questions) -> Survey:
        self.surveys += 1
        ends: dict[PartitionKey, dict[int, LogEnd | None]] = {
            key: {each: self.log_ends.get(each, LogEnd(0, 0)) for each in brokers} for key, brokers in questions.items()
        }
        return Survey(ends, {each.broker_id: each.broker_epoch for each in controller.image.brokers.values()})

    async def stop(self, broker_id: int) -> None:
        """A clean end: its session ends with it."""
        await self.servers[broker_id].close()
        await self.controllers.pop(broker_id).stop()

    async def kill(self, broker_id: int) -> None:
        """An end like kill -9: its machine refuses connections, but its session lives on in the store."""
        await self.servers[broker_id].close()
        self.stores[broker_id].abandoned = True
        await self.controllers.pop(broker_id).stop()

    @property
    def leading(self) -> Controller:
        """The controller that reigns."""
        (leading,) = [controller for controller in self.controllers.values() if controller.is_controller]
        return leading

    async def wait_for_images(self, predicate: Callable[[ClusterImage], bool], timeout_s: float = 10) -> None:
        """Wait until every controller's image satisfies `predicate`; then all images must be the same."""
        for controller in self.controllers.values():
            await controller.wait_for_image(predicate, timeout_s)
        end = self.database.last_index
        for controller in self.controllers.values():
            await controller.wait_for_image(lambda image: image.index >= end, timeout_s)
