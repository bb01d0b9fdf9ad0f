"""The metadata log in ZooKeeper: what several brokers share. The only module that knows kazoo.

Not here: the znodes and what is in them (`metadata.znodes`), what a delta means (`metadata.deltas`), what the calls
promise (`metadata.store`).

After a lost connection the author of a write looks whether it happened, by the number of a delta and by the random
`claim` in `/controller` and `/brokers/ids/N`.

Invariants
- Everything a controller writes is in a `multi` that checks the version of `/controller_epoch`.
- A write whose answer was lost is never repeated blindly. Its author looks first, through a connection that is
  younger than the write: ZooKeeper refuses what an older connection of the same session still had under way, so what
  is not there then will not come.
- `/controller` is made and replaced together with `/controller_epoch`: a pair that was read with equal epochs is true.
- Watches are set before the state is read that they guard, and set again after every lost connection.

Threads: kazoo has its own; its answers, watches and states come to the loop by `call_soon_threadsafe`, everything else
here belongs to the loop. At most `_BATCHES * _BATCH` requests are under way: kazoo wakes its thread through a socket
pair that would block the loop when some 270 wake-ups lie unread.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self, TypeVar

from kazoo.client import KazooClient
from kazoo.exceptions import (
    BadVersionError,
    ConnectionLoss,
    KazooException,
    NodeExistsError,
    NoNodeError,
    OperationTimeoutError,
    RolledBackError,
    RuntimeInconsistency,
    SessionExpiredError,
    SessionMovedError,
)
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.hosts import collect_hosts
from kazoo.protocol.states import KazooState
from kazoo.retry import KazooRetry

from millrace.clock import Clock, SystemClock
from millrace.errors import ConfigError, StorageError
from millrace.metadata import znodes
from millrace.metadata.store import (
    BrokerRegistration,
    Fenced,
    Member,
    Membership,
    SessionState,
    Snapshot,
    Trimmed,
)
from millrace.metadata.znodes import ControllerClaim
from millrace.tasks import awaited

logger = logging.getLogger(__name__)
# kazoo reports every attempt to connect as a warning; this module says once that the connection is gone or back.
_kazoo_logger = logging.getLogger(f"{__name__}.kazoo")
_kazoo_logger.setLevel(logging.CRITICAL)

MAX_VALUE_BYTES: Final = 900 * 1024
"""ZooKeeper refuses requests above 1 MiB (`jute.maxbuffer`)."""
CHUNK_BYTES: Final = 512 * 1024
_TRIM_AT_A_TIME: Final = 1000
_BATCH: Final = 32
_BATCHES: Final = 4
_CLOSE_TIMEOUT_S: Final = 1.0
_ATTEMPTS: Final = 3
"""So many servers may be silent, one after another, before a session times out."""

_LOST: Final = (ConnectionLoss, OperationTimeoutError, SessionExpiredError, SessionMovedError)
"""The outcome is not known: the answer did not come."""

T = TypeVar("T")
Request = Callable[[KazooClient], Any]
"""Sends one request and returns kazoo's result object."""


class _InDoubt(Exception):
    """A write was sent and its answer was lost."""


class _Closed(StorageError):
    """The session was ended by its owner."""


@dataclass(frozen=True, slots=True)
class _Node:
    """What `get` returned."""

    data: bytes
    version: int
    czxid: int
    owner: int


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """kazoo's threads, but a server whose machine is gone does not cost a whole session timeout."""

    def __init__(self, connect_timeout_s: float) -> None:
        super().__init__()
        self._connect_timeout_s = connect_timeout_s

    def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        return super().create_connection(*args, **{**kwargs, "timeout": self._connect_timeout_s})


class ZooKeeperStore:
    """One broker's session on an ensemble; see `metadata.store` for what the calls promise."""

    def __init__(
        self,
        hosts: str,
        *,
        session_timeout_ms: int = 6000,
        connection_timeout_ms: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.hosts, self._root = _split_address(hosts)
        self._session_timeout_ms = session_timeout_ms
        self._connection_timeout_ms = connection_timeout_ms or session_timeout_ms
        self._clock = clock or SystemClock()
        self._client: KazooClient | None = None
        self._closed = False
        self._connected = asyncio.Event()
        self._state = SessionState.SUSPENDED
        self._state_queues: list[_StateQueue] = []
        self._outstanding: set[asyncio.Future[Any]] = set()
        self._alarms: set[asyncio.Event] = set()
        self._batches = asyncio.Semaphore(_BATCHES)
        self._appending = asyncio.Lock()
        self._elected: int | None = None
        self._next: int | None = None
        """The number of the next delta, while this session is controller and knows it."""

    def __repr__(self) -> str:
        return f"ZooKeeperStore({self.hosts}{self._root}, {self._state.name.lower()})"

    # --------------------------------------------------------------------------------------------------------- session

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        client = KazooClient(
            hosts=_often_enough(self.hosts),
            timeout=self._session_timeout_ms / 1000,
            handler=_Handler(self._session_timeout_ms / 1000 / _ATTEMPTS),
            connection_retry=KazooRetry(max_tries=-1, delay=0.05, backoff=2, max_delay=0.2),
            logger=_kazoo_logger,
        )

        def changed(state: str) -> None:
            _on_loop(loop, partial(self._on_state, state))

        client.add_listener(changed)
        self._client = client
        client.start_async()
        try:
            await self._first_connection()
            await self._make_layout()
        except BaseException:
            await self.close()
            raise

    async def _first_connection(self) -> None:
        late: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = self._clock.call_later(self._connection_timeout_ms / 1000, partial(_resolve, late))
        connected = awaited(self._connected.wait())
        connected.add_done_callback(lambda _: _resolve(late))
        try:
            await late
        finally:
            timer.cancel()
            connected.cancel()
        if not self._connected.is_set():
            raise StorageError(
                f"no ZooKeeper answered at {self.hosts} within {self._connection_timeout_ms} ms; "
                "is it running, and is zookeeper.connect right?"
            )

    async def close(self) -> None:
        client, self._client = self._client, None
        self._closed = True
        if client is None:
            return
        for future in list(self._outstanding):
            _fail(future, _Closed("the ZooKeeper session is closed"))
        self._connected.set()  # whoever waits for the connection finds the session closed
        for alarm in self._alarms:
            alarm.set()
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
        timer = self._clock.call_later(_CLOSE_TIMEOUT_S, partial(_resolve, done))
        try:
            await done
        finally:
            timer.cancel()

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
        self._elected = self._next = None
        # kazoo can forget a request that is sent in the instant in which the session ends.
        for future in list(self._outstanding):
            _fail(future, SessionExpiredError())
        self._set_state(SessionState.EXPIRED)

    def _set_state(self, state: SessionState) -> None:
        if state is not SessionState.CONNECTED or self._state is not SessionState.CONNECTED:
            level = logging.INFO if state is SessionState.CONNECTED else logging.WARNING
            logger.log(level, "ZooKeeper session at %s: %s", self.hosts, state.name.lower())
        self._state = state
        for queue in self._state_queues:
            queue.put(state)

    async def sessions(self) -> AsyncGenerator[SessionState, None]:
        queue = _StateQueue(self._state)
        self._state_queues.append(queue)
        try:
            while not self._closed:
                state = await queue.get()
                if state is None:
                    return
                yield state
        finally:
            self._state_queues.remove(queue)

    async def _make_layout(self) -> None:
        await self._make_root()
        found = await self._get(znodes.METADATA)
        if found is None:
            results = await self._try_multi(
                [
                    _create(self._path(znodes.METADATA), znodes.to_json({"format": znodes.FORMAT})),
                    _create(self._path(znodes.DELTAS)),
                    _create(self._path(znodes.SNAPSHOTS)),
                    _create(self._path(znodes.SNAPSHOT)),
                    _create(self._path(znodes.BROKERS)),
                    _create(self._path(znodes.BROKER_IDS)),
                    _create(self._path(znodes.CONTROLLER_EPOCH)),
                ]
            )
            found = await self._get(znodes.METADATA)  # ours, or that of a broker that was quicker
            if found is None:
                raise StorageError(
                    f"ZooKeeper at {self.hosts}{self._root or '/'} holds something else ({_first_error(results)!r}); "
                    f"give the cluster a path of its own, such as {self.hosts}/millrace"
                )
        stored = znodes.from_json(found.data, znodes.METADATA)
        if stored.get("format") != znodes.FORMAT:
            raise StorageError(
                f"the metadata in ZooKeeper at {self.hosts}{self._root or '/'} has format {stored.get('format')}, "
                f"this version reads {znodes.FORMAT}"
            )

    async def _make_root(self) -> None:
        """Make the path in the address. Doing it twice is harmless, so a lost answer is no question."""
        parts = [part for part in self._root.split("/") if part]
        for depth in range(1, len(parts) + 1):
            path = "/" + "/".join(parts[:depth])
            while True:
                try:
                    (made,) = await self._ask(lambda client, path=path: client.create_async(path, b""))  # type: ignore[misc]
                except _LOST:
                    continue
                if isinstance(made, Exception) and not isinstance(made, NodeExistsError):
                    raise StorageError(f"ZooKeeper at {self.hosts} refuses to create {path}: {made!r}")
                break

    # ------------------------------------------------------------------------------------------- members and controller

    async def register(self, registration: BrokerRegistration) -> int:
        path = znodes.broker_path(registration.broker_id)
        value = znodes.write_registration(registration, secrets.token_hex(8))
        while True:
            node = await self._get(path)
            if node is not None and node.data == value and self._is_mine(node.owner):
                return node.czxid
            operations = [] if node is None else [_delete(self._path(path), node.version)]
            operations.append(_create(self._path(path), value, ephemeral=True))
            try:
                results = await self._multi(operations)
            except _InDoubt:
                continue
            if _first_error(results) is not None:
                continue  # somebody came or went between the look and the write
            node = await self._get(path)
            if node is not None and node.data == value and self._is_mine(node.owner):
                return node.czxid
            if node is not None and node.data != value:
                raise StorageError(
                    f"another process has registered as broker {registration.broker_id} just now; "
                    "every broker needs a node.id of its own"
                )

    async def elect(self, broker_id: int, *, replacing: int | None = None) -> int | None:
        claim = secrets.token_hex(8)
        while True:
            epoch, holder, owner = await self._controller()
            if holder is not None:
                if holder.claim == claim and self._is_mine(owner):
                    return self._begin_epoch(holder.controller_epoch)
                if epoch != replacing:
                    return None
            value = znodes.write_claim(ControllerClaim(broker_id, epoch + 1, claim))
            operations = [] if holder is None else [_delete(self._path(znodes.CONTROLLER), -1)]
            operations.append(_create(self._path(znodes.CONTROLLER), value, ephemeral=True))
            operations.append(_set(self._path(znodes.CONTROLLER_EPOCH), b"", epoch))
            try:
                results = await self._multi(operations)
            except _InDoubt:
                continue
            if _first_error(results) is None:
                return self._begin_epoch(epoch + 1)

    def _begin_epoch(self, epoch: int) -> int:
        self._elected, self._next = epoch, None
        return epoch

    async def _controller(self, alarm: Callable[[Any], None] | None = None) -> tuple[int, ControllerClaim | None, int]:
        """The controller epoch, the controller and its session, true together; `alarm` is called when one changes."""
        epoch_path, path = self._path(znodes.CONTROLLER_EPOCH), self._path(znodes.CONTROLLER)
        while True:
            epoch, _, holder = await self._read(
                lambda client: client.get_async(epoch_path, watch=alarm),
                lambda client: client.exists_async(path, watch=alarm),
                lambda client: client.get_async(path),
            )
            epoch = _stored(epoch, epoch_path)[1].version
            if isinstance(holder, NoNodeError):
                return epoch, None, 0
            data, stat = _stored(holder, path)
            claim = znodes.read_claim(data)
            if claim.controller_epoch == epoch:
                return epoch, claim, stat.ephemeralOwner

    async def membership(self) -> AsyncGenerator[Membership, None]:
        last: Membership | None = None
        with _Alarm(self) as alarm:
            while not self._closed:
                alarm.clear()
                try:
                    current = await self._read_membership(alarm.ring)
                    if current != last:
                        last = current
                        yield current
                    await alarm.wait()
                except _Closed:
                    return

    async def _read_membership(self, alarm: Callable[[Any], None]) -> Membership:
        epoch, holder, _ = await self._controller(alarm)
        path = self._path(znodes.BROKER_IDS)
        (names,) = await self._read(lambda client: client.get_children_async(path, watch=alarm))
        ids = sorted(int(name) for name in _stored(names, path) if name.isdigit())
        nodes = await self._get_all([znodes.broker_path(broker_id) for broker_id in ids])
        members = tuple(
            Member(znodes.read_registration(broker_id, node.data), node.czxid)
            for broker_id, node in zip(ids, nodes, strict=True)
            if node is not None  # gone since the list was read: the alarm has rung
        )
        return Membership(members, None if holder is None else holder.broker_id, epoch)

    def _is_mine(self, owner: int) -> bool:
        session = None if self._client is None else self._client.client_id
        return session is not None and session[0] == owner

    # ---------------------------------------------------------------------------------------------------------- deltas

    async def append(self, delta: bytes, controller_epoch: int) -> int:
        value = znodes.pack(delta, controller_epoch)
        if len(value) > MAX_VALUE_BYTES:
            raise StorageError(
                f"a metadata delta of {len(value)} bytes is more than ZooKeeper takes ({MAX_VALUE_BYTES}); "
                "ask for less at a time"
            )
        async with self._appending:
            self._check_elected(controller_epoch)
            number = self._next or await self._end() + 1
            self._next = None  # known again when this one's outcome is
            path = znodes.delta_path(number)
            await self._append(self._path(path), path, value, controller_epoch)
            if self._elected == controller_epoch:
                self._next = number + 1
            return number

    async def _append(self, full_path: str, path: str, value: bytes, controller_epoch: int) -> None:
        """Return when the delta is there; Fenced when it is not and cannot come any more."""
        doubt = False
        while True:
            if doubt:
                await self._sync()
                node = await self._get(path)
                if node is not None:
                    if node.data == value:
                        return
                    raise Fenced(f"controller epoch {controller_epoch} is over: another controller wrote {path}")
            try:
                results = await self._write([_create(full_path, value)], controller_epoch)
            except _InDoubt:
                doubt = True
                continue
            error = _first_error(results)
            if error is None:
                return
            if isinstance(error, BadVersionError):
                raise Fenced(f"controller epoch {controller_epoch} is over")
            if not isinstance(error, NodeExistsError) or doubt:
                raise StorageError(f"ZooKeeper refuses {path}: {error!r}")
            doubt = True

    def _check_elected(self, controller_epoch: int) -> None:
        if self._closed:
            raise _Closed("the ZooKeeper session is closed")
        if self._elected != controller_epoch:
            raise Fenced(f"controller epoch {controller_epoch} is over, or belongs to another session")

    async def _write(self, operations: Sequence[_Operation], controller_epoch: int) -> list[Any]:
        """Write as controller, fenced; never in another session than the one that was elected."""
        fence = _check(self._path(znodes.CONTROLLER_EPOCH), controller_epoch)
        return await self._multi([fence, *operations], partial(self._check_elected, controller_epoch))

    async def end(self) -> int:
        await self._sync()
        return await self._end()

    async def _end(self) -> int:
        numbers, index, _ = await self._positions()
        return max(index, *numbers) if numbers else index

    async def _positions(self) -> tuple[list[int], int, int]:
        """The numbers of the deltas there are; index and chunk count of the snapshot (0, 0 where there is none)."""
        deltas, pointer = self._path(znodes.DELTAS), self._path(znodes.SNAPSHOT)
        # The list comes first: what is missing in it because it was trimmed is in the pointer, which is younger.
        names, found = await self._read(
            lambda client: client.get_children_async(deltas), lambda client: client.get_async(pointer)
        )
        numbers = sorted(int(name[2:]) for name in _stored(names, deltas) if name.startswith("d-"))
        return numbers, *znodes.read_pointer(_stored(found, pointer)[0])

    async def follow(self, after: int) -> AsyncGenerator[tuple[int, bytes], None]:
        index, window = after, 1
        with _Alarm(self) as alarm:
            while not self._closed:
                try:
                    nodes = await self._get_all([znodes.delta_path(index + 1 + step) for step in range(window)])
                    found = list(itertools.takewhile(lambda node: node is not None, nodes))
                    for node in found:
                        assert node is not None
                        index += 1
                        yield index, znodes.unpack(node.data)
                    if len(found) == window:
                        window = min(window * 2, _BATCH)
                        continue
                    window = 1
                    alarm.clear()
                    if not await self._is_there(index + 1, alarm.ring):
                        await alarm.wait()
                except _Closed:
                    return

    async def _is_there(self, number: int, alarm: Callable[[Any], None]) -> bool:
        """Whether delta `number` exists; if not, `alarm` is called when it comes. Trimmed if it is gone already."""
        path, pointer = self._path(znodes.delta_path(number)), self._path(znodes.SNAPSHOT)
        stat, found = await self._read(
            lambda client: client.exists_async(path, watch=alarm), lambda client: client.get_async(pointer)
        )
        if stat is not None:
            _stored(stat, path)
            return True
        if znodes.read_pointer(_stored(found, pointer)[0])[0] >= number:
            raise Trimmed(f"delta {number} is folded into a snapshot")
        return False

    # ------------------------------------------------------------------------------------------------------- snapshots

    async def read_snapshot(self) -> Snapshot | None:
        while True:
            _, index, chunks = await self._positions()
            if not chunks:
                return None
            nodes = await self._get_all([znodes.chunk_path(index, number) for number in range(chunks)])
            parts = [node.data for node in nodes if node is not None]
            if len(parts) == chunks:
                return Snapshot(index, znodes.unpack(b"".join(parts)))
            # A newer snapshot has taken its place between the two reads.

    async def write_snapshot(self, snapshot: Snapshot, controller_epoch: int) -> None:
        value = znodes.pack(snapshot.data, controller_epoch)
        async with self._appending:
            while True:
                try:
                    return await self._write_snapshot(snapshot.index, value, controller_epoch)
                except _InDoubt:
                    continue  # every step looks first, so the whole may begin again

    async def _write_snapshot(self, index: int, value: bytes, controller_epoch: int) -> None:
        numbers, current, chunks = await self._positions()
        await self._remove_chunks(keep=current if chunks else None, controller_epoch=controller_epoch)
        trimmed = [
            _delete(self._path(znodes.delta_path(number))) for number in numbers if number <= max(index, current)
        ]
        if not chunks or current < index:
            parts = [value[start : start + CHUNK_BYTES] for start in range(0, len(value), CHUNK_BYTES)]
            for number, part in enumerate(parts):
                await self._fenced([_create(self._path(znodes.chunk_path(index, number)), part)], controller_epoch)
            pointer = _set(self._path(znodes.SNAPSHOT), znodes.to_json({"index": index, "chunks": len(parts)}))
            await self._fenced([pointer, *trimmed[:_TRIM_AT_A_TIME]], controller_epoch)
            trimmed = trimmed[_TRIM_AT_A_TIME:]
            await self._remove_chunks(keep=index, controller_epoch=controller_epoch)
        for start in range(0, len(trimmed), _TRIM_AT_A_TIME):
            await self._fenced(trimmed[start : start + _TRIM_AT_A_TIME], controller_epoch)

    async def _remove_chunks(self, *, keep: int | None, controller_epoch: int) -> None:
        """Remove the chunks of every snapshot but `keep`: older ones, and what a dead controller left half written."""
        path = self._path(znodes.SNAPSHOTS)
        (names,) = await self._read(lambda client: client.get_children_async(path))
        stale = [name for name in sorted(_stored(names, path)) if znodes.snapshot_index(name) != keep]
        await self._fenced([_delete(f"{path}/{name}") for name in stale], controller_epoch)

    async def _fenced(self, operations: Sequence[_Operation], controller_epoch: int) -> None:
        """Write as controller, all or nothing. Fenced; _InDoubt also where the znodes are not as they were read."""
        error = _first_error(await self._write(operations, controller_epoch))
        if isinstance(error, BadVersionError):
            raise Fenced(f"controller epoch {controller_epoch} is over")
        if isinstance(error, (NodeExistsError, NoNodeError)):
            raise _InDoubt
        if error is not None:
            raise StorageError(f"ZooKeeper refuses a snapshot: {error!r}")

    # ------------------------------------------------------------------------------------------------ requests to kazoo

    def _path(self, path: str) -> str:
        return self._root + path

    async def _get(self, path: str) -> _Node | None:
        (node,) = await self._get_all([path])
        return node

    async def _get_all(self, paths: Sequence[str]) -> list[_Node | None]:
        """The znodes at `paths`, in order, None where there is none."""
        nodes: list[_Node | None] = []
        for start in range(0, len(paths), _BATCH):
            full = [self._path(path) for path in paths[start : start + _BATCH]]
            found = await self._read(*(partial(_get_request, path) for path in full))
            nodes.extend(_node(result, path) for result, path in zip(found, full, strict=True))
        return nodes

    async def _sync(self) -> None:
        """From here on this session reads at least everything that was committed before the call."""
        path = self._root or "/"
        await self._read(lambda client: client.sync_async(path))

    async def _read(self, *requests: Request) -> list[Any]:
        """Answers in order, asked until they come: a read may be repeated."""
        while True:
            try:
                return await self._ask(*requests)
            except _LOST:
                continue

    async def _multi(self, operations: Iterable[_Operation], check: Callable[[], object] | None = None) -> list[Any]:
        """All operations or none; _InDoubt where the answer was lost. `check` may raise when it is about to be sent."""
        try:
            return await self._send_multi(operations, check)
        except _LOST:
            raise _InDoubt from None

    async def _try_multi(self, operations: Iterable[_Operation]) -> list[Any]:
        """For operations that may be tried again as they are: the second attempt fails where the first one worked."""
        while True:
            try:
                return await self._send_multi(operations)
            except _LOST:
                continue

    async def _send_multi(
        self, operations: Iterable[_Operation], check: Callable[[], object] | None = None
    ) -> list[Any]:
        def send(client: KazooClient) -> Any:
            if check is not None:
                check()
            transaction = client.transaction()
            for operation in operations:
                operation(transaction)
            return transaction.commit_async()

        (results,) = await self._ask(send)
        if isinstance(results, Exception):
            raise StorageError(f"ZooKeeper at {self.hosts} refuses a write: {results!r}")
        return list(results)

    async def _ask(self, *requests: Request) -> list[Any]:
        """Send the requests in this order on one connection and wait for all answers.

        An error that ZooKeeper answered with is returned as a value; a lost connection or session is raised.
        """
        async with self._batches:
            await self._connected.wait()
            client = self._client
            if client is None:
                raise _Closed("the ZooKeeper session is closed")
            futures = [self._send(client, request) for request in requests]
            answers = await asyncio.gather(*futures, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, (*_LOST, _Closed)):
                raise answer
            if isinstance(answer, BaseException) and not isinstance(answer, KazooException):
                raise answer
        return list(answers)

    def _send(self, client: KazooClient, request: Request) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        sent = request(client)
        future: asyncio.Future[Any] = loop.create_future()
        self._outstanding.add(future)
        future.add_done_callback(self._outstanding.discard)
        sent.rawlink(lambda result: _on_loop(loop, partial(_settle, future, result)))
        return future

    @property
    def closed(self) -> bool:
        return self._closed

    def add_alarm(self, event: asyncio.Event) -> None:
        """Have `event` set when the session is closed."""
        self._alarms.add(event)

    def remove_alarm(self, event: asyncio.Event) -> None:
        self._alarms.discard(event)


class _Alarm:
    """An event that watches set, from kazoo's thread, and the end of the session too.

    One alarm serves its reader for ever: kazoo keeps each watcher of a path once, so a watch set again adds nothing.
    """

    def __init__(self, store: ZooKeeperStore) -> None:
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def __enter__(self) -> Self:
        self._store.add_alarm(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        self._store.remove_alarm(self._event)

    def ring(self, _: Any) -> None:
        _on_loop(self._loop, self._event.set)

    def clear(self) -> None:
        """Forget what has rung: before the state is read again."""
        if not self._store.closed:
            self._event.clear()

    async def wait(self) -> None:
        await self._event.wait()


class _StateQueue:
    """States for one reader: what it has not read is replaced by what is newer, but never EXPIRED."""

    def __init__(self, state: SessionState) -> None:
        self._states: deque[SessionState | None] = deque([state])
        self._news = asyncio.Event()
        self._news.set()

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


def _on_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:  # the loop was closed meanwhile, and nobody waits any more
        logger.debug("an answer of ZooKeeper came after the end of the event loop")


def _settle(future: asyncio.Future[Any], result: Any) -> None:
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


# --- operations of a multi --------------------------------------------------------------------------------------------

_Operation = Callable[[Any], object]


def _create(path: str, value: bytes = b"", *, ephemeral: bool = False) -> _Operation:
    return lambda transaction: transaction.create(path, value, ephemeral=ephemeral)


def _delete(path: str, version: int = -1) -> _Operation:
    return lambda transaction: transaction.delete(path, version)


def _set(path: str, value: bytes, version: int = -1) -> _Operation:
    return lambda transaction: transaction.set_data(path, value, version)


def _check(path: str, version: int) -> _Operation:
    return lambda transaction: transaction.check(path, version)


def _first_error(results: Iterable[Any]) -> Exception | None:
    """Why a multi failed, or None where it did not."""
    errors = [result for result in results if isinstance(result, Exception)]
    causes = [error for error in errors if not isinstance(error, (RolledBackError, RuntimeInconsistency))]
    return next(iter(causes or errors), None)


def _get_request(path: str, client: KazooClient) -> Any:
    return client.get_async(path)


def _stored(result: T | Exception, path: str) -> T:
    """An answer that must not be an error: our own znodes have gone."""
    if isinstance(result, Exception):
        raise StorageError(f"ZooKeeper has lost the cluster's metadata: {path}: {result!r}") from result
    return result


def _node(result: Any, path: str) -> _Node | None:
    if isinstance(result, NoNodeError):
        return None
    data, stat = _stored(result, path)
    return _Node(data, stat.version, stat.czxid, stat.ephemeralOwner)


# --- the address ------------------------------------------------------------------------------------------------------


def _split_address(hosts: str) -> tuple[str, str]:
    """`h:p,h:p/path` as the hosts and the path, which is empty or begins with a slash."""
    addresses, _, path = hosts.partition("/")
    try:
        collect_hosts(addresses)
    except ValueError:
        raise ConfigError(f"zookeeper.connect: '{hosts}' is not host:port,...[/path]") from None
    root = "/".join(part for part in path.split("/") if part)
    return addresses, f"/{root}" if root else ""


def _often_enough(addresses: str) -> str:
    """The same servers, named so often that kazoo waits a third of the session timeout for the answer of one.

    It divides the timeout by the number of names. A server that is starting sometimes swallows the first request of
    a connection; the session would be over before kazoo asked again.
    """
    names = addresses.split(",")
    return ",".join(names * -(-_ATTEMPTS // len(names)))
