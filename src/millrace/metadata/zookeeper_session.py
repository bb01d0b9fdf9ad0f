"""A session on a ZooKeeper ensemble, for one event loop: the bridge to kazoo, and the only module that imports it.

Here: connecting and connecting again, the login, reads that are asked until they are answered, writes whose outcome may
be in doubt, watches, the states of the session, and the threads all that needs. Paths are below the one in the address,
which `open` makes. Not here: which znodes there are, what is written when, and what a doubt means for it
(`metadata.zookeeper`).

Invariants
- A read is repeated until it is answered. A write is sent once: where its answer was lost, `multi` raises InDoubt.
- Whatever is asked after that goes through a connection that is younger than the write. ZooKeeper refuses what an older
  connection of the same session still had under way, so what is not there then will not come.
- When the session has ended `number` changes first; then its open requests fail, and the states say so.
- EXPIRED is never skipped in `states`.
- Nothing is asked on a connection before it has logged in: kazoo does that first, on every new connection.
- An alarm rings for every change after the read that set it: kazoo sets the watch with that very read, and lets it ring
  when the connection is lost, because ZooKeeper may then have nobody to tell.

Owner: the loop that called `open`. kazoo has threads of its own; its answers, watches and states come to the loop by
`call_soon_threadsafe`, and nothing else here runs in them. One more thread ends the session, because kazoo's stop
blocks. At most `_BATCHES * BATCH` requests are under way: kazoo wakes its thread through a socket pair that would block
the loop when some 270 wake-ups lie unread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from ssl import SSLSocket
from typing import Any, Final, Generic, TypeVar, overload

from kazoo.client import KazooClient, TransactionRequest
from kazoo.exceptions import (
    AuthFailedError,
    BadVersionError,
    ConnectionLoss,
    KazooException,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
    OperationTimeoutError,
    RolledBackError,
    RuntimeInconsistency,
    SessionClosedRequireSaslError,
    SessionExpiredError,
    SessionMovedError,
)
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.hosts import collect_hosts
from kazoo.protocol.states import KazooState, KeeperState
from kazoo.retry import KazooRetry
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from millrace.clock import Clock
from millrace.errors import ConfigError, StorageError
from millrace.metadata.store import SessionState
from millrace.metadata.zookeeper_access import OPEN, ZooKeeperAccess, ZooKeeperTls
from millrace.tasks import awaited

logger = logging.getLogger(__name__)
# kazoo reports every attempt to connect as a warning; this module says once that the connection is gone or back.
_kazoo_logger = logging.getLogger(f"{__name__}.kazoo")
_kazoo_logger.setLevel(logging.CRITICAL)

BATCH: Final = 32
"""So many reads are sent at a time."""
_BATCHES: Final = 4
_CLOSE_TIMEOUT_S: Final = 1.0
_ATTEMPTS: Final = 3
"""So many servers may be silent, one after another, before a session times out."""

_LOST: Final = (ConnectionLoss, OperationTimeoutError, SessionExpiredError, SessionMovedError)
"""The outcome is not known: the answer did not come."""

_NOT_LET_IN: Final = (NoAuthError, AuthFailedError, SessionClosedRequireSaslError)
"""The znode is somebody else's, or the server (`enforce.auth`) takes no questions of strangers."""

_Send = Callable[[KazooClient], Any]
"""Sends one request and returns kazoo's result object."""
T = TypeVar("T")
T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")


class InDoubt(Exception):
    """A write was sent and its answer was lost."""


class Closed(StorageError):
    """The session was ended by its owner."""

    def __init__(self) -> None:
        super().__init__("the ZooKeeper session is closed")


# --- what is asked and answered ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Node:
    """A znode. `owner` is the session it ends with, 0 where it stays."""

    data: bytes
    version: int
    czxid: int
    owner: int


class Alarm:
    """An event that watches set, from kazoo's thread, and the end of the session too. Made by `ZooKeeperSession.alarm`.

    One alarm serves its reader for ever: kazoo keeps each watcher of a path once, so a watch set again adds nothing.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def ring(self, _: object = None) -> None:
        """May be called in any thread."""
        _on_loop(self._loop, self._event.set)

    def clear(self) -> None:
        """Forget what has rung: before the state is read again."""
        self._event.clear()

    async def wait(self) -> None:
        await self._event.wait()


@dataclass(frozen=True, slots=True)
class _Read(Generic[T]):
    """A question that is answered with a T; `alarm` rings when the answer has changed."""

    path: str
    alarm: Alarm | None = None


class Get(_Read[Node | None]):
    """The znode, None where there is none."""

    __slots__ = ()


class Exists(_Read[bool]):
    """Whether there is such a znode; unlike Get, it has the alarm ring for one that comes."""

    __slots__ = ()


class Children(_Read[list[str] | None]):
    """The names of the znodes below it, None where there is none such."""

    __slots__ = ()


class IsOpen(_Read[bool | None]):
    """Whether strangers may do something with the znode, None where there is none such."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Create:
    path: str
    value: bytes = b""
    ephemeral: bool = False


@dataclass(frozen=True, slots=True)
class Delete:
    path: str
    version: int = -1
    """The one it must have; -1 is any."""


@dataclass(frozen=True, slots=True)
class SetData:
    path: str
    value: bytes
    version: int = -1
    """The one it must have; -1 is any."""


@dataclass(frozen=True, slots=True)
class Check:
    """Refuses the multi where the znode has another version."""

    path: str
    version: int


Operation = Create | Delete | SetData | Check


class Refusal(Enum):
    """Why nothing of a multi was done: the znodes are not as its author thought."""

    NODE_EXISTS = "node exists"
    NO_NODE = "no node"
    BAD_VERSION = "bad version"


_REFUSALS: Final[dict[type[Exception], Refusal]] = {
    NodeExistsError: Refusal.NODE_EXISTS,
    NoNodeError: Refusal.NO_NODE,
    BadVersionError: Refusal.BAD_VERSION,
}


# --- the session ------------------------------------------------------------------------------------------------------


class ZooKeeperSession:
    """One session, and after its end the next one, on the servers of `address` (`host:port,.../path`)."""

    def __init__(
        self,
        address: str,
        *,
        session_timeout_ms: int,
        connection_timeout_ms: int,
        clock: Clock,
        access: ZooKeeperAccess = OPEN,
    ) -> None:
        self.hosts, self.root = _split_address(address)
        self.access = access
        self.state = SessionState.SUSPENDED
        self.number = 0
        """Another one for every session: what was won in one is gone in the next."""
        self.closed = False
        self._session_timeout_ms = session_timeout_ms
        self._connection_timeout_ms = connection_timeout_ms
        self._clock = clock
        self._client: KazooClient | None = None
        self._connected = asyncio.Event()
        self._state_queues: list[_StateQueue] = []
        self._outstanding: set[asyncio.Future[Any]] = set()
        self._alarms: set[Alarm] = set()
        self._batches = asyncio.Semaphore(_BATCHES)

    async def open(self) -> None:
        """Connect and make the path in the address. StorageError where no server answers in time or it is refused."""
        loop = asyncio.get_running_loop()
        access = self.access
        if access.tls is not None:
            await loop.run_in_executor(None, access.tls.context)  # what is wrong with the files is said here
        handler = _Handler(self._session_timeout_ms / 1000 / _ATTEMPTS, access.tls)
        client = KazooClient(
            hosts=_repeated_hosts(self.hosts),
            timeout=self._session_timeout_ms / 1000,
            handler=handler,
            auth_data=[("digest", f"{access.username}:{access.password}")] if access.username else None,
            default_acl=CREATOR_ALL_ACL if access.closes else None,
            connection_retry=KazooRetry(max_tries=-1, delay=0.05, backoff=2, max_delay=0.2),
            logger=_kazoo_logger,
        )

        def changed(state: str) -> None:
            _on_loop(loop, partial(self._on_state, state))
            if client.client_state == KeeperState.AUTH_FAILED:
                _on_loop(loop, self._connected.set)  # kazoo gives up: nobody is to wait for it

        client.add_listener(changed)
        self._client = client
        client.start_async()
        try:
            await self._at_most(self._connection_timeout_ms / 1000, awaited(self._connected.wait()))
            if client.client_state == KeeperState.AUTH_FAILED:
                raise self._refused("log in", AuthFailedError())
            if not self._connected.is_set():
                hint = handler.tls_failure or "is it running, and is zookeeper.connect right?"
                raise StorageError(
                    f"no ZooKeeper answered at {self.hosts} within {self._connection_timeout_ms} ms; {hint}"
                )
            await self._make_root()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the session and with it every wait. Closing twice is harmless."""
        client, self._client = self._client, None
        self.closed = True
        if client is None:
            return
        for future in list(self._outstanding):
            _fail(future, Closed())
        self._connected.set()  # whoever waits for the connection finds the session closed
        for alarm in self._alarms:
            alarm.ring()
        for queue in self._state_queues:
            queue.end()
        await self._stop_client(client)

    async def _stop_client(self, client: KazooClient) -> None:
        """kazoo's stop blocks until the server has answered: it runs in a thread, and is not waited for for ever."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def stop() -> None:
            try:
                client.stop()
                client.close()
            except (KazooException, OSError) as error:
                logger.debug("closing the ZooKeeper session: %r", error)
            finally:
                _on_loop(loop, partial(_resolve, done))

        threading.Thread(target=stop, name="millrace-zookeeper-close", daemon=True).start()
        await self._at_most(_CLOSE_TIMEOUT_S, done)

    async def _at_most(self, seconds: float, done: asyncio.Future[Any]) -> None:
        """Wait for `done`, and cancel it when the time is up."""
        timer = self._clock.call_later(seconds, done.cancel)
        try:
            await asyncio.wait({done})
        finally:
            timer.cancel()
            done.cancel()

    async def _make_root(self) -> None:
        """Make the path in the address. Doing it twice is harmless, so a lost answer is no question."""
        parts = self.root.split("/")
        for depth in range(2, len(parts) + 1):
            path = "/".join(parts[:depth])
            # What lies above the cluster's own path may be for others, too.
            acl = OPEN_ACL_UNSAFE if depth < len(parts) else None
            (made,) = await self._ask_until_answered(partial(_send_create, path, acl))
            if isinstance(made, NoAuthError) and depth < len(parts):
                continue  # made by somebody else, who may have let us in further down
            if isinstance(made, Exception) and not isinstance(made, NodeExistsError):
                raise self._refused(f"create {path}", made)

    def owns(self, node: Node) -> bool:
        """Whether the znode ends with this session."""
        session = None if self._client is None else self._client.client_id
        return session is not None and session[0] == node.owner

    # --- states -------------------------------------------------------------------------------------------------------

    async def states(self) -> AsyncGenerator[SessionState, None]:
        """The state now and after each change, until the session is closed."""
        queue = _StateQueue(self.state)
        self._state_queues.append(queue)
        try:
            while not self.closed:
                state = await queue.get()
                if state is None:
                    return
                yield state
        finally:
            self._state_queues.remove(queue)

    def _on_state(self, state: str) -> None:
        if self._client is None:
            return
        if state == KazooState.CONNECTED:
            self._connected.set()
            self._set_state(SessionState.CONNECTED)
            return
        self._connected.clear()
        if state == KazooState.SUSPENDED:
            self._set_state(SessionState.SUSPENDED)
            return
        self.number += 1
        # kazoo can forget a request that is sent in the instant in which the session ends.
        for future in list(self._outstanding):
            _fail(future, SessionExpiredError())
        self._set_state(SessionState.EXPIRED)

    def _set_state(self, state: SessionState) -> None:
        if state is not SessionState.CONNECTED or self.state is not SessionState.CONNECTED:
            level = logging.INFO if state is SessionState.CONNECTED else logging.WARNING
            logger.log(level, "ZooKeeper session at %s: %s", self.hosts, state.name.lower())
        self.state = state
        for queue in self._state_queues:
            queue.put(state)

    # --- reads --------------------------------------------------------------------------------------------------------

    @contextmanager
    def alarm(self) -> Iterator[Alarm]:
        """An alarm that may be given to reads, and rings when the session is closed, too."""
        alarm = Alarm()
        self._alarms.add(alarm)
        try:
            yield alarm
        finally:
            self._alarms.discard(alarm)

    async def get(self, path: str) -> Node | None:
        (node,) = await self.read(Get(path))
        return node

    async def get_all(self, paths: Sequence[str]) -> list[Node | None]:
        """The znodes at `paths`, in order, None where there is none."""
        nodes: list[Node | None] = []
        for start in range(0, len(paths), BATCH):
            nodes.extend(await self.read(*(Get(path) for path in paths[start : start + BATCH])))
        return nodes

    @overload
    async def read(self, first: _Read[T1], /) -> tuple[T1]: ...
    @overload
    async def read(self, first: _Read[T1], second: _Read[T2], /) -> tuple[T1, T2]: ...
    @overload
    async def read(self, first: _Read[T1], second: _Read[T2], third: _Read[T3], /) -> tuple[T1, T2, T3]: ...
    @overload
    async def read(self, *requests: _Read[T]) -> tuple[T, ...]: ...
    async def read(self, *requests: _Read[Any]) -> tuple[Any, ...]:
        """Answers in order, each at least as young as the one before it. At most BATCH at a time."""
        answers = await self._ask_until_answered(*(partial(self._send_read, request) for request in requests))
        return tuple(self._answer(request, answer) for request, answer in zip(requests, answers, strict=True))

    async def sync(self) -> None:
        """From here on this session reads at least everything that was committed before the call."""
        path = self.root or "/"
        await self._ask_until_answered(lambda client: client.sync_async(path))

    def _send_read(self, request: _Read[Any], client: KazooClient) -> Any:
        path = self.root + request.path
        watch = None if request.alarm is None else request.alarm.ring
        match request:
            case Get():
                return client.get_async(path, watch=watch)
            case Exists():
                return client.exists_async(path, watch=watch)
            case Children():
                return client.get_children_async(path, watch=watch)
            case IsOpen():
                return client.get_acls_async(path)
        raise AssertionError(request)

    def _answer(self, request: _Read[Any], answer: Any) -> Any:
        if isinstance(answer, NoNodeError):
            return None
        if isinstance(answer, Exception):
            raise self._refused(f"read {self.root}{request.path}", answer)
        match request:
            case Get():
                data, stat = answer
                return Node(data, stat.version, stat.czxid, stat.ephemeralOwner)
            case Exists():
                return answer is not None
            case IsOpen():
                acls, _ = answer
                return any(acl.id.scheme == "world" for acl in acls)
        return answer

    def _refused(self, doing: str, error: Exception) -> StorageError:
        if isinstance(error, _NOT_LET_IN):
            return StorageError(f"not allowed by ZooKeeper at {self.hosts} to {doing}: {self.access.advice}")
        return StorageError(f"ZooKeeper at {self.hosts} refuses to {doing}: {error!r}")

    # --- writes -------------------------------------------------------------------------------------------------------

    async def close_to_strangers(self, paths: Sequence[str]) -> int:
        """Close those of the znodes that are open, for this session's login; how many. Gone ones are no matter.

        It may be done twice, so a lost answer is no question. At most BATCH at a time.
        """
        are_open = await self.read(*(IsOpen(path) for path in paths))
        found = [path for path, is_open in zip(paths, are_open, strict=True) if is_open]
        answers = await self._ask_until_answered(*(partial(self._send_close, path) for path in found))
        for path, answer in zip(found, answers, strict=True):
            if isinstance(answer, Exception) and not isinstance(answer, NoNodeError):
                raise self._refused(f"close {self.root}{path}", answer)
        return len(found)

    def _send_close(self, path: str, client: KazooClient) -> Any:
        return client.set_acls_async(self.root + path, CREATOR_ALL_ACL)

    async def multi(self, operations: Sequence[Operation], check: Callable[[], object] | None = None) -> Refusal | None:
        """All operations, or none and why. InDoubt where the answer was lost.

        `check` is called, and may raise, when they are about to be sent: the connection may have been waited for.
        """

        def send(client: KazooClient) -> Any:
            if check is not None:
                check()
            transaction = client.transaction()
            for operation in operations:
                self._add(operation, transaction)
            return transaction.commit_async()

        try:
            (results,) = await self._ask(send)
        except _LOST:
            raise InDoubt from None
        error = _first_error(results)
        if error is None:
            return None
        if isinstance(error, _LOST):
            raise InDoubt
        refusal = _REFUSALS.get(type(error))
        if refusal is None:
            raise self._refused("write", error)
        return refusal

    def _add(self, operation: Operation, transaction: TransactionRequest) -> None:
        path = self.root + operation.path
        match operation:
            case Create(_, value, ephemeral):
                transaction.create(path, value, ephemeral=ephemeral)
            case Delete(_, version):
                transaction.delete(path, version)
            case SetData(_, value, version):
                transaction.set_data(path, value, version)
            case Check(_, version):
                transaction.check(path, version)

    # --- requests to kazoo --------------------------------------------------------------------------------------------

    async def _ask_until_answered(self, *requests: _Send) -> list[Any]:
        """For requests that may be repeated."""
        while True:
            try:
                return await self._ask(*requests)
            except _LOST:
                continue

    async def _ask(self, *requests: _Send) -> list[Any]:
        """Send the requests in this order on one connection and wait for all answers.

        An error that ZooKeeper answered with is returned as a value; a lost connection or session is raised.
        """
        async with self._batches:
            await self._connected.wait()
            client = self._client
            if client is None:
                raise Closed
            futures = [self._send(client, request) for request in requests]
            answers = await asyncio.gather(*futures, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, (*_LOST, Closed)):
                raise answer
            if isinstance(answer, BaseException) and not isinstance(answer, KazooException):
                raise answer
        return list(answers)

    def _send(self, client: KazooClient, request: _Send) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        sent = request(client)
        future: asyncio.Future[Any] = loop.create_future()
        self._outstanding.add(future)
        future.add_done_callback(self._outstanding.discard)
        sent.rawlink(lambda result: _on_loop(loop, partial(_take_answer, future, result)))
        return future


def _send_create(path: str, acl: Any, client: KazooClient) -> Any:
    return client.create_async(path, b"", acl=acl)


def _first_error(results: Any) -> Exception | None:
    """Why a multi failed, or None where it did not. `results` are one for each operation, or an error for all."""
    answers = results if isinstance(results, list) else [results]
    errors = [answer for answer in answers if isinstance(answer, Exception)]
    causes = [error for error in errors if not isinstance(error, (RolledBackError, RuntimeInconsistency))]
    return next(iter(causes or errors), None)


class _StateQueue:
    """States for one reader: what it has not read is replaced by what is newer, but never EXPIRED."""

    def __init__(self, state: SessionState) -> None:
        self._states: deque[SessionState | None] = deque([state])
        self._news = asyncio.Event()

    def put(self, state: SessionState) -> None:
        states = self._states
        if states and states[-1] is not SessionState.EXPIRED:
            states.pop()
        if not states or states[-1] is not state:
            states.append(state)
        self._news.set()

    def end(self) -> None:
        self._states.append(None)
        self._news.set()

    async def get(self) -> SessionState | None:
        while not self._states:
            self._news.clear()
            await self._news.wait()
        return self._states.popleft()


# --- between kazoo's threads and the loop -----------------------------------------------------------------------------


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """kazoo's threads, but a server whose machine is gone does not cost a whole session timeout.

    TLS is begun here: kazoo would trust the system's authorities beside the one that was named. And it asks the kernel
    whether there is something to read, which does not know of what TLS has already decrypted.
    """

    def __init__(self, connect_timeout_s: float, tls: ZooKeeperTls | None) -> None:
        super().__init__()
        self.tls_failure = ""
        """What went wrong with TLS the last time."""
        self._connect_timeout_s = connect_timeout_s
        self._tls = tls

    def create_connection(self, *args: Any, hostname: str | None = None, **kwargs: Any) -> Any:
        connected = super().create_connection(*args, **{**kwargs, "timeout": self._connect_timeout_s})
        if self._tls is None:
            return connected
        try:
            return self._tls.context().wrap_socket(connected, server_hostname=hostname)
        except (OSError, ConfigError) as error:
            connected.close()
            self.tls_failure = f"TLS failed: {error}"
            raise ConnectionError(self.tls_failure) from error

    def select(self, readable: Any, writable: Any, failed: Any, timeout: Any = None) -> Any:
        decrypted = [each for each in readable if isinstance(each, SSLSocket) and each.pending()]
        if not decrypted:
            return super().select(readable, writable, failed, timeout)
        found, writable, failed = super().select(readable, writable, failed, 0)
        return [*found, *(each for each in decrypted if each not in found)], writable, failed


def _on_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:  # the loop was closed meanwhile, and nobody waits any more
        logger.debug("an answer of ZooKeeper came after the end of the event loop")


def _take_answer(future: asyncio.Future[Any], result: Any) -> None:
    if future.done():
        return
    if result.exception is None:
        future.set_result(result.value)
    else:
        future.set_exception(result.exception)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


# --- the address ------------------------------------------------------------------------------------------------------


def _split_address(address: str) -> tuple[str, str]:
    """`h:p,h:p/path` as the hosts and the path, which is empty or begins with a slash."""
    hosts, _, path = address.partition("/")
    try:
        collect_hosts(hosts)
    except ValueError:
        raise ConfigError(f"zookeeper.connect: '{address}' is not host:port,...[/path]") from None
    root = "/".join(part for part in path.split("/") if part)
    return hosts, f"/{root}" if root else ""


def _repeated_hosts(hosts: str) -> str:
    """The same servers, named so often that kazoo waits a third of the session timeout for the answer of one.

    It divides the timeout by the number of names. A server that is starting sometimes swallows the first request of
    a connection; the session would be over before kazoo asked again.
    """
    names = hosts.split(",")
    return ",".join(names * -(-_ATTEMPTS // len(names)))
