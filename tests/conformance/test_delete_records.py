"""DeleteRecords on three brokers: the answer means that no live replica has the records any more."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from millrace.errors import ErrorCode
from millrace.testing import Cluster
from millrace.wire.messages.records import DeleteRecordsRequest
from support.on_loop import on_loop
from support.raw import RawClient, batch

# An idle follower's fetch waits this long: longer than any of these tests takes, if nobody has to wait for it.
PATIENT = {"replica.fetch.wait.max.ms": "25000"}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(brokers=3, settings=PATIENT) as running:
        running.create_topic("t")
        yield running


def leading(cluster: Cluster) -> tuple[int, RawClient]:
    addresses = [(host, int(port)) for host, port in (each.split(":") for each in cluster.bootstrap_servers.split(","))]
    with RawClient(addresses[0]) as client:
        (partition,) = client.topic("t").partitions
    return partition.leader_id, RawClient(addresses[partition.leader_id - 1])


def delete_before(client: RawClient, offset: int, timeout_ms: int = 20_000) -> tuple[int, int]:
    item = DeleteRecordsRequest.DeleteRecordsPartition(partition_index=0, offset=offset)
    topic = DeleteRecordsRequest.DeleteRecordsTopic(name="t", partitions=[item])
    answer = client.call(DeleteRecordsRequest(topics=[topic], timeout_ms=timeout_ms), 2, within_s=60)
    ((found,),) = [each.partitions for each in answer.topics]
    return found.error_code, found.low_watermark


def starts(cluster: Cluster) -> dict[int, int]:
    def look() -> dict[int, int]:
        found = {}
        for broker_id, broker in cluster._brokers.items():
            assert broker.services is not None
            partition = broker.services.replicas.held("t", 0)
            assert partition is not None
            found[broker_id] = partition.log.start_offset
        return found

    return on_loop(cluster, look)


def test_the_answer_comes_when_every_replica_has_forgotten(cluster: Cluster) -> None:
    _, client = leading(cluster)
    with client:
        for number in range(1, 6):
            assert client.produce("t", batch(b"a", b"b")).error_code == 0
            assert delete_before(client, -1) == (0, 2 * number), "told at once, not when a fetch has waited in vain"
            assert starts(cluster) == dict.fromkeys((1, 2, 3), 2 * number)
        assert delete_before(client, 3) == (0, 10), "already gone"


def test_a_broker_that_is_down_is_not_waited_for(cluster: Cluster) -> None:
    leader, client = leading(cluster)
    with client:
        assert client.produce("t", batch(b"a", b"b")).error_code == 0
        gone = next(broker_id for broker_id in (1, 2, 3) if broker_id != leader)
        cluster.stop_broker(gone)
        assert delete_before(client, 1) == (0, 1)
        assert set(starts(cluster).values()) == {1}
        cluster.start_broker(gone)
        deadline = time.monotonic() + 30
        while starts(cluster)[gone] != 1:
            assert time.monotonic() < deadline, "it never heard of the deletion"
            time.sleep(0.02)


def test_a_follower_that_does_not_answer_is_waited_for_as_long_as_asked(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, client = leading(cluster)
    with client:
        assert client.produce("t", batch(b"a", b"b")).error_code == 0
        follower = cluster._brokers[next(broker_id for broker_id in (1, 2, 3) if broker_id != leader)]
        assert follower.services is not None
        partition = follower.services.replicas.held("t", 0)
        assert partition is not None
        monkeypatch.setattr(partition, "follow_leader_marks", lambda *_: None)
        assert delete_before(client, 1, timeout_ms=300) == (ErrorCode.REQUEST_TIMED_OUT, -1)
        monkeypatch.undo()
        assert delete_before(client, 2) == (0, 2)
