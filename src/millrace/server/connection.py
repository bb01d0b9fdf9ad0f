"""One client connection: frames in, requests handled in order, replies out in order.

A request's handler starts only after every earlier request of the connection has been answered, except behind handlers
that are declared to overlap (Produce, Fetch): those do their ordered part at once and may then wait while the next
request starts. Replies leave in the order of their requests whatever order they are ready in.

Back-pressure: nothing is read from a peer that does not read its replies, that has too many requests waiting, or while
the broker's memory budget is used up. A peer that breaks the protocol is closed at once; nobody else notices.

What is not here: the meaning of any request (`handlers`), accepting sockets (`listener`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final, cast

from millrace.errors import ApiError, ErrorCode, ProtocolError, StorageError, code_of, text_of
from millrace.handlers import api_versions
from millrace.handlers.context import RequestContext, Services
from millrace.wire.frame import FrameReader, RequestHeader, read_request_header
from millrace.wire.keys import ApiKey

if TYPE_CHECKING:
    from millrace.handlers.registry import Api, Buffers
    from millrace.server.flow import ConnectionLimits, MemoryBudget

log = logging.getLogger(__name__)

MAX_WAITING_REQUESTS: Final = 128
"""Whole requests that one connection may have received and not yet begun; more stay in the kernel."""
MAX_OVERLAPPING_REPLIES: Final = 128
WRITE_BUFFER_HIGH_BYTES: Final = 1024 * 1024
WRITE_BUFFER_LOW_BYTES: Final = 256 * 1024

NO_REPLY: Final[Buffers] = ()


class _Reply:
    """The place in line of one request whose answer is not ready yet."""

    __slots__ = ("buffers", "size_bytes")

    def __init__(self, size_bytes: int, buffers: Buffers | None = None) -> None:
        self.size_bytes = size_bytes
        self.buffers = buffers


class Connection(asyncio.Protocol):
    """The protocol object of one accepted socket; its only owner is the event loop."""

    def __init__(
        self,
        *,
        apis: Mapping[int, Api],
        services: Services,
        listener: str,
        budget: MemoryBudget,
        limits: ConnectionLimits,
        max_frame_bytes: int,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        on_closed: Callable[[Connection], None],
    ) -> None:
        self._apis = apis
        self._services = services
        self._listener = listener
        self._budget = budget
        self._limits = limits
        self._reader = FrameReader(max_frame_bytes)
        self._spawn = spawn
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None
        self._host = ""
        self._admitted = False
        self._requests: deque[memoryview] = deque()
        self._replies: deque[_Reply] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._gated = False
        """A request that does not overlap is being handled: the next one waits."""
        self._write_paused = False
        self._reading_paused = False
        self._in_line = False
        self._partial_bytes = 0
        self._draining = False
        self.served = 0
        self.idle_since_mark = True
        """No request has arrived since the listener last looked; it closes what stays so for too long."""
        self.idle_marks = 0

    def __repr__(self) -> str:
        return f"Connection({self._host or 'unconnected'}, {self.served} served, {len(self._replies)} waiting)"

    @property
    def waiting(self) -> bool:
        """A request is being handled, a long poll perhaps: that is not idleness."""
        return bool(self._replies)

    # ------------------------------------------------------------------------------------------- transport callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self._host = str(peer[0]) if isinstance(peer, tuple) and peer else "local"
        refusal = self._limits.admit(self._host)
        if refusal:
            log.warning("connection from %s refused: %s", self._host, refusal)
            self._transport.abort()
            return
        self._admitted = True
        self._transport.set_write_buffer_limits(WRITE_BUFFER_HIGH_BYTES, WRITE_BUFFER_LOW_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if self._admitted:
            self._limits.release(self._host)
        if self._in_line:
            self._budget.leave_line(self._leave_line)
        for task in self._tasks:
            task.cancel()
        waiting_bytes = sum(len(frame) for frame in self._requests) + self._partial_bytes
        self._requests.clear()
        self._partial_bytes = 0
        self._budget.give_back(waiting_bytes)
        for reply in self._replies:
            self._budget.end_serving(reply.size_bytes)
        self._replies.clear()
        self._transport = None
        self._on_closed(self)

    def data_received(self, data: bytes) -> None:
        try:
            frames = self._reader.feed(data)
        except ProtocolError as error:
            self._refuse(error)
            return
        # What the reader holds of an unfinished frame counts as much as whole requests do.
        held_bytes = self._reader.pending_bytes
        arrived_bytes = held_bytes - self._partial_bytes
        self._partial_bytes = held_bytes
        for frame in frames:
            arrived_bytes += len(frame)
            self._requests.append(frame)
        self._budget.take(arrived_bytes)
        if frames:
            self.idle_since_mark = False
            self._advance()
        if self._budget.exhausted or len(self._requests) > MAX_WAITING_REQUESTS:
            self._hold_reading()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._write_paused = True
        self._hold_reading()

    def resume_writing(self) -> None:
        self._write_paused = False
        self._advance()
        self._maybe_resume_reading()

    # ------------------------------------------------------------------------------------------------- flow control

    def _hold_reading(self) -> None:
        if self._transport is None:
            return
        if not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()
        if self._budget.exhausted and not self._in_line:
            self._in_line = True
            self._budget.line_up(self._leave_line)

    def _leave_line(self) -> None:
        self._in_line = False
        self._maybe_resume_reading()

    def _maybe_resume_reading(self) -> None:
        if (
            self._reading_paused
            and not self._write_paused
            and not self._in_line
            and not self._draining
            and len(self._requests) <= MAX_WAITING_REQUESTS // 2
            and self._transport is not None
            and not self._transport.is_closing()
        ):
            self._reading_paused = False
            self._transport.resume_reading()

    # ------------------------------------------------------------------------------------------------------ requests

    def _advance(self) -> None:
        """Begin as many waiting requests as the rules of order allow."""
        requests = self._requests
        while requests and not (self._gated or self._write_paused or self._draining):
            if len(self._replies) >= MAX_OVERLAPPING_REPLIES or self._transport is None:
                break
            frame = requests.popleft()
            self._budget.begin_serving()
            try:
                self._begin(frame)
            except ProtocolError as error:
                self._budget.end_serving(len(frame))
                self._refuse(error)
                return
        if self._reading_paused:
            self._maybe_resume_reading()

    def _begin(self, frame: memoryview) -> None:
        header, pos = read_request_header(frame)
        api = self._apis.get(header.api_key)
        if api is None:
            raise ProtocolError(f"API key {header.api_key} is not served")
        version = header.api_version
        size_bytes = len(frame)
        if not api.min_version <= version <= api.max_version:
            if header.api_key != ApiKey.API_VERSIONS:
                raise ProtocolError(f"{api.key.name} v{version} is not served")
            # KIP-511: an unknown ApiVersions version is answered in v0, so that the client can choose again.
            self._answer_now(api_versions.unsupported(header.correlation_id), size_bytes)
            return
        request = api.decode(version, frame, pos)
        context = RequestContext(self._services, header, version, self._host, self._listener)
        try:
            result = api.handler(context, request)
            if type(result) is not CoroutineType:
                self._answer_now(self._encode(api, header, result), size_bytes)
                return
        except Exception as error:  # noqa: BLE001 - the dispatch boundary
            self._answer_now(self._failure(api, header, error), size_bytes)
            return
        reply = _Reply(size_bytes)
        self._replies.append(reply)
        self._gated = not api.overlaps
        task = self._spawn(self._finish(reply, api, header, result))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, reply: _Reply, api: Api, header: RequestHeader, work: Coroutine[Any, Any, Any]) -> None:
        """Await one handler and put its answer in its place; cancelled only when the connection is gone."""
        try:
            buffers = self._encode(api, header, await work)
        except Exception as error:  # noqa: BLE001 - the dispatch boundary
            try:
                buffers = self._failure(api, header, error)
            except ProtocolError as refusal:
                self._refuse(refusal)
                return
        if self._transport is None:
            return
        reply.buffers = buffers
        if not api.overlaps:
            self._gated = False
        self._send_ready()
        self._advance()

    def _encode(self, api: Api, header: RequestHeader, response: Any) -> Buffers:
        self.served += 1
        if response is None:  # acks=0: the protocol has no reply
            return NO_REPLY
        return api.encode(header.correlation_id, header.api_version, response)

    def _failure(self, api: Api, header: RequestHeader, error: Exception) -> Buffers:
        """The answer to a request whose handler raised, or ProtocolError where the API has no place for one."""
        if isinstance(error, ProtocolError):
            raise error
        if isinstance(error, ApiError | StorageError):
            code, message = code_of(error), text_of(error) or ""
        else:
            log.error("%s v%d failed", api.key.name, header.api_version, exc_info=error)
            code, message = ErrorCode.UNKNOWN_SERVER_ERROR, "the broker failed to handle the request; see its log"
        buffers = api.encode_error(header.correlation_id, header.api_version, code, message)
        if buffers is None:
            raise ProtocolError(f"{api.key.name} failed and its response has no place for {code.name}")
        return buffers

    # ------------------------------------------------------------------------------------------------------- replies

    def _answer_now(self, buffers: Buffers, size_bytes: int) -> None:
        if self._replies:
            self._replies.append(_Reply(size_bytes, buffers))
            return
        self._write(buffers)
        self._budget.end_serving(size_bytes)

    def _send_ready(self) -> None:
        replies = self._replies
        while replies and (buffers := replies[0].buffers) is not None:
            size_bytes = replies.popleft().size_bytes
            self._write(buffers)
            self._budget.end_serving(size_bytes)
        if self._draining and not replies:
            self.close()

    def _write(self, buffers: Buffers) -> None:
        transport = self._transport
        if transport is None or transport.is_closing() or not buffers:
            return
        if len(buffers) == 1:
            transport.write(buffers[0])
        else:
            transport.writelines(buffers)

    # -------------------------------------------------------------------------------------------------------- ending

    def _refuse(self, error: ProtocolError) -> None:
        """Close on a peer that does not speak the protocol; replies that are ready still leave."""
        log.info("closing the connection from %s: %s", self._host, printable(str(error)))
        self.close()

    def close(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def drain(self) -> None:
        """Begin nothing new; close once what has begun is answered."""
        self._draining = True
        self._hold_reading()
        if not self._replies:
            self.close()


def printable(text: str) -> str:
    """Text from a peer, safe for one line of a log."""
    return "".join(char if char.isprintable() else "?" for char in text[:300])
