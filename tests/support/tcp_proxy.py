"""A network that can be cut: a TCP link from every broker to every other, and from each broker to ZooKeeper.

Every broker advertises its inter-broker listener under a name (`broker_host`), and every broker process calls that name
over a link of its own (`cluster/planted.py`): so a link knows who calls, and can be at odds with one caller alone.

Two things can be done to it. A *block* is one-way, between two nodes, and holds for every connection between them
whoever opened it: bytes from one to the other stop, and arrive late, in order, after healing, as TCP delivers them. A
new connection across a block is accepted and stays silent. A *refusal* is what a firewall's REJECT is: calls from one
node to another get a real "connection refused" at once, and connections that were opened that way are reset; calls in
the other direction go on. What this network cannot show is a lost SYN, which looks like a block to the caller but for
the time at which it notices; and a target that is dead resets a connection, where its own machine would refuse it.

Owner: a thread with an event loop of its own; the methods are for other threads and return when the rule holds.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from types import TracebackType
from typing import Any, Final, Self, TypeVar

ZOOKEEPER: Final = "zookeeper"
HOST: Final = "127.0.0.1"

_CHUNK_BYTES: Final = 64 * 1024
_TURNS: Final = 10
_HARD_CLOSE: Final = struct.pack("ii", 1, 0)

Node = str
T = TypeVar("T")
Conversation = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def broker_node(broker_id: int) -> Node:
    return str(broker_id)


def broker_host(broker_id: int) -> str:
    """The name under which a broker of this network advertises itself to the others."""
    return f"broker-{broker_id}.network"


class Network:
    """All links and all rules. Use as a context manager; `close` ends every connection."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._gates: dict[tuple[Node, Node], asyncio.Event] = {}
        self._links: list[_Link] = []
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
        refused = [f"{link.source}>{link.target}" for link in self._links if not link.takes_calls]
        rules = f"blocked: {', '.join(blocked) or 'nothing'}, refused: {', '.join(refused) or 'nothing'}"
        return f"Network({len(self._links)} links, {rules})"

    # --- links --------------------------------------------------------------------------------------------------------

    def link(self, source: Node, target: Node, port: int) -> int:
        """A port that leads the calls of `source` to `port` of `target`."""
        return self._call(self._add_link(source, target, port))

    # --- rules --------------------------------------------------------------------------------------------------------

    def block(self, source: Node, target: Node) -> None:
        """Stop the bytes from one node to another; the other way stays as it is."""
        self._call(self._set([(source, target)], is_open=False))

    def cut(self, one: Node, others: Iterable[Node]) -> None:
        """Stop both ways between one node and each of the others."""
        pairs = [pair for other in others for pair in ((one, other), (other, one))]
        self._call(self._set(pairs, is_open=False))

    def refuse(self, source: Node, target: Node) -> None:
        """Refuse calls from one node to another, and reset the connections it has opened there."""
        self._call(self._refuse([(source, target)]))

    def refuse_both_ways(self, one: Node, others: Iterable[Node]) -> None:
        """Refuse calls in both directions between one node and each of the others."""
        self._call(self._refuse([pair for other in others for pair in ((one, other), (other, one))]))

    def heal(self) -> None:
        """Everything flows again, first of all what was held."""
        self._call(self._heal())

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

    async def _add_link(self, source: Node, target: Node, port: int) -> int:
        async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._connect(reader, writer, source, target, port)

        link = _Link(source, target, converse)
        self._links.append(link)
        await link.take_calls()
        return link.port

    async def _refuse(self, pairs: Collection[tuple[Node, Node]]) -> None:
        for link in self._links:
            if (link.source, link.target) in pairs:
                await link.refuse_calls()

    async def _heal(self) -> None:
        await self._set(list(self._gates), is_open=True)
        for link in self._links:
            await link.take_calls()

    async def _end(self) -> None:
        for link in self._links:
            await link.close()

    async def _connect(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        source: Node,
        target: Node,
        port: int,
    ) -> None:
        """Carry a conversation until either side ends it."""
        there, back = self._gate(source, target), self._gate(target, source)
        await there.wait()
        far_reader, far_writer = await asyncio.open_connection(HOST, port)
        try:
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


class _Link:
    """The way from one node to another: a port, and the connections that came through it.

    The port is held while calls are refused: a socket that is bound and does not listen makes this machine say so.
    """

    def __init__(self, source: Node, target: Node, converse: Conversation) -> None:
        self.source = source
        self.target = target
        self._converse = converse
        self._holder = _bound(0)
        self.port = int(self._holder.getsockname()[1])
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def takes_calls(self) -> bool:
        return self._server is not None

    async def take_calls(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._accepted, sock=_bound(self.port))

    async def refuse_calls(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        # asyncio leaks a connection that it accepted in the turn in which the server is closed.
        for sock in server.sockets:
            asyncio.get_running_loop().remove_reader(sock.fileno())
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        await self.refuse_calls()
        self._holder.close()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._until_lost(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _until_lost(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._converse(reader, writer)
        except (OSError, asyncio.CancelledError):
            # Nobody there, the connection broke, or calls are refused: the caller sees a reset, not a polite end.
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _HARD_CLOSE)
            writer.transport.abort()
        finally:
            writer.close()


def _bound(port: int) -> socket.socket:
    """A socket at this port, which several may share; 0 is any free one."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind((HOST, port))
    return bound


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event) -> None:
    """Move bytes while the gate is open; an end of the stream, too, passes only through an open gate."""
    while True:
        data = await reader.read(_CHUNK_BYTES)
        await gate.wait()
        if not data:
            return
        writer.write(data)
        await writer.drain()
