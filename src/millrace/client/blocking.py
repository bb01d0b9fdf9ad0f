"""A synchronous connection to one broker, for code without an event loop, such as Spark executors.

One thread at a time; not for use on the event loop. `request` waits for its response; `send` and `receive` keep several
requests under way. The object pickles as its settings, without its
socket: it connects when it is first used, here or wherever it was sent. After a failure it is closed, what was under
way is lost, and the next request connects again.

A response is received into one buffer of its own size, or into the one that the caller lends, and what is decoded from
it are views of that buffer.
"""

from __future__ import annotations

import socket
import ssl as tls
from collections import deque
from collections.abc import Callable
from functools import partial
from ssl import SSLContext
from typing import Any, Final, NamedTuple, Self, TypeVar

from millrace.client import versions
from millrace.client.sasl import Ask, SaslClient, renew_after_s
from millrace.clock import SystemClock
from millrace.errors import ApiError, ConfigError, ErrorCode, MillraceError, ProtocolError
from millrace.wire.frame import RequestHeader, decode_response, encode_request
from millrace.wire.messages import response_class
from millrace.wire.messages.api_versions import ApiVersionsRequest
from millrace.wire.schema import Request

T = TypeVar("T")

DEFAULT_TIMEOUT_MS: Final = 30_000
MAX_RESPONSE_BYTES: Final = (1 << 31) - 1
_MAX_CORRELATION_ID: Final = (1 << 31) - 1
_CLOCK: Final = SystemClock()


class Pending(NamedTuple):
    """A request that was sent; `receive` takes it back for its response."""

    correlation_id: int
    request: Request
    version: int


class ReceiveBuffer:
    """Room that is used for one large response after another: each one overwrites the one before.

    New memory for each would be cleared, and its pages found, before the kernel writes the response over it.
    """

    __slots__ = ("_room",)

    def __init__(self) -> None:
        self._room = bytearray()

    def room(self, size_bytes: int) -> memoryview:
        if size_bytes > len(self._room):
            self._room = _new_room(size_bytes)
        return memoryview(self._room)[:size_bytes]


class BlockingConnection:
    """`request` connects when needed; `close`, or leaving a `with` block, ends it."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        client_id: str | None = "millrace",
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
        connect_timeout_ms: int | None = None,
        ssl: SSLContext | None = None,
        sasl: SaslClient | None = None,
        negotiate: bool = True,
    ) -> None:
        self.host = host
        self.port = port
        self._client_id = client_id
        self._timeout_ms = timeout_ms
        self._connect_timeout_ms = timeout_ms if connect_timeout_ms is None else connect_timeout_ms
        self._ssl = ssl
        self._sasl = sasl
        self._negotiate = negotiate
        self._correlation_id = 0
        self._reset()

    def __repr__(self) -> str:
        return f"BlockingConnection({self.host}:{self.port}, {'idle' if self._socket is None else 'connected'})"

    def __reduce__(self) -> tuple[Callable[..., BlockingConnection], tuple[Any, ...]]:
        if self._ssl is not None:
            raise TypeError("a connection with a TLS context cannot be pickled: make it where it is used")
        options = {
            "client_id": self._client_id,
            "timeout_ms": self._timeout_ms,
            "connect_timeout_ms": self._connect_timeout_ms,
            "sasl": self._sasl,
            "negotiate": self._negotiate,
        }
        return _connection, (self.host, self.port, options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_connected(self) -> bool:
        return self._socket is not None

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
        pending = self.send(message, version)
        return self.receive(pending, timeout_ms=timeout_ms) if versions.is_answered(message) else None

    def send(self, message: Request, version: int | None = None) -> Pending:
        """Send `message` and return at once; a Produce with acks=0 has no response to be received."""
        self._connected()
        if self._renew_s is not None and _CLOCK.monotonic() >= self._renew_s:
            self._log_in()
        if version is None:
            version = versions.version_for(type(message), self._offered)
        return self._send(message, version)

    def receive(self, pending: Pending, *, timeout_ms: int | None = None, buffer: ReceiveBuffer | None = None) -> Any:
        """The response to a request under way; fails as `request` does. With `buffer` it lies there."""
        frame = self._receive(pending, self._timeout_ms if timeout_ms is None else timeout_ms, buffer)
        try:
            return decode_response(response_class(pending.request.api_key), pending.version, frame)[1]
        except ProtocolError:
            self.close()
            raise

    def awaits(self, pending: Pending) -> bool:
        """Whether the response to `pending` can still come; not after the connection was lost, or when it was taken."""
        return pending.correlation_id in self._under_way or pending.correlation_id in self._held

    def send_raw(self, data: bytes) -> None:
        """Write bytes as they are, for tests of the other side."""
        self._guarded(lambda connected: connected.sendall(data), self._timeout_ms)

    def read_raw(self, *, timeout_ms: int | None = None) -> bytes:
        """The next frame, without its size; for tests of the other side."""
        limit_ms = self._timeout_ms if timeout_ms is None else timeout_ms
        return bytes(self._guarded(lambda connected: _next_frame(connected, limit_ms), limit_ms))

    def close(self) -> None:
        """End the connection; the next request makes a new one."""
        if self._socket is not None:
            self._socket.close()
        self._reset()

    def interrupt(self) -> None:
        """Have whoever waits for this connection fail with NETWORK_EXCEPTION; the one call for another thread."""
        connected = self._socket
        if connected is not None:
            try:
                # Not `close`: its number could belong to another file before the waiting thread looks. And not the
                # method of a TLS socket, which would go on without TLS.
                socket.socket.shutdown(connected, socket.SHUT_RDWR)
            except OSError:
                pass  # it was not connected any more

    def _reset(self) -> None:
        self._socket: socket.socket | None = None
        self._offered: versions.Offered = {}
        self._renew_s: float | None = None
        """When to log in again; what is under way then is answered before that is."""
        self._under_way: deque[int] = deque()
        self._held: dict[int, memoryview] = {}

    def _connected(self) -> socket.socket:
        if self._socket is not None:
            return self._socket
        try:
            plain = socket.create_connection((self.host, self.port), timeout=self._connect_timeout_ms / 1000)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket = plain
            if self._ssl is not None:
                self._socket = self._ssl.wrap_socket(plain, server_hostname=self.host)
        except TimeoutError as error:
            self.close()
            raise ApiError(ErrorCode.REQUEST_TIMED_OUT, f"{self.host}:{self.port}: {error}") from error
        except OSError as error:
            failure = self._no_connection(error)
            self.close()
            raise failure from error
        try:
            if self._negotiate:
                self._offered = self._learn_versions()
        except MillraceError:
            self.close()
            raise
        self._log_in()
        return self._socket

    def _log_in(self) -> None:
        if self._sasl is None:
            return
        login = self._sasl.login(self._offered if self._negotiate else None)
        try:
            step = next(login)
            while True:
                if isinstance(step, Ask):
                    pending = self._send(step.message, step.version)
                    step = login.send(self.receive(pending))
                else:
                    step = login.send(step.call())
        except StopIteration as end:
            lifetime_ms: int = end.value
            self._renew_s = _CLOCK.monotonic() + renew_after_s(lifetime_ms) if lifetime_ms else None
        except MillraceError:
            self.close()
            raise

    def _no_connection(self, error: OSError) -> MillraceError:
        where = f"{self.host}:{self.port}"
        if isinstance(error, tls.SSLCertVerificationError):
            return ConfigError(
                f"the certificate of {where} is not trusted ({error.verify_message}); "
                "name the authority that signed it in ssl.ca.location or ssl.truststore.location (PEM)"
            )
        # The end of the connection is what a restart looks like; anything else will be the same the next time.
        if isinstance(error, tls.SSLError) and not isinstance(error, (tls.SSLEOFError, tls.SSLZeroReturnError)):
            return ConfigError(
                f"no TLS with {where} ({error.reason or error}); is security.protocol right for this port?"
            )
        began = " while TLS began" if self._ssl is not None and self._socket is not None else ""
        return ApiError(ErrorCode.NETWORK_EXCEPTION, f"{where}{began}: {error}")

    def _learn_versions(self) -> versions.Offered:
        version: int | None = ApiVersionsRequest.max_version
        offered: versions.Offered = {}
        while version is not None:
            pending = self._send(versions.api_versions_request(), version)
            response, offered = versions.read_api_versions(self._receive(pending, self._timeout_ms), version)
            version = versions.older_api_versions(response, offered, version)
        return offered

    def _send(self, message: Request, version: int) -> Pending:
        self._correlation_id = (self._correlation_id + 1) & _MAX_CORRELATION_ID
        header = RequestHeader(message.api_key, version, self._correlation_id, self._client_id)
        raw = encode_request(header, message)
        self._guarded(lambda connected: connected.sendall(raw), self._timeout_ms)
        pending = Pending(header.correlation_id, message, version)
        if versions.is_answered(message):
            self._under_way.append(pending.correlation_id)
        return pending

    def _receive(self, pending: Pending, timeout_ms: int, buffer: ReceiveBuffer | None = None) -> memoryview:
        """The response to `pending`; those that come before it are held for whoever asks for them."""
        held = self._held.pop(pending.correlation_id, None)
        if held is not None:
            return held
        while self._under_way:
            oldest = self._under_way.popleft()
            lent = buffer if oldest == pending.correlation_id else None
            frame = self._guarded(partial(_next_frame, timeout_ms=timeout_ms, buffer=lent), timeout_ms)
            answered = int.from_bytes(frame[:4], "big", signed=True)
            if answered != oldest:
                self.close()
                raise ProtocolError(f"a response to request {answered}, {oldest} was asked")
            if oldest == pending.correlation_id:
                return frame
            self._held[oldest] = frame
        raise ApiError(ErrorCode.NETWORK_EXCEPTION, f"{self.host}:{self.port}: the connection was lost")

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
            raise self._broken(error) from error
        except ProtocolError:
            self.close()
            raise

    def _broken(self, error: OSError) -> MillraceError:
        where = f"{self.host}:{self.port}"
        # With TLS 1.3 a client learns only after the handshake that its certificate was not liked.
        if isinstance(error, tls.SSLError) and "ALERT" in (error.reason or ""):
            return ConfigError(
                f"{where} ended TLS ({error.reason}); does it ask for a client certificate (ssl.keystore.location)?"
            )
        return ApiError(ErrorCode.NETWORK_EXCEPTION, f"{where}: {error}")


def _next_frame(connected: socket.socket, timeout_ms: int, buffer: ReceiveBuffer | None = None) -> memoryview:
    # The limit is for the whole frame: a peer that sends a byte now and then must not hold the caller for ever.
    deadline = _CLOCK.monotonic() + timeout_ms / 1000
    size = int.from_bytes(_filled(connected, memoryview(bytearray(4)), deadline), "big", signed=True)
    if not 0 <= size <= MAX_RESPONSE_BYTES:
        raise ProtocolError(f"a frame of {size} bytes, the limit is {MAX_RESPONSE_BYTES}")
    view = memoryview(_new_room(size)) if buffer is None else buffer.room(size)
    return _filled(connected, view, deadline)


def _new_room(size_bytes: int) -> bytearray:
    # A large bytearray is pages of zeros that cost memory only when they are written: a size that a peer invents
    # takes no more than the bytes it then sends.
    return bytearray(size_bytes)


def _filled(connected: socket.socket, view: memoryview, deadline: float) -> memoryview:
    received, size_bytes = 0, len(view)
    while received < size_bytes:
        remaining = deadline - _CLOCK.monotonic()
        if remaining <= 0:
            raise TimeoutError
        connected.settimeout(remaining)
        count = connected.recv_into(view[received:])
        if not count:
            raise ConnectionResetError("the broker closed the connection")
        received += count
    return view.toreadonly()


def _connection(host: str, port: int, options: dict[str, Any]) -> BlockingConnection:
    return BlockingConnection(host, port, **options)
