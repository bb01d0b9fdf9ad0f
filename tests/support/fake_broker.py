"""Brokers that misbehave on purpose: a scripted one, and a proxy that cuts connections in front of a real one.

`FakeBroker` answers each request by a function per API key, so that a test can produce answers that a real broker gives
only in a bad moment. `CuttingProxy` passes bytes between clients and a broker and breaks a connection after a given
number of them. Both listen on a free port of this machine and end with their `with` block.
"""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self

from millrace.wire.codec import decode
from millrace.wire.frame import RequestHeader, encode_response, read_request_header
from millrace.wire.keys import ApiKey
from millrace.wire.messages import request_class
from millrace.wire.messages.api_versions import ApiVersionsResponse
from millrace.wire.messages.cluster import MetadataResponse
from millrace.wire.schema import Response

HOST = "127.0.0.1"

Answer = Callable[[Any], Response | type[ConnectionError] | None]
"""From a request to its response; None for no response, ConnectionError to hang up."""


class _Listener:
    """A listening socket with a thread per connection."""

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._peers: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._acceptor.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join(10)
        for peer in self._peers:
            _hang_up(peer)
        for thread in self._threads:
            thread.join(10)

    @property
    def bootstrap(self) -> str:
        return f"{HOST}:{self.port}"

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            self._peers.append(peer)
            self._start(self._serve, peer)

    def _start(self, work: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self, peer: socket.socket) -> None:
        raise NotImplementedError


class FakeBroker(_Listener):
    """Answers by `answers`; a key that is not there is not offered. `seen` has what was asked, in order."""

    def __init__(self, answers: dict[ApiKey, Answer] | None = None, *, context: ssl.SSLContext | None = None) -> None:
        super().__init__()
        self.answers = answers or {}
        self.seen: list[tuple[ApiKey, Any]] = []
        self.max_versions: dict[ApiKey, int] = {}
        self._context = context

    def asked(self, key: ApiKey) -> list[Any]:
        return [request for asked, request in self.seen if asked is key]

    def _serve(self, peer: socket.socket) -> None:
        try:
            if self._context is not None:
                peer = self._context.wrap_socket(peer, server_side=True, do_handshake_on_connect=False)
                try:
                    peer.do_handshake()
                except ssl.SSLError:
                    _turn_away(peer)
                    return
            with peer, peer.makefile("rb") as stream:
                while size := stream.read(4):
                    reply = self._answer(stream.read(struct.unpack(">i", size)[0]))
                    if reply is None:
                        continue
                    if not reply:
                        _hang_up(peer)
                        return
                    peer.sendall(reply)
        except OSError:
            _hang_up(peer)

    def _answer(self, frame: bytes) -> bytes | None:
        header, pos = read_request_header(frame)
        key = ApiKey(header.api_key)
        request, _ = decode(request_class(key), header.api_version, frame, pos)
        self.seen.append((key, request))
        if key is ApiKey.API_VERSIONS:
            return self._encoded(header, self._offered())
        response = self.answers[key](request)
        if response is ConnectionError:
            return b""
        return None if response is None else self._encoded(header, response)

    def _encoded(self, header: RequestHeader, response: Any) -> bytes:
        return encode_response(header.correlation_id, header.api_version, response)

    def _offered(self) -> ApiVersionsResponse:
        return ApiVersionsResponse(
            api_keys=[
                ApiVersionsResponse.ApiVersion(
                    api_key=key,
                    min_version=request_class(key).min_version,
                    max_version=self.max_versions.get(key, request_class(key).max_version),
                )
                for key in (ApiKey.API_VERSIONS, *self.answers)
            ]
        )


def metadata(brokers: Iterable[_Listener], leaders: dict[str, list[int]], *, epoch: int = 0) -> MetadataResponse:
    """Brokers with ids from 1 on, and topics with the leader of each partition; -1 for none."""
    return MetadataResponse(
        brokers=[
            MetadataResponse.MetadataResponseBroker(node_id=number, host=HOST, port=broker.port)
            for number, broker in enumerate(brokers, 1)
        ],
        topics=[
            MetadataResponse.MetadataResponseTopic(
                name=name,
                partitions=[
                    MetadataResponse.MetadataResponsePartition(
                        partition_index=index, leader_id=leader, leader_epoch=epoch
                    )
                    for index, leader in enumerate(indexes)
                ],
            )
            for name, indexes in leaders.items()
        ],
    )


class CuttingProxy(_Listener):
    """In front of the broker at `target` (set it before the first client comes).

    Each number of `cuts` is for one connection, in the order in which they come: it is broken when so many bytes have
    come back from the broker. Later connections are left alone.
    """

    def __init__(self, cuts: Iterable[int] = ()) -> None:
        super().__init__()
        self.target = 0
        self.cut = 0
        self.cuts: Iterator[int] = iter(cuts)

    def _serve(self, peer: socket.socket) -> None:
        limit = next(self.cuts, -1)
        try:
            broker = socket.create_connection((HOST, self.target))
        except OSError:
            _hang_up(peer)
            return
        self._peers.append(broker)
        self._start(self._pass_on, peer, broker, -1)
        self._pass_on(broker, peer, limit)

    def _pass_on(self, source: socket.socket, sink: socket.socket, limit: int) -> None:
        passed = 0
        try:
            while data := source.recv(65536):
                if 0 <= limit <= passed + len(data):
                    sink.sendall(data[: limit - passed])
                    self.cut += 1
                    break
                passed += len(data)
                sink.sendall(data)
        except OSError:
            pass
        _hang_up(source)
        _hang_up(sink)


def _turn_away(peer: socket.socket) -> None:
    """Close after the peer has: with something of it unread, the reason that it was sent would be lost on the way."""
    peer.settimeout(5)
    peer.shutdown(socket.SHUT_WR)
    while peer.recv(4096):
        pass
    peer.close()


def _hang_up(peer: socket.socket) -> None:
    try:
        peer.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    peer.close()
