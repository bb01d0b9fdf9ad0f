"""What every metadata store promises (see `millrace.metadata.store`), held by every store there is.

A store joins by adding a factory: called several times, it gives sessions on the same backing.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from millrace.errors import StorageError
from millrace.metadata.deltas import PartitionState, TopicCreated, encode
from millrace.metadata.embedded import Database, EmbeddedStore
from millrace.metadata.store import (
    BrokerRegistration,
    Fenced,
    Member,
    Membership,
    MetadataStore,
    SessionState,
    Snapshot,
    Trimmed,
)
from millrace.metadata.zookeeper import ZooKeeperStore
from support.metadata import ENDPOINT

NewSession = Callable[[], MetadataStore]


def embedded_in_memory() -> NewSession:
    database = Database()
    return lambda: EmbeddedStore(database)


def embedded_in_a_file(directory: Path) -> NewSession:
    database = Database(directory / "metadata.db")
    return lambda: EmbeddedStore(database)


def in_zookeeper(hosts: str) -> NewSession:
    return lambda: ZooKeeperStore(hosts, session_timeout_ms=4000)


@pytest.fixture(params=["memory", "file", "zookeeper"])
def new_session(request: pytest.FixtureRequest, tmp_path: Path) -> NewSession:
    match request.param:
        case "memory":
            return embedded_in_memory()
        case "file":
            return embedded_in_a_file(tmp_path)
        case _:
            return in_zookeeper(request.getfixturevalue("zookeeper_hosts"))


@pytest.fixture
async def store(new_session: NewSession) -> AsyncIterator[MetadataStore]:
    session = new_session()
    await session.open()
    yield session
    await session.close()


def registration(broker_id: int, rack: str | None = None) -> BrokerRegistration:
    return BrokerRegistration(broker_id, (ENDPOINT,), rack)


async def take(store: MetadataStore, after: int, count: int) -> list[tuple[int, bytes]]:
    taken = []
    async with aclosing(store.follow(after)) as deltas:
        async for delta in deltas:
            taken.append(delta)
            if len(taken) == count:
                break
    return taken


async def members(store: MetadataStore) -> Membership:
    async with aclosing(store.membership()) as memberships:
        return await anext(memberships)


async def elected(store: MetadataStore, broker_id: int = 1) -> int:
    epoch = await store.elect(broker_id)
    assert epoch is not None
    return epoch


async def test_deltas_are_numbered_from_one_and_read_in_order(store: MetadataStore) -> None:
    epoch = await elected(store)
    assert await store.end() == 0
    assert [await store.append(bytes([number]), epoch) for number in range(5)] == [1, 2, 3, 4, 5]
    assert await store.end() == 5
    assert await take(store, 0, 5) == [(number + 1, bytes([number])) for number in range(5)]
    assert await take(store, 3, 2) == [(4, b"\x03"), (5, b"\x04")]


async def test_a_follower_waits_for_what_is_to_come(store: MetadataStore, new_session: NewSession) -> None:
    follower = new_session()
    await follower.open()
    epoch = await elected(store)
    waiting = asyncio.create_task(take(follower, 0, 3))
    await asyncio.sleep(0)
    for data in (b"a", b"b", b"c"):
        await store.append(data, epoch)
    assert await waiting == [(1, b"a"), (2, b"b"), (3, b"c")]
    await follower.close()


async def test_following_ends_with_the_session(store: MetadataStore, new_session: NewSession) -> None:
    follower = new_session()
    await follower.open()
    seen = asyncio.Event()

    async def follow() -> list[tuple[int, bytes]]:
        return [delta async for delta in follower.follow(0)]

    async def watch() -> None:
        async for _ in follower.membership():
            seen.set()

    async def watch_session() -> list[SessionState]:
        return [state async for state in follower.sessions()]

    following, watching = asyncio.create_task(follow()), asyncio.create_task(watch())
    states = asyncio.create_task(watch_session())
    await seen.wait()
    await follower.close()
    await follower.close()  # harmless
    assert await following == []
    await watching
    assert await states == [SessionState.CONNECTED]


async def test_a_closed_session_is_a_clear_error(store: MetadataStore) -> None:
    epoch = await elected(store)
    await store.close()
    with pytest.raises(StorageError, match="closed"):
        await store.append(b"late", epoch)
    with pytest.raises(StorageError, match="closed"):
        await store.read_snapshot()


async def test_there_is_one_controller_and_its_epoch_is_new(store: MetadataStore, new_session: NewSession) -> None:
    other = new_session()
    await other.open()
    await store.register(registration(1))
    first = await elected(store, 1)
    assert await other.elect(2) is None
    assert await other.elect(2, replacing=first - 1) is None
    second = await other.elect(2, replacing=first)
    assert second is not None and second > first
    with pytest.raises(Fenced):
        await store.append(b"late", first)
    with pytest.raises(Fenced):
        await store.write_snapshot(Snapshot(0, b"late"), first)
    assert await other.append(b"first", second) == 1
    assert await take(other, 0, 1) == [(1, b"first")]
    await other.close()


async def test_only_one_of_two_takes_over(store: MetadataStore, new_session: NewSession) -> None:
    sessions = [new_session() for _ in range(4)]
    for session in sessions:
        await session.open()
    first = await elected(store, 1)
    epochs = await asyncio.gather(
        *(session.elect(number + 2, replacing=first) for number, session in enumerate(sessions))
    )
    winners = [epoch for epoch in epochs if epoch is not None]
    assert len(winners) == 1 and winners[0] > first
    for session in sessions:
        await session.close()


async def test_only_one_of_several_is_elected(store: MetadataStore, new_session: NewSession) -> None:
    sessions = [store, *(new_session() for _ in range(3))]
    for session in sessions[1:]:
        await session.open()
    for _ in range(5):
        epochs = await asyncio.gather(*(session.elect(number) for number, session in enumerate(sessions)))
        (winner,) = [number for number, epoch in enumerate(epochs) if epoch is not None]
        membership = await members(sessions[(winner + 1) % 4])
        assert (membership.controller_id, membership.controller_epoch) == (winner, epochs[winner])
        await sessions[winner].close()
        sessions[winner] = new_session()
        await sessions[winner].open()
    for session in sessions:
        await session.close()


async def test_controllership_ends_with_the_session(store: MetadataStore, new_session: NewSession) -> None:
    other = new_session()
    await other.open()
    await other.register(registration(2))
    first = await elected(other, 2)
    assert (await members(store)).controller_id == 2
    await other.close()
    async with asyncio.timeout(10):
        while (await members(store)).controller_id is not None:
            pass
    assert await elected(store, 1) > first


async def test_controllership_needs_no_registration(store: MetadataStore, new_session: NewSession) -> None:
    other = new_session()
    await other.open()
    await elected(other, 2)
    await other.close()
    await elected(store, 1)
    assert (await members(store)).controller_id == 1


async def test_broker_epochs_only_grow(store: MetadataStore) -> None:
    epochs = [await store.register(registration(broker_id)) for broker_id in (1, 2, 1, 1, 3)]
    assert epochs == sorted(set(epochs))
    assert (await members(store)).members == (
        Member(registration(1), epochs[3]),
        Member(registration(2), epochs[1]),
        Member(registration(3), epochs[4]),
    )


async def test_registrations_end_with_their_session(store: MetadataStore, new_session: NewSession) -> None:
    other = new_session()
    await other.open()
    await store.register(registration(1))
    await other.register(registration(2, "left"))
    seen = store.membership()
    assert [member.registration for member in (await anext(seen)).members] == [registration(1), registration(2, "left")]
    await other.close()
    async with asyncio.timeout(10):
        while len((await anext(seen)).members) != 1:
            pass
    await seen.aclose()


async def test_a_returning_broker_replaces_its_old_session(store: MetadataStore, new_session: NewSession) -> None:
    old_epoch = await store.register(registration(1))
    returned = new_session()
    await returned.open()
    new_epoch = await returned.register(registration(1, "elsewhere"))
    assert new_epoch > old_epoch
    await store.close()  # what the old session leaves behind does not touch the new one
    assert (await members(returned)).members == (Member(registration(1, "elsewhere"), new_epoch),)
    await returned.close()


async def test_snapshots_replace_deltas(store: MetadataStore) -> None:
    assert await store.read_snapshot() is None
    epoch = await elected(store)
    for number in range(1, 6):
        await store.append(bytes([number]), epoch)
    await store.write_snapshot(Snapshot(3, b"first three"), epoch)
    assert await store.read_snapshot() == Snapshot(3, b"first three")
    assert await take(store, 3, 2) == [(4, b"\x04"), (5, b"\x05")]
    with pytest.raises(Trimmed):
        await take(store, 1, 1)
    await store.write_snapshot(Snapshot(5, b"all"), epoch)
    assert await store.read_snapshot() == Snapshot(5, b"all")
    assert await store.end() == 5
    assert await store.append(b"next", epoch) == 6
    assert await take(store, 5, 1) == [(6, b"next")]


async def test_a_follower_that_is_behind_when_deltas_are_trimmed_is_told(
    store: MetadataStore, new_session: NewSession
) -> None:
    follower = new_session()
    await follower.open()
    epoch = await elected(store)
    for number in range(1, 4):
        await store.append(bytes([number]), epoch)
    deltas = follower.follow(0)
    assert await anext(deltas) == (1, b"\x01")
    for number in range(4, 101):
        await store.append(bytes([number]), epoch)
    await store.write_snapshot(Snapshot(100, b"a hundred"), epoch)
    with pytest.raises(Trimmed):
        async with asyncio.timeout(10):
            async for _ in deltas:
                pass
    snapshot = await follower.read_snapshot()
    assert snapshot == Snapshot(100, b"a hundred")
    await store.append(b"next", epoch)
    assert await take(follower, snapshot.index, 1) == [(101, b"next")]
    await follower.close()


async def test_an_older_snapshot_does_not_replace_a_newer_one(store: MetadataStore) -> None:
    epoch = await elected(store)
    for number in range(1, 6):
        await store.append(bytes([number]), epoch)
    await store.write_snapshot(Snapshot(4, b"four"), epoch)
    await store.write_snapshot(Snapshot(2, b"two"), epoch)
    assert await store.read_snapshot() == Snapshot(4, b"four")
    assert await store.end() == 5
    assert await take(store, 4, 1) == [(5, b"\x05")]


async def test_large_deltas_and_snapshots_come_back_whole(store: MetadataStore) -> None:
    states = tuple(PartitionState((1, 2, 3), (1, 2, 3), 1 + number % 3) for number in range(2000))
    delta = encode([TopicCreated("big", uuid.UUID(int=7), states)])
    noise = random.Random(1).randbytes(1_500_000)
    epoch = await elected(store)
    assert await store.append(delta, epoch) == 1
    assert await take(store, 0, 1) == [(1, delta)]
    await store.write_snapshot(Snapshot(1, noise), epoch)
    assert await store.read_snapshot() == Snapshot(1, noise)
    await store.append(b"", epoch)
    await store.write_snapshot(Snapshot(2, b""), epoch)
    assert await store.read_snapshot() == Snapshot(2, b"")


async def test_everything_but_sessions_outlives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    store = EmbeddedStore.at(path)
    await store.open()
    broker_epoch = await store.register(registration(1))
    epoch = await elected(store)
    for number in range(1, 4):
        await store.append(bytes([number]), epoch)
    await store.write_snapshot(Snapshot(2, b"two"), epoch)
    await store.close()
    again = EmbeddedStore.at(path)
    await again.open()
    assert await members(again) == Membership((), None, epoch)
    assert await again.end() == 3
    assert await again.read_snapshot() == Snapshot(2, b"two")
    assert await take(again, 2, 1) == [(3, b"\x03")]
    assert await again.register(registration(1)) > broker_epoch
    assert await elected(again) > epoch
    with pytest.raises(Fenced):
        await again.append(b"late", epoch)
    await again.close()
