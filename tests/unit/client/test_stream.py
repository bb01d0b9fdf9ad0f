from __future__ import annotations

import asyncio
import struct

import pytest

from millrace.client.stream import Stream, Waiting
from millrace.errors import ApiError, ErrorCode, ProtocolError
from support.streams import receive


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.aborts = 0

    def write(self, data: object) -> None:
        assert isinstance(data, bytes)
        self.written += data

    def close(self) -> None:
        pass

    def abort(self) -> None:
        self.aborts += 1


def frame(correlation_id: int, body: bytes = b"") -> bytes:
    return struct.pack(">ii", 4 + len(body), correlation_id) + body


def opened() -> tuple[Stream, FakeTransport]:
    stream, transport = Stream("peer:1"), FakeTransport()
    stream.connection_made(transport)
    return stream, transport


async def test_writers_wait_while_the_socket_is_full() -> None:
    stream, _ = opened()
    stream.pause_writing()
    waiting = asyncio.create_task(stream.drained())
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.resume_writing()
    await waiting


async def test_a_loss_wakes_writers() -> None:
    stream, _ = opened()
    stream.pause_writing()
    waiting = asyncio.create_task(stream.drained())
    await asyncio.sleep(0)
    stream.connection_lost(ConnectionResetError("gone"))
    await waiting
    with pytest.raises(ApiError, match="gone") as caught:
        stream.send(b"x")
    assert caught.value.code is ErrorCode.NETWORK_EXCEPTION


async def test_frames_nobody_asked_for_are_bounded() -> None:
    stream, transport = opened()
    receive(stream, frame(7) * 1000)
    assert transport.aborts == 0
    receive(stream, frame(7))
    assert transport.aborts == 1
    assert bytes(await stream.next_unclaimed()) == struct.pack(">i", 7)


async def test_every_waiter_gets_an_error_of_its_own() -> None:
    stream, transport = opened()
    results: list[asyncio.Future[object]] = [asyncio.get_running_loop().create_future() for _ in range(2)]
    for number, result in enumerate(results):
        stream.waiting[number] = Waiting(bytes, result)
    receive(stream, struct.pack(">i", -1))
    assert transport.aborts == 1
    errors = await asyncio.gather(*results, return_exceptions=True)
    assert all(isinstance(error, ProtocolError) for error in errors)
    assert errors[0] is not errors[1]
    with pytest.raises(ProtocolError):
        stream.send(b"x")


async def test_a_stream_that_never_connected_can_be_closed() -> None:
    stream = Stream("peer:1")
    stream.close()
    await stream.ended
    late = FakeTransport()
    stream.connection_made(late)
    assert late.aborts == 1
