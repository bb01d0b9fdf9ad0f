"""Where pushed metrics go: an OTLP/HTTP endpoint, or a file of JSON lines.

A push waits in a queue with bounds, and one task takes it out: nobody who pushes waits for a receiver. What finds no
room, what a receiver does not want, and what it could not be given within `GIVE_UP_S`, is dropped and counted, and the
log has one line when that begins and one when it is over.

Invariants: redirects are not followed and proxies are not asked; of an answer no more than `MAX_ANSWER_BYTES` is read.

Owner: the event loop. A file is written, and its JSON made, in a thread.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import ssl
from collections import deque
from concurrent.futures import Executor
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import SplitResult, urlsplit

from millrace.clock import Clock
from millrace.cluster.channel import within
from millrace.errors import ApiError, ConfigError, MillraceError
from millrace.telemetry.otlp import as_json

logger = logging.getLogger(__name__)

MAX_WAITING: Final = 1_000
MAX_WAITING_BYTES: Final = 16 * 1024 * 1024
GIVE_UP_S: Final = 30.0
"""How long the same push is tried for."""
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 8.0
ATTEMPT_S: Final = 10.0
"""How long an endpoint may take, altogether."""
LAST_WORDS_S: Final = 1.0
"""How long a broker that stops goes on with what waits."""
MAX_ANSWER_BYTES: Final = 64 * 1024
_WORTH_ANOTHER_TRY: Final = frozenset({408, 429, 500, 502, 503, 504})
_FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_MODE: Final = 0o600


class NotTaken(MillraceError):
    """A receiver did not take a push; the text says why."""

    def __init__(self, reason: str, *, for_good: bool = False) -> None:
        super().__init__(reason)
        self.for_good = for_good
        """It would not take it at another time either."""


class Receiver(Protocol):
    """Takes one push at a time."""

    async def take(self, metrics: bytes) -> None:
        """Have a MetricsData message; NotTaken."""

    def close(self) -> None:
        """Let go of what is open."""


def receiver_of(setting: str, worker: Executor, clock: Clock) -> Receiver:
    """What `telemetry.receiver` names; ConfigError where that is nothing."""
    try:
        url = urlsplit(setting)
        has_place = bool(url.hostname) and url.port != 0
    except ValueError:
        url, has_place = urlsplit(""), False
    if "@" in url.netloc:
        raise ConfigError("telemetry.receiver must hold no password: it is shown to whoever may read settings")
    if url.scheme in ("http", "https") and has_place:
        return HttpReceiver(url, clock)
    if url.scheme == "file" and not url.netloc and setting.removeprefix("file:"):
        return FileReceiver(Path(url.path), worker)
    forms = "http://HOST:PORT/PATH, https://HOST/PATH or file:PATH"
    raise ConfigError(f"telemetry.receiver={setting[:100]}: must be {forms}, or empty")


class HttpReceiver:
    """An OTLP/HTTP endpoint: each push is a POST, over a connection that is kept."""

    def __init__(self, url: SplitResult, clock: Clock) -> None:
        self._url = url
        self._clock = clock
        self._tls: ssl.SSLContext | None = None
        if url.scheme == "https":
            self._tls = ssl.create_default_context()
            self._tls.minimum_version = ssl.TLSVersion.TLSv1_2
        path = (url.path or "/") + (f"?{url.query}" if url.query else "")
        self._head = f"POST {path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/x-protobuf\r\n".encode()
        self._open: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def __str__(self) -> str:
        return self._url.geturl()

    async def take(self, metrics: bytes) -> None:
        try:
            status = await within(self._clock, self._post_again(metrics), ATTEMPT_S)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | EOFError | ValueError | asyncio.LimitOverrunError | ApiError):
                raise NotTaken(str(error) or type(error).__name__) from None
            raise
        if not 200 <= status < 300:
            raise NotTaken(f"it answered {status}", for_good=status not in _WORTH_ANOTHER_TRY)

    async def _post_again(self, metrics: bytes) -> int:
        """On another connection, if the endpoint has closed one that was not used for a while."""
        if self._open is not None:
            try:
                return await self._post(metrics)
            except (ConnectionError, asyncio.IncompleteReadError):
                self.close()
        return await self._post(metrics)

    async def _post(self, metrics: bytes) -> int:
        if self._open is None:
            port = self._url.port or (443 if self._tls else 80)
            self._open = await asyncio.open_connection(self._url.hostname, port, ssl=self._tls, limit=MAX_ANSWER_BYTES)
        reader, writer = self._open
        writer.writelines([self._head, b"Content-Length: %d\r\n\r\n" % len(metrics), metrics])
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        version, _, rest = head[0].partition(" ")
        if version not in ("HTTP/1.1", "HTTP/1.0") or not rest[:3].isdecimal():
            raise ValueError("it does not speak HTTP")
        named = (line.partition(":") for line in head[1:])
        fields = {name.strip().lower(): text.strip().lower() for name, _, text in named}
        length = fields.get("content-length", "")
        stays = version == "HTTP/1.1" and fields.get("connection") != "close"
        if stays and length.isdecimal() and int(length) <= MAX_ANSWER_BYTES:
            await reader.readexactly(int(length))
        else:
            self.close()  # where the answer ends is not worth finding out
        return int(rest[:3])

    def close(self) -> None:
        if self._open is not None:
            self._open[1].transport.abort()
            self._open = None


class FileReceiver:
    """A file that gets a line for each push, in OTLP's JSON form. Renaming it starts another."""

    def __init__(self, path: Path, worker: Executor) -> None:
        self._path = path
        self._worker = worker
        try:
            self._append(b"")
        except OSError as error:
            raise ConfigError(f"telemetry.receiver: cannot write {path}: {error.strerror or error}") from None

    def __str__(self) -> str:
        return f"file:{self._path}"

    async def take(self, metrics: bytes) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._worker, self._write, metrics)
        except ApiError as error:
            raise NotTaken(str(error), for_good=True) from None
        except OSError as error:
            raise NotTaken(error.strerror or str(error)) from None

    def _write(self, metrics: bytes) -> None:
        self._append(json.dumps(as_json(metrics), separators=(",", ":")).encode() + b"\n")

    def _append(self, line: bytes) -> None:
        fd = os.open(self._path, _FLAGS, _MODE)
        try:
            before, left = os.fstat(fd).st_size, line
            try:
                while left:
                    left = left[os.write(fd, left) :]
            except OSError:
                if os.fstat(fd).st_size == before + len(line) - len(left):  # nobody else has added to it
                    os.ftruncate(fd, before)
                raise
        finally:
            os.close(fd)

    def close(self) -> None:
        """Nothing is open between two lines."""


class Forwarding:
    """The queue before a receiver, and the task that empties it."""

    def __init__(self, receiver: Receiver, clock: Clock) -> None:
        self._receiver = receiver
        self._clock = clock
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._dropped_before = 0
        self._trouble: str | None = None
        self.forwarded_total = 0
        self.dropped_total = 0
        """Pushes that were in order and have not reached the receiver, nor will."""

    def __repr__(self) -> str:
        return f"Forwarding({self._receiver}, {len(self._waiting)} waiting, {self.dropped_total} dropped)"

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_bytes(self) -> int:
        return self._waiting_bytes

    def offer(self, metrics: bytes) -> None:
        """Take a push, or count it as dropped."""
        if len(self._waiting) >= MAX_WAITING or self._waiting_bytes + len(metrics) > MAX_WAITING_BYTES:
            self._drop("they come faster than it takes them")
            return
        self._waiting.append(metrics)
        self._waiting_bytes += len(metrics)
        self._filled.set()
        self._emptied.clear()

    async def run(self) -> None:
        """Give the receiver what comes, for ever."""
        while True:
            await self._filled.wait()
            await self._give(self._waiting[0])
            self._waiting_bytes -= len(self._waiting.popleft())
            if not self._waiting:
                self._filled.clear()
                self._emptied.set()

    async def finish(self) -> None:
        """Return when nothing waits, or after a moment; `run` still runs."""
        try:
            await within(self._clock, self._emptied.wait(), LAST_WORDS_S)
        except ApiError:
            logger.warning("%d pushes of client metrics are left unsent to %s", len(self._waiting), self._receiver)
            self.dropped_total += len(self._waiting)

    def close(self) -> None:
        self._receiver.close()

    async def _give(self, metrics: bytes) -> None:
        give_up_at = self._clock.monotonic() + GIVE_UP_S
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self._receiver.take(metrics)
            except NotTaken as error:
                if error.for_good or self._clock.monotonic() + pause_s >= give_up_at:
                    self._drop(str(error))
                    return
                self._tell(str(error))
                await self._clock.sleep(pause_s)
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
            else:
                self.forwarded_total += 1
                if self._trouble is not None:
                    lost = self.dropped_total - self._dropped_before
                    logger.warning("client metrics reach %s again; %d pushes were dropped", self._receiver, lost)
                    self._trouble = None
                return

    def _drop(self, reason: str) -> None:
        self._tell(reason)
        self.dropped_total += 1

    def _tell(self, reason: str) -> None:
        """Once, until something is taken again."""
        if self._trouble is None:
            self._trouble, self._dropped_before = reason, self.dropped_total
            logger.warning("client metrics do not reach %s: %.200s", self._receiver, reason)
