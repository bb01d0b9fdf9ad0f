"""A synchronous connection to one broker, for code without an event loop, such as Spark executors.

One request at a time, one thread at a time; not for use on the event loop. The object pickles as its settings, without
its socket: it connects when it is first used, here or wherever it was sent. After a failure it is closed, and the next
request connects again.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from ssl import SSLContext
from typing import Any, Final, Self, TypeVar

from millrace.client import versions
from millrace.clock import SystemClock
from millrace.errors import ApiError, ErrorCode, ProtocolError
from millrace.wire.frame import FrameReader, RequestHeader, decode_response, encode_request
from millrace.wire.messages import response_class
from millrace.wire.messages.api_versions import ApiVersionsRequest
from millrace.wire.schema import Request

T = TypeVar("T")

DEFAULT_TIMEOUT_MS: Final = 30_000
MAX_RESPONSE_BYTES: Final = (1 << 31) - 1
_RECEIVE_BYTES: Final = 256 * 1024
_MAX_CORRELATION_ID: Final = (1 << 31) - 1
_CLOCK: Final = SystemClock()


class BlockingConnection:
    """`request` connects when needed; `close`, or leaving a `with` block, ends it."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        client_id: str | None = "millrace",
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
        ssl: SSLContext | None = None,
        negotiate: bool = True,
    ) -> None:
        self.host = host
        self.port = port
        self._client_id = client_id
        self._timeout_ms = timeout_ms
        self._ssl = ssl
        self._negotiate = negotiate
        self._reset()

    def __repr__(self) -> str:
        return f"BlockingConnection({self.host}:{self.port}, {'idle' if self._socket is None else 'connected'})"

    def __reduce__(self) -> tuple[Callable[..., BlockingConnection], tuple[Any, ...]]:
        if self._ssl is not None:
            raise TypeError("a connection with a TLS context cannot be pickled: make it where it is used")
        return _connection, (self.host, self.port, self._client_id, self._timeout_ms, self._negotiate)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def offered(self) -> versions.Offered:
        """What the broker serves; connects when that is not known yet."""
        self._connected()
        return self._offered

    def request(self, message: Request, version: int | None = None, *, timeout_ms: int | None = None) -> Any:
        """Send `message` and wait for its response; None at once for a Produce with acks=0.

        ApiError: NETWORK_EXCEPTION when there is no connection or it is lost, REQUEST_TIMED_OUT when no response came
        in time (the connection is closed then, for its response may still come), UNSUPPORTED_VERSION when the broker
        speaks no version of it.
        """
        self._connected()
        if version is None:
            version = versions.version_for(type(message), self._offered)
        frame = self._exchange(message, version, self._timeout_ms if timeout_ms is None else timeout_ms)
        if frame is None:
            return None
        try:
            return decode_response(response_class(message.api_key), version, frame)[1]
        except ProtocolError:
            self.close()
            raise

    def send_raw(self, data: bytes) -> None:
        """Write bytes as they are, for tests of the other side."""
        self._guarded(lambda connected: connected.sendall(data), self._timeout_ms)

    def read_raw(self, *, timeout_ms: int | None = None) -> bytes:
        """The next frame, without its size; for tests of the other side."""
        limit_ms = self._timeout_ms if timeout_ms is None else timeout_ms
        return bytes(self._guarded(lambda connected: self._next_frame(connected, limit_ms), limit_ms))

    def close(self) -> None:
        """End the connection; the next request makes a new one."""
        if self._socket is not None:
            self._socket.close()
        self._reset()

    def _reset(self) -> None:
        self._socket: socket.socket | None = None
        self._offered: versions.Offered = {}
        self._frames = FrameReader(MAX_RESPONSE_BYTES)
        self._ready: deque[memoryview] = deque()
        self._correlation_id = 0

    def _connected(self) -> socket.socket:
        if self._socket is not None:
            return self._socket
        try:
            plain = socket.create_connection((self.host, self.port), timeout=self._timeout_ms / 1000)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket = plain
            if self._ssl is not None:
                self._socket = self._ssl.wrap_socket(plain, server_hostname=self.host)
        except TimeoutError as error:
            self.close()
            raise ApiError(ErrorCode.REQUEST_TIMED_OUT, f"{self.host}:{self.port}: {error}") from error
        except OSError as error:
            self.close()
            raise ApiError(ErrorCode.NETWORK_EXCEPTION, f"{self.host}:{self.port}: {error}") from error
        if self._negotiate:
            self._learn_versions()
        return self._socket

    def _learn_versions(self) -> None:
        version: int | None = ApiVersionsRequest.max_version
        try:
            while version is not None:
                frame = self._exchange(versions.api_versions_request(), version, self._timeout_ms)
                assert frame is not None
                response, offered = versions.read_api_versions(frame, version)
                version = versions.older_api_versions(response, offered, version)
        except (ApiError, ProtocolError):
            self.close()
            raise
        self._offered = offered

    def _exchange(self, message: Request, version: int, timeout_ms: int) -> memoryview | None:
        self._correlation_id = (self._correlation_id + 1) & _MAX_CORRELATION_ID
        header = RequestHeader(message.api_key, version, self._correlation_id, self._client_id)
        raw = encode_request(header, message)

        def exchange(connected: socket.socket) -> memoryview | None:
            connected.sendall(raw)
            if not versions.is_answered(message):
                return None
            frame = self._next_frame(connected, timeout_ms)
            answered = int.from_bytes(frame[:4], "big", signed=True)
            if answered != header.correlation_id:
                raise ProtocolError(f"a response to request {answered}, {header.correlation_id} was asked")
            return frame

        return self._guarded(exchange, timeout_ms)

    def _guarded(self, work: Callable[[socket.socket], T], timeout_ms: int) -> T:
        """Do `work` on the socket; whatever goes wrong closes it and is told in the protocol's words."""
        connected = self._connected()
        try:
            connected.settimeout(timeout_ms / 1000)
            return work(connected)
        except TimeoutError:
            self.close()
            where = f"{self.host}:{self.port}"
            raise ApiError(ErrorCode.REQUEST_TIMED_OUT, f"nothing from {where} within {timeout_ms} ms") from None
        except OSError as error:
            self.close()
            raise ApiError(ErrorCode.NETWORK_EXCEPTION, f"{self.host}:{self.port}: {error}") from error
        except ProtocolError:
            self.close()
            raise

    def _next_frame(self, connected: socket.socket, timeout_ms: int) -> memoryview:
        # The limit is for the whole frame: a peer that sends a byte now and then must not hold the caller for ever.
        deadline = _CLOCK.monotonic() + timeout_ms / 1000
        while not self._ready:
            remaining = deadline - _CLOCK.monotonic()
            if remaining <= 0:
                raise TimeoutError
            connected.settimeout(remaining)
            data = connected.recv(_RECEIVE_BYTES)
            if not data:
                raise ConnectionResetError("the broker closed the connection")
            self._ready.extend(self._frames.feed(data))
            if self._frames.failure is not None and not self._ready:
                raise self._frames.failure
        return self._ready.popleft()


def _connection(host: str, port: int, client_id: str | None, timeout_ms: int, negotiate: bool) -> BlockingConnection:
    return BlockingConnection(host, port, client_id=client_id, timeout_ms=timeout_ms, negotiate=negotiate)
