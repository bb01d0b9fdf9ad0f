"""A transport without a socket, for protocols that are fed by a test."""

from __future__ import annotations

import asyncio
from typing import cast


class FakeTransport:
    """Records what a protocol does to its transport. `peer_reads=False` makes a peer that reads nothing more."""

    def __init__(self) -> None:
        self.protocol: asyncio.BufferedProtocol | None = None
        self.peer_reads = True
        self._high_bytes = 0
        self._paused = False
        self.written = bytearray()
        self.writes = 0
        self.unsent_bytes = 0
        self.reading = True
        self.closed = False
        self.aborted = False

    def get_extra_info(self, name: str, default: object = None) -> object:
        return ("10.0.0.1", 4711) if name == "peername" else default

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        assert low == 0
        self._high_bytes = high
        self._maybe_pause()

    def _maybe_pause(self) -> None:
        if self.unsent_bytes > self._high_bytes and not self._paused and self.protocol is not None:
            self._paused = True
            self.protocol.pause_writing()

    def write(self, data: bytes) -> None:
        self.writelines([data])

    def writelines(self, buffers: list[bytes]) -> None:
        self.writes += 1
        for data in buffers:
            self.written += data
        if not self.peer_reads:
            self.unsent_bytes += sum(map(len, buffers))
            self._maybe_pause()

    def let_peer_read(self) -> None:
        self.peer_reads = True
        self.unsent_bytes = 0
        self._paused = False
        assert self.protocol is not None
        self.protocol.resume_writing()

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = cast(asyncio.BufferedProtocol, protocol)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True
