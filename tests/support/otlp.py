"""OTLP metrics for tests: made and read by a walk over their bytes of its own, and an endpoint that collects them."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

PATIENCE_S = 30.0


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def part(number: int, content: bytes | str) -> bytes:
    """A field with a length."""
    data = content.encode() if isinstance(content, str) else content
    return varint(number << 3 | 2) + varint(len(data)) + data


def attribute(name: str, text: str) -> bytes:
    return part(1, part(1, name) + part(2, part(1, text)))


def gauge(name: str, value: int, **attributes: str) -> bytes:
    """A whole MetricsData with one number in it; `attributes` are the resource's."""
    resource = b"".join(attribute(*each) for each in attributes.items())
    point = b"\x19" + (1_700_000_000_000_000_000).to_bytes(8, "little") + b"\x31" + value.to_bytes(8, "little")
    metric = part(1, name) + part(5, part(1, point))
    return part(1, part(1, resource) + part(2, part(2, metric)))


def _parts(data: bytes, wanted: int) -> Iterator[bytes]:
    """What the fields of a number hold, of those with a length."""
    pos = 0

    def number() -> int:
        nonlocal pos
        value = shift = 0
        while True:
            byte = data[pos]
            pos += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while pos < len(data):
        tag = number()
        if tag & 7 == 2:
            length = number()
            assert pos + length <= len(data), "cut short"
            if tag >> 3 == wanted:
                yield data[pos : pos + length]
            pos += length
        elif tag & 7 == 0:
            number()
        else:
            pos += {1: 8, 5: 4}[tag & 7]


def metric_names(metrics: bytes) -> set[str]:
    return {
        name.decode()
        for resource_metrics in _parts(metrics, 1)
        for scope_metrics in _parts(resource_metrics, 2)
        for metric in _parts(scope_metrics, 2)
        for name in _parts(metric, 1)
    }


def resources(metrics: bytes) -> list[list[tuple[str, str]]]:
    """The attributes of each resource that are texts, in their order."""
    return [
        [
            (next(_parts(pair, 1)).decode(), text.decode())
            for resource in _parts(resource_metrics, 1)
            for pair in _parts(resource, 1)
            for value in _parts(pair, 2)
            for text in _parts(value, 1)
        ]
        for resource_metrics in _parts(metrics, 1)
    ]


@dataclass
class Request:
    path: str
    content_type: str
    body: bytes


@dataclass
class OtlpEndpoint:
    """An OTLP/HTTP endpoint in a thread. `answers` are the statuses of the next requests, 200 after them."""

    answers: list[int] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    """Those that were answered with 200."""
    keeps_open: bool = True
    tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1" if endpoint.keeps_open else "HTTP/1.0"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = endpoint.answers.pop(0) if endpoint.answers else 200
                if status == 200:
                    endpoint.requests.append(Request(self.path, self.headers["Content-Type"], body))
                self.send_response(status)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class has it
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if self.tls is not None:
            self._server.socket = self.tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"{'http' if self.tls is None else 'https'}://127.0.0.1:{self._server.server_address[1]}/v1/metrics"

    def wait_for(self, enough: Callable[[list[Request]], bool]) -> list[Request]:
        """All requests, once they are enough."""
        deadline = time.monotonic() + PATIENCE_S
        while not enough(self.requests):
            names = sorted({name for request in self.requests for name in metric_names(request.body)})
            assert time.monotonic() < deadline, f"{len(self.requests)} requests: {names}"
            time.sleep(0.02)
        return list(self.requests)
