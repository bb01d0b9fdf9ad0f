"""Replicas that move between the log directories of their brokers while they are written and read."""

from __future__ import annotations

import asyncio
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from millrace.client.connection import Connection
from millrace.clock import ManualClock, SystemClock
from millrace.metadata.deltas import PartitionState
from millrace.replication.partition import Partition
from millrace.storage.files import Files
from millrace.storage.log import Log
from millrace.storage.recovery import LogState
from millrace.storage.settings import FlushMode, LogConfig
from millrace.testing import Cluster
from millrace.wire.messages.log_dirs import AlterReplicaLogDirsRequest, DescribeLogDirsRequest
from millrace.wire.schema import Request
from support.batches import NOW_MS, batch

MOVES = 6


def ask(cluster: Cluster, request: Request, version: int) -> Any:
    async def send() -> Any:
        host, port = cluster.bootstrap_servers.split(",")[0].split(":")
        connection = await Connection.open(host, int(port), client_id="test", timeout_ms=10_000, clock=SystemClock())
        try:
            return await connection.request(request, version)
        finally:
            await connection.close()

    return asyncio.run(send())


def move(cluster: Cluster, path: Path) -> None:
    cls = AlterReplicaLogDirsRequest
    topic = cls.AlterReplicaLogDirTopic(name="t", partitions=[0])
    response = ask(cluster, cls(dirs=[cls.AlterReplicaLogDir(path=str(path), topics=[topic])]), 2)
    assert [each.error_code for topic in response.results for each in topic.partitions] == [0]


def places(cluster: Cluster) -> list[tuple[str, bool]]:
    response = ask(cluster, DescribeLogDirsRequest(topics=None), 4)
    return [
        (result.log_dir, partition.is_future_key)
        for result in response.results
        for topic in result.topics
        if topic.name == "t"
        for partition in topic.partitions
    ]


def wait_for_move(cluster: Cluster, path: Path) -> None:
    deadline = time.monotonic() + 20
    while places(cluster) != [(str(path), False)]:
        assert time.monotonic() < deadline, "the replica did not move"
        time.sleep(0.02)


@pytest.mark.parametrize("flush_mode", ["os", "group"])
def test_nothing_is_lost_and_nobody_notices(tmp_path: Path, flush_mode: str) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    settings = {"log.dirs": ",".join(map(str, directories)), "flush.mode": flush_mode, "log.segment.bytes": "1048576"}
    with Cluster(settings=settings) as cluster:
        cluster.create_topic("t", config={"segment.bytes": "1048576"})
        failures: list[str] = []

        def told(error: object, _message: object) -> None:
            if error is not None:
                failures.append(str(error))

        producer = Producer(
            {"bootstrap.servers": cluster.bootstrap_servers, "enable.idempotence": True, "linger.ms": 1, "log_level": 0}
        )
        sent = 0
        for turn in range(MOVES):
            target = directories[turn % 2]
            move(cluster, target)
            deadline = time.monotonic() + 20
            while True:
                for _ in range(100):
                    producer.produce("t", b"%d" % sent + b" " * 3000, on_delivery=told)
                    sent += 1
                assert producer.flush(20) == 0
                if places(cluster) == [(str(target), False)]:
                    break
                assert time.monotonic() < deadline, "the replica did not move"
        assert not failures
        cluster.restart()
        assert places(cluster) == [(str(directories[(MOVES - 1) % 2]), False)]
        consumer = Consumer({"bootstrap.servers": cluster.bootstrap_servers, "group.id": "g", "log_level": 0})
        consumer.assign([TopicPartition("t", 0, 0)])
        found: list[int] = []
        deadline = time.monotonic() + 30
        while len(found) < sent and time.monotonic() < deadline:
            found += [int(each.value() or b"") for each in consumer.consume(1000, 0.5) if each.error() is None]
        consumer.close()
        assert found == list(range(sent))


def test_a_replica_that_moves_is_shown_twice_and_stays_if_the_broker_stops(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    name = "replica.alter.log.dirs.io.max.bytes.per.second"
    settings = {"log.dirs": ",".join(map(str, directories)), name: "1000"}
    with Cluster(settings=settings) as cluster:
        cluster.create_topic("t")
        producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
        for _ in range(30):
            producer.produce("t", b"x" * 100_000)
        assert producer.flush(20) == 0
        ((path, _),) = places(cluster)
        other = next(each for each in directories if str(each) != path)
        move(cluster, other)
        assert sorted(places(cluster)) == sorted([(path, False), (str(other), True)])
        cluster.restart()
        assert places(cluster) == [(path, False)]
        move(cluster, Path(path))
        assert places(cluster) == [(path, False)]
    assert not list(other.glob("t-0*"))


def test_a_leader_goes_on_with_the_log_that_has_moved(tmp_path: Path) -> None:
    """What is committed, who waits for it and which epoch is written do not depend on where the log lies."""
    clock = ManualClock(NOW_MS)
    state = PartitionState((1, 2), (1, 2), 1, leader_epoch=4)
    config = LogConfig(flush_mode=FlushMode.GROUP)
    log = Log.open(tmp_path, config, clock=clock, files=Files())
    partition = Partition("t", 0, uuid.uuid4(), open_log=lambda: log, clock=clock, broker_id=1)
    partition.lead(state)
    told: list[Exception | None] = []
    flushed: list[bool] = []
    for _ in range(3):
        last = partition.append(batch(1)).last_offset
    log.flush()
    partition.serve_follower(2, 100, 2, 4, 1000, at_least_one=True)
    assert partition.when_committed(last, told.append)
    partition.flush_watchers.add(lambda: flushed.append(True))
    before = log
    partition.append(batch(1))
    log.close()
    log = Log.open(tmp_path, config, clock=clock, files=Files(), state=LogState(0, 4, clean=True))
    flushed.clear()
    partition.reopen_log()
    assert partition.log is log
    assert not before.on_flushed
    assert flushed  # a follower that waited for the old log to be flushed looks again
    assert (partition.high_watermark.offset, partition.latest_offset()) == (2, 2)
    assert not told
    assert partition.append(batch(1)).base_offset == 4
    assert log.end_offset_for_epoch(4) == (4, 5)
    log.flush()
    partition.serve_follower(2, 100, 5, 4, 1000, at_least_one=True)
    assert told == [None]
    assert partition.high_watermark.offset == 5
    log.close()
