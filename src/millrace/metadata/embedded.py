"""The metadata log in SQLite, in this process: for one broker alone, and in memory for tests.

File: `metadata.db` (plus `metadata.db-wal` while open). Tables: `deltas(idx, controller_epoch, data)`,
`snapshot(idx, data)` with at most one row, `counters(name, value)` with `controller_epoch`, `broker_epoch` and
`format`. Registrations are not in the file: they end with the process, as ephemeral znodes end with their session.

What survives a crash: with write-ahead log and `synchronous=FULL` a committed delta has been flushed, so a topic whose
creation was answered is there after power loss; a delta cut short by the crash is rolled back as a whole. The file is
locked exclusively: a second process is refused instead of writing beside the first.

A commit takes about 0.2 ms on a fast disk and several on a slow one, so calls on a file run in one thread of their own
and the loop never waits for a flush; a database in memory is called directly. Several sessions may share one
`Database`, which is how brokers in one process share a cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from millrace.errors import StorageError
from millrace.metadata.store import BrokerRegistration, Fenced, Member, Membership, SessionState, Snapshot, Trimmed

FILE_NAME: Final = "metadata.db"
FORMAT: Final = 1
_READ_AT_A_TIME: Final = 1000

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS deltas (idx INTEGER PRIMARY KEY, controller_epoch INTEGER NOT NULL, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS snapshot (idx INTEGER NOT NULL, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
INSERT OR IGNORE INTO counters VALUES ('controller_epoch', 0), ('broker_epoch', 0), ('format', %d);
"""

T = TypeVar("T")


class Database:
    """The shared part of all sessions: the connection, who is registered, and who waits for news."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.members: dict[int, Member] = {}
        self.owners: dict[int, object] = {}
        self.controller_id: int | None = None
        self.controller_owner: object = None
        self.controller_epoch = 0
        self.last_index = 0
        self._connection: sqlite3.Connection | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._news = asyncio.Event()
        self._sessions = 0
        self._opening = asyncio.Lock()

    def __repr__(self) -> str:
        return (
            f"Database({self.path or 'in memory'}, delta {self.last_index}, controller epoch {self.controller_epoch})"
        )

    async def attach(self) -> None:
        """Open at the first session."""
        async with self._opening:
            self._sessions += 1
            if self._sessions > 1:
                return
            if self.path is not None:
                self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="millrace-metadata")
            try:
                self._connection = await self.run(self._connect)
                self.controller_epoch, self.last_index = await self.run(self._read_position)
            except BaseException:
                await self._close_if_last()
                raise

    async def detach(self) -> None:
        """Close with the last session."""
        async with self._opening:
            await self._close_if_last()

    async def _close_if_last(self) -> None:
        self._sessions -= 1
        if self._sessions:
            return
        connection, self._connection = self._connection, None
        if connection is not None:
            await self.run(connection.close)
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=True)
        self.announce()

    async def run(self, call: Callable[[], T]) -> T:
        """Do `call` where SQLite may take its time. SQLite's errors come out as StorageError."""
        try:
            if self._thread is None:
                return call()
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except sqlite3.Error as error:
            raise StorageError(f"metadata store {self.path or 'in memory'}: {_explain(error)}") from error

    @property
    def connection(self) -> sqlite3.Connection:
        if self._connection is None:
            raise StorageError(f"metadata store {self.path or 'in memory'} is closed")
        return self._connection

    def release(self, session: object) -> None:
        """A session ends: what it registered goes, and the office, if it holds that."""
        for broker_id in [broker_id for broker_id, owner in self.owners.items() if owner is session]:
            del self.owners[broker_id], self.members[broker_id]
        if self.controller_owner is session:
            self.controller_id = self.controller_owner = None
        self.announce()

    def announce(self) -> None:
        """Wake everybody who waits for a delta or a member."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def news(self) -> None:
        """Wait for the next `announce`."""
        await self._news.wait()

    def _connect(self) -> sqlite3.Connection:
        fresh = self.path is not None and not self.path.exists()
        if self.path is not None:
            _keep_private(self.path)
        connection = sqlite3.connect(
            self.path or ":memory:", isolation_level=None, check_same_thread=False, timeout=0.2, cached_statements=32
        )
        try:
            connection.execute("PRAGMA locking_mode=EXCLUSIVE")
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.executescript(f"BEGIN IMMEDIATE;{_SCHEMA % FORMAT}COMMIT;")
            (found,) = connection.execute("SELECT value FROM counters WHERE name = 'format'").fetchone()
            if found != FORMAT:
                raise StorageError(f"{self.path} has format {found}, this version reads {FORMAT}")
            if fresh and self.path is not None:
                _sync_directory(self.path.parent)
        except BaseException:
            connection.close()
            raise
        return connection

    def _read_position(self) -> tuple[int, int]:
        (epoch,) = self.connection.execute("SELECT value FROM counters WHERE name = 'controller_epoch'").fetchone()
        return epoch, _last_index(self.connection)


class EmbeddedStore:
    """One broker's session on a `Database`; see `metadata.store` for what the calls promise."""

    def __init__(self, database: Database | None = None) -> None:
        self.database = database or Database()
        self._opened = False

    @classmethod
    def at(cls, path: str | Path) -> EmbeddedStore:
        """A session on a file of its own."""
        return cls(Database(path))

    def __repr__(self) -> str:
        return f"EmbeddedStore({self.database!r})"

    async def open(self) -> None:
        await self.database.attach()
        self._opened = True

    async def close(self) -> None:
        if not self._opened:
            return
        self._opened = False
        self.database.release(self)
        await self.database.detach()

    async def register(self, registration: BrokerRegistration) -> int:
        database = self.database
        epoch = await database.run(lambda: _raise_counter(database.connection, "broker_epoch"))
        database.members[registration.broker_id] = Member(registration, epoch)
        database.owners[registration.broker_id] = self
        database.announce()
        return epoch

    async def elect(self, broker_id: int, *, replacing: int | None = None) -> int | None:
        database = self.database
        if not self._may_take_over(replacing):
            return None
        seen = database.controller_epoch
        epoch = await database.run(lambda: _raise_controller_epoch(database.connection, seen))
        if epoch is None:
            return None  # somebody else was elected meanwhile
        database.controller_id, database.controller_owner, database.controller_epoch = broker_id, self, epoch
        database.announce()
        return epoch

    def _may_take_over(self, replacing: int | None) -> bool:
        return self.database.controller_id is None or self.database.controller_epoch == replacing

    async def append(self, delta: bytes, controller_epoch: int) -> int:
        database = self.database

        def write() -> int:
            connection = database.connection
            with _Transaction(connection):
                _check_epoch(connection, controller_epoch)
                index = _last_index(connection) + 1
                connection.execute("INSERT INTO deltas VALUES (?, ?, ?)", (index, controller_epoch, delta))
            database.last_index = index  # here, not after the await: a cancelled caller's delta is in the log too
            return index

        try:
            return await database.run(write)
        finally:
            database.announce()

    async def end(self) -> int:
        return self.database.last_index

    async def follow(self, after: int) -> AsyncGenerator[tuple[int, bytes], None]:
        database = self.database
        index = after
        while self._opened:
            if index >= database.last_index:
                await database.news()
                continue
            rows = await database.run(lambda start=index: _read_deltas(database.connection, start))  # type: ignore[misc]
            for found, data in rows:
                if found != index + 1:
                    raise Trimmed(f"delta {index + 1} is folded into a snapshot")
                index = found
                yield found, data
            if not rows:
                raise Trimmed(f"delta {index + 1} is folded into a snapshot")

    async def read_snapshot(self) -> Snapshot | None:
        database = self.database
        row = await database.run(lambda: database.connection.execute("SELECT idx, data FROM snapshot").fetchone())
        return None if row is None else Snapshot(row[0], row[1])

    async def write_snapshot(self, snapshot: Snapshot, controller_epoch: int) -> None:
        database = self.database

        def write() -> None:
            connection = database.connection
            with _Transaction(connection):
                _check_epoch(connection, controller_epoch)
                if connection.execute("SELECT 1 FROM snapshot WHERE idx >= ?", (snapshot.index,)).fetchone():
                    return  # an older image must not take the place of a newer one, whose deltas are gone
                connection.execute("DELETE FROM snapshot")
                connection.execute("INSERT INTO snapshot VALUES (?, ?)", (snapshot.index, snapshot.data))
                connection.execute("DELETE FROM deltas WHERE idx <= ?", (snapshot.index,))

        await database.run(write)

    async def membership(self) -> AsyncGenerator[Membership, None]:
        database = self.database
        last: Membership | None = None
        while self._opened:
            members = tuple(database.members[broker_id] for broker_id in sorted(database.members))
            current = Membership(members, database.controller_id, database.controller_epoch)
            if current != last:
                last = current
                yield current
            else:
                await database.news()

    async def sessions(self) -> AsyncGenerator[SessionState, None]:
        """A store in the process is never out of reach."""
        if self._opened:
            yield SessionState.CONNECTED
        while self._opened:
            await self.database.news()


class _Transaction:
    """BEGIN IMMEDIATE ... COMMIT, or ROLLBACK on any exception."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._connection.execute("COMMIT" if kind is None else "ROLLBACK")


def _check_epoch(connection: sqlite3.Connection, controller_epoch: int) -> None:
    (current,) = connection.execute("SELECT value FROM counters WHERE name = 'controller_epoch'").fetchone()
    if current != controller_epoch:
        raise Fenced(f"controller epoch {controller_epoch} is over, the current one is {current}")


def _raise_counter(connection: sqlite3.Connection, name: str) -> int:
    (value,) = connection.execute(
        "UPDATE counters SET value = value + 1 WHERE name = ? RETURNING value", (name,)
    ).fetchone()
    return int(value)


def _raise_controller_epoch(connection: sqlite3.Connection, seen: int) -> int | None:
    with _Transaction(connection):
        try:
            _check_epoch(connection, seen)
        except Fenced:
            return None
        return _raise_counter(connection, "controller_epoch")


def _last_index(connection: sqlite3.Connection) -> int:
    (delta,) = connection.execute("SELECT coalesce(max(idx), 0) FROM deltas").fetchone()
    (snapshot,) = connection.execute("SELECT coalesce(max(idx), 0) FROM snapshot").fetchone()
    return int(max(delta, snapshot))


def _read_deltas(connection: sqlite3.Connection, after: int) -> list[tuple[int, bytes]]:
    return connection.execute(
        "SELECT idx, data FROM deltas WHERE idx > ? ORDER BY idx LIMIT ?", (after, _READ_AT_A_TIME)
    ).fetchall()


def _keep_private(path: Path) -> None:
    """Make the file if there is none, for its owner alone: what is kept of passwords is in it.

    One that is there is not opened: to close it would give up the lock of whoever has it open in this process.
    """
    with contextlib.suppress(OSError):  # SQLite comes to the same end and says so
        if not path.exists():
            path.touch(0o600)
        path.chmod(0o600)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explain(error: sqlite3.Error) -> str:
    text = str(error)
    if "locked" in text:
        return "it is in use by another process"
    if "not a database" in text or "malformed" in text:
        return f"the file is damaged ({text}); restore it from a copy, or move it away to start with no topics"
    return text
