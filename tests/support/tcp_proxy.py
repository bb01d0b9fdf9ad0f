"""A network that can be cut: a TCP link from every broker to every other, to ZooKeeper, and from clients to brokers.

Every broker advertises its inter-broker listener under a name (`broker_host`), and every broker process calls that name
over a link of its own (`cluster/planted.py`): so a link knows who calls, and can be at odds with one caller alone.

Two things can be done to it. A *block* is one-way, between two nodes, and holds for every connection between them
whoever opened it: bytes from one to the other stop, and arrive late, in order, after healing, as TCP delivers them. A
new connection across a block is accepted and stays silent. A *refusal* is what a firewall's REJECT is: calls from one
node to another get a real "connection refused" at once, and connections that were opened that way are reset; calls in
the other direction go on. What this network cannot show is a lost SYN, which looks like a block to the caller but for
the time at which it notices; and a target that is dead resets a connection, where its own machine would refuse it.

On a link that carries requests of Kafka's protocol one by one (`framed`) a client is known by its client.id, and can be
cut off alone. There some requests can also be *kept back*: the request goes no further, its sender finds its connection
reset, and whoever keeps it delivers it when it likes, however often it has been sent again by then. A broker sees a
message that was late.

Owner: a thread with an event loop of its own; the methods are for other threads and return when the rule holds.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self, TypeVar

ZOOKEEPER: Final = "zookeeper"
CLIENTS: Final = "clients"
"""All clients of the cluster are one node."""
HOST: Final = "127.0.0.1"

_CHUNK_BYTES: Final = 64 * 1024
_TURNS: Final = 10
_HARD_CLOSE: Final = struct.pack("ii", 1, 0)

Node = str
T = TypeVar("T")
_SIZE: Final = struct.Struct(">i")
_REQUEST_HEAD: Final = struct.Struct(">hhih")
_LATE_ANSWER_S: Final = 2.0

Conversation = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def broker_node(broker_id: int) -> Node:
    return str(broker_id)


def broker_host(broker_id: int) -> str:
    """The name under which a broker of this network advertises itself to the others."""
    return f"broker-{broker_id}.network"


@dataclass(slots=True, eq=False)
class LateRequests:
    """Requests of some kinds that are kept back, and the ones that have been."""

    api_keys: Collection[int]
    most: int
    """How many are kept back; after that they pass."""
    client: str
    """Only of clients whose client.id begins with this."""
    kept: list[tuple[int, bytes]] = field(default_factory=list)
    """Port and frame of each, in the order they came."""

    def keeps(self, port: int, frame: bytes) -> bool:
        """Whether this request goes no further."""
        if len(self.kept) >= self.most or len(frame) < _SIZE.size + _REQUEST_HEAD.size:
            return False
        api_key, *_ = _REQUEST_HEAD.unpack_from(frame, _SIZE.size)
        if api_key not in self.api_keys or not client_of(frame).startswith(self.client):
            return False
        self.kept.append((port, frame))
        return True


def client_of(frame: bytes) -> str:
    """The client.id of a request."""
    if len(frame) < _SIZE.size + _REQUEST_HEAD.size:
        return ""
    *_, length = _REQUEST_HEAD.unpack_from(frame, _SIZE.size)
    start = _SIZE.size + _REQUEST_HEAD.size
    return frame[start : start + max(0, length)].decode(errors="replace")


class Network:
    """All links and all rules. Use as a context manager; `close` ends every connection."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._gates: dict[tuple[Node, Node], asyncio.Event] = {}
        self._client_gates: dict[str, asyncio.Event] = {}
        """Of the clients that are cut off alone."""
        self._links: list[_Link] = []
        self._late: list[LateRequests] = []
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

    def link(self, source: Node, target: Node, port: int, *, framed: bool = False) -> int:
        """A port that leads the calls of `source` to `port` of `target`; `framed`: requests of Kafka's protocol."""
        return self._call(self._add_link(source, target, port, framed))

    # --- rules --------------------------------------------------------------------------------------------------------

    def block(self, source: Node, target: Node) -> None:
        """Stop the bytes from one node to another; the other way stays as it is."""
        self._call(self._set([(source, target)], is_open=False))

    def cut(self, one: Node, others: Iterable[Node]) -> None:
        """Stop both ways between one node and each of the others."""
        pairs = [pair for other in others for pair in ((one, other), (other, one))]
        self._call(self._set(pairs, is_open=False))

    def cut_client(self, client: str) -> None:
        """Stop both ways, on framed links, between everybody and the clients with this client.id."""
        self._call(self._cut_client(client))

    def refuse(self, source: Node, target: Node) -> None:
        """Refuse calls from one node to another, and reset the connections it has opened there."""
        self._call(self._refuse([(source, target)]))

    def refuse_both_ways(self, one: Node, others: Iterable[Node]) -> None:
        """Refuse calls in both directions between one node and each of the others."""
        self._call(self._refuse([pair for other in others for pair in ((one, other), (other, one))]))

    def keep_back(self, *api_keys: int, most: int, client: str = "") -> LateRequests:
        """From now on keep back the next requests of these kinds on framed links."""
        late = LateRequests(api_keys, most, client)
        self._call(self._keep(late))
        return late

    def let_pass(self, late: LateRequests) -> None:
        """Keep no more of them back."""
        self._call(self._let_pass(late))

    def deliver(self, late: LateRequests, count: int | None = None) -> int:
        """Hand over what was kept back (the first `count`), and wait for the answers; how many were answered."""
        return self._call(self._deliver(late, count))

    def heal(self) -> None:
        """Everything flows again, first of all what was held; what was kept back stays with its keeper."""
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

    async def _cut_client(self, client: str) -> None:
        self._client_gates.setdefault(client, asyncio.Event())

    async def _wait_for_client(self, caller: _Caller) -> None:
        """While the caller is cut off; nobody knows who it is before its first request."""
        while (gate := self._client_gates.get(caller.client)) is not None:
            await gate.wait()

    async def _keep(self, late: LateRequests) -> None:
        self._late.append(late)

    async def _let_pass(self, late: LateRequests) -> None:
        if late in self._late:  # healing has forgotten it
            self._late.remove(late)

    async def _deliver(self, late: LateRequests, count: int | None) -> int:
        going = late.kept[:count]
        del late.kept[:count]
        answered = 0
        for port, frame in going:
            reader, writer = await asyncio.open_connection(HOST, port)
            try:
                writer.write(frame)
                await asyncio.wait_for(_read_frame(reader), _LATE_ANSWER_S)
                answered += 1
            except (OSError, asyncio.IncompleteReadError, TimeoutError):
                pass  # a broker that is dead or refuses to answer; whoever delivers is told the number
            finally:
                writer.close()
        return answered

    async def _add_link(self, source: Node, target: Node, port: int, framed: bool) -> int:
        async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._connect(reader, writer, source, target, port, framed)

        link = _Link(source, target, converse)
        self._links.append(link)
        await link.take_calls()
        return link.port

    async def _refuse(self, pairs: Collection[tuple[Node, Node]]) -> None:
        for link in self._links:
            if (link.source, link.target) in pairs:
                await link.refuse_calls()

    async def _heal(self) -> None:
        self._late.clear()
        while self._client_gates:
            self._client_gates.popitem()[1].set()
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
        framed: bool,
    ) -> None:
        """Carry a conversation until either side ends it."""
        there, back = self._gate(source, target), self._gate(target, source)
        await there.wait()
        far_reader, far_writer = await asyncio.open_connection(HOST, port)
        try:
            caller = _Caller()
            requests = self._carry_requests(reader, far_writer, there, port, caller) if framed else None
            ways = [
                asyncio.ensure_future(requests or _carry(reader, far_writer, there.wait)),
                asyncio.ensure_future(_carry(far_reader, writer, back.wait, lambda: self._wait_for_client(caller))),
            ]
            try:
                done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                if any(isinstance(way.exception(), _KeptBackError) for way in done):
                    raise ConnectionResetError
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        finally:
            far_writer.close()

    async def _carry_requests(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        gate: asyncio.Event,
        port: int,
        caller: _Caller,
    ) -> None:
        """Move one request after the other, but for those that are kept back: then the connection is over."""
        while True:
            frame = await _read_frame(reader)
            caller.client = client_of(frame)
            await self._wait_for_client(caller)
            await gate.wait()
            if any(late.keeps(port, frame) for late in self._late):
                raise _KeptBackError
            writer.write(frame)
            await writer.drain()


@dataclass(slots=True)
class _Caller:
    """Who is at the other end of a framed link."""

    client: str = ""


class _KeptBackError(Exception):
    """A request went no further; its sender shall see a reset."""


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


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    """A request or an answer with its size; IncompleteReadError at the end of the stream."""
    size = await reader.readexactly(_SIZE.size)
    return size + await reader.readexactly(_SIZE.unpack(size)[0])


async def _carry(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *gates: Callable[[], Awaitable[Any]]
) -> None:
    """Move bytes while every gate is open; an end of the stream, too, passes only through open gates."""
    while True:
        data = await reader.read(_CHUNK_BYTES)
        for gate in gates:
            await gate()
        if not data:
            return
        writer.write(data)
        await writer.drain()
