"""Replication quotas: the bucket on a clock of its own, then replicas that are filled under a limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from millrace.client.connection import Connection
from millrace.clock import ManualClock, SystemClock
from millrace.metadata.deltas import ResourceType
from millrace.replication.partition import Partition
from millrace.replication.throttle import BURST_S, LONGEST_WAIT_S, ReplicationQuota, is_throttled
from millrace.testing import Cluster
from millrace.wire.messages.configs import IncrementalAlterConfigsRequest
from millrace.wire.messages.partitions import AlterPartitionReassignmentsRequest
from millrace.wire.schema import Request

TOPIC, BROKER = 2, 4
SIZE_BYTES = 5_000_000
RECORD_BYTES = 50_000
SIDES = ["leader", "follower"]


class TestQuota:
    def quota(self, rate: int = 1000) -> tuple[ManualClock, ReplicationQuota]:
        clock = ManualClock()
        return clock, ReplicationQuota(rate, clock)

    def test_what_is_taken_too_much_has_to_flow_in(self) -> None:
        clock, quota = self.quota()
        assert quota.wait_s() == 0
        quota.take(1000 * BURST_S + 100)
        assert quota.wait_s() == pytest.approx(0.101)
        clock.advance(quota.wait_s())
        assert quota.wait_s() == 0

    def test_over_time_the_rate_holds(self) -> None:
        clock, quota = self.quota()
        taken = 0
        while clock.monotonic() < 60:
            wait_s = quota.wait_s()
            clock.advance(wait_s)
            if not quota.wait_s():
                quota.take(700)
                taken += 700
        assert 60_000 - 700 <= taken <= 60_000 + 1000 * BURST_S + 700

    def test_idle_time_is_not_saved_up(self) -> None:
        clock, quota = self.quota()
        clock.advance(3600)
        quota.take(1000 * BURST_S)
        assert quota.wait_s() > 0

    def test_nobody_waits_long_before_looking_again(self) -> None:
        _, quota = self.quota()
        quota.take(10**9)
        assert quota.wait_s() == LONGEST_WAIT_S

    def test_a_rate_of_zero_lets_nothing_through(self) -> None:
        clock, quota = self.quota(0)
        clock.advance(3600)
        assert quota.wait_s() == LONGEST_WAIT_S

    def test_another_rate_starts_afresh(self) -> None:
        _, quota = self.quota()
        quota.take(10**9)
        quota.set_rate(1000)
        assert quota.wait_s() > 0
        quota.set_rate(2000)
        assert quota.wait_s() == 0

    def test_what_is_given_back_was_not_taken(self) -> None:
        _, quota = self.quota()
        quota.take(5000)
        quota.take(-5000)
        assert quota.wait_s() == 0


@pytest.mark.parametrize(
    ("replicas", "found"),
    [((), False), (("*",), True), (("0:2", "1:1"), True), (("1:2", "0:1"), False), (("11:1", "1:11"), False)],
)
def test_who_is_named(replicas: tuple[str, ...], found: bool) -> None:
    assert is_throttled(replicas, 1, 1) == found


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(brokers=3) as running:
        yield running


def ask(cluster: Cluster, request: Request, version: int) -> None:
    async def send() -> None:
        host, port = cluster.bootstrap_servers.split(",")[0].split(":")
        connection = await Connection.open(host, int(port), client_id="test", timeout_ms=10_000, clock=SystemClock())
        try:
            response = await connection.request(request, version)
            assert not any(getattr(each, "error_code", 0) for each in response.responses)
        finally:
            await connection.close()

    asyncio.run(send())


def limit(cluster: Cluster, side: str, rate: int | None, replicas: str = "*") -> None:
    """Let `side` send or fetch at most `rate` bytes per second for topic t, on every broker; None lifts that."""
    names = f"{side}.replication.throttled.rate", f"{side}.replication.throttled.replicas"
    cls = IncrementalAlterConfigsRequest
    resources = []
    for kind, resource, name, value in (
        *((BROKER, str(broker_id), names[0], str(rate)) for broker_id in (1, 2, 3)),
        (TOPIC, "t", names[1], replicas),
    ):
        config = cls.AlterableConfig(name=name, config_operation=rate is None, value=None if rate is None else value)
        resources.append(cls.AlterConfigsResource(resource_type=kind, resource_name=resource, configs=[config]))
    ask(cluster, cls(resources=resources), 1)
    wait_known(cluster, names[1], None if rate is None else replicas)


def wait_known(cluster: Cluster, name: str, value: str | None) -> None:
    """The controller answers when the setting is written down; a broker that reads it later would limit nobody yet."""
    deadline = time.monotonic() + 30
    for broker in cluster._brokers.values():
        assert broker.services is not None
        while broker.services.image.config(ResourceType.TOPIC, "t").get(name) != value:
            assert time.monotonic() < deadline, f"{broker} does not know that {name} is {value}"
            time.sleep(0.005)


def make(cluster: Cluster, replicas: list[int]) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    admin.create_topics([NewTopic("t", num_partitions=1, replica_assignment=[replicas])])["t"].result(10)


def fill(cluster: Cluster) -> None:
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "acks": "all", "log_level": 0})
    for _ in range(SIZE_BYTES // RECORD_BYTES):
        producer.produce("t", b"x" * RECORD_BYTES, partition=0)
    assert producer.flush(30) == 0


def add_replica(cluster: Cluster) -> None:
    cls = AlterPartitionReassignmentsRequest
    move = cls.ReassignablePartition(partition_index=0, replicas=[1, 2])
    ask(cluster, cls(topics=[cls.ReassignableTopic(name="t", partitions=[move])]), 0)


def in_sync(cluster: Cluster) -> set[int]:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    return set(admin.list_topics("t", timeout=10).topics["t"].partitions[0].isrs)


def time_to_join(cluster: Cluster) -> float:
    started = time.monotonic()
    while in_sync(cluster) != {1, 2}:
        assert time.monotonic() < started + 30, "the new replica did not catch up"
        time.sleep(0.02)
    return time.monotonic() - started


@pytest.mark.parametrize("side", SIDES)
def test_a_new_replica_is_filled_at_the_limit(cluster: Cluster, side: str) -> None:
    make(cluster, [1])
    fill(cluster)
    limit(cluster, side, 2_000_000, "0:1" if side == "leader" else "0:2")
    add_replica(cluster)
    # A fetch of 1 MiB more than the rate allows is a debt that nobody waits for at the end.
    assert time_to_join(cluster) > (SIZE_BYTES - 1_048_576) / 2_000_000 - BURST_S - 0.2


@pytest.mark.parametrize("side", SIDES)
def test_a_replica_that_is_held_back_asks_seldom_and_goes_on_when_the_limit_is_lifted(
    cluster: Cluster, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(cluster, [1])
    fill(cluster)
    limit(cluster, side, 0)
    served: list[int] = []
    serve = Partition.serve_follower

    def count(self: Partition, *args: int, **options: Any) -> object:
        if self.topic == "t":  # other tests' clusters may live on in this process
            served.append(args[0])
        return serve(self, *args, **options)

    monkeypatch.setattr(Partition, "serve_follower", count)
    add_replica(cluster)
    time.sleep(1)
    assert in_sync(cluster) == {1}
    assert len(served) < 20
    limit(cluster, side, None)
    time_to_join(cluster)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("replicas", ["0:3", "*"])
def test_only_the_named_replicas_that_are_behind_are_held_back(cluster: Cluster, side: str, replicas: str) -> None:
    """A broker that is not named is not limited, and nobody who is in sync: commits wait for them."""
    make(cluster, [1] if replicas == "0:3" else [1, 2])
    limit(cluster, side, 0, replicas)
    fill(cluster)
    if replicas == "0:3":
        add_replica(cluster)
    time_to_join(cluster)
