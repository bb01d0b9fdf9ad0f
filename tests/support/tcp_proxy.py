"""A network that can be cut: TCP proxies between brokers, and between each broker and ZooKeeper.

Every broker advertises its inter-broker listener at a door of this network. A door learns who calls from the client id
of the first Kafka request (`broker-<id>`); a door to ZooKeeper belongs to one broker. A block is one-way, between two
nodes, and holds for every connection between them whoever opened it: bytes from one to the other stop, and arrive late,
in order, after healing, as TCP delivers them. A new connection across a block is accepted and stays silent. What this
network cannot show is a lost SYN, which looks the same to the caller but for the time at which it notices.

Owner: a thread with an event loop of its own; the methods are for other threads and return when the rule holds.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, Final, Self, TypeVar

ZOOKEEPER: Final = "zookeeper"
STRANGER: Final = "stranger"
"""The source of a connection whose client id is not a broker's: never blocked by rules for brokers."""
HOST: Final = "127.0.0.1"

_CHUNK_BYTES: Final = 64 * 1024
_MAX_CLIENT_ID_BYTES: Final = 1000
_REQUEST_HEAD: Final = struct.Struct(">ihhih")
_BROKER_CLIENT: Final = re.compile(r"broker-(\d+)")
_HARD_CLOSE: Final = struct.pack("ii", 1, 0)

Node = str
T = TypeVar("T")
Conversation = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def broker_node(broker_id: int) -> Node:
    return str(broker_id)


class Network:
    """All doors and all rules. Use as a context manager; `close` ends every connection."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._gates: dict[tuple[Node, Node], asyncio.Event] = {}
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="network")
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        blocked = [f"{source}>{target}" for (source, target), gate in self._gates.items() if not gate.is_set()]
        return f"Network({len(self._servers)} doors, blocked: {', '.join(blocked) or 'nothing'})"

    # --- doors --------------------------------------------------------------------------------------------------------

    def door_to_broker(self, broker_id: int, port: int) -> int:
        """A port that leads to a broker's inter-broker listener; the caller says who it is by its client id."""

        async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            first, source = await _introduction(reader)
            await self._connect(reader, writer, source, broker_node(broker_id), port, first)

        return self._call(self._open(converse))

    def door_to_zookeeper(self, broker_id: int, port: int) -> int:
        """A port that leads one broker to a ZooKeeper node."""

        async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._connect(reader, writer, broker_node(broker_id), ZOOKEEPER, port, b"")

        return self._call(self._open(converse))

    # --- rules --------------------------------------------------------------------------------------------------------

    def block(self, source: Node, target: Node) -> None:
        """Stop the bytes from one node to another; the other way stays as it is."""
        self._call(self._set([(source, target)], is_open=False))

    def cut(self, one: Node, others: Iterable[Node]) -> None:
        """Stop both ways between one node and each of the others."""
        pairs = [pair for other in others for pair in ((one, other), (other, one))]
        self._call(self._set(pairs, is_open=False))

    def heal(self) -> None:
        """Everything flows again, first of all what was held."""
        self._call(self._set(list(self._gates), is_open=True))

    def close(self) -> None:
        if self._thread.is_alive():
            self._call(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    # --- on the loop --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def _gate(self, source: Node, target: Node) -> asyncio.Event:
        gate = self._gates.get((source, target))
        if gate is None:
            gate = self._gates[source, target] = asyncio.Event()
            gate.set()
        return gate

    async def _set(self, pairs: Iterable[tuple[Node, Node]], *, is_open: bool) -> None:
        for source, target in pairs:
            gate = self._gate(source, target)
            if is_open:
                gate.set()
            else:
                gate.clear()

    async def _open(self, converse: Conversation) -> int:
        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = self._loop.create_task(_until_lost(converse, reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        server = await asyncio.start_server(accepted, HOST, 0)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        source: Node,
        target: Node,
        port: int,
        first: bytes,
    ) -> None:
        """Carry a conversation that begins with `first` until either side ends it."""
        there, back = self._gate(source, target), self._gate(target, source)
        await there.wait()
        far_reader, far_writer = await asyncio.open_connection(HOST, port)
        try:
            far_writer.write(first)
            ways = [
                asyncio.ensure_future(_carry(reader, far_writer, there)),
                asyncio.ensure_future(_carry(far_reader, writer, back)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        finally:
            far_writer.close()


async def _until_lost(converse: Conversation, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await converse(reader, writer)
    except (OSError, asyncio.IncompleteReadError):
        # Nobody there, or the connection broke: the caller sees a reset, not a polite end.
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _HARD_CLOSE)
        writer.transport.abort()
    finally:
        writer.close()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event) -> None:
    """Move bytes while the gate is open; an end of the stream, too, passes only through an open gate."""
    while True:
        data = await reader.read(_CHUNK_BYTES)
        await gate.wait()
        if not data:
            return
        writer.write(data)
        await writer.drain()


async def _introduction(reader: asyncio.StreamReader) -> tuple[bytes, Node]:
    """The first bytes of a connection and the node that sent them."""
    head = await reader.readexactly(_REQUEST_HEAD.size)
    length = _REQUEST_HEAD.unpack(head)[-1]
    if not 0 <= length <= _MAX_CLIENT_ID_BYTES:
        return head, STRANGER
    client_id = await reader.readexactly(length)
    named = _BROKER_CLIENT.fullmatch(client_id.decode(errors="replace"))
    return head + client_id, named[1] if named else STRANGER
