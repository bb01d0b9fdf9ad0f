"""Bytes for whoever reads a socket into memory it provides, as an event loop brings them."""

from __future__ import annotations

import asyncio

from millrace.wire.frame import FrameReader


def feed(reader: FrameReader, data: bytes) -> list[memoryview]:
    """The frames that these bytes complete; as many reads as the reader's room asks for."""
    frames: list[memoryview] = []
    while data:
        room = reader.room()
        count = min(len(room), len(data))
        room[:count] = data[:count]
        frames += reader.took(count)
        data = data[count:]
    return frames


def receive(protocol: asyncio.BufferedProtocol, data: bytes) -> None:
    """What an event loop does with bytes that a socket has for the protocol."""
    while data:
        room = memoryview(protocol.get_buffer(-1))
        count = min(len(room), len(data))
        room[:count] = data[:count]
        protocol.buffer_updated(count)
        data = data[count:]
