"""A small HTTP server for answers that a program makes: GET and HEAD, one request per connection, everything bounded.

What it is for: a scraper and a health check on a trusted network. What it is not: a server for browsers; it has no TLS,
no login, no cookies, and takes no body. It runs on the broker's loop, so nothing of it may take long: the size of a
request, the time that a peer may take to send it and to read its answer, and the number of connections are bounded, and
a peer that does not read holds nothing but its own answer, until its time is up (docs/decisions/0014).

Owner: the event loop; each connection is a task.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl

from millrace.clock import Clock
from millrace.errors import ConfigError
from millrace.tasks import Tasks

logger = logging.getLogger(__name__)

OK: Final = 200
BAD_REQUEST: Final = 400
NOT_FOUND: Final = 404
METHOD_NOT_ALLOWED: Final = 405
URI_TOO_LONG: Final = 414
HEADERS_TOO_LARGE: Final = 431
SERVER_ERROR: Final = 500
UNAVAILABLE: Final = 503
_PHRASES: Final = {
    OK: "OK",
    BAD_REQUEST: "Bad Request",
    NOT_FOUND: "Not Found",
    METHOD_NOT_ALLOWED: "Method Not Allowed",
    URI_TOO_LONG: "URI Too Long",
    HEADERS_TOO_LARGE: "Request Header Fields Too Large",
    SERVER_ERROR: "Internal Server Error",
    UNAVAILABLE: "Service Unavailable",
}
MAX_CONNECTIONS: Final = 16
MAX_LINE_BYTES: Final = 4096
MAX_HEAD_BYTES: Final = 16 * 1024
MAX_PARAMETERS: Final = 32
REQUEST_WITHIN_S: Final = 5.0
READ_WITHIN_S: Final = 30.0
"""How long a peer may take to read its answer."""
LINGER_S: Final = 1.0
"""How long a peer that was answered may take to close."""
_READ_BYTES: Final = 4096
_BACKLOG: Final = 64
_REQUEST_LINE: Final = re.compile(rb"([A-Za-z]{1,20}) ([!-~]{1,%d}) HTTP/1\.([01])" % MAX_LINE_BYTES)
_HEADER: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}):[ \t]*([^\r\n\x00]*)")
_TEXT: Final = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Answer:
    """What is answered."""

    pieces: Sequence[bytes]
    status: int = OK
    content_type: str = _TEXT
    headers: Mapping[str, str] = field(default_factory=dict)


Parameters = Mapping[str, Sequence[str]]
Page = Callable[[Parameters], Awaitable[Answer]]


class BadRequest(Exception):
    """What came is no request that is answered here."""

    def __init__(self, text: str, status: int = BAD_REQUEST, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.answer = told(text, status, headers)


def told(text: str, status: int = OK, headers: Mapping[str, str] | None = None) -> Answer:
    """A line of text."""
    return Answer((f"{text}\n".encode(),), status, headers=headers or {})


class WebServer:
    """Answers on one address."""

    def __init__(self, host: str, port: int, pages: Mapping[str, Page], clock: Clock) -> None:
        self.host = host
        self.port = port
        self._pages = pages
        self._clock = clock
        self._sockets: list[socket.socket] = []
        self._servers: list[asyncio.Server] = []
        self._tasks = Tasks(clock)
        self._connections = 0

    def __repr__(self) -> str:
        return f"WebServer({self.host}:{self.port}, {self._connections} connections)"

    def bind(self) -> None:
        """Take the address; `port` is the real one afterwards. Raises ConfigError where it cannot be had."""
        try:
            found = socket.getaddrinfo(self.host or None, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except OSError as error:
            raise ConfigError(f"cannot listen on {self.host}: {error.strerror or error}") from None
        failure: OSError | None = None
        for family, _, _, _, address in found:
            try:
                sock = socket.create_server((address[0], self.port), family=family, backlog=_BACKLOG)
            except OSError as error:
                failure = error
                continue
            sock.setblocking(False)
            self._sockets.append(sock)
            self.port = int(sock.getsockname()[1])
        if not self._sockets:
            assert failure is not None
            in_use = f"port {self.port} is already in use on {self.host or 'this machine'}: choose another"
            text = in_use if failure.errno == errno.EADDRINUSE else f"{failure.strerror or failure}"
            raise ConfigError(f"cannot listen on {self.host or '*'}:{self.port}: {text}")

    async def serve(self) -> None:
        """Accept and answer."""
        for sock in self._sockets:
            self._servers.append(
                await asyncio.start_server(self._accept, sock=sock, limit=MAX_HEAD_BYTES, backlog=_BACKLOG)
            )

    async def stop(self) -> None:
        """Close everything."""
        for server in self._servers:
            server.close()
        for sock in self._sockets:
            sock.close()
        await self._tasks.stop()
        self._servers.clear()
        self._sockets.clear()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._connections >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._connections += 1
        self._tasks.start("web request", self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        timer = self._clock.call_later(REQUEST_WITHIN_S, writer.transport.abort)
        try:
            is_head = False
            try:
                request = _parse(await _read_head(reader))
                is_head = request.method == "HEAD"
                timer.cancel()
                answer = await self._answer(request)
            except BadRequest as error:
                answer = error.answer
            timer.cancel()
            timer = self._clock.call_later(READ_WITHIN_S, writer.transport.abort)
            await _write(writer, answer, is_head=is_head)
            timer.cancel()
            timer = self._clock.call_later(LINGER_S, writer.transport.abort)
            while await reader.read(_READ_BYTES):
                pass  # closed with something unread, the connection would take the answer back
        except (ConnectionError, EOFError):
            pass  # the peer is gone, or was too slow
        finally:
            timer.cancel()
            self._connections -= 1
            writer.transport.abort()

    async def _answer(self, request: _Request) -> Answer:
        page = self._pages.get(request.path)
        if page is None:
            raise BadRequest(f"there is nothing here; there is {', '.join(self._pages)}", NOT_FOUND)
        try:
            return await page(request.parameters)
        except BadRequest:
            raise
        except Exception:  # the peer is told that there was one, and nothing else
            logger.exception("%s could not be answered", request.path)
            return told("the broker failed to answer; see its log", SERVER_ERROR)


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    parameters: Parameters


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    """Request line and headers, without what ends them."""
    head = b""
    while (end := head.find(b"\r\n\r\n")) < 0:
        if len(head) > MAX_LINE_BYTES and b"\r\n" not in head[: MAX_LINE_BYTES + 2]:
            raise BadRequest("the address is too long", URI_TOO_LONG)
        if len(head) > MAX_HEAD_BYTES:
            raise BadRequest("too many headers", HEADERS_TOO_LARGE)
        received = await reader.read(_READ_BYTES)
        if not received:
            raise EOFError
        head += received
    return head[:end]


def _parse(head: bytes) -> _Request:
    line, *lines = head.split(b"\r\n")
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        if len(line) > MAX_LINE_BYTES:
            raise BadRequest("the address is too long", URI_TOO_LONG)
        raise BadRequest("this is no request of HTTP/1.1")
    method, target, minor = match.group(1).decode(), match.group(2).decode(), match.group(3)
    headers: dict[bytes, bytes] = {}
    for each in lines:
        header = _HEADER.fullmatch(each)
        if header is None:
            raise BadRequest("a header is malformed")
        headers[header.group(1).lower()] = header.group(2)
    if minor == b"1" and b"host" not in headers:
        raise BadRequest("the header Host is missing")
    if method not in {"GET", "HEAD"}:
        raise BadRequest(f"{method} is not served here", METHOD_NOT_ALLOWED, {"Allow": "GET, HEAD"})
    if headers.get(b"content-length", b"0").strip() != b"0" or b"transfer-encoding" in headers:
        raise BadRequest("a request has no body here")
    if not target.startswith("/"):
        raise BadRequest("the address does not begin with /")
    path, _, query = target.partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=MAX_PARAMETERS)
    except ValueError:
        raise BadRequest("the parameters cannot be read") from None
    parameters: dict[str, list[str]] = {}
    for name, value in pairs:
        parameters.setdefault(name, []).append(value)
    return _Request(method, path, parameters)


async def _write(writer: asyncio.StreamWriter, answer: Answer, *, is_head: bool) -> None:
    size_bytes = sum(map(len, answer.pieces))
    headers = {
        "Content-Type": answer.content_type,
        "Content-Length": str(size_bytes),
        "Connection": "close",
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        **answer.headers,
    }
    lines = [
        f"HTTP/1.1 {answer.status} {_PHRASES[answer.status]}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    writer.transport.set_write_buffer_limits(0)  # `drain` returns when the kernel has it all
    writer.write("".join(f"{line}\r\n" for line in (*lines, "")).encode())
    if not is_head:
        for piece in answer.pieces:
            writer.write(piece)
            await writer.drain()
    await writer.drain()
    writer.write_eof()
