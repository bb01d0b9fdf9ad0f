"""A single broker's metadata moves to a cluster's store: all of it, once, and over a crash at any step."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.clock import SystemClock
from millrace.cluster.image import ClusterImage
from millrace.cluster.migration import MIGRATED_NAME, first_of_a_cluster, is_single, migrate
from millrace.cluster.view import MetadataView
from millrace.errors import ConfigError
from millrace.metadata.deltas import (
    BrokerRegistered,
    Change,
    ClusterCreated,
    ConfigChanged,
    ControllerChanged,
    Directories,
    PartitionState,
    ProducerIdsAllocated,
    ResourceType,
    TopicCreated,
    encode,
)
from millrace.metadata.embedded import Database, EmbeddedStore
from millrace.metadata.store import BrokerRegistration, Fenced, MetadataStore, Snapshot
from millrace.metadata.zookeeper import ZooKeeperStore
from millrace.storage.directory import LogDirectory
from millrace.storage.files import Files
from support.metadata import ENDPOINT

CLOCK = SystemClock()
DIRECTORY = "AAAAAAAAAAAAAAAAAAAAAQ"


def single(*, cluster_id: str = "alone", broker_id: int = 1) -> list[Change]:
    state = PartitionState((broker_id,), (broker_id,), broker_id, 7, 9, directories=(DIRECTORY,))
    return [
        ClusterCreated(cluster_id),
        ControllerChanged(broker_id, 40),
        BrokerRegistered(
            broker_id, 5000, (ENDPOINT,), directories=Directories((DIRECTORY,)), boot_id="boot", clean_epoch=4999
        ),
        *(TopicCreated(f"topic-{number}", uuid.UUID(int=number + 2), (state,) * 4) for number in range(3)),
        ConfigChanged(ResourceType.TOPIC, "topic-1", (("retention.ms", "1000"),)),
        ConfigChanged(ResourceType.GROUP, "workers", (("share.record.lock.duration.ms", "20000"),)),
        ConfigChanged(ResourceType.BROKER, "1", (("log.cleaner.threads", "2"),)),
        ProducerIdsAllocated(broker_id, 3000, 1000),
    ]


async def write(store: MetadataStore, changes: list[Change]) -> None:
    await store.open()
    epoch = await store.elect(1)
    assert epoch is not None
    await store.append(encode(changes), epoch)
    await store.close()


async def read(store: MetadataStore) -> ClusterImage:
    await store.open()
    try:
        return await MetadataView(store, CLOCK).load()
    finally:
        await store.close()


@pytest.fixture
async def data(tmp_path: Path) -> Path:
    """The log directory of a single broker."""
    directory = tmp_path / "data"
    directory.mkdir()
    await write(EmbeddedStore.at(directory / "metadata.db"), single())
    return directory


def assert_moved(image: ClusterImage) -> None:
    before = ClusterImage().apply(tuple(single()))
    assert image.cluster_id == "alone" and image.controller_epoch == 0
    assert dict(image.topics) == dict(before.topics)
    assert dict(image.configs) == dict(before.configs)
    assert image.next_producer_id == 3000
    (broker,) = image.brokers.values()
    assert broker == replace(before.brokers[1], broker_epoch=0), "the first registration in ZooKeeper has to be newer"


@pytest.fixture(params=["embedded", "zookeeper"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], MetadataStore]:
    """Sessions on the store of a cluster."""
    if request.param == "embedded":
        return lambda: EmbeddedStore(Database(tmp_path / "cluster.db"))
    hosts = request.getfixturevalue("zookeeper_hosts")
    return lambda: ZooKeeperStore(hosts)


async def test_everything_moves_and_the_file_is_put_aside(data: Path, cluster: Callable[[], MetadataStore]) -> None:
    assert is_single(data)
    moved = await migrate(data, 1, cluster(), CLOCK)
    assert len(moved.topics) == 3
    assert_moved(await read(cluster()))
    assert not is_single(data) and (data / MIGRATED_NAME).exists()
    with pytest.raises(FileNotFoundError):
        (data / "metadata.db-wal").stat()


async def test_an_image_that_is_larger_than_a_znode_moves_too(tmp_path: Path, zookeeper_hosts: str) -> None:
    settings = [
        ConfigChanged(ResourceType.GROUP, f"group-{number}", (("name", secrets.token_hex(4000)),))
        for number in range(300)
    ]
    await write(EmbeddedStore.at(tmp_path / "metadata.db"), [*single(), *settings])
    await migrate(tmp_path, 1, ZooKeeperStore(zookeeper_hosts), CLOCK)
    image = await read(ZooKeeperStore(zookeeper_hosts))
    assert all(image.config(each.resource_type, each.name) == dict(each.values) for each in settings)
    assert len(image.topics) == 3


async def test_the_log_goes_on_after_what_was_moved(data: Path, cluster: Callable[[], MetadataStore]) -> None:
    await migrate(data, 1, cluster(), CLOCK)
    await write(cluster(), [ControllerChanged(2, 2)])
    image = await read(cluster())
    assert (image.index, image.controller_id, len(image.topics)) == (2, 2, 3)


class Killed(EmbeddedStore):
    """A store whose process dies before or after the call of a number."""

    def __init__(self, database: Database, step: int, *, after: bool) -> None:
        super().__init__(database)
        self._left = step
        self._after = after

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in {"open", "close", "elect", "end", "read_snapshot", "write_snapshot"}:
            return found

        async def call(*arguments: Any, **named: Any) -> Any:
            self._left -= 1
            if not self._left and not self._after:
                os._exit(9)
            answer = await found(*arguments, **named)
            if not self._left:
                os._exit(9)
            return answer

        return call


def killed_at(step: int, *, after: bool, data: Path, cluster_path: Path) -> bool:
    """Whether a process that migrates died there; if not, it was through before."""
    child = os.fork()
    if not child:
        status = 1
        try:
            asyncio.run(migrate(data, 1, Killed(Database(cluster_path), step, after=after), CLOCK))
            status = 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in {0, 9}
    return status == 9


def crash_at_every_step(place: Path, *, after: bool) -> None:
    steps = 0
    while True:
        steps += 1
        home = place / str(steps)
        home.mkdir()
        asyncio.run(write(EmbeddedStore.at(home / "metadata.db"), single()))
        died = killed_at(steps, after=after, data=home, cluster_path=home / "cluster.db")
        assert is_single(home) == died, "only the rename makes a cluster of it"
        if not died:
            break
        # The single broker goes on as if nothing had happened, and its metadata changes.
        asyncio.run(write(EmbeddedStore.at(home / "metadata.db"), [TopicCreated("later", uuid.UUID(int=99), ())]))
        asyncio.run(migrate(home, 1, EmbeddedStore(Database(home / "cluster.db")), CLOCK))
        image = asyncio.run(read(EmbeddedStore(Database(home / "cluster.db"))))
        assert "later" in image.topics and len(image.topics) == 4, "what counts is what was written last"
    assert steps > 6


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_at_any_step_leaves_a_single_broker_or_a_cluster_and_never_half_of_one(
    tmp_path: Path, when: str
) -> None:
    """In a process of its own, which forks those that die: here are threads that a fork would not take along."""
    root = Path(__file__).resolve().parents[3]
    path = os.pathsep.join([str(root / "src"), str(root / "tests"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, str(tmp_path), when]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


async def test_whoever_was_cut_short_is_replaced_while_its_session_lives_on(data: Path, zookeeper_hosts: str) -> None:
    stuck = ZooKeeperStore(zookeeper_hosts, session_timeout_ms=30_000)
    await stuck.open()
    try:
        epoch = await stuck.elect(1)
        assert epoch is not None
        await migrate(data, 1, ZooKeeperStore(zookeeper_hosts), CLOCK)
        with pytest.raises(Fenced):
            await stuck.write_snapshot(Snapshot(5, encode([ClusterCreated("half")])), epoch)
    finally:
        await stuck.close()
    assert_moved(await read(ZooKeeperStore(zookeeper_hosts)))


async def test_another_cluster_is_not_written_over(data: Path, cluster: Callable[[], MetadataStore]) -> None:
    await write(cluster(), single(cluster_id="another"))
    with pytest.raises(ConfigError, match=r"has another cluster \(another\)"):
        await migrate(data, 1, cluster(), CLOCK)
    assert is_single(data) and (await read(cluster())).cluster_id == "another"


async def test_an_old_copy_is_not_written_over_its_own_cluster(
    data: Path, cluster: Callable[[], MetadataStore]
) -> None:
    copy = (data / "metadata.db").read_bytes()
    await migrate(data, 1, cluster(), CLOCK)
    await write(cluster(), [ControllerChanged(2, 2), TopicCreated("later", uuid.UUID(int=99), ())])
    (data / "metadata.db").write_bytes(copy)
    with pytest.raises(ConfigError, match=r"has gone on there: metadata\.db is a copy from before"):
        await migrate(data, 1, cluster(), CLOCK)
    assert "later" in (await read(cluster())).topics


async def test_a_cluster_that_is_being_started_is_left_alone(data: Path, zookeeper_hosts: str) -> None:
    other = ZooKeeperStore(zookeeper_hosts)
    await other.open()
    try:
        await other.register(BrokerRegistration(7, (ENDPOINT,)))
        with pytest.raises(ConfigError, match=r"run with this ZooKeeper \(7\)"):
            await migrate(data, 1, ZooKeeperStore(zookeeper_hosts), CLOCK)
    finally:
        await other.close()
    assert is_single(data)


async def test_a_broker_that_runs_is_left_alone(data: Path, cluster: Callable[[], MetadataStore]) -> None:
    running = LogDirectory(data, Files(), CLOCK)
    running.lock()
    try:
        with pytest.raises(ConfigError, match="is in use by another broker"):
            await migrate(data, 1, cluster(), CLOCK)
    finally:
        running.unlock()
    assert is_single(data)


def test_the_data_of_another_broker_is_not_taken_for_that_of_broker_one() -> None:
    with pytest.raises(ConfigError, match="was broker 5, not broker 1"):
        first_of_a_cluster(ClusterImage().apply(tuple(single(broker_id=5))), 1)


if __name__ == "__main__":
    crash_at_every_step(Path(sys.argv[1]), after=sys.argv[2] == "after")
