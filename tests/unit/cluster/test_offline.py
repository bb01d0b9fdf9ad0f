"""Users of a cluster that does not run: in a new store, in an old one, and never behind a controller's back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.clock import SystemClock
from millrace.cluster.controller import Controller
from millrace.cluster.image import ClusterImage
from millrace.cluster.offline import add_user_offline
from millrace.cluster.planning import NewTopic
from millrace.cluster.view import MetadataView
from millrace.config import BrokerConfig
from millrace.errors import ConfigError, StorageError
from millrace.metadata.deltas import Endpoint
from millrace.metadata.embedded import EmbeddedStore
from millrace.metadata.store import BrokerRegistration, MetadataStore
from millrace.metadata.zookeeper import ZooKeeperStore
from millrace.metadata.zookeeper_access import ZooKeeperAccess
from millrace.security.scram import ScramMechanism, new_credential
from support.checker_metadata import check_log, read_log

CLOCK = SystemClock()
SHA_512 = ScramMechanism.SCRAM_SHA_512
CREDENTIAL, ANOTHER = new_credential(SHA_512, "secret"), new_credential(SHA_512, "newer")
ENDPOINT = Endpoint("PLAINTEXT", "127.0.0.1", 9)


@pytest.fixture(params=["embedded", "zookeeper"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], MetadataStore]:
    if request.param == "embedded":
        return lambda: EmbeddedStore.at(tmp_path / "data" / "metadata.db")
    hosts = request.getfixturevalue("zookeeper_hosts")
    return lambda: ZooKeeperStore(hosts, session_timeout_ms=4000, access=ZooKeeperAccess("brokers", "secret"))


async def image_of(store: MetadataStore) -> ClusterImage:
    await store.open()
    try:
        return await MetadataView(store, CLOCK).load()
    finally:
        await store.close()


def with_directory(store: MetadataStore) -> MetadataStore:
    """A broker's log directory is there before its store is opened."""
    if isinstance(store, EmbeddedStore) and store.database.path is not None:
        store.database.path.parent.mkdir(exist_ok=True)
    return store


async def reign(store: MetadataStore) -> Controller:
    controller = Controller(store, BrokerConfig(), clock=CLOCK)
    await controller.load()
    async with asyncio.timeout(20):
        await controller.start([ENDPOINT])
    return controller


async def test_a_user_is_there_before_the_first_broker(make: Callable[[], MetadataStore]) -> None:
    await add_user_offline(make(), "broker", SHA_512, CREDENTIAL, CLOCK)
    controller = await reign(make())
    try:
        assert controller.is_controller and controller.image.cluster_id
        assert controller.image.users["broker", SHA_512] == CREDENTIAL
    finally:
        await controller.stop()


async def test_users_of_a_cluster_that_was_stopped(make: Callable[[], MetadataStore]) -> None:
    controller = await reign(with_directory(make()))
    await controller.create_topics([NewTopic("t", 1, 1)])
    before = controller.image
    await controller.stop()
    await add_user_offline(make(), "broker", SHA_512, CREDENTIAL, CLOCK)
    await add_user_offline(make(), "broker", SHA_512, ANOTHER, CLOCK)
    after = await image_of(make())
    assert dict(after.users.items()) == {("broker", SHA_512): ANOTHER}
    assert (after.cluster_id, set(after.topics)) == (before.cluster_id, {"t"})
    assert after.controller_epoch == before.controller_epoch + 2


async def test_a_cluster_that_runs_is_left_alone(make: Callable[[], MetadataStore]) -> None:
    store = with_directory(make())
    await store.open()
    await store.register(BrokerRegistration(7, (ENDPOINT,)))
    try:
        with pytest.raises((ConfigError, StorageError), match=r"broker 7 is registered|in use|locked"):
            await add_user_offline(make(), "broker", SHA_512, CREDENTIAL, CLOCK)
        assert await store.end() == 0
    finally:
        await store.close()


async def test_a_controller_without_a_registration_is_left_alone(zookeeper_hosts: str) -> None:
    store = ZooKeeperStore(zookeeper_hosts)
    await store.open()
    epoch = await store.elect(1)
    assert epoch is not None
    try:
        with pytest.raises(ConfigError, match="a controller is registered"):
            await add_user_offline(ZooKeeperStore(zookeeper_hosts), "broker", SHA_512, CREDENTIAL, CLOCK)
        assert await store.append(b"x", epoch) == 1
    finally:
        await store.close()


async def test_the_log_stays_one_of_controllers(zookeeper_hosts: str) -> None:
    await add_user_offline(ZooKeeperStore(zookeeper_hosts), "broker", SHA_512, CREDENTIAL, CLOCK)
    controller = await reign(ZooKeeperStore(zookeeper_hosts))
    await controller.stop()
    await add_user_offline(ZooKeeperStore(zookeeper_hosts), "broker", SHA_512, ANOTHER, CLOCK)
    log = await asyncio.to_thread(read_log, zookeeper_hosts)
    assert len(log) >= 3
    assert check_log(log) == []


async def test_whoever_was_cut_short_is_not_waited_for(zookeeper_hosts: str) -> None:
    """An offline change whose process was killed holds the office until its session ends; a broker takes it at once."""
    dead = ZooKeeperStore(zookeeper_hosts, session_timeout_ms=30_000)
    closing = dead.close
    dead.close = _nothing  # type: ignore[method-assign]
    await add_user_offline(dead, "broker", SHA_512, CREDENTIAL, CLOCK)
    controller = await reign(ZooKeeperStore(zookeeper_hosts))
    assert controller.image.users["broker", SHA_512] == CREDENTIAL
    await controller.stop()
    await closing()


async def _nothing() -> None:
    return
