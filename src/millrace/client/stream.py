"""The socket's side of a connection: frames in, bytes out, and who waits for which frame.

What the frames mean is not here. Invariants: the first failure stays and reaches everybody who waits; a frame goes to
exactly one taker, and frames nobody asked for are kept only up to a limit.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple, cast

from millrace.errors import ApiError, ErrorCode, MillraceError, ProtocolError
from millrace.wire.frame import FrameReader

MAX_RESPONSE_BYTES: Final = (1 << 31) - 1
_MAX_UNCLAIMED_FRAMES: Final = 1000


class Waiting(NamedTuple):
    """A request whose response has not come; `read` makes a result of the frame."""

    read: Callable[[memoryview], Any]
    result: asyncio.Future[Any]


class Stream(asyncio.BufferedProtocol):
    """The protocol object of a client's socket."""

    def __init__(self, peer: str) -> None:
        loop = asyncio.get_running_loop()
        self.waiting: dict[int, Waiting] = {}
        self.failure: MillraceError | None = None
        self._cause: Exception | None = None
        self.ended: asyncio.Future[None] = loop.create_future()
        self._peer = peer
        self._frames = FrameReader(MAX_RESPONSE_BYTES)
        self._transport: asyncio.Transport | None = None
        self._unclaimed: deque[memoryview] = deque()
        self._reader: asyncio.Future[memoryview] | None = None
        self._writable: asyncio.Future[None] | None = None

    async def drained(self) -> None:
        """Wait while the socket has too much left to write."""
        while self._writable is not None:
            await asyncio.shield(self._writable)

    def send(self, data: bytes) -> None:
        if self.failure is not None or self._transport is None:
            raise self._lost()
        self._transport.write(data)

    def next_unclaimed(self) -> asyncio.Future[memoryview]:
        self._reader = asyncio.get_running_loop().create_future()
        if self._unclaimed:
            self._reader.set_result(self._unclaimed.popleft())
        elif self.failure is not None:
            self._reader.set_exception(self._lost())
        return self._reader

    def close(self) -> None:
        self._fail(ApiError(ErrorCode.NETWORK_EXCEPTION, f"the connection to {self._peer} was closed"))
        if self._transport is not None:
            self._transport.close()
        elif not self.ended.done():
            self.ended.set_result(None)

    def abort(self) -> None:
        self.close()
        if self._transport is not None:
            self._transport.abort()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods and not the base class.
        self._transport = made = cast(asyncio.Transport, transport)
        if self.failure is not None:  # closed while it was being made
            made.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._frames.room()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for frame in self._frames.took(nbytes):
                self._deliver(frame)
            if self._frames.failure is not None:
                raise self._frames.failure
        except ProtocolError as error:
            self._fail(error)
            if self._transport is not None:
                self._transport.abort()

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._writable is not None:
            self._writable.set_result(None)
            self._writable = None

    def connection_lost(self, error: Exception | None) -> None:
        self._cause = error
        self._fail(
            ApiError(ErrorCode.NETWORK_EXCEPTION, f"the connection to {self._peer} is lost: {error or 'closed'}")
        )
        if not self.ended.done():
            self.ended.set_result(None)

    def _deliver(self, frame: memoryview) -> None:
        if len(frame) < 4:
            raise ProtocolError(f"{self._peer} sends a response of {len(frame)} bytes")
        (correlation_id,) = struct.unpack_from(">i", frame)
        waiting = self.waiting.pop(correlation_id, None)
        if waiting is not None:
            if waiting.result.done():  # it stopped waiting: timed out or cancelled
                return
            try:
                waiting.result.set_result(waiting.read(frame))
            except ProtocolError as error:
                waiting.result.set_exception(error)
                raise
            return
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(frame)
            return
        if len(self._unclaimed) >= _MAX_UNCLAIMED_FRAMES:
            raise ProtocolError(f"{self._peer} sends responses to requests that were never made")
        self._unclaimed.append(frame)

    def _fail(self, failure: MillraceError) -> None:
        """The first failure stays; everybody who waits is told."""
        if self.failure is None:
            self.failure = failure
        for waiting in self.waiting.values():
            if not waiting.result.done():
                waiting.result.set_exception(self._lost())
        self.waiting.clear()
        if self._reader is not None and not self._reader.done():
            self._reader.set_exception(self._lost())
        self.resume_writing()

    def _lost(self) -> MillraceError:
        """A fresh copy of the failure: one exception object must not be raised in many tasks."""
        if isinstance(self.failure, ApiError):
            lost = ApiError(self.failure.code, self.failure.message)
            lost.__cause__ = self._cause
            return lost
        if isinstance(self.failure, ProtocolError):
            return ProtocolError(*self.failure.args)
        return ApiError(ErrorCode.NETWORK_EXCEPTION, f"there is no connection to {self._peer}")
