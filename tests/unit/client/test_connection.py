"""Both kinds of connection against a scripted broker on a real socket."""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from millrace.client import versions
from millrace.client.blocking import BlockingConnection
from millrace.client.connection import Connection
from millrace.clock import ManualClock
from millrace.errors import ApiError, ErrorCode, ProtocolError
from millrace.local.ports import free_ports
from millrace.wire.codec import decode, encode
from millrace.wire.frame import RequestHeader, encode_response, read_request_header
from millrace.wire.keys import ApiKey
from millrace.wire.messages import request_class
from millrace.wire.messages.api_versions import ApiVersionsResponse
from millrace.wire.messages.cluster import MetadataRequest, MetadataResponse
from millrace.wire.messages.groups import HeartbeatRequest, HeartbeatResponse
from millrace.wire.messages.produce import ProduceRequest

Answer = Callable[[RequestHeader, Any], bytes | None]

OFFERED = ApiVersionsResponse(
    api_keys=[
        ApiVersionsResponse.ApiVersion(api_key=ApiKey.API_VERSIONS, min_version=0, max_version=4),
        ApiVersionsResponse.ApiVersion(api_key=ApiKey.METADATA, min_version=0, max_version=9),
        ApiVersionsResponse.ApiVersion(api_key=ApiKey.HEARTBEAT, min_version=0, max_version=99),
        ApiVersionsResponse.ApiVersion(api_key=ApiKey.PRODUCE, min_version=0, max_version=8),
        ApiVersionsResponse.ApiVersion(api_key=ApiKey.END_TXN, min_version=90, max_version=99),
    ]
)


def answer(header: RequestHeader, request: Any) -> bytes | None:
    """A broker that knows its versions, echoes a group id as an error code, and names itself by the client's id."""
    if header.api_key == ApiKey.API_VERSIONS:
        return encode_response(header.correlation_id, header.api_version, OFFERED)
    if header.api_key == ApiKey.HEARTBEAT:
        response = HeartbeatResponse(error_code=int(request.group_id))
        return encode_response(header.correlation_id, header.api_version, response)
    if header.api_key == ApiKey.METADATA:
        return encode_response(header.correlation_id, header.api_version, MetadataResponse(cluster_id=header.client_id))
    return None


class Broker:
    """A listening socket in a thread; each connection's requests go through `answer`, one after another."""

    def __init__(self, script: Answer) -> None:
        self._script = script
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.seen: list[RequestHeader] = []
        self._peers: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for peer in self._peers:
            try:
                peer.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self._thread.join(10)

    def _accept(self) -> None:
        workers = []
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                break
            self._peers.append(peer)
            worker = threading.Thread(target=self._serve, args=(peer,), daemon=True)
            worker.start()
            workers.append(worker)
        for worker in workers:
            worker.join(10)

    def _serve(self, peer: socket.socket) -> None:
        try:
            with peer, peer.makefile("rb") as stream:
                while size := stream.read(4):
                    frame = stream.read(struct.unpack(">i", size)[0])
                    header, pos = read_request_header(frame)
                    self.seen.append(header)
                    request = None
                    if header.api_version <= request_class(header.api_key).max_version:
                        request, _ = decode(request_class(header.api_key), header.api_version, frame, pos)
                    reply = self._script(header, request)
                    if reply == b"":
                        return
                    if reply is not None:
                        peer.sendall(reply)
        except OSError:
            pass


@pytest.fixture
def start() -> Iterator[Callable[[Answer], Broker]]:
    brokers = []

    def make(script: Answer) -> Broker:
        brokers.append(Broker(script))
        return brokers[-1]

    yield make
    for broker in brokers:
        broker.close()


class Async:
    """The asyncio connection behind the blocking one's interface, so that one test serves both."""

    def __init__(self, port: int, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._port = port
        self._options = options
        self._connection: Connection | None = None

    def _run(self, work: Callable[[Connection], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            if self._connection is None or self._connection.is_closed:
                self._connection = await Connection.open("127.0.0.1", self._port, **self._options)
            return await work(self._connection)

        return self._loop.run_until_complete(run())

    def request(self, *args: Any, **options: Any) -> Any:
        return self._run(lambda connection: connection.request(*args, **options))

    def send_raw(self, data: bytes) -> None:
        self._run(lambda connection: connection.send_raw(data))

    def read_raw(self, **options: Any) -> Any:
        return self._run(lambda connection: connection.read_raw(**options))

    def close(self) -> None:
        if self._connection is not None:
            self._loop.run_until_complete(self._connection.close())
        self._loop.close()


@pytest.fixture(params=["asyncio", "blocking"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make(port: int, **options: Any) -> Any:
        connection = (
            Async(port, **options) if request.param == "asyncio" else BlockingConnection("127.0.0.1", port, **options)
        )
        made.append(connection)
        return connection

    yield make
    for connection in made:
        connection.close()


def test_request_at_the_newest_common_version(start: Any, connect: Any) -> None:
    broker = start(answer)
    connection = connect(broker.port, client_id="me")
    assert connection.request(MetadataRequest()) == MetadataResponse(cluster_id="me")
    assert connection.request(HeartbeatRequest(group_id="7")) == HeartbeatResponse(error_code=7)
    assert connection.request(HeartbeatRequest(group_id="8"), 0).error_code == 8
    assert [(header.api_key, header.api_version) for header in broker.seen] == [(18, 4), (3, 9), (12, 4), (12, 0)]


def test_versions_without_overlap(start: Any, connect: Any) -> None:
    connection = connect(start(answer).port)
    for key in (ApiKey.END_TXN, ApiKey.FETCH):
        with pytest.raises(ApiError) as caught:
            connection.request(request_class(key)())
        assert caught.value.code is ErrorCode.UNSUPPORTED_VERSION


def test_an_older_broker_is_asked_again(start: Any, connect: Any) -> None:
    def older(header: RequestHeader, request: Any) -> bytes | None:
        if header.api_key == ApiKey.API_VERSIONS and header.api_version > 2:
            refusal = ApiVersionsResponse(
                error_code=ErrorCode.UNSUPPORTED_VERSION,
                api_keys=[ApiVersionsResponse.ApiVersion(api_key=ApiKey.API_VERSIONS, min_version=0, max_version=2)],
            )
            return encode_response(header.correlation_id, 0, refusal)
        return answer(header, request)

    broker = start(older)
    assert connect(broker.port).request(HeartbeatRequest(group_id="3")).error_code == 3
    assert [header.api_version for header in broker.seen] == [4, 2, 4]


def test_a_broker_that_refuses_for_ever(start: Any, connect: Any) -> None:
    def refuse(header: RequestHeader, request: Any) -> bytes:
        return encode_response(header.correlation_id, 0, ApiVersionsResponse(error_code=ErrorCode.UNSUPPORTED_VERSION))

    with pytest.raises(ProtocolError):
        connect(start(refuse).port).request(HeartbeatRequest())

    def denied(header: RequestHeader, request: Any) -> bytes:
        return encode_response(header.correlation_id, 4, ApiVersionsResponse(error_code=31))

    with pytest.raises(ApiError) as caught:
        connect(start(denied).port).request(HeartbeatRequest())
    assert caught.value.code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED


def test_nobody_listens(connect: Any) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    with pytest.raises(ApiError) as caught:
        connect(port).request(HeartbeatRequest())
    assert caught.value.code is ErrorCode.NETWORK_EXCEPTION


def test_the_broker_hangs_up(start: Any, connect: Any) -> None:
    def hang_up(header: RequestHeader, request: Any) -> bytes | None:
        return b"" if header.api_key == ApiKey.METADATA else answer(header, request)

    connection = connect(start(hang_up).port)
    assert connection.request(HeartbeatRequest(group_id="1")).error_code == 1
    with pytest.raises(ApiError) as caught:
        connection.request(MetadataRequest())
    assert caught.value.code is ErrorCode.NETWORK_EXCEPTION
    assert connection.request(HeartbeatRequest(group_id="2")).error_code == 2  # on a new connection


def test_no_answer_in_time(start: Any, connect: Any) -> None:
    def silent(header: RequestHeader, request: Any) -> bytes | None:
        return None if header.api_key == ApiKey.METADATA else answer(header, request)

    connection = connect(start(silent).port)
    with pytest.raises(ApiError) as caught:
        connection.request(MetadataRequest(), timeout_ms=30)
    assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT
    assert connection.request(HeartbeatRequest(group_id="2")).error_code == 2


def test_produce_without_acks_has_no_answer(start: Any, connect: Any) -> None:
    broker = start(answer)
    connection = connect(broker.port)
    assert connection.request(ProduceRequest(acks=0)) is None
    assert connection.request(HeartbeatRequest(group_id="1")).error_code == 1
    assert [header.api_key for header in broker.seen] == [18, 0, 12]


@pytest.mark.parametrize(
    "reply",
    [b"\xff\xff\xff\xff", struct.pack(">i", 2) + b"xx", "left over", "truncated"],
    ids=["size", "short", "left over", "truncated"],
)
def test_bytes_that_are_not_the_protocol(start: Any, connect: Any, reply: bytes | str) -> None:
    def garbage(header: RequestHeader, request: Any) -> bytes | None:
        if header.api_key != ApiKey.METADATA:
            return answer(header, request)
        if isinstance(reply, bytes):
            return reply
        body = struct.pack(">i", header.correlation_id) + b"\0" + encode(MetadataResponse(), header.api_version)
        body = body + b"x" if reply == "left over" else body[:-2]
        return struct.pack(">i", len(body)) + body

    connection = connect(start(garbage).port)
    with pytest.raises(ProtocolError):
        connection.request(MetadataRequest())


def test_raw_bytes(start: Any, connect: Any) -> None:
    connection = connect(start(answer).port, negotiate=False)
    frame = struct.pack(">hhih", ApiKey.API_VERSIONS, 0, 4711, -1)
    connection.send_raw(struct.pack(">i", len(frame)) + frame)
    reply = connection.read_raw()
    assert reply == struct.pack(">i", 4711) + encode(OFFERED, 0)
    assert connection.request(HeartbeatRequest(group_id="5"), 4).error_code == 5
    with pytest.raises(ApiError) as caught:
        connection.read_raw(timeout_ms=20)
    assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT


def test_a_blocking_connection_is_its_settings_when_pickled(start: Any) -> None:
    broker = start(answer)
    with BlockingConnection("127.0.0.1", broker.port, client_id="moved") as connection:
        assert connection.offered[ApiKey.METADATA] == versions.VersionRange(0, 9)
        with pickle.loads(pickle.dumps(connection)) as other:
            assert "idle" in repr(other)
            assert other.request(MetadataRequest()).cluster_id == "moved"
            assert "connected" in repr(other)


async def test_requests_overlap_and_answers_find_them(start: Any) -> None:
    held: list[bytes] = []

    def backwards(header: RequestHeader, request: Any) -> bytes | None:
        reply = answer(header, request)
        if header.api_key != ApiKey.HEARTBEAT or reply is None:
            return reply
        held.append(reply)
        return b"".join(reversed(held)) if len(held) == 5 else None

    async with await Connection.open("127.0.0.1", start(backwards).port) as connection:
        replies = await asyncio.gather(*(connection.request(HeartbeatRequest(group_id=str(n))) for n in range(5)))
        assert [reply.error_code for reply in replies] == [0, 1, 2, 3, 4]


async def test_a_late_answer_is_dropped(start: Any) -> None:
    held: list[bytes] = []

    def late(header: RequestHeader, request: Any) -> bytes | None:
        reply = answer(header, request)
        if header.api_key == ApiKey.METADATA and reply is not None:
            held.append(reply)
            return None
        return b"".join([*held, reply]) if reply is not None else None

    clock = ManualClock()
    async with await Connection.open("127.0.0.1", start(late).port, clock=clock) as connection:
        slow = asyncio.create_task(connection.request(MetadataRequest(), timeout_ms=1000))
        cancelled = asyncio.create_task(connection.request(MetadataRequest()))
        await asyncio.sleep(0)
        clock.advance(0.999)
        assert not slow.done()
        clock.advance(0.001)
        cancelled.cancel()
        with pytest.raises(ApiError) as caught:
            await slow
        assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert (await connection.request(HeartbeatRequest(group_id="9"))).error_code == 9
        with pytest.raises(ApiError):
            reading = asyncio.create_task(connection.read_raw(timeout_ms=5))
            await asyncio.sleep(0)
            clock.advance(1)
            await reading


async def test_close_fails_what_is_under_way(start: Any) -> None:
    def silent(header: RequestHeader, request: Any) -> bytes | None:
        return None if header.api_key == ApiKey.METADATA else answer(header, request)

    connection = await Connection.open("127.0.0.1", start(silent).port)
    assert "0 under way" in repr(connection)
    waiting = asyncio.create_task(connection.request(MetadataRequest()))
    await asyncio.sleep(0)
    assert "1 under way" in repr(connection)
    await connection.close()
    await connection.close()
    assert "closed" in repr(connection)
    for failing in (waiting, connection.request(MetadataRequest()), connection.read_raw()):
        with pytest.raises(ApiError) as caught:
            await failing
        assert caught.value.code is ErrorCode.NETWORK_EXCEPTION


async def test_open_gives_up_in_time() -> None:
    clock = ManualClock()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        opening = asyncio.create_task(Connection.open("127.0.0.1", mute.getsockname()[1], timeout_ms=500, clock=clock))
        while not clock._timers:
            await asyncio.sleep(0)
        clock.advance(0.5)
        with pytest.raises(ApiError) as caught:
            await opening
        assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT
