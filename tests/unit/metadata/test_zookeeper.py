"""What only the ZooKeeper store has: answers that get lost, a server that goes away, a session that expires."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.security import make_acl

from millrace.errors import ConfigError, StorageError
from millrace.local.zookeeper import ZooKeeperServers
from millrace.metadata import zookeeper as zookeeper_module
from millrace.metadata.store import BrokerRegistration, Fenced, Membership, SessionState, Snapshot
from millrace.metadata.znodes import CHUNK_BYTES
from millrace.metadata.zookeeper import ZooKeeperStore
from millrace.metadata.zookeeper_session import Operation, Refusal, _StateQueue
from support.metadata import ENDPOINT
from support.zookeeper import expire

CONNECTED, SUSPENDED, EXPIRED = SessionState.CONNECTED, SessionState.SUSPENDED, SessionState.EXPIRED


class Link:
    """A way to ZooKeeper that can lose requests or answers, and be cut."""

    def __init__(self, hosts: str) -> None:
        address, _, self.root = hosts.partition("/")
        host, _, port = address.partition(":")
        self._target = host, int(port)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.lose_requests = False
        self.lose_answers = False
        self.lost = asyncio.Event()

    @property
    def hosts(self) -> str:
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}/{self.root}"

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def cut(self) -> None:
        """Break every connection and let the next ones through."""
        self.lose_requests = self.lose_answers = False
        self.lost.clear()
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        self._writers |= {writer, far_writer}
        for copy in (
            self._copy(reader, far_writer, lambda: self.lose_requests),
            self._copy(far_reader, writer, lambda: self.lose_answers),
        ):
            task = asyncio.create_task(copy)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lose: Callable[[], bool]) -> None:
        try:
            while data := await reader.read(65536):
                if lose():
                    self.lost.set()
                else:
                    writer.write(data)
        except ConnectionError:
            pass
        finally:
            writer.close()
            self._writers.discard(writer)


LIMIT_S = 60
"""What never happens is waited for so long; a server that starts again on a busy machine takes many seconds."""


@asynccontextmanager
async def opened(hosts: str, session_timeout_ms: int = 6000) -> AsyncIterator[ZooKeeperStore]:
    store = ZooKeeperStore(hosts, session_timeout_ms=session_timeout_ms)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
async def store(zookeeper_hosts: str) -> AsyncIterator[ZooKeeperStore]:
    async with opened(zookeeper_hosts) as store:
        yield store


@pytest.fixture
async def link(zookeeper_hosts: str) -> AsyncIterator[Link]:
    link = Link(zookeeper_hosts)
    await link.open()
    yield link
    await link.close()


@pytest.fixture
async def linked(link: Link) -> AsyncIterator[ZooKeeperStore]:
    """A session whose connection goes through `link`."""
    async with opened(link.hosts) as store:
        yield store


async def elected(store: ZooKeeperStore, broker_id: int = 1) -> int:
    epoch = await store.elect(broker_id)
    assert epoch is not None
    return epoch


async def deltas(store: ZooKeeperStore) -> list[bytes]:
    """All deltas there are."""
    taken: list[bytes] = []
    end = await store.end()
    async with aclosing(store.follow(0)) as following:
        while len(taken) < end:
            number, data = await anext(following)
            assert number == len(taken) + 1
            taken.append(data)
    return taken


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await condition():
            await asyncio.sleep(0.01)


async def membership(store: ZooKeeperStore, wanted: Callable[[Membership], bool]) -> Membership:
    """The first membership that is as wanted."""
    async with asyncio.timeout(LIMIT_S), aclosing(store.membership()) as memberships:
        async for found in memberships:
            if wanted(found):
                return found
    raise AssertionError("closed")


async def states(store: ZooKeeperStore, last: SessionState, after: SessionState) -> list[SessionState]:
    """The states of the session up to the first `last` that comes after an `after`."""
    seen: list[SessionState] = []
    async with asyncio.timeout(LIMIT_S), aclosing(store.sessions()) as sessions:
        async for state in sessions:
            seen.append(state)
            if state is last and after in seen:
                break
    return seen


def registration(broker_id: int) -> BrokerRegistration:
    return BrokerRegistration(broker_id, (ENDPOINT,), None)


# --- lost answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lose", ["requests", "answers"])
async def test_an_append_whose_answer_is_lost_happens_once(
    store: ZooKeeperStore, linked: ZooKeeperStore, link: Link, lose: str
) -> None:
    epoch = await elected(linked)
    await linked.append(b"one", epoch)
    setattr(link, f"lose_{lose}", True)
    appending = asyncio.create_task(linked.append(b"two", epoch))
    await link.lost.wait()
    assert await store.end() == (1 if lose == "requests" else 2)
    link.cut()
    assert await appending == 2
    assert await linked.append(b"three", epoch) == 3
    assert await deltas(store) == [b"one", b"two", b"three"]


async def test_an_append_that_was_lost_and_overtaken_is_fenced(
    store: ZooKeeperStore, linked: ZooKeeperStore, link: Link
) -> None:
    epoch = await elected(linked)
    await linked.append(b"one", epoch)
    link.lose_requests = True
    appending = asyncio.create_task(linked.append(b"late", epoch))
    await link.lost.wait()
    second = await store.elect(2, replacing=epoch)
    assert second is not None
    assert await store.append(b"theirs", second) == 2
    link.cut()
    with pytest.raises(Fenced):
        await appending
    assert await deltas(store) == [b"one", b"theirs"]


async def test_an_append_that_happened_before_it_was_overtaken_is_answered(
    store: ZooKeeperStore, linked: ZooKeeperStore, link: Link
) -> None:
    epoch = await elected(linked)
    await linked.append(b"one", epoch)
    link.lose_answers = True
    appending = asyncio.create_task(linked.append(b"mine", epoch))
    await link.lost.wait()
    second = await store.elect(2, replacing=epoch)
    assert second is not None
    assert await store.append(b"theirs", second) == 3
    link.cut()
    assert await appending == 2
    with pytest.raises(Fenced):
        await linked.append(b"more", epoch)
    assert await deltas(store) == [b"one", b"mine", b"theirs"]


@pytest.mark.parametrize("lose", ["requests", "answers"])
async def test_an_append_of_an_expired_session(
    store: ZooKeeperStore, linked: ZooKeeperStore, link: Link, zookeeper: ZooKeeperServers, lose: str
) -> None:
    """It is answered if it happened, and fenced if it did not: it cannot happen any more."""
    epoch = await elected(linked)
    await linked.append(b"zero", epoch)
    setattr(link, f"lose_{lose}", True)
    appending = asyncio.create_task(linked.append(b"one", epoch))
    await link.lost.wait()
    expire(linked, zookeeper.hosts)
    link.cut()
    if lose == "answers":
        assert await appending == 2
    else:
        with pytest.raises(Fenced):
            await appending
    with pytest.raises(Fenced):
        await linked.append(b"two", epoch)
    assert await deltas(store) == ([b"zero", b"one"] if lose == "answers" else [b"zero"])


async def test_the_first_append_of_an_expired_session_is_fenced(
    linked: ZooKeeperStore, link: Link, zookeeper: ZooKeeperServers
) -> None:
    """It first asks where the log ends; what it learns in the next session is no leave to write."""
    epoch = await elected(linked)
    link.lose_answers = True
    appending = asyncio.create_task(linked.append(b"one", epoch))
    await link.lost.wait()
    expire(linked, zookeeper.hosts)
    link.cut()
    with pytest.raises(Fenced):
        await appending
    assert await linked.end() == 0


@pytest.mark.parametrize("lose", ["requests", "answers"])
async def test_a_cancelled_append_leaves_no_gap(
    store: ZooKeeperStore, linked: ZooKeeperStore, link: Link, lose: str
) -> None:
    epoch = await elected(linked)
    await linked.append(b"one", epoch)
    setattr(link, f"lose_{lose}", True)
    appending = asyncio.create_task(linked.append(b"cancelled", epoch))
    await link.lost.wait()
    appending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await appending
    link.cut()
    await linked.append(b"two", epoch)
    expected = [b"one", b"two"] if lose == "requests" else [b"one", b"cancelled", b"two"]
    assert await deltas(store) == expected


@pytest.mark.parametrize("lose", ["requests", "answers"])
async def test_a_registration_whose_answer_is_lost_happens_once(
    store: ZooKeeperStore, linked: ZooKeeperStore, link: Link, lose: str
) -> None:
    epochs = [await linked.register(registration(1))]
    for _ in range(2):
        setattr(link, f"lose_{lose}", True)
        registering = asyncio.create_task(linked.register(registration(1)))
        await link.lost.wait()
        link.cut()
        epochs.append(await registering)
    assert epochs == sorted(set(epochs))
    (member,) = (await membership(store, lambda _: True)).members
    assert member.broker_epoch == epochs[-1]


@pytest.mark.parametrize("lose", ["requests", "answers"])
@pytest.mark.parametrize("controlled", [False, True])
async def test_an_election_whose_answer_is_lost_happens_once(
    store: ZooKeeperStore, linked: ZooKeeperStore, link: Link, lose: str, controlled: bool
) -> None:
    first = await elected(store, 7) if controlled else None
    setattr(link, f"lose_{lose}", True)
    electing = asyncio.create_task(linked.elect(1, replacing=first))
    await link.lost.wait()
    link.cut()
    epoch = await electing
    assert epoch == (first or 0) + 1
    found = await membership(store, lambda _: True)
    assert (found.controller_id, found.controller_epoch) == (1, epoch)
    assert await linked.append(b"one", epoch) == 1


async def test_a_snapshot_whose_answers_are_lost_is_whole(
    store: ZooKeeperStore, linked: ZooKeeperStore, link: Link
) -> None:
    epoch = await elected(linked)
    rng = random.Random(2)
    for index in range(1, 9):
        await linked.append(b"delta", epoch)
        snapshot = Snapshot(index, rng.randbytes(CHUNK_BYTES + 1000))
        writing = asyncio.create_task(linked.write_snapshot(snapshot, epoch))
        for _ in range(rng.randrange(30)):  # somewhere in the middle of it, a turn of the loop at a time
            await asyncio.sleep(0)
        if not writing.done():
            setattr(link, rng.choice(["lose_requests", "lose_answers"]), True)
            lost = asyncio.create_task(link.lost.wait())
            await asyncio.wait({lost, writing}, return_when=asyncio.FIRST_COMPLETED)
            lost.cancel()
            link.cut()
        await writing
        assert await store.read_snapshot() == snapshot
        assert await store.end() == index


async def test_random_cuts_never_lose_repeat_or_reorder_deltas(
    store: ZooKeeperStore, linked: ZooKeeperStore, link: Link
) -> None:
    epoch = await elected(linked)
    total = 100

    async def write() -> None:
        for number in range(1, total + 1):
            assert await linked.append(b"%d" % number, epoch) == number

    async def disturb() -> None:
        rng = random.Random(5)
        while True:
            await asyncio.sleep(rng.random() * 0.05)
            setattr(link, rng.choice(["lose_requests", "lose_answers"]), True)
            await asyncio.sleep(rng.random() * 0.02)
            link.cut()

    async def read(reader: ZooKeeperStore) -> list[bytes]:
        taken: list[bytes] = []
        async with aclosing(reader.follow(0)) as following:
            async for number, data in following:
                assert number == len(taken) + 1
                taken.append(data)
                if number == total:
                    return taken
        raise AssertionError("the end of the log did not come")

    disturbing = asyncio.create_task(disturb())
    async with asyncio.timeout(60):
        _, near, far = await asyncio.gather(write(), read(linked), read(store))
    disturbing.cancel()
    link.cut()
    assert near == far == [b"%d" % number for number in range(1, total + 1)]


# --- a server that goes away ------------------------------------------------------------------------------------------


async def test_a_restart_of_the_server_in_the_middle_of_everything(
    store: ZooKeeperStore, zookeeper: ZooKeeperServers, zookeeper_hosts: str
) -> None:
    async with opened(zookeeper_hosts) as follower:
        broker_epoch = await store.register(registration(1))
        epoch = await elected(store)
        written: list[int] = []
        stop = asyncio.Event()

        async def write() -> None:
            while not stop.is_set():
                written.append(await store.append(b"%d" % len(written), epoch))

        read: list[tuple[int, bytes]] = []

        async def follow() -> None:
            async for delta in follower.follow(0):
                read.append(delta)

        session = asyncio.create_task(states(follower, CONNECTED, SUSPENDED))
        writing, following = asyncio.create_task(write()), asyncio.create_task(follow())
        for _ in range(2):
            before = len(written)
            await until(lambda before=before: _is(len(written) > before + 5))  # type: ignore[misc]
            await asyncio.to_thread(zookeeper.kill)
            await asyncio.to_thread(zookeeper.restart)
            before = len(written)
            await until(lambda before=before: _is(len(written) > before + 5))  # type: ignore[misc]
        stop.set()
        await writing
        await until(lambda: _is(len(read) >= len(written)))
        following.cancel()
        assert read == [(number, b"%d" % (number - 1)) for number in written]
        assert written == list(range(1, len(written) + 1))
        assert await session == [CONNECTED, SUSPENDED, CONNECTED]
        found = await membership(follower, lambda _: True)
        assert (found.controller_id, found.controller_epoch) == (1, epoch)
        assert [member.broker_epoch for member in found.members] == [broker_epoch], "the session outlived the server"


async def _is(value: bool) -> bool:
    return value


async def test_what_changed_while_the_connection_was_lost_is_seen(
    store: ZooKeeperStore, linked: ZooKeeperStore, link: Link
) -> None:
    seen: list[Membership] = []

    async def watch() -> None:
        async for found in linked.membership():
            seen.append(found)

    watching = asyncio.create_task(watch())
    await until(lambda: _is(bool(seen)))
    link.lose_requests = link.lose_answers = True  # a network that swallows everything
    await store.register(registration(2))
    epoch = await elected(store, 2)
    assert await store.append(b"one", epoch) == 1
    assert len(seen) == 1
    link.cut()
    await until(lambda: _is(seen[-1].controller_id == 2 and len(seen[-1].members) == 1))
    assert await deltas(linked) == [b"one"]
    watching.cancel()


async def test_no_server_is_a_clear_error_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        store = ZooKeeperStore(f"127.0.0.1:{port}/x", session_timeout_ms=2000, connection_timeout_ms=200)
        async with asyncio.timeout(10):
            with pytest.raises(StorageError, match=rf"no ZooKeeper answered at 127.0.0.1:{port} within 200 ms"):
                await store.open()


async def test_closing_is_quick_when_the_server_is_silent(link: Link) -> None:
    async with opened(link.hosts) as store:
        epoch = await elected(store)
        link.lose_requests = link.lose_answers = True
        appending = asyncio.create_task(store.append(b"", epoch))
        await link.lost.wait()
        async with asyncio.timeout(10):
            await store.close()
        with pytest.raises(StorageError, match="closed"):
            await appending


# --- a session that expires -------------------------------------------------------------------------------------------


async def test_an_expired_session_loses_everything_and_may_begin_again(
    store: ZooKeeperStore, zookeeper_hosts: str
) -> None:
    async with opened(zookeeper_hosts) as other:
        broker_epoch = await store.register(registration(1))
        epoch = await elected(store)
        await store.append(b"one", epoch)
        following, watching = store.follow(0), store.membership()
        assert await anext(following) == (1, b"one")
        assert len((await anext(watching)).members) == 1
        session = asyncio.create_task(states(store, CONNECTED, EXPIRED))
        await asyncio.sleep(0)
        expire(store)
        assert (await membership(other, lambda found: not found.members)).controller_id is None
        assert (await session)[-2:] == [EXPIRED, CONNECTED]
        with pytest.raises(Fenced):
            await store.append(b"two", epoch)
        with pytest.raises(Fenced):
            await store.write_snapshot(Snapshot(1, b""), epoch)
        assert await store.register(registration(1)) > broker_epoch
        second = await elected(store)
        assert second > epoch
        await store.append(b"three", second)
        async with asyncio.timeout(20):
            assert await anext(following) == (2, b"three")
            async for found in watching:
                if found.controller_epoch == second:
                    assert len(found.members) == 1
                    break
        await following.aclose()
        await watching.aclose()


async def test_an_election_is_not_won_by_a_session_that_ends_before_its_author_hears_of_it(
    store: ZooKeeperStore, zookeeper_hosts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = store._session
    send = session.multi

    async def send_and_expire(operations: Sequence[Operation]) -> Refusal | None:
        monkeypatch.setattr(session, "multi", send)
        refusal = await send(operations)
        number = session.number
        expire(store)
        await until(lambda: _is(session.number != number))
        return refusal

    async with opened(zookeeper_hosts) as other:
        monkeypatch.setattr(session, "multi", send_and_expire)
        epoch = await elected(store)
        found = await membership(other, lambda _: True)
        assert (found.controller_id, found.controller_epoch) == (1, epoch)
        assert epoch == 2, "the first one ended with its session"
        assert await store.append(b"one", epoch) == 1


async def test_expiry_is_never_skipped() -> None:
    queue = _StateQueue(CONNECTED)

    def put(*changes: SessionState) -> None:
        for change in changes:
            queue.put(change)

    async def read(count: int) -> list[SessionState | None]:
        return [await queue.get() for _ in range(count)]

    put(SUSPENDED, CONNECTED, SUSPENDED)
    assert await read(1) == [SUSPENDED]
    put(CONNECTED, SUSPENDED, EXPIRED, CONNECTED, SUSPENDED, CONNECTED)
    assert await read(2) == [EXPIRED, CONNECTED]
    put(EXPIRED, CONNECTED, EXPIRED)
    assert await read(1) == [EXPIRED]
    queue.end()
    assert await read(1) == [None]


# --- what is in ZooKeeper ---------------------------------------------------------------------------------------------


@pytest.fixture
def raw(zookeeper_hosts: str) -> Any:
    """A plain client at the root of the test's path."""
    hosts, _, root = zookeeper_hosts.partition("/")
    outer = KazooClient(hosts=hosts)
    outer.start()
    outer.ensure_path(f"/{root}")
    outer.stop()
    outer.close()
    client = KazooClient(hosts=zookeeper_hosts)
    client.start()
    yield client
    client.stop()
    client.close()


async def test_a_path_with_something_else_is_refused(raw: Any, zookeeper_hosts: str) -> None:
    raw.create("/brokers")
    with pytest.raises(StorageError, match=r"holds something else .*give the cluster a path of its own"):
        await ZooKeeperStore(zookeeper_hosts).open()


async def test_a_later_format_is_refused(raw: Any, zookeeper_hosts: str) -> None:
    raw.create("/metadata", b'{"format":99}')
    with pytest.raises(StorageError, match="has format 99, this version reads 1"):
        await ZooKeeperStore(zookeeper_hosts).open()


async def test_chunks_nobody_points_to_are_removed(raw: Any, zookeeper_hosts: str) -> None:
    async with opened(zookeeper_hosts) as store:
        epoch = await elected(store)
        for number in (0, 1, 2):
            if number:
                await store.append(bytes([number]), epoch)
            raw.create(f"/metadata/snapshots/s-{number:010d}-0", b"left by a controller that died")
            raw.create(f"/metadata/snapshots/s-{number:010d}-7", b"left by a controller that died")
            await store.write_snapshot(Snapshot(number, b"image %d" % number), epoch)
            assert raw.get_children("/metadata/snapshots") == [f"s-{number:010d}-0"]
            assert await store.read_snapshot() == Snapshot(number, b"image %d" % number)
        assert raw.get_children("/metadata/deltas") == []


async def test_a_long_log_is_trimmed_whole(raw: Any, zookeeper_hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zookeeper_module, "_TRIM_AT_A_TIME", 10)
    async with opened(zookeeper_hosts) as store:
        epoch = await elected(store)
        for _ in range(25):
            await store.append(b"x", epoch)
        await store.write_snapshot(Snapshot(24, b"image"), epoch)
        assert raw.get_children("/metadata/deltas") == ["d-0000000025"]


async def test_a_delta_that_is_too_large_is_refused_and_leaves_no_gap(store: ZooKeeperStore) -> None:
    epoch = await elected(store)
    with pytest.raises(StorageError, match="more than ZooKeeper takes"):
        await store.append(random.Random(1).randbytes(1_000_000), epoch)
    assert await store.append(random.Random(1).randbytes(900_000), epoch) == 1
    assert await store.end() == 1


async def test_damage_is_a_clear_error(raw: Any, zookeeper_hosts: str) -> None:
    async with opened(zookeeper_hosts) as store:
        epoch = await elected(store)
        await store.append(b"x" * 5000, epoch)
        for damage in (b"", b"z", b"?....x", b"z\0\0\0\1not zlib"):
            raw.set("/metadata/deltas/d-0000000001", damage)
            with pytest.raises(StorageError, match="damaged"):
                await deltas(store)


async def test_what_is_not_allowed_is_a_clear_error(raw: Any, zookeeper_hosts: str) -> None:
    async with opened(zookeeper_hosts) as store:
        raw.set_acls("/brokers/ids", [make_acl("world", "anyone", read=True)])
        raw.set_acls("/metadata/deltas", [make_acl("world", "anyone", create=True)])
        async with asyncio.timeout(20):
            with pytest.raises(StorageError, match=r"not allowed by ZooKeeper .* to write: it asks for a login"):
                await store.register(registration(1))
            with pytest.raises(StorageError, match=r"not allowed .* to read .*/metadata/deltas: it asks for a login"):
                await store.end()


async def test_znodes_that_are_gone_are_a_clear_error(raw: Any, zookeeper_hosts: str) -> None:
    async with opened(zookeeper_hosts) as store:
        raw.delete("/metadata/snapshot")
        with pytest.raises(StorageError, match="lost the cluster's metadata: /metadata/snapshot"):
            await store.end()


@pytest.mark.parametrize("hosts", ["", ":2181", "a:b", "h:99999999"])
def test_a_bad_address_is_a_clear_error(hosts: str) -> None:
    with pytest.raises(ConfigError, match=r"zookeeper\.connect"):
        ZooKeeperStore(hosts)


def test_addresses() -> None:
    assert repr(ZooKeeperStore("a:1,b:2/x/y/")) == "ZooKeeperStore(a:1,b:2/x/y, suspended)"
    assert ZooKeeperStore("a").hosts == "a"
