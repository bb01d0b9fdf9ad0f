"""Receivers, and the queue before them: nobody waits, and what is lost is counted."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import stat
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme

from millrace.clock import SystemClock
from millrace.errors import ConfigError
from millrace.tasks import Tasks
from millrace.telemetry import receiver as room
from millrace.telemetry.receiver import Forwarding, NotTaken, receiver_of
from support.otlp import OtlpEndpoint, gauge, part

WORKER = ThreadPoolExecutor(1)
CLOCK = SystemClock()


class Gated:
    """A receiver that takes a push when told."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.taken: list[bytes] = []
        self.outcomes: list[NotTaken] = []
        self.tries = 0

    def __repr__(self) -> str:
        return "Gated"

    async def take(self, metrics: bytes) -> None:
        await self.open.wait()
        self.tries += 1
        if self.outcomes:
            raise self.outcomes.pop(0)
        self.taken.append(metrics)

    def close(self) -> None:
        pass


@asynccontextmanager
async def running(forwarding: Forwarding) -> AsyncIterator[None]:
    tasks = Tasks(CLOCK)
    tasks.keep("forwarding", forwarding.run)
    try:
        yield
    finally:
        await tasks.stop()
        forwarding.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    "setting",
    [
        "collector:4318",
        "ftp://host/x",
        "http://",
        "http://host:0/",
        "http://host:99999/",
        "file:",
        "file://host/x",
        "x",
    ],
)
def test_what_names_no_receiver_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.receiver"):
        receiver_of(setting, WORKER, CLOCK)


def test_a_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="must hold no password") as refused:
        receiver_of("https://me:s3cret@host/x", WORKER, CLOCK)
    assert "s3cret" not in str(refused.value)


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        receiver_of(f"file:{tmp_path}/none/there", WORKER, CLOCK)


async def test_a_file_gets_a_line_for_each_push(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    taking = receiver_of(f"file:{path}", WORKER, CLOCK)
    await taking.take(gauge("a", 1))
    path.rename(tmp_path / "old")
    await taking.take(gauge("b", 2))
    with pytest.raises(NotTaken) as refused:
        await taking.take(part(1, b"\x0a\x7f"))
    assert refused.value.for_good
    (line,) = path.read_text().splitlines()
    (metric,) = json.loads(line)["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]
    assert (metric["name"], metric["gauge"]["dataPoints"][0]["asInt"]) == ("b", "2")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("keeps_open", [True, False])
async def test_an_endpoint_gets_the_bytes_as_they_are(keeps_open: bool) -> None:
    with OtlpEndpoint(keeps_open=keeps_open) as endpoint:
        taking = receiver_of(endpoint.url, WORKER, CLOCK)
        for number in range(3):
            await taking.take(gauge("a", number))
        taking.close()
        assert [request.body for request in endpoint.requests] == [gauge("a", number) for number in range(3)]
        assert {(each.path, each.content_type) for each in endpoint.requests} == {
            ("/v1/metrics", "application/x-protobuf")
        }


async def test_a_connection_that_the_endpoint_has_closed_is_no_failure() -> None:
    async def serve_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(1)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()
        served.append(1)

    served: list[int] = []
    server = await asyncio.start_server(serve_once, "127.0.0.1", 0)
    async with server:
        taking = receiver_of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", WORKER, CLOCK)
        for _ in range(3):
            await taking.take(b"x")
        taking.close()
    assert len(served) == 3


@pytest.mark.parametrize("answer", [b"SSH-2.0-x\r\n\r\n", b"", b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000])
async def test_what_is_no_answer_is_a_failure(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        taking = receiver_of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", WORKER, CLOCK)
        with pytest.raises(NotTaken):
            await taking.take(b"x")
        taking.close()


async def test_an_endpoint_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "ATTEMPT_S", 0.05)
    hung = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hung.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        taking = receiver_of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", WORKER, CLOCK)
        with pytest.raises(NotTaken, match="no answer within 50 ms"):
            await taking.take(b"x")
        hung.set()


async def test_an_endpoint_with_tls_has_to_prove_who_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    with OtlpEndpoint(tls=tls) as endpoint:
        with pytest.raises(NotTaken, match="certificate verify failed"):
            await receiver_of(endpoint.url, WORKER, CLOCK).take(b"x")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        taking = receiver_of(endpoint.url, WORKER, CLOCK)
        await taking.take(b"x")
        taking.close()
        assert [request.body for request in endpoint.requests] == [b"x"]


@pytest.mark.parametrize(("status", "for_good"), [(400, True), (301, True), (503, False), (429, False)])
async def test_what_an_endpoint_says_decides_whether_it_is_asked_again(status: int, for_good: bool) -> None:
    with OtlpEndpoint(answers=[status]) as endpoint:
        taking = receiver_of(endpoint.url, WORKER, CLOCK)
        with pytest.raises(NotTaken, match=str(status)) as refused:
            await taking.take(b"x")
        assert refused.value.for_good is for_good
        taking.close()


async def test_the_queue_has_bounds_of_number_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_WAITING", 3)
    monkeypatch.setattr(room, "MAX_WAITING_BYTES", 100)
    forwarding = Forwarding(Gated(), CLOCK)
    for size in (50, 51, 50):
        forwarding.offer(bytes(size))
    assert (forwarding.waiting, forwarding.waiting_bytes, forwarding.dropped_total) == (2, 100, 1)
    monkeypatch.setattr(room, "MAX_WAITING_BYTES", 1000)
    for _ in range(3):
        forwarding.offer(b"x")
    assert (forwarding.waiting, forwarding.dropped_total) == (3, 3)


async def test_trouble_is_told_once_and_its_end_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger=room.__name__)
    monkeypatch.setattr(room, "FIRST_PAUSE_S", 0.001)
    gated = Gated()
    gated.open.set()
    gated.outcomes = [NotTaken("it sleeps"), NotTaken("it sleeps"), NotTaken("no thanks", for_good=True)]
    forwarding = Forwarding(gated, CLOCK)
    async with running(forwarding):
        for push in (b"a", b"b", b"c"):
            forwarding.offer(push)
        await until(lambda: forwarding.forwarded_total == 2)
    assert gated.taken == [b"b", b"c"]
    assert (gated.tries, forwarding.dropped_total, forwarding.waiting) == (5, 1, 0)
    assert [record.getMessage() for record in caplog.records] == [
        "client metrics do not reach Gated: it sleeps",
        "client metrics reach Gated again; 1 pushes were dropped",
    ]


async def test_a_push_is_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(room, "GIVE_UP_S", 0.05)
    gated = Gated()
    gated.open.set()
    gated.outcomes = [NotTaken("it sleeps")] * 1000
    forwarding = Forwarding(gated, CLOCK)
    async with running(forwarding):
        forwarding.offer(b"a")
        await until(lambda: forwarding.dropped_total == 1)
    assert 1 < gated.tries < 1000


async def test_the_end_waits_a_moment_for_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = Gated()
    forwarding = Forwarding(gated, CLOCK)
    async with running(forwarding):
        forwarding.offer(b"a")
        gated.open.set()
        await forwarding.finish()
        assert gated.taken == [b"a"]
        gated.open.clear()
        forwarding.offer(b"b")
        monkeypatch.setattr(room, "LAST_WORDS_S", 0.01)
        await forwarding.finish()
        assert forwarding.dropped_total == 1
