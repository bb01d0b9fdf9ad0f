"""The small HTTP server: what it answers, what it refuses, and that nobody can make it wait or grow."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from millrace.clock import ManualClock, SystemClock
from millrace.errors import ConfigError
from millrace.monitoring import web
from millrace.monitoring.web import Answer, BadRequest, Parameters, WebServer, told


async def hello(parameters: Parameters) -> Answer:
    return told(f"hello {dict(parameters)}")


async def broken(_parameters: Parameters) -> Answer:
    raise RuntimeError("a secret")


async def refuses(_parameters: Parameters) -> Answer:
    raise BadRequest("not so")


async def large(_parameters: Parameters) -> Answer:
    return Answer([bytes(1 << 20)] * 32)


@asynccontextmanager
async def serving(clock: SystemClock | ManualClock | None = None) -> AsyncIterator[WebServer]:
    pages = {"/hello": hello, "/broken": broken, "/refuses": refuses, "/large": large}
    server = WebServer("127.0.0.1", 0, pages, clock or SystemClock())
    server.bind()
    await server.serve()
    try:
        yield server
    finally:
        await server.stop()


async def ask(server: WebServer, request: bytes) -> bytes:
    """The answer; nothing where the connection is closed without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(request)
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def connections(server: WebServer, count: int) -> None:
    """Return when it has so many."""
    while f", {count} connections" not in repr(server):
        await asyncio.sleep(0.001)


def get(target: str, method: str = "GET") -> bytes:
    return f"{method} {target} HTTP/1.1\r\nHost: here\r\n\r\n".encode()


async def test_an_answer_says_how_long_it_is_and_that_it_is_the_last() -> None:
    async with serving() as server:
        head, _, body = (await ask(server, get("/hello?detail=a&detail=b%20c&x="))).partition(b"\r\n\r\n")
        assert body == b"hello {'detail': ['a', 'b c'], 'x': ['']}\n"
        lines = head.split(b"\r\n")
        assert lines[0] == b"HTTP/1.1 200 OK"
        assert b"Connection: close" in lines and b"Content-Length: %d" % len(body) in lines
        assert b"Cache-Control: no-store" in lines


async def test_head_is_the_same_without_the_text() -> None:
    async with serving() as server:
        whole = await ask(server, get("/hello"))
        assert await ask(server, get("/hello", "HEAD")) == whole.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


async def test_an_old_client_need_not_name_the_host() -> None:
    async with serving() as server:
        assert b" 200 " in await ask(server, b"GET /hello HTTP/1.0\r\n\r\n")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (get("/nothing"), 404),
        (get("/hello/"), 404),
        (get("/"), 404),
        (get("/hello", "POST"), 405),
        (get("/hello", "DELETE"), 405),
        (get("/hello", "get"), 405),
        (get("/refuses"), 400),
        (get("/broken"), 500),
        (get("/" + "a" * 5000), 414),
        (b"GET /" + b"a" * 100_000, 414),
        (b"GET /hello HTTP/1.1\r\nHost: here\r\n" + b"X: y\r\n" * 10_000, 431),
        (b"GET /hello HTTP/1.1\r\n\r\n", 400),
        (b"GET /hello\r\n\r\n", 400),
        (b"GET /hello HTTP/2.0\r\nHost: here\r\n\r\n", 400),
        (b"GET  /hello HTTP/1.1\r\nHost: here\r\n\r\n", 400),
        (b"GET /he\x00llo HTTP/1.1\r\nHost: here\r\n\r\n", 400),
        (b"GET http://elsewhere/hello HTTP/1.1\r\nHost: here\r\n\r\n", 400),
        (b"GET /hello HTTP/1.1\r\nHost: here\r\n folded: x\r\n\r\n", 400),
        (b"GET /hello HTTP/1.1\r\nHost : here\r\n\r\n", 400),
        (b"GET /hello HTTP/1.1\r\nHost: here\r\nContent-Length: 4\r\n\r\nbody", 400),
        (b"GET /hello HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (get("/hello?" + "&".join("a=b" for _ in range(100))), 400),
        (get("/hello?nothing"), 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
    ],
)  # fmt: skip
async def test_what_is_no_request_is_told_so(request_: bytes, status: int) -> None:
    async with serving() as server:
        answer = await ask(server, request_)
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
        assert b"secret" not in answer and b"Traceback" not in answer
        assert (b"Allow: GET, HEAD" in answer) == (status == 405)
        assert b" 200 " in await ask(server, get("/hello"))


async def test_requests_behind_the_first_are_not_read() -> None:
    async with serving() as server:
        answer = await ask(server, get("/hello") * 3)
        assert answer.count(b"HTTP/1.1 ") == 1


async def test_who_says_nothing_is_let_go_in_time() -> None:
    clock = ManualClock()
    async with serving(clock) as server:
        asking = asyncio.ensure_future(ask(server, b"GET /hello HTT"))
        await connections(server, 1)
        clock.advance(web.REQUEST_WITHIN_S)
        assert await asking == b""
        await connections(server, 0)


async def test_there_are_only_so_many_at_a_time() -> None:
    async with serving() as server:
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(web.MAX_CONNECTIONS)]
        await connections(server, web.MAX_CONNECTIONS)
        assert await ask(server, get("/hello")) == b""
        for _, writer in silent:
            writer.close()
        await connections(server, 0)
        assert b" 200 " in await ask(server, get("/hello"))


async def test_who_does_not_read_harms_nobody_and_is_let_go() -> None:
    """32 MB to somebody who takes nothing of it: others are answered, the loop turns, and it ends."""
    clock = ManualClock()
    async with serving(clock) as server:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        slow.sendall(get("/large"))
        await connections(server, 1)
        for _ in range(20):
            assert b" 200 " in await ask(server, get("/hello"))
        await connections(server, 1)
        clock.advance(web.READ_WITHIN_S)
        await connections(server, 0)
        slow.close()


async def test_a_stop_ends_what_is_under_way() -> None:
    async with serving() as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await connections(server, 1)
    await connections(server, 0)
    writer.close()


async def test_an_address_that_is_taken_is_told() -> None:
    async with serving() as server:
        with pytest.raises(ConfigError, match=f"port {server.port} is already in use"):
            WebServer("127.0.0.1", server.port, {}, SystemClock()).bind()
    with pytest.raises(ConfigError, match="cannot listen on"):
        WebServer("no-such-host.invalid", 0, {}, SystemClock()).bind()
